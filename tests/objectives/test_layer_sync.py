"""LayerSync: the published loss and gradient, whose tokens meet on a route, and what is refused."""

import pytest
import torch
from test_alignment import batch, network, plain_loss, with_places
from test_published_parity import TINY, fill, published, wave
from torch.nn.functional import normalize

from dit import DiT
from edm import EDM
from objectives import DiffusionLoss
from objectives.layer_sync import LayerSync
from rf import RF
from routing_module import Route
from weights.others import onto_our_time

THEIRS = published("layer_sync")


class Fixed(RF):
    """Flow matching at the published side's noise levels and noise."""

    def draw(self, x):
        return torch.tensor(THEIRS["t"]), wave(THEIRS["shape"], 1, 1.4)


@pytest.mark.parametrize("case", THEIRS["cases"], ids=lambda case: case["name"])
def test_loss_and_gradient_equal_those_of_layersync(case):
    net = fill(DiT(**TINY))
    net.load_state_dict(onto_our_time(net.state_dict()))
    objective = LayerSync(DiffusionLoss(net, Fixed()), **case["settings"])
    loss, terms = objective(wave(THEIRS["shape"], amplitude=0.7), torch.tensor(THEIRS["y"]))
    assert terms["layer_sync"].tolist() == pytest.approx(case["layer_sync"], abs=1e-5)
    torch.testing.assert_close(loss, torch.tensor(case["denoising"]) + 0.2 * terms["layer_sync"], rtol=0, atol=1e-5)
    weights = [net.get_parameter(name) for name in THEIRS["parameters"]]
    for value, name in ((terms["layer_sync"].mean(), "gradient_norms"), (loss.mean(), "gradient_norms_of_the_sum")):
        gradients = torch.autograd.grad(value, weights, retain_graph=True, allow_unused=True)
        norms = [0.0 if gradient is None else gradient.norm().item() for gradient in gradients]
        assert norms == pytest.approx(case[name], abs=1e-5)


def of(routes=(), depth=4, **settings) -> LayerSync:
    return LayerSync(DiffusionLoss(network(routes, depth), EDM()), **settings)


def loss_of(objective):
    x, y, _ = batch()
    torch.manual_seed(5)
    return objective(x, y)


@pytest.mark.parametrize(("routes", "block", "deeper", "kept"), [
    ([], 0, 3, 16), ([Route(1, 2, 0.5)], 1, 2, 8), ([Route(1, 2, 0.5)], 1, 3, 8), ([Route(1, 2, 0.5)], 0, 2, 8),
    ([Route(1, 1, 0.5), Route(2, 2, 0.25)], 0, 3, 16),
], ids=["dense", "both inside", "the deeper one after", "the first one before", "around two routes"])  # fmt: skip
def test_each_token_is_aligned_with_itself_and_on_a_route_only_the_kept_ones(routes, block, deeper, kept):
    objective = of(routes, block=block, deeper=deeper)
    seen = with_places(objective)
    loss, terms = loss_of(objective)
    at = [[dict(zip(places.tolist(), tokens, strict=True))
           for tokens, places in zip(seen[i][0], seen[i][1].expand(4, -1), strict=True)]
          for i in (block, deeper)]  # by block and sample, the tokens by their place
    met = []
    for one, other in zip(*at, strict=True):
        common = sorted(one.keys() & other.keys())
        assert len(common) == kept
        met.append(-sum(normalize(one[i], dim=0) @ normalize(other[i], dim=0) for i in common) / kept)
    torch.testing.assert_close(terms["layer_sync"], torch.stack(met))
    torch.testing.assert_close(loss, plain_loss(routes)[0] + 0.2 * terms["layer_sync"])


def test_no_gradient_reaches_what_only_the_deeper_tokens_pass():
    objective = of([Route(1, 2, 0.5)], block=1, deeper=2)
    loss_of(objective)[1]["layer_sync"].mean().backward()
    trained = {name.split(".")[1]
               for name, p in objective.net.named_parameters() if name.startswith("blocks.") and p.grad is not None}
    assert trained == {"0", "1"}


def test_a_samples_loss_does_not_depend_on_the_others_so_ranks_and_parts_add_up_to_one_batch():
    objective = of(block=1, deeper=3)
    x, y, _ = batch()
    sigma, eps = objective.diffusion.draw(x)
    objective.diffusion.draw = lambda part: (sigma[at], eps[at])
    at = slice(0, 4)
    whole = objective(x, y)
    for at in (slice(0, 2), slice(2, 4)):
        loss, terms = objective(x[at], y[at])
        torch.testing.assert_close(loss, whole[0][at])
        torch.testing.assert_close(terms["layer_sync"], whole[1]["layer_sync"][at])


@pytest.mark.parametrize(("depth", "blocks"), [(28, (7, 15)), (24, (7, 15)), (12, (3, 7)), (6, (1, 3)), (2, (0, 1))])
def test_the_default_blocks_are_the_papers_or_a_third_and_two_thirds(depth, blocks):
    objective = of(depth=depth)
    assert (objective.block, objective.deeper, objective.weight) == (*blocks, 0.2)


def test_under_autocast_the_angle_is_computed_in_float32():
    objective = of(block=1, deeper=2)
    with torch.autocast("cpu", torch.bfloat16):
        _, terms = loss_of(objective)
    one, other = (objective.hidden[i][0].double() for i in (1, 2))
    exact = -torch.nn.functional.cosine_similarity(one, other, dim=-1).mean(dim=1)
    torch.testing.assert_close(terms["layer_sync"].double(), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("routes", "settings", "says"), [
    ([], dict(block=2, deeper=2), "deeper=2 does not come after block=2"),
    ([], dict(block=-1), "does not come after block=-1"), ([], dict(deeper=9), "Block 9 is not in this network"),
    ([Route(0, 1, 0.5), Route(2, 3, 0.5)], dict(block=1, deeper=2), "block 1 lies on route 0→1 .* and block 2 on 2→3"),
])  # fmt: skip
def test_settings_that_do_not_fit_raise_a_one_line_error(routes, settings, says):
    with pytest.raises(ValueError, match=says):
        of(routes, **settings)
