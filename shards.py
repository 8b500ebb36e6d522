"""Rows of latents -> a latent folder (docs/data.md): written shard by shard, so that a kill costs one shard."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from checkpoint import beside, remove, write_text
from settings import Record, Whole, read_record


class ShardRecord(Record):
    """record-*.json: the mark that a shard is whole."""

    count: Whole
    unreadable: list[Annotated[tuple[str, str], Field(strict=False)]]      # name and reason of each


def write_json(path: Path, value: dict) -> None:
    """Writes a record in UTF-8, with a question mark for what is no letter in it, as a file's name may hold."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False).encode("utf-8", "replace").decode() + "\n")


def sweep(out: Path, *patterns: str) -> None:
    for pattern in patterns:
        for leftover in out.glob(pattern):
            remove(leftover)


def check_out(out: Path, settings: dict, fingerprint: str | None, declared: type[Record]) -> bool:
    """Returns whether `out` is already finished with these settings; ValueError where it holds anything else.

    `declared` is the form of preparing.json: the settings and `fingerprint`, which None leaves unchecked.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={out} is a file; name a folder.")
    if not (out / "preparing.json").is_file():
        if out.is_dir() and any(not name.startswith(".") and not name.endswith(".partial") for name in os.listdir(out)):
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

    with beside(path) as partial, open(partial, "wb") as file:
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


def map_whole(file: Path) -> np.ndarray:
    """Maps an npy file; raises ValueError where it is not as we write them: as long as its header says, in C order."""
    if not file.is_file():
        raise ValueError(f"{file} is no plain file.")
    with open(file, "rb") as stream:
        version = np.lib.format.read_magic(stream)
    array = np.load(file, mmap_mode="r", allow_pickle=False)
    if version != (1, 0) or array.offset + array.nbytes != file.stat().st_size or not array.flags.c_contiguous:
        raise ValueError(f"{file} is not as its header says.")
    return array


def read_shard(
    out: Path, shard: int, mirror: bool, row_shape: tuple[int, ...], num_classes: int,
) -> ShardRecord | None:
    """Returns the record of a shard that is whole, or None: then it is written again."""
    try:
        record = read_record(ShardRecord, out / f"record-{shard:05d}.json", "")
        if record.count == 0:
            return record
        arrays = {kind: map_whole(out / name) for kind, name in shard_files(shard, mirror).items()}
    except Exception:      # absent, damaged, or shorter than its header says: numpy raises nearly anything
        return None
    labels = arrays.pop("labels")
    whole = labels.dtype == np.int64 and labels.shape == (record.count,)
    whole = whole and labels.min() >= 0 and labels.max() < num_classes
    whole = whole and all(a.dtype == np.float16 and a.shape == (record.count, *row_shape) for a in arrays.values())
    return record if whole else None


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
