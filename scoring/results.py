"""Rows of results.jsonl: what was scored, how, and whether before; tables, and comparison with published scores."""

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from accelerate import PartialState
from pydantic import Field

from runtime import files
from runtime.command import commit
from runtime.device import describe_device
from runtime.schema import NonEmptyList, NonNegativeInt, Number, Record, Settings, Size, Steps, as_text, one_of, read
from sampling.checks import sampler_settings
from sampling.options import NO_GUIDANCE, Pair, SamplerSettings, SamplingSettings
from scoring.features import describe_extractor, versions
from scoring.image_sets import BALANCED, ImageSet
from scoring.score import Evaluator
from scoring.statistics import SCORING_VERSION
from weights.loading import Checkpoint, Trained
from weights.records import DIFFUSIONS

AtLeastTwo = Annotated[int, Field(ge=2, le=10**7)]  # images, as one has no covariance
TITLES = {"fid": "FID", "sfid": "sFID", "inception_score": "IS", "precision": "P", "recall": "R", "kid": "KID",
          "kdd": "KDD", "mind": "MIND", "fdr": "FDr", "fd_dinov2": "FD-DINOv2", "mind_dinov2": "MIND-DINOv2"}
FORMS = ("text", "markdown", "latex")
Metrics = NonEmptyList[str] | Literal["all"]


class Published(Settings):
    """Published scores and how their images were sampled, from configs/gauge or from an experiment."""

    where: str
    scores: dict[str, Number]
    tolerance: dict[str, Number] = {}               # how far ours may be from them
    diffusion: one_of(DIFFUSIONS) | None = None     # that the network was trained with; None: our network's
    step: NonNegativeInt | None = None              # of the sampled checkpoint; None: any step of ours
    num_samples: AtLeastTwo = 50_000
    num_steps: Steps | None = None                  # None if the images themselves are published
    sampler: SamplerSettings = SamplerSettings()
    scale: Number | None = None
    interval: Pair | None = None
    channels: Size | None = None


def result_row(
    state: PartialState,
    images: ImageSet,
    evaluator: Evaluator,
    scores: dict[str, float] | None = None,  # None: not measured yet
    *,
    seconds: float = 0.0,
    batch_size: int,
    resolution: int | None = None,      # that images were scaled to
    resumed_images: int = 0,            # those whose features were cached
) -> dict:
    """Makes a row of results.jsonl: scores, and all that they depend on."""
    return {
        "metrics": scores or dict.fromkeys(evaluator.names), "images": images.count, "source": images.record,
        "summary": summary(images.record, images.count), "resumed_images": resumed_images,
        "extractor": describe_extractor(evaluator.extractor), "reference": evaluator.reference.record,
        **({"floor": evaluator.floor.record} if evaluator.floor else {}), "image_rule": images.rule,
        "resolution": resolution, "batch_size": batch_size, "processes": state.num_processes,
        **describe_device(state.device),
        "versions": versions(evaluator.extractor), "scoring_version": SCORING_VERSION, "commit": commit(),
        "seconds": seconds, "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def summary(source: dict, count: int) -> str:
    """Returns a line with what a paper must state about how images were made, except for their guidance."""
    if "sampler" not in source:
        return f"{count:,} images as they are stored in {source.get('path')}"
    step = "" if source.get("step") is None else f" at step {source['step']:,}"
    labels = "balanced" if source.get("labels") == BALANCED else source.get("labels")
    return (f"{count:,} images; {source.get('diffusion')}, {source['sampler'].get('solver')} sampler, "
            f"{source.get('num_steps')} steps, NFE {source.get('evaluations')}, {source.get('precision')}; weights "
            f"{source.get('weights')}{step}; labels {labels}; seeds {source.get('seeds')}")


class NamedRecord(Record):
    name: str
    weights: str | None = None


class PlacedRecord(Record):
    path: str


class SourceRecord(Record):
    """What made the images of a row."""

    step: NonNegativeInt | None = None
    sampler: dict | None = None
    guidance: dict | None = None
    weights: str | None = None


class ResultRow(Record):
    """What each reader of results.jsonl needs of a row."""

    images: NonNegativeInt
    metrics: dict[str, float | None]
    source: SourceRecord
    extractor: NamedRecord
    reference: PlacedRecord


def tells_scores_apart(key: str) -> bool:
    """True if this setting of fid.py makes a different score; rows identify files by SHA-256."""
    return key not in ("batch_size", "keep_features", "reference", "features_weights")


def read_results(path: Path) -> list[dict]:
    """Reads the rows of results.jsonl that are scores of ours."""
    rows = []
    for row in files.read_rows(path):
        with contextlib.suppress(ValueError):
            read(ResultRow, row)
            rows.append(row)
    return rows


# Facts in a row that change with the code's version.
CODE_VERSIONS = ("versions", "source.sampling_version", "scoring_version")
COMPARED = ("images", "extractor", "reference", "floor", "image_rule", "resolution", "versions", "scoring_version")
# The path of a file, and the hash of its content.
PLACES = {"checkpoint": "weights_sha256", "autoencoder": "autoencoder_sha256", "path": "sha256", "weights": "sha256"}


def without_places(record: dict) -> dict:
    """Removes paths from a record, and from the records in it, if it also has the hash of the content."""
    return {key: without_places(value) if isinstance(value, dict) else value for key, value in record.items()
            if not (key in PLACES and record.get(PLACES[key]))}


def facts_of(row: dict, any_version: bool) -> dict:
    """Returns all that a row's scores depend on: files by their content, and the code by its versions."""
    row = without_places(row)
    # The size is only known once images are sampled, and a run that trains may be moved.
    ignored = ("size", *(["checkpoint"] if row["source"].get("in_training") else []))
    facts = {f"source.{key}": value for key, value in row["source"].items() if key not in ignored}
    facts |= {key: row[key] for key in COMPARED if key in row}
    return {key: value for key, value in facts.items() if not (any_version and key in CODE_VERSIONS)}


def scored_before(row: dict, path: Path, any_version: bool = False, ignored: Sequence[dict] = ()) -> dict | None:
    """Finds the row of results.jsonl that has the scores which `row` still lacks.

    Both must depend on the same facts. With `any_version` the code's versions may differ. `ignored` rows are skipped.
    """
    wanted = facts_of(json.loads(json.dumps(row)), any_version)  # as it would be read back
    for old in read_results(path):
        has_scores = row["metrics"].keys() <= old["metrics"].keys() and row.get("tag") in (None, old.get("tag"))
        if has_scores and old not in ignored and facts_of(old, any_version) == wanted:
            return old
    return None


def add_rows(path: Path, rows: list[dict], before: list[dict]) -> None:
    """Appends rows to results.jsonl, except those that another process has added since `before` was read."""
    with files.locked(path):
        for row in rows:
            if scored_before(row, path, ignored=before) is None:
                files.append_row(path, row)
            else:
                print(f"Another process has added the same scores to {path}; they are not added again.")


# ---- tables ---------------------------------------------------------------------------------------------------------


def with_mean_fdr(rows: list[dict]) -> dict:
    """Combines the rows of several networks into one, with FDr as the mean over them (arXiv 2604.28190).

    The first network's metrics keep their names. If another has the same metric, its network's name is appended.
    """
    if len(rows) == 1:
        return rows[0]
    metrics: dict[str, float | None] = {}
    for row in rows:
        network = row["extractor"]["name"]
        network = Path(row["extractor"]["weights"]).stem if network == "torchscript" else network
        for name, value in row["metrics"].items():
            is_shared = name in metrics or name in ("fdr", "floor")
            metrics[f"{name} {network}" if is_shared else name] = value
    ratios = [row["metrics"]["fdr"] for row in rows if "fdr" in row["metrics"]]
    if ratios:
        metrics["fdr"] = None if None in ratios else sum(ratios) / len(ratios)
    return rows[0] | {"metrics": metrics}


def as_table(rows: list[dict], form: str = "text") -> str:
    """Writes rows as a table with a line each, and below it what a paper must state about them."""
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    weights = [row["source"].get("weights") or "" for row in rows]
    lines = [["weights", "guidance", *(TITLES.get(name, name) for name in names)]]
    for row, which in zip(rows, weights, strict=True):
        values = [row["metrics"].get(name) for name in names]
        lines.append([which, guided(row), *("" if value is None else f"{value:.5g}" for value in values)])
    if len({*weights}) == 1:  # the summary below the table names them
        lines = [cells[1:] for cells in lines]
    sources = list(dict.fromkeys(summary(row["source"], row["images"]) for row in rows))
    columns = f"{'l' * (len(lines[0]) - len(names))}{'r' * len(names)}"
    if form == "latex":
        head, *body = (" & ".join(cells).replace("_", r"\_") + r" \\" for cells in lines)
        below = [f"% {line}" for line in sources]
        return "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body,
                          r"\bottomrule", r"\end{tabular}", *below])
    if form == "markdown":
        lines.insert(1, ["---:" if column == "r" else "---" for column in columns])
        return "\n".join([*(f"| {' | '.join(cells)} |" for cells in lines), "", *sources])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(["  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
                      for cells in lines] + sources)


def guided(row: dict) -> str:
    guidance = row["source"].get("guidance")
    return ", ".join(f"{key} {as_text(value)}" for key, value in guidance.items() if value) if guidance else "none"


# ---- published scores -----------------------------------------------------------------------------------------------


def as_published(cfg: SamplingSettings, checkpoint: Checkpoint | None = None) -> SamplingSettings:
    """Completes fid.py's settings from the gauge or, with sampler=published, from a checkpoint's record.

    Settings that are set take precedence. Scores in the record are always returned, to be compared with ours. Raises
    ValueError if sampler=published finds none, or none of this network's diffusion.
    """
    asked, published = cfg.published is not None or cfg.sampler == "published", cfg.published
    why = "its record holds no published scores"
    if published is None and checkpoint is not None and checkpoint.record is not None:
        record = checkpoint.record
        published = record.published and read(Published, record.published, f"{checkpoint.folder}/meta.json: published.")
        trained_with = record.diffusion.get("name")
        if published and published.diffusion not in (None, trained_with):
            why = f"{published.where} is of {published.diffusion}, and this network of {trained_with}"
            published = None
    if asked and published is None:
        raise ValueError(f"sampler=published cannot sample {cfg.checkpoint or cfg.images}: {why}. Leave it out, or "
                         f"set num_steps=, sampler.solver= and so on.")
    if not asked:
        return cfg.model_copy(update={"published": published, "num_steps": cfg.num_steps or 40})
    given = {} if cfg.sampler == "published" else {key: value for key, value in cfg.sampler if value is not None}
    theirs = {key: getattr(published, key) for key in ("num_samples", "num_steps", "scale", "interval", "channels")
              if getattr(cfg, key) is None}
    theirs["sampler"] = published.sampler.model_copy(update=given)
    return cfg.model_copy(update={**theirs, "published": published})


def is_sampled_as(published: Published, cfg: SamplingSettings, trained: Trained) -> bool:
    """True if a checkpoint's images are sampled like those of the published scores."""
    ours, theirs = (sampler_settings(trained.diffusion, dict(one.sampler)) for one in (cfg, published))
    guidance = {key: getattr(published, key, unguided) for key, unguided in NO_GUIDANCE}
    return (ours == theirs and all(getattr(cfg, key) == value for key, value in guidance.items())
            and cfg.num_steps == published.num_steps and (cfg.num_samples or 50_000) == published.num_samples
            and published.step in (None, trained.step) and cfg.classes is None and trained.weights != "model")


def compare_published(row: dict, published: Published) -> str:
    """Compares the scores of a row with published ones, unless its images were sampled differently."""
    if row["published"] is None:
        how = published.model_dump(exclude={"where", "scores", "tolerance"}, exclude_none=True)
        return f"{published.where}: not compared, as the images were sampled differently. Theirs: {json.dumps(how)}"
    lines = [f"{published.where}:", f"{'':<16}  {'ours':>9} {'theirs':>9}"]
    for name, theirs in published.scores.items():
        ours, tolerance = row["metrics"].get(name), published.tolerance.get(name)
        verdict = "not measured" if ours is None else ""
        if tolerance is not None:
            verdict = verdict or ("within" if abs(ours - theirs) <= tolerance else "OUTSIDE")
            verdict = f"± {tolerance:<5} {verdict}"
        lines.append(f"{name:<16}  {'' if ours is None else f'{ours:.4f}':>9} {theirs:>9} {verdict}".rstrip())
    return "\n".join(lines)
