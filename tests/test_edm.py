"""EDM against closed forms: exact denoisers, exact samples, and the loss of a perfect network."""

import math

import pytest
import torch
from torch import nn

from dit import DiT
from edm import DDPM, EDM
from guidance import Guidance
from rf import RF
from routing_module import Route, Router


class ExactDenoiser(nn.Module):
    """The raw network F_x that makes D(x; sigma) the posterior mean of data N(mean_y, std²), under EDM's preconditioning."""

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


def test_the_networks_input_has_unit_variance_and_its_target_too():
    edm, g = EDM(), torch.Generator().manual_seed(0)
    for sigma in (0.01, 0.5, 20.0):
        x = 0.5 * torch.randn(200_000, generator=g)
        noised = x + sigma * torch.randn(200_000, generator=g)
        c_skip, c_out, c_in, _ = edm.preconditioning(torch.tensor(sigma))
        assert abs((c_in * noised).std() - 1) < 0.01
        assert abs(((x - c_skip * noised) / c_out).std() - 1) < 0.01


def test_the_loss_of_an_untrained_adaln_zero_network_is_the_variance_of_its_target():
    edm = EDM()

    def zero(x, t, y, routes=()):
        return torch.zeros_like(x)

    torch.manual_seed(0)
    x = 0.5 * torch.randn(512, 4, 8, 8)
    assert abs(edm.loss(zero, x, labels(512)).mean() - 1) < 0.02


def test_the_exact_denoiser_has_the_least_loss_there_is():
    edm, std = EDM(), 0.5
    torch.manual_seed(0)
    x = std * torch.randn(4096, 1, 4, 4)
    sigma = torch.full((4096,), 0.7)
    loss = edm.loss(ExactDenoiser(edm, std), x, labels(4096), sigma=sigma).mean()
    posterior_variance = std**2 * 0.49 / (std**2 + 0.49)
    assert abs(loss / (posterior_variance * (0.49 + 0.25) / (0.7 * 0.5) ** 2) - 1) < 0.02


def test_the_loss_is_a_function_of_its_arguments_and_draws_what_is_missing():
    edm, x = EDM(), torch.randn(8, 3, 4, 4)
    sigma, eps = torch.rand(8) + 0.1, torch.randn_like(x)
    net = ExactDenoiser(edm, 0.3)
    assert torch.equal(edm.loss(net, x, labels(8), sigma=sigma, eps=eps), edm.loss(net, x, labels(8), sigma=sigma, eps=eps))
    assert edm.loss(net, x, labels(8)).shape == (8,)
    assert not torch.equal(edm.loss(net, x, labels(8)), edm.loss(net, x, labels(8)))


def test_noise_levels_of_training_are_log_normal():
    seen = []

    def net(x, t, y, routes=()):
        seen.append(4 * t)      # ln(sigma)
        return torch.zeros_like(x)

    torch.manual_seed(0)
    EDM(P_mean=-1.0, P_std=0.7).loss(net, torch.zeros(40_000, 1, 1, 1), labels(40_000))
    q = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])
    assert torch.allclose(seen[0].quantile(q), torch.distributions.Normal(-1.0, 0.7).icdf(q), atol=0.03)


@pytest.mark.parametrize("std", [0.1, 0.5, 1.0])
def test_heun_carries_noise_to_the_data_and_converges_at_second_order(std):
    edm, noise = EDM(), torch.randn(2, 1, 2, 2)
    exact = std / math.sqrt(std**2 + 80**2) * 80        # the probability flow of a Gaussian is a scaling
    errors = []
    for steps in (20, 40, 80):
        net = ExactDenoiser(edm, std)
        scale = (edm.sample(net, noise, labels(2), num_steps=steps) / noise).mean().item()
        errors.append(abs(scale / exact - 1))
        assert net.calls == 2 * steps - 1
    assert errors[2] < 0.005 and errors[0] / errors[1] > 3 and errors[1] / errors[2] > 3


def test_churn_keeps_the_distribution():
    edm, std = EDM(), 0.5
    torch.manual_seed(0)
    x = edm.sample(ExactDenoiser(edm, std), torch.randn(500, 1, 4, 4), labels(500), num_steps=40, S_churn=30)
    assert abs(x.std() / std - 1) < 0.03


def test_one_step_is_euler_to_the_denoised_estimate():
    edm, noise = EDM(), torch.randn(2, 1, 2, 2)
    net = ExactDenoiser(edm, 0.5)
    expected = edm.denoise(net, noise * 80, torch.full((2,), 80.0), labels(2))
    assert torch.allclose(edm.sample(net, noise, labels(2), num_steps=1), expected, atol=1e-6)


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

    def eps_network(x, t, y, routes=()):        # the exact eps prediction for data N(0, std²), at integer steps t
        assert torch.equal(t, t.round()) and t.min() >= 0 and t.max() <= 999
        sigma = ddpm.sigmas[t.long()].view(-1, 1, 1, 1)
        noised = x * (sigma**2 + 1).sqrt()
        return torch.cat([noised * sigma / (sigma**2 + std**2), noised], dim=1)

    noise = torch.randn(4, 2, 4, 4)
    sampled = ddpm.sample(eps_network, noise, labels(4), num_steps=80)
    assert abs((sampled / noise).median() / std - 1) < 0.02


def test_guidance_at_scale_1_is_the_strong_pass_bit_for_bit_and_costs_nothing():
    edm, noise = EDM(), torch.randn(2, 1, 2, 2)
    net = ExactDenoiser(edm, 0.5, means=(1.0, -1.0))
    plain = edm.sample(net, noise, labels(2), num_steps=5)
    calls = net.calls
    assert torch.equal(edm.sample(net, noise, labels(2), num_steps=5, guidance=Guidance(1.0)), plain)
    assert net.calls == 2 * calls


def test_classifier_free_guidance_pushes_away_from_the_null_label():
    edm = EDM()
    net = ExactDenoiser(edm, 0.5, means=(1.0, -1.0))      # class 0, and the null label 1
    x, sigma = torch.randn(4, 1, 2, 2), torch.full((4,), 2.0)
    strong, weak = edm.denoise(net, x, sigma, labels(4)), edm.denoise(net, x, sigma, labels(4) + 1)
    guided = Guidance(2.5).guide(edm.denoise, net, x, labels(4), num_steps=5)(x, 2.0, 0)
    assert torch.allclose(guided, weak + 2.5 * (strong - weak), atol=1e-5)


# ---- the loss over kept patches, and masked losses


def routed_net():
    torch.manual_seed(2)
    return DiT(input_size=8, in_channels=3, hidden_size=32, depth=6, num_heads=2, num_classes=5, init="xavier",
               routes=[Route(0, 1, 0.5, x_T=1.0), Route(3, 4, 0.25, x_T=1.0)])


def loss_and_output_gradient(diffusion, net, **how):
    """Each sample's loss, and its gradient in the network's output."""
    outputs = []
    hook = net.register_forward_hook(lambda *args: outputs.append(args[2]))
    torch.manual_seed(3)
    loss = diffusion.loss(net, torch.randn(4, 3, 8, 8), torch.arange(4), net.routes, **how)
    hook.remove()
    return loss, torch.autograd.grad(loss.sum(), outputs[0])[0]


def stays(noise, ratio):
    """Which pixels belong to patches that stay: (B, 1, 8, 8) bool for patches of side 2."""
    ids = Router().get_mask(torch.empty(4, 16, 1), ratio, noise)
    return torch.zeros(4, 16, dtype=torch.bool).scatter(1, ids, True).view(4, 1, 4, 4).repeat_interleave(2, 2).repeat_interleave(2, 3)


def test_the_loss_over_kept_patches_is_that_of_the_masks_that_the_network_sees():
    net, told = routed_net(), []
    net.register_forward_pre_hook(lambda _, args, kwargs: told.append(kwargs["mask_noise"]), with_kwargs=True)
    _, gradient = loss_and_output_gradient(EDM(routed_loss="kept"), net)
    [noise] = told
    weight = sum(stays(noise[:, r], route.selection_ratio) / (2 * 16 * (1 - route.selection_ratio)) for r, route in enumerate(net.routes))
    assert noise.shape == (4, 2, 16) and ((gradient != 0) == (weight > 0)).all(), "patches that left count, or kept ones do not"
    _, everywhere = loss_and_output_gradient(EDM(), net, mask_noise=noise, sigma=torch.ones(4))
    _, kept = loss_and_output_gradient(EDM(routed_loss="kept"), net, mask_noise=noise, sigma=torch.ones(4))
    torch.testing.assert_close(kept, everywhere * 16 * weight)      # where all patches count, each has 1/16


def test_over_a_route_that_nothing_takes_or_without_routes_it_is_the_ordinary_loss():
    x, y, sigma, eps = torch.randn(4, 3, 8, 8), torch.arange(4), torch.ones(4), torch.randn(4, 3, 8, 8)
    net, kept = routed_net(), EDM(routed_loss="kept", mae_weight=0.1)
    assert torch.equal(kept.loss(net, x, y, sigma=sigma, eps=eps), EDM().loss(net, x, y, sigma=sigma, eps=eps))
    torch.testing.assert_close(kept.loss(net, x, y, (Route(0, 4, 0.0),), sigma=sigma, eps=eps), EDM().loss(net, x, y, sigma=sigma, eps=eps))


def test_the_auxiliary_term_teaches_the_patches_that_left_alone():
    net, noise = routed_net(), torch.rand(4, 2, 16)
    (_, plain), (_, with_term) = (loss_and_output_gradient(EDM(routed_loss="kept", mae_weight=w), net, mask_noise=noise) for w in (0.0, 0.5))
    left_once = ~(stays(noise[:, 0], 0.5) & stays(noise[:, 1], 0.25))
    assert ((with_term != plain) == left_once).all()


@pytest.mark.parametrize(("settings", "says"), [
    (dict(routed_loss="left"), "neither all nor kept"), (dict(mae_weight=0.1), "which routed_loss=kept alone has"),
    (dict(routed_loss="kept", mae_weight=-1.0), "may not be negative"),
])
def test_settings_of_the_loss_that_cannot_be_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        EDM(**settings)


@pytest.mark.parametrize("diffusion", [EDM(), EDM(routed_loss="kept", mae_weight=0.1), RF()], ids=["all", "kept", "rf"])
def test_a_masked_loss_has_no_gradient_where_the_mask_is_zero_and_all_of_it_where_it_is_one(diffusion):
    net, noise, half = routed_net(), torch.rand(4, 2, 16), torch.ones(1, 1, 8, 8)
    half[..., :4] = 0
    loss, gradient = loss_and_output_gradient(diffusion, net, mask_noise=noise)
    masked_loss, masked = loss_and_output_gradient(diffusion, net, mask_noise=noise, weight=half)
    assert (masked[..., :4] == 0).all() and (masked[..., 4:] != 0).any()
    torch.testing.assert_close(masked[..., 4:], gradient[..., 4:])
    ones, _ = loss_and_output_gradient(diffusion, net, mask_noise=noise, weight=torch.ones(4, 1, 1, 1))
    assert torch.equal(ones, loss) and (masked_loss < loss).all()


@pytest.mark.parametrize("diffusion", [EDM(), RF()])
def test_the_network_draws_its_masks_itself_where_nothing_else_must_know_them(diffusion):
    net = routed_net()
    drawn = loss_and_output_gradient(diffusion, net)[0]
    net.register_forward_pre_hook(lambda _, args, kwargs: told.append(set(kwargs)), with_kwargs=True)
    told = []
    assert torch.equal(loss_and_output_gradient(diffusion, net)[0], drawn) and told == [{"routes"}]
