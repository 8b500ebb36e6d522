"""The settings of commands that sample: a sampler's, guidance, seeds and classes."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from accelerate import Accelerator, PartialState
from omegaconf import OmegaConf
from pydantic import ConfigDict, Field

from runtime import schema
from runtime.device import DType
from weights.averages import WeightsName

MOST_SEED = 2**63 - 1  # seeds are stored as int64
GRID_CLASSES = 10  # a grid shows at most this many classes unless some are named

# ---- declared -------------------------------------------------------------------------------------------------------

Level = Annotated[float, Field(ge=1e-6, le=1e6)]  # of noise: its squares and roots fit float32


class SamplerSettings(schema.Settings):
    """A diffusion's sampler; null: its own value. EDM's are in arXiv 2206.00364, Algorithm 2."""

    model_config = ConfigDict(extra="allow")  # settings of a file in solvers/, which `Sampler` checks

    sigma_min: Level | None = None
    sigma_max: Level | None = None
    rho: Annotated[float, Field(ge=0.1, le=100)] | None = None
    S_churn: schema.NotNegative | None = None
    S_min: schema.NotNegative | None = None
    S_max: Annotated[float, Field(ge=0)] | None = None
    S_noise: schema.NotNegative | None = None
    solver: schema.Text | None = None  # of the diffusion, or a file in solvers/, whose settings may follow
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


NO_GUIDANCE = GuidanceSettings.model_validate(
    OmegaConf.to_container(OmegaConf.load(schema.CONFIGS / "guidance/none.yaml")))


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


# ---- read -----------------------------------------------------------------------------------------------------------


def check_guided(settings: GuidanceSettings, cli_overrides: Mapping[str, str]) -> None:
    """Raises ValueError for settings of guidance that are typed without a scale."""
    if settings.scale is None:
        changed = [name for name, plain in NO_GUIDANCE if getattr(settings, name) != plain]
        schema.refuse(cli_overrides, "guidance", *changed, why="nothing is guided without a scale; give scale=1.5")


def parse_range(key: str, text: schema.Selection | None) -> list[int]:
    """Reads `5`, `0-63`, `"0-9,20"` or a list of them as a list of ints; raises ValueError for anything else."""
    parts = str(text).split(",") if isinstance(text, str | int | None) else [str(part) for part in text]
    chosen: list[int] = []
    for part in parts:
        first, dash, last = part.strip().partition("-")
        numbers = [int(digits) for digits in (first, last if dash else first) if digits.isascii() and digits.isdigit()]
        if len(numbers) < 2 or numbers[0] > numbers[1]:
            raise ValueError(f"{key}={text or 'null'} is not understood at {part!r}: write {key}=7, {key}=0-63 or "
                             f"{key}=[1,5,9].")
        if numbers[1] > MOST_SEED:
            raise ValueError(f"{key}={numbers[1]} is too large: 2^63 - 1 = {MOST_SEED} is the largest.")
        chosen.extend(range(numbers[0], numbers[1] + 1))
    return chosen


def parse_seeds(key: str, text: schema.Selection | None) -> list[int]:
    """Reads seeds as `parse_range` does, each once: one seed is one image."""
    return list(dict.fromkeys(parse_range(key, text)))


def parse_classes(
    key: str, text: schema.Selection | None, num_classes: int, class_names: list[str] | None, present: list[int],
) -> list[int]:
    """Reads class names, indices, and ranges of indices or of numeric names; None means the `present` classes.

    Raises ValueError for a class that does not exist.
    """
    if text is None:
        return present
    index_of = {name: i for i, name in enumerate(class_names or [])}
    # If all names are numbers, a number is a name, also in a range; 7 also means class 007.
    numbered = {int(name): i for name, i in index_of.items() if name.isascii() and name.isdigit()}
    if len(numbered) < max(1, len(index_of)):
        numbered = {i: i for i in range(num_classes)}
    parts = [str(text)] if str(text) in index_of or isinstance(text, int) else text
    parts = parts.split(",") if isinstance(parts, str) else [str(part) for part in parts]
    labels: list[int] = []
    for part in (part.strip() for part in parts):
        i = index_of.get(part)      # None for an index, or a range
        if i is not None and part.isdecimal() and numbered.get(int(part), i) != i:
            raise ValueError(f"{key}={text}: {part} is the name of class {i}, and the index of another: write "
                             f"{key}={i}-{i} for the former, or {key}={part}-{part} for the latter.")
        is_number = i is None and part[:1].isdigit()
        chosen = [numbered.get(number) for number in parse_range(key, part)] if is_number else [i]
        labels += (label for label in chosen if label is not None)
        if None in chosen:
            first = f", {', '.join(list(index_of)[:10])}{' …' if len(index_of) > 10 else ''}" if index_of else ""
            raise ValueError(f"{key}={text} asks for class {part}, which is none of the {num_classes}: write "
                             f"indices from 0, as in {key}=[0,5] or {key}=0-9, or names{first}.")
    return labels


def print_empty_classes(state: Accelerator | PartialState, present: list[int], num_classes: int) -> None:
    """Prints how many of a network's classes have no images, if there are any, and the first ones."""
    if empty := sorted({*range(num_classes)} - {*present}):
        first = ", ".join(map(str, empty[:5])) + (" …" if len(empty) > 5 else "")
        state.print(f"{len(empty):,} of {num_classes:,} classes have no training images ({first}). They are only "
                    f"sampled if they are named.")


def print_unscored_classes(
    state: Accelerator | PartialState, num_samples: int, classes: list[int], key: str = "num_samples",
) -> None:
    """Prints, with the setting `key`, how many classes are scored if there are fewer images than classes."""
    if num_samples < len(classes):
        state.print(f"{key}={num_samples} covers only {num_samples:,} of {len(classes):,} classes, and the reference "
                    f"has all of them. A multiple of {len(classes):,} covers each equally.")


def labels_of(seeds: Iterable[int], classes: list[int]) -> list[int]:
    """Returns the class of each seed: balanced, and by the seed alone, so that no image depends on another."""
    return [classes[seed % len(classes)] for seed in seeds]
