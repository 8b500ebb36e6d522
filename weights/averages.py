"""Names and decays of a run's exponential averages of its weights."""

import re
from typing import Annotated

from pydantic import AfterValidator


def weights_name(name: str) -> str:
    """Spells a name as checkpoints do (model, ema, ema-0.999); raises ValueError for other names."""
    if not re.fullmatch(r"model|ema|ema-(0?\.\d+|\d(\.\d+)?e-\d+)", name):
        raise ValueError(f"weights={name} is neither model, ema nor ema-<decay> (such as ema-0.999).")
    return f"ema-{float(name.removeprefix('ema-'))}" if "-" in name else name


WeightsName = Annotated[str, AfterValidator(weights_name)]


def names_of(decay: float | list[float]) -> dict[str, float]:
    """Names a run's averages in order, with their decays; the first one is called `ema`."""
    first, *others = decay if isinstance(decay, list) else [decay]
    return {"ema": first, **{f"ema-{value}": value for value in others}}


def decays(step: int, decay: float | list[float], warmup: bool = False) -> dict[str, float]:
    """Returns each average's decay in the update that comes after `step` earlier steps."""
    most = (1 + step) / (10 + step) if warmup else 1.0
    return {name: min(value, most) for name, value in names_of(decay).items()}
