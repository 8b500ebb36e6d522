"""Records the hidden states of a network's blocks by hooks from outside, with the positions of the kept tokens."""

from collections.abc import Iterable

from torch import Tensor, nn

from routing_module import Route


def early_block(depth: int) -> int:
    """Returns the block that REPA and internal guidance read: the eighth, or the one at a third of fewer blocks."""
    return max(0, min(8, depth // 3) - 1)


def take_hidden(net: nn.Module, blocks: Iterable[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """Records in each pass of a DiT what the given blocks return: tokens (B, K, D) and their positions (1 or B, K).

    Each pass fills the returned dictionary. Inside a route K counts the kept tokens, and positions are their places in
    raster order. Negative indices count from the last block; raises ValueError for blocks that the network does not
    have.
    """
    hidden: dict[int, tuple[Tensor, Tensor]] = {}
    for i in blocks:
        if not -len(net.blocks) <= i < len(net.blocks):
            raise ValueError(f"Block {i} is not in this network, which has {len(net.blocks)} blocks.")

        def take(block: nn.Module, arguments: tuple, output: Tensor, i: int = i) -> None:
            hidden[i] = output, arguments[2]

        net.blocks[i].register_forward_hook(take)
    return hidden


def route_at(routes: Iterable[Route], block: int) -> Route | None:
    """Returns the first of these resolved routes that a block lies on, or None."""
    return next((route for route in routes if route.start_layer_idx <= block <= route.end_layer_idx), None)
