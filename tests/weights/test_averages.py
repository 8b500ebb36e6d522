"""Several averages of one run: their names, what is tracked and saved, and grids and scores of each."""

import json
import shutil

import numpy as np
import pytest
import torch
import training_runs
from conftest import run_command
from PIL import Image

import sample
from weights import averages, checkpoints
from weights.records import build_network

SEVERAL = ("ema.decay=[0.9,0.5]", "ema.warmup=false", "checkpoint.every=2")
QKV = "blocks.0.attn.qkv.weight"


@pytest.mark.parametrize(("typed", "name"), [
    ("model", "model"), ("ema-0.9990", "ema-0.999"), ("ema-.5", "ema-0.5"), ("ema-1e-05", "ema-1e-05"),
    *((wrong, None) for wrong in ("ema-", "ema-2.5", "../ema", "training", "ema_0.9"))])
def test_names_have_one_spelling_and_others_are_refused(typed, name):
    if name is None:
        with pytest.raises(ValueError, match=r"neither model, ema nor ema-<decay>"):
            averages.weights_name(typed)
    else:
        assert averages.weights_name(typed) == name


def trained(run, data, *overrides):
    return training_runs.trained(run, data, "log.every=1", *SEVERAL, *overrides)


@pytest.fixture(scope="module")
def several(shapes, tmp_path_factory):
    """A run of 6 steps with two averages, and a checkpoint of each step."""
    run = tmp_path_factory.mktemp("several") / "run"
    trained(run, shapes, "steps=6", "checkpoint.every=1", "checkpoint.keep_last=9")
    return run


def test_each_average_is_that_of_its_decay_and_the_first_that_of_a_run_with_one(several, shapes, tmp_path):
    steps = checkpoints.all_steps(several)
    torch.manual_seed(0)
    first = build_network(checkpoints.read_meta(steps[0])["network"]).state_dict()
    for name, decay in {"ema": 0.9, "ema-0.5": 0.5}.items():
        expected = first
        for folder in steps:
            now = checkpoints.load(folder, "model")
            expected = {key: decay * expected[key] + (1 - decay) * now[key] for key in now}
        saved = checkpoints.load(steps[-1], name)
        assert max((saved[key] - expected[key]).abs().max() for key in saved) <= 1e-6
    trained(tmp_path / "plain", shapes, "ema.decay=0.9", "steps=6")
    plain = checkpoints.latest(tmp_path / "plain")
    assert {path.stem for path in steps[-1].glob("*.safetensors")} == {"ema", "ema-0.5", "model", "training"}
    assert {path.stem for path in plain.glob("*.safetensors")} == {"ema", "model", "training"}
    assert (plain / "ema.safetensors").read_bytes() == (steps[-1] / "ema.safetensors").read_bytes()


@pytest.mark.parametrize(("overrides", "says", "expected"), [    # the file that each average begins with, and its decay
    (("ema.decay=[0.9,0.5,0.99]",), "ema-0.99 begins at step 6 with the weights of that step",
     {"ema": ("ema", 0.9), "ema-0.5": ("ema-0.5", 0.5), "ema-0.99": ("model", 0.99)}),
    (("ema.decay=[0.5,0.9]",), "ema.decay was [0.9, 0.5] and is now [0.5, 0.9]",
     {"ema": ("ema-0.5", 0.5), "ema-0.9": ("ema", 0.9)}),
    (("ema.decay=0.99",), "ema.decay was [0.9, 0.5] and is now 0.99", {"ema": ("ema", 0.99)}),
], ids=["one more", "in another order", "fewer, and another first"])
def test_a_run_resumes_with_other_averages(several, shapes, tmp_path, overrides, says, expected):
    run = shutil.copytree(several, tmp_path / "run")
    assert says in trained(run, shapes, *overrides, "steps=7", "optimizer.lr=0", "optimizer.warmup_steps=0")
    before, after = (checkpoints.step_folder(run, step) for step in (6, 7))
    assert {path.stem for path in after.glob("ema*")} == {*expected}
    for name, (source, decay) in expected.items():
        mixed = decay * checkpoints.load(before, source)[QKV] + (1 - decay) * checkpoints.load(before, "model")[QKV]
        torch.testing.assert_close(checkpoints.load(after, name)[QKV], mixed)


def test_a_grid_is_of_the_first_average_and_all_are_scored(shapes, pixel_reference, tmp_path):
    run = tmp_path / "run"
    trained(run, shapes, "steps=2", "optimizer.warmup_steps=0", "optimizer.lr=1e-2", "samples.every=2",
            "samples.seeds=0-1", "samples.num_steps=1", "evaluate.every=2",
            f"evaluate.reference={pixel_reference}", "evaluate.features=pixels", "evaluate.num_samples=4",
            "evaluate.num_steps=1")
    sources = [json.loads(row)["source"] for row in (run / "results.jsonl").read_text().splitlines()]
    assert [(row["step"], row["weights"]) for row in sources] == [
        (step, which) for step in (0, 2) for which in ("ema", "ema-0.5")]
    for name in ("ema", "ema-0.5"):
        run_command(sample.main, "sample.py", f"checkpoint={run}", f"weights={name}", "seeds=0-1", "num_steps=1",
                    "cpu=true", f"out={tmp_path}/{name}.png")
        grids = [np.asarray(Image.open(file)) for file in (tmp_path / f"{name}.png", run / "samples/step-00000002.png")]
        assert np.array_equal(*grids) == (name == "ema")
