"""`routed` on unmodified public implementations, tiny and random: clones in the folder that TREAD_CLONES names.

    TREAD_CLONES=clones python -m pytest -m rig tests/rigs/test_original_codes.py

Packages that a code needs are found by PYTHONPATH (einops, loguru); attention for GPUs alone is stood in for below.
"""

import importlib
import os
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import diffusers.loaders.peft  # noqa: F401  (it looks for flash_attn, so it is imported before a stub stands there)
import pytest
import torch
from library_networks import IMAGE, PLACES, POOLED, SEQUENCE, SHARE, TEXT, TEXT_MASK, TIME, VIDEO, WORDS, open_gates
from oracle import BATCH, Case, N, assert_exact, randn
from torch import nn
from torch.nn import functional as F

from routed.families import family_of

CLONES = Path(os.environ.get("TREAD_CLONES", "/nowhere"))
pytestmark = [pytest.mark.rig, pytest.mark.skipif(not CLONES.is_dir(), reason="TREAD_CLONES names no folder of clones")]


# ---- attention for GPUs alone ---------------------------------------------------------------------------------------


def attend(q, k, v, seen=None):
    """Attention (B, N, heads, D), to the tokens that are seen (B, N)."""
    mask = None if seen is None else seen[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def sequences(q, k, v, ends, *_, **__):
    """Flash attention over packed sequences (tokens, heads, D), of which each is a sample and its padding."""
    whole, samples = int(ends[2]), torch.arange(len(ends) // 2)
    seen = torch.arange(whole) < (ends[1::2] - samples * whole)[:, None]
    return attend(*(x.unflatten(0, (-1, whole)) for x in (q, k, v)), seen).flatten(0, 1)


def packed(q, k, v, p=0.0, attn_bias=None):
    """xformers' attention, of several sequences in one if it has a mask of blocks."""
    if attn_bias is None:
        return attend(q, k, v)
    parts = zip(q.split(attn_bias[0], 1), k.split(attn_bias[1], 1), v.split(attn_bias[1], 1), strict=True)
    return torch.cat([attend(*part) for part in parts], dim=1)


def in_lengths(q, k, v, q_lens=None, k_lens=None, **_):
    """Wan's attention, to the first k_lens tokens of each sample."""
    seen = None if k_lens is None else torch.arange(k.shape[1]) < k_lens[:, None]
    return attend(q.float(), k.float(), v.float(), seen).to(q.dtype)


def ends_of(mask, images):
    lengths, whole = mask.sum(1) + images, mask.shape[1] + images
    starts = torch.arange(len(mask)) * whole
    return torch.cat([torch.zeros(1), torch.stack([starts + lengths, starts + whole], 1).flatten()]).int()


def text_seen(q, k, v, img_q_len, img_kv_len, text_mask=None, **_):
    seen = None if text_mask is None else F.pad(text_mask.bool(), (img_q_len, 0), value=True)
    return attend(*(torch.cat(pair, dim=1) for pair in (q, k, v)), seen).flatten(2)


# ---- importing a code -----------------------------------------------------------------------------------------------


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


NOT_HERE = ["flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding", "toml", "cv2", "ftfy",
            "fairscale", "fairscale.nn", "fairscale.nn.model_parallel", "fairscale.nn.model_parallel.initialize",
            "fairscale.nn.model_parallel.layers"]


@contextmanager
def code(folder, module, stubs=""):
    """Imports a module of a clone, and forgets it and its neighbours; `stubs` are packages that are not needed."""
    before, path = set(sys.modules), list(sys.path)
    here = {name: sys.modules.pop(name)
            for name in list(sys.modules) if name.partition(".")[0] in ("models", "blocks", "utils")}
    sys.path.insert(0, str(CLONES / folder))
    for name in (*NOT_HERE, *stubs.split()):
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


def case(network, first=None, behind=0, **inputs):
    blocks = [block for spec in family_of(network).lists for block in network.get_submodule(spec.path)]
    network.register_forward_hook(lambda _, inputs, out: out[0] if isinstance(out, tuple) else out)
    return Case(network, inputs, blocks, N, first, behind)


# ---- the codes ------------------------------------------------------------------------------------------------------


def class_labelled(folder, module, name="SiT", inputs=(), **options):
    with code(folder, module) as found:
        net = getattr(found, name)(input_size=8, in_channels=4, num_classes=5,
                                   **dict(hidden_size=32, depth=4, num_heads=2) | options)
    return case(net, x=IMAGE, t=SHARE, y=torch.tensor([1, 2, 3]), **dict(inputs))


def pixart(name):
    with code("PixArt-alpha", f"diffusion.model.nets.{name}",
              "mmcv mmcv.runner mmcv.utils mmcv.utils.logging xformers xformers.ops timm.models.layers "
              "diffusion.model.builder") as found:
        net = getattr(found, name)(input_size=8, in_channels=4, hidden_size=48, depth=4, num_heads=2,
                                   caption_channels=16, model_max_length=TEXT)
        attention = sys.modules["diffusion.model.nets.PixArt_blocks"].xformers.ops
    attention.memory_efficient_attention = packed
    attention.fmha.BlockDiagonalMask.from_seqlens = lambda *lengths: lengths
    inputs = dict(x=IMAGE, timestep=TIME, y=WORDS[:, None], mask=TEXT_MASK.long()[:, None, None])
    if name == "PixArtMS":
        inputs["data_info"] = dict(img_hw=torch.tensor([[8.0, 8.0]] * BATCH), aspect_ratio=torch.ones(BATCH, 1))
    return case(net, **inputs)


def flux(folder, module, options, **inputs):
    with code(folder, module) as found:
        params = dict(in_channels=4, vec_in_dim=16, context_in_dim=16, hidden_size=16, mlp_ratio=2.0, num_heads=2,
                      depth=2, depth_single_blocks=2, axes_dim=[2, 2, 4], theta=10000, qkv_bias=True,
                      guidance_embed=False, **dict(out_channels=4) if folder == "flux/src" else {})
        net = found.Flux(found.FluxParams(**params), **options)
    return case(net, img=SEQUENCE, img_ids=PLACES.expand(BATCH, -1, -1), txt=WORDS, timesteps=SHARE, y=POOLED,
                txt_ids=torch.zeros(BATCH, TEXT, 3), **inputs)


def musubi(module):
    return code("musubi-tuner/src", f"musubi_tuner.{module}")


def flux2():
    """A condition image stands behind, at another time."""
    with musubi("flux_2.flux2_models") as found:
        net = found.Flux2(found.Flux2Params(in_channels=4, context_in_dim=16, hidden_size=16, num_heads=2, depth=2,
                                            depth_single_blocks=2, axes_dim=[2, 2, 2, 2], use_guidance_embed=False),
                          "torch")
    places = PLACES[:, [0, 1, 2, 0]]
    places = torch.cat([places, places[:6] + torch.eye(4)[0]]).expand(BATCH, -1, -1)
    return case(net, behind=6, x=randn(BATCH, N + 6, 4), x_ids=places, timesteps=SHARE, ctx=WORDS, guidance=None,
                ctx_ids=torch.arange(4 * TEXT).view(TEXT, 4).expand(BATCH, -1, -1) / 7)


def z_image(split):
    with musubi("zimage.zimage_model") as found:
        net = found.ZImageTransformer2DModel(
            in_channels=4, dim=16, n_layers=4, n_refiner_layers=0, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
            axes_dims=[4, 2, 2], axes_lens=[128, 16, 16], split_attn=split)
    return case(net, first=0, x=IMAGE[:, :, None], t=SHARE, cap_feats=WORDS, cap_mask=TEXT_MASK)


def krea2():
    with musubi("krea2.krea2_mmdit") as found:
        net = found.SingleStreamDiT(found.SingleMMDiTConfig(
            features=32, tdim=16, txtdim=16, heads=2, multiplier=2, layers=4, patch=2, channels=1, kvheads=1,
            txtlayers=1, txtheads=2, txtkvheads=2))
    return case(net, first=0, img=SEQUENCE, context=WORDS[:, :, None], t=SHARE,
                pos=torch.cat([PLACES, torch.zeros(TEXT, 3)]).expand(BATCH, -1, -1),
                mask=torch.cat([torch.ones(BATCH, N) > 0, TEXT_MASK], dim=1))


def qwen():
    with musubi("qwen_image.qwen_image_model") as found:
        net = found.QwenImageTransformer2DModel(
            in_channels=4, out_channels=1, num_layers=4, attention_head_dim=8, num_attention_heads=2,
            joint_attention_dim=16, axes_dims_rope=(2, 2, 4), split_attn=True)
    return case(net, first=0, hidden_states=SEQUENCE, encoder_hidden_states=WORDS, timestep=SHARE,
                encoder_hidden_states_mask=TEXT_MASK, img_shapes=[[(1, 4, 4)]] * BATCH,
                txt_seq_lens=TEXT_MASK.sum(1).tolist())


def sd3():
    with code("sd-scripts", "library.sd3_models") as found:
        net = found.MMDiT(
            input_size=8, patch_size=2, in_channels=4, depth=4, adm_in_channels=16, pos_embed_max_size=8,
            num_patches=64, qk_norm="rms", x_block_self_attn_layers=[0, 1], context_embedder_in_features=16,
            context_embedder_out_features=256, model_type="sd3m")
    nn.init.normal_(net.pos_embed)
    return case(net, x=IMAGE, t=TIME, y=POOLED, context=WORDS)


def lumina(folder, module):
    with code(folder, module) as found:
        net = found.NextDiT(dim=24, n_layers=4, n_refiner_layers=0, n_heads=2, n_kv_heads=1, multiple_of=8,
                            cap_feat_dim=16, axes_dims=[4, 4, 4], axes_lens=[32, 16, 16], qk_norm=True)
    for part in net.modules():
        if hasattr(part, "attention_processor"):
            part.attention_processor = lambda *args, **options: F.scaled_dot_product_attention(*args, **options)
    return case(net, first=TEXT_MASK.sum(1).tolist(), x=IMAGE, t=SHARE, cap_feats=WORDS, cap_mask=TEXT_MASK.long())


def wan(folder, module="wan.modules.model", stubs="wan wan.modules", t=TIME, **options):
    with code(folder, module, stubs) as found:
        net = found.WanModel(in_dim=4, out_dim=4, dim=24, ffn_dim=32, freq_dim=16, text_dim=16, text_len=TEXT,
                             num_heads=2, num_layers=4, **options)
        # musubi-tuner's own rounds to bfloat16
        found.flash_attention = in_lengths if folder.startswith("Wan") else lambda qkv, k_lens=None, **_: in_lengths(
            *qkv, k_lens=k_lens)
    return case(net, x=list(VIDEO), t=t, seq_len=N,
                context=[words[:n] for words, n in zip(WORDS, (5, 2, 4), strict=True)])


def hunyuan(folder, module, texts, **options):
    with code(folder, module) as found:
        net = found.HYVideoDiffusionTransformer(
            in_channels=4, hidden_size=16, heads_num=2, mm_double_blocks_depth=2, mm_single_blocks_depth=2,
            rope_dim_list=[2, 2, 4], **texts(text_states_dim=16, text_states_dim_2=16), **options)
        found.get_cu_seqlens = ends_of
        sys.modules[found.attention.__module__].flash_attn_varlen_func = sequences
    angles = randn(N, 8, seed=4)
    return case(net, first=0, x=VIDEO, t=TIME, text_states=WORDS, text_mask=TEXT_MASK.long(), text_states_2=POOLED,
                freqs_cos=angles.cos(), freqs_sin=angles.sin(), return_dict=False)


def hunyuan15():
    within = "hyvideo.models.transformers"
    with code("HunyuanVideo-1.5", f"{within}.hunyuanvideo_1_5_transformer", f"""hyvideo.models.text_encoders
              hyvideo.models.text_encoders.byT5 hyvideo.utils.flash_attn_no_pad {within}.modules.ssta_attention
              hyvideo.commons.parallel_states hyvideo.utils.communications {within}.modules.attention""") as found:
        found.maybe_fallback_attn_mode = lambda mode, *_, **__: mode
        found.parallel_attention = text_seen
        sys.modules[found.SingleTokenRefiner.__module__].attention = lambda q, k, v, attn_mask=None, **_: attend(
            q, k, v, attn_mask).flatten(2)
        found.get_parallel_state = lambda: SimpleNamespace(sp_enabled=False)
        net = found.HunyuanVideo_1_5_DiffusionTransformer(
            patch_size=[1, 2, 2], in_channels=4, concat_condition=False, hidden_size=16, heads_num=2,
            mm_double_blocks_depth=4, mm_single_blocks_depth=0, rope_dim_list=[2, 2, 4], text_states_dim=16,
            attn_mode="torch", attn_param={})
    return case(net, first=0, hidden_states=VIDEO, timestep=TIME, text_states=WORDS, text_states_2=None,
                encoder_attention_mask=TEXT_MASK.long())


def hunyuan15_musubi():
    """Its sizes are fixed in its code, so each part is made anew, and smaller."""
    with musubi("hunyuan_video_1_5.hunyuan_video_1_5_models") as found:
        with torch.device("meta"):
            net = found.HunyuanVideo_1_5_DiffusionTransformer(split_attn=True)
        net.hidden_size, net.heads_num, net.rope_dim_list, net.unpatchify_channels = 16, 2, [2, 2, 4], 4
        net.byt5_in, net.vision_in = nn.Linear(16, 16), nn.Linear(16, 16)
        net.img_in, net.txt_in = found.PatchEmbed([1, 1, 1], 4, 16), found.SingleTokenRefiner(16, 16, 2, depth=1)
        net.time_in, net.cond_type_embedding = found.TimestepEmbedder(16, nn.SiLU), nn.Embedding(3, 16)
        net.double_blocks = nn.ModuleList(found.MMDoubleStreamBlock(16, 2, 2.0, qkv_bias=True) for _ in range(4))
        net.final_layer = found.FinalLayer(16, [1, 1, 1], 4, nn.SiLU)
    return case(net, first=0, hidden_states=randn(BATCH, 9, 2, 2, 4), timestep=TIME, text_states=WORDS,
                encoder_attention_mask=TEXT_MASK.long(), byt5_text_states=randn(BATCH, 3, 16),
                byt5_text_mask=torch.ones(BATCH, 3).long())


REPA = dict(encoder_depth=4, z_dims=[8], projector_dim=16, decoder_hidden_size=32, fused_attn=True, qk_norm=False)
CASES = {
    "DiT": partial(class_labelled, "DiT", "models", "DiT"),
    "SiT": partial(class_labelled, "SiT", "models"),
    "REPA": partial(class_labelled, "REPA", "models.sit", **REPA),
    "REG": partial(class_labelled, "REG", "models.sit", inputs=dict(first=1, cls_token=randn(BATCH, 8)), **REPA),
    "LightningDiT": partial(class_labelled, "LightningDiT", "models.lightningdit", "LightningDiT", use_rope=True,
                            use_qknorm=True, use_swiglu=True, use_rmsnorm=True, wo_shift=True),
    "PixArt-alpha": partial(pixart, "PixArt"),
    "PixArt-alpha, several sizes": partial(pixart, "PixArtMS"),
    "flux": partial(flux, "flux/src", "flux.model", {}),
    "musubi-tuner Flux": partial(flux, "musubi-tuner/src", "musubi_tuner.flux.flux_models", dict(
        attn_mode="torch", split_attn=True)),
    "sd-scripts Flux": partial(flux, "sd-scripts", "library.flux_models", {}, txt_attention_mask=TEXT_MASK),
    "musubi-tuner Qwen-Image": qwen,
    "musubi-tuner Flux 2": flux2,
    "musubi-tuner Z-Image": partial(z_image, False),
    "musubi-tuner Z-Image, split": partial(z_image, True),
    "musubi-tuner Krea 2": krea2,
    "sd-scripts SD3": sd3,
    "Lumina-Image-2.0": partial(lumina, "Lumina-Image-2.0", "models.model"),
    "sd-scripts Lumina 2": partial(lumina, "sd-scripts", "library.lumina_models"),
    "Wan2.1": partial(wan, "Wan2.1"),
    "Wan2.2": partial(wan, "Wan2.2", t=TIME[:, None].expand(-1, N)),
    "musubi-tuner Wan": partial(wan, "musubi-tuner/src", "musubi_tuner.wan.modules.model", "musubi_tuner.wan.modules",
                                attn_mode="torch", split_attn=True, model_version="2.2"),
    "HunyuanVideo": partial(hunyuan, "HunyuanVideo", "hyvideo.modules.models",
                            lambda **texts: dict(args=SimpleNamespace(**texts))),
    **{f"musubi-tuner HunyuanVideo, {mode}": partial(
        hunyuan, "musubi-tuner/src", "musubi_tuner.hunyuan_model.models", dict, attn_mode=mode)
       for mode in ("torch", "flash")},
    "HunyuanVideo-1.5": hunyuan15,
    "musubi-tuner HunyuanVideo 1.5": hunyuan15_musubi,
}


@pytest.mark.parametrize("name", CASES)
def test_a_public_code_is_routed_exactly(name):
    torch.manual_seed(0)
    with mock.patch.object(torch, "compile", lambda function=None, **_: function or (lambda f: f)):
        found = CASES[name]()
    open_gates(found.model.eval())
    _, grads = assert_exact(found)
    assert len(grads) > 20
