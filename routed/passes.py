"""`routed` routes a network from outside, without changes to its code; `families` describes the known classes."""

import inspect
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from routed import families
from routed.families import PLAIN_VALUES, Blocks, Family, argument_names, by_axis, leaves, only_element, unwrapped
from routed.modules import BACKWARD, install, plain_class, uninstall
from routed.trial import TRIED, Trial, Trials
from routing_module import Route, Router, resolve_routes


class Block:
    """A block of the network, with its description by argument names and its route."""

    def __init__(self, index: int, module: nn.Module, spec: Blocks, joined: bool):
        self.index, self.module, self.spec = index, unwrapped(module, compiled=False), spec
        self.inner = unwrapped(module)
        self.joined = joined                # the text that is a stream of earlier blocks is in its sequence
        if isinstance(self.inner, nn.ModuleList | nn.ModuleDict):
            raise ValueError(f"{spec.path}.{index} is a {type(self.inner).__name__} of {len(self.inner)} modules, not "
                             f"a block: build the network with a list of blocks (DINOv2: block_chunks=0).")
        self.names = argument_names(self.inner)
        self.tokens, self.text = map(self.name_of, (spec.tokens, spec.text))
        self.along = {self.name_of(key): axis for key, axis in spec.along.items()}
        self.each = spec.each or any(0 in (axis if isinstance(axis, tuple) else [axis]) for axis in self.along.values())
        self.r: int | None = None           # the number of its route
        self.route: Route | None = None
        self.starts = self.ends = False

    def __str__(self) -> str:
        return f"Route {self.route}, block {self.index} of {self.spec.path}"

    def name_of(self, key: str | int | None) -> Any:
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


class Kept:
    """The kept tokens in a call of a block; a function in `along` receives it with an argument of the block.

    `ids` (B, K) index the kept tokens among those that may be routed, in a trial not in ascending order. `length`
    counts the tokens of the block's stream, including routed ones, and `gone` counts the routed ones. `arguments` holds
    the block's arguments, by name or position, before tokens are removed. If the block is called once for each sample,
    all of these are of one `sample`.
    """

    def __init__(self, run: "Pass", arguments: dict, ids: Tensor, is_trial: bool = False, sample: int | None = None):
        self.run, self.arguments, self.ids, self.is_trial, self.sample = run, arguments, ids, is_trial, sample
        self.length, self.gone = run.stream, run.free - ids.shape[1]
        self.network = run.routing.network

    def places(self, length: int | None = None) -> Tensor:
        """Returns the positions of the kept tokens (B, length - gone), in the stream or a sequence of `length`."""
        length = self.length if length is None else length
        if length == self.run.free:
            return self.ids
        free = self.run.places(length, self.ids.device)
        free = (free if self.sample is None or len(free) == 1 else free[self.sample, None]).expand(len(self.ids), -1)
        may_move = self.ids.new_zeros(len(self.ids), length).scatter(1, free, 1)
        kept = free.gather(1, self.ids)
        index = may_move.scatter(1, kept, 0).argsort(dim=1, stable=True)[:, :length - self.gone]
        return index.masked_scatter(may_move.gather(1, index) > 0, kept) if self.is_trial else index

    def order(self) -> Tensor:
        """Returns where in ascending order the tokens of the stream are (B, length - gone)."""
        return self.places().argsort(dim=1).argsort(dim=1)

    def call(self, function: Callable) -> tuple[Any, dict]:
        """Calls a function of the block's arguments by name with what is kept; returns its output, and with what.

        If it is called once for each sample, returns the joined outputs and {}.
        """
        if not self.run.block.each:
            taken = self.take()
            return function(taken), taken
        return joined([function(self.of_sample(b).take()) for b in range(len(self.ids))]), {}

    def of_sample(self, b: int) -> "Kept":
        """Returns what is left for sample b alone."""
        def cut(part: Any, axis: Any) -> Any:
            has_batch = isinstance(part, Tensor) and part.ndim > 0 and len(part) == len(self.ids)
            return part[b:b + 1] if has_batch and axis != 0 else part

        arguments = {}
        for name, value in self.arguments.items():
            axis = self.run.block.along.get(name)
            if isinstance(axis, tuple) and 0 in axis and not self.run.routing.is_described:
                # in known networks, such as Qwen-Image, its other parts have no batch axis, either
                axis = tuple(each or 0 for each in axis)
            arguments[name] = by_axis(cut, value, axis)
        return Kept(self.run, arguments, self.ids[b:b + 1], self.is_trial, b)

    def tokens(self) -> Tensor:
        """Returns the block's tokens without those that are routed."""
        x = only_element(self.arguments[self.run.block.tokens])
        if self.run.has_all:
            return self.run.routing.router.start_route(x, self.places())
        return gathered(x, self.order(), 1) if self.is_trial else x

    def take(self) -> dict:
        """Returns the block's arguments, with its tokens and those along them reduced to the kept tokens."""
        block, taken = self.run.block, dict(self.arguments)
        taken[block.tokens] = [self.tokens()] if isinstance(taken[block.tokens], list) else self.tokens()
        for name, axis in block.along.items():
            if taken.get(name) is not None:
                taken[name] = axis(taken[name], self) if callable(axis) else by_axis(
                    partial(self.rows, name=name), taken[name], axis)
        return taken

    def rows(self, value: Any, axis: int | None, name: str | int = "") -> Any:
        """Returns the rows of the kept tokens along an axis of a tensor (see `Blocks`): (B, K, …)."""
        run, batch = self.run, len(self.ids)
        if not isinstance(value, Tensor) or axis is None or not -value.ndim <= axis < value.ndim:
            return value
        place = axis % value.ndim
        length = value.shape[place]
        # `in` would not find equal sizes that are symbolic in a compiled graph.
        sizes = run.free, run.stream, run.length
        is_along = any(length == size for size in sizes)
        if place > 0 and length == 1:
            return value                    # the same for all tokens
        if not is_along and any(length == size - self.gone for size in sizes):      # reduced by an earlier block
            return gathered(value, self.order(), place) if self.is_trial and place > 0 else value
        if not is_along or place > 0 and len(value) not in (1, batch):
            if not run.routing.is_described and not is_along:
                return value                # of another kind in this call, as one time for each sample
            raise ValueError(f"{run.block}: {name} is {tuple(value.shape)}. Its axis {axis} must be {run.free} long, "
                             f"as the tokens that may be routed, {run.stream}, as the block's stream, or {run.length}, "
                             f"with all text, after an axis of {batch} samples or of size 1.")
        if axis == 0:                       # here is one sample
            return value[self.places(length)[0]]
        if place == 0 and length == batch:
            raise ValueError(f"{run.block}: {name} is {tuple(value.shape)}, which may have a row for each of {batch} "
                             f"samples or of as many tokens: use another batch size.")
        return value[self.places(length)] if place == 0 else gathered(value, self.places(length), place)

    def rejoin(self, x: Tensor) -> Tensor:
        """Puts the tokens of a block's stream back among the routed ones."""
        run, block, away = self.run, self.run.block, self.run.away[self.run.block.r]
        if block.spec is not run.routing.blocks[block.route.start_layer_idx].spec:
            # they were removed before other tokens, such as text, joined their sequence
            before = run.before if block.joined else 0
            away = nn.functional.pad(away, (0, 0, before, self.length - before - away.shape[1]))
        return run.routing.router.end_route(x, self.places(), away.to(x.dtype))


def gathered(value: Tensor, index: Tensor, axis: int) -> Tensor:
    """Returns the rows of an index (B, n) along an axis of a tensor (B or 1, …)."""
    # take_along_dim would make the sizes constants in a compiled graph.
    before, behind = value.shape[1:axis], value.shape[axis + 1:]
    index = index.view(len(index), *[1] * (axis - 1), -1, *[1] * len(behind)).expand(-1, *before, -1, *behind)
    return value.expand(len(index), *value.shape[1:]).gather(axis, index)


def joined(outs: list) -> Any:
    """Joins the outputs of single samples along the batch axis."""
    if len(outs) == 1:
        return outs[0]
    if isinstance(outs[0], tuple | list):
        return type(outs[0])(joined(list(parts)) for parts in zip(*outs, strict=True))
    return torch.cat(outs) if isinstance(outs[0], Tensor) else outs[0]


class Pass:
    """One forward pass: the kept tokens of each route, and the current block.

    `free` tokens of a sequence may be routed. They are contiguous, after `front` others and, if text is in the same
    sequence, after the text `before` them. If text has its own stream, some of a block's tables cover the complete
    sequence.
    """

    def __init__(self, routing: "Routing", arguments: dict[str, Any]):
        """Counts tokens from the network's arguments; raises ValueError for arguments that cannot be routed."""
        self.routing, self.last, self.has_gradient = routing, -1, torch.is_grad_enabled()
        self.recomputes = self.is_pending = self.without_network = False
        self.between = False                    # true after a block of a route, until the next one
        self.block: Block                       # the current one
        self.has_all = False                    # true if its tokens are not reduced yet
        # By number of route. In a `Kept`, which refers to this pass, tensors would wait for the garbage collector.
        self.ids_keep: list[Tensor | None] = [None] * len(routing.routes)
        self.away: dict[int, Tensor | None] = {}        # all tokens before a route's start
        # Numbers of tokens, with routed ones: in the block's stream, in the complete sequence; of text in it.
        self.stream, self.length, self.text, self.before = 0, 0, 0, 0
        family, network, mask = routing.family, routing.network, routing.options.keep_mask
        for name in () if routing.is_described else families.PAST_A_ROUTE:
            if arguments.get(name) not in (None, ()):
                raise ValueError(f"{name} gives blocks inside a route values for all tokens, so the network cannot be "
                                 f"routed: call it without {name}, or without routed().")
        try:
            self.front = family.front(network, arguments) if family.front else routing.options.keep or 0     # or (B,)
            self.free = family.free(network, arguments) if family.free else 0
        except KeyError as name:
            if arguments:
                raise
            raise ValueError(f"The blocks of {type(network).__name__} are called from outside its forward, so its "
                             f"{name}, by which tokens are counted, is not known: count them by front= or free= of "
                             f"your own family=.") from None
        self.keep_mask = mask(arguments) if callable(mask) else mask        # (B, free) bool: these are kept

    @property
    def trials(self) -> Trials | None:
        """Tries the blocks of this pass; None in compiled code and while a block is recomputed."""
        return None if torch.compiler.is_compiling() or self.recomputes else self.routing.tries

    def advance(self, block: int) -> None:
        """Records that a block is called, or, for the number of blocks, that the pass is over."""
        depth = len(self.routing.blocks)
        if block == depth and self.last == -1:
            raise ValueError(f"{type(self.routing.network).__name__} called none of its {depth} blocks in "
                             f"{self.routing.blocks[0].spec.path}: name the blocks that its forward calls.")
        if block != self.last + 1:
            raise ValueError(f"After block {self.last} came {'the end' if block == depth else f'block {block}'}: a "
                             f"route needs each of the {depth} blocks once, from the first to the last.")
        self.last = block

    def mark(self, output: Any, index: int) -> None:
        """Lets the backward through an output say which pass it is; until its graph is freed, the pass is pending."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self.recomputes:
            return

        for value in leaves(list(output.values()) if isinstance(output, Mapping) else output):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                self.routing.wait_for(self)
                value.register_hook(partial(BACKWARD.reach, self, index))

    def recompute(self, block: Block, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Calls a block again in a backward, with the kept tokens of this pass."""
        try:
            self.recomputes = True
            return self.call(block, forward, args, kwargs)
        finally:
            self.recomputes = False
            if block.index >= BACKWARD.index:
                BACKWARD.clear()

    def call(self, block: Block, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Calls a block, on a route only with the kept tokens; at the end of a route, returns all tokens."""
        def by_name(arguments: dict, function: Callable = forward) -> Any:
            return function(*[arguments[block.name_of(i)] for i in range(len(args))],
                            **{name: arguments[name] for name in kwargs})

        self.block, self.between = block, False
        arguments = {block.name_of(i): value for i, value in enumerate(args)} | kwargs
        x = only_element(arguments.get(block.tokens))
        if block.index == 0 and not torch.compiler.is_compiling() and not self.recomputes and isinstance(x, Tensor) \
                and x.grad_fn is not None:
            x.register_hook(BACKWARD.clear)
        if block.text is not None:
            self.text = arguments[block.text].shape[1]
        if self.trials:
            self.trials.compare(self, x)
        if block.route is None:
            output = forward(*args, **kwargs)
            x = output[block.spec.out] if isinstance(output, tuple | list) else output
        else:
            kept = self.enter(arguments, x, by_name)
            try:
                output, taken = kept.call(by_name)
            except (RuntimeError, IndexError, TypeError, AssertionError) as error:
                if not (self.trials and self.trials.failure) or isinstance(error, torch.OutOfMemoryError):
                    raise
                raise ValueError(f"{block} fails when each sample keeps its own tokens "
                                 f"({str(error).partition(chr(10))[0]}). Cause: {self.trials.failure}. What along= "
                                 f"names gets a batch axis, except by axis 0.") from error
            output, x = self.leave(kept, x, output, taken)
        if self.trials:
            self.trials.leave(block, x)
        self.mark(output, block.index)
        return output

    def enter(self, arguments: dict, x: Any, by_name: Callable) -> Kept:
        """Returns the tokens that a block on a route gets, which are sampled before the first block of the route."""
        block = self.block
        if not isinstance(x, Tensor) or x.is_nested or x.ndim != 3:
            what = (type(x).__name__ if not isinstance(x, Tensor) else
                    "a nested tensor (set enable_nested_tensor=False)" if x.is_nested else tuple(x.shape))
            raise ValueError(f"{block}: {block.tokens} is {what}, but tokens (B, N, D) are routed: name their "
                             f"argument by family=Family((Blocks(path, tokens=),)).")
        self.has_all = block.starts or block.spec.whole
        self.stream = x.shape[1] + (0 if self.has_all else self.free - self.ids_keep[block.r].shape[1])
        self.length = self.stream + (self.text if block.text is not None else 0)
        has_text = block.joined or block.text is not None
        self.before = self.text if has_text and not self.routing.family.text_last else 0
        if block.starts:
            self.sample_mask(x)
        if not self.recomputes:
            self.check_named(arguments, x)
        kept = Kept(self, arguments, self.ids_keep[block.r])
        if self.trials:
            self.trials.try_block(kept, by_name)
        return kept

    def sample_mask(self, x: Tensor) -> None:
        """Samples the mask of a route before its first block, from all tokens x of that block."""
        routing, block, (batch, length) = self.routing, self.block, x.shape[:2]
        if not routing.family.free:
            front = int(self.front.max()) if isinstance(self.front, Tensor) else self.front
            self.free = length - front - (self.text if block.joined else 0)
            embedder = getattr(routing.network, "x_embedder", None)
            patches = getattr(embedder, "num_patches", None) if getattr(embedder, "strict_img_size", True) else None
            is_counted = routing.is_described or routing.family.front or routing.options.keep is not None
            has_text = block.joined or block.text is not None
            if patches is not None and patches != self.free and not (is_counted or has_text):
                raise ValueError(f"{block}: the network has {patches} patches, and its blocks get {self.free} tokens. "
                                 f"Write keep= for the number of other tokens in front (keep=0 if all are patches), or "
                                 f"family= if some are behind.")
        if int(self.free * block.route.selection_ratio) < 1:
            raise ValueError(f"{block}: {length - self.free} of {length} tokens are never routed, and the others are "
                             f"too few to route any; see keep=. Tokens are counted along the second axis of "
                             f"{tuple(x.shape)}.")
        noise = routing.options.mask_noise
        if noise is not None:
            must_be("mask_noise", noise, torch.float32, (batch, len(routing.routes), self.free),
                    "samples, routes, and tokens that may be routed")
            noise = noise[:, block.r]
        if routing.router.selection == "grid":
            routing.router.check(routing.routes, math.sqrt(self.free))
        ratio, noise = self.forced(x, noise)
        places = self.places(length, x.device).expand(batch, -1)
        ids = routing.router.get_mask(routing.router.start_route(x.detach(), places), ratio, noise)
        if self.ids_keep[block.r] is None:      # a recomputation samples only to repeat all operations
            self.ids_keep[block.r], self.away[block.r] = ids, x

    def forced(self, x: Tensor, noise: Tensor | None) -> tuple[float | Fraction, Tensor | None]:
        """Returns the ratio and the noise that keep the tokens of keep_mask; with grow, too many lower the ratio."""
        mask, ratio, options = self.keep_mask, self.block.route.selection_ratio, self.routing.options
        if options.keep_mask is None:
            return ratio, noise
        must_be("keep_mask", mask, torch.bool, (len(x), self.free), "samples, and tokens that may be routed")
        stay, most = self.free - int(self.free * ratio), mask.sum(dim=1).max()
        if options.grow:                    # on a GPU this waits
            ratio = Fraction(self.free - max(stay, int(most)), self.free)
        elif torch.compiler.is_compiling():     # a compiled assertion does not wait
            assert most <= stay, "keep_mask keeps more tokens than are kept: lower the ratio, or set grow=True."
        elif mask.device.type == "cpu" and most > stay:     # on a GPU the surplus is routed, as in Router.get_mask
            raise ValueError(f"keep_mask keeps more tokens than the {stay} of {self.free} that are kept at selection "
                             f"ratio {ratio}: lower the ratio, keep fewer, or set grow=True.")
        noise = torch.rand(mask.shape, device=x.device, dtype=torch.float32) if noise is None else noise
        return ratio, self.routing.router.keep(noise, mask.to(x.device, non_blocking=True))

    def places(self, length: int, device: torch.device) -> Tensor:
        """Returns the positions (B or 1, n) of the tokens that may be routed, in a stream or sequence of `length`."""
        first = self.front + (self.before if length == self.length else 0)
        first = first[:, None] if isinstance(first, Tensor) else first
        return first + torch.arange(self.free, device=device)[None]

    def check_named(self, arguments: dict[str | int, Any], x: Tensor) -> None:
        """Raises ValueError for an unnamed value as long as the tokens, as a block might cut it to its own length.

        In known networks only dicts and masks of all pairs of tokens are refused.
        """
        block, is_known = self.block, not self.routing.is_described
        # A set, or `in`, would make sizes constants in a compiled graph.
        lengths = self.free, self.stream, self.stream - self.free + self.ids_keep[block.r].shape[1]

        def check(value: Any, name: Any) -> None:
            how, what = "", value
            if isinstance(value, int) and not isinstance(value, bool | Tensor):
                how = "fewer" if value in lengths[:2] and not is_known else ""
            elif isinstance(value, Tensor) and value.ndim > 1:
                what, has_batch = tuple(value.shape), len(value) == len(x)
                is_mask = value.ndim == 2 and has_batch and value.shape[1] != x.shape[2]        # (B, N)
                sizes = value.shape[1:] if is_mask else value.shape[int(has_batch):-1]
                if any(value.shape[-1] == value.shape[-2] == length for length in lengths):
                    how = "pairs"
                elif not is_known and any(size == length for size in sizes for length in lengths):
                    how = "axis"
            if how:
                instead = "name its axis in along=" if how == "axis" else \
                    f"write along={{{name!r}: {how}}} (`from routed import {how}`)"
                raise ValueError(f"{block}: {name} is {what}, as long as the tokens: {instead}, or write "
                                 f"along={{{name!r}: None}} if it has no value per token.")

        for name in arguments.keys() - block.along.keys() - {block.tokens, block.text}:
            parts = leaves(arguments[name])
            if isinstance(arguments[name], dict) and not all(isinstance(part, PLAIN_VALUES) for part in parts):
                raise ValueError(f"{block}: {name} holds {sorted(map(str, arguments[name]))}, which may have values "
                                 f"per token: call the network without it, or name it in along=.")
            for part in parts:
                check(part, name)

    def leave(self, kept: Kept, x_before: Tensor, output: Any, taken: dict) -> tuple[Any, Tensor]:
        """Returns the output of a block and the tokens in it; at a route's end, all tokens."""
        block, spec, several = self.block, self.block.spec, isinstance(output, tuple | list)
        x = output[spec.out] if several and len(output) > spec.out else output
        size = len(x_before), self.stream - kept.gone, x_before.shape[2]
        returned = [] if torch.compiler.is_compiling() else [
            (part, kept.arguments[name]) for name, part in taken.items()
            if name != block.tokens and part is not kept.arguments[name]]
        streams = [part for part in output if isinstance(part, Tensor) and part.ndim == 3
                   and all(part is not argument for argument, _ in returned)] if several else []
        is_ambiguous = len(streams) > 1 and self.routing.is_described and block.text is None
        if is_ambiguous or not isinstance(x, Tensor) or x.shape[:2] != size[:2]:
            what = (f"{len(streams)} streams, {[tuple(part.shape) for part in streams]}" if is_ambiguous else
                    tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__)
            raise ValueError(f"{block} gets tokens {size} and returns {what}: describe what is routed by "
                             f"family=Family((Blocks(path, tokens=, text=, out=),)).")
        self.between = not block.ends
        if returned and several:            # an argument that a block returns has all its rows again
            output = type(output)(next((full for part, full in returned if part is value), value) for value in output)
        if not (block.ends or spec.whole):
            return output, x
        x = kept.rejoin(x)
        if block.ends and not self.recomputes:          # detached, because its graph refers to this pass
            self.away[block.r] = self.away[block.r].detach() if self.has_gradient else None
        return type(output)([*output[:spec.out], x, *output[spec.out + 1:]]) if several else x, x


@dataclass(frozen=True)
class Options:
    """How a network is routed, besides its routes: the keywords of `routed`."""

    blocks: str | nn.Module | None
    along: Mapping[str | int, Any] | None
    keep: int | None
    mask_noise: Tensor | None
    keep_mask: Tensor | Callable[..., Tensor] | None
    grow: bool
    router: Router | None
    family: Family | None
    probe: bool
    ordered: bool

    def describe(self, network: nn.Module) -> Family:
        """Returns the description of a network: the user's, or the known one as along= and keep= correct it."""
        if self.family is not None and (self.blocks, self.along, self.keep) != (None, None, None):
            raise ValueError("blocks=, along= and keep= describe a network, as family= does: leave them out.")
        if not isinstance(self.keep, int | None) or (self.keep or 0) < 0:
            raise ValueError(f"keep={self.keep!r} must be a number of leading tokens: use keep_mask= for others.")
        if (name := families.owner_of(network).__name__) in families.REFUSED:
            raise ValueError(f"{name} cannot be routed exactly: {families.REFUSED[name]}.")
        if self.family is not None:
            return self.family
        along = dict(self.along or {})
        if self.blocks is not None:
            return Family((Blocks(self.blocks if isinstance(self.blocks, str) else "blocks=", along),))
        family = families.family_of(network)
        if self.keep is not None and (family.front or family.free or any(spec.text is not None
                                                                         for spec in family.lists)):
            raise ValueError(f"keep= does not apply: in {type(network).__name__}, which is known, the tokens that "
                             f"are never routed are counted. Use keep_mask= for others.")
        return replace(family, lists=tuple(replace(spec, along={**spec.along, **along}) for spec in family.lists))


class Routing:
    """A network with its routes: what `routed` yields.

    `ids_keep[r]` (B, K) are the kept tokens of the latest pass, or None before a pass or if no token is routed. Ids
    count only the tokens that may be routed: with a class token, id 0 is token 1. `trials` are those of the blocks of
    this network, after the `with` block.
    """

    def __init__(self, network: nn.Module, routes: list[Route], options: Options):
        self.network, self.options = network, options
        self.family = options.describe(network)
        self.is_described = options.family is not None or options.blocks is not None    # by the user
        self.blocks: list[Block] = []
        for spec in self.family.lists:
            joined = spec.text is None and any(block.text is not None for block in self.blocks)
            for module in spec.modules_of(network, options.blocks):
                self.blocks.append(Block(len(self.blocks), module, spec, joined))
        self.block_of = {block.module: block for block in self.blocks}
        if repeated := len(self.blocks) - len(self.block_of):
            raise ValueError(f"{repeated} of {len(self.blocks)} blocks repeat an earlier one, but a route needs "
                             f"blocks that are called once.")
        names = {name for block in self.blocks for name in block.names[1:]}
        takes_any = any("**" in str(inspect.signature(plain_class(block.inner).forward)) for block in self.blocks)
        if unknown := [key for key in options.along or () if isinstance(key, str) and key not in names
                       and not takes_any]:
            raise ValueError(f"along= names {unknown[0]!r}; besides tokens the blocks take {sorted(names)}.")
        if others := [route for route in routes if not isinstance(route, Route)]:
            raise ValueError(f"{others[0]!r} is not a route: write Route(start_layer_idx, end_layer_idx, "
                             f"selection_ratio), and Route(**part) for a dict.")
        self.routes = resolve_routes(routes, len(self.blocks))
        # REPA's and LayerSync's SiT pass all tokens to another loss after the block of this number, counted from 1.
        read = {value - 1: name for name, value in vars(network).items()
                if name.endswith("encoder_depth") and isinstance(value, int)}
        for r, route in enumerate(self.routes):
            if not route.is_identity or route.path_drop:
                raise ValueError(f"Route {route}: routed() returns tokens unchanged, so it does not support x_T, "
                                 f"x_D_last, return_from and path_drop.")
            span = range(route.start_layer_idx, route.end_layer_idx + 1) if route.selection_ratio > 0 else range(0)
            for i in span:
                if i in read and i < span[-1]:
                    raise ValueError(f"Route {route}: the network reads all tokens after block {i} ({read[i]}={i + 1})."
                                     f" Start it at block {i + 1} or later, or end it at block {i} or earlier.")
                self.blocks[i].put_on(route, r)
        router = getattr(network, "router", None)
        if isinstance(router, nn.Module):
            raise ValueError("This network fuses its own route: call it with routes=net.routes instead.")
        self.router = options.router or (router if isinstance(router, Router) else Router())
        self.arguments = argument_names(network)
        parts = inspect.signature(plain_class(network).forward).parameters.values()
        self.defaults = {part.name: part.default for part in parts if part.default is not part.empty}
        self.tries = Trials(TRIED.setdefault(network, {}), options.ordered) if options.probe else None
        self.ids_keep: list[Tensor | None] = [None] * len(self.routes)
        self.trials: list[Trial] = []
        self.modules = {network: None} | self.block_of
        self.thread = threading.get_ident()
        self.pauses = 0                         # `routed(model, [])` inside
        self.pending = 1                        # the `with` block, and passes through which a backward may still come
        self.active: Pass | None = None         # the pass whose blocks are being called
        self.latest: Pass | None = None

    def is_here(self) -> bool:
        """True in the thread that routes, and in those of its backward."""
        run = BACKWARD.run()
        return threading.get_ident() == self.thread or run is not None and run.routing is self

    def close(self) -> None:
        """Ends the routing; a backward that comes later still finds the passes whose graphs live."""
        self.end()
        self.active = None
        self.trials = [row for row in self.tries.tried.values() if isinstance(row, Trial)] if self.tries else []
        for module in self.modules:
            if module._routed.routing is self:
                module._routed.routing = None
        self.release()

    def wait_for(self, run: Pass) -> None:
        """Keeps the modules routed until a pass is freed."""
        if not run.is_pending:
            run.is_pending = True
            self.pending += 1
            weakref.finalize(run, Routing.release, self).atexit = False

    def release(self) -> None:
        """Ends one of the reasons to keep the modules routed: the `with` block, or a pass; after the last, no more."""
        self.pending -= 1
        if not self.pending:
            for module in self.modules:
                uninstall(module)

    def call(self, block: Block | None, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls the network (None) or a block of it in a forward pass; the network or block 0 begins the pass."""
        if block is None:
            return self.call_network(forward, args, kwargs)
        if block.index == 0 and self.active is None:
            self.active = self.begin({})
            self.active.without_network = True
        elif self.active is None:
            raise ValueError(f"Block {block.index} of {block.spec.path} is called outside of a pass. A backward inside "
                             f"routed() recomputes a block of an unknown pass: call backward of a dense pass outside, "
                             f"and set use_reentrant=False.")
        run = self.active
        run.advance(block.index)
        if run.has_gradient and block.route is not None:
            needs_gradient(str(block))
        output = run.call(block, forward, args, kwargs)
        if block.index == len(self.blocks) - 1 and run.without_network:
            self.active = None
        return output

    def call_network(self, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.active is not None:             # its forward, inside of its call
            return forward(*args, **kwargs)
        arguments = dict(zip(self.arguments, args, strict=False)) | kwargs
        if any(isinstance(value, Tensor) and value.requires_grad for value in arguments.values()):
            needs_gradient("The network")
        run = self.active = self.begin(self.defaults | arguments)
        thread, self.thread = self.thread, self.thread if torch.compiler.is_compiling() else threading.get_ident()
        try:
            output = forward(*args, **kwargs)
        finally:
            self.active, self.thread = None, thread
        run.advance(len(self.blocks))
        if run.is_pending:
            run.mark(output, len(self.blocks))
        return output

    def begin(self, arguments: dict[str, Any]) -> Pass:
        """Begins a pass of the network with these arguments."""
        self.end()
        self.latest = Pass(self, arguments)
        self.ids_keep = self.latest.ids_keep
        return self.latest

    def end(self) -> None:
        """Ends the latest pass; one that failed detaches its routed tokens, whose graph would hold them for ever."""
        if self.tries:
            self.tries.forget()
        if self.latest is not None:
            self.latest.away = {r: away if away is None else away.detach() for r, away in self.latest.away.items()}
        self.latest = None


def needs_gradient(what: str) -> None:
    """Raises ValueError where gradients are off although the input needs them."""
    if not torch.is_grad_enabled():
        raise ValueError(f"{what} runs without the gradient that its input needs, as in a reentrant checkpoint or one "
                         f"that offloads activations: use torch's checkpoint with use_reentrant=False, or detach the "
                         f"input.")


def must_be(name: str, value: Any, dtype: torch.dtype, shape: tuple[int, ...], axes: str) -> None:
    """Raises ValueError for an option that is not a tensor of this dtype and shape."""
    kind = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    if kind != f"{dtype} {shape}":
        raise ValueError(f"{name} is {kind}, but it must be {dtype} {shape}: {axes}.")


@contextmanager
def routed(
    model: nn.Module,                                   # alone, or inside DDP, torch.compile or PEFT
    routes: Route | Iterable[Route],                    # of this step
    *,
    blocks: str | nn.Module | None = None,              # the list of blocks of a network that is not in FAMILIES
    along: Mapping[str | int, Any] | None = None,       # argument of a block, by name or number -> axis of the tokens
    keep: int | None = None,                            # how many tokens in front are never routed
    mask_noise: Tensor | None = None,                   # (B, routes, N) over the N tokens that may be routed
    keep_mask: Tensor | Callable[..., Tensor] | None = None,    # (B, N) bool, or a function of the call's arguments
    grow: bool = True,                                  # raise K to the most tokens that keep_mask keeps in a sample
    router: Router | None = None,                       # how tokens are selected; None: by the network's, or at random
    family: Family | None = None,                       # your own description, instead of blocks, along and keep
    probe: bool = True,                                 # try the blocks first
    ordered: bool = False,                              # the blocks depend on the order of tokens (causal, scans)
) -> Iterator[Routing]:
    """Routes each forward pass of a network inside the `with` block, in training and evaluation; outside it is dense.

    In each pass, a share of the tokens (image patches, say) skips some blocks and then returns unchanged, so that a
    training step costs less (TREAD, arXiv 2501.04765). Indices of routes count the blocks of all lists of the network,
    and routes are numbered in order of depth. Masks are sampled in each pass, or decided by mask_noise (see
    `Router.get_mask`). Text, class and register tokens and condition images are never routed, and tokens of keep_mask
    are not routed in this pass. A callable keep_mask gets the arguments of the call as a dict by name. A block that a
    backward recomputes sees the masks of its pass, also outside the `with` block. Inside it, `routed(model, [])` is
    dense. Other threads see the dense network. Raises ValueError, with the reason, for a network or a call that cannot
    be routed exactly, for a pass that does not reach the blocks, and on exit if there was no pass.
    """
    network = families.network_of(model)
    options = Options(blocks, along, keep, mask_noise, keep_mask, grow, router, family, probe, ordered)
    routing = Routing(network, [routes] if isinstance(routes, Route) else list(routes), options)
    other = getattr(getattr(network, "_routed", None), "routing", None)
    if not any(block.route for block in routing.blocks):     # dense: uses what was compiled without a route
        outside = other or routing
        outside.pauses += 1
        try:
            yield routing
        finally:
            outside.pauses -= 1
        return
    if other is not None:
        raise ValueError(f"{type(network).__name__} is routed already: pass all routes to one routed(), or [] for a "
                         f"dense pass inside of it.")
    for module, block in routing.modules.items():
        install(module, routing, block)
    try:
        yield routing
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
        routing.close()
