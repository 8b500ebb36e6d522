"""`routed` takes a network on a route from outside, without a change of its code: it wraps the forwards of its blocks.

What it needs to know of a class stands in `families`. Forwards are wrapped and no hooks registered: compiled code
notices a changed forward but no new hook, and would stay dense without a word.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from foreign.families import REFUSED, Blocks, Family, family_of
from routing_module import Route, Router, resolve_routes


class PerSample:
    """A table (N, D) that all samples shared, after each has kept rows of its own: (B, K, D).

    A block indexes or unsqueezes it as it did the shared one, to multiply queries and keys of four axes; the first of
    the four is then the batch. Anything else raises ValueError, as the place of the batch would be a guess.
    """

    def __init__(self, table: Tensor):
        self.table = table

    def __getitem__(self, index) -> Tensor:
        index = index if isinstance(index, tuple) else (index,)
        return self.of_four_axes(self.table[(slice(None), *index[1:])] if index[0] is None else self.table)

    def unsqueeze(self, dim: int) -> Tensor:
        return self.of_four_axes(self.table.unsqueeze(dim + 1) if dim > 0 else self.table)

    def of_four_axes(self, table: Tensor) -> Tensor:
        if table.ndim != 4:
            raise ValueError("A block uses a table without a batch axis in a way that leaves the place of the batch "
                             "open: hand it over with a batch axis of size 1, and name its axis of tokens in along=.")
        return table


@dataclass(frozen=True)
class Plan:
    """What is fixed when `routed` is entered; tuples with an entry for each block are in the blocks' order."""

    routes: tuple[Route, ...]                   # in order of depth
    route_of: tuple[int | None, ...]            # the route that a block is in
    list_of: tuple[Blocks, ...]                 # the list that a block is in
    arguments: tuple[tuple[str, ...], ...]      # the names of a block's arguments
    call: tuple[str, ...]                       # the names of the network's arguments
    family: Family
    stay: int | tuple[int, ...] | None          # how many tokens in front never leave, or which; None: a call says it
    mask_noise: Tensor | None
    router: Router


class Pass:
    """One forward pass: its masks, and the tokens that are away."""

    def __init__(self, plan: Plan):
        self.plan, self.last, self.has_gradient = plan, -1, torch.is_grad_enabled()
        self.stay = plan.stay
        self.num_tokens = self.length = 0       # tokens that may leave; with those that never do
        self.ids_keep: list[Tensor | None] = [None] * len(plan.routes)
        self.index: dict[int, Tensor] = {}      # ids_keep of each route, counted over the whole sequence
        self.away: dict[int, Tensor] = {}       # the tokens before its start
        self.along: dict[tuple[str, int], tuple[Tensor, Any]] = {}     # the latest table of a name and route, gathered

    def place(self, block: int) -> str:
        return f"Route {self.plan.routes[self.plan.route_of[block]]}, block {block} of {self.plan.list_of[block].path}"

    def call(self, given: dict[str, Any]) -> None:
        """Takes the length of the text (B,) from the network's arguments, and refuses what cannot be routed."""
        for name in self.plan.family.alone:
            if given.get(name) is not None and not (isinstance(given[name], tuple) and not given[name]):
                raise ValueError(f"{name} goes to blocks inside a route, past the tokens that left: call the network "
                                 f"without {name}, or without routed().")
        if not self.has_gradient and any(isinstance(v, Tensor) and v.requires_grad for v in given.values()):
            raise ValueError("The network runs without gradient on an input that requires it, as with reentrant "
                             "checkpointing: set use_reentrant=False. For evaluation, detach the input.")
        if self.plan.family.text_mask:
            self.stay = given[self.plan.family.text_mask].sum(dim=1)

    def draw(self, x: Tensor, r: int, block: int) -> None:
        """Draws the mask of route r before its first block."""
        plan, stay, (batch, n), joined = self.plan, self.stay, x.shape[:2], self.plan.list_of[block].joined
        assert stay is not None or not joined, "a joined list of FAMILIES without prefix, text_mask or text before it"
        before = int(stay.max()) if isinstance(stay, Tensor) else len(stay) if isinstance(stay, tuple) else stay or 0
        self.num_tokens, self.length = (n - before, n) if joined else (n, n + before)
        if self.num_tokens < 1:
            raise ValueError(f"{self.place(block)}: {before} of {n} tokens never leave, and none is left; see keep=.")
        noise, shape = plan.mask_noise, (batch, len(plan.routes), self.num_tokens)
        if noise is not None and noise.shape != shape:
            raise ValueError(f"mask_noise is {tuple(noise.shape)}, but it must be {shape}: {batch} samples, {shape[1]} "
                             f"routes, and {self.num_tokens} tokens that may leave.")
        ids = plan.router.get_mask(x[:, n - self.num_tokens:], plan.routes[r].selection_ratio,
                                   None if noise is None else noise[:, r])
        if self.ids_keep[r] is not None:        # a recomputation, which draws so that later dropout finds its numbers
            return
        self.ids_keep[r] = self.index[r] = ids
        self.away[r] = x
        if self.length > self.num_tokens:
            if isinstance(stay, tuple):
                free = torch.tensor([[i for i in range(n) if i not in stay and i - n not in stay]], device=x.device)
            else:
                free = torch.arange(self.num_tokens, device=x.device)[None] + (
                    stay[:, None] if isinstance(stay, Tensor) else stay)
            free = free.expand(batch, -1)
            leaves = torch.zeros(batch, self.length, dtype=torch.uint8, device=x.device)
            leaves = leaves.scatter(1, free, 1).scatter(1, free.gather(1, ids), 0)
            self.index[r] = leaves.argsort(dim=1, stable=True)[:, :before + ids.shape[1]]

    def kept(self, value: Any, axis: int, name: str, r: int, block: int) -> Any:
        """Keeps the rows of the tokens that stay along an axis of a tensor, or of each tensor of a tuple."""
        if isinstance(value, tuple | list):
            return type(value)(self.kept(part, axis, f"{name}.{i}", r, block) for i, part in enumerate(value))
        source, result = self.along.get((name, r), (None, None))
        if source is value:
            return result
        shape, axis = tuple(value.shape), range(value.ndim)[axis]
        if shape[axis] not in (self.num_tokens, self.length):
            raise ValueError(f"{self.place(block)}: {name} is {shape}, and its axis {axis} is neither "
                             f"{self.num_tokens} long, for the tokens that may leave, nor {self.length}, for all.")
        index = self.ids_keep[r] if shape[axis] == self.num_tokens else self.index[r]
        batch, num_keep = index.shape
        if axis == 0 and len(shape) == 2:
            result = PerSample(value[index])
        elif axis == 0 or shape[0] not in (1, batch):
            raise ValueError(f"{self.place(block)}: {name} is {shape}, but its first axis must be the {batch} samples "
                             f"or of size 1, before that of the tokens.")
        else:
            rows = index.view([batch if i == 0 else num_keep if i == axis else 1 for i in range(len(shape))])
            result = value.expand(batch, *shape[1:]).gather(
                axis, rows.expand([batch, *shape[1:axis], num_keep, *shape[axis + 1:]]))
        if not value.requires_grad:     # a recomputation must record the same operations
            self.along[name, r] = value, result
        return result

    def enter(self, block: int, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Returns a block's arguments, on a route those of the tokens that stay."""
        plan, spec, names = self.plan, self.plan.list_of[block], self.plan.arguments[block]
        given, r = dict(zip(names, args, strict=False)) | kwargs, plan.route_of[block]
        if spec.text:
            self.stay = given[spec.text].shape[1]
        if r is None:
            return args, kwargs
        if self.has_gradient and not torch.is_grad_enabled():
            raise ValueError(f"{self.place(block)} runs without gradient in a pass that has one, as with reentrant "
                             f"checkpointing, where tokens that left would lose theirs: set use_reentrant=False.")
        for name, value in given.items():
            plain = (bool, int, float, str, type(None))
            if isinstance(value, dict) and not all(isinstance(v, plain) for v in value.values()):
                raise ValueError(f"{self.place(block)}: {name} holds {sorted(value)}, and what of it runs along the "
                                 f"tokens is not known: call the network without it, or without routed().")
        if block == plan.routes[r].start_layer_idx:
            x = given[names[0]]
            self.draw(x, r, block)
            given[names[0]] = plan.router.start_route(x, self.index[r] if spec.joined else self.ids_keep[r])
        for name, axis in spec.along.items():
            name, _, part = name.partition(".")
            axis, ndim = axis if isinstance(axis, tuple) else (axis, None)
            value = given.get(name)
            if value is None or ndim is not None and value.ndim != ndim:
                continue
            given[name] = self.kept(value, axis, name, r, block) if not part else type(value)(
                self.kept(v, axis, f"{name}.{i}", r, block) if i == int(part) else v for i, v in enumerate(value))
        return tuple(given[name] for name in names[:len(args)]), {name: given[name] for name in kwargs}

    def leave(self, block: int, output: Any, recomputed: bool) -> Any:
        """Returns a block's output, at the end of a route that of all tokens."""
        r = self.plan.route_of[block]
        if r is None or block != self.plan.routes[r].end_layer_idx:
            return output
        spec, several = self.plan.list_of[block], isinstance(output, tuple | list)
        x = output[spec.out] if several else output
        away, index = self.away.pop(r), self.index[r] if spec.joined else self.ids_keep[r]
        if x.shape[:2] != index.shape:
            raise ValueError(f"{self.place(block)} returns {tuple(x.shape)} where {tuple(index.shape)} tokens stay.")
        if recomputed:                      # without their graph, which holds this pass
            self.away[r] = away.detach()
        if spec.joined and away.shape[1] < self.length:     # they left before text and image became one sequence
            away = torch.cat([x[:, :self.length - away.shape[1]], away], dim=1)
        x = self.plan.router.end_route(x, index, away.to(x.dtype))
        self.along.clear()
        return type(output)([*output[:spec.out], x, *output[spec.out + 1:]]) if several else x

    def check_whole(self) -> None:
        if self.last != len(self.plan.route_of) - 1:
            raise ValueError(f"The network was called, but of its {len(self.plan.route_of)} blocks the last to be "
                             f"called was block {self.last}: a route needs each of them, in order.")


class Taken:
    """What `routed` yields: `ids_keep[r]` (B, K) of the latest pass, None before one and where no token leaves."""

    ids_keep: list[Tensor | None]


class Wraps:
    """The forwards of a network (number -1) and its blocks, wrapped for the passes of one `routed`."""

    def __init__(self, network: nn.Module, blocks: list[nn.Module], plan: Plan):
        self.modules = [network, *blocks]
        self.plan: Plan | None = plan           # None after the `with` block
        self.latest: Pass | None = None
        self.recomputed: Pass | None = None     # the pass of which a backward computes blocks again, while it does
        self.taken = Taken()
        self.taken.ids_keep = [None] * len(plan.routes)
        self.wraps = [self.wrap(i, module) for i, module in enumerate(self.modules, start=-1)]

    @contextmanager
    def installed(self) -> Iterator[None]:
        before = [vars(module).get("forward") for module in self.modules]
        for module, wrap in zip(self.modules, self.wraps, strict=True):
            vars(module)["forward"] = MethodType(wrap, module)      # a bound method: a copy of the module has its own
        try:
            yield
        finally:
            for module, forward in zip(self.modules, before, strict=True):
                vars(module)["forward"] = forward
                if forward is None:
                    del vars(module)["forward"]

    def wrap(self, i: int, module: nn.Module) -> Callable:
        """Returns the wrapped forward of block i, for i = -1 of the network."""
        of_class, own = type(module).forward, vars(module).get("forward")

        def forward(module, *args, **kwargs):
            run = self.pass_of(i, args, kwargs)
            if run is None:
                return own(*args, **kwargs) if own else of_class(module, *args, **kwargs)
            with (saving := self.saving(run)) or nullcontext():
                if i >= 0:
                    args, kwargs = run.enter(i, args, kwargs)
                output = own(*args, **kwargs) if own else of_class(module, *args, **kwargs)
                if i >= 0:
                    return run.leave(i, output, recomputed=saving is not None)
                run.check_whole()
                return output

        return forward

    def pass_of(self, i: int, args: tuple, kwargs: dict[str, Any]) -> Pass | None:
        """Returns the pass that a call of block i belongs to; the network's call begins one, else its first block's."""
        if self.recomputed is not None or self.plan is None:
            return self.recomputed
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            raise ValueError("A backward recomputes a block, and of which pass is not known: put the checkpoint around "
                             "blocks or the network alone, and call backward of a dense pass outside of routed().")
        if i == -1 or i == 0 and (self.latest is None or self.latest.last >= 0):
            self.latest = Pass(self.plan)
            self.taken.ids_keep = self.latest.ids_keep
        if i == -1:
            self.latest.call(dict(zip(self.plan.call, args, strict=False)) | kwargs)
        elif i != self.latest.last + 1:
            raise ValueError(f"The blocks are called out of order: block {i} after block {self.latest.last}. A route "
                             f"needs each of them once, from the first to the last.")
        self.latest.last = i
        return self.latest

    def saving(self, run: Pass) -> torch.autograd.graph.saved_tensors_hooks | None:
        """Inside a checkpoint, has whatever it saves here remember its pass; returns None outside of one.

        The checkpoint recomputes when backward first asks for something saved, so there the pass is at hand, and the
        forwards are wrapped for as long as it recomputes: inside the `with` block or outside, in whatever order.
        """
        if torch.compiler.is_compiling():
            return None
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None:
            return None
        pack, unpack = hooks

        def unpack_with_pass(packed):
            before, self.recomputed = self.recomputed, run
            try:
                with self.installed():
                    return unpack(packed)
            finally:
                self.recomputed = before

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack_with_pass)


def network_of(model: nn.Module) -> nn.Module:
    """Returns the network inside the wrappers of compile, DDP and PEFT."""
    if isinstance(model, nn.DataParallel):
        raise ValueError("DataParallel calls several copies of a network at once; use DistributedDataParallel.")
    if hasattr(model, "get_base_model"):
        return network_of(model.get_base_model())
    parts = [name for name, _ in model.named_children()]
    return network_of(getattr(model, parts[0])) if parts in (["_orig_mod"], ["module"]) else model


def names_of(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def make_plan(
    network: nn.Module, routes: Iterable[Route], blocks: str | nn.Module | None, along: Mapping[str | int, int] | None,
    keep: int | Iterable[int] | None, mask_noise: Tensor | None,
) -> tuple[Plan, list[nn.Module]]:
    """Returns what `routed` does, and the network's blocks in the order of their call."""
    if blocks is None or type(network).__name__ in REFUSED:
        family = family_of(network)
        if along is not None or keep is not None:
            raise ValueError(f"along= and keep= are for what blocks= names; {type(network).__name__} is known.")
        stay = getattr(network, family.prefix) if family.prefix else None
    else:
        stay = keep if isinstance(keep, int) else tuple(keep or ()) or 0
        family = Family((Blocks(blocks if isinstance(blocks, str) else "blocks=", along or {}, joined=True),))
    list_of: list[Blocks] = []
    modules: list[nn.Module] = []
    for spec in family.lists:
        found = list(blocks if isinstance(blocks, nn.Module) else network.get_submodule(spec.path))
        modules += (getattr(module, "_orig_mod", module) for module in found)
        list_of += [spec] * len(found)
    routes = resolve_routes(routes, len(modules))
    route_of = [next((r for r, route in enumerate(routes) if route.selection_ratio > 0 and
                      route.start_layer_idx <= i <= route.end_layer_idx), None) for i in range(len(modules))]
    arguments = [names_of(getattr(module, "_checkpoint_wrapped_module", module)) for module in modules]
    for i, module in enumerate(modules):
        if route_of[i] is not None and any(max(getattr(m, "kernel_size", (1,))) > 1 for m in module.modules()
                                           if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)):
            raise ValueError(f"Route {routes[route_of[i]]}: block {i} of {list_of[i].path} convolves over the grid of "
                             f"tokens, which a route would tear.")
        if blocks is not None:
            by_name = {arguments[i][name] if isinstance(name, int) and -1 < name < len(arguments[i]) else name: axis
                       for name, axis in list_of[i].along.items()}
            if unknown := [name for name in by_name if str(name).partition(".")[0] not in arguments[i][1:]]:
                raise ValueError(f"along= names {unknown[0]!r}; beside its tokens block {i} takes {arguments[i][1:]}.")
            list_of[i] = replace(list_of[i], along=by_name)
    for route in routes:
        if not route.is_identity:
            raise ValueError(f"Route {route}: routed() gives tokens back as they left, without x_T and x_D_last.")
    own = getattr(network, "router", None)
    return Plan(routes, tuple(route_of), tuple(list_of), tuple(arguments),
                names_of(network), family, stay, mask_noise, own if isinstance(own, Router) else Router()), modules


@contextmanager
def routed(
    model: nn.Module,                                   # alone, or inside DDP, torch.compile or PEFT
    routes: Iterable[Route],
    *,
    blocks: str | nn.Module | None = None,              # the list of blocks of a network that is not in FAMILIES
    along: Mapping[str | int, int] | None = None,       # argument of a block, by name or number -> axis of the tokens
    keep: int | Iterable[int] | None = None,            # how many tokens in front never leave, or which
    mask_noise: Tensor | None = None,                   # (B, routes, N) over the N tokens that may leave
) -> Iterator[Taken]:
    """Routes each forward pass of a network inside the `with` block, in training and evaluation; outside it is dense.

    Indices of routes count the blocks of all lists of the network, routes are numbered in order of depth, and masks are
    drawn anew in each pass, or decided by mask_noise (see `Router.get_mask`). Yields `taken`, whose ids_keep[r] (B, K)
    are the tokens that stayed, over the N that may leave: text, class and register tokens never do. A block that a
    backward recomputes sees the masks of its pass, outside the `with` block too. Raises ValueError, with the reason,
    for a network or a call that cannot be routed exactly, and where a pass has not gone through the blocks.
    """
    network = network_of(model)
    if getattr(getattr(network.forward, "__func__", None), "__qualname__", "").startswith(Wraps.__qualname__):
        raise ValueError(f"{type(network).__name__} is routed already: give all routes to one routed().")
    plan, modules = make_plan(network, routes, blocks, along, keep, mask_noise)
    wraps = Wraps(network, modules, plan)
    try:
        with wraps.installed():
            yield wraps.taken
        if wraps.latest is not None:
            wraps.latest.check_whole()
    finally:
        wraps.plan = wraps.latest = None
