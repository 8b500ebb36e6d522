"""What inductor plans for a GPU is counted on a CPU."""

import torch
from count_kernels import count_block

from blocks.transformer import DiTBlock


def test_a_block_has_a_call_for_each_product_and_kernels_that_move_at_least_its_tokens():
    images, tokens, hidden = 2, 256, 64
    block = DiTBlock(hidden, 1, 4.0, 16)
    counted = count_block(block, torch.randn(images, tokens, hidden, requires_grad=True),
                          torch.randn(images, hidden, requires_grad=True), torch.arange(tokens)[None])
    # Five linear layers and attention, and in the backward pass two products for each layer.
    assert (counted["forward"]["calls"], counted["backward"]["calls"]) == (6, 11)
    stream = images * tokens * hidden * 4  # bytes of the tokens in float32
    for row, most in zip(counted.values(), (100, 200), strict=True):
        assert 10 <= row["kernels"] <= 40 and 4 * stream < row["bytes"] < most * stream
    assert counted["backward"]["bytes"] > counted["forward"]["bytes"]
