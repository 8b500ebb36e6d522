"""A study: runs that resume after a kill, scores of equal keys over seeds, and the same randomness dense and routed."""

import json
import os
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
from accelerate.state import AcceleratorState
from conftest import change_record, run_command
from training_runs import trained

import fid
import train
from dit import DiT
from latents.folder import open_latents
from runtime.command import commit, parse_options
from runtime.schema import leaves, read
from scripts import comparison, curves, study
from scripts.benchmark import write_latents

TINY = ["experiment=quickstart", "batch_size=8", "model.hidden_size=32", "model.num_heads=2", "model.depth=6",
        "steps=4", "samples.every=0", "log.every=2", "log.trackers=[]", "checkpoint.every=2", "evaluate.every=2",
        "evaluate.num_samples=4", "evaluate.num_steps=2"]
MATRIX = {"name": "tiny", "train": TINY, "score": ["num_steps=2", "features=pixels", "num_samples=6"], "seeds": [0, 1],
          "variants": {"dit": {"train": ["model=dit"], "at_end": ["cfg"]},
                       "tread": {"train": ["model=tread"], "seeds": [0]},
                       "tuned": {"train": ["model=dit", "init_from={runs}/tread-seed{seed}", "steps=1"], "seeds": [0]}},
          "points": {"cfg": [["num_samples=4", "guidance=cfg_tread", "scale=2", "gamma1=0", "gamma2=0.5",
                              "routes=[{start_layer_idx: 1, end_layer_idx: 3}]"]]}, "compare": [["dit", "tread"]]}


def settings(out, **changed) -> study.StudySettings:
    return read(study.StudySettings, {
        "study": MATRIX, "out": str(out), "rows": [], "also": [], "part": None, "tasks": ["train", "score", "report"],
        "seconds": {}, "only": None, **changed})


def run_of(*train, **changed) -> study.Run:
    return study.Run(**{"variant": "x", "seed": 0, "folder": Path("x"), "train": [*train], "at_end": [], "at_each": [],
                        "held_out": [], **changed})


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_every_run_is_in_exactly_one_part(tmp_path):
    runs = study.runs_of(settings(tmp_path))
    # Those that are compared a seed at a time, so that an early end leaves a comparison.
    assert [(run.variant, run.seed) for run in runs] == [("dit", 0), ("tread", 0), ("dit", 1), ("tuned", 0)]
    assert f"init_from={tmp_path}/runs/tread-seed0" in runs[3].train and "steps=4" not in runs[3].train
    parts = [run for part in ("1/3", "2/3", "3/3") for run in study.in_part(runs, part)]
    assert sorted(run.folder for run in parts) == sorted(run.folder for run in runs)
    for wrong in ("0/3", "4/3", "x", "2"):
        with pytest.raises(ValueError, match="write part=2/6"):
            study.in_part(runs, wrong)


def popen(line: list[str], process_group: int) -> SimpleNamespace:
    """Runs what a study calls in this process, without the seconds that another takes to begin."""
    assert line[0] == sys.executable and process_group == 0 and parse_options(line[2:])
    AcceleratorState._reset_state(reset_partial_state=True)
    run_command({"train.py": train.main, "fid.py": fid.main}[Path(line[1]).name], *line[1:])
    return SimpleNamespace(wait=lambda: 0)


def test_a_study_trains_scores_and_plots_and_does_nothing_twice(shapes, pixel_reference, tmp_path, monkeypatch,
                                                                fresh_accelerator):
    monkeypatch.setattr(study, "subprocess", SimpleNamespace(Popen=popen))
    matrix = MATRIX | {"train": [*TINY, f"data.path={shapes}", f"evaluate.reference={pixel_reference}"], "seeds": [0],
                       "score": [*MATRIX["score"], "sampler.S_churn=0", f"reference={pixel_reference}"],
                       "floor": [[f"images={shapes}", "num_samples=4"]]}
    out, cfg = tmp_path / "study", settings(tmp_path / "study", study=matrix)

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (out / "runs").rglob("*") if path.is_file()}

    study.main.__wrapped__(cfg)
    told = json.loads((out / "study.json").read_text())
    assert {run["variant"]: [score["step"] for score in run["scores"]] for run in told["runs"]} == {
        "dit": [0, 2, 4, 4], "tread": [0, 2, 4], "tuned": [0, 1]}
    assert told["runs"][0]["history"][0]["commit"] == commit()
    assert [(floor["images"], floor["num_samples"]) for floor in told["floor"]] == [("shapes", 4)]
    for score in (*told["runs"][0]["scores"], *told["floor"]):
        assert (score["commit"], score["device"], score["versions.torch"]) == (commit(), "cpu", torch.__version__)
    first = told["runs"][0]["scores"][0]
    free = {name for name in first.keys() - dict(comparison.measure_of(first)).keys() if "versions." not in name}
    assert free <= {  # place in training, score, time, cost, and where it was computed; all else is the key
        "step", "images", "flops", "source.step", "value", "precision", "recall", "seconds", "finished", "batch_size",
        "processes", "multiply_adds_an_image", "source.evaluations", "source.multiply_adds.linear", "commit", "device",
        "source.multiply_adds.attention", "source.in_training", "source.weights_sha256",
        "source.compiled", "extractor.weights", "reference.path"}
    assert {"source.weights", "source.num_steps"} <= first.keys() - free
    guidance = [score["guidance"] for score in told["runs"][0]["scores"]]
    assert guidance[:3] == 3 * ["unguided"] and guidance[3].startswith("scale 2.0, gamma1 0.0, gamma2 0.5, drop_label ")
    dense, routed = ({score["step"]: score["flops"] for score in run["scores"]} for run in told["runs"][:2])
    assert dense[4] == 2 * dense[2] > routed[4] > 0
    page = (out / "study.md").read_text()
    assert all((out / name).is_file() for name in ("score-over-images.png", "differences.png"))
    assert "| shapes | fd_pixels | 4 |" in page and f"| dit | {guidance[3]} | 1.7" in page
    assert "source.weights ema" not in page and "weights ema" in page and page.count("of 1 seed, no verdict") == 4
    before = files()
    study.main.__wrapped__(cfg)
    broken = matrix | {"variants": matrix["variants"] | {"broken": {"train": ["model=nope"]}}}
    study.main.__wrapped__(settings(out, study=broken, only=["dit"], tasks=["train"]))  # checks what it runs
    assert files() == before

    # A run of other settings under a name of the study is neither reported nor trained on.
    foreign = settings(out, study=matrix | {"train": [*matrix["train"], "optimizer.lr=1e-3"]})
    for tasks in (["report"], ["train"]):
        with pytest.raises(ValueError, match="dit-seed0 holds another dit, seed 0: optimizer.lr=0.004 there, "
                                             "optimizer.lr=0.001 in this study"):
            study.main.__wrapped__(foreign.model_copy(update={"tasks": tasks}))
    with pytest.raises(ValueError, match="holds dit, seed 0, after 4 steps, and this study asks for steps=2"):
        study.collect(settings(out, study=matrix, also=["steps=2"]))
    with pytest.raises(ValueError, match="was begun with steps=4, and its learning rate or routes change at shares"):
        study.collect(settings(out, study=matrix, also=["steps=8"]))

    # A score that somebody made of one of its runs is not the study's. A run that was killed between its last save and
    # the score of it is not finished.
    results = out / "runs/tread-seed0/results.jsonl"
    rows = results.read_text().splitlines(keepends=True)
    row = json.loads(rows[0])
    results.write_text("".join(rows) + json.dumps(row | {"source": row["source"] | {"in_training": False}}) + "\n")
    routed = next(run for run in study.runs_of(cfg) if run.variant == "tread")
    assert [score["step"] for score in study.from_disk(routed)["scores"]] == [0, 2, 4] and study.finished(routed)
    guided = routed.model_copy(update={"train": [*routed.train, "evaluate.guidance_scales=[null,1.5]"]})
    assert not study.finished(guided)
    results.write_text("".join(rows[:-1]))
    assert not study.finished(routed)
    results.write_text("".join(rows))

    # A checkpoint that is kept is scored at every point of at_each, once; other settings are another score.
    run, results = study.runs_of(cfg)[0], out / "runs/dit-seed0/results.jsonl"
    each = run.model_copy(update={"at_each": [["num_samples=3"]]})
    for score in (matrix["score"], matrix["score"], ["num_steps=3", *matrix["score"][1:]]):
        study.score_checkpoints(settings(out, study=matrix | {"score": score}), each)
    rows = [json.loads(line) for line in results.read_text().splitlines()][4:]
    assert [(row["source"]["step"], row["images"], row["source"]["num_steps"]) for row in rows] == [
        (4, 3, 2), (2, 3, 2), (4, 3, 3), (4, 4, 3), (2, 3, 3)]

    # The weights go, the scores stay where they are given as rows, and nothing is trained again.
    (out / "study.json").rename(tmp_path / "kept.json")
    shutil.rmtree(out / "runs")
    elsewhere = settings(tmp_path / "other", study=matrix, rows=[str(tmp_path / "kept.json")],
                         tasks=["train", "report"])
    study.main.__wrapped__(elsewhere)
    assert not (tmp_path / "other/runs").exists() and not (tmp_path / "other/study.json").exists()
    assert (tmp_path / "other/study.md").read_text() == page


@pytest.mark.parametrize(("changed", "by_share"), [
    ([], False), (["optimizer.schedule=cosine"], True), (["route_schedule.dense_after=0.85"], True),
    (["route_schedule.dense_after=3"], False), (["route_schedule.changes=[[0.5,[]]]"], True),
])
def test_a_run_whose_rate_or_routes_change_at_shares_of_it_is_not_lengthened(changed, by_share):
    asked = leaves(study.settings_composed(("model=tread", "steps=4", "optimizer.schedule=constant", *changed)))
    assert study.changes_by_share(asked) == by_share


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
        study.call(str(tmp_path / "stub.py"), [str(tmp_path / "told"), code])
    assert ends is ValueError or ended.value.code == 143
    assert (tmp_path / "told").read_text() == "saved after 1 signal" and signal.getsignal(signal.SIGTERM) == handler


# ---- rows of other machines -----------------------------------------------------------------------------------------


def of(variant: str, seed: int, *scores: tuple[int, float], **facts) -> dict:
    return {"variant": variant, "seed": seed, "step": 4, "steps": 4, "train": TINY, "scores": [
        {"step": images // 8, "images": images, "flops": images, "metric": "fd", "value": value, "num_samples": 9,
         "guidance": "unguided", **facts} for images, value in scores]}


def written(path: Path, *runs: dict, **changed) -> str:
    """Writes a study.json; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"name": "tiny", "runs": runs, "floor": [], **changed}))
    return str(path)


def test_rows_of_several_machines_are_shown_together(tmp_path):
    one = written(tmp_path / "one.json", of("dit", 0, (8, 5.0)) | {"step": 1},
                  timing={"rounds": {"dit": [3.0, 1.0, 2.0], "tread": [1.0]}})
    other = written(tmp_path / "other.json", of("tread", 0, (8, 4.0)), of("tread", 7, (8, 1.0)))
    own, shown = study.collect(settings(tmp_path / "study", rows=[one, other], seconds={"tread": 9.0}))
    assert own["runs"] == [] and [(run["variant"], run["seed"]) for run in shown["runs"]] == [
        ("dit", 0), ("tread", 0), ("tread", 7)]
    assert [run["scores"][0]["seconds"] for run in shown["runs"]] == [2.0, 9.0, 9.0]  # medians, or what was typed
    page = comparison.page(shown)
    assert "dit, seed 0: not finished, 1 of 4 steps" in page and "| dit in 0 of" not in page
    assert "tread against dit, at equal images seen: fd of 9 images" in page


@pytest.mark.parametrize(("rows", "says"), [
    ({"name": "big"}, "is of the study big, and this one is tiny"),
    ({"runs": 5}, "is not as this code writes it"), ({"runs": [{"seed": 0}]}, "is not as this code writes it"),
    ({"runs": [of("dit", 7) | {"train": ["model.depth=9"]}]}, "another dit, seed 7: model.depth=9 there, model.depth="),
    ({"runs": [of("dit", 0) | {"train": [*TINY, "optimizer.weight_decay=0.1"]}]}, "with optimizer.weight_decay=0.1"),
    ({"runs": [of("dit", 0) | {"step": 5}]}, "holds dit, seed 0, after 5 steps, and this study asks for steps=4"),
    ({"runs": [of("dit", 0, (8, 5.0)), of("dit", 0, (8, 5.0))]}, "dit, seed 0, has two scores at step 1"),
    ({"runs": [of("dit", 0), of("dit", 0)]}, "dit, seed 0, is in two of .*/runs, .*rows.json: take one of them out"),
])
def test_rows_that_cannot_be_shown_with_this_study_raise_a_one_line_error(tmp_path, rows, says):
    path = written(tmp_path / "rows.json", **rows)
    with pytest.raises(ValueError, match=says):
        study.collect(settings(tmp_path / "study", rows=[path]))


def test_rows_of_runs_without_a_setting_that_was_typed_here_are_refused(tmp_path):
    path = written(tmp_path / "rows.json", of("dit", 0, (8, 5.0)))
    with pytest.raises(ValueError, match="with label_dropout=<not set>, and this study has label_dropout=0.2: give"):
        study.collect(settings(tmp_path / "study", rows=[path], also=["label_dropout=0.2"]))
    study.collect(settings(tmp_path / "study", rows=[path], also=["compile=true"]))  # which changes no result


def test_scores_whose_runs_are_gone_are_not_replaced(tmp_path):
    written(tmp_path / "study/study.json", of("dit", 0, (8, 5.0)))
    with pytest.raises(ValueError, match=r"has scores of dit, seed 0, whose folder is gone: move it, and give it as"):
        study.collect(settings(tmp_path / "study"))


# ---- what is compared -----------------------------------------------------------------------------------------------


def result_of(*runs: dict, pairs=(("a", "b"),)) -> dict:
    return {"name": "x", "runs": [*runs], "floor": [], "compare": pairs}


OLD = {"extractor_sha256": "one", "reference_sha256": "one"}


@pytest.mark.parametrize(("one", "other", "differing"), [
    ({}, {}, None),
    ({"commit": "x", "device": "cpu", "source.weights_sha256": "1", "extractor.weights": "a.pt"},
     {"commit": "y", "device": "gpu", "source.weights_sha256": "2", "extractor.weights": "b.pt"}, None),
    ({"source.num_steps": 6}, {"source.num_steps": 2}, "source.num_steps"),
    ({"source.weights": "ema"}, {"source.weights": "ema-0.99"}, "source.weights"),
    ({"resolution": None}, {}, "resolution"),                       # an old row that lacks a fact
    ({"a new fact": 1}, {"a new fact": 2}, "a new fact"),
    ({"reference.path": "a", "reference.sha256": "1"}, {"reference.path": "b", "reference.sha256": "1"}, None),
    ({"reference.path": "a"}, {"reference.path": "b"}, "reference.path"),    # latents, which are not hashed
    ({"num_samples": 8}, {"num_samples": 9}, "num_samples"), ({"metric": "fid"}, {"metric": "fd"}, "metric"),
    ({"guidance": "scale 2"}, {"guidance": "unguided"}, "guidance"),
    (OLD, OLD, None), (OLD, OLD | {"reference_sha256": "two"}, "reference_sha256"),
])
def test_only_scores_that_differ_in_seed_time_and_score_alone_are_compared(one, other, differing):
    result = result_of(of("a", 0, (8, 5.0), **one), of("b", 0, (8, 4.0), **other))
    assert bool(comparison.comparisons(result)) == (differing is None)
    page = comparison.page(result)
    assert (f"* Not compared: a and b, which differ in {differing}." in page) == (differing is not None)
    assert ("several values of commit, device: a and b" in page) == ("commit" in one)


def test_a_variant_with_more_scores_does_not_win_by_them():
    """Weights ema and ema-0.99 at 2 sampler steps, and of a alone at 6: the last row must not stand for the others."""
    def runs(variant: str, value: float) -> list[dict]:
        scores = [score for name in ("ema", "ema-0.99") for score in of(variant, 0, (8, value), **{
            "source.weights": name, "source.num_steps": 2})["scores"]]
        return [of(variant, seed) | {"scores": [*scores]} for seed in range(3)]

    a, b = runs("a", 10.01), runs("b", 10.0)
    for run in a:
        run["scores"] += [score | {"source.num_steps": 6, "value": 1.0} for score in run["scores"]]
    result = result_of(*a, *b)
    assert len(comparison.comparisons(result)) == 2
    page = comparison.page(result)
    for name in ("ema", "ema-0.99"):
        assert f"b against a, at equal images seen: fd of 9 images, num_steps 2, weights {name}" in page
    assert "Held fixed in all tables: guidance unguided, metric fd, num_samples 9." in page
    a[0]["scores"].append(a[0]["scores"][0] | {"value": 3.0})
    with pytest.raises(ValueError, match=r"a, seed 0, has two scores at step 1 \(fd 10.01 and 3\) that differ in no"):
        comparison.page(result)


def test_seeds_scored_by_different_exports_are_paired_within_the_seed():
    runs = [of(variant, seed, (8, value), **OLD | {"reference_sha256": str(seed)})
            for variant, value in (("a", 5.0), ("b", 4.0)) for seed in range(3)]
    result = result_of(*runs)
    assert "| b (-1.000 to -1.000, n=3) |" in comparison.page(result)
    assert "* Compared over several values of reference_sha256: a and b." in comparison.page(result)


def compared(runs, axis="images"):
    [(_, _, *sides)] = comparison.comparisons(result_of(*runs))
    return comparison.compared(*sides, axis)


def test_a_straight_learning_curve_is_neither_above_nor_below_its_own_points():
    """Both fall by 1 as the images double; b was scored half as often, and over images themselves would lie above a."""
    runs = [of("a", 0, (0, 9), (10, 7), (20, 6), (40, 5)), of("b", 0, (0, 9), (10, 7), (40, 5)), of("b", 1, (10, 1))]
    assert compared(runs) == [(10, {0: (7, 7)}), (20, {0: (6, 6)}), (40, {0: (5, 5)})]
    # Both have reached 10 to 30.
    ahead = [of("a", 0, (10, 7), (40, 5)), of("b", 0, (5, 7), (20, 5), (30, 4))]
    assert [(place, seeds[0][0] > seeds[0][1]) for place, seeds in compared(ahead)] == [
        (10, True), (20, True), (30, True)]


def test_curves_and_differences_are_drawn_of_the_seeds_that_both_variants_have(tmp_path):
    runs = [*(of("a", seed, (8, 5.0), (16, 4.0 + seed)) for seed in (0, 1)), of("b", 1, (8, 4.0)), of("b", 2, (8, 4.0))]
    paths = comparison.draw_figures(result_of(*runs), tmp_path)
    names = ["score-over-images.png", "score-over-flops.png", "differences.png"]
    assert [path.name for path in paths] == names and all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert "tread" not in comparison.page(result_of(*runs)) and compared(runs) == [(8, {1: (5.0, 4.0)})]
    begun = of("b", 0, (0, 9.0))  # has only the score of the untrained network so far
    assert all(path.is_file() for path in comparison.draw_figures(result_of(*runs, begun), tmp_path))
    assert comparison.draw_figures(result_of(*runs, pairs=[]), tmp_path) == []
    assert not any(path.exists() for path in paths)  # of the earlier report


def test_what_a_seed_does_to_both_does_not_hide_a_difference():
    """b is lower by 0.9 to 1.1 in each of three seeds, which lie 10 apart."""
    pairs = [(20 + 10 * seed, 19.1 + 9.9 * seed) for seed in range(3)]
    pair = comparison.paired(pairs)
    half = 4.302653 * 0.1 / 3**0.5  # the quantile of t with two degrees of freedom, from a table
    assert pair["interval"] == pytest.approx([-1 - half, -1 + half], abs=1e-6)
    assert comparison.verdict("a", "b", pair) == "b (-1.248 to -0.752, n=3)"
    for count, says in ((2, "b in 2 of 2 seeds, no verdict"), (1, "b in 1 of 1 seed, no verdict")):
        assert comparison.verdict("a", "b", comparison.paired(pairs[:count])) == says
    # From a and b to c and d the difference falls by 0.9, 1 and 1.1.
    runs = [of(variant, seed, (8, value + 10 * seed)) for seed in range(3)
            for variant, value in (("a", 5.0), ("b", 7.0), ("c", 4.0), ("d", 5.1 - seed / 10))]
    result = result_of(*runs, pairs=(("a", "b"), ("c", "d")))
    row = "| b − a | d − c | fd of 9 images | 8 | -1.000 (-1.248 to -0.752) |"
    assert row in comparison.page(result | {"changes": True}) and row not in comparison.page(result)


@pytest.mark.parametrize(("seeds", "share"), [(1, 0), (2, 0), (3, 0.05), (5, 0.05)])
def test_without_a_difference_a_verdict_is_as_rare_as_promised(seeds, share):
    """Two variants alike; in every other trial a seed moves both, and by much more than they differ."""
    rng, trials = np.random.default_rng(seeds), 1000
    moved = rng.normal(0, 5, (trials, seeds)) * (np.arange(trials)[:, None] % 2)
    pairs = [comparison.paired(zip(*(common + noise), strict=True))
             for common, noise in zip(moved, rng.normal(0, 1, (trials, 2, seeds)), strict=True)]
    excluded = sum(bool(pair["interval"]) and not pair["interval"][0] <= 0 <= pair["interval"][1] for pair in pairs)
    assert excluded == 0 if not share else abs(excluded / trials - share) < 0.02  # three standard deviations


# ---- curves, losses, randomness -------------------------------------------------------------------------------------


def test_the_curves_of_runs_are_drawn_over_their_steps(tmp_path, monkeypatch, capsys):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 2, "loss": 0.9}\n{"step": 4, "loss": 0.8}\n')
    (tmp_path / "b/results.jsonl").write_text("".join(
        json.dumps({"metrics": {"fid": value}, "source": {"in_training": made, "step": step, "weights": "ema",
                                                          "guidance": guidance}}) + "\n"
        for made, step, value, guidance in ((True, 0, 9.0, None), (True, 4, 5.0, {"scale": 2.0}), (None, 4, 1.0, 0))))
    losses, scores = curves.draw([tmp_path / "a", tmp_path / "b"]).axes
    assert [(line.get_label(), [*line.get_ydata()]) for line in losses.lines] == [("a", [0.9, 0.8]), ("b", [0.9, 0.8])]
    assert [(line.get_label(), [*line.get_ydata()]) for line in scores.lines] == [
        ("b: fid, ema", [9.0]), ("b: fid, ema, scale 2", [5.0])]
    monkeypatch.setattr(sys, "argv", ["curves.py", str(tmp_path / "b"), "--out", str(tmp_path / "c.png")])
    curves.main()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG") and "c.png" in capsys.readouterr().out
    with pytest.raises(ValueError, match="has no metrics.jsonl with rows: give folders of runs"):
        curves.draw([tmp_path])


def test_held_out_losses_go_by_the_classes_names_or_numbers_and_by_the_folders_names(tmp_path, monkeypatch):
    from scripts.studies import held_out

    write_latents(tmp_path, 8, (4, 8, 8), 4)
    change_record(tmp_path, class_names=None)
    latents = open_latents(tmp_path)
    assert held_out.read(latents, 8, held_out.names_of(latents))[1].tolist() == latents.labels.tolist()
    with pytest.raises(ValueError, match="has class 3, which the first one lacks"):
        held_out.read(latents, 8, ["0", "1", "2"])
    for folder in ("a", "b"):
        (tmp_path / folder / "latents").mkdir(parents=True)
        write_latents(tmp_path / folder / "latents", 8, (4, 8, 8), 4)
    monkeypatch.setattr(held_out, "load_trained", lambda name: None)
    folders = [f"{tmp_path}/{name}/latents" for name in "ab"]
    monkeypatch.setattr(sys, "argv", ["held_out.py", "x", *folders, "--out", "o"])
    with pytest.raises(SystemExit, match="b/latents have one name, by which losses are recorded: rename one"):
        held_out.main()


@pytest.mark.parametrize("diffusion", ["edm", "rf"])
def test_dense_and_routed_runs_of_a_seed_see_the_same_images_noise_and_labels(shapes, tmp_path, monkeypatch, diffusion):
    seen, forward = [], DiT.forward

    def watched(net, x, t, y, *arguments, **options):
        seen[-1] += [x, t, y] if seen[-1] else [net.x_embedder.proj.weight.detach().clone(), x, t, y]
        return forward(net, x, t, y, *arguments, **options)

    monkeypatch.setattr(DiT, "forward", watched)
    for model in ("dit", "tread"):
        seen.append([])
        trained(tmp_path / model, shapes, f"model={model}", f"diffusion={diffusion}", "batch_size=100", "steps=5",
                "label_dropout=0.5")        # into the second epoch
    assert len(seen[0]) == 1 + 5 * 3 and (seen[0][3] == 6).any()  # some labels are dropped
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))
