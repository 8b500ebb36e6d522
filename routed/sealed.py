"""Between two blocks of a route tokens are sealed: whatever computes with them there would miss the routed ones."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from routed.nested import leaves, mapped

# What returns values of tokens, but no tensor.
READS = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__bool__", "__contains__",
         "__float__", "__int__", "__index__", "__complex__", "__dlpack__", "__reduce_ex__"}
WRITES = {"__set__", "__setitem__", "backward"}


class Sealed(Tensor):
    """The tokens that block `after` of a route has returned in a pass `run`; only the next block receives the raw ones.

    Sizes, types and devices may be read, lists and hooks may hold them, and they may move to another device.
    """

    raw: Tensor
    run: Any
    after: Any

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        sealed = next(part for part in (*leaves(args), *leaves(kwargs)) if isinstance(part, Sealed))
        is_write = name in WRITES or name.endswith("_") and not name.endswith("__") or "out" in kwargs
        if not is_write and name not in READS:
            result = function(*unsealed(args), **unsealed(kwargs))
            if result is sealed.raw:
                return sealed
            if name == "to" and args[0] is sealed:
                return seal(result, sealed.run, sealed.after)
            if not any(isinstance(part, Tensor) for part in leaves(result)):
                return result
        raise ValueError(f"After block {sealed.after.index} of {sealed.after.spec.path}, with some tokens on a route, "
                         f"the network or a hook computes with the others ({name}): a residual, skip, feature or loss "
                         f"outside of the blocks would miss the routed tokens. Name blocks that contain it, start or "
                         f"end the route there, or set probe=False if it treats each token alone.")


def seal(x: Tensor, run: Any, after: Any) -> Tensor:
    sealed = x.as_subclass(Sealed)
    sealed.raw, sealed.run, sealed.after = x, run, after
    return sealed


def unsealed(value: Any, check: Callable[[Sealed], None] = lambda sealed: None) -> Any:
    """Returns an argument or an output with raw tokens in it, after a check of those that are sealed."""
    def raw(part: Any) -> Any:
        if isinstance(part, Sealed):
            check(part)
            return part.raw
        return part

    return mapped(raw, value) if any(isinstance(part, Sealed) for part in leaves(value)) else value
