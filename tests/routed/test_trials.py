"""What a trial of a block sees, costs, and leaves as it was."""

import threading
import warnings

import pytest
import torch
from oracle import BATCH, N, randn
from small_networks import TABLE, Attention, D, X, made
from test_situations import attention
from torch import nn

from routed import Route, by_place, routed

MIDDLE, HALF = [Route(1, 2, 0.5)], [Route(0, -1, 0.5)]


def test_after_three_passes_without_a_verdict_a_warning_is_raised_and_trials_stop():
    seen = []
    net = made(lambda self, x: seen.append(1) or x + self.out(x) * 1e-12).model
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(5):
            with routed(net, HALF, blocks="blocks"):
                net(x=X)
            seen.append(0)
    [said] = {str(w.message) for w in warned}       # by default, equal warnings are shown once
    assert "could not be tried in 3 passes (it adds nothing yet)" in said
    assert seen[-5:] == [1, 1, 1, 1, 0]


def test_a_block_that_fails_only_in_its_trial_is_not_refused():
    """As one whose weights come from elsewhere when it is called."""
    def block(self, x):
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("no weights")
        return self.attend(x)

    net = made(block).model
    with routed(net, MIDDLE, blocks="blocks") as routing:
        net(x=X)
    assert routing.trials == [] and routing.ids_keep[0].shape == (BATCH, N // 2)


class Cache:
    """As of keys and values: an object that blocks change."""

    def __init__(self):
        self.rows = []

    def update(self, x):
        self.rows.append(x.detach())


class Recorded(nn.Module):
    """Attention with everything that a forward may leave behind, which counts its calls."""

    def __init__(self):
        super().__init__()
        self.attend, self.norm, self.drop = Attention(), nn.BatchNorm1d(D), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(N))
        self.calls, self.sizes = 0, []

    def forward(self, x, losses, cache):
        self.calls += 1
        self.sizes.append(tuple(x.shape))
        self.seen[0] += 1
        losses.append(x.square().mean().item())
        cache.update(x)
        return self.drop(self.attend(self.norm(x.mT).mT)) + torch.rand(()) * 0 + x


def test_a_trial_leaves_the_network_its_arguments_and_the_random_numbers_as_they_were():
    def trained(**options):
        losses, cache = [], Cache()
        net = made(attention, lambda part, x: part(x, losses, cache),
                   make=lambda parts: nn.ModuleList(Recorded() for _ in range(3))).model
        torch.manual_seed(1)
        with routed(net.train(), MIDDLE, blocks="blocks", **options):
            for _ in range(2):
                net(x=X).square().mean().backward()
        assert all(part.training for part in net.modules()) and [part.calls for part in net.blocks] == [2] * 3
        tensors = [*(p.grad for p in net.parameters()), *net.state_dict().values(), *cache.rows, torch.get_rng_state()]
        return [part.sizes for part in net.blocks], losses, len(tensors), tensors

    (*found, tensors), (*expected, without) = trained(), trained(probe=False)
    assert found == expected and all(map(torch.equal, tensors, without))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_trial_runs_in_float32_at_least(dtype):
    net = made(attention).model.to(dtype)
    with torch.no_grad(), routed(net, HALF, blocks="blocks") as routing:
        net(x=X.to(dtype))
    assert len(routing.trials) == 4
    assert all(row.dtype == torch.float32 and row.deviation < 1e-5 < row.tolerance < 2e-3 for row in routing.trials)


def test_a_block_with_a_kernel_for_half_alone_has_the_tolerance_of_half():
    def summed_in_half(self, x):
        tokens = x.to(torch.bfloat16).unbind(1)
        if tokens[0].dtype == torch.float32:
            raise RuntimeError("only half is supported, as by flash attention")
        return x + self.out((sum(tokens) / len(tokens)).float())[:, None]

    with routed(made(summed_in_half).model, HALF, blocks="blocks") as routing:
        routing.network(x=randn(BATCH, N, D))
    assert len(routing.trials) == 4 and max(row.deviation for row in routing.trials) > 2e-4


def test_a_description_that_is_made_anew_in_each_step_is_tried_once():
    seen = []
    net = made(lambda self, x, rope: seen.append(self.number) or self.attend(x, rope),
               lambda part, x: part(x, lambda q: q * TABLE)).model
    for _ in range(3):
        with routed(net, HALF, blocks="blocks", along={"rope": by_place(2)}):
            net(x=X)
    assert len(seen) == 3 * 4 + 2 * 4       # two more forwards of each block
