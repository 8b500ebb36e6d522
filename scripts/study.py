"""Trains variants × seeds, scores them the same way, and compares them: tables, figures, crossing points.

Each run is `train.py` and each later score `fid.py`, with the settings that configs/study/<name>.yaml lists, so that
any of them can be repeated by hand. Writes <out>/study.json, study.md, score-over-*.png, differences.png and
report/index.html. study.json keeps the scores of runs whose folders are gone, and `rows` takes those of other machines.
Commands: configs/study.yaml.
"""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
from omegaconf import OmegaConf
from pydantic import Field

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from dit import multiply_adds
from fid import OF_SAMPLING, ScoringSettings
from runtime import ranks
from runtime.command import command, commit, compose
from runtime.files import inside, read_rows, remove, write_text
from runtime.schema import (
    Count,
    Location,
    NonEmptyList,
    NonNegativeInt,
    Settings,
    Text,
    as_recorded,
    as_setting,
    one_of,
    read,
    read_record,
)
from scoring.results import read_results, tells_scores_apart
from scripts.comparison import (
    AXES,
    RecordedStudy,
    Timing,
    crossing,
    draw_differences,
    draw_figures,
    metrics_of,
    tables,
)
from training.run_folder import tells_runs_apart
from training.settings import TrainSettings
from weights import checkpoint as checkpoints
from weights.records import RouteSettings, build_network, build_schedule

Setting = Annotated[str, Field(pattern="=")]  # key=value
ROUTE_DEFAULTS = {name: field.default for name, field in RouteSettings.model_fields.items() if not field.is_required()}


class Variant(Settings):
    """A variant of configs/study/<name>.yaml; at_end, at_each and held_out add scores to those of its training."""

    train: list[Setting]
    seeds: list[NonNegativeInt] | None = None        # None: the study's
    at_end: list[str] = []                  # names of points, at which the last checkpoint is scored
    at_each: list[str] = []                 # and every checkpoint that is kept
    held_out: list[str] = []                # folders of latents for the loss; the first is that of training


class Matrix(Settings):
    """configs/study/<name>.yaml."""

    name: Text
    train: list[Setting]
    score: list[Setting]
    seeds: NonEmptyList[NonNegativeInt]
    variants: Annotated[dict[str, Variant], Field(min_length=1)]
    points: dict[str, list[list[Setting]]] = {}
    floor: list[list[Setting]] = []
    compare: list[Annotated[list[str], Field(min_length=2, max_length=2)]]


class StudySettings(Settings):
    """configs/study.yaml."""

    study: Matrix
    out: Location
    rows: list[Location]
    also: list[Setting]
    part: str | None
    tasks: NonEmptyList[one_of(["train", "score", "time", "report"])]
    rounds: Count
    steps_timed: Count
    only: NonEmptyList[Text] | None
    nice: NonNegativeInt
    threads: Count | None


class Run(Settings):
    """One training run of a study."""

    variant: str
    seed: NonNegativeInt
    folder: Path
    train: list[str]
    at_end: list[list[str]]
    at_each: list[list[str]]
    held_out: list[str]

    @property
    def steps(self) -> int | None:
        return values_by_key(tuple(self.train)).get("steps")

    @property
    def is_scored_in_training(self) -> bool:
        return bool(values_by_key(tuple(self.train)).get("evaluate.every"))


# ---- a study's runs -------------------------------------------------------------------------------------------------


def runs_of(cfg: StudySettings) -> list[Run]:
    """Lists the runs of a study: those of each compared pair, a seed at a time, then those of the other variants.

    So a study that ends early has both runs of each seed. Raises ValueError for unknown names.
    """
    study = cfg.study
    for key, name in [("study.compare", name) for pair in study.compare for name in pair] + [
            ("only", name) for name in cfg.only or ()]:
        if name not in study.variants:
            raise ValueError(f"{key} names {name}, but the variants are {', '.join(study.variants)}.")
    seeds = {name: study.seeds if variant.seeds is None else variant.seeds for name, variant in study.variants.items()}
    runs: dict[tuple[str, int], Run] = {}
    for group in [*study.compare, *([name] for name in study.variants)]:
        seeds_of_group = dict.fromkeys(seed for name in group for seed in seeds[name])
        for seed in seeds_of_group:
            for name in group:
                if seed in seeds[name] and (name, seed) not in runs:
                    runs[name, seed] = run_of(cfg, name, seed)
    return list(runs.values())


def run_of(cfg: StudySettings, name: str, seed: int) -> Run:
    """Makes a variant's run of a seed: replaces {runs} and {seed} in its settings, and names of points by points."""
    study, variant, folder = cfg.study, cfg.study.variants[name], Path(cfg.out).resolve() / "runs"
    run_dir = folder / f"{name}-seed{seed}"
    train = [text.replace("{runs}", str(folder)).replace("{seed}", str(seed))
             for text in (*study.train, *variant.train, *cfg.also)]

    def points(key: str) -> list[list[str]]:
        for group in getattr(variant, key):
            if group not in study.points:
                raise ValueError(f"study.variants.{name}.{key} names {group}, but the points are "
                                 f"{', '.join(study.points) or 'none'}.")
        return [point for group in getattr(variant, key) for point in study.points[group]]

    return Run(variant=name, seed=seed, folder=run_dir, held_out=variant.held_out,
               train=[*train, f"seed={seed}", f"name={run_dir.name}", f"run_dir={run_dir}"],
               at_end=points("at_end"), at_each=points("at_each"))


def check_commands(cfg: StudySettings, runs: list[Run]) -> None:
    """Raises ValueError for a variant whose settings train.py or fid.py would refuse, before the first run starts.

    One seed of each variant is checked, as the seed changes no other setting.
    """
    for run in {run.variant: run for run in runs}.values():
        try:
            settings_composed(tuple(run.train))
            for point in (*run.at_end, *run.at_each) if "score" in cfg.tasks else ():
                scored = [f"checkpoint={run.folder}", *cfg.study.score, *point]
                read(ScoringSettings, compose("fid", ScoringSettings, scored))
        except ValueError as error:
            raise ValueError(f"variant {run.variant}: {error}") from None


def waits_for(run: Run, runs: list[Run]) -> Run | None:
    """Returns the run of the study that this one starts from if that has not finished, else None."""
    parents = [other for other in runs if f"init_from={other.folder}" in run.train]
    return next((parent for parent in parents if not finished(parent)), None)


def own_part(runs: list[Run], part: str | None) -> list[Run]:
    """Returns the runs of this process; raises ValueError for a `part` of another form."""
    if part is None:
        return runs
    found = re.fullmatch(r"(\d+)/(\d+)", part)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"part={part}: write part=2/6 for the second of six.")
    return runs[int(found[1]) - 1 :: int(found[2])]


def call(cfg: StudySettings, program: str, settings: list[str]) -> None:
    """Runs one of our commands and forwards the signals that stop this one, so that it saves.

    Raises ValueError with the command if it fails.
    """
    environment = os.environ | ({} if cfg.threads is None else {"OMP_NUM_THREADS": str(cfg.threads)})
    line = ["nice", "-n", str(cfg.nice), sys.executable, str(ROOT / program), *settings]
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        if not received:  # `timeout` sends each signal twice, and a second one would end the run unsaved
            received.append(number)
            child.send_signal(number)

    # In a group of its own, as a second signal would end it at once: Ctrl-C reaches it from here alone.
    child = subprocess.Popen(line, env=environment, process_group=0)
    before = {number: signal.signal(number, forward) for number in ranks.stop_signals()}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if 0 < code <= 128:  # also after a signal: it has not saved
        raise ValueError(f"{program} {' '.join(settings)} ended with {code}, for the reason above. Fix it and rerun "
                         f"the same command to resume.")
    if received or code:
        sys.exit(128 + received[0] if received else code if code > 0 else 128 - code)


def record_of(run: Run) -> dict | None:
    """Reads meta.json of a run's latest checkpoint; None without one. Raises ValueError for another run's."""
    folder = checkpoints.latest(run.folder) if run.folder.is_dir() else None
    if folder is None:
        return None
    meta, made = checkpoints.read_meta(folder), settings_composed(tuple(run.train))
    other = {key: asked if (own := leaf(meta["config"], key)) == leaf(made, key) else own
             for key, asked in settings_of(run.train).items()}
    refuse_other_run(run, run.folder, other, meta["step"])
    return meta


@cache
def settings_composed(train: tuple[str, ...]) -> dict:
    """Returns a run's settings as its checkpoints record them: diffusion=rf_uniform, for instance, is named rf."""
    return read(TrainSettings, compose("config", TrainSettings, list(train))).model_dump(mode="json")


def finished(run: Run) -> bool:
    """True if a run has taken the steps that the study, or else its own record, asks for, and is scored.

    A run that was killed between its last save and the score is not finished: train.py then makes the score.
    """
    meta = record_of(run)
    if meta is None or meta["step"] < (run.steps or meta["config"]["steps"] or math.inf):
        return False
    if not run.is_scored_in_training:
        return True
    sources = [row["source"] for row in read_results(run.folder / "results.jsonl")]
    return any(source.get("in_training") and source.get("step") == meta["step"] for source in sources)


def score_checkpoints(cfg: StudySettings, run: Run) -> None:
    """Scores a finished run's checkpoints at all their points, the last one first; skips scores that exist."""
    results, held_out = run.folder / "results.jsonl", run.folder / "held_out.jsonl"
    last, *earlier = reversed(checkpoints.all_steps(run.folder))
    for folder in (last, *earlier):
        step = checkpoints.step_of(folder)
        for point in [*run.at_each, *run.at_end] if folder == last else run.at_each:
            score_once(cfg, [f"checkpoint={folder}", *cfg.study.score, *point], results, point, step)
        if run.held_out and step not in [row.get("step") for row in read_rows(held_out)]:
            call(cfg, "scripts/studies/held_out.py", [str(folder), *run.held_out, f"--out={held_out}"])


def score_floor(cfg: StudySettings) -> None:
    """Scores sets of real images, such as test images, by the same reference: what a perfect model could reach."""
    results = Path(cfg.out).resolve() / "floor" / "results.jsonl"
    settings = [text for text in cfg.study.score if re.match(r"\w+", text)[0] not in OF_SAMPLING]
    for point in cfg.study.floor:
        score_once(cfg, [*settings, *point, f"results={results}"], results, point)


def score_once(
    cfg: StudySettings, settings: list[str], results: Path, point: list[str], step: int | None = None,
) -> None:
    """Runs fid.py, which tags its rows with the point, unless `results` has a row of this point and step.

    Raises ValueError if that row was scored by other settings of the study.
    """
    scored_by = [text for text in cfg.study.score if tells_scores_apart(text.split("=")[0])]
    for row in read_results(results):
        if (row["source"].get("step"), point_of(row)) == (step, point):
            if (before := tag_of(row).get("scored_by", scored_by)) != scored_by:
                raise ValueError(f"{results} holds {' '.join(point)} by {' '.join(before)}, and this study scores by "
                                 f"{' '.join(scored_by)}: set that back, or give the study another out=.")
            return
    call(cfg, "fid.py", [*settings, as_setting("tag", json.dumps({"study": point, "scored_by": scored_by}))])


def tag_of(row: dict) -> dict:
    """Returns the tag of a row that `score_once` added; {} for other rows."""
    with contextlib.suppress(LookupError, ValueError, TypeError):
        return dict(json.loads(row["tag"]))
    return {}


def point_of(row: dict) -> list[str] | None:
    """Returns the point of the study at which a row was scored: [] in training, unguided; None if at no point."""
    own = [] if row["source"].get("in_training") and not row["source"].get("guidance") else None
    return tag_of(row).get("study", own)


def changes_route(run: Run) -> bool:
    """True if a run's routes change at some step, so that its steps take different times."""
    schedule = {key: value for key, value in settings_of(run.train).items() if key.startswith("route_schedule")}
    return bool(schedule.keys() - {"route_schedule", "route_schedule.selection_ratios"}
                or schedule.get("route_schedule") == "off_ramp")


def without_start(run: Run) -> list[str]:
    """Returns a run's settings without the weights that it starts from, which only an adapter's steps need."""
    if values_by_key(tuple(run.train)).get("lora.rank") is not None:
        return run.train
    of_weights = ("init_from", "diffusion_name", "new_label_table")
    return [*(text for text in run.train if text.partition("=")[0] not in of_weights), "init_from=null"]


def time_in_turns(cfg: StudySettings) -> None:
    """Times the training step of each variant, one after the other, again and again, and writes timing.json.

    Earlier turns count if machine, code and length are the same. Variants whose steps differ, as before and after an
    off-ramp, are left out.
    """
    path, timing = Path(cfg.out) / "timing.json", read_timing(cfg)
    firsts = {run.variant: run for run in reversed(runs_of(cfg))}
    names = [name for name in cfg.only or cfg.study.variants if not changes_route(firsts[name])]
    rounds = {name: list(timing.rounds.get(name, ())) if timing else [] for name in names}
    before = timing and timing.model_dump(exclude={"rounds"})
    while names and len(rounds[name := min(names, key=lambda each: len(rounds[each]))]) < cfg.rounds:
        folder = inside(Path(cfg.out).resolve(), "timing", name)
        remove(folder)
        call(cfg, "train.py", [
            *without_start(firsts[name]), "samples.every=0", "evaluate.every=0", "checkpoint.every=1000000",
            "checkpoint.keep_every=0", "optimizer.warmup_steps=0",
            f"log.every={cfg.steps_timed}", f"steps={2 * cfg.steps_timed}", f"run_dir={folder}"])
        seconds = read_rows(folder / "metrics.jsonl")[-1]["sec_per_step"]
        machine = checkpoints.read_meta(checkpoints.latest(folder))["history"][-1]
        remove(folder)
        facts = {key: machine[key] for key in ("device", "commit", "torch")} | {"steps": cfg.steps_timed}
        if before not in (None, facts):
            rounds = {name: [] for name in names}
        before = facts
        rounds[name].append(seconds)
        write_text(path, json.dumps(facts | {"rounds": rounds}, indent=1) + "\n")


# ---- what is known of the runs --------------------------------------------------------------------------------------


def guidance_name(guidance: dict | None) -> str:
    """Names how images were guided, each way differently."""
    if guidance is None:
        return "unguided"
    parts = [f"scale {guidance['scale']:g}"]
    parts += [f"{key} {guidance[key]}" for key in ("gamma1", "gamma2") if guidance[key]]
    parts += [f"on {route['start_layer_idx']}→{route['end_layer_idx']}"
              + (f" from {route['return_from']}" if "return_from" in route else "")
              for route in guidance.get("routes") or []]
    if weak := guidance.get("weak"):
        parts.append(f"weak of step {weak['step']} ({weak['weights_sha256'][:8]})")
    if guidance.get("interval"):
        parts.append("in {:g}–{:g}".format(*guidance["interval"]))
    if guidance.get("channels"):
        parts.append(f"first {guidance['channels']} channels")
    return ("label, " if guidance["drop_label"] else "") + ", ".join(parts)


@cache
def values_by_key(train: tuple[str, ...]) -> dict[str, object]:
    """Reads a run's settings; of equal keys the last one counts."""
    return {key: leaf(OmegaConf.from_dotlist([f"{key}={value}"]), key)
            for key, value in (text.split("=", 1) for text in train)}


def settings_of(train: list[str]) -> dict[str, object]:
    """Reads a run's settings except those that may differ between two machines."""
    values = values_by_key(tuple(train))
    return {key: value for key, value in values.items() if value is not None and tells_runs_apart(key)}


def leaf(tree: object, key: str) -> object:
    """Returns the value at a dotted key of nested settings, the name of a group; None if it has no value."""
    value = OmegaConf.select(OmegaConf.create(tree), key, default=None)
    value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    if key == "model.routes" and isinstance(value, list):  # a record spells out what a study need not
        value = [ROUTE_DEFAULTS | route if isinstance(route, dict) else route for route in value]
    return value.get("name") if isinstance(value, dict) else value


def refuse_other_run(run: Run, where: object, other: dict[str, object], step: int) -> None:
    """Raises ValueError for a run that is at a later `step`, or has `other` settings, than this study asks for."""
    for key, asked in settings_of(run.train).items():
        if other.get(key) not in (None, asked):
            raise ValueError(f"{where} holds another {run.variant}, seed {run.seed}: {key}={other[key]} there, "
                             f"{key}={asked} in this study. Move it away, or give this study another out=.")
    if step > (run.steps or math.inf):
        raise ValueError(f"{where} holds {run.variant}, seed {run.seed}, after {step} steps, and this study asks for "
                         f"steps={run.steps}: set steps={step} or more, or give this study another out=.")


def from_disk(run: Run) -> dict | None:
    """Gathers what a run's folder holds; None without a checkpoint. Raises ValueError for another run's.

    Scores that neither its training nor this study asked for, such as a sweep's, are left out.
    """
    meta = record_of(run)
    if meta is None:
        return None
    with torch.device("meta"):
        net = build_network(meta["network"])
    schedule = build_schedule(net, meta.get("route_schedule", {}), meta["seed"])
    flops = cache(lambda routes: 3 * 2 * sum(multiply_adds(net, routes)))  # of an image: forward, and twice backward
    results, scores = run.folder / "results.jsonl", []
    for row in read_results(results):
        source = row["source"]
        seen = source.get("step", 0) * meta["batch_size"]
        if source.get("in_training") or "study" in tag_of(row):
            scores.append({
                "step": source["step"], "images": seen,
                "flops": meta["batch_size"] * sum(count * flops(routes) for routes, count
                                                  in schedule.counts(source["step"]).items()), **score_of(row, results),
                "seeds": source["seeds"], "guidance": guidance_name(source["guidance"]),
                "sampling_precision": source["precision"],
                "multiply_adds_an_image": sum(source["multiply_adds"].values()),
                "in_training": bool(source.get("in_training")), "study": point_of(row)})
    return {"variant": run.variant, "seed": run.seed, "step": meta["step"],
            "steps": run.steps or meta["config"]["steps"], "history": meta.get("history", []),
            "train": [text for text in run.train if text.split("=")[0] not in ("run_dir", "init_from")],
            "held_out": read_rows(run.folder / "held_out.jsonl"), "scores": sorted(scores, key=lambda s: s["step"])}


def score_of(row: dict, results: Path) -> dict:
    """Returns the distance, precision and recall in a row of results.jsonl, and the code, device and files behind them.

    A distance on features of a TorchScript file has the file's name, so that those of two files are told apart.
    """
    metrics, extractor = row["metrics"], row["extractor"]
    distance = next((metric for metric in metrics if metric == "fid" or metric.startswith("fd_")), None)
    if distance is None:
        raise ValueError(f"{results} has a row with {', '.join(metrics)} and no Fréchet distance, by which a study "
                         f"compares its runs: move the file away.")
    metric = f"fd_{Path(extractor['weights']).stem}" if distance == "fd_torchscript" else distance
    return {"metric": metric, "value": metrics[distance], "precision": metrics.get("precision"),
            "recall": metrics.get("recall"), "num_samples": row["images"], "device": row["device"],
            "tf32": row.get("tf32"), "commit": row.get("commit"), "torch": row["versions"].get("torch"),
            "extractor": extractor.get("name"), "extractor_sha256": extractor.get("sha256"),
            "reference_sha256": row["reference"].get("sha256")}


def recorded(cfg: StudySettings) -> list[RecordedStudy]:
    """Reads what was recorded before: this study's own study.json, then those of `rows`, from other machines."""
    own, studies = Path(cfg.out) / "study.json", []
    for path in ([own] if own.is_file() else []) + [Path(path) for path in cfg.rows]:
        studies.append(read_record(RecordedStudy, path, "Move it away, or take it out of rows."))
        if studies[-1].name != cfg.study.name:
            raise ValueError(f"{path} is of the study {studies[-1].name}, and this one is {cfg.study.name}: take it "
                             f"out of rows, or set out=<another>.")
        with as_recorded(path):
            for old in studies[-1].runs:
                if old["variant"] in cfg.study.variants:  # its seed is compared, whether or not the study lists it
                    run = run_of(cfg, old["variant"], old["seed"])
                    refuse_other_run(run, path, settings_of(old.get("train", [])), old["step"])
    return studies


def furthest(records: Iterable[dict | None]) -> dict[tuple[str, int], dict]:
    """Returns the furthest record of each run, by variant and seed; in a tie the first, which is the one on disk."""
    found: dict[tuple[str, int], dict] = {}
    for record in filter(None, records):
        key = record["variant"], record["seed"]
        found[key] = max(found.get(key, record), record, key=lambda run: (run["step"], len(run["scores"])))
    return found


def complete(run: Run, old: dict | None) -> bool:
    """True if `old` records a run to its end with all its scores, so that there is nothing left to do."""
    steps = old and (run.steps or old["steps"])
    if not steps or old["step"] < steps:
        return False
    last = [score for score in old["scores"] if score["step"] == old["step"]]
    evaluated = not run.is_scored_in_training or any(score.get("in_training") for score in last)
    return evaluated and all(point in [score.get("study") for score in last] for point in (*run.at_end, *run.at_each))


def collect(cfg: StudySettings) -> dict:
    """Gathers every score of every run, on disk or recorded before, with the images, FLOPs and seconds until then."""
    studies, listed, here = recorded(cfg), {(run.variant, run.seed): run for run in runs_of(cfg)}, []
    timing = next((timing for timing in (read_timing(cfg), *(study.timing for study in studies)) if timing), None)
    for run in listed.values():
        with as_recorded(run.folder):
            here.append(from_disk(run))
    found = furthest([*here, *(old for study in studies for old in study.runs)])
    runs = [found[key] | {"steps": run.steps or found[key]["steps"]} for key, run in listed.items() if key in found]
    # Of a variant or a seed that the study no longer lists: what was measured stays in the file.
    runs += [old for key, old in found.items() if key not in listed and old["scores"]]
    for run in runs:
        second = timing.seconds(run["variant"]) if timing else None  # one machine's, whoever trained
        for score in run["scores"]:
            score["seconds"] = None if second is None else score["step"] * second
    home = Path(cfg.out) / "floor" / "results.jsonl"
    floor = [{"images": Path(str(row["source"].get("path"))).name, **score_of(row, home)} for row in read_results(home)]
    floor = floor or next((study.floor for study in studies if study.floor), [])
    return {"name": cfg.study.name, "commit": commit(), "runs": runs, "floor": floor,
            "timing": timing and timing.model_dump(),
            "crossings": [crossed for pair in cfg.study.compare for metric in metrics_of(runs, *pair) for axis in AXES
                          if (crossed := crossing(runs, *pair, axis, metric))["n"]]}


def read_timing(cfg: StudySettings) -> Timing | None:
    path = Path(cfg.out) / "timing.json"
    return read_record(Timing, path, "Remove it, and time again with tasks=[time].") if path.is_file() else None


def report(cfg: StudySettings) -> None:
    out, result = Path(cfg.out), collect(cfg)
    with as_recorded(out / "study.json"):
        page = tables(result)
    write_text(out / "study.json", json.dumps(result, indent=1) + "\n")
    write_text(out / "study.md", page)
    figures = [*draw_figures(result, out), *draw_differences(result, out / "differences.png")]
    print(page, *(out / "study.json", out / "study.md", *figures), sep="\n")
    call(cfg, "scripts/report.py", [as_setting("study_dir", out), as_setting("out", out / "report")])


@command("study", StudySettings)
def main(cfg: StudySettings) -> None:
    if cfg.part is not None and "time" in cfg.tasks:
        raise ValueError(f"part={cfg.part} is one of several processes, and seconds are timed while nothing else runs: "
                         f"set tasks=[train,score], and tasks=[time,report] once all parts have ended.")
    runs = runs_of(cfg)
    check_commands(cfg, runs)
    old = furthest(run for study in recorded(cfg) for run in study.runs)
    own = [run for run in own_part(runs, cfg.part) if cfg.only is None or run.variant in cfg.only]
    for run in own:
        record_of(run)  # refuses another run's folder before anything slow
    if "score" in cfg.tasks and (cfg.part or "1/").startswith("1/"):
        score_floor(cfg)  # first, as it takes no training to find that its images are not there
    done = {run.folder for run in runs if complete(run, old.get((run.variant, run.seed)))}
    for run in own:
        children = [child for child in runs if child.folder not in done and f"init_from={run.folder}" in child.train]
        if run.folder in done and not children and not finished(run):  # what is here may lack an earlier score
            print(f"{run.folder.name}: recorded to its end with all its scores.")
            continue
        if "train" in cfg.tasks and not finished(run):
            if parent := waits_for(run, runs):
                print(f"{run.folder.name} starts from {parent.folder.name}, which has not finished: rerun the same "
                      f"command to train it later.")
                continue
            call(cfg, "train.py", run.train)
        if "score" in cfg.tasks and finished(run):
            score_checkpoints(cfg, run)
    if "time" in cfg.tasks:
        time_in_turns(cfg)
    if "report" in cfg.tasks:
        report(cfg)


if __name__ == "__main__":
    main()
