"""The trained network in examples/emoji: small, with its record, and one that knows what its classes look like."""


import pytest
import torch
from conftest import ROOT, one_rank

from guidance import Guidance
from sampling.generate import generate
from sampling.sampler import Sampler
from weights.autoencoders import load_decoder
from weights.loading import load_trained

EXAMPLE = ROOT / "examples/emoji"


@pytest.fixture(scope="module")
def trained():
    return load_trained(EXAMPLE)


def sampled(trained, name, guidance):
    """Samples eight images of a class in 12 steps; returns (8, 32, 32, 3) in 0..255."""
    decode = load_decoder(trained.autoencoder, (3, 32, 32), trained.convention).decode
    batches = generate(one_rank(), trained.net, Sampler(trained.diffusion, 12, guidance), decode, list(range(8)),
                       8 * [trained.class_names.index(name)], batch_size=8)
    return torch.cat([images for *_, images in batches]).numpy().astype(float)


def test_the_folder_is_a_checkpoint_of_four_megabytes_with_its_recipe_and_the_licences_of_the_images(trained):
    assert sum(file.stat().st_size for file in EXAMPLE.iterdir() if file.suffix != ".png") <= 4_000_000
    assert trained.checkpoint.file == EXAMPLE / "ema.safetensors" and trained.checkpoint.record.step == 20_000
    assert trained.recorded["network"]["routes"] == [
        {"start_layer_idx": 2, "end_layer_idx": -4, "selection_ratio": 0.5}]
    card = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    assert all(words in card for words in ("Apache-2.0", "CC-BY 4.0", "python train.py experiment=emoji_example"))


def test_guided_smileys_are_yellow_and_flags_are_wide(trained):
    smileys, flags = (sampled(trained, name, Guidance(2.5)) for name in ("face-smiling", "country-flag"))
    red, green, blue = smileys[:, 8:24, 8:24].mean((0, 1, 2))
    assert red > blue + 60 and green > blue + 30
    is_white = flags.min(-1) > 235
    assert is_white[:, :4].mean() > 0.9 and is_white[:, 12:20].mean() < 0.5
