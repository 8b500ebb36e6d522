"""A network's blocks as `routed` sees them: their description, the names of their arguments, and what wraps them."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any

from torch import Tensor, nn

from routed.modules import plain_class


@dataclass(frozen=True)
class Blocks:
    """A list of blocks, and the arguments of a block that matter for routing, each by its name or its position.

    `along` maps each argument with a value per token to the axis of the tokens, in each tensor of a tuple, list or
    dict; a tuple of axes belongs to the parts of a tuple. The block receives (B, K, …), where each sample has its own
    rows. If the axis is 0, the table has no batch axis, and the block is called once for each sample. A negative axis
    counts from the end; if it is the first, the block broadcasts (B, K, …) itself. For what an axis cannot say there
    are the functions `pairs`, `fewer` and `by_place(axis)`, or one of your own: it gets the argument and a `Kept`. None
    declares that an argument has no value per token.
    """

    path: str
    along: Mapping[str | int, Any] = field(default_factory=dict)
    tokens: str | int = 0               # the argument that is routed
    text: str | int | None = None       # the argument with the text tokens, if text has its own stream
    out: int = 0                        # where the tokens are in what a block returns, if it is a tuple
    rejoins: bool = False               # the network changes all tokens between blocks, so each block puts them back
    per_sample: bool = False            # the block is called once for each sample, as where an axis is 0

    def modules_of(self, network: nn.Module, given: Any = None) -> list[nn.Module]:
        """Lists the blocks in a module or at this path; raises ValueError if the network has none there."""
        start: Any = network
        blocks = given if isinstance(given, nn.Module) else reduce(
            lambda part, name: getattr(part, name, None), self.path.split("."), start)
        if not isinstance(blocks, nn.ModuleList | nn.Sequential):
            raise ValueError(f"{type(network).__name__} has no {self.path} with several blocks. Lists of blocks in it: "
                             f"{lists_of_blocks(network)}.")
        return list(blocks)


@dataclass(frozen=True)
class Family:
    """A network's lists of blocks in call order, and which tokens of a sequence may be routed.

    They are contiguous. `front` counts the tokens before them from the network and its arguments: one number, or one
    for each sample (B,). `free` counts the tokens that may be routed, if there are others behind them. Text that has
    its own stream in one list, and none in the next, has joined the sequence there: in front, or with `text_last`
    behind all others.
    """

    lists: tuple[Blocks, ...]
    front: Callable[[nn.Module, dict[Any, Any]], Any] | None = None
    free: Callable[[nn.Module, dict[Any, Any]], int] | None = None
    text_last: bool = False


def gathered(value: Tensor, index: Tensor, axis: int) -> Tensor:
    """Returns the rows of an index (B, n) along an axis of a tensor (B or 1, …)."""
    # take_along_dim would make the sizes constants in a compiled graph.
    before, behind = value.shape[1:axis], value.shape[axis + 1:]
    index = index.view(len(index), *[1] * (axis - 1), -1, *[1] * len(behind)).expand(-1, *before, -1, *behind)
    return value.expand(len(index), *value.shape[1:]).gather(axis, index)


def fewer(count: Any, kept: Any) -> Any:
    """Reduces a number of tokens, for each sample or for all."""
    return count - kept.num_routed


def pairs(mask: Tensor, kept: Any) -> Tensor:
    """Reduces an attention mask (N, N), (B or 1, …, N, N) or (B·heads, N, N) to the kept tokens: (B, …, K, K)."""
    mask = mask if mask.ndim > 2 else mask[None, None]
    index, batch = kept.places(mask.shape[-1]), len(kept.ids)
    is_folded = mask.ndim == 3 and len(mask) > batch > 1 and len(mask) % batch == 0
    mask = mask.unflatten(0, (batch, -1)) if is_folded else mask
    mask = gathered(gathered(mask, index, mask.ndim - 2), index, mask.ndim - 1)
    return mask.flatten(0, 1) if is_folded else mask


def by_place(axis: int) -> Callable[..., Any]:
    """Wraps a module or function that rotates tokens by position: it receives all tokens, with 0 for routed ones."""
    def for_kept(rotate: Callable[..., Any], kept: Any) -> Callable[..., Any]:
        def rotated(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            length = x.shape[axis] + kept.num_routed      # of the stream, or of the image in it
            shape, places = [1] * x.ndim, kept.places(length)
            shape[0], shape[axis] = places.shape
            index = places.view(shape).expand_as(x)
            full = x.new_zeros(*x.shape[:axis], length, *x.shape[axis + 1:]).scatter(axis, index, x)
            return rotate(full, *args, **kwargs).gather(axis, index)
        return rotated
    return for_kept


@cache
def names_of(kind: Any) -> tuple[str, ...]:
    """Returns the argument names of a class of modules; those of `_forward` where forward passes all to it."""
    for forward in (kind.forward, getattr(kind, "_forward", None)):
        parts = list(inspect.signature(forward).parameters.values())[1:] if forward else []
        skipped: set[Any] = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        if any(part.kind == part.VAR_POSITIONAL for part in parts):     # others have no position behind it
            skipped.add(inspect.Parameter.KEYWORD_ONLY)
        if names := tuple(part.name for part in parts if part.kind not in skipped):
            return names
    return ()


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of a module's arguments in order."""
    return names_of(plain_class(module))


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module inside wrappers, such as those of DDP, PEFT, checkpoints and torch.compile.

    A wrapper has one child and a forward that names no argument.
    """
    while not argument_names(module):
        children = list(module.children())
        if len(children) != 1 or plain_class(children[0]).forward is nn.Module.forward:
            break
        [module] = children
    return module


def owner_of(network: nn.Module) -> type:
    """Returns the class whose forward a network runs."""
    owner = next(base for base in plain_class(network).__mro__ if "forward" in vars(base))
    # its blocks may be called from outside, as in a pipeline
    return plain_class(network) if owner is nn.Module else owner


def lists_of_blocks(network: nn.Module) -> str:
    """Names the lists of several blocks of one class in a network, as in `layers (28 of Block)`."""
    lists = [(name, part) for name, part in network.named_modules() if isinstance(part, nn.ModuleList | nn.Sequential)
             and len(part) > 1 and len({type(block) for block in part}) == 1 and isinstance(part[0], nn.Module)
             and any(part[0].children())]
    return ", ".join(f"{name} ({len(part)} of {type(part[0]).__name__})" for name, part in lists) or "none"
