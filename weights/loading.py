"""Loads a run, a checkpoint or anybody's weights: a network, and all that sampling needs to know about it.

`find_checkpoint` finds the file and reads the record beside it, once; `load_trained` builds the network from them.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor

from autoencoder import Convention
from dit import DiT, infer_architecture
from edm import EDM
from rf import RF
from runtime import files, ranks
from runtime.schema import as_recorded, read_record
from weights import checkpoint as checkpoints
from weights.others import (
    FAMILIES,
    files_of,
    find_in_folder,
    pipeline_of,
    read_weights,
    to_our_diffusion,
    unknown_family,
    with_positions,
)
from weights.records import (
    CheckpointRecord,
    DataRecord,
    build_diffusion,
    build_network,
)

# ---- finding weights ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """The weights file that a path names, and the folder and the content of its meta.json.

    Weights without a record have neither. If there is a meta.json, the file has the hash that is recorded there.
    """

    file: Path
    folder: Path | None = None
    meta: dict | None = None

    @cached_property
    def record(self) -> CheckpointRecord | None:
        """What meta.json records about the weights; raises ValueError if it describes none."""
        if self.meta is None:
            return None
        record = read_record(CheckpointRecord, self.folder / "meta.json",
                             "It does not describe a checkpoint; move the weights elsewhere.", self.meta)
        return record.model_copy(update={"weights": self.file.stem})

    @cached_property
    def sha256(self) -> str:
        """The file's hash, even after training has pruned it; for shards, the hash of the list of their hashes."""
        recorded = self.meta and self.meta["files"].get(self.file.relative_to(self.folder).as_posix())
        if recorded:
            return recorded["sha256"]
        parts = [files.sha256(part) for part in files_of(self.file)]
        return parts[0] if len(parts) == 1 else files.record_sha256({"shards": parts})

    @property
    def run(self) -> Path | None:
        """The run that the checkpoint belongs to, if any."""
        return self.folder and checkpoints.run_of(self.folder)


def find_checkpoint(path: str | Path, weights: str | None = None) -> Checkpoint:
    """Finds the weights at a path: a run (its newest), a checkpoint, another trainer's folder, or a weights file.

    A checkpoint holds several networks, each in `<weights>.safetensors`: ema, the average (the default), other
    averages, and model. Reads the file to check its hash, and waits for no other rank. Raises ValueError if there are no such weights, or only damaged
    ones.
    """
    path, name, meta = Path(path), weights or "ema", None
    folder = path.parent if path.is_file() else path
    if not path.is_file() and (path / "checkpoints").is_dir() and not (path / "meta.json").is_file():
        if (newest := latest_checkpoint(path, (name,))) is None:
            raise ValueError(f"The run {path} has saved no checkpoint yet; wait for its first save.")
        folder, meta = newest
    elif not (folder / "meta.json").is_file():
        if foreign := path if path.is_file() else find_in_folder(path, name):
            return Checkpoint(foreign)
        raise ValueError(f"There is no run, checkpoint folder or weights file at {path}. Training keeps the newest "
                         f"checkpoint.keep_last and those of checkpoint.keep_every. Set checkpoint=runs/<name>, "
                         f"runs/<name>/checkpoints/step-…, or a .safetensors or .pt file.")
    file = path if path.is_file() else folder / f"{name}.safetensors"
    found = Checkpoint(file, folder, meta or read_complete(folder, file.stem))
    if not file.is_file():
        raise ValueError(f"{folder} holds no weights={name}, but {', '.join(sorted(found.meta['files']))}.")
    return found


def find_on_main_rank(
    state: Accelerator | PartialState, path: str | Path, weights: str | None = None,
) -> Checkpoint:
    """Finds weights as `find_checkpoint` does, only on the main rank, and sends the result to the others."""
    found = ranks.from_main(state, partial(find_checkpoint, path, weights))
    ranks.require_shared(state, found.file)
    return found


def latest_checkpoint(run: Path, names: tuple[str, ...] | None = None) -> tuple[Path, dict] | None:
    """Returns a run's latest complete checkpoint and its meta.json, or None without any; raises if all are damaged."""
    found = checkpoints.read_latest(run, names)
    if found is None and checkpoints.all_steps(run):
        raise ValueError(f"None of the checkpoints in {run / 'checkpoints'} is complete; see the warnings. Restore "
                         f"one, or move the folder away to start from the beginning.")
    return found


def read_complete(folder: Path, name: str) -> dict:
    """Reads the meta.json of a folder; raises ValueError unless the file of this name is complete."""
    try:
        return checkpoints.check(folder, (name,))
    except (ValueError, OSError) as error:
        raise ValueError(f"The checkpoint {folder} is damaged, so choose another of its run: {error}.") from error


# ---- loading weights ------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """A network and what its checkpoint records about it: all that sampling needs."""

    checkpoint: Checkpoint
    net: DiT
    diffusion: EDM | RF
    autoencoder: str
    convention: Convention | None   # of its training latents; None: the autoencoder's own
    class_names: list[str] | None
    display_names: list[str] | None  # readable names of the classes
    classes: list[int]              # of its training images
    step: int | None
    weights: str                    # ema or model; file if the state dict does not say which
    recorded: dict                  # `network` and `diffusion` as plain keywords, and `published` if there is any
    family: str | None = None       # for weights without a record: a name in FAMILIES
    description: str = ""           # for these, which weights of the file they are

    @property
    def read_as(self) -> dict:
        """How weights without a record were interpreted, as their images depend on it; empty if there is a record."""
        return {} if self.family is None else {
            "family": self.family, "num_heads": self.recorded["network"]["num_heads"],
            "null_label": self.net.null_label}

    @property
    def inferred(self) -> str | None:
        """A message on how weights without a record were interpreted; None if there is a record."""
        if self.family is None:
            return None
        labels = "" if self.net.null_label else f" no null label (num_classes={self.net.num_classes}),"
        return (f"{self.checkpoint.file} has no record. Using {self.description}, as {self.family} "
                f"({FAMILIES[self.family].meaning}), {self.recorded['network']['num_heads']} heads,{labels} decoded "
                f"by {self.autoencoder}. "
                f"To change it, set weights=, diffusion_name=, num_heads=, num_classes=, autoencoder=.")


def other_data(trained: Trained, class_names: list[str] | None, convention: Convention | None) -> list[str]:
    """Lists how the latents that a network was trained on differ from latents of these classes and convention."""
    theirs = {name: i for i, name in enumerate(trained.class_names or ())}
    found = [f"{name} is class {theirs[name]} there and {i} here" for i, name in enumerate(class_names or ())
             if theirs.get(name, i) != i][:1]
    if None not in (trained.convention, convention) and trained.convention != convention:
        there, here = vars(trained.convention), vars(convention)
        found.append(f"its latents have another {' and '.join(key for key in here if there[key] != here[key])}")
    return found


def load_trained(
    path: str | Path | Checkpoint,          # a run, a checkpoint folder, a weights file, or what was found there
    weights: str | None = None,             # ema, model, ema-0.999 …; None: the average, or what the file holds
    diffusion: str | None = None,           # for weights without a record: a name in FAMILIES
    autoencoder: str | None = None,         # overrides the recorded one
    device: torch.device | str = "cpu",
    like: Mapping[str, Any] | None = None,  # defaults for weights without a record: diffusion, num_heads …
    **given: int | None,                    # for weights without a record: num_heads, num_classes, input_size
) -> Trained:
    """Loads a network and what its checkpoint records about it; waits for no other rank.

    If meta.json lies beside the weights, the network is built from that record. Without a meta.json, the architecture is inferred from the shapes, and `diffusion` names the family if the
    file does not show it. These weights are rewritten for an ordinary network of ours. Raises ValueError for a path
    without a complete checkpoint, and for weights that are not a DiT's or belong to no known family.
    """
    found = path if isinstance(path, Checkpoint) else find_checkpoint(path, weights)
    given = {key: value for key, value in given.items() if value is not None}
    if found.record is None:
        state, record, found_out = read_without_record(found.file, weights, diffusion, {**(like or {}), **given})
        for key, value in given.items():
            if value != (known := record.network[key]):
                raise ValueError(f"{key}={value} does not fit the weights in {found.file}, which have {known}.")
    else:
        state, record, found_out = read_recorded(found, weights), found.record, {}
        other = {} if diffusion in (None, record.diffusion.get("name")) else {"diffusion_name": diffusion}
        for key, value in (other | given).items():
            raise ValueError(f"{key}={value} is for weights without a record; {found.folder} has one: leave it out.")
    net, data = fit(state, record.network, found.file), record.data
    most = max(max(data.classes or [0]) + 1, len(data.class_names or ()), len(data.display_names or ()))
    if most > net.num_classes:
        raise ValueError(f"{found.folder / 'meta.json'} has {most} classes in data, but its network {net.num_classes}.")
    net.null_label = net.null_label and record.null_label
    net.to(device).float().eval()  # not frozen, as autocast caches its casts of trainable weights only
    return Trained(
        found, net, build_diffusion(record.diffusion), autoencoder or data.autoencoder,
        data.convention and Convention.read(data.convention.model_dump()), data.class_names,
        data.display_names or data.class_names,
        data.classes or list(range(net.num_classes)), record.step, record.weights,
        {"network": record.network, "diffusion": record.diffusion}, **found_out)


def read_recorded(found: Checkpoint, weights: str | None) -> dict[str, Tensor]:
    """Reads the weights of a network that has a record; raises ValueError if `weights` names other ones."""
    record = found.record
    if weights not in (None, record.weights):
        raise ValueError(f"{found.file} holds weights={record.weights}, not weights={weights}.")
    return read_weights(found.file).state


def read_without_record(
    file: Path, weights: str | None, diffusion: str | None, given: Mapping[str, Any],
) -> tuple[dict[str, Tensor], CheckpointRecord, dict[str, str]]:
    """Reads weights without a record; `given` and the folder supply what the shapes do not show.

    Returns the state dict of an ordinary network, the record that it would have, and its family with a description.
    Raises ValueError if the family is not known.
    """
    held, pipeline = read_weights(file, weights), pipeline_of(file)
    if adapter := next((key for key in held.state if ".lora_A." in key or ".lora_down." in key), None):
        raise ValueError(f"{file} holds a LoRA adapter, {adapter} first. Merge it into its base where it was trained, "
                         f"by PEFT's merge_and_unload(), and name the merged weights.")
    known = {"num_classes": held.num_classes, **pipeline, **given}
    state = with_positions(held.state, known.get("input_size"), file)
    network = infer_architecture(state, known.get("num_heads"), known.get("num_classes"))
    fit(state, network, file)
    family = diffusion or given.get("diffusion") or held.family or pipeline.get("family")
    if family not in FAMILIES:
        raise ValueError(unknown_family(file, network))
    state, network = to_our_diffusion(state, network, FAMILIES[family])
    own = "identity" if network["in_channels"] == 3 else "sd_vae_ema"
    data = DataRecord(autoencoder=pipeline.get("autoencoder", own), class_names=None)
    record = CheckpointRecord(network=network, diffusion={"name": FAMILIES[family].diffusion}, data=data, step=None,
                              weights=held.which)
    return state, record, {"family": family, "description": held.description}


def fit(state: Mapping[str, Tensor], network: dict, file: Path) -> DiT:
    """Builds a network from keywords and gives it these weights; raises ValueError if the two do not fit."""
    with as_recorded(file), torch.device("meta"):
        net = build_network(network)
    try:
        net.load_state_dict(state, assign=True)
    except RuntimeError as error:
        why = " ".join(str(error).split())[:500]
        raise ValueError(f"The weights in {file} do not fit their network. {why}") from None
    return net


# ---- weights by their hash -----------------------------------------------------------------------------------------


def find_by_hash(paths: list[str | Path], sha256: str | None) -> Checkpoint | None:
    """Finds the weights with this SHA-256 at one of the paths, or in an older checkpoint of a run among them."""
    older = [folder / "ema.safetensors" for path in paths for folder in reversed(checkpoints.all_steps(Path(path)))]
    for path in (*paths, *older):
        with contextlib.suppress(OSError, ValueError):  # no weights there
            if (found := find_checkpoint(path)).sha256 == sha256:
                return found
    return None