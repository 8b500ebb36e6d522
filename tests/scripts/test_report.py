"""The report: what it reads and leaves out, and the page itself in a browser, opened from disk as its reader does."""

import base64
import csv
import gzip
import json
import math
import random
import re
import shutil
import time

import pytest
from conftest import ROOT, run_command
from omegaconf import OmegaConf
from PIL import Image

from runtime.schema import read
from scripts import report

REAL = ROOT / "tests/before/run"      # what train.py and fid.py once left
ROW = json.loads((REAL / "results.jsonl").read_text().splitlines()[0])
HOSTILE = "</script><img src=x onerror=document.title='owned'>"


def make_run(folder, *, steps=(2, 4, 6), shift=0.0, config=None, grids=(2, 4), scores=(0, 4), guided=()):
    """Writes a run folder as train.py leaves one, after the shapes of a real one."""
    folder.mkdir(parents=True)
    rows = [{"step": step, "images": 6 * step, "loss": 1 / step + shift, "lr": 1e-4, "grad_norm": 0.3 + shift, "skipped": 0,
             "img_per_sec": 400 + step % 7, "sec_per_step": 0.01, "peak_memory_gib": 0.7, "elapsed_s": 2.0 * step} for step in steps]
    write_rows(folder / "metrics.jsonl", rows)
    settings = OmegaConf.merge(OmegaConf.load(REAL / "config.yaml"), {"name": folder.name}, config or {})
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(settings))
    results = [row_at(step, 80 - step + shift) for step in scores]
    results += [row_at(scores[-1], 50 + scale * 10 + gamma2, {"scale": scale, "gamma1": 0, "gamma2": gamma2, "drop_label": False,
                                                              "interval": None, "routes": None}) for scale, gamma2 in guided]
    write_rows(folder / "results.jsonl", results)
    (folder / "samples").mkdir()
    for step in grids:
        Image.new("RGB", (60, 40), (step * 20 % 256, int(99 * shift) % 256, 0)).save(folder / "samples" / f"step-{step:08d}.png")
    shutil.copytree(REAL / "checkpoints/step-00000004", folder / "checkpoints/step-00000004",
                    ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def row_at(step, value, guidance=None, metric="fd_pixels", n=4):
    return ROW | {"metrics": {metric: value}, "images": n, "source": ROW["source"] | {"step": step, "guidance": guidance}}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_study(folder):
    scores = {("dit", 0): (10.0, 6.0), ("dit", 1): (12.0, 8.0), ("tread", 0): (11.0, 5.0), ("tuned", 0): (7.0, 4.0)}
    runs = [{"variant": variant, "seed": seed, "step": 4, "steps": 4, "new_key": {"of": "later"}, "scores": [
        {"step": step, "images": 6 * step, "seconds": None, "flops": 1e9 * step, "metric": "fd_pixels", "value": value, "num_samples": 4,
         "guidance": "unguided", "another_new_key": 1} for step, value in zip((2, 4), values, strict=True)]}
        for (variant, seed), values in scores.items()]
    folder.mkdir(parents=True)
    (folder / "study.json").write_text(json.dumps({
        "name": "tiny", "commit": "abc", "runs": [*runs, {"variant": "late", "seed": 0, "step": 0, "steps": None, "scores": []}],
        "crossings": [{"between": ["dit", "tread"], "axis": "images", "at": 15.0, "verdict": "tread in 1 of 1 seed, no verdict", "n": 1}]}))
    return folder


def cfg(out, *runs, study=None, **changed):
    return read(report.ReportSettings, {"runs": [str(run) for run in runs], "study_dir": study and str(study), "out": str(out),
                                        "watch": False, "every": 5, **changed})


def data_of(out):
    """The data that a page shows, as its browser reads it."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', (out / "index.html").read_text(), re.S)[1])


def left_out(out):
    return {where.rpartition("/")[2]: why for where, why in data_of(out)["leftOut"]}


# ---- what is read, and what is left out -----------------------------------------------------------------------------


def test_a_run_of_this_code_is_read_whole(tmp_path):
    said = report.build(cfg(tmp_path / "report", REAL))
    [run] = data_of(tmp_path / "report")["runs"]
    rows = [json.loads(line) for line in (REAL / "metrics.jsonl").read_text().splitlines()]
    assert said == [f"{tmp_path}/report/index.html: 1 run"] and not left_out(tmp_path / "report")
    assert {name: pytest.approx([row[name] for row in rows], rel=1e-8) for name in rows[0]} == run["columns"]
    assert run["environment"]["torch"].startswith("2.") and run["environment"]["world"] == "1"
    assert run["config"]["optimizer.lr"] == "0.0001"
    network = json.loads((REAL / "checkpoints/step-00000004/meta.json").read_text())["network"]
    assert json.loads(run["drawn"]["latents"]) == [network["in_channels"], network["input_size"], network["num_classes"]]
    assert [score["value"] for score in run["scores"]] == [
        value for line in (REAL / "results.jsonl").read_text().splitlines() for value in json.loads(line)["metrics"].values()]


def test_the_commits_and_devices_of_a_run_are_shown_and_where_it_had_several_the_step_of_each(tmp_path):
    first = {"step": 0, "commit": "abc", "device": "A100", "torch": "2.11.0"}
    histories = {"moved": [first, first | {"step": 40, "device": "H100"}, first | {"step": 60, "commit": None}], "stayed": [first],
                 "before": None, "odd": [3]}
    for name, history in histories.items():
        meta = make_run(tmp_path / name) / "checkpoints/step-00000004/meta.json"
        meta.write_text(json.dumps(json.loads(meta.read_text()) | ({} if history is None else {"history": history})))
    report.build(cfg(tmp_path / "out", *(tmp_path / name for name in histories)))
    keys = ("trained: commit", "trained: device", "trained: torch", "history")
    shown = {run["name"]: [run["environment"].get(key) for key in keys] for run in data_of(tmp_path / "out")["runs"]}
    assert shown == {
        "moved": ["abc from step 0 · unknown from step 60", "A100 from step 0 · H100 from step 40 · A100 from step 60", "2.11.0", None],
        "stayed": ["abc", "A100", "2.11.0", None], "before": [None] * 4, "odd": [None, None, None, "[3]"]}


def test_settings_that_unfold_a_millionfold_are_not_unfolded(tmp_path):
    run, names = make_run(tmp_path / "run"), "abcdefghi"
    lines = [f"{b}: &{b} [{','.join(['*' + a] * 9)}]" for a, b in zip(names, names[1:], strict=False)]
    (run / "config.yaml").write_text("\n".join(["a: &a [x]", *lines]))
    run_command(report.main, "report.py", runs=[run], out=tmp_path / "out")
    assert "it has aliases" in " ".join(why for _, why in data_of(tmp_path / "out")["leftOut"])


def test_what_cannot_be_read_is_said_and_the_rest_is_shown(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "loss": NaN, "images": 48}\n{"loss": 1}\n{"step": 6, "loss": 0.5}\n[1]\n{"step": 9, "lo')
    with open(run / "results.jsonl", "a") as file:
        file.write(json.dumps(row_at(6, float("nan"))) + '\n{"metrics": 3}\n{"metr')
    (run / "samples/step-00000006.png").write_bytes((run / "samples/step-00000004.png").read_bytes()[:60])
    (run / "checkpoints/step-00000006").mkdir()
    (run / "config.yaml").write_text("a: [1")
    (tmp_path / "data").mkdir()
    run_command(report.main, "report.py", runs=[run, tmp_path / "nowhere", tmp_path / "data", run], out=tmp_path / "out")
    told, [shown] = left_out(tmp_path / "out"), data_of(tmp_path / "out")["runs"]
    assert shown["columns"]["step"] == [2, 4, 6] and shown["columns"]["loss"] == [0.5, 0.25, 0.5]      # the later row of step 6
    assert shown["config"]["optimizer.lr"] == "0.0001"      # of the checkpoint, as config.yaml is no YAML
    assert told["nowhere"] == "there is no such folder." and "it is no training run" in told["data"]
    assert told["run"] == "it is given twice and shown once."
    sentences = " ".join(why for _, why in data_of(tmp_path / "out")["leftOut"])
    for part in ("2 lines cannot be read", "(7, 8)", "1 row without a step", "2 rows of steps that a later row has again",
                 "1 row that hold no scores", "1 score that are no finite", "it is no whole picture", "it cannot be read"):
        assert part in sentences, part
    printed = capsys.readouterr().out
    assert all(why in printed for _, why in data_of(tmp_path / "out")["leftOut"])


def test_a_value_that_is_none_leaves_a_gap_and_is_counted(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.5}\n{"step": 2, "loss": null}\n{"step": 3, "loss": Infinity}\n')
    report.build(cfg(tmp_path / "out", run))
    assert data_of(tmp_path / "out")["runs"][0]["columns"]["loss"] == [1.5, None, None]
    assert left_out(tmp_path / "out")["metrics.jsonl"].startswith("1 value that no plot can show")      # null is train.py's own


@pytest.mark.parametrize(("given", "says"), [
    ({}, "Say what to show"), ({"runs": ["nowhere"]}, "There is nothing to show. nowhere: there is no such folder."),
    ({"study": "nowhere"}, "study.json: there is no such file"),
])
def test_nothing_to_show_is_a_sentence_and_no_page(tmp_path, given, says):
    with pytest.raises(ValueError, match=says):
        report.build(cfg(tmp_path / "out", *given.get("runs", ()), study=given.get("study")))
    assert not (tmp_path / "out/index.html").exists()


def test_runs_of_one_name_are_told_apart(tmp_path):
    report.build(cfg(tmp_path / "out", *(make_run(tmp_path / place / "run") for place in ("a/x", "b/x", "c"))))
    assert [run["name"] for run in data_of(tmp_path / "out")["runs"]] == ["a/x/run", "b/x/run", "c/run"]


def test_folders_stand_on_the_command_line_without_a_key(tmp_path):
    assert report.as_settings(["runs/a", "out=x", "it's here", "--cfg", "job"]) == ["out=x", "--cfg", "job", r"runs=['runs/a','it\'s here']"]
    assert report.as_settings(["runs=[a]", "out=x"]) == ["runs=[a]", "out=x"]
    assert report.as_settings(["a", "study=b"]) == ["study_dir=b", "runs=['a']"]
    with pytest.raises(SystemExit, match="given twice"):
        report.as_settings(["a", "runs=[b]"])
    run = make_run(tmp_path / "it's 1")
    run_command(report.main, "report.py", *report.as_settings([str(run), f"out={tmp_path / 'out'}"]))
    assert data_of(tmp_path / "out")["runs"][0]["name"] == "it's 1"


# ---- plots and scores -----------------------------------------------------------------------------------------------


def test_thinning_keeps_the_extremes_of_every_bin_and_the_gaps():
    draw, count, bins = random.Random(0), 5000, 50
    columns = {"step": list(range(count)), "loss": [draw.random() for _ in range(count)], "grad_norm": [draw.random() for _ in range(count)]}
    columns["loss"][1234] = None
    chosen = report.thinned(columns, bins)
    assert chosen[0] == 0 and chosen[-1] == count - 1 and 1234 in chosen and len(chosen) <= 4 * bins + 3
    for first in range(0, count, count // bins):
        for name in ("loss", "grad_norm"):
            inside = [value for value in columns[name][first : first + count // bins] if value is not None]
            kept = [columns[name][row] for row in chosen if first <= row < first + count // bins and columns[name][row] is not None]
            assert (min(kept), max(kept)) == (min(inside), max(inside))
    assert report.thinned({"step": [1, 2, 3], "loss": [1, 2, 3]}) == [0, 1, 2]


@pytest.fixture(scope="module")
def long_report(tmp_path_factory):
    """A report of 100,000 rows of full precision, and those rows."""
    folder, draw = tmp_path_factory.mktemp("long"), random.Random(0)
    rows = [{"step": 10 * i, "images": 2560 * i, "loss": 0.2 + math.exp(-i / 2e4) + draw.gauss(0, 0.02), "lr": 1e-4 * math.cos(i / 1e5),
             "grad_norm": draw.random(), "skipped": 0, "img_per_sec": 2500 + draw.gauss(0, 30), "sec_per_step": draw.random(),
             "peak_memory_gib": 22.123456789, "elapsed_s": 1.02 * i + draw.random() / 10} for i in range(1, 100_001)]
    (folder / "run").mkdir()
    write_rows(folder / "run/metrics.jsonl", rows)
    report.build(cfg(folder / "report", folder / "run"))
    return folder / "report", rows


def test_a_hundred_thousand_rows_make_a_small_page_that_holds_them_all(long_report):
    folder, rows = long_report
    [run] = data_of(folder)["runs"]
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"100,000 rows: {size / 1e6:.1f} MB")
    assert size < 8e6
    assert (folder / "index.html").stat().st_size < 1e6 and run["rows"] == 100_000 and len(run["columns"]["step"]) < 5000
    packed = re.fullmatch(r'arrived\("(.*)"\);\n', (folder / run["full"]).read_text())[1]
    columns = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert columns["step"] == [row["step"] for row in rows]
    assert all(math.isclose(value, row[name], rel_tol=1e-8) for name in rows[0] for value, row in zip(columns[name], rows, strict=True))


def test_scores_are_drawn_together_where_they_compare_and_a_distance_has_its_own_name(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", shift=0.5)]
    with open(runs[0] / "results.jsonl", "a") as file:
        for row in (row_at(2, 70.0, n=99), row_at(2, 7.0, metric="fid"), row_at(None, 60.0)):
            file.write(json.dumps(row) + "\n")
    report.build(cfg(tmp_path / "out", *runs))
    data = data_of(tmp_path / "out")
    figures = {(figure["metric"], figure["n"]): figure for figure in data["scores"]}
    assert {key: [(line["run"], line["step"]) for line in figure["lines"]] for key, figure in figures.items()} == {
        ("fd_pixels", 4): [(0, [0, 4]), (1, [0, 4])], ("fd_pixels", 99): [(0, [2])], ("fid", 4): [(0, [2])]}
    assert figures["fd_pixels", 4]["label"] == "Fréchet distance on pixels features (fd_pixels; no FID)"
    assert "no FID" in figures["fid", 4]["label"] and report.metric_label("fid", {"name": "adm"}) == "FID"
    [line, _] = figures["fd_pixels", 4]["lines"]
    assert line["images"] == [0, 24] and line["elapsed_s"] == [0, 8.0] and len(data["runs"][0]["scores"]) == 5


def test_guided_scores_under_one_condition_are_a_landscape(tmp_path):
    grid = [(scale, gamma2) for scale in (1.25, 2.0) for gamma2 in (0.7, 0.9)]
    report.build(cfg(tmp_path / "out", make_run(tmp_path / "a", guided=grid), make_run(tmp_path / "b", guided=grid[:1])))
    [land] = data_of(tmp_path / "out")["landscapes"]      # one point is none
    assert land["run"] == 0 and land["unguided"] == 76.0
    assert sorted(land["points"]) == sorted([str(scale), "0", str(gamma2), 50 + scale * 10 + gamma2] for scale, gamma2 in grid)


def test_a_study_is_its_curves_over_seeds_whatever_keys_are_new(tmp_path):
    report.build(cfg(tmp_path / "out", study=make_study(tmp_path / "study")))
    study = data_of(tmp_path / "out")["study"]
    [figure] = study["figures"]
    dit, tread, _ = figure["lines"]
    assert dit["variant"] == "dit" and dit["mean"] == [11.0, 7.0] and dit["n"] == [2, 2]
    assert dit["deviation"] == pytest.approx([math.sqrt(2)] * 2) and tread["deviation"] == [None, None]
    assert dit["images"] == [12, 24] and dit["seconds"] == [None, None] and study["unfinished"] == ["late, seed 0: 0 of ? steps"]
    assert len(study["scores"]) == 8 and study["scores"][0]["another_new_key"] == 1 and study["crossings"][0]["at"] == 15.0


# ---- how it is written ----------------------------------------------------------------------------------------------


def named_files(out):
    """The files that a page loads, of which each must be there."""
    text = (out / "index.html").read_text()
    return {*re.findall(r'src="(files/[^"]+)"', text), *re.findall(r'"(files/[\w.-]+\.(?:png|js))"', text)}


def test_a_build_that_dies_leaves_the_old_page_whole_and_the_next_one_sweeps(tmp_path, monkeypatch):
    run, out = make_run(tmp_path / "run"), tmp_path / "out"
    report.build(cfg(out, run))
    old, old_files = (out / "index.html").read_text(), named_files(out)
    shutil.rmtree(run / "samples")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(report, "write_text", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        report.build(cfg(out, run))
    assert (out / "index.html").read_text() == old and all((out / file).is_file() for file in old_files)
    report.build(cfg(out, run))
    assert {f"files/{path.name}" for path in (out / "files").iterdir()} == named_files(out) | {"files/stamp.js"}
    assert any(file.endswith(".png") for file in old_files) and not any(file.endswith(".png") for file in named_files(out))


def test_a_page_of_another_making_is_not_replaced(tmp_path):
    (tmp_path / "index.html").write_text("<h1>My own</h1>")
    with pytest.raises(ValueError, match="of another making and is not replaced: give out="):
        report.build(cfg(tmp_path, REAL))
    assert (tmp_path / "index.html").read_text() == "<h1>My own</h1>"


def test_the_page_moves_and_asks_for_nothing_from_a_network(tmp_path):
    report.build(cfg(tmp_path / "out", make_run(tmp_path / "run")))
    text = (tmp_path / "out/index.html").read_text()
    assert not re.search(r"https?://|@import|fetch\(", text) and str(tmp_path / "out") not in text
    assert all((tmp_path / "out" / file).is_file() for file in named_files(tmp_path / "out"))


def test_watching_builds_when_there_is_news_and_ends_with_ctrl_c(tmp_path, monkeypatch, capsys):
    run, out, stamps = tmp_path / "run", tmp_path / "out", []

    def sleep(_):
        stamps.append(data_of(out)["stamp"] if out.is_dir() else None)
        match len(stamps):
            case 1:
                make_run(run)
            case 3:
                with open(run / "metrics.jsonl", "a") as file:
                    file.write(json.dumps({"step": 8, "loss": 0.1}) + "\n")
            case 4:
                assert data_of(out)["runs"][0]["columns"]["step"] == [2, 4, 6, 8] and data_of(out)["live"] == 0.1
            case 5:
                raise KeyboardInterrupt

    monkeypatch.setattr(report.time, "sleep", sleep)
    report.watch(cfg(out, run, watch=True, every=0.1))
    waiting, first, same, second, still = stamps
    assert waiting is None and first == same != second == still
    assert data_of(out)["live"] is None and "there is no such folder" in (printed := capsys.readouterr().out)
    assert printed.endswith("index.html: 1 run; stopped by Ctrl-C.\n")


# ---- the page in a browser ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium without a window; the tests that want one are skipped where it, its driver or selenium is absent."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install -r requirements-dev.txt")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1280,1000"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    made.set_script_timeout(60)
    made.downloads = tmp_path_factory.mktemp("downloads")
    made.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(made.downloads)})
    yield made
    made.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report of two runs of equal seeds, one of other seeds and another name, and a study."""
    folder = tmp_path_factory.mktemp("page")
    grid = [(scale, gamma2) for scale in (1.25, 2.0) for gamma2 in (0.7, 0.9)]
    samples = {"every": 2, "seeds": "0-9", "classes": None, "num_steps": 2, "batch_size": 4}
    runs = [make_run(folder / "dense", guided=grid, config={"samples": samples}),
            make_run(folder / "routed", shift=0.5, grids=(2, 4, 6), config={"samples": samples, "model": {"name": "another"}}),
            make_run(folder / "other", shift=1.0, config={"name": HOSTILE, "samples": samples | {"seeds": "10-19"}})]
    report.build(cfg(folder / "report", *runs, folder / "nowhere", study=make_study(folder / "study")))
    return folder / "report"


def wait(condition, seconds=40):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "the page did not get there"
        time.sleep(0.05)
    return found


def visit(browser, folder, place=""):
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get((folder / "index.html").as_uri() + place)
    wait(lambda: browser.execute_script("return document.body.dataset.ready"))


def query(browser, selector):
    return browser.find_elements("css selector", selector)


def complaints(browser):
    return [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def test_every_tab_opens_by_mouse_and_by_keyboard_and_nothing_complains(browser, page):
    visit(browser, page)
    names = [tab.text for tab in query(browser, "[role=tab]")]
    assert names == ["Overview", "Training", "Scores", "Pictures", "Guidance", "Study", "Settings", "Environment"]
    for tab in query(browser, "[role=tab]"):
        tab.click()
        [panel] = [panel for panel in query(browser, "[role=tabpanel]") if panel.is_displayed()]
        assert panel.get_attribute("aria-labelledby") == tab.get_attribute("id") and len(panel.text) > 40
        assert [other.get_attribute("aria-selected") for other in query(browser, "[role=tab]")].count("true") == 1
    for step in range(1, len(names) + 1):
        browser.switch_to.active_element.send_keys("\ue014")      # the right arrow
        assert browser.switch_to.active_element.text == names[(len(names) - 1 + step) % len(names)]
    assert len(query(browser, ".plot")) == len(query(browser, ".plot[data-drawn=yes]")) == 8      # 6 of training, a score, the study
    drawn = browser.execute_script("return plots.map(({lines}) => lines.map(({source}) => [...source.data.x].length))")
    assert all(count > 1 for lines in drawn for count in lines) and not complaints(browser)


def test_a_studys_curves_are_of_what_is_compared_and_its_tables_of_all(browser, page):
    visit(browser, page)
    browser.find_element("id", "tab-study").click()
    [panel] = query(browser, "#panel-study")
    [plot] = wait(lambda: query(browser, "#panel-study .plot[data-drawn=yes]"))
    assert plot.get_attribute("aria-label") == "fd_pixels over steps: dit ends at 7, tread ends at 5"
    assert {row.text.split(" ")[0] for row in query(browser, "#panel-study tbody tr")} == {"dit", "tread", "tuned"}
    assert "tread and dit over images: the last at 15; lower at the end: tread in 1 of 1 seed, no verdict." in panel.text


def test_what_was_left_out_and_what_came_from_files_is_text(browser, page):
    visit(browser, page)
    assert "nowhere: there is no such folder." in query(browser, "#panel-overview .left-out")[0].text
    browser.find_element("id", "tab-settings").click()
    assert HOSTILE in query(browser, "#panel-settings")[0].text and browser.title != "owned"
    differing = [row.text.split(" ")[0] for row in query(browser, "#panel-settings tr.differs th")]
    assert "model.name" in differing and "samples.seeds" in differing and "optimizer.lr" not in differing
    query(browser, "#panel-settings input")[0].click()
    assert len(query(browser, "#panel-settings tbody tr")) == len(differing)


def test_the_slider_changes_the_pictures_and_equal_seeds_are_said(browser, page):
    visit(browser, page, "#tab=pictures")
    def addresses():
        return [picture.get_attribute("src") for picture in query(browser, ".sides img")]

    [slider] = query(browser, "input[type=range]")
    assert slider.get_attribute("aria-valuetext") == "step 6" and "No picture at step 6" in query(browser, ".sides")[0].text
    slider.send_keys("\ue012")      # the left arrow
    at_4 = addresses()
    slider.send_keys("\ue012")
    at_2 = addresses()
    assert len({*at_4, *at_2}) == 4 and slider.get_attribute("aria-valuetext") == "step 2"
    assert "dense-step-00000002" in at_2[0] and "routed-step-00000002" in at_2[1]
    wait(lambda: browser.execute_script("return [...document.querySelectorAll('.sides img')].every(p => p.complete && p.naturalWidth === 60)"))
    [note] = query(browser, ".seeds")
    assert note.text.startswith("Equal seeds, 0-9")
    query(browser, "select[aria-label='Run on the right'] option")[-1].click()
    assert note.text.startswith("The pictures do not compare one by one: samples.seeds 0-9 on the left and 10-19 on the right.")
    assert "other-step-00000002" in addresses()[1]


def test_an_axis_is_switched_and_a_run_is_hidden(browser, page):
    visit(browser, page, "#tab=training")
    ends = "return plots.map(({plot}) => Math.round(plot.x_range.end))"
    assert browser.execute_script(ends)[:6] == [6] * 6
    query(browser, "#panel-training input[value=images]")[0].click()
    wait(lambda: browser.execute_script("return plots.length") == 8 and 36 in browser.execute_script(ends))
    query(browser, "#panel-training input[type=checkbox][value='1']")[0].click()
    shown = "return plots.flatMap(({lines}) => lines).filter(({run}) => run === 1).map(({renderer}) => renderer.visible)"
    assert browser.execute_script(shown) and not any(browser.execute_script(shown))
    query(browser, "#panel-training input.log")[0].click()
    wait(lambda: browser.execute_script("return plots.filter(({plot}) => plot.left[0].type === 'LogAxis').length") >= 7)
    assert not complaints(browser)


def test_colours_follow_the_system_and_the_reader(browser, page):
    visit(browser, page)
    paper = "return [getComputedStyle(document.body).backgroundColor, plots[0].plot.background_fill_color]"
    try:
        light = browser.execute_script(paper)
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
        dark = wait(lambda: (now := browser.execute_script(paper)) != light and now)
        assert all(one != other for one, other in zip(light, dark, strict=True))
        query(browser, "#theme option[value=light]")[0].click()
        assert browser.execute_script(paper) == light and "theme=light" in browser.current_url
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_phone_scrolls_down_only(browser, page):
    phone = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    try:
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
        visit(browser, page)
        for tab in query(browser, "[role=tab]"):
            browser.execute_script("arguments[0].click()", tab)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= 360, tab.text
            widths = browser.execute_script("return plots.map(({host}) => host.getBoundingClientRect().width)")
            assert all(200 < width <= 360 for width in widths)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_it_prints_all_of_it(browser, page):
    visit(browser, page, "#tab=settings&theme=dark")
    pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert pdf.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 5      # all tabs, not one
    inked = browser.execute_script("""return [...document.querySelectorAll("canvas.print")].map(canvas => {
      const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      return new Set(new Uint32Array(data.buffer)).size; })""")
    assert len(inked) == 8 and min(inked) > 10      # curves, not an empty sheet
    blue = browser.execute_script("""const [canvas] = document.querySelectorAll("canvas.print");
      const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      return data.some((red, i) => i % 4 === 0 && red === 0x0b && data[i + 1] === 0x62 && data[i + 2] === 0xad);""")
    assert blue      # the colours of a light page
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"      # as it was before


def download(browser, button, name):
    (browser.downloads / name).unlink(missing_ok=True)
    browser.execute_script("arguments[0].click()", button)
    path = browser.downloads / name
    wait(lambda: path.is_file() and path.stat().st_size)
    return path.read_text()


def test_what_is_downloaded_is_what_the_files_hold(browser, page):
    visit(browser, page)
    buttons = {button.get_attribute("aria-label"): button for button in query(browser, ".downloads button")}
    assert len(buttons) == 2 * 15      # 6 curves and all columns, a curve and all scores, pictures, guidance, 2 of the study, 2 tables
    rows = list(csv.DictReader(download(browser, buttons["Loss as CSV"], "loss.csv").splitlines()))
    expected = [(name, step, 1 / step + shift) for name, shift in (("dense", 0), ("routed", 0.5), ("other", 1.0)) for step in (2, 4, 6)]
    assert [(row["run"], int(row["step"]), float(row["loss"])) for row in rows] == [
        (name, step, pytest.approx(loss, rel=1e-8)) for name, step, loss in expected]
    scores = json.loads(download(browser, buttons["Scores as JSON"], "scores.json"))
    assert len(scores) == 3 * 2 + 4 and {score["guidance"] for score in scores} > {"unguided"}
    settings = list(csv.DictReader(download(browser, buttons["config as CSV"], "config.csv").splitlines()))
    assert {"key": "name", "dense": "dense", "routed": "routed", "other": HOSTILE} in settings


def test_a_hundred_thousand_rows_open_thinned_and_a_zoom_shows_every_row(browser, long_report):
    folder, rows = long_report
    visit(browser, folder, "#tab=training")
    readable, drawn = browser.execute_script("""return [performance.getEntriesByType("navigation")[0].domInteractive,
                                                        performance.getEntriesByName("drawn training")[0].startTime]""")
    print(f"100,000 rows: readable after {readable:.0f} ms, all curves drawn after {drawn:.0f} ms")
    points = "return plots.map(({lines: [{source}]}) => source.data.x.length)"
    assert max(browser.execute_script(points)) <= 3200 and not browser.execute_script("return runs[0].whole")
    browser.execute_script("plots[0].plot.x_range.setv({start: 500005, end: 509995})")
    wait(lambda: browser.execute_script(points)[0] == 1001)      # 999 rows, and one to either side
    assert browser.execute_script("return plots.map(({plot}) => plot.x_range.start)") == [500005] * 6
    seen = browser.execute_script("return [...plots[0].lines[0].source.data.y]")
    assert seen == pytest.approx([row["loss"] for row in rows[49_999:51_000]], rel=1e-8)
    [button] = query(browser, "button[aria-label='Loss as CSV']")
    lines = download(browser, button, "loss.csv").splitlines()
    assert len(lines) == 100_001 and lines[-1].startswith("run,1000000,256000000,")
    assert not complaints(browser)


def test_a_page_that_follows_training_shows_new_rows_by_itself(browser, tmp_path):
    run, out = make_run(tmp_path / "run"), tmp_path / "out"
    report.build(cfg(out, run, every=0.2), live=True)
    visit(browser, out, "#tab=training&x=images")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 8, "images": 48, "loss": 0.1}) + "\n")
    report.build(cfg(out, run, every=0.2), live=True)
    wait(lambda: browser.execute_script("return document.body.dataset.ready && runs[0].rows") == 4)
    assert "tab=training" in browser.current_url and "x=images" in browser.current_url
