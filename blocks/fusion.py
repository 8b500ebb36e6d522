"""How Sprint's tokens rejoin (arXiv 2510.21986): a linear layer fuses what went through a route and around it."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from routing_module import Route, Router, Selection


class FusingRouter(Router, nn.Module):
    """A router whose tokens rejoin through a linear layer, in dense passes too; its network has one route.

    All tokens bypass the route. Its output has the kept tokens, and a fixed random mask token in the other positions.
    The layer fuses the two values at each position.
    """

    mask_token: Tensor

    def __init__(self, hidden_size: int, selection: Selection = "random"):
        nn.Module.__init__(self)
        Router.__init__(self, selection)
        self.register_buffer("mask_token", 0.02 * torch.randn(hidden_size))
        self.fusion = nn.Linear(2 * hidden_size, hidden_size)

    def check(self, routes: tuple[Route, ...], grid_size: float) -> None:
        if len(routes) != 1:
            raise ValueError(f"fusion=true fuses one route with what bypasses it, but the network has "
                             f"{len(routes)} routes: give one in model.routes, or set model.fusion=false.")
        super().check(routes, grid_size)

    def active_routes(self, routes: tuple[Route, ...], trained: tuple[Route, ...]) -> dict[int, Route]:
        """Returns the network's only route with the call's settings; in a dense pass, with selection ratio 0.

        Raises ValueError for a route over other blocks.
        """
        if len({(route.start_layer_idx, route.end_layer_idx) for route in (*routes, *trained)}) > 1:
            raise ValueError(f"The network fuses after route {trained[0]}, so it cannot use other routes, such as "
                             f"{', '.join(map(str, routes))}: leave routes out.")
        return dict(enumerate(routes or (replace(trained[0], selection_ratio=0.0, path_drop=0.0),)))

    def end_route(
        self, x_kept: Tensor, ids_keep: Tensor, original_x: Tensor, dropped: Tensor | None = None,
    ) -> Tensor:
        """Fuses the route's tokens (B, K, D), with mask tokens in the other positions, and original_x (B, N, D)."""
        absent = self.mask_token.to(x_kept.dtype).expand_as(original_x)
        return self.fusion(torch.cat([super().end_route(x_kept, ids_keep, absent, dropped), original_x], dim=-1))
