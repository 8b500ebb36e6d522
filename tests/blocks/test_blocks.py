"""What holds for every block that the frame can be filled with: exact routes, positions that follow them, training."""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from training_runs import command

from blocks import BLOCKS, BlockKind
from routing_module import Route, Router
from training import speed
from weights.loading import load_trained
from weights.records import build_network

every_block = pytest.mark.parametrize("block", [*BLOCKS, "parallel"])
RECORD = dict(input_size=8, patch_size=2, in_channels=4, hidden_size=32, depth=3, num_heads=2, num_classes=4,
              init="xavier", routes=[dict(selection_ratio=0.5, start_layer_idx=1, end_layer_idx=1)])


@pytest.fixture(scope="module", autouse=True)
def parallel():
    """The block of examples/custom_block.py, which has neither a mark nor an mlp_ratio to read."""
    from examples import custom_block

    BLOCKS["parallel"] = BlockKind(custom_block.ParallelBlock)
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
def test_tokens_on_a_route_come_out_as_if_there_were_no_others_and_those_that_left_unchanged(block):
    net = network(block, routes=[dict(selection_ratio=0.4, start_layer_idx=0, end_layer_idx=-1)])
    (x, t, y), seen = batch(), {}

    class Watched(Router):
        def start_route(self, x, ids_keep):
            seen.update(embedded=x, ids_keep=ids_keep)
            return super().start_route(x, ids_keep)

        def end_route(self, x_kept, ids_keep, original_x):
            seen.update(x_kept=x_kept, rejoined=super().end_route(x_kept, ids_keep, original_x))
            return seen["rejoined"]

    net.router = Watched()
    net.double()
    x, t = x.double(), t.double()
    net(x, t, y, routes=net.routes)
    assert seen["x_kept"].shape == (4, 10, 32)
    left = torch.ones(4, 16, dtype=torch.bool).scatter_(1, seen["ids_keep"], False)
    assert torch.equal(seen["rejoined"][left], seen["embedded"][left])
    assert not torch.equal(seen["rejoined"][~left], seen["embedded"][~left])
    c, weights = net.t_embedder(t) + net.y_embedder(y), list(net.blocks.parameters())
    for b, ids in enumerate(seen["ids_keep"]):  # each sample by itself, in a sequence of its kept tokens
        alone = seen["embedded"][b : b + 1, ids]
        for layer in net.blocks:
            alone = layer(alone, c[b : b + 1], ids[None])
        torch.testing.assert_close(seen["x_kept"][b : b + 1], alone, rtol=1e-5, atol=1e-5)
        on_route, in_sequence = (torch.autograd.grad(out.square().sum(), weights, retain_graph=True)
                                 for out in (seen["x_kept"][b], alone))
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


@pytest.mark.parametrize("block", ["dit", "lightning"])
@torch.no_grad()
def test_normalised_queries_and_keys_do_not_depend_on_their_length(block):
    for qk_norm in (True, False):
        net, (x, t, y) = network(block, qk_norm=qk_norm), batch()
        before = net(x, t, y)
        net.blocks[1].attn.qkv.weight[:64] *= 3
        assert torch.allclose(net(x, t, y), before, atol=1e-4) == qk_norm


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


def test_the_example_of_a_custom_block_trains_by_its_command(shapes, tmp_path):
    settings = command(tmp_path / "run", shapes, "steps=2", "model.backbone_type=Parallel-S/2")[1:]
    # Not forked, as it is known before train.py is.
    ended = subprocess.run([sys.executable, "examples/custom_block.py", *settings], cwd=ROOT, capture_output=True,
                           text=True)
    assert ended.returncode == 0, ended.stderr
    trained = load_trained(tmp_path / "run")
    assert type(trained.net.blocks[0]).__name__ == "ParallelBlock" and trained.step == 2
    assert len(trained.net.routes) == 1 and all(p.isfinite().all() for p in trained.net.parameters())


@pytest.mark.parametrize("block", [*BLOCKS])
def test_no_weight_of_one_block_marks_another(block):
    keys = network(block).blocks[0].state_dict()
    assert [name for name, kind in BLOCKS.items() if kind.mark in keys] == [block]
