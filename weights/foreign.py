"""Weights of other code: what each format's tensors and settings mean, and how they become a checkpoint of ours.

scripts/import_weights.py alone reads these formats. Each tensor of the network is used, or the import names it.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from autoencoder import Convention
from blocks import BLOCKS
from blocks.transformer import rotary_angles
from dit import depth_of, infer_architecture, sincos_2d, timestep_frequencies
from runtime.schema import as_recorded, read_json, typed
from weights.autoencoders import own_convention
from weights.reading import SUFFIXES, entries, read_tensors
from weights.records import DIFFUSIONS, fit

COMMAND = "python scripts/import_weights.py"
# Settings with which a network means something else, and the values with which it means what ours computes.
Values = Mapping[str, list[Any]]
NORMS: Values = {"norm_eps": [1e-6], "activation_fn": ["gelu-approximate"], "wo_shift": [False]}
NOISE: Values = {"noise_schedule": ["linear"], "beta_schedule": ["linear"], "beta_start": [1e-4], "beta_end": [0.02],
                 "diffusion_steps": [1000], "num_train_timesteps": [1000], "predict_xstart": [False],
                 "predict_v": [False], "prediction_type": ["epsilon"], "rescale_betas_zero_snr": [False]}
PATH: Values = {"path_type": ["linear"], "prediction": ["velocity"]}


@dataclass(frozen=True)
class Format:
    """The form in which one code base saves its weights, and what its network predicts."""

    meaning: str                                    # shown to the user
    diffusion: dict[str, Any] | None                # ours that fits it; None: it is typed
    settings: Values                                # those that may stand in a file, with the values that are read
    pair: tuple[str, str] | None = ("ema", "model")  # keys of the average and the raw weights in its train.py's files
    blocks: tuple[str, ...] = ("dit",)
    outputs: tuple[int, ...] = (1,)                 # output channels for each channel of the latents
    backwards: bool = False                         # time runs from noise at 0 to data at 1, and v = x - eps
    autoencoder: str | None = "sd_vae_ema"          # of its latents of four channels; None: it is typed


FormatName = Literal["dit", "sit", "repa", "lightningdit", "tread", "diffusers", "ours"]
FORMATS: dict[FormatName, Format] = {
    "dit": Format("facebookresearch/DiT and fast-DiT: noise and its variance at 1000 steps", {"name": "ddpm"},
                  {**NORMS, **NOISE}, outputs=(2,)),
    "sit": Format("willisma/SiT: a velocity with data at t = 1", {"name": "rf"}, {**NORMS, **PATH}, outputs=(1, 2),
                  backwards=True),
    "repa": Format("sihyun-yu/REPA and REPA-E: a velocity with noise at t = 1", {"name": "rf"},
                   {**NORMS, **PATH, "prediction": ["v"]}),
    "lightningdit": Format("hustvl/LightningDiT: a velocity with data at t = 1", {"name": "rf"}, {**NORMS, **PATH},
                           blocks=("lightning",), outputs=(1, 2), backwards=True, autoencoder=None),
    "tread": Format("CompVis/tread: EDM", {"name": "edm", "sigma_data": 0.5}, {**NORMS, "sigma_data": [0.5]},
                    pair=("ema_state_dict", "model_state_dict")),
    # One of diffusers' three norms has 1e-5, also with DiT's weights, which were trained with 1e-6.
    "diffusers": Format("DiT's weights in diffusers' DiTTransformer2DModel: noise at 1000 steps", {"name": "ddpm"},
                        {**NORMS, **NOISE, "norm_eps": [1e-5, 1e-6], "norm_type": ["ada_norm_zero"]},
                        pair=None, outputs=(1, 2)),
    "ours": Format("weights of this project that lost their meta.json", None, {}, pair=None, blocks=(*BLOCKS,),
                   outputs=(1, 2), autoencoder=None),
}
READ_SETTINGS = {name for form in FORMATS.values() for name in form.settings}
TO_TYPE = {"weights": "<its key>", "num_heads": "<heads>", "diffusion": f"<{'|'.join(DIFFUSIONS)}>",
           "autoencoder": "<what decodes its latents, or none>"}  # as a command shows what must be typed


# ---- which network of a file ----------------------------------------------------------------------------------------

FIRST_LAYERS = ("x_embedder.proj.weight", "pos_embed.proj.weight")  # of a DiT, and of diffusers' DiT
LAST_LAYER = ("final_layer.linear.weight", "final_layer.linear.bias")
OF_LATENTS = ("bn.running_mean", "bn.running_var")  # REPA-E's
OTHER_NAMES = "its tensors have other names than this format's"
MOST_POSITIONS = 2**25  # numbers in a position embedding: 29,000 tokens of XL/2, for images of 2,700 pixels
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}  # of DDP, compile, FSDP
# What files carry beside the network: REPA's heads, which only training reads, autoencoders, and EMA counters.
BESIDE = re.compile(r"(projectors|vae|first_stage_model|model_ema)\.|"
                    r"(n_averaged|num_updates|decay|initted|step|bn\.num_batches_tracked)$")


def find_file(source: Path) -> Path:
    """Finds the weights file of a path, a folder or diffusers' pipeline; raises ValueError for none or several."""
    place = source / "transformer" if (source / "model_index.json").is_file() else source
    found = [place] if place.is_file() else sorted(file for file in place.glob("*") if file.suffix in SUFFIXES)
    if len(found) != 1:
        why = (f"holds {len(found) or 'no'} weights files ({', '.join(SUFFIXES)}): name one, or join its shards"
               if place.is_dir() else f"does not exist (looked from {Path.cwd()})")
        raise ValueError(f"{place} {why}.")
    return found[0]


def networks_in(content: Any) -> dict[str, dict[str, Tensor]]:
    """Lists the networks of a file by name: the key of a state dict, and the prefix before its tensors' names.

    A tensor that lies outside of every prefix is listed with each network, so that none is left out unseen.
    """
    networks = {}
    nodes = {"": content, **content} if isinstance(content, Mapping) else {}
    for place, node in nodes.items():
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
    networks: Mapping[str, Mapping[str, Tensor]], content: Mapping[str, Any], pair: tuple[str, str] | None,
    weights: str | None,
) -> tuple[str, str | None]:
    """Returns the name of the network that `weights` means, or of the average in a format's `pair`.

    The second value says why `weights` must be typed, if so. Raises ValueError where it means none, or one of several.
    """
    choices = " or ".join(f"weights={name}" for name in networks if name)
    if weights is not None:
        chosen = [name for name in networks if f"{name}.".startswith(f"{weights}.")]
        if len(chosen) != 1:
            raise ValueError(f"it has no weights={weights}: {f'set {choices}' if choices else 'leave weights= out'}")
        return chosen[0], None
    by_key = {name.partition(".")[0]: name for name in networks}
    if len(networks) == 2 and pair and by_key.keys() == {*pair}:
        return by_key[pair[0]], None
    first = next(iter(networks))
    unread = [key for key in ("ema", "ema_state_dict") if content.get(key) and key not in by_key]
    unread += [key for key in networks[first] if key.startswith("model_ema.")]  # LitEma's, whose names lack their dots
    if len(networks) == 1 and not unread:
        return first, None
    what = f"an average, {unread[0]}, that is no state dict" if unread else "several networks"
    return first, f"it holds {what}: set {choices}, or save one network by itself where it was made"


def check_settings(found: Values, form: Format) -> None:
    """Raises ValueError for a setting with which a network means something else than in this format."""
    for name in sorted(found.keys() & READ_SETTINGS):
        allowed = form.settings.get(name, [])
        if odd := [value for value in found[name] if value is not None
                   and (value.lower() if isinstance(value, str) else value) not in allowed]:
            raise ValueError(f"it says {name}={odd[0]}, and this format has {allowed[0] if allowed else 'none'}: set "
                             f"another format=, or if that is not the network's, save its state dict by itself")


# ---- diffusers ------------------------------------------------------------------------------------------------------

DIFFUSERS_NAMES = (  # each block has a copy of the embedders
    (r"^transformer_blocks\.\d+\.norm1\.emb\.timestep_embedder\.linear_1", "t_embedder.mlp.0"),
    (r"^transformer_blocks\.\d+\.norm1\.emb\.timestep_embedder\.linear_2", "t_embedder.mlp.2"),
    (r"^transformer_blocks\.\d+\.norm1\.emb\.class_embedder", "y_embedder"), (r"^transformer_blocks", "blocks"),
    (r"\.norm1\.linear", ".adaLN_modulation.1"), (r"\.attn1\.to_out\.0", ".attn.proj"), (r"\.attn1\.", ".attn."),
    (r"\.ff\.net\.0\.proj", ".mlp.fc1"), (r"\.ff\.net\.2", ".mlp.fc2"), (r"^pos_embed\.proj", "x_embedder.proj"),
    (r"^proj_out_1", "final_layer.adaLN_modulation.1"), (r"^proj_out_2", "final_layer.linear"))


def diffusers_configs(file: Path) -> list[dict[str, Any]]:
    """Reads the configs that diffusers saves beside a transformer's weights: its own, and those of a pipeline."""
    config, index = file.with_name("config.json"), file.parent.parent / "model_index.json"
    if not config.is_file():
        raise ValueError(f"its settings are in {config.name}: copy that beside it from where the weights are from")
    if not index.is_file():
        return [read_json(config)]
    if (kind := read_json(index).get("_class_name")) != "DiTPipeline":
        raise ValueError(f"it is the transformer of a {kind}, not of a DiTPipeline")
    return [read_json(config), read_json(index), read_json(index.with_name("scheduler") / "scheduler_config.json")]


def from_diffusers(theirs: Mapping[str, Tensor], side: int) -> dict[str, Tensor]:
    """Renames the tensors of diffusers' DiT for latents of `side` to ours, and adds the positions.

    Raises ValueError if blocks' copies of an embedder differ.
    """
    state: dict[str, Tensor] = {}
    for key, value in theirs.items():
        name = key
        for pattern, ours in DIFFUSERS_NAMES:
            name = re.sub(pattern, ours, name)
        if name in state and not torch.equal(state[name], value):
            raise ValueError(f"{key} differs from another block's, but a DiT has one embedder for all blocks")
        state[name] = value
    for i in range(depth_of(state, "blocks")):
        for kind in ("weight", "bias"):
            parts = [f"blocks.{i}.attn.to_{part}.{kind}" for part in "qkv"]
            if state.keys() >= {*parts}:
                state[f"blocks.{i}.attn.qkv.{kind}"] = torch.cat([state.pop(part) for part in parts])
    width, _, _, patch = state["x_embedder.proj.weight"].shape
    if (grid := side // patch) ** 2 * width > MOST_POSITIONS:
        raise ValueError(f"config.json has sample_size={side}, so latents would have {grid**2:,} tokens: correct it")
    return state | {"pos_embed": sincos_2d(width, grid)}


# ---- under our names ------------------------------------------------------------------------------------------------


def drop_tables(state: dict[str, Tensor], network: Mapping[str, Any]) -> None:
    """Drops LightningDiT's tables of the angles that ours compute; raises ValueError for other angles, or none."""
    side, head_dim = network["input_size"] // network["patch_size"], network["hidden_size"] // network["num_heads"]
    angles = rotary_angles(torch.arange(side**2).unsqueeze(0), side, head_dim)[0, :, 0].repeat_interleave(2, dim=-1)
    for key, ours in (("feat_rope.freqs_cos", angles.cos()), ("feat_rope.freqs_sin", angles.sin())):
        theirs = state.pop(key, torch.empty(0))
        if theirs.shape != ours.shape or (theirs - ours).abs().max() > 0.01:  # float16 or bfloat16
            raise ValueError(f"it lacks feat_rope, or has it for other angles than {network['num_heads']} heads and "
                             f"{side} x {side} tokens have in LightningDiT: set num_heads=, if it has another number")


def reverse_time(state: dict[str, Tensor]) -> None:
    """Converts velocity x - eps with data at t = 1 to eps - x with noise at t = 1: net(z, t) becomes -net(z, 1 - t).

    The embedding of 1 - t is the embedding of t, rotated by each frequency w: cos(w - tw) = cos w cos tw + sin w sin tw
    and sin(w - tw) = sin w cos tw - cos w sin tw. The rotation goes into the weights that read the embedding. Time's
    direction and the velocity's sign are changed only here.
    """
    on_cos, on_sin = state["t_embedder.mlp.0.weight"].double().chunk(2, dim=1)
    w = timestep_frequencies(on_cos.shape[1]).double()
    turned = [on_cos * w.cos() + on_sin * w.sin(), on_cos * w.sin() - on_sin * w.cos()]
    state["t_embedder.mlp.0.weight"] = torch.cat(turned, dim=1).float()
    for key in LAST_LAYER:
        state[key] = -state[key]


# ---- importing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Foreign:
    """A network of ours that predicts what one of another code base does, and what is known about it."""

    form: Format
    state: dict[str, Tensor]
    network: dict[str, Any]         # its keywords
    weights: str                    # its key in the file; "" for one without
    others: list[str]               # keys of the networks beside it
    dropped: list[str]              # what lies beside it
    data: dict[str, Any]            # the record of its latents
    missing: dict[str, str]         # settings that must be typed first, and why

    def describe(self, name: FormatName) -> str:
        """Writes how the network was read, for people."""
        no_label = "" if self.network.get("null_label", True) else " and no null label"
        return ", ".join([
            (f"weights={self.weights}" if self.weights else "its only weights")
            + (f" (not {' and '.join(self.others)})" if self.others else ""),
            f"read as {name} ({self.form.meaning})", f"{self.network['num_heads']} heads",
            f"{self.network['num_classes']} classes{no_label}", f"decoded by {self.data['autoencoder']}",
            *(f"without {part}" for part in self.dropped)])


def read(
    file: Path, content: Any, name: FormatName, *, weights: str | None = None, num_heads: int | None = None,
    num_classes: int | None = None, autoencoder: str | None = None,
) -> Foreign:
    """Reads a network from the content of a file in the format of this name.

    Where a setting is missing, it reads the rest with another value. Raises ValueError for tensors and settings that
    are not the format's.
    """
    form, networks, found = FORMATS[name], networks_in(content), defaultdict[Any, list[Any]](list)
    chosen, why = choose(networks, content, form.pair, weights)
    missing = {"weights": why} if why else {}
    if (name == "diffusers") != any(key.startswith("transformer_blocks.") for key in networks[chosen]):
        raise ValueError(OTHER_NAMES)
    configs = diffusers_configs(file) if name == "diffusers" else []
    for key, value in entries([content, *configs]):
        found[key].append(value)
    check_settings(found, form)

    state = {key: value for key, value in networks[chosen].items() if not BESIDE.match(key)}
    dropped = sorted({key.partition(".")[0] for key in networks[chosen] if key not in state})
    statistics = [state.pop(key).double() for key in OF_LATENTS] if {*OF_LATENTS} <= state.keys() else []
    if name == "diffusers":
        state, num_heads = from_diffusers(state, *found["sample_size"]), num_heads or found["num_attention_heads"][0]
    for key in ("feat_rope.freqs_cos", "blocks.0.attn.q_norm.weight"):     # with the channels of a head
        if not num_heads and key in state:
            num_heads = len(state["x_embedder.proj.weight"]) // state[key].shape[-1]

    rows = len(state.get("y_embedder.embedding_table.weight", ()))
    counts = [num_classes] if num_classes else [
        count for key in ("num_classes", "num_embeds_ada_norm") for count in found[key] if isinstance(count, int)]
    if odd := [count for count in counts if rows and rows not in (count, count + 1)]:
        raise ValueError(f"num_classes={odd[0]} does not fit its label table of {rows} rows: set num_classes={rows} if "
                         f"each row is a class, or num_classes={rows - 1} if the last one is the null label")
    network = infer_architecture(state, num_heads, next(iter(counts), None))
    channels, outputs = network["in_channels"], 1 + network["learn_sigma"]
    if network["block"] not in form.blocks or outputs not in form.outputs:
        raise ValueError(f"it has the blocks of {network['block']}, and {outputs} output channels for each of its "
                         f"{channels}, unlike this format")
    if network["num_heads"] is None:
        missing["num_heads"] = (f"a DiT of width {network['hidden_size']} and depth {network['depth']} is none of the "
                                f"published sizes, so its number of heads cannot be inferred: set num_heads=")
    elif name == "lightningdit":
        drop_tables(state, network)
    if network["num_heads"] or network["block"] in ("dit", "lightning"):    # whose shapes do not depend on the heads
        fit(state, {**network, "num_heads": network["num_heads"] or 1}, "it")
    if form.backwards:
        reverse_time(state)
        if network["learn_sigma"]:  # SiT ignores the second of two halves
            network["learn_sigma"], dropped = False, [*dropped, "the second half of the last layer"]
            for key in LAST_LAYER:
                state[key] = state[key].unflatten(0, (-1, 2 * channels))[:, :channels].flatten(0, 1)

    pipeline = file.parent.parent if len(configs) > 1 else None
    if form.autoencoder and channels == 4 and not statistics:
        autoencoder = autoencoder or (str(pipeline / "vae") if pipeline else
                                      "sd_vae_mse" if found["vae"] == ["mse"] else form.autoencoder)
    if not autoencoder:
        autoencoder, missing["autoencoder"] = "none", (
            f"its latents of {channels} channels may be any autoencoder's: set autoencoder= to what decodes them "
            f"(docs/data.md), or to none")
    convention = own_convention(autoencoder) or Convention()
    if statistics:
        mean, variance = statistics
        convention = Convention(latents_mean=tuple(mean.tolist()), latents_std=tuple(variance.sqrt().tolist()))
    convention.require(channels, f"autoencoder={autoencoder}")
    labels = found["id2label"][0] if pipeline and found["id2label"] else None
    names = [str(labels.get(str(i), i)) for i in range(network["num_classes"])] if labels else None
    data = {"autoencoder": autoencoder, "convention": convention.record(), "class_names": None, "display_names": names,
            "classes": None}
    return Foreign(form, state, network, chosen, [key for key in networks if key != chosen], dropped, data, missing)


def how_to_import(source: Path) -> str:
    """Writes the command that imports a file or folder of other code, or why it cannot be imported."""
    out = Path("weights", re.sub(r"[^\w.-]+", "-", source.resolve().stem).lower())
    try:
        file = find_file(source)
        with as_recorded(file):
            content = read_tensors(file)
            fitting, reasons = [], {}
            for name, form in FORMATS.items():
                try:
                    missing = read(file, content, name).missing
                    needed = [*missing, *([] if form.diffusion else ["diffusion"])]
                    words = [f"format={name}", *(f"{setting}={TO_TYPE[setting]}" for setting in needed)]
                    fitting.append(f"{' '.join(words)} ({form.meaning})")
                except ValueError as error:
                    reasons[name] = error
            if not fitting:
                raise reasons["diffusers" if str(reasons["sit"]) == OTHER_NAMES else "sit"]
    except ValueError as error:
        return f"{source} holds no checkpoint yet, and nothing to import: {str(error).rstrip('.')}."
    which = fitting[0] if len(fitting) == 1 else f"and one of {'; '.join(fitting)}"
    return (f"{source} is not a checkpoint of this project. Import it once: {COMMAND} {typed('source', file)} "
            f"{typed('out', out)} {which}. Then name {out}.")
