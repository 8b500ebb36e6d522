"""The user chooses which tokens are kept: by a mask, or by a router."""

import pytest
import torch
from library_networks import family
from oracle import BATCH, Case, N, assert_exact, randn, refused
from small_networks import X, made
from test_libraries import noise_for
from test_situations import attention

from routed import Route, Router, routed

MASKED = ("FluxTransformer2DModel, Kontext", "Flux2Transformer2DModel", "SD3Transformer2DModel",
          "WanTransformer3DModel", "ZImageTransformer2DModel", "Lumina2Transformer2DModel",
          "QwenImageTransformer2DModel, edit", "VisionTransformer, registers")
ALL_BUT_A_QUARTER, K = [Route(0, -1, 0.75)], 4


def mask_for(case: Case, *counts: int) -> torch.Tensor:
    """Keeps so many tokens of each sample, anywhere."""
    order = torch.rand(BATCH, case.n, generator=torch.Generator().manual_seed(6)).argsort(1).argsort(1)
    return order < torch.tensor(counts)[:, None]


def are_kept(mask: torch.Tensor, ids: torch.Tensor) -> bool:
    return bool(torch.zeros_like(mask).scatter(1, ids, True)[mask].all())


@pytest.mark.parametrize("name", MASKED)
def test_tokens_of_keep_mask_are_kept_or_an_error_has_the_numbers(name):
    case, noise, few = family(name), noise_for(family(name)), family(name).n // 4
    mask = mask_for(case, 0, 1, few)
    [ids], _ = assert_exact(case, ALL_BUT_A_QUARTER, keep_mask=mask, mask_noise=noise)
    assert torch.equal(ids, Router().get_mask(torch.empty(BATCH, case.n, 1), 0.75, noise[:, 0], mask))
    assert are_kept(mask, ids)
    for most in (few + 1, case.n):          # as many are kept as the mask keeps in any sample
        mask = mask_for(case, 0, most, 2)
        [ids], _ = assert_exact(case, ALL_BUT_A_QUARTER, keep_mask=mask)
        assert ids.shape == (BATCH, most) and are_kept(mask, ids)
        assert f"of a sample, but at selection ratio 0.75 only {few} of {case.n} are kept" in refused(
            case.model, ALL_BUT_A_QUARTER, case.call, keep_mask=mask, grow=False)


def test_a_callable_mask_reads_the_arguments_of_each_call():
    case = family("FluxTransformer2DModel")

    def bright(call):
        return call["hidden_states"].mean(-1) > call["hidden_states"].mean(-1).topk(K).values[:, -1:] - 1e-6

    with torch.no_grad(), routed(case.model, ALL_BUT_A_QUARTER, keep_mask=bright) as routing:
        for seed in (1, 2):
            x = randn(BATCH, N, 4, seed=seed)
            case.call(hidden_states=x)
            assert torch.equal(routing.ids_keep[0], x.mean(-1).topk(K).indices.sort(1).values)


def test_tokens_are_selected_by_the_router_that_is_given():
    net, last_rows = made(attention).model, Router()
    last_rows.score = lambda x, noise: -torch.arange(N).expand(BATCH, -1)      # one's own
    for router, expected in ((Router("grid"), None), (last_rows, torch.arange(N - K, N).expand(BATCH, -1))):
        with routed(net, ALL_BUT_A_QUARTER, blocks="blocks", router=router) as routing:
            net(x=X)
        ids = routing.ids_keep[0]
        if expected is None:                # one token of each 2 x 2
            ids, expected = ids // 4 // 2 * 2 + ids % 4 // 2, torch.arange(4).expand(BATCH, -1)
        assert torch.equal(ids.sort(1).values, expected.sort(1).values)
