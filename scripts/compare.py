"""Compares runs over seeds: means, paired differences and their 95 % intervals at each scored step; Markdown, a figure.

    python scripts/compare.py dit=runs/x-dit-seed{0,1,2} tread=runs/x-tread-seed{0,1,2} out=compare
    python scripts/compare.py compare.jsonl c=runs/c-{0,1,2} d=runs/d-{0,1,2} pairs=dit:tread,c:d changes=true
    python scripts/compare.py runs/x out=curves                  one run: its losses and its scores

out=x writes x.md, x.png and x.jsonl, whose settings and scores stand in for the runs' folders anywhere. Runs
of one seed are a pair: they saw the same images, noise and labels. Pairs are the first variant with each other one, or
those of pairs=. changes=true adds the change of the difference from each pair to each later one.
seconds=dit:0.21,tread:0.14 are those of a training step, by scripts/benchmark.py.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from numpy import interp
from scipy.special import stdtrit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dit import multiply_adds
from runtime.command import program
from runtime.files import atomic_write, read_rows, write_text
from runtime.schema import as_path, as_recorded, as_text, leaves
from scoring.results import score_of
from training.run_folder import tells_runs_apart
from weights import checkpoints
from weights.records import build_network, build_schedule

AXES = {"images": "images seen", "seconds": "seconds of training", "flops": "training FLOPs"}
# Named where a table mixes them. Before November 2026 several exports of one network scored a study.
NAMED = ("commit", "device", "versions.torch", "extractor_sha256")
MARK = "<!-- by scripts/compare.py -->\n"
HEAD = ("Mean ± standard deviation over n seeds (of n − 1); lower is better. A variant is lower if the 95 % t interval "
        "of the paired differences excludes 0. Between two scores, values are interpolated on a log scale.")

Run = dict[str, Any]            # variant, seed, step, steps, settings by dotted key, history, scores, losses
Score = dict[str, Any]          # of a row, by `score_of`, and its step, images and flops
Measure = frozenset[tuple[str, str]]            # what was measured: names and values
Curves = dict[int, dict[int, Score]]            # of one variant by one measure: by seed, then by step
Pair = tuple[str, str]                          # of variants

# ---- what is read ---------------------------------------------------------------------------------------------------


def read_run(variant: str, folder: Path) -> Run:
    """Reads a run's newest meta.json, its scores and its losses; raises ValueError for rows that are not of a run."""
    newest, results = checkpoints.read_latest(folder, names=()), folder / "results.jsonl"
    if newest is None:
        raise ValueError(f"{folder} has no checkpoint: give folders of runs, or files by compare.py, without a name.")
    with as_recorded(newest[0] / "meta.json"):
        meta = newest[1]
        with torch.device("meta"):
            net = build_network(meta["network"])
        schedule = build_schedule(net, meta["route_schedule"], meta["seed"])
        flops = cache(lambda routes: 6 * sum(multiply_adds(net, routes)))  # of an image: forward, and twice backward
        run = {"variant": variant, "seed": meta["seed"], "step": meta["step"], "steps": meta["config"]["steps"],
               "settings": leaves(meta["config"]) | {
                   "batch_size": meta["batch_size"], "data.fingerprint": meta["data"]["fingerprint"],
                   "computed in TF32": sorted({str(entry.get("tf32")) for entry in meta["history"]})},
               "history": meta["history"], "scores": [], "losses": read_rows(folder / "metrics.jsonl")}
    with as_recorded(results):
        for row in read_rows(results):
            if (step := row["source"]["step"]) > run["step"] == run["steps"]:
                raise ValueError(f"{results} has a score of step {step} of a run that ended at step {run['step']}: "
                                 f"move that row away.")
            if score := score_of(row):
                run["scores"].append(score | {
                    "step": step, "images": step * meta["batch_size"], "flops": meta["batch_size"] * sum(
                        count * flops(routes) for routes, count in schedule.counts(step).items())})
    return run


def read_file(path: Path) -> list[Run]:
    """Reads a file that main has written, a line for each run, with its scores; raises ValueError for another file."""
    runs = [run for run in read_rows(path) if run.keys() >= {"variant", "seed", "step", "steps", "settings", "scores"}]
    if not runs or len(runs) < len(path.read_text(encoding="utf-8").splitlines()):
        raise ValueError(f"{path} is not as compare.py has written it: copy it again, or give folders of runs.")
    return runs


# ---- what may be compared -------------------------------------------------------------------------------------------


def name_of(run: Run) -> str:
    return f"{run['variant']}, seed {run['seed']},"


def differing(one: Run, other: Run, *more: str) -> list[str]:
    """Describes in which of the settings that tell runs apart, and of `more`, two runs differ."""
    sides = one["settings"], other["settings"]
    keys = sorted(key for key in {*sides[0], *sides[1]} - {"seed"} if tells_runs_apart(key) or key in more)
    values = {key: [side.get(key, "<not set>") for side in sides] for key in keys}
    return [f"{key} ({as_text(here)} and {as_text(there)})" for key, (here, there) in values.items() if here != there]


def comparable(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """Returns the runs that have finished, and a line about each other one; raises ValueError for runs of no variant.

    Of a file of rows, whose runs will not go on, it returns the others too.
    A variant's runs differ in the seed alone, and none of them was resumed with other settings.
    """
    first: dict[str, Run] = {}
    notes, names = [], [*map(name_of, runs)]
    for name, run in zip(names, runs, strict=True):
        before = first.setdefault(run["variant"], run)
        if apart := differing(before, run, "steps"):
            raise ValueError(f"{name_of(before)} and {name} differ in {apart[0]}, not only in seed: name them apart.")
        if names.count(name) > 1:
            raise ValueError(f"{name} is given twice, and pairs are of one seed: leave one of them out.")
        if changed := [text for entry in run["history"] for key, text in entry.get("changed", {}).items()
                       if key != "world"]:
            raise ValueError(f"{name} was resumed with another setting ({changed[0]}): train it anew, or leave it out.")
        if run["step"] < run["steps"]:
            notes.append(f"{'Left out' if 'losses' in run else 'Recorded unfinished'}: {name} which has taken "
                         f"{run['step']} of {run['steps']} steps.")
    return [run for run in runs if run["step"] >= run["steps"] or "losses" not in run], notes


def by_measure(runs: list[Run]) -> dict[Measure, dict[str, Curves]]:
    """Groups scores by measure, variant, seed and step; raises ValueError for two that nothing tells apart."""
    groups: dict[Measure, dict[str, Curves]] = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for run in runs:
        for score in sorted(run["scores"], key=lambda score: score["step"]):
            curve = groups[frozenset(score["measure"].items())][run["variant"]][run["seed"]]
            seconds = run.get("sec_per_step", 0) * score["step"]
            before = curve.setdefault(score["step"], score | {"seconds": seconds})
            if before["value"] != score["value"]:
                raise ValueError(f"{name_of(run)} has two scores at step {score['step']} of one measure "
                                 f"({before['value']:g} and {score['value']:g}): move a row out of its results.jsonl.")
    return dict(sorted(groups.items(), key=lambda group: sorted(group[0])))


# ---- pairs ----------------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """Two variants' scores at a place on an axis, a pair for each seed, whose effect on both cancels."""

    pair: Pair
    axis: str
    place: float
    images: int | None                      # seen by the second variant; None: it was not scored here
    values: dict[int, tuple[float, float]]  # of the first and the second, by seed

    @property
    def apart(self) -> dict[int, float]:
        return {seed: second - first for seed, (first, second) in self.values.items()}

    @property
    def names(self) -> list[str]:
        """Names the pair, the axis and the place."""
        place = f"{self.place:.3g}" if self.axis == "flops" else f"{self.place:,.0f}"
        return [" − ".join(reversed(self.pair)), AXES[self.axis], place]


def compared(variants: dict[str, Curves], pair: Pair) -> Iterator[Difference]:
    """Yields a pair's differences at each place that one of them was scored at and both have reached.

    Between two scores of a seed, values are interpolated on a log scale. On a linear one they would lie above the
    curve, to the advantage of the variant with more scores. Intervals leave out the error of interpolating. The
    untrained network is left out.
    """
    def on_line(line: dict[float, float]) -> float:
        return float(interp(math.log(place), [*map(math.log, line)], [*line.values()]))

    first, second = (variants.get(name, {}) for name in pair)
    for axis in AXES:
        lines = {seed: [{score[axis]: score["value"] for score in side[seed].values() if score.get(axis)}
                        for side in (first, second)] for seed in first if seed in second}
        images = {score.get(axis): score["images"] for seed in lines for score in second[seed].values()}
        for place in sorted({place for sides in lines.values() for line in sides for place in line}):
            values = {seed: (on_line(one), on_line(other)) for seed, (one, other) in lines.items()
                      if one and other and max(min(one), min(other)) <= place <= min(max(one), max(other))}
            if values:
                yield Difference(pair, axis, place, images.get(place), values)


def interval(differences: Collection[float]) -> tuple[float, float]:
    """Returns the two-sided 95 % t interval of the mean difference; NaN for fewer than three."""
    if (n := len(differences)) < 3:
        return math.nan, math.nan
    mean, half = statistics.mean(differences), stdtrit(n - 1, 0.975) * statistics.stdev(differences) / math.sqrt(n)
    return float(mean - half), float(mean + half)


# ---- the page -------------------------------------------------------------------------------------------------------


def difference_of(differences: Collection[float]) -> str:
    """Writes the mean difference with its interval, or each difference where they are too few for one."""
    low, high = interval(differences)
    if math.isnan(low):
        return f"{', '.join(f'{value:+.3f}' for value in differences)} (n={len(differences)}, no verdict)"
    return f"{statistics.mean(differences):+.3f} ({low:+.3f} to {high:+.3f}, n={len(differences)})"


def mean_of(values: Collection[float]) -> str:
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread} (n={len(values)})" if values else ""


def score_at(step: int, curves: Curves) -> str:
    """Writes the mean distance at a step and, where they were measured, mean precision and recall."""
    scores = [curve[step] for curve in curves.values() if step in curve]
    return mean_of([score["value"] for score in scores]) + "".join(
        f" {name[0].upper()} {statistics.mean(score[name] for score in scores):.3f}"
        for name in ("precision", "recall") if scores and all(score.get(name) is not None for score in scores))


def heading(measure: Measure) -> str:
    facts = dict(measure)
    return f"{facts['metric']} of {int(facts['num_samples']):,} images, {facts['guidance']}"


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    return ["", *(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *rows])] if rows else []


def row_of(each: Difference) -> list[str]:
    """Writes both means at a place, their difference and, where the interval excludes 0, the variant that is lower."""
    first, second = zip(*each.values.values(), strict=True)
    low, high = interval(each.apart.values())
    return [*each.names, mean_of(second), mean_of(first), difference_of(each.apart.values()),
            each.pair[0] if low > 0 else each.pair[1] if high < 0 else ""]


def changes(found: list[list[Difference]]) -> list[list[str]]:
    """Lists by how much the difference changes from each pair to each later one, of the same seed.

    The places of two pairs are those where their second variants had seen as many images.
    """
    return [[here.names[0], there.names[0], here.names[1], f"{here.images:,}", difference_of(change)]
            for one, other in itertools.combinations(found, 2) for here, there in itertools.product(one, other)
            if here.images and (here.axis, here.images) == (there.axis, there.images)
            if (change := [there.apart[seed] - before for seed, before in here.apart.items() if seed in there.apart])]


def page(runs: list[Run], notes: list[str], pairs: list[Pair], with_changes: bool) -> str:
    """Writes Markdown: what pairs differ in; for each measure what is held fixed, the scores and the differences."""
    groups, tables = by_measure(runs), []
    for measure, variants in groups.items():
        fixed = ", ".join(f"{name.removeprefix('source.')} {value[:8] if 'sha256' in name else value}"
                          for name, value in sorted(measure) if value != "null")
        scores = [score for curves in variants.values() for curve in curves.values() for score in curve.values()]
        mixed = ", ".join(name for name in NAMED if len({score["where"].get(name) for score in scores}) > 1)
        steps = sorted({score["step"] for score in scores})
        found = [[*compared(variants, pair)] for pair in pairs]
        tables += ["", f"## {heading(measure)}", "", f"Held fixed: {fixed}." + (mixed and f" Several: {mixed}."),
                   *table(["variant", *(f"step {step:,}" for step in steps)],
                          [[name, *(score_at(step, curves) for step in steps)] for name, curves in variants.items()]),
                   *table(["a − b", "at equal", "", "a", "b", "difference (95 %)", "lower"],
                          [row_of(each) for differences in found for each in differences]),
                   *table(["change from", "to", "at equal", "images seen", "change (95 %)"],
                          changes(found) if with_changes else [])]
    first = {run["variant"]: run for run in reversed(runs)}
    for one, other in pairs:
        settings = differing(first[one], first[other], "steps", "init_from", "data.path")
        notes = [*notes, f"{one} and {other} differ in {', '.join(settings) or 'no setting'}."]
        if not any([*compared(variants, (one, other))] for variants in groups.values()):
            sides = ([measure for measure, variants in groups.items() if name in variants] for name in (one, other))
            apart = min(({name for name, _ in here ^ there} for here, there in itertools.product(*sides)), key=len,
                        default=set())
            notes.append(f"Not compared: scores of {one} and {other}, which differ in "
                         f"{', '.join(sorted(apart)) or 'seeds or steps'}.")
    return "\n".join([f"{MARK}# {', '.join(dict.fromkeys(run['variant'] for run in runs))}", "",
                      *(f"* {note}" for note in notes), "", HEAD, *tables]) + "\n"


# ---- the figure -----------------------------------------------------------------------------------------------------


def draw(runs: list[Run], pairs: list[Pair]) -> Figure:
    """Draws losses, scores and differences; of each pair by the measure that was taken at the most places."""
    groups, trained = by_measure(runs), [run for run in runs if run.get("losses")]
    best = {pair: max(groups, key=lambda measure: len([*compared(groups[measure], pair)])) for pair in pairs if groups}
    found = [each for pair, measure in best.items() for each in compared(groups[measure], pair)]
    shown = dict.fromkeys((measure, name) for pair, measure in best.items() for name in pair) or [
        (measure, name) for measure, variants in groups.items() for name in variants]
    panels = [panel for axis in AXES if (panel := [each for each in found if each.axis == axis])]
    columns, height = bool(trained) + 1 + len(panels), max([4, *(1.3 + 0.16 * len(panel) for panel in panels)])
    figure = Figure(figsize=(4.8 * columns, height), layout="constrained", dpi=110)
    plots = iter(figure.subplots(1, columns, squeeze=False)[0])
    if trained:
        losses, of = next(plots), itemgetter("variant")
        for number, (name, group) in enumerate(itertools.groupby(sorted(trained, key=of), of)):
            for seed, run in enumerate(group):
                losses.plot([row["step"] for row in run["losses"]], [row["loss"] for row in run["losses"]],
                            f"C{number}", linewidth=0.8, label="" if seed else name)
        losses.set(xlabel="step", ylabel="training loss (a routed run's is higher)")
        losses.legend(fontsize="x-small")
    scores = next(plots)
    for measure, name in shown:
        curves = [*groups[measure].get(name, {}).values()]
        steps = [step for step in next(iter(curves), {}) if all(step in curve for curve in curves)]
        values = [[curve[step]["value"] for curve in curves] for step in steps]
        scores.errorbar([curves[0][step]["images"] for step in steps], [*map(statistics.mean, values)],
                        [statistics.stdev(value) if len(value) > 1 else 0 for value in values], marker="o", capsize=3,
                        label=f"{name}, n={len(curves)}: {heading(measure)}")
    scores.set(xlabel=AXES["images"], ylabel="distance: mean ± standard deviation", yscale="log")
    scores.yaxis.set(major_formatter=LogFormatter(), minor_formatter=LogFormatter())
    figure.legend(*scores.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="x-small")
    for plot, panel in zip(plots, panels, strict=True):
        plot.axvline(0, color="gray", linewidth=0.8)
        for number, each in enumerate(panel):
            low, high = interval(each.apart.values())
            plot.errorbar(statistics.mean(each.apart.values()), number, xerr=(high - low) / 2, fmt="o", color="C0",
                          markersize=4, fillstyle="full" if low < high else "none")
        plot.set(xlabel="difference, below 0 the first is better\nbar: 95 % interval; open: n < 3",
                 title=f"at equal {AXES[panel[0].axis]}", ylim=(len(panel) - 0.5, -0.5))
        plot.set_yticks(range(len(panel)), [f"{pair}:  {place}" for pair, _, place in (each.names for each in panel)],
                        fontsize=7)
    return figure


# ---- the command ----------------------------------------------------------------------------------------------------


def refuse_to_replace(out: str, runs: list[Run]) -> None:
    """Raises ValueError if out= would replace files of others, or rows of runs that are not given."""
    text, rows = Path(f"{out}.md"), Path(f"{out}.jsonl")
    if not text.read_text(encoding="utf-8").startswith(MARK) if text.is_file() else Path(f"{out}.png").exists():
        raise ValueError(f"out={out} would replace files that compare.py did not write: set another.")
    for run in read_file(rows) if rows.exists() else ():
        if run["scores"] and name_of(run) not in map(name_of, runs):
            raise ValueError(f"{rows} has scores of {name_of(run)} which is not given: add it, or set another out=.")


@program
def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs="+", metavar="name=run, file of rows, out=, pairs=, seconds=, changes=true")
    runs, options = [], {"pairs": "", "changes": "", "seconds": "", "out": ""}
    for text in parser.parse_args().arguments:
        name, _, place = text.partition("=") if "=" in text else ("", "", text)
        if name in options:
            options[name] = place
        elif (path := as_path(place)).is_file() and not name:
            runs += read_file(path)
        else:
            runs.append(read_run(name or path.resolve().name, path))
    finished, notes = comparable(runs) if len(runs) > 1 else (runs, [])
    names = [*dict.fromkeys(run["variant"] for run in finished)]
    pairs, seconds = ([text.partition(":")[::2] for text in options[name].split(",") if text]
                      for name in ("pairs", "seconds"))
    if wrong := {*itertools.chain(*pairs), *dict(seconds)} - {*names}:
        raise ValueError(f"{min(wrong) or 'No name'} is no variant with a finished run: write pairs=a:b,c:d or "
                         f"seconds=a:0.2,b:0.1 with some of {', '.join(names) or 'none, as no run has finished'}.")
    pairs = pairs or [(names[0], name) for name in names[1:]]
    for run, value in ((run, value) for run in finished for name, value in seconds if run["variant"] == name):
        run["sec_per_step"] = float(value)
    text = page(finished, notes, pairs, options["changes"].lower() == "true")
    print(text)
    if options["out"]:
        out = str(as_path(options["out"]))
        refuse_to_replace(out, runs)
        rows = [{key: value for key, value in run.items() if key != "losses"} for run in finished]
        write_text(Path(f"{out}.jsonl"), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        write_text(Path(f"{out}.md"), text)
        with atomic_write(Path(f"{out}.png")) as partial:
            draw(finished, pairs).savefig(partial, format="png")
        print(f"{out}.md", f"{out}.png", f"{out}.jsonl", sep="\n")


if __name__ == "__main__":
    main()
