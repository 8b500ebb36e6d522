"""Sampled images and scores are those of DRAWING_VERSION and SCORING_VERSION, which rows of results carry.

Who means to change it raises the constant, and stores the new numbers by `python tests/test_versions.py`.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import conftest  # noqa: F401      (which puts the project on the path of the script, too)
import numpy as np
import pytest
import torch
from conftest import one_rank, score_with
from PIL import Image
from test_published_parity import TINY, checksum, fill, wave

from autoencoder import pixels_to_images
from dit import DiT
from edm import DDPM, EDM
from guidance import Guidance
from latents.images import center_crop
from rf import RF
from routing_module import Route, Router
from sampling.generate import DRAWING_VERSION
from sampling.options import labels_of
from scoring import features, image_sets, metrics
from scoring.image_sets import SampledImages
from scoring.score import Reference
from scoring.statistics import SCORING_VERSION

FILE = Path(__file__).with_name("versions.json")
HOMES = {"drawing": "sampling/generate.py", "scoring": "scoring/statistics.py"}
ROUTE = Route(1, 1, 0.5)
SEEDS = [3, 100_000, 100_007]
# Each with the network's keywords, the diffusion, the sampler's settings, and the guidance, or its keywords.
DRAWN = {
    "edm": ({}, EDM(), {}, None),
    "edm, churn": ({}, EDM(P_std=1.0, sigma_data=0.6),
                   {"S_churn": 2, "S_min": 0.05, "S_noise": 1.007, "rho": 5, "sigma_max": 40}, None),
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
    "by another network": ({}, EDM(), {}, {"scale": 1.5, "drop_label": False}),
    "tokens by their size": ({"router": Router(selection="l1")}, EDM(), {}, Guidance(1.5, 0.0, 0.5, drop_label=False)),
    "lightning": ({"block": "lightning", "qk_norm": True}, RF(), {}, None),
    "mamba": ({"block": "mamba"}, EDM(), {}, Guidance(1.5, 0.0, 0.5, drop_label=False)),
    "rwkv": ({"block": "rwkv"}, EDM(), {}, Guidance(1.5, 0.0, 0.5, drop_label=False)),
    "images": ({"in_channels": 3}, EDM(), {}, None),
}  # fmt: skip


def drawn(name: str) -> list[float]:
    """Draws three images in two batches; returns a number for each."""
    changes, diffusion, sampler, guidance = DRAWN[name]
    net = fill(DiT(**TINY | {"routes": [ROUTE]} | changes))
    if isinstance(guidance, dict):
        guidance = Guidance(**guidance, net2=fill(DiT(**TINY | {"depth": 2})))
    decode = pixels_to_images if name == "images" else (lambda latents: latents)
    drawing = SampledImages(one_rank(), net, diffusion, decode, SEEDS, labels_of(SEEDS, [*range(10)]), batch_size=2,
                            num_steps=4, guidance=guidance, sampler=sampler)
    found = {int(i): checksum(image) for indices, images in drawing.sample(np.arange(3))
             for i, image in zip(indices, images, strict=True)}
    return [found[i] for i in range(3)]


def pictures(count: int, k: float) -> torch.Tensor:
    return (wave((count, 16, 16, 3), k, 127) + 128).to(torch.uint8)


def in_full() -> features.Extractor:
    """Stands in for Inception: pool, spatial and probs, waves of the image, of so few digits that none is rounded."""
    def compute(images: torch.Tensor) -> dict[str, torch.Tensor]:
        waves = {name: (images.flatten(1).double() / 255 @ wave((768, size), size).double()).mul(8).round().float() / 8
                 for name, size in (("pool", 24), ("spatial", 10), ("probs", 5))}
        return waves | {"probs": waves["probs"].softmax(1)}
    return features.Extractor("stand-in", "stand-in", "fid", {"pool": 24, "spatial": 10, "probs": 5}, "", compute)


def inception_score_of_a_folder() -> float:
    """Scores 60 images in class folders, in splits of ten."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "SPLIT", 10)
        for i, picture in enumerate(pictures(60, 1).numpy()):
            place = Path(folder, f"{i // 20}", f"{i}.bmp")  # which no library packs in its own way
            place.parent.mkdir(exist_ok=True)
            Image.fromarray(picture).save(place)
        images, extractor = image_sets.open_images(one_rank(), "images", folder), in_full()
        reference = Reference({}, image_sets.Images(40, lambda indices: pictures(40, 0)[indices], {}), {})
        batches = image_sets.read_share(one_rank(), images, images.choose(60), np.arange(60), 20)
        return score_with(extractor, reference, batches, 60, ["inception_score", "fid"])["inception_score"]


def scored() -> dict[str, float]:
    """Scores 60 images against 40 others, and more parts by themselves."""
    found = {}
    for extractor, asked in ((in_full(), None), (features.load_extractor("pixels"), ["fd_pixels"])):
        reference = Reference({}, image_sets.Images(40, lambda indices: pictures(40, 0)[indices], {}), {})
        batches = ((torch.arange(first, first + 20), pictures(60, 1)[first : first + 20]) for first in (0, 20, 40))
        found |= {f"{extractor.name} {metric}": value
                  for metric, value in score_with(extractor, reference, batches, 60, asked).items()}
    splits = metrics.ScoreSums(6000, 4)
    splits.add(torch.arange(6000), (wave((6000, 4), 2, 3) * torch.linspace(0, 2, 6000)[:, None]).softmax(1))
    ordered = image_sets.Images(1000, None, {}, np.arange(1000)[::-1])
    cropped = center_crop(Image.fromarray(wave((50, 70, 3), 3, 127).add(128).to(torch.uint8).numpy()), 16)
    return found | {
        "inception score of two splits": splits.score(),
        "evenly": checksum(torch.from_numpy(image_sets.evenly(1000, 31)).float()),
        "chosen in a shuffled order": checksum(torch.from_numpy(ordered.choose(31).copy()).float()),
        "of a folder": inception_score_of_a_folder(),
        "cropped": checksum(torch.from_numpy(np.array(cropped))),
        "positions": checksum(features.positions_at_224(wave((1, 1 + 37 * 37, 4)))),
    }


def near(expected: list[float] | dict[str, float], name: str = "") -> object:
    """What another processor, which rounds otherwise, may make of these numbers; of uint8 a few to the next level."""
    return pytest.approx(expected, rel=1e-4, abs=3 if name == "images" else 2e-3)


def changed(what: str) -> str:
    return f"If this is meant, raise {what.upper()}_VERSION in {HOMES[what]} and run python tests/test_versions.py."


@pytest.mark.parametrize("name", DRAWN)
def test_images_are_those_of_their_version(name):
    stored = json.loads(FILE.read_text())["drawing"]
    assert stored["version"] == DRAWING_VERSION and drawn(name) == near(stored["numbers"][name],
                                                                        name), changed("drawing")


def test_scores_are_those_of_their_version():
    stored = json.loads(FILE.read_text())["scoring"]
    assert stored["version"] == SCORING_VERSION and scored() == near(stored["numbers"]), changed("scoring")


def store() -> None:
    """Writes the numbers of this code; refuses where they are others and the constant is that of before."""
    before = json.loads(FILE.read_text()) if FILE.is_file() else {}
    now = {"drawing": {"version": DRAWING_VERSION, "numbers": {name: drawn(name) for name in DRAWN}},
           "scoring": {"version": SCORING_VERSION, "numbers": scored()}}
    for what, old in before.items():
        both = old["numbers"].keys() & now[what]["numbers"].keys()
        if not all(now[what]["numbers"][name] == near(old["numbers"][name], name)
                   for name in both) and old["version"] == now[what]["version"]:
            sys.exit(changed(what))
    FILE.write_text(json.dumps(now, indent=1) + "\n")


if __name__ == "__main__":
    store()
