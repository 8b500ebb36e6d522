"""Encodes images to a latent folder for train.py, over all ranks. A killed run can be resumed.

Every row of the result depends only on its image and the settings, and every shard is renamed into place when
complete. So the result does not depend on interruptions or on the number of ranks. configs/prepare_latents.yaml shows
the commands, and docs/data.md describes the format.
"""

import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from latents.decoding import SHAPES, UnreadableImage
from latents.folder import KINDS
from latents.images import ImageSource, ShapeSource, open_source
from latents.labels import Columns
from latents.listing import a_few, stamp_of
from latents.writer import is_finished, write_folder
from objectives.teachers import Teacher
from runtime.command import command
from runtime.device import DTYPES, describe_device, join_ranks
from runtime.schema import Count, Location, NonNegativeInt, Settings, Size, Text, one_of, read_json, refuse
from weights import autoencoders
from weights.reading import load_function

# ---- settings -------------------------------------------------------------------------------------------------------


class ShapesSettings(Settings):
    count: Annotated[int, Field(ge=len(SHAPES), le=10**8)]  # fewer would leave classes empty
    seed: NonNegativeInt


class PrepareSettings(Settings):
    """configs/prepare_latents.yaml."""

    source: Location
    out: Location
    resolution: Size | None
    autoencoder: Location | None
    kind: one_of(KINDS) | None
    mirror: bool
    teacher: Location | None
    patch_size: Size
    labels: Location | None
    image_column: Text
    name_column: Text
    label_column: Text
    label_map: Location | None
    words: Location | None
    seed: NonNegativeInt
    shapes: ShapesSettings
    shard_size: Count
    batch_size: Count
    num_workers: Annotated[int, Field(ge=1, le=1024)]
    precision: one_of(DTYPES)
    tf32: bool


# ---- pixels -> latents ----------------------------------------------------------------------------------------------


def decode_batch(source: ImageSource, indices: range, resolution: int) -> tuple[np.ndarray, list[int], list[list[str]]]:
    """Returns the readable images uint8 (b,R,R,3), their indices, and [name, reason] for the others."""
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
    """Encodes uint8 images (b,H,W,3) to rows for storage, float16 (b,C,h,w), or (b,2C,h,w) for moments."""
    mean, std = autoencoder.encode(images.flip(2) if mirror else images)
    if kind == "moments":
        rows = torch.cat([mean, std], dim=1)
    elif autoencoder.samples_only:
        rows = mean
    else:
        # Each image and each mirrored copy has its own generator, so samples do not depend on batch, rank or resuming.
        generators = [np.random.default_rng([seed, index, int(mirror)]) for index in indices]
        eps = np.stack([generator.standard_normal(mean.shape[1:], dtype=np.float32) for generator in generators])
        rows = mean + std * torch.from_numpy(eps).to(mean.device)
    return as_stored(rows, "autoencoder's latents")


def teach_rows(teacher: Teacher, images: torch.Tensor, precision: str, mirror: bool) -> np.ndarray:
    """Computes a teacher's tokens for uint8 images (b,H,W,3), float16 (b,N,Z)."""
    images = (images.flip(2) if mirror else images).permute(0, 3, 1, 2)
    with torch.autocast(teacher.device.type, DTYPES[precision], enabled=precision != "fp32"):
        return as_stored(teacher(images), "teacher's tokens")


def stamps(*names: str | None) -> list[list[int]]:
    """Returns the sizes and times of the files of local weights, so that a preparation is not resumed with others."""
    paths = [path for name in names if name for path in sorted([Path(name), *Path(name).rglob("*")])]
    return [[*stamp_of(path)] for path in paths if path.is_file()]


def as_stored(rows: torch.Tensor, what: str) -> np.ndarray:
    rows = rows.half()
    if not rows.isfinite().all():
        raise ValueError(f"The {what} are not finite or overflow float16 for some images: use precision=fp32, because "
                         f"some networks overflow in fp16.")
    return rows.cpu().numpy()


# ---- classes --------------------------------------------------------------------------------------------------------


def display_names(class_names: list[str], words: str | None) -> list[str] | None:
    """Returns class names for people, from a file of `<class name> <display name>, <synonym>, ...` lines."""
    if words is None:
        return None
    lines = Path(words).read_text("utf-8-sig").split("\n")
    pairs = [line.split("\t" if "\t" in line else None, 1) for line in lines]
    display = {pair[0]: pair[1].split(",")[0].strip() for pair in pairs if len(pair) == 2}
    if display.keys().isdisjoint(class_names):
        raise ValueError(f"words={words} names none of the source's classes, such as {class_names[0]}.")
    return [display.get(name) or name for name in class_names]


def apply_label_map(source: ImageSource, label_map: str) -> None:
    """Renumbers a source's classes by a JSON file {"class name": index, ...} that uses each of 0..n-1 once."""
    index_of = read_json(Path(label_map))
    if sorted(map(str, index_of.values())) != sorted(map(str, range(len(index_of)))):
        raise ValueError(f"label_map={label_map} must use each index from 0 to {len(index_of) - 1} once for its "
                         f"{len(index_of)} classes.")
    if missing := [name for name in source.class_names if name not in index_of]:
        raise ValueError(f"label_map={label_map} lacks {len(missing)} of the source's {len(source.class_names)} "
                         f"classes: {', '.join(missing[:8])}.")
    source.labels = np.array([index_of[name] for name in source.class_names], dtype=np.int64)[source.labels]
    source.class_names = sorted(index_of, key=lambda name: int(index_of[name]))


# ---- main -----------------------------------------------------------------------------------------------------------


def check_settings(cfg: PrepareSettings, cli_overrides: Mapping[str, str]) -> PrepareSettings:
    """Completes `resolution`, `autoencoder` and `kind`; raises ValueError for settings that would change nothing."""
    is_shapes = cfg.source == "shapes"
    autoencoder = cfg.autoencoder or ("identity" if is_shapes else "sd_vae_ema")
    kind = cfg.kind or ("sample" if autoencoders.samples_only(autoencoder) else "moments")
    if is_shapes and cfg.labels is not None:
        raise ValueError(f"labels={cfg.labels} would change nothing, because source=shapes has classes of its own.")
    if is_shapes:
        refuse(cli_overrides, "image_column", "name_column", "label_column", why="source=shapes has no columns")
    else:
        refuse(cli_overrides, "shapes", why="only source=shapes reads it")
    if cfg.teacher is None:
        refuse(cli_overrides, "patch_size", why="only teacher=<name> reads it, as the patch size of your network")
    if kind == "moments":
        refuse(cli_overrides, "seed", why="kind=moments stores means and deviations and samples nothing")
    elif autoencoders.samples_only(autoencoder):
        refuse(cli_overrides, "seed", why=f"autoencoder={autoencoder} encodes without noise")
    return cfg.model_copy(update={
        "resolution": cfg.resolution or (16 if is_shapes else 256), "autoencoder": autoencoder, "kind": kind})


@command("prepare_latents", PrepareSettings, check=check_settings)
def main(cfg: PrepareSettings) -> None:
    """Writes `source` to `out` as a latent folder. Raises ValueError for bad settings before anything slow starts."""
    warnings.filterwarnings("ignore", module="PIL")  # they do not name the file; unreadable files are listed anyway
    # Ranks may finish one shard apart. For a VAE on a CPU, that takes longer than a barrier's usual timeout.
    state = join_ranks(False, cfg.tf32, {"precision": cfg.precision}, timeout=timedelta(days=7))
    out, resolution, autoencoder, kind = Path(cfg.out), cfg.resolution, cfg.autoencoder, cfg.kind
    source = (ShapeSource(cfg.shapes.count, cfg.shapes.seed) if cfg.source == "shapes" else
              open_source(cfg.source, cfg.labels, Columns(cfg.image_column, cfg.name_column, cfg.label_column)))
    if cfg.label_map is not None:
        apply_label_map(source, cfg.label_map)
    shown = display_names(source.class_names, cfg.words)
    names, present = source.class_names, len(np.unique(source.labels))
    without = f", {len(names) - present} of them without images" if present < len(names) else ""
    state.print(f"{cfg.source}: {len(source):,} images, classes: {len(names)} ({a_few(names)}){without}, "
                f"other files: {len(source.left_out)}")

    settings = dict(resolution=resolution, autoencoder=autoencoder, kind=kind, mirror=cfg.mirror, seed=cfg.seed,
                    precision=cfg.precision, shard_size=cfg.shard_size, tf32=cfg.tf32, fingerprint=source.fingerprint(),
                    teacher=cfg.teacher, patch_size=cfg.patch_size if cfg.teacher else None)
    teach, code = load_function("teacher", cfg.teacher) if cfg.teacher else (None, None)
    if weights := stamps(autoencoder, code and str(code)):
        settings["weights"] = weights
    if Path(autoencoder).is_file() and (found := stamps(str(Path(autoencoder).with_name(autoencoders.STATISTICS)))):
        settings["statistics"] = found
    if is_finished(out, settings, state.is_main_process):
        if cfg.words and read_json(out / "metadata.json").get("display_names") != shown:
            raise ValueError(f"words={cfg.words} gives other names than {out / 'metadata.json'}: correct its "
                             f"display_names by hand, or choose another out.")
        return

    with state.main_process_first():  # one rank downloads the weights, and the others find them in the cache
        vae = autoencoders.load_autoencoder(autoencoder, state.device, DTYPES[cfg.precision])
    if resolution % vae.downsample:
        raise ValueError(f"resolution={resolution} is not divisible by {vae.downsample}, the factor by which "
                         f"{autoencoder} downsamples images.")
    side = resolution // vae.downsample
    teacher, arrays = None, {}
    if teach is not None:
        if side % cfg.patch_size:
            raise ValueError(f"patch_size={cfg.patch_size} does not divide the latent's side {side}: set it to the "
                             f"patch size of the network that you will train.")
        with state.main_process_first():
            teacher = Teacher(teach, side // cfg.patch_size, state.device)
        shape = [(side // cfg.patch_size) ** 2, teacher.width]
        arrays["teacher"] = {"shape": shape, "dtype": "float16", "mirror": "files", "source": cfg.teacher}

    def encode(decoded: tuple[np.ndarray, list[int], list]) -> tuple[dict[str, np.ndarray], list]:
        images, indices, unreadable = decoded
        if not indices:
            return {}, unreadable
        batch, rows = torch.from_numpy(images), {"labels": source.labels[indices].astype("<i8")}
        for mirror in (False, True)[: 1 + cfg.mirror]:
            rows["mirrored" if mirror else "latents"] = encode_rows(vae, batch, indices, kind, cfg.seed, mirror)
            if teacher is not None:
                name = "teacher_mirrored" if mirror else "teacher"
                rows[name] = teach_rows(teacher, batch, cfg.precision, mirror)
        return rows, unreadable

    metadata = {
        "shape": [vae.channels, side, side], "kind": kind, "mirrored": cfg.mirror,
        "num_classes": len(source.class_names), "class_names": source.class_names, "autoencoder": autoencoder,
        **vae.convention.record(), "resolution": resolution, "source": cfg.source, "precision": cfg.precision,
        **describe_device(state.device),
    } | ({"labels": cfg.labels} if cfg.labels else {})
    metadata |= ({"display_names": shown} if shown else {}) | ({"arrays": arrays} if arrays else {})
    write_folder(out, settings, metadata, (vae.channels * (2 if kind == "moments" else 1), side, side), len(source),
                 shard_size=cfg.shard_size, batch_size=cfg.batch_size, threads=cfg.num_workers, state=state,
                 read=lambda indices: decode_batch(source, indices, resolution), encode=encode,
                 left_out=source.left_out, when_full=" kind=sample and mirror=false each take half the space.")


if __name__ == "__main__":
    main()
