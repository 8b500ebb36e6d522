"""Trains variants × seeds, scores them the same way, and compares them: tables and figures.

Each run is `train.py` and each later score `fid.py`, with the settings that configs/study/<name>.yaml lists, so that
any of them can be repeated by hand. Writes <out>/study.json (the scores of the runs in <out>/runs), study.md,
score-over-*.png and differences.png; the last two also show `rows`, study.json files of other machines.
Commands: configs/study.yaml.
"""

import contextlib
import itertools
import json
import math
import re
import signal
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import fid
from dit import multiply_adds
from runtime import ranks
from runtime.command import by_key, command, commit, compose, key_of
from runtime.files import read_rows, write_text
from runtime.schema import (
    Location,
    NonEmptyList,
    NonNegativeInt,
    Positive,
    Settings,
    Text,
    as_recorded,
    as_text,
    leaves,
    one_of,
    read,
    read_json,
)
from scripts import comparison
from training.run_folder import tells_runs_apart, training_step
from training.settings import TrainSettings, check_settings
from weights import checkpoint as checkpoints
from weights.records import build_network, build_schedule

Setting = Annotated[str, Field(pattern="=")]  # key=value


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
    changes: bool = False                   # also of the difference from each compared pair to the next


class StudySettings(Settings):
    """configs/study.yaml."""

    study: Matrix
    out: Location
    rows: list[Location]
    also: list[Setting]
    part: str | None
    tasks: NonEmptyList[one_of(["train", "score", "report"])]
    seconds: dict[str, Positive] | None
    only: NonEmptyList[Text] | None


class Run(Settings):
    """One training run of a study."""

    variant: str
    seed: NonNegativeInt
    folder: Path
    train: list[str]
    at_end: list[list[str]]
    at_each: list[list[str]]
    held_out: list[str]


def merged(*settings: str) -> list[str]:
    """Joins settings, of which a later one replaces an earlier one of the same key; commands take a key once."""
    return [*{key_of(text): text for text in settings}.values()]


# ---- a study's runs -------------------------------------------------------------------------------------------------


def runs_of(cfg: StudySettings) -> list[Run]:
    """Lists the runs of a study: those of each compared pair, a seed at a time, then those of the other variants.

    So a study that ends early has both runs of each seed. Raises ValueError for unknown names.
    """
    study = cfg.study
    if own := [text for text in cfg.also if key_of(text) in ("seed", "name", "run_dir")]:
        raise ValueError(f"also={own[0]} would be replaced, as each run has its own: set study.seeds= or out= instead.")
    for key, name in [("study.compare", name) for pair in study.compare for name in pair] + [
            ("only", name) for name in cfg.only or ()]:
        if name not in study.variants:
            raise ValueError(f"{key} names {name}, but the variants are {', '.join(study.variants)}.")
    seeds = {name: study.seeds if variant.seeds is None else variant.seeds for name, variant in study.variants.items()}
    runs: dict[tuple[str, int], Run] = {}
    for group in [*study.compare, *([name] for name in study.variants)]:
        for seed in dict.fromkeys(seed for name in group for seed in seeds[name]):
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
               train=merged(*train, f"seed={seed}", f"name={run_dir.name}", f"run_dir={run_dir}"),
               at_end=points("at_end"), at_each=points("at_each"))


@cache
def settings_composed(train: tuple[str, ...]) -> dict:
    """Returns a run's settings as its checkpoints record them: diffusion=rf_uniform, for instance, is named rf."""
    return read(TrainSettings, compose("config", TrainSettings, list(train))).model_dump(mode="json")


def check_commands(cfg: StudySettings, runs: list[Run]) -> None:
    """Raises ValueError for a variant whose settings train.py or fid.py would refuse, before the first run starts.

    One seed of each variant is checked, as the seed changes no other setting.
    """
    for run in {run.variant: run for run in runs}.values():
        try:
            check_settings(read(TrainSettings, compose("config", TrainSettings, run.train)), by_key(run.train))
            for point in (*run.at_end, *run.at_each) if "score" in cfg.tasks else ():
                scored = merged(f"checkpoint={run.folder}", *cfg.study.score, *point)
                fid.check_settings(read(fid.ScoringSettings, compose("fid", fid.ScoringSettings, scored)),
                                   by_key(scored))
        except ValueError as error:
            raise ValueError(f"variant {run.variant}: {error}") from None


def in_part(runs: list[Run], part: str | None) -> list[Run]:
    """Returns the runs of this process; raises ValueError for a `part` of another form."""
    if part is None:
        return runs
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"part={part}: write part=2/6 for the second of six.")
    return runs[int(match[1]) - 1 :: int(match[2])]


def call(program: str, settings: list[str]) -> None:
    """Runs one of our commands and forwards the signals that stop this one, so that it saves.

    Raises ValueError with the command if it fails.
    """
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        if not received:  # `timeout` sends each signal twice, and a second one would end the run unsaved
            received.append(number)
            child.send_signal(number)

    # In a group of its own, as a second signal would end it at once: Ctrl-C reaches it from here alone.
    child = subprocess.Popen([sys.executable, str(ROOT / program), *settings], process_group=0)
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


# ---- what is done ---------------------------------------------------------------------------------------------------


def refuse_other_run(run: Run, where: object, asked: dict, there: dict, step: int) -> None:
    """Raises ValueError for a run that has other settings, or is at a later step, than this study asks for."""
    for key, value in asked.items():
        if key in there and there[key] != value and tells_runs_apart(key):
            raise ValueError(f"{where} holds another {run.variant}, seed {run.seed}: {key}={as_text(there[key])} "
                             f"there, {key}={as_text(value)} in this study. Move it away, or give this study another "
                             f"out=.")
    if step > int(asked.get("steps") or step):
        raise ValueError(f"{where} holds {run.variant}, seed {run.seed}, after {step} steps, and this study asks for "
                         f"steps={asked['steps']}: set steps={step} or more, or give this study another out=.")


def record_of(run: Run) -> dict | None:
    """Reads meta.json of a run's latest checkpoint; None without one. Raises ValueError for another run's."""
    folder = checkpoints.latest(run.folder) if run.folder.is_dir() else None
    if folder is None:
        return None
    meta, asked = checkpoints.read_meta(folder), leaves(settings_composed(tuple(run.train)))
    chosen = {"batch_size"} if asked["batch_size"] is None else set()  # by train.py
    refuse_other_run(run, run.folder, {key: value for key, value in asked.items() if key not in chosen},
                     leaves(meta["config"]), meta["step"])
    planned = meta["config"]["steps"]
    if asked["steps"] not in (None, planned) and changes_by_share(asked):
        raise ValueError(f"{run.folder} was begun with steps={planned}, and its learning rate or routes change at "
                         f"shares of them: set steps={planned}, or give this study another out=.")
    return meta


def changes_by_share(asked: dict) -> bool:
    """True if the learning rate or the routes of a run depend on its number of steps."""
    changes = [asked.get("route_schedule.dense_before"), asked.get("route_schedule.dense_after"),
               *(when for when, _ in asked.get("route_schedule.changes") or ())]
    return asked["optimizer.schedule"] == "cosine" or any(0 < when < 1 for when in changes if when is not None)


def finished(run: Run) -> bool:
    """True if a run has taken the steps that the study, or else its own record, asks for, and is scored.

    A run that was killed between its last save and the score is not finished: train.py then makes the score.
    """
    meta, asked = record_of(run), settings_composed(tuple(run.train))
    if meta is None or meta["step"] < (asked["steps"] or meta["config"]["steps"] or math.inf):
        return False
    if not asked["evaluate"]["every"]:
        return True
    made = {(row["source"]["weights"], (row["source"]["guidance"] or {}).get("scale"))
            for row in read_rows(run.folder / "results.jsonl") if training_step(row) == meta["step"]}
    return made.issuperset(itertools.product(asked["evaluate"]["weights"], asked["evaluate"]["guidance_scales"]))


def score_checkpoints(cfg: StudySettings, run: Run) -> None:
    """Scores a finished run's checkpoints at all their points, the last one first; skips scores that exist."""
    results, held_out = run.folder / "results.jsonl", run.folder / "held_out.jsonl"
    last, *earlier = reversed(checkpoints.all_steps(run.folder))
    for folder in (last, *earlier):
        step = checkpoints.step_of(folder)
        for point in [*run.at_each, *run.at_end] if folder == last else run.at_each:
            score_once([f"checkpoint={folder}", *cfg.study.score], point, results, step)
        if run.held_out and step not in [row.get("step") for row in read_rows(held_out)]:
            call("scripts/studies/held_out.py", [str(folder), *run.held_out, f"--out={held_out}"])


def score_floor(cfg: StudySettings) -> None:
    """Scores sets of real images, such as test images, by the same reference: what a perfect model could reach."""
    results = Path(cfg.out).resolve() / "floor" / "results.jsonl"
    measuring = [s for s in cfg.study.score if key_of(s).partition(".")[0] not in (*fid.OF_SAMPLING, "compile")]
    for point in cfg.study.floor:
        score_once([f"results={results}", *measuring], point, results)


def score_once(settings: list[str], point: list[str], results: Path, step: int | None = None) -> None:
    """Runs fid.py, which tags its row with the point and the study's settings, unless `results` has such a row."""
    of_place = ("checkpoint", "results", "batch_size", "reference", "features_weights")  # files are known by SHA-256
    tag = {"study": point, "scored_by": [text for text in settings if text.split("=")[0] not in of_place]}
    if not any(row["source"].get("step") == step and tag_of(row) == tag for row in read_rows(results)):
        call("fid.py", merged(*settings, *point, f"tag='{json.dumps(tag)}'"))


def tag_of(row: dict) -> dict:
    """Returns the tag of a row that `score_once` added; {} for other rows."""
    with contextlib.suppress(LookupError, ValueError, TypeError):
        return dict(json.loads(row["tag"]))
    return {}


# ---- scores ---------------------------------------------------------------------------------------------------------


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
    for row in read_rows(results):
        if row["source"].get("in_training") or "study" in tag_of(row):
            step = row["source"]["step"]
            taken = schedule.counts(step).items()
            scores.append(score_of(row, results) | {
                "step": step, "images": step * meta["batch_size"],
                "flops": meta["batch_size"] * sum(count * flops(routes) for routes, count in taken),
                "multiply_adds_an_image": sum(row["source"]["multiply_adds"].values())})
    return {"variant": run.variant, "seed": run.seed, "step": meta["step"],
            "steps": settings_composed(tuple(run.train))["steps"] or meta["config"]["steps"],
            "history": meta.get("history", []),
            "train": [text for text in run.train if text.split("=")[0] not in ("run_dir", "init_from")],
            "held_out": read_rows(run.folder / "held_out.jsonl"), "scores": sorted(scores, key=lambda s: s["step"])}


def score_of(row: dict, results: Path) -> dict:
    """Returns the distance, precision and recall in a row of results.jsonl, and flat all that the row says of them.

    A distance on features of a TorchScript file has the file's name, so that those of two files are told apart.
    """
    metrics, source, guidance = row["metrics"], row["source"], row["source"].get("guidance")
    distance = next((metric for metric in metrics if metric == "fid" or metric.startswith("fd_")), None)
    if distance is None:
        raise ValueError(f"{results} has a row with {', '.join(metrics)} and no Fréchet distance, by which a study "
                         f"compares its runs: move the file away.")
    facts = {key: value for key, value in row.items() if key not in ("metrics", "images", "summary", "tag")}
    # The run and the step name the checkpoint; its path is one of this machine.
    facts["source"] = {key: value for key, value in source.items() if key not in ("guidance", "checkpoint")}
    words = guidance and ", ".join(f"{key} {as_text(value)}" for key, value in guidance.items()
                                   if value is not None and value is not False)
    metric = f"fd_{Path(row['extractor']['weights']).stem}" if distance == "fd_torchscript" else distance
    return {"metric": metric, "value": metrics[distance], "precision": metrics.get("precision"),
            "recall": metrics.get("recall"), "num_samples": row["images"], "guidance": words or "unguided",
            **leaves(facts)}


def recorded(cfg: StudySettings) -> list[dict]:
    """Reads `rows`; raises ValueError for another study's, and for runs of other settings."""
    studies = []
    for path in map(Path, cfg.rows):
        with as_recorded(path):
            studies.append(read_json(path))
            if (name := studies[-1]["name"]) != cfg.study.name:
                raise ValueError(f"{path} is of the study {name}, and this one is {cfg.study.name}: take it out of "
                                 f"rows.")
            comparison.by_measure(studies[-1]["runs"])
            for old in studies[-1]["runs"]:
                if old["variant"] in cfg.study.variants:
                    run = run_of(cfg, old["variant"], old["seed"])
                    asked, there = by_key(run.train), by_key(old["train"])
                    refuse_other_run(run, path, asked, there, old["step"])
                    typed = {key_of(text) for text in cfg.also} - {*there} | {*there} - {*asked}
                    if apart := sorted(filter(tells_runs_apart, typed)):
                        raise ValueError(f"{path} holds {run.variant}, seed {run.seed}, with {apart[0]}="
                                         f"{there.get(apart[0], '<not set>')}, and this study has "
                                         f"{apart[0]}={asked.get(apart[0], '<not set>')}: give both the same also=, or "
                                         f"take it out of rows.")
    return studies


def collect(cfg: StudySettings) -> tuple[dict, dict]:
    """Gathers the scores of the runs here, and of those together with `rows`, with images, FLOPs and seconds.

    Raises ValueError for a run that is in both, and for scores in study.json of runs that are in neither.
    """
    studies, path, runs = recorded(cfg), Path(cfg.out) / "study.json", []
    for run in runs_of(cfg):
        with as_recorded(run.folder):
            runs += filter(None, [from_disk(run)])
    results = Path(cfg.out) / "floor" / "results.jsonl"
    floor = [{"images": Path(str(row["source"].get("path"))).name, **score_of(row, results)}
             for row in read_rows(results)]
    every = [*runs, *(run for study in studies for run in study["runs"])]
    names = [f"{run['variant']}, seed {run['seed']}" for run in every]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{twice[0]}, is in two of {', '.join([f'{cfg.out}/runs', *cfg.rows])}: take one of them out.")
    for old in read_json(path)["runs"] if path.is_file() else ():
        if old["scores"] and (name := f"{old['variant']}, seed {old['seed']}") not in names:
            raise ValueError(f"{path} has scores of {name}, whose folder is gone: move it, and give it as rows=[<it>].")
    here = {"name": cfg.study.name, "commit": commit(), "runs": runs, "floor": floor}
    rounds = [study["timing"]["rounds"] for study in studies if study.get("timing")]  # before November 2026
    seconds = {name: statistics.median(turns) for each in rounds for name, turns in each.items()}
    seconds |= cfg.seconds or {}
    for run in every:
        for score in run["scores"]:  # of one machine, whichever trained
            score["seconds"] = seconds[run["variant"]] * score["step"] if run["variant"] in seconds else None
    return here, here | {"runs": every, "compare": cfg.study.compare, "changes": cfg.study.changes,
                         "floor": [*floor, *(row for study in studies for row in study.get("floor", ()))]}


def report(cfg: StudySettings) -> None:
    out, (here, shown) = Path(cfg.out), collect(cfg)
    page = comparison.page(shown)
    out.mkdir(parents=True, exist_ok=True)
    if here["runs"]:
        write_text(out / "study.json", json.dumps(here, indent=1) + "\n")
    write_text(out / "study.md", page)
    print(page, out / "study.md", *comparison.draw_figures(shown, out), sep="\n")


@command("study", StudySettings)
def main(cfg: StudySettings) -> None:
    runs, elsewhere = runs_of(cfg), {(run["variant"], run["seed"]) for study in recorded(cfg) for run in study["runs"]}
    variants = {*cfg.study.variants, *(variant for variant, _ in elsewhere)}
    if unknown := sorted((cfg.seconds or {}).keys() - variants):
        raise ValueError(f"seconds names {unknown[0]}, but the variants are {', '.join(sorted(variants))}.")
    if cfg.tasks != ["report"]:
        check_commands(cfg, [run for run in runs if cfg.only is None or run.variant in cfg.only])
    chosen = [run for run in in_part(runs, cfg.part) if cfg.only is None or run.variant in cfg.only]
    for run in chosen:
        record_of(run)  # refuses another run's folder before anything slow
    if "score" in cfg.tasks and (cfg.part or "1/").startswith("1/"):
        score_floor(cfg)  # first, as it takes no training to find that its images are not there
    for run in chosen if {"train", "score"} & {*cfg.tasks} else ():
        parents = [other for other in runs if f"init_from={other.folder}" in run.train]
        if (run.variant, run.seed) in elsewhere:
            print(f"{run.folder.name}: recorded in rows.")
        elif "train" in cfg.tasks and not finished(run) and not all(map(finished, parents)):
            print(f"{run.folder.name} starts from {parents[0].folder.name}, which has not finished: rerun the same "
                  f"command to train it later.")
        else:
            if "train" in cfg.tasks and not finished(run):
                call("train.py", run.train)
            if "score" in cfg.tasks and finished(run):
                score_checkpoints(cfg, run)
    if "report" in cfg.tasks:
        report(cfg)


if __name__ == "__main__":
    main()
