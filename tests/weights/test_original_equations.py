"""Latents of imported weights equal those of the original equations, written out without our networks and samplers.

A file is written as its own trainer saves it, with random weights, imported, and sampled by sample.py.
"""

import argparse
import math

import diffusers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import run_command
from test_foreign import diffusers_dit, imported
from test_published_parity import TINY, fill
from torch import Tensor

import sample
from dit import DiT
from sampling.generate import SeededNoise
from weights.loading import Trained

SEEDS, CLASSES = [0, 1, 2], 10


def network(state: dict[str, Tensor], x: Tensor, t: Tensor, y: Tensor, heads: int = 4) -> Tensor:
    """The forward pass of facebookresearch/DiT's network, which SiT and REPA share, on the tensors of its file."""
    def linear(name: str, z: Tensor) -> Tensor:
        return F.linear(z, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(z: Tensor) -> Tensor:
        return F.layer_norm(z, z.shape[-1:], eps=1e-6)

    tokens = F.conv2d(x, state["x_embedder.proj.weight"], state["x_embedder.proj.bias"], stride=2)
    side, z = tokens.shape[-1], tokens.flatten(2).transpose(1, 2) + state["pos_embed"]
    angles = t[:, None] * torch.exp(-math.log(10000) * torch.arange(128) / 128)
    c = linear("t_embedder.mlp.2", F.silu(linear("t_embedder.mlp.0", torch.cat([angles.cos(), angles.sin()], 1))))
    c = F.silu(c + state["y_embedder.embedding_table.weight"][y])
    for i in range(TINY["depth"]):
        block = f"blocks.{i}."
        shift1, scale1, gate1, shift2, scale2, gate2 = linear(f"{block}adaLN_modulation.1", c)[:, None].chunk(6, 2)
        q, k, v = linear(f"{block}attn.qkv", norm(z) * (1 + scale1) + shift1).unflatten(
            2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        if f"{block}attn.q_norm.weight" in state:
            q, k = (F.layer_norm(part, part.shape[-1:], state[f"{block}attn.{name}_norm.weight"],
                                 state[f"{block}attn.{name}_norm.bias"]) for name, part in (("q", q), ("k", k)))
        attention = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v
        z = z + gate1 * linear(f"{block}attn.proj", attention.transpose(1, 2).flatten(2))
        hidden = F.gelu(linear(f"{block}mlp.fc1", norm(z) * (1 + scale2) + shift2), approximate="tanh")
        z = z + gate2 * linear(f"{block}mlp.fc2", hidden)
    shift, scale = linear("final_layer.adaLN_modulation.1", c)[:, None].chunk(2, 2)
    patches = linear("final_layer.linear", norm(z) * (1 + scale) + shift).unflatten(1, (side, side)).unflatten(
        3, (2, 2, -1))
    return torch.einsum("nhwpqc->nchpwq", patches).flatten(4).flatten(2, 3)


def weights(file, seed: int, learn_sigma: bool, train_args: dict, scale: float = 1.0, **changes) -> dict[str, Tensor]:
    """Saves random weights with their average, as SiT's and REPA's train.py do; returns the average."""
    net = DiT(**TINY, learn_sigma=learn_sigma, **changes)
    torch.manual_seed(seed)
    state = {key: value if key == "pos_embed" else torch.randn(value.shape) * scale
             / math.sqrt(value[0].numel() if value.ndim > 1 else 20) + ("norm.weight" in key)
             for key, value in fill(net).state_dict().items()}
    raw = {key: torch.zeros_like(value) for key, value in state.items()}
    torch.save({"model": raw, "ema": state, "opt": {}, "args": argparse.Namespace(num_classes=CLASSES, **train_args)},
               file)
    return state


def guided(model, x: Tensor, t: float, y: Tensor, scale: float | None, channels: int = 4) -> Tensor:
    """DiT's forward_with_cfg: of the first channels, the unconditional one plus scale times the difference."""
    conditional = model(x, torch.full((len(x),), t), y)
    if scale is None:
        return conditional
    null = model(x, torch.full((len(x),), t), torch.full_like(y, CLASSES))
    mixed = null[:, :channels] + scale * (conditional[:, :channels] - null[:, :channels])
    return torch.cat([mixed, conditional[:, channels:]], 1)


def ode(velocity, x: Tensor, times: np.ndarray, heun: bool = False) -> Tensor:
    """Euler's or Heun's method between times; Heun's last step is Euler's, as in REPA."""
    x = x.double()
    for i, (t, after) in enumerate(zip(times[:-1], times[1:], strict=True)):
        slope = velocity(x.float(), float(t)).double()
        if heun and i < len(times) - 2:
            slope = (slope + velocity((x + (after - t) * slope).float(), float(after)).double()) / 2
        x = x + (after - t) * slope
    return x


def latents(trained: Trained, *options: str) -> Tensor:
    """Samples the seeds' latents from an imported checkpoint by sample.py."""
    folder = trained.checkpoint.folder
    out = folder.with_suffix(".npz")
    run_command(sample.main, "sample.py", f"checkpoint={folder}", "latents=true", f"out={out}", "cpu=true",
                f"seeds={SEEDS[0]}-{SEEDS[-1]}", *options)
    with np.load(out) as arrays:
        return torch.from_numpy(arrays["latents"]).double()


def begin() -> tuple[SeededNoise, Tensor, Tensor]:
    noise = SeededNoise(SEEDS, "cpu")
    return noise, noise.randn((4, 8, 8)), torch.tensor(SEEDS) % CLASSES


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.isfinite().all() and theirs.std() > 0.1
    torch.testing.assert_close(ours / theirs.std(), theirs / theirs.std(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_steps", [10, 50])
@torch.no_grad()
def test_diffusers_own_network_and_scheduler_sample_our_latents(num_steps, tmp_path):
    """Their scheduler has its schedule in float64."""
    theirs = diffusers_dit()
    theirs.save_pretrained(tmp_path / "x")
    scheduler = diffusers.DDPMScheduler(variance_type="learned_range", clip_sample=False, timestep_spacing="linspace")
    scheduler.alphas_cumprod = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0)
    scheduler.one = torch.tensor(1.0, dtype=torch.float64)
    scheduler.set_timesteps(num_steps)
    noise, x, y = begin()
    x = x.double()
    for t in scheduler.timesteps:
        out = guided(lambda x, t, y: theirs(x, t.long(), y).sample, x.float(), float(t), y, 1.5)
        x = scheduler.step(out, t, x, generator=noise.generators).prev_sample
    trained = imported(tmp_path / "x", "diffusers", num_heads=None)
    assert_same(latents(trained, f"num_steps={num_steps}", "sampler.solver=ancestral", "guidance=cfg", "scale=1.5",
                        "channels=4"), x)


def edm(denoise, noise: SeededNoise, x: Tensor, num_steps: int, churn: float) -> Tensor:
    """Algorithm 2 of EDM (arXiv 2206.00364), which edm2 samples with, from sigma 80 to 0.002 with rho = 7."""
    high, low = 80 ** (1 / 7), 0.002 ** (1 / 7)
    levels = [*((high + i / (num_steps - 1) * (low - high)) ** 7 for i in range(num_steps)), 0.0]
    x = x.double() * levels[0]
    for i, (sigma, after) in enumerate(zip(levels[:-1], levels[1:], strict=True)):
        gamma = min(churn / num_steps, math.sqrt(2) - 1) if 0.05 <= sigma <= 50 else 0.0
        raised = sigma + gamma * sigma
        if gamma:
            x = x + math.sqrt(raised**2 - sigma**2) * 1.003 * noise.randn_like(x)
        slope = (x - denoise(x, raised)) / raised
        euler = x + (after - raised) * slope
        if i < num_steps - 1:
            slope = (slope + (euler - denoise(euler, after)) / after) / 2
        x = x + (after - raised) * slope
    return x


@pytest.mark.parametrize("churn", [0, 4])
@torch.no_grad()
def test_edm2s_sampler_around_our_checkpoints_guided_by_a_weak_one(churn, tmp_path):
    for seed in (6, 7):
        weights(tmp_path / f"{seed}.pt", seed, False, {}, scale=0.5)
    strong, weak = (imported(tmp_path / f"{seed}.pt", "tread", weights="ema") for seed in (6, 7))
    noise, x, y = begin()

    def denoise(x: Tensor, sigma: float) -> Tensor:  # Eq. 7 and Table 1, with sigma_data = 0.5
        x, level = x.float(), torch.full((len(x), 1, 1, 1), sigma)
        total = level**2 + 0.25
        c_skip, c_out, c_in, c_noise = 0.25 / total, level * 0.5 / total.sqrt(), 1 / total.sqrt(), level.log() / 4
        one, other = (c_skip * x + c_out * each.net(c_in * x, c_noise.flatten(), y) for each in (strong, weak))
        return other + 2.0 * (one - other)

    churned = [f"sampler.{setting}" for setting in (f"S_churn={churn}", "S_min=0.05", "S_max=50", "S_noise=1.003")]
    assert_same(latents(strong, "num_steps=10", "guidance=autoguidance", f"weak={weak.checkpoint.folder}", "scale=2",
                        *(churned if churn else ())), edm(denoise, noise, x, 10, churn))


SIT_ARGS = {"model": "SiT-XL/2", "path_type": "Linear", "prediction": "velocity"}
REPA_ARGS = {"model": "SiT-XL/2", "path_type": "linear", "prediction": "v"}


@pytest.mark.parametrize("learn_sigma", [True, False])
@torch.no_grad()
def test_sit_by_its_ode_with_its_second_half_and_without(learn_sigma, tmp_path):
    state = weights(tmp_path / "x.pt", 2, learn_sigma, SIT_ARGS | {"vae": "mse"})
    _, x, y = begin()
    theirs = ode(lambda z, t: guided(lambda *call: network(state, *call)[:, :4], z, t, y, 1.5, channels=3), x,
                 np.linspace(0, 1, 11))  # data at t = 1
    trained = imported(tmp_path / "x.pt", "sit", autoencoder=None)
    assert trained.autoencoder == "sd_vae_mse"
    assert_same(latents(trained, "num_steps=10", "guidance=cfg", "scale=1.5", "channels=3"), theirs)


@pytest.mark.parametrize("heun", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
@torch.no_grad()
def test_repa_by_its_ode_in_an_interval(heun, qk_norm, tmp_path):
    state = weights(tmp_path / "x.pt", 3, False, REPA_ARGS | {"qk_norm": qk_norm}, qk_norm=qk_norm)
    _, x, y = begin()
    theirs = ode(lambda z, t: guided(lambda *call: network(state, *call), z, t, y, 1.8 if t <= 0.7 else None), x,
                 np.linspace(1, 0, 11), heun)  # noise at t = 1
    trained = imported(tmp_path / "x.pt", "repa", num_heads=None if qk_norm else 4)
    assert_same(latents(trained, "num_steps=10", f"sampler.solver={'heun' if heun else 'euler'}", "guidance=cfg",
                        "scale=1.8", "interval=[0,0.7]"), theirs)


@torch.no_grad()
def test_autoguidance_of_a_sit_by_a_repa(tmp_path):
    strong = weights(tmp_path / "sit.pt", 4, True, SIT_ARGS)
    weak = weights(tmp_path / "repa.pt", 5, False, REPA_ARGS)
    _, x, y = begin()

    def velocity(z: Tensor, t: float) -> Tensor:  # eps - x, with noise at t = 1
        one, other = (torch.full((len(z),), time) for time in (1 - t, t))
        v, w = -network(strong, z, one, y)[:, :4], network(weak, z, other, y)
        return w + 2.0 * (v - w)

    theirs = ode(velocity, x, np.linspace(1, 0, 11))
    sit, repa = (imported(tmp_path / f"{form}.pt", form) for form in ("sit", "repa"))
    assert_same(latents(sit, "num_steps=10", "guidance=autoguidance", f"weak={repa.checkpoint.folder}", "scale=2"),
                theirs)
