"""Named tensors <-> `<run>/checkpoints/step-00001000/*.safetensors`, written whole or not at all, with hashes."""

import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.files import atomic_write, remove, remove_leftovers, sha256
from runtime.schema import read_json


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def all_steps(run: Path) -> list[Path]:
    """Lists a run's checkpoint folders from the oldest to the newest, whole or not."""
    folders = (run / "checkpoints").glob("step-*")
    return sorted((folder for folder in folders if re.fullmatch(r"step-\d{8,18}", folder.name)), key=step_of)


def stored(tensors: Mapping[str, Mapping[str, Tensor]]) -> Iterator[Tensor]:
    """Yields the tensors of a checkpoint's files in the order in which they are written."""
    return (tensor for named in tensors.values() for tensor in named.values())


def save(
    folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], meta: dict, values: Iterator[Tensor] | None = None,
) -> None:
    """Writes `tensors[name]` to `folder/name.safetensors` and `meta` to `meta.json`, all of it or nothing.

    `values` yields the tensors in the order of `stored` where they are gathered from other ranks. A whole checkpoint
    that exists is not written again. Raises OSError for a full disk.
    """
    if folder.is_dir() and problem(folder) is None:
        return
    values = stored(tensors) if values is None else values
    try:
        with atomic_write(folder) as partial:
            partial.mkdir()
            files = {}
            for name, named in tensors.items():
                path = partial / f"{name}.safetensors"
                save_file({key: next(values).detach().cpu().contiguous() for key in named}, path)
                files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
            (partial / "meta.json").write_text(json.dumps({**meta, "files": files}, indent=1), encoding="utf-8")
    except SafetensorError as error:      # which wraps the disk's
        raise OSError(f"The checkpoint {folder} could not be written ({error}); earlier ones are untouched.") from error


def read_meta(folder: Path) -> dict:
    return read_json(folder / "meta.json")


def problem(folder: Path, names: tuple[str, ...] | None = None) -> str | None:
    """Returns why a checkpoint is not whole, or None; `names` limits the check to some of its files."""
    try:
        files = {folder / name: (file["bytes"], file["sha256"]) for name, file in read_meta(folder)["files"].items()}
    except (OSError, ValueError, KeyError) as error:
        return f"meta.json is missing or unreadable ({error})"
    for path, (size, digest) in files.items():
        if names is not None and path.stem not in names:
            continue
        if not path.is_file():
            return f"{path.name} is missing"
        if path.stat().st_size != size:
            return f"{path.name} has {path.stat().st_size} bytes where {size} were written"
        if sha256(path) != digest:
            return f"{path.name} is not what was written: its SHA-256 differs"
    return None


def is_sound(folder: Path) -> bool:
    """Tells whether training went well when a checkpoint was saved; one of an earlier version counts as sound."""
    try:
        return read_meta(folder).get("sound", True)
    except (OSError, ValueError):      # damaged
        return False


def last_sound(run: Path, before: int) -> Path | None:
    """Finds the newest whole and sound checkpoint with fewer than `before` steps."""
    return next((folder for folder in reversed(all_steps(run))
                 if step_of(folder) < before and is_sound(folder) and problem(folder) is None), None)


def latest(run: Path, names: tuple[str, ...] | None = None) -> Path | None:
    """Finds the newest whole checkpoint of a run; warns of each damaged one that is newer."""
    for folder in reversed(all_steps(run)):
        if (why := problem(folder, names)) is None:
            return folder
        warnings.warn(f"The checkpoint {folder} is damaged and is skipped: {why}.", stacklevel=2)
    return None


def set_aside_after(run: Path, step: int) -> None:
    """Renames the checkpoints past `step`, which `latest` found damaged, to `damaged-…`, as the run repeats them."""
    for folder in all_steps(run):
        if step_of(folder) > step:
            aside = folder.with_name(f"damaged-{folder.name}")
            remove(aside)
            os.rename(folder, aside)


def load(folder: Path, name: str) -> dict[str, Tensor]:
    return load_file(folder / f"{name}.safetensors")


def prune(run: Path, keep_last: int, keep_every: int) -> None:
    """Deletes all but the newest `keep_last` checkpoints and those at multiples of `keep_every` steps (0: none).

    The newest `keep_last` sound checkpoints stay, too. Also deletes what killed saves left, so only the process that
    has locked the run may call it.
    """
    remove_leftovers(run / "checkpoints")
    folders = all_steps(run)
    sound = [folder for folder in folders if is_sound(folder)]
    for folder in {*folders} - {*folders[-keep_last:], *sound[-keep_last:]}:
        if not (keep_every and step_of(folder) % keep_every == 0):
            # Renamed first, so that a kill in the middle leaves no half checkpoint under a valid name.
            doomed = folder.with_name(f".{folder.name}.tmp")
            os.rename(folder, doomed)
            remove(doomed)
