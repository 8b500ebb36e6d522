"""The formats in which other code stores latents: how each is recognised and read, and what its values are.

`recognize` names a source's format and `open_stored` opens it. docs/interop.md lists the formats. Nothing is unpickled.
"""

import itertools
import math
import os
import posixpath
import re
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from autoencoder import SD_VAE_SCALE, Convention
from latents.listing import find_tars, open_zip, tar_members
from latents.tars import map_tars
from runtime.files import NPY_ERRORS, is_pointer, parse_json, refuse_pointer
from runtime.schema import first_line
from weights.autoencoders import read_statistics

FEATURES, LABELS = "imagenet256_features", "imagenet256_labels"  # fast-DiT's names, at any resolution

# ---- forms ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """What the values of a set of latents are, and what makes the network's of them, by the code that wrote them.

    latent = (z - latents_mean) / latents_std * scale, a channel at a time, where z is the autoencoder's own.
    """

    whose: str
    kind: str                                   # one of data.KINDS, as it will be stored
    autoencoder: str                            # as autoencoder.py knows it; none: it knows none that decodes these
    decoder: str                                # what decodes them, for people
    downsample: int | None                      # pixels a latent's side; None: unknown
    channels: int | None = None                 # on disk; None: any number
    scale: float = SD_VAE_SCALE
    scaled: bool = False                        # the values are the network's already
    log_variance: bool = False                  # the second half of the channels; else it is the standard deviation
    latents_mean: tuple[float, ...] | None = None
    latents_std: tuple[float, ...] | None = None
    pixels: tuple[int, int] = (-1, 1)           # the autoencoder's range of pixels


FORMS = {
    "maskdit": Form("MaskDiT's lmdb", "moments", "sd_vae_ema", "Stable Diffusion's VAE", 8, 8, log_variance=True),
    "tread": Form("CompVis TREAD's tars", "sample", "sd_vae_ema", "stabilityai/sd-vae-ft-ema", 8, scaled=True),
    "lightningdit": Form("LightningDiT's safetensors", "sample", "none", "LightningDiT's VA-VAE", 16, scale=1.0),
    "repa": Form("REPA's vae-sd", "moments", "sd_vae_mse", "stabilityai/sd-vae-ft-mse", 8, 8),
    "edm2": Form("EDM2's zip", "moments", "sd_vae_mse", "stabilityai/sd-vae-ft-mse", 8, 8, scale=0.5, pixels=(0, 1),
                 latents_mean=(5.81, 3.25, 0.12, -2.15), latents_std=(4.17, 4.62, 3.71, 3.28)),
    "srdit": Form("SR-DiT's vae-in", "sample", "none", "REPA-E/e2e-invae", 16, 32, scale=0.3099),
    "fastdit": Form("fast-DiT's pairs of .npy", "sample", "sd_vae_ema", "stabilityai/sd-vae-ft-ema", 8, 4, scaled=True),
}


def convert(form: Form, values: torch.Tensor) -> torch.Tensor:
    """Maps what is on disk (n, C or 2C, h, w) to what a latent folder stores, float16, in the order of the source's
    own arithmetic in float32."""
    values = values.float()
    if form.scaled:
        return values.half()
    if form.log_variance:
        return Convention(form.scale).moments(values).half()
    if form.latents_mean is None:
        return (values * form.scale).half()  # mean and std alike
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (form.latents_mean, form.latents_std))
    if form.kind == "sample":
        return ((values - mean) / std * form.scale).half()
    scale = form.scale / std
    return torch.cat([values[:, : len(mean)] * scale - mean * scale, values[:, len(mean) :] * scale], dim=1).half()


@dataclass
class Stored:
    """A set of latents on disk; `read` gives rows start to end as they are stored, (n, *shape)."""

    labels: np.ndarray                                              # (count,) int64
    shape: tuple[int, int, int]
    read: Callable[[int, int], np.ndarray | torch.Tensor]
    read_mirrored: Callable[[int, int], np.ndarray | torch.Tensor] | None = None  # of the images flipped
    form: dict = field(default_factory=dict)                        # what the files say beyond the Form

    @property
    def sides(self) -> dict[str, Callable]:
        mirrored = {} if self.read_mirrored is None else {"mirrored": self.read_mirrored}
        return {"latents": self.read} | mirrored


# ---- arrays that are files of their own -----------------------------------------------------------------------------


def npy_names(folder: Path) -> list[str]:
    """Lists the .npy files below a folder, as paths from there."""
    return sorted(os.path.relpath(os.path.join(parent, name), folder)
                  for parent, _, names in os.walk(folder, followlinks=True) for name in names if name.endswith(".npy"))


def array_reader(
    names: list[str], content: Callable[[str], bytes], where: Path,
) -> tuple[tuple[int, ...], Callable[[int, int], np.ndarray]]:
    """Returns the shape that the arrays of all .npy files have, and what reads rows start to end of them."""
    def load(name: str) -> np.ndarray:
        stored = content(name)
        if is_pointer(stored):
            raise ValueError(f"{where}/{name} is a pointer of Git LFS, and the file itself was not downloaded: run "
                             f"git lfs pull.")
        try:
            array = np.lib.format.read_array(BytesIO(stored), allow_pickle=False)
            array = array[0] if array.ndim == 4 and len(array) == 1 else array  # some writers leave the batch axis
            if array.shape != (shape or array.shape):
                raise ValueError(f"shape {array.shape}, but {names[0]} {shape}")
        except (*NPY_ERRORS, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
            raise ValueError(f"{where}/{name} is not a complete npy file of numbers like the others "
                             f"({first_line(error)}): copy it again.") from error
        return array

    def read(start: int, end: int) -> np.ndarray:
        return np.stack([load(name) for name in names[start:end]])

    shape = None  # until the first array says it
    shape = load(names[0]).shape
    return shape, read


def open_listed(source: Path, name: str) -> Stored:
    """Opens .npy files and their dataset.json, {"labels": [[name, class], …]}, in a folder or a zip.

    `{"labels": null}` is one class. They lie at its top or in the folder `name`.
    """
    if source.is_dir():
        where = source / name if (source / name).is_dir() else source
        names = npy_names(where)

        def content(file: str) -> bytes:
            return (where / file).read_bytes()
    else:
        archive, where = open_zip(source), source
        inside = f"{name}/" if any(entry.startswith(f"{name}/") for entry in archive.namelist()) else ""
        names = sorted(entry.removeprefix(inside) for entry in archive.namelist()
                       if entry.startswith(inside) and entry.endswith(".npy"))

        def content(file: str) -> bytes:
            return archive.read(inside + file)
    try:
        pairs = parse_json(content("dataset.json"))["labels"]
        label_of = dict.fromkeys(names, 0) if pairs is None else {str(name): label for name, label in pairs}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{where}/dataset.json does not hold {{"labels": [[file name, class], …]}} '
                         f'({error}).') from error
    if alone := sorted(label_of.keys() ^ set(names)):
        raise ValueError(f"{where}/dataset.json labels {len(label_of)} files, but there are {len(names)}: {alone[0]!r} "
                         f"is {'labelled but missing' if alone[0] in label_of else 'not labelled'}.")
    return Stored(np.array([label_of[name] for name in names]), *array_reader(names, content, where))


def open_pairs(source: Path) -> Stored:
    """Opens fast-DiT's <i>.npy pairs, in the order of their numbers."""
    names = {part: set(npy_names(source / part)) for part in (FEATURES, LABELS)}
    alone = sorted(names[FEATURES] ^ names[LABELS])
    if alone or not names[FEATURES]:
        raise ValueError(f"source={source} has {len(names[FEATURES])} latents in {FEATURES} and {len(names[LABELS])} "
                         f"labels in {LABELS}" + (f"; {alone[0]} is only in one of the two folders." if alone else "."))
    order = sorted(names[FEATURES], key=lambda name: int(name.removesuffix(".npy")))
    del names

    def reader(part: str) -> tuple[tuple[int, ...], Callable]:
        return array_reader(order, lambda name: (source / part / name).read_bytes(), source / part)

    _, read = reader(LABELS)
    chunks = [range(start, min(start + 4096, len(order))) for start in range(0, len(order), 4096)]
    labels = [read(rows.start, rows.stop).reshape(len(rows)) for rows in chunks]  # one label a file
    return Stored(np.concatenate(labels), *reader(FEATURES))


# ---- MaskDiT's lmdb -------------------------------------------------------------------------------------------------


def lmdb_folder(source: Path) -> Path | None:
    """Finds the folder of data.mdb: MaskDiT's code is given its parent, and reads train."""
    return next((folder for folder in (source, source / "train") if (folder / "data.mdb").is_file()), None)


def open_lmdb(source: Path, mirrored: bool | None) -> Stored:
    """Opens z-<i> (raw float32, mean and log-variance), y-<i> (text) and length; flipped images follow the others."""
    import lmdb

    folder = lmdb_folder(source) or source
    file = folder / "data.mdb"
    try:
        env = lmdb.open(str(folder), readonly=True, lock=False, readahead=False, create=False)
    except lmdb.Error as error:
        raise ValueError(f"{file} is not a complete lmdb ({error}): copy it again.") from error
    written, found = (env.info()["last_pgno"] + 1) * env.stat()["psize"], file.stat().st_size
    if found < written:  # to read beyond would end the process
        raise ValueError(f"{file} has {found:,} bytes where {written:,} were written: copy it again.")
    entries, transaction = env.stat()["entries"], env.begin(buffers=True)

    def value(key: str) -> memoryview:
        if (content := transaction.get(key.encode())) is None:
            raise ValueError(f"{file} lacks {key}: it was not finished, or has another format.")
        return content

    def number(key: str) -> int:
        return int(bytes(value(key)))

    length = number("length")
    total = 2 * length if entries == 4 * length + 1 else length  # some count the flipped images, some do not
    if entries != 2 * total + 1 or not total:  # a z and a y each, and length
        raise ValueError(f"{file} holds {entries:,} entries, not 2 per latent and length {length:,}: it was not "
                         f"finished, or has another format.")
    labels = np.array([number(f"y-{index}") for index in range(total)])
    half = total // 2
    same = total % 2 == 0 and np.array_equal(labels[:half], labels[half:])
    if (mirrored or total > length) and not same:
        raise ValueError(f"{file} holds no mirrored copies: the labels of its halves differ.")
    if mirrored is None and same and labels[0] == labels[-1] and total > 1:
        raise ValueError(f"{file} has one class, so labels do not show whether it has mirrored copies: set "
                         f"mirrored=true or mirrored=false.")
    in_order = bool((np.diff(labels[:half]) >= 0).all())  # as extract_latent.py goes through the classes, twice
    copies = same and in_order if mirrored is None else mirrored
    side = math.isqrt(len(value("z-0")) // 32)

    def read(start: int, end: int) -> np.ndarray:
        rows = [np.frombuffer(value(f"z-{index}"), "<f4") for index in range(start, end)]
        return np.stack([row.reshape(8, side, side) for row in rows])

    if not copies:
        return Stored(labels, (8, side, side), read)
    return Stored(labels[:half], (8, side, side), read, lambda start, end: read(start + half, end + half))


# ---- LightningDiT's safetensors -------------------------------------------------------------------------------------


def open_safetensors(source: Path, latent_norm: bool) -> Stored:
    """Opens shards of latents, latents_flip (N, C, h, w) and labels (N,), and latents_stats.pt where it is due."""
    from safetensors import SafetensorError, safe_open

    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ValueError(f"source={source} holds no .safetensors.")
    starts, labels, form = [0], [], None
    for file in files:
        refuse_pointer(file)
        try:
            with safe_open(file, framework="pt") as shard:
                parts = ["latents"] + [name for name in list(shard.keys()) if name == "latents_flip"]
                sizes = [tuple(shard.get_slice(part).get_shape()) for part in parts]
                own = shard.get_tensor("labels").numpy()
        except (SafetensorError, OSError, TypeError) as error:  # the last is numpy's, of bfloat16
            raise ValueError(f"{file} is not a complete safetensors file ({error}): copy it again.") from error
        found = [size[1:] for size in sizes]
        if found != (form := form or found) or own.ndim != 1 or any(size != (len(own), *form[0]) for size in sizes):
            raise ValueError(f"{file} has {own.size} labels and latents {sizes}, but {files[0].name} latents {form}.")
        labels.append(own)
        starts.append(starts[-1] + len(own))

    def reader(part: str) -> Callable[[int, int], torch.Tensor]:
        def read(start: int, end: int) -> torch.Tensor:
            rows = []
            for file, first, last in zip(files, starts[:-1], starts[1:], strict=True):
                if first < end and start < last:
                    with safe_open(file, framework="pt") as shard:  # closed, so that its pages are unmapped
                        rows.append(shard.get_slice(part)[max(start, first) - first : min(end, last) - first])
            return torch.cat(rows)
        return read

    shape = form[0]
    says = {"scale": SD_VAE_SCALE, "autoencoder": "sd_vae_ema", "decoder": "Stable Diffusion's VAE", "downsample": 8}
    if latent_norm:
        statistics = source / "latents_stats.pt"
        if not statistics.is_file():
            raise ValueError(f"source={source} has no latents_stats.pt, which LightningDiT's loader writes: set "
                             f"latent_norm=false for an SD-VAE's latents, which it does not normalise.")
        convention = read_statistics(statistics)
        convention.require(shape[0], str(statistics))
        says = {"latents_mean": convention.latents_mean, "latents_std": convention.latents_std}
    return Stored(np.concatenate(labels), shape, reader("latents"), reader("latents_flip") if len(form) > 1 else None,
                  says)


# ---- TREAD's tars ---------------------------------------------------------------------------------------------------


def open_tars(source: Path, kind: str | None) -> Stored:
    """Opens tars of <key>.latent.npy and <key>.cls; TREAD trains on the values as they are."""
    tars = find_tars(source)
    if not tars:
        raise ValueError(f"source={source} names no .tar.")
    refuse_pickles(tars[0])
    if len({"train" in tar.name for tar in tars}) > 1:
        raise ValueError(f"source={source} has tars with and without train in their names, and TREAD trains only on "
                         f"the former: select them, as in \"source='{source}/*train*.tar'\".")
    rows, starts, labels, shape, _ = map_tars(tars)
    if kind is None and shape[0] != 4:
        raise ValueError(f"{tars[0]} holds latents of {shape[0]} channels, and tars do not say of which kind: set "
                         f"kind=moments for [mean, log-variance], or kind=sample.")

    def read(start: int, end: int) -> np.ndarray:
        shards = np.searchsorted(starts, np.arange(start, end), side="right") - 1
        return np.stack([rows[shard][row - starts[shard]] for row, shard in enumerate(shards, start)])

    return Stored(labels, shape, read, form={"kind": kind or "sample", "scaled": kind != "moments",
                                             "log_variance": kind == "moments"})


def refuse_pickles(tar: Path) -> None:
    """Raises ValueError for a tar of MaskDiT's, whose latents are pickles."""
    first = itertools.islice(tar_members(tar), 8)
    if name := next((member.name for member in first if member.name.endswith(".latent")), None):
        raise ValueError(f"{tar}: {name} is a pickle, which can run code and is never loaded. Import the lmdb that the "
                         f"tars were made from (format=maskdit), or rewrite them with the lines in docs/interop.md.")


# ---- which form -----------------------------------------------------------------------------------------------------


def recognize(source: str) -> tuple[str, str]:
    """Returns (format, why) of a source; raises ValueError where it could be two, or is none that is known."""
    path = Path(source)
    found: list[tuple[str, str]] = []
    if path.is_dir():
        if (path / "metadata.json").is_file():
            raise ValueError(f"source={source} is a latent folder already: train on it with data.path={source}.")
        if (folder := lmdb_folder(path)) is not None:
            found.append(("maskdit", f"{folder / 'data.mdb'} is an lmdb"))
        if shard := next(path.glob("*.safetensors"), None):
            found.append(("lightningdit", f"{shard.name} is there"))
        if (path / FEATURES).is_dir() and (path / LABELS).is_dir():
            found.append(("fastdit", f"{FEATURES} and {LABELS} are there"))
        for name, whose in (("vae-sd", "repa"), ("vae-in", "srdit")):
            if (path / name).is_dir() or path.resolve().name == name:
                found.append((whose, f"the folder is named {name}"))
        if not found and (path / "dataset.json").is_file():
            folder = next((path / name for name in sorted(os.listdir(path)) if (path / name).is_dir()), path)
            found = by_name(os.listdir(folder), source)
    elif path.is_file() and (path.suffix == ".zip" or zipfile.is_zipfile(path)):
        found = by_name(open_zip(path).namelist(), source)
    tars = [tar for tar in find_tars(source) if not found and re.search(r"\.(tar(\.\w+)?|tgz)$", tar.name)]
    if tars:
        refuse_pickles(tars[0])
        found.append(("tread", f"{tars[0].name} is a tar"))
    if len(found) == 1:
        return found[0]
    if found:
        each = " and ".join(f"{format} ({why})" for format, why in found)
        raise ValueError(f"source={source} could be {each}: set format= to one of them.")
    known = "; ".join(f"{format}: {form.whose}" for format, form in FORMS.items())
    raise ValueError(f"source={source} {'is none of these forms' if path.exists() else 'does not exist'} ({known}). "
                     f"docs/interop.md describes each. For images use scripts/prepare_latents.py.")


def by_name(names: list[str], source: str) -> list[tuple[str, str]]:
    """Returns the form of a set with a dataset.json, by its files' names; REPA's and EDM2's are the same."""
    for name in names:
        if "vae-sd" in (parts := name.split("/")) and name.endswith(".npy"):
            return [("repa", f"{name} lies in vae-sd")]
        if "vae-in" in parts or posixpath.basename(name).startswith("img-latents-"):
            return [("srdit", f"{name} is named as SR-DiT names it")]
        if posixpath.basename(name).startswith("img-mean-std-"):
            raise ValueError(f"source={source} holds {posixpath.basename(name)}, which both REPA and EDM2 write: set "
                             f"format=repa (VAE input in -1..1) if REPA's, SiT-REPA's or Sprint's preprocessing made "
                             f"it, format=edm2 (VAE input in 0..1) if EDM2's dataset_tool.py did.")
    return []


def open_stored(
    format: str, source: str, kind: str | None, scale: float | None, latent_norm: bool, mirrored: bool | None,
    autoencoder: str | None,
) -> tuple[Stored, Form]:
    """Opens a source of one of FORMS and completes its Form by what its files and the settings say."""
    for key, given, of in (("kind", kind is not None, "tread"), ("latent_norm", not latent_norm, "lightningdit"),
                           ("mirrored", mirrored is not None, "maskdit")):
        if given and format != of:
            raise ValueError(f"{key} is a setting of format={of}, but this is format={format}: leave it out.")
    openers = {"maskdit": partial(open_lmdb, mirrored=mirrored), "tread": partial(open_tars, kind=kind),
               "lightningdit": partial(open_safetensors, latent_norm=latent_norm), "fastdit": open_pairs,
               "srdit": partial(open_listed, name="vae-in")}
    stored = openers.get(format, partial(open_listed, name="vae-sd"))(Path(source))
    form = replace(FORMS[format], **stored.form)
    form = replace(form, scale=scale or form.scale, scaled=form.scaled and scale is None,
                   autoencoder=autoencoder or form.autoencoder)
    channels, *sides = stored.shape if min(stored.shape, default=0) > 0 else (0,)
    is_fitting = form.channels in (None, channels) and not (form.kind == "moments" and channels % 2)
    if not is_fitting or len(sides) != 2 or sides[0] != sides[1]:
        raise ValueError(f"source={source} holds arrays of shape {stored.shape}, where {form.whose} has "
                         f"({form.channels or 'C'}, R, R): it has another format or autoencoder.")
    return stored, form
