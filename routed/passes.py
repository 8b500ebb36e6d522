"""`routed` routes a network from outside, without changes to its code; `families` describes the known classes."""

import inspect
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from routed import families
from routed.families import Blocks, Family, argument_names, bare, family_of, mapped, network_of, only_element, takes_any
from routed.modules import BACKWARD, entry_of, install, own_class, uninstall
from routed.trial import TRIED, Trial, Trials
from routing_module import Route, Router, resolve_routes


class Block:
    """A block of the network, with its description by argument names and its route."""

    def __init__(self, index: int, module: nn.Module, spec: Blocks):
        self.index, self.module, self.spec, self.inner = index, module, spec, bare(module)
        if isinstance(self.inner, nn.ModuleList | nn.ModuleDict):
            raise ValueError(f"{spec.path}.{index} is a {type(self.inner).__name__} of {len(self.inner)} modules, not "
                             f"a block: route indices would count such groups. Build the network with a list of "
                             f"blocks (DINOv2: block_chunks=0), each with its own forward and residuals.")
        self.names = argument_names(self.inner)
        self.tokens, self.text, self.front = map(self.name_of, (spec.tokens, spec.text, spec.front))
        self.along = []                     # (an argument along the tokens, the part of it if it is a tuple, the axis)
        for key, axis in spec.along.items():
            name, _, part = key.partition(".") if isinstance(key, str) else (self.name_of(key), "", "")
            self.along.append((name, part, axis))
        self.known = {self.tokens, self.text, self.front, *(name for name, _, _ in self.along)}
        # A table whose first axis is that of the tokens has no batch axis, and the block cannot take one.
        self.by_sample = [(name, part) for name, part, axis in self.along if axis == 0 and not callable(axis)]
        self.in_turn = own_class(module).__call__ is not nn.Module.__call__     # it may contain a checkpoint
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


class Kept:
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
    network = property(lambda self: self.run.routing.network)

    def places(self, length: int | None = None) -> Tensor:
        """Returns the positions of the kept tokens (B, length - gone), in the stream or a sequence of `length`."""
        length, ids, block = self.length if length is None else length, self.ids, self.run.block.index
        if length == self.run.free:
            return ids
        for known, index, made_by in self.index:
            # A recomputed block repeats the operations of its first call, as selective checkpoints count them.
            if known == length and not (self.run.recomputes and made_by == block):
                return index
        places = self.run.places(ids, length)
        left = ids.new_zeros(len(ids), length).scatter(1, places, 1).scatter(1, places.gather(1, ids), 0)
        index = left.argsort(dim=1, stable=True)[:, :length - self.gone]
        if not self.run.recomputes:
            self.index.append((length, index, block))
        return index

    def take(self, given: dict) -> dict:
        """Returns a block's arguments, with those along its tokens reduced to the kept tokens."""
        taken = dict(given)
        for name, part, axis in self.run.block.along:
            value = taken.get(name)
            if value is not None and axis is not None:
                is_part = part and isinstance(value, tuple | list)
                taken[name] = type(value)(self.kept(v, axis, f"{name}.{i}") if part == str(i) else v
                                          for i, v in enumerate(value)) if is_part else self.kept(value, axis, name)
        return taken

    def take_functions(self, given: dict) -> dict:
        """Returns arguments for all tokens in order; only those that functions reduce are made by them."""
        return given | {name: axis(given[name], self) for name, _, axis in self.run.block.along
                        if callable(axis) and given.get(name) is not None}

    def kept(self, value: Any, axis: Any, name: str) -> Any:
        """Reduces an argument along the tokens to the kept ones; computes it once for the same value."""
        run, key, version = self.run, (name, self.run.block.spec.path), version_of(value)
        source, seen, result, made_by = self.along.get(key, (None, 0, None, -1))
        if run.recomputes:
            result, made_by = run.taken.get((run.block.index, name), (None, run.block.index))
            is_known = made_by != run.block.index
        else:
            is_known = source is value and seen == version
        if not is_known:
            made_by = run.block.index
            result = axis(value, self) if callable(axis) else mapped(partial(self.rows, axis=axis, name=name), value)
            # A recomputation must record the same operations, and a stored function could refer to its own pass.
            if not getattr(value, "requires_grad", False) and not callable(result) and not run.recomputes:
                self.along[key] = value, version, result, made_by
        if run.has_gradient and not run.recomputes and not callable(result) and made_by != run.block.index:
            run.taken[run.block.index, name] = result, made_by
        return result

    def rows(self, value: Any, axis: int, name: str = "") -> Any:
        """Returns the rows of the kept tokens along an axis of a tensor (see `Blocks`): (B, K, …)."""
        run, batch = self.run, len(self.ids)
        if not isinstance(value, Tensor) or not -value.ndim <= axis < value.ndim:
            return value
        place = axis % value.ndim
        length = value.shape[place]
        # `in` would not find equal sizes that are symbolic in a compiled graph.
        sizes = run.free, run.stream, run.length
        is_along = any(length == size for size in sizes)
        if place > 0 and length == 1 or not is_along and any(length == size - self.gone for size in sizes):
            return value                    # the same for all tokens, or reduced already by an earlier block
        if not is_along or place > 0 and len(value) not in (1, batch):
            if not run.routing.described and not is_along:
                return value                # of another kind in this call, as one time for each sample
            whose = dict(zip(sizes, ("the tokens that may be routed", "the blocks' stream", "the complete sequence"),
                             strict=True))
            lengths = [f"{length} long ({owner})" for length, owner in whose.items()]
            raise ValueError(f"{run.block}: {name} is {tuple(value.shape)}. Its axis {axis} must be "
                             f"{' or '.join(lengths)}, after an axis of {batch} samples or of size 1.")
        index = self.places(length)
        if place == 0:
            return value[index]
        # take_along_dim would make the sizes constants in a compiled graph.
        before, behind = value.shape[1:place], value.shape[place + 1:]
        index = index.view(batch, *[1] * (place - 1), -1, *[1] * len(behind)).expand(batch, *before, -1, *behind)
        return value.expand(batch, *value.shape[1:]).gather(place, index)

    def rejoin(self, x: Tensor) -> Tensor:
        """Puts the tokens of a block's stream back among the routed ones."""
        run, spec, away = self.run, self.run.block.spec, self.away
        if spec is not run.routing.blocks[run.block.route.start_layer_idx].spec:
            # they were removed before other tokens, such as text, joined their sequence
            before = run.before if spec.joined else 0
            away = nn.functional.pad(away, (0, 0, before, self.length - before - away.shape[1]))
        return run.routing.router.end_route(x, self.places(), away.to(x.dtype))


def sample_by_sample(function: Callable, block: Block, taken: dict, batch: int, in_turn: bool = False) -> Any:
    """Calls a block whose tables have no batch axis, so that each sample has its own rows of them.

    `function` receives the arguments by name. `torch.func.vmap` hides the batch axis from the block. If it cannot, as
    where a block contains a checkpoint, the samples are called in turn.
    """
    batched: list[Tensor] = []

    def hide(value: Any, name: str | int, is_table: bool) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        if name in block.spec.split:
            value = block.spec.split[name](value, batch)
        elif len(value) != batch:
            return value
        elif not is_table:
            value = value[:, None]
        batched.append(value)
        return Hidden(len(batched) - 1)

    tables = dict(block.by_sample)
    hidden = {name: type(value)(mapped(partial(hide, name=name, is_table=str(i) == tables[name]), v)
                                for i, v in enumerate(value)) if tables.get(name) and isinstance(value, tuple | list)
              else mapped(partial(hide, name=name, is_table=name in tables), value) for name, value in taken.items()}
    def of_sample(*tensors: Tensor) -> Any:
        return function({name: mapped(lambda v: tensors[v] if isinstance(v, Hidden) else v, value)
                         for name, value in hidden.items()})

    if batch == 1 or in_turn:
        outs = [of_sample(*(value[b] for value in batched)) for b in range(batch)]
        return joined(outs) if batch > 1 else outs[0]
    out = torch.func.vmap(of_sample, randomness="different")(*batched)
    return mapped(lambda value: value.flatten(0, 1) if isinstance(value, Tensor) else value, out)


def joined(outs: list) -> Any:
    """Joins the outputs of single samples along the batch axis."""
    if isinstance(outs[0], tuple | list):
        return type(outs[0])(joined(list(parts)) for parts in zip(*outs, strict=True))
    return torch.cat(outs) if isinstance(outs[0], Tensor) else outs[0]


class Hidden(int):
    """The place of a tensor among those that vmap receives."""


class Pass:
    """One forward pass: the kept tokens of each route, and the current block.

    `free` tokens of a sequence may be routed. They are contiguous, after `front` and `text` others. If text has its own
    stream, the block's stream does not contain it, but some of the block's tables cover the complete sequence.
    """

    def __init__(self, routing: "Routing"):
        self.routing, self.last, self.has_gradient = routing, -1, torch.is_grad_enabled()
        self.recomputes, self.is_held, self.without_network = False, False, True
        # A number, one for each sample (B,), or positions in the sequence; None until a block's call determines it.
        self.text: Any = None if routing.family.free else routing.keep
        self.free = 0
        self.keep_mask: Tensor | None = None    # (B, free) bool: these are kept
        # By number of route. In a `Kept`, which refers to this pass, tensors would wait for the garbage collector.
        self.ids_keep: list[Tensor | None] = [None] * len(routing.routes)
        self.away: dict[int, Tensor | None] = {}
        # (length of a sequence, positions of the kept tokens, block). In a dict the length would be compiled in.
        self.index: dict[int, list[tuple[int, Tensor, int]]] = {}
        # For an argument's name and a list of blocks: its latest value, its version, what is kept of it, and the block.
        self.along: dict[int, dict[tuple[str, str], tuple[Any, int, Any, int]]] = {}
        # For a block and an argument: what an earlier block has kept of it, and which.
        self.taken: dict[tuple[int, str], tuple[Any, int]] = {}
        self.between = False                    # true after a block of a route, until the next one
        self.block: Block | None = None         # the current one, and its arguments
        self.given: dict[str | int, Any] = {}
        # Numbers of tokens, with routed ones: in its stream, in the complete sequence; of text and others in front.
        self.stream, self.length, self.before, self.front = 0, 0, 0, 0

    @property
    def trials(self) -> Trials | None:
        """Tries the blocks of this pass; None in compiled code and while a block is recomputed."""
        return None if torch.compiler.is_compiling() or self.recomputes else self.routing.trials

    def advance(self, block: int) -> None:
        """Records that a block is called, or, for the number of blocks, that the pass is over."""
        depth = len(self.routing.blocks)
        if block == depth and self.last == -1:
            raise ValueError(f"{type(self.routing.network).__name__} called none of its {depth} blocks in "
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
            self.text = family.text(self.routing.network, given)
        if family.free:
            self.free = family.free(given)
        self.keep_mask = mask(given) if callable(mask) else mask

    def hold(self, output: Any, index: int) -> None:
        """Lets the backward through an output say which pass it is; until its graph is freed, the pass is held."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self.recomputes:
            return

        def hook(value: Any) -> None:
            if isinstance(value, Tensor) and value.grad_fn is not None:
                self.routing.hold(self)
                value.register_hook(partial(BACKWARD.reach, self, index))

        mapped(hook, list(output.values()) if isinstance(output, Mapping) else output)

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
        routing = self.routing

        def with_arguments(given: dict, function: Callable = forward) -> Any:
            return function(*[given[block.name_of(i)] for i in range(len(args))],
                            **{name: given[name] for name in kwargs})

        self.block, self.between = block, False
        given = {block.name_of(i): value for i, value in enumerate(args)} | kwargs
        x = only_element(given.get(block.tokens))
        if block.index == 0 and not torch.compiler.is_compiling() and not self.recomputes and isinstance(x, Tensor) \
                and x.grad_fn is not None:
            x.register_hook(BACKWARD.clear)
        if block.text is not None:
            self.text = given[block.text].shape[1]
        if block.route is None:
            if self.trials:
                self.trials.compare(self, x)
            output = forward(*args, **kwargs)
            x = output[block.spec.out] if isinstance(output, tuple | list) else output
        else:
            taken = self.enter(given, x, with_arguments)
            tokens = only_element(taken[block.tokens])
            output = routing.feed(block, with_arguments, taken, len(tokens))
            output, x = self.leave(tokens, output, given, taken)
        if self.trials:
            self.trials.leave(block, x)
        self.hold(output, block.index)
        return output

    def enter(self, given: dict, x: Any, with_arguments: Callable) -> dict:
        """Returns a block's arguments for the kept tokens, which are sampled before the first block of its route."""
        routing, block, trials = self.routing, self.block, self.trials
        for name, value in given.items():
            if isinstance(value, dict) and name not in block.known and holds_tensors(value):
                raise ValueError(f"{block}: {name} holds {sorted(map(str, value))}, and it is not known which of them "
                                 f"have a value per token: call the network without it, or name it in along=.")
        if not isinstance(x, Tensor) or x.is_nested or x.ndim != 3:
            what = (type(x).__name__ if not isinstance(x, Tensor) else
                    "a nested tensor (set enable_nested_tensor=False)" if x.is_nested else tuple(x.shape))
            raise ValueError(f"{block}: {block.tokens} is {what}, but tokens (B, N, D) are routed: name their "
                             f"argument by family=Family((Blocks(path, tokens=),)).")
        has_all = block.starts or block.spec.whole      # its tokens are not reduced yet
        gone = 0 if has_all else self.free - self.ids_keep[block.r].shape[1]
        self.measure(x.shape[1] + gone, given.get(block.front) or 0)
        if trials:
            trials.compare(self, x)
            trials.check_batch(block, x)
        if block.starts:
            self.sample_mask(x)
        if routing.described and not self.recomputes:
            self.check_named(given, x)
        kept, self.given = Kept(self), given
        if trials:
            trials.try_block(kept, given, with_arguments)
        if has_all:
            x = routing.router.start_route(x, kept.places())
            given = given | {block.tokens: [x] if isinstance(given[block.tokens], list) else x}
        taken, self.given = kept.take(given), {}
        return taken

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
                             f"route; see keep=. Tokens are (B, N, D), the second axis of {tuple(x.shape)}.")
        noise, shape = routing.mask_noise, (batch, len(routing.routes), self.free)
        if noise is not None and noise.shape != shape:
            raise ValueError(f"mask_noise is {tuple(noise.shape)}, but it must be {shape}: {batch} samples, {shape[1]} "
                             f"routes, and {self.free} tokens that may be routed.")
        if routing.router.selection == "grid":
            routing.router.check(routing.routes, math.sqrt(self.free))
        ratio, noise = self.forced(x, None if noise is None else noise[:, block.r])
        free = routing.router.start_route(x.detach(), self.places(x, length))
        ids = routing.router.get_mask(free, ratio, noise)
        if self.ids_keep[block.r] is None:      # a recomputation samples only to repeat all operations
            self.ids_keep[block.r], self.away[block.r], self.index[block.r], self.along[block.r] = ids, x, [], {}

    def forced(self, x: Tensor, noise: Tensor | None) -> tuple[float | Fraction, Tensor | None]:
        """Returns the ratio and the noise that keep the tokens of keep_mask; with grow, too many lower the ratio."""
        mask, ratio, options = self.keep_mask, self.block.route.selection_ratio, self.routing.options
        if self.routing.keep_mask is None:
            return ratio, noise
        if not isinstance(mask, Tensor):
            raise ValueError(f"keep_mask is {type(mask).__name__}, but it must be a bool tensor (B, N), or a function "
                             f"that returns one.")
        if mask.dtype != torch.bool or mask.shape != (len(x), self.free):
            raise ValueError(f"keep_mask is {mask.dtype} {tuple(mask.shape)}, but it must be torch.bool "
                             f"{(len(x), self.free)}: {len(x)} samples, and {self.free} tokens that may be routed.")
        stay, most = self.free - int(self.free * ratio), mask.sum(dim=1).max()
        if options.grow:                    # on a GPU this waits
            ratio = Fraction(self.free - max(stay, int(most)), self.free)
        elif torch.compiler.is_compiling():     # a compiled assertion does not wait
            assert most <= stay, "keep_mask keeps more tokens than are kept: lower the ratio, or set grow=True."
        elif mask.device.type == "cpu" and most > stay:     # on a GPU the surplus is routed, as in Router.get_mask
            raise ValueError(f"keep_mask keeps more tokens than the {stay} of {self.free} that are kept at selection "
                             f"ratio {ratio}: lower the ratio, keep fewer, or set grow=True.")
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
        block, batch, width = self.block, len(x), x.shape[2]
        # A set, or `in`, would make sizes constants in a compiled graph.
        lengths = self.free, self.stream, self.stream - self.free + self.ids_keep[block.r].shape[1]

        def check(value: Any, name: Any) -> None:
            if isinstance(value, int) and not isinstance(value, bool) and value in (self.free, self.stream):
                raise ValueError(f"{block}: {name} is {value}, as many as the tokens. Write along={{{name!r}: fewer}} "
                                 f"if it counts them (`from routed import fewer`), or along={{{name!r}: None}} if not.")
            if not isinstance(value, Tensor) or value.ndim < 2:
                return
            sizes = value.shape[int(len(value) == batch):-1]
            if value.ndim == 2 and len(value) == batch and value.shape[1] != width:         # a mask (B, N)
                sizes = value.shape[1:]
            if any(size == length for size in sizes for length in lengths):
                how = (f"write along={{{name!r}: pairs}} (`from routed import pairs`)"
                       if value.ndim > 2 and value.shape[-1] == value.shape[-2] else "name its axis in along=")
                raise ValueError(f"{block}: {name} is {tuple(value.shape)}, as long as the tokens: {how}, or write "
                                 f"along={{{name!r}: None}} if it has no value per token.")

        for name in given.keys() - block.known:
            mapped(partial(check, name=name), given[name])

    def leave(self, tokens: Tensor, output: Any, given: dict, taken: dict) -> tuple[Any, Tensor]:
        """Returns the output of a block that got `tokens`, and the tokens in it; at a route's end, all tokens."""
        block, spec, several = self.block, self.block.spec, isinstance(output, tuple | list)
        x = output[spec.out] if several and len(output) > spec.out else output
        handed = [] if torch.compiler.is_compiling() else [
            (part, given[name]) for name, part in taken.items() if part is not given[name] and part is not tokens]
        streams = [part for part in output if isinstance(part, Tensor) and part.ndim == 3
                   and all(part is not argument for argument, _ in handed)] if several else []
        is_ambiguous = len(streams) > 1 and self.routing.described and block.text is None and spec.text is None
        if is_ambiguous or not isinstance(x, Tensor) or x.shape[:2] != tokens.shape[:2]:
            what = (f"{len(streams)} streams, {[tuple(part.shape) for part in streams]}" if is_ambiguous else
                    tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__)
            raise ValueError(f"{block} gets tokens {tuple(tokens.shape)} and returns {what}: describe what is routed "
                             f"by family=Family((Blocks(path, tokens=, text=, out=),)).")
        self.between = not block.ends
        if handed and several:              # an argument that a block hands on has all its rows again
            output = type(output)(next((full for part, full in handed if part is value), value) for value in output)
        if not (block.ends or spec.whole):
            return output, x
        x = Kept(self).rejoin(x)
        if block.ends and not self.recomputes:          # detached, because its graph refers to this pass
            self.away[block.r] = self.away[block.r].detach() if self.has_gradient else None
            self.along[block.r].clear()
        return type(output)([*output[:spec.out], x, *output[spec.out + 1:]]) if several else x, x


@dataclass
class KeptTokens:
    """What `routed` yields: `ids_keep[r]` (B, K) of the latest pass, or None before a pass or if no token is routed.

    Ids count only the tokens that may be routed: with a class token, id 0 is token 1. `trials` are those of the blocks
    of this network so far.
    """

    ids_keep: list[Tensor | None]
    trials: list[Trial] = field(default_factory=list)


@dataclass(frozen=True)
class Options:
    """How a network is routed, besides its routes: the keywords of `routed`."""

    blocks: str | nn.Module | None
    along: Mapping[str | int, Any] | None
    keep: int | Iterable[int] | None
    mask_noise: Tensor | None
    keep_mask: Tensor | Callable[..., Tensor] | None
    grow: bool
    router: Router | None
    family: Family | None
    probe: bool
    ordered: bool

    def __post_init__(self) -> None:
        noise = self.mask_noise
        if self.family is not None and (self.blocks, self.along, self.keep) != (None, None, None):
            raise ValueError("blocks=, along= and keep= describe a network, as family= does: leave them out.")
        if noise is not None and not (isinstance(noise, Tensor) and noise.is_floating_point()):
            raise ValueError(f"mask_noise is {getattr(noise, 'dtype', type(noise).__name__)}, but it must be a tensor "
                             f"of floats (B, routes, N).")

    def describe(self, network: nn.Module) -> Family:
        """Returns the description of a network: the user's, or the known one as along= and keep= correct it."""
        families.check_refused(network)
        if self.family is not None:
            return self.family
        along = dict(self.along or {})
        if self.blocks is not None:
            path = self.blocks if isinstance(self.blocks, str) else "blocks="
            return Family((Blocks(path, along, joined=True),), reads=families.encoder_depths)
        family = family_of(network)
        if self.keep is not None:
            if family.text or family.free or any(spec.text is not None for spec in family.lists):
                raise ValueError(f"keep= does not apply: in {type(network).__name__}, which is known, the tokens that "
                                 f"are never routed are counted. Use keep_mask= for others.")
            family = replace(family, lists=tuple(replace(spec, joined=True) for spec in family.lists))
        return replace(family, lists=tuple(replace(spec, along={**spec.along, **along}) for spec in family.lists))


class Routing:
    """A network with its routes: all that is fixed when `routed` is entered."""

    def __init__(self, network: nn.Module, routes: list[Route], options: Options):
        self.network, self.options = network, options
        self.mask_noise, self.keep_mask = options.mask_noise, options.keep_mask
        self.family = options.describe(network)
        self.described = options.family is not None or options.blocks is not None       # by the user
        keep = options.keep
        self.keep = keep if isinstance(keep, int) else tuple(keep or ()) or 0  # how many are never routed, or which
        self.blocks: list[Block] = []
        for spec in self.family.lists:
            for module in options.blocks if isinstance(options.blocks, nn.Module) else spec.modules_of(network):
                module = getattr(module, "_checkpoint_wrapped_module", module)
                self.blocks.append(Block(len(self.blocks), module, spec))
        self.block_of = {block.module: block for block in self.blocks}
        if repeated := len(self.blocks) - len(self.block_of):
            raise ValueError(f"{repeated} of {len(self.blocks)} blocks repeat an earlier one, but a route needs "
                             f"blocks that are called once.")
        known = {name for block in self.blocks for name in block.names[1:]}
        if unknown := [key for key in options.along or () if isinstance(key, str) and key.partition(".")[0] not in known
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
        self.router = options.router or (own if isinstance(own, Router) else Router())
        self.arguments = argument_names(network)
        self.defaults = {name: p.default for name, p in inspect.signature(own_class(network).forward).parameters.items()
                         if p.default is not p.empty}
        self.tried = TRIED.setdefault(network, {})
        self.trials = Trials(self.tried, options.ordered) if options.probe else None
        self.kept = KeptTokens([None] * len(self.routes))
        self.modules = {network: None} | self.block_of
        self.thread = threading.get_ident()
        self.open = False                       # until the `with` block ends
        self.held = 0                           # passes through which a backward may still come
        self.active: Pass | None = None         # the pass whose blocks are being called
        self.latest: Pass | None = None

    def feed(self, block: Block, function: Callable, taken: dict, batch: int, *call: Callable) -> Any:
        """Calls a block with the arguments of kept tokens."""
        if not block.by_sample:
            return function(taken, *call)
        in_turn = block.in_turn or ("in turn", block.spec.path) in self.tried
        call_block = partial(sample_by_sample, lambda arguments: function(arguments, *call), block, taken, batch)
        try:
            return call_block(in_turn)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:                    # as torch.func.vmap in eager code cannot call a compiled block
            if in_turn or batch == 1 or torch.compiler.is_compiling():
                raise
            self.tried["in turn", block.spec.path] = None
            return call_block(True)

    def is_here(self) -> bool:
        """True in the thread that routes, and in those of its backward."""
        run = BACKWARD.run()
        return threading.get_ident() == self.thread or run is not None and run.routing is self

    def install(self) -> None:
        self.open = True
        for module, block in self.modules.items():
            install(module, self, block)

    def close(self) -> None:
        """Ends the routing; a backward that comes later still finds the passes whose graphs live."""
        self.end()
        self.open, self.active = False, None
        self.kept.trials = self.trials.rows if self.trials else []
        for module in self.modules:
            entry = entry_of(module)
            if entry is not None and entry.routing is self:
                entry.routing = None
        self.release()

    def hold(self, run: Pass) -> None:
        if not run.is_held:
            run.is_held = True
            self.held += 1
            weakref.finalize(run, Routing.let_go, self).atexit = False

    def let_go(self) -> None:
        self.held -= 1
        self.release()

    def release(self) -> None:
        if not self.open and not self.held:
            for module in self.modules:
                uninstall(module)
            self.held = -1

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Lets the network be dense for a while."""
        entries = [(entry, entry.routing) for entry in map(entry_of, self.modules)]
        try:
            for entry, _ in entries:
                entry.routing = None
            yield
        finally:
            for entry, routing in entries:
                entry.routing = routing

    def call(self, block: Block | None, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls the network (None) or a block of it in a forward pass; the network or block 0 begins the pass."""
        if block is not None:
            if block.index == 0 and self.active is None:
                self.active = self.begin({})
            elif self.active is None:
                raise ValueError(f"Block {block.index} of {block.spec.path} is called outside of a pass. A backward "
                                 f"inside routed() recomputes a block of an unknown pass: call backward of a dense "
                                 f"pass outside, and set use_reentrant=False.")
            run = self.active
            run.advance(block.index)
            if run.has_gradient and block.route is not None:
                needs_gradient(str(block))
            output = run.call(block, forward, args, kwargs)
            if block.index == len(self.blocks) - 1 and run.without_network:
                self.active = None
            return output
        if self.active is not None:             # its forward, inside of its call
            return forward(*args, **kwargs)
        given = dict(zip(self.arguments, args, strict=False)) | kwargs
        if any(isinstance(value, Tensor) and value.requires_grad for value in given.values()):
            needs_gradient("The network")
        run = self.active = self.begin(self.defaults | given)
        run.without_network = False
        thread, self.thread = self.thread, self.thread if torch.compiler.is_compiling() else threading.get_ident()
        try:
            output = forward(*args, **kwargs)
        finally:
            self.active, self.thread = None, thread
        if self.trials:
            self.trials.left, self.trials.inputs = None, set()
        run.advance(len(self.blocks))
        if run.is_held:
            run.hold(output, len(self.blocks))
        return output

    def begin(self, given: dict[str, Any]) -> Pass:
        """Begins a pass of the network with these arguments."""
        self.end()
        self.latest = Pass(self)
        self.kept.ids_keep = self.latest.ids_keep
        self.latest.read_call(given)
        return self.latest

    def end(self) -> None:
        """Ends the latest pass; one that failed detaches its routed tokens, whose graph would hold them for ever."""
        if self.trials:
            self.trials.left, self.trials.inputs = None, set()
        if self.latest is not None:
            self.latest.given = {}
            self.latest.away = {r: away if away is None else away.detach() for r, away in self.latest.away.items()}
        self.latest = None


def needs_gradient(what: str) -> None:
    """Raises ValueError where gradients are off although the input needs them."""
    if not torch.is_grad_enabled():
        raise ValueError(f"{what} runs without the gradient that its input needs, as in a reentrant checkpoint or one "
                         f"that offloads activations: use torch's checkpoint with use_reentrant=False, or detach the "
                         f"input.")


def holds_tensors(value: Any) -> bool:
    """True if an argument holds anything but plain values."""
    if isinstance(value, Mapping | tuple | list):
        return any(map(holds_tensors, value.values() if isinstance(value, Mapping) else value))
    return not isinstance(value, bool | int | float | str | None)


def version_of(value: Any) -> int:
    """Returns how often a tensor was changed in place, or 0 if torch does not count it."""
    if torch.compiler.is_compiling() or not isinstance(value, Tensor) or value.is_inference():
        return 0
    return value._version


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
    along: Mapping[str | int, Any] | None = None,       # argument of a block, by name or number -> axis of the tokens
    keep: int | Iterable[int] | None = None,            # how many tokens in front are never routed, or which
    mask_noise: Tensor | None = None,                   # (B, routes, N) over the N tokens that may be routed
    keep_mask: Tensor | Callable[..., Tensor] | None = None,    # (B, N) bool, or a function of the call's arguments
    grow: bool = True,                                  # raise K to the most tokens that keep_mask keeps in a sample
    router: Router | None = None,                       # how tokens are selected; None: by the network's, or at random
    family: Family | None = None,                       # your own description, instead of blocks, along and keep
    probe: bool = True,                                 # try the blocks first
    ordered: bool = False,                              # the blocks depend on the order of tokens (causal, scans)
) -> Iterator[KeptTokens]:
    """Routes each forward pass of a network inside the `with` block, in training and evaluation; outside it is dense.

    In each pass, a share of the tokens (image patches, say) skips some blocks and then returns unchanged, so that a
    training step costs less (TREAD, arXiv 2501.04765). Indices of routes count the blocks of all lists of the network,
    and routes are numbered in order of depth. Masks are sampled in each pass, or decided by mask_noise (see
    `Router.get_mask`). Yields `KeptTokens`, whose ids_keep[r] (B, K) index the N tokens that may be routed. Text, class
    and register tokens and condition images are never routed, and tokens of keep_mask are not routed in this pass. A
    callable keep_mask gets the arguments of the call as a dict by name. A block that a backward recomputes sees the
    masks of its pass, also outside the `with` block. Inside it, `routed(model, [])` is dense. Other threads see the
    dense network. Raises ValueError, with the reason, for a network or a call that cannot be routed exactly, for a pass
    that does not reach the blocks, and on exit if there was no pass.
    """
    network = network_of(model)
    options = Options(blocks, along, keep, mask_noise, keep_mask, grow, router, family, probe, ordered)
    routing = Routing(network, read_routes(routes), options)
    entry = entry_of(network)
    other = entry.routing if entry is not None else None
    if not any(block.route for block in routing.blocks):     # dense: uses what was compiled without a route
        if other is None:
            yield routing.kept
        else:
            with other.suspended():
                yield routing.kept
        return
    if other is not None:
        raise ValueError(f"{type(network).__name__} is routed already: pass all routes to one routed(), or [] for a "
                         f"dense pass inside of it.")
    routing.install()
    try:
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
        routing.close()
