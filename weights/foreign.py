"""Other code bases' weights: the network that a file holds, the code that it comes from, its tensors under our names.

Each tensor of the network is used, or loading is refused with its name.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blocks.transformer import rotary_angles
from dit import depth_of, sincos_2d, timestep_frequencies
from runtime.schema import Classes, Record, Size, as_recorded, read_json, read_record
from weights.reading import read_tensors


@dataclass(frozen=True)
class Origin:
    """The code base that weights without a record come from, which decides what the network's output means."""

    diffusion: str              # the diffusion of this project that fits it
    meaning: str                # shown to the user
    backwards: bool = False     # time runs from noise at 0 to data at 1, and v = x - eps


FAMILIES = {
    "edm": Origin("edm", "weights of this project, diffusion=edm"),
    "ddpm": Origin("ddpm", "as dit"),
    "rf": Origin("rf", "weights of this project, diffusion=rf, or a DiT's velocity eps - x with noise at t = 1"),
    "dit": Origin("ddpm", "facebookresearch/DiT and derivatives, noise predicted at 1000 steps"),
    "sit": Origin("rf", "willisma/SiT, a velocity with data at t = 1", backwards=True),
    "repa": Origin("rf", "sihyun-yu/REPA and derivatives, a velocity with noise at t = 1"),
    "lightning": Origin("rf", "hustvl/LightningDiT, a velocity with data at t = 1", backwards=True),
    "tread": Origin("edm", "CompVis/tread"),
}

# ---- which network of a file ----------------------------------------------------------------------------------------

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
FIRST_LAYERS = ("x_embedder.proj.weight", "pos_embed.proj.weight")  # of a DiT, and of diffusers' DiT
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}  # of DDP, compile, FSDP
# The keys in files of DiT, SiT, REPA and LightningDiT, then of CompVis/tread. Any other key is named by weights=.
ROLES = {"ema": "ema", "model": "model", "ema_state_dict": "ema", "model_state_dict": "model"}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Weights:
    """One network of a weights file, under our keys and without the prefixes of wrappers."""

    state: dict[str, Tensor]
    role: str               # ema or model; file if the file holds one state dict without a key; else its key
    description: str        # the same in words
    family: str | None      # if the file shows it
    num_classes: int | None  # if the file names it


def find_in_folder(folder: Path) -> Path | None:
    """Finds the weights file of a folder, or of diffusers' pipeline, if any; raises ValueError for several."""
    place = folder / "transformer" if (folder / "model_index.json").is_file() else folder
    candidates = sorted(file for file in place.glob("*") if file.suffix in SUFFIXES)
    if len(candidates) > 1:
        raise ValueError(f"{place} holds several weights files: name one of {', '.join(map(str, candidates))}, or join "
                         f"shards of one network (docs/interop.md, Shards).")
    return candidates[0] if candidates else None


def read_weights(path: Path, weights: str | None = None) -> Weights:
    """Reads one network of a weights file: .safetensors, or only the tensors of a .pt or .ckpt.

    `weights` is ema, model, or the key of a network; None means the average if the file holds the pair of a known
    code, else the only network. Raises ValueError for a file without such a network, and for values that are not
    finite.
    """
    content = read_tensors(path)
    try:
        with as_recorded(path):
            networks = networks_in(content)
            name = choose(networks, content, weights)
        check_tensors(networks[name])
        others = ", ".join(other for other in networks if other != name)
        description = (f"weights={name}" if name else "its only weights") + (f" (not {others})" if others else "")
        return Weights(plain_keys(networks[name]), role_of(name), description,
                       detect_family(networks[name], name, content), settings_in(content).get("num_classes"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be loaded: {error}.") from None


def networks_in(content: object) -> dict[str, dict[str, Tensor]]:
    """Lists the networks of a file by name: the key of a state dict, and the prefix before its tensors' names.

    A tensor that lies outside of every prefix is listed with each network, so that no network loads without it.
    """
    networks = {}
    for place, node in {"": content, **content}.items() if isinstance(content, Mapping) else ():
        tensors = {".".join(part for part in key.split(".") if part not in WRAPPERS): value
                   for key, value in (node.items() if isinstance(node, Mapping) else ())
                   if isinstance(key, str) and isinstance(value, Tensor)
                   and (value.ndim or value.is_floating_point())}  # counters are no weights
        prefixes = tuple(key.removesuffix(layer) for key in tensors for layer in FIRST_LAYERS
                         if f".{key}".endswith(f".{layer}"))
        for prefix in prefixes:
            networks[f"{place}.{prefix}".strip(".")] = {
                key.removeprefix(prefix): value for key, value in tensors.items()
                if key.startswith(prefix) or not key.startswith(prefixes)}
    return networks


def role_of(name: str) -> str:
    return ROLES.get(name.partition(".")[0], name or "file")


def choose(networks: Mapping[str, object], content: Mapping, weights: str | None) -> str:
    """Returns the name of the network that `weights` selects; raises ValueError if there is not exactly one."""
    if not networks:
        raise ValueError(f"it holds no DiT's state dict, a dictionary with {' or '.join(FIRST_LAYERS)}, at its "
                         f"top level or under one of its keys: save it so where it was made")
    averages = [key for key in content if ROLES.get(key) == "ema" and content[key]]
    if weights is not None:
        selected = [name for name in networks if weights in (name, role_of(name))]
    elif averages and {*map(role_of, networks)} == {"ema", "model"}:
        selected = [name for name in networks if role_of(name) == "ema"]
    else:
        selected = [*networks]
    choices = " or ".join(f"weights={name}" for name in networks if name)
    if not selected:
        raise ValueError(f"it has no weights={weights}: {f'set {choices}' if choices else 'leave weights= out'}")
    if len(selected) > 1:
        raise ValueError(f"it holds several networks: set {choices}, or save one of them by itself")
    if weights is None and averages and role_of(selected[0]) != "ema":
        raise ValueError(f"its {averages[0]} is no state dict of a DiT: set {choices} to take it instead")
    return selected[0]


def check_tensors(state: Mapping[str, Tensor]) -> None:
    """Raises ValueError for types such as int8 or float8, and for values that are not finite."""
    if packed := [key for key, value in state.items() if value.dtype not in FLOATS]:
        dtype = str(state[packed[0]].dtype).removeprefix("torch.")
        raise ValueError(f"it holds {len(packed)} of {len(state)} tensors in {dtype}, {packed[0]} first: take the file "
                         f"in float32, bfloat16 or float16")
    if damaged := [key for key, value in state.items() if not value.isfinite().all()]:
        raise ValueError(f"it holds values that are not finite in {len(damaged)} of {len(state)} tensors, {damaged[0]} "
                         f"first: choose an earlier checkpoint")


# ---- which code it comes from ---------------------------------------------------------------------------------------

# The settings that each train.py stores in its files. Any other setting points to different code.
DIT_ARGS = {"data_path", "feature_path", "results_dir", "model", "image_size", "num_classes", "epochs",
            "global_batch_size", "global_seed", "vae", "num_workers", "log_every", "ckpt_every"}
SIT_TRANSPORT = {"path_type", "prediction", "loss_weight"}
SIT_ARGS = DIT_ARGS | SIT_TRANSPORT | {"sample_eps", "train_eps", "sample_every", "cfg_scale", "wandb", "ckpt"}
TREAD_KEYS = {"model_state_dict", "ema_state_dict", "optimizer_state_dict", "step"}


def settings_in(content: object) -> dict:
    """Returns the arguments of a train.py that a file holds, by name; an empty dict if it holds none."""
    args = content.get("args") if isinstance(content, Mapping) else None
    return dict(vars(args) if isinstance(args, argparse.Namespace) else args if isinstance(args, Mapping) else {})


def detect_family(state: Mapping[str, Tensor], name: str, content: Mapping) -> str | None:
    """Returns the family that a weights file shows, or None if there is no evidence, or evidence for several.

    `name` is that of `state` in `content`, which is everything in the file. Raises ValueError for a path other than
    straight lines, or a prediction other than velocity.
    """
    args, config = settings_in(content), content.get("config")
    transport = config.get("transport") if isinstance(config, Mapping) else args
    for key, supported in (("path_type", ("linear",)), ("prediction", ("velocity", "v"))):
        value = transport.get(key) if isinstance(transport, Mapping) else None
        if value is not None and str(value).lower() not in supported:
            raise ValueError(f"these weights were trained with {key}={value}, but only {supported[0]} is supported")
    model, first = str(args.get("model")), state.get(FIRST_LAYERS[0])
    evidence = {
        "repa": any(key.startswith(("projectors.", "decoder_blocks.")) for key in state)
                or ({"encoder_depth", "proj_coeff"} <= args.keys() and args.get("prediction") == "v"),
        "lightning": any(key.startswith("feat_rope.") for key in state),
        "tread": "ema_state_dict" in content and content.keys() <= TREAD_KEYS and name.endswith("_state_dict.model"),
        "sit": model.startswith("SiT-") and SIT_TRANSPORT <= args.keys(),
        # Two output channels for each input channel are the noise and its variance.
        "dit": model.startswith("DiT-") and "image_size" in args and first is not None
               and len(state.get("final_layer.linear.bias", ())) == 2 * first[0].numel(),
    }
    allowed = {"sit": SIT_ARGS, "dit": DIT_ARGS, "lightning": set()}
    shown = [family for family, is_shown in evidence.items() if is_shown]
    return shown[0] if len(shown) == 1 and args.keys() <= allowed.get(shown[0], args.keys()) else None


def unknown_family(file: Path, network: dict) -> str:
    """Returns an error message that asks for the family of a file and lists those that fit."""
    if network["block"] == "dit":
        fitting = ("dit", "sit") if network["learn_sigma"] else ("edm", "rf", "tread", "sit", "repa")
    else:
        fitting = ("lightning", "rf", "edm") if network["block"] == "lightning" else ("edm", "rf")
    choices = "; ".join(f"{name} ({FAMILIES[name].meaning})" for name in fitting)
    return (f"{file} has no record, and weights of these shapes mean different things in different code: set "
            f"diffusion_name= to one of {choices}. Check where the file was downloaded from, or the train.py that "
            f"wrote it; docs/interop.md has a table.")


DITS_SCHEDULE = {"num_train_timesteps": 1000, "beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear",
                 "prediction_type": "epsilon"}


class DiffusersRecord(Record):
    """The settings that are read from the config.json of diffusers' DiT."""

    num_attention_heads: Size
    sample_size: Size | None = None
    num_embeds_ada_norm: Classes | None = None


def pipeline_of(file: Path) -> dict:
    """Reads what diffusers' config.json and the folder around it say about a DiT; an empty dict without a config.

    Keys: num_heads, input_size, num_classes, and for a DiTPipeline also diffusion (a family) and autoencoder.
    """
    config, index = file.with_name("config.json"), file.parent.parent / "model_index.json"
    if not config.is_file() or "num_attention_heads" not in read_json(config):
        return {}
    record = read_record(DiffusersRecord, config, "It does not describe a DiT.")
    pipeline = {"num_heads": record.num_attention_heads, "input_size": record.sample_size,
                "num_classes": record.num_embeds_ada_norm}
    if index.is_file() and read_json(index).get("_class_name") == "DiTPipeline":
        scheduler, vae = index.with_name("scheduler") / "scheduler_config.json", index.with_name("vae")
        schedule = read_json(scheduler) if scheduler.is_file() else {}
        changed = schedule.get("trained_betas") or schedule.get("rescale_betas_zero_snr")
        if DITS_SCHEDULE.items() <= schedule.items() and not changed:
            pipeline["diffusion"] = "dit"
        if (vae / "config.json").is_file():
            pipeline["autoencoder"] = str(vae)
    return pipeline


# ---- under our names ------------------------------------------------------------------------------------------------


def plain_keys(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames a code base's keys to ours.

    REPA's older files number the blocks after the first `encoder_depth` from 0 again.
    """
    if any(key.startswith("decoder_blocks.") for key in state):
        state, encoder_depth = dict(state), depth_of(state, "blocks")
        for key in [key for key in state if key.startswith("decoder_blocks.")]:
            _, j, rest = key.split(".", 2)
            state[f"blocks.{int(j) + encoder_depth}.{rest}"] = state.pop(key)
    return from_diffusers(state) if any(key.startswith("transformer_blocks.") for key in state) else state


def diffusers_names(depth: int) -> dict[str, list[str]]:
    """Maps each of our tensors to diffusers': one, the thirds of a qkv, or a copy in each block."""
    blocks = [f"transformer_blocks.{i}" for i in range(depth)]
    layers = {"x_embedder.proj": ["pos_embed.proj"], "final_layer.adaLN_modulation.1": ["proj_out_1"],
              "final_layer.linear": ["proj_out_2"]}
    for i, name in ((0, "linear_1"), (2, "linear_2")):
        layers[f"t_embedder.mlp.{i}"] = [f"{block}.norm1.emb.timestep_embedder.{name}" for block in blocks]
    for i, block in enumerate(blocks):
        layers |= {f"blocks.{i}.adaLN_modulation.1": [f"{block}.norm1.linear"],
                   f"blocks.{i}.attn.qkv": [f"{block}.attn1.to_{part}" for part in "qkv"],
                   f"blocks.{i}.attn.proj": [f"{block}.attn1.to_out.0"],
                   f"blocks.{i}.mlp.fc1": [f"{block}.ff.net.0.proj"], f"blocks.{i}.mlp.fc2": [f"{block}.ff.net.2"]}
    table = [f"{block}.norm1.emb.class_embedder.embedding_table.weight" for block in blocks]
    return {"y_embedder.embedding_table.weight": table,
            **{f"{ours}.{kind}": [f"{name}.{kind}" for name in names]
               for ours, names in layers.items() for kind in ("weight", "bias")}}


def from_diffusers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames the tensors of diffusers' DiT to ours.

    Raises ValueError for a tensor too many or too few, and if blocks' copies of an embedder differ.
    """
    names = diffusers_names(depth_of(state, "transformer_blocks"))
    if odd := sorted({*state} ^ {name for copies in names.values() for name in copies}):
        raise ValueError(f"its names are those of diffusers' DiT, but it {'has' if odd[0] in state else 'lacks'} "
                         f"{odd[0]}")
    for copies in (copies for ours, copies in names.items() if "_embedder." in ours):
        if other := next((name for name in copies if not torch.equal(state[name], state[copies[0]])), None):
            raise ValueError(f"{other} differs from {copies[0]}, but a DiT has one embedder for all blocks")
    return {ours: torch.cat([state[name] for name in copies]) if ".qkv." in ours else state[copies[0]]
            for ours, copies in names.items()}


def with_positions(state: Mapping[str, Tensor], input_size: int | None, file: Path) -> dict[str, Tensor]:
    """Adds the fixed position embedding to weights that were stored without it, as diffusers does."""
    first = state.get(FIRST_LAYERS[0])
    if "pos_embed" in state or first is None:
        return dict(state)
    if input_size is None:
        raise ValueError(f"{file} holds no position embedding, pos_embed, and there is no config.json beside it: set "
                         f"input_size=, the side of its latents (32 for images of 256 pixels).")
    return {**state, "pos_embed": sincos_2d(first.shape[0], input_size // first.shape[-1])}


def without_unread(state: Mapping[str, Tensor], network: dict, family: str, file: Path) -> dict[str, Tensor]:
    """Drops REPA's projectors, which only training reads, and LightningDiT's tables of the angles that ours compute.

    Raises ValueError for other tables. LightningDiT stores none with use_rope=false, so its weights need them.
    """
    if network["block"] != "lightning":
        return {key: value for key, value in state.items() if family != "repa" or not key.startswith("projectors.")}
    side, head_dim = network["input_size"] // network["patch_size"], network["hidden_size"] // network["num_heads"]
    angles = rotary_angles(torch.arange(side**2).unsqueeze(0), side, head_dim)[0, 0].repeat_interleave(2, dim=-1)
    ours = {"feat_rope.freqs_cos": angles.cos(), "feat_rope.freqs_sin": angles.sin()}
    tables = {key: value for key, value in state.items() if key.startswith("feat_rope.")}
    if not tables and family != FAMILIES[family].diffusion:
        raise ValueError(f"{file} has LightningDiT's blocks without feat_rope, as training with use_rope=false leaves "
                         f"them, which is not supported. If it was trained with use_rope=true, save its complete "
                         f"state dict.")
    if tables and (tables.keys() != ours.keys() or any(
            tables[key].shape != value.shape or (tables[key] - value).abs().max() > 0.01  # float16 or bfloat16
            for key, value in ours.items())):
        raise ValueError(f"{file} has feat_rope for other angles than {network['num_heads']} heads and {side} x {side} "
                         f"tokens have in LightningDiT: set num_heads=, if its number of heads is another.")
    return {key: value for key, value in state.items() if key not in tables}


def reverse_time(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Converts velocity x - eps with data at t = 1 to eps - x with noise at t = 1: net(z, t) becomes -net(z, 1 - t).

    The embedding of 1 - t is the embedding of t, rotated by each frequency w: cos(w - tw) = cos w cos tw + sin w sin tw
    and sin(w - tw) = sin w cos tw - cos w sin tw. The rotation goes into the weights that read the embedding. Time's
    direction and the velocity's sign are changed only here.
    """
    state = dict(state)
    on_cos, on_sin = state["t_embedder.mlp.0.weight"].double().chunk(2, dim=1)
    w = timestep_frequencies(on_cos.shape[1]).double()
    turned = [on_cos * w.cos() + on_sin * w.sin(), on_cos * w.sin() - on_sin * w.cos()]
    state["t_embedder.mlp.0.weight"] = torch.cat(turned, dim=1).float()
    for key in ("final_layer.linear.weight", "final_layer.linear.bias"):
        state[key] = -state[key]
    return state


def to_our_diffusion(state: Mapping[str, Tensor], network: dict, family: Origin) -> tuple[dict[str, Tensor], dict]:
    """Rewrites a family's weights, already under our keys, for an ordinary network; returns its keywords, too."""
    state = reverse_time(state) if family.backwards else dict(state)
    if family.backwards and network["learn_sigma"]:  # SiT drops the second half of the last layer's 2C channels
        channels = network["in_channels"]
        for key in ("final_layer.linear.weight", "final_layer.linear.bias"):
            state[key] = state[key].unflatten(0, (-1, 2 * channels))[:, :channels].flatten(0, 1).contiguous()
        network = {**network, "learn_sigma": False}
    return state, network
