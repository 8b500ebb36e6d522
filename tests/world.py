"""A folder of runs, latents, images and weights, all small, as users have them; and the commands that work in it."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from conftest import command_of, run_command
from PIL import Image
from safetensors.torch import load_file

from weights import checkpoints

EMA, STEP = "checkpoints/step-00000004/ema.safetensors", "checkpoints/step-00000004"
NETWORK = ["model.backbone_type=DiT-S/4", "model.hidden_size=8", "model.depth=7", "model.num_heads=2"]
WORKING = {  # settings with which each command works
    "train": ["data=folder", "data.path=latents", "run_dir=new", "steps=1", "batch_size=null", "samples.every=0",
              "precision=fp32", "compile=false", "cpu=true", "log.trackers=[]", "evaluate.every=0",
              "evaluate.features=pixels", *NETWORK],
    "sample": ["checkpoint=run", "out=new.png", "num_steps=1", "seeds=0-1", "cpu=true"],
    "rf": ["checkpoint=flow", "out=new.png", "num_steps=1", "cpu=true"],
    "fid": ["reference=images.npz", "features=pixels", "results=new.jsonl", "num_samples=4", "cpu=true"],
    "prepare_latents": ["source=pets", "out=new", "resolution=8", "autoencoder=identity", "num_workers=1"],
    "import_latents": ["source=pairs", "format=fastdit", "out=new"],
    "import_weights": ["source=weights.pt", "format=tread", "out=new", "num_heads=2", "autoencoder=identity"],
    "benchmark": ["out=new", "cpu=true"],
}


def make(place: Path) -> Path:
    """Fills a folder with all that the commands read; returns it."""
    run(place, "prepare_latents", ["source=shapes", "shapes.count=12", "out=latents"])
    run(place, "train", ["run_dir=run", "steps=4"])
    run(place, "sample", ["seeds=0-3", "num_steps=2", "out=images.npz"])
    shutil.copytree(place / "run", place / "flow")
    meta = checkpoints.read_meta(place / "flow" / STEP)
    checkpoints.write_meta(place / "flow" / STEP, meta | {"diffusion": {"name": "rf"}})
    torch.save({"ema": load_file(place / "run" / EMA)}, place / "weights.pt")

    for file in (*(f"four/{i}.png" for i in range(4)), "mixed/0.png", "pets/ant/0.png", "pets/bee/1.png"):
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(place / file)
    Image.new("RGB", (9, 8)).save(place / "mixed/1.png")
    for part, row in (("features", np.resize(np.float32([1, -1]), (1, 4, 8, 8))), ("labels", np.zeros(1, np.int64))):
        (place / f"pairs/imagenet256_{part}").mkdir(parents=True)
        for i in range(4):  # as fast-DiT stores latents
            np.save(place / f"pairs/imagenet256_{part}/{i}.npy", row if part == "features" else row + i)
    return place


def seen(place: Path) -> dict[Path, tuple]:
    """Sizes and times of all that a command is not to change: new, new-latents and the like are its own."""
    kept = [path for top in place.iterdir() if not top.name.startswith("new") for path in (top, *top.rglob("*"))]
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in kept}


def entry_of(command: str) -> Callable[[], None]:
    """Imports a command and returns its entry."""
    return command_of({"train": "config"}.get(command, command))[0]


def run(place: Path, command: str, typed: list[str]) -> None:
    """Runs a command in the folder with settings that work and what is typed over them."""
    keys = {setting.partition("=")[0] for setting in typed}
    others = [setting for setting in WORKING[command] if setting.partition("=")[0] not in keys]
    with contextlib.chdir(place):
        run_command(entry_of(command), f"{command}.py", *others, *typed)
