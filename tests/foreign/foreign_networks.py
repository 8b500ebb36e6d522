"""Other people's networks for tests of `routed`: the real classes of diffusers, timm and transformers, tiny and random."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import diffusers
import torch
import transformers
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from foreign.families import family_of

BATCH, SIDE, TEXT, DEPTH = 3, 4, 5, 4
N, K = 16, 4        # at selection ratio 0.75 the tokens that stay form a grid of their own, which a network can be fed
GRID, SMALL = (2, 2, 4), (1, 2, 2)      # frames, rows and columns of the tokens of a video, and of those that stay
HEADS = dict(num_attention_heads=2, attention_head_dim=8)


@dataclass
class Case:
    """A network, the inputs of a batch, what of its output are tokens, and how one sample is fed some tokens alone.

    None of it knows how `routed` works. `parts` are modules or methods whose output runs along the tokens: its axis, or
    (axis, place of the first token), or a function of that output, of the part's output on the small input, and of ids.
    `along` are inputs that do. `small` are inputs of the size of K tokens, or a function of ids that makes them.
    """

    model: nn.Module
    inputs: dict[str, Any]
    parts: dict[str, Any] = field(default_factory=dict)
    along: dict[str, Any] = field(default_factory=dict)
    small: dict[str, Any] | Callable = field(default_factory=dict)
    tokens: Callable[[Any], Tensor] = lambda out: out
    train: bool = False
    n: int = N
    first: list[int] | None = None      # of each sample: the place of the first token in a joined sequence

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
        owners = {part: (found, "forward") if isinstance(found := getattr(self.model, part), nn.Module) else (self.model, part)
                  for part in self.parts}
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
        one |= {name: rows(one[name], where, ids) for name, where in self.along.items()}
        out = self.call(**one | (self.small(ids) if callable(self.small) else self.small))
        for owner in owners.values():
            delattr(*owner)
        return self.tokens(out)


def one_of(value, b):
    """Sample b of an input, which is a tensor with a row for each sample, a tuple of tensors, or a list of samples."""
    if isinstance(value, Tensor | list) and len(value) == BATCH:
        return value[b:b + 1]
    return value


def rows(value, where, ids):
    """The rows of the tokens `ids`, and all that stand before and behind the tokens; also of each part of a tuple."""
    if isinstance(value, tuple | list):
        return type(value)(rows(part, where, ids) for part in value)
    axis, first = where if isinstance(where, tuple) else (where, 0)
    if not isinstance(value, Tensor) or axis >= value.ndim or value.shape[axis] < N:
        return value
    behind = torch.arange(first + N, value.shape[axis])
    return value.index_select(axis, torch.cat([torch.arange(first), ids + first, behind]))


def in_grid(axis, whole, few, ids):
    """As `rows`, for an output whose tokens lie on three axes, the first of which is given."""
    if isinstance(whole, tuple):
        return tuple(in_grid(axis, part, few, ids) for part in whole)
    return whole.flatten(axis, axis + 2).index_select(axis, ids).unflatten(axis, SMALL)


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
TEXT_MASK = torch.arange(TEXT) < torch.tensor([[TEXT], [2], [4]])
PLACES = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
PIXELS = dict(sample_size=8, in_channels=4, out_channels=4, num_layers=DEPTH, **HEADS)
FRAMES = dict(in_channels=4, out_channels=4, num_layers=DEPTH, **HEADS)


def dit():
    return Case(
        diffusers.DiTTransformer2DModel(num_embeds_ada_norm=1000, **PIXELS),
        dict(hidden_states=IMAGE, timestep=TIME.long(), class_labels=torch.tensor([1, 2, 3])),
        parts={"pos_embed": 1}, small=dict(hidden_states=SMALL_IMAGE), tokens=patches)


def pixart(masked=False):
    mask = dict(attention_mask=torch.rand(BATCH, N, generator=torch.Generator().manual_seed(2)) > 0.3) if masked else {}
    return Case(
        diffusers.PixArtTransformer2DModel(cross_attention_dim=16, caption_channels=16, **PIXELS),
        dict(hidden_states=IMAGE, timestep=TIME, encoder_hidden_states=WORDS, added_cond_kwargs={}) | mask,
        parts={"pos_embed": 1}, along=dict.fromkeys(mask, 1), small=dict(hidden_states=SMALL_IMAGE), tokens=patches)


def sd3(**options):
    return Case(
        diffusers.SD3Transformer2DModel(joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16,
                                        pos_embed_max_size=8, **PIXELS, **options),
        dict(hidden_states=IMAGE, timestep=TIME, encoder_hidden_states=WORDS, pooled_projections=POOLED),
        parts={"pos_embed": 1}, small=dict(hidden_states=SMALL_IMAGE), tokens=patches)


def auraflow():
    return Case(
        diffusers.AuraFlowTransformer2DModel(
            sample_size=8, num_mmdit_layers=2, num_single_dit_layers=2, joint_attention_dim=16,
            caption_projection_dim=16, pos_embed_max_size=64, **HEADS),
        dict(hidden_states=IMAGE, timestep=SHARE, encoder_hidden_states=WORDS),
        parts={"pos_embed": 1}, small=dict(hidden_states=SMALL_IMAGE), tokens=patches)


def flux(network, options, **inputs):
    return Case(
        network(**dict(num_layers=2, num_single_layers=2, in_channels=4, joint_attention_dim=16, axes_dims_rope=(2, 2, 4))
                | HEADS | options),
        dict(hidden_states=SEQUENCE, encoder_hidden_states=WORDS, timestep=SHARE, img_ids=PLACES,
             txt_ids=torch.zeros(TEXT, 3)) | inputs,
        along=dict(hidden_states=1, img_ids=0))


def four_axes(network, options, **inputs):
    """Flux 2 and 3, whose places have four axes, and whose words follow one another."""
    return flux(network, dict(axes_dims_rope=(2, 2, 2, 2)) | options,
                img_ids=PLACES[:, [0, 1, 2, 0]], txt_ids=torch.arange(4 * TEXT).view(TEXT, 4) / 7, **inputs)


def qwen(edit=False):
    """In editing, the second of its two images is a condition."""
    shapes = [(1, 2, SIDE), (1, 2, SIDE)] if edit else [(1, SIDE, SIDE)]

    def small(ids):
        first = int((ids < N // 2).sum())
        return dict(img_shapes=[[(1, 1, first), (1, 1, K - first)] if edit else [SMALL]])

    return Case(
        diffusers.QwenImageTransformer2DModel(in_channels=4, out_channels=1, num_layers=DEPTH, joint_attention_dim=16,
                                              axes_dims_rope=(2, 2, 4), zero_cond_t=edit, **HEADS),
        dict(hidden_states=SEQUENCE, encoder_hidden_states=WORDS, timestep=SHARE, img_shapes=[shapes] * BATCH,
             encoder_hidden_states_mask=TEXT_MASK.float()),
        parts={"pos_embed": 0}, along=dict(hidden_states=1), small=small)


def qwen21(condition=0, **options):
    """Of its images, the last is drawn; each place of an image in the text stands for four tokens."""
    slots, shapes = [False] * 3 + [True] * (condition // 4) + [False] * 2, [(1, 2, 2)] * (condition // 4)
    before = TEXT + condition
    return Case(
        diffusers.QwenImage21Transformer2DModel(in_channels=4, out_channels=4, num_layers=DEPTH, context_in_dim=16,
                                                axes_dims_rope=(2, 2, 4), **HEADS, **options),
        dict(hidden_states=randn(BATCH, condition + N, 4), encoder_hidden_states=randn(BATCH, len(slots), 16),
             timestep=SHARE, img_shapes=[[*shapes, (1, SIDE, SIDE)]] * BATCH,
             img_mask=torch.tensor([slots + [True] * (N // 4)] * BATCH),
             encoder_hidden_states_mask=torch.arange(len(slots)) < torch.tensor([[len(slots)], [2], [3]])),
        parts={"pos_embed": (0, before)}, along=dict(hidden_states=(1, condition)),
        small=dict(img_shapes=[[*shapes, SMALL]], img_mask=torch.tensor([slots + [True]])),
        tokens=lambda out: out[:, before:])


def lumina2():
    def rope(whole, few, ids):
        length = whole[0].shape[1]      # the embedder sees the image as tokens; the table is text, then image
        text = whole[3].shape[1] - length
        return *few[:3], torch.cat([whole[3][:, :text], whole[3][:, text:][:, ids]], dim=1), *few[4:]

    return Case(
        diffusers.Lumina2Transformer2DModel(
            sample_size=8, in_channels=4, hidden_size=24, num_layers=DEPTH, num_refiner_layers=0, num_attention_heads=2,
            num_kv_heads=1, multiple_of=8, axes_dim_rope=(4, 4, 4), axes_lens=(32, 16, 16), cap_feat_dim=16),
        dict(hidden_states=IMAGE, timestep=SHARE, encoder_hidden_states=WORDS, encoder_attention_mask=TEXT_MASK.long()),
        parts={"x_embedder": 1, "rope_embedder": rope}, small=dict(hidden_states=SMALL_IMAGE),
        tokens=patches, first=TEXT_MASK.sum(1).tolist())


def z_image(lengths=(TEXT, TEXT, TEXT)):
    """It pads images and texts to 32 tokens, so its images have 32; its refiner, off here, sees them all."""
    def few_patches(whole, few, ids):
        return [[part[0][ids]] if i in (0, 3, 5) else (few if i == 2 else whole)[i] for i, part in enumerate(whole)]

    return Case(
        diffusers.ZImageTransformer2DModel(in_channels=4, dim=16, n_layers=DEPTH, n_refiner_layers=0, n_heads=2, n_kv_heads=2,
                                           cap_feat_dim=16, axes_dims=[4, 2, 2], axes_lens=[128, 16, 16]),
        dict(x=list(randn(BATCH, 4, 1, 8, 16)), t=SHARE, cap_feats=[randn(n, 16, seed=n) for n in lengths]),
        parts={"patchify_and_embed": few_patches}, small=dict(x=[torch.zeros(4, 1, 4, 8)]),
        tokens=lambda out: patches(torch.stack(out)), n=32, first=[0] * BATCH)


def wan(time=TIME, **inputs):
    along = dict(timestep=1) if time.ndim > 1 else {}
    return Case(
        diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), text_dim=16, freq_dim=16, ffn_dim=32, rope_max_seq_len=16, **FRAMES | dict(attention_head_dim=12)),
        dict(hidden_states=VIDEO, timestep=time, encoder_hidden_states=WORDS) | inputs,
        parts={"patch_embedding": partial(in_grid, 2), "rope": 1}, along=along, small=dict(hidden_states=SMALL_VIDEO),
        tokens=patches)


def hunyuan_video(**options):
    return Case(
        diffusers.HunyuanVideoTransformer3DModel(
            num_single_layers=2, num_refiner_layers=1, text_embed_dim=16, pooled_projection_dim=16, rope_axes_dim=(2, 2, 4),
            **FRAMES | dict(num_layers=2) | options),
        dict(hidden_states=VIDEO, timestep=TIME, encoder_hidden_states=WORDS, encoder_attention_mask=TEXT_MASK.long(),
             pooled_projections=POOLED, guidance=TIME),
        parts={"x_embedder": 1, "rope": 0}, small=dict(hidden_states=SMALL_VIDEO), tokens=patches)


def hunyuan_video15():
    return Case(
        diffusers.HunyuanVideo15Transformer3DModel(
            num_refiner_layers=1, patch_size=2, text_embed_dim=16, text_embed_2_dim=8, image_embed_dim=8,
            rope_axes_dim=(2, 2, 4), **FRAMES),
        dict(hidden_states=VIDEO, timestep=TIME, encoder_hidden_states=WORDS, encoder_attention_mask=TEXT_MASK.long(),
             encoder_hidden_states_2=randn(BATCH, 3, 8), encoder_attention_mask_2=torch.ones(BATCH, 3).long(),
             image_embeds=randn(BATCH, 2, 8)),
        parts={"x_embedder": 1, "rope": 0}, small=dict(hidden_states=SMALL_VIDEO), tokens=patches)


def timm_network(network, place, **options):
    model = network(img_size=8, patch_size=2, in_chans=4, embed_dim=16, depth=DEPTH, num_heads=2, num_classes=0,
                    global_pool="", **options)
    return Case(model, dict(x=IMAGE), parts={"_pos_embed": place(model.num_prefix_tokens)},
                tokens=lambda out: out[:, model.num_prefix_tokens:])


def with_rope(axis):
    return lambda prefix: lambda whole, few, ids: (rows(whole[0], (1, prefix), ids), rows(whole[1], axis, ids))


def transformers_network(network, config, **options):
    config = config(hidden_size=16, num_hidden_layers=DEPTH, num_attention_heads=2, intermediate_size=32, image_size=8,
                    patch_size=2, num_channels=4, **options)
    prefix = 1 + options.get("num_register_tokens", 0)
    return Case(network(config), dict(pixel_values=IMAGE), parts={"embeddings": (1, prefix)},
                tokens=lambda out: out[:, prefix:])


NETWORKS = {
    "DiTTransformer2DModel": dit,
    "PixArtTransformer2DModel": pixart,
    "PixArtTransformer2DModel, masked": partial(pixart, masked=True),
    "SD3Transformer2DModel": sd3,
    "SD3Transformer2DModel, 3.5": partial(sd3, qk_norm="rms_norm", dual_attention_layers=(0, 1)),
    "FluxTransformer2DModel": partial(
        flux, diffusers.FluxTransformer2DModel, dict(pooled_projection_dim=16), pooled_projections=POOLED),
    "Flux2Transformer2DModel": partial(four_axes, diffusers.Flux2Transformer2DModel, dict(guidance_embeds=False)),
    "AuraFlowTransformer2DModel": auraflow,
    "Lumina2Transformer2DModel": lumina2,
    "QwenImageTransformer2DModel": qwen,
    "QwenImageTransformer2DModel, edit": partial(qwen, edit=True),
    "QwenImage21Transformer2DModel": qwen21,
    "QwenImage21Transformer2DModel, edit": partial(qwen21, condition=4),
    "QwenImage21Transformer2DModel, one time": partial(qwen21, causal_condition=False),
    "ZImageTransformer2DModel": z_image,
    "ZImageTransformer2DModel, texts of several lengths": partial(z_image, (TEXT, 40, TEXT)),
    "HunyuanVideoTransformer3DModel": hunyuan_video,
    "HunyuanVideo15Transformer3DModel": hunyuan_video15,
    "WanTransformer3DModel": wan,
    "WanTransformer3DModel, a time for each token": partial(wan, randn(BATCH, N, seed=3).abs() * 500),
    "VisionTransformer": partial(timm_network, VisionTransformer, lambda prefix: (1, prefix)),
    "VisionTransformer, registers": partial(timm_network, VisionTransformer, lambda prefix: (1, prefix), reg_tokens=2),
    "Eva": partial(timm_network, Eva, with_rope(0), use_rot_pos_emb=True),
    "Eva, a table for each block and head": partial(
        timm_network, Eva, with_rope(2), use_rot_pos_emb=True, rope_type="mixed", num_reg_tokens=2),
    "ViTModel": partial(transformers_network, transformers.ViTModel, transformers.ViTConfig),
    "Dinov2Model": partial(transformers_network, transformers.Dinov2Model, transformers.Dinov2Config),
    "Dinov2WithRegistersModel": partial(transformers_network, transformers.Dinov2WithRegistersModel,
                                        transformers.Dinov2WithRegistersConfig, num_register_tokens=2),
}


def example(name: str) -> Case:
    torch.manual_seed(0)
    case = NETWORKS[name]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in case.model.parameters():       # every gate open, no layer that starts as zero
            parameter.copy_(parameter + 0.05 * torch.randn(parameter.shape, generator=generator))
    case.model.train(case.train)
    return case


family = cache(example)
