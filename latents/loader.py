"""Latents -> endless shuffled batches, the same ones on any number of ranks."""

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import numpy as np
import torch

from latents.folder import Latents

NUM_AHEAD = 4  # batches that the reading thread may be ahead of the training step


# ---- batches --------------------------------------------------------------------------------------------------------


def batches(latents: Latents, batch_size: int, *, seed: int, rank: int = 0, world: int = 1, start: int = 0,
            pin: bool = False, device: torch.device | str | None = None, arrays: Iterable[str] = (),
            ) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]:
    """Yields this rank's share of each global batch, without end: stored (batch_size / world, …) float16, y int64 and,
    by name, those of `arrays` that the folder has.

    Epoch e is a permutation of all images by (seed, e), cut into floor(count / batch_size) global batches; rank r
    takes the r-th part of each, so what a global batch holds does not depend on `world`. `start` global batches
    are skipped at no cost: a run that resumes sees what it would have seen. One thread reads ahead; closing the
    iterator ends it. `pin` page-locks the batches for copies to the current GPU. With a `device` all latents are
    copied there once, and the same batches are made there. Raises ValueError for a batch size that the images or the
    ranks do not fit, and for latents that do not fit on the device.
    """
    check_batch_size(batch_size, latents.count, world)
    assert 0 <= rank < world and start >= 0
    names = [name for name in arrays if name in latents.arrays]
    wholes = None if device is None else latents.to_device(device, names)
    load = partial(_load, latents, names, wholes is not None, torch.cuda.current_device() if pin else None)
    return _batches(names, wholes, in_order(load, _plan(latents, batch_size, seed, rank, world, start)))


def check_batch_size(batch_size: int, count: int, world: int, num_parts: int = 1) -> None:
    """Raises ValueError for a global batch that ranks and parts do not divide, or of more images than there are."""
    if batch_size % (world * num_parts):
        raise ValueError(f"batch_size={batch_size} is the number of images per step and must be a multiple of "
                         f"{world * num_parts}: {world} ranks × grad_accum_steps={num_parts}.")
    if batch_size > count:
        raise ValueError(f"batch_size={batch_size} is more than the {count} latents of the data set.")


def _load(latents: Latents, names: list[str], is_on_device: bool, gpu: int | None,
          job: tuple[np.ndarray, np.ndarray | None]) -> list[torch.Tensor]:
    """Reads a batch, or of latents on a device the numbers of its rows there."""
    indices, mirror = job
    if is_on_device:
        arrays = [indices if mirror is None else indices + latents.count * mirror]
    else:
        arrays = [*latents.read(indices, mirror), *latents.rows_of(names, indices, mirror).values()]
    parts = [torch.from_numpy(array) for array in arrays]
    if gpu is not None:
        torch.cuda.set_device(gpu)  # a new thread starts on GPU 0, and pinning would open a context there
        parts = [part.pin_memory() for part in parts]
    return parts


def _batches(names: list[str], wholes: tuple[torch.Tensor, ...] | None, loaded: Iterator) -> Iterator[tuple]:
    with closing(loaded):
        for parts in loaded:
            if wholes is not None:
                rows = parts[0].to(wholes[0].device, non_blocking=True)
                parts = [whole.index_select(0, rows % len(whole)) for whole in wholes]
            stored, y, *others = parts
            yield stored, y, dict(zip(names, others, strict=True))


def find_damaged(latents: Latents, batch_size: int, seed: int, steps: range, arrays: Iterable[str]) -> list[str]:
    """Reads again the global batches of `steps`, as `batches` counts them from its start; returns, of each that holds
    NaN or infinity, the first file and row that do.
    """
    names = [name for name in arrays if name in latents.arrays]
    plan = itertools.islice(_plan(latents, batch_size, seed, 0, 1, steps.start), len(steps))
    return [damaged for job in plan if (damaged := latents.find_damaged(*job, names))]


def to_latent(stored: torch.Tensor, kind: str) -> torch.Tensor:
    """Returns x (B, C, h, w) float32 on the device of `stored`; moments are sampled, x = mean + std * eps.

    eps comes from the device's default generator.
    """
    stored = stored.float()
    if kind == "sample":
        return stored
    mean, std = stored.chunk(2, dim=1)
    return mean + std * torch.randn_like(mean)


def _plan(latents: Latents, batch_size: int, seed: int, rank: int, world: int,
          start: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yields (indices, mirror or None) of one rank's batches, epoch after epoch."""
    share, per_epoch = batch_size // world, latents.count // batch_size
    first_epoch, first_batch = divmod(start, per_epoch)
    for epoch in itertools.count(first_epoch):
        rng = np.random.default_rng((seed, epoch))
        order = np.arange(latents.count, dtype=np.uint32)
        rng.shuffle(order)
        # Drawn after the order, which is therefore the same with and without mirrored copies.
        mirror = rng.integers(0, 2, latents.count, dtype=np.bool_) if latents.mirrored else None
        for batch in range(first_batch if epoch == first_epoch else 0, per_epoch):
            begin = batch * batch_size + rank * share
            rows = slice(begin, begin + share)
            yield order[rows].astype(np.int64), None if mirror is None else mirror[rows]
        del order, mirror  # before the next epoch's are made


def in_order(function: Callable, jobs: Iterable, *, threads: int = 1, ahead: int = NUM_AHEAD) -> Iterator:
    """Yields function(job) of each job in order; threads work up to `ahead` jobs ahead and end with this generator."""
    pool, waiting = ThreadPoolExecutor(threads, "read-ahead"), deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(function, job))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        if not sys.is_finalizing():  # when all threads have been joined
            pool.shutdown(cancel_futures=True)
