"""Each extension of CONTRIBUTING.md is one file: it trains or samples or scores by its name, with its settings."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, run_command
from own_extensions import code_of, installed
from training_runs import assert_resumes, command

import blocks
import extensions
import fid
import sample
from dit import DiT
from edm import EDM
from objectives import DiffusionLoss
from weights import checkpoints
from weights.loading import load_trained


@pytest.fixture(scope="module", autouse=True)
def page(tmp_path_factory):
    with installed(tmp_path_factory.mktemp("extensions")):
        yield


def test_the_pages_block_trains_by_its_name_with_dits_sizes(shapes, tmp_path):
    project = tmp_path / "project"
    shutil.copytree(ROOT / "blocks", project / "blocks")
    (project / "blocks/parallel.py").write_text(code_of("blocks/parallel"))
    for path in ROOT.glob("[!_.]*"):
        if not (project / path.name).exists():
            (project / path.name).symlink_to(path)
    settings = command(tmp_path / "run", shapes, "steps=2", "model.backbone_type=parallel-S/2", "name=x")[1:]
    code = "import sys, train; sys.argv[0] = 'train.py'; train.main()"
    ended = subprocess.run([sys.executable, "-c", code, *settings], cwd=project, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    saved = checkpoints.read_meta(checkpoints.latest(tmp_path / "run"))
    assert (saved["network"]["block"], saved["step"], saved["network"]["patch_size"]) == ("parallel", 2, 2)


def test_the_pages_diffusion_trains_and_resumes_by_its_name_and_config(shapes, tmp_path, monkeypatch):
    configs = shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (configs / "diffusion/log_uniform.yaml").write_text("name: log_uniform\nlow: -4.0\nhigh: 2.0\n")
    monkeypatch.setattr("runtime.command.CONFIGS", configs)
    assert_resumes(tmp_path, shapes, "diffusion=log_uniform")
    diffusion = load_trained(tmp_path / "whole").diffusion
    assert type(diffusion).__name__ == "LogUniform" and diffusion.low == -4
    sigma = diffusion.draw(torch.zeros(4000, 3, 2, 2))[0].log()
    assert -4 <= sigma.min() < -3.9 and 1.9 < sigma.max() <= 2


@pytest.fixture(scope="module")
def run(shapes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    assert_resumes(folder, shapes, "diffusion=rf")
    return folder / "whole"


def test_the_pages_solver_guidance_and_metric_score_a_run_and_are_recorded(run, tmp_path):
    how = [f"checkpoint={run}", "num_steps=3", "cpu=true", "guidance=cfg", "scale=2", "+kind.name=rescaled",
           "+kind.share=0.5", "sampler.solver=midpoint", "+sampler.at=0.4"]
    run_command(sample.main, "sample.py", *how, "seeds=0-7", f"out={tmp_path}/x.npz")
    run_command(fid.main, "fid.py", *how, f"reference={tmp_path}/x.npz", "features=pixels", "num_samples=8", "seed=0",
                "metrics=[fd_pixels,mean_distance]", f"results={tmp_path}/results.jsonl")
    row = json.loads((tmp_path / "results.jsonl").read_text())
    assert row["source"]["sampler"] == {"solver": "midpoint", "at": 0.4} and row["source"]["evaluations"] == 12
    assert row["source"]["guidance"]["kind"] == {"name": "rescaled", "share": 0.5}
    assert row["metrics"] == pytest.approx({"fd_pixels": 0, "mean_distance": 0}, abs=1e-4)  # the same images


@pytest.mark.parametrize(("settings", "says"), [
    (["sampler.solver=midpont"], "midpont"),
    (["sampler.solver=midpoint", "+sampler.eta=1"], "The sampler of RF: There is no setting eta"),
    (["sampler.solver=midpoint", "+sampler.at=[1]"], "sampler of RF: at=.*valid number"),
    (["guidance=cfg", "scale=2", "+kind.name=resized"], "There is no guidances/resized.py; choose one of rescaled"),
    (["guidance=cfg", "scale=2", "+kind.name=rescaled", "+kind.share=x"], "kind: share=x: it should be a valid number"),
])
def test_settings_that_an_extension_lacks_or_of_another_type_are_refused(run, settings, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        sample.main(f"checkpoint={run}", "num_steps=2", "cpu=true", f"out={tmp_path}/x.png", *settings)


def test_help_lists_extensions_with_their_settings(capsys):
    fid.main("--help")
    printed = capsys.readouterr().out
    assert "solvers/: midpoint at=0.5" in printed and "metrics/: mean_distance" in printed


def test_a_file_that_declares_several_is_refused(tmp_path, monkeypatch):
    (tmp_path / "two.py").write_text("from blocks import Block\nclass A(Block): pass\nclass B(Block): pass")
    monkeypatch.setattr(blocks, "__path__", [str(tmp_path)])
    with pytest.raises(ValueError, match="blocks/two.py must declare one subclass of Block, and declares A, B: begin"):
        extensions.find("blocks", "two")


@pytest.mark.parametrize(("returned", "found"), [
    (lambda loss: loss, "one Tensor"), (lambda loss: (loss.mean(), {}), r"a loss of shape \(\)"),
    (lambda loss: (loss, {"other": loss}), "the terms other"),
])
def test_an_objective_that_returns_another_form_than_it_declares_is_refused(returned, found):
    class Odd(DiffusionLoss):
        def forward(self, x, y):
            return returned(super().forward(x, y)[0])

    net = DiT(input_size=8, in_channels=3, hidden_size=32, depth=2, num_heads=2, num_classes=5)
    with pytest.raises(ValueError, match=f"test_extensions.py: Odd returns .*{found}.*It must return"):
        Odd(net, EDM())(torch.randn(2, 3, 8, 8), torch.arange(2))
