"""Named tensors <-> one folder: written beside and renamed, checked by hash, the latest that is whole. No pickle.

A run keeps its checkpoints in `<run>/checkpoints/step-00001000/`, each holding `<name>.safetensors` files and a
`meta.json`, which lists every file with its size and SHA-256. Whatever else is written goes through `beside` too.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import sharding
from settings import Record, Whole, read, read_json, shown

# ---- files that a kill cannot halve ---------------------------------------------------------------------------------


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Yields a place beside `path` to write a file or a folder at, and renames it to `path` once it is whole.

    Where writing fails, nothing stays behind and what was at `path` is untouched. A kill may leave `.<name>.<pid>.tmp`
    and, between two renames, the folder that was at `path` as `.<name>.<pid>.old.tmp`.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):      # as /dev/null, which a rename would replace
        raise FileExistsError(errno.EEXIST, "it is a device, a pipe or a socket, not a file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    remove(partial)
    try:
        with naming(path):
            yield partial
            for file in [partial, *partial.rglob("*")]:
                if file.is_file():
                    sync(file)
            old = partial.with_suffix(".old.tmp")
            if path.is_dir() and partial.is_dir():
                os.rename(path, old)
            os.replace(partial, path)
            remove(old)
            sync(path.parent)
    finally:
        remove(partial)


def require_room(out: Path, needed: int, remedy: str) -> None:
    """Raises ValueError, ending in `remedy`, where the disk of `out` has less than `needed` bytes free."""
    existing = next(folder for folder in [out.absolute(), *out.absolute().parents] if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ValueError(f"{out} needs {needed / 1e9:.1f} GB more and its disk has {free / 1e9:.1f} GB free: {remedy}")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path to an OSError that names none, as that of a full disk."""
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
    with beside(path) as partial:
        partial.write_text(text, encoding="utf-8")


def append_row(path: Path, row: dict) -> None:
    """Adds a JSON line; one that a kill or a full disk has halved before it keeps a line of its own.

    Raises OSError for a link, which in a run of somebody else's may lead anywhere.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, and rows are added to files alone", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), open(path, "a+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        unfinished = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * unfinished + json.dumps(row).encode() + b"\n")


def read_rows(path: Path) -> list[dict]:
    """Reads a file of JSON lines, but for those that a kill has halved."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(row := json.loads(line), dict):
                rows.append(row)
    return rows


def hold(folder: Path, mistake: str) -> FileLock:
    """Holds a folder for this process until it ends, however it ends; raises ValueError(mistake) where another does.

    Where the file system has no locks that is said, and nothing is held.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(mistake) from None
    except (NotImplementedError, OSError) as error:
        print(f"{folder} cannot be locked ({error}): nothing keeps a second process from writing there.")
    return lock


def require_same(folder: Path, before: os.stat_result) -> None:
    """Raises OSError where `folder` is not the one that `before` was of, as when its disk has gone away meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(before, folder.stat()):
            return
    raise FileNotFoundError(errno.ENOENT, "the folder has gone away, and maybe another has come", str(folder))


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def all_steps(run: Path) -> list[Path]:
    """Lists a run's checkpoint folders from the oldest to the newest, whole or not; other names are not ours."""
    folders = (run / "checkpoints").glob("step-*")
    ours = (folder for folder in folders if re.fullmatch(r"step-\d{8,18}", folder.name))
    return sorted(ours, key=step_of)


class File(Record):
    bytes: Whole
    sha256: str


class Files(Record):
    """What meta.json says of the files beside it."""

    files: dict[str, File]


def write_tensors(path: Path, names: Iterable[str], values: Iterator[Tensor]) -> None:
    """Writes a safetensors file of named tensors; all of them are held in memory, on the CPU."""
    try:
        save_file({name: next(values).detach().cpu().contiguous() for name in names}, path)
    except SafetensorError as error:      # which has the disk's error as words
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error


def stored(tensors: Mapping[str, Mapping[str, Tensor]]) -> Iterator[Tensor]:
    """Goes through the tensors of a checkpoint's files in the order in which they are written."""
    return (tensor for named in tensors.values() for tensor in named.values())


def save(
    folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], meta: dict, values: Iterator[Tensor] | None = None,
) -> None:
    """Writes `tensors[name]` to `folder/name.safetensors` and `meta` to `meta.json`, all of it or nothing.

    `values` brings the tensors themselves in the order of `stored`, where they are to be gathered first. A
    checkpoint that is already there and whole is left alone. Raises OSError with the room needed and the room left
    when it cannot be written, and then nothing of it stays behind.
    """
    if folder.is_dir() and problem(folder) is None:
        return
    values = stored(tensors) if values is None else values
    try:
        with beside(folder) as partial:
            partial.mkdir()
            files = {}
            for name, named in tensors.items():
                path = partial / f"{name}.safetensors"
                write_tensors(path, named, values)
                files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
            (partial / "meta.json").write_text(json.dumps({**meta, "files": files}, indent=1), encoding="utf-8")
    except OSError as error:
        need = sum(t.numel() * t.element_size() for named in tensors.values() for t in named.values())
        free = shutil.disk_usage(folder.parent if folder.parent.is_dir() else ".").free
        raise OSError(
            f"The checkpoint {folder} could not be written ({error}): it needs {need / 2**20:,.0f} MiB and "
            f"{free / 2**20:,.0f} MiB are free. Nothing of it was kept; earlier checkpoints are untouched."
        ) from error


def read_meta(folder: Path) -> dict:
    """Reads meta.json; raises ValueError where it is not a group of values."""
    plain = read_json(folder / "meta.json")
    if not isinstance(plain, dict):
        raise ValueError(f"{folder / 'meta.json'} holds {shown(plain)}, which is not a record")
    return plain


def problem(folder: Path, names: tuple[str, ...] | None = None) -> str | None:
    """Says what keeps a checkpoint from being whole, or None; `names` limits the check to some of its files."""
    try:
        files = read(Files, read_meta(folder)).files
    except (OSError, ValueError) as error:
        return f"meta.json is missing or unreadable ({error})"
    for file_name, record in files.items():
        path = folder / file_name
        if names is not None and path.stem not in names:
            continue
        if not path.is_file():
            return f"{file_name} is missing"
        if path.stat().st_size != record.bytes:
            return f"{file_name} has {path.stat().st_size} bytes where {record.bytes} were written"
        if sha256(path) != record.sha256:
            return f"{file_name} is not what was written: its SHA-256 differs"
    return None


def is_sound(folder: Path) -> bool:
    """Tells whether training was well when a checkpoint was saved; those of earlier versions do not say, and count."""
    with contextlib.suppress(OSError, ValueError):
        return read_meta(folder).get("sound", True) is not False
    return False


def last_sound(run: Path, before: int) -> Path | None:
    """Finds the newest checkpoint with fewer than `before` steps from which training was well."""
    return next((folder for folder in reversed(all_steps(run))
                 if step_of(folder) < before and is_sound(folder) and problem(folder) is None), None)


def latest(run: Path, names: tuple[str, ...] | None = None) -> Path | None:
    """Finds the newest checkpoint of a run that is whole; each newer one that is not is named in a warning."""
    for folder in reversed(all_steps(run)):
        why = problem(folder, names)
        if why is None:
            return folder
        warnings.warn(f"The checkpoint {folder} is damaged and is passed over: {why}.", stacklevel=2)
    return None


def set_aside_after(run: Path, step: int) -> None:
    """Renames the checkpoints past `step` to `damaged-…`, so that none of them is counted among those to keep.

    They are the ones that `latest` passed over; the run goes on from `step` and will write those steps anew.
    """
    for folder in all_steps(run):
        if step_of(folder) > step:
            aside = folder.with_name(f"damaged-{folder.name}")
            remove(aside)
            os.rename(folder, aside)


def load(folder: Path, name: str, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Reads a file of a checkpoint.

    Raises ValueError where its tensors are not finite, or have not the names, kinds and shapes of `like`.
    """
    file = folder / f"{name}.safetensors"
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}.") from error
    like = tensors if like is None else like
    if odd := sorted(tensors.keys() ^ like.keys()):
        raise ValueError(f"{file} is not of this run: {odd[0]} is {'unknown' if odd[0] in tensors else 'missing'}, and "
                         f"{len(odd) - 1} others. Move the checkpoint away, or give the settings that it began with.")
    for key, value in tensors.items():
        if value.shape != like[key].shape or value.is_floating_point() != like[key].is_floating_point():
            raise ValueError(f"{file} is not of this run: {key} is {value.dtype} {tuple(value.shape)} there, and "
                             f"{like[key].dtype} {tuple(like[key].shape)} here. Move the checkpoint away, or give the "
                             f"settings that it began with.")
        if not value.sum().isfinite():
            raise ValueError(f"{file} holds values in {key} that are not finite: move the checkpoint away to go on "
                             f"from an earlier one.")
    return tensors


def prune(run: Path, keep_last: int, keep_every: int) -> None:
    """Deletes all but the newest `keep_last` checkpoints and those at multiples of `keep_every` steps (0: none).

    Of those that were saved while training was well, the newest `keep_last` stay as well, whatever comes after.
    Also sweeps what killed saves left behind, so only the process that holds the run may call it.
    """
    for left in (run / "checkpoints").glob(".step-*.tmp"):
        remove(left)
    folders = all_steps(run)
    sound = [folder for folder in folders if is_sound(folder)]
    for folder in {*folders} - {*folders[-keep_last:], *sound[-keep_last:]}:
        if not (keep_every and step_of(folder) % keep_every == 0):
            # Renamed first, so that a kill in the middle leaves no half checkpoint under a valid name.
            doomed = folder.with_name(f".{folder.name}.tmp")
            os.rename(folder, doomed)
            remove(doomed)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Flattens an optimizer's state to `<parameter>.<state>` tensors."""
    return {f"{name}.{key}": value for name, p in model.named_parameters() for key, value in optimizer.state[p].items()}


def optimizer_outline(model: nn.Module) -> dict[str, Tensor]:
    """Returns tensors without memory of the names and shapes that `optimizer_tensors` has after a step of AdamW."""
    entries = {f"{name}.{entry}": p.shape if entry != "step" else () for name, p in model.named_parameters()
               if p.requires_grad for entry in ("step", "exp_avg", "exp_avg_sq")}
    return {key: torch.empty(shape, device="meta") for key, shape in entries.items()}


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restores what `optimizer_tensors` flattened; learning rate and the other settings stay as they are."""
    state: dict[int, dict[str, Tensor]] = {}
    index = {name: (i, p) for i, (name, p) in enumerate(model.named_parameters())}
    for key, value in tensors.items():
        name, _, entry = key.rpartition(".")
        i, p = index[name]
        state.setdefault(i, {})[entry] = sharding.part(value, like=p)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
