"""Features of one's own to score by (docs/evaluation.md), here DINOv2's: `fd_dinov2` is FD-DINOv2 (arXiv 2306.04675).

    hf download timm/vit_large_patch14_dinov2.lvd142m model.safetensors --local-dir dinov2
    python fid.py images=<images> reference=<images> metrics=[fd_dinov2] \
        features=python:examples.own_features.dinov2 features_weights=dinov2/model.safetensors
"""

from collections.abc import Callable
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file
from torch.nn.functional import interpolate


def dinov2(
    weights: Path, device: torch.device | str, architecture: str = "vit_large_patch14_dinov2",
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Loads features_weights=; returns a function from uint8 images (B, 3, H, W) to normalised class tokens (B, D)."""
    state = load_file(weights)
    state["pos_embed"] = positions_at_224(state["pos_embed"])
    network = timm.create_model(architecture, pretrained=False, img_size=224, num_classes=0)
    network.load_state_dict(state)
    network = network.to(device).eval()
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1)
                 for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))

    def features(images: torch.Tensor) -> torch.Tensor:
        x = images.float()
        if x.shape[2:] != (224, 224):
            x = interpolate(x, (224, 224), mode="bicubic", antialias=True).clamp(0, 255)
        return network((x / 255 - mean) / std)

    return features


def positions_at_224(positions: torch.Tensor) -> torch.Tensor:
    """Resamples DINOv2's position embeddings (1, 1 + 37², C) to 16 × 16 patches as its own code does.

    That is bicubic without antialiasing at a scale of (16 + 0.1) / 37; timm's resampling gives other features.
    """
    token, grid = positions[:, :1], positions[:, 1:]
    side = round(grid.shape[1] ** 0.5)
    grid = grid.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    grid = interpolate(grid, scale_factor=(16 + 0.1) / side, mode="bicubic")
    return torch.cat([token, grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)
