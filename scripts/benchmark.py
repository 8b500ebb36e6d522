"""Times training steps, or sampling, on this machine, beside the matrix products that bound them.

The dense and the routed network take turns. Seconds are medians over rounds; ratios compare them within a round. Prints
a table, and writes <out>.json if `out` is set. Commands and options: configs/benchmark.yaml, docs/performance.md.
"""

import contextlib
import copy
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import torch
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from dit import DiT, multiply_adds
from edm import EDM
from guidance import Guidance
from latents.loader import check_batch_size
from objectives import DiffusionLoss, trained_parameters
from runtime import files, libraries
from runtime.command import command, commit
from runtime.device import DTYPES, device_name, multiplies_in_tf32
from runtime.schema import Count, Location, NonEmptyList, NonNegativeInt, Number, Steps, Tokens
from sampling.generate import generate
from sampling.sampler import Sampler
from scripts.studies import official
from training import speed
from training.optimizers import build_optimizer
from training.run import Sums
from training.run_record import network_record
from training.settings import AdamWSettings, ModelSettings, MuonSettings
from weights.records import build_network

Work = Callable[[], object]     # what is timed: a step, or sampling a batch
ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "flash3": SDPBackend.FLASH_ATTENTION,
             "cudnn": SDPBackend.CUDNN_ATTENTION}
SQUARES = {"cpu": (1024, 2048), "cuda": (4096, 8192, 16384)}    # sides of the matrices that are multiplied
CHANNELS, NUM_CLASSES = 4, 1000                                 # of ImageNet's latents


class BenchmarkSettings(ModelSettings):
    """configs/benchmark.yaml."""

    mode: Literal["train", "sample"]
    out: Location | None
    cpu: bool
    tokens: Tokens
    optimizer: Annotated[AdamWSettings | MuonSettings, Field(discriminator="name")]
    batch_size: Count
    grad_accum_steps: Count
    precision: speed.Precision
    compile: speed.Compile
    variants: NonEmptyList[Literal["dit", "tread"]]
    attention: Literal["flash", "flash3", "cudnn"] | None
    official: Location | None
    rounds: Count
    steps: Count
    warmup: NonNegativeInt
    num_steps: Steps
    scale: Number | None


# ---- clocks ---------------------------------------------------------------------------------------------------------


def seconds_of(device: torch.device, work: Work, count: int = 1) -> float:
    """Returns the seconds of one of `count` repetitions, until the device has done them."""
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    began = now()
    for _ in range(count):
        work()
    return (now() - began) / count


def matmul_flops(device: torch.device, precision: speed.Precision) -> dict[str, float]:
    """Measures the FLOP/s of square matrix products, by side; random factors, since zeros draw less power.

    fp8 is measured as bf16, as torch has no public product of float8.
    """
    rates, repeats = {}, 10 if device.type == "cuda" else 1
    dtype = torch.bfloat16 if precision == "fp8" else DTYPES[precision]
    for side in SQUARES[device.type]:
        a, b = torch.randn((2, side, side), device=device, dtype=dtype)
        multiply = partial(torch.mm, a, b)
        multiply()
        rates[str(side)] = 2 * side**3 / seconds_of(device, multiply, repeats)
    return rates


def time_in_turn(
    cfg: BenchmarkSettings, accelerator: Accelerator, makes: Mapping[str, Callable[[], Work]], images: int,
    flops: Mapping[str, float],
) -> dict[str, Any]:
    """Makes all variants, then times each in every round; returns a row for each, and the FLOP/s of matrix products.

    A repetition has so many `images` on all ranks together. `flops` are those of an image, by variant.
    """
    device, works, products = accelerator.device, {}, []
    rows: dict[str, dict[str, Any]] = {}
    for name, make in makes.items():
        others = torch.cuda.memory_allocated()  # 0 on a CPU
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        works[name] = make()
        rows[name] = {"variant": name, "images": images, "ranks": accelerator.num_processes, "rounds s": [],
                      "first s": seconds_of(device, works[name])}
        for _ in range(cfg.warmup):
            works[name]()
        rows[name]["peak GiB"] = train.peak_memory_gib(device) - others / 2**30

    for _ in range(cfg.rounds):
        for name, work in works.items():
            accelerator.wait_for_everyone()
            rows[name]["rounds s"].append(seconds_of(device, work, cfg.steps))
        products.append(matmul_flops(device, cfg.precision))
    rates = {side: median(each[side] for each in products) for side in products[0]}
    for name, row in rows.items():
        seconds, network = median(row["rounds s"]), name.removeprefix("official ")
        row |= {"images/s": images / seconds, "s": seconds}
        for what, other in (("dense", "dit"), ("official", f"official {name}")):
            if other in rows and not name.startswith("official"):  # a ratio of each round
                row[f"over {what}"] = median(map(float.__truediv__, rows[other]["rounds s"], row["rounds s"]))
        rate = flops[network] * row["images/s"] / row["ranks"]
        row |= {"GFLOP/image": flops[network] / 1e9, "FLOP ratio": flops["dit"] / flops[network],
                "TFLOP/s a rank": rate / 1e12, "MFU": rate / max(rates.values())}
    return {"rows": [*rows.values()], "matmul FLOP/s": rates}


# ---- training, as train.py does it ----------------------------------------------------------------------------------


def make_network(cfg: BenchmarkSettings, variant: str, device: torch.device | str) -> DiT:
    model = ModelSettings(**cfg.model_dump(include={*ModelSettings.model_fields}))
    network = network_record(model, (CHANNELS, 0, 0), NUM_CLASSES)
    network["input_size"] = math.isqrt(cfg.tokens) * network["patch_size"]
    with torch.device(device):
        return build_network(network | ({"routes": []} if variant == "dit" else {}))


def make_step(
    accelerator: Accelerator, objective: DiffusionLoss, how: speed.Compile, *, float8: bool = False,
    sharded: bool = False, label_dropout: float = 0.1, **optimizer: Any,
) -> Callable[[Tensor, Tensor, Mapping[str, Tensor]], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Wraps an objective as train.py does; returns its step, a function of latents, labels and extra arrays."""
    if float8:
        speed.multiply_in_float8(objective.net)
    libraries.compile_blocks(objective.net, how)
    called = speed.replicate(accelerator, objective, sharded)
    prepared = accelerator.prepare(build_optimizer(trained_parameters(objective), **optimizer))
    return partial(train.train_step, accelerator, called, objective, prepared, label_dropout=label_dropout,
                   clip_norm=None, num_parts=accelerator.gradient_accumulation_steps,
                   cuda_graphs=how == "reduce-overhead")


def make_training(cfg: BenchmarkSettings, accelerator: Accelerator, variant: str, x: Tensor, y: Tensor) -> Work:
    """Sets a variant up; returns a function that takes a step of train.py's loop, always on one batch."""
    torch.manual_seed(0)
    net = make_network(cfg, variant, accelerator.device)
    average = train.trained_weights(copy.deepcopy(net))
    step = make_step(accelerator, DiffusionLoss(net, EDM()), cfg.compile, float8=cfg.precision == "fp8",
                     **cfg.optimizer.model_dump(exclude={"warmup_steps", "schedule", "clip_norm"}))
    weights, sums, numbers = train.trained_weights(net), Sums(accelerator.device), itertools.count()

    def take_step() -> None:
        torch.manual_seed(train.step_seed(0, next(numbers), accelerator.process_index))
        sums.add(*step(x, y, {}))
        train.update_ema(average, weights, 0.9999)

    return take_step


def time_train(cfg: BenchmarkSettings, accelerator: Accelerator) -> dict[str, Any]:
    """Times training steps on random latents on the device, and those of the official code if it is given."""
    nets = {name: make_network(cfg, name, "meta") for name in ("dit", "tread")}
    # 2 a multiply-add, and the backward pass takes twice the forward one.
    flops = {name: 6.0 * sum(multiply_adds(net, net.routes)) for name, net in nets.items()}
    check_batch_size(cfg.batch_size, cfg.batch_size, accelerator.num_processes, cfg.grad_accum_steps)
    share, side = cfg.batch_size // accelerator.num_processes, nets["dit"].input_size
    x = torch.randn(share, CHANNELS, side, side, device=accelerator.device)
    y = torch.arange(share, device=accelerator.device) % NUM_CLASSES
    makes: dict[str, Callable[[], Work]] = {}
    for name in cfg.variants:
        makes[name] = partial(make_training, cfg, accelerator, name, x, y)
        if cfg.official:
            makes[f"official {name}"] = partial(
                official.make_training, Path(cfg.official), nets[name], bool(cfg.compile), accelerator, x, y)
    return time_in_turn(cfg, accelerator, makes, cfg.batch_size, flops)


# ---- sampling -------------------------------------------------------------------------------------------------------


def time_sample(cfg: BenchmarkSettings, accelerator: Accelerator) -> dict[str, Any]:
    """Times sampling one batch of latents per rank by the dense network, as images are; decoding is not included."""
    precision, seeds = cfg.precision, list(range(cfg.batch_size * accelerator.num_processes))
    if precision == "fp8":
        raise ValueError("mode=sample precision=fp8: images are never sampled in float8, so set precision=bf16.")
    labels = [seed % NUM_CLASSES for seed in seeds]
    sampler = Sampler(EDM(), cfg.num_steps, None if cfg.scale is None else Guidance(cfg.scale))
    net = make_network(cfg, "dit", accelerator.device).eval()
    libraries.compile_blocks(net, cfg.compile)

    def sample() -> object:
        return [*generate(accelerator, net, sampler, lambda latents: latents, seeds, labels,
                          batch_size=cfg.batch_size, precision=precision)]

    return time_in_turn(cfg, accelerator, {"dit": lambda: sample}, len(seeds), {"dit": 2.0 * sum(sampler.cost(net))})


# ---- the command ----------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    """Returns a line for each number, with a column for each variant; the JSON has the rounds too."""
    names = dict.fromkeys(name for row in rows for name in row if name != "rounds s")
    cells = {name: [row.get(name, "–") for row in rows] for name in names}
    return "\n".join(f"{name:14}" + "".join(f"{cell:16,.5g}" if isinstance(cell, float) else f"{cell:>16}"
                                            for cell in cells[name]) for name in names)


@command("benchmark", BenchmarkSettings)
def main(cfg: BenchmarkSettings) -> None:
    accelerator = speed.make_accelerator(cfg.precision, cfg.grad_accum_steps, True, cfg.cpu)
    if cfg.precision == "fp8":
        speed.check_float8(accelerator.device)
    if cfg.attention == "flash3":
        torch.nn.attention.activate_flash_attention_impl("FA3")
    with sdpa_kernel(ATTENTION[cfg.attention]) if cfg.attention else contextlib.nullcontext():
        record = {
            "mode": cfg.mode, "device": device_name(accelerator.device), "tf32": multiplies_in_tf32(accelerator.device),
            "ranks": accelerator.num_processes, "DDP": torch.distributed.is_initialized(),
            "threads": torch.get_num_threads(), "torch": torch.__version__, "commit": commit(),
            "command": " ".join(["python scripts/benchmark.py", *sys.argv[1:]]), "settings": cfg.model_dump(),
            **(time_train if cfg.mode == "train" else time_sample)(cfg, accelerator),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    if accelerator.is_main_process:
        rates = ", ".join(f"{rate / 1e12:.3g} at side {side}" for side, rate in record["matmul FLOP/s"].items())
        print(f"{cfg.backbone_type}, {cfg.tokens} tokens, {cfg.precision}, compile {cfg.compile}; {record['ranks']} × "
              f"{record['device']}, torch {record['torch']}; commit {record['commit']}\n\n{table(record['rows'])}\n\n"
              f"Matrix products, TFLOP/s: {rates}. MFU is the share of the best.")
        if cfg.out:
            files.write_text(Path(f"{cfg.out}.json"), json.dumps(record, indent=1))
            print(f"\n{cfg.out}.json")


if __name__ == "__main__":
    main()
