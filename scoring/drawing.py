"""Images that a network samples to be scored, and the record of how."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dit import DiT
from edm import EDM
from guidance import Guidance
from rf import RF
from sampling.checks import sampler_settings
from sampling.generate import DRAWING_VERSION, generate, sampling_cost
from scoring.evaluation import Subject
from scoring.image_sets import Indexed
from scoring.results import describe_autoencoder, describe_classes

DRAWN_RULE = "uint8 = floor(clip(127.5 x + 128, 0, 255))"
H100 = {"fp32": 120e12, "bf16": 240e12, "fp16": 240e12}  # FLOP/s: 30 % of a large product's (fp32: TF32), assumed


def describe_weights(
    checkpoint: str, step: int | None, weights: str, autoencoder: str, decode_precision: str, classes: list[int],
    num_classes: int, **more: object,
) -> dict:
    """Records which weights sample, of which classes, and what decodes them."""
    return {"checkpoint": checkpoint, "step": step, "weights": weights, "ema": weights.startswith("ema"), **more,
            "classes": describe_classes(classes, num_classes), **describe_autoencoder(autoencoder, decode_precision)}


class Drawing(Subject):
    """Images that a network samples of `seeds`, and the record of how: what a result must say to be compared.

    The record gets the images' size when the first are sampled.
    """

    def __init__(
        self,
        net: DiT,
        diffusion: EDM | RF,
        decode: Callable[[Tensor], Tensor],     # latents (B, C, h, w) -> images (B, H, W, 3) uint8
        seeds: list[int],                       # of all ranks; each is one image
        labels: list[int],                      # one a seed
        *,
        batch_size: int,                        # images a rank samples at once
        num_steps: int,
        guidance: Guidance | None = None,
        precision: str = "fp32",                # of the network, under autocast
        sampler: dict | None = None,            # settings of `diffusion.sample`; None: its own
        outline: DiT | None = None,             # a network of its shapes, to count its passes on; None: itself
        weights: dict | None = None,            # what `describe_weights` records of the network's
        guidance_record: dict | None = None,    # None: what guidance says of itself
    ):
        self.seeds, self.labels = seeds, labels
        sampler = sampler_settings(diffusion, sampler or {})
        self.generate = partial(generate, net, diffusion, decode, batch_size=batch_size, num_steps=num_steps,
                                guidance=guidance, precision=precision, **sampler)
        passes, linear, attention = sampling_cost(outline or net, diffusion, num_steps, guidance, **sampler)
        # JSON has no infinity.
        finite = {key: str(value) if value == math.inf else value for key, value in sampler.items()}
        record = {
            **(weights or {}), "diffusion": type(diffusion).__name__, "sampler": {"solver": "heun", **finite},
            "num_steps": num_steps, "guidance": guidance_record or (guidance and guidance.record()),
            "precision": precision,
            "size": None, "seeds": f"{seeds[0]}-{seeds[-1]}",
            "labels": "class seed % number of classes", "order": "of the seeds",
            "drawing_version": DRAWING_VERSION,  # and of one image:
            "evaluations": passes, "multiply_adds": {"linear": linear, "attention": attention},
        }
        super().__init__(len(seeds), record, DRAWN_RULE, self.sample)

    def sample(self, todo: np.ndarray) -> Indexed:
        """Samples this rank's share of the images at the indices `todo`, those of all ranks in rounds."""
        seeds, labels = ([values[index] for index in todo] for values in (self.seeds, self.labels))
        place = dict(zip(seeds, todo.tolist(), strict=True)) | {-1: -1}  # the seed of a copy
        for drawn, _, images in self.generate(seeds, labels):
            self.record["size"] = list(images.shape[1:3])
            yield torch.tensor([place[seed] for seed in drawn.tolist()]), images


def derived_hours(drawn: dict, count: int, precision: str) -> float:
    """Derives the hours of one H100 that sampling `count` images takes, by the FLOPs of the network alone."""
    return 2 * sum(drawn["multiply_adds"].values()) * count / H100[precision] / 3600
