"""Times training, sampling, data and scoring on this machine, and the matrix products that bound them.

Variants take turns. The table has the medians over rounds; ratios compare variants within a round. Prints a table and
writes <out>.json and <out>.png. Commands and options: configs/benchmark.yaml, docs/performance.md.
"""

import contextlib
import copy
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch._dynamo.utils import counters

PROGRAM = str(Path(__file__).resolve())
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from dit import DiT, multiply_adds
from latents.folder import Latents, open_latents
from latents.loader import batches, check_batch_size, to_latent
from objectives import DiffusionLoss
from runtime import files
from runtime.command import command, commit, compose
from runtime.device import DTYPES, device_name, multiplies_in_tf32
from runtime.schema import (
    Classes,
    Count,
    Location,
    NonEmptyList,
    NonNegativeInt,
    Positive,
    Size,
    Steps,
    Tokens,
    name_of_changes,
    one_of,
)
from sampling import generate
from sampling.options import GuidanceSettings, build_guidance
from scoring import metrics
from scoring.features import Features, extract, load_extractor, versions
from scripts import presentation
from scripts.clocks import Mark, marked, seconds, seconds_of_parts, take_turns, wait
from training import speed
from training.cuda_graphs import record_passes
from training.run import Sums, describe_network
from training.settings import ModelSettings
from weights import autoencoders
from weights.records import RouteSettings, build_diffusion, build_network

Batches = Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]


class BenchmarkSettings(GuidanceSettings, ModelSettings):
    """configs/benchmark.yaml; `routes` are those of the network and of guidance."""

    mode: one_of(["train", "sample", "data", "score", "scaling"])
    out: Location | None
    device: one_of(["cpu", "cuda"]) | None
    threads: Count | None
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
    variants: NonEmptyList[one_of(["dit", "tread", "dit-eager", "tread-eager"])]
    rounds: Count
    steps: Count
    warmup: NonNegativeInt
    data_path: Location | None
    num_latents: Count
    pause: Positive
    num_steps: Steps
    autoencoder: Location
    decode_precision: one_of(DTYPES)
    features: Features
    features_weights: Location | None
    image_size: Size
    feature_size: Size
    images: Count
    reference_images: Count
    token_counts: list[Tokens]
    ranks: list[Count]


# ---- what is timed --------------------------------------------------------------------------------------------------


def network_of(model: ModelSettings, tokens: int, channels: int = 4, num_classes: int = 1000) -> dict:
    """Gathers a network's keywords, for a latent of so many tokens."""
    network = describe_network(model, (channels, 0, 0), num_classes)
    return {**network, "input_size": math.isqrt(tokens) * network["patch_size"]}


def make_network(cfg: BenchmarkSettings, variant: str, device: torch.device | str) -> DiT:
    model = ModelSettings.model_construct(**{name: getattr(cfg, name) for name in ModelSettings.model_fields})
    network = network_of(model, cfg.tokens, cfg.in_channels, cfg.num_classes)
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
        device = accelerator.device
        others = torch.cuda.memory_allocated()  # 0 on a CPU
        self.name, self.accelerator, self.loader, self.kind = name, accelerator, loader, kind
        self.num_parts = cfg.grad_accum_steps
        self.step, self.resident, self.peak, self.graphs = 0, 0, 0.0, 0
        torch.manual_seed(0)
        self.model = make_network(cfg, name, device)
        self.ema = copy.deepcopy(self.model).eval()
        if cfg.precision == "fp8":
            speed.multiply_in_float8(self.model)
        self.sums, self.objective = Sums(device), DiffusionLoss(self.model, build_diffusion(cfg.diffusion))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        if cfg.activation_checkpointing:
            speed.recompute_activations(self.model)
        how = not name.endswith("-eager") and cfg.compile
        speed.compile_blocks(self.model, how)
        recorded = record_passes(self.objective, how, device, self.num_parts)
        self.called, self.optimizer = speed.replicate(accelerator, recorded), accelerator.prepare(optimizer)

        self.first_step = sum(self.measure(1).values())
        self.resident = torch.cuda.memory_allocated() - others
        self.measure(cfg.warmup)

    def take_steps(self, count: int, mark: Mark) -> None:
        """Takes steps as train.py's loop does, with a mark at the end of each part."""
        with (marked(mark, self.called, "forward", "forward"),
              marked(mark, self.accelerator, "backward", "backward")):
            for _ in range(count):
                torch.manual_seed(train.step_seed(0, self.step, self.accelerator.process_index))
                stored, y, arrays = send_to_device(next(self.loader), self.accelerator.device, non_blocking=True)
                mark("data wait")
                measured = train.train_step(
                    self.accelerator, self.called, self.objective, self.optimizer, to_latent(stored, self.kind), y,
                    arrays, label_dropout=0.1, clip_norm=None,
                    num_parts=self.num_parts,
                )
                mark("optimizer")  # with the gradient's norm
                train.update_ema(self.ema, self.model, 0.9999)
                mark("EMA")
                self.sums.add(*measured)
                mark("sums")
                self.step += 1

    def measure(self, count: int) -> dict[str, float]:
        """Returns the seconds of a step's parts; keeps its peak of memory and counts the graphs that were compiled."""
        device, graphs = self.accelerator.device, counters["stats"]["unique_graphs"]
        self.accelerator.wait_for_everyone()
        others = torch.cuda.memory_allocated() - self.resident
        parts = seconds_of_parts(device, partial(self.take_steps, count), count)
        self.graphs += counters["stats"]["unique_graphs"] - graphs
        self.peak = train.peak_memory_gib(device) - others / 2**30
        return parts


def steps_in_turn(cfg: BenchmarkSettings, accelerator: Accelerator, make: Callable[[Batches, str], list]) -> tuple:
    """Makes variants on the data of one loader; returns them, and what `take_turns` returns of their steps."""
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
    variants, took, parts, products = steps_in_turn(cfg, accelerator, lambda *data: [
        Variant(cfg, accelerator, name, *data) for name in cfg.variants])
    ratios = {f"{a} over {b}": median(slow / fast for slow, fast in zip(took[b], took[a], strict=True))
              for a, b in itertools.permutations(took, 2)}
    rows, world = [], accelerator.num_processes
    for variant in variants:
        name, per_step, dense = variant.name, median(took[variant.name]), variant.name.replace("tread", "dit")
        flops = 6 * sum(counts[name])  # 2 a multiply-add, and the backward pass takes twice the forward one
        rate = flops * cfg.batch_size / world / per_step
        rows.append({
            "variant": name, "batch": cfg.batch_size, "tokens": cfg.tokens, "ranks": world,
            "images/s": cfg.batch_size / per_step, "s/step": per_step, "parts": parts[name],
            "GFLOP/image": flops / 1e9, "TFLOP/s a rank": rate / 1e12, "MFU": rate / max(products.values()),
            "over dense": ratios.get(f"{name} over {dense}", 1.0 if name == dense else None),
            "FLOP ratio": sum(counts["dit"]) / sum(counts[name]), "peak GiB": variant.peak,
            "first step s": None if is_warm else variant.first_step, "graphs": variant.graphs,
            "rounds s/step": took[name],
            "multiply-adds": dict(zip(("linear", "attention"), counts[name], strict=True)),
        })
    return {"rows": rows, "ratios": ratios, "matmul FLOP/s": products}


def stable_diffusion_autoencoder(widths: tuple[int, ...] = (128, 256, 512, 512)) -> nn.Module:
    """Builds the network of Stable Diffusion's autoencoder with random weights, which are as fast as trained ones."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=widths, layers_per_block=2, latent_channels=4, sample_size=256,
        down_block_types=len(widths) * ["DownEncoderBlock2D"], up_block_types=len(widths) * ["UpDecoderBlock2D"],
    )


def time_sample(cfg: BenchmarkSettings, accelerator: Accelerator) -> dict:
    """Times sampling and decoding one batch per rank; the unguided pass is dense, so tread counts as dit.

    The network's part includes the diffusion's scalings. Guidance by selection ratios uses the network's route.
    """
    device, seeds = accelerator.device, list(range(cfg.batch_size * accelerator.num_processes))
    labels = [seed % cfg.num_classes for seed in seeds]
    diffusion, dtype = build_diffusion(cfg.diffusion), DTYPES[cfg.decode_precision]
    estimate = "denoise" if hasattr(diffusion, "denoise") else "velocity"
    if cfg.autoencoder == "untrained":
        with device:
            vae = stable_diffusion_autoencoder()
        decoder = autoencoders.DiffusersAutoencoder("untrained", vae.to(dtype), device)
    else:
        decoder = autoencoders.load_autoencoder(cfg.autoencoder, device, dtype)
    net = make_network(cfg, "tread", device).eval()
    trained = SimpleNamespace(net=net, diffusion=diffusion, recorded={"diffusion": cfg.diffusion})
    guidance, _ = build_guidance(cfg.model_copy(update={"routes": None}), trained, device)
    flops = 2 * sum(generate.sampling_cost(net, diffusion, cfg.num_steps, guidance)[1:])
    nets, first, peak = {}, {}, {}

    def draw(name: str, mark: Mark) -> None:
        with (marked(mark, diffusion, estimate, after="network", before="sampler"),
              marked(mark, decoder, "decode", after="decode", before="sampler")):
            for _ in generate.generate(accelerator, nets[name], diffusion, decoder.decode, seeds, labels,
                                       guidance=guidance, batch_size=cfg.batch_size, num_steps=cfg.num_steps,
                                       precision=cfg.precision):
                pass
        mark("sampler")

    def measure(name: str) -> dict[str, float]:
        parts = seconds_of_parts(device, partial(draw, name))
        peak[name] = train.peak_memory_gib(device)
        return parts

    for name in dict.fromkeys(name.replace("tread", "dit") for name in cfg.variants):
        nets[name] = copy.deepcopy(net)
        speed.compile_blocks(nets[name], not name.endswith("-eager") and cfg.compile)
        first[name] = sum(measure(name).values())
    works = {name: partial(measure, name) for name in nets}
    rounds, parts, products = take_turns(cfg.rounds, device, cfg.precision, works)
    return {"matmul FLOP/s": products, "rows": [{
        "variant": name, "batch": cfg.batch_size, "tokens": cfg.tokens, "ranks": accelerator.num_processes,
        "images/s": len(seeds) / median(rounds[name]), "s/batch": median(rounds[name]), "parts": parts[name],
        "GFLOP/image": flops / 1e9, "share in network": parts[name]["network"] / sum(parts[name].values()),
        "MFU in network": flops * cfg.batch_size / parts[name]["network"] / max(products.values()),
        "first batch s": first[name], "peak GiB": peak[name], "rounds s/batch": rounds[name],
    } for name in nets]}


def time_data(cfg: BenchmarkSettings, accelerator: Accelerator) -> dict:
    """Times latents.loader.batches from the page cache: at once, with pauses as long as a step, and on the device."""
    device, rows = accelerator.device, []
    with latents_of(cfg, make_network(cfg, "dit", "meta")) as latents:
        epoch = latents.count // cfg.batch_size
        for name, pause, home in (("at once", 0, None), ("with pauses", cfg.pause, None), ("on the device", 0, device)):
            waits, rates, count = [], [], cfg.steps if pause else max(epoch, cfg.steps)
            loader = batches(latents, cfg.batch_size, seed=0, pin=device.type == "cuda", device=home)
            for _ in range(epoch):  # brings all of it into the page cache
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
    extractor = load_extractor(cfg.features, cfg.features_weights, device=device)
    images = torch.randint(0, 256, (cfg.batch_size, cfg.image_size, cfg.image_size, 3), dtype=torch.uint8).to(device)
    # Variances over six orders, as of Inception's features. The distance of two Gaussians is computed on the CPU.
    scale, gaussians = torch.logspace(0, -3, cfg.feature_size, dtype=torch.float64), []
    for shift in (0, 0.01):
        moments = metrics.Moments(cfg.feature_size)
        moments.add(torch.randn(max(2, cfg.reference_images), cfg.feature_size) * scale + shift)
        gaussians.extend(moments.mean_and_covariance())
    reference, others = (torch.rand(count, cfg.feature_size, device=device)
                         for count in (cfg.reference_images, cfg.images))
    works = {
        f"features {cfg.features}": lambda: list(extract(extractor, [(torch.arange(len(images)), images)])),
        "Fréchet distance": lambda: metrics.frechet_distance(*gaussians),
        "precision and recall": lambda: metrics.precision_recall(reference, others),
    }
    for name, work in works.items():
        if name == "precision and recall":  # which takes long
            took = seconds(device, work)
        else:
            work()
            took = median(seconds(device, work) for _ in range(cfg.rounds))
        rows.append({"variant": name, "parts": {"one run": took}, "peak GiB": train.peak_memory_gib(device)})
    rows[0]["features/s"] = cfg.batch_size / rows[0]["parts"]["one run"]
    return {"rows": rows}


def run_apart(line: list[str], **environment: str) -> dict:
    """Runs this program in a process of its own; returns its record. Raises ValueError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run([*line, f"out={folder}/apart"], env=os.environ | environment, capture_output=True,
                               text=True, check=False)
        if ended.returncode:
            sentences = [line for line in ended.stderr.splitlines() if line.startswith("benchmark.py: ")]
            raise ValueError(f"The timing failed: {(sentences or [ended.stderr[-1500:]])[0]}")
        return json.loads(Path(folder, "apart.json").read_text())


def time_scaling(cfg: BenchmarkSettings, accelerator: Accelerator) -> dict:
    """Trains at several numbers of tokens here, and on several numbers of ranks in other processes."""
    rows, alone = [], {}
    for tokens in cfg.token_counts:
        scaled = cfg.model_copy(update={"tokens": tokens, "batch_size": max(1, cfg.batch_size * 256 // tokens)})
        rows += [{**row, "scales": "tokens"} for row in time_train(scaled, accelerator)["rows"]]
        accelerator.free_memory()      # which holds all that it prepared
        torch._dynamo.reset()          # it compiles one function for at most eight networks
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


def table(rows: list[dict]) -> str:
    """Returns rows in Markdown, with a column of each number and of each part; the JSON has the rounds too."""
    flat = [{name: value for name, value in row.items() if not isinstance(value, list | dict)}
            | {f"{part} s": value for part, value in row["parts"].items()} for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))

    def cell(value: object) -> str:
        if value is None:
            return "not measured"
        return (f"{value:,.0f}" if value >= 1000 else f"{value:.3g}") if isinstance(value, float) else str(value)

    return presentation.table(names, [[cell(row.get(name, "")) for name in names] for row in flat])


def plot(record: dict, path: Path) -> None:
    """Draws the seconds of each row's parts as bars."""
    rows, settings = record["rows"], record["settings"]
    labels = [", ".join([row["variant"], *(f"{row[key]} {key}" for key in ("tokens", "ranks") if key in row)])
              for row in rows]
    figure = Figure(figsize=(10, 2 + 0.5 * len(rows)), layout="constrained")
    axes, left = figure.subplots(), np.zeros(len(rows))
    for part in dict.fromkeys(part for row in rows for part in row["parts"]):
        width = [row["parts"].get(part, 0) for row in rows]
        axes.barh(range(len(rows)), width, left=left, label=part)
        left += width
    axes.set(xlabel="s", yticks=range(len(rows)), yticklabels=labels)
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=6)
    figure.suptitle(f"{record['mode']}: {settings['backbone_type']}, {settings['precision']}, {record['device']}")
    presentation.save_figure(figure, path)


def describe(cfg: BenchmarkSettings, accelerator: Accelerator) -> dict:
    """Gathers what the numbers depend on: device, versions, commit, command and settings."""
    return {"mode": cfg.mode, "device": device_name(accelerator.device),
            "tf32": multiplies_in_tf32(accelerator.device), "ranks": accelerator.num_processes,
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
    speed.check_compiler(cfg.compile, accelerator.device)
    if cfg.precision == "fp8":
        speed.check_float8(accelerator.device)
    return accelerator


def write(record: dict, out: Path) -> None:
    record["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    files.write_text(out.with_name(f"{out.name}.json"), json.dumps(record, indent=1))


def default_out(cfg: BenchmarkSettings) -> str:
    """Names the files of a measurement by what differs from the defaults, so that none replaces another's."""
    usual = compose("benchmark", BenchmarkSettings, [])
    return f"bench/{cfg.mode}{name_of_changes(cfg.model_dump(mode='json', exclude={'mode', 'out'}), usual)}"


def run(cfg: BenchmarkSettings) -> dict:
    """Runs one mode; the main rank prints the table and writes the files. Returns the record that is in the JSON."""
    accelerator, out = start(cfg), Path(cfg.out or default_out(cfg))
    out.parent.mkdir(parents=True, exist_ok=True)  # refuses now what writing would refuse
    record = describe(cfg, accelerator) | MODES[cfg.mode](cfg, accelerator)
    if accelerator.is_main_process:
        write(record, out)
        plot(record, out.with_name(f"{out.name}.png"))
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        print(f"{cfg.mode}: {cfg.backbone_type}, {cfg.tokens} tokens, {cfg.precision}, compile {cfg.compile}; "
              f"{record['ranks']} × {record['device']}; {versions}; commit {record['commit']}\n")
        print(table(record["rows"]))
        if products := record.get("matmul FLOP/s"):
            rates = ", ".join(f"{rate / 1e12:.3g} at side {side}" for side, rate in products.items())
            print(f"\nMatrix products in {cfg.precision}, TFLOP/s: {rates}. MFU is the share of the best.")
        print(f"\n{out}.json, {out}.png")
    return record


@command("benchmark", BenchmarkSettings)
def main(cfg: BenchmarkSettings) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:  # so that compiling is timed too
        cache = Path(cfg.compile_cache or empty).resolve()
        os.environ.update(TORCHINDUCTOR_CACHE_DIR=f"{cache}/inductor", TRITON_CACHE_DIR=f"{cache}/triton")
        run(cfg)


if __name__ == "__main__":
    main()
