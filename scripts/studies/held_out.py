"""The dense loss of runs' EMAs on chosen images at fixed noise levels, with the same noise for every run.

    python scripts/studies/held_out.py runs/emoji-* --data data/emoji data/emoji-held-out --out losses.jsonl

Appends {run, step, images, losses: {folder: {sigma: loss}}} for each checkpoint without one.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from edm import EDM
from latents.folder import Latents, open_latents
from latents.loader import to_latent
from runtime.command import program
from runtime.files import append_row, read_rows
from runtime.schema import as_path
from weights import checkpoints
from weights.loading import Trained, load_trained


@torch.no_grad()
def losses(trained: Trained, latents: Latents, count: int) -> dict[str, float]:
    """Returns the mean loss at each sigma; image i meets the same noise at every sigma and in every network."""
    names, known = latents.class_names or [], trained.class_names or []
    if unknown := {*names} - {*known}:
        raise ValueError(f"A folder of --data has classes that the run's data lack: {', '.join(sorted(unknown))}.")
    assert isinstance(trained.diffusion, EDM)   # no study asks it of flow matching
    stored, labels = latents.read(np.linspace(0, latents.count - 1, count).round().astype(int))
    y = torch.tensor([known.index(name) for name in names])[torch.from_numpy(labels).long()]
    torch.manual_seed(0)    # of moments
    x = to_latent(torch.from_numpy(stored), latents.kind)
    eps = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return {f"{sigma:g}": torch.cat([
        trained.diffusion.loss(trained.net, x, y, sigma=torch.full((len(x),), sigma), eps=eps)
        for x, y, eps in zip(x.split(64), y.split(64), eps.split(64), strict=True)]).mean().item()
        for sigma in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)}


@program
def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=as_path, nargs="+")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--out", type=as_path, required=True)
    given = parser.parse_args()
    sets = {folder: open_latents(folder) for folder in given.data}
    count = min(latents.count for latents in sets.values())
    for folder in (folder for run in given.runs for folder in checkpoints.all_steps(run)):
        row = {"run": folder.parents[1].name, "step": checkpoints.step_of(folder), "images": count}
        if not any(row.items() <= old.items() for old in read_rows(given.out)):
            trained = load_trained(str(folder))
            append_row(given.out, row | {"losses": {name: losses(trained, each, count) for name, each in sets.items()}})


if __name__ == "__main__":
    main()
