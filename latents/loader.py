"""Turns latents into an endless stream of shuffled batches, which are the same for any number of ranks."""

import itertools
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from latents.folder import Latents

NUM_AHEAD = 4  # number of batches to read ahead of the training step
Batch = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
Indices = tuple[np.ndarray, np.ndarray | None]  # of images, and which of them are mirrored
Job = TypeVar("Job")
Read = TypeVar("Read")


def batches(latents: Latents, batch_size: int, *, seed: int, rank: int = 0, world: int = 1, start: int = 0,
            pin: bool = False, arrays: Iterable[str] = ()) -> Iterator[Batch]:
    """Yields this rank's share of each global batch, without end.

    A share is (stored (batch_size / world, …) float16, y int64, a dict of those `arrays` that the folder has).

    The pair (seed, e) determines the order of all images in epoch e, which is cut into floor(count / batch_size) global
    batches. Rank r takes the r-th part of each, so the content of a global batch does not depend on `world`. The first
    `start` global batches are skipped at no cost, so a resumed run sees what an uninterrupted one would have seen.
    One thread reads ahead until the iterator is closed. `pin` page-locks the batches for copies to the current GPU.

    Raises ValueError if the batch size is larger than the data set or not divisible by the number of ranks.
    """
    check_batch_size(batch_size, latents.count, world)
    assert 0 <= rank < world and start >= 0
    names = [name for name in arrays if name in latents.meta.arrays]
    load = partial(_load, latents, names, torch.cuda.current_device() if pin else None)
    return read_ahead(load, _plan(latents, batch_size, seed, rank, world, start))


def check_batch_size(batch_size: int, count: int, world: int, num_parts: int = 1) -> None:
    """Raises ValueError if a global batch does not divide evenly, or is larger than the data set."""
    if batch_size % (world * num_parts):
        raise ValueError(f"batch_size={batch_size} is the number of images per step and must be a multiple of "
                         f"{world * num_parts}: ranks ({world}) × grad_accum_steps ({num_parts}).")
    if batch_size > count:
        raise ValueError(f"batch_size={batch_size} is more than the {count} latents of the data set.")


def _load(latents: Latents, names: list[str], gpu: int | None, job: Indices) -> Batch:
    """Reads a batch from disk."""
    if gpu is not None:
        torch.cuda.set_device(gpu)  # a new thread starts on GPU 0, and pinning would open a context there

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array) if gpu is None else torch.from_numpy(array).pin_memory()

    stored, y = latents.read(*job)
    return tensor(stored), tensor(y), {name: tensor(rows) for name, rows in latents.rows_of(names, *job).items()}


def to_latent(stored: torch.Tensor, kind: str) -> torch.Tensor:
    """Returns x (B, C, h, w) float32 on the device of `stored`. Moments are sampled as x = mean + std * eps.

    eps comes from the device's default generator.
    """
    stored = stored.float()
    if kind == "sample":
        return stored
    mean, std = stored.chunk(2, dim=1)
    return mean + std * torch.randn_like(mean)


def _plan(latents: Latents, batch_size: int, seed: int, rank: int, world: int,
          start: int) -> Iterator[Indices]:
    """Yields (indices, mirror or None) of one rank's batches, epoch after epoch."""
    share, per_epoch = batch_size // world, latents.count // batch_size
    first_epoch, first_batch = divmod(start, per_epoch)
    for epoch in itertools.count(first_epoch):
        rng = np.random.default_rng((seed, epoch))
        order = np.arange(latents.count, dtype=np.uint32)
        rng.shuffle(order)
        # Sampled after the order, so that the order is the same with and without mirrored copies.
        mirror = rng.integers(0, 2, latents.count, dtype=np.bool_) if latents.mirrored else None
        for batch in range(first_batch if epoch == first_epoch else 0, per_epoch):
            begin = batch * batch_size + rank * share
            rows = slice(begin, begin + share)
            yield order[rows].astype(np.int64), None if mirror is None else mirror[rows]
        del order, mirror  # frees the memory before the next epoch allocates its own


def read_ahead(
    function: Callable[[Job], Read], jobs: Iterable[Job], *, threads: int = 1, ahead: int = NUM_AHEAD,
) -> Generator[Read, None, None]:
    """Yields function(job) for each job, in order. Threads run up to `ahead` jobs ahead and end with this generator."""
    pool, waiting = ThreadPoolExecutor(threads, "read-ahead"), deque[Future[Read]]()
    try:
        for job in jobs:
            waiting.append(pool.submit(function, job))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        if not sys.is_finalizing():  # otherwise Python has already joined all threads
            pool.shutdown(cancel_futures=True)
