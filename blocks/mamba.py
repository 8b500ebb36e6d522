"""Mamba's block: a selective scan of the tokens in both directions."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocks.transformer import LAYER_NORM, Block, modulate, refuse_qk_norm


class MambaBlock(Block):
    """Mamba's mixer as the one residual branch, shifted, scaled and gated by the condition, as in ZigMa (2403.13802).

    num_heads are the heads of the scan. A block has no MLP, so mlp_ratio has no effect, and scans the tokens in the
    order given. Raises ValueError for qk_norm, as it has neither queries nor keys.
    """

    mark = "mixer.A_log"
    # This size and RWKV's match the paper's two parameter counts; the paper does not state width and depth.
    models = {"Mamba-B/2": dict(depth=20, hidden_size=768, num_heads=24, patch_size=2)}  # 111M

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float, grid_size: int, qk_norm: bool = False):
        super().__init__()
        refuse_qk_norm("mamba", qk_norm)
        self.norm = LAYER_NORM(hidden_size)
        self.mixer = BidirectionalMamba(hidden_size, num_heads)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 3 * hidden_size))

    def forward(self, x: Tensor, c: Tensor, positions: Tensor) -> Tensor:
        shift, scale, gate = self.adaLN_modulation(c).chunk(3, dim=1)
        return x + gate.unsqueeze(1) * self.mixer(modulate(self.norm(x), shift, scale))


def selective_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Runs the recurrence of Mamba-2 (arXiv 2405.21060) from the first token to the last, in float32.

    For each head, h_t = exp(dt_t·A)·h_(t-1) + dt_t·B_t·x_t and y_t = C_t·h_t. x is (batch, K, G, H, P), H heads of P
    channels in each of G groups; dt (batch, K, G, H) is positive and A (G, H) negative; B and C (batch, K, G, S)
    belong to a group, whose state has S numbers for each channel. The result is shaped like x. It uses the paper's dual
    form, a masked matrix as in attention, whose work and memory are quadratic in K.
    """
    x, dt, A, B, C = (tensor.float() for tensor in (x, dt, A, B, C))
    with torch.autocast("cuda" if x.is_cuda else "cpu", enabled=False):  # autocast does not know the meta device
        log_decay = (dt * A).cumsum(1).permute(0, 2, 3, 1)                                   # (batch, G, H, K)
        log_decay = log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)                        # from token i to t
        later = torch.ones(log_decay.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        # Masked before exp, which could be infinite above the diagonal, with gradients that are NaN.
        decay = log_decay.masked_fill(later, -math.inf).exp()                                # (batch, G, H, K, K)
        similarity = torch.einsum("btgs,bigs->bgti", C, B)
        return torch.einsum("bghti,bighp->btghp", similarity.unsqueeze(2) * decay, dt.unsqueeze(-1) * x)


class BidirectionalMamba(nn.Module):
    """Mamba-2's mixer, scanned in both directions as in Vision Mamba (arXiv 2401.09417).

    One projection in and one out serve both directions; each has its own convolution over 4 tokens, step sizes, decays,
    B and C. The last token is the backward scan's first; the sum of both is gated, normed and projected.
    """

    def __init__(self, hidden_size: int, num_heads: int, expand: int = 2, state_size: int = 16, kernel_size: int = 4):
        super().__init__()
        inner, width = expand * hidden_size, 2 * state_size + num_heads
        self.num_heads, self.state_size, self.kernel_size = num_heads, state_size, kernel_size
        self.in_proj = nn.Linear(hidden_size, 2 * inner + 2 * width, bias=False)
        channels = 2 * (inner + 2 * state_size)
        self.conv = nn.Conv1d(channels, channels, kernel_size, groups=channels)
        # Decays and step sizes start as in Mamba-2, over the ranges [1, 16] and [1e-3, 1e-1].
        self.A_log = nn.Parameter(torch.empty(2, num_heads).uniform_(1, 16).log())
        dt = torch.empty(2, num_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(dt + (-(-dt).expm1()).log())  # softplus of it is dt
        self.D = nn.Parameter(torch.ones(2, num_heads))
        self.norm = nn.RMSNorm(inner, eps=1e-5)
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner, state = self.out_proj.in_features, self.state_size
        z, x, others = self.in_proj(x).split([inner, inner, 2 * (2 * state + self.num_heads)], dim=-1)
        bc, dt = others.unflatten(-1, (2, -1)).split([2 * state, self.num_heads], dim=-1)  # (batch, K, 2, ·)
        mixed = torch.cat([x.unsqueeze(2).expand(-1, -1, 2, -1), bc], dim=-1)
        mixed, dt = backward_reversed(mixed), backward_reversed(dt)
        # Causal: token t sees itself and the three before it.
        padded = F.pad(mixed.flatten(2).transpose(1, 2), (self.kernel_size - 1, 0))
        mixed = F.silu(self.conv(padded)).transpose(1, 2).unflatten(-1, (2, -1))
        x, B, C = mixed.split([inner, state, state], dim=-1)
        x = x.unflatten(-1, (self.num_heads, -1))                                            # (batch, K, 2, H, P)
        y = selective_scan(x, F.softplus(dt.float() + self.dt_bias), -self.A_log.float().exp(), B, C)
        y = backward_reversed(y + self.D.unsqueeze(-1) * x).sum(2).flatten(2)
        return self.out_proj(self.norm(y * F.silu(z)))


def backward_reversed(x: Tensor) -> Tensor:
    """Reverses the order of the tokens for the second of the two directions of x (batch, K, 2, ...)."""
    forward, backward = x.unbind(2)
    return torch.stack([forward, backward.flip(1)], dim=2)
