"""Compares a study's runs: which scores lower, by how much, and where they cross; as tables and figures.

Everything is computed from study.json, so scores from other machines are treated the same. Lower is better.
"""

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import numpy as np
from cycler import cycler
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter
from pydantic import AfterValidator, Field
from scipy import stats

from runtime.schema import Count, NonNegativeInt, Positive, Record, Text, read
from scripts.presentation import save_figure, table

AXES = {"images": "images seen", "seconds": "seconds of training, timed in turns", "flops": "training FLOPs"}
Scores = dict[int, dict[int, dict]]  # of one variant: by images seen, then by seed
ENOUGH = 3  # seeds for a verdict
LINES = cycler(linestyle=["-", "--"]) * cycler(color=colormaps["tab10"].colors)


def metrics_of(runs: list[dict], *variants: str) -> list[str]:
    """Lists the metrics of variants' scores, the one of most scores first."""
    found = Counter(score["metric"] for run in runs if run["variant"] in variants for score in run["scores"])
    return [metric for metric, _ in found.most_common()]


def unguided(runs: list[dict], *variants: str, metric: str | None = None) -> list[Scores]:
    """Returns the unguided scores of each variant by one metric, in the order of training.

    The default metric is the most frequent one. Only scores of the most frequent number of images are returned, as a
    distance depends on it.
    """
    metric = metric or next(iter(metrics_of(runs, *variants)), None)
    found = [(run, score) for run in runs if run["variant"] in variants for score in run["scores"]
             if score["guidance"] == "unguided" and score["metric"] == metric]
    usual = Counter(score["num_samples"] for _, score in found).most_common(1)
    at: dict[str, Scores] = {variant: defaultdict(dict) for variant in variants}
    for run, score in found:
        if score["num_samples"] == usual[0][0]:
            at[run["variant"]][score["images"]][run["seed"]] = score
    return [dict(sorted(at[variant].items())) for variant in variants]


def measure_in_words(*sides: Scores) -> str:
    """Returns the metric and the number of images of scores of `unguided`, as text; "" without scores."""
    scores = (score for at in sides for by_seed in at.values() for score in by_seed.values())
    return next((f"{score['metric']} of {score['num_samples']:,} images" for score in scores), "")


def deviation(values: list[float]) -> float | None:
    """Returns the standard deviation over seeds (of n − 1), None where there is one seed."""
    return statistics.stdev(values) if len(values) > 1 else None


def paired(pairs: Iterable[tuple[float, float]]) -> dict:
    """Compares two variants' scores, a pair for each seed and lower being better, by the differences within the pairs.

    Runs with the same seed see the same images, noise and labels, so an effect of the seed on both cancels. With at
    least three seeds `interval` is the two-sided 95 % t interval of the mean difference, else None.
    """
    differences = [other - one for one, other in pairs]
    n, mean, interval = len(differences), statistics.mean(differences) if differences else None, None
    if n >= ENOUGH:
        half = float(stats.t.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
        interval = [mean - half, mean + half]
    return {"difference": mean, "interval": interval, "n": n,
            "seeds_lower": [sum(d > 0 for d in differences), sum(d < 0 for d in differences)]}  # first's, second's


def winner(first: str, second: str, found: dict) -> str | None:
    """Returns the variant that scores lower if the interval excludes 0; None otherwise, and without an interval."""
    low, high = found["interval"] or (0, 0)
    return second if high < 0 else first if low > 0 else None


def shared_seeds(sides: list[Scores]) -> set[int]:
    """Returns the seeds that all variants have where the shortest curve ends: only their curves are comparable."""
    if not all(sides):
        return set()
    end = min(max(at) for at in sides)
    return set.intersection(*(set(at[max(images for images in at if images <= end)]) for at in sides))


def curve(at: Scores, axis: str, seeds: set[int]) -> list[tuple[float, float, float | None]]:
    """Returns (place on the axis, mean, deviation or None) of each place at which all of these seeds were scored."""
    points = []
    for by_seed in at.values():
        if seeds and seeds <= by_seed.keys() and (place := by_seed[min(seeds)][axis]):
            values = [by_seed[seed]["value"] for seed in seeds]
            points.append((place, statistics.mean(values), deviation(values)))
    return points


def compared(
    runs: list[dict], first: str, second: str, axis: str, metric: str | None = None,
) -> list[tuple[float, dict[int, tuple[float, float]]]]:
    """Lists (place, values of both variants by seed) for each place on `axis` that one was scored at and both reached.

    Only seeds of both variants count. Between two scores of a seed, values are interpolated on a log scale, on which
    learning curves are nearly straight. On a linear scale they would lie above the curve, to the advantage of the
    variant with more scores. The untrained network is left out.
    """
    sides = []
    for at in unguided(runs, first, second, metric=metric):
        line = defaultdict(dict)  # by seed: places and values
        for by_seed in at.values():
            for seed, score in by_seed.items():
                if score[axis]:
                    line[seed][score[axis]] = score["value"]
        sides.append(line)
    seeds = sorted(sides[0].keys() & sides[1].keys())
    rows = []
    for place in sorted({place for line in sides for seed in seeds for place in line[seed]}):
        there = [seed for seed in seeds if all(min(line[seed]) <= place <= max(line[seed]) for line in sides)]
        if there:
            rows.append((place, {seed: tuple(on_line(line[seed], place) for line in sides) for seed in there}))
    return rows


def on_line(values: dict[float, float], place: float) -> float:
    return float(np.interp(math.log(place), [math.log(known) for known in values], list(values.values())))


def crossing(runs: list[dict], first: str, second: str, axis: str, metric: str | None = None) -> dict:
    """Finds where the mean scores of two variants cross for the last time, interpolated on a log scale of the axis.

    Beyond that place the variant that is lower at the end is lower throughout. Only seeds that both have at the end
    count, as a seed that ends early would move the means. `at` is None unless by `winner` one variant is lower at some
    place and the other at the end. So one or two seeds show no crossing.
    """
    rows = compared(runs, first, second, axis, metric)
    last = rows[-1][1] if rows else {}
    places = [(place, paired(values[seed] for seed in last)) for place, values in rows if last.keys() <= values.keys()]
    end = places[-1][1] if places else paired(())
    better, at = winner(first, second, end), None
    if better and any(winner(first, second, found) not in (None, better) for _, found in places):
        sign = 0  # of the last gap that was one: lines that only touch do not cross
        for (place, found), (next_place, next_found) in itertools.pairwise(places):
            gap, next_gap = found["difference"], next_found["difference"]
            sign = np.sign(gap) or sign
            if sign * next_gap < 0:
                at = place * (next_place / place) ** (gap / (gap - next_gap))
    return {"between": [first, second], "axis": axis, "metric": metric, "at": at, "better_at_the_end": better,
            "verdict": in_words(first, second, end) if end["n"] else None, **end}


# ---- study.json -----------------------------------------------------------------------------------------------------


class RecordedScore(Record):
    metric: str
    value: float
    num_samples: Count
    guidance: str
    step: NonNegativeInt
    images: NonNegativeInt
    seconds: float | None = None
    flops: float | None = None


class RecordedRun(Record):
    variant: str
    seed: NonNegativeInt
    step: NonNegativeInt
    steps: NonNegativeInt | None = None
    scores: list[RecordedScore]


class Crossing(Record):
    between: Annotated[list[str], Field(min_length=2, max_length=2)]


class Timing(Record):
    """timing.json: seconds of a step of each variant, timed in turns on one machine."""

    device: str
    commit: str | None
    torch: str
    steps: Count | None = None              # of a turn
    rounds: dict[str, list[Positive]]

    def seconds(self, variant: str) -> float | None:
        return statistics.median(self.rounds[variant]) if self.rounds.get(variant) else None


def rows_of(declared: type[Record]) -> type:
    """Declares rows that are checked and stay as they are, with what another version has written."""
    return Annotated[list[dict], AfterValidator(lambda rows: [read(declared, row) and row for row in rows])]


class RecordedStudy(Record):
    """What study.json must hold for its runs to be shown and continued."""

    name: Text
    runs: rows_of(RecordedRun)
    crossings: rows_of(Crossing) = []
    timing: Timing | None = None
    floor: list[dict] = []


# ---- tables and figures ----------------------------------------------------------------------------------------------


def mean_of(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.3f} (n=1)"
    return f"{statistics.mean(values):.3f} ± {deviation(values):.3f} (n={len(values)})" if values else ""


def with_variety(scores: Iterable[dict]) -> str:
    """Writes the mean distance and, where they were measured, mean precision and recall."""
    scores = list(scores)
    text = mean_of([score["value"] for score in scores])
    for name, letter in (("precision", "P"), ("recall", "R")):
        if scores and all(score.get(name) is not None for score in scores):
            text += f" {letter} {statistics.mean(score[name] for score in scores):.3f}"
    return text


def point_label(place: float, axis: str) -> str:
    return f"{place:.3g}" if axis == "flops" else f"{place:,.0f}"


def in_words(first: str, second: str, found: dict) -> str:
    """States which variant is lower, with interval and seeds; with one or two seeds only in how many of them."""
    n = found["n"]
    if found["interval"]:
        low, high = found["interval"]
        return f"{winner(first, second, found) or 'none'} ({low:+.3f} to {high:+.3f}, n={n})"
    count, name = max(zip(found["seeds_lower"], (first, second), strict=True), key=lambda side: side[0])
    return f"{name} in {count} of {n} seed{'s' * (n > 1)}, no verdict"


def tables(result: dict) -> str:
    """Writes the study as Markdown: scores over steps, differences, guided scores and their cost, crossings."""
    lines = [f"# {result['name']}", ""]
    for run in result["runs"]:
        if run["step"] < (run["steps"] or math.inf):
            lines.append(f"* {run['variant']}, seed {run['seed']}: not finished, {run['step']} of "
                         f"{run['steps'] or '?'} steps.")
    if mixed := measured_differently(result):
        lines.append(f"* These comparisons mix references, or weights of an extractor. {'; '.join(mixed)}.")
    lines += ["", "Mean ± standard deviation over seeds (of n − 1), n seeds; lower is better. Verdicts, with the 95 % "
              "t interval on the mean difference, and equal seconds and FLOPs: docs/training.md, Comparing variants. A "
              "crossing is shown where one is lower and the other one at the end.",
              *scores_over_steps(result), *held_out_losses(result), *differences(result), *guided_scores(result)]
    lines += ["", "## Crossings", ""]
    for found in result["crossings"]:
        (first, second), axis = found["between"], found["axis"]
        place = "none shown" if found["at"] is None else f"the last at {point_label(found['at'], axis)}"
        lines.append(f"* {second} and {first} over {AXES[axis]}, {found['metric']}: {place}; lower at the end: "
                     f"{found['verdict']}.")
    if timing := result["timing"]:
        lines += ["", f"Seconds of a step were timed in turns on one machine, {timing['device']}, torch "
                      f"{timing['torch']}, commit {timing['commit']}.", *ratios(result)]
    return "\n".join(lines) + "\n"


def measured_differently(result: dict) -> list[str]:
    """Lists, by metric, the compared variants whose scores of one seed have several references or extractors."""
    mixed = defaultdict(dict)
    for *pair, metric in ((*found["between"], found["metric"]) for found in result["crossings"] if "metric" in found):
        measured = defaultdict(set)
        for by_seed in (by_seed for at in unguided(result["runs"], *pair, metric=metric) for by_seed in at.values()):
            for seed, score in by_seed.items():
                measured[seed].add((score.get("extractor_sha256"), score.get("reference_sha256")))
        if any(len(each) > 1 for each in measured.values()):
            mixed[metric][" and ".join(pair)] = None
    return [f"{metric}: {', '.join(pairs)}" for metric, pairs in mixed.items()]


def ratios(result: dict) -> list[str]:
    """Lists the seconds of two compared variants and their ratio, turn by turn."""
    lines, rounds = [], result["timing"]["rounds"]
    for first, second in dict.fromkeys(tuple(found["between"]) for found in result["crossings"]):
        if pairs := list(zip(rounds.get(first, ()), rounds.get(second, ()), strict=False)):
            ratios = ", ".join(f"{one:.3g} / {other:.3g} = {one / other:.2f}" for one, other in pairs)
            median = statistics.median(one / other for one, other in pairs)
            lines.append(f"* {first} over {second}, turn by turn: {ratios}; median {median:.2f}.")
    return ["", *lines] if lines else []


def measured_by(result: dict) -> dict[tuple[str, int], dict[tuple[str, int, str], dict[int, dict]]]:
    """Groups all scores by metric and number of images, then by (variant, step, guidance), then by seed."""
    variants = list(dict.fromkeys(run["variant"] for run in result["runs"]))
    groups: dict = defaultdict(lambda: defaultdict(dict))
    for run in result["runs"]:
        for score in run["scores"]:
            by_place = groups[score["metric"], score["num_samples"]]
            by_place[run["variant"], score["step"], score["guidance"]][run["seed"]] = score
    return {measure: dict(sorted(by_place.items(), key=lambda item: (variants.index(item[0][0]), item[0][1])))
            for measure, by_place in sorted(groups.items())}


def section(title: str, columns: list[str], rows: list[list]) -> list[str]:
    """Returns a heading and its table; nothing where there are no rows."""
    return ["", f"## {title}", "", table(columns, rows), ""] if rows else []


def scores_over_steps(result: dict) -> list[str]:
    lines = []
    for (metric, num_samples), by_place in measured_by(result).items():
        steps = sorted({step for _, step, guidance in by_place if guidance == "unguided"})
        rows = [[variant, *(with_variety(by_place.get((variant, step, "unguided"), {}).values()) for step in steps)]
                for variant in dict.fromkeys(variant for variant, *_ in by_place)]
        lines += section(f"{metric} of {num_samples:,} images, unguided",
                         ["variant", *(f"step {step:,}" for step in steps)], rows if steps else [])
    if result["floor"]:
        lines += ["", "## Real images, the floor", ""]
    return lines + [
        f"* {floor['metric']} of {floor['num_samples']:,} images of {floor['images']}: {with_variety([floor])}."
        for floor in result["floor"]]


def held_out_losses(result: dict) -> list[str]:
    """Tabulates mean losses over seeds at fixed noise levels, of training images and of others."""
    at: dict = defaultdict(list)
    for run in result["runs"]:
        for row in run.get("held_out", ()):
            for folder, by_level in row["losses"].items():
                at[run["variant"], row["step"], folder].append(by_level)
    levels = list(dict.fromkeys(level for found in at.values() for by_level in found for level in by_level))
    rows = []
    for (variant, step, folder), found in sorted(at.items()):
        means = [f"{statistics.mean(by_level[level] for by_level in found):.4f}" for level in levels]
        rows.append([variant, f"{step:,}", folder, *means, len(found)])
    return section("Dense loss at fixed noise levels, the same noise for all",
                   ["variant", "step", "images of", *levels, "n"], rows)


def differences(result: dict) -> list[str]:
    lines = []
    for crossed in result["crossings"]:
        (first, second), axis = crossed["between"], crossed["axis"]
        rows = []
        for place, by_seed in compared(result["runs"], first, second, axis, crossed["metric"]):
            found = paired(by_seed.values())
            rows.append([point_label(place, axis), *map(mean_of, map(list, zip(*by_seed.values(), strict=True))),
                         f"{found['difference']:+.3f}", in_words(first, second, found)])
        measure = measure_in_words(*unguided(result["runs"], first, second, metric=crossed["metric"]))
        lines += section(f"{second} against {first}, at equal {AXES[axis]}: {measure}",
                         [AXES[axis], first, second, "difference", "lower"], rows)
    return lines


def guided_scores(result: dict) -> list[str]:
    """Tabulates guided scores, their difference from unguided ones of the same weights and images, and their cost."""
    lines = []
    for (metric, num_samples), by_place in measured_by(result).items():
        rows = []
        for (variant, step, guidance), by_seed in by_place.items():
            if guidance == "unguided":
                continue
            plain = by_place.get((variant, step, "unguided"), {})
            seeds, change, cost = sorted(by_seed.keys() & plain.keys()), "", ""
            if seeds:
                found = paired((plain[seed]["value"], by_seed[seed]["value"]) for seed in seeds)
                change = f"{found['difference']:+.3f}, lower: {in_words('unguided', 'guided', found)}"
                passes, own = (side[seeds[0]].get("multiply_adds_an_image") for side in (by_seed, plain))
                cost = f"{passes / own:.2f}" if passes and own else ""
            rows.append([variant, f"{step:,}", guidance, with_variety(by_seed.values()), change, cost])
        lines += section(f"{metric} of {num_samples:,} images, guided",
                         ["variant", "step", "guidance", metric, "against unguided", "cost over unguided"], rows)
    return lines


def draw_figures(result: dict, out: Path) -> list[Path]:
    """Draws score against images, seconds and FLOPs: a panel per comparison, or one of all variants without any.

    A panel has a line per variant, all of the same seeds, with a band of ± one deviation.
    """
    drawn, runs = [], result["runs"]
    groups = dict.fromkeys(tuple(found["between"]) for found in result["crossings"])
    groups = list(groups) or [tuple(dict.fromkeys(run["variant"] for run in runs))]
    for axis, label in AXES.items():
        path, panels = out / f"score-over-{axis}.png", []
        for names in groups:
            sides = unguided(runs, *names)
            seeds = shared_seeds(sides)
            curves = {name: curve(at, axis, seeds) for name, at in zip(names, sides, strict=True)}
            if all(curves.values()):  # seconds may be known of one alone
                panels.append((f"{measure_in_words(*sides)}, n={len(seeds)}", curves))
        if not panels:
            path.unlink(missing_ok=True)  # of an earlier report
            continue
        columns = min(len(panels), 3)
        rows = math.ceil(len(panels) / columns)
        size = (7, 4.5) if len(panels) == 1 else (4.2 * columns, 3.2 * rows)
        figure = Figure(figsize=size, layout="constrained", dpi=110)
        figure.suptitle(f"{result['name']}: mean over n seeds ± standard deviation")
        figure.supxlabel(label)
        figure.supylabel("distance, lower is better")
        for place, (measure, curves) in enumerate(panels, 1):
            plot = figure.add_subplot(rows, columns, place)
            plot.set_prop_cycle(LINES)
            for variant, points in curves.items():
                x, mean, deviation = np.array(points, float).T  # without a deviation NaN, and no band
                [line] = plot.plot(x, mean, marker="o", label=variant)
                plot.fill_between(x, mean - deviation, mean + deviation, color=line.get_color(), alpha=0.2)
            plot.set(xscale="log")
            plot.set_title(measure, fontsize="small")
            plot.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 6)))
            plot.xaxis.set(major_formatter=EngFormatter(sep=""), minor_formatter=NullFormatter())
            plot.legend(fontsize="small")
        save_figure(figure, path)
        drawn.append(path)
    return drawn


def draw_differences(result: dict, path: Path) -> list[Path]:
    """Draws the difference of each comparison, with its interval if it has one: a panel per axis, a row per place.

    A single comparison is drawn as a curve instead.
    """
    pairs = dict.fromkeys(tuple(found["between"]) for found in result["crossings"])
    panels = {}
    for axis in AXES:
        rows = [(pair, place, paired(by_seed.values())) for pair in pairs
                for place, by_seed in compared(result["runs"], *pair, axis)]
        panels |= {axis: rows} if rows else {}
    if not panels:
        path.unlink(missing_ok=True)  # of an earlier report
        return []
    shown, height = {pair for rows in panels.values() for pair, *_ in rows}, max(map(len, panels.values()))
    is_curve = len(shown) == 1
    figure = Figure(figsize=(4.8 * len(panels), 3.2 if is_curve else 1.6 + 0.16 * height), layout="constrained",
                    dpi=110)
    plots = figure.subplots(1, len(panels), squeeze=False, sharex=not is_curve, sharey=is_curve)[0]
    named = " − ".join(reversed(shown.pop())) if is_curve else "distances"
    figure.suptitle(f"mean difference of {named}; below 0 the first is better\n"
                    f"bar: 95 % interval; open: fewer than 3 seeds", size=9)
    for plot, (axis, rows) in zip(plots, panels.items(), strict=True):
        (plot.axhline if is_curve else plot.axvline)(0, color="gray", linewidth=0.8)
        for row, (_, place, found) in enumerate(rows):
            low, high = found["interval"] or (0, 0)
            look = dict(fmt="o", color="C0", markersize=4, fillstyle="full" if found["interval"] else "none")
            if is_curve:
                plot.errorbar(place, found["difference"], yerr=(high - low) / 2, **look)
            else:
                plot.errorbar(found["difference"], row, xerr=(high - low) / 2, **look)
        plot.set_xlabel(f"at equal {AXES[axis].partition(',')[0]}")
        if is_curve:
            plot.xaxis.set_major_formatter(EngFormatter(sep=""))
        else:
            before = [None, *(pair for pair, *_ in rows)]
            labels = [f"{f'{pair[1]} − {pair[0]}:  ' if pair != last else ''}{point_label(place, axis)}"
                      for last, (pair, place, _) in zip(before, rows, strict=False)]
            plot.set_yticks(range(len(rows)), labels, fontsize=7)
            plot.set_ylim(height - 0.5, -0.5)
    save_figure(figure, path)
    return [path]
