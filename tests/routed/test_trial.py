"""Blocks are tried before they are trusted: what no description shows is refused, and known networks pass."""

import copy
import re

import pytest
import torch
from foreign_networks import family
from test_codes import NETWORKS as CODES
from test_codes import Attention, D, N, called, network, table_of
from test_routed import refused
from torch import nn
from torch.nn import functional as F

from routed import Route, by_place, routed
from routed.trial import TRIED, Trials

BATCH, HALF = 3, [Route(0, -1, 0.5)]
X, PLACES = torch.randn(BATCH, N, D), torch.arange(N)


def trials_of(net, call, routes=HALF, **description):
    TRIED.pop(net, None)
    with torch.no_grad(), routed(net, routes, **description) as routing:
        call()
    return routing.trials


def somebodys(block, forward=None, name="SiT", **settings):
    """A network of a known name, whose blocks are somebody's own."""
    def plain(self, x):
        for part in self.blocks:
            x = part(x, None)
        return x

    net = network(name, {"blocks": block}, forward or plain)
    for part in net.blocks:
        vars(part).update(settings)
    return net


def attention(self, x, c=None):
    return self.attend(x)


def rotary(self, x, c=None):
    return self.attend(x, lambda q: q * table_of(PLACES[:x.shape[1]]))


def convolution(self, x, c):
    return self.attend(x) + F.avg_pool1d(x.mT, 3, 1, 1).mT


def windows(self, x, c):
    return self.attend(x.reshape(-1, self.size, D)).reshape(x.shape)


def pooled_keys(self, x, c):
    """As PixArt's kv compression: the keys are those of every second token of the grid."""
    q = self.qkv(x)[..., :D]
    k, v = self.qkv(x[:, ::2])[..., D:].chunk(2, dim=-1)
    return x + self.out(F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("block", [rotary, convolution, windows, pooled_keys])
@pytest.mark.parametrize("words", [{}, dict(blocks="blocks")], ids=["known by name", "described"])
def test_blocks_that_depend_on_where_their_tokens_are_are_refused(block, words):
    net = somebodys(block, size=4)
    said = refused(net, HALF, lambda: net(X), **words)
    assert "block 0 of blocks depends on where its tokens are" in said and "positions inside the block" in said
    deviation, tolerance = map(float, re.search(r"by (\S+) of what it adds \(tolerance (\S+),", said).groups())
    assert deviation > 0.01 > tolerance
    with routed(net, HALF, probe=False, **words):
        net(X)


def test_an_argument_that_nobody_named_is_named_by_the_error():
    net = CODES["LightningDiT"]()
    said = refused(net, HALF, lambda: called(net, X, PLACES), blocks="blocks")
    assert "Cause: the argument feat_rope, which along= does not name" in said


def test_streams_folded_into_the_batch_are_refused_as_each_would_keep_tokens_of_its_own():
    """As lucidrains' residual streams, which its blocks mix."""
    def block(self, x, c):
        streams = x.unflatten(0, (4, -1))
        return self.attend(x + streams.mean(0).repeat(4, 1, 1))

    def forward(self, x):
        x = x.repeat(4, 1, 1)
        for part in self.blocks:
            x = part(x, None)
        return x.unflatten(0, (4, -1)).sum(0)

    net = somebodys(block, forward)
    assert "gets a batch of 12, but the network gets none of this size" in refused(net, HALF, lambda: net(X))


@pytest.mark.parametrize("blocks", [(1, 1), (0, 0), (3, 3), (1, 2), (0, -1)])
def test_blocks_without_their_residual_are_refused_as_it_would_reach_tokens_that_are_away(blocks):
    """Attention and MLP as entries of one list: a token that is away would come back doubled."""
    def forward(self, x):
        for part in self.blocks:
            x = x + part(x, None)
        return x

    net = somebodys(lambda self, x, c: self.attend(x) - x, forward)
    net.blocks.extend(copy.deepcopy(net.blocks))
    said = refused(net, [Route(*blocks, 0.5)], lambda: net(X))
    assert "the network changes the tokens: a residual" in said or "the network fails" in said


def causal(self, x, c):
    return self.attend(x, mask=torch.ones(x.shape[1], x.shape[1]).tril() > 0)


def test_blocks_that_depend_on_order_alone_are_routed_if_the_user_says_so():
    net = somebodys(causal)
    assert "set ordered=True" in refused(net, HALF, lambda: net(X))
    with routed(net, HALF, ordered=True) as routing:
        out = net(X)
    for b, ids in enumerate(routing.ids_keep[0]):
        assert torch.allclose(net(X[b:b + 1, ids])[0], out[b, ids], atol=1e-6)


def test_blocks_of_other_settings_are_tried_too():
    """Only the second pools its keys."""
    net = somebodys(lambda self, x, c: (pooled_keys if self.pools else attention)(self, x, c), pools=False)
    net.blocks[1].pools = True
    assert "block 1 of blocks depends on where" in refused(net, HALF, lambda: net(X))


class Recorded(nn.Module):
    """Attention with everything that a forward may leave behind, which counts its calls."""

    def __init__(self):
        super().__init__()
        self.attend, self.norm, self.drop = Attention(), nn.BatchNorm1d(D), nn.Dropout(0.5)
        self.register_buffer("cache", torch.zeros(BATCH, N, D))
        self.seen, self.calls, self.log = torch.zeros(N), 0, []

    def forward(self, x, c):
        self.calls += 1
        self.log.append(tuple(x.shape))
        self.cache[:, :x.shape[1]] = x.detach()
        self.seen[0] += 1
        return self.drop(self.attend(self.norm(x.mT).mT)) + torch.rand(()) * 0 + x


def test_a_trial_leaves_the_network_and_the_random_numbers_as_they_were_and_happens_once():
    def trained(**words):
        torch.manual_seed(0)
        net = somebodys(attention)
        net.blocks = nn.ModuleList(Recorded() for _ in range(3))
        torch.manual_seed(1)
        with routed(net.train(), [Route(1, 2, 0.5)], **words):
            for _ in range(2):
                net(X).square().mean().backward()
        states = [(part.calls, part.seen, *part.log[::-1][:2], *part.state_dict().values()) for part in net.blocks]
        return net, states, [p.grad for p in net.parameters()], torch.get_rng_state()

    net, tried, gradients, state = trained()
    _, expected, others, other_state = trained(probe=False)
    assert str(tried) == str(expected) and torch.equal(state, other_state) and net.training
    assert all(map(torch.equal, gradients, others)) and all(part.training for part in net.modules())
    assert [len(part.log) for part in net.blocks] == [2, 2 + 2, 2]      # two forwards of the first alike, and no more
    with routed(net, [Route(1, 2, 0.5)]):
        net(X)
    assert [len(part.log) for part in net.blocks] == [3, 5, 3]


def test_similar_blocks_of_a_network_are_tried_once():
    case = family("SD3Transformer2DModel")
    blocks = [row.block for row in trials_of(case.model, case.call)]
    assert blocks == [f"block {i} of transformer_blocks (JointTransformerBlock)" for i in (0, 3)]


@pytest.mark.parametrize("name", CODES)
def test_networks_like_original_codes_pass_wherever_a_route_starts(name):
    net = CODES[name]()
    for routes in (HALF, [Route(1, -1, 0.5)]):
        rows = trials_of(net, lambda: called(net, X, PLACES), routes)
        assert rows and all(row.deviation < 1e-5 for row in rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_trial_runs_in_float32_at_least(dtype):
    net = somebodys(attention).to(dtype)
    [row] = trials_of(net, lambda: net(X.to(dtype)))
    assert row.dtype == torch.float32 and row.deviation < 1e-5 < row.tolerance < 2e-3


def test_compiled_code_is_not_tried(monkeypatch):
    compiled = torch.compile(somebodys(attention), backend="eager")
    monkeypatch.setattr(Trials, "measure", None)
    with routed(compiled, HALF):
        compiled(X)


def test_a_network_that_is_never_called_in_the_block_is_an_error_but_not_over_another_error():
    net = somebodys(attention)
    assert "SiT was not called inside routed()" in refused(net, HALF)
    with pytest.raises(KeyError), routed(net, HALF):
        raise KeyError
    with routed(net, []), routed(net, [Route(0, 1, 0.0)]):
        pass


def test_no_routes_inside_of_routes_are_dense_until_they_are_left():
    net, noise = somebodys(attention), torch.rand(BATCH, 1, N)
    dense = net(X)
    with routed(net, HALF, mask_noise=noise):
        out = net(X)
        with routed(net, []) as routing:
            assert torch.equal(net(X), dense) and routing.ids_keep == []
        assert torch.equal(net(X), out) and not torch.allclose(out, dense)
    assert torch.equal(net(X), dense)


def test_a_description_that_is_made_anew_in_each_step_is_tried_once(monkeypatch):
    net, seen, measure = CODES["LightningDiT"](), [], Trials.measure
    monkeypatch.setattr(Trials, "measure", lambda self, kept, *rest: (
        seen.append(kept.run.block.index) or measure(self, kept, *rest)))
    for _ in range(3):
        with routed(net, HALF, blocks="blocks", along={"feat_rope": by_place(2)}):
            called(net, X, PLACES)
    assert seen == [0]      # the others are like it
