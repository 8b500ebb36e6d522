"""The formats in which other code stores latents: how each is recognised and read, and what its values are.

`recognize` names a source's format and `open_stored` opens it. docs/interop.md lists the formats. Nothing is unpickled.
"""

import itertools
import math
import os
import posixpath
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from autoencoder import SD_VAE_SCALE, Convention
from latents.listing import TARS, Listing, UnreadableImage, find_tars, list_folder, list_zip, tar_members
from latents.tars import map_tars, refuse_two_splits
from runtime.files import NPY_ERRORS, is_pointer, parse_json, refuse_pointer
from runtime.schema import as_argument, first_line
from weights.autoencoders import STATISTICS, own_convention, read_statistics

# ---- forms ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """What the values of a set of latents are, and how they become the network's, by the code that wrote them."""

    whose: str
    kind: str                                   # one of latents.folder.KINDS, as it will be stored
    autoencoder: str                            # as autoencoder.py knows it; none: it knows none that decodes these
    decoder: str                                # what decodes them, for people
    downsample: int | None                      # pixels a latent's side; None: unknown
    channels: int | None = None                 # on disk; None: any number
    convention: Convention = Convention(SD_VAE_SCALE)
    scaled: bool = False                        # the values are the network's already
    log_variance: bool = False                  # the second half of the channels; else it is the standard deviation


EDM2 = Convention(0.5, latents_mean=(5.81, 3.25, 0.12, -2.15), latents_std=(4.17, 4.62, 3.71, 3.28), pixels=(0, 1))
FORMS = {
    "maskdit": Form("MaskDiT's lmdb", "moments", "sd_vae_ema", "Stable Diffusion's VAE", 8, 8, log_variance=True),
    "tread": Form("CompVis TREAD's tars", "sample", "sd_vae_ema", "stabilityai/sd-vae-ft-ema", 8, scaled=True),
    "lightningdit": Form("LightningDiT's safetensors", "sample", "none", "LightningDiT's VA-VAE", 16),
    "repa": Form("REPA's vae-sd", "moments", "sd_vae_mse", "stabilityai/sd-vae-ft-mse", 8, 8),
    "edm2": Form("EDM2's zip", "moments", "sd_vae_mse", "stabilityai/sd-vae-ft-mse", 8, 8, EDM2),
    "srdit": Form("SR-DiT's vae-in", "sample", "none", "REPA-E/e2e-invae", 16, 32, Convention(0.3099)),
    "fastdit": Form("fast-DiT's pairs of .npy", "sample", "sd_vae_ema", "stabilityai/sd-vae-ft-ema", 8, 4, scaled=True),
}


def convert(form: Form, values: torch.Tensor) -> torch.Tensor:
    """Maps what is on disk (n, C or 2C, h, w) to what a latent folder stores, float16, in the order of the source's
    own arithmetic in float32."""
    values, convention = values.float(), form.convention
    if form.scaled:
        return values.half()
    if form.log_variance:
        return convention.moments(values).half()
    if form.kind == "sample":
        return convention.latent(values).half()
    if convention.latents_mean is None:
        return (values * convention.scale).half()  # mean and std alike
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (convention.latents_mean, convention.latents_std))
    scale = convention.scale / std
    return torch.cat([values[:, : len(mean)] * scale - mean * scale, values[:, len(mean) :] * scale], dim=1).half()


@dataclass
class Stored:
    """A set of latents on disk; each of `sides` reads rows start to end as they are stored, (n, *shape)."""

    labels: np.ndarray                          # (count,) int64
    shape: tuple[int, int, int]
    sides: dict[str, Callable[[int, int], np.ndarray | torch.Tensor]]   # latents, and mirrored if there are copies
    form: dict = field(default_factory=dict)    # what the files say beyond the Form


def warn_of_gap(names: Iterable[str], where: Path) -> None:
    """Warns where consecutive numbers in names leave some out, as after a download or extraction that was stopped."""
    runs: dict[tuple[str, str], dict[int, int]] = {}  # by what surrounds the number: how it is padded
    for name in names:
        if found := re.fullmatch(r"(.*?)(\d+)(\D*)", name):
            runs.setdefault((found[1], found[3]), {})[int(found[2])] = len(found[2])
    for (before, after), numbers in runs.items():
        missing = max(numbers) - min(numbers) + 1 - len(numbers)
        if 0 < missing <= len(numbers):  # else these are no consecutive numbers
            first = next(i for i in range(min(numbers), max(numbers)) if i not in numbers)
            warnings.warn(f"{where} lacks {before}{first:0{numbers[min(numbers)]}}{after} ({missing} of "
                          f"{missing + len(numbers)} are missing): compare the number of latents below with that of "
                          f"the images.", stacklevel=3)
            return


# ---- arrays that are files of their own -----------------------------------------------------------------------------


def npy_files(listing: Listing) -> dict[str, int]:
    """Returns the numbers of the .npy files in a listing, by their names."""
    return {name: i for i, name in enumerate(listing.names) if name.endswith(".npy")}


def array_reader(listing: Listing, files: list[int]) -> tuple[tuple[int, ...], Callable[[int, int], np.ndarray]]:
    """Returns the shape that the arrays of all .npy files have, and a function that reads rows start to end of them."""
    def load(file: int) -> np.ndarray:
        try:
            stored = listing.read(file)
            if is_pointer(stored):
                raise ValueError("a pointer of Git LFS: run git lfs pull")
            array = np.lib.format.read_array(BytesIO(stored), allow_pickle=False)
            array = array[0] if array.ndim == 4 and len(array) == 1 else array  # some writers leave the batch axis
            if array.shape != (shape or array.shape):
                raise ValueError(f"shape {array.shape}, but {listing.names[files[0]]} {shape}")
            return array
        except (*NPY_ERRORS, UnreadableImage) as error:
            raise ValueError(f"{listing.path}/{listing.names[file]} is not a complete npy file of numbers like the "
                             f"others ({first_line(error)}): copy it again.") from error

    def read(start: int, end: int) -> np.ndarray:
        return np.stack([load(file) for file in files[start:end]])

    shape = None  # until the first array says it
    shape = load(files[0]).shape
    return shape, read


def open_listed(source: Path, name: str) -> Stored:
    """Opens .npy files and their dataset.json, {"labels": [[name, class], …]}, in a folder or a zip.

    `{"labels": null}` is one class. They lie at its top or in the folder `name`.
    """
    if source.is_dir():
        listing = list_folder(source / name if (source / name).is_dir() else source)
    else:
        listing = list_zip(source)
        listing = listing.below(name) if any(file.startswith(f"{name}/") for file in listing.names) else listing
    where, files = listing.path / "dataset.json", npy_files(listing)
    try:
        pairs = parse_json(listing.read(listing.names.index("dataset.json")))["labels"]
        label_of = dict.fromkeys(files, 0) if pairs is None else {str(file): label for file, label in pairs}
    except (OSError, ValueError, KeyError, TypeError, UnreadableImage) as error:
        raise ValueError(f'{where} does not hold {{"labels": [[file name, class], …]}} ({error}).') from error
    if alone := sorted(label_of.keys() ^ files.keys()):
        raise ValueError(f"{where} labels {len(label_of)} files, but there are {len(files)}: {alone[0]!r} is "
                         f"{'labelled but missing' if alone[0] in label_of else 'not labelled'}.")
    if not files:
        raise ValueError(f"{listing.path} holds dataset.json, but no .npy files of latents: copy them again.")
    order = sorted(files)
    shape, read = array_reader(listing, [files[file] for file in order])
    return Stored(np.array([label_of[file] for file in order]), shape, {"latents": read})


def pair_folders(source: Path) -> list[tuple[str, str]]:
    """Lists fast-DiT's folders, imagenet256_features and imagenet256_labels, or of another size or set."""
    return [(name, labels) for name in sorted(os.listdir(source)) if name.endswith("_features")
            and (source / (labels := f"{name.removesuffix('_features')}_labels")).is_dir()]


def open_pairs(source: Path) -> Stored:
    """Opens fast-DiT's <i>.npy or <rank>-<i>.npy pairs of one latent or a batch each, in the order of their numbers."""
    folders = pair_folders(source)
    if len(folders) != 1:
        raise ValueError(f"source={source} must hold one folder <name>_features and its <name>_labels, not "
                         f"{', '.join(features for features, _ in folders) or 'none'}: name a folder with one pair.")
    features, labels = (list_folder(source / folder) for folder in folders[0])
    latents, others = npy_files(features), npy_files(labels)
    alone = sorted(latents.keys() ^ others.keys())
    if alone or not latents:
        more = f"; {alone[0]} is only in one of the two folders." if alone else "."
        raise ValueError(f"source={source} has {len(latents)} latents in {features.path.name} and {len(others)} labels "
                         f"in {labels.path.name}{more}")
    order = sorted(latents, key=lambda name: ([int(number) for number in re.findall(r"\d+", name)], name))
    warn_of_gap(order, features.path)
    shape, read = array_reader(features, [latents[name] for name in order])
    label_shape, read_labels = array_reader(labels, [others[name] for name in order])
    batch = shape[0] if len(shape) == 4 else 1  # images in a file
    if math.prod(label_shape) != batch:
        raise ValueError(f"source={source}: {order[0]} holds latents {shape}, but labels {label_shape}: each latent "
                         f"needs one.")

    def rows(start: int, end: int) -> np.ndarray:
        first = start // batch
        stored = read(first, -(-end // batch)).reshape(-1, *shape[-3:])
        return stored[start - first * batch : end - first * batch]

    chunks = [read_labels(start, start + 4096).reshape(-1) for start in range(0, len(order), 4096)]
    return Stored(np.concatenate(chunks), shape[-3:], {"latents": rows})


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

    if transaction.get(b"num_samples"):
        raise ValueError(f"{file} is of MeanFlow's code, whose values are pickles, which are never loaded: write a "
                         f"latent folder of them (examples/write_latents.py).")

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
        return Stored(labels, (8, side, side), {"latents": read})
    return Stored(labels[:half], (8, side, side),
                  {"latents": read, "mirrored": lambda start, end: read(start + half, end + half)})


# ---- LightningDiT's safetensors -------------------------------------------------------------------------------------


def open_safetensors(source: Path, latent_norm: bool) -> Stored:
    """Opens shards of latents, latents_flip (N, C, h, w) and labels (N,), and latents_stats.pt where it is due."""
    from safetensors import SafetensorError, safe_open

    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ValueError(f"source={source} holds no .safetensors.")
    warn_of_gap([file.name for file in files], source)
    ranks = Counter(file.name.rpartition("_shard")[0] for file in files)
    if len(set(ranks.values())) > 1:  # each had as many images
        warnings.warn(f"{source} has unequal numbers of shards per rank ({dict(ranks)}): some are missing, or left "
                      f"over from an extraction by more GPUs, whose images would count twice.", stacklevel=3)
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

    says = {"autoencoder": "sd_vae_ema", "decoder": "Stable Diffusion's VAE", "downsample": 8}
    if latent_norm:
        statistics = source / STATISTICS
        if not statistics.is_file():
            raise ValueError(f"source={source} has no {STATISTICS}, which LightningDiT's loader writes: set "
                             f"latent_norm=false for an SD-VAE's latents, which it does not normalise.")
        says = {"convention": read_statistics(statistics)}
        says["convention"].require(form[0][0], str(statistics))
    sides = {"latents": reader("latents")} | ({"mirrored": reader("latents_flip")} if len(form) > 1 else {})
    return Stored(np.concatenate(labels), form[0], sides, says)


# ---- TREAD's tars ---------------------------------------------------------------------------------------------------


def open_tars(source: Path, kind: str | None) -> Stored:
    """Opens tars of <key>.latent.npy and <key>.cls; TREAD trains on the values as they are."""
    tars = find_tars(source)
    if not tars:
        raise ValueError(f"source={source} names no .tar.")
    refuse_pickles(tars[0])
    refuse_two_splits(tars, "source", source)
    warn_of_gap([tar.name for tar in tars], source)
    rows, starts, labels, shape, _ = map_tars(tars)
    if kind is None and shape[0] != 4 and shape[1] == shape[2]:
        raise ValueError(f"{tars[0]} holds latents of {shape[0]} channels, and tars do not say of which kind: set "
                         f"kind=moments for [mean, log-variance], or kind=sample.")

    def read(start: int, end: int) -> np.ndarray:
        shards = np.searchsorted(starts, np.arange(start, end), side="right") - 1
        return np.stack([rows[shard][row - starts[shard]] for row, shard in enumerate(shards, start)])

    return Stored(labels, shape, {"latents": read}, {
        "kind": kind or "sample", "scaled": kind != "moments", "log_variance": kind == "moments"})


def refuse_pickles(tar: Path) -> None:
    """Raises ValueError for a tar of MaskDiT's, whose latents are pickles."""
    first = itertools.islice(tar_members(tar), 8)
    if name := next((member.name for member in first if member.name.endswith(".latent")), None):
        raise ValueError(f"{tar}: {name} is a pickle, which can run code and is never loaded. Import the lmdb that the "
                         f"tars were made from (format=maskdit), or rewrite them with the lines in docs/interop.md.")


# ---- which form -----------------------------------------------------------------------------------------------------


def recognize(source: str) -> tuple[str, str]:
    """Returns (format, why) of a source; raises ValueError where it could be two, or is none that is known."""
    if found := find_form(source):
        return found
    known = "; ".join(f"{format}: {form.whose}" for format, form in FORMS.items())
    raise ValueError(f"source={source} {'is none of these forms' if Path(source).exists() else 'does not exist'} "
                     f"({known}). docs/interop.md describes each. Write any other as examples/write_latents.py does. "
                     f"For images use scripts/prepare_latents.py.")


def find_form(source: str) -> tuple[str, str] | None:
    """Returns (format, why) of a source, or None; raises ValueError where it could be two."""
    path = Path(source)
    found: list[tuple[str, str]] = []
    if path.is_dir():
        if (path / "metadata.json").is_file():
            raise ValueError(f"source={source} is a latent folder already: train on it with data.path={source}.")
        if (folder := lmdb_folder(path)) is not None:
            found.append(("maskdit", f"{folder / 'data.mdb'} is an lmdb"))
        if shard := next(path.glob("*.safetensors"), None):
            found.append(("lightningdit", f"{shard.name} is there"))
        if folders := pair_folders(path):
            found.append(("fastdit", f"{' and '.join(folders[0])} are there"))
        for name, whose in (("vae-sd", "repa"), ("vae-in", "srdit")):
            if (path / name).is_dir() or path.resolve().name == name:
                found.append((whose, f"the folder is named {name}"))
        if not found and (path / "dataset.json").is_file():
            folder = next((path / name for name in sorted(os.listdir(path)) if (path / name).is_dir()), path)
            found = by_name(os.listdir(folder), source)
    elif path.is_file() and (path.suffix == ".zip" or zipfile.is_zipfile(path)):
        found = by_name(list_zip(path).names, source)
    tars = [tar for tar in find_tars(source) if not found and re.search(TARS, tar.name)]
    if tars:
        refuse_pickles(tars[0])
        found.append(("tread", f"{tars[0].name} is a tar"))
    if len(found) > 1:
        each = " and ".join(f"{format} ({why})" for format, why in found)
        raise ValueError(f"source={source} could be {each}: set format= to one of them.")
    return found[0] if found else None


def refuse_foreign(source: str) -> None:
    """Raises ValueError for latents of other code, but for tars, where images or a latent folder are expected."""
    path = Path(source)
    if not (path / "metadata.json").is_file() and (found := find_form(source)) and found[0] != "tread":
        raise ValueError(f"{source} holds {FORMS[found[0]].whose}: run `python scripts/import_latents.py "
                         f"{as_argument('source', path)} {as_argument('out', Path('data') / path.stem)}`, and train on "
                         f"what it writes.")


def by_name(names: list[str], source: str) -> list[tuple[str, str]]:
    """Returns the form of a set with a dataset.json, by its files' names; REPA's and EDM2's are the same."""
    for name in names:
        if "vae-sd" in (parts := name.split("/")) and name.endswith(".npy"):
            return [("repa", f"{name} lies in vae-sd")]
        if "vae-in" in parts or posixpath.basename(name).startswith("img-latents-"):
            return [("srdit", f"{name} is named as SR-DiT names it")]
        if posixpath.basename(name).startswith("img-mean-std-"):
            raise ValueError(f"source={source} holds {posixpath.basename(name)}, which both REPA and EDM2 write: set "
                             f"format=repa (VAE input in -1..1) of scripts/import_latents.py if REPA's, SiT-REPA's or "
                             f"Sprint's preprocessing made it, format=edm2 (VAE input in 0..1) if EDM2's "
                             f"dataset_tool.py did.")
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
    form = replace(form, convention=replace(form.convention, scale=scale or form.convention.scale),
                   scaled=form.scaled and scale is None, autoencoder=autoencoder or form.autoencoder)
    if form.scaled and autoencoder and (own := own_convention(autoencoder)):  # by which they are scaled already
        form = replace(form, convention=own)
    channels, *sides = stored.shape if min(stored.shape, default=0) > 0 else (0,)
    is_fitting = form.channels in (None, channels) and not (form.kind == "moments" and channels % 2)
    if not is_fitting or len(sides) != 2 or sides[0] != sides[1]:
        raise ValueError(f"source={source} holds arrays of shape {stored.shape}, where {form.whose} has "
                         f"({form.channels or 'C'}, R, R): channels come first, and other shapes are of another format "
                         f"or autoencoder, or of images that are not square.")
    return stored, form
