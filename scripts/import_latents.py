"""Converts latents from other code to a latent folder for train.py. A killed run can be resumed; nothing is unpickled.

configs/import_latents.yaml shows the commands, docs/interop.md lists the formats, and latents/forms.py reads them.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from latents.folder import MAX_CLASSES, Kind, check_labels
from latents.forms import FORMS, open_stored
from latents.writer import Rows, Unreadable, is_finished, write_folder
from runtime.command import command
from runtime.device import join_ranks
from runtime.schema import Classes, Count, Location, Positive, Settings, Text, refuse


class ImportSettings(Settings):
    """configs/import_latents.yaml."""

    source: Location
    out: Location
    format: Text | None
    kind: Kind | None
    scale: Positive | None
    latent_norm: bool
    num_classes: Classes | None
    autoencoder: Location | None
    shard_size: Count


def check_settings(cfg: ImportSettings, cli_overrides: Mapping[str, str]) -> ImportSettings:
    """Raises ValueError for no such format, and for settings that would change nothing."""
    if cfg.format not in FORMS:
        raise ValueError(f"source={cfg.source} does not record its format: set "
                         f"{'; '.join(f'format={name} {needs}' for name, (_, needs) in FORMS.items())}.")
    for key, owner in (("kind", "tread"), ("latent_norm", "lightningdit")):
        if cfg.format != owner:
            refuse(cli_overrides, key, why=f"only format={owner} reads it")
    return cfg


@command("import_latents", ImportSettings, check=check_settings)
def main(cfg: ImportSettings) -> None:
    """Writes `source` to `out` as a latent folder. Raises ValueError for a bad source."""
    state, out = join_ranks(cpu=True, tf32=True, timeout=timedelta(days=7)), Path(cfg.out)
    assert cfg.format   # of `check_settings`
    stored = open_stored(cfg.format, cfg.source, cfg.kind, cfg.scale, cfg.latent_norm, cfg.autoencoder)
    check_labels(stored.labels, cfg.num_classes or MAX_CLASSES, f"source={cfg.source}",
                 "set num_classes above it, or correct the source")
    labels = stored.labels.astype(np.int64)
    num_classes, count = cfg.num_classes or int(labels.max()) + 1, len(labels)
    is_mirrored = len(stored.sides) > 1
    meaning = {"kind": stored.kind, "autoencoder": stored.autoencoder, "scaled": stored.scaled,
               "log_variance": stored.log_variance, **stored.convention.record()}
    facts = json.dumps([labels.tolist(), stored.shape, stored.stamps])
    settings = dict(format=cfg.format, mirrored=is_mirrored, num_classes=num_classes, shard_size=cfg.shard_size,
                    **meaning, fingerprint=hashlib.sha256(facts.encode()).hexdigest()[:32])
    stored.check(f"source={cfg.source}")
    state.print(f"{cfg.source}: {count:,} latents {stored.shape}{' and as many mirrored copies' * is_mirrored} in "
                f"{num_classes} classes")
    if is_finished(out, settings, state.is_main_process):
        return

    def read(rows: range) -> tuple[range, dict[str, np.ndarray | torch.Tensor]]:
        return rows, {part: read(rows.start, rows.stop) for part, read in stored.sides.items()}

    def encode(content: tuple[range, dict[str, np.ndarray | torch.Tensor]]) -> tuple[Rows, Unreadable]:
        rows, values = content
        parts = {part: stored.convert(value).numpy() for part, value in values.items()}
        return parts | {"labels": labels[rows.start : rows.stop]}, []

    channels, side = stored.shape[0] // (2 if stored.kind == "moments" else 1), stored.shape[1]
    metadata = {"shape": [channels, side, side], "mirrored": is_mirrored, "num_classes": num_classes,
                "class_names": None, "source": cfg.source, "imported": {"format": cfg.format}, **meaning}
    write_folder(out, settings, metadata, count, shard_size=cfg.shard_size, batch_size=64, read=read, encode=encode,
                 state=state)


if __name__ == "__main__":
    main()
