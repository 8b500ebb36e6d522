"""Networks of ten lines, one for each situation that was once silently wrong or falsely refused: exact, or an error."""

import copy
import io
import pickle
import random
import re
import threading
import warnings
from functools import partial

import pytest
import torch
from foreign_networks import gradients, refused
from test_codes import Attention, D, N, lightning, min_rf, network, qwen, sd35
from test_routed import SELECTIVE
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from routed import Route, by_place, fewer, pairs, routed
from routed.trial import TRIED, Trials

BATCH, TEXT, MIDDLE, HALF = 3, 5, [Route(1, 2, 0.5)], [Route(0, -1, 0.5)]
X, TABLE, PLACES = torch.randn(BATCH, N, D), torch.randn(N, D // 2), torch.arange(N)


def made(block, call=None, name="Somebodys", depth=4, forward=None, make=nn.ModuleList, **settings):
    """A network of blocks of one forward; `call` gives a block its tokens x and what belongs to their places (n,)."""
    call = call or (lambda part, x, places: part(x))

    def plain(self, x, places=PLACES):
        for part in self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks:
            x = call(part, x, places)
            x = x[0] if isinstance(x, tuple) else x
        return x

    torch.manual_seed(0)
    net = network(name, {"blocks": block}, forward or plain, lambda x, places: dict(x=x), depth)
    for part in net.blocks:
        vars(part).update(settings)
        part.gate, part.bias = nn.Parameter(torch.zeros(D)), nn.Parameter(0.02 * torch.randn(N))
    net.blocks = make(net.blocks)
    return net


# ---- blocks, and how a network calls them --------------------------------------------------------------------------


def attention(self, x, *_, **__):
    return self.attend(x)


def turned(read=lambda rope: rope):
    """A block that turns its tokens by what it reads from its argument rope."""
    return lambda self, x, rope: self.attend(x, lambda q: q * read(rope))


def with_table(cut=lambda table: table):
    return lambda part, x, places: part(x, cut(TABLE[places]))


def by_any_keyword(self, x, **options):
    return self.attend(x, lambda q: q * options["rope"])


def by_keyword(self, *, x, rope):
    return self.attend(x, lambda q: q * rope)


def rotary(self, x, c=None):
    return self.attend(x, lambda q: q * TABLE[:x.shape[1]])


def masked(self, x, mask):
    return self.attend(x, mask=mask)


def near(part, x, places):
    return part(x, ((places[:, None] - places).abs() < 9)[None, None])


def counted(self, x, length):
    return self.attend(x[:, :length] * 2) if length == x.shape[1] else self.attend(x)


def through(blocks, x, *rest):
    for part in blocks:
        x = part(x, *rest)
    return x


def class_token_first(self, x, places=PLACES):
    return through(self.blocks, torch.cat([x.new_ones(len(x), 1, D), x], dim=1), None)[:, 1:]


def changed_behind(self, x, places=PLACES):
    """As RAE's DiT-DH between its encoder and its decoder."""
    for i, part in enumerate(self.blocks):
        x = part(F.silu(x) if i == 3 else x)
    return x


def long_skips(self, x, places=PLACES):
    """As U-ViT's."""
    first, second, middle, third, fourth = self.blocks
    a = first(x)
    b = second(a)
    return fourth(third(middle(b), b), a)


def skipped(self, x, skip=None):
    return self.attend(x if skip is None else x + skip)


def value_residual(self, x, places=PLACES):
    first = None
    for part in self.blocks:
        x, first = part(x, first)
    return x


def with_value(self, x, value=None):
    value = self.qkv(x)[..., D:2 * D] if value is None else value
    return self.attend(x) + value, value


def table_that_changes(part, x, places):
    table = TABLE[places].clone() * (1 + part.number)
    out = part(x, table[None, None])
    table.mul_(2)
    return out


def numbered(parts):
    for i, part in enumerate(parts):
        part.number = i
    return nn.ModuleList(parts)


def padded(x):
    return (torch.arange(x.shape[1]) >= torch.tensor([[N], [N - 3], [4]])[:len(x)]).float() * 0


NAMED = dict(along={"rope": 0})
EXACT = {       # network, and its description; blocks="blocks" if its class is not known
    "a class token, kept": (made(attention, name="SiT", forward=class_token_first), dict(keep=1)),
    "a table [None, None]": (made(turned(lambda rope: rope[None, None]), with_table()), NAMED),
    "a table [:, None, :]": (made(turned(lambda rope: rope[:, None, :].transpose(0, 1)[None]), with_table()), NAMED),
    "a table (N, 1, D)": (made(turned(lambda rope: rope[:, 0]), with_table(lambda table: table[:, None])), NAMED),
    "a table in nested tuples": (made(turned(lambda rope: rope[0][1]["cos"]),
                                      with_table(lambda table: ((None, {"cos": table}),))), NAMED),
    "a table (1, N, D)": (made(turned(lambda rope: rope[:, None]), with_table(lambda table: table[None])),
                          dict(along={"rope": 1})),
    "a table for heads": (made(turned(lambda rope: rope[:, None]), with_table(lambda table: table[None])),
                          dict(along={"rope": -2})),
    "a table by keyword": (made(by_keyword, lambda part, x, places: part(x=x, rope=TABLE[places][None, None])),
                           dict(along={"rope": 2})),
    "a table by any keyword": (made(by_any_keyword, lambda part, x, places: part(x, rope=TABLE[places][None, None])),
                               dict(along={"rope": 2})),
    "a table that changes in place": (made(turned(), table_that_changes, make=numbered), dict(along={"rope": 2})),
    "a function of positions": (made(lambda self, x, rope: self.attend(x, rope), lambda part, x, places: part(
        x, lambda q: q * TABLE[places])), dict(along={"rope": by_place(2)})),
    "a mask (1, 1, N, N)": (made(masked, near), dict(along={"mask": pairs})),
    "a number of tokens": (made(counted, lambda part, x, places: part(x, len(places))), dict(along={"length": fewer})),
    "tokens changed at the end": (made(attention, forward=changed_behind), {}),
    "dropout that is always on": (made(lambda self, x: x + F.dropout(self.attend(x), 0.5)), {}),
    "a dict of blocks": (made(attention, make=lambda parts: nn.ModuleDict({str(i): part for i, part
                                                                          in enumerate(parts)})), {}),
    "a sequence of blocks": (made(attention, make=lambda parts: nn.Sequential(*parts)), {}),
    "long skips around the middle": (made(skipped, forward=long_skips, depth=5), dict(along={"skip": 1})),
    "values of the first block": (made(with_value, forward=value_residual), dict(along={"value": 1})),
    "order alone": (made(lambda self, x: self.attend(x, mask=torch.ones(x.shape[1], x.shape[1]).tril() > 0)),
                    dict(ordered=True)),
    "a known name with another table": (
        made(lambda self, x, freqs_cis, adaln_input=None: self.attend(x, lambda q: q * freqs_cis[:, None]),
             with_table(lambda table: table[None]), name="DiT_Llama"), dict(along={"freqs_cis": 1})),
}


@pytest.mark.parametrize("name", EXACT)
def test_kept_tokens_come_out_as_if_the_network_had_only_them(name):
    net, description = EXACT[name]
    x, net = X.double(), net.double()
    if type(net).__name__ == "DiT_Llama":
        net.layers = net.blocks
    elif type(net).__name__ == "Somebodys":
        description = description | dict(blocks="blocks")
    routes = [Route(1, 3, 0.5)] if name == "long skips around the middle" else MIDDLE
    if name == "tokens changed at the end":
        x.requires_grad_()                  # the graph shows that nothing leads around the route
    with routed(net, routes, **description) as routing:
        out = net(x)
    first, last = routes[0].start_layer_idx, routes[0].end_layer_idx
    blocks = [*(net.blocks.values() if isinstance(net.blocks, nn.ModuleDict) else net.blocks)]
    for b, ids in enumerate(routing.ids_keep[0] if "dropout" not in name else ()):      # which need only be accepted
        with MaskedKeys(torch.zeros(N, dtype=torch.bool).index_fill(0, ids, True), blocks[first], blocks[last]):
            expected = net(x[b:b + 1])
        assert torch.allclose(out[b], expected[0], rtol=1e-9, atol=1e-9), name


class MaskedKeys:
    """Attention that sees no routed token in the blocks of a route; behind it, routed tokens have their old value."""

    def __init__(self, keep, first, last):
        self.keep, self.first, self.last, self.on = keep, first, last, False

    def __enter__(self):
        self.real = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = self.attend
        self.hooks = [self.first.register_forward_pre_hook(self.start, with_kwargs=True),
                      self.last.register_forward_hook(self.end)]

    def __exit__(self, *_):
        F.scaled_dot_product_attention = self.real
        for hook in self.hooks:
            hook.remove()

    def start(self, _, args, kwargs):
        self.on, self.x = True, args[0] if args else kwargs["x"]

    def end(self, _, args, out):
        self.on = False
        several = isinstance(out, tuple)
        x, n = out[0] if several else out, len(self.keep)
        x = torch.cat([x[:, :-n], torch.where(self.keep[:, None], x[:, -n:], self.x[:, -n:])], dim=1)
        return (x, *out[1:]) if several else x

    def attend(self, q, k, v, attn_mask=None):
        if self.on:
            keep = F.pad(self.keep[None], (k.shape[-2] - len(self.keep), 0), value=True)
            attn_mask = keep if attn_mask is None else attn_mask & keep
        return self.real(q, k, v, attn_mask=attn_mask)


# ---- what is refused -----------------------------------------------------------------------------------------------


def relative(self, x):
    """A learned bias by distance, as it is initialised."""
    distance = (PLACES[:x.shape[1], None] - PLACES[:x.shape[1]]).abs()
    q, k, v = self.qkv(x).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)
    bias = self.bias[distance].to(q.dtype)
    return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


def gated(self, x, gate):
    return x + gate * (rotary(self, x) - x) + self.out(x)


def convolution(self, x):
    return self.attend(x) + F.avg_pool1d(x.mT, 3, 1, 1).mT


def windows(self, x):
    return self.attend(x.reshape(-1, 4, D)).reshape(x.shape)


def pooled_keys(self, x):
    """As PixArt's kv compression: the keys are those of every second token of the grid."""
    q = self.qkv(x)[..., :D]
    k, v = self.qkv(x[:, ::2])[..., D:].chunk(2, dim=-1)
    return x + self.out(F.scaled_dot_product_attention(q, k, v))


def folded(self, x):
    """As lucidrains' residual streams, which are folded into the batch, and which its blocks mix."""
    return self.attend(x + x.unflatten(0, (4, -1)).mean(0).repeat(4, 1, 1))


def outside(self, x):
    return through([lambda x, part=part: x + part(x) for part in self.blocks], x)


def one_stream(self, context, x):
    return self.attend(x)


def of_other_blocks(parts):
    parts[2].pools = True
    return parts


FIRST, POSITIONS = dict(routes=[Route(0, 1, 0.5)]), "depends on where its tokens are"
REFUSED = {     # network, its description, and what the error says
    "positions": (made(rotary), {}, f"block 1 of blocks {POSITIONS}.*positions inside the block"),
    "positions under a known name": (made(rotary, name="SiT"), {}, POSITIONS),
    "a convolution": (made(convolution), {}, POSITIONS),
    "windows": (made(windows), {}, POSITIONS),
    "pooled keys": (made(pooled_keys), {}, POSITIONS),
    "streams folded into the batch": (made(folded, forward=lambda self, x: through(
        self.blocks, x.repeat(4, 1, 1)).unflatten(0, (4, -1)).sum(0)), {}, POSITIONS),
    "another block of a list": (made(lambda self, x: (pooled_keys if self.pools else attention)(self, x), pools=False,
                                     make=of_other_blocks), {}, f"block 2 of blocks {POSITIONS}"),
    "a table read for one sample": (made(turned(lambda rope: rope[0]), with_table(lambda table: table[None])),
                                    dict(along={"rope": 1}), "read for one sample only"),
    "a number of tokens that nobody named": (made(counted, lambda part, x, places: part(x, len(places))), {},
                                             "length is 16, as long as the tokens: write along={'length': fewer}"),
    "a bias of std 0.02": (made(relative), {}, POSITIONS),
    "a gate of zeros as an argument": (made(gated, lambda part, x, places: part(x, torch.zeros(1, 1, D))), {},
                                       POSITIONS),
    "a zero parameter under a root": (made(lambda self, x: x + (rotary(self, x) - x) * (1 + self.gate.sqrt())), {},
                                      POSITIONS),
    "a mask (1, 1, N, N) that nobody named": (made(masked, near), {}, "write along={'mask': pairs}"),
    "a mask of a known network": (made(lambda self, x, c, mask: masked(self, x, mask), lambda part, x, places: part(
        x, None, torch.ones(1, 1, N, N) > 0), name="SiT"), {}, "write along={'mask': pairs}"),
    "a table that nobody named": (made(turned(), with_table(lambda table: table[None, None])), {},
                                  "as long as the tokens: name its axis in along=, or write along={'rope': None}"),
    "tables that nobody named": (made(turned(lambda rope: rope[1]), with_table(lambda table: (table, table))), {},
                                 "as long as the tokens: name its axis in along="),
    "a table that is falsely declared": (made(lambda self, x, rope: self.attend(x, lambda q: q * rope[:x.shape[1]]),
                                              with_table()), dict(along={"rope": None}), POSITIONS),
    "a function of positions that nobody named": (lightning(), FIRST | dict(blocks="blocks"),
                                                  "the argument feat_rope, which along= does not name"),
    "a table without the batch axis that it gets": (made(turned(lambda rope: rope[None, None]), with_table()),
                                                    dict(along={"rope": -2}), "fails when each sample|depends on"),
    "tokens first": (made(lambda self, x: self.attend(x.transpose(0, 1)).transpose(0, 1),
                          forward=lambda self, x: through(self.blocks, x.transpose(0, 1))), {},
                     r"Tokens are \(B, N, D\)|depends on where"),
    **{f"a residual outside, blocks {start} to {end}": (
        made(lambda self, x: self.attend(x) - x, forward=outside), dict(routes=[Route(start, end, 0.5)]),
        "the network changes the tokens: a residual|the network fails")
       for start, end in ((1, 1), (0, 0), (3, 3), (1, 2), (0, -1))},
    "order alone": (made(lambda self, x: self.attend(x, mask=torch.ones(x.shape[1], x.shape[1]).tril() > 0)), {},
                    "set ordered=True"),
    "text as tokens": (made(one_stream, lambda part, x, places: part(torch.zeros_like(x), x)), FIRST,
                       r"x is \(\d, 16, 8\), as long as the tokens"),
    "tokens that are not routed": (made(one_stream, lambda part, x, places: part(x=x, context=x[:, :4])), FIRST,
                                   r"gets tokens \(\d, 2, 8\) and returns \(\d, 16, 8\)"),
    "a dict as output": (made(lambda self, x: {"x": self.attend(x)}, lambda part, x, places: part(x)["x"]), FIRST,
                         r"gets tokens \(\d, 8, 8\) and returns dict"),
    "a pair as tokens": (made(lambda self, pair: pair, lambda part, x, places: part((x, x))[0]), FIRST,
                         r"pair is tuple, but tokens \(B, N, D\) are routed"),
    "tokens of four axes": (made(lambda self, x: x, lambda part, x, places: part(x[:, None])), FIRST,
                            r"x is \(\d, 1, 16, 8\), but tokens \(B, N, D\) are routed"),
    "a block twice": (made(attention, make=lambda parts: nn.ModuleList([*parts, parts[0]])), {},
                      "1 of 5 blocks repeat an earlier one"),
    "groups of blocks": (made(attention, make=lambda parts: nn.ModuleList([nn.ModuleList(parts)] * 2)), {},
                         "blocks.0 is a ModuleList of 4 modules, not a block"),
    **{f"two streams where none is named, {path}": (
        net, FIRST | dict(blocks=path, along=along), "returns 2 streams|must be")
       for net, path, along in ((min_rf(), "double_layers", {}), (sd35(), "joint_blocks", {}),
                                (qwen(), "transformer_blocks", {"image_rotary_emb": (0, None)}))},
    "FSDP1": (type("FullyShardedDataParallel", (nn.Module,), {})(), {}, "shard it with FSDP2"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("batch", [BATCH, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_would_be_silently_wrong_is_refused_in_one_line(name, batch, dtype):
    net, description, says = REFUSED[name]
    TRIED.clear()
    if type(net).__name__ == "Somebodys":
        description = description | dict(blocks="blocks")
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        said = refused(net, **dict(routes=MIDDLE, call=lambda: net(**net.feed(X[:batch], PLACES))) | description)
    assert re.search(says, said) and "\n" not in said, said


@pytest.mark.parametrize(("says", "routes"), [
    ("leaves it: indices lie in [-4, 3]", [Route(0, 4, 0.5)]),
    ("(1, 2, 0.5) is not a route: write Route(start_layer_idx", [(1, 2, 0.5)]),
    ("'tread_config' is not a route", {"tread_config": {}}),
    ("does not support x_T", [Route(0, 1, 0.5, x_T=1.0)]), ("return_from", [Route(1, 1, 0.5, return_from=0)])])
def test_what_is_no_route_is_refused(says, routes):
    assert says in refused(made(attention), routes, blocks="blocks")


# ---- what a trial sees, costs and leaves as it was -----------------------------------------------------------------


def test_a_block_is_tried_for_one_sample_and_for_several_and_in_training_and_evaluation():
    net = made(lambda self, x: rotary(self, x) if self.training else self.attend(x)).eval()
    with routed(net, MIDDLE, blocks="blocks"):
        net(X)
    assert POSITIONS in refused(net.train(), MIDDLE, lambda: net(X), blocks="blocks")
    net = made(lambda self, x: rotary(self, x) if len(x) > 2 else self.attend(x))
    with routed(net, MIDDLE, blocks="blocks"):
        net(X[:1])
    assert POSITIONS in refused(net, MIDDLE, lambda: net(X), blocks="blocks")
    with routed(net, MIDDLE, blocks="blocks", probe=False):
        net(X)


def test_after_three_passes_without_a_verdict_a_warning_is_raised_once_and_trials_stop():
    seen = []
    net = made(lambda self, x: seen.append(1) or x + self.out(x) * 1e-12)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(5):
            with routed(net, HALF, blocks="blocks"):
                net(X)
            seen.append(0)
    assert [str(w.message).count("could not be tried in 3 passes (it adds nothing yet)") for w in warned] == [1]
    assert seen[-5:] == [1, 1, 1, 1, 0]


def test_a_block_that_fails_only_in_its_trial_is_not_refused():
    """As one whose weights come from elsewhere when it is called."""
    def block(self, x):
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("no weights")
        return self.attend(x)

    net = made(block)
    with routed(net, MIDDLE, blocks="blocks") as routing:
        net(X)
    assert routing.trials == [] and routing.ids_keep[0].shape == (BATCH, N // 2)


class Cache:
    def __init__(self):
        self.rows = [None]

    def update(self, x):
        self.rows[0] = x if self.rows[0] is None else torch.cat([self.rows[0], x], dim=1)
        return self.rows[0]


@pytest.mark.parametrize("block", [
    lambda self, x, log, cache: log.append(x.square().mean()) or self.attend(x),
    lambda self, x, log, cache: self.attend(x) + cache.update(x).mean(),
    lambda self, x, log, cache: self.attend(x) + random.random() + torch.rand(())])
def test_a_trial_leaves_lists_caches_and_random_states_as_they_were(block):
    def result(probe):
        log, caches = [], [Cache() for _ in range(4)]
        net = made(block, forward=lambda self, x: through(
            [lambda x, part=part, cache=cache: part(x, log, cache) for part, cache in zip(
                self.blocks, caches, strict=True)], x))
        random.seed(0)
        with routed(net, MIDDLE, blocks="blocks", probe=probe, mask_noise=torch.rand(BATCH, 1, N)):
            out = net(X)
        return out, len(log), [len(cache.rows[0][0]) if cache.rows[0] is not None else 0 for cache in caches], \
            random.random(), torch.rand(())

    (out, *others), (expected, *rest) = result(True), result(False)
    assert torch.equal(out, expected) and str(others) == str(rest)


class Recorded(nn.Module):
    """Attention with everything that a forward may leave behind, which counts its calls."""

    def __init__(self):
        super().__init__()
        self.attend, self.norm, self.drop = Attention(), nn.BatchNorm1d(D), nn.Dropout(0.5)
        self.register_buffer("cache", torch.zeros(BATCH, N, D))
        self.seen, self.calls, self.log = torch.zeros(N), 0, []

    def forward(self, x):
        self.calls += 1
        self.log.append(tuple(x.shape))
        self.cache[:, :x.shape[1]] = x.detach()
        self.seen[0] += 1
        return self.drop(self.attend(self.norm(x.mT).mT)) + torch.rand(()) * 0 + x


def test_a_trial_leaves_the_network_and_the_random_numbers_as_they_were_and_happens_once():
    def trained(**options):
        net = made(attention, depth=3)
        net.blocks = nn.ModuleList(Recorded() for _ in range(3))
        torch.manual_seed(1)
        with routed(net.train(), MIDDLE, blocks="blocks", **options):
            for _ in range(2):
                net(X).square().mean().backward()
        states = [(part.calls, part.seen, *part.log[::-1][:2], *part.state_dict().values()) for part in net.blocks]
        return net, states, [p.grad for p in net.parameters()], torch.get_rng_state()

    net, tried, grads, state = trained()
    _, expected, others, other_state = trained(probe=False)
    assert str(tried) == str(expected) and torch.equal(state, other_state) and net.training
    assert all(map(torch.equal, grads, others)) and all(part.training for part in net.modules())
    assert [len(part.log) for part in net.blocks] == [2, 2 + 2, 2 + 2]      # two more forwards, once
    with routed(net, MIDDLE, blocks="blocks"):
        net(X)
    assert [len(part.log) for part in net.blocks] == [3, 5, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_trial_runs_in_float32_at_least(dtype):
    net = made(attention).to(dtype)
    with torch.no_grad(), routed(net, HALF, blocks="blocks") as routing:
        net(X.to(dtype))
    assert len(routing.trials) == 4
    assert all(row.dtype == torch.float32 and row.deviation < 1e-5 < row.tolerance < 2e-3 for row in routing.trials)


def test_compiled_code_is_not_tried(monkeypatch):
    compiled = torch.compile(made(attention), backend="eager")
    monkeypatch.setattr(Trials, "measure", None)
    with routed(compiled, HALF, blocks="blocks"):
        compiled(X)


def test_a_description_that_is_made_anew_in_each_step_is_tried_once(monkeypatch):
    net, seen, measure = lightning(), [], Trials.measure
    monkeypatch.setattr(Trials, "measure", lambda self, kept, *rest: (
        seen.append(kept.run.block.index) or measure(self, kept, *rest)))
    for _ in range(3):
        with routed(net, HALF, blocks="blocks", along={"feat_rope": by_place(2)}):
            net(X, PLACES)
    assert seen == [0, 1]


# ---- threads, copies, checkpoints ----------------------------------------------------------------------------------


def test_another_thread_sees_the_dense_network_and_so_does_a_block_without_routes():
    net, seen, noise = made(attention), [], torch.rand(BATCH, 1, N)
    dense = net(X)
    with routed(net, MIDDLE, blocks="blocks", mask_noise=noise):
        out = net(X)
        with routed(net, [], blocks="blocks") as routing:
            assert torch.equal(net(X), dense) and routing.ids_keep == []
        assert torch.equal(net(X), out) and not torch.allclose(out, dense)
        other = threading.Thread(target=lambda: seen.append(net(X)))
        other.start()
        other.join()
    assert torch.equal(seen[0], dense) and torch.equal(net(X), dense)


def test_a_network_that_is_never_called_is_an_error_but_not_over_another_error():
    net = made(attention)
    assert "Somebodys was not called inside routed()" in refused(net, MIDDLE, blocks="blocks")
    with pytest.raises(KeyError), routed(net, MIDDLE, blocks="blocks"):
        raise KeyError
    with routed(net, [], blocks="blocks"), routed(net, [Route(0, 1, 0.0)], blocks="blocks"):
        pass


class Pickled(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(4))

    def forward(self, x):
        return through(self.blocks, x)


def test_a_network_is_saved_after_routed_and_copied_inside():
    net = Pickled()
    with routed(net, MIDDLE, blocks="blocks"):
        loss = net(X).square().mean()
        for save in (pickle.dumps, partial(torch.save, f=io.BytesIO())):
            with pytest.raises(ValueError, match="cannot be pickled or saved inside routed"):
                save(net)
        inside = copy.deepcopy(net)
    outside = pickle.loads(pickle.dumps(net))
    for other in (inside, outside):
        assert type(other) is Pickled and torch.equal(other(X), net(X)) and "_routed" not in vars(other)
    assert type(net) is not Pickled         # as a backward may still recompute blocks
    del loss
    assert type(net) is Pickled


@pytest.mark.parametrize("context", [{}, SELECTIVE], ids=["full", "selective"])
@pytest.mark.parametrize(("around", "inside"), [
    ("blocks", True), ("blocks", False), ("a wrapper of blocks", True), ("a wrapper of blocks", False),
    ("a wrapper of the network", True)])
def test_checkpoints_change_no_gradient(context, around, inside):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def trained(checkpointed):
        wrap = partial(checkpoint, use_reentrant=False, **context)
        net = model = made(turned(lambda rope: rope[None, None]), lambda part, x, places: wrap(part, x, TABLE)
                           if checkpointed and around == "blocks" else part(x, TABLE))
        if checkpointed and around == "a wrapper of blocks":
            net.blocks = nn.ModuleList(checkpoint_wrapper(part, **context) for part in net.blocks)
        if checkpointed and around == "a wrapper of the network":
            model = checkpoint_wrapper(net, **context)
            with routed(model, [], blocks="blocks"):
                model(X)
        torch.manual_seed(1)
        with routed(model, MIDDLE, blocks="blocks", along={"rope": 0}):
            # a selective checkpoint's operations are recomputed once
            loss = model(X).square().mean() + (0 if context else model(X).mean())
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in gradients(net).items()}

    plain, others = trained(False), trained(True)
    assert plain.keys() == others.keys() and all(torch.allclose(plain[key], others[key], atol=1e-6) for key in plain)
