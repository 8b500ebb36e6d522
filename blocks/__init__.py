"""The blocks that dit.py builds a network from, such as DiT's (arXiv 2212.09748) and LightningDiT's (2501.01423).

A file `blocks/<name>.py` declares one `Block(hidden_size, num_heads, mlp_ratio, grid_size, qk_norm)`, which is built as
block=<name>, or by a name in its `models`, each a model.backbone_type: without any, DiT's sizes, as <name>-B/2. Its
forward maps tokens x (B, K, D), the condition c (B, D) and the tokens' places in raster order, positions (1 or B, K)
int64, to tokens (B, K, D). On a route K is smaller than grid_size², and positions are those of the kept tokens. A block
raises ValueError for settings that it does not support, as `refuse_qk_norm` does. CONTRIBUTING.md has one in 20 lines.

Two parts are optional. `adaLN_modulation` is a Sequential that computes shifts, scales and gates from c; with
init=adaln_zero its last layer begins at zero. By its `mark` a block is recognised in weights without a record.
"""

import extensions
from blocks.transformer import Block, DiTBlock, LightningBlock, sizes

BASE, HELPERS = Block, {"transformer", "fusion"}
BLOCKS: dict[str, type[Block]] = {"dit": DiTBlock, "lightning": LightningBlock}
BLOCKS |= {name: extensions.find("blocks", name) for name in extensions.names("blocks")}
for name, kind in BLOCKS.items():
    kind.models = kind.models or sizes(name, "S/2", "B/2", "L/2", "XL/2")
