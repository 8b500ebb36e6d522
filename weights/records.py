"""Builds networks and diffusions from plain records, as in meta.json and configs."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, create_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import extensions
from blocks.fusion import FusingRouter
from dit import DiT
from edm import DDPM, EDM
from rf import RF
from routing_module import Route, Router, RouteSchedule, resolve_routes
from runtime.schema import (
    Classes,
    ConventionRecord,
    Count,
    NonNegativeInt,
    Number,
    Positive,
    Record,
    Settings,
    Size,
    as_recorded,
    read,
)

DIFFUSIONS = {"edm": EDM, "ddpm": DDPM, "rf": RF}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Plain = dict[str, Any]
ROUTER_DEFAULTS = asdict(Router())  # for a record without them


class Keywords(Settings):
    model_config = ConfigDict(allow_inf_nan=False)


def keywords(*kinds: Callable[..., Any], **others: Any) -> type[Keywords]:
    """Declares constructors' keywords by their signatures' types and defaults; `others` replaces or drops some."""
    parameters = [parameter for kind in kinds for parameter in inspect.signature(kind).parameters.values()]
    fields: dict[str, Any] = {parameter.name: (
        Any if parameter.annotation is parameter.empty else parameter.annotation,
        ... if parameter.default is parameter.empty else parameter.default) for parameter in parameters}
    fields = {name: field for name, field in (fields | others).items() if field}
    return create_model("Keywords", __base__=Keywords, **fields)


def settings_of(kind: Callable[..., Any], **others: Any) -> type[Keywords]:
    """Declares the settings of an extension: its parameters that are given by name alone, and `others`."""
    by_place = inspect.signature(kind).parameters.keys() - extensions.keywords_of(kind).keys()
    return keywords(kind, **{**dict.fromkeys(by_place), **others})


class RouteSettings(keywords(Route)):  # type: ignore[misc]  # made from a signature
    """A route's keywords; `resolve_routes` checks their ranges."""


When = Annotated[float, Field(gt=0, lt=1)] | Count  # a fraction of a run's steps, or a step


class ScheduleSettings(Settings):
    """The keys of configs/route_schedule, and of RouteSchedule in a checkpoint's record, where steps are integers."""

    dense_before: When | None = None
    dense_after: When | None = None
    selection_ratios: Annotated[list[Number], Field(min_length=1)] | None = None
    changes: list[Annotated[tuple[When, list[RouteSettings]], Field(strict=False)]] | None = None


# A record omits the router's keywords if tokens are chosen at random, and fusion if it is not used.
NETWORK = inspect.signature(DiT).parameters
SIZES = dict.fromkeys(("input_size", "patch_size", "in_channels", "hidden_size", "num_heads"), Size) | {
    "depth": Annotated[int, Field(ge=1, le=1000)], "num_classes": Classes, "mlp_ratio": Positive}
NetworkRecord = keywords(DiT, Router, routes=(list[RouteSettings], []), router=None, fusion=(bool, False),
                         **{name: (size, NETWORK[name].default) for name, size in SIZES.items()})


class DataRecord(Record):
    """The latents that a network was trained on."""

    autoencoder: str
    convention: ConventionRecord
    class_names: list[str] | None
    display_names: list[str] | None
    classes: Annotated[list[NonNegativeInt], Field(min_length=1)] | None  # those with images; None: all


class CheckpointRecord(Record):
    """What meta.json must contain for a checkpoint to be sampled."""

    network: Plain
    diffusion: Plain
    data: DataRecord
    step: NonNegativeInt | None
    null_label: bool                    # whether label dropout has trained it
    imported: Plain | None = None       # what scripts/import_weights.py recorded; None: a run has trained it here


def read_network(network: Plain) -> Plain:
    """Completes a network's keywords with defaults; raises ValueError for those that do not fit."""
    return read(NetworkRecord, network, "A network's record: ").model_dump()


def architecture(network: Plain) -> Plain:
    """Returns the keywords of a network that its weights depend on; raises ValueError for keywords that do not fit."""
    complete = read_network(network)
    if complete["fusion"]:  # its weights depend only on the blocks of the route
        ends = [(route["start_layer_idx"], route["end_layer_idx"]) for route in complete["routes"]]
        complete["fusion"] = [[i % complete["depth"] for i in pair] for pair in ends]
    return {key: value for key, value in complete.items() if key not in ("routes", "init", *ROUTER_DEFAULTS)}


def build_network(network: Plain) -> DiT:
    """Builds a DiT from plain keywords, with `routes` as dicts; raises ValueError for keywords that do not fit."""
    complete = read_network(network)
    kind = partial(FusingRouter, complete["hidden_size"]) if complete.pop("fusion") else Router
    router = kind(**{key: complete.pop(key) for key in ROUTER_DEFAULTS})
    return DiT(**{**complete, "routes": [Route(**route) for route in complete["routes"]]}, router=router)


class WithoutNormal(TorchFunctionMode):
    """Leaves out normal random starts: on the meta device they change nothing, and import torch's compiler (1 s)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Plain | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        return kwargs["tensor"] if func is nn.init.normal_ else func(*args, **kwargs)


def fit(state: Mapping[str, Tensor], network: Plain, whose: object) -> DiT:
    """Builds a network from keywords and gives it these weights; raises ValueError, with a tensor that does not fit."""
    with as_recorded(Path(str(whose))), torch.device("meta"), WithoutNormal():
        net = build_network(network)
    expected = net.state_dict()
    if odd := sorted(expected.keys() ^ state.keys()):
        raise ValueError(f"{whose} {'lacks' if odd[0] in expected else 'has'} the tensor {odd[0]}, unlike its network; "
                         f"tensors that differ: {len(odd)}")
    for key, value in state.items():
        if value.shape != expected[key].shape:
            raise ValueError(f"{whose} has {key} {tuple(value.shape)} instead of {tuple(expected[key].shape)}")
        if value.dtype not in FLOATS:
            raise ValueError(f"{whose} holds tensors in {str(value.dtype).removeprefix('torch.')}, {key} first: take "
                             f"the file in float32, bfloat16 or float16")
    net.load_state_dict(state, assign=True)
    return net


def build_schedule(net: DiT, record: Plain, seed: int) -> RouteSchedule:
    """Builds the schedule of a network's routes from its record, which is {} if they do not change."""
    settings = read(ScheduleSettings, record, "route_schedule: ").model_dump(exclude_none=True)
    changes = tuple((at, resolve_routes([Route(**route) for route in routes], len(net.blocks)))
                    for at, routes in settings.pop("changes", ()))
    schedule = RouteSchedule(net.routes, **settings, changes=changes, seed=seed)
    for routes in schedule.every:
        net.router.active_routes(resolve_routes(routes, len(net.blocks)), net.routes)
    return schedule


def diffusion_keywords(diffusion: Plain) -> Plain:
    """Completes a diffusion's name and keywords with defaults; raises ValueError for those that do not fit."""
    name = diffusion.get("name")
    choices = [*DIFFUSIONS, *extensions.names("diffusions")]
    if name not in choices:  # `name` may be a list
        raise ValueError(f"There is no diffusion {name!r}; choose one of {', '.join(choices)}.")
    return read(keywords(diffusion_class(name), name=(str, ...)), diffusion, f"diffusion={name}: ").model_dump()


def diffusion_class(name: str) -> type:
    """Returns the class of a diffusion's name; raises ValueError for a name that has none."""
    return DIFFUSIONS.get(name) or extensions.find("diffusions", name)


def build_diffusion(diffusion: Plain) -> EDM | RF:
    """Builds a diffusion from its name and keywords; raises ValueError for those that do not fit."""
    complete = diffusion_keywords(diffusion)
    return diffusion_class(complete.pop("name"))(**complete)
