"""`routed` on unmodified public implementations, tiny and random: clones in the folder that TREAD_CLONES names.

    TREAD_CLONES=clones python -m pytest -m rig tests/rigs/test_original_codes.py -s

Packages that a code needs are found by PYTHONPATH (einops, loguru); attention for GPUs alone is stood in for below.
Prints the commit of each code, and the largest deviations from the network that is fed the kept tokens alone.
"""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import diffusers.loaders.peft  # noqa: F401  (it looks for flash_attn, so it is imported before a stub stands there)
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "routed"))

from foreign_networks import (
    BATCH,
    GRID,
    IMAGE,
    PLACES,
    POOLED,
    SEQUENCE,
    SHARE,
    TEXT,
    TEXT_MASK,
    TIME,
    VIDEO,
    WORDS,
    N,
    gradients,
    patches,
    randn,
)

from routed import Route, routed
from routed.passes import Pass

CLONES = Path(os.environ.get("TREAD_CLONES", "/nowhere"))
LABELS = torch.tensor([1, 2, 3])
DENSE = F.scaled_dot_product_attention
pytestmark = [pytest.mark.rig, pytest.mark.skipif(not CLONES.is_dir(), reason="TREAD_CLONES names no folder of clones")]


class Only:
    """Attention that sees no token of the image that left.

    So the kept tokens come out as those of a network that is fed them alone. The others keep their rows, and so every
    place and every table is as the code makes it.
    """

    def __init__(self, ids, first):
        self.first, self.calls = first, 0
        self.seen = torch.zeros(BATCH, N, dtype=torch.bool).scatter(1, ids, True)

    def __call__(self, q, k, v, attn_mask=None, **options):
        length, mask = k.shape[-2], attn_mask
        if length >= N and (first := self.first(length)) is not None:
            seen = self.seen if len(k) == BATCH else self.seen[self.calls % BATCH][None]
            self.calls += len(k) != BATCH
            if isinstance(first, int):
                first = [first] * len(seen)
            mask = torch.ones(len(seen), 1, 1, length, dtype=torch.bool)
            for b, place in enumerate(first):
                mask[b, 0, 0, place:place + N] = seen[b]
            if attn_mask is not None:
                mask = mask & attn_mask.bool()
        return DENSE(q, k, v, attn_mask=mask, **options)


def sequences(q, k, v, ends, *_, **__):
    """Flash attention over packed sequences (tokens, heads, D), of which each is a sample and its padding."""
    ends = ends.tolist()
    whole = ends[2]
    seen = torch.arange(whole) < torch.tensor([end - b * whole for b, end in enumerate(ends[1::2])])[:, None]
    q, k, v = (x.unflatten(0, (-1, whole)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None]).transpose(1, 2).flatten(0, 1)


def blocks_of_mask(lengths_q, lengths_k):
    return lengths_q, lengths_k


def packed(q, k, v, p=0.0, attn_bias=None):
    """xformers' attention (B, N, heads, D), of several sequences in one if it has a mask of blocks."""
    if attn_bias is None:
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    parts = zip(q.split(attn_bias[0], 1), k.split(attn_bias[1], 1), v.split(attn_bias[1], 1), strict=True)
    return torch.cat([packed(*part) for part in parts], dim=1)


def in_lengths(q, k, v, q_lens=None, k_lens=None, **_):
    """Wan's attention (B, N, heads, D) to the first k_lens tokens of each sample."""
    seen = torch.ones(len(q), k.shape[1]) > 0 if k_lens is None else torch.arange(k.shape[1]) < k_lens[:, None]
    return F.scaled_dot_product_attention(*(x.transpose(1, 2).float() for x in (q, k, v)),
                                          attn_mask=seen[:, None, None]).transpose(1, 2).to(q.dtype)


def ends_of(mask, images):
    lengths, whole = mask.sum(1) + images, mask.shape[1] + images
    starts = torch.arange(len(mask)) * whole
    return torch.cat([torch.zeros(1), torch.stack([starts + lengths, starts + whole], 1).flatten()]).int()


def text_seen(q, k, v, img_q_len, img_kv_len, text_mask=None, **_):
    q, k, v = (torch.cat(pair, dim=1).transpose(1, 2) for pair in (q, k, v))
    mask = None if text_mask is None else F.pad(text_mask.bool(), (img_q_len, 0), value=True)[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def with_mask(q, k, v, attn_mask=None, **_):
    attn_mask = attn_mask[:, None, None] if attn_mask.ndim == 2 else attn_mask
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=attn_mask)
    return out.transpose(1, 2).flatten(2)


class Anything(ModuleType):
    """A module that is imported and never run."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "MODELS":                # a registry of classes, which stay as they are
            return SimpleNamespace(register_module=lambda: lambda found: found)
        setattr(self, name, mock.MagicMock(name=name))
        return vars(self)[name]


@contextmanager
def code(folder, module, stubs=()):
    """Imports a module of a clone, and forgets it and its neighbours; `stubs` are packages that are not here."""
    before, path = set(sys.modules), list(sys.path)
    here = {name: sys.modules.pop(name)
            for name in list(sys.modules) if name.partition(".")[0] in ("models", "blocks", "utils")}
    sys.path.insert(0, str(CLONES / folder))
    for name in stubs:
        stub = sys.modules[name] = Anything(name)
        if (inside := CLONES / folder / name.replace(".", "/")).is_dir():
            stub.__path__ = [str(inside)]   # a package whose own first lines would import all of it
    try:
        yield importlib.import_module(module)
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            if (getattr(sys.modules[name], "__file__", None) or str(CLONES)).startswith(str(CLONES)):
                del sys.modules[name]
        sys.modules |= here


@dataclass
class Case:
    """A network, the inputs of a batch, and what of its output are tokens (B, N, D).

    `first` tells where the image is in a sequence of a length that is attended to, or None where it is not.
    """

    model: nn.Module
    inputs: dict[str, Any]
    tokens: Callable[[Any], torch.Tensor] = patches
    first: Callable[[int], Any] = {N: 0}.get
    checkpointing: Callable[[nn.Module], Any] | None = None

    def call(self):
        return self.tokens(self.model(**self.inputs))


def checkpointed_blocks(net):
    """As a loop that checkpoints a code's blocks from outside does it."""
    for block in net.blocks:
        block.forward = partial(checkpoint, type(block).forward.__get__(block), use_reentrant=False)


def class_labelled(folder, module, name="SiT", tokens=patches, **options):
    with code(folder, module,
              ("fairscale", "fairscale.nn", "fairscale.nn.model_parallel", "fairscale.nn.model_parallel.initialize",
               "fairscale.nn.model_parallel.layers")) as found:
        net = getattr(found, name)(input_size=8, in_channels=4, num_classes=5,
                                   **dict(hidden_size=32, depth=4, num_heads=2) | options)
    return Case(net, dict(x=IMAGE, t=SHARE, y=LABELS), tokens)


def pixart(name, masked):
    with code("PixArt-alpha", f"diffusion.model.nets.{name}", (
            "mmcv", "mmcv.runner", "mmcv.utils", "mmcv.utils.logging", "xformers", "xformers.ops", "timm.models.layers",
            "diffusion.model.builder")) as found:
        net = getattr(found, name)(input_size=8, in_channels=4, hidden_size=48, depth=4, num_heads=2,
                                   caption_channels=16, model_max_length=TEXT)
        attention = sys.modules["diffusion.model.nets.PixArt_blocks"].xformers.ops
    attention.memory_efficient_attention = packed
    attention.fmha.BlockDiagonalMask.from_seqlens = blocks_of_mask
    inputs = dict(x=IMAGE, timestep=TIME, y=WORDS[:, None], mask=TEXT_MASK.long()[:, None, None] if masked else None)
    if name == "PixArtMS":
        inputs["data_info"] = dict(img_hw=torch.tensor([[8.0, 8.0]] * BATCH), aspect_ratio=torch.ones(BATCH, 1))
    return Case(net, inputs)


FLUX = dict(in_channels=4, vec_in_dim=16, context_in_dim=16, hidden_size=16, mlp_ratio=2.0, num_heads=2, depth=2,
            depth_single_blocks=2, axes_dim=[2, 2, 4], theta=10000, qkv_bias=True, guidance_embed=False)


def flux(folder, module, options=None, params=None, **inputs):
    with code(folder, module, ("flash_attn", "toml", "cv2") if "flux" not in folder else ()) as found:
        net = found.Flux(found.FluxParams(**FLUX | (params or {})), **options or {})
    places = PLACES.expand(BATCH, -1, -1)
    return Case(net, dict(img=SEQUENCE, img_ids=places, txt=WORDS, txt_ids=torch.zeros(BATCH, TEXT, 3), timesteps=SHARE,
                     y=POOLED)
                | inputs, lambda out: out, {TEXT + N: TEXT}.get,
                getattr(type(net), "enable_gradient_checkpointing", None))


def flux2(edit=False):
    with code("musubi-tuner/src", "musubi_tuner.flux_2.flux2_models", ("flash_attn", "toml", "cv2")) as found:
        net = found.Flux2(found.Flux2Params(in_channels=4, context_in_dim=16, hidden_size=16, num_heads=2, depth=2,
                                            depth_single_blocks=2, axes_dim=[2, 2, 2, 2], use_guidance_embed=False),
                          "torch")
    places = PLACES[:, [0, 1, 2, 0]].expand(BATCH, -1, -1)
    x, behind = SEQUENCE, 6 * edit
    if edit:                                # a condition image stands behind, at another time
        places = torch.cat([places, places[:, :behind] + torch.eye(4)[0]], dim=1)
        x = torch.cat([x, randn(BATCH, behind, 4, seed=7)], dim=1)
    inputs = dict(x=x, x_ids=places, timesteps=SHARE, ctx=WORDS, guidance=None,
                  ctx_ids=torch.arange(4 * TEXT).view(TEXT, 4).expand(BATCH, -1, -1) / 7)
    return Case(net, inputs, lambda out: out[:, :N], {TEXT + N + behind: TEXT, N + behind: 0}.get,
                type(net).enable_gradient_checkpointing)


def z_image(split=False):
    with code("musubi-tuner/src", "musubi_tuner.zimage.zimage_model", ("flash_attn", "toml", "cv2")) as found:
        net = found.ZImageTransformer2DModel(
            in_channels=4, dim=16, n_layers=4, n_refiner_layers=0, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
            axes_dims=[4, 2, 2], axes_lens=[128, 16, 16], split_attn=split)
    return Case(net, dict(x=IMAGE[:, :, None], t=SHARE, cap_feats=WORDS, cap_mask=TEXT_MASK),
                lambda out: patches(out[:, :, 0]), lambda length: 0 if length > N or split else None,
                type(net).enable_gradient_checkpointing)


def krea2():
    with code("musubi-tuner/src", "musubi_tuner.krea2.krea2_mmdit", ("flash_attn", "toml", "cv2")) as found:
        net = found.SingleStreamDiT(found.SingleMMDiTConfig(
            features=32, tdim=16, txtdim=16, heads=2, multiplier=2, layers=4, patch=2, channels=1, kvheads=1,
            txtlayers=1, txtheads=2, txtkvheads=2))
    places = torch.cat([PLACES, torch.zeros(TEXT, 3)]).expand(BATCH, -1, -1)
    inputs = dict(img=SEQUENCE, context=WORDS[:, :, None], t=SHARE, pos=places,
                  mask=torch.cat([torch.ones(BATCH, N) > 0, TEXT_MASK], dim=1))
    return Case(net, inputs, lambda out: out, lambda length: 0 if length > N else None,
                type(net).enable_gradient_checkpointing)


def dino(folder, registers, **options):
    with code(folder, f"{folder}.models.vision_transformer") as found:
        net = found.DinoVisionTransformer(img_size=8, patch_size=2, in_chans=4, embed_dim=16, depth=4, num_heads=2,
                                          **options)
    if folder == "dinov3":
        net.init_weights()
    return Case(net, dict(x=IMAGE, is_training=True), lambda out: out["x_norm_patchtokens"],
                {N + 1 + registers: 1 + registers}.get)


def sd35(folder="sd3.5", module="mmditx", name="MMDiTX", attention=None):
    with code(folder, module, ("toml", "cv2", "flash_attn")) as found:
        options = dict(context_embedder_config=dict(target="torch.nn.Linear",
                                                    params=dict(in_features=16, out_features=256)))
        if name == "MMDiT":
            options = dict(context_embedder_in_features=16, context_embedder_out_features=256, model_type="sd3m")
        net = getattr(found, name)(
            input_size=8, patch_size=2, in_channels=4, depth=4, adm_in_channels=16, pos_embed_max_size=8,
            num_patches=64, qk_norm="rms", x_block_self_attn_layers=[0, 1], **options)
    nn.init.normal_(net.pos_embed)
    return Case(net, dict(x=IMAGE, t=TIME, y=POOLED, context=WORDS), patches, {TEXT + N: TEXT, N: 0}.get,
                type(net).enable_gradient_checkpointing if name == "MMDiT" else None)


def min_rf_mmdit():
    with code("minRF/advanced", "mmdit") as found:
        net = found.MMDiT(dim=32, n_layers=4, n_double_layers=2, n_heads=2, global_conddim=16, cond_seq_dim=16,
                          max_seq=N)
    return Case(net, dict(x=IMAGE, t=SHARE, conds=dict(c_seq=WORDS)), first={8 + TEXT + N: 8 + TEXT}.get)


def min_rf_dit():
    with code("minRF", "dit") as found:
        net = found.DiT_Llama(in_channels=4, dim=64, n_layers=4, n_heads=2)
    return Case(net, dict(x=IMAGE, t=SHARE, y=LABELS))


def lumina(folder, module):
    with code(folder, module, ("flash_attn", "flash_attn.bert_padding", "toml", "cv2", "fairscale")) as found:
        net = found.NextDiT(dim=24, n_layers=4, n_refiner_layers=0, n_heads=2, n_kv_heads=1, multiple_of=8,
                            cap_feat_dim=16, axes_dims=[4, 4, 4], axes_lens=[32, 16, 16], qk_norm=True)
    for module in net.modules():
        if hasattr(module, "attention_processor"):
            module.attention_processor = lambda *args, **options: F.scaled_dot_product_attention(*args, **options)
    mask = TEXT_MASK.long()
    given = dict(x=IMAGE, t=SHARE, cap_feats=WORDS, cap_mask=mask)
    return Case(net, given, patches, {TEXT + N: mask.sum(1).tolist()}.get,
                getattr(type(net), "enable_gradient_checkpointing", None))


def qwen():
    with code("musubi-tuner/src", "musubi_tuner.qwen_image.qwen_image_model", ("flash_attn", "toml")) as found:
        net = found.QwenImageTransformer2DModel(
            in_channels=4, out_channels=1, num_layers=4, attention_head_dim=8, num_attention_heads=2,
            joint_attention_dim=16, axes_dims_rope=(2, 2, 4), split_attn=True)
    inputs = dict(hidden_states=SEQUENCE, encoder_hidden_states=WORDS, encoder_hidden_states_mask=TEXT_MASK,
                  timestep=SHARE, img_shapes=[[(1, 4, 4)]] * BATCH, txt_seq_lens=TEXT_MASK.sum(1).tolist())
    return Case(net, inputs, lambda out: out, lambda length: 0 if length > N else None,
                type(net).enable_gradient_checkpointing)


def wan(folder="Wan2.1", module="wan.modules.model", version=None, **options):
    package = ("wan", "wan.modules") if folder.startswith("Wan") else (module.rpartition(".")[0],)
    with code(folder, module, ("flash_attn", "toml", "ftfy", "cv2", *package)) as found:
        net = found.WanModel(in_dim=4, out_dim=4, dim=24, ffn_dim=32, freq_dim=16, text_dim=16, text_len=TEXT,
                             num_heads=2, num_layers=4, **options)
        if folder.startswith("Wan"):
            found.flash_attention = in_lengths
        else:
            # Its own rounds to bfloat16.
            found.flash_attention = lambda qkv, k_lens=None, **_: in_lengths(*qkv, k_lens=k_lens)
    t = TIME[:, None].expand(-1, N) if folder == "Wan2.2" else TIME
    inputs = dict(x=list(VIDEO), t=t, context=[words[:n] for words, n in zip(WORDS, (5, 2, 4), strict=True)], seq_len=N)
    checkpointing = type(net).enable_gradient_checkpointing if "musubi" in folder else checkpointed_blocks
    return Case(net, inputs, lambda out: patches(torch.stack(out)), checkpointing=checkpointing)


def hunyuan(folder, module, mode="torch", **options):
    stubs = ("flash_attn", "flash_attn.flash_attn_interface", "toml")
    with code(folder, module, stubs) as found:
        texts = dict(text_states_dim=16, text_states_dim_2=16)
        texts = texts if "musubi" in folder else dict(args=SimpleNamespace(**texts))
        net = found.HYVideoDiffusionTransformer(
            in_channels=4, hidden_size=16, heads_num=2, mm_double_blocks_depth=2, mm_single_blocks_depth=2,
            rope_dim_list=[2, 2, 4], **texts, **options)
        found.get_cu_seqlens = ends_of
        sys.modules[found.attention.__module__].flash_attn_varlen_func = sequences
    angles = randn(N, 8, seed=4)
    inputs = dict(x=VIDEO, t=TIME, text_states=WORDS, text_mask=TEXT_MASK.long(), text_states_2=POOLED,
                  freqs_cos=angles.cos(), freqs_sin=angles.sin(), return_dict=False)
    return Case(net, inputs, patches, lambda length: 0 if length > N or "musubi" in folder else None,
                type(net).enable_gradient_checkpointing if "musubi" in folder else None)


def hunyuan15():
    within = "hyvideo.models.transformers"
    with code("HunyuanVideo-1.5", f"{within}.hunyuanvideo_1_5_transformer", (
            "hyvideo.models.text_encoders", "hyvideo.models.text_encoders.byT5", "hyvideo.utils.flash_attn_no_pad",
            f"{within}.modules.ssta_attention", "hyvideo.commons.parallel_states", "hyvideo.utils.communications",
            f"{within}.modules.attention", "flash_attn", "flash_attn.flash_attn_interface")) as found:
        found.maybe_fallback_attn_mode = lambda mode, *_, **__: mode
        found.parallel_attention = text_seen
        sys.modules[found.SingleTokenRefiner.__module__].attention = with_mask
        found.get_parallel_state = lambda: SimpleNamespace(sp_enabled=False)
        net = found.HunyuanVideo_1_5_DiffusionTransformer(
            patch_size=[1, 2, 2], in_channels=4, concat_condition=False, hidden_size=16, heads_num=2,
            mm_double_blocks_depth=4, mm_single_blocks_depth=0, rope_dim_list=[2, 2, 4], text_states_dim=16,
            attn_mode="torch", attn_param={})
    inputs = dict(hidden_states=VIDEO, timestep=TIME, text_states=WORDS, text_states_2=None,
                  encoder_attention_mask=TEXT_MASK.long())
    return Case(net, inputs, lambda out: patches(out[0] if isinstance(out, tuple) else out), {TEXT + N: 0}.get)


def hunyuan15_musubi(split):
    """Its sizes are fixed in its code, so each part is made anew, and smaller."""
    with code("musubi-tuner/src", "musubi_tuner.hunyuan_video_1_5.hunyuan_video_1_5_models",
              ("flash_attn", "toml")) as found:
        with torch.device("meta"):
            net = found.HunyuanVideo_1_5_DiffusionTransformer(split_attn=split)
        net.hidden_size, net.heads_num, net.rope_dim_list, net.unpatchify_channels = 16, 2, [2, 2, 4], 4
        net.byt5_in, net.vision_in = nn.Linear(16, 16), nn.Linear(16, 16)
        net.img_in, net.txt_in = found.PatchEmbed([1, 1, 1], 4, 16), found.SingleTokenRefiner(16, 16, 2, depth=1)
        net.time_in, net.cond_type_embedding = found.TimestepEmbedder(16, nn.SiLU), nn.Embedding(3, 16)
        net.double_blocks = nn.ModuleList(found.MMDoubleStreamBlock(16, 2, 2.0, qkv_bias=True) for _ in range(4))
        net.final_layer = found.FinalLayer(16, [1, 1, 1], 4, nn.SiLU)
    mask = TEXT_MASK.long()
    inputs = dict(hidden_states=randn(BATCH, 9, *GRID), timestep=TIME, text_states=WORDS, encoder_attention_mask=mask,
                  byt5_text_states=randn(BATCH, 3, 16), byt5_text_mask=torch.ones(BATCH, 3).long())
    return Case(net, inputs, lambda out: out.flatten(2).transpose(1, 2), lambda length: 0 if length > N else None,
                type(net).enable_gradient_checkpointing)


KOHYA = "musubi-tuner/src", "musubi_tuner.flux.flux_models"
HUNYUAN = "musubi-tuner/src", "musubi_tuner.hunyuan_model.models"
CASES = {
    "DiT": partial(class_labelled, "DiT", "models", "DiT"),
    "SiT": partial(class_labelled, "SiT", "models"),
    "REPA": partial(class_labelled, "REPA", "models.sit", tokens=lambda out: patches(out[0]), encoder_depth=4,
                    z_dims=[8], projector_dim=16, decoder_hidden_size=32, fused_attn=True, qk_norm=False),
    "LightningDiT": partial(class_labelled, "LightningDiT", "models.lightningdit", "LightningDiT", use_rope=True,
                            use_qknorm=True, use_swiglu=True, use_rmsnorm=True, wo_shift=True),
    "PixArt-alpha": partial(pixart, "PixArt", False),
    "PixArt-alpha, masked": partial(pixart, "PixArt", True),
    "PixArt-alpha, several sizes": partial(pixart, "PixArtMS", True),
    "flux": partial(flux, "flux/src", "flux.model", params=dict(out_channels=4)),
    "musubi-tuner Flux": partial(flux, *KOHYA, options=dict(attn_mode="torch")),
    "musubi-tuner Flux, split": partial(flux, *KOHYA, options=dict(attn_mode="torch", split_attn=True)),
    "sd-scripts Flux": partial(flux, "sd-scripts", "library.flux_models"),
    "sd-scripts Flux, masked": partial(flux, "sd-scripts", "library.flux_models", txt_attention_mask=TEXT_MASK),
    "musubi-tuner Qwen-Image": qwen,
    "musubi-tuner Flux 2": flux2,
    "musubi-tuner Flux 2, edit": partial(flux2, edit=True),
    "musubi-tuner Z-Image": z_image,
    "musubi-tuner Z-Image, split": partial(z_image, split=True),
    "musubi-tuner Krea 2": krea2,
    "dinov2": partial(dino, "dinov2", 0, block_chunks=0),
    "dinov2, registers": partial(dino, "dinov2", 2, block_chunks=0, num_register_tokens=2),
    "dinov3": partial(dino, "dinov3", 2, n_storage_tokens=2, ffn_ratio=2.0),
    "sd3.5": sd35,
    "sd-scripts SD3": partial(sd35, "sd-scripts", "library.sd3_models", "MMDiT"),
    "minRF MMDiT": min_rf_mmdit,
    "minRF DiT": min_rf_dit,
    "Lumina-Image-2.0": partial(lumina, "Lumina-Image-2.0", "models.model"),
    "sd-scripts Lumina 2": partial(lumina, "sd-scripts", "library.lumina_models"),
    "Wan2.1": wan,
    "Wan2.2": partial(wan, "Wan2.2"),
    "musubi-tuner Wan2.1": partial(wan, *("musubi-tuner/src", "musubi_tuner.wan.modules.model"), attn_mode="torch"),
    "musubi-tuner Wan2.2": partial(wan, *("musubi-tuner/src", "musubi_tuner.wan.modules.model"), attn_mode="torch",
                                   split_attn=True, model_version="2.2"),
    "HunyuanVideo": partial(hunyuan, "HunyuanVideo", "hyvideo.modules.models"),
    "musubi-tuner HunyuanVideo, torch": partial(hunyuan, *HUNYUAN, attn_mode="torch"),
    "musubi-tuner HunyuanVideo, split": partial(hunyuan, *HUNYUAN, attn_mode="torch", split_attn=True),
    "musubi-tuner HunyuanVideo, flash": partial(hunyuan, *HUNYUAN, attn_mode="flash"),
    "HunyuanVideo-1.5": hunyuan15,
    "musubi-tuner HunyuanVideo 1.5": partial(hunyuan15_musubi, False),
    "musubi-tuner HunyuanVideo 1.5, split": partial(hunyuan15_musubi, True),
}


def example(name):
    torch.manual_seed(0)
    with mock.patch.object(torch, "compile", lambda function=None, **_: function or (lambda f: f)):
        case = CASES[name]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in case.model.parameters():  # every gate open, no layer that starts as zero
            if not parameter.isfinite().all() or parameter.abs().max() > 9:     # memory that a code left as it was
                parameter.zero_()
            parameter.copy_(parameter + 0.05 * torch.randn(parameter.shape, generator=generator))
    case.model.eval()
    return case


def farthest(a, b):
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max().clamp_min(1)) for name in a)


def commit(name):
    folder = max((folder for folder in os.listdir(CLONES) if name.startswith(folder)), key=len)
    head = subprocess.run(["git", "-C", CLONES / folder, "rev-parse", "--short", "HEAD"], stdout=subprocess.PIPE)
    return f"{folder}@{head.stdout.decode().strip()}"


@pytest.mark.parametrize("name", CASES)
def test_a_public_code_is_routed_exactly(name):
    case = example(name)
    noise = torch.rand(BATCH, 1, N, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        dense = case.call()
        with routed(case.model, [Route(0, -1, 0.5)]) as routing:       # as it is, with its gates open
            case.call()
        rows = routing.trials
        assert rows and all(row.deviation < 1e-5 for row in rows)
        with routed(case.model, [Route(0, -1, 0.0)]):
            assert torch.equal(case.call(), dense)
    weight = randn(BATCH, N // 4, dense.shape[-1], seed=9)

    def kept(out, ids):
        return out.gather(1, ids[..., None].expand(-1, -1, out.shape[-1]))

    with routed(case.model, [Route(0, -1, 0.75)], mask_noise=noise) as routing:
        out = case.call()
    ids = routing.ids_keep[0]
    assert ids.shape == (BATCH, N // 4) and not torch.allclose(out, dense, atol=1e-4)
    stayed = kept(out, ids)
    (stayed * weight).sum().backward()
    found = gradients(case.model)
    with mock.patch.object(F, "scaled_dot_product_attention", Only(ids, case.first)):
        alone = kept(case.call(), ids)
        (alone * weight).sum().backward()
    expected = gradients(case.model)
    # a network that is fed fewer tokens has no gradient of what belongs to the others
    error, slope = float((stayed - alone).abs().max() / alone.abs().max().clamp_min(1)), farthest(found, expected)
    assert len(found) > 20 and error < 1e-5 and slope < 1e-5, (error, slope)

    seen = {}

    def image(values):
        """The first stream that has the image's tokens, and of it those."""
        parts = [part for x in values for part in (x if isinstance(x, list) else [x])]
        return next(image_of(case, x) for x in parts if isinstance(x, torch.Tensor) and x.ndim == 3
                    and case_first(case, x.shape[1]) is not None)

    call = Pass.call

    def recorded(self, block, forward, args, kwargs):
        if block.index == 1:
            seen["before"] = image([*args, *kwargs.values()])
        out = call(self, block, forward, args, kwargs)
        if block.ends:
            seen["after"] = image(out if isinstance(out, tuple | list) else [out])
        return out

    with mock.patch.object(Pass, "call", recorded), torch.no_grad(), routed(case.model, [Route(1, -2, 0.5)]) as routing:
        case.call()
    left = torch.ones(BATCH, N, dtype=torch.bool).scatter_(1, routing.ids_keep[0], False)
    before, after = seen["before"], seen["after"]
    assert torch.equal(before[left], after[left]) and not torch.equal(before[~left], after[~left])

    line = (f"{name} ({commit(name)}): forward {error:.1e}, gradients {slope:.1e}, "
            f"{len(rows)} trials {max(row.deviation for row in rows):.1e}")
    if case.checkpointing:
        plain = in_training(case)
        case.checkpointing(case.model)
        apart = farthest(in_training(case), plain)
        line += f", checkpointed {apart:.1e}"
        assert apart < 1e-5
    print(line)


def case_first(case, length):
    return 0 if length == N else case.first(length)


def image_of(case, x):
    first = case_first(case, x.shape[1])
    places = [first] * BATCH if isinstance(first, int) else first
    return torch.stack([x[b, place:place + N] for b, place in enumerate(places)])


def in_training(case):
    case.model.train()
    torch.manual_seed(5)
    with routed(case.model, [Route(0, 1, 0.5), Route(2, -1, 0.25)]):
        case.call().square().mean().backward()
    return gradients(case.model)
