"""The blocks that dit.py builds a network from, such as DiT's (arXiv 2212.09748) and LightningDiT's (2501.01423).

A block is an nn.Module, `Block(hidden_size, num_heads, mlp_ratio, grid_size, qk_norm)`. Its forward maps tokens x
(B, K, D), the condition c (B, D) and the tokens' places in raster order, positions (1 or B, K) int64, to tokens
(B, K, D). On a route K is smaller than grid_size², and positions are those of the kept tokens. A block raises
ValueError for settings that it does not support, as `refuse_qk_norm` does. See examples/custom_block.py.

Two parts are optional. `adaLN_modulation` is a Sequential that computes shifts, scales and gates from c; with
init=adaln_zero its last layer begins at zero. To recognise weights without a record, a block's kind has a `mark`, and
the block has `read_mlp_ratio(weights, hidden_size)`, which receives one block's weights by name.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from blocks.mamba import MambaBlock
from blocks.rwkv import RWKVBlock
from blocks.transformer import LAYER_NORM, RMS_NORM, DiTBlock, LightningBlock


@dataclass(frozen=True)
class BlockKind:
    """The kind of block that a name in BLOCKS stands for."""

    block: type[nn.Module]
    norm: Callable[[int], nn.Module] = LAYER_NORM   # of the final layer, from its width
    mark: str | None = None                         # a weight that no other kind's block has
    models: dict[str, dict] = field(default_factory=dict)   # named sizes, each a model.backbone_type


WIDTHS = {
    "S": dict(depth=12, hidden_size=384, num_heads=6),
    "B": dict(depth=12, hidden_size=768, num_heads=12),
    "L": dict(depth=24, hidden_size=1024, num_heads=16),
    "XL": dict(depth=28, hidden_size=1152, num_heads=16),
}


def sizes(family: str, *names: str) -> dict[str, dict]:
    """Maps full names, such as "DiT-B/2" (width and patch size), to the keywords of a network."""
    pairs = {name: name.split("/") for name in names}
    return {f"{family}-{name}": {**WIDTHS[width], "patch_size": int(patch)} for name, (width, patch) in pairs.items()}


BLOCKS = {
    "dit": BlockKind(DiTBlock, LAYER_NORM, "mlp.fc1.weight",
                     sizes("DiT", *(f"{width}/{patch}" for width in WIDTHS for patch in (2, 4, 8)))),
    "lightning": BlockKind(LightningBlock, RMS_NORM, "mlp.w12.weight",
                           sizes("LightningDiT", "B/1", "B/2", "L/2", "XL/1", "XL/2")),
    # These match the paper's two parameter counts; the paper does not state width and depth.
    "mamba": BlockKind(MambaBlock, LAYER_NORM, "mixer.A_log",
                       {"Mamba-B/2": dict(depth=20, hidden_size=768, num_heads=24, patch_size=2)}),  # 111M
    "rwkv": BlockKind(RWKVBlock, LAYER_NORM, "spatial_mix.decay",
                      {"RWKV-L/2": dict(depth=18, hidden_size=768, num_heads=12, patch_size=2)}),  # 210M
}
