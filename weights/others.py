"""Other code bases' weights: which family a file belongs to, and its tensors under our names."""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dit import timestep_frequencies


@dataclass(frozen=True)
class Family:
    """The code base of weights without a record, which decides how their network's output is read."""

    diffusion: str              # ours that it becomes
    meaning: str                # for people
    backwards: bool = False     # time runs from noise at 0 to data at 1, and v = x - eps


FAMILIES = {
    "edm": Family("edm", "weights of this project, diffusion=edm"),
    "ddpm": Family("ddpm", "as dit"),
    "rf": Family("rf", "weights of this project, diffusion=rf, or any velocity eps - x with noise at t = 1"),
    "rf_clean": Family("rf_clean", "weights of this project, diffusion=rf_clean"),
    "dit": Family("ddpm", "facebookresearch/DiT and its kin, noise predicted at 1000 steps"),
    "sit": Family("rf", "willisma/SiT, a velocity with data at t = 1", backwards=True),
    "repa": Family("rf", "sihyun-yu/REPA and its kin, a velocity with noise at t = 1"),
    "lightning": Family("rf", "hustvl/LightningDiT, a velocity with data at t = 1", backwards=True),
    "tread": Family("edm", "CompVis/tread"),
}


def detect_family(keys: Iterable[str], around: Mapping, preconditioned: bool) -> str | None:
    """Returns the family that a weights file shows, or None; `around` is the .pt in which the state dict was.

    `preconditioned` says that the keys had the prefix of EDM's preconditioner. Raises ValueError for a path other
    than straight lines, or a prediction other than velocity.
    """
    args, config = around.get("args"), around.get("config")
    args = vars(args) if isinstance(args, argparse.Namespace) else {}
    transport = config.get("transport") if isinstance(config, dict) else args
    for key, known in (("path_type", ("linear",)), ("prediction", ("velocity", "v"))):
        value = transport.get(key) if isinstance(transport, Mapping) else None
        if value is not None and str(value).lower() not in known:
            raise ValueError(f"these weights were trained with {key}={value}, and only {known[0]} is read.")
    if any(key.startswith(("projectors.", "decoder_blocks.")) for key in keys):
        return "repa"
    if any(key.startswith("feat_rope.") for key in keys):
        return "lightning"
    if preconditioned and {"ema_state_dict", "model_state_dict"} & around.keys():
        return "tread"
    # The arguments of a train.py: SiT's and DiT's differ in the name of the model and in these.
    has_path, model = {"path_type", "prediction"} <= args.keys(), str(args.get("model"))
    if has_path and model.startswith("SiT-"):
        return "repa" if "encoder_depth" in args else "sit"
    return "dit" if model.startswith("DiT-") and not has_path and "image_size" in args else None


def plain_keys(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames a code base's keys to ours, without LightningDiT's tables of angles and REPA's projectors.

    REPA's older files number the blocks from `encoder_depth` on anew. Raises ValueError where the blocks before them
    are missing, or tensors of diffusers' form.
    """
    state = {key: value for key, value in state.items() if not key.startswith(("feat_rope.", "projectors."))}
    if any(key.startswith("decoder_blocks.") for key in state):
        encoder_depth = 1 + max((int(key.split(".")[1]) for key in state if key.startswith("blocks.")), default=-1)
        if encoder_depth == 0:
            raise ValueError("it holds REPA's decoder_blocks and none of the blocks before them, so that its encoder "
                             "depth is not known: take the file as REPA saved it.")
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


def to_diffusers(state: Mapping[str, Tensor], depth: int) -> dict[str, Tensor]:
    """Renames the tensors of a DiT to diffusers' names; no number changes."""
    renamed = {}
    for ours, theirs in diffusers_names(depth).items():
        parts = state[ours].chunk(3) if ".qkv." in ours else [state[ours]] * len(theirs)
        renamed |= dict(zip(theirs, parts, strict=True))
    return renamed


def from_diffusers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undoes `to_diffusers`; raises ValueError where a tensor is missing, as others' position embedding."""
    depth = 1 + max(int(key.split(".")[1]) for key in state if key.startswith("transformer_blocks."))
    names = diffusers_names(depth)
    if lacking := [name for theirs in names.values() for name in theirs if name not in state]:
        raise ValueError(f"it has the names of diffusers' DiT, but {lacking[0]} is not among them: only what "
                         f"scripts/export.py wrote is read.")
    return {ours: torch.cat([state[name] for name in theirs]) if ".qkv." in ours else state[theirs[0]]
            for ours, theirs in names.items()}


def onto_our_time(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rewrites a network of velocity x - eps with data at t = 1 to one of eps - x with noise at t = 1: -net(z, 1 - t).

    The embedding of 1 - t is that of t turned by each frequency w: cos(w - tw) = cos w cos tw + sin w sin tw and
    sin(w - tw) = sin w cos tw - cos w sin tw, which goes into the weights that read it. This is the one place where
    time's direction and the velocity's sign are changed.
    """
    state = dict(state)
    on_cos, on_sin = state["t_embedder.mlp.0.weight"].double().chunk(2, dim=1)
    w = timestep_frequencies(on_cos.shape[1]).double()
    turned = [on_cos * w.cos() + on_sin * w.sin(), on_cos * w.sin() - on_sin * w.cos()]
    state["t_embedder.mlp.0.weight"] = torch.cat(turned, dim=1).float()
    for key in ("final_layer.linear.weight", "final_layer.linear.bias"):
        state[key] = -state[key]
    return state


def without_variances(state: Mapping[str, Tensor], in_channels: int) -> dict[str, Tensor]:
    """Takes out of the last layer the second half of 2C channels, which SiT learns nothing with and drops."""
    state = dict(state)
    for key in ("final_layer.linear.weight", "final_layer.linear.bias"):
        state[key] = state[key].unflatten(0, (-1, 2 * in_channels))[:, :in_channels].flatten(0, 1).contiguous()
    return state


def as_ours(state: Mapping[str, Tensor], network: dict, family: Family) -> tuple[dict[str, Tensor], dict]:
    """Rewrites a family's weights, under our keys already, for an ordinary network; returns its keywords, too."""
    if family.backwards:
        state = onto_our_time(state)
        if network["learn_sigma"]:
            state, network = without_variances(state, network["in_channels"]), {**network, "learn_sigma": False}
    return dict(state), network


def unknown_family(file: Path, network: dict) -> str:
    """Returns a sentence that asks for the family of a file and lists those that fit."""
    if network["block"] == "dit":
        fitting = ("dit", "sit") if network["learn_sigma"] else ("edm", "rf", "tread", "sit", "repa")
    else:
        fitting = ("lightning", "rf", "edm") if network["block"] == "lightning" else ("edm", "rf")
    choices = "; ".join(f"{name} ({FAMILIES[name].meaning})" for name in fitting)
    return (f"{file} carries no record, and weights of these shapes mean different things in different code: say whose "
            f"they are with diffusion_name=, one of {choices}. Look at where the file was downloaded or at the "
            f"train.py that wrote it; docs/interop.md has a table.")
