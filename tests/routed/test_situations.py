"""The table of small networks, their descriptions, and what is expected: exact, or an error in one line."""

import copy
import re
from collections import OrderedDict, namedtuple
from dataclasses import replace
from functools import partial

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput as Output
from oracle import BATCH, THREE, Case, N, assert_exact, randn, refused
from small_networks import CODES, TABLE, D, X, by_name, lumina, made, of_blocks, patches, through, two_streams, wan
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from routed import Blocks, Family, Route, Router, by_place, families, fewer, pairs, routed

Pair = namedtuple("Pair", ["first", "second"])
MIDDLE, PLACES = [Route(1, 2, 0.5)], torch.arange(N)
NEAR = ((PLACES[:, None] - PLACES).abs() < 9)[None, None]
PADDING = PLACES < torch.tensor([[N], [N - 3], [4]])


def doubled(case):
    """In double precision, where a difference is no rounding."""
    case.inputs = {key: value.detach().double().requires_grad_(value.requires_grad)
                   if isinstance(value, torch.Tensor) and value.is_floating_point() else value
                   for key, value in case.inputs.items()}
    case.model.double()
    return case


@pytest.mark.parametrize("name", CODES)
def test_a_network_like_an_original_code_is_known_and_exact(name):
    assert_exact(doubled(CODES[name]()), tolerance=1e-9)


# ---- blocks ---------------------------------------------------------------------------------------------------------


def attention(self, x, *_, **__):
    return self.attend(x)


def turned(read=lambda rope: rope):
    """A block that turns its tokens by what it reads from its argument rope."""
    return lambda self, x, rope: self.attend(x, lambda q: q * read(rope))


def rotary(self, x, c=None):
    return self.attend(x, lambda q: q * TABLE[:x.shape[1]])


def causal(self, x):
    return self.attend(x, mask=torch.ones(x.shape[1], x.shape[1]).tril() > 0)


def masked(self, x, mask):
    return self.attend(x, mask=mask if mask.ndim == 4 else mask[:, None, None])


def counted(self, x, length):
    return self.attend(x[:, :length] * 2) if length == x.shape[1] else self.attend(x)


def with_value(self, x, value=None):
    value = self.qkv(x)[..., D:2 * D] if value is None else value
    return self.attend(x) + value, value


def relative(self, x):
    """A learned bias by distance, as it is initialised."""
    q, k, v = self.qkv(x).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)
    bias = self.bias[(PLACES[:x.shape[1], None] - PLACES[:x.shape[1]]).abs()].to(q.dtype)
    return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


def in_half(self, x):
    return x + relative(self, x.to(torch.bfloat16).float()).to(torch.bfloat16).to(x.dtype)


def two_outputs(self, x, z):
    return self.attend(x + z.mean(1, keepdim=True)), z + (rotary(self, x) - x).mean(1, keepdim=True)


def pooled_keys(self, x):
    """As PixArt's kv compression: the keys are those of every second token of the grid."""
    q = self.qkv(x)[..., :D]
    k, v = self.qkv(x[:, ::2])[..., D:].chunk(2, dim=-1)
    return x + self.out(F.scaled_dot_product_attention(q, k, v))


class Halved(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return 0.5 * self.inner(*args, **kwargs)


def folded(self, x):
    """As lucidrains' residual streams, which are folded into the batch, and which its blocks mix."""
    return self.attend(x + x.unflatten(0, (4, -1)).mean(0).repeat(4, 1, 1))


# ---- how a network calls them ---------------------------------------------------------------------------------------


def with_table(read=lambda table: table):
    return lambda part, x: part(x, read(TABLE))


def table_that_changes(part, x):
    table = TABLE * (1 + part.number)
    out = part(x, table[None, None])
    table.mul_(2)
    return out


def class_token_first(net, x):
    return through(net.blocks, torch.cat([x.new_ones(len(x), 1, D), x], dim=1), lambda part, x: part(x, None))


def neighbours_where_lists_meet(net, x):
    x = through(net.blocks, x)
    return through(net.more, x + x.roll(1, dims=1))


def changed_behind(net, x):
    """As RAE's DiT-DH between its encoder and its decoder."""
    return through(net.blocks, x, lambda part, x: part(F.silu(x) if part.number == 3 else x))


def long_skips(net, x):
    """As U-ViT's."""
    first, second, middle, third, fourth = net.blocks
    a = first(x)
    b = second(a)
    return fourth(third(middle(b), b), a)


def projected(net, x):
    """As REPA's, which reads the tokens after block 0."""
    x = net.blocks[0](x)
    return through(net.blocks[1:], x) + x.mean()


def hidden_states(net, x):
    first = net.blocks[0](x)
    return through(net.blocks[1:], first), first


def value_residual(net, x):
    first = None
    for part in net.blocks:
        x, first = part(x, first)
    return x


def encoder(**options):
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 8, **options), 3)
    return Case(net.eval(), dict(src=X, src_key_padding_mask=~PADDING), [])


# ---- the table ------------------------------------------------------------------------------------------------------


MASK_AND_TABLE = made(lambda self, x, mask, rope: masked(self, self.attend(x, lambda q: q * rope[:, None]), mask),
                      lambda part, x: part(x, NEAR, TABLE[None]))
FOLDED = ((PLACES[:, None] - PLACES).abs() < torch.arange(9, 9 + 2 * BATCH)[:, None, None])
NAMED, HIDDEN = dict(along={"rope": 0}), made(attention)
EXACT = {       # network, and its description
    "a table [None, None]": (made(turned(lambda rope: rope[None, None]), with_table()), NAMED),
    "a table in nested tuples, by keyword": (
        made(lambda self, *, x, rope: self.attend(x, lambda q: q * rope[0][1]["cos"]),
             lambda part, x: part(x=x, rope=((None, {"cos": TABLE}),))), dict(along={"rope": ((None, 0),)})),
    "a table that blocks return": (
        made(lambda self, x, rope: (self.attend(x, lambda q: q * (TABLE if rope is None else rope)),
                                    TABLE if rope is None else rope), forward=value_residual), NAMED),
    "a table in an OrderedDict": (made(turned(lambda rope: rope["cos"][:, None]), with_table(
        lambda table: OrderedDict(cos=table[None]))), dict(along={"rope": 1})),
    "a table (1, N, D), by its position": (
        made(turned(lambda rope: rope[:, None]), with_table(lambda table: table[None])), dict(along={1: 1})),
    "a table that changes in place": (made(turned(torch.clone), table_that_changes), dict(along={"rope": 2})),
    "a function of positions": (made(lambda self, x, rope: self.attend(x, rope), lambda part, x: part(
        x, lambda q: q * TABLE)), dict(along={"rope": by_place(2)})),
    "a mask (1, 1, N, N)": (made(masked, lambda part, x: part(x, NEAR)), dict(along={"mask": pairs})),
    "a mask and a table": (MASK_AND_TABLE, dict(along={"mask": pairs, "rope": 1})),
    "a padding mask": (made(masked, lambda part, x: part(x, PADDING[:, None, None])), dict(along={"mask": 3})),
    "a mask of text": (made(lambda self, x, mask: self.attend(x) + mask.sum(-1),
                            lambda part, x: part(x, PADDING[:, None, None, :5])), {}),
    "a number of tokens": (made(counted, lambda part, x: part(x, N)), dict(along={"length": fewer})),
    "a class token": (made(attention, forward=class_token_first), dict(keep=1)),
    "a size": (made(lambda self, x, size: self.attend(x), lambda part, x: part(x, torch.Size([4, 4]))), {}),
    "REG's class token": (made(attention, name="SiT", forward=class_token_first, **patches(N + 1)), dict(blocks=None)),
    "a known name with another table": (
        made(lambda self, x, rope: self.attend(x, lambda q: q * rope[:, None]), with_table(lambda table: table[None]),
             "SiT", **patches(N)), dict(along={"rope": 1}, blocks=None)),
    "REPA's projector behind the route": (made(attention, forward=projected), dict(routes=[Route(0, 0, 0.5)])),
    "a wrapper that scales": (made(attention, make=lambda parts: nn.ModuleList(map(Halved, parts))), {}),
    "a mask (B heads, N, N)": (made(lambda self, x, mask: self.attend(x, mask=mask.unflatten(0, (len(x), -1))),
                                    lambda part, x: part(x, FOLDED)), dict(along={"mask": pairs})),
    "long skips around the middle": (
        made(lambda self, x, skip=None: self.attend(x if skip is None else x + skip), forward=long_skips, depth=5),
        dict(along={"skip": 1}, routes=[Route(1, 3, 0.5)])),
    "values of the first block": (made(with_value, forward=value_residual), dict(along={"value": 1})),
    "named tuples": (made(lambda self, x, rope: Pair(self.attend(x, lambda q: q * rope.first), rope.second),
                          with_table(lambda table: Pair(table, torch.ones(1)))), dict(along={"rope": (0, None)})),
    "order alone": (made(causal), dict(ordered=True)),
    "two streams": (by_name(), dict(blocks=None, routes=THREE, family=Family((
        Blocks("double_layers", tokens="x", text="c", out=1), Blocks("single_layers"))))),
}


@pytest.mark.parametrize("name", EXACT)
def test_kept_tokens_come_out_as_if_the_network_had_only_them(name):
    case, description = EXACT[name]
    assert_exact(doubled(copy.deepcopy(case)), tolerance=1e-9, **dict(routes=MIDDLE, blocks="blocks") | description)


def test_dropout_that_is_always_on_a_list_of_blocks_and_a_single_route_are_accepted():
    case = made(lambda self, x: x + F.dropout(self.attend(x), 0.5))
    with routed(case.model, MIDDLE[0], blocks=case.model.blocks) as routing:  # a list instead of its name
        case.call()
    assert routing.trials and routing.ids_keep[0].shape == (BATCH, N // 2)


POSITIONS = "depends on where its tokens are"
REFUSED = {     # network, its description, and what the error says
    "positions": (made(rotary), {}, f"block 0 of blocks {POSITIONS}.*positions inside the block"),
    "a convolution": (made(lambda self, x: self.attend(x) + F.avg_pool1d(x.mT, 3, 1, 1).mT), {}, POSITIONS),
    "pooled keys": (made(pooled_keys), {}, POSITIONS),
    "streams folded into the batch": (made(folded, forward=lambda net, x: through(
        net.blocks, x.repeat(4, 1, 1)).unflatten(0, (4, -1)).sum(0)), {},
        r"x is \(\d+, 16, 8\), but tokens \(B, N, D\) of \d samples.* fold none into the batch"),
    "another block of a list": (made(lambda self, x: pooled_keys(self, x) if self.number == 2 else self.attend(x)),
                                dict(routes=MIDDLE), f"block 2 .*{POSITIONS}"),
    "neighbours where two lists meet": (
        made(attention, forward=neighbours_where_lists_meet, more=nn.ModuleList(of_blocks(attention, 2))),
        dict(blocks=None, family=Family((Blocks("blocks"), Blocks("more"))), routes=[Route(1, 4, 0.5)]),
        "After block 3 .* computes with the others"),
    "order alone": (made(causal), {}, "set ordered=True"),
    "a bias of std 0.02": (made(relative), {}, POSITIONS),
    "a bias in bfloat16": (made(relative), dict(call=lambda case: case.model.bfloat16()(X.bfloat16())), POSITIONS),
    "a bias of a block that computes in bfloat16": (made(in_half), {}, POSITIONS),
    "another stream that reads positions": (
        two_streams("Somebodys", ["blocks"], two_outputs, lambda part, x, z: part(x, z)),
        dict(blocks=None, family=Family((Blocks("blocks", text="z"),)), call=Case.call),
        "another of its outputs changes"),
    "a gate of zeros as an argument": (
        made(lambda self, x, gate: x + gate * (rotary(self, x) - x) + self.out(x),
             lambda part, x: part(x, torch.zeros(1, 1, D))), {}, POSITIONS),
    "a zero parameter under a root": (made(lambda self, x: x + (rotary(self, x) - x) * (1 + self.gate.sqrt())), {},
                                      POSITIONS),
    # arguments
    "a table read for one sample": (
        made(lambda self, x, rope, c: self.attend(x, lambda q: q * rope[0]),
             lambda part, x: part(x, TABLE[None], torch.ones(len(x), N))),
        dict(along={"rope": 1, "c": None}, call=lambda case: case.model(X)),
        "the axis of an argument in along=, which names none for c"),
    "a table that nobody named": (made(turned(), with_table(lambda table: table[None, None])), {},
                                  r"\(1, 1, 16, 4\), as long as the tokens: write along=\{'rope': 2\}, with which"),
    "tables that nobody named": (made(turned(lambda rope: rope[1]), with_table(lambda table: (table, table))), {},
                                 r"along=\{'rope': -2\} or along=\{'rope': 0\}|along=\{'rope': 0\}"),
    "tables for which no axis is right": (made(rotary, lambda part, x: part(x, TABLE[None])), {},
                                          r"write along=\{'c': 1 or None\}, .* passes .* none of these"),
    "a table that is falsely declared": (made(lambda self, x, rope: self.attend(x, lambda q: q * rope[:x.shape[1]]),
                                              with_table()), dict(along={"rope": None}),
                                         "an argument in along=, which names none for rope"),
    "a table without the batch axis that it gets": (made(turned(lambda rope: rope[None, None]), with_table()),
                                                    dict(along={"rope": -2}), "fails when each sample|depends on"),
    "a table of another length": (made(turned(), with_table(lambda table: table[:9])), dict(along={"rope": 0}),
                                  r"rope is \(9, 4\). Its axis 0 must be 16 long"),
    "a function of positions that nobody named": (CODES["LightningDiT"](), {},
                                                  "which names none for c, feat_rope|which names none for feat_rope"),
    "a number of tokens that nobody named": (made(counted, lambda part, x: part(x, N)), {},
                                             "length is 16, as long as the tokens: write along={'length': fewer}"),
    "a mask and a table that nobody named": (
        MASK_AND_TABLE, {}, r"write along=\{'mask': pairs, 'rope': 1\} \(`from routed import pairs`\), with which this "
                            r"block passes"),
    **{f"a padding mask {shape} that nobody named": (
        made(masked, lambda part, x, shape=shape: part(x, PADDING[:len(x) if shape[0] < 0 else 1].view(shape))), {},
        r"mask is \(\d, (1, )*16\), as long as the tokens") for shape in ((-1, N), (-1, 1, N), (-1, 1, 1, N), (1, N))},
    "a time for each frame, equal at first": (
        made(lambda self, x, e: self.attend((x.unflatten(1, (4, -1)) * e[:, :, None]).flatten(1, 2)),
             lambda part, x: part(x, torch.ones(len(x), 4, D))), {}, POSITIONS),
    "a value of another route": (
        made(with_value, forward=value_residual), dict(along={"value": 1}, routes=[Route(0, 1, 0.5), Route(2, 3, 0.5)]),
        r"value is \(\d, 8, 8\). Its axis 1 must be 16"),
    "a name that blocks do not have": (made(turned(), with_table()), dict(along={"rop": 0}),
                                       "write along={'rop': 0, 'rope': "),
    # tokens, and what else a block returns
    "text as tokens": (made(lambda self, context, x: self.attend(x), lambda part, x: part(torch.zeros_like(x), x)), {},
                       r"x is \(\d, 16, 8\), as long as the tokens"),
    "tokens that are not routed": (
        made(lambda self, context, x: self.attend(x), lambda part, x: part(x=x, context=x[:, :4])), {},
        r"gets tokens \(\d, 2, 8\) and returns \(\d, 16, 8\)"),
    "an output of diffusers": (made(lambda self, x: Output(self.attend(x)), lambda part, x: part(x).sample),
                               dict(routes=MIDDLE), r"tokens \(\d, 8, 8\) and returns Transformer2DModelOutput"),
    "tokens first": (made(lambda self, x: self.attend(x.transpose(0, 1)).transpose(0, 1),
                          forward=lambda net, x: through(net.blocks, x.transpose(0, 1))), {},
                     r"transpose tokens \(N, B, D\)|too few to route any"),
    "tokens first in torch's attention": (encoder(), dict(blocks="layers", call=lambda case: case.model(X)),
                                          "batch_first=True"),
    "a nested tensor": (
        encoder(batch_first=True),
        dict(blocks="layers", along={"src_key_padding_mask": 1}, call=lambda case: torch.no_grad()(case.call)()),
        "a nested tensor .set enable_nested_tensor=False"),
    # what a network does between its blocks, and their order
    **{f"a residual outside, blocks {start} to {end}": (
        made(lambda self, x: self.attend(x) - x, lambda part, x: x + part(x)), dict(routes=[Route(start, end, 0.5)]),
        "changes the tokens before block|computes with the others")
       for start, end in ((1, 1), (0, 0), (3, 3), (1, 2), (0, -1))},
    "tokens changed at the end": (made(attention, forward=changed_behind), dict(routes=MIDDLE), "changes the tokens"),
    "a long skip to another route": (EXACT["long skips around the middle"][0], dict(
        along={"skip": 1}, routes=[Route(1, 2, 0.5), Route(3, 4, 0.5)]), "in another pass or route"),
    "REPA's projector": (made(attention, forward=projected), {}, "After block 0 .* computes with the others"),
    "hidden states": (made(attention, forward=hidden_states), {}, "After block 0 .* returns them as features"),
    "a block twice": (made(attention, make=lambda parts: nn.ModuleList([*parts, parts[0]])), {},
                      "After block -1 came block 4"),
    "groups of blocks": (made(attention, make=lambda parts: nn.ModuleList([nn.ModuleList(parts)] * 2),
                              forward=lambda net, x: through(net.blocks[0], x)), {}, "After block -1 came the end"),
    "blocks that are left out": (made(attention, forward=lambda net, x: through(net.blocks[:3], x)), {},
                                 "After block 2 came the end: .* 4 blocks of Somebodys once.* Name a list"),
    "a pass that stops early, twice": (HIDDEN, dict(call=lambda case: [case.blocks[0](X) for _ in range(2)]),
                                       "After block 0 came the end"),
    "another network": (HIDDEN, dict(call=lambda case: None), "Somebodys was not called inside routed"),
    # samples of several sizes
    "videos of several sizes": (replace(wan(), inputs=dict(x=randn(BATCH, N + 4, D))), dict(blocks=None),
                                "videos of several sizes, or padded ones"),
    "images of several sizes": (
        replace(lumina(), inputs=dict(x=[torch.zeros(4, 4), torch.zeros(8, 4)], cap_mask=torch.ones(2, 1))),
        dict(blocks=None), "Images of several sizes"),
    # settings
    "an unknown network": (HIDDEN, dict(blocks=None), r"Somebodys of \S+ is not a known network \(docs/trainers.md\).*"
                           r"Lists of blocks: blocks \(4 of Block\)"),
    "a wrong path": (HIDDEN, dict(blocks="layers"), r"has no layers with several blocks.*: blocks \(4 of Block\)"),
    "class tokens alone": (made(attention, forward=class_token_first), dict(keep=17), "0 of 17 tokens may be"),
    "a token at the end": (HIDDEN, dict(keep=-1), "17 of 16 tokens may be routed, .* see keep="),
    "noise for another number of routes": (HIDDEN, dict(mask_noise=torch.rand(9, 2, N)), r"mask_noise is torch.float32 "
                                           r"\(9, 2, 16\), but it must be torch.float32 \(\d, 1, 16\)"),
    "a grid that is not even": (HIDDEN, dict(router=Router("grid"), keep=7), "there are 9 tokens"),
    "two descriptions": (HIDDEN, dict(family=families.FAMILIES["Flux"]), "as family= does: leave them out"),
    "a mask in a list": (HIDDEN, dict(keep_mask=[[True] * N] * 3), r"keep_mask is list, but .* torch.bool \(\d, 16\)"),
    **{str(route): (HIDDEN, dict(routes=[route]), says) for route, says in (
        (Route(0, 4, 0.5), r"leaves it: indices lie in \[-4, 3\]"), ((1, 2, 0.5), r"write Route\(start_layer_idx"),
        ("tread_config", "'tread_config' is not a route"), (Route(0, 1, 0.5, x_T=1.0), "does not support x_T"),
        (Route(1, 1, 0.5, return_from=0), "return_from"))},
    **{name: (Case(type(name, (nn.Module,), dict(forward=lambda _: None))(), {}, []), {}, why)
       for name, why in families.REFUSED.items()},
    # what is around a network
    "FSDP1": (Case(type("FullyShardedDataParallel", (nn.Module,), {})(), {}, []), {}, "shard it with FSDP2"),
    "a reentrant checkpoint of blocks": (
        made(attention, partial(checkpoint, use_reentrant=True), inputs=dict(x=X.clone().requires_grad_())), {},
        "block 0 of blocks runs without the gradient.*use_reentrant=False"),
    "a reentrant checkpoint of the network": (
        HIDDEN, dict(call=lambda case: checkpoint(case.model, X.clone().requires_grad_(), use_reentrant=True)),
        "The network runs without the gradient"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("batch", [BATCH, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_would_be_silently_wrong_is_refused_in_one_line(name, batch, dtype):
    case, description, says = REFUSED[name]
    case = copy.deepcopy(case)              # of which nothing was tried before
    options = dict(routes=[Route(0, 1, 0.5)], blocks="blocks", call=lambda case: case.call(
        **dict(x=X[:batch]) if case.inputs.get("x") is X else {})) | description
    call = options.pop("call")
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        said = refused(case.model, call=lambda: call(case), **options)
    assert re.search(says, said) and "\n" not in said, said
