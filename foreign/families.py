"""What `routed` needs to know of other people's networks: one table of values, a row for each class."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Blocks:
    """A list of blocks: the first argument of a block is its tokens, and what else matters is said here.

    `along` has the arguments that run along the tokens, each with the axis; "name.0" is the first of a tuple, and
    (axis, ndim) an axis that is there when the tensor has ndim dimensions. `text` is the argument with the text tokens,
    where text has a stream of its own; joined blocks have tokens that never leave in the same sequence as the others.
    `out` is the place of the tokens in a tuple that a block returns.
    """

    path: str
    along: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    joined: bool = False
    out: int = 0


@dataclass(frozen=True)
class Family:
    """A network's lists of blocks in the order of their call, and how many tokens before the others never leave.

    These are counted by the attribute `prefix` of the network, by the mask (B, T) that its call names `text_mask`, or
    by the text of an earlier block. `alone` has arguments of the call that no route may meet.
    """

    lists: tuple[Blocks, ...]
    prefix: str = ""
    text_mask: str = ""
    alone: tuple[str, ...] = ()


TEXT, ROPE = "encoder_hidden_states", "image_rotary_emb"
FAMILIES = {
    "dit.DiT": Family((Blocks("blocks", {"positions": 1}),), alone=("routes", "mask_noise")),
    "timm.VisionTransformer": Family(
        (Blocks("blocks", joined=True),),
        prefix="num_prefix_tokens",
        alone=("attn_mask",)),
    "diffusers.DiTTransformer2DModel": Family((Blocks("transformer_blocks"),)),
    "diffusers.PixArtTransformer2DModel": Family((Blocks("transformer_blocks", {"attention_mask": 2}),)),
    "diffusers.SD3Transformer2DModel": Family(
        (Blocks("transformer_blocks", text=TEXT, out=1),),
        alone=("block_controlnet_hidden_states",)),
    "diffusers.FluxTransformer2DModel": Family(
        (Blocks("transformer_blocks", {ROPE: 0}, text=TEXT, out=1),
         Blocks("single_transformer_blocks", {ROPE: 0}, text=TEXT, out=1)),
        alone=("controlnet_block_samples", "controlnet_single_block_samples")),
    "diffusers.Flux2Transformer2DModel": Family(
        (Blocks("transformer_blocks", {ROPE: 0}, text=TEXT, out=1),
         Blocks("single_transformer_blocks", {ROPE: 0}, joined=True))),
    "diffusers.AuraFlowTransformer2DModel": Family(
        (Blocks("joint_transformer_blocks", text=TEXT, out=1),
         Blocks("single_transformer_blocks", joined=True))),
    "diffusers.Lumina2Transformer2DModel": Family(
        (Blocks("layers", {"attention_mask": 1, ROPE: 1}, joined=True),),
        text_mask="encoder_attention_mask"),
    "diffusers.QwenImageTransformer2DModel": Family(
        (Blocks("transformer_blocks", {f"{ROPE}.0": 0, "modulate_index": 1}, text=TEXT, out=1),),
        alone=("controlnet_block_samples",)),
    "diffusers.WanTransformer3DModel": Family((Blocks("blocks", {"rotary_emb": 1, "temb": (1, 4)}),)),
}
REFUSED = {
    "SanaTransformer2DModel": "its blocks convolve over the grid of tokens, which a route would tear",
    "HunyuanDiT2DModel": "long skips lead from its first blocks to its last, across the ends of a route",
    "UViT": "long skips lead from its first blocks to its last, across the ends of a route",
}


def family_of(network: nn.Module) -> Family:
    """Returns the row of a network, by the class whose forward it runs; raises ValueError for a class without one."""
    owner = next(base for base in type(network).__mro__ if "forward" in vars(base))
    if owner.__name__ in REFUSED:
        raise ValueError(f"{owner.__name__} cannot be routed exactly: {REFUSED[owner.__name__]}.")
    family = FAMILIES.get(f"{owner.__module__.partition('.')[0]}.{owner.__name__}")
    if family is None:
        raise ValueError(f"{owner.__name__} of {owner.__module__} is not one of {', '.join(FAMILIES)}: name its list "
                         f"of blocks by blocks=, and by along= what runs along the tokens.")
    return family


def network_of(model: nn.Module) -> nn.Module:
    """Returns the network inside the wrappers of compile, DDP and PEFT."""
    if isinstance(model, nn.DataParallel):
        raise ValueError("DataParallel calls several copies of a network at once; use DistributedDataParallel.")
    if hasattr(model, "get_base_model"):
        return network_of(model.get_base_model())
    parts = [name for name, _ in model.named_children()]
    return network_of(getattr(model, parts[0])) if parts in (["_orig_mod"], ["module"]) else model
