"""Scores of images, of any origin and by index, against a reference; over ranks, and resumed where it was killed.

fid.py says of what, and writes down what came out.
"""

from collections.abc import Iterable

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import Tensor

from scoring.features import Extractor
from scoring.metrics import frechet_distance, precision_recall
from scoring.statistics import Kept, Reference, Tally, available_metrics, fill


def score_images(
    batches: Iterable[tuple[Tensor, Tensor]], count: int, reference: Reference, extractor: Extractor, *,
    metrics: Iterable[str] | None = None, keep: Kept | None = None, progress: str | None = None,
) -> dict[str, float]:
    """Scores `count` images against the reference; every rank brings its share and gets the same scores.

    `batches` yields indices (B,), each of 0 … count-1 once over all ranks (-1 for a copy that is to be dropped), and
    images (B, H, W, 3) uint8, as `indexed` and `read_over_ranks` do; those that `keep` holds are not to come again.
    Raises ValueError for fewer images than `count`, or metrics or features that cannot be had.
    """
    metrics = available_metrics(extractor, reference, metrics)
    reference.complete(extractor, metrics)
    state = PartialState()
    tally = Tally(extractor, count, state.device, "precision" in metrics or "recall" in metrics)
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
