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
from routed.families import Blocks, Family, alone, bare, encoder_depths, family_of, names_of, network_of, takes_any
from routed.trial import TRIED, Trial, Trials
from routing_module import Route, Router, resolve_routes


class PerSample:
    """A table (N, D) that all samples shared, after each has kept rows of its own: (B, K, D).

    It answers as a table (K, D), whatever a block makes of it to multiply queries and keys of four axes; the first of
    the four is then the batch. Anything else raises ValueError, as the place of the batch would be a guess.
    """

    def __init__(self, rows: Tensor):
        self.rows = rows                    # (B, *shape)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"A block takes .{name} of {LIFT}.")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise ValueError(f"A block uses {getattr(function, '__name__', function)} on {LIFT}.")

    shape = property(lambda self: self.rows.shape[1:])
    ndim = property(lambda self: self.rows.ndim - 1)
    dtype = property(lambda self: self.rows.dtype)
    device = property(lambda self: self.rows.device)
    requires_grad = property(lambda self: self.rows.requires_grad)

    def of(self, rows: Tensor) -> Any:
        """Returns the table of other rows; of four axes, the batch's in the place of the first, which has size 1."""
        if rows.ndim < 5:
            return PerSample(rows)
        if rows.ndim > 5 or rows.shape[1] != 1:
            raise ValueError(f"A block makes {tuple(rows.shape[1:])} of {LIFT}.")
        return rows.squeeze(1)

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, index) -> Any:
        return self.of(self.rows[(slice(None), *(index if isinstance(index, tuple) else (index,)))])

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def view(self, *shape) -> Any:
        return self.of(self.rows.reshape(len(self.rows), *(shape[0] if isinstance(shape[0], tuple | list) else shape)))

    reshape = view

    def unsqueeze(self, dim: int) -> Any:
        if self.ndim == 2 and dim == 1:     # (K, 1, D) multiplies (B, K, heads, D), and nothing else of four axes
            return self.rows.unsqueeze(2)
        return self.of(self.rows.unsqueeze(dim + 1 if dim >= 0 else dim))

    def chunk(self, chunks: int, dim: int = 0) -> tuple:
        return tuple(map(self.of, self.rows.chunk(chunks, dim + 1 if dim >= 0 else dim)))

    def split(self, size: int | list[int], dim: int = 0) -> tuple:
        return tuple(map(self.of, self.rows.split(size, dim + 1 if dim >= 0 else dim)))

    def unbind(self, dim: int = 0) -> tuple:
        return tuple(map(self.of, self.rows.unbind(dim + 1 if dim >= 0 else dim)))

    def to(self, *args, **kwargs) -> "PerSample":
        return PerSample(self.rows.to(*args, **kwargs))

    def float(self) -> "PerSample":
        return PerSample(self.rows.float())


LIFT = ("a table without a batch axis, after each sample has kept rows of its own: hand it over with a batch axis of "
        "size 1, and name its axis of tokens in along=")


class Block:
    """A block of the network, its description by the names of its arguments, and its route."""

    def __init__(self, index: int, module: nn.Module, spec: Blocks):
        self.index, self.module, self.spec, self.inner = index, module, spec, bare(module)
        if isinstance(self.inner, nn.ModuleList | nn.ModuleDict):
            raise ValueError(f"{spec.path}.{index} is a {type(self.inner).__name__} of {len(self.inner)} modules, and "
                             f"no block: indices of routes would count such groups. Build the network with a list of "
                             f"blocks (DINOv2: block_chunks=0), each with its own forward and residuals.")
        self.eager = vars(self.inner).get("forward") or partial(type(self.inner).forward, self.inner)
        self.names = names_of(self.inner)
        self.tokens, self.text, self.front = map(self.name_of, (spec.tokens, spec.text, spec.front))
        self.along = []                     # arguments along the tokens, their parts if they are tuples, axes
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
        """Returns the name of an argument that is given by its number, or the number where it has no name."""
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
    """The tokens that are kept on a route of one pass; a function in `along` gets an argument of a block and this.

    `ids` (B, K) count the tokens that may be routed, and `away` are all tokens before the route's start. `length`
    counts the block's stream with the tokens that are away, `gone` these tokens. `given` are the block's arguments, by
    name or number, before tokens are taken out.
    """

    def __init__(self, run: "Pass", ids: Tensor, away: Tensor):
        self.run, self.ids, self.away = run, ids, away
        # Where the kept tokens are, by the length of a sequence. A dict would fix the length in a compiled graph.
        self.index: list[tuple[int, Tensor]] = []
        # The latest argument of a name and a list of blocks, its version, and what is kept of it.
        self.along: dict[tuple[str, str], tuple[Any, int, Any]] = {}

    length = property(lambda self: self.run.stream)
    gone = property(lambda self: self.run.free - self.ids.shape[1])
    given = property(lambda self: self.run.given)
    block = property(lambda self: self.run.block.module)
    network = property(lambda self: self.run.routing.modules[0])

    def places(self, length: int | None = None) -> Tensor:
        """Returns where the kept tokens are (B, length - gone), in the stream or in a sequence of a length."""
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
        """Returns a block's arguments, those along its tokens reduced to the kept tokens."""
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
            if not getattr(value, "requires_grad", False):  # a recomputation must record the same operations
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
        # `in` would not tell that sizes which a compiled graph leaves open are equal.
        sizes = self.run.free, self.run.stream, self.run.length
        if all(value.shape[axis] != size for size in sizes) or not has_rows:
            whose = dict(zip(sizes, ("the tokens that may be routed", "the blocks' stream", "the whole sequence"),
                             strict=True))
            lengths = [f"{length} long ({of})" for length, of in whose.items()]
            raise ValueError(f"{self.run.block}: {name} is {tuple(value.shape)}. Its axis {axis} must be "
                             f"{' or '.join(lengths)}, behind an axis of {batch} samples or of size 1.")
        index = self.places(value.shape[axis])
        if axis == 0 and rank == ndim:
            return PerSample(value[index])
        table, axis = value[(None,) * (rank - ndim)], axis + rank - ndim
        # take_along_dim would fix the sizes in a compiled graph.
        before, behind = table.shape[1:axis], table.shape[axis + 1:]
        index = index.view(batch, *[1] * (axis - 1), -1, *[1] * (rank - axis - 1)).expand(batch, *before, -1, *behind)
        return table.expand(batch, *table.shape[1:]).gather(axis, index)

    def rejoin(self, x: Tensor) -> Tensor:
        """Puts the tokens of a block's stream among those that are away."""
        run, spec, away = self.run, self.run.block.spec, self.away
        if spec is not run.routing.blocks[run.block.route.start_layer_idx].spec:
            # they were taken out before text, say, was in their sequence
            before = run.before if spec.joined else 0
            away = nn.functional.pad(away, (0, 0, before, self.length - before - away.shape[1]))
        return run.routing.router.end_route(x, self.places(), away.to(x.dtype))


class Pass:
    """One forward pass: the tokens that stay on each route, and the block at hand.

    `free` tokens of a sequence may be routed, in one run behind `front` and `text` others. If text has a stream of its
    own, the block's stream is without it, but some of its tables run along the complete sequence.
    """

    def __init__(self, routing: "Routing"):
        self.routing, self.last, self.has_gradient = routing, -1, torch.is_grad_enabled()
        # A number, one for each sample (B,), or places in the sequence; None until `free` or a block says it.
        self.text: Any = None if routing.family.free else routing.keep
        self.free = 0
        self.keep_mask: Tensor | None = None    # (B, free) bool: these are kept
        self.stays: dict[int, Stay] = {}        # by the number of the route
        self.ids_keep: list[Tensor | None] = [None] * len(routing.routes)
        self.between = False                    # true after a block of a route, until the next one
        self.block: Block | None = None         # the one at hand, and its arguments
        self.given: dict[str | int, Any] = {}
        # Lengths with the tokens that are away: of its stream, of the complete sequence; text and others in front.
        self.stream, self.length, self.before, self.front = 0, 0, 0, 0

    @property
    def trials(self) -> Trials | None:
        """What tries the blocks of this pass; compiled code and a block that is recomputed are not tried."""
        routing = self.routing
        return None if torch.compiler.is_compiling() or routing.recomputed is not None else routing.trials

    def advance(self, block: int) -> None:
        """Notes that a block is called, or at the number of blocks that the pass is over."""
        depth = len(self.routing.blocks)
        if block == depth and self.last == -1:
            raise ValueError(f"{type(self.routing.modules[0]).__name__} called none of its {depth} blocks in "
                             f"{self.routing.blocks[0].spec.path}: it calls their parts, or others. Name the blocks "
                             f"that its forward calls.")
        if block != self.last + 1:
            raise ValueError(f"After block {self.last} came {'the end' if block == depth else f'block {block}'}: a "
                             f"route needs each of the {depth} blocks once, from the first to the last.")
        self.last = block

    def read_call(self, given: dict[str, Any]) -> None:
        """Counts tokens by the network's arguments; raises ValueError for arguments that cannot be routed."""
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
        """Calls a block, on a route with the kept tokens; the output at the end of a route is that of all tokens."""
        def with_arguments(function: Callable, given: dict) -> Any:
            return function(*[given[block.name_of(i)] for i in range(len(args))],
                            **{name: given[name] for name in kwargs})

        self.block, self.between = block, False
        given = {block.name_of(i): value for i, value in enumerate(args)} | kwargs
        x = alone(given.get(block.tokens))
        if block.text is not None:
            self.text = given[block.text].shape[1]
        if block.route is None:
            if self.trials:
                self.trials.compare(self, x)
            output = forward(*args, **kwargs)
            x = output[block.spec.out] if isinstance(output, tuple | list) else output
        else:
            given = self.enter(given, x, with_arguments)
            output, x = self.leave(alone(given[block.tokens]), with_arguments(forward, given), recomputable)
        if self.trials:
            self.trials.leave(block, x)
        return output

    def enter(self, given: dict, x: Any, with_arguments: Callable) -> dict:
        """Returns the arguments of a block on a route for the kept tokens, which are drawn before its first block."""
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
        are_all = block.starts or block.spec.whole
        self.measure(x.shape[1] + (0 if are_all else self.stays[block.r].gone), given.get(block.front) or 0)
        if trials:
            trials.compare(self, x)
            trials.check_batch(block, x)
        if block.starts:
            self.draw(x)
            if routing.own:
                self.check_named(given, x)
        stay, self.given = self.stays[block.r], given
        if trials:
            trials.try_block(stay, given, with_arguments)
        if are_all:
            x = routing.router.start_route(x, stay.places())
            given = given | {block.tokens: [x] if isinstance(given[block.tokens], list) else x}
        taken, self.given = stay.take(given), {}
        return taken

    def measure(self, length: int, front: int) -> None:
        """Notes what is in the stream of the block, whose length includes the tokens that are away."""
        spec, has_stream = self.block.spec, self.block.text is not None
        if isinstance(self.text, tuple):
            self.text = sorted({range(length)[i] for i in self.text})
        if spec.joined and self.text is None:
            self.text = length - self.free
        self.stream, self.length, self.front = length, length + (self.text if has_stream else 0), front
        self.before = self.text if (has_stream or spec.joined) and not self.routing.family.text_last else 0

    def draw(self, x: Tensor) -> None:
        """Draws the mask of a route before its first block, from all tokens x of that block."""
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
        if block.r not in self.stays:           # a recomputation draws only so that later dropout finds its numbers
            self.stays[block.r], self.ids_keep[block.r] = Stay(self, ids, x), ids

    def forced(self, x: Tensor, noise: Tensor | None) -> tuple[float | Fraction, Tensor | None]:
        """Returns the ratio and the noise that keep the tokens of keep_mask; the ratio may fall, so that all can."""
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
        """Returns where the tokens that may be routed are (B, n), in a sequence or stream of a length."""
        if isinstance(self.text, list):
            free = torch.tensor([[i for i in range(length) if i not in self.text]], device=like.device)
        else:
            before = self.before if length == self.length else 0
            first = self.front + (before[:, None] if isinstance(before, Tensor) else before)
            free = first + torch.arange(self.free, device=like.device)[None]
        return free.expand(len(like), -1)

    def check_named(self, given: dict[str | int, Any], x: Tensor) -> None:
        """Raises ValueError for a value as long as the tokens that is not named: a block might cut it to its own."""
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
        """Returns the output of a block on a route that got `tokens`, and the tokens in it; at the end, all tokens."""
        block, spec, several = self.block, self.block.spec, isinstance(output, tuple | list)
        stay, x = self.stays[block.r], output[spec.out] if several else output
        streams = [part for part in output if isinstance(part, Tensor) and part.ndim == 3] if several else []
        is_open = len(streams) > 1 and self.routing.own and block.text is None
        if is_open or not isinstance(x, Tensor) or x.shape[:2] != tokens.shape[:2]:
            found = (f"{len(streams)} streams, {[tuple(part.shape) for part in streams]}" if is_open else
                     tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__)
            raise ValueError(f"{block} gets tokens {tuple(tokens.shape)} and returns {found}: say what is routed by "
                             f"family=Family((Blocks(path, tokens=, text=, out=),)).")
        self.between = not block.ends
        if not (block.ends or spec.whole):
            return output, x
        x = stay.rejoin(x)
        if block.ends:                      # without its graph, which leads to this pass
            stay.away = stay.away.detach() if recomputable or spec.whole else None
            stay.along.clear()
        return type(output)([*output[:spec.out], x, *output[spec.out + 1:]]) if several else x, x


@dataclass
class Taken:
    """What `routed` yields: `ids_keep[r]` (B, K) of the latest pass, or None before a pass or if no token is routed.

    Ids count only the tokens that may leave: with a class token, id 0 is token 1.
    """

    ids_keep: list[Tensor | None]


class Routing:
    """A network on its routes: what is fixed when `routed` is entered, and the forwards that are wrapped."""

    def __init__(self, network, routes, blocks, along, keep, mask_noise, keep_mask, grow, router, compiled, family,
                 probe, ordered):
        self.own = family is not None or blocks is not None     # described by the user
        if family is not None and blocks is not None or blocks is None and (along, keep) != (None, None):
            raise ValueError("along= and keep= describe the blocks that blocks= names: leave them out with family=, or "
                             "for a known network.")
        if family is None and blocks is not None:
            family = Family((Blocks(blocks if isinstance(blocks, str) else "blocks=", along or {}, joined=True),),
                            reads=encoder_depths)
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
            raise ValueError("keep_mask may raise the number of kept tokens, and so compile the network again: set "
                             "grow=False, or compile its blocks.")
        self.arguments = names_of(network)
        self.defaults = {name: p.default for name, p in inspect.signature(type(network).forward).parameters.items()
                         if p.default is not p.empty}

        self.trials = probe if isinstance(probe, Trials) else None
        if probe is True and not any(self.family is row for row in families.FAMILIES.values()):
            self.trials = Trials(TRIED.setdefault(network, set()), ordered)
        self.open = True                        # until the `with` block ends
        self.latest: Pass | None = None
        self.recomputed: Pass | None = None  # the pass whose blocks a backward computes again, while it does
        self.taken = Taken([None] * len(self.routes))
        self.modules = [network, *(block.module for block in self.blocks)]
        # What a call of a module runs: a compiled block is wrapped outside of its graph, where checkpoints are seen.
        self.slots = ["forward", *("_compiled_call_impl" if module._compiled_call_impl and not compiled else "forward"
                                   for module in self.modules[1:])]
        self.before = [vars(module).get(slot) for module, slot in zip(self.modules, self.slots, strict=True)]
        self.wraps = list(map(self.wrap, self.modules, self.before, [None, *self.blocks]))

    def wrapped(self) -> AbstractContextManager[None]:
        """Wraps the network and its blocks; a bound method, so that a copy of a module has its own."""
        return self.with_forwards(map(MethodType, self.wraps, self.modules))

    @contextmanager
    def with_forwards(self, forwards: Iterable[Callable | None]) -> Iterator[None]:
        """Gives the network and its blocks other forwards, or for None those of their classes."""
        def give(forwards: Iterable[Callable | None]) -> None:
            for module, slot, forward in zip(self.modules, self.slots, forwards, strict=True):
                vars(module).pop(slot, None)
                if forward is not None:
                    vars(module)[slot] = forward

        before = [vars(module).get(slot) for module, slot in zip(self.modules, self.slots, strict=True)]
        try:
            give(forwards)
            yield
        finally:
            give(before)

    def wrap(self, routed_module: nn.Module, own: Callable | None, block: Block | None) -> Callable:
        """Returns what a call of a block (None: of the network) runs; `own` is a forward that the module itself has."""
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
        """Returns the pass of a call of a block (None: of the network); the network begins one, or else block 0."""
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
        self.taken.ids_keep = self.latest.ids_keep
        self.latest.read_call(given)

    def end(self) -> None:
        """Leaves the latest pass; tokens away in one that broke off lose the graph, which would hold them for ever."""
        if self.latest is not None:
            self.latest.given = {}
            for stay in self.latest.stays.values():
                stay.away = None if stay.away is None else stay.away.detach()
        self.latest = None


def mark_checkpoint(run: Pass) -> bool:
    """True if a checkpoint is around this call, whose saved tensors then remember the pass.

    A checkpoint recomputes when backward first asks for something that it saved. So the pass is known there, wherever
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

    done = -1                               # the backward that has recomputed it all

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
    """Counts how often a tensor was changed in place, where that is counted."""
    if torch.compiler.is_compiling() or not isinstance(value, Tensor) or value.is_inference():
        return 0
    return value._version


@cache
def check_torch() -> None:
    """Raises RuntimeError, with the version, for a torch without the private calls that `mark_checkpoint` makes."""
    autograd, seen = torch._C._autograd, []

    def look(x: Tensor) -> Tensor:
        try:                                # an error that left a checkpoint would leave its hooks behind
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
                           f"checkpoints work in another way ({seen}). It is tested with torch 2.11 and 2.15.")


def read_routes(routes: Iterable[Route | Mapping[str, Any]] | Mapping[str, Any]) -> list[Route]:
    """Reads routes: one, or a list of routes or of mappings, which may be in a config such as SimpleTuner's."""
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
    routes: Iterable[Route | Mapping] | Mapping,        # those of this step; SimpleTuner's {"routes": [{…}]} too
    *,
    blocks: str | nn.Module | None = None,              # the list of blocks of a network that is not in FAMILIES
    along: Mapping[str | int, int] | None = None,       # argument of a block, by name or number -> axis of the tokens
    keep: int | Iterable[int] | None = None,            # how many tokens in front are never routed, or which
    mask_noise: Tensor | None = None,                   # (B, routes, N) over the N tokens that may be routed
    keep_mask: Tensor | Callable[..., Tensor] | None = None,    # (B, N) bool, or what makes it of the call
    grow: bool = True,                                  # K grows to the most tokens that keep_mask keeps of a sample
    router: Router | None = None,                       # how tokens are selected; the network's own, or at random
    family: Family | None = None,                       # a row of one's own, in place of blocks, along and keep
    probe: bool = True,                                 # try the blocks first, of a network that is no library's
    ordered: bool = False,                              # its blocks depend on the order of tokens (causal, scans)
) -> Iterator[Taken]:
    """Routes each forward pass of a network inside the `with` block, in training and evaluation; outside it is dense.

    Indices of routes count the blocks of all lists of the network, and routes are numbered in order of depth. Masks
    are sampled in each pass, or decided by mask_noise (see `Router.get_mask`). Yields `taken`, whose ids_keep[r] (B, K)
    are the kept tokens among the N that may be routed. Text, class and register tokens and condition images are never
    routed, and tokens of keep_mask are not routed in this pass. A callable keep_mask gets the arguments of the call as
    a dict by name. A block that a backward recomputes sees the masks of its pass, also outside the `with` block. Inside
    of it, `routed(model, [])` is dense until it is left. Raises ValueError, with the reason, for a network or a call
    that cannot be routed exactly, for a pass that does not reach the blocks, and on leaving if there was no pass.
    """
    check_torch()
    network = network_of(model)
    other = getattr(vars(network).get("forward"), "routing", None)
    is_routed = other is not None and other.open and other.modules[0] is network
    around = [*takewhile(lambda part: part is not network, model.modules()), network]
    compiled = any(hasattr(part, "_orig_mod") or part._compiled_call_impl for part in around)
    routing = Routing(network, read_routes(routes), blocks, along, keep, mask_noise, keep_mask, grow, router, compiled,
                      family, probe, ordered)
    if not any(block.route for block in routing.blocks):     # dense: what was compiled without a route is used
        with other.with_forwards(other.before) if is_routed else nullcontext():
            yield routing.taken
        return
    if is_routed:
        raise ValueError(f"{type(network).__name__} is routed already: pass all routes to one routed(), or [] for a "
                         f"dense pass inside of it.")
    try:
        with routing.wrapped():
            yield routing.taken
        if routing.latest is None:
            raise ValueError(f"{type(network).__name__} was not called inside routed(), so nothing was routed: put the "
                             f"call of this very network into the `with` block.")
        if routing.latest.last < len(routing.blocks):
            routing.latest.advance(len(routing.blocks))
    except RuntimeError as error:
        if routing.latest is not None and routing.latest.between and not isinstance(error, torch.OutOfMemoryError):
            raise ValueError(f"After block {routing.latest.last}, with tokens away, the network itself fails "
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
    """Tries the blocks of a network, known or described as for `routed`, in one pass that `call()` makes of it.

    Returns what was measured, a row for each kind of block and arguments. Raises the errors of `routed`.
    """
    trials = Trials(set(), ordered)
    with torch.no_grad(), routed(model, routes, probe=trials, **description):
        call()
    return trials.rows
