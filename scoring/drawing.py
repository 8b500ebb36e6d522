"""Images that are drawn as they are scored."""

import math
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor

from dit import DiT
from edm import EDM
from guidance import Guidance
from rf import RF
from sampling.generate import DRAWING_VERSION, Batch, generate, sampling_cost
from sampling.options import sampler_settings
from scoring.image_sets import Indexed
from scoring.results import Published

# ---- images that a network draws ------------------------------------------------------------------------------------


def indexed(batches: Iterable[Batch], seeds: list[int]) -> Indexed:
    """Gives drawn images their seed's place in `seeds` as index; copies, of seed -1, get -1."""
    place = {seed: index for index, seed in enumerate(seeds)} | {-1: -1}
    for drawn, _, images in batches:
        yield torch.tensor([place[seed] for seed in drawn.tolist()]), images


class Drawing:
    """Images that a network draws of `seeds`, and the record of how: what a result must say to be compared.

    The images' size is put into the record when the first are drawn.
    """

    def __init__(
        self,
        net: DiT,
        diffusion: EDM | RF,
        decode: Callable[[Tensor], Tensor],     # latents (B, C, h, w) -> images (B, H, W, 3) uint8
        seeds: list[int],                       # of all ranks; each is one image
        labels: list[int],                      # one a seed
        *,
        batch_size: int,                        # images a rank draws at once
        num_steps: int,
        guidance: Guidance | None = None,
        precision: str = "fp32",                # of the network, under autocast
        sampler: dict | None = None,            # settings of `diffusion.sample`; None: its own
        outline: DiT | None = None,             # a network of its shapes, to count its passes on; None: itself
    ):
        self.seeds, self.labels = seeds, labels
        self.published: Published | None = None     # scores of images that somebody has drawn just so
        sampler = sampler_settings(diffusion, sampler or {})
        self.generate = partial(generate, net, diffusion, decode, num_steps=num_steps, guidance=guidance,
                                precision=precision, **sampler)
        self.batch_size = batch_size
        passes, linear, attention = sampling_cost(outline or net, diffusion, num_steps, guidance, **sampler)
        # JSON has no infinity.
        finite = {key: str(value) if value == math.inf else value for key, value in sampler.items()}
        self.record = {
            "diffusion": type(diffusion).__name__, "sampler": {"solver": "heun", **finite},
            "num_steps": num_steps, "guidance": guidance and guidance.record(), "precision": precision,
            "size": None, "seeds": f"{seeds[0]}-{seeds[-1]}",
            "labels": "class seed % number of classes", "drawing_version": DRAWING_VERSION,      # and of one image:
            "evaluations": passes, "multiply_adds": {"linear": linear, "attention": attention},
        }

    def draw(self, todo: np.ndarray) -> Indexed:
        """Draws this rank's share of the images at the indices `todo`, those of all ranks in rounds."""
        wanted = [self.seeds[index] for index in todo]
        if not wanted:
            return
        batches = self.generate(
            wanted, [self.labels[index] for index in todo],
            batch_size=min(self.batch_size, -(-len(wanted) // PartialState().num_processes)),
        )
        for indices, images in indexed(batches, self.seeds):
            self.record["size"] = list(images.shape[1:3])
            yield indices, images


# ---- the record -----------------------------------------------------------------------------------------------------


DRAWN_RULE = "uint8 = floor(clip(127.5 x + 128, 0, 255))"
