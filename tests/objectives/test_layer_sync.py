"""LayerSync: the published loss and gradient, and which tokens it compares on a route."""

import pytest
import torch
from test_objectives import batch, loss_of, objective_of, plain_loss, published_loss, with_places
from test_published_parity import TINY, fill, published
from torch.nn.functional import cosine_similarity, normalize

from dit import DiT
from objectives import build_objective
from rf import RF
from routing_module import Route
from weights.others import reverse_time

THEIRS = published("layer_sync")


@pytest.mark.parametrize("case", THEIRS["cases"], ids=lambda case: case["name"])
def test_loss_and_gradient_equal_those_of_layersync(case):
    net = fill(DiT(**TINY))
    net.load_state_dict(reverse_time(net.state_dict()))
    loss, terms = published_loss(build_objective(net, RF(), {"layer_sync": case["settings"]}), THEIRS)
    assert terms["layer_sync"].tolist() == pytest.approx(case["layer_sync"], abs=1e-5)
    torch.testing.assert_close(loss, torch.tensor(case["denoising"]) + 0.2 * terms["layer_sync"], rtol=0, atol=1e-5)
    weights = [net.get_parameter(name) for name in THEIRS["parameters"]]
    for value, name in ((terms["layer_sync"].mean(), "gradient_norms"), (loss.mean(), "gradient_norms_of_the_sum")):
        gradients = torch.autograd.grad(value, weights, retain_graph=True, allow_unused=True)
        norms = [0.0 if gradient is None else gradient.norm().item() for gradient in gradients]
        assert norms == pytest.approx(case[name], abs=1e-5)


@pytest.mark.parametrize(("routes", "block", "deeper", "kept"), [
    ([], 0, 3, 16), ([Route(1, 2, 0.5)], 1, 2, 8), ([Route(1, 2, 0.5)], 1, 3, 8), ([Route(1, 2, 0.5)], 0, 2, 8),
    ([Route(1, 1, 0.5), Route(2, 2, 0.25)], 0, 3, 16),
], ids=["dense", "both inside", "the deeper one after", "the first one before", "around two routes"])  # fmt: skip
def test_each_token_is_aligned_with_itself_and_on_a_route_only_the_kept_ones(routes, block, deeper, kept):
    objective = objective_of("layer_sync", routes, block=block, deeper=deeper)
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
    torch.testing.assert_close(loss, plain_loss(routes) + 0.2 * terms["layer_sync"])


def test_no_gradient_reaches_what_only_the_deeper_tokens_pass():
    objective = objective_of("layer_sync", [Route(1, 2, 0.5)], block=1, deeper=2)
    loss_of(objective)[1]["layer_sync"].mean().backward()
    assert [any(p.grad is not None for p in block.parameters()) for block in objective.net.blocks] == [
        True, True, False, False]


def test_a_samples_loss_does_not_depend_on_the_others_so_ranks_and_parts_add_up_to_one_batch():
    objective = objective_of("layer_sync", block=1, deeper=3)
    x, y, _ = batch()
    sigma, eps = objective.diffusion.draw(x)
    objective.diffusion.draw = lambda part: (sigma[at], eps[at])
    losses, synced = [], []
    for at in (slice(0, 4), slice(0, 2), slice(2, 4)):
        loss, terms = objective(x[at], y[at])
        losses.append(loss)
        synced.append(terms["layer_sync"])
    for complete, *parts in (losses, synced):
        torch.testing.assert_close(torch.cat(parts), complete)


def test_under_autocast_the_angle_is_computed_in_float32():
    objective = objective_of("layer_sync", block=1, deeper=2)
    with torch.autocast("cpu", torch.bfloat16):
        _, terms = loss_of(objective)
    one, other = (objective.hidden[i][0].double() for i in (1, 2))
    exact = -cosine_similarity(one, other, dim=-1).mean(dim=1)
    torch.testing.assert_close(terms["layer_sync"].double(), exact, rtol=0, atol=1e-6)
