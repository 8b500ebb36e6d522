"""Times training steps, sampling or scoring on this machine, beside the matrix products that bound them.

Variants take turns. Seconds are medians over rounds; ratios compare variants within a round. Prints a table, and
writes <out>.json if `out` is set. Commands and options: configs/benchmark.yaml, docs/performance.md.
"""

import contextlib
import copy
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from dit import DiT, multiply_adds
from guidance import Guidance
from latents.folder import open_latents
from latents.loader import batches, check_batch_size, to_latent
from objectives import DiffusionLoss, trained_parameters
from runtime import files, libraries
from runtime.command import command, commit
from runtime.device import DTYPES, device_name, multiplies_in_tf32
from runtime.schema import Count, Location, NonEmptyList, NonNegativeInt, Number, Steps, Text, Tokens, first_line
from sampling.generate import generate
from sampling.sampler import Sampler
from scoring.features import Features, extract, load_extractor
from scripts.studies import official
from training import speed
from training.optimizers import build_optimizer
from training.run import Sums
from training.run_record import network_record
from training.settings import ModelSettings
from weights.records import build_diffusion, build_network

Work = Callable[[int], object]  # does what is timed, so many times
Batches = Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]
OPTIONS = ("eager", "graphs", "fp8", "muon")    # of a variant; configs/benchmark.yaml explains them
ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "flash3": SDPBackend.FLASH_ATTENTION,
             "cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
ADAMW: dict[str, Any] = {"name": "adamw", "lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
MUON = ADAMW | {"name": "muon", "matrix_lr": None, "momentum": 0.95}
SQUARES = {"cpu": (1024, 2048), "cuda": (4096, 8192, 16384)}    # sides of the matrices that are multiplied
CHANNELS, NUM_CLASSES, IMAGE_SIZE = 4, 1000, 256                # of ImageNet's latents and images


class BenchmarkSettings(ModelSettings):
    """configs/benchmark.yaml."""

    mode: Literal["train", "sample", "score"]
    out: Location | None
    device: Literal["cpu", "cuda"] | None
    tokens: Tokens
    diffusion: dict[str, Any]
    batch_size: Count
    grad_accum_steps: Count
    precision: speed.Precision
    tf32: bool
    compile: speed.Compile
    variants: NonEmptyList[Text]
    attention: Literal["flash", "flash3", "cudnn", "efficient"] | None
    official: Location | None
    rounds: Count
    steps: Count
    warmup: NonNegativeInt
    num_steps: Steps
    scale: Number | None
    features: Features
    features_weights: Location | None


# ---- clocks ---------------------------------------------------------------------------------------------------------


def seconds_of(device: torch.device, work: Work, count: int = 1) -> float:
    """Returns the seconds of one of `count` repetitions, until the device has done them."""
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    began = now()
    work(count)
    return (now() - began) / count


def repeated(call: Callable[[], object]) -> Work:
    def work(count: int) -> None:
        for _ in range(count):
            call()

    return work


def matmul_flops(device: torch.device, precision: speed.Precision) -> dict[str, float]:
    """Measures the FLOP/s of square matrix products, by side; random factors, since zeros draw less power.

    fp8 is measured as bf16, as torch has no public product of float8.
    """
    rates, repeats = {}, 10 if device.type == "cuda" else 1
    dtype = torch.bfloat16 if precision == "fp8" else DTYPES[precision]
    for side in SQUARES[device.type]:
        a, b = torch.randn((2, side, side), device=device, dtype=dtype)
        multiply = repeated(partial(torch.mm, a, b))
        multiply(1)
        rates[str(side)] = 2 * side**3 / seconds_of(device, multiply, repeats)
    return rates


def speed_up(slow: list[float], fast: list[float]) -> float:
    """Returns the median of the ratios within a round."""
    return median(one / other for one, other in zip(slow, fast, strict=True))


def time_in_turn(
    cfg: BenchmarkSettings, accelerator: Accelerator, makes: Mapping[str, Callable[[], Work]], images: int,
    flops: Mapping[str, float], steps: int = 1, warmup: int = 0,
) -> dict[str, Any]:
    """Makes all variants, then times each in every round; returns a row for each, and the FLOP/s of matrix products.

    A repetition has so many `images` on all ranks together. `flops` are those of an image, by network.
    """
    device, works, rows, products = accelerator.device, {}, [], []
    for name, make in makes.items():
        others = torch.cuda.memory_allocated()  # 0 on a CPU
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        row: dict[str, Any] = {"variant": name, "images": images, "ranks": accelerator.num_processes}
        try:
            work = make()
            first = seconds_of(device, work)
            work(warmup)
            works[name] = work
            row |= {"first s": first, "peak GiB": train.peak_memory_gib(device) - others / 2**30}
        except (RuntimeError, ValueError) as error:
            if "-" not in name or isinstance(error, torch.OutOfMemoryError):
                raise
            row["failed"] = f"{type(error).__name__}: {first_line(error)}"  # of what is tried; the others are timed
        rows.append(row)

    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(cfg.rounds):
        for name, work in works.items():
            accelerator.wait_for_everyone()
            taken[name].append(seconds_of(device, work, steps))
        products.append(matmul_flops(device, cfg.precision))
    rates = {side: median(each[side] for each in products) for side in products[0]}
    for row in rows:
        if took := taken.get(name := row["variant"]):
            row |= {"images/s": images / median(took), "s": median(took), "rounds s": took}
            compared = {"dense": name.replace("tread", "dit"), "official": f"official {name}",
                        "first": next(other for other in taken if other.split("-")[0] == name.split("-")[0])}
            row |= {f"over {what}": speed_up(taken[other], took) for what, other in compared.items() if other in taken}
        if took and flops:
            network = "tread" if "tread" in name else "dit"
            rate = flops[network] * row["images/s"] / row["ranks"]
            row |= {"GFLOP/image": flops[network] / 1e9, "FLOP ratio": flops["dit"] / flops[network],
                    "TFLOP/s a rank": rate / 1e12, "MFU": rate / max(rates.values())}
    return {"rows": rows, "matmul FLOP/s": rates}


# ---- training, as train.py does it ----------------------------------------------------------------------------------


def options_of(variant: str) -> set[str]:
    """Returns the options in a variant's name; raises ValueError where it is not dit or tread with some of OPTIONS."""
    network, *options = variant.split("-")
    if network not in ("dit", "tread") or not {*options} <= {*OPTIONS} or {"eager", "graphs"} <= {*options}:
        raise ValueError(f"variants has {variant}: write dit or tread, then any of -{', -'.join(OPTIONS)}, but not "
                         f"both -eager and -graphs.")
    return {*options}


def make_network(cfg: BenchmarkSettings, variant: str, device: torch.device | str) -> DiT:
    model = ModelSettings.model_construct(**{name: getattr(cfg, name) for name in ModelSettings.model_fields})
    network = network_record(model, (CHANNELS, 0, 0), NUM_CLASSES)
    network["input_size"] = math.isqrt(cfg.tokens) * network["patch_size"]
    with torch.device(device):
        return build_network(network | ({"routes": []} if variant.startswith("dit") else {}))


def write_latents(folder: Path, count: int, shape: tuple[int, int, int], num_classes: int) -> None:
    """Writes random moments as a latent folder (docs/data.md)."""
    rng = np.random.default_rng(0)
    moments = rng.standard_normal((count, 2 * shape[0], *shape[1:]), np.float32)
    moments[:, shape[0] :] = 0.1
    np.save(folder / "latents.npy", moments.astype(np.float16))
    np.save(folder / "labels.npy", rng.integers(0, num_classes, count))
    record = {"format": 1, "count": count, "shape": shape, "dtype": "float16", "kind": "moments", "mirrored": False,
              "num_classes": num_classes, "class_names": None, "autoencoder": "random", "scale": 1.0, "shift": 0.0,
              "shards": [{"latents": "latents.npy", "labels": "labels.npy", "count": count}]}
    (folder / "metadata.json").write_text(json.dumps(record))


def make_step(
    accelerator: Accelerator, objective: DiffusionLoss, how: speed.Compile, num_parts: int = 1, *,
    sharded: bool = False, optimizer: Mapping[str, Any] = ADAMW, label_dropout: float = 0.1,
) -> Callable[[Tensor, Tensor, Mapping[str, Tensor]], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Wraps an objective as train.py does; returns its step, a function of latents, labels and extra arrays."""
    libraries.compile_blocks(objective.net, how)
    called = speed.replicate(accelerator, objective, sharded)
    prepared = accelerator.prepare(build_optimizer(trained_parameters(objective), **optimizer))
    return partial(train.train_step, accelerator, called, objective, prepared, num_parts=num_parts,
                   label_dropout=label_dropout, clip_norm=None, cuda_graphs=how == "reduce-overhead")


def make_training(
    cfg: BenchmarkSettings, accelerator: Accelerator, variant: str, loader: Batches, kind: str,
) -> Work:
    """Sets a variant up; returns a function that takes steps of train.py's loop."""
    device, options = accelerator.device, options_of(variant)
    torch.manual_seed(0)
    net = make_network(cfg, variant, device)
    average = train.trained_weights(copy.deepcopy(net))
    if cfg.precision == "fp8" or "fp8" in options:
        if device.type == "cuda":
            speed.check_float8(device)
        speed.multiply_in_float8(net, emulate=device.type == "cpu")
    weights = train.trained_weights(net)
    how = "eager" not in options and cfg.compile
    if how and "graphs" in options:
        how = "reduce-overhead"
    step = make_step(accelerator, DiffusionLoss(net, build_diffusion(cfg.diffusion)), how, cfg.grad_accum_steps,
                     optimizer=MUON if "muon" in options else ADAMW)
    sums, numbers = Sums(device), itertools.count()

    def take_steps(count: int) -> None:
        for number in itertools.islice(numbers, count):
            torch.manual_seed(train.step_seed(0, number, accelerator.process_index))
            stored, y, arrays = send_to_device(next(loader), device, non_blocking=True)
            measured = step(to_latent(stored, kind), y, arrays)
            train.update_ema(average, weights, 0.9999)
            sums.add(*measured)

    return take_steps


def time_train(cfg: BenchmarkSettings, accelerator: Accelerator) -> dict[str, Any]:
    """Times training steps on random moments, which the loader reads, and those of the official code if it is given."""
    options = set.union(*map(options_of, cfg.variants))
    if cfg.official:
        if cfg.precision == "fp8" or cfg.grad_accum_steps > 1 or options - {"eager"}:
            raise ValueError("official= is for variants dit, tread, dit-eager and tread-eager, grad_accum_steps=1 and "
                             "another precision than fp8, as their code has no more.")
        theirs = official.open_official(Path(cfg.official))
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
    nets = {name: make_network(cfg, name, "meta") for name in ("dit", "tread")}
    # 2 a multiply-add, and the backward pass takes twice the forward one.
    flops = {name: 6.0 * sum(multiply_adds(net, net.routes)) for name, net in nets.items()}
    side = nets["dit"].input_size
    count = max(cfg.batch_size, min(4096, 2**28 // (4 * CHANNELS * side**2)))   # at most 256 MiB
    check_batch_size(cfg.batch_size, count, world, cfg.grad_accum_steps)
    with tempfile.TemporaryDirectory() as folder:
        write_latents(Path(folder), count, (CHANNELS, side, side), NUM_CLASSES)
        latents = open_latents(folder)
        loader = batches(latents, cfg.batch_size, seed=0, rank=rank, world=world, pin=device.type == "cuda")
        makes: dict[str, Callable[[], Work]] = {}
        for name in cfg.variants:
            makes[name] = partial(make_training, cfg, accelerator, name, loader, latents.kind)
            if cfg.official:
                makes[f"official {name}"] = partial(
                    official.make_training, theirs, make_network(cfg, name, "meta"),
                    "eager" not in options_of(name) and cfg.compile, accelerator, loader, latents.kind)
        return time_in_turn(cfg, accelerator, makes, cfg.batch_size, flops, cfg.steps, cfg.warmup)


# ---- sampling and scoring -------------------------------------------------------------------------------------------


def time_sample(cfg: BenchmarkSettings, accelerator: Accelerator) -> dict[str, Any]:
    """Times sampling one batch of latents per rank by the dense variants, as images are; decoding is not included."""
    precision, seeds = cfg.precision, list(range(cfg.batch_size * accelerator.num_processes))
    if precision == "fp8":
        raise ValueError("mode=sample precision=fp8: images are never sampled in float8, so set precision=bf16.")
    labels = [seed % NUM_CLASSES for seed in seeds]
    sampler = Sampler(build_diffusion(cfg.diffusion), cfg.num_steps, None if cfg.scale is None else Guidance(cfg.scale))

    def make(how: bool) -> Work:
        net = make_network(cfg, "dit", accelerator.device).eval()
        libraries.compile_blocks(net, how)
        return repeated(lambda: [*generate(accelerator, net, sampler, lambda latents: latents, seeds, labels,
                                           batch_size=cfg.batch_size, precision=precision)])

    ways = {"dit": bool(cfg.compile), "dit-eager": False}
    makes = {name: partial(make, ways[name]) for name in cfg.variants if name in ways}
    if not makes:
        raise ValueError(f"mode=sample times variants dit and dit-eager, but variants={cfg.variants}.")
    flops = {"dit": 2.0 * sum(sampler.cost(make_network(cfg, "dit", "meta")))}
    return time_in_turn(cfg, accelerator, makes, len(seeds), flops)


def time_score(cfg: BenchmarkSettings, accelerator: Accelerator) -> dict[str, Any]:
    """Times the features of a batch of random images on each rank, as fid.py measures them."""
    extractor = load_extractor(accelerator.state, cfg.features, cfg.features_weights)
    images = torch.randint(256, (cfg.batch_size, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=torch.uint8,
                           device=accelerator.device)
    score = repeated(lambda: [*extract(extractor, [(torch.arange(len(images)), images)])])
    return time_in_turn(cfg, accelerator, {cfg.features: lambda: score}, len(images) * accelerator.num_processes, {})


# ---- the command ----------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    """Returns rows in Markdown, with a column of each number; the JSON has the rounds too."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if not name.startswith("rounds")]

    def cell(value: object) -> str:
        return (f"{value:,.0f}" if value >= 1000 else f"{value:.3g}") if isinstance(value, float) else str(value)

    cells = [names, ["---"] * len(names), *([cell(row.get(name, "–")) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def start(cfg: BenchmarkSettings) -> Accelerator:
    """Joins the ranks; raises ValueError for a GPU or a precision that this machine lacks."""
    accelerator = speed.make_accelerator(cfg.precision, cfg.grad_accum_steps, cfg.tf32, cfg.device == "cpu")
    if cfg.device == "cuda" and accelerator.device.type != "cuda":
        raise ValueError("device=cuda is asked for, but torch sees no GPU here: set device=cpu.")
    if cfg.precision == "fp8":
        speed.check_float8(accelerator.device)
    return accelerator


@contextlib.contextmanager
def attention_of(kind: str | None) -> Iterator[None]:
    """Lets torch take one kind of ATTENTION alone, or choose; it raises RuntimeError where it lacks that one."""
    if kind == "flash3":
        torch.nn.attention.activate_flash_attention_impl("FA3")
    with sdpa_kernel(ATTENTION[kind]) if kind else contextlib.nullcontext():
        yield


@command("benchmark", BenchmarkSettings)
def main(cfg: BenchmarkSettings) -> None:
    measure = {"train": time_train, "sample": time_sample, "score": time_score}[cfg.mode]
    with attention_of(cfg.attention):
        accelerator = start(cfg)
        record = {
            "mode": cfg.mode, "device": device_name(accelerator.device), "tf32": multiplies_in_tf32(accelerator.device),
            "ranks": accelerator.num_processes, "DDP": torch.distributed.is_initialized(),
            "threads": torch.get_num_threads(), "torch": torch.__version__, "commit": commit(),
            "command": " ".join(["python scripts/benchmark.py", *sys.argv[1:]]), "settings": cfg.model_dump(),
            **measure(cfg, accelerator), "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    if accelerator.is_main_process:
        rates = ", ".join(f"{rate / 1e12:.3g} at side {side}" for side, rate in record["matmul FLOP/s"].items())
        print(f"{cfg.backbone_type}, {cfg.tokens} tokens, {cfg.precision}, compile {cfg.compile}; {record['ranks']} × "
              f"{record['device']}, torch {record['torch']}; commit {record['commit']}\n\n{table(record['rows'])}\n\n"
              f"Matrix products, TFLOP/s: {rates}. MFU is the share of the best.")
        if cfg.out:
            files.write_text(Path(f"{cfg.out}.json"), json.dumps(record, indent=1))
            print(f"\n{cfg.out}.json")
    if failed := [row["variant"] for row in record["rows"] if "failed" in row]:
        raise ValueError(f"Failed: {', '.join(failed)}. The others were timed.")


if __name__ == "__main__":
    main()
