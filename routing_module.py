"""Token routing of TREAD (arXiv 2501.04765): a random share of the tokens skips a span of blocks and then rejoins."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Route:
    """A road around blocks start_layer_idx..end_layer_idx, both inclusive, that a share of the tokens takes.

    Before block `start_layer_idx`, `selection_ratio` of the tokens leave; after block `end_layer_idx` they rejoin at
    their own positions with the value they left with. Indices may be negative and then count from the last block.
    """

    start_layer_idx: int
    end_layer_idx: int
    selection_ratio: float

    def __str__(self) -> str:
        return f"{self.start_layer_idx}→{self.end_layer_idx} at selection ratio {self.selection_ratio}"


def resolve_routes(routes: Iterable[Route], depth: int) -> tuple[Route, ...]:
    """Returns the routes in order of depth with non-negative indices, for a network of `depth` blocks.

    Raises ValueError, naming the route and the depth, for a route that leaves the network, runs backwards, overlaps
    another, or has a selection ratio outside [0, 1).
    """
    resolved = []
    for route in routes:
        if not all(isinstance(i, int) for i in (route.start_layer_idx, route.end_layer_idx)):
            raise ValueError(f"Route {route} in a network of {depth} blocks: block indices are whole numbers.")
        start, end = (i + depth if i < 0 else i for i in (route.start_layer_idx, route.end_layer_idx))
        if not (0 <= start < depth and 0 <= end < depth):
            raise ValueError(f"Route {route} leaves the network: with {depth} blocks an index lies in "
                             f"[{-depth}, {depth - 1}]. Set start_layer_idx and end_layer_idx of the route.")
        if start > end:
            raise ValueError(f"Route {route} runs backwards: in a network of {depth} blocks it starts at block "
                             f"{start} and ends at block {end}. The end may not come before the start.")
        if not 0 <= route.selection_ratio < 1:
            raise ValueError(f"Route {route} in a network of {depth} blocks: the selection ratio is the share of "
                             f"tokens that skips and must lie in [0, 1); at 1 no token would be left.")
        resolved.append(Route(start, end, route.selection_ratio))
    resolved.sort(key=lambda route: route.start_layer_idx)
    for first, second in zip(resolved, resolved[1:], strict=False):
        if second.start_layer_idx <= first.end_layer_idx:
            raise ValueError(f"Route {second} overlaps route {first} in a network of {depth} blocks: "
                             f"the next route may start at block {first.end_layer_idx + 1} at the earliest.")
    return tuple(resolved)


def routes_by_start(routes: tuple[Route, ...], depth: int) -> dict[int, tuple[int, Route]]:
    """Returns the routes that some token takes, each with its place in `routes`, by the block before which it leaves.

    Raises ValueError for a route that `resolve_routes` has not brought to a network of `depth` blocks.
    """
    for route in routes:
        if not 0 <= route.start_layer_idx <= route.end_layer_idx < depth:
            raise ValueError(f"Route {route} is not resolved for a network of {depth} blocks: pass "
                             f"resolve_routes([route], {depth}), or the network's own net.routes.")
    return {route.start_layer_idx: (r, route) for r, route in enumerate(routes) if route.selection_ratio > 0}


class Router:
    """Chooses the tokens that stay, takes them out, and puts them back. It has no parameters and no state."""

    def get_mask(self, x: Tensor, selection_ratio: float, noise: Tensor | None = None) -> Tensor:
        """Draws, for each sample anew, the tokens that stay: uniform and without replacement.

        x is (B, N, D); the result is ids_keep (B, K) int64 with K = N - int(N * selection_ratio), ascending, so that
        raster order survives. `noise` (B, N) float32, uniform in [0, 1), decides instead of a fresh draw: the tokens
        of its K lowest values stay, so of two ratios on the same noise the higher keeps a subset of the lower's.
        """
        batch, num_tokens, _ = x.shape
        num_keep = num_tokens - int(num_tokens * selection_ratio)
        # float32 whatever the activations are: bfloat16 has 256 levels in [0, 1), and ties would favour some tokens.
        if noise is None:
            noise = torch.rand(batch, num_tokens, device=x.device, dtype=torch.float32)
        return noise.argsort(dim=1)[:, :num_keep].sort(dim=1).values

    def start_route(self, x: Tensor, ids_keep: Tensor) -> Tensor:
        """Keeps the tokens that stay: (B, N, D) and ids (B, K) to (B, K, D)."""
        return x.gather(1, ids_keep.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    def end_route(self, x_kept: Tensor, ids_keep: Tensor, original_x: Tensor) -> Tensor:
        """Puts the kept tokens (B, K, D) back among those that skipped, which keep their value in original_x (B, N, D).

        The gradient of a token that skipped flows through this identity path to where the route began.
        """
        return original_x.scatter(1, ids_keep.unsqueeze(-1).expand(-1, -1, x_kept.shape[-1]), x_kept)
