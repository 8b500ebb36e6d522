"""Others' weights become a network of ours, and their samplers return the published numbers (tests/published)."""

import argparse
import contextlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from closed_forms import amplitude_of
from conftest import one_rank, run_command, save_vae
from PIL import Image
from safetensors.torch import save_file
from test_lightning import TINY as LIGHTNING_TINY
from test_lightning import filled
from test_published_parity import DDPM_, TINY, CountedNoise, assert_equal, fill, names, published, wave
from torch import nn
from torch.distributed import checkpoint as checkpoint_of_ranks
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from world import make, run

import fid
import sample
from dit import DiT
from edm import DDPM, EDM
from guidance import Guidance
from rf import RF
from runtime.schema import Settings, read
from sampling.checks import sampler_settings
from scripts import import_latents, prepare_latents
from training.run_folder import open_parent
from weights.averages import AnyWeights
from weights.loading import load_trained
from weights.others import reverse_time, to_diffusers
from weights.records import build_network

SIT, REPA, LIGHTNING = published("sit"), published("repa"), published("lightning")
ARGS = dict(results_dir="results", image_size=256, num_classes=1000)
SIT_ARGS = argparse.Namespace(**ARGS, model="SiT-XL/2", path_type="Linear", prediction="velocity", loss_weight=None)
DIT_ARGS = argparse.Namespace(**ARGS, model="DiT-XL/2", vae="ema")
FAMILIES = ("sit", "repa", "repa, legacy", "lightning")


def weights_of(family: str) -> dict:
    """The weights with which the published side ran, under the keys of its file."""
    if family == "sit":
        return fill(DiT(**TINY, learn_sigma=True)).state_dict()
    if family == "lightning":
        tables = {f"feat_rope.freqs_{name}": torch.randn(16, 16) for name in ("cos", "sin")}
        return filled(DiT(**LIGHTNING_TINY)).state_dict() | tables
    shapes = {key: value.shape for key, value in DiT(**TINY).state_dict().items()}
    layers = [(32, 64), (32, 32), (24, 32)]
    for i, (rows, columns) in zip((0, 2, 4), layers, strict=True):
        shapes |= {f"projectors.0.{i}.weight": (rows, columns), f"projectors.0.{i}.bias": (rows,)}
    assert sorted(shapes) == REPA["keys"]
    empty = {key: torch.empty(shape) for key, shape in shapes.items() if key != "pos_embed"}
    state = {key: wave(tuple(value.shape), k, amplitude_of(value))
             for k, (key, value) in enumerate(sorted(empty.items()))}
    state["pos_embed"] = DiT(**TINY).pos_embed
    if family == "repa, legacy":
        state = {re.sub(r"^blocks\.([12])\.", lambda found: f"decoder_blocks.{int(found[1]) - 1}.", key): value
                 for key, value in state.items()}
        assert "decoder_blocks.1.attn.qkv.weight" in state and "blocks.1.attn.qkv.weight" not in state
    return state


def published_file(family: str, folder):
    """Writes a file as the family's train.py does."""
    ema = weights_of(family)
    other = {key: torch.zeros_like(value) for key, value in ema.items()}
    beside = {"sit": {"args": SIT_ARGS},
              "lightning": {"config": {"transport": {"path_type": "Linear", "prediction": "velocity"}}}}
    if family == "lightning":
        ema = {f"module.{key}": value for key, value in ema.items()}
    path = folder / "0400000.pt"
    torch.save({"model": other, "ema": ema, "opt": {}, **beside.get(family, {"steps": 400000})}, path)
    return path


def loaded(family: str, folder) -> nn.Module:
    return load_trained(published_file(family, folder), num_heads=4)


# ---- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_published_file_says_its_origin_and_its_velocity_is_ours(family, tmp_path):
    case = {"sit": SIT, "lightning": {"velocity": LIGHTNING["forward"][0]}}.get(family, REPA)["velocity"]
    trained = loaded(family, tmp_path)
    assert type(trained.diffusion) is RF and trained.family == family.partition(",")[0]
    assert trained.family in trained.inferred
    assert (trained.net.in_channels, trained.net.out_channels, trained.weights) == (4, 4, "ema")
    sign, t = (1, torch.tensor(case["t"])) if "repa" in family else (-1, 1 - torch.tensor(case["t"]))
    v = RF().velocity(trained.net, wave(case["shape"], amplitude=1.4), t, torch.tensor(case["y"]))
    assert_equal(sign * v, case["out"])


@torch.no_grad()
def test_converted_weights_give_at_any_time_what_the_originals_give_at_the_reversed_time():
    net, turned = fill(DiT(**TINY)), DiT(**TINY).eval()
    turned.load_state_dict(reverse_time(net.state_dict()))
    z, y, t = torch.randn(64, 4, 8, 8), torch.arange(64) % 11, torch.rand(64)
    assert torch.allclose(turned(z, t, y), -net(z, 1 - t, y), atol=1e-5)
    assert not torch.allclose(turned(z, t, y), -net(z, t, y), atol=1e-2)
    twice = reverse_time(reverse_time(net.state_dict()))
    assert all(torch.allclose(twice[key], value, atol=1e-6) for key, value in net.state_dict().items())


def under(prefix: str, state: dict) -> dict:
    return {f"{prefix}{key}": value for key, value in state.items()}


@pytest.mark.parametrize("is_new", [True, False], ids=["", "in the old format of torch"])
@pytest.mark.parametrize("container, family, given, diffusion", [
    (lambda state: state, "dit", "dit", DDPM),
    (lambda state: {"model": {}, "ema": state, "opt": {}, "args": DIT_ARGS}, "dit", None, DDPM),
    (lambda state: {"model": under("module.", state), "ema": under("_orig_mod.", state)}, "edm", "edm", EDM),
    (lambda state: {"ema_state_dict": under("model.", state), "step": 7}, "tread", None, EDM),
    (lambda state: {"ema_state_dict": under("_orig_mod.model.", state)}, "tread", None, EDM),
])
def test_weights_of_dit_and_of_tread_are_loaded_unchanged(container, family, given, diffusion, is_new, tmp_path):
    state = fill(DiT(**TINY, learn_sigma=diffusion is DDPM)).state_dict()
    torch.save(container(state), tmp_path / "weights.pt", _use_new_zipfile_serialization=is_new)
    trained = load_trained(tmp_path / "weights.pt", diffusion=given, num_heads=4)
    assert trained.family == family and type(trained.diffusion) is diffusion and trained.autoencoder == "sd_vae_ema"
    assert all(torch.equal(trained.net.state_dict()[key], value) for key, value in state.items())


@pytest.mark.parametrize("state, choices", [
    (lambda: DiT(**TINY, learn_sigma=True).state_dict(), "dit (facebookresearch/DiT"),
    (lambda: DiT(**TINY).state_dict(), "edm (weights of this project, diffusion=edm); rf ("),
    (lambda: DiT(**LIGHTNING_TINY).state_dict(), "lightning (hustvl/LightningDiT"),
])
def test_the_origin_of_bare_weights_is_never_guessed_and_the_error_says_how_to_tell(state, choices, tmp_path):
    save_file(state(), tmp_path / "bare.safetensors")
    with pytest.raises(ValueError, match="has no record.*train.py that wrote it") as refused:
        load_trained(tmp_path / "bare.safetensors", num_heads=4)
    assert choices in str(refused.value) and "diffusion_name=" in str(refused.value)


@torch.no_grad()
def test_the_same_bare_file_is_another_network_for_dit_and_for_sit(tmp_path):
    state = weights_of("sit")
    save_file(state, tmp_path / "bare.safetensors")
    dit, sit = (load_trained(tmp_path / "bare.safetensors", diffusion=name, num_heads=4) for name in ("dit", "sit"))
    assert type(dit.diffusion) is DDPM and dit.net.out_channels == 8 and dit.recorded["diffusion"] == {"name": "ddpm"}
    assert type(sit.diffusion) is RF and sit.net.out_channels == 4 and not sit.recorded["network"]["learn_sigma"]
    save_file({key: value.half() for key, value in state.items()}, tmp_path / "half.safetensors")
    assert load_trained(tmp_path / "half.safetensors", diffusion="sit",
                        num_heads=4).net.pos_embed.dtype == torch.float32


def without(state: dict, part: str) -> dict:
    return {key: value for key, value in state.items() if part not in key}


@pytest.mark.parametrize("content, says", [
    (lambda: {"ema": weights_of("sit"), "args": argparse.Namespace(**vars(SIT_ARGS) | {"path_type": "GVP"})},
     "path_type=GVP, but only linear is supported"),
    (lambda: {"ema": weights_of("sit"), "args": argparse.Namespace(**vars(SIT_ARGS) | {"prediction": "score"})},
     "prediction=score, but only velocity"),
    (lambda: {"ema": weights_of("lightning"), "config": {"transport": {"path_type": "VP"}}}, "path_type=VP"),
    (lambda: without(weights_of("repa"), "blocks.1.attn"), "do not fit their network"),
    # ByteDance-Seed/Bagel#160: a frozen part is missing in the average; the raw weights must not fill it up.
    (lambda: {"model": two()[1], "ema": without(two()[0], "t_embedder"), "args": DIT_ARGS},
     "do not fit their network.*t_embedder.mlp.0.weight"),
    # pytorch/pytorch#94575: a loader that is not strict ignores keys and samples another network.
    (lambda: {"ema": two()[1] | {"blocks.0.cross_attn.q.weight": torch.zeros(64, 64)}, "args": DIT_ARGS},
     "blocks.0.cross_attn.q.weight"),
    # Tencent-Hunyuan/HunyuanDiT#107: the file beside the network's, of optimizer state alone
    (lambda: {"state": {0: {"exp_avg": torch.ones(3, 3)}}, "param_groups": [{"lr": 1e-4}]},
     "not a DiT's|does not hold a state dict"),
])
def test_files_that_cannot_be_read_correctly_raise_a_one_line_error(content, says, tmp_path):
    torch.save(content(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=says):
        load_trained(tmp_path / "weights.pt", num_heads=4)


def test_training_from_a_bare_file_asks_for_its_origin_and_refuses_another_diffusion(tmp_path):
    save_file(weights_of("sit"), tmp_path / "bare.safetensors")
    network = TINY | {"routes": [], "learn_sigma": False}
    record = {"network": network, "diffusion": {"name": "rf"}}
    with pytest.raises(ValueError, match="set diffusion_name="):
        open_parent(one_rank(), str(tmp_path / "bare.safetensors"), record, None)
    parent = open_parent(one_rank(), str(tmp_path / "bare.safetensors"), record, "sit")
    assert parent.family == "sit" and parent.net.out_channels == 4
    with pytest.raises(ValueError, match="another network or diffusion: {'diffusion.name': 'rf'} there"):
        open_parent(one_rank(), str(tmp_path / "bare.safetensors"), record | {"diffusion": {"name": "edm"}}, "sit")


# ---- a family needs evidence ----------------------------------------------------------------------------------------

TRANSPORT = dict(path_type="Linear", prediction="velocity", loss_weight=None, sample_eps=None, train_eps=None)
KIN = dict(model="SiT-S/2", num_classes=10, resolution=64, path_type="linear", prediction="v", block_out_s=4)  # of REPA


@pytest.mark.parametrize("beside, learn_sigma, family", [      # arguments beside an average, or all that is in the file
    (KIN, False, None), (KIN | {"encoder_depth": 8, "proj_coeff": 0.5}, False, "repa"),
    (dict(model="SiT-S/2", image_size=64, **TRANSPORT), False, "sit"),
    (dict(model="SiT-S/2", image_size=64), False, None),
    (dict(model="SiT-S/2", image_size=64, **TRANSPORT, flip_time=True), False, None),
    (dict(model="SiT-S/2", encoder_depth=8, proj_coeff=0.5, **TRANSPORT | {"prediction": "v"}), False, None),
    (dict(model="DiT-S/2", image_size=64, vae="ema"), True, "dit"), (dict(model="DiT-S/2", image_size=64), False, None),
    (dict(model="DiT-S/2", image_size=64, diffusion_steps=100), True, None), ({}, True, None),
    # keys that many trainers write
    (lambda state: {"model_state_dict": under("model.", state), "epoch": 3, "optimizer_state_dict": {}}, False, None),
    (lambda state: {"ema_state_dict": under("model.", state), "epoch": 3}, False, None),
    (lambda state: {"ema_state_dict": state}, False, None),
    (lambda state: {"ema": weights_of("lightning"), "args": argparse.Namespace(encoder_depth=8)}, False, None),
])
def test_a_family_is_shown_only_by_what_is_all_its_own(beside, learn_sigma, family, tmp_path):
    state = fill(DiT(**TINY, learn_sigma=learn_sigma)).state_dict()
    contents = [beside(state)] if callable(beside) else [{"ema": state, "args": argparse.Namespace(**beside)},
                                                         {"ema": state, "args": beside}]
    for content in contents:
        torch.save(content, tmp_path / "x.pt")
        with pytest.raises(ValueError, match="has no record") if family is None else contextlib.nullcontext():
            assert load_trained(tmp_path / "x.pt", num_heads=4).family == family


# ---- no null label --------------------------------------------------------------------------------------------------

TABLE = "y_embedder.embedding_table.weight"


def without_null_label(num_classes: int) -> dict:
    state = fill(DiT(**TINY, learn_sigma=True)).state_dict()
    return {**state, TABLE: state[TABLE][:num_classes].clone()}


@pytest.mark.parametrize("num_classes", [10, 1])
@pytest.mark.parametrize("say", [lambda n: ({"num_classes": n}, {}), lambda n: ({}, {"num_classes": n})],
                         ids=["args", "setting"])
def test_each_row_is_a_class_where_the_file_has_no_null_label(num_classes, say, tmp_path):
    args, given = say(num_classes)
    torch.save({"ema": without_null_label(num_classes), "args": argparse.Namespace(**args)}, tmp_path / "x.pt")
    trained = load_trained(tmp_path / "x.pt", diffusion="dit", num_heads=4, **given)
    assert trained.classes == list(range(num_classes))
    assert f"no null label (num_classes={num_classes})" in trained.inferred
    x, t, y = torch.randn(1, 4, 8, 8), torch.tensor([3.0]), torch.tensor([num_classes - 1])
    assert torch.equal(trained.net(x, t, y), fill(DiT(**TINY, learn_sigma=True)).eval()(x, t, y))
    Guidance(3, drop_label=False).check(trained.net)
    with pytest.raises(ValueError, match="trained with label_dropout=0.*set drop_label=false"):
        Guidance(3).check(trained.net)
    assert build_network(trained.recorded["network"]).null_label is False


def test_one_row_is_a_class_and_a_count_that_fits_no_table_is_refused(tmp_path):
    torch.save(without_null_label(1), tmp_path / "one.pt")
    assert load_trained(tmp_path / "one.pt", diffusion="dit", num_heads=4).classes == [0]
    torch.save(without_null_label(10), tmp_path / "ten.pt")
    assert load_trained(tmp_path / "ten.pt", diffusion="dit", num_heads=4).classes == list(range(9)), "nothing says so"
    with pytest.raises(ValueError, match="num_classes=7 does not fit the weights .* which have 9"):
        load_trained(tmp_path / "ten.pt", diffusion="dit", num_heads=4, num_classes=7)


def test_fine_tuning_on_other_classes_creates_a_new_label_table(tmp_path):
    save_file(fill(DiT(**TINY)).state_dict(), tmp_path / "bare.safetensors")
    record = {"network": TINY | {"routes": [], "num_classes": 4}, "diffusion": {"name": "rf"}, "seed": 3}
    with pytest.raises(ValueError, match="'num_classes': 10} there, {'num_classes': 4} here. new_label_table=true"):
        open_parent(one_rank(), str(tmp_path / "bare.safetensors"), record, "rf")
    parents = [open_parent(one_rank(), str(tmp_path / "bare.safetensors"), record, "rf", new_label_table=True).net
               for _ in range(2)]
    for key, value in fill(DiT(**TINY)).state_dict().items():
        own, again = (net.state_dict()[key] for net in parents)
        assert torch.equal(own, again) and (own.shape == (5, 64) if key == TABLE else torch.equal(own, value))
    assert 0.01 < parents[0].state_dict()[TABLE].std() < 0.03


def test_a_run_starts_from_the_weights_and_a_new_label_table_and_reports_which_weights(tmp_path, capsys):
    make(tmp_path)
    weights = ["init_from=weights.pt", "diffusion_name=edm", "new_label_table=true", "data.num_classes=7",
               "optimizer.lr=0"]
    run(tmp_path, "train", weights)
    assert "weights.pt has no record. Using the average under ema" in capsys.readouterr().out
    new, old = (load_trained(tmp_path / name).net.state_dict() for name in ("new", "run"))
    assert new[TABLE].shape == (8, 8) and old[TABLE].shape == (7, 8)
    assert all(torch.equal(new[key], old[key]) for key in old if key != TABLE)
    assert load_trained(tmp_path / "new", "model").net.state_dict()[TABLE].std() > 0


# ---- which weights, and where they lie -------------------------------------------------------------------------------


def shadow(state: dict) -> list:
    return [state[key] for key in state]  # as parameters() lists them: DiT's names are in the same order


AVERAGES = {name: (lambda ema, raw, name=name: {"model": raw, name: ema}) for name in (
    "ema", "model_ema", "ema_model", "ema_0.9999", "ema_state_dict", "state_dict_ema", "modelEMA", "net-ema",
    "averaged_model", "swa_model", "model_avg", "emamodel", "polyak")} | {
    "before": lambda ema, raw: {"ema_model": ema, "model": raw, "model_ema_2": raw},
    "by decay": lambda ema, raw: {"model": raw, "ema": {"0.9999": ema, "0.99": raw}},
    "a list of them": lambda ema, raw: {"model": raw, "emas": [ema, raw]},
    "nested": lambda ema, raw: {"ema": {"decay": 0.999, "state_dict": ema}, "state_dict": raw,
                                "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}},
    "module": lambda ema, raw: {"ema": {"module": under("module.", ema)}, "model": {"module": raw}},
    "deeper": lambda ema, raw: {"trainer": {"ema": {"shadow": ema}, "model": raw}},
    "flat": lambda ema, raw: {**under("online_model.", raw), **under("ema_model.module.", ema),
                              "initted": torch.tensor(True), "step": torch.tensor(3)},
    "lightning": lambda ema, raw: {"state_dict": under("net._orig_mod.", raw) | under("ema_net.", ema), "epoch": 3},
    "LitEma": lambda ema, raw: {"state_dict": {
        **under("model.", raw), **under("model_ema.", {key.replace(".", ""): value for key, value in ema.items()}),
        "model_ema.decay": torch.tensor(0.9)}},
    "AveragedModel": lambda ema, raw: {"model": raw, "other": under("module.", ema) | {"n_averaged": torch.tensor(7)}},
    "shadow_params": lambda ema, raw: {"model": raw, "ema": {"decay": 0.999, "shadow_params": shadow(ema)}},
    "no fixed tensors": lambda ema, raw: {"model": raw, "ema": without(ema, "pos_embed")},
}


def two(seed: int = 0) -> tuple[dict, dict]:
    raw = fill(DiT(**TINY, learn_sigma=True)).state_dict()
    return {key: value if key == "pos_embed" else value + 1 for key, value in raw.items()}, raw


def assert_loaded(path, expected: dict, says: str = "", **given) -> None:
    trained = load_trained(path, diffusion="dit", **{"num_heads": 4} | given)
    assert all(torch.equal(trained.net.state_dict()[key], value) for key, value in expected.items()), trained.inferred
    assert says in trained.inferred, trained.inferred


@pytest.mark.parametrize("form", AVERAGES)
def test_the_average_is_used_under_any_name_and_the_line_says_so(form, tmp_path):
    ema, raw = two()
    torch.save(AVERAGES[form](ema, raw), tmp_path / "x.pt")
    assert_loaded(tmp_path / "x.pt", ema, "Using the average under " if form != "AveragedModel" else "other")
    assert_loaded(tmp_path / "x.pt", raw, "as set by weights=model", weights="model")


@pytest.mark.parametrize("form", [
    lambda one, other, raw: {"model": raw, "ema_0.99": one, "ema_0.9999": other},
    lambda one, other, raw: {"model": raw, "ema": {"0.99": one, "0.9999": other}},
    lambda one, other, raw: under("model.", raw) | under("ema_0.99.", one) | under("ema_0.9999.", other),
], ids=["beside", "inside", "flat"])
def test_each_of_several_averages_can_be_chosen_and_they_are_listed(form, tmp_path):
    one, raw = two()
    other = {key: value if key == "pos_embed" else value + 2 for key, value in raw.items()}
    torch.save(form(one, other, raw), tmp_path / "x.pt")
    inferred = load_trained(tmp_path / "x.pt", diffusion="dit", num_heads=4).inferred
    keys = re.findall(r"ema[._]0\.9+", inferred)
    assert {key[4:] for key in keys} == {"0.99", "0.9999"} and "fid.py and export.py take weights=" in inferred
    for key in keys:
        assert_loaded(tmp_path / "x.pt", one if key.endswith(".99") else other, f"under {key}", weights=known_key(key))
    for name, expected in (("ema-0.99", one), ("ema-0.9999", other), ("model", raw),
                           (None, one if keys[0].endswith(".99") else other)):
        assert_loaded(tmp_path / "x.pt", expected, weights=name)
    with pytest.raises(ValueError, match="it holds .*, but no weights=ema-0.5"):
        load_trained(tmp_path / "x.pt", "ema-0.5", "dit", num_heads=4)


def known_key(key: str) -> str:
    """What the commands accept as weights=."""
    return read(SamplingWeights, {"weights": key}).weights


class SamplingWeights(Settings):
    weights: AnyWeights


def test_two_averages_of_a_file_are_two_sets_of_pictures(tmp_path):
    given = pixel_weights(tmp_path, learn_sigma=False)
    state = torch.load(tmp_path / "weights.pt", weights_only=True)["ema"]
    torch.save({"ema_0.9": state, "ema_0.99": {key: value * 1.1 for key, value in state.items()}},
               tmp_path / "weights.pt")
    draw = [*given, "diffusion_name=edm", "seeds=0-1", f"out={tmp_path}/out"]
    run_command(sample.main, "sample.py", *draw, "weights=ema_0.9")
    with pytest.raises(SystemExit, match="pictures of another set"):
        run_command(sample.main, "sample.py", *draw, "weights=ema_0.99")


# ---- what is no weights file ----------------------------------------------------------------------------------------

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 2697000000\n"
DECODED = ["sample.py", "checkpoint=weights.pt", "num_heads=2", "diffusion_name=edm"]
SCORED = ["fid.py", "features=pixels"]
PREPARED = ["prepare_latents.py", "resolution=16", "autoencoder=identity", "out=out"]
WITH_POINTERS = {  # what is a pointer, and the command that opens it
    "x.safetensors": (sample.main, ["sample.py", "checkpoint=x.safetensors"]),
    "x.pt": (sample.main, ["sample.py", "checkpoint=x.pt"]),
    "folder/model.safetensors": (sample.main, ["sample.py", "checkpoint=folder"]),
    "folder/model.safetensors.index.json": (sample.main, ["sample.py", "checkpoint=folder"]),
    "vae/diffusion_pytorch_model.safetensors": (sample.main, [*DECODED, "autoencoder=vae"]),
    "ldm.ckpt": (sample.main, [*DECODED, "autoencoder=ldm.ckpt"]),
    "ref.npz": (fid.main, [*SCORED, "images=good.npz", "reference=ref.npz"]),
    **{name: (fid.main, [*SCORED, f"images={Path(name).parts[0]}", "reference=good.npz"])
       for name in ("images.npy", "images.npz", "images.zip", "pictures/a/1.png")},
    "features.pt": (fid.main, ["fid.py", "images=good.npz", "features=inception", "features_weights=features.pt",
                               "reference=good.npz"]),
    "train/a/1.png": (prepare_latents.main, [*PREPARED, "source=train"]),
    "train-0.tar": (prepare_latents.main, [*PREPARED, "source=train-0.tar"]),
    "train.csv": (prepare_latents.main, [*PREPARED, "source=labelled", "labels=train.csv"]),
    "shards/latents_rank00_shard000.safetensors": (import_latents.main,
                                                   ["import_latents.py", "source=shards", "out=out"]),
    "vae-sd.zip": (import_latents.main, ["import_latents.py", "source=vae-sd.zip", "format=repa", "out=out"]),
    "imagenet256_features/0.npy": (import_latents.main, ["import_latents.py", "source=.", "format=fastdit", "out=out"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_POINTERS)
def test_a_pointer_of_git_lfs_is_called_one_wherever_a_file_is_opened(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pixel_weights(tmp_path, learn_sigma=False)
    np.savez("good.npz", arr_0=np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), dtype=np.uint8))
    for good in ("pictures/a/0.png", "pictures/a/2.png", "labelled/0.png"):
        (tmp_path / good).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), "red").save(good)
    if name.startswith("vae/"):
        save_vae(tmp_path / "vae", scaling_factor=0.5)
    if name.startswith("imagenet256_features"):
        (tmp_path / "imagenet256_labels").mkdir()
        np.save("imagenet256_labels/0.npy", np.array([1]))
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(POINTER)
    entry, (program, *given) = WITH_POINTERS[name]
    given += ["cpu=true"] if program in ("sample.py", "fid.py") else []
    with pytest.raises(SystemExit) as ended:
        run_command(entry, program, *given)
    assert "pointer of Git LFS" in str(ended.value) and "\n" not in str(ended.value)
    assert not (tmp_path / "out" / "metadata.json").exists()


def test_parts_of_fsdp_are_named_with_the_tool_that_joins_them_and_its_file_is_read(tmp_path):
    ema, raw = two()
    folder = tmp_path / "save" / "pytorch_model_fsdp_0"
    checkpoint_of_ranks.save({"model": raw, "ema": ema}, checkpoint_id=folder, no_dist=True)
    for given in (tmp_path / "save", folder, folder / "__0_0.distcp"):
        with pytest.raises(ValueError,
                           match="as FSDP saves it. Join its parts: python -m .*format_utils dcp_to_torch .*fsdp_0 "
                                 "weights.pt"):
            load_trained(given, diffusion="dit", num_heads=4)
    dcp_to_torch_save(folder, tmp_path / "weights.pt")
    assert_loaded(tmp_path / "weights.pt", ema, "under ema")


def test_files_of_deepspeeds_zero_are_named_with_its_script(tmp_path):
    _, raw = two()
    step = tmp_path / "save" / "global_step7"
    step.mkdir(parents=True)
    (tmp_path / "save" / "zero_to_fp32.py").touch()
    for kind in ("zero_pp_rank_0_mp_rank_00_model", "bf16_zero_pp_rank_0_mp_rank_00_optim"):
        torch.save({"module": {key: torch.empty(0) for key in raw}}, step / f"{kind}_states.pt")
    for given in (tmp_path / "save", step, step / "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        with pytest.raises(ValueError,
                           match=r"of DeepSpeed \(ZeRO\). Join .*: python .*save/zero_to_fp32.py .*save joined"):
            load_trained(given, diffusion="dit", num_heads=4)
    save_file({key: torch.empty(0) for key in raw}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="tensors without values, .* ZeRO-3 .* run the zero_to_fp32.py"):
        load_trained(tmp_path / "model.safetensors", diffusion="dit", num_heads=4)
    save_file(raw, tmp_path / "save" / "model.safetensors")
    assert_loaded(tmp_path / "save", raw)


@pytest.mark.parametrize("name", ["model", "state_dict", "schema", "model_non_ema"])
def test_raw_weights_are_called_raw_if_there_is_no_average(name, tmp_path):
    _, raw = two()
    torch.save({name: raw, "ema": {}}, tmp_path / "x.pt")
    assert_loaded(tmp_path / "x.pt", raw, f"the raw weights under {name}, as the file has no average")
    torch.save({name: raw, "teacher": raw}, tmp_path / "y.pt")
    assert_loaded(tmp_path / "y.pt", raw, "as no key names an average (beside ")
    with pytest.raises(ValueError, match=f"holds {name}, but no weights=ema"):
        load_trained(tmp_path / "x.pt", "ema", "dit", num_heads=4)


@pytest.mark.parametrize("prefix",
                         ["_orig_mod.module.", "model._orig_mod.", "model.module.", "module.module.", "net.",
                          "ema_model.", "_fsdp_wrapped_module._orig_mod.", "diffusion.model.module."])
def test_prefixes_go_whatever_their_order_and_number(prefix, tmp_path):
    _, raw = two()
    save_file(under(prefix, raw), tmp_path / "x.safetensors")
    assert_loaded(tmp_path / "x.safetensors", raw)
    inside = {re.sub(r"^blocks\.(\d)\.", r"blocks.\1._checkpoint_wrapped_module._orig_mod.", key): value
              for key, value in raw.items()}
    torch.save({"model": under(prefix, inside)}, tmp_path / "x.ckpt")
    assert_loaded(tmp_path / "x.ckpt", raw)


def write_shards(folder, state: dict, form: str = "model.safetensors") -> None:
    stem, suffix = form.split(".")
    where = {key: f"{stem}-0000{1 + i % 2}-of-00002.{suffix}" for i, key in enumerate(state)}
    for name in {*where.values()}:
        part = {key: value for key, value in state.items() if where[key] == name}
        save_file(part, folder / name) if suffix == "safetensors" else torch.save(part, folder / name)
    (folder / f"{form}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.parametrize("form", ["model.safetensors", "pytorch_model.bin"])
def test_shards_are_read_as_one_and_known_by_one_hash(form, tmp_path):
    _, raw = two()
    write_shards(tmp_path, raw, form)
    stem, suffix = form.split(".")
    first = tmp_path / f"{stem}-00001-of-00002.{suffix}"
    for path in (tmp_path, tmp_path / f"{form}.index.json"):
        assert_loaded(path, raw)
    before = load_trained(tmp_path, diffusion="dit", num_heads=4).checkpoint.sha256
    with pytest.raises(ValueError, match="one of several shards: name the .index.json"):
        load_trained(first, diffusion="dit", num_heads=4)
    write_shards(tmp_path, raw | {"final_layer.linear.bias": raw["final_layer.linear.bias"] + 1}, form)
    assert load_trained(tmp_path, diffusion="dit", num_heads=4).checkpoint.sha256 != before
    first.unlink()
    with pytest.raises(ValueError, match=f"2 shards, but 1 are not beside it: download {first.name}"):
        load_trained(tmp_path, diffusion="dit", num_heads=4)


@pytest.mark.parametrize("custom", [
    lambda ema: {"shadow_params": shadow(ema), "decay": 0.99},
    lambda ema: under("ema_model.", ema) | {"step": torch.tensor(3)}, lambda ema: under("module.", ema),
])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_the_average_in_a_folder_of_accelerate_is_used(name, custom, tmp_path):
    ema, raw = two()
    save_file(raw, tmp_path / name) if name.endswith("safetensors") else torch.save(raw, tmp_path / name)
    for other, content in (("optimizer.bin", {"state": {0: {"exp_avg": torch.ones(3)}}}),
                           ("dl_state_dict.bin", {"_num_yielded": 3}), ("custom_checkpoint_0.pkl", {"last_epoch": 3})):
        torch.save(content, tmp_path / other)
    assert_loaded(tmp_path, raw, "the only weights in it")
    torch.save(custom(ema), tmp_path / "custom_checkpoint_1.pkl")
    assert_loaded(tmp_path, ema, "the average under custom_checkpoint_1")
    assert_loaded(tmp_path, raw, weights="model")


def test_the_average_among_several_files_of_a_folder_is_used_or_an_error_asks_for_one(tmp_path):
    ema, raw = two()
    for name, state in (("model_0100", raw), ("model_0200", raw)):
        torch.save(state, tmp_path / f"{name}.pt")
    with pytest.raises(ValueError, match="several weights files, model_0100.pt, model_0200.pt: name one"):
        load_trained(tmp_path, diffusion="dit", num_heads=4)
    torch.save(ema, tmp_path / "ema_0.9999_0200.pt")
    assert_loaded(tmp_path, ema)


def write_pipeline(folder, state: dict, **config) -> None:
    """Writes what diffusers' DiTPipeline saves, which has no position embedding among its weights."""
    for name, content in {
        "model_index.json": {"_class_name": "DiTPipeline"}, "vae/config.json": {"_class_name": "AutoencoderKL"},
        "scheduler/scheduler_config.json": {"_class_name": "DDIMScheduler", "num_train_timesteps": 1000,
                                            "prediction_type": "epsilon"},
        "transformer/config.json": {"_class_name": "DiTTransformer2DModel", "num_attention_heads": 4, "sample_size": 8,
                                    "num_embeds_ada_norm": 10} | config,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    theirs = {key: value.clone() for key, value in to_diffusers(state, 3).items() if key != "pos_embed.pos_embed"}
    save_file(theirs, folder / "transformer/diffusion_pytorch_model.safetensors")


def test_diffusers_own_dit_is_read_with_and_without_its_pipeline(tmp_path):
    _, raw = two()
    write_pipeline(tmp_path / "whole", raw)
    trained = load_trained(tmp_path / "whole")
    assert trained.family == "dit" and trained.net.blocks[0].attn.num_heads == 4
    assert trained.autoencoder == str(tmp_path / "whole/vae")
    assert all(torch.equal(trained.net.state_dict()[key], value) for key, value in raw.items())
    (tmp_path / "whole/transformer").rename(tmp_path / "alone")
    with pytest.raises(ValueError, match="has no record"):
        load_trained(tmp_path / "alone")
    assert_loaded(tmp_path / "alone", raw, num_heads=None)
    (tmp_path / "alone/config.json").unlink()
    with pytest.raises(ValueError, match="no position embedding.*set input_size="):
        load_trained(tmp_path / "alone", diffusion="dit", num_heads=4)
    assert_loaded(tmp_path / "alone", raw, input_size=8)


def test_a_pipeline_that_predicts_something_else_or_has_many_embedders_is_not_read_as_dit(tmp_path):
    _, raw = two()
    write_pipeline(tmp_path, raw)
    (tmp_path / "scheduler/scheduler_config.json").write_text(
        '{"num_train_timesteps": 1000, "prediction_type": "v_prediction"}')
    with pytest.raises(ValueError, match="has no record"):
        load_trained(tmp_path)
    theirs = {key: value.clone() for key, value in to_diffusers(raw, 3).items()}
    theirs["transformer_blocks.1.norm1.emb.timestep_embedder.linear_1.weight"] += 1
    save_file(theirs, tmp_path / "transformer/diffusion_pytorch_model.safetensors")
    with pytest.raises(ValueError, match="transformer_blocks.1.*differs from transformer_blocks.0"):
        load_trained(tmp_path, diffusion="dit")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_read_in_float32(dtype, tmp_path):
    stored = {key: value.to(dtype) for key, value in two()[1].items()}
    save_file(stored, tmp_path / "x.safetensors")
    assert_loaded(tmp_path / "x.safetensors", {key: value.float() for key, value in stored.items()})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_eight_bits_are_refused_by_name(dtype, tmp_path):
    save_file({key: value.to(dtype) if value.ndim > 1 else value for key, value in two()[1].items()},
              tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=f"tensors in {str(dtype).removeprefix('torch.')}"):
        load_trained(tmp_path / "x.safetensors", diffusion="dit", num_heads=4)


# ---- samplers -------------------------------------------------------------------------------------------------------


def guidance_of(case: dict) -> Guidance | None:
    return case["scale"] and Guidance(case["scale"], interval=case.get("interval"), channels=case.get("channels"))


def sampled(diffusion: RF | DDPM, net: nn.Module, case: dict, solver: str, **settings):
    return diffusion.sample(net, wave(case["shape"], 2, 1.4), torch.tensor(case["y"]), num_steps=case["num_steps"],
                            solver=solver, guidance=guidance_of(case), randn_like=CountedNoise(), **settings)


@pytest.mark.parametrize("family, case", [(family, case) for family, published in (("sit", SIT), ("repa", REPA))
                                          for case in published["sde"]])
def test_euler_maruyama_equals_sit_and_repa(family, case, tmp_path):
    assert_equal(sampled(RF(), loaded(family, tmp_path).net, case, "euler_maruyama"), case["out"])


@pytest.mark.parametrize("case", REPA["ode"], ids=names(REPA["ode"]))
def test_euler_and_heun_equal_repa(case, tmp_path):
    assert_equal(sampled(RF(), loaded("repa", tmp_path).net, case, case["solver"]), case["out"])


@pytest.mark.parametrize("case", LIGHTNING["ode"], ids=names(LIGHTNING["ode"]))
def test_shifted_steps_and_the_interval_equal_lightningdit(case, tmp_path):
    # Their n points are n - 1 steps, their time is 1 - t, and a shift there is its inverse here.
    start = case["cfg_interval_start"]
    ours = case | {"num_steps": case["num_sampling_steps"] - 1, "interval": start and (0.0, 1 - start)}
    z = sampled(RF(), loaded("lightning", tmp_path).net, ours, "euler", shift=1 / case["timestep_shift"])
    assert_equal(z, case["out"])


class NearNoise(nn.Module):
    """Mostly the state itself, which is mostly noise, as a random network is far from predicting it."""

    def __init__(self):
        super().__init__()
        self.net, self.num_classes, self.in_channels, self.input_size = fill(DiT(**TINY, learn_sigma=True)), 10, 4, 8

    def forward(self, x, t, y, routes=()):
        return torch.cat([x, torch.zeros_like(x)], dim=1) + 0.1 * self.net(x, t, y)


@pytest.mark.parametrize("case", DDPM_["ancestral"], ids=names(DDPM_["ancestral"]))
def test_ancestral_sampling_equals_facebookresearch_dit(case):
    assert_equal(sampled(DDPM(), NearNoise(), case, "ancestral"), case["out"])


def test_the_steps_are_respaced_as_in_facebookresearch_dit():
    seen = []

    class Watch(NearNoise):
        def forward(self, x, t, y, routes=()):
            seen.append(int(t[0]))
            return torch.zeros_like(torch.cat([x, x], dim=1))

    for num_steps, steps in DDPM_["steps"].items():
        seen.clear()
        DDPM().sample(Watch(), torch.zeros(1, 4, 8, 8), torch.tensor([0]), num_steps=int(num_steps), solver="ancestral")
        assert seen == steps[::-1]


# ---- guidance on the first channels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("diffusion", [RF(), EDM()], ids=["rf", "edm"])
@torch.no_grad()
def test_channels_beyond_those_guided_are_the_strong_passs_bit_for_bit(diffusion):
    net, noise, y = fill(DiT(**TINY)), torch.randn(2, 4, 8, 8), torch.tensor([1, 2])
    predict = diffusion.velocity if isinstance(diffusion, RF) else diffusion.denoise
    three, all_, none = (guidance.guide(predict, net, noise, y, 4)(noise, 0.5, 0)
                         for guidance in (Guidance(3, channels=3), Guidance(3), Guidance(3, interval=(0.8, 0.9))))
    assert torch.equal(three[:, :3], all_[:, :3]) and torch.allclose(three[:, 3], none[:, 3], atol=1e-6)
    assert not torch.allclose(all_[:, 3], none[:, 3], atol=1e-2)
    assert torch.equal(Guidance(3, channels=4).guide(predict, net, noise, y, 4)(noise, 0.5, 0), all_)


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call, says", [
    (lambda: DDPM().sample(None, None, None, solver="euler"), "neither heun nor ancestral"),
    (lambda: DDPM().sample(fill(DiT(**TINY)), torch.zeros(1, 4, 8, 8), torch.tensor([0]), 2, solver="ancestral"),
     "set sampler.solver=heun"),
    (lambda: sampler_settings(RF(), {"solver": "euler_maruyama", "rho": 2.0}),
     "RF with solver=euler_maruyama has no such setting; it has solver, shift"),
])
def test_what_does_not_fit_raises_a_one_line_error(call, says):
    with pytest.raises(ValueError, match=says):
        call()


# ---- commands -------------------------------------------------------------------------------------------------------

PIXELS = dict(input_size=8, patch_size=2, in_channels=3, hidden_size=32, depth=2, num_heads=2, num_classes=3,
              init="xavier")


def pixel_weights(folder, learn_sigma: bool):
    torch.manual_seed(0)
    state = build_network(PIXELS | {"learn_sigma": learn_sigma}).state_dict()
    torch.save({"ema": state}, folder / "weights.pt")
    return [f"checkpoint={folder}/weights.pt", "num_heads=2", "cpu=true", "num_steps=4"]


@pytest.mark.parametrize("family, solver", [("sit", "euler_maruyama"), ("dit", "ancestral")])
def test_an_image_of_a_stochastic_sampler_is_a_function_of_its_seed(family, solver, tmp_path):
    given = [*pixel_weights(tmp_path, learn_sigma=True), f"diffusion_name={family}", f"sampler.solver={solver}",
             "classes=[1]"]
    for name, seeds, batch_size in (("together", "4-7", 4), ("alone", "6", 1), ("others", "5,6", 2)):
        seeds = f"[{seeds}]" if "," in seeds else seeds
        run_command(sample.main, "sample.py", *given, f"seeds={seeds}", f"batch_size={batch_size}",
                    f"out={tmp_path}/{name}.npz")
    together, alone, others = (np.load(tmp_path / f"{name}.npz")["arr_0"].astype(int)
                               for name in ("together", "alone", "others"))
    assert np.abs(together[2] - alone[0]).max() <= 1 and np.abs(together[1:3] - others).max() <= 1
    assert np.abs(together[0] - together[1]).max() > 10


def test_a_score_says_whose_weights_which_solver_and_which_channels(tmp_path):
    np.savez(tmp_path / "ref.npz", arr_0=np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), dtype=np.uint8))
    given = [*pixel_weights(tmp_path, learn_sigma=True), "num_samples=4", "features=pixels",
             f"reference={tmp_path}/ref.npz", f"results={tmp_path}/r.jsonl"]
    run_command(fid.main, "fid.py", *given, "diffusion_name=sit", "sampler.solver=euler_maruyama", "guidance=cfg",
                "channels=2")
    run_command(fid.main, "fid.py", *given, "diffusion_name=dit", "sampler.solver=ancestral")
    sit, dit = (json.loads(line)["source"] for line in (tmp_path / "r.jsonl").read_text().splitlines())
    assert sit["guidance"]["channels"] == 2 and dit["guidance"] is None
    expected = [("sit", "RF", {"solver": "euler_maruyama"}, 8), ("dit", "DDPM", {"solver": "ancestral"}, 4)]
    assert [tuple(source[key] for key in ("family", "diffusion", "sampler", "evaluations"))
            for source in (sit, dit)] == expected
