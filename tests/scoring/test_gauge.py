"""Images are sampled as published ones, by a gauge or a run's metadata, and only then are scores compared."""

import json

import numpy as np
import pytest
import torch
from conftest import ROOT, one_rank, run_command, save_vae
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from training_runs import train_here

import fid
from dit import DiT_models
from guidance import Guidance
from runtime import files
from runtime.schema import read
from sampling.checks import sampler_settings
from scoring.image_sets import SampledImages
from scoring.results import Published
from weights import checkpoint as checkpoints
from weights.loading import load_trained
from weights.records import build_diffusion, build_network

GAUGES = sorted(path.stem for path in (ROOT / "configs" / "gauge").glob("*.yaml") if path.stem != "none")
# How the authors' own commands and code sample: whose, solver, steps, scale, channels, interval (t, noise at 1).
PUBLISHED_COMMANDS = {
    "dit_xl2": ("dit", "ancestral", 250, 1.5, 3, None),
    "dit_xl2_unguided": ("dit", "ancestral", 250, None, None, None),
    "sit_xl2_sde": ("sit", "euler_maruyama", 250, 1.5, 3, None),
    "sit_xl2_ode": ("sit", "heun", 125, 1.5, 3, None),  # theirs: dopri5
    "repa_xl2": ("repa", "euler_maruyama", 250, 1.8, None, [0.0, 0.7]),
    "lightningdit_xl1": ("lightning", "euler", 249, 6.7, 3, [0.0, 0.875]),
}
DRAWN = [name for name in GAUGES if not name.startswith("adm")]


def settings_of(gauge):
    """The settings with which a gauge samples."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("fid", overrides=[f"gauge={gauge}", "checkpoint=x", "reference=x"])
    return fid.as_published(read(fid.ScoringSettings, OmegaConf.to_container(cfg, resolve=True)), None)


@pytest.mark.parametrize("gauge", GAUGES)
def test_a_gauge_has_five_published_scores_with_their_tolerance(gauge):
    published = settings_of(gauge).published
    metrics = {"fid", "sfid", "inception_score", "precision", "recall"}
    assert {*published.scores} == {*published.tolerance} == metrics and published.where
    assert all(0 < published.tolerance[name] < 0.1 * published.scores[name] for name in metrics)
    assert settings_of(gauge).num_samples == 50_000


@pytest.mark.parametrize("gauge", DRAWN)
def test_the_hours_at_the_head_of_a_gauge_are_computed(gauge):
    cfg = settings_of(gauge)
    with torch.device("meta"):
        net = DiT_models["LightningDiT-XL/1" if "lightning" in gauge else "DiT-XL/2"](
            learn_sigma=gauge.startswith("dit"),
            **(dict(input_size=16, in_channels=32) if "lightning" in gauge else {}))
    diffusion = build_diffusion({"name": "ddpm" if gauge.startswith("dit") else "rf"})
    guidance = cfg.scale and Guidance(cfg.scale, interval=cfg.interval, channels=cfg.channels)
    sampled = SampledImages(one_rank(), net, diffusion, None, [0], [0], batch_size=1, num_steps=cfg.num_steps,
                            guidance=guidance, sampler=cfg.sampler.model_dump())
    hours = f"{fid.derived_hours(sampled.record, cfg.num_samples, cfg.precision):.2g}"
    text = (ROOT / "configs" / "gauge" / f"{gauge}.yaml").read_text()
    assert f"# {hours} hours of one H100 [derived: fid.py prints it]" in text, hours


def small_weights(gauge, path):
    """A file with the keys of the published one and random numbers, its form as published."""
    block = "lightning" if "lightning" in gauge else "dit"
    torch.manual_seed(0)
    net = build_network(dict(input_size=8, patch_size=2, in_channels=4, hidden_size=32, depth=2, num_heads=2,
                             num_classes=1000, init="xavier", block=block,
                             learn_sigma=gauge.startswith(("dit", "sit"))))
    state = net.state_dict()
    if "lightning" in gauge:
        state = {f"module.{name}": value for name, value in state.items()}
        state["module.feat_rope.freqs_cos"] = torch.zeros(16, 16)
    if "repa" in gauge:
        state |= {f"projectors.0.{i}.weight": torch.zeros(4, 4) for i in (0, 2, 4)}
    torch.save({"ema": state} if "lightning" in gauge or "repa" in gauge else state, path)
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny autoencoder and a reference of random images."""
    folder = tmp_path_factory.mktemp("gauge")
    save_vae(folder / "vae")
    np.savez(folder / "images.npz", arr_0=np.random.default_rng(0).integers(0, 256, (8, 16, 16, 3), dtype=np.uint8))
    return folder


@pytest.mark.parametrize("gauge", DRAWN)
def test_a_gauge_runs_on_random_weights_of_the_same_keys(gauge, place, tmp_path, capsys):
    weights, cfg = small_weights(gauge, tmp_path / "weights.pt"), settings_of(gauge)
    given = [f"gauge={gauge}", f"checkpoint={weights}", f"reference={place}/images.npz", f"autoencoder={place}/vae",
             "features=pixels", "num_heads=2", "cpu=true", f"results={tmp_path}/results.jsonl"]
    run_command(fid.main, "fid.py", *given, "num_samples=4", "num_steps=5")
    said = capsys.readouterr().out
    assert "hours of one H100 [derived" in said and "not compared, as the images were sampled differently" in said
    assert str(cfg.published.scores["fid"]) not in said
    [row] = files.read_rows(tmp_path / "results.jsonl")
    source = row["source"]
    assert row["published"] is None
    if gauge == DRAWN[0]:
        run_command(fid.main, "fid.py", *given, "+published.num_samples=4",
                    "published.num_steps=5")  # as if theirs were so
        assert f"{cfg.published.scores['fid']} ± " in capsys.readouterr().out
        other = files.read_rows(tmp_path / "results.jsonl")[-1]
        assert other["source"] == source and other["published"]["scores"] == cfg.published.scores
    guidance = source["guidance"] or {}
    drawn = (source["family"], source["sampler"]["solver"], cfg.num_steps,
             *(guidance.get(key) for key in ("scale", "channels", "interval")))
    assert drawn == PUBLISHED_COMMANDS[gauge] and source["precision"] == source["decode_precision"] == "fp32"


@pytest.mark.parametrize("gauge", [name for name in GAUGES if name not in DRAWN])
def test_published_images_need_no_network(gauge, place, tmp_path, capsys):
    run_command(fid.main, "fid.py", f"gauge={gauge}", f"images={place}/images.npz", f"reference={place}/images.npz",
                "features=pixels", "+published.num_samples=8", "cpu=true", f"results={tmp_path}/results.jsonl")
    assert "not measured" in capsys.readouterr().out


@pytest.mark.parametrize(("ours", "says"),
                         [((2.38, 0.509), ["OUTSIDE", "within"]), ((2.18, 0.489), ["within", "OUTSIDE"]),
                          ((2.16, 0.511), ["OUTSIDE", "OUTSIDE"])])
def test_a_score_above_or_below_its_tolerance_is_said(ours, says):
    published = Published(where="X", scores={"fid": 2.27, "recall": 0.5}, tolerance={"fid": 0.1, "recall": 0.01})
    said = fid.compare_published({"metrics": dict(zip(("fid", "recall"), ours, strict=True)), "published": {}},
                                 published)
    assert [line.split()[-1] for line in said.splitlines()[2:]] == says


def test_lightningdits_points_of_time_are_ours():
    """Its code takes t = 0 … 1 at 250 points, 0.3·t / (1 + (0.3 - 1)·t), data at 1, and guides from 0.125 on."""
    cfg = settings_of("lightningdit_xl1")
    asked = []

    class Net(torch.nn.Module):
        in_channels, input_size, num_classes, routes = 32, 2, 1000, ()

        def forward(self, x, t, y, routes=()):
            asked.append((t[0].item(), len(x)))
            return torch.zeros_like(x)

    diffusion = build_diffusion({"name": "rf"})
    sampler = sampler_settings(diffusion, cfg.sampler.model_dump())
    diffusion.sample(Net(), torch.zeros(1, 32, 2, 2), torch.zeros(1, dtype=torch.int64), num_steps=cfg.num_steps,
                     guidance=Guidance(cfg.scale, interval=cfg.interval, channels=cfg.channels), **sampler)
    t = np.linspace(0, 1, 250)[:-1]
    theirs = 0.3 * t / (1 + (0.3 - 1) * t)
    assert np.allclose([1 - time for time, _ in asked], theirs, atol=1e-6)
    assert [size for _, size in asked] == [2 if time >= 0.125 else 1 for time in theirs]
    json.dumps(sampler)


# ---- a run of ours, sampled as its experiment's published scores were ------------------------------------------------

THEIRS = ("published={where: Somebody, scores: {fd_pixels: 12.25}, diffusion: rf, step: 2, num_samples: 6, num_steps: "
          "3, sampler: {solver: euler_maruyama}}")


@pytest.fixture(scope="module")
def flow(shapes, tmp_path_factory):
    """A run whose experiment names a published score."""
    run = tmp_path_factory.mktemp("published") / "run"
    assert train_here(run, shapes, "diffusion=rf", "steps=2", "samples.every=0", THEIRS).returncode == 0
    return run


def scored(run, place, out, *given):
    run_command(fid.main, "fid.py", f"checkpoint={run}", f"reference={place}/images.npz", "features=pixels", "cpu=true",
                f"results={out}", *given)
    return files.read_rows(out)[-1]


def test_a_runs_metadata_says_how_its_published_score_was_sampled(flow):
    record = checkpoints.read_meta(checkpoints.latest(flow))["published"]
    assert record == {"where": "Somebody", "scores": {"fd_pixels": 12.25}, "tolerance": {}, "diffusion": "rf",
                      "step": 2,
                      "num_samples": 6, "num_steps": 3, "sampler": {"solver": "euler_maruyama"}}
    assert load_trained(flow).recorded["published"] == record


def test_a_run_is_sampled_as_published_on_demand_and_then_compared_with_the_published_score(flow, place, tmp_path,
                                                                                            capsys):
    results = tmp_path / "results.jsonl"
    row = scored(flow, place, results, "sampler=published")
    assert (row["images"], row["source"]["num_steps"], row["source"]["evaluations"]) == (6, 3, 3)
    assert row["source"]["sampler"] == {"solver": "euler_maruyama"} and row["source"]["guidance"] is None
    assert row["published"] == {"where": "Somebody", "scores": {"fd_pixels": 12.25}}
    assert f"{row['metrics']['fd_pixels']:.4f}     12.25\n" in capsys.readouterr().out
    spelled = scored(flow, place, results, "num_samples=6", "num_steps=3", "sampler.solver=euler_maruyama")
    assert spelled["source"] == row["source"] and spelled["published"] == row["published"]
    assert "12.25" in capsys.readouterr().out


@pytest.mark.parametrize("otherwise", [["num_steps=4"], ["sampler={solver: heun}"], ["weights=model"]])
def test_a_row_sampled_differently_has_no_published_score_beside_it(flow, place, tmp_path, capsys, otherwise):
    row = scored(flow, place, tmp_path / "results.jsonl", *([] if "sampler" in otherwise[0] else ["sampler=published"]),
                 *(["num_samples=6", "num_steps=3"] if "sampler" in otherwise[0] else []), *otherwise)
    said = capsys.readouterr().out
    assert row["published"] is None and "12.25" not in said
    assert ('Somebody: not compared, as the images were sampled differently. Theirs: {"diffusion": "rf", "step": '
            '2' in said)
    if otherwise == ["num_steps=4"]:  # given settings take precedence, and the rest is as published
        source = row["source"]
        assert (source["num_steps"], source["sampler"]["solver"], row["images"]) == (4, "euler_maruyama", 6)


def test_sampler_published_needs_metadata_that_can_be_sampled(shapes, place, tmp_path):
    for given, says in (([], "its record holds no published scores"),
                        ([THEIRS], "Somebody is of rf, and this network of edm")):
        run = tmp_path / f"run{len(given)}"
        assert train_here(run, shapes, "steps=1", "samples.every=0", *given).returncode == 0
        with pytest.raises(SystemExit, match=says):
            scored(run, place, tmp_path / "results.jsonl", "sampler=published")
        assert scored(run, place, tmp_path / "results.jsonl", "num_samples=4", "num_steps=2")["published"] is None
