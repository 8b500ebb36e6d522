"""Opens, checks and reads latent folders and TREAD's webdataset tars by index.

Files are memory-mapped and never read completely, unless all latents are copied to a device. Memory per image is 4
bytes for the epoch's permutation, 1 for the choice of mirrored copies, 1 or 2 for the label and, in tars, 8 for the
offset.
"""

import hashlib
import json
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import Field

from autoencoder import SD_VAE_SCALE, Convention
from latents.labels import check_labels
from latents.listing import find_tars, spread
from latents.tars import allow_open_files, map_tars, refuse_two_splits
from routing_module import kept_tokens
from runtime.files import NPY_ERRORS, is_inside, refuse_pointer
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
    as_argument,
    first_line,
    one_of,
    read_record,
)

KINDS = ("sample", "moments")
WEIGHT = "weight"  # what objectives call the masks in masks-*.npy
NUM_PROBED = 512  # latents checked on opening, evenly spread over the shards
CHUNK = 4096  # latents copied to a device at once


# ---- a data set of latents ------------------------------------------------------------------------------------------


class Array(NamedTuple):
    """An additional array with one row per latent: a map of each shard's file, and what mirroring does to a row."""

    shards: list[np.ndarray]
    mirror: str             # same: nothing | flip: flips the last axis | files: reads the files after the plain ones


@dataclass(eq=False)
class Latents:
    """A data set, which reads latents and labels by index. `open_latents` opens one.

    `shape` is (C, h, w) of one latent. If `kind` is "moments", stored rows have 2C channels [mean, std].
    `fingerprint` identifies the content independently of its path, so a moved folder is still the same data set.
    `display_names` are class names for people; by default they equal `class_names`.
    `classes` lists the labels that occur, in order. There may be fewer of them than `num_classes`.
    """

    where: str                                  # a name for messages
    files: list[Path]                           # plain shards, then mirrored ones; or tars
    shards: list[Any]                           # the latents of each file, indexed by row
    starts: np.ndarray                          # index of each shard's first image, and the count at the end
    labels: np.ndarray                          # (count,)
    stored_shape: tuple[int, int, int]          # of one latent on disk
    stored_dtype: np.dtype
    kind: str                                   # one of KINDS
    mirrored: bool
    num_classes: int
    class_names: list[str] | None
    autoencoder: str
    convention: Convention                      # turns the autoencoder's latents into the network's
    applied: Convention | None = None           # for tars: the part of it that `read` still applies
    display_names: list[str] | None = None
    arrays: dict[str, Array] = field(default_factory=dict)  # keyed by the names that objectives use

    def __post_init__(self):
        self.display_names = self.display_names or self.class_names
        self.count, self.classes = len(self.labels), np.unique(self.labels).tolist()
        self.shape = (self.stored_shape[0] // (2 if self.kind == "moments" else 1), *self.stored_shape[1:])
        record = [[(file.name, file.stat().st_size) for file in self.files], self.count, self.shape,
                  str(self.stored_dtype), self.kind, self.mirrored, self.num_classes, self.class_names,
                  self.autoencoder, *(self.applied or self.convention).record().values()]
        content = hashlib.sha256(json.dumps(record).encode())
        content.update(self.labels)
        content.update(self._read_stored(*self.probe()))
        for name, rows in sorted(self.rows_of(self.arrays, *self.probe()).items()):
            content.update(rows.astype(np.float16) if name == WEIGHT else name.encode() + rows.tobytes())
        self.fingerprint = content.hexdigest()[:32]

    def read(self, indices: np.ndarray, mirror: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns (stored (B, C or 2C, h, w) float16, labels (B,) int64) for `indices` (B,) int64, in that order.

        Where `mirror` (B,) bool is True, the latent of the flipped image is returned.
        """
        stored = self._read_stored(indices, mirror)
        if self.applied is not None:
            convert = self.applied.moments if self.kind == "moments" else self.applied.latent
            stored = convert(torch.from_numpy(stored).float()).half().numpy()
        return stored, self.labels[indices].astype(np.int64)

    def rows_of(
        self, names: Iterable[str], indices: np.ndarray, mirror: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Returns rows (B, …) of the arrays in `names` for `indices`, in the files' own types."""
        rows = {}
        for name in names:
            array = self.arrays[name]
            rows[name] = np.empty((len(indices), *array.shards[0].shape[1:]), array.shards[0].dtype)
            self._fill(rows[name], array.shards, indices, mirror if array.mirror == "files" else None)
            if mirror is not None and array.mirror == "flip":
                flipped = mirror.reshape(-1, *[1] * (rows[name].ndim - 1))
                rows[name] = np.where(flipped, rows[name][..., ::-1], rows[name])
        return rows

    def most_kept(self, patch_size: int) -> tuple[int, int]:
        """Reads all masks and finds the one for which `kept_tokens` keeps the most tokens.

        Returns that number of tokens, and the index of its image.
        """
        most, image = 0, 0
        for start in range(0, self.count, CHUNK):
            indices = np.arange(start, min(start + CHUNK, self.count))
            weight = torch.from_numpy(self.rows_of([WEIGHT], indices)[WEIGHT]).float()
            counts = kept_tokens(weight, patch_size).sum(dim=1)
            if (found := int(counts.max())) > most:
                most, image = found, start + int(counts.argmax())
        return most, image

    def to_device(self, device: torch.device | str, names: Sequence[str] = ()) -> tuple[torch.Tensor, ...]:
        """Copies the complete data set to a device: latents, labels, and the arrays in `names`, in that order.

        With mirrored copies, latents and arrays have twice as many rows, and the copy of image i is row i + count.
        """
        tensors: list[torch.Tensor] = []
        for copy in range(2 if self.mirrored else 1):
            for start in range(0, self.count, CHUNK):
                indices = np.arange(start, min(start + CHUNK, self.count))
                mirror = np.full(len(indices), copy == 1)
                arrays = [self.read(indices, mirror)[0], *self.rows_of(names, indices, mirror).values()]
                parts = [torch.from_numpy(array) for array in arrays]
                if not tensors:
                    tensors = [torch.empty((self.count * (1 + self.mirrored), *part.shape[1:]), dtype=part.dtype,
                                           device=device) for part in parts]
                for tensor, part in zip(tensors, parts, strict=True):
                    tensor[copy * self.count + start :][: len(part)] = part
        return tensors[0], torch.from_numpy(self.labels.astype(np.int64)).to(device), *tensors[1:]

    def find_damaged(self, indices: np.ndarray, mirror: np.ndarray | None, names: Iterable[str]) -> str | None:
        """Returns a text with the file and row of the first of `indices` that holds NaN or infinity, or None."""
        for name, rows in {"latents": self.read(indices, mirror)[0], **self.rows_of(names, indices, mirror)}.items():
            finite = np.isfinite(rows).reshape(len(rows), -1).all(axis=1)
            if finite.all():
                continue
            first = int(np.argmin(finite))
            shard = int(np.searchsorted(self.starts, indices[first], side="right")) - 1
            is_copy = mirror is not None and bool(mirror[first])
            file = self.files[shard + is_copy * (len(self.starts) - 1)]
            if name != "latents":  # an array's files are named after the latents' and have the same rows
                own = "_mirrored" if is_copy and self.arrays[name].mirror == "files" else ""
                name = "masks" if name == WEIGHT else name + own
                file = file.with_name(self.files[shard].name.replace("latents-", f"{name}-"))
            return f"{file}, row {indices[first] - self.starts[shard]} (image {indices[first]} of the data set)"
        return None

    def require(self, *, shape: tuple[int, int, int], num_classes: int) -> None:
        """Raises ValueError if the latents do not fit a network for `shape` (C, h, w) and `num_classes`."""
        if self.shape[1] != self.shape[2]:
            raise ValueError(f"{self.where} holds latents {self.shape}, which must be (channels, side, side): move the "
                             f"channels to the front, or crop the images to squares.")
        if tuple(shape) != self.shape:
            or_kind = f", or data.kind={'moments' if self.kind == 'sample' else 'sample'}" if self.applied else ""
            raise ValueError(f"{self.where} holds latents {self.shape}, but the network is set up for {tuple(shape)}: "
                             f"set data=folder, which reads the shape from the folder, or "
                             f"data.channels={self.shape[0]} and data.input_size={self.shape[1]}{or_kind}.")
        if num_classes < self.num_classes:
            raise ValueError(f"{self.where} has {self.num_classes} classes, but the network is set up for "
                             f"{num_classes}: set data.num_classes={self.num_classes} or more.")

    def probe(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns (indices, mirror) for a few hundred latents, spread over all shards and always the same."""
        indices = spread(self.count, NUM_PROBED)
        return indices, np.arange(len(indices)) % 2 == 1 if self.mirrored else None

    def _read_stored(self, indices: np.ndarray, mirror: np.ndarray | None = None) -> np.ndarray:
        assert len(indices) and 0 <= indices.min() and indices.max() < self.count
        assert mirror is None or self.mirrored or not mirror.any()
        rows = np.empty((len(indices), *self.stored_shape), self.stored_dtype)
        self._fill(rows, self.shards, indices, mirror)
        return rows

    def _fill(
        self, rows: np.ndarray, shards: Sequence, indices: np.ndarray, mirror: np.ndarray | None = None,
    ) -> None:
        """Copies the rows of `indices` from the plain shards or, where `mirror` is True, from the mirrored ones."""
        order = np.argsort(indices)  # so that a file's pages are visited in order
        shard = np.searchsorted(self.starts, indices[order], side="right") - 1
        row = indices[order] - self.starts[shard]
        shard = shard if mirror is None else shard + mirror[order] * (len(self.starts) - 1)
        # Row by row is faster than fancy indexing per shard: a shuffled batch has only one or two rows in most shards.
        for i, s, r in zip(order.tolist(), shard.tolist(), row.tolist(), strict=True):
            rows[i] = shards[s][r]


def open_latents(path: str | Path, *, kind: str | None = None, scale: float | None = None,
                 num_classes: int | None = None) -> Latents:
    """Opens a latent folder (docs/data.md), or tars of `{key}.latent.npy` and `{key}.cls`.

    For tars, `path` is a folder, a glob, or braces as in shard-{000000..000127}.tar. A latent folder records its kind
    and scale, so those arguments must be None or agree with it. Tars have no such record: `kind` is "sample" or
    "moments" ([mean, logvar]). The autoencoder's own values become z * scale; the default `scale` is 1 for samples,
    which TREAD stores scaled, and 0.18215 for moments. Labels lie below `num_classes` (default 1000).

    Opening tars for the first time writes an index next to them, so let one rank open them before the others. Raises
    ValueError for data that is missing, unfinished, damaged, or not scaled for the network.
    """
    path = Path(path)
    if (path / "metadata.json").is_file():
        latents = _open_folder(path, kind, scale)
    elif (path / "preparing.json").exists() or any(path.glob("latents-*.npy")):
        raise ValueError(f"{path}: preparation has not finished; rerun the same command to resume it.")
    elif tars := find_tars(path):
        latents = _open_tars(path, tars, kind, scale, num_classes)
    else:
        problem, source, out = f"There is no data set at {path}.", "source=<images>", path
        if path.is_dir():
            problem = f"{path} holds neither metadata.json, which marks a latent folder, nor .tar files."
            source, out = as_argument("source", path), Path("data") / path.name
        raise ValueError(f"{problem} Prepare one with `python scripts/prepare_latents.py {source} "
                         f"{as_argument('out', out)}`, or try the built-in shapes with `bash scripts/quickstart.sh`.")
    _check_values(latents)
    return latents


# ---- latent folders -------------------------------------------------------------------------------------------------


class Shard(Record):
    """An entry of `shards` in metadata.json: its files, and how many images they hold."""

    latents: str
    labels: str
    mirrored: str | None = None
    count: NonNegativeInt


class ArrayRecord(Record):
    """An entry of `arrays` in metadata.json, stored in <name>-*.npy.

    If `mirror` is "files", rows of flipped images are stored in <name>_mirrored-*.npy.
    """

    shape: list[Size]  # of one row
    dtype: Text
    mirror: one_of(["same", "flip", "files"])


class Metadata(ConventionRecord):
    """metadata.json (docs/data.md), without the keys that no reader needs."""

    format: one_of([1])
    count: Count
    shape: Annotated[list[Size], Field(min_length=3, max_length=3)]  # [C, h, w]
    dtype: one_of(["float16"])
    kind: one_of(KINDS)
    mirrored: bool
    num_classes: Classes
    class_names: list[str] | None
    display_names: list[str] | None = None
    autoencoder: str
    scale: Positive
    shift: Number
    shards: list[Shard]
    arrays: dict[str, ArrayRecord] = {}


def own_file(folder: Path, name: str) -> Path:
    """Returns the path of a file in a latent folder. Raises ValueError if its name or a link leads outside."""
    file = folder / name
    if Path(name).name != name or not is_inside(file, folder):
        raise ValueError(f"{folder / 'metadata.json'} names {name!r}, which is not a plain file in that folder: "
                         f"copy the file there, as hf download --local-dir does, and name it without a path.")
    return file


def map_npy(file: Path, shapes: list[tuple[int, ...]], dtypes: list[str]) -> np.ndarray:
    """Maps an npy file. Raises ValueError if it is damaged, or has none of the allowed shapes and types."""
    refuse_pointer(file)
    try:
        array = np.lib.format.open_memmap(file, mode="r")
    except NPY_ERRORS as error:  # not an npy file, truncated, or an array of pickled Python objects
        raise ValueError(f"{file} is not a complete npy file of numbers ({first_line(error)}): copy the folder "
                         f"again, or delete it and prepare it again.") from error
    if array.shape not in shapes or array.dtype not in dtypes:
        allowed = f"{' or '.join(dtypes)} {' or '.join(map(str, shapes))}"
        raise ValueError(f"{file} has {array.dtype} {array.shape}, but metadata.json says {allowed}: they come from "
                         f"different preparations.")
    return np.asarray(array)  # indexing a memmap is slower


def _open_folder(folder: Path, kind: str | None, scale: float | None) -> Latents:
    file = folder / "metadata.json"
    meta = read_record(Metadata, file, "docs/data.md has the format, and scripts/prepare_latents.py writes it.")
    counts = [shard.count for shard in meta.shards]
    for key, known, found in (("class_names", meta.num_classes, meta.class_names and len(meta.class_names)),
                              ("display_names", meta.num_classes, meta.display_names and len(meta.display_names)),
                              ("shards", meta.count, sum(counts))):
        if found not in (None, known):
            raise ValueError(f"{file} says {known}, but its {key} have {found}.")
    for name, value, recorded in (("kind", kind, meta.kind), ("scale", scale, meta.scale)):
        if value is not None and value != recorded:
            raise ValueError(f"data.{name} is {value!r}, but {folder} was prepared with {recorded!r}: "
                             f"leave data.{name}=null for a latent folder.")
    try:
        convention = Convention.read(meta.model_dump())
        convention.require(meta.shape[0], "its record")
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None

    stored_shape = (meta.shape[0] * (2 if meta.kind == "moments" else 1), *meta.shape[1:])
    types = row_types(meta.model_dump(), stored_shape)
    allow_open_files(len(meta.shards) * (len(types) + 1))
    maps = {name: _map_shards(folder, meta, name, [shape], [dtype]) for name, (shape, dtype) in types.items()}
    for shard, own in zip(meta.shards, maps["labels"], strict=True):
        check_labels(own, meta.num_classes, folder / shard.labels, 'correct the labels or "num_classes" in the record')
    arrays = {name: Array(maps[name] + maps.get(f"{name}_mirrored", []), record.mirror)
              for name, record in meta.arrays.items()}
    if any(folder.glob("masks-*.npy")):  # loss weights
        sides = meta.shape[1:]
        masks = _map_shards(folder, meta, "masks", [sides, [1, *sides]], ["uint8", "float16"])
        arrays[WEIGHT] = Array([mask.reshape(-1, 1, *sides) for mask in masks], "flip")
    return Latents(where=str(folder), starts=np.concatenate([[0], np.cumsum(counts)]),
                   files=[own_file(folder, _file_of(shard, part)) for part in ("latents", "mirrored") if part in maps
                          for shard in meta.shards],
                   shards=maps["latents"] + maps.get("mirrored", []), arrays=arrays,
                   labels=np.concatenate(maps["labels"], dtype=np.min_scalar_type(meta.num_classes - 1),
                                         casting="unsafe"),
                   stored_shape=stored_shape, stored_dtype=np.dtype("<f2"), convention=convention,
                   **meta.model_dump(include={"kind", "mirrored", "num_classes", "class_names", "display_names",
                                              "autoencoder"}))


def row_types(metadata: dict, row_shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Maps the names of a shard's files, <name>-*.npy, to the shape and type of a row. A latent has `row_shape`."""
    types = {"latents": (row_shape, "float16"), "labels": ((), "int64")}
    if metadata["mirrored"]:
        types["mirrored"] = types["latents"]
    for name, array in metadata.get("arrays", {}).items():
        types[name] = tuple(array["shape"]), array["dtype"]
        if metadata["mirrored"] and array["mirror"] == "files":
            types[f"{name}_mirrored"] = types[name]
    return types


def _file_of(shard: Shard, name: str) -> str:
    """Returns a shard's file name for `name`. The record holds only those of latents, labels and mirrored."""
    recorded = shard.model_dump(include={"latents", "labels", "mirrored"}).get(name)
    return recorded or shard.latents.replace("latents-", f"{name}-")


def _map_shards(folder: Path, meta: Metadata, name: str, shapes: list, dtypes: list[str]) -> list[np.ndarray]:
    return [map_npy(own_file(folder, _file_of(shard, name)), [(shard.count, *shape) for shape in shapes], dtypes)
            for shard in meta.shards]


def _open_tars(path: Path, tars: list[Path], kind: str | None, scale: float | None, num_classes: int | None) -> Latents:
    num_classes = 1000 if num_classes is None else num_classes
    refuse_two_splits(tars, "data.path", path)
    rows, starts, labels, stored_shape, stored_dtype = map_tars(tars)
    channels = stored_shape[0]
    if kind is None:
        raise ValueError(f"{path} holds latents of {channels} channels, and tars do not record their kind: set "
                         "data.kind=moments for [mean, logvar], which 8 channels almost certainly are, or "
                         "data.kind=sample.")
    # TREAD does not scale samples, so they are scaled already. Moments are the autoencoder's own values.
    scale = scale or (1.0 if kind == "sample" else SD_VAE_SCALE)
    check_labels(labels, num_classes, path, "set data.num_classes above it, or correct the tars")
    if kind == "moments" and channels == 4:
        warnings.warn(f"{path} holds latents of 4 channels, which are almost certainly samples: set data.kind=sample, "
                      "unless they are the moments of a 2-channel autoencoder.", stacklevel=3)
    # The tars do not record their autoencoder, so assume the one that TREAD uses.
    return Latents(where=str(path), files=tars, shards=rows, starts=starts,
                   labels=labels.astype(np.min_scalar_type(num_classes - 1)), stored_shape=stored_shape,
                   stored_dtype=stored_dtype, kind=kind, mirrored=False, num_classes=num_classes, class_names=None,
                   autoencoder="sd_vae_ema",
                   convention=Convention(SD_VAE_SCALE if scale == 1 else scale), applied=Convention(scale))


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_kind(stored: np.ndarray, kind: str, where: str, log_scale: float | None, remedy: str) -> None:
    """Raises ValueError if the second half of the channels of `stored` (n, C, h, w) contradicts `kind`.

    `log_scale` is the scale of moments that were converted from log-variances, and None for all others.
    """
    second = stored[:, stored.shape[1] // 2 :]
    half = f"{where}: the second half of the channels"
    if kind == "sample":
        if stored.shape[1] % 2 == 0 and second.max() < 0:
            raise ValueError(f"{half} is always negative, so these look like [mean, log-variance], not samples: "
                             f"{remedy}")
    elif second.min() < 0:
        raise ValueError(f"{half} reaches {second.min():.3g}, but a standard deviation is never negative, so these "
                         f"look like [mean, logvar]: {remedy}")
    elif log_scale is not None and second.min() >= 0.99 * log_scale:  # log-variance >= 0, up to float16 rounding
        raise ValueError(f"{half} is never below 0, so it looks like standard deviations, but log-variances are "
                         "expected here: write 2 * log(std) instead.")


def _check_values(latents: Latents) -> None:
    """Checks a few hundred latents. Raises ValueError if one is not finite or they seem to have the wrong scale."""
    indices, mirror = latents.probe()
    stored = latents.read(indices, mirror)[0].astype(np.float64)
    where = f"{latents.where} ({len(indices)} of {latents.count} latents checked)"
    finite = np.isfinite(stored).all(axis=(1, 2, 3))
    if not finite.all():
        raise ValueError(f"{where}: {(~finite).sum()} hold NaN or infinity, such as image {indices[~finite][0]}. "
                         "Prepare them again; an autoencoder in half precision is the usual cause.")
    masks = latents.rows_of([WEIGHT], indices, mirror)[WEIGHT] if WEIGHT in latents.arrays else np.ones(1)
    if not (0 <= masks.min() and 0 < masks.max() <= 1):  # nor NaN
        raise ValueError(f"{where}: masks range from {masks.min():.4g} to {masks.max():.4g}, but weights of the loss "
                         f"must lie in 0..1 and not all be 0: store mask / 255 as float16, or 0 and 1 as uint8.")
    check_kind(stored, latents.kind, where, latents.applied and latents.applied.scale,
               'set data.kind=moments for tars; a latent folder needs [mean, exp(logvar / 2)] * scale and "kind": '
               '"moments".')
    mean, std = np.split(stored, 2, axis=1) if latents.kind == "moments" else (stored, np.zeros(1))
    if latents.autoencoder == "identity":
        low, high = mean.min(), mean.max()
        problem = f"{where}: pixels range from {low:.4g} to {high:.4g}, but must lie in -1..1: store image / 127.5 - 1."
        if low < -1.05 or high > 1.05:
            raise ValueError(problem)
        if low >= 0 and high > 0.5:  # only a warning, because pale pictures look like this too
            warnings.warn(f"{problem} They may be in 0..1.", stacklevel=3)
        return
    deviation = math.sqrt(mean.var() + np.square(std).mean())  # the standard deviation of mean + std * eps
    if 0.3 <= deviation <= 3:
        return
    scale = (latents.applied or latents.convention).scale
    remedy = (f"data.scale is {scale:g}: set data.scale={SD_VAE_SCALE if deviation > 3 else 1}." if latents.applied
              else "Multiply latents by the autoencoder's scale exactly once, as scripts/prepare_latents.py does.")
    looks = (f"unscaled: {SD_VAE_SCALE} times that is {deviation * SD_VAE_SCALE:.2g}" if deviation > 3 else
             f"scaled twice: divided by {scale:g} it is {deviation / scale:.2g}")
    message = f"{where}: a standard deviation of {deviation:.3g}, instead of about 1, looks {looks}. {remedy}"
    if deviation > 3 or latents.autoencoder in ("sd_vae_ema", "sd_vae_mse"):
        raise ValueError(message)
    warnings.warn(message, stacklevel=3)  # only a warning, because a user's own autoencoder may have such latents
