"""Named tensors <-> one folder: written beside and renamed, checked by hash, the latest that is whole. No pickle.

A run keeps its checkpoints in `<run>/checkpoints/step-00001000/`, each holding `<name>.safetensors` files and a
`meta.json`, which lists every file with its size and SHA-256. Whatever else is written goes through `beside` too.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.files import beside, remove, sha256
from runtime.schema import Record, Whole, read, read_json, shown

# ---- checkpoints ----------------------------------------------------------------------------------------------------


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def all_steps(run: Path) -> list[Path]:
    """Lists a run's checkpoint folders from the oldest to the newest, whole or not; other names are not ours."""
    folders = (run / "checkpoints").glob("step-*")
    ours = (folder for folder in folders if re.fullmatch(r"step-\d{8,18}", folder.name))
    return sorted(ours, key=step_of)


class File(Record):
    bytes: Whole
    sha256: str


class Files(Record):
    """What meta.json says of the files beside it."""

    files: dict[str, File]


def write_tensors(path: Path, names: Iterable[str], values: Iterator[Tensor]) -> None:
    """Writes a safetensors file of named tensors; all of them are held in memory, on the CPU."""
    try:
        save_file({name: next(values).detach().cpu().contiguous() for name in names}, path)
    except SafetensorError as error:      # which has the disk's error as words
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error


def stored(tensors: Mapping[str, Mapping[str, Tensor]]) -> Iterator[Tensor]:
    """Goes through the tensors of a checkpoint's files in the order in which they are written."""
    return (tensor for named in tensors.values() for tensor in named.values())


def save(
    folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], meta: dict, values: Iterator[Tensor] | None = None,
) -> None:
    """Writes `tensors[name]` to `folder/name.safetensors` and `meta` to `meta.json`, all of it or nothing.

    `values` brings the tensors themselves in the order of `stored`, where they are to be gathered first. A
    checkpoint that is already there and whole is left alone. Raises OSError with the room needed and the room left
    when it cannot be written, and then nothing of it stays behind.
    """
    if folder.is_dir() and problem(folder) is None:
        return
    values = stored(tensors) if values is None else values
    try:
        with beside(folder) as partial:
            partial.mkdir()
            files = {}
            for name, named in tensors.items():
                path = partial / f"{name}.safetensors"
                write_tensors(path, named, values)
                files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
            (partial / "meta.json").write_text(json.dumps({**meta, "files": files}, indent=1), encoding="utf-8")
    except OSError as error:
        need = sum(t.numel() * t.element_size() for named in tensors.values() for t in named.values())
        free = shutil.disk_usage(folder.parent if folder.parent.is_dir() else ".").free
        raise OSError(
            f"The checkpoint {folder} could not be written ({error}): it needs {need / 2**20:,.0f} MiB and "
            f"{free / 2**20:,.0f} MiB are free. Nothing of it was kept; earlier checkpoints are untouched."
        ) from error


def read_meta(folder: Path) -> dict:
    """Reads meta.json; raises ValueError where it is no group of values."""
    plain = read_json(folder / "meta.json")
    if not isinstance(plain, dict):
        raise ValueError(f"{folder / 'meta.json'} holds {shown(plain)}, which is no record")
    return plain


def problem(folder: Path, names: tuple[str, ...] | None = None) -> str | None:
    """Says what keeps a checkpoint from being whole, or None; `names` limits the check to some of its files."""
    try:
        files = read(Files, read_meta(folder)).files
    except (OSError, ValueError) as error:
        return f"meta.json is missing or unreadable ({error})"
    for file_name, record in files.items():
        path = folder / file_name
        if names is not None and path.stem not in names:
            continue
        if not path.is_file():
            return f"{file_name} is missing"
        if path.stat().st_size != record.bytes:
            return f"{file_name} has {path.stat().st_size} bytes where {record.bytes} were written"
        if sha256(path) != record.sha256:
            return f"{file_name} is not what was written: its SHA-256 differs"
    return None


def is_sound(folder: Path) -> bool:
    """Tells whether training was well when a checkpoint was saved; those of earlier versions do not say, and count."""
    with contextlib.suppress(OSError, ValueError):
        return read_meta(folder).get("sound", True) is not False
    return False


def last_sound(run: Path, before: int) -> Path | None:
    """Finds the newest checkpoint with fewer than `before` steps from which training was well."""
    return next((folder for folder in reversed(all_steps(run))
                 if step_of(folder) < before and is_sound(folder) and problem(folder) is None), None)


def latest(run: Path, names: tuple[str, ...] | None = None) -> Path | None:
    """Finds the newest checkpoint of a run that is whole; each newer one that is not is named in a warning."""
    folders = all_steps(run)
    while folders:
        folder = folders.pop()
        why = problem(folder, names)
        if why is None:
            return folder
        if folder.is_dir():
            warnings.warn(f"The checkpoint {folder} is damaged and is passed over: {why}.", stacklevel=2)
        else:      # training has pruned it, and saved a newer one before that
            folders = all_steps(run)
    return None


def set_aside_after(run: Path, step: int) -> None:
    """Renames the checkpoints past `step` to `damaged-…`, so that none of them is counted among those to keep.

    They are the ones that `latest` passed over; the run goes on from `step` and will write those steps anew.
    """
    for folder in all_steps(run):
        if step_of(folder) > step:
            aside = folder.with_name(f"damaged-{folder.name}")
            remove(aside)
            os.rename(folder, aside)


def load(folder: Path, name: str, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Reads a file of a checkpoint.

    Raises ValueError where its tensors are not finite, or have not the names, kinds and shapes of `like`.
    """
    file = folder / f"{name}.safetensors"
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is no whole safetensors file: {error}.") from error
    like = tensors if like is None else like
    if odd := sorted(tensors.keys() ^ like.keys()):
        raise ValueError(f"{file} is not of this run: {odd[0]} is {'unknown' if odd[0] in tensors else 'missing'}, and "
                         f"{len(odd) - 1} others. Move the checkpoint away, or give the settings that it began with.")
    for key, value in tensors.items():
        if value.shape != like[key].shape or value.is_floating_point() != like[key].is_floating_point():
            raise ValueError(f"{file} is not of this run: {key} is {value.dtype} {tuple(value.shape)} there, and "
                             f"{like[key].dtype} {tuple(like[key].shape)} here. Move the checkpoint away, or give the "
                             f"settings that it began with.")
        if not value.sum().isfinite():
            raise ValueError(f"{file} holds values in {key} that are not finite: move the checkpoint away to go on "
                             f"from an earlier one.")
    return tensors


def prune(run: Path, keep_last: int, keep_every: int) -> None:
    """Deletes all but the newest `keep_last` checkpoints and those at multiples of `keep_every` steps (0: none).

    Of those that were saved while training was well, the newest `keep_last` stay as well, whatever comes after.
    Also sweeps what killed saves left behind, so only the process that holds the run may call it.
    """
    for left in (run / "checkpoints").glob(".step-*.tmp"):
        remove(left)
    folders = all_steps(run)
    sound = [folder for folder in folders if is_sound(folder)]
    for folder in {*folders} - {*folders[-keep_last:], *sound[-keep_last:]}:
        if not (keep_every and step_of(folder) % keep_every == 0):
            # Renamed first, so that a kill in the middle leaves no half checkpoint under a valid name.
            doomed = folder.with_name(f".{folder.name}.tmp")
            os.rename(folder, doomed)
            remove(doomed)
