"""Trains a DiT, dense or TREAD-routed, on a folder of latents; one loop for a laptop, a GPU, or many nodes.

    accelerate launch train.py model=tread                  # ImageNet-256 latents in data/imagenet256
    accelerate launch train.py model=dit                    # the dense baseline
    accelerate launch train.py experiment=quickstart        # the built-in shapes, minutes on a CPU
    python train.py … and torchrun --nproc_per_node 8 train.py … do the same

The same command resumes what was stopped or killed. Options: configs/config.yaml; outputs: runs/<name>/.
"""

import contextlib
import copy
import fcntl
import json
import math
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import hydra
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from tqdm import tqdm

import autoencoder as autoencoders
import checkpoint as checkpoints
import features
import fid
import speed
from data import batches, open_latents, to_latent
from dit import DiT, DiT_models
from edm import EDM
from guidance import Guidance
from rf import RF
from sample import (
    DTYPES,
    Trained,
    build_diffusion,
    build_network,
    gathered,
    generate,
    labels_of,
    load_trained,
    parse_classes,
    parse_range,
    write_grid,
)

# ---- one step -------------------------------------------------------------------------------------------------------


def step_seed(seed: int, step: int, rank: int) -> int:
    """Mixes (seed, step, rank) into the one seed from which a rank draws everything random in a step."""
    return int(np.random.SeedSequence(seed, spawn_key=(step, rank)).generate_state(1, np.uint64)[0])


def learning_rate(step: int, steps: int, lr: float, warmup_steps: int, schedule: str) -> float:
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "cosine":
        return lr * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps))) / 2
    return lr


def ema_decay(step: int, decay: float, warmup: bool) -> float:
    return min(decay, (1 + step) / (10 + step)) if warmup else decay


def train_step(
    accelerator: Accelerator, net: nn.Module, model: DiT, diffusion: EDM | RF, optimizer: torch.optim.Optimizer,
    x: Tensor, y: Tensor, *, lr: float, label_dropout: float, clip_norm: float | None, num_parts: int,
    cuda_graphs: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Takes one optimizer step on this rank's share x (B, C, h, w), y (B,) of the batch; never waits for the device.

    `net` is `model` as it is called: compiled, cast and replicated. Returns the loss, the gradient's norm and whether
    the step was skipped because it was not finite, as tensors on the device. None of them lies in a graph's memory.
    """
    if cuda_graphs:      # which may now write over the last step's gradients, but over those of no part of this one
        torch.compiler.cudagraph_mark_step_begin()
    y = torch.where(torch.rand(len(y), device=y.device) < label_dropout, model.num_classes, y)
    step_loss = torch.zeros((), device=x.device)
    for part, (x_part, y_part) in enumerate(zip(x.chunk(num_parts), y.chunk(num_parts), strict=True)):
        with contextlib.nullcontext() if part == num_parts - 1 else accelerator.no_sync(net):
            loss = diffusion.loss(net, x_part, y_part, routes=model.routes).mean()
            accelerator.backward(loss)      # which divides by the number of parts
        step_loss += loss.detach() / num_parts
    accelerator.unscale_gradients(optimizer)
    grad_norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    if clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip_norm, grad_norm)
    # A loss that is not finite makes such gradients, and DDP spreads them to every rank, so all ranks skip together.
    # The fused optimizer reads the flag on the device, as it does for a GradScaler, which in fp16 sets it by itself.
    skipped = ~grad_norm.isfinite()
    if accelerator.scaler is None:
        optimizer.optimizer.grad_scale, optimizer.optimizer.found_inf = None, skipped.float()
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return step_loss, grad_norm, skipped


@torch.no_grad()
def update_ema(ema: nn.Module, model: nn.Module, decay: float) -> None:
    torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - decay)


# ---- what a run says and how it stops -------------------------------------------------------------------------------


class Sums:
    """Sums since the last report, on the device: reading them is the only time that the loop waits for it."""

    NAMES = ("loss", "grad_norm", "steps", "skipped", "skipped_in_row")

    def __init__(self, device: torch.device):
        self.values = torch.zeros(len(self.NAMES), dtype=torch.float64, device=device)

    def add(self, loss: Tensor, grad_norm: Tensor, skipped: Tensor) -> None:
        taken = torch.stack([loss, grad_norm, torch.ones_like(loss)])
        self.values[:3] += torch.where(skipped, 0, taken)
        self.values[3] += skipped
        self.values[4].add_(1).mul_(skipped)

    def over_ranks(self, accelerator: Accelerator) -> Tensor:
        return accelerator.reduce(self.values.clone(), "mean")

    def start_again(self) -> None:
        """Begins the next report's sums; the skipped steps are counted from the run's beginning."""
        self.values[:3].zero_()


class StopRequest:
    """Turns the first SIGTERM or SIGINT into a request that the loop honours; a second one ends the process at once.

    Several ranks must leave at the same step. Every few steps each says in the background whether it was told to stop,
    over a process group on the CPUs, and reads the answer to the time before: nothing waits, neither host nor device.
    """

    EVERY = 10     # steps; launchers give a run 30 s between SIGTERM and SIGKILL

    def __init__(self):
        self.signal, self.group, self.asked = 0, None, None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.receive)

    def receive(self, number: int, frame: object) -> None:
        self.signal = number
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def agreed(self, step: int, world: int) -> int:
        """Returns the signal on which all ranks leave at this step, or 0. Every rank calls it at every step."""
        if world == 1:
            return self.signal
        if step % self.EVERY:
            return 0
        answer = 0
        if self.asked is not None:
            votes, work = self.asked
            work.wait()
            answer = int(votes)
        self.group = self.group or torch.distributed.new_group(backend="gloo")
        votes = torch.tensor(self.signal)
        work = torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX, self.group, async_op=True)
        self.asked = votes, work
        return answer


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def peak_memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def as_line(row: dict, steps: int) -> str:
    """Formats a row of metrics.jsonl for the screen."""
    loss, norm = (f"{row[name]:.4f}" if row[name] is not None else "not finite" for name in ("loss", "grad_norm"))
    return (
        f"step {row['step']}/{steps}  loss {loss}  lr {row['lr']:.2e}  grad {norm}  {row['img_per_sec']:,.0f} img/s  "
        f"{row['sec_per_step']:.3f} s/step  {row['peak_memory_gib']:.2f} GiB  {row['images']:,} images  "
        f"{row['elapsed_s']:,.0f} s" + (f"  {row['skipped']} steps skipped" if row["skipped"] else "")
    )


@contextlib.contextmanager
def full_disk_is_a_sentence() -> Iterator[None]:
    """Ends the run with a sentence where a file cannot be written; as a decorator, of all that a function writes."""
    try:
        yield
    except OSError as error:
        sys.exit(f"train.py: {error} Free some room and run the same command again.")


def forget_after(run_dir: Path, step: int) -> None:
    """Drops what a run wrote after `step`, which it now does again: damaged checkpoints, grids, metrics, scores."""
    checkpoints.set_aside_after(run_dir, step)
    for picture in (run_dir / "samples").glob("step-" + 8 * "[0-9]" + ".png"):
        if int(picture.stem.removeprefix("step-")) > step:
            picture.unlink()
    for path in (run_dir / "metrics.jsonl", run_dir / "results.jsonl"):
        if path.is_file():      # rows of results.jsonl that fid.py wrote are not training's to drop
            ours = [(row, row.get("source", row | {"in_training": True})) for row in checkpoints.read_rows(path)]
            kept = [row for row, its in ours if not its.get("in_training") or its["step"] <= step]
            checkpoints.write_text(path, "".join(json.dumps(row) + "\n" for row in kept))


# ---- what a user may have got wrong ---------------------------------------------------------------------------------


def check_settings(cfg: DictConfig) -> None:
    """Raises ValueError, with the numbers and the knob, for settings that cannot work."""
    choices = {"precision": speed.PRECISIONS, "model.backbone_type": DiT_models,
               "optimizer.schedule": ("constant", "cosine"), "decode_precision": DTYPES, "compile": speed.COMPILE,
               "data.on_device": (True, False)}
    for key, allowed in choices.items():
        value = OmegaConf.select(cfg, key)
        if value not in allowed or type(value) in (int, float):      # for 1 == True
            raise ValueError(f"{key}={value} is not one of {', '.join(map(str, allowed))}.")
    whole = {"steps": 0, "batch_size": 1, "grad_accum_steps": 1, "seed": 0, "max_skipped_in_row": 1,
             "optimizer.warmup_steps": 0, "log.every": 1, "checkpoint.every": 1, "checkpoint.keep_last": 1,
             "checkpoint.keep_every": 0, "samples.every": 0, "samples.num_steps": 1, "samples.batch_size": 1,
             "evaluate.every": 0, "evaluate.num_samples": 2, "evaluate.seed": 0, "evaluate.num_steps": 1,
             "evaluate.batch_size": 1}
    for key, low in whole.items():
        value = OmegaConf.select(cfg, key)
        if type(value) is not int or value < low:
            raise ValueError(f"{key}={value} is not a whole number of at least {low}.")
    real = {"label_dropout": 1, "ema.decay": 1, "optimizer.lr": math.inf, "optimizer.eps": math.inf,
            "optimizer.weight_decay": math.inf, "optimizer.betas.0": 1, "optimizer.betas.1": 1}
    if cfg.optimizer.clip_norm is not None:
        real["optimizer.clip_norm"] = math.inf
    for key, high in real.items():
        value = OmegaConf.select(cfg, key)
        if type(value) not in (int, float) or not 0 <= value <= high:
            raise ValueError(f"{key}={value} is not a number in [0, {high}].")
    if any(type(scale) not in (int, float, type(None)) for scale in cfg.evaluate.guidance_scales or [""]):
        raise ValueError(f"evaluate.guidance_scales={cfg.evaluate.guidance_scales} is not a list of numbers and null, "
                         f"which is unguided.")
    for key in ("model.routes", "log.trackers"):
        if not OmegaConf.is_list(OmegaConf.select(cfg, key)):
            raise ValueError(f"{key}={OmegaConf.select(cfg, key)} is not a list; write {key}=[] for none.")


def check_batch_size(batch_size: int, world: int, num_parts: int, count: int) -> None:
    if batch_size % (world * num_parts):
        raise ValueError(f"batch_size={batch_size} counts the images of a whole step and must be a multiple of "
                         f"{world * num_parts}: {world} ranks × grad_accum_steps={num_parts}.")
    if batch_size > count:
        raise ValueError(f"batch_size={batch_size} is more than the {count} latents of the data set.")


def architecture(network: dict) -> dict:
    """Takes out of a network's keywords those that its weights depend on."""
    known = {"mlp_ratio": 4.0, "learn_sigma": False, **network}
    return {key: value for key, value in known.items() if key not in ("routes", "init")}


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
        return {"network": architecture(record["network"]), "diffusion": record["diffusion"],
                "data set": record["data"]["fingerprint"], "init_from": record.get("init_from")}

    for (what, old), new in zip(facts(meta).items(), facts(now).values(), strict=True):
        if old != new:
            old, new = differing(old, new)
            raise ValueError(f"{run_dir} was trained with another {what}, so it cannot go on: it has {old}, this "
                             f"command {new}. Start a run of its own with name=<another>, or give the settings that "
                             f"it began with.")
    was, is_now = ({**record, "routes": record["network"]["routes"]} for record in (meta, now))
    return [f"{key} was {was[key]} and is now {is_now[key]}"
            for key in ("world", "seed", "batch_size", "routes") if was[key] != is_now[key]]


def lock(run_dir: Path) -> TextIO:
    """Holds a run for this process until it ends, however it ends. Raises ValueError where another one holds it."""
    handle = open(run_dir / ".lock", "w")  # noqa: SIM115  (open as long as the process lives)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"Another process is training {run_dir}. Stop it first, "
                         f"or set name=<another> for a second run.") from None
    return handle


# ---- the story ------------------------------------------------------------------------------------------------------


def main_rank_says(accelerator: Accelerator, number: int) -> int:
    """Gives every rank the main one's number."""
    return int(broadcast(torch.tensor(int(number), device=accelerator.device)))


def find_checkpoint(accelerator: Accelerator, run_dir: Path) -> Path | None:
    """Finds the latest whole checkpoint on the main rank, for all; None where a run has none yet.

    Raises ValueError where none that the run has is whole, or where another rank does not see it.
    """
    latest = checkpoints.latest(run_dir) if accelerator.is_main_process else None
    none_is_whole = latest is None and bool(checkpoints.all_steps(run_dir))
    step = main_rank_says(accelerator, -none_is_whole - 1 if latest is None else checkpoints.step_of(latest))
    if step == -2:
        raise ValueError(f"None of the checkpoints in {run_dir / 'checkpoints'} is whole, as the warnings say. Restore "
                         f"one, or move the folder away to start from the beginning.")
    if step == -1:
        return None
    folder = checkpoints.step_folder(run_dir, step)
    if not folder.is_dir():
        raise ValueError(f"Rank {accelerator.process_index} does not see {folder}, from which the main rank resumes: "
                         f"{run_dir} must lie on a disk that all nodes share. Set run_dir.")
    return folder


def open_parent(path: str, record: dict) -> Trained:
    """Loads the EMA weights that this run, described by `record`, starts from: another run's, or a weights file's.

    Raises ValueError where they are of another network or predict another thing. Routes may differ.
    """
    parent = load_trained(path)
    old, new = differing(*(architecture(side["network"]) for side in (parent.recorded, record)))
    if old:
        raise ValueError(f"init_from={path} has another network: {old} there, {new} here. Give model.backbone_type, "
                         f"model and data as it was trained with.")
    # A weights file alone does not say how it was trained.
    old, new = differing(*({key: side["diffusion"].get(key) for key in ("name", "sigma_data")}
                           for side in (parent.recorded, record)))
    if parent.folder is not None and old:
        raise ValueError(f"init_from={path} was trained with another diffusion: {old} there, {new} here. Give "
                         f"diffusion={parent.recorded['diffusion']['name']} and its settings.")
    return parent


def describe_network(cfg: DictConfig, shape: tuple[int, int, int], num_classes: int) -> dict:
    """Gathers the network's keywords, as its checkpoints record them, for latents of `shape` (C, h, w)."""
    sizes = {key: cfg.model[key] for key in ("hidden_size", "depth", "num_heads", "patch_size")}
    return {
        **DiT_models[cfg.model.backbone_type].keywords,
        **{key: size for key, size in sizes.items() if size is not None},
        "input_size": shape[1], "in_channels": shape[0], "num_classes": num_classes,
        "init": cfg.model.init, "routes": OmegaConf.to_container(cfg.model.routes),
    }


def open_evaluation(accelerator: Accelerator, cfg: DictConfig) -> tuple[features.Extractor, fid.Reference]:
    """Loads what evaluations score with, and measures a reference that comes as images, before anything slow."""
    if cfg.evaluate.reference is None:
        raise ValueError(f"evaluate.every={cfg.evaluate.every} needs evaluate.reference=<an npz>; docs/evaluation.md "
                         f"says where to get or how to make one.")
    settings = cfg.evaluate
    with accelerator.local_main_process_first():      # which downloads weights for the others
        extractor = features.load(settings.features, settings.features_weights, settings.sha256, accelerator.device)
    reference = fid.open_reference(settings.reference, extractor)
    reference.complete(extractor, fid.available_metrics(extractor, reference, settings.metrics), settings.batch_size)
    return extractor, reference


def start_trackers(accelerator: Accelerator, cfg: DictConfig, run_dir: Path, run_id: str) -> None:
    """Starts TensorBoard or wandb where asked; raises ValueError where one will not start, as wandb without a login."""
    flat = {key: str(value) for key, value in OmegaConf.to_container(cfg, resolve=True).items()}
    try:
        wandb = {"name": cfg.name, "dir": str(run_dir), "id": run_id, "resume": "allow"}
        accelerator.init_trackers("tread", flat, init_kwargs={"wandb": wandb})
    except Exception as error:
        raise ValueError(f"log.trackers={list(cfg.log.trackers)} could not start: {error}. For wandb run `wandb login` "
                         f"or set WANDB_MODE=offline; log.trackers=[] does without.") from error


@hydra.main(config_path="configs", config_name="config", version_base="1.3")
def main(cfg: DictConfig) -> None:
    run_dir, stop = Path(cfg.run_dir), StopRequest()
    try:
        check_settings(cfg)
        accelerator = speed.make_accelerator(
            cfg.precision, cfg.grad_accum_steps, cfg.tf32, cfg.cpu,
            log_with=list(cfg.log.trackers) or None, project_dir=run_dir,
        )
        device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
        if cfg.precision == "fp8":
            speed.check_float8(device)
        drawing_precision = "bf16" if cfg.precision == "fp8" else cfg.precision      # the average is a plain network

        # ---- the data, and what is drawn from it
        if cfg.data.path is None:
            raise ValueError("Say what to train on: data.path=<folder>, as scripts/prepare_latents.py wrote it.")
        with accelerator.local_main_process_first():      # which indexes tars for the others
            latents = open_latents(cfg.data.path, kind=cfg.data.kind, scale=cfg.data.scale,
                                   num_classes=cfg.data.num_classes)
        channels, side = cfg.data.channels or latents.shape[0], cfg.data.input_size or latents.shape[1]
        shape, num_classes = (channels, side, side), cfg.data.num_classes or latents.num_classes
        latents.require(shape=shape, num_classes=num_classes)
        check_batch_size(cfg.batch_size, world, cfg.grad_accum_steps, latents.count)
        autoencoder = cfg.data.autoencoder or latents.autoencoder
        if cfg.samples.every or cfg.evaluate.every:
            decode = autoencoders.load(autoencoder, device, DTYPES[cfg.decode_precision]).decode
        if cfg.evaluate.every:
            extractor, reference = open_evaluation(accelerator, cfg)
        if cfg.samples.every:
            grid_seeds = parse_range("samples.seeds", cfg.samples.seeds)
            wanted = f"0-{min(10, latents.num_classes) - 1}" if cfg.samples.classes is None else cfg.samples.classes
            grid_classes = parse_classes("samples.classes", wanted, latents.num_classes, latents.class_names)
            grid_labels = labels_of(grid_seeds, grid_classes)

        # ---- the network, its average, its optimizer
        record = {
            "network": describe_network(cfg, shape, num_classes), "diffusion": OmegaConf.to_container(cfg.diffusion),
            "data": {"fingerprint": latents.fingerprint, "autoencoder": autoencoder,
                     "class_names": latents.class_names},
            "world": world, "seed": cfg.seed, "batch_size": cfg.batch_size, "init_from": cfg.init_from,
        }
        torch.manual_seed(cfg.seed)
        model = build_network(record["network"]).to(device)
        ema = copy.deepcopy(model).eval()      # not frozen: autocast keeps its casts of trainable weights only
        if cfg.precision == "fp8":
            speed.multiply_in_float8(model)
        diffusion = build_diffusion(record["diffusion"])
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=cfg.optimizer.lr, betas=tuple(cfg.optimizer.betas), eps=cfg.optimizer.eps,
            weight_decay=cfg.optimizer.weight_decay, fused=True,
        )
        sums = Sums(device)

        # ---- where the run stands
        if accelerator.is_main_process:
            run_dir.mkdir(parents=True, exist_ok=True)
            held = lock(run_dir)  # noqa: F841  (until the process ends)
        step, images, elapsed_before = 0, 0, 0.0
        run_id = f"{run_dir.name}-{time.time_ns():x}"
        resumed = find_checkpoint(accelerator, run_dir)
        if resumed is None and cfg.init_from is not None:
            parent = open_parent(cfg.init_from, record)
            record["parent"] = {"step": parent.step, "weights_sha256": checkpoints.sha256(parent.file)}
            model.load_state_dict(parent.net.state_dict())
            ema.load_state_dict(parent.net.state_dict())
        if resumed is not None:
            meta = checkpoints.read_meta(resumed)
            record["parent"] = meta.get("parent")
            for change in check_resumable(meta, record, run_dir):
                accelerator.print(f"Resuming with a change: {change}. From here on it differs from a run without it.")
            step, images, elapsed_before, run_id = (meta[key] for key in ("step", "images", "elapsed_s", "run_id"))
            model.load_state_dict(checkpoints.load(resumed, "model"))
            ema.load_state_dict(checkpoints.load(resumed, "ema"))
            training = checkpoints.load(resumed, "training")
            sums.values.copy_(training.pop("sums"))
            checkpoints.load_optimizer(model, optimizer, training)
            if accelerator.scaler is not None and meta["scaler"]:
                accelerator.scaler.load_state_dict(meta["scaler"])
        loader = batches(latents, cfg.batch_size, seed=cfg.seed, rank=rank, world=world, start=images // cfg.batch_size,
                         pin=device.type == "cuda", device=device if cfg.data.on_device else None)
        if accelerator.is_main_process:
            forget_after(run_dir, step)
            checkpoints.write_text(run_dir / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
        start_trackers(accelerator, cfg, run_dir, run_id)
    except (ValueError, OSError) as error:
        sys.exit(f"train.py: {error}")

    # ---- speed, applied from outside: `model` stays the plain network that is saved, `net` is what is called
    if cfg.activation_checkpointing:
        speed.recompute_activations(model)
    speed.compile_network(model, cfg.compile)
    net, optimizer = accelerator.prepare(model, optimizer)

    accelerator.print(
        f"{cfg.name}: {cfg.model.backbone_type}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, "
        f"routes {', '.join(map(str, model.routes)) or 'none'}; {latents.count:,} latents of {latents.shape} in "
        f"{latents.num_classes} classes; {world} × {device.type}, {cfg.precision}; "
        + (f"resuming {resumed.name} of {cfg.steps}" if resumed else f"{cfg.steps} steps of {cfg.batch_size}"))

    def elapsed() -> float:
        return elapsed_before + time.perf_counter() - started

    @full_disk_is_a_sentence()
    def report(num_steps: int, seconds: float) -> None:
        """Reduces the sums over ranks, writes a line and a row, and ends a run in which nothing is finite any more."""
        total = dict(zip(Sums.NAMES, sums.over_ranks(accelerator).tolist(), strict=True))
        sums.start_again()
        row = {
            "step": step, "images": images,
            "loss": total["loss"] / total["steps"] if total["steps"] else None,
            "lr": optimizer.param_groups[0]["lr"],
            "grad_norm": total["grad_norm"] / total["steps"] if total["steps"] else None,
            "skipped": int(total["skipped"]),
            "img_per_sec": num_steps * cfg.batch_size / seconds, "sec_per_step": seconds / num_steps,
            "peak_memory_gib": peak_memory_gib(device), "elapsed_s": elapsed(),
        }
        if accelerator.is_main_process:
            tqdm.write(as_line(row, cfg.steps))
            with open(run_dir / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        accelerator.log({name: value for name, value in row.items() if value is not None}, step=step)
        if total["skipped_in_row"] >= cfg.max_skipped_in_row:
            last_good = checkpoints.latest(run_dir)
            sys.exit(f"train.py: the last {int(total['skipped_in_row'])} steps had no finite gradient and were "
                     f"skipped: the run stops at step {step}. The last good checkpoint is {last_good or 'none'}. Lower "
                     f"optimizer.lr, set optimizer.clip_norm=1 or precision=fp32; the same command resumes from it.")

    def grid_path() -> Path:
        return run_dir / "samples" / f"step-{step:08d}.png"

    @full_disk_is_a_sentence()
    def draw() -> None:
        pictures = generate(ema, diffusion, decode, grid_seeds, grid_labels, batch_size=cfg.samples.batch_size,
                            num_steps=cfg.samples.num_steps, precision=drawing_precision, progress="samples")
        write_grid(gathered(pictures), grid_path(), latents.class_names)

    @full_disk_is_a_sentence()
    def evaluate() -> None:
        """Scores the EMA weights, once for each guidance scale that lacks it, with images from seeds of their own."""
        seeds = list(range(cfg.evaluate.seed, cfg.evaluate.seed + cfg.evaluate.num_samples))
        labels = labels_of(seeds, list(range(latents.num_classes)))
        done = {(row["source"]["step"], (row["source"].get("guidance") or {}).get("scale"))
                for row in checkpoints.read_rows(run_dir / "results.jsonl") if row["source"].get("in_training")}
        for scale in cfg.evaluate.guidance_scales:
            if not main_rank_says(accelerator, (step, scale) not in done):
                continue
            began = time.perf_counter()
            drawing = fid.Drawing(ema, diffusion, decode, seeds, labels, batch_size=cfg.evaluate.batch_size,
                                  num_steps=cfg.evaluate.num_steps, precision=drawing_precision,
                                  guidance=None if scale is None else Guidance(scale))
            numbers = fid.evaluate(drawing.draw(np.arange(len(seeds))), len(seeds), reference, extractor,
                                   metrics=cfg.evaluate.metrics, progress="evaluation")
            if accelerator.is_main_process:
                source = {"checkpoint": str(run_dir), "step": step, "weights": "ema", "ema": True, "in_training": True,
                          "classes": "all", **fid.describe_autoencoder(autoencoder, cfg.decode_precision),
                          **drawing.record}
                fid.report(fid.result_row(
                    numbers, len(seeds), source, extractor, reference, seconds=time.perf_counter() - began,
                    batch_size=cfg.evaluate.batch_size, image_rule=fid.DRAWN_RULE,
                ), run_dir / "results.jsonl")
            suffix = "" if scale is None else f"_guided_{scale:g}"
            accelerator.log({f"{name}{suffix}": value for name, value in numbers.items()}, step=step)

    @full_disk_is_a_sentence()
    def save() -> None:
        reduced = {"sums": sums.over_ranks(accelerator)}
        if not accelerator.is_main_process:
            return
        training = checkpoints.optimizer_tensors(model, optimizer.optimizer) | reduced
        scaler = accelerator.scaler and accelerator.scaler.state_dict()
        meta = {"step": step, "images": images, "elapsed_s": elapsed(), "run_id": run_id, "scaler": scaler, **record,
                "config": OmegaConf.to_container(cfg, resolve=True), "torch": torch.__version__}
        checkpoints.save(checkpoints.step_folder(run_dir, step),
                         {"ema": ema.state_dict(), "model": model.state_dict(), "training": training}, meta)
        checkpoints.prune(run_dir, cfg.checkpoint.keep_last, cfg.checkpoint.keep_every)

    # ---- the loop
    bar = tqdm(initial=step, total=cfg.steps, desc=cfg.name, unit="step", disable=not accelerator.is_main_process)
    first_step = reported_step = step
    started = reported_at = time.perf_counter()
    while True:
        moved, finished = step > first_step, step >= cfg.steps
        if moved and (due(step, cfg.log.every) or finished):
            report(step - reported_step, time.perf_counter() - reported_at)
            reported_step, reported_at = step, time.perf_counter()
        stopped_by = stop.agreed(step, world)
        last_step = finished or stopped_by
        paused_at = time.perf_counter()
        if moved and (due(step, cfg.checkpoint.every) or last_step):
            save()
        # Not only where the run has moved: a kill after the save may have cost the grid of a checkpoint.
        due_grid = step and cfg.samples.every and (due(step, cfg.samples.every) or finished)
        if due_grid and main_rank_says(accelerator, not grid_path().exists()):
            draw()
        # The untrained network is evaluated too: it is what the numbers are to be compared with.
        if cfg.evaluate.every and (due(step, cfg.evaluate.every) or finished):
            evaluate()
        reported_at += time.perf_counter() - paused_at      # a report is about training, not about drawing and saving
        if last_step:
            break

        torch.manual_seed(step_seed(cfg.seed, step, rank))
        stored, y = (part.to(device, non_blocking=True) for part in next(loader))
        loss, grad_norm, skipped = train_step(
            accelerator, net, model, diffusion, optimizer, to_latent(stored, latents.kind), y,
            lr=learning_rate(step, cfg.steps, cfg.optimizer.lr, cfg.optimizer.warmup_steps, cfg.optimizer.schedule),
            label_dropout=cfg.label_dropout, clip_norm=cfg.optimizer.clip_norm, num_parts=cfg.grad_accum_steps,
            cuda_graphs=cfg.compile in speed.CUDA_GRAPHS,
        )
        update_ema(ema, model, ema_decay(step, cfg.ema.decay, cfg.ema.warmup))
        sums.add(loss, grad_norm, skipped)
        step, images = step + 1, images + cfg.batch_size
        bar.update()

    loader.close()
    bar.close()
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if stopped_by and not finished:
        saved = f"saved in {checkpoints.step_folder(run_dir, step)}" if moved else "there was nothing new to save"
        name = signal.Signals(stopped_by).name
        accelerator.print(f"Stopped by {name} at step {step}; {saved}. The same command resumes.")
        sys.exit(128 + stopped_by)
    accelerator.print(f"Finished {cfg.steps} steps: {run_dir}. Next: python sample.py checkpoint={run_dir}")


if __name__ == "__main__":
    main()
