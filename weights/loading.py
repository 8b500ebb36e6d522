"""A plain record, a checkpoint or anybody's weights -> network, diffusion, sampler settings, guidance."""

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from torch import Tensor

from autoencoder import Convention
from dit import DiT, infer_architecture
from edm import EDM
from rf import RF
from runtime import files, ranks
from runtime.schema import read_record
from weights import checkpoint as checkpoints
from weights import lora as adapters
from weights.others import (
    FAMILIES,
    as_ours,
    check_tensors,
    choose,
    detect_family,
    files_of,
    find_in_folder,
    pipeline_of,
    plain_keys,
    read_content,
    settings_in,
    unknown_family,
    with_positions,
)
from weights.records import (
    CheckpointRecord,
    DataRecord,
    ParentRecord,
    build_diffusion,
    build_network,
    with_objective,
)


@dataclass
class Trained:
    """A network and what its checkpoint records about it: all that drawing needs."""

    net: DiT
    diffusion: EDM | RF
    autoencoder: str
    convention: Convention | None  # by which its latents were made; None: the autoencoder's own
    class_names: list[str] | None
    display_names: list[str] | None      # of the classes, for people
    classes: list[int]                   # of its training images
    step: int | None
    weights: str             # ema or model; file for a state dict that does not say
    folder: Path | None      # the checkpoint folder, None for a bare weights file
    file: Path               # of the weights
    recorded: dict           # `network` and `diffusion` as plain keywords, and `published` if there is any
    family: str | None       # of weights without a record: a name of FAMILIES
    said: str                # of such, which weights of the file they are
    recorded_sha256: str | None  # of the file, which was checked by it; None without a record

    @property
    def weights_sha256(self) -> str:
        """The file's hash; a recorded one is known even after training has pruned the file."""
        return self.recorded_sha256 or sha256_of(self.file)

    @property
    def run_folder(self) -> Path | None:
        """The run of the checkpoint, or None for weights or a folder outside a run."""
        return None if self.folder is None else run_of(self.folder)

    @property
    def inferred(self) -> str | None:
        """A sentence that says what was read off weights without a record; None where there is a record."""
        if self.family is None:
            return None
        labels = "" if self.net.null_label else f" no null label (num_classes={self.net.num_classes}),"
        return (f"{self.file} carries no record. Taken: {self.said}, as {self.family} "
                f"({FAMILIES[self.family].meaning}), {self.recorded['network']['num_heads']} heads,{labels} decoded by "
                f"{self.autoencoder}. Otherwise set weights=, diffusion_name=, num_heads=, num_classes=, autoencoder=.")


# ---- a weights file -------------------------------------------------------------------------------------------------


@dataclass
class Weights:
    """What a weights file holds: one state dict, under our keys and without the prefixes of wrappers."""

    state: dict[str, Tensor]
    which: str              # ema, model, or file where the file does not say
    said: str               # which, for people
    family: str | None      # that the file shows
    num_classes: int | None  # that it names


def read_weights(path: Path, weights: str | None = None) -> Weights:
    """Reads the weights of .safetensors, of a .pt as published or of shards; only tensors are ever unpickled.

    Of several, `weights` names one: ema, model, or None, the average if there is one. Raises ValueError for a file
    without a state dict, without the one named, or with values that are not finite.
    """
    content = read_content(path)
    try:
        held, which, said = choose(content, weights)
        check_tensors(held.tensors)
        family = detect_family(held.tensors, held.name, content)
        return Weights(plain_keys(held.tensors), which, said, family, settings_in(content).get("num_classes"))
    except ValueError as error:
        raise ValueError(f"{path} is not read: {error}.") from None


def sha256_of(file: Path) -> str:
    """Returns the SHA-256 of a weights file, or that of the list of its shards' if it is their index."""
    parts = [files.sha256(part) for part in files_of(file)]
    return parts[0] if len(parts) == 1 else files.record_sha256({"shards": parts})


def fit(state: Mapping[str, Tensor], network: dict, file: Path) -> DiT:
    """Builds a network of these keywords around its weights; raises ValueError where the two do not fit."""
    with torch.device("meta"):
        net = build_network(network)
    try:
        net.load_state_dict(state, assign=True)
    except RuntimeError as error:
        why = " ".join(str(error).split())[:500]
        raise ValueError(f"The weights in {file} do not fit their network. {why}") from None
    return net


# ---- where it lies --------------------------------------------------------------------------------------------------

EXPORTED = ("weights.safetensors", "transformer/diffusion_pytorch_model.safetensors")  # of scripts/export.py


def latest_checkpoint(run: Path, names: tuple[str, ...] | None = None) -> Path | None:
    """Returns a run's latest whole checkpoint, as the main rank finds it, or None where none was saved.

    Raises ValueError where all are damaged, or where a rank does not see the one found.
    """
    state = PartialState()
    found = checkpoints.latest(run, names) if state.is_main_process else None
    step = ranks.broadcast_from_main(state, -1 if found is None else checkpoints.step_of(found))
    if step < 0:
        if ranks.broadcast_from_main(state, len(checkpoints.all_steps(run))):
            raise ValueError(f"None of the checkpoints in {run / 'checkpoints'} is whole, as the warnings say. Restore "
                             f"one, or move the folder away to start from the beginning.")
        return None
    folder = checkpoints.step_folder(run, step)
    if not folder.is_dir():
        raise ValueError(f"Rank {state.process_index} does not see {folder}, which the main rank found: {run} must lie "
                         f"on a disk that all nodes share. Set run_dir or checkpoint.")
    return folder


def resolve_run(path: str, weights: str = "ema") -> str:
    """Returns the latest checkpoint of the run at `path`, and any other path as it is.

    Raises ValueError for a run without a whole checkpoint.
    """
    if not (Path(path) / "checkpoints").is_dir() or (Path(path) / "meta.json").is_file():
        return path
    folder = latest_checkpoint(Path(path), (weights,))
    if folder is None:
        raise ValueError(f"The run {path} has saved no checkpoint yet; wait for its first save.")
    return str(folder)


def find_weights(path: Path, weights: str = "ema") -> tuple[Path, Path | None]:
    """Finds the weights file that `path` names, and its checkpoint folder or None; raises ValueError for none."""
    path = Path(resolve_run(str(path), weights))
    if path.is_file():
        return path, path.parent if (path.parent / "meta.json").is_file() else None
    if (path / "meta.json").is_file():
        exported = (path / name for name in EXPORTED)
        return next((file for file in exported if file.is_file()), path / f"{weights}.safetensors"), path
    if path.parent.name == "checkpoints" and path.name.startswith("step-"):
        raise ValueError(f"There is no checkpoint {path}. Training deletes all but the newest checkpoint.keep_last and "
                         f"those of checkpoint.keep_every: name another one, or the run.")
    if foreign := find_in_folder(path, weights):
        return foreign, None
    raise ValueError(f"There is no run, checkpoint folder or weights file at {path}. "
                     f"Set checkpoint=runs/<name>, runs/<name>/checkpoints/step-…, or a .safetensors or .pt file.")


# ---- loaded ---------------------------------------------------------------------------------------------------------


def load_trained(
    path: str | Path,                       # a run, a checkpoint folder or a weights file
    weights: str | None = None,             # ema | model; None: the average, or what the file holds
    diffusion: str | None = None,           # of weights without a record, FAMILIES' name
    autoencoder: str | None = None,         # overrules what is recorded
    device: torch.device | str = "cpu",
    **given: int | None,                    # of weights without a record: num_heads, num_classes, input_size
) -> Trained:
    """Loads a network and what its checkpoint records about it.

    A weights file in a folder with meta.json is built by that record; an adapter (LoRA) is merged into its base.
    Without a meta.json the architecture is read off the shapes, `diffusion` names the family where the file does not
    show it, and the weights are rewritten for an ordinary network of ours. Of a run all ranks must call it.
    Raises ValueError for a path without a whole checkpoint, or for weights that are not a DiT's or of no known family.
    """
    file, folder = find_weights(Path(path), weights or "ema")
    given = {key: value for key, value in given.items() if value is not None}
    if folder is None:
        trained = read_bare(file, weights, diffusion, given)
        for key, value in given.items():
            if value != (found := trained.recorded["network"][key]):
                raise ValueError(f"{key}={value} does not fit the weights in {file}, which have {found}: leave it out.")
    else:
        trained = read_checkpoint(file, folder, weights)
        name = trained.recorded["diffusion"]["name"]
        if diffusion not in (None, name):
            raise ValueError(f"diffusion_name={diffusion} is for weights without a record; {folder} records {name}: "
                             f"leave it out.")
        for key, value in given.items():
            raise ValueError(f"{key}={value} is for weights without a record; {folder} has one: leave it out.")
    return ready(trained, autoencoder, device)


def load_like(path: Path, diffusion: str | None, network: Mapping, device: torch.device | str = "cpu") -> Trained:
    """Loads weights that belong to another network; without a record they are of its family and have its keywords."""
    file, folder = find_weights(path)
    if folder is not None:
        return load_trained(path, device=device)
    return ready(read_bare(file, None, diffusion, network), None, device)


def ready(trained: Trained, autoencoder: str | None, device: torch.device | str) -> Trained:
    trained.autoencoder = autoencoder or trained.autoencoder
    trained.net.to(device).float().eval()  # not frozen: autocast keeps its casts of trainable weights only
    return trained


def read_checkpoint(file: Path, folder: Path, weights: str | None) -> Trained:
    """Reads the weights `file` of the checkpoint `folder`; raises ValueError for a damaged one or for other weights."""
    if why := checkpoints.problem(folder, (file.stem,)):
        raise ValueError(f"The checkpoint {folder} is damaged: {why}. Choose another of its run.")
    meta = read_record(CheckpointRecord, folder / "meta.json",
                       "It does not describe a checkpoint; move the weights elsewhere.")
    meta = meta.model_copy(update={"weights": meta.weights or file.stem})
    if weights not in (None, meta.weights):
        raise ValueError(f"{file} holds weights={meta.weights}, not weights={weights}.")
    state = read_weights(file).state
    if meta.lora is not None:
        state = adapters.merge(load_base(meta, folder).net.state_dict(), state, meta.lora.alpha / meta.lora.rank)
    saved = checkpoints.read_meta(folder)["files"].get(str(file.relative_to(folder)), {})
    return describe(fit(state, meta.network, file), meta, file, folder, recorded_sha256=saved.get("sha256"))


def read_bare(file: Path, weights: str | None, diffusion: str | None, given: Mapping) -> Trained:
    """Reads weights without a record, of which `given` and the folder say what shapes do not.

    Raises ValueError where their family is not known.
    """
    read, pipeline = read_weights(file, weights), pipeline_of(file)
    said = {"num_classes": read.num_classes, **pipeline, **given}
    try:
        state = with_positions(read.state, said.get("input_size"))
    except ValueError as error:
        raise ValueError(f"{file} is not read: {error}.") from None
    network = infer_architecture(state, said.get("num_heads"), said.get("num_classes"))
    fit(state, network, file)
    family = diffusion or read.family or pipeline.get("family")
    if family not in FAMILIES:
        raise ValueError(unknown_family(file, network))
    state, network = as_ours(state, network, FAMILIES[family])
    own = "identity" if network["in_channels"] == 3 else "sd_vae_ema"
    data = DataRecord(autoencoder=pipeline.get("autoencoder", own), class_names=None)
    meta = CheckpointRecord(network=network, diffusion={"name": FAMILIES[family].diffusion}, data=data, step=None,
                            weights=read.which)
    return describe(fit(state, network, file), meta, file, family=family, said=read.said)


def describe(
    net: DiT, meta: CheckpointRecord, file: Path, folder: Path | None = None, family: str | None = None,
    recorded_sha256: str | None = None, said: str = "",
) -> Trained:
    data, published = meta.data, {"published": meta.published} if meta.published else {}
    net.null_label = net.null_label and not meta.null_label_untrained
    return Trained(
        net=net, diffusion=build_diffusion(meta.diffusion), autoencoder=data.autoencoder,
        convention=data.convention and Convention.read(data.convention),
        class_names=data.class_names, display_names=data.display_names or data.class_names,
        classes=data.classes or list(range(net.num_classes)),
        step=meta.step, weights=meta.weights, folder=folder, file=file, family=family, said=said,
        recorded_sha256=recorded_sha256,
        recorded={"network": meta.network, "diffusion": with_objective(meta.diffusion, {})[0], **published},
    )


def run_of(folder: Path) -> Path | None:
    """Returns the run of a checkpoint folder, or None for a folder outside a run."""
    return folder.parent.parent if folder.parent.name == "checkpoints" else None


def hold_base(base: Trained, run: Path) -> None:
    """Links or copies a run's checkpoint that an adapter starts from into its own run, as training may delete it."""
    held = run / "base"
    if base.run_folder is None or base.folder.resolve() == held.resolve():
        return
    with files.atomic_write(held) as partial:
        if (earlier := base.run_folder / "base").is_dir():  # where the base is an adapter, too
            shutil.copytree(earlier, partial / "base", copy_function=files.link)
        partial.mkdir(exist_ok=True)
        for file in (base.file, base.folder / "meta.json"):
            files.link(file, partial / file.name)


def is_base(file: Path, sha256: str | None) -> bool:
    return file.is_file() and sha256_of(file) == sha256


def find_by_hash(path: str, sha256: str | None) -> Path | None:
    """Finds the weights of this SHA-256 at `path`, also those of an older checkpoint of a run that has gone on."""
    found = [folder / "ema.safetensors" for folder in checkpoints.all_steps(Path(path))]
    with contextlib.suppress(OSError, ValueError):  # there are none
        found.append(find_weights(Path(path))[0])
    return next((file for file in reversed(found) if is_base(file, sha256)), None)


def load_base(meta: CheckpointRecord, folder: Path, moved: str | None = None) -> Trained:
    """Loads the weights that the adapter in `folder` was trained on, from its run, their place, or where they moved to.

    Raises ValueError where none of these has their SHA-256.
    """
    base, parent = Path(meta.lora.base), meta.parent or ParentRecord()
    places = [(run_of(folder) or folder) / "base" / base.name, base]
    found = next((file for file in places if is_base(file, parent.weights_sha256)), None)
    if found is None and moved is not None:
        found = find_by_hash(moved, parent.weights_sha256)
    if found is not None:
        base = found
    else:
        why = "is another file now: its SHA-256 differs" if base.is_file() else "is not there"
        raise ValueError(f"{folder} holds an adapter (LoRA) alone, and its base {base} {why}. Put that file back; "
                         f"scripts/merge_lora.py makes weights that need no base.")
    return load_like(base, parent.diffusion_name or meta.diffusion.get("name"), meta.network)
