"""The blocks of DiT (arXiv 2212.09748) and LightningDiT (2501.01423)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYER_NORM = partial(nn.LayerNorm, elementwise_affine=False, eps=1e-6)
RMS_NORM = partial(nn.RMSNorm, eps=1e-6)


class Block(nn.Module):
    """What a file of blocks/ declares: a block, and what is known of networks that consist of it."""

    final_norm: Callable[[int], nn.Module] = staticmethod(LAYER_NORM)   # the final layer's, from its width
    mark: str | None = None                     # a weight that no other block has
    models: dict[str, dict[str, Any]] = {}      # named sizes, each a model.backbone_type


WIDTHS = {
    "S": dict(depth=12, hidden_size=384, num_heads=6),
    "B": dict(depth=12, hidden_size=768, num_heads=12),
    "L": dict(depth=24, hidden_size=1024, num_heads=16),
    "XL": dict(depth=28, hidden_size=1152, num_heads=16),
}


def sizes(family: str, *names: str) -> dict[str, dict[str, Any]]:
    """Maps full names, such as "DiT-B/2" (width and patch size), to the keywords of a network."""
    pairs = {name: name.split("/") for name in names}
    return {f"{family}-{name}": {**WIDTHS[width], "patch_size": int(patch)} for name, (width, patch) in pairs.items()}


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def split_heads(qkv: Tensor, num_heads: int) -> list[Tensor]:
    """Splits tokens (B, K, 3·D) into queries, keys and values, each (B, K, heads, D / heads).

    In these two steps the compiled backward pass copies the three gradients beside each other once, and sums the bias's
    gradient in the same kernel: 57 MB less in a block of XL/2 at 32 images.
    """
    return [part.unflatten(-1, (num_heads, -1)) for part in qkv.unflatten(-1, (3, -1)).unbind(2)]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Averages values by the softmax of queries times keys, each (B, K, heads, D / heads): (B, K, D)."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    # In bfloat16 on a CPU torch's fused kernel takes 1.1 to 5 times as long as plain products up to 128 tokens.
    plain = v.device.type == "cpu" and v.dtype == torch.bfloat16 and v.shape[2] <= 128
    x = (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1) @ v if plain else F.scaled_dot_product_attention(q, k, v)
    return x.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Self-attention over tokens (B, K, D); qk_norm normalises each head's queries and keys."""

    def __init__(self, hidden_size: int, num_heads: int, qk_norm: bool):
        super().__init__()
        self.num_heads, head_dim = num_heads, hidden_size // num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.q_norm = nn.LayerNorm(head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(head_dim) if qk_norm else nn.Identity()
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split_heads(self.qkv(x), self.num_heads)
        return self.proj(attend(self.q_norm(q), self.k_norm(k), v))


class Mlp(nn.Module):
    def __init__(self, hidden_size: int, hidden_features: int):
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, hidden_features)
        self.fc2 = nn.Linear(hidden_features, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class DiTBlock(Block):
    """A transformer block whose two residual branches are shifted, scaled and gated by the condition (adaLN-Zero)."""

    mark = "mlp.fc1.weight"
    models = sizes("DiT", *(f"{width}/{patch}" for width in WIDTHS for patch in (2, 4, 8)))

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float, grid_size: int, qk_norm: bool = False):
        super().__init__()
        self.norm1 = LAYER_NORM(hidden_size)
        self.attn = Attention(hidden_size, num_heads, qk_norm)
        self.norm2 = LAYER_NORM(hidden_size)
        self.mlp = Mlp(hidden_size, int(hidden_size * mlp_ratio))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x: Tensor, c: Tensor, positions: Tensor) -> Tensor:
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_msa.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        x = x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))
        return x


def rotary_angles(positions: Tensor, grid_size: int, head_dim: int) -> Tensor:
    """Returns the angles (1 or B, K, 1, head_dim/2) that rotate tokens: one half for the row, one for the column."""
    freqs = 10000.0 ** -(torch.arange(0, head_dim // 2, 2, device=positions.device) / (head_dim // 2))
    coordinates = torch.stack([positions // grid_size, positions % grid_size], dim=-1)  # (1 or B, K, 2)
    return (coordinates.unsqueeze(-1) * freqs).flatten(2).unsqueeze(2)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates neighbouring pairs of channels of x (B, K, heads, head_dim)."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


class RotaryAttention(nn.Module):
    """Attention whose queries and keys are rotated by the tokens' places in the grid (RoPE, arXiv 2104.09864, in 2D).

    So a product of query and key depends on the distance between two tokens, whichever others are present.
    """

    def __init__(self, hidden_size: int, num_heads: int, grid_size: int, qk_norm: bool):
        super().__init__()
        self.num_heads, self.grid_size, self.head_dim = num_heads, grid_size, hidden_size // num_heads
        if self.head_dim % 4:
            raise ValueError(f"hidden_size {hidden_size} with {num_heads} heads gives {self.head_dim} channels per "
                             f"head, but rotary positions need a multiple of 4.")
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.q_norm = RMS_NORM(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = RMS_NORM(self.head_dim) if qk_norm else nn.Identity()
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = split_heads(self.qkv(x), self.num_heads)
        angles = rotary_angles(positions, self.grid_size, self.head_dim)
        # In float32, also under autocast: bfloat16 has too few bits for angles and norms.
        q = rotate(self.q_norm(q.float()), angles).type_as(v)
        k = rotate(self.k_norm(k.float()), angles).type_as(v)
        return self.proj(attend(q, k, v))


class SwiGLU(nn.Module):
    """A two-layer MLP whose hidden units are gated by others (arXiv 2002.05202)."""

    def __init__(self, hidden_size: int, hidden_features: int):
        super().__init__()
        self.w12 = nn.Linear(hidden_size, 2 * hidden_features)
        self.w3 = nn.Linear(hidden_features, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * value)


class LightningBlock(Block):
    """LightningDiT's block: DiT's, with RMSNorm, rotary positions and SwiGLU; keys and shapes are hustvl's."""

    final_norm = staticmethod(RMS_NORM)
    mark = "mlp.w12.weight"
    models = sizes("LightningDiT", "B/1", "B/2", "L/2", "XL/1", "XL/2")

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float, grid_size: int, qk_norm: bool = False):
        super().__init__()
        self.norm1 = RMS_NORM(hidden_size)
        self.attn = RotaryAttention(hidden_size, num_heads, grid_size, qk_norm)
        self.norm2 = RMS_NORM(hidden_size)
        # Two thirds of the hidden units of an MLP of two layers, as the gate is a third layer.
        self.mlp = SwiGLU(hidden_size, int(2 / 3 * int(hidden_size * mlp_ratio)))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x: Tensor, c: Tensor, positions: Tensor) -> Tensor:
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_msa.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_msa, scale_msa), positions)
        x = x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))
        return x


def refuse_qk_norm(block: str, qk_norm: bool) -> None:
    if qk_norm:
        raise ValueError(f"qk_norm=true normalises the queries and keys of attention, and block {block} has none: set "
                         f"qk_norm=false.")
