"""Small training runs for tests, in this process, and how they are compared."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import torch
from conftest import last_of_each, run_command
from safetensors.torch import load_file

from train import main
from weights import checkpoints
from weights.records import build_network

TIMINGS = ("img_per_sec", "sec_per_step", "peak_memory_gib", "elapsed_s")


def command(run: Path, data: Path, *overrides) -> list[str]:
    return ["train.py", *last_of_each([
        "experiment=quickstart", f"run_dir={run}", f"data.path={data}", "batch_size=8", "model.hidden_size=32",
        "model.num_heads=2", "model.depth=6", "samples.every=0", "log.every=3", "checkpoint.every=4", "steps=24",
        "log.trackers=[]", *overrides])]


def train_here(run, data, *overrides) -> SimpleNamespace:
    """Trains in this process, without the seconds that imports take."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # which keeps the first precision of a process
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            run_command(main, *command(run, data, *overrides))
        except SystemExit as stop:
            code, message = (stop.code, "") if isinstance(stop.code, int) else (1, str(stop.code))
            stderr.write(message)
    AcceleratorState._reset_state(reset_partial_state=True)
    return SimpleNamespace(returncode=code, stdout=stdout.getvalue(), stderr=stderr.getvalue())


def trained(run, data, *overrides) -> str:
    """Trains here until the end; returns what it has printed."""
    result = train_here(run, data, *overrides)
    assert result.returncode == 0, result.stderr
    return result.stdout


def refusal(run, data, *overrides) -> str:
    """Trains here until the error in which it must end; returns what it has printed on stderr."""
    result = train_here(run, data, *overrides)
    assert result.returncode == 1, result.stdout
    return result.stderr


def assert_resumes(place: Path, data, *overrides, stop: int = 2, end: int = 4) -> str:
    """Trains `whole` in a folder, and `parts` from a copy killed after a step; both must be equal to the last bit.

    Returns what the last command has printed.
    """
    often = ("checkpoint.every=1", "checkpoint.keep_last=9", f"steps={end}")
    trained(place / "whole", data, *overrides, *often)
    killed(place / "whole", stop, place / "parts")
    printed = trained(place / "parts", data, *overrides, *often)
    assert f"resuming step-{stop:08d}" in printed
    assert_same_end(place / "parts", place / "whole")
    return printed


def killed(run: Path, step: int, folder: Path) -> Path:
    """Copies a run to another folder as it was when it was killed after `step`."""
    shutil.copytree(run, folder)
    for later in checkpoints.all_steps(folder):
        if checkpoints.step_of(later) > step:
            shutil.rmtree(later)
    return folder


def end_of(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Loads the weights, the average and the training state of a run's last checkpoint."""
    return {name: checkpoints.load(checkpoints.latest(run), name) for name in ("model", "ema", "training")}


def write_run(folder: Path, network: dict, step: int = 1, diffusion: dict | None = None, **data) -> Path:
    """Writes a checkpoint of an untrained network of pixels, whose seed is the step, and returns the run."""
    torch.manual_seed(step)
    state = build_network(network).state_dict()
    meta = {"step": step, "network": network, "diffusion": diffusion or {"name": "edm"}, "null_label": True,
            "sound": True,
            "data": {"autoencoder": "identity", "convention": {"scale": 1.0, "shift": 0.0}, "class_names": None,
                     "display_names": None, "classes": None} | data}
    checkpoints.save(checkpoints.step_folder(folder, step), {"ema": state, "model": state}, meta)
    return folder


def rows(run: Path) -> list[dict]:
    """The rows of metrics.jsonl without what depends on the clock."""
    return [{k: v for k, v in json.loads(line).items() if k not in TIMINGS}
            for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same_end(run: Path, reference: Path):
    """Weights, averages, optimizer and metrics are equal to the last bit."""
    ends = [checkpoints.latest(folder) for folder in (run, reference)]
    assert ends[0].name == ends[1].name
    files = [sorted(path.name for path in end.glob("*.safetensors")) for end in ends]
    assert files[0] == files[1]
    for name in files[0]:
        one, other = (load_file(end / name) for end in ends)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one), name
    assert rows(run) == rows(reference)
