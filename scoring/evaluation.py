"""Images of any origin, and a reference -> scores, over ranks."""

from collections.abc import Iterable

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from scoring.feature_cache import FeatureCache
from scoring.features import Extractor
from scoring.image_sets import Indexed
from scoring.metrics import frechet_distance, precision_recall
from scoring.statistics import Reference, available_metrics
from scoring.tally import Tally, fill


def score_images(
    batches: Indexed, count: int, reference: Reference, extractor: Extractor, *,
    metrics: Iterable[str] | None = None, keep: FeatureCache | None = None, progress: str | None = None,
) -> dict[str, float]:
    """Scores `count` images against the reference; every rank brings its share and gets the same scores.

    `batches` yields indices (B,), each of 0 … count-1 once over all ranks (-1 for a copy that is dropped), and images
    (B, H, W, 3) uint8, without those that `keep` has. Raises ValueError for fewer images than `count`, or for metrics
    that cannot be measured.
    """
    metrics = available_metrics(extractor, reference, metrics)
    reference.complete(extractor, metrics)
    state = PartialState()
    tally = Tally(extractor, count, state.device, count if {"precision", "recall"} & {*metrics} else 0)
    fill(tally, batches, extractor, keep, progress)
    scores: list[dict[str, float] | None] = [None]
    if state.is_main_process:
        scores[0] = score(tally, reference, extractor, metrics)
    return (broadcast_object_list(scores) if state.num_processes > 1 else scores)[0]


def score(tally: Tally, reference: Reference, extractor: Extractor, metrics: list[str]) -> dict[str, float]:
    """Computes the scores of `metrics`, in their order."""
    scores = {}
    for name, feature in ((extractor.distance, "pool"), ("sfid", "spatial")):
        if name in metrics:
            mu, sigma = tally.moments[feature].mean_and_covariance()
            scores[name] = frechet_distance(mu, sigma, *reference.statistics[feature])
    if "inception_score" in metrics:
        scores["inception_score"] = tally.scores.score()
    if tally.pool is not None:
        device = PartialState().device
        both = precision_recall(reference.pool.to(device), tally.pool.to(device))
        scores |= dict(zip(("precision", "recall"), both, strict=True))
    return {name: scores[name] for name in metrics}
