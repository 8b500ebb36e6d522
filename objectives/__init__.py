"""The training losses, one in each file: the diffusion's in diffusion.py, and those that add a term or replace it.

A file `objectives/<name>.py` declares one subclass of DiffusionLoss, and `objective.name=<name>` trains with it:
CONTRIBUTING.md, "Add a loss of your own", has one in 20 lines.
"""

from collections.abc import Mapping
from typing import Any

import extensions
from dit import DiT
from edm import EDM
from objectives.diffusion import DiffusionLoss, own_state, trained_parameters
from rf import RF
from routing_module import RouteSchedule

__all__ = ["DiffusionLoss", "build_objective", "class_of", "own_state", "trained_parameters"]


BASE, HELPERS = DiffusionLoss, {"diffusion", "teachers"}  # files that are no objective


def class_of(name: str | None) -> type[DiffusionLoss]:
    """Returns the class in `objectives/<name>.py`, or DiffusionLoss for None; raises ValueError for other names."""
    return DiffusionLoss if name is None else extensions.find("objectives", name)


def build_objective(
    net: DiT, diffusion: EDM | RF, settings: Mapping[str, Any] | None = None,
    array_shapes: Mapping[str, tuple[int, ...]] | None = None, schedule: RouteSchedule | None = None,
) -> DiffusionLoss:
    """Builds the objective that `settings` name, with its keywords; without a name it is the diffusion's loss.

    `array_shapes` has the shape of a row of each extra array, and `schedule` the routes of each step. Raises ValueError
    for an unknown name, and for an array that the objective needs and the latents lack.
    """
    keywords = dict(settings or {})
    name, arrays = keywords.pop("name", None), array_shapes or {}
    kind = class_of(name)
    if lacking := [array for array in kind.arrays if array not in arrays]:
        raise ValueError(f"objective={name} needs {lacking[0]}-*.npy beside the latents, which have "
                         f"{', '.join(arrays) or 'no extra array'}: scripts/prepare_latents.py teacher=python:… writes "
                         f"a teacher's tokens, and docs/data.md describes other arrays.")
    return kind(net, diffusion, arrays, schedule, **keywords)
