"""Seeds -> images, over ranks: a labelled grid, a folder of PNGs, or one npz.

    python sample.py checkpoint=runs/quickstart-tread                     # a grid, one row a class
    python sample.py checkpoint=runs/x seeds=0-63 'classes=[207,360]' num_steps=40 out=dogs.png
    accelerate launch sample.py checkpoint=runs/x seeds=100000-149999 out=samples.npz guidance=cfg scale=1.5

`checkpoint` is a run, a checkpoint folder, or a weights file (ours, or others': docs/interop.md). Each image is a
function of its own seed: the same picture on any number of ranks and at any batch size. Options:
configs/sample.yaml and configs/drawing.yaml. `python rf.py` is here too: guided and unguided grids with what they cost.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from accelerate import PartialState

from guidance import Guidance
from runtime.command import command
from runtime.device import join_ranks
from runtime.schema import Location, Selection
from sampling.generate import Batch, finite, gathered, generate, load_decoder, sampling_cost
from sampling.options import (
    GRID_CLASSES,
    DrawingSettings,
    build_guidance,
    labels_of,
    parse_range,
    read_classes,
    sampler_settings,
)
from sampling.pictures import write_grid, write_npz, write_pngs
from weights.loading import Trained, load_trained


class GridSettings(DrawingSettings):
    """configs/rf.yaml."""

    seeds: Selection | None
    out: Location | None


class SampleSettings(GridSettings):
    """configs/sample.yaml."""

    latents: bool


def default_grid(given: Path, trained: Trained) -> Path:
    """Places a grid in the run's samples, or, for a checkpoint or weights that lie alone, beside them."""
    if trained.run_folder is not None:
        return trained.run_folder / "samples" / f"{trained.folder.name}-{trained.weights}.png"
    return given / f"{trained.weights}.png" if given.is_dir() else given.with_suffix(".png")


# ---- entries --------------------------------------------------------------------------------------------------------


@dataclass
class Sampling:
    """What a command asks to be drawn: of what, of which seeds and classes, how guided, and to where."""

    trained: Trained
    guidance: Guidance | None
    seeds: list[int]
    classes: list[int]
    sampler: dict[str, float | str]
    draw: Callable[[Guidance | None], Iterator[Batch]]      # gathered batches
    out: Path


def open_sampling(
    cfg: GridSettings, state: PartialState, seeds_per_class: int | None = None, as_latents: bool = False,
) -> Sampling:
    """Loads what a command that draws needs, before anything slow.

    With `seeds_per_class`, seeds that are not given are so many for each class, and classes not given the first ten.
    With `as_latents` nothing is decoded, and no autoencoder is loaded.
    Raises ValueError, with the numbers and the knob, for settings that cannot work.
    """
    if cfg.checkpoint is None:
        raise ValueError("Say what to sample from: checkpoint=runs/<name>, a checkpoint folder, or a weights file.")
    trained = load_trained(cfg.checkpoint, cfg.weights, cfg.diffusion_name, cfg.autoencoder, state.device,
                           cfg.num_heads)
    if trained.inferred:
        state.print(trained.inferred)
    sampler = sampler_settings(trained.diffusion, cfg.sampler.model_dump())
    guidance, _ = build_guidance(cfg, trained, state.device)
    sampling_cost(trained.net, trained.diffusion, 1, guidance, **sampler)     # refuses now what sampling would refuse
    classes = read_classes(cfg, trained, state, GRID_CLASSES if seeds_per_class else None)
    given = f"0-{seeds_per_class * len(classes) - 1}" if seeds_per_class and cfg.seeds is None else cfg.seeds
    seeds = parse_range("seeds", given)
    labels = labels_of(seeds, classes)
    decode = finite if as_latents else load_decoder(trained, cfg, state.device)

    def draw(guidance: Guidance | None) -> Iterator[Batch]:
        return gathered(generate(
            trained.net, trained.diffusion, decode, seeds, labels, guidance=guidance,
            batch_size=min(cfg.batch_size, math.ceil(len(seeds) / state.num_processes)), num_steps=cfg.num_steps,
            precision=cfg.precision, progress="sampling" if guidance is None else "sampling, guided", **sampler,
        ))

    out = Path(cfg.out) if cfg.out else default_grid(Path(cfg.checkpoint), trained)
    return Sampling(trained, guidance, seeds, classes, sampler, draw, out)


@command("sample", SampleSettings)
def main(cfg: SampleSettings) -> None:
    state = join_ranks(cfg.cpu, cfg.tf32)
    if cfg.latents and Path(cfg.out or "").suffix != ".npz":
        raise ValueError(f"latents=true writes an npz, and out={cfg.out or 'null'} is none: set out=x.npz.")
    sampling = open_sampling(cfg, state, as_latents=cfg.latents)
    trained, out = sampling.trained, sampling.out
    if out.suffix not in (".png", ".npz", ""):
        raise ValueError(f"out={out} is neither a grid (.png), nor an .npz, nor a folder, which has no suffix.")
    batches = sampling.draw(sampling.guidance)
    if out.suffix == ".png":
        write_grid(batches, out, trained.display_names, sampling.classes)
    elif out.suffix == ".npz":
        write_npz(batches, out, len(sampling.seeds), ("latents", "labels") if cfg.latents else ("arr_0", "arr_1"))
    else:
        write_pngs(batches, out)
    drawn = "latents" if cfg.latents else "images"
    state.print(f"{len(sampling.seeds)} {drawn} from {trained.folder or cfg.checkpoint}: {out}")


@command("rf", GridSettings)
def compare_guided(cfg: GridSettings) -> None:
    """Draws a flow-matching network guided and unguided, and says what each costs: `python rf.py`."""
    state = join_ranks(cfg.cpu, cfg.tf32)
    sampling = open_sampling(cfg, state, seeds_per_class=8)
    trained = sampling.trained
    if trained.recorded["diffusion"]["name"] != "rf":
        raise ValueError(f"{cfg.checkpoint} was trained with {trained.recorded['diffusion']['name']}, not by flow "
                         f"matching (diffusion=rf). python sample.py takes the same guidance settings for it.")
    if sampling.guidance is None:
        raise ValueError("There is nothing to compare without guidance: choose guidance=tread, or give scale=1.5.")
    if cfg.out and Path(cfg.out).suffix != ".png":
        raise ValueError(f"out={cfg.out} is no .png; python sample.py writes npz files and folders.")
    out = sampling.out if cfg.out else sampling.out.with_name(f"{sampling.out.stem}-guided.png")
    stem = out.stem.removesuffix("-guided")
    grids = {out: sampling.guidance, out.with_name(f"{stem}-unguided.png"): None}
    cost = partial(sampling_cost, trained.net, trained.diffusion, cfg.num_steps, **sampling.sampler)
    evaluations = cost(None)[0]      # one pass each
    state.print("GFLOP: linear layers' multiply-adds, as the SG paper counts; in brackets: with attention, two a "
                "multiply-add, as torch counts")
    for path, guidance in grids.items():
        _, linear, attention = cost(guidance)
        shares = {"an evaluation": 1 / evaluations, f"an image of {evaluations}": 1,
                  f"all {len(sampling.seeds)} images": len(sampling.seeds)}
        state.print(f"{'guided' if guidance else 'unguided':<9}" + ", ".join(
            f"{linear * share / 1e9:.4g} [{2 * (linear + attention) * share / 1e9:.4g}] GFLOP {unit}"
            for unit, share in shares.items()))
        write_grid(sampling.draw(guidance), path, trained.display_names, sampling.classes)
        state.print(f"         {path}")


if __name__ == "__main__":
    main()
