"""Between two blocks of a route tokens are sealed: whatever computes with them there would miss the routed ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from routed.nested import leaves, mapped, rebuilt

# What returns values of tokens, but no tensor.
READS = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__bool__", "__contains__",
         "__float__", "__int__", "__index__", "__complex__", "__dlpack__", "__reduce_ex__"}
WRITES = {"__set__", "__setitem__", "backward"}
# What the backward of a reentrant checkpoint that a block puts around itself does, without gradients.
TENSOR: Any = Tensor
REENTRANT = TENSOR.requires_grad.__set__, TENSOR.grad.__get__, torch.autograd.backward


class Sealed(Tensor):
    """The tokens that block `after` of a route has returned in a pass `run`; only the next block receives the raw ones.

    Sizes, types and devices may be read, lists and hooks may hold them, and they may move to another device.
    """

    plain: Tensor
    run: Any
    after: Any

    @property
    def raw(self) -> Tensor:
        """The tokens with all that autograd has recorded, as where a function of ZeRO-3 returned them detached."""
        recorded: Tensor = TENSOR.__torch_function__(Tensor.as_subclass, (), (self, Tensor))
        if recorded.requires_grad and not self.plain.requires_grad:
            self.plain = recorded
        return self.plain

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        sealed = next(part for part in (*leaves(args), *leaves(kwargs)) if isinstance(part, Sealed))
        is_write = name in WRITES or name.endswith("_") and not name.endswith("__") or "out" in kwargs
        is_reentrant = function in REENTRANT and not torch.is_grad_enabled()
        if is_reentrant or not is_write and name not in READS:
            args, kwargs = mapped(lambda part: part.raw if isinstance(part, Sealed) else part, (args, kwargs))
            try:
                result = function(*args, **kwargs)
            except RuntimeError as error:   # as where lengths differ
                raise misses_tokens(sealed.after, f"computes with the others ({name})") from error
            if result is sealed.raw:
                return sealed
            if name == "detach" or name == "to" and (torch.is_grad_enabled() or not sealed.raw.requires_grad):
                return seal(result, sealed.run, sealed.after)
            if name == "view_as" and not torch.is_grad_enabled() and args[0] is args[1]:
                return result               # of a function that hooks on gradients pass a block's input through
            if is_reentrant or not any(isinstance(part, Tensor) for part in leaves(result)):
                return result
        raise misses_tokens(sealed.after, f"computes with the others ({name})")


def seal(x: Tensor, run: Any, after: Any) -> Tensor:
    sealed = x.as_subclass(Sealed)
    sealed.plain, sealed.run, sealed.after = x, run, after
    return sealed


def unsealed(value: Any, run: Any = None, block: Any = None) -> Any:
    """Returns raw tokens, also in a tuple, to a block on their route; lists remain, as a block may append to one."""
    if isinstance(value, Sealed):
        if block is not None and (value.run is not run or value.after.route is not block.route):
            raise misses_tokens(value.after, f"passes them to block {block.index}, in another pass or route")
        return value.raw
    if isinstance(value, tuple) and any(isinstance(part, Sealed) for part in leaves(value)):
        return rebuilt(value, [unsealed(part, run, block) for part in value])
    return value


def misses_tokens(after: Any, does: str) -> ValueError:
    """Returns the error about what is done with tokens between two blocks of a route."""
    return ValueError(f"After block {after.index} of {after.spec.path}, with some tokens on a route, the network or a "
                      f"hook {does}: a residual, skip, feature or loss outside of the blocks would miss the routed "
                      f"tokens. Name blocks that contain it, start or end the route there, or set probe=False if it "
                      f"treats each token alone.")
