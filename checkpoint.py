"""Named tensors <-> one folder: written beside and renamed, checked by hash, the latest that is whole. No pickle.

A run keeps its checkpoints in `<run>/checkpoints/step-00001000/`, each holding `<name>.safetensors` files and a
`meta.json`, which lists every file with its size and SHA-256.
"""

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def all_steps(run: Path) -> list[Path]:
    """Lists a run's checkpoint folders from the oldest to the newest, whole or not."""
    return sorted((run / "checkpoints").glob("step-*"), key=step_of)


def write_text(path: Path, text: str) -> None:
    """Writes a small file so that a kill leaves either the old content or the new one."""
    beside = path.with_name(f".{path.name}.tmp")
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def read_rows(path: Path) -> list[dict]:
    """Reads a file of JSON lines, without a last one that a kill has halved."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []:
        with contextlib.suppress(ValueError):
            if line.endswith("\n"):
                rows.append(json.loads(line))
    return rows


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], meta: dict) -> None:
    """Writes `tensors[name]` to `folder/name.safetensors` and `meta` to `meta.json`, all of it or nothing.

    A checkpoint that is already there and whole is left alone. Raises OSError with the room needed and the room left
    when it cannot be written, and then nothing of it stays behind.
    """
    if folder.is_dir() and problem(folder) is None:
        return
    beside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)     # what a killed save left
    try:
        beside.mkdir(parents=True)
        files = {}
        for name, named in tensors.items():
            path = beside / f"{name}.safetensors"
            save_file({key: value.detach().contiguous() for key, value in named.items()}, path)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        write_text(beside / "meta.json", json.dumps({**meta, "files": files}, indent=1))
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        need = sum(t.numel() * t.element_size() for named in tensors.values() for t in named.values())
        free = shutil.disk_usage(folder.parent if folder.parent.is_dir() else ".").free
        raise OSError(
            f"The checkpoint {folder} could not be written ({error}): it needs {need / 2**20:,.0f} MiB and "
            f"{free / 2**20:,.0f} MiB are free. Nothing of it was kept; earlier checkpoints are untouched."
        ) from error
    shutil.rmtree(folder, ignore_errors=True)     # only ever a broken one
    os.rename(beside, folder)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_meta(folder: Path) -> dict:
    return json.loads((folder / "meta.json").read_text(encoding="utf-8"))


def problem(folder: Path, names: tuple[str, ...] | None = None) -> str | None:
    """Says what keeps a checkpoint from being whole, or None; `names` limits the check to some of its files."""
    try:
        files = read_meta(folder)["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"meta.json is missing or unreadable ({error})"
    for file_name, record in files.items():
        path = folder / file_name
        if names is not None and path.stem not in names:
            continue
        if not path.is_file():
            return f"{file_name} is missing"
        if path.stat().st_size != record["bytes"]:
            return f"{file_name} has {path.stat().st_size} bytes where {record['bytes']} were written"
        if sha256(path) != record["sha256"]:
            return f"{file_name} is not what was written: its SHA-256 differs"
    return None


def latest(run: Path, names: tuple[str, ...] | None = None) -> Path | None:
    """Finds the newest checkpoint of a run that is whole; each newer one that is not is named in a warning."""
    for folder in reversed(all_steps(run)):
        why = problem(folder, names)
        if why is None:
            return folder
        warnings.warn(f"The checkpoint {folder} is damaged and is passed over: {why}.", stacklevel=2)
    return None


def set_aside_after(run: Path, step: int) -> None:
    """Renames the checkpoints past `step` to `damaged-…`, so that none of them is counted among those to keep.

    They are the ones that `latest` passed over; the run goes on from `step` and will write those steps anew.
    """
    for folder in all_steps(run):
        if step_of(folder) > step:
            aside = folder.with_name(f"damaged-{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(folder, aside)


def load(folder: Path, name: str) -> dict[str, Tensor]:
    return load_file(folder / f"{name}.safetensors")


def prune(run: Path, keep_last: int, keep_every: int) -> None:
    """Deletes all but the newest `keep_last` checkpoints and those at multiples of `keep_every` steps (0: none).

    Also sweeps what killed saves left behind, so only the process that holds the run may call it.
    """
    for left in (run / "checkpoints").glob(".step-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    for folder in all_steps(run)[:-keep_last]:
        if not (keep_every and step_of(folder) % keep_every == 0):
            # Renamed first, so that a kill in the middle leaves no half checkpoint under a valid name.
            doomed = folder.with_name(f".{folder.name}.tmp")
            os.rename(folder, doomed)
            shutil.rmtree(doomed)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Flattens an optimizer's state to `<parameter>.<state>` tensors."""
    return {f"{name}.{key}": value for name, p in model.named_parameters() for key, value in optimizer.state[p].items()}


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restores what `optimizer_tensors` flattened; learning rate and the other settings stay as they are."""
    state: dict[int, dict[str, Tensor]] = {}
    index = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    for key, value in tensors.items():
        name, _, entry = key.rpartition(".")
        state.setdefault(index[name], {})[entry] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
