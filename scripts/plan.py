"""What reproducing the paper's table takes: hours of training, sampling and encoding, computed from the networks.

    python scripts/plan.py                                            # derived: FLOPs over an assumed FLOP/s
    python scripts/plan.py --mfu 0.4 --gpus 8
    python scripts/plan.py --measured bench/train_xl2.json bench/train_b2.json      # with what the benchmark measured
    python scripts/plan.py --dense-after 0.85                          # TREAD with an off-ramp; --selection-ratios, too
    python scripts/plan.py --memory                                   # GPU memory in training, by size and batch; FSDP

Derived hours are multiply-adds (two FLOPs each, the backward pass twice the forward one) over `mfu` of the FLOP/s of
a large bf16 matrix product. Both are assumptions until measured. Prints Markdown.
"""

import argparse
import json
import math
import sys
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dit import DiT, DiT_models, multiply_adds
from routing_module import Route, RouteSchedule
from runtime import sharding
from runtime.command import program
from runtime.schema import as_path
from scripts.presentation import table
from training import memory as training_memory

SIZES = ("S", "B", "L", "XL")
ROUTE = Route(2, -4, 0.5)                # configs/model/tread.yaml
STEPS, BATCH = 400_000, 256              # configs/config.yaml
IMAGES = 1_281_167
SAMPLES = 50_000
EVALUATIONS = {"EDM, 40 Heun steps": 79, "flow, 40 Euler steps": 40, "flow, 250 SDE steps": 250}
BYTES_A_PARAMETER = 16                   # of a checkpoint: weights, average, AdamW's two moments, in float32
KEPT = 7                                 # checkpoints: the newest two, those at 100K to 400K, one being written
IMAGES_A_GPU = (32, 256)
OTHERS = ("LightningDiT-XL/1", "Mamba-B/2", "RWKV-L/2")
ROUTES = {"Mamba-B/2": Route(2, 16, 0.5), "RWKV-L/2": Route(2, 14, 0.5)}     # their experiments'
MEMORIES = (80, 48, 24)                  # GB of a GPU
RANKS = (1, 2, 8, 16, 64)
LARGE = {"3B (model.hidden_size=2048 model.depth=40)": dict(hidden_size=2048, depth=40)}  # 16 heads, patch 2
PARTS = 10_000                           # steps as which a schedule of routes is counted
BYTES_A_LATENT = 8 * 32 * 32 * 2         # mean and deviation, float16


def network(size: str, routed: bool) -> DiT:
    with torch.device("meta"):
        return DiT_models[f"DiT-{size}/2"](routes=[ROUTE] if routed else [])


@cache
def forward_flops(size: str, ratio: float) -> int:
    net = network(size, True)
    return 2 * sum(multiply_adds(net, tuple(replace(route, selection_ratio=ratio) for route in net.routes)))


def encoder_flops() -> int:
    """Counts the FLOPs of the Stable Diffusion encoder for an image of 256 × 256."""
    from torch.utils.flop_counter import FlopCounterMode

    from scripts.benchmark import stable_diffusion_autoencoder

    with torch.device("meta"):
        vae = stable_diffusion_autoencoder()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            vae.encoder(torch.empty(1, 3, 256, 256))
    return counter.get_total_flops()


def measured_rates(files: list[Path]) -> dict[tuple[str, float], tuple[float, str]]:
    """Reads images/s a GPU, and the device, by size and selection ratio, from files of benchmark.py mode=train.

    Raises ValueError for a file that has none of patch 2 at 256 tokens.
    """
    rates = {}
    for file in files:
        record = json.loads(file.read_text(encoding="utf-8"))
        size = record.get("settings", {}).get("backbone_type", "")
        rows = {row["variant"]: row for row in record.get("rows", ()) if size.endswith("/2") and row["tokens"] == 256}
        found = {(size.removeprefix("DiT-").removesuffix("/2"), ratio):
                 (rows[variant]["images/s"] / rows[variant]["ranks"], record["device"])
                 for variant, ratio in (("dit", 0.0), ("tread", ROUTE.selection_ratio)) if variant in rows}
        if not found:
            raise ValueError(f"{file} has no time of a DiT of patch 2 at 256 tokens: give the JSON of "
                             f"scripts/benchmark.py mode=train.")
        rates |= found
    return rates


def training(rates: dict, flops_a_second: float, gpus: int, efficiency: float, schedule: RouteSchedule) -> str:
    """Tabulates hours by size; `schedule` has PARTS steps. A rate is measured if each ratio of the schedule was."""
    rows, ratios = [], Counter()
    for (route,), count in schedule.counts(PARTS).items():
        ratios[route.selection_ratio] += count / PARTS
    for size in SIZES:
        for routed in (False, True):
            shares = ratios if routed else {0.0: 1.0}
            costs = {ratio: 3 * forward_flops(size, ratio) for ratio in shares}
            known = {ratio: rates.get((size, ratio)) for ratio in shares}
            device = None if None in known.values() else known[max(known)][1]
            flops = sum(share * costs[ratio] for ratio, share in shares.items())
            rate = 1 / sum(share * (1 / known[ratio][0] if device else costs[ratio] / flops_a_second)
                           for ratio, share in shares.items())
            hours = STEPS * BATCH / rate / 3600
            parameters = sum(p.numel() for p in network(size, routed).parameters())
            rows.append([
                f"{size}/2 {'TREAD' if routed else 'dense'}", f"{parameters / 1e6:.0f}M", f"{flops / 1e9:,.0f}",
                f"{rate:,.0f}", f"{hours:,.1f}", f"{hours / gpus / efficiency:,.1f}",
                f"{KEPT * BYTES_A_PARAMETER * parameters / 1e9:.0f}", f"measured, {device}" if device else "[derived]"])
    return table(["network", "parameters", "GFLOP an image", "images/s a GPU", "hours, 1 GPU", f"hours, {gpus} GPUs",
                  "GB of checkpoints", "from"], rows)


def sampling(flops_a_second: float) -> str:
    rows = [[f"{size}/2", *(f"{SAMPLES * count * forward_flops(size, 0.0) / flops_a_second / 60:,.1f}"
                            for count in EVALUATIONS.values())] for size in SIZES]
    return table([f"{SAMPLES:,} images, minutes on 1 GPU [derived]", *EVALUATIONS], rows)


def build(backbone: str, tokens: int, routed: bool) -> DiT:
    """Builds a named network for square latents of so many tokens, with the route of its experiment or none."""
    patch, others = DiT_models[backbone].keywords["patch_size"], {}
    if patch == 1:
        others["in_channels"] = 32  # VA-VAE's latents
    return DiT_models[backbone](input_size=patch * math.isqrt(tokens), **others,
                                routes=[ROUTES.get(backbone, ROUTE)] if routed else [])


@cache
def bytes_held(backbone: str, tokens: int, routed: bool) -> tuple[int, int]:
    """Counts the bytes that a GPU holds in training without images, and those that each image of a pass adds."""
    return training_memory.bytes_in_training(partial(build, backbone, tokens, routed))


def activations() -> str:
    """Counts a GPU's memory by size, tokens and batch: weights, gradients, Adam, EMA and activations."""
    rows = []
    networks = [(f"DiT-{size}/2", tokens) for tokens in (256, 1024) for size in SIZES]
    for backbone, tokens in networks + [(backbone, 256) for backbone in OTHERS]:
        pair = [bytes_held(backbone, tokens, routed) for routed in (False, True)]
        images = [f"{an_image / 1e6:,.0f}" for _, an_image in pair]
        full = [[f"{(fixed + batch * an_image) / 1e9:,.0f}" for fixed, an_image in pair] for batch in IMAGES_A_GPU]
        parts = [[f"{BATCH // max(1, training_memory.images_that_fit(*each, memory * 1e9, BATCH))}" for each in pair]
                 for memory in MEMORIES]  # each network is small enough that one image fits
        rows.append([backbone.removeprefix("DiT-"), f"{tokens:,}", f"{pair[0][0] / 1e9:.1f}",
                     *map(", ".join, [images, *full, *parts])])
    return table(["dense, TREAD [derived]", "tokens", "GB without images", "MB an image",
                  f"GB, {IMAGES_A_GPU[0]} images", f"GB, {IMAGES_A_GPU[1]}",
                  *(f"{memory} GB" for memory in MEMORIES)], rows)


def memory() -> str:
    """Counts weights, gradients, Adam and EMA, and in bf16 the largest block, two of which are gathered at a time."""
    with torch.device("meta"):
        nets = {f"{name}/2": DiT_models[f"DiT-{name}/2"]() for name in ("B", "XL")}
        nets |= {name: DiT(**keywords) for name, keywords in LARGE.items()}
    rows = []
    for name, net in nets.items():
        held = [sharding.bytes_a_rank(net, world) for world in RANKS] + [2 * sharding.size(net.blocks[0])]
        rows.append([name, f"{sharding.size(net) / 1e6:,.0f}M", *(f"{count / 1e9:.2f}" for count in held)])
    ranks = [f"{RANKS[0]} rank, or DDP", *(f"{world} ranks" for world in RANKS[1:])]
    return table(["GB a rank [derived]", "parameters", *ranks, "a block, gathered"], rows)


@program
def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mfu", type=float, default=0.3, help="share of --peak that a step reaches (0.3: assumed)")
    parser.add_argument("--peak", type=float, default=800, help="TFLOP/s of a bf16 matrix product (800: an H100)")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--efficiency", type=float, default=0.95, help="of several GPUs over one (0.95: assumed)")
    parser.add_argument("--measured", type=as_path, nargs="*", default=[],
                        help="JSON of scripts/benchmark.py mode=train")
    parser.add_argument("--memory", action="store_true", help="GPU memory in training instead of hours")
    parser.add_argument("--dense-after", type=float, help="share of the steps after which TREAD is dense")
    parser.add_argument("--selection-ratios", type=float, nargs="+", default=[], help="a step samples one of these")
    given = parser.parse_args()
    if given.memory:
        print(memory() + "\n\n" + activations())
        return
    in_range = given.dense_after is None or 0 < given.dense_after < 1
    if not (in_range and all(0 <= ratio < 1 for ratio in given.selection_ratios)):
        raise ValueError("--dense-after lies between 0 and 1, and --selection-ratios in [0, 1).")
    for name in ("mfu", "peak", "gpus", "efficiency"):
        if not 0 < getattr(given, name) < math.inf:
            raise ValueError(f"--{name} {getattr(given, name)} is not a number above 0.")
    schedule = RouteSchedule((ROUTE,), dense_after=given.dense_after and math.ceil(given.dense_after * PARTS),
                             selection_ratios=tuple(given.selection_ratios))
    flops_a_second = given.mfu * given.peak * 1e12
    rates = measured_rates(given.measured)
    print(f"{STEPS:,} steps of {BATCH}; [derived] from FLOPs, ignores launch overhead, at {given.mfu:g} of "
          f"{given.peak:g} TFLOP/s, {given.gpus} GPUs at {given.efficiency:g} of {given.gpus} times one.\n")
    print(training(rates, flops_a_second, given.gpus, given.efficiency, schedule) + "\n")
    print(sampling(flops_a_second) + "\n")
    hours = 2 * IMAGES * encoder_flops() / flops_a_second / 3600
    print(f"Latents of {IMAGES:,} images and their mirror images: {2 * IMAGES * BYTES_A_LATENT / 1e9:.0f} GB, "
          f"{hours:.1f} hours of encoding on 1 GPU [derived].")


if __name__ == "__main__":
    main()
