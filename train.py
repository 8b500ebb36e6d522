"""Trains a DiT, dense or TREAD-routed, on a folder of latents; one loop for a laptop, a GPU, or many nodes.

    accelerate launch train.py model=tread                  # ImageNet-256 latents in data/imagenet256
    accelerate launch train.py model=dit name=baseline      # the dense baseline
    accelerate launch train.py experiment=quickstart        # the built-in shapes, minutes on a CPU
    python train.py … and torchrun --nproc_per_node 8 train.py … do the same

The same command resumes what was stopped or killed. Options: configs/config.yaml; outputs: runs/<name>/.
"""

import contextlib
import copy
import fcntl
import functools
import json
import math
import resource
import signal
import sys
import time
from pathlib import Path

import hydra
import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from tqdm import tqdm

import autoencoder as autoencoders
import checkpoint as checkpoints
from data import batches, open_latents, to_latent
from dit import DiT_models
from sample import build_diffusion, build_network, gathered, generate, labels_of, parse_classes, parse_range, write_grid

PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def step_seed(seed: int, step: int, rank: int) -> int:
    """Mixes (seed, step, rank) into the one seed from which a rank draws everything random in a step."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0])


def learning_rate(step: int, steps: int, lr: float, warmup_steps: int, schedule: str) -> float:
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "cosine":
        return lr * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps))) / 2
    return lr


@torch.no_grad()
def update_ema(ema: nn.Module, model: nn.Module, decay: float) -> None:
    torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - decay)


def recompute_activations(model: nn.Module) -> None:
    """Makes each block forget its activations and compute them again in the backward pass."""
    for block in model.blocks:
        block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)


def due(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0


def peak_memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class StopRequest:
    """Turns the first SIGTERM or SIGINT into a request that the loop honours; a second one ends the process at once."""

    def __init__(self):
        self.signal = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.receive)

    def receive(self, number: int, frame: object) -> None:
        self.signal = number
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def agreed(self, accelerator: Accelerator, at_report: bool) -> int:
        """Returns the signal that some rank received, or 0. Ranks can only agree where they wait for each other anyway."""
        if accelerator.num_processes > 1:
            return int(accelerator.gather(torch.tensor([self.signal], device=accelerator.device)).max()) if at_report else 0
        return self.signal


def lock(run_dir: Path) -> object:
    """Holds a run for this process until it ends, however it ends. Raises ValueError where another one holds it."""
    handle = open(run_dir / ".lock", "w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"Another process is training {run_dir}. Stop it first, or set name=<another> for a second run.") from None
    return handle


def check_settings(cfg: DictConfig) -> None:
    """Raises ValueError, with the numbers and the knob, for settings that cannot work."""
    if cfg.precision not in PRECISIONS:
        raise ValueError(f"precision={cfg.precision} is not one of {', '.join(PRECISIONS)}.")
    if cfg.model.backbone_type not in DiT_models:
        raise ValueError(f"model.backbone_type={cfg.model.backbone_type} is not one of {', '.join(DiT_models)}.")
    if cfg.optimizer.schedule not in ("constant", "cosine"):
        raise ValueError(f"optimizer.schedule={cfg.optimizer.schedule} is neither constant nor cosine.")
    for key, low, high in (("batch_size", 1, math.inf), ("grad_accum_steps", 1, math.inf), ("label_dropout", 0, 1), ("ema.decay", 0, 1), ("steps", 0, math.inf), ("log.every", 1, math.inf),
                           ("checkpoint.keep_last", 1, math.inf), ("max_skipped_in_row", 1, math.inf),
                           ("optimizer.warmup_steps", 0, math.inf), ("checkpoint.every", 1, math.inf)):
        if not low <= OmegaConf.select(cfg, key) <= high:
            raise ValueError(f"{key}={OmegaConf.select(cfg, key)} lies outside [{low}, {high}].")


def describe_network(cfg: DictConfig) -> dict:
    """Gathers the network's keywords, as its checkpoints record them, from the config's model and data groups."""
    overrides = {key: cfg.model[key] for key in ("hidden_size", "depth", "num_heads", "patch_size") if cfg.model[key] is not None}
    return {
        **DiT_models[cfg.model.backbone_type].keywords, **overrides,
        "input_size": cfg.data.input_size, "in_channels": cfg.data.channels, "num_classes": cfg.data.num_classes,
        "init": cfg.model.init, "routes": OmegaConf.to_container(cfg.model.routes),
    }


def check_resumable(meta: dict, now: dict, run_dir: Path) -> list[str]:
    """Compares a checkpoint's record with this run's; returns what has changed and may, as sentences.

    Raises ValueError for what cannot be continued: another network, another diffusion, another data set.
    """
    def shape_of(network: dict) -> dict:
        return {key: value for key, value in network.items() if key not in ("routes", "init")}

    for what, old, new in (("network", shape_of(meta["network"]), shape_of(now["network"])),
                           ("diffusion", meta["diffusion"]["name"], now["diffusion"]["name"]),
                           ("data set", meta["data"]["fingerprint"], now["data"]["fingerprint"])):
        if old != new:
            if isinstance(old, dict):
                differing = [key for key in new if old.get(key) != new[key]]
                old, new = ({key: side.get(key) for key in differing} for side in (old, new))
            raise ValueError(f"{run_dir} was trained with another {what}, so it cannot go on: it has {old}, this command {new}. "
                             f"Start a run of its own with name=<another>, or give the settings that it began with.")
    changes = [f"{key} was {meta[key]} and is now {now[key]}" for key in ("world", "seed", "batch_size") if meta[key] != now[key]]
    if meta["network"]["routes"] != now["network"]["routes"]:
        changes.append(f"routes were {meta['network']['routes']} and are now {now['network']['routes']}")
    return changes


def truncate_metrics(path: Path, step: int) -> None:
    """Drops the rows after `step`, and a half-written last one: the resumed run writes them again."""
    if path.is_file():
        kept = []
        for line in path.read_text().splitlines(keepends=True):
            with contextlib.suppress(ValueError):
                if line.endswith("\n") and json.loads(line)["step"] <= step:
                    kept.append(line)
        checkpoints.write_text(path, "".join(kept))


@hydra.main(config_path="configs", config_name="config", version_base="1.3")
def main(cfg: DictConfig) -> None:
    run_dir = Path(cfg.run_dir)
    # ---- the world, the data, the network: everything that a user may have got wrong is found here, before the first step
    try:
        stop = StopRequest()
        check_settings(cfg)
        accelerator = Accelerator(
            mixed_precision=PRECISIONS[cfg.precision], gradient_accumulation_steps=cfg.grad_accum_steps,
            cpu=cfg.cpu or not torch.accelerator.is_available(),     # several ranks on CPUs need to be told
            log_with=list(cfg.log.trackers) or None, project_dir=run_dir,
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
        )
        parts = accelerator.num_processes * cfg.grad_accum_steps
        if cfg.batch_size % parts:
            raise ValueError(f"batch_size={cfg.batch_size} counts the images of a whole step and must be a multiple of {parts}: "
                             f"{accelerator.num_processes} ranks × grad_accum_steps={cfg.grad_accum_steps}.")
        device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
        torch.set_float32_matmul_precision("high" if cfg.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = cfg.tf32

        latents = open_latents(cfg.data.path, kind=cfg.data.kind, scale=cfg.data.scale, num_classes=cfg.data.num_classes)
        latents.require(shape=(cfg.data.channels, cfg.data.input_size, cfg.data.input_size), num_classes=cfg.data.num_classes)
        if cfg.batch_size > latents.count:
            raise ValueError(f"batch_size={cfg.batch_size} is more than the {latents.count} latents in {cfg.data.path}.")

        torch.manual_seed(cfg.seed)
        record = {
            "network": describe_network(cfg), "diffusion": OmegaConf.to_container(cfg.diffusion), "world": world,
            "seed": cfg.seed, "batch_size": cfg.batch_size,
            "data": {"fingerprint": latents.fingerprint, "autoencoder": cfg.data.autoencoder or latents.autoencoder,
                     "class_names": latents.class_names, "kind": latents.kind},
        }
        model = build_network(record["network"]).to(device)
        ema = copy.deepcopy(model).eval().requires_grad_(False)
        diffusion = build_diffusion(record["diffusion"])
        if cfg.samples.every:
            decoder = autoencoders.load(record["data"]["autoencoder"], device=device)
            grid_seeds = parse_range("samples.seeds", cfg.samples.seeds)
            grid_labels = labels_of(grid_seeds, parse_classes(cfg.samples.classes, cfg.data.num_classes, latents.class_names))
        if accelerator.is_main_process:
            run_dir.mkdir(parents=True, exist_ok=True)
            held = lock(run_dir)  # noqa: F841  (held until the process ends)

        optimizer = torch.optim.AdamW(
            model.parameters(), lr=cfg.optimizer.lr, betas=tuple(cfg.optimizer.betas), eps=cfg.optimizer.eps,
            weight_decay=cfg.optimizer.weight_decay, fused=True,
        )
        # Sums since the last report, on the device: reading them is the only time that the loop waits for it.
        sums = {key: torch.zeros((), dtype=torch.float64, device=device)
                for key in ("loss", "grad_norm", "steps", "skipped", "skipped_in_row")}

        # ---- resume
        step, images, elapsed_before = 0, 0, 0.0
        resumed = checkpoints.latest(run_dir)
        if resumed is not None:
            meta = checkpoints.read_meta(resumed)
            for change in check_resumable(meta, record, run_dir):
                accelerator.print(f"Resuming with a change: {change}; from here on the run differs from an unchanged one.")
            step, images, elapsed_before = meta["step"], meta["images"], meta["elapsed_s"]
            model.load_state_dict(checkpoints.load(resumed, "model"))
            ema.load_state_dict(checkpoints.load(resumed, "ema"))
            training = checkpoints.load(resumed, "training")
            for key, total in sums.items():
                total.copy_(training.pop(f"sums.{key}"))
            checkpoints.load_optimizer(model, optimizer, training)
            if accelerator.scaler is not None and meta["scaler"]:
                accelerator.scaler.load_state_dict(meta["scaler"])
    except ValueError as error:
        sys.exit(f"train.py: {error}")
    metrics = run_dir / "metrics.jsonl"
    if accelerator.is_main_process:
        truncate_metrics(metrics, step)
        checkpoints.write_text(run_dir / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))

    # ---- speed, applied from outside; `model` stays the plain network that is saved, `net` is what is called
    if cfg.activation_checkpointing:
        recompute_activations(model)
    if cfg.compile:
        model.compile(dynamic=False)
    net, optimizer = accelerator.prepare(model, optimizer)
    if cfg.log.trackers:
        flat = {key: str(value) for key, value in OmegaConf.to_container(cfg, resolve=True).items()}
        accelerator.init_trackers("tread", config=flat, init_kwargs={"wandb": {"name": cfg.name, "dir": str(run_dir)}})
    num_parameters = sum(p.numel() for p in model.parameters())
    accelerator.print(
        f"{cfg.name}: {cfg.model.backbone_type}, {num_parameters / 1e6:.1f}M parameters, "
        f"routes {', '.join(map(str, model.routes)) or 'none'}; {latents.count:,} latents of {latents.shape} in "
        f"{latents.num_classes} classes; {world} × {device.type}, {cfg.precision}; "
        + (f"resuming {resumed.name} of {cfg.steps}" if resumed else f"{cfg.steps} steps of {cfg.batch_size}"))

    # ---- the loop
    def train_step(x: Tensor, y: Tensor) -> None:
        """Takes one optimizer step on this rank's share x (B, C, h, w), y (B,) of the batch; never waits for the device."""
        y = torch.where(torch.rand(len(y), device=device) < cfg.label_dropout, model.num_classes, y)
        step_loss = 0.0
        for part, (x_part, y_part) in enumerate(zip(x.chunk(cfg.grad_accum_steps), y.chunk(cfg.grad_accum_steps), strict=True)):
            last_part = part == cfg.grad_accum_steps - 1
            with contextlib.nullcontext() if last_part else accelerator.no_sync(net):
                loss = diffusion.loss(net, x_part, y_part, routes=model.routes).mean()
                accelerator.backward(loss)
                step_loss = step_loss + loss.detach() / cfg.grad_accum_steps
        accelerator.unscale_gradients(optimizer)
        grads = [p.grad for p in model.parameters()]
        grad_norm = torch.nn.utils.get_total_norm(grads)
        if cfg.optimizer.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), cfg.optimizer.clip_norm, grad_norm)
        # A non-finite loss makes non-finite gradients, and DDP makes them so on every rank: all skip together. The fused
        # optimizer reads the flag on the device, as it does for a GradScaler, which in fp16 sets it by itself.
        skip = ~grad_norm.isfinite()
        if accelerator.scaler is None:
            optimizer.optimizer.grad_scale, optimizer.optimizer.found_inf = None, skip.float()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, cfg.steps, cfg.optimizer.lr, cfg.optimizer.warmup_steps, cfg.optimizer.schedule)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        decay = min(cfg.ema.decay, (1 + step) / (10 + step)) if cfg.ema.warmup else cfg.ema.decay
        update_ema(ema, model, decay)
        sums["loss"] += torch.where(skip, 0, step_loss)
        sums["grad_norm"] += torch.where(skip, 0, grad_norm)
        sums["steps"] += ~skip
        sums["skipped"] += skip
        sums["skipped_in_row"].add_(1).mul_(skip)

    def report(seconds: float, steps: int) -> None:
        """Reduces the sums over ranks, writes one line and one row, and stops a run in which nothing is finite any more."""
        total = {key: accelerator.reduce(value.clone(), "mean").item() for key, value in sums.items()}
        row = {
            "step": step, "images": images,
            "loss": total["loss"] / total["steps"] if total["steps"] else None,
            "lr": optimizer.param_groups[0]["lr"],
            "grad_norm": total["grad_norm"] / total["steps"] if total["steps"] else None,
            "skipped": int(total["skipped"]),
            "img_per_sec": steps * cfg.batch_size / seconds, "sec_per_step": seconds / steps,
            "peak_memory_gib": peak_memory_gib(device), "elapsed_s": elapsed_before + time.perf_counter() - started,
        }
        if accelerator.is_main_process:
            with open(metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            loss, norm = (f"{row[key]:.4f}" if row[key] is not None else "not finite" for key in ("loss", "grad_norm"))
            tqdm.write(f"step {step}/{cfg.steps}  loss {loss}  lr {row['lr']:.2e}  grad {norm}  {row['img_per_sec']:,.0f} img/s  "
                       f"{row['sec_per_step']:.3f} s/step  {row['peak_memory_gib']:.2f} GiB  {images:,} images  "
                       f"{row['elapsed_s']:,.0f} s" + (f"  {row['skipped']} steps skipped" if row["skipped"] else ""))
        accelerator.log({key: value for key, value in row.items() if value is not None}, step=step)
        for key in ("loss", "grad_norm", "steps"):
            sums[key].zero_()
        if total["skipped_in_row"] >= cfg.max_skipped_in_row:
            last_good = checkpoints.latest(run_dir)
            sys.exit(f"train.py: the last {int(total['skipped_in_row'])} steps had no finite gradient and were skipped, so the run stops at "
                     f"step {step}. The last good checkpoint is {last_good or 'none'}. Lower optimizer.lr, set "
                     f"optimizer.clip_norm=1, or train in precision=fp32 or bf16; the same command then resumes from it.")

    def save() -> None:
        reduced = {f"sums.{key}": accelerator.reduce(value.clone(), "mean") for key, value in sums.items()}
        if accelerator.is_main_process:
            training = checkpoints.optimizer_tensors(model, optimizer.optimizer) | reduced
            tensors = {"ema": ema.state_dict(), "model": model.state_dict(), "training": training}
            meta = {"step": step, "images": images, "elapsed_s": elapsed_before + time.perf_counter() - started,
                    "scaler": accelerator.scaler and accelerator.scaler.state_dict(), **record,
                    "config": OmegaConf.to_container(cfg, resolve=True), "torch": torch.__version__}
            try:
                checkpoints.save(checkpoints.step_folder(run_dir, step), tensors, meta)
                checkpoints.prune(run_dir, cfg.checkpoint.keep_last, cfg.checkpoint.keep_every)
            except OSError as error:
                sys.exit(f"train.py: {error} Free some room and run the same command again.")

    def draw() -> None:
        images_of_ema = generate(ema, diffusion, decoder.decode, grid_seeds, grid_labels, precision=cfg.precision,
                                 batch_size=cfg.samples.batch_size, num_steps=cfg.samples.num_steps, progress="samples")
        write_grid(gathered(images_of_ema), run_dir / "samples" / f"step-{step:08d}.png", latents.class_names)

    loader = batches(latents, cfg.batch_size, seed=cfg.seed, rank=rank, world=world, start=images // cfg.batch_size,
                     pin=device.type == "cuda")
    bar = tqdm(initial=step, total=cfg.steps, desc=cfg.name, unit="step", disable=not accelerator.is_main_process)
    started = window_started = time.perf_counter()
    first_step, window_first = step, step
    while True:
        at_report = due(step, cfg.log.every) and step > first_step
        if at_report:
            report(time.perf_counter() - window_started, step - window_first)
        stopped_by = stop.agreed(accelerator, at_report)
        last_step = step >= cfg.steps or stopped_by
        paused = time.perf_counter()
        if step > first_step and (due(step, cfg.samples.every) or (last_step and not stopped_by and cfg.samples.every)):
            draw()
        if step > first_step and (due(step, cfg.checkpoint.every) or last_step):
            save()
        if at_report:
            window_started, window_first = time.perf_counter(), step
        else:
            window_started += time.perf_counter() - paused      # the report is about training, not about saving
        if last_step:
            break
        torch.manual_seed(step_seed(cfg.seed, step, rank))
        stored, y = next(loader)
        train_step(to_latent(stored.to(device, non_blocking=True), latents.kind), y.to(device, non_blocking=True))
        step += 1
        images += cfg.batch_size
        bar.update()
    loader.close()
    bar.close()
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if stopped_by:
        accelerator.print(f"Stopped by {signal.Signals(stopped_by).name} at step {step}; saved in "
                          f"{checkpoints.step_folder(run_dir, step)}. The same command resumes.")
        sys.exit(128 + stopped_by)
    accelerator.print(f"Finished {cfg.steps} steps: {run_dir}. Draw from it with: python sample.py checkpoint={run_dir}")


if __name__ == "__main__":
    main()
