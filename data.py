"""Latent folders and TREAD's webdataset tars -> endless shuffled batches, the same ones on any number of ranks.

Files are memory-mapped and never read whole, unless all of them are to lie on a device. What grows with the data set
is 4 bytes an image for the epoch's permutation (8 past 4 billion images), 1 for the coin where there are mirrored
copies, 1 or 2 for the label and, in tars, 8 for the offset.
"""

import hashlib
import itertools
import json
import math
import queue
import sys
import tarfile
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
import torch
from pydantic import Field
from tqdm import tqdm

from autoencoder import SD_VAE_SCALE, Convention
from checkpoint import beside
from images import MAX_CLASSES, check_labels, find_tars, tar_members
from objectives.diffusion import kept_tokens
from settings import Count, Number, Positive, Record, Whole, one_of, read_record
from shards import map_npy

KINDS = ("sample", "moments")
NUM_PROBED = 512  # latents looked at on opening, evenly spread over the shards
NUM_AHEAD = 4  # batches that the reading thread may be ahead of the training step
CHUNK = 4096  # latents that are copied to a device at once
TAR_INDEX = "latent-index.npz"

HOW_TO_PREPARE = """Prepare it with
  accelerate launch scripts/prepare_latents.py source=<images> out={path} resolution=256 autoencoder=sd_vae_ema mirror=true
or run the built-in shapes, which need no download:
  bash scripts/quickstart.sh
or
  python scripts/prepare_latents.py source=shapes resolution=16 autoencoder=identity out=data/shapes16
and then the same training command with data=shapes."""  # noqa: E501


# ------------------------------------------------------------------------------------------------------------
# A data set of latents


class Latents:
    """Holds the record of a data set and reads its latents and labels by index; `open_latents` makes one.

    `shape` is (C, h, w) of one latent; what is stored has 2C channels [mean, std] where `kind` is "moments".
    `fingerprint` names the content whatever its path, so a folder that moved is still the same data set.
    `display_names` are the classes' names for people, the class names where there are no others.
    `classes` are the labels that images have, in order; of `num_classes` there may be fewer.
    """

    def __init__(
        self,
        *,
        where: str,                                 # a name for sentences
        files: list[Path],                          # plain shards, then mirrored ones; or tars
        shards: list[Any],                          # by row, the latents of each file
        starts: np.ndarray,                         # index of each shard's first image, and the count at the end
        labels: np.ndarray,                         # (count,)
        stored_shape: tuple[int, int, int],         # of one latent, as it is on disk
        stored_dtype: np.dtype,
        kind: str,                                  # one of KINDS
        mirrored: bool,
        num_classes: int,
        class_names: list[str] | None,
        autoencoder: str,
        convention: Convention,                     # by which the network's latents are made of the autoencoder's
        applied: Convention | None = None,          # tars: what of it is still to be done to their values
        display_names: list[str] | None = None,
        masks: list[np.ndarray] | None = None,      # of each plain shard, mapped: (n, h, w)
    ):
        self.where = where
        self.kind, self.mirrored = kind, mirrored
        self.num_classes, self.class_names = num_classes, class_names
        self.display_names = class_names if display_names is None else display_names
        self.autoencoder, self.convention, self.applied = autoencoder, convention, applied
        self.count = len(labels)
        self.shape = (stored_shape[0] // (2 if kind == "moments" else 1), *stored_shape[1:])

        self._shards, self._masks, self._starts, self._labels = shards, masks, starts, labels
        self.classes = np.unique(labels).tolist()
        self._stored_shape, self._stored_dtype = stored_shape, stored_dtype
        self.in_tars = applied is not None  # values come as they are there: `applied` is due

        record = [[(file.name, file.stat().st_size) for file in files], self.count, self.shape,
                  str(stored_dtype), kind, mirrored, num_classes, class_names, autoencoder,
                  *(applied or convention).record().values()]
        content = hashlib.sha256(json.dumps(record).encode())
        content.update(labels)
        content.update(self._read_stored(*self.probe()))
        if self.has_masks:
            content.update(self.weights(*self.probe()))
        self.fingerprint = content.hexdigest()[:32]

    def read(self, indices: np.ndarray, mirror: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns (stored (B, C or 2C, h, w) float16, labels (B,) int64) of `indices` (B,) int64, in their order.

        `mirror` (B,) bool picks the encoding of the flipped image where True.
        """
        stored = self._read_stored(indices, mirror)
        if self.in_tars:
            convert = self.applied.moments if self.kind == "moments" else self.applied.latent
            stored = convert(torch.from_numpy(stored).float()).half().numpy()
        return stored, self._labels[indices].astype(np.int64)

    @property
    def has_masks(self) -> bool:
        return self._masks is not None

    def weights(self, indices: np.ndarray, mirror: np.ndarray | None = None) -> np.ndarray:
        """Returns the masks of `indices`, the weights of the loss: (B, 1, h, w) float16, or ones (B, 1, 1, 1).

        Unlike a latent, the mask of a flipped image is the flipped mask, so there are no files of them.
        """
        if self._masks is None:
            return np.ones((len(indices), 1, 1, 1), np.float16)
        rows = np.empty((len(indices), 1, *self.shape[1:]), np.float16)
        self._fill(rows, self._masks, indices)
        return rows if mirror is None else np.where(mirror[:, None, None, None], rows[..., ::-1], rows)

    def read_weighted(self, indices: np.ndarray, mirror: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
        """Returns what `read` does and, third, `weights`."""
        return *self.read(indices, mirror), self.weights(indices, mirror)

    def most_kept(self, patch_size: int) -> tuple[int, int]:
        """Reads all masks; returns the most tokens that one has `kept_tokens` keep, and whose image's it is."""
        most, image = 0, 0
        for start in range(0, self.count, CHUNK):
            indices = np.arange(start, min(start + CHUNK, self.count))
            counts = kept_tokens(torch.from_numpy(self.weights(indices)).float(), patch_size).sum(dim=1)
            if (found := int(counts.max())) > most:
                most, image = found, start + int(counts.argmax())
        return most, image

    def to_device(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copies all that is stored to a device, as `read_weighted` gives it: stored, labels, weights.

        Of n images there are n rows of each, with mirrored copies twice as many of what differs in them (image i's
        copy is at i + count), and one row of weights where there are no masks. Raises ValueError where a GPU has too
        little free memory.
        """
        copies = 2 if self.mirrored else 1
        weight_bytes = 2 * math.prod(self.shape[1:]) if self.has_masks else 0
        need = self.count * (copies * (math.prod(self._stored_shape) * 2 + weight_bytes) + 8)
        free = torch.cuda.mem_get_info(device)[0] if torch.device(device).type == "cuda" else math.inf
        if need > free:
            raise ValueError(f"data.on_device=true needs {need / 2**30:.1f} GiB for the {self.count * copies:,} "
                             f"latents of {self.where}, but {device} has {free / 2**30:.1f} GiB free: set "
                             f"data.on_device=false.")
        rows = copies * self.count
        stored = torch.empty((rows, *self._stored_shape), dtype=torch.float16, device=device)
        weights = torch.ones((rows, 1, *self.shape[1:]) if self.has_masks else (1, 1, 1, 1),
                             dtype=torch.float16, device=device)
        for copy in range(copies):
            for start in range(0, self.count, CHUNK):
                indices = np.arange(start, min(start + CHUNK, self.count))
                chunk, _, masks = self.read_weighted(indices, np.full(len(indices), copy == 1))
                first = copy * self.count + start
                stored[first:][: len(chunk)] = torch.from_numpy(chunk)
                if self.has_masks:
                    weights[first:][: len(chunk)] = torch.from_numpy(masks)
        return stored, torch.from_numpy(self._labels.astype(np.int64)).to(device), weights

    def require(self, *, shape: tuple[int, int, int], num_classes: int) -> None:
        """Raises ValueError where the latents do not fit a network for `shape` (C, h, w) and `num_classes`."""
        if tuple(shape) != self.shape:
            remedy = f"set data.channels={self.shape[0]} and data.input_size={self.shape[1]}"
            if self.in_tars and self.kind == "sample" and self.shape[0] == 2 * shape[0]:
                remedy = "set data.kind=moments if the channels are [mean, logvar]"
            if self.in_tars and self.kind == "moments" and 2 * self.shape[0] == shape[0]:
                remedy = "set data.kind=sample if the channels are not [mean, logvar]"
            raise ValueError(f"{self.where} holds latents of shape {self.shape} (channels, height, width), but the "
                             f"network is set up for {tuple(shape)}: {remedy}, or data.path to another data set.")
        if num_classes < self.num_classes:
            raise ValueError(f"{self.where} has {self.num_classes} classes, but the network is set up for "
                             f"{num_classes}: set data.num_classes={self.num_classes} or more.")

    def probe(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns (indices, mirror) of the same few hundred latents each time, spread over all shards."""
        indices = np.unique(np.linspace(0, self.count - 1, min(self.count, NUM_PROBED)).astype(np.int64))
        return indices, np.arange(len(indices)) % 2 == 1 if self.mirrored else None

    def _read_stored(self, indices: np.ndarray, mirror: np.ndarray | None = None) -> np.ndarray:
        assert len(indices) and 0 <= indices.min() and indices.max() < self.count
        assert mirror is None or self.mirrored or not mirror.any()
        rows = np.empty((len(indices), *self._stored_shape), self._stored_dtype)
        self._fill(rows, self._shards, indices, mirror)
        return rows

    def _fill(
        self, rows: np.ndarray, shards: Sequence, indices: np.ndarray, mirror: np.ndarray | None = None,
    ) -> None:
        """Copies the rows of `indices` out of shards, the plain ones or, where `mirror` is True, those after them."""
        order = np.argsort(indices)  # pages are visited in the order of the file
        shard = np.searchsorted(self._starts, indices[order], side="right") - 1
        row = indices[order] - self._starts[shard]
        shard = shard if mirror is None else shard + mirror[order] * (len(self._starts) - 1)
        # Row by row beats fancy indexing per shard: a shuffled batch meets most shards once or twice.
        for i, s, r in zip(order.tolist(), shard.tolist(), row.tolist(), strict=True):
            rows[i] = shards[s][r]


def open_latents(path: str | Path, *, kind: str | None = None, scale: float | None = None,
                 num_classes: int | None = None) -> Latents:
    """Opens a latent folder (docs/data.md), or tars of `{key}.latent.npy` and `{key}.cls`.

    Tars are named by a folder, a glob, or braces as in shard-{000000..000127}.tar. A latent folder knows its
    kind, scale and classes, so the arguments may only agree with it. Tars carry no record: `kind` is "sample" or
    "moments" ([mean, logvar]), `scale` brings the autoencoder's own values to z * scale (default: 1 for samples, which
    TREAD stores scaled, and 0.18215 for moments), and labels lie below `num_classes` (default 1000). Their first
    opening indexes them and keeps the index beside them, so let one rank open before the others. Raises ValueError,
    with the numbers and the remedy, for data that is absent, unfinished, damaged, or not scaled for the network.
    """
    assert kind in (None, *KINDS) and (scale is None or scale > 0)
    path = Path(path)
    if (path / "metadata.json").is_file():
        latents = _open_folder(path, kind, scale, num_classes)
    elif (path / "preparing.json").exists() or any(path.glob("latents-*.npy")):
        raise ValueError(f"{path}: preparation has not finished; run the same command again, and it "
                         "goes on from there.")
    elif tars := find_tars(path):
        latents = _open_tars(path, tars, kind, scale, num_classes)
    else:
        seen = (f"{path} holds neither metadata.json, which marks a latent folder, nor .tar files."
                if path.is_dir() else f"There is no data set at {path}.")
        raise ValueError(f"{seen} {HOW_TO_PREPARE.format(path=path)}")
    _check_values(latents)
    return latents


# ------------------------------------------------------------------------------------------------------------
# Latent folders


class Shard(Record):
    """One of `shards` in metadata.json: its files, and how many images they hold."""

    latents: str
    labels: str
    mirrored: str | None = None
    count: Whole


class Metadata(Record):
    """metadata.json as docs/data.md has it, but for what no reader needs."""

    format: one_of([1])
    count: Count
    shape: Annotated[list[Count], Field(min_length=3, max_length=3)]      # [C, h, w]
    dtype: one_of(["float16"])
    kind: one_of(KINDS)
    mirrored: bool
    num_classes: Count
    class_names: list[str] | None
    display_names: list[str] | None = None
    autoencoder: str
    scale: Positive
    shift: Number
    latents_mean: list[Number] | None = None
    latents_std: list[Number] | None = None
    pixels: list[Number] | None = None
    shards: list[Shard]


def _open_folder(folder: Path, kind: str | None, scale: float | None, num_classes: int | None) -> Latents:
    file = folder / "metadata.json"
    meta = read_record(Metadata, file, "docs/data.md has the format, and scripts/prepare_latents.py writes it.")
    classes, counts = meta.num_classes, [shard.count for shard in meta.shards]
    parts = ["latents", "mirrored"] if meta.mirrored else ["latents"]
    for key, given in (("class_names", meta.class_names), ("display_names", meta.display_names)):
        if given is not None and len(given) != classes:
            raise ValueError(f"{file} says num_classes {classes} but names {len(given)} classes in {key}.")
    if meta.mirrored and not all(shard.mirrored for shard in meta.shards):
        raise ValueError(f"{file} says mirrored true, but not every shard names a file of mirrored latents.")
    if sum(counts) != meta.count:
        raise ValueError(f"{file} says {meta.count} images, but its {len(counts)} shards hold {sum(counts)}.")
    names = {part: [folder / getattr(shard, part) for shard in meta.shards] for part in (*parts, "labels")}
    for name, asked, said in (("kind", kind, meta.kind), ("scale", scale, meta.scale)):
        if asked is not None and asked != said:
            raise ValueError(f"data.{name} is {asked!r}, but {folder} was prepared with {said!r}: "
                             f"leave data.{name}=null for a latent folder.")
    if num_classes is not None and num_classes < classes:
        raise ValueError(f"data.num_classes is {num_classes}, but {folder} has {classes}: "
                         f"set data.num_classes={classes} or more.")

    try:
        convention = Convention.read(meta.model_dump())
        convention.require(meta.shape[0], "its record")
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None

    stored_shape = (meta.shape[0] * (2 if meta.kind == "moments" else 1), *meta.shape[1:])
    files = [file for part in parts for file in names[part]]
    allow_open_files(len(files) + len(counts))
    shards = [map_npy(file, [(n, *stored_shape)], ["float16"])
              for file, n in zip(files, counts * len(parts), strict=True)]
    starts = np.concatenate([[0], np.cumsum(counts)])
    labels = np.empty(meta.count, np.min_scalar_type(classes - 1))
    for file, start, end in zip(names["labels"], starts[:-1], starts[1:], strict=True):
        of_shard = map_npy(file, [(int(end - start),)], ["int64"])
        check_labels(of_shard, classes, file, 'correct the labels or "num_classes" in metadata.json')
        labels[start:end] = of_shard
    return Latents(where=str(folder), files=files, shards=shards, starts=starts, labels=labels,
                   stored_shape=stored_shape, stored_dtype=np.dtype("<f2"),
                   masks=_open_masks(folder, names["latents"], counts, stored_shape[1:]),
                   convention=convention,
                   **meta.model_dump(include={"kind", "mirrored", "num_classes", "class_names", "display_names",
                                              "autoencoder"}))


def _open_masks(
    folder: Path, latents: list[Path], counts: list[int], sides: tuple[int, int],
) -> list[np.ndarray] | None:
    """Maps masks-*.npy, one beside each latents-*.npy, as arrays (n, h, w); None for a folder without any."""
    wanted = [file.with_name("masks-" + file.name.removeprefix("latents-")) for file in latents]
    found = sorted(folder.glob("masks-*.npy"))
    if not found:
        return None
    if odd := sorted({*wanted} ^ {*found}):
        raise ValueError(f"{folder} has {len(found)} files of masks for {len(latents)} of latents: {odd[0].name} is "
                         f"{'there without its latents' if odd[0] in found else 'missing'}. Give every "
                         f"latents-*.npy its masks-*.npy, or remove them all.")
    return [map_npy(file, [(n, *sides), (n, 1, *sides)], ["uint8", "float16"])
            for file, n in zip(wanted, counts, strict=True)]


def allow_open_files(num_files: int) -> None:
    """Raises this process's limit on open files where maps, which hold one each, would pass it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_files + 512  # and what Python, torch and the trackers hold open
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if resource.RLIM_INFINITY != soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# ------------------------------------------------------------------------------------------------------------
# Tars


class TarRows:
    """The latents of a tar by row, mapped: `offsets` are where their values begin."""

    def __init__(self, tar: Path, offsets: np.ndarray, shape: tuple[int, ...], dtype: np.dtype):
        self.mapped, self.offsets, self.shape, self.dtype = np.memmap(tar, np.uint8, "r"), offsets, shape, dtype

    def __getitem__(self, row: int) -> np.ndarray:
        return np.ndarray(self.shape, self.dtype, self.mapped, self.offsets[row])


def open_rows(tars: list[Path], index: dict[str, np.ndarray]) -> list[TarRows]:
    """Maps the latents of tars by what `tar_index` says of them."""
    allow_open_files(len(tars))
    shape, dtype = tuple(index["shape"].tolist()), np.dtype(str(index["dtype"]))
    return [TarRows(tar, offsets, shape, dtype)
            for tar, offsets in zip(tars, np.split(index["offsets"], index["starts"][1:-1]), strict=True)]


def _open_tars(path: Path, tars: list[Path], kind: str | None, scale: float | None, num_classes: int | None) -> Latents:
    num_classes = 1000 if num_classes is None else num_classes
    index = tar_index(tars)
    dtype, stored_shape = np.dtype(str(index["dtype"])), tuple(index["shape"].tolist())
    channels = stored_shape[0]
    if kind is None:
        raise ValueError(f"{path} holds latents of {channels} channels, but tars carry no record of what they are: set "
                         "data.kind=moments for [mean, logvar], as 8 almost surely are, or data.kind=sample.")
    if kind == "moments" and channels % 2:
        raise ValueError(f"{path} holds latents of {channels} channels, but moments, [mean, logvar], have an even "
                         "number of them: set data.kind=sample.")
    # TREAD trains on samples as they are, so they are scaled already; moments are an autoencoder's own.
    scale = scale or (1.0 if kind == "sample" else SD_VAE_SCALE)
    check_labels(index["labels"], num_classes, path, "set data.num_classes above it, or correct the tars")
    labels = index["labels"].astype(np.min_scalar_type(num_classes - 1))
    # The autoencoder is the one TREAD trains on; nothing in the tars says so or otherwise.
    latents = Latents(where=str(path), files=tars, shards=open_rows(tars, index), starts=index["starts"], labels=labels,
                      stored_shape=stored_shape, stored_dtype=dtype, kind=kind, mirrored=False,
                      num_classes=num_classes, class_names=None, autoencoder="sd_vae_ema",
                      convention=Convention(SD_VAE_SCALE if scale == 1 else scale), applied=Convention(scale))
    if kind == "moments" and channels == 4:
        warnings.warn(f"{path} holds latents of 4 channels, which are almost surely samples: set data.kind=sample, "
                      "unless they are the moments of a 2-channel autoencoder.", stacklevel=3)
    return latents


def tar_index(tars: list[Path]) -> dict[str, np.ndarray]:
    """Returns starts, offsets, labels, shape, dtype, kept in an npz beside the tars while they do not change."""
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in tars]
    key = hashlib.sha256(json.dumps(stats).encode()).hexdigest()
    cache = tars[0].parent / TAR_INDEX
    try:
        with np.load(cache, allow_pickle=False) as kept:
            if str(kept["key"]) == key:
                return {name: kept[name] for name in ("starts", "offsets", "labels", "shape", "dtype")}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):  # absent or damaged: the tars are the truth
        pass

    starts, offsets, labels, form = [0], [], [], None
    total = sum(size for _, size, _ in stats)
    with tqdm(desc="indexing tars", total=total, unit="B", unit_scale=True, delay=2, disable=None) as progress:
        for file in tars:
            rows, form = _index_one_tar(file, form, progress)
            offsets += [offset for offset, _ in rows]
            labels += [label for _, label in rows]
            starts.append(len(offsets))
    check_labels(np.array(labels), MAX_CLASSES, tars[0].parent, "correct the tars")
    index = {"starts": np.array(starts), "offsets": np.array(offsets, np.int64),
             "labels": np.array(labels, np.int32), "shape": np.array(form[0]), "dtype": np.array(form[1].str)}

    with suppress(OSError), beside(cache) as partial, open(partial, "wb") as stream:      # else indexed next time
        np.savez(stream, key=np.array(key), **index)
    return index


NpyForm = tuple[tuple[int, ...], np.dtype]      # shape and type


def _index_one_tar(file: Path, form: NpyForm | None, progress: tqdm) -> tuple[list[tuple[int, int]], NpyForm]:
    """Returns [(first byte of the values, label)] of a tar's samples and the form of all, that of the tars before."""
    firsts, labels = {}, {}
    with open(file, "rb") as content:
        for member in filter(tarfile.TarInfo.isfile, tar_members(file)):
            progress.update(member.size)
            content.seek(member.offset_data)
            name, where = member.name, f"{file}: {member.name}"
            if name.endswith(".latent.npy"):
                found = _read_form(content, member.size, where)
                if found != (form := form or found):
                    raise ValueError(f"{where} holds {found[1]} {found[0]}, but the latents before it {form[1]} "
                                     f"{form[0]}; one data set has one shape.")
                firsts[name.removesuffix(".latent.npy")] = content.tell()
            elif name.endswith(".cls"):
                try:
                    labels[name.removesuffix(".cls")] = int(content.read(member.size))
                except ValueError as error:
                    raise ValueError(f"{where} holds no class number ({error}).") from None
    if not firsts:
        raise ValueError(f"{file} holds no '<key>.latent.npy': tars of images go through scripts/prepare_latents.py "
                         "first.")
    if alone := sorted(firsts.keys() ^ labels.keys()):
        raise ValueError(f"{file}: {len(alone)} samples lack either '.latent.npy' or '.cls', {alone[0]!r} first.")
    return [(first, labels[sample]) for sample, first in firsts.items()], form


def _read_form(content: BinaryIO, size: int, where: str) -> NpyForm:
    """Reads the header of a latent's npy, of `size` bytes, and leaves `content` at the first value."""
    end = content.tell() + size
    try:
        np.lib.format.read_magic(content)
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(content)  # numpy's for every plain array
    except ValueError as error:
        raise ValueError(f"{where} is not an npy file ({error}).") from error
    if len(shape) != 3 or fortran or dtype not in ("float16", "float32"):
        raise ValueError(f"{where} holds {dtype} {shape}{' in Fortran order' if fortran else ''}; a latent is a "
                         "C-ordered float16 or float32 array of (channels, height, width).")
    if content.tell() + math.prod(shape) * dtype.itemsize != end:
        raise ValueError(f"{where} has {size} bytes, which is not what its header promises.")
    return shape, dtype


# ------------------------------------------------------------------------------------------------------------
# What looks wrong


def _check_values(latents: Latents) -> None:
    """Raises ValueError where a few hundred latents are not finite or do not look scaled for the network."""
    indices, mirror = latents.probe()
    stored = latents.read(indices, mirror)[0].astype(np.float64)
    where = f"{latents.where} ({len(indices)} of {latents.count} latents looked at)"
    finite = np.isfinite(stored).all(axis=(1, 2, 3))
    if not finite.all():
        raise ValueError(f"{where}: {(~finite).sum()} hold NaN or infinity, image {indices[~finite][0]} first. "
                         "Prepare them again; an autoencoder in half precision is the usual cause.")
    masks = latents.weights(indices, mirror)
    if not (0 <= masks.min() and masks.max() <= 1):      # nor NaN
        raise ValueError(f"{where}: masks run from {masks.min():.4g} to {masks.max():.4g}, but as weights of the loss "
                         f"they lie in 0..1: store mask / 255 as float16, or 0 and 1 as uint8.")
    if masks.max() == 0:
        raise ValueError(f"{where}: all masks are 0, so that nothing would be trained: store 1 where a pixel counts in "
                         f"the loss, or remove masks-*.npy.")
    mean, std = np.split(stored, 2, axis=1) if latents.kind == "moments" else (stored, np.zeros(1))
    if std.min() < 0:
        raise ValueError(f"{where}: the second half of the channels reaches {std.min():.3g}, but a standard "
                         "deviation is never negative. A latent folder stores [mean, std]; these look like "
                         "[mean, logvar]: store exp(logvar / 2) * scale.")
    if latents.autoencoder == "identity":
        _check_pixels(mean.min(), mean.max(), where)
    else:
        _check_scale(math.sqrt(mean.var() + np.square(std).mean()), latents, where)  # of mean + std * eps


def _check_pixels(low: float, high: float, where: str) -> None:
    seen = f"{where}: pixels run from {low:.4g} to {high:.4g}"
    if low < -1.05 or high > 1.05:
        raise ValueError(f"{seen}; with autoencoder=identity they lie in -1..1: store image / 127.5 - 1.")
    if low >= 0 and high > 0.5:  # pale pictures may be so
        warnings.warn(f"{seen}, which looks like 0..1; -1..1 is expected (image / 127.5 - 1).", stacklevel=4)


def _check_scale(spread: float, latents: Latents, where: str) -> None:
    scale = (latents.applied or latents.convention).scale
    remedy = (f"data.scale is {scale:g}: set data.scale={SD_VAE_SCALE if spread > 3 else 1}." if latents.in_tars else
              "Store latents times the autoencoder's scale once, as scripts/prepare_latents.py does.")
    seen = f"{where}: standard deviation {spread:.3g}, where about 1 is expected, looks"
    if spread > 3:
        raise ValueError(f"{seen} unscaled: {SD_VAE_SCALE} times that is {spread * SD_VAE_SCALE:.2g}. {remedy}")
    if spread < 0.3:
        message = f"{seen} scaled twice: divided by {scale:g} it is {spread / scale:.2g}. {remedy}"
        if latents.autoencoder in ("sd_vae_ema", "sd_vae_mse"):
            raise ValueError(message)
        warnings.warn(message, stacklevel=4)  # somebody's own autoencoder may be so


# ------------------------------------------------------------------------------------------------------------
# Batches


def batches(latents: Latents, batch_size: int, *, seed: int, rank: int = 0, world: int = 1, start: int = 0,
            pin: bool = False, device: torch.device | str | None = None) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields this rank's share of each global batch, without end: stored (batch_size / world, …) float16, y int64 and
    weights float16, the masks (…, 1, h, w), or ones (…, 1, 1, 1) where there are none.

    Epoch e is a permutation of all images by (seed, e), cut into floor(count / batch_size) global batches; rank r
    takes the r-th part of each, so what a global batch holds does not depend on `world`. `start` global batches
    are skipped at no cost: a run that resumes sees what it would have seen. One thread reads ahead; closing the
    iterator ends it. `pin` page-locks the batches for copies to the current GPU. With a `device` all latents are
    copied there once, and the same batches are made there. Raises ValueError for a batch size that the images or the
    ranks do not fit, and for latents that do not fit on the device.
    """
    if not 0 < batch_size <= latents.count:
        raise ValueError(f"The batch size is {batch_size}, but {latents.where} holds {latents.count} images: "
                         "set batch_size between 1 and that.")
    if batch_size % world:
        raise ValueError(f"The batch size {batch_size} does not divide by {world} ranks: "
                         f"set batch_size to a multiple of {world}.")
    assert 0 <= rank < world and start >= 0
    plan = _plan(latents, batch_size, seed, rank, world, start)
    gpu = torch.cuda.current_device() if pin else None
    if device is None:
        return read_ahead(_load(latents.read_weighted, plan, gpu))
    return _select(*latents.to_device(device), read_ahead(_load(partial(_rows, latents.count), plan, gpu)))


def to_latent(stored: torch.Tensor, kind: str) -> torch.Tensor:
    """Returns x (B, C, h, w) float32 on the device of `stored`; moments are drawn from, x = mean + std * eps.

    eps comes from the device's default generator.
    """
    stored = stored.float()
    if kind == "sample":
        return stored
    mean, std = stored.chunk(2, dim=1)
    return mean + std * torch.randn_like(mean)


def _plan(latents: Latents, batch_size: int, seed: int, rank: int, world: int,
          start: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yields (indices, mirror or None) of one rank's batches, epoch after epoch."""
    share, per_epoch = batch_size // world, latents.count // batch_size
    first_epoch, first_batch = divmod(start, per_epoch)
    for epoch in itertools.count(first_epoch):
        rng = np.random.default_rng((seed, epoch))
        order = np.arange(latents.count, dtype=np.uint32 if latents.count <= 2**32 else np.int64)
        rng.shuffle(order)
        # Drawn after the order, which is therefore the same with and without mirrored copies.
        mirror = rng.integers(0, 2, latents.count, dtype=np.bool_) if latents.mirrored else None
        for batch in range(first_batch if epoch == first_epoch else 0, per_epoch):
            begin = batch * batch_size + rank * share
            rows = slice(begin, begin + share)
            yield order[rows].astype(np.int64), None if mirror is None else mirror[rows]
        del order, mirror  # before the next epoch's are made


def _load(read: Callable[..., tuple[np.ndarray, ...]], plan: Iterator, gpu: int | None) -> Iterator[tuple]:
    if gpu is not None:
        torch.cuda.set_device(gpu)  # a new thread starts on GPU 0, and pinning would open a context there
    for indices, mirror in plan:
        parts = map(torch.from_numpy, read(indices, mirror))
        yield tuple(parts if gpu is None else (part.pin_memory() for part in parts))


def _rows(count: int, indices: np.ndarray, mirror: np.ndarray | None) -> tuple[np.ndarray]:
    """Returns where `Latents.to_device` has put the latents of a batch."""
    return (indices if mirror is None else indices + count * mirror,)


def _select(
    stored: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, batches_of_rows: Iterator,
) -> Iterator[tuple]:
    with closing(batches_of_rows):
        for (rows,) in batches_of_rows:
            rows = rows.to(stored.device, non_blocking=True)
            yield tuple(part.index_select(0, rows % len(part)) for part in (stored, labels, weights))


def read_ahead(items: Iterator) -> Iterator:
    """Yields `items`, made by one thread that is at most NUM_AHEAD of them ahead and ends with this generator."""
    ready, free, stop = queue.SimpleQueue(), threading.Semaphore(NUM_AHEAD), threading.Event()

    def produce():
        try:
            for item in items:
                free.acquire()
                if stop.is_set():
                    return
                ready.put((item, None))
            ready.put(None)
        except BaseException as error:  # raised where the batch is asked for
            ready.put((None, error))

    thread = threading.Thread(target=produce, name="read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            if (got := ready.get()) is None:
                return
            item, error = got
            if error is not None:
                raise error
            free.release()
            yield item
    finally:
        stop.set()
        free.release()
        if not sys.is_finalizing():  # a daemon thread cannot be joined once the interpreter is going down
            thread.join()
