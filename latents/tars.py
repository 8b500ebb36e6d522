"""Reads TREAD's webdataset tars: indexes them once, then maps them into memory."""

import hashlib
import json
import math
import resource
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from tqdm import tqdm

from latents.listing import tar_members
from runtime.files import NPY_ERRORS, atomic_write, read_array_header, require_plain
from runtime.notebook import hides_bars

TAR_INDEX = "latent-index.npz"
FLOATS = ("<f2", "<f4")


def allow_open_files(num_files: int) -> None:
    """Raises this process's limit on open files if `num_files` memory maps, which hold one each, would exceed it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_files + 512  # for the files that Python, torch and the trackers hold open
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


class TarRows:
    """The latents of one mapped tar by row; `offsets` are the bytes where their values begin."""

    def __init__(self, tar: Path, offsets: np.ndarray, shape: tuple[int, ...], dtype: np.dtype):
        self.mapped, self.offsets, self.shape, self.dtype = np.memmap(tar, np.uint8, "r"), offsets, shape, dtype

    def __getitem__(self, row: int) -> np.ndarray:
        return np.ndarray(self.shape, self.dtype, self.mapped, self.offsets[row])


class Tars(NamedTuple):
    """The latents and labels of several tars."""

    rows: list[TarRows]         # one for each tar
    starts: np.ndarray          # index of each tar's first image, and the count at the end
    labels: np.ndarray          # (count,)
    shape: tuple[int, ...]      # of one latent
    dtype: np.dtype


def refuse_two_splits(tars: list[Path], key: str, path: str | Path) -> None:
    """Raises ValueError if only some tars have train in their names, because TREAD trains on those alone."""
    if len({"train" in tar.name for tar in tars}) > 1:
        raise ValueError(f"{key}={path} has tars with and without train in their names. TREAD trains only on those "
                         f"with it: select them, as in \"{key}='{tars[0].parent}/*train*.tar'\".")


def map_tars(tars: list[Path]) -> Tars:
    """Maps the latents of tars into memory, using their `tar_index`."""
    allow_open_files(len(tars))
    index = tar_index(tars)
    shape, dtype, starts = tuple(index["shape"].tolist()), np.dtype(str(index["dtype"])), index["starts"]
    offsets = np.split(index["offsets"], starts[1:-1])
    rows = [TarRows(tar, own, shape, dtype) for tar, own in zip(tars, offsets, strict=True)]
    return Tars(rows, starts, index["labels"], shape, dtype)


def tar_index(tars: list[Path]) -> dict[str, np.ndarray]:
    """Returns starts, offsets, labels, shape and dtype, cached in an npz next to the tars until they change."""
    cache = tars[0].parent / TAR_INDEX
    try:
        require_plain(cache)
        with np.load(cache, allow_pickle=False) as cached:
            index = {name: cached[name] for name in ("starts", "offsets", "labels", "shape", "dtype")}
            if str(cached["key"]) == index_key(tars, index) and is_valid_index(index, tars):
                return index
    except Exception:  # the cache is absent, damaged or of an older version, so the tars are indexed again
        pass

    starts, offsets, labels, form = [0], [], [], None
    for file in tqdm(tars, desc="indexing tars", unit="tar", delay=2, disable=hides_bars()):
        rows, form = _index_one_tar(file, form)
        offsets += [offset for offset, _ in rows]
        labels += [label for _, label in rows]
        starts.append(len(offsets))
    index = {"starts": np.array(starts), "offsets": np.array(offsets, np.int64),
             "labels": np.array(labels, np.int32), "shape": np.array(form[0]), "dtype": np.array(form[1].str)}
    # If the folder is read-only, the tars are indexed again next time.
    with suppress(OSError), atomic_write(cache) as partial, open(partial, "wb") as stream:
        np.savez(stream, key=np.array(index_key(tars, index)), **index)
    return index


def is_valid_index(index: dict[str, np.ndarray], tars: list[Path]) -> bool:
    """True if every offset lies inside its tar, and labels, shape and type are plausible.

    Anybody can compute the key, so the file may come from an attacker. Another dtype could be objects, whose bytes run
    code.
    """
    starts, offsets, labels, shape, dtype = (index[name] for name in ("starts", "offsets", "labels", "shape", "dtype"))
    if any(array.dtype.kind != "i" for array in (starts, offsets, labels, shape)) or str(dtype) not in FLOATS:
        return False
    if shape.shape != (3,) or not 1 <= shape.min() <= shape.max() <= 2**16:
        return False
    size = math.prod(shape.tolist()) * np.dtype(str(dtype)).itemsize
    ends = np.array([file.stat().st_size for file in tars]) - size
    return bool(starts.shape == (len(tars) + 1,) and starts[0] == 0 and (starts[1:] > starts[:-1]).all()
                and labels.shape == offsets.shape == (starts[-1],) and (labels >= 0).all()
                and (offsets >= 0).all() and (offsets <= np.repeat(ends, np.diff(starts))).all())


def index_key(tars: list[Path], index: dict[str, np.ndarray]) -> str:
    """Returns a hash of the tars' names, sizes and modification times, and of the index itself."""
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in tars]
    content = hashlib.sha256(json.dumps(stats).encode())
    for values in index.values():
        content.update(values)
    return content.hexdigest()


NpyForm = tuple[tuple[int, ...], np.dtype]  # shape and type


def _index_one_tar(file: Path, form: NpyForm | None) -> tuple[list[tuple[int, int]], NpyForm]:
    """Returns [(first byte of the values, label)] for a tar's samples, and the form that all latents share.

    `form` is that of the tars before it, or None. Raises ValueError for latents of another form.
    """
    firsts, labels = {}, {}
    require_plain(file)
    with open(file, "rb") as content:
        for member in filter(tarfile.TarInfo.isfile, tar_members(file)):
            content.seek(member.offset_data)
            try:
                if member.name.endswith(".latent.npy"):
                    found = _read_form(content, member.size)
                    if found != (form := form or found):
                        raise ValueError(f"{found[1]} {found[0]}, but the latents before it are {form[1]} {form[0]}")
                    if (key := member.name.removesuffix(".latent.npy")) in firsts:
                        raise ValueError("its key occurs twice in this tar, but keys must be unique: write it again")
                    firsts[key] = content.tell()
                elif member.name.endswith(".cls"):
                    label = np.int32(int(content.read(min(member.size, 1000))))  # as the index stores it
                    labels[member.name.removesuffix(".cls")] = label
            except NPY_ERRORS as error:
                raise ValueError(f"{file}: {member.name}: {error}.") from error
    if not firsts:
        raise ValueError(f"{file} holds no '<key>.latent.npy': if it has images, use scripts/prepare_latents.py "
                         "first.")
    if unpaired := sorted(firsts.keys() ^ labels.keys()):
        raise ValueError(f"{file}: {len(unpaired)} samples lack either '.latent.npy' or '.cls', such as "
                         f"{unpaired[0]!r}.")
    return [(first, labels[sample]) for sample, first in firsts.items()], form


def _read_form(content: BinaryIO, size: int) -> NpyForm:
    """Reads the header of a latent's npy of `size` bytes. Afterwards `content` is at the first value."""
    end = content.tell() + size
    shape, fortran, dtype = read_array_header(content)
    is_complete = content.tell() + math.prod(shape) * dtype.itemsize == end
    if len(shape) != 3 or min(shape) < 1 or fortran or dtype not in ("float16", "float32") or not is_complete:
        raise ValueError(f"{dtype} {shape} in {size} bytes{', in Fortran order' * fortran}; a latent is a C-ordered "
                         f"float16 or float32 array of (channels, height, width)")
    return shape, dtype
