"""Runs that are killed or damaged resume: nothing is lost, and nothing changes. Signals: test_ranks.py.

What public reports describe has its source in the test.
"""

import contextlib
import json
import shutil
import signal
from unittest.mock import Mock

import forked
import pytest
from conftest import change_record
from filelock import FileLock
from test_hostile_files import everything
from training_runs import assert_same_end, refusal, rows, train_here, trained

from runtime import files
from training.run_folder import changed_settings, check_resumable, discard_after
from weights import checkpoints


def test_a_run_that_is_killed_again_and_again_ends_bit_identical_to_one_that_was_not(shapes, reference, tmp_path):
    def killed_at(change: int) -> forked.Ended:
        def live() -> None:
            changes = forked.Changes(run, forked.killing(change, signal.SIGKILL))
            train_here(run, shapes)
            print(changes.number)
        return forked.Life(live).wait()

    run, reached, halves = tmp_path / "undisturbed", [], 0
    all_changes = int(killed_at(0).printed.split()[-1])
    run = tmp_path / "run"
    for share in (0.1, 0.33, 0.02, 0.36, 0.27, 0.2):
        ended = killed_at(int(share * all_changes))
        assert ended.code == -signal.SIGKILL, ended.printed
        reached.append(max(map(checkpoints.step_of, checkpoints.all_steps(run)), default=0))
        halves += any((run / "checkpoints").glob(".*.tmp"))
    last = checkpoints.step_of(checkpoints.latest(reference))
    assert reached == sorted(reached) and 0 < reached[-1] < last and halves
    assert "resuming" in trained(run, shapes)
    assert_same_end(run, reference)
    assert not list((run / "checkpoints").glob(".*.tmp"))


@pytest.mark.parametrize(("newest", "patches", "overrides", "code", "says"), [
    (24, {}, ["checkpoint.keep_last=1", "checkpoint.every=1"], 0, "Finished 24 steps"),
    (24, {}, ["model.init=xavier", "optimizer.lr=0.5"], 1,
     "other settings: model.init was adaln_zero and is now xavier; optimizer.lr was 0.004 and is now 0.5."),
    (20, {}, ["steps=20"], 0, "Finished 20 steps"),
    (24, {}, ["steps=4"], 1, "more than steps=4"),
    (24, {"accelerate.Accelerator.init_trackers": Mock(side_effect=RuntimeError("no network"))},
     ["steps=30", "log.trackers=[wandb]"], 1, "could not start"),
    (20, {"runtime.ranks.StopRequest.agreed": lambda *_: signal.SIGTERM}, ["optimizer.lr=0.5", "steps=30"], 143,
     "Stopped by SIGTERM at step 20"),
])
def test_a_command_that_takes_no_step_changes_no_file(shapes, reference, tmp_path, monkeypatch, newest, patches,
                                                      overrides, code, says):
    run = shutil.copytree(reference, tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 25')  # of a row that a kill halved
    if newest == 20:
        (run / "checkpoints/step-00000024/model.safetensors").write_bytes(b"")
    for name, value in patches.items():
        monkeypatch.setattr(name, value)
    before = everything(run)
    result = train_here(run, shapes, *overrides)
    assert result.returncode == code and says in result.stdout + result.stderr, result.stderr
    assert everything(run) == before


def test_a_resumed_run_knows_its_lowest_loss(shapes, tmp_path):
    for more in (["steps=3"], ["steps=6", "optimizer.lr=0.5"]):
        trained(tmp_path, shapes, "optimizer.warmup_steps=0", "checkpoint.every=3", *more)
    assert rows(tmp_path)[-1]["loss"] > 1000 and rows(tmp_path)[-1]["skipped"] == 0
    assert [checkpoints.is_sound(folder) for folder in checkpoints.all_steps(tmp_path)] == [True, False]


def test_a_row_truncated_by_a_kill_costs_no_other_row(tmp_path):
    results = [{"source": {"in_training": True, "step": step}, "metrics": {}} for step in (0, 10, 20)]
    text = "".join(json.dumps(row) + "\n" for row in results)
    # Half a row, and a last one without its newline.
    (tmp_path / "results.jsonl").write_text(text[:30] + "\n" + text[:-1])
    (tmp_path / "metrics.jsonl").write_text('{"step": 10}\n{"step": 20}\n{"st')  # and other rows are kept
    discard_after(tmp_path, 20)
    assert files.read_rows(tmp_path / "results.jsonl") == results
    discard_after(tmp_path, 10)
    assert files.read_rows(tmp_path / "results.jsonl") == results[:2]
    assert files.read_rows(tmp_path / "metrics.jsonl") == [{"step": 10}]


def test_two_processes_cannot_train_one_run(shapes, tmp_path):
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run/.lock"):
        assert "Another process is training" in refusal(tmp_path / "run", shapes)


# ---- a run that moves, grows or is copied ---------------------------------------------------------------------------

FEW = ("model.depth=3", "model.routes=[]", "batch_size=100", "log.every=1", "checkpoint.every=100")  # 3 an epoch


@pytest.fixture(scope="module")
def seven(shapes, tmp_path_factory):
    """A run of seven steps, which ended in its third epoch."""
    run = tmp_path_factory.mktemp("seven") / "run"
    trained(run, shapes, *FEW, "steps=7")
    return run


def test_a_run_that_moved_resumes_in_its_third_epoch_bit_for_bit(seven, shapes, tmp_path):
    """huggingface/accelerate#2016: a loader that resumes in the second epoch skips batches of the first.

    wandb/wandb#1450: rows of a step that an id has logged already are dropped, so that a copy needs an id of its own.
    """
    moved, copy = (shutil.copytree(seven, tmp_path / place) for place in ("another disk/run", "run-copy"))
    data = shutil.copytree(shapes, tmp_path / "data")
    trained(moved, data, *FEW, "steps=10", "name=other")
    trained(tmp_path / "whole", shapes, *FEW, "steps=10")
    assert_same_end(moved, tmp_path / "whole")
    trained(copy, shapes, *FEW, "steps=8")
    ids = [checkpoints.read_meta(checkpoints.latest(run))["run_id"] for run in (seven, moved, copy)]
    assert ids[0] == ids[1] and ids[2].startswith("run-copy-")


def test_a_longer_run_follows_the_schedule_of_its_new_length(shapes, tmp_path):
    """deepinsight/insightface#2143: more epochs after a resume keep the old length of the schedule."""
    cosine = (*FEW, "optimizer.schedule=cosine", "optimizer.warmup_steps=2", "optimizer.lr=1e-3")
    trained(tmp_path / "longer", shapes, *cosine, "steps=3")
    assert "steps was 3 and is now 6" in trained(tmp_path / "longer", shapes, *cosine, "steps=6")
    trained(tmp_path / "whole", shapes, *cosine, "steps=6")
    lr = [[row["lr"] for row in rows(tmp_path / name)] for name in ("longer", "whole")]
    assert lr[0][3:] == lr[1][3:] and lr[0][-1] < 0.2e-3


def test_weights_of_other_classes_or_latents_are_named(seven, shapes, tmp_path):
    """facebookresearch/deit#130 and hustvl/LightningDiT#83, where nothing was said."""
    turned, scaled = (shutil.copytree(shapes, tmp_path / name) for name in ("turned", "scaled"))
    change_record(turned, class_names=json.loads((shapes / "metadata.json").read_text())["class_names"][::-1])
    change_record(scaled, scale=0.5)
    for i, (data, options, says) in enumerate((
            (turned, (), "cross is class 5 there and 0 here"), (scaled, (), "another scale."),
            (turned, ("new_label_table=true",), ""), (shapes, (), ""))):
        printed = trained(tmp_path / f"run{i}", data, *FEW, "steps=1", f"init_from={seven}", *options)
        assert says in printed and ("learn that anew" in printed) == bool(says)


# ---- what may change ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("was", "now", "changed"), [
    ({"log": {"every": 9}, "data": {"path": "a"}, "label_dropout": 0.5, "cpu": True},
     {"log": {"every": 1}, "data": {"path": "b"}, "label_dropout": 0.1, "cpu": False},
     ["label_dropout was 0.5 and is now 0.1"]),
    ({"steps": 3}, {"steps": 6}, []),
    ({"steps": 3, "optimizer": {"schedule": "cosine"}}, {"steps": 6, "optimizer": {"schedule": "cosine"}},
     ["steps was 3 and is now 6"]),
    ({}, {"optimizer": {"matrix_lr": 0.1}}, []),  # a setting that the record lacks
    ({"optimizer": {"betas": [0.5, 0.6]}, "samples": {"num_steps": 1}, "name": "a"},
     {"optimizer": {"betas": [0.5, 0.7]}, "samples": {"num_steps": 3}, "name": "b"},
     ["optimizer.betas was [0.5, 0.6] and is now [0.5, 0.7]"]),
])
def test_a_changed_setting_is_named_if_it_tells_runs_apart(was, now, changed):
    before = {"world": 1, "config": was, "route_schedule": {}}
    assert [*changed_settings(before, before | {"config": now}).values()] == changed
    assert changed_settings(before, before | {"world": 2}) == {"world": "world was 1 and is now 2"}


ALIGNED = {"name": "alignment", "block": 2, "weight": 0.5}


@pytest.mark.parametrize(("now", "words"), [
    ({}, None), ({"network": {"depth": 3, "routes": [], "selection": "grid"}}, None),
    ({"diffusion": {"name": "rf", "cosine_weight": 0.5}}, None),
    ({"diffusion": {"name": "rf", "timestep_sampling": "logit_normal", "shift": None}}, None),  # the defaults
    ({"diffusion": {"name": "rf", "shift": 2.0}},
     "another diffusion, so it cannot resume: it has {'shift': None}, this command {'shift': 2.0}"),
    ({"network": {"depth": 4}}, "another network"), ({"data": {"fingerprint": "b"}}, "another data set"),
    ({"objective": ALIGNED | {"weight": 0.1}}, None), ({"objective": ALIGNED | {"block": 3}}, "another objective"),
    ({"objective": {}}, "another objective"), ({"optimizer": "muon"}, "another optimizer"),
])
def test_a_change_of_what_is_trained_is_refused(tmp_path, now, words):
    record = {"network": {"depth": 3, "routes": []}, "diffusion": {"name": "rf"}, "data": {"fingerprint": "a"},
              "objective": ALIGNED, "optimizer": "adamw", "init_from": None}
    with contextlib.nullcontext() if words is None else pytest.raises(ValueError, match=words):
        check_resumable(record, record | now, tmp_path)
