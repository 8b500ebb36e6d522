"""`routed` routes a network from outside, without changes to its code: who calls, and what is open."""

import inspect
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from routed import families
from routed.kept import RouteBlock
from routed.modules import BACKWARD, RoutedModule, plain_class, routed_class
from routed.nested import leaves, mapped
from routed.networks import Blocks, Family, argument_names, owner_of, unwrapped
from routed.passes import Pass
from routed.sealed import Sealed, misses_tokens
from routed.trial import TRIED, Trial, Trials, on_copies
from routing_module import Route, Router, resolve_routes


class Routing:
    """A network with its routes: what `routed` yields.

    `ids_keep[r]` (B, K) are the kept tokens of the latest pass, or None before a pass or if no token is routed. Ids
    count only the tokens that may be routed: with a class token, id 0 is token 1. `trials` are those of the blocks of
    this network, after the `with` block.
    """

    def __init__(self, network: nn.Module, routes: list[Any], options: Any):
        self.network, self.options = network, options           # the keywords of `routed`
        self.family = described(network, options)
        self.is_described = options.family is not None or options.blocks is not None    # by the user
        # Text that is a stream of its own in an earlier list may have joined the sequence of a list.
        listed = [(module, spec, spec.text is None and any(other.text is not None for other in self.family.lists[:i]))
                  for i, spec in enumerate(self.family.lists) for module in spec.modules_of(network, options.blocks)]
        for route in routes:
            if not isinstance(route, Route):
                raise ValueError(f"{route!r} is not a route: write Route(start_layer_idx, end_layer_idx, "
                                 f"selection_ratio), and Route(**part) for a dict.")
            if not route.is_identity or route.path_drop:
                raise ValueError(f"Route {route}: routed() returns tokens unchanged, so it does not support x_T, "
                                 f"x_D_last, return_from and path_drop.")
        self.routes = resolve_routes(routes, len(listed))       # in order of depth
        on_route = {i: (r, route) for r, route in enumerate(self.routes) if route.selection_ratio > 0
                    for i in range(route.start_layer_idx, route.end_layer_idx + 1)}
        self.blocks = [RouteBlock(i, *block, *on_route.get(i, (-1, None))) for i, block in enumerate(listed)]
        self.block_of = {block.module: block for block in self.blocks}
        router = getattr(network, "router", None)
        self.router = options.router or (router if isinstance(router, Router) else Router())
        self.arguments, parts = argument_names(network), inspect.signature(plain_class(network).forward).parameters
        self.defaults = {name: part.default for name, part in parts.items() if part.default is not part.empty}
        self.tries = TRIED.setdefault(network, Trials()) if options.probe and not options.ordered else None
        self.ids_keep: list[Tensor | None] = [None] * len(self.routes)
        self.trials: list[Trial] = []
        self.thread = threading.get_ident()
        self.pauses = 0                         # `routed(model, [])` inside
        self.run: Pass | None = None            # the latest pass

    @property
    def is_in_network(self) -> bool:
        """True while the network's forward runs."""
        return self.run is not None and self.run.is_open and self.run.of_network

    def close(self) -> None:
        """Ends the routing; a backward that comes later finds its passes by the graph."""
        if self.tries:
            self.trials = [row for row in self.tries.rows.values() if isinstance(row, Trial)]
            if self.run is not None and self.run.is_compiled and not self.tries.has_verdict:
                warnings.warn(f"{type(self.network).__name__} is compiled, so its blocks were not tried, and whether "
                              f"they may be routed is not known. Run one pass inside routed() before compiling, or "
                              f"pass routed() the compiled module.", stacklevel=4)
        if self.run is not None:
            self.run.end()
        for module in (self.network, *self.block_of):
            vars(module).pop("_routed", None)

    def call(self, block: RouteBlock | None, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls the network (None) or a block of it in a forward pass; the network or block 0 begins the pass."""
        if not torch.is_grad_enabled() and (block is None or block.route) and any(
                isinstance(value, Tensor) and value.requires_grad and not isinstance(value, nn.Parameter)
                for value in (*args, *kwargs.values())):
            raise ValueError(f"{block or 'The network'} runs without the gradient that its input needs, as in a "
                             f"reentrant checkpoint or one that offloads activations: use torch's checkpoint with "
                             f"use_reentrant=False, or detach the input.")
        if block is None:
            return self.call_network(forward, args, kwargs)
        run = self.run
        if run is None or not run.is_open or block.index == 0 and not run.of_network:
            run = self.begin({}, of_network=False)
        run.advance(block.index)
        output = run.call(block, forward, args, kwargs)
        if block.index == len(self.blocks) - 1 and not run.of_network:
            run.end()
        return output

    def call_network(self, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if self.is_in_network:              # its forward, inside of its call
            return forward(*args, **kwargs)
        names = self.arguments or range(len(args))
        run = self.begin(self.defaults | dict(zip(names, args, strict=False)) | kwargs, of_network=True)
        try:
            output = forward(*args, **kwargs)
        finally:
            run.is_open = False
        run.advance(len(self.blocks))
        if not run.is_compiled and (read := [x for x in leaves(output) if isinstance(x, Sealed)]):
            raise misses_tokens(read[0].after, "returns them as features")
        BACKWARD.mark(output, run, len(self.blocks))
        return output

    def try_uncompiled(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        """Runs a compiled network once uncompiled and without gradients, before its first call, to try its blocks."""
        if not self.tries or self.tries.has_verdict or self.is_in_network or self.pauses \
                or threading.get_ident() != self.thread:
            return
        args, kwargs = mapped(lambda part: part.detach().clone() if type(part) is Tensor else part, (args, kwargs))
        device = next((part.device for part in leaves([args, kwargs]) if isinstance(part, Tensor)), torch.device("cpu"))
        with torch.no_grad(), on_copies(self.network, torch.Generator(device), None, None) as start:
            start(0)
            self.network(*args, **kwargs)
            for part in self.network.modules():         # FSDP2 has gathered weights in the copies
                getattr(part, "reshard", lambda: None)()
        self.run = None

    def begin(self, arguments: dict[Any, Any], of_network: bool) -> Pass:
        """Begins a pass of the network with these arguments, or of its blocks alone."""
        if self.run is not None:
            self.run.end()
        self.run = Pass(self, arguments, of_network)
        self.ids_keep = self.run.ids_keep
        return self.run


def described(network: nn.Module, options: Any) -> Family:
    """Returns the description of a network: the user's, or the known one as along= and keep= correct it."""
    if options.family is not None and (options.blocks, options.along, options.keep) != (None, None, None):
        raise ValueError("blocks=, along= and keep= describe a network, as family= does: leave them out.")
    if (name := owner_of(network).__name__) in families.REFUSED:
        raise ValueError(f"{name} cannot be routed exactly: {families.REFUSED[name]}.")
    along = dict(options.along or {})
    if options.blocks is not None:
        return Family((Blocks(options.blocks if isinstance(options.blocks, str) else "blocks=", along),))
    family: Family = options.family or families.family_of(network)
    has_text = any(spec.text is not None for spec in family.lists)
    if options.keep is not None and (family.front or family.free or has_text):
        raise ValueError(f"keep= does not apply: {type(network).__name__} is known, and its tokens that are never "
                         f"routed are counted. Use keep_mask= for others.")
    return replace(family, lists=tuple(replace(spec, along={**spec.along, **along}) for spec in family.lists))


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
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in model.modules()):
        raise ValueError("FSDP1 (FullyShardedDataParallel) hides a network's blocks in wrappers; shard it with FSDP2, "
                         "torch.distributed.fsdp.fully_shard.")
    network = unwrapped(getattr(model, "get_base_model", lambda: model)())
    options = SimpleNamespace(blocks=blocks, along=along, keep=keep, mask_noise=mask_noise, keep_mask=keep_mask,
                              grow=grow, router=router, family=family, probe=probe, ordered=ordered)
    routing = Routing(network, [routes] if isinstance(routes, Route) else list(routes), options)
    other, _ = vars(network).get("_routed", (None, None))
    if not any(block.route for block in routing.blocks):     # dense: uses what was compiled without a route
        outside = routing if other is None or other.thread != threading.get_ident() else other
        outside.pauses += 1
        try:
            yield routing
        finally:
            outside.pauses -= 1
        return
    if other is not None:
        raise ValueError(f"{type(network).__name__} is routed already: pass all routes to one routed(), or [] for a "
                         f"dense pass inside of it.")
    for module, block in [(network, None), *routing.block_of.items()]:
        if not isinstance(module, RoutedModule):
            module.__class__ = routed_class(plain_class(module))
        vars(module)["_routed"] = routing, block
    hooks = [part.register_forward_pre_hook(routing.try_uncompiled, with_kwargs=True) for part in model.modules()
             if hasattr(part, "_orig_mod") and network in part.modules()]
    try:
        yield routing
        if routing.run is None:
            raise ValueError(f"{type(network).__name__} was not called inside routed(), so nothing was routed: call "
                             f"this very network inside the `with` block.")
        if routing.run.is_open:     # one that an error broke off, as for want of memory, is not
            routing.run.advance(len(routing.blocks))
    finally:
        for hook in hooks:
            hook.remove()
        routing.close()
