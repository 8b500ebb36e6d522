"""What must hold for each recipe of docs/recipes.md, and for several at once."""

import pytest
import torch
from conftest import one_rank
from training_runs import assert_resumes, end_of, rows, trained

from edm import EDM
from objectives import build_objective
from runtime import libraries
from sampling.sampler import Sampler
from scoring.image_sets import sampled_images
from training import speed
from weights.loading import load_trained
from weights.records import build_network, build_schedule

ROUTE = "model.routes=[{{start_layer_idx: 2, end_layer_idx: 3, selection_ratio: {}, return_from: {}}}]"
ALIGNMENT = ("objective=alignment", "objective.block=2")
SPRINT = ("model=sprint", "model.routes.0.path_drop=0.5", "diffusion=rf")
MUON = ("optimizer=muon", "optimizer.matrix_lr=1e-3", "optimizer.warmup_steps=2")
VERSION_1 = ("objective=version1", ROUTE.format(0.5, "null"))
TWO_ROUTES = ("route_schedule.changes=[[2,[{start_layer_idx: 1, end_layer_idx: 1, selection_ratio: 0.5},"
              "{start_layer_idx: 4, end_layer_idx: 4, selection_ratio: 0.25}]]]")
RAMPS = ("route_schedule.dense_before=1", "route_schedule.dense_after=3",
         "route_schedule.selection_ratios=[0.25,0.5,0.75]")
RECIPES = {
    "alignment on ramps": (*ALIGNMENT, *RAMPS),
    "delayed return": (ROUTE.format(0.5, 0),),
    "shift": ("diffusion=rf", "diffusion.shift=size"),
    "sprint on ramps": (*SPRINT, *RAMPS),
    "version 1, then other routes": (*VERSION_1, "objective.mae_weight=0.1", TWO_ROUTES),
    "muon": MUON,
    "averages, clipping and parts": ("ema.decay=[0.9,0.5]", "optimizer.clip_norm=0.1", "grad_accum_steps=2"),
    "rwkv, cosine term": ("model.backbone_type=RWKV-L/2", "model.patch_size=4", "diffusion=rf_lightning"),
    "compiled": ("compile=true",),
    "all that go together": (*SPRINT, *MUON, *ALIGNMENT, "diffusion.shift=2"),
}  # fmt: skip
# A setting at zero, or without effect on numbers, and the run that it is then.
ZEROS = {
    "alignment": ((*ALIGNMENT, "objective.weight=0"), ()),
    "delayed return": ((ROUTE.format(0.5, 2),), (ROUTE.format(0.5, "null"),)),
    "a delayed route of no token": ((ROUTE.format(0, 0),), ("model.routes=[]",)),
    "path drop": (("model=sprint", "model.routes.0.path_drop=0"),
                  ("model=sprint", "model.routes=[{selection_ratio: 0.75, start_layer_idx: 2, end_layer_idx: -3}]")),
    "shift": (("diffusion=rf", "diffusion.shift=1"), ("diffusion=rf",)),
    "a sampled ratio that is the route's": (("route_schedule.selection_ratios=[0.5]",), ()),
}  # fmt: skip


@pytest.mark.parametrize("settings", RECIPES.values(), ids=RECIPES)
def test_a_recipe_resumes_bit_for_bit_and_its_network_samples(taught, tmp_path, graphs, settings):
    assert_resumes(tmp_path, taught, "log.every=1", *settings)
    assert graphs.frame_count == (2 if "compile=true" in settings else 0)
    loaded = load_trained(tmp_path / "whole")
    [(_, latents)] = sampled_images(one_rank(), loaded.net, Sampler(loaded.diffusion, 2), lambda latents: latents,
                                    [0, 1], [0, 1], batch_size=2).batches
    assert latents.isfinite().all()


@pytest.mark.parametrize(("zero", "plain"), ZEROS.values(), ids=ZEROS)
def test_at_zero_a_run_is_the_plain_one_bit_for_bit(taught, tmp_path, zero, plain):
    for name, settings in (("zero", zero), ("plain", plain)):
        trained(tmp_path / name, taught, "log.every=1", "steps=2", *settings)
    zeroed, wanted = (end_of(tmp_path / name) for name in ("zero", "plain"))
    assert all(torch.equal(value, zeroed[name][key]) for name in ("model", "ema")
               for key, value in wanted[name].items())
    norms = [[row["grad_norm"] for row in rows(tmp_path / name)] for name in ("zero", "plain")]
    assert norms[0] == norms[1]


NETWORK = dict(input_size=8, in_channels=3, hidden_size=96, depth=4, num_heads=8, num_classes=5, init="xavier",
               routes=[dict(start_layer_idx=1, end_layer_idx=2, selection_ratio=0.5)])
# What differs from a plain routed network: its keywords, the objective, the schedule, and the graphs that it compiles.
GRAPHS = {
    **{block: ({"block": block}, {}, {}, 2) for block in ("dit", "lightning", "mamba", "rwkv")},
    "float8": ({}, {}, {}, 2),
    "sprint": ({"fusion": True, "selection": "grid"}, {}, {}, 2),
    "delayed return": ({"routes": [{**NETWORK["routes"][0], "return_from": 0}]}, {}, {}, 2),
    "alignment": ({}, {"name": "alignment", "block": 1}, {}, 2),
    "version 1": ({}, {"name": "version1"}, {}, 2),
    "more ratios than torch's limit of graphs": ({}, {}, dict(
        dense_after=45, selection_ratios=[n / 10 for n in range(1, 10)]), 10),
}  # fmt: skip


@pytest.mark.parametrize(("network", "objective", "schedule", "num_graphs"), GRAPHS.values(), ids=GRAPHS)
def test_each_number_of_tokens_is_one_graph_and_nothing_is_compiled_again(graphs, request, network, objective, schedule,
                                                                          num_graphs):
    torch.manual_seed(0)
    net = build_network(NETWORK | network)
    if "float8" in request.node.callspec.id:
        pytest.importorskip("torchao")
        speed.multiply_in_float8(net, emulate=True)
    libraries.compile_blocks(net, True)
    minimised = build_objective(net, EDM(), objective, {"teacher": (16, 5)}, build_schedule(net, schedule, seed=0))
    arrays = {name: torch.randn(2, 16, 5) for name in minimised.arrays}
    for minimised.step in range(50 if schedule else 3):
        with torch.autocast("cpu", torch.bfloat16, enabled="fusion" not in network):  # which returns bfloat16
            loss, _ = minimised(torch.randn(2, 3, 8, 8), torch.tensor([0, 1]), **arrays)
        loss.sum().backward()
    assert graphs.frame_count == num_graphs
