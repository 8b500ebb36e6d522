"""Tries a block before trusting it: with its tokens in another order, it must return the same values in that order.

A trial runs in float32, in the mode of the call, and in a thread of its own, where no dispatch mode, saved-tensor hook,
autocast or context of the caller reaches.
"""

import copy
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from routed.families import PLAIN_VALUES, leaves, mapped
from routed.modules import plain_class

TRIED: WeakKeyDictionary = WeakKeyDictionary()      # network -> what has been tried in it: {key: Trial or None}
TOLERANCE = 1e-3        # in float32, where 60 networks deviate by 1e-5 at most
PATIENCE = 3            # passes without a verdict, after which a block is trusted


@dataclass(frozen=True)
class Trial:
    """The result of a trial; deviation and tolerance are relative to what the block adds to its tokens."""

    block: str
    deviation: float
    tolerance: float
    dtype: torch.dtype


class Trials:
    """Tries the blocks of one network, each once for a kind of arguments, and lists the results.

    `ordered` blocks depend on the order of their tokens (causal attention, scans), which routing preserves.
    """

    def __init__(self, tried: dict, ordered: bool = False):
        self.tried, self.ordered = tried, ordered
        self.failure = ""                   # the cause if a trial of the latest block failed, as its call may, too
        self.forget()

    def forget(self) -> None:
        self.left: tuple[Any, Any] = None, None     # the latest block, and the tokens that it returned
        self.inputs: set = set()                    # of the graph: the tokens that blocks received

    def leave(self, block: Any, x: Any) -> None:
        """Stores what a block returned, if the tokens of the next block have not been compared with it yet."""
        if isinstance(x, Tensor) and ("after", block.index) not in self.tried:
            self.left = block, x

    def compare(self, run: Any, x: Any) -> None:
        """Raises ValueError for tokens that change between two blocks of a route, or by a skip around one."""
        (before, left), self.left, block = self.left, (None, None), run.block
        earlier, self.inputs = self.inputs, self.inputs | nodes_of(x)
        if before is None or before.index != block.index - 1 or not isinstance(x, Tensor) or block.spec.whole:
            return
        is_border = before.route is not block.route
        if before.route is block.route is None or before.spec is not block.spec and not is_border:
            return
        text, front = run.text if block.joined else 0, run.front if isinstance(run.front, int) else 0
        first, behind = (front, text) if run.routing.family.text_last else (front + text, 0)
        rows = slice(first, x.shape[1] - behind)        # text may be replaced
        changed = x.shape != left.shape or not torch.allclose(x[:, rows], left[:, rows].to(x), rtol=0, atol=0,
                                                              equal_nan=True)
        if changed and (not is_border or before.spec is block.spec and reaches(x, left, earlier)):
            raise ValueError(f"Between blocks {before.index} and {block.index} of {block.spec.path} the network "
                             f"changes the tokens: a residual or skip outside of the blocks would miss the routed "
                             f"tokens. Name blocks that contain it, or set probe=False if it treats each token "
                             f"alone.")
        self.tried["after", before.index] = None

    def try_block(self, kept: Any, call: Callable) -> None:
        """Raises ValueError for a block whose output depends on more than its tokens and the arguments in `along`.

        `call` calls a function like the block's forward with arguments by name.
        """
        block, self.failure = kept.run.block, ""
        kinds = tuple((name, type(value).__name__, getattr(value, "ndim", 0)) for name, value in kept.arguments.items())
        axes = [(name, getattr(axis, "__qualname__", str(axis))) for name, axis in block.along.items()]
        here = block.index, block.inner.training, len(kept.ids) > 1, kinds, *axes
        if self.ordered or here in self.tried and not isinstance(self.tried[here], int):
            return
        row, reason = in_thread(lambda: self.measure(kept, call), kept.ids.device)
        if row is None:
            self.wait(here, block, reason)
            return
        if not row.deviation <= row.tolerance:
            raise ValueError(f"{block} depends on where its tokens are: in another order they change by "
                             f"{row.deviation:.2g} of what it adds (tolerance {row.tolerance:.1g}, {row.dtype}). "
                             f"Cause: {self.cause(kept)}. If it depends on their order alone (causal attention, "
                             f"scans), set ordered=True.")
        self.tried[here] = row

    def wait(self, here: tuple, block: Any, reason: str) -> None:
        """Counts a pass without a verdict; after the last, warns once for the network."""
        self.tried[here] = self.tried.get(here, 0) + 1
        if self.tried[here] == PATIENCE:
            self.tried[here] = None
            if "warned" not in self.tried:
                self.tried["warned"] = None
                warnings.warn(f"{block} could not be tried in {PATIENCE} passes ({reason}), so whether it may be "
                              f"routed is not known. It is trusted from now on.", stacklevel=2)

    def cause(self, kept: Any) -> str:
        sizes, block = {kept.run.free, kept.run.stream, kept.run.length}, kept.run.block
        others = [str(name) for name, value in kept.arguments.items() if block.along.get(name) is None
                  and name not in {block.tokens, block.text} and any(
                      not sizes.isdisjoint(part.shape) if isinstance(part, Tensor) else
                      not isinstance(part, PLAIN_VALUES) for part in leaves(value))]
        tables = [str(name) for name, axis in block.along.items() if isinstance(axis, int | tuple)]
        return "; or ".join(filter(None, (
            others and f"the argument {', '.join(others)}, for which along= names no axis",
            tables and f"{', '.join(tables)} along another axis, or read for one sample only",
            not others and "positions inside the block, such as its own rotary values, a convolution, windows or "
                           "pooled keys")))

    def measure(self, kept: Any, call: Callable) -> tuple[Trial | None, str]:
        """Returns the result of a trial, or None and why there is none."""
        reasons = []
        # What computes in one precision alone is tried in that; a single sample is repeated if the block allows.
        for dtype, copies in product((torch.float32, None), (2, 1) if len(kept.ids) == 1 else (1,)):
            try:
                row, reason = self.measured(kept, call, dtype, copies)
                self.failure = ""
            except Exception as error:
                row, reason = None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                self.failure = self.cause(kept)
            if row is not None:
                return row, ""
            reasons.append(reason)
        return None, reasons[0]

    def measured(self, kept: Any, call: Callable, dtype: torch.dtype | None, copies: int) -> tuple[Trial | None, str]:
        """Compares the outputs of a block whose kept tokens are in their order, and in another."""
        block, ids, outs = kept.run.block, kept.ids.repeat(copies, 1), []
        generator = torch.Generator(ids.device).manual_seed(0)
        order = torch.rand(ids.shape, generator=generator, device=ids.device).argsort(dim=1)
        with undisturbed(block.inner, ids.device) as restart:
            arguments = {name: prepared(value, generator, dtype, copies, name == block.tokens)
                         for name, value in kept.arguments.items()}
            forward = with_open_gates(block, generator, dtype)
            for some_ids in (ids, ids.gather(1, order)):
                restart()
                turned = type(kept)(kept.run, copied(arguments), some_ids, is_trial=True)
                x, (out, _) = turned.tokens(), turned.call(partial(call, function=forward))
                out = out[block.spec.out] if isinstance(out, tuple | list) else out
                if not isinstance(out, Tensor) or out.shape != x.shape:
                    return None, "it returns something else than tokens"      # `Pass.leave` raises an error for it
                outs.append(out.to(torch.promote_types(out.dtype, torch.float32)))
            out, other = outs[0].take_along_dim(turned.order()[..., None], 1), outs[1]
            added, size, deviation = (float(part.square().mean().sqrt()) for part in (out - x, out, other - out))
        eps = torch.finfo(dtype or x.dtype).eps
        if not math.isfinite(deviation):
            return None, "its output is not finite"
        if added <= 4 * eps * size:         # lost when added to the tokens and rounded
            return None, "it adds nothing yet"
        limit = (TOLERANCE if dtype or x.dtype == torch.float64 else math.sqrt(eps)) + 8 * eps * size / added
        return Trial(f"block {block.index} of {block.spec.path} ({plain_class(block.inner).__name__})",
                     deviation / added, limit, dtype or x.dtype), ""


def nodes_of(x: Any) -> set:
    """Returns the node of the graph that tokens come from, if they need a gradient."""
    return {torch.autograd.graph.get_gradient_edge(x).node} if isinstance(x, Tensor) and x.requires_grad else set()


def reaches(x: Tensor, left: Tensor, earlier: set) -> bool:
    """True if x depends on earlier tokens otherwise than through `left`, or if no graph tells."""
    if not x.requires_grad or not left.requires_grad or not earlier:
        return True
    seen, ahead = nodes_of(left), list(nodes_of(x))
    while ahead:
        node = ahead.pop()
        if node in earlier and node not in seen:
            return True
        if node not in seen:
            seen.add(node)
            ahead += [behind for behind, _ in node.next_functions if behind is not None]
    return False


def in_thread(function: Callable, device: torch.device) -> Any:
    """Runs a function in a thread of its own, on the caller's device and stream."""
    default = torch.get_default_device()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run() -> Any:
        with torch.no_grad(), torch.cuda.stream(stream) if stream else nullcontext(), \
                torch.device(default) if default.type != "cpu" else nullcontext():
            return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


class NoDropout(TorchFunctionMode):
    """Leaves out dropout, also where it is called without `training`."""

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if "dropout" in getattr(function, "__name__", ""):
            return args[0] if args else kwargs["input"]
        if function is F.multi_head_attention_forward:
            kwargs |= {"training": False}
        elif function is F.scaled_dot_product_attention and len(args) > 4:
            args = *args[:4], 0.0, *args[5:]
        elif function is F.scaled_dot_product_attention:
            kwargs |= {"dropout_p": 0.0}
        return function(*args, **kwargs)


def copied(value: Any, memo: dict | None = None) -> Any:
    """Copies an argument, so that a block may write to it; modules and functions remain."""
    memo = {} if memo is None else memo

    def copy_of(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.clone() if type(part) is Tensor else part
        if isinstance(part, set | Mapping):
            return copy.copy(part)
        fixed = nn.Module, FunctionType, MethodType, BuiltinFunctionType, type
        if id(part) not in memo and not isinstance(part, fixed) and hasattr(part, "__dict__"):
            memo[id(part)] = copy.copy(part)
            vars(memo[id(part)]).update(copied(vars(part), memo))
        return memo.get(id(part), part)

    return mapped(copy_of, value)


def prepared(value: Any, generator: torch.Generator, dtype: torch.dtype | None, copies: int, is_tokens: bool) -> Any:
    """Returns an argument in the trial's precision, with open gates, and repeated for a batch of one."""
    def prepare(part: Any) -> Any:
        if type(part) is not Tensor:
            return part
        part = part.detach()
        if dtype and part.is_floating_point() and part.dtype != torch.float64:
            part = part.to(dtype)
        if not is_tokens:
            part = opened(part, generator)
        return part.repeat(copies, *[1] * (part.ndim - 1)) if part.ndim > 1 and len(part) == 1 else part
    return mapped(prepare, value)


def opened(part: Tensor, generator: torch.Generator) -> Tensor:
    """Returns noise in place of a tensor that is near 0: positive in a vector, where a root may be taken of it."""
    if not part.is_floating_point() or not part.numel() or part.device != generator.device \
            or not float(part.abs().amax()) < 1e-3:
        return part
    noise = torch.randn(part.shape, generator=generator, device=part.device, dtype=torch.float32).to(part.dtype)
    return noise / math.sqrt(part.shape[1]) if part.ndim > 1 else 0.25 + noise.abs() / 2


def with_open_gates(block: Any, generator: torch.Generator, dtype: torch.dtype | None) -> Callable:
    """Returns a function that calls a block without its hooks and its route, with noise in place of parameters near 0.

    So a block that starts as the identity, as with adaLN-Zero or LayerScale, shows what it will compute. The function
    uses copies of the block's buffers and, in another precision, of its parameters.
    """
    holder, inner = nn.Module(), block.inner
    holder.block, holder.forward = inner, vars(inner).get("forward") or partial(plain_class(inner).forward, inner)
    tensors = {f"block.{name}": buffer.clone() for name, buffer in inner.named_buffers()}
    tensors |= {f"block.{name}": opened(p.detach(), generator) for name, p in inner.named_parameters()
                if type(p) in (nn.Parameter, Tensor) and p.is_floating_point() and p.element_size() > 1}
    if dtype:
        tensors |= {name: part.to(dtype) for name, part in tensors.items()
                    if part.is_floating_point() and part.dtype != torch.float64}
    return lambda *args, **kwargs: torch.func.functional_call(holder, tensors, args, kwargs, tie_weights=False)


@contextmanager
def undisturbed(block: nn.Module, device: torch.device) -> Iterator[Callable[[], None]]:
    """Runs a block without dropout, and restores it and all random states; yields what starts these states anew."""
    for part in block.modules():
        if hasattr(part, "unshard"):        # FSDP2 gathers the weights of the call that follows
            part.unshard()
    before = [(part, dict(vars(part))) for part in block.modules()]
    numpy, state, precision = sys.modules.get("numpy"), random.getstate(), torch.get_float32_matmul_precision()
    of_numpy = numpy and numpy.random.get_state()

    def restart() -> None:
        torch.manual_seed(0)
        random.setstate(state)
        if numpy:
            numpy.random.set_state(of_numpy)

    devices = dict(devices=[]) if device.type == "cpu" else dict(devices=[device], device_type=device.type)
    with NoDropout(), torch.random.fork_rng(**devices):
        try:
            if precision != "highest":      # setting it makes compiled code compile again
                torch.set_float32_matmul_precision("highest")
            for part, values in before:     # an attribute may be a cache that the block writes to
                vars(part).update({name: value.clone() for name, value in values.items() if isinstance(value, Tensor)})
            yield restart
        finally:
            restart()
            if precision != "highest":
                torch.set_float32_matmul_precision(precision)
            for part, values in before:
                vars(part).clear()
                vars(part).update(values)
