"""RWKV's block: averages over tokens in both directions, with separate weights in each channel."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocks.transformer import LAYER_NORM, Block, modulate, refuse_qk_norm

MAX_DECAY = 40.0  # over the whole sequence: e^±40 is still a float32


class RWKVBlock(Block):
    """RWKV's mixers over tokens and channels in two adaLN-Zero branches, as in Diffusion-RWKV (arXiv 2404.04478).

    Each channel averages over tokens with its own weights, so num_heads has no effect. Raises ValueError for qk_norm,
    as it has no queries.
    """

    mark = "spatial_mix.decay"
    models = {"RWKV-L/2": dict(depth=18, hidden_size=768, num_heads=12, patch_size=2)}  # 210M

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float, grid_size: int, qk_norm: bool = False):
        super().__init__()
        refuse_qk_norm("rwkv", qk_norm)
        self.grid_size = grid_size
        self.norm1 = LAYER_NORM(hidden_size)
        self.spatial_mix = SpatialMix(hidden_size)
        self.norm2 = LAYER_NORM(hidden_size)
        self.channel_mix = ChannelMix(hidden_size, int(hidden_size * mlp_ratio))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x: Tensor, c: Tensor, positions: Tensor) -> Tensor:
        shift_s, scale_s, gate_s, shift_c, scale_c, gate_c = self.adaLN_modulation(c).chunk(6, dim=1)
        h = modulate(self.norm1(x), shift_s, scale_s)
        x = x + gate_s.unsqueeze(1) * self.spatial_mix(h, shift_tokens(h, positions, self.grid_size))
        h = modulate(self.norm2(x), shift_c, scale_c)
        x = x + gate_c.unsqueeze(1) * self.channel_mix(h, shift_tokens(h, positions, self.grid_size))
        return x


def wkv(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor) -> Tensor:
    """Averages values with the weights of Bi-WKV (Vision-RWKV, arXiv 2403.02308), in float32.

    Token i has the weight exp(k_i - (|t - i| - 1)·decay / K) in the average of token t, and token t itself has
    exp(k_t + bonus). k and v are (batch, K, D), decay and bonus (D,); a negative decay favours distant tokens. The work
    is linear in K: two cumulative sums. Exponents are relative to the largest key, and the decay over the complete
    sequence is at most e^±40. So neither overflows, and no sum of weights is zero.
    """
    k, v, decay = k.float(), v.float(), decay.float().clamp(-MAX_DECAY, MAX_DECAY)
    num_tokens = k.shape[1]
    from_middle = torch.arange(num_tokens, device=k.device) - (num_tokens - 1) / 2
    growth = (from_middle.unsqueeze(-1) * decay / num_tokens).exp()                          # (K, D), within e^±20
    weight = (k - k.detach().amax(1, keepdim=True)).exp()
    terms = torch.stack([weight * v, weight])                                                # (2, batch, K, D)
    up_to = (terms * growth).cumsum(2) / growth
    onwards = (terms / growth).flip(2).cumsum(2).flip(2) * growth
    before, after = F.pad(up_to[:, :, :-1], (0, 0, 1, 0)), F.pad(onwards[:, :, 1:], (0, 0, 0, 1))
    numerator, denominator = before + after + bonus.float().exp() * terms
    return numerator / denominator


def shift_tokens(x: Tensor, positions: Tensor, grid_size: int) -> Tensor:
    """Gives each token a quarter of the channels of its left, right, upper and lower neighbour (Vision-RWKV's Q-Shift).

    x is (batch, K, D) and positions (1 or batch, K) are places in the raster of grid_size². A neighbour
    that is routed or lies beyond the border gives zeros.
    """
    index = positions.unsqueeze(-1).expand_as(x)
    grid = x.new_zeros(x.shape[0], grid_size**2, x.shape[-1]).scatter(1, index, x).unflatten(1, (grid_size, -1))
    left, right, upper, lower = grid.chunk(4, dim=-1)
    shifted = torch.cat([
        F.pad(left[:, :, :-1], (0, 0, 1, 0)),
        F.pad(right[:, :, 1:], (0, 0, 0, 1)),
        F.pad(upper[:, :-1], (0, 0, 0, 0, 1, 0)),
        F.pad(lower[:, 1:], (0, 0, 0, 0, 0, 1)),
    ], dim=-1)
    return shifted.flatten(1, 2).gather(1, index)


class SpatialMix(nn.Module):
    """RWKV's mixer over tokens, in both directions as in Vision-RWKV (arXiv 2403.02308) and Diffusion-RWKV."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.mix = nn.Parameter(torch.full((3, hidden_size), 0.5))  # of a token with its neighbours: k, v, r
        self.decay = nn.Parameter(torch.linspace(-5, 3, hidden_size))
        self.bonus = nn.Parameter(torch.zeros(hidden_size))
        self.key, self.value, self.receptance, self.output = (
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4))

    def forward(self, x: Tensor, shifted: Tensor) -> Tensor:
        k, v, r = (layer(shifted + mix * (x - shifted))
                   for layer, mix in zip((self.key, self.value, self.receptance), self.mix, strict=True))
        return self.output(r.sigmoid() * wkv(k, v, self.decay, self.bonus))


class ChannelMix(nn.Module):
    """RWKV's mixer over channels: a two-layer MLP with squared ReLU, gated by the token itself."""

    def __init__(self, hidden_size: int, hidden_features: int):
        super().__init__()
        self.mix = nn.Parameter(torch.full((2, hidden_size), 0.5))  # of a token with its neighbours: k, r
        self.key = nn.Linear(hidden_size, hidden_features, bias=False)
        self.value = nn.Linear(hidden_features, hidden_size, bias=False)
        self.receptance = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, shifted: Tensor) -> Tensor:
        k, r = (layer(shifted + mix * (x - shifted))
                for layer, mix in zip((self.key, self.receptance), self.mix, strict=True))
        return r.sigmoid() * self.value(F.relu(k).square())
