"""The dense loss of runs' EMAs on chosen images at fixed noise levels, with the same noise for every run.

    python scripts/studies/held_out.py runs/emoji-* --data data/emoji data/emoji-held-out --out losses.jsonl

Appends {run, step, images, losses: {folder: {EDM's sigma or flow matching's t: loss}}} for each checkpoint without one.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from latents.folder import Latents, open_latents
from latents.loader import to_latent
from rf import RF
from runtime.command import program
from runtime.files import append_row, read_rows
from runtime.schema import as_path
from weights import checkpoint as checkpoints
from weights.loading import Trained, load_trained


@torch.no_grad()
def losses(trained: Trained, latents: Latents, count: int) -> dict[str, float]:
    """Returns the mean loss at each level; image i meets the same noise at every level and in every network."""
    stored, labels = latents.read(np.linspace(0, latents.count - 1, count).round().astype(int))
    names = latents.class_names or [*map(str, range(latents.num_classes))]      # imported latents have no names
    if unknown := {*names} - {*(known := trained.class_names or names)}:
        raise ValueError(f"A folder of --data has classes that the run's data lack: {', '.join(sorted(unknown))}.")
    y = torch.tensor([known.index(name) for name in names])[torch.from_numpy(labels).long()]
    torch.manual_seed(0)    # of moments
    x = to_latent(torch.from_numpy(stored), latents.kind)
    eps = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    name, levels = (("t", (0.1, 0.3, 0.5, 0.7, 0.9)) if isinstance(trained.diffusion, RF) else
                    ("sigma", (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)))
    return {f"{level:g}": torch.cat([
        trained.diffusion.loss(trained.net, *part, **{name: torch.full((len(noise),), level)}, eps=noise)
        for *part, noise in zip(*(values.split(64) for values in (x, y, eps)), strict=True)]).mean().item()
        for level in levels}


@program
def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=as_path, nargs="+")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--out", type=as_path, required=True)
    given = parser.parse_args()
    sets = {folder: open_latents(folder) for folder in given.data}
    for folder in (folder for run in given.runs for folder in checkpoints.all_steps(run)):
        count = min(latents.count for latents in sets.values())
        row = {"run": folder.parents[1].name, "step": checkpoints.step_of(folder), "images": count}
        if not any(row.items() <= old.items() for old in read_rows(given.out)):
            trained = load_trained(str(folder))
            append_row(given.out, row | {"losses": {name: losses(trained, each, count) for name, each in sets.items()}})


if __name__ == "__main__":
    main()
