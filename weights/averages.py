"""Averages of a run's weights: exponential ones, and EDM2's power-function ones, of any width after training.

At step t, a power-function average multiplies the weights of step τ by τ^γ. Its width `std` is the standard deviation
of that profile, divided by t (arXiv 2312.02696). Stored averages combine linearly to approximate one of another width.
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

WIDEST = 0.28  # for a profile that rises; the flat profile of γ = 0 has width 1/√12
NARROWEST = 1e-4  # about the last 40 of 400,000 steps


# ---- names ----------------------------------------------------------------------------------------------------------


def power_name(std: float) -> str:
    return f"ema-std{std:.2f}" if round(std, 2) == std else f"ema-std{std}"


def width_of(name: str) -> float | None:
    """Returns the width in the name of a power-function average; None for other names."""
    return float(name.removeprefix("ema-std")) if name.startswith("ema-std") else None


def known_weights(name: str) -> str:
    """Spells a name as checkpoints do (model, ema, ema-0.999, ema-std0.10); raises ValueError for other names."""
    is_name = re.fullmatch(r"model|ema|ema-(std)?[01]?\.\d+", name)
    std = width_of(name) if is_name else None
    if not is_name or std is not None and not NARROWEST <= std < WIDEST:
        raise ValueError(f"weights={name} is neither model, ema, ema-<decay> (such as ema-0.999) nor ema-std<width> "
                         f"(such as ema-std0.10). The width is a fraction of the run, from {NARROWEST} to {WIDEST}.")
    if std is not None:
        return power_name(std)
    return f"ema-{float(name.removeprefix('ema-'))}" if "-" in name else name


def weights_or_key(name: str) -> str:
    """Spells a name as `known_weights` does; another name with _, . or a digit is a key in other people's files."""
    is_key = re.search(r"[_.\d]", name) and not name.startswith("ema-")
    return name if is_key else known_weights(name)


WeightsName = Annotated[str, AfterValidator(known_weights)]
AnyWeights = Annotated[str, AfterValidator(weights_or_key)]  # in runs, or in other people's files


def kinds(decay: float | list[float], std: Iterable[float] = (), **_: object) -> dict[str, tuple[str, float]]:
    """Names a run's averages in order, from the settings in `ema`; the first one is called `ema`."""
    first, *others = decay if isinstance(decay, list) else [decay]
    return {"ema": ("decay", first), **{f"ema-{value}": ("decay", value) for value in others},
            **{power_name(value): ("std", value) for value in std}}


def decays(step: int, decay: float | list[float], std: Iterable[float] = (), warmup: bool = False) -> dict[str, float]:
    """Returns each average's decay in the update that comes after `step` earlier steps."""
    most = (1 + step) / (10 + step) if warmup else 1.0
    return {name: (step / (step + 1)) ** (exponent(value) + 1) if kind == "std" else min(value, most)
            for name, (kind, value) in kinds(decay, std).items()}


# ---- power functions ------------------------------------------------------------------------------------------------


@functools.cache
def exponent(std: float) -> float:
    """Returns the γ of the profile with this width: the largest root of (γ + 2)² · (γ + 3) · std² = γ + 1."""
    t = std**-2
    return float(np.polynomial.Polynomial([12 - t, 16 - t, 7, 1]).roots().real.max())


def overlap(one: tuple[int, float], other: tuple[int, float]) -> float:
    """Integrates the product of two profiles (γ + 1) · τ^γ / t^(γ + 1), τ ≤ t, each given by its step t and width."""
    (t, g), (u, h) = ((step, exponent(std)) for step, std in (one, other))
    both = min(t, u)
    return (g + 1) * (h + 1) / (g + h + 1) * (both / t) ** (g + 1) * (both / u) ** (h + 1) / both


def coefficients(stored: Sequence[tuple[int, float]], step: int, std: float) -> tuple[np.ndarray, float]:
    """Returns coefficients of the stored averages (step, width) that approximate the one of `std`, and the error.

    The coefficients are the least-squares solution for the profiles, scaled to the sum 1. The error is the distance
    between the two profiles, divided by the norm of the wanted one.
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
    """Links the power-function averages of a run's checkpoints into `<run>/averages`, where pruning leaves them.

    Only planned checkpoints at multiples of `every` are linked. Also deletes leftovers of killed calls, so only the
    process that has locked the run may call it.
    """
    for left in (run / "averages").glob(".step-" + 8 * "[0-9]" + ".*.tmp"):  # but not what `reconstruct` is writing
        files.remove(left)
    for folder in checkpoints.all_steps(run):
        kept = run / "averages" / folder.name
        if kept.is_dir() or checkpoints.step_of(folder) % every or not checkpoints.is_planned(folder):
            continue
        with contextlib.suppress(OSError, ValueError):  # raised for a damaged checkpoint
            meta = checkpoints.check(folder, ())
            own = {name: record for name, record in meta["files"].items() if name.startswith("ema-std")}
            if own and checkpoints.check(folder, tuple(Path(name).stem for name in own)):
                with files.atomic_write(kept) as partial:
                    partial.mkdir()
                    for name in own:
                        files.link(folder / name, partial / name)
                    checkpoints.write_meta(partial, {"step": meta["step"], "files": own})


def delete_snapshots_after(run: Path, step: int) -> None:
    """Deletes snapshots past `step`, because the run will repeat those steps, and averages reconstructed there."""
    for folder in (run / "averages").glob("step-*"):
        found = re.match(r"step-(\d{8,18})(-std|$)", folder.name)
        if found and int(found[1]) > step:
            files.remove(folder)


def reconstruct(folder: Path, meta: dict, std: float) -> Path:
    """Builds the average of width `std` at a checkpoint from those that its run stored up to it; returns its folder.

    It is built once, in `<run>/averages/step-…-std…`. Raises ValueError for a run without power-function averages.
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
                found = meta if place == folder else checkpoints.check(place)
                for one in sorted(Path(file).stem for file in found["files"]):
                    if width := width_of(one):
                        sources.setdefault((step, width), place / f"{one}.safetensors")
    if not sources:
        raise ValueError(f"{run} has no power-function averages to build it from, as with ema.std=[0.05,0.10], but "
                         f"{', '.join(sorted(meta['files']))}")
    shares, off = coefficients([*sources], meta["step"], std)
    with contextlib.ExitStack() as stack:
        try:
            opened = [stack.enter_context(safe_open(path, "pt")) for path in sources.values()]
        except FileNotFoundError:
            if snapshots and snapshots[-1].name != folder.name and (run / "averages" / folder.name).is_dir():
                return reconstruct(folder, meta, std)  # its snapshot was made and its checkpoint pruned meanwhile
            raise ValueError(f"its run has deleted {folder} meanwhile: take a newer one") from None
        state = {}
        for key in [*opened[0].keys()]:
            parts = (share * one.get_tensor(key).double() for share, one in zip(shares, opened, strict=True))
            state[key] = sum(parts).float()
    made_of = {"averages": len(sources), "distance": off}
    kept = {key: value for key, value in meta.items() if key not in ("files", "sha256")}
    checkpoints.save(out, {name: state}, {**kept, "reconstructed": made_of})
    print(f"{name} at step {meta['step']:,} is built from {len(sources)} stored averages, with an error of "
          f"{off:.2%} in its profile: {out}")
    return out
