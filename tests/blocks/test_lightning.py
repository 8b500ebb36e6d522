"""LightningDiT, dense and on a route, against numbers from the published implementation, and the seams of its block."""

import pytest
import torch
from test_published_parity import assert_equal, fill, names, noise_that_keeps, published, wave

from blocks.transformer import rotary_angles, rotate
from dit import DiT
from rf import RF
from routing_module import Route

THEIRS, ROUTED = published("lightning"), published("lightning_tread")
TINY = dict(input_size=8, patch_size=2, in_channels=4, hidden_size=64, depth=3, num_heads=4, num_classes=10,
            block="lightning")


def filled(net: DiT) -> DiT:
    """As fill, with one added to the weights of norms, as the published side did."""
    for key, weight in fill(net).state_dict().items():
        if "norm" in key:
            weight += 1
    return net


@pytest.mark.parametrize("case", THEIRS["forward"], ids=names(THEIRS["forward"]))
@torch.no_grad()
def test_a_dense_forward_equals_hustvl_lightningdit(case):
    net = filled(DiT(**TINY | case["config"]))
    assert_equal(net(wave(case["shape"], amplitude=1.4), torch.tensor(case["t"]), torch.tensor(case["y"])), case["out"])


@pytest.mark.parametrize("case", ROUTED["routed"], ids=names(ROUTED["routed"]))
@torch.no_grad()
def test_a_routed_forward_equals_lightningdit_tread(case):
    net = filled(DiT(**TINY | case["config"], routes=[Route(2, -4, 0.5)]))      # their blocks 2 to depth - 4, inclusive
    mask_noise = noise_that_keeps(case["ids_keep"], net.pos_embed.shape[1])     # in their own order
    x, t, y = wave(case["shape"], amplitude=1.4), torch.tensor(case["t"]), torch.tensor(case["y"])
    assert_equal(net(x, t, y, routes=net.routes, mask_noise=mask_noise), case["out"])


def test_a_network_whose_output_is_zero_gets_a_small_gradient():
    net = DiT(**TINY)
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
