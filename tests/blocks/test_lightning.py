"""LightningDiT, dense and on a route, against numbers from the published implementation, and its weights."""

import pytest
import torch
from test_published_parity import Pointwise, assert_equal, fill, names, noise_that_keeps, published, wave
from torch import Tensor

from blocks.transformer import rotary_angles, rotate
from dit import DiT, DiT_models, infer_architecture
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


def test_the_initial_weights_have_the_spread_of_the_published_ones():
    torch.manual_seed(0)
    for key, weight in DiT(**TINY, qk_norm=True).state_dict().items():
        if THEIRS["init"][key]:
            assert weight.std().item() == pytest.approx(THEIRS["init"][key], rel=0.1), key
        else:
            assert (weight == THEIRS["init_constant"][key]).all(), key


def pointwise(z: Tensor, t: Tensor, y: Tensor, routes=()) -> Tensor:
    """The network of the published side, where t is 1 at the data and the velocity points to it."""
    return -Pointwise()(z, 1 - t, y)


@pytest.mark.parametrize("case", THEIRS["loss"], ids=names(THEIRS["loss"]))
def test_the_loss_with_its_cosine_term_equals_hustvl_lightningdit(case):
    x, eps = wave(case["shape"], amplitude=0.7), wave(case["shape"], 1, 1.4)
    t, y = torch.tensor(case["t"]), torch.tensor(case["y"])
    for weight in (0, 0.25, 1):
        loss = RF(cosine_weight=weight).loss(pointwise, x, y, t=1 - t, eps=eps)
        expected = [squared + weight * cosine for squared, cosine in zip(case["squared"], case["cosine"], strict=True)]
        assert loss.tolist() == pytest.approx(expected, rel=1e-5)


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


@pytest.mark.parametrize("model", ["LightningDiT-B/1", "LightningDiT-L/2"])  # 2048 hidden units, and 2730 of 2730.67
@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "input_size": 16, "in_channels": 32}])
def test_the_architecture_is_read_off_the_weights(model, options):
    with torch.device("meta"):
        net = DiT_models[model](**options)
    read = infer_architecture(net.state_dict())
    assert read == {**DiT_models[model].keywords, "mlp_ratio": 4.0, "input_size": 32, "in_channels": 4,
                    "num_classes": 1000, "learn_sigma": False, "qk_norm": False, **options}
