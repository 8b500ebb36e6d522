"""Draws the losses and scores of runs over their steps: one figure.

    python scripts/curves.py runs/a runs/b --out curves.png

Losses are the rows of metrics.jsonl, scores the rows of results.jsonl that training has written. `tensorboard --logdir
runs` shows the same while a run trains.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from runtime.command import program
from runtime.files import read_rows
from runtime.schema import as_path, as_recorded
from scripts.presentation import save_figure


def score_lines(rows: list[dict]) -> dict[str, list[tuple[int, float]]]:
    """Groups the first metric of training's scores by metric, weights and guidance: (step, score)."""
    lines = defaultdict(list)
    for row in rows:
        source, (metric, value) = row["source"], next(iter(row["metrics"].items()))
        if source.get("in_training"):
            guided = f", scale {source['guidance']['scale']:g}" if source["guidance"] else ""
            lines[f"{metric}, {source['weights']}{guided}"].append((source["step"], value))
    return lines


def draw(runs: list[Path]) -> Figure:
    """Draws a panel of losses and one of scores; raises ValueError for a folder without a run's metrics."""
    figure = Figure(figsize=(10, 4), layout="constrained", dpi=110)
    losses, scores = figure.subplots(1, 2)
    for run in runs:
        rows = read_rows(run / "metrics.jsonl")
        if not rows:
            raise ValueError(f"{run} has no metrics.jsonl with rows: give folders of runs, such as runs/first.")
        with as_recorded(run / "metrics.jsonl"):
            losses.plot([row["step"] for row in rows], [row["loss"] for row in rows], label=run.name)
        with as_recorded(run / "results.jsonl"):
            for name, points in score_lines(read_rows(run / "results.jsonl")).items():
                scores.plot(*zip(*points, strict=True), marker="o", label=f"{run.name}: {name}")
    losses.set(xlabel="step", ylabel="training loss (a routed run's is higher)")
    scores.set(xlabel="step", ylabel="score of the weights' average", yscale="log")
    for panel in (losses, scores):
        panel.yaxis.set(major_formatter="{x:g}")
        if panel.lines:
            panel.legend(fontsize="small")
    return figure


@program
def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=as_path, nargs="+")
    parser.add_argument("--out", type=as_path, required=True, help="a .png")
    arguments = parser.parse_args()
    save_figure(draw(arguments.runs), arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    main()
