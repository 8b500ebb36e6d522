"""Guidance: which passes run, on which labels, tokens and noise levels, and that they are extrapolated as written."""

from types import SimpleNamespace

import pytest
import torch
from test_rf import noise_and_labels, small_dit

from edm import EDM
from guidance import Guidance, ratio_at
from rf import RF
from routing_module import Route

T = 0.7  # the noise level of the single evaluations below
EDM_, RF_ = EDM(), RF()
both = pytest.mark.parametrize("diffusion, predict", [(EDM_, EDM_.denoise), (RF_, RF_.velocity)], ids=["edm", "rf"])


def watch(net):
    """Records each call's labels, the tokens (B, K) that its route kept, and how many the routed block saw."""
    seen, get_mask = SimpleNamespace(labels=[], kept=[], lengths=[]), net.router.get_mask

    def recorded(*args):
        seen.kept.append(get_mask(*args))
        return seen.kept[-1]

    net.router.get_mask = recorded
    net.register_forward_pre_hook(lambda net, args: seen.labels.append(args[2].tolist()))
    net.blocks[1].register_forward_pre_hook(lambda block, args: seen.lengths.append(args[0].shape[1]))
    return seen


def same(a, b):
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def once(predict, net, guidance, t=T, step=2):
    """One guided evaluation, in a sampling of 5 steps."""
    noise, y = noise_and_labels()
    return guidance.guide(predict, net, noise, y, num_steps=5)(noise, t, step)


@torch.no_grad()
def passes(predict, net, y=None):
    noise, labels = noise_and_labels()
    return predict(net, noise, torch.full((3,), T), labels if y is None else y)


@both
def test_guidance_by_a_scale_alone_is_classifier_free_in_one_doubled_batch(diffusion, predict):
    net, (_, y) = small_dit(), noise_and_labels()
    strong, weak, seen = passes(predict, net), passes(predict, net, torch.full((3,), 10)), watch(net)
    assert same(once(predict, net, Guidance(scale=2.5)), weak + 2.5 * (strong - weak))
    assert same(once(predict, net, Guidance(scale=0)), weak)  # huggingface/diffusers#9680: 0 was as 1
    assert not torch.allclose(strong, weak, atol=1e-2)
    assert seen.labels == [y.tolist() + [10] * 3] * 2 and seen.lengths == [16] * 2


@both
def test_scale_1_is_the_strong_pass_bit_for_bit_and_one_pass(diffusion, predict):
    net, (_, y) = small_dit(), noise_and_labels()
    seen = watch(net)
    assert torch.equal(once(predict, net, Guidance(1)), passes(predict, net))
    assert torch.equal(once(predict, net, Guidance(1, 0, 0.7, net2=small_dit(1))), passes(predict, net))
    assert seen.labels == [y.tolist()] * 4 and not seen.kept
    once(predict, net, Guidance(1, 0.25, 0.75))
    assert [kept.shape for kept in seen.kept] == [(3, 12)]


@both
def test_passes_that_share_network_and_ratio_share_a_batch_and_its_masks_and_are_one_if_they_share_labels(
        diffusion, predict):
    net, (_, y) = small_dit(), noise_and_labels()
    strong = once(predict, net, Guidance(1, 0.5, 0.5))
    seen = watch(net)
    assert not same(once(predict, net, Guidance(3, 0.5, 0.5)), strong)
    assert torch.equal(once(predict, net, Guidance(3, 0.5, 0.5, drop_label=False)), strong)
    assert seen.labels == [y.tolist() + [10] * 3, y.tolist()] and seen.lengths == [8, 8]
    assert torch.equal(seen.kept[0][:3], seen.kept[0][3:]) and torch.equal(seen.kept[0][:3], seen.kept[1])


@both
@pytest.mark.parametrize("drop_label", [True, False])
def test_different_ratios_are_two_calls_and_the_weak_ones_tokens_are_among_the_strong_ones(
        diffusion, predict, drop_label):
    net, (_, y) = small_dit(), noise_and_labels()
    seen = watch(net)
    once(predict, net, Guidance(1.5, 0.3, 0.7, drop_label))
    assert seen.labels == [y.tolist(), [10] * 3 if drop_label else y.tolist()] and seen.lengths == [12, 5]
    for strong, weak in zip(*(kept.tolist() for kept in seen.kept), strict=True):
        assert set(weak) < set(strong)
    assert len({tuple(row) for row in seen.kept[0].tolist()}) == 3, "each image has its own mask"


@pytest.mark.parametrize("sample", [EDM_.sample, lambda *args, **kw: RF_.sample(*args, solver="heun", **kw)],
                         ids=["edm", "rf"])
def test_each_step_samples_masks_that_heuns_two_evaluations_share(sample):
    net, (noise, y) = small_dit(), noise_and_labels()
    seen = watch(net)
    sample(net, noise, y, num_steps=4, guidance=Guidance(1.5, 0.3, 0.7))
    strong = [kept.tolist() for kept in seen.kept[::2]]  # predictor, corrector, …; the last has no corrector
    assert len(strong) == 7 and {kept.shape[1] for kept in seen.kept[::2]} == {12}
    assert strong[0] == strong[1] and strong[2] == strong[3] and strong[4] == strong[5]
    assert len({str(strong[i]) for i in (0, 2, 4, 6)}) == 4


@both
def test_schedules_lead_from_their_first_ratio_to_their_last_on_a_cosine(diffusion, predict):
    net, guidance = small_dit(), Guidance(1.5, (0.0, 0.6), (0.6, 0.0), drop_label=False)
    seen = watch(net)
    for step in range(5):
        once(predict, net, guidance, step=step)
    # Ratios of 0, 0.088, 0.3, 0.512 and 0.6 of 16 tokens, strong beside weak; where they meet, both are one pass.
    assert seen.lengths == [16, 7, 15, 8, 12, 8, 15, 7, 16]
    assert len(seen.kept) == 7, "a ratio of 0 is the dense network, which draws no mask"
    assert [ratio_at((0.0, 0.6), p) for p in (0, 0.5, 1)] == pytest.approx([0, 0.3, 0.6])
    assert ratio_at((0.0, 0.6), 0.25) == pytest.approx(0.3 * (1 - 0.5**0.5)) and ratio_at(0.4, 0.25) == 0.4


@both
def test_outside_the_interval_only_the_strong_pass_runs(diffusion, predict):
    for t, scale, num_calls in [(0.2, 1, 1), (0.25, 1.5, 2), (0.5, 1.5, 2), (0.75, 1.5, 2), (0.8, 1, 1)]:
        net = small_dit()
        expected, seen = once(predict, net, Guidance(scale, 0.3, 0.7), t), watch(net)
        assert torch.equal(once(predict, net, Guidance(1.5, 0.3, 0.7, interval=(0.25, 0.75)), t), expected)
        assert len(seen.labels) == num_calls


@both
def test_autoguidance_extrapolates_from_another_network(diffusion, predict):
    net, net2 = small_dit(), small_dit(1, hidden_size=16, depth=2)
    strong, weak, null = passes(predict, net), passes(predict, net2), passes(predict, net2, torch.full((3,), 10))
    assert same(once(predict, net, Guidance(2.0, drop_label=False, net2=net2)), weak + 2 * (strong - weak))
    assert same(once(predict, net, Guidance(2.0, net2=net2)), null + 2 * (strong - null))
    assert not torch.allclose(weak, null, atol=1e-2)
    seen, seen2 = watch(net), watch(net2)
    once(predict, net, Guidance(2.0, 0.25, 0.75, drop_label=False, net2=net2))
    assert (seen.lengths, seen2.lengths) == ([12], [4])


@both
def test_routes_given_with_the_guidance_go_before_the_networks_own(diffusion, predict):
    dense, routed = small_dit(routes=[]), small_dit()
    expected = once(predict, routed, Guidance(1.5, 0.3, 0.7))
    assert torch.equal(once(predict, dense, Guidance(1.5, 0.3, 0.7, routes=(Route(1, 1, 0.5),))), expected)
    assert torch.equal(once(predict, dense, Guidance(1.5, 0.3, 0.7, routes=(Route(-2, -2, 0.9),))), expected)
    elsewhere = Guidance(1.5, 0.3, 0.7, routes=(Route(0, 0, 0.5), Route(2, 2, 0.5)))
    assert not torch.allclose(once(predict, routed, elsewhere), expected, atol=1e-3)
    delayed = Guidance(1.5, 0.3, 0.7, routes=(Route(1, 1, 0.5, return_from=0),))
    assert not torch.allclose(once(predict, dense, delayed), expected, atol=1e-3)
    own = small_dit(routes=[Route(1, 1, 0.5, return_from=-3)])
    assert torch.equal(once(predict, dense, delayed), once(predict, own, Guidance(1.5, 0.3, 0.7)))
    assert delayed.record()["routes"] == [{"start_layer_idx": 1, "end_layer_idx": 1, "selection_ratio": 0.5,
                                           "return_from": 0}]


@pytest.mark.parametrize("own, wrong, sentence", [
    (dict(routes=[]), lambda: dict(gamma1=0.3, gamma2=0.5), "gamma1=0.3 needs a network with a route"),
    (dict(), lambda: dict(gamma2=0.5, net2=small_dit(routes=[])), "gamma2=0.5 needs a network with a route"),
    (dict(), lambda: dict(gamma2=0.5, routes=(Route(1, 3, 0.5),)), "with 3 blocks"),
    (dict(), lambda: dict(net2=small_dit(in_channels=3)), r"\(3, 8, 10\), but the strong one \(4, 8, 10\)"),
])
def test_guidance_that_does_not_fit_the_networks_raises_a_one_line_error_before_the_first_step(own, wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        Guidance(1.5, **wrong()).guide(None, small_dit(**own), *noise_and_labels(), num_steps=4)
