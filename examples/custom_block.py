"""Trains a custom block with train.py: attention and MLP in parallel, as in ViT-22B (arXiv 2302.05442).

    python examples/custom_block.py experiment=quickstart model.backbone_type=Parallel-S/2 name=parallel

To make all commands know the block, move the class to blocks/parallel.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch import Tensor, nn

from blocks import BLOCKS
from blocks.transformer import LAYER_NORM, Attention, Block, Mlp, modulate, sizes


class ParallelBlock(Block):
    """A block with one residual branch: attention and MLP read the same input, modulated and gated by the condition."""

    models = sizes("Parallel", "S/2", "B/2")

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float, grid_size: int, qk_norm: bool = False):
        super().__init__()
        self.norm = LAYER_NORM(hidden_size)
        self.attn = Attention(hidden_size, num_heads, qk_norm)
        self.mlp = Mlp(hidden_size, int(hidden_size * mlp_ratio))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 3 * hidden_size))

    def forward(self, x: Tensor, c: Tensor, positions: Tensor) -> Tensor:
        shift, scale, gate = self.adaLN_modulation(c).chunk(3, dim=1)
        h = modulate(self.norm(x), shift, scale)
        return x + gate.unsqueeze(1) * (self.attn(h) + self.mlp(h))


BLOCKS["parallel"] = ParallelBlock  # before importing dit.py

if __name__ == "__main__":
    import train

    train.main()
