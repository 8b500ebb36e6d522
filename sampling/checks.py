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
    solver = chosen.get("solver")
    if "solver" not in defaults and solver == "heun":       # its only one, by name
        del chosen["solver"]
    elif solver in extensions.names("solvers"):
        found, sampler = extensions.find("solvers", solver), f"solvers/{solver}.py"
        defaults = {"solver": None} | {name: one.default for name, one in extensions.keywords_of(found).items()}
        own = {name: value for name, value in chosen.items() if name in defaults and name != "solver"}
        read(settings_of(found), own, "sampler: ")
    elif "solver" in defaults and hasattr(diffusion, f"sample_{solver}"):   # a method with settings of its own
        defaults = {"solver": None, **all_settings(getattr(diffusion, f"sample_{solver}"))}
        sampler = f"{sampler} with solver={solver}"
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
