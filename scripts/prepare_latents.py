"""Images -> a folder of latents that train.py reads, over all ranks, resumable after a kill.

    python scripts/prepare_latents.py source=shapes out=data/shapes16
    python scripts/prepare_latents.py source=cifar10-train.zip out=data/cifar10 resolution=32 autoencoder=identity
    accelerate launch scripts/prepare_latents.py source=imagenet/train out=data/imagenet256 mirror=true

The options are in configs/prepare_latents.yaml, the format in docs/data.md. Every row of the result is a function
of its image and the settings, and every shard is renamed into place when whole: neither a kill nor the number of
ranks shows.
"""

import itertools
import json
import os
import re
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import autoencoder as autoencoders
from latents.folder import KINDS
from latents.images import ImageSource, UnreadableImage, open_source
from latents.writer import begin, check_out, finish, read_shard, sweep, write_shard
from runtime.command import command
from runtime.device import DTYPES, describe_device, join_ranks
from runtime.files import require_room
from runtime.schema import Count, Location, Record, Settings, Size, Whole, one_of

# ---- settings and records -------------------------------------------------------------------------------------------


class ShapesSettings(Settings):
    count: Annotated[int, Field(ge=1, le=10**8)]
    seed: Whole


class PrepareSettings(Settings):
    """configs/prepare_latents.yaml."""

    source: Location | None
    out: Location | None
    resolution: Size | None
    autoencoder: Location | None
    kind: one_of(KINDS) | None
    mirror: bool
    label_map: Location | None
    words: Location | None
    seed: Whole
    shapes: ShapesSettings
    shard_size: Count
    batch_size: Count
    num_workers: Annotated[int, Field(ge=1, le=1024)]
    precision: one_of(DTYPES)
    tf32: bool


class Preparing(Record):
    """preparing.json: what a folder was begun with, by which the same command knows it again."""

    resolution: int
    autoencoder: str
    kind: str
    mirror: bool
    seed: int
    precision: str
    shard_size: int
    tf32: bool = True      # as torch has it for convolutions; version 1 did not say
    fingerprint: str


# ---- pixels -> latents ----------------------------------------------------------------------------------------------


def in_order(pool: ThreadPoolExecutor, function: Callable, jobs: Iterable, ahead: int) -> Iterator:
    """Yields function(job) in order while the pool works on the next `ahead` jobs."""
    waiting = deque()
    for job in jobs:
        waiting.append(pool.submit(function, job))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def decode_batch(source: ImageSource, indices: range, resolution: int) -> tuple[np.ndarray, list[int], list[list[str]]]:
    """Returns the readable images uint8 (b,R,R,3), their indices, and [name, reason] of the others."""
    pixels, readable, unreadable = [], [], []
    for index in indices:
        try:
            pixels.append(source.pixels(index, resolution))
            readable.append(index)
        except UnreadableImage as error:
            unreadable.append([source.names[index], str(error)])
    images = np.stack(pixels) if pixels else np.empty((0, resolution, resolution, 3), np.uint8)
    return images, readable, unreadable


def encode_rows(
    autoencoder, images: torch.Tensor, indices: list[int], kind: str, seed: int, mirror: bool
) -> np.ndarray:
    """Encodes uint8 images (b,H,W,3) to rows as they are stored, float16 (b,C,h,w), or (b,2C,h,w) for moments."""
    mean, std = autoencoder.encode(images.flip(2) if mirror else images)
    if kind == "moments":
        rows = torch.cat([mean, std], dim=1)
    elif autoencoder.samples_only:
        rows = mean
    else:
        # One generator an image and side: neither batch, rank nor resume shows in the sample.
        generators = [np.random.default_rng([seed, index, int(mirror)]) for index in indices]
        eps = np.stack([generator.standard_normal(mean.shape[1:], dtype=np.float32) for generator in generators])
        rows = mean + std * torch.from_numpy(eps).to(mean.device)
    rows = rows.half()
    if not rows.isfinite().all():
        raise ValueError(
            "The autoencoder's output is not finite or beyond float16 for some images; use precision=fp32 (some "
            "VAEs overflow in fp16)."
        )
    return rows.cpu().numpy()


def rows_of(
    batches: Iterable, source: ImageSource, encode: Callable, mirror: bool, bar: tqdm
) -> Iterator[tuple[dict[str, np.ndarray], list]]:
    """Encodes decoded batches and yields their rows by kind, and [name, reason] of the unreadable images."""
    for images, indices, unread in batches:
        rows = {}
        if indices:
            batch = torch.from_numpy(images)
            rows = {"latents": encode(batch, indices, mirror=False), "labels": source.labels[indices].astype("<i8")}
            if mirror:
                rows["mirrored"] = encode(batch, indices, mirror=True)
        yield rows, unread
        bar.update(len(indices) + len(unread))


# ---- the work -------------------------------------------------------------------------------------------------------


def read_option(option: str, path: Path) -> str:
    """Returns the text of the file that an option names; raises ValueError where it cannot be read."""
    if not path.is_file():
        raise ValueError(f"{option}={path} {'is not a file' if path.exists() else 'does not exist'}.")
    try:
        return path.read_text(encoding="utf-8").removeprefix("\ufeff")      # as Windows begins its texts
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}={path} cannot be read as text ({error}).") from error


def display_names(class_names: list[str], words: Path | None, source: str) -> list[str] | None:
    """Returns the classes' names for people, from a file of `<class name> <display name>, <synonym>, ...` lines.

    Without one, WordNet ids are looked for in the files where they are usually listed, in the source folder and
    beside it, and None is returned where they are not. A class that the file lacks keeps its name. Raises ValueError
    for a given file that names no class.
    """
    if words is not None:
        files = [words]
    elif all(re.fullmatch(r"n\d{8}", name) for name in class_names):
        files = [folder / name for folder in (Path(source), Path(source).absolute().parent)
                 for name in ("words.txt", "LOC_synset_mapping.txt") if os.path.isfile(folder / name)]
    else:
        files = []
    for file in files:
        pairs = [line.split("\t" if "\t" in line else None, 1) for line in read_option("words", file).splitlines()]
        display = {pair[0]: pair[1].split(",")[0].strip() for pair in pairs if len(pair) == 2}
        if not display.keys().isdisjoint(class_names):
            return [display.get(name) or name for name in class_names]
    if words is not None:
        raise ValueError(f"words={words} names none of the source's {len(class_names)} classes, such as "
                         f"{class_names[0]}: its lines are <class name> <display name>.")
    return None


def apply_label_map(source: ImageSource, label_map: Path) -> None:
    """Renumbers a source's classes by a JSON file {"class name": index, ...} with indices 0..n-1, each once."""
    text = read_option("label_map", label_map)
    try:
        index_of = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"label_map={label_map} is not JSON: {error}.") from error
    if not isinstance(index_of, dict) or not all(type(index) is int for index in index_of.values()):
        raise ValueError(
            f'label_map={label_map} must be one object {{"class name": index, ...}} with whole numbers.'
        )
    if sorted(index_of.values()) != list(range(len(index_of))):
        given = sorted(index_of.values())
        raise ValueError(
            f"label_map={label_map} must use each index from 0 to {len(index_of) - 1} once for its "
            f"{len(index_of)} classes; it has {given[:8]}{'...' if len(given) > 8 else ''}."
        )
    lacking = [name for name in source.class_names if name not in index_of]
    if lacking:
        raise ValueError(
            f"label_map={label_map} lacks {len(lacking)} of the source's {len(source.class_names)} classes: "
            f"{', '.join(lacking[:8])}; its own are {', '.join(list(index_of)[:8])}."
        )
    source.labels = np.array([index_of[name] for name in source.class_names], dtype=np.int64)[source.labels]
    source.class_names = sorted(index_of, key=index_of.get)


def prepare(
    source: str,
    out: Path,
    resolution: int | None = None,
    autoencoder: str | None = None,
    kind: str | None = None,
    mirror: bool = False,
    label_map: Path | None = None,
    seed: int = 0,
    shapes_count: int = 6000,
    shapes_seed: int = 0,
    words: Path | None = None,
    shard_size: int = 4096,
    batch_size: int = 32,
    num_workers: int = 8,
    precision: str = "fp32",
    tf32: bool = True,
) -> None:
    """Writes `source` to `out` as a folder of latents; the keywords are those of configs/prepare_latents.yaml.

    Raises ValueError for whatever stands against it, before anything slow where that can be known.
    """
    # Ranks may end a shard apart, which for a VAE on a CPU is longer than the usual timeout of a barrier.
    state = join_ranks(cpu=False, tf32=tf32, timeout=timedelta(days=7))
    started = time.monotonic()
    if resolution is None:
        resolution = 16 if source == "shapes" else 256
    autoencoder = autoencoder or ("identity" if source == "shapes" else "sd_vae_ema")
    kind = kind or ("sample" if autoencoders.samples_only(autoencoder) else "moments")
    settings = dict(resolution=resolution, autoencoder=autoencoder, kind=kind, mirror=mirror, seed=seed)
    settings |= dict(precision=precision, shard_size=shard_size, tf32=tf32)
    check_out(out, settings, None, Preparing)  # and again below, once the images are listed

    images = open_source(source, shapes_count, shapes_seed)
    if label_map is not None:
        apply_label_map(images, label_map)
    shown = display_names(images.class_names, words, source)
    fingerprint = images.fingerprint()
    num_classes, num_others = len(images.class_names), len(images.not_images)
    state.print(f"{source}: {len(images):,} images in {num_classes} classes, {num_others} other files")
    if check_out(out, settings, fingerprint, Preparing):
        if state.is_main_process:
            sweep(out, "record-*.json")  # of a run that was killed on its last lines
        state.print(f"{out} is already whole: nothing to do.")
        return

    with state.main_process_first():  # one rank downloads, the others find it in the cache
        vae = autoencoders.load(autoencoder, state.device, DTYPES[precision])
    if resolution % vae.downsample:
        raise ValueError(f"resolution={resolution} is not divisible by {vae.downsample}, the factor by which "
                         f"{autoencoder} shrinks images.")
    side = resolution // vae.downsample
    row_shape = (vae.channels * (2 if kind == "moments" else 1), side, side)
    num_shards = -(-len(images) // shard_size)
    whole = (mirror, row_shape, num_classes)
    todo = [shard for shard in range(num_shards) if read_shard(out, shard, *whole) is None]
    needed = len(todo) * min(shard_size, len(images)) * (np.prod(row_shape) * 2 * (1 + mirror) + 8)
    halves = ["kind=sample"] * (kind == "moments") + ["mirror=false"] * mirror
    require_room(out, needed, f"{' or '.join(halves)} would halve it." if halves else "name another disk by out=.")
    state.wait_for_everyone()  # everyone has looked at `out` before anyone writes there

    def encode(batch: torch.Tensor, indices: list[int], mirror: bool) -> np.ndarray:
        return encode_rows(vae, batch, indices, kind, seed, mirror)

    def decode(job: tuple[int, range]) -> tuple[int, tuple]:
        shard, indices = job
        return shard, decode_batch(images, indices, resolution)

    with ExitStack() as stack:
        if state.is_main_process:
            lock = begin(out, settings | {"fingerprint": fingerprint}, num_shards - len(todo), num_shards)
            stack.callback(lock.release)
        state.wait_for_everyone()

        mine = [range(s * shard_size, min((s + 1) * shard_size, len(images)))
                for s in todo[state.process_index :: state.num_processes]]
        batches = ((rows.start // shard_size, rows[at : at + batch_size])
                   for rows in mine for at in range(0, len(rows), batch_size))
        ranks = f"rank 0 of {state.num_processes}" if state.num_processes > 1 else "latents"
        bar = tqdm(desc=ranks, total=sum(map(len, mine)), unit=" images", smoothing=0.05,
                   disable=not state.is_main_process or None)
        pool = ThreadPoolExecutor(num_workers)
        try:
            # One stream over all of this rank's shards, so that decoding runs ahead across a shard's end as well.
            stream = in_order(pool, decode, batches, ahead=num_workers + 1)
            for shard, group in itertools.groupby(stream, key=lambda item: item[0]):
                write_shard(out, shard, rows_of((batch for _, batch in group), images, encode, mirror, bar))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            bar.close()
        state.wait_for_everyone()

        if state.is_main_process:
            records = [read_shard(out, shard, *whole) for shard in range(num_shards)]
            metadata = {
                "format": 1, "count": 0, "shape": [vae.channels, side, side], "dtype": "float16",
                "kind": kind, "mirrored": mirror, "num_classes": num_classes, "class_names": images.class_names,
                "autoencoder": autoencoder, **vae.convention.record(), "resolution": resolution,
                "shards": [], "source": source, "unreadable": images.not_images,
                "precision": precision, **describe_device(state.device),
            } | ({} if shown is None else {"display_names": shown})
            finish(out, metadata, records)
            seconds = time.monotonic() - started
            done = sum(records[shard].count for shard in todo)
            print(f"{done:,} images in {seconds:.0f} s, {done / seconds:,.0f} images/s")
            print(f"next: accelerate launch train.py experiment=small data.path={out} name={out.name}")


@command("prepare_latents", PrepareSettings)
def main(cfg: PrepareSettings) -> None:
    warnings.filterwarnings("ignore", module="PIL")      # its remarks name no file; broken ones are listed
    lacking = [key for key in ("source", "out") if getattr(cfg, key) is None]
    if lacking:
        raise ValueError(f"{' and '.join(lacking)} must be given, as in source=shapes out=data/shapes16; "
                         "configs/prepare_latents.yaml has all options.")
    paths = {key: path and Path(path) for key, path in [("out", cfg.out), ("label_map", cfg.label_map),
                                                        ("words", cfg.words)]}
    prepare(**cfg.model_dump(exclude={"shapes"}) | paths, shapes_count=cfg.shapes.count, shapes_seed=cfg.shapes.seed)


if __name__ == "__main__":
    main()
