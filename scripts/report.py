"""Turns training runs, their scores and a study into one page that opens from disk: curves, pictures, settings.

    python scripts/report.py runs/a runs/b                     # report/index.html
    python scripts/report.py runs/a runs/b study=runs/study-cifar10-cpu out=report
    python scripts/report.py runs/a watch=true                 # built again while training goes on, until Ctrl-C

Nothing is fetched from a network. Plots are thinned to each bin's extremes; what is downloaded from the page, and what
a zoom shows, is every row, to nine digits. What could not be read is listed on the page and on the screen.
"""

import base64
import datetime
import gzip
import hashlib
import html
import importlib.util
import json
import math
import re
import statistics
import string
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import checkpoint as checkpoints  # noqa: E402
from settings import Location, Positive, Settings, command, commit, first_line, read_json, shown  # noqa: E402

PARTS = Path(__file__).with_suffix("")      # template.html, report.css, report.js
OURS = '<meta name="generator" content="tread report">'
LIBRARIES = ("bokeh.min.js", "bokeh-api.min.js")
BINS = 300              # of a thinned curve; each keeps the lowest and the highest row of every column
COLUMNS = ("loss", "grad_norm", "lr", "img_per_sec", "sec_per_step", "peak_memory_gib", "skipped")     # plotted
AXES = ("step", "images", "elapsed_s")
INCEPTION = ("adm", "inception")      # extractors whose Fréchet distance is called FID
HIGHER_IS_BETTER = ("inception_score", "precision", "recall")


class ReportSettings(Settings):
    """configs/report.yaml."""

    runs: list[Location]
    study_dir: Location | None
    out: Location
    watch: bool
    every: Positive


@dataclass
class Page:
    """What is gathered for a page: its data, the files beside it, and what was left out and why."""

    out: Path
    left_out: list[tuple[str, str]] = field(default_factory=list)
    files: set[str] = field(default_factory=set)

    def leave_out(self, where: Path | str, why: str) -> None:
        self.left_out.append((str(where), why))

    def keep(self, name: str, content: bytes) -> str:
        """Writes a file beside the page under a name that tells its content; returns its relative address."""
        stem, dot, ending = name.partition(".")
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", stem)[:60]
        path = self.out / "files" / f"{stem}-{hashlib.sha256(content).hexdigest()[:12]}{dot}{ending}"
        if not path.is_file():
            with checkpoints.beside(path) as partial:
                partial.write_bytes(content)
        self.files.add(path.name)
        return f"files/{path.name}"


# ---- reading what a run left ----------------------------------------------------------------------------------------


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def finite(value: object) -> object:
    """Puts null for the numbers that JSON lacks, NaN and the infinities, wherever a file had them."""
    match value:
        case dict():
            return {key: finite(part) for key, part in value.items()}
        case list() | tuple():
            return [finite(part) for part in value]
        case float() if not math.isfinite(value):
            return None
    return value


def rounded(value: float) -> float:
    """Keeps nine significant digits, which is what a float32 holds: a page of 100,000 rows is half as large so."""
    return float(f"{value:.9g}") if isinstance(value, float) else value


def rows_of(path: Path, page: Page) -> list[dict]:
    """Reads a file of JSON lines; lines that are none, as halved ones, are left out and counted."""
    rows, wrong = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            row = "wrong"
        if isinstance(row, dict):
            rows.append(row)
        elif line.strip():
            wrong.append(number)
    if wrong:
        page.leave_out(path, f"{counted(len(wrong), 'line')} cannot be read, as a kill leaves one, or a run that is "
                             f"writing it ({listed(wrong)}).")
    return rows


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(numbers: list) -> str:
    return ", ".join(map(str, numbers[:5])) + (", …" if len(numbers) > 5 else "")


def read_metrics(path: Path, page: Page) -> dict[str, list]:
    """Reads metrics.jsonl as columns, ordered by step; a step that is there again, as after a restart, counts last."""
    rows = rows_of(path, page) if path.is_file() else []
    steps = [row for row in rows if is_number(row.get("step"))]
    if len(steps) < len(rows):
        page.leave_out(path, f"{counted(len(rows) - len(steps), 'row')} without a step.")
    kept: list[dict] = []
    for row in steps:
        while kept and kept[-1]["step"] >= row["step"]:      # what a run writes again replaces what it wrote before
            kept.pop()
        kept.append(row)
    if len(kept) < len(steps):
        page.leave_out(path, f"{counted(len(steps) - len(kept), 'row')} of steps that a later row has again, as after "
                             f"a restart.")
    names = list(dict.fromkeys(name for row in kept for name in row))
    columns = {name: [row.get(name) for row in kept] for name in names}
    broken = 0
    for name, values in columns.items():
        clean = [rounded(value) if is_number(value) else None for value in values]
        broken += sum(old is not None and new is None for old, new in zip(values, clean, strict=True))
        columns[name] = clean
    if broken:
        page.leave_out(path, f"{counted(broken, 'value')} that no plot can show, as NaN or infinity; there is a gap.")
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


def thinned(columns: dict[str, list], bins: int = BINS) -> list[int]:
    """Returns the rows to plot: of each bin, those that hold a column's lowest or highest value; the first, the last.

    A value that is none is kept at the edge of its bin, so that a gap stays one.
    """
    count = len(columns.get("step", ()))
    plotted = [columns[name] for name in COLUMNS if name in columns]
    if count <= 2 * bins * max(1, len(plotted)):
        return list(range(count))
    chosen = {0, count - 1}
    for first in range(0, count, size := math.ceil(count / bins)):
        rows = range(first, min(count, first + size))
        for values in plotted:
            there = [row for row in rows if values[row] is not None]
            if there:
                chosen |= {min(there, key=values.__getitem__), max(there, key=values.__getitem__)}
            if len(there) < len(rows):
                chosen.add(next(row for row in rows if values[row] is None))
    return sorted(chosen)


def compact(columns: dict[str, list]) -> bytes:
    """Packs all rows into a script that the page loads when they are asked for: columns as gzipped JSON."""
    packed = base64.b64encode(gzip.compress(json.dumps(columns, separators=(",", ":")).encode(), mtime=0))
    return b'arrived("' + packed + b'");\n'


def flat(value: object, prefix: str = "") -> dict[str, str]:
    """Flattens groups to `group.key` and writes each value as a command line does."""
    if isinstance(value, dict) and value:
        return {key: text for name, part in value.items()
                for key, text in flat(part, f"{prefix}.{name}" if prefix else str(name)).items()}
    return {prefix: value if isinstance(value, str) else json.dumps(value, default=str)} if prefix else {}


def read_config(folder: Path, page: Page) -> dict:
    path = folder / "config.yaml"
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        # train.py writes none, and nine lines of them may become a million values.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise ValueError("it has aliases")
        if isinstance(plain := OmegaConf.to_container(OmegaConf.create(text)), dict) and plain:
            return plain
        page.leave_out(path, "there are no settings in it." if path.is_file() else "there is no such file.")
    except Exception as error:      # YAML, OmegaConf and the disk each have errors of their own
        page.leave_out(path, f"it cannot be read ({first_line(error)}).")
    return {}


def read_meta(folder: Path, page: Page) -> dict:
    """Reads the record of the newest checkpoint that has one."""
    for saved in reversed(checkpoints.all_steps(folder)):
        try:
            return checkpoints.read_meta(saved)
        except (OSError, ValueError, RecursionError) as error:
            page.leave_out(saved / "meta.json", f"it cannot be read ({error}).")
    return {}


def trained_on(history: list[dict]) -> dict[str, str]:
    """Says which commits, devices and versions of torch a run had; of several, from which step on each."""
    told = {}
    for key in ("commit", "device", "torch"):
        changes: list[tuple[str, str]] = []
        for entry in history:
            value = "unknown" if entry.get(key) is None else shown(entry[key])
            if not changes or changes[-1][0] != value:
                changes.append((value, shown(entry.get("step"))))
        steps = [f"{value} from step {step}" for value, step in changes]
        told[f"trained: {key}"] = " · ".join(steps) if len(steps) > 1 else changes[0][0]
    return told


def read_pictures(folder: Path, page: Page) -> tuple[list[dict], list[dict]]:
    """Copies a run's pictures: the sample grids, by step, and the others."""
    grids, others = [], []
    for path in sorted((folder / "samples").glob("*.png")) + sorted(folder.glob("*.png")):
        try:
            with Image.open(path) as picture:
                width, height = picture.size
                picture.verify()
            copied = page.keep(f"{folder.name}-{path.stem}".replace(".", "-") + ".png", path.read_bytes())
        except Exception as error:      # Pillow's errors have no common class
            page.leave_out(path, f"it is no whole picture ({error}).")
            continue
        shape = {"file": copied, "width": width, "height": height}
        step = re.fullmatch(r"step-(\d+)", path.stem)
        if step and path.parent.name == "samples":
            grids.append({"step": int(step[1]), **shape})
        else:
            others.append({"name": path.name, **shape})
    return sorted(grids, key=lambda grid: grid["step"]), others


# ---- scores ---------------------------------------------------------------------------------------------------------


def dig(value: object, *keys: str) -> object:
    """Looks a value up in groups within groups; None where one of them is missing or another thing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def metric_label(metric: str, extractor: object) -> str:
    """Names a score; a Fréchet distance is FID on Inception's features only."""
    if metric in ("fid", "sfid"):
        if extractor is None:
            return f"{metric} (on which features is not recorded)"
        if dig(extractor, "name") in INCEPTION:
            return metric.upper() if metric == "fid" else "sFID"
        return f"Fréchet distance on {dig(extractor, 'name') or 'unknown'} features (recorded as {metric}; no FID)"
    if metric.startswith("fd_"):
        return f"Fréchet distance on {dig(extractor, 'name') or metric[3:]} features ({metric}; no FID)"
    return {"inception_score": "Inception Score"}.get(metric, metric.replace("_", " "))


def guidance_label(guidance: object) -> str:
    if not isinstance(guidance, dict):
        return "unguided"
    scale = guidance.get("scale")
    words = [f"scale {scale:g}" if is_number(scale) else f"scale {scale}"]
    words += [f"{key} {shown(guidance[key])}" for key in ("gamma1", "gamma2") if guidance.get(key)]
    routes = guidance["routes"] if isinstance(guidance.get("routes"), list) else []
    words += [f"on {dig(route, 'start_layer_idx')}→{dig(route, 'end_layer_idx')}" for route in routes]
    words += ["label dropped"] if guidance.get("drop_label") else []
    words += [f"weak of step {dig(guidance, 'weak', 'step')} ({str(dig(guidance, 'weak', 'weights_sha256'))[:8]})"
              ] if guidance.get("weak") else []
    words += [f"interval {shown(guidance['interval'])}"] if guidance.get("interval") else []
    words += [f"first {shown(guidance['channels'])} channels"] if guidance.get("channels") else []
    return "guided, " + ", ".join(words)


def conditions(row: dict) -> dict[str, str]:
    """Takes out of a row what must agree for two scores to be compared."""
    source = row["source"]
    found = {
        "features": dig(row, "extractor", "name"), "feature space": dig(row, "extractor", "space"),
        "feature weights": (str(dig(row, "extractor", "sha256") or ""))[:12] or None,
        "reference": dig(row, "reference", "path"), "reference hash": str(dig(row, "reference", "sha256") or "")[:12],
        "image rule": row.get("image_rule"), "resolution": row.get("resolution"), "images": row.get("images"),
        "seeds": source.get("seeds"), "classes": source.get("classes"), "sampling steps": source.get("num_steps"),
        "sampler": source.get("sampler"), "precision": source.get("precision"), "weights": source.get("weights"),
        "autoencoder": source.get("autoencoder"),
    }
    return {key: shown(value) for key, value in found.items() if value not in (None, "")}


def code_of(row: dict) -> str | None:
    """Says what drew and scored: versions, or in an older row the hash of all code."""
    versions = {"drawing": row["source"].get("drawing_version"), "scoring": row.get("scoring_version")}
    return ", ".join(f"{key} {value}" for key, value in versions.items() if value) or row.get("code_sha256")


def read_scores(folder: Path, page: Page) -> list[dict]:
    """Reads results.jsonl, a score for each metric of each row."""
    path = folder / "results.jsonl"
    rows = rows_of(path, page) if path.is_file() else []
    scores, foreign, broken = [], 0, 0
    for row in rows:
        if not isinstance(row.get("source"), dict) or not isinstance(row.get("metrics"), dict):
            foreign += 1
            continue
        guidance = row["source"].get("guidance")
        for metric, value in row["metrics"].items():
            if not is_number(value):
                broken += 1
                continue
            step = row["source"].get("step")
            scores.append({
                "metric": metric, "label": metric_label(metric, row.get("extractor")), "value": value,
                "step": step if is_number(step) else None, "n": row.get("images"),
                "guided": guidance_label(guidance), "guidance": guidance if isinstance(guidance, dict) else None,
                "higher": metric in HIGHER_IS_BETTER, "conditions": conditions(row), "device": row.get("device"),
                "versions": row.get("versions"), "code": code_of(row), "finished": row.get("finished"),
                "processes": row.get("processes"), "in_training": bool(row["source"].get("in_training")),
            })
    if foreign:
        page.leave_out(path, f"{counted(foreign, 'row')} that hold no scores of ours.")
    if broken:
        page.leave_out(path, f"{counted(broken, 'score')} that are no finite numbers.")
    return scores


def along(columns: dict[str, list], step: float | None, axis: str) -> float | None:
    """Says how many images or seconds a run had taken at a step, by interpolation; None where its rows do not tell."""
    known = [(0.0, 0.0), *((x, y) for x, y in zip(columns.get("step", ()), columns.get(axis, ()), strict=False)
                           if y is not None)]
    if step is None or not 0 <= step <= known[-1][0]:
        return None
    for (x0, y0), (x1, y1) in zip(known, known[1:], strict=False):
        if x0 <= step <= x1 and x1 > x0:
            return y0 + (y1 - y0) * (step - x0) / (x1 - x0)
    return 0.0


def gather_curves(runs: list[dict], page: Page) -> list[dict]:
    """Groups scores into figures: in one are those of one metric under the same conditions, a line a run and guidance.

    Of a step that was scored twice the later score is drawn.
    """
    figures: dict[str, dict] = {}
    for index, run in enumerate(runs):
        again = 0
        for score in run["scores"]:
            if score["step"] is None:
                continue
            key = json.dumps([score["metric"], score["conditions"]], sort_keys=True)
            figure = figures.setdefault(key, {"metric": score["metric"], "label": score["label"], "n": score["n"],
                                              "higher": score["higher"], "conditions": score["conditions"],
                                              "lines": {}})
            points = figure["lines"].setdefault((index, score["guided"]), {})
            again += score["step"] in points
            points[score["step"]] = score["value"]
        if again:
            page.leave_out(f"{run['name']}, scores", f"{counted(again, 'score')} of which a later one is drawn; the "
                                                     f"table has all.")
    for figure in figures.values():
        figure["lines"] = [
            {"run": index, "guided": guided, "step": sorted(points),
             "images": [along(runs[index]["all"], step, "images") for step in sorted(points)],
             "elapsed_s": [along(runs[index]["all"], step, "elapsed_s") for step in sorted(points)],
             "value": [points[step] for step in sorted(points)]}
            for (index, guided), points in figure["lines"].items()]
        figure["lines"].sort(key=lambda line: (line["run"], line["guided"] != "unguided", line["guided"]))
    # Those with the most points first: an evaluation in training before what was scored once.
    return sorted(figures.values(), key=lambda figure: -max(len(line["step"]) for line in figure["lines"]))


def gather_landscapes(runs: list[dict]) -> list[dict]:
    """Groups guided scores that differ in scale, gamma1 and gamma2 alone: a landscape where there are two or more."""
    found: dict[str, dict] = {}
    for index, run in enumerate(runs):
        unguided = {json.dumps([score["metric"], score["step"], score["conditions"]], sort_keys=True): score["value"]
                    for score in run["scores"] if score["guidance"] is None}
        for score in run["scores"]:
            if score["guidance"] is None:
                continue
            rest = {key: value for key, value in score["guidance"].items() if key not in ("scale", "gamma1", "gamma2")}
            same = json.dumps([score["metric"], score["step"], score["conditions"]], sort_keys=True)
            group = found.setdefault(json.dumps([index, same, rest], sort_keys=True), {
                "run": index, "metric": score["metric"], "label": score["label"], "n": score["n"], "rest": flat(rest),
                "step": score["step"], "higher": score["higher"], "conditions": score["conditions"],
                "unguided": unguided.get(same), "points": {}})
            place = tuple(shown(score["guidance"].get(key)) for key in ("scale", "gamma1", "gamma2"))
            group["points"][place] = score["value"]
    for group in found.values():
        group["points"] = [[*place, value] for place, value in group["points"].items()]
    return [group for group in found.values() if len(group["points"]) > 1]


# ---- a run, a study -------------------------------------------------------------------------------------------------


def read_run(folder: Path, page: Page) -> dict | None:
    """Reads all that a run's folder holds; None, with the reason among what is left out, where that is nothing."""
    if not folder.is_dir():
        page.leave_out(folder, "there is no such folder." if not folder.exists() else "it is no folder.")
        return None
    if not any((folder / name).exists() for name in ("metrics.jsonl", "results.jsonl", "config.yaml", "checkpoints")):
        page.leave_out(folder, "it is no training run: it has no metrics.jsonl, results.jsonl, config.yaml or "
                               "checkpoints.")
        return None
    columns = read_metrics(folder / "metrics.jsonl", page)
    if not columns:
        page.leave_out(folder / "metrics.jsonl", "there are no rows yet, so this run has no curves.")
    meta, scores = read_meta(folder, page), read_scores(folder, page)
    config = read_config(folder, page) or (meta.get("config") if isinstance(meta.get("config"), dict) else {})
    grids, others = read_pictures(folder, page)
    chosen = thinned(columns)
    count = len(columns.get("step", ()))
    full = page.keep(f"{folder.name}-rows".replace(".", "-") + ".js", compact(columns)) if len(chosen) < count else None
    record = {key: value for key, value in meta.items() if key not in ("config", "files")}
    history = record.get("history")
    if isinstance(history, list) and history and all(isinstance(entry, dict) for entry in history):
        record |= trained_on(record.pop("history"))
    environment = flat(record) | {
        f"scored: {key}": " · ".join(sorted({shown(score[key]) for score in scores if score[key] is not None}))
        for key in ("device", "processes", "versions", "code") if any(score[key] is not None for score in scores)}
    last = {name: next((v for v in reversed(values) if v is not None), None) for name, values in columns.items()}
    return {
        "name": folder.name, "path": str(folder), "config": flat(config), "environment": environment,
        "all": columns, "columns": {name: [values[row] for row in chosen] for name, values in columns.items()},
        "rows": count, "full": full, "scores": scores, "grids": grids, "pictures": others, "last": last,
        "steps": config.get("steps"), "routed": bool(dig(meta, "network", "routes") or dig(config, "model", "routes")),
        "drawn": {key: shown(value) for key, value in (
            ("samples.seeds", dig(config, "samples", "seeds")), ("samples.classes", dig(config, "samples", "classes")),
            ("samples.num_steps", dig(config, "samples", "num_steps")), ("seed", config.get("seed")),
            ("latents", [dig(meta, "network", key) for key in ("in_channels", "input_size", "num_classes")]),
        ) if config},
    }


def tell_apart(runs: list[dict]) -> None:
    """Names each run by its folder, with as much of the path before it as sets it apart."""
    for depth in range(2, 1 + max((len(Path(run["path"]).parts) for run in runs), default=0)):
        names = [run["name"] for run in runs]
        for run in runs:
            if names.count(run["name"]) > 1:
                run["name"] = "/".join(Path(run["path"]).parts[-depth:])


def study_file(place: Path) -> Path:
    return place if place.suffix == ".json" else place / "study.json"


def read_study(place: Path, page: Page) -> dict | None:
    """Reads study.json as scores over steps: mean, standard deviation and n over seeds, for each variant."""
    path = study_file(place)
    try:
        plain = read_json(path)
    except (OSError, ValueError) as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else f"it cannot be read ({error})"
        page.leave_out(path, f"{why}; scripts/study.py tasks=[report] writes it.")
        return None
    if not isinstance(plain, dict) or not isinstance(plain.get("runs"), list):
        page.leave_out(path, "it is no study of scripts/study.py: it has no runs.")
        return None
    scores, unfinished, foreign = [], [], 0
    for run in plain["runs"]:
        if not isinstance(run, dict) or not isinstance(run.get("scores"), list) or "variant" not in run:
            foreign += 1
            continue
        if not is_number(run.get("steps")) or not is_number(run.get("step")) or run["step"] < run["steps"]:
            unfinished.append(f"{run['variant']}, seed {run.get('seed')}: {run.get('step')} of "
                              f"{run.get('steps') or '?'} steps")
        for score in run["scores"]:
            if isinstance(score, dict) and is_number(score.get("value")) and is_number(score.get("step")):
                kept = {key: value for key, value in score.items() if not isinstance(value, dict | list)}
                scores.append({"variant": str(run["variant"]), "seed": run.get("seed"), **kept})
            else:
                foreign += 1
    if foreign:
        page.leave_out(path, f"{counted(foreign, 'run or score')} that cannot be read.")
    groups: dict[tuple, dict] = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for score in scores:
        group = groups[str(score.get("metric")), str(score.get("guidance")), score.get("num_samples")]
        group[score["variant"]][score["step"]][score["seed"]] = score
    figures = []
    for (metric, guided, n), variants in sorted(groups.items(), key=lambda item: (item[0][1] != "unguided", str(item))):
        lines = []
        for variant, by_step in variants.items():
            line = defaultdict(list)
            for step, by_seed in sorted(by_step.items()):
                values = [score["value"] for score in by_seed.values()]
                first = next(iter(by_seed.values()))
                for axis in ("images", "seconds", "flops"):
                    line[axis].append(first.get(axis) if is_number(first.get(axis)) else None)
                line["step"].append(step)
                line["mean"].append(statistics.mean(values))
                line["deviation"].append(statistics.stdev(values) if len(values) > 1 else None)
                line["n"].append(len(values))
                line["values"].append(values)
            lines.append({"variant": variant, **line})
        one = next(score for score in scores if str(score.get("metric")) == metric)
        label = metric_label(metric, {"name": one["extractor"]} if one.get("extractor") else None)
        figures.append({"metric": metric, "label": label, "guided": guided, "n": n, "lines": lines})
    crossings = [crossing for crossing in plain.get("crossings") or () if isinstance(crossing, dict)]
    return {"name": str(plain.get("name") or path.parent.name), "path": str(path), "figures": figures,
            "scores": scores, "unfinished": unfinished, "crossings": crossings,
            "environment": flat({key: plain[key] for key in plain if key not in ("runs", "crossings", "name")})}


# ---- the page -------------------------------------------------------------------------------------------------------


def library_files() -> list[Path]:
    """Finds the plotting library's files in the installed package, without importing it; raises ValueError."""
    spec = importlib.util.find_spec("bokeh")
    folder = spec and Path(spec.submodule_search_locations[0]) / "server" / "static" / "js"
    if not folder or not all((folder / name).is_file() for name in LIBRARIES):
        raise ValueError("The report's plots are drawn by Bokeh, which is not installed: pip install -r "
                         "requirements-train.txt.")
    return [folder / name for name in LIBRARIES]


def folders_of(cfg: ReportSettings, page: Page) -> list[Path]:
    """Lists the runs to show: those given, or else those of the study; one that is given twice is shown once."""
    given = [Path(run) for run in cfg.runs]
    if not given and cfg.study_dir is not None:
        given = sorted(path for path in study_file(Path(cfg.study_dir)).parent.glob("runs/*") if path.is_dir())
    folders: dict[Path, Path] = {}
    for folder in given:
        if folder.resolve() in folders:
            page.leave_out(folder, "it is given twice and shown once.")
        folders.setdefault(folder.resolve(), folder)
    return list(folders.values())


def sources(cfg: ReportSettings) -> dict[str, tuple[int, int]]:
    """Returns time and size of every file that a page is made of, by path: what differs when there is news."""
    folders = folders_of(cfg, Page(Path(cfg.out)))
    paths = [path for folder in folders for pattern in (
        "metrics.jsonl", "results.jsonl", "config.yaml", "*.png", "samples/*.png", "checkpoints/step-*/meta.json")
        for path in folder.glob(pattern)]
    if cfg.study_dir is not None:
        paths.append(study_file(Path(cfg.study_dir)))
    found = {}
    for path in paths:
        try:
            status = path.stat()
            found[str(path)] = (status.st_mtime_ns, status.st_size)
        except OSError:      # gone since it was listed
            continue
    return found


def build(cfg: ReportSettings, live: bool = False) -> list[str]:
    """Writes <out>/index.html and <out>/files/; returns lines for the screen: where it is, and what was left out.

    The page is renamed into place last, and only then are files that it no longer names removed: a kill leaves the old
    page whole, or the new one. Raises ValueError where there is nothing to show.
    """
    libraries, page = library_files(), Page(Path(cfg.out))
    index = page.out / "index.html"
    if index.is_file() and OURS not in index.read_text(encoding="utf-8", errors="replace")[:2000]:
        raise ValueError(f"{index} is a page of another making and is not replaced: give out=<another folder>.")
    folders = folders_of(cfg, page)
    if not folders and cfg.study_dir is None:
        raise ValueError("Say what to show: python scripts/report.py runs/<name> …, or study=<its folder>.")
    runs = [run for folder in folders if (run := read_run(folder, page)) is not None]
    study = None if cfg.study_dir is None else read_study(Path(cfg.study_dir), page)
    if not runs and study is None:
        raise ValueError("There is nothing to show. " + " ".join(f"{where}: {why}" for where, why in page.left_out))
    tell_apart(runs)
    scores, landscapes = gather_curves(runs, page), gather_landscapes(runs)
    told = [f"left out: {where}: {why}" for where, why in page.left_out]
    scripts = [page.keep(path.name, path.read_bytes()) for path in libraries]
    built = datetime.datetime.now().astimezone()
    for run in runs:
        del run["all"]
    title = ", ".join([*([study["name"]] if study else []), *(run["name"] for run in runs)])
    data = {
        "built": built.isoformat(timespec="seconds"), "stamp": str(time.time_ns()), "live": cfg.every if live else None,
        "commit": commit(), "bokeh": version("bokeh"), "runs": runs, "scores": scores, "landscapes": landscapes,
        "study": study, "leftOut": page.left_out,
    }
    text = string.Template((PARTS / "template.html").read_text(encoding="utf-8")).substitute(
        generator=OURS, title=html.escape(title if len(title) <= 80 else title[:79] + "…"),
        style=(PARTS / "report.css").read_text(encoding="utf-8"),
        libraries="\n".join(f'<script defer src="{html.escape(script)}"></script>' for script in scripts),
        # In a script element only `<` could end the data or begin another element.
        data=json.dumps(finite(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        script=(PARTS / "report.js").read_text(encoding="utf-8"),
    )
    checkpoints.write_text(index, text)
    checkpoints.write_text(page.out / "files" / "stamp.js", f"newest({json.dumps(data['stamp'])});\n")
    for path in (page.out / "files").iterdir():
        if re.fullmatch(r".+-[0-9a-f]{12}\.[a-z0-9.]+", path.name) and path.name not in page.files:
            checkpoints.remove(path)
    return [f"{index}: {counted(len(runs), 'run')}" + (f", the study {study['name']}" if study else ""), *told]


def watch(cfg: ReportSettings) -> None:
    """Builds the page whenever a file that it is made of has changed, until Ctrl-C."""
    seen, said = None, None
    print(f"Looks every {cfg.every:g} s for something new; Ctrl-C ends it.")
    try:
        while True:
            now = sources(cfg)
            if now != seen:
                try:
                    lines = build(cfg, live=True)
                except (ValueError, OSError) as error:      # nothing there yet, or a file that is just being replaced
                    lines = [str(error)]
                if lines != said:
                    print("\n".join(lines))
                seen, said = now, lines
            time.sleep(cfg.every)
    except KeyboardInterrupt:
        print("\n" + "\n".join(build(cfg)[:1]) + "; stopped by Ctrl-C.")


@command("report", ReportSettings)
def main(cfg: ReportSettings) -> None:
    if cfg.watch:
        watch(cfg)
    else:
        print("\n".join(build(cfg)))


def as_settings(arguments: list[str]) -> list[str]:
    """Turns `runs/a runs/b study=x` into settings, `runs` and `study_dir`: to Hydra, `study` is a group of configs."""
    arguments = [f"study_dir={argument[6:]}" if argument.startswith("study=") else argument for argument in arguments]
    folders = [argument for before, argument in zip(["", *arguments], arguments, strict=False)
               if "=" not in argument and not argument.startswith("-") and not before.startswith("-")]
    if not folders:
        return arguments
    if any(argument.startswith("runs=") for argument in arguments):
        raise SystemExit(f"report.py: runs are given twice, as {folders[0]} and by runs=: give them in one way.")
    quoted = ",".join("'" + folder.replace("\\", "\\\\").replace("'", "\\'") + "'" for folder in folders)
    return [*(argument for argument in arguments if argument not in folders), f"runs=[{quoted}]"]


if __name__ == "__main__":
    sys.argv[1:] = as_settings(sys.argv[1:])
    main()
