"""Files of somebody else: what a file declares is checked where it is opened, and one function says what is wrong.

A declared size counts only up to the bytes that are stored, or up to what its reader needs. Nothing is unpickled.
"""

import contextlib
import io
import math
import os
import re
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from runtime.files import MOST_BYTES, open_plain, refuse_pointer
from runtime.schema import first_line

PLAIN = "biufU"  # numpy's kinds of types that are neither complex, times, records nor objects
ZIPPED = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}  # zipfile unpacks the others without a limit


@contextlib.contextmanager
def reading(file: object, what: str, remedy: str = "copy it again") -> Iterator[None]:
    """Turns any error of the block into a ValueError of one line: that `file` is not `what`, why, and the `remedy`.

    Readers of somebody's file raise through this, as libraries have errors of many kinds, and few name the file. A
    pointer of Git LFS gets its own line.
    """
    try:
        yield
    except Exception as error:
        if isinstance(file, str | Path):
            refuse_pointer(Path(file))
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise ValueError(f"{file} is not {what} ({reason.rstrip('.')}): {remedy}.") from error


def printable(text: str) -> str:
    """Writes control characters as escapes, as names in a file may hold codes that a terminal obeys."""
    return re.sub(r"[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", lambda code: ascii(code[0])[1:-1], text)


# ---- zips -----------------------------------------------------------------------------------------------------------


def open_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> IO[bytes]:
    """Opens a file of a zip; raises ValueError unless it is stored or deflated, as almost all are."""
    if info.compress_type not in ZIPPED:
        raise ValueError(f"{info.filename} is compressed in another way than deflate: zip it again")
    return archive.open(info)


def read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Reads a file of a zip; raises ValueError where it is damaged, encrypted or larger than MOST_BYTES."""
    if info.file_size > MOST_BYTES:
        raise ValueError(f"it has {info.file_size:,} bytes, more than {MOST_BYTES:,}")
    try:
        with open_member(archive, info) as file:
            return file.read(info.file_size)  # with a size it unpacks no more than that
    except Exception as error:  # zipfile has an error for each
        raise ValueError(first_line(error)) from error


# ---- npy and npz ----------------------------------------------------------------------------------------------------


def read_header(file: IO[bytes], stored: int) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Reads the header of an npy of `stored` bytes: its shape, whether it is in Fortran's order, and its type.

    Raises ValueError for types that are neither real numbers nor text, and for more elements than are stored.
    """
    major, _ = np.lib.format.read_magic(file)
    # Version 3 differs from 2 only in the encoding of field names, which plain numbers do not have.
    read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds pickled Python objects, which can run code and are never loaded")
    if dtype.kind not in PLAIN:
        raise ValueError(f"it holds an array of {dtype} {shape}, not of real numbers")
    if min(shape, default=0) < 0 or file.tell() + math.prod(shape) * dtype.itemsize > stored:
        raise ValueError(f"it ends early: an array of {dtype} {shape} is declared")
    return shape, fortran, dtype


class Arrays:
    """The arrays of an npz; each is read when it is asked for, and errors do not name the file (see `reading`)."""

    def __init__(self, file: Path):
        self.archive = zipfile.ZipFile(open_plain(file))
        self.infos = {info.filename.removesuffix(".npy"): info for info in self.archive.infolist()}

    def __enter__(self) -> "Arrays":
        return self

    def __exit__(self, *_: object) -> None:
        self.archive.close()

    def open(self, key: str) -> IO[bytes]:
        return open_member(self.archive, self.infos[key])

    def shape(self, key: str) -> tuple[int, ...]:
        with self.open(key) as file:
            return read_header(file, self.infos[key].file_size)[0]

    def read(self, key: str) -> np.ndarray:
        return np.lib.format.read_array(io.BytesIO(read_member(self.archive, self.infos[key])))  # refuses pickles

    def texts(self, keys: Collection[str]) -> dict[str, str]:
        """Returns those of the keys that are here, as texts, which other npz may hold in other forms."""
        return {key: str(self.read(key)) for key in keys if key in self.infos}


# ---- ranges of files ------------------------------------------------------------------------------------------------


class Rows:
    """The rows of an npy on disk, each read when it is needed: shape (n, …) and dtype as an array has.

    A mapped file would end the process without a word (SIGBUS) if somebody truncated it while it was read, and reading
    is as fast. `file` remains open as long as this object exists.
    """

    def __init__(self, file: Path):
        self.name, self.file = file, open_plain(file)
        self.shape, fortran, self.dtype = read_header(self.file, os.fstat(self.file.fileno()).st_size)
        if fortran and len(self.shape) > 1:
            raise ValueError(f"it holds an array of {self.dtype} {self.shape} in Fortran's order")
        self.start, self.row_bytes = self.file.tell(), math.prod(self.shape[1:]) * self.dtype.itemsize

    def read(self, first: int, count: int = 1) -> np.ndarray:
        """Reads rows (count, …) from `first` on."""
        content = read_range(self.name, self.file, self.start + first * self.row_bytes, count * self.row_bytes)
        return np.frombuffer(content, self.dtype).reshape(count, *self.shape[1:])


def read_range(name: Path, file: IO[bytes], offset: int, size: int) -> bytes:
    """Reads `size` bytes of a file from `offset` on; raises ValueError, with its name, if there are fewer."""
    content = os.pread(file.fileno(), size, offset)
    if len(content) < size:
        raise ValueError(f"{name} became shorter while it was read: restore it, and run the same command again.")
    return content
