"""A plain record, a checkpoint or anybody's weights -> network, diffusion, sampler settings, guidance."""

import argparse
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from autoencoder import Convention, require_unpacked
from dit import DiT, infer_architecture
from edm import EDM
from rf import RF
from runtime import files, ranks
from runtime.schema import (
    first_line,
    read_record,
)
from weights import checkpoint as checkpoints
from weights import lora as adapters
from weights.others import FAMILIES, as_ours, ask_family, plain_keys, told_family
from weights.records import CheckpointRecord, DataRecord, ParentRecord, build_diffusion, build_network

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
        return self.recorded_sha256 or files.sha256(self.file)

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
    if files.sha256(base) != parent.weights_sha256:
        raise ValueError(f"{folder} holds an adapter (LoRA) alone, and its base {base} is not the file that it was "
                         f"trained on: its SHA-256 differs. Put that file back.")
    return load_parent(base, meta.network, parent.diffusion_name or meta.diffusion.get("name"))


def load_parent(path: Path, network: dict, diffusion: str | None) -> Trained:
    """Loads what a run of `network` starts from; `diffusion` says whose weights those without a record are."""
    if find_weights(path, "ema")[1] is not None:
        return load_trained(path)
    return load_trained(path, diffusion=diffusion, num_heads=network["num_heads"])
