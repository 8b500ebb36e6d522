"""Mamba and RWKV: scans and blocks equal plain loops over the tokens that a route keeps."""

import math

import pytest
import torch
import torch.nn.functional as F
from test_published_parity import assert_equal, published, wave

from blocks import mamba, rwkv
from dit import DiT, DiT_models, infer_architecture, multiply_adds
from routing_module import Route, resolve_routes

BLOCKS = ("mamba", "rwkv")
PUBLISHED = published("mixers")


def close(found, expected, tolerance=1e-5):
    return (found - expected).abs().max() <= tolerance * max(0.03, expected.abs().max())


def gradients(function, *inputs):
    """Returns a function's value and the gradients of a fixed weighting of it."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    value = function(*leaves)
    weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(7)).to(value)
    return value, *torch.autograd.grad((value * weights).sum(), leaves)


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
    """The neighbours of tokens x (K, D), looked up one by one."""
    token = {divmod(place, side): each for place, each in zip(positions.tolist(), x, strict=True)}
    rows = []
    for row, column in token:
        near = [(row, column - 1), (row, column + 1), (row - 1, column), (row + 1, column)]
        rows.append(torch.cat([token.get(at, torch.zeros(x.shape[1])).chunk(4)[i] for i, at in enumerate(near)]))
    return torch.stack(rows)


def mamba_loop(mixer, x):
    """Mamba's mixer over x (K, D), one token after the other, first to last and last to first."""
    inner, S, H = mixer.out_proj.in_features, mixer.state_size, mixer.num_heads
    projected = x @ mixer.in_proj.weight.T
    z, u, own = projected[:, :inner], projected[:, inner:2 * inner], projected[:, 2 * inner:].chunk(2, dim=1)
    total = torch.zeros(len(x), inner)
    for direction, order in enumerate((range(len(x)), reversed(range(len(x))))):
        width = inner + 2 * S
        weight = mixer.conv.weight[direction * width:(direction + 1) * width, 0]
        bias = mixer.conv.bias[direction * width:(direction + 1) * width]
        window, state, outs = [torch.zeros(width)] * 4, torch.zeros(H, inner // H, S), {}
        for t in order:
            window = [*window[1:], torch.cat([u[t], own[direction][t, :2 * S]])]
            mixed = F.silu(sum(weight[:, j] * window[j] for j in range(4)) + bias)
            head, b, c = mixed[:inner].view(H, -1), mixed[inner:inner + S], mixed[inner + S:]
            dt = F.softplus(own[direction][t, 2 * S:] + mixer.dt_bias[direction])
            decay = (-dt * mixer.A_log[direction].exp())[:, None, None].exp()
            state = decay * state + dt[:, None, None] * head[:, :, None] * b
            outs[t] = ((state * c).sum(-1) + mixer.D[direction][:, None] * head).flatten()
        total = total + torch.stack([outs[t] for t in range(len(x))])
    gated = total * F.silu(z)
    return gated * (gated.square().mean(1, keepdim=True) + 1e-5).rsqrt() * mixer.norm.weight @ mixer.out_proj.weight.T


def rwkv_loop(block, x, positions, modulated):
    """RWKV's block over x (K, D) in loops; `modulated` shifts and scales the norm of tokens for the n-th branch."""
    def linear(layer, h, shifted, mix):
        return (mix * h + (1 - mix) * shifted) @ layer.weight.T

    (h, gate), spatial, channel = modulated(x, 0), block.spatial_mix, block.channel_mix
    shifted = shift_loop(h, positions, block.grid_size)
    k, v, r = (linear(layer, h, shifted, spatial.mix[i])
               for i, layer in enumerate((spatial.key, spatial.value, spatial.receptance)))
    mixed = wkv_loop(k[None], v[None], spatial.decay, spatial.bonus)[0]
    x = x + gate * ((r.sigmoid() * mixed) @ spatial.output.weight.T)
    h, gate = modulated(x, 1)
    shifted = shift_loop(h, positions, block.grid_size)
    k, r = (linear(layer, h, shifted, channel.mix[i]) for i, layer in enumerate((channel.key, channel.receptance)))
    return x + gate * r.sigmoid() * (k.relu() ** 2 @ channel.value.weight.T)


def block_loop(block, x, c, positions):
    """A block over the tokens x (K, D) of one sample, in loops."""
    parts = block.adaLN_modulation(c).view(-1, 3, x.shape[1])  # branches of shift, scale, gate

    def modulated(x, branch):
        shift, scale, gate = parts[branch]
        return F.layer_norm(x, x.shape[1:], eps=1e-6) * (1 + scale) + shift, gate

    if hasattr(block, "spatial_mix"):
        return rwkv_loop(block, x, positions, modulated)
    h, gate = modulated(x, 0)
    return x + gate * mamba_loop(block.mixer, h)


def tiny(block, **options):
    """A network of 4 × 4 tokens, every parameter at random."""
    torch.manual_seed(0)
    net = DiT(**dict(input_size=8, in_channels=3, hidden_size=32, depth=3, num_heads=4, num_classes=5, init="xavier",
                     block=block) | options)
    for parameter in net.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape)
    return net


def batch(size=2):
    torch.manual_seed(1)
    return torch.randn(size, 3, 8, 8), torch.randn(size), torch.arange(size)


@pytest.mark.parametrize("decay", [-40.0, 0.0, 40.0])
@pytest.mark.parametrize("size", [1, 300])
def test_wkv_is_exact_for_keys_and_decays_of_any_size(decay, size):
    torch.manual_seed(0)
    k, v = size * torch.randn(1, 64, 8), torch.randn(1, 64, 8)
    found = gradients(rwkv.wkv, k, v, torch.full((8,), decay), torch.zeros(8))
    exact = wkv_loop(k.double(), v.double(), torch.full((8,), decay).double(), torch.zeros(8).double())
    assert close(found[0], exact) and all(each.isfinite().all() for each in found)
    assert torch.equal(rwkv.wkv(k, v, torch.full((8,), 2 * decay), torch.zeros(8)), found[0])  # held at 40


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


def test_step_sizes_and_decays_start_where_mamba_2s_do():
    mixer = mamba.BidirectionalMamba(32, 16)
    dt, decay = F.softplus(mixer.dt_bias), mixer.A_log.exp()
    assert 1e-3 <= dt.min() < 1e-2 < dt.max() <= 0.1001 and 1 <= decay.min() < 8 < decay.max() <= 16
    assert math.isclose(rwkv.SpatialMix(8).decay[-1].item(), 3)


@pytest.mark.parametrize("ratio", [0.0, 0.6])
@pytest.mark.parametrize("block", BLOCKS)
def test_kept_tokens_are_mixed_as_a_sequence_without_the_others(block, ratio):
    """A route from the first block to the last, against loops over the kept tokens alone; and its gradients."""
    net, (x, t, y), noise = tiny(block), batch(), torch.rand(2, 1, 16)
    net.unpatchify = lambda tokens: tokens
    routes = (Route(0, 2, ratio),)
    kept = net.router.get_mask(torch.empty(2, 16, 1), ratio, noise[:, 0])

    def routed(x):
        return torch.stack([each[ids] for each, ids in zip(net(x, t, y, routes, noise), kept, strict=True)])

    def alone(x):
        outs = []
        tokens, conditions = net.x_embedder(x) + net.pos_embed, net.t_embedder(t) + net.y_embedder(y)
        for b, ids in enumerate(kept):
            h = tokens[b, ids]
            for each in net.blocks:
                h = block_loop(each, h, conditions[b], ids)
            outs.append(net.final_layer(h[None], conditions[b : b + 1])[0])
        return torch.stack(outs)

    x.requires_grad_()
    found, expected = ((outs, *torch.autograd.grad(outs.square().mean(), [x, *net.parameters()]))
                       for outs in (routed(x), alone(x)))
    for each, as_alone in zip(found, expected, strict=True):
        assert close(each, as_alone)


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
