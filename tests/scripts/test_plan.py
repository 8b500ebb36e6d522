"""The plan's hours, and the official step against ours."""

import json
import sys

import pytest
from accelerate import Accelerator
from conftest import ROOT
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode

import dit
from runtime.schema import read
from scripts import clocks, plan
from scripts.studies import benchmark_official


def printed(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["plan.py", *map(str, arguments)])
    plan.main()
    return capsys.readouterr().out


def test_the_tables_of_the_page_are_what_the_command_prints(monkeypatch, capsys):
    monkeypatch.setattr(plan, "encoder_flops", lambda: 0)  # imports diffusers
    page = (ROOT / "docs/imagenet.md").read_text()
    rows = [line for line in printed(monkeypatch, capsys).splitlines() if line.startswith("| ")]
    assert len(rows) == 16 and all(row in page for row in rows)


def test_hours_follow_from_the_count_or_from_what_was_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(plan, "encoder_flops", lambda: 0)
    dense = 6 * sum(dit.multiply_adds(plan.network("B", False)))
    assert abs(dense / 138e9 - 1) < 0.01
    derived = printed(monkeypatch, capsys, "--mfu", 0.5, "--peak", 100)
    assert f"| {400_000 * 256 * dense / 50e12 / 3600:,.1f} |" in derived
    (tmp_path / "b2.json").write_text(json.dumps({"settings": {"backbone_type": "DiT-B/2"}, "device": "X100", "rows": [
        {"variant": "tread", "tokens": 256, "images/s": 4000.0, "ranks": 2}, {"variant": "tread-eager", "tokens": 256, "images/s": 1.0, "ranks": 1}]}))
    [row] = [line for line in printed(monkeypatch, capsys, "--measured", tmp_path / "b2.json").splitlines() if "measured" in line]
    assert row.startswith("| B/2 TREAD |") and "| 2,000 | 14.2 | 1.9 |" in row and "X100" in row
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(SystemExit, match="other.json times no DiT of patch 2"):
        printed(monkeypatch, capsys, "--measured", tmp_path / "other.json")


def test_the_memory_of_the_pages_is_what_the_command_prints(monkeypatch, capsys):
    monkeypatch.setattr(plan, "SIZES", ("S",))
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("training.md", "reliability.md"))
    rows = [line for line in printed(monkeypatch, capsys, "--memory").splitlines() if line.startswith("| ")]
    assert len(rows) == 9 and all(row in pages for row in rows)


@pytest.mark.parametrize("routed", [False, True])
def test_activations_counted_by_shapes_are_those_of_a_real_pass(routed):
    with FakeTensorMode():
        counted = plan.activation_bytes("S", 256, routed, batch=2)
    assert counted == plan.activation_bytes("S", 256, routed, batch=2)


# A stand-in for the official code: the names that are called, and nothing of what they do there.
THEIRS = {
    "dit.py": """
import torch
from routing_module import Router
class DiT(torch.nn.Module):
    def __init__(self, **given):
        super().__init__()
        self.given, self.router, self.scale = given, Router(), torch.nn.Parameter(torch.ones(()))
""",
    "routing_module.py": "class Router: official = True\n",
    "edm.py": """
import torch
from utils.edm_helper import *
from autoencoder import SDVAE_EMA
class EDMDiffusion(torch.nn.Module):
    def wrap_model_with_precond(self, model):
        return model
    def get_training_loss(self, net, x, y, class_drop_prob):
        assert class_drop_prob == 0.1 and net.training
        return (x - net.scale) ** 2
""",
    "utils/train_helper.py": """
def requires_grad(model, flag):
    for p in model.parameters(): p.requires_grad = flag
def update_ema(ema, model):
    ema.steps = getattr(ema, "steps", 0) + 1
""",
}


@pytest.fixture
def theirs(tmp_path):
    for name, text in THEIRS.items():
        (tmp_path / "official" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "official" / name).write_text(text)
    return tmp_path / "official"


def test_the_official_modules_are_theirs_and_ours_stay_ours(theirs, monkeypatch):
    before = {name: sys.modules.get(name) for name in ("dit", "edm", "routing_module", "utils", "autoencoder")}
    network, *_ = benchmark_official.open_official(str(theirs))
    assert network.DiT is not dit.DiT and network.Router.official and network.__file__.startswith(str(theirs))
    assert {name: sys.modules.get(name) for name in before} == before and str(theirs) not in sys.path
    with pytest.raises(ValueError, match="path=null: give a checkout of github.com/CompVis/tread at fccf77c"):
        benchmark_official.open_official(None)
    (theirs / "edm.py").unlink()
    with pytest.raises(ValueError, match="lacks edm.py: give a checkout"):
        benchmark_official.open_official(str(theirs))


def test_both_steps_are_timed_in_turns_on_the_same_network(theirs, fresh_accelerator, monkeypatch):
    given = [f"path={theirs}", "hidden_size=32", "depth=6", "num_heads=2", "tokens=16", "in_channels=3", "batch_size=4", "rounds=2", "steps=1",
             "warmup=0", "num_latents=16", "device=cpu", "variants=[tread-eager]"]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        plain = OmegaConf.to_container(compose("benchmark_official", overrides=given), resolve=True)
    made, make = [], benchmark_official.OfficialVariant
    monkeypatch.setattr(benchmark_official, "OfficialVariant", lambda *arguments: made.append(make(*arguments)) or made[-1])
    monkeypatch.setitem(clocks.SQUARES, "cpu", (32,))
    rows = benchmark_official.time_both(read(benchmark_official.OfficialSettings, plain), Accelerator(cpu=True))
    assert [row["variant"] for row in rows] == ["tread-eager", "official tread-eager"] and rows[1]["over official"] == 1
    assert all(len(row["rounds s/step"]) == 2 and row["s/step"] > 0 for row in rows)
    [official] = made
    assert official.ema.steps == 1 + 2 and official.net.given["routes"] == [
        {"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": 2}]
    assert (official.net.given["input_size"], official.net.given["hidden_size"], official.net.given["depth"]) == (8, 32, 6)
