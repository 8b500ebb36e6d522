"""The trained network in examples/emoji knows what its classes look like."""

import torch
from conftest import ROOT, one_rank

from guidance import Guidance
from sampling.generate import generate
from sampling.sampler import Sampler
from weights.autoencoders import load_decoder
from weights.loading import load_trained


def sampled(trained, name, guidance):
    """Samples eight images of a class in 12 steps; returns (8, 32, 32, 3) in 0..255."""
    decode = load_decoder(trained.autoencoder, (3, 32, 32), trained.convention).decode
    batches = generate(one_rank(), trained.net, Sampler(trained.diffusion, 12, guidance), decode, list(range(8)),
                       8 * [trained.class_names.index(name)], batch_size=8)
    return torch.cat([images for *_, images in batches]).numpy().astype(float)


def test_guided_smileys_are_yellow_and_flags_are_wide():
    trained = load_trained(ROOT / "examples/emoji")
    smileys, flags = (sampled(trained, name, Guidance(2.5)) for name in ("face-smiling", "country-flag"))
    red, green, blue = smileys[:, 8:24, 8:24].mean((0, 1, 2))
    assert red > blue + 60 and green > blue + 30
    is_white = flags.min(-1) > 235
    assert is_white[:, :4].mean() > 0.9 and is_white[:, 12:20].mean() < 0.5
