"""Every config composes and builds its network; a key that does not exist is an error."""

import contextlib
import functools
import inspect
import re
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from blocks import BLOCKS
from dit import DiT, DiT_models
from edm import EDM
from guidance import Guidance
from objectives import build_objective, class_of
from rf import RF, CleanRF
from routing_module import Route, Router
from runtime import schema
from runtime.typed import cli_overrides
from sampling.checks import sampler_settings
from scripts.choose_routes import flop_ratio
from training.run import describe_network
from training.settings import MuonSettings, TrainSettings, check_settings
from weights.records import architecture, build_diffusion, build_network

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))


@functools.cache  # composing takes a tenth of a second; nobody changes what is composed
def load(*overrides, name="config"):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose(name, overrides=list(overrides))


def settings(cfg):
    """Checks a composed config as train.py does."""
    return schema.read(TrainSettings, OmegaConf.to_container(cfg, resolve=True))


def described(cfg):
    """Returns the network's keywords."""
    cfg = settings(cfg)
    shape = (cfg.data.channels or 4, cfg.data.input_size or 32, cfg.data.input_size or 32)
    return describe_network(cfg.model, shape, cfg.data.num_classes or 1000)


def network(cfg):
    with torch.device("meta"):
        return build_network(described(cfg))


def objective_of(cfg, model):
    """Builds what is minimised around a network of `cfg`, with a teacher's tokens beside the latents."""
    parts = settings(cfg).objective
    keywords = {key: value for name, given in parts.items()
                for key, value in class_of(name).network_keywords(len(model.blocks), **given).items()}
    assert not keywords  # or the network would have to be built with them
    with torch.device("meta"):
        return build_objective(model, build_diffusion(dict(cfg.diffusion)), parts, False,
                               {"teacher": (model.pos_embed.shape[1], 768)})


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_composes_and_builds(experiment):
    cfg = load(f"experiment={experiment}")
    model = network(cfg)
    objective_of(cfg, model)
    assert bool(model.routes) == (cfg.model.name != "dit") and cfg.steps != 0


def checked(*typed):
    """Composes and checks what is typed, as train.py does."""
    return check_settings(settings(load(*typed)), cli_overrides(typed))


@pytest.mark.parametrize(("typed", "words"), [
    (["experiment=b2_sit_tread_repa_before", "model=dit"], "write model.routes=.* as well"),
    (["experiment=b2_sit_tread_repa_before", "model=dit", "model.routes=[]"], None),
    (["experiment=b2_tread", "model=dit"], None), (["experiment=b2_sit_sprint", "model=tread"], None),
    (["experiment=b2_sit_sprint", "routes=balanced"], "routes=balanced and model=sprint do not go together"),
    (["experiment=b2_sit_tread_dispersive", "objective=alignment"],
     r"write objective=\[dispersive,alignment\] for all of them, or ~objective"),
    (["experiment=b2_sit_tread_dispersive", "objective=[dispersive,alignment]"], None),
    (["experiment=b2_sit_tread_dispersive", "objective=alignment", "~objective.dispersive"], None),
    (["experiment=b2_sit_tread_dispersive", "~objective"], "would train dispersive as well"),
    (["experiment=b2_sit_repa", "objective=dispersive"], None),
    (["objective=alignment", "+objective.dispersive.weight=1"], None)])
def test_what_an_experiment_adds_to_the_model_or_objective_that_is_typed_raises_an_error(typed, words):
    with contextlib.nullcontext() if words is None else pytest.raises(ValueError, match=words):
        checked(*typed)


@pytest.mark.parametrize("experiment", ["b2_tread", "xl2_tread_v1", "b2_sit_tread_repa_before", "b2_dit"])
def test_a_preset_of_routes_that_is_typed_replaces_an_experiments_routes(experiment):
    [route] = network(load(f"experiment={experiment}", "routes=balanced")).routes
    assert (route.start_layer_idx, route.selection_ratio) == (2, 0.5) and route.end_layer_idx in (10, 26)


@pytest.mark.parametrize(("typed", "is_published"), [
    ([], True), (["seed=3", "name=again", "precision=fp32", "data.path=/data/imagenet", "checkpoint.every=5000",
                  "evaluate.every=9"], True),
    (["model=dit"], False), (["routes=max_speed"], False), (["diffusion=rf"], False), (["objective=layer_sync"], False),
    (["data=cifar10"], False), (["model.backbone_type=DiT-S/2"], False), (["batch_size=64"], False),
    (["optimizer.lr=1e-3"], False),
    (["route_schedule=off_ramp"], False), (["init_from=x", "lora.rank=4"], False), (["ema.decay=0.99"], False)])
def test_published_scores_are_recorded_of_the_run_that_they_are_of_alone(typed, is_published):
    assert (checked("experiment=b2_tread", *typed).published is not None) == is_published


def test_equal_settings_behave_alike():
    one, other = (settings(load("experiment=b2_tread", *more)) for more in ([], ["model.init=xavier"]))
    typed = cli_overrides(["experiment=b2_tread", "lora.alpha=2"])
    for cfg in (one, other):
        assert cfg == one and check_settings(cfg, {}) == one
        with pytest.raises(ValueError, match="lora.alpha=2 would change nothing"):
            check_settings(cfg, typed)


PUBLISHED = [name for name in EXPERIMENTS
             if re.search(r"^published:(?! null)", (CONFIGS / "experiment" / f"{name}.yaml").read_text(), re.M)]
DEPTHS = {"s2": 12, "b2": 12, "l2": 24, "xl2": 28, "xl1": 28, "mamba": 20, "rwkv": 18}
VERSION_1 = {12: [(0, 4), (6, 9)], 28: [(0, 10), (13, 21)]}  # the routes of the paper's first version, by depth


@pytest.mark.parametrize("experiment", PUBLISHED)
def test_a_row_of_a_published_table_has_its_network_routes_and_training(experiment):
    size, kind = experiment.split("_", 1)
    cfg = load(f"experiment={experiment}")
    model, block = network(cfg), next((name for name in ("mamba", "rwkv", "lightning") if name in kind), "dit")
    depth = DEPTHS.get(block, DEPTHS[size])
    assert (type(model.blocks[0]), len(model.blocks), model.pos_embed.shape[1]) == (BLOCKS[block].block, depth, 256)
    routes = [Route(2, depth - 4, 0.5)] if kind.endswith("tread") else []
    if kind == "tread_v1":
        routes = [Route(start, end, 0.5, x_T=1, x_D_last=1) for start, end in VERSION_1[depth]]
    assert list(model.routes) == routes
    length = (80_000, 1024, 2e-4, [0.9, 0.95]) if block == "lightning" else (400_000, 256, 1e-4, [0.9, 0.999])
    assert (cfg.steps, cfg.batch_size, cfg.optimizer.lr, list(cfg.optimizer.betas)) == length
    assert (cfg.ema.decay, cfg.optimizer.weight_decay, cfg.label_dropout) == (0.9999, 0, 0.1)
    # All of TREAD's own rows, the dense Mamba and RWKV too; that on LightningDiT is a co-author's fork of its code.
    by_treads_code = block in ("mamba", "rwkv") or "tread" in kind and block != "lightning"
    assert cfg.model.init == ("xavier" if by_treads_code else "adaln_zero")
    drawn = "uniform" if "sit" in kind else "logit_normal" if block == "lightning" else None
    assert (cfg.diffusion.name, cfg.diffusion.get("timestep_sampling")) == ("rf" if drawn else "edm", drawn)
    assert cfg.diffusion.get("cosine_weight", 0) == (block == "lightning")
    assert settings(cfg).objective.get("version1") == ({"mae_weight": 0} if kind == "tread_v1" else None)
    published = settings(cfg).published
    assert sampler_settings(build_diffusion({"name": published.diffusion}), published.sampler.model_dump())
    assert (published.diffusion == "rf") == bool(drawn)


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if name.endswith("_finetune")])
def test_a_dense_fine_tune_fits_the_run_it_starts_from_and_has_no_published_number(experiment):
    cfg, parent = load(f"experiment={experiment}"), load(f"experiment={experiment.removesuffix('_finetune')}")
    assert cfg.init_from == parent.run_dir and cfg.run_dir != parent.run_dir and cfg.diffusion == parent.diffusion
    assert (network(cfg).routes, bool(network(parent).routes)) == ((), True) and settings(cfg).published is None
    assert architecture(described(cfg)) == architecture(described(parent))


# The classes whose keywords a file of configs/ sets, beside its name.
CLASSES = {"model/dit": (DiT, Router), "diffusion/edm": (EDM,), "diffusion/rf": (RF,), "diffusion/rf_clean": (CleanRF,),
           "guidance/none": (Guidance,),
           "optimizer/muon": (MuonSettings,),
           **{f"objective/{path.stem}": (class_of(path.stem),) for path in (CONFIGS / "objective").glob("*.yaml")}}


@pytest.mark.parametrize("file", CLASSES)
def test_a_config_shows_the_defaults_of_the_class_that_it_sets(file):
    group, name = file.split("/")
    shown = load(f"{group}={name}", name="sample" if group == "guidance" else "config")
    shown = shown if group == "guidance" else shown[group][name] if group == "objective" else shown[group]
    defaults = {one.name: one.default for kind in CLASSES[file]
                for one in inspect.signature(kind).parameters.values() if one.default is not one.empty}
    same = {key: value for key, value in shown.items() if key in defaults and value is not None}
    assert len(same) >= 1 and same == {key: defaults[key] for key in same}
    assert group != "objective" or shown.keys() == defaults.keys()


SPRINT = ("grid", True)
RECIPES = {"sit_repa": (None, None), "sit_tread_repa": ((2, None), None), "sit_tread_repa_before": ("later", None),
           "sit_tread_repa_delayed": ("later", 2),
           "sit_sprint": (SPRINT, None), "sit_sprint_repa": (SPRINT, None)}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("size", "depth", "aligned", "later"), [("b2", 12, 3, 4), ("xl2", 28, 7, 9)])
def test_a_recipe_has_its_route_and_aligns_where_its_name_says(size, depth, aligned, later, recipe):
    cfg = load(f"experiment={size}_{recipe}")
    model = network(cfg)
    kind, return_from = RECIPES[recipe]
    start = later if kind == "later" else 2
    route = Route(start, depth - 4, 0.5, return_from=return_from)
    if kind == SPRINT:
        route = Route(2, depth - 3, 0.75, path_drop=0.1)
    assert list(model.routes) == ([route] if kind else [])
    assert (cfg.model.selection, cfg.model.fusion) == (SPRINT if kind == SPRINT else ("random", False))
    objective = objective_of(cfg, model)
    assert getattr(objective, "blocks", None) == (None if recipe == "sit_sprint" else [aligned])
    assert (start <= aligned) == ("before" not in recipe and "delayed" not in recipe)
    assert (cfg.steps, cfg.batch_size, cfg.diffusion.timestep_sampling) == (400_000, 256, "uniform")
    assert settings(cfg).published is None or recipe == "sit_repa"


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIGS / "guidance").glob("*.yaml")))
def test_every_way_to_guide_is_a_setting_of_one_value(name):
    cfg = load(f"guidance={name}", name="sample")
    assert (cfg.weak == "required") == ("auto" in name) and (cfg.interval is not None) == (name == "interval")
    given = {key: OmegaConf.to_container(cfg)[key]
             for key in ("gamma1", "gamma2", "drop_label", "interval", "internal")}
    assert cfg.scale is None or Guidance(cfg.scale, **given).scale > 1
    for entry in ("fid", "rf"):
        assert load(f"guidance={name}", name=entry).gamma2 == cfg.gamma2


@pytest.mark.parametrize("model", ["dit", "tread", "sprint"])
@pytest.mark.parametrize("data", sorted(path.stem for path in (CONFIGS / "data").glob("*.yaml")))
def test_every_model_fits_every_data_set(model, data):
    cfg = load(f"model={model}", f"data={data}")
    built = network(cfg)
    expected = (cfg.data.channels or 4, cfg.data.input_size or 32, cfg.data.num_classes or 1000)
    assert (built.in_channels, built.input_size, built.num_classes) == expected


PRESETS = {"paper": (2, -4, 0.5), "balanced": (2, -2, 0.5), "max_speed": (1, -1, 0.7), "high_resolution": (2, -3, 0.6),
           "lora": (3, -4, 0.4), "masked": (2, -2, 0.7)}


@pytest.mark.parametrize("model", ["dit", "tread"])
def test_a_preset_replaces_the_models_routes_and_names_the_run(model):
    assert {path.stem for path in (CONFIGS / "presets" / "routes").glob("*.yaml")} == set(PRESETS)
    for name, (start, end, ratio) in PRESETS.items():
        cfg = load(f"model={model}", f"routes={name}")
        [route] = network(cfg).routes
        assert (route.start_layer_idx, route.end_layer_idx, route.selection_ratio) == (start, 12 + end, ratio)
        assert cfg.name == ("tread" if name == "paper" else f"tread-{name}") + "-imagenet256"
    assert load(f"model={model}", "routes=paper") == load("model=tread") == load()
    given = "[{selection_ratio: 0.25, start_layer_idx: 0, end_layer_idx: 3}]"
    for first in ([], ["routes=balanced"]):  # routes that are spelled out go before any
        [route] = network(load(f"model={model}", *first, f"model.routes={given}")).routes
        assert (route.start_layer_idx, route.end_layer_idx, route.selection_ratio) == (0, 3, 0.25)


@functools.cache
def on_meta(name, side):
    with torch.device("meta"):
        return DiT_models[name](input_size=side)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_flop_ratios_at_the_head_of_a_preset_are_counted(preset):
    head = (CONFIGS / "presets" / "routes" / f"{preset}.yaml").read_text()
    [written] = re.findall(r"at 256 / 1024 tokens: B/2 (\S+) / (\S+), XL/2 (\S+) / (\S+)$", head, flags=re.M)
    routes = {name: network(load(f"model.backbone_type={name}", f"routes={preset}")).routes
              for name in ("DiT-B/2", "DiT-XL/2")}
    counted = [flop_ratio(on_meta(name, side), routes[name]) for name in routes for side in (32, 64)]
    assert [*written] == [f"{ratio:.2f}" for ratio in counted]
