"""A training run: its settings, its parts, where it stands, and the folder in which it can be stopped and gone on with.

train.py takes its steps. What a user may have got wrong is found here, before anything slow starts.
"""

import contextlib
import copy
import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from omegaconf import OmegaConf
from torch import Tensor

import autoencoder as autoencoders
from dit import DiT, DiT_models
from edm import EDM
from latents.folder import Latents, open_latents
from objectives import DiffusionLoss, Objective, build_objective, own_state, trained_parameters
from rf import RF
from runtime import files, ranks, sharding
from runtime.command import commit
from runtime.device import DTYPES, device_name, multiplies_in_tf32
from runtime.schema import (
    Count,
    NotNegative,
    Whole,
    read_record,
)
from sampling.options import GRID_CLASSES, empty_classes, labels_of, parse_classes, parse_range
from scoring import features, statistics
from training import speed
from training.optimizers import build_optimizer, load_optimizer, optimizer_tensors
from training.settings import ModelSettings, TrainSettings
from weights import checkpoint as checkpoints
from weights import lora as adapters
from weights.loading import Trained, latest_checkpoint, load_base, load_parent
from weights.records import (
    ROUTER_DEFAULTS,
    CheckpointRecord,
    DataRecord,
    build_diffusion,
    build_network,
    with_objective,
)


class TrainedData(DataRecord):
    fingerprint: str


class Meta(CheckpointRecord):
    """What meta.json must say for a run to go on; the last five have not always been there."""

    step: Whole
    images: Whole
    elapsed_s: NotNegative
    run_id: str
    data: TrainedData
    world: Count
    seed: Whole
    batch_size: Count
    scaler: dict | None = None
    init_from: str | None = None
    history: list[dict] = []
    lowest_loss: NotNegative | None = None
    objective: dict[str, dict] = {}


def check_kept(latents: Latents, model: DiT) -> None:
    """Raises ValueError where keep_masked=true cannot keep what it should; reads all masks."""
    if "weight" not in latents.arrays:
        raise ValueError(f"keep_masked=true needs masks, but {latents.where} has no masks-*.npy (docs/data.md): write "
                         f"them, or set keep_masked=false.")
    num_tokens = model.pos_embed.shape[1]
    most, image = latents.most_kept(model.patch_size)
    for route in model.routes:
        room = num_tokens - int(num_tokens * route.selection_ratio)
        if most > room:
            raise ValueError(f"keep_masked=true: the mask of image {image} keeps {most} of {num_tokens} tokens, but "
                             f"route {route} leaves only {room}. Set selection_ratio to {1 - most / num_tokens:.3g} or "
                             f"less in model.routes, or keep_masked=false.")


def check_batch_size(batch_size: int, world: int, num_parts: int, count: int) -> None:
    if batch_size % (world * num_parts):
        raise ValueError(f"batch_size={batch_size} counts the images of a whole step and must be a multiple of "
                         f"{world * num_parts}: {world} ranks × grad_accum_steps={num_parts}.")
    if batch_size > count:
        raise ValueError(f"batch_size={batch_size} is more than the {count} latents of the data set.")


def architecture(network: dict) -> dict:
    """Takes out of a network's keywords those that its weights depend on."""
    known = {"mlp_ratio": 4.0, "learn_sigma": False, "block": "dit", "qk_norm": False, **network}
    return {key: value for key, value in known.items() if key not in ("routes", "init", *ROUTER_DEFAULTS)}


def differing(old: object, new: object) -> tuple[object, object]:
    """Returns of two dicts only what differs, and anything else as it is."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return old, new
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return {key: old.get(key) for key in keys}, {key: new.get(key) for key in keys}


def check_resumable(meta: dict, now: dict, run_dir: Path) -> list[str]:
    """Compares a checkpoint's record with this run's; returns what has changed and may, as sentences.

    Raises ValueError for what cannot be continued: another network, another diffusion, another data set.
    """
    def facts(record: dict) -> dict:
        diffusion, objective = with_objective(record["diffusion"], record.get("objective", {}))
        return {"network": architecture(record["network"]), "diffusion": diffusion, "objective": objective,
                "data set": record["data"]["fingerprint"], "init_from": record.get("init_from"),
                "adapter": {**(record.get("lora") or {"rank": None}), "base": None}}

    for (fact, old), new in zip(facts(meta).items(), facts(now).values(), strict=True):
        if old != new:
            old, new = differing(old, new)
            raise ValueError(f"{run_dir} was trained with another {fact}, so it cannot go on: it has {old}, this "
                             f"command {new}. Start a run of its own with name=<another>, or give the settings that "
                             f"it began with.")
    was, is_now = ({"routes": [], **ROUTER_DEFAULTS, **record["network"], **record} for record in (meta, now))
    return [f"{key} was {was[key]} and is now {is_now[key]}"
            for key in ("world", "seed", "batch_size", "routes", *ROUTER_DEFAULTS) if was[key] != is_now[key]]


# ---- a run ----------------------------------------------------------------------------------------------------------


class Sums:
    """Sums since the last report, on the device; reading them waits for it."""

    def __init__(self, device: torch.device, terms: tuple[str, ...] = ()):
        self.names = ("loss", "grad_norm", "steps", *terms, "skipped", "skipped_in_row")
        self.values = torch.zeros(len(self.names), dtype=torch.float64, device=device)

    def add(self, loss: Tensor, grad_norm: Tensor, skipped: Tensor, terms: Tensor) -> None:
        taken = torch.cat([torch.stack([loss, grad_norm, torch.ones_like(loss)]), terms])
        self.values[:-2] += torch.where(skipped, 0, taken)
        self.values[-2] += skipped
        self.values[-1].add_(1).mul_(skipped)

    def over_ranks(self, accelerator: Accelerator) -> dict[str, float]:
        """Returns the sums, averaged over ranks, by name; waits for the device."""
        return dict(zip(self.names, accelerator.reduce(self.values.clone(), "mean").tolist(), strict=True))

    def start_again(self) -> None:
        """Begins the next report's sums; the skipped steps are counted from the run's beginning."""
        self.values[:-2].zero_()


@dataclass
class Grid:
    """What a sample grid is drawn of."""

    decode: Callable[[Tensor], Tensor]
    seeds: list[int]
    labels: list[int]


@dataclass
class Evaluation:
    """What the EMA weights are scored with."""

    decode: Callable[[Tensor], Tensor]
    extractor: features.Extractor
    reference: statistics.Reference
    metrics: list[str]


@dataclass
class Run:
    """A training run: its parts, and where it stands. What reports, draws, scores and saves is handed one."""

    cfg: TrainSettings
    accelerator: Accelerator
    folder: Path
    latents: Latents
    grid: Grid | None
    evaluation: Evaluation | None
    record: dict                            # what a checkpoint says of network, diffusion and data
    model: DiT                              # the plain network, which is saved
    ema: DiT
    objective: Objective | DiffusionLoss    # what is minimised; it holds the network
    optimizer: torch.optim.Optimizer
    sums: Sums
    step: int = 0
    images: int = 0
    elapsed_before: float = 0.0             # seconds of training until this process went on
    paused: float = 0.0                     # seconds since the last report in which it saved, drew or scored
    started: float = 0.0
    run_id: str = ""
    reported_loss: float = 0.0              # of the last report
    lowest_loss: float = math.inf           # of all reports
    lock: object = None                     # on the folder, until the process ends; on the main rank
    place: os.stat_result | None = None     # what the folder was at the start; on the main rank

    @property
    def elapsed(self) -> float:
        return self.elapsed_before + max(0.0, time.perf_counter() - self.started)      # a clock may be set back

    @property
    def diffusion(self) -> EDM | RF:
        return self.objective.diffusion

    @property
    def autoencoder(self) -> str:
        return self.record["data"]["autoencoder"]

    @property
    def drawing_precision(self) -> str:
        return "bf16" if self.cfg.precision == "fp8" else self.cfg.precision      # the average is a plain network

    @property
    def grid_path(self) -> Path:
        return self.folder / "samples" / f"step-{self.step:08d}.png"

    def in_trouble(self, total: dict[str, float]) -> bool:
        """Tells from sums whether steps are being skipped, or the loss is ten times what it has been at its lowest."""
        loss = total["loss"] / total["steps"] if total["steps"] else self.reported_loss
        return total["skipped_in_row"] > 0 or not loss <= 10 * self.lowest_loss


def open_data(cfg: TrainSettings, accelerator: Accelerator) -> Latents:
    """Opens the latents; raises ValueError where there are none, or none that fit the settings."""
    if cfg.data.path is None:
        raise ValueError("Say what to train on: data.path=<folder>, as scripts/prepare_latents.py wrote it.")
    with accelerator.local_main_process_first():      # which indexes tars for the others
        latents = open_latents(cfg.data.path, kind=cfg.data.kind, scale=cfg.data.scale,
                               num_classes=cfg.data.num_classes)
    num_classes = cfg.data.num_classes or latents.num_classes
    latents.require(shape=latent_shape(cfg, latents), num_classes=num_classes)
    if empty := empty_classes(latents.classes, num_classes):
        accelerator.print(empty)
    return latents


def fitted(cfg: TrainSettings, accelerator: Accelerator, count: int) -> TrainSettings:
    """Takes batch size and steps, where they are null, from the number of latents, and says so."""
    parts = accelerator.num_processes * cfg.grad_accum_steps
    batch_size, steps = cfg.batch_size, cfg.steps
    if batch_size is None:
        batch_size = max(parts, min(64, count // 4) // parts * parts)
    if steps is None:
        steps = min(100_000, max(5_000, 200 * count // batch_size))
    if (batch_size, steps) != (cfg.batch_size, cfg.steps):
        accelerator.print(f"For {count:,} latents: batch_size={batch_size} steps={steps}. Either can be given.")
    check_batch_size(batch_size, accelerator.num_processes, cfg.grad_accum_steps, count)
    return cfg.model_copy(update={"batch_size": batch_size, "steps": steps})


def latent_shape(cfg: TrainSettings, latents: Latents) -> tuple[int, int, int]:
    side = cfg.data.input_size or latents.shape[1]
    return cfg.data.channels or latents.shape[0], side, side


def describe_network(model: ModelSettings, shape: tuple[int, int, int], num_classes: int) -> dict:
    """Gathers the network's keywords, as its checkpoints record them, for latents of `shape` (C, h, w)."""
    sizes = {key: getattr(model, key) for key in ("hidden_size", "depth", "num_heads", "patch_size")}
    router = {} if model.selection == "random" else {key: getattr(model, key) for key in ROUTER_DEFAULTS}
    return {
        **DiT_models[model.backbone_type].keywords,
        **{key: size for key, size in sizes.items() if size is not None},
        "input_size": shape[1], "in_channels": shape[0], "num_classes": num_classes,
        "init": model.init, "qk_norm": model.qk_norm,
        "routes": [route.model_dump(exclude_defaults=True) for route in model.routes], **router,
    }


def describe(cfg: TrainSettings, latents: Latents, world: int, device: torch.device) -> dict:
    """Gathers what a checkpoint records of the run that it belongs to."""
    diffusion, objective = with_objective(dict(cfg.diffusion), cfg.objective)
    num_classes = cfg.data.num_classes or latents.num_classes
    return {
        "network": describe_network(cfg.model, latent_shape(cfg, latents), num_classes),
        "diffusion": diffusion, **({"objective": objective} if objective else {}),
        "data": {"fingerprint": latents.fingerprint, "autoencoder": cfg.data.autoencoder or latents.autoencoder,
                 "convention": latents.convention.record(),
                 "class_names": latents.class_names, "display_names": latents.display_names,
                 **({} if len(latents.classes) == num_classes else {"classes": latents.classes})},
        "world": world, "seed": cfg.seed, "batch_size": cfg.batch_size, "init_from": cfg.init_from,
        "published": cfg.published and cfg.published.model_dump(exclude_none=True),
        "parent": None, **({} if cfg.lora.rank is None else
           {"lora": {**cfg.lora.model_dump(), "alpha": cfg.lora.alpha or float(cfg.lora.rank)}}),
        "history": [{"step": 0, "commit": commit(), "device": device_name(device),
                     "torch": torch.__version__, "tf32": multiplies_in_tf32(device)}],
    }


def continued(history: list[dict], now: dict) -> list[dict]:
    """Adds what code and device a run goes on with, and from which step, where they are not those of before."""
    before = history[-1] if history else {}
    return history if before | {"step": now["step"]} == now else [*history, now]


def open_drawing(
    cfg: TrainSettings, accelerator: Accelerator, latents: Latents, autoencoder: str,
) -> tuple[Grid | None, Evaluation | None]:
    """Loads what grids and evaluations need, before anything slow; None for what is not asked for.

    Where neither is, or autoencoder=none leaves no grids to draw, says so if nothing at hand decodes what is trained.
    """
    if not cfg.evaluate.every and (not cfg.samples.every or autoencoder == autoencoders.NONE):
        if why := autoencoders.undecodable(autoencoder, latents.shape[0]):
            accelerator.print(f"Nothing can decode these latents yet: {why} Training does not need it, and draws no "
                              f"grids; sample.py will, or writes latents with latents=true.")
        return None, None
    try:
        decoder = autoencoders.load_decoder(
            autoencoder, latents.shape, latents.convention, accelerator.device, DTYPES[cfg.decode_precision],
            batch_size=cfg.decode_batch_size, asked=cfg.data.autoencoder is not None,
        )
    except ValueError as error:
        raise ValueError(f"{error} Or set samples.every=0 evaluate.every=0 to train without pictures.") from error
    grid = evaluation = None
    if cfg.samples.every:
        seeds = parse_range("samples.seeds", cfg.samples.seeds)
        classes = parse_classes("samples.classes", cfg.samples.classes, latents.num_classes, latents.class_names,
                                latents.classes[:GRID_CLASSES])
        grid = Grid(decoder.decode, seeds, labels_of(seeds, classes))
    if cfg.evaluate.every:
        if cfg.evaluate.reference is None:
            raise ValueError(f"evaluate.every={cfg.evaluate.every} needs evaluate.reference=<an npz>; "
                             f"docs/evaluation.md says where to get or how to make one.")
        with accelerator.local_main_process_first():      # which downloads weights for the others
            extractor = features.load(cfg.evaluate.features, cfg.evaluate.features_weights, cfg.evaluate.sha256,
                                      accelerator.device)
        reference = statistics.open_reference(cfg.evaluate.reference, extractor)
        metrics = statistics.available_metrics(extractor, reference, cfg.evaluate.metrics)
        reference.complete(extractor, metrics, cfg.evaluate.batch_size)
        evaluation = Evaluation(decoder.decode, extractor, reference, metrics)
    return grid, evaluation


def initial_network(cfg: TrainSettings, record: dict, device: torch.device) -> DiT:
    """Builds the network that the seed says, and brings it, or this rank's part of it, to the device."""
    torch.manual_seed(cfg.seed)
    net = build_network(record["network"])
    return sharding.shard(net, device, DTYPES[cfg.precision]) if cfg.sharding == "fsdp" else net.to(device)


def make_run(cfg: TrainSettings, accelerator: Accelerator) -> Run:
    """Puts a run together at step 0; raises ValueError, with the knob, for whatever cannot work."""
    if cfg.sharding == "fsdp" and not torch.distributed.is_initialized():
        raise ValueError("sharding=fsdp shares a network out over ranks, and this is a single process: start it with "
                         "accelerate launch or torchrun, or set sharding=none.")
    latents = open_data(cfg, accelerator)
    cfg = fitted(cfg, accelerator, latents.count)
    record = describe(cfg, latents, accelerator.num_processes, accelerator.device)
    grid, evaluation = open_drawing(cfg, accelerator, latents, record["data"]["autoencoder"])
    model = initial_network(cfg, record, accelerator.device)
    if cfg.keep_masked:
        check_kept(latents, model)
    if cfg.lora.rank is not None:
        layers = adapters.attach(model, **cfg.lora.model_dump())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        accelerator.print(f"LoRA of rank {cfg.lora.rank} on {layers} layers: {trained / 1e6:.3g}M parameters are "
                          f"trained, and the others stay.")
    # FSDP cannot copy. Not frozen: autocast keeps its casts of trainable weights only.
    ema = initial_network(cfg, record, accelerator.device) if cfg.sharding == "fsdp" else copy.deepcopy(model)
    if cfg.precision == "fp8":
        speed.multiply_in_float8(model)
    objective = build_objective(model, build_diffusion(record["diffusion"]), record.get("objective"), cfg.keep_masked)
    if lacking := [name for name in objective.arrays if name not in (*latents.arrays, "weight")]:
        raise ValueError(f"The objective {', '.join(cfg.objective)} needs {lacking[0]}-*.npy beside the latents, and "
                         f"{latents.where} has no such array in its metadata.json (docs/data.md).")
    objective.to(accelerator.device)
    if cfg.sharding == "fsdp":
        sharding.shard_rest(objective, model, accelerator.device)
    optimizer = build_optimizer(trained_parameters(objective), **cfg.optimizer.model_dump(
        exclude={"warmup_steps", "schedule", "clip_norm"}))
    return Run(cfg, accelerator, Path(cfg.run_dir), latents, grid, evaluation, record, model, ema.eval(), objective,
               optimizer, Sums(accelerator.device, objective.terms))


def find_checkpoint(accelerator: Accelerator, run_dir: Path) -> Path | None:
    """Finds the latest whole checkpoint, the main rank's for all; None where a run has none yet.

    Raises ValueError where none that the run has is whole, where they have been deleted, or where another rank does
    not see it.
    """
    folder = latest_checkpoint(run_dir)
    if folder is None and ranks.main_rank_says(accelerator, len(checkpoints.all_steps(run_dir))):
        raise ValueError(f"None of the checkpoints in {run_dir / 'checkpoints'} is whole, as the warnings say. Restore "
                         f"one, or move the folder away to start from the beginning.")
    if folder is None and ranks.main_rank_says(accelerator, has_lost_checkpoints(run_dir)):
        raise ValueError(f"{run_dir} has recorded {last_recorded(run_dir)} steps and has no checkpoint, so that "
                         f"training would begin anew and replace the record. Restore its checkpoints, set "
                         f"name=<another>, or move the folder away.")
    return folder


def last_recorded(run_dir: Path) -> int:
    """Returns the last step of which a run has a row of metrics, or 0."""
    steps = [row.get("step") for row in files.read_rows(run_dir / "metrics.jsonl")]
    return max((step for step in steps if isinstance(step, int)), default=0)


def has_lost_checkpoints(run_dir: Path) -> bool:
    """Tells whether a run without checkpoints has had some: it has recorded steps past its first save, or its end.

    What was killed before its first save has an empty folder for checkpoints, and begins anew.
    """
    step, config = last_recorded(run_dir), run_dir / "config.yaml"      # of its last start
    if step == 0 or not ((run_dir / "checkpoints").is_dir() and config.is_file()):
        return step > 0
    began = OmegaConf.load(config)
    return step >= min(began.checkpoint.every + 1, began.steps)


def open_parent(path: str, record: dict, diffusion_name: str | None) -> Trained:
    """Loads the EMA weights that this run, described by `record`, starts from: another run's, or a weights file's.

    Raises ValueError where they are of another network or predict another thing. Routes may differ.
    """
    parent = load_parent(Path(path), record["network"], diffusion_name)
    old, new = differing(*(architecture(side["network"]) for side in (parent.recorded, record)))
    if old:
        raise ValueError(f"init_from={path} has another network: {old} there, {new} here. Give model.backbone_type, "
                         f"model and data as it was trained with.")
    # A weights file alone says which diffusion it is of, and nothing more.
    keys = ("name",) if parent.folder is None else ("name", "sigma_data")
    old, new = differing(*({key: side["diffusion"].get(key) for key in keys} for side in (parent.recorded, record)))
    if old:
        raise ValueError(f"init_from={path} was trained with another diffusion: {old} there, {new} here. Give "
                         f"diffusion={parent.recorded['diffusion']['name']} and its settings.")
    return parent


def resume(run: Run) -> Path | None:
    """Brings a run to its latest checkpoint, or to the weights it starts from; returns the checkpoint, if there is one.

    Raises ValueError for a run that cannot be continued with these settings.
    """
    cfg, accelerator = run.cfg, run.accelerator
    run.run_id = f"{run.folder.name}-{time.time_ns():x}"
    folder = find_checkpoint(accelerator, run.folder)
    if folder is None:
        if cfg.init_from is not None:
            parent = open_parent(cfg.init_from, run.record, cfg.diffusion_name)
            run.record["parent"] = {"step": parent.step, "weights_sha256": parent.weights_sha256,
                                    **({"diffusion_name": parent.family} if parent.family else {})}
            if "lora" in run.record:
                run.record["lora"]["base"] = str(parent.file)
            for net in (run.model, run.ema):
                adapters.load_base(net, parent.net.state_dict())
        return None
    meta = read_record(Meta, folder / "meta.json", "It is no checkpoint of ours; move it away.")
    run.record["parent"] = meta.parent and meta.parent.model_dump(exclude_unset=True)
    run.record["history"] = continued(meta.history, run.record["history"][-1] | {"step": meta.step})
    for change in check_resumable(meta.model_dump(), run.record, run.folder):
        accelerator.print(f"Resuming with a change: {change}. From here on it differs from a run without it.")
    if meta.step > cfg.steps:
        raise ValueError(f"{run.folder} has taken {meta.step} steps already, more than steps={cfg.steps}: raise "
                         f"steps, or start a run of its own with name=<another>.")
    run.step, run.images, run.elapsed_before, run.run_id = meta.step, meta.images, meta.elapsed_s, meta.run_id
    run.lowest_loss = math.inf if meta.lowest_loss is None else meta.lowest_loss
    if meta.lora is not None:      # whose checkpoints hold the adapter alone
        run.record["lora"] = meta.lora.model_dump()
        base = load_base(meta, folder).net.state_dict()
        for net in (run.model, run.ema):
            adapters.load_base(net, base)
    adapters.load(run.model, checkpoints.load(folder, "model", adapters.tensors(run.model)))
    adapters.load(run.ema, checkpoints.load(folder, "ema", adapters.tensors(run.ema)))
    training = checkpoints.load(folder, "training")
    if (sums := training.pop("sums")).shape != run.sums.values.shape:
        raise ValueError(f"{folder} has {len(sums)} sums of its loss's terms, and this run {len(run.sums.values)}: "
                         f"give the objective that it began with.")
    run.sums.values.copy_(sums)
    own = own_state(run.objective)
    if missing := own.keys() - training.keys():
        raise ValueError(f"{folder} lacks {min(missing)}: give the objective that it began with.")
    sharding.copy_into(own, {name: training.pop(name) for name in own})
    load_optimizer(trained_parameters(run.objective), run.optimizer, training)
    if accelerator.scaler is not None and meta.scaler:
        accelerator.scaler.load_state_dict(meta.scaler)
    return folder


# ---- the folder of a run --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk_is_a_sentence() -> Iterator[None]:
    """Ends the run with a sentence where a file cannot be written; as a decorator, of all that a function writes."""
    try:
        yield
    except OSError as error:
        full = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG} & {error.errno, getattr(error.__cause__, "errno", None)}
        remedy = "Free some room" if full else "Mend that"
        sys.exit(f"train.py: {error} {remedy} and run the same command again: it resumes.")


def hold_folder(run: Run) -> None:
    """Keeps a run's folder to this process; raises ValueError where another one trains in it."""
    run.lock = files.hold(run.folder, f"Another process is training {run.folder}. Stop it first, or set "
                                            f"name=<another> for a second run.")
    run.place = run.folder.stat()


def tidy_folder(run: Run) -> None:
    """Makes a run's folder what it was at the run's step, and writes down the settings with which it goes on."""
    for name in ("checkpoints", "samples"):      # refuses now what writing would refuse
        (run.folder / name).mkdir(parents=True, exist_ok=True)
    forget_after(run.folder, run.step)
    # A kill may have come between the last save and its pruning.
    checkpoints.prune(run.folder, run.cfg.checkpoint.keep_last, run.cfg.checkpoint.keep_every)
    if run.step < run.cfg.steps:
        size = 4 * sum(tensor.numel() for tensor in adapters.tensors(run.model).values())
        needed = 4 * size      # the average, the weights, and the optimizer's two moments
        files.require_room(run.folder, needed, "a checkpoint: make room, or set run_dir= to another disk.")
    files.write_text(run.folder / "config.yaml", OmegaConf.to_yaml(run.cfg.model_dump()))


def forget_after(run_dir: Path, step: int) -> None:
    """Drops what a run wrote after `step`, which it now does again: damaged checkpoints, grids, metrics, scores."""
    checkpoints.set_aside_after(run_dir, step)
    for left in (*run_dir.glob(".*.tmp"), *(run_dir / "samples").glob(".step-*.tmp")):      # of killed writes
        files.remove(left)
    for picture in (run_dir / "samples").glob("step-" + 8 * "[0-9]" + ".png"):
        if int(picture.stem.removeprefix("step-")) > step:
            picture.unlink()
    def written_at(row: dict) -> int:
        source = row.get("source", row | {"in_training": True})
        step = source.get("step") if isinstance(source, dict) and source.get("in_training") else 0
        return step if isinstance(step, int) else 0      # what fid.py or another wrote is not training's to drop

    for path in (run_dir / "metrics.jsonl", run_dir / "results.jsonl"):
        if path.is_file():
            kept = [row for row in files.read_rows(path) if written_at(row) <= step]
            text = "".join(json.dumps(row) + "\n" for row in kept)
            if text.encode() != path.read_bytes():
                files.write_text(path, text)


def forget_other_starts(results: Path, step: int, origin: str) -> None:
    """Drops training's scores at `step` of other networks, data or seeds, as of a run killed before its first save."""
    rows = files.read_rows(results)
    kept = [row for row in rows if not isinstance(source := row.get("source"), dict) or not source.get("in_training")
            or source.get("step") != step or source.get("origin", origin) == origin]
    if len(kept) < len(rows):
        files.write_text(results, "".join(json.dumps(row) + "\n" for row in kept))


@full_disk_is_a_sentence()
def save(run: Run) -> None:
    cfg, accelerator = run.cfg, run.accelerator
    total = run.sums.over_ranks(accelerator)
    sums = torch.tensor([total[name] for name in run.sums.names], dtype=torch.float64)
    training = optimizer_tensors(trained_parameters(run.objective), run.optimizer.optimizer) | own_state(run.objective)
    training["sums"] = sums
    meta = {"step": run.step, "images": run.images, "elapsed_s": run.elapsed, "run_id": run.run_id,
            "scaler": accelerator.scaler and accelerator.scaler.state_dict(), "sound": not run.in_trouble(total),
            "lowest_loss": run.lowest_loss if math.isfinite(run.lowest_loss) else None, **run.record,
            "config": cfg.model_dump(), "torch": torch.__version__}
    tensors = {"ema": adapters.tensors(run.ema), "model": adapters.tensors(run.model), "training": training}
    with sharding.gathering(checkpoints.stored(tensors)) as values:
        if accelerator.is_main_process:
            files.require_same(run.folder, run.place)
            checkpoints.save(checkpoints.step_folder(run.folder, run.step), tensors, meta, values)
            checkpoints.prune(run.folder, cfg.checkpoint.keep_last, cfg.checkpoint.keep_every)
