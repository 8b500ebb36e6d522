"""Others' weights become networks of ours or are refused, and samplers return published numbers (tests/published)."""

import argparse
import json
import re
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from closed_forms import fill, wave
from conftest import save_vae
from omegaconf import OmegaConf
from safetensors.torch import save_file
from spoils import refused
from test_published_parity import DDPM_, TINY, TINY_LIGHTNING, CountedNoise, assert_equal, filled, published
from torch import nn
from training_runs import refusal, trained, write_run

import sample
from dit import DiT
from edm import DDPM
from guidance import Guidance
from rf import RF
from runtime.schema import CONFIGS, read
from scripts import import_weights
from weights.loading import Trained, load_trained

SIT, REPA, LIGHTNING = published("sit"), published("repa"), published("lightning")
ARGS = dict(results_dir="results", image_size=256, num_classes=10)
SIT_ARGS = argparse.Namespace(**ARGS, model="SiT-XL/2", path_type="Linear", prediction="velocity", loss_weight=None)
REPA_ARGS = argparse.Namespace(model="SiT-XL/2", resolution=256, num_classes=10, path_type="linear", prediction="v",
                               encoder_depth=8, proj_coeff=0.5, qk_norm=False)
DIT_ARGS = argparse.Namespace(**ARGS, model="DiT-XL/2", vae="ema")
FORMS = ("sit", "repa", "lightningdit", "dit", "tread")


def imported(source, form: str, **settings) -> Trained:
    """Imports weights beside their source, as the command does, and loads what it has written."""
    out = Path(source).with_name(f"imported-{len([*Path(source).parent.iterdir()])}")
    plain = {key: value for key, value in OmegaConf.load(CONFIGS / "import_weights.yaml").items() if key != "defaults"}
    typed = {"source": str(source), "format": form, "out": str(out), "num_heads": 4, "autoencoder": "none"} | settings
    import_weights.main.__wrapped__(read(import_weights.ImportSettings, plain | typed))
    return load_trained(out)


def test_latents_of_an_unknown_autoencoder_are_scaled_as_by_the_one_that_is_named_later(tmp_path):
    vae, images = save_vae(tmp_path / "vae", scaling_factor=0.5), []
    save_file(weights_of("sit"), tmp_path / "x.safetensors")
    for known in ("none", vae):
        net = imported(tmp_path / "x.safetensors", "sit", autoencoder=str(known)).checkpoint.file.parent
        sample.main(checkpoint=str(net), autoencoder=str(vae), seeds="0-1", num_steps=2, cpu=True,
                    out=str(tmp_path / f"{len(images)}.npz"))
        images.append(np.load(tmp_path / f"{len(images)}.npz")["arr_0"])
    assert np.array_equal(*images) and images[0].std() > 1


def tables(side: int = 4, head_dim: int = 16) -> dict:
    """The buffers (side², head_dim) of LightningDiT's feat_rope: a token's row, then its column, each angle twice."""
    freqs = 10000 ** -(torch.arange(0, head_dim // 2, 2) / (head_dim // 2))
    one = (torch.arange(side)[:, None] * freqs).repeat_interleave(2, dim=1)
    angles = torch.cat([one.repeat_interleave(side, dim=0), one.repeat(side, 1)], dim=1)
    return {"feat_rope.freqs_cos": angles.cos(), "feat_rope.freqs_sin": angles.sin()}


def weights_of(form: str) -> dict:
    """The weights with which the published side ran, under the keys of its file."""
    if form in ("dit", "sit", "tread"):
        return fill(DiT(**TINY, learn_sigma=form != "tread")).state_dict()
    if form == "lightningdit":
        return filled(DiT(**TINY_LIGHTNING)).state_dict() | tables()
    if form == "diffusers":
        return diffusers_dit().state_dict()
    repa, layers = DiT(**TINY), (nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 24))
    repa.projectors = nn.ModuleList([nn.Sequential(*layers)])
    assert sorted(repa.state_dict()) == REPA["keys"]
    return fill(repa).state_dict()


def diffusers_dit() -> diffusers.DiTTransformer2DModel:
    """diffusers' own DiT as it is with DiT's weights: equal embedders, and DiT's frequencies and epsilon."""
    theirs = fill(diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, out_channels=8, num_layers=3, sample_size=8,
        num_embeds_ada_norm=10, norm_eps=1e-6))
    for block in theirs.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0
        block.norm1.emb.load_state_dict(theirs.transformer_blocks[0].norm1.emb.state_dict())
    return theirs


def published_file(form: str, folder, state: dict | None = None):
    """Writes a file as the format's train.py does, with the average `state`."""
    ema = under({"lightningdit": "module.", "tread": "model."}.get(form, ""), state or weights_of(form))
    other = {key: torch.zeros_like(value) for key, value in ema.items()}
    beside = {"dit": {"args": DIT_ARGS}, "sit": {"args": SIT_ARGS}, "repa": {"args": REPA_ARGS, "steps": 400000},
              "lightningdit": {"config": {"transport": {"path_type": "Linear", "prediction": "velocity"},
                                          "model": {"use_rope": True, "wo_shift": False}}}}
    path = folder / "0400000.pt"
    content = {"model": other, "ema": ema, "opt": {}, **beside.get(form, {})}
    if form == "tread":
        content = {"model_state_dict": other, "ema_state_dict": ema, "optimizer_state_dict": {}, "step": 400000}
    if form == "diffusers":
        path = folder / "diffusion_pytorch_model.safetensors"
        save_file(ema, path)
        (folder / "config.json").write_text('{"sample_size": 8, "num_attention_heads": 4}')
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form != "dit")  # one in the old format of torch
    return path


def loaded(form: str, folder, state: dict | None = None) -> Trained:
    return imported(published_file(form, folder, state), form)


def under(prefix: str, state: dict) -> dict:
    return {f"{prefix}{key}": value for key, value in state.items()}


def without(state: dict, part: str) -> dict:
    return {key: value for key, value in state.items() if part not in key}


# ---- published files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [*FORMS, "diffusers"])
def test_each_tensor_of_a_published_form_is_used_or_named(form, tmp_path):
    state = weights_of(form)
    assert loaded(form, tmp_path).checkpoint.weights == "ema"
    spoilt = {key: without(state, key) for key in [*state][::8] if "projectors." not in key} if form in FORMS else {}
    # MeanFlow's second time, Self-Flow's head: an unknown tensor may belong to the network.
    spoilt |= {key: state | {key: torch.zeros(3)} for key in (
        "blocks.0.more.weight", "r_embedder.mlp.0.weight", "projector.0.weight", "mask_token")}
    for tensor, tensors in spoilt.items():
        with pytest.raises(ValueError, match=re.sub(r"^blocks\.\d\.|freqs_.*", "", tensor)):
            loaded(form, tmp_path, tensors)


@pytest.mark.parametrize("form", FORMS)
def test_what_a_format_carries_beside_its_network_is_dropped_by_name(form, tmp_path):
    heads = {"projectors.0.0.weight": torch.zeros(3, 3), "projectors.1.0.weight": torch.zeros(3)}
    beside = heads | {"vae.encoder.conv_in.weight": torch.zeros(3), "num_updates": torch.tensor(3)}
    plain = {key: value for key, value in weights_of(form).items() if not key.startswith("projectors.")}
    one, other = loaded(form, tmp_path, plain), loaded(form, tmp_path, plain | beside)
    dropped = other.checkpoint.record.imported["dropped"]
    assert {"projectors", "vae", "num_updates"} <= {*dropped}
    assert (one.checkpoint.record.imported["dropped"] == []) == (form != "sit")
    assert all(torch.equal(value, other.net.state_dict()[key]) for key, value in one.net.state_dict().items())


def test_the_statistics_in_repa_es_file_are_the_convention_of_its_latents(tmp_path):
    own = {"bn.running_mean": torch.tensor([0.5, -1, 0, 2]), "bn.running_var": torch.tensor([4, 0.25, 1, 9]),
           "bn.num_batches_tracked": torch.tensor(7)}
    path = published_file("repa", tmp_path, weights_of("repa") | own)
    with pytest.raises(ValueError, match="set autoencoder= to what decodes them"):
        imported(path, "repa", autoencoder=None)
    convention = imported(path, "repa").convention
    assert convention.latents_mean == (0.5, -1.0, 0.0, 2.0) and convention.latents_std == (2.0, 0.5, 1.0, 3.0)


@pytest.mark.parametrize(("angles", "heads"), [
    (tables(head_dim=32), 4), (tables(side=8), 4), (tables(), 8), ({"feat_rope.freqs_cos": torch.ones(16, 16)}, 4),
    ({key: -value for key, value in tables().items()}, 4)])
def test_other_angles_than_our_blocks_compute_are_refused(angles, heads, tmp_path):
    torch.save({"ema": without(weights_of("lightningdit"), "feat_rope") | angles}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=f"for other angles than {heads} heads and 4 x 4 tokens"):
        imported(tmp_path / "x.pt", "lightningdit", num_heads=heads)


# ---- settings in a file ---------------------------------------------------------------------------------------------

PLACES = [lambda settings: {"args": argparse.Namespace(**settings)}, lambda settings: {"hparams": settings},
          lambda settings: {"hyper_parameters": {"transport": settings}}, lambda settings: {"config": [settings]},
          lambda settings: settings]


@pytest.mark.parametrize("form, right, wrong", [
    ("sit", {"prediction": "velocity", "path_type": "Linear", "loss_weight": None, "norm_eps": 1e-6},
     [("prediction", "noise"), ("prediction", "v"), ("path_type", "GVP"), ("noise_schedule", "linear"),
      ("norm_eps", 1e-5)]),
    ("repa", {"prediction": "v", "path_type": "linear"}, [("prediction", "velocity"), ("path_type", "cosine")]),
    ("lightningdit", {"use_rope": True, "wo_shift": False}, [("prediction", "score"), ("wo_shift", True)]),
    ("tread", {"sigma_data": 0.5}, [("prediction", "v"), ("sigma_data", 1.0)]),
    ("dit", {"noise_schedule": "linear", "predict_xstart": False, "diffusion_steps": 1000, "num_classes": 10},
     [("path_type", "Linear"), ("noise_schedule", "cosine"), ("predict_xstart", True), ("diffusion_steps", 4000),
      ("activation_fn", "gelu")])])
def test_settings_of_a_format_are_read_past_and_others_refused_wherever_a_file_keeps_them(form, right, wrong, tmp_path):
    for place in PLACES:
        torch.save({"ema": weights_of(form)} | place(right), tmp_path / "x.pt")
        assert imported(tmp_path / "x.pt", form).net.num_classes == 10
        for name, value in wrong:
            torch.save({"ema": weights_of(form)} | place(right | {name: value}), tmp_path / "x.pt")
            with pytest.raises(ValueError, match=f"it says {name}={value}, and this format has"):
                imported(tmp_path / "x.pt", form)


# ---- labels, positions, variances -----------------------------------------------------------------------------------

TABLE = "y_embedder.embedding_table.weight"


@pytest.mark.parametrize(("rows", "args", "settings", "num_classes", "null_label"), [
    (10, {"num_classes": 10}, {}, 10, False), (10, {}, {"num_classes": 10}, 10, False),
    (1, {"num_classes": 1}, {}, 1, False), (1, {}, {}, 1, False), (10, {"num_classes": 9}, {}, 9, True),
    (10, {}, {}, 9, True), (10, {"num_classes": 1000}, {"num_classes": 9}, 9, True)])
def test_each_row_is_a_class_only_where_nothing_says_that_one_is_no_label(rows, args, settings, num_classes, null_label,
                                                                          tmp_path):
    whole = fill(DiT(**TINY, learn_sigma=True)).eval()
    state = whole.state_dict()
    torch.save({"ema": {**state, TABLE: state[TABLE][:rows].clone()}, "args": argparse.Namespace(**args)},
               tmp_path / "x.pt")
    trained = imported(tmp_path / "x.pt", "dit", **settings)
    assert trained.classes == list(range(num_classes)) and trained.net.null_label == null_label
    x, t, y = torch.randn(2, 4, 8, 8), torch.full((2,), 3.0), torch.tensor([num_classes - 1, rows - 1])
    assert torch.equal(trained.net(x, t, y), whole(x, t, y))  # facebookresearch/DiT#108: the last row is no label
    if not null_label:
        with pytest.raises(ValueError, match="trained with label_dropout=0.*set drop_label=false"):
            Guidance(3).check(trained.net)


# ---- which network of a file ----------------------------------------------------------------------------------------

RAW = fill(DiT(**TINY, learn_sigma=True)).state_dict()
EMA = {key: value if key == "pos_embed" else value + 1 for key, value in RAW.items()}
CHECKPOINTED = {re.sub(r"^blocks\.(\d)\.", r"blocks.\1._checkpoint_wrapped_module._orig_mod.", key): value
                for key, value in RAW.items()}
KNOWN_PAIR = {"model": RAW, "ema": EMA, "opt": {"state": {0: {"exp_avg": torch.ones(3)}}}}
LITEMA = under("model.", RAW) | {"model_ema.decay": torch.tensor(0.9)} | under("model_ema.", {
    key.replace(".", ""): value for key, value in EMA.items() if key != "pos_embed"})


@pytest.mark.parametrize("content, weights, expected", [
    (RAW, None, RAW), (KNOWN_PAIR, None, EMA), (KNOWN_PAIR, "model", RAW), ({"model": RAW, "ema": {}}, None, RAW),
    ({"model": {}, "ema": EMA, "args": DIT_ARGS}, None, EMA), ({"model": RAW, "model_ema": EMA}, "model_ema", EMA),
    ({"ema_0.99": RAW, "ema_0.9999": EMA}, "ema_0.9999", EMA),
    (under("ema_model.module.", EMA) | under("online_model.", RAW) | {"step": torch.tensor(3)}, "ema_model", EMA),
    ({"state_dict": under("model.", RAW) | under("vae.", {"conv.weight": torch.zeros(3)})}, None, RAW),
    ({"state_dict": LITEMA}, "state_dict.model", RAW),
    ({"module": RAW, "ds_version": "0.16.2"}, None, RAW),  # DeepSpeed, stage 2 (Tencent-Hunyuan/HunyuanDiT#107)
    ({"n_averaged": torch.tensor(7)} | under("module.", EMA), None, EMA),
    *((under(prefix, CHECKPOINTED), None, RAW) for prefix in (
        "_orig_mod.module.", "_fsdp_wrapped_module._orig_mod.", "diffusion.model.module.")),
    *(({key: value.to(dtype) for key, value in RAW.items()}, None,
       {key: value.to(dtype).float() for key, value in RAW.items()}) for dtype in (torch.bfloat16, torch.float64)),
])
def test_the_network_that_is_meant_is_read(content, weights, expected, tmp_path):
    torch.save(content, tmp_path / "x.pt")
    trained = imported(tmp_path / "x.pt", "dit", weights=weights)
    assert all(torch.equal(trained.net.state_dict()[key], value) for key, value in expected.items())


@pytest.mark.parametrize("content, weights, says", [
    ({"model": RAW, "model_ema": EMA}, None, "several networks: set weights=model or weights=model_ema"),
    ({"ema_state_dict": EMA, "model_state_dict": RAW}, None, "several networks: set weights=ema_state_dict or"),
    ({"state_dict": under("net.", RAW) | under("ema_net.", EMA)}, None, "weights=state_dict.net or weights=state_dict"),
    ({"state_dict": LITEMA}, None, "an average, model_ema.*no state dict: set weights=state_di"),
    ({"model": RAW, "ema": {"shadow_params": [*EMA.values()]}}, None, "an average, ema, that is.*weights=model"),
    (RAW, "model", "it has no weights=model: leave weights= out"),
    *((content, None, "holds no DiT's state dict") for content in (
        {"trainer": {"ema": EMA}}, [RAW], {"epoch": 3}, {"conv.weight": torch.zeros(3)})),
    ({"ema": RAW, "args": {"num_classes": 99}}, None, "its label table of 11 rows: set num_classes=11 if each"),
    ({key: value.to(torch.float8_e4m3fn) for key, value in RAW.items()}, None, "tensors in float8_e4m3fn"),
    ({**RAW, "pos_embed": RAW["pos_embed"] / 0}, None, "not finite in 1 of .* tensors, pos_embed"),
    # ByteDance-Seed/Bagel#160: a frozen part is missing in the average; the raw weights must not fill it up.
    ({"model": RAW, "ema": without(EMA, "t_embedder")}, None, "lacks the tensor t_embedder.mlp.0.bias.*: 4"),
    ({"model": RAW, "ema": without(EMA, "pos_embed")}, None, "not a DiT's: KeyError.'pos_embed'"),
    # pytorch/pytorch#94575: a loader that is not strict ignores keys and samples another network.
    (under("net.", RAW) | {"mean": torch.zeros(4)}, None, "has the tensor mean"),
    ({"module": {key: torch.empty(0) for key in RAW}}, None, "no DiT's state"),  # a rank's part of DeepSpeed, ZeRO-3
    ({key: value[:24] if key.startswith("final_layer.linear") else value for key, value in RAW.items()}, None,
     r"has final_layer.linear.\w+ .* instead of|unlike this format"),
])
def test_what_could_be_read_in_two_ways_or_not_completely_is_refused(content, weights, says, tmp_path):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=says) as refused:
        imported(tmp_path / "x.pt", "dit", weights=weights)
    assert "\n" not in str(refused.value) and {path.name for path in tmp_path.iterdir()} == {"x.pt"}


# ---- diffusers' DiT -------------------------------------------------------------------------------------------------

EMBEDDER = "transformer_blocks.1.norm1.emb.timestep_embedder.linear_1.weight"


def write_pipeline(folder, state: dict, **schedule: object) -> None:
    """Writes what diffusers' DiTPipeline saves, which has no position embedding among its weights."""
    for name, content in {
        "model_index.json": {"_class_name": "DiTPipeline", "id2label": {"0": "tench", "1": "goldfish"}},
        "vae/config.json": {"_class_name": "AutoencoderKL"}, "vae/diffusion_pytorch_model.safetensors": {},
        "scheduler/scheduler_config.json": {"num_train_timesteps": 1000, "beta_schedule": "linear"} | schedule,
        "transformer/config.json": {"num_attention_heads": 4, "sample_size": 8, "num_embeds_ada_norm": 10,
                                    "norm_eps": 1e-5, "activation_fn": "gelu-approximate"},
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    save_file(state, folder / "transformer/diffusion_pytorch_model.safetensors")


def test_diffusers_own_dit_is_read_with_and_without_its_pipeline(tmp_path):
    write_pipeline(tmp_path / "whole", weights_of("diffusers"))
    read = [imported(tmp_path / "whole", "diffusers", num_heads=None, autoencoder=None)]
    assert read[0].autoencoder == str(tmp_path / "whole/vae") and read[0].display_names[:2] == ["tench", "goldfish"]
    (tmp_path / "whole/transformer").rename(tmp_path / "alone")
    read.append(imported(tmp_path / "alone", "diffusers", num_heads=None))
    read.append(imported(tmp_path / "alone/diffusion_pytorch_model.safetensors", "diffusers", num_heads=None))
    (tmp_path / "alone/config.json").unlink()
    with pytest.raises(ValueError, match="its settings are in config.json: copy that beside it"):
        imported(tmp_path / "alone", "diffusers")
    state = read[0].net.state_dict()
    for each in read:
        assert type(each.diffusion) is DDPM and each.net.blocks[0].attn.num_heads == 4
        assert all(torch.equal(value, state[key]) for key, value in each.net.state_dict().items())


@pytest.mark.parametrize("changes, schedule, says", [
    *(({}, {name: value}, f"it says {name}={value}") for name, value in (
        ("prediction_type", "v_prediction"), ("num_train_timesteps", 500), ("beta_schedule", "squaredcos_cap_v2"),
        ("rescale_betas_zero_snr", True), ("norm_eps", 0.001), ("activation_fn", "gelu"))),
    ({EMBEDDER: weights_of("diffusers")[EMBEDDER] + 1}, {}, f"{EMBEDDER} differs from another block's")])
def test_a_pipeline_without_dits_schedule_or_of_several_embedders_is_refused(changes, schedule, says, tmp_path):
    write_pipeline(tmp_path / "x", weights_of("diffusers") | changes, **schedule)
    with pytest.raises(ValueError, match=says):
        imported(tmp_path / "x", "diffusers", num_heads=None)


# ---- our own, without a record --------------------------------------------------------------------------------------


def test_weights_of_ours_that_lost_their_record_are_read_with_what_is_typed(tmp_path):
    network = dict(input_size=8, patch_size=2, in_channels=3, hidden_size=32, depth=2, num_heads=2, block="mamba")
    old = load_trained(write_run(tmp_path / "run", network)).net.state_dict()
    save_file(old, tmp_path / "x.safetensors")
    typed = {"num_heads": 2, "autoencoder": "identity", "diffusion": {"name": "edm", "sigma_data": 0.8}}
    new = imported(tmp_path / "x.safetensors", "ours", **typed)
    assert new.diffusion.sigma_data == 0.8
    assert all(torch.equal(new.net.state_dict()[key], value) for key, value in old.items())
    for name in typed:
        with pytest.raises(ValueError, match=f"set {name}="):
            imported(tmp_path / "x.safetensors", "ours", **typed | {name: None})
    with pytest.raises(ValueError, match="is for format=ours"):
        imported(tmp_path / "x.safetensors", "sit", **typed)


def test_a_run_starts_from_imported_weights_and_a_new_label_table(shapes, tmp_path):
    trained(tmp_path / "old", shapes, "steps=1")
    old = load_trained(tmp_path / "old").net.state_dict()
    torch.save({"model": {}, "ema": old | {TABLE: old[TABLE].repeat(2, 1)}}, tmp_path / "x.pt")
    folder = imported(tmp_path / "x.pt", "tread", num_heads=2, autoencoder="identity").checkpoint.folder
    options = (f"init_from={folder}", "diffusion.sigma_data=0.5", "steps=1", "optimizer.lr=0")
    assert "other classes; data.num_classes=13 keeps it" in refusal(tmp_path / "new", shapes, *options)
    trained(tmp_path / "new", shapes, *options, "new_label_table=true")
    new = load_trained(tmp_path / "new").net.state_dict()
    assert new[TABLE].shape == old[TABLE].shape and 0.01 < new[TABLE].std() < 0.03
    assert not torch.equal(new[TABLE][:3], old[TABLE][:3])
    assert all(torch.equal(new[key], old[key]) for key in old if key != TABLE)


# ---- samplers -------------------------------------------------------------------------------------------------------


def sampled(diffusion: RF | DDPM, net: nn.Module, case: dict, solver: str, **settings):
    scale, interval, channels = (case.get(key) for key in ("scale", "interval", "channels"))
    return diffusion.sample(net, wave(case["shape"], 2, 1.4), torch.tensor(case["y"]), num_steps=case["num_steps"],
                            solver=solver, guidance=scale and Guidance(scale, interval=interval, channels=channels),
                            randn_like=CountedNoise(), **settings)


@pytest.mark.parametrize("form, solver, case", [
    *(("sit", "euler_maruyama", case) for case in SIT["sde"]),
    *(("repa", case.get("solver", "euler_maruyama"), case) for case in REPA["sde"] + REPA["ode"])])
def test_images_equal_those_of_sit_and_repa_by_ode_and_sde(form, solver, case, tmp_path):
    assert_equal(sampled(RF(), loaded(form, tmp_path).net, case, solver), case["out"])


@pytest.mark.parametrize("case", LIGHTNING["ode"])
def test_shifted_steps_and_the_interval_equal_lightningdit(case, tmp_path):
    # Their n points are n - 1 steps, their time is 1 - t, and a shift there is its inverse here.
    start = case["cfg_interval_start"]
    ours = case | {"num_steps": case["num_sampling_steps"] - 1, "interval": start and (0.0, 1 - start)}
    z = sampled(RF(), loaded("lightningdit", tmp_path).net, ours, "euler", shift=1 / case["timestep_shift"])
    assert_equal(z, case["out"])


class NearNoise(nn.Module):
    """Mostly the state itself, which is mostly noise, as a random network is far from predicting it."""

    def __init__(self, net):
        super().__init__()
        self.net, self.num_classes, self.in_channels, self.input_size, self.null_label = net, 10, 4, 8, True

    def forward(self, x, t, y, routes=()):
        return torch.cat([x, torch.zeros_like(x)], dim=1) + 0.1 * self.net(x, t, y)


@pytest.mark.parametrize("case", DDPM_["ancestral"])
def test_ancestral_sampling_equals_facebookresearch_dit(case, tmp_path):
    assert_equal(sampled(DDPM(), NearNoise(loaded("dit", tmp_path).net), case, "ancestral"), case["out"])


def test_ancestral_sampling_without_a_variance_is_refused():
    refused(lambda: sampled(DDPM(), fill(DiT(**TINY)), DDPM_["ancestral"][0], "ancestral"), "set sampler.solver=heun")
