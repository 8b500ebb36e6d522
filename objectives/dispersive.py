"""Repulsion between the hidden states of different images: dispersive loss (arXiv 2506.09027)."""

import math
from itertools import chain
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from objectives.diffusion import Objective
from objectives.hidden import route_at, take_hidden


class Dispersive(Objective):
    """Adds weight · log mean exp(−‖z_i − z_j‖² / (D · temperature)) over all pairs i, j of images, i = j included.

    z_i has the D numbers of image i's tokens after `block`, counted from 0. None is the paper's choice: the last block
    of the first quarter. With `pooled`, z_i is the mean over tokens, which a route needs, as images keep different
    tokens. Pairs are formed within one call: a rank's part of the batch, divided by grad_accum_steps. Raises ValueError
    for a block on a route without `pooled`, and in the call for a single image.
    """

    own_terms = ("dispersive",)

    def __init__(
        self, inner: Objective, block: int | None = None, weight: float = 0.5,
        temperature: Annotated[float, Gt(0)] = 0.5, pooled: bool = False,
    ):
        super().__init__(inner)
        self.block = max(0, len(self.net.blocks) // 4 - 1) if block is None else block
        self.weight, self.temperature, self.pooled = weight, temperature, pooled
        self.hidden = take_hidden(self.net, [self.block])
        route = route_at(chain(*self.schedule.every), self.block % len(self.net.blocks))
        if route and not pooled:
            raise ValueError(f"objective.dispersive compares images token by token, but block {self.block} lies on "
                             f"route {route}: set objective.dispersive.pooled=true, or a block outside the route.")

    def forward(self, x: Tensor, y: Tensor, **arrays: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if len(x) == 1:
            raise ValueError("objective=dispersive compares images, but a rank's part of the batch has only one: raise "
                             "batch_size, or lower grad_accum_steps.")
        loss, terms = self.inner(x, y, **arrays)
        tokens, _ = self.hidden[self.block]
        dispersive = self.dispersion(tokens.mean(dim=1) if self.pooled else tokens.flatten(1)).expand(len(x))
        return loss + self.weight * dispersive, {**terms, "dispersive": dispersive}

    def dispersion(self, z: Tensor) -> Tensor:
        """Returns the term, a scalar, of z (B, D)."""
        z = z.float()
        gram = Gram.apply(z - z.mean(dim=0))    # (B, B); the differences of all pairs would be (B, B, D)
        norms = gram.diagonal()
        similarities = (2 * gram - norms[:, None] - norms[None]) / (z.shape[1] * self.temperature)
        return similarities.flatten().logsumexp(dim=0) - 2 * math.log(len(z))


class Gram(torch.autograd.Function):
    """z @ z.T (B, B) of z (B, D), in float32 in both passes.

    Autocast and TF32 would round the products, and distances are differences of products. Centre z first, for the same
    reason.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return multiply_in_float32(z, z.T)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        [z] = ctx.saved_tensors
        return multiply_in_float32(grad + grad.T, z)


def multiply_in_float32(a: Tensor, b: Tensor) -> Tensor:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(a.device.type, enabled=False):
            return a @ b
    finally:
        torch.set_float32_matmul_precision(before)
