"""Grids of samples: their settings and names, and the command of rf.py, which compares guided and unguided ones."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from runtime import files
from runtime.command import command
from runtime.device import join_ranks
from runtime.ranks import from_main
from runtime.schema import Location, Selection
from sampling.generate import gathered, generate
from sampling.opening import open_sampling
from sampling.options import SamplingSettings, labels_of, parse_range
from sampling.pictures import require_ours, write_grid
from weights.loading import Trained


class GridSettings(SamplingSettings):
    """configs/rf.yaml."""

    seeds: Selection
    out: Location | None


def default_grid(cfg: GridSettings, trained: Trained) -> Path:
    """Returns the path of a grid, in the run's samples/ or here, with a hash of settings and weights in its name."""
    checkpoint, plain = trained.checkpoint, cfg.model_dump(mode="json", exclude={"checkpoint", "out"})
    name = f"{checkpoint.weights}-{files.record_sha256({**plain, 'weights_sha256': checkpoint.sha256})[:8]}.png"
    if checkpoint.run is not None:
        return files.inside(checkpoint.run, "samples", f"{checkpoint.folder.name}-{name}")
    return Path(f"{Path(str(cfg.checkpoint)).name}-{name}")


def check_grid(cfg: GridSettings, cli_overrides: Mapping[str, str]) -> GridSettings:
    """Returns the settings; raises ValueError for some that do not go together."""
    if cfg.out and Path(cfg.out).suffix != ".png":
        raise ValueError(f"out={cfg.out} is not a .png; python sample.py writes npz files and folders.")
    if cfg.scale is None:
        raise ValueError("rf.py compares guided samples with unguided ones: give guidance=, or scale=1.5.")
    return cfg


@command("rf", GridSettings, rooms=("solvers", "guidances"), check=check_grid)
def compare_guided(cfg: GridSettings) -> None:
    """Samples grids of the same seeds with guidance and without it: `python rf.py`."""
    state = join_ranks(cfg.cpu, cfg.tf32, cfg.precisions)
    sampling = open_sampling(state, cfg)
    trained, guided = sampling.trained, sampling.sampler
    seeds = parse_range("seeds", cfg.seeds)
    labels, settings = labels_of(seeds, sampling.classes), cfg.model_dump_json(exclude={"out"})
    out = Path(cfg.out) if cfg.out else default_grid(cfg, trained)
    beside = out.with_stem(f"{out.stem.removesuffix('-guided')}-unguided")
    from_main(state, lambda: require_ours(out, beside, settings=settings if cfg.out else ""))
    for path, sampler in ((out, guided), (beside, replace(guided, guidance=None))):
        batches = generate(state, trained.net, sampler, sampling.decode, seeds, labels,
                           batch_size=cfg.batch_size, precision=cfg.precision, progress="sampling")
        write_grid(state, gathered(state, batches), labels, path, trained.display_names, settings)
        state.print(path)
