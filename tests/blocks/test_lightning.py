"""LightningDiT's start and its rotary positions; published numbers: test_published_parity.py."""

import pytest
import torch
from test_published_parity import TINY_LIGHTNING

from blocks.transformer import rotary_angles, rotate
from dit import DiT
from rf import RF


def test_a_network_whose_output_is_zero_gets_a_small_gradient():
    net = DiT(**TINY_LIGHTNING)
    x, y = torch.randn(4, 4, 8, 8), torch.zeros(4, dtype=torch.int64)
    assert (net(x, torch.rand(4), y) == 0).all()
    RF(cosine_weight=1).loss(net, x, y).mean().backward()
    assert 0 < net.final_layer.linear.weight.grad.abs().max() < 10


def test_a_product_of_rotated_queries_and_keys_depends_on_their_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 16)

    def product(at_q: tuple[int, int], at_k: tuple[int, int]) -> float:
        turned = [rotate(each, rotary_angles(torch.tensor([[row * 9 + column]]), 9, 16))
                  for each, (row, column) in ((q, at_q), (k, at_k))]
        return (turned[0] * turned[1]).sum().item()

    assert product((1, 2), (4, 3)) == pytest.approx(product((5, 7), (8, 8)), abs=1e-5)
    for other in ((4, 4), (5, 3), (3, 4)):  # one column further, one row further, rows and columns changed
        assert abs(product((1, 2), (4, 3)) - product((1, 2), other)) > 1e-3
