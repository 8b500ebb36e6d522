"""A teacher of one's own (docs/recipes.md), here one whose tokens are the colours of squares.

    python scripts/prepare_latents.py source=<images> out=data/x teacher=python:examples.own_teacher.colours

Load a network where the module is imported, and move it to the images' device in the function.
"""

import torch
from torch.nn.functional import adaptive_avg_pool2d

GRID = 16  # tokens on a side: as many as of the network that is trained, here of 32 × 32 latents in patches of 2


def colours(images: torch.Tensor) -> torch.Tensor:
    """Maps uint8 images (B, 3, H, W) to a map (B, 3, GRID, GRID); tokens (B, GRID², Z) are accepted, too."""
    return adaptive_avg_pool2d(images.float() / 255, GRID)
