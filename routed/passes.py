"""One forward pass of a routed network: which tokens it keeps, and how its blocks are called with them."""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from routed.kept import Kept, RouteBlock, replaced, tokens_in
from routed.modules import BACKWARD
from routed.nested import PLAIN_VALUES, leaves
from routed.networks import pairs
from routed.sealed import Sealed, misses_tokens, seal, unsealed
from routed.trial import candidates, offer


class Pass:
    """One forward pass: the kept tokens of each route, and what the latest block returned."""

    def __init__(self, routing: Any, arguments: dict[Any, Any], of_network: bool):
        """Counts tokens from the network's arguments; raises ValueError for arguments that cannot be routed."""
        self.routing, self.of_network, self.last = routing, of_network, -1
        self.is_open = True                 # its blocks may be called
        self.is_compiled = torch.compiler.is_compiling()
        self.seals = routing.options.probe and not self.is_compiled
        # By number of route. In a `Kept`, which refers to this pass, tensors would wait for the garbage collector.
        self.ids_keep: list[Any] = [None] * len(routing.routes)
        self.before_route: dict[int, Any] = {}        # all tokens at a route's start
        self.returned: tuple[Any, Any] = None, None             # the latest block, and its tokens
        self.text = 0                       # tokens of text that has its own stream in some blocks
        family, network, mask = routing.family, routing.network, routing.options.keep_mask
        self.batch = samples_in([*map(arguments.get, routing.arguments), *arguments.values()])
        self.front = family.front(network, arguments) if family.front else routing.options.keep or 0     # or (B,)
        self.free = family.free(network, arguments) if family.free else 0
        self.keep_mask = mask(arguments) if callable(mask) else mask        # (B, free) bool: these are kept

    def end(self) -> None:
        """Frees the tokens of a pass that is over or broke off, whose graph would hold them for ever."""
        self.is_open, self.returned = False, (None, None)
        self.before_route = {r: x for r, x in self.before_route.items() if x is None or x.grad_fn is None}

    def advance(self, block: int) -> None:
        """Records that a block is called, or, for the number of blocks, that the pass is over."""
        depth = len(self.routing.blocks)
        if block != self.last + 1:
            raise ValueError(f"After block {self.last} came {'the end' if block == depth else f'block {block}'}: a "
                             f"route needs each of the {depth} blocks of {type(self.routing.network).__name__} once, "
                             f"from the first to the last. Name a list of blocks that its forward calls.")
        self.last = block

    def call(self, block: RouteBlock, forward: Callable[..., Any], args: Any, kwargs: Any, is_first: bool = True,
             ) -> Any:
        """Calls a block, on a route only with the kept tokens; at the end of a route, returns all tokens.

        Only the first call of a block is checked; a backward may recompute it with the same kept tokens.
        """
        is_compiling = torch.compiler.is_compiling()
        self.is_compiled |= is_compiling                        # perhaps by a compiled forward alone
        arguments = {block.name_of(i): value for i, value in enumerate(args)} | kwargs
        given = arguments.get(block.tokens)
        if block.route is not None and not is_compiling:
            arguments = {name: unsealed(value, self, block) for name, value in arguments.items()}
        x = arguments.get(block.tokens)
        if block.text is not None:
            self.text = arguments[block.text].shape[1]
        if is_first:
            self.compare(block, x, given)
        if block.route is None:
            output = forward(*args, **kwargs)
        else:
            by_name = self.by_name(block, forward, args, kwargs)
            kept = self.enter(block, arguments, x)
            if is_first:
                self.check_named(kept, by_name)
            tries = self.routing.tries if is_first and not is_compiling else None
            failure = tries.try_block(kept, by_name) if tries else ""
            try:
                output = kept.call(by_name)
            except (RuntimeError, IndexError, TypeError, AssertionError) as error:
                if not failure or isinstance(error, torch.cuda.OutOfMemoryError):
                    raise
                raise ValueError(f"{block} fails when each sample keeps its own tokens "
                                 f"({str(error).partition(chr(10))[0]}). Cause: {failure}. What along= names gets a "
                                 f"batch axis, except by axis 0.") from error
            output = self.leave(kept, output)
        if is_first:
            self.returned = block, tokens_in(output, block)
            BACKWARD.mark(output, self, block.index)
        is_inside = block.route is not None and not block.ends and not block.spec.rejoins
        is_sealed = is_inside and self.seals and (      # where two lists meet, text may join the tokens
            self.routing.blocks[block.index + 1].spec is block.spec
            or all(spec.text is None for spec in self.routing.family.lists))
        return self.sealed(block, output) if is_sealed else output

    def by_name(self, block: RouteBlock, forward: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
        """Returns a function that calls a block, or another function of its arguments, with arguments by name.

        Its kept tokens are sealed until the block's hooks have seen them (`RoutedModule.forward`).
        """
        seals = self.seals and block.module._compiled_call_impl is None and "forward" not in vars(block.module)

        def call(arguments: dict[Any, Any], function: Callable[..., Any] = forward) -> Any:
            if seals:
                arguments = arguments | {block.tokens: seal(arguments[block.tokens], self, block)}
            output = function(*(arguments[block.name_of(i)] for i in range(len(args))),
                              **{name: arguments[name] for name in kwargs})
            x = tokens_in(output, block)
            return replaced(output, block, unsealed(x)) if isinstance(x, Sealed) else output
        return call

    def sealed(self, block: RouteBlock, output: Any) -> Any:
        """Returns what a block returns with sealed tokens, for its hooks and for the network."""
        x = tokens_in(output, block)
        return replaced(output, block, seal(x, self, block)) if type(x) is Tensor else output

    def compare(self, block: RouteBlock, x: Any, given: Any) -> None:
        """Raises ValueError for tokens that change between two blocks of a route, or by a skip around one."""
        (before, returned), self.returned = self.returned, (None, None)
        if before is None or before.spec is not block.spec or block.spec.rejoins or not self.routing.options.probe \
                or before.route is block.route is None or not isinstance(returned, Tensor):    # `leave` says why
            return
        is_same = x is returned or isinstance(given, Sealed) and given.after is before \
            and x.requires_grad == returned.requires_grad
        if not is_same and before.route is not block.route and isinstance(x, Tensor):   # a copy may be made there
            is_same = torch.compiler.is_compiling() or x.is_meta or x.shape == returned.shape and torch.equal(
                x, returned.to(x))          # on a GPU this waits
        if not is_same:
            raise misses_tokens(before, f"changes the tokens before block {block.index}")

    def enter(self, block: RouteBlock, arguments: dict[Any, Any], x: Any) -> Kept:
        """Returns what a block on a route gets; its tokens are sampled before the first block of the route."""
        if not isinstance(x, Tensor) or x.is_nested or x.ndim != 3 or self.batch not in (None, len(x)):
            what = (type(x).__name__ if not isinstance(x, Tensor) else
                    "a nested tensor (set enable_nested_tensor=False)" if x.is_nested else tuple(x.shape))
            raise ValueError(f"{block}: {block.tokens} is {what}, but tokens (B, N, D) of {self.batch or 'B'} "
                             f"samples are routed: transpose tokens (N, B, D) before the blocks, fold none into the "
                             f"batch, and name their argument by family=Family((Blocks(path, tokens=),)).")
        if block.starts:
            self.sample_mask(block, x)
        return Kept(self, block, arguments, x, self.ids_keep[block.r])

    def sample_mask(self, block: RouteBlock, x: Tensor) -> None:
        """Samples the mask of a route before its first block, from all tokens x of that block."""
        routing, (batch, length) = self.routing, x.shape[:2]
        stream = length - (self.text if block.joined else 0)
        if not routing.family.free:
            self.free = stream - (int(self.front.max()) if isinstance(self.front, Tensor) else self.front)
        if int(self.free * block.route.selection_ratio) < 1 or self.free > stream:
            raise ValueError(f"{block}: {max(self.free, 0)} of {stream} tokens may be routed, too few or more than "
                             f"there are: see keep=, and split no sequence over ranks. Tokens are counted along the "
                             f"second axis of {tuple(x.shape)}.")
        noise = routing.options.mask_noise
        if noise is not None:
            must_be("mask_noise", noise, torch.float32, (batch, len(routing.routes), self.free),
                    "samples, routes, and tokens that may be routed")
            noise = noise[:, block.r]
        if routing.router.selection == "grid":
            routing.router.check(routing.routes, math.sqrt(self.free))
        ratio, mask = block.route.selection_ratio, self.keep_mask
        if routing.options.keep_mask is not None:
            must_be("keep_mask", mask, torch.bool, (batch, self.free), "samples, and tokens that may be routed")
            if routing.options.grow:        # on a GPU this waits
                most = max(self.free - int(self.free * ratio), int(mask.sum(dim=1).max()))
                ratio = Fraction(self.free - most, self.free)
        places = self.first(self.before(block) if block.joined else 0) + torch.arange(self.free, device=x.device)[None]
        may_leave = routing.router.start_route(x.detach(), places.expand(batch, -1))
        ids = routing.router.get_mask(may_leave, ratio, noise, mask)
        if self.ids_keep[block.r] is None:      # a recomputation samples only to repeat all operations
            self.ids_keep[block.r], self.before_route[block.r] = ids, x

    def before(self, block: RouteBlock) -> int:
        """Counts the text in front of a block's tokens, in its complete sequence."""
        has_text = block.joined or block.text is not None
        return self.text if has_text and not self.routing.family.text_last else 0

    def first(self, before: int, sample: int | None = None) -> Any:
        """Returns the position of the first token that may be routed, behind so many tokens of text: one, or (B, 1)."""
        if not isinstance(self.front, Tensor):
            return self.front + before
        return (self.front if sample is None else self.front[sample, None])[:, None] + before

    def check_named(self, kept: Kept, by_name: Callable[..., Any]) -> None:
        """Raises ValueError for an unnamed value as long as the tokens, as a block might cut it to its own length.

        In known networks only dicts and masks of all pairs of tokens are refused.
        """
        block, unnamed = kept.block, {}
        for name, value in kept.arguments.items():
            if name in kept.along or name in (block.tokens, block.text):
                continue
            if isinstance(value, Mapping) and not all(isinstance(part, PLAIN_VALUES) for part in leaves(value)):
                raise ValueError(f"{block}: {name} holds {sorted(map(str, value))}, which may have values per token: "
                                 f"call the network without it, or name it in along=.")
            axes = candidates(kept, value)
            if axes and (self.routing.is_described or pairs in axes):
                unnamed[name] = axes
        if unnamed:
            raise ValueError(f"{block}: {offer(kept, by_name, unnamed)}")

    def leave(self, kept: Kept, output: Any) -> Any:
        """Returns the output of a block; at a route's end, with all tokens."""
        block, x = kept.block, tokens_in(output, kept.block)
        size = len(kept.x), kept.length - kept.num_routed, kept.x.shape[2]
        if not isinstance(x, Tensor) or x.shape[:2] != size[:2]:
            raise ValueError(f"{block} gets tokens {size} and returns "
                             f"{tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}: describe what is "
                             f"routed by family=Family((Blocks(path, tokens=, text=, out=),)).")
        if block.ends or block.spec.rejoins:
            output = replaced(output, block, kept.rejoin(x, self.before_route[block.r]))
        if block.ends:                      # detached, because its graph refers to this pass
            self.before_route[block.r] = self.before_route[block.r].detach() if torch.is_grad_enabled() else None
        return output


def samples_in(values: list[Any]) -> int | None:
    """Counts the samples of the first argument that has some: a tensor, a list of images, or a dict of such."""
    for value in values:
        if isinstance(value, Mapping) and (count := samples_in([*value.values()])) is not None:
            return count
        if isinstance(value, list) and value or isinstance(value, Tensor) and value.ndim > 1:
            return len(value)
    return None


def must_be(name: str, value: Any, dtype: torch.dtype, shape: tuple[int, ...], axes: str) -> None:
    """Raises ValueError for an option that is not a tensor of this dtype and shape."""
    kind = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    if kind != f"{dtype} {shape}":
        raise ValueError(f"{name} is {kind}, but it must be {dtype} {shape}: {axes}.")
