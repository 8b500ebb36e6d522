"""What holds for every block that the frame can be filled with: exact routes, positions that follow them, training."""

import math

import pytest
import torch
import torch.nn.functional as F
from own_extensions import installed
from test_published_parity import assert_equal, published, wave

import extensions
from blocks import BLOCKS, mamba, rwkv
from blocks.transformer import attend
from dit import DiT, DiT_models, infer_architecture, multiply_adds
from rf import RF
from routing_module import Route, Router, resolve_routes
from training import speed
from weights.records import build_network

every_block = pytest.mark.parametrize("block", [*BLOCKS, "parallel"])
RECORD = dict(input_size=8, patch_size=2, in_channels=4, hidden_size=32, depth=3, num_heads=2, num_classes=4,
              init="xavier", routes=[dict(selection_ratio=0.5, start_layer_idx=1, end_layer_idx=1)])


@pytest.fixture(scope="module", autouse=True)
def parallel(tmp_path_factory):
    """The block of CONTRIBUTING.md, which has no mark."""
    with installed(tmp_path_factory.mktemp("page")):
        BLOCKS["parallel"] = extensions.find("blocks", "parallel")
        yield
    del BLOCKS["parallel"]


def network(block, **options):
    """A random network whose condition opens the gates of its blocks, so that an error inside them is seen."""
    torch.manual_seed(0)
    net = build_network({**RECORD, "block": block, **options})
    net.y_embedder.embedding_table.weight.data.mul_(25)
    return net


def batch(size=4):
    generator = torch.Generator().manual_seed(1)
    x, t = torch.randn(size, 4, 8, 8, generator=generator), torch.rand(size, generator=generator)
    return x, t, torch.arange(size) % 5


@every_block
def test_tokens_on_a_route_come_out_as_if_there_were_no_others(block):
    net = network(block, routes=[dict(selection_ratio=0.4, start_layer_idx=0, end_layer_idx=-1)])
    (x, t, y), seen, noise = batch(), {}, torch.rand(4, 1, 16)
    net.blocks[0].register_forward_pre_hook(lambda _, args: seen.update(entered=args[0]))
    net.blocks[-1].register_forward_hook(lambda *args: seen.update(x_kept=args[2]))
    net.double()
    x, t = x.double(), t.double()
    net(x, t, y, routes=net.routes, mask_noise=noise)
    ids_keep, entered, x_kept = net.router.get_mask(torch.empty(4, 16, 1), 0.4, noise[:, 0]), *seen.values()
    c, weights = net.t_embedder(t) + net.y_embedder(y), list(net.blocks.parameters())
    for b, ids in enumerate(ids_keep):  # each sample by itself, in a sequence of its kept tokens
        alone = entered[b : b + 1]
        for layer in net.blocks:
            alone = layer(alone, c[b : b + 1], ids[None])
        torch.testing.assert_close(x_kept[b : b + 1], alone, rtol=1e-5, atol=1e-5)
        on_route, in_sequence = (torch.autograd.grad(out.square().sum(), weights, retain_graph=True)
                                 for out in (x_kept[b], alone))
        largest = max(gradient.norm() for gradient in in_sequence)  # beside which that of a key's bias is rounding
        for one, other in zip(on_route, in_sequence, strict=True):
            assert (one - other).norm() <= 1e-5 * other.norm().clamp(min=1e-3 * largest)


@every_block
@torch.no_grad()
def test_ratio_0_is_the_dense_network_bit_for_bit_and_another_is_not(block):
    net, (x, t, y) = network(block), batch()
    dense, state = net(x, t, y), torch.get_rng_state()
    assert torch.equal(net(x, t, y, routes=(Route(0, 2, 0.0),)), dense) and torch.equal(torch.get_rng_state(), state)
    assert not torch.allclose(net(x, t, y, routes=(Route(0, 2, 0.5),)), dense, atol=1e-3)


@every_block
def test_adaln_zero_starts_every_block_as_the_identity_and_the_network_as_zero(block):
    net = network(block, init="adaln_zero")
    h, c = torch.randn(2, 7, 32), torch.randn(2, 32)
    assert torch.equal(net.blocks[1](h, c, torch.arange(7)[None]), h)
    assert (net(*batch()) == 0).all()


@every_block
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_reach_every_parameter_and_are_those_of_recomputed_activations(block, dtype):
    gradients = []
    for recomputed in (False, True):
        net = network(block)
        if recomputed:
            speed.recompute_activations(net)
        torch.manual_seed(2)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            net(*batch(), routes=net.routes).float().square().mean().backward()
        assert all((parameter.grad != 0).any() and parameter.grad.isfinite().all() for parameter in net.parameters())
        gradients.append([parameter.grad for parameter in net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("block", [*BLOCKS])
def test_no_weight_of_one_block_marks_another(block):
    keys = network(block).blocks[0].state_dict()
    assert [name for name, kind in BLOCKS.items() if kind.mark in keys] == [block]


# ---- LightningDiT's start, and attention -----------------------------------------------------------------------------


def test_a_network_whose_output_is_zero_gets_a_small_gradient():
    net = build_network({**RECORD, "block": "lightning", "init": "adaln_zero"})
    x, y = torch.randn(4, 4, 8, 8), torch.zeros(4, dtype=torch.int64)
    assert (net(x, torch.rand(4), y) == 0).all()
    RF(cosine_weight=1).loss(net, x, y).mean().backward()
    assert 0 < net.final_layer.linear.weight.grad.abs().max() < 10


@pytest.mark.parametrize("num_tokens", [16, 128, 129])
def test_attention_is_the_fused_one_in_any_type_and_number_of_tokens(num_tokens):
    inputs = [each.transpose(1, 2).requires_grad_() for each in torch.randn(3, 2, 3, num_tokens, 24).unbind()]

    def attention(how, dtype):
        out = how(*(each.to(dtype) for each in inputs))
        return out.float(), *torch.autograd.grad(out.float().square().sum(), inputs)

    def fused(*qkv):
        return F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in qkv)).transpose(1, 2).flatten(2)

    for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        for ours, theirs in zip(attention(attend, dtype), attention(fused, torch.float32), strict=True):
            assert (ours - theirs).norm() <= error * theirs.norm()


# ---- Mamba and RWKV: scans equal their definitions; test_versions.py has their blocks -------------------------------

PUBLISHED = published("mixers")


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
    inputs = (torch.randn(2, 11, 2, 3, 4), F.softplus(torch.randn(2, 11, 2, 3) - 1), -16 * torch.rand(2, 3),
              *torch.randn(2, 2, 11, 2, 5))
    scanned = mamba.selective_scan(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mamba.selective_scan(*inputs), scanned)
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
    mamba_net, rwkv_net = (DiT(input_size=8, in_channels=3, hidden_size=D, depth=depth, num_heads=4, num_classes=5,
                               block=block) for block in ("mamba", "rwkv"))
    frame = 2 * N * D * 12 + 256 * D + D * D + 2 * D * D  # patches in and out; noise level; the last modulation
    linear, scan = 6 * D * D + 2 * D * (2 * S + 4) + 2 * (2 * D + 2 * S) * 4, 2 * (2 * D + S)
    # The convolution runs over N + 3 places, of which torch counts those that it gives: N.
    assert multiply_adds(mamba_net) == (frame + depth * (N * linear + 3 * D * D), depth * N * N * scan)
    routes = resolve_routes([Route(0, 1, 0.5)], depth)
    assert multiply_adds(mamba_net, routes)[1] == (N * N + 2 * K * K) * scan
    assert multiply_adds(rwkv_net) == (frame + depth * (N * 13 * D * D + 6 * D * D), 0)
