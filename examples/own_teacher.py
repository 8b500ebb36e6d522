"""Teachers for objective=alignment (docs/recipes.md): DINOv2's ViT-B/14, which REPA uses, and the colours of squares.

    python scripts/prepare_latents.py source=<images> out=data/x teacher=python:examples.own_teacher.dinov2

A teacher maps uint8 images (B, 3, H, W) of any size to tokens (B, N, Z) or a map (B, Z, h, w), on the images' device.
"""

from functools import cache

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch.nn.functional import adaptive_avg_pool2d, interpolate

GRID = 16  # tokens on a side: as many as of the network that is trained, here of 32 × 32 latents in patches of 2


@cache
def network(device: torch.device) -> torch.nn.Module:
    """Loads timm's network with its weights, downloaded once, for images whose patches make the grid."""
    net = timm.create_model("vit_base_patch14_dinov2", pretrained=True, num_classes=0, img_size=14 * GRID)
    return net.to(device).eval()


def dinov2(images: torch.Tensor) -> torch.Tensor:
    """Returns the last tokens (B, GRID², 768), without the class token."""
    net = network(images.device)
    return net.forward_features(prepared(images, 14 * GRID))[:, net.num_prefix_tokens :]


def prepared(images: torch.Tensor, pixels: int) -> torch.Tensor:
    """Normalises images, and then scales them to `pixels` a side, in REPA's order."""
    mean, std = (torch.tensor(values, device=images.device).view(3, 1, 1)
                 for values in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    return interpolate((images / 255 - mean) / std, (pixels, pixels), mode="bicubic")


def colours(images: torch.Tensor) -> torch.Tensor:
    """Returns the mean colours of squares as a map (B, 3, GRID, GRID)."""
    return adaptive_avg_pool2d(images.float() / 255, GRID)
