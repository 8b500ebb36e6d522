"""DDPM's sampler against a closed form. EDM is compared with published code: tests/test_published_parity.py."""

import torch

from edm import DDPM


def test_the_official_dit_weights_parameterisation_denoises_as_its_schedule_says():
    ddpm, std = DDPM(), 0.3

    def eps_network(x, t, y, routes=()):  # the exact eps prediction for data N(0, std²), at integer steps t
        assert torch.equal(t, t.round()) and t.min() >= 0 and t.max() <= 999
        sigma = ddpm.sigmas[t.long()].view(-1, 1, 1, 1)
        noised = x * (sigma**2 + 1).sqrt()
        return torch.cat([noised * sigma / (sigma**2 + std**2), noised], dim=1)

    noise = torch.randn(4, 2, 4, 4)
    sampled = ddpm.sample(eps_network, noise, torch.zeros(4, dtype=torch.int64), num_steps=80)
    assert abs((sampled / noise).median() / std - 1) < 0.02
