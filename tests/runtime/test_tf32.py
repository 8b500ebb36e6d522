"""How float32 is multiplied is set in the same way by every command and recorded with every result."""

import ast
import functools
import json
import zipfile

import numpy as np
import pytest
import torch
from conftest import ROOT, run_command
from PIL import Image
from training_runs import train_here

import fid
import sample
from runtime import device
from runtime.device import describe_device, set_float32
from scripts import benchmark, prepare_latents
from training import run as run_parts
from training import speed

PROGRAMS = sorted([*ROOT.glob("*.py"), *(ROOT / "scripts").glob("*.py"), *(ROOT / "scripts/studies").glob("*.py")])


@functools.cache
def commands() -> dict[str, tuple[str, str]]:
    """Config and declared settings of every function that is a command, by config; with its file."""
    found = {}
    for file in PROGRAMS:
        for node in ast.walk(ast.parse(file.read_text())):
            for call in getattr(node, "decorator_list", []):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "command":
                    found[call.args[0].value] = (file, call.args[1].id)
    return found


def test_every_yaml_is_the_config_of_a_command_or_part_of_one():
    names = {file.stem for file in (ROOT / "configs").glob("*.yaml")}
    assert names - {"sampling"} == set(commands())


@pytest.mark.parametrize("tf32", [True, False])
def test_the_setting_reaches_matrix_products_and_convolutions_and_the_record(tf32, monkeypatch):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        set_float32(tf32)
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
        assert torch.backends.cudnn.allow_tf32 is tf32
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        assert describe_device(torch.device("cuda")) == {"device": "a GPU", "tf32": tf32}
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))  # T4 and older have none
        assert describe_device(torch.device("cuda")) == {"device": "a GPU", "tf32": False}
        assert describe_device(torch.device("cpu")) == {"device": "cpu", "tf32": False}
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_every_command_sets_it_and_every_result_says_it(shapes, tmp_path, monkeypatch):
    for module in (device, run_parts, benchmark):
        monkeypatch.setattr(module, "multiplies_in_tf32", lambda device: "said")
    asked = []
    for module in (device, speed):
        monkeypatch.setattr(module, "set_float32", asked.append)
    run = tmp_path / "run"
    result = train_here(run, shapes, "steps=1", "model.depth=3", "model.routes=[]", "compile=false", "samples.every=1",
                        "samples.seeds=0-1", "samples.num_steps=1", "tf32=false")
    assert result.returncode == 0, result.stderr
    assert json.loads((run / "checkpoints/step-00000001/meta.json").read_text())["history"][0]["tf32"] == "said"
    assert json.loads(Image.open(run / "samples/step-00000001.png").text["sampling"])["tf32"] == "said"
    sampling = {"checkpoint": run, "cpu": True, "tf32": False, "num_steps": 1, "seeds": "0-3"}
    for out in ("grid.png", "images.npz", "folder"):
        run_command(sample.main, "sample.py", **sampling, out=tmp_path / out)
    assert json.loads(Image.open(tmp_path / "grid.png").text["sampling"])["tf32"] == "said"
    assert json.loads(Image.open(next((tmp_path / "folder").iterdir())).text["sampling"])["tf32"] == "said"
    with zipfile.ZipFile(tmp_path / "images.npz") as archive:
        assert json.loads(archive.comment)["tf32"] == "said"
    assert len(np.load(tmp_path / "images.npz")["arr_0"]) == 4
    run_command(prepare_latents.main, "prepare_latents.py", "source=shapes", "shapes.count=8",
                f"out={tmp_path}/latents", "tf32=false")
    assert json.loads((tmp_path / "latents/metadata.json").read_text())["tf32"] == "said"
    run_command(fid.main, "fid.py", f"reference_from={shapes}", "features=pixels", f"out={tmp_path}/reference.npz",
                "cpu=true", "tf32=false")
    run_command(fid.main, "fid.py", f"images={shapes}", f"reference={tmp_path}/reference.npz", "features=pixels",
                "cpu=true", "num_samples=8", "tf32=false", f"results={tmp_path}/results.jsonl")
    assert json.loads((tmp_path / "results.jsonl").read_text())["tf32"] == "said"
    assert asked == 7 * [False]  # training, three commands that sample, a preparation, a reference and its scores
    accelerator = type("Accelerator", (), {"device": torch.device("cpu"), "num_processes": 1})
    assert benchmark.describe(benchmark.BenchmarkSettings.model_construct(mode="train"), accelerator)["tf32"] == "said"
