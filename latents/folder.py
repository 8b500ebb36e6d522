"""Opens, checks and reads latent folders by index.

Files are read row by row and never completely. Memory per image is 4 bytes for the epoch's permutation, 1 for the
choice of mirrored copies, and 1 or 2 for the label.
"""

import hashlib
import json
import math
import os
import resource
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator
from tqdm import tqdm

from autoencoder import Convention
from latents.listing import spread
from runtime.files import is_inside, record_sha256, sha256
from runtime.schema import (
    Classes,
    ConventionRecord,
    Count,
    NonNegativeInt,
    Number,
    Positive,
    Record,
    Size,
    Text,
    read_record,
)
from runtime.untrusted import Rows, reading

Kind = Literal["sample", "moments"]
MAX_CLASSES = 1_000_000  # a larger class number is a mistake, and a table of so many classes would fill the memory
NUM_PROBED = 512  # latents checked on opening, evenly spread over the shards


# ---- metadata.json --------------------------------------------------------------------------------------------------


class Shard(Record):
    """An entry of `shards`: its files, and how many images they hold."""

    latents: str
    labels: str
    mirrored: str | None = None
    count: NonNegativeInt
    sha256: dict[str, Text] = {}  # by file name; {} if another tool wrote the folder without them


class ArrayRecord(Record):
    """An entry of `arrays`, stored in <name>-*.npy, and of mirrored copies in <name>_mirrored-*.npy."""

    shape: list[Size]  # of one row
    dtype: Text


class Metadata(ConventionRecord):
    """metadata.json (docs/data.md), without the keys that no reader needs."""

    format: Literal[1]
    count: Count
    shape: Annotated[list[Size], Field(min_length=3, max_length=3)]  # [C, h, w]
    dtype: Literal["float16"]
    kind: Kind
    mirrored: bool
    num_classes: Classes
    class_names: list[str] | None
    display_names: list[str] | None = None
    autoencoder: str
    scale: Positive
    shift: Number
    shards: list[Shard]
    content: Text | None = None     # a hash of all rows, whichever shards they are in; None if another tool wrote them
    content_of: Text | None = None  # a hash of the shards' `sha256` that `content` belongs to
    arrays: dict[str, ArrayRecord] = {}

    @model_validator(mode="after")
    def _agrees(self) -> "Metadata":
        for key, expected, found in (("class_names", self.num_classes, self.class_names),
                                     ("display_names", self.num_classes, self.display_names),
                                     ("shards", self.count, range(sum(shard.count for shard in self.shards)))):
            if found is not None and len(found) != expected:
                raise ValueError(f"it says {expected}, but its {key} have {len(found)}.")
        Convention.read(self.model_dump()).require(self.shape[0], "its record")
        return self


def row_types(metadata: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Maps the names of a shard's files, <name>-*.npy, to the shape and type of a row."""
    channels, *sides = metadata["shape"]
    row = (channels * (2 if metadata["kind"] == "moments" else 1), *sides)
    arrays = {name: (tuple(array["shape"]), array["dtype"]) for name, array in metadata.get("arrays", {}).items()}
    types: dict[str, tuple[tuple[int, ...], str]] = {"latents": (row, "float16"), "labels": ((), "int64")}
    if metadata["mirrored"]:
        types["mirrored"] = types["latents"]
        arrays |= {f"{name}_mirrored": of_row for name, of_row in arrays.items()}
    return types | arrays


# ---- a data set of latents ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Latents:
    """A data set, which reads latents and labels by index. `open_latents` opens one.

    `shape` is (C, h, w) of one latent. If `kind` is "moments", stored rows have 2C channels [mean, std].
    `fingerprint` identifies the content independently of its path and shards, so a folder that was moved or prepared
    again is still the same data set. It covers the `content` of metadata.json (without one, the names, sizes and hashes
    of the files), all labels, and a few hundred latents.
    `display_names` are class names for people; by default they equal `class_names`.
    `classes` lists the labels that occur, in order. There may be fewer of them than `num_classes`.
    """

    where: str                      # a name for messages
    meta: Metadata
    labels: np.ndarray              # (count,)
    rows: dict[str, list[Rows]]     # of "latents" and of each array: each shard's, and then their mirrored copies
    fingerprint: str = ""           # set by `open_latents`

    def __post_init__(self) -> None:
        meta = self.meta
        self.kind, self.mirrored, self.num_classes, self.autoencoder = (
            meta.kind, meta.mirrored, meta.num_classes, meta.autoencoder)
        self.class_names, self.display_names = meta.class_names, meta.display_names or meta.class_names
        self.shape = (meta.shape[0], meta.shape[1], meta.shape[2])
        self.count, self.classes = len(self.labels), np.unique(self.labels).tolist()
        # The index of each shard's first image, and the count at the end.
        self.starts = np.cumsum([0, *(shard.count for shard in meta.shards)])
        self.convention = Convention.read(meta.model_dump())    # turns the autoencoder's latents into the network's

    def read(self, indices: np.ndarray, mirror: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns (stored (B, C or 2C, h, w) float16, labels (B,) int64) for `indices` (B,) int64, in that order.

        Where `mirror` (B,) bool is True, the latent of the flipped image is returned.
        """
        assert len(indices) and 0 <= indices.min() and indices.max() < self.count
        assert mirror is None or self.mirrored or not mirror.any()
        return self.rows_of(["latents"], indices, mirror)["latents"], self.labels[indices].astype(np.int64)

    def rows_of(
        self, names: Iterable[str], indices: np.ndarray, mirror: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Returns rows (B, …) of "latents" or arrays for `indices`, in the files' own types."""
        order = np.argsort(indices)  # so that a file is read in order
        shard = np.searchsorted(self.starts, indices[order], side="right") - 1
        row = indices[order] - self.starts[shard]
        if mirror is not None:
            shard = shard + mirror[order] * (len(self.starts) - 1)
        places, found = [*zip(order.tolist(), shard.tolist(), row.tolist(), strict=True)], {}
        for name in names:
            shards = self.rows[name]
            found[name] = rows = np.empty((len(indices), *shards[0].shape[1:]), shards[0].dtype)
            for i, s, r in places:
                rows[i] = shards[s].read(r)
        return found

    def require(self, *, shape: tuple[int, int, int], num_classes: int) -> None:
        """Raises ValueError if the latents do not fit a network for `shape` (C, h, w) and `num_classes`."""
        if tuple(shape) != self.shape:
            raise ValueError(f"{self.where} holds latents {self.shape}, but the network is set up for squares of "
                             f"{tuple(shape)}: set data=folder, which reads the side from the folder, or "
                             f"data.channels={self.shape[0]} and data.input_size={self.shape[1]}.")
        if num_classes < self.num_classes:
            raise ValueError(f"{self.where} has {self.num_classes} classes, but the network is set up for "
                             f"{num_classes}: set data.num_classes={self.num_classes} or more.")


def open_latents(path: str | Path) -> Latents:
    """Opens a latent folder (docs/data.md); raises ValueError for data that is missing, damaged or wrongly scaled."""
    folder, record = Path(path), Path(path) / "metadata.json"
    if not record.is_file():
        raise ValueError(f"{folder} holds no metadata.json, which marks a complete latent folder: rerun the command "
                         f"that began it, prepare images by scripts/prepare_latents.py, import other code's latents by "
                         f"scripts/import_latents.py, or try the built-in shapes with `bash scripts/quickstart.sh`.")
    meta = read_record(Metadata, record, "docs/data.md has the format, and scripts/prepare_latents.py writes it.")
    types = row_types(meta.model_dump())
    allow_open_files()
    files = {name: [file_of(folder, shard, name) for shard in meta.shards] for name in types}
    rows = {name: [open_npy(file, (shard.count, *shape), dtype)
                   for file, shard in zip(files[name], meta.shards, strict=True)]
            for name, (shape, dtype) in types.items()}
    labels = [part.read(0, shard.count) for part, shard in zip(rows["labels"], meta.shards, strict=True)]
    for file, part in zip(files["labels"], labels, strict=True):
        check_labels(part, meta.num_classes, file, 'correct the labels or "num_classes" in the record')
    pairs = [pair for paths in files.values() for pair in zip(paths, meta.shards, strict=True)]
    hashes = {file: shard.sha256[file.name] for file, shard in pairs if file.name in shard.sha256}
    check_hashes(record, hashes)
    copies = {name: "mirrored" if name == "latents" else f"{name}_mirrored" for name in ("latents", *meta.arrays)}
    latents = Latents(
        str(folder), meta, np.concatenate(labels, dtype=np.min_scalar_type(meta.num_classes - 1), casting="unsafe"),
        {name: rows[name] + rows.get(mirrored, []) for name, mirrored in copies.items()})
    indices = spread(latents.count, NUM_PROBED)
    probed = latents.rows_of(copies, indices, np.arange(len(indices)) % 2 == 1 if meta.mirrored else None)
    where = f"{folder} ({len(indices)} of {latents.count} latents checked)"
    for name, part in probed.items():
        finite = np.isfinite(part).reshape(len(part), -1).all(axis=1)
        if not finite.all():
            raise ValueError(f"{where}: {(~finite).sum()} {name} hold NaN or infinity, such as image "
                             f"{indices[~finite][0]}. Prepare them again; a network in half precision is the usual "
                             f"cause.")
    check_values(probed["latents"].astype(np.float64), latents.kind, latents.autoencoder, where, "a latent folder "
                 "needs latents * scale, or [mean, exp(logvar / 2)] * scale for kind moments, as "
                 "scripts/prepare_latents.py writes them")

    # `content` is not of these files where somebody has changed a shard.
    is_known = meta.content_of == record_sha256({"shards": [shard.sha256 for shard in meta.shards]})
    sizes = [(file.name, file.stat().st_size) for file in [*files["latents"], *files.get("mirrored", [])]]
    named: list[Any] = [[], meta.content] if is_known else [sizes, *hashes.values()]
    identity = hashlib.sha256(json.dumps([
        named[0], latents.count, latents.shape, "float16", latents.kind, latents.mirrored, latents.num_classes,
        latents.class_names, latents.autoencoder, *latents.convention.record().values(), *named[1:]]).encode())
    identity.update(latents.labels.tobytes() + probed["latents"].tobytes())
    for name in sorted(meta.arrays):
        identity.update(name.encode() + probed[name].tobytes())
    latents.fingerprint = identity.hexdigest()[:32]
    return latents


def file_of(folder: Path, shard: Shard, name: str) -> Path:
    """Returns the path of a shard's file for a name in `row_types`. Raises ValueError if it lies outside the folder."""
    # The record names only the files of latents, labels and mirrored.
    named = {"labels": shard.labels, "mirrored": shard.mirrored}
    file = named.get(name) or shard.latents.replace("latents-", f"{name}-")
    if Path(file).name != file or not is_inside(folder / file, folder):
        raise ValueError(f"{folder / 'metadata.json'} names {file!r}, which is not a plain file in that folder: "
                         f"copy the file there, as hf download --local-dir does, and name it without a path.")
    return folder / file


def open_npy(file: Path, shape: tuple[int, ...], dtype: str) -> Rows:
    """Opens an npy file. Raises ValueError if it is damaged, or has another shape or type."""
    with reading(file, "a complete npy file of numbers", "copy the folder again, or delete it and prepare it again"):
        rows = Rows(file)
    if rows.shape != shape or rows.dtype != dtype:
        raise ValueError(f"{file} has {rows.dtype} {rows.shape}, instead of the {dtype} {shape} of metadata.json and "
                         f"docs/data.md: write it so, or copy the folder again.")
    return rows


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_hashes(record: Path, hashes: dict[Path, str]) -> None:
    """Raises ValueError if a file does not have its hash in `record`, the folder's metadata.json.

    A file that has the record's own time is known to have its hash; others were changed or copied since, and are read
    completely. If all are right, they get the record's time (`mark_known`), so that the next start is quick.
    """
    known = record.stat().st_mtime_ns
    files = [file for file in hashes if file.stat().st_mtime_ns != known]
    with ThreadPoolExecutor() as pool:
        for file, digest in zip(files, tqdm(pool.map(sha256, files), "comparing with metadata.json", len(files),
                                            unit=" files", delay=2), strict=True):
            if digest != hashes[file]:
                raise ValueError(f"{file} is not as it was written (SHA-256 {digest[:8]}…, in metadata.json "
                                 f"{hashes[file][:8]}…): copy it or prepare the folder again. If the change is yours, "
                                 f'remove "sha256" from that shard in metadata.json.')
    with suppress(OSError):  # another user's folder, or a disk that can only be read
        mark_known(record, files)


def mark_known(record: Path, files: Iterable[Path]) -> None:
    """Gives files whose hashes are known to be in `record` its time; times are compared only for equality."""
    time = record.stat().st_mtime_ns
    for file in files:
        os.utime(file, ns=(time, time))


def check_labels(labels: np.ndarray, num_classes: int, where: str | Path, remedy: str) -> None:
    """Raises ValueError for labels that are no integers, or ending in `remedy`, beyond 0..num_classes - 1."""
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise ValueError(f"{where} has labels of type {labels.dtype} and shape {labels.shape}, not one integer each: "
                         f"write int(label), or the place of the 1 in a row of 0 and 1.")
    low, high = labels.min(initial=0), labels.max(initial=0)
    if low < 0 or high >= num_classes:
        bad = low if low < 0 else high
        raise ValueError(f"{where} has label {bad} (row {int(np.argmax(labels == bad))}), outside "
                         f"0..{num_classes - 1}: {remedy}.")


def check_values(stored: np.ndarray, kind: Kind, autoencoder: str, where: str, remedy: str) -> None:
    """Raises ValueError, ending in `remedy`, for rows that seem to be of another kind, or to have the wrong scale."""
    mean, second = np.split(stored, [(stored.shape[1] + 1) // 2], axis=1)
    half = f"{where}: the second half of the channels"
    if kind == "sample" and stored.shape[1] % 2 == 0 and second.max() < 0:
        raise ValueError(f"{half} is always negative, so these look like [mean, log-variance], not samples: {remedy}.")
    if kind == "moments" and second.min() < 0:
        raise ValueError(f"{half} reaches {second.min():.3g}, but a standard deviation is never negative, so these "
                         f"look like [mean, logvar]: {remedy}.")
    if kind == "sample":
        mean, second = stored, np.zeros(1)
    low, high = mean.min(), mean.max()
    deviation = math.sqrt(mean.var() + np.square(second).mean())  # the standard deviation of mean + std * eps
    if autoencoder == "identity":
        problem = f"{where}: pixels range from {low:.4g} to {high:.4g}, but must lie in -1..1: store image / 127.5 - 1."
        is_wrong, may_be_wrong = low < -1.05 or high > 1.05, low >= 0 and high > 0.5    # pale pictures look so, too
    else:
        problem = f"{where}: a standard deviation of {deviation:.3g}, instead of about 1: {remedy}."
        may_be_wrong = not 0.3 <= deviation <= 3    # a user's own autoencoder may have latents below
        is_wrong = deviation > 3 or may_be_wrong and autoencoder in ("sd_vae_ema", "sd_vae_mse")
    if is_wrong:
        raise ValueError(problem)
    if may_be_wrong:
        warnings.warn(problem, stacklevel=3)


def allow_open_files() -> None:
    """Raises this process's limit on open files to the most that it may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
