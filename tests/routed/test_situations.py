"""Networks of ten lines, each of a kind that was once silently wrong or falsely refused: exact now, or an error."""

import copy
import io
import pickle
import random
import threading
import warnings
from functools import partial

import pytest
import torch
from foreign_networks import gradients
from test_codes import Attention, D, N
from test_routed import refused
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from routed import Route, fewer, pairs, routed
from routed.trial import TRIED

BATCH = 3
X, TABLE = torch.randn(BATCH, N, D), torch.randn(N, D // 2)
PLACES = torch.arange(N)
MIDDLE = [Route(1, 2, 0.5)]


def network(block, call=None, name="Somebodys", depth=4, forward=None, make=nn.ModuleList, **settings):
    """A network of blocks of one forward; `call` gives a block its tokens x and what belongs to their places (n,)."""
    call = call or (lambda part, x, places: part(x))

    def plain(self, x, places=PLACES):
        for part in self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks:
            x = call(part, x, places)
            x = x[0] if isinstance(x, tuple) else x
        return x

    net = type(name, (nn.Module,), dict(forward=forward or plain))()
    kind = type("Block", (Attention,), dict(forward=block, attend=Attention.forward))
    parts = [kind() for _ in range(depth)]
    for part in parts:
        vars(part).update(settings)
        part.gate, part.bias = nn.Parameter(torch.zeros(D)), nn.Parameter(0.02 * torch.randn(N))
    net.blocks = make(parts)
    return net


def attention(self, x, *_, **__):
    return self.attend(x)


def by_rows(self, x, rope):
    return self.attend(x, lambda q: q * rope[None, None])


def rotary(self, x):
    return self.attend(x, lambda q: q * TABLE[:x.shape[1]])


def with_table(cut=lambda table: table):
    return lambda part, x, places: part(x, cut(TABLE[places]))


def masked(self, x, mask):
    return self.attend(x, mask=mask)


def near(places):
    """Which tokens see which, by their places."""
    return ((places[:, None] - places).abs() < 9)[None, None]


def counted(self, x, length):
    return self.attend(x[:, :length] * 2) if length == x.shape[1] else self.attend(x)


def class_token_first(self, x, places=PLACES):
    x = torch.cat([x.new_ones(len(x), 1, D), x], dim=1)
    for part in self.blocks:
        x = part(x, None)
    return x[:, 1:]


def changed_behind(self, x, places=PLACES):
    """As RAE's DiT-DH between its encoder and its decoder."""
    for i, part in enumerate(self.blocks):
        x = part(F.silu(x) if i == 3 else x)
    return x


def long_skips(self, x, places=PLACES):
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


EXACT = {
    "a class token, kept": (network(attention, name="SiT", forward=class_token_first), dict(keep=1)),
    "a table [None, None]": (network(by_rows, with_table()), dict(along={"rope": 0})),
    "a table [:, None, :]": (
        network(lambda self, x, rope: self.attend(x, lambda q: q * rope[:, None, :].transpose(0, 1)[None]),
                with_table()), dict(along={"rope": 0})),
    "a table (N, 1, D)": (network(lambda self, x, rope: self.attend(x, lambda q: q * rope[:, 0]),
                                  with_table(lambda table: table[:, None])), dict(along={"rope": 0})),
    "a table in nested tuples": (network(lambda self, x, rope: self.attend(x, lambda q: q * rope[0][1]["cos"]),
                                         with_table(lambda table: ((None, {"cos": table}),))), dict(along={"rope": 0})),
    "a table (1, N, D)": (network(lambda self, x, rope: self.attend(x, lambda q: q * rope[:, None]),
                                  with_table(lambda table: table[None])), dict(along={"rope": 1})),
    "a table for heads": (network(lambda self, x, rope: self.attend(x, lambda q: q * rope[:, None]),
                                  with_table(lambda table: table[None])), dict(along={"rope": -2})),
    "a mask (1, 1, N, N)": (network(masked, lambda part, x, places: part(x, near(places))),
                            dict(along={"mask": pairs})),
    "a number of tokens": (network(counted, lambda part, x, places: part(x, len(places))),
                           dict(along={"length": fewer})),
    "tokens changed at the end": (network(attention, forward=changed_behind), {}),
    "dropout that is always on": (network(lambda self, x: x + F.dropout(self.attend(x), 0.0 if self.exact else 0.5),
                                          exact=False), {}),
    "a dict of blocks": (network(attention, make=lambda parts: nn.ModuleDict({str(i): part for i, part
                                                                             in enumerate(parts)})), {}),
    "a sequence of blocks": (network(attention, make=lambda parts: nn.Sequential(*parts)), {}),
    "long skips": (network(skipped, forward=long_skips, depth=5), dict(along={"skip": 1})),
    "values of the first block": (network(with_value, forward=value_residual), dict(along={"value": 1})),
    "a known name with another table": (
        network(lambda self, x, freqs_cis, adaln_input=None: self.attend(x, lambda q: q * freqs_cis[:, None]),
                with_table(lambda table: table[None]), name="DiT_Llama"), dict(along={"freqs_cis": 1})),
}


@pytest.mark.parametrize("name", EXACT)
def test_kept_tokens_come_out_as_if_the_network_had_only_them(name):
    net, description = EXACT[name]
    net = net.double()
    if type(net).__name__ == "DiT_Llama":
        net.layers = net.blocks
    elif type(net).__name__ == "Somebodys":
        description = description | dict(blocks="blocks")
    routes = [Route(1, 3, 0.5)] if name == "long skips" else MIDDLE
    x = X.double()
    if name == "tokens changed at the end":
        x.requires_grad_()
    with routed(net, routes, **description) as routing:
        assert routing.ids_keep == [None]
        if "dropout" in name:               # random: it need only be accepted
            net(x)
            return
        out = net(x)
    first, last = routes[0].start_layer_idx, routes[0].end_layer_idx
    inside, blocks = {}, [*(net.blocks.values() if isinstance(net.blocks, nn.ModuleDict) else net.blocks)]
    for b, ids in enumerate(routing.ids_keep[0]):
        keep = torch.zeros(N, dtype=torch.bool).index_fill(0, ids, True)
        hooks = [blocks[first].register_forward_pre_hook(lambda _, args: inside.update(x=args[0]))]
        seen = MaskedKeys(keep, blocks, first, last)
        with seen:
            expected = net(x[b:b + 1])
        hooks[0].remove()
        assert torch.allclose(out[b], expected[0], rtol=1e-9, atol=1e-9), name


class MaskedKeys:
    """Attention that sees no routed token in the blocks of a route; behind it, routed tokens have their old value."""

    def __init__(self, keep, blocks, first, last):
        self.keep, self.first, self.last, self.blocks, self.on = keep, blocks[first], blocks[last], blocks, False

    def __enter__(self):
        self.real = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = self.attend
        self.hooks = [self.first.register_forward_pre_hook(self.start), self.last.register_forward_hook(self.end)]

    def __exit__(self, *_):
        F.scaled_dot_product_attention = self.real
        for hook in self.hooks:
            hook.remove()

    def start(self, _, args):
        self.on, self.x = True, args[0]

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


def relative(self, x):
    """A learned bias by distance, as it is initialised."""
    near = (PLACES[:x.shape[1], None] - PLACES[:x.shape[1]]).abs()
    q, k, v = self.qkv(x).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)
    return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[near].to(q.dtype)).transpose(1, 2)
                        .flatten(2))


def row_0(self, x, rope):
    return self.attend(x, lambda q: q * rope[0])


def gated(self, x, gate):
    return x + gate * (rotary(self, x) - x) + self.out(x)


def through(blocks, x, *rest):
    for part in blocks:
        x = part(x, *rest)
    return x


POSITIONS = "depends on where its tokens are"
REFUSED = {
    "positions under a known name": (network(lambda self, x, c=None: rotary(self, x), name="SiT"), {}, POSITIONS),
    "a table read for one sample": (network(row_0, with_table(lambda table: table[None])),
                                    dict(along={"rope": 1}), "read for one sample only"),
    "a number of tokens that nobody named": (network(counted, lambda part, x, places: part(x, len(places))), {},
                                             "length is 16, as many as the tokens. Write along={'length': fewer}"),
    "a bias of std 0.02": (network(relative), {}, POSITIONS),
    "a gate of zeros as an argument": (network(gated, lambda part, x, places: part(x, torch.zeros(1, 1, D))), {},
                                       POSITIONS),
    "a zero parameter under a root": (network(lambda self, x: x + (rotary(self, x) - x) * (1 + self.gate.sqrt())), {},
                                      POSITIONS),
    "a mask (1, 1, N, N) that nobody named": (network(masked, lambda part, x, places: part(x, near(places))), {},
                                              "write along={'mask': pairs}"),
    "a table without the batch axis that it gets": (
        network(by_rows, with_table()), dict(along={"rope": -2}), "fails when each sample keeps|depends on where"),
    "tokens first": (network(lambda self, x: self.attend(x.transpose(0, 1)).transpose(0, 1),
                             forward=lambda self, x: through(self.blocks, x.transpose(0, 1))), {},
                     r"tokens are \(B, N, D\)|depends on where"),
    "a residual outside": (network(attention, forward=lambda self, x: through(
        [lambda x, part=part: x + part(x) for part in self.blocks], x)), {}, "a residual or skip"),
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
        said = refused(net, MIDDLE, lambda: net(X[:batch]), **description)
    assert __import__("re").search(says, said) and "\n" not in said, said


def test_a_block_is_tried_for_one_sample_and_for_several_and_in_training_and_evaluation():
    net = network(lambda self, x: rotary(self, x) if self.training else self.attend(x)).eval()
    with routed(net, MIDDLE, blocks="blocks"):
        net(X)
    assert POSITIONS in refused(net.train(), MIDDLE, lambda: net(X), blocks="blocks")
    net = network(lambda self, x: rotary(self, x) if len(x) > 2 else self.attend(x))
    with routed(net, MIDDLE, blocks="blocks"):
        net(X[:1])
    assert POSITIONS in refused(net, MIDDLE, lambda: net(X), blocks="blocks")


def test_after_three_passes_without_a_verdict_a_warning_is_raised_once_and_trials_stop():
    seen = []
    net = network(lambda self, x: seen.append(1) or x + self.out(x) * 1e-12)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(5):
            with routed(net, [Route(0, -1, 0.5)], blocks="blocks"):
                net(X)
            seen.append(0)
    assert [str(w.message).count("could not be tried in 3 passes (it adds nothing yet)") for w in warned] == [1]
    assert seen[-5:] == [1, 1, 1, 1, 0]


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
        torch.manual_seed(0)
        random.seed(0)
        log, caches = [], [Cache() for _ in range(4)]
        net = network(block, forward=lambda self, x: through(
            [lambda x, part=part, cache=cache: part(x, log, cache) for part, cache in zip(
                self.blocks, caches, strict=True)], x))
        with routed(net, MIDDLE, blocks="blocks", probe=probe, mask_noise=torch.rand(BATCH, 1, N)):
            out = net(X)
        return out, len(log), [len(cache.rows[0][0]) if cache.rows[0] is not None else 0 for cache in caches], \
            random.random(), torch.rand(())

    (out, *others), (expected, *rest) = result(True), result(False)
    assert torch.equal(out, expected) and str(others) == str(rest)


def test_another_thread_sees_the_dense_network():
    net, seen = network(attention), []
    dense = net(X)
    with routed(net, MIDDLE, blocks="blocks"):
        other = threading.Thread(target=lambda: seen.append(net(X)))
        other.start()
        other.join()
        assert not torch.allclose(net(X), dense)
    assert torch.equal(seen[0], dense)


class Pickled(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


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


def matmuls(context, operation, *args, **kwargs):
    saved = operation in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("context", [{}, dict(context_fn=partial(create_selective_checkpoint_contexts, matmuls))],
                         ids=["full", "selective"])
@pytest.mark.parametrize(("around", "inside"), [
    ("blocks", True), ("blocks", False), ("a wrapper of blocks", True), ("a wrapper of blocks", False),
    ("a wrapper of the network", True)])
def test_checkpoints_change_no_gradient(context, around, inside):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def trained(checkpointed):
        torch.manual_seed(0)
        wrap = partial(checkpoint, use_reentrant=False, **context)
        net = model = network(by_rows, lambda part, x, places: wrap(part, x, TABLE) if checkpointed and
                              around == "blocks" else part(x, TABLE))
        if checkpointed and "blocks" in around and around != "blocks":
            net.blocks = nn.ModuleList(checkpoint_wrapper(part, **context) for part in net.blocks)
        if checkpointed and around == "a wrapper of the network":
            model = checkpoint_wrapper(net, **context)
            with routed(model, [], blocks="blocks"):
                model(X)
        torch.manual_seed(1)
        with routed(model, MIDDLE, blocks="blocks", along={"rope": 0}):
            loss = (model(X).square().mean(), model(X).mean()) if not context else (model(X).square().mean(),)
            loss = sum(loss)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in gradients(net).items()}

    plain, found = trained(False), trained(True)
    assert plain.keys() == found.keys() and all(torch.allclose(plain[key], found[key], atol=1e-6) for key in plain)
