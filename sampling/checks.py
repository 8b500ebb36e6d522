"""What a sampler accepts as its settings."""

import inspect
from collections.abc import Callable, Mapping

from edm import EDM
from rf import RF


def sampler_settings(diffusion: EDM | RF, chosen: Mapping[str, float | str | None]) -> dict[str, float | str]:
    """Completes a diffusion's sampler settings; None takes the diffusion's value, as for shift, or the sampler's.

    Raises ValueError for a setting or a solver that the sampler lacks, or noise levels in the wrong order.
    """
    def settings_of(sample: Callable) -> dict[str, float | str | None]:
        parameters = inspect.signature(sample).parameters
        return {name: getattr(diffusion, name, parameters[name].default) for name in parameters
                if name not in ("net", "noise", "y", "num_steps", "guidance", "randn_like")}

    defaults, sampler = settings_of(diffusion.sample), f"the sampler of {type(diffusion).__name__}"
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if "solver" not in defaults and chosen.get("solver") == "heun":     # its only one, by name
        del chosen["solver"]
    # A solver may be a method with settings of its own, sample_ancestral for instance.
    solver = getattr(diffusion, f"sample_{chosen.get('solver')}", None) if "solver" in defaults else None
    if solver is not None:
        defaults, sampler = {"solver": None, **settings_of(solver)}, f"{sampler} with solver={chosen['solver']}"
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
