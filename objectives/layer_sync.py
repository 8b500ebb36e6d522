"""Alignment of a block's tokens with those of a deeper block of the same network: LayerSync (arXiv 2510.12581)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from objectives.diffusion import Objective
from objectives.hidden import early_block, route_at, take_hidden


class LayerSync(Objective):
    """Adds weight · the mean over tokens of −cos(a block's token, the same token after a deeper block).

    No gradient flows into the deeper block's tokens. `block` and `deeper` are counted from 0. None is the paper's
    choice for XL/2: the eighth and sixteenth block, or those at a third and two thirds of a shallower network. If only
    one block lies on a route, the other's tokens are gathered at the positions of the kept tokens. Raises ValueError
    for settings out of range, and for blocks on two routes, whose tokens differ.
    """

    own_terms = ("layer_sync",)

    def __init__(self, inner: Objective, block: int | None = None, deeper: int | None = None, weight: float = 0.2):
        super().__init__(inner)
        depth = len(self.net.blocks)
        self.block = early_block(depth) if block is None else block
        self.deeper = min(2 * (self.block % depth) + 1, depth - 1) if deeper is None else deeper
        self.hidden = take_hidden(self.net, [self.block, self.deeper])
        if self.block % depth >= self.deeper % depth:
            raise ValueError(f"objective.layer_sync.deeper={self.deeper} does not come after block {self.block} in a "
                             f"network of {depth} blocks: give a later one.")
        for routes in self.schedule.every:
            one, other = (route_at(routes, i % depth) for i in (self.block, self.deeper))
            if one and other and one != other:
                raise ValueError(f"objective.layer_sync compares the same tokens, but block {self.block} lies on route "
                                 f"{one} and block {self.deeper} on {other}: choose two on one route.")
        self.weight = weight

    def forward(self, x: Tensor, y: Tensor, **arrays: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, terms = self.inner(x, y, **arrays)
        (tokens, positions), (target, target_positions) = self.hidden[self.block], self.hidden[self.deeper]
        if tokens.shape[1] < target.shape[1]:
            target = torch.take_along_dim(target, positions.unsqueeze(-1), dim=1)                   # (B, K, D)
        elif tokens.shape[1] > target.shape[1]:
            tokens = torch.take_along_dim(tokens, target_positions.unsqueeze(-1), dim=1)
        sync = -F.cosine_similarity(tokens, target.detach(), dim=-1).mean(dim=1)
        return loss + self.weight * sync, {**terms, "layer_sync": sync}
