"""The user chooses which tokens are kept: by a mask, a selection, and routes that change with the step."""

from fractions import Fraction

import pytest
import torch
from foreign_networks import BATCH, K, N, assert_close, example, family, gradients, noise_for, randn, refused
from test_routed import FLUX, TWO, assert_as_if_given_only_them, in_training, tread

from routed import Route, Router, routed

FORCED = ("FluxTransformer2DModel, Kontext", "Flux2Transformer2DModel", "SD3Transformer2DModel",
          "WanTransformer3DModel", "ZImageTransformer2DModel", "Lumina2Transformer2DModel",
          "QwenImageTransformer2DModel, edit", "VisionTransformer, registers")
ALL_BUT_A_QUARTER = [Route(0, -1, 0.75)]


def mask_for(case, *counts):
    """Keeps so many tokens of each sample, anywhere."""
    order = torch.rand(BATCH, case.n, generator=torch.Generator().manual_seed(6)).argsort(1).argsort(1)
    return order < torch.tensor(counts)[:, None]


@pytest.mark.parametrize("name", FORCED)
def test_tokens_of_keep_mask_are_kept_and_come_out_as_if_the_network_had_only_the_kept_ones(name):
    case, noise, mask = family(name), noise_for(family(name)), mask_for(family(name), 0, 1, family(name).k)
    ids, _ = assert_as_if_given_only_them(case, keep_mask=mask, mask_noise=noise)
    assert torch.equal(ids, Router().get_mask(torch.empty(BATCH, case.n, 1), 0.75, noise[:, 0], mask))
    for b in range(BATCH):
        assert set(mask[b].nonzero().flatten().tolist()) <= set(ids[b].tolist())


@pytest.mark.parametrize("name", FORCED)
def test_as_many_tokens_are_kept_as_the_mask_keeps_in_any_sample_or_an_error_has_the_numbers(name):
    case, few = family(name), family(name).k
    for most in (few + 1, case.n):
        mask = mask_for(case, 0, most, 2)
        with torch.no_grad(), routed(case.model, ALL_BUT_A_QUARTER, keep_mask=mask) as routing:
            case.call()
        assert routing.ids_keep[0].shape == (BATCH, most)
        assert set(mask[1].nonzero().flatten().tolist()) == set(routing.ids_keep[0][1].tolist())
        assert f"keeps more tokens than the {few} of {case.n} that are kept at selection ratio 0.75" in refused(
            case.model, ALL_BUT_A_QUARTER, case.call, keep_mask=mask, grow=False)


def test_k_grows_exactly_whatever_the_number_of_tokens():
    for length in range(1, 130):
        for stay in range(1, length + 1):
            assert length - int(length * Fraction(length - stay, length)) == stay


def test_a_callable_mask_reads_the_arguments_of_each_call():
    case = family(FLUX)

    def bright(call):
        return call["hidden_states"].mean(-1) > call["hidden_states"].mean(-1).topk(K).values[:, -1:] - 1e-6

    with torch.no_grad(), routed(case.model, ALL_BUT_A_QUARTER, keep_mask=bright) as routing:
        for seed in (1, 2):
            x = randn(BATCH, N, 4, seed=seed)
            case.call(hidden_states=x)
            assert torch.equal(routing.ids_keep[0], x.mean(-1).topk(K).indices.sort(1).values)


@pytest.mark.parametrize(("mask", "says"), [
    ([[True] * N] * BATCH, "keep_mask is list, but it must be torch.bool (3, 16)"),
    (lambda call: None, "keep_mask is NoneType, but it must be torch.bool (3, 16)"),
    (torch.ones(BATCH, N), "torch.float32 (3, 16), but it must be torch.bool (3, 16)"),
    (torch.ones(BATCH, N + 5, dtype=torch.bool), "(3, 21), but it must be torch.bool (3, 16)")])
def test_a_mask_of_another_kind_or_size_is_refused(mask, says):
    assert says in refused(family(FLUX).model, TWO, family(FLUX).call, keep_mask=mask)


def test_gradient_checkpointing_uses_the_number_of_tokens_that_a_mask_raised():
    def trained(checkpointed):
        case = in_training(FLUX, checkpointed)
        with routed(case.model, TWO, keep_mask=mask_for(case, 3, 13, 1)) as routing:
            out = case.tokens(case.call())
        assert [ids.shape[1] for ids in routing.ids_keep] == [13, 13]
        out.square().mean().backward()
        return gradients(case.model)

    assert_close(trained(True), trained(False))


def test_a_compiled_network_keeps_the_tokens_of_a_mask_in_one_graph_or_raises_an_error():
    torch._dynamo.reset()
    graphs, case, edit = [], example(FLUX), example("FluxTransformer2DModel, Kontext")

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(case.model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for counts in ((8, 0, 1), (2, 5, 8)):
            noise, mask = noise_for(case, 2), mask_for(case, *counts)
            with routed(case.model, TWO, keep_mask=mask, mask_noise=noise) as routing:
                expected, ids = case.call(), routing.ids_keep
            with routed(compiled, TWO, keep_mask=mask, mask_noise=noise, grow=False) as routing:
                assert torch.allclose(case.call(compiled), expected, atol=1e-5)
            assert all(map(torch.equal, ids, routing.ids_keep)) and len(graphs) == 1
        with pytest.raises(RuntimeError, match="keeps more tokens than are kept"), \
             routed(compiled, TWO, keep_mask=mask_for(case, 9, 0, 0), grow=False):
            case.call(compiled)
        compiled = torch.compile(edit.model, backend=backend, fullgraph=True)
        with pytest.raises(RuntimeError, match="With condition images compile the blocks"), routed(compiled, TWO):
            edit.call(compiled)


class Rows(Router):
    """One's own selection: the tokens that stay are the first ones."""

    def score(self, x, noise):
        return torch.arange(noise.shape[1]).expand(len(noise), -1).float()


def test_tokens_are_selected_by_the_router_that_is_given():
    case, seen = family(FLUX), []
    hook = case.blocks[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args or [*kwargs.values()])[0]), with_kwargs=True)
    with torch.no_grad():
        case.call()
        hook.remove()
        norm = seen[0].abs().sum(-1)
        for router, expected in ((Router("l1", l1_reg=1.0), norm.topk(K).indices),
                                 (Router("l1", 1.0, inverse=True), (-norm).topk(K).indices), (Router("grid"), None),
                                 (Rows(), torch.arange(K).expand(BATCH, -1))):
            with routed(case.model, ALL_BUT_A_QUARTER, router=router) as routing:
                case.call()
            ids = routing.ids_keep[0]
            if expected is None:            # one token of each 2 x 2
                ids, expected = ids // 4 // 2 * 2 + ids % 4 // 2, torch.arange(4).expand(BATCH, -1)
            assert torch.equal(ids.sort(1).values, expected.sort(1).values)


def test_the_routes_of_a_step_are_an_argument_so_that_the_last_steps_are_dense():
    net, routes, steps, seen = tread(), [Route(1, -2, 0.5)], 20, []
    x, t, y = randn(4, 3, 8, 8), torch.rand(4), torch.tensor([0, 1, 4, 5])
    for step in range(steps):
        with routed(net, routes if step < 0.85 * steps else ()) as routing:
            out = net(x, t, y)
        seen.append([ids.shape[1] for ids in routing.ids_keep])
    assert seen == [[8]] * 17 + [[]] * 3 and torch.equal(out, net(x, t, y))
