"""Weights of other code: what each format's tensors and settings mean, and how they become a checkpoint of ours.

scripts/import_weights.py alone reads these formats. Each tensor of the network is used, or the import names it.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from autoencoder import Convention
from blocks import BLOCKS
from blocks.transformer import rotary_angles
from dit import depth_of, infer_architecture, sincos_2d, timestep_frequencies
from runtime.schema import as_recorded, read_json
from weights.autoencoders import own_convention
from weights.reading import SUFFIXES, read_tensors
from weights.records import DIFFUSIONS, fit

COMMAND = "python scripts/import_weights.py"
# Settings with which a network means something else, and the values with which it means what ours computes.
NORMS = {"norm_eps": [1e-6], "activation_fn": ["gelu-approximate"], "wo_shift": [False]}
NOISE = {"noise_schedule": ["linear"], "beta_schedule": ["linear"], "beta_start": [1e-4], "beta_end": [0.02],
         "diffusion_steps": [1000], "num_train_timesteps": [1000], "predict_xstart": [False], "predict_v": [False],
         "prediction_type": ["epsilon"], "rescale_betas_zero_snr": [False]}
PATH = {"path_type": ["linear"], "prediction": ["velocity"]}


@dataclass(frozen=True)
class Format:
    """The form in which one code base saves its weights, and what its network predicts."""

    meaning: str                                    # shown to the user
    diffusion: dict | None                          # ours that fits it; None: it is typed
    settings: Mapping[str, list]                    # those that may stand in a file, with the values that are read
    pair: tuple[str, str] | None = ("ema", "model")  # keys of the average and the raw weights in its train.py's files
    blocks: tuple[str, ...] = ("dit",)
    outputs: tuple[int, ...] = (1,)                 # output channels for each channel of the latents
    backwards: bool = False                         # time runs from noise at 0 to data at 1, and v = x - eps
    autoencoder: str | None = "sd_vae_ema"          # of its latents of four channels; None: it is typed


FORMATS = {
    "dit": Format("facebookresearch/DiT and fast-DiT: noise and its variance at 1000 steps", {"name": "ddpm"},
                  NORMS | NOISE, outputs=(2,)),
    "sit": Format("willisma/SiT: a velocity with data at t = 1", {"name": "rf"}, NORMS | PATH, outputs=(1, 2),
                  backwards=True),
    "repa": Format("sihyun-yu/REPA and REPA-E: a velocity with noise at t = 1", {"name": "rf"},
                   NORMS | PATH | {"prediction": ["v"]}),
    "lightningdit": Format("hustvl/LightningDiT: a velocity with data at t = 1", {"name": "rf"}, NORMS | PATH,
                           blocks=("lightning", "dit"), outputs=(1, 2), backwards=True, autoencoder=None),
    "tread": Format("CompVis/tread: EDM", {"name": "edm", "sigma_data": 0.5}, NORMS | {"sigma_data": [0.5]},
                    pair=("ema_state_dict", "model_state_dict")),
    # One of diffusers' three norms has 1e-5, also with DiT's weights, which were trained with 1e-6.
    "diffusers": Format("DiT's weights in diffusers' DiTTransformer2DModel: noise at 1000 steps", {"name": "ddpm"},
                        NORMS | NOISE | {"norm_eps": [1e-5, 1e-6], "norm_type": ["ada_norm_zero"]},
                        pair=None, outputs=(1, 2)),
    "ours": Format("weights of this project that lost their meta.json", None, {}, pair=None, blocks=(*BLOCKS,),
                   outputs=(1, 2), autoencoder=None),
}
READ_SETTINGS = {name for form in FORMATS.values() for name in form.settings}


def needed(words: list[str] | None, setting: str, shown: str, value: object, message: str) -> object:
    """Raises ValueError for a setting that must be typed, or adds it to a command's words and returns `value`."""
    if words is None:
        raise ValueError(message)
    words.append(f"{setting}={shown}")
    return value


# ---- which network of a file ----------------------------------------------------------------------------------------

FIRST_LAYERS = ("x_embedder.proj.weight", "pos_embed.proj.weight")  # of a DiT, and of diffusers' DiT
MOST_POSITIONS = 2**25  # numbers in a position embedding: 29,000 tokens of XL/2, for images of 2,700 pixels
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}  # of DDP, compile, FSDP
# What files carry beside the network: REPA's heads, which only training reads, autoencoders, and EMA counters.
BESIDE = re.compile(r"(projectors|vae|first_stage_model|model_ema)\.|"
                    r"(n_averaged|num_updates|decay|initted|step|bn\.num_batches_tracked)$")


def find_file(source: Path) -> Path:
    """Finds the weights file of a path, a folder or diffusers' pipeline; raises ValueError for none or several."""
    if source.is_file():
        return source
    place = source / "transformer" if (source / "model_index.json").is_file() else source
    found = sorted(file for folder in (place, place / "checkpoints") for file in folder.glob("*")
                   if file.suffix in SUFFIXES)
    if len(found) != 1:
        why = (f"does not exist (looked from {Path.cwd()})" if not source.exists() else
               f"holds {len(found) or 'no'} weights files ({', '.join(SUFFIXES)}): name one, or join its shards")
        raise ValueError(f"{place} {why}.")
    return found[0]


def networks_in(content: object) -> dict[str, dict[str, Tensor]]:
    """Lists the networks of a file by name: the key of a state dict, and the prefix before its tensors' names.

    A tensor that lies outside of every prefix is listed with each network, so that none is left out unseen.
    """
    networks = {}
    for place, node in {"": content, **content}.items() if isinstance(content, Mapping) else ():
        tensors = {".".join(part for part in key.split(".") if part not in WRAPPERS): value
                   for key, value in (node.items() if isinstance(node, Mapping) else ())
                   if isinstance(key, str) and isinstance(value, Tensor)}
        prefixes = tuple(key.removesuffix(layer) for key, value in tensors.items() for layer in FIRST_LAYERS
                         if f".{key}".endswith(f".{layer}") and value.ndim == 4)
        for prefix in prefixes:
            networks[f"{place}.{prefix}".strip(".")] = {
                key.removeprefix(prefix): value for key, value in tensors.items()
                if key.startswith(prefix) or not key.startswith(prefixes)}
    if not networks:
        raise ValueError(f"it holds no DiT's state dict, a dictionary with {' or '.join(FIRST_LAYERS)}, at its top "
                         f"level or under one of its keys: save it so where it was made")
    return networks


def choose(
    networks: Mapping[str, dict], content: Mapping, pair: tuple[str, str] | None, weights: str | None,
    words: list[str] | None = None,         # as in `needed`
) -> str:
    """Returns the name of the network that `weights` means, or of the average in a format's `pair`.

    Raises ValueError where that is none, or one of several.
    """
    names = [name for name in networks if name]
    choices = " or ".join(f"weights={name}" for name in names)
    if weights is not None:
        chosen = [name for name in networks if f"{name}.".startswith(f"{weights}.")]
        if len(chosen) != 1:
            raise ValueError(f"it has no weights={weights}: {f'set {choices}' if choices else 'leave weights= out'}")
        return chosen[0]
    by_key = {name.partition(".")[0]: name for name in networks}
    if len(networks) == 2 and pair and by_key.keys() == {*pair}:
        return by_key[pair[0]]
    first = next(iter(networks))
    unread = [key for key in ("ema", "ema_state_dict") if content.get(key) and key not in by_key]
    unread += [key for key in networks[first] if key.startswith("model_ema.")]  # LitEma's, whose names lack their dots
    if len(networks) > 1 or unread:
        what = f"an average, {unread[0]}, that is no state dict" if unread else "several networks"
        return needed(words, "weights", f"<{' or '.join(names)}>", first,
                      f"it holds {what}: set {choices}, or save one network by itself where it was made")
    return first


# ---- settings in a file ---------------------------------------------------------------------------------------------


def settings_in(content: object) -> Iterator[tuple[str, object]]:
    """Yields names and values of the settings that a file holds, in dictionaries and lists of any depth."""
    waiting, seen = [content], set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping | list | tuple) and id(node) not in seen:  # one may lie in itself
            seen.add(id(node))
            waiting += node.values() if isinstance(node, Mapping) else node
            if isinstance(node, Mapping):
                yield from node.items()


def check_settings(found: Mapping[str, list], form: Format) -> None:
    """Raises ValueError for a setting with which a network means something else than in this format."""
    for name in sorted(found.keys() & READ_SETTINGS):
        allowed = form.settings.get(name, [])
        if odd := [value for value in found[name] if value is not None
                   and (value.lower() if isinstance(value, str) else value) not in allowed]:
            raise ValueError(f"it says {name}={odd[0]}, and this format has {allowed[0] if allowed else 'none'}: set "
                             f"another format=, or if that is not the network's, save its state dict by itself")


# ---- diffusers ------------------------------------------------------------------------------------------------------


def beside_diffusers(file: Path) -> tuple[dict, list[dict], Path | None]:
    """Reads the configs around diffusers' weights: the sizes, all settings, and the folder of a pipeline, if any."""
    config, pipeline = file.with_name("config.json"), file.parent.parent
    if not config.is_file():
        return {}, [], None
    settings = read_json(config)
    sizes = {"num_heads": settings["num_attention_heads"], "input_size": settings["sample_size"]}
    if not (pipeline / "model_index.json").is_file():
        return sizes, [settings], None
    if (kind := read_json(pipeline / "model_index.json").get("_class_name")) != "DiTPipeline":
        raise ValueError(f"it is the transformer of a {kind}, not of a DiTPipeline")
    return sizes, [settings, read_json(pipeline / "scheduler/scheduler_config.json")], pipeline


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
        raise ValueError(f"it {'has' if odd[0] in state else 'lacks'} the tensor {odd[0]}, unlike diffusers' DiT")
    for name, first in ((name, copies[0]) for ours, copies in names.items() if ".qkv." not in ours for name in copies):
        if not torch.equal(state[name], state[first]):
            raise ValueError(f"{name} differs from {first}, but a DiT has one embedder for all blocks")
    return {ours: torch.cat([state[name] for name in copies]) if ".qkv." in ours else state[copies[0]]
            for ours, copies in names.items()}


# ---- under our names ------------------------------------------------------------------------------------------------


def our_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames diffusers' tensors to ours, and REPA's older blocks, which count from 0 again after `encoder_depth`."""
    if any(key.startswith("transformer_blocks.") for key in state):
        return from_diffusers(state)
    first = depth_of(state, "blocks")
    for key in [key for key in state if key.startswith("decoder_blocks.")]:
        _, number, rest = key.split(".", 2)
        state[f"blocks.{int(number) + first}.{rest}"] = state.pop(key)
    return state


def count_classes(rows: int, typed: int | None, found: list) -> int | None:
    """Returns the number of classes that is typed or in a file, if any; raises ValueError if the table has others."""
    said = {typed} if typed else {value for value in found if isinstance(value, int)}
    if odd := [count for count in said if rows not in (count, count + 1)]:
        raise ValueError(f"num_classes={odd[0]} does not fit its label table of {rows} rows: set num_classes={rows} if "
                         f"each row is a class, or num_classes={rows - 1} if the last one is the null label")
    return min(said, default=None)


def without_tables(state: Mapping[str, Tensor], network: dict, found: Mapping[str, list]) -> dict[str, Tensor]:
    """Drops LightningDiT's tables of the angles that ours compute; raises ValueError for other angles or switches."""
    tables = {key: value for key, value in state.items() if key.startswith("feat_rope.")}
    switches = [bool(tables), network["block"] == "lightning", "blocks.0.norm1.weight" in state,
                *(value is True for value in found.get("use_rope", ()))]
    if len({*switches}) > 1:
        has = ["has" if switch else "lacks" for switch in switches]
        raise ValueError(f"it {has[0]} feat_rope, {has[1]} mlp.w12 and {has[2]} norm1.weight, and is read with all of "
                         f"use_rope, use_swiglu and use_rmsnorm, or with none: save its complete state dict")
    side, head_dim = network["input_size"] // network["patch_size"], network["hidden_size"] // network["num_heads"]
    angles = rotary_angles(torch.arange(side**2).unsqueeze(0), side, head_dim)[0, :, 0].repeat_interleave(2, dim=-1)
    ours = {"feat_rope.freqs_cos": angles.cos(), "feat_rope.freqs_sin": angles.sin()} if tables else {}
    if tables.keys() != ours.keys() or any(  # float16 or bfloat16
            tables[key].shape != angles.shape or (tables[key] - ours[key]).abs().max() > 0.01 for key in ours):
        raise ValueError(f"it has feat_rope for other angles than {network['num_heads']} heads and {side} x {side} "
                         f"tokens have in LightningDiT: set num_heads=, if its number of heads is another")
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


# ---- importing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Foreign:
    """A network of another code base under our names, and what is known about it."""

    form: Format
    state: dict[str, Tensor]
    network: dict                   # its keywords
    weights: str                    # its key in the file; "" for one without
    others: list[str]               # keys of the networks beside it
    dropped: list[str]              # tensors beside it
    autoencoder: str
    convention: Convention
    display_names: list[str] | None

    def rewritten(self) -> tuple[dict[str, Tensor], dict]:
        """Returns weights in float32 and keywords of an ordinary network of ours that predicts the same."""
        state, network = {key: value.float() for key, value in self.state.items()}, self.network
        if self.form.backwards:
            state, network = reverse_time(state), network | {"learn_sigma": False}
            for key in ("final_layer.linear.weight", "final_layer.linear.bias"):  # SiT ignores the second of two halves
                outputs = self.network["in_channels"] * (1 + self.network["learn_sigma"])
                kept = state[key].unflatten(0, (-1, outputs))[:, : network["in_channels"]]
                state[key] = kept.flatten(0, 1).contiguous()
        return state, network


def read(
    file: Path, content: object, name: str, *, weights: str | None = None, num_heads: int | None = None,
    num_classes: int | None = None, input_size: int | None = None, autoencoder: str | None = None,
    diffusion: dict | None = None,
    words: list[str] | None = None,         # to which `needed` adds the settings that must be typed
) -> Foreign:
    """Reads a network from the content of a file in the format of this name.

    Raises ValueError for tensors and settings that are not the format's, and for a setting that must be typed.
    """
    form, networks, found = FORMATS[name], networks_in(content), {}
    sizes, configs, pipeline = beside_diffusers(file) if name == "diffusers" else ({}, [], None)
    chosen = choose(networks, content, form.pair, weights, words)
    for key, value in settings_in([content, *configs]):
        found.setdefault(key, []).append(value)
    check_settings(found, form)
    dropped = [key for key in networks[chosen] if BESIDE.match(key)]
    state = {key: value for key, value in networks[chosen].items() if key not in dropped}
    mean, variance = (state.pop(f"bn.running_{kind}", None) for kind in ("mean", "var"))  # of REPA-E's latents
    if (name == "diffusers") != any(key.startswith("transformer_blocks.") for key in state):
        raise ValueError("its tensors have other names than this format's")

    state, typed = our_names(state), {"num_heads": num_heads, "input_size": input_size}
    if "feat_rope.freqs_cos" in state:  # of LightningDiT's heads
        sizes["num_heads"] = len(state["x_embedder.proj.weight"]) // state["feat_rope.freqs_cos"].shape[-1]
    sizes |= {key: value for key, value in typed.items() if value is not None}
    if "pos_embed" not in state:
        width, _, _, patch = state["x_embedder.proj.weight"].shape
        if "input_size" not in sizes:
            sizes["input_size"] = needed(
                words, "input_size", "<side of the latents>", 2 * patch, "it holds no pos_embed, and no config.json is "
                "beside it: set input_size=, such as 32 for images of 256 pixels")
        if (side := sizes["input_size"] // patch) ** 2 * width > MOST_POSITIONS:
            raise ValueError(f"latents of side {sizes['input_size']} would have {side**2:,} tokens: set input_size=, "
                             f"or correct sample_size in the config.json beside it")
        state["pos_embed"] = sincos_2d(width, side)
    counts = [*found.get("num_classes", ()), *found.get("num_embeds_ada_norm", ())]
    classes = count_classes(len(state.get("y_embedder.embedding_table.weight", ())), num_classes, counts)
    try:
        network = infer_architecture(state, sizes.get("num_heads"), classes)
    except ValueError as error:
        if "set num_heads=" not in str(error):
            raise
        network = infer_architecture(state, needed(words, "num_heads", "<heads>", 1, str(error)), classes)
    outputs, channels = 1 + network["learn_sigma"], network["in_channels"]
    if network["block"] not in form.blocks or outputs not in form.outputs:
        raise ValueError(f"it has the blocks of {network['block']}, and {outputs} output channels for each of its "
                         f"{channels}, unlike this format")
    if (side := sizes.get("input_size", network["input_size"])) != network["input_size"]:
        raise ValueError(f"input_size={side} does not fit its tensors, which have {network['input_size']}")
    if name == "lightningdit":
        state = without_tables(state, network, found)
    fit(state, network, "it")
    if form.backwards and network["learn_sigma"]:
        dropped.append("the second half of the last layer")
    if form.diffusion is diffusion is None:
        needed(words, "diffusion", f"<{'|'.join(DIFFUSIONS)}>", None,
               "it does not record its diffusion: set diffusion= as its run had it")

    usual = str(pipeline / "vae") if pipeline else "sd_vae_mse" if found.get("vae") == ["mse"] else form.autoencoder
    if not autoencoder and (not form.autoencoder or channels != 4 or mean is not None):
        autoencoder = needed(words, "autoencoder", "<what decodes its latents, or none>", "none",
                             f"its latents of {channels} channels may be any autoencoder's: set autoencoder= to what "
                             f"decodes them (docs/data.md), or to none")
    autoencoder = autoencoder or usual
    convention = own_convention(autoencoder) or Convention()
    if mean is not None and variance is not None:
        convention = Convention(latents_mean=tuple(mean.double().tolist()),
                                latents_std=tuple(variance.double().sqrt().tolist()))
    convention.require(channels, f"autoencoder={autoencoder}")
    labels = read_json(pipeline / "model_index.json").get("id2label") if pipeline else None
    names = [str(labels.get(str(i), i)) for i in range(network["num_classes"])] if labels else None
    return Foreign(form, state, network, chosen, [key for key in networks if key != chosen], dropped, autoencoder,
                   convention, names)


# ---- what to type ---------------------------------------------------------------------------------------------------


def choices(file: Path, content: object) -> list[str]:
    """Lists the formats that a file fits, each with the settings to type and what it would mean."""
    fitting = []
    for name, form in FORMATS.items():
        words = [f"format={name}"]
        with contextlib.suppress(ValueError):
            if read(file, content, name, words=words).network["block"] == form.blocks[0] or name == "ours":
                fitting.append(f"{' '.join(words)} ({form.meaning})")
    return fitting


def how_to_import(source: Path) -> str:
    """Writes the command that imports a file or folder of other code, or why it cannot be imported."""
    out = Path("weights", re.sub(r"[^\w.-]+", "-", source.resolve().stem).lower())
    try:
        file = find_file(source)
        with as_recorded(file):
            content = read_tensors(file)
            if not (fitting := choices(file, content)):
                read(file, content, "sit")
                raise ValueError("its tensors are those of no format that can be imported")
    except ValueError as error:
        return f"{source} is no run, no checkpoint folder and nothing to import: {str(error).rstrip('.')}."
    which = fitting[0] if len(fitting) == 1 else f"and one of {'; '.join(fitting)}"
    return (f"{source} is not a checkpoint of this project. Import it once: {COMMAND} source={file} out={out} {which}. "
            f"Then name {out}.")
