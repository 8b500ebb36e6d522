"""A study: runs that resume after a kill, scores over seeds, crossings, and the same randomness dense and routed."""

import json
import os
import platform
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import change_record, run_command

import fid
import train
from dit import DiT
from edm import EDM
from latents.folder import open_latents
from latents.loader import batches, to_latent
from objectives import DiffusionLoss
from rf import RF
from routing_module import Route
from runtime.command import commit
from runtime.schema import read, read_record
from scoring.results import tells_scores_apart
from scripts import comparison, report, study
from scripts.benchmark import write_latents
from train import step_seed, train_step
from training.run_folder import tells_runs_apart
from weights.records import RouteSettings

TINY = ["experiment=quickstart", "batch_size=8", "model.hidden_size=32", "model.num_heads=2", "model.depth=6",
        "steps=4", "samples.every=0", "log.every=2", "checkpoint.every=2", "evaluate.every=2",
        "evaluate.num_samples=4", "evaluate.num_steps=2"]
MATRIX = {"name": "tiny", "train": TINY, "score": ["num_steps=2", "features=pixels"], "seeds": [0, 1],
          "variants": {"dit": {"train": ["model=dit"], "at_end": ["cfg"]},
                       "tread": {"train": ["model=tread"], "seeds": [0]},
                       "tuned": {"train": ["model=dit", "init_from={runs}/tread-seed{seed}", "steps=1"], "seeds": [0]}},
          "points": {"cfg": [["num_samples=4", "guidance=cfg_tread", "scale=2", "gamma1=0", "gamma2=0.5",
                              "routes=[{start_layer_idx: 1, end_layer_idx: 3}]"]]}, "compare": [["dit", "tread"]]}
GUIDED = "label, scale 2, gamma2 0.5, on 1→3"
TIMING = {"device": "one", "commit": "abc", "torch": "2.11.0", "rounds": {"dit": [3.0, 1.0, 2.0]}}


def settings(out, **changed) -> study.StudySettings:
    return read(study.StudySettings, {
        "study": MATRIX, "out": str(out), "rows": [], "also": [], "part": None, "tasks": ["train", "score", "report"],
        "rounds": 1, "steps_timed": 1, "only": None, "nice": 0, "threads": 1, **changed})


def run_of(*train, **changed) -> study.Run:
    return study.Run(**{"variant": "x", "seed": 0, "folder": Path("x"), "train": [*train], "at_end": [], "at_each": [],
                        "held_out": [], **changed})


def test_every_run_is_in_exactly_one_part(tmp_path):
    runs = study.runs_of(settings(tmp_path))
    # Those that are compared a seed at a time, so that an early end leaves a comparison.
    assert [(run.variant, run.seed) for run in runs] == [("dit", 0), ("tread", 0), ("dit", 1), ("tuned", 0)]
    assert study.waits_for(runs[3], runs) == runs[1] and study.waits_for(runs[0], runs) is None
    assert runs[3].train[-5] == f"init_from={tmp_path}/runs/tread-seed0"
    parts = [run for part in ("1/3", "2/3", "3/3") for run in study.own_part(runs, part)]
    assert sorted(run.folder for run in parts) == sorted(run.folder for run in runs)
    for wrong in ("0/3", "4/3", "x", "2"):
        with pytest.raises(ValueError, match="write part=2/6"):
            study.own_part(runs, wrong)
    with pytest.raises(ValueError, match=r"part=1/3 is one of several processes.*set tasks=\[train,score\]"):
        study.main.__wrapped__(settings(tmp_path, part="1/3", tasks=["train", "score", "time", "report"]))


@pytest.mark.parametrize("changed", [{"study": MATRIX | {"compare": [["dit", "dot"]]}}, {"only": ["dot"]}])
def test_an_unknown_variant_raises_a_one_line_error(tmp_path, changed):
    with pytest.raises(ValueError, match="names dot, but the variants are dit, tread"):
        study.runs_of(settings(tmp_path, **changed))


def popen(line: list[str], env: dict[str, str], process_group: int) -> SimpleNamespace:
    """Runs what a study calls in this process, without the seconds that another takes to begin."""
    assert line[:4] == ["nice", "-n", "0", sys.executable] and process_group == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    run_command({"train.py": train.main, "fid.py": fid.main, "report.py": report.main}[Path(line[4]).name], *line[4:])
    return SimpleNamespace(wait=lambda: 0)


def test_a_study_trains_scores_and_plots_and_does_nothing_twice(shapes, pixel_reference, tmp_path, monkeypatch,
                                                                fresh_accelerator):
    monkeypatch.setattr(study, "subprocess", SimpleNamespace(Popen=popen))
    matrix = MATRIX | {"train": [*TINY, f"data.path={shapes}", f"evaluate.reference={pixel_reference}"], "seeds": [0],
                       "score": [*MATRIX["score"], f"reference={pixel_reference}"],
                       "floor": [[f"images={shapes}", "num_samples=4"]]}
    cfg = settings(tmp_path / "study", study=matrix)
    study.main.__wrapped__(cfg)
    told = json.loads((tmp_path / "study/study.json").read_text())
    assert {run["variant"]: [score["step"] for score in run["scores"]] for run in told["runs"]} == {
        "dit": [0, 2, 4, 4], "tread": [0, 2, 4], "tuned": [0, 1]}
    assert told["runs"][0]["history"] == [{"step": 0, "commit": commit(),
                                           "device": told["runs"][0]["history"][0]["device"],
                                           "torch": torch.__version__, "tf32": False,
                                           "python": platform.python_version()}]
    assert [(floor["images"], floor["num_samples"]) for floor in told["floor"]] == [("shapes", 4)]
    for score in (*told["runs"][0]["scores"], *told["floor"]):
        assert (score["commit"], score["device"], score["torch"]) == (commit(), "cpu", torch.__version__)
    assert [score["guidance"] for score in told["runs"][0]["scores"]] == ["unguided"] * 3 + [GUIDED]
    dense, routed = ({score["step"]: score["flops"] for score in run["scores"]} for run in told["runs"][:2])
    assert dense[4] == 2 * dense[2] > routed[4] > 0
    assert all((tmp_path / "study" / name).is_file() for name in ("score-over-images.png", "differences.png"))
    assert "| tread |" in (tmp_path / "study/study.md").read_text()
    page = (tmp_path / "study/study.md").read_text()
    assert "## Real images, the floor\n\n* fd_pixels of 4 images of shapes: " in page
    assert f"| dit | 4 | {GUIDED} |" in page and page.count("of 1 seed, no verdict") >= 3
    before = {path: path.read_bytes() for path in (tmp_path / "study/runs").rglob("*") if path.is_file()}
    study.main.__wrapped__(cfg)
    assert {path: path.read_bytes() for path in (tmp_path / "study/runs").rglob("*") if path.is_file()} == before

    # A run of other settings under a name of the study is not reported as the study's.
    foreign = settings(tmp_path / "study", study=matrix | {"train": [*matrix["train"], "optimizer.lr=1e-3"]},
                       tasks=["report"])
    (tmp_path / "study/study.json").unlink()
    for tasks in (["report"], ["train"]):  # nor trained on
        with pytest.raises(ValueError,
                           match="dit-seed0 holds another dit, seed 0: optimizer.lr=0.0.* there, optimizer.lr=0.001 "
                                 "in"):
            study.main.__wrapped__(foreign.model_copy(update={"tasks": tasks}))

    # Nor is a score that somebody made of one of its runs.
    results = tmp_path / "study/runs/dit-seed0/results.jsonl"
    row = json.loads(results.read_text().splitlines()[0])
    with results.open("a") as file:
        file.write(json.dumps(row | {"images": 2, "source": row["source"] | {"in_training": False}}) + "\n")
    study.main.__wrapped__(settings(tmp_path / "study", study=matrix, tasks=["report"]))

    # A run that was killed between its last save and the score of it is not finished.
    routed = next(run for run in study.runs_of(cfg) if run.variant == "tread")
    whole = (routed.folder / "results.jsonl").read_text()
    assert study.finished(routed)
    (routed.folder / "results.jsonl").write_text("".join(whole.splitlines(keepends=True)[:-1]))
    assert not study.finished(routed)
    (routed.folder / "results.jsonl").write_text(whole)

    # A point that the study asks for later is not taken for one that was scored.
    told_study, [run, *_] = read_record(study.RecordedStudy, tmp_path / "study/study.json", ""), study.runs_of(cfg)
    assert study.complete(run, told_study.runs[0])
    assert not study.complete(run.model_copy(update={"at_end": [["guidance=cfg", "scale=3"]]}), told_study.runs[0])

    # Scores of more steps are not those of fewer.
    for home, rows in (("study", []), ("other", [str(tmp_path / "study/study.json")])):
        with pytest.raises(ValueError, match="holds dit, seed 0, after 4 steps, and this study asks for steps=2"):
            study.collect(settings(tmp_path / home, study=matrix, also=["steps=2"], rows=rows))

    # A checkpoint that is kept is scored at every point of at_each; a score by other settings is not taken for
    # the study's.
    count = (results.read_text(), study.score_checkpoints(cfg, run))[0].count("\n")
    study.score_checkpoints(cfg, run.model_copy(update={"at_each": [["num_samples=3"]]}))
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(row["source"]["step"], row["images"]) for row in rows[count:]] == [(4, 3), (2, 3)]
    # A report between the last checkpoint's score and an earlier one's does not end the scoring.
    each = matrix | {"variants": MATRIX["variants"]
                     | {"dit": {"train": ["model=dit"], "at_end": ["cfg"], "at_each": ["three"]}},
                     "points": MATRIX["points"] | {"three": [["num_samples=3"]]}}
    results.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    before = (tmp_path / "study/study.json").read_text()
    for task in ("report", "score"):
        study.main.__wrapped__(settings(tmp_path / "study", study=each, only=["dit"], tasks=[task]))
    (tmp_path / "study/study.json").write_text(before)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(row["source"]["step"], row["images"]) for row in rows[count:]] == [(4, 3), (2, 3)]
    results.write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
    with pytest.raises(ValueError, match="holds images=.* num_samples=4 by num_steps=2 .*scores by num_steps=3 "):
        study.main.__wrapped__(settings(tmp_path / "study",
                                        study=matrix | {"score": ["num_steps=3", *matrix["score"][1:]]},
                                        tasks=["score"]))

    # The weights go, the scores stay, and nothing is trained again; nor where another machine goes on from the scores.
    shutil.rmtree(tmp_path / "study/runs")
    study.main.__wrapped__(cfg)
    assert json.loads((tmp_path / "study/study.json").read_text()) == told and not (tmp_path / "study/runs").exists()
    study.main.__wrapped__(settings(tmp_path / "other", study=matrix, rows=[str(tmp_path / "study/study.json")],
                                    tasks=["train", "report"]))
    assert json.loads((tmp_path / "other/study.json").read_text()) == told and not (tmp_path / "other/runs").exists()


def recorded(path, *runs, **changed):
    """Writes a study.json; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"name": "tiny", "runs": [{"step": 4, "steps": 4, "train": TINY, **run} for run in runs],
                                **changed}))
    return str(path)


def test_the_more_complete_of_two_records_of_a_run_is_kept(tmp_path):
    early = recorded(tmp_path / "early.json", of("dit", 0, (8, 5.0)) | {"step": 1})
    late = recorded(tmp_path / "late.json", of("dit", 0, (8, 5.0), (16, 4.0)), of("dit", 7, (8, 1.0)))
    result = study.collect(settings(tmp_path / "study", rows=[early, late]))
    assert [(run["variant"], run["seed"], run["step"], len(run["scores"])) for run in result["runs"]] == [
        ("dit", 0, 4, 2), ("dit", 7, 4, 1)]  # of a seed that has left
    early = study.collect(settings(tmp_path / "study", rows=[early]))
    assert "dit, seed 0: not finished, 1 of 4 steps" in comparison.tables(early)


@pytest.mark.parametrize(("changed", "says"), [
    ({"name": "big"}, "is of the study big, and this one is tiny"), ({"runs": 5}, "runs=5: it should be a valid list"),
    *(({"runs": [{"variant": "dit", "seed": seed, "step": 4, "steps": 4, "scores": [], "train": ["model.depth=9"]}]},
       f"another dit, seed {seed}: model.depth=9 there, model.depth=6 in this study") for seed in (0, 7))])
def test_rows_that_are_not_of_this_study_raise_a_one_line_error(tmp_path, changed, says):
    path = recorded(tmp_path / "rows.json", **changed)
    with pytest.raises(ValueError, match=says):
        study.collect(settings(tmp_path / "study", rows=[path]))


def test_seconds_are_of_one_machine_which_is_named(tmp_path):
    def seconds_and_device(result):
        return [run["scores"][0]["seconds"] for run in result["runs"][:2]], result["timing"]["device"]

    other = TIMING | {"device": "two", "rounds": {"dit": [9.0], "tread": [9.0]}}
    runs = [of(variant, 0, (8, 5.0)) for variant in ("dit", "tread")]
    for run in runs:
        run["scores"][0]["seconds"] = 77.0
    rows = [recorded(tmp_path / "rows.json", *runs, timing=other)]
    assert seconds_and_device(study.collect(settings(tmp_path / "study", rows=rows))) == ([9.0, 9.0], "two")
    (tmp_path / "study").mkdir()
    (tmp_path / "study/timing.json").write_text(json.dumps(TIMING))
    result = study.collect(settings(tmp_path / "study", rows=rows))  # tread was not timed here, and has no seconds
    assert seconds_and_device(result) == ([2.0, None], "one")
    assert "timed in turns on one machine, one, torch 2.11.0, commit abc" in comparison.tables(result)
    result["timing"]["rounds"] = {"dit": [1.2, 3.0, 1.0], "tread": [0.6, 1.0]}
    assert "dit over tread, turn by turn: 1.2 / 0.6 = 2.00, 3 / 1 = 3.00; median 2.50." in comparison.tables(result)
    (tmp_path / "study/timing.json").write_text(json.dumps({"dit": {"rounds": [1.0], "median": 1.0}}))
    with pytest.raises(ValueError, match="device is missing.*time again with tasks=.time."):
        study.collect(settings(tmp_path / "study"))


def test_turns_of_timing_are_kept_after_a_kill_and_are_of_one_machine(tmp_path, monkeypatch):
    called, machine = [], {"device": "one", "commit": "abc", "torch": "2"}

    def timed(cfg, program, overrides):
        [*_, folder] = [Path(text.removeprefix("run_dir=")) for text in overrides if text.startswith("run_dir=")]
        called.append(folder.name)
        if len(called) == 4:
            raise KeyboardInterrupt
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 4, "sec_per_step": float(len(called))}) + "\n")

    monkeypatch.setattr(study, "call", timed)
    monkeypatch.setattr(study.checkpoints, "latest", lambda folder: folder)
    monkeypatch.setattr(study.checkpoints, "read_meta", lambda folder: {"history": [{"step": 0, **machine}]})
    cfg = settings(tmp_path, tasks=["time"], rounds=2, steps_timed=2, only=["dit", "tread"])
    with pytest.raises(KeyboardInterrupt):
        study.time_in_turns(cfg)
    study.time_in_turns(cfg)
    study.time_in_turns(cfg)
    assert called == ["dit", "tread", "dit", "tread", "tread"]
    told = json.loads((tmp_path / "timing.json").read_text())
    assert told == {**machine, "steps": 2, "rounds": {"dit": [1.0, 3.0], "tread": [2.0, 5.0]}}
    machine["device"] = "two"
    study.time_in_turns(cfg)  # complete, whoever made it
    study.time_in_turns(cfg.model_copy(update={"rounds": 3}))
    rounds = json.loads((tmp_path / "timing.json").read_text())["rounds"]
    assert rounds == {"dit": [6.0, 8.0, 10.0], "tread": [7.0, 9.0, 11.0]}


def test_the_loss_on_latents_without_class_names_goes_by_their_numbers(tmp_path):
    from scripts.studies import held_out

    write_latents(tmp_path, 8, (4, 8, 8), 4)
    change_record(tmp_path, class_names=None)
    latents = open_latents(tmp_path)
    assert held_out.read(latents, 8, held_out.names_of(latents))[1].tolist() == latents.labels.tolist()


@pytest.mark.parametrize(("asked", "timed"), [
    (["init_from=x.pt", "diffusion_name=sit", "new_label_table=true"], ["init_from=null"]),
    (["init_from=runs/x", "lora.rank=2"], ["init_from=runs/x", "lora.rank=2"])])
def test_a_fine_tune_is_timed_without_weights_and_an_adapter_on_its_base(asked, timed):
    assert study.without_start(run_of(*TINY, *asked)) == [*TINY, *timed]


@pytest.mark.parametrize(("code", "ends"), [("143", SystemExit), ("0", SystemExit), ("1", ValueError)])
def test_a_signal_reaches_what_the_study_runs_once_and_its_failure_is_no_stop(tmp_path, code, ends):
    (tmp_path / "stub.py").write_text("""if True:
        import pathlib, signal, sys, time
        heard = []
        signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
        pathlib.Path(sys.argv[1]).write_text("ready")
        while not heard:
            time.sleep(0.01)
        time.sleep(0.2)      # as long as a run takes to save
        pathlib.Path(sys.argv[1]).write_text(f"saved after {len(heard)} signal")
        sys.exit(int(sys.argv[2]))""")

    def stop() -> None:
        while not (tmp_path / "told").is_file():
            time.sleep(0.01)
        for _ in range(2):  # as timeout does
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)

    handler = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=stop).start()
    with pytest.raises(ends) as ended:
        study.call(settings(tmp_path), str(tmp_path / "stub.py"), [str(tmp_path / "told"), code])
    assert ends is ValueError or ended.value.code == 143
    assert (tmp_path / "told").read_text() == "saved after 1 signal" and signal.getsignal(signal.SIGTERM) == handler


def of(variant: str, seed: int, *scores: tuple[int, float]) -> dict:
    return {"variant": variant, "seed": seed, "scores": [
        {"step": images // 8, "images": images, "seconds": None, "flops": images, "metric": "fd", "value": value,
         "num_samples": 9, "guidance": "unguided"} for images, value in scores]}


def three(variant: str, *scores: tuple[int, float]) -> list[dict]:
    """Three seeds with equal scores, whose every difference is sure."""
    return [of(variant, seed, *scores) for seed in range(3)]


def curves_of(runs, *variants):
    sides = comparison.unguided(runs, *variants)
    return [comparison.curve(at, "images", comparison.shared_seeds(sides)) for at in sides]


def test_a_crossing_is_where_the_lines_between_the_scores_meet():
    runs = [*three("a", (0, 9), (10, 5), (20, 3)), *three("b", (0, 9), (10, 7), (20, 2))]
    found = comparison.crossing(runs, "a", "b", "images")
    assert abs(found["at"] - 10 * 2 ** (2 / 3)) < 1e-9 and found["better_at_the_end"] == "b"
    assert comparison.crossing(runs, "b", "a", "images")["at"] == found["at"]  # whoever is named first
    never = [*three("a", (10, 5), (20, 3)), *three("b", (10, 7), (20, 4))]
    assert comparison.crossing(never, "a", "b", "images") == {
        "between": ["a", "b"], "axis": "images", "metric": None, "at": None, "better_at_the_end": "a",
        "verdict": "a (+1.000 to +1.000, n=3)", "difference": 1, "interval": [1, 1], "n": 3, "seeds_lower": [3, 0]}
    assert comparison.crossing([of("a", 0), of("b", 0)], "a", "b", "images")["better_at_the_end"] is None
    assert comparison.crossing(runs, "a", "b", "seconds")["at"] is None  # nothing was timed


def test_scores_of_one_metric_and_number_of_images_are_compared_those_of_which_there_are_most():
    runs = [of("a", 0, (10, 5), (20, 3)), of("b", 0, (10, 7), (20, 2))]
    [_, last] = runs[0]["scores"]
    runs[0]["scores"] += [last | {"num_samples": 999, "value": 1.0}, last | {"metric": "fd_other", "value": 0.5}]
    runs[1]["scores"].append(runs[1]["scores"][1] | {"metric": "fd_other", "value": 0.75})
    assert curves_of(runs, "a") == [[(10, 5, None), (20, 3, None)]]
    assert comparison.measure_in_words(*comparison.unguided(runs, "a", "b")) == "fd of 9 images"
    assert comparison.metrics_of(runs, "a", "b") == ["fd", "fd_other"]  # features of other networks stand apart
    assert comparison.crossing(runs, "a", "b", "images")["difference"] == -1
    assert comparison.crossing(runs, "a", "b", "images", "fd_other")["difference"] == 0.25


@pytest.mark.parametrize(("reference", "weights", "listed"), [
    ("one", "one", []), ("two", "one", ["fd: a and b"]), ("one", "two", ["fd: a and b"])])
def test_a_comparison_of_scores_by_two_references_or_two_networks_is_listed(reference, weights, listed):
    runs = [of("a", 0, (10, 5)), of("b", 0, (10, 7)), of("b", 1, (10, 7))]
    for run, measured in zip(runs, [("one", "one"), (weights, reference), ("other", "other")], strict=True):
        run["scores"][0] |= dict(zip(("extractor_sha256", "reference_sha256"), measured, strict=True))
    crossings = [comparison.crossing(runs[:2], "a", "b", axis, "fd") for axis in comparison.AXES]
    assert comparison.measured_differently({"runs": runs[:2], "crossings": crossings}) == listed
    assert comparison.measured_differently({"runs": [runs[0], runs[2]], "crossings": crossings}) == []  # no pair


def test_curves_are_of_the_seeds_that_both_variants_have_where_the_shorter_one_ends():
    a = [of("a", 0, (10, 5), (20, 3)), of("a", 1, (10, 7), (20, 5)), of("a", 2, (10, 9))]
    b = [of("b", seed, (10, 6 + seed)) for seed in range(3)]
    # Not a's mean of two seeds after 20 images.
    assert curves_of([*a, *b], "a", "b") == [[(10, 7, 2.0)], [(10, 7, 1.0)]]
    assert curves_of([*a, b[0]], "a", "b") == [[(10, 5, None), (20, 3, None)], [(10, 6, None)]]


def test_of_several_crossings_the_last_one_counts_and_lines_that_only_touch_do_not_cross():
    for a, b, at in (
        (((5, 9), (10, 5), (20, 6), (40, 3)), ((5, 8), (10, 6), (20, 5), (40, 4)), 20 * 2**0.5),
        (((10, 5), (20, 3), (40, 2)), ((10, 5), (20, 2)), None),
        (((10, 5), (20, 3), (40, 2)), ((10, 4), (20, 3), (40, 1)), None),
        (((10, 5), (20, 3), (40, 2)), ((10, 4), (20, 3), (40, 4)), 20),
    ):
        runs = [*three("a", *a), *three("b", *b)]
        for names in (("a", "b"), ("b", "a")):
            assert comparison.crossing(runs, *names, "images")["at"] == (at and pytest.approx(at))


def test_a_straight_learning_curve_is_neither_above_nor_below_its_own_points():
    """Both fall by 1 as the images double; b was scored half as often, and over images themselves would lie above a."""
    runs = [of("a", 0, (0, 9), (10, 7), (20, 6), (40, 5)), of("b", 0, (0, 9), (10, 7), (40, 5)), of("b", 1, (10, 1))]
    assert comparison.compared(runs, "a", "b", "images") == [(10, {0: (7, 7)}), (20, {0: (6, 6)}), (40, {0: (5, 5)})]
    # Both have reached 10 to 30.
    ahead = [*three("a", (10, 7), (40, 5)), *three("b", (5, 7), (20, 5), (30, 4))]
    assert [(place, seeds[0][0] > seeds[0][1]) for place, seeds in comparison.compared(ahead, "a", "b", "images")] == [
        (10, True), (20, True), (30, True)]
    assert comparison.crossing(ahead, "a", "b", "images")["at"] is None  # lower from the first place on


def test_a_seed_that_ends_early_makes_no_crossing():
    """Of seeds 0 to 2 a is lower throughout; of seed 3, which ended at 20, b is, by more."""
    runs = [*three("a", (10, 7), (20, 6), (40, 5)), *three("b", (10, 8), (20, 7), (40, 6)),
            of("a", 3, (10, 19), (20, 18)), of("b", 3, (10, 5), (20, 4))]
    found = comparison.crossing(runs, "a", "b", "images")
    assert (found["at"], found["better_at_the_end"], found["n"]) == (None, "a", 3)


def test_a_route_that_a_variant_spells_out_is_that_of_its_record():
    typed = "model.routes=[{selection_ratio: 0.25, start_layer_idx: 2, end_layer_idx: 8}]"
    asked = study.settings_of([typed])["model.routes"]
    route = RouteSettings(start_layer_idx=2, end_layer_idx=8, selection_ratio=0.25)
    assert study.leaf({"model": {"routes": [route.model_dump()]}}, "model.routes") == asked
    assert study.leaf({"model": {"routes": [route.model_dump() | {"x_T": 0.5}]}}, "model.routes") != asked


ROW = {"source": {"step": 4, "guidance": None}, "images": 4, "extractor": {"name": "pixels"},
       "reference": {"path": "x"}}


def test_the_rows_of_several_networks_are_all_the_studys_and_are_made_once(tmp_path, monkeypatch):
    results, called = tmp_path / "results.jsonl", []
    cfg = settings(tmp_path, study=MATRIX | {"score": ["features=[pixels,torchscript]"]})

    def scored(cfg, program, overrides):
        called.append(program)
        plain = study.compose("fid", fid.ScoringSettings, overrides)
        with results.open("a") as file:
            for name in ("fd_pixels", "fd_torchscript"):
                file.write(json.dumps({"tag": plain["tag"]} | ROW | {"metrics": {name: 1.0}}) + "\n")

    monkeypatch.setattr(study, "call", scored)
    for _ in range(2):
        study.score_once(cfg, [], results, ["num_samples=4"], 4)
    rows = study.read_results(results)
    assert [study.point_of(row) for row in rows] == 2 * [["num_samples=4"]] and called == ["fid.py"]
    # A tag of somebody else is no point.
    assert study.point_of({"tag": "mine", "source": {"step": 4}}) is None


def test_runs_and_scores_are_told_apart_by_what_changes_their_numbers():
    for key in ("run_dir", "data.path", "evaluate.every", "log", "compile", "cpu", "steps", "init_from"):
        assert not tells_runs_apart(key)
    for key in ("seed", "model.depth", "data", "ema.decay", "lora.rank"):
        assert tells_runs_apart(key)
    assert [*map(tells_scores_apart, ("reference", "batch_size", "num_steps", "features"))] == 2 * [False] + 2 * [True]


def test_a_run_of_presets_is_known_by_the_names_in_its_record(tmp_path, monkeypatch):
    record = {"step": 4, "config": {"model": {"name": "tread-balanced"}, "diffusion": {"name": "rf"}}}
    monkeypatch.setattr(study.checkpoints, "latest", lambda folder: folder)
    monkeypatch.setattr(study.checkpoints, "read_meta", lambda folder: record)
    flow = {"train": ["model=tread", "routes=balanced", "diffusion=rf_uniform"], "seeds": [0]}
    [run] = study.runs_of(settings(tmp_path, study=MATRIX | {"variants": {"flow": flow}, "compare": []}))
    run.folder.mkdir(parents=True)
    assert study.record_of(run) == record
    for other, seen in (("diffusion=edm", "diffusion=rf"), ("routes=paper", "model=tread-balanced")):
        with pytest.raises(ValueError, match=f"holds another flow, seed 0: {seen} there"):
            study.record_of(run.model_copy(update={"train": [*run.train, other]}))


@pytest.mark.parametrize(("seeds", "share"), [(1, 0), (2, 0), (3, 0.05), (5, 0.05)])
def test_without_a_difference_a_verdict_is_as_rare_as_promised(seeds, share):
    """Two variants alike; in every other trial a seed moves both, and by much more than they differ."""
    rng, trials, found = np.random.default_rng(seeds), 1000, []
    moved = rng.normal(0, 5, (trials, seeds)) * (np.arange(trials)[:, None] % 2)
    for common, noise in zip(moved, rng.normal(0, 1, (trials, 2, 3, seeds)), strict=True):
        runs = [of(name, seed, *((10 * 2**i, common[seed] + noise[v, i, seed]) for i in range(3)))
                for v, name in enumerate("ab") for seed in range(seeds)]
        found.append(comparison.crossing(runs, "a", "b", "images"))
    named = [one["better_at_the_end"] is not None for one in found]
    assert sum(named) == 0 if not share else abs(sum(named) / trials - share) < 0.02  # three standard deviations
    assert sum(one["at"] is not None for one in found) <= 0.01 * trials  # two verdicts, one against the other


def test_what_a_seed_does_to_both_does_not_hide_a_difference():
    """b is lower by 0.9 to 1.1 in each of three seeds, which lie 10 apart; and first higher, so the two cross."""
    runs = [*(of("a", seed, (10, 40 + 10 * seed), (20, 20 + 10 * seed)) for seed in range(3)),
            *(of("b", seed, (10, 41 + 10 * seed), (20, 19.1 + 9.9 * seed)) for seed in range(3))]
    found = comparison.crossing(runs, "a", "b", "images")
    assert found["better_at_the_end"] == "b" and found["difference"] == pytest.approx(-1) and 10 < found["at"] < 20
    half = 4.302653 * 0.1 / 3**0.5  # the quantile of t with two degrees of freedom, from a table
    assert found["interval"] == pytest.approx([-1 - half, -1 + half], abs=1e-6) and found["seeds_lower"] == [0, 3]
    result = {"name": "x", "runs": [run | {"step": 2, "steps": 2} for run in runs], "crossings": [found], "floor": [],
              "timing": None}
    assert "lower at the end: b (-1.248 to -0.752, n=3)." in comparison.tables(result)
    assert "the last at 14" in comparison.tables(result)
    for count, says in ((2, "b in 2 of 2 seeds, no verdict"), (1, "b in 1 of 1 seed, no verdict")):
        some = [run for run in result["runs"] if run["seed"] < count]
        found = comparison.crossing(some, "a", "b", "images")
        assert (found["better_at_the_end"], found["interval"], found["at"]) == (None, None, None)
        page = comparison.tables(result | {"runs": some, "crossings": [found]})
        assert f"none shown; lower at the end: {says}." in page and f"| {says} |" in page


@pytest.mark.parametrize("diffusion", [EDM(), RF()])
def test_dense_and_routed_runs_of_a_seed_see_the_same_images_noise_and_labels(fresh_accelerator, tmp_path, diffusion):
    write_latents(tmp_path, 64, (4, 8, 8), 4)
    latents, seen = open_latents(tmp_path), {}
    for name, routes in (("dit", []), ("tread", [Route(1, 2, 0.5)])):
        torch.manual_seed(0)
        model = DiT(input_size=8, patch_size=2, in_channels=4, hidden_size=32, depth=4, num_heads=2, num_classes=4,
                    routes=routes)
        accelerator = Accelerator(cpu=True)
        objective = DiffusionLoss(model, diffusion)
        called, optimizer = accelerator.prepare(objective, torch.optim.AdamW(model.parameters(), fused=True))
        seen[name] = [model.state_dict()["x_embedder.proj.weight"].clone()]
        model.register_forward_pre_hook(lambda _, inputs, name=name: seen[name].extend(inputs))
        loader = batches(latents, 16, seed=7)
        for step in range(5):  # into the second epoch
            torch.manual_seed(step_seed(7, step, 0))
            stored, y, _ = next(loader)
            x = to_latent(stored, latents.kind)  # moments: a draw, too
            seen[name] += [stored, x, y]
            train_step(accelerator, called, objective, optimizer, x, y, {}, label_dropout=0.5, clip_norm=None,
                       num_parts=1)
        loader.close()
    assert len(seen["dit"]) == 1 + 5 * 6 and (seen["dit"][6] == 4).any()  # some labels are dropped
    assert all(torch.equal(one, other) for one, other in zip(seen["dit"], seen["tread"], strict=True))
