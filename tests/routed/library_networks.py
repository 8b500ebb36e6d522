"""The networks of diffusers and timm that `routed` knows, tiny and random: a row for each way of use."""

import inspect
from functools import cache

import diffusers
import timm
import torch
from oracle import BATCH, Case, N, randn
from torch import nn

from routed.families import family_of

SIDE, TEXT, DEPTH = 4, 5, 4
GRID = (2, 2, 4)        # frames, rows and columns of the tokens of a video
IMAGE, SEQUENCE, WORDS, POOLED = randn(BATCH, 4, 8, 8), randn(BATCH, N, 4), randn(BATCH, TEXT, 16), randn(BATCH, 16)
VIDEO = randn(BATCH, 4, *(size * scale for size, scale in zip(GRID, (1, 2, 2), strict=True)))
TIME, SHARE = torch.tensor([1.0, 30.0, 500.0]), torch.tensor([0.001, 0.03, 0.5])
TIMES = randn(BATCH, N, seed=3).abs() * 500
TEXT_MASK = torch.arange(TEXT) < torch.tensor([[TEXT], [2], [4]])
PLACES = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
SIZES = dict(  # those of them that a network has
    sample_size=8, in_channels=4, out_channels=4, num_layers=DEPTH, num_single_layers=2, num_refiner_layers=1,
    num_attention_heads=2, attention_head_dim=8, pos_embed_max_size=8, axes_dims_rope=(2, 2, 4), rope_max_seq_len=16,
    joint_attention_dim=16, cross_attention_dim=16, caption_channels=16, caption_projection_dim=16, context_in_dim=16,
    text_embed_dim=16, text_dim=16, pooled_projection_dim=16, time_embed_dim=8, freq_dim=16, condition_dim=4,
    ffn_dim=32, hidden_size=16, intermediate_size=32, img_size=8, in_chans=4, embed_dim=16, depth=DEPTH, num_heads=2,
    num_classes=0, global_pool="")
INPUTS = dict(timestep=TIME, encoder_hidden_states=WORDS, x=IMAGE)


def open_gates(model: nn.Module) -> None:
    """Leaves no layer that starts as zero, nor memory as it was."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.isfinite().all() or parameter.abs().max() > 9:
                parameter.zero_()
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def fed(name: str, n: int = N, first: int | list[int] | None = None, behind: int = 0, train: bool = False,
        **given) -> Case:
    """A small network; what is given goes to its class or to its forward, whichever has an argument of the name."""
    network = getattr(diffusers, name, None) or getattr(timm.models, name)
    has, takes = (inspect.signature(part).parameters for part in (network, network.forward))
    sizes = {key: size for key, size in SIZES.items() if key in has}
    if "num_single_layers" in has:
        sizes["num_layers"] = 2
    sizes |= {key: value for key, value in given.items() if key in has}
    inputs = INPUTS | dict(hidden_states=VIDEO if "3D" in name else IMAGE)
    inputs = {key: value for key, value in inputs.items() if key in takes}
    inputs |= {key: value for key, value in given.items() if key not in has}
    torch.manual_seed(0)
    model = network(**sizes)
    open_gates(model)
    blocks = [block for spec in family_of(model).lists for block in model.get_submodule(spec.path)]
    return Case(model.train(train), inputs, blocks, n, first, behind)


# Which of the tokens of a sequence may leave is said where they are not the last: `first` and `behind` of `Case`.
MASKED = dict(encoder_attention_mask=TEXT_MASK.long())
TWO_TEXTS = MASKED | dict(encoder_hidden_states_2=randn(BATCH, 3, 8), text_embed_2_dim=8,
                          encoder_attention_mask_2=torch.ones(BATCH, 3).long())
FLUX = dict(hidden_states=SEQUENCE, timestep=SHARE, img_ids=PLACES, txt_ids=torch.zeros(TEXT, 3))
# in editing, a condition image stands behind the image that is predicted, at another first coordinate
EDIT = dict(hidden_states=randn(BATCH, N + 6, 4), behind=6, img_ids=torch.cat([PLACES, PLACES[:6] + torch.eye(3)[0]]))
AXES = FLUX | dict(axes_dims_rope=(2, 2, 2, 2), img_ids=PLACES[:, [0, 1, 2, 0]],
                   txt_ids=torch.arange(4 * TEXT).view(TEXT, 4) / 7)
FLUX2 = AXES | dict(guidance_embeds=False)
EDIT2 = EDIT | dict(img_ids=torch.cat([AXES["img_ids"], AXES["img_ids"][:6] + torch.eye(4)[0]]))
FLUX3 = AXES | dict(cond_in_channels=4, timestep_channels=16)
FIBO = FLUX | dict(text_encoder_dim=16, pooled_projection_dim=None,
                   text_encoder_layers=[randn(BATCH, TEXT, 16, seed=i) for i in range(DEPTH)])
CHROMA = FLUX | dict(approximator_num_channels=16, approximator_hidden_dim=16, approximator_layers=1)
COORDINATES = {name: torch.tensor([[8.0, 8.0]] * BATCH) for name in ("original_size", "target_size", "crop_coords")}
QWEN = dict(hidden_states=SEQUENCE, out_channels=1, timestep=SHARE, img_shapes=[[(1, SIDE, SIDE)]] * BATCH,
            encoder_hidden_states_mask=TEXT_MASK.float())
HIDREAM = dict(
    # its experts have a gradient in training alone
    train=True, first=0, patch_size=2, caption_channels=[16, 16], text_emb_dim=16, num_routed_experts=3,
    axes_dims_rope=(4, 2, 2), max_resolution=(8, 8), llama_layers=[0, 1, 1, 0], timesteps=TIME,
    encoder_hidden_states_t5=WORDS, pooled_embeds=POOLED, encoder_hidden_states_llama3=list(randn(2, BATCH, 3, 16)))
# it pads images and texts to 32 tokens
Z_IMAGE = dict(
    n=32, first=0, dim=16, n_layers=DEPTH, n_refiner_layers=0, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
    axes_dims=[4, 2, 2], axes_lens=[128, 16, 16], x=list(randn(BATCH, 4, 1, 8, 16)), t=SHARE)
HUNYUAN = MASKED | dict(first=0, rope_axes_dim=(2, 2, 4), pooled_projections=POOLED, guidance=TIME)
WAN = dict(attention_head_dim=12)
LTX = MASKED | dict(hidden_states=SEQUENCE, num_frames=GRID[0], height=GRID[1], width=GRID[2])
LTX2 = LTX | dict(
    audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=4,
    audio_cross_attention_dim=8, audio_hidden_states=randn(BATCH, 3, 4), audio_encoder_hidden_states=WORDS,
    audio_timestep=TIME, audio_encoder_attention_mask=TEXT_MASK.long(), audio_num_frames=3)
COSMOS = dict(adaln_lora_dim=4, max_size=(4, 8, 8), mlp_ratio=2.0, attention_head_dim=16,
              padding_mask=torch.zeros(1, 1, 4, 8))
KANDINSKY = dict(
    in_text_dim=16, in_text_dim2=16, time_dim=8, model_dim=16, ff_dim=32, num_text_blocks=1, num_visual_blocks=DEPTH,
    axes_dims=(4, 2, 2), hidden_states=VIDEO.movedim(1, -1), pooled_projections=POOLED)
ENCODER = dict(patch_size=2)
ANGLES = randn(N, 8, seed=4)


NETWORKS = {
    "PixArtTransformer2DModel": dict(added_cond_kwargs={}),
    "PixArtTransformer2DModel, masked": dict(
        added_cond_kwargs={}, attention_mask=torch.rand(BATCH, N, generator=torch.Generator().manual_seed(2)) > 0.3),
    "SD3Transformer2DModel": dict(first=0, pooled_projections=POOLED),
    "FluxTransformer2DModel": FLUX | dict(pooled_projections=POOLED),
    "FluxTransformer2DModel, Kontext": FLUX | EDIT | dict(pooled_projections=POOLED),
    "Flux2Transformer2DModel": FLUX2,
    "Flux2Transformer2DModel, edit": FLUX2 | EDIT2,
    "Flux3Transformer2DModel": FLUX3,
    "Flux3Transformer2DModel, edit": FLUX3 | dict(
        behind=2, image_cond_hidden_states=randn(BATCH, 2, 4, seed=6), image_cond_ids=randn(2, 4, seed=7)),
    "LongCatImageTransformer2DModel": FLUX,
    "BriaFiboTransformer2DModel": FIBO,
    "BriaFiboTransformer2DModel, edit": FIBO | EDIT,
    "BriaTransformer2DModel": FLUX | dict(pooled_projection_dim=None),
    "OvisImageTransformer2DModel": FLUX,
    "ChromaTransformer2DModel": CHROMA,
    "ChromaTransformer2DModel, masked": CHROMA | dict(
        attention_mask=torch.cat([TEXT_MASK, torch.ones(BATCH, N, dtype=torch.bool)], dim=1)),
    "Krea2Transformer2DModel": dict(
        hidden_states=SEQUENCE, num_key_value_heads=1, timestep_embed_dim=16, text_hidden_dim=16, num_text_layers=2,
        text_num_attention_heads=2, text_num_key_value_heads=2, text_intermediate_size=32, num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1, timestep=SHARE, encoder_hidden_states=randn(BATCH, TEXT, 2, 16),
        position_ids=torch.cat([torch.arange(3 * TEXT).view(TEXT, 3) / 7, PLACES]), encoder_attention_mask=TEXT_MASK),
    "PRXTransformer2DModel": dict(mlp_ratio=2.0, axes_dim=[4, 4], timestep=SHARE, attention_mask=TEXT_MASK),
    "HiDreamImageTransformer2DModel": HIDREAM,
    "HiDreamImageTransformer2DModel, padded": HIDREAM | dict(
        hidden_states=randn(BATCH, N, 16), img_ids=PLACES.expand(BATCH, -1, -1), img_sizes=[(SIDE, SIDE)] * BATCH,
        hidden_states_masks=(torch.arange(N) < torch.tensor([[N], [9], [11]])).float()),
    "CogView4Transformer2DModel": COORDINATES | dict(rope_axes_dim=(8, 8)),
    "CogVideoXTransformer3DModel": dict(
        hidden_states=VIDEO.transpose(1, 2), sample_width=8, sample_height=4, sample_frames=5, max_text_seq_length=TEXT,
        use_rotary_positional_embeddings=True, image_rotary_emb=(ANGLES.cos(), ANGLES.sin())),
    "AuraFlowTransformer2DModel": dict(
        num_mmdit_layers=2, num_single_dit_layers=2, pos_embed_max_size=64, timestep=SHARE),
    "Lumina2Transformer2DModel": MASKED | dict(
        first=TEXT_MASK.sum(1).tolist(), hidden_size=24, num_refiner_layers=0, num_kv_heads=1, multiple_of=8,
        cap_feat_dim=16, axes_dim_rope=(4, 4, 4), axes_lens=(32, 16, 16), timestep=SHARE),
    "QwenImageTransformer2DModel": QWEN,
    "QwenImageTransformer2DModel, as many words as samples": QWEN | dict(
        encoder_hidden_states=randn(BATCH, BATCH, 16), encoder_hidden_states_mask=torch.ones(BATCH, BATCH)),
    "QwenImageTransformer2DModel, edit": QWEN | dict(
        behind=6, hidden_states=randn(BATCH, N + 6, 4), zero_cond_t=True,
        img_shapes=[[(1, SIDE, SIDE), (1, 2, 3)]] * BATCH),
    "ZImageTransformer2DModel": Z_IMAGE | dict(cap_feats=list(WORDS)),
    "ZImageTransformer2DModel, texts of several lengths": Z_IMAGE | dict(
        cap_feats=[randn(n, 16, seed=n) for n in (TEXT, 40, TEXT)]),
    "HunyuanVideoTransformer3DModel": HUNYUAN,
    "HunyuanVideoTransformer3DModel, a given first frame": HUNYUAN | dict(
        first=4, image_condition_type="token_replace", hidden_states=randn(BATCH, 4, 5, 4, 4)),
    "HunyuanVideo15Transformer3DModel": TWO_TEXTS | dict(
        first=0, patch_size=2, image_embed_dim=8, rope_axes_dim=(2, 2, 4), image_embeds=randn(BATCH, 2, 8)),
    "WanTransformer3DModel": WAN,
    "WanTransformer3DModel, a time for each token": WAN | dict(timestep=TIMES),
    "WanVACETransformer3DModel": WAN | dict(
        vace_layers=[0, 2], vace_in_channels=4, control_hidden_states=randn(*VIDEO.shape, seed=5)),
    "LTXVideoTransformer3DModel": LTX,
    "LTXVideoTransformer3DModel, a time for each token": LTX | dict(timestep=TIMES),
    "LTX2VideoTransformer3DModel": LTX2,
    "LTX2VideoTransformer3DModel, a time for each token": LTX2 | dict(
        timestep=TIMES, rope_type="split", cross_attn_mod=False),
    "CosmosTransformer3DModel": COSMOS,
    "CosmosTransformer3DModel, a time for each frame": COSMOS | dict(
        timestep=TIMES[:, None, :GRID[0], None, None]),
    "Kandinsky5Transformer3DModel": KANDINSKY | dict(
        visual_rope_pos=tuple(map(torch.arange, GRID)), text_rope_pos=torch.arange(TEXT)),
    "Kandinsky6Transformer3DModel": KANDINSKY | dict(
        in_visual_dim=4, out_visual_dim=4, in_audio_dim=4, out_audio_dim=4, visual_cond=False,
        audio_hidden_states=randn(BATCH, 3, 4)),
    "VisionTransformer": ENCODER,
    "VisionTransformer, registers": ENCODER | dict(reg_tokens=2),
}


def example(name: str) -> Case:
    return fed(name.partition(",")[0], **NETWORKS[name])


family = cache(example)
