"""Builds a training run at step 0 from its settings.

train.py takes its steps, and run_folder.py saves and resumes it. Mistakes in the settings are found here, before
anything slow starts.
"""

import copy
import math
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from dit import DiT, DiT_models
from edm import EDM
from latents.folder import Latents, open_latents
from latents.loader import check_batch_size
from objectives import DiffusionLoss, build_objective, trained_parameters
from rf import RF
from runtime import ranks, sharding
from runtime.command import commit
from runtime.device import DTYPES, device_name, multiplies_in_tf32
from sampling.options import (
    GRID_CLASSES,
    labels_of,
    parse_classes,
    parse_seeds,
    print_empty_classes,
    print_unscored_classes,
)
from scoring.features import load_extractor
from scoring.image_sets import require_array
from scoring.score import Evaluator, available_metrics, open_reference
from training import speed
from training.optimizers import build_optimizer
from training.settings import ModelSettings, TrainSettings, describe_unfinished_warmup, sized_like
from weights import autoencoders
from weights.averages import names_of
from weights.loading import find_on_main_rank, latest_checkpoint
from weights.records import ROUTER_DEFAULTS, build_diffusion, build_network, build_schedule

# ---- a run ----------------------------------------------------------------------------------------------------------


class Sums:
    """Sums since the last report, kept on the device; reading them waits for it."""

    def __init__(self, device: torch.device, terms: tuple[str, ...] = ()):
        self.names = ("loss", "grad_norm", "steps", *terms, "skipped", "skipped_in_row")
        self.values = torch.zeros(len(self.names), dtype=torch.float64, device=device)

    def add(self, loss: Tensor, grad_norm: Tensor, skipped: Tensor, terms: Tensor) -> None:
        values = torch.cat([torch.stack([loss, grad_norm, torch.ones_like(loss)]), terms])
        self.values[:-2] += torch.where(skipped, 0, values)
        self.values[-2] += skipped
        self.values[-1].add_(1).mul_(skipped)

    def over_ranks(self, accelerator: Accelerator) -> dict[str, float]:
        """Returns the sums, averaged over ranks, by name; waits for the device."""
        return dict(zip(self.names, accelerator.reduce(self.values.clone(), "mean").tolist(), strict=True))

    def reset(self) -> None:
        """Clears the sums for the next report, but not the counts of skipped steps."""
        self.values[:-2].zero_()


@dataclass
class Run:
    """A training run: its parts and its progress."""

    cfg: TrainSettings
    accelerator: Accelerator
    folder: Path
    latents: Latents
    decode: Callable[[Tensor], Tensor] | None   # latents (B, C, h, w) -> images; None: nothing is sampled
    grid: tuple[list[int], list[int]] | None    # seeds and labels of the sample grids; None: no grids
    evaluator: Evaluator | None             # scores the averages; None: nothing is scored
    record: dict                            # network, diffusion, data and more, for checkpoints
    model: DiT                              # the plain network, which is saved
    averages: dict[str, DiT]                # averages of its weights, by name; the first is ema
    objective: DiffusionLoss                # what is minimised; contains the network
    optimizer: torch.optim.Optimizer
    sums: Sums
    step: int = 0
    saved: int = 0                          # the step of the latest checkpoint
    images: int = 0
    elapsed_before: float = 0.0             # seconds of training until this process resumed it
    started: float = 0.0                    # this process's clock at its first step
    run_id: str = ""
    lowest_loss: float = math.inf           # the lowest in any report
    seconds_paused: float = 0.0             # of saving, sampling and scoring since the last report
    reported_loss: float = 0.0              # the loss in the last report
    scores_compiled: bool = False           # whether the averages that are scored are compiled
    lock: object = None                     # the main rank's lock on the folder, held until the process ends

    @property
    def elapsed(self) -> float:
        return self.elapsed_before + time.perf_counter() - self.started

    @property
    def progress(self) -> dict:
        """The progress that meta.json records."""
        return {"step": self.step, "images": self.images, "elapsed_s": self.elapsed, "run_id": self.run_id,
                "lowest_loss": self.lowest_loss if math.isfinite(self.lowest_loss) else None}

    @property
    def ema(self) -> DiT:
        return self.averages["ema"]

    @property
    def diffusion(self) -> EDM | RF:
        return self.objective.diffusion

    @property
    def autoencoder(self) -> str:
        return self.record["data"]["autoencoder"]

    @property
    def sampling_precision(self) -> str:
        return "bf16" if self.cfg.precision == "fp8" else self.cfg.precision  # averages have no float8 layers

    @property
    def summary(self) -> str:
        """Describes network, data, device and length in a line."""
        cfg, latents, accelerator = self.cfg, self.latents, self.accelerator
        return (
            f"{cfg.name}: {cfg.model.backbone_type}, {sharding.size(self.model) / 1e6:.1f}M parameters, "
            f"routes {self.objective.schedule}; {latents.count:,} latents of {latents.shape} in "
            f"{latents.num_classes} classes; {accelerator.num_processes} × {accelerator.device.type}, "
            f"{cfg.precision}; {cfg.steps} steps of {cfg.batch_size}")

    @property
    def grid_path(self) -> Path:
        return self.folder / "samples" / f"step-{self.step:08d}.png"

    def is_diverging(self, total: dict[str, float]) -> bool:
        """True if the sums show skipped steps, or a loss far above the lowest.

        Far means ten times the lowest. Where a term brings the loss near 0 or below, it means 0.9 above the lowest, as
        the diffusion's loss starts near 1.
        """
        loss = total["loss"] / total["steps"] if total["steps"] else self.reported_loss
        return total["skipped_in_row"] > 0 or not loss <= self.lowest_loss + 9 * max(abs(self.lowest_loss), 0.1)


# ---- its parts ------------------------------------------------------------------------------------------------------


def open_data(cfg: TrainSettings, accelerator: Accelerator) -> Latents:
    """Opens the latents; raises ValueError where they are missing or do not fit the settings."""
    if cfg.data.path is None:
        raise ValueError("Give the latents to train on: data.path=<folder>, as scripts/prepare_latents.py wrote it.")
    with accelerator.local_main_process_first(), warnings.catch_warnings():  # copied files are compared once
        if not accelerator.is_main_process:
            warnings.simplefilter("ignore")     # the main rank prints them
        latents = open_latents(cfg.data.path, cfg.data.verify and accelerator.is_local_main_process)
    num_classes = cfg.data.num_classes or latents.num_classes
    latents.require(shape=latent_shape(cfg, latents), num_classes=num_classes)
    print_empty_classes(accelerator, latents.classes, num_classes)
    return latents


def choose_sizes(cfg: TrainSettings, accelerator: Accelerator, count: int) -> TrainSettings:
    """Chooses a batch size or number of steps that is null by the number of latents, and prints both.

    Raises ValueError for a warmup that is longer than the chosen steps; only prints a line if they were set.
    """
    parts = accelerator.num_processes * cfg.grad_accum_steps
    batch_size, steps = cfg.batch_size, cfg.steps
    if batch_size is None:
        batch_size = max(parts, min(64, count // 4) // parts * parts)
    if steps is None:
        steps = min(100_000, max(5_000, 200 * count // batch_size))
    if (batch_size, steps) != (cfg.batch_size, cfg.steps):
        accelerator.print(f"For {count:,} latents: batch_size={batch_size} steps={steps}. Set either to change it.")
    check_batch_size(batch_size, count, accelerator.num_processes, cfg.grad_accum_steps)
    sized = cfg.model_copy(update={"batch_size": batch_size, "steps": steps})
    if unfinished := describe_unfinished_warmup(sized):
        if cfg.steps is None:
            raise ValueError(f"{unfinished} Shorten it.")
        accelerator.print(unfinished)
    return sized


def latent_shape(cfg: TrainSettings, latents: Latents) -> tuple[int, int, int]:
    side = cfg.data.input_size or latents.shape[1]
    return cfg.data.channels or latents.shape[0], side, side


def describe_network(model: ModelSettings, shape: tuple[int, int, int], num_classes: int) -> dict:
    """Returns the network's keywords, as its checkpoints record them, for latents of `shape` (C, h, w)."""
    unused = {"name", "backbone_type", *(ROUTER_DEFAULTS if model.selection == "random" else ()),
              *(() if model.fusion else ("fusion",))}
    return {
        **DiT_models[model.backbone_type].keywords, **model.model_dump(exclude=unused, exclude_none=True),
        "input_size": shape[1], "in_channels": shape[0], "num_classes": num_classes,
        "routes": [route.model_dump(exclude_defaults=True) for route in model.routes],
    }


def describe_schedule(cfg: TrainSettings) -> dict:
    """Returns the route schedule, with shares of the run as steps; {} if the routes never change."""
    def step_of(when: float) -> int:
        if when >= cfg.steps:
            raise ValueError(f"route_schedule changes routes at step {when}, but the run ends at steps={cfg.steps}: "
                             f"give an earlier step, a share of the run such as 0.85, or more steps.")
        return max(1, int(when * cfg.steps)) if when < 1 else when

    schedule = cfg.route_schedule.model_dump(exclude_defaults=True) if cfg.model.routes else {}
    if "changes" in schedule:
        schedule["changes"] = [[step_of(when), routes] for when, routes in schedule["changes"]]
    return {key: step_of(value) if key in ("dense_before", "dense_after") else value
            for key, value in schedule.items()}


def describe_run(cfg: TrainSettings, latents: Latents, world: int, device: torch.device) -> dict:
    """Returns what a checkpoint records of its run."""
    num_classes = cfg.data.num_classes or latents.num_classes
    network = describe_network(cfg.model, latent_shape(cfg, latents), num_classes)
    data = {"fingerprint": latents.fingerprint, "autoencoder": cfg.data.autoencoder or latents.autoencoder,
            "convention": latents.convention.record(), "class_names": latents.class_names,
            "display_names": latents.display_names,
            "classes": None if len(latents.classes) == num_classes else latents.classes}
    begun = {"step": 0, "commit": commit(), "device": device_name(device), "torch": torch.__version__,
             "tf32": multiplies_in_tf32(device), "python": platform.python_version()}
    return {
        "network": network, "diffusion": dict(cfg.diffusion), "data": data,
        "world": world, "seed": cfg.seed, "batch_size": cfg.batch_size, "optimizer": cfg.optimizer.name,
        "init_from": cfg.init_from, "parent": None, "null_label": cfg.label_dropout > 0,
        "config": cfg.model_dump(mode="json"), "history": [begun], "route_schedule": describe_schedule(cfg),
        "objective": cfg.objective if cfg.objective.get("name") else {},
    }


def open_sampling_and_scoring(
    cfg: TrainSettings, accelerator: Accelerator, latents: Latents, autoencoder: str,
) -> tuple[Callable | None, tuple[list[int], list[int]] | None, Evaluator | None]:
    """Loads what grids and scores need: a run's `decode`, `grid` and `evaluator`, each None if nothing needs it.

    Prints a line if these latents cannot be decoded here.
    """
    if not cfg.evaluate.every and (not cfg.samples.every or autoencoder == autoencoders.NONE):
        if autoencoder == autoencoders.NONE:
            accelerator.print("autoencoder=none: these latents cannot be decoded here, so no grids are sampled; "
                              "sample.py writes latents with latents=true.")
        return None, None, None
    try:
        decoder = autoencoders.load_decoder(
            autoencoder, latents.shape, latents.convention, accelerator.device, DTYPES[cfg.decode_precision],
            batch_size=cfg.decode_batch_size, trusted=cfg.data.autoencoder is not None,
        )
    except ValueError as error:
        raise ValueError(f"data.autoencoder: {error} Or set samples.every=0 evaluate.every=0 to train without "
                         f"pictures.") from error
    grid = evaluator = None
    if cfg.samples.every:
        seeds = parse_seeds("samples.seeds", cfg.samples.seeds)
        classes = parse_classes("samples.classes", cfg.samples.classes, latents.num_classes, latents.class_names,
                                latents.classes[:GRID_CLASSES])
        grid = seeds, labels_of(seeds, classes)
    if cfg.evaluate.every:
        if cfg.evaluate.reference is None:
            raise ValueError(f"evaluate.every={cfg.evaluate.every} needs evaluate.reference=<an npz, or images>; "
                             f"docs/evaluation.md explains how to get or make one.")
        require_array("evaluate.reference", cfg.evaluate.reference)
        try:
            extractor = load_extractor(accelerator, cfg.evaluate.features, cfg.evaluate.features_weights)
        except ValueError as error:
            raise ValueError(f"{error} Here they are evaluate.features= and evaluate.features_weights=.") from error
        side = latents.shape[1] * decoder.downsample  # the size of decoded images, to which photographs are scaled
        reference = open_reference(
            accelerator, cfg.evaluate.reference, extractor, side, reference_size=cfg.evaluate.reference_size,
            images_size=[side, side], key="evaluate.reference", autoencoder=cfg.data.autoencoder)
        metrics = available_metrics(extractor, reference, cfg.evaluate.metrics, cfg.evaluate.num_samples)
        print_unscored_classes(accelerator, cfg.evaluate.num_samples, latents.classes, "evaluate.num_samples")
        evaluator = Evaluator(extractor, reference, metrics).measured(accelerator, cfg.evaluate.batch_size)
    return decoder.decode, grid, evaluator


def initial_network(cfg: TrainSettings, record: dict, device: torch.device) -> DiT:
    """Builds the network, initialised by the seed, and moves it or this rank's shard of it to the device."""
    torch.manual_seed(cfg.seed)
    net = build_network(record["network"])
    return sharding.shard(net, device, DTYPES[cfg.precision]) if cfg.sharding == "fsdp" else net.to(device)


def make_run(cfg: TrainSettings, accelerator: Accelerator) -> Run:
    """Builds a run at step 0; raises ValueError, with the setting to change, for settings that cannot work."""
    if cfg.sharding == "fsdp" and not torch.distributed.is_initialized():
        raise ValueError("sharding=fsdp splits a network over ranks, but this is a single process: start it with "
                         "accelerate launch or torchrun, or set sharding=none.")
    if cfg.precision == "fp8":
        speed.check_float8(accelerator.device)
    if cfg.init_from is not None:
        latest = ranks.from_main(accelerator, partial(latest_checkpoint, Path(cfg.run_dir)))
        cfg = sized_like(cfg, latest[1]["network"] if latest else
                         find_on_main_rank(accelerator, cfg.init_from).record.network)
    latents = open_data(cfg, accelerator)
    cfg = choose_sizes(cfg, accelerator, latents.count)
    record = describe_run(cfg, latents, accelerator.num_processes, accelerator.device)
    model = initial_network(cfg, record, accelerator.device)
    schedule = build_schedule(model, record["route_schedule"], cfg.seed)
    # A sharded network cannot be copied. Averages are not frozen, as autocast caches casts of trainable weights only.
    averages = {}
    for name in names_of(cfg.ema.decay):
        net = initial_network(cfg, record, accelerator.device) if cfg.sharding == "fsdp" else copy.deepcopy(model)
        averages[name] = net.eval()
    if cfg.precision == "fp8":
        speed.multiply_in_float8(model)
    shapes = {name: array.shards[0].shape[1:] for name, array in latents.arrays.items()}
    objective = build_objective(model, build_diffusion(record["diffusion"]), record["objective"], shapes, schedule)
    objective.to(accelerator.device)
    if cfg.sharding == "fsdp":
        sharding.shard_rest(objective, model, accelerator.device)
    optimizer = build_optimizer(trained_parameters(objective), **cfg.optimizer.model_dump(
        exclude={"warmup_steps", "schedule", "clip_norm"}))
    # This comes last, as it may take minutes.
    sampling = open_sampling_and_scoring(cfg, accelerator, latents, record["data"]["autoencoder"])
    return Run(cfg, accelerator, Path(cfg.run_dir), latents, *sampling, record, model, averages, objective, optimizer,
               Sums(accelerator.device, objective.terms))
