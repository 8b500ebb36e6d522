"""What is minimised, one file each: the diffusion's loss in diffusion.py, and what is put around it or added to it.

A file `objectives/<name>.py` holds a class of the same name in CamelCase, and `objective=<name>` or
`objective=[<name>,<another>]` trains with it: CONTRIBUTING.md, "Add a loss of your own", has one in 30 lines.
"""

import importlib
import pkgutil
from collections.abc import Mapping

from torch import nn

from objectives.diffusion import DiffusionLoss, Objective, own_state, trained_parameters
from routing_module import RouteSchedule

__all__ = ["DiffusionLoss", "Objective", "build_objective", "class_of", "own_state", "trained_parameters"]


def class_of(name: str) -> type[Objective]:
    """Returns the class that `objectives/<name>.py` holds; raises ValueError where there is no such file."""
    names = sorted({module.name for module in pkgutil.iter_modules(__path__)} - {"diffusion", "hidden", "teachers"})
    if name not in names:
        raise ValueError(f"objective={name}: there is no objectives/{name}.py; choose one of {', '.join(names)}.")
    return getattr(importlib.import_module(f"objectives.{name}"), name.title().replace("_", ""))


def build_objective(
    net: nn.Module, diffusion: object, parts: Mapping[str, Mapping] | None = None, keep_masked: bool = False,
    array_shapes: Mapping[str, tuple[int, ...]] | None = None, schedule: RouteSchedule | None = None,
) -> Objective | DiffusionLoss:
    """Puts `parts`, names of files here and their keywords, around the plain diffusion loss, in their order.

    `array_shapes` are those of a row of each extra array, and `schedule` gives the routes of a step. Raises ValueError
    for a name that is not there.
    """
    objective: Objective | DiffusionLoss = DiffusionLoss(net, diffusion, keep_masked, array_shapes, schedule)
    for name, keywords in (parts or {}).items():
        objective = class_of(name)(objective, **keywords)
    return objective
