"""Sprint beyond what tests/test_published_training.py compares: dense passes, the grid, guidance, records."""

import pytest
import torch
from test_published_parity import published
from torch import nn
from torch.nn.functional import avg_pool2d

from blocks.fusion import FusingRouter
from dit import DiT
from guidance import Guidance
from rf import RF
from routed import routed
from routing_module import Route, Router, resolve_routes
from weights.records import architecture, build_network

THEIRS = published("sprint")
SMALL = dict(input_size=8, in_channels=3, hidden_size=32, depth=6, num_heads=2, num_classes=5)
ROUTE = dict(start_layer_idx=2, end_layer_idx=-3, selection_ratio=0.75)


def net(selection="grid", **route):
    torch.manual_seed(1)
    return DiT(**SMALL, init="xavier", routes=[Route(**ROUTE | route)], router=FusingRouter(32, selection))


def batch(count=4):
    torch.manual_seed(2)
    return torch.randn(count, 3, 8, 8), torch.rand(count), torch.arange(count) % 6


# ---- the network ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_dense_pass_fuses_too_samples_nothing_and_equals_the_route_of_ratio_0_bit_for_bit():
    model, (x, t, y) = net(path_drop=0.5), batch()
    before = torch.get_rng_state()
    dense = model(x, t, y)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model(x, t, y, resolve_routes([Route(**ROUTE | {"selection_ratio": 0.0})], 6)), dense)


@torch.no_grad()
def test_a_dropped_sample_of_a_plain_route_skips_its_blocks(monkeypatch):
    model = DiT(**SMALL, init="xavier", routes=[Route(1, 4, 0.0, path_drop=0.5)])
    x, t, y = batch()
    monkeypatch.setattr(Route, "draw_dropped", lambda route, count, device: (torch.tensor([True, False, True, False]),))
    out, dense = model(x, t, y, model.routes), model(x, t, y)
    del model.blocks[1:5]
    short = model(x, t, y)
    assert torch.equal(out[1::2], dense[1::2]) and torch.equal(out[::2], short[::2])
    assert not torch.allclose(dense, short)


# ---- one of each group ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "each"), [(0.75, {1}), (0.5, {2}), (0.25, {3}), (0.875, {0, 1}), (0.6, {1, 2})])
def test_as_many_of_each_2_by_2_tokens_are_kept_as_of_any_other(ratio, each):
    ids = Router("grid").get_mask(torch.empty(50, 64, 1), ratio)
    is_kept = torch.zeros(50, 64).scatter_(1, ids, 1.0).view(50, 8, 8)
    counts = 4 * avg_pool2d(is_kept, 2)
    assert {*counts.flatten().tolist()} == each and ids.shape[1] == 64 - int(64 * ratio)


# ---- guidance -------------------------------------------------------------------------------------------------------

@torch.no_grad()
def test_the_ratios_of_a_guided_sampling_drop_no_sample():
    model, (x, _, y), seen = net(path_drop=0.9), batch(), []
    # The linear layer is given g with mask tokens, and f, each (B, N, D).
    model.router.fusion.register_forward_pre_hook(lambda _, args: seen.append(args[0].chunk(2, dim=-1)))
    Guidance(1.5, 0.25, 0.75, drop_label=False).guide(RF().velocity, model, x, y, num_steps=1)(x, 0.5, 0)
    masked = [(g == model.router.mask_token).all(dim=-1).sum(dim=1).tolist() for g, _ in seen]
    assert masked == [[4] * 4, [12] * 4]


# ---- records, and what does not go together -------------------------------------------------------------------------

RECORD = {**SMALL, "fusion": True, "selection": "grid", "routes": [{**ROUTE, "path_drop": 0.1}]}


def test_a_record_builds_the_network_again_and_its_dense_fine_tune_has_the_same_architecture():
    model = build_network(RECORD)
    assert type(model.router) is FusingRouter and model.router.selection == "grid"
    assert model.routes == (Route(2, 3, 0.75, path_drop=0.1),)
    tuned = {**RECORD, "routes": [{"selection_ratio": 0.0, "start_layer_idx": 2, "end_layer_idx": 3}],
             "selection": "random"}
    assert architecture(tuned) == architecture(RECORD)
    elsewhere = {**RECORD, "routes": [{**ROUTE, "start_layer_idx": 1}]}
    assert architecture(elsewhere) != architecture(RECORD) != architecture({**RECORD, "fusion": False})
    assert architecture({**RECORD, "fusion": False}) == architecture(SMALL)


@pytest.mark.parametrize(("wrong", "says"), [
    (lambda: build_network({**RECORD, "routes": [{**ROUTE}, {**ROUTE, "start_layer_idx": 4, "end_layer_idx": 4}]}),
     "the network has 2 routes"),
    (lambda: resolve_routes([Route(2, 3, 0.5, path_drop=1.0)], 6), "path_drop=1.0, a share of samples"),
    (lambda: net()(*batch(), routes=(Route(1, 3, 0.5),)), r"fuses after route 2→3 .* such as 1→3"),
    (lambda: Guidance(3.0, gamma2=1, routes=(Route(1, 3, 0.5),)).check(net()), "leave routes out"),
    (lambda: routed(nn.Module(), [Route(0, 0, 0.5, path_drop=0.5)],
                    blocks=nn.ModuleList([nn.Linear(1, 1)])).__enter__(), "and path_drop"),
])
def test_what_does_not_go_together_raises_a_one_line_error(wrong, says):
    with pytest.raises(ValueError, match=says):
        wrong()


def test_the_initial_fusion_and_mask_token_have_the_spread_of_theirs():
    torch.manual_seed(0)
    model = DiT(**SMALL | {"hidden_size": 64}, routes=[Route(**ROUTE)], router=FusingRouter(64))
    ours = {"mask_token": model.router.mask_token, "fusion.weight": model.router.fusion.weight,
            "fusion.bias": model.router.fusion.bias}
    assert {name: value.std().item() for name, value in ours.items()} == pytest.approx(THEIRS["init"], rel=0.2)
