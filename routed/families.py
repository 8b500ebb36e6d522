"""What `routed` needs to know of other people's networks: one table of values, a row for each class."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Blocks:
    """A list of blocks: the first argument of a block is its tokens, and what else matters is said here.

    `along` has the arguments that run along the tokens, each with its axis of tokens, which follows an axis of the
    samples, or of size 1; "name.0" is the first of a tuple. {ndim: axis} says it for tensors of so many axes only, and
    {ndim: (axis, rank)} for tables without an axis of the samples, which the block broadcasts to `rank` axes. An axis
    that has size 1 stays. None is for what a block may not be given.

    `text` is the argument with the text tokens, where text has a stream of its own; joined blocks have tokens that
    never leave in the same sequence as the others. `front` is the argument that counts the first tokens of the stream,
    where they never leave. `out` is the place of the tokens in a tuple that a block returns. Where the network changes
    all tokens between two blocks they must be `whole` there: each block then takes its own out, and puts them back.
    """

    path: str
    along: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    joined: bool = False
    front: str = ""
    out: int = 0
    whole: bool = False


@dataclass(frozen=True)
class Family:
    """A network's lists of blocks in the order of their call, and which tokens of a joined sequence never leave.

    `text` counts them from the network and its arguments: a number, or one for each sample (B,). Where it is absent,
    an earlier block's text counts, or `free` says from the arguments how many tokens may leave. They stand before the
    others, or after them if `text_last`. `never` names them for the reader. `alone` has arguments of the call that no
    route may meet.
    """

    lists: tuple[Blocks, ...]
    never: str = ""
    text: Callable[[nn.Module, dict], Any] | None = None
    free: Callable[[dict], int] | None = None
    text_last: bool = False
    alone: tuple[str, ...] = ()


def padded_image(call: dict) -> int:
    """Counts the tokens of each image of a list, padded to a multiple of 32; raises ValueError for several sizes."""
    images = call["x"]
    if not all(isinstance(image, Tensor) and image.shape == images[0].shape for image in images):
        raise ValueError("A batch of images of several sizes, or of several images a sample, cannot be routed: its "
                         "samples have different numbers of tokens. Batch images of one size.")
    patch = call["f_patch_size"] * call["patch_size"] ** 2
    return -(-prod(images[0].shape[1:]) // patch // 32) * 32


def first_image(call: dict) -> int:
    """Counts the tokens of the image to be predicted, before condition images, which differ in their first coordinate.

    On a GPU this waits for the places. A compiled network cannot, so there condition images raise an error.
    """
    places = call["img_ids"]
    of_image = (places[0] if places.ndim == 3 else places)[:, 0]        # (N,)
    first = of_image == of_image[0]
    if torch.compiler.is_compiling():
        torch._assert_async(first.all(), "With condition images compile the blocks (compile_repeated_blocks), not the "
                            "network: how many tokens may leave depends on img_ids.")
        return len(first)
    return int(first.cumprod(dim=0).sum())


def first_of_shapes(call: dict) -> int:
    """Counts the tokens of the image to be predicted by img_shapes; the images behind it are conditions."""
    first = {prod(sample[0] if isinstance(sample, list) else sample) for sample in call["img_shapes"]}
    if len(first) > 1:
        raise ValueError(f"img_shapes has samples of {sorted(first)} tokens, which cannot be routed together: batch "
                         f"images of one size.")
    return first.pop()


def in_front(network: nn.Module, call: dict) -> int:
    return network.num_prefix_tokens


TEXT, ROPE, MASK = "encoder_hidden_states", "image_rotary_emb", "attention_mask"
CLASS_TOKENS = "class and register tokens"
CONTROLNETS = ("controlnet_block_samples", "controlnet_single_block_samples")
FAMILIES = {
    "dit.DiT": Family((Blocks("blocks", {"positions": 1}),), alone=("routes", "mask_noise")),
    "timm.VisionTransformer": Family(
        (Blocks("blocks", {"attn_mask": None}, joined=True),), CLASS_TOKENS, in_front),
    "timm.Eva": Family(
        (Blocks("blocks", {"rope": {2: (0, 4), 3: (1, 4), 4: 2}, "attn_mask": None}, joined=True),), CLASS_TOKENS,
        in_front),
    "transformers.ViTModel": Family(
        (Blocks("layers", {MASK: None}, joined=True),), CLASS_TOKENS, lambda network, call: 1),
    "transformers.Dinov2Model": Family(
        (Blocks("encoder.layer", {MASK: None}, joined=True),), CLASS_TOKENS, lambda network, call: 1),
    "transformers.Dinov2WithRegistersModel": Family(
        (Blocks("encoder.layer", {MASK: None}, joined=True),), CLASS_TOKENS,
        lambda network, call: 1 + network.config.num_register_tokens),
    "diffusers.DiTTransformer2DModel": Family((Blocks("transformer_blocks"),)),
    "diffusers.PixArtTransformer2DModel": Family((Blocks("transformer_blocks", {MASK: 2}),), "text"),
    "diffusers.SD3Transformer2DModel": Family(
        (Blocks("transformer_blocks", text=TEXT, out=1),), "text", alone=("block_controlnet_hidden_states",)),
    **dict.fromkeys(
        ("diffusers.FluxTransformer2DModel", "diffusers.BriaTransformer2DModel",
         "diffusers.LongCatImageTransformer2DModel", "diffusers.OvisImageTransformer2DModel"),
        Family((Blocks("transformer_blocks", {ROPE: 0}, text=TEXT, out=1),
                Blocks("single_transformer_blocks", {ROPE: 0}, text=TEXT, out=1)), "text and condition images",
               free=first_image, alone=CONTROLNETS)),
    **dict.fromkeys(
        ("diffusers.Flux2Transformer2DModel", "diffusers.BriaFiboTransformer2DModel"),
        Family((Blocks("transformer_blocks", {ROPE: 0}, text=TEXT, out=1),
                Blocks("single_transformer_blocks", {ROPE: 0}, joined=True)), "text and condition images",
               free=first_image)),
    "diffusers.Flux3Transformer2DModel": Family(
        (Blocks("mode_blocks.image", {"temb_mod": 1, ROPE: 0}),
         Blocks("single_transformer_blocks", {"temb_mod": 1, ROPE: 0}, text=TEXT, out=1)),
        "text and condition images", free=lambda call: call["hidden_states"].shape[1]),
    "diffusers.ChromaTransformer2DModel": Family(
        (Blocks("transformer_blocks", {ROPE: 0, MASK: 1}, text=TEXT, out=1),
         Blocks("single_transformer_blocks", {ROPE: 0, MASK: 1}, joined=True)), "text", alone=CONTROLNETS),
    "diffusers.Krea2Transformer2DModel": Family(
        (Blocks("transformer_blocks", {ROPE: 0, MASK: 3}, joined=True),), "text",
        lambda network, call: call[TEXT].shape[1]),
    "diffusers.PRXTransformer2DModel": Family((Blocks("blocks", {ROPE: 2}),), "text"),
    "diffusers.HiDreamImageTransformer2DModel": Family(
        (Blocks("double_stream_blocks", {ROPE: 1, "hidden_states_masks": 1}, text=TEXT, whole=True),
         Blocks("single_stream_blocks", {ROPE: 1, "hidden_states_masks": 1}, joined=True, whole=True)),
        "text", text_last=True),
    "diffusers.CogView3PlusTransformer2DModel": Family((Blocks("transformer_blocks", text=TEXT),), "text"),
    **dict.fromkeys(
        ("diffusers.CogView4Transformer2DModel", "diffusers.CogVideoXTransformer3DModel"),
        Family((Blocks("transformer_blocks", {ROPE: 0}, text=TEXT),), "text")),
    "diffusers.HunyuanImageTransformer2DModel": Family(
        (Blocks("transformer_blocks", {ROPE: 0, MASK: 3}, text=TEXT),
         Blocks("single_transformer_blocks", {ROPE: 0, MASK: 3}, text=TEXT)), "text", text_last=True),
    "diffusers.AuraFlowTransformer2DModel": Family(
        (Blocks("joint_transformer_blocks", text=TEXT, out=1), Blocks("single_transformer_blocks", joined=True)),
        "text and registers"),
    "diffusers.Lumina2Transformer2DModel": Family(
        (Blocks("layers", {MASK: 1, ROPE: 1}, joined=True),), "text of any lengths",
        lambda network, call: call["encoder_attention_mask"].sum(dim=1)),
    "diffusers.QwenImageTransformer2DModel": Family(
        (Blocks("transformer_blocks", {f"{ROPE}.0": 0, "modulate_index": 1}, text=TEXT, out=1),),
        "text and condition images", free=first_of_shapes, alone=("controlnet_block_samples",)),
    "diffusers.QwenImage21Transformer2DModel": Family(
        (Blocks("transformer_blocks", {"rotary_emb": 0, "target_token_mask": {1: 0}, "key_valid": 1, MASK: None},
                joined=True),),
        "text and condition images", free=lambda call: prod(call["img_shapes"][0][-1]), alone=("kv_cache",)),
    "diffusers.ZImageTransformer2DModel": Family(
        (Blocks("layers", {"attn_mask": 1, "freqs_cis": 1}, joined=True),), "text of any lengths", free=padded_image,
        text_last=True, alone=("controlnet_block_samples", "siglip_feats")),
    "diffusers.HunyuanVideoTransformer3DModel": Family(
        (Blocks("transformer_blocks", {"freqs_cis": 0, MASK: 3}, text=TEXT, front="num_tokens"),
         Blocks("single_transformer_blocks", {ROPE: 0, MASK: 3}, text=TEXT, front="num_tokens")),
        "text; a given first frame", text_last=True),
    "diffusers.HunyuanVideo15Transformer3DModel": Family(
        (Blocks("transformer_blocks", {"freqs_cis": 0}, text=TEXT),), "text and the condition image"),
    **dict.fromkeys(
        ("diffusers.WanTransformer3DModel", "diffusers.ChronoEditTransformer3DModel"),
        Family((Blocks("blocks", {"rotary_emb": 1, "temb": {4: 1}}),), "text")),
    "diffusers.WanVACETransformer3DModel": Family((Blocks("blocks", {"rotary_emb": 1}, whole=True),), "text"),
    "diffusers.SkyReelsV2Transformer3DModel": Family(
        (Blocks("blocks", {"rotary_emb": 1, "temb": {4: 2}, MASK: None}),), "text"),
    "diffusers.LTXVideoTransformer3DModel": Family((Blocks("transformer_blocks", {ROPE: 1, "temb": 1}),), "text"),
    "diffusers.LTX2VideoTransformer3DModel": Family(
        (Blocks("transformer_blocks", {
            "video_rotary_emb": {3: 1, 4: 2}, "ca_video_rotary_emb": {3: 1, 4: 2}, "temb": 1, "temb_ca_scale_shift": 1,
            "temb_ca_gate": 1, "self_attention_mask": None}),),
        "text and sound"),
    "diffusers.CosmosTransformer3DModel": Family(
        (Blocks("transformer_blocks", {ROPE: 0, "extra_pos_emb": 1, "embedded_timestep": {3: 1}, "temb": {3: 1}}),),
        "text", alone=("block_controlnet_hidden_states",)),
    "diffusers.MochiTransformer3DModel": Family(
        (Blocks("transformer_blocks", {ROPE: {3: (0, 4)}}, text=TEXT),), "text"),
    "diffusers.Kandinsky5Transformer3DModel": Family(
        (Blocks("visual_transformer_blocks", {"rope": 1, "sparse_params": None}),), "text"),
    "diffusers.Kandinsky6Transformer3DModel": Family(
        (Blocks("visual_transformer_blocks", {"vis_rope": {5: (0, 6)}}),), "text and sound"),
}
GRIDS = "its blocks convolve over the grid of tokens, which a route would tear"
SKIPS = "long skips lead from its first blocks to its last, across the ends of a route"
CACHES = "its tokens attend to what an earlier pass has cached, of all tokens"
PACKS = "it packs several streams into one sequence, whose layout counts every token"
REFUSED = {
    "SanaTransformer2DModel": GRIDS,
    "SanaVideoTransformer3DModel": GRIDS,
    "SanaWMTransformer3DModel": GRIDS,
    "HunyuanDiT2DModel": SKIPS,
    "UViT": SKIPS,
    "AnyFlowFARTransformer3DModel": CACHES,
    "SanaWMLTX2RefinerTransformer3DModel": CACHES,
    "WanAnimate2Transformer3DModel": CACHES,
    "Cosmos3OmniTransformer": PACKS,
    "MiniMaxH3Transformer3DModel": PACKS,
    "Kandinsky6SRTransformer3DModel": "its attention is sparse by tiles of the grid, which a route would tear",
    "LatteTransformer3DModel": "it folds frames and places into the batch by turns, and each needs all of the other",
    "NucleusMoEImageTransformer2DModel": "each expert picks among all tokens, and who leaves changes what others get",
}


def lists_of_blocks(network: nn.Module) -> str:
    """Names the lists of several blocks of one class in a network, as in `layers (28 of Block)`."""
    found = [(name, part) for name, part in network.named_modules() if isinstance(part, nn.ModuleList) and len(part) > 1
             and len({type(block) for block in part}) == 1 and any(part[0].children())]
    return ", ".join(f"{name} ({len(part)} of {type(part[0]).__name__})" for name, part in found) or "none"


def family_of(network: nn.Module) -> Family:
    """Returns the row of a network, by the class whose forward it runs; raises ValueError for a class without one."""
    owner = next(base for base in type(network).__mro__ if "forward" in vars(base))
    if owner.__name__ in REFUSED:
        raise ValueError(f"{owner.__name__} cannot be routed exactly: {REFUSED[owner.__name__]}.")
    family = FAMILIES.get(f"{owner.__module__.partition('.')[0]}.{owner.__name__}")
    if family is None:
        raise ValueError(f"{owner.__name__} of {owner.__module__} is not a known network (docs/routing.md): name its "
                         f"list of blocks by blocks=, and by along= what runs along the tokens. Lists of blocks in it: "
                         f"{lists_of_blocks(network)}.")
    return family


def network_of(model: nn.Module) -> nn.Module:
    """Returns the network inside the wrappers of compile, DDP and PEFT."""
    if isinstance(model, nn.DataParallel):
        raise ValueError("DataParallel calls several copies of a network at once; use DistributedDataParallel.")
    if hasattr(model, "get_base_model"):
        return network_of(model.get_base_model())
    parts = [name for name, _ in model.named_children()]
    return network_of(getattr(model, parts[0])) if parts in (["_orig_mod"], ["module"]) else model
