"""What a run's checkpoints record of it, as plain values."""

import platform
from typing import Any

import torch

from dit import DiT_models
from latents.folder import Latents
from runtime.command import commit
from runtime.device import device_name, multiplies_in_tf32
from training.settings import ModelSettings, SizedSettings, TrainSettings
from weights.records import ROUTER_DEFAULTS


def latent_shape(cfg: TrainSettings, latents: Latents) -> tuple[int, int, int]:
    side = cfg.data.input_size or latents.shape[1]
    return cfg.data.channels or latents.shape[0], side, side


def network_record(model: ModelSettings, shape: tuple[int, int, int], num_classes: int) -> dict[str, Any]:
    """Returns the network's keywords, as its checkpoints record them, for latents of `shape` (C, h, w)."""
    unused = {"name", "backbone_type", *(ROUTER_DEFAULTS if model.selection == "random" else ()),
              *(() if model.fusion else ("fusion",))}
    return {
        **DiT_models[model.backbone_type].keywords, **model.model_dump(exclude=unused, exclude_none=True),
        "input_size": shape[1], "in_channels": shape[0], "num_classes": num_classes,
        "routes": [route.model_dump(exclude_defaults=True) for route in model.routes],
    }


def schedule_record(cfg: SizedSettings) -> dict[str, Any]:
    """Returns the route schedule, with shares of the run as steps; {} if the routes never change."""
    def step_of(when: float) -> int:
        if when >= cfg.steps:
            raise ValueError(f"route_schedule changes routes at step {when}, but the run ends at steps={cfg.steps}: "
                             f"give an earlier step, a share of the run such as 0.85, or more steps.")
        return max(1, int(when * cfg.steps)) if when < 1 else int(when)

    schedule = cfg.route_schedule.model_dump(exclude_defaults=True) if cfg.model.routes else {}
    if "changes" in schedule:
        schedule["changes"] = [[step_of(when), routes] for when, routes in schedule["changes"]]
    return {key: step_of(value) if key in ("dense_before", "dense_after") else value for key, value in schedule.items()}


def run_record(cfg: SizedSettings, latents: Latents, world: int, device: torch.device) -> dict[str, Any]:
    """Returns what a checkpoint records of its run."""
    num_classes = cfg.data.num_classes or latents.num_classes
    network = network_record(cfg.model, latent_shape(cfg, latents), num_classes)
    data = {"fingerprint": latents.fingerprint, "autoencoder": cfg.data.autoencoder or latents.autoencoder,
            "convention": latents.convention.record(), "class_names": latents.class_names,
            "display_names": latents.display_names,
            "classes": None if len(latents.classes) == num_classes else latents.classes}
    begun = {"step": 0, "commit": commit(), "device": device_name(device), "torch": torch.__version__,
             "tf32": multiplies_in_tf32(device), "python": platform.python_version()}
    return {
        "network": network, "diffusion": dict(cfg.diffusion), "data": data,
        "world": world, "seed": cfg.seed, "batch_size": cfg.batch_size, "optimizer": cfg.optimizer.name,
        "init_from": cfg.init_from, "parent": None, "null_label": cfg.label_dropout > 0,
        "config": cfg.model_dump(mode="json"), "history": [begun], "route_schedule": schedule_record(cfg),
        "objective": cfg.objective if cfg.objective.get("name") else {},
    }
