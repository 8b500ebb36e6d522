"""What compare.py compares and what it refuses, on real runs and on files of rows."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from training_runs import killed, trained

from dit import DiT
from runtime.files import append_row, read_rows
from scripts import compare

RESULTS = ROOT / "docs/results"


def told(monkeypatch, capsys, *arguments: object) -> str:
    """What compare.py prints; a mistake is a SystemExit with its sentence."""
    monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, arguments)])
    compare.main()
    return capsys.readouterr().out


def of(variant: str, seed: int, *scores: tuple[int, float], settings=(), metric="fd_x", guidance=None, **facts) -> dict:
    """A finished run with scores of 9 images, after so many images each."""
    row = {"images": 9, "source": {"guidance": guidance}, **facts}
    return {"variant": variant, "seed": seed, "step": 4, "steps": 4, "settings": dict(settings), "history": [],
            "losses": [], "scores": [compare.score_of(row | {"metrics": {metric: value}}) | {
                "step": images // 8, "images": images, "flops": images} for images, value in scores]}


def page(*runs: dict, pairs=(("a", "b"),), changes=False) -> str:
    return compare.page(*compare.comparable([*runs]), [*pairs], changes)


@pytest.fixture(scope="module")
def runs(shapes, pixel_reference, tmp_path_factory) -> Path:
    """Dense and routed runs of two seeds, and a copy of one that was killed."""
    place = tmp_path_factory.mktemp("runs")
    for model in ("dit", "tread"):
        for seed in (0, 1):
            trained(place / f"{model}-{seed}", shapes, f"model={model}", f"seed={seed}", "steps=4",
                    "checkpoint.every=2", "log.every=2", "evaluate.every=2", "evaluate.num_samples=4",
                    "evaluate.num_steps=2", f"evaluate.reference={pixel_reference}")
    killed(place / "dit-1", 2, place / "killed")
    return place


def test_runs_and_the_rows_that_another_machine_brought_give_one_page(runs, tmp_path, monkeypatch, capsys):
    dit, tread = ([f"{model}={runs}/{model}-{seed}" for seed in (0, 1)] for model in ("dit", "tread"))
    out = f"out={tmp_path}/x", "seconds=dit:0.2,tread:0.1"
    text = told(monkeypatch, capsys, *dit, *tread, *out)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "x.md").read_text() in text
    assert "* dit and tread differ in model.name (dit and tread), model.routes ([] and [{" in text
    rows = [row.split(" | ") for row in text.splitlines() if row.startswith("| tread − dit")]
    assert [row[2] for row in rows if row[1] == "images seen"] == ["16", "32"]
    assert {row[1] for row in rows} == {"images seen", "training FLOPs", "seconds of training"}
    assert all("(n=2, no verdict)" in row[5] and row[6] == " |" for row in rows)
    assert told(monkeypatch, capsys, tmp_path / "x.jsonl").strip() == (tmp_path / "x.md").read_text().strip()
    shutil.copytree(runs / "tread-0", tmp_path / "moved", ignore=shutil.ignore_patterns("*.safetensors"))
    assert (tmp_path / "x.md").read_text() in told(monkeypatch, capsys, *dit, f"tread={tmp_path}/moved", tread[1], *out)
    one, other = (compare.read_run("x", runs / f"{model}-0") for model in ("dit", "tread"))
    none, half, dense = (score["flops"] for score in one["scores"])
    assert dense == 2 * half > other["scores"][2]["flops"] > none == 0
    [losses, scores] = compare.draw([one], []).axes     # one run is drawn with its losses and scores
    assert [*losses.lines[0].get_xdata()] == [2, 4] and [*scores.lines[0].get_xdata()] == [0, 16, 32]
    for out, why in ((tmp_path / "x", "has scores of dit, seed 0, which is not given"), (ROOT / "README", "not write")):
        with pytest.raises(SystemExit, match=why):
            told(monkeypatch, capsys, *tread, f"out={out}")


def test_a_killed_run_takes_no_part_and_rows_without_a_run_are_refused(runs, tmp_path, monkeypatch, capsys):
    text = told(monkeypatch, capsys, f"a={runs}/tread-0", f"b={runs}/dit-0", f"b={runs}/killed")
    assert "* Left out: b, seed 1, which has taken 2 of 4 steps." in text and "n=2" not in text
    for option in ("pairs=a:b", "seconds=b:0.2"):
        with pytest.raises(SystemExit, match=r"b is no variant with a finished run: write pairs=.* with some of a\."):
            told(monkeypatch, capsys, f"a={runs}/tread-0", f"b={runs}/killed", option)
    (tmp_path / "x.jsonl").write_text((RESULTS / "study-tokens/study.jsonl").read_text()[:-9])
    shutil.copytree(runs / "dit-0", tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copytree(runs / "dit-0", tmp_path / "longer")      # a folder whose former run was longer
    row = read_rows(runs / "dit-0/results.jsonl")[-1]
    append_row(tmp_path / "longer/results.jsonl", row | {"source": row["source"] | {"step": 6}})
    for path, why in (("longer", "has a score of step 6 of a run that ended at step 4: move"),
                      ("run", "has no checkpoint: give folders"),
                      ("run/results.jsonl", "is not as compare.py has written it: copy it again"),
                      ("x.jsonl", "is not as compare.py has written it: copy it again")):
        with pytest.raises(SystemExit, match=why):
            told(monkeypatch, capsys, tmp_path / path)


def test_a_run_that_was_resumed_with_other_routes_or_length_is_refused(shapes, tmp_path):
    often = ("checkpoint.every=2", "model=tread", "optimizer.schedule=cosine")
    trained(tmp_path / "x", shapes, *often, "steps=2")
    trained(tmp_path / "x", shapes, *often, "steps=4", "route_schedule.dense_after=3")
    trained(tmp_path / "x", shapes, *often, "steps=4", "route_schedule.dense_after=3")
    run = compare.read_run("x", tmp_path / "x")
    changed = [entry["changed"].keys() for entry in run["history"] if "changed" in entry]
    assert changed == [{"steps", "route_schedule"}]
    with pytest.raises(ValueError, match=r"x, seed 0, was resumed with another setting \(steps was 2 and is now 4\)"):
        compare.comparable([run])


@pytest.mark.parametrize(("one", "other", "differing"), [
    ({"commit": "x", "device": "cpu", "source.weights_sha256": "1", "extractor.weights": "a.pt"},
     {"commit": "y", "device": "gpu", "source.weights_sha256": "2", "extractor.weights": "b.pt"}, None),
    ({"source.num_steps": 6}, {"source.num_steps": 2}, "source.num_steps"), ({"tf32": True}, {"tf32": False}, "tf32"),
    ({"source.weights": "ema"}, {"source.weights": "ema-0.99"}, "source.weights"),
    ({"a new fact": 1}, {"a new fact": 2}, "a new fact"), ({"resolution": None}, {}, "resolution"),
    ({"reference": {"path": "a", "sha256": "1"}}, {"reference": {"path": "b", "sha256": "1"}}, None),
    ({"reference": {"path": "a", "sha256": None}}, {"reference": {"path": "b", "sha256": None}}, "reference.path"),
    ({"extractor": {"sha256": "1"}}, {"extractor": {"sha256": "2"}}, "extractor.sha256"),
    ({"images": 8}, {"images": 9}, "num_samples"), ({"metric": "fd_a"}, {"metric": "fd_b"}, "metric"),
    ({"guidance": {"scale": 2, "weak": {"checkpoint": "a", "weights_sha256": "1", "step": 2}}},
     {"guidance": {"scale": 2, "weak": {"checkpoint": "b", "weights_sha256": "2", "step": 2}}}, None),
    ({"guidance": {"scale": 2}}, {}, "guidance"), ({}, {"metric": "precision"}, "seeds or steps"),
])
def test_only_scores_that_differ_in_seed_time_and_score_alone_are_compared(one, other, differing):
    runs = [of("a", 0, (8, 5.0), **one), of("b", 0, (8, 4.0), **other)]
    for run in runs:    # a row without a distance gives no score
        run["scores"] = [score for score in run["scores"] if "value" in score]
    text = page(*runs)
    assert ("| b − a | images seen |" in text) == (differing is None)
    assert (f"* Not compared: scores of a and b, which differ in {differing}." in text) == (differing is not None)
    assert ("Several: commit, device." in text) == ("commit" in one)


def test_each_set_of_settings_has_its_own_table_and_two_scores_of_one_set_are_refused():
    runs = [of(variant, seed, (8, value)) for variant, value in (("a", 10.01), ("b", 10.0)) for seed in range(3)]
    for run in runs:
        run["scores"] = [score | {"measure": score["measure"] | {"source.weights": name}} for score in run["scores"]
                         for name in ("ema", "ema-0.99")]
    assert page(*runs).count("| b − a | images seen | 8 | 10.000 ± 0.000 (n=3) | 10.010 ± 0.000 (n=3) | -0.010") == 2
    runs[0]["scores"].append(runs[0]["scores"][0] | {"value": 3.0})
    with pytest.raises(ValueError, match=r"a, seed 0, has two scores at step 1 of one measure \(10.01 and 3\)"):
        page(*runs)


@pytest.mark.parametrize(("other", "says"), [
    (of("a", 0, settings={"optimizer.lr": 1}), "a, seed 0, is given twice"),
    (of("a", 1, settings={"seed": 1, "optimizer.lr": 2, "name": "y", "data.path": "y"}), r"optimizer.lr \(1 and 2\)"),
    (of("a", 1, settings={"optimizer.lr": 1, "steps": 8}), "differ in steps"),
    (of("a", 1, settings={"optimizer.lr": 1, "label_dropout": 0}), r"label_dropout \(<not set> and 0\), not only"),
])
def test_runs_of_one_variant_differ_in_the_seed_alone(other, says):
    first = of("a", 0, settings={"optimizer.lr": 1, "name": "x", "data.path": "x"})
    with pytest.raises(ValueError, match=says):
        page(first, other)
    assert page(first, of("a", 1, settings={"optimizer.lr": 1, "name": "y"}), pairs=())


def test_a_straight_learning_curve_is_neither_above_nor_below_its_own_points():
    """Both fall by 1 as the images double; b was scored half as often, and over images themselves would lie above a."""
    def compared(*runs: dict) -> dict:
        [variants] = compare.by_measure([*runs]).values()
        return {each.place: [*each.values.values()] for each in compare.compared(variants, ("a", "b"))
                if each.axis == "images"}

    runs = [of("a", 0, (0, 9), (10, 7), (20, 6), (40, 5)), of("b", 0, (0, 9), (10, 7), (40, 5)), of("b", 1, (10, 1))]
    assert compared(*runs) == {10: [(7, 7)], 20: [(6, 6)], 40: [(5, 5)]}
    ahead = compared(of("a", 0, (10, 7), (40, 5)), of("b", 0, (5, 7), (20, 5), (30, 4)))    # both have reached 10 to 30
    assert {place: a > b for place, [(a, b)] in ahead.items()} == {10: True, 20: True, 30: True}


def test_what_a_seed_does_to_both_does_not_hide_a_difference_or_its_change():
    """b is lower by 0.9 to 1.1 in each of three seeds, which lie 10 apart; from a, b to c, d it falls by as much."""
    half = 4.302653 * 0.1 / 3**0.5  # the quantile of t with two degrees of freedom, from a table
    assert compare.interval([-0.9, -1.0, -1.1]) == pytest.approx((-1 - half, -1 + half), abs=1e-6)
    runs = [of(variant, seed, (8, value + 10 * seed)) for seed in range(3)
            for variant, value in (("a", 5.0), ("b", 4.1 - seed / 10), ("c", 4.0), ("d", 2.1 - seed / 5))]
    text = page(*runs, pairs=(("a", "b"), ("c", "d")), changes=True)
    assert "| b − a | images seen | 8 | 14.000 ± 9.900 (n=3) | 15.000 ± 10.000 (n=3) | -1.000 (-1.248 to -0.7" in text
    assert "| b − a | d − c | images seen | 8 | -1.100 (-1.348 to -0.852, n=3) |" in text


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
