"""TREAD's webdataset tars, indexed once and mapped."""

import hashlib
import json
import math
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from latents.images import MAX_CLASSES, check_labels, tar_members
from runtime.files import atomic_write

TAR_INDEX = "latent-index.npz"


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

    with suppress(OSError), atomic_write(cache) as partial, open(partial, "wb") as stream:      # else indexed next time
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
