"""The report: what it reads, and the page in a browser, opened from disk."""

import io
import json
import math
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE, run_command
from PIL import Image

import fid
from runtime.files import read_rows
from scripts import report
from weights import checkpoint as checkpoints

ROW = {"source": {"weights": "ema", "num_steps": 2, "seeds": "100000-100003"},
       "extractor": {"name": "pixels"}, "reference": {"path": "reference.npz"}, "image_rule": "floor"}
HOSTILE = "<img src=x onerror=document.title='owned'>"


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def row_at(step, value, guidance=None, n=4):
    return ROW | {"metrics": {"fd_pixels": value}, "images": n,
                  "source": ROW["source"] | {"step": step, "guidance": guidance}}


def make_run(folder, *, shift=0.0, grids=(2, 4), config="seed: 0"):
    """Writes a run folder as train.py leaves one."""
    saved = checkpoints.step_folder(folder, 4)
    saved.mkdir(parents=True)
    checkpoints.write_meta(saved, {"step": 4, "world": 1, "network": {"depth": 7}})
    write_rows(folder / "metrics.jsonl",
               [{"step": step, "images": 6 * step, "loss": 1 / step + shift, "elapsed_s": 1800 * step}
                for step in (2, 4, 6)])
    write_rows(folder / "results.jsonl", [row_at(0, 80 + shift), row_at(4, 76 + shift)])
    (folder / "config.yaml").write_text(f"# {folder.name}: DiT-S/4\nname: {folder.name}\nsamples: "
                                        f"{{seeds: 0-9}}\n{config}\n")
    (folder / "samples").mkdir()
    for step in grids:
        Image.new("RGB", (60, 40), (step * 20, int(99 * shift), 0)).save(folder / f"samples/step-{step:08d}.png")
    return folder


def make_study(folder):
    """Writes a study of dit over two seeds, tread over one, and a fine-tune."""
    runs = [{"variant": variant, "seed": seed, "step": 4, "scores": [
        {"step": step, "images": 6 * step, "seconds": None, "flops": 1e9 * step, "metric": "fd_pixels", "value": value,
         "num_samples": 4, "guidance": "unguided", "extractor": "pixels", "a key of later": 1}
        for step, value in zip((2, 4), values, strict=True)]}
        for variant, seed, values in (("dit", 0, (10.0, 6.0)), ("dit", 1, (12.0, 8.0)), ("tread", 0, (11.0, 5.0)),
                                      ("tuned", 0, (7.0, 4.0)))]
    crossings = [{"between": ["dit", "tread"], "n": 1}]
    folder.mkdir()
    (folder / "study.json").write_text(json.dumps({"name": "tiny", "runs": runs, "crossings": crossings}))
    return folder


def cfg(out, *runs, **changed):
    return report.ReportSettings(**{"runs": [*map(str, runs)], "study_dir": None, "out": str(out), "watch": False,
                                    "every": 60.0, **changed})


def test_pages_of_other_runs_have_folders_of_their_own():
    def place(runs, folders=None, **more):
        return str(report.page_path(cfg("x", *runs, **more).model_copy(update={"out": None}),
                                    [*map(Path, folders or runs)]))

    places = [place(runs) for runs in (["runs/a"], ["runs/a", "runs/b"], ["runs/c"] * 99)]
    assert places[:2] == ["report/a", "report/a+b"] and len(places[2]) < 110
    assert place([], ["runs/study-x/runs/a"], study_dir="runs/study-x") == "report/study-x"


def columns_of(curves):
    return {title: {label: {name: [*values] for name, values in source.data.items()} for label, source, *_ in lines}
            for title, _, lines in curves}


def test_a_run_of_this_code_is_read_completely(reference, pixel_reference, tmp_path):
    folder = shutil.copytree(reference, tmp_path / "run")
    run_command(fid.main, "fid.py", checkpoint=folder, reference=pixel_reference, features="pixels", cpu=True,
                metrics=["fd_pixels"], num_samples=4, num_steps=1, guidance_scales=[None, 2])
    run, rows = report.read_run(folder, "run"), read_rows(folder / "metrics.jsonl")
    assert run.columns.keys() == rows[0].keys() - {"elapsed_s"} | {"hours"}
    for name in rows[0].keys() - {"elapsed_s"}:
        assert run.columns[name] == pytest.approx([row[name] for row in rows])
    assert run.config["seed"] == "0" and run.record["network.routes.0.selection_ratio"] == "0.5"
    assert [(score["value"], score["guidance"]) for score in run.scores] == [
        (row["metrics"]["fd_pixels"], guidance) for row, guidance in zip(
            read_rows(folder / "results.jsonl"), ("unguided", "scale 2.0, drop_label true"), strict=True)]


def test_links_out_of_a_run_are_not_followed(tmp_path):
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other", shift=0.5, config="secret: 1")
    (run / "samples/step-00000004.png").unlink()
    for name in ("metrics.jsonl", "results.jsonl", "config.yaml", "checkpoints/step-00000004/meta.json"):
        (run / name).unlink()
        (run / name).symlink_to(other / name)
    for name in ("samples/step-00000004.png", "samples/step-00000009.png", "private.png", "samples/mine.png"):
        (run / name).symlink_to(other / "samples/step-00000004.png")
    (run / "inner.png").symlink_to(run / "samples/step-00000002.png")
    read = report.read_run(run, "run")
    assert [*read.grids] == [2] and read.pictures == [run / "inner.png"]
    assert not read.columns and not read.scores and not any("secret" in key for key in read.config)
    assert not read.record.get("step") and not read.environment


def test_a_halved_line_is_skipped_and_a_value_that_is_not_finite_is_a_gap(tmp_path):
    run = make_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "loss": NaN, "images": 48}\n{"step": 6, "loss": 0.5}\n{"step": 9, "lo')
    shown = report.read_run(run, "run")
    assert list(shown.columns["step"]) == [2, 4, 6, 8] and shown.config["samples.seeds"] == "0-9"
    assert shown.columns["loss"] == pytest.approx([0.5, 0.25, 0.5, math.nan], nan_ok=True)  # the later row of step 6


def test_folders_are_given_on_the_command_line_without_a_key(tmp_path, capsys):
    assert report.as_settings(["runs/a", "out=x", "it's", "--cfg", "job", "study=b"]) == [
        "out=x", "--cfg", "job", "study_dir=b", 'runs=["runs/a", "it\'s"]']
    runs = [str(make_run(tmp_path / place)) for place in ("x/it's 1", "y/run", "z/run")]
    run_command(report.main, "report.py", *report.as_settings([*runs, f"out={tmp_path / 'out'}"]))
    line, best = capsys.readouterr().out.splitlines()
    assert line == f"{tmp_path}/out/index.html: it's 1, {runs[1]}, {runs[2]}"  # two have one name
    assert best == "best fd_pixels: 76, it's 1 at step 4, unguided"


def test_a_long_curve_keeps_its_extremes_its_means_and_its_gaps():
    loss = np.random.default_rng(0).random(5 * report.STRETCHES).astype(np.float32)
    loss[12], loss[200:300] = math.nan, math.nan
    found = report.condensed({"step": np.arange(len(loss)), "loss": loss}, "loss", {"step": "steps"})
    assert found["step"] == pytest.approx(5 * np.arange(report.STRETCHES) + 2)
    gap = slice(40, 60)
    for name, of in (("loss", np.nanmean), ("low", np.nanmin), ("high", np.nanmax)):
        assert np.isnan(found[name][gap]).all()
        assert np.delete(found[name], gap) == pytest.approx(of(np.delete(loss.reshape(-1, 5), gap, 0), 1))


def test_the_page_says_first_what_was_trained_and_on_what(tmp_path):
    for name in ("a", "b<i>"):
        meta = make_run(tmp_path / name) / "checkpoints/step-00000004/meta.json"
        history = [{"step": 0, "commit": "a", "device": "cpu", "torch": "2"},
                   {"step": 2, "python": "3.12", "commit": "b", "device": "H100", "torch": "3"}]
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"history": history}))
    runs = [report.read_run(tmp_path / name, name) for name in ("a", "b<i>")]
    first, *_ = report.overview(runs, [], tmp_path / "out")
    assert first.text == "a: DiT-S/4<br>b&lt;i&gt;: DiT-S/4"
    assert [*runs[0].environment.items()] == [("python", "3.12"), ("torch", "3"), ("device", "H100"), ("world", "1"),
                                              ("commit", "b")]
    assert "network.depth" in runs[0].record and "history.1.device" in runs[0].record


def test_runs_without_pictures_make_a_page_without_warnings(tmp_path, caplog):
    runs = [make_run(tmp_path / name, grids=()) for name in "ab"]
    report.build(cfg(tmp_path / "out", *runs))
    assert not caplog.messages


def test_comparable_scores_are_plotted_together(tmp_path):
    runs, guided = [make_run(tmp_path / "a"), make_run(tmp_path / "b", shift=0.5)], {"scale": 1.5, "gamma1": 0}
    write_rows(runs[0] / "results.jsonl", [
        row_at(0, 80.0), row_at(4, 76.0), row_at(4, 70.0), row_at(None, 60.0), row_at(4, math.nan, n=99),
        row_at(0, 9.0, guided), row_at(4, 8.0, guided), row_at(0, 7.0, n=99), row_at(4, 6.0, n=99)])
    scores = [score for run in runs for score in report.read_run(run, run.name).scores]
    together, apart = columns_of(report.score_curves(scores)).values()
    assert {label: line["value"] for label, line in together.items()} == {
        "a, unguided": [80, 70], "a, scale 1.5": [9, 8], "b, unguided": [80.5, 76.5]}  # of step 4 the later one
    assert [line["value"] for line in apart.values()] == [[7, 6]]  # of 99 images
    assert together["a, unguided"]["images"] == [0, 24]
    assert together["a, unguided"]["hours"] == [0, 2]  # between the rows of metrics.jsonl


def test_the_page_of_a_study_shows_what_the_study_has_drawn(tmp_path):
    folder = make_study(tmp_path / "study")
    name, tables = report.read_study(folder / "study.json")
    assert name == "tiny" and [*tables] == ["floor", "crossings", "scores"] and len(tables["scores"]) == 8
    (folder / "private.png").symlink_to(folder.parent / "outside.png")
    for place, colour in ((folder / "differences.png", "red"), (folder.parent / "outside.png", "blue")):
        Image.new("RGB", (8, 8), colour).save(place)
    report.build(cfg(tmp_path / "out", study_dir=str(folder)))
    [copied] = (tmp_path / "out/files").iterdir()
    assert copied.read_bytes() == (folder / "differences.png").read_bytes()
    assert "differences.png" in (tmp_path / "out/index.html").read_text()


def test_only_the_page_is_replaced_and_a_kill_leaves_the_old_one_intact(tmp_path, monkeypatch):
    run, out, index = make_run(tmp_path / "run"), tmp_path / "out", tmp_path / "out/index.html"
    (out / "files").mkdir(parents=True)
    (out / "files/mine-0123456789ab.png").write_bytes(b"not ours")
    report.build(cfg(out, run))
    old, files = index.read_text(), {*(out / "files").iterdir()}
    shutil.rmtree(run / "samples")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        report.build(cfg(out, run))
    assert index.read_text() == old
    report.build(cfg(out, run))
    assert index.read_text() != old and len(files) == 3 and {*(out / "files").iterdir()} == files
    index.write_text("<h1>My own</h1>")
    with pytest.raises(ValueError, match="not a page of this command and is not replaced: give out="):
        report.build(cfg(out, run))


# Bokeh's models by type; elements by selector, through the shadow roots in which they stand; the visible ones.
HELPERS = """const models = type => [...Bokeh.documents[0]._all_models.values()].filter(model => model.type == type)
const query = (selector, root = document) => [...root.querySelectorAll("*")].flatMap(element => [
  ...(element.matches(selector) ? [element] : []), ...(element.shadowRoot ? query(selector, element.shadowRoot) : [])])
const visible = selector => query(selector).filter(element => element.checkVisibility({visibilityProperty: true}))
return """
GRIDS = ("visible('img').filter(image => image.naturalWidth == 60).map(image => "
         "image.parentElement.parentElement.innerText.trim())")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium without a window; the tests that want one are skipped where it, its driver or selenium is absent."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install -r requirements-dev.txt")
    if not (driver := shutil.which("chromedriver")):
        pytest.skip("no browser: apt-get install chromium chromium-driver")

    class Browser(webdriver.Chrome):
        def visit(self, page):
            self.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                 {"width": 1280, "height": 1000, "deviceScaleFactor": 1, "mobile": False})
            self.execute_cdp_cmd("Emulation.setEmulatedMedia",
                                 {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
            self.get(page.as_uri())
            self.wait("window.Bokeh?.documents[0]?.is_idle", True)

        def js(self, code):
            return self.execute_script(HELPERS + code)

        def wait(self, code, wanted):
            end = time.monotonic() + PATIENCE
            while (found := self.js(code)) != wanted and time.monotonic() < end:
                time.sleep(0.05)
            assert found == wanted
            assert not any(entry["level"] in ("SEVERE", "WARNING") for entry in self.get_log("browser"))

    options = webdriver.ChromeOptions()
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with Browser(options=options, service=webdriver.ChromeService(driver)) as made:
        made.folder = folder = tmp_path_factory.mktemp("page")
        runs = make_run(folder / "dense"), make_run(folder / HOSTILE, shift=0.5, grids=(2, 4, 6),
                                                    config="seed: </script>")
        report.build(cfg(folder, *runs, study_dir=str(make_study(folder / "study"))))
        yield made


def test_the_first_tab_shows_grids_loss_and_scores_in_the_dark_too_and_nothing_is_fetched(browser):
    browser.visit(browser.folder / "index.html")
    browser.wait(GRIDS, ["dense, step 4", f"{HOSTILE}, step 6"])  # the newest; a name from outside is a text
    browser.wait("models('Figure').slice(0, 2).map(plot => [plot.title.text, plot.renderers.map(drawn => "
                 "[...drawn.data_source.data.step])])",
                 [["loss", [[2, 4, 6]] * 4],
                  ["fd_pixels on pixels features, 4 images", [[0, 4]] * 4]])  # lines and points
    browser.wait("performance.getEntriesByType('resource').filter(entry => !entry.name.startsWith('file:'))", [])
    x, y = browser.js("(box => [box.x + 30, box.y + 20].map(Math.round))(query('img')[0].getBoundingClientRect())")
    shot = Image.open(io.BytesIO(browser.get_screenshot_as_png()))
    assert shot.getpixel((x, y))[:3] == (80, 0, 0)  # a picture keeps its own colours
    assert shot.getpixel((2, 300))[:3] == (0, 0, 0)
    assert browser.title == f"tiny, dense, {HOSTILE}"
