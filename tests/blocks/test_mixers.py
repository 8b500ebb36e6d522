"""Mamba and RWKV: scans equal their definitions. Their blocks on a route: test_blocks.py; numbers: test_versions.py."""

import math

import pytest
import torch
import torch.nn.functional as F
from test_published_parity import assert_equal, published, wave

from blocks import mamba, rwkv
from dit import DiT, DiT_models, infer_architecture, multiply_adds
from routing_module import Route, Router, resolve_routes

PUBLISHED = published("mixers")


def scan_inputs(num_tokens=11):
    torch.manual_seed(0)
    batch, G, H, P, S = 2, 2, 3, 4, 5
    return (torch.randn(batch, num_tokens, G, H, P), F.softplus(torch.randn(batch, num_tokens, G, H) - 1),
            -16 * torch.rand(G, H), torch.randn(batch, num_tokens, G, S), torch.randn(batch, num_tokens, G, S))


def wkv_loop(k, v, decay, bonus):
    """The definition, one pair of tokens after the other."""
    num_tokens, outs = k.shape[1], []
    for t in range(num_tokens):
        logs = torch.stack([k[:, i] + (bonus if i == t else -(abs(t - i) - 1) * decay / num_tokens)
                            for i in range(num_tokens)], dim=1)
        outs.append((logs.softmax(1) * v).sum(1))
    return torch.stack(outs, dim=1)


def shift_loop(x, positions, side):
    """The neighbours of tokens x (K, D), looked up one by one; zeros for those that have left."""
    token = {divmod(place, side): each for place, each in zip(positions.tolist(), x, strict=True)}
    rows = []
    for row, column in token:
        near = [(row, column - 1), (row, column + 1), (row - 1, column), (row + 1, column)]
        rows.append(torch.cat([token.get(at, torch.zeros(x.shape[1])).chunk(4)[i] for i, at in enumerate(near)]))
    return torch.stack(rows)


def tiny(block, **options):
    """A network of 4 × 4 tokens, every parameter at random."""
    torch.manual_seed(0)
    net = DiT(**dict(input_size=8, in_channels=3, hidden_size=32, depth=3, num_heads=4, num_classes=5, init="xavier",
                     block=block) | options)
    for parameter in net.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape)
    return net


@pytest.mark.parametrize("decay", [-40.0, 0.0, 40.0])
@pytest.mark.parametrize("size", [1, 300])
def test_wkv_is_exact_for_keys_and_decays_of_any_size(decay, size):
    torch.manual_seed(0)
    k, v = size * torch.randn(1, 64, 8), torch.randn(1, 64, 8)
    inputs = [each.requires_grad_() for each in (k, v, torch.full((8,), decay), torch.zeros(8))]
    mixed = rwkv.wkv(*inputs)
    torch.testing.assert_close(mixed.double(), wkv_loop(*(each.double() for each in inputs)), rtol=1e-5, atol=1e-5)
    assert all(each.isfinite().all() for each in torch.autograd.grad((mixed * torch.randn(mixed.shape)).sum(), inputs))
    assert torch.equal(rwkv.wkv(k, v, torch.full((8,), 2 * decay), torch.zeros(8)), mixed)  # held at 40


def test_the_scan_is_the_published_one():
    case = PUBLISHED["selective_scan"]
    batch, K, G, H, P, S = (case[key] for key in ("batch", "tokens", "groups", "heads", "channels", "state"))
    x, dt = wave((batch, G, H, P, K), 0), wave((batch, G, H, P, K), 1).exp()[:, :, :, 0]
    A = -wave((G, H, P, S), 2).exp()[:, :, 0, 0]
    B, C = (wave((batch, G, S, K), k) for k in (3, 4))
    inputs = x.permute(0, 4, 1, 2, 3), dt.permute(0, 3, 1, 2), A, B.permute(0, 3, 1, 2), C.permute(0, 3, 1, 2)
    assert_equal(mamba.selective_scan(*inputs).permute(0, 2, 3, 4, 1), case["out"])


def test_the_shift_on_a_full_grid_is_the_published_one():
    case = PUBLISHED["shift"]
    x = wave(tuple(case["shape"]))
    assert_equal(rwkv.shift_tokens(x, torch.arange(x.shape[1])[None], case["grid_size"]), case["out"])


def test_the_shift_on_a_route_finds_the_neighbours_that_are_left():
    x, ids = torch.randn(3, 7, 8), Router().get_mask(torch.empty(3, 16, 1), 0.6)
    expected = [shift_loop(*of_sample, side=4) for of_sample in zip(x, ids, strict=True)]
    assert torch.equal(rwkv.shift_tokens(x, ids, 4), torch.stack(expected))


def test_step_sizes_and_decays_start_where_mamba_2s_do():
    mixer = mamba.BidirectionalMamba(32, 16)
    dt, decay = F.softplus(mixer.dt_bias), mixer.A_log.exp()
    assert 1e-3 <= dt.min() < 1e-2 < dt.max() <= 0.1001 and 1 <= decay.min() < 8 < decay.max() <= 16
    assert math.isclose(rwkv.SpatialMix(8).decay[-1].item(), 3)


def test_scans_are_float32_whatever_the_activations_are():
    scanned = mamba.selective_scan(*scan_inputs())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mamba.selective_scan(*scan_inputs()), scanned)
    k, v = torch.randn(2, 16, 8).bfloat16(), torch.randn(2, 16, 8).bfloat16()
    assert rwkv.wkv(k, v, torch.ones(8), torch.zeros(8)).dtype == torch.float32


@pytest.mark.parametrize(("name", "millions", "off"), [("Mamba-B/2", 111, 0.01), ("RWKV-L/2", 210, 0.03)])
def test_sizes_are_the_papers(name, millions, off):
    with torch.device("meta"):
        net = DiT_models[name]()
    assert sum(p.numel() for p in net.parameters()) / 1e6 == pytest.approx(millions, rel=off)
    assert infer_architecture(net.state_dict())["depth"] == len(net.blocks)


def test_multiply_adds_are_those_of_the_products():
    D, N, K, S, depth = 32, 16, 8, 16, 3
    frame = 2 * N * D * 12 + 256 * D + D * D + 2 * D * D  # patches in and out; noise level; the last modulation
    net = tiny("mamba")
    linear, scan = 6 * D * D + 2 * D * (2 * S + 4) + 2 * (2 * D + 2 * S) * 4, 2 * (2 * D + S)
    # The convolution runs over N + 3 places, of which torch counts those that it gives: N.
    assert multiply_adds(net) == (frame + depth * (N * linear + 3 * D * D), depth * N * N * scan)
    routes = resolve_routes([Route(0, 1, 0.5)], depth)
    assert multiply_adds(net, routes)[1] == (N * N + 2 * K * K) * scan
    assert multiply_adds(tiny("rwkv")) == (frame + depth * (N * 13 * D * D + 6 * D * D), 0)
