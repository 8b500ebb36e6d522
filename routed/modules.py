"""Calls of a routed network pass through here: while it is routed, its modules have a subclass of their class.

So does torch in `parametrize` and FSDP2. isinstance and compiled code notice it, an instance's own forward, hooks and
checkpoints inside of a block stay inside, and pickling and copying can be right.
"""

import copy
import threading
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from routed.sealed import unsealed

OWN = frozenset(vars(nn.Module()))      # attributes that all modules have


def backward_id() -> int:
    """Returns the number of the backward that this thread is in, or -1. torch has no public name for it."""
    return torch._C._current_graph_task_id()


def is_compiled_in_place(module: nn.Module) -> bool:
    """True after `module.compile()`. torch has no public name for it."""
    return getattr(module, "_compiled_call_impl", None) is not None


class Backward(threading.local):
    """The pass that the backward of this thread has reached: a pass, False for a dense one, or None if unknown.

    Hooks on the gradients of outputs set it, before a checkpoint recomputes what lies behind them. So the pass is known
    there, wherever and in whatever order backward is called.
    """

    run: Callable[[], Any] = staticmethod(lambda: None)     # a weak reference
    depth, number = -1, -1      # the number of blocks before the output that was reached; the backward's

    def reach(self, run: Any, depth: int, _gradient: Tensor | None = None) -> None:
        self.run, self.depth, self.number = weakref.ref(run) if run else lambda: run, depth, backward_id()

    def reached(self, number: int) -> tuple[Any, int]:
        return (self.run(), self.depth) if self.number == number else (None, -1)


BACKWARD = Backward()


class Entry:
    """What a routed module holds: its block and its open routing, or None while only a backward may still come."""

    def __init__(self) -> None:
        self.routing: Any = None
        self.block: Any = None              # None: the network itself
        self.holders = 0
        self.sealing: Any = None            # seals what the block returns before its hooks see it

    def call(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        routing = None if self.routing is None or self.routing.pauses else self.routing
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs) if routing is None else routing.call(self.block, forward, args, kwargs)
        if (number := backward_id()) >= 0:
            return self.recompute(module, routing, number, forward, args, kwargs)
        if routing is not None and threading.get_ident() == routing.thread:
            return routing.call(self.block, forward, args, kwargs)
        output = forward(*args, **kwargs)
        for x in output if isinstance(output, tuple | list) else [output]:
            if isinstance(x, Tensor) and x.grad_fn is not None and torch.is_grad_enabled():
                x.register_hook(partial(BACKWARD.reach, False, -1))
        return output

    def recompute(self, module: nn.Module, routing: Any, number: int, forward: Callable[..., Any], args: Any,
                  kwargs: Any) -> Any:
        """Calls a block that a backward recomputes in the pass that it reached; a network leaves that to its blocks."""
        run, depth = BACKWARD.reached(number)
        block = run and run.routing.block_of.get(module)
        is_known = run is False or run and (depth == len(run.routing.blocks) or block and block.index <= depth)
        if self.block is None and not is_known and routing is not None and routing.active is None:
            raise ValueError(f"A backward inside routed() recomputes {type(module).__name__}, and it is not known in "
                             f"which pass: put the checkpoint around the network or its blocks, not around the loss, "
                             f"or call backward of a dense pass outside.")
        if not is_known:                    # it has left the pass: a backward goes from the last block to the first
            BACKWARD.reach(False, -1)
        return run.recompute(block, forward, args, kwargs) if block and is_known else forward(*args, **kwargs)


class RoutedModule:
    """Comes before a block's class while it is routed, and as long as a class that torch put before this one is there.

    A checkpoint may store a bound method, as diffusers' do, and call it when the module has its plain class again.
    """

    _routed: Entry | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, RoutedModule):
            return type(self).__call__(self, *args, **kwargs)
        entry, forward = self._routed, super().__call__
        return forward(*args, **kwargs) if entry is None else entry.call(self, forward, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stands between a block's hooks and its own forward: hooks see sealed tokens, the block does not."""
        if not isinstance(self, RoutedModule):
            return type(self).forward(self, *args, **kwargs)
        entry = self._routed
        if entry is None or torch.compiler.is_compiling() or entry.sealing is None and backward_id() < 0:
            return super().forward(*args, **kwargs)
        output = super().forward(*unsealed(args), **{name: unsealed(value) for name, value in kwargs.items()})
        return output if entry.sealing is None else entry.sealing(output)

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        if self._routed is not None and self._routed.routing is not None:
            raise ValueError(f"{type(self).__name__} cannot be pickled or saved inside routed(): save its "
                             f"state_dict(), or save it after the `with` block.")
        _, _, state, *rest = super().__reduce_ex__(protocol)
        return own_class(self).__new__, (own_class(self),), without_entry(state), *rest

    def __deepcopy__(self, memo: dict[Any, Any]) -> nn.Module:
        """Returns a copy that is not routed, with weights of its own."""
        is_ours = own_class(self) is not type(self)             # a parametrized module has no state to reduce
        state = super().__reduce_ex__(4)[2] if is_ours else vars(self)
        memo[id(self)] = other = own_class(self).__new__(own_class(self))
        other.__setstate__(copy.deepcopy(without_entry(state), memo))
        return other


class RoutedNetwork(RoutedModule):
    """Comes before a network's class. Compiled code and PEFT call its forward only, and accelerate sets its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, RoutedModule):
            return type(self).__call__(self, *args, **kwargs)
        if self._routed is not None and self._routed.routing is not None and not torch.compiler.is_compiling():
            self._routed.routing.try_uncompiled(self, args, kwargs)
        plain = super() if "forward" in vars(self) else super(RoutedModule, self)
        return plain.__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, RoutedModule):
            return type(self).forward(self, *args, **kwargs)
        entry, forward = self._routed, super(RoutedModule, self).forward
        return forward(*args, **kwargs) if entry is None else entry.call(self, forward, args, kwargs)


def without_entry(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "_routed"}


def plain_class(module: nn.Module) -> type:
    """Returns the class that a module was written with, as far as routing changed it."""
    classes = type(module).__mro__
    return classes[classes.index(RoutedModule) + 1] if isinstance(module, RoutedModule) else classes[0]


def own_class(module: nn.Module) -> type:
    """Returns a module's class without routing, or with it if another class, as a parametrization's, came before."""
    return plain_class(module) if vars(type(module)).get("_is_routed") else type(module)


@cache
def routed_class(plain: type, routed: type) -> type:
    return type(plain.__name__, (routed, plain), {"_is_routed": True, "__module__": plain.__module__,
                                                  "__qualname__": plain.__qualname__, "__doc__": plain.__doc__})


def install(module: nn.Module, routing: Any, block: Any) -> None:
    """Lets a module's calls pass through a routing."""
    if "_routed" not in vars(module):
        vars(module)["_routed"] = Entry()
        if not isinstance(module, RoutedModule):
            object.__setattr__(module, "__class__", routed_class(
                type(module), RoutedNetwork if block is None else RoutedModule))
    entry = vars(module)["_routed"]
    entry.routing, entry.block, entry.holders = routing, block, entry.holders + 1


def uninstall(module: nn.Module) -> None:
    """Undoes one `install`; after the last, a module is as it was."""
    entry = vars(module)["_routed"]
    entry.holders -= 1
    if not entry.holders:
        object.__setattr__(module, "__class__", own_class(module))
        del vars(module)["_routed"]
