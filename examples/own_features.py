"""Features of one's own to score by (docs/evaluation.md), here those of a ResNet-18 of timm's.

    hf download timm/resnet18.a1_in1k model.safetensors --local-dir resnet18
    python fid.py images=<images> reference=<images> metrics=[fd_resnet18] \
        features=python:examples.own_features.resnet18 features_weights=resnet18/model.safetensors
"""

from collections.abc import Callable
from pathlib import Path

import timm
import torch
from torch.nn.functional import interpolate


def resnet18(weights: Path | None, device: torch.device | str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Loads features_weights= and returns a function from uint8 images (B, 3, H, W) to features (B, D)."""
    network = timm.create_model("resnet18.a1_in1k", pretrained=True, pretrained_cfg_overlay={"file": str(weights)},
                                num_classes=0).to(device).eval()
    mean, std = (torch.tensor(network.pretrained_cfg[key], device=device).view(3, 1, 1) for key in ("mean", "std"))

    def features(images: torch.Tensor) -> torch.Tensor:
        x = interpolate(images.float(), (224, 224), mode="bicubic", antialias=True).clamp(0, 255)
        return network((x / 255 - mean) / std)

    return features
