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


@dataclass(frozen=True)
class Stay:
    """The kept tokens of a block, for a function in `along`: it gets an argument of the block and this.

    `length` counts the block's stream with the tokens that are away, `gone` these tokens.
    """

    run: "Pass"
    block: nn.Module
    index: int
    length: int
    gone: int

    @property
    def given(self) -> dict:
        """The block's arguments, by name or number, before tokens were taken out."""
        return self.run.given

    @property
    def network(self) -> nn.Module:
        return self.run.routing.modules[0]

    def places(self, length: int | None = None) -> Tensor:
        """Returns where the kept tokens are (B, length - gone), in the stream or in a sequence of a length."""
        return self.run.stayed(self.run.routing.route_of[self.index], self.length if length is None else length)

    def rows(self, value: Tensor, axis: int) -> Tensor:
        """Keeps the rows of these tokens along an axis that follows one of the samples, or of size 1."""
        return self.run.rows(value, axis, "", self.index, self.length)


class Pass:
    """One forward pass: its masks, and the tokens that are away.

    Of a sequence, `free` tokens may be routed, in one run behind `front` and `text` others. Blocks whose text has a
    stream of its own see their stream without the text, and some of their tables run along the whole sequence.
    """

    def __init__(self, routing: "Routing"):
        self.routing, self.last, self.has_gradient = routing, -1, torch.is_grad_enabled()
        # A number, one for each sample (B,), or places in the sequence; None until `free` or a block says it.
        self.text: Any = None if routing.family.free else routing.keep
        self.free = 0
        self.keep_mask: Tensor | None = None    # (B, free) bool: these are kept
        # Of the block at hand, with the tokens that are away: its stream, the whole sequence; text and others in front.
        self.stream, self.length, self.before, self.front = 0, 0, 0, 0
        self.given: dict[str | int, Any] = {}
        self.between = False                    # true after a block of a route, until the next one
        self.ids_keep: list[Tensor | None] = [None] * len(routing.routes)
        # Of a route and a length: where the kept tokens are. A dict would fix the length in a compiled graph.
        self.index: list[tuple[int, int, Tensor]] = []
        self.away: dict[int, Tensor] = {}  # the tokens before its start
        # The latest table of a name, a route and a list of blocks, its version, and what is kept of it.
        self.along: dict[tuple[str, int, str], tuple[Any, int, Any]] = {}

    def advance(self, block: int) -> None:
        """Notes that a block is called, or at the number of blocks that the pass is over."""
        depth = len(self.routing.blocks)
        if block == depth and self.last == -1:
            raise ValueError(f"{type(self.routing.modules[0]).__name__} called none of its {depth} blocks in "
                             f"{self.routing.specs[0].path}: it calls their parts, or others. Name the blocks that its "
                             f"forward calls.")
        if block != self.last + 1:
            raise ValueError(f"After block {self.last} came {'the end' if block == depth else f'block {block}'}: a "
                             f"route needs each of the {depth} blocks once, from the first to the last.")
        self.last = block

    def read_call(self, network: nn.Module, given: dict[str, Any]) -> None:
        """Counts tokens by the network's arguments, and refuses what cannot be routed."""
        family, mask = self.routing.family, self.routing.keep_mask
        if self.trials:
            self.trials.read_call(given)
        for name in family.alone:
            if given.get(name) is not None and not (isinstance(given[name], tuple) and not given[name]):
                raise ValueError(f"{name} goes to blocks inside a route, past the routed tokens: call the network "
                                 f"without {name}, or without routed().")
        if family.text:
            self.text = family.text(network, given)
        if family.free:
            self.free = family.free(given)
        self.keep_mask = mask(given) if callable(mask) else mask

    def measure(self, spec: Blocks, length: int, front: int) -> None:
        """Notes what is in the sequence or stream of a block, which has a length with the tokens that are away."""
        if isinstance(self.text, tuple):
            self.text = sorted({range(length)[i] for i in self.text})
        if spec.joined and self.text is None:
            self.text = length - self.free
        self.stream, self.length = length, length + (0 if spec.text is None else self.text)
        self.before = self.text if (spec.text is not None or spec.joined) and not self.routing.family.text_last else 0
        self.front = front

    def draw(self, x: Tensor, r: int, block: int) -> None:
        """Draws the mask of route r before its first block, from all tokens x of that block."""
        routing, (batch, length) = self.routing, x.shape[:2]
        if not routing.family.free:
            text = self.text if routing.specs[block].joined else 0
            self.free = length - self.front - (len(text) if isinstance(text, list) else
                                               int(text.max()) if isinstance(text, Tensor) else text)
        if self.free < 1:
            raise ValueError(f"{routing.place(block)}: {length - self.free} of {length} tokens are never routed, so "
                             f"there are none to route; see keep=.")
        noise, shape = routing.mask_noise, (batch, len(routing.routes), self.free)
        if noise is not None and noise.shape != shape:
            raise ValueError(f"mask_noise is {tuple(noise.shape)}, but it must be {shape}: {batch} samples, {shape[1]} "
                             f"routes, and {self.free} tokens that may be routed.")
        if routing.router.selection == "grid":
            routing.router.check(routing.routes, math.sqrt(self.free))
        ratio, noise = self.forced(r, x, None if noise is None else noise[:, r])
        free = routing.router.start_route(x.detach(), self.places(x, length))
        ids = routing.router.get_mask(free, ratio, noise)
        if self.ids_keep[r] is None:  # a recomputation draws only so that later dropout finds its numbers
            self.ids_keep[r], self.away[r] = ids, x

    def forced(self, r: int, x: Tensor, noise: Tensor | None) -> tuple[float | Fraction, Tensor | None]:
        """Returns the ratio and the noise that keep the tokens of keep_mask; the ratio may fall, so that all can."""
        mask, ratio = self.keep_mask, self.routing.routes[r].selection_ratio
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

    def stayed(self, r: int, length: int) -> Tensor:
        """Returns the places (B, …) of the tokens kept on route r, in a sequence or stream of a length."""
        ids = self.ids_keep[r]
        if length == self.free:
            return ids
        for of_route, of_length, index in self.index:
            if of_route == r and of_length == length:
                return index
        places = self.places(ids, length)
        left = ids.new_zeros(len(ids), length).scatter(1, places, 1).scatter(1, places.gather(1, ids), 0)
        index = left.argsort(dim=1, stable=True)[:, :length - self.free + ids.shape[1]]
        self.index.append((r, length, index))
        return index

    def kept(self, value: Tensor, axis: Any, name: str, block: int, stream: int) -> Any:
        """Returns what a block on a route is given of an argument along the tokens; of the same value once."""
        r = self.routing.route_of[block]
        key, version = (name, r, self.routing.specs[block].path), version_of(value)
        source, seen, result = self.along.get(key, (None, 0, None))
        if source is value and seen == version:
            return result
        if callable(axis):
            gone = self.free - self.ids_keep[r].shape[1]
            result = axis(value, Stay(self, self.routing.blocks[block], block, stream, gone))
        else:
            result = self.rows(value, axis, name, block, stream)
        if callable(axis) or not value.requires_grad:  # a recomputation must record the same operations
            self.along[key] = value, version, result
        return result

    def rows(self, value: Tensor, axis: Any, name: str, block: int, stream: int) -> Any:
        """Returns the rows of the kept tokens along an axis of a tensor (see `Blocks`); all where it has none."""
        r, ndim, by_ndim = self.routing.route_of[block], value.ndim, isinstance(axis, Mapping)
        axis = axis.get(ndim) if by_ndim else axis
        axis, rank = axis if isinstance(axis, tuple) else (axis, ndim)
        if axis is None or axis > 0 and value.shape[axis] == 1:         # the same for all tokens
            return value
        axis, batch = range(ndim)[axis], len(self.ids_keep[r])
        has_batch = axis > 0 and (len(value) == 1 or len(value) == batch)
        bare = axis == 0 and (ndim == 2 or ndim == 1 and by_ndim)
        # `in` would not tell that sizes which a compiled graph leaves open are equal.
        sizes = self.free, stream, self.length
        if all(value.shape[axis] != size for size in sizes) or not (has_batch or bare or rank > ndim):
            whose = dict(zip(sizes, ("the tokens that may be routed", "the blocks' stream", "the whole sequence"),
                             strict=True))
            lengths = [f"{length} long ({of})" for length, of in whose.items()]
            raise ValueError(f"{self.routing.place(block)}: {name} is {tuple(value.shape)}. Its axis {axis} must be "
                             f"{' or '.join(lengths)}, behind an axis of {batch} samples or of size 1.")
        index = self.stayed(r, value.shape[axis])
        if bare and rank == ndim:
            return value[index[0]] if ndim == 1 else PerSample(value[index])
        table, axis = value[(None,) * (rank - ndim)], axis + rank - ndim
        # take_along_dim would fix the sizes in a compiled graph.
        before, behind = table.shape[1:axis], table.shape[axis + 1:]
        index = index.view(batch, *[1] * (axis - 1), -1, *[1] * (rank - axis - 1)).expand(batch, *before, -1, *behind)
        return table.expand(batch, *table.shape[1:]).gather(axis, index)

    def enter(self, block: int, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Returns a block's arguments, on a route those of the kept tokens."""
        self.between = False
        routing, spec, names = self.routing, self.routing.specs[block], self.routing.names[block]
        given, r = dict(enumerate(args)) | kwargs, routing.route_of[block]
        given = {argument(names, key): value for key, value in given.items()}
        tokens, trials = self.tokens_of(block), self.trials
        x = alone(given.get(tokens))
        if spec.text is not None:
            self.text = given[argument(names, spec.text)].shape[1]
        if r is None:
            if trials:
                trials.compare(self, block, x)
            return args, kwargs
        for name, value in given.items():
            plain = bool | int | float | str | None
            if name in spec.along or not isinstance(value, dict):
                continue
            if not all(isinstance(v, plain) for v in value.values()):
                raise ValueError(f"{routing.place(block)}: {name} holds {sorted(value)}, and it is not known which of "
                                 f"them have a value per token: call the network without it, or without routed().")
        starts = block == routing.routes[r].start_layer_idx
        if not isinstance(x, Tensor) or x.is_nested or x.ndim != 3:
            found = (type(x).__name__ if not isinstance(x, Tensor) else
                     "a nested tensor (set enable_nested_tensor=False)" if x.is_nested else tuple(x.shape))
            raise ValueError(f"{routing.place(block)}: {tokens} is {found}, but tokens (B, N, D) are routed: name "
                             f"their argument by family=Family((Blocks(path, tokens=),)).")
        stream = x.shape[1] + (0 if starts or spec.whole else self.free - self.ids_keep[r].shape[1])
        self.measure(spec, stream, given.get(spec.front) or 0)

        def as_called(given: dict) -> tuple[tuple, dict]:
            return tuple(given[argument(names, i)] for i in range(len(args))), {name: given[name] for name in kwargs}

        if trials:
            trials.compare(self, block, x)
            trials.check_batch(self, block, x)
        if starts:
            self.draw(x, r, block)
            if routing.own:
                self.check_named(block, given, stream)
        self.given = dict(given)
        if trials:
            trials.try_block(self, block, self.given, as_called)
        if starts or spec.whole:
            x = routing.router.start_route(x, self.stayed(r, stream))
            given[tokens] = [x] if isinstance(given[tokens], list) else x
        self.given = dict(given)
        self.take(block, given)
        return as_called(given)

    @property
    def trials(self) -> Trials | None:
        """What tries the blocks of this pass; compiled code and a block that is recomputed are not tried."""
        routing = self.routing
        return None if torch.compiler.is_compiling() or routing.recomputed is not None else routing.trials

    def tokens_of(self, block: int) -> str | int:
        return argument(self.routing.names[block], self.routing.specs[block].tokens)

    def streams_of(self, block: int) -> set:
        """Returns the arguments of a block that are its streams, or count their tokens."""
        spec = self.routing.specs[block]
        return {argument(self.routing.names[block], key) for key in (spec.tokens, spec.text, spec.front)}

    def take(self, block: int, given: dict) -> None:
        """Replaces the arguments of a block that run along its tokens by those of the kept tokens."""
        routing = self.routing
        for name, part, axis in routing.along[block]:
            value = given.get(name)
            if axis is None and value is not None:
                raise ValueError(f"{routing.place(block)}: {name} relates the tokens to one another, so tokens "
                                 f"cannot be removed: call the network without it, or without routed().")
            if isinstance(value, tuple | list) and not callable(axis):
                given[name] = type(value)(v if part not in ("", str(i)) else
                                          self.kept(v, axis, f"{name}.{i}", block, self.stream)
                                          for i, v in enumerate(value))
            elif value is not None:
                given[name] = self.kept(value, axis, name, block, self.stream)

    def rejoin(self, block: int, x: Tensor) -> Tensor:
        """Puts the tokens of a block's stream among those that are away."""
        routing, spec, r = self.routing, self.routing.specs[block], self.routing.route_of[block]
        ids, away = self.ids_keep[r], self.away[r]
        length = x.shape[1] + self.free - ids.shape[1]
        if spec is not routing.specs[routing.routes[r].start_layer_idx]:
            # they were taken out before text, say, was in their sequence
            before = self.before if spec.joined else 0
            away = nn.functional.pad(away, (0, 0, before, length - before - away.shape[1]))
        return routing.router.end_route(x, self.stayed(r, length), away.to(x.dtype))

    def check_named(self, block: int, given: dict[str | int, Any], stream: int) -> None:
        """Raises ValueError for a value as long as the tokens that is not named: a block might cut it to its own."""
        routing, (batch, _, width) = self.routing, alone(given[self.tokens_of(block)]).shape
        for name in given.keys() - {name for name, _, _ in routing.along[block]} - self.streams_of(block):
            for value in given[name] if isinstance(given[name], tuple | list) else [given[name]]:
                is_wide = isinstance(value, Tensor) and value.ndim > 1
                lengths = value.shape[int(len(value) == batch):-1] if is_wide else ()
                if is_wide and value.ndim == 2 and len(value) == batch and value.shape[1] != width:     # a mask (B, N)
                    lengths = value.shape[1:]
                if any(length in (self.free, stream) for length in lengths):
                    raise ValueError(f"{routing.place(block)}: {name} is {tuple(value.shape)}, as long as the tokens. "
                                     f"Name its axis in along=, or write along={{{name!r}: {{}}}} if it has no value "
                                     f"per token.")

    def leave(self, block: int, output: Any, recomputable: bool) -> Any:
        """Returns a block's output, at the end of a route that of all tokens."""
        routing, given, self.given = self.routing, self.given, {}
        r, spec, several = routing.route_of[block], routing.specs[block], isinstance(output, tuple | list)
        x = output[spec.out] if several else output
        if r is not None:
            streams = [part for part in output if isinstance(part, Tensor) and part.ndim == 3] if several else []
            tokens = alone(given[self.tokens_of(block)])
            is_open = len(streams) > 1 and routing.own and spec.text is None
            if is_open or not isinstance(x, Tensor) or x.shape[:2] != tokens.shape[:2]:
                found = (f"{len(streams)} streams, {[tuple(part.shape) for part in streams]}" if is_open else
                         tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__)
                raise ValueError(f"{routing.place(block)} gets tokens {tuple(tokens.shape)} and returns {found}: say "
                                 f"what is routed by family=Family((Blocks(path, tokens=, text=, out=),)).")
            ends = block == routing.routes[r].end_layer_idx
            self.between = not ends
            if ends or spec.whole:
                x = self.rejoin(block, x)
            if ends:                        # without its graph, which leads to this pass
                away = self.away.pop(r)
                if recomputable or spec.whole:
                    self.away[r] = away.detach()
                self.along.clear()
            if ends or spec.whole:
                output = type(output)([*output[:spec.out], x, *output[spec.out + 1:]]) if several else x
        if self.trials:
            self.trials.leave(self, block, x)
        return output


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
        self.own = family is not None or blocks is not None
        if (family is not None or blocks is None) and (family and blocks, along, keep) != (None, None, None):
            raise ValueError("along= and keep= describe the blocks that blocks= names: leave them out with family=, or "
                             "for a known network.")
        if family is None and blocks is not None:
            family = Family((Blocks(blocks if isinstance(blocks, str) else "blocks=", along or {}, joined=True),),
                            reads=encoder_depths)
        self.family = family_of(network) if family is None or type(network).__name__ in families.REFUSED else family
        self.keep = keep if isinstance(keep, int) else tuple(keep or ()) or 0  # how many are never routed, or which
        self.blocks: list[nn.Module] = []
        self.specs: list[Blocks] = []           # of each block, the list that it is in
        for spec in self.family.lists:
            found = list(blocks) if isinstance(blocks, nn.Module) else spec.found_in(network)
            self.blocks += (getattr(block, "_orig_mod", block) for block in found) if compiled else found
            self.specs += [spec] * len(found)
        inner = [bare(block) for block in self.blocks]
        self.eager = [vars(block).get("forward") or partial(type(block).forward, block) for block in inner]
        self.names = [names_of(block) for block in inner]
        self.along = []                         # of each block: arguments along its tokens, parts of tuples, axes
        for names, spec in zip(self.names, self.specs, strict=True):
            keys = [key.split(".") if isinstance(key, str) else [argument(names, key)] for key in spec.along]
            self.along.append([(*key, "")[:2] + (axis,) for key, axis in zip(keys, spec.along.values(), strict=True)])
        for i, block in enumerate(inner):
            if isinstance(block, nn.ModuleList | nn.ModuleDict):
                raise ValueError(f"{self.specs[i].path}.{i} is a {type(block).__name__} of {len(block)} modules, and "
                                 f"no block: indices of routes would count such groups. Build the network with a list "
                                 f"of blocks (DINOv2: block_chunks=0), each with its own forward and residuals.")
        if repeated := len(self.blocks) - len({*self.blocks}):
            raise ValueError(f"{repeated} of {len(self.blocks)} blocks repeat an earlier one, but a route needs "
                             f"blocks that are called once.")
        known = {name for names in self.names for name in names[1:]}
        if unknown := [key for key in along or () if isinstance(key, str) and key.partition(".")[0] not in known
                       and not all(map(takes_any, inner))]:
            raise ValueError(f"along= names {unknown[0]!r}; besides tokens the blocks take {sorted(known)}.")
        self.routes = resolve_routes(routes, len(self.blocks))
        self.route_of: list[int | None] = [None] * len(self.blocks)
        for r, route in enumerate(self.routes):
            if not route.is_identity or route.path_drop:
                raise ValueError(f"Route {route}: routed() returns tokens unchanged, so it does not support x_T, "
                                 f"x_D_last, return_from and path_drop.")
            span = range(route.start_layer_idx, route.end_layer_idx + 1)
            for i, name in self.family.reads(network).items() if self.family.reads else ():
                if route.selection_ratio > 0 and route.start_layer_idx <= i < route.end_layer_idx:
                    raise ValueError(f"Route {route}: the network reads all tokens after block {i} ({name}={i + 1}). "
                                     f"Start it at block {i + 1} or later, or end it at block {i} or earlier.")
            for i in span if route.selection_ratio > 0 else ():
                self.route_of[i] = r
                for part in self.blocks[i].modules():
                    if isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d) and max(part.kernel_size) > 1:
                        raise ValueError(f"{self.place(i)} convolves over the grid of tokens, so tokens cannot be "
                                         f"removed.")
                    if isinstance(part, nn.MultiheadAttention) and not part.batch_first:
                        raise ValueError(f"{self.place(i)} attends over tokens (N, B, D): set batch_first=True.")
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
        self.call = names_of(network)
        self.defaults = {name: p.default for name, p in inspect.signature(type(network).forward).parameters.items()
                         if p.default is not p.empty}

        self.trials = probe if isinstance(probe, Trials) else None
        if probe is True and not any(self.family is row for row in families.FAMILIES.values()):
            self.trials = Trials(TRIED.setdefault(network, set()), ordered)
        self.open = True                        # until the `with` block ends
        self.latest: Pass | None = None
        self.recomputed: Pass | None = None  # the pass whose blocks a backward computes again, while it does
        self.taken = Taken([None] * len(self.routes))
        self.modules = [network, *self.blocks]
        # What a call of a module runs: a compiled block is wrapped outside of its graph, where checkpoints are seen.
        self.slots = ["forward", *("_compiled_call_impl" if block._compiled_call_impl and not compiled else "forward"
                                   for block in self.blocks)]
        self.before = [vars(module).get(slot) for module, slot in zip(self.modules, self.slots, strict=True)]
        self.wraps = [self.wrap(i, module) for i, module in enumerate(self.modules, start=-1)]

    def place(self, block: int) -> str:
        return f"Route {self.routes[self.route_of[block]]}, block {block} of {self.specs[block].path}"

    def wrapped(self) -> AbstractContextManager[None]:
        """Wraps the network and its blocks; a bound method, so that a copy of a module has its own."""
        return self.with_forwards(map(MethodType, self.wraps, self.modules))

    def unwrapped(self) -> AbstractContextManager[None]:
        return self.with_forwards(self.before)

    @contextmanager
    def with_forwards(self, forwards: Iterable[Callable | None]) -> Iterator[None]:
        """Gives the network and its blocks other forwards, or for None those of their classes."""
        slots = list(zip(self.modules, self.slots, strict=True))
        before = [vars(module).pop(slot, None) for module, slot in slots]

        def give(forwards: Iterable[Callable | None]) -> None:
            for (module, slot), forward in zip(slots, forwards, strict=True):
                vars(module).pop(slot, None)
                if forward is not None:
                    vars(module)[slot] = forward

        try:
            give(forwards)
            yield
        finally:
            give(before)

    def wrap(self, i: int, routed_module: nn.Module) -> Callable:
        """Returns what a call runs of block i, or for i = -1 of the network."""
        of_class, own = type(routed_module).forward, self.before[i + 1]

        def routed_forward(module, *args, **kwargs):
            forward = own or partial(of_class, module)
            if module is not routed_module:  # a copy made inside the `with` block is dense, with weights of its own
                return (deepcopy(own, {id(routed_module): module}) or forward)(*args, **kwargs)
            run = self.pass_of(i, args, kwargs)
            if run is None:
                return forward(*args, **kwargs)
            recomputable = mark_checkpoint(run)
            if i >= 0:
                args, kwargs = run.enter(i, args, kwargs)
                return run.leave(i, forward(*args, **kwargs), recomputable)
            output = forward(*args, **kwargs)
            if self.recomputed is None:
                run.advance(len(self.blocks))
            return output

        routed_forward.routing = self
        return routed_forward

    def pass_of(self, i: int, args: tuple, kwargs: dict[str, Any]) -> Pass | None:
        """Returns the pass that a call of block i belongs to; the network's call begins one, else its first block's."""
        if self.recomputed is not None or not self.open:
            return self.recomputed
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            raise ValueError("A backward inside routed() recomputes a block of an unknown pass. Call backward of a "
                             "dense pass outside, and set use_reentrant=False.")
        if i == -1 or i == 0 and (self.latest is None or self.latest.last >= len(self.blocks) - 1):
            self.begin(Pass(self))
            self.taken.ids_keep = self.latest.ids_keep
            if i == 0:
                self.latest.read_call(self.modules[0], {})
        if i >= 0:
            self.latest.advance(i)
            needs_gradient = self.latest.has_gradient and self.route_of[i] is not None
        else:
            given = dict(zip(self.call, args, strict=False)) | kwargs
            self.latest.read_call(self.modules[0], self.defaults | given)
            needs_gradient = any(isinstance(value, Tensor) and value.requires_grad for value in given.values())
        if needs_gradient and not torch.is_grad_enabled():
            raise ValueError(f"{self.place(i) if i >= 0 else 'The network'} runs without the gradient that its input "
                             f"needs, as in a reentrant checkpoint or one that offloads activations: use torch's "
                             f"checkpoint with use_reentrant=False, or detach the input.")
        return self.latest

    def begin(self, run: Pass | None) -> None:
        """Goes on to another pass; tokens away in one that broke off lose the graph, which would hold them for ever."""
        if self.latest is not None:
            self.latest.away = {r: x.detach() for r, x in self.latest.away.items()}
            self.latest.given = {}
        self.latest = run


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


def argument(names: tuple[str, ...], key: str | int) -> str | int:
    """Returns the name of an argument that is said by its number, or the number where it has no name."""
    return names[key] if isinstance(key, int) and key < len(names) else key


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
    """Returns routes that may be one alone, or mappings, alone or in a config as SimpleTuner's."""
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
    """Returns a route that may be a mapping; raises ValueError with the key that is missing, unknown or of no sense."""
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
    if routing.route_of.count(None) == len(routing.blocks):     # dense: what was compiled without a route is used
        with other.unwrapped() if is_routed else nullcontext():
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
        routing.begin(None)
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
