"""Times work on a device and its parts, measures the rate of matrix products, and runs variants in turn."""

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch

from runtime.device import DTYPES

SQUARES = {"cpu": (1024, 2048), "cuda": (4096, 8192, 16384)}  # sides of the matrices that are multiplied
Mark = Callable[[str], None]  # charges the time since the last mark to a name


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    wait(device)
    began = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - began


def seconds_of_parts(device: torch.device, work: Callable[[Mark], object], count: int = 1) -> dict[str, float]:
    """Returns the seconds between marks of work, for one of its `count` repetitions, and resets the peak of memory.

    The clock is the GPU's, by events on its stream: they wait for nothing, and time in which the GPU is idle is in the
    part whose work it waits for.
    """
    marks: list[tuple[str, float | torch.cuda.Event]] = []

    def mark(name: str) -> None:
        if device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        marks.append((name, now))

    wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    mark("start")
    work(mark)
    wait(device)
    parts: dict[str, float] = defaultdict(float)
    for (_, begin), (name, end) in itertools.pairwise(marks):
        parts[name] += (begin.elapsed_time(end) / 1000 if device.type == "cuda" else end - begin) / count
    return dict(parts)


@contextlib.contextmanager
def marked(mark: Mark, owner: object, method: str, after: str, before: str | None = None) -> Iterator[None]:
    """Marks `before` and `after` around each call of a method of one object."""
    plain, is_own = getattr(owner, method), method in vars(owner)

    def call(*args, **kwargs):
        if before:
            mark(before)
        value = plain(*args, **kwargs)
        mark(after)
        return value

    setattr(owner, method, call)
    yield
    if is_own:
        setattr(owner, method, plain)
    else:
        delattr(owner, method)


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
                              use_fast_accum=True)  # as in torchao's forward pass
        product()

        def repeat(product: Callable = product) -> None:
            for _ in range(repeats):
                product()

        measured[str(side)] = 2 * side**3 * repeats / seconds(device, repeat)
    return measured


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(each[name] for each in rounds) for name in rounds[0]}


def take_turns(
    rounds: int, device: torch.device, precision: str, works: dict[str, Callable[[], dict[str, float]]],
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]], dict[str, float]]:
    """Times the parts of all works in turn, round after round.

    Returns by name the seconds of each round and the median ones of each part, and the FLOP/s of matrix products.
    """
    taken, products = defaultdict(list), []
    for _ in range(rounds):
        for name, work in works.items():
            taken[name].append(work())
        products.append(matmul_flops(device, precision))
    whole = {name: [sum(parts.values()) for parts in each] for name, each in taken.items()}
    return whole, {name: medians(each) for name, each in taken.items()}, medians(products)
