"""A row of results.jsonl: what was scored, with what, and whether it was scored before."""

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
from runtime.schema import Number, Record, Settings, Size, Some, Steps, Whole, one_of, read
from sampling.options import Pair, SamplerSettings
from scoring.evaluation import Judge, Subject
from scoring.feature_cache import SCORING_VERSION
from scoring.features import describe_extractor, versions
from weights.records import DIFFUSIONS

BALANCED = "class seed % number of classes"  # how a sample's record puts it
AtLeastTwo = Annotated[int, Field(ge=2, le=10**7)]  # images: one has no covariance
Metrics = Some[str] | Literal["all"]


class Published(Settings):
    """Published scores, and how their images were sampled: of configs/gauge, or of an experiment."""

    where: str
    scores: dict[str, Number]
    tolerance: dict[str, Number] = {}               # how far from them ours may lie
    diffusion: one_of(DIFFUSIONS) | None = None     # that the network was trained with; None: that of ours
    step: Whole | None = None                       # after which they were sampled; None: whatever ours says
    num_samples: AtLeastTwo = 50_000
    num_steps: Steps | None = None                  # None where the images themselves are published
    sampler: SamplerSettings = SamplerSettings()
    scale: Number | None = None
    interval: Pair | None = None
    channels: Size | None = None


def describe_autoencoder(name: str, decode_precision: str) -> dict:
    vae = Path(name) if Path(name).is_file() else Path(name) / "diffusion_pytorch_model.safetensors"
    return {"autoencoder": name, "autoencoder_sha256": files.sha256(vae) if vae.is_file() else None,
            "decode_precision": decode_precision}


def describe_classes(classes: list[int], num_classes: int) -> str | list[int] | dict:
    """Records which classes are sampled: "all", a list, or in place of a long list its length and hash."""
    if classes == list(range(num_classes)):
        return "all"
    if len(classes) <= 100:
        return classes
    return {"count": len(classes), "sha256": files.record_sha256({"classes": classes})}


def result_row(
    subject: Subject,
    judge: Judge,
    scores: dict[str, float] | None = None,  # None: not measured yet
    *,
    seconds: float = 0.0,
    batch_size: int,
    resolution: int | None = None,      # to which images were scaled
    resumed_images: int = 0,            # those whose features were kept
) -> dict:
    """Makes a row of results.jsonl: scores, and all that they depend on."""
    state = PartialState()
    return {
        "metrics": scores or dict.fromkeys(judge.names), "images": subject.count, "source": subject.record,
        "summary": summary(subject.record, subject.count), "resumed_images": resumed_images,
        "extractor": describe_extractor(judge.extractor), "reference": judge.reference.record,
        **({"floor": judge.floor.record} if judge.floor else {}), "image_rule": subject.rule,
        "resolution": resolution, "batch_size": batch_size, "processes": state.num_processes,
        **describe_device(state.device),
        "versions": versions(judge.extractor), "scoring_version": SCORING_VERSION, "commit": commit(),
        "seconds": seconds, "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def summary(source: dict, count: int) -> str:
    """Says in a line what a paper has to say of how images were made, but for their guidance."""
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

    step: Whole | None = None
    sampler: dict | None = None
    guidance: dict | None = None
    weights: str | None = None


class ResultRow(Record):
    """What each reader of results.jsonl needs of a row."""

    images: Whole
    metrics: dict[str, float | None]
    source: SourceRecord
    extractor: NamedRecord
    reference: PlacedRecord


def read_results(path: Path) -> list[dict]:
    """Reads the rows of results.jsonl that are scores of ours."""
    rows = []
    for row in files.read_rows(path):
        with contextlib.suppress(ValueError):
            read(ResultRow, row)
            rows.append(row)
    return rows


# What another version of the code changes in a row. Older rows lack the last two, and have a hash of all code instead.
OF_THE_CODE = ("versions", "source.drawing_version", "scoring_version")
COMPARED = ("images", "extractor", "reference", "floor", "image_rule", "resolution", "versions", "scoring_version")
# Where a file lies, and the hash that tells what it holds wherever that is.
PLACES = {"checkpoint": "weights_sha256", "autoencoder": "autoencoder_sha256", "path": "sha256", "weights": "sha256"}


def without_places(record: dict) -> dict:
    """Leaves out of a record, and of those in it, each place beside which a hash of the content stands."""
    return {key: without_places(value) if isinstance(value, dict) else value for key, value in record.items()
            if not (key in PLACES and record.get(PLACES[key]))}


def facts_of(row: dict, any_version: bool) -> dict:
    """Names all that a row's scores depend on: files by their content, and the code by its versions."""
    row = without_places(row)
    # The size is known once the first images are sampled, `origin` is in training's rows of older versions, and a run
    # that trains may lie anywhere.
    ignored = ("size", "origin", *(["checkpoint"] if row["source"].get("in_training") else []))
    facts = {f"source.{key}": value for key, value in row["source"].items() if key not in ignored}
    facts |= {key: row[key] for key in COMPARED if key in row}
    return {key: value for key, value in facts.items() if not (any_version and key in OF_THE_CODE)}


def scored_before(row: dict, path: Path, any_version: bool = False, ignored: Sequence[dict] = ()) -> dict | None:
    """Finds in results.jsonl a row that has the scores which `row` asks for and has not measured yet.

    Both must depend on the same facts. One that an old row lacks is taken to be the same, unless it is a version of the
    code. With `any_version` versions may differ; rows that are `ignored` are passed over.
    """
    wanted = facts_of(json.loads(json.dumps(row)), any_version)  # as it would be read back
    for old in read_results(path):
        if old in ignored:
            continue
        found = facts_of(old, any_version)
        lacking = wanted.keys() - found.keys()
        same = found and found.items() <= wanted.items() and not lacking & {*OF_THE_CODE}
        named = row.get("study") in (None, old.get("study"))  # a study finds its rows by what it calls them
        if same and named and row["metrics"].keys() <= old["metrics"].keys():
            return old
    return None


def add_rows(path: Path, rows: list[dict], before: list[dict]) -> None:
    """Appends rows to results.jsonl, but those that another process has added since it had the rows `before`."""
    with files.locked(path):
        for row in rows:
            if scored_before(row, path, ignored=before) is None:
                files.append_row(path, row)
            else:
                print(f"Another process has added the same scores to {path} meanwhile; there is no second row.")
