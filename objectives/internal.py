"""Internal guidance (arXiv 2512.24176): a second final layer in the middle of the network, trained with it.

When sampling, its output is the weak prediction, in the same pass: `guidance.Guidance(internal=True)`.
"""

import copy

import torch
from torch import Tensor, nn

from dit import DiT, FinalLayer
from objectives.diffusion import Objective
from objectives.hidden import early_block


class InternalHead(FinalLayer):
    """A second final layer, which starts at zero and predicts from a block's tokens in each pass of its network.

    As `net.internal_head` it is part of the network, its average, its files and its copies. Raises ValueError for a
    block that the network does not have, and for the last one, which the final layer follows already.
    """

    unpatchify = DiT.unpatchify

    def __init__(self, net: DiT, block: int):
        super().__init__(net.pos_embed.shape[-1], net.patch_size, net.out_channels,
                         copy.deepcopy(net.final_layer.norm_final))
        if not 0 <= block < len(net.blocks) - 1:
            raise ValueError(f"objective.internal.block={block} must come before the last of the network's "
                             f"{len(net.blocks)} blocks, which are counted from 0.")
        for p in (*self.linear.parameters(), *self.adaLN_modulation.parameters()):
            nn.init.zeros_(p)
        self.patch_size, self.input_size, self.out_channels = net.patch_size, net.input_size, net.out_channels
        self.last: dict[str, Tensor] = {}   # tokens and positions of the last pass
        # A method, not a function, so that a copy of the network calls the copy of the head.
        net.blocks[block].register_forward_hook(self.read)

    def read(self, block: nn.Module, arguments: tuple, output: Tensor) -> None:
        _, c, positions = arguments
        self.last["tokens"], self.last["positions"] = self(output, c), positions

    def kept(self) -> Tensor:
        """Returns 1 for pixels whose tokens the head saw in the last pass, else 0: (1 or B, 1, h, w)."""
        positions, side = self.last["positions"], self.input_size // self.patch_size
        mask = torch.zeros(len(positions), side * side, device=positions.device).scatter(1, positions, 1.0)
        mask = mask.view(-1, 1, side, side)
        return mask.repeat_interleave(self.patch_size, 2).repeat_interleave(self.patch_size, 3)

    def answer(self, *_: object, **__: object) -> Tensor:
        """Returns the head's prediction in the last pass (B, out_channels, h, w), in place of a network's forward.

        Arguments are ignored. The prediction is 0 in the patches of tokens that were routed.
        """
        tokens, positions = self.last["tokens"], self.last["positions"]
        num_tokens = (self.input_size // self.patch_size) ** 2
        index = positions.unsqueeze(-1).expand(tokens.shape)
        return self.unpatchify(tokens.new_zeros(len(tokens), num_tokens, tokens.shape[2]).scatter(1, index, tokens))


class Internal(Objective):
    """Adds weight · the diffusion's loss of the internal head's prediction, at the same noise levels, noise and masks.

    Inside a route the head sees the kept tokens, and its loss is the mean over their patches. `block`, counted from 0,
    is the one that the head reads. None is the paper's choice: the eighth, or the one at a third of a shallower
    network. An adapter (LoRA) does not change the head of its base. Raises ValueError for a network without a head, and
    around a loss that samples its own noise.
    """

    own_terms = ("internal",)

    def __init__(self, inner: Objective, block: int | None = None, weight: float = 0.5):
        super().__init__(inner)
        self.weight = weight

    @staticmethod
    def network_keywords(depth: int, block: int | None = None, **others: object) -> dict:
        return {"head_block": early_block(depth) if block is None else block}

    def forward(self, x: Tensor, y: Tensor, **arrays: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, terms = self.inner(x, y, **arrays)
        if self.drawn is None:
            raise ValueError("objective=internal needs the noise of the diffusion's loss, but version1 samples "
                             "its own: leave version1 out.")
        head = self.net.internal_head
        kept = head.kept()
        weight = arrays.get("weight", 1.0) * kept / kept.mean()
        internal = self.diffusion.loss(head.answer, x, y, (), *self.drawn, weight=weight)
        return loss + self.weight * internal, {**terms, "internal": internal}
