"""Sampled images and scores are those of SAMPLING_VERSION and SCORING_VERSION.

Rows of results have both versions. To change sampling or scoring, increment the constant. To store the new numbers,
run `python tests/test_versions.py`.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import one_rank, score_with
from PIL import Image
from test_published_parity import TINY, checksum, fill, wave

from autoencoder import pixels_to_images
from dit import DiT
from edm import DDPM, EDM
from examples.own_features import positions_at_224
from guidance import Guidance
from latents.images import center_crop
from rf import RF
from routing_module import Route
from sampling.generate import SAMPLING_VERSION
from sampling.options import labels_of
from sampling.sampler import Sampler
from scoring import features, image_sets, metrics
from scoring.image_sets import sampled_images
from scoring.score import SCORING_VERSION, Reference

FILE = Path(__file__).with_name("versions.json")
HOMES = {"sampling": "sampling/generate.py", "scoring": "scoring/score.py"}
ROUTE = Route(1, 1, 0.5)
SEEDS = [3, 100_000, 100_007]
# Each with the network's keywords, the diffusion, the sampler's settings, and the guidance.
SAMPLED = {
    "edm": ({}, EDM(), {}, None),
    "ddpm": ({"learn_sigma": True}, DDPM(), {}, None),
    "ddpm, ancestral": ({"learn_sigma": True}, DDPM(), {"solver": "ancestral"}, Guidance(1.5, channels=3)),
    "rf": ({}, RF(), {}, None),
    "rf, heun": ({}, RF(), {"solver": "heun", "shift": 0.3}, None),
    "rf, euler_maruyama": ({}, RF(), {"solver": "euler_maruyama"}, Guidance(1.5)),
    "by label": ({}, EDM(), {}, Guidance(2.0)),
    "by label, in an interval": ({}, EDM(), {}, Guidance(2.0, interval=(0.1, 5.0))),
    "by ratios": ({}, EDM(), {}, Guidance(1.5, 0.25, 0.5, drop_label=False)),
    "by label and ratios on a cosine": ({}, RF(), {},
                                        Guidance(1.5, [0.0, 0.25], [0.5, 0.75], routes=[Route(0, 1, 0.0)])),
    "images": ({"in_channels": 3}, EDM(), {}, None),
}  # fmt: skip


def sampled_numbers(name: str) -> list[float]:
    """Samples three images in two batches; returns a number for each."""
    changes, diffusion, sampler, guidance = SAMPLED[name]
    net = fill(DiT(**TINY | {"routes": [ROUTE]} | changes))
    decode = pixels_to_images if name == "images" else (lambda latents: latents)
    sampled = sampled_images(one_rank(), net, Sampler(diffusion, 4, guidance, sampler), decode, SEEDS,
                             labels_of(SEEDS, [*range(10)]), batch_size=2)
    checksums = {int(i): checksum(image) for indices, images in sampled.batches
             for i, image in zip(indices, images, strict=True)}
    return [checksums[i] for i in range(3)]


def pictures(count: int, k: float) -> torch.Tensor:
    return (wave((count, 16, 16, 3), k, 127) + 128).to(torch.uint8)


def in_full() -> features.Extractor:
    """Stands in for Inception: pool, spatial and probs, waves of the image, of so few digits that none is rounded."""
    def compute(images: torch.Tensor) -> dict[str, torch.Tensor]:
        waves = {name: (images.flatten(1).double() / 255 @ wave((768, size), size).double()).mul(8).round().float() / 8
                 for name, size in (("pool", 24), ("spatial", 10), ("probs", 5))}
        return waves | {"probs": waves["probs"].softmax(1)}
    return features.Extractor("stand-in", "stand-in", "fid", {"pool": 24, "spatial": 10, "probs": 5}, "", compute)


def scored() -> dict[str, float]:
    """Scores 60 images against 40 others, and more parts by themselves."""
    numbers = {}
    for extractor, asked in ((in_full(), None), (features.load_extractor(one_rank(), "pixels"), ["fd_pixels"])):
        reference = Reference({}, image_sets.StoredImages(40, lambda indices: pictures(40, 0)[indices], {}), {})
        batches = ((torch.arange(first, first + 20), pictures(60, 1)[first : first + 20]) for first in (0, 20, 40))
        numbers |= {f"{extractor.name} {metric}": value
                  for metric, value in score_with(extractor, reference, batches, 60, asked).items()}
    splits = metrics.ScoreSums(6000, 4)
    splits.add(torch.arange(6000), (wave((6000, 4), 2, 3) * torch.linspace(0, 2, 6000)[:, None]).softmax(1))
    ordered = image_sets.StoredImages(1000, None, {}, np.arange(1000)[::-1])
    cropped = center_crop(Image.fromarray(wave((50, 70, 3), 3, 127).add(128).to(torch.uint8).numpy()), 16)
    return numbers | {
        "inception score of two splits": splits.score(),
        "evenly": checksum(torch.from_numpy(image_sets.evenly(1000, 31)).float()),
        "chosen in a shuffled order": checksum(torch.from_numpy(ordered.choose(31).copy()).float()),
        "cropped": checksum(torch.from_numpy(np.array(cropped))),
        "positions": checksum(positions_at_224(wave((1, 1 + 37 * 37, 4)))),
    }


def near(expected: list[float] | dict[str, float], name: str = "") -> object:
    """These numbers as another processor may round them; a few values of uint8 to the next level."""
    return pytest.approx(expected, rel=1e-4, abs=3 if name == "images" else 2e-3)


def changed(what: str) -> str:
    return f"If this is meant, increment {what.upper()}_VERSION in {HOMES[what]} and run python tests/test_versions.py."


@pytest.mark.parametrize("name", SAMPLED)
def test_images_are_those_of_their_version(name):
    stored = json.loads(FILE.read_text())["sampling"]
    assert stored["version"] == SAMPLING_VERSION, changed("sampling")
    assert sampled_numbers(name) == near(stored["numbers"][name], name), changed("sampling")


def test_scores_are_those_of_their_version():
    stored = json.loads(FILE.read_text())["scoring"]
    assert stored["version"] == SCORING_VERSION and scored() == near(stored["numbers"]), changed("scoring")


def store() -> None:
    """Writes the numbers of this code."""
    now = {"sampling": {"version": SAMPLING_VERSION, "numbers": {name: sampled_numbers(name) for name in SAMPLED}},
           "scoring": {"version": SCORING_VERSION, "numbers": scored()}}
    FILE.write_text(json.dumps(now, indent=1) + "\n")


if __name__ == "__main__":
    store()
