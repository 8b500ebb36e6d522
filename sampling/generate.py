"""Seeds -> images, over ranks."""

import sys
from collections.abc import Callable, Iterable, Iterator

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather
from torch import Tensor
from tqdm import tqdm

from dit import DiT
from guidance import Guidance
from runtime import libraries
from runtime.device import DTYPES, DType, upload
from sampling.sampler import Sampler

SAMPLING_VERSION = 1  # a change of the images of the same seeds increments it: tests/test_versions.py

# The places (B,) int64 of the seeds, on the host, -1 for a copy; images (B, H, W, 3) uint8 or latents (B, C, h, w).
Batch = tuple[Tensor, Tensor]


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


def compile_to_sample(net: DiT, guidance: Guidance | None, how: bool | None, count: int, device: torch.device) -> bool:
    """Compiles the network that `count` images are sampled from, and that of a weak pass; returns whether it does.

    None compiles where that pays, as it takes a minute: on a GPU, for more than 1,000 images, and unless the ratios of
    tokens change from step to step, as each number of tokens is a graph.
    """
    if how is None:
        scheduled = guidance is not None and tuple in (type(guidance.gamma1), type(guidance.gamma2))
        how = device.type == "cuda" and count > 1000 and not scheduled
    libraries.compile_blocks(net, how)
    if guidance is not None and guidance.net2 is not None:
        libraries.compile_blocks(guidance.net2, how)
    return how


def generate(
    state: Accelerator | PartialState,
    net: DiT,
    sampler: Sampler,
    decode: Callable[[Tensor], Tensor],     # latents (B, C, h, w) -> images (B, H, W, 3) uint8, which it yields
    seeds: list[int],                       # of all ranks; each is one image
    labels: list[int],                      # one per seed
    *,
    batch_size: int,                        # images that a rank samples at once, or all of them, if these are fewer
    precision: DType = "fp32",              # of the network, under autocast
    progress: str | None = None,            # the bar's name; None: no bar
) -> Iterator[Batch]:
    """Samples this rank's images batch by batch: rank r takes the r-th part of each world · batch_size seeds.

    All batches have one size: where seeds run out, copies fill the batch. So results are the same bit for bit on any
    number of ranks. `gathered` joins the ranks' parts in order and drops copies.
    """
    device, batch_size = next(net.parameters()).device, min(batch_size, len(seeds))
    pause = 0.1 if sys.stderr.isatty() else 10  # seconds from an update to the next; a log gets few
    bar = tqdm(total=len(seeds), desc=progress, unit="img", delay=pause, mininterval=pause,
               disable=not (progress and state.is_main_process))
    for start in range(0, len(seeds), batch_size * state.num_processes):
        indices = torch.arange(batch_size) + start + batch_size * state.process_index
        indices[indices >= len(seeds)] = -1
        places = indices.clamp(min=0).tolist()  # a copy is one of the first image
        noise, y = SeededNoise([seeds[i] for i in places], device), torch.tensor([labels[i] for i in places])
        unit = noise.randn((net.in_channels, net.input_size, net.input_size))
        with torch.autocast(unit.device.type, DTYPES[precision], enabled=precision != "fp32"):
            latents = sampler(net, unit, upload(y, device), noise.randn_like)
        yield indices, decode(latents)
        bar.update(min(batch_size * state.num_processes, len(seeds) - start))
    bar.close()


def gathered(state: Accelerator | PartialState, batches: Iterable[Batch]) -> Iterator[Tensor]:
    """Gathers all ranks' images on every rank's CPU, in the order of the seeds and without the copies."""
    for batch in batches:
        indices, images = (
            (gather(part.to(state.device).contiguous()) if state.num_processes > 1 else part).cpu() for part in batch)
        yield images[indices >= 0]
