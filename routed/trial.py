"""Tries a block before trusting it: with its tokens in another order, it must return the same values in that order.

A network that is known only by its names, or described by its user, may have blocks that differ from the description.
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

from routed.families import only_element

TRIED: WeakKeyDictionary = WeakKeyDictionary()      # network -> what has been tried in it


@dataclass(frozen=True)
class Trial:
    """The result of a trial; deviation and tolerance are relative to what the block adds to its tokens."""

    block: str
    deviation: float
    tolerance: float
    dtype: torch.dtype


class Trials:
    """Tries the blocks of one network, each kind of block and arguments once, and lists the results.

    `ordered` blocks depend on the order of their tokens (causal attention, scans), which routing preserves.
    """

    def __init__(self, tried: set, ordered: bool = False):
        self.tried, self.ordered, self.rows = tried, ordered, []
        self.batches: set[int] = set()      # possible batch sizes in the network's arguments
        self.left: tuple[Any, Tensor] | None = None     # the latest block, and the tokens that it returned

    def read_call(self, given: Any) -> None:
        self.batches, self.left = {*lengths_of(given)}, None

    def check_batch(self, block: Any, x: Tensor) -> None:
        """Raises ValueError for a batch size that the network's call does not have, as a block may mix folded parts."""
        if self.batches and len(x) not in {1, *self.batches}:
            raise ValueError(f"{block} gets a batch of {len(x)}, but the network gets none of this size. Parts of a "
                             f"sample would keep different tokens: do not fold streams, frames or windows into the "
                             f"batch, or set probe=False if such parts never meet.")

    def leave(self, block: Any, x: Any) -> None:
        """Stores what a block returned, if the tokens of the next block have not been compared with it yet."""
        if isinstance(x, Tensor) and ("after", block.index) not in self.tried:
            self.left = block, x.detach()

    def compare(self, run: Any, x: Any) -> None:
        """Raises ValueError for tokens that changed between two blocks, if one of them is on a route."""
        (before, left), self.left, block = self.left or (None, None), None, run.block
        if before is None or before.index != block.index - 1 or not isinstance(x, Tensor):
            return
        if before.spec is not block.spec or block.spec.whole or before.route is block.route is None:
            return
        if x.shape == left.shape and block.spec.joined and isinstance(run.text, int):     # text may be replaced
            rows = slice(x.shape[1] - run.text) if run.routing.family.text_last else slice(run.text, None)
            x, left = x[:, rows], left[:, rows]
        if x.shape != left.shape or not torch.allclose(x, left.to(x), rtol=0, atol=0, equal_nan=True):
            raise ValueError(f"Between blocks {before.index} and {block.index} of {block.spec.path} the network "
                             f"changes the tokens: a residual or skip outside of the blocks would miss the routed "
                             f"tokens. Name blocks that contain it, or set probe=False if it treats each token "
                             f"alone.")
        self.tried.add(("after", before.index))

    def try_block(self, stay: Any, given: dict, with_arguments: Callable) -> None:
        """Raises ValueError for a block whose output depends on more than its tokens and the arguments in `along`.

        `given` are its arguments by name, before tokens are removed; `with_arguments` calls a function with arguments.
        """
        block = stay.run.block
        kinds = tuple((name, type(value).__name__, getattr(value, "ndim", 0)) for name, value in given.items())
        named = [(name, part, getattr(axis, "__qualname__", str(axis))) for name, part, axis in block.along]
        here = block.index, kinds, *named
        if self.ordered or here in self.tried:
            return
        alike = settings_of(block, stay.run.routing.blocks), *here[1:]
        if alike not in self.tried:
            row = self.measure(stay, given, with_arguments)
            if row is None:                 # a block that adds nothing yet is tried again in the next pass
                return
            self.rows.append(row)
            if not row.deviation <= row.tolerance:
                raise ValueError(f"{block} depends on where its tokens are: in another order they change by "
                                 f"{row.deviation:.2g} of what it adds (tolerance {row.tolerance:.1g}, {row.dtype}). "
                                 f"Cause: {self.cause(stay.run, given)}. If it depends on their order alone (causal "
                                 f"attention, scans), set ordered=True.")
            self.tried.add(alike)
        self.tried.add(here)

    def cause(self, run: Any, given: dict) -> str:
        sizes = {run.free, run.stream, run.length}
        found = [str(name) for name in given if name not in run.block.known and along_tokens(given[name], sizes)]
        return (f"the argument {', '.join(found)}, which along= does not name" if found else
                "positions inside the block, such as its own rotary values, a convolution, windows or pooled keys")

    def measure(self, stay: Any, given: dict, with_arguments: Callable) -> Trial | None:
        run, block, tokens = stay.run, stay.run.block, stay.run.block.tokens
        x, outs = only_element(given[tokens]), []
        with undisturbed(block.module, x.device):
            x = x if x.shape[1] == run.stream else stay.rejoin(x)
            generator = torch.Generator(x.device).manual_seed(0)
            function = with_open_gates(block, generator)
            order = torch.rand(len(x), run.free, generator=generator, device=x.device).argsort(dim=1)
            for other in (in_order(stay, order.sort(dim=1).values), in_order(stay, order)):
                index = other.places()[..., None]
                rows = x.take_along_dim(index, 1)
                call = other.take(given | {tokens: [rows] if isinstance(given[tokens], list) else rows})
                out = with_arguments(function, call)
                outs.append(out[block.spec.out] if isinstance(out, tuple | list) else out)
            if any(not isinstance(out, Tensor) or out.shape != x.shape for out in outs):
                return None                 # `Pass.leave` raises an error for it
            out, turned = (out.to(torch.promote_types(out.dtype, torch.float32)) for out in outs)
            added, size, deviation = (float(part.square().mean().sqrt()) for part in
                                      (out - x, out, turned - out.take_along_dim(index, 1)))
        dtype, eps = precision_of(block.inner, x)
        if not math.isfinite(deviation) or added <= 4 * eps * size:     # lost when added to the tokens and rounded
            return None
        return Trial(f"block {block.index} of {block.spec.path} ({type(block.inner).__name__})", deviation / added,
                     math.sqrt(eps) + eps * size / added, dtype)


def in_order(stay: Any, order: Tensor) -> Any:
    """Returns a `Stay` that keeps all tokens that may be routed, in the given order (B, free)."""
    run, other = stay.run, copy(stay)
    other.ids, other.index, other.along = order, [], {}
    for length in (run.stream, run.length):
        places = run.places(order, length)
        index = torch.arange(length, device=order.device).repeat(len(order), 1)
        other.index.append((length, index.scatter(1, places, places.gather(1, order))))
    return other


def with_open_gates(block: Any, generator: torch.Generator) -> Callable:
    """Returns a function that calls a block without its hooks and its route, with noise in place of parameters near 0.

    So a block that starts as the identity, as with adaLN-Zero or LayerScale, shows what it will compute. The function
    uses copies of the block's buffers.
    """
    holder, device = nn.Module(), generator.device
    holder.block, holder.forward = block.inner, block.eager
    tensors = {f"block.{name}": buffer.clone() for name, buffer in block.inner.named_buffers()}
    for name, p in block.inner.named_parameters():
        is_plain = type(p) is nn.Parameter and p.is_floating_point() and p.element_size() > 1 and p.numel()
        if is_plain and p.device == device and float(p.abs().amax()) < 1e-3:
            noise = torch.randn(p.shape, generator=generator, device=device, dtype=p.dtype)
            tensors[f"block.{name}"] = noise / (math.sqrt(p.shape[1]) if p.ndim > 1 else 2)
    return lambda *args, **kwargs: torch.func.functional_call(holder, tensors, args, kwargs, tie_weights=False)


@contextmanager
def undisturbed(block: nn.Module, device: torch.device) -> Iterator[None]:
    """Runs a block without gradients and dropout, and restores the block and the random state."""
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
    """Returns the coarsest dtype that a block computes in, and its rounding error (TF32's if that may be used)."""
    kind = x.device.type
    dtypes = {x.dtype, *(p.dtype for p in block.parameters() if p.is_floating_point() and p.element_size() > 1)}
    if torch.is_autocast_enabled(kind):
        dtypes.add(torch.get_autocast_dtype(kind))
    dtype = max(dtypes, key=lambda found: torch.finfo(found).eps)
    is_tf32 = dtype == torch.float32 and kind == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return dtype, 2.0 ** -10 if is_tf32 else torch.finfo(dtype).eps


def settings_of(block: Any, blocks: list) -> tuple:
    """Returns a key that similar blocks share: their class and all settings, except those that number the blocks."""
    def settings(block: Any) -> dict:
        return {(name, key): value for name, part in block.inner.named_modules() for key, value in vars(part).items()
                if isinstance(value, bool | int | str) and key[0] != "_" and key != "training"}

    others = [settings(other) for other in blocks if other.spec is block.spec]
    return type(block.inner), *((key, value) for key, value in settings(block).items() if isinstance(value, bool) or
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
