"""The training losses: the diffusion's, and REPA's alignment beside it."""

from collections.abc import Mapping

from torch import nn

from objectives.alignment import Alignment
from objectives.diffusion import DiffusionLoss, own_state, trained_parameters
from routing_module import RouteSchedule

__all__ = ["Alignment", "DiffusionLoss", "build_objective", "own_state", "trained_parameters"]


def build_objective(
    net: nn.Module, diffusion: object, alignment: Mapping | None = None,
    array_shapes: Mapping[str, tuple[int, ...]] | None = None, schedule: RouteSchedule | None = None,
) -> DiffusionLoss:
    """Builds the loss, with an alignment of these settings if they are given.

    `array_shapes` has the shape of a row of each extra array. Raises ValueError if the teacher's tokens do not fit.
    """
    if alignment is None:
        return DiffusionLoss(net, diffusion, schedule)
    shape = (array_shapes or {}).get("teacher")
    if shape is None or shape[0] != net.pos_embed.shape[1]:
        raise ValueError(f"objective=alignment needs teacher-*.npy for {net.pos_embed.shape[1]} tokens, but the latents "
                         f"have {shape}: run scripts/prepare_latents.py with teacher=<name> patch_size={net.patch_size}.")
    return Alignment(net, diffusion, schedule, width=shape[1], **alignment)
