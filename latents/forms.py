"""The formats in which other code stores latents: how to recognise and read each, and what its values mean.

`recognize` finds the format of a source and `open_stored` opens it. docs/interop.md lists the formats. Nothing is
unpickled.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from autoencoder import SD_VAE_SCALE, Convention
from latents.decoding import UnreadableImage
from latents.listing import TAR_SUFFIX, Listing, find_tars, list_folder, list_zip, tar_members
from latents.tars import read_tar, refuse_two_splits
from runtime.files import NPY_ERRORS, is_pointer, parse_json, refuse_pointer
from runtime.schema import first_line
from weights.autoencoders import STATISTICS, own_convention, read_statistics

# ---- forms ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """What the values of stored latents mean, and how the code that wrote them turns them into network inputs."""

    whose: str                                  # the code that writes them, for messages
    kind: str                                   # one of latents.folder.KINDS, which the latent folder will have
    autoencoder: str                            # a name for load_autoencoder; "none" if it can decode none of these
    decoder: str                                # what decodes them, for people
    downsample: int | None                      # image side divided by latent side; None if unknown
    channels: int | None = None                 # on disk; None for any number
    convention: Convention = Convention(SD_VAE_SCALE)
    scaled: bool = False                        # whether the values are network inputs already
    log_variance: bool = False                  # whether the second half of the channels is that, not the std


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
    """Maps stored values (n, C or 2C, h, w) to those of a latent folder, float16.

    Computes in float32 and in the same order as the source's own code.
    """
    values, convention = values.float(), form.convention
    if form.scaled:
        return values.half()
    if form.log_variance:
        return convention.moments(values).half()
    if form.kind == "sample":
        return convention.latent(values).half()
    if convention.latents_mean is None:
        return (values * convention.scale).half()  # both mean and std
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (convention.latents_mean, convention.latents_std))
    scale = convention.scale / std
    return torch.cat([values[:, : len(mean)] * scale - mean * scale, values[:, len(mean) :] * scale], dim=1).half()


@dataclass
class Stored:
    """A set of latents on disk. Each of `sides` is a function that reads rows start to end unconverted, (n, *shape)."""

    labels: np.ndarray                          # (count,) int64
    shape: tuple[int, int, int]
    sides: dict[str, Callable[[int, int], np.ndarray | torch.Tensor]]   # latents, and mirrored if there are copies
    form: dict = field(default_factory=dict)    # fields of the Form that the files determine


def warn_of_gap(names: Iterable[str], where: Path) -> None:
    """Warns if numbers are missing from consecutively numbered names, as after an interrupted download."""
    runs: dict[tuple[str, str], dict[int, int]] = {}  # (text before, text after) -> number -> its digits
    for name in names:
        if found := re.fullmatch(r"(.*?)(\d+)(\D*)", name):
            runs.setdefault((found[1], found[3]), {})[int(found[2])] = len(found[2])
    for (before, after), numbers in runs.items():
        missing = max(numbers) - min(numbers) + 1 - len(numbers)
        if 0 < missing <= len(numbers):  # with larger gaps the numbers are not consecutive
            first = next(i for i in range(min(numbers), max(numbers)) if i not in numbers)
            warnings.warn(f"{where} lacks {before}{first:0{numbers[min(numbers)]}}{after} ({missing} of "
                          f"{missing + len(numbers)} are missing): compare the number of latents below with the number "
                          f"of images.", stacklevel=3)
            return


# ---- one npy file per array -----------------------------------------------------------------------------------------


def npy_files(listing: Listing) -> dict[str, int]:
    """Maps the names of the .npy files in a listing to their numbers."""
    return {name: i for i, name in enumerate(listing.names) if name.endswith(".npy")}


def array_reader(listing: Listing, files: list[int]) -> tuple[tuple[int, ...], Callable[[int, int], np.ndarray]]:
    """Returns the common shape of the arrays in `files`, and a function that reads and stacks files start to end."""
    def load(file: int) -> np.ndarray:
        try:
            stored = listing.read(file)
            if is_pointer(stored):
                raise ValueError("a pointer of Git LFS: run git lfs pull")
            array = np.lib.format.read_array(BytesIO(stored), allow_pickle=False)
            array = array[0] if array.ndim == 4 and len(array) == 1 else array  # some writers keep the batch axis
            if array.shape != (shape or array.shape):
                raise ValueError(f"shape {array.shape}, but {listing.names[files[0]]} {shape}")
            return array
        except (*NPY_ERRORS, UnreadableImage) as error:
            raise ValueError(f"{listing.path}/{listing.names[file]} is not a complete npy file of numbers like the "
                             f"others ({first_line(error)}): copy it again.") from error

    def read(start: int, end: int) -> np.ndarray:
        return np.stack([load(file) for file in files[start:end]])

    shape = None  # until the first array is read
    shape = load(files[0]).shape
    return shape, read


def open_listed(source: Path, name: str) -> Stored:
    """Opens .npy files and their dataset.json, {"labels": [[name, class], …]}, in a folder or a zip.

    `{"labels": null}` means one class. The files lie at the top level or in the folder `name`.
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
    if unpaired := sorted(label_of.keys() ^ files.keys()):
        raise ValueError(f"{where} labels {len(label_of)} files, but there are {len(files)}: {unpaired[0]!r} is "
                         f"{'labelled but missing' if unpaired[0] in label_of else 'not labelled'}.")
    if not files:
        raise ValueError(f"{listing.path} holds dataset.json, but no .npy files of latents: copy them again.")
    order = sorted(files)
    shape, read = array_reader(listing, [files[file] for file in order])
    return Stored(np.array([label_of[file] for file in order]), shape, {"latents": read})


def pair_folders(source: Path) -> list[tuple[str, str]]:
    """Lists fast-DiT's pairs of folders, such as imagenet256_features and imagenet256_labels."""
    return [(name, labels) for name in sorted(os.listdir(source)) if name.endswith("_features")
            and (source / (labels := f"{name.removesuffix('_features')}_labels")).is_dir()]


def open_pairs(source: Path) -> Stored:
    """Opens fast-DiT's pairs of <i>.npy or <rank>-<i>.npy, sorted by number. A file holds one latent or a batch."""
    folders = pair_folders(source)
    if len(folders) != 1:
        raise ValueError(f"source={source} must hold one folder <name>_features and its <name>_labels, not "
                         f"{', '.join(features for features, _ in folders) or 'none'}: use a folder with one pair.")
    features, labels = (list_folder(source / folder) for folder in folders[0])
    latents, label_files = npy_files(features), npy_files(labels)
    unpaired = sorted(latents.keys() ^ label_files.keys())
    if unpaired or not latents:
        more = f"; {unpaired[0]} is only in one of the two folders." if unpaired else "."
        raise ValueError(f"source={source} has {len(latents)} latents in {features.path.name} and {len(label_files)} "
                         f"labels in {labels.path.name}{more}")
    order = sorted(latents, key=lambda name: ([int(number) for number in re.findall(r"\d+", name)], name))
    warn_of_gap(order, features.path)
    shape, read = array_reader(features, [latents[name] for name in order])
    label_shape, read_labels = array_reader(labels, [label_files[name] for name in order])
    batch = shape[0] if len(shape) == 4 else 1  # latents per file
    if math.prod(label_shape) != batch:
        raise ValueError(f"source={source} has latents {shape} but labels {label_shape} in {order[0]}: each latent "
                         f"needs one label.")

    def rows(start: int, end: int) -> np.ndarray:
        first = start // batch
        stored = read(first, -(-end // batch)).reshape(-1, *shape[-3:])
        return stored[start - first * batch : end - first * batch]

    chunks = [read_labels(start, start + 4096).reshape(-1) for start in range(0, len(order), 4096)]
    return Stored(np.concatenate(chunks), shape[-3:], {"latents": rows})


# ---- MaskDiT's lmdb -------------------------------------------------------------------------------------------------


def lmdb_folder(source: Path) -> Path | None:
    """Finds the folder that holds data.mdb: the source itself, or its train folder as in MaskDiT's code."""
    return next((folder for folder in (source, source / "train") if (folder / "data.mdb").is_file()), None)


def open_lmdb(source: Path, mirrored: bool | None) -> Stored:
    """Opens an lmdb with z-<i> (raw float32 mean and log-variance), y-<i> (text) and length.

    Latents of flipped images, if any, follow those of the plain ones.
    """
    import lmdb

    folder = lmdb_folder(source) or source
    file = folder / "data.mdb"
    try:
        env = lmdb.open(str(folder), readonly=True, lock=False, readahead=False, create=False)
    except lmdb.Error as error:
        raise ValueError(f"{file} is not a complete lmdb ({error}): copy it again.") from error
    written, found = (env.info()["last_pgno"] + 1) * env.stat()["psize"], file.stat().st_size
    if found < written:  # reading past the end would crash the process
        raise ValueError(f"{file} has {found:,} bytes, but {written:,} were written: copy it again.")
    entries, transaction = env.stat()["entries"], env.begin(buffers=True)

    if transaction.get(b"num_samples"):
        raise ValueError(f"{file} was written by MeanFlow's code as pickles, which are never loaded: convert them to a "
                         f"latent folder (examples/write_latents.py).")

    def value(key: str) -> memoryview:
        if (content := transaction.get(key.encode())) is None:
            raise ValueError(f"{file} lacks {key}: it is incomplete, or has another format.")
        return content

    def number(key: str) -> int:
        return int(bytes(value(key)))

    length = number("length")
    total = 2 * length if entries == 4 * length + 1 else length  # length may or may not count the flipped images
    if entries != 2 * total + 1 or not total:  # one z and one y per latent, and length
        raise ValueError(f"{file} holds {entries:,} entries, which does not fit length {length:,} with 2 per latent: "
                         f"it is incomplete, or has another format.")
    labels = np.array([number(f"y-{index}") for index in range(total)])
    half = total // 2
    same = total % 2 == 0 and np.array_equal(labels[:half], labels[half:])
    if (mirrored or total > length) and not same:
        raise ValueError(f"{file} holds no mirrored copies: the labels of its two halves differ.")
    if mirrored is None and same and labels[0] == labels[-1] and total > 1:
        raise ValueError(f"{file} has only one class, so the labels do not show whether it has mirrored copies: set "
                         f"mirrored=true or mirrored=false.")
    is_sorted = bool((np.diff(labels[:half]) >= 0).all())  # extract_latent.py visits the classes in order, twice
    copies = same and is_sorted if mirrored is None else mirrored
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
    """Opens shards of latents, latents_flip (N, C, h, w) and labels (N,), and with `latent_norm` latents_stats.pt."""
    from safetensors import SafetensorError, safe_open

    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ValueError(f"source={source} holds no .safetensors.")
    warn_of_gap([file.name for file in files], source)
    ranks = Counter(file.name.rpartition("_shard")[0] for file in files)
    if len(set(ranks.values())) > 1:  # every rank had the same number of images
        warnings.warn(f"{source} has unequal numbers of shards per rank ({dict(ranks)}). Some are missing, or remain "
                      f"from an earlier extraction with more GPUs, so that their images count twice.", stacklevel=3)
    starts, labels, form = [0], [], None
    for file in files:
        refuse_pointer(file)
        try:
            with safe_open(file, framework="pt") as shard:
                parts = ["latents"] + [name for name in list(shard.keys()) if name == "latents_flip"]
                sizes = [tuple(shard.get_slice(part).get_shape()) for part in parts]
                own = shard.get_tensor("labels").numpy()
        except (SafetensorError, OSError, TypeError) as error:  # numpy raises TypeError for bfloat16
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
                    with safe_open(file, framework="pt") as shard:  # closing it unmaps its pages
                        rows.append(shard.get_slice(part)[max(start, first) - first : min(end, last) - first])
            return torch.cat(rows)
        return read

    form_fields = {"autoencoder": "sd_vae_ema", "decoder": "Stable Diffusion's VAE", "downsample": 8}
    if latent_norm:
        statistics = source / STATISTICS
        if not statistics.is_file():
            raise ValueError(f"source={source} has no {STATISTICS}, which LightningDiT's loader writes. For latents of "
                             f"an SD-VAE, which it does not normalise, set latent_norm=false.")
        form_fields = {"convention": read_statistics(statistics)}
        form_fields["convention"].require(form[0][0], str(statistics))
    sides = {"latents": reader("latents")} | ({"mirrored": reader("latents_flip")} if len(form) > 1 else {})
    return Stored(np.concatenate(labels), form[0], sides, form_fields)


# ---- TREAD's tars ---------------------------------------------------------------------------------------------------


def open_tars(source: Path, kind: str | None) -> Stored:
    """Opens tars of <key>.latent.npy and <key>.cls. TREAD trains on these values without scaling them."""
    tars = find_tars(source)
    if not tars:
        raise ValueError(f"source={source} names no .tar.")
    refuse_pickles(tars[0])
    refuse_two_splits(tars, "source", source)
    warn_of_gap([tar.name for tar in tars], source)
    with ThreadPoolExecutor() as pool:
        parts = [*pool.map(read_tar, tars)]
    rows, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    shape = rows.shape[1:]
    if kind is None and shape[0] != 4 and shape[1] == shape[2]:
        raise ValueError(f"{tars[0]} holds latents of {shape[0]} channels, and tars do not record their kind: set "
                         f"kind=moments for [mean, log-variance], or kind=sample.")

    return Stored(labels, shape, {"latents": lambda start, end: rows[start:end]}, {
        "kind": kind or "sample", "scaled": kind != "moments", "log_variance": kind == "moments"})


def refuse_pickles(tar: Path) -> None:
    """Raises ValueError for one of MaskDiT's tars, because their latents are pickles."""
    first = itertools.islice(tar_members(tar), 8)
    if name := next((member.name for member in first if member.name.endswith(".latent")), None):
        raise ValueError(f"{tar}: {name} is a pickle, which can run code and is never loaded. Import the lmdb that the "
                         f"tars were made from (format=maskdit), or rewrite them with the lines in docs/interop.md.")


# ---- finding the format ---------------------------------------------------------------------------------------------


def recognize(source: str) -> tuple[str, str]:
    """Returns a source's format and how it was recognised. Raises ValueError if it could be several, or is unknown."""
    if found := find_form(source):
        return found
    known = "; ".join(f"{format}: {form.whose}" for format, form in FORMS.items())
    raise ValueError(f"source={source} has none of these formats ({known}). docs/interop.md describes each. Convert "
                     f"any other as examples/write_latents.py does. For images use scripts/prepare_latents.py.")


def find_form(source: str) -> tuple[str, str] | None:
    """Like `recognize`, but returns None for an unknown format."""
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
            found = find_by_names(os.listdir(folder), source)
    elif path.is_file() and (path.suffix == ".zip" or zipfile.is_zipfile(path)):
        found = find_by_names(list_zip(path).names, source)
    tars = [tar for tar in find_tars(source) if not found and re.search(TAR_SUFFIX, tar.name)]
    if tars:
        refuse_pickles(tars[0])
        found.append(("tread", f"{tars[0].name} is a tar"))
    if len(found) > 1:
        each = " and ".join(f"{format} ({why})" for format, why in found)
        raise ValueError(f"source={source} could be {each}: set format= to one of them.")
    return found[0] if found else None


def refuse_foreign(source: str) -> None:
    """Raises ValueError if a source of images or a latent folder is another code's latents; tars are allowed."""
    path = Path(source)
    if not (path / "metadata.json").is_file() and (found := find_form(source)) and found[0] != "tread":
        raise ValueError(f"{source} holds {FORMS[found[0]].whose}: run `python scripts/import_latents.py "
                         f"source={path} out={Path('data') / path.stem}`, and train on "
                         f"its output.")


def find_by_names(names: list[str], source: str) -> list[tuple[str, str]]:
    """Finds the format of a set with a dataset.json from its file names.

    Raises ValueError for names that both REPA and EDM2 use.
    """
    for name in names:
        if "vae-sd" in (parts := name.split("/")) and name.endswith(".npy"):
            return [("repa", f"{name} lies in vae-sd")]
        if "vae-in" in parts or posixpath.basename(name).startswith("img-latents-"):
            return [("srdit", f"{name} is one of SR-DiT's names")]
        if posixpath.basename(name).startswith("img-mean-std-"):
            raise ValueError(f"source={source} holds {posixpath.basename(name)}, which both REPA and EDM2 write: set "
                             f"format=repa (VAE input in -1..1) for scripts/import_latents.py if REPA's, SiT-REPA's or "
                             f"Sprint's preprocessing made it, or format=edm2 (VAE input in 0..1) if EDM2's "
                             f"dataset_tool.py did.")
    return []


def open_stored(
    format: str, source: str, kind: str | None, scale: float | None, latent_norm: bool, mirrored: bool | None,
    autoencoder: str | None,
) -> tuple[Stored, Form]:
    """Opens a source in one of FORMS. The files and the settings complete the Form."""
    for key, is_set, owner in (("kind", kind is not None, "tread"), ("latent_norm", not latent_norm, "lightningdit"),
                               ("mirrored", mirrored is not None, "maskdit")):
        if is_set and format != owner:
            raise ValueError(f"{key} is only for format={owner}, but this is format={format}: leave it out.")
    openers = {"maskdit": partial(open_lmdb, mirrored=mirrored), "tread": partial(open_tars, kind=kind),
               "lightningdit": partial(open_safetensors, latent_norm=latent_norm), "fastdit": open_pairs,
               "srdit": partial(open_listed, name="vae-in")}
    stored = openers.get(format, partial(open_listed, name="vae-sd"))(Path(source))
    form = replace(FORMS[format], **stored.form)
    form = replace(form, convention=replace(form.convention, scale=scale or form.convention.scale),
                   scaled=form.scaled and scale is None, autoencoder=autoencoder or form.autoencoder)
    if form.scaled and autoencoder and (own := own_convention(autoencoder)):  # it scaled them already
        form = replace(form, convention=own)
    channels, *sides = stored.shape if min(stored.shape, default=0) > 0 else (0,)
    is_fitting = form.channels in (None, channels) and not (form.kind == "moments" and channels % 2)
    if not is_fitting or len(sides) != 2 or sides[0] != sides[1]:
        raise ValueError(f"source={source} holds arrays of shape {stored.shape}, but {form.whose} has "
                         f"({form.channels or 'C'}, R, R), channels first. Another shape means another format, another "
                         f"autoencoder, or images that are not square.")
    return stored, form
