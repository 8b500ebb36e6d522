"""Situations from public reports, training and resuming: the source, the situation, what comes out.

Tested elsewhere: facebookresearch/DiT#35 and Vchitect/Latte#55 (an average that is lost on resuming:
tests/test_resume.py), goodfire-ai/spd#677 (a signal during evaluation: tests/runtime/test_ranks.py),
Lightning-AI/pytorch-lightning#688 and #21431 (halved checkpoints: tests/test_resume.py), dreamquark-ai/tabnet#537 and
huggingface/transformers#39659 (a batch larger than the data, or no multiple of its parts: tests/test_mistakes.py).
"""

import errno
import json
import os
import shutil

import numpy as np
import pytest
from conftest import change_record
from spoils import with_new_hashes
from test_prepare_latents import prepare
from training_runs import assert_same_end, rows, train_here, trained

from weights import checkpoint as checkpoints

SMALL = ("model.depth=3", "model.routes=[]", "compile=false", "cpu=true", "log.every=1", "checkpoint.every=100")


@pytest.fixture(scope="module")
def thirty(tmp_path_factory):
    """30 latents: three batches of 8 an epoch, and 6 left."""
    out = tmp_path_factory.mktemp("thirty") / "data"
    prepare("shapes", out, resolution=16, autoencoder="identity", shapes={"count": 30, "seed": 0})
    return out


@pytest.fixture(scope="module")
def seven(thirty, tmp_path_factory):
    """A run that ended in its third epoch."""
    run = tmp_path_factory.mktemp("seven") / "run"
    trained(run, thirty, *SMALL, "steps=7")
    return run


def test_a_run_that_moved_resumes_in_its_third_epoch_bit_for_bit(seven, thirty, tmp_path):
    """huggingface/accelerate#2016: a loader that resumes in the second epoch skips batches of the first."""
    moved = shutil.copytree(seven, tmp_path / "another disk/deeper")
    copied = shutil.copytree(thirty, tmp_path / "data")
    trained(moved, copied, *SMALL, "steps=10", "name=other")
    trained(tmp_path / "whole", thirty, *SMALL, "steps=10")
    assert_same_end(moved, tmp_path / "whole")


def test_a_longer_run_follows_the_schedule_of_its_new_length(thirty, tmp_path):
    """deepinsight/insightface#2143: more epochs after a resume keep the old length of the schedule."""
    cosine = (*SMALL, "optimizer.schedule=cosine", "optimizer.warmup_steps=2", "optimizer.lr=1e-3")
    trained(tmp_path / "longer", thirty, *cosine, "steps=3")
    assert "steps was 3 and is now 6" in trained(tmp_path / "longer", thirty, *cosine, "steps=6")
    trained(tmp_path / "whole", thirty, *cosine, "steps=6")
    lr = [[row["lr"] for row in rows(tmp_path / name)] for name in ("longer", "whole")]
    assert lr[0][3:] == lr[1][3:] and lr[0][-1] < 0.2e-3


def test_a_copy_of_a_run_logs_under_an_id_of_its_own_and_a_run_that_moved_under_its_own(seven, thirty, tmp_path):
    """wandb/wandb#1450: rows of a step that the id has logged already are dropped with a warning."""
    ids = {}
    for place in ("moved/run", "run-copy"):
        trained(shutil.copytree(seven, tmp_path / place), thirty, *SMALL, "steps=8")
        ids[place] = checkpoints.read_meta(checkpoints.latest(tmp_path / place))["run_id"]
    assert ids["moved/run"] == checkpoints.read_meta(checkpoints.latest(seven))["run_id"]
    assert ids["run-copy"].startswith("run-copy-")


def test_weights_of_other_classes_or_latents_are_named(seven, thirty, tmp_path):
    """facebookresearch/deit#130 and hustvl/LightningDiT#83: init_from=<a run on classes of another order, or on latents
    of another autoencoder>, silently.
    """
    turned, scaled = (shutil.copytree(thirty, tmp_path / name) for name in ("turned", "scaled"))
    change_record(turned, class_names=json.loads((thirty / "metadata.json").read_text())["class_names"][::-1])
    change_record(scaled, scale=0.5)
    for data, options, says in ((turned, (), "cross is class 5 there and 0 here"), (scaled, (), "another scale."),
                                (turned, ("new_label_table=true",), ""), (thirty, (), "")):
        printed = trained(tmp_path / f"run{len([*tmp_path.iterdir()])}", data, *SMALL, "steps=1", f"init_from={seven}",
                          *options)
        assert says in printed and ("learn that anew" in printed) == bool(says)


@pytest.mark.parametrize("array", ["latents", "labels"])
def test_data_that_were_made_anew_in_place_are_another_data_set(seven, thirty, tmp_path, array):
    changed = shutil.copytree(thirty, tmp_path / "data")
    file = changed / f"{array}-00000.npy"
    np.save(file, np.load(file)[::-1])
    with_new_hashes(changed)
    result = train_here(shutil.copytree(seven, tmp_path / "run"), changed, *SMALL, "steps=8")
    assert result.returncode == 1 and "was trained with another data set" in result.stderr


def test_a_quota_is_named_although_the_disk_has_room(thirty, tmp_path, monkeypatch):
    """open-mmlab/mmdetection#12069: Disk quota exceeded, but there is still space left."""
    def full(*_, **__):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(checkpoints.HashedFile, "write", full)
    result = train_here(tmp_path, thirty, *SMALL, "steps=1")
    assert result.returncode == 1 and "Disk quota exceeded" in result.stderr
    assert "Earlier checkpoints are untouched" in result.stderr
