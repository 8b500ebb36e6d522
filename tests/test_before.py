"""A run, its images and its scores are those that were recorded once (tests/before/README.md)."""

import shutil

import numpy as np
import pytest
import torch
from conftest import run_command

import sample
import train
from runtime import files
from scoring import results
from weights import checkpoint as checkpoints

BEFORE = checkpoints.Path(__file__).parent / "before"
SETTINGS = ["model=tread", "data=folder", f"data.path={BEFORE}/latents", "model.backbone_type=DiT-S/4",
            "model.hidden_size=8", "model.depth=7",
            "model.num_heads=2", "batch_size=6", "log.every=2", "checkpoint.every=2", "samples.every=0",
            "precision=fp32", "compile=false",
            "cpu=true"]


@pytest.fixture
def run(tmp_path):
    """A copy of the run, beside which tests may write."""
    return shutil.copytree(BEFORE / "run", tmp_path / "run")


def test_a_recorded_checkpoint_samples_the_recorded_images(run, tmp_path):
    run_command(sample.main, "sample.py", "cpu=true", f"checkpoint={run}", "seeds=0-3", "num_steps=2",
                f"out={tmp_path}/images.npz")
    with np.load(BEFORE / "images.npz") as before, np.load(tmp_path / "images.npz") as now:
        assert before.files == now.files == ["arr_0", "arr_1", "seeds"]
        for key in ("arr_1", "seeds"):
            assert np.array_equal(before[key], now[key])
        away = np.abs(before["arr_0"].astype(int) - now["arr_0"])
        assert away.max() <= 1 and (away > 0).mean() < 0.01  # another processor rounds otherwise


def test_recorded_rows_are_found_by_what_they_measured():
    rows = results.read_results(BEFORE / "run/results.jsonl")
    assert len(rows) >= 2
    for row in rows:
        wanted = {**row, "metrics": dict.fromkeys(row["metrics"])}
        assert results.scored_before(wanted, BEFORE / "run/results.jsonl") == row
        drawn, scored = {"source": row["source"] | {"drawing_version": 1}}, {"scoring_version": 1, "tf32": False}
        for today in (drawn, scored, drawn | scored):
            assert results.scored_before(wanted | today, BEFORE / "run/results.jsonl") is None
            assert results.scored_before(wanted | today, BEFORE / "run/results.jsonl", any_version=True) == row


def test_rows_are_found_by_content_wherever_run_weak_network_reference_and_features_lie():
    rows, path = results.read_results(BEFORE / "run/results.jsonl"), BEFORE / "run/results.jsonl"
    for row in rows:
        wanted = {**row, "metrics": dict.fromkeys(row["metrics"]), "source": row["source"] | {"checkpoint": "moved"},
                  "reference": row["reference"] | {"path": "moved.npz"}}
        assert results.scored_before(wanted, path) == row
        changed = {"reference": row["reference"] | {"sha256": "0"}}, {"source": wanted["source"] | {"step": 3}}
        assert [results.scored_before(wanted | change, path) for change in changed] == [None, None]
    own = {**rows[-1], "metrics": dict.fromkeys(rows[-1]["metrics"])}
    assert "in_training" not in own["source"] and results.scored_before({**own,
            "source": own["source"] | {"weights_sha256": "0"}}, path) is None
    record = {"checkpoint": "a", "weights_sha256": "1", "weights": "ema", "autoencoder": "vae",
              "autoencoder_sha256": None,
              "guidance": {"scale": 1.5, "weak": {"checkpoint": "b", "weights_sha256": "2"}},
              "extractor": {"weights": "c", "sha256": "3"}}
    assert results.without_places(record) == {
        "weights_sha256": "1", "weights": "ema", "autoencoder": "vae", "autoencoder_sha256": None,
        "guidance": {"scale": 1.5, "weak": {"weights_sha256": "2"}}, "extractor": {"sha256": "3"}}


def test_a_run_from_scratch_is_the_run_that_it_was(tmp_path, fresh_accelerator):
    """Initial weights, order of the images, noise, masks, dropped labels, AdamW and EMA: each change of one is seen."""
    run_command(train.main, "train.py", *SETTINGS, "steps=4", f"run_dir={tmp_path}")
    for name in ("model", "ema"):
        old, new = (checkpoints.load(run / "checkpoints/step-00000004", name) for run in (BEFORE / "run", tmp_path))
        assert old.keys() == new.keys()
        for key, value in old.items():
            torch.testing.assert_close(new[key], value, rtol=1e-4, atol=1e-6)
    for old, new in zip(*(files.read_rows(run / "metrics.jsonl") for run in (BEFORE / "run", tmp_path)), strict=True):
        assert [new[key] for key in ("step", "images", "lr", "skipped")] == [old[key]
                for key in ("step", "images", "lr", "skipped")]
        assert (new["loss"], new["grad_norm"]) == pytest.approx((old["loss"], old["grad_norm"]), rel=1e-4)
