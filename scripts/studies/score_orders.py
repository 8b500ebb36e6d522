r"""Which score orders networks by 1,000 images as by 4,000 others? From features of 5,000 that fid.py has kept.

    python fid.py checkpoint=runs/x num_samples=5000 num_steps=12 features=[torchscript,torchscript] \
        features_weights=[data/resnet56.pt,data/lite0.pt] reference=data/emoji.zip resolution=32 \
        keep_features=true results=orders/results.jsonl
    python scripts/studies/score_orders.py orders/features --out orders.json

The first command is for each run. The images of each network are split into fifths by their seeds. A fifth is scored,
and so are the other four together: Kendall's tau between the two orders of the networks is 1 where they agree, 0 where
they are unrelated. Writes the scores to --out, and a figure beside it.
"""

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from scipy.stats import kendalltau
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from runtime.command import program
from runtime.files import write_text
from runtime.schema import as_path, read_json
from scoring.metrics import Moments, frechet_distance, kernel_distance, mind_distance
from scoring.statistics import load_cached
from scripts.presentation import save_figure, table

FIFTHS = 5
SMALL = 256     # dimensions up to which KID and MIND are measured too: they take minutes beyond
Split = list[tuple[float, float]]  # of each fifth: its score, and that of the others together


def read_features(folder: Path) -> tuple[dict, Tensor]:
    """Reads a folder of fid.py's kept features: its record, and features (N, D) float32 in the order of the images.

    Raises ValueError where images are missing, as of an evaluation that was killed.
    """
    record = read_json(folder / "record.json")
    parts = [part for file in folder.glob("*.safetensors") if (part := load_cached(file))]
    if sum(len(part["indices"]) for part in parts) != record["count"]:
        raise ValueError(f"{folder} has not the features of all {record['count']} images: rerun its fid.py to resume, "
                         f"or move the folder away.")
    order = torch.cat([part["indices"] for part in parts]).argsort()
    return record, torch.cat([part["pool"] for part in parts])[order].float()


def moments(features: Tensor) -> tuple[Tensor, Tensor]:
    sums = Moments(features.shape[1])
    sums.add(features)
    return sums.mean_and_covariance()


def split_scores(features: Tensor, reference: Tensor) -> dict[str, Split]:
    """Scores each fifth of features (N, D), and the others together, against a reference (M, D)."""
    parts, statistics_there = features.chunk(FIFTHS), moments(reference)

    def score(some: Tensor) -> dict[str, float]:
        scores = {"FD": frechet_distance(*moments(some), *statistics_there)}
        if some.shape[1] <= SMALL:
            scores |= {"KID": kernel_distance(some, reference), "MIND": mind_distance(some, reference)}
        return scores

    both = [(score(part), score(torch.cat([*parts[:index], *parts[index + 1 :]]))) for index, part in enumerate(parts)]
    return {name: [(few[name], many[name]) for few, many in both] for name in both[0][0]}


def agreement(splits: list[Split]) -> dict[str, float]:
    """Compares the orders of networks, of each the scores of its fifths: tau is a mean over the fifths.

    `noise` is the standard deviation over fifths, of all networks, by that of the networks' means.
    """
    taus = [kendalltau(*zip(*of_networks, strict=True)).statistic for of_networks in zip(*splits, strict=True)]
    of_fifths = [[few for few, _ in split] for split in splits]
    within = statistics.mean(map(statistics.variance, of_fifths)) ** 0.5
    return {"tau": statistics.mean(taus), "lowest": min(taus),
            "noise": within / statistics.stdev(map(statistics.mean, of_fifths))}


def draw(scores: dict[str, dict[str, Split]], path: Path) -> None:
    """Draws each fifth's score over that of the other images: a panel a score, a colour a network."""
    figure = Figure(figsize=(3 * len(scores), 3.6), layout="constrained", dpi=110)
    plots = figure.subplots(1, len(scores), squeeze=False)[0]
    by_network = sorted(scores, key=lambda name: name.partition(" on ")[::-1])
    for plot, (name, splits) in zip(plots, ((name, scores[name]) for name in by_network), strict=True):
        for network, split in splits.items():
            few, many = zip(*split, strict=True)
            plot.plot(many, few, "o", markersize=4, label=network.partition("/checkpoints/")[0])
        plot.set_title(name, fontsize="small")
    figure.supxlabel("score of the other 4,000 images, lower is better", fontsize="medium")
    figure.supylabel("score of 1,000 images", fontsize="medium")
    figure.legend(*plots[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8)
    save_figure(figure, path)


@program
def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("features", type=as_path)
    parser.add_argument("--out", type=as_path, required=True)
    given = parser.parse_args()
    kept = [read_features(folder) for folder in sorted(given.features.iterdir())]
    real = [record["images"]["path"] for record, _ in kept if "checkpoint" not in record["images"]]
    if len(set(real)) != 1:
        raise ValueError(f"{given.features} has features of {', '.join(sorted(set(real))) or 'no reference'}: one "
                         f"reference is needed, so move the other folders away.")
    references = {record["extractor"]["sha256"]: pool for record, pool in kept if "checkpoint" not in record["images"]}
    scores: dict[str, dict[str, Split]] = {}
    for record, pool in sorted(kept, key=lambda each: (str(each[0]["images"]), str(each[0]["extractor"]["weights"]))):
        if "checkpoint" in record["images"]:
            network = Path(record["extractor"]["weights"]).stem
            for name, split in split_scores(pool, references[record["extractor"]["sha256"]]).items():
                scores.setdefault(f"{name} on {network}", {})[record["images"]["checkpoint"]] = split
    found = {name: agreement(list(splits.values())) for name, splits in scores.items()}
    means = {name: [statistics.mean(many for _, many in split) for split in splits.values()]
             for name, splits in scores.items()}
    between = {f"{one}, {other}": kendalltau(means[one], means[other]).statistic
               for one, other in itertools.combinations(means, 2)}
    write_text(given.out, json.dumps({"agreement": found, "between": between, "scores": scores}, indent=1) + "\n")
    draw(scores, given.out.with_suffix(".png"))
    print(table(["score", "tau, mean of five", "lowest", "noise"],
                [[name, *(f"{value:.2f}" for value in row.values())] for name, row in found.items()]))


if __name__ == "__main__":
    main()
