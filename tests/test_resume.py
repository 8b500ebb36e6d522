"""Runs that are killed, interrupted, out of disk or damaged, and go on: nothing is lost, and nothing changes."""

import json
import os
import shutil
import signal

import forked
import pytest
from training_runs import (
    assert_same_end,
    command,
    rows,
    start,
    train,
    train_here,
    wait_until,
)

from runtime import files
from training.run_folder import check_resumable, discard_after
from weights import checkpoint as checkpoints

# train.py, which kills itself at the n-th call of a function: in the middle of a save, or at a step.
KILLED = """
import os, signal, sys
import train
from weights import checkpoint
name, number = sys.argv[1].split("=")
owner, calls = {"write": checkpoint.HashedFile, "close": checkpoint.HashedFile, "train_step": train}[name], []
whole = getattr(owner, name)
def killed(*arguments, **options):
    calls.append(1)
    if len(calls) == int(number):
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*arguments, **options)
setattr(owner, name, killed)
sys.argv = ["train.py", *sys.argv[2:]]
train.main()
"""


def test_a_run_that_is_killed_again_and_again_ends_bit_identical_to_one_that_was_not(shapes, reference, tmp_path):
    run, reached = tmp_path / "run", []
    for kill in ("close=2", "train_step=7", "write=99", "close=3", "train_step=1",
                 "close=5"):  # a save is three files, which are closed at its end
        killed = forked.run("-c", KILLED, kill, *command(run, shapes)[1:])
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        reached.append(len(checkpoints.all_steps(run)))
    assert reached == [0, 1, 1, 1, 1, 2] and list((run / "checkpoints").glob(".*.tmp"))
    result = train(run, shapes)
    assert result.returncode == 0 and "resuming" in result.stdout, result.stderr
    assert_same_end(run, reference)
    assert not list((run / "checkpoints").glob(".*.tmp"))


def test_a_signal_saves_and_exits_with_a_clear_line_and_the_run_resumes_unchanged(shapes, reference, tmp_path):
    run, number = tmp_path / "run", signal.SIGTERM
    process = start(run, shapes)
    wait_until(lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size > 0, process)
    os.killpg(process.pid, number)
    output = "".join(process.communicate())
    assert process.returncode == 128 + number
    assert f"Stopped by {number.name} at step" in output and "The same command resumes." in output
    assert "Traceback" not in output
    assert checkpoints.latest(run) is not None
    assert train(run, shapes).returncode == 0
    assert_same_end(run, reference)


def test_a_truncated_newest_checkpoint_is_named_and_the_run_resumes_from_the_previous_one(shapes, reference, tmp_path):
    run = tmp_path / "run"
    assert train(run, shapes, "steps=8").returncode == 0
    broken = run / "checkpoints/step-00000008/training.safetensors"
    broken.write_bytes(broken.read_bytes()[:-100])
    result = train(run, shapes)
    assert result.returncode == 0 and "step-00000008 is damaged" in result.stderr
    assert "resuming step-00000004" in result.stdout
    assert_same_end(run, reference)


@pytest.mark.parametrize("deleted", ["checkpoints", "checkpoints/*"])
def test_a_run_whose_checkpoints_were_deleted_keeps_its_record(shapes, tmp_path, deleted):
    options = ("steps=4", "samples.every=2", "samples.seeds=0-1", "samples.num_steps=1", "model.depth=3",
               "model.routes=[]")
    assert train_here(tmp_path / "run", shapes, *options).returncode == 0
    for folder in (tmp_path / "run").glob(deleted):
        shutil.rmtree(folder)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    result = train_here(tmp_path / "run", shapes, *options)
    assert result.returncode == 1 and "has recorded 4 steps and has no checkpoint" in result.stderr
    assert "name=<another>" in result.stderr
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_full_disk_ends_the_run_with_a_one_line_error_and_leaves_the_last_good_checkpoint(shapes, tmp_path):
    run = tmp_path / "run"
    assert train(run, shapes, "steps=4").returncode == 0
    good = checkpoints.latest(run)
    size = max(path.stat().st_size for path in good.iterdir())

    result = train(run, shapes, file_size=size // 2)  # no file may grow past half a checkpoint's
    assert result.returncode == 1 and "could not be written" in result.stderr and "MiB are free" in result.stderr
    assert checkpoints.latest(run) == good and [p.name for p in (run / "checkpoints").iterdir()] == [good.name]
    assert train(run, shapes, "steps=8").returncode == 0


def test_a_command_that_takes_no_step_changes_no_record(shapes, tmp_path):
    run = tmp_path / "run"
    assert train_here(run, shapes, "steps=8", "log.every=2").returncode == 0
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text()
                                       + '{"step": 9')  # of a row that a kill halved
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for code, says, options in (
            (0, "Finished 8 steps", ["optimizer.lr=0.5", "label_dropout=0.3", "log.every=1"]),
            (1, "more than steps=4", ["steps=4"]),
            (1, "another optimizer", ["optimizer=muon", "steps=12"]),
            (1, "could not start", ["steps=12", "log.trackers=[wandb]", "optimizer.lr=0.5"])):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("accelerate.Accelerator.init_trackers", lambda self, *args: 1 / bool(self.log_with == []))
            if "log.trackers=[wandb]" not in options:
                patched.undo()
            result = train_here(run, shapes, "steps=8", *options)
        assert result.returncode == code and says in result.stdout + result.stderr, result.stderr
        assert "Resuming with a change" not in result.stdout or options[0] == "steps=12"
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before, options


def contents(run) -> dict:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_command_that_takes_no_step_deletes_and_renames_no_checkpoint_and_no_row(shapes, reference, tmp_path):
    run = shutil.copytree(reference, tmp_path / "run")
    before = contents(run)
    assert train_here(run, shapes, "checkpoint.keep_last=1",
                      "checkpoint.every=1").returncode == 0 and contents(run) == before
    (run / "checkpoints/step-00000024/model.safetensors").write_bytes(b"")  # so that step 20 is the newest
    before = contents(run)
    assert train_here(run, shapes, "steps=20").returncode == 0 and contents(run) == before


def test_a_run_that_is_stopped_before_its_first_step_changes_no_record(shapes, reference, tmp_path, monkeypatch):
    run = shutil.copytree(reference, tmp_path / "run")
    (run / "checkpoints/step-00000024/model.safetensors").write_bytes(b"")
    before = contents(run)
    monkeypatch.setattr("runtime.ranks.StopRequest.agreed", lambda *_: signal.SIGTERM)
    result = train_here(run, shapes, "optimizer.lr=0.5", "steps=30")
    assert result.returncode == 143 and "Stopped by SIGTERM at step 20" in result.stdout and contents(run) == before


def test_every_changed_setting_that_changes_numbers_is_announced_and_no_other(shapes, tmp_path):
    def announced(*options):
        result = train_here(tmp_path / "run", shapes, "log.every=1", *options)
        assert result.returncode == 0, result.stderr
        return {line.split(": ")[1].split(". ")[0]
                for line in result.stdout.splitlines() if line.startswith("Resuming with a change: ")}

    kept = ("optimizer.lr=1e-3", "optimizer.betas=[0.5,0.6]", "optimizer.schedule=constant")
    assert announced("steps=1", *kept) == set()
    assert announced("steps=2", *kept, "checkpoint.every=2", "samples.num_steps=3", "max_skipped_in_row=7",
                     "name=other") == set()
    changed = {"optimizer.lr": 0.002, "optimizer.betas": [0.5, 0.7], "optimizer.eps": 1e-7,
               "optimizer.weight_decay": 0.1,
               "optimizer.clip_norm": 2.0, "optimizer.warmup_steps": 1, "label_dropout": 0.3, "ema.decay": 0.4,
               "grad_accum_steps": 2,
               "seed": 5, "batch_size": 4, "optimizer.schedule": "cosine"}
    said = announced("steps=4", *(f"{key}={value}" for key, value in changed.items()))
    assert {text.split(" was ")[0] for text in said} == {*changed}
    more = announced("steps=5", *(f"{key}={value}" for key, value in changed.items()))
    assert more == {"steps was 4 and is now 5"}  # where the cosine ends
    assert {"optimizer.lr was 0.001 and is now 0.002", "optimizer.betas was [0.5, 0.6] and is now [0.5, 0.7]",
            "seed was 0 and is now 5"} <= said


def test_a_grid_lost_to_a_kill_after_the_save_is_sampled_on_resume(shapes, tmp_path):
    options = ("steps=4", "samples.every=4", "samples.seeds=0-5", "samples.num_steps=2")
    assert train(tmp_path / "run", shapes, *options).returncode == 0
    grid = tmp_path / "run/samples/step-00000004.png"
    drawn = grid.read_bytes()
    grid.unlink()
    assert train(tmp_path / "run", shapes, *options).returncode == 0
    assert grid.read_bytes() == drawn


def test_leftovers_of_a_killed_save_or_grid_are_removed_on_the_next_start(shapes, tmp_path):
    run = tmp_path / "run"
    assert train_here(run, shapes, "steps=8", "checkpoint.keep_last=1").returncode == 0
    older = shutil.copytree(checkpoints.latest(run), tmp_path / "older")
    checkpoints.write_meta(older, checkpoints.read_meta(older) | {"step": 4})
    older.rename(run / "checkpoints/step-00000004")
    left = [run / ".metrics.jsonl.1.tmp", run / "samples/.step-00000004.png.1.tmp",
            run / "checkpoints/.step-00000004.tmp"]
    for file in left:
        file.write_text("")
    assert train_here(run, shapes, "steps=8").returncode == 0
    assert [path.name for path in checkpoints.all_steps(run)] == ["step-00000008"] and not any(file.exists()
                                                                                               for file in left)


def test_a_resumed_run_knows_its_lowest_loss(shapes, tmp_path):
    for more in (["steps=3"], ["steps=6", "optimizer.lr=0.5"]):
        assert train_here(tmp_path, shapes, "optimizer.warmup_steps=0", "checkpoint.every=3", *more).returncode == 0
    assert rows(tmp_path)[-1]["loss"] > 1000 and rows(tmp_path)[-1]["skipped"] == 0
    assert [checkpoints.is_sound(folder) for folder in checkpoints.all_steps(tmp_path)] == [True, False]


def test_a_row_truncated_by_a_kill_costs_no_other_row(tmp_path):
    results = [{"source": {"in_training": True, "step": step}, "metrics": {}} for step in (0, 10, 20)]
    text = "".join(json.dumps(row) + "\n" for row in results)
    (tmp_path / "results.jsonl").write_text(text[:30] + "\n"
                                            + text[:-1])  # a half row, and a last one without its newline
    (tmp_path / "metrics.jsonl").write_text('{"step": 10}\n{"step": 20}\n{"st')  # and others' rows stay
    discard_after(tmp_path, 20)
    assert files.read_rows(tmp_path / "results.jsonl") == results
    discard_after(tmp_path, 10)
    assert files.read_rows(tmp_path / "results.jsonl") == results[:2]
    assert files.read_rows(tmp_path / "metrics.jsonl") == [{"step": 10}]


def test_another_data_set_is_refused_and_the_same_one_elsewhere_is_not(shapes, reference, tmp_path):
    moved = shutil.copytree(shapes, tmp_path / "moved")
    assert train(reference, moved).returncode == 0
    other = tmp_path / "other"
    prepared = forked.run("scripts/prepare_latents.py", "source=shapes", "shapes.count=60", "resolution=16",
                          "autoencoder=identity", f"out={other}")
    assert prepared.returncode == 0, prepared.stderr
    result = train(reference, other)
    assert result.returncode == 1 and "another data set" in result.stderr


def test_two_processes_cannot_train_one_run(shapes, tmp_path):
    run = tmp_path / "run"
    first = start(run, shapes, "steps=100000")
    wait_until(lambda: (run / "metrics.jsonl").is_file(), first)
    second = train(run, shapes)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert second.returncode == 1 and "Another process is training" in second.stderr


RECORD = {"network": {"depth": 3, "routes": []}, "diffusion": {"name": "rf"}, "data": {"fingerprint": "a"}, "world": 1,
          "seed": 0, "batch_size": 8}


def test_a_change_of_selection_is_announced_and_the_run_continues(tmp_path):
    now = {**RECORD, "network": {**RECORD["network"], "selection": "l1", "l1_reg": 0.5, "inverse": False}}
    assert check_resumable(RECORD, RECORD, tmp_path) == []
    assert check_resumable(RECORD, now, tmp_path) == ["selection was random and is now l1"]


def test_a_setting_of_a_diffusion_that_is_newer_than_the_run_has_its_default_there(tmp_path):
    now = {**RECORD,
           "diffusion": {"name": "rf", "timestep_sampling": "logit_normal", "shift": None, "contrastive_weight": 0.0}}
    assert check_resumable(RECORD, now, tmp_path) == []
    with pytest.raises(ValueError,
                       match="another diffusion, so it cannot resume: it has {'shift': None}, this command {'shift': "
                             "2.0}"):
        check_resumable(RECORD, {**RECORD, "diffusion": {"name": "rf", "shift": 2.0}}, tmp_path)


@pytest.mark.parametrize(("part", "was", "is_now"), [
    ({"objective": {"internal": {"weight": 0.5}}}, "objective.internal.weight was 0.5", "0.1"),
    ({"diffusion": {"name": "rf", "contrastive_weight": 0.5}}, "diffusion.contrastive_weight was 0.5", "0.1"),
    ({"config": {"optimizer": {"matrix_lr": 0.5, "momentum": 0.9}, "ema": {"warmup": True}}},
     "optimizer.matrix_lr was 0.5", "0.1"),
    ({"config": {"precision": "fp16", "log": {"every": 0.5}, "data": {"scale": 0.5, "path": "a"}}},
     "data.scale was 0.5", "0.1")])
def test_weights_of_terms_and_settings_of_any_group_are_announced(tmp_path, part, was, is_now):
    other = json.loads(json.dumps(part).replace("0.5", is_now))
    assert check_resumable(RECORD | part, RECORD | other, tmp_path) == [f"{was} and is now {is_now}"]
    assert check_resumable(RECORD, RECORD | {"config": other.get("config", {})},
                           tmp_path) == []  # of a version that recorded none


def test_compiled_training_resumes_bit_identical_and_compiles_once(shapes, tmp_path, graphs):
    options = ("compile=true", "model.depth=2",
               "model.routes=[{start_layer_idx: 1, end_layer_idx: 1, selection_ratio: 0.5}]",
               "checkpoint.every=2", "log.every=2")
    result = train_here(tmp_path / "whole", shapes, "steps=4", *options)
    assert result.returncode == 0 and graphs.frame_count == 2, result.stderr
    assert not any("_orig_mod" in key for key in checkpoints.load(checkpoints.latest(tmp_path / "whole"), "model"))
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts/checkpoints/step-00000004")  # as if killed after step 2
    assert "resuming step-00000002" in train_here(tmp_path / "parts", shapes, "steps=4", *options).stdout
    assert_same_end(tmp_path / "parts", tmp_path / "whole")
