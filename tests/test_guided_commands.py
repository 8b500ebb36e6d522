"""rf.py, sample.py and fid.py take the same guidance; what it costs is what torch's flop counter says."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from conftest import run_command
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from training_runs import write_run

import fid
from dit import DiT_models, multiply_adds
from edm import EDM
from guidance import Guidance
from rf import RF, sample_tread
from routing_module import Route
from runtime import files
from sampling.generate import SeededNoise
from sampling.grids import compare_guided
from sampling.pictures import draw_grid
from sampling.sampler import Sampler
from weights.loading import load_trained
from weights.records import build_network

NETWORK = dict(input_size=16, patch_size=4, in_channels=3, hidden_size=32, depth=5, num_heads=2, num_classes=3,
               routes=[dict(selection_ratio=0.5, start_layer_idx=1, end_layer_idx=3)], init="xavier")
score = partial(run_command, fid.main, "fid.py", "cpu=true")
write_flow = partial(write_run, network=NETWORK, diffusion={"name": "rf"}, class_names=["ant", "bee", "cat"])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_flow(tmp_path_factory.mktemp("runs") / "flow", step=5)


def test_rf_samples_sample_treads_images_guided_and_unguided_one_row_per_class(run, tmp_path, capsys):
    run_command(compare_guided, "rf.py", "cpu=true", f"checkpoint={run}", "guidance=tread", "gamma1=0.3", "gamma2=0.7",
                "scale=1.8", "num_steps=4", "seeds=0-23", f"out={tmp_path}/g.png")
    trained, seeds = load_trained(run), list(range(24))  # eight a class
    y = torch.tensor([seed % 3 for seed in seeds])
    noise = SeededNoise(seeds, "cpu").randn((3, 16, 16))
    for file, latents in (("g.png", sample_tread(trained.net, 0.3, trained.net, 0.7, noise, y, num_steps=4, scale=1.8)),
                          ("g-unguided.png", RF().sample(trained.net, noise, y, num_steps=4))):
        images = (127.5 * latents + 128).clamp(0, 255).byte().permute(0, 2, 3, 1)
        expected = np.asarray(draw_grid(images, y.tolist(), ["ant", "bee", "cat"])).astype(int)
        assert np.abs(np.asarray(Image.open(tmp_path / file)).astype(int) - expected).max() <= 1, file
    assert capsys.readouterr().out == f"{tmp_path}/g.png\n{tmp_path}/g-unguided.png\n"


@pytest.mark.parametrize(("diffusion", "settings"), [
    (EDM(), None), (RF(), dict(scale=2)), (EDM(), dict(scale=2, gamma1=0.25, gamma2=0.75, drop_label=False)),
    (EDM(), dict(scale=2, gamma1=(0.0, 0.5), gamma2=(0.75, 0.0))), (RF(), dict(scale=2, interval=(0.1, 0.6))),
    (RF(), dict(scale=1, gamma2=0.5)),
    (RF(), "weak network"),
])
def test_the_cost_of_sampling_is_what_torchs_flop_counter_sees(diffusion, settings):
    net, other = build_network(NETWORK), build_network(NETWORK | {"hidden_size": 16, "depth": 4})
    settings = dict(scale=2, drop_label=False, net2=other) if settings == "weak network" else settings
    guidance = settings and Guidance(**settings)
    linear, attention = Sampler(diffusion, 5, guidance).cost(net)
    # The counter does not know the CPU's fused attention.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        diffusion.sample(net, torch.randn(2, 3, 16, 16), torch.tensor([0, 1]), num_steps=5, guidance=guidance)
    assert counter.get_total_flops() == 2 * 2 * (linear + attention)  # two images, two FLOPs a multiply-add
    assert 0 < attention < linear


def test_the_published_costs_come_out_at_256_tokens():
    with torch.device("meta"):
        net = DiT_models["DiT-XL/2"](routes=[Route(2, -4, 0.5)])
    linear, attention = multiply_adds(net)
    assert (round(linear / 1e9, 1), round((linear + attention) / 1e9, 1)) == (114.4, 118.6)

    def an_evaluation(**settings):
        return Sampler(RF(), 1, Guidance(scale=1.5, **settings)).cost(net)[0] / 1e9

    assert round(an_evaluation(), 1) == 228.8
    assert abs(an_evaluation(gamma1=0.5, gamma2=0.9, drop_label=False) - 97.7) < 0.06


def test_scores_say_how_they_were_guided(run, pixel_reference, tmp_path):
    weak = write_flow(tmp_path / "weak", step=6)
    results, folder = tmp_path / "results.jsonl", weak / "checkpoints/step-00000006"
    for overrides in ([], ["guidance=tread", "gamma2=[0.9,0.5]"], ["guidance=autoguidance", f"weak={weak}"]):
        score(f"checkpoint={run}", f"reference={pixel_reference}", "features=pixels", "num_samples=6", "num_steps=2",
              f"results={results}", *overrides)
    rows = files.read_rows(results)
    plain, tread, auto = (row["source"] for row in rows)
    assert (plain["guidance"], plain["sampler"]) == (None, {"solver": "euler"})
    assert tread["guidance"] == {"scale": 1.5, "gamma1": 0.5, "gamma2": [0.9, 0.5], "drop_label": False,
                                 "interval": None, "routes": None, "weak": None}
    assert auto["guidance"]["weak"] == {"checkpoint": str(folder), "step": 6,
                                        "weights_sha256": files.sha256(folder / "ema.safetensors")}
    assert [row["evaluations"] for row in (plain, tread, auto)] == [2, 3, 4]    # one pass where the ratios meet
    assert len({row["metrics"]["fd_pixels"] for row in rows}) == 3
    linear, attention = multiply_adds(load_trained(run).net)
    assert plain["multiply_adds"] == {"linear": 2 * linear, "attention": 2 * attention}


def test_several_scales_and_ratios_are_scored_by_one_command_and_those_that_are_scored_skipped(
    run, pixel_reference, tmp_path, monkeypatch, capsys,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("scoring.results.commit", lambda: "abc")
    results = tmp_path / "run/results.jsonl"
    sweep = ["--multirun", f"checkpoint={shutil.copytree(run, tmp_path / 'run')}", f"reference={pixel_reference}",
             "features=pixels", "num_samples=6", "num_steps=2", "guidance=tread", "gamma1=0", "scale=1.5,2",
             "gamma2=0.5,[0.9,0.3]"]
    score(*sweep)
    rows = files.read_rows(results)
    results.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))  # as if killed in the last score
    capsys.readouterr()
    score(*sweep)
    again = files.read_rows(results)
    assert again[:3] == rows[:3] and [row["metrics"] for row in again] == [row["metrics"] for row in rows]
    assert capsys.readouterr().out.count(f"scored before, in {results}. To score them again, set tag=<another>") == 3
    monkeypatch.setattr("scoring.results.commit", lambda: "abc-dirty")  # the code may be another each time
    for _ in range(2):
        score(*sweep[1:-2], "scale=2", "gamma2=0.5")
    assert len(files.read_rows(results)) == 6
    points = [(row["source"]["guidance"]["scale"], row["source"]["guidance"]["gamma2"]) for row in rows]
    assert points == [(1.5, 0.5), (1.5, [0.9, 0.3]), (2, 0.5), (2, [0.9, 0.3])]
    assert {path.name for path in tmp_path.iterdir()} == {"run"}, "Hydra leaves no folder"
