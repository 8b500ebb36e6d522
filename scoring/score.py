"""Images of any origin, and a reference -> scores, over ranks."""

from dataclasses import dataclass, replace

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from scoring.features import Extractor
from scoring.image_sets import Indexed
from scoring.metrics import SPLIT, frechet_distance, kernel_distance, mind_distance, precision_recall
from scoring.reference import Reference, measure_reference
from scoring.statistics import FeatureCache, FeatureStats, fill


@dataclass(frozen=True)
class Evaluator:
    """Features, what images are compared with on them, and what is measured."""

    extractor: Extractor
    reference: Reference
    metrics: list[str]                      # of `available_metrics`
    floor: Reference | None = None          # a second real set: adds its distance, and FDr

    @property
    def names(self) -> list[str]:
        """Names the scores that come out."""
        return [*self.metrics, *(("floor", "fdr") if self.floor else ())]


def measure_references(
    state: PartialState, evaluator: Evaluator, batch_size: int = 64, keep: FeatureCache | None = None,
) -> Evaluator:
    """Returns the evaluator with its reference and floor measured; again costs nothing."""
    extractor, floor = evaluator.extractor, evaluator.floor
    reference = measure_reference(state, evaluator.reference, extractor, evaluator.metrics, batch_size, keep)
    if floor is not None:
        floor = measure_reference(state, floor, extractor, [extractor.distance], batch_size)
    return replace(evaluator, reference=reference, floor=floor)


def score_on(
    state: PartialState, evaluators: list[Evaluator], batches: Indexed, count: int, progress: str | None = None,
    caches: list[FeatureCache | None] | None = None,     # of the images' features, one an evaluator
) -> list[dict[str, float]]:
    """Scores `count` images by each evaluator in one pass; every rank brings its share and gets the same scores.

    `batches` yields indices (B,), each of 0 … count-1 once over all ranks (-1 for a copy that is dropped), and images
    (B, H, W, 3) uint8, without those whose features every cache has. References have been measured.
    """
    parts = []
    for evaluator, keep in zip(evaluators, caches or [None] * len(evaluators), strict=True):
        if "inception_score" in evaluator.metrics and count > SPLIT and count % SPLIT:
            state.print(f"The Inception Score is the mean over splits of {SPLIT:,} images, and the last split has only "
                        f"{count % SPLIT:,} of the {count:,}, which lowers it: score a multiple of {SPLIT:,}.")
        needs_pool = evaluator.extractor.sample_metrics & {*evaluator.metrics}
        stats = FeatureStats(evaluator.extractor, count, state.device, count if needs_pool else 0)
        parts.append((stats, evaluator.extractor, keep))
    fill(state, parts, batches, progress)
    scores: list[dict[str, float] | None] = [None] * len(evaluators)
    if state.is_main_process:
        scores = [score(stats, evaluator) for (stats, *_), evaluator in zip(parts, evaluators, strict=True)]
    return broadcast_object_list(scores) if state.num_processes > 1 else scores


def score(stats: FeatureStats, evaluator: Evaluator) -> dict[str, float]:
    """Computes the scores of an evaluator's metrics, in their order."""
    extractor, reference, metrics, scores = evaluator.extractor, evaluator.reference, evaluator.metrics, {}
    for name, feature in ((extractor.distance, "pool"), ("sfid", "spatial")):
        if name in metrics:
            mu, sigma = stats.moments[feature].mean_and_covariance()
            scores[name] = frechet_distance(mu, sigma, *reference.statistics[feature])
    if "inception_score" in metrics:
        scores["inception_score"] = stats.scores.score()
        if stats.scores.are_sorted():
            print(f"The images seem sorted by class, which lowers the Inception Score, the mean over splits of "
                  f"{SPLIT:,} images: shuffle the array, or score a folder.")
    if stats.pool is not None:
        device = stats.moments["pool"].sum.device  # which has float64
        if {"precision", "recall"} & {*metrics}:
            both = precision_recall(reference.pool.to(device), stats.pool.to(device), extractor.neighbours)
            scores |= dict(zip(("precision", "recall"), both, strict=True))
        for name, distance in ((extractor.kid_name, kernel_distance), (extractor.mind_name, mind_distance)):
            if name in metrics:
                scores[name] = distance(stats.pool.to(device), reference.pool.to(device))
    scores = {name: scores[name] for name in metrics}
    if evaluator.floor:  # arXiv 2604.28190
        scores["floor"] = frechet_distance(*evaluator.floor.statistics["pool"], *reference.statistics["pool"])
        scores["fdr"] = scores[extractor.distance] / scores["floor"]
    return scores
