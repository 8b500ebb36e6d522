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


# ------------------------------------------------------------------------------------------------------------
# Batches


def batches(latents: Latents, batch_size: int, *, seed: int, rank: int = 0, world: int = 1, start: int = 0,
            pin: bool = False, device: torch.device | str | None = None, arrays: Iterable[str] = (),
            ) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]:
    """Yields this rank's share of each global batch, without end: stored (batch_size / world, …) float16, y int64 and,
    by name, those of `arrays` that lie beside the latents.

    Epoch e is a permutation of all images by (seed, e), cut into floor(count / batch_size) global batches; rank r
    takes the r-th part of each, so what a global batch holds does not depend on `world`. `start` global batches
    are skipped at no cost: a run that resumes sees what it would have seen. One thread reads ahead; closing the
    iterator ends it. `pin` page-locks the batches for copies to the current GPU. With a `device` all latents are
    copied there once, and the same batches are made there. Raises ValueError for a batch size that the images or the
    ranks do not fit, and for latents that do not fit on the device.
    """
    if not 0 < batch_size <= latents.count:
        raise ValueError(f"The batch size is {batch_size}, but {latents.where} holds {latents.count} images: "
                         "set batch_size between 1 and that.")
    if batch_size % world:
        raise ValueError(f"The batch size {batch_size} does not divide by {world} ranks: "
                         f"set batch_size to a multiple of {world}.")
    assert 0 <= rank < world and start >= 0
    plan = _plan(latents, batch_size, seed, rank, world, start)
    gpu = torch.cuda.current_device() if pin else None
    names = [name for name in arrays if name in latents.arrays]
    if device is None:
        parts = read_ahead(_load(partial(_read, latents, names), plan, gpu))
    else:
        rows = read_ahead(_load(partial(_rows, latents.count), plan, gpu))
        parts = _select(latents.to_device(device, names), rows)
    return _named(names, parts)


def _read(latents: Latents, names: list[str], indices: np.ndarray, mirror: np.ndarray | None) -> tuple[np.ndarray, ...]:
    return *latents.read(indices, mirror), *latents.rows_of(names, indices, mirror).values()


def _named(names: list[str], parts: Iterator) -> Iterator[tuple]:
    with closing(parts):
        for stored, y, *others in parts:
            yield stored, y, dict(zip(names, others, strict=True))


def to_latent(stored: torch.Tensor, kind: str) -> torch.Tensor:
    """Returns x (B, C, h, w) float32 on the device of `stored`; moments are drawn from, x = mean + std * eps.

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
        order = np.arange(latents.count, dtype=np.uint32 if latents.count <= 2**32 else np.int64)
        rng.shuffle(order)
        # Drawn after the order, which is therefore the same with and without mirrored copies.
        mirror = rng.integers(0, 2, latents.count, dtype=np.bool_) if latents.mirrored else None
        for batch in range(first_batch if epoch == first_epoch else 0, per_epoch):
            begin = batch * batch_size + rank * share
            rows = slice(begin, begin + share)
            yield order[rows].astype(np.int64), None if mirror is None else mirror[rows]
        del order, mirror  # before the next epoch's are made


def _load(read: Callable[..., tuple[np.ndarray, ...]], plan: Iterator, gpu: int | None) -> Iterator[tuple]:
    if gpu is not None:
        torch.cuda.set_device(gpu)  # a new thread starts on GPU 0, and pinning would open a context there
    for indices, mirror in plan:
        parts = map(torch.from_numpy, read(indices, mirror))
        yield tuple(parts if gpu is None else (part.pin_memory() for part in parts))


def _rows(count: int, indices: np.ndarray, mirror: np.ndarray | None) -> tuple[np.ndarray]:
    """Returns where `Latents.to_device` has put the latents of a batch."""
    return (indices if mirror is None else indices + count * mirror,)


def _select(wholes: tuple[torch.Tensor, ...], batches_of_rows: Iterator) -> Iterator[tuple]:
    with closing(batches_of_rows):
        for (rows,) in batches_of_rows:
            rows = rows.to(wholes[0].device, non_blocking=True)
            yield tuple(whole.index_select(0, rows % len(whole)) for whole in wholes)


def read_ahead(items: Iterator) -> Iterator:
    """Yields `items`, made by one thread that is at most NUM_AHEAD of them ahead and ends with this generator."""
    pool, end = ThreadPoolExecutor(1, "read-ahead"), object()
    try:
        waiting = deque(pool.submit(next, items, end) for _ in range(NUM_AHEAD))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, items, end))
            yield item
    finally:
        if not sys.is_finalizing():  # when all threads have been joined
            pool.shutdown(cancel_futures=True)
