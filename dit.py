"""DiT (Peebles & Xie, arXiv 2212.09748), the frame: embeddings, the routing loop, final layer and initialisation.

A plain, single-device module with static shapes around any block of blocks/; its state-dict keys are those of
facebookresearch/DiT, or of the code that the block comes from. Routing is an argument of the call: `net(x, t, y)` is
dense, `net(x, t, y, routes=net.routes)` is routed.
"""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from blocks import BLOCKS
from blocks.transformer import modulate
from routing_module import Route, Router, resolve_routes, stretches

Init = Literal["adaln_zero", "xavier"]


def sincos_1d(dim: int, positions: Tensor) -> Tensor:
    """Returns sines, then cosines, of positions (M,) at dim/2 geometric frequencies: (M, dim)."""
    omega = 10000.0 ** -(torch.arange(dim // 2, dtype=torch.float64, device=positions.device) / (dim / 2))
    angles = positions.double()[:, None] * omega
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def sincos_2d(dim: int, grid_size: int) -> Tensor:
    """Returns the fixed position embedding (1, grid_size², dim) on the CPU: half for the column, then for the row."""
    row, column = torch.meshgrid(*[torch.arange(grid_size, device="cpu")] * 2, indexing="ij")
    return torch.cat([sincos_1d(dim // 2, column.flatten()), sincos_1d(dim // 2, row.flatten())], dim=1).float()[None]


def timestep_frequencies(count: int, device: torch.device | str | None = None) -> Tensor:
    """Returns `count` geometric frequencies from 1 down, float32."""
    return torch.exp(-math.log(10000) / count * torch.arange(count, dtype=torch.float32, device=device))


class PatchEmbed(nn.Module):
    """Cuts a latent (B, C, h, w) into patches and embeds each as a token: (B, N, hidden_size)."""

    def __init__(self, input_size: int, patch_size: int, in_channels: int, hidden_size: int):
        super().__init__()
        self.num_patches = (input_size // patch_size) ** 2
        self.proj = nn.Conv2d(in_channels, hidden_size, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class TimestepEmbedder(nn.Module):
    """Embeds a noise level (B,) as (B, hidden_size): cosines and sines, then a two-layer MLP."""

    def __init__(self, hidden_size: int, frequency_embedding_size: int = 256):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(frequency_embedding_size, hidden_size),
            nn.SiLU(),
            nn.Linear(hidden_size, hidden_size),
        )
        self.frequency_embedding_size = frequency_embedding_size

    def forward(self, t: Tensor) -> Tensor:
        angles = t.float()[:, None] * timestep_frequencies(self.frequency_embedding_size // 2, t.device)
        embedding = torch.cat([angles.cos(), angles.sin()], dim=-1)
        first = cast(nn.Linear, self.mlp[0])    # torch's stubs say that a Sequential gives a Module
        return self.mlp(embedding.to(first.weight.dtype))


class LabelEmbedder(nn.Module):
    """Embeds a label (B,) int64 as (B, hidden_size); label `num_classes`, if there is one, is the null label."""

    def __init__(self, num_classes: int, hidden_size: int, null_label: bool = True):
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + null_label, hidden_size)

    def forward(self, y: Tensor) -> Tensor:
        return self.embedding_table(y)


class FinalLayer(nn.Module):
    """Turns each token into the pixels of its patch: (B, N, D) to (B, N, patch_size² · out_channels)."""

    def __init__(self, hidden_size: int, patch_size: int, out_channels: int, norm: nn.Module):
        super().__init__()
        self.norm_final = norm
        self.linear = nn.Linear(hidden_size, patch_size * patch_size * out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class DiT(nn.Module):
    """A diffusion transformer over square latents, whose tokens may take routes.

    input_size is the side of the latent and must be a multiple of patch_size. `routes` are the routes the network is
    meant to train with. They are checked and kept in `self.routes`, and each call says whether it uses them. `init`
    is "adaln_zero" (each block starts as the identity, as in DiT) or "xavier" (the modulation and output layers are not
    zeroed, which is what the official TREAD code does in effect). `block` is a name in blocks.BLOCKS, and qk_norm
    normalises the queries and keys of its attention. `router` chooses the tokens; the default chooses at random.
    Without a `null_label`, the table of labels has no row for guidance by the label. Raises ValueError for sizes that
    do not divide and for routes that do not fit (see `resolve_routes`).
    """

    pos_embed: Tensor       # (1, N, hidden_size)

    def __init__(
        self,
        input_size: int = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        num_classes: int = 1000,
        learn_sigma: bool = False,
        routes: Iterable[Route] = (),
        init: Init = "adaln_zero",
        block: str = "dit",
        qk_norm: bool = False,
        router: Router | None = None,
        null_label: bool = True,
    ):
        super().__init__()
        if input_size % patch_size:
            raise ValueError(f"The latent's side {input_size} is not a multiple of the patch size {patch_size}: "
                             f"set model.patch_size= to a divisor of it, or choose another resolution.")
        if hidden_size % num_heads or hidden_size % 4:
            raise ValueError(f"hidden_size {hidden_size} must be a multiple of num_heads {num_heads} and of 4 (sines "
                             f"and cosines of two axes): change model.hidden_size= or model.num_heads=.")
        if block not in BLOCKS:
            raise ValueError(f"block is {block!r}; it must be one of {', '.join(BLOCKS)}.")
        self.input_size, self.patch_size, self.in_channels = input_size, patch_size, in_channels
        self.out_channels = in_channels * 2 if learn_sigma else in_channels
        self.num_classes, self.null_label = num_classes, null_label
        self.routes = resolve_routes(routes, depth)
        self.router = router or Router()
        kind, grid_size = BLOCKS[block], input_size // patch_size
        self.router.check(self.routes, grid_size)

        self.x_embedder = PatchEmbed(input_size, patch_size, in_channels, hidden_size)
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.y_embedder = LabelEmbedder(num_classes, hidden_size, null_label)
        self.register_buffer("pos_embed", torch.empty(1, self.x_embedder.num_patches, hidden_size))
        self.blocks = nn.ModuleList(
            kind(hidden_size, num_heads, mlp_ratio, grid_size, qk_norm) for _ in range(depth))
        self.final_layer = FinalLayer(hidden_size, patch_size, self.out_channels, kind.final_norm(hidden_size))
        self.initialize_weights(init)

    def initialize_weights(self, init: Init) -> None:
        starts_as_identity = {"adaln_zero": True, "xavier": False}[init]
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
            if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # A patch embedding is a linear layer over the flattened patch, so it is initialised as one.
        nn.init.xavier_uniform_(self.x_embedder.proj.weight.flatten(1))
        self.pos_embed.copy_(sincos_2d(self.pos_embed.shape[-1], self.input_size // self.patch_size))
        nn.init.normal_(self.y_embedder.embedding_table.weight, std=0.02)
        for name, weight in self.t_embedder.named_parameters():
            if name.endswith("weight"):
                nn.init.normal_(weight, std=0.02)
        if starts_as_identity:
            gates = [module[-1] for name, module in self.named_modules() if name.endswith("adaLN_modulation")]
            for layer in (*gates, self.final_layer.linear):
                nn.init.zeros_(layer.weight)

    def unpatchify(self, x: Tensor) -> Tensor:
        """Lays the tokens' patches out as an image: (B, N, p² · C) to (B, C, h, w)."""
        p, side = self.patch_size, self.input_size // self.patch_size
        x = x.unflatten(1, (side, side)).unflatten(-1, (p, p, self.out_channels))
        return torch.einsum("bhwpqc->bchpwq", x).reshape(x.shape[0], self.out_channels, side * p, side * p)

    def through(self, blocks: range, x: Tensor, c: Tensor, positions: Tensor) -> Tensor:
        """Passes tokens (B, K, D) at positions (1 or B, K) through a stretch of blocks."""
        for i in blocks:
            x = self.blocks[i](x, c, positions)
        return x

    def forward(
        self, x: Tensor, t: Tensor, y: Tensor, routes: tuple[Route, ...] = (), mask_noise: Tensor | None = None,
    ) -> Tensor:
        """Predicts (B, out_channels, h, w) from a noised latent x (B, C, h, w), noise level t (B,) and label y (B,).

        `routes` are resolved routes, as in `self.routes`. Without them every token passes through every block. The
        routed tokens are sampled here, or decided by mask_noise (B, len(routes), N) (see `Router.get_mask`).
        """
        # In this order the sum has pos_embed's contiguous layout, so block 0 gets the same strides as other blocks.
        x = self.pos_embed + self.x_embedder(x)                                                   # (B, N, D)
        c = self.t_embedder(t) + self.y_embedder(y)                                               # (B, D)
        raster = torch.arange(x.shape[1], device=x.device).unsqueeze(0)                           # (1, N)
        before = {}                                      # the first block of a stretch -> the tokens before it
        for blocks, r, route in stretches(self.router.active_routes(routes, self.routes), len(self.blocks)):
            before[blocks.start] = x
            if route is None:
                x = self.through(blocks, x, c, raster)                                            # (B, N, D)
            else:
                ids_keep = (self.router.get_mask(x, route.selection_ratio) if mask_noise is None else
                            self.router.get_mask(x, route.selection_ratio, mask_noise[:, r]))     # (B, K)
                x = self.router.start_route(x, ids_keep)                                          # (B, K, D)
                x = self.through(blocks, x, c, ids_keep)
                dropped = route.draw_dropped(len(x), x.device)
                x = self.router.end_route(x, ids_keep, route.returning(before), *dropped)         # (B, N, D)
        return self.unpatchify(self.final_layer(x, c))                                    # (B, out_channels, h, w)


DiT_models = {
    name: partial(DiT, block=block, **size) for block, kind in BLOCKS.items() for name, size in kind.models.items()
}


def multiply_adds(net: DiT, routes: tuple[Route, ...] = ()) -> tuple[int, int]:
    """Counts the multiply-adds of one forward pass of one sample: those of the linear layers, and those of attention.

    The patch embedding and Mamba's convolution count as linear, and Mamba's scan in its plain form as attention.
    Cumulative sums, as in RWKV, and elementwise operations do not count. torch's FLOP counter needs only shapes, and
    counts two FLOPs for each multiply-add.
    """
    x = torch.empty(1, net.in_channels, net.input_size, net.input_size, device="meta")
    t, y = torch.empty(1, device="meta"), torch.empty(1, dtype=torch.int64, device="meta")
    weights = {name: value.to("meta") for name, value in net.state_dict().items()}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        torch.func.functional_call(net, weights, (x, t, y), {"routes": routes})
    linear = {torch.ops.aten.addmm, torch.ops.aten.mm, torch.ops.aten.convolution}
    flops = counter.get_flop_counts()["Global"]
    of_linear = sum(count for op, count in flops.items() if op in linear)
    return of_linear // 2, (sum(flops.values()) - of_linear) // 2


def depth_of(state_dict: Mapping[str, Tensor], blocks: str) -> int:
    """Counts the blocks in a state dict, `<blocks>.<i>.…`; raises ValueError if some numbers are missing."""
    numbers = {int(key.split(".")[1]) for key in state_dict if key.startswith(f"{blocks}.")}
    if numbers != {*range(len(numbers))} or not numbers:
        raise ValueError(f"its {blocks} are not numbered 0, 1, 2 …")
    return len(numbers)


def infer_architecture(
    state_dict: Mapping[str, Tensor], num_heads: int | None = None, num_classes: int | None = None,
) -> dict[str, Any]:
    """Infers a DiT's constructor arguments from the shapes of its weights, for files without a config.

    The number of heads cannot be inferred from the shapes; the default is that of the published size with this width
    and depth, or None. The last label is the null label, unless `num_classes` or a table of one row shows that there is
    none. Raises ValueError if the weights are not a DiT's.
    """
    block = next((name for name, kind in BLOCKS.items() if f"blocks.0.{kind.mark}" in state_dict), "dit")
    try:
        hidden_size, in_channels, patch_size, _ = state_dict["x_embedder.proj.weight"].shape
        num_tokens = state_dict["pos_embed"].shape[1]
        num_labels = state_dict["y_embedder.embedding_table.weight"].shape[0]
        out_channels = state_dict["final_layer.linear.weight"].shape[0] // patch_size**2
        depth = depth_of(state_dict, "blocks")
    except (ValueError, LookupError, ZeroDivisionError) as error:
        names = ", ".join(list(state_dict)[:3])[:200]
        raise ValueError(f"These weights are not a DiT's: {error!r} in {len(state_dict)} tensors, {names} first."
                         ) from None
    null_label = {} if num_labels > 1 and num_labels != num_classes else {"null_label": False}
    heads = {(size["hidden_size"], size["depth"]): size["num_heads"] for size in BLOCKS[block].models.values()}
    return dict(
        input_size=math.isqrt(num_tokens) * patch_size, patch_size=patch_size, in_channels=in_channels,
        hidden_size=hidden_size, depth=depth, num_heads=num_heads or heads.get((hidden_size, depth)),
        num_classes=num_labels if null_label else num_labels - 1, learn_sigma=out_channels == 2 * in_channels,
        block=block, qk_norm="blocks.0.attn.q_norm.weight" in state_dict, **null_label,
    )
