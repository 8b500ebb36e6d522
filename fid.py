"""Images -> features -> statistics -> FID, sFID, Inception Score, precision and recall, as in ADM's evaluator.

    python fid.py checkpoint=runs/x reference=VIRTUAL_imagenet256_labeled.npz num_samples=50000
    accelerate launch fid.py checkpoint=runs/x reference=… features=inception         # all GPUs, Inception on them too
    python fid.py images=FOLDER|ZIP|NPZ|NPY reference=FOLDER|ZIP|NPZ|NPY               # images made elsewhere
    python fid.py reference_from=FOLDER|ZIP|NPZ|LATENTS out=ref.npz                    # statistics, in ADM's keys
    python fid.py gauge=dit_xl2 checkpoint=DiT-XL-2-256x256.pt reference=…             # published weights, as published
    python fid.py checkpoint=runs/b2_tread sampler=published reference=…               # our run, sampled as published
    python fid.py --multirun checkpoint=runs/x reference=… scale=1.5,2 gamma2=0.3,0.5  # each scale with each ratio

Each result is a row of results.jsonl, which records exactly what was measured. Options: configs/fid.yaml and
configs/sampling.yaml; docs/evaluation.md explains the numbers, and why they may differ from others'.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from accelerate import PartialState
from pydantic import AfterValidator

from runtime import files, ranks
from runtime.command import command
from runtime.device import describe_device, join_ranks
from runtime.schema import Location, NonEmptyList, NonNegativeInt, Number, Size, Steps, Text, as_text, one_of, refuse
from sampling.opening import open_sampling
from sampling.options import (
    NO_GUIDANCE,
    GuidanceSettings,
    SamplerSettings,
    SamplingSettings,
    check_guided,
    labels_of,
    unscored_classes,
)
from scoring.features import Extractor, check_extractors, describe_extractor, load_extractor, versions
from scoring.image_sets import (
    H100,
    Images,
    ImageSet,
    SampledImages,
    are_files,
    derived_hours,
    describe_weights,
    open_images,
    read_share,
)
from scoring.metrics import frechet_distance  # noqa: F401      (others import it from here)
from scoring.results import (
    FORMS,
    AtLeastTwo,
    Metrics,
    Published,
    add_rows,
    as_published,
    as_table,
    compare_published,
    is_sampled_as,
    read_results,
    result_row,
    scored_before,
    with_mean_fdr,
)
from scoring.score import (
    Evaluator,
    available_metrics,
    is_replaceable,
    measure_references,
    open_references,
    score_on,
    write_reference,
)
from scoring.statistics import FeatureCache, measure
from weights.averages import AnyWeights
from weights.loading import Checkpoint, find_on_main_rank

Networks = Annotated[str | NonEmptyList[str], AfterValidator(check_extractors)]


class ScoringSettings(SamplingSettings):
    """configs/fid.yaml."""

    images: Location | None
    reference_from: Location | None
    reference: Location | list[Location] | None
    floor: Location | list[Location] | None
    out: Location | None
    reference_images: NonNegativeInt
    num_samples: AtLeastTwo | None
    num_steps: Steps | None
    sampler: SamplerSettings | Literal["published"]
    metrics: Metrics | None
    resolution: Size | None
    features: Networks
    features_weights: Location | list[Location | None] | None
    sha256: str | list[str | None] | None
    keep_features: bool
    results: Location | None
    tag: Text | None
    seed: NonNegativeInt
    weights: AnyWeights | NonEmptyList[AnyWeights] | None
    guidance_scales: NonEmptyList[Number | None] | None
    table: one_of(FORMS)
    published: Published | None


# Settings that have no effect if images exist already, and if a reference is measured.
OF_SAMPLING = ("guidance", *GuidanceSettings.model_fields, "weights", "classes", "num_steps", "sampler", "precision",
               "decode_precision", "diffusion_name", "num_heads", "num_classes", "input_size", "seed",
               "guidance_scales")
SCORED = ("reference", "floor", "table", "metrics", "keep_features", "gauge", "published")


def per_network(cfg: ScoringSettings, key: str, shared: bool = False) -> list:
    """Returns a setting for each network of `features`; raises ValueError unless it has one for each or is shared."""
    value, networks = getattr(cfg, key), as_list(cfg.features)
    values = [value] * len(networks) if value is None or shared and isinstance(value, str) else as_list(value)
    if len(values) != len(networks):
        raise ValueError(f"{key}={as_text(value)} has {len(values)} values, but features= names {len(networks)} "
                         f"networks: give a list of one for each{'' if shared else ', or null'}.")
    return values


def as_list(value: object) -> list:
    return value if isinstance(value, list) else [] if value is None else [value]


def check_settings(cfg: ScoringSettings, cli_overrides: Mapping[str, str]) -> ScoringSettings:
    """Returns the settings; raises ValueError for some that do not go together."""
    given = [key for key in ("checkpoint", "images", "reference_from") if getattr(cfg, key) is not None]
    if len(given) != 1:
        raise ValueError(f"Give one of checkpoint=, images= and reference_from=, not {' and '.join(given) or 'none'}.")
    if given == ["checkpoint"]:
        if cfg.guidance_scales is None:
            check_guided(cfg, cli_overrides)
    else:
        refuse(cli_overrides, *OF_SAMPLING,
               why=f"the images of {given[0]}={getattr(cfg, given[0])} exist already; leave it out")
    if given == ["reference_from"]:
        refuse(cli_overrides, *SCORED, why="reference_from= measures a reference and scores nothing; leave it out")
    else:
        refuse(cli_overrides, "out", "reference_images", why=f"they are for reference_from=, not for {given[0]}=")
    if cfg.guidance_scales is not None:
        refuse(cli_overrides, "scale",
               why=f"guidance_scales={as_text(cfg.guidance_scales)} names all scales; leave it out")
    named = [path for key in ("images", "reference_from", "reference", "floor") for path in as_list(getattr(cfg, key))]
    if not any(are_files(path) for path in named):
        refuse(cli_overrides, "resolution", why="it is for folders and zips of images, and none is named here")
    if given == ["reference_from"]:
        out = Path(cfg.out or "")
        if (out.suffix != ".npz" or not is_replaceable(out) or out.resolve() == Path(cfg.reference_from).resolve()
                or len(as_list(cfg.features)) > 1):
            raise ValueError(f"reference_from={cfg.reference_from} needs one network in features=, and out=<an npz> "
                             f"that does not exist or that reference_from= wrote, not out={cfg.out} "
                             f"features={as_text(cfg.features)}.")
    elif cfg.reference is None:
        raise ValueError(f"{given[0]}={getattr(cfg, given[0])} needs reference=<a folder, zip, npz or npy>.")
    for key, shared in (("reference", True), ("floor", True), ("features_weights", False), ("sha256", False)):
        per_network(cfg, key, shared)
    return cfg


# ---- what is scored -------------------------------------------------------------------------------------------------


# Images to score, the file for their row, and published scores if those images were made the same way.
Opened = tuple[ImageSet, Path, Published | None]


def open_checkpoint(state: PartialState, cfg: ScoringSettings, checkpoint: Checkpoint) -> Iterator[Opened]:
    """Opens the images at each guidance scale; the networks are loaded once, for the first."""
    scales = cfg.guidance_scales or [cfg.scale]
    to_check = max(scales, key=lambda scale: (scale is not None, scale != 1))  # one that guides, if there is one
    sampling = open_sampling(state, cfg.model_copy(update={"scale": to_check}), checkpoint=checkpoint)
    trained, given = sampling.trained, Path(cfg.checkpoint)
    seeds = list(range(cfg.seed, cfg.seed + (cfg.num_samples or 50_000)))
    if few := unscored_classes(len(seeds), sampling.classes):
        state.print(few)
    weights = describe_weights(
        str(trained.checkpoint.folder or given), trained.step, trained.weights, trained.autoencoder,
        cfg.decode_precision, sampling.classes, trained.net.num_classes, weights_sha256=trained.checkpoint.sha256,
        **trained.read_as)
    home = trained.checkpoint.run or (given if given.is_dir() else given.parent)
    for scale in scales:
        at_scale = cfg.model_copy(update=dict(NO_GUIDANCE) if scale is None else {"scale": scale})
        images = SampledImages(
            state, trained.net, trained.diffusion, sampling.decode, seeds, labels_of(seeds, sampling.classes),
            batch_size=cfg.batch_size, num_steps=cfg.num_steps, precision=cfg.precision, sampler=sampling.sampler,
            guidance=None if scale is None else replace(sampling.guidance, scale=scale),
            guidance_record=None if scale is None else sampling.guidance_record | {"scale": scale}, weights=weights)
        is_same = cfg.published and is_sampled_as(cfg.published, at_scale, trained)
        yield images, Path(cfg.results or home / "results.jsonl"), cfg.published if is_same else None


def open_stored(state: PartialState, cfg: ScoringSettings, key: str) -> tuple[Images, np.ndarray]:
    """Opens the images that the setting `key` names; chooses all of them, or `num_samples` evenly spread ones."""
    path = getattr(cfg, key)
    images = open_images(state, key, path, cfg.resolution, cfg.autoencoder, cfg.decode_batch_size)
    needed = max(cfg.num_samples or 0, cfg.reference_images)
    if images.count < needed:
        raise ValueError(f"{key}={path} holds {images.count} images, but {needed} are needed.")
    return images, images.choose(cfg.num_samples or images.count)


def open_image_set(state: PartialState, cfg: ScoringSettings) -> Iterator[Opened]:
    images, chosen = open_stored(state, cfg, "images")
    published = cfg.published if cfg.published and cfg.published.num_samples == len(chosen) else None
    stored = ImageSet(len(chosen), {**images.record, "images": images.count}, "as stored",
                      lambda todo: read_share(state, images, chosen, todo, cfg.batch_size))
    yield stored, Path(cfg.results or "results.jsonl"), published


def open_extractors(state: PartialState, cfg: ScoringSettings) -> list[Extractor]:
    given = zip(as_list(cfg.features), per_network(cfg, "features_weights"), per_network(cfg, "sha256"), strict=True)
    with state.local_main_process_first():  # the first one downloads weights for the others
        return [load_extractor(*network, state.device) for network in given]


def open_evaluators(state: PartialState, cfg: ScoringSettings, count: int) -> list[Evaluator]:
    """Opens the networks and each one's reference for `count` images, and shares the metrics among them.

    Raises ValueError for metrics that no network has.
    """
    extractors = open_extractors(state, cfg)
    references, floors = (
        [*open_references(state, key, per_network(cfg, key, shared=True), extractors, cfg.resolution)]
        if getattr(cfg, key) else [None] * len(extractors) for key in ("reference", "floor"))
    evaluators = []
    for extractor, reference, floor in zip(extractors, references, floors, strict=True):
        if floor and floor.record.get("sha256", 0) == reference.record.get("sha256", 1):
            raise ValueError(f"floor={floor.record['path']} holds the images of reference=, so the distance between "
                             f"them is 0: give another real set, such as the validation set.")
        asked = cfg.metrics
        if isinstance(asked, list):  # the first network refuses metrics that none has
            others = {name for other in extractors if other is not extractor for name in other.metrics}
            asked = [name for name in asked if name in extractor.metrics or name not in others]
        metrics = available_metrics(extractor, reference, asked, count)
        if floor and extractor.distance not in metrics:
            metrics.insert(0, extractor.distance)
        evaluators.append(Evaluator(extractor, reference, metrics, floor))
    return evaluators


def report(row: dict, path: Path) -> None:
    """Prints the scores of one network, and what was scored."""
    images, reference = row["source"], row["reference"]
    lines = {metric: f"{value:.6g}" for metric, value in row["metrics"].items()} | {
        "images": f"{row['images']:,} from {images.get('checkpoint') or images['path']}",
        **({"sampled": row["summary"]} if "sampler" in images else {}), "reference": reference["path"],
        "features": row["extractor"]["name"], "time": f"{row['seconds']:.1f} s",
        "record": path}
    print("\n" + "\n".join(f"{name:<16}  {value}" for name, value in lines.items()))
    size, reference_size = images.get("size"), reference.get("size")
    if size and reference_size and size != reference_size:
        print(f"The images are {size[1]}x{size[0]} and the reference's {reference_size[1]}x{reference_size[0]}: is "
              f"it the right one?")


# ---- the command ----------------------------------------------------------------------------------------------------


def open_cache(
    state: PartialState, cfg: ScoringSettings, results: Path, extractor: Extractor, record: dict, count: int,
) -> FeatureCache | None:
    """Opens the cache of features of `count` images beside the results; None unless keep_features is set."""
    if not (cfg.keep_features and count):
        return None
    facts = {"images": dict(record), "count": count, "extractor": describe_extractor(extractor),
             "versions": versions(extractor), **describe_device(state.device)}
    return FeatureCache(state, results.parent / "features", facts, count, extractor.sizes)


def find_scores(
    state: PartialState, cfg: ScoringSettings, evaluators: list[Evaluator], images: ImageSet, results: Path,
) -> dict | None:
    """Returns the row that `score_images` would, if the main rank finds it in the results."""
    wanted = [result_row(state, images, one, batch_size=cfg.batch_size, resolution=cfg.resolution)
              for one in evaluators]
    found = ranks.from_main(state, lambda: [scored_before(row, results) for row in wanted])
    return None if None in found else with_mean_fdr(found)


def measure_all(
    state: PartialState, cfg: ScoringSettings, evaluators: list[Evaluator], results: Path,
) -> list[Evaluator]:
    """Measures the references' images, unless they have been measured; keep_features caches beside the results."""
    measured = []
    for one in evaluators:
        reference = one.reference
        keep = None if reference.is_measured or not reference.images else open_cache(
            state, cfg, results, one.extractor, reference.record, reference.images.count)
        measured.append(measure_references(state, one, cfg.batch_size, keep))
    return measured


def score_images(state: PartialState, cfg: ScoringSettings, evaluators: list[Evaluator], opened: Opened) -> dict:
    """Scores images that were opened with these settings, after `as_published` completed those.

    Appends the row to the results and returns it. Several networks have a row each, and the returned row has the scores
    of all. Raises ValueError or OSError for settings and files that cannot work.
    """
    (images, results, published), started = opened, time.perf_counter()
    if cfg.published and cfg.checkpoint is not None:
        state.print(f"Sampling takes about {derived_hours(images.record, images.count, cfg.precision):.2g} hours of "
                    f"one H100 [derived: FLOPs at {H100[cfg.precision] / 1e12:.0f} TFLOP/s].")
    before = read_results(results)
    caches = [open_cache(state, cfg, results, one.extractor, images.record, images.count) for one in evaluators]
    missing = [np.arange(images.count) if keep is None else keep.missing() for keep in caches]
    scores = score_on(state, evaluators, images.read(reduce(np.union1d, missing)), images.count, "scoring", caches)
    more = {} if cfg.tag is None else {"tag": cfg.tag}
    more["published"] = published and published.model_dump(include={"where", "scores"})
    rows = [more | result_row(state, images, *scored, seconds=time.perf_counter() - started, batch_size=cfg.batch_size,
                              resolution=cfg.resolution, resumed_images=keep.count if keep else 0)
            for keep, *scored in zip(caches, evaluators, scores, strict=True)]
    if state.is_main_process:
        for row in rows:
            report(row, results)
        add_rows(results, rows, before)
    state.wait_for_everyone()  # so that all can read the row
    return with_mean_fdr(rows)


def write_statistics(state: PartialState, cfg: ScoringSettings) -> None:
    """Measures `reference_from` and writes `out`."""
    [extractor] = open_extractors(state, cfg)
    images, chosen = open_stored(state, cfg, "reference_from")
    stats = measure(state, images, extractor, cfg.batch_size, chosen=chosen)
    if state.is_main_process:
        write_reference(Path(cfg.out), stats, extractor, images, cfg.reference_images)
        print(f"Statistics of {stats.count:,} images of {images.record['size']} on {extractor.name}: {cfg.out}")


@command("fid", ScoringSettings, check=check_settings)
def main(cfg: ScoringSettings) -> None:
    state = join_ranks(cfg.cpu, cfg.tf32, cfg.precisions)
    if cfg.reference_from is not None:
        write_statistics(state, cfg)
        return
    evaluators, rows, several = [], [], isinstance(cfg.weights, list) or cfg.guidance_scales is not None
    names = as_list(cfg.weights) or [None]
    found = [None if cfg.checkpoint is None else find_on_main_rank(state, cfg.checkpoint, name) for name in names]
    # All settings are completed, and all images of one set of weights opened, before the first are scored.
    completed = [as_published(cfg.model_copy(update={"weights": name}), checkpoint)
                 for name, checkpoint in zip(names, found, strict=True)]
    for own_cfg, checkpoint in zip(completed, found, strict=True):
        opened = open_image_set(state, own_cfg) if checkpoint is None else open_checkpoint(state, own_cfg, checkpoint)
        for images, results, published in [*opened]:
            evaluators = evaluators or open_evaluators(state, cfg, images.count)
            files.open_to_append(results).close()  # fails now rather than after hours of sampling
            row = find_scores(state, own_cfg, evaluators, images, results) if several else None
            if row is None:
                evaluators = measure_all(state, own_cfg, evaluators, results)
                row = score_images(state, own_cfg, evaluators, (images, results, published))
            rows.append(row)
            if own_cfg.published:
                state.print(compare_published(row, own_cfg.published))
    if len(rows) > 1 or cfg.table != "text" or isinstance(cfg.features, list):
        state.print("\n" + as_table(rows, cfg.table))


if __name__ == "__main__":
    main()
