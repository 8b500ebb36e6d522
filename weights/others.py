"""Other code bases' weights: which family a file belongs to, and its tensors under our names."""

import argparse
import contextlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

import torch
from torch import Tensor

from dit import DiT, depth_of, infer_architecture, sincos_2d, timestep_frequencies
from runtime.schema import Classes, Record, Size, as_recorded, read_json, read_record
from weights.reading import read_tensors


@dataclass(frozen=True)
class Family:
    """The code base that weights without a record come from, which decides what the network's output means."""

    diffusion: str              # the diffusion of this project that fits it
    meaning: str                # shown to the user
    backwards: bool = False     # time runs from noise at 0 to data at 1, and v = x - eps


FAMILIES = {
    "edm": Family("edm", "weights of this project, diffusion=edm"),
    "ddpm": Family("ddpm", "as dit"),
    "rf": Family("rf", "weights of this project, diffusion=rf, or any velocity eps - x with noise at t = 1"),
    "rf_clean": Family("rf_clean", "weights of this project, diffusion=rf_clean"),
    "dit": Family("ddpm", "facebookresearch/DiT and derivatives, noise predicted at 1000 steps"),
    "sit": Family("rf", "willisma/SiT, a velocity with data at t = 1", backwards=True),
    "repa": Family("rf", "sihyun-yu/REPA and derivatives, a velocity with noise at t = 1"),
    "lightning": Family("rf", "hustvl/LightningDiT, a velocity with data at t = 1", backwards=True),
    "tread": Family("edm", "CompVis/tread"),
}


# ---- a file of weights ----------------------------------------------------------------------------------------------


@dataclass
class Weights:
    """What a weights file holds: one state dict, under our keys and without the prefixes of wrappers."""

    state: dict[str, Tensor]
    which: str              # ema, model, or file if the file does not say
    description: str        # the same in words
    family: str | None      # if the file shows it
    num_classes: int | None  # if the file names it


def read_weights(path: Path, weights: str | None = None) -> Weights:
    """Reads a weights file: .safetensors, the index of shards, or only the tensors of a .pt or .ckpt.

    A file may hold several networks. `weights` selects one: ema, model or, with None, the average if there is one.
    Raises ValueError for a file without a state dict or without this network, and for values that are not finite.
    """
    content = read_content(path)
    try:
        with as_recorded(path):
            held, which, description = choose(content, weights)
        check_tensors(held.tensors)
        family = detect_family(held.tensors, held.name, content)
        return Weights(plain_keys(held.tensors), which, description, family, settings_in(content).get("num_classes"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be loaded: {error}.") from None


# ---- the files of others' folders -----------------------------------------------------------------------------------

WEIGHTS = re.compile(r".+\.(safetensors|bin|pt|pth|ckpt)(\.index(\.\w+)?\.json)?")
INDEX = re.compile(r"\.index(\.\w+)?\.json$")  # lists shards; diffusers puts a variant such as fp16 in the middle
SHARD = re.compile(r"-\d{5}-of-(?!00001)\d{5}(?=\.)")
NO_WEIGHTS = re.compile(r"(opt|scheduler|sampler|scaler|random_states|rng_state|dl_state|training|vae|latents_stats|"
                        r".*optim_states)", re.I)
CUSTOM = "custom_checkpoint_*.pkl"  # accelerate's save_state writes registered objects here, such as an average
ZERO = re.compile(r"(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")  # a rank's part, DeepSpeed stage 3


def find_in_folder(folder: Path, weights: str) -> Path | None:
    """Finds the weights in a folder of accelerate, diffusers or another trainer; None if it holds none.

    Files named after an average are preferred, unless `weights` is model. Raises ValueError if several files remain,
    and for FSDP's or DeepSpeed's shards, which only their own tools can join.
    """
    refuse_parts(folder)
    places = [folder / "transformer_ema", folder, folder / "transformer"]
    for place in places[weights == "model":]:
        named = {}  # the same weights may be there in several formats: safetensors come before pickles
        for file in sorted(place.glob("*"), key=lambda file: (".safetensors" not in file.name, len(file.name))):
            if WEIGHTS.fullmatch(file.name) and not SHARD.search(file.name) and not NO_WEIGHTS.match(file.name):
                name = re.sub(r"(\.(fp16|bf16|fp32))?\.[a-z]+(\.index(\.\w+)?\.json)?$", "", file.name)
                named.setdefault(re.sub("^pytorch_model", "model", name), file)
        averages = [file for name, file in named.items() if AVERAGE.search(name)]
        for file in sorted(place.glob(CUSTOM)) if weights == "ema" else ():
            held = networks_in(read_tensors(file))
            if any(isinstance(one.tensors, list) or {*MARKS} & one.tensors.keys() for one in held):
                averages.append(file)
        raw = [file for file in named.values() if file not in averages]
        found = averages if weights == "ema" and averages else raw
        if len(found) > 1:
            raise ValueError(f"{place} holds several weights files, {', '.join(sorted(file.name for file in found))}: "
                             f"name one of them.")
        if found:
            return found[0]
    return None


def refuse_parts(path: Path) -> None:
    """Raises ValueError, with the tool that joins them, for parts of weights that each rank has saved by itself."""
    inside = [path] if path.is_file() else [*path.glob("*"), *path.glob("*/*")]
    if any(re.match(r"(pytorch_|diffusion_pytorch_)?model[\w-]*\.(safetensors|bin)", file.name) for file in inside):
        return  # joined already
    if found := next((file for file in inside if file.suffix == ".distcp"), None):
        raise ValueError(f"{found} is a part of a checkpoint of torch.distributed, as FSDP saves it. Join its parts: "
                         f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {found.parent} weights.pt")
    if found := next((file for file in inside if ZERO.fullmatch(file.name)), None):
        root = found.parent if (found.parent / "zero_to_fp32.py").is_file() else found.parent.parent
        raise ValueError(f"{found} is a part of a checkpoint of DeepSpeed (ZeRO). Join its parts by their own script: "
                         f"python {root / 'zero_to_fp32.py'} {root} joined")


def files_of(file: Path) -> list[Path]:
    """Lists the files that contain the weights: `file` itself, or its shards if it is an index."""
    refuse_parts(file)
    if SHARD.search(file.name):
        raise ValueError(f"{file} is one of several shards: name the .index.json beside it, or the folder.")
    if not INDEX.search(file.name):
        return [file]
    with as_recorded(file):
        paths = [file.with_name(name) for name in sorted({*read_json(file)["weight_map"].values()})]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ValueError(f"{file} names {len(paths)} shards, but {len(missing)} are not beside it: download "
                         f"{', '.join(missing)}.")
    return paths


def read_content(file: Path) -> object:
    """Reads everything in a weights file, with shards joined; raises ValueError as `files_of` and `read_tensors` do."""
    contents = [read_tensors(path) for path in files_of(file)]
    if INDEX.search(file.name):
        return {key: value for content in contents for key, value in content.items()}
    if fnmatch(file.name, CUSTOM) and (raw := find_in_folder(file.parent, "model")):
        return {file.stem: contents[0], "model": read_content(raw)}
    return contents[0]


# ---- which weights a file holds -------------------------------------------------------------------------------------

MARKS = ("x_embedder.proj.weight", "pos_embed.proj.weight")  # the first layer of a DiT, and of diffusers' DiT
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}  # of DDP, compile, FSDP
AVERAGE = re.compile(r"(?<!non[-_])(?<!no[-_])(?<!exp[-_])(?<![a-z])(ema|(swa|avg)(?![a-z]))|(model|net)ema(?![a-z])|"
                     r"Ema|EMA|averag|polyak|shadow|^custom_checkpoint")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


MOST_PARTS = 100_000  # dictionaries, lists and values in a file


@dataclass(frozen=True)
class Held:
    """A network in a file: its name (the keys and prefixes before its tensors' names), and its tensors by name.

    The tensors are a list if an average was saved without names, as diffusers' EMAModel does.
    """

    name: str
    tensors: dict[str, Tensor] | list[Tensor]
    is_average: bool
    is_bare: bool       # at the top level of the file


def networks_in(content: object) -> list[Held]:
    """Finds the networks in a file's content: at any depth, under any prefix, in any wrapper.

    If no tensor is named like a DiT's first layer, the largest dictionary of tensors counts as a network.
    """
    found, others, visited = [], [], itertools.count()

    def visit(node: object, path: tuple[str, ...]) -> None:
        if next(visited) > MOST_PARTS:  # repeated references can turn a few into many
            raise ValueError(f"it holds more than {MOST_PARTS:,} parts")
        if (isinstance(node, list | tuple) and node and path and AVERAGE.search(path[-1])
                and all(isinstance(value, Tensor) for value in node)):
            found.append(Held(".".join(path), list(node), is_average=True, is_bare=False))
        elif isinstance(node, list | tuple):
            node = {str(i): value for i, value in enumerate(node) if isinstance(value, Mapping)}
        if not isinstance(node, Mapping):
            return
        tensors = {".".join(part for part in key.split(".") if part not in WRAPPERS): value
                   for key, value in node.items() if isinstance(key, str) and isinstance(value, Tensor)}
        prefixes = {key.removesuffix(mark) for key in tensors for mark in MARKS if f".{key}".endswith(f".{mark}")}
        groups: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in sorted(prefixes, key=len, reverse=True)}
        for key, value in tensors.items():
            prefix = next((prefix for prefix in groups if key.startswith(prefix)), None)
            if prefix is not None and value.ndim:  # not a counter, such as n_averaged
                groups[prefix][key.removeprefix(prefix)] = value
        # LDM's LitEma removes the dots from its names.
        names = {name.replace(".", ""): name for group in groups.values() for name in group}
        for mark in (mark.replace(".", "") for mark in MARKS):
            for prefix in [key.removesuffix(mark) for key in tensors if key.endswith(mark)]:
                groups[prefix] = {names[key.removeprefix(prefix)]: value for key, value in tensors.items()
                                  if key.startswith(prefix) and key.removeprefix(prefix) in names}
        for prefix, group in groups.items():
            name = ".".join([*path, *prefix.split(".")]).strip(".")
            found.append(Held(name, group, bool(AVERAGE.search(name)) or "n_averaged" in node, not path))
        if tensors:
            others.append(Held(".".join(path), tensors, is_average=False, is_bare=not path))
        for key, value in node.items():
            visit(value, (*path, str(key)))

    visit(content, ())
    return found or sorted(others, key=lambda held: -len(held.tensors))[:1]


def choose(content: object, weights: str | None) -> tuple[Held, str, str]:
    """Chooses a network of a file: `weights` is ema, model, a name, or None for the average if there is one.

    Returns it with its tensors by name; what it is (ema, model, or file if the file does not say); and a description.
    Raises ValueError for a file without a network, or without the requested one.
    """
    found = networks_in(content)
    if not found:
        raise ValueError("it does not hold a state dict, that is, a dictionary of tensors by name")
    averages = sorted((held for held in found if held.is_average), key=lambda held: held.name.count("."))
    raw = sorted((held for held in found if not held.is_average),
                 key=lambda held: ("model" not in held.name, len(held.name)))
    if found == raw and len(raw) == 1 and raw[0].is_bare and weights in (None, "ema", "model"):
        return raw[0], "file", "the only weights in it (which may or may not be averaged)"
    fitting = {"ema": averages, "model": raw, None: averages or raw}.get(weights)
    if weights not in (None, "ema", "model"):  # a key of the file, or ema-<decay> if an average has the number
        decay = weights.removeprefix("ema-")
        fitting = ([held for held in found if held.name == weights] or
                   [held for held in averages if re.search(rf"(?<!\d){re.escape(decay)}(?!\d)", held.name)])
    if not fitting:
        raise ValueError(f"it holds {', '.join(held.name for held in found)}, but no weights={weights}")
    held = fitting[0]
    state = name_tensors(held, raw) if isinstance(held.tensors, list) else held.tensors
    untrained = {key: one.tensors[key] for one in raw for key in ("pos_embed", "pos_embed.pos_embed")
                 if key in one.tensors}  # not every average has them
    which = "model" if not held.is_average else "ema" if held is averages[0] else held.name
    held = replace(held, tensors={**untrained, **state})
    beside = ", ".join(other.name or "bare" for other in found if other.name != held.name)
    if len(averages) > 1:
        beside += f"; sample.py, fid.py and export.py take weights={averages[-1].name}"
    if held.is_average:
        name, others = (f" under {held.name}" if held.name else ""), (f" (beside {beside})" if beside else "")
        description = f"the average{name}{others}"
    else:
        why = ("as set by weights=model" if averages else "as the file has no average" if len(raw) == 1 else
               f"as no key names an average (beside {beside})")
        description = f"the raw weights under {held.name or 'no key'}, {why}"
    return held, which, description


def name_tensors(held: Held, raw: list[Held]) -> dict[str, Tensor]:
    """Names the tensors of an average that was saved as a list, after weights with the same shapes in order."""
    shapes = [value.shape for value in held.tensors]
    for state in (one.tensors for one in raw):
        orders = [list(state)]
        with contextlib.suppress(ValueError), torch.device("meta"):  # safetensors keeps no order: try DiT's
            orders.append(list(DiT(**infer_architecture(state, num_heads=1)).state_dict()))
        for names in orders:
            if [state[name].shape for name in names if name in state] == shapes:
                return dict(zip(names, held.tensors, strict=True))
    raise ValueError(f"it holds an average without names under {held.name}, and no weights of the same shapes in the "
                     f"same order: save the average with names, or set weights=model. For init_from=, do so with "
                     f"scripts/export.py to=dit first")


def check_tensors(state: Mapping[str, Tensor]) -> None:
    """Raises ValueError for dtypes such as int8 or float8, for empty tensors, and for values that are not finite."""
    if empty := [key for key, value in state.items() if not value.numel()]:
        raise ValueError(f"it holds {len(empty)} of {len(state)} tensors without values, {empty[0]} first. DeepSpeed's "
                         f"ZeRO-3 saves a network like this if it was not gathered: run the zero_to_fp32.py in the "
                         f"checkpoint's folder, and name the file that it writes")
    if packed := [key for key, value in state.items() if value.dtype not in FLOATS]:
        dtype = str(state[packed[0]].dtype).removeprefix("torch.")
        raise ValueError(f"it holds {len(packed)} of {len(state)} tensors in {dtype}, {packed[0]} first: take the file "
                         f"in float32, bfloat16 or float16")
    if damaged := [key for key, value in state.items() if not value.isfinite().all()]:
        raise ValueError(f"it holds values that are not finite in {len(damaged)} of {len(state)} tensors, {damaged[0]} "
                         f"first: choose an earlier checkpoint")


# ---- which code they come from --------------------------------------------------------------------------------------

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


def detect_family(state: Mapping[str, Tensor], name: str, content: object) -> str | None:
    """Returns the family that a weights file shows, or None if there is no evidence, or evidence for several.

    `name` is the place of `state` in `content`, which is everything in the file. Raises ValueError for a path other
    than straight lines, or a prediction other than velocity.
    """
    args, around = settings_in(content), content if isinstance(content, Mapping) else {}
    config = around.get("config")
    transport = config.get("transport") if isinstance(config, Mapping) else args
    for key, known in (("path_type", ("linear",)), ("prediction", ("velocity", "v"))):
        value = transport.get(key) if isinstance(transport, Mapping) else None
        if value is not None and str(value).lower() not in known:
            raise ValueError(f"these weights were trained with {key}={value}, but only {known[0]} is supported")
    model = str(args.get("model"))
    evidence = {
        "repa": any(key.startswith(("projectors.", "decoder_blocks.")) for key in state)
                or ({"encoder_depth", "proj_coeff"} <= args.keys() and args.get("prediction") == "v"),
        "lightning": any(key.startswith("feat_rope.") for key in state),
        "tread": "ema_state_dict" in around and around.keys() <= TREAD_KEYS and name.endswith("_state_dict.model"),
        "sit": model.startswith("SiT-") and SIT_TRANSPORT <= args.keys(),
        # Two output channels for each input channel are the noise and its variance.
        "dit": model.startswith("DiT-") and "image_size" in args and MARKS[0] in state
               and len(state.get("final_layer.linear.bias", ())) == 2 * state[MARKS[0]][0].numel(),
    }
    known = {"sit": SIT_ARGS, "dit": DIT_ARGS, "lightning": set()}
    shown = [family for family, is_shown in evidence.items() if is_shown]
    return shown[0] if len(shown) == 1 and args.keys() <= known.get(shown[0], args.keys()) else None


class DiffusersRecord(Record):
    """The settings that are read from the config.json of diffusers' DiT."""

    num_attention_heads: Size
    sample_size: Size | None = None
    num_embeds_ada_norm: Classes | None = None


def pipeline_of(file: Path) -> dict:
    """Reads what diffusers' config.json and the folder around it say about a DiT; an empty dict without a config.

    Keys: num_heads, input_size, num_classes, and for a DiTPipeline also family and autoencoder.
    """
    config, index = file.with_name("config.json"), file.parent.parent / "model_index.json"
    if not config.is_file() or "num_attention_heads" not in read_json(config):
        return {}
    read = read_record(DiffusersRecord, config, "It does not describe a DiT.")
    known = {"num_heads": read.num_attention_heads, "input_size": read.sample_size,
             "num_classes": read.num_embeds_ada_norm}
    if index.is_file() and read_json(index).get("_class_name") == "DiTPipeline":
        scheduler, vae = index.with_name("scheduler") / "scheduler_config.json", index.with_name("vae")
        schedule = read_json(scheduler) if scheduler.is_file() else {}
        if schedule.get("prediction_type", "epsilon") == "epsilon" and "num_train_timesteps" in schedule:
            known["family"] = "dit"
        if (vae / "config.json").is_file():
            known["autoencoder"] = str(vae)
    return known


# ---- under our names ------------------------------------------------------------------------------------------------


def plain_keys(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames a code base's keys to ours, and drops LightningDiT's tables of angles and REPA's projectors.

    REPA's older files number the blocks after the first `encoder_depth` from 0 again.
    """
    state = {key: value for key, value in state.items() if not key.startswith(("feat_rope.", "projectors."))}
    if any(key.startswith("decoder_blocks.") for key in state):
        encoder_depth = depth_of(state, "blocks")
        for key in [key for key in state if key.startswith("decoder_blocks.")]:
            _, j, rest = key.split(".", 2)
            state[f"blocks.{int(j) + encoder_depth}.{rest}"] = state.pop(key)
    return from_diffusers(state) if any(key.startswith("transformer_blocks.") for key in state) else state


def diffusers_names(depth: int) -> dict[str, list[str]]:
    """Maps each of our tensors to diffusers': one, the thirds of a qkv, or a copy in each block."""
    blocks = [f"transformer_blocks.{i}" for i in range(depth)]
    layers = {"x_embedder.proj": ["pos_embed.proj"], "final_layer.adaLN_modulation.1": ["proj_out_1"],
              "final_layer.linear": ["proj_out_2"]}
    for i, theirs in ((0, "linear_1"), (2, "linear_2")):
        layers[f"t_embedder.mlp.{i}"] = [f"{block}.norm1.emb.timestep_embedder.{theirs}" for block in blocks]
    for i, block in enumerate(blocks):
        layers |= {f"blocks.{i}.adaLN_modulation.1": [f"{block}.norm1.linear"],
                   f"blocks.{i}.attn.qkv": [f"{block}.attn1.to_{part}" for part in "qkv"],
                   f"blocks.{i}.attn.proj": [f"{block}.attn1.to_out.0"],
                   f"blocks.{i}.mlp.fc1": [f"{block}.ff.net.0.proj"], f"blocks.{i}.mlp.fc2": [f"{block}.ff.net.2"]}
    table = [f"{block}.norm1.emb.class_embedder.embedding_table.weight" for block in blocks]
    return {"pos_embed": ["pos_embed.pos_embed"], "y_embedder.embedding_table.weight": table,
            **{f"{ours}.{kind}": [f"{name}.{kind}" for name in theirs]
               for ours, theirs in layers.items() for kind in ("weight", "bias")}}


def from_diffusers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undoes `to_diffusers`, with or without the position embedding; raises ValueError if blocks' copies differ."""
    depth = depth_of(state, "transformer_blocks")
    names = diffusers_names(depth)
    if "pos_embed.pos_embed" not in state:  # only scripts/export.py stores it
        del names["pos_embed"]
    if lacking := [name for theirs in names.values() for name in theirs if name not in state]:
        raise ValueError(f"it has names of diffusers' DiT, but {lacking[0]} is not among them")
    for copies in (theirs for ours, theirs in names.items() if "_embedder." in ours):
        if other := next((name for name in copies if not torch.equal(state[name], state[copies[0]])), None):
            raise ValueError(f"{other} differs from {copies[0]}, but a DiT has one embedder for all blocks")
    return {ours: torch.cat([state[name] for name in theirs]) if ".qkv." in ours else state[theirs[0]]
            for ours, theirs in names.items()}


def with_positions(state: Mapping[str, Tensor], input_size: int | None, file: Path) -> dict[str, Tensor]:
    """Adds the fixed position embedding to weights that were stored without it, as diffusers does."""
    first = state.get(MARKS[0])
    if "pos_embed" in state or first is None:
        return dict(state)
    if input_size is None:
        raise ValueError(f"{file} holds no position embedding, and there is no config.json beside it: set "
                         f"input_size=, the side of its latents (32 for images of 256 pixels).")
    return {**state, "pos_embed": sincos_2d(first.shape[0], input_size // first.shape[-1])}


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


def to_our_diffusion(state: Mapping[str, Tensor], network: dict, family: Family) -> tuple[dict[str, Tensor], dict]:
    """Rewrites a family's weights, already under our keys, for an ordinary network; returns its keywords, too."""
    state = reverse_time(state) if family.backwards else dict(state)
    if family.backwards and network["learn_sigma"]:  # SiT drops the second half of the last layer's 2C channels
        channels = network["in_channels"]
        for key in ("final_layer.linear.weight", "final_layer.linear.bias"):
            state[key] = state[key].unflatten(0, (-1, 2 * channels))[:, :channels].flatten(0, 1).contiguous()
        network = {**network, "learn_sigma": False}
    return state, network


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
