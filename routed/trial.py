"""Tries a block before trusting it: with its tokens in another order, it must return the same values in that order.

A trial runs in float32, in the mode of the call, and in a thread of its own, where no dispatch mode, saved-tensor hook,
autocast or context of the caller reaches.
"""

import copy
import inspect
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from routed.families import mapped, only_element
from routed.modules import own_class

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
    """Tries the blocks of one network, each kind of block and arguments once, and lists the results.

    `ordered` blocks depend on the order of their tokens (causal attention, scans), which routing preserves.
    """

    def __init__(self, tried: dict, ordered: bool = False):
        self.tried, self.ordered = tried, ordered
        self.batches: set[int] = set()      # possible batch sizes in the network's arguments
        self.left: tuple[Any, Tensor] | None = None     # the latest block, and the tokens that it returned
        self.inputs: set = set()            # of the graph: the tokens that blocks received

    @property
    def rows(self) -> list[Trial]:
        return list(dict.fromkeys(row for row in self.tried.values() if isinstance(row, Trial)))

    def read_call(self, given: Any) -> None:
        self.batches, self.left, self.inputs = {*lengths_of(given)}, None, set()

    def check_batch(self, block: Any, x: Tensor) -> None:
        """Raises ValueError for a batch size that the network's call does not have, as a block may mix folded parts."""
        if self.batches and len(x) not in {1, *self.batches}:
            raise ValueError(f"{block} gets a batch of {len(x)}, but the network gets none of this size. Parts of a "
                             f"sample would keep different tokens: do not fold streams, frames or windows into the "
                             f"batch, and check that tokens are (B, N, D), not (N, B, D). Set probe=False if such "
                             f"parts never meet.")

    def leave(self, block: Any, x: Any) -> None:
        """Stores what a block returned, if the tokens of the next block have not been compared with it yet."""
        if isinstance(x, Tensor) and ("after", block.index) not in self.tried:
            self.left = block, x

    def compare(self, run: Any, x: Any) -> None:
        """Raises ValueError for tokens that change between two blocks of a route, or by a skip around one."""
        (before, left), self.left, block = self.left or (None, None), None, run.block
        is_border = before is not None and before.route is not block.route
        earlier, self.inputs = self.inputs, self.inputs | nodes_of(x)
        if before is None or before.index != block.index - 1 or not isinstance(x, Tensor):
            return
        if before.route is block.route is None or block.spec.whole or not is_border and before.spec is not block.spec:
            return
        if x.shape == left.shape and block.spec.joined and isinstance(run.text, int):     # text may be replaced
            rows = slice(x.shape[1] - run.text) if run.routing.family.text_last else slice(run.text, None)
            changed = not torch.equal(x[:, rows], left[:, rows].to(x))
        else:
            changed = x.shape != left.shape or not torch.allclose(x, left.to(x), rtol=0, atol=0, equal_nan=True)
        if changed and (not is_border or before.spec is block.spec and reaches(x, left, earlier)):
            raise ValueError(f"Between blocks {before.index} and {block.index} of {block.spec.path} the network "
                             f"changes the tokens: a residual or skip outside of the blocks would miss the routed "
                             f"tokens. Name blocks that contain it, or set probe=False if it treats each token "
                             f"alone.")
        self.tried["after", before.index] = None

    def try_block(self, kept: Any, given: dict, function: Callable) -> None:
        """Raises ValueError for a block whose output depends on more than its tokens and the arguments in `along`.

        `given` are its arguments by name, before tokens are removed; `function` calls the block with such arguments.
        """
        block = kept.run.block
        kinds = tuple((name, type(value).__name__, getattr(value, "ndim", 0)) for name, value in given.items())
        named = [(name, part, getattr(axis, "__qualname__", str(axis))) for name, part, axis in block.along]
        several = len(kept.ids) > 1
        here = block.index, block.inner.training, several, kinds, *named
        if self.ordered or here in self.tried and not isinstance(self.tried[here], int):
            return
        alike = settings_of(block, kept.run.routing.blocks), *here[1:]
        if alike not in self.tried:
            row, reason = in_thread(lambda: self.measure(kept, given, function), kept.away.device)
            if row is None:
                self.wait(here, block, reason)
                return
            self.tried[alike] = row
            if not row.deviation <= row.tolerance:
                del self.tried[alike]
                raise ValueError(f"{block} depends on where its tokens are: in another order they change by "
                                 f"{row.deviation:.2g} of what it adds (tolerance {row.tolerance:.1g}, {row.dtype}). "
                                 f"Cause: {self.cause(kept.run, given)}. If it depends on their order alone (causal "
                                 f"attention, scans), set ordered=True.")
        self.tried[here] = self.tried[alike]

    def wait(self, here: tuple, block: Any, reason: str) -> None:
        """Counts a pass without a verdict; after the last, warns once for the network."""
        self.tried[here] = self.tried.get(here, 0) + 1
        if self.tried[here] == PATIENCE:
            self.tried[here] = None
            if "warned" not in self.tried:
                self.tried["warned"] = None
                warnings.warn(f"{block} could not be tried in {PATIENCE} passes ({reason}), so whether it may be "
                              f"routed is not known. It is trusted from now on.", stacklevel=2)

    def cause(self, run: Any, given: dict) -> str:
        sizes = {run.free, run.stream, run.length}
        unnamed = [str(name) for name in given if name not in run.block.known and along_tokens(given[name], sizes)]
        tables = [str(name) for name, _, axis in run.block.along if isinstance(axis, int)]
        return (f"the argument {', '.join(unnamed)}, which along= does not name" if unnamed else
                "positions inside the block, such as its own rotary values, a convolution, windows or pooled keys" +
                (f"; or {', '.join(tables)} along another axis, or read for one sample only" if tables else ""))

    def measure(self, kept: Any, given: dict, function: Callable) -> tuple[Trial | None, str]:
        """Returns the result of a trial, or None and why there is none."""
        errors = []
        for dtype in (torch.float32, None):     # what computes in one precision alone is tried in that
            for copies in (2, 1) if len(kept.ids) == 1 else (1,):
                try:
                    row, reason = self.measured(kept, given, function, dtype, copies)
                except ValueError:
                    raise
                except Exception as error:
                    errors.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
                    continue
                if row is not None or dtype is None:
                    return row, reason
                errors.append(reason)
        return None, errors[0]

    def measured(self, kept: Any, given: dict, function: Callable, dtype: torch.dtype | None,
                 copies: int) -> tuple[Trial | None, str]:
        run, block, name = kept.run, kept.run.block, kept.run.block.tokens
        device = kept.away.device
        with undisturbed(block.inner, device) as restart:
            generator = torch.Generator(device).manual_seed(0)
            given = full(kept, given, generator)
            given = {key: prepared(value, generator, dtype, copies, key == name) for key, value in given.items()}
            batch = len(only_element(given[name]))
            outs, call = [], with_open_gates(block, generator, dtype)
            order = torch.rand(batch, run.free, generator=generator, device=device).argsort(dim=1)
            straight, turned = (in_order(kept, ids) for ids in (order.sort(dim=1).values, order))
            x, index = only_element(given[name]), turned.places()[..., None]
            rows = x.take_along_dim(index, 1)
            taken = turned.take(copied(given) | {name: [rows] if isinstance(given[name], list) else rows})
            restart()
            outs.append(function(straight.take_functions(copied(given)), call))
            restart()
            try:
                if block.by_sample and batch > 1:
                    self.check_vmap(run, taken, lambda: run.routing.feed(block, function, taken, batch, call))
                outs.append(run.routing.feed(block, function, taken, batch, call))
            except Exception as error:
                tables = ", ".join(str(key) for key, _, axis in block.along if axis is not None)
                raise ValueError(
                    f"{block} fails when each sample keeps its own tokens ({str(error).partition(chr(10))[0]}): it "
                    f"must take a batch axis in what along= names ({tables or 'nothing'}). Axis 0 names a table "
                    f"without one.") from error
            outs = [out[block.spec.out] if isinstance(out, tuple | list) else out for out in outs]
            if any(not isinstance(out, Tensor) or out.shape != x.shape for out in outs):
                return None, "it returns something else than tokens"      # `Pass.leave` raises an error for it
            out, other = (out.to(torch.promote_types(out.dtype, torch.float32)) for out in outs)
            added, size, deviation = (float(part.square().mean().sqrt()) for part in
                                      (out - x, out, other - out.take_along_dim(index, 1)))
        eps = torch.finfo(dtype or x.dtype).eps
        if not math.isfinite(deviation) or added <= 4 * eps * size:     # lost when added to the tokens and rounded
            return None, "its output is not finite" if not math.isfinite(deviation) else "it adds nothing yet"
        limit = (TOLERANCE if dtype or x.dtype == torch.float64 else math.sqrt(eps)) + 8 * eps * size / added
        return Trial(f"block {block.index} of {block.spec.path} ({own_class(block.inner).__name__})", deviation / added,
                     limit, dtype or x.dtype), ""


    def check_vmap(self, run: Any, taken: dict, call: Callable) -> None:
        """Finds out whether torch.func.vmap can call a block, with its backward; else samples are called in turn."""
        x = only_element(taken[run.block.tokens]).requires_grad_(run.has_gradient)
        try:
            with torch.set_grad_enabled(run.has_gradient):
                out = call()
                out = out[run.block.spec.out] if isinstance(out, tuple | list) else out
                if run.has_gradient:
                    torch.autograd.grad(out.sum(), x)
        except Exception:
            self.tried["in turn", run.block.spec.path] = None
        finally:
            x.requires_grad_(False)


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

    dropouts = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
                torch.dropout, torch.alpha_dropout, torch.feature_dropout}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in self.dropouts:
            return args[0] if args else kwargs["input"]
        if function is F.scaled_dot_product_attention:
            is_named = len(args) < 5
            args, kwargs = args if is_named else (*args[:4], 0.0, *args[5:]), kwargs | {"dropout_p": 0.0} if is_named \
                else kwargs
        if function is F.multi_head_attention_forward:
            bound = inspect.signature(function).bind(*args, **kwargs)
            bound.arguments["dropout_p"] = 0.0
            args, kwargs = bound.args, bound.kwargs
        return function(*args, **kwargs)


def copied(value: Any, memo: dict | None = None) -> Any:
    """Copies an argument, so that a block may write to it; modules and functions remain."""
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Tensor):
        new = value.detach().clone() if type(value) is Tensor else value
    elif isinstance(value, list | tuple | set | Mapping):
        if isinstance(value, Mapping):
            new = {key: copied(part, memo) for key, part in value.items()}
            new = new if type(value) is dict else copy.copy(value)
        else:
            parts = [copied(part, memo) for part in value]
            new = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    elif isinstance(value, nn.Module | FunctionType | MethodType | BuiltinFunctionType | type) \
            or not hasattr(value, "__dict__"):
        new = value
    else:
        new = copy.copy(value)
        memo[id(value)] = new
        vars(new).update({key: copied(part, memo) for key, part in vars(value).items()})
    memo[id(value)] = new
    return new


def prepared(value: Any, generator: torch.Generator, dtype: torch.dtype | None, copies: int, is_tokens: bool) -> Any:
    """Returns an argument in the trial's precision, with open gates, and repeated for a batch of one."""
    def prepare(part: Any) -> Any:
        if not isinstance(part, Tensor) or type(part) is not Tensor:
            return part
        part = part.detach()
        if dtype and part.is_floating_point() and part.dtype != torch.float64:
            part = part.to(dtype)
        if not is_tokens:
            part = opened(part, generator)
        if copies > 1 and part.ndim > 1 and len(part) == 1:
            part = part.repeat(copies, *[1] * (part.ndim - 1))
        return part
    return mapped(prepare, value)


def opened(part: Tensor, generator: torch.Generator) -> Tensor:
    """Returns noise in place of a tensor that is near 0: positive in a vector, where a root may be taken of it."""
    if not part.is_floating_point() or not part.numel() or part.device != generator.device:
        return part
    if not float(part.detach().abs().amax()) < 1e-3:
        return part
    noise = torch.randn(part.shape, generator=generator, device=part.device, dtype=torch.float32).to(part.dtype)
    return noise / math.sqrt(part.shape[1]) if part.ndim > 1 else 0.25 + noise.abs() / 2


def full(kept: Any, given: dict, generator: torch.Generator) -> dict:
    """Returns arguments for all tokens: those that earlier blocks have reduced are put among noise."""
    run, block = kept.run, kept.run.block
    reduced = run.stream - kept.gone
    x = only_element(given[block.tokens])
    if x.shape[1] != run.stream:
        x = kept.rejoin(x)
        given = given | {block.tokens: [x] if isinstance(given[block.tokens], list) else x}

    def expand(part: Any, axis: int) -> Any:
        if not isinstance(part, Tensor) or not 0 < axis % part.ndim < part.ndim or part.shape[axis] != reduced:
            return part
        axis %= part.ndim
        shape = [len(part), *part.shape[1:axis], run.stream, *part.shape[axis + 1:]]
        noise = torch.randn(shape, generator=generator, device=part.device).to(part.dtype)
        index = kept.places().view(len(kept.ids), *[1] * (axis - 1), -1, *[1] * (part.ndim - axis - 1))
        return noise.scatter(axis, index.expand_as(part), part)

    for name, _, axis in block.along if kept.gone else ():
        if isinstance(axis, int) and name in given:
            given = given | {name: mapped(lambda part, axis=axis: expand(part, axis), given[name])}
    return given


def in_order(kept: Any, order: Tensor) -> Any:
    """Returns a `Kept` that keeps all tokens that may be routed, in the given order (B, free)."""
    run, other = kept.run, copy.copy(kept)
    other.ids, other.index, other.along = order, [], {}
    for length in (run.stream, run.length):
        places = run.places(order, length)
        index = torch.arange(length, device=order.device).repeat(len(order), 1)
        other.index.append((length, index.scatter(1, places, places.gather(1, order)), -1))
    return other


def with_open_gates(block: Any, generator: torch.Generator, dtype: torch.dtype | None) -> Callable:
    """Returns a function that calls a block without its hooks and its route, with noise in place of parameters near 0.

    So a block that starts as the identity, as with adaLN-Zero or LayerScale, shows what it will compute. The function
    uses copies of the block's buffers and, in another precision, of its parameters.
    """
    holder, inner = nn.Module(), block.inner
    own = vars(inner).get("forward")
    holder.block, holder.forward = inner, own or partial(type(inner).forward, inner)
    tensors = {f"block.{name}": buffer.clone() for name, buffer in inner.named_buffers()}
    for name, p in inner.named_parameters():
        if type(p) in (nn.Parameter, Tensor) and p.is_floating_point() and p.element_size() > 1:
            new = opened(p.detach(), generator)
            tensors[f"block.{name}"] = new.to(dtype) if dtype and new.dtype != torch.float64 else new
    if dtype:
        tensors |= {name: buffer.to(dtype) for name, buffer in tensors.items()
                    if buffer.is_floating_point() and buffer.dtype != torch.float64}
    return lambda *args, **kwargs: torch.func.functional_call(holder, tensors, args, kwargs, tie_weights=False)


@contextmanager
def undisturbed(block: nn.Module, device: torch.device) -> Iterator[Callable[[], None]]:
    """Runs a block without dropout, and restores it and all random states; yields what starts these states anew."""
    for part in block.modules():
        if hasattr(part, "unshard"):        # FSDP2 gathers the weights of the call that follows
            part.unshard()
    before = [(part, dict(vars(part))) for part in block.modules()]
    kind = {} if device.type == "cpu" else dict(devices=[device], device_type=device.type)
    numpy, states = sys.modules.get("numpy"), [random.getstate()]
    states += [numpy.random.get_state()] if numpy else []
    precision = torch.get_float32_matmul_precision()

    def restart() -> None:
        torch.manual_seed(0)
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])

    with NoDropout(), torch.random.fork_rng(**kind or dict(devices=[])):
        try:
            torch.set_float32_matmul_precision("highest")
            for part, state in before:      # an attribute may be a cache that the block writes to
                vars(part).update({name: value.clone() for name, value in state.items() if isinstance(value, Tensor)})
            yield restart
        finally:
            restart()
            torch.set_float32_matmul_precision(precision)
            for part, state in before:
                vars(part).clear()
                vars(part).update(state)


def settings_of(block: Any, blocks: list) -> tuple:
    """Returns a key that similar blocks share: their class and all settings, except those that number the blocks."""
    def settings(block: Any) -> dict:
        return {(name, key): value for name, part in block.inner.named_modules() for key, value in vars(part).items()
                if isinstance(value, bool | int | str) and key[0] != "_" and key != "training"}

    others = [settings(other) for other in blocks if other.spec is block.spec]
    return own_class(block.inner), *((key, value) for key, value in settings(block).items() if isinstance(value, bool)
                                     or len({other.get(key) for other in others}) < len(others) or len(others) == 1)


def lengths_of(value: Any) -> Iterator[int]:
    """Yields the first sizes of all tensors and lists in the arguments of a call."""
    if isinstance(value, Tensor):
        yield from value.shape[:1]
    elif isinstance(value, Mapping | tuple | list):
        if not isinstance(value, Mapping):
            yield len(value)
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from lengths_of(part)


def along_tokens(value: Any, sizes: set[int]) -> bool:
    """True if an argument may have a value per token: a tensor with an axis of one of the sizes, or any object."""
    if isinstance(value, Tensor):
        return not sizes.isdisjoint(value.shape)
    if isinstance(value, tuple | list):
        return any(along_tokens(part, sizes) for part in value)
    return not isinstance(value, bool | int | float | str | Mapping | None)
