"""A plain record, a checkpoint or anybody's weights -> network, diffusion, sampler settings, guidance."""

import argparse
import inspect
import math
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from accelerate import PartialState
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

import adapter as adapters
import checkpoint as checkpoints
import ranks
from autoencoder import Convention, require_unpacked
from blocks import BLOCKS
from dit import DiT, infer_architecture, timestep_frequencies
from edm import DDPM, EDM
from guidance import Guidance
from rf import RF
from routing_module import Route, Router
from settings import (
    Classes,
    Depth,
    Location,
    NotNegative,
    Number,
    Record,
    Settings,
    Share,
    Size,
    Whole,
    first_line,
    one_of,
    read,
    read_record,
)

DIFFUSIONS = {"edm": EDM, "ddpm": DDPM, "rf": RF}
ROUTER_DEFAULTS = asdict(Router())      # what a record without them means


Level = Annotated[float, Field(ge=1e-6, le=1e6)]      # a noise level: squares and roots of it stay in float32

# ---- records -> network, diffusion ----------------------------------------------------------------------------------


class RouteSettings(Settings):
    """One of `routes`, as a config and a checkpoint's record have it."""

    start_layer_idx: int
    end_layer_idx: int
    selection_ratio: Annotated[float, Field(ge=0, lt=1)]
    x_T: Number = 0.0
    x_D_last: Number = 1.0


class NetworkRecord(Settings):
    """The keywords of a DiT, as a checkpoint records them; the last nine have not always been there.

    The last three are the router's, and are left out where tokens are chosen at random.
    """

    input_size: Size
    patch_size: Size
    in_channels: Size
    hidden_size: Size
    depth: Depth
    num_heads: Size
    num_classes: Classes
    mlp_ratio: Annotated[float, Field(gt=0, le=100)] = 4.0
    learn_sigma: bool = False
    init: Literal["adaln_zero", "xavier"] = "adaln_zero"
    routes: list[RouteSettings] = []
    block: one_of(BLOCKS) = "dit"
    qk_norm: bool = False
    selection: Literal["random", "l1"] = "random"
    l1_reg: Share = 0.5
    inverse: bool = False


class EDMRecord(Settings):
    name: Literal["edm"]
    P_mean: Annotated[float, Field(ge=-20, le=20)] = -1.2
    P_std: Annotated[float, Field(ge=0, le=20)] = 1.2
    sigma_data: Level = 0.5


class DDPMRecord(Settings):
    name: Literal["ddpm"]
    num_timesteps: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    beta_min: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    beta_max: Annotated[float, Field(gt=0, lt=1)] = 0.02


class RFRecord(Settings):
    name: Literal["rf"]
    timestep_sampling: Literal["logit_normal", "uniform"] = "logit_normal"
    cosine_weight: NotNegative = 0.0


DIFFUSION_RECORDS = {"edm": EDMRecord, "ddpm": DDPMRecord, "rf": RFRecord}


class DataRecord(Record):
    autoencoder: str
    class_names: list[str] | None
    display_names: list[str] | None = None
    convention: dict | None = None      # how its latents were made; of the first versions' runs as the autoencoder's
    classes: Annotated[list[Whole], Field(min_length=1)] | None = None      # that have images; None: all


class ParentRecord(Record):
    """Which weights a run began with."""

    step: Whole | None = None
    weights_sha256: str | None = None
    diffusion_name: str | None = None


class CheckpointRecord(Record):
    """What meta.json must say for a checkpoint to be sampled."""

    network: dict
    diffusion: dict
    data: DataRecord
    step: Whole | None
    parent: ParentRecord | None = None
    lora: adapters.LoRARecord | None = None      # of a checkpoint that holds an adapter alone
    weights: str | None = None                   # of an export, which they are; a checkpoint's file has it as its name
    published: dict | None = None                # fid.Published: the scores that the run's experiment is to reach


def build_network(network: dict) -> DiT:
    """Builds a DiT from plain keywords, `routes` a list of dicts; raises ValueError for keywords that make none."""
    keywords = read(NetworkRecord, network, "A network's record: ").model_dump()
    router = Router(**{key: keywords.pop(key) for key in ROUTER_DEFAULTS})
    return DiT(**{**keywords, "routes": [Route(**route) for route in keywords["routes"]]}, router=router)


def with_objective(diffusion: dict, objective: dict) -> tuple[dict, dict]:
    """Separates what was minimised from a diffusion that names it, as version 1's loss once was a part of EDM.

    Raises ValueError for a weight of a term that the loss does not have.
    """
    if diffusion.get("name") != "edm":
        return diffusion, objective
    kept, mae_weight = diffusion.get("routed_loss", "all"), diffusion.get("mae_weight", 0.0)
    if kept not in ("all", "kept") or (kept == "all" and mae_weight):
        raise ValueError(f"diffusion.routed_loss={kept} diffusion.mae_weight={mae_weight}: routed_loss is all or kept, "
                         f"and kept alone has the term that mae_weight weighs. Set objective=version1.")
    diffusion = {key: value for key, value in diffusion.items() if key not in ("routed_loss", "mae_weight")}
    return diffusion, {"version1": {"mae_weight": mae_weight}, **objective} if kept == "kept" else objective


def build_diffusion(diffusion: dict) -> EDM | RF:
    """Builds a diffusion from its name and keywords; raises ValueError for those that make none."""
    diffusion, _ = with_objective(diffusion, {})      # of a record
    name = diffusion.get("name")
    if name not in [*DIFFUSIONS]:      # which may be a list, say
        raise ValueError(f"There is no diffusion {name!r}; choose one of {', '.join(DIFFUSIONS)}.")
    keywords = read(DIFFUSION_RECORDS[name], diffusion, f"diffusion={name}: ").model_dump(exclude={"name"})
    return DIFFUSIONS[name](**keywords)


# ---- others' weights -> ours ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Whose weights a file without a record holds, which says how its network's answer is to be read."""

    diffusion: str              # which of ours it becomes
    says: str                   # how to know it, for people
    backwards: bool = False     # time runs from noise at 0 to data at 1, and v = x - eps


FAMILIES = {
    "edm": Family("edm", "weights of this project, diffusion=edm"),
    "ddpm": Family("ddpm", "as dit"),
    "rf": Family("rf", "weights of this project, diffusion=rf, or any velocity eps - x with noise at t = 1"),
    "dit": Family("ddpm", "facebookresearch/DiT and its kin, noise predicted at 1000 steps"),
    "sit": Family("rf", "willisma/SiT, a velocity with data at t = 1", backwards=True),
    "repa": Family("rf", "sihyun-yu/REPA and its kin, a velocity with noise at t = 1"),
    "lightning": Family("rf", "hustvl/LightningDiT, a velocity with data at t = 1", backwards=True),
    "tread": Family("edm", "CompVis/tread"),
}


def told_family(keys: Iterable[str], beside: Mapping, preconditioned: bool) -> str | None:
    """Names the family that a weights file tells by itself, or None; `beside` is what a .pt holds beside its weights.

    `preconditioned` says that the keys stood under EDM's preconditioner. Raises ValueError for a model of another
    path or prediction than straight lines and velocity.
    """
    args, config = beside.get("args"), beside.get("config")
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
    if preconditioned and {"ema_state_dict", "model_state_dict"} & beside.keys():
        return "tread"
    # The arguments of a train.py: SiT's and DiT's differ in the name of the model and in these.
    has_path, model = {"path_type", "prediction"} <= args.keys(), str(args.get("model"))
    if has_path and model.startswith("SiT-"):
        return "repa" if "encoder_depth" in args else "sit"
    return "dit" if model.startswith("DiT-") and not has_path and "image_size" in args else None


def plain_keys(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames a code base's keys to ours, and leaves out what is not needed to draw.

    That is LightningDiT's tables of angles, which its blocks compute here, and REPA's projectors; REPA's older files
    number the blocks from `encoder_depth` on anew. Raises ValueError where the first of those are missing, or tensors
    of diffusers' form.
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
    """Names the tensors of diffusers' DiT that hold each of ours: one, the thirds of a qkv, or a copy in each block."""
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
    """Renames the tensors of a DiT, without change to a number, as diffusers has them."""
    renamed = {}
    for ours, theirs in diffusers_names(depth).items():
        parts = state[ours].chunk(3) if ".qkv." in ours else [state[ours]] * len(theirs)
        renamed |= dict(zip(theirs, parts, strict=True))
    return renamed


def from_diffusers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Takes back `to_diffusers`; raises ValueError where a tensor is missing, as the position embedding of others."""
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
    """Makes a family's weights, in our keys already, those of an ordinary network of ours; returns its keywords too."""
    if family.backwards:
        state = onto_our_time(state)
        if network["learn_sigma"]:
            state, network = without_variances(state, network["in_channels"]), {**network, "learn_sigma": False}
    return dict(state), network


def ask_family(file: Path, network: dict) -> str:
    """Says that the file does not tell whose it is, and how to know."""
    if network["block"] == "dit":
        fitting = ("dit", "sit") if network["learn_sigma"] else ("edm", "rf", "tread", "sit", "repa")
    else:
        fitting = ("lightning", "rf", "edm") if network["block"] == "lightning" else ("edm", "rf")
    choices = "; ".join(f"{name} ({FAMILIES[name].says})" for name in fitting)
    return (f"{file} carries no record, and weights of these shapes mean different things in different code: say whose "
            f"they are with diffusion_name=, one of {choices}. Look at where the file was downloaded or at the "
            f"train.py that wrote it; docs/interop.md has a table.")


# ---- files -> network -----------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """What is needed to draw with a network: the network itself and what its checkpoint says about it."""

    net: DiT
    diffusion: EDM | RF
    autoencoder: str
    convention: Convention | None        # by which its latents were made; None: the autoencoder's own
    class_names: list[str] | None
    display_names: list[str] | None      # of the classes, for people
    classes: list[int]                   # that it had images of
    step: int | None
    weights: str             # ema | model: which weights these are; file: a state dict that does not say
    folder: Path | None      # the checkpoint folder, None for a bare weights file
    file: Path               # of the weights
    recorded: dict           # `network` and `diffusion` as plain keywords, and `published` where there is any
    inferred: str | None     # what was read off the weights for want of a record, as a sentence
    family: str | None       # whose weights those without a record were taken for, a name of FAMILIES
    recorded_sha256: str | None      # of the file, by which it was checked; None where no record says it

    @property
    def weights_sha256(self) -> str:
        """The file's hash, which is known though training may have pruned the file by now."""
        return self.recorded_sha256 or checkpoints.sha256(self.file)

    @property
    def run_folder(self) -> Path | None:
        """The run that the checkpoint is of; None for weights, or a folder, that lie alone."""
        folder = self.folder
        return folder.parent.parent if folder is not None and folder.parent.name == "checkpoints" else None


WEIGHT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Under these keys a published .pt keeps its average, or else the trained weights.
STATE_KEYS = {"ema": ("ema", "ema_state_dict"), "model": ("model", "model_state_dict", "state_dict")}


def read_weights(path: Path, weights: str | None = None) -> tuple[dict[str, Tensor], str, str | None]:
    """Reads a state dict from .safetensors, or from a .pt as published, of which only tensors are ever unpickled.

    Of a training checkpoint that holds several, `weights` says which: ema, model, or None, the average if there is one.
    Returns it in our keys, without the prefixes of wrappers; which it is: ema, model, or file where the file does not
    say; and the family that it tells by itself, or None.
    Raises ValueError for a file that is none, that lacks what was asked for, or whose values are not finite.
    """
    which, beside = "file", {}
    if path.suffix == ".safetensors":
        try:
            state = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is no whole safetensors file: {error}.") from error
    else:
        try:
            # DiT's train.py stores its argparse.Namespace beside the weights: a bag of plain values, safe to build.
            require_unpacked(path)
            with torch.serialization.safe_globals([argparse.Namespace]):
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except Exception as error:
            raise ValueError(
                f"{path} cannot be read as weights alone ({first_line(error)}). Only tensors are loaded, "
                f"since unpickling anything else could run code; save its state dict as .safetensors."
            ) from error
        held = {key: name for name, keys in STATE_KEYS.items() for key in keys
                if isinstance(state, dict) and isinstance(state.get(key), dict)}
        wanted = [key for key, name in held.items() if weights in (None, name)]
        if held and not wanted:
            raise ValueError(f"{path} holds {', '.join(held)}, and no weights={weights}.")
        if held:
            state, which, beside = state[wanted[0]], held[wanted[0]], state
    if not isinstance(state, dict) or not all(isinstance(key, str) and isinstance(value, Tensor)
                                              for key, value in state.items()):
        raise ValueError(f"{path} holds no state dict, that is, no dictionary of tensors by name.")
    foreign = [key for key, value in state.items() if value.dtype not in WEIGHT_TYPES
               or value.layout is not torch.strided or value.is_meta
               or value.numel() * value.element_size() > value.untyped_storage().nbytes()]      # one, for terabytes
    if foreign:
        value = state[foreign[0]]
        raise ValueError(f"{path} holds {foreign[0]} as {value.dtype}, {value.layout}, on {value.device}, of shape "
                         f"{tuple(value.shape)}: weights are plain floating-point numbers in memory, each by itself. "
                         f"Save its state dict so.")
    damaged = [key for key, value in state.items() if not value.isfinite().all()]
    if damaged:
        raise ValueError(f"{path} holds values that are not finite in {len(damaged)} of {len(state)} tensors, "
                         f"{damaged[0]} first: its training has diverged. Choose an earlier checkpoint.")
    # DDP, torch.compile and EDM's preconditioner each put their own word before every key.
    for prefix in ("module.", "_orig_mod.", "model."):
        bare = {key.removeprefix(prefix): value for key, value in state.items()}
        preconditioned, state = prefix == "model." and bare.keys() != state.keys(), bare
    try:
        return plain_keys(state), which, told_family(state, beside, preconditioned)
    except ValueError as error:
        raise ValueError(f"{path} is not read: {error}") from None


EXPORTED = ("weights.safetensors", "transformer/diffusion_pytorch_model.safetensors")      # of scripts/export.py


def latest_checkpoint(run: Path, names: tuple[str, ...] | None = None) -> Path | None:
    """Finds a run's latest whole checkpoint on the main rank, for all; None where it has none.

    A run that still trains may save another meanwhile. Raises ValueError where a rank does not see the one found.
    """
    state = PartialState()
    found = checkpoints.latest(run, names) if state.is_main_process else None
    step = ranks.main_rank_says(state, -1 if found is None else checkpoints.step_of(found))
    if step < 0:
        return None
    folder = checkpoints.step_folder(run, step)
    if not folder.is_dir():
        raise ValueError(f"Rank {state.process_index} does not see {folder}, which the main rank found: {run} must lie "
                         f"on a disk that all nodes share. Set run_dir or checkpoint.")
    return folder


def is_run(path: Path) -> bool:
    """Tells a run, of which the latest checkpoint is meant, from a checkpoint or weights that are named themselves."""
    return (path / "checkpoints").is_dir() and not (path / "meta.json").is_file()


def settled(path: str, weights: str = "ema") -> str:
    """Names the latest checkpoint of the run at `path`, so that all that follows reads the same; else returns `path`.

    Raises ValueError where the run has none that is whole.
    """
    if not is_run(Path(path)):
        return path
    folder = latest_checkpoint(Path(path), (weights,))
    if folder is None:
        raise ValueError(f"The run {path} holds no whole checkpoint yet; let it train until its first save.")
    return str(folder)


def find_weights(path: Path, weights: str) -> tuple[Path, Path | None]:
    """Finds the weights file that `path` names, and its checkpoint folder or None; raises ValueError for none."""
    path = Path(settled(str(path), weights))
    if path.is_file():
        return path, path.parent if (path.parent / "meta.json").is_file() else None
    if (path / "meta.json").is_file():
        exported = (path / name for name in EXPORTED)
        return next((file for file in exported if file.is_file()), path / f"{weights}.safetensors"), path
    if path.parent.name == "checkpoints" and path.name.startswith("step-"):
        raise ValueError(f"There is no checkpoint {path}. Training deletes all but the newest checkpoint.keep_last and "
                         f"those of checkpoint.keep_every: name another one, or the run.")
    raise ValueError(f"There is no run, checkpoint folder or weights file at {path}. "
                     f"Set checkpoint=runs/<name>, runs/<name>/checkpoints/step-…, or a .safetensors or .pt file.")


def load_trained(
    path: str | Path,                       # a run, a checkpoint folder or a weights file
    weights: str | None = None,             # ema | model; None: the average, or what the file holds
    diffusion: str | None = None,           # of weights without a record, FAMILIES' name
    autoencoder: str | None = None,         # overrules what is recorded
    device: torch.device | str = "cpu",
    num_heads: int | None = None,           # of a bare weights file, which does not tell
) -> Trained:
    """Loads a network and what its checkpoint says about it.

    A weights file beside its meta.json is built as that says; an adapter (LoRA) is merged into its base. Without a
    meta.json the architecture is read off the shapes, and `diffusion` says whose the weights are where the file does
    not tell: they become those of an ordinary network of ours.
    Where there are several ranks, all of them call it for a run, as its latest checkpoint is the main rank's.
    Raises ValueError where there is no such path, no whole checkpoint, weights that are not a DiT's, or of whom nobody
    says whose they are.
    """
    path = Path(path)
    while True:
        file, folder = find_weights(path, weights or "ema")
        trained = None
        try:
            trained = read_trained(path, file, folder, weights, diffusion, autoencoder, device, num_heads)
        except (OSError, ValueError):
            if not is_run(path) or folder.is_dir():
                raise      # else training has pruned it meanwhile, and saved a newer one
        if not is_run(path) or ranks.all_ranks_say(PartialState(), trained is not None):
            return trained


def read_trained(
    path: Path, file: Path, folder: Path | None, weights: str | None, diffusion: str | None, autoencoder: str | None,
    device: torch.device | str, num_heads: int | None,
) -> Trained:
    """Reads for `load_trained`, which says what may be wrong, the weights `file` of the checkpoint `folder`, if any."""
    recorded_sha256 = None
    if folder is not None:
        if why := checkpoints.problem(folder, (file.stem,)):
            raise ValueError(f"The checkpoint {folder} is damaged: {why}. Choose another of its run.")
        recorded_sha256 = checkpoints.read_meta(folder)["files"].get(str(file.relative_to(folder)), {}).get("sha256")
        if path.is_file() and weights not in (None, file.stem):
            raise ValueError(f"checkpoint={path} is the file of weights={file.stem}, not of weights={weights}.")
        if num_heads is not None:
            raise ValueError(f"num_heads={num_heads} is for weights without a record; {folder} has one.")
    state, which, family = read_weights(file, weights)
    inferred = None
    if folder is not None:
        meta = read_record(CheckpointRecord, folder / "meta.json",
                           "It describes no checkpoint of ours; move the weights elsewhere.")
        network, recorded, data, step, which = meta.network, meta.diffusion, meta.data, meta.step, file.stem
        if diffusion not in (None, recorded.get("name")):
            raise ValueError(f"diffusion_name={diffusion} is for weights without a record; {folder} records "
                             f"{recorded.get('name')}: leave it out.")
        if meta.weights is not None:
            which = meta.weights
            if weights not in (None, which):
                raise ValueError(f"{folder} holds weights={which} alone, not weights={weights}.")
        if meta.lora is not None:
            base = load_base(meta, folder).net.state_dict()
            state = adapters.merge(base, state, meta.lora.alpha / meta.lora.rank)
        check_fit(state, network, path)
    else:
        network, step, family = infer_architecture(state, num_heads), None, diffusion or family
        check_fit(state, network, path)
        if family not in FAMILIES:
            raise ValueError(ask_family(file, network))
        state, network = as_ours(state, network, FAMILIES[family])
        recorded = {"name": FAMILIES[family].diffusion}
        data = DataRecord(autoencoder="identity" if network["in_channels"] == 3 else "sd_vae_ema", class_names=None)
        inferred = (f"{file} carries no record: taken as {family} ({FAMILIES[family].says}), {network['num_heads']} "
                    f"heads, decoded by {autoencoder or data.autoencoder}. Otherwise set diffusion_name=, num_heads=, "
                    f"autoencoder=.")
    with torch.device("meta"):
        net = build_network(network)
    net.load_state_dict(state, assign=True)
    return Trained(
        net=net.to(device).float().eval(),      # not frozen: autocast keeps its casts of trainable weights only
        diffusion=build_diffusion(recorded), autoencoder=autoencoder or data.autoencoder,
        convention=data.convention and Convention.read(data.convention),
        class_names=data.class_names, display_names=data.display_names or data.class_names,
        classes=data.classes or list(range(net.num_classes)),
        step=step, weights=which, folder=folder, file=file,
        recorded={"network": network, "diffusion": recorded,
                  **({"published": meta.published} if folder is not None and meta.published else {})},
        inferred=inferred, family=None if folder is not None else family, recorded_sha256=recorded_sha256,
    )


def check_fit(state: Mapping[str, Tensor], network: dict, path: Path) -> None:
    """Raises ValueError where the weights of the file at `path` are not those of a network of these keywords."""
    with torch.device("meta"):
        expected = build_network(network).state_dict()
    missing = [key for key, value in expected.items() if key not in state or state[key].shape != value.shape]
    unexpected = [key for key in state if key not in expected]
    if missing or unexpected:
        raise ValueError(
            f"The weights at {path} do not fit the network they should: {len(missing)} are missing or of another shape "
            f"({', '.join(missing[:3])} …), {len(unexpected)} are unknown ({', '.join(unexpected[:3])} …)."
        )


def load_base(meta: CheckpointRecord, folder: Path) -> Trained:
    """Loads the weights that the adapter in `folder` is for; raises ValueError where they are gone or are others."""
    base = Path(meta.lora.base)
    if not base.is_file():
        raise ValueError(f"{folder} holds an adapter (LoRA) alone, and its base {base} is not there: put it back, or "
                         f"run this where it is. scripts/merge_lora.py makes weights that need no base.")
    parent = meta.parent or ParentRecord()
    if checkpoints.sha256(base) != parent.weights_sha256:
        raise ValueError(f"{folder} holds an adapter (LoRA) alone, and its base {base} is not the file that it was "
                         f"trained on: its SHA-256 differs. Put that file back.")
    return load_parent(base, meta.network, parent.diffusion_name or meta.diffusion.get("name"))


def load_parent(path: Path, network: dict, diffusion: str | None) -> Trained:
    """Loads what a run of `network` starts from; `diffusion` says whose weights those without a record are."""
    if find_weights(path, "ema")[1] is not None:
        return load_trained(path)
    return load_trained(path, diffusion=diffusion, num_heads=network["num_heads"])


# ---- settings -> sampler, guidance ----------------------------------------------------------------------------------


class SamplerSettings(Settings):
    """A diffusion's sampler; null: its own value. EDM's are those of arXiv 2206.00364, Algorithm 2."""

    sigma_min: Level | None = None
    sigma_max: Level | None = None
    rho: Annotated[float, Field(ge=0.1, le=100)] | None = None
    S_churn: NotNegative | None = None
    S_min: NotNegative | None = None
    S_max: Annotated[float, Field(ge=0)] | None = None      # infinity is its usual value
    S_noise: NotNegative | None = None
    solver: Literal["euler", "heun", "euler_maruyama", "ancestral"] | None = None
    shift: Annotated[float, Field(ge=0.01, le=100)] | None = None


def sampler_settings(diffusion: EDM | RF, given: Mapping[str, float | str | None]) -> dict[str, float | str]:
    """Completes the settings of a diffusion's sampler, of which None is the sampler's own value.

    Raises ValueError for a setting or a solver that the sampler lacks, or noise levels in the wrong order.
    """
    def settings_of(sample: Callable) -> dict[str, float | str | None]:
        return {name: parameter.default for name, parameter in inspect.signature(sample).parameters.items()
                if name not in ("net", "noise", "y", "num_steps", "guidance", "randn_like")}

    own, sampler = settings_of(diffusion.sample), f"the sampler of {type(diffusion).__name__}"
    given = {name: value for name, value in given.items() if value is not None}
    if "solver" in own and hasattr(diffusion, f"sample_{given.get('solver')}"):      # one with settings of its own
        own = {"solver": None} | settings_of(getattr(diffusion, f"sample_{given['solver']}"))
        sampler += f" with solver={given['solver']}"
    for name, value in given.items():
        if name not in own:
            raise ValueError(f"sampler.{name}={value}: {sampler} has no such setting; it has {', '.join(own)}.")
    settings = {name: value for name, value in (own | given).items() if value is not None}
    if settings.get("sigma_min", 0) >= settings.get("sigma_max", math.inf):
        raise ValueError(f"sampler.sigma_min={settings['sigma_min']} is not below "
                         f"sampler.sigma_max={settings['sigma_max']}.")
    if settings.get("S_min", 0) > settings.get("S_max", math.inf):
        raise ValueError(f"sampler.S_min={settings['S_min']} is above sampler.S_max={settings['S_max']}: between them "
                         f"lie the noise levels that churn acts on.")
    return settings


def noise_levels(diffusion: EDM | RF, sampler: SamplerSettings | None) -> tuple[float, float]:
    """Returns the lowest and the highest noise level of a diffusion's sampler."""
    given = sampler_settings(diffusion, sampler.model_dump() if sampler else {})
    if "sigma_max" in given:
        return given["sigma_min"], given["sigma_max"]
    return (0.0, 1.0) if isinstance(diffusion, RF) else (diffusion.sigmas[0].item(), diffusion.sigmas[-1].item())


Ratio = Annotated[float, Field(ge=0, lt=1)]
Gamma = Ratio | Annotated[tuple[Ratio, Ratio], Field(strict=False)]      # a number, or first and last of a cosine
Pair = Annotated[tuple[Number, Annotated[float, Field(ge=0)]], Field(strict=False)]


class GuidanceRoute(Settings):
    """Where tokens leave and rejoin; their ratios are gamma1 and gamma2."""

    start_layer_idx: int
    end_layer_idx: int


class GuidanceSettings(Settings):
    """The keys of configs/guidance, which lie flat among a command's."""

    scale: Number | None
    gamma1: Gamma
    gamma2: Gamma
    drop_label: bool
    weak: Location | None
    interval: Pair | None
    routes: list[GuidanceRoute] | None
    channels: Size | None


def build_guidance(
    settings: GuidanceSettings, trained: Trained, device: torch.device | str = "cpu",
) -> tuple[Guidance | None, dict | None]:
    """Builds guidance from its settings, loading the weak network where there is one; None where `scale` is None.

    Returns it with its record: the settings, and which weights the weak network has. Raises ValueError, with the
    numbers and the knob, for settings that cannot work with `trained`.
    """
    if settings.scale is None:
        unguided = {"gamma1": 0, "gamma2": 0, "weak": None, "interval": None, "routes": None,
                    "channels": None}
        if changed := [key for key, value in unguided.items() if getattr(settings, key) != value]:
            raise ValueError(f"{', '.join(f'{key}={getattr(settings, key)}' for key in changed)} guides nothing "
                             f"without a scale: give scale=1.5, say, or none of these.")
        return None, None
    if settings.weak == "required":
        raise ValueError("This guidance needs weak=<an earlier or smaller checkpoint>, the network of its weak pass.")
    is_flow = trained.recorded["diffusion"]["name"] == "rf"
    if is_flow and settings.interval and 1 < settings.interval[1] < math.inf:
        raise ValueError(f"interval={list(settings.interval)} reaches past 1, but flow matching's noise levels t "
                         f"lie in [0, 1]. A sigma of EDM is t = sigma / (1 + sigma).")
    if settings.interval:
        low, high = noise_levels(trained.diffusion, getattr(settings, "sampler", None))
        if settings.interval[1] < low or settings.interval[0] > high:
            raise ValueError(f"interval={list(settings.interval)} guides at no noise level: the sampler's run from "
                             f"{high:g} to {low:g}. Choose some of these.")
    weak = None
    if settings.weak:      # one without a record is taken for what the strong one is
        has_record = find_weights(Path(settings.weak), "ema")[1] is not None
        name = None if has_record else trained.family or trained.recorded["diffusion"]["name"]
        weak = load_trained(settings.weak, diffusion=name, device=device)
    if weak is not None:
        strong_data, weak_data = (getattr(one.diffusion, "sigma_data", None) for one in (trained, weak))
        if type(weak.diffusion) is not type(trained.diffusion) or strong_data != weak_data:
            raise ValueError(f"weak={settings.weak} was trained with {type(weak.diffusion).__name__} "
                             f"(sigma_data {weak_data}) and the checkpoint with {type(trained.diffusion).__name__} "
                             f"(sigma_data {strong_data}): their predictions cannot be mixed.")
    routes = None if settings.routes is None else tuple(
        Route(route.start_layer_idx, route.end_layer_idx, 0.0) for route in settings.routes)
    guidance = Guidance(settings.scale, settings.gamma1, settings.gamma2, settings.drop_label, weak and weak.net,
                        settings.interval, routes, settings.channels)
    guidance.check(trained.net)
    source = weak and {"checkpoint": str(weak.folder or weak.file), "step": weak.step,
                       "weights_sha256": weak.weights_sha256}
    return guidance, {**guidance.record(), "weak": source}
