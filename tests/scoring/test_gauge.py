"""A gauge is a preset of ordinary settings, which sample as the authors' own commands do, and published scores."""

import numpy as np
import pytest
import torch
from conftest import ROOT
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import fid
from guidance import Guidance
from runtime.schema import read
from sampling.sampler import Sampler
from scoring.results import print_scores
from weights.records import build_diffusion

GAUGES = sorted(path.stem for path in (ROOT / "configs" / "gauge").glob("*.yaml") if path.stem != "none")
# How the authors' own commands and code sample: solver, steps, scale, channels, interval (t, noise at 1).
PUBLISHED_COMMANDS = {
    "dit_xl2": ("ancestral", 250, 1.5, 3, None), "dit_xl2_unguided": ("ancestral", 250, None, None, None),
    "sit_xl2_sde": ("euler_maruyama", 250, 1.5, 3, None), "sit_xl2_ode": ("heun", 125, 1.5, 3, None),  # theirs: dopri5
    "repa_xl2": ("euler_maruyama", 250, 1.8, None, (0, 0.7)),
    "lightningdit_xl1": ("euler", 249, 6.7, 3, (0, 0.875)),
}


def settings_of(gauge):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("fid", overrides=[f"gauge={gauge}", "checkpoint=x", "reference=x"])
    return read(fid.ScoringSettings, OmegaConf.to_container(cfg, resolve=True))


@pytest.mark.parametrize("gauge", GAUGES)
def test_a_gauge_samples_as_its_authors_do_and_has_their_five_scores(gauge):
    cfg = settings_of(gauge)
    assert {*cfg.expected} == {"fid", "sfid", "inception_score", "precision", "recall"} and cfg.num_samples is None
    if gauge in PUBLISHED_COMMANDS:
        assert PUBLISHED_COMMANDS[gauge] == (cfg.sampler.solver, cfg.num_steps, cfg.scale, cfg.channels, cfg.interval)
        assert (cfg.precision, cfg.decode_precision, cfg.drop_label) == ("fp32", "fp32", True)


@pytest.mark.parametrize(("typed", "is_shown"), [
    ([], True), (["batch_size=8", "decode_batch_size=2", "tag=x", "metrics=[precision]"], True),
    (["num_samples=1000"], False), (["sampler.solver=heun"], False), (["features=pixels"], False),
])
def test_published_scores_stand_beside_ours_unless_a_typed_setting_makes_others(
        typed, is_shown, tmp_path, capsys):
    overrides = dict(one.split("=", 1) for one in ["gauge=dit_xl2", "checkpoint=x", "reference=x.npz", *typed])
    cfg = fid.check_settings(settings_of("dit_xl2"), overrides)
    row = {"metrics": {"fid": 2.5}, "summary": "", "reference": {"path": ""}, "extractor": {"name": ""}, "seconds": 1}
    print_scores(row, tmp_path, cfg.expected)
    assert ("fid               2.5   published: 2.27\n" in capsys.readouterr().out) == is_shown


def test_lightningdits_points_of_time_are_ours():
    """Its code takes t = 0 … 1 at 250 points, 0.3·t / (1 + (0.3 - 1)·t), data at 1, and guides from 0.125 on."""
    cfg = settings_of("lightningdit_xl1")
    asked = []

    class Net(torch.nn.Module):
        in_channels, input_size, num_classes, null_label, routes = 32, 2, 1000, True, ()

        def forward(self, x, t, y, routes=()):
            asked.append((t[0].item(), len(x)))
            return torch.zeros_like(x)

    diffusion = build_diffusion({"name": "rf"})
    guidance = Guidance(cfg.scale, interval=cfg.interval, channels=cfg.channels)
    sampler = Sampler(diffusion, cfg.num_steps, guidance, cfg.sampler.model_dump())
    sampler(Net(), torch.zeros(1, 32, 2, 2), torch.zeros(1, dtype=torch.int64))
    t = np.linspace(0, 1, 250)[:-1]
    shifted = 0.3 * t / (1 + (0.3 - 1) * t)
    assert np.allclose([1 - time for time, _ in asked], shifted, atol=1e-6)
    assert [size for _, size in asked] == [2 if time >= 0.125 else 1 for time in shifted]
