"""The settings of configs/config.yaml and its groups, with their types and ranges."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from omegaconf import DictConfig, OmegaConf
from pydantic import AfterValidator, Field

from dit import DiT_models, Init
from objectives import class_of
from routing_module import Selection as TokenSelection
from runtime.device import DType, multiplies_bf16
from runtime.schema import (
    Classes,
    Count,
    Fraction,
    Location,
    NonEmptyList,
    NonNegativeInt,
    NotNegative,
    Number,
    Positive,
    Selection,
    Settings,
    Size,
    Steps,
    Text,
    as_text,
    read,
    refuse,
)
from scoring.features import Features
from scoring.results import AtLeastTwo
from training.speed import Compile, Precision
from weights.records import ScheduleSettings, settings_of

if TYPE_CHECKING:   # a type that is made of Route's keywords is none to a type checker
    from weights.records import Keywords as RouteSettings
else:
    from weights.records import RouteSettings


def size_of(backbone_type: str) -> str:
    """Returns the size in a network's name: xl2 for DiT-XL/2, and b2_mamba for Mamba-B/2."""
    family, _, size = str(backbone_type).lower().replace("/", "").partition("-")
    return size if family.endswith("dit") else f"{size}_{family}"


def for_depth(blocks: Mapping[int, int], _root_: DictConfig) -> int:
    """Returns the block for the network's depth; raises ValueError for a depth that the mapping lacks."""
    model = _root_.model
    if model.backbone_type not in DiT_models:
        return 0  # the settings are refused for it
    depth = model.depth or DiT_models[model.backbone_type].keywords["depth"]
    if depth not in blocks:
        raise ValueError(f"model={model.name} has routes for {' and '.join(map(str, blocks))} blocks, and "
                         f"{model.backbone_type} has {depth} here: write routes for it, as "
                         f"model.routes=[{{start_layer_idx: 0, end_layer_idx: 9, selection_ratio: 0.5, x_T: 1}}].")
    return blocks[depth]


def cpu_precision() -> str:
    """Returns bf16 where the processor has instructions for it, and elsewhere fp32."""
    return "bf16" if multiplies_bf16(torch.device("cpu")) else "fp32"


# In a YAML: ${size_of:${model.backbone_type}}, ${for_depth:{12:4,28:10}}, ${cpu_precision:}
for resolver in (size_of, for_depth, cpu_precision):
    OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)


def known(backbone_type: str) -> str:
    """Returns a name of DiT_models; raises ValueError for another."""
    if backbone_type not in DiT_models:
        raise ValueError(f"backbone_type={backbone_type}: it should be one of {', '.join(DiT_models)}.")
    return backbone_type


Decay = Annotated[float, Field(ge=0, lt=1)]


class ModelSettings(Settings):
    name: Text
    backbone_type: Annotated[str, AfterValidator(known)]
    init: Init
    selection: TokenSelection
    qk_norm: bool
    routes: list[RouteSettings]
    fusion: bool
    hidden_size: Size | None
    depth: Size | None
    num_heads: Size | None
    patch_size: Size | None


class DataSettings(Settings):
    name: Text
    path: Location | None
    channels: Size | None
    input_size: Size | None
    num_classes: Classes | None
    autoencoder: Location | None
    grid_classes: Selection | None


class OptimizerSettings(Settings):
    lr: NotNegative
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)]
    eps: Annotated[float, Field(ge=1e-20, le=1)]  # at 0 a gradient of 0 makes NaN
    weight_decay: NotNegative
    warmup_steps: NonNegativeInt
    schedule: Literal["constant", "cosine"]
    clip_norm: Positive | None


class AdamWSettings(OptimizerSettings):
    name: Literal["adamw"]


class MuonSettings(OptimizerSettings):
    name: Literal["muon"]
    matrix_lr: Positive | None = None
    momentum: Decay = 0.95


class EMASettings(Settings):
    decay: Decay | NonEmptyList[Decay]  # with 1 it would never leave the untrained network
    warmup: bool


class LogSettings(Settings):
    every: Count
    trackers: list[Literal["tensorboard", "wandb"]]


class CheckpointSettings(Settings):
    every: Count
    keep_last: Count
    keep_every: NonNegativeInt


class SamplesSettings(Settings):
    every: NonNegativeInt
    at_start: bool
    seeds: Selection
    classes: Selection | None
    num_steps: Steps
    batch_size: Count


class EvaluateSettings(Settings):
    every: NonNegativeInt
    reference: Location | None
    features: Features
    features_weights: Location | None
    num_samples: AtLeastTwo
    guidance_scales: NonEmptyList[Number | None]
    num_steps: Steps
    batch_size: Count


# Settings in which two runs may differ and still be the same: names, paths, what is shown or kept, length and device.
WITHOUT_EFFECT = {
    "name", "run_dir", "log", "checkpoint", "samples", "evaluate", "decode_precision", "decode_batch_size",
    "activation_checkpointing", "init_from", "steps", "compile", "cpu", "data.name", "data.path", "data.channels",
    "data.input_size", "data.num_classes", "data.autoencoder", "data.grid_classes",
}
ONLY_AT_START = {"model.name", "model.init", "new_label_table"}  # a resumed run does not read them
# What a run takes from the weights of init_from= unless it is typed: `check_settings` leaves what is as fields_set.
SIZES = {"model": ["hidden_size", "depth", "num_heads", "patch_size"],
         "data": ["channels", "input_size", "num_classes"]}


class TrainSettings(Settings):
    name: Text
    run_dir: Location
    init_from: Location | None
    new_label_table: bool
    seed: Annotated[int, Field(ge=0, le=2**64 - 1)]  # as torch takes them
    steps: NonNegativeInt | None
    batch_size: Count | None
    grad_accum_steps: Count
    label_dropout: Fraction
    precision: Precision
    decode_precision: DType
    decode_batch_size: Count | None
    tf32: bool
    sharding: Literal["none", "fsdp"]
    compile: Compile
    activation_checkpointing: bool
    cpu: bool
    model: ModelSettings
    data: DataSettings
    diffusion: dict[str, Any]
    objective: dict[str, Any]
    route_schedule: ScheduleSettings
    optimizer: Annotated[AdamWSettings | MuonSettings, Field(discriminator="name")]
    ema: EMASettings
    log: LogSettings
    checkpoint: CheckpointSettings
    samples: SamplesSettings
    evaluate: EvaluateSettings


class SizedSettings(TrainSettings):
    """Settings of a run whose length and batch are chosen."""

    steps: NonNegativeInt
    batch_size: Count


def check_settings(cfg: TrainSettings, cli_overrides: Mapping[str, str]) -> TrainSettings:
    """Returns the settings; raises ValueError for some that do not go together, or that would change nothing."""
    check_pairs(cfg)
    check_chosen(cfg, cli_overrides)
    check_effect(cfg, cli_overrides)
    check_objective(cfg.objective)
    check_scales(cfg)
    sized = {"size", "model.backbone_type"} & cli_overrides.keys()
    return cfg.model_copy(update={name: group.model_construct(
        {key for key in SIZES[name] if f"{name}.{key}" in cli_overrides or sized and name == "model"}, **dict(group))
        for name, group in (("model", cfg.model), ("data", cfg.data))})


def sized_like(cfg: TrainSettings, network: Mapping[str, object]) -> TrainSettings:
    """Takes the sizes that are not typed from a network's record; the shape of latents is then that of their folder."""
    model = {key: network[key] for key in SIZES["model"] if key not in cfg.model.model_fields_set}
    data = {key: None for key in SIZES["data"] if key not in cfg.data.model_fields_set}
    return cfg.model_copy(update={"model": cfg.model.model_copy(update=model),
                                  "data": cfg.data.model_copy(update=data)})


def check_pairs(cfg: TrainSettings) -> None:
    """Raises ValueError for two settings that are not supported together."""
    chosen = {f"optimizer={cfg.optimizer.name}", f"sharding={cfg.sharding}", f"precision={cfg.precision}",
              f"compile={cfg.compile}"}
    # CUDA graphs need weights at fixed addresses, and FSDP gathers them in each pass.
    for pair in (("optimizer=muon", "precision=fp8"), ("sharding=fsdp", "precision=fp8"),
                 ("sharding=fsdp", "precision=fp16"), ("sharding=fsdp", "compile=reduce-overhead")):
        if chosen.issuperset(pair):
            raise ValueError(f"{' and '.join(pair)} do not go together: leave one out.")


def check_chosen(cfg: TrainSettings, cli_overrides: Mapping[str, str]) -> None:
    """Raises ValueError where an experiment's keys would change a network that is typed with it, or its run's name."""
    model = cli_overrides.get("model")
    if model == "dit" and cfg.model.routes and not any("routes" in key for key in cli_overrides):
        raise ValueError("model=dit would train on a route, as the experiment sets model.routes: write model.routes=[] "
                         "as well.")
    kept = [f"model.{key}={size}" for key in SIZES["model"]
            if (size := getattr(cfg.model, key)) is not None and f"model.{key}" not in cli_overrides]
    if kept and "model.backbone_type" in cli_overrides:
        raise ValueError(f"model.backbone_type={cfg.model.backbone_type} would keep the experiment's {' '.join(kept)}: "
                         f"type these as well, or null for the sizes of that name.")
    is_named = (f"-{cfg.model.name}" in f"-{cfg.name}" or cfg.name.endswith(cfg.model.name)  # and not b2_tread_v1
                or {"name", "run_dir"} & cli_overrides.keys())
    if model and "experiment" in cli_overrides and not is_named:
        raise ValueError(f"name={cfg.name} is the experiment's name for its own network: beside model={model} give "
                         f"name=<another>.")


def check_effect(cfg: TrainSettings, cli_overrides: Mapping[str, str]) -> None:
    """Raises ValueError for typed settings that have no effect because of others; an experiment may have some."""
    model = cfg.model
    for is_read, names, why in (
        (size_of(model.backbone_type) == cli_overrides.get("size"), ["size"],
         f"the network is model.backbone_type={model.backbone_type}; set that instead"),
        (model.routes, ["model.selection", "route_schedule"], "model.routes is empty, so all tokens are kept"),
        (cfg.init_from, ["new_label_table"], "it is for the weights of init_from=<weights>"),
        (cfg.evaluate.every or "evaluate.every" in cli_overrides, ["evaluate"],
         f"nothing is scored in training; give evaluate.every={cfg.checkpoint.every} as well"),
    ):
        if not is_read:
            refuse(cli_overrides, *names, why=why)


def check_objective(objective: dict[str, Any]) -> None:
    """Raises ValueError for an objective without a file, and for a keyword that it lacks or of another type."""
    kind = class_of(objective.get("name"))
    read(settings_of(kind, name=(str | None, None)), objective, f"objective={objective.get('name')}: ")


def check_scales(cfg: TrainSettings) -> None:
    """Raises ValueError for guided evaluations of a network whose null label is not trained."""
    guided = [scale for scale in cfg.evaluate.guidance_scales if scale not in (None, 1)]
    if cfg.evaluate.every and guided and not cfg.label_dropout:
        raise ValueError(f"evaluate.guidance_scales={as_text(cfg.evaluate.guidance_scales)} guides by the null label, "
                         f"which label_dropout=0 does not train: set label_dropout=0.1, or leave the scale out.")
