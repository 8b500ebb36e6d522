"""Grids of samples: their settings and names, and the command of rf.py, which compares guided and unguided ones."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from runtime import files
from runtime.command import command
from runtime.device import join_ranks
from runtime.schema import CONFIGS, Location, Selection, as_text, name_of_changes
from sampling.generate import gathered, generate
from sampling.opening import open_sampling
from sampling.options import GRID_CLASSES, GuidanceSettings, SamplingSettings, check_guided, labels_of, parse_seeds
from sampling.pictures import check_file, write_grid
from weights.loading import Trained

# Settings that change at most the last bits of an image, or that the name already contains.
NOT_IN_NAME = {"checkpoint", "weights", "out", "overwrite", "latents", "batch_size", "decode_batch_size", "compile",
               "tf32", "cpu"}


class GridSettings(SamplingSettings):
    """configs/rf.yaml."""

    seeds: Selection | None
    out: Location | None


def default_grid(cfg: GridSettings, config_name: str, trained: Trained, ending: str = "") -> Path:
    """Returns the path of a grid among the run's samples, or beside a checkpoint's folder.

    Its name contains the settings that change the images and are not the command's defaults, so that grids with other
    settings are kept.
    """
    usual: dict[str, Any] = {}
    for name in ("guidance/none", "sampling", config_name):
        usual |= dict(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    hidden = NOT_IN_NAME | ({*GuidanceSettings.model_fields} if ending == "-unguided" else set())
    ending = f"{name_of_changes(cfg.model_dump(mode='json', exclude=hidden), usual)}{ending}.png"
    checkpoint, path = trained.checkpoint, Path(str(cfg.checkpoint))
    if checkpoint.run is not None:
        return files.inside(checkpoint.run, "samples", f"{checkpoint.folder.name}-{trained.weights}{ending}")
    if path.exists():  # beside the folder, which may be published as it is
        folder = checkpoint.folder.resolve()
        return folder.parent / f"{folder.name}-{trained.weights}{ending}"
    # What does not exist is a name of the Hugging Face Hub; its grids are written here.
    return Path(f"{'-'.join(path.parts)}{f'-{cfg.weights}' if cfg.weights else ''}{ending}")


def check_grid(cfg: GridSettings, cli_overrides: Mapping[str, str]) -> GridSettings:
    """Returns the settings; raises ValueError for some that do not go together."""
    if cfg.out and Path(cfg.out).suffix != ".png":
        raise ValueError(f"out={cfg.out} is not a .png; python sample.py writes npz files and folders.")
    check_guided(cfg, cli_overrides)
    return cfg


@command("rf", GridSettings, rooms=("solvers", "guidances"), check=check_grid)
def compare_guided(cfg: GridSettings) -> None:
    """Samples a flow-matching network guided and unguided, and prints what each costs: `python rf.py`."""
    state = join_ranks(cfg.cpu, cfg.tf32, cfg.precisions)
    sampling = open_sampling(state, cfg, most_classes=GRID_CLASSES)
    trained, guided = sampling.trained, sampling.sampler
    if guided.diffusion.max_noise != 1 or guided.guidance is None:
        raise ValueError(f"rf.py samples flow matching (diffusion=rf) with and without guidance, and this is "
                         f"{trained.recorded['diffusion']['name']} with scale={as_text(cfg.scale)}: use sample.py.")
    unguided = replace(guided, guidance=None)
    seeds = list(range(8 * len(sampling.classes))) if cfg.seeds is None else parse_seeds("seeds", cfg.seeds)
    labels = labels_of(seeds, sampling.classes)
    outs = [default_grid(cfg, "rf", trained, ending) for ending in ("-guided", "-unguided")]
    if cfg.out:
        out = Path(cfg.out)
        outs = [out, out.with_name(f"{out.stem.removesuffix('-guided')}-unguided.png")]
    for path in outs:
        check_file(path, "name another")
    state.print("GFLOP: linear layers' multiply-adds, as the SG paper counts. In brackets: with attention, and two per "
                "multiply-add, as torch counts")
    evaluations = unguided.passes(trained.net).total()  # one pass each
    shares = {"an evaluation": 1 / evaluations, f"an image of {evaluations}": 1, f"all {len(seeds)} images": len(seeds)}
    for name, path, sampler in zip(("guided", "unguided"), outs, (guided, unguided), strict=True):
        linear, attention = sampler.cost(trained.net)
        state.print(f"{name:<9}" + ", ".join(
            f"{linear * share / 1e9:.4g} [{2 * (linear + attention) * share / 1e9:.4g}] GFLOP {unit}"
            for unit, share in shares.items()))
        batches = generate(state, trained.net, sampler, sampling.decode, seeds, labels,
                           batch_size=cfg.batch_size, precision=cfg.precision, progress=f"sampling, {name}")
        write_grid(state, gathered(state, batches), labels, path, trained.display_names, sampling.classes)
        state.print(f"         {path}")
