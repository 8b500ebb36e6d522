"""Original implementations are recognised by their blocks: small networks of the same shape, routed or given fewer
tokens.

The codes themselves are run by `tests/rigs/test_original_codes.py`.
"""

import gc
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from foreign_networks import gradients, refused
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from routed import Blocks, Family, Route, routed
from routed.families import CODES

BATCH, N, TEXT, D, DEPTH = 3, 16, 5, 8, 2
LENGTHS = torch.tensor([5, 2, 4])


class Attention(nn.Module):
    """Mixes tokens (B, n, D) that are turned by a table, or a function of the tokens."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x, turn=None, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)      # (B, heads, n, D / 2)
        if turn is not None:
            q, k = turn(q), turn(k)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


def network(name, lists, forward, feed=lambda x, ids: dict(x=x, ids=ids), depth=DEPTH):
    """A network of a class's name, with lists of blocks of a forward each; `feed` makes its arguments."""
    net = type(name, (nn.Module,), dict(forward=forward, feed=staticmethod(feed), lengths=LENGTHS))()
    for path, block in lists.items():
        kind = type("Block", (Attention,), dict(forward=block, attend=Attention.forward))
        setattr(net, path, nn.ModuleList(kind() for _ in range(depth)))
    return net


def called(net, x, ids, sample=None):
    """Feeds a network tokens x (B, n, D), whose places in the grid are ids (n,), of all samples or of one."""
    net.lengths = LENGTHS if sample is None else LENGTHS[sample:sample + 1]
    return net(**net.feed(x, ids))


def on_axes(ids, batch):
    """The places (B, n, 3) of tokens, the first of which is the same for all."""
    return torch.stack([torch.zeros(len(ids)), ids.float(), ids.float()], dim=1).expand(batch, -1, -1)


def both(self, img, txt, turn=None, mask=None, text_first=True):
    first, second = (txt, img) if text_first else (img, txt)
    first, second = self.attend(torch.cat([first, second], dim=1), turn, mask).split(
        [first.shape[1], second.shape[1]], dim=1)
    return (second, first) if text_first else (first, second)


def table_of(ids):                          # a table of a row for each token, of those that are fed
    return torch.randn(N, D // 2, generator=torch.Generator().manual_seed(3))[ids]


def dit():
    def block(self, x, c):
        return self.attend(x + c[:, None])

    def forward(self, x, ids):
        for part in self.blocks:
            x = part(x, x.new_ones(len(x), D))
        return x
    return network("SiT", {"blocks": block}, forward)


def pixart():
    def block(self, x, y, t, mask=None, **kwargs):
        return self.attend(x + y.mean())

    def forward(self, x, ids):
        for part in self.blocks:
            x = part(x, torch.ones(1, 7, D), None, [TEXT] * len(x), HW=(4, 4))
        return x
    return network("PixArtMS", {"blocks": block}, forward)


def lightning():
    def block(self, x, c, feat_rope=None):
        return self.attend(x, feat_rope)

    class Turn(nn.Module):
        def __init__(self, ids):
            super().__init__()
            self.table = table_of(ids)

        def forward(self, q):
            return q * self.table

    def forward(self, x, ids):
        for part in self.blocks:
            x = part(x, None, Turn(ids))
        return x
    return network("LightningDiT", {"blocks": block}, forward)


def min_rf_dit():
    """Its network cuts a table to as many rows as a block has tokens, and its blocks know no batch axis of it."""
    def block(self, x, freqs_cis, adaln_input=None):
        return self.attend(x, lambda q: q * freqs_cis.view(1, 1, x.shape[1], D // 2))

    def forward(self, x, ids):
        self.freqs_cis = table_of(ids)
        for part in self.layers:
            x = part(x, self.freqs_cis[:x.shape[1]])
        return x
    return network("DiT_Llama", {"layers": block}, forward)


def flux():
    def double(self, img, txt, vec, pe, txt_attention_mask=None):
        return both(self, img, txt, lambda q: q * pe[..., 0])

    def single(self, x, vec, pe, txt_attention_mask=None):
        return self.attend(x, lambda q: q * pe[..., 0])

    def forward(self, img, img_ids):
        txt = torch.ones(len(img), TEXT, D)
        pe = torch.cat([torch.ones(TEXT, D // 2), table_of(img_ids[0, :, 1].long())])[None, None, :, :, None]
        for part in self.double_blocks:
            img, txt = part(img=img, txt=txt, vec=None, pe=pe)
        x = torch.cat([txt, img], dim=1)
        for part in self.single_blocks:
            x = part(x, vec=None, pe=pe)
        return x[:, TEXT:]
    return network("Flux", {"double_blocks": double, "single_blocks": single}, forward,
                   lambda x, ids: dict(img=x, img_ids=on_axes(ids, len(x))))


def sd35():
    def block(self, *args, **kwargs):       # its words are those of a function that it calls
        return both(self, args[1], args[0])[::-1]

    def forward(self, x, ids, skip_layers=()):
        context = torch.ones(len(x), TEXT, D)
        for part in self.joint_blocks:
            context, x = part(context, x, c=None)
        return x
    return network("MMDiTX", {"joint_blocks": block}, forward)


def min_rf():
    def double(self, c, x, global_cond, **kwargs):
        return both(self, x, c)[::-1]

    def single(self, cx, global_cond, **kwargs):
        return self.attend(cx)

    def forward(self, x, ids):
        c = torch.ones(len(x), TEXT, D)
        for part in self.double_layers:
            c, x = part(c, x, None)
        x = torch.cat([c, x], dim=1)
        for part in self.single_layers:
            x = part(x, None)
        return x[:, TEXT:]
    return network("MMDiT", {"double_layers": double, "single_layers": single}, forward)


def qwen():
    def block(self, hidden_states, encoder_hidden_states, encoder_hidden_states_mask, temb, image_rotary_emb=None,
              txt_seq_lens=None, joint_attention_kwargs=None, timestep_zero_index=None):
        image, text = image_rotary_emb
        drawn, condition = hidden_states.tensor_split([timestep_zero_index], dim=1)
        return both(self, torch.cat([drawn + 1, condition], dim=1), encoder_hidden_states,
                    lambda q: torch.cat([q[:, :, :TEXT] * text, q[:, :, TEXT:] * image[None, None]], dim=2))[::-1]

    def forward(self, x, ids, img_shapes):
        """Two tokens behind the image are a condition."""
        words, length = torch.ones(len(x), TEXT, D), x.shape[1]
        x = torch.cat([x, x.new_ones(len(x), 2, D)], dim=1)
        tables = torch.cat([table_of(ids), torch.ones(2, D // 2)]), torch.ones(TEXT, D // 2)
        for part in self.transformer_blocks:
            words, x = part(x, words, None, None, tables, timestep_zero_index=length)
        return x[:, :length]
    return network("QwenImageTransformer2DModel", {"transformer_blocks": block}, forward,
                   lambda x, ids: dict(x=x, ids=ids, img_shapes=[[(1, 1, x.shape[1]), (1, 1, 2)]]))


def lumina():
    def block(self, x, x_mask, freqs_cis, adaln_input=None):
        return self.attend(x, lambda q: q * freqs_cis[:, None], x_mask[:, None, None])

    def forward(self, x, ids, cap_mask):
        """Texts of several lengths, each before its image, and padding behind."""
        lengths, length = cap_mask.sum(1).tolist(), x.shape[1]
        whole = max(lengths) + length

        def joined(images, text, width):
            return torch.stack([torch.cat([torch.ones(n, width), image, torch.ones(whole - n - length, width)])
                                for n, image in zip(text, images, strict=True)])

        mask = torch.arange(whole) < cap_mask.sum(1, keepdim=True) + length
        x, table = joined(x, lengths, D), joined([table_of(ids)] * len(x), lengths, D // 2)
        for part in self.layers:
            x = part(x, mask, table, None)
        return torch.stack([part[n:n + length] for n, part in zip(lengths, x, strict=True)])

    net = network("NextDiT", {"layers": block}, forward, lambda x, ids: dict(
        x=x, ids=ids, cap_mask=(torch.arange(TEXT) < net.lengths[:, None]).long()))
    return net


TABLE = torch.randn(9, D // 2, generator=torch.Generator().manual_seed(5))


def wan(musubi=False, each=False):
    def turned(q, grid_sizes, freqs):
        """Rotary values made inside the block, of a part of the table for each axis, sample by sample."""
        c, out = D // 2, []
        parts = freqs.split([c - 2 * (c // 3), c // 3, c // 3], dim=1)
        for i, (f, h, w) in enumerate(grid_sizes.tolist()):
            rows = [part[:size].view([size if i == axis else 1 for i in range(3)] + [-1]).expand(f, h, w, -1)
                    for axis, (part, size) in enumerate(zip(parts, (f, h, w), strict=True))]
            out.append(q[i] * torch.cat(rows, dim=-1).flatten(0, 2))
        return torch.stack(out)

    def block(self, x, e, seq_lens, grid_sizes, freqs, context, context_lens):
        mask = (torch.arange(x.shape[1]) < seq_lens[:, None])[:, None, None]
        x = x + (e[:, :, 0] if e.ndim == 4 else 0)
        if isinstance(freqs, list):         # musubi-tuner's: a table for each sample
            return self.attend(x, lambda q: q * torch.stack([rows[:, 0] for rows in freqs])[:, None], mask)
        return self.attend(x, lambda q: turned(q, grid_sizes, freqs), mask)

    def forward(self, x, ids, seq_len=N):
        grid, given, lengths = torch.tensor([[2, 2, 4]] * len(x)), TABLE, torch.tensor([x.shape[1]] * len(x))
        e = torch.ones(len(x), 6, D)
        if each:
            e = torch.arange(1.0, N + 1)[ids].view(1, -1, 1, 1).expand(len(x), -1, 6, D)
        if musubi or len(ids) < N:          # fewer tokens have no grid, so they are fed by a table for each sample
            rows = torch.cat([TABLE[ids // 8, :2], TABLE[ids // 4 % 2, 2:3], TABLE[ids % 4, 3:]], dim=1)
            given = [rows[:, None]] * len(x)
        for part in self.blocks:
            x = part(x, e, lengths, grid, given, None, None)
        return x
    return network("WanModel", {"blocks": block}, forward)


def of_samples(ends):
    """Which tokens of a packed sequence see which, by the ends of each sample's tokens and of its padding."""
    whole = int(ends[2])
    return (torch.arange(whole) < (ends[1::2] - torch.arange(len(ends) // 2) * whole)[:, None])[:, None, None]


def hunyuan(musubi=False):
    def turn(length, cos):
        return lambda q: torch.cat([q[:, :, :length] * cos.view(1, 1, length, -1), q[:, :, length:]], dim=2)

    def double(self, img, txt, vec, cu_seqlens_q=None, cu_seqlens_kv=None, max_seqlen_q=None, max_seqlen_kv=None,
               freqs_cis=None):
        assert freqs_cis[0].shape == (img.shape[1], D // 2) and max_seqlen_q == img.shape[1] + TEXT
        return both(self, img, txt, turn(img.shape[1], freqs_cis[0]), of_samples(cu_seqlens_q), False)

    def single(self, x, vec, txt_len, cu_seqlens_q=None, cu_seqlens_kv=None, max_seqlen_q=None, max_seqlen_kv=None,
               freqs_cis=None):
        return self.attend(x, turn(x.shape[1] - txt_len, freqs_cis[0]), of_samples(cu_seqlens_q))

    def of_args(self, img, txt, vec, attn_mask=None, total_len=None, cu_seqlens_q=None, cu_seqlens_kv=None,
                max_seqlen_q=None, max_seqlen_kv=None, freqs_cis=None):
        assert total_len is None or torch.equal(total_len, attn_mask.sum(-1).amax((1, 2)))
        return both(self, img, txt, turn(img.shape[1], freqs_cis[0]), attn_mask, False)

    def single_args(self, x, vec, txt_len, attn_mask=None, total_len=None, cu_seqlens_q=None, cu_seqlens_kv=None,
                    max_seqlen_q=None, max_seqlen_kv=None, freqs_cis=None):
        return self.attend(x, turn(x.shape[1] - txt_len, freqs_cis[0]), attn_mask)

    def forward(self, x, ids):
        n, length = x.shape[1] + TEXT, x.shape[1]
        totals, starts = self.lengths + length, torch.arange(len(x)) * n
        ends = torch.cat([torch.zeros(1), torch.stack([starts + totals, starts + n], 1).flatten()]).int()
        seen = torch.arange(n) < totals[:, None]
        pairs = (seen[:, None] & seen[:, :, None]) | torch.eye(n).bool()
        more = (pairs[:, None], totals) if musubi else ()
        txt, freqs = torch.ones(len(x), TEXT, D), (table_of(ids), table_of(ids))
        for part in self.double_blocks:
            x, txt = part(x, txt, None, *more, ends, ends, n, n, freqs)
        x = torch.cat([x, txt], dim=1)
        for part in self.single_blocks:
            x = part(x, None, TEXT, *more, ends, ends, n, n, freqs)
        return x[:, :length]

    def handing_on(self, *args, **kwargs):
        return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
    if not musubi:
        return network("HYVideoDiffusionTransformer", {"double_blocks": double, "single_blocks": single}, forward)
    net = network("HYVideoDiffusionTransformer", dict.fromkeys(("double_blocks", "single_blocks"), handing_on), forward)
    type(net.double_blocks[0])._forward, type(net.single_blocks[0])._forward = of_args, single_args
    return net


@dataclass
class Params:
    """As musubi-tuner's AttentionParams."""

    split_attn: bool = False
    img_len: Any = None
    attention_mask: Any = None
    seqlens: Any = None
    cu_seqlens: Any = None
    max_seqlen: Any = None


def params_of(n, lengths):
    """Those of n tokens of an image before texts of these lengths, padded to TEXT."""
    totals = lengths + n
    return Params(False, n, (torch.arange(n + TEXT) < totals[:, None])[:, None, None], totals, None, n + TEXT)


def hunyuan15(musubi=False):
    def attended(self, img, txt, cos, mask):
        return both(self, img, txt, lambda q: torch.cat([q[:, :, :-TEXT] * cos[None, None], q[:, :, -TEXT:]], dim=2),
                    mask, False)

    def of_tencent(self, img, txt, vec, freqs_cis=None, text_mask=None, attn_param=None, is_flash=False,
                   block_idx=None):
        return attended(self, img, txt, freqs_cis[0], None)

    def of_musubi(self, img, txt, vec, freqs_cis=None, attn_params=None):
        assert attn_params.img_len == img.shape[1] and attn_params.max_seqlen == img.shape[1] + TEXT
        assert torch.equal(attn_params.seqlens, attn_params.attention_mask.sum((1, 2, 3)))
        return attended(self, img, txt, freqs_cis[0], attn_params.attention_mask)

    def forward(self, x, ids):
        txt, freqs = torch.ones(len(x), TEXT, D), (table_of(ids), table_of(ids))
        how = dict(attn_params=params_of(x.shape[1], self.lengths)) if musubi else dict(attn_param={"thw": [1, 4, 4]})
        for part in self.double_blocks:
            part.attn_mode = self.attn_mode
            x, txt = part(img=x, txt=txt, vec=None, freqs_cis=freqs, **how)
        return x
    net = network("HunyuanVideo_1_5_DiffusionTransformer",
                  {"double_blocks": of_musubi if musubi else of_tencent}, forward)
    net.single_blocks, net.attn_mode = nn.ModuleList(), "torch"
    return net


def dino():
    """DINOv3's blocks get a list of one tensor, and tables of the patches without a batch axis."""
    def block(self, x_or_x_list, rope_or_rope_list=None):
        [x], [tables] = x_or_x_list, rope_or_rope_list
        return [self.attend(x, lambda q: torch.cat([q[:, :, :3], q[:, :, 3:] * tables[0]], dim=2))]

    def forward(self, x, ids):
        x = [torch.cat([torch.ones(len(x), 3, D), x], dim=1)]
        for part in self.blocks:
            x = part(x, [(table_of(ids), table_of(ids))])
        return x[0][:, 3:]
    net = network("DinoVisionTransformer", {"blocks": block}, forward)
    net.n_storage_tokens = 2
    return net


def flux2():
    def double(self, img, txt, pe, pe_ctx, mod_img, mod_txt, attn_params):
        return both(self, img, txt, lambda q: q * torch.cat([pe_ctx, pe], dim=2)[..., 0])

    def single(self, x, pe, mod, attn_params):
        return self.attend(x, lambda q: q * pe[..., 0])

    def forward(self, x, x_ids):
        txt, pe_ctx = torch.ones(len(x), TEXT, D), torch.ones(len(x), 1, TEXT, D // 2, 1)
        pe = table_of(x_ids[0, :, 1].long())[None, None, :, :, None].expand(len(x), -1, -1, -1, -1)
        for part in self.double_blocks:
            x, txt = part(x, txt, pe, pe_ctx, None, None, Params())
        x = torch.cat([txt, x], dim=1)
        for part in self.single_blocks:
            x = part(x, torch.cat([pe_ctx, pe], dim=2), None, Params())
        return x[:, TEXT:]
    return network("Flux2", {"double_blocks": double, "single_blocks": single}, forward,
                   lambda x, ids: dict(x=x, x_ids=on_axes(ids, len(x))))


def image_first(name, path, block, feed):
    """musubi-tuner's Z-Image and Krea 2, whose texts of several lengths stand behind the image."""
    def forward(self, **call):
        img, ids = call["img"] if "img" in call else call["x"].flatten(2).mT, call["ids"]
        x = torch.cat([img, torch.ones(len(img), TEXT, D)], dim=1)
        table = torch.cat([table_of(ids), torch.ones(TEXT, D // 2)]).expand(len(img), -1, -1)
        for part in getattr(self, path):
            x = part(x, table, params_of(img.shape[1], self.lengths))
        return x[:, :img.shape[1]]
    return network(name, {path: block}, forward, feed)


def z_image():
    def block(self, x, freqs_cis, attn_params=None, adaln_input=None):
        assert attn_params.img_len + TEXT == x.shape[1] == attn_params.max_seqlen
        return self.attend(x, lambda q: q * freqs_cis[:, None], attn_params.attention_mask)
    return image_first("ZImageTransformer2DModel", "layers", block, lambda x, ids: dict(
        x=x.mT[:, :, None, None], ids=ids, patch_size=1, f_patch_size=1))


def krea2():
    def block(self, x, freqs, attn_params=None, vec=None):
        return self.attend(x, lambda q: q * freqs[:, None], attn_params.attention_mask)
    return image_first("SingleStreamDiT", "blocks", block, lambda x, ids: dict(img=x, ids=ids))


NETWORKS = {"SiT": dit, "PixArtMS": pixart, "LightningDiT": lightning, "DiT_Llama": min_rf_dit,
            "Flux": flux, "MMDiTX": sd35, "MMDiT": min_rf,
            "QwenImageTransformer2DModel": qwen, "NextDiT": lumina, "DinoVisionTransformer": dino, "Flux2": flux2,
            "ZImageTransformer2DModel": z_image, "SingleStreamDiT": krea2, "WanModel": wan,
            "WanModel, a time for each token": partial(wan, each=True),
            "WanModel, musubi-tuner": partial(wan, musubi=True),
            "HYVideoDiffusionTransformer": hunyuan, "HYVideoDiffusionTransformer, musubi-tuner": partial(hunyuan, True),
            "HunyuanVideo_1_5_DiffusionTransformer": hunyuan15,
            "HunyuanVideo_1_5_DiffusionTransformer, musubi-tuner": partial(hunyuan15, True)}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_like_an_original_code_is_routed_as_if_it_were_fed_fewer_tokens(name):
    torch.manual_seed(0)
    net, x, everywhere = NETWORKS[name](), torch.randn(BATCH, N, D), torch.arange(N)
    dense = called(net, x, everywhere)
    with routed(net, [Route(0, -1, 0.0)]):
        assert torch.equal(called(net, x, everywhere), dense)
    with torch.no_grad(), routed(net, [Route(1, -1, 0.5)]):     # the trial sees a route that starts later
        called(net, x, everywhere)
    with routed(net, [Route(0, -1, 0.75)]) as routing:
        out = called(net, x, everywhere)
    assert routing.trials and all(row.deviation < 1e-5 for row in routing.trials)
    ids, weight = routing.ids_keep[0], torch.randn(BATCH, N // 4, D)
    stayed = torch.stack([out[b, ids[b]] for b in range(BATCH)])
    (stayed * weight).sum().backward()
    routed_gradients = gradients(net)
    for b in range(BATCH):
        fewer = called(net, x[b:b + 1, ids[b]], ids[b], sample=b)
        assert torch.allclose(fewer[0], stayed[b], atol=1e-5)
        (fewer * weight[b]).sum().backward()
        left = [i for i in range(N) if i not in ids[b]]
        assert torch.equal(out[b, left], x[b, left])
    expected = gradients(net)
    assert routed_gradients.keys() == expected.keys()
    for key, gradient in routed_gradients.items():  # relative to the norm, as gradients reach a size of 100
        assert (gradient - expected[key]).norm() <= 1e-5 * max(expected[key].norm(), 1), key


@pytest.mark.parametrize("name", ["SiT", "Flux", "LightningDiT"])
def test_a_recomputed_pass_frees_its_tokens_with_its_graph(name):
    """The garbage collector would free them too, but after many steps."""
    net = NETWORKS[name]()
    gc.collect()
    gc.disable()
    try:
        with routed(net, [Route(0, -1, 0.75)]):
            out = checkpoint(called, net, torch.randn(BATCH, N, D), torch.arange(N), use_reentrant=False)
            seen = weakref.ref(net._routed.routing.latest)
            assert seen() is not None
            out.sum().backward()
        del out
        assert seen() is None
    finally:
        gc.enable()


def test_the_small_networks_are_of_known_implementations():
    alike = {"DiT": "SiT", "PixArt": "PixArtMS"}
    assert {alike.get(name, name) for name in CODES} == {name.partition(",")[0] for name in NETWORKS}


def test_a_custom_network_is_known_by_its_own_row():
    net, x, ids, noise = min_rf(), torch.randn(BATCH, N, D), torch.arange(N), torch.rand(BATCH, 1, N)
    net.__class__.__name__ = "Mine"
    row = Family((Blocks("double_layers", tokens="x", text="c", out=1), Blocks("single_layers")))
    with routed(net, [Route(0, -1, 0.5)], family=row, mask_noise=noise):
        out = net(x, ids).detach()
    net.__class__.__name__ = "MMDiT"
    with routed(net, [Route(0, -1, 0.5)], mask_noise=noise):
        assert torch.equal(net(x, ids), out)


def test_a_route_across_the_depth_of_repas_projector_is_refused_with_the_blocks():
    net, x, ids = dit(), torch.randn(BATCH, N, D), torch.arange(N)
    net.encoder_depth = 1
    for options in ({}, dict(blocks="blocks")):
        assert "after block 0 (encoder_depth=1). Start it at block 1 or later, or end it at block 0 or earlier" in \
            refused(net, [Route(0, 1, 0.5)], **options)
    with routed(net, [Route(0, 0, 0.5)]):
        called(net, x, ids)


def test_videos_of_several_sizes_and_padded_sequences_are_refused():
    net = wan()
    assert "videos of several sizes, or padded ones" in refused(
        net, [Route(0, 1, 0.5)], lambda: called(net, torch.randn(BATCH, N + 4, D), torch.arange(N + 4) % N))
    net = lumina()
    assert "Images of several sizes" in refused(net, [Route(0, 1, 0.5)], lambda: net(
        x=[torch.zeros(4, 4), torch.zeros(8, 4)], ids=None, cap_mask=torch.ones(2, 1)))
