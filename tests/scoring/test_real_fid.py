"""The numbers of OpenAI's evaluator on the cross-check's graph and batches; skipped where the real data is absent."""

import json
import runpy
import shutil

import pytest
from conftest import run_command

import fid


@pytest.fixture
def crosscheck(real_data, tmp_path):
    """A folder with the cross-check's graph and its two batches."""
    source = real_data.parent / "adm_crosscheck"
    if not source.is_dir():
        pytest.skip("no ADM cross-check beside the real data")
    runpy.run_path(str(source / "make_batches.py"))["main"](real_data, tmp_path)
    shutil.copyfile(source / "graph.pb", tmp_path / "graph.pb")  # its hash is recorded beside it
    return tmp_path, json.loads((source / "expected.json").read_text())


def test_all_five_numbers_agree_with_openais_evaluator(crosscheck):
    folder, expected = crosscheck
    options = dict(images=str(folder / "sample.npz"), reference=str(folder / "reference.npz"), cpu=True,
                   features_weights=str(folder / "graph.pb"), results=str(folder / "results.jsonl"))
    run_command(fid.main, "fid.py", **options)
    row = json.loads((folder / "results.jsonl").read_text())
    found = row["metrics"]
    for name in ("fid", "sfid", "inception_score"):
        assert found[name] == pytest.approx(expected[name], rel=1e-3), name
    for name in ("precision", "recall"):
        # CPUs round the features differently: OpenAI's own counts differ by an image, and noise of 1e-6 moves up to 4.
        assert found[name] == pytest.approx(expected[name], abs=2e-3), name
    assert row["extractor"]["name"] == "adm" and row["reference"]["images"] == 4000 and row["images"] == 3000
