"""A sample of the soak: a few kills and failed writes lose nothing, and a command that does lose something is found out."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from scripts import soak

# Both in one process, which imports for ten seconds: the commands as they are, and with writes that a kill can halve.
PROGRAM = """
import contextlib, sys
from pathlib import Path
from scripts import soak
import checkpoint, shards

def run(*settings):
    sys.argv = ["soak.py", *settings]
    try:
        soak.main()
    except SystemExit as stop:
        print(stop)
        return 1
    return 0

folder = Path(sys.argv[1])
whole = run(f"out={folder}/whole.json", "tasks=[import]", "parts=[kills,faults]", "kills=6", "writes=6")

@contextlib.contextmanager
def in_place(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    yield path

checkpoint.beside = shards.beside = in_place
broken = run(f"out={folder}/broken.json", "tasks=[import]", "parts=[faults]", "faults=[full]", "writes=6")
sys.exit(10 * whole + broken)
"""


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    result = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=400,
                            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert result.returncode == 1, result.stdout + result.stderr      # 0 of the whole ones, 1 of the broken one
    return folder, {name: json.loads((folder / f"{name}.json").read_text()) for name in ("whole", "broken")}


def test_a_command_that_is_killed_and_started_again_ends_as_an_undisturbed_one(tried):
    found = tried[1]["whole"]["kills"]["import"]["kills"]
    assert found["kills"] == sum(found["by_phase"].values()) == 6
    assert found["lost"] == 0 and found["runs_finished"] == found["runs_equal"] >= 1


def test_each_write_that_fails_ends_in_a_sentence_or_goes_on_and_nothing_is_lost(tried):
    for fault, found in tried[1]["whole"]["faults"]["import"].items():
        assert found["lost"] == 0 and found["tried"] == found["equal_afterwards"] == 6, fault
        assert found["ended_in_a_sentence"] + found.get("went_on", 0) == 6 and found["ended_in_a_sentence"] >= 1
    assert not (tried[0] / "whole").is_dir() or not any((tried[0] / "whole").iterdir())      # nothing to look at


def test_a_command_whose_files_can_be_halved_is_found_out_and_what_it_left_is_kept(tried):
    found = tried[1]["broken"]["faults"]["import"]["full"]
    assert found["lost"] >= 1 and len(found["losses"]) == found["lost"]
    assert "preparing.json is not JSON" in "".join(loss["said"] for loss in found["losses"])
    assert list((tried[0] / "broken").glob("*/lost/0000"))


def test_what_the_clock_says_is_all_that_two_runs_may_differ_in():
    row = {"step": 2, "loss": 0.5, "img_per_sec": 3.0, "source": [{"seconds": 1, "size": 4}]}
    assert soak.plain(row) == {"step": 2, "loss": 0.5, "source": [{"size": 4}]}


def test_the_figures_of_the_page_are_those_of_the_record():
    record = json.loads((ROOT / "docs/results/soak.json").read_text())
    said = {line.split(" | ")[0].removeprefix("| "): line.removesuffix(" |").split(" | ")[1:]
            for line in (ROOT / "docs/reliability.md").read_text().splitlines() if line.startswith("| ")}
    for row, (part, what) in {
        "Killed": ("kills", "kills"), "A full disk": ("faults", "full"), "An I/O error": ("faults", "io"),
        "The folder taken away": ("faults", "gone"), "A small disk": ("disk", "disk"), "SIGTERM": ("signals", "SIGTERM"),
        "SIGINT": ("signals", "SIGINT"), "A clock that jumps or stands": ("clock", "clock"),
        "Losses that are NaN, and a kill": ("loss", "loss"), "One rank of two killed": ("ranks", "ranks"),
    }.items():
        found = {task: record[part][task][what] for task in soak.TASKS if task in record[part]}
        counts = [f"{found[task]['kills' if part == 'kills' else 'tried']}" if task in found else "–" for task in soak.TASKS]
        assert said[row] == [*counts, str(sum(entry["lost"] for entry in found.values()))], row
