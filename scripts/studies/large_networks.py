"""What DTensors cost a step under FSDP, and how long a large checkpoint takes to save, beside `dd`.

    python scripts/studies/large_networks.py --rounds 9 --gigabytes 4 --folder /mnt/runs --out large.json

Takes norm, clipping, AdamW's step and the EMA of a network with as many tensors as DiT-XL/2, plain and sharded in
turns, in milliseconds of the host's thread: tensors are small, so that time is dispatch. torchrun starts it on several
ranks. Then it saves checkpoints of so many gigabytes, in turns with `dd conv=fsync` of as many bytes; --gigabytes 0
saves none.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from dit import DiT
from runtime import sharding
from runtime.command import commit, program
from runtime.device import device_name
from runtime.schema import as_path
from train import update_ema
from training import speed
from training.optimizers import build_optimizer, step_unless
from weights import checkpoint as checkpoints

XL = dict(input_size=8, hidden_size=32, depth=28, num_heads=2)  # as deep as XL/2: 291 tensors are trained


def works_of(accelerator: Accelerator, sharded: bool) -> dict[str, partial]:
    """Builds a network with gradients, its average and AdamW; returns what a step does with them, by name."""
    device = accelerator.device
    torch.manual_seed(0)
    nets = [DiT(**XL) for _ in range(2)]
    if sharded:
        nets = [sharding.shard(net, device, torch.float32) for net in nets]
    net, ema = (each.to(device) for each in nets)
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    for p in trained.values():
        p.grad = torch.full_like(p, 1e-3)
    gradients, scale = [p.grad for p in trained.values()], torch.ones((), device=device)
    optimizer = build_optimizer(trained, "adamw", lr=1e-4, weight_decay=0.0)
    return {
        "norm": partial(sharding.total_norm, accelerator, gradients),
        "clip": lambda: torch._foreach_mul_(sharding.local_tensors(gradients), scale),
        "AdamW": partial(step_unless, torch.zeros((), dtype=torch.bool, device=device), optimizer),
        "EMA": partial(update_ema, ema, net, 0.9999),
    }


def host_milliseconds(work: partial) -> float:
    began = time.thread_time()
    work()
    return 1000 * (time.thread_time() - began)


def time_steps(accelerator: Accelerator, rounds: int) -> dict[str, dict[str, float]]:
    """Returns the median milliseconds of each work, plain and sharded, and the median of their ratios in a round."""
    plain, sharded = (works_of(accelerator, kind) for kind in (False, True))
    rows = {}
    for name in plain:
        pairs = [[host_milliseconds(works[name]) for works in (plain, sharded)] for _ in range(rounds + 2)][2:]
        rows[name] = {"plain ms": median(one for one, _ in pairs), "sharded ms": median(two for _, two in pairs),
                      "ratio": median(two / one for one, two in pairs)}
    return rows


def time_saves(folder: Path, gigabytes: float, rounds: int) -> list[dict[str, float]]:
    """Saves weights, average and AdamW's moments of `gigabytes` in turns with dd; returns the seconds of each round."""
    matrix, count = torch.randn(2**11, 2**11), max(1, round(gigabytes * 1e9 / (4 * 2**24)))  # of 17 MB
    weights = {f"{i:04d}": matrix for i in range(count)}
    moments = {f"{name}.{moment}": matrix for name in weights for moment in ("exp_avg", "exp_avg_sq")}
    tensors, taken = {"ema": weights, "model": weights, "training": moments}, []
    megabytes = 4 * count * 2**24 // 2**20
    for number in range(rounds):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            os.sync()
            began = time.perf_counter()
            subprocess.run(["dd", "if=/dev/zero", f"of={place}/dd", "bs=1M", f"count={megabytes}", "conv=fsync"],
                           check=True, stderr=subprocess.DEVNULL)
            by_dd = time.perf_counter() - began
            Path(place, "dd").unlink()
            os.sync()
            began = time.perf_counter()
            checkpoints.save(checkpoints.step_folder(Path(place), number), tensors, {"step": number})
            taken.append({"bytes": megabytes * 2**20, "dd s": by_dd, "save s": time.perf_counter() - began})
            taken[-1]["ratio"] = taken[-1]["save s"] / by_dd
    return taken


@program
def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--folder", type=as_path, default=Path("."))
    parser.add_argument("--out", type=as_path, required=True)
    given = parser.parse_args()
    accelerator = speed.make_accelerator("fp32", 1, True)
    device = accelerator.device
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
    record = {"command": f"python scripts/studies/large_networks.py {' '.join(sys.argv[1:])}", "commit": commit(),
              "device": device_name(device), "ranks": torch.distributed.get_world_size(), "torch": torch.__version__,
              "a step": time_steps(accelerator, given.rounds), "saves": []}
    for name, row in record["a step"].items():
        accelerator.print(name, *(f"{key} {value:.3g}" for key, value in row.items()), sep="  ")
    if accelerator.is_main_process:
        record["saves"] = time_saves(given.folder, given.gigabytes, given.saves) if given.gigabytes else []
        for row in record["saves"]:
            print(f"{row['bytes'] / 1e9:.3g} GB: dd {row['dd s']:.1f} s, save {row['save s']:.1f} s, "
                  f"{row['ratio']:.2f} times as long")
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
