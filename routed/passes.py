"""`routed` routes a network from outside, without changes to its code; `families` describes the known classes.

It wraps forwards and registers no hooks, because compiled code notices a changed forward but not a new hook, and would
silently be dense.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cache, partial
from itertools import takewhile
from numbers import Integral, Real
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from routed import families
from routed.families import Blocks, Family, argument_names, bare, family_of, network_of, only_element, takes_any
from routed.trial import TRIED, Trial, Trials
from routing_module import Route, Router, resolve_routes


class PerSample:
    """A table (N, D) that all samples shared, after each sample has kept its own rows: (B, K, D).

    It behaves like a table (K, D) until a block reshapes it to multiply queries and keys with four axes. The first of
    these axes is then the batch. Anything else raises ValueError, because the batch axis would have to be guessed.
    """

    def __init__(self, rows: Tensor):
        self.rows = rows                    # (B, *shape)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"A block uses .{name} of {LIFT}.")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise ValueError(f"A block uses {getattr(function, '__name__', function)} on {LIFT}.")

    shape = property(lambda self: self.rows.shape[1:])
    ndim = property(lambda self: self.rows.ndim - 1)
    dtype = property(lambda self: self.rows.dtype)
    device = property(lambda self: self.rows.device)
    requires_grad = property(lambda self: self.rows.requires_grad)

    def with_rows(self, rows: Tensor) -> Any:
        """Wraps new rows; rows of four axes become a tensor, whose first axis, of size 1, is replaced by the batch."""
        if rows.ndim < 5:
            return PerSample(rows)
        if rows.ndim > 5 or rows.shape[1] != 1:
            raise ValueError(f"A block computes {tuple(rows.shape[1:])} from {LIFT}.")
        return rows.squeeze(1)

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, index) -> Any:
        return self.with_rows(self.rows[(slice(None), *(index if isinstance(index, tuple) else (index,)))])

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def view(self, *shape) -> Any:
        sizes = shape[0] if isinstance(shape[0], tuple | list) else shape
        return self.with_rows(self.rows.reshape(len(self.rows), *sizes))

    reshape = view

    def unsqueeze(self, dim: int) -> Any:
        if self.ndim == 2 and dim == 1:     # of tensors with four axes, (K, 1, D) can multiply only (B, K, heads, D)
            return self.rows.unsqueeze(2)
        return self.with_rows(self.rows.unsqueeze(dim + 1 if dim >= 0 else dim))

    def chunk(self, chunks: int, dim: int = 0) -> tuple:
        return tuple(map(self.with_rows, self.rows.chunk(chunks, dim + 1 if dim >= 0 else dim)))

    def split(self, size: int | list[int], dim: int = 0) -> tuple:
        return tuple(map(self.with_rows, self.rows.split(size, dim + 1 if dim >= 0 else dim)))

    def unbind(self, dim: int = 0) -> tuple:
        return tuple(map(self.with_rows, self.rows.unbind(dim + 1 if dim >= 0 else dim)))

    def to(self, *args, **kwargs) -> "PerSample":
        return PerSample(self.rows.to(*args, **kwargs))

    def float(self) -> "PerSample":
        return PerSample(self.rows.float())


LIFT = ("a table without a batch axis, after each sample has kept its own rows: pass it with a batch axis of size 1, "
        "and name its token axis in along=")


class Block:
    """A block of the network, with its description by argument names and its route."""

    def __init__(self, index: int, module: nn.Module, spec: Blocks):
        self.index, self.module, self.spec, self.inner = index, module, spec, bare(module)
        if isinstance(self.inner, nn.ModuleList | nn.ModuleDict):
            raise ValueError(f"{spec.path}.{index} is a {type(self.inner).__name__} of {len(self.inner)} modules, not "
                             f"a block: route indices would count such groups. Build the network with a list of "
                             f"blocks (DINOv2: block_chunks=0), each with its own forward and residuals.")
        self.eager = vars(self.inner).get("forward") or partial(type(self.inner).forward, self.inner)
        self.names = argument_names(self.inner)
        self.tokens, self.text, self.front = map(self.name_of, (spec.tokens, spec.text, spec.front))
        self.along = []                     # (an argument along the tokens, the part of it if it is a tuple, the axis)
        for key, axis in spec.along.items():
            name, _, part = key.partition(".") if isinstance(key, str) else (self.name_of(key), "", "")
            self.along.append((name, part, axis))
        self.known = {self.tokens, self.text, self.front, *(name for name, _, _ in self.along)}
        self.r: int | None = None           # the number of its route
        self.route: Route | None = None
        self.starts = self.ends = False

    def __str__(self) -> str:
        return f"Route {self.route}, block {self.index} of {self.spec.path}"

    def name_of(self, key: Any) -> Any:
        """Returns the name of the argument at a position, or the position if the argument has no name."""
        return self.names[key] if isinstance(key, int) and key < len(self.names) else key

    def put_on(self, route: Route, r: int) -> None:
        """Puts the block on a route; raises ValueError if it convolves, or does not have its tokens in axis 1."""
        self.r, self.route = r, route
        self.starts, self.ends = self.index == route.start_layer_idx, self.index == route.end_layer_idx
        for part in self.module.modules():
            if isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d) and max(part.kernel_size) > 1:
                raise ValueError(f"{self} convolves over the grid of tokens, so tokens cannot be removed.")
            if isinstance(part, nn.MultiheadAttention) and not part.batch_first:
                raise ValueError(f"{self} attends over tokens (N, B, D): set batch_first=True.")


class Stay:
    """The kept tokens during a call of a block on a route; a function in `along` receives it with a block's argument.

    `ids` (B, K) index the kept tokens among those that may be routed, and `away` holds all tokens before the route's
    start. `length` counts the tokens of the block's stream, including routed ones, and `gone` counts the routed ones.
    `given` holds the block's arguments, by name or position, before tokens are removed.
    """

    def __init__(self, run: "Pass"):
        r = run.block.r
        self.run, self.ids, self.away, self.index, self.along = (
            run, run.ids_keep[r], run.away[r], run.index[r], run.along[r])

    length = property(lambda self: self.run.stream)
    gone = property(lambda self: self.run.free - self.ids.shape[1])
    given = property(lambda self: self.run.given)
    block = property(lambda self: self.run.block.module)
    network = property(lambda self: self.run.routing.modules[0])

    def places(self, length: int | None = None) -> Tensor:
        """Returns the positions of the kept tokens (B, length - gone), in the stream or a sequence of `length`."""
        length, ids = self.length if length is None else length, self.ids
        if length == self.run.free:
            return ids
        for known, index in self.index:
            if known == length:
                return index
        places = self.run.places(ids, length)
        left = ids.new_zeros(len(ids), length).scatter(1, places, 1).scatter(1, places.gather(1, ids), 0)
        index = left.argsort(dim=1, stable=True)[:, :length - self.gone]
        self.index.append((length, index))
        return index

    def take(self, given: dict) -> dict:
        """Returns a block's arguments, with those along its tokens reduced to the kept tokens."""
        block, taken = self.run.block, dict(given)
        for name, part, axis in block.along:
            value = taken.get(name)
            if value is None:
                continue
            if axis is None:
                raise ValueError(f"{block}: {name} relates the tokens to one another, so tokens cannot be removed: "
                                 f"call the network without it, or without routed().")
            if isinstance(value, tuple | list) and not callable(axis):
                taken[name] = type(value)(self.kept(v, axis, f"{name}.{i}") if part in ("", str(i)) else v
                                          for i, v in enumerate(value))
            else:
                taken[name] = self.kept(value, axis, name)
        return taken

    def kept(self, value: Any, axis: Any, name: str) -> Any:
        """Reduces an argument along the tokens to the kept ones; computes it once for the same value."""
        key, version = (name, self.run.block.spec.path), version_of(value)
        source, seen, result = self.along.get(key, (None, 0, None))
        if source is not value or seen != version:
            result = axis(value, self) if callable(axis) else self.rows(value, axis, name)
            # A recomputation must record the same operations, and a stored function could refer to its own pass.
            if not getattr(value, "requires_grad", False) and not callable(result):
                self.along[key] = value, version, result
        return result

    def rows(self, value: Tensor, axis: Any, name: str = "") -> Any:
        """Returns the rows of the kept tokens along an axis of a tensor (see `Blocks`); all rows without an axis."""
        ndim, batch = value.ndim, len(self.ids)
        axis = axis.get(ndim) if isinstance(axis, Mapping) else axis
        axis, rank = axis if isinstance(axis, tuple) else (axis, ndim)
        if axis is None or axis > 0 and value.shape[axis] == 1:         # the same for all tokens
            return value
        axis = range(ndim)[axis]
        has_rows = rank > ndim or (ndim == 2 if axis == 0 else len(value) == 1 or len(value) == batch)
        # `in` would not find equal sizes that are symbolic in a compiled graph.
        sizes = self.run.free, self.run.stream, self.run.length
        if all(value.shape[axis] != size for size in sizes) or not has_rows:
            whose = dict(zip(sizes, ("the tokens that may be routed", "the blocks' stream", "the complete sequence"),
                             strict=True))
            lengths = [f"{length} long ({owner})" for length, owner in whose.items()]
            raise ValueError(f"{self.run.block}: {name} is {tuple(value.shape)}. Its axis {axis} must be "
                             f"{' or '.join(lengths)}, after an axis of {batch} samples or of size 1.")
        index = self.places(value.shape[axis])
        if axis == 0 and rank == ndim:
            return PerSample(value[index])
        table, axis = value[(None,) * (rank - ndim)], axis + rank - ndim
        # take_along_dim would make the sizes constants in a compiled graph.
        before, behind = table.shape[1:axis], table.shape[axis + 1:]
        index = index.view(batch, *[1] * (axis - 1), -1, *[1] * (rank - axis - 1)).expand(batch, *before, -1, *behind)
        return table.expand(batch, *table.shape[1:]).gather(axis, index)

    def rejoin(self, x: Tensor) -> Tensor:
        """Puts the tokens of a block's stream back among the routed ones."""
        run, spec, away = self.run, self.run.block.spec, self.away
        if spec is not run.routing.blocks[run.block.route.start_layer_idx].spec:
            # they were removed before other tokens, such as text, joined their sequence
            before = run.before if spec.joined else 0
            away = nn.functional.pad(away, (0, 0, before, self.length - before - away.shape[1]))
        return run.routing.router.end_route(x, self.places(), away.to(x.dtype))


class Pass:
    """One forward pass: the kept tokens of each route, and the current block.

    `free` tokens of a sequence may be routed. They are contiguous, after `front` and `text` others. If text has its own
    stream, the block's stream does not contain it, but some of the block's tables cover the complete sequence.
    """

    def __init__(self, routing: "Routing"):
        self.routing, self.last, self.has_gradient = routing, -1, torch.is_grad_enabled()
        # A number, one for each sample (B,), or positions in the sequence; None until a block's call determines it.
        self.text: Any = None if routing.family.free else routing.keep
        self.free = 0
        self.keep_mask: Tensor | None = None    # (B, free) bool: these are kept
        # By number of route. In a `Stay`, which refers to this pass, tensors would wait for the garbage collector.
        self.ids_keep: list[Tensor | None] = [None] * len(routing.routes)
        self.away: dict[int, Tensor | None] = {}
        # Pairs (length of a sequence, positions of the kept tokens). In a dict the length would be compiled in.
        self.index: dict[int, list[tuple[int, Tensor]]] = {}
        # For an argument's name and a list of blocks: its latest value, that value's version, and what is kept of it.
        self.along: dict[int, dict[tuple[str, str], tuple[Any, int, Any]]] = {}
        self.between = False                    # true after a block of a route, until the next one
        self.block: Block | None = None         # the current one, and its arguments
        self.given: dict[str | int, Any] = {}
        # Numbers of tokens, with routed ones: in its stream, in the complete sequence; of text and others in front.
        self.stream, self.length, self.before, self.front = 0, 0, 0, 0

    @property
    def trials(self) -> Trials | None:
        """Tries the blocks of this pass; None in compiled code and while a block is recomputed."""
        routing = self.routing
        return None if torch.compiler.is_compiling() or routing.recomputed is not None else routing.trials

    def advance(self, block: int) -> None:
        """Records that a block is called, or, for the number of blocks, that the pass is over."""
        depth = len(self.routing.blocks)
        if block == depth and self.last == -1:
            raise ValueError(f"{type(self.routing.modules[0]).__name__} called none of its {depth} blocks in "
                             f"{self.routing.blocks[0].spec.path}: it calls their parts, or other blocks. Name the "
                             f"blocks that its forward calls.")
        if block != self.last + 1:
            raise ValueError(f"After block {self.last} came {'the end' if block == depth else f'block {block}'}: a "
                             f"route needs each of the {depth} blocks once, from the first to the last.")
        self.last = block

    def read_call(self, given: dict[str, Any]) -> None:
        """Counts tokens from the network's arguments; raises ValueError for arguments that cannot be routed."""
        family, mask = self.routing.family, self.routing.keep_mask
        if self.trials:
            self.trials.read_call(given)
        for name in family.alone:
            if given.get(name) not in (None, ()):
                raise ValueError(f"{name} goes to blocks inside a route, past the routed tokens: call the network "
                                 f"without {name}, or without routed().")
        if family.text:
            self.text = family.text(self.routing.modules[0], given)
        if family.free:
            self.free = family.free(given)
        self.keep_mask = mask(given) if callable(mask) else mask

    def call(self, block: Block, forward: Callable, args: tuple, kwargs: dict, recomputable: bool) -> Any:
        """Calls a block, on a route only with the kept tokens; at the end of a route, returns all tokens."""
        def with_arguments(function: Callable, given: dict) -> Any:
            return function(*[given[block.name_of(i)] for i in range(len(args))],
                            **{name: given[name] for name in kwargs})

        self.block, self.between = block, False
        given = {block.name_of(i): value for i, value in enumerate(args)} | kwargs
        x = only_element(given.get(block.tokens))
        if block.text is not None:
            self.text = given[block.text].shape[1]
        if block.route is None:
            if self.trials:
                self.trials.compare(self, x)
            output = forward(*args, **kwargs)
            x = output[block.spec.out] if isinstance(output, tuple | list) else output
        else:
            given = self.enter(given, x, with_arguments)
            output, x = self.leave(only_element(given[block.tokens]), with_arguments(forward, given), recomputable)
        if self.trials:
            self.trials.leave(block, x)
        return output

    def enter(self, given: dict, x: Any, with_arguments: Callable) -> dict:
        """Returns a block's arguments for the kept tokens, which are sampled before the first block of its route."""
        routing, block, trials = self.routing, self.block, self.trials
        plain = bool | int | float | str | None
        for name, value in given.items():
            unknown = value.values() if isinstance(value, dict) and name not in block.spec.along else ()
            if not all(isinstance(v, plain) for v in unknown):
                raise ValueError(f"{block}: {name} holds {sorted(value)}, and it is not known which of them have a "
                                 f"value per token: call the network without it, or without routed().")
        if not isinstance(x, Tensor) or x.is_nested or x.ndim != 3:
            found = (type(x).__name__ if not isinstance(x, Tensor) else
                     "a nested tensor (set enable_nested_tensor=False)" if x.is_nested else tuple(x.shape))
            raise ValueError(f"{block}: {block.tokens} is {found}, but tokens (B, N, D) are routed: name their "
                             f"argument by family=Family((Blocks(path, tokens=),)).")
        has_all = block.starts or block.spec.whole      # its tokens are not reduced yet
        gone = 0 if has_all else self.free - self.ids_keep[block.r].shape[1]
        self.measure(x.shape[1] + gone, given.get(block.front) or 0)
        if trials:
            trials.compare(self, x)
            trials.check_batch(block, x)
        if block.starts:
            self.sample_mask(x)
            if routing.own:
                self.check_named(given, x)
        stay, self.given = Stay(self), given
        if trials:
            trials.try_block(stay, given, with_arguments)
        if has_all:
            x = routing.router.start_route(x, stay.places())
            given = given | {block.tokens: [x] if isinstance(given[block.tokens], list) else x}
        reduced, self.given = stay.take(given), {}
        return reduced

    def measure(self, length: int, front: int) -> None:
        """Records what the block's stream contains; `length` includes the routed tokens."""
        spec, has_stream = self.block.spec, self.block.text is not None
        if isinstance(self.text, tuple):
            self.text = sorted({range(length)[i] for i in self.text})
        if spec.joined and self.text is None:
            self.text = length - self.free
        self.stream, self.length, self.front = length, length + (self.text if has_stream else 0), front
        self.before = self.text if (has_stream or spec.joined) and not self.routing.family.text_last else 0

    def sample_mask(self, x: Tensor) -> None:
        """Samples the mask of a route before its first block, from all tokens x of that block."""
        routing, block, (batch, length) = self.routing, self.block, x.shape[:2]
        if not routing.family.free:
            text = self.text if block.spec.joined else 0
            self.free = length - self.front - (len(text) if isinstance(text, list) else
                                               int(text.max()) if isinstance(text, Tensor) else text)
        if self.free < 1:
            raise ValueError(f"{block}: {length - self.free} of {length} tokens are never routed, so there are none to "
                             f"route; see keep=.")
        noise, shape = routing.mask_noise, (batch, len(routing.routes), self.free)
        if noise is not None and noise.shape != shape:
            raise ValueError(f"mask_noise is {tuple(noise.shape)}, but it must be {shape}: {batch} samples, {shape[1]} "
                             f"routes, and {self.free} tokens that may be routed.")
        if routing.router.selection == "grid":
            routing.router.check(routing.routes, math.sqrt(self.free))
        ratio, noise = self.forced(x, None if noise is None else noise[:, block.r])
        free = routing.router.start_route(x.detach(), self.places(x, length))
        ids = routing.router.get_mask(free, ratio, noise)
        if self.ids_keep[block.r] is None:      # a recomputation samples only to keep dropout's random numbers
            self.ids_keep[block.r], self.away[block.r], self.index[block.r], self.along[block.r] = ids, x, [], {}

    def forced(self, x: Tensor, noise: Tensor | None) -> tuple[float | Fraction, Tensor | None]:
        """Returns the ratio and the noise that keep the tokens of keep_mask; with grow, too many lower the ratio."""
        mask, ratio = self.keep_mask, self.block.route.selection_ratio
        if self.routing.keep_mask is None:
            return ratio, noise
        if not isinstance(mask, Tensor):
            raise ValueError(f"keep_mask is {type(mask).__name__}, but it must be a bool tensor (B, N), or a function "
                             f"that returns one.")
        if mask.dtype != torch.bool or mask.shape != (len(x), self.free):
            raise ValueError(f"keep_mask is {mask.dtype} {tuple(mask.shape)}, but it must be torch.bool "
                             f"{(len(x), self.free)}: {len(x)} samples, and {self.free} tokens that may be routed.")
        stay, most = self.free - int(self.free * ratio), mask.sum(dim=1).max()
        if self.routing.grow:               # on a GPU this waits
            ratio = Fraction(self.free - max(stay, int(most)), self.free)
        else:
            torch._assert_async(most <= stay, f"keep_mask keeps more tokens than the {stay} of {self.free} that are "
                                f"kept at selection ratio {ratio}: lower the ratio, keep fewer, or set grow=True.")
        noise = torch.rand(mask.shape, device=x.device) if noise is None else noise
        return ratio, self.routing.router.keep(noise, mask.to(x.device, non_blocking=True))

    def places(self, like: Tensor, length: int) -> Tensor:
        """Returns the positions (B, n) of the tokens that may be routed, in a stream or sequence of `length`."""
        if isinstance(self.text, list):
            free = torch.tensor([[i for i in range(length) if i not in self.text]], device=like.device)
        else:
            before = self.before if length == self.length else 0
            first = self.front + (before[:, None] if isinstance(before, Tensor) else before)
            free = first + torch.arange(self.free, device=like.device)[None]
        return free.expand(len(like), -1)

    def check_named(self, given: dict[str | int, Any], x: Tensor) -> None:
        """Raises ValueError for an unnamed value as long as the tokens, as a block might cut it to its own length."""
        block, (batch, _, width) = self.block, x.shape
        for name in given.keys() - block.known:
            for value in given[name] if isinstance(given[name], tuple | list) else [given[name]]:
                is_wide = isinstance(value, Tensor) and value.ndim > 1
                lengths = value.shape[int(len(value) == batch):-1] if is_wide else ()
                if is_wide and value.ndim == 2 and len(value) == batch and value.shape[1] != width:     # a mask (B, N)
                    lengths = value.shape[1:]
                if any(length in (self.free, self.stream) for length in lengths):
                    raise ValueError(f"{block}: {name} is {tuple(value.shape)}, as long as the tokens. Name its axis "
                                     f"in along=, or write along={{{name!r}: {{}}}} if it has no value per token.")

    def leave(self, tokens: Tensor, output: Any, recomputable: bool) -> tuple[Any, Tensor]:
        """Returns the output of a block that got `tokens`, and the tokens in it; at a route's end, all tokens."""
        block, spec, several = self.block, self.block.spec, isinstance(output, tuple | list)
        x = output[spec.out] if several else output
        streams = [part for part in output if isinstance(part, Tensor) and part.ndim == 3] if several else []
        is_ambiguous = len(streams) > 1 and self.routing.own and block.text is None
        if is_ambiguous or not isinstance(x, Tensor) or x.shape[:2] != tokens.shape[:2]:
            found = (f"{len(streams)} streams, {[tuple(part.shape) for part in streams]}" if is_ambiguous else
                     tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__)
            raise ValueError(f"{block} gets tokens {tuple(tokens.shape)} and returns {found}: describe what is routed "
                             f"by family=Family((Blocks(path, tokens=, text=, out=),)).")
        self.between = not block.ends
        if not (block.ends or spec.whole):
            return output, x
        x = Stay(self).rejoin(x)
        if block.ends:                      # detached, because its graph refers to this pass
            self.away[block.r] = self.away[block.r].detach() if recomputable or spec.whole else None
            self.along[block.r].clear()
        return type(output)([*output[:spec.out], x, *output[spec.out + 1:]]) if several else x, x


@dataclass
class KeptTokens:
    """What `routed` yields: `ids_keep[r]` (B, K) of the latest pass, or None before a pass or if no token is routed.

    Ids count only the tokens that may be routed: with a class token, id 0 is token 1.
    """

    ids_keep: list[Tensor | None]


class Routing:
    """A network with its routes: all that is fixed when `routed` is entered, and the wrapped forwards."""

    def __init__(self, network, routes, blocks, along, keep, mask_noise, keep_mask, grow, router, compiled, family,
                 probe, ordered):
        self.own = family is not None or blocks is not None     # described by the user
        if family is not None and blocks is not None or blocks is None and (along, keep) != (None, None):
            raise ValueError("along= and keep= describe the blocks that blocks= names: leave them out with family=, or "
                             "for a known network.")
        if family is None and blocks is not None:
            family = Family((Blocks(blocks if isinstance(blocks, str) else "blocks=", along or {}, joined=True),),
                            reads=families.encoder_depths)
        self.family = family_of(network) if family is None or type(network).__name__ in families.REFUSED else family
        self.keep = keep if isinstance(keep, int) else tuple(keep or ()) or 0  # how many are never routed, or which
        self.blocks: list[Block] = []
        for spec in self.family.lists:
            for module in blocks if isinstance(blocks, nn.Module) else spec.found_in(network):
                module = getattr(module, "_orig_mod", module) if compiled else module
                self.blocks.append(Block(len(self.blocks), module, spec))
        if repeated := len(self.blocks) - len({block.module for block in self.blocks}):
            raise ValueError(f"{repeated} of {len(self.blocks)} blocks repeat an earlier one, but a route needs "
                             f"blocks that are called once.")
        known = {name for block in self.blocks for name in block.names[1:]}
        if unknown := [key for key in along or () if isinstance(key, str) and key.partition(".")[0] not in known
                       and not all(takes_any(block.inner) for block in self.blocks)]:
            raise ValueError(f"along= names {unknown[0]!r}; besides tokens the blocks take {sorted(known)}.")
        self.routes = resolve_routes(routes, len(self.blocks))
        read = self.family.reads(network) if self.family.reads else {}
        for r, route in enumerate(self.routes):
            if not route.is_identity or route.path_drop:
                raise ValueError(f"Route {route}: routed() returns tokens unchanged, so it does not support x_T, "
                                 f"x_D_last, return_from and path_drop.")
            span = range(route.start_layer_idx, route.end_layer_idx + 1) if route.selection_ratio > 0 else range(0)
            for i in span[:-1]:
                if i in read:
                    raise ValueError(f"Route {route}: the network reads all tokens after block {i} ({read[i]}={i + 1})."
                                     f" Start it at block {i + 1} or later, or end it at block {i} or earlier.")
            for i in span:
                self.blocks[i].put_on(route, r)
        own = getattr(network, "router", None)
        if isinstance(own, nn.Module):
            raise ValueError("This network fuses its own route: call it with routes=net.routes instead.")
        self.router = router or (own if isinstance(own, Router) else Router())
        if mask_noise is not None and not (isinstance(mask_noise, Tensor) and mask_noise.is_floating_point()):
            raise ValueError(f"mask_noise is {getattr(mask_noise, 'dtype', type(mask_noise).__name__)}, but it must be "
                             f"a tensor of floats (B, routes, N).")
        self.mask_noise, self.keep_mask, self.grow = mask_noise, keep_mask, grow
        if keep_mask is not None and grow and compiled:
            raise ValueError("keep_mask may raise the number of kept tokens, which recompiles the network: set "
                             "grow=False, or compile its blocks.")
        self.arguments = argument_names(network)
        self.defaults = {name: p.default for name, p in inspect.signature(type(network).forward).parameters.items()
                         if p.default is not p.empty}

        self.trials = probe if isinstance(probe, Trials) else None
        if probe is True and not any(self.family is row for row in families.FAMILIES.values()):
            self.trials = Trials(TRIED.setdefault(network, set()), ordered)
        self.open = True                        # until the `with` block ends
        self.latest: Pass | None = None
        self.recomputed: Pass | None = None  # the pass whose blocks a backward is recomputing
        self.kept = KeptTokens([None] * len(self.routes))
        self.modules = [network, *(block.module for block in self.blocks)]
        # The attribute that a call runs. A compiled block is wrapped outside of its graph, where checkpoints are seen.
        self.slots = ["forward", *("_compiled_call_impl" if module._compiled_call_impl and not compiled else "forward"
                                   for module in self.modules[1:])]
        self.before = [vars(module).get(slot) for module, slot in zip(self.modules, self.slots, strict=True)]
        self.wraps = list(map(self.wrap, self.modules, self.before, [None, *self.blocks]))

    def wrapped(self) -> AbstractContextManager[None]:
        """Wraps the network and its blocks in bound methods, so that a copy of a module has its own."""
        return self.with_forwards(map(MethodType, self.wraps, self.modules))

    @contextmanager
    def with_forwards(self, forwards: Iterable[Callable | None]) -> Iterator[None]:
        """Replaces the forwards of the network and its blocks; None stands for the forward of the class."""
        def set_forwards(forwards: Iterable[Callable | None]) -> None:
            for module, slot, forward in zip(self.modules, self.slots, forwards, strict=True):
                vars(module).pop(slot, None)
                if forward is not None:
                    vars(module)[slot] = forward

        before = [vars(module).get(slot) for module, slot in zip(self.modules, self.slots, strict=True)]
        try:
            set_forwards(forwards)
            yield
        finally:
            set_forwards(before)

    def wrap(self, routed_module: nn.Module, own: Callable | None, block: Block | None) -> Callable:
        """Returns the routed forward of a block (None: of the network); `own` is a forward set on the module itself."""
        of_class = type(routed_module).forward

        def routed_forward(module, *args, **kwargs):
            forward = own or partial(of_class, module)
            if module is not routed_module:  # a copy made inside the `with` block is dense, with weights of its own
                return (deepcopy(own, {id(routed_module): module}) or forward)(*args, **kwargs)
            run = self.pass_of(block, args, kwargs)
            if run is None:
                return forward(*args, **kwargs)
            recomputable = mark_checkpoint(run)
            if block is not None:
                return run.call(block, forward, args, kwargs, recomputable)
            output = forward(*args, **kwargs)
            if self.recomputed is None:
                run.advance(len(self.blocks))
            return output

        routed_forward.routing = self
        return routed_forward

    def pass_of(self, block: Block | None, args: tuple, kwargs: dict[str, Any]) -> Pass | None:
        """Returns the pass that a call of a block (None: the network) belongs to; the network or block 0 begins it."""
        if self.recomputed is not None or not self.open:
            return self.recomputed
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            raise ValueError("A backward inside routed() recomputes a block of an unknown pass. Call backward of a "
                             "dense pass outside, and set use_reentrant=False.")
        if block is None:
            given = dict(zip(self.arguments, args, strict=False)) | kwargs
            self.begin(self.defaults | given)
            needs_gradient = any(isinstance(value, Tensor) and value.requires_grad for value in given.values())
        else:
            if block.index == 0 and (self.latest is None or self.latest.last >= len(self.blocks) - 1):
                self.begin({})
            self.latest.advance(block.index)
            needs_gradient = self.latest.has_gradient and block.route is not None
        if needs_gradient and not torch.is_grad_enabled():
            raise ValueError(f"{block or 'The network'} runs without the gradient that its input needs, as in a "
                             f"reentrant checkpoint or one that offloads activations: use torch's checkpoint with "
                             f"use_reentrant=False, or detach the input.")
        return self.latest

    def begin(self, given: dict[str, Any]) -> None:
        """Begins a pass of the network with these arguments."""
        self.end()
        self.latest = Pass(self)
        self.kept.ids_keep = self.latest.ids_keep
        self.latest.read_call(given)

    def end(self) -> None:
        """Ends the latest pass; one that failed detaches its routed tokens, whose graph would hold them for ever."""
        if self.latest is not None:
            self.latest.given = {}
            self.latest.away = {r: away if away is None else away.detach() for r, away in self.latest.away.items()}
        self.latest = None


def mark_checkpoint(run: Pass) -> bool:
    """True if this call is inside a checkpoint, whose saved tensors then remember the pass.

    A checkpoint recomputes when backward first needs a tensor that it saved. So the pass is known there, wherever
    and in whatever order backward is called. Raises ValueError for two passes in one checkpoint.
    """
    hooks = None if torch.compiler.is_compiling() else torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or hooks[1].__module__ not in ("torch.utils.checkpoint", __name__):
        return False
    pack, unpack = hooks
    if (other := getattr(unpack, "run", None)) is not None:
        if other is not run:
            raise ValueError("One checkpoint contains two routed passes: use one checkpoint for each.")
        return True

    done = -1                               # id of the backward that has recomputed everything

    def unpack_for_pass(packed: Any) -> Tensor:
        nonlocal done
        backward = torch._C._current_graph_task_id()
        if backward == done != -1:
            return unpack(packed)
        before, run.routing.recomputed = run.routing.recomputed, run
        try:
            with run.routing.wrapped():
                tensor = unpack(packed)
        finally:
            run.routing.recomputed = before
        done = backward
        return tensor

    unpack_for_pass.run = run
    torch._C._autograd._pop_saved_tensors_default_hooks()
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack_for_pass)
    return True


def version_of(value: Any) -> int:
    """Returns how often a tensor was changed in place, or 0 if torch does not count it."""
    if torch.compiler.is_compiling() or not isinstance(value, Tensor) or value.is_inference():
        return 0
    return value._version


@cache
def check_torch() -> None:
    """Raises RuntimeError, with the version, for a torch without the private calls that `mark_checkpoint` makes."""
    autograd, seen = torch._C._autograd, []

    def look(x: Tensor) -> Tensor:
        try:                                # an exception inside a checkpoint would leave its hooks behind
            pack, unpack = autograd._top_saved_tensors_default_hooks(False)
            autograd._pop_saved_tensors_default_hooks()
            autograd._push_saved_tensors_default_hooks(pack, unpack)
            seen.append((unpack.__module__, torch._C._current_graph_task_id() == -1))
        except (AttributeError, TypeError) as error:
            seen.append(str(error))
        return x.exp()

    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(1, device="cpu", requires_grad=True)
        checkpoint(look, x, use_reentrant=False, preserve_rng_state=False).backward()
    if seen != [("torch.utils.checkpoint", True), ("torch.utils.checkpoint", False)]:
        raise RuntimeError(f"routed() cannot tell passes apart in torch {torch.__version__}, whose saved tensors or "
                           f"checkpoints work differently ({seen}). It is tested with torch 2.11 and 2.15.")


def read_routes(routes: Iterable[Route | Mapping[str, Any]] | Mapping[str, Any]) -> list[Route]:
    """Reads one route, or a list of routes or mappings, which may be in a config such as SimpleTuner's."""
    if isinstance(routes, Mapping):
        config = routes.get("tread_config", routes)
        if not isinstance(config, Mapping) or "routes" not in config:
            raise ValueError(f"The config has no routes: {'tread_config' if config is not routes else 'it'} is "
                             f"{config!r}, and must be {{'routes': [{{…}}]}}.")
        routes = config["routes"]
    if not isinstance(routes, Route | Iterable) or isinstance(routes, str):
        raise ValueError(f"routes is {routes!r}, and must be a list of Route, or of dicts with its keywords.")
    return [read_route(route) for route in ([routes] if isinstance(routes, Route) else routes)]


def read_route(route: Route | Mapping[str, Any]) -> Route:
    """Reads a route or a mapping; raises ValueError with the key that is missing, unknown or of another type."""
    if isinstance(route, Mapping):
        needed, known = list(Route.__annotations__)[:3], list(Route.__annotations__)
        if wrong := [f"no {key}" for key in needed if key not in route] + [
                f"a key {key!r} that routes do not have" for key in route if key not in known]:
            raise ValueError(f"Route {dict(route)} has {wrong[0]}: it needs {', '.join(needed)}, and may have "
                             f"{', '.join(known[3:])}.")
        route = Route(**route)
    if not isinstance(route, Route):
        raise ValueError(f"{route!r} is not a route: write Route(start_layer_idx, end_layer_idx, selection_ratio).")
    for part in fields(Route):
        value, kind = getattr(route, part.name), {int: Integral, float: Real}.get(part.type, part.type)
        if not isinstance(value, kind) or isinstance(value, bool) and kind is not bool:
            raise ValueError(f"A route has {part.name}={value!r}, which must be "
                             f"{'a whole number' if kind is Integral else 'a number' if kind is Real else part.type}.")
    return route


@contextmanager
def routed(
    model: nn.Module,                                   # alone, or inside DDP, torch.compile or PEFT
    routes: Iterable[Route | Mapping] | Mapping,        # of this step; SimpleTuner's {"routes": [{…}]} works, too
    *,
    blocks: str | nn.Module | None = None,              # the list of blocks of a network that is not in FAMILIES
    along: Mapping[str | int, int] | None = None,       # argument of a block, by name or number -> axis of the tokens
    keep: int | Iterable[int] | None = None,            # how many tokens in front are never routed, or which
    mask_noise: Tensor | None = None,                   # (B, routes, N) over the N tokens that may be routed
    keep_mask: Tensor | Callable[..., Tensor] | None = None,    # (B, N) bool, or a function of the call's arguments
    grow: bool = True,                                  # raise K to the most tokens that keep_mask keeps in a sample
    router: Router | None = None,                       # how tokens are selected; None: by the network's, or at random
    family: Family | None = None,                       # your own description, instead of blocks, along and keep
    probe: bool = True,                                 # try the blocks first, unless the network is a library's
    ordered: bool = False,                              # the blocks depend on the order of tokens (causal, scans)
) -> Iterator[KeptTokens]:
    """Routes each forward pass of a network inside the `with` block, in training and evaluation; outside it is dense.

    Indices of routes count the blocks of all lists of the network, and routes are numbered in order of depth. Masks
    are sampled in each pass, or decided by mask_noise (see `Router.get_mask`). Yields `KeptTokens`,
    whose ids_keep[r] (B, K) index the N tokens that may be routed. Text, class and register tokens and condition images
    are never routed, and tokens of keep_mask are not routed in this pass. A callable keep_mask gets the arguments of
    the call as a dict by name. A block that a backward recomputes sees the masks of its pass, also outside the `with`
    block. Inside it, `routed(model, [])` is dense. Raises ValueError, with the reason, for a network or a call that
    cannot be routed exactly, for a pass that does not reach the blocks, and on exit if there was no pass.
    """
    check_torch()
    network = network_of(model)
    other = getattr(vars(network).get("forward"), "routing", None)
    is_routed = other is not None and other.open and other.modules[0] is network
    around = [*takewhile(lambda part: part is not network, model.modules()), network]
    compiled = any(hasattr(part, "_orig_mod") or part._compiled_call_impl for part in around)
    routing = Routing(network, read_routes(routes), blocks, along, keep, mask_noise, keep_mask, grow, router, compiled,
                      family, probe, ordered)
    if not any(block.route for block in routing.blocks):     # dense: uses what was compiled without a route
        with other.with_forwards(other.before) if is_routed else nullcontext():
            yield routing.kept
        return
    if is_routed:
        raise ValueError(f"{type(network).__name__} is routed already: pass all routes to one routed(), or [] for a "
                         f"dense pass inside of it.")
    try:
        with routing.wrapped():
            yield routing.kept
        if routing.latest is None:
            raise ValueError(f"{type(network).__name__} was not called inside routed(), so nothing was routed: call "
                             f"this very network inside the `with` block.")
        if routing.latest.last < len(routing.blocks):
            routing.latest.advance(len(routing.blocks))
    except RuntimeError as error:
        if routing.latest is not None and routing.latest.between and not isinstance(error, torch.OutOfMemoryError):
            raise ValueError(f"After block {routing.latest.last}, with some tokens routed, the network fails "
                             f"({str(error).partition(chr(10))[0]}): it may add or compare tokens outside of its "
                             f"blocks. Name blocks that contain its residuals and skips.") from error
        raise
    finally:
        routing.end()
        routing.open = False


def probe(
    model: nn.Module, call: Callable[[], Any], routes: Iterable[Route | Mapping] = (Route(0, -1, 0.5),), *,
    ordered: bool = False, **description: Any,
) -> list[Trial]:
    """Tries the blocks of a network, which is known or described as for `routed`, in one pass that `call()` runs.

    Returns the measurements, one for each kind of block and arguments. Raises the same errors as `routed`.
    """
    trials = Trials(set(), ordered)
    with torch.no_grad(), routed(model, routes, probe=trials, **description):
        call()
    return trials.rows
