"""Trains a DiT, dense or TREAD-routed, on a folder of latents; one loop for a laptop, a GPU, or many nodes.

    accelerate launch train.py model=tread                  # ImageNet-256 latents in data/imagenet256
    accelerate launch train.py model=dit                    # the dense baseline
    python train.py experiment=quickstart                   # the built-in shapes, minutes on a CPU
    torchrun --nproc_per_node 8 train.py …                  # in place of accelerate launch

Rerun the same command to resume a stopped run. Options: configs/config.yaml; outputs: runs/<name>/.
"""

import contextlib
import itertools
import math
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from tqdm import tqdm

from guidance import Guidance
from latents.loader import batches, to_latent
from objectives import DiffusionLoss
from runtime import files, libraries, ranks, sharding
from runtime.command import command
from runtime.schema import as_text, typed
from sampling.generate import compile_to_sample, gathered, generate
from sampling.options import labels_of
from sampling.pictures import write_grid
from sampling.sampler import Sampler
from scoring.image_sets import sampled_images, weights_record
from scoring.results import result_row
from scoring.score import score_on
from training import speed
from training.optimizers import update_weights
from training.run import Run, make_run
from training.run_folder import begin_record, lock_run, prepare_folder, require_gradients, resume, save, training_step
from training.settings import TrainSettings, check_settings
from weights.averages import decays
from weights.records import build_network

FIRST_SEED = 100_000    # of the images that are scored during training

# ---- one step -------------------------------------------------------------------------------------------------------


def step_seed(seed: int, step: int, rank: int) -> int:
    """Mixes (seed, step, rank) into the seed for all random numbers of a rank in a step."""
    return int(np.random.SeedSequence(seed, spawn_key=(step, rank)).generate_state(1, np.uint64)[0])


def learning_rate(step: int, steps: int, lr: float, warmup_steps: int, schedule: str) -> float:
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "cosine":
        return lr * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps))) / 2
    return lr


def set_learning_rates(
    optimizer: torch.optim.Optimizer, step: int, steps: int, warmup_steps: int, schedule: str,
) -> None:
    """Sets each parameter group's learning rate for a step, scheduled from its initial one."""
    for group in optimizer.param_groups:
        lr = group.setdefault("initial_lr", group["lr"])
        group["lr"] = learning_rate(step, steps, lr, warmup_steps, schedule)


def train_step(
    accelerator: Accelerator, wrapped: nn.Module, objective: DiffusionLoss,
    optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, arrays: Mapping[str, Tensor], *, label_dropout: float,
    clip_norm: float | None, num_parts: int, cuda_graphs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Takes one optimizer step on this rank's share x (B, C, h, w), y (B,) of the batch; never waits for the device.

    `wrapped` is `objective` inside autocast and DDP, and `cuda_graphs` says that its blocks replay CUDA graphs.
    `arrays` (B, …) are the objective's extra inputs. Returns the loss, the gradient norm, whether the step was skipped
    because that was not finite, and the terms of the loss: tensors on the device that no later step overwrites.
    """
    if cuda_graphs:  # from here on, but not between parts, they may overwrite the last step's activations and gradients
        torch.compiler.cudagraph_mark_step_begin()
    y = torch.where(torch.rand(len(y), device=y.device) < label_dropout, objective.net.num_classes, y)
    step_loss = torch.zeros((), device=x.device)
    step_terms = torch.zeros(len(objective.terms), device=x.device)
    parts = zip(*(tensor.chunk(num_parts) for tensor in (x, y, *arrays.values())), strict=True)
    for part, (x_part, y_part, *array_parts) in enumerate(parts):
        with contextlib.nullcontext() if part == num_parts - 1 else accelerator.no_sync(wrapped):
            losses, terms = wrapped(x_part, y_part, **dict(zip(arrays, array_parts, strict=True)))
            loss = losses.mean()
            accelerator.backward(loss)  # divides the loss by the number of parts
        step_loss += loss.detach() / num_parts
        if terms:
            step_terms += torch.stack([terms[name].detach().mean() for name in objective.terms]) / num_parts
    grad_norm, skipped = update_weights(accelerator, optimizer, clip_norm)
    return step_loss, grad_norm, skipped, step_terms


def trained_weights(net: nn.Module) -> list[nn.Parameter]:
    """Lists the trained parameters. Call it once, as walking the modules takes longer than updating an average."""
    return [p for p in net.parameters() if p.requires_grad]


@torch.no_grad()
def update_ema(average: list[nn.Parameter], weights: list[nn.Parameter], decay: float) -> None:
    """Moves an average toward the weights: average = decay · average + (1 - decay) · weights."""
    torch._foreach_lerp_(sharding.local_tensors(average), sharding.local_tensors(weights), 1 - decay)


# ---- reports, grids and scores --------------------------------------------------------------------------------------


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def peak_memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def as_line(row: dict[str, Any], steps: int) -> str:
    """Formats a row of metrics.jsonl for the screen."""
    loss, norm = (f"{row[name]:.4f}" if row[name] is not None else "not finite" for name in ("loss", "grad_norm"))
    terms = "".join(f"  {name.removeprefix('loss_')} {value:.4f}" for name, value in row.items()
                    if name.startswith("loss_") and value is not None)
    return (
        f"step {row['step']}/{steps}  loss {loss}{terms}  lr {row['lr']:.2e}  grad {norm}  "
        f"{row['img_per_sec']:,.{int(row['img_per_sec'] < 10)}f} img/s  {row['sec_per_step']:.3f} s/step  "
        f"{row['peak_memory_gib']:.2f} GiB  {row['images']:,} images  {row['elapsed_s']:,.0f} s"
        + (f"  {row['skipped']} steps skipped" if row["skipped"] else "")
    )


def start_trackers(run: Run) -> None:
    """Starts the trackers that are set; raises ValueError if one cannot start, such as wandb without a login."""
    trackers = run.cfg.log.trackers
    libraries.keep_tensorflow_out()
    run_id = re.sub(r"[^\w.-]", "-", run.run_id, flags=re.ASCII)[-128:]  # wandb uses it in a URL
    # TensorBoard hides what a killed process logged after its last checkpoint; this process logs it again.
    options = {"wandb": {"name": run.cfg.name, "dir": str(run.folder), "id": run_id, "resume": "allow"},
               "tensorboard": {"purge_step": run.step + 1 if run.step else 0}}
    settings = {key: str(value) for key, value in run.cfg.model_dump().items()}
    try:
        if missing := [name for name in trackers if name not in map(str, run.accelerator.log_with)]:
            raise ImportError(f"{missing[0]} is not installed")
        run.accelerator.init_trackers(os.environ.get("WANDB_PROJECT", "tread"), settings, options)
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"log.trackers={as_text(trackers)} could not start: {reason}. Run pip install "
                         f"{' '.join(trackers)}; for wandb also `wandb login`, or set WANDB_MODE=offline; or leave it "
                         f"out with log.trackers=[].") from error


@contextlib.contextmanager
def timed_out_of_speed(run: Run, bar: tqdm, work: str) -> Iterator[None]:
    """Shows on the progress bar what the run does between steps, and excludes that time from the speed."""
    bar.set_postfix_str(work)
    if bar.disable and not run.step:  # without a bar, the first grid would be a silent minute on a CPU
        run.accelerator.print(f"{work} the untrained network")
    if run.accelerator.device.type == "cuda":  # steps that are still running count as training
        torch.cuda.synchronize(run.accelerator.device)
    began = time.perf_counter()
    yield
    run.seconds_paused += time.perf_counter() - began
    bar.set_postfix_str("")


def begin_step(run: Run) -> None:
    """Passes the step to the objective, and prints a line if its routes change at this step."""
    run.objective.step, schedule = run.step, run.objective.schedule
    if run.step in schedule.phases and run.step > 0 and run.accelerator.is_main_process:
        tqdm.write(f"step {run.step}/{run.cfg.steps}  routes {schedule.describe(run.step)}")


def measure(run: Run, num_steps: int, since: float) -> tuple[dict[str, Any], dict[str, float]]:
    """Returns the metrics of the steps since the last report, and the sums behind them; waits for the device."""
    total = run.sums.over_ranks(run.accelerator)
    seconds = time.perf_counter() - since - run.seconds_paused  # after the sums, as reading those waits for the GPU
    return {
        "step": run.step, "images": run.images,
        "loss": total["loss"] / total["steps"] if total["steps"] else None,
        "lr": run.optimizer.param_groups[0]["lr"],
        "grad_norm": total["grad_norm"] / total["steps"] if total["steps"] else None,
        **{f"loss_{name}": total[name] / total["steps"] if total["steps"] else None for name in run.objective.terms},
        "skipped": int(total["skipped"]),
        "img_per_sec": num_steps * run.cfg.batch_size / seconds, "sec_per_step": seconds / num_steps,
        "peak_memory_gib": peak_memory_gib(run.accelerator.device), "elapsed_s": run.elapsed,
    }, total


def log_first_step(run: Run) -> None:
    """Prints a line for this process's first step; the row of the next report includes that step."""
    row, _ = measure(run, 1, run.started)
    if run.accelerator.is_main_process:
        tqdm.write(as_line(row, run.cfg.steps) + "  including compilation" * bool(run.cfg.compile))


def report(run: Run, num_steps: int, since: float) -> None:
    """Prints and records the steps since the last report; raises ValueError if too many had no finite gradient."""
    row, total = measure(run, num_steps, since)
    run.seconds_paused = 0.0
    diverging = run.is_diverging(total)
    run.sums.reset()
    if row["loss"] is not None:
        run.reported_loss = row["loss"]
        run.lowest_loss = run.lowest_loss if diverging else min(run.lowest_loss, row["loss"])
    if run.accelerator.is_main_process:
        tqdm.write(as_line(row, run.cfg.steps))
        files.append_row(run.folder / "metrics.jsonl", row)
    run.accelerator.log({name: value for name, value in row.items() if value is not None}, step=run.step)
    require_gradients(run, int(total["skipped_in_row"]))


def sample_grid(run: Run) -> None:
    cfg = run.cfg.samples
    assert run.decoder and run.grid
    pictures = generate(run.accelerator, run.averages["ema"], Sampler(run.objective.diffusion, cfg.num_steps),
                        run.decoder.decode, *run.grid, batch_size=cfg.batch_size, precision=run.sampling_precision)
    picture = write_grid(run.accelerator, gathered(run.accelerator, pictures), run.grid[1], run.grid_path,
                         run.latents.display_names)
    for tracker in run.accelerator.trackers if picture else ():
        # TensorBoard would take the first axis after the batch for the channels.
        layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
        tracker.log_images({"samples": np.asarray(picture)[None]}, step=run.step, **layout)


def evaluate(run: Run) -> None:
    """Scores each average at each guidance scale, unless results.jsonl already has that score of this step."""
    cfg, accelerator, evaluator = run.cfg.evaluate, run.accelerator, run.evaluator
    assert run.decoder and evaluator
    results = run.folder / "results.jsonl"
    scored = ranks.from_main(accelerator, lambda: [
        (row["source"]["weights"], (row["source"]["guidance"] or {}).get("scale"))
        for row in files.read_rows(results) if training_step(row) == run.step])
    seeds = list(range(FIRST_SEED, FIRST_SEED + cfg.num_samples))
    labels = labels_of(seeds, run.latents.classes)
    with torch.device("meta"):
        outline = build_network(run.record["network"])  # complete, as shards cannot be counted
    for name, scale in itertools.product(run.averages, cfg.guidance_scales):
        of = f"{name}_{cfg.num_steps}_steps" + ("" if scale is None else f"_guided_{scale:g}")
        if (name, scale) in scored:
            accelerator.print(f"step {run.step}  {of} has been scored before, in {results}; to score it with other "
                              f"settings use fid.py")
            continue
        began = time.perf_counter()
        weights = weights_record(
            run.record["data"]["autoencoder"], run.latents.classes, run.model.num_classes, weights=name,
            checkpoint=str(run.folder), step=run.step, in_training=True, compiled=run.scores_compiled,
            decode_precision=run.cfg.decode_precision)
        sampler = Sampler(run.objective.diffusion, cfg.num_steps, None if scale is None else Guidance(scale))
        images = sampled_images(accelerator, run.averages[name], sampler, run.decoder.decode, seeds, labels,
                                outline=outline, batch_size=cfg.batch_size, size=evaluator.reference.record["size"],
                                precision=run.sampling_precision, weights=weights)
        scores = score_on(accelerator, evaluator, images)
        seconds = time.perf_counter() - began
        if accelerator.is_main_process:
            files.append_row(results, result_row(accelerator, images, evaluator, {**scores}, batch_size=cfg.batch_size,
                                                 seconds=seconds))
            written = "  ".join(f"{metric} {value:.4g}" for metric, value in scores.items())
            tqdm.write(f"step {run.step}/{run.cfg.steps}  {written}  of {len(seeds):,} images, {of}, in "
                       f"{seconds:.0f} s")
        accelerator.log({f"{metric}_{of}": value for metric, value in scores.items()}, step=run.step)


def save_sample_score(run: Run, bar: tqdm, stop: ranks.StopRequest, finished: bool) -> int:
    """Saves, samples a grid and scores, each if it is due; returns the signal that stops the run, or 0.

    A signal that arrives during sampling ends it, and the run is saved.
    """
    cfg, stopped_by = run.cfg, 0 if finished else stop.agreed()
    try:
        if run.step != run.saved and (due(run.step, cfg.checkpoint.every) or finished or stopped_by):
            with timed_out_of_speed(run, bar, "saving"):
                save(run)
        # This also applies right after resuming, as a kill may come between a save and its grid.
        due_grid = (run.step or cfg.samples.at_start) and run.grid and (due(run.step, cfg.samples.every) or finished)
        if due_grid and not stopped_by and not ranks.from_main(run.accelerator, run.grid_path.exists):
            with timed_out_of_speed(run, bar, "sampling"):
                sample_grid(run)
        # The untrained network is scored, too, for comparison.
        if run.evaluator and not stopped_by and (due(run.step, cfg.evaluate.every) or finished):
            with timed_out_of_speed(run, bar, "scoring"):
                evaluate(run)
    except ranks.Stopped as stopped:
        [stopped_by] = stopped.args
        save(run)
    return stopped_by


# ---- the story ------------------------------------------------------------------------------------------------------


@command("config", TrainSettings, rooms=("objectives",), check=check_settings)
def main(cfg: TrainSettings) -> None:
    accelerator = speed.make_accelerator(
        cfg.precision, cfg.grad_accum_steps, cfg.tf32, cfg.cpu,
        log_with=cfg.log.trackers or None, project_dir=cfg.run_dir,
    )
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
    run = make_run(cfg, accelerator)
    cfg = run.cfg
    if accelerator.is_main_process:
        lock_run(run)
    resumed = resume(run)
    loader = batches(run.latents, cfg.batch_size, seed=cfg.seed, rank=rank, world=world,
                     start=run.images // cfg.batch_size, pin=device.type == "cuda", arrays=run.objective.arrays)
    start_trackers(run)
    if accelerator.is_main_process:
        prepare_folder(run, resumed)

    # ---- speed is added from outside: `run.model` is still the plain network, and is what is saved
    if cfg.activation_checkpointing:
        speed.recompute_activations(run.model)
    libraries.compile_blocks(run.model, cfg.compile)
    wrapped = speed.replicate(accelerator, run.objective, sharded=cfg.sharding == "fsdp")
    run.optimizer = accelerator.prepare(run.optimizer)
    for net in run.averages.values() if run.evaluator else ():
        run.scores_compiled = compile_to_sample(
            net, None, None if cfg.compile else False, cfg.evaluate.num_samples, device)
    weights, averages = trained_weights(run.model), {name: trained_weights(net) for name, net in run.averages.items()}
    stop = ranks.StopRequest(accelerator)
    for net in run.averages.values():
        net.register_forward_pre_hook(stop.end_sampling)
    accelerator.print(run.summary + (f"; resuming {run.checkpoint.name}" if resumed else ""))

    # ---- the loop
    bar = tqdm(initial=run.step, total=cfg.steps, desc=cfg.name, unit="step",
               disable=not accelerator.is_main_process or None)
    first_step = reported_step = run.step
    run.started = reported_at = time.perf_counter()
    while True:
        has_stepped, finished = run.step > first_step, run.step >= cfg.steps
        if has_stepped and (due(run.step, cfg.log.every) or finished):
            report(run, run.step - reported_step, reported_at)
            reported_step, reported_at = run.step, time.perf_counter()
        elif run.step == first_step + 1:
            log_first_step(run)
        stopped_by = save_sample_score(run, bar, stop, finished)
        if stopped_by or finished:
            break
        if not has_stepped:
            begin_record(run)
            if cfg.compile and accelerator.is_main_process:
                tqdm.write("compiling: this takes minutes and a C++ compiler; compile=false does without")

        torch.manual_seed(step_seed(cfg.seed, run.step, rank))
        begin_step(run)
        set_learning_rates(run.optimizer, run.step, cfg.steps, cfg.optimizer.warmup_steps, cfg.optimizer.schedule)
        stored, y, arrays = send_to_device(next(loader), device, non_blocking=True)
        loss, grad_norm, skipped, terms = train_step(
            accelerator, wrapped, run.objective, run.optimizer, to_latent(stored, run.latents.kind), y,
            arrays, label_dropout=cfg.label_dropout, clip_norm=cfg.optimizer.clip_norm,
            num_parts=cfg.grad_accum_steps, cuda_graphs=cfg.compile == "reduce-overhead",
        )
        for name, decay in decays(run.step, cfg.ema.decay, cfg.ema.warmup).items():
            update_ema(averages[name], weights, decay)
        run.sums.add(loss, grad_norm, skipped, terms)
        run.step, run.images = run.step + 1, run.images + cfg.batch_size
        bar.update()
        stop.listen()

    bar.close()
    try:
        for tracker in accelerator.trackers:
            tracker.finish()
    finally:
        accelerator.wait_for_everyone()  # else Slurm may end a rank that still uploads, as another has left
    if stopped_by:
        accelerator.print(f"Stopped by {signal.Signals(stopped_by).name} at step {run.step}; saved in "
                          f"{run.checkpoint}. The same command resumes.")
        sys.exit(128 + stopped_by)
    following = f" Next: python sample.py {typed('checkpoint', run.folder)}" if run.step else ""
    accelerator.print(f"Finished {run.step} steps: {run.folder}.{following}")


if __name__ == "__main__":
    main()
