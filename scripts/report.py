"""Turns training runs, their scores and a study into one HTML page that opens from disk: curves, images, settings.

The page is a Bokeh document that includes the library, so it needs no network. Commands: configs/report.yaml.
"""

import hashlib
import html
import json
import math
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import bokeh.models as bk
import numpy as np
from bokeh.embed import file_html
from bokeh.palettes import Colorblind
from bokeh.plotting import Document, column, figure, row

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from runtime import files
from runtime.command import command, commit
from runtime.schema import Location, Positive, Settings, as_recorded, as_text, read_record
from runtime.typed import read_foreign_yaml
from scoring.results import guided, read_results
from scripts.comparison import RecordedStudy
from weights import checkpoint as checkpoints

AXES = {"step": "steps", "images": "images", "hours": "hours"}
# What must agree, in a row of results.jsonl or in its source, for two scores to be drawn together.
CONDITIONS = ("images", "extractor", "reference", "image_rule", "resolution", "seeds", "classes", "labels", "num_steps",
              "sampler", "precision", "weights", "autoencoder", "sampling_version", "scoring_version")
HIGHER = ("inception_score", "precision", "recall")  # of these the highest is the best, of other metrics the lowest
LEAST_SPAN = 0.1  # of an axis of values, over the largest of them, so that noise does not look like a jump
ENVIRONMENT = ("python", "torch", "device", "world", "tf32", "commit")
STRETCHES = 1000  # of rows, into which a curve of more than twice as many rows is condensed
COLORS, DASHES = Colorblind[8], ("solid", "dashed", "dotted", "dashdot")
GRID = "display: grid !important; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr))"
IN_COLUMNS = {"sizing_mode": "stretch_width", "stylesheets": [f":host {{ {GRID} }}"]}
OURS = '<meta name="generator" content="tread report">'
# A dark page is the light one inverted; its pictures are inverted back.
HEAD = "{% block preamble %}" + OURS + """<meta name="viewport" content="width=device-width, initial-scale=1"><style>
body { background: #fff; font-family: sans-serif } body > div { max-width: 1280px; margin: 0 auto }
@media screen and (prefers-color-scheme: dark) { :root { filter: invert(1); --picture: invert(1) } }
</style>{% endblock %}"""
CHOOSE = """
for (const plot of plots) {
  for (const {glyph} of plot.renderers) glyph.x = {field: axes[axis.active]}
  plot.below[0].axis_label = axis.labels[axis.active]
  plot.y_scale = scales[+log.active]
  plot.left[0].ticker = tickers[+log.active]
  setTimeout(() => plot.reset.emit())
}"""
SAVE_CSV = """
const heads = Object.keys(source.data)
const plain = text => /^[=+\\-@\\t\\r]/.test(text) && isNaN(text) ? "'" + text : text   // a formula to a spreadsheet
const written = value => typeof value != "number" ? `"${plain(value ?? "").replaceAll('"', '""')}"`
  : !isFinite(value) ? "" : Number.isInteger(value) ? value : Number(value.toPrecision(7))
const rows = Array.from({length: source.get_length()}, (_, i) => heads.map(head => source.data[head][i]))
const href = URL.createObjectURL(new Blob([heads, ...rows].map(cells => cells.map(written).join() + "\\n")))
Object.assign(document.createElement("a"), {href, download: file}).click()"""
OPEN = """
const titles = tabs.tabs.map(tab => tab.title)      // the address keeps the tab over a reload
tabs.active = Math.max(0, titles.indexOf(location.hash.slice(1)))
tabs.properties.active.change.connect(() => history.replaceState(null, "", "#" + titles[tabs.active]))
if (matchMedia("(pointer: coarse)").matches)      // a finger scrolls the page
  for (const plot of plots) plot.toolbar.active_drag = null
let touched = Date.now()
for (const kind of ["pointermove", "wheel", "keydown"]) addEventListener(kind, () => touched = Date.now())
if (wait) setInterval(() => Date.now() - touched > wait && location.reload(), wait)"""


class ReportSettings(Settings):
    """configs/report.yaml."""

    runs: list[Location]
    study_dir: Location | None
    out: Location | None
    watch: bool
    every: Positive


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def flat(value: object, prefix: str = "") -> dict[str, str]:
    """Flattens groups, and lists of groups, to `group.key`; writes each value as a command line does."""
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        value = dict(enumerate(value))
    if isinstance(value, dict) and (value or not prefix):
        return {key: text for name, part in value.items() for key, text in flat(part, f"{prefix}.{name}").items()}
    return {prefix.removeprefix("."): value if isinstance(value, str) else json.dumps(value, default=str)}


def read_metrics(path: Path) -> dict[str, np.ndarray]:
    """Reads metrics.jsonl as columns, ordered by step; of two rows of a step the later one counts."""
    rows = {found["step"]: found for found in files.read_rows(path) if is_number(found.get("step"))}
    rows = [found for _, found in sorted(rows.items())]
    columns = {name: np.array([found[name] if is_number(found.get(name)) else math.nan for found in rows])
               for name in dict.fromkeys(name for found in rows for name in found)}
    if "elapsed_s" in columns:
        columns["hours"] = columns.pop("elapsed_s") / 3600
    # Seven digits make a page half as large; counts stay exact.
    return {name: values if name in ("step", "images") else values.astype(np.float32)
            for name, values in columns.items() if not np.isnan(values).all()}


def read_scores(path: Path, run: str, columns: dict[str, np.ndarray]) -> list[dict]:
    """Reads results.jsonl as one entry per score, with the keys of study.json; tables omit keys that begin with `_`."""
    scores = []
    for found in read_results(path):
        source, step = found["source"], found["source"].get("step")
        place = {axis: float(np.interp(step, [0, *columns["step"]], [0, *columns[axis]], right=math.nan))
                 for axis in ("images", "hours") if axis in columns and step is not None}
        scores += [{
            "run": run, "metric": metric, "value": value, "num_samples": found["images"],
            "guidance": guided(found) if source.get("guidance") else "unguided", "step": step, **place,
            "features": found["extractor"]["name"],
            "reference": found["reference"]["path"], "seeds": source.get("seeds"), "_conditions": json.dumps(
                [found.get(key, source.get(key)) for key in CONDITIONS], sort_keys=True)}
            for metric, value in found["metrics"].items()]
    return scores


def read_study(path: Path) -> tuple[str, dict[str, list]]:
    """Reads study.json: its name, and its tables by name, with the scores of all runs as one."""
    study = read_record(RecordedStudy, path, "Move it away.")
    shown = ("metric", "value", "num_samples", "guidance", "step", "images", "seconds", "flops")
    scores = [{"variant": run["variant"], "seed": run["seed"], **{key: score.get(key) for key in shown}}
              for run in study.runs for score in run["scores"]]
    return study.name, {"floor": study.floor, "crossings": study.crossings, "scores": scores}


def read_run(folder: Path, name: str) -> SimpleNamespace:
    """Reads all that a run's folder holds, its pictures as paths and the grids by step; follows no link out of it."""
    def own(*paths: Path) -> list[Path]:
        return [path for path in paths if path.is_file() and files.is_inside(path, folder)]

    saved = [path for path in checkpoints.all_steps(folder)[-1:] if own(path / "meta.json")]
    meta = checkpoints.read_meta(saved[0]) if saved else {}
    config, metrics, results = (next(iter(own(folder / name)), Path(os.devnull))
                                for name in ("config.yaml", "metrics.jsonl", "results.jsonl"))
    columns = read_metrics(metrics)
    with config.open(encoding="utf-8", errors="replace") as file:
        head = file.readline()
    record = {key: value for key, value in meta.items() if key not in ("config", "files")}
    machine = flat(record | (record.get("history") or [{}])[-1])
    grids = {int(path.stem[5:]): path for path in own(*sorted(folder.glob("samples/step-" + 8 * "[0-9]" + ".png")))}
    return SimpleNamespace(
        name=name, summary=head[1:].strip() if head.startswith("#") else "", columns=columns,
        source=bk.ColumnDataSource(columns), grids=grids,
        scores=read_scores(results, name, columns),
        pictures=sorted({*own(*folder.glob("*.png"), *folder.glob("samples/*.png"))} - {*grids.values()}),
        config=flat(read_foreign_yaml(config) if config.is_file() else meta.get("config", {})),
        environment={key: machine[key] for key in ENVIRONMENT if key in machine}, record=flat(record))


def condensed(data: dict[str, np.ndarray], y: str, axes: dict[str, str]) -> dict[str, np.ndarray]:
    """Condenses rows into stretches: means of `y` and the axes, and the lowest and the highest `y`; ignores NaN."""
    starts = np.linspace(0, len(data[y]), STRETCHES, endpoint=False).astype(int)
    with np.errstate(invalid="ignore"):  # 0/0, a stretch without a number, is a gap
        means = {name: np.add.reduceat(np.nan_to_num(data[name].astype(float)), starts)
                 / np.add.reduceat(1.0 - np.isnan(data[name]), starts) for name in (y, *axes) if name in data}
    return {**means, "low": np.fmin.reduceat(data[y], starts), "high": np.fmax.reduceat(data[y], starts)}


def span(y: str, lines: list[tuple]) -> dict[str, float]:
    """Returns start and end of an axis whose values differ by less than LEAST_SPAN; {} for any other axis."""
    values = np.concatenate([source.data[y] for _, source, *_ in lines])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    middle, half = (low + high) / 2, LEAST_SPAN / 2 * max(abs(low), abs(high))
    return {"start": middle - half, "end": middle + half} if high - low < 2 * half else {}


def draw(title: str, y: str, lines: list[tuple], axes: dict[str, str]) -> figure:
    """Draws lines (label, source, colour, dash) of a column over the first axis; a click in the legend hides one."""
    x, hovered = next(iter(axes)), []
    plot = figure(title=title, height=290 + 22 * len(lines), sizing_mode="stretch_width", toolbar_location="above",
                  tools="box_zoom,xpan,xwheel_zoom,reset,save", active_drag="box_zoom", min_border_right=25,
                  y_range=bk.DataRange1d(only_visible=True, **span(y, lines)), x_axis_label=axes[x])
    for label, source, color, dash in lines:
        look = {"name": label, "legend_label": label, "color": COLORS[color % len(COLORS)]}
        if len(source.data[y]) > 2 * STRETCHES:
            source = bk.ColumnDataSource(condensed(source.data, y, axes))
        hovered.append(plot.line(x, y, source=source, line_dash=DASHES[dash % len(DASHES)], line_width=2, **look))
        if "low" in source.data:
            plot.varea(x, "low", "high", source=source, fill_alpha=0.15, **look)
        if len(source.data[y]) <= 50:
            plot.scatter(x, y, source=source, size=5, **look)
    plot.add_tools(bk.HoverTool(renderers=hovered, mode="vline", tooltips=[
        ("", "$name"), ("value", f"@{{{y}}}{{0,0.[00000]}}"),
        *((name, f"@{{{axis}}}{{0,0.[000]}}") for axis, name in axes.items())]))
    plot.toolbar.logo, plot.xaxis.formatter = None, bk.NumeralTickFormatter(format="0.[000]a")
    plot.yaxis.formatter = bk.BasicTickFormatter(power_limit_low=-5)
    plot.add_layout(plot.legend[0], "below")
    plot.legend.update(click_policy="hide", location="center", border_line_color=None, padding=0, margin=0)
    return plot


def score_curves(scores: list[dict]) -> list[tuple]:
    """Returns title, column and lines of a figure for each group of comparable scores; a line has at least two steps.

    If a step was scored twice, the later score counts.
    """
    figures: dict = {}
    runs, guidances = (list(dict.fromkeys(score[key] for score in scores)) for key in ("run", "guidance"))
    for score in scores:
        if is_number(score["step"]) and is_number(score["value"]):
            title = f"{score['metric']} on {score['features']} features, {score['num_samples']} images"
            by_line = figures.setdefault((title, score["_conditions"]), {})
            by_line.setdefault((score["run"], score["guidance"]), {})[score["step"]] = score
    curves = []
    for (title, _), by_line in figures.items():
        lines = []
        for (run, guidance), by_step in by_line.items():
            data = {key: np.array([by_step[step].get(key) for step in sorted(by_step)], float)
                    for key in ("value", *AXES)}
            look = runs.index(run), guidances.index(guidance) + runs.index(run) // len(COLORS)
            lines += [(f"{run}, {guidance}", bk.ColumnDataSource(data), *look)] if len(by_step) > 1 else []
        curves += [(title, "value", lines)] if lines else []
    return curves


def best_of(scores: list[dict]) -> list[dict]:
    """Returns the best score of each group of at least two comparable ones, over steps and guidance."""
    groups: dict = {}
    for score in scores:
        if is_number(score["value"]):
            groups.setdefault((score["metric"], score["_conditions"]), []).append(score)
    return [(max if metric in HIGHER else min)(group, key=lambda score: score["value"])
            for (metric, _), group in groups.items() if len(group) > 1]


def prose(content: str) -> bk.Div:
    return bk.Div(text=content, sizing_mode="stretch_width",
                  stylesheets=[".bk-clearfix { width: 100%; overflow-wrap: anywhere }"])


def tied(curves: list[tuple]) -> list:
    """Returns figures, and the buttons that choose their common axis and scale."""
    plots = [draw(*curve, AXES) for curve in curves]
    for plot in plots:
        plot.x_range = plots[0].x_range
    axis, log = bk.RadioButtonGroup(labels=list(AXES.values()), active=0), bk.Toggle(label="logarithmic", width=100)
    chosen = bk.CustomJS(code=CHOOSE, args={
        "plots": plots, "axes": list(AXES), "axis": axis, "log": log, "scales": [bk.LinearScale(), bk.LogScale()],
        "tickers": [bk.BasicTicker(), bk.LogTicker()]})
    for choice in (axis, log):
        choice.js_on_change("active", chosen)
    return [row(axis, log, styles={"flex-wrap": "wrap"}), row(plots, **IN_COLUMNS)] if plots else []


def download(file: str, source: bk.ColumnDataSource) -> bk.Button:
    button = bk.Button(label=f"{file}.csv", width_policy="min")
    button.js_on_click(bk.CustomJS(code=SAVE_CSV, args={"source": source, "file": button.label}))
    return button


def table(rows: list[dict], file: str) -> list:
    """Returns a table that can be sorted by a column, and its download button; numbers have six digits."""
    names = dict.fromkeys(name for found in rows for name in found if not name.startswith("_"))
    cells = {name: ["" if value is None else float(f"{value:.6g}") if is_number(value) else as_text(value)
                    for value in (found.get(name) for found in rows)] for name in names}
    source = bk.ColumnDataSource(cells)
    columns = [bk.TableColumn(field=name, title=html.escape(name), width=25 + 7 * min(
        60, max(len(str(cell)) for cell in (name, *values)))) for name, values in cells.items()]
    return [bk.DataTable(source=source, columns=columns, index_position=None, reorderable=False, autosize_mode="none",
                         sizing_mode="stretch_width", height=min(600, 45 + 25 * len(rows))),
            download(file, source)] if rows else []


def gallery(pictures: list[tuple[str, Path]], out: Path) -> str:
    """Returns HTML that shows pictures under their titles; copies them into `out`, named by a hash of their content."""
    cells = []
    for title, picture in pictures:
        content = picture.read_bytes()
        name = f"files/{hashlib.sha256(content).hexdigest()[:16]}.png"
        if not (out / name).is_file():
            with files.atomic_write(out / name) as partial:
                partial.write_bytes(content)
        image = f'<img src="{name}" style="max-width: 100%; filter: var(--picture)">'
        cells.append(f'<div>{html.escape(title)}<br><a href="{name}" target="_blank">{image}</a></div>')
    return f'<div style="{GRID}">{"".join(cells)}</div>'


def overview(runs: list[SimpleNamespace], plots: list[figure], out: Path) -> list:
    """Shows what each run trains, the newest grids, the loss and the scores, and the last row of each run."""
    trained, rows = [html.escape(run.summary) for run in runs if run.summary], []
    for run in runs:
        last = {name: next((float(value) for value in values[::-1] if math.isfinite(value)), None)
                for name, values in run.columns.items()}
        scored = [score for score in run.scores if score["guidance"] == "unguided" and is_number(score["step"])]
        score = max(scored, key=lambda score: score["step"], default={})
        rows.append({"run": run.name, **last, **{key: score.get(key) for key in ("metric", "value", "num_samples")}})
    grids = [prose(gallery([(f"{run.name}, step {step:,}", run.grids[step])], out))
             for run in runs for step in [*run.grids][-1:]]
    parts = [row(cells, **IN_COLUMNS) for cells in ([[*grids, *plots]] if len(runs) == 1 else [plots, grids]) if cells]
    if len({any(key.startswith("model.routes.") for key in run.config) for run in runs}) > 1:
        parts.append(prose("A routed run's loss is higher than a dense run's, as part of its tokens miss the middle "
                           "blocks: compare scores, not losses."))
    return [*[prose("<br>".join(trained))] * bool(trained), *parts, *table(rows, "runs")]


def grids_by_step(runs: list[SimpleNamespace], out: Path) -> list:
    """Shows the grids of all runs at the step that a slider chooses, and the runs' other pictures."""
    parts, pages = [], {f"{step:,}": gallery([
        (f"{run.name}, step {step:,}, seeds {run.config.get('samples.seeds')}", run.grids[step])
        for run in runs if step in run.grids], out) for step in sorted({step for run in runs for step in run.grids})}
    if pages:
        *_, newest = pages
        parts = [bk.CategoricalSlider(title="Step", categories=[*pages], value=newest), prose(pages[newest])]
        parts[0].js_on_change("value", bk.CustomJS(code="shown.text = pages[cb_obj.value]", args={
            "shown": parts[1], "pages": pages}))
    others = [(f"{run.name}: {path.name}", path) for run in runs for path in run.pictures]
    return parts + ([prose(gallery(others, out))] if others else [])


def side_by_side(runs: list[SimpleNamespace], part: str) -> list:
    """Compares a part of the runs in a table, what differs first."""
    values = [getattr(run, part) for run in runs]
    rows = [{"": "differs" if len({value.get(key) for value in values}) > 1 else "", "key": key,
             **{run.name: value.get(key) for run, value in zip(runs, values, strict=True)}}
            for key in dict.fromkeys(key for value in values for key in value)]
    return table(sorted(rows, key=lambda found: not found[""]), part)


def find_runs(cfg: ReportSettings) -> list[Path]:
    """Lists the folders of the given runs, or else of the study's; raises ValueError for a folder without a run."""
    def is_run(folder: Path) -> bool:
        return any((folder / name).exists() for name in ("metrics.jsonl", "results.jsonl", "config.yaml"))

    folders = [Path(run) for run in dict.fromkeys(cfg.runs)]
    for folder in folders:
        if not is_run(folder):
            raise ValueError(f"{folder} has no metrics.jsonl, results.jsonl or config.yaml: name the folder of a run.")
    if cfg.study_dir and not folders:
        folders = [folder for folder in sorted(Path(cfg.study_dir).glob("runs/*/")) if is_run(folder)]
    return folders


def page_path(cfg: ReportSettings, folders: list[Path]) -> Path:
    """Returns the folder of a page; by default each choice of runs or studies has one of its own."""
    if cfg.out:
        return Path(cfg.out)
    shown = [*([Path(cfg.study_dir)] if cfg.study_dir else []), *(folders if cfg.runs else [])]
    name = "+".join(folder.resolve().name for folder in shown)
    return Path("report", name if len(name) <= 100 else f"{name[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}")


def build(cfg: ReportSettings) -> str:
    """Writes <out>/index.html at once, and pictures into <out>/files; returns lines for the screen. Deletes nothing.

    Raises ValueError if there is nothing to show, or if the existing page is not ours.
    """
    folders = find_runs(cfg)
    out = page_path(cfg, folders)
    if (index := out / "index.html").is_file() and OURS not in index.read_text("utf-8", "replace")[:2000]:
        raise ValueError(f"{index} is not a page of this command and is not replaced: give out=<another folder>.")
    names = [folder.name for folder in folders]
    runs = []
    for folder, name in zip(folders, names, strict=True):
        with as_recorded(folder):
            runs.append(read_run(folder, name if names.count(name) == 1 else str(folder)))
    study, tables, drawn = "", {}, []
    if cfg.study_dir and (record := Path(cfg.study_dir, "study.json")).is_file():
        study, tables = read_study(record)
        drawn = [(path.name, path) for path in sorted(record.parent.glob("*.png"))
                 if path.is_file() and files.is_inside(path, record.parent)]
    if not runs and not study:
        raise ValueError(f"runs={cfg.runs} study={cfg.study_dir or 'null'} show nothing: give runs/<name> …, or the "
                         f"folder of a study.")
    scores = [score for run in runs for score in run.scores]
    columns = dict.fromkeys(name for run in runs for name, values in run.columns.items() if values.any())
    curves = [(name, name, [(run.name, run.source, i, i // len(COLORS)) for i, run in enumerate(runs)
                            if name in run.columns]) for name in columns if name not in AXES]
    score_lines = score_curves(scores)
    front = [draw(*curve, {"step": "steps"}) for curve in [*curves[:1], *score_lines[:1]]]

    def titled(tables: dict[str, list[dict]], prefix: str = "") -> list:
        return [part for name, rows in tables.items() if rows
                for part in (prose(f"<h3>{html.escape(name)}</h3>"), *table(rows, f"{prefix}{name}"))]

    contents = {
        "Overview": overview(runs, front, out) if runs else [],
        "Training": tied(curves) + [download(run.name, run.source) for run in runs if run.columns],
        "Scores": tied(score_lines) + titled({"best": best_of(scores), "scores": scores}),
        "Pictures": grids_by_step(runs, out),
        "Study": [prose(gallery(drawn, out))] * bool(drawn) + titled(tables, "study-"),
        "Settings": side_by_side(runs, "config"),
        "Environment": side_by_side(runs, "environment") + side_by_side(runs, "record"),
    }
    fits = {"min-width": "0", "overflow-x": "clip"}  # a legend of long names does not widen the page
    panels = [bk.TabPanel(title=name, child=column(parts, sizing_mode="stretch_width", styles=fits))
              for name, parts in contents.items() if parts]
    tabs = bk.Tabs(tabs=panels, sizing_mode="stretch_width", stylesheets=[".bk-headers-wrapper { flex-wrap: wrap }"])
    title = ", ".join([study] * bool(study) + [run.name for run in runs])
    built = time.strftime("Built on %d %B %Y, %H:%M")
    page = column(prose(f"<h2>{html.escape(title)}</h2>{built}, commit {commit()}."), tabs,
                  sizing_mode="stretch_width", margin=(0, 12))
    plots, alike = list(page.select({"type": bk.Plot})), defaultdict(list)
    for renderer in (renderer for plot in plots for renderer in plot.renderers):
        alike[renderer.name].append(renderer)
    for lines in alike.values():  # what is hidden in one figure is hidden in all
        for one, other in zip(lines, lines[1:] + lines[:1], strict=True):
            one.js_link("visible", other, "visible")
    doc = Document(title=title)
    doc.add_root(page)  # last, as each link in a document goes through all its figures
    doc.js_on_event("document_ready", bk.CustomJS(code=OPEN, args={
        "tabs": tabs, "plots": plots, "wait": 1000 * cfg.every if cfg.watch else None}))
    files.write_text(index, file_html(doc, resources="inline", template=HEAD))
    return "\n".join([f"{index}: {title}", *(
        f"best {best['metric']}: {best['value']:.5g}, {best['run']} at step {best['step']}, {best['guidance']}"
        for best in best_of(scores))])


def as_settings(arguments: list[str]) -> list[str]:
    """Turns `runs/a runs/b study=x` into settings, `runs` and `study_dir`: to Hydra, `study` is a group of configs."""
    given = [argument for before, argument in zip(["", *arguments], arguments, strict=False)
             if "=" not in argument and not argument.startswith("-") and not before.startswith("-")]
    others = [f"study_dir={argument[6:]}" if argument.startswith("study=") else argument
              for argument in arguments if argument not in given]
    return [*others, *([f"runs={json.dumps(given, ensure_ascii=False)}"] if given else [])]


@command("report", ReportSettings, rewrite=as_settings)
def main(cfg: ReportSettings) -> None:
    print(build(cfg))
    while cfg.watch:
        time.sleep(cfg.every)
        build(cfg)


if __name__ == "__main__":
    main()
