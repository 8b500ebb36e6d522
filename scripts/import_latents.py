"""Latents that another code base has stored -> a folder of latents that train.py reads, resumable after a kill.

    python scripts/import_latents.py source=imagenet_256_latent_lmdb out=data/maskdit
    python scripts/import_latents.py source=img512-sd.zip out=data/edm2 format=edm2

The options are in configs/import_latents.yaml; docs/interop.md says which form is whose, scripts/latent_forms.py how
each is read. Nothing is unpickled.
"""

import hashlib
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from autoencoder import Convention
from latents.folder import KINDS
from latents.forms import FORMS, Form, Stored, convert, open_stored, recognize
from latents.images import MAX_CLASSES, check_labels
from latents.loader import read_ahead
from latents.writer import begin, check_out, finish, read_shard, sweep, write_shard
from runtime.command import command
from runtime.files import require_room
from runtime.schema import Classes, Count, Location, Positive, Record, Settings, one_of

CHUNK_BYTES = 2**20      # of latents that are converted at once: what a processor's cache holds
NUM_PROBED = 256         # latents that are looked at before anything is written


class ImportSettings(Settings):
    """configs/import_latents.yaml."""

    source: Location | None
    out: Location | None
    format: one_of(["auto", *FORMS])
    kind: one_of(KINDS) | None
    scale: Positive | None
    latent_norm: bool
    mirrored: bool | None
    num_classes: Classes | None
    autoencoder: Location | None
    shard_size: Count


class Importing(Record):
    """preparing.json: what a folder was begun with, by which the same command knows it again."""

    format: str
    kind: str
    scale: float
    autoencoder: str
    mirrored: bool
    num_classes: int
    shard_size: int
    fingerprint: str


def probe(stored: Stored, form: Form, source: str) -> str:
    """Looks at some latents of all the source, before anything is written, and returns a hash of them and all labels.

    Raises ValueError where they are not finite or do not have a standard deviation near 1.
    """
    content = hashlib.sha256(json.dumps([len(stored.labels), stored.shape, asdict(form)]).encode())
    content.update(stored.labels)
    square, indices = 0.0, np.unique(np.linspace(0, len(stored.labels) - 1, NUM_PROBED).astype(int)).tolist()
    for index in indices:
        for read in stored.sides.values():
            row = torch.as_tensor(read(index, index + 1))
            content.update(row.float().numpy())
            row = finite(convert(form, row), source, index).double()
        if form.kind == "moments":
            mean, std = row.chunk(2, dim=1)
            if std.min() < 0:
                raise ValueError(f"source={source}: the second half of the channels reaches {std.min():.3g} in latent "
                                 f"{index}, but a standard deviation is never negative: these are of another form.")
            square += (mean.square() + std.square()).mean().item()
        else:
            square += row.square().mean().item()
    spread = math.sqrt(square / len(indices))
    if not 0.2 < spread < 4:
        how = "the values as they are" if form.scaled else f"scale={form.scale:g}"
        raise ValueError(f"source={source}: with {how}, as {form.whose} is read, the latents' root mean square is "
                         f"{spread:.3g}, where about 1 is expected. They are of another form, or scaled otherwise: set "
                         f"format= or scale=.")
    return content.hexdigest()[:32]


def finite(rows: torch.Tensor, source: str, first: int) -> torch.Tensor:
    """Returns float16 rows; raises ValueError, with the row's number, where one holds NaN or is beyond float16."""
    if not rows.sum(dtype=torch.float32).isfinite():
        bad = int((~rows.isfinite().flatten(1).all(1)).int().argmax())
        raise ValueError(f"source={source}: latent {first + bad} is not finite, or beyond float16: correct the source.")
    return rows


@contextmanager
def nothing_left(out: Path, existed: bool) -> Iterator[None]:
    """Removes what was written where the source turns out to be bad; a kill or a full disk keeps it for going on."""
    try:
        yield
    except ValueError:
        sweep(out, "latents-*.npy", "labels-*.npy", "mirrored-*.npy", "record-*.json", "preparing.json", ".lock")
        with suppress(OSError):      # where it holds other things
            if not existed:
                out.rmdir()
        raise


def import_latents(
    source: str,
    out: Path,
    format: str = "auto",
    kind: str | None = None,
    scale: float | None = None,
    latent_norm: bool = True,
    mirrored: bool | None = None,
    num_classes: int | None = None,
    autoencoder: str | None = None,
    shard_size: int = 4096,
) -> None:
    """Writes `source` to `out` as a latent folder; the keywords are those of configs/import_latents.yaml.

    Raises ValueError for whatever stands against it, and then leaves nothing behind.
    """
    started = time.monotonic()
    if format == "auto":
        format, why = recognize(source)
        print(f"{source}: taken as {format}, {FORMS[format].whose}: {why}.")
    stored, form = open_stored(format, source, kind, scale, latent_norm, mirrored, autoencoder)
    remedy = "set num_classes above it, or correct the source"
    check_labels(stored.labels, num_classes or MAX_CLASSES, f"source={source}", remedy)
    stored.labels = stored.labels.astype(np.int64)
    num_classes, count = num_classes or int(stored.labels.max()) + 1, len(stored.labels)
    fingerprint = probe(stored, form, source)
    copies = " and as many mirrored copies" if len(stored.sides) > 1 else ""
    print(f"{source}: {count:,} latents {stored.shape}{copies} in {num_classes} classes")

    num_shards, is_mirrored = -(-count // shard_size), len(stored.sides) > 1
    settings = dict(format=format, kind=form.kind, scale=form.scale, autoencoder=form.autoencoder, mirrored=is_mirrored)
    settings |= dict(num_classes=num_classes, shard_size=shard_size)
    if check_out(out, settings, fingerprint, Importing):
        sweep(out, "record-*.json")
        print(f"{out} is already whole: nothing to do.")
        return
    whole = (is_mirrored, stored.shape, num_classes)
    todo = [shard for shard in range(num_shards) if read_shard(out, shard, *whole) is None]
    row_bytes = math.prod(stored.shape) * 2 * len(stored.sides) + 8
    require_room(out, len(todo) * min(shard_size, count) * row_bytes, "name an out= on another disk.")

    chunk = max(1, CHUNK_BYTES // (math.prod(stored.shape) * 4))
    ranges = [(shard, start, min(start + chunk, (shard + 1) * shard_size, count)) for shard in todo
              for start in range(shard * shard_size, min((shard + 1) * shard_size, count), chunk)]
    existed = out.is_dir()
    lock = begin(out, settings | {"fingerprint": fingerprint}, num_shards - len(todo), num_shards)
    with nothing_left(out, existed), closing(read_ahead(
        (shard, start, end, {part: read(start, end) for part, read in stored.sides.items()})
        for shard, start, end in ranges
    )) as chunks, tqdm(desc="latents", total=sum(end - start for _, start, end in ranges), unit=" latents",
                       smoothing=0.05, disable=None) as bar:
        for shard, group in itertools.groupby(chunks, key=lambda item: item[0]):
            write_shard(out, shard, rows_of(group, stored, form, source, bar))
    lock.release()

    channels, side = stored.shape[0] // (2 if form.kind == "moments" else 1), stored.shape[1]
    convention = Convention(form.scale, 0.0, form.latents_mean, form.latents_std, form.pixels)
    resolution = {} if form.downsample is None else {"resolution": side * form.downsample}
    metadata = {
        "format": 1, "count": 0, "shape": [channels, side, side], "dtype": "float16", "kind": form.kind,
        "mirrored": is_mirrored, "num_classes": num_classes, "class_names": None, "autoencoder": form.autoencoder,
    } | convention.record() | resolution | {"shards": [], "source": source, "unreadable": [],
                                  "imported": {"format": format} | asdict(form)}
    finish(out, metadata, [read_shard(out, shard, *whole) for shard in range(num_shards)])
    seconds, done = time.monotonic() - started, sum(end - start for _, start, end in ranges)
    print(f"{done:,} latents in {seconds:.1f} s, {done / seconds:,.0f} latents/s")
    print(f"next: accelerate launch train.py experiment=small data.path={out} name={out.name}")


def rows_of(
    chunks: Iterator, stored: Stored, form: Form, source: str, bar: tqdm,
) -> Iterator[tuple[dict[str, np.ndarray], list]]:
    """Yields the rows of a shard by their keys in metadata.json, as they are stored."""
    for _, start, end, values in chunks:
        rows = {part: finite(convert(form, torch.as_tensor(read)), source, start).numpy()
                for part, read in values.items()}
        yield rows | {"labels": stored.labels[start:end]}, []
        bar.update(end - start)


@command("import_latents", ImportSettings)
def main(cfg: ImportSettings) -> None:
    lacking = [key for key in ("source", "out") if getattr(cfg, key) is None]
    if lacking:
        raise ValueError(f"{' and '.join(lacking)} must be given, as in source=vae-sd out=data/repa; "
                         f"configs/import_latents.yaml has all options.")
    import_latents(**cfg.model_dump() | {"out": Path(cfg.out)})


if __name__ == "__main__":
    main()
