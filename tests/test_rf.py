"""Flow matching's samplers and shifts. Its loss is compared with published code: tests/test_published_training.py."""

import pytest
import torch
from test_published_parity import published
from torch import nn

from dit import DiT
from guidance import Guidance, mask_noise_from
from rf import RF, sample_tread
from routing_module import Route
from sampling.sampler import Sampler

LINE = torch.linspace(-2, 2, 9, dtype=torch.float64).float().view(-1, 1, 1, 1)  # noises that are easy to follow


class ExactVelocity(nn.Module):
    """E[eps - x | z_t] for data N(mean_y, std²); at std 0 that is (z - mean_y) / t. Keeps what it was called with."""

    def __init__(self, std: float, means=(0.0,)):
        super().__init__()
        self.std, self.means, self.calls = std, torch.tensor(means), []

    def forward(self, z, t, y, routes=()):
        self.calls.append((z, t, y))
        t, mean = t.view(-1, 1, 1, 1), self.means[y].view(-1, 1, 1, 1)
        variance = (1 - t)**2 * self.std**2 + t**2
        return -mean + (t - (1 - t) * self.std**2) / variance * (z - (1 - t) * mean)


def labels(n):
    return torch.zeros(n, dtype=torch.int64)


def small_dit(seed=0, **config):
    """A random network whose output depends strongly on its label, with a route around its middle block."""
    torch.manual_seed(seed)
    config = dict(input_size=8, hidden_size=32, depth=3, num_heads=4, num_classes=10,
                  routes=[Route(1, 1, 0.5)]) | config
    net = DiT(**config, init="xavier").eval()
    net.y_embedder.embedding_table.weight.data.mul_(50)
    return net


def noise_and_labels(n=3):
    return torch.randn(n, 4, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(n) * 3 % 10


@pytest.mark.parametrize("solver, order", [("euler", 1), ("heun", 2)])
@pytest.mark.parametrize("std", [0.3, 2.0])
def test_samplers_converge_at_their_order_to_the_flow_of_a_gaussian(solver, order, std):
    errors = []
    for num_steps in (10, 20, 40, 80):
        net = ExactVelocity(std, means=(0.7,))
        x = RF().sample(net, LINE, labels(9), num_steps=num_steps, solver=solver)
        assert abs(x.mean() - 0.7) < 1e-4                                # the mean moves on a straight line
        errors.append((x - (0.7 + std * LINE)).abs().max().item())       # the exact flow is a scaling
        assert len(net.calls) == (num_steps if solver == "euler" else 2 * num_steps - 1)
        assert min(t.min() for _, t, _ in net.calls) == pytest.approx(1 / num_steps), "no evaluation at t = 0"
    ratios = [first / second for first, second in zip(errors, errors[1:], strict=False)]
    assert errors[-1] < 0.05 * std and ratios[-1] == pytest.approx(2**order, rel=0.15), ratios
    assert abs(ratios[-1] - 2**order) < abs(ratios[0] - 2**order), "the ratio approaches its limit"


@torch.no_grad()
def test_each_step_of_tread_guidance_extrapolates_between_two_ratios_on_the_same_mask_noise():
    net, (noise, y), n = small_dit(), noise_and_labels(), 5
    z = noise.double()
    for i in range(n):
        mask_noise, t = mask_noise_from(noise)(i, 1, 16), torch.full((3,), 1 - i / n)
        strong = net(z.float(), t, y, routes=(Route(1, 1, 0.3),), mask_noise=mask_noise)
        weak = net(z.float(), t, y, routes=(Route(1, 1, 0.7),), mask_noise=mask_noise)
        z = z - (weak + 1.5 * (strong - weak)).double() / n
    ours = sample_tread(net, 0.3, net, 0.7, noise, y, num_steps=n)
    torch.testing.assert_close(ours, z.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(ours, RF().sample(net, noise, y, n, guidance=Guidance(1.5, 0.3, 0.7, drop_label=False)))


# ---- shifted times ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", published("recipes")["shift"])
def test_times_shifted_by_the_latents_size_are_sr_dits_in_training_and_sampling(case, monkeypatch):
    net, shape = ExactVelocity(0.5), case["shape"]
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(case["t"]))
    RF("uniform", shift="size").loss(net, torch.zeros(shape), labels(2))
    assert net.calls[0][1].tolist() == pytest.approx(case["shifted"], abs=1e-6)
    net.calls.clear()
    RF(shift="size").sample(net, torch.randn(shape), labels(2), case["num_steps"], solver="euler_maruyama")
    assert [t[0].item() for _, t, _ in net.calls] == pytest.approx(case["sde_steps"][:-1], abs=1e-6)


@pytest.mark.parametrize("solver", ["euler", "heun", "euler_maruyama"])
def test_a_samplers_steps_follow_the_shift_of_training_unless_they_are_given_another(solver):
    net, z, y = ExactVelocity(0.5), torch.randn(3, 1, 4, 4), labels(3)

    def sampled(diffusion, **given):
        torch.manual_seed(0)
        return diffusion.sample(net, z, y, 5, solver=solver, **given)

    followed, plain = sampled(RF(shift=3.0)), sampled(RF())
    assert not torch.equal(followed, plain) and torch.equal(sampled(RF(), shift=3.0), followed)
    assert torch.equal(sampled(RF(shift=3.0), shift=1.0), plain)
    assert torch.equal(sampled(RF(shift="size")), sampled(RF(shift=(16 / 4096) ** 0.5)))
    recorded = [Sampler(diffusion, 5, settings={"solver": solver}).settings for diffusion in (RF(shift=3.0), RF())]
    assert [settings.get("shift") for settings in recorded] == [3.0, None]
