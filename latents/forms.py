"""The formats in which other code stores latents: how to read each, and what its values mean.

`open_stored` opens a source, and `describe_formats` lists what `format=` could be. docs/interop.md describes the
formats. Nothing is unpickled.
"""

import itertools
import math
import re
import zipfile
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from autoencoder import SD_VAE_SCALE, Convention
from latents.labels import parse_dataset
from latents.listing import Listing, find_tars, list_folder, list_tars, list_zip, require_one_set, stamp_of, tar_members
from runtime.files import MOST_BYTES, open_plain, refuse_pointer
from runtime.schema import first_line, typed
from runtime.untrusted import read_npy, reading, refuse_pointer_text
from weights.autoencoders import HUB_NAMES, STATISTICS, own_convention, read_statistics

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
    "tread": Form("CompVis TREAD's tars", "sample", "sd_vae_ema", "stabilityai/sd-vae-ft-ema", 8, scaled=True),
    "lightningdit": Form("LightningDiT's safetensors", "sample", "none", "LightningDiT's VA-VAE", 16),
    "repa": Form("REPA's vae-sd", "moments", "sd_vae_mse", "stabilityai/sd-vae-ft-mse", 8, 8),
    "edm2": Form("EDM2's zip", "moments", "sd_vae_mse", "stabilityai/sd-vae-ft-mse", 8, 8, EDM2),
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
    means, stds = values.chunk(2, dim=1)
    if convention.latents_mean is None:
        return torch.cat([convention.latent(means), stds * convention.scale], dim=1).half()
    mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (convention.latents_mean, convention.latents_std))
    scale = convention.scale / std
    return torch.cat([means * scale - (mean + convention.shift) * scale, stds * scale], dim=1).half()


LISTED = ("img-mean-std-*.npy", "*/img-mean-std-*.npy", "vae-sd/*/img-mean-std-*.npy")
NAMES = {  # patterns of the names of each format's files, and what decides for it or must be set with it
    "tread": (("*.latent.npy", "*.latent"), "with kind=sample (scaled latents; for unscaled ones scale=0.18215 too) or "
              "kind=moments ([mean, log-variance])"),
    "lightningdit": (("*.safetensors",), "for VA-VAE's latents and their latents_stats.pt, with latent_norm=false for "
                     "an SD-VAE's"),
    "repa": (LISTED, "if REPA, SiT-REPA or Sprint encoded them (VAE input in -1..1)"),
    "edm2": (LISTED, "if EDM2's dataset_tool.py did (VAE input in 0..1)"),
    "fastdit": (("*_features/*.npy",), "for scaled latents, with scale=0.18215 for unscaled ones"),
}


def describe_formats(source: str) -> str:
    """Returns a sentence with the formats that write files of such names, and what must be typed for each."""
    path, names = Path(source), []
    if (path / "metadata.json").is_file():
        return f"source={source} is a latent folder already: train on it with {typed('data.path', source)}."
    if tars := [tar for tar in find_tars(source) if tar.suffix == ".tar"]:
        names = [member.name for member in itertools.islice(tar_members(tars[0]), 8)]
    elif path.is_file() and zipfile.is_zipfile(path):
        names = list_zip(path).names
    choices = [f"format={format} {needs}" for format, (patterns, needs) in NAMES.items() for pattern in patterns
               if any(path.glob(pattern)) or any(fnmatch(name, pattern) for name in names)]
    if choices:
        return f"source={source} does not record its format: set {'; or '.join(dict.fromkeys(choices))}."
    return (f"source={source} has no files with the names of a format that can be read: set format= if it is "
            f"{', '.join(NAMES)} (docs/interop.md). For images use scripts/prepare_latents.py, and for other latents "
            f"examples/write_latents.py.")


MOST_ELEMENTS = 2**20  # of one latent, as some hundred are in memory at once; 16 channels of 256 x 256 have as many


@dataclass
class Stored:
    """A set of latents on disk. Each of `sides` is a function that reads rows start to end unconverted, (n, *shape)."""

    form: Form                                  # completed by the files and the settings
    labels: np.ndarray                          # (count,) int64
    shape: tuple[int, int, int]
    stamps: list[tuple[int, ...]]               # of its files, as in latents.listing.Listing
    sides: dict[str, Callable[[int, int], np.ndarray | torch.Tensor]]   # latents, and mirrored if there are copies


def open_stored(
    format: str, source: str, kind: str | None, scale: float | None, latent_norm: bool, autoencoder: str | None,
) -> Stored:
    """Opens a source in one of FORMS. Raises ValueError for files or settings that do not fit the format."""
    for key, is_set, owner in (("kind", kind is not None, "tread"), ("latent_norm", not latent_norm, "lightningdit")):
        if is_set and format != owner:
            raise ValueError(f"{key} is only for format={owner}, but this is format={format}: leave it out.")
    form, path = FORMS[format], Path(source)
    match format:
        case "tread":
            stored = open_tars(form, path, kind)
        case "lightningdit":
            stored = open_safetensors(form, path, latent_norm)
        case "fastdit":
            stored = open_pairs(form, path)
        case _:
            stored = open_listed(form, path)
    form = stored.form
    if math.prod(stored.shape) > MOST_ELEMENTS:
        raise ValueError(f"source={source} holds arrays of shape {stored.shape}, which have more than "
                         f"{MOST_ELEMENTS:,} numbers each: they are no latents.")
    form = replace(form, autoencoder=autoencoder or form.autoencoder, scaled=form.scaled and scale is None)
    if form.convention.latents_mean is not None:    # statistics belong to the stored values, whatever decodes them
        form = replace(form, convention=replace(form.convention, scale=scale or form.convention.scale))
    elif autoencoder or scale:
        form = scaled_by(form, source, stored.shape[0], scale)
    stored.form = form
    channels, *sides = stored.shape if min(stored.shape, default=0) > 0 else (0,)
    is_fitting = form.channels in (None, channels) and not (form.kind == "moments" and channels % 2)
    if not is_fitting or len(sides) != 2 or sides[0] != sides[1]:
        raise ValueError(f"source={source} holds arrays of shape {stored.shape}, but {form.whose} has "
                         f"({form.channels or 'C'}, R, R), channels first. Another shape means another format, another "
                         f"autoencoder, or images that are not square.")
    channels //= 2 if form.kind == "moments" else 1
    if stored.form.autoencoder in HUB_NAMES and channels != 4:
        raise ValueError(f"source={source} holds latents of {channels} channels, read with kind={form.kind}, but "
                         f"{stored.form.autoencoder}'s have 4: correct kind= or latent_norm=, or set autoencoder= "
                         f"(none if it is unknown).")
    return stored


def scaled_by(form: Form, source: str, channels: int, scale: float | None) -> Form:
    """Completes a form by its autoencoder's own convention, or by a scale for one that has none.

    Raises ValueError where the two differ, or neither says how to scale.
    """
    name, own = form.autoencoder, own_convention(form.autoencoder)
    if own is not None and scale not in (None, own.scale):
        raise ValueError(f"scale={scale:g} is typed, but autoencoder={name} decodes latents of scale {own.scale:g}: "
                         f"leave scale= out, name the folder of another autoencoder, or set autoencoder=none.")
    if own is not None or scale is not None:
        return replace(form, convention=own or Convention(scale))
    if form.scaled and channels != 4:               # not an SD-VAE's, so a decoder gets them as they are
        return replace(form, convention=Convention(), decoder="unknown", downsample=None)
    raise ValueError(f"autoencoder={name} does not say by what source={source} {'was' if form.scaled else 'is to be'} "
                     f"scaled: leave it out if by an SD-VAE's {SD_VAE_SCALE}, name a folder whose config.json has the "
                     f"scale{'' if form.scaled else ', or set scale= as well'}. In training, data.autoencoder= may "
                     f"name another decoder.")


# ---- one npy file per array -----------------------------------------------------------------------------------------


def files_of(listing: Listing, suffix: str = ".npy") -> dict[str, int]:
    """Maps the names of a listing's files with a suffix to their numbers."""
    return {name: i for i, name in enumerate(listing.names) if name.endswith(suffix)}


def require_labels(source: Path, latents: Collection[str], labels: Collection[str]) -> None:
    """Raises ValueError unless each of the latents has a label and each label a latent, by their names."""
    if not latents:
        raise ValueError(f"source={source} holds no .npy files of latents: copy them again.")
    if unpaired := sorted({*latents} ^ {*labels}):
        raise ValueError(f"source={source} has {len(latents)} latents and {len(labels)} labels: {unpaired[0]!r} has no "
                         f"{'label' if unpaired[0] in latents else 'latent'}.")


def array_reader(listing: Listing, files: list[int]) -> tuple[tuple[int, ...], Callable[[int, int], np.ndarray]]:
    """Returns the common shape of the arrays in `files`, and a function that reads and stacks files start to end."""
    def load(file: int) -> np.ndarray:
        with reading(f"{listing.path}/{listing.names[file]}", "a complete npy file of numbers like the others"):
            stored = listing.read(file)
            refuse_pointer_text(stored)
            array = read_npy(BytesIO(stored), len(stored))
            array = array[0] if array.ndim == 4 and len(array) == 1 else array  # some writers keep the batch axis
            if array.shape != (shape or array.shape):
                raise ValueError(f"shape {array.shape}, but {listing.names[files[0]]} {shape}")
            return array

    def read(start: int, end: int) -> np.ndarray:
        return np.stack([load(file) for file in files[start:end]])

    shape = None  # until the first array is read
    shape = load(files[0]).shape
    return shape, read


def open_listed(form: Form, source: Path) -> Stored:
    """Opens .npy files and their dataset.json, {"labels": [[name, class], …]}, in a folder or a zip.

    `{"labels": null}` means one class. The files lie at the top level or in a folder vae-sd.
    """
    if source.is_dir():
        listing = list_folder(source / "vae-sd" if (source / "vae-sd").is_dir() else source, links=False)
    else:
        listing = list_zip(source)
        listing = listing.below("vae-sd") if any(file.startswith("vae-sd/") for file in listing.names) else listing
    files = files_of(listing)
    if "dataset.json" not in listing.names:
        raise ValueError(f"source={source} has no {listing.path / 'dataset.json'}, the labels of the files beside it: "
                         f"copy it there.")
    try:
        label_of = parse_dataset(listing.read(listing.names.index("dataset.json")))
    except ValueError as error:
        raise ValueError(f"{listing.path / 'dataset.json'} cannot be read, as {first_line(error)}.") from error
    label_of = dict.fromkeys(files, 0) if label_of is None else label_of
    require_labels(listing.path, files, label_of)
    order = sorted(files)
    shape, read = array_reader(listing, [files[file] for file in order])
    with reading(listing.path / "dataset.json", "a list of one class for each file", "correct it"):
        labels = np.array([label_of[file] for file in order])
    return Stored(form, labels, shape,
                  [listing.stamp(files[file]) for file in order], {"latents": read})


def open_pairs(form: Form, source: Path) -> Stored:
    """Opens fast-DiT's pairs of <i>.npy or <rank>-<i>.npy, sorted by number. A file holds one latent or a batch."""
    folders = [(features, labels) for features in sorted(source.glob("*_features")) if (labels := source / (
        f"{features.name.removesuffix('_features')}_labels")).is_dir()]
    if len(folders) != 1:
        raise ValueError(f"source={source} must hold one folder <name>_features and its <name>_labels, not "
                         f"{', '.join(features.name for features, _ in folders) or 'none'}: use a folder with one.")
    features, labels = (list_folder(folder, links=False) for folder in folders[0])
    latents, label_files = files_of(features), files_of(labels)
    require_labels(source, latents, label_files)
    order = sorted(latents, key=lambda name: ([int(number) for number in re.findall(r"\d+", name)], name))
    shape, read = array_reader(features, [latents[name] for name in order])
    label_shape, read_labels = array_reader(labels, [label_files[name] for name in order])
    batch = shape[0] if len(shape) == 4 else 1  # latents per file
    if math.prod(label_shape) != batch:
        raise ValueError(f"source={source} has latents {shape} but labels {label_shape} in {order[0]}: each latent "
                         f"needs one label.")

    def rows(start: int, end: int) -> np.ndarray:
        first = start // batch
        arrays = read(first, -(-end // batch)).reshape(-1, *shape[-3:])
        return arrays[start - first * batch : end - first * batch]

    chunks = [read_labels(start, start + 4096).reshape(-1) for start in range(0, len(order), 4096)]
    return Stored(form, np.concatenate(chunks), shape[-3:], [features.stamp(latents[name]) for name in order],
                  {"latents": rows})


# ---- LightningDiT's safetensors -------------------------------------------------------------------------------------


def open_safetensors(form: Form, source: Path, latent_norm: bool) -> Stored:
    """Opens shards of latents, latents_flip (N, C, h, w) and labels (N,), and with `latent_norm` latents_stats.pt."""
    from safetensors import safe_open

    files = sorted(source.glob("*.safetensors"))
    if not files:
        folder = typed("source", source if source.is_dir() else source.parent)
        raise ValueError(f"source={source} is no folder of .safetensors: name one, as in {folder}.")
    for file in files:
        open_plain(file, links=False).close()
    require_one_set(source, files, "source")
    starts, labels, shapes = [0], [], None  # of one latent in each part
    for file in files:
        refuse_pointer(file)
        with reading(file, "a complete safetensors file"), safe_open(file, framework="pt") as shard:
            parts = ["latents"] + [name for name in list(shard.keys()) if name == "latents_flip"]
            slices = [shard.get_slice(part) for part in parts]
            sizes = [tuple(part.get_shape()) for part in slices]
            if complex_numbers := [part.get_dtype() for part in slices if part.get_dtype().startswith("C")]:
                raise ValueError(f"its latents are complex numbers, {complex_numbers[0]}")
            if math.prod(shard.get_slice("labels").get_shape()) > MOST_BYTES // 8:
                raise ValueError(f"it has more than {MOST_BYTES // 8:,} labels")
            labels.append(shard.get_tensor("labels").numpy())
        shapes, count = shapes or [size[1:] for size in sizes], labels[-1].size
        if labels[-1].ndim != 1 or sizes != [(count, *shape) for shape in shapes]:
            raise ValueError(f"{file} has {count} labels and latents {sizes}, but {files[0].name} latents {shapes}.")
        starts.append(starts[-1] + count)

    def reader(part: str) -> Callable[[int, int], torch.Tensor]:
        def read(start: int, end: int) -> torch.Tensor:
            rows = []
            for file, first, last in zip(files, starts[:-1], starts[1:], strict=True):
                if first < end and start < last:
                    with safe_open(file, framework="pt") as shard:  # closing it unmaps its pages
                        rows.append(shard.get_slice(part)[max(start, first) - first : min(end, last) - first])
            return torch.cat(rows)
        return read

    if latent_norm:
        statistics = source / STATISTICS
        if not statistics.is_file():
            raise ValueError(f"source={source} has no {STATISTICS}, which LightningDiT's loader writes. For latents of "
                             f"an SD-VAE, which it does not normalise, set latent_norm=false.")
        form = replace(form, convention=read_statistics(statistics))
        form.convention.require(shapes[0][0], str(statistics))
    else:
        form = replace(form, autoencoder="sd_vae_ema", decoder="Stable Diffusion's VAE", downsample=8)
    sides = {"latents": reader("latents")} | ({"mirrored": reader("latents_flip")} if len(shapes) > 1 else {})
    return Stored(form, np.concatenate(labels), shapes[0], [stamp_of(file) for file in files], sides)


# ---- TREAD's tars ---------------------------------------------------------------------------------------------------


def open_tars(form: Form, source: Path, kind: str | None) -> Stored:
    """Opens tars of <key>.latent.npy and <key>.cls. TREAD trains on these values without scaling them."""
    tars = find_tars(source)
    if not tars:
        raise ValueError(f"source={source} names no .tar.")
    pickles = [member.name for member in itertools.islice(tar_members(tars[0]), 8) if member.name.endswith(".latent")]
    if pickles:
        raise ValueError(f"{tars[0]}: {pickles[0]} is a pickle, which can run code and is never loaded: rewrite the "
                         f"tars with the lines in docs/interop.md.")
    if kind is None:
        raise ValueError(f"source={source}: tars do not record what they hold: set kind=sample (scaled latents, as "
                         f"TREAD's) or kind=moments ([mean, log-variance]).")
    require_one_set(source, tars, "source")
    listing = list_tars(tars, source)
    latents, classes = ({name.removesuffix(suffix): i for name, i in files_of(listing, suffix).items()}
                        for suffix in (".latent.npy", ".cls"))
    if len(latents) < sum(name.endswith(".latent.npy") for name in listing.names):
        raise ValueError(f"source={source} has two latents of one name in a tar, or in two tars of one name.")
    require_labels(source, latents, classes)
    shape, read = array_reader(listing, [*latents.values()])
    labels = np.empty(len(latents), np.int32)
    for row, key in enumerate(latents):
        with reading(f"source={source}: {key}.cls", "a class number", "write 0, 1, 2 …"):
            labels[row] = int(listing.read(classes[key]))
    return Stored(replace(form, kind=kind, scaled=kind == "sample", log_variance=kind == "moments"), labels, shape,
                  [stamp_of(tar) for tar in tars], {"latents": read})
