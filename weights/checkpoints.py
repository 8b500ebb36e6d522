"""Saves named tensors as checkpoint folders and loads them: complete or not at all, checked by hash, no pickle.

A run keeps its checkpoints in `<run>/checkpoints/step-00001000/`. Each has `<name>.safetensors` files and a
`meta.json`, which lists every file with its size and SHA-256, and has a SHA-256 of its own content.
"""

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.files import atomic_write, record_sha256, remove, sha256
from runtime.schema import read_json, read_record
from weights.records import CheckpointRecord


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def is_step(folder: Path) -> bool:
    return re.fullmatch(r"step-\d{8,18}", folder.name) is not None


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def all_steps(run: Path) -> list[Path]:
    """Lists a run's checkpoint folders from the oldest to the newest, complete or not."""
    folders = (run / "checkpoints").glob("step-*")
    return sorted(filter(is_step, folders), key=step_of)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder, what its meta.json holds, and which of its networks is meant."""

    folder: Path
    meta: dict[str, Any]
    weights: str                    # ema, model, ema-0.999 …

    @property
    def file(self) -> Path:
        return self.folder / f"{self.weights}.safetensors"

    @property
    def sha256(self) -> str:
        """The file's hash, even after training has pruned it."""
        return self.meta["files"][self.file.name]["sha256"]

    @property
    def run(self) -> Path | None:
        """The run that the checkpoint belongs to, if any."""
        return self.folder.parent.parent if self.folder.parent.name == "checkpoints" else None

    @cached_property
    def record(self) -> CheckpointRecord:
        """What meta.json records about the weights; raises ValueError if it describes none."""
        return read_record(CheckpointRecord, self.folder / "meta.json", "It does not describe a checkpoint; move the "
                           "weights elsewhere.", self.meta)

    @property
    def source(self) -> dict[str, Any]:
        """The fields of results that say which weights these are."""
        imported = {"imported": self.record.imported} if self.record.imported else {}
        return {"checkpoint": str(self.folder), "step": self.record.step, "weights_sha256": self.sha256, **imported}


# ---- writing --------------------------------------------------------------------------------------------------------


def write_tensors(folder: Path, files: Iterable[tuple[str, Mapping[str, Tensor]]]) -> dict[str, Any]:
    """Writes each (name, tensors) to `folder/name.safetensors`; returns each file's size and hash."""
    hashes = {}
    with ThreadPoolExecutor() as pool:  # a file is hashed while the next one is written
        for name, tensors in files:
            path = folder / f"{name}.safetensors"
            save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, path)
            hashes[path] = pool.submit(sha256, path)
    return {path.name: {"bytes": path.stat().st_size, "sha256": digest.result()} for path, digest in hashes.items()}


def save(
    folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], meta: dict[str, Any],
    complete: Iterable[Mapping[str, Tensor]] | None = None,
) -> None:
    """Writes `tensors[name]` to `folder/name.safetensors` and `meta` to `meta.json`, all or nothing.

    If tensors are sharded, `complete` yields the gathered ones of each file in turn. Raises OSError with the space
    needed and the space left.
    """
    files = zip(tensors, tensors.values() if complete is None else complete, strict=True)
    try:
        with atomic_write(folder) as partial:
            partial.mkdir()
            write_meta(partial, {**meta, "files": write_tensors(partial, files)})
    except (OSError, SafetensorError) as error:
        need = sum(t.numel() * t.element_size() for named in tensors.values() for t in named.values())
        free = shutil.disk_usage(folder.parent if folder.parent.is_dir() else ".").free
        raise OSError(
            f"The checkpoint {folder} could not be written ({error}): it needs {need / 2**20:,.0f} MiB and "
            f"{free / 2**20:,.0f} MiB are free. Earlier checkpoints are untouched."
        ) from error


def read_meta(folder: Path) -> dict[str, Any]:
    return read_json(folder / "meta.json")


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Writes meta.json with the hash of its content, which replaces any hash in `meta`."""
    content = json.loads(json.dumps({key: value for key, value in meta.items() if key != "sha256"}))
    content["sha256"] = record_sha256(content)
    (folder / "meta.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


# ---- reading --------------------------------------------------------------------------------------------------------


def check(folder: Path, names: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Reads a checkpoint's meta.json; raises ValueError unless the checkpoint, or its files `names`, are complete."""
    try:
        meta = read_meta(folder)
        files = {folder / Path(name).name: (record["bytes"], record["sha256"])
                 for name, record in meta["files"].items() if names is None or name in names}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"meta.json is missing or unreadable ({error})") from None
    content = {key: value for key, value in meta.items() if key != "sha256"}
    if meta.get("sha256") != record_sha256(content):
        raise ValueError("meta.json is not what was written: its SHA-256 differs")
    if is_step(folder) and meta.get("step") != step_of(folder):
        raise ValueError(f"meta.json is for step {meta.get('step')}")
    for path, (size, digest) in files.items():
        is_intact = False
        with contextlib.suppress(OSError):  # the run may delete it meanwhile
            is_intact = path.is_file() and path.stat().st_size == size and sha256(path) == digest
        if not is_intact:
            raise ValueError(f"{path.name[:100]} is missing, or not what was written: its size or SHA-256 differs")
    return meta


def is_sound(folder: Path) -> bool:
    """True if training went well when a checkpoint was saved; False for a damaged one."""
    try:
        return read_meta(folder)["sound"]
    except (OSError, LookupError, ValueError):
        return False


def last_sound(run: Path, before: int) -> Path | None:
    """Finds the newest complete and sound checkpoint with fewer than `before` steps."""
    for folder in reversed(all_steps(run)):
        with contextlib.suppress(ValueError):  # a damaged one
            if step_of(folder) < before and is_sound(folder) and check(folder):
                return folder
    return None


def read_latest(run: Path, names: tuple[str, ...] | None = None) -> tuple[Path, dict[str, Any]] | None:
    """Finds a run's newest complete checkpoint and reads its meta.json; warns of each damaged one that is newer.

    Returns None for a run without checkpoints; raises ValueError where all of them are damaged.
    """
    folders = all_steps(run)
    for folder in reversed(folders):
        try:
            return folder, check(folder, names)
        except ValueError as why:
            if not os.path.lexists(folder):  # the run deleted it, so it has a newer one
                return read_latest(run, names)
            reason = str(why).rstrip(".")
            warnings.warn(f"The checkpoint {folder} is damaged and is skipped: {reason}.", stacklevel=2)
    if folders:
        raise ValueError(f"None of the checkpoints in {run / 'checkpoints'} is complete; see the warnings. Restore "
                         f"one, or move the folder away to start from the beginning.")
    return None


def latest(run: Path) -> Path | None:
    """Finds the newest complete checkpoint of a run, as `read_latest` does."""
    newest = read_latest(run)
    return newest and newest[0]


def set_aside_after(run: Path, step: int) -> None:
    """Renames the checkpoints past `step`, which `latest` found damaged, to `damaged-…`; the run will repeat them."""
    for folder in all_steps(run):
        if step_of(folder) > step:
            aside = folder.with_name(f"damaged-{folder.name}")
            remove(aside)
            os.rename(folder, aside)


def load(folder: Path, name: str) -> dict[str, Tensor]:
    return load_file(folder / f"{name}.safetensors")


def prune(run: Path, step: int, keep_last: int, keep_every: int) -> None:
    """Deletes checkpoints up to `step` and what killed saves have left; only while this process has locked the run.

    It keeps the newest `keep_last`, the newest `keep_last` that are sound, and for each multiple of `keep_every` (0:
    none) the first one at or after it.
    """
    for left in (run / "checkpoints").glob(".step-*.tmp"):
        remove(left)
    folders = [folder for folder in all_steps(run) if step_of(folder) <= step]
    sound = [folder for folder in folders if is_sound(folder)]
    first = {step_of(folder) // keep_every: folder for folder in reversed(folders)} if keep_every else {}
    first.pop(0, None)
    for folder in {*folders} - {*folders[-keep_last:], *sound[-keep_last:], *first.values()}:
        # Renamed first, so that a kill in the middle leaves no half checkpoint under a valid name.
        doomed = folder.with_name(f".{folder.name}.tmp")
        os.rename(folder, doomed)
        remove(doomed)
