"""Every config composes and builds its network; the paper's experiments have its networks, routes and training."""

import contextlib
import functools
import inspect
import re

import pytest
import torch
from conftest import ROOT
from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from blocks import BLOCKS
from dit import DiT, DiT_models, multiply_adds
from edm import EDM
from guidance import Guidance
from objectives import class_of
from rf import RF
from routing_module import Route, Router
from runtime import schema
from training.run_record import network_record
from training.settings import MuonSettings, TrainSettings, check_settings
from weights.records import architecture, build_network

CONFIGS = ROOT / "configs"
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
    return network_record(cfg.model, shape, cfg.data.num_classes or 1000)


def network(cfg):
    with torch.device("meta"):
        return build_network(described(cfg))


def checked(*typed):
    """Composes and checks what is typed, as train.py does."""
    return check_settings(settings(load(*typed)), dict(one.lstrip("+~").partition("=")[::2] for one in typed))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_composes_checks_and_builds_and_an_unknown_one_lists_them(experiment):
    cfg = load(f"experiment={experiment}")
    checked(f"experiment={experiment}")
    assert bool(network(cfg).routes) == (cfg.model.name != "dit") and cfg.steps != 0
    with pytest.raises(MissingConfigException, match=rf"(?s)b2_tread.*\b{experiment}\b"):
        load("experiment=b2_tread")


@pytest.mark.parametrize(("typed", "words"), [
    (["experiment=tread", "model=dit"], "name=b2_tread is the experiment's name .* beside model=dit give name="),
    (["experiment=tread_v1", "model=tread"], "beside model=tread"), (["experiment=finetune", "model=tread"], "name="),
    (["experiment=tread", "model=dit", "name=b2_dense"], None), (["experiment=quickstart", "model=dit"], None),
    (["experiment=sit_tread", "model=sprint", "run_dir=x"], None),
    (["sharding=fsdp", "precision=fp8"], "sharding=fsdp and precision"),
    (["optimizer=muon", "precision=fp8"], "optimizer=muon and precision=fp8 do not"),
    (["experiment=tread", "size=xl2"], None), (["experiment=small", "size=b2"], None),
    (["experiment=small_cpu", "model.backbone_type=DiT-B/4"], "keep the experiment's model.hidden_size=128 model.num_"),
    (["experiment=small_cpu", "model.backbone_type=DiT-B/4", "model.hidden_size=null", "model.num_heads=null"], None),
    (["experiment=lightning", "size=xl2"], "size=xl2 would change nothing: .*model.backbone_type=LightningDiT-XL/1"),
    (["experiment=quickstart", "size=s2"], "size=s2 would change nothing: .*model.backbone_type=DiT-S/4"),
    (["evaluate.num_samples=9"], "evaluate.num_samples=9 would change nothing: nothing is scored"),
    (["evaluate.num_samples=9", "evaluate.every=0"], None),
    (["objective=alignment", "objective.weight=-1"], "objective=alignment: weight=-1"),
    (["model=dit", "model.selection=random"], "model.selection=random would change nothing"),    # the default
])
def test_settings_that_do_not_go_together_or_change_nothing_are_refused(typed, words):      # more: test_mistakes.py
    with contextlib.nullcontext() if words is None else pytest.raises(ValueError, match=words):
        checked(*typed)


@pytest.mark.parametrize(("has", "precision"), [
    ({"avx512_bf16": True}, "bf16"), ({"amx_bf16": True}, "bf16"), ({"avx512_bf16": False}, "fp32"), ({}, "fp32"),
])
def test_a_cpus_experiments_are_in_bf16_where_the_processor_multiplies_it(monkeypatch, has, precision):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: has)
    assert checked("experiment=emoji").precision == precision
    assert checked("experiment=emoji", "precision=fp16").precision == "fp16"


def test_model_dit_is_refused_beside_an_experiment_of_ones_own_that_sets_routes():
    with pytest.raises(ValueError, match="as the experiment sets model.routes: write model.routes="):
        check_settings(settings(load("model=tread")), {"experiment": "mine", "model": "dit", "name": "x"})


# ---- the paper's experiments ----------------------------------------------------------------------------------------

# The commands of docs/imagenet.md, beside the name that a run gets.
SIZES = {"s2": 12, "b2": 12, "l2": 24, "xl2": 28}
OTHERS = {"b2_mamba": ("Mamba-B/2", 20), "l2_rwkv": ("RWKV-L/2", 18)}
ROWS = {f"{size}_{recipe}": ([f"experiment={recipe}", f"size={size}"], depth) for size, depth in SIZES.items()
        for recipe in ("dit", "tread", "sit", "sit_tread")}
ROWS |= {f"{size}_tread_v1": (["experiment=tread_v1", f"size={size}"], SIZES[size]) for size in ("s2", "b2", "xl2")}
ROWS |= {f"{name}_tread": (["experiment=tread", f"model.backbone_type={backbone}"], depth)
         for name, (backbone, depth) in OTHERS.items()}
ROWS |= {name: (["experiment=tread", f"model.backbone_type={backbone}", "model=dit", f"name={name}"], depth)
         for name, (backbone, depth) in OTHERS.items()}
ROWS |= {"xl1_lightning": (["experiment=lightning"], 28), "xl1_lightning_tread": (["experiment=lightning_tread"], 28)}
ROWS |= {f"{size}_sit_repa": (["experiment=sit_repa", f"size={size}"], SIZES[size]) for size in ("b2", "xl2")}
# Not published, or with another length.
RECIPES = {"b2_sit_tread_repa": (["experiment=sit_tread", "objective=alignment", "name=b2_sit_tread_repa"], 12),
           "b2_sit_sprint": (["experiment=sit", "model=sprint", "name=b2_sit_sprint"], 12)}
VERSION_1 = {12: [(0, 4), (6, 9)], 28: [(0, 10), (13, 21)]}  # the routes of the paper's first version, by depth


@pytest.mark.parametrize("name", ROWS | RECIPES)
def test_a_row_of_a_published_table_has_its_name_network_routes_and_training(name):
    typed, depth = (ROWS | RECIPES)[name]
    cfg = load(*typed)
    assert checked(*typed) and (cfg.name, cfg.run_dir) == (name, f"runs/{name}")
    net, block = network(cfg), next((block for block in ("mamba", "rwkv", "lightning") if block in name), "dit")
    assert (type(net.blocks[0]), len(net.blocks), net.pos_embed.shape[1]) == (BLOCKS[block], depth, 256)
    routes = [Route(2, depth - 4, 0.5)] if "tread" in name else []
    if name.endswith("tread_v1"):
        routes = [Route(start, end, 0.5, x_T=1, x_D_last=1) for start, end in VERSION_1[depth]]
    if "sprint" in name:
        routes = [Route(2, depth - 3, 0.75, path_drop=0.1)]
    assert list(net.routes) == routes
    assert (cfg.model.selection, cfg.model.fusion) == (("grid", True) if "sprint" in name else ("random", False))
    length = (80_000, 1024, 2e-4, [0.9, 0.95]) if block == "lightning" else (400_000, 256, 1e-4, [0.9, 0.999])
    assert (cfg.steps, cfg.batch_size, cfg.optimizer.lr, list(cfg.optimizer.betas)) == length
    assert (cfg.ema.decay, cfg.optimizer.weight_decay, cfg.label_dropout) == (0.9999, 0, 0.1)
    # All of TREAD's own rows, the dense Mamba and RWKV too; that on LightningDiT is a co-author's fork of its code.
    by_treads_code = block in ("mamba", "rwkv") or "tread" in name and block != "lightning"
    assert cfg.model.init == ("xavier" if by_treads_code else "adaln_zero")
    sampling = "uniform" if "sit" in name else "logit_normal" if block == "lightning" else None
    assert (cfg.diffusion.name, cfg.diffusion.get("timestep_sampling")) == ("rf" if sampling else "edm", sampling)
    assert cfg.diffusion.get("cosine_weight", 0) == (block == "lightning")
    objective = "version1" if "v1" in name else "alignment" if "repa" in name else None
    assert settings(cfg).objective["name"] == objective


@pytest.mark.parametrize("typed", [["size=xl2"], ["size=b2", "diffusion=rf_uniform"]])
def test_a_dense_fine_tune_fits_the_run_it_starts_from(typed):
    cfg, parent = load("experiment=finetune", *typed), load("experiment=tread", *typed)
    assert cfg.init_from == parent.run_dir and cfg.run_dir != parent.run_dir and cfg.diffusion == parent.diffusion
    assert (network(cfg).routes, bool(network(parent).routes)) == ((), True)
    assert architecture(described(cfg)) == architecture(described(parent))


# ---- the groups -----------------------------------------------------------------------------------------------------

# The classes whose keywords a file of configs/ sets, beside its name.
CLASSES = {"model/dit": (DiT, Router), "diffusion/edm": (EDM,), "diffusion/rf": (RF,), "guidance/none": (Guidance,),
           "optimizer/muon": (MuonSettings,),
           **{f"objective/{name}": (class_of(name),) for name in ("alignment", "version1")}}


@pytest.mark.parametrize("file", CLASSES)
def test_a_config_shows_the_defaults_of_the_class_that_it_sets(file):
    group, name = file.split("/")
    shown = load(f"{group}={name}", name="sample" if group == "guidance" else "config")
    shown = shown if group == "guidance" else shown[group]
    defaults = {one.name: one.default for kind in CLASSES[file]
                for one in inspect.signature(kind).parameters.values() if one.default is not one.empty}
    same = {key: value for key, value in shown.items() if key in defaults and value is not None}
    assert len(same) >= 1 and same == {key: defaults[key] for key in same}
    assert group != "objective" or shown.keys() == defaults.keys() | {"name"}


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIGS / "guidance").glob("*.yaml")))
def test_every_way_to_guide_is_a_setting_of_one_value(name):
    cfg = load(f"guidance={name}", name="sample")
    assert OmegaConf.is_missing(cfg, "weak") == ("auto" in name) and (cfg.interval is not None) == (name == "interval")
    keywords = {key: OmegaConf.to_container(cfg)[key] for key in ("gamma1", "gamma2", "drop_label", "interval")}
    assert cfg.scale is None or Guidance(cfg.scale, **keywords).scale > 1
    for entry in ("fid", "rf"):
        assert load(f"guidance={name}", name=entry).gamma2 == cfg.gamma2


@functools.cache
def cost(backbone, tokens, *route):
    """The multiply-adds of a forward pass, dense or with a route."""
    with torch.device("meta"):
        net = DiT_models[backbone](input_size=2 * int(tokens**0.5), routes=[Route(*route)] if route else [])
    return sum(multiply_adds(net, net.routes))


def test_the_flops_and_their_ratios_on_the_pages_are_counted():
    routing, sizes, speed = ((ROOT / f"docs/{name}.md").read_text() for name in ("routing", "imagenet", "performance"))
    found = re.findall(r"^\| (\d) → −(\d), ([\d.]+) \| (\S+), (\S+) \| (\S+), (\S+) \|", routing, re.M)
    for start, end, ratio, *shown in found:
        assert shown == [f"{cost(name, tokens) / cost(name, tokens, int(start), -int(end), float(ratio)):.2f}"
                         for name in ("DiT-B/2", "DiT-XL/2") for tokens in (256, 1024)]
    rows = re.findall(r"^\| (\w+)/2 \| (\d+)M \| (\d+) \| (\d+) \| ([\d.]+) \|", sizes, re.M)
    for size, _, *shown in rows:   # 2 FLOPs a multiply-add, and a backward pass of twice the forward one
        dense, routed = cost(f"DiT-{size}/2", 256), cost(f"DiT-{size}/2", 256, 2, -4, 0.5)
        assert shown == [f"{6 * dense / 1e9:.0f}", f"{6 * routed / 1e9:.0f}", f"{dense / routed:.2f}"]
    names = re.search(r"^\| tokens \| (S/2.*) \|$", speed, re.M)[1].split(" | ")
    for name, ratio in zip(names, re.search(r"^\| 256 \| (1\..*) \|$", speed, re.M)[1].split(" | "), strict=True):
        backbone, start, end = re.fullmatch(r"(\S+), (\d+)→(\d+)", name).groups()
        backbone = backbone if "-" in backbone else f"DiT-{backbone}"
        assert cost(backbone, 256) / cost(backbone, 256, int(start), int(end), 0.5) == pytest.approx(
            float(ratio), abs=6e-4)
    assert (len(found), len(rows), len(names)) == (4, 4, 6)
