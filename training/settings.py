"""The settings of configs/config.yaml and its groups, with their types and ranges."""

import os.path
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
    Location,
    NotNegative,
    Number,
    Positive,
    Selection,
    Settings,
    Share,
    Size,
    Steps,
    Text,
    Whole,
    as_text,
    one_of,
)
from scoring import results
from scoring.features import Features
from training import speed
from weights.averages import WIDEST, WeightsName, kinds
from weights.others import FAMILIES
from weights.records import RouteSettings, ScheduleSettings, check_objective, keywords

# Of an objective, whose own signature says which are paths.
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
    targets: Annotated[list[Text], Field(min_length=1)] | None


class AdamWSettings(Settings):
    name: Literal["adamw"]
    lr: NotNegative
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)]
    eps: Annotated[float, Field(ge=1e-20, le=1)]  # at 0 a gradient of 0 makes NaN
    weight_decay: NotNegative
    warmup_steps: Whole
    schedule: one_of(["constant", "cosine"])
    clip_norm: Positive | None


class MuonSettings(AdamWSettings):
    name: Literal["muon"]
    matrix_lr: Positive | None = None
    momentum: Decay = 0.95


class EMASettings(Settings):
    decay: Decay | Annotated[list[Decay], Field(min_length=1)]  # at 1 it would stay at the untrained network
    warmup: bool
    std: list[Annotated[float, Field(gt=0, lt=WIDEST)]]
    snapshot_every: Count | None


class LogSettings(Settings):
    every: Count
    trackers: list[one_of(["tensorboard", "wandb"])]


class CheckpointSettings(Settings):
    every: Count
    keep_last: Count
    keep_every: Whole


class SamplesSettings(Settings):
    every: Whole
    at_start: bool
    seeds: Selection
    classes: Selection | None
    num_steps: Steps
    batch_size: Count
    weights: WeightsName


class EvaluateSettings(Settings):
    every: Whole
    reference: Location | None
    features: Features
    features_weights: Location | None
    sha256: str | None
    metrics: results.Metrics | None
    num_samples: results.AtLeastTwo
    seed: Whole
    guidance_scales: Annotated[list[Number | None], Field(min_length=1)]
    weights: Annotated[list[WeightsName], Field(min_length=1)]
    num_steps: Steps
    batch_size: Count


# Changes of these are not announced on resuming: names, places, what is shown, kept or only faster, and what the first
# start alone reads. A record has the others' values, as null has become a number there.
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
    seed: Whole
    steps: Whole | None
    batch_size: Count | None
    grad_accum_steps: Count
    label_dropout: Share
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


def check_settings(cfg: TrainSettings) -> None:
    """Raises ValueError for settings that do not go together."""
    check_run_dir(cfg)
    check_effect(cfg)
    check_objective(cfg.objective)
    check_averages(cfg)
    lora = cfg.lora
    if cfg.new_label_table and (cfg.init_from is None or lora.rank is not None):
        raise ValueError("new_label_table=true is for init_from=<weights> on other classes, all of whose weights are "
                         "then trained: give init_from, and no lora.rank, whose adapter leaves the table as it is.")
    if lora.rank is None and (lora.alpha, lora.targets) != (None, None):
        raise ValueError(f"lora.alpha={lora.alpha} lora.targets={lora.targets} need an adapter, and lora.rank=null "
                         f"makes none: set lora.rank=16, for instance.")
    if lora.rank is not None and cfg.init_from is None:
        raise ValueError(f"lora.rank={lora.rank} adapts trained weights: give init_from=<a run, a checkpoint or a "
                         f"weights file>.")
    adapter, muon, fp8, fsdp = f"lora.rank={lora.rank}", "optimizer=muon", "precision=fp8", "sharding=fsdp"
    asked = {adapter: lora.rank is not None, muon: cfg.optimizer.name == "muon", fp8: cfg.precision == "fp8",
             fsdp: cfg.sharding == "fsdp"}
    for one, other in ((adapter, muon), (adapter, fp8), (adapter, fsdp), (muon, fp8)):
        if asked[one] and asked[other]:
            raise ValueError(f"{other} and {one} are not supported together: leave one out.")
    if cfg.sharding == "fsdp":
        if cfg.precision not in ("fp32", "bf16"):
            raise ValueError(f"sharding=fsdp trains in bf16 or fp32, not in precision={cfg.precision}: set "
                             f"precision=bf16, or sharding=none.")
        if cfg.compile in speed.CUDA_GRAPHS:
            raise ValueError(f"compile={cfg.compile} records CUDA graphs, which need weights at fixed addresses, and "
                             f"sharding=fsdp gathers them in each pass: set compile=true.")


def check_averages(cfg: TrainSettings) -> None:
    """Raises ValueError for averages that are one and the same, and for names of others than the run tracks."""
    tracked = kinds(cfg.ema.decay, cfg.ema.std)
    if len({*tracked.values()}) < len(cfg.ema.std) + (len(cfg.ema.decay) if isinstance(cfg.ema.decay, list) else 1):
        raise ValueError(f"ema.decay={as_text(cfg.ema.decay)} ema.std={as_text(cfg.ema.std)} name an average twice: "
                         f"leave one out.")
    for key, names in (("samples.weights", [cfg.samples.weights]), ("evaluate.weights", cfg.evaluate.weights)):
        if others := [name for name in names if name not in tracked]:
            raise ValueError(f"{key} names {others[0]}, and this run tracks {', '.join(tracked)}: choose among these, "
                             f"or set ema.decay and ema.std.")


def check_run_dir(cfg: TrainSettings) -> None:
    """Raises ValueError for a run's folder that is, or lies in, one with another purpose."""
    run_dir, data = Path(cfg.run_dir).resolve(), cfg.data.path and Path(cfg.data.path).resolve()
    if run_dir in (Path.cwd(), *Path.cwd().parents):
        raise ValueError(f"run_dir={cfg.run_dir} is the current folder or one around it: give another folder, such as "
                         f"runs/{cfg.name}.")
    if run_dir == Path("runs").resolve() or (
            any(run_dir.glob("*/checkpoints")) and not (run_dir / "checkpoints").is_dir()):
        raise ValueError(f"run_dir={cfg.run_dir} is the folder of runs, and not that of one: give one in it, such as "
                         f"run_dir={run_dir.name}/first, or another name=.")
    for folder in (run_dir, *run_dir.parents):
        if folder == data or any(folder.glob("latents-*.npy")):
            raise ValueError(f"run_dir={cfg.run_dir} lies in the data folder {folder}: give another, such as "
                             f"runs/{cfg.name}.")
        if folder != run_dir and (folder / "checkpoints").is_dir() and (folder / "metrics.jsonl").is_file():
            raise ValueError(f"run_dir={cfg.run_dir} lies in the run {folder}: give another, such as "
                             f"run_dir={folder}-2.")


def check_effect(cfg: TrainSettings) -> None:
    """Raises ValueError for settings that others make void; what a preset sets in vain is none of the user's."""
    model, preset, kind = cfg.model, cfg.typed.get("routes", "null"), cfg.typed.get("model", "tread")
    if preset != "null" and (kind != "tread" or model.fusion):
        raise ValueError(f"routes={preset} is a route for model=tread, and model={'sprint' if model.fusion else kind} "
                         f"has its own or none: leave one of the two out.")
    if preset != "null" and "model.routes" in cfg.typed:
        raise ValueError(f"model.routes={cfg.typed['model.routes']} takes the place of routes={preset}: leave one of "
                         f"the two out.")
    if any(route.drop_batch and not route.path_drop for route in model.routes):
        raise ValueError("drop_batch=true drops the path of no batch at path_drop=0: set both in model.routes.")
    for is_read, names, why in (
        (model.routes, ["model.selection", "route_schedule"], "model.routes is empty, so all tokens are kept"),
        (model.selection == "l1", ["model.l1_reg", "model.inverse"], "model.selection=l1 alone reads it"),
        (cfg.init_from, ["diffusion_name"], "it says whose weights init_from=<a weights file> has"),
        (cfg.evaluate.every or "evaluate.every" in cfg.typed, ["evaluate"],
         f"nothing is scored in training; give evaluate.every={cfg.checkpoint.every} as well"),
        (cfg.ema.std, ["ema.snapshot_every"], "only power-function averages have snapshots; give ema.std=[0.05,0.10]"),
        (not cfg.ema.snapshot_every or cfg.ema.snapshot_every % cfg.checkpoint.every == 0, ["ema.snapshot_every"],
         f"they are of checkpoints, and there is one every checkpoint.every={cfg.checkpoint.every} steps; give a "
         f"multiple of that"),
        (cfg.checkpoint.keep_every % cfg.checkpoint.every == 0, ["checkpoint.keep_every"],
         f"it keeps checkpoints, and there is one every checkpoint.every={cfg.checkpoint.every} steps; give a "
         f"multiple of that"),
    ):
        if not is_read:
            cfg.refuse(*names, why=why)
