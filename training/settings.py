"""The settings of configs/config.yaml and its groups, with their types and ranges."""

import os.path
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from dit import DiT_models, Init
from latents.folder import KINDS
from routing_module import Router
from runtime.device import DTYPES
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
    one_of,
    refuse,
)
from scoring import results
from scoring.features import Features
from training import speed
from weights.averages import NARROWEST, WIDEST, WeightsName, kinds
from weights.others import FAMILIES
from weights.records import RouteSettings, ScheduleSettings, check_objective, keywords

# A keyword of an objective. Its class knows which ones are paths.
Keyword = Annotated[Any, AfterValidator(lambda value: os.path.expanduser(value) if isinstance(value, str) else value)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class ModelSettings(keywords(Router)):
    name: Text
    backbone_type: one_of(DiT_models)
    init: Init
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
    kind: one_of(KINDS) | None
    scale: Positive | None
    on_device: bool
    autoencoder: Location | None
    grid_classes: Selection | None


class LoRASettings(Settings):
    rank: Count | None
    alpha: Positive | None
    targets: NonEmptyList[Text] | None


class AdamWSettings(Settings):
    name: Literal["adamw"]
    lr: NotNegative
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)]
    eps: Annotated[float, Field(ge=1e-20, le=1)]  # at 0 a gradient of 0 makes NaN
    weight_decay: NotNegative
    warmup_steps: NonNegativeInt
    schedule: one_of(["constant", "cosine"])
    clip_norm: Positive | None


class MuonSettings(AdamWSettings):
    name: Literal["muon"]
    matrix_lr: Positive | None = None
    momentum: Decay = 0.95


class EMASettings(Settings):
    decay: Decay | NonEmptyList[Decay]  # with 1 it would never leave the untrained network
    warmup: bool
    std: list[Annotated[float, Field(ge=NARROWEST, lt=WIDEST)]]
    snapshot_every: Count | None


class LogSettings(Settings):
    every: Count
    trackers: list[one_of(["tensorboard", "wandb"])]


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
    weights: WeightsName


class EvaluateSettings(Settings):
    every: NonNegativeInt
    reference: Location | None
    features: Features
    features_weights: Location | None
    sha256: str | None
    metrics: results.Metrics | None
    num_samples: results.AtLeastTwo
    seed: NonNegativeInt
    guidance_scales: NonEmptyList[Number | None]
    weights: NonEmptyList[WeightsName]
    num_steps: Steps
    batch_size: Count


# A resumed run does not announce changes of these: names, paths, what is shown or kept, speed, and what only the first
# start reads. For the rest of them the checkpoint's record is compared, in which null has become a number.
WITHOUT_EFFECT = {
    "name", "run_dir", "log", "checkpoint", "samples", "evaluate", "published", "decode_precision", "decode_batch_size",
    "max_skipped_in_row", "activation_checkpointing", "init_from", "diffusion_name", "new_label_table", "lora", "seed",
    "batch_size", "steps", "model", "diffusion", "objective", "route_schedule", "data.name", "data.path",
    "data.channels", "data.input_size", "data.num_classes", "data.on_device", "data.autoencoder", "data.grid_classes",
}


class TrainSettings(Settings):
    name: Text
    run_dir: Location
    init_from: Location | None
    diffusion_name: one_of(FAMILIES) | None
    new_label_table: bool
    lora: LoRASettings
    seed: Annotated[int, Field(ge=0, le=2**64 - 1)]  # as torch takes them
    steps: NonNegativeInt | None
    batch_size: Count | None
    grad_accum_steps: Count
    label_dropout: Fraction
    keep_masked: bool
    max_skipped_in_row: Count
    precision: one_of(speed.PRECISIONS)
    decode_precision: one_of(DTYPES)
    decode_batch_size: Count | None
    tf32: bool
    sharding: one_of(["none", "fsdp"])
    compile: bool | one_of(speed.COMPILE_MODES)
    activation_checkpointing: bool
    cpu: bool
    model: ModelSettings
    data: DataSettings
    diffusion: dict
    objective: dict[str, dict[str, Keyword]]
    route_schedule: ScheduleSettings
    optimizer: Annotated[AdamWSettings | MuonSettings, Field(discriminator="name")]
    ema: EMASettings
    log: LogSettings
    checkpoint: CheckpointSettings
    samples: SamplesSettings
    evaluate: EvaluateSettings
    published: results.Published | None


# With only these typed beside experiment=, a run is still the one of the experiment's published scores.
AS_PUBLISHED = (
    "experiment", "name", "run_dir", "seed", "steps", "grad_accum_steps", "max_skipped_in_row", "precision",
    "decode_precision", "decode_batch_size", "tf32", "sharding", "compile", "activation_checkpointing", "cpu",
    "data.path", "data.kind", "data.scale", "data.on_device", "data.autoencoder", "data.grid_classes", "log",
    "checkpoint", "samples", "evaluate",
)


def check_settings(cfg: TrainSettings, cli_overrides: Mapping[str, str]) -> TrainSettings:
    """Returns the settings to train with; it drops published scores if the typed settings make another run.

    Raises ValueError for settings that do not go together.
    """
    check_run_dir(cfg)
    check_pairs(cfg, cli_overrides)
    check_effect(cfg, cli_overrides)
    check_chosen(cfg, cli_overrides)
    check_objective(cfg.objective)
    check_averages(cfg)
    check_scales(cfg)
    if "optimizer.warmup_steps" in cli_overrides and (unfinished := describe_unfinished_warmup(cfg)):
        raise ValueError(f"{unfinished} Shorten it.")
    if cfg.lora.rank is not None and cfg.init_from is None:
        raise ValueError(f"lora.rank={cfg.lora.rank} adapts trained weights: give init_from=<a run, a checkpoint or a "
                         f"weights file>.")
    is_as_published = any(key.partition(".")[0] == "published" for key in cli_overrides) or all(
        key.partition(".")[0] in AS_PUBLISHED or key in AS_PUBLISHED for key in cli_overrides)
    return cfg if is_as_published else cfg.model_copy(update={"published": None})


def describe_unfinished_warmup(cfg: TrainSettings) -> str | None:
    """Describes a warmup that is longer than the run; None for a shorter one, and where steps are not chosen yet."""
    warmup, steps = cfg.optimizer.warmup_steps, cfg.steps
    if steps is None or warmup <= steps:
        return None
    return (f"optimizer.warmup_steps={warmup} is longer than the run: at steps={steps} the learning rate ends at "
            f"{steps / warmup:.0%} of optimizer.lr.")


def check_pairs(cfg: TrainSettings, cli_overrides: Mapping[str, str]) -> None:
    """Raises ValueError for two settings that are not supported together, or where one replaces the other."""
    adapter, muon, fsdp = f"lora.rank={cfg.lora.rank}", "optimizer=muon", "sharding=fsdp"
    fp8, fp16, graphs = "precision=fp8", "precision=fp16", f"compile={as_text(cfg.compile)}"
    preset, routes = (f"{key}={cli_overrides.get(key)}" for key in ("routes", "model.routes"))
    labels, network = "new_label_table=true", f"model={'sprint' if cfg.model.fusion else cli_overrides.get('model')}"
    is_set = {
        adapter: cfg.lora.rank is not None, muon: cfg.optimizer.name == "muon", fsdp: cfg.sharding == "fsdp",
        fp8: cfg.precision == "fp8", fp16: cfg.precision == "fp16", graphs: cfg.compile in speed.CUDA_GRAPHS,
        labels: cfg.new_label_table, preset: cli_overrides.get("routes", "null") != "null",
        routes: "model.routes" in cli_overrides,
        network: cfg.model.fusion or cli_overrides.get("model", "tread") != "tread",
    }
    # CUDA graphs need weights at fixed addresses, and FSDP gathers them in each pass. An adapter trains no table.
    for one, other in ((adapter, muon), (adapter, fp8), (adapter, fsdp), (adapter, labels), (muon, fp8), (fsdp, fp8),
                       (fsdp, fp16), (fsdp, graphs), (preset, routes), (preset, network)):
        if is_set[one] and is_set[other]:
            raise ValueError(f"{one} and {other} do not go together: leave one out.")


def check_chosen(cfg: TrainSettings, cli_overrides: Mapping[str, str]) -> None:
    """Raises ValueError where keys of an experiment would add to the network or objective that is typed with it."""
    if cli_overrides.get("model") == "dit" and cfg.model.routes and not any("routes" in key for key in cli_overrides):
        raise ValueError("model=dit would train on a route, as the experiment sets model.routes: write model.routes=[] "
                         "as well.")
    if "objective" in cli_overrides:
        chosen = re.findall(r"\w+", cli_overrides["objective"].replace("null", ""))
        added = [name for name in cfg.objective
                 if name not in chosen and not any(key.startswith(f"objective.{name}") for key in cli_overrides)]
        if added and {*chosen} <= {*cfg.objective}:  # a file's name may differ from its objective's
            both = f"objective=[{','.join([*added, *chosen])}] for all of them, or " if chosen else ""
            raise ValueError(f"objective={cli_overrides['objective']} would train {added[0]} as well, which the "
                             f"experiment sets: write {both}~objective.{added[0]} to leave it out.")


def check_averages(cfg: TrainSettings) -> None:
    """Raises ValueError for an average that is named twice, and for names of averages that the run does not track."""
    tracked = kinds(cfg.ema.decay, cfg.ema.std)
    if len({*tracked.values()}) < len(cfg.ema.std) + (len(cfg.ema.decay) if isinstance(cfg.ema.decay, list) else 1):
        raise ValueError(f"ema.decay={as_text(cfg.ema.decay)} ema.std={as_text(cfg.ema.std)} name an average twice: "
                         f"leave one out.")
    for key, names in (("samples.weights", [cfg.samples.weights]), ("evaluate.weights", cfg.evaluate.weights)):
        if untracked := [name for name in names if name not in tracked]:
            raise ValueError(f"{key} names {untracked[0]}, but this run tracks {', '.join(tracked)}: choose one of "
                             f"them, or set ema.decay and ema.std.")


def check_scales(cfg: TrainSettings) -> None:
    """Raises ValueError for guided evaluations of a network whose null label is not trained."""
    guided = [scale for scale in cfg.evaluate.guidance_scales if scale not in (None, 1)]
    if cfg.evaluate.every and guided and not cfg.label_dropout:
        raise ValueError(f"evaluate.guidance_scales={as_text(cfg.evaluate.guidance_scales)} guides by the null label, "
                         f"which label_dropout=0 does not train: set label_dropout=0.1, or leave the scale out.")


def check_run_dir(cfg: TrainSettings) -> None:
    """Raises ValueError for a run's folder that is, or lies in, a folder with another purpose."""
    run_dir, data = Path(cfg.run_dir).resolve(), cfg.data.path and Path(cfg.data.path).resolve()
    is_of_runs = any(run_dir.glob("*/checkpoints")) and not (run_dir / "checkpoints").is_dir()
    conflicts = []
    if run_dir in (Path.cwd(), *Path.cwd().parents):
        conflicts.append("is the current folder or one around it")
    if run_dir == Path("runs").resolve() or is_of_runs:
        conflicts.append("is the folder of all runs, not of one")
    for folder in (run_dir, *run_dir.parents):
        if folder == data or any(folder.glob("latents-*.npy")):
            conflicts.append(f"lies in the data folder {folder}")
        if folder != run_dir and (folder / "checkpoints").is_dir() and (folder / "metrics.jsonl").is_file():
            conflicts.append(f"lies in the run {folder}")
    if conflicts:
        raise ValueError(f"run_dir={cfg.run_dir} {conflicts[0]}: give another folder, such as runs/first, or another "
                         f"name=.")


def check_effect(cfg: TrainSettings, cli_overrides: Mapping[str, str]) -> None:
    """Raises ValueError for typed settings that have no effect because of others; a preset may have some."""
    model = cfg.model
    for is_read, names, why in (
        (model.routes, ["model.selection", "route_schedule"], "model.routes is empty, so all tokens are kept"),
        (model.selection == "l1", ["model.l1_reg", "model.inverse"], "model.selection=l1 alone reads it"),
        (model.routes or not cfg.keep_masked, ["keep_masked"], "model.routes is empty, so all tokens are kept"),
        (cfg.init_from, ["diffusion_name", "new_label_table"], "it describes the weights of init_from=<weights>"),
        (cfg.lora.rank, ["lora.alpha", "lora.targets"], "lora.rank=null makes no adapter"),
        (cfg.evaluate.every or "evaluate.every" in cli_overrides, ["evaluate"],
         f"nothing is scored in training; give evaluate.every={cfg.checkpoint.every} as well"),
        (cfg.ema.std, ["ema.snapshot_every"], "only power-function averages have snapshots; give ema.std=[0.05,0.10]"),
        (not cfg.ema.snapshot_every or cfg.ema.snapshot_every % cfg.checkpoint.every == 0, ["ema.snapshot_every"],
         f"snapshots are kept from checkpoints, which are saved every checkpoint.every={cfg.checkpoint.every} steps; "
         f"give a multiple of that"),
        (cfg.checkpoint.keep_every % cfg.checkpoint.every == 0, ["checkpoint.keep_every"],
         f"it keeps checkpoints, which are saved every checkpoint.every={cfg.checkpoint.every} steps; give a "
         f"multiple of that"),
    ):
        if not is_read:
            refuse(cli_overrides, *names, why=why)
