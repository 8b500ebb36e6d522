"""The settings of commands that sample: a sampler's, guidance, seeds and classes."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field

from edm import EDM
from guidance import Guidance, ends
from rf import RF
from routing_module import Route
from runtime.device import DTYPES
from runtime.schema import (
    CONFIGS,
    Count,
    Location,
    NotNegative,
    Number,
    Selection,
    Settings,
    Share,
    Size,
    Steps,
    one_of,
    read,
)
from runtime.typed import read_yaml
from weights.averages import WeightsName
from weights.loading import Trained, load_trained
from weights.others import FAMILIES
from weights.records import keywords

Level = Annotated[float, Field(ge=1e-6, le=1e6)]  # a noise level: squares and roots of it stay in float32

GRID_CLASSES = 10  # a grid shows the first so many classes where none are named

# ---- declared -------------------------------------------------------------------------------------------------------


class SamplerSettings(Settings):
    """A diffusion's sampler; null: its own value. EDM's are those of arXiv 2206.00364, Algorithm 2."""

    sigma_min: Level | None = None
    sigma_max: Level | None = None
    rho: Annotated[float, Field(ge=0.1, le=100)] | None = None
    S_churn: NotNegative | None = None
    S_min: NotNegative | None = None
    S_max: Annotated[float, Field(ge=0)] | None = None  # infinity is its usual value
    S_noise: NotNegative | None = None
    solver: Literal["euler", "heun", "euler_maruyama", "ancestral"] | None = None
    shift: Annotated[float, Field(ge=0.01, le=100)] | Literal["size"] | None = None


Gamma = Share | Annotated[tuple[Share, Share], Field(strict=False)]  # a number, or first and last of a cosine
Pair = Annotated[tuple[Number, Annotated[float, Field(ge=0)]], Field(strict=False)]
# Where tokens are routed and rejoin; the ratios are gamma1 and gamma2.
GuidanceRoute = keywords(Route, selection_ratio=None, x_T=None, x_D_last=None, path_drop=None, drop_batch=None)


class GuidanceSettings(Settings):
    """The keys of configs/guidance, which a command has at its top level."""

    scale: Number | None
    gamma1: Gamma
    gamma2: Gamma
    drop_label: bool
    weak: Location | None
    interval: Pair | None
    routes: list[GuidanceRoute] | None
    channels: Size | None
    internal: bool


NO_GUIDANCE = read(GuidanceSettings, read_yaml(CONFIGS / "guidance/none.yaml"))


class DrawingSettings(GuidanceSettings):
    """configs/drawing.yaml, which every command that samples has."""

    checkpoint: Location | None
    weights: WeightsName | None
    classes: Selection | None
    num_steps: Steps
    sampler: SamplerSettings
    batch_size: Count
    precision: one_of(DTYPES)
    decode_precision: one_of(DTYPES)
    decode_batch_size: Count | None
    diffusion_name: one_of(FAMILIES) | None
    num_heads: Size | None
    num_classes: Size | None
    input_size: Size | None
    autoencoder: Location | None
    tf32: bool
    cpu: bool


# ---- read -----------------------------------------------------------------------------------------------------------


def sampler_settings(diffusion: EDM | RF, given: Mapping[str, float | str | None]) -> dict[str, float | str]:
    """Completes the settings of a diffusion's sampler; None is the diffusion's own value, as a shift, or the sampler's.

    Raises ValueError for a setting or a solver that the sampler lacks, or noise levels in the wrong order.
    """
    def settings_of(sample: Callable) -> dict[str, float | str | None]:
        parameters = inspect.signature(sample).parameters
        return {name: getattr(diffusion, name, parameters[name].default) for name in parameters
                if name not in ("net", "noise", "y", "num_steps", "guidance", "randn_like")}

    own, sampler = settings_of(diffusion.sample), f"the sampler of {type(diffusion).__name__}"
    given = {name: value for name, value in given.items() if value is not None}
    # A solver may be a method with settings of its own, sample_ancestral for instance.
    solver = getattr(diffusion, f"sample_{given['solver']}", None) if {"solver"} <= own.keys() & given.keys() else None
    if solver is not None:
        own, sampler = {"solver": None, **settings_of(solver)}, f"{sampler} with solver={given['solver']}"
    for name, value in given.items():
        if name not in own:
            raise ValueError(f"sampler.{name}={value}: {sampler} has no such setting; it has {', '.join(own)}.")
    settings = {name: value for name, value in (own | given).items() if value is not None}
    for low, high in (("sigma_min", "sigma_max"), ("S_min", "S_max")):
        if low in settings and settings[low] >= settings[high]:
            raise ValueError(f"sampler.{low}={settings[low]} is not below sampler.{high}={settings[high]}.")
    churn = [f"sampler.{name}={given[name]}" for name in ("S_min", "S_max", "S_noise") if name in given]
    if churn and "S_churn" not in given:
        raise ValueError(f"{' '.join(churn)} would change nothing without churn: set sampler.S_churn=40, too.")
    return settings


def check_interval(interval: tuple[float, float], diffusion: EDM | RF, sampler: Mapping) -> None:
    """Raises ValueError for an interval of guidance that is not one of the diffusion's noise levels."""
    given = {} if isinstance(diffusion, RF) else sampler_settings(diffusion, sampler)
    low, high = ((0, 1) if isinstance(diffusion, RF) else
                 (given["sigma_min"], given["sigma_max"]) if "sigma_max" in given else
                 (diffusion.sigmas[0].item(), diffusion.sigmas[-1].item()))
    is_of_edm = isinstance(diffusion, RF) and 1 < interval[1] < math.inf
    if interval[0] >= interval[1] or interval[1] < low or interval[0] > high or is_of_edm:
        raise ValueError(f"interval={list(interval)} does not fit the sampler's noise levels, from {high:g} to "
                         f"{low:g}. A sigma of EDM is t = sigma / (1 + sigma) of flow matching.")


def build_guidance(
    settings: GuidanceSettings, trained: Trained, device: torch.device | str = "cpu",
) -> tuple[Guidance | None, dict | None]:
    """Builds guidance and its record from its settings, loading a weak network; None, None where `scale` is None.

    Raises ValueError, with the numbers and the setting, where they cannot work with `trained`.
    """
    if settings.scale is None:
        changed = [name for name, plain in NO_GUIDANCE if getattr(settings, name) != plain]
        settings.refuse("guidance", *changed, why="nothing is guided without a scale; give scale=1.5")
        return None, None
    if settings.weak == "required":
        raise ValueError("This guidance needs weak=<an earlier or smaller checkpoint>, the network of its weak pass.")
    ratios = ends(settings.gamma1) + ends(settings.gamma2)
    is_same = not (settings.drop_label or settings.weak or settings.internal) and settings.gamma1 == settings.gamma2
    if (settings.scale != 1 and is_same) or (settings.routes and not any(ratios)):
        raise ValueError(f"scale={settings.scale:g} guides nothing, as both passes are the same, or no token takes "
                         f"routes=: set drop_label=true, gamma2= above gamma1=, or weak=.")
    if 1 in ratios and settings.routes is None and not any(route.path_drop for route in trained.net.routes):
        raise ValueError("guidance=path_drop, or a ratio of 1, skips the blocks of the network's route, but it was "
                         "not trained for that (path_drop): choose guidance=tread, or name blocks by routes=.")
    if settings.interval:
        check_interval(settings.interval, trained.diffusion, dict(getattr(settings, "sampler", {})))
    weak = None
    if settings.weak:
        same = {"diffusion": trained.family or trained.recorded["diffusion"]["name"],
                "num_classes": trained.net.num_classes, "input_size": trained.net.input_size}
        weak = load_trained(settings.weak, like=same, device=device)
        strong_data, weak_data = (getattr(one.diffusion, "sigma_data", None) for one in (trained, weak))
        if type(weak.diffusion) is not type(trained.diffusion) or strong_data != weak_data:
            raise ValueError(f"weak={settings.weak} was trained with {type(weak.diffusion).__name__} "
                             f"(sigma_data {weak_data}) and the checkpoint with {type(trained.diffusion).__name__} "
                             f"(sigma_data {strong_data}): their predictions cannot be mixed.")
    routes = None if settings.routes is None else tuple(
        Route(selection_ratio=0.0, **route.model_dump()) for route in settings.routes)
    guidance = Guidance(settings.scale, settings.gamma1, settings.gamma2, settings.drop_label, weak and weak.net,
                        settings.interval, routes, settings.channels, settings.internal)
    guidance.check(trained.net)
    source = weak and {"checkpoint": str(weak.checkpoint.folder or weak.checkpoint.file), "step": weak.step,
                       "weights_sha256": weak.checkpoint.sha256}
    return guidance, {**guidance.record(), "weak": source}


def parse_range(key: str, given: str | int | Iterable[int] | None) -> list[int]:
    """Reads `5`, `0-63`, `"0-9,20"` or a list of them as a list of ints. Raises ValueError for anything else."""
    parts = str(given).split(",") if isinstance(given, str | int | None) else [str(part) for part in given]
    chosen: list[int] = []
    for part in parts:
        first, dash, last = part.strip().partition("-")
        numbers = [int(text) for text in (first, last if dash else first) if text.isascii() and text.isdigit()]
        if len(numbers) < 2 or numbers[0] > numbers[1]:
            raise ValueError(f"{key}={given or 'null'} is not understood at {part!r}: write {key}=7, {key}=0-63 or "
                             f"{key}=[1,5,9].")
        chosen.extend(range(numbers[0], numbers[1] + 1))
    return chosen


def parse_seeds(key: str, given: str | int | Iterable[int] | None) -> list[int]:
    """Reads seeds as `parse_range` does, each once: one seed is one image."""
    return list(dict.fromkeys(parse_range(key, given)))


def parse_classes(
    key: str, given: str | int | Iterable | None, num_classes: int, class_names: list[str] | None, present: list[int],
) -> list[int]:
    """Reads class names, indices and ranges of indices, or of names that are numbers; None is `present`, with images.

    Raises ValueError for a class that does not exist.
    """
    if given is None:
        return present
    index = {name: i for i, name in enumerate(class_names or [])}
    # Where all names are numbers, a number is a name, in a range as well; 7 also names a class 007.
    known = {int(name): i for name, i in index.items() if name.isascii() and name.isdigit()}
    if len(known) < max(1, len(index)):
        known = {i: i for i in range(num_classes)}
    parts = [str(given)] if str(given) in index or isinstance(given, int) else given
    parts = parts.split(",") if isinstance(parts, str) else [str(part) for part in parts]
    labels = []
    for part in (part.strip() for part in parts):
        asked = [part] if part in index or not part[:1].isdigit() else parse_range(key, part)
        if lacking := [one for one in asked if one not in index and one not in known]:
            names = f", {', '.join(list(index)[:10])}{' …' if len(index) > 10 else ''}" if index else ""
            raise ValueError(f"{key}={given} asks for class {lacking[0]}, which is none of the {num_classes}: write "
                             f"indices from 0, as in {key}=[0,5] or {key}=0-9, or names{names}.")
        labels += [index[one] if one in index else known[one] for one in asked]
    return labels


def empty_classes(present: list[int], num_classes: int) -> str | None:
    """Says how many of a network's classes have no images, and the first of them; None where all have some."""
    if not (empty := sorted({*range(num_classes)} - {*present})):
        return None
    first = ", ".join(map(str, empty[:5])) + (" …" if len(empty) > 5 else "")
    return f"{len(empty):,} of {num_classes:,} classes have no training images ({first}), which are sampled if named."


def labels_of(seeds: Iterable[int], classes: list[int]) -> list[int]:
    """Gives each seed its class, balanced and by the seed alone, so that an image never depends on its neighbours."""
    return [classes[seed % len(classes)] for seed in seeds]
