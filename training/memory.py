"""Estimates GPU memory in training from shapes: weights, gradients, optimizer, average and activations."""

import math
import os
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from dit import DiT
from latents.folder import open_latents
from runtime import sharding
from runtime.schema import read
from training.run import describe_network, latent_shape
from training.settings import TrainSettings
from weights.records import build_network

FILLED = 0.9  # share of a GPU's memory that a pass may fill


def activation_bytes(net: DiT, batch: int) -> int:
    """Counts the bytes that an uncompiled bf16 forward pass keeps for the backward pass, its bf16 weights included."""
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    images = torch.randn(batch, net.in_channels, net.input_size, net.input_size)
    labels = torch.zeros(batch, dtype=torch.int64)
    with saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        out = net(images, torch.rand(batch), labels, routes=net.routes)  # noqa: F841, as it holds the storages
    own = {parameter.untyped_storage()._cdata for parameter in net.parameters()}
    return sum(storage.nbytes() for name, storage in kept.items() if name not in own)


def bytes_in_training(build: Callable[[], DiT]) -> tuple[int, int]:
    """Counts the bytes that training holds on a GPU without images, and those that each image of a pass adds."""
    with FakeTensorMode():  # shapes alone, nothing is computed
        net = build()
        one, two = (activation_bytes(net, batch) for batch in (1, 2))
    return sharding.bytes_a_rank(net, 1) + 2 * one - two, two - one


def images_that_fit(fixed: int, per_image: int, memory: float, most: int) -> int:
    """Returns how many images fit FILLED of `memory` in one pass, as a power of two or `most`; 0 if none does."""
    room = (FILLED * memory - fixed) / per_image
    return min(most, 2 ** math.floor(math.log2(room))) if room >= 1 else 0


def gpu_bytes() -> int | None:
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def what_fits(settings: dict) -> str:
    """Suggests the grad_accum_steps with which a run that filled a GPU should fit; "" if that is unknown."""
    cfg, memory = read(TrainSettings, settings), gpu_bytes()
    if cfg.cpu or memory is None or cfg.sharding != "none" or cfg.lora.rank is not None or cfg.batch_size is None:
        return ""
    latents = open_latents(cfg.data.path)
    network = describe_network(cfg.model, latent_shape(cfg, latents), cfg.data.num_classes or latents.num_classes)
    per_rank = cfg.batch_size // int(os.environ.get("WORLD_SIZE", 1))
    images = images_that_fit(*bytes_in_training(lambda: build_network(network)), memory, per_rank)
    if not images:
        return f"Not one image fits {memory / 1e9:.0f} GB: set activation_checkpointing=true or sharding=fsdp. "
    parts = max(2 * cfg.grad_accum_steps, 2 ** math.ceil(math.log2(per_rank / images)))
    return f"grad_accum_steps={parts} should fit {memory / 1e9:.0f} GB. "
