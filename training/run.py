"""Builds a training run at step 0 from its settings.

train.py takes its steps, and run_folder.py saves and resumes it. Mistakes in the settings are found here, before
anything slow starts.
"""

import copy
import math
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from autoencoder import Autoencoder
from dit import DiT
from latents.folder import Latents, open_latents
from latents.loader import check_batch_size
from objectives import DiffusionLoss, build_objective, trained_parameters
from runtime import ranks, sharding
from runtime.device import DTYPES, DType
from sampling.options import labels_of, parse_classes, parse_range
from scoring.features import load_extractor
from scoring.score import Evaluator, available_metrics, open_reference
from training import speed
from training.optimizers import build_optimizer
from training.run_record import latent_shape, run_record
from training.settings import SamplesSettings, SizedSettings, TrainSettings, sized_like
from weights import autoencoders, checkpoints
from weights.averages import names_of
from weights.loading import find_on_main_rank
from weights.records import build_diffusion, build_network, build_schedule

GRID_CLASSES = 10  # a grid shows at most this many classes unless some are named

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

    cfg: SizedSettings
    accelerator: Accelerator
    folder: Path
    latents: Latents
    decoder: Autoencoder | None    # latents (B, C, h, w) -> images; None: nothing is sampled
    grid: tuple[list[int], list[int]] | None    # seeds and labels of the sample grids; None: no grids
    evaluator: Evaluator | None             # scores the averages; None: nothing is scored
    record: dict[str, Any]                            # network, diffusion, data and more, for checkpoints
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
    def sampling_precision(self) -> DType:
        return "bf16" if self.cfg.precision == "fp8" else self.cfg.precision  # averages have no float8 layers

    @property
    def summary(self) -> str:
        """Describes network, data, device and length in a line."""
        cfg, latents, accelerator = self.cfg, self.latents, self.accelerator
        return (
            f"{cfg.name}: {cfg.model.backbone_type} of width {self.record['network']['hidden_size']} and depth "
            f"{len(self.model.blocks)}, {sharding.size(self.model) / 1e6:.1f}M parameters, "
            f"routes {self.objective.schedule}; {latents.count:,} latents of {latents.shape} in "
            f"{latents.num_classes} classes; {accelerator.num_processes} × {accelerator.device.type}, "
            f"{cfg.precision}; {cfg.steps} steps of {cfg.batch_size}")

    @property
    def checkpoint(self) -> Path:
        """The folder of this step's checkpoint."""
        return checkpoints.step_folder(self.folder, self.step)

    @property
    def grid_path(self) -> Path:
        return self.folder / "samples" / f"step-{self.step:08d}.png"

    def is_diverging(self, total: dict[str, float]) -> bool:
        """True if the last step was skipped, or the loss is far above the lowest.

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
        latents = open_latents(cfg.data.path)
    num_classes = cfg.data.num_classes or latents.num_classes
    latents.require(shape=latent_shape(cfg, latents), num_classes=num_classes)
    return latents


def choose_sizes(cfg: TrainSettings, accelerator: Accelerator, count: int) -> SizedSettings:
    """Chooses a batch size or number of steps that is null by the number of latents, and prints both."""
    parts = accelerator.num_processes * cfg.grad_accum_steps
    batch_size = cfg.batch_size or max(parts, min(64, count // 4) // parts * parts)
    steps = min(100_000, max(5_000, 200 * count // batch_size)) if cfg.steps is None else cfg.steps
    if (batch_size, steps) != (cfg.batch_size, cfg.steps):
        accelerator.print(f"For {count:,} latents: batch_size={batch_size} steps={steps}. Set either to change it.")
    check_batch_size(batch_size, count, accelerator.num_processes, cfg.grad_accum_steps)
    return SizedSettings.model_construct(**dict(cfg) | {"batch_size": batch_size, "steps": steps})


def open_decoder(
    cfg: TrainSettings, accelerator: Accelerator, latents: Latents, autoencoder: str,
) -> Autoencoder | None:
    """Loads what decodes grids and scored images; None if the run makes none.

    Prints a line if these latents cannot be decoded here.
    """
    if not cfg.evaluate.every and autoencoder == autoencoders.NONE:
        accelerator.print("autoencoder=none: these latents cannot be decoded here, so no grids are sampled; sample.py "
                          "writes latents with latents=true.")
        return None
    if not cfg.evaluate.every and not cfg.samples.every:
        return None
    try:
        return autoencoders.load_decoder(
            autoencoder, latents.shape, latents.convention, accelerator.device, DTYPES[cfg.decode_precision],
            batch_size=cfg.decode_batch_size, trusted=cfg.data.autoencoder is not None,
        )
    except ValueError as error:
        raise ValueError(f"{error} Set data.autoencoder= to another, or samples.every=0 evaluate.every=0 to train "
                         f"without pictures.") from error


def choose_grid(cfg: SamplesSettings, latents: Latents) -> tuple[list[int], list[int]]:
    """Returns seeds and labels of the sample grids."""
    seeds = parse_range("samples.seeds", cfg.seeds)
    classes = parse_classes("samples.classes", cfg.classes, latents.num_classes, latents.class_names,
                            latents.classes[:GRID_CLASSES])
    return seeds, labels_of(seeds, classes)


def open_evaluator(cfg: TrainSettings, accelerator: Accelerator, latents: Latents, side: int) -> Evaluator:
    """Opens the reference, and measures it on the features; decoded images have this side."""
    evaluate = cfg.evaluate
    if evaluate.reference is None:
        raise ValueError(f"evaluate.every={evaluate.every} needs evaluate.reference=<an npz, or images>; "
                         f"docs/evaluation.md explains how to get or make one.")
    extractor = load_extractor(accelerator, evaluate.features, evaluate.features_weights)
    reference = open_reference(
        accelerator, evaluate.reference, extractor, side, images_size=[side, side], key="evaluate.reference",
        autoencoder=cfg.data.autoencoder)
    metrics = available_metrics(extractor, reference)
    return Evaluator(extractor, reference, metrics).measured(accelerator, evaluate.batch_size)


def initial_network(cfg: TrainSettings, record: dict[str, Any], device: torch.device) -> DiT:
    """Builds the network, initialised by the seed, and moves it or this rank's shard of it to the device."""
    torch.manual_seed(cfg.seed)
    net = build_network(record["network"])
    if cfg.sharding == "none":
        return net.to(device)
    assert cfg.precision != "fp8"   # the settings were refused
    return sharding.shard(net, device, DTYPES[cfg.precision])


def make_run(cfg: TrainSettings, accelerator: Accelerator) -> Run:
    """Builds a run at step 0; raises ValueError, with the setting to change, for settings that cannot work."""
    if cfg.sharding == "fsdp" and not torch.distributed.is_initialized():
        raise ValueError("sharding=fsdp splits a network over ranks, but this is a single process: start it with "
                         "accelerate launch or torchrun, or set sharding=none.")
    if cfg.precision == "fp8":
        speed.check_float8(accelerator.device)
    if cfg.init_from is not None:
        latest = ranks.from_main(accelerator, partial(checkpoints.read_latest, Path(cfg.run_dir)))
        cfg = sized_like(cfg, latest[1]["network"] if latest else
                         find_on_main_rank(accelerator, cfg.init_from).record.network)
    latents = open_data(cfg, accelerator)
    cfg = choose_sizes(cfg, accelerator, latents.count)
    record = run_record(cfg, latents, accelerator.num_processes, accelerator.device)
    model = initial_network(cfg, record, accelerator.device)
    schedule = build_schedule(model, record["route_schedule"], cfg.seed)
    # A sharded network cannot be copied. Averages are not frozen, as autocast caches casts of trainable weights only.
    averages = {}
    for name in names_of(cfg.ema.decay):
        net = initial_network(cfg, record, accelerator.device) if cfg.sharding == "fsdp" else copy.deepcopy(model)
        averages[name] = net.eval()
    if cfg.precision == "fp8":
        speed.multiply_in_float8(model)
    shapes = {name: tuple(array.shape) for name, array in latents.meta.arrays.items()}
    objective = build_objective(model, build_diffusion(record["diffusion"]), record["objective"], shapes, schedule)
    objective.to(accelerator.device)
    if cfg.sharding == "fsdp":
        sharding.shard_rest(objective, model, accelerator.device)
    optimizer = build_optimizer(trained_parameters(objective), **cfg.optimizer.model_dump(
        exclude={"warmup_steps", "schedule", "clip_norm"}))
    # This comes last, as it may take minutes.
    decoder = open_decoder(cfg, accelerator, latents, record["data"]["autoencoder"])
    grid = choose_grid(cfg.samples, latents) if decoder and cfg.samples.every else None
    evaluator = (open_evaluator(cfg, accelerator, latents, latents.shape[1] * decoder.downsample)
                 if decoder and cfg.evaluate.every else None)
    return Run(cfg, accelerator, Path(cfg.run_dir), latents, decoder, grid, evaluator, record, model, averages,
               objective, optimizer, Sums(accelerator.device, objective.terms))
