"""Other people's networks for tests of `routed`: the real classes of diffusers and timm, tiny and random."""

from functools import cache
from types import SimpleNamespace

import diffusers
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from foreign.families import family_of

BATCH, SIDE, TEXT, DEPTH = 3, 4, 5, 4
N, K = SIDE * SIDE, 4           # at selection ratio 0.75 the tokens that stay form a 2x2 grid, which a network can be fed
HEADS = dict(num_attention_heads=2, attention_head_dim=8)
NAMES = ["DiT", "PixArt", "PixArt, masked", "SD3", "SD3.5", "Flux", "Flux2", "AuraFlow", "Lumina2", "Qwen-Image",
         "Qwen-Image, edit", "Wan", "Wan, a time for each token", "ViT", "ViT, registers"]


class Swapped(nn.Module):
    """A part of a network that answers as it is given."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, *args, **kwargs):
        return self.answer(*args, **kwargs)


def patches(image):
    """Pixels as tokens: (B, C, 2h, 2w) to (B, hw, 4C)."""
    return nn.functional.pixel_unshuffle(image, 2).flatten(2).transpose(1, 2)


def example(name):
    """A network, the inputs of a batch, what of its output are tokens, and how sample b is fed the tokens `ids` alone.

    `alone(b, ids)` returns parts to swap and inputs with which the network itself, dense, computes on these tokens only,
    each at its own position. None of it knows how `routed` works.
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    def randn(*shape):
        return torch.randn(*shape, generator=generator)
    x, text, t = randn(BATCH, 4, 2 * SIDE, 2 * SIDE), randn(BATCH, TEXT, 16), torch.tensor([1.0, 30.0, 500.0])
    sequence, small = randn(BATCH, N, 4), torch.zeros(1, 4, 4, 4)
    image = dict(sample_size=8, in_channels=4, out_channels=4, num_layers=DEPTH, **HEADS)
    tokens = patches if name.partition(",")[0] not in ("Flux", "Flux2", "Qwen-Image") else lambda out: out

    def one(b, **others):
        return {key: value[b:b + 1] if isinstance(value, torch.Tensor) and len(value) == BATCH else value
                for key, value in inputs.items()} | others

    def alone(b, ids):
        embed = model.pos_embed
        few = dict(attention_mask=inputs["attention_mask"][b:b + 1, ids]) if "attention_mask" in inputs else {}
        return {"pos_embed": lambda _: embed(x[b:b + 1])[:, ids]}, one(b, hidden_states=small, **few)

    if name == "DiT":
        model = diffusers.DiTTransformer2DModel(num_embeds_ada_norm=1000, **image)
        inputs = dict(hidden_states=x, timestep=t.long(), class_labels=torch.tensor([1, 2, 3]))
    elif name.startswith("PixArt"):
        model = diffusers.PixArtTransformer2DModel(cross_attention_dim=16, caption_channels=16, **image)
        inputs = dict(hidden_states=x, timestep=t, encoder_hidden_states=text, added_cond_kwargs={})
        if name == "PixArt, masked":
            inputs |= dict(attention_mask=torch.rand(BATCH, N, generator=generator) > 0.3)
    elif name.startswith("SD3"):
        options = dict(qk_norm="rms_norm", dual_attention_layers=(0, 1)) if name == "SD3.5" else {}
        model = diffusers.SD3Transformer2DModel(
            joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, pos_embed_max_size=8,
            **image, **options)
        inputs = dict(hidden_states=x, timestep=t, encoder_hidden_states=text, pooled_projections=randn(BATCH, 16))
    elif name == "AuraFlow":
        model = diffusers.AuraFlowTransformer2DModel(
            sample_size=8, num_mmdit_layers=2, num_single_dit_layers=2, joint_attention_dim=16,
            caption_projection_dim=16, pos_embed_max_size=64, **HEADS)
        inputs = dict(hidden_states=x, timestep=t / 1000, encoder_hidden_states=text)
    elif name.startswith("Flux"):
        axes = dict(num_layers=2, num_single_layers=2, in_channels=4, joint_attention_dim=16, **HEADS)
        places = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
        if name == "Flux":
            model = diffusers.FluxTransformer2DModel(pooled_projection_dim=16, axes_dims_rope=(2, 2, 4), **axes)
            more = dict(pooled_projections=randn(BATCH, 16), txt_ids=torch.zeros(TEXT, 3), img_ids=places)
        else:
            model = diffusers.Flux2Transformer2DModel(axes_dims_rope=(2, 2, 2, 2), guidance_embeds=False, **axes)
            more = dict(txt_ids=torch.arange(4 * TEXT).view(TEXT, 4) / 7, img_ids=places[:, [0, 1, 2, 0]])
        inputs = dict(hidden_states=sequence, encoder_hidden_states=text, timestep=t / 1000) | more

        def alone(b, ids):
            return {}, one(b, hidden_states=sequence[b:b + 1, ids], img_ids=inputs["img_ids"][ids])
    elif name.startswith("Qwen"):
        edit = name == "Qwen-Image, edit"       # of its two images, the second is a condition
        model = diffusers.QwenImageTransformer2DModel(
            in_channels=4, out_channels=1, num_layers=DEPTH, joint_attention_dim=16, axes_dims_rope=(2, 2, 4),
            zero_cond_t=edit, **HEADS)
        shapes = [(1, 2, SIDE), (1, 2, SIDE)] if edit else [(1, SIDE, SIDE)]
        text_mask = torch.arange(TEXT) < torch.tensor([[TEXT], [3], [TEXT]])
        inputs = dict(hidden_states=sequence, encoder_hidden_states=text, timestep=t / 1000,
                      encoder_hidden_states_mask=text_mask.float(), img_shapes=[shapes] * BATCH)

        def alone(b, ids):
            of_image, of_text = model.pos_embed([shapes], max_txt_seq_len=TEXT, device=torch.device("cpu"))
            first = int((ids < N // 2).sum())
            fed = [(1, 1, first), (1, 1, K - first)] if edit else [(1, 2, 2)]
            return ({"pos_embed": lambda *_, **__: (of_image[ids], of_text)},
                    one(b, hidden_states=sequence[b:b + 1, ids], img_shapes=[fed]))
    elif name == "Lumina2":
        model = diffusers.Lumina2Transformer2DModel(
            sample_size=8, in_channels=4, hidden_size=24, num_layers=DEPTH, num_refiner_layers=0, num_attention_heads=2,
            num_kv_heads=1, multiple_of=8, axes_dim_rope=(4, 4, 4), axes_lens=(32, 16, 16), cap_feat_dim=16)
        mask = (torch.arange(TEXT) < torch.tensor([[TEXT], [2], [4]])).long()
        inputs = dict(hidden_states=x, timestep=t / 1000, encoder_hidden_states=text, encoder_attention_mask=mask)

        def alone(b, ids):
            embed, rope, length = model.x_embedder, model.rope_embedder, int(mask[b].sum())
            whole = rope(x[b:b + 1], mask[b:b + 1])

            def rope_of_few(hidden, attention_mask):
                few = list(rope(hidden, attention_mask))
                few[3] = torch.cat([whole[3][:, :length], whole[3][:, length:][:, ids]], dim=1)
                return tuple(few)
            return ({"x_embedder": lambda _: embed(whole[0])[:, ids], "rope_embedder": rope_of_few},
                    one(b, hidden_states=small))
    elif name.startswith("Wan"):
        model = diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), in_channels=4, out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=DEPTH,
            num_attention_heads=2, attention_head_dim=12, rope_max_seq_len=16)
        time = torch.rand(BATCH, N, generator=generator) * 1000 if name == "Wan, a time for each token" else t
        inputs = dict(hidden_states=x[:, :, None], timestep=time, encoder_hidden_states=text)

        def tokens(video):
            return patches(video[:, :, 0])

        def alone(b, ids):
            embed, rope, video = model.patch_embedding, model.rope, x[b:b + 1, :, None]
            return ({"patch_embedding": lambda _: embed(video).flatten(2)[:, :, ids].view(1, -1, 1, 2, 2),
                     "rope": lambda _: tuple(table[:, ids] for table in rope(video))},
                    one(b, hidden_states=small[:, :, None], timestep=time[b:b + 1, ids] if time.ndim > 1 else time[b:b + 1]))
    elif name.startswith("ViT"):
        model = VisionTransformer(
            img_size=8, patch_size=2, in_chans=4, embed_dim=16, depth=DEPTH, num_heads=2, num_classes=0, global_pool="",
            reg_tokens=2 if name == "ViT, registers" else 0)
        prefix, inputs = model.num_prefix_tokens, dict(x=x)

        def tokens(features):
            return features[:, prefix:]

        def alone(b, ids):
            whole, places = model._pos_embed, torch.cat([torch.arange(prefix), ids + prefix])
            return {"_pos_embed": lambda _: whole(model.patch_embed(x[b:b + 1]))[:, places]}, dict(x=x[b:b + 1])
    with torch.no_grad():
        for parameter in model.parameters():        # every gate open, no layer that starts as zero
            parameter.copy_(parameter + 0.05 * randn(*parameter.shape))
    blocks = [block for spec in family_of(model).lists for block in model.get_submodule(spec.path)]
    return SimpleNamespace(model=model.eval(), inputs=inputs, alone=alone, blocks=blocks, tokens=tokens)


family = cache(example)


def call(case, model=None):
    out = (case.model if model is None else model)(**case.inputs)
    return getattr(out, "sample", out)
