"""Other people's networks for tests of `routed`: the real classes of diffusers, timm and transformers, tiny and
random.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from types import MethodType
from typing import Any

import diffusers
import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

from routed import routed
from routed.families import family_of

BATCH, SIDE, TEXT, DEPTH = 3, 4, 5, 4
N, K = 16, 4  # at selection ratio 0.75 the tokens that stay form a grid of their own, which a network can be fed
CONDITION = 6  # tokens of a condition image, behind the image that is predicted
GRID, SMALL = (2, 2, 4), (1, 2, 2)  # frames, rows and columns of the tokens of a video, and of those that stay


@dataclass
class Case:
    """A network, the inputs of a batch, what of its output are tokens, and how one sample is fed some tokens alone.

    None of it knows how `routed` works. `parts` are modules or methods whose output runs along the tokens: its axis, or
    (axis, place of the first token), or a function of that output, of the part's output on the small input, and of ids.
    `along` are inputs that do, or a function of the input and of ids. `small` are inputs of the size of K tokens, or
    a function of ids that makes them.
    """

    model: nn.Module
    inputs: dict[str, Any]
    parts: dict[str, Any] = field(default_factory=dict)
    along: dict[str, Any] = field(default_factory=dict)
    small: dict[str, Any] | Callable = field(default_factory=dict)
    tokens: Callable[[Any], Tensor] = lambda out: out
    train: bool = False
    n: int = N
    first: list[int] | None = None  # of each sample: the place of the first token in a joined sequence
    behind: int = 0  # where it is not given: how many tokens stand behind those that may leave

    @property
    def k(self) -> int:
        return self.n // 4

    @property
    def blocks(self) -> list[nn.Module]:
        return [block for spec in family_of(self.model).lists for block in self.model.get_submodule(spec.path)]

    def call(self, model=None, **inputs):
        out = (self.model if model is None else model)(**self.inputs | inputs)
        for name in ("sample", "last_hidden_state"):
            out = getattr(out, name, out)
        return out

    def alone(self, b: int, ids: Tensor) -> Tensor:
        """The tokens of the dense network fed with these of sample b alone, each at its own position."""
        one = {name: one_of(value, b) for name, value in self.inputs.items()}
        owners = {part: (self.model, part) if isinstance(getattr(self.model, part, None), MethodType) else
                  (self.model.get_submodule(part), "forward") for part in self.parts}
        before, seen = {part: getattr(*owner) for part, owner in owners.items()}, {}

        def recorded(part, *args, **kwargs):
            seen[part] = before[part](*args, **kwargs)
            return seen[part]

        def few(part, *args, **kwargs):
            where, whole = self.parts[part], seen[part]
            return where(whole, before[part](*args, **kwargs), ids) if callable(where) else rows(whole, where, ids)

        for part, owner in owners.items():
            setattr(*owner, partial(recorded, part))
        self.call(**one)
        for part, owner in owners.items():
            setattr(*owner, partial(few, part))
        one |= {name: where(one[name], ids) if callable(where) else rows(one[name], where, ids)
                for name, where in self.along.items()}
        out = self.call(**one | (self.small(ids) if callable(self.small) else self.small))
        for owner in owners.values():
            delattr(*owner)
        return self.tokens(out)


def one_of(value, b):
    """Sample b of an input, which is a tensor with a row for each sample, a list of samples, or one of such tensors."""
    if isinstance(value, Tensor | list) and len(value) == BATCH:
        return value[b:b + 1]
    return [one_of(part, b) for part in value] if isinstance(value, list) else value


def rows(value, where, ids):
    """The rows of the tokens `ids`, and all that stand before and behind the tokens; also of each part of a tuple."""
    if isinstance(value, tuple | list):
        return type(value)(rows(part, where, ids) for part in value)
    axis, first = where if isinstance(where, tuple) else (where, 0)
    if not isinstance(value, Tensor) or axis >= value.ndim or value.shape[axis] < N:
        return value
    behind = torch.arange(first + N, value.shape[axis])
    return value.index_select(axis, torch.cat([torch.arange(first), ids + first, behind]))


def in_grid(axis, whole, few, ids, grid=SMALL):
    """As `rows`, for an output whose tokens lie on three axes, the first of which is given."""
    return whole.flatten(axis, axis + 2).index_select(axis, ids).unflatten(axis, grid)


def patches(image):
    """Pixels as tokens: (B, C, 2h, 2w) to (B, hw, 4C), and (B, C, F, 2h, 2w) to (B, Fhw, 4C)."""
    if image.ndim == 5:
        return torch.cat([patches(frame) for frame in image.unbind(2)], dim=1)
    return nn.functional.pixel_unshuffle(image, 2).flatten(2).transpose(1, 2)


def randn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


IMAGE, SEQUENCE, WORDS, POOLED = randn(BATCH, 4, 8, 8), randn(BATCH, N, 4), randn(BATCH, TEXT, 16), randn(BATCH, 16)
VIDEO = randn(BATCH, 4, *(size * scale for size, scale in zip(GRID, (1, 2, 2), strict=True)))
SMALL_IMAGE, SMALL_VIDEO = torch.zeros(1, 4, 4, 4), torch.zeros(1, 4, 1, 4, 4)
TIME, SHARE = torch.tensor([1.0, 30.0, 500.0]), torch.tensor([0.001, 0.03, 0.5])
TIMES = randn(BATCH, N, seed=3).abs() * 500
TEXT_MASK = torch.arange(TEXT) < torch.tensor([[TEXT], [2], [4]])
MASKED = dict(encoder_attention_mask=TEXT_MASK.long())
TWO_TEXTS = MASKED | dict(encoder_hidden_states_2=randn(BATCH, 3, 8),
                          encoder_attention_mask_2=torch.ones(BATCH, 3).long())
PLACES = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
SIZES = dict(  # those of them that a network has
    sample_size=8, in_channels=4, out_channels=4, num_layers=DEPTH, num_single_layers=2, num_refiner_layers=1,
    num_attention_heads=2, attention_head_dim=8, pos_embed_max_size=8, axes_dims_rope=(2, 2, 4), rope_max_seq_len=16,
    joint_attention_dim=16, cross_attention_dim=16, caption_channels=16, caption_projection_dim=16, context_in_dim=16,
    text_embed_dim=16, text_dim=16, pooled_projection_dim=16, time_embed_dim=8, freq_dim=16, condition_dim=4,
    ffn_dim=32)


def fed(network, sizes=None, inputs=None, **how):
    """A small network of a class of diffusers with its inputs, among them a time and a text if it takes them."""
    has, takes = (inspect.signature(method).parameters for method in (network.__init__, network.forward))
    common = {name: size for name, size in SIZES.items() if name in has}
    if "num_single_layers" in common:
        common["num_layers"] = 2
    given = {name: value for name, value in dict(timestep=TIME, encoder_hidden_states=WORDS).items() if name in takes}
    return Case(network(**common | (sizes or {})), given | inputs, **how)


def image(network, sizes=None, parts=None, along=None, first=None, x=IMAGE, small=SMALL_IMAGE, **inputs):
    return fed(network, sizes, dict(hidden_states=x) | inputs, parts=parts, along=along or {}, first=first,
               small=dict(hidden_states=small), tokens=patches)


video = partial(image, x=VIDEO, small=SMALL_VIDEO)


def sequence(network, sizes=None, parts=None, along=None, first=None, small=None, condition=0, **inputs):
    """For networks that are fed tokens, behind which those of a condition image may stand."""
    x = randn(BATCH, N + condition, 4) if condition else SEQUENCE
    return fed(network, sizes, dict(hidden_states=x) | inputs, parts=parts or {}, along=dict(hidden_states=1) |
               (along or {}), first=first, small=small or {}, behind=condition,
               tokens=lambda out: out[:, :-condition or None])


def flux(network, sizes=None, along=None, places=PLACES, edit=False, **inputs):
    """In editing, the condition image has another first coordinate."""
    condition = CONDITION * edit
    ids = torch.cat([places, places[:condition] + torch.eye(places.shape[1])[0]])
    return sequence(network, sizes, along=dict(img_ids=0) | (along or {}), condition=condition,
                    **dict(timestep=SHARE, img_ids=ids, txt_ids=torch.zeros(TEXT, 3)) | inputs)


def four_axes(network, sizes, **inputs):
    """Flux 2 and 3, whose places have four axes, and whose words follow one another."""
    return flux(network, dict(axes_dims_rope=(2, 2, 2, 2)) | sizes, places=PLACES[:, [0, 1, 2, 0]],
                txt_ids=torch.arange(4 * TEXT).view(TEXT, 4) / 7, **inputs)


def qwen(network, edit=False):
    """In editing, the second of its two images is a condition."""
    condition = [(1, 2, CONDITION // 2)] * edit
    return sequence(
        network, dict(out_channels=1, zero_cond_t=edit), parts={"pos_embed": 0}, condition=CONDITION * edit,
        small=dict(img_shapes=[[SMALL, *condition]]), img_shapes=[[(1, SIDE, SIDE), *condition]] * BATCH,
        encoder_hidden_states_mask=TEXT_MASK.float(), timestep=SHARE)


def qwen21(network, condition=0, **sizes):
    """The last of its images is predicted; each place of an image in the text stands for four tokens."""
    slots, shapes = [False] * 3 + [True] * (condition // 4) + [False] * 2, [(1, 2, 2)] * (condition // 4)
    before = TEXT + condition
    return fed(
        network, sizes,
        dict(hidden_states=randn(BATCH, condition + N, 4), encoder_hidden_states=randn(BATCH, len(slots), 16),
             timestep=SHARE, img_shapes=[[*shapes, (1, SIDE, SIDE)]] * BATCH,
             img_mask=torch.tensor([slots + [True] * (N // 4)] * BATCH),
             encoder_hidden_states_mask=torch.arange(len(slots)) < torch.tensor([[len(slots)], [2], [3]])),
        parts={"pos_embed": (0, before)}, along=dict(hidden_states=(1, condition)),
        small=dict(img_shapes=[[*shapes, SMALL]], img_mask=torch.tensor([slots + [True]])),
        tokens=lambda out: out[:, before:])


def hidream(network, padded=False):
    """Its experts have a gradient in training alone, where the output is left as tokens."""
    x, how = dict(hidden_states=IMAGE), dict(parts={"x_embedder": 1, "pe_embedder": 1},
                                             small=dict(hidden_states=SMALL_IMAGE))
    if padded:
        x = dict(hidden_states=randn(BATCH, N, 16), img_ids=PLACES.expand(BATCH, -1, -1),
                 img_sizes=[(SIDE, SIDE)] * BATCH,
                 hidden_states_masks=(torch.arange(N) < torch.tensor([[N], [9], [11]])).float())
        how = dict(along=dict.fromkeys(x, 1))
    return fed(
        network, dict(patch_size=2, caption_channels=[16, 16], text_emb_dim=16, num_routed_experts=3,
                      axes_dims_rope=(4, 2, 2), max_resolution=(8, 8), llama_layers=[0, 1, 1, 0]),
        x | dict(timesteps=TIME, encoder_hidden_states_t5=WORDS, pooled_embeds=POOLED,
                 encoder_hidden_states_llama3=list(randn(2, BATCH, 3, 16))),
        train=True, first=[0] * BATCH, tokens=lambda out: out.permute(0, 2, 1, 3).flatten(2), **how)


def cogvideox(network):
    angles = randn(N, 8, seed=4)
    return fed(
        network, dict(sample_width=8, sample_height=4, sample_frames=5, max_text_seq_length=TEXT,
                      use_rotary_positional_embeddings=True),
        dict(hidden_states=VIDEO.transpose(1, 2), image_rotary_emb=(angles.cos(), angles.sin())),
        parts={"patch_embed": (1, TEXT)}, along=dict(image_rotary_emb=0),
        small=dict(hidden_states=SMALL_VIDEO.transpose(1, 2)), tokens=lambda out: patches(out.transpose(1, 2)))


def ltx(network, time=TIME, sizes=None, parts=None, **inputs):
    """Its time may be one for each token."""
    return sequence(network, sizes, parts or {"rope": 1}, dict(timestep=1) if time.ndim > 1 else {}, timestep=time,
                    num_frames=GRID[0], height=GRID[1], width=GRID[2], **MASKED, **inputs)


def ltx2(network, time=TIME, **sizes):
    axis = 2 if sizes else 1
    return ltx(network, time, sizes | dict(
        audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=4,
        audio_cross_attention_dim=8), parts={"rope": axis, "cross_attn_rope": axis},
        audio_hidden_states=randn(BATCH, 3, 4), audio_encoder_hidden_states=WORDS, audio_timestep=TIME,
        audio_encoder_attention_mask=TEXT_MASK.long(), audio_num_frames=3)


def cosmos(network):
    return video(network, dict(adaln_lora_dim=4, max_size=(4, 8, 8), mlp_ratio=2.0, attention_head_dim=16),
                 {"patch_embed": partial(in_grid, 1), "rope": 0, "learnable_pos_embed": 1},
                 padding_mask=torch.zeros(1, 1, 4, 8))


def by_frames(whole, few, ids):
    """For Mochi's embedded patches (frames, rows x columns, D)."""
    return whole.flatten(0, 1)[ids].unflatten(0, (SMALL[0], -1))


def kandinsky(network, sizes, rope_axis, small=None, **inputs):
    return fed(
        network, dict(in_text_dim=16, in_text_dim2=16, time_dim=8, model_dim=16, ff_dim=32, num_text_blocks=1,
                      num_visual_blocks=DEPTH, axes_dims=(4, 2, 2)) | sizes,
        dict(hidden_states=VIDEO.movedim(1, -1), pooled_projections=POOLED) | inputs,
        parts={"visual_embeddings": partial(in_grid, 1), "visual_rope_embeddings": partial(in_grid, rope_axis)},
        small=dict(hidden_states=SMALL_VIDEO.movedim(1, -1)) | (small or {}),
        tokens=lambda out: patches(out.movedim(-1, 1)))


def kandinsky6(network, **sizes):
    return kandinsky(network, dict(in_visual_dim=4, out_visual_dim=4, in_audio_dim=4, out_audio_dim=4,
                                   visual_cond=False) | sizes, 0, audio_hidden_states=randn(BATCH, 3, 4))


def text_then_image(whole, few, ids):
    """For Lumina 2's positions, whose embedder sees the image as tokens; the table is text, then image."""
    text = whole[3].shape[1] - whole[0].shape[1]
    return *few[:3], torch.cat([whole[3][:, :text], whole[3][:, text:][:, ids]], dim=1), *few[4:]


def z_image(network, lengths=(TEXT, TEXT, TEXT)):
    """It pads images and texts to 32 tokens, so its images have 32; its refiner, off here, sees them all."""
    def few_patches(whole, few, ids):
        return [[part[0][ids]] if i in (0, 3, 5) else (few if i == 2 else whole)[i] for i, part in enumerate(whole)]

    return fed(
        network, dict(dim=16, n_layers=DEPTH, n_refiner_layers=0, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
                      axes_dims=[4, 2, 2], axes_lens=[128, 16, 16]),
        dict(x=list(randn(BATCH, 4, 1, 8, 16)), t=SHARE, cap_feats=[randn(n, 16, seed=n) for n in lengths]),
        parts={"patchify_and_embed": few_patches}, small=dict(x=[torch.zeros(4, 1, 4, 8)]),
        tokens=lambda out: patches(torch.stack(out)), n=32, first=[0] * BATCH)


def wan(network, time=TIME, sizes=None, **inputs):
    return video(network, dict(attention_head_dim=12) | (sizes or {}),
                 {"patch_embedding": partial(in_grid, 2), "rope": 1}, dict(timestep=1) if time.ndim > 1 else {},
                 timestep=time, **inputs)


def vace(network):
    """Its blocks of the control see all tokens, and add to all tokens between its blocks."""
    case = wan(network, sizes=dict(vace_layers=[0, 2], vace_in_channels=4),
               control_hidden_states=randn(*VIDEO.shape, seed=5))
    case.parts |= {"vace_blocks.0": 1, "vace_blocks.1": 1}
    case.small |= dict(control_hidden_states=SMALL_VIDEO)
    return case


def a_time_for_each_frame(network, make, embedded, axis, time, **inputs):
    """Fed as a video of one token a frame, with the time of the frame that the token belongs to."""
    def of_frames(value, ids):
        return value.index_select(time.ndim // 2, ids // (N // GRID[0]))

    case = make(network, **inputs)
    case.inputs |= dict(timestep=time)
    case.parts[embedded] = partial(in_grid, axis, grid=(K, 1, 1))
    case.along, case.small = dict(timestep=of_frames), dict(hidden_states=torch.zeros(1, 4, K, 2, 2))
    return case


def hunyuan_video(network, **sizes):
    return video(network, dict(rope_axes_dim=(2, 2, 4)) | sizes, {"x_embedder": 1, "rope": 0},
                 pooled_projections=POOLED, guidance=TIME, **MASKED)


def first_frame_given(network):
    """Its first frame of four tokens never leaves, as it is the condition."""
    case = hunyuan_video(network, image_condition_type="token_replace")
    case.inputs["hidden_states"] = randn(BATCH, 4, 5, 4, 4)
    case.parts = {"x_embedder": (1, 4), "rope": (0, 4)}
    case.small = dict(hidden_states=torch.zeros(1, 4, 2, 4, 4))
    case.tokens = lambda out: patches(out)[:, 4:]
    return case


def encoder(network, place=lambda prefix: (1, prefix), **sizes):
    """One of timm's; `place` says from the number of class and register tokens where the others are."""
    model = network(img_size=8, patch_size=2, in_chans=4, embed_dim=16, depth=DEPTH, num_heads=2, num_classes=0,
                    global_pool="", **sizes)
    return Case(model, dict(x=IMAGE), parts={"_pos_embed": place(model.num_prefix_tokens)},
                tokens=lambda out: out[:, model.num_prefix_tokens:])


def with_rope(axis):
    return lambda prefix: lambda whole, few, ids: (rows(whole[0], (1, prefix), ids), rows(whole[1], axis, ids))


def of_transformers(network, parts=None, **sizes):
    config = getattr(transformers, network.__name__.removesuffix("Model") + "Config")(
        hidden_size=16, num_hidden_layers=DEPTH, num_attention_heads=2, intermediate_size=32, image_size=8,
        patch_size=2, num_channels=4, **sizes)
    prefix = 1 + sizes.get("num_register_tokens", 0)
    return Case(network(config), dict(pixel_values=IMAGE), parts={"embeddings": (1, prefix)} | (parts or {}),
                tokens=lambda out: out[:, prefix:])


POSITIONS = dict(parts={"pos_embed": 1})
EMBEDDED = dict(parts={"x_embedder": 1, "rope": 0})
FIBO = dict(sizes=dict(text_encoder_dim=16, pooled_projection_dim=None),
            text_encoder_layers=[randn(BATCH, TEXT, 16, seed=i) for i in range(DEPTH)])
FLUX3 = dict(cond_in_channels=4, timestep_channels=16)
CHROMA = dict(approximator_num_channels=16, approximator_hidden_dim=16, approximator_layers=1)
COORDINATES = {name: torch.tensor([[8.0, 8.0]] * BATCH) for name in ("original_size", "target_size", "crop_coords")}
NETWORKS = {
    "DiTTransformer2DModel": partial(
        image, **POSITIONS, timestep=TIME.long(), class_labels=torch.tensor([1, 2, 3])),
    "PixArtTransformer2DModel": partial(image, **POSITIONS, added_cond_kwargs={}),
    "PixArtTransformer2DModel, masked": partial(
        image, **POSITIONS, added_cond_kwargs={}, along=dict(attention_mask=1),
        attention_mask=torch.rand(BATCH, N, generator=torch.Generator().manual_seed(2)) > 0.3),
    "SD3Transformer2DModel": partial(image, **POSITIONS, pooled_projections=POOLED),
    "SD3Transformer2DModel, 3.5": partial(
        image, sizes=dict(qk_norm="rms_norm", dual_attention_layers=(0, 1)), **POSITIONS, pooled_projections=POOLED),
    "FluxTransformer2DModel": partial(flux, pooled_projections=POOLED),
    "FluxTransformer2DModel, Kontext": partial(flux, pooled_projections=POOLED, edit=True),
    "Flux2Transformer2DModel": partial(four_axes, sizes=dict(guidance_embeds=False)),
    "Flux2Transformer2DModel, edit": partial(four_axes, sizes=dict(guidance_embeds=False), edit=True),
    "Flux3Transformer2DModel": partial(four_axes, sizes=FLUX3),
    "Flux3Transformer2DModel, edit": partial(
        four_axes, sizes=FLUX3, first=[0] * BATCH, image_cond_hidden_states=randn(BATCH, 2, 4, seed=6),
        image_cond_ids=randn(2, 4, seed=7)),
    "LongCatImageTransformer2DModel": flux,
    "LongCatImageTransformer2DModel, edit": partial(flux, edit=True),
    "BriaFiboTransformer2DModel": partial(flux, **FIBO),
    "BriaFiboTransformer2DModel, edit": partial(flux, **FIBO, edit=True),
    "BriaTransformer2DModel": partial(flux, sizes=dict(pooled_projection_dim=None)),
    "OvisImageTransformer2DModel": flux,
    "ChromaTransformer2DModel": partial(flux, sizes=CHROMA),
    "ChromaTransformer2DModel, masked": partial(
        flux, sizes=CHROMA, along=dict(attention_mask=(1, TEXT)),
        attention_mask=torch.cat([TEXT_MASK, torch.ones(BATCH, N, dtype=torch.bool)], dim=1)),
    "Krea2Transformer2DModel": partial(
        sequence, sizes=dict(
            num_key_value_heads=1, intermediate_size=32, timestep_embed_dim=16, text_hidden_dim=16, num_text_layers=2,
            text_num_attention_heads=2, text_num_key_value_heads=2, text_intermediate_size=32,
            num_layerwise_text_blocks=1, num_refiner_text_blocks=1),
        along=dict(position_ids=(0, TEXT)), timestep=SHARE, encoder_hidden_states=randn(BATCH, TEXT, 2, 16),
        position_ids=torch.cat([torch.arange(3 * TEXT).view(TEXT, 3) / 7, PLACES]), encoder_attention_mask=TEXT_MASK),
    "PRXTransformer2DModel": partial(
        image, sizes=dict(hidden_size=16, mlp_ratio=2.0, num_heads=2, depth=DEPTH, axes_dim=[4, 4]),
        parts={"img_in": 1, "pe_embedder": 2}, timestep=SHARE, attention_mask=TEXT_MASK),
    "HiDreamImageTransformer2DModel": hidream,
    "HiDreamImageTransformer2DModel, padded": partial(hidream, padded=True),
    "CogView3PlusTransformer2DModel": partial(image, parts={"patch_embed": (1, TEXT)}, **COORDINATES),
    "CogView4Transformer2DModel": partial(
        image, sizes=dict(rope_axes_dim=(8, 8)), parts={"patch_embed": 1, "rope": 0}, **COORDINATES),
    "CogVideoXTransformer3DModel": cogvideox,
    "HunyuanImageTransformer2DModel": partial(
        image, sizes=dict(patch_size=(2, 2), text_embed_2_dim=8, rope_axes_dim=(4, 4)), **EMBEDDED, **TWO_TEXTS),
    "AuraFlowTransformer2DModel": partial(
        image, sizes=dict(num_mmdit_layers=2, num_single_dit_layers=2, pos_embed_max_size=64), **POSITIONS,
        timestep=SHARE),
    "Lumina2Transformer2DModel": partial(
        image, sizes=dict(hidden_size=24, num_refiner_layers=0, num_kv_heads=1, multiple_of=8, cap_feat_dim=16,
                          axes_dim_rope=(4, 4, 4), axes_lens=(32, 16, 16)),
        parts={"x_embedder": 1, "rope_embedder": text_then_image}, first=TEXT_MASK.sum(1).tolist(), timestep=SHARE,
        **MASKED),
    "QwenImageTransformer2DModel": qwen,
    "QwenImageTransformer2DModel, edit": partial(qwen, edit=True),
    "QwenImage21Transformer2DModel": qwen21,
    "QwenImage21Transformer2DModel, edit": partial(qwen21, condition=4),
    "QwenImage21Transformer2DModel, one time": partial(qwen21, causal_condition=False),
    "ZImageTransformer2DModel": z_image,
    "ZImageTransformer2DModel, texts of several lengths": partial(z_image, lengths=(TEXT, 40, TEXT)),
    "HunyuanVideoTransformer3DModel": hunyuan_video,
    "HunyuanVideoTransformer3DModel, a given first frame": first_frame_given,
    "HunyuanVideo15Transformer3DModel": partial(
        video, sizes=dict(patch_size=2, text_embed_2_dim=8, image_embed_dim=8, rope_axes_dim=(2, 2, 4)), **EMBEDDED,
        **TWO_TEXTS, image_embeds=randn(BATCH, 2, 8)),
    "WanTransformer3DModel": wan,
    "WanTransformer3DModel, a time for each token": partial(wan, time=TIMES),
    "WanVACETransformer3DModel": vace,
    "SkyReelsV2Transformer3DModel": wan,
    "SkyReelsV2Transformer3DModel, a time for each frame": partial(
        a_time_for_each_frame, make=wan, embedded="patch_embedding", axis=2, time=TIMES[:, :GRID[0]],
        enable_diffusion_forcing=True),
    "ChronoEditTransformer3DModel": wan,
    "ChronoEditTransformer3DModel, a time for each token": partial(wan, time=TIMES),
    "LTXVideoTransformer3DModel": ltx,
    "LTXVideoTransformer3DModel, a time for each token": partial(ltx, time=TIMES),
    "LTX2VideoTransformer3DModel": ltx2,
    "LTX2VideoTransformer3DModel, a time for each token": partial(
        ltx2, time=TIMES, rope_type="split", cross_attn_mod=False),
    "CosmosTransformer3DModel": cosmos,
    "CosmosTransformer3DModel, a time for each frame": partial(
        a_time_for_each_frame, make=cosmos, embedded="patch_embed", axis=1,
        time=TIMES[:, None, :GRID[0], None, None]),
    "MochiTransformer3DModel": partial(
        video, sizes=dict(max_sequence_length=TEXT, num_attention_heads=8),
        parts={"patch_embed": by_frames, "rope": 0}, encoder_attention_mask=TEXT_MASK),
    "Kandinsky5Transformer3DModel": partial(
        kandinsky, sizes={}, rope_axis=1, small=dict(visual_rope_pos=tuple(map(torch.arange, SMALL))),
        visual_rope_pos=tuple(map(torch.arange, GRID)), text_rope_pos=torch.arange(TEXT)),
    "Kandinsky6Transformer3DModel": kandinsky6,
    "Kandinsky6Transformer3DModel, positions across": partial(kandinsky6, ca_rope=True, cross_gates=True),
    "VisionTransformer": encoder,
    "VisionTransformer, registers": partial(encoder, reg_tokens=2),
    "Eva": partial(encoder, place=with_rope(0), use_rot_pos_emb=True),
    "Eva, a table for each block and head": partial(
        encoder, place=with_rope(2), use_rot_pos_emb=True, rope_type="mixed", num_reg_tokens=2),
    "ViTModel": of_transformers,
    "Dinov2Model": of_transformers,
    "DINOv3ViTModel": partial(of_transformers, parts={"rope_embeddings": 0}, num_register_tokens=2),
    "Dinov2WithRegistersModel": partial(of_transformers, num_register_tokens=2),
}


def example(name: str) -> Case:
    torch.manual_seed(0)
    network = name.partition(",")[0]
    case = NETWORKS[name](next(getattr(library, network) for library in (diffusers, transformers, timm.models)
                               if hasattr(library, network)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in case.model.parameters():  # every gate open, no layer that starts as zero
            parameter.copy_(parameter + 0.05 * torch.randn(parameter.shape, generator=generator))
    case.model.train(case.train)
    return case


family = cache(example)


def gradients(model):
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def wrapped(model):
    return any("_routed" in vars(module) and module._routed.routing is not None for module in model.modules())


def refused(model, routes, call=lambda: None, **options):
    """The message of the error that a network, its routes or a call of it raises."""
    with pytest.raises(ValueError) as error, routed(model, routes, **options):
        call()
    assert not wrapped(model)
    message = str(error.value)
    del error                   # torch ends a checkpoint that broke off when its frame is freed
    return message


def noise_for(case, routes=1, seed=3):
    return torch.rand(BATCH, routes, case.n, generator=torch.Generator().manual_seed(seed))


def assert_close(a, b, tolerance=3e-5):       # gradients are sums whose order differs
    assert a.keys() == b.keys()
    for name in a:
        scale = max(1.0, float(b[name].abs().max()))
        assert (a[name] - b[name]).abs().max() <= tolerance * scale, name
