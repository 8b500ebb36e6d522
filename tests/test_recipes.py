"""Each recipe of docs/recipes.md, and several at once, as a short run: it resumes, it samples, and with its weight at
zero it changes nothing.
"""

import numpy as np
import pytest
import torch
from conftest import one_rank
from training_runs import assert_resumes, end_of, rows, trained

from dit import DiT
from scoring.image_sets import SampledImages
from weights.loading import load_trained

ROUTE = "model.routes=[{{start_layer_idx: 2, end_layer_idx: 3, selection_ratio: {}, return_from: {}}}]"
ALIGNMENT, AFTER = "objective=alignment", "objective.alignment.blocks=[2]"
CONTRAST = ("diffusion=rf_clean", "diffusion.contrastive_weight=0.05", "diffusion.shift=size")
SPRINT = ("model=sprint", "model.routes.0.path_drop=0.5", "diffusion=rf")
MUON = ("optimizer=muon", "optimizer.matrix_lr=1e-3", "optimizer.warmup_steps=2")
# What a run of the recipe is given, and what its network has beside a plain one's layers.
RECIPES = {
    "alignment": ((ALIGNMENT, AFTER), ()),
    "delayed return": ((ROUTE.format(0.5, 0),), ()),
    "tokens of large norm": (("model.selection=l1",), ()),
    "sprint": (SPRINT, ("router",)),
    "contrast, shift, clean": (CONTRAST, ()),
    "internal": (("objective=internal",), ("internal_head",)),
    "layer sync": (("objective=layer_sync", ROUTE.format(0.5, "null"), "objective.layer_sync.deeper=4"), ()),
    "dispersive": (("objective=dispersive",), ()),
    "version 1": (("objective=version1", ROUTE.format(0.5, "null")), ()),
    "muon": (MUON, ()),
    "all that go together": ((*SPRINT, *MUON, "objective=[internal,alignment]", AFTER,
                              "diffusion.contrastive_weight=0.05", "diffusion.shift=2"),
                             ("router", "internal_head")),
}  # fmt: skip
# A knob at zero, and the run that it is then.
ZEROS = {
    "alignment": ((ALIGNMENT, AFTER, "objective.alignment.weight=0"), ()),
    "delayed return": ((ROUTE.format(0.5, 2),), (ROUTE.format(0.5, "null"),)),
    "a delayed route of no token": ((ROUTE.format(0, 0),), ("model.routes=[]",)),
    "path drop": (("model=sprint", "model.routes.0.path_drop=0"),
                  ("model=sprint", "model.routes=[{selection_ratio: 0.75, start_layer_idx: 2, end_layer_idx: -3}]")),
    "contrast and shift": (("diffusion=rf", "diffusion.contrastive_weight=0", "diffusion.shift=1"), ("diffusion=rf",)),
    "internal": (("objective=internal", "objective.internal.weight=0"), ()),
    "layer sync": (("objective=layer_sync", "objective.layer_sync.weight=0"), ()),
    "dispersive": (("objective=dispersive", "objective.dispersive.weight=0"), ()),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "of_its_own"), RECIPES.values(), ids=RECIPES)
def test_a_recipe_resumes_bit_for_bit_and_its_network_samples(taught, tmp_path, settings, of_its_own):
    assert_resumes(tmp_path, taught, "log.every=1", *settings)
    plain = {key.split(".")[0] for key in DiT(patch_size=4, hidden_size=32, num_heads=2, depth=1).state_dict()}
    assert {key.split(".")[0] for key in end_of(tmp_path / "whole")["ema"]} == plain | set(of_its_own)
    loaded = load_trained(tmp_path / "whole")
    [(_, latents)] = SampledImages(one_rank(), loaded.net, loaded.diffusion, lambda latents: latents, [0, 1], [0, 1],
                                   batch_size=2, num_steps=2).sample(np.arange(2))
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


@pytest.mark.parametrize("name",
                         ["delayed return", "tokens of large norm", "sprint", "contrast, shift, clean", "internal",
                          "layer sync", "dispersive", "version 1"])
def test_a_recipe_compiles_one_graph_for_each_number_of_tokens(taught, tmp_path, graphs, name):
    trained(tmp_path / "run", taught, *RECIPES[name][0], "compile=true", "steps=3")
    assert graphs.frame_count == 2
