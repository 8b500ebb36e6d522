"""Alignment of hidden states with a frozen vision network's tokens of the clean image: REPA (arXiv 2410.06940).

Options are iREPA's normalisation and convolutional projector (arXiv 2512.10794), and HASTE's early stop (2505.16792).
"""

import math
from collections.abc import Hashable
from itertools import chain
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Interval
from torch import Tensor, nn

from objectives.diffusion import Objective
from objectives.hidden import early_block, route_at, take_hidden
from objectives.teachers import load_teacher


class Alignment(Objective):
    """Adds weight · the mean over tokens and blocks of −cos(projected hidden state, the teacher's token).

    The hidden states are those after `blocks`, counted from 0. None is REPA's choice: the eighth block, or the one at a
    third of a shallower network. Inside a route they are the kept tokens, and the teacher's tokens are gathered at the
    same positions. One projector serves all blocks: "mlp" is REPA's, "conv" iREPA's 3 × 3 convolution, which needs the
    complete grid. `normalise` = α replaces each of the teacher's tokens z by (z − α · mean) / (std + 1e-6), with mean
    and std over the image's complete grid. From `end_step` on nothing is added. The teacher's tokens (B, N, Z) are the
    array "teacher" of the latent folder, or `teacher` computes them from the array "image" in each step. Raises
    ValueError for an array that is missing or does not fit the network's grid, and for a convolution on a route.
    """

    own_terms = ("alignment",)

    def __init__(
        self, inner: Objective, blocks: list[int] | None = None, weight: float = 0.5,
        projector: Literal["mlp", "conv"] = "mlp", normalise: Annotated[float, Interval(ge=0, le=1)] | None = None,
        end_step: Annotated[int, Ge(0)] | None = None, teacher: str | None = None,
    ):
        super().__init__(inner)
        depth, num_tokens, width = len(self.net.blocks), *self.net.pos_embed.shape[1:]
        self.blocks = [early_block(depth)] if blocks is None else blocks
        self.weight, self.normalise, self.end_step = weight, normalise, end_step
        self.hidden = take_hidden(self.net, self.blocks)
        for block in self.blocks if projector == "conv" else ():
            if route := route_at(chain(*self.schedule.every), block % depth):
                raise ValueError(f"objective.alignment.projector=conv needs the complete grid of tokens, but block "
                                 f"{block} lies on route {route}: set objective.alignment.projector=mlp, or blocks "
                                 f"outside the route.")
        self.own_arrays = ("teacher",) if teacher is None else ("image",)
        shape = self.array_shapes.get(self.own_arrays[0])
        if shape is None or (teacher is None and (len(shape) != 2 or shape[0] != num_tokens)):
            has = "the latents have none" if shape is None else f"its rows have the shape {shape}"
            needs = f"teacher-*.npy for {num_tokens} tokens" if teacher is None else "image-*.npy"
            how = f"teacher=<name> patch_size={self.net.patch_size}" if teacher is None else "images=true"
            raise ValueError(f"objective=alignment needs the extra array {needs}, but {has}: run "
                             f"scripts/prepare_latents.py with {how}.")
        self.teacher = None if teacher is None else load_teacher(teacher, math.isqrt(num_tokens))
        self.projector = PROJECTORS[projector](width, shape[1] if self.teacher is None else self.teacher.width)

    @property
    def has_ended(self) -> bool:
        return self.end_step is not None and self.step >= self.end_step

    @property
    def phase(self) -> Hashable:
        return self.inner.phase, self.has_ended

    def forward(self, x: Tensor, y: Tensor, **arrays: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        given = arrays.pop(self.own_arrays[0])
        loss, terms = self.inner(x, y, **arrays)
        if self.has_ended:
            # DDP waits for a gradient of each weight, so the projector gets a gradient of 0.
            nothing = 0.0 * sum(p.sum() for p in self.projector.parameters())
            return loss + nothing, {**terms, "alignment": torch.zeros_like(loss)}
        target = given if self.teacher is None else self.teacher(given)
        if self.normalise is not None:
            target = normalised(target, self.normalise)
        alignment = sum(self.distance(*self.hidden[block], target) for block in self.blocks) / len(self.blocks)
        return loss + self.weight * alignment, {**terms, "alignment": alignment}

    def distance(self, tokens: Tensor, positions: Tensor, target: Tensor) -> Tensor:
        """Returns the mean −cos (B,) of tokens (B, K, D) at positions (1 or B, K) and their targets in (B, N, Z)."""
        target = torch.take_along_dim(target, positions.unsqueeze(-1), dim=1)                     # (B, K, Z)
        return -F.cosine_similarity(self.projector(tokens).float(), target.float(), dim=-1).mean(dim=1)


def normalised(target: Tensor, share: float) -> Tensor:
    """Subtracts `share` times an image's mean token from its tokens (B, N, Z), and divides by their std (iREPA)."""
    std, mean = torch.std_mean(target.float(), dim=1, keepdim=True)
    return (target - share * mean) / (std + 1e-6)


class MLP(nn.Sequential):
    """REPA's projector: three linear layers with SiLU between, initialised like the network's layers."""

    def __init__(self, width: int, out: int, hidden: int = 2048):
        super().__init__(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(),
                         nn.Linear(hidden, out))
        for layer in (self[0], self[2], self[4]):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)


class Convolution(nn.Conv2d):
    """iREPA's projector: a 3 × 3 convolution over the square grid of tokens (B, N, D)."""

    def __init__(self, width: int, out: int):
        super().__init__(width, out, kernel_size=3, padding=1)

    def forward(self, tokens: Tensor) -> Tensor:
        side = math.isqrt(tokens.shape[1])
        grid = tokens.transpose(1, 2).unflatten(2, (side, side))
        return super().forward(grid).flatten(2).transpose(1, 2)


PROJECTORS = {"mlp": MLP, "conv": Convolution}
