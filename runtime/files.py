"""Files that are renamed once complete, so that a kill cannot truncate them; rows of JSON; the lock on a folder."""

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import shutil
import stat
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakKeyDictionary

import numpy as np
from filelock import FileLock, Timeout

MOST_BYTES = 2**28  # of a record, which is read into memory at once
MOST_VALUES = 8_000_000  # of a record in JSON: Python needs up to 90 bytes for each, and ImageNet's labels are half


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a path next to `path` for a new file or folder, and renames that to `path` once it is complete.

    After a failed write `path` is as it was. A kill may leave `.<name>.<pid>.tmp`, which the next write to `path`
    removes, and, between two renames, the folder that was at `path` as `.<name>.<pid>.old.tmp`. Raises ValueError in a
    folder that this process has locked, and that is there no more.
    """
    require_locked(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    remove(partial)
    remove_leftovers(path.parent, glob.escape(path.name))
    try:
        with naming_path(path):
            yield partial
            for file in [partial, *partial.rglob("*")]:
                if file.is_file():
                    sync(file)
            old = partial.with_suffix(".old.tmp")
            if replaces := path.is_dir() and partial.is_dir():
                os.rename(path, old)
            try:
                os.replace(partial, path)
            except OSError:
                if replaces:
                    os.rename(old, path)
                raise
            remove(old)
            sync(path.parent)
    finally:
        remove(partial)


def remove_leftovers(folder: Path, names: str = "*") -> None:
    """Removes what killed processes have left of files `names` (a glob), which `atomic_write` was writing there."""
    for unfinished in folder.glob(f".{names}.*.tmp"):
        process = re.search(r"\.(\d+)\.tmp$", unfinished.name)
        if process and not is_running(int(process[1])):
            remove(unfinished)


def is_running(pid: int) -> bool:
    """True if a process of this machine has this number; another may have it by now."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:     # another user's, which /proc may hide, and macOS has none
        pass
    return True


def is_pointer(start: bytes) -> bool:
    """True for the first bytes of a Git LFS pointer, which replaces a large file in a clone without LFS."""
    return start.startswith(b"version https://git-lfs.github.com/spec/")


def refuse_pointer(file: Path) -> None:
    """Raises ValueError if a file is only a pointer of Git LFS."""
    if not file.is_file() or file.stat().st_size >= 1024:  # pointers are shorter
        return
    if is_pointer(file.read_bytes()):
        raise ValueError(f"{file} is a pointer of Git LFS, and the file itself was not downloaded: run "
                         f"git lfs install && git lfs pull in its repository, or hf download.")


def open_plain(file: Path | str) -> BinaryIO:
    """Opens a plain file to read it; raises ValueError for a device or a pipe, which may never end."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{file} is not a plain file")
    return os.fdopen(descriptor, "rb")


def read_plain(file: Path | str, most: int = MOST_BYTES) -> bytes:
    """Reads a plain file; raises ValueError as `open_plain` does, and for more than `most` bytes."""
    with open_plain(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        content = b"" if size > most else opened.read()
    if max(size, len(content)) > most:
        raise ValueError(f"{file} has more than {most:,} bytes")
    return content


def require_room(out: Path, needed: int, remedy: str) -> None:
    """Raises ValueError, ending in `remedy`, where the disk of `out` has less than `needed` bytes free."""
    existing = next(folder for folder in [out.absolute(), *out.absolute().parents] if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        more, left = (f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB" for size in (needed, free))
        raise ValueError(f"{out} needs {more} more, but its disk has {left} free: {remedy}")


@contextlib.contextmanager
def naming_path(path: Path) -> Iterator[None]:
    """Adds the path to an OSError that has none, for example about a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def remove(path: Path) -> None:
    """Removes a file or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Makes a file, or the renames in a folder, outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Writes a small file so that a kill leaves either the old content or the new one."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def is_inside(path: Path, folder: Path) -> bool:
    """True if a path lies in a folder, and no link leads out of it; False for a name that no file can have."""
    return "\0" not in str(path) and path.resolve().is_relative_to(folder.resolve())


def inside(folder: Path, *names: str) -> Path:
    """Returns a path that lies inside a folder such as a run, before something is written, deleted or copied there.

    The folder itself may be a link, say to a larger disk. Raises ValueError where a link or a name leads out of it.
    """
    path = folder.joinpath(*names)
    if not is_inside(path, folder):
        raise ValueError(f"{path} leads out of {folder}, to {path.resolve()}: replace the link by what it points to, "
                         f"or make {folder} itself the link.")
    return path


def open_to_append(path: Path) -> BinaryIO:
    """Opens a file of JSON lines to append to it.

    Raises OSError for a link, which in somebody else's run may lead anywhere, and ValueError as `atomic_write` does.
    """
    require_locked(path)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, and rows are only appended to plain files", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "a+b")


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Appends a JSON line, after removing a last one that a kill has cut short; no other writer of rows loses one."""
    with naming_path(path), locked(path), open_to_append(path) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 2**20))  # rows are shorter
        last = file.read().rpartition(b"\n")[2]
        try:
            parse_json(last)
        except ValueError:
            if last.startswith(b"{"):  # another text is not ours
                file.truncate(end - len(last))
                last = b""
        file.write(b"\n" * bool(last) + json.dumps(row).encode() + b"\n")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lets one writer at a time into the block for the rows in `path`, by a lock file `.<name>.lock` beside it.

    A thread that is in the block may enter it again. After a minute, or on a file system without locks, it prints a
    warning and continues, as a lock must not cost hours of work.
    """
    require_locked(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f".{path.name}.lock"), fallback_to_soft=False, is_singleton=True)
    try:
        lock.acquire(timeout=60, poll_interval=0.0002)
    except (NotImplementedError, OSError) as error:  # Timeout is one
        print(f"{path} cannot be locked ({error}): nothing keeps a second process from writing there.")
    try:
        yield
    finally:
        lock.release()


def parse_json(content: str | bytes) -> Any:
    """Parses JSON, in UTF-8 or UTF-16; raises ValueError for anything else, and for a key that is given twice.

    It also raises ValueError for more than MOST_VALUES values.
    """
    # Each value but the first follows a comma, a bracket or a brace.
    marks = map(content.count, b",[{") if isinstance(content, bytes) else map(content.count, ",[{")
    if len(content) > MOST_VALUES and sum(marks) > MOST_VALUES:
        raise ValueError(f"it holds more than {MOST_VALUES:,} values")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError(f"{max(keys := [key for key, _ in pairs], key=keys.count)!r} is given twice")
        return found

    try:
        return json.loads(content, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("its lists or objects are nested too deeply") from None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads a file of JSON lines, without those that a kill has cut short."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            if isinstance(row := parse_json(line), dict):
                rows.append(row)
    return rows


Identity = tuple[int, int] | None
_locked_files: WeakKeyDictionary[FileLock, Identity] = WeakKeyDictionary()


def lock_folder(folder: Path, mistake: str) -> FileLock:
    """Locks a folder as long as this process refers to the lock; raises ValueError(mistake) if another one has it.

    As long as the lock is held, this process writes only to the folder that it has locked (`require_locked`). The same
    process gets its lock again. On a file system without locks it prints a warning and continues.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = Path(os.path.abspath(folder), ".lock")
    lock = FileLock(file, fallback_to_soft=False, is_singleton=True)  # a soft lock would outlive a kill
    if lock in _locked_files and identity(file) != _locked_files[lock]:
        lock.release(force=True)  # of a folder that was here before
    try:
        lock.acquire(timeout=0)
        _locked_files[lock] = identity(file)
    except Timeout:
        raise ValueError(mistake) from None
    except (NotImplementedError, OSError) as error:
        print(f"{folder} cannot be locked ({error}): nothing keeps a second process from writing there.")
    return lock


def identity(file: Path) -> Identity:
    """Returns what tells an open file from another one that has its path now; None if there is none."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def require_locked(path: Path) -> None:
    """Raises ValueError where a path is in a folder that this process has locked, and that was moved or deleted since.

    Otherwise a new folder of that name would take the rest of the files, without a lock.
    """
    for lock, known in [*_locked_files.items()]:
        file = Path(lock.lock_file)
        if lock.is_locked and Path(os.path.abspath(path)).is_relative_to(file.parent) and identity(file) != known:
            raise ValueError(f"{file.parent} was moved, deleted or replaced while this command was writing there: it "
                             f"ends before {path.name}. Bring the folder back, and run the same command again.")


def write_array(archive: zipfile.ZipFile, key: str, parts: Iterable[np.ndarray], count: int) -> None:
    """Streams an array of `count` rows, which come in parts, into an npz."""
    with archive.open(f"{key}.npy", "w", force_zip64=True) as file:
        for i, part in enumerate(parts):
            if i == 0:
                header = {"descr": part.dtype.str, "fortran_order": False, "shape": (count, *part.shape[1:])}
                np.lib.format.write_array_header_1_0(file, header)
            file.write(part.tobytes())


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record_sha256(record: dict[str, Any]) -> str:
    """Returns 16 hex digits that identify a record by its content."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
