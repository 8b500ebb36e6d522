"""Our networks, losses and samplers against numbers from the published implementations (tests/published/*.json).

Weights and inputs are closed formulas, so both sides evaluate them without a shared random generator; each JSON
names the repository and commit whose code was run, and how. Only numbers came from there.
"""

import hashlib
import itertools
import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from closed_forms import amplitude_of, checksum, fill, wave  # noqa: F401      (others import them from here)
from torch import Tensor, nn

from dit import DiT, DiT_models
from edm import DDPM, EDM
from objectives.version1 import Version1
from routing_module import Route

TINY = dict(input_size=8, patch_size=2, in_channels=4, hidden_size=64, depth=3, num_heads=4, num_classes=10)
TINY_LIGHTNING = TINY | {"block": "lightning"}


# ---- The closed formulas: the published side evaluated these very functions ------------------------------------

class Pointwise(nn.Module):
    """A raw network without weights that reads x, its noise level and its label."""

    def forward(self, x: Tensor, t: Tensor, y: Tensor, routes: tuple[Route, ...] = ()) -> Tensor:
        return torch.sin(1.5 * x) + (0.3 * torch.cos(t) + 0.1 * y).view(-1, 1, 1, 1)


class CountedNoise:
    """The n-th call returns the n-th wave, of unit variance; by steps of 0 each call returns the same."""

    def __init__(self, step: int = 1):
        self.calls = itertools.count(100, step)

    def __call__(self, x: Tensor) -> Tensor:
        return wave(tuple(x.shape), next(self.calls), math.sqrt(2)).to(x.dtype)


def filled(net: DiT) -> DiT:
    """As fill, with one added to the weights of norms, as the published side did."""
    for key, weight in fill(net).state_dict().items():
        if "norm" in key:
            weight += 1
    return net


def noise_that_keeps(ids_keep: list, num_tokens: int) -> Tensor:
    """Noise (B, R, N) by which the tokens ids_keep (R, B, K) are kept, in their own order."""
    noise = [torch.ones(len(ids), num_tokens).scatter(1, torch.tensor(ids), 0.0) for ids in ids_keep]
    return torch.stack(noise, dim=1)


NETS = {"pointwise": Pointwise, "dit": lambda: fill(DiT(**TINY))}
# With the same it does not matter whether a step without churn draws noise too.
NOISES = {"counted": CountedNoise, "same": partial(CountedNoise, step=0)}


# ---- The comparisons -------------------------------------------------------------------------------------------

def published(name: str) -> dict:
    return json.loads((Path(__file__).parent / "published" / f"{name}.json").read_text())


DIT, EDM_, TREAD, TREAD_V1, DDPM_, LIGHTNING = (
    published(name) for name in ("dit", "edm", "tread", "tread_v1", "ddpm", "lightning"))


def names(cases: list[dict]) -> list[str]:
    return [case["name"] for case in cases]


def assert_equal(ours: Tensor, theirs: list) -> None:
    theirs = torch.tensor(theirs, dtype=torch.float64)
    assert theirs.std() > 0.05, "the published values carry no signal"
    torch.testing.assert_close(ours.double().flatten(), theirs.flatten(), rtol=0, atol=1e-5)


# LightningDiT with TREAD routes blocks 2 to depth - 4, inclusive.
FORWARD = [(TINY, case | {"routes": [], "ids_keep": []}) for case in DIT["forward"]] + [
    (TINY, case) for case in TREAD["routed"]] + [
    (TINY_LIGHTNING, {"routes": [], "ids_keep": []} | case) for case in LIGHTNING["forward"]] + [
    (TINY_LIGHTNING, {"routes": [(2, -4, 0.5)]} | case) for case in published("lightning_tread")["routed"]]


@pytest.mark.parametrize("tiny, case", FORWARD)
@torch.no_grad()
def test_a_forward_equals_facebookresearch_dit_compvis_tread_hustvl_lightningdit_and_lightningdit_tread(tiny, case):
    net = filled(DiT(**tiny | case["config"], routes=[Route(*route) for route in case["routes"]]))
    mask_noise = noise_that_keeps(case["ids_keep"], net.pos_embed.shape[1]) if net.routes else None
    x, t, y = wave(case["shape"], amplitude=1.4), torch.tensor(case["t"]), torch.tensor(case["y"])
    assert_equal(net(x, t, y, routes=net.routes, mask_noise=mask_noise), case["out"])


def test_positions_equal_facebookresearch_dit():
    xl = DiT(input_size=32, patch_size=2, hidden_size=1152, depth=1, num_heads=16).pos_embed
    assert checksum(xl) == pytest.approx(DIT["pos_embed_xl2_checksum"], abs=1e-3)


@pytest.mark.parametrize("size", DIT["sizes"] + LIGHTNING["sizes"], ids=lambda size: size["name"])
def test_keys_shapes_and_counts_equal_facebookresearch_dit_and_hustvl_lightningdit(size):
    with torch.device("meta"):
        net = DiT_models[size["model"]](**size["config"])
    lines = sorted(f"{key} {tuple(weight.shape)}" for key, weight in net.state_dict().items())
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == size["signature"]
    assert sum(weight.numel() for weight in net.parameters() if weight.requires_grad) == size["trainable"]


@pytest.mark.parametrize("config, theirs", [
    ({"init": "adaln_zero"}, DIT["init"]), ({"init": "xavier"}, TREAD["init"]),
    ({"block": "lightning", "qk_norm": True}, LIGHTNING["init"])])
def test_the_initial_weights_have_the_spread_of_the_published_ones(config, theirs):
    torch.manual_seed(0)
    for key, weight in DiT(**TINY, **config).state_dict().items():
        if theirs[key] == 0:
            assert (weight == float("norm" in key)).all(), f"{key} starts at zero there, or at one"
        elif key != "x_embedder.proj.bias":  # DiT, as read, leaves it to PyTorch; TREAD and we zero it
            assert weight.std().item() == pytest.approx(theirs[key], rel=0.1), key


@pytest.mark.parametrize("case", TREAD_V1["loss"], ids=names(TREAD_V1["loss"]))
@torch.no_grad()
def test_the_loss_of_version_1_equals_the_code_of_january(case):
    net = fill(DiT(**TINY | {"depth": 4}, routes=[Route(*route) for route in case["routes"]]))
    x, eps, y = wave(case["shape"], amplitude=0.7), wave(case["shape"], 1, 1.4), torch.tensor(case["y"])
    objective = Version1(net, EDM(), mae_weight=case["mae_weight"])
    loss = objective.loss(x, y, noise_that_keeps(case["ids_keep"], 16), torch.tensor(case["sigma"]), eps)
    assert loss.tolist() == pytest.approx(case["loss"], rel=0, abs=1e-5)


@pytest.mark.parametrize("case", EDM_["loss"], ids=names(EDM_["loss"]))
@torch.no_grad()
def test_the_loss_is_the_mean_over_pixels_of_the_one_of_nvlabs_edm(case):
    x, eps, y = wave(case["shape"], amplitude=0.7), wave(case["shape"], 1, 1.4), torch.tensor(case["y"])
    loss = EDM(**case["edm"]).loss(NETS[case["net"]](), x, y, sigma=torch.tensor(case["sigma"]), eps=eps)
    assert loss.tolist() == pytest.approx(case["mean_loss"], rel=1e-5)


@pytest.mark.parametrize("case", EDM_["sample"], ids=names(EDM_["sample"]))
def test_a_sample_equals_nvlabs_edm(case):
    out = EDM().sample(NETS[case["net"]](), wave(case["shape"], 2, 1.4), torch.tensor(case["y"]),
                       randn_like=NOISES[case["noise"]](), **case["arguments"])
    assert_equal(out, case["out"])


@torch.no_grad()
def test_the_x_start_that_ddpm_predicts_equals_facebookresearch_dit():
    case = DDPM_["pred_xstart"]
    abar = torch.tensor(case["alphas_cumprod"], dtype=torch.float64)
    sigma = ((1 - abar) / abar).sqrt().float()
    x_t = wave(case["shape"], amplitude=1.4)
    x = (x_t.double() / abar.sqrt().view(-1, 1, 1, 1)).float()  # ours adds noise to x, theirs also shrinks x
    D_x = DDPM().denoise(fill(DiT(**TINY, learn_sigma=True)), x, sigma, torch.tensor(case["y"]))
    # x_start = x - sigma·eps: an error of 1e-5 in eps is one of 1e-5·sigma in x_start, and sigma reaches 157 here.
    unit = (1 + sigma).view(-1, 1, 1, 1)
    assert_equal(D_x / unit, (torch.tensor(case["out"]).view(case["shape"]) / unit).tolist())
