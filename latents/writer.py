"""Writes a latent folder (docs/data.md) shard by shard, so that a killed run loses at most one shard per rank."""

import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from accelerate import PartialState
from tqdm import tqdm

from latents.folder import mark_known, open_npy, row_types
from latents.loader import read_ahead
from runtime.files import atomic_write, lock_folder, record_sha256, remove, require_room, sha256, write_text
from runtime.schema import read_json, typed

MOST_SMALL = 200_000  # images of a set that the small experiments are for
Unreadable = list[list[str]]  # [name, reason] of each image that could not be read
Rows = dict[str, np.ndarray]  # of a batch: an array (n, …) for each name in `row_types`, or {} if no image was readable


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a record in UTF-8. Bytes of file names that are not text become question marks."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False).encode("utf-8", "replace").decode() + "\n")


def is_finished(out: Path, settings: Mapping[str, Any], is_main: bool = True) -> bool:
    """Returns whether `out` is complete. Raises ValueError if it was begun with other settings or holds other files."""
    if not (out / "preparing.json").is_file():
        if out.is_file() or out.is_dir() and any(not name.startswith(".") for name in os.listdir(out)):
            raise ValueError(f"out={out} is or holds files that this script did not write; choose a new or empty "
                             f"folder.")
        return False
    before = read_json(out / "preparing.json")
    of_files = {"fingerprint": "the names, labels, sizes or times of the source's files differ",
                "weights": "the sizes or times of the autoencoder's or the teacher's files differ"}
    changed = [of_files.get(key, f"{key} was {before.get(key)} and is now {value}")
               for key, value in settings.items() if before.get(key) != value]
    if changed:
        raise ValueError(f"out={out} was begun with other settings: {'; '.join(changed)}. Use those, or another out.")
    if not (out / "metadata.json").is_file():
        return False
    if is_main:
        remove_records(out)     # remain if a run was killed between metadata.json and its end
        print(f"{out} is already complete: nothing to do.")
    return True


def write_folder(
    out: Path, settings: Mapping[str, Any], metadata: dict[str, Any], num_items: int, *, shard_size: int,
    batch_size: int, read: Callable[[range], Any], encode: Callable[[Any], tuple[Rows, Unreadable]],
    state: PartialState, threads: int = 1,
) -> None:
    """Writes the missing shards of `out` over all ranks, then metadata.json. `settings` are kept in preparing.json.

    `read(items)` runs in threads and reads up to `batch_size` items of one shard. `encode` turns its result into rows.
    Raises ValueError if the disk is too full, for rows that are not finite, or if another process is writing to `out`.
    """
    started, is_main, types = time.monotonic(), state.is_main_process, row_types(metadata)
    shards = [range(start, min(start + shard_size, num_items)) for start in range(0, num_items, shard_size)]
    records = read_records(out, len(shards), types)
    todo = [shard for shard, record in enumerate(records) if record is None]
    row_bytes = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in types.values())
    state.print(f"{', '.join(types)}: {row_bytes:,} bytes per image, {row_bytes * num_items / 1e9:,.3g} GB in all")
    require_room(out, sum(len(shards[shard]) for shard in todo) * row_bytes,
                 f"choose another disk with out={', or store no mirrored copies' * metadata['mirrored']}.")
    state.wait_for_everyone()  # all ranks read `out` before any of them writes there

    jobs = [(shard, shards[shard][start : start + batch_size])
            for shard in todo[state.process_index :: state.num_processes]
            for start in range(0, len(shards[shard]), batch_size)]
    with ExitStack() as stack:
        if is_main:
            lock = lock_folder(out, f"Another process is writing out={out}: wait for it, stop it, or set another.")
            stack.callback(lock.release)
            write_json(out / "preparing.json", settings)
            if len(todo) < len(shards):
                print(f"resuming: {len(shards) - len(todo)} of {len(shards)} shards are complete")
        state.wait_for_everyone()
        bar = stack.enter_context(tqdm(
            desc=f"rank 0 of {state.num_processes}" if state.num_processes > 1 else "latents", unit=" images",
            total=sum(len(items) for _, items in jobs), smoothing=0.05, disable=not is_main or None))
        # One stream covers all shards of this rank, so that reading ahead does not stop at the end of a shard.
        stream = read_ahead(lambda job: (*job, read(job[1])), jobs, threads=threads, ahead=threads + 1)
        stack.enter_context(closing(stream))

        def encoded(batches: Iterable[tuple[int, range, Any]]) -> Iterator[tuple[Rows, Unreadable]]:
            for _, items, content in batches:
                rows, unreadable = encode(content)
                for name, part in rows.items():
                    if not np.isfinite(part).all():
                        raise ValueError(f"{metadata['source']}: {name} of images {items[0]} to {items[-1]} are not "
                                         f"finite or overflow float16: correct the source, or prepare with "
                                         f"precision=fp32, as some networks overflow in fp16.")
                yield rows, unreadable
                bar.update(len(items))

        for shard, batches in itertools.groupby(stream, key=lambda batch: batch[0]):
            write_shard(out, shard, encoded(batches))
        state.wait_for_everyone()
        if is_main:
            bar.close()
            seconds, done = time.monotonic() - started, sum(len(shards[shard]) for shard in todo)
            print(f"{done:,} images in {seconds:.1f} s, {done / seconds:,.0f} images/s")
            finish(out, metadata, read_records(out, len(shards), types))


@contextmanager
def npy_file(path: Path, like: np.ndarray) -> Iterator[BinaryIO]:
    """Yields a file to write rows of the type and shape of those of `like` to, which becomes an npy v1 file."""
    row = like[0]

    def write_header(count: int) -> None:   # numpy pads headers so that the first axis can grow in place
        np.lib.format.write_array_header_1_0(file, {
            "descr": np.lib.format.dtype_to_descr(row.dtype), "fortran_order": False, "shape": (count, *row.shape)})

    with atomic_write(path) as partial, open(partial, "wb") as file:
        write_header(0)
        first_byte = file.tell()
        yield file
        count = (file.tell() - first_byte) // row.nbytes
        file.seek(0)
        write_header(count)
        assert file.tell() == first_byte


def write_shard(out: Path, shard: int, batches: Iterable[tuple[Rows, Unreadable]]) -> None:
    """Writes one shard and then its record, which marks it as complete."""
    count, content, unreadable = 0, 0, []
    opened: dict[Path, BinaryIO] = {}
    with ExitStack() as stack:
        for rows, reasons in batches:
            for name, part in rows.items():
                file = out / f"{name}-{shard:05d}.npy"
                if file not in opened:
                    opened[file] = stack.enter_context(npy_file(file, part))
                for row in part:
                    opened[file].write(row.tobytes())
                    content += int.from_bytes(hashlib.sha256(name.encode() + row.tobytes()).digest())
            count += len(rows["labels"]) if rows else 0
            unreadable += reasons
    write_json(out / f"record-{shard:05d}.json", {
        "count": count, "unreadable": unreadable, "content": f"{content:x}",
        "sha256": {file.name: sha256(file) for file in opened}})


def read_records(
    out: Path, num_shards: int, types: Mapping[str, tuple[tuple[int, ...], str]],
) -> list[dict[str, Any] | None]:
    """Returns each shard's record, or None if it is still to be written. `types` are the types of its rows."""
    records: list[dict[str, Any] | None] = []
    for shard in range(num_shards):
        try:
            record = read_json(out / f"record-{shard:05d}.json")
            int(record["content"], 16)
            for name, (shape, dtype) in types.items() if record["count"] else ():
                open_npy(out / f"{name}-{shard:05d}.npy", (record["count"], *shape), dtype)
            records.append(record)
        except (OSError, ValueError, LookupError, TypeError):  # absent or damaged
            records.append(None)
    return records


def remove_records(out: Path) -> None:
    for file in out.glob("record-*.json"):
        remove(file)


def finish(out: Path, metadata: Mapping[str, Any], records: list[dict[str, Any] | None]) -> None:
    """Combines the shards' records into metadata.json, which marks the folder as complete, and prints a summary."""
    written = [record for record in records if record is not None]
    if len(written) < len(records):
        raise ValueError(f"out={out} lacks {len(records) - len(written)} of {len(records)} shards, which ranks on "
                         f"other machines wrote to their own disks: copy their *.npy and record-*.json here and rerun "
                         f"on this machine alone, or set a folder that all machines share.")
    unreadable = [row for record in written for row in record["unreadable"]]
    count = sum(record["count"] for record in written)
    if count == 0:
        raise ValueError(f"source={metadata['source']} has no readable image; {': '.join(unreadable[0])}.")
    names = ["latents", "labels"] + ["mirrored"] * metadata["mirrored"]
    shards = [{name: f"{name}-{shard:05d}.npy" for name in names}
              | {"count": record["count"], "sha256": record["sha256"]}
              for shard, record in enumerate(written) if record["count"]]
    # The sum of the hashes of all rows is the same in whichever shards they are.
    content = f"{sum(int(record['content'], 16) for record in written) % 2**256:064x}"
    write_json(out / "metadata.json", {
        "format": 1, "count": count, "dtype": "float16", **metadata, "shards": shards, "content": content,
        "content_of": record_sha256({"shards": [shard["sha256"] for shard in shards]}),
        "unreadable": [name for name, _ in unreadable]})
    mark_known(out / "metadata.json", [out / file for shard in shards for file in shard["sha256"]])
    remove_records(out)

    if unreadable:
        print(f"{len(unreadable)} images are not 8-bit RGB and are left out ({out / 'metadata.json'} lists them):")
        for name, reason in unreadable[:20]:
            print(f"  {name}: {reason}")
    kind = f"{metadata['kind']}, mirrored" if metadata["mirrored"] else metadata["kind"]
    size = sum(file.stat().st_size for file in out.glob("*.npy"))
    print(f"{out}: {count:,} latents {tuple(metadata['shape'])}, {kind}, {size / 1e6:,.0f} MB")
    # On a CPU, accelerate launch would limit the process to one thread. small and small_cpu are for small sets, whose
    # latents have 64 tokens on a CPU; train.py's own settings are for sets such as ImageNet.
    side, is_small = metadata["shape"][1], count <= MOST_SMALL
    patch = max(size for size in range(1, max(4, side // 8) + 1) if side % size == 0)
    launch = ("accelerate launch train.py data=folder" if not is_small else
              "accelerate launch train.py experiment=small" if torch.cuda.is_available() else
              "python train.py experiment=small_cpu" + f" model.patch_size={patch}" * (patch != 4))
    print(f"next: {launch} {typed('data.path', out)} {typed('name', out.name)}")
