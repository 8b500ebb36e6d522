"""What is kept in a call of a block: its tokens, its arguments, and where they were."""

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from routed.nested import by_axis, leaves, rebuilt
from routed.networks import Blocks, argument_names, gathered, unwrapped

OWN = frozenset(vars(nn.Module()))      # attributes that all modules have


class RouteBlock:
    """A block of the network, with its description by argument names and its route."""

    def __init__(self, index: int, module: nn.Module, spec: Blocks, joined: bool, r: int, route: Any):
        self.index, self.module, self.spec, self.inner = index, module, spec, unwrapped(module)
        self.joined = joined                # the text that is a stream of earlier blocks is in its sequence
        self.names = argument_names(self.inner)
        self.tokens, self.text = map(self.name_of, (spec.tokens, spec.text))
        self.along = {self.name_of(key): axis for key, axis in spec.along.items()}
        self.r, self.route = r, route       # its route, and the route's number, if it is on one
        self.starts = route is not None and index == route.start_layer_idx
        self.ends = route is not None and index == route.end_layer_idx

    def __str__(self) -> str:
        return f"Route {self.route}, block {self.index} of {self.spec.path}"

    def name_of(self, key: str | int | None) -> Any:
        """Returns the name of the argument at a position, or the position if the argument has no name."""
        return self.names[key] if isinstance(key, int) and key < len(self.names) else key

    @cached_property
    def settings(self) -> tuple[Any, ...]:
        """What its modules' attributes, such as an attention processor, say about how it computes."""
        values = [item for part in self.module.modules() for item in vars(part).items() if item[0] != "_routed"]
        return tuple(value if isinstance(value, bool | str) else
                     len(value) if name in OWN and isinstance(value, Mapping) else type(value)
                     for name, value in values)


class Kept:
    """The kept tokens in a call of a block; a function in `along` receives it with an argument of the block.

    `ids` (B, K) index the kept tokens among those that may be routed, in a trial not in ascending order. `length`
    counts the tokens of the block's stream, including the `num_routed` ones, and `complete` those of the sequence with
    text that has its own stream. `arguments` holds the block's arguments, by name or position, before tokens are
    removed. If the block is called once for each sample, all of these are of one `sample`.
    """

    def __init__(self, run: Any, block: RouteBlock, arguments: dict[Any, Any], x: Tensor, ids: Tensor,
                 along: Any = None, is_trial: bool = False, sample: int | None = None):
        self.run, self.block, self.arguments, self.x, self.ids = run, block, arguments, x, ids
        self.along: dict[Any, Any] = block.along if along is None else along
        self.is_trial, self.sample = is_trial, sample
        self.per_sample = block.spec.per_sample or any(0 in leaves(axis) for axis in self.along.values())
        self.has_all = block.starts or block.spec.rejoins       # the tokens are not reduced yet
        self.num_routed = run.free - ids.shape[1]
        self.length = x.shape[1] + (0 if self.has_all else self.num_routed)
        self.complete = self.length + (0 if block.text is None else run.text)
        self.before = run.before(block)     # text in front of the tokens, in the complete sequence

    def but(self, **changed: Any) -> "Kept":
        """Returns the same call with other arguments of `__init__`."""
        names = "run", "block", "arguments", "x", "ids", "along", "is_trial", "sample"
        return Kept(**{name: getattr(self, name) for name in names} | changed)

    def places(self, length: int | None = None) -> Tensor:
        """Returns the positions of the kept tokens (B, length - num_routed), in the stream or one of `length`."""
        length = self.length if length is None else length
        if length == self.run.free:
            return self.ids
        first = self.run.first(self.before if length == self.complete else 0, self.sample)
        index = torch.arange(length - self.num_routed, device=self.ids.device)[None]
        number = (index - first).expand(len(self.ids), -1)                  # among those that may be routed
        kept = self.ids.gather(1, number.clamp(0, self.ids.shape[1] - 1)) + first
        return torch.where(number < 0, index, torch.where(number < self.ids.shape[1], kept, index + self.num_routed))

    def order(self) -> Tensor:
        """Returns where in ascending order the tokens of the stream are (B, length - num_routed)."""
        return self.places().argsort(dim=1).argsort(dim=1)

    def call(self, function: Callable[..., Any], per_sample: bool | None = None) -> Any:
        """Calls a function of the block's arguments by name with what is kept, and joins outputs of single samples."""
        if self.per_sample if per_sample is None else per_sample:
            return joined([self.of_sample(b).call(function, False) for b in range(len(self.ids))])
        taken = self.take()
        output = function(taken)
        if not isinstance(output, tuple | list) or torch.compiler.is_compiling():
            return output
        reduced = [(part, self.arguments[name]) for name, part in taken.items()     # returned, it has all rows again
                   if name != self.block.tokens and part is not self.arguments[name]]
        return rebuilt(output, [next((full for old, full in reduced if old is part), part) for part in output])

    def of_sample(self, b: int) -> "Kept":
        """Returns what is kept of sample b alone."""
        def cut(part: Any, axis: Any) -> Any:
            has_batch = isinstance(part, Tensor) and part.ndim > 0 and len(part) == len(self.ids)
            return part[b:b + 1] if has_batch and axis != 0 else part

        arguments = {}
        for name, value in self.arguments.items():
            axis = self.along.get(name)
            if isinstance(axis, tuple) and 0 in axis and not self.run.routing.is_described:
                # in known networks, such as Qwen-Image, its other parts have no batch axis, either
                axis = tuple(own or 0 for own in axis)
            parts = by_axis(cut, value, axis)
            is_cut = any(part is not old for part, old in zip(leaves(parts), leaves(value), strict=True))
            arguments[name] = parts if is_cut else value        # the same list, as a block may append to it
        return self.but(ids=self.ids[b:b + 1], arguments=arguments, sample=b)

    def tokens(self) -> Tensor:
        """Returns the block's tokens without those that are routed."""
        x = self.arguments[self.block.tokens]
        if self.has_all:
            return self.run.routing.router.start_route(x, self.places())
        return gathered(x, self.order(), 1) if self.is_trial else x

    def take(self) -> dict[Any, Any]:
        """Returns the block's arguments, with its tokens and those along them reduced to the kept tokens."""
        taken = self.arguments | {self.block.tokens: self.tokens()}
        for name, axis in self.along.items():
            if taken.get(name) is not None:
                taken[name] = axis(taken[name], self) if callable(axis) else by_axis(
                    partial(self.rows, name=name), taken[name], axis)
        return taken

    def rows(self, value: Any, axis: int | None, name: str | int = "") -> Any:
        """Returns the rows of the kept tokens along an axis of a tensor (see `Blocks`): (B, K, …)."""
        batch, is_known = len(self.ids), not self.run.routing.is_described
        if not isinstance(value, Tensor) or axis is None or not -value.ndim <= axis < value.ndim:
            return value
        place = axis % value.ndim
        length = value.shape[place]
        # `in` would not find equal sizes that are symbolic in a compiled graph.
        sizes = self.run.free, self.length, self.complete
        is_along = any(length == size for size in sizes)
        if place > 0 and length == 1:
            return value                    # the same for all tokens
        if not (is_along or self.has_all) and any(length == size - self.num_routed for size in sizes):
            return gathered(value, self.order(), place) if self.is_trial and place > 0 else value   # reduced before
        if not is_along or place > 0 and len(value) not in (1, batch):
            if is_known and not is_along:
                return value                # of another kind in this call, as one time for each sample
            raise ValueError(f"{self.block}: {name} is {tuple(value.shape)}. Its axis {axis} must be {self.run.free} "
                             f"long, as the tokens that may be routed, {self.length}, as the block's stream, or "
                             f"{self.complete}, with all text, after an axis of {batch} samples or of size 1.")
        if axis == 0:                       # here is one sample, or in a trial all keep the same tokens
            return value[self.places(length)[0]]
        if place == 0 and length == batch:
            raise ValueError(f"{self.block}: {name} is {tuple(value.shape)}, which may have a row for each of {batch} "
                             f"samples or of as many tokens: use another batch size.")
        return value[self.places(length)] if place == 0 else gathered(value, self.places(length), place)

    def rejoin(self, x: Tensor, before_route: Tensor) -> Tensor:
        """Puts the tokens of a block's stream back among the routed ones."""
        run, block = self.run, self.block
        if block.spec is not run.routing.blocks[block.route.start_layer_idx].spec:
            # they were removed before other tokens, such as text, joined their sequence
            before = self.before if block.joined else 0
            before_route = nn.functional.pad(before_route, (0, 0, before, self.length - before - before_route.shape[1]))
        return run.routing.router.end_route(x, self.places(), before_route.to(x.dtype))


def joined(outs: list[Any]) -> Any:
    """Joins the outputs of single samples along the batch axis; a value that all return, such as a table, remains."""
    if isinstance(outs[0], tuple | list):
        return rebuilt(outs[0], [joined(list(parts)) for parts in zip(*outs, strict=True)])
    return torch.cat(outs) if isinstance(outs[0], Tensor) and any(out is not outs[0] for out in outs) else outs[0]


def tokens_in(output: Any, block: RouteBlock) -> Any:
    """Returns the tokens in what a block returns."""
    out = block.spec.out
    return output[out] if isinstance(output, tuple | list) and len(output) > out else output


def replaced(output: Any, block: RouteBlock, x: Tensor) -> Any:
    """Returns what a block returns with other tokens."""
    out = block.spec.out
    return rebuilt(output, [*output[:out], x, *output[out + 1:]]) if isinstance(output, tuple | list) else x
