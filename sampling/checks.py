"""A diffusion's solver, and what it accepts as its settings."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

import extensions
from edm import EDM
from rf import RF
from runtime.schema import read
from weights.records import settings_of


def sampler_of(diffusion: EDM | RF, solver: str | None = None, **settings: float | str) -> Callable[..., Tensor]:
    """Returns `diffusion.sample` or the function in solvers/<solver>.py, with its settings."""
    if solver in extensions.names("solvers"):
        return partial(extensions.find("solvers", solver), diffusion, **settings)
    return partial(diffusion.sample, **settings, **({"solver": solver} if solver else {}))


def sampler_settings(diffusion: EDM | RF, chosen: Mapping[str, float | str | None]) -> dict[str, float | str]:
    """Completes a diffusion's sampler settings; None takes the diffusion's value, as for shift, or the sampler's.

    Raises ValueError for a setting or a solver that the sampler lacks, or noise levels in the wrong order.
    """
    def all_settings(sample: Callable) -> dict[str, float | str | None]:
        parameters = inspect.signature(sample).parameters
        return {name: getattr(diffusion, name, parameters[name].default) for name in parameters
                if name not in ("net", "noise", "y", "num_steps", "guidance", "randn_like")}

    defaults, sampler = all_settings(diffusion.sample), f"the sampler of {type(diffusion).__name__}"
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if "solver" not in defaults and chosen.get("solver") == "heun":     # its only one, by name
        del chosen["solver"]
    # A solver may be a method with settings of its own, sample_ancestral for instance.
    solver = getattr(diffusion, f"sample_{chosen.get('solver')}", None) if "solver" in defaults else None
    if chosen.get("solver") in extensions.names("solvers"):
        found = extensions.find("solvers", chosen["solver"])
        defaults = {"solver": None} | {name: one.default for name, one in extensions.keywords_of(found).items()}
        sampler = f"solvers/{chosen['solver']}.py"
        own = {name: value for name, value in chosen.items() if name in defaults and name != "solver"}
        read(settings_of(found), own, "sampler: ")
    elif solver is not None:
        defaults, sampler = {"solver": None, **all_settings(solver)}, f"{sampler} with solver={chosen['solver']}"
    for name, value in chosen.items():
        if name not in defaults:
            raise ValueError(f"sampler.{name}={value}: {sampler} has no such setting; it has {', '.join(defaults)}.")
    changed = {name: value for name, value in chosen.items() if value != defaults[name]}  # so 80.0 is recorded as 80
    settings = {name: value for name, value in (defaults | changed).items() if value is not None}
    for low, high in (("sigma_min", "sigma_max"), ("S_min", "S_max")):
        if low in settings and settings[low] >= settings[high]:
            raise ValueError(f"sampler.{low}={settings[low]} is not below sampler.{high}={settings[high]}.")
    churn = [f"sampler.{name}={chosen[name]}" for name in ("S_min", "S_max", "S_noise") if name in chosen]
    if churn and "S_churn" not in chosen:
        raise ValueError(f"{' '.join(churn)} would change nothing without churn: also set sampler.S_churn=40.")
    return settings
