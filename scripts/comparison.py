"""Compares a study's scores: which variant scores lower, and by how much, where all else is equal; tables and figures.

A score is a flat row of study.json, whatever machine it is from. Its key is everything in it but FREE, and only scores
of one key are compared, so a row that lacks a fact compares with none that has it. Lower is better.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter
from scipy import stats

from runtime.schema import as_text
from scripts.presentation import save_figure, table

AXES = {"images": "images seen", "seconds": "seconds of training", "flops": "training FLOPs"}
# What two scores of one key may differ in: place in training, score, time, cost, and where they were computed.
FREE = {"step", "images", "flops", "seconds", "finished", "value", "precision", "recall", "in_training", "study",
        "commit", "device", "torch", "batch_size", "processes", "multiply_adds_an_image", "source.step",
        "source.checkpoint", "source.weights_sha256", "source.in_training", "source.compiled", "source.evaluations",
        "extractor.weights"}
FREE_GROUPS = ("versions.", "source.multiply_adds.")
# In rows before November 2026 the seeds of a variant may have been scored by different exports of one network: a table
# has them all, and a difference is of two scores by the same files.
FILES = ("extractor_sha256", "reference_sha256")
WHERE = ("commit", "device", "torch", "versions.torch", *FILES)     # shown where a comparison mixes them
ENOUGH = 3  # seeds for a verdict

Measure = tuple[tuple[str, str], ...]   # what is held fixed: names and values
Curves = dict[int, dict[int, dict]]     # scores of one variant by one measure: by seed, then by step


# ---- what is held fixed ---------------------------------------------------------------------------------------------


def measure_of(score: dict, but: tuple[str, ...] = FILES) -> Measure:
    """Returns a score's key, without its FILES."""
    def is_free(name: str) -> bool:
        hashed = name.endswith(".path") and score.get(f"{name.removesuffix('path')}sha256")  # known by its content
        return name in FREE or name in but or name.startswith(FREE_GROUPS) or bool(hashed)

    return tuple(sorted((name, as_text(value)) for name, value in score.items() if not is_free(name)))


def by_measure(runs: list[dict]) -> dict[Measure, dict[str, Curves]]:
    """Groups scores by measure, variant, seed and step; raises ValueError for two that nothing tells apart."""
    groups: dict = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for run in runs:
        for score in sorted(run["scores"], key=lambda score: score["step"]):
            curve = groups[measure_of(score)][run["variant"]][run["seed"]]
            if score["step"] in curve:
                raise ValueError(f"{run['variant']}, seed {run['seed']}, has two scores at step {score['step']} "
                                 f"({score['metric']} {curve[score['step']]['value']:g} and {score['value']:g}) that "
                                 f"differ in nothing that was asked for: move one row out of its results.jsonl.")
            curve[score["step"]] = score
    return dict(sorted(groups.items()))


def common_facts(measures: Iterable[Measure]) -> Measure:
    first, *others = measures
    return tuple(fact for fact in first if all(fact in other for other in others))


def described(facts: Iterable[tuple[str, str]]) -> str:
    """Writes facts for a reader: without nulls, and hashes by their first eight digits."""
    return ", ".join(f"{name.removeprefix('source.')} {value[:8] if 'sha256' in name else value}"
                     for name, value in facts if value != "null")


def title(measure: Measure, measures: Iterable[Measure], *without: str) -> str:
    """Names a measure by metric, number of images, and the facts that not all measures of the study share."""
    facts, common, named = dict(measure), common_facts(measures), ("metric", "num_samples", "seeds", "source.seeds")
    more = described(fact for fact in measure if fact not in (*common, ("guidance", "unguided"))
                     and fact[0] not in (*named, *without))
    return f"{facts['metric']} of {int(facts['num_samples']):,} images{', ' * bool(more)}{more}"


# ---- pairs ----------------------------------------------------------------------------------------------------------


def pairable(first: Curves, second: Curves) -> list[int]:
    """Lists the seeds that both variants have and whose scores are by the same files."""
    def files(curve: dict[int, dict]) -> set:
        return {tuple(map(score.get, FILES)) for score in curve.values()}

    return [seed for seed in sorted(first) if seed in second and files(first[seed]) == files(second[seed])]


def compared(first: Curves, second: Curves, axis: str) -> list[tuple[float, dict[int, tuple[float, float]]]]:
    """Lists (place, values of both variants by seed) for each place on `axis` that one was scored at and both reached.

    Between two scores of a seed, values are interpolated on a log scale, on which learning curves are nearly straight.
    On a linear scale they would lie above the curve, to the advantage of the variant with more scores. The untrained
    network is left out.
    """
    lines = {seed: [{score[axis]: score["value"] for score in side[seed].values() if score.get(axis)}
                    for side in (first, second)] for seed in pairable(first, second)}
    rows = []
    for place in sorted({place for line in lines.values() for side in line for place in side}):
        there = {seed: tuple(on_line(side, place) for side in line) for seed, line in lines.items()
                 if all(side and min(side) <= place <= max(side) for side in line)}
        if there:
            rows.append((place, there))
    return rows


def on_line(values: dict[float, float], place: float) -> float:
    return float(np.interp(math.log(place), [math.log(each) for each in values], list(values.values())))


def paired(pairs: Iterable[tuple[float, float]]) -> dict:
    """Compares two variants' scores, a pair for each seed and lower being better, by the differences within the pairs.

    Runs with the same seed see the same images, noise and labels, so an effect of the seed on both cancels. With at
    least three seeds `interval` is the two-sided 95 % t interval of the mean difference, else None.
    """
    differences = [other - one for one, other in pairs]
    n, mean, interval = len(differences), statistics.mean(differences), None
    if n >= ENOUGH:
        half = float(stats.t.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
        interval = [mean - half, mean + half]
    return {"difference": mean, "interval": interval, "n": n,
            "seeds_lower": [sum(d > 0 for d in differences), sum(d < 0 for d in differences)]}  # first's, second's


def verdict(first: str, second: str, pair: dict) -> str:
    """States which variant is lower, with interval and seeds; with one or two seeds only in how many of them."""
    n = pair["n"]
    if pair["interval"]:
        low, high = pair["interval"]
        return f"{second if high < 0 else first if low > 0 else 'none'} ({low:+.3f} to {high:+.3f}, n={n})"
    count, name = max(zip(pair["seeds_lower"], (first, second), strict=True), key=lambda side: side[0])
    return f"{name} in {count} of {n} seed{'s' * (n > 1)}, no verdict"


def comparisons(result: dict) -> list[tuple[tuple[str, str], Measure, Curves, Curves]]:
    """Lists the study's pairs with each measure by which both have scores of equal keys."""
    groups = by_measure(result["runs"])
    return [(tuple(pair), measure, *(variants[name] for name in pair))
            for pair in result["compare"] for measure, variants in groups.items()
            if {*pair} <= variants.keys() and compared(*(variants[name] for name in pair), "images")]


# ---- the page -------------------------------------------------------------------------------------------------------


def mean_of(values: Iterable[float]) -> str:
    values = list(values)
    if len(values) == 1:
        return f"{values[0]:.3f} (n=1)"
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f} (n={len(values)})" if values else ""


def with_variety(scores: Iterable[dict]) -> str:
    """Writes the mean distance and, where they were measured, mean precision and recall."""
    scores = list(scores)
    text = mean_of(score["value"] for score in scores)
    for name, letter in (("precision", "P"), ("recall", "R")):
        if scores and all(score.get(name) is not None for score in scores):
            text += f" {letter} {statistics.mean(score[name] for score in scores):.3f}"
    return text


def place_label(place: float, axis: str) -> str:
    return f"{place:.3g}" if axis == "flops" else f"{place:,.0f}"


def section(heading: str, columns: list[str], rows: list[list]) -> list[str]:
    """Returns a heading and its table; nothing where there are no rows."""
    return ["", f"## {heading}", "", table(columns, rows)] if rows else []


def page(result: dict) -> str:
    """Writes the study as Markdown: what is held fixed, scores over steps, losses, and differences of pairs."""
    groups = by_measure(result["runs"])
    lines = [f"# {result['name']}", ""]
    lines += [f"* {run['variant']}, seed {run['seed']}: not finished, {run['step']} of {run['steps'] or '?'} steps."
              for run in result["runs"] if run["step"] < (run.get("steps") or math.inf)]
    lines += notes_on_pairs(result, groups)
    lines += ["", "Mean ± standard deviation over seeds (of n − 1), n seeds; lower is better. Verdicts are by the 95 % "
              "t interval of the paired differences. Between two scores, values are interpolated on a log scale."]
    if groups:
        lines += ["", f"Held fixed in all tables: {described(common_facts(groups))}.", *score_tables(groups)]
    floor = [[row["images"], row["metric"], f"{row['num_samples']:,}", with_variety([row])] for row in result["floor"]]
    lines += section("Real images, the floor", ["images", "metric", "number", "score"], floor)
    lines += [*held_out_losses(result), *differences(result, groups)]
    return "\n".join([*lines, *(changes(result, groups) if result.get("changes") else ())]) + "\n"


def notes_on_pairs(result: dict, groups: dict) -> list[str]:
    """Lists the pairs without scores of equal keys, and those whose scores were computed in several places."""
    made, notes = comparisons(result), {}
    for pair in map(tuple, result["compare"]):
        keys = [[dict(measure_of(score, but=())) for variants in groups.values()
                 for curve in variants.get(name, {}).values() for score in curve.values()] for name in pair]
        if all(keys) and pair not in [each[0] for each in made]:
            apart = min(([name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
                         for one, other in itertools.product(*keys)), key=len)
            notes[f"Not compared: {' and '.join(pair)}, which differ in {', '.join(apart) or 'seeds or places'}."] = 0
    for pair, _, *sides in made:
        scores = [score for side in sides for curve in side.values() for score in curve.values()]
        if names := [name for name in WHERE if len({score.get(name) for score in scores}) > 1]:
            notes[f"Compared over several values of {', '.join(names)}: {' and '.join(pair)}."] = 0
    return [f"* {note}" for note in notes]


def score_tables(groups: dict) -> list[str]:
    """Tabulates scores over steps: a table for measures that differ in guidance alone, with its cost in FLOPs."""
    tables: dict = defaultdict(list)
    for measure, variants in groups.items():
        tables[title(measure, groups, "guidance")] += [(dict(measure)["guidance"], *each) for each in variants.items()]
    lines = []
    for heading, rows in tables.items():
        steps = sorted({step for *_, curves in rows for curve in curves.values() for step in curve})
        costs = {(guidance, variant): curves[min(curves)][max(curves[min(curves)])].get("multiply_adds_an_image")
                 for guidance, variant, curves in rows}
        cells = []
        for guidance, variant, curves in sorted(rows, key=lambda row: row[0] != "unguided"):
            cost, plain = costs[guidance, variant], costs.get(("unguided", variant))
            cells.append([variant, guidance, f"{cost / plain:.2f}" if cost and plain else "",
                          *(with_variety(curve[step] for curve in curves.values() if step in curve)
                            for step in steps)])
        lines += section(heading, ["variant", "guidance", "cost", *(f"step {step:,}" for step in steps)], cells)
    return lines


def held_out_losses(result: dict) -> list[str]:
    """Tabulates mean losses over seeds at fixed noise levels, of training images and of others."""
    losses: dict = defaultdict(list)
    for run in result["runs"]:
        for row in run.get("held_out", ()):
            for folder, by_level in row["losses"].items():
                losses[run["variant"], row["step"], folder].append(by_level)
    levels = list(dict.fromkeys(level for seeds in losses.values() for by_level in seeds for level in by_level))
    rows = [[variant, f"{step:,}", folder,
             *(f"{statistics.mean(by_level[level] for by_level in seeds):.4f}" for level in levels), len(seeds)]
            for (variant, step, folder), seeds in sorted(losses.items())]
    return section("Dense loss at fixed noise levels, the same noise for all",
                   ["variant", "step", "images of", *levels, "n"], rows)


def differences(result: dict, groups: dict) -> list[str]:
    lines = []
    for (first, second), measure, *sides in comparisons(result):
        for axis, label in AXES.items():
            rows = [[place_label(place, axis), *map(mean_of, zip(*by_seed.values(), strict=True)),
                     f"{paired(by_seed.values())['difference']:+.3f}",
                     verdict(first, second, paired(by_seed.values()))]
                    for place, by_seed in compared(*sides, axis)]
            lines += section(f"{second} against {first}, at equal {label}: {title(measure, groups)}",
                             [label, first, second, "difference", "lower"], rows)
    return lines


def changes(result: dict, groups: dict) -> list[str]:
    """Tabulates by how much the difference changes from each compared pair to the next, of the same seed."""
    places = {(pair, measure): dict(compared(*sides, "images")) for pair, measure, *sides in comparisons(result)}
    following, rows = dict(itertools.pairwise(map(tuple, result["compare"]))), []
    for (pair, measure), here in places.items():
        there = places.get((following.get(pair), measure), {})
        for place in sorted(here.keys() & there.keys()):
            seeds = here[place].keys() & there[place].keys()
            change = paired([[second - first for first, second in (side[place][seed] for side in (here, there))]
                             for seed in seeds]) if seeds else {"interval": None}
            if change["interval"]:
                low, high = change["interval"]
                rows.append([" − ".join(reversed(pair)), " − ".join(reversed(following[pair])), title(measure, groups),
                             place_label(place, "images"), f"{change['difference']:+.3f} ({low:+.3f} to {high:+.3f})"])
    return section("Change of the difference, with its 95 % interval",
                   ["from", "to", "score", "images seen", "change"], rows)


# ---- figures --------------------------------------------------------------------------------------------------------


def most_scored(result: dict) -> list[tuple[tuple[str, str], Measure, Curves, Curves]]:
    """Returns one comparison of each pair, by the measure that was taken at the most places."""
    chosen: dict = {}
    for each in comparisons(result):
        if each[0] not in chosen or len(compared(*each[2:], "images")) > len(compared(*chosen[each[0]][2:], "images")):
            chosen[each[0]] = each
    return list(chosen.values())


def draw_figures(result: dict, out: Path) -> list[Path]:
    """Draws score against images, seconds and FLOPs, and differences; removes an earlier report's where none are."""
    figures = {f"score-over-{axis}.png": draw_scores(result, axis) for axis in AXES}
    figures["differences.png"] = draw_differences(result)
    for name, figure in figures.items():
        if figure is None:
            (out / name).unlink(missing_ok=True)
        else:
            save_figure(figure, out / name)
    return [out / name for name, figure in figures.items() if figure]


def draw_scores(result: dict, axis: str) -> Figure | None:
    """Draws score against an axis: a panel per pair, with mean and deviation over shared seeds; None without pairs."""
    panels, groups = [each for each in most_scored(result) if compared(*each[2:], axis)], by_measure(result["runs"])
    if not panels:
        return None
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    size = (7, 4.5) if len(panels) == 1 else (4.2 * columns, 3.2 * rows)
    figure = Figure(figsize=size, layout="constrained", dpi=110)
    figure.suptitle(f"{result['name']}: mean over n seeds ± standard deviation")
    figure.supxlabel(AXES[axis])
    figure.supylabel("distance, lower is better")
    for number, (pair, measure, *sides) in enumerate(panels, 1):
        plot = figure.add_subplot(rows, columns, number)
        seeds = sorted({seed for _, by_seed in compared(*sides, axis) for seed in by_seed})
        for variant, curves in zip(pair, sides, strict=True):
            steps = [step for step, score in curves[seeds[0]].items()
                     if score.get(axis) and all(step in curves[seed] for seed in seeds)]
            x = [curves[seeds[0]][step][axis] for step in steps]
            values = np.array([[curves[seed][step]["value"] for seed in seeds] for step in steps])
            values = values.reshape(-1, len(seeds))     # also without a step
            mean, spread = values.mean(1), values.std(1, ddof=1) if len(seeds) > 1 else 0
            [line] = plot.plot(x, mean, marker="o", label=variant)
            plot.fill_between(x, mean - spread, mean + spread, color=line.get_color(), alpha=0.2)
        plot.set(xscale="log")
        plot.set_title(f"{title(measure, groups)}, n={len(seeds)}", fontsize="small")
        plot.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 6)))
        plot.xaxis.set(major_formatter=EngFormatter(sep=""), minor_formatter=NullFormatter())
        plot.legend(fontsize="small")
    return figure


def draw_differences(result: dict) -> Figure | None:
    """Draws the difference of each pair, with its interval if it has one: a panel per axis, a row per place."""
    panels = {axis: [(" − ".join(reversed(pair)), place, paired(by_seed.values()))
                     for pair, _, *sides in most_scored(result) for place, by_seed in compared(*sides, axis)]
              for axis in AXES}
    panels = {axis: rows for axis, rows in panels.items() if rows}
    if not panels:
        return None
    height = max(map(len, panels.values()))
    figure = Figure(figsize=(4.8 * len(panels), 1.6 + 0.16 * height), layout="constrained", dpi=110)
    figure.suptitle("mean difference of distances; below 0 the first is better\n"
                    "bar: 95 % interval; open: fewer than 3 seeds", size=9)
    plots = figure.subplots(1, len(panels), squeeze=False, sharex=True)[0]
    for plot, (axis, rows) in zip(plots, panels.items(), strict=True):
        plot.axvline(0, color="gray", linewidth=0.8)
        for number, (_, _, pair) in enumerate(rows):
            low, high = pair["interval"] or (0, 0)
            plot.errorbar(pair["difference"], number, xerr=(high - low) / 2, fmt="o", color="C0", markersize=4,
                          fillstyle="full" if pair["interval"] else "none")
        plot.set_xlabel(f"at equal {AXES[axis].partition(',')[0]}")
        names = [None, *(name for name, *_ in rows)]
        labels = [f"{f'{name}:  ' if name != above else ''}{place_label(place, axis)}"
                  for above, (name, place, _) in zip(names, rows, strict=False)]
        plot.set_yticks(range(len(rows)), labels, fontsize=7)
        plot.set_ylim(height - 0.5, -0.5)
    return figure
