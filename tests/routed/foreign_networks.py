"""Other people's networks for tests of `routed`: the real classes of diffusers, timm and transformers, tiny and
random.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from types import MethodType
from typing import Any

import diffusers
import torch
import transformers
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from routed.families import family_of

BATCH, SIDE, TEXT, DEPTH = 3, 4, 5, 4
N, K = 16, 4  # at selection ratio 0.75 the tokens that stay form a grid of their own, which a network can be fed
GRID, SMALL = (2, 2, 4), (1, 2, 2)  # frames, rows and columns of the tokens of a video, and of those that stay
HEADS = dict(num_attention_heads=2, attention_head_dim=8)


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


CONDITION = 6  # tokens of a condition image, behind the image that is drawn


def flux(network, options, along=None, first=None, edit=False, **inputs):
    """In editing, a condition image stands behind, with another first coordinate."""
    inputs = dict(hidden_states=SEQUENCE, encoder_hidden_states=WORDS, timestep=SHARE, img_ids=PLACES,
                  txt_ids=torch.zeros(TEXT, 3)) | inputs
    if edit:
        places = inputs["img_ids"][:CONDITION] + torch.eye(inputs["img_ids"].shape[1])[0]
        inputs |= dict(hidden_states=randn(BATCH, N + CONDITION, 4), img_ids=torch.cat([inputs["img_ids"], places]))
    return Case(
        network(**dict(num_layers=2, num_single_layers=2, in_channels=4, joint_attention_dim=16,
                       axes_dims_rope=(2, 2, 4))
                | HEADS | options), inputs,
        along=dict(hidden_states=1, img_ids=0) | (along or {}), first=first, behind=CONDITION * edit,
        tokens=lambda out: out[:, :-CONDITION] if edit else out)


def four_axes(network, options, **inputs):
    """Flux 2 and 3, whose places have four axes, and whose words follow one another."""
    return flux(network, dict(axes_dims_rope=(2, 2, 2, 2)) | options,
                img_ids=PLACES[:, [0, 1, 2, 0]], txt_ids=torch.arange(4 * TEXT).view(TEXT, 4) / 7, **inputs)


def qwen(edit=False):
    """In editing, the second of its two images is a condition."""
    condition = [(1, 2, CONDITION // 2)] * edit
    return Case(
        diffusers.QwenImageTransformer2DModel(in_channels=4, out_channels=1, num_layers=DEPTH, joint_attention_dim=16,
                                              axes_dims_rope=(2, 2, 4), zero_cond_t=edit, **HEADS),
        dict(hidden_states=randn(BATCH, N + CONDITION * edit, 4), encoder_hidden_states=WORDS, timestep=SHARE,
             img_shapes=[[(1, SIDE, SIDE), *condition]] * BATCH, encoder_hidden_states_mask=TEXT_MASK.float()),
        parts={"pos_embed": 0}, along=dict(hidden_states=1), small=dict(img_shapes=[[SMALL, *condition]]),
        behind=CONDITION * edit, tokens=lambda out: out[:, :-CONDITION] if edit else out)


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


def krea2():
    return Case(
        diffusers.Krea2Transformer2DModel(
            in_channels=4, num_layers=DEPTH, num_key_value_heads=1, intermediate_size=32, timestep_embed_dim=16,
            text_hidden_dim=16, num_text_layers=2, text_num_attention_heads=2, text_num_key_value_heads=2,
            text_intermediate_size=32, num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(2, 2, 4),
            **HEADS),
        dict(hidden_states=SEQUENCE, encoder_hidden_states=randn(BATCH, TEXT, 2, 16), timestep=SHARE,
             position_ids=torch.cat([torch.arange(3 * TEXT).view(TEXT, 3) / 7, PLACES]),
             encoder_attention_mask=TEXT_MASK),
        along=dict(hidden_states=1, position_ids=(0, TEXT)))


def prx():
    return Case(
        diffusers.PRXTransformer2DModel(in_channels=4, context_in_dim=16, hidden_size=16, mlp_ratio=2.0, num_heads=2,
                                        depth=DEPTH, axes_dim=[4, 4]),
        dict(hidden_states=IMAGE, timestep=SHARE, encoder_hidden_states=WORDS, attention_mask=TEXT_MASK),
        parts={"img_in": 1, "pe_embedder": 2}, small=dict(hidden_states=SMALL_IMAGE), tokens=patches)


def hidream(padded=False):
    """Its experts have a gradient in training alone, where the output is left as tokens."""
    image = dict(hidden_states=IMAGE)
    if padded:
        image = dict(hidden_states=randn(BATCH, N, 16), img_ids=PLACES.expand(BATCH, -1, -1),
                     img_sizes=[(SIDE, SIDE)] * BATCH,
                     hidden_states_masks=(torch.arange(N) < torch.tensor([[N], [9], [11]])).float())
    return Case(
        diffusers.HiDreamImageTransformer2DModel(
            patch_size=2, in_channels=4, out_channels=4, num_layers=2, num_single_layers=2, caption_channels=[16, 16],
            text_emb_dim=16, num_routed_experts=3, axes_dims_rope=(4, 2, 2), max_resolution=(8, 8),
            llama_layers=[0, 1, 1, 0],
            **HEADS),
        image | dict(timesteps=TIME, encoder_hidden_states_t5=WORDS, pooled_embeds=POOLED,
             encoder_hidden_states_llama3=list(randn(2, BATCH, 3, 16))),
        parts={} if padded else {"x_embedder": 1, "pe_embedder": 1}, along=dict.fromkeys(image, 1) if padded else {},
        small={} if padded else dict(hidden_states=SMALL_IMAGE), train=True, first=[0] * BATCH,
        tokens=lambda out: out.permute(0, 2, 1, 3).flatten(2))


SIZES = {name: torch.tensor([[8.0, 8.0]] * BATCH) for name in ("original_size", "target_size", "crop_coords")}


def cogview(network, **options):
    model = network(patch_size=2, in_channels=4, out_channels=4, num_layers=DEPTH, text_embed_dim=16, time_embed_dim=8,
                    condition_dim=4, pos_embed_max_size=8, sample_size=8, **HEADS, **options)
    parts = {"patch_embed": (1, TEXT)}
    if hasattr(model, "rope"):
        parts = {"patch_embed": 1, "rope": 0}
    return Case(model, dict(hidden_states=IMAGE, encoder_hidden_states=WORDS, timestep=TIME, **SIZES),
                parts=parts, small=dict(hidden_states=SMALL_IMAGE), tokens=patches)


def cogvideox():
    angles = randn(N, 8, seed=4)
    return Case(
        diffusers.CogVideoXTransformer3DModel(
            time_embed_dim=8, text_embed_dim=16, sample_width=8, sample_height=4, sample_frames=5,
            max_text_seq_length=TEXT,
            use_rotary_positional_embeddings=True, **FRAMES),
        dict(hidden_states=VIDEO.transpose(1, 2), encoder_hidden_states=WORDS, timestep=TIME,
             image_rotary_emb=(angles.cos(), angles.sin())),
        parts={"patch_embed": (1, TEXT)}, along=dict(image_rotary_emb=0),
        small=dict(hidden_states=SMALL_VIDEO.transpose(1, 2)), tokens=lambda out: patches(out.transpose(1, 2)))


def hunyuan_image():
    return Case(
        diffusers.HunyuanImageTransformer2DModel(
            num_single_layers=2, num_refiner_layers=1, patch_size=(2, 2), text_embed_dim=16, text_embed_2_dim=8,
            rope_axes_dim=(4, 4), **FRAMES | dict(num_layers=2)),
        dict(hidden_states=IMAGE, timestep=TIME, encoder_hidden_states=WORDS, encoder_attention_mask=TEXT_MASK.long(),
             encoder_hidden_states_2=randn(BATCH, 3, 8), encoder_attention_mask_2=torch.ones(BATCH, 3).long()),
        parts={"x_embedder": 1, "rope": 0}, small=dict(hidden_states=SMALL_IMAGE), tokens=patches)


def ltx(time=TIME):
    return Case(
        diffusers.LTXVideoTransformer3DModel(cross_attention_dim=16, caption_channels=16, **FRAMES),
        dict(hidden_states=SEQUENCE, encoder_hidden_states=WORDS, timestep=time,
             encoder_attention_mask=TEXT_MASK.long(),
             num_frames=GRID[0], height=GRID[1], width=GRID[2]),
        parts={"rope": 1}, along=dict(hidden_states=1) | (dict(timestep=1) if time.ndim > 1 else {}))


def ltx2(time=TIME, **options):
    axis = 2 if options else 1
    return Case(
        diffusers.LTX2VideoTransformer3DModel(
            cross_attention_dim=16, audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2,
            audio_attention_head_dim=4, audio_cross_attention_dim=8, caption_channels=16, **FRAMES, **options),
        dict(hidden_states=SEQUENCE, audio_hidden_states=randn(BATCH, 3, 4), encoder_hidden_states=WORDS, timestep=time,
             audio_encoder_hidden_states=WORDS, encoder_attention_mask=TEXT_MASK.long(), audio_timestep=TIME,
             audio_encoder_attention_mask=TEXT_MASK.long(), num_frames=GRID[0], height=GRID[1], width=GRID[2],
             audio_num_frames=3),
        parts={"rope": axis, "cross_attn_rope": axis},
        along=dict(hidden_states=1) | (dict(timestep=1) if time.ndim > 1 else {}))


def cosmos():
    return Case(
        diffusers.CosmosTransformer3DModel(text_embed_dim=16, adaln_lora_dim=4, max_size=(4, 8, 8), mlp_ratio=2.0,
                                          **FRAMES | dict(attention_head_dim=16)),
        dict(hidden_states=VIDEO, timestep=TIME, encoder_hidden_states=WORDS, padding_mask=torch.zeros(1, 1, 4, 8)),
        parts={"patch_embed": partial(in_grid, 1), "rope": 0, "learnable_pos_embed": 1},
        small=dict(hidden_states=SMALL_VIDEO), tokens=patches)


def mochi():
    def embedded(whole, few, ids):                  # (frames, rows x columns, D)
        return whole.flatten(0, 1)[ids].unflatten(0, (SMALL[0], -1))

    return Case(
        diffusers.MochiTransformer3DModel(pooled_projection_dim=16, text_embed_dim=16, time_embed_dim=8,
                                          max_sequence_length=TEXT, **FRAMES | dict(num_attention_heads=8)),
        dict(hidden_states=VIDEO, encoder_hidden_states=WORDS, timestep=TIME, encoder_attention_mask=TEXT_MASK),
        parts={"patch_embed": embedded, "rope": 0}, small=dict(hidden_states=SMALL_VIDEO), tokens=patches)


def kandinsky5():
    video = VIDEO.movedim(1, -1)
    return Case(
        diffusers.Kandinsky5Transformer3DModel(in_text_dim=16, in_text_dim2=16, time_dim=8, model_dim=16, ff_dim=32,
                                               num_text_blocks=1, num_visual_blocks=DEPTH, axes_dims=(4, 2, 2)),
        dict(hidden_states=video, encoder_hidden_states=WORDS, timestep=TIME, pooled_projections=POOLED,
             visual_rope_pos=tuple(map(torch.arange, GRID)), text_rope_pos=torch.arange(TEXT)),
        parts={"visual_embeddings": partial(in_grid, 1), "visual_rope_embeddings": partial(in_grid, 1)},
        small=dict(hidden_states=SMALL_VIDEO.movedim(1, -1), visual_rope_pos=tuple(map(torch.arange, SMALL))),
        tokens=lambda out: patches(out.movedim(-1, 1)))


def kandinsky6(**options):
    return Case(
        diffusers.Kandinsky6Transformer3DModel(
            in_visual_dim=4, out_visual_dim=4, in_audio_dim=4, out_audio_dim=4, in_text_dim=16, in_text_dim2=16,
            time_dim=8,
            patch_size=(1, 2, 2), model_dim=16, ff_dim=32, num_text_blocks=1, num_visual_blocks=DEPTH,
            axes_dims=(4, 2, 2),
            visual_cond=False, **options),
        dict(hidden_states=VIDEO.movedim(1, -1), encoder_hidden_states=WORDS, timestep=TIME, pooled_projections=POOLED,
             audio_hidden_states=randn(BATCH, 3, 4)),
        parts={"visual_embeddings": partial(in_grid, 1), "visual_rope_embeddings": partial(in_grid, 0)},
        small=dict(hidden_states=SMALL_VIDEO.movedim(1, -1)), tokens=lambda out: patches(out.movedim(-1, 1)))


def lumina2():
    def rope(whole, few, ids):
        length = whole[0].shape[1]  # the embedder sees the image as tokens; the table is text, then image
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
        diffusers.ZImageTransformer2DModel(in_channels=4, dim=16, n_layers=DEPTH, n_refiner_layers=0, n_heads=2,
                                           n_kv_heads=2,
                                           cap_feat_dim=16, axes_dims=[4, 2, 2], axes_lens=[128, 16, 16]),
        dict(x=list(randn(BATCH, 4, 1, 8, 16)), t=SHARE, cap_feats=[randn(n, 16, seed=n) for n in lengths]),
        parts={"patchify_and_embed": few_patches}, small=dict(x=[torch.zeros(4, 1, 4, 8)]),
        tokens=lambda out: patches(torch.stack(out)), n=32, first=[0] * BATCH)


def wan(network=diffusers.WanTransformer3DModel, time=TIME, inputs=None, **options):
    along = dict(timestep=1) if time.ndim > 1 else {}
    return Case(
        network(patch_size=(1, 2, 2), text_dim=16, freq_dim=16, ffn_dim=32, rope_max_seq_len=16,
                **FRAMES | dict(attention_head_dim=12) | options),
        dict(hidden_states=VIDEO, timestep=time, encoder_hidden_states=WORDS) | (inputs or {}),
        parts={"patch_embedding": partial(in_grid, 2), "rope": 1},
        along=along, small=dict(hidden_states=SMALL_VIDEO), tokens=patches)


def vace():
    """Its blocks of the control see all tokens, and add to all tokens between its blocks."""
    case = wan(diffusers.WanVACETransformer3DModel, vace_layers=[0, 2], vace_in_channels=4,
               inputs=dict(control_hidden_states=randn(*VIDEO.shape, seed=5)))
    case.parts |= {"vace_blocks.0": 1, "vace_blocks.1": 1}
    case.small |= dict(control_hidden_states=SMALL_VIDEO)
    return case


def a_time_for_each_frame(case, embedded, axis, time):
    """Fed as a video of one token a frame, which has the time of the frame that the token is of."""
    def of_frames(value, ids):
        return value.index_select(time.ndim // 2, ids // (N // GRID[0]))

    case.inputs |= dict(timestep=time)
    case.parts[embedded] = partial(in_grid, axis, grid=(K, 1, 1))
    case.along, case.small = dict(timestep=of_frames), dict(hidden_states=torch.zeros(1, 4, K, 2, 2))
    return case


def hunyuan_video(**options):
    return Case(
        diffusers.HunyuanVideoTransformer3DModel(
            num_single_layers=2, num_refiner_layers=1, text_embed_dim=16, pooled_projection_dim=16,
            rope_axes_dim=(2, 2, 4),
            **FRAMES | dict(num_layers=2) | options),
        dict(hidden_states=VIDEO, timestep=TIME, encoder_hidden_states=WORDS, encoder_attention_mask=TEXT_MASK.long(),
             pooled_projections=POOLED, guidance=TIME),
        parts={"x_embedder": 1, "rope": 0}, small=dict(hidden_states=SMALL_VIDEO), tokens=patches)


def first_frame_given():
    """Its first frame of four tokens never leaves, as it is the condition."""
    case = hunyuan_video(image_condition_type="token_replace")
    case.inputs["hidden_states"] = randn(BATCH, 4, 5, 4, 4)
    case.parts = {"x_embedder": (1, 4), "rope": (0, 4)}
    case.small = dict(hidden_states=torch.zeros(1, 4, 2, 4, 4))
    case.tokens = lambda out: patches(out)[:, 4:]
    return case


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


def dino3():
    case = transformers_network(transformers.DINOv3ViTModel, transformers.DINOv3ViTConfig, num_register_tokens=2)
    case.parts["rope_embeddings"] = 0
    return case


CHROMA = dict(approximator_num_channels=16, approximator_hidden_dim=16, approximator_layers=1)
NETWORKS = {
    "DiTTransformer2DModel": dit,
    "PixArtTransformer2DModel": pixart,
    "PixArtTransformer2DModel, masked": partial(pixart, masked=True),
    "SD3Transformer2DModel": sd3,
    "SD3Transformer2DModel, 3.5": partial(sd3, qk_norm="rms_norm", dual_attention_layers=(0, 1)),
    "FluxTransformer2DModel": partial(
        flux, diffusers.FluxTransformer2DModel, dict(pooled_projection_dim=16), pooled_projections=POOLED),
    "FluxTransformer2DModel, Kontext": partial(
        flux, diffusers.FluxTransformer2DModel, dict(pooled_projection_dim=16), pooled_projections=POOLED, edit=True),
    "Flux2Transformer2DModel, edit": partial(
        four_axes, diffusers.Flux2Transformer2DModel, dict(guidance_embeds=False), edit=True),
    "LongCatImageTransformer2DModel, edit": partial(
        flux, diffusers.LongCatImageTransformer2DModel, dict(pooled_projection_dim=16), edit=True),
    "BriaFiboTransformer2DModel, edit": partial(
        flux, diffusers.BriaFiboTransformer2DModel, dict(text_encoder_dim=16), edit=True,
        text_encoder_layers=[randn(BATCH, TEXT, 16, seed=i) for i in range(DEPTH)]),
    "Flux2Transformer2DModel": partial(four_axes, diffusers.Flux2Transformer2DModel, dict(guidance_embeds=False)),
    "BriaTransformer2DModel": partial(flux, diffusers.BriaTransformer2DModel, dict(pooled_projection_dim=None)),
    "OvisImageTransformer2DModel": partial(flux, diffusers.OvisImageTransformer2DModel, {}),
    "LongCatImageTransformer2DModel": partial(flux, diffusers.LongCatImageTransformer2DModel,
                                              dict(pooled_projection_dim=16)),
    "BriaFiboTransformer2DModel": partial(
        flux, diffusers.BriaFiboTransformer2DModel, dict(text_encoder_dim=16),
        text_encoder_layers=[randn(BATCH, TEXT, 16, seed=i) for i in range(DEPTH)]),
    "Flux3Transformer2DModel": partial(
        four_axes, diffusers.Flux3Transformer2DModel, dict(cond_in_channels=4, timestep_channels=16)),
    "Flux3Transformer2DModel, edit": partial(
        four_axes, diffusers.Flux3Transformer2DModel, dict(cond_in_channels=4, timestep_channels=16),
        first=[0] * BATCH, image_cond_hidden_states=randn(BATCH, 2, 4, seed=6), image_cond_ids=randn(2, 4, seed=7)),
    "ChromaTransformer2DModel": partial(flux, diffusers.ChromaTransformer2DModel, CHROMA),
    "ChromaTransformer2DModel, masked": partial(
        flux, diffusers.ChromaTransformer2DModel, CHROMA,
        along=dict(attention_mask=(1, TEXT)),
        attention_mask=torch.cat([TEXT_MASK, torch.ones(BATCH, N, dtype=torch.bool)], dim=1)),
    "Krea2Transformer2DModel": krea2,
    "PRXTransformer2DModel": prx,
    "HiDreamImageTransformer2DModel": hidream,
    "HiDreamImageTransformer2DModel, padded": partial(hidream, padded=True),
    "CogView3PlusTransformer2DModel": partial(cogview, diffusers.CogView3PlusTransformer2DModel),
    "CogView4Transformer2DModel": partial(cogview, diffusers.CogView4Transformer2DModel, rope_axes_dim=(8, 8)),
    "CogVideoXTransformer3DModel": cogvideox,
    "HunyuanImageTransformer2DModel": hunyuan_image,
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
    "HunyuanVideoTransformer3DModel, a given first frame": first_frame_given,
    "HunyuanVideo15Transformer3DModel": hunyuan_video15,
    "WanTransformer3DModel": wan,
    "WanTransformer3DModel, a time for each token": partial(wan, time=TIMES),
    "WanVACETransformer3DModel": vace,
    "SkyReelsV2Transformer3DModel": partial(wan, diffusers.SkyReelsV2Transformer3DModel),
    "SkyReelsV2Transformer3DModel, a time for each frame": lambda: a_time_for_each_frame(
        wan(diffusers.SkyReelsV2Transformer3DModel, inputs=dict(enable_diffusion_forcing=True)),
        "patch_embedding", 2, TIMES[:, :GRID[0]]),
    "ChronoEditTransformer3DModel": partial(wan, diffusers.ChronoEditTransformer3DModel),
    "ChronoEditTransformer3DModel, a time for each token": partial(wan, diffusers.ChronoEditTransformer3DModel, TIMES),
    "LTXVideoTransformer3DModel": ltx,
    "LTXVideoTransformer3DModel, a time for each token": partial(ltx, TIMES),
    "LTX2VideoTransformer3DModel": ltx2,
    "LTX2VideoTransformer3DModel, a time for each token": partial(ltx2, TIMES, rope_type="split", cross_attn_mod=False),
    "CosmosTransformer3DModel": cosmos,
    "CosmosTransformer3DModel, a time for each frame": lambda: a_time_for_each_frame(
        cosmos(), "patch_embed", 1, TIMES[:, None, :GRID[0], None, None]),
    "MochiTransformer3DModel": mochi,
    "Kandinsky5Transformer3DModel": kandinsky5,
    "Kandinsky6Transformer3DModel": kandinsky6,
    "Kandinsky6Transformer3DModel, positions across": partial(kandinsky6, ca_rope=True, cross_gates=True),
    "VisionTransformer": partial(timm_network, VisionTransformer, lambda prefix: (1, prefix)),
    "VisionTransformer, registers": partial(timm_network, VisionTransformer, lambda prefix: (1, prefix), reg_tokens=2),
    "Eva": partial(timm_network, Eva, with_rope(0), use_rot_pos_emb=True),
    "Eva, a table for each block and head": partial(
        timm_network, Eva, with_rope(2), use_rot_pos_emb=True, rope_type="mixed", num_reg_tokens=2),
    "ViTModel": partial(transformers_network, transformers.ViTModel, transformers.ViTConfig),
    "Dinov2Model": partial(transformers_network, transformers.Dinov2Model, transformers.Dinov2Config),
    "DINOv3ViTModel": dino3,
    "Dinov2WithRegistersModel": partial(transformers_network, transformers.Dinov2WithRegistersModel,
                                        transformers.Dinov2WithRegistersConfig, num_register_tokens=2),
}


def example(name: str) -> Case:
    torch.manual_seed(0)
    case = NETWORKS[name]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in case.model.parameters():  # every gate open, no layer that starts as zero
            parameter.copy_(parameter + 0.05 * torch.randn(parameter.shape, generator=generator))
    case.model.train(case.train)
    return case


family = cache(example)
