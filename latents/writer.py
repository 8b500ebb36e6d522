"""Rows of latents <-> the files of a latent folder (docs/data.md): written by the shard, so that a kill costs one."""

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
from filelock import FileLock
from pydantic import Field

from latents.images import check_labels
from runtime.files import atomic_write, lock_folder, naming_path, remove, write_text
from runtime.schema import Record, Whole, read_record

# What killed writes leave of our files; the version before named it .partial.
LEFTOVER = re.compile(r"\.?(latents|labels|mirrored|record|metadata|preparing)(-\d+)?\.(npy|json)\.\d+\.(tmp|partial)")


class ShardRecord(Record):
    """record-*.json: the mark that a shard is whole."""

    count: Whole
    unreadable: list[Annotated[tuple[str, str], Field(strict=False)]]      # name and reason of each


def write_json(path: Path, value: dict) -> None:
    """Writes a record in UTF-8, with a question mark for what is no letter in it, as a file's name may hold."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False).encode("utf-8", "replace").decode() + "\n")


def sweep(out: Path, *patterns: str) -> None:
    """Removes the files of `out` that match the patterns, and what killed writes have left there."""
    leftovers = [out / name for name in os.listdir(out) if LEFTOVER.fullmatch(name)]
    for file in itertools.chain(leftovers, *map(out.glob, patterns)):
        remove(file)


def check_out(out: Path, settings: dict, fingerprint: str | None, declared: type[Record]) -> bool:
    """Returns whether `out` is already finished with these settings; ValueError where it holds anything else.

    `declared` is the form of preparing.json: the settings and `fingerprint`, which None leaves unchecked.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={out} is a file; name a folder.")
    if not (out / "preparing.json").is_file():
        names = os.listdir(out) if out.is_dir() else []
        if any(not name.startswith(".") and not LEFTOVER.fullmatch(name) for name in names):
            raise ValueError(f"out={out} holds files that this script did not write; name a new or empty folder.")
        return False
    before = read_record(declared, out / "preparing.json", "Remove the folder, or name another.")
    changed = [f"{key}={getattr(before, key)} then and {value} now"
               for key, value in settings.items() if getattr(before, key) != value]
    if fingerprint is not None and before.fingerprint != fingerprint:
        changed.append("what the source holds has changed")
    if changed:
        raise ValueError(f"out={out} was begun with other settings: {'; '.join(changed)}. Use those, or another out, "
                         f"or remove it.")
    return (out / "metadata.json").is_file()


def begin(out: Path, settings: dict, num_whole: int, num_shards: int) -> FileLock:
    """Keeps `out` to this process and writes preparing.json; raises ValueError where another process writes there."""
    lock = lock_folder(out, f"Another process is writing out={out}: wait for it, stop it, or name another.")
    sweep(out)
    write_json(out / "preparing.json", settings)
    if num_whole:
        print(f"going on: {num_whole} of {num_shards} shards are whole")
    return lock


@contextmanager
def open_rows(path: Path, like: np.ndarray) -> Iterator[Callable[[np.ndarray], None]]:
    """Yields what appends rows (n, …) of `like`'s type and sizes to an npy v1 file; memory holds none of it."""
    count = 0

    def write_header() -> None:
        header = {"descr": np.lib.format.dtype_to_descr(like.dtype), "fortran_order": False,
                  "shape": (count, *like.shape[1:])}
        np.lib.format.write_array_header_1_0(file, header)

    def append(rows: np.ndarray) -> None:
        nonlocal count
        file.write(np.ascontiguousarray(rows).data)
        count += len(rows)

    with atomic_write(path) as partial, open(partial, "wb") as file:
        write_header()
        first_byte = file.tell()
        yield append
        file.seek(0)
        write_header()      # numpy pads headers so that the first axis can grow in place
        assert file.tell() == first_byte


def shard_files(shard: int, mirror: bool) -> dict[str, str]:
    """Names a shard's files, by their keys in metadata.json."""
    kinds = ["latents", "labels"] + ["mirrored"] * mirror
    return {kind: f"{kind}-{shard:05d}.npy" for kind in kinds}


def write_shard(out: Path, shard: int, batches: Iterable[tuple[dict[str, np.ndarray], list]]) -> None:
    """Writes one shard and then its record, the mark that it is whole.

    Each batch is its rows by their keys in metadata.json, none where nothing could be read, and (name, reason) of what
    could not.
    """
    files = shard_files(shard, mirror=True)
    count, unreadable = 0, []
    with ExitStack() as stack:
        writers: dict[str, Callable[[np.ndarray], None]] = {}
        for rows, unread in batches:
            for kind, part in rows.items():
                if kind not in writers:
                    writers[kind] = stack.enter_context(open_rows(out / files[kind], part))
                writers[kind](part)
            count += len(rows["labels"]) if rows else 0
            unreadable += unread
    write_json(out / f"record-{shard:05d}.json", {"count": count, "unreadable": unreadable})


def map_npy(file: Path, shapes: list[tuple[int, ...]], dtypes: list[str]) -> np.ndarray:
    """Maps an npy file; raises ValueError where it is damaged, or not of one of the shapes and types."""
    again = "copy the folder again, or remove it and prepare it anew"
    try:
        with naming_path(file):
            array = np.lib.format.open_memmap(file, mode="r")
    except FileNotFoundError:
        raise ValueError(f"{file} is missing, though metadata.json lists it: {again}.") from None
    except ValueError as error:      # no npy, or cut short, or Python objects, which are pickled
        raise ValueError(f"{file} is not a whole npy file of numbers ({error}): {again}.") from error
    if array.shape not in shapes or array.dtype not in dtypes:
        allowed = f"{' or '.join(dtypes)} {' or '.join(map(str, shapes))}"
        raise ValueError(f"{file} holds {array.dtype} {array.shape}, but metadata.json says {allowed}: the two are not "
                         f"of one preparation.")
    return np.asarray(array)      # rows of a memmap take longer


def read_shard(
    out: Path, shard: int, mirror: bool, row_shape: tuple[int, ...], num_classes: int,
) -> ShardRecord | None:
    """Returns the record of a shard that is whole, or None: then it is written again."""
    files = {kind: out / name for kind, name in shard_files(shard, mirror).items()}
    try:
        record = read_record(ShardRecord, out / f"record-{shard:05d}.json", "")
        if record.count:
            labels = map_npy(files.pop("labels"), [(record.count,)], ["int64"])
            check_labels(labels, num_classes, out, "")
            for file in files.values():
                map_npy(file, [(record.count, *row_shape)], ["float16"])
        return record
    except (OSError, ValueError):      # absent or damaged
        return None


def finish(out: Path, metadata: dict, records: list[ShardRecord | None]) -> None:
    """Checks and adds up the shards' records, marks the folder as whole, and says what is in it."""
    if None in records:
        raise ValueError(f"out={out}: {records.count(None)} shards are not whole, such as number "
                         f"{records.index(None)}; the same command writes them again.")
    reasons = [(name, "does not look like an image") for name in metadata["unreadable"]]
    reasons += [row for record in records for row in record.unreadable]
    metadata["unreadable"] = [name for name, _ in reasons]
    metadata["count"] = sum(record.count for record in records)
    if metadata["count"] == 0:
        raise ValueError(f"source={metadata['source']} has no readable image; {': '.join(reasons[-1])}.")
    for shard, record in enumerate(records):
        if record.count:
            metadata["shards"].append(shard_files(shard, metadata["mirrored"]) | {"count": record.count})
    write_json(out / "metadata.json", metadata)
    sweep(out, "record-*.json")

    if reasons:
        print(f"{len(reasons)} files are not in the set (all are named in {out / 'metadata.json'}):")
        for name, reason in reasons[:20]:
            print(f"  {name}: {reason}".encode("utf-8", "backslashreplace").decode())
    kind = f"{metadata['kind']}, mirrored" if metadata["mirrored"] else metadata["kind"]
    size = sum(file.stat().st_size for file in out.glob("*.npy"))
    print(f"{out}: {metadata['count']:,} latents {tuple(metadata['shape'])}, {kind}, {size / 1e6:,.0f} MB")
