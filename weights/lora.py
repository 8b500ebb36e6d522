"""LoRA (arXiv 2106.09685), which PEFT attaches to a plain network from outside: trained, saved and merged.

Only the adapter has gradients: each linear layer adds alpha / rank · B·A·x to its output, and B begins at zero.
weights/loading.py merges the two, so that sampling and scoring do not see adapters.
"""

import importlib.util
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from runtime import sharding
from runtime.schema import Count, Location, Positive, Settings

PEFT = "0.21.2"
DOWN, UP = ".lora_A.weight", ".lora_B.weight"  # of a saved adapter, after the layer's name: A (r, in), B (out, r)


class LoRARecord(Settings):
    """The adapter of a checkpoint that holds nothing else; `base` is the weights file that it adapts."""

    rank: Count
    alpha: Positive
    targets: list[str] | None
    base: Location


def attach(net: nn.Module, rank: int, alpha: float | None = None, targets: list[str] | None = None) -> int:
    """Attaches an adapter to linear layers of the blocks, freezes everything else and returns the number of layers.

    `targets` are ends of the layers' names, such as attn.qkv. None means all linear layers of a block except those of
    its modulation (adaLN). alpha=None is the rank. Raises ValueError without PEFT, and for a target that no layer has.
    """
    if importlib.util.find_spec("peft") is None:
        raise ValueError(f"lora.rank={rank} needs PEFT, which is not installed: pip install peft=={PEFT}, or set "
                         f"lora.rank=null.")
    layers = {name: layer for name, layer in net.named_modules()
              if name.startswith("blocks.") and isinstance(layer, nn.Linear)}
    for target in targets or []:
        if not any(name.endswith(f".{target}") for name in layers):
            ends = dict.fromkeys(name.split(".", 2)[2] for name in layers)
            raise ValueError(f"lora.targets names {target}, and no block has such a linear layer: they have "
                             f"{', '.join(ends)}.")
    chosen = [name for name in layers if (
        "adaLN" not in name if targets is None else name.endswith(tuple(f".{target}" for target in targets)))]
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds

    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha or rank, target_modules=chosen), net)
    return len(chosen)


def trained_names(net: nn.Module) -> dict[str, str]:
    """Maps the name of each tensor in a checkpoint to its name in the network.

    For a network with an adapter, a checkpoint holds only the adapter, under the names that PEFT uses in files.
    """
    names = {name: name for name in net.state_dict()}
    return {name.replace(".default.", "."): name for name in names if ".lora_" in name} or names


def tensors(net: nn.Module) -> dict[str, Tensor]:
    """Returns a network's tensors for a checkpoint, by name: its state dict, or that of its adapter."""
    state = net.state_dict()
    return {saved: state[name] for saved, name in trained_names(net).items()}


def load_adapter(net: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Restores what `tensors` returned; raises ValueError for tensors of other names or shapes."""
    names, state = trained_names(net), net.state_dict()
    if {key: state[name].shape for key, name in names.items()} != {key: value.shape for key, value in saved.items()}:
        raise ValueError("The tensors of the checkpoint are not those of the network that its record describes.")
    sharding.copy_into(state, {names[name]: value for name, value in saved.items()})


def load_base_weights(net: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loads a plain network's state dict into one that may have an adapter, which does not change."""
    names = {name: name.replace(".base_layer.", ".") for name in net.state_dict() if ".lora_" not in name}
    assert {*names.values()} == state.keys()
    sharding.copy_into(net.state_dict(), {name: state[plain] for name, plain in names.items()})


@torch.no_grad()
def merge(base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Adds a saved adapter to the state dict of its base: W + scale · B·A."""
    merged = dict(base)
    for name in (key.removesuffix(DOWN) for key in adapter if key.endswith(DOWN)):
        merged[f"{name}.weight"] = base[f"{name}.weight"] + scale * (adapter[name + UP] @ adapter[name + DOWN])
    return merged
