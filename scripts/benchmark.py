"""Times training steps and sampling on this machine, beside the matrix products that bound them.

Variants take turns. The table has medians over rounds; ratios compare variants within a round. Prints a table, and
writes <out>.json if `out` is set. Commands and options: configs/benchmark.yaml, docs/performance.md.
"""

import contextlib
import copy
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace

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
from latents.folder import Latents, open_latents
from latents.loader import batches, check_batch_size, to_latent
from objectives import DiffusionLoss
from runtime import files
from runtime.command import command, commit
from runtime.device import DTYPES, device_name, multiplies_in_tf32
from runtime.schema import (
    Classes,
    Count,
    Location,
    NonEmptyList,
    NonNegativeInt,
    Number,
    Size,
    Steps,
    Text,
    Tokens,
    first_line,
    one_of,
)
from sampling.generate import generate
from sampling.sampler import Sampler
from scoring.features import EXTRACTORS, extract, load_extractor, versions
from training import speed
from training.cuda_graphs import Compile, record_passes, record_update
from training.optimizers import build_optimizer
from training.run import Sums
from training.run_record import network_record
from training.settings import ModelSettings
from weights.records import build_diffusion, build_network

Batches = Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]
Mark = Callable[[str], None]  # charges the time since the last mark to a name
OPTIONS = ("eager", "blocks", "passes", "fp8", "muon")  # of a variant; configs/benchmark.yaml explains them
ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "flash3": SDPBackend.FLASH_ATTENTION,
             "cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
ADAMW = dict(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
SQUARES = {"cpu": (1024, 2048), "cuda": (4096, 8192, 16384)}  # sides of the matrices that are multiplied


class BenchmarkSettings(ModelSettings):
    """configs/benchmark.yaml."""

    mode: one_of(["train", "sample", "score"])
    out: Location | None
    device: one_of(["cpu", "cuda"]) | None
    threads: Count | None
    tokens: Tokens
    in_channels: Size
    num_classes: Classes
    diffusion: dict
    batch_size: Count
    grad_accum_steps: Count
    precision: speed.Precision
    tf32: bool
    compile: Compile
    compile_cache: Location | None
    activation_checkpointing: bool
    variants: NonEmptyList[Text]
    attention: one_of(ATTENTION) | None
    rounds: Count
    steps: Count
    warmup: NonNegativeInt
    data_path: Location | None
    num_latents: Count
    num_steps: Steps
    scale: Number | None
    features: one_of(EXTRACTORS)
    features_weights: Location | None
    image_size: Size


# ---- clocks ---------------------------------------------------------------------------------------------------------


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of_parts(device: torch.device, work: Callable[[Mark], object], count: int = 1) -> dict[str, float]:
    """Returns the seconds between marks of work, for one of its `count` repetitions, and resets the peak of memory.

    The clock is the GPU's, by events on its stream: they wait for nothing, and time in which the GPU is idle is in the
    part whose work it waits for.
    """
    marks: list[tuple[str, float | torch.cuda.Event]] = []

    def mark(name: str) -> None:
        if device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        marks.append((name, now))

    wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    mark("start")
    work(mark)
    wait(device)
    parts: dict[str, float] = defaultdict(float)
    for (_, begin), (name, end) in itertools.pairwise(marks):
        parts[name] += (begin.elapsed_time(end) / 1000 if device.type == "cuda" else end - begin) / count
    return dict(parts)


def matmul_flops(device: torch.device, precision: str) -> dict[str, float]:
    """Measures the FLOP/s of square matrix products, by side; random factors, since zeros draw less power.

    fp8 is measured as bf16, as torch has no public product of float8.
    """
    rates, repeats = {}, 10 if device.type == "cuda" else 1
    for side in SQUARES[device.type]:
        a, b = torch.randn((2, side, side), device=device, dtype=DTYPES.get(precision, torch.bfloat16))
        torch.mm(a, b)
        took = seconds_of_parts(device, lambda mark, a=a, b=b: (*(a @ b for _ in range(repeats)), mark("products")))
        rates[str(side)] = 2 * side**3 * repeats / took["products"]
    return rates


def speed_up(slow: list[float], fast: list[float]) -> float:
    """Returns the median of the ratios within a round."""
    return median(one / other for one, other in zip(slow, fast, strict=True))


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(each[name] for each in rounds) for name in rounds[0]}


def take_turns(
    rounds: int, device: torch.device, precision: str, works: dict[str, Callable[[], dict[str, float]]],
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]], dict[str, float]]:
    """Times the parts of all works in turn, round after round.

    Returns by name the seconds of each round and the median ones of each part, and the FLOP/s of matrix products.
    """
    taken, products = defaultdict(list), []
    for _ in range(rounds):
        for name, work in works.items():
            taken[name].append(work())
        products.append(matmul_flops(device, precision))
    totals = {name: [sum(parts.values()) for parts in each] for name, each in taken.items()}
    return totals, {name: medians(each) for name, each in taken.items()}, medians(products)


# ---- what is timed --------------------------------------------------------------------------------------------------


def options_of(variant: str) -> set[str]:
    """Returns the options in a variant's name; raises ValueError where it is not dit or tread with some of OPTIONS."""
    network, *options = variant.split("-")
    if network not in ("dit", "tread") or not {*options} <= {*OPTIONS} or len({*options} & {*OPTIONS[:3]}) > 1:
        raise ValueError(f"variants has {variant}: write dit or tread, then at most one of -{', -'.join(OPTIONS[:3])}, "
                         f"then any of -{', -'.join(OPTIONS[3:])}.")
    return {*options}


def make_network(cfg: BenchmarkSettings, variant: str, device: torch.device | str) -> DiT:
    model = ModelSettings.model_construct(**{name: getattr(cfg, name) for name in ModelSettings.model_fields})
    network = network_record(model, (cfg.in_channels, 0, 0), cfg.num_classes)
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


@contextlib.contextmanager
def latents_of(cfg: BenchmarkSettings, net: DiT) -> Iterator[Latents]:
    """Opens the latents asked for, or random ones, each rank its own."""
    shape = (net.in_channels, net.input_size, net.input_size)
    with tempfile.TemporaryDirectory() as folder:
        if cfg.data_path is None:
            most = 2**28 // (4 * math.prod(shape))  # 256 MiB of moments in float16
            write_latents(Path(folder), max(cfg.batch_size, min(cfg.num_latents, most)), shape, cfg.num_classes)
        latents = open_latents(cfg.data_path or folder)
        latents.require(shape=shape, num_classes=cfg.num_classes)
        yield latents


class Variant:
    """A network in training, set up as in train.py and past its first step, with its measurements."""

    def __init__(self, cfg: BenchmarkSettings, accelerator: Accelerator, name: str, loader: Batches, kind: str):
        device, options = accelerator.device, options_of(name)
        others = torch.cuda.memory_allocated()  # 0 on a CPU
        self.name, self.accelerator, self.loader, self.kind = name, accelerator, loader, kind
        self.num_parts = cfg.grad_accum_steps
        self.step, self.resident, self.peak, self.graphs = 0, 0, 0.0, 0
        torch.manual_seed(0)
        self.model = make_network(cfg, name, device)
        self.ema = copy.deepcopy(self.model).eval()
        if cfg.precision == "fp8" or "fp8" in options:
            if device.type == "cuda":
                speed.check_float8(device)
            speed.multiply_in_float8(self.model, emulate=device.type == "cpu")
        self.sums, self.objective = Sums(device), DiffusionLoss(self.model, build_diffusion(cfg.diffusion))
        optimizer = build_optimizer(dict(self.model.named_parameters()), **(
            ADAMW | {"name": "muon", "matrix_lr": None, "momentum": 0.95} if "muon" in options else
            ADAMW | {"name": "adamw"}))
        if cfg.activation_checkpointing:
            speed.recompute_activations(self.model)
        how = "eager" not in options and cfg.compile
        if how and "passes" in options:
            how = "reduce-overhead"
        speed.compile_blocks(self.model, "blocks" not in options and how)
        if how and "blocks" in options:  # torch's own mode, which train.py does not have
            how = True
            for block in self.model.blocks:
                block.forward = torch.compile(block.forward, dynamic=False, mode="reduce-overhead")
        recorded = record_passes(self.objective, how, device, self.num_parts)
        self.called, self.optimizer = speed.replicate(accelerator, recorded), accelerator.prepare(optimizer)
        # Before a part's forward pass lies, but for the first part, the backward pass of the part before.
        self.mark, self.part = lambda name: None, 0
        self.called.register_forward_pre_hook(lambda *_: self.mark("backward" if self.part else "forward"))
        self.called.register_forward_hook(self.end_forward)
        self.update = record_update(accelerator, self.optimizer, how, self.num_parts)
        self.weights, self.average = train.trained_weights(self.model), train.trained_weights(self.ema)

        self.first_step = sum(self.measure(1).values())
        self.resident = torch.cuda.memory_allocated() - others
        self.measure(cfg.warmup)

    def end_forward(self, *_: object) -> None:
        self.mark("forward")
        self.part += 1

    def begin_update(self, *arguments: object) -> tuple[Tensor, ...]:
        self.mark("backward")
        return self.update(*arguments)

    def take_steps(self, count: int, mark: Mark) -> None:
        """Takes steps as train.py's loop does, with a mark at the end of each part."""
        self.mark = mark
        for _ in range(count):
            self.part = 0
            torch.manual_seed(train.step_seed(0, self.step, self.accelerator.process_index))
            stored, y, arrays = send_to_device(next(self.loader), self.accelerator.device, non_blocking=True)
            mark("data wait")
            measured = train.train_step(
                self.accelerator, self.called, self.objective, self.optimizer, to_latent(stored, self.kind), y,
                arrays, label_dropout=0.1, clip_norm=None, num_parts=self.num_parts, update=self.begin_update,
            )
            mark("optimizer")
            train.update_ema(self.average, self.weights, 0.9999)
            mark("EMA")
            self.sums.add(*measured)
            mark("sums")
            self.step += 1

    def measure(self, count: int) -> dict[str, float]:
        """Returns the seconds of a step's parts; keeps its peak of memory and counts the graphs that were compiled."""
        counts = torch._dynamo.utils.counters["stats"]  # imported here, as --help needs no compiler
        device, graphs = self.accelerator.device, counts["unique_graphs"]
        self.accelerator.wait_for_everyone()
        others = torch.cuda.memory_allocated() - self.resident
        parts = seconds_of_parts(device, partial(self.take_steps, count), count)
        self.graphs += counts["unique_graphs"] - graphs
        self.peak = train.peak_memory_gib(device) - others / 2**30
        return parts


def steps_in_turn(cfg: BenchmarkSettings, accelerator: Accelerator, make: Callable[[Batches, str], list]) -> tuple:
    """Makes variants on the data of one loader; returns them, and what `take_turns` returns of their steps."""
    for name in cfg.variants:
        options_of(name)
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes
    with latents_of(cfg, make_network(cfg, "dit", "meta")) as latents:
        check_batch_size(cfg.batch_size, latents.count, world, cfg.grad_accum_steps)
        loader = batches(latents, cfg.batch_size, seed=0, rank=rank, world=world, pin=device.type == "cuda")
        variants = make(loader, latents.kind)
        works = {variant.name: partial(variant.measure, cfg.steps) for variant in variants}
        taken = take_turns(cfg.rounds, device, cfg.precision, works)
        loader.close()
    return variants, *taken


# ---- the modes ------------------------------------------------------------------------------------------------------


def time_train(cfg: BenchmarkSettings, accelerator: Accelerator) -> dict:
    """Times training steps of all variants in turn, and first steps unless an earlier try has compiled their code.

    The forward part begins with the stored rows on the device. It samples latents, labels to drop, noise and masks.
    """
    is_warm = cfg.compile_cache is not None and any(path.is_file() for path in Path(cfg.compile_cache).rglob("*"))
    nets = {name: make_network(cfg, name, "meta") for name in {*cfg.variants, "dit"}}
    counts = {name: multiply_adds(net, net.routes) for name, net in nets.items()}
    failed: dict[str, str] = {}

    def make(*data: object) -> list[Variant]:
        made = []
        for name in cfg.variants:
            try:
                made.append(Variant(cfg, accelerator, name, *data))
            except (RuntimeError, ValueError) as error:
                if not options_of(name) or isinstance(error, torch.OutOfMemoryError):
                    raise
                failed[name] = f"{type(error).__name__}: {first_line(error)}"  # of what is tried; the others are timed
        return made

    variants, took, parts, products = steps_in_turn(cfg, accelerator, make)
    rows, world = [{"variant": name, "parts": {}, "failed": message} for name, message in failed.items()], \
        accelerator.num_processes
    for variant in variants:
        name, per_step, dense = variant.name, median(took[variant.name]), took.get(variant.name.replace("tread", "dit"))
        flops = 6 * sum(counts[name])  # 2 a multiply-add, and the backward pass takes twice the forward one
        rate = flops * cfg.batch_size / world / per_step
        rows.append({
            "variant": name, "batch": cfg.batch_size, "tokens": cfg.tokens, "ranks": world,
            "images/s": cfg.batch_size / per_step, "s/step": per_step, "parts": parts[name],
            "GFLOP/image": flops / 1e9, "TFLOP/s a rank": rate / 1e12, "MFU": rate / max(products.values()),
            "over dense": dense and speed_up(dense, took[name]),
            "over first": speed_up(next(took[other] for other in took if other.split("-")[0] == name.split("-")[0]),
                                   took[name]),
            "FLOP ratio": sum(counts["dit"]) / sum(counts[name]), "peak GiB": variant.peak,
            "first step s": None if is_warm else variant.first_step, "graphs": variant.graphs,
            "rounds s/step": took[name],
        })
    return {"rows": rows, "matmul FLOP/s": products}


def time_sample(cfg: BenchmarkSettings, accelerator: Accelerator) -> dict:
    """Times sampling one batch of latents per rank by the dense variants, as images are; decoding is not included."""
    device, seeds = accelerator.device, list(range(cfg.batch_size * accelerator.num_processes))
    labels = [seed % cfg.num_classes for seed in seeds]
    guidance = None if cfg.scale is None else Guidance(cfg.scale)
    sampler = Sampler(build_diffusion(cfg.diffusion), cfg.num_steps, guidance)

    def sample(net: DiT, mark: Mark) -> None:
        for _ in generate(accelerator, net, sampler, lambda latents: latents, seeds, labels, batch_size=cfg.batch_size,
                          precision=cfg.precision):
            pass
        mark("sampling")

    works, first = {}, {}
    for name in (name for name in cfg.variants if name in ("dit", "dit-eager")):
        net = make_network(cfg, name, device).eval()
        speed.compile_blocks(net, cfg.compile if name == "dit" else False)
        works[name] = partial(seconds_of_parts, device, partial(sample, net))
        first[name] = works[name]()["sampling"]
    if not works:
        raise ValueError(f"mode=sample times variants dit and dit-eager, but variants={cfg.variants}.")
    rounds, parts, products = take_turns(cfg.rounds, device, cfg.precision, works)
    flops = 2 * sum(sampler.cost(net))
    return {"matmul FLOP/s": products, "rows": [{
        "variant": name, "batch": cfg.batch_size, "tokens": cfg.tokens, "ranks": accelerator.num_processes,
        "images/s": len(seeds) / median(took), "s/batch": median(took), "parts": parts[name],
        "GFLOP/image": flops / 1e9, "MFU": flops * cfg.batch_size / median(took) / max(products.values()),
        "over first": speed_up(next(iter(rounds.values())), took), "first batch s": first[name],
        "peak GiB": train.peak_memory_gib(device), "rounds s/batch": took,
    } for name, took in rounds.items()]}


def time_score(cfg: BenchmarkSettings, accelerator: Accelerator) -> dict:
    """Times the features of a batch of random images on each rank, as fid.py measures them."""
    device, extractor = accelerator.device, load_extractor(accelerator.state, cfg.features, cfg.features_weights)
    images = torch.randint(256, (cfg.batch_size, cfg.image_size, cfg.image_size, 3), dtype=torch.uint8, device=device)

    def score(mark: Mark) -> None:
        for _ in extract(extractor, [(torch.arange(len(images)), images)]):
            pass
        mark("features")

    first = seconds_of_parts(device, score)["features"]
    rounds, parts, products = take_turns(cfg.rounds, device, cfg.precision, {
        cfg.features: partial(seconds_of_parts, device, score)})
    [(name, took)] = rounds.items()
    return {"matmul FLOP/s": products, "rows": [{
        "variant": name, "batch": cfg.batch_size, "image size": cfg.image_size, "ranks": accelerator.num_processes,
        "images/s": cfg.batch_size * accelerator.num_processes / median(took), "s/batch": median(took),
        "parts": parts[name], "first batch s": first, "peak GiB": train.peak_memory_gib(device), "rounds s/batch": took,
    }]}


MODES = {"train": time_train, "sample": time_sample, "score": time_score}


# ---- the command ----------------------------------------------------------------------------------------------------


def table(rows: list[dict]) -> str:
    """Returns rows in Markdown, with a column of each number and of each part; the JSON has the rounds too."""
    flat = [{name: value for name, value in row.items() if not isinstance(value, list | dict)}
            | {f"{part} s": value for part, value in row["parts"].items()} for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))

    def cell(value: object) -> str:
        if value is None:
            return "not measured"
        return (f"{value:,.0f}" if value >= 1000 else f"{value:.3g}") if isinstance(value, float) else str(value)

    rows = [names, ["---"] * len(names), *([cell(row.get(name, "")) for name in names] for row in flat)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def describe(cfg: BenchmarkSettings, accelerator: Accelerator) -> dict:
    """Gathers what the numbers depend on: device, versions, commit, command and settings."""
    return {"mode": cfg.mode, "device": device_name(accelerator.device),
            "tf32": multiplies_in_tf32(accelerator.device), "ranks": accelerator.num_processes,
            "DDP": torch.distributed.is_initialized(),
            "threads": torch.get_num_threads(), "versions": versions(SimpleNamespace(library="timm")),
            "commit": commit(), "command": " ".join(["python scripts/benchmark.py", *sys.argv[1:]]),
            "settings": cfg.model_dump()}


def start(cfg: BenchmarkSettings) -> Accelerator:
    """Sets threads and joins the ranks; raises ValueError for a GPU or a precision that this machine lacks."""
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    accelerator = speed.make_accelerator(cfg.precision, cfg.grad_accum_steps, cfg.tf32, cfg.device == "cpu")
    if cfg.device == "cuda" and accelerator.device.type != "cuda":
        raise ValueError("device=cuda is asked for, but torch sees no GPU here: set device=cpu.")
    if cfg.precision == "fp8" and cfg.mode == "sample":
        raise ValueError("mode=sample precision=fp8: images are never sampled in float8, so set precision=bf16.")
    if cfg.precision == "fp8":
        speed.check_float8(accelerator.device)
    return accelerator


def finish(cfg: BenchmarkSettings, record: dict) -> dict:
    """Prints the table, and writes the record to <out>.json; returns it."""
    record["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    print(f"{cfg.backbone_type}, {cfg.tokens} tokens, {cfg.precision}, compile {cfg.compile}; {record['ranks']} × "
          f"{record['device']}, torch {record['versions']['torch']}; commit {record['commit']}\n")
    print(table(record["rows"]))
    if products := record.get("matmul FLOP/s"):
        rates = ", ".join(f"{rate / 1e12:.3g} at side {side}" for side, rate in products.items())
        print(f"\nMatrix products, TFLOP/s: {rates}. MFU is the share of the best.")
    if cfg.out:
        out = Path(f"{cfg.out}.json")
        out.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(out, json.dumps(record, indent=1))
        print(f"\n{out}")
    return record


@contextlib.contextmanager
def compiled_code_in(folder: str | None) -> Iterator[None]:
    """Keeps compiled code in a folder, or in an empty one that goes, so that the first step includes compilation."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:
        cache = Path(folder or empty).resolve()
        os.environ.update(TORCHINDUCTOR_CACHE_DIR=f"{cache}/inductor", TRITON_CACHE_DIR=f"{cache}/triton")
        yield


@contextlib.contextmanager
def attention_of(kind: str | None) -> Iterator[None]:
    """Lets torch take one kind of ATTENTION alone, or choose; it raises RuntimeError where it lacks that one."""
    if kind == "flash3":
        torch.nn.attention.activate_flash_attention_impl("FA3")
    with sdpa_kernel(ATTENTION[kind]) if kind else contextlib.nullcontext():
        yield


@command("benchmark", BenchmarkSettings)
def main(cfg: BenchmarkSettings) -> None:
    with compiled_code_in(cfg.compile_cache), attention_of(cfg.attention):
        accelerator = start(cfg)
        record = describe(cfg, accelerator) | MODES[cfg.mode](cfg, accelerator)
        if accelerator.is_main_process:
            finish(cfg, record)
        if failed := [row["variant"] for row in record["rows"] if "failed" in row]:
            raise ValueError(f"Failed: {', '.join(failed)}. The others were timed.")


if __name__ == "__main__":
    main()
