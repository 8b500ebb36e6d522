"""Is this machine good for training? Prints a line with numbers for each check: PASS, FAIL or SKIP.

    python scripts/check_gpu.py                          # one GPU; no data, no network
    torchrun --nproc_per_node 1 scripts/check_gpu.py     # one GPU, with the networks in DDP as on several
    accelerate launch scripts/check_gpu.py out=gpu.json  # all GPUs of the machine
    python scripts/check_gpu.py rehearsal=true           # on a CPU, with gloo: the same checks of smaller networks

CHECKS is the list. A check that raises has failed, and the others still run. Exits with 1 if any failed. Numbers are
compared with those of the CPU in float32, from the same weights and random numbers, within TOLERANCES. Sampling is
compared with float32 on the same machine.
"""

import copy
import gc
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from huggingface_hub import try_to_load_from_cache
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from edm import EDM
from objectives import DiffusionLoss, build_objective, trained_parameters
from routing_module import RouteSchedule
from runtime import files, ranks, sharding
from runtime.command import command, commit, compose
from runtime.device import device_name
from runtime.schema import Location, Settings, Text, first_line, read
from sampling.generate import generate
from sampling.sampler import Sampler
from scoring.features import ADM_GRAPH_URL, INCEPTION_URL
from scripts import benchmark
from train import train_step, trained_weights, update_ema
from training import cuda_graphs, speed
from training.cuda_graphs import record_passes, record_update
from training.optimizers import build_optimizer
from training.run import Sums
from weights.autoencoders import HUB_NAMES
from weights.records import build_network

# Largest relative differences of loss and gradient norm, over three steps, from those of the CPU in float32.
TOLERANCES = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 3e-2, "fp16": 1e-2, "fp8": 0.15}
RESUMED = 1e-3          # of the losses of a resumed run in fp32: GPU kernels sum in varying order
SAMPLED = 0.05          # of sampled latents in bf16, from those in float32
STEPS = 3               # of each comparison; CUDA graphs are recorded in the second
COMPILED = {"eager": False, "compiled": True, "CUDA graphs": "reduce-overhead"}
ROUTE = {"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}
# Not zeroed as in training, so that every layer has a gradient from the first step.
NETWORK = dict(input_size=16, patch_size=2, in_channels=4, hidden_size=256, depth=6, num_heads=4, num_classes=10,
               routes=[ROUTE], init="xavier")
SMALLER = dict(input_size=8, hidden_size=32, depth=4, num_heads=2)      # of a rehearsal
IMAGES = 8              # of a rank and part
ADAMW = dict(name="adamw", lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)


class CheckSettings(Settings):
    """configs/check_gpu.yaml."""

    rehearsal: bool
    only: Text | None
    out: Location | None


class Skipped(Exception):
    """What a check needs and this machine lacks."""


@dataclass
class Machine:
    """What all checks share: where they run, and the networks that they train."""

    rehearsal: bool
    device: torch.device
    rank: int
    world: int

    @property
    def network(self) -> dict:
        return NETWORK | (SMALLER if self.rehearsal else {})

    def accelerator(self, precision: str, num_parts: int = 1) -> Accelerator:
        ranks.start_anew({})  # else the precision is that of the last check
        tf32 = precision == "tf32"
        return speed.make_accelerator("fp32" if tf32 else precision, num_parts, tf32, cpu=self.rehearsal)


def require(holds: bool, needs: str) -> None:
    if not holds:
        raise Skipped(needs)


def require_float8(device: torch.device) -> None:
    try:
        speed.check_float8(device)
    except ValueError as lacking:
        raise Skipped(str(lacking)) from None


def require_at_most(message: str, *measured: tuple[float, float]) -> str:
    """Returns the message; raises ValueError with it where a measured value exceeds its limit, or is NaN."""
    if not all(value <= most for value, most in measured):
        raise ValueError(message)
    return message


def make_stepper(
    accelerator: Accelerator, objective: DiffusionLoss, how: bool | str = False, num_parts: int = 1,
    sharded: bool = False, optimizer: dict | None = None, **options: object,
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Wraps an objective as train.py does; returns its step, a function of latents, labels and extra arrays."""
    speed.compile_blocks(objective.net, how)
    called = speed.replicate(accelerator, record_passes(objective, how, accelerator.device, num_parts), sharded)
    prepared = accelerator.prepare(build_optimizer(trained_parameters(objective), **ADAMW | (optimizer or {})))
    update = record_update(accelerator, prepared, how, num_parts)
    return partial(train_step, accelerator, called, objective, prepared, num_parts=num_parts, update=update,
                   **{"label_dropout": 0.0, "clip_norm": None, **options})


def check_downloads(machine: Machine) -> str:
    """Names what the pages' commands download or import and is not here, as a node may have no network."""
    cached = partial(try_to_load_from_cache, filename="diffusion_pytorch_model.safetensors")
    there = Path(torch.hub.get_dir()) / "checkpoints"
    needed = {
        **{f"{repo} (autoencoder={name})": isinstance(cached(repo), str) for name, repo in HUB_NAMES.items()},
        **{f"{url.rpartition('/')[2]} in {there} (features={name})": (there / url.rpartition("/")[2]).is_file()
           for name, url in (("inception", INCEPTION_URL), ("adm", ADM_GRAPH_URL))},
        "TensorFlow (features=adm)": importlib.util.find_spec("tensorflow") is not None}
    missing = [name for name, is_here in needed.items() if not is_here]
    require(not missing, f"not here, so fetch before the network is gone: {', '.join(missing)}")
    return f"{', '.join(needed)} are here"


# ---- the same step on a CPU and here --------------------------------------------------------------------------------


class GivenLoss(DiffusionLoss):
    """The diffusion's loss at noise levels, noise and masks that come with the batch, and so are the same anywhere."""

    arrays = ("sigma", "eps", "mask_noise")

    def forward(self, x: Tensor, y: Tensor, sigma: Tensor, eps: Tensor, mask_noise: Tensor) -> tuple[Tensor, dict]:
        return self.diffusion.loss(self.net, x, y, self.routes, sigma, eps, mask_noise=mask_noise), {}


def make_batch(network: dict, count: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Makes random latents (B, C, h, w), labels (B,) and all that a step would sample, on the CPU."""
    torch.manual_seed(1)
    side, tokens = network["input_size"], (network["input_size"] // network["patch_size"]) ** 2
    x = torch.randn(count, network["in_channels"], side, side)
    noise = {"sigma": torch.randn(count).exp(), "eps": torch.randn_like(x), "mask_noise": torch.rand(count, 1, tokens)}
    return x, torch.arange(count) % network["num_classes"], noise


def make_objective(
    network: dict, routed: bool, device: torch.device | str = "cpu", sharded: bool = False,
) -> GivenLoss:
    torch.manual_seed(0)
    net = build_network(network | ({} if routed else {"routes": []}))
    return GivenLoss(sharding.shard(net, device, torch.float32) if sharded else net.to(device), EDM())


def steps_on_cpu(network: dict, count: int, routed: bool) -> list[tuple[float, float]]:
    """Returns loss and gradient norm of STEPS plain steps in float32, without any of train.py's machinery."""
    objective, (x, y, noise) = make_objective(network, routed), make_batch(network, count)
    optimizer, measured = torch.optim.AdamW(objective.parameters(), lr=1e-4, weight_decay=0.0), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = objective(x, y, **noise)[0].mean()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in objective.parameters() if p.grad is not None])
        optimizer.step()
        measured.append((loss.item(), norm.item()))
    return measured


def steps_here(
    machine: Machine, precision: str, how: bool | str, routed: bool, num_parts: int = 1, sharded: bool = False,
) -> list[tuple[float, float]]:
    """Returns loss and gradient norm of STEPS of train.py's steps on all ranks together, skipped ones left out."""
    accelerator, device = machine.accelerator(precision, num_parts), machine.device
    objective = make_objective(machine.network, routed, device, sharded)
    if precision == "fp8":
        speed.multiply_in_float8(objective.net)
    step = make_stepper(accelerator, objective, how, num_parts, sharded)
    count = IMAGES * num_parts
    share = slice(machine.rank * count, (machine.rank + 1) * count)
    x, y, noise = make_batch(machine.network, count * machine.world)
    x, y, noise = send_to_device((x[share], y[share], {name: a[share] for name, a in noise.items()}), device)
    measured: list[tuple[float, float]] = []
    for _ in range(10 * STEPS):  # the first of fp16's are skipped until its scale fits
        loss, norm, skipped, _ = step(x, y, noise)
        if not skipped:
            measured.append((accelerator.reduce(loss, "mean").item(), norm.item()))
        if len(measured) == STEPS:
            return measured
    raise ValueError("almost all steps were skipped, as their gradients were not finite")


def compare_steps(
    machine: Machine, precision: str, how: bool | str, cases: Iterable[tuple[bool, int]], sharded: bool = False,
) -> str:
    """Compares steps, dense or routed, of so many parts, with the CPU's; raises ValueError beyond TOLERANCES."""
    torch._dynamo.reset()
    apart = {"loss": 0.0, "gradient norm": 0.0}
    for routed, parts in cases:
        here = steps_here(machine, precision, how, routed, parts, sharded)
        cpu = steps_on_cpu(machine.network, IMAGES * parts * machine.world, routed)
        for pair in zip(here, cpu, strict=True):
            for name, one, other in zip(apart, *pair, strict=True):
                apart[name] = max(apart[name], abs(one / other - 1), key=lambda value: (value != value, value))  # NaN
    most = TOLERANCES[precision]
    return require_at_most(f"{' and '.join(f'{name} within {value:.1e}' for name, value in apart.items())} of the "
                           f"CPU's (at most {most:g})", *((value, most) for value in apart.values()))


def check_step(machine: Machine, precision: str, mode: str) -> str:
    """Steps in one precision, dense and routed, of one and of two parts."""
    is_gpu = machine.device.type == "cuda"
    capability = torch.cuda.get_device_capability(machine.device) if is_gpu else (0, 0)
    require(is_gpu or (precision in ("fp32", "bf16") and mode != "CUDA graphs"), f"{precision}, {mode} needs a GPU")
    require(not is_gpu or precision not in ("tf32", "bf16") or capability >= (8, 0), "capability 8.0 is needed")
    few = machine.rehearsal and mode == "compiled"  # as compiling for a CPU takes long
    require(not few or precision == "fp32", "a rehearsal compiles fp32 alone")
    if precision == "fp8":
        require_float8(machine.device)
    return compare_steps(machine, precision, COMPILED[mode],
                         [(True, 1)] if few else [(True, 1), (True, 2), (False, 1), (False, 2)])


def check_fsdp(machine: Machine) -> str:
    """Steps of a network that is sharded over the ranks; the other checks have replicas, by DDP."""
    require(machine.world > 1, "one process; accelerate launch starts one for each GPU")
    return compare_steps(machine, "fp32", False, [(True, 1), (False, 2)], sharded=True)


def check_replays(machine: Machine, precision: str) -> str:
    """Forty steps of two parts with label dropout, an EMA and an off-ramp at half, plain and in CUDA graphs."""
    require(machine.device.type == "cuda" or machine.rehearsal and precision != "fp8", "CUDA graphs need a GPU")
    if precision == "fp8":
        require_float8(machine.device)
    steps = 6 if machine.rehearsal else 40
    (plain, average), (recorded, its_average) = (replayed_losses(machine, precision, how, steps) for how in (
        False, False if machine.rehearsal else "reduce-overhead"))
    apart = max(abs(one / other - 1) for one, other in zip(plain, recorded, strict=True))
    away = ((its_average - average).norm() / average.norm()).item()
    most = TOLERANCES[precision]
    return require_at_most(f"losses of {steps} steps within {apart:.1e} of plain ones, their EMA within {away:.1e} (at "
                           f"most {most:g})", (apart, most), (away, most))


def replayed_losses(machine: Machine, precision: str, how: bool | str, steps: int) -> tuple[list[float], Tensor]:
    """Returns the losses of steps of two parts, whose route ends at half of them, and the last EMA as a vector."""
    torch._dynamo.reset()
    accelerator, device, network = machine.accelerator(precision, 2), machine.device, machine.network
    torch.manual_seed(0)
    net = build_network(network).to(device)
    ema = copy.deepcopy(net)
    if precision == "fp8":
        speed.multiply_in_float8(net)
    objective = DiffusionLoss(net, EDM(), schedule=RouteSchedule(net.routes, dense_after=steps // 2))
    step = make_stepper(accelerator, objective, how, num_parts=2, label_dropout=0.1, clip_norm=1.0)
    x, y, _ = send_to_device(make_batch(network, 2 * IMAGES), device)
    weights, average, losses = trained_weights(net), trained_weights(ema), []
    for objective.step in range(steps):
        torch.manual_seed(objective.step)
        losses.append(step(x, y, {})[0])
        update_ema(average, weights, 0.9)
    return torch.stack(losses).tolist(), torch.cat([p.detach().flatten() for p in average])


# ---- what a step must not do ----------------------------------------------------------------------------------------

RECIPES = {
    "DiT": {}, "LightningDiT": {"block": "lightning"},
    "Sprint": {"fusion": True, "selection": "grid", "routes": [ROUTE | {"selection_ratio": 0.75, "path_drop": 0.1}]},
    "REPA": {"objective": {"name": "alignment"}},
    "Muon": {"optimizer": {"name": "muon", "matrix_lr": None, "momentum": 0.95}},
}


def check_waits(
    machine: Machine, objective: dict | None = None, optimizer: dict | None = None, **network: object,
) -> str:
    """Steps of train.py's loop in which the host never waits for the device; the first two set things up."""
    accelerator, device, network = machine.accelerator("fp32"), machine.device, machine.network | network
    x, y, _ = send_to_device(make_batch(network, IMAGES), device)
    tokens = (network["input_size"] // network["patch_size"]) ** 2
    arrays = {"teacher": torch.randn(IMAGES, tokens, 64, device=device)} if objective else {}
    net = build_network(network).to(device)
    loss = build_objective(net, EDM(), objective, {name: a.shape[1:] for name, a in arrays.items()}).to(device)
    weights, average, sums = trained_weights(net), trained_weights(copy.deepcopy(net)), Sums(device, loss.terms)
    step = make_stepper(accelerator, loss, optimizer=optimizer, label_dropout=0.1, clip_norm=1.0)
    try:
        for number in range(5):
            if device.type == "cuda" and number == 2:  # from here on what makes the host wait raises an error
                torch.cuda.set_sync_debug_mode("error")
            sums.add(*step(x, y, arrays))
            update_ema(average, weights, 0.999)
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    counted = dict(zip(sums.names, sums.values.tolist(), strict=True))
    if counted["steps"] != 5 or not math.isfinite(counted["loss"]):
        raise ValueError(f"the sums of 5 steps are {counted}")
    return f"5 steps; {'no wait' if device.type == 'cuda' else 'waits are found on a GPU alone'}"


# ---- a run, images and speed ----------------------------------------------------------------------------------------


def losses_of(run: Path, *settings: str) -> dict[int, float]:
    """Runs train.py as a single process, whatever launched this one; returns a run's losses by step."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items()
                   if name not in names and not name.startswith("TORCHELASTIC_")}
    ended = subprocess.run([sys.executable, "train.py", *settings, f"run_dir={run}"], cwd=ROOT, env=environment,
                           text=True, capture_output=True, check=False)
    if ended.returncode:
        printed = ended.stderr.strip().splitlines() or ["it printed nothing"]
        raise ValueError(f"train.py ended with {ended.returncode}: {printed[-1]}")
    return {row["step"]: row["loss"] for row in files.read_rows(run / "metrics.jsonl")}


def check_resuming(machine: Machine) -> str:
    """A run of eight steps at once, against one that ends after four and resumes."""
    require(machine.rank == 0, "of the main rank")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "latents")
        data.mkdir()
        benchmark.write_latents(data, 64, (4, 8, 8), 10)
        settings = ["data=folder", f"data.path={data}", "model.hidden_size=64", "model.depth=4", "model.num_heads=2",
                    "model.routes=[{selection_ratio: 0.5, start_layer_idx: 1, end_layer_idx: 2}]", "batch_size=8",
                    "samples.every=0", "log.every=1", "log.trackers=[]", "precision=fp32", "tf32=false",
                    "compile=false", f"cpu={str(machine.rehearsal).lower()}"]
        at_once = losses_of(Path(folder, "once"), *settings, "steps=8")
        for steps in (4, 8):
            resumed = losses_of(Path(folder, "twice"), *settings, f"steps={steps}")
    apart = max(abs(resumed[step] / at_once[step] - 1) for step in range(5, 9))
    return require_at_most(f"losses of steps 5 to 8 within {apart:.1e} of those without a stop (at most {RESUMED:g})",
                           (apart, RESUMED))


def check_sampling(machine: Machine) -> str:
    """Latents sampled in bf16, against float32 from the same seeds; ranks share the seeds."""
    accelerator, seeds = machine.accelerator("fp32"), list(range(4 * machine.world))
    net, sampled = make_objective(machine.network, False, machine.device).net.eval(), []
    for precision in ("fp32", "bf16"):
        [(_, latents)] = generate(accelerator, net, Sampler(EDM(), 2), lambda latents: latents, seeds, seeds,
                                  batch_size=4, precision=precision)
        sampled.append(latents)
    apart = ((sampled[1] - sampled[0]).norm() / sampled[0].norm()).item()
    return require_at_most(f"latents within {apart:.1e} of those in float32 (at most {SAMPLED:g})", (apart, SAMPLED))


def check_speed(machine: Machine, backbone: str) -> str:
    """The benchmark's training steps, dense and routed, of 32 images a rank, or as many as fit."""
    settings = ["mode=train", f"backbone_type={backbone}", "rounds=2", "steps=2", "warmup=2"]
    batch, precision = 4, "fp32"
    if machine.rehearsal:
        settings += ["hidden_size=32", "depth=4", "num_heads=2", "tokens=16", "num_latents=64",
                     "routes=[{selection_ratio: 0.5, start_layer_idx: 1, end_layer_idx: 2}]"]
    else:
        settings += ["compile=true"]
        precision = "bf16" if torch.cuda.get_device_capability(machine.device) >= (8, 0) else "fp16"
        batch = 32
    while True:
        try:
            cfg = read(benchmark.BenchmarkSettings, compose("benchmark", benchmark.BenchmarkSettings, [
                *settings, f"precision={precision}", f"batch_size={batch * machine.world}"]))
            record = benchmark.time_train(cfg, machine.accelerator(precision))
            break
        except torch.OutOfMemoryError:
            gc.collect()
            torch.cuda.empty_cache()
            if batch == 1:
                raise
            batch //= 2
    dense, routed = record["rows"]
    ceiling = max(record["matmul FLOP/s"].values()) / 1e12
    return (f"batch {batch} a rank, {precision}: dense {dense['images/s']:,.4g} images/s, {dense['MFU']:.0%} of the "
            f"{ceiling:.3g} TFLOP/s of matrix products; routed {routed['images/s']:,.4g} images/s, "
            f"{routed['over dense']:.2f} times dense (FLOPs: {routed['FLOP ratio']:.2f}); peaks "
            f"{dense['peak GiB']:.1f} and {routed['peak GiB']:.1f} GiB")


# ---- the list -------------------------------------------------------------------------------------------------------


def check_machine(machine: Machine) -> str:
    """Device and versions."""
    parts = [f"{machine.world} × {device_name(machine.device)}", f"torch {torch.__version__}"]
    if machine.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(machine.device)
        parts += [f"capability {major}.{minor}", f"CUDA {torch.version.cuda}",
                  f"{torch.cuda.get_device_properties(machine.device).total_memory / 1e9:.0f} GB"]
    return ", ".join(parts)


CHECKS: dict[str, Callable[[Machine], str]] = {
    "machine": check_machine,
    "downloads": check_downloads,
    **{f"step, {precision}, {mode}": partial(check_step, precision=precision, mode=mode)
       for precision in TOLERANCES for mode in COMPILED},
    "FSDP": check_fsdp,
    **{f"replays, {precision}, CUDA graphs": partial(check_replays, precision=precision)
       for precision in ("fp32", "bf16", "fp8")},
    **{f"no wait, {recipe}": partial(check_waits, **keywords) for recipe, keywords in RECIPES.items()},
    "stop and resume": check_resuming,
    "sampling": check_sampling,
    **{f"speed, {backbone}": partial(check_speed, backbone=backbone) for backbone in ("DiT-S/2", "DiT-XL/2")},
}


def outcome(check: Callable[[Machine], str], machine: Machine) -> tuple[str, str]:
    """Runs a check on this rank; returns PASS, FAIL or SKIP, and its message."""
    try:
        return "PASS", check(machine)
    except Skipped as lacking:
        return "SKIP", str(lacking)
    except Exception as error:
        return "FAIL", f"{type(error).__name__}: {first_line(error)}"
    finally:
        if machine.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def worst(of_ranks: list[tuple[str, str]]) -> tuple[str, str]:
    """Returns the first failure of any rank, or else the outcome of the main one."""
    return next((each for each in of_ranks if each[0] == "FAIL"), of_ranks[0])


@command("check_gpu", CheckSettings)
def main(cfg: CheckSettings) -> None:
    accelerator = speed.make_accelerator("fp32", 1, False, cpu=cfg.rehearsal)
    device = accelerator.device
    if device.type == "cpu" and not cfg.rehearsal:
        raise ValueError("torch sees no GPU here; rehearsal=true runs these checks on the CPU.")
    machine = Machine(cfg.rehearsal, device, accelerator.process_index, accelerator.num_processes)
    cuda_graphs.STRETCH = 4 * 2**20  # so that under DDP the backward pass of a network this small is several graphs
    rows: list[dict] = []
    chosen = {name: check for name, check in CHECKS.items() if cfg.only is None or cfg.only in name}
    if not chosen:
        raise ValueError(f"No check has only={cfg.only} in its name: they are {', '.join(CHECKS)}.")
    for name, check in chosen.items():
        if cfg.rehearsal and name == "speed, DiT-XL/2":  # as slow as S/2, and its network is as small
            continue
        began = time.perf_counter()
        result, message = worst(gather_object([outcome(check, machine)]))
        rows.append({"check": name, "result": result, "message": message, "seconds": time.perf_counter() - began})
        if machine.rank == 0:
            print(f"{result}  {name}: {message}  [{rows[-1]['seconds']:.1f} s]")
    failed = [row["check"] for row in rows if row["result"] == "FAIL"]
    if machine.rank == 0:
        if cfg.out:
            files.write_text(Path(cfg.out), json.dumps({"commit": commit(), "rehearsal": cfg.rehearsal, "checks": rows},
                                                       indent=1))
        print(f"{len(failed)} of {len(rows)} checks failed" + (f": {', '.join(failed)}" if failed else "."))
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
