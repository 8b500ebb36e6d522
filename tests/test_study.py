"""A study: runs that go on after a kill, scores gathered over seeds, crossings by interpolation, equal draws for dense and routed."""

import json
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT

from dit import DiT
from edm import EDM
from rf import RF
from routing_module import Route
from scripts import study
from settings import read
from train import step_seed, train_step

TINY = ["experiment=quickstart", "batch_size=8", "model.hidden_size=32", "model.num_heads=2", "model.depth=6", "steps=4", "samples.every=0",
        "log.every=2", "checkpoint.every=2", "evaluate.every=2", "evaluate.num_samples=4", "evaluate.num_steps=2"]
MATRIX = {"name": "tiny", "train": TINY, "score": ["num_steps=2", "features=pixels"], "seeds": [0, 1],
          "variants": {"dit": {"train": ["model=dit"], "at_end": ["cfg"]}, "tread": {"train": ["model=tread"], "seeds": [0]},
                       "tuned": {"train": ["model=dit", "init_from={runs}/tread-seed{seed}", "steps=1"], "seeds": [0]}},
          "at_end": {"cfg": [["num_samples=4", "guidance=cfg", "scale=2"]]}, "compare": [["dit", "tread"]]}


def settings(out, **changed) -> study.StudySettings:
    return read(study.StudySettings, {"study": MATRIX, "out": str(out), "part": None, "tasks": ["train", "score", "report"], "rounds": 1,
                                      "steps_timed": 1, "nice": 0, "threads": 1, **changed})


def test_every_run_is_in_exactly_one_part(tmp_path):
    runs = study.runs_of(settings(tmp_path))
    assert [(run.variant, run.seed) for run in runs] == [("dit", 0), ("dit", 1), ("tread", 0), ("tuned", 0)]
    assert study.waits_for(runs[3], runs) == runs[2] and study.waits_for(runs[0], runs) is None
    assert runs[3].train[-5] == f"init_from={tmp_path}/runs/tread-seed0"
    parts = [run for part in ("1/3", "2/3", "3/3") for run in study.share(runs, part)]
    assert sorted(run.folder for run in parts) == sorted(run.folder for run in runs)
    for wrong in ("0/3", "4/3", "x", "2"):
        with pytest.raises(ValueError, match="write part=2/6"):
            study.share(runs, wrong)


@pytest.mark.parametrize(("changed", "says"), [
    ({"compare": [["dit", "dot"]]}, "names dot, but the variants are dit, tread"),
    ({"variants": {"dit": {"train": [], "at_end": ["sg"]}}, "compare": []}, "names sg; study.at_end has cfg"),
])
def test_a_name_that_is_none_is_a_sentence(tmp_path, changed, says):
    with pytest.raises(ValueError, match=says):
        study.runs_of(settings(tmp_path, study=MATRIX | changed))


def test_a_study_trains_scores_and_draws_and_does_nothing_twice(tmp_path):
    data, reference = tmp_path / "shapes", tmp_path / "reference.npz"
    for line in (["scripts/prepare_latents.py", "source=shapes", "shapes.count=60", "resolution=16", "autoencoder=identity", f"out={data}"],
                 ["fid.py", f"reference_from={data}", "features=pixels", f"out={reference}"]):
        subprocess.run([sys.executable, *line], cwd=ROOT, check=True, capture_output=True)
    matrix = MATRIX | {"train": [*TINY, f"data.path={data}", f"evaluate.reference={reference}"], "seeds": [0],
                       "score": [*MATRIX["score"], f"reference={reference}"]}
    cfg = settings(tmp_path / "study", study=matrix)
    study.main.__wrapped__(cfg)
    told = json.loads((tmp_path / "study/study.json").read_text())
    assert {run["variant"]: [score["step"] for score in run["scores"]] for run in told["runs"]} == {
        "dit": [0, 2, 4, 4], "tread": [0, 2, 4], "tuned": [0, 1]}
    assert [score["guidance"] for score in told["runs"][0]["scores"]] == ["unguided"] * 3 + ["label, scale 2"]
    dense, routed = ({score["step"]: score["flops"] for score in run["scores"]} for run in told["runs"][:2])
    assert dense[4] == 2 * dense[2] > routed[4] > 0
    assert (tmp_path / "study/score-over-images.png").is_file() and "| tread |" in (tmp_path / "study/study.md").read_text()
    before = {path: path.read_bytes() for path in (tmp_path / "study/runs").rglob("*") if path.is_file()}
    study.main.__wrapped__(cfg)
    assert {path: path.read_bytes() for path in (tmp_path / "study/runs").rglob("*") if path.is_file()} == before


def of(variant: str, seed: int, *scores: tuple[int, float]) -> dict:
    return {"variant": variant, "seed": seed, "scores": [
        {"images": images, "seconds": None, "flops": images, "value": value, "num_samples": 9, "guidance": "unguided"} for images, value in scores]}


def test_a_crossing_is_where_the_lines_between_the_scores_meet():
    runs = [of("a", 0, (0, 9), (10, 5), (20, 3)), of("b", 0, (0, 9), (10, 7), (20, 2))]
    found = study.crossing(runs, "a", "b", "images")
    assert abs(found["at"] - (10 + 10 * 2 / 3)) < 1e-9 and found["better_at_the_end"] == "b"
    assert study.crossing(runs, "b", "a", "images")["at"] is None
    never = [of("a", 0, (10, 5), (20, 3)), of("b", 0, (10, 7), (20, 4))]
    assert study.crossing(never, "a", "b", "images") == {"between": ["a", "b"], "axis": "images", "at": None, "better_at_the_end": "a"}
    assert study.crossing([of("a", 0), of("b", 0)], "a", "b", "images")["better_at_the_end"] is None
    assert study.crossing(runs, "a", "b", "seconds")["at"] is None      # nothing was timed


def test_the_mean_and_its_spread_are_over_seeds():
    runs = [of("a", 0, (10, 4)), of("a", 1, (10, 6)), of("a", 2, (20, 1))]
    assert study.curve(runs, "a", "images") == [(10, 5, 2**0.5, 2), (20, 1, 0.0, 1)]


@pytest.mark.parametrize("diffusion", [EDM(), RF()])
def test_dense_and_routed_runs_of_a_seed_see_the_same_noise_levels_and_labels(fresh_accelerator, diffusion):
    seen = {}
    for name, routes in (("dit", []), ("tread", [Route(1, 2, 0.5)])):
        torch.manual_seed(0)
        model = DiT(input_size=8, patch_size=2, in_channels=4, hidden_size=32, depth=4, num_heads=2, num_classes=4, routes=routes)
        accelerator = Accelerator(cpu=True)
        net, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
        seen[name] = [model.state_dict()["x_embedder.proj.weight"].clone()]
        model.register_forward_pre_hook(lambda _, inputs, name=name: seen[name].extend(inputs))
        for step in range(3):
            torch.manual_seed(step_seed(7, step, 0))
            x, y = torch.ones(16, 4, 8, 8) * step, torch.arange(16) % 4
            train_step(accelerator, net, model, diffusion, optimizer, x, y, lr=1e-3, label_dropout=0.5, clip_norm=None, num_parts=1)
    assert len(seen["dit"]) == 1 + 3 * 3
    assert all(torch.equal(one, other) for one, other in zip(seen["dit"], seen["tread"], strict=True))
