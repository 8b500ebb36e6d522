"""The dense loss of a checkpoint's EMA on chosen images at fixed noise levels, with the same noise for every run.

    python scripts/studies/held_out.py runs/emoji-tread data/emoji data/emoji-held-out --out held_out.jsonl

The first folder is that of training: it numbers the classes, and if its loss falls while the others' rises, the
network overfits. Every folder contributes as many images, evenly spread, as the smallest one has. Appends a row
{step, losses: {folder: {level: loss}}} to --out; a level is EDM's sigma or flow matching's t.
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
from runtime.files import append_row, locked, read_rows
from runtime.schema import as_path
from weights.loading import Trained, load_trained

LEVELS = {"sigma": (0.1, 0.2, 0.5, 1.0, 2.0, 5.0), "t": (0.1, 0.3, 0.5, 0.7, 0.9)}
BATCH_SIZE = 64


def names_of(latents: Latents) -> list[str]:
    return latents.class_names or [str(label) for label in range(latents.num_classes)]  # imported ones have none


def read(latents: Latents, count: int, class_names: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads `count` latents (count, C, h, w), evenly spread, and their labels as `class_names` numbers them."""
    stored, labels = latents.read(np.linspace(0, latents.count - 1, count).round().astype(int))
    if unknown := [name for name in names_of(latents) if name not in class_names]:
        raise ValueError(f"A folder has class {unknown[0]}, which the first one lacks: name the training set first.")
    numbers = torch.tensor([class_names.index(name) for name in names_of(latents)])
    torch.manual_seed(0)  # of moments
    return to_latent(torch.from_numpy(stored), latents.kind), numbers[torch.from_numpy(labels).long()]


@torch.no_grad()
def losses(trained: Trained, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """Returns the mean loss at each level; image i meets the same noise at every level and in every network."""
    name = "t" if isinstance(trained.diffusion, RF) else "sigma"
    eps = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    means = {}
    for level in LEVELS[name]:
        parts = [trained.diffusion.loss(trained.net, *part, **{name: torch.full((len(part[0]),), level)}, eps=noise)
                 for *part, noise in zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE), eps.split(BATCH_SIZE), strict=True)]
        means[f"{level:g}"] = torch.cat(parts).mean().item()
    return means


@program
def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint")
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--out", type=as_path, required=True)
    arguments = parser.parse_args()
    trained = load_trained(arguments.checkpoint)
    sets = {Path(folder).name: open_latents(folder) for folder in arguments.folders}
    if len(sets) < len(arguments.folders):
        raise ValueError(f"{' and '.join(arguments.folders)} have one name, by which losses are recorded: rename one.")
    count, names = min(latents.count for latents in sets.values()), names_of(next(iter(sets.values())))
    by_folder = {name: losses(trained, *read(latents, count, names)) for name, latents in sets.items()}
    with locked(arguments.out):
        if trained.step not in [row["step"] for row in read_rows(arguments.out)]:  # by another process
            append_row(arguments.out, {"step": trained.step, "images": count, "losses": by_folder})
    print(arguments.checkpoint, by_folder)


if __name__ == "__main__":
    main()
