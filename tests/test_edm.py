"""EDM against closed forms: exact denoisers, exact samples, and the loss of a perfect network."""

import math

import pytest
import torch
from torch import nn

from edm import DDPM, EDM


class ExactDenoiser(nn.Module):
    """The raw network F_x that makes D(x; sigma) the posterior mean of data N(mean_y, std²), under EDM's
    preconditioning.
    """

    num_classes = 1

    def __init__(self, edm: EDM, std: float, means=(0.0, 0.0)):
        super().__init__()
        self.edm, self.std, self.means, self.calls = edm, std, torch.tensor(means), 0

    def forward(self, x, t, y, routes=()):
        self.calls += 1
        sigma = (4 * t).exp().view(-1, 1, 1, 1)
        c_skip, c_out, c_in, _ = self.edm.preconditioning(sigma)
        x, mean = x / c_in, self.means[y].view(-1, 1, 1, 1)
        D_x = mean + self.std**2 / (self.std**2 + sigma**2) * (x - mean)
        return (D_x - c_skip * x) / c_out


def labels(n):
    return torch.zeros(n, dtype=torch.int64)


def test_the_exact_denoiser_has_the_least_loss_there_is():
    edm, std = EDM(), 0.5
    torch.manual_seed(0)
    x = std * torch.randn(4096, 1, 4, 4)
    sigma = torch.full((4096,), 0.7)
    loss = edm.loss(ExactDenoiser(edm, std), x, labels(4096), sigma=sigma).mean()
    posterior_variance = std**2 * 0.49 / (std**2 + 0.49)
    assert abs(loss / (posterior_variance * (0.49 + 0.25) / (0.7 * 0.5) ** 2) - 1) < 0.02


def test_noise_levels_of_training_are_log_normal():
    seen = []

    def net(x, t, y, routes=()):
        seen.append(4 * t)  # ln(sigma)
        return torch.zeros_like(x)

    torch.manual_seed(0)
    EDM(P_mean=-1.0, P_std=0.7).loss(net, torch.zeros(40_000, 1, 1, 1), labels(40_000))
    q = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])
    assert torch.allclose(seen[0].quantile(q), torch.distributions.Normal(-1.0, 0.7).icdf(q), atol=0.03)


@pytest.mark.parametrize("std", [0.1, 0.5, 1.0])
def test_heun_carries_noise_to_the_data_and_converges_at_second_order(std):
    edm, noise = EDM(), torch.randn(2, 1, 2, 2)
    exact = std / math.sqrt(std**2 + 80**2) * 80  # the probability flow of a Gaussian is a scaling
    errors = []
    for steps in (20, 40, 80):
        net = ExactDenoiser(edm, std)
        scale = (edm.sample(net, noise, labels(2), num_steps=steps) / noise).mean().item()
        errors.append(abs(scale / exact - 1))
        assert net.calls == 2 * steps - 1
    assert errors[2] < 0.005 and errors[0] / errors[1] > 3 and errors[1] / errors[2] > 3


def test_a_learned_variance_is_left_out():
    edm, x = EDM(), torch.randn(2, 3, 4, 4)

    def with_variance(x, t, y, routes=()):
        return torch.cat([x, torch.full_like(x, 7)], dim=1)

    def without(x, t, y, routes=()):
        return x

    sigma = torch.ones(2)
    assert torch.equal(edm.denoise(with_variance, x, sigma, labels(2)), edm.denoise(without, x, sigma, labels(2)))


def test_the_official_dit_weights_parameterisation_denoises_as_its_schedule_says():
    ddpm, std = DDPM(), 0.3

    def eps_network(x, t, y, routes=()):  # the exact eps prediction for data N(0, std²), at integer steps t
        assert torch.equal(t, t.round()) and t.min() >= 0 and t.max() <= 999
        sigma = ddpm.sigmas[t.long()].view(-1, 1, 1, 1)
        noised = x * (sigma**2 + 1).sqrt()
        return torch.cat([noised * sigma / (sigma**2 + std**2), noised], dim=1)

    noise = torch.randn(4, 2, 4, 4)
    sampled = ddpm.sample(eps_network, noise, labels(4), num_steps=80)
    assert abs((sampled / noise).median() / std - 1) < 0.02
