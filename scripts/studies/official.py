"""The official TREAD code's training step, for `benchmark.py official=<a checkout of CompVis/tread at fccf77c>`.

Their source is no part of this project. As published its step cannot run on one GPU, so two things are changed from
outside: `model.module` is the network itself, as without DDP, and two modules that only its sampling needs
(`utils.edm_helper`, which imports DeepSpeed, and `autoencoder`) are empty. Network, routes, loss, EMA and the order of
calls are theirs.
"""

import copy
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from dit import DiT

MODULES = ("dit", "edm", "utils.train_helper")


def open_official(path: Path) -> list[ModuleType]:
    """Imports the official MODULES, of which several have names of ours; raises ValueError where `path` lacks them."""
    if missing := [name for name in MODULES if not (path / f"{name.replace('.', '/')}.py").is_file()]:
        raise ValueError(f"official={path} lacks {', '.join(missing)}: check out github.com/CompVis/tread at fccf77c.")
    empty = {name: ModuleType(name) for name in ("utils.edm_helper", "autoencoder")}
    vars(empty["autoencoder"])["SDVAE_EMA"] = None
    names = (*MODULES, "routing_module", "utils", *empty)
    ours = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(path.resolve()))
    sys.modules.update(empty)
    try:
        return [importlib.import_module(name) for name in MODULES]
    finally:
        del sys.path[0]
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(ours)


def make_training(
    path: Path, ours: DiT, compiled: bool, accelerator: Accelerator, x: Tensor, y: Tensor,
) -> Callable[[], None]:
    """Sets up the official network of our sizes and routes; returns a function that takes a step of its loop."""
    dit, edm, helper = open_official(path)
    attention: Any = ours.blocks[0].get_submodule("attn")
    torch.manual_seed(0)
    net = dit.DiT(
        input_size=ours.input_size, patch_size=ours.patch_size, in_channels=ours.in_channels,
        hidden_size=ours.pos_embed.shape[-1], depth=len(ours.blocks), num_heads=attention.num_heads,
        num_classes=ours.num_classes, enable_routing=bool(ours.routes), routes=[vars(route) for route in ours.routes],
    ).to(accelerator.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    diffusion = edm.EDMDiffusion()
    net = diffusion.wrap_model_with_precond(net)
    ema = copy.deepcopy(net).eval()
    helper.requires_grad(ema, False)
    net, optimizer = accelerator.prepare(net.train(), optimizer)

    def take_step() -> None:
        with torch.compiler.set_stance("default" if compiled else "force_eager"):
            with accelerator.autocast():
                loss = diffusion.get_training_loss(net, x, y, class_drop_prob=0.1).mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            helper.update_ema(ema, net)
            loss.item()  # which waits for the device, in every step

    return take_step
