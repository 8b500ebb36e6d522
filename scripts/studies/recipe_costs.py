"""What each recipe of docs/recipes.md adds to a training step: multiply-adds, and seconds measured on this machine.

    python scripts/studies/recipe_costs.py --backbone DiT-B/2 --batch 2 --rounds 5 --out recipes.json

Each recipe takes turns with TREAD's own step; a ratio is the median of those within a round. The network gets
random latents and teacher tokens of DINOv2-B's width, in float32. Multiply-adds are the forward pass's, of
network, projector and head; an optimizer's are not counted. --rounds 0 times nothing. "an average" is
one `train.update_ema`, which each average of the weights adds to a step.
"""

import argparse
import copy
import json
import sys
from functools import partial
from pathlib import Path
from statistics import median

import torch
from accelerate import Accelerator
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from objectives import DiffusionLoss, Objective, build_objective, class_of, trained_parameters
from runtime.command import commit, program
from runtime.device import device_name
from runtime.schema import as_path, read
from runtime.typed import compose
from scripts.clocks import seconds
from train import train_step, update_ema
from training import speed
from training.optimizers import build_optimizer
from training.run import describe_network
from training.settings import TrainSettings
from weights.records import build_diffusion, build_network

LATENT, TEACHER, CLASSES = (4, 32, 32), (256, 768), 1000
ROUTE = "model.routes=[{{selection_ratio: 0.5, start_layer_idx: {}, end_layer_idx: {}, return_from: {}}}]"
RECIPES = {
    "dense": ["model=dit"],
    "alignment": ["objective=alignment"],
    "iREPA": ["model=dit", "objective=alignment", "objective.alignment.projector=conv",
              "objective.alignment.normalise=0.6"],
    "delayed": [ROUTE.format(4, 8, 2)],
    "Sprint": ["model=sprint"],
    "contrastive": ["diffusion.contrastive_weight=0.05"],
    "shift": ["diffusion.shift=2"],
    "clean": ["diffusion=rf_clean"],
    "internal": ["objective=internal"],
    "LayerSync": ["objective=layer_sync"],
    "dispersive": ["objective=dispersive", "objective.dispersive.pooled=true"],
    "version 1": ["model=tread_v1", "diffusion=edm", "objective=version1"],
    "Muon": ["optimizer=muon"],
}


def settings(backbone: str, overrides: list[str]) -> TrainSettings:
    plain = compose("config", TrainSettings, [
        "model=tread", "diffusion=rf_uniform", *overrides, f"model.backbone_type={backbone}"])
    return read(TrainSettings, plain)


def make_objective(cfg: TrainSettings, device: str) -> Objective | DiffusionLoss:
    """Builds the network and what is minimised, as a run does, on `device`."""
    network = describe_network(cfg.model, LATENT, CLASSES)
    for name, keywords in cfg.objective.items():
        network |= class_of(name).network_keywords(network["depth"], **keywords)
    with torch.device(device):
        diffusion = build_diffusion(dict(cfg.diffusion))
        return build_objective(build_network(network), diffusion, cfg.objective, False, {"teacher": TEACHER})


def inputs(objective: Objective | DiffusionLoss, batch: int, device: str) -> tuple:
    arrays = {"teacher": torch.randn(batch, *TEACHER, device=device)} if "teacher" in objective.arrays else {}
    return torch.randn(batch, *LATENT, device=device), torch.zeros(batch, dtype=torch.long, device=device), arrays


def count(cfg: TrainSettings) -> int:
    """Counts the multiply-adds of the forward pass of one image."""
    objective = make_objective(cfg, "meta")
    x, y, arrays = inputs(objective, 2, "meta")  # a contrast needs two
    with FlopCounterMode(display=False) as counter:
        objective(x, y, **arrays)
    return counter.get_total_flops() // 4


def make_step(cfg: TrainSettings, accelerator: Accelerator, batch: int) -> partial:
    objective = make_objective(cfg, "cpu").to(accelerator.device)
    optimizer = build_optimizer(trained_parameters(objective), **cfg.optimizer.model_dump(
        exclude={"warmup_steps", "schedule", "clip_norm"}))
    called, optimizer = accelerator.prepare(objective, optimizer)
    given = inputs(objective, batch, accelerator.device)
    return partial(train_step, accelerator, called, objective, optimizer, *given, label_dropout=0.1, clip_norm=None,
                   num_parts=1)


@program
def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backbone", default="DiT-B/2")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recipes", nargs="+", default=[*RECIPES], choices=[*RECIPES])
    parser.add_argument("--out", type=as_path, required=True)
    given = parser.parse_args()
    accelerator = speed.make_accelerator("fp32", 1, True)
    plain = settings(given.backbone, [])
    record = {"command": f"python scripts/studies/recipe_costs.py {' '.join(sys.argv[1:])}", "commit": commit(),
              "device": device_name(accelerator.device), "threads": torch.get_num_threads(),
              "torch": torch.__version__, "tread multiply-adds": count(plain), "rows": {}}
    if given.rounds:
        objective = make_objective(plain, "cpu").to(accelerator.device)
        step = make_step(plain, accelerator, given.batch)
        update = partial(update_ema, copy.deepcopy(objective.net), objective.net, 0.9999)
        rounds = [[seconds(accelerator.device, each) for each in (step, update)] for _ in range(given.rounds + 1)][1:]
        record["an average"] = {"rounds s": rounds, "bytes": 4 * sum(p.numel() for p in objective.net.parameters())}
        whole, one = (median(times) for times in zip(*rounds, strict=True))
        print(f"an average: {one:.4f} s of a step of {whole:.4f} s, {record['an average']['bytes'] / 1e9:.3g} GB",
              flush=True)
    for name in given.recipes:
        cfg, rounds = settings(given.backbone, RECIPES[name]), []
        row = record["rows"][name] = {"overrides": RECIPES[name], "multiply-adds": count(cfg)}
        row["FLOP ratio"] = row["multiply-adds"] / record["tread multiply-adds"]
        if given.rounds:
            steps = [make_step(each, accelerator, given.batch) for each in (plain, cfg)]
            rounds = [[seconds(accelerator.device, step) for step in steps] for _ in range(given.rounds + 1)][1:]
            row |= {"step ratio": median(new / old for old, new in rounds), "rounds s/step": rounds}
            del steps
            accelerator.free_memory()
        print(name, f"FLOPs {row['FLOP ratio']:.3f}", f"step {row['step ratio']:.3f}" if rounds else "", flush=True)
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
