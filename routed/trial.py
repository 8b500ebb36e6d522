"""Tries a block before trusting it: with its tokens in another order, it must return the same values in that order.

A trial runs in float32, in the mode of the call, and in a thread of its own, where no dispatch mode, saved-tensor hook,
autocast or context of the caller reaches.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import combinations, product
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from routed.kept import OWN, tokens_in
from routed.modules import plain_class
from routed.nested import leaves, mapped
from routed.networks import fewer, gathered, pairs

TRIED: WeakKeyDictionary[nn.Module, "Trials"] = WeakKeyDictionary()     # what has been tried in a network
TOLERANCE = 2e-4        # in float32, where 60 networks deviate by 1e-5 at most
PATIENCE = 3            # passes without a verdict, after which a block is trusted
RANDOM, ORDER = "it draws random numbers of its own", "depends on where its tokens are: in another order "
JOINT = ("is called once for each sample, because along= names axis 0, and what it returns or stores changes if it is "
         "called for all: an argument that all samples share is as long as the batch, or it computes over the batch. "
         "Pass it table[None] and name axis 1. It differs")
HALF = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Trial:
    """The result of a trial; deviation and tolerance are relative to what the block adds to its tokens."""

    block: str
    deviation: float
    tolerance: float
    dtype: torch.dtype


@dataclass
class Trials:
    """Tries the blocks of a network, each once for a kind of arguments in all `with` blocks, and lists the results."""

    rows: dict[tuple[Any, ...], Trial | int] = field(default_factory=dict)          # int: passes without a verdict
    sizes: dict[tuple[Any, ...], tuple[int, ...]] = field(default_factory=dict)     # the largest of its arguments

    @property
    def has_verdict(self) -> bool:
        return any(isinstance(row, Trial) or row == PATIENCE for row in self.rows.values())

    def try_block(self, kept: Any, call: Callable[..., Any]) -> str:
        """Raises ValueError for a block whose output depends on more than its tokens and the arguments in `along`.

        `call` calls a function like the block's forward with arguments by name. Returns the cause of a failed trial.
        """
        axes = [(name, getattr(axis, "__qualname__", str(axis))) for name, axis in kept.along.items()]
        batch, arguments = len(kept.ids), kept.arguments.items()
        kinds = [(name, *(kind_of(part, batch) for part in leaves(value))) for name, value in arguments]
        # What a block's behaviour may depend on, besides values of tensors and exact sizes.
        here = (kept.block.index, batch > 1, kept.block.settings, *axes, *kinds)
        sizes = tuple(size for part in leaves(kept.arguments) if isinstance(part, Tensor) for size in part.shape)
        before, largest = self.rows.get(here, 0), self.sizes.get(here, sizes)
        if before == PATIENCE or isinstance(before, Trial) and all(map(int.__le__, sizes, largest)):
            return ""
        row, reason, failed = in_thread(lambda: measure(kept, call), kept.ids.device)
        if row is not None and not row.deviation <= row.tolerance:
            advice = "" if reason is JOINT else (f" Cause: {cause(kept)}. If it depends on their order alone (causal "
                                                 f"attention, scans), set ordered=True.")
            raise ValueError(f"{kept.block} {reason} by {row.deviation:.2g} of what it adds (tolerance "
                             f"{row.tolerance:.1g}, {row.dtype}).{advice}")
        self.rows[here] = row or (before + 1 if isinstance(before, int) else 1)
        self.sizes[here] = tuple(map(max, sizes, largest))
        if self.rows[here] == PATIENCE:
            warnings.warn(f"Blocks of {kept.block.spec.path} could not be tried in {PATIENCE} passes ({reason}), so "
                          f"whether they may be routed is not known. They are trusted from now on.", stacklevel=2)
        return cause(kept) if failed else ""


def kind_of(part: Any, batch: int) -> Any:
    """Returns the kind of a value in an argument: the order of magnitude of sizes and numbers, other plain values."""
    if isinstance(part, Tensor):
        return part.is_floating_point(), part.shape[:1] == (batch,), *(size.bit_length() for size in part.shape)
    if isinstance(part, int) and not isinstance(part, bool):
        return part.bit_length()
    return part if isinstance(part, bool | str | None) else type(part).__name__


def candidates(kept: Any, value: Any) -> list[Any]:
    """Lists what along= may say about an argument as long as the tokens; the last axis of a table has channels."""
    def is_long(size: int) -> bool:         # a set, or `in`, would make sizes constants in a compiled graph
        return any(size == length for length in (kept.run.free, kept.length, kept.length - kept.num_routed))

    found: list[Any] = []
    for part in leaves(value):
        if type(part) is int and part in (kept.run.free, kept.length):
            found.append(fewer)
        if not isinstance(part, Tensor) or part.ndim < 2:
            continue
        if part.shape[-1] == part.shape[-2] and is_long(part.shape[-1]):
            found.append(pairs)
        is_mask = math.prod(part.shape[1:-1]) == 1 and part.shape[-1] != kept.x.shape[2]       # (B or 1, …, N)
        for axis in range(part.ndim - (not is_mask)):
            if is_long(part.shape[axis]) and (len(part) in (1, len(kept.ids)) if axis else len(part) != len(kept.ids)):
                found += [axis] if axis else [-part.ndim, 0]
    return list(dict.fromkeys(found))


def offer(kept: Any, call: Callable[..., Any], unnamed: dict[Any, list[Any]]) -> str:
    """Says what to write about arguments as long as the tokens: each line that passes a trial, or what is open."""
    right, choices = [], [[*axes, None] for axes in unnamed.values()]
    parts = {name: next(part for part in leaves(kept.arguments[name]) if candidates(kept, part)) for name in unnamed}
    # What has the shape of the tokens may be what the user wants to route, so no trial can tell.
    may_try = not torch.compiler.is_compiling() and kept.run.routing.tries is not None and not any(
        getattr(part, "shape", None) == kept.x.shape for part in parts.values()) and math.prod(map(len, choices)) <= 64
    for axes in product(*choices) if may_try else ():
        tried = kept.but(along=kept.along | dict(zip(unnamed, axes, strict=True)))
        row, *_ = in_thread(partial(measure, tried, call), kept.ids.device)
        if row is not None and row.deviation <= row.tolerance:
            right.append([[axis] for axis in axes])

    def line(axes: list[list[Any]]) -> str:
        given = {name: [axis] for name, axis in (kept.run.routing.options.along or {}).items()}
        return "along={" + ", ".join(f"{name!r}: {' or '.join(getattr(axis, '__name__', str(axis)) for axis in some)}"
                                     for name, some in (given | dict(zip(unnamed, axes, strict=True))).items()) + "}"

    found = ", ".join(f"{name} is {tuple(part.shape) if isinstance(part, Tensor) else part}"
                      for name, part in parts.items())
    used = sorted({axis.__name__ for axes in right or [choices] for some in axes for axis in some if callable(axis)})
    return (f"{found}, as long as the tokens: write {' or '.join(map(line, right or [choices]))}"
            + f" (`from routed import {', '.join(used)}`)" * bool(used)
            + (", with which this block passes its trial." if right else ", with the token axis, or None if it has no "
               "value per token." + f" The block passes its trial with none of these. Cause: {cause(kept)}." * may_try))


def cause(kept: Any) -> str:
    block = kept.block
    others = [str(name) for name, value in kept.arguments.items() if value is not None
              and kept.along.get(name) is None and name not in (block.tokens, block.text)]
    return ("positions inside the block or its hooks, such as its own rotary values, a convolution, windows or pooled "
            "keys; tokens that come first (N, B, D), as without batch_first=True; or the axis of an argument in along="
            + (f", which names none for {', '.join(others)}" if others else ""))


def measure(kept: Any, call: Callable[..., Any]) -> tuple[Trial | None, str, bool]:
    """Returns the result of a trial and what it means, or None and why there is none; and whether the block failed."""
    reasons: list[str] = []
    for dtype in (torch.float32, None):     # what computes in one precision alone is tried in that
        failed = False
        try:
            row, reason = measured(kept, call, dtype, None)
            if reason == RANDOM and kept.block.module.training:     # perhaps not in evaluation
                row, reason = measured(kept, call, dtype, False)
        except Exception as error:
            row, reason, failed = None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", True
        if row is not None or not failed:
            return row, reason, False
        reasons.append(reason)
    return None, reasons[0], failed


def measured(kept: Any, call: Callable[..., Any], dtype: torch.dtype | None, mode: bool | None,
             ) -> tuple[Trial | None, str]:
    """Compares the outputs of a block whose kept tokens are in their order, and in another."""
    block, ids, module = kept.block, kept.ids, getattr(kept.block.module, "_orig_mod", kept.block.module)
    if any(p.is_meta for p in (kept.x, *module.parameters())):
        return None, "its weights are elsewhere"
    function = module
    for part in module.modules():
        if hasattr(part, "unshard"):        # FSDP2 gathers the weights of the call that follows, not of a forward
            part.unshard()
            function = module.forward
    generator = torch.Generator(ids.device).manual_seed(0)
    order = torch.rand(ids.shape, generator=generator, device=ids.device).argsort(dim=1)
    arguments = {name: mapped(partial(opened, generator=generator, dtype=dtype, near=1e-3 * (name != block.tokens)),
                              value) for name, value in kept.arguments.items()}
    with on_copies(module, generator, dtype, mode) as start:
        def run(ids: Tensor, per_sample: bool | None = None, seed: int = 0) -> tuple[Any, Any, list[Any]]:
            start(seed)
            turned = kept.but(ids=ids, arguments=copied(arguments), is_trial=True)
            out = turned.call(partial(call, function=function), per_sample)
            # What modules hold besides weights, as statistics or a loss of experts, and lists that they append to.
            held = [value for part in module.modules() for name, value in vars(part).items()
                    if name not in OWN or name == "_buffers"]
            held += [value for value in turned.arguments.values() if isinstance(value, list)]
            return turned, out, [leaf for leaf in leaves(held) if isinstance(leaf, Tensor)]

        first, out, _ = run(ids)
        second, other, _ = run(ids.gather(1, order))
        x, main = first.tokens(), tokens_in(out, block)
        if not isinstance(main, Tensor) or main.shape != x.shape:
            return None, "it returns something else than tokens"      # `Pass.leave` raises an error for it
        added, size, eps = rms(main - x), rms(main), torch.finfo(dtype or torch.bfloat16).eps
        if not math.isfinite(added):
            return None, "its output is not finite"
        if added <= 4 * eps * size:         # lost when added to the tokens and rounded
            return None, "it adds nothing yet"
        limit = TOLERANCE + 2 * eps * (1 + size / added)
        found = deviations(first, out, other, second.order(), added, eps)
        deviation, reason = max(found), ORDER + ("they change" if found[0] == max(found) else
                                                 "another of its outputs changes")
        if deviation > limit and not rms(tokens_in(run(ids, seed=1)[1], block) - main) <= limit * added:
            return None, RANDOM
        if deviation <= limit and kept.per_sample and kept.run.routing.is_described and len(kept.ids) > 1 \
                and not isinstance(kept.run.front, Tensor):
            deviation, reason = max((deviation, reason), (joint_deviation(run, ids, added, eps), JOINT))
    return Trial(f"block {block.index} of {block.spec.path} ({plain_class(block.inner).__name__})",
                 deviation, limit, dtype or x.dtype), reason


def deviations(kept: Any, out: Any, other: Any, order: Tensor, added: float, eps: float) -> list[float]:
    """Compares the tokens with those in another order, and other outputs along whichever axes they have the tokens."""
    main, text = tokens_in(out, kept.block), kept.arguments.get(kept.block.text)
    found = [rms(gathered(main, order, 1) - tokens_in(other, kept.block)) / added]
    for one, two in zip(leaves(out), leaves(other), strict=True):
        if one is main or not isinstance(one, Tensor) or not one.is_floating_point() or not one.numel():
            continue
        if one.ndim > 1 and len(one) == len(main) * main.shape[1]:     # (B·K, …), as of a router of experts
            one, two = one.unflatten(0, main.shape[:2]), two.unflatten(0, main.shape[:2])
        news = rms(one - text) if isinstance(text, Tensor) and text.shape == one.shape else rms(one)
        if news > 4 * eps * rms(one):
            axes = [axis for axis in range(1, one.ndim) if one.shape[axis] == main.shape[1] and len(one) == len(main)]
            turned = [reduce(lambda part, axis: gathered(part, order, axis), some, one)
                      for count in range(len(axes) + 1) for some in combinations(axes, count)]
            found.append(min(rms(part - two) for part in turned) / news)
    return [part if math.isfinite(part) else math.inf for part in found]


def joint_deviation(run: Callable[..., Any], ids: Tensor, added: float, eps: float) -> float:
    """Compares one call for each sample with one for all, where all samples keep the same tokens."""
    shared = ids[:1].expand(len(ids), -1)
    try:
        kept, joint, left = run(shared, False)
    except Exception:                       # a description that is made for single samples
        return 0.0
    _, single, left_single = run(shared, True)
    is_same = len(left) == len(left_single) and all(
        one.shape == two.shape and rms(one - two) <= TOLERANCE * rms(one)
        for one, two in zip(left, left_single, strict=True) if one.is_floating_point())
    return max(deviations(kept, joint, single, kept.order(), added, eps)) if is_same else math.inf


def rms(part: Tensor) -> float:
    return float(part.to(torch.promote_types(part.dtype, torch.float32)).square().mean().sqrt())


def in_thread(function: Callable[..., Any], device: torch.device) -> Any:
    """Runs a function in a thread of its own, on the caller's device and stream."""
    default = torch.get_default_device()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run() -> Any:
        with torch.no_grad(), torch.cuda.stream(stream) if stream else nullcontext(), \
                torch.device(default) if default.type != "cpu" else nullcontext():
            return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


class InTrial(TorchFunctionMode):
    """Leaves out dropout, also where it is called without `training`; with `wide`, half precision becomes float32."""

    def __init__(self, wide: bool):
        super().__init__()
        self.wide = wide

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if self.wide and name in ("bfloat16", "half"):
            return args[0].float()
        if self.wide and any(part in HALF for part in (*args, *kwargs.values()) if isinstance(part, torch.dtype)):
            args, kwargs = mapped(lambda part: torch.float32 if isinstance(part, torch.dtype) and part in HALF
                                  else part, (args, kwargs))
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        return function(*args, **kwargs)


def copied(value: Any, memo: dict[Any, Any] | None = None) -> Any:
    """Copies an argument, so that a block may write to it; modules and functions remain."""
    memo = {} if memo is None else memo

    def copy_of(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.clone() if type(part) is Tensor else part
        if isinstance(part, set | Mapping):
            return copy.copy(part)
        if id(part) not in memo and not callable(part) and hasattr(part, "__dict__"):
            memo[id(part)] = copy.copy(part)
            vars(memo[id(part)]).update(copied(vars(part), memo))
        return memo.get(id(part), part)

    return mapped(copy_of, value)


def opened(part: Any, generator: torch.Generator, dtype: torch.dtype | None, near: float = 0) -> Any:
    """Returns a tensor in the trial's precision, with noise in place of one that is near 0 or constant along an axis.

    So a block that starts as the identity, as with adaLN-Zero, LayerScale or a relative bias, shows what it will
    compute. A vector becomes positive, as a root may be taken of it. Quantised tensors remain.
    """
    if type(part) not in (nn.Parameter, Tensor) or not part.is_floating_point() or part.element_size() == 1:
        return part
    part = part.detach()
    if near and part.device == generator.device and part.numel():
        noise = torch.randn(part.shape, generator=generator, device=part.device, dtype=torch.float32).to(part.dtype)
        if float(part.abs().amax()) < near:
            part = noise / math.sqrt(part.shape[1]) if part.ndim > 1 else 0.25 + noise.abs() / 2
        elif any(size > 1 and bool((part == part.narrow(axis, 0, 1)).all())     # as one time for all frames
                 for axis, size in enumerate(part.shape) if axis):
            part = part / (1 + noise.abs())
    return part if dtype is None or part.dtype == torch.float64 else part.to(dtype)


@contextmanager
def on_copies(module: nn.Module, generator: torch.Generator, dtype: torch.dtype | None, mode: bool | None,
              ) -> Iterator[Callable[[int], None]]:
    """Runs a module on copies of all that it holds, without dropout, and restores it and torch's random numbers.

    Yields what starts both anew.
    """
    before = [(part, dict(vars(part))) for part in module.modules()]
    weights = {part: {name: opened(p, generator, dtype, 0.1) for name, p in values["_parameters"].items()}
               for part, values in before}
    precision, device = torch.get_float32_matmul_precision(), generator.device

    def copy_of(name: str, value: Any) -> Any:      # of an attribute, perhaps a cache that the block writes to
        may_change = name not in OWN and isinstance(value, Tensor | list | dict | set) or name == "_buffers"
        return mapped(partial(opened, generator=generator, dtype=dtype), copied(value)) if may_change else value

    def start(seed: int) -> None:
        torch.manual_seed(seed)
        for part, values in before:
            vars(part).clear()
            vars(part).update({name: copy_of(name, value) for name, value in values.items()},
                              _parameters=dict(weights[part]), _compiled_call_impl=None)
            if mode is not None:
                part.training = mode

    devices = dict(devices=[]) if device.type == "cpu" else dict(devices=[device], device_type=device.type)
    with InTrial(dtype is torch.float32), torch.random.fork_rng(**devices):
        try:
            if precision != "highest":      # setting it makes compiled code compile again
                torch.set_float32_matmul_precision("highest")
            yield start
        finally:
            if precision != "highest":
                torch.set_float32_matmul_precision(precision)
            for part, values in before:
                vars(part).clear()
                vars(part).update(values)
