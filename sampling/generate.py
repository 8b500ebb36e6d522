"""Seeds -> images, over ranks, and the cost of sampling."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from accelerate import PartialState
from accelerate.utils import gather
from torch import Tensor
from tqdm import tqdm

from dit import DiT, multiply_adds
from edm import EDM
from guidance import Guidance
from rf import RF
from routing_module import Route
from runtime.device import DTYPES, upload
from sampling.checks import sampler_of

SAMPLING_VERSION = 1  # a change of the images of the same seeds increments it: tests/test_versions.py

# On the host seeds (B,) int64 and labels (B,) int64; images (B, H, W, 3) uint8, or latents (B, C, h, w) float32.
Batch = tuple[Tensor, Tensor, Tensor]


class Meter:
    """Replaces a network while it is sampled, and counts the samples that pass through it with each set of routes."""

    def __init__(self, net: DiT):
        self.net, self.passes = net, Counter[tuple[Route, ...]]()

    def __getattr__(self, name: str) -> object:
        return getattr(self.net, name)

    def __call__(
        self, x: Tensor, t: Tensor, y: Tensor, routes: tuple[Route, ...] = (), mask_noise: Tensor | None = None,
    ) -> Tensor:
        self.passes[routes] += len(x)
        return x.new_zeros(len(x), self.net.out_channels, *x.shape[2:])


def rehearse(
    net: DiT, diffusion: EDM | RF, num_steps: int, guidance: Guidance | None = None, **sampler: float | str,
) -> list[Meter]:
    """Runs the sampler on one image of zeros; returns the meters of the network and of guidance's second network."""
    meters = [Meter(net)]
    if guidance is not None and guidance.net2 is not None:
        meters.append(Meter(guidance.net2))
        guidance = replace(guidance, net2=meters[-1])
    noise, y = torch.zeros(1, net.in_channels, net.input_size, net.input_size), torch.zeros(1, dtype=torch.int64)
    sampler_of(diffusion, **sampler)(meters[0], noise, y, num_steps=num_steps, guidance=guidance,
                                     randn_like=torch.zeros_like)
    return meters


def sampling_cost(
    net: DiT, diffusion: EDM | RF, num_steps: int, guidance: Guidance | None = None, **sampler: float | str,
) -> tuple[int, int, int]:
    """Returns one image's passes and multiply-adds, of linear layers and of attention."""
    passes, linear, attention = 0, 0, 0
    for meter in rehearse(net, diffusion, num_steps, guidance, **sampler):
        for routes, count in meter.passes.items():
            costs = multiply_adds(meter.net, routes)
            passes, linear, attention = passes + count, linear + count * costs[0], attention + count * costs[1]
    return passes, linear, attention


class SeededNoise:
    """One random generator per image, so that an image does not depend on its batch; sampled on the CPU, then moved."""

    def __init__(self, seeds: list[int], device: torch.device | str):
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.device = device

    def randn(self, shape: tuple[int, ...]) -> Tensor:
        """Samples float32 unit noise (B, *shape)."""
        return upload(torch.stack([torch.randn(shape, generator=g) for g in self.generators]), self.device)

    def randn_like(self, x: Tensor) -> Tensor:
        return self.randn(x.shape[1:]).to(x.dtype)


def generate(
    state: PartialState,
    net: DiT,
    diffusion: EDM | RF,
    decode: Callable[[Tensor], Tensor],     # latents (B, C, h, w) -> images (B, H, W, 3) uint8, which it yields
    seeds: list[int],                       # of all ranks; each is one image
    labels: list[int],                      # one per seed
    *,
    batch_size: int,                        # images that a rank samples at once, or fewer if its share is smaller
    num_steps: int,
    guidance: Guidance | None = None,
    precision: str = "fp32",                # of the network, under autocast
    progress: str | None = None,            # the bar's name; None: no bar
    **sampler: float | str,                 # settings of `diffusion.sample`
) -> Iterator[Batch]:
    """Samples this rank's images batch by batch: rank r takes the r-th part of each world · batch_size seeds.

    All batches are full: where seeds run out, copies with seed -1 fill the batch. So with at least world · batch_size
    seeds, shapes and results are the same bit for bit on one rank and on several; with fewer, which make smaller
    batches, they are the same up to rounding. `gathered` joins the ranks' parts in order and drops copies.
    """
    device = next(net.parameters()).device
    batch_size = min(batch_size, max(1, math.ceil(len(seeds) / state.num_processes)))
    sample = sampler_of(diffusion, **sampler)
    silent, began, said = progress is None or not state.is_main_process, time.perf_counter(), None
    bar = tqdm(total=len(seeds), desc=progress, unit="img", disable=silent or None)
    for start in range(0, len(seeds), batch_size * state.num_processes):
        first = start + batch_size * state.process_index
        sampled = seeds[first : first + batch_size]
        pad = batch_size - len(sampled)
        batch_labels = torch.tensor(labels[first : first + batch_size] + [labels[0]] * pad)
        y = upload(batch_labels, device)
        noise = SeededNoise(sampled + [seeds[0]] * pad, device)
        unit = noise.randn((net.in_channels, net.input_size, net.input_size))
        with torch.autocast(unit.device.type, DTYPES[precision], enabled=precision != "fp32"):
            latents = sample(net, unit, y, num_steps=num_steps, guidance=guidance, randn_like=noise.randn_like)
        yield torch.tensor(sampled + [-1] * pad), batch_labels, decode(latents)
        done = min(start + batch_size * state.num_processes, len(seeds))
        bar.update(done - start)
        if bar.disable and not silent and 10 * done // len(seeds) not in (said, 10):  # in a pipe or a notebook
            said, seconds = 10 * done // len(seeds), time.perf_counter() - began
            print(f"{progress}: {done:,} of {len(seeds):,} images in {seconds:,.0f} s, about "
                  f"{seconds * (len(seeds) / done - 1):,.0f} s to go")
    bar.close()


def gathered(state: PartialState, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Gathers all ranks' batches on every rank's CPU, in the order of the seeds and without the copies."""
    for batch in batches:
        seeds, labels, images = (
            (gather(part.to(state.device).contiguous()) if state.num_processes > 1 else part).cpu() for part in batch)
        real = seeds >= 0
        yield seeds[real], labels[real], images[real]
