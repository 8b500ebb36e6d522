"""Custom networks, described by blocks, along and keep: what blocks may look like, and which raise an error."""

import pytest
import torch
from test_codes import Attention, D, N
from test_routed import refused
from torch import nn

from routed import Blocks, Family, Route, routed
from routed.families import by_place

HALF, BATCH, TEXT = [Route(0, -1, 0.5)], 3, 5
X, TABLE = torch.randn(BATCH, N, D), torch.randn(N, D // 2)


def network(block, call):
    """Somebody's network of three blocks; `call` gives a block the tokens x and a table."""
    def forward(self, x, table=TABLE):
        for part in self.layers:
            x = call(part, x, table)
        return x

    net = type("Somebodys", (nn.Module,), dict(forward=forward))()
    kind = type("Block", (Attention,), dict(forward=block, attend=Attention.forward))
    net.layers = nn.ModuleList(kind() for _ in range(3))
    return net


def assert_as_if_fed_fewer(net, routes=HALF, **words):
    with routed(net, routes, **words) as routing:
        out = net(X)
    for b, ids in enumerate(routing.ids_keep[0]):
        assert len(ids) == N // 2
        assert torch.allclose(net(X[b:b + 1, ids], TABLE[ids])[0], out[b, ids], atol=1e-6)


def by_keyword(self, *, x, rope):
    return self.attend(x, lambda q: q * rope)


def by_any_keyword(self, x, **options):
    return self.attend(x, lambda q: q * options["rope"])


def by_default(self, x, rope=None):
    return self.attend(x, None if rope is None else lambda q: q * rope)


@pytest.mark.parametrize("block", [by_keyword, by_any_keyword, by_default])
def test_arguments_without_a_position_are_named_too(block):
    net = network(block, lambda part, x, table: part(x=x, rope=table[None, None]))
    assert_as_if_fed_fewer(net, blocks="layers", along={"rope": 2})


@pytest.mark.parametrize("cut", [lambda table: table, lambda table: table[None, None], lambda table: (table, table)])
def test_a_table_as_long_as_the_tokens_that_is_not_named_is_refused_as_a_block_may_cut_it_to_other_rows(cut):
    def block(self, x, rope):
        rows = rope[0] if isinstance(rope, tuple) else rope.view(-1, D // 2)
        return self.attend(x, lambda q: q * rows[:x.shape[1]])

    net = network(block, lambda part, x, table: part(x, cut(table)))
    said = refused(net, HALF, lambda: net(X), blocks="layers")
    assert "as long as the tokens: name its axis in along=, or write along={'rope': None}" in said
    said = refused(net, HALF, lambda: net(X), blocks="layers", along={"rope": None})
    assert "depends on where its tokens are" in said
    with routed(net, HALF, blocks="layers", along={"rope": None}, probe=False):
        net(X)


def test_a_table_changed_in_place_between_blocks_is_read_again():
    def call(part, x, table):
        if part is net.layers[0]:
            call.table = table[None, None].clone()
        out = part(x, call.table)
        call.table.mul_(2)
        return out

    net = network(by_default, call)
    assert_as_if_fed_fewer(net, blocks="layers", along={"rope": 2})


@pytest.mark.parametrize("whole", [False, True], ids=["of the image", "of all"])
def test_a_function_of_positions_rotates_the_image_or_the_full_sequence_in_both_lists(whole):
    def turned(rope):
        return rope if whole else lambda q: torch.cat([q[:, :, :TEXT], rope(q[:, :, TEXT:])], dim=2)

    def double(self, x, context, rope):
        joined = self.attend(torch.cat([context, x], dim=1), turned(rope))
        return joined[:, :TEXT], joined[:, TEXT:]

    def single(self, x, rope):
        return self.attend(x, turned(rope))

    def forward(self, x, table=None):
        table = self.table if table is None else torch.cat([self.table[:TEXT], table]) if whole else table
        context = x.new_ones(len(x), TEXT, D)

        def rope(q):                            # one for all blocks
            return q * table

        for part in self.double_blocks:
            context, x = part(x, context, rope)
        x = torch.cat([context, x], dim=1)
        for part in self.single_blocks:
            x = part(x, rope)
        return x[:, TEXT:]

    net = type("Somebodys", (nn.Module,), dict(forward=forward))()
    for name, block in (("double_blocks", double), ("single_blocks", single)):
        kind = type("Block", (Attention,), dict(forward=block, attend=Attention.forward))
        setattr(net, name, nn.ModuleList(kind() for _ in range(2)))
    net.table = torch.cat([torch.randn(TEXT, D // 2), TABLE]) if whole else TABLE
    row = Family((Blocks("double_blocks", {"rope": by_place(2)}, text="context", out=1),
                  Blocks("single_blocks", {"rope": by_place(2)}, joined=True)))
    assert_as_if_fed_fewer(net, family=row)


def one_stream(self, context, x):
    return self.attend(x)


@pytest.mark.parametrize(("block", "call", "says"), [
    (one_stream, lambda part, x, table: part(torch.zeros_like(x), x), "x is (3, 16, 8), as long as the tokens"),
    (one_stream, lambda part, x, table: part(x=x, context=x[:, :4]), "gets tokens (3, 2, 8) and returns (3, 16, 8)"),
    (lambda self, x: {"x": self.attend(x)}, lambda part, x, table: part(x)["x"],
     "gets tokens (3, 8, 8) and returns dict"),
    (lambda self, pair: pair, lambda part, x, table: part((x, x))[0], "pair is tuple, but tokens (B, N, D) are routed"),
    (lambda self, x: x, lambda part, x, table: part(x[:, None]), "x is (3, 1, 16, 8), but tokens (B, N, D) are routed"),
])
def test_blocks_whose_tokens_are_elsewhere_are_refused(block, call, says):
    net = network(block, call)
    assert says in refused(net, HALF, lambda: net(X), blocks="layers")


def test_sequences_before_samples_are_refused():
    """Samples would leave in place of tokens."""
    def encoder(**options):
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, D, **options), 3, enable_nested_tensor=False)

    assert "set batch_first=True" in refused(encoder(), HALF, blocks="layers")
    net, padded = encoder(batch_first=True), torch.arange(N) >= torch.tensor([[N], [N - 3], [4]])
    assert "src_key_padding_mask is (3, 16), as long as the tokens" in refused(
        net, HALF, lambda: net(X, src_key_padding_mask=padded), blocks="layers")
    with routed(net, HALF, blocks="layers", along={"src_key_padding_mask": 1}):
        net(X, src_key_padding_mask=padded)
    nested = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, D, batch_first=True), 3).eval()
    with torch.no_grad():
        assert "a nested tensor (set enable_nested_tensor=False)" in refused(
            nested, HALF, lambda: nested(X, src_key_padding_mask=padded), blocks="layers",
            along={"src_key_padding_mask": 1})
    with routed(net, HALF, blocks="layers") as routing:
        net(X)
    assert routing.ids_keep[0].shape == (BATCH, N // 2)


def test_a_block_that_is_called_again_is_refused():
    net = network(by_default, lambda part, x, table: part(x))
    net.layers[2] = net.layers[0]
    assert "1 of 3 blocks repeat an earlier one" in refused(net, HALF, blocks="layers")
