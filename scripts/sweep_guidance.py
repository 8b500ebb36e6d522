"""Scores a checkpoint over a grid of guidance scales and selection ratios, and draws the landscape as a heat map.

    python scripts/sweep_guidance.py checkpoint=runs/x reference=ref.npz features=inception
    python scripts/sweep_guidance.py … scale=1.2,1.5,2 gamma1=0,0.5 gamma2=0.5,0.7,0.9 metric=sfid

Each point is one run of fid.py, with all its options, and a row of its results.jsonl; so is the unguided one. A point
that has its row is not scored again: a sweep that was killed goes on, or grows. The picture is drawn anew after each.
"""

import sys
from pathlib import Path

import hydra
import torch
from accelerate import PartialState
from omegaconf import DictConfig, OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import fid  # noqa: E402
from checkpoint import read_rows  # noqa: E402
from guidance import ends  # noqa: E402
from sample import save_image  # noqa: E402

AXES = ("scale", "gamma1", "gamma2")     # of the landscape: along x, a panel each, along y


def identity(row: dict) -> dict:
    """Takes out of a row of results.jsonl what must agree for two rows to belong to one landscape."""
    source = {key: value for key, value in row["source"].items()
              if key not in ("guidance", "evaluations", "multiply_adds", "size")}
    guidance = row["source"]["guidance"]
    rest = guidance and {key: value for key, value in guidance.items() if key not in AXES}
    return {"source": source, "guidance": rest, "images": row["images"], "reference": row["reference"]["path"],
            "extractor": row["extractor"]["name"], "code": row["code_sha256"]}


def point(guidance: dict) -> tuple:
    return tuple(tuple(value) if isinstance(value, list) else value for value in (guidance[axis] for axis in AXES))


def draw_landscape(points: dict[tuple, float], unguided: float, metric: str, title: str, path: Path) -> None:
    """Draws a panel for each gamma1, scale to the right and gamma2 upwards, and outlines the best point."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    scales, panels, gammas = (sorted({p[axis] for p in points}, key=ends) for axis in range(3))
    best = (max if metric in ("inception_score", "precision", "recall") else min)(points, key=points.get)
    figure, axes = pyplot.subplots(1, len(panels), squeeze=False, layout="constrained", dpi=150,
                                   figsize=(1.2 + (0.9 * len(scales) + 0.6) * len(panels), 1.4 + 0.7 * len(gammas)))
    for panel, plot in zip(panels, axes[0], strict=True):
        values = [[points.get((scale, panel, gamma), float("nan")) for scale in scales] for gamma in gammas]
        heat = plot.imshow(values, origin="lower", aspect="auto", cmap="viridis",
                           vmin=min(points.values()), vmax=max(points.values()))
        for i, gamma in enumerate(gammas):
            for j, scale in enumerate(scales):
                if (value := points.get((scale, panel, gamma))) is not None:
                    bold = (scale, panel, gamma) == best
                    color = "white" if heat.norm(value) < 0.6 else "black"      # viridis ends in yellow
                    plot.text(j, i, f"{value:.4g}", ha="center", va="center", color=color,
                              weight="bold" if bold else "normal",
                              bbox=dict(edgecolor=color, facecolor="none") if bold else None)
        plot.set(xticks=range(len(scales)), xticklabels=scales, yticks=range(len(gammas)), yticklabels=gammas,
                 xlabel="scale", ylabel="gamma2, weak", title=f"gamma1, strong: {panel}")
    figure.colorbar(heat, ax=axes, label=metric)
    figure.suptitle(f"{title}; unguided {unguided:.4g}", fontsize=9)
    figure.canvas.draw()
    drawn = Image.frombuffer("RGBA", figure.canvas.get_width_height(), figure.canvas.buffer_rgba())
    save_image(drawn.convert("RGB"), path)
    pyplot.close(figure)


@hydra.main(config_path="../configs", config_name="sweep_guidance", version_base="1.3")
def main(cfg: DictConfig) -> None:
    state = PartialState(cpu=cfg.cpu or not torch.cuda.is_available())
    if type(cfg.gamma1) in (int, float) and type(cfg.gamma2) in (int, float) and cfg.gamma1 > cfg.gamma2:
        # the whole grid of a sweep need not make sense
        state.print(f"gamma1={cfg.gamma1} is above gamma2={cfg.gamma2}: passed over.")
        return
    plain = OmegaConf.merge(cfg, {"scale": None, "gamma1": 0, "gamma2": 0, "weak": None, "interval": None})
    try:
        if cfg.checkpoint is None or cfg.scale is None:
            raise ValueError(f"A sweep guides a checkpoint: give checkpoint=runs/<name> and scales, not "
                             f"checkpoint={cfg.checkpoint} and scale={cfg.scale}.")
        unguided, path = fid.run(plain, reuse=True, must_have=cfg.metric)
        here, _ = fid.run(cfg, reuse=True)
    except (ValueError, OSError) as error:
        sys.exit(f"sweep_guidance.py: {error}")
    metric = cfg.metric or next(iter(here["metrics"]))
    if state.is_main_process:
        alike = [row for row in read_rows(path) if row["source"].get("guidance") and identity(row) == identity(here)]
        points = {point(row["source"]["guidance"]): row["metrics"][metric] for row in alike if metric in row["metrics"]}
        picture = Path(cfg.picture or path.parent / "samples" / f"guidance-{metric}.png")
        title = f"{metric} of {here['images']:,} images, {here['source']['checkpoint']}"
        draw_landscape(points, unguided["metrics"][metric], metric, title, picture)
        print(f"{len(points)} points: {picture}")


if __name__ == "__main__":
    main()
