"""Calls of a routed network pass through here: while it is routed, its modules have a subclass of their class.

So does torch in `parametrize` and FSDP2. isinstance and compiled code notice it, an instance's own forward, hooks and
checkpoints inside of a block stay inside, and pickling and copying can be right.
"""

import copy
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


class Backward(threading.local):
    """The pass and the block (the number of blocks: the network) that the backward of this thread has reached.

    Hooks on the gradients of a block's output set it, before a checkpoint around the block recomputes it. So the pass
    is known there, wherever and in whatever order backward is called.
    """

    run: Callable[[], Any] = staticmethod(lambda: None)     # a weak reference
    index = -1

    def reach(self, run: Any, index: int, _gradient: Tensor | None = None) -> None:
        self.run, self.index = weakref.ref(run), index

    def clear(self, _gradient: Tensor | None = None) -> None:
        self.run, self.index = Backward.run, -1


BACKWARD = Backward()


class Entry:
    """What a routed module holds: its block and its open routing, or None while only a backward may still come."""

    def __init__(self):
        self.routing: Any = None
        self.block: Any = None              # None: the network itself
        self.holders = 0

    def call(self, module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        routing = None if self.routing is None or self.routing.pauses else self.routing
        if not torch.compiler.is_compiling():
            routing = routing if routing is not None and routing.is_here() else None
            if (run := self.recomputed(module, routing)) is not None:
                return run.recompute(run.routing.block_of[module], forward, args, kwargs)
        return forward(*args, **kwargs) if routing is None else routing.call(self.block, forward, args, kwargs)

    def recomputed(self, module: nn.Module, routing: Any) -> Any:
        """Returns the pass of which a backward recomputes this block, or None for a call in a forward pass.

        A recomputed network begins a new pass, which has the same masks, as a checkpoint restores the random state.
        """
        run = BACKWARD.run()
        if run is None or not torch.is_grad_enabled() or routing is not None and routing.active is not None:
            return None
        if self.block is None and routing is None:
            BACKWARD.clear()                # a dense pass
        return run if module in run.routing.block_of else None


class RoutedModule:
    """Comes before a module's class while the module is routed.

    A checkpoint may store a bound method, as diffusers' do, and call it when the module has its plain class again.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, RoutedModule):
            return type(self).__call__(self, *args, **kwargs)
        return self._routed.call(self, super().__call__, args, kwargs)

    def __reduce_ex__(self, protocol: int) -> tuple:
        if self._routed.routing is not None:
            raise ValueError(f"{type(self).__name__} cannot be pickled or saved inside routed(): save its "
                             f"state_dict(), or save it after the `with` block.")
        _, _, state, *rest = super().__reduce_ex__(protocol)
        return plain_class(self).__new__, (plain_class(self),), without_entry(state), *rest

    def __deepcopy__(self, memo: dict) -> nn.Module:
        """Returns a copy that is not routed, with weights of its own."""
        _, _, state, *_ = super().__reduce_ex__(4)
        memo[id(self)] = other = plain_class(self).__new__(plain_class(self))
        other.__setstate__(copy.deepcopy(without_entry(state), memo))
        return other


class RoutedNetwork(RoutedModule):
    """Comes before a network's class. Compiled code and PEFT call its forward only, and accelerate sets its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, RoutedModule):
            return type(self).__call__(self, *args, **kwargs)
        plain = super() if "forward" in vars(self) else super(RoutedModule, self)
        return plain.__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, RoutedModule):
            return type(self).forward(self, *args, **kwargs)
        return self._routed.call(self, super().forward, args, kwargs)


def without_entry(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "_routed"}


def plain_class(module: nn.Module) -> type:
    """Returns a module's class without routing."""
    classes = type(module).__mro__
    return classes[classes.index(RoutedModule) + 1] if isinstance(module, RoutedModule) else classes[0]


@cache
def routed_class(plain: type, routed: type) -> type:
    return type(plain.__name__, (routed, plain), {
        "__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__})


def install(module: nn.Module, routing: Any, block: Any) -> None:
    """Lets a module's calls pass through a routing."""
    if "_routed" not in vars(module):
        vars(module)["_routed"] = Entry()
        object.__setattr__(module, "__class__", routed_class(
            type(module), RoutedNetwork if block is None else RoutedModule))
    entry = vars(module)["_routed"]
    entry.routing, entry.block, entry.holders = routing, block, entry.holders + 1


def uninstall(module: nn.Module) -> None:
    """Undoes one `install`; after the last, a module is as it was."""
    entry = vars(module)["_routed"]
    entry.holders -= 1
    if not entry.holders:
        object.__setattr__(module, "__class__", plain_class(module))
        del vars(module)["_routed"]
