"""Networks of ten lines: of nobody in particular, or like the original codes that `routed` knows by name.

The codes themselves are run by `tests/rigs/test_original_codes.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from oracle import BATCH, Case, N, randn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

TEXT, D = 5, 8
X, TABLE = randn(BATCH, N, D), randn(N, D // 2, seed=3)
LENGTHS = torch.tensor([5, 2, 4])                                   # of the texts
SEEN = torch.arange(N + TEXT) < LENGTHS[:, None] + N                # in a sequence with the image


class Attention(nn.Module):
    """Mixes tokens (B, n, D) that are turned by a function of queries and keys."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor, turn: Callable | None = None, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)      # (B, heads, n, D / 2)
        if turn is not None:
            q, k = turn(q), turn(k)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Rotary(Attention):
    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        return super().forward(x, lambda q: q * rope[None, None])


class Plain(nn.Module):
    """A network that can be pickled and sent to another process."""

    def __init__(self, checkpointed: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.checkpointed = nn.ModuleList(Rotary() for _ in range(4)), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, TABLE, use_reentrant=False) if self.checkpointed else block(x, TABLE)
        return x


def through(blocks: Any, x: Tensor, call: Callable = lambda part, x: part(x)) -> Tensor:
    """What a network does in its forward: it calls its blocks in turn, each of which may return more than tokens."""
    for part in blocks:
        x = call(part, x)
        x = x[0] if isinstance(x, tuple) else x
    return x


def of_blocks(forward: Callable, depth: int) -> list[nn.Module]:
    kind = type("Block", (Attention,), dict(forward=forward, attend=Attention.forward))
    blocks = [kind() for _ in range(depth)]
    for i, block in enumerate(blocks):
        block.number = i
        block.gate, block.bias = nn.Parameter(torch.zeros(D)), nn.Parameter(0.02 * torch.randn(N))
    return blocks


def made(block: Callable, call: Callable = lambda part, x: part(x), name: str = "Somebodys", path: str = "blocks",
         depth: int = 4, forward: Callable | None = None, make: Callable = nn.ModuleList, inputs: dict | None = None,
         first: Any = None, **attributes: Any) -> Case:
    """A network of blocks of one forward, called by `call`; its forward is given the blocks and the tokens."""
    def run(self, x=None, **given):
        x = given.get("tokens", x)
        return forward(self, x) if forward else through(getattr(self, path), x, call)

    torch.manual_seed(0)
    net = type(name, (nn.Module,), dict(forward=run))()
    blocks = of_blocks(block, depth)
    setattr(net, path, make(blocks))
    for key, value in attributes.items():
        setattr(net, key, value)
    return Case(net, inputs or dict(x=X), [*getattr(net, path)], N, first)


def patches(rows: int) -> dict[str, Any]:
    """What DiT's and SiT's code holds of N patches: their embedder, and positions of them and of tokens in front."""
    return dict(pos_embed=torch.zeros(1, rows, D), x_embedder=SimpleNamespace(num_patches=N))


# ---- like original codes --------------------------------------------------------------------------------------------


def two_streams(name: str, paths: list[str], double: Callable, call: Callable, single: Callable | None = None,
                call_single: Callable | None = None, text_first: bool = True, **options: Any) -> Case:
    """A network with a list of blocks for tokens and text apart, and perhaps another for both together."""
    def forward(net, x):
        text = torch.ones(BATCH, TEXT, D)
        for part in getattr(net, paths[0]):
            x, text = call(part, x, text)
        joined = torch.cat([text, x] if text_first else [x, text], dim=1)
        return through(getattr(net, paths[1]), joined, call_single) if single else x

    case = made(double, name=name, path=paths[0], depth=2 if single else 4, forward=forward, **options)
    if single:
        behind = of_blocks(single, 2)
        setattr(case.model, paths[1], nn.ModuleList(behind))
        case.blocks += behind
    return case


def both(self, img, txt, turn=None, mask=None, text_first=True):
    """Returns both streams after attention of all tokens to all."""
    parts = [txt, img] if text_first else [img, txt]
    out = self.attend(torch.cat(parts, dim=1), turn, mask).split([part.shape[1] for part in parts], dim=1)
    return out[::-1] if text_first else out


def padded(table: Tensor, before: int = 0, behind: int = 0) -> Tensor:
    """A table with rows of ones for other tokens."""
    return F.pad(table, (0, 0, before, behind), value=1.0)


def turn_image(length: int, cos: Tensor) -> Callable:
    return lambda q: torch.cat([q[:, :, :length] * cos.view(1, 1, length, -1), q[:, :, length:]], dim=2)


def flux() -> Case:
    pe = padded(TABLE, before=TEXT)[None, None, :, :, None]
    return two_streams(
        "Flux", ["double_blocks", "single_blocks"],
        lambda self, img, txt, vec, pe, txt_attention_mask=None: both(self, img, txt, lambda q: q * pe[..., 0]),
        lambda part, x, text: part(img=x, txt=text, vec=None, pe=pe),
        lambda self, x, vec, pe, txt_attention_mask=None: self.attend(x, lambda q: q * pe[..., 0]),
        lambda part, x: part(x, vec=None, pe=pe), inputs=dict(x=X, img_ids=torch.zeros(BATCH, N, 3)))


def by_name() -> Case:
    """As minRF's, which names its streams x and c."""
    return two_streams(
        "Somebodys", ["double_layers", "single_layers"],
        lambda self, c, x, global_cond, **kwargs: both(self, x, c)[::-1], lambda part, x, c: part(c, x, None)[::-1],
        lambda self, cx, global_cond, **kwargs: self.attend(cx), lambda part, x: part(x, None))


def sd3() -> Case:
    """The words of its blocks are those of a function that they call."""
    return two_streams("MMDiT", ["joint_blocks"], lambda self, *args, **kwargs: both(self, args[1], args[0])[::-1],
                       lambda part, x, text: part(text, x, c=None)[::-1])


def wan(freqs: Any = TABLE, e: Tensor | None = None) -> Case:
    def turn(q, grid_sizes, freqs):
        """Rotary values made inside the block, of a part of the table for each axis, sample by sample."""
        c, out = D // 2, []
        parts = freqs.split([c - 2 * (c // 3), c // 3, c // 3], dim=1)
        for i, sizes in enumerate(grid_sizes.tolist()):
            rows = [part[:size].view([size if i == axis else 1 for i in range(3)] + [-1]).expand(*sizes, -1)
                    for axis, (part, size) in enumerate(zip(parts, sizes, strict=True))]
            out.append(q[i] * torch.cat(rows, dim=-1).flatten(0, 2))
        return torch.stack(out)

    def block(self, x, e, seq_lens, grid_sizes, freqs, context, context_lens):
        mask = (torch.arange(x.shape[1]) < seq_lens[:, None])[:, None, None]
        x = x + (e[:, :, 0] if e.ndim == 4 else 0)
        if isinstance(freqs, list):         # musubi-tuner's: a table for each sample
            return self.attend(x, lambda q: q * torch.stack([rows[:, 0] for rows in freqs])[:, None], mask)
        return self.attend(x, lambda q: turn(q, grid_sizes, freqs), mask)

    e, grid = torch.ones(BATCH, 6, D) if e is None else e, torch.tensor([[2, 2, 4]] * BATCH)
    return made(block, lambda part, x: part(x, e, torch.full([BATCH], N), grid, freqs, None, None), "WanModel")


def of_samples(ends: Tensor) -> Tensor:
    """Which tokens of a packed sequence are seen, by the ends of each sample's tokens and of its padding."""
    whole = int(ends[2])
    return (torch.arange(whole) < (ends[1::2] - torch.arange(len(ends) // 2) * whole)[:, None])[:, None, None]


def hunyuan() -> Case:
    """As musubi-tuner's, whose blocks hand all that they get to another function."""
    def double(self, img, txt, vec, cu_seqlens_q=None, cu_seqlens_kv=None, max_seqlen_q=None, max_seqlen_kv=None,
               freqs_cis=None):
        assert freqs_cis[0].shape == (img.shape[1], D // 2) and max_seqlen_q == img.shape[1] + TEXT
        return both(self, img, txt, turn_image(img.shape[1], freqs_cis[0]), of_samples(cu_seqlens_q), False)

    def single(self, x, vec, txt_len, cu_seqlens_q=None, cu_seqlens_kv=None, max_seqlen_q=None, max_seqlen_kv=None,
               freqs_cis=None):
        return self.attend(x, turn_image(x.shape[1] - txt_len, freqs_cis[0]), of_samples(cu_seqlens_q))

    def handing_on(self, *args, **kwargs):
        return self._forward(*args, **kwargs)

    whole, starts = N + TEXT, torch.arange(BATCH) * (N + TEXT)
    ends = torch.cat([torch.zeros(1), torch.stack([starts + LENGTHS + N, starts + whole], 1).flatten()]).int()
    given = dict(cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=whole, max_seqlen_kv=whole,
                 freqs_cis=(TABLE, TABLE))
    case = two_streams(
        "HYVideoDiffusionTransformer", ["double_blocks", "single_blocks"], handing_on,
        lambda part, x, text: part(x, text, None, **given), handing_on, lambda part, x: part(x, None, TEXT, **given),
        text_first=False, first=0)
    type(case.blocks[0])._forward, type(case.blocks[2])._forward = double, single
    return case


@dataclass
class Params:
    """As musubi-tuner's AttentionParams."""

    split_attn: bool = False
    img_len: Any = None
    attention_mask: Any = None
    seqlens: Any = None
    cu_seqlens: Any = None
    max_seqlen: Any = None


PARAMS = Params(False, N, SEEN[:, None, None], LENGTHS + N, None, N + TEXT)


def hunyuan15() -> Case:
    def block(self, img, txt, vec, freqs_cis=None, text_mask=None, attn_params=None, is_flash=False, block_idx=None):
        assert attn_params.img_len == img.shape[1] and attn_params.max_seqlen == img.shape[1] + TEXT
        assert torch.equal(attn_params.seqlens, attn_params.attention_mask.sum((1, 2, 3)))
        return both(self, img, txt, turn_image(img.shape[1], freqs_cis[0]), attn_params.attention_mask, False)

    return two_streams(
        "HunyuanVideo_1_5_DiffusionTransformer", ["double_blocks"], block,
        lambda part, x, text: part(img=x, txt=text, vec=None, freqs_cis=(TABLE, TABLE), attn_params=PARAMS), first=0,
        single_blocks=[])


def krea2() -> Case:
    """musubi-tuner's, whose texts of several lengths stand behind the image."""
    def block(self, x, freqs, attn_params=None, vec=None):
        assert attn_params.img_len + TEXT == x.shape[1] == attn_params.max_seqlen
        return self.attend(x, lambda q: q * freqs[:, None], attn_params.attention_mask)

    table = padded(TABLE, behind=TEXT).expand(BATCH, -1, -1)
    return made(block, lambda part, x: part(x, table, PARAMS), "SingleStreamDiT", first=0,
                inputs=dict(tokens=randn(BATCH, N + TEXT, D), img=X))


def lumina() -> Case:
    """Texts of several lengths, each before its image, and padding behind."""
    def block(self, x, x_mask, freqs_cis, adaln_input=None):
        return self.attend(x, lambda q: q * freqs_cis[:, None], x_mask[:, None, None])

    tables = randn(BATCH, N + TEXT, D // 2)
    return made(block, lambda part, x: part(x, SEEN, tables, None), "NextDiT", "layers", first=LENGTHS.tolist(),
                inputs=dict(x=randn(BATCH, N + TEXT, D), cap_mask=(torch.arange(TEXT) < LENGTHS[:, None]).long()))


CODES = {
    "SiT": partial(made, lambda self, x, c: self.attend(x + c[:, None]),
                   lambda part, x: part(x, torch.ones(BATCH, D)), "SiT", **patches(N)),
    "PixArtMS": partial(made, lambda self, x, y, t, mask=None, **kwargs: self.attend(x + y.mean()),
                        lambda part, x: part(x, torch.ones(1, 7, D), None, [TEXT] * BATCH, HW=(4, 4)), "PixArtMS"),
    "LightningDiT": partial(made, lambda self, x, c, feat_rope=None: self.attend(x, feat_rope),
                            lambda part, x: part(x, None, lambda q: q * TABLE), "LightningDiT"),
    "Flux": flux, "MMDiT": sd3, "NextDiT": lumina, "SingleStreamDiT": krea2, "WanModel": wan,
    "WanModel, a time for each token": partial(
        wan, e=torch.arange(1.0, N + 1).view(1, N, 1, 1).expand(BATCH, -1, 6, D)),
    "WanModel, musubi-tuner": partial(wan, [TABLE[:, None]] * BATCH), "HYVideoDiffusionTransformer": hunyuan,
    "HunyuanVideo_1_5_DiffusionTransformer": hunyuan15,
}
