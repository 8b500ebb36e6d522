"""Guidance: extrapolate from a weak prediction to a strong one, weak + scale · (strong - weak)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance (Ho & Salimans, arXiv 2207.12598): the weak pass sees the null label.

    A scale of 1 is the strong prediction alone and costs one pass. Any sampler takes it as `guidance=`.
    """

    scale: float

    def __call__(self, predict: Callable[..., Tensor], net: nn.Module, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Guides `predict(net, x, t, y)` (B, C, h, w), with both passes in one doubled batch."""
        if self.scale == 1:
            return predict(net, x, t, y)
        null = torch.full_like(y, net.num_classes)
        strong, weak = predict(net, torch.cat([x, x]), torch.cat([t, t]), torch.cat([y, null])).chunk(2)
        return weak + self.scale * (strong - weak)
