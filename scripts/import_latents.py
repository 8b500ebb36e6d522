"""Converts latents from other code to a latent folder for train.py. A killed run can be resumed; nothing is unpickled.

configs/import_latents.yaml shows the commands, docs/interop.md lists the formats, and latents/forms.py reads them.
"""

import hashlib
import json
import math
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from latents.folder import KINDS, MAX_CLASSES, check_kind, check_labels
from latents.forms import FORMS, Stored, convert, describe_formats, open_stored
from latents.listing import find_tars, spread
from latents.writer import is_finished, write_folder
from runtime.command import command
from runtime.device import join_ranks
from runtime.schema import Classes, Count, Location, Positive, Settings, one_of

CHUNK = 64               # latents read and converted at once
NUM_PROBED = 256         # latents checked before anything is written


class ImportSettings(Settings):
    """configs/import_latents.yaml."""

    source: Location
    out: Location
    format: one_of(FORMS) | None
    kind: one_of(KINDS) | None
    scale: Positive | None
    latent_norm: bool
    num_classes: Classes | None
    autoencoder: Location | None
    shard_size: Count


def probe(stored: Stored, source: str) -> None:
    """Checks some latents, spread over the source, before anything is written.

    Raises ValueError if they are not finite or their root mean square is far from 1.
    """
    form, most = stored.form, max(1, 2**26 // math.prod(stored.shape))  # numbers in memory
    rows = [finite(convert(form, torch.as_tensor(read(index, index + 1))), source, index)
            for index in spread(len(stored.labels), min(NUM_PROBED, most)).tolist() for read in stored.sides.values()]
    values, scale = torch.cat(rows).double().numpy(), form.convention.scale
    check_kind(values, form.kind, f"source={source}",
               f"set {'kind=moments (for format=tread)' if form.kind == 'sample' else 'format='}, or write them anew.")
    if form.log_variance and values[:, values.shape[1] // 2 :].min() >= 0.99 * scale:  # up to float16 rounding
        raise ValueError(f"source={source}: the second half of the channels is never below 0, so it looks like "
                         f"standard deviations, but log-variances are expected here: write 2 * log(std) instead.")
    rms = math.sqrt(np.square(values).mean() * (2 if form.kind == "moments" else 1))  # of mean + std * eps
    if not 0.2 < rms < 4:
        how = "values as stored" if form.scaled else f"scale={scale:g}"
        raise ValueError(f"source={source} has latents whose root mean square is {rms:.3g} instead of about 1, read as "
                         f"{form.whose} with {how}: set format= or scale=.")


def fingerprint(stored: Stored) -> str:
    """Returns a hash of the labels, what the values mean, and the sizes and times of the source's files."""
    facts = [stored.labels.tolist(), stored.shape, asdict(stored.form), stored.stamps]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def finite(rows: torch.Tensor, source: str, first: int) -> torch.Tensor:
    """Returns float16 rows unchanged. Raises ValueError with a row's number if one is NaN or overflowed float16."""
    good = rows.isfinite().flatten(1).all(1)
    if not good.all():
        bad = first + int(good.int().argmin())
        raise ValueError(f"source={source} has a latent {bad} that is not finite or overflows float16: correct the "
                         f"source.")
    return rows


@command("import_latents", ImportSettings)
def main(cfg: ImportSettings) -> None:
    """Writes `source` to `out` as a latent folder. Raises ValueError for a bad source."""
    state, out = join_ranks(cpu=True, tf32=True, timeout=timedelta(days=7)), Path(cfg.out)
    if not Path(cfg.source).exists() and not find_tars(cfg.source):
        raise ValueError(f"source={cfg.source} does not exist (looked from {Path.cwd()}).")
    if cfg.format is None:
        raise ValueError(describe_formats(cfg.source))
    stored = open_stored(cfg.format, cfg.source, cfg.kind, cfg.scale, cfg.latent_norm, cfg.autoencoder)
    form = stored.form
    check_labels(stored.labels, cfg.num_classes or MAX_CLASSES, f"source={cfg.source}",
                 "set num_classes above it, or correct the source")
    labels = stored.labels.astype(np.int64)
    num_classes, count = cfg.num_classes or int(labels.max()) + 1, len(labels)
    is_mirrored = len(stored.sides) > 1
    copies = " and as many mirrored copies" if is_mirrored else ""
    settings = dict(format=cfg.format, kind=form.kind, scale=form.convention.scale, autoencoder=form.autoencoder,
                    mirrored=is_mirrored, num_classes=num_classes, shard_size=cfg.shard_size,
                    fingerprint=fingerprint(stored))
    probe(stored, cfg.source)
    state.print(f"{cfg.source}: {count:,} latents {stored.shape}{copies} in {num_classes} classes")
    if is_finished(out, settings, state.is_main_process):
        return

    def read(rows: range) -> tuple[range, dict]:
        return rows, {part: read(rows.start, rows.stop) for part, read in stored.sides.items()}

    def encode(content: tuple[range, dict]) -> tuple[dict[str, np.ndarray], list]:
        rows, values = content
        parts = {part: finite(convert(form, torch.as_tensor(value)), cfg.source, rows.start).numpy()
                 for part, value in values.items()}
        return parts | {"labels": labels[rows.start : rows.stop]}, []

    channels, side = stored.shape[0] // (2 if form.kind == "moments" else 1), stored.shape[1]
    metadata = {
        "shape": [channels, side, side], "kind": form.kind, "mirrored": is_mirrored, "num_classes": num_classes,
        "class_names": None, "autoencoder": form.autoencoder, **form.convention.record(), "source": cfg.source,
        "imported": {"format": cfg.format} | asdict(form),
    } | ({} if form.downsample is None else {"resolution": side * form.downsample})
    write_folder(out, settings, metadata, stored.shape, count, shard_size=cfg.shard_size, batch_size=CHUNK, read=read,
                 encode=encode, state=state)


if __name__ == "__main__":
    main()
