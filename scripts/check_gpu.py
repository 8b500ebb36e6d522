"""Is this machine good for training? Prints a line with numbers for each check: PASS, FAIL or SKIP.

CHECKS is the list. A check that raises has failed, and the others still run. Exits with 1 if any failed. Numbers are
compared with those of the CPU in float32, from the same weights and random numbers, within TOLERANCES. Commands and
options: configs/check_gpu.yaml.
"""

import contextlib
import gc
import importlib.util
import io
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from huggingface_hub import try_to_load_from_cache
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from edm import EDM
from objectives import DiffusionLoss
from routing_module import RouteSchedule
from runtime import files, ranks, sharding
from runtime.command import command, commit
from runtime.device import device_name
from runtime.schema import Location, Settings, Text, first_line
from scoring.features import ADM_GRAPH_URL, INCEPTION_URL
from scripts import prepare_latents
from scripts.benchmark import make_step
from training import speed
from weights.autoencoders import HUB_NAMES
from weights.records import build_network

Precision = speed.Precision | Literal["tf32"]
# Largest relative differences of loss and gradient norm, over STEPS, from those of the CPU in float32.
TOLERANCES: dict[Precision, float] = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 3e-2, "fp16": 1e-2, "fp8": 0.15}
COMPILED: dict[str, speed.Compile] = {"": False, ", compiled": True, ", CUDA graphs": "reduce-overhead"}
STEPS = 6               # of each comparison with the CPU; the second half is dense
# Not zeroed as in training, so that every layer has a gradient from the first step.
NETWORK: dict[str, Any] = dict(
    input_size=16, patch_size=2, in_channels=4, hidden_size=256, depth=6, num_heads=4, num_classes=10, init="xavier",
    routes=[dict(selection_ratio=0.5, start_layer_idx=1, end_layer_idx=-2)])
SMALLER = dict(input_size=8, hidden_size=32, depth=4, num_heads=2)      # of a rehearsal
IMAGES = 8              # of a rank and part


class CheckSettings(Settings):
    """configs/check_gpu.yaml."""

    rehearsal: bool
    only: Text | None
    out: Location | None


class Skipped(Exception):
    """What a check needs and this machine lacks."""


def require(holds: bool, needs: str) -> None:
    if not holds:
        raise Skipped(needs)


def start(rehearsal: bool, precision: Precision = "fp32", num_parts: int = 1) -> Accelerator:
    """Joins the ranks in a precision; raises Skipped for one that this machine lacks."""
    ranks.start_anew({})  # else the precision is that of the last check
    try:
        accelerator = speed.make_accelerator(
            "fp32" if precision == "tf32" else precision, num_parts, precision == "tf32", cpu=rehearsal)
        if precision == "fp8":
            speed.check_float8(accelerator.device)
    except ValueError as lacking:
        raise Skipped(str(lacking)) from None
    return accelerator


def require_close(apart: Mapping[str, float], whose: str, most: float) -> str:
    """Says how far numbers are from another's; raises ValueError with it where that is more than `most`, or NaN."""
    message = " and ".join(f"{name} within {value:.1e}" for name, value in apart.items())
    message += f" of {whose} (at most {most:g})"
    if not all(value <= most for value in apart.values()):
        raise ValueError(message)
    return message


def check_machine(rehearsal: bool) -> str:
    """Device and versions."""
    accelerator = start(rehearsal)
    words = f"{accelerator.num_processes} × {device_name(accelerator.device)}, torch {torch.__version__}"
    if not rehearsal:
        found = torch.cuda.get_device_properties(accelerator.device)
        words += f", capability {found.major}.{found.minor}, {found.total_memory / 1e9:.0f} GB"
    return words


def check_downloads(rehearsal: bool) -> str:
    """Names what the pages' commands download or import and is not here, as a node may have no network."""
    needed = {f"{repo} (autoencoder={name})": isinstance(
        try_to_load_from_cache(repo, "diffusion_pytorch_model.safetensors"), str) for name, repo in HUB_NAMES.items()}
    for name, url in (("inception", INCEPTION_URL), ("adm", ADM_GRAPH_URL)):
        file = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
        needed[f"{file} (features={name})"] = file.is_file()
    needed["TensorFlow (features=adm)"] = importlib.util.find_spec("tensorflow") is not None
    missing = [name for name, is_here in needed.items() if not is_here]
    require(not missing, f"not here, so fetch before the network is gone: {', '.join(missing)}")
    return f"{', '.join(needed)} are here"


def check_resuming(rehearsal: bool) -> str:
    """A run of eight steps at once, against one that ends after four and resumes."""
    require(start(rehearsal).num_processes == 1, "several processes; python scripts/check_gpu.py only=resume has one")
    losses = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        prepare_latents.main("source=shapes", "shapes.count=64", "resolution=16", "autoencoder=identity",
                             f"out={folder}/latents")
        for name, steps in (("once", 8), ("twice", 4), ("twice", 8)):
            train.main("experiment=quickstart", "batch_size=8", "optimizer.schedule=constant", "samples.every=0",
                       "log.every=1", "log.trackers=[]", "tf32=false", f"cpu={str(rehearsal).lower()}",
                       f"data.path={folder}/latents", f"run_dir={folder}/{name}", f"steps={steps}")
            losses[name] = {row["step"]: row["loss"] for row in files.read_rows(Path(folder, name, "metrics.jsonl"))}
    apart = max(abs(losses["twice"][step] / losses["once"][step] - 1) for step in range(5, 9))
    # Not equal, as GPU kernels sum in varying order.
    return require_close({"losses of steps 5 to 8": apart}, "those without a stop", 1e-3)


# ---- the same step on a CPU and here --------------------------------------------------------------------------------


class GivenLoss(DiffusionLoss):
    """The diffusion's loss at noise levels, noise and masks that come with the batch, and so are the same anywhere."""

    arrays = ("sigma", "eps", "mask_noise")

    def forward(  # type: ignore[override]     # a call also gets what `arrays` names
        self, x: Tensor, y: Tensor, sigma: Tensor, eps: Tensor, mask_noise: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return self.diffusion.loss(self.net, x, y, self.routes, sigma, eps, mask_noise=mask_noise), {}


def make_batch(network: Mapping[str, Any], count: int) -> dict[str, Tensor]:
    """Makes random latents x (B, C, h, w), labels y (B,) and all that a step would sample, on the CPU."""
    torch.manual_seed(1)
    side, tokens = network["input_size"], (network["input_size"] // network["patch_size"]) ** 2
    x = torch.randn(count, network["in_channels"], side, side)
    return {"x": x, "y": torch.arange(count) % network["num_classes"], "sigma": torch.randn(count).exp(),
            "eps": torch.randn_like(x), "mask_noise": torch.rand(count, 1, tokens)}


def make_objective(network: dict[str, Any], device: torch.device, sharded: bool = False) -> GivenLoss:
    torch.manual_seed(0)
    net = build_network(network)
    net = sharding.shard(net, device, torch.float32) if sharded else net.to(device)
    return GivenLoss(net, EDM(), schedule=RouteSchedule(net.routes, dense_after=STEPS // 2))


def steps_on_cpu(objective: GivenLoss, batch: Mapping[str, Tensor]) -> Tensor:
    """Returns loss and gradient norm (STEPS, 2) of plain steps in float32, without any of train.py's machinery."""
    optimizer, measured = torch.optim.AdamW(objective.parameters(), lr=1e-4, weight_decay=0.0), []
    for objective.step in range(STEPS):
        optimizer.zero_grad()
        loss = objective(**batch)[0].mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(objective.parameters(), math.inf)
        optimizer.step()
        measured.append((loss.item(), norm.item()))
    return torch.tensor(measured)


def steps_here(
    accelerator: Accelerator, objective: GivenLoss, batch: Mapping[str, Tensor], precision: Precision,
    how: speed.Compile, sharded: bool,
) -> Tensor:
    """Returns loss and gradient norm (STEPS, 2) of train.py's steps on all ranks together, skipped ones left out."""
    step = make_step(accelerator, objective, how, float8=precision == "fp8", sharded=sharded, label_dropout=0.0,
                     name="adamw", lr=1e-4, weight_decay=0.0)
    with accelerator.split_between_processes(batch) as share:
        noise = send_to_device(share, accelerator.device)
    x, y = noise.pop("x"), noise.pop("y")
    measured: list[tuple[float, float]] = []
    for _ in range(10 * STEPS):  # the first of fp16's are skipped until its scale fits
        objective.step = len(measured)
        loss, norm, skipped, _ = step(x, y, noise)
        if not skipped:
            measured.append((accelerator.reduce(loss, "mean").item(), norm.item()))
        if len(measured) == STEPS:
            return torch.tensor(measured)
    raise ValueError("almost all steps were skipped, as their gradients were not finite")


def check_step(
    rehearsal: bool, precision: Precision, how: speed.Compile = False, sharded: bool = False,
) -> str:
    """Steps, first routed and then dense, of one and of two parts, against the CPU's; in replicas, or sharded."""
    if rehearsal:
        require(precision in ("fp32", "bf16"), f"{precision} needs a GPU")
        require(how != "reduce-overhead", "CUDA graphs need a GPU")
        require(not how or precision == "fp32", "a rehearsal compiles fp32 alone")
    torch.compiler.reset()
    network, apart = NETWORK | (SMALLER if rehearsal else {}), []
    for parts in (1,) if rehearsal and how else (1, 2):  # as compiling for a CPU takes long
        accelerator = start(rehearsal, precision, parts)
        require(not sharded or accelerator.num_processes > 1, "one process; accelerate launch starts one for each GPU")
        batch = make_batch(network, IMAGES * parts * accelerator.num_processes)
        plain = steps_on_cpu(make_objective(network, torch.device("cpu")), batch)
        objective = make_objective(network, accelerator.device, sharded)
        apart.append(steps_here(accelerator, objective, batch, precision, how, sharded) / plain - 1)
    loss, norm = torch.cat(apart).abs().amax(0).tolist()
    return require_close({"loss": loss, "gradient norm": norm}, "the CPU's", TOLERANCES[precision])


# ---- the list -------------------------------------------------------------------------------------------------------


CHECKS: dict[str, Callable[[bool], str]] = {  # of a rehearsal or not
    "machine": check_machine,
    "downloads": check_downloads,
    **{f"step, {precision}{name}": partial(check_step, precision=precision, how=how) for precision in TOLERANCES
       for name, how in COMPILED.items()},
    "FSDP": partial(check_step, precision="fp32", sharded=True),
    "stop and resume": check_resuming,
}


def outcome(check: Callable[[bool], str], rehearsal: bool) -> tuple[str, str]:
    """Runs a check on this rank; returns PASS, FAIL or SKIP, and its message."""
    try:
        return "PASS", check(rehearsal)
    except Skipped as lacking:
        return "SKIP", str(lacking)
    except Exception as error:
        return "FAIL", f"{type(error).__name__}: {first_line(error)}"
    finally:
        if not rehearsal:
            gc.collect()
            torch.cuda.empty_cache()


@command("check_gpu", CheckSettings)
def main(cfg: CheckSettings) -> None:
    accelerator = speed.make_accelerator("fp32", 1, False, cpu=cfg.rehearsal)
    if accelerator.device.type == "cpu" and not cfg.rehearsal:
        raise ValueError("torch sees no GPU here; rehearsal=true runs these checks on the CPU.")
    chosen = {name: check for name, check in CHECKS.items() if cfg.only is None or cfg.only in name}
    if not chosen:
        raise ValueError(f"No check has only={cfg.only} in its name: they are {', '.join(CHECKS)}.")
    is_main, rows = accelerator.is_main_process, []
    for name, check in chosen.items():
        began = time.perf_counter()
        of_ranks = gather_object([outcome(check, cfg.rehearsal)])
        result, message = next((each for each in of_ranks if each[0] == "FAIL"), of_ranks[0])
        seconds = time.perf_counter() - began
        rows.append({"check": name, "result": result, "message": message, "seconds": seconds})
        if is_main:
            print(f"{result}  {name}: {message}  [{seconds:.1f} s]")
    failed = [row["check"] for row in rows if row["result"] == "FAIL"]
    if is_main:
        if cfg.out:
            record = {"commit": commit(), "rehearsal": cfg.rehearsal, "checks": rows}
            files.write_text(Path(cfg.out), json.dumps(record, indent=1))
        print(f"{len(failed)} of {len(rows)} checks failed" + (f": {', '.join(failed)}" if failed else "."))
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
