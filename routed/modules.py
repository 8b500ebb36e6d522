"""Calls of a routed network pass through here: its modules get a subclass, which stays, and is plain outside `routed`.

So does torch in `parametrize` and FSDP2. isinstance and compiled code notice it, an instance's own forward, hooks and
checkpoints inside of a block stay inside, and pickling and copying give the module without routing.
"""

import threading
import weakref
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from routed.nested import leaves
from routed.sealed import Sealed, unsealed


def backward_id() -> int:
    """Returns the number of the backward that this thread is in, or -1. torch has no public name for it."""
    return torch._C._current_graph_task_id()


class Backward(threading.local):
    """The pass that the backward of this thread has reached: a pass, False for a dense one, or None if unknown.

    Hooks on the gradients of outputs set it, before a checkpoint recomputes what lies behind them. So the pass is known
    there, wherever and in whatever order backward is called.
    """

    run: Callable[[], Any] = staticmethod(lambda: None)     # a weak reference
    depth, number = -1, -1      # the number of blocks before the output that was reached; the backward's

    def reach(self, run: Any, depth: int, _gradient: Tensor | None = None) -> None:
        self.run, self.depth, self.number = weakref.ref(run) if run else lambda: run, depth, backward_id()

    def mark(self, output: Any, run: Any, depth: int) -> None:
        """Lets a backward through an output say that it has reached a pass there."""
        for x in leaves(output) if torch.is_grad_enabled() and not torch.compiler.is_compiling() else ():
            if isinstance(x, Tensor) and x.grad_fn is not None:
                x.register_hook(partial(self.reach, run, depth))


BACKWARD = Backward()


def call(module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a network or a block: in a routed pass, in the pass that a backward recomputes, or dense."""
    routing, block = module._routed
    routing = None if routing is None or routing.pauses else routing
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and backward_id() >= 0:
        return recompute(module, routing if block is None else None, forward, args, kwargs)
    if routing is not None and (is_compiling or threading.get_ident() == routing.thread):
        return routing.call(block, forward, args, kwargs)
    output = forward(*args, **kwargs)
    BACKWARD.mark(output, False, -1)
    return output


def recompute(module: Any, of_network: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a block that a backward recomputes in the pass that it reached; a network leaves that to its blocks."""
    run: Any
    run, depth = (BACKWARD.run(), BACKWARD.depth) if BACKWARD.number == backward_id() else (None, -1)
    block = run and run.routing.block_of.get(module)
    is_known = run is False or run and (depth == len(run.routing.blocks) or block and block.index <= depth)
    if of_network is not None and not of_network.is_in_network and not is_known:
        raise ValueError(f"A backward inside routed() recomputes {type(module).__name__}, and it is not known in which "
                         f"pass: put the checkpoint around the network or its blocks, not around the loss, or call "
                         f"backward of a dense pass outside.")
    if not is_known:                        # it has left the pass: a backward goes from the last block to the first
        BACKWARD.reach(False, -1)
    return run.call(block, forward, args, kwargs, is_first=False) if block and is_known else forward(*args, **kwargs)


class RoutedModule(nn.Module):
    """Comes before the class of a network or a block. It changes calls inside `routed`, and what a backward recomputes.

    A block is entered by its call, so that its hooks see its kept tokens, sealed. A network is entered by its forward,
    as compiled code and PEFT call nothing else, or by its call where accelerate has set a forward of its own.
    """

    _routed: tuple[Any, Any] = None, None       # its routing inside `routed`, and its block; the network has none

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        (routing, block), is_entered = self._routed, True
        if routing is not None and block is None:
            is_entered = "forward" in vars(self)
            if not torch.compiler.is_compiling() and self._compiled_call_impl is not None:     # after `self.compile()`
                routing.try_uncompiled(self, args, kwargs)
        return call(self, super().__call__, args, kwargs) if is_entered else super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        routing, block = self._routed
        if routing is not None and block is None:
            return call(self, super().forward, args, kwargs)
        sealed = None if torch.compiler.is_compiling() else next(
            (x for x in (*args, *kwargs.values()) if isinstance(x, Sealed) and x.after.module is self), None)
        if sealed is None:
            return super().forward(*args, **kwargs)
        output = super().forward(*unsealed(args), **{name: unsealed(value) for name, value in kwargs.items()})
        return sealed.run.sealed(sealed.after, output)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Describes the module without routing to pickle and copy."""
        reduced: Any = super().__reduce_ex__(protocol)
        # Another class, as a parametrization's, may have come before this one.
        own = plain_class(self) if "_is_routed" in vars(type(self)) else type(self)
        if len(reduced) == 2:               # of a block that torch.compile wraps
            return own, reduced[1]
        _, _, state, *rest = reduced
        return own.__new__, (own,), {name: value for name, value in state.items() if name != "_routed"}, *rest


def plain_class(module: nn.Module) -> Any:
    """Returns the class that a module was written with, as far as routing changed it."""
    classes = type(module).__mro__
    return classes[classes.index(RoutedModule) + 1] if isinstance(module, RoutedModule) else classes[0]


@cache
def routed_class(plain: Any) -> Any:
    @wraps(plain.forward)                   # its signature is read by pipelines and trainers
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return RoutedModule.forward(self, *args, **kwargs)

    return type(plain.__name__, (RoutedModule, plain), {
        "forward": forward, "_is_routed": True, "__module__": plain.__module__, "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__})
