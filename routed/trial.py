"""A block is tried before it is trusted: with its tokens in another order, it must return the same in that order.

Networks that are known by names alone, or described by their user, may have blocks that no description shows.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from routed.families import alone, bare

TRIED: WeakKeyDictionary = WeakKeyDictionary()      # of each network, what has been tried


@dataclass(frozen=True)
class Trial:
    """What a trial measured: the deviation is a share of what the block adds to its tokens, and so is the tolerance."""

    block: str
    deviation: float
    tolerance: float
    dtype: torch.dtype


class Trials:
    """Tries the blocks of one network, each kind of block and arguments once, and lists what that measured.

    `ordered` blocks depend on the order of their tokens (causal attention, scans), which a route leaves as it is.
    """

    def __init__(self, tried: set, ordered: bool = False):
        self.tried, self.ordered, self.rows = tried, ordered, []
        self.batches: set[int] = set()      # sizes that the network's call has for its samples
        self.left: tuple[int, Tensor] | None = None     # the latest block, and the tokens that it returned

    def read_call(self, given: Any) -> None:
        self.batches, self.left = {*lengths_of(given)}, None

    def check_batch(self, run: Any, block: int, x: Tensor) -> None:
        """Raises ValueError for a batch that the network's call has not, as a block may mix what it folds into it."""
        if self.batches and len(x) not in {1, *self.batches}:
            raise ValueError(f"{run.routing.place(block)} gets a batch of {len(x)}, and the network none of this size. "
                             f"Parts of a sample would keep different tokens: do not fold streams, frames or windows "
                             f"into the batch, or set probe=False if such parts never meet.")

    def leave(self, run: Any, block: int, x: Any) -> None:
        """Notes what a block returned, if the tokens of the next one have not been compared with it yet."""
        if isinstance(x, Tensor) and ("after", block) not in self.tried:
            self.left = block, x.detach()

    def compare(self, run: Any, block: int, x: Any) -> None:
        """Raises ValueError for tokens that changed between two blocks, of which a route has one or both."""
        routing, spec = run.routing, run.routing.specs[block]
        (before, left), self.left = self.left or (None, None), None
        if before != block - 1 or not isinstance(x, Tensor) or routing.specs[before] is not spec or spec.whole:
            return
        if routing.route_of[before] is routing.route_of[block] is None:
            return
        if x.shape == left.shape and spec.joined and isinstance(run.text, int):     # text may be replaced
            rows = slice(x.shape[1] - run.text) if routing.family.text_last else slice(run.text, None)
            x, left = x[:, rows], left[:, rows]
        if x.shape != left.shape or not torch.allclose(x, left.to(x), rtol=0, atol=0, equal_nan=True):
            raise ValueError(f"Between blocks {before} and {block} of {spec.path} the network changes "
                             f"the tokens: a residual or skip outside of the blocks would reach tokens that are away. "
                             f"Name blocks that contain it, or set probe=False if it treats each token alone.")
        self.tried.add(("after", before))

    def try_block(self, run: Any, block: int, given: dict, as_called: Callable) -> None:
        """Raises ValueError for a block whose output depends on more than its tokens and the arguments in `along`.

        `given` are its arguments by name, with the tokens that are left, and `as_called` makes a call of such.
        """
        routing = run.routing
        kinds = tuple((name, type(value).__name__, getattr(value, "ndim", 0)) for name, value in given.items())
        named = ((name, part, getattr(axis, "__qualname__", str(axis))) for name, part, axis in routing.along[block])
        here = block, kinds, *named
        if self.ordered or here in self.tried:
            return
        alike = settings_of(routing, block), *here[1:]
        if alike not in self.tried:
            row = self.measure(run, block, given, as_called)
            if row is None:                 # a block that adds nothing yet is tried again in the next pass
                return
            self.rows.append(row)
            if not row.deviation <= row.tolerance:
                raise ValueError(f"{routing.place(block)} depends on where its tokens are: in another order they "
                                 f"change by {row.deviation:.2g} of what it adds (tolerance {row.tolerance:.1g}, "
                                 f"{row.dtype}). Cause: {self.cause(run, block, given)}. If it depends on their order "
                                 f"alone (causal attention, scans), set ordered=True.")
            self.tried.add(alike)
        self.tried.add(here)

    def cause(self, run: Any, block: int, given: dict) -> str:
        named = {name for name, _, _ in run.routing.along[block]} | run.streams_of(block)
        sizes = {run.free, run.stream, run.length}
        found = [name for name, value in given.items() if name not in named and along_tokens(value, sizes)]
        return (f"the argument {', '.join(map(str, found))}, which along= does not name" if found else
                "positions inside the block, such as its own rotary values, a convolution, windows or pooled keys")

    def measure(self, run: Any, block: int, given: dict, as_called: Callable) -> Trial | None:
        spec, tokens, outs = run.routing.specs[block], run.tokens_of(block), []
        with undisturbed(run.routing.blocks[block], alone(given[tokens]).device):
            x = alone(given[tokens])
            x = x if x.shape[1] == run.stream else run.rejoin(block, x)
            generator = torch.Generator(x.device).manual_seed(0)
            trial = Alone(bare(run.routing.blocks[block]), run.routing.eager[block], generator)
            order = torch.rand(len(x), run.free, generator=generator, device=x.device).argsort(dim=1)
            for other in (in_order(run, block, x, order.sort(dim=1).values), in_order(run, block, x, order)):
                index = other.stayed(run.routing.route_of[block], run.stream)[..., None]
                rows = x.take_along_dim(index, 1)
                call = given | {tokens: [rows] if isinstance(given[tokens], list) else rows}
                other.take(block, call)
                out = trial(*as_called(call))
                outs.append(out[spec.out] if isinstance(out, tuple | list) else out)
            if any(not isinstance(out, Tensor) or out.shape != x.shape for out in outs):
                return None                 # refused when the block returns
            out, turned = (out.to(torch.promote_types(out.dtype, torch.float32)) for out in outs)
            added, size, deviation = (float(part.square().mean().sqrt()) for part in
                                      (out - x, out, turned - out.take_along_dim(index, 1)))
        dtype, eps = precision_of(trial.block, x)
        if not math.isfinite(deviation) or added <= 4 * eps * size:     # lost in the rounding of what it is added to
            return None
        return Trial(f"block {block} of {spec.path} ({type(trial.block).__name__})", deviation / added,
                     math.sqrt(eps) + eps * size / added, dtype)


def in_order(run: Any, block: int, x: Tensor, order: Tensor) -> Any:
    """Returns a pass as this one, in which a block is given all tokens that may be routed, in an order (B, free)."""
    def stayed(_: int, length: int) -> Tensor:
        places = run.places(x, length)
        return torch.arange(length, device=x.device).repeat(len(x), 1).scatter(1, places, places.gather(1, order))

    other = copy(run)
    other.ids_keep, other.along, other.stayed = [*run.ids_keep], {}, stayed
    other.ids_keep[run.routing.route_of[block]] = order
    return other


class Alone:
    """A block without its hooks and its route, whose parameters near 0 are noise, and whose buffers are copies.

    So blocks that start as the identity, as of adaLN-Zero or LayerScale, show what they will do.
    """

    def __init__(self, block: nn.Module, forward: Any, generator: torch.Generator):
        self.block, self.forward = block, forward
        self.tensors = {name: buffer.clone() for name, buffer in block.named_buffers()}
        for name, p in block.named_parameters():
            is_plain = type(p) is nn.Parameter and p.is_floating_point() and p.element_size() > 1 and p.numel()
            if is_plain and p.device == generator.device and float(p.abs().amax()) < 1e-3:
                noise = torch.randn(p.shape, generator=generator, device=p.device, dtype=p.dtype)
                self.tensors[name] = noise / (math.sqrt(p.shape[1]) if p.ndim > 1 else 2)

    def __call__(self, args: tuple, kwargs: dict) -> Any:
        holder = nn.Module()
        holder.block, holder.forward = self.block, self.forward
        tensors = {f"block.{name}": tensor for name, tensor in self.tensors.items()}
        return torch.func.functional_call(holder, tensors, args, kwargs, tie_weights=False)


@contextmanager
def undisturbed(block: nn.Module, device: torch.device) -> Iterator[None]:
    """Runs a block without gradients and dropout, and leaves it and the random numbers as they were."""
    before = [(part, dict(vars(part))) for part in block.modules()]
    kind = {} if device.type == "cpu" else dict(devices=[device], device_type=device.type)
    with torch.no_grad(), torch.random.fork_rng(**kind or dict(devices=[])):
        try:
            for part, state in before:      # an attribute may be a cache that the block writes to
                vars(part).update({name: value.clone() for name, value in state.items() if isinstance(value, Tensor)})
                vars(part)["training"] = False
            yield
        finally:
            for part, state in before:
                vars(part).clear()
                vars(part).update(state)


def precision_of(block: nn.Module, x: Tensor) -> tuple[torch.dtype, float]:
    """Returns the coarsest type that a block computes in, and its rounding (TF32's where that may be used)."""
    kind = x.device.type
    dtypes = {x.dtype, *(p.dtype for p in block.parameters() if p.is_floating_point() and p.element_size() > 1)}
    if torch.is_autocast_enabled(kind):
        dtypes.add(torch.get_autocast_dtype(kind))
    dtype = max(dtypes, key=lambda found: torch.finfo(found).eps)
    is_tf32 = dtype == torch.float32 and kind == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return dtype, 2.0 ** -10 if is_tf32 else torch.finfo(dtype).eps


def settings_of(routing: Any, block: int) -> tuple:
    """Returns what makes blocks alike: class and settings of all parts, without those that number the blocks."""
    def of(block: nn.Module) -> dict:
        return {(name, key): value for name, part in block.named_modules() for key, value in vars(part).items()
                if isinstance(value, bool | int | str) and key[0] != "_" and key != "training"}

    others = [of(bare(other)) for other, spec in zip(routing.blocks, routing.specs, strict=True)
              if spec is routing.specs[block]]
    inner = bare(routing.blocks[block])
    return type(inner), *((key, value) for key, value in of(inner).items() if isinstance(value, bool) or
                          len({other.get(key) for other in others}) < len(others) or len(others) == 1)


def lengths_of(value: Any) -> Iterator[int]:
    """Yields the first sizes of all tensors and lists in the arguments of a call."""
    if isinstance(value, Tensor):
        yield from value.shape[:1]
    elif isinstance(value, Mapping | tuple | list):
        if not isinstance(value, Mapping):
            yield len(value)
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from lengths_of(part)


def along_tokens(value: Any, sizes: set[int]) -> bool:
    """True if an argument may have a value per token: a tensor with an axis of one of the sizes, or any object."""
    if isinstance(value, Tensor):
        return not sizes.isdisjoint(value.shape)
    if isinstance(value, tuple | list):
        return any(along_tokens(part, sizes) for part in value)
    return not isinstance(value, bool | int | float | str | Mapping | None)
