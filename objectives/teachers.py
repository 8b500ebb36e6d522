"""Frozen vision networks that turn an image into a grid of tokens, as those of examples/own_teacher.py do."""

from collections.abc import Callable

import torch
from torch import Tensor


class Teacher:
    """Turns uint8 images (B, 3, H, W) into tokens (B, grid², width), in raster order, without gradients.

    `read` maps images on `device` to tokens, or to a map (B, width, grid, grid). Raises ValueError for another grid.
    """

    def __init__(self, read: Callable[[Tensor], Tensor], grid: int, device: torch.device | str = "cpu"):
        self.read, self.device = read, torch.device(device)
        _, num_tokens, self.width = self(torch.zeros(1, 3, 256, 256, dtype=torch.uint8)).shape
        if num_tokens != grid**2:
            raise ValueError(f"The teacher makes {num_tokens} tokens per image, but the network's grid has "
                             f"{grid} × {grid}: name another teacher, or set model.patch_size to fit.")

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        tokens = self.read(images.to(self.device))
        return tokens.flatten(2).transpose(1, 2) if tokens.ndim == 4 else tokens
