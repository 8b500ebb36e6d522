"""The settings of commands that sample: a sampler's, guidance, seeds and classes."""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, create_model

from edm import DDPM, EDM
from rf import RF
from runtime import schema
from runtime.device import DType
from weights.averages import WeightsName
from weights.records import keywords

OF_ALL = dict.fromkeys(("net", "noise", "y", "num_steps", "guidance", "randn_like"))    # what every solver takes
OF_SOME: dict[str, Any] = {
    name: (Any, None) for kind in (EDM, RF, DDPM) for name in keywords(kind.sample, **OF_ALL).model_fields}


class SamplerSettings(create_model("OfSome", __base__=schema.Settings, **OF_SOME)):  # type: ignore[misc]  # made at run time
    """The settings of all diffusions' samplers; null: its own value. `Sampler` checks them by the one in use."""

    model_config = ConfigDict(extra="allow")  # settings of a file in solvers/
    # A shift below 1 is LightningDiT's, whose time runs the other way.
    shift: Annotated[float, Field(ge=1, le=100)] | Literal["size"] | None = None


# A number, or a cosine's first and last.
Gamma = schema.Fraction | Annotated[tuple[schema.Fraction, schema.Fraction], Field(strict=False)]
Pair = Annotated[tuple[schema.Number, Annotated[float, Field(ge=0)]], Field(strict=False)]


class GuidanceRoute(schema.Settings):
    """The blocks where tokens are routed and rejoin; gamma1 and gamma2 are the ratios."""

    start_layer_idx: int
    end_layer_idx: int
    return_from: int | None = None


class GuidanceSettings(schema.Settings):
    """The keys of configs/guidance, which a command has at its top level."""

    scale: schema.Number | None
    gamma1: Gamma
    gamma2: Gamma
    drop_label: bool
    weak: schema.Location | None
    interval: Pair | None
    routes: list[GuidanceRoute] | None
    channels: schema.Size | None
    kind: dict[str, Any] = {}  # name: a file of guidances/, and its settings


class SamplingSettings(GuidanceSettings):
    """configs/sampling.yaml, which every command that samples has."""

    checkpoint: schema.Location | None
    weights: WeightsName | None
    autoencoder: schema.Location | None
    classes: schema.Selection | None
    num_steps: schema.Steps
    sampler: SamplerSettings
    batch_size: schema.Count
    precision: DType
    decode_precision: DType
    decode_batch_size: schema.Count | None
    tf32: bool
    cpu: bool

    @property
    def precisions(self) -> dict[str, str]:
        return {"precision": self.precision, "decode_precision": self.decode_precision}


def check_guided(settings: GuidanceSettings, cli_overrides: Mapping[str, str]) -> None:
    """Raises ValueError for settings of guidance that are typed without a scale."""
    if settings.scale is None:
        schema.refuse(cli_overrides, "guidance", *GuidanceSettings.model_fields,
                      why="nothing is guided without a scale; give scale=1.5")


def parse_range(key: str, text: schema.Selection | None) -> list[int]:
    """Reads `5`, `0-63`, `"0-9,20"` or a list of them as ints, each once; raises ValueError for anything else."""
    parts = text if isinstance(text, list) else [text]
    chosen: dict[int, None] = {}
    for part in ",".join(map(str, parts)).split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part, re.ASCII)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise ValueError(f"{key}={schema.as_text(text)} is not understood at {part!r}: write {key}=7, {key}=0-63 "
                             f"or {key}=[1,5,9].")
        chosen |= dict.fromkeys(range(first, last + 1))
    return [*chosen]


def parse_classes(
    key: str, text: schema.Selection | None, num_classes: int, class_names: list[str] | None, present: list[int],
) -> list[int]:
    """Reads class names, indices and ranges of indices; None means the `present` classes.

    Where classes have numbers for names, all numbers are names, also in a range; 7 means class 007 too. Raises
    ValueError for a class that does not exist.
    """
    if text is None:
        return present
    names = class_names or []   # a list of ImageNet's may have crane and maillot twice
    index_of = {name: i for i, name in enumerate(names) if names.count(name) == 1}
    numbered = {int(name): i for name, i in index_of.items() if name.isdecimal()} or {i: i for i in range(num_classes)}
    parts = text if isinstance(text, list) else [text] if text in index_of else str(text).split(",")
    labels: list[int] = []
    for part in (str(part).strip() for part in parts):
        if part in index_of:
            labels.append(index_of[part])
            continue
        numbers = parse_range(key, part) if part[:1].isdecimal() else [-1]
        if not {*numbers} <= numbered.keys():
            first = f", {', '.join([*index_of][:10])}{' …' * (len(index_of) > 10)}" if index_of else ""
            raise ValueError(f"{key}={schema.as_text(text)} asks for class {part}, which names none of {num_classes}: "
                             f"write indices from 0, as in {key}=[0,5] or {key}=0-9, or names{first}.")
        labels += [numbered[number] for number in numbers]
    return labels


def labels_of(seeds: Iterable[int], classes: list[int]) -> list[int]:
    """Returns the class of each seed: balanced, and by the seed alone, so that no image depends on another."""
    return [classes[seed % len(classes)] for seed in seeds]
