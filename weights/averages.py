"""Averages of a run's weights: exponential ones, and EDM2's power-function ones, of any width after training.

At step t a power-function average weighs the weights of step τ by τ^γ, and its width `std` is the standard deviation of
that profile over t (arXiv 2312.02696). One of another width is close to a linear combination of those stored.
"""

import contextlib
import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import AfterValidator
from safetensors import safe_open

from runtime import files
from weights import checkpoint as checkpoints

WIDEST = 0.28  # of a profile that rises; that of γ = 0, which is flat, is 1/√12
NARROWEST = 1e-4  # of 400,000 steps the last 40


# ---- names ----------------------------------------------------------------------------------------------------------


def power_name(std: float) -> str:
    return f"ema-std{std:.2f}" if round(std, 2) == std else f"ema-std{std}"


def width_of(name: str) -> float | None:
    """Returns the width that the name of a power-function average tells; None for other names."""
    return float(name.removeprefix("ema-std")) if name.startswith("ema-std") else None


def known_weights(name: str) -> str:
    """Spells a name of weights as checkpoints do: model, ema, ema-0.999, ema-std0.10; raises ValueError for others."""
    is_name = re.fullmatch(r"model|ema|ema-(std)?[01]?\.\d+", name)
    std = width_of(name) if is_name else None
    if not is_name or std is not None and not NARROWEST <= std < WIDEST:
        raise ValueError(f"weights={name} is neither model, ema, ema-<decay>, as ema-0.999, nor ema-std<width>, as "
                         f"ema-std0.10, of a width, relative to the run's length, from {NARROWEST} to {WIDEST}.")
    if std is not None:
        return power_name(std)
    return f"ema-{float(name.removeprefix('ema-'))}" if "-" in name else name


def weights_or_key(name: str) -> str:
    """Spells a name of weights as `known_weights` does; another with _, . or a digit is a key of others' files."""
    is_key = re.search(r"[_.\d]", name) and not name.startswith("ema-")
    return name if is_key else known_weights(name)


WeightsName = Annotated[str, AfterValidator(known_weights)]
AnyWeights = Annotated[str, AfterValidator(weights_or_key)]  # of runs, or of files that others have made


def kinds(decay: float | list[float], std: Iterable[float] = (), **_: object) -> dict[str, tuple[str, float]]:
    """Names the averages of a run, by the settings `ema`, in order; the first one is `ema`."""
    first, *others = decay if isinstance(decay, list) else [decay]
    return {"ema": ("decay", first), **{f"ema-{value}": ("decay", value) for value in others},
            **{power_name(value): ("std", value) for value in std}}


def decays(step: int, decay: float | list[float], std: Iterable[float] = (), warmup: bool = False) -> dict[str, float]:
    """Returns by how much each average keeps of itself when it takes in the weights after `step` earlier steps."""
    most = (1 + step) / (10 + step) if warmup else 1.0
    return {name: (step / (step + 1)) ** (exponent(value) + 1) if kind == "std" else min(value, most)
            for name, (kind, value) in kinds(decay, std).items()}


# ---- power functions ------------------------------------------------------------------------------------------------


@functools.cache
def exponent(std: float) -> float:
    """Returns γ of a profile of this width: the largest root of (γ + 2)² · (γ + 3) · std² = γ + 1."""
    t = std**-2
    return float(np.polynomial.Polynomial([12 - t, 16 - t, 7, 1]).roots().real.max())


def overlap(one: tuple[int, float], other: tuple[int, float]) -> float:
    """Integrates the product of two profiles, each of a step t and a width: of (γ + 1) · τ^γ / t^(γ + 1) up to t."""
    (t, g), (u, h) = ((step, exponent(std)) for step, std in (one, other))
    both = min(t, u)
    return (g + 1) * (h + 1) / (g + h + 1) * (both / t) ** (g + 1) * (both / u) ** (h + 1) / both


def coefficients(stored: Sequence[tuple[int, float]], step: int, std: float) -> tuple[np.ndarray, float]:
    """Returns how much of each stored average, of (step, width), makes the one of `std` at `step`, and how well.

    They solve the least squares of the profiles and are then brought to the sum 1. How well: the distance of the two
    profiles over the length of the one sought.
    """
    wanted = (step, std)
    products = np.array([[overlap(one, other) for other in stored] for one in stored])
    target = np.array([overlap(one, wanted) for one in stored])
    found = np.linalg.solve(products, target)
    found /= found.sum()
    length = overlap(wanted, wanted)
    left = found @ products @ found - 2 * found @ target + length
    return found, float(max(left, 0) / length) ** 0.5


# ---- snapshots ------------------------------------------------------------------------------------------------------


def keep_snapshots(run: Path, every: int = 1) -> None:
    """Gives the power-function averages of a run's checkpoints second names in `<run>/averages`, which outlast pruning.

    Of planned checkpoints at multiples of `every`. Also deletes what killed calls left, so only the process that has
    locked the run may call it.
    """
    for left in (run / "averages").glob(".step-" + 8 * "[0-9]" + ".*.tmp"):  # but not what `reconstruct` is writing
        files.remove(left)
    for folder in checkpoints.all_steps(run):
        kept = run / "averages" / folder.name
        if kept.is_dir() or checkpoints.step_of(folder) % every or not checkpoints.is_planned(folder):
            continue
        with contextlib.suppress(OSError, ValueError):  # of a damaged checkpoint
            meta = checkpoints.check(folder, ())
            own = {name: record for name, record in meta["files"].items() if name.startswith("ema-std")}
            if own and checkpoints.check(folder, tuple(Path(name).stem for name in own)):
                with files.atomic_write(kept) as partial:
                    partial.mkdir()
                    for name in own:
                        files.link(folder / name, partial / name)
                    checkpoints.write_meta(partial, {"step": meta["step"], "files": own})


def delete_snapshots_after(run: Path, step: int) -> None:
    """Deletes snapshots past `step`, which the run repeats, and what was reconstructed of them."""
    for folder in (run / "averages").glob("step-*"):
        found = re.match(r"step-(\d{8,18})(-std|$)", folder.name)
        if found and int(found[1]) > step:
            files.remove(folder)


def reconstruct(folder: Path, meta: dict, std: float) -> Path:
    """Makes the average of a width at a checkpoint from what its run has stored up to it; returns its folder.

    It is made once, in `<run>/averages/step-…-std…`. Raises ValueError for a run that tracks no such average.
    """
    run, name = folder.parent.parent, power_name(std)
    out = files.inside(run, "averages", f"{folder.name}-{name.removeprefix('ema-')}")
    if out.is_dir() and checkpoints.problem(out) is None:
        return out
    sources = {}
    snapshots = sorted(filter(checkpoints.is_step, (run / "averages").glob("step-*")), key=checkpoints.step_of)
    for place in [*snapshots, folder]:  # the run may prune the checkpoint meanwhile, so its snapshot comes first
        if (step := checkpoints.step_of(place)) <= meta["step"]:
            with contextlib.suppress(ValueError):
                of_place = meta if place == folder else checkpoints.check(place)
                for one in sorted(Path(file).stem for file in of_place["files"]):
                    if width := width_of(one):
                        sources.setdefault((step, width), place / f"{one}.safetensors")
    if not sources:
        raise ValueError(f"{run} tracks none to make it of, as ema.std=[0.05,0.10] does, but "
                         f"{', '.join(sorted(meta['files']))}")
    shares, off = coefficients([*sources], meta["step"], std)
    with contextlib.ExitStack() as stack:
        try:
            opened = [stack.enter_context(safe_open(path, "pt")) for path in sources.values()]
        except FileNotFoundError:
            if snapshots and snapshots[-1].name != folder.name and (run / "averages" / folder.name).is_dir():
                return reconstruct(folder, meta, std)  # which was kept, and its checkpoint pruned, since the look above
            raise ValueError(f"its run has deleted {folder} meanwhile: take a newer one") from None
        state = {}
        for key in [*opened[0].keys()]:
            parts = (share * one.get_tensor(key).double() for share, one in zip(shares, opened, strict=True))
            state[key] = sum(parts).float()
    made_of = {"averages": len(sources), "distance": off}
    kept = {key: value for key, value in meta.items() if key not in ("files", "sha256")}
    checkpoints.save(out, {name: state}, {**kept, "reconstructed": made_of})
    print(f"{name} at step {meta['step']:,} is made of {len(sources)} stored averages, with an error of "
          f"{off:.2%} in its profile: {out}")
    return out
