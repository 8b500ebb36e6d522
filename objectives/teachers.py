"""Frozen vision networks that turn an image into a grid of tokens: timm's, or a function of one's own."""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Teacher(nn.Module):
    """Turns images uint8 (B, 3, H, W) into tokens (B, grid², width), in raster order, without gradients.

    `read` maps its input to tokens or to a map (B, width, grid, grid), by `network` if it is not a function of one's
    own. The first `num_prefix` tokens, such as a class token, are dropped. Images in 0..1 are normalised by `mean` and
    `std` and then resized bicubically to `pixels` a side, in REPA's order. If pixels is None, uint8 images are read.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, network: nn.Module | None, read: Callable[[Tensor], Tensor], grid: int, pixels: int | None = None,
        mean: tuple[float, ...] = (0.0,), std: tuple[float, ...] = (1.0,), num_prefix: int = 0,
    ):
        super().__init__()
        self.network, self.read, self.pixels, self.num_prefix = network, read, pixels, num_prefix
        for name, values in {"mean": mean, "std": std}.items():
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1))
        self.eval()
        _, num_tokens, self.width = self(torch.zeros(1, 3, 256, 256, dtype=torch.uint8)).shape
        if num_tokens != grid**2:
            raise ValueError(f"The teacher makes {num_tokens} tokens per image, but the network's grid has "
                             f"{grid} × {grid}: name another teacher, or set model.patch_size to fit.")

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        if self.pixels is not None:
            images = F.interpolate((images / 255 - self.mean) / self.std, (self.pixels, self.pixels), mode="bicubic")
        tokens = self.read(images)
        if tokens.ndim == 4:
            channels_last = tokens.shape[2] != tokens.shape[3]  # as in some of timm's maps
            tokens = tokens.flatten(1, 2) if channels_last else tokens.flatten(2).transpose(1, 2)
        return tokens[:, self.num_prefix :]


def load_teacher(name: str, grid: int) -> Teacher:
    """Loads a teacher for a network of grid × grid tokens; `name` is timm's, or python:module.function.

    A function of one's own maps uint8 images (B, 3, H, W) of any size to tokens or a map, on the device of the images.
    Leaves the caller's random state unchanged. Raises ValueError if there is no such teacher, if its weights are not
    available, or if its grid differs.
    """
    from weights.reading import PYTHON, load_function

    with torch.random.fork_rng(devices=[]):  # a network starts at random before its weights are read
        if name.startswith(PYTHON):
            return Teacher(None, load_function("teacher", name)[0], grid)
        return timm_teacher(name, grid)


def timm_teacher(name: str, grid: int) -> Teacher:
    """Loads a timm transformer with its last tokens, or another timm network with its stride-16 map.

    The image's side is chosen to fit the grid: patch size · grid, as in REPA for DINOv2, or 16 · grid.
    """
    import timm  # slow: takes seconds

    cfg = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    if cfg is None or not cfg.hf_hub_id:
        near = difflib.get_close_matches(name, timm.list_models(pretrained=True), n=3)
        raise ValueError(f"teacher={name} is neither python:module.function nor a model of timm's with weights"
                         f"{'; did you mean ' + ', '.join(near) + '?' if near else '.'}")
    weights = {"file": str(hub_weights(name, cfg.hf_hub_id))}
    options: dict[str, Any] = {"pretrained": True, "pretrained_cfg_overlay": weights}
    with torch.device("meta"):
        outline: Any = timm.create_model(name)
    if hasattr(outline, "num_prefix_tokens"):
        pixels = outline.patch_embed.patch_size[0] * grid
        network: Any = timm.create_model(name, num_classes=0, img_size=pixels, **options)
        return Teacher(network, network.forward_features, grid, pixels, cfg.mean, cfg.std, network.num_prefix_tokens)
    stages = [i for i, stage in enumerate(outline.feature_info) if stage["reduction"] == 16]
    network = timm.create_model(name, features_only=True, out_indices=stages[-1:], **options)
    return Teacher(network, lambda x: network(x)[0], grid, 16 * grid, cfg.mean, cfg.std)


def hub_weights(name: str, repo: str) -> Path:
    """Returns the safetensors file of a timm model, from torch.hub's folder if it is there, or from the hub."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / f"{name}.safetensors"
    if path.is_file():
        return path
    from weights.reading import from_hub

    remedy = f"teacher={name} needs this file; download it on a machine with internet access and put it at {path}."
    return from_hub(repo, "model.safetensors", remedy=remedy) / "model.safetensors"
