"""The settings of commands that sample: a sampler's, guidance, seeds and classes."""

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from accelerate import PartialState
from omegaconf import OmegaConf
from pydantic import ConfigDict, Field

import extensions
from guidance import Guidance, ends
from routing_module import Route
from runtime import schema
from runtime.device import DTYPES
from weights.averages import WeightsName
from weights.loading import Trained, find_on_main_rank, load_trained, other_data
from weights.records import keywords, settings_of

MOST_SEED = 2**63 - 1  # seeds are sent between ranks, and stored, as int64
GRID_CLASSES = 10  # a grid shows at most this many classes unless some are named

# ---- declared -------------------------------------------------------------------------------------------------------


def between(low: float, high: float) -> type:
    """Declares a number in a range, or null."""
    return Annotated[float, Field(ge=low, le=high)] | None


Level = between(1e-6, 1e6)  # of noise: its squares and roots fit float32


class SamplerSettings(schema.Settings):
    """A diffusion's sampler; null: its own value. EDM's are in arXiv 2206.00364, Algorithm 2."""

    model_config = ConfigDict(extra="allow")  # settings of a file in solvers/, which `sampler_settings` checks

    sigma_min: Level = None
    sigma_max: Level = None
    rho: between(0.1, 100) = None
    S_churn: between(0, 1e6) = None
    S_min: between(0, 1e6) = None
    S_max: between(0, math.inf) = None
    S_noise: between(0, 1e6) = None
    solver: schema.Text | None = None  # of the diffusion, or a file in solvers/, whose settings may follow
    # A shift below 1 is LightningDiT's, whose time runs the other way.
    shift: between(1, 100) | Literal["size"] = None


# A number, or a cosine's first and last.
Gamma = schema.Fraction | Annotated[tuple[schema.Fraction, schema.Fraction], Field(strict=False)]
Pair = Annotated[tuple[schema.Number, Annotated[float, Field(ge=0)]], Field(strict=False)]
# The blocks where tokens are routed and rejoin; gamma1 and gamma2 are the ratios.
GuidanceRoute = keywords(Route, selection_ratio=None, x_T=None, x_D_last=None, path_drop=None, drop_batch=None)


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
    kind: dict = {}  # name: a file of guidances/, and its settings


NO_GUIDANCE = schema.read(
    GuidanceSettings, OmegaConf.to_container(OmegaConf.load(schema.CONFIGS / "guidance/none.yaml")))


class SamplingSettings(GuidanceSettings):
    """configs/sampling.yaml, which every command that samples has."""

    checkpoint: schema.Location | None
    weights: WeightsName | None
    autoencoder: schema.Location | None
    classes: schema.Selection | None
    num_steps: schema.Steps
    sampler: SamplerSettings
    batch_size: schema.Count
    precision: schema.one_of(DTYPES)
    decode_precision: schema.one_of(DTYPES)
    decode_batch_size: schema.Count | None
    compile: bool | None
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


def build_guidance(
    state: PartialState, settings: SamplingSettings, trained: Trained,
) -> tuple[Guidance | None, dict | None]:
    """Builds guidance and its record from its settings, loading a weak network; None, None where `scale` is None.

    Raises ValueError, with the numbers and the setting, if they cannot work with `trained`.
    """
    if settings.scale is None:
        return None, None
    if settings.weak == "required":
        raise ValueError("This guidance needs weak=<an earlier or smaller checkpoint>, the network of its weak pass.")
    ratios = ends(settings.gamma1) + ends(settings.gamma2)
    weak = None
    if settings.weak:
        weak = load_trained(find_on_main_rank(state, settings.weak), device=state.device)
        differences = other_data(weak, None if settings.drop_label else trained.class_names, trained.convention)
        there, here = (f"{type(one.diffusion).__name__} (sigma_data {getattr(one.diffusion, 'sigma_data', None)})"
                       for one in (weak, trained))
        if there != here:
            differences.append(f"its diffusion is {there} there and {here} here")
        if differences:
            raise ValueError(f"weak={settings.weak} and the checkpoint cannot be mixed: {' and '.join(differences)}.")
    for name, gamma, one in (("gamma1", settings.gamma1, trained), ("gamma2", settings.gamma2, weak or trained)):
        if 1 in ends(gamma) and settings.routes is None and not any(route.path_drop for route in one.net.routes):
            raise ValueError(f"{name}=1, as in guidance=path_drop, skips the blocks of the network's route, but it was "
                             f"not trained for that (path_drop): choose guidance=tread, or name blocks by routes=.")
    routed = [int(ratio * trained.net.pos_embed.shape[1]) for ratio in ratios]  # tokens, at both ends of both passes
    is_other = settings.drop_label or routed[:2] != routed[2:] or weak is not None and (
        weak.checkpoint.sha256, weak.weights) != (trained.checkpoint.sha256, trained.weights)
    if (settings.scale != 1 and not is_other) or (settings.routes and not any(routed)):
        raise ValueError(f"scale={settings.scale:g} guides nothing, as both passes are the same, or no token takes "
                         f"routes=: set drop_label=true, a higher gamma2=, or weak=<another network>.")
    routes = None if settings.routes is None else tuple(
        Route(selection_ratio=0.0, **route.model_dump()) for route in settings.routes)
    kind, own = Guidance, dict(settings.kind)
    if own:
        kind = extensions.find("guidances", own.pop("name", None))
        own = schema.read(settings_of(kind), own, "kind: ").model_dump()
    guidance = kind(settings.scale, settings.gamma1, settings.gamma2, settings.drop_label, weak and weak.net,
                        settings.interval, routes, settings.channels, **own)
    guidance.check(trained.net)
    return guidance, {**guidance.record(), "weak": weak and weak.checkpoint.source}


def parse_range(key: str, text: str | int | Iterable[int] | None) -> list[int]:
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
    key: str, text: str | int | Iterable | None, num_classes: int, class_names: list[str] | None, present: list[int],
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
    labels = []
    for part in (part.strip() for part in parts):
        i = index_of.get(part)      # None for an index, or a range
        if i is not None and part.isdecimal() and numbered.get(int(part), i) != i:
            raise ValueError(f"{key}={text}: {part} is the name of class {i}, and the index of another: write "
                             f"{key}={i}-{i} for the former, or {key}={part}-{part} for the latter.")
        is_number = i is None and part[:1].isdigit()
        labels += [numbered.get(number) for number in parse_range(key, part)] if is_number else [i]
        if None in labels:
            first = f", {', '.join(list(index_of)[:10])}{' …' if len(index_of) > 10 else ''}" if index_of else ""
            raise ValueError(f"{key}={text} asks for class {part}, which is none of the {num_classes}: write "
                             f"indices from 0, as in {key}=[0,5] or {key}=0-9, or names{first}.")
    return labels


def empty_classes(present: list[int], num_classes: int) -> str | None:
    """Writes how many of a network's classes have no images, and the first ones; None if all have some."""
    empty = sorted({*range(num_classes)} - {*present})
    first = ", ".join(map(str, empty[:5])) + (" …" if len(empty) > 5 else "")
    return (f"{len(empty):,} of {num_classes:,} classes have no training images ({first}). They are only sampled if "
            f"they are named.") if empty else None


def unscored_classes(num_samples: int, classes: list[int]) -> str | None:
    """Writes how many classes are scored if images are fewer than classes; None if each class has an image."""
    if num_samples >= len(classes):
        return None
    return (f"num_samples={num_samples} covers only {num_samples:,} of {len(classes):,} classes, and the reference has "
            f"all of them. A multiple of {len(classes):,} covers each equally.")


def labels_of(seeds: Iterable[int], classes: list[int]) -> list[int]:
    """Returns the class of each seed: balanced, and by the seed alone, so that no image depends on another."""
    return [classes[seed % len(classes)] for seed in seeds]
