"""Loads a run, a checkpoint or anybody's weights: a network, and all that sampling needs to know about it.

`find_checkpoint` finds the file and reads the record beside it, once; `load_trained` builds the network from them.
"""

import contextlib
import re
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
from weights.averages import weights_name
from weights.foreign import (
    FAMILIES,
    SUFFIXES,
    check_tensors,
    find_in_folder,
    pipeline_of,
    read_weights,
    to_our_diffusion,
    unknown_family,
    with_positions,
    without_unread,
)
from weights.reading import from_hub, read_tensors
from weights.records import CheckpointRecord, DataRecord, build_diffusion, build_network

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
        return self.meta and read_record(CheckpointRecord, self.folder / "meta.json", "It does not describe a "
                                         "checkpoint; move the weights elsewhere.", self.meta)

    @cached_property
    def sha256(self) -> str:
        """The file's hash, even after training has pruned it."""
        return self.meta["files"][self.file.name]["sha256"] if self.meta else files.sha256(self.file)

    @property
    def run(self) -> Path | None:
        """The run that the checkpoint belongs to, if any."""
        return self.folder and checkpoints.run_of(self.folder)


def find_checkpoint(path: str | Path, weights: str | None = None) -> Checkpoint:
    """Finds the weights that a path or a name of the Hugging Face Hub means; waits for no other rank.

    A path is a run (its newest checkpoint), a checkpoint, or other people's file or folder, and comes before the Hub.
    A checkpoint holds several networks, each in `<weights>.safetensors`: ema, the average (the default), other
    averages, and model. Its file is read to check its hash. Raises ValueError if there are no such weights, or only
    damaged ones.
    """
    place = Path(path)
    if place.is_file():
        if not (place.parent / "meta.json").is_file():
            return Checkpoint(place)
        if weights not in (None, place.stem):
            raise ValueError(f"{place} holds weights={place.stem}, not weights={weights}.")
        return open_checkpoint(place.parent, place.name)
    if (place / "meta.json").is_file():
        return open_checkpoint(place, file_name(weights))
    if (place / "checkpoints").is_dir():
        others = sorted(str(file) for file in (place / "checkpoints").iterdir() if file.suffix in SUFFIXES)
        if others and not checkpoints.all_steps(place):
            raise ValueError(f"{place / 'checkpoints'} holds weights of other code: name one, as in {others[-1]}.")
        if (newest := latest_checkpoint(place, (file_name(weights),))) is None:
            raise ValueError(f"The run {place} has saved no checkpoint yet; wait for its first save.")
        return open_checkpoint(newest[0], file_name(weights), newest[1])
    if place.is_dir() and (file := find_in_folder(place)):
        return Checkpoint(file)
    if is_hub_name(str(path)) and not place.parent.exists():
        return open_checkpoint(download(str(path), file_name(weights)), file_name(weights))
    hub = (f" As {place.parent} is here, {path} is not looked up on the Hugging Face Hub: run `hf download {path} "
           f"--local-dir {place.name}`, and name that folder." if is_hub_name(str(path)) and not place.exists() else "")
    raise ValueError(f"There is no run, checkpoint folder or weights file at {path}. Training keeps the newest "
                     f"checkpoint.keep_last and those of checkpoint.keep_every. Name runs/<name>, "
                     f"runs/<name>/checkpoints/step-…, or a .safetensors or .pt file.{hub}")


def file_name(weights: str | None) -> str:
    return f"{weights_name(weights or 'ema')}.safetensors"


def is_hub_name(path: str) -> bool:
    """True for user/name, as repositories of the Hugging Face Hub are called."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path) is not None and not path.endswith(SUFFIXES)


def download(repo: str, name: str) -> Path:
    """Returns the folder, in the Hub's cache, of a checkpoint that was uploaded there, with the file of this name."""
    try:
        return from_hub(repo, "meta.json", name, remedy=(
            f"on a machine with internet, run `hf download {repo} meta.json {name} --local-dir x`, copy that folder "
            f"here, and name it instead of {repo}."))
    except ValueError as error:
        raise ValueError(f"There is no {repo} here, and {error}") from error


def open_checkpoint(folder: Path, name: str, meta: dict | None = None) -> Checkpoint:
    """Returns a checkpoint's file, which is checked unless `meta` is given; raises ValueError if there is none."""
    try:
        meta = meta or checkpoints.check(folder, (name,))
    except (ValueError, OSError) as error:
        raise ValueError(f"The checkpoint {folder} is damaged, so choose another of its run: {error}.") from error
    if name not in meta["files"]:
        stems = [file.removesuffix(".safetensors") for file in sorted(meta["files"]) if file != "training.safetensors"]
        raise ValueError(f"{folder} holds no {name}: set weights= to one of {', '.join(stems)}.")
    return Checkpoint(folder / name, folder, meta)


def find_on_main_rank(
    state: Accelerator | PartialState, path: str | Path, weights: str | None = None,
) -> Checkpoint:
    """Finds weights as `find_checkpoint` does, only on the main rank, and sends the result to the others."""
    checkpoint = ranks.from_main(state, partial(find_checkpoint, path, weights))
    ranks.require_shared(state, checkpoint.file)
    return checkpoint


def latest_checkpoint(run: Path, names: tuple[str, ...] | None = None) -> tuple[Path, dict] | None:
    """Returns a run's latest complete checkpoint and its meta.json, or None without any; raises if all are damaged."""
    newest = checkpoints.read_latest(run, names)
    if newest is None and checkpoints.all_steps(run):
        raise ValueError(f"None of the checkpoints in {run / 'checkpoints'} is complete; see the warnings. Restore "
                         f"one, or move the folder away to start from the beginning.")
    return newest


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
    recorded: dict                  # `network` and `diffusion` as plain keywords
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
                f"by {self.autoencoder}. To change it, set weights=, diffusion_name=, num_heads=, num_classes=, "
                f"autoencoder=.")


def other_data(trained: Trained, class_names: list[str] | None, convention: Convention | None) -> list[str]:
    """Lists how the latents that a network was trained on differ from latents of these classes and convention."""
    numbers = {name: i for i, name in enumerate(trained.class_names or ())}
    differences = [f"{name} is class {numbers[name]} there and {i} here" for i, name in enumerate(class_names or ())
                   if numbers.get(name, i) != i][:1]
    if None not in (trained.convention, convention) and trained.convention != convention:
        there, here = vars(trained.convention), vars(convention)
        differences.append(f"its latents have another {' and '.join(key for key in here if there[key] != here[key])}")
    return differences


def load_trained(
    path: str | Path | Checkpoint,          # as in find_checkpoint, or what it returned
    weights: str | None = None,             # ema, model, ema-0.999 …, or a key of others' file; None: the average
    diffusion: str | None = None,           # for weights without a record: a name in FAMILIES
    autoencoder: str | None = None,         # overrides the recorded one
    device: torch.device | str = "cpu",
    like: Mapping[str, Any] | None = None,  # for what neither they nor settings say: diffusion, num_heads …
    **sizes: int | None,                    # for weights without a record: num_heads, num_classes, input_size
) -> Trained:
    """Loads a network and what its checkpoint records about it; waits for no other rank.

    If meta.json lies beside the weights, the network is built from that record. Otherwise the architecture is inferred
    from the shapes, `diffusion` names the family if the file does not show it, and the weights are rewritten for an
    ordinary network of ours. Raises ValueError for a path without a complete checkpoint, and for weights that are not
    a DiT's or belong to no known family.
    """
    checkpoint = path if isinstance(path, Checkpoint) else find_checkpoint(path, weights)
    sizes = {key: value for key, value in sizes.items() if value is not None}
    if checkpoint.record is None:
        typed = {"diffusion": diffusion, **sizes} if diffusion else sizes
        state, record, role, reading = read_without_record(checkpoint.file, weights, typed, like or {})
        for key, value in sizes.items():
            if value != record.network[key]:
                raise ValueError(f"{key}={value} does not fit the weights in {checkpoint.file}, which have "
                                 f"{record.network[key]}.")
    else:
        record, role, reading = checkpoint.record, checkpoint.file.stem, {}
        other = {} if diffusion in (None, record.diffusion.get("name")) else {"diffusion_name": diffusion}
        for key, value in (other | sizes).items():
            raise ValueError(f"{key}={value} is for weights without a record; {checkpoint.folder} has one: leave it "
                             f"out.")
        state = read_tensors(checkpoint.file)
        check_tensors(state)
    net, data = fit(state, record.network, checkpoint.file), record.data
    most = max(max(data.classes or [0]) + 1, len(data.class_names or ()), len(data.display_names or ()))
    if most > net.num_classes:
        raise ValueError(f"{checkpoint.folder / 'meta.json'} has {most} classes in data, but its network "
                         f"{net.num_classes}.")
    net.null_label = net.null_label and record.null_label
    net.to(device).float().eval()  # not frozen, as autocast caches its casts of trainable weights only
    return Trained(
        checkpoint, net, build_diffusion(record.diffusion), autoencoder or data.autoencoder,
        data.convention and Convention.read(data.convention.model_dump()), data.class_names,
        data.display_names or data.class_names, data.classes or list(range(net.num_classes)), record.step, role,
        {"network": record.network, "diffusion": record.diffusion}, **reading)


def read_without_record(
    file: Path, weights: str | None, typed: Mapping[str, Any], like: Mapping[str, Any],
) -> tuple[dict[str, Tensor], CheckpointRecord, str, dict[str, str]]:
    """Reads weights without a record; settings, then the file and its folder, then `like` say what no shape shows.

    Returns the state dict of an ordinary network, the record that it would have, its role, and its family with a
    description. Raises ValueError if the family is not known.
    """
    stored, pipeline = read_weights(file, weights), pipeline_of(file)
    shown = {"num_classes": stored.num_classes, "diffusion": stored.family} | pipeline
    facts = {**like, **{key: value for key, value in shown.items() if value is not None}, **typed}
    state = with_positions(stored.state, (pipeline | typed).get("input_size"), file)
    network = infer_architecture(state, facts.get("num_heads"), facts.get("num_classes"))
    if (family := facts.get("diffusion")) not in FAMILIES:
        raise ValueError(unknown_family(file, network))
    state = without_unread(state, network, family, file)
    fit(state, network, file)
    state, network = to_our_diffusion(state, network, FAMILIES[family])
    autoencoder = facts.get("autoencoder", "identity" if network["in_channels"] == 3 else "sd_vae_ema")
    data = DataRecord(autoencoder=autoencoder, class_names=None)
    record = CheckpointRecord(network=network, diffusion={"name": FAMILIES[family].diffusion}, data=data, step=None)
    return state, record, stored.role, {"family": family, "description": stored.description}


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
            if (checkpoint := find_checkpoint(path)).sha256 == sha256:
                return checkpoint
    return None
