"""Rows of latents <-> the files of a latent folder (docs/data.md), written shard by shard, so that a kill costs one."""

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from filelock import FileLock

from runtime.files import atomic_write, lock_folder, naming_path, remove, write_text
from runtime.schema import read_json

LEFTOVERS = (".*.npy.*.tmp", ".*.json.*.tmp")      # of killed writes; runtime.files.atomic_write names them


def write_json(path: Path, value: dict) -> None:
    """Writes a record in UTF-8; what is not text in a file's name becomes a question mark."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False).encode("utf-8", "replace").decode() + "\n")


def sweep(out: Path, *patterns: str) -> None:
    """Removes the files of `out` that match the patterns, and what killed writes have left there."""
    for file in itertools.chain.from_iterable(out.glob(pattern) for pattern in (*LEFTOVERS, *patterns)):
        remove(file)


def is_finished(out: Path, settings: dict) -> bool:
    """Returns whether `out` is whole; raises ValueError where it was begun with other settings or holds other files."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={out} is a file; name a folder.")
    if not (out / "preparing.json").is_file():
        if out.is_dir() and any(not name.startswith(".") for name in os.listdir(out)):
            raise ValueError(f"out={out} holds files that this script did not write; name a new or empty folder.")
        return False
    before = {"tf32": True} | read_json(out / "preparing.json")      # torch's default, which version 1 did not record
    changed = [f"{key}={before.get(key)} then and {value} now" for key, value in settings.items()
               if before.get(key) != value and key != "fingerprint"]
    if before["fingerprint"] != settings["fingerprint"]:
        changed.append("what the source holds has changed")
    if changed:
        raise ValueError(f"out={out} was begun with other settings: {'; '.join(changed)}. Use those, or another out, "
                         f"or remove it.")
    return (out / "metadata.json").is_file()


def begin(out: Path, settings: dict, num_whole: int, num_shards: int) -> FileLock:
    """Locks `out` and writes preparing.json; raises ValueError where another process writes there."""
    lock = lock_folder(out, f"Another process is writing out={out}: wait for it, stop it, or name another.")
    sweep(out)
    write_json(out / "preparing.json", settings)
    if num_whole:
        print(f"going on: {num_whole} of {num_shards} shards are whole")
    return lock


@contextmanager
def open_rows(path: Path, like: np.ndarray) -> Iterator[Callable[[np.ndarray], None]]:
    """Yields a function that appends rows (n, …) of `like`'s type and sizes to an npy v1 file; memory holds none."""
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

    A batch is its rows by their keys in metadata.json, none where nothing could be read, and [name, reason] of each
    unreadable image.
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


def read_records(out: Path, num_shards: int, mirror: bool, row_shape: tuple[int, ...]) -> list[dict | None]:
    """Returns the record of each shard, None for one that is not whole and has to be written."""
    records: list[dict | None] = []
    for shard in range(num_shards):
        try:
            record = read_json(out / f"record-{shard:05d}.json")
            shapes = {"labels": (), "latents": row_shape, "mirrored": row_shape}
            for kind, name in shard_files(shard, mirror).items() if record["count"] else ():
                map_npy(out / name, [(record["count"], *shapes[kind])], ["int64" if kind == "labels" else "float16"])
            records.append(record)
        except (OSError, ValueError):      # absent or damaged
            records.append(None)
    return records


def finish(out: Path, metadata: dict, records: list[dict | None], not_images: Iterable[str] = ()) -> None:
    """Adds up the shards' records and writes metadata.json, the mark that the folder is whole; prints what it holds."""
    if None in records:
        raise ValueError(f"out={out}: {records.count(None)} shards are not whole, such as number "
                         f"{records.index(None)}; the same command writes them again.")
    reasons = [(name, "does not look like an image") for name in not_images]
    reasons += [row for record in records for row in record["unreadable"]]
    count = sum(record["count"] for record in records)
    if count == 0:
        raise ValueError(f"source={metadata['source']} has no readable image; {': '.join(reasons[-1])}.")
    shards = [shard_files(shard, metadata["mirrored"]) | {"count": record["count"]}
              for shard, record in enumerate(records) if record["count"]]
    metadata = {"format": 1, "count": count, "dtype": "float16"} | metadata
    write_json(out / "metadata.json", metadata | {"shards": shards, "unreadable": [name for name, _ in reasons]})
    sweep(out, "record-*.json")

    if reasons:
        print(f"{len(reasons)} files are not in the set (all are named in {out / 'metadata.json'}):")
        for name, reason in reasons[:20]:
            print(f"  {name}: {reason}".encode("utf-8", "backslashreplace").decode())
    kind = f"{metadata['kind']}, mirrored" if metadata["mirrored"] else metadata["kind"]
    size = sum(file.stat().st_size for file in out.glob("*.npy"))
    print(f"{out}: {count:,} latents {tuple(metadata['shape'])}, {kind}, {size / 1e6:,.0f} MB")
    print(f"next: accelerate launch train.py experiment=small data.path={out} name={out.name}")
