"""A reference, read, measured and written in ADM's keys; images of any origin -> scores against it, over ranks."""

import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import Tensor

from runtime import files, ranks
from runtime.device import describe_device
from runtime.schema import first_line
from scoring.features import Extractor, describe_extractor, versions
from scoring.image_sets import Images, Indexed, evenly, open_images
from scoring.metrics import (
    NEIGHBOUR,
    SPLIT,
    SUBSET,
    frechet_distance,
    kernel_distance,
    mind_distance,
    precision_recall,
    why_no_covariance,
)
from scoring.statistics import (
    FEATURE_KEYS,
    SCORING_VERSION,
    FeatureCache,
    FeatureStats,
    fill,
    load_cached,
    measure,
    save_cached,
)

NEIGHBOURS = 10_000  # images of a folder for all metrics but distances, evenly spread: as many as in ADM's npz


@dataclass(frozen=True)
class Reference:
    """What images are compared with: statistics of each feature, images, or both."""

    statistics: dict[str, tuple[Tensor, Tensor]]
    images: Images | None
    record: dict
    pool: Tensor | None = field(default=None, repr=False)  # features of `images`, for neighbourhoods
    is_measured: bool = False                              # ranks other than the main one may lack `pool`


def measure_reference(
    state: PartialState, reference: Reference, extractor: Extractor, metrics: Iterable[str], batch_size: int = 64,
    keep: FeatureCache | None = None,
) -> Reference:
    """Returns the reference with the features of its images that the metrics need.

    What was measured is cached, and every later command with the same images and features reads it.
    """
    needs_pool = extractor.sample_metrics & {*metrics}
    if reference.is_measured or (not needs_pool and "pool" in reference.statistics):
        return reference
    images, file = reference.images, cached_file(reference.images, extractor, state.device)
    measured = load_cached(file) if file and state.is_main_process else None
    if ranks.from_main(state, lambda: measured is None):
        count = images.count
        stats = measure(state, images, extractor, batch_size, keep, min(count, images.neighbours or count))
        measured = {"pool": stats.pool}
        for name, moments in stats.moments.items():
            measured |= dict(zip(FEATURE_KEYS[name], moments.mean_and_covariance(), strict=True))
        try:
            if file and state.is_main_process:
                save_cached(file, measured)
        except OSError as error:  # a full or read-only home is no reason to lose the scores
            print(f"The reference's statistics are not cached, as {file} could not be written: {error.strerror}")
    if measured is None:  # another rank, as the main one computes the scores
        return replace(reference, is_measured=True)
    found = {name: (measured[mu].cpu(), measured[sigma].cpu()) for name, (mu, sigma) in FEATURE_KEYS.items()
             if mu in measured}
    # Statistics in the npz take precedence.
    return replace(reference, statistics=found | reference.statistics, pool=measured["pool"], is_measured=True)


def cached_file(images: Images, extractor: Extractor, device: torch.device) -> Path | None:
    """Names a file in torch's cache (TORCH_HOME moves it) by a hash of all that the measurement depends on.

    It is None for latents, as their content is not hashed.
    """
    if "sha256" not in images.record:
        return None
    source, features = dict(images.record), describe_extractor(extractor)
    del source["path"], features["weights"]  # the content counts, not its path
    record = {"images": source, "count": images.count, "neighbours": images.neighbours, "extractor": features,
              "versions": versions(extractor), **describe_device(device),
              "scoring_version": SCORING_VERSION}
    return Path(torch.hub.get_dir()).parent / "tread_references" / f"{files.record_sha256(record)}.safetensors"


def open_reference(
    state: PartialState, path: str | Path, extractor: Extractor, resolution: int | None = None,
    key: str = "reference",  # the setting that names the path, for messages
) -> Reference:
    """Opens and checks statistics in ADM's keys (mu, sigma, mu_s, sigma_s), images as `open_images` does, or both.

    Statistics that are missing are measured on the images, as in ADM. Raises ValueError for what cannot be read,
    for statistics of other features or dimensions than the extractor's, and for a sigma that is not a covariance.
    """
    path = Path(path)
    if path.suffix != ".npz":
        images = open_images(state, key, str(path), resolution)
        images.neighbours = NEIGHBOURS
        return Reference({}, images, images.record | {"images": images.count, "statistics": []})
    files.refuse_pointer(path)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            keys = set(arrays.files)
            small = keys & {"mu", "sigma", "mu_s", "sigma_s", "space", "weights_sha256"}
            found = {key: np.asarray(arrays[key]) for key in small}
    except Exception as error:  # numpy and zipfile each have their own
        raise ValueError(f"{key}={path} is not an npz that can be read: {first_line(error)}.") from error
    if not {"mu", "sigma"} <= keys and "arr_0" not in keys:
        raise ValueError(f"{key}={path} holds the keys {', '.join(sorted(keys)) or 'none'}; mu and sigma are "
                         f"needed (and mu_s, sigma_s for sFID), or images under arr_0.")
    space, (measured_by, _, digest) = str(found.get("space", "")), str(found.get("weights_sha256", "")).partition(":")
    if (space or extractor.space) != extractor.space or (
            measured_by == extractor.name and digest != str(extractor.sha256)):
        raise ValueError(f"{key}={path} was measured on {space} features by weights of SHA-256 {digest or 'unknown'}, "
                         f"but features={extractor.name} are {extractor.space} by weights of {extractor.sha256}: make "
                         f"the reference again with the same features.")
    if not space and {"mu_s", "sigma_s"} & keys and "spatial" not in extractor.sizes:
        raise ValueError(f"{key}={path} has mu_s and sigma_s, so it was measured on Inception, not on "
                         f"features={extractor.name}: make a reference from images, such as an npy of its arr_0.")
    statistics = {}
    for feature, names in FEATURE_KEYS.items():
        if not {*names} <= keys or feature not in extractor.sizes:
            continue
        size = extractor.sizes[feature]
        for name, shape in zip(names, ((size,), (size, size)), strict=True):
            if found[name].shape != shape or not np.isfinite(found[name]).all():
                raise ValueError(f"{key}={path} has {name} of shape {found[name].shape}, and features={extractor.name} "
                                 f"need {shape}, all finite: get or make it again, with these features.")
        mu, sigma = (torch.from_numpy(found[name].astype(np.float64)) for name in names)
        if why := why_no_covariance(sigma):
            raise ValueError(f"{key}={path} has {names[1]} that is not a covariance, as {why}: get or make it again.")
        statistics[feature] = mu, sigma
    images = open_images(state, key, str(path)) if "arr_0" in keys else None
    record = images.record if images else {"path": str(path), "sha256": files.sha256(path)}
    return Reference(statistics, images, record | {"images": images and images.count, "statistics": sorted(statistics)})


def is_replaceable(path: Path) -> bool:
    """True if `path` is free, or holds what `write_reference` has written."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {"space", "count", "weights_sha256"} <= {*arrays.files}
    except FileNotFoundError:
        return True
    except Exception:  # numpy and zipfile each have their own
        return False


def write_reference(path: Path, stats: FeatureStats, extractor: Extractor, images: Images, num_images: int) -> None:
    """Writes statistics in ADM's keys, what they were measured on, and `num_images` of the images as arr_0."""
    arrays = {"space": np.array(extractor.space), "count": np.array(stats.count),
              "weights_sha256": np.array(f"{extractor.name}:{extractor.sha256}")}
    for name, moments in stats.moments.items():
        mu, sigma = moments.mean_and_covariance()
        arrays |= dict(zip(FEATURE_KEYS[name], (mu.cpu().numpy(), sigma.cpu().numpy()), strict=True))
    with files.atomic_write(path) as partial, zipfile.ZipFile(partial, "w") as archive:
        for key, array in arrays.items():
            with archive.open(f"{key}.npy", "w") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
        if num_images:
            batches = np.array_split(evenly(images.count, num_images), -(-num_images // 64))
            files.write_array(archive, "arr_0", (images.read(indices).cpu().numpy() for indices in batches), num_images)


def open_references(
    state: PartialState, key: str, paths: list[str], extractors: list[Extractor], resolution: int | None,
) -> Iterator[Reference]:
    """Opens a reference for each extractor; one that several share is opened once, unless it is an npz."""
    opened: dict[str, Reference] = {}
    for path, extractor in zip(paths, extractors, strict=True):
        if path not in opened or Path(path).suffix == ".npz":
            opened[path] = open_reference(state, path, extractor, resolution, key)
        yield opened[path]


def available_metrics(
    extractor: Extractor, reference: Reference, asked: Iterable[str] | None = None, count: int | None = None,
) -> list[str]:
    """Lists the `asked` metrics, or those that features and reference allow; raises ValueError for any other.

    With asked=None it leaves out KID and MIND, which cost time; with "all" it does not. `count` is the number of images
    to score, if it is known.
    """
    why = {extractor.distance: None}  # a metric -> why it cannot be measured
    if "spatial" in extractor.sizes:
        has = "spatial" in reference.statistics or (not reference.statistics and reference.images)
        why["sfid"] = None if has else "the reference has no mu_s and sigma_s"
        why["inception_score"] = None
    why |= dict.fromkeys(("precision", "recall", extractor.kid_name, extractor.mind_name),
                         None if reference.images else "the reference has no images under arr_0")
    fewest = min(SUBSET if n is None else n for n in (count, reference.images and reference.images.count))
    if reference.images and fewest < SUBSET:
        why[extractor.kid_name] = f"its subsets have {SUBSET} images, and there are {fewest}"
    if reference.images and fewest <= NEIGHBOUR:
        why["precision"] = why["recall"] = f"it needs more than {NEIGHBOUR} images of both sets, and there are {fewest}"
    if asked is None or asked == "all":
        if reference.images and why["precision"]:
            raise ValueError(f"Precision cannot be measured, as {why['precision']}: take more images, or set "
                             f"metrics=[{extractor.distance}].")
        left_out = () if asked else (extractor.kid_name, extractor.mind_name)
        return [name for name, reason in why.items() if reason is None and name not in left_out]
    for name in asked:
        if reason := why.get(name, f"features={extractor.name} has {', '.join(why)}"):
            raise ValueError(f"metrics={list(asked)}: {name} cannot be measured, as {reason}.")
    return list(asked)


# ---- scores ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluator:
    """Features, the reference that images are compared with, and the metrics."""

    extractor: Extractor
    reference: Reference
    metrics: list[str]                      # from `available_metrics`
    floor: Reference | None = None          # a second real set: adds its distance, and FDr

    @property
    def names(self) -> list[str]:
        """Names the scores that it computes."""
        return [*self.metrics, *(("floor", "fdr") if self.floor else ())]


def measure_references(
    state: PartialState, evaluator: Evaluator, batch_size: int = 64, keep: FeatureCache | None = None,
) -> Evaluator:
    """Returns the evaluator with its reference and floor measured; a second call costs nothing."""
    extractor, floor = evaluator.extractor, evaluator.floor
    reference = measure_reference(state, evaluator.reference, extractor, evaluator.metrics, batch_size, keep)
    if floor is not None:
        floor = measure_reference(state, floor, extractor, [extractor.distance], batch_size)
    return replace(evaluator, reference=reference, floor=floor)


def score_on(
    state: PartialState, evaluators: list[Evaluator], batches: Indexed, count: int, progress: str | None = None,
    caches: list[FeatureCache | None] | None = None,     # of the images' features, one per evaluator
) -> list[dict[str, float]]:
    """Scores `count` images by each evaluator in one pass; every rank brings its share and gets the same scores.

    `batches` yields indices (B,), each of 0 … count-1 once over all ranks (-1 for a copy that is dropped), and images
    (B, H, W, 3) uint8. It may leave out images whose features every cache has. References must be measured.
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
        device = stats.moments["pool"].sum.device  # a device that has float64
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
