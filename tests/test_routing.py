"""A route takes a random share of the tokens out, and gives each of them back where it was."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dit import DiT
from routing_module import Route, Router, resolve_routes

router = Router()


def tokens(batch=4, num_tokens=16, dim=8, **kwargs):
    return torch.randn(batch, num_tokens, dim, **kwargs)


ROUTERS = [Router(), Router("grid")]


@settings(deadline=None)
@given(selector=st.sampled_from(ROUTERS), half=st.integers(1, 8), batch=st.integers(1, 5), seed=st.integers(0, 99),
       ratio=st.floats(0, 1, exclude_max=True), higher=st.floats(0, 1, exclude_max=True))
def test_a_mask_keeps_the_right_number_of_distinct_tokens_of_each_sample_in_raster_order(selector, half, batch, seed,
                                                                                        ratio, higher):
    torch.manual_seed(seed)
    x, noise, num_tokens = tokens(batch, 4 * half**2), torch.rand(batch, 4 * half**2), 4 * half**2
    ids = selector.get_mask(x, ratio, noise)
    assert ids.shape == (batch, num_tokens - int(num_tokens * ratio)) and ids.dtype == torch.int64
    assert (ids[:, 1:] > ids[:, :-1]).all() and ids.min() >= 0 and ids.max() < num_tokens
    back = selector.end_route(selector.start_route(x, ids) + 1, ids, x)
    kept = torch.zeros(batch, num_tokens, dtype=torch.bool).scatter_(1, ids, True)
    assert torch.equal(back[~kept], x[~kept]) and torch.equal(back[kept], (x + 1)[kept])
    alone = [selector.get_mask(x[[i]], ratio, noise[[i]])[0] for i in range(batch)]
    assert torch.equal(torch.stack(alone), ids), "a sample's mask depends on the others"
    fewer = selector.get_mask(x, max(ratio, higher), noise)
    assert all({*few} <= {*many} for few, many in zip(fewer.tolist(), ids.tolist(), strict=True))


@pytest.mark.parametrize(("selection", "num_tokens", "ratio", "masks"), [
    ("random", 10, 0.5, 252), ("grid", 16, 0.75, 4**4)])
def test_every_token_is_kept_equally_often_and_each_sample_has_its_own_mask(selection, num_tokens, ratio, masks):
    torch.manual_seed(0)
    ids = Router(selection).get_mask(tokens(8000, num_tokens, dim=1), ratio)
    share = torch.zeros(num_tokens).scatter_add_(0, ids.flatten(), torch.ones(ids.numel())) / 8000
    assert (share - (1 - ratio)).abs().max() < 5 * (ratio * (1 - ratio) / 8000) ** 0.5  # five standard deviations
    assert len({tuple(row) for row in ids.tolist()}) == masks


@pytest.mark.parametrize(("routes", "says"), [
    ([Route(2, 12, 0.5)], "leaves it"), ([Route(-13, 5, 0.5)], "leaves it"),
    ([Route(6, 3, 0.5)], "backwards"), ([Route(0, 4, 0.5), Route(4, 8, 0.5)], "overlaps"),
    ([Route(2, 8, 1.0)], "selection_ratio"), ([Route(2, 8, -0.1)], "selection_ratio"),
    ([Route(2, 8, 0.5, return_from=-3)], "return_from=-3, which must be a block up to its start, 2"),
    ([Route(2, 8, 0.5, return_from=-13)], "return_from=-13, which must be a block up to its start"),
    ([Route(1, 4, 0.5), Route(6, 8, 0.5, return_from=4)], "return_from=4, which lies inside route 1→4"),
])
def test_a_route_that_does_not_fit_is_refused_with_its_numbers(routes, says):
    with pytest.raises(ValueError, match=says) as error:
        resolve_routes(routes, 12)
    assert str(routes[-1]) in str(error.value) and "12 blocks" in str(error.value)


def test_a_selection_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="selection=l2 is none of random, grid"):
        Router("l2")


@pytest.mark.parametrize("router", ROUTERS)
def test_tokens_that_must_be_kept_are_and_no_more_are_kept_for_it(router):
    x, keep_mask = tokens(), torch.zeros(4, 16, dtype=torch.bool)
    keep_mask[0, :8] = keep_mask[1, 3] = keep_mask[3, 10:] = True
    for noise in (None, torch.rand(4, 16), torch.ones(4, 16) - 2**-24):
        ids = router.get_mask(x, 0.5, noise, keep_mask)
        stays = torch.zeros(4, 16, dtype=torch.bool).scatter_(1, ids, True)
        assert ids.shape == (4, 8) and stays[keep_mask].all()
    folded = router.keep(noise, keep_mask)
    assert torch.equal(router.get_mask(x, 0.5, folded), ids), "noise carries the tokens that must stay"


@pytest.mark.parametrize(("num_tokens", "kept"), [(256, 85), (4096, 1), (4096, 2)])
def test_the_ratio_that_an_error_of_a_mask_suggests_works(num_tokens, kept):
    keep_mask = torch.arange(num_tokens)[None] < kept
    with pytest.raises(ValueError, match="lower the ratio to") as refused:
        router.get_mask(tokens(1, num_tokens), 1.0, keep_mask=keep_mask)
    told = float(str(refused.value).partition("lower the ratio to ")[2].split()[0])
    assert router.get_mask(tokens(1, num_tokens), told, keep_mask=keep_mask).shape[1] - kept in (0, 1)


def net(routes=(), **kwargs):
    torch.manual_seed(1)
    return DiT(**dict(input_size=8, in_channels=3, hidden_size=32, depth=8, num_heads=2, num_classes=5, routes=routes,
                      init="xavier") | kwargs)


def batch():
    return torch.randn(4, 3, 8, 8), torch.randn(4), torch.tensor([0, 1, 4, 5])


def test_the_call_alone_decides_on_routing():
    model = net([Route(2, -4, 0.5)])
    x, t, y = batch()
    dense = net()(x, t, y)
    for mode in (True, False):
        assert torch.equal(model.train(mode)(x, t, y), dense)
        assert not torch.allclose(model(x, t, y, routes=model.routes), dense)


@pytest.mark.parametrize("route", [Route(-10, 8, 0.5), Route(2, -4, 0.5), Route(2, 99, 0.5), Route(5, 3, 0.5)])
def test_routes_that_are_not_resolved_are_refused_where_they_are_used(route):
    with pytest.raises(ValueError, match="not resolved for a network of 8 blocks"):
        net()(*batch(), routes=(route,))


@pytest.mark.parametrize(("sources", "wanted"),
                         [((0, None), (0, 5)), ((-6, -4), (2, 4)), ((3, 1), (3, 1)), ((None, 3), (3, 3))])
def test_a_token_comes_back_with_its_value_from_before_the_block_that_the_route_names(sources, wanted):
    model = net([Route(3, 3, 0.5, return_from=sources[0]), Route(5, 6, 0.25, 0.5, -2.0, sources[1])])
    before, kept = [], []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: before.append(args[0]))
        block.register_forward_hook(lambda *args: kept.append(args[2]))
    mask_noise = torch.rand(4, 2, 16)
    model(*batch(), routes=model.routes, mask_noise=mask_noise)
    for r, (route, source) in enumerate(zip(model.routes, wanted, strict=True)):
        ids = router.get_mask(torch.empty(4, 16, 1), route.selection_ratio, mask_noise[:, r])
        stays = torch.zeros(4, 16, dtype=torch.bool).scatter_(1, ids, True)
        value = kept[source - 1] if source in (3, 5) else before[source]  # blocks 3 and 5 see only those that stay
        assert kept[route.start_layer_idx].shape[1] == ids.shape[1], "blocks of a route see its kept tokens alone"
        after, back = before[route.end_layer_idx + 1], route.x_T * before[0] + route.x_D_last * value
        assert torch.equal(after[~stays], back[~stays])
        assert torch.equal(after[stays], kept[route.end_layer_idx].flatten(0, 1))


def test_a_plain_route_returns_the_very_tensor_that_left_and_its_record_leaves_out_defaults():
    before = {0: tokens(), 2: tokens()}
    assert Route(2, -4, 0.5).returning(before) is before[2]
    assert Route(2, -4, 0.5).plain() == {"start_layer_idx": 2, "end_layer_idx": -4, "selection_ratio": 0.5}
    assert Route(**Route(0, 4, 0.0, 1.0).plain()) == Route(0, 4, 0.0, 1.0, 1.0)
    assert resolve_routes([Route(0, -4, 0.5, 1.0, 0.5)], 12) == (Route(0, 8, 0.5, 1.0, 0.5),)
    assert Route(2, 8, 0.5).is_identity and not Route(2, 8, 0.5, return_from=0).is_identity
