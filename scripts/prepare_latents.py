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
from latents.decoding import SHAPES
from latents.images import open_shapes, open_source
from latents.labels import WAYS, Columns
from latents.listing import a_few, stamps_below
from latents.writer import Rows, Unreadable, is_finished, write_folder
from objectives.teachers import Teacher
from runtime.command import command
from runtime.device import DTYPES, DType, describe_device, join_ranks
from runtime.schema import Count, Location, NonNegativeInt, Settings, Size, Text, refuse
from weights import autoencoders
from weights.reading import load_function


class ShapesSettings(Settings):
    count: Annotated[int, Field(ge=len(SHAPES), le=10**8)]  # fewer would leave classes empty
    seed: NonNegativeInt


class PrepareSettings(Settings):
    """configs/prepare_latents.yaml."""

    source: Location
    out: Location
    resolution: Size | None
    autoencoder: Location | None
    mirror: bool
    teacher: Location | None
    patch_size: Size
    labels: Location | None
    image_column: Text
    name_column: Text
    label_column: Text
    shapes: ShapesSettings
    shard_size: Count
    batch_size: Count
    num_workers: Annotated[int, Field(ge=1, le=1024)]
    precision: DType
    tf32: bool


def check_settings(cfg: PrepareSettings, cli_overrides: Mapping[str, str]) -> PrepareSettings:
    """Completes `resolution` and `autoencoder`; raises ValueError for settings that would change nothing."""
    is_shapes = cfg.source == "shapes"
    if is_shapes:
        refuse(cli_overrides, "labels", "image_column", "name_column", "label_column",
               why="source=shapes has classes of its own")
    else:
        refuse(cli_overrides, "shapes", why="only source=shapes reads it")
    if not (cfg.labels or "").lower().endswith(".csv"):
        refuse(cli_overrides, "name_column", why="only labels=<file>.csv reads it")
    if cfg.labels in WAYS:
        refuse(cli_overrides, "label_column", why=f"labels={cfg.labels} reads no column")
    if cfg.teacher is None:
        refuse(cli_overrides, "patch_size", why="only teacher= reads it, as the patch size of your network")
    return cfg.model_copy(update={"resolution": cfg.resolution or (16 if is_shapes else 256),
                                  "autoencoder": cfg.autoencoder or ("identity" if is_shapes else "sd_vae_ema")})


@command("prepare_latents", PrepareSettings, check=check_settings)
def main(cfg: PrepareSettings) -> None:
    """Writes `source` to `out` as a latent folder. Raises ValueError for bad settings before anything slow starts."""
    warnings.filterwarnings("ignore", module="PIL")  # they do not name the file; unreadable files are listed anyway
    # Ranks may finish one shard apart. For a VAE on a CPU, that takes longer than a barrier's usual timeout.
    state = join_ranks(False, cfg.tf32, {"precision": cfg.precision}, timeout=timedelta(days=7))
    out, resolution, autoencoder = Path(cfg.out), cfg.resolution, cfg.autoencoder
    assert resolution and autoencoder   # of `check_settings`
    if cfg.source != "shapes" and out.resolve().is_relative_to(Path(cfg.source).resolve()):
        raise ValueError(f"out={out} lies in source={cfg.source}, where it would count as a class: set another.")
    kind = "sample" if autoencoder == "identity" else "moments"
    source = (open_shapes(cfg.shapes.count, cfg.shapes.seed, resolution) if cfg.source == "shapes" else
              open_source(cfg.source, cfg.labels, Columns(cfg.image_column, cfg.name_column, cfg.label_column)))
    state.print(f"{cfg.source}: {len(source):,} images, classes: {len(source.class_names)} "
                f"({a_few(source.class_names)}), other files: {len(source.others)} ({a_few(source.others) or 'none'})")

    teach, code = load_function("teacher", cfg.teacher) if cfg.teacher else (None, None)
    scales = (autoencoders.STATISTICS, "config.json") if Path(autoencoder).is_file() else ()    # beside the weights
    weights = [Path(autoencoder), *map(Path(autoencoder).with_name, scales), *([code] if code else [])]
    settings = dict(resolution=resolution, autoencoder=autoencoder, kind=kind, mirror=cfg.mirror,
                    precision=cfg.precision, shard_size=cfg.shard_size, tf32=cfg.tf32, fingerprint=source.fingerprint(),
                    teacher=cfg.teacher, patch_size=cfg.patch_size if cfg.teacher else None,
                    weights=stamps_below(*weights) or None)     # files of weights, if they are here
    if is_finished(out, settings, state.is_main_process):
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
        arrays["teacher"] = {"shape": shape, "dtype": "float16", "source": cfg.teacher}

    def encode(decoded: tuple[np.ndarray, list[int], Unreadable]) -> tuple[Rows, Unreadable]:
        images, indices, unreadable = decoded
        if not indices:
            return {}, unreadable
        sides, rows = {"latents": torch.from_numpy(images)}, {}
        if cfg.mirror:
            sides["mirrored"] = sides["latents"].flip(2)
        for name, batch in sides.items():
            mean, std = vae.encode(batch)
            rows[name] = mean if kind == "sample" else torch.cat([mean, std], dim=1)
            if teacher is not None:
                with torch.autocast(state.device.type, DTYPES[cfg.precision], enabled=cfg.precision != "fp32"):
                    tokens = teacher(batch.permute(0, 3, 1, 2))
                rows["teacher" if name == "latents" else "teacher_mirrored"] = tokens
        stored = {name: part.half().cpu().numpy() for name, part in rows.items()}
        return {"labels": source.labels[indices].astype("<i8")} | stored, unreadable

    metadata = {
        "shape": [vae.channels, side, side], "kind": kind, "mirrored": cfg.mirror,
        "num_classes": len(source.class_names), "class_names": source.class_names, "autoencoder": autoencoder,
        **vae.convention.record(), "resolution": resolution, "source": cfg.source, "precision": cfg.precision,
        **describe_device(state.device),
    } | ({"labels": cfg.labels} if cfg.labels else {}) | ({"arrays": arrays} if arrays else {})
    write_folder(out, settings, metadata, len(source), shard_size=cfg.shard_size, batch_size=cfg.batch_size,
                 threads=cfg.num_workers, state=state, encode=encode,
                 read=lambda indices: source.decode(indices, resolution))


if __name__ == "__main__":
    main()
