"""Clocks: seconds on a device, shares of a step, what matrix products reach, works that take turns."""

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from torch import Tensor

from runtime.device import DTYPES

SQUARES = {"cpu": (1024, 2048), "cuda": (4096, 8192, 16384)}      # sides of the matrices whose product is the ceiling


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Times work, and on a GPU starts a new peak of memory, for train.peak_memory_gib."""
    wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - began


class Stopwatch:
    """Charges the time since the last mark to a name: the clock's on a CPU, on a GPU that between events on its stream.

    Events wait for nothing; time in which the GPU has nothing to do is in the part whose work it waits for.
    """

    def __init__(self, device: torch.device):
        self.device, self.marks = device, []
        self.mark("start")

    def mark(self, name: str) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        else:
            event = time.perf_counter()
        self.marks.append((name, event))

    def parts(self, count: int) -> dict[str, float]:
        """Returns the seconds of each name, of one of `count` repetitions."""
        wait(self.device)
        total = defaultdict(float)
        for (_, begin), (name, end) in itertools.pairwise(self.marks):
            total[name] += (begin.elapsed_time(end) / 1000 if self.device.type == "cuda" else end - begin) / count
        return dict(total)


@contextlib.contextmanager
def marked(watch: Stopwatch | None, owner: object, method: str, after: str, before: str = "") -> Iterator[None]:
    """Marks `before` and `after` around each call of a method of one object; without a watch, nothing."""
    plain = getattr(owner, method)

    def call(*args, **kwargs):
        if before:
            watch.mark(before)
        value = plain(*args, **kwargs)
        watch.mark(after)
        return value

    if watch is not None:
        setattr(owner, method, call)
    yield
    if watch is not None:
        delattr(owner, method)


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(each[name] for each in rounds) for name in rounds[0]}


def matmul_flops(device: torch.device, precision: str) -> dict[str, float]:
    """Measures the FLOP/s of square matrix products, by side; random factors, since zeros draw less power."""
    measured, repeats = {}, 10 if device.type == "cuda" else 1
    for side in SQUARES[device.type]:
        a, b = torch.randn((2, side, side), device=device, dtype=DTYPES.get(precision, torch.bfloat16))
        product = partial(torch.mm, a, b)
        if precision == "fp8":
            one = torch.ones((), device=device)
            a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
            product = partial(torch._scaled_mm, a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16,
                              use_fast_accum=True)      # as torchao's forward pass has it
        product()

        def repeat(product: Callable[[], Tensor] = product) -> None:
            for _ in range(repeats):      # none of which is kept
                product()

        measured[str(side)] = 2 * side**3 * repeats / seconds(device, repeat)
    return measured


def take_turns(
    rounds: int, device: torch.device, precision: str,
    works: dict[str, Callable[[Stopwatch | None], float]], count: int,
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]], dict[str, float]]:
    """Times all works in turn, and then with marks, round after round; `count` is what a work repeats.

    Returns by name the seconds of each round and the median ones of each part, and the FLOP/s of matrix products.
    """
    took, parts, products = defaultdict(list), defaultdict(list), []
    for _ in range(rounds):
        for name, work in works.items():
            took[name].append(work(None))
        for name, work in works.items():
            watch = Stopwatch(device)
            work(watch)
            parts[name].append(watch.parts(count))
        products.append(matmul_flops(device, precision))
    return took, {name: medians(each) for name, each in parts.items()}, medians(products)
