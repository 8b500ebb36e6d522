"""Scores a checkpoint over a grid of guidance scales and selection ratios, and draws the landscape as a heat map.

    python scripts/sweep_guidance.py checkpoint=runs/x reference=ref.npz features=inception
    python scripts/sweep_guidance.py … scale=1.2,1.5,2 gamma1=0,0.5 gamma2=0.5,0.7,0.9 metric=sfid

Each point is scored as fid.py does, with all its options, and is a row of its results.jsonl; so is the unguided one. A
point that has a row is not scored again, so a sweep that was killed goes on. The picture is drawn after each point.
Options: configs/sweep_guidance.yaml.
"""

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from matplotlib.figure import Figure
from pydantic import Field

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import fid
from guidance import ends
from runtime.command import command
from runtime.device import join_ranks
from runtime.presentation import save_figure
from runtime.schema import Location, Number, Settings
from sampling.options import UNGUIDED, Gamma, build_guidance, is_idle
from weights.loading import Checkpoint, find_checkpoint, load_trained

AXES = ("scale", "gamma1", "gamma2")  # of the landscape: along x, a panel each, along y


class Grid(Settings):
    """The values of each axis; every combination is a point."""

    scale: Annotated[list[Number], Field(min_length=1)]
    gamma1: Annotated[list[Gamma], Field(min_length=1)]
    gamma2: Annotated[list[Gamma], Field(min_length=1)]


class SweepSettings(fid.ScoringSettings):
    """configs/sweep_guidance.yaml."""

    grid: Grid
    metric: str | None
    picture: Location | None


def onto_the_grid(argument: str) -> str:
    """Turns `scale=1.2,1.5,2` of a command line into `grid.scale=[1.2,1.5,2]`, and leaves other arguments alone."""
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:  # the command says what is wrong with it
        return argument
    if override.key_or_group not in AXES:
        return argument
    values = override.sweep_string_iterator() if override.is_sweep_override() else [override.get_value_element_as_str()]
    return f"grid.{override.key_or_group}=[{','.join(values)}]"


def draw_landscape(points: dict[tuple, float], unguided: float, metric: str, title: str, path: Path) -> None:
    """Draws the values at (scale, gamma1, gamma2): a panel for each gamma1, scale to the right and gamma2 upwards."""
    scales, panels, gammas = (sorted({p[axis] for p in points}, key=ends) for axis in range(3))
    figure = Figure(figsize=(1.2 + (0.9 * len(scales) + 0.6) * len(panels), 1.4 + 0.7 * len(gammas)),
                    layout="constrained", dpi=150)
    axes = figure.subplots(1, len(panels), squeeze=False)
    for panel, plot in zip(panels, axes[0], strict=True):
        values = [[points.get((scale, panel, gamma), float("nan")) for scale in scales] for gamma in gammas]
        heat = plot.imshow(values, origin="lower", aspect="auto", cmap="viridis",
                           vmin=min(points.values()), vmax=max(points.values()))
        for i, gamma in enumerate(gammas):
            for j, scale in enumerate(scales):
                if (value := points.get((scale, panel, gamma))) is not None:
                    color = "white" if heat.norm(value) < 0.6 else "black"  # viridis ends in yellow
                    plot.text(j, i, f"{value:.4g}", ha="center", va="center", color=color)
        plot.set(xticks=range(len(scales)), xticklabels=scales, yticks=range(len(gammas)), yticklabels=gammas,
                 xlabel="scale", ylabel="gamma2, weak", title=f"gamma1, strong: {panel}")
    figure.colorbar(heat, ax=axes, label=metric)
    figure.suptitle(f"{title}; unguided {unguided:.4g}", fontsize=9)
    save_figure(figure, path)


def check_points(cfg: SweepSettings, checkpoint: Checkpoint, points: list[dict]) -> None:
    """Raises ValueError, before anything slow, for a point by which the checkpoint cannot be guided."""
    trained = load_trained(checkpoint, cfg.weights, cfg.diffusion_name, cfg.autoencoder, num_heads=cfg.num_heads,
                           num_classes=cfg.num_classes, input_size=cfg.input_size)
    guidance, _ = build_guidance(cfg.model_copy(update=points[0]), trained)
    for chosen in points:
        replace(guidance, **chosen).check(trained.net)


def onto_grids(arguments: list[str]) -> list[str]:
    return [onto_the_grid(argument) for argument in arguments]


@command("sweep_guidance", SweepSettings, onto_grids)
def main(cfg: SweepSettings) -> None:
    state = join_ranks(cfg.cpu, cfg.tf32)
    if cfg.checkpoint is None:
        raise ValueError("A sweep guides a checkpoint: give checkpoint=runs/<name>.")
    points = []
    for scale, gamma1, gamma2 in itertools.product(cfg.grid.scale, cfg.grid.gamma1, cfg.grid.gamma2):
        point = {"scale": scale, "gamma1": gamma1, "gamma2": gamma2}
        if min(ends(gamma1)) > max(ends(gamma2)):  # a whole grid need not make sense
            state.print(f"scale={scale} gamma1={gamma1} gamma2={gamma2}: skipped, because gamma1 is above gamma2.")
        elif is_idle(cfg.model_copy(update=point)):
            state.print(f"scale={scale} gamma1={gamma1} gamma2={gamma2}: skipped, because both passes are the same.")
        else:
            points.append(point)
    if not points:
        raise ValueError("No point of the grid is left: lower gamma1, or raise gamma2.")
    # A run that still trains saves meanwhile: every point is of the same weights.
    checkpoint, weak = find_checkpoint(cfg.checkpoint, cfg.weights), cfg.weak and find_checkpoint(cfg.weak)
    cfg = fid.as_published(cfg, checkpoint)
    cfg = cfg.model_copy(update={"weak": weak and str(weak.folder or weak.file)})
    check_points(cfg, checkpoint, points)
    unguided, results = fid.run(cfg.model_copy(update=UNGUIDED), checkpoint, reuse=True, must_have=cfg.metric)
    metric = cfg.metric or (cfg.metrics if isinstance(cfg.metrics, list) else [*unguided["metrics"]])[0]
    picture = Path(cfg.picture or results.parent / "samples" / f"guidance-{metric}.png")

    landscape = {}
    for chosen in points:
        scored, _ = fid.run(cfg.model_copy(update=chosen), checkpoint, reuse=True, must_have=metric)
        if state.is_main_process:
            landscape[tuple(chosen.values())] = scored["metrics"][metric]
            title = f"{metric} of {scored['images']:,} images, {scored['source']['checkpoint']}"
            draw_landscape(landscape, unguided["metrics"][metric], metric, title, picture)
            print(f"{len(landscape)} of {len(points)} points: {picture}")


if __name__ == "__main__":
    main()
