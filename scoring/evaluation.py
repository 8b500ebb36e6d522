"""Images of any origin, and a reference -> scores, over ranks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from scoring.feature_cache import FeatureCache
from scoring.features import Extractor
from scoring.image_sets import Indexed
from scoring.metrics import SPLIT, frechet_distance, kernel_distance, monge_distance, precision_recall
from scoring.statistics import Reference, available_metrics
from scoring.tally import Tally, fill


@dataclass
class Subject:
    """Images to score, drawn or stored."""

    count: int
    record: dict                            # what they are; drawn ones add their size
    rule: str                               # how uint8 was made
    read: Callable[[np.ndarray], Indexed]   # indices to do, of all ranks -> this rank's images


@dataclass
class Judge:
    """Features, what images are compared with on them, and what is measured."""

    extractor: Extractor
    reference: Reference
    metrics: Iterable[str] | None = None    # None: all that `available_metrics` lists
    keep: FeatureCache | None = None
    floor: Reference | None = None          # a second real set: adds its distance, and FDr

    @property
    def names(self) -> list[str]:
        """Names the scores that come out."""
        return [*self.metrics, *(("floor", "fdr") if self.floor else ())]


def score_on(judges: list[Judge], batches: Indexed, count: int, progress: str | None = None) -> list[dict[str, float]]:
    """Scores `count` images by each judge in one pass; every rank brings its share and gets the same scores.

    `batches` yields indices (B,), each of 0 … count-1 once over all ranks (-1 for a copy that is dropped), and images
    (B, H, W, 3) uint8, without those that every judge keeps features of. Raises ValueError for metrics that cannot be
    measured.
    """
    state, parts = PartialState(), []
    for judge in judges:
        judge.metrics = available_metrics(judge.extractor, judge.reference, judge.metrics, count)
        judge.reference.complete(judge.extractor, judge.metrics)
        if "inception_score" in judge.metrics and count > SPLIT and count % SPLIT:
            state.print(f"The Inception Score is the mean over splits of {SPLIT:,} images, and the last split has only "
                        f"{count % SPLIT:,} of the {count:,}, which lowers it: score a multiple of {SPLIT:,}.")
        if judge.floor:
            judge.floor.complete(judge.extractor, [judge.extractor.distance])
        of_features = judge.extractor.of_features & {*judge.metrics}
        tally = Tally(judge.extractor, count, state.device, count if of_features else 0)
        parts.append((tally, judge.extractor, judge.keep))
    fill(parts, batches, progress)
    scores: list[dict[str, float] | None] = [None] * len(judges)
    if state.is_main_process:
        scores = [score(tally, judge) for (tally, *_), judge in zip(parts, judges, strict=True)]
    return broadcast_object_list(scores) if state.num_processes > 1 else scores


def score(tally: Tally, judge: Judge) -> dict[str, float]:
    """Computes the scores of a judge's metrics, in their order."""
    extractor, reference, metrics, scores = judge.extractor, judge.reference, judge.metrics, {}
    for name, feature in ((extractor.distance, "pool"), ("sfid", "spatial")):
        if name in metrics:
            mu, sigma = tally.moments[feature].mean_and_covariance()
            scores[name] = frechet_distance(mu, sigma, *reference.statistics[feature])
    if "inception_score" in metrics:
        scores["inception_score"] = tally.scores.score()
        if tally.scores.are_sorted():
            print(f"The images seem sorted by class, which lowers the Inception Score, the mean over splits of "
                  f"{SPLIT:,} images: shuffle the array, or score a folder.")
    if tally.pool is not None:
        device = tally.moments["pool"].sum.device  # which has float64
        if {"precision", "recall"} & {*metrics}:
            both = precision_recall(reference.pool.to(device), tally.pool.to(device), extractor.neighbours)
            scores |= dict(zip(("precision", "recall"), both, strict=True))
        for name, distance in ((extractor.kernel, kernel_distance), (extractor.monge, monge_distance)):
            if name in metrics:
                scores[name] = distance(tally.pool.to(device), reference.pool.to(device))
    scores = {name: scores[name] for name in metrics}
    if judge.floor:  # arXiv 2604.28190
        scores["floor"] = frechet_distance(*judge.floor.statistics["pool"], *reference.statistics["pool"])
        scores["fdr"] = scores[extractor.distance] / scores["floor"]
    return scores
