"""What `routed` knows about other people's networks: a table with one row for each class."""

from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from routed.networks import Blocks, Family, argument_names, by_place, fewer, lists_of_blocks, owner_of, pairs, unwrapped

TEXT, ROPE, MASK = "encoder_hidden_states", "image_rotary_emb", "attention_mask"


def one(path: str, along: Any = None, text: Any = None, tokens: Any = 0, out: int = 0, rejoins: bool = False,
        per_sample: bool = False, **places: Any) -> Family:
    """Describes a network with one list of blocks, see `Blocks` and `Family`."""
    return Family((Blocks(path, along or {}, tokens, text, out, rejoins, per_sample),), **places)


def beside_patches(network: Any, _call: dict[Any, Any]) -> int:
    """Counts the tokens in front of the patches, such as REG's class token, which have rows of pos_embed."""
    return int(network.pos_embed.shape[1] - network.x_embedder.num_patches)


# A class of a library has the library's name in front. Original code is recognised by the class and by what `fits`.
FAMILIES: dict[str, Family] = {
    "dit.DiT": one("blocks", {"positions": 1}),
    "timm.VisionTransformer": one("blocks", front=lambda network, call: network.num_prefix_tokens),
    **dict.fromkeys(("DiT", "SiT"), one("blocks", front=beside_patches)),
    **dict.fromkeys(("PixArt", "PixArtMS"), one("blocks")),
    "LightningDiT": one("blocks", {"feat_rope": by_place(2)}),
    "MMDiT": one("joint_blocks", tokens=1, text=0, out=1),
    "diffusers.PixArtTransformer2DModel": one("transformer_blocks", {MASK: 2}),
    "diffusers.SD3Transformer2DModel": one("transformer_blocks", text=TEXT, out=1),
    "diffusers.Krea2Transformer2DModel": one(
        "transformer_blocks", {ROPE: 0, MASK: 3}, front=lambda network, call: call[TEXT].shape[1]),
    "diffusers.PRXTransformer2DModel": one("blocks", {ROPE: 2}),
    "diffusers.CogView4Transformer2DModel": one("transformer_blocks", {ROPE: 0}, TEXT),
    "diffusers.CogVideoXTransformer3DModel": one("transformer_blocks", {ROPE: 0}, TEXT),
    "diffusers.Lumina2Transformer2DModel": one(
        "layers", {MASK: 1, ROPE: 1}, front=lambda network, call: call["encoder_attention_mask"].sum(dim=1)),
    "diffusers.LTXVideoTransformer3DModel": one("transformer_blocks", {ROPE: 1, "temb": 1}),
    "diffusers.LTX2VideoTransformer3DModel": one("transformer_blocks", {
        "video_rotary_emb": -2, "ca_video_rotary_emb": -2, "temb": 1, "temb_ca_scale_shift": 1, "temb_ca_gate": 1}),
    "diffusers.CosmosTransformer3DModel": one(
        "transformer_blocks", {ROPE: 0, "extra_pos_emb": 1, "embedded_timestep": -2, "temb": -2}),
    "diffusers.Kandinsky5Transformer3DModel": one("visual_transformer_blocks", {"rope": 1}),
    "diffusers.Kandinsky6Transformer3DModel": one("visual_transformer_blocks", {"vis_rope": -5}),
    "diffusers.WanTransformer3DModel": one("blocks", {"rotary_emb": 1, "temb": -3}),
    "diffusers.WanVACETransformer3DModel": one("blocks", {"rotary_emb": 1}, rejoins=True),
    "diffusers.HunyuanVideo15Transformer3DModel": one("transformer_blocks", {"freqs_cis": 0}, TEXT),
    "diffusers.AuraFlowTransformer2DModel": Family(
        (Blocks("joint_transformer_blocks", text=TEXT, out=1), Blocks("single_transformer_blocks"))),
    "diffusers.ChromaTransformer2DModel": Family(
        (Blocks("transformer_blocks", {ROPE: 0, MASK: 1}, text=TEXT, out=1),
         Blocks("single_transformer_blocks", {ROPE: 0, MASK: 1}))),
    "diffusers.HiDreamImageTransformer2DModel": Family(
        (Blocks("double_stream_blocks", {ROPE: 1, "hidden_states_masks": 1}, text=TEXT, rejoins=True),
         Blocks("single_stream_blocks", {ROPE: 1, "hidden_states_masks": 1}, rejoins=True)), text_last=True),
    "diffusers.Flux3Transformer2DModel": Family(
        (Blocks("mode_blocks.image", {"temb_mod": 1, ROPE: 0}),
         Blocks("single_transformer_blocks", {"temb_mod": 1, ROPE: 0}, text=TEXT, out=1)),
        free=lambda network, call: call["hidden_states"].shape[1]),
}


# Flux and its relatives, whose condition images follow the image.
def first_image(_network: nn.Module, call: dict[Any, Any]) -> int:
    """Counts the tokens of the image to be predicted; condition images follow it and have another first coordinate."""
    places = call["x_ids" if "x_ids" in call else "img_ids"]
    of_image = (places[0] if places.ndim == 3 else places)[:, 0]        # (N,)
    first = of_image == of_image[0]
    if torch.compiler.is_compiling():       # which cannot wait for the GPU, as the last line does
        assert first.all(), ("With condition images compile the blocks (compile_repeated_blocks), not the network: how "
                             "many tokens may be routed depends on img_ids.")
        return len(first)
    return int(first.cumprod(dim=0).sum())


FLUX = Family((Blocks("transformer_blocks", {ROPE: 0}, text=TEXT, out=1),
               Blocks("single_transformer_blocks", {ROPE: 0}, text=TEXT, out=1)), free=first_image)
FLUX2 = Family((FLUX.lists[0], Blocks("single_transformer_blocks", {ROPE: 0})), free=first_image)
FIBO = replace(FLUX2, lists=tuple(replace(spec, rejoins=True) for spec in FLUX2.lists))     # new text before each block
FAMILIES |= {f"diffusers.{name}Transformer2DModel": FLUX for name in ("Flux", "Bria", "LongCatImage", "OvisImage")}
FAMILIES |= {"diffusers.Flux2Transformer2DModel": FLUX2, "diffusers.BriaFiboTransformer2DModel": FIBO} | dict.fromkeys(
    ("Flux", "Flux2"), Family((Blocks("double_blocks", {"pe": 2}, text="txt"), Blocks("single_blocks", {"pe": 2})),
                              free=first_image))


# Networks that receive lists of images, or pack attention's parameters in a record.
def one_size(images: list[Any]) -> Any:
    """Returns the shape, or the number of tokens, that all images share; raises ValueError if they differ."""
    first, *others = (image if isinstance(image, int) else getattr(image, "shape", None) for image in images)
    if first is None or any(other != first for other in others):
        raise ValueError("Images of several sizes, or several images per sample, have different numbers of tokens: "
                         "batch images of one size.")
    return first


def patches_of(_network: nn.Module, call: dict[Any, Any]) -> int:
    """Counts the patches of images (B, C, F, H, W), or of each image of a list, padded to a multiple of 32."""
    x, patch = call["x"], call["f_patch_size"] * call["patch_size"] ** 2
    return prod(x.shape[2:]) // patch if isinstance(x, Tensor) else -(-prod(one_size(x)[1:]) // patch // 32) * 32


def words_of_one_size(_network: nn.Module, call: dict[Any, Any]) -> Tensor:
    """Counts the words of each text (B,); raises ValueError for images of several sizes."""
    one_size(call["x"])
    return call["cap_mask"].sum(dim=1)


def ends(cumulative: Tensor, kept: Any) -> Tensor:
    """Reduces flash attention's cumulative lengths (2B + 1,): the ends of each sample's tokens and of its padding."""
    if kept.sample is not None:
        cumulative = cumulative[2 * kept.sample:][:3] - cumulative[2 * kept.sample]
    return cumulative - kept.num_routed * ((torch.arange(len(cumulative), device=cumulative.device) + 1) // 2).to(
        cumulative.dtype)


def fewer_in_params(params: Any, kept: Any) -> Any:
    """Reduces musubi-tuner's AttentionParams, in which image tokens come before text tokens."""
    mask = params.attention_mask
    if mask is not None and not isinstance(mask, Tensor):
        raise ValueError("An attention bias of xformers counts all tokens: set attn_mode to torch or flash.")
    if mask is not None and (mask.ndim == 4 or not params.split_attn):
        mask = kept.rows(mask, mask.ndim - 1, "attention_mask")
    counts = dict(img_len=fewer, seqlens=fewer, cu_seqlens=ends, max_seqlen=fewer)
    return replace(params, attention_mask=mask, **{
        name: reduce(count, kept) for name, reduce in counts.items() if (count := getattr(params, name)) is not None})


FAMILIES |= {
    **dict.fromkeys(("diffusers.ZImageTransformer2DModel", "ZImageTransformer2DModel"), one(
        "layers", {"freqs_cis": 1, "attn_mask": 1, "attn_params": fewer_in_params}, free=patches_of)),
    "SingleStreamDiT": one("blocks", {"freqs": 1, "attn_params": fewer_in_params},
                           free=lambda network, call: call["img"].shape[1]),
    "NextDiT": one("layers", {"x_mask": 1, "freqs_cis": 1, "pe": 1}, front=words_of_one_size),
}


# Qwen-Image, whose condition images are in its stream.
def first_of_shapes(_network: nn.Module, call: dict[Any, Any]) -> int:
    """Counts the tokens of the image to be predicted from img_shapes; the images after it are conditions."""
    return one_size([prod(sample[0] if isinstance(sample, list) else sample) for sample in call["img_shapes"]])


def halves(condition: Tensor, kept: Any) -> Tensor:
    """Reduces Qwen-Image's conditions (2B, D), in which the second half belongs to the condition images."""
    return condition if len(condition) == 1 else condition[kept.sample::len(condition) // 2]


FAMILIES |= dict.fromkeys(("diffusers.QwenImageTransformer2DModel", "QwenImageTransformer2DModel"), one(
    "transformer_blocks", {ROPE: (0, None), "modulate_index": 1, "timestep_zero_index": fewer, "temb": halves}, TEXT,
    out=1, free=first_of_shapes))


# Hunyuan.
def given_frame(network: Any, call: dict[Any, Any]) -> int:
    """Counts the tokens of HunyuanVideo's first frame if that is the condition."""
    if network.config.image_condition_type != "token_replace":
        return 0
    return prod(size // network.config.patch_size for size in call["hidden_states"].shape[-2:])


HUNYUAN: dict[Any, Any] = dict(freqs_cis=0, attn_mask=pairs, total_len=fewer, cu_seqlens_q=ends, cu_seqlens_kv=ends,
                               max_seqlen_q=fewer, max_seqlen_kv=fewer)
FAMILIES |= {
    "diffusers.HunyuanVideoTransformer3DModel": Family(
        (Blocks("transformer_blocks", {"freqs_cis": 0, MASK: 3}, text=TEXT),
         Blocks("single_transformer_blocks", {ROPE: 0, MASK: 3}, text=TEXT)), front=given_frame, text_last=True),
    "HYVideoDiffusionTransformer": Family(
        (Blocks("double_blocks", HUNYUAN, text="txt"), Blocks("single_blocks", HUNYUAN)), text_last=True),
    "HunyuanVideo_1_5_DiffusionTransformer": one(   # between two lists it counts image tokens, so one is routed
        "double_blocks", {"freqs_cis": 0, "attn_param": None, "attn_params": fewer_in_params}, "txt", text_last=True),
}


# Wan, whose original code counts a grid in its blocks.
def grid_line(grids: Tensor, kept: Any) -> Tensor:
    """Replaces Wan's grid (1, 3) of frames, rows and columns: the kept tokens form one line."""
    if prod(grids[0].tolist()) != kept.length:
        raise ValueError(f"A video of {grids[0].tolist()} tokens in a sequence of {kept.length}: videos of several "
                         f"sizes, or padded ones, cannot be routed. Set seq_len to the number of tokens of each.")
    return grids.new_tensor([[kept.length - kept.num_routed, 1, 1]])


def grid_rows(table: Any, kept: Any) -> Any:
    """Reduces Wan's table (rows, D) for all axes, or musubi-tuner's list with a table (N, 1, D) for each sample.

    Wan's block splits the table into a part for each axis, and expands each over the grid. In one line of tokens the
    first part can have the values of all axes.
    """
    [places] = kept.places()
    if isinstance(table, list):
        return [table[kept.sample][places]]
    _, rows, columns = kept.arguments["grid_sizes"][0].tolist()
    third = table.shape[1] // 3
    at = places // (rows * columns), places // columns % rows, places % columns
    parts = table.split([table.shape[1] - 2 * third, third, third], dim=1)
    line = torch.cat([part[i] for part, i in zip(parts, at, strict=True)], dim=1)
    return SimpleNamespace(split=lambda sizes, dim: [line, *[line.new_empty(1, 0)] * (len(sizes) - 1)])


FAMILIES |= {"WanModel": one("blocks", {"e": -3, "seq_lens": fewer, "grid_sizes": grid_line, "freqs": grid_rows},
                             per_sample=True)}

# What a trial of the blocks does not find.
REFUSED = dict.fromkeys(
    ("AnyFlowFARTransformer3DModel", "SanaWMLTX2RefinerTransformer3DModel", "WanAnimate2Transformer3DModel"),
    "its tokens attend to a cache of all tokens from an earlier pass")
REFUSED["NucleusMoEImageTransformer2DModel"] = "each expert chooses among all tokens, so fewer change the others"


def fits(spec: Blocks, network: nn.Module) -> bool:
    """True if a network has a list of blocks that take the tokens, the text and the first argument that it names."""
    names = {key for key in (spec.tokens, spec.text, *[*spec.along][:1]) if isinstance(key, str)}
    blocks = getattr(network, spec.path, None)
    return isinstance(blocks, nn.ModuleList) and all(names <= {*argument_names(unwrapped(block))} for block in blocks)


def family_of(network: nn.Module) -> Family:
    """Finds a network's row by the class whose forward it runs; raises ValueError for a class without one."""
    owner = owner_of(network)
    if row := FAMILIES.get(f"{owner.__module__.partition('.')[0]}.{owner.__name__}"):
        return row
    if (row := FAMILIES.get(owner.__name__)) and all(fits(spec, network) for spec in row.lists):
        return row
    raise ValueError(f"{owner.__name__} of {owner.__module__} is not a known network (docs/trainers.md): name its list "
                     f"of blocks as blocks=, and the arguments with a value per token as along=. Lists of blocks: "
                     f"{lists_of_blocks(network)}.")
