"""Is this machine good for training? Prints a line with numbers for each check: PASS, FAIL or SKIP.

    python scripts/check_gpu.py                          # one GPU; no data, no network
    accelerate launch scripts/check_gpu.py out=gpu.json  # all GPUs of the machine
    python scripts/check_gpu.py rehearsal=true           # on a CPU, with gloo: the same checks of smaller networks

CHECKS is the list. A check that raises has failed, and the others still run. Exits with 1 if any failed. Numbers are
compared with those of the CPU in float32, from the same weights and random numbers, within TOLERANCES.
"""

import copy
import gc
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
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from torch import Tensor, nn
from torch._dynamo.utils import counters

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from training.memory import images_that_fit

from autoencoder import DiffusersAutoencoder
from edm import EDM
from objectives import DiffusionLoss, build_objective, trained_parameters
from routing_module import RouteSchedule
from runtime import files, ranks, sharding
from runtime.command import command, commit, compose
from runtime.device import device_name, driver_version
from runtime.schema import Location, Settings, first_line, read
from sampling.generate import generate
from scoring.features import Extractor, extract
from scoring.metrics import Moments, frechet_distance
from scripts import benchmark, plan
from train import train_step, update_ema
from training import speed
from training.cuda_graphs import record_passes
from training.optimizers import build_optimizer
from training.run import Sums
from weights.records import build_network

# Largest relative differences of loss and gradient norm, over three steps, from those of the CPU in float32.
TOLERANCES = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 3e-2, "fp16": 1e-2, "fp8": 0.15}
RESUMED = 1e-3          # of the losses of a resumed run in fp32: GPU kernels sum in varying order
DISTANCE = 1e-3         # of a Fréchet distance, from the CPU's
FEATURES = 1e-4         # of features in float32; TF32 would differ by about 1e-3
LEVELS = 2.0            # of 255, the mean difference of an image decoded in fp16
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
        ranks.forget_state()  # whose precision is that of the last check
        tf32 = precision == "tf32"
        return speed.make_accelerator("fp32" if tf32 else precision, num_parts, tf32, cpu=self.rehearsal)


def require(holds: bool, needs: str) -> None:
    if not holds:
        raise Skipped(needs)


def require_precision(machine: Machine, precision: str) -> None:
    """Raises Skipped for a precision that the device lacks."""
    is_gpu = machine.device.type == "cuda"
    has = torch.cuda.get_device_capability(machine.device) if is_gpu else (0, 0)
    require(is_gpu or precision in ("fp32", "bf16"), f"{precision} is for a GPU")
    require(not is_gpu or precision not in ("tf32", "bf16") or has >= (8, 0), f"{precision} needs capability 8.0")
    if precision == "fp8":
        try:
            speed.check_float8(machine.device)
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
    return partial(train_step, accelerator, called, objective, prepared, num_parts=num_parts,
                   **{"label_dropout": 0.0, "clip_norm": None, **options})


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
    given = {"sigma": torch.randn(count).exp(), "eps": torch.randn_like(x), "mask_noise": torch.rand(count, 1, tokens)}
    return x, torch.arange(count) % network["num_classes"], given


def make_objective(
    network: dict, routed: bool, device: torch.device | str = "cpu", sharded: bool = False,
) -> GivenLoss:
    torch.manual_seed(0)
    net = build_network(network | ({} if routed else {"routes": []}))
    return GivenLoss(sharding.shard(net, device, torch.float32) if sharded else net.to(device), EDM())


def steps_on_cpu(network: dict, count: int, routed: bool) -> list[tuple[float, float]]:
    """Returns loss and gradient norm of STEPS plain steps in float32, without any of train.py's machinery."""
    objective, (x, y, given) = make_objective(network, routed), make_batch(network, count)
    optimizer, measured = torch.optim.AdamW(objective.parameters(), lr=1e-4, weight_decay=0.0), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = objective(x, y, **given)[0].mean()
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
    x, y, given = make_batch(machine.network, count * machine.world)
    x, y, given = send_to_device((x[share], y[share], {name: a[share] for name, a in given.items()}), device)
    measured: list[tuple[float, float]] = []
    for _ in range(10 * STEPS):  # the first of fp16's are skipped until its scale fits
        loss, norm, skipped, _ = step(x, y, given)
        if not skipped:
            measured.append((accelerator.reduce(loss, "mean").item(), norm.item()))
        if len(measured) == STEPS:
            return measured
    raise ValueError("almost all steps were skipped, as their gradients were not finite")


def largest_differences(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> list[float]:
    """Returns the largest relative difference of the losses, and that of the gradient norms."""
    return [max(abs(a / b - 1) for a, b in zip(*pair, strict=True))
            for pair in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)]


def compared(
    machine: Machine, precision: str, how: bool | str, cases: Iterable[tuple[bool, int]],
    sharded: bool = False,
) -> str:
    """Compares steps, dense or routed, of so many parts, with the CPU's; raises ValueError beyond TOLERANCES."""
    torch._dynamo.reset()
    apart = [largest_differences(
        steps_here(machine, precision, how, routed, parts, sharded),
        steps_on_cpu(machine.network, IMAGES * parts * machine.world, routed)) for routed, parts in cases]
    loss, norm = (max(each) for each in zip(*apart, strict=True))
    most = TOLERANCES[precision]
    return require_at_most(f"loss within {loss:.1e} and gradient norm within {norm:.1e} of the CPU's (at most "
                           f"{most:g})", (loss, most), (norm, most))


def check_step(machine: Machine, precision: str, mode: str) -> str:
    """Steps in one precision, dense and routed, of one and of two parts."""
    require_precision(machine, precision)
    require(machine.device.type == "cuda" or mode != "CUDA graphs", "CUDA graphs need a GPU")
    require(not (machine.rehearsal and mode == "compiled" and precision != "fp32"), "a rehearsal compiles fp32 alone")
    speed.check_compiler(COMPILED[mode], machine.device)
    few = machine.rehearsal and mode == "compiled"  # as compiling for a CPU takes long
    cases = [(True, 1)] if few else [(True, 1), (True, 2), (False, 1), (False, 2)]
    return compared(machine, precision, COMPILED[mode], cases)


def check_random(machine: Machine) -> str:
    """Steps that sample their own random numbers, plain and in CUDA graphs, also where the routes change."""
    require(machine.device.type == "cuda", "CUDA graphs need a GPU")
    found = [six_losses(machine, how) for how in (False, "reduce-overhead")]
    apart = max(abs(ours / theirs - 1) for theirs, ours in zip(*found, strict=True))
    most = TOLERANCES["fp32"]
    return require_at_most(f"losses within {apart:.1e} of plain ones (at most {most:g})", (apart, most))


def six_losses(machine: Machine, how: bool | str) -> list[float]:
    """Returns the losses of six steps of two parts; the route ends at the fourth."""
    torch._dynamo.reset()
    accelerator, device, network = machine.accelerator("fp32", 2), machine.device, machine.network
    torch.manual_seed(0)
    net = build_network(network).to(device)
    objective = DiffusionLoss(net, EDM(), schedule=RouteSchedule(net.routes, dense_after=3))
    step = make_stepper(accelerator, objective, how, num_parts=2, label_dropout=0.1, clip_norm=1.0)
    x, y, _ = send_to_device(make_batch(network, 2 * IMAGES), device)
    losses = []
    for objective.step in range(6):
        torch.manual_seed(objective.step)
        losses.append(step(x, y, {})[0].item())
    return losses


# ---- what a step must not do ----------------------------------------------------------------------------------------

KINDS = {
    "DiT": {}, "LightningDiT": {"block": "lightning"},
    "Sprint": {"fusion": True, "selection": "grid", "routes": [ROUTE | {"selection_ratio": 0.75, "path_drop": 0.1}]},
    "alignment": {"objective": {"alignment": {}}}, "masks that are kept": {"keep_masked": True},
    "Muon": {"optimizer": {"name": "muon", "matrix_lr": None, "momentum": 0.95}}, "fp16": {"precision": "fp16"},
}


def check_waits(
    machine: Machine, objective: dict | None = None, keep_masked: bool = False, optimizer: dict | None = None,
    precision: str = "fp32", **network: object,
) -> str:
    """Steps of train.py's loop in which the host never waits for the device; the first two set things up."""
    require_precision(machine, precision)
    accelerator, device, network = machine.accelerator(precision), machine.device, machine.network | network
    x, y, _ = send_to_device(make_batch(network, IMAGES), device)
    tokens = (network["input_size"] // network["patch_size"]) ** 2
    arrays = {"teacher": torch.randn(IMAGES, tokens, 64, device=device)} if objective else {}
    if keep_masked:
        arrays["weight"] = torch.zeros(IMAGES, 1, *x.shape[2:], device=device)
    net = build_network(network).to(device)
    loss = build_objective(net, EDM(), objective, keep_masked, {"teacher": (tokens, 64)}).to(device)
    ema, sums = copy.deepcopy(net), Sums(device, loss.terms)
    step = make_stepper(accelerator, loss, optimizer=optimizer, label_dropout=0.1, clip_norm=1.0)
    try:
        for number in range(5):
            if device.type == "cuda" and number == 2:  # from here on what makes the host wait raises an error
                torch.cuda.set_sync_debug_mode("error")
            sums.add(*step(x, y, arrays))
            update_ema(ema, net, 0.999)
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    counted = dict(zip(sums.names, sums.values.tolist(), strict=True))
    if counted["steps"] != 5 or not math.isfinite(counted["loss"]):
        raise ValueError(f"the sums of 5 steps are {counted}")
    message = "no wait" if device.type == "cuda" else "waits are found on a GPU alone"
    return f"5 steps, {counted['skipped']:g} skipped; {message}"


def check_graphs(machine: Machine, mode: str) -> str:
    """Graphs that are compiled, dense, routed, and at an off-ramp; after the second step none are.

    For CUDA graphs it also prints how many there are and the memory that they hold.
    """
    require(machine.device.type == "cuda" or mode != "CUDA graphs", "CUDA graphs need a GPU")
    compiled, late = [], 0
    for name, routed, dense_after in (("dense", False, None), ("routed", True, None), ("off-ramp", True, 4)):
        seen, recorded = graphs_by_step(machine, COMPILED[mode], machine.network, routed, dense_after)
        compiled.append(f"{name} {seen[2] - seen[0]}{recorded}")
        late += seen[-1] - seen[2]
    return require_at_most(f"{', '.join(compiled)}; {late} compiled after the second step", (late, 0))


def graphs_by_step(
    machine: Machine, how: bool | str, network: dict, routed: bool, dense_after: int | None,
) -> tuple[list[int], str]:
    """Takes six steps; returns how many graphs had been compiled before each and at the end, and `held_by_graphs`."""
    torch._dynamo.reset()
    accelerator, device = machine.accelerator("fp32"), machine.device
    loss = make_objective(network, routed, device)
    loss.schedule = RouteSchedule(loss.net.routes, dense_after=dense_after)
    step = make_stepper(accelerator, loss, how)
    x, y, given = send_to_device(make_batch(network, IMAGES), device)
    seen = []
    for loss.step in range(6):
        seen.append(counters["stats"]["unique_graphs"])
        step(x, y, given)
    return [*seen, counters["stats"]["unique_graphs"]], held_by_graphs()


def held_by_graphs() -> str:
    """Describes the CUDA graphs of this process and their private memory pools; empty if there are none."""
    if not torch.cuda.is_initialized():
        return ""
    gc.collect()  # the graphs of the previous network
    count = sum(isinstance(each, torch.cuda.CUDAGraph) for each in gc.get_objects())
    if not count:
        return ""
    size = sum(segment["total_size"] for segment in torch.cuda.memory_snapshot()
               if tuple(segment["segment_pool_id"]) != (0, 0))
    return f" ({count} CUDA graphs of {size / 2**20:.0f} MiB)"


# ---- a run, images and scores ---------------------------------------------------------------------------------------


def start_process(arguments: list[str]) -> subprocess.Popen:
    """Starts Python in the checkout as a single process, whatever launched this one."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items()
                   if name not in names and not name.startswith("TORCHELASTIC_")}
    return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment, text=True,
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def losses_of(run: Path, step: int, process: subprocess.Popen) -> dict[int, float]:
    """Returns a run's losses by step once it has that step; raises ValueError if its process ends before."""
    while True:
        ended, log = process.poll() is not None, run / "metrics.jsonl"
        rows = {row["step"]: row["loss"] for row in files.read_rows(log)} if log.exists() else {}
        if step in rows:
            return rows
        if ended:
            raise ValueError(f"the run ended with {process.returncode}: {last_line(process.communicate()[1])}")
        time.sleep(0.05)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it printed nothing"])[-1]


def check_resuming(machine: Machine) -> str:
    """A run that SIGKILL ends after eight steps, and that resumes from its checkpoint of step four."""
    require(machine.rank == 0, "of the main rank")
    with tempfile.TemporaryDirectory() as folder:
        data, run = Path(folder, "latents"), Path(folder, "run")
        data.mkdir()
        benchmark.write_latents(data, 64, (4, 8, 8), 10)
        line = ["train.py", "data=folder", f"data.path={data}", f"run_dir={run}", "model.hidden_size=64",
                "model.depth=4", "model.num_heads=2", "model.routes=[{selection_ratio: 0.5, start_layer_idx: 1, "
                "end_layer_idx: 2}]", "batch_size=8", "samples.every=0", "log.every=1", "checkpoint.every=4",
                "checkpoint.keep_every=4", "precision=fp32", "tf32=false", "compile=false",
                f"cpu={str(machine.rehearsal).lower()}"]
        killed = start_process([*line, "steps=1000000"])
        try:
            before = losses_of(run, 8, killed)
        finally:
            killed.kill()
            killed.wait()
        for later in sorted(run.glob("checkpoints/step-*"))[1:]:  # as if the kill had come earlier
            files.remove(later)
        (run / "metrics.jsonl").unlink()
        resumed = start_process([*line, "steps=8"])
        after = losses_of(run, 8, resumed)
        if resumed.communicate() and resumed.returncode:
            raise ValueError(f"the resumed run ended with {resumed.returncode}")
    apart = max(abs(after[step] / before[step] - 1) for step in range(5, 9))
    return require_at_most(f"losses of steps 5 to 8 within {apart:.1e} of those before the kill (at most {RESUMED:g})",
                           (apart, RESUMED))


def check_sampling(machine: Machine) -> str:
    """Images sampled in bf16, and decoded in fp16 by an untrained autoencoder."""
    require_precision(machine, "bf16")
    state = machine.accelerator("fp32")  # whose ranks share the seeds
    net = make_objective(machine.network, True, machine.device).net.eval()
    seeds = list(range(4 * machine.world))
    [(_, _, latents)] = generate(state, net, EDM(), lambda latents: latents, seeds, seeds, batch_size=4,
                                 num_steps=2, precision="bf16")
    if not latents.isfinite().all():
        raise ValueError(f"{int((~latents.isfinite()).sum())} values of the latents are not finite")
    torch.manual_seed(0)
    vae = benchmark.stable_diffusion_autoencoder(widths=(32, 32) if machine.rehearsal else (128, 256, 512, 512))
    pictures = []
    for dtype in (torch.float32, torch.float16):
        decoder = DiffusersAutoencoder("untrained", nn.Module.to(vae, dtype), machine.device)  # whose own `to` warns
        pictures.append(decoder.decode(latents).float())
    apart = (pictures[0] - pictures[1]).abs().mean().item()
    return require_at_most(f"latents of deviation {latents.std():.3g}; fp16 decodes within {apart:.2g} levels of fp32 "
                           f"(at most {LEVELS:g})", (apart, LEVELS))


def pool(network: nn.Module, images: Tensor) -> dict[str, Tensor]:
    return {"pool": network(images.permute(0, 3, 1, 2).float() / 255)}


def check_scores(machine: Machine) -> str:
    """Features in float32, although TF32 is on, and the Fréchet distance of two small sets, against the CPU's."""
    machine.accelerator("fp32")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 64, 7, 4), nn.ReLU(), nn.Conv2d(64, 32, 3, 2), nn.ReLU(),
                            nn.AdaptiveAvgPool2d(1), nn.Flatten())
    sets = [torch.randint(0, most, (64, 64, 64, 3), dtype=torch.uint8) for most in (256, 200)]
    found, distances = [], []
    for device in (torch.device("cpu"), machine.device):
        on_device = copy.deepcopy(network).to(device)
        extractor = Extractor("random", "random", "fd_random", {"pool": 32}, "uint8 / 255", partial(pool, on_device))
        gaussians = []
        for images in sets:
            [(_, features)] = extract(extractor, [(torch.arange(len(images)), images.to(device))])
            moments = Moments(32)
            moments.add(features["pool"])
            gaussians += moments.mean_and_covariance()
            found.append(features["pool"].cpu())
        distances.append(float(frechet_distance(*gaussians)))
    apart = max(((ours - theirs).norm() / theirs.norm()).item()
                for theirs, ours in zip(found[:2], found[2:], strict=True))
    distance = abs(distances[1] / distances[0] - 1)
    return require_at_most(f"features within {apart:.1e} (at most {FEATURES:g}), distance {distances[1]:.4g} within "
                           f"{distance:.1e} of the CPU's (at most {DISTANCE:g})",
                           (apart, FEATURES), (distance, DISTANCE))


# ---- several GPUs ---------------------------------------------------------------------------------------------------


def require_ranks(machine: Machine) -> None:
    require(machine.world > 1, "one process; accelerate launch starts one for each GPU")


def check_fsdp(machine: Machine) -> str:
    """Steps of a network that is sharded over the ranks; the other checks have replicas, by DDP."""
    require_ranks(machine)
    return compared(machine, "fp32", False, [(True, 1), (False, 2)], sharded=True)


def check_collectives(machine: Machine) -> str:
    """A broadcast, a sum over ranks and a barrier."""
    require_ranks(machine)
    accelerator, size = machine.accelerator("fp32"), 2**20 if machine.rehearsal else 2**26
    sent = torch.full((size,), float(machine.rank + 1), device=machine.device)
    dist.broadcast(sent, 0)
    began = time.perf_counter()
    dist.all_reduce(sent)
    if sent[-1].item() != machine.world:
        raise ValueError(f"the sum of ones over {machine.world} ranks is {sent[-1].item():g}")
    took = time.perf_counter() - began
    accelerator.wait_for_everyone()
    return f"{dist.get_backend()}: {4 * size / 1e6:.0f} MB summed over {machine.world} ranks in {1000 * took:.1f} ms"


LOST = """
import os, signal
from runtime.device import join_ranks
state = join_ranks({cpu}, False)
state.wait_for_everyone()
if state.process_index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
state.wait_for_everyone()
"""


def check_lost_rank(machine: Machine) -> str:
    """Two ranks, one of which is killed: the launcher ends the other."""
    require_ranks(machine)
    require(machine.rank == 0, "of the main rank")
    began = time.perf_counter()
    launched = start_process(["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--no-python",
                              sys.executable, "-c", LOST.format(cpu=machine.rehearsal)])
    try:
        launched.communicate(timeout=240)
    finally:
        launched.kill()
    if launched.returncode == 0:
        raise ValueError("the launcher reported success")
    return f"the launcher ended both and exited with {launched.returncode} after {time.perf_counter() - began:.0f} s"


# ---- speed ----------------------------------------------------------------------------------------------------------


def check_speed(machine: Machine, backbone: str) -> str:
    """The benchmark's training steps, dense and routed, at the largest batch that fits; memory beside plan.py's."""
    settings = ["mode=train", f"backbone_type={backbone}", "rounds=2", "steps=2", "warmup=2"]
    predicted = [plan.bytes_held(backbone, 256, routed) for routed in (False, True)]
    batch, precision = 4, "fp32"
    if machine.rehearsal:
        settings += ["hidden_size=32", "depth=4", "num_heads=2", "tokens=16", "num_latents=64",
                     "routes=[{selection_ratio: 0.5, start_layer_idx: 1, end_layer_idx: 2}]"]
    else:
        precision = "bf16" if torch.cuda.get_device_capability(machine.device) >= (8, 0) else "fp16"
        settings += ["compile=true"]
        memory = torch.cuda.get_device_properties(machine.device).total_memory
        fixed = sum(held for held, _ in predicted)  # both networks are there at once
        batch = images_that_fit(fixed, predicted[0][1], memory, plan.BATCH)
        require(batch > 0, f"weights and optimizers, dense and routed, are {fixed / 1e9:.0f} GB")
    while True:
        try:
            plain = compose("benchmark", benchmark.BenchmarkSettings, [
                *settings, f"precision={precision}", f"batch_size={batch * machine.world}"])
            cfg = read(benchmark.BenchmarkSettings, plain)
            record = benchmark.time_train(cfg, machine.accelerator(precision))
            break
        except torch.OutOfMemoryError:
            gc.collect()
            torch.cuda.empty_cache()
            if batch == 1:
                raise
            batch //= 2
    dense, routed = record["rows"]
    peaks = ", ".join(f"{row['peak GiB'] * 1.073741824:.1f} GB (plan.py: {(fixed + batch * each) / 1e9:.1f})"
                      for row, (fixed, each) in zip((dense, routed), predicted, strict=True))
    ceiling = max(record["matmul FLOP/s"].values()) / 1e12
    return (f"batch {batch} a rank, {precision}: dense {dense['images/s']:,.4g} images/s, {dense['MFU']:.0%} of the "
            f"{ceiling:.3g} TFLOP/s of matrix products; routed {routed['images/s']:,.4g} images/s, "
            f"{routed['over dense']:.2f} times dense (FLOPs: {routed['FLOP ratio']:.2f}); peaks {peaks}")


# ---- the list -------------------------------------------------------------------------------------------------------


def check_machine(machine: Machine) -> str:
    """Device, driver and versions; `check_device` has passed."""
    parts = [f"{machine.world} × {device_name(machine.device)}", f"torch {torch.__version__}"]
    if machine.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(machine.device)
        parts += [f"capability {major}.{minor}", f"driver {driver_version()}", f"CUDA {torch.version.cuda}",
                  f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}",
                  f"{torch.cuda.get_device_properties(machine.device).total_memory / 1e9:.0f} GB"]
    return ", ".join(parts)


CHECKS: dict[str, Callable[[Machine], str]] = {
    "machine": check_machine,
    **{f"step, {precision}, {mode}": partial(check_step, precision=precision, mode=mode)
       for precision in TOLERANCES for mode in COMPILED},
    "random numbers, CUDA graphs": check_random,
    **{f"no wait, {kind}": partial(check_waits, **keywords) for kind, keywords in KINDS.items()},
    **{f"graphs, {mode}": partial(check_graphs, mode=mode) for mode in ("compiled", "CUDA graphs")},
    "kill and resume": check_resuming,
    "sampling": check_sampling,
    "scores": check_scores,
    "FSDP": check_fsdp,
    "collectives": check_collectives,
    "a lost rank": check_lost_rank,
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
    rows: list[dict] = []
    for name, check in CHECKS.items():
        if cfg.rehearsal and name == "speed, DiT-XL/2":  # as slow as S/2 to plan, and its network is as small
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
