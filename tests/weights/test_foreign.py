"""Others' weights become a network of ours or are refused, and samplers return published numbers (tests/published)."""

import argparse
import itertools
import json
import re

import pytest
import torch
from closed_forms import amplitude_of
from conftest import run_command, save_vae
from safetensors.torch import save_file
from spoils import refused
from test_published_parity import DDPM_, TINY, TINY_LIGHTNING, CountedNoise, assert_equal, fill, filled, published, wave
from torch import nn
from training_runs import trained

import sample
from blocks.transformer import rotary_angles
from dit import DiT
from edm import DDPM
from guidance import Guidance
from rf import RF
from weights.autoencoders import load_autoencoder
from weights.foreign import diffusers_names
from weights.loading import load_trained
from weights.records import build_network

SIT, REPA, LIGHTNING = published("sit"), published("repa"), published("lightning")
ARGS = dict(results_dir="results", image_size=256, num_classes=1000)
SIT_ARGS = argparse.Namespace(**ARGS, model="SiT-XL/2", path_type="Linear", prediction="velocity", loss_weight=None)
DIT_ARGS = argparse.Namespace(**ARGS, model="DiT-XL/2", vae="ema")
FAMILIES = ("sit", "repa", "repa, legacy", "lightning")


def tables(side: int = 4, head_dim: int = 16) -> dict:
    """The buffers of LightningDiT's feat_rope: each angle for two neighbouring channels."""
    angles = rotary_angles(torch.arange(side**2).unsqueeze(0), side, head_dim)[0, 0].repeat_interleave(2, dim=1)
    return {"feat_rope.freqs_cos": angles.cos(), "feat_rope.freqs_sin": angles.sin()}


def weights_of(family: str) -> dict:
    """The weights with which the published side ran, under the keys of its file."""
    if family in ("dit", "sit", "tread", "diffusers"):
        state = fill(DiT(**TINY, learn_sigma=family != "tread")).state_dict()
        return to_diffusers(state) if family == "diffusers" else state
    if family == "lightning":
        return filled(DiT(**TINY_LIGHTNING)).state_dict() | tables()
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
        state = {re.sub(r"^blocks\.([12])\.", lambda match: f"decoder_blocks.{int(match[1]) - 1}.", key): value
                 for key, value in state.items()}
        assert "decoder_blocks.1.attn.qkv.weight" in state and "blocks.1.attn.qkv.weight" not in state
    return state


def published_file(family: str, folder, state: dict | None = None):
    """Writes a file as the family's train.py does, with the average `state`."""
    ema = under({"lightning": "module.", "tread": "model."}.get(family, ""), state or weights_of(family))
    other = {key: torch.zeros_like(value) for key, value in ema.items()}
    beside = {"dit": {"args": DIT_ARGS}, "sit": {"args": SIT_ARGS}, "diffusers": {},
              "lightning": {"config": {"transport": {"path_type": "Linear", "prediction": "velocity"}}}}
    path = folder / "0400000.pt"
    content = {"model": other, "ema": ema, "opt": {}, **beside.get(family, {"steps": 400000})}
    if family == "tread":
        content = {"model_state_dict": other, "ema_state_dict": ema, "optimizer_state_dict": {}, "step": 400000}
    torch.save(content, path)
    return path


def loaded(family: str, folder) -> nn.Module:
    return load_trained(published_file(family, folder), num_heads=4)


def under(prefix: str, state: dict) -> dict:
    return {f"{prefix}{key}": value for key, value in state.items()}


def without(state: dict, part: str) -> dict:
    return {key: value for key, value in state.items() if part not in key}


# ---- published files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_published_file_says_its_origin_and_its_velocity_is_ours(family, tmp_path):
    case = {"sit": SIT, "lightning": {"velocity": LIGHTNING["forward"][0]}}.get(family, REPA)["velocity"]
    trained = loaded(family, tmp_path)
    assert type(trained.diffusion) is RF and trained.family == family.partition(",")[0]
    assert trained.family in trained.inferred
    again = load_trained(published_file(family, tmp_path), like={"diffusion": "edm", "num_heads": 4})
    assert again.family == trained.family, "of a weak network, its own file decides"
    assert (trained.net.in_channels, trained.net.out_channels, trained.weights) == (4, 4, "ema")
    sign, t = (1, torch.tensor(case["t"])) if "repa" in family else (-1, 1 - torch.tensor(case["t"]))
    v = RF().velocity(trained.net, wave(case["shape"], amplitude=1.4), t, torch.tensor(case["y"]))
    assert_equal(sign * v, case["out"])


@pytest.mark.parametrize("family", [*FAMILIES, "dit", "tread", "diffusers"])
def test_each_tensor_of_a_published_form_is_used_or_named(family, tmp_path):
    def load(tensors):
        sizes = {"input_size": 8} if family == "diffusers" else {}
        return load_trained(published_file(family, tmp_path, tensors), diffusion=name, num_heads=4, **sizes)

    state, name = weights_of(family), {"diffusers": "dit"}.get(family, family.partition(",")[0])
    assert load(state).weights == "ema"
    block = "transformer_blocks" if family == "diffusers" else "blocks"
    spoilt = {key: without(state, key) for key in [*state][::8] if not key.startswith("projectors.")}
    spoilt |= {key: state | {key: torch.zeros(3)} for key in (f"{block}.1.more.weight", "scale.weight")}
    if "repa" not in family:  # whose training alone reads them
        spoilt |= {"projectors.0.weight": state | {"projectors.0.weight": torch.zeros(3)}}
    for tensor, tensors in spoilt.items():
        with pytest.raises(ValueError, match=re.sub(r"^(decoder_)?blocks\.\d\.|freqs_.*", "", tensor)):
            load(tensors)


def lightning(rope: bool, swiglu: bool, rmsnorm: bool, qknorm: bool) -> dict:
    """The tensors of a LightningDiT with these switches."""
    block, plain = (filled(DiT(**TINY_LIGHTNING | {"block": name, "qk_norm": qknorm})).state_dict()
                    for name in ("lightning", "dit"))
    state = {key: value for key, value in (block if swiglu else plain).items() if "norm" not in key}
    normed = block if rmsnorm else plain
    return state | {key: normed[key] for key in normed if "norm" in key} | (tables() if rope else {})


@pytest.mark.parametrize("switches", itertools.product([True, False], repeat=4), ids=str)
def test_each_switch_of_lightningdit_is_in_the_network_or_its_tensor_is_named(switches, tmp_path):
    rope, swiglu, rmsnorm, _ = switches
    save_file(lightning(*switches), tmp_path / "x.safetensors")
    supported = {(True, True, True): "lightning", (False, False, False): "dit"}
    if block := supported.get((rope, swiglu, rmsnorm)):
        trained = load_trained(tmp_path / "x.safetensors", diffusion="lightning", num_heads=4)
        assert trained.recorded["network"]["block"] == block
    else:
        with pytest.raises(ValueError, match=r"feat_rope|norm1\.weight"):
            load_trained(tmp_path / "x.safetensors", diffusion="lightning", num_heads=4)


@pytest.mark.parametrize(("angles", "heads"), [
    (tables(head_dim=32), 4), (tables(side=8), 4), (tables(), 8), ({"feat_rope.freqs_cos": torch.ones(16, 16)}, 4),
    ({key: -value for key, value in tables().items()}, 4)])
def test_other_angles_than_our_blocks_compute_are_refused(angles, heads, tmp_path):
    torch.save({"ema": without(weights_of("lightning"), "feat_rope") | angles}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=f"feat_rope for other angles than {heads} heads and 4 x 4 tokens"):
        load_trained(tmp_path / "x.pt", num_heads=heads)


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
    (lambda state: {"ema_state_dict": under("model.", state), "step": 7}, False, "tread"),
    # keys that many trainers write
    (lambda state: {"model_state_dict": under("model.", state), "epoch": 3, "optimizer_state_dict": {}}, False, None),
    (lambda state: {"ema_state_dict": state}, False, None),
    (lambda state: {"ema": weights_of("lightning"), "args": argparse.Namespace(encoder_depth=8)}, False, None),
    (lambda state: state, True, None), (lambda state: state, False, None),
    (lambda state: without(weights_of("lightning"), "feat_rope"), False, None),
])
def test_a_family_is_shown_only_by_what_is_all_its_own(beside, learn_sigma, family, tmp_path):
    state = fill(DiT(**TINY, learn_sigma=learn_sigma)).state_dict()
    contents = [beside(state)] if callable(beside) else [{"ema": state, "args": argparse.Namespace(**beside)},
                                                         {"ema": state, "args": beside}]
    for content in contents:
        torch.save(content, tmp_path / "x.pt")
        if family is None:
            with pytest.raises(ValueError, match="has no record.*set diffusion_name= to one of .*train.py that wrote"):
                load_trained(tmp_path / "x.pt", num_heads=4)
        else:
            assert load_trained(tmp_path / "x.pt", num_heads=4).family == family


def test_a_run_starts_from_the_weights_and_a_new_label_table_and_reports_which_weights(shapes, tmp_path):
    trained(tmp_path / "old", shapes, "steps=1")
    old = load_trained(tmp_path / "old").net.state_dict()
    torch.save({"model": {}, "ema": old | {TABLE: old[TABLE][:3].clone()}}, tmp_path / "x.pt")
    printed = trained(tmp_path / "new", shapes, f"init_from={tmp_path}/x.pt", "diffusion_name=edm", "steps=1",
                      "new_label_table=true", "optimizer.lr=0")
    assert "x.pt has no record. Using weights=ema, as edm" in printed
    new = load_trained(tmp_path / "new").net.state_dict()
    assert new[TABLE].shape == old[TABLE].shape and 0.01 < new[TABLE].std() < 0.03
    assert not torch.equal(new[TABLE][:3], old[TABLE][:3])
    assert all(torch.equal(new[key], old[key]) for key in old if key != TABLE)


# ---- labels, positions, variances -----------------------------------------------------------------------------------

TABLE = "y_embedder.embedding_table.weight"


@pytest.mark.parametrize(("rows", "args", "settings", "num_classes", "null_label"), [
    (10, {"num_classes": 10}, {}, 10, False), (10, {}, {"num_classes": 10}, 10, False),
    (1, {"num_classes": 1}, {}, 1, False), (1, {}, {}, 1, False),
    (10, {}, {}, 9, True), (10, {"num_classes": 1000}, {}, 9, True)])
def test_each_row_is_a_class_only_where_nothing_says_that_one_is_no_label(rows, args, settings, num_classes, null_label,
                                                                          tmp_path):
    whole = fill(DiT(**TINY, learn_sigma=True)).eval()
    state = whole.state_dict()
    torch.save({"ema": {**state, TABLE: state[TABLE][:rows].clone()}, "args": argparse.Namespace(**args)},
               tmp_path / "x.pt")
    trained = load_trained(tmp_path / "x.pt", diffusion="dit", num_heads=4, **settings)
    assert trained.classes == list(range(num_classes)) and trained.net.null_label == null_label
    assert (f"no null label (num_classes={num_classes})" in trained.inferred) != null_label
    x, t, y = torch.randn(2, 4, 8, 8), torch.full((2,), 3.0), torch.tensor([num_classes - 1, rows - 1])
    assert torch.equal(trained.net(x, t, y), whole(x, t, y))  # facebookresearch/DiT#108: the last row is no label
    assert build_network(trained.recorded["network"]).null_label == null_label
    if not null_label:
        with pytest.raises(ValueError, match="trained with label_dropout=0.*set drop_label=false"):
            Guidance(3).check(trained.net)


# ---- which network of a file ----------------------------------------------------------------------------------------

RAW = fill(DiT(**TINY, learn_sigma=True)).state_dict()
EMA = {key: value if key == "pos_embed" else value + 1 for key, value in RAW.items()}
CHECKPOINTED = {re.sub(r"^blocks\.(\d)\.", r"blocks.\1._checkpoint_wrapped_module._orig_mod.", key): value
                for key, value in RAW.items()}
KNOWN_PAIR = {"model": RAW, "ema": EMA, "opt": {"state": {0: {"exp_avg": torch.ones(3)}}}}


@pytest.mark.parametrize("content, weights, expected, says", [
    (RAW, None, RAW, "Using its only weights, as dit"),
    (KNOWN_PAIR, None, EMA, "Using weights=ema (not model), as dit"), (KNOWN_PAIR, "model", RAW, "weights=model"),
    ({"model": {}, "ema": EMA, "args": DIT_ARGS}, None, EMA, "weights=ema"),
    ({"model": RAW, "ema": {}}, None, RAW, "weights=model,"),
    ({"model": RAW, "model_ema": EMA}, "model_ema", EMA, "weights=model_ema (not model)"),
    ({"ema_0.99": RAW, "ema_0.9999": EMA}, "ema_0.9999", EMA, "weights=ema_0.9999"),
    (under("ema_model.module.", EMA) | under("online_model.", RAW) | {"step": torch.tensor(3)}, "ema_model", EMA, ""),
    ({"state_dict": under("net.", RAW), "epoch": 3}, None, RAW, "weights=state_dict.net"),
    ({"module": RAW, "ds_version": "0.16.2"}, None, RAW, ""),  # DeepSpeed, stage 2 (Tencent-Hunyuan/HunyuanDiT#107)
    ({"n_averaged": torch.tensor(7)} | under("module.", EMA), None, EMA, "Using its only weights"),
    *((under(prefix, CHECKPOINTED), None, RAW, "") for prefix in (
        "_orig_mod.module.", "model._orig_mod.", "model.module.", "module.module.", "net.",
        "_fsdp_wrapped_module._orig_mod.", "diffusion.model.module.")),
    *(({key: value.to(dtype) for key, value in RAW.items()}, None,
       {key: value.to(dtype).float() for key, value in RAW.items()}, "")
      for dtype in (torch.float16, torch.bfloat16, torch.float64)),
])
@pytest.mark.parametrize("is_new", [True, False], ids=["", "in the old format of torch"])
def test_the_network_that_is_meant_is_read(content, weights, expected, says, is_new, tmp_path):
    torch.save(content, tmp_path / "x.pt", _use_new_zipfile_serialization=is_new)
    trained = load_trained(tmp_path / "x.pt", weights, "dit", num_heads=4)
    assert all(torch.equal(trained.net.state_dict()[key], value) for key, value in expected.items())
    assert says in trained.inferred


@pytest.mark.parametrize("content, weights, says", [
    ({"model": RAW, "model_ema": EMA}, None, "several networks: set weights=model or weights=model_ema"),
    ({"model": RAW, "ema": EMA, "ema_0.99": RAW}, None, "several networks: set weights=model or weights=ema or"),
    ({"state_dict": under("net.", RAW) | under("ema_net.", EMA)}, None, "weights=state_dict.net or weights=state_dict"),
    ({"model": RAW, "ema": {"shadow_params": [*EMA.values()]}}, None, "its ema is no state dict.*set weights=model"),
    ({"model": RAW, "ema": EMA}, "ema-0.5", "it has no weights=ema-0.5: set weights=model or weights=ema"),
    ({"state_dict": RAW}, "ema", "it has no weights=ema: set weights=state_dict"),
    (RAW, "model", "it has no weights=model: leave weights= out"),
    *((content, None, "holds no DiT's state dict") for content in (
        {"trainer": {"ema": EMA}}, [RAW], {"epoch": 3}, {"conv.weight": torch.zeros(3)})),
    ({key: value.to(torch.int8) for key, value in RAW.items()}, None, "tensors in int8"),
    ({key: value.to(torch.float8_e4m3fn) for key, value in RAW.items()}, None, "tensors in float8_e4m3fn"),
    ({**RAW, "pos_embed": RAW["pos_embed"] / 0}, None, "not finite in 1 of .* tensors, pos_embed"),
    # ByteDance-Seed/Bagel#160: a frozen part is missing in the average; the raw weights must not fill it up.
    ({"model": RAW, "ema": without(EMA, "t_embedder")}, None, "do not fit their network.*t_embedder.mlp.0.weight"),
    ({"model": RAW, "ema": without(EMA, "pos_embed")}, None, "no position embedding.*set input_size="),
    # pytorch/pytorch#94575: a loader that is not strict ignores keys and samples another network.
    (under("net.", RAW) | {"mean": torch.zeros(4)}, None, "do not fit their network.*mean"),
    (under("net.", RAW) | {"scale": torch.tensor(0.5)}, None, "do not fit their network.*scale"),
    ({"module": {key: torch.empty(0) for key in RAW}}, None, "not a DiT's"),  # a rank's part of DeepSpeed, ZeRO-3
    ({"ema": RAW, "args": argparse.Namespace(**vars(SIT_ARGS) | {"path_type": "GVP"})}, None,
     "path_type=GVP, but only linear is supported"),
    ({"ema": RAW, "config": {"transport": {"prediction": "score"}}}, None, "prediction=score, but only velocity"),
])
def test_what_could_be_read_in_two_ways_or_not_completely_is_refused(content, weights, says, tmp_path):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=says) as refused:
        load_trained(tmp_path / "x.pt", weights, "dit", num_heads=4)
    assert "\n" not in str(refused.value)


def test_a_folder_of_several_weights_files_asks_for_one(tmp_path):
    for name in ("optimizer.bin", "model.safetensors"):
        save_file(RAW, tmp_path / name)
    with pytest.raises(ValueError, match="several weights files: name one of .*model.safetensors, .*optimizer.bin"):
        load_trained(tmp_path)
    (tmp_path / "optimizer.bin").unlink()
    assert torch.equal(load_trained(tmp_path, diffusion="dit", num_heads=4).net.pos_embed, RAW["pos_embed"])


def test_two_networks_of_a_file_are_two_sets_of_pictures(tmp_path):
    of_pixels = fill(DiT(**TINY | {"in_channels": 3}, learn_sigma=True)).state_dict()
    torch.save({f"ema_{decay}": of_pixels for decay in (0.9, 0.99)}, tmp_path / "x.pt")
    draw = [f"checkpoint={tmp_path}/x.pt", "num_heads=2", "cpu=true", "num_steps=1", "diffusion_name=edm", "seeds=0-1",
            f"out={tmp_path}/out"]
    run_command(sample.main, "sample.py", *draw, "weights=ema_0.9")
    with pytest.raises(SystemExit, match="pictures of another set"):
        run_command(sample.main, "sample.py", *draw, "weights=ema_0.99")


@pytest.mark.parametrize("load, name", [
    (load_trained, "x.safetensors"), (load_trained, "x.pt"), (load_trained, "folder/model.safetensors"),
    (load_autoencoder, "ldm.ckpt"), (load_autoencoder, "vae/diffusion_pytorch_model.safetensors")])
def test_a_pointer_of_git_lfs_is_called_one(load, name, tmp_path):
    save_vae(tmp_path / "vae", scaling_factor=0.5)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 2697\n")
    refused(lambda: load(str(tmp_path / name.partition("/")[0])), "pointer of Git LFS")


# ---- diffusers' DiT -------------------------------------------------------------------------------------------------

EMBEDDER = "transformer_blocks.1.norm1.emb.timestep_embedder.linear_1.weight"


def to_diffusers(state: dict, depth: int = 3) -> dict:
    renamed = {}
    for ours, copies in diffusers_names(depth).items():
        parts = state[ours].chunk(3) if ".qkv." in ours else [state[ours]] * len(copies)
        renamed |= {name: part.clone() for name, part in zip(copies, parts, strict=True)}
    return renamed


def write_pipeline(folder, state: dict, **schedule: object) -> None:
    """Writes what diffusers' DiTPipeline saves, which has no position embedding among its weights."""
    for name, content in {
        "model_index.json": {"_class_name": "DiTPipeline"}, "vae/config.json": {"_class_name": "AutoencoderKL"},
        "scheduler/scheduler_config.json": {
            "_class_name": "DDIMScheduler", "num_train_timesteps": 1000, "beta_start": 0.0001, "beta_end": 0.02,
            "beta_schedule": "linear", "prediction_type": "epsilon", "trained_betas": None} | schedule,
        "transformer/config.json": {"_class_name": "DiTTransformer2DModel", "num_attention_heads": 4, "sample_size": 8,
                                    "num_embeds_ada_norm": 10},
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    save_file(state, folder / "transformer/diffusion_pytorch_model.safetensors")


def test_diffusers_own_dit_is_read_with_and_without_its_pipeline(tmp_path):
    write_pipeline(tmp_path / "whole", to_diffusers(RAW))
    trained = load_trained(tmp_path / "whole")
    assert trained.family == "dit" and trained.net.blocks[0].attn.num_heads == 4
    assert trained.autoencoder == str(tmp_path / "whole/vae")
    (tmp_path / "whole/transformer").rename(tmp_path / "alone")
    with pytest.raises(ValueError, match="has no record"):
        load_trained(tmp_path / "alone")
    alone = [trained, load_trained(tmp_path / "alone", diffusion="dit")]
    (tmp_path / "alone/config.json").unlink()
    with pytest.raises(ValueError, match="no position embedding.*set input_size="):
        load_trained(tmp_path / "alone", diffusion="dit", num_heads=4)
    alone.append(load_trained(tmp_path / "alone", diffusion="dit", num_heads=4, input_size=8))
    for each in alone:
        assert all(torch.equal(each.net.state_dict()[key], value) for key, value in RAW.items())


@pytest.mark.parametrize("changes, schedule, says", [
    *(({}, schedule, "has no record") for schedule in (
        {"prediction_type": "v_prediction"}, {"prediction_type": None}, {"num_train_timesteps": 500},
        {"beta_schedule": "squaredcos_cap_v2"}, {"trained_betas": [0.1]})),
    ({EMBEDDER: to_diffusers(RAW)[EMBEDDER] + 1}, {}, f"{EMBEDDER} differs from transformer_blocks.0")])
def test_a_pipeline_without_dits_schedule_or_of_several_embedders_is_refused(changes, schedule, says, tmp_path):
    write_pipeline(tmp_path, to_diffusers(RAW) | changes, **schedule)
    with pytest.raises(ValueError, match=says):
        load_trained(tmp_path)


# ---- samplers -------------------------------------------------------------------------------------------------------


def sampled(diffusion: RF | DDPM, net: nn.Module, case: dict, solver: str, **settings):
    scale, interval, channels = (case.get(key) for key in ("scale", "interval", "channels"))
    return diffusion.sample(net, wave(case["shape"], 2, 1.4), torch.tensor(case["y"]), num_steps=case["num_steps"],
                            solver=solver, guidance=scale and Guidance(scale, interval=interval, channels=channels),
                            randn_like=CountedNoise(), **settings)


@pytest.mark.parametrize("family, solver, case", [
    *(("sit", "euler_maruyama", case) for case in SIT["sde"]),
    *(("repa", case.get("solver", "euler_maruyama"), case) for case in REPA["sde"] + REPA["ode"])])
def test_images_equal_those_of_sit_and_repa_by_ode_and_sde(family, solver, case, tmp_path):
    assert_equal(sampled(RF(), loaded(family, tmp_path).net, case, solver), case["out"])


@pytest.mark.parametrize("case", LIGHTNING["ode"])
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


@pytest.mark.parametrize("case", DDPM_["ancestral"])
def test_ancestral_sampling_equals_facebookresearch_dit(case):
    assert_equal(sampled(DDPM(), NearNoise(), case, "ancestral"), case["out"])


def test_ancestral_sampling_without_a_variance_is_refused():
    refused(lambda: sampled(DDPM(), fill(DiT(**TINY)), DDPM_["ancestral"][0], "ancestral"), "set sampler.solver=heun")
