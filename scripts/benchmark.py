"""Times training, sampling, data and scoring on this machine, beside what its matrix products can do.

    python scripts/benchmark.py mode=train                          # DiT-S/2, dense and routed in turn
    python scripts/benchmark.py mode=sample guidance=cfg scale=1.5  # images/s with decoding
    python scripts/benchmark.py mode=data                           # latents/s from page cache
    python scripts/benchmark.py mode=score                          # features/s, seconds of the distances
    python scripts/benchmark.py mode=scaling 'ranks=[1,2]'          # tokens 64 to 4096, and ranks
    torchrun --standalone --nproc_per_node 8 scripts/benchmark.py mode=train …

Variants take turns, round after round. The table has the medians of the rounds; ratios are of the same round.
Prints a table and writes <out>.json and <out>.png. Options: configs/benchmark.yaml.
"""

import contextlib
import copy
import gc
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Annotated

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor, nn
from torch._dynamo.utils import counters

PROGRAM = str(Path(__file__).resolve())
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import autoencoder as autoencoders
import train
from dit import DiT, multiply_adds
from latents.folder import Latents, open_latents
from latents.loader import batches, to_latent
from objectives import DiffusionLoss
from runtime import files
from runtime.command import command, commit
from runtime.device import DTYPES, device_name, multiplies_in_tf32
from runtime.schema import Classes, Count, Location, Size, Steps, Tokens, Whole, one_of
from sampling import generate
from sampling.options import GuidanceSettings, build_guidance
from scoring import metrics, results
from scoring.features import EXTRACTORS, extract, load
from scripts import presentation
from scripts.clocks import Stopwatch, marked, seconds, take_turns, wait
from training import speed
from training.run import Sums, check_batch_size, describe_network
from training.settings import ModelSettings
from weights.records import RouteSettings, build_diffusion, build_network

VARIANTS = ("dit", "tread", "dit-eager", "tread-eager")
LARGEST = 2**16      # no batch beyond it is tried

# What the table of each mode shows; the JSON has more. `parts` take a column each.
COLUMNS = {
    "train": "variant batch images/s s/step parts TFLOP/s_a_rank MFU over_dense FLOP_ceiling peak_GiB largest_batch "
             "first_step_s graphs graph_breaks recompiles",
    "sample": "variant batch images/s s/batch parts GFLOP/image share_in_network MFU_in_network peak_GiB first_batch_s",
    "data": "variant batch step_s latents/s MB/s parts longest_wait_s",
    "score": "variant features/s parts peak_GiB",
    "scaling": "scales variant ranks tokens batch images/s s/step TFLOP/s_a_rank MFU over_dense FLOP_ceiling per_rank "
               "peak_GiB",
}

Batches = Iterator[tuple[Tensor, Tensor, Tensor]]


# ---- settings -------------------------------------------------------------------------------------------------------


class BenchmarkSettings(GuidanceSettings, ModelSettings):
    """configs/benchmark.yaml; `routes` are the network's own, by which guidance goes too."""

    mode: one_of(COLUMNS)
    out: Location
    device: one_of(["cpu", "cuda"]) | None
    threads: Annotated[int, Field(ge=1, le=1024)] | None
    routes: list[RouteSettings]
    tokens: Tokens
    in_channels: Size
    num_classes: Classes
    diffusion: dict
    batch_size: Count
    grad_accum_steps: Count
    precision: one_of(speed.PRECISIONS)
    tf32: bool
    compile: bool | one_of(speed.COMPILE_MODES)
    compile_cache: Location | None
    activation_checkpointing: bool
    variants: Annotated[list[one_of(VARIANTS)], Field(min_length=1)]
    rounds: Count
    steps: Count
    warmup: Whole
    largest_batch: bool
    data_path: Location | None
    num_latents: Count
    pause: Annotated[float, Field(ge=0, le=3600)]
    num_steps: Steps
    autoencoder: Location
    decode_precision: one_of(DTYPES)
    features: one_of(EXTRACTORS)
    features_weights: Location | None
    image_size: Size
    feature_size: Size
    images: Count
    reference_images: Count
    token_counts: list[Tokens]
    ranks: list[Count]


def check(cfg: BenchmarkSettings) -> None:
    """Raises ValueError for settings that are right by themselves and wrong together, or on this machine."""
    gpus = torch.cuda.device_count()
    if cfg.mode == "sample":      # with CUDA graphs one pass would write over the other's answer
        for key, not_drawn in (("precision", ("fp8",)), ("compile", speed.CUDA_GRAPHS)):
            if getattr(cfg, key) in not_drawn:
                raise ValueError(f"{key}={getattr(cfg, key)} is for training: mode=sample knows no "
                                 f"{' or '.join(not_drawn)}.")
    if cfg.device == "cuda" and not gpus:
        raise ValueError("device=cuda is asked for, but torch sees no GPU here: set device=cpu.")
    if cfg.precision == "fp8":
        speed.check_float8(torch.device("cuda" if gpus and cfg.device != "cpu" else "cpu"))
    if cfg.mode == "scaling" and cfg.device != "cpu" and gpus and max(cfg.ranks, default=1) > gpus:
        raise ValueError(f"ranks={cfg.ranks} needs {max(cfg.ranks)} GPUs and there are {gpus}: leave the larger "
                         f"numbers out, or set device=cpu.")


# ---- what is timed --------------------------------------------------------------------------------------------------


def compiled() -> tuple[int, int]:
    """Returns how many graphs torch.compile has made in this process, and how many breaks it met."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def make_network(cfg: BenchmarkSettings, variant: str, device: torch.device | str) -> DiT:
    network = describe_network(cfg, (cfg.in_channels, 0, 0), cfg.num_classes)
    network["input_size"] = math.isqrt(cfg.tokens) * network["patch_size"]
    if variant.startswith("dit"):
        network["routes"] = []
    with torch.device(device):
        return build_network(network)


def write_latents(folder: Path, count: int, shape: tuple[int, int, int], num_classes: int) -> None:
    """Writes random moments as a latent folder (docs/data.md)."""
    rng = np.random.default_rng(0)
    moments = rng.standard_normal((count, 2 * shape[0], *shape[1:]), np.float32)
    moments[:, shape[0] :] = 0.1
    np.save(folder / "latents-00000.npy", moments.astype(np.float16))
    np.save(folder / "labels-00000.npy", rng.integers(0, num_classes, count))
    shards = [{"latents": "latents-00000.npy", "labels": "labels-00000.npy", "count": count}]
    record = {"format": 1, "count": count, "shape": shape, "dtype": "float16", "kind": "moments", "mirrored": False,
              "num_classes": num_classes, "class_names": None, "autoencoder": "random", "scale": 1.0, "shift": 0.0,
              "shards": shards}
    files.write_text(folder / "metadata.json", json.dumps(record))


@contextlib.contextmanager
def latents_of(cfg: BenchmarkSettings, net: DiT) -> Iterator[Latents]:
    """Opens the latents asked for, or random ones, each rank its own."""
    shape = (net.in_channels, net.input_size, net.input_size)
    with tempfile.TemporaryDirectory() as folder:
        if cfg.data_path is None:
            room = 2**28 // (4 * math.prod(shape))      # moments in float16
            write_latents(Path(folder), max(cfg.batch_size, min(cfg.num_latents, room)), shape, cfg.num_classes)
        latents = open_latents(cfg.data_path or folder)
        latents.require(shape=shape, num_classes=cfg.num_classes)
        yield latents


class Variant:
    """A network in training, set up as train.py does, past its first step; and what is measured of it."""

    def __init__(self, cfg: BenchmarkSettings, accelerator: Accelerator, name: str, loader: Batches, kind: str):
        device = accelerator.device
        others = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        self.name, self.accelerator, self.loader, self.kind = name, accelerator, loader, kind
        self.num_parts, self.cuda_graphs = cfg.grad_accum_steps, cfg.compile in speed.CUDA_GRAPHS
        self.step, self.resident, self.peak, self.later_graphs = 0, 0, 0.0, 0
        torch.manual_seed(0)
        self.model = make_network(cfg, name, device)
        self.ema = copy.deepcopy(self.model).eval()
        if cfg.precision == "fp8":
            speed.multiply_in_float8(self.model)
        self.sums, self.objective = Sums(device), DiffusionLoss(self.model, build_diffusion(cfg.diffusion))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        if cfg.activation_checkpointing:
            speed.recompute_activations(self.model)
        speed.compile_network(self.model, not name.endswith("-eager") and cfg.compile)
        self.called, self.optimizer = accelerator.prepare(self.objective, optimizer)

        graphs, breaks = compiled()
        self.first_step = self.measure(1)
        self.graphs, self.breaks = compiled()[0] - graphs, compiled()[1] - breaks
        self.later_graphs, self.peak = 0, 0.0
        self.resident = torch.cuda.memory_allocated() - others if device.type == "cuda" else 0
        self.measure(cfg.warmup)

    def take_steps(self, count: int, watch: Stopwatch | None) -> None:
        """Takes steps as train.py's loop does; `watch` is told where each part ends."""
        mark = watch.mark if watch else lambda name: None
        forward = marked(watch, self.objective.diffusion, "loss", "forward")
        with forward, marked(watch, self.accelerator, "backward", "backward"):
            for _ in range(count):
                torch.manual_seed(train.step_seed(0, self.step, self.accelerator.process_index))
                stored, y, arrays = send_to_device(next(self.loader), self.accelerator.device, non_blocking=True)
                mark("data wait")
                told = train.train_step(
                    self.accelerator, self.called, self.objective, self.optimizer, to_latent(stored, self.kind), y,
                    arrays, lr=1e-4, label_dropout=0.1, clip_norm=None,
                    num_parts=self.num_parts, cuda_graphs=self.cuda_graphs,
                )
                mark("optimizer")      # with the gradient's norm
                train.update_ema(self.ema, self.model, 0.9999)
                mark("EMA")
                self.sums.add(*told)
                mark("sums")
                self.step += 1

    def measure(self, count: int, watch: Stopwatch | None = None) -> float:
        """Returns the seconds of a step, and keeps the peak of memory and whether anything was compiled anew."""
        device, graphs = self.accelerator.device, compiled()[0]
        self.accelerator.wait_for_everyone()
        others = torch.cuda.memory_allocated() - self.resident if device.type == "cuda" else 0
        took = seconds(device, lambda: self.take_steps(count, watch)) / max(1, count)
        self.later_graphs += compiled()[0] - graphs
        self.peak = max(self.peak, train.peak_memory_gib(device) - others / 2**30)
        return took


def release(accelerator: Accelerator) -> None:
    accelerator.free_memory()      # which holds all that it prepared
    torch._dynamo.reset()          # compiled code, of which there may be eight for one function
    gc.collect()
    if accelerator.device.type == "cuda":
        torch.cuda.empty_cache()


def fits(cfg: BenchmarkSettings, accelerator: Accelerator, name: str, batch_size: int) -> bool:
    """Tries steps of random latents of a variant that is alone on the GPU."""
    net, device, fitted = make_network(cfg, name, "meta"), accelerator.device, True
    try:
        x = torch.randn(batch_size, net.in_channels, net.input_size, net.input_size, device=device)
        y = torch.zeros(batch_size, dtype=torch.int64, device=device)
        loader = itertools.repeat((x, y, torch.ones(batch_size, 1, 1, 1, device=device)))
        Variant(cfg, accelerator, name, loader, "sample").measure(1)      # past AdamW's first state
    except torch.OutOfMemoryError:
        fitted = False
    x = y = loader = None
    release(accelerator)
    return fitted


def find_largest_batch(fits: Callable[[int], bool], batch_size: int) -> int:
    """Doubles, then halves the interval, until the answer is known to an eighth of itself; 0 where not even 1 fits."""
    low, high = 0, None
    while (high or LARGEST + 1) - low > max(1, low // 8) and batch_size <= LARGEST:
        if fits(batch_size):
            low, batch_size = batch_size, 2 * batch_size if high is None else (batch_size + high) // 2
        else:
            high, batch_size = batch_size, (low + batch_size) // 2
    return low


# ---- the modes ------------------------------------------------------------------------------------------------------


def time_train(cfg: BenchmarkSettings, accelerator: Accelerator) -> dict:
    """Times whole training steps of all variants in turn, then the same with a mark after each part.

    The forward part begins with the latents on the device: it draws them, labels to drop, noise, and the tokens' masks.
    """
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
    nets = {name: make_network(cfg, name, "meta") for name in {*cfg.variants, "dit"}}
    counts = {name: multiply_adds(net, net.routes) for name, net in nets.items()}
    rows = []
    with latents_of(cfg, nets["dit"]) as latents:
        check_batch_size(cfg.batch_size, world, cfg.grad_accum_steps, latents.count)
        loader = batches(latents, cfg.batch_size, seed=0, rank=rank, world=world, pin=device.type == "cuda")
        variants = [Variant(cfg, accelerator, name, loader, latents.kind) for name in cfg.variants]
        works = {variant.name: partial(variant.measure, cfg.steps) for variant in variants}
        took, parts, products = take_turns(cfg.rounds, device, cfg.precision, works, cfg.steps)
        loader.close()
    ratios = {f"{a} over {b}": median(slow / fast for slow, fast in zip(took[b], took[a], strict=True))
              for a, b in itertools.permutations(took, 2)}
    for variant in variants:
        name, per_step, dense = variant.name, median(took[variant.name]), variant.name.replace("tread", "dit")
        flops = 6 * sum(counts[name])      # 2 a multiply-add, and the backward pass takes twice the forward one
        rate = flops * cfg.batch_size / world / per_step
        rows.append({
            "variant": name, "batch": cfg.batch_size, "tokens": cfg.tokens, "ranks": world,
            "images/s": cfg.batch_size / per_step, "s/step": per_step, "parts": parts[name],
            "GFLOP/image": flops / 1e9, "TFLOP/s a rank": rate / 1e12, "MFU": rate / max(products.values()),
            "over dense": ratios.get(f"{name} over {dense}", 1.0 if name == dense else None),
            "FLOP ceiling": sum(counts["dit"]) / sum(counts[name]), "peak GiB": variant.peak, "largest batch": None,
            "first step s": variant.first_step, "graphs": variant.graphs, "graph breaks": variant.breaks,
            "recompiles": variant.later_graphs, "rounds s/step": took[name],
            "multiply-adds": dict(zip(("linear", "attention"), counts[name], strict=True)),
        })
    variants = variant = works = None
    release(accelerator)
    if cfg.largest_batch and device.type == "cuda" and world == 1:
        for row in rows:
            row["largest batch"] = find_largest_batch(partial(fits, cfg, accelerator, row["variant"]), cfg.batch_size)
    return {"rows": rows, "ratios": ratios, "matmul FLOP/s": products}


def stable_diffusion_autoencoder() -> nn.Module:
    """Builds the network of Stable Diffusion's autoencoder with random weights, which are as fast as trained ones."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=4, sample_size=256,
        down_block_types=4 * ("DownEncoderBlock2D",), up_block_types=4 * ("UpDecoderBlock2D",),
    )


def time_sample(cfg: BenchmarkSettings, accelerator: Accelerator) -> dict:
    """Times the drawing of one batch a rank, decoded; the plain pass is dense, so tread counts as dit.

    The network's part holds the diffusion's scalings around it. Guidance by selection ratios takes the network's route.
    """
    device, seeds = accelerator.device, list(range(cfg.batch_size * accelerator.num_processes))
    diffusion, dtype = build_diffusion(cfg.diffusion), DTYPES[cfg.decode_precision]
    estimate = "denoise" if hasattr(diffusion, "denoise") else "velocity"
    if cfg.autoencoder == "untrained":
        with device:
            vae = stable_diffusion_autoencoder()
        decoder = autoencoders.DiffusersAutoencoder("untrained", vae.to(dtype), device)
    else:
        decoder = autoencoders.load(cfg.autoencoder, device, dtype)
    net = make_network(cfg, "tread", device).eval()
    trained = SimpleNamespace(net=net, diffusion=diffusion, recorded={"diffusion": cfg.diffusion})
    guidance, _ = build_guidance(cfg.model_copy(update={"routes": None}), trained, device)
    flops = 2 * sum(generate.sampling_cost(net, diffusion, cfg.num_steps, guidance)[1:])
    first, peak = {}, defaultdict(float)

    def draw(net: DiT, watch: Stopwatch | None = None) -> None:
        with (marked(watch, diffusion, estimate, after="network", before="sampler"),
              marked(watch, decoder, "decode", after="decode", before="sampler")):
            for _ in generate.generate(
                    net, diffusion, decoder.decode, seeds, [seed % cfg.num_classes for seed in seeds],
                              batch_size=cfg.batch_size, num_steps=cfg.num_steps, guidance=guidance,
                              precision=cfg.precision):
                pass
        if watch:
            watch.mark("sampler")

    def timed(name: str, watch: Stopwatch | None) -> float:
        took = seconds(device, partial(draw, nets[name], watch))
        peak[name] = max(peak[name], train.peak_memory_gib(device))
        return took

    nets = {name: copy.deepcopy(net) for name in dict.fromkeys(name.replace("tread", "dit") for name in cfg.variants)}
    for name in nets:
        speed.compile_network(nets[name], not name.endswith("-eager") and cfg.compile)
        first[name] = seconds(device, partial(draw, nets[name]))
    works = {name: partial(timed, name) for name in nets}
    rounds, parts, products = take_turns(cfg.rounds, device, cfg.precision, works, 1)
    return {"matmul FLOP/s": products, "rows": [{
        "variant": name, "batch": cfg.batch_size, "tokens": cfg.tokens, "ranks": accelerator.num_processes,
        "images/s": len(seeds) / median(rounds[name]), "s/batch": median(rounds[name]), "parts": parts[name],
        "GFLOP/image": flops / 1e9, "share in network": parts[name]["network"] / sum(parts[name].values()),
        "MFU in network": flops * cfg.batch_size / parts[name]["network"] / max(products.values()),
        "first batch s": first[name], "peak GiB": peak[name], "rounds s/batch": rounds[name],
    } for name in nets]}


def time_data(cfg: BenchmarkSettings, accelerator: Accelerator) -> dict:
    """Times data.batches from page cache: asked at once, beside steps of `pause` seconds, and all on the device."""
    device, rows = accelerator.device, []
    with latents_of(cfg, make_network(cfg, "dit", "meta")) as latents:
        epoch = latents.count // cfg.batch_size
        ways = (("at once", 0, None), ("beside steps", cfg.pause, None), ("on the device", 0, device))
        for name, pause, home in ways:
            waits, rates, count = [], [], cfg.steps if pause else max(epoch, cfg.steps)
            loader = batches(latents, cfg.batch_size, seed=0, pin=device.type == "cuda", device=home)
            for _ in range(epoch):      # brings all of it into the page cache
                next(loader)
            for _ in range(cfg.rounds):
                began = time.perf_counter()
                for _ in range(count):
                    time.sleep(pause)
                    asked = time.perf_counter()
                    stored = next(loader)[0].to(device, non_blocking=True)
                    wait(device)
                    waits.append(time.perf_counter() - asked)
                rates.append(count * cfg.batch_size / (time.perf_counter() - began))
            loader.close()
            rows.append({"variant": name, "batch": cfg.batch_size, "step s": pause, "latents/s": median(rates),
                         "MB/s": median(rates) * stored[0].nbytes / 1e6, "parts": {"data wait": mean(waits)},
                         "longest wait s": max(waits), "rounds latents/s": rates})
    return {"rows": rows}


def time_score(cfg: BenchmarkSettings, accelerator: Accelerator) -> dict:
    """Times the extractor on noise, and the distances on random features of two sets."""
    device, rows = accelerator.device, []

    def add(name: str, work: Callable[[], object], rounds: int, **facts: object) -> float:
        took = median(seconds(device, work) for _ in range(rounds))
        rows.append({"variant": name, "parts": {"one run": took}, "peak GiB": train.peak_memory_gib(device), **facts})
        return took

    extractor = load(cfg.features, cfg.features_weights, device=device)
    images = torch.randint(0, 256, (cfg.batch_size, cfg.image_size, cfg.image_size, 3), dtype=torch.uint8).to(device)

    def extract_once() -> None:
        for _ in extract(extractor, [(torch.arange(len(images)), images)]):
            pass

    extract_once()
    took = add(f"features {cfg.features}", extract_once, cfg.rounds, batch=cfg.batch_size, side=cfg.image_size)
    rows[0]["features/s"] = cfg.batch_size / took

    # Variances over six orders, as of Inception's features. The distance of two Gaussians is a matter of the CPU.
    scale, gaussians = torch.logspace(0, -3, cfg.feature_size, dtype=torch.float64), []
    for shift in (0, 0.01):
        moments = metrics.Moments(cfg.feature_size)
        moments.add(torch.randn(max(2, cfg.reference_images), cfg.feature_size) * scale + shift)
        gaussians.extend(moments.mean_and_covariance())
    add("Fréchet distance", lambda: metrics.frechet_distance(*gaussians), cfg.rounds, size=cfg.feature_size)
    reference = torch.rand(cfg.reference_images, cfg.feature_size, device=device)
    others = torch.rand(cfg.images, cfg.feature_size, device=device)
    add("precision and recall", lambda: metrics.precision_recall(reference, others), 1, size=cfg.feature_size,
        images=cfg.images, reference_images=cfg.reference_images)      # one run: it takes long
    return {"rows": rows}


def run_apart(line: list[str], **environment: str) -> dict:
    """Runs this program in a process of its own; returns its record. Raises ValueError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run([*line, f"out={folder}/apart"], env=os.environ | environment, capture_output=True,
                               text=True, check=False)
        if ended.returncode:
            sentences = [line for line in ended.stderr.splitlines() if line.startswith("benchmark.py: ")]
            raise ValueError(f"The timing failed: {(sentences or [ended.stderr[-1500:]])[0]}")
        return json.loads(Path(folder, "apart.json").read_text(encoding="utf-8"))


def time_scaling(cfg: BenchmarkSettings, accelerator: Accelerator) -> dict:
    """Trains at several numbers of tokens here, and on several numbers of ranks in processes of their own."""
    rows, alone = [], {}
    for tokens in cfg.token_counts:
        scaled = cfg.model_copy(update={"tokens": tokens, "batch_size": max(1, cfg.batch_size * 256 // tokens)})
        rows += [{**row, "scales": "tokens"} for row in time_train(scaled, accelerator)["rows"]]
    for ranks in cfg.ranks:
        # Ranks share the cores: more threads than cores would make them wait for each other.
        threads = max(1, (cfg.threads or len(os.sched_getaffinity(0))) // ranks)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        settings = [*sys.argv[1:], "mode=train", f"batch_size={cfg.batch_size * ranks}", "threads=null"]
        for row in run_apart([*launcher, PROGRAM, *settings], OMP_NUM_THREADS=str(threads))["rows"]:
            first = alone.setdefault(row["variant"], row["images/s"] / ranks)
            rows.append({**row, "scales": "ranks", "threads": threads, "per rank": row["images/s"] / ranks / first})
    return {"rows": rows}


MODES = {"train": time_train, "sample": time_sample, "data": time_data, "score": time_score, "scaling": time_scaling}


# ---- table and plot -------------------------------------------------------------------------------------------------


def table(rows: list[dict], columns: str) -> str:
    """Returns the named columns of rows in Markdown; `parts` stands for a column of each part."""
    flat = [{**row, **{f"{part} s": value for part, value in row["parts"].items()}} for row in rows]
    parts = " ".join(dict.fromkeys(f"{part}_s".replace(" ", "_") for row in rows for part in row["parts"]))
    names = [name.replace("_", " ") for name in columns.replace("parts", parts).split()]

    def cell(value: object) -> str:
        if value is None:
            return "not measured"
        return (f"{value:,.0f}" if value >= 1000 else f"{value:.3g}") if isinstance(value, float) else str(value)

    return presentation.table(names, [[cell(row.get(name, "")) for name in names] for row in flat])


def plot(record: dict, path: Path) -> None:
    """Draws what scales as lines, and everything else as bars of the parts' seconds."""
    rows, settings = record["rows"], record["settings"]
    if record["mode"] == "scaling":
        figure = Figure(figsize=(13, 4), layout="constrained")
        axes = figure.subplots(1, 3)
        panels = (("tokens", ["images/s"]), ("tokens", ["over dense", "FLOP ceiling"]), ("ranks", ["images/s"]))
        for ax, (along, values) in zip(axes, panels, strict=True):
            for name, value in itertools.product(dict.fromkeys(row["variant"] for row in rows), values):
                line = [row for row in rows if (row["variant"], row["scales"]) == (name, along)]
                style = "k--" if value == "FLOP ceiling" else "o-"
                ax.plot([row[along] for row in line], [row[value] for row in line], style, label=f"{name} {value}")
            ax.set(xlabel=along, ylabel=values[0])
            ax.set_xscale("log", base=2)
            ax.legend()
    else:
        figure = Figure(figsize=(10, 2 + 0.5 * len(rows)), layout="constrained")
        ax = figure.subplots()
        left = np.zeros(len(rows))
        for part in dict.fromkeys(part for row in rows for part in row["parts"]):
            width = [row["parts"].get(part, 0) for row in rows]
            ax.barh([row["variant"] for row in rows], width, left=left, label=part)
            left += width
        ax.invert_yaxis()
        ax.set(xlabel="s")
        figure.legend(loc="outside lower center", ncols=6)
    figure.suptitle(f"{record['mode']}: {settings['backbone_type']}, {settings['precision']}, {record['device']}")
    presentation.save_figure(figure, path)


def is_warm(cache: str | None) -> bool:
    """Tells whether an earlier try has left compiled code in `cache`."""
    return cache is not None and any(path.is_file() for path in Path(cache).rglob("*"))


def describe(cfg: BenchmarkSettings, accelerator: Accelerator) -> dict:
    """Gathers what the numbers depend on: device, versions, commit, command and settings."""
    return {"mode": cfg.mode, "device": device_name(accelerator.device),
            "tf32": multiplies_in_tf32(accelerator.device), "ranks": accelerator.num_processes,
            "threads": torch.get_num_threads(), "versions": results.versions(SimpleNamespace(library="timm")),
            "commit": commit(), "finished": None,
            "command": " ".join(["python scripts/benchmark.py", *sys.argv[1:]]),
            "settings": cfg.model_dump()}


def run(cfg: BenchmarkSettings) -> dict:
    """Runs one mode; the main rank prints the table and writes the files. Returns the record that is in the JSON."""
    check(cfg)
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    accelerator = speed.make_accelerator(cfg.precision, cfg.grad_accum_steps, cfg.tf32, cfg.device == "cpu")
    Path(cfg.out).parent.mkdir(parents=True, exist_ok=True)      # refuses now what writing would refuse
    record = describe(cfg, accelerator) | {"first step is warm": is_warm(cfg.compile_cache)}
    record |= MODES[cfg.mode](cfg, accelerator)
    record["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if accelerator.is_main_process:
        out = Path(cfg.out)
        files.write_text(out.with_name(f"{out.name}.json"), json.dumps(record, indent=1))
        plot(record, out.with_name(f"{out.name}.png"))
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        print(f"{cfg.mode}: {cfg.backbone_type}, {cfg.tokens} tokens, {cfg.precision}, compile {cfg.compile}; "
              f"{record['ranks']} × {record['device']}; {versions}; commit {record['commit']}\n")
        print(table(record["rows"], COLUMNS[cfg.mode]))
        if record["first step is warm"]:
            print(f"\nThe first step is warm: compile_cache={cfg.compile_cache} held code of an earlier try.")
        if products := record.get("matmul FLOP/s"):
            rates = ", ".join(f"{rate / 1e12:.3g} at side {side}" for side, rate in products.items())
            print(f"\nMatrix products in {cfg.precision}, TFLOP/s: {rates}. MFU is the share of the best.")
        print(f"\n{out}.json, {out}.png")
    return record


@command("benchmark", BenchmarkSettings)
def main(cfg: BenchmarkSettings) -> None:
    build_diffusion(cfg.diffusion)      # refuses a wrong one whatever the mode
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:      # so that compiling is timed too
        cache = Path(cfg.compile_cache or empty).resolve()
        os.environ.update(TORCHINDUCTOR_CACHE_DIR=f"{cache}/inductor", TRITON_CACHE_DIR=f"{cache}/triton")
        try:
            run(cfg)
        except torch.OutOfMemoryError:
            raise ValueError(f"batch_size={cfg.batch_size} in {cfg.grad_accum_steps} parts does not fit in the GPU's "
                             f"memory beside all of variants=[{','.join(cfg.variants)}]: raise grad_accum_steps, lower "
                             f"batch_size, or name one variant.") from None


if __name__ == "__main__":
    main()
