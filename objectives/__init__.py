"""The training losses, one in each file: the diffusion's in diffusion.py, and those that wrap it or add a term.

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
    """Returns the class that `objectives/<name>.py` holds; raises ValueError if there is no such file."""
    names = sorted({module.name for module in pkgutil.iter_modules(__path__)} - {"diffusion", "hidden", "teachers"})
    if name not in names:
        raise ValueError(f"objective={name}: there is no objectives/{name}.py; choose one of {', '.join(names)}.")
    return getattr(importlib.import_module(f"objectives.{name}"), name.title().replace("_", ""))


def build_objective(
    net: nn.Module, diffusion: object, parts: Mapping[str, Mapping] | None = None, keep_masked: bool = False,
    array_shapes: Mapping[str, tuple[int, ...]] | None = None, schedule: RouteSchedule | None = None,
) -> Objective | DiffusionLoss:
    """Wraps the plain diffusion loss in `parts`, names of files here and their keywords, in their order.

    `array_shapes` has the shape of a row of each extra array, and `schedule` the routes of each step. Raises ValueError
    for an unknown name.
    """
    objective: Objective | DiffusionLoss = DiffusionLoss(net, diffusion, keep_masked, array_shapes, schedule)
    for name, keywords in (parts or {}).items():
        objective = class_of(name)(objective, **keywords)
    return objective
