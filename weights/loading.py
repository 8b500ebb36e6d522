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
from weights import checkpoints
from weights.averages import weights_name
from weights.checkpoints import Checkpoint
from weights.foreign import COMMAND, how_to_import
from weights.reading import check_finite, from_hub, how_to_download, read_tensors
from weights.records import build_diffusion, fit


def find_checkpoint(path: str | Path, weights: str | None = None) -> Checkpoint:
    """Finds the weights that a path or a name of the Hugging Face Hub means; waits for no other rank.

    A path is a run (its newest checkpoint) or a checkpoint folder, and comes before the Hub. A checkpoint holds several
    networks, each in `<weights>.safetensors`: ema, the average (the default), other averages, and model. Its file is
    read to check its hash. Raises ValueError, with what to type, for anything else.
    """
    name = weights_name(weights or "ema")
    file = f"{name}.safetensors"
    if newest := checkpoints.read_latest(Path(path), (file,)):
        folder, meta = newest
    else:
        folder = find_folder(path, file)
        try:
            meta = checkpoints.check(folder, (file,))
        except ValueError as error:
            raise ValueError(f"The checkpoint {folder} is damaged, so choose another of its run: {error}.") from error
    if file not in meta["files"]:
        stems = sorted(Path(other).stem for other in {*meta["files"]} - {"training.safetensors"})
        raise ValueError(f"{folder} holds no {file}: set weights= to one of {', '.join(stems)}.")
    return Checkpoint(folder, meta, name)


def find_folder(path: str | Path, file: str) -> Path:
    """Finds a checkpoint's folder, downloaded if it is on the Hub; raises ValueError, with what to type, for others."""
    place, to_type = Path(path), how_to_download(str(path))
    if (place / "meta.json").is_file():
        return place
    if (place.parent / "meta.json").is_file() and place.is_file():
        raise ValueError(f"{place} is one file of a checkpoint: name {place.parent}, with weights={place.stem}.")
    if checkpoints.all_steps(place.parent) and place.name == "checkpoints":
        raise ValueError(f"{place} holds the checkpoints of a run: name {place.parent}, or one of them.")
    if place.exists():
        raise ValueError(how_to_import(place))
    if len(place.parts) == 2 and "@" not in str(path) and to_type:  # user/name
        return from_hub(str(path), "meta.json", file, remedy=(
            f"{to_type} If it has no meta.json there, as weights of other code, import that folder by `{COMMAND} "
            f"source=./{place.name} out=weights/{place.name}`."))
    raise ValueError(f"There is no run and no checkpoint folder at {path}: name runs/<name> or "
                     f"runs/<name>/checkpoints/step-….{to_type}")


def find_on_main_rank(
    state: Accelerator | PartialState, path: str | Path, weights: str | None = None,
) -> Checkpoint:
    """Finds weights as `find_checkpoint` does, only on the main rank, and sends the result to the others."""
    return ranks.from_main(state, partial(find_checkpoint, path, weights))


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
    recorded: dict[str, Any]        # `network` and `diffusion` as plain keywords


def other_data(trained: Trained, class_names: list[str] | None, convention: Convention) -> list[str]:
    """Lists how the latents that a network was trained on differ from latents of these classes and convention."""
    names = trained.class_names or []
    differences = [f"{name} is class {names.index(name)} there and {i} here" for i, name in enumerate(class_names or ())
                   if name in names and names[i : i + 1] != [name]][:1]
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
    net.null_label = net.null_label and record.null_label
    net.to(device).float().eval()  # not frozen, as autocast caches its casts of trainable weights only
    return Trained(
        checkpoint, net, build_diffusion(record.diffusion), autoencoder or data.autoencoder,
        Convention.read(data.convention.model_dump()), data.class_names, data.display_names or data.class_names,
        data.classes or list(range(net.num_classes)), {"network": record.network, "diffusion": record.diffusion})
