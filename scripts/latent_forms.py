"""The forms in which other code bases store latents: by which each is known, how it is read, what its values are.

`recognize` names a source's form and `open_stored` opens it; docs/interop.md says whose each is. Nothing is unpickled,
and nothing outside the source is read: what a form holds is checked against its size on disk before memory is taken.
"""

import itertools
import json
import math
import os
import posixpath
import re
import struct
import zipfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from autoencoder import SD_VAE_SCALE, Convention
from data import allow_open_files, npy_header, tar_index
from images import MAX_CLASSES, find_tars, is_special, map_tar, tar_members

FEATURES, LABELS = "imagenet256_features", "imagenet256_labels"      # fast-DiT's names, at any resolution

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
        return (values * form.scale).half()      # mean and std alike
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
    read_mirrored: Callable[[int, int], np.ndarray | torch.Tensor] | None = None      # of the images flipped
    form: dict = field(default_factory=dict)                        # what the files say beyond the Form

    @property
    def sides(self) -> dict[str, Callable]:
        mirrored = {} if self.read_mirrored is None else {"mirrored": self.read_mirrored}
        return {"latents": self.read} | mirrored


def class_number(label: object, where: str) -> int:
    """Returns a label; raises ValueError for one that is no whole number or beyond any number of classes."""
    if isinstance(label, bytes):
        label = int(label) if re.fullmatch(rb"\s*-?\d{1,18}\s*", label) else label
    if type(label) is not int:
        raise ValueError(f"{where} has label {str(label)[:40]!r}, which is no class number.")
    if not 0 <= label < MAX_CLASSES:
        raise ValueError(f"{where} has label {label}, outside 0..{MAX_CLASSES - 1}: at most {MAX_CLASSES:,} classes "
                         f"are read.")
    return label


# ---- places ---------------------------------------------------------------------------------------------------------


def require_inside(root: Path, path: Path) -> None:
    """Raises ValueError for a link that leads out of a source, and for what is no plain file or folder."""
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(root)):
        raise ValueError(f"{path} is a link to {real}, outside of source={root}: copy the file to where the link is.")
    if is_special(path) and not path.is_dir():
        raise ValueError(f"{path} is no plain file.")


def list_files(root: Path, folder: Path, ending: str) -> list[str]:
    """Lists the files below `folder` whose names end so, in order of name; links are followed inside `root` only."""
    names, waiting, seen = [], [""], set()
    while waiting:
        prefix = waiting.pop()
        real = os.path.realpath(folder / prefix)
        if real in seen:
            raise ValueError(f"{folder / prefix} links to a folder that is listed already, {real}: remove the link.")
        seen.add(real)
        with os.scandir(folder / prefix) as entries:
            for entry in entries:
                if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
                    require_inside(root, Path(entry.path))
                if entry.is_dir():
                    waiting.append(f"{prefix}{entry.name}/")
                elif entry.name.endswith(ending):
                    names.append(prefix + entry.name)
    return sorted(names)


def require_small(size: int, name: str) -> int:
    """Returns the size of a file that is read whole; raises ValueError where memory would not hold it."""
    limit = 2**26 if name.endswith(".npy") else 2**30      # a latent; the labels of ten million
    if size > limit:
        raise ValueError(f"{name} has {size:,} bytes, more than {limit:,}: it is no file of a set of latents.")
    return size


def file_reader(folder: Path, names: list[str]) -> Callable[[int], bytes]:
    """Returns what reads the i-th file whole."""
    def content(index: int) -> bytes:
        descriptor = os.open(os.path.join(folder, names[index]), os.O_RDONLY)
        try:
            return os.read(descriptor, require_small(os.fstat(descriptor).st_size, names[index]))
        finally:
            os.close(descriptor)
    return content


def list_zip(path: Path) -> dict[str, tuple[int, int]]:
    """Returns {name: (where its header begins, its size)} of a stored zip, checked against the zip's own size."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    except (zipfile.BadZipFile, NotImplementedError, IndexError, ValueError, struct.error) as error:
        raise ValueError(f"source={path} is no whole zip ({error}): copy it again.") from error
    size = path.stat().st_size
    places = {}
    for entry in entries:
        name = entry.filename
        if re.search(r"^[/\\]|^[A-Za-z]:|(^|[/\\])\.\.([/\\]|$)", name):
            raise ValueError(f"source={path} names {name!r}, which lies outside of the zip: it is no set of latents.")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise ValueError(f"source={path}: {name} is compressed or encrypted: unpack the zip and name the folder, "
                             f"or zip it again with `zip -0`.")
        if not 0 <= entry.header_offset <= size - 30 - entry.file_size:
            raise ValueError(f"source={path}: {name} takes {entry.file_size:,} bytes at byte "
                             f"{entry.header_offset:,} of a zip of {size:,}: copy the zip again.")
        if name.endswith((".npy", ".json")):
            require_small(entry.file_size, name)
        if places.setdefault(name, (entry.header_offset, entry.file_size)) != (entry.header_offset, entry.file_size):
            raise ValueError(f"source={path} holds {name} twice.")
    return places


def zip_reader(path: Path, places: list[tuple[int, int]]) -> Callable[[int], bytes]:
    """Returns what reads the i-th of `places` in a stored zip."""
    table = np.array(places, np.int64).reshape(-1, 2)
    file = open(path, "rb")      # noqa: SIM115      (for as long as it is read)

    def content(index: int) -> bytes:
        offset, size = table[index].tolist()
        header = os.pread(file.fileno(), 30, offset)
        if header[:4] != b"PK\x03\x04":
            raise ValueError(f"source={path} is damaged at byte {offset:,}: copy it again.")
        return os.pread(file.fileno(), size, offset + 30 + sum(struct.unpack("<HH", header[26:])))
    return content


# ---- arrays that are files of their own -----------------------------------------------------------------------------


def npy_form(content: bytes, where: str, dtypes: tuple[str, ...]) -> tuple[bytes, np.dtype, tuple[int, ...]]:
    """Returns (header, dtype, shape) of a .npy in memory, whose header promises what is there and no objects."""
    stream = BytesIO(content)
    try:
        shape, fortran, dtype = npy_header(stream)
    except ValueError as error:
        raise ValueError(f"{where} is not an npy file ({error}).") from error
    if fortran or dtype.str not in dtypes or min(shape, default=1) < 1:
        seen = "Python objects, which are pickled and never loaded" if dtype.hasobject else f"{dtype} {shape}"
        raise ValueError(f"{where} holds {seen}{' in Fortran order' if fortran else ''}, where an array of "
                         f"{' or '.join(np.dtype(name).name for name in dtypes)} is expected.")
    expected = stream.tell() + math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise ValueError(f"{where} has {len(content):,} bytes, but its header promises {expected:,}: it was cut short "
                         f"or written over.")
    return content[: stream.tell()], dtype, shape


def npy_reader(
    count: int, content: Callable[[int], bytes], name: Callable[[int], str], dtypes: tuple[str, ...] = ("<f4", "<f2"),
) -> tuple[tuple[int, ...], Callable[[int, int], np.ndarray]]:
    """Returns the shape that all of `count` .npy files have, and what reads rows start to end of them."""
    header, dtype, shape = npy_form(content(0), name(0), dtypes)
    num_bytes = math.prod(shape) * dtype.itemsize

    def read(start: int, end: int) -> np.ndarray:
        rows = np.empty((end - start, num_bytes), np.uint8)
        for row, index in zip(rows, range(start, end), strict=True):
            npy = content(index)
            first = len(header)
            if len(npy) != first + num_bytes or not npy.startswith(header):
                other, *found = npy_form(npy, name(index), dtypes)
                first = len(other)
                if found != [dtype, shape]:
                    raise ValueError(f"{name(index)} holds {found[0]} {found[1]}, but {name(0)} {dtype} {shape}: one "
                                     f"data set has one shape.")
            row[:] = np.frombuffer(npy, np.uint8, num_bytes, first)
        return rows.view(dtype).reshape(-1, *shape)

    return shape, read


def read_labels(text: bytes, where: str, names: list[str]) -> np.ndarray:
    """Returns the labels of `names` as dataset.json, {"labels": [[name, class], …]}, has them."""
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}).") from error
    pairs = plain.get("labels") if isinstance(plain, dict) else None
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)
                                              for pair in pairs):
        raise ValueError(f'{where} does not hold {{"labels": [[file name, class], …]}}: the latents have no labels.')
    label_of = {name: class_number(label, f"{where}: {name}") for name, label in pairs}
    if len(label_of) != len(pairs):
        raise ValueError(f"{where} labels {len(pairs) - len(label_of)} files twice.")
    if alone := sorted(label_of.keys() ^ set(names)):
        raise ValueError(f"{where} labels {len(label_of)} files and {len(names)} are there; {alone[0]!r} is "
                         f"{'labelled but not there' if alone[0] in label_of else 'there but not labelled'}.")
    return np.array([label_of[name] for name in names], np.int64)


def open_listed(source: Path, name: str) -> Stored:
    """Opens .npy files and their dataset.json in a folder or a stored zip, at its top or in the folder `name`."""
    if source.is_dir():
        folder = source / name if (source / name).is_dir() else source
        require_inside(source, folder)
        names = list_files(source, folder, ".npy")
        if not (folder / "dataset.json").is_file():
            raise ValueError(f"{folder} has no dataset.json, which holds the labels.")
        require_inside(source, folder / "dataset.json")
        [text], content, where = [file_reader(folder, ["dataset.json"])(0)], file_reader(folder, names), folder
    elif source.is_file():
        places = list_zip(source)
        if any(entry.startswith(f"{name}/") for entry in places):
            places = {entry.removeprefix(f"{name}/"): place for entry, place in places.items()
                      if entry.startswith(f"{name}/")}
        names = sorted(entry for entry in places if entry.endswith(".npy"))
        if "dataset.json" not in places:
            raise ValueError(f"{source} has no dataset.json, which holds the labels.")
        text = zip_reader(source, [places["dataset.json"]])(0)
        content, where = zip_reader(source, [places[entry] for entry in names]), source
    else:
        raise ValueError(f"source={source} is neither a folder nor a zip.")
    if not names:
        raise ValueError(f"{where} holds no .npy file.")
    labels = read_labels(text, f"{where}/dataset.json", names)
    shape, read = npy_reader(len(names), content, lambda index: f"{where}/{names[index]}")
    return one_row_each(labels, shape, read, where)


def one_row_each(labels: np.ndarray, shape: tuple[int, ...], read: Callable, where: str | Path) -> Stored:
    """Drops the batch axis of one that some writers leave in each file."""
    stored = shape[1:] if len(shape) == 4 and shape[0] == 1 else shape
    if len(stored) != 3:
        raise ValueError(f"{where} holds arrays of shape {shape}, where one latent (channels, height, width) is "
                         f"expected.")
    return Stored(labels, stored, lambda start, end: read(start, end).reshape(-1, *stored))


def open_pairs(source: Path) -> Stored:
    """Opens fast-DiT's <i>.npy pairs, in the order of their numbers."""
    names = {}
    for part in (FEATURES, LABELS):
        if not (source / part).is_dir():
            raise ValueError(f"source={source} has no folder {part}: fast-DiT keeps {FEATURES} and {LABELS} side by "
                             f"side.")
        require_inside(source, source / part)
        names[part] = list_files(source, source / part, ".npy")
        foreign = [name for name in names[part] if not re.fullmatch(r"\d{1,12}\.npy", name)]
        if foreign:
            raise ValueError(f"{source / part}/{foreign[0]} is not named by a number.")
    alone = sorted(set(names[FEATURES]) ^ set(names[LABELS]))
    if alone or not names[FEATURES]:
        raise ValueError(f"source={source} has {len(names[FEATURES])} latents and {len(names[LABELS])} labels"
                         + (f"; {alone[0]} is in one of the two folders only." if alone else "."))
    order = sorted(names[FEATURES], key=lambda name: int(name[:-4]))
    for one, other in itertools.pairwise(order):
        if int(one[:-4]) == int(other[:-4]):
            raise ValueError(f"{source / FEATURES} holds {one} and {other}, two latents of one number: remove one.")
    del names
    count = len(order)

    def reader(part: str, dtypes: tuple[str, ...]) -> tuple[tuple[int, ...], Callable]:
        return npy_reader(count, file_reader(source / part, order),
                          lambda index: f"{source / part}/{order[index]}", dtypes)

    shape, read = reader(LABELS, ("<i8",))
    if math.prod(shape) != 1:
        raise ValueError(f"{source / LABELS} holds arrays of shape {shape}, where one label is expected.")
    labels = np.concatenate([read(start, min(start + 4096, count)).ravel() for start in range(0, count, 4096)])
    return one_row_each(labels, *reader(FEATURES, ("<f4", "<f2")), source)


# ---- MaskDiT's lmdb -------------------------------------------------------------------------------------------------


def lmdb_folder(source: Path) -> Path | None:
    """Finds the folder of data.mdb: MaskDiT's code is given its parent, and reads train."""
    return next((folder for folder in (source, source / "train") if (folder / "data.mdb").is_file()), None)


def lmdb_values(file: Path) -> Iterator[tuple[bytes, int, int]]:
    """Yields (key, first byte, size) of all that an LMDB file holds, in the order of its keys.

    Follows the pages of LMDB 0.9, data version 1 (mdb.c: MDB_meta, MDB_page, MDB_node). The library itself trusts a
    file: a damaged page ends the process. Raises ValueError where one is met.
    """
    def fields(form: str, at: int) -> tuple[int, ...]:
        content = os.pread(stream.fileno(), struct.calcsize(form), at)
        if len(content) < struct.calcsize(form):
            raise ValueError(f"it ends before byte {at:,}, where more was written")
        return struct.unpack(form, content)

    def meta(at: int) -> tuple[int, int, int, int]:
        """Returns what a page of the first two says: (number of the write, page size, root, last page)."""
        magic, version, size, root, last, write = fields("<16xII16xI84xQQQ", at)
        if magic != 0xBEEFC0DE or version != 1 or not (size & (size - 1) == 0 and 256 <= size <= 2**16):
            raise ValueError(f"there is no head of one at byte {at:,}")
        return write, size, root, last

    with open(file, "rb") as stream:
        there, size = os.fstat(stream.fileno()).st_size, meta(0)[1]
        _, _, root, last = max(meta(0), meta(size))
        if there < (last + 1) * size:
            raise ValueError(f"it has {there:,} bytes where {(last + 1) * size:,} were written")
        waiting, seen = [root] if root != 2**64 - 1 else [], 0
        while waiting:
            number, seen = waiting.pop(), seen + 1
            if not 2 <= number <= last or seen > last:
                raise ValueError(f"it refers to page {number:,} of {last + 1:,}, or to one twice")
            page = os.pread(stream.fileno(), size, number * size)
            own, kind, lower = struct.unpack_from("<Q2xHH", page)
            nodes = page[16:lower]
            if own != number or kind & 15 not in (1, 2) or len(nodes) % 2 or not 16 <= lower <= size:
                raise ValueError(f"page {number:,} is damaged")
            below = []
            for (node,) in struct.iter_unpack("<H", nodes):
                low, high, flags, length = struct.unpack_from("<4H", page + bytes(8), min(node, size))
                value, held = node + 8 + length, low | high << 16
                if kind & 15 == 1:
                    below.append(held | flags << 32)
                    continue
                first, end = number * size + value, number * size + value + held
                if flags == 1 and value + 8 <= size:      # it has pages of its own
                    first = struct.unpack_from("<Q", page, value)[0] * size + 16
                    end = first + held
                elif flags or value + held > size:
                    raise ValueError(f"page {number:,} is damaged")
                if end > (last + 1) * size:
                    raise ValueError(f"page {number:,} refers to byte {end:,} of {there:,}")
                yield page[node + 8 : value], first, held
            waiting += reversed(below)


def open_lmdb(source: Path, mirrored: bool | None) -> Stored:
    """Opens z-<i> (raw float32, mean and log-variance), y-<i> (text) and length; flipped images follow the others."""
    folder = lmdb_folder(source)
    if folder is None:
        raise ValueError(f"source={source} has no data.mdb, nor has {source / 'train'}.")
    file = folder / "data.mdb"
    require_inside(source, file)
    entries, length, kept = 0, None, {b"z": array("q"), b"y": array("q")}
    try:
        for key, first, size in lmdb_values(file):
            entries += 1
            if key == b"length":
                length = first, size
            elif match := re.fullmatch(rb"([zy])-(0|[1-9]\d{0,11})", key):
                kept[match[1]].extend((int(match[2]), first, size))
    except ValueError as error:
        raise ValueError(f"{file} is no whole lmdb ({error}): copy it again.") from error
    if length is None:
        raise ValueError(f"{file} lacks length: it is no lmdb of latents as MaskDiT's extract_latent.py writes it, or "
                         f"was not finished.")
    stream = open(file, "rb")      # noqa: SIM115      (for as long as it is read)

    text = os.pread(stream.fileno(), min(length[1], 20), length[0])
    if not re.fullmatch(rb"\d{1,12}", text) or int(text) == 0:
        raise ValueError(f"{file} says length {text[:20]!r}, where the number of latents is expected.")
    length = int(text)
    total = 2 * length if entries == 4 * length + 1 else length      # some count the flipped images, some do not
    if entries != 2 * total + 1:      # a z and a y each, and length
        raise ValueError(f"{file} says length {length:,}, but holds {entries:,} entries, where 2 a "
                         f"latent and one more are expected: it was not finished, or is of another form.")
    places = {}
    for part, numbers in kept.items():
        table = np.array(numbers, np.int64).reshape(-1, 3)
        table = table[np.argsort(table[:, 0])]
        lacking = np.flatnonzero(table[:total, 0] != np.arange(min(total, len(table))))
        if len(table) != total or len(lacking):
            index = lacking[0] if len(lacking) else min(total, len(table))
            raise ValueError(f"{file} lacks {part.decode()}-{index} of {total}: it is no lmdb of latents as MaskDiT's "
                             f"extract_latent.py writes it, or was not finished.")
        places[part] = table[:, 1:]
    labels = np.empty(total, np.int64)
    for index, (first, size) in enumerate(places[b"y"].tolist()):
        labels[index] = class_number(os.pread(stream.fileno(), min(size, 40), first), f"{file}: y-{index}")
    half = total // 2
    same = total % 2 == 0 and np.array_equal(labels[:half], labels[half:])
    if total > length and not same:
        raise ValueError(f"{file} holds {length} latents and {length} copies of other labels.")
    if mirrored is None and same and labels[0] == labels[-1] and total > 1:
        raise ValueError(f"{file} has latents of one class, so that copies of flipped images cannot be "
                         f"told from images: set mirrored=true or mirrored=false.")
    in_order = bool((np.diff(labels[:half]) >= 0).all())      # as extract_latent.py goes through the classes, twice
    copies = same and in_order if mirrored is None else mirrored
    if copies and not same:
        raise ValueError(f"mirrored=true, but the labels of the second half of {file} are not those of "
                         f"the first.")
    num_bytes = int(places[b"z"][0, 1])
    side = math.isqrt(num_bytes // 32)
    if side == 0 or side * side * 32 != num_bytes:
        raise ValueError(f"{file}: z-0 has {num_bytes} bytes, which is no float32 (8, R, R): MaskDiT "
                         f"stores the mean and log-variance of a 4-channel VAE.")

    if len(odd := np.flatnonzero(places[b"z"][:, 1] != num_bytes)):
        raise ValueError(f"{file}: z-{odd[0]} has {places[b'z'][odd[0], 1]} bytes, but z-0 {num_bytes}: one data set "
                         f"has one shape.")
    firsts = places[b"z"][:, 0]

    def read(start: int, end: int) -> np.ndarray:
        rows = np.empty((end - start, num_bytes), np.uint8)
        for row, first in zip(rows, firsts[start:end].tolist(), strict=True):
            os.preadv(stream.fileno(), [row], first)
        return rows.view("<f4").reshape(-1, 8, side, side)

    if not copies:
        return Stored(labels, (8, side, side), read)
    return Stored(labels[:half], (8, side, side), read, lambda start, end: read(start + half, end + half))


# ---- LightningDiT's safetensors -------------------------------------------------------------------------------------


def open_safetensors(source: Path, latent_norm: bool) -> Stored:
    """Opens shards of latents, latents_flip (N, C, h, w) and labels (N,), and latents_stats.pt where it is due."""
    from safetensors import SafetensorError, safe_open

    files = sorted(file for file in source.glob("*.safetensors"))
    if not files:
        raise ValueError(f"source={source} holds no .safetensors.")
    starts, labels, shape, flips = [0], [], None, None
    for file in files:
        require_inside(source, file)
        try:
            with safe_open(file, framework="pt") as shard:
                names = set(shard.keys())
                if not {"latents", "labels"} <= names:
                    raise ValueError(f"{file} holds {sorted(names)[:5]}, where latents and labels are expected.")
                sizes = {name: tuple(shard.get_slice(name).get_shape()) for name in names}
                dtypes = {name: shard.get_slice(name).get_dtype() for name in names}
                own = shard.get_tensor("labels") if dtypes["labels"] == "I64" else None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is no whole safetensors file ({error}): copy it again.") from error
        parts = ["latents", *(["latents_flip"] if "latents_flip" in names else [])]
        if own is None or own.ndim != 1 or not len(own) or any(
                len(sizes[part]) != 4 or sizes[part][0] != len(own) or dtypes[part] not in ("F32", "F16", "BF16")
                for part in parts):
            found = ", ".join(f"{name} {dtypes[name]} {sizes[name]}" for name in [*parts, "labels"])
            raise ValueError(f"{file} holds {found}; latents (N, C, h, w) and as many labels (N,) are expected.")
        for part in parts:
            shape, flips = shape or sizes[part][1:], parts if flips is None else flips
            if sizes[part][1:] != shape or parts != flips:
                raise ValueError(f"{file} holds {', '.join(parts)} of {sizes[part][1:]}, but {files[0].name} "
                                 f"{', '.join(flips)} of {shape}: one data set has one shape.")
        low, high = int(own.min()), int(own.max())
        for label in (low, high):
            class_number(label, str(file))
        labels.append(own.numpy())
        starts.append(starts[-1] + len(own))

    def reader(part: str) -> Callable[[int, int], torch.Tensor]:
        def read(start: int, end: int) -> torch.Tensor:
            rows = []
            for file, first, last in zip(files, starts[:-1], starts[1:], strict=True):
                if first < end and start < last:
                    with safe_open(file, framework="pt") as shard:      # closed, so that its pages do not stay mapped
                        rows.append(shard.get_slice(part)[max(start, first) - first : min(end, last) - first])
            return torch.cat(rows)
        return read

    stats = read_statistics(source, shape[0]) if latent_norm else {}
    if not latent_norm:
        stats = {"scale": SD_VAE_SCALE, "autoencoder": "sd_vae_ema", "decoder": "Stable Diffusion's VAE",
                 "downsample": 8}
    return Stored(np.concatenate(labels), shape, reader("latents"), reader("latents_flip") if len(flips) > 1 else None,
                  stats)


def read_statistics(source: Path, channels: int) -> dict[str, tuple[float, ...]]:
    """Reads latents_stats.pt, {mean, std} (1, C, 1, 1), as tensors alone."""
    file = source / "latents_stats.pt"
    if not file.is_file():
        raise ValueError(f"source={source} has no latents_stats.pt, which LightningDiT's loader writes when it first "
                         f"reads the set; set latent_norm=false for an SD-VAE's latents, which it does not normalise.")
    require_inside(source, file)
    try:
        held = torch.load(file, map_location="cpu", weights_only=True)
        stats = {f"latents_{key}": held[key].float() for key in ("mean", "std")}
    except Exception as error:      # of the zip, the unpickler, or what it holds
        raise ValueError(f"{file} cannot be read as the tensors mean and std alone "
                         f"({(str(error).splitlines() or [type(error).__name__])[0]}).") from error
    for tensor in stats.values():
        if tensor.numel() != channels or not tensor.isfinite().all():
            raise ValueError(f"{file} has numbers of shape {tuple(tensor.shape)} for {channels} channels, or some that "
                             f"are not finite.")
    if stats["latents_std"].min() <= 0:
        raise ValueError(f"{file} has a standard deviation of {stats['latents_std'].min():g}.")
    return {key: tuple(tensor.flatten().tolist()) for key, tensor in stats.items()}


# ---- TREAD's tars ---------------------------------------------------------------------------------------------------


def open_tars(source: str, kind: str | None) -> Stored:
    """Opens tars of <key>.latent.npy and <key>.cls; TREAD trains on the values as they are."""
    tars = find_tars(source)
    if not tars:
        raise ValueError(f"source={source} names no .tar.")
    for tar in tars:
        if tar != Path(source):      # which may be a link as any other path that is named
            require_inside(tar.parent, tar)
        if (why := pickled(tar)) is not None:
            raise ValueError(why)
    if len({"train" in tar.name for tar in tars}) > 1:
        raise ValueError(f"source={source} holds {len(tars)} tars, of which some have train in their names and some "
                         f"have not; TREAD trains on the former: name them, as in \"source='{source}/*train*.tar'\".")
    index = tar_index(tars)
    labels, shape = index["labels"].astype(np.int64), tuple(index["shape"].tolist())
    dtype = np.dtype(str(index["dtype"]))
    if kind is None and shape[0] != 4:
        raise ValueError(f"{tars[0]} holds latents of {shape[0]} channels, and tars do not say of what: set "
                         f"kind=moments for [mean, log-variance], or kind=sample.")
    if kind == "moments" and shape[0] % 2:
        raise ValueError(f"{tars[0]} holds latents of {shape[0]} channels, but moments have an even number: set "
                         f"kind=sample.")
    num_bytes = math.prod(shape) * dtype.itemsize
    allow_open_files(len(tars))
    files = [open(tar, "rb") for tar in tars]      # noqa: SIM115      (for as long as they are read)

    def read(start: int, end: int) -> np.ndarray:
        rows = np.empty((end - start, num_bytes), np.uint8)
        shards = np.searchsorted(index["starts"], np.arange(start, end), side="right") - 1
        for row, shard, offset in zip(rows, shards.tolist(), index["offsets"][start:end].tolist(), strict=True):
            os.preadv(files[shard].fileno(), [row], offset)
        return rows.view(dtype).reshape(-1, *shape)

    return Stored(labels, shape, read, form={"kind": kind or "sample", "scaled": kind != "moments",
                                             "log_variance": kind == "moments"})


def pickled(tar: Path) -> str | None:
    """Says why a tar of MaskDiT's is not read: its latents are pickles."""
    with suppress(ValueError):      # the reader says more
        for name, _, _ in itertools.islice(tar_members(map_tar(tar), tar), 8):
            if name.endswith(".latent"):
                return (f"{tar}: {name} is a pickle, and pickles are never loaded, since they can run code. "
                        f"Import the lmdb that MaskDiT's lmdb2wds.py made the tars from (format=maskdit), or, if "
                        f"you trust them, rewrite them with the lines in docs/interop.md.")
    return None


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
        found = by_name(list_zip(path), source)
    tars = [tar for tar in find_tars(source) if not found and re.search(r"\.(tar(\.\w+)?|tgz)$", tar.name)]
    if tars:
        if (why := pickled(tars[0])) is not None:
            raise ValueError(why)
        found.append(("tread", f"{tars[0].name} is a tar"))
    if len(found) == 1:
        return found[0]
    if found:
        said = " and ".join(f"{format} ({why})" for format, why in found)
        raise ValueError(f"source={source} could be {said}: set format= to one of them.")
    if not tars and not path.exists():
        raise ValueError(f"There is nothing at source={source}.")
    known = "; ".join(f"{format}: {form.whose}" for format, form in FORMS.items())
    raise ValueError(f"source={source} is none of the forms that are known by their names ({known}). docs/interop.md "
                     f"has how each looks; images go through scripts/prepare_latents.py.")


def by_name(names: Iterator[str], source: str) -> list[tuple[str, str]]:
    """Tells a set with a dataset.json by the names of its files; REPA's and EDM2's are the same."""
    for name in names:
        if "vae-sd" in (parts := name.split("/")) and name.endswith(".npy"):
            return [("repa", f"{name} lies in vae-sd")]
        if "vae-in" in parts or posixpath.basename(name).startswith("img-latents-"):
            return [("srdit", f"{name} is named as SR-DiT names it")]
        if posixpath.basename(name).startswith("img-mean-std-"):
            raise ValueError(
                f"source={source} holds {posixpath.basename(name)}, as REPA, SiT-REPA, Sprint and EDM2 write it, and "
                f"nothing in it tells which: set format=repa (VAE input in -1..1) if REPA's preprocessing made it, "
                f"format=edm2 (VAE input in 0..1, another normalisation) if EDM2's dataset_tool.py did.")
    return []


def open_stored(
    format: str, source: str, kind: str | None, scale: float | None, latent_norm: bool, mirrored: bool | None,
    autoencoder: str | None,
) -> tuple[Stored, Form]:
    """Opens a source of one of FORMS and completes its Form by what its files and the settings say."""
    for key, given, of in (("kind", kind is not None, "tread"), ("latent_norm", not latent_norm, "lightningdit"),
                           ("mirrored", mirrored is not None, "maskdit")):
        if given and format != of:
            raise ValueError(f"{key} is a setting of format={of}, and this is format={format}: leave it out.")
    if format != "tread" and not Path(source).exists():
        raise ValueError(f"There is nothing at source={source}.")
    match format:
        case "maskdit":
            stored = open_lmdb(Path(source), mirrored)
        case "lightningdit":
            stored = open_safetensors(Path(source), latent_norm)
        case "fastdit":
            stored = open_pairs(Path(source))
        case "tread":
            stored = open_tars(source, kind)
        case "repa" | "edm2":
            stored = open_listed(Path(source), "vae-sd")
        case "srdit":
            stored = open_listed(Path(source), "vae-in")
    form = replace(FORMS[format], **stored.form)
    form = replace(form, scale=scale or form.scale, scaled=form.scaled and scale is None,
                   autoencoder=autoencoder or form.autoencoder)
    channels, height, width = stored.shape
    if form.channels not in (None, channels):
        raise ValueError(f"source={source} holds latents of {channels} channels, but {form.whose} has {form.channels}: "
                         f"it is of another form or autoencoder.")
    if height != width or not height:
        raise ValueError(f"source={source} holds latents of {height}x{width}; square ones are trained on.")
    return stored, form
