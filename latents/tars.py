"""TREAD's webdataset tars, indexed once and mapped."""

import hashlib
import json
import math
import resource
import tarfile
from contextlib import suppress
from pathlib import Path
from tokenize import TokenError
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from latents.listing import tar_members
from runtime.files import atomic_write
from runtime.notebook import is_hidden

TAR_INDEX = "latent-index.npz"


def allow_open_files(num_files: int) -> None:
    """Raises this process's limit on open files where maps, which hold one each, would pass it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_files + 512  # and what Python, torch and the trackers hold open
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


class TarRows:
    """The latents of a tar by row, mapped: `offsets` are where their values begin."""

    def __init__(self, tar: Path, offsets: np.ndarray, shape: tuple[int, ...], dtype: np.dtype):
        self.mapped, self.offsets, self.shape, self.dtype = np.memmap(tar, np.uint8, "r"), offsets, shape, dtype

    def __getitem__(self, row: int) -> np.ndarray:
        return np.ndarray(self.shape, self.dtype, self.mapped, self.offsets[row])


def open_rows(tars: list[Path], index: dict[str, np.ndarray]) -> list[TarRows]:
    """Maps the latents of tars by their `tar_index`."""
    allow_open_files(len(tars))
    shape, dtype = tuple(index["shape"].tolist()), np.dtype(str(index["dtype"]))
    return [TarRows(tar, offsets, shape, dtype)
            for tar, offsets in zip(tars, np.split(index["offsets"], index["starts"][1:-1]), strict=True)]


def tar_index(tars: list[Path]) -> dict[str, np.ndarray]:
    """Returns starts, offsets, labels, shape, dtype, kept in an npz next to the tars while they do not change.

    One that is kept counts only where it leads into the tars (`is_sound`).
    """
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in tars]
    key = hashlib.sha256(json.dumps(stats).encode()).hexdigest()
    cache = tars[0].parent / TAR_INDEX
    try:
        with np.load(cache, allow_pickle=False) as kept:
            index = {name: kept[name] for name in ("starts", "offsets", "labels", "shape", "dtype")}
            if str(kept["key"]) == key and is_sound(index, [size for _, size, _ in stats]):
                return index
    except Exception:  # absent, damaged, or anybody's: the tars are the truth
        pass

    starts, offsets, labels, form = [0], [], [], None
    for file in tqdm(tars, desc="indexing tars", unit="tar", delay=2, disable=is_hidden()):
        rows, form = _index_one_tar(file, form)
        offsets += [offset for offset, _ in rows]
        labels += [label for _, label in rows]
        starts.append(len(offsets))
    index = {"starts": np.array(starts), "offsets": np.array(offsets, np.int64),
             "labels": np.array(labels, np.int32), "shape": np.array(form[0]), "dtype": np.array(form[1].str)}
    # Where the folder cannot be written, the tars are indexed again next time.
    with suppress(OSError), atomic_write(cache) as partial, open(partial, "wb") as stream:
        np.savez(stream, key=np.array(key), **index)
    return index


def is_sound(index: dict[str, np.ndarray], sizes: list[int]) -> bool:
    """True if an index, which may be anybody's, leads to latents inside of tars of these sizes."""
    starts, offsets, labels, shape = (index[name] for name in ("starts", "offsets", "labels", "shape"))
    if str(index["dtype"]) not in ("<f2", "<f4") or shape.shape != (3,) or starts.shape != (len(sizes) + 1,):
        return False
    if any(array.dtype.kind not in "iu" for array in (starts, offsets, labels, shape)) or shape.min() < 1:
        return False
    counts = np.diff(starts)
    if starts[0] != 0 or counts.min() < 0 or not offsets.shape == labels.shape == (starts[-1],):
        return False
    num_bytes = math.prod(shape.tolist()) * np.dtype(str(index["dtype"])).itemsize
    ends = np.repeat(sizes, counts) - num_bytes
    return bool((offsets >= 0).all() and (offsets <= ends).all())


NpyForm = tuple[tuple[int, ...], np.dtype]  # shape and type


def _index_one_tar(file: Path, form: NpyForm | None) -> tuple[list[tuple[int, int]], NpyForm]:
    """Returns [(first byte of the values, label)] of a tar's samples and the form of all, that of the tars before."""
    firsts, labels = {}, {}
    with open(file, "rb") as content:
        for member in filter(tarfile.TarInfo.isfile, tar_members(file)):
            content.seek(member.offset_data)
            try:
                if member.name.endswith(".latent.npy"):
                    found = _read_form(content, member.size)
                    if found != (form := form or found):
                        raise ValueError(f"{found[1]} {found[0]}, but the latents before it are {form[1]} {form[0]}")
                    firsts[member.name.removesuffix(".latent.npy")] = content.tell()
                elif member.name.endswith(".cls"):
                    labels[member.name.removesuffix(".cls")] = int(content.read(member.size))
            except (ValueError, TokenError) as error:  # the second is numpy's, of a header without an end
                raise ValueError(f"{file}: {member.name}: {error}.") from error
    if not firsts:
        raise ValueError(f"{file} holds no '<key>.latent.npy': tars of images go through scripts/prepare_latents.py "
                         "first.")
    if alone := sorted(firsts.keys() ^ labels.keys()):
        raise ValueError(f"{file}: {len(alone)} samples lack either '.latent.npy' or '.cls', {alone[0]!r} first.")
    return [(first, labels[sample]) for sample, first in firsts.items()], form


def _read_form(content: BinaryIO, size: int) -> NpyForm:
    """Reads the header of a latent's npy, of `size` bytes, and leaves `content` at the first value."""
    end = content.tell() + size
    np.lib.format.read_magic(content)
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(content)  # numpy's for every plain array
    is_whole = content.tell() + math.prod(shape) * dtype.itemsize == end
    if len(shape) != 3 or fortran or dtype not in ("float16", "float32") or not is_whole:
        raise ValueError(f"{dtype} {shape} in {size} bytes{', in Fortran order' * fortran}; a latent is a C-ordered "
                         f"float16 or float32 array of (channels, height, width)")
    return shape, dtype
