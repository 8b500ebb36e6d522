"""Loads a run or a checkpoint, also one on the Hugging Face Hub: a network, and what sampling needs to know about it.

`find_checkpoint` finds the file and reads the record beside it, once; `load_trained` builds the network from them.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState

from autoencoder import Convention
from dit import DiT
from edm import EDM
from rf import RF
from runtime import ranks
from weights import checkpoint as checkpoints
from weights.averages import weights_name
from weights.checkpoint import Checkpoint
from weights.foreign import COMMAND, how_to_import
from weights.reading import check_finite, from_hub, how_to_download, read_tensors
from weights.records import build_diffusion, fit

# ---- finding weights ------------------------------------------------------------------------------------------------


def find_checkpoint(path: str | Path, weights: str | None = None) -> Checkpoint:
    """Finds the weights that a path or a name of the Hugging Face Hub means; waits for no other rank.

    A path is a run (its newest checkpoint) or a checkpoint folder, and comes before the Hub. A checkpoint holds several
    networks, each in `<weights>.safetensors`: ema, the average (the default), other averages, and model. Its file is
    read to check its hash. Raises ValueError, with what to type, for anything else.
    """
    place, name = Path(path), weights_name(weights or "ema")
    if place.is_file() and (place.parent / "meta.json").is_file():
        raise ValueError(f"{place} is one file of a checkpoint: name {place.parent}, with weights={place.stem}.")
    if (place / "meta.json").is_file():
        return open_checkpoint(place, name)
    if newest := latest_checkpoint(place, (f"{name}.safetensors",)):
        return open_checkpoint(newest[0], name, newest[1])
    if place.exists():
        raise ValueError(how_to_import(place))
    to_type = how_to_download(str(path))
    if len(place.parts) == 2 and "@" not in str(path) and to_type:  # user/name
        remedy = (f"{to_type} If it has no meta.json there, as weights of other code, import that folder by `{COMMAND} "
                  f"source=./{place.name} out=weights/{place.name}`.")
        return open_checkpoint(from_hub(str(path), "meta.json", f"{name}.safetensors", remedy=remedy), name)
    raise ValueError(f"There is no run and no checkpoint folder at {path}: name runs/<name> or "
                     f"runs/<name>/checkpoints/step-….{to_type}")


def open_checkpoint(folder: Path, weights: str, meta: dict[str, Any] | None = None) -> Checkpoint:
    """Opens a network of a checkpoint, whose file is checked unless `meta` is given; raises ValueError for none."""
    name = f"{weights}.safetensors"
    try:
        meta = meta or checkpoints.check(folder, (name,))
    except (ValueError, OSError) as error:
        raise ValueError(f"The checkpoint {folder} is damaged, so choose another of its run: {error}.") from error
    if name not in meta["files"]:
        stems = [file.removesuffix(".safetensors") for file in sorted(meta["files"]) if file != "training.safetensors"]
        raise ValueError(f"{folder} holds no {name}: set weights= to one of {', '.join(stems)}.")
    return Checkpoint(folder, meta, weights)


def find_on_main_rank(
    state: Accelerator | PartialState, path: str | Path, weights: str | None = None,
) -> Checkpoint:
    """Finds weights as `find_checkpoint` does, only on the main rank, and sends the result to the others."""
    return ranks.from_main(state, partial(find_checkpoint, path, weights))


def latest_checkpoint(run: Path, names: tuple[str, ...] | None = None) -> tuple[Path, dict[str, Any]] | None:
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
    convention: Convention          # of its training latents
    class_names: list[str] | None
    display_names: list[str] | None  # readable names of the classes
    classes: list[int]              # of its training images
    step: int | None
    weights: str                    # ema, model, ema-0.999 …
    recorded: dict[str, Any]        # `network` and `diffusion` as plain keywords


def other_data(trained: Trained, class_names: list[str] | None, convention: Convention) -> list[str]:
    """Lists how the latents that a network was trained on differ from latents of these classes and convention."""
    numbers = {name: i for i, name in enumerate(trained.class_names or ())}
    differences = [f"{name} is class {numbers[name]} there and {i} here" for i, name in enumerate(class_names or ())
                   if numbers.get(name, i) != i][:1]
    if trained.convention != convention:
        there, here = vars(trained.convention), vars(convention)
        differences.append(f"its latents have another {' and '.join(key for key in here if there[key] != here[key])}")
    return differences


def load_trained(
    path: str | Path | Checkpoint,          # as in find_checkpoint, or what it returned
    weights: str | None = None,             # ema, model, ema-0.999 …; None: the average
    autoencoder: str | None = None,         # overrides the recorded one
    device: torch.device | str = "cpu",
) -> Trained:
    """Loads a network and what its checkpoint records about it; waits for no other rank.

    Raises ValueError for a path without a complete checkpoint, and for weights that are not its network's.
    """
    checkpoint = path if isinstance(path, Checkpoint) else find_checkpoint(path, weights)
    record, data, state = checkpoint.record, checkpoint.record.data, read_tensors(checkpoint.file)
    net = fit(state, record.network, checkpoint.file)
    check_finite(state, checkpoint.file)
    most = max(max(data.classes or [0]) + 1, len(data.class_names or ()), len(data.display_names or ()))
    if most > net.num_classes:
        raise ValueError(f"{checkpoint.folder / 'meta.json'} has {most} classes, but its network {net.num_classes}.")
    net.null_label = net.null_label and record.null_label
    net.to(device).float().eval()  # not frozen, as autocast caches its casts of trainable weights only
    return Trained(
        checkpoint, net, build_diffusion(record.diffusion), autoencoder or data.autoencoder,
        Convention.read(data.convention.model_dump()), data.class_names, data.display_names or data.class_names,
        data.classes or list(range(net.num_classes)), record.step, checkpoint.weights,
        {"network": record.network, "diffusion": record.diffusion})
