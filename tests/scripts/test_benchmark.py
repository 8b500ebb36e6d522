"""Every mode of the benchmark on a tiny network; what is counted is right, and what is timed is never asserted on."""

import json
import os
import re
import shlex
import subprocess
import sys

import forked
import pytest
from conftest import ROOT, run_command
from test_docs import composed
from test_gpu_plan import write_official

from dit import multiply_adds
from runtime import schema
from runtime.command import compose
from scripts import benchmark

TINY = ["hidden_size=32", "depth=3", "num_heads=2", "tokens=16", "batch_size=4", "rounds=2", "steps=1", "warmup=1",
        "cpu=true", "num_steps=2", "routes=[{start_layer_idx: 1, end_layer_idx: 1, selection_ratio: 0.5}]"]


@pytest.fixture(autouse=True)
def small_products(monkeypatch, fresh_accelerator, float32_restored):
    monkeypatch.setitem(benchmark.SQUARES, "cpu", (32, 64))


def run(tmp_path, *settings):
    """Runs the command; returns what its JSON holds."""
    run_command(benchmark.main, "benchmark.py", *TINY, f"out={tmp_path}/made/it", *settings)
    return json.loads((tmp_path / "made/it.json").read_text())


def test_training_steps_are_timed_in_turn_with_matrix_products(tmp_path, monkeypatch):
    record = run(tmp_path, "optimizer=muon")
    for row in record["rows"]:
        assert row["images/s"] == pytest.approx(4 / row["s"])
        rate = row["GFLOP/image"] * 1e9 * row["images/s"]
        assert row["MFU"] * max(record["matmul FLOP/s"].values()) == pytest.approx(rate)
    dense, routed = record["rows"]
    assert dense["over dense"] == 1 and routed["FLOP ratio"] > 1
    # In each round dit and tread; both are also timed for their first step, and matrix products are not.
    seconds = iter([1.0, 1.0, 2.0, 1.0, 8.0, 2.0])
    monkeypatch.setattr(benchmark, "seconds_of", lambda device, work, count=1: (work(), next(seconds))[1])
    monkeypatch.setattr(benchmark, "matmul_flops", lambda *_: {"32": 1.0})
    rows = run(tmp_path)["rows"]
    assert [row["s"] for row in rows] == [5, 1.5] and rows[1]["over dense"] == 3    # of the rounds' ratios


def test_a_step_of_the_official_code_is_timed_after_each_of_ours_and_its_modules_do_not_stay(tmp_path):
    ours = {name: sys.modules[name] for name in ("dit", "edm", "routing_module")}
    official = write_official(tmp_path / "official")
    rows = run(tmp_path, f"official={official}")["rows"]
    assert [row["variant"] for row in rows] == ["dit", "official dit", "tread", "official tread"]
    assert ["over official" in row for row in rows] == [True, False, True, False]
    assert {name: sys.modules[name] for name in ours} == ours and "utils" not in sys.modules


def test_sampling_counts_the_cost_of_an_image(tmp_path):
    cfg = schema.read(benchmark.BenchmarkSettings, compose("benchmark", benchmark.BenchmarkSettings, TINY))
    cost = 2e-9 * sum(multiply_adds(benchmark.make_network(cfg, "dit", "meta")))
    [row] = run(tmp_path, "mode=sample", "scale=2")["rows"]
    assert row["GFLOP/image"] == pytest.approx(6 * cost)    # Heun's two steps have three passes, each of two images


def test_each_part_of_the_plan_for_a_gpu_is_a_command_that_can_be_read_and_all_fit_a_quarter_of_an_hour(tmp_path):
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh
case "$*" in -c*hydra*) exit 0 ;; -c*) exit 1 ;; esac
IFS="\t"; echo "$*" >> "$OUT/commands"
""")
    python.chmod(0o755)
    ended = subprocess.run(
        ["bash", ROOT / "scripts/studies/benchmark_gpu.sh"], check=True, capture_output=True, text=True,
        env=os.environ | {"PYTHON": str(python), "OUT": str(tmp_path),
                          "OFFICIAL": str(write_official(tmp_path / "official"))})
    seconds = dict(re.findall(r"== (\w+) \(at most (\d+) s\)", ended.stdout))
    assert sum(map(int, seconds.values())) <= 800
    commands = (tmp_path / "commands").read_text().splitlines()
    for command in commands:
        assert composed(shlex.join(command.split("\t")))
    assert len(commands) == len(seconds) == 20


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_that_torchrun_starts_train_replicas_a_single_one_too(tmp_path, world):
    single = {} if world > 1 else {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
                                   "MASTER_PORT": "0"}
    program = "from scripts import benchmark; benchmark.SQUARES['cpu'] = (32,); benchmark.main()"
    ended = forked.run("-c", program, *TINY, f"out={tmp_path}/it", "variants=[dit]", ranks=world, **single)
    assert ended.returncode == 0, ended.stderr
    record = json.loads((tmp_path / "it.json").read_text())
    assert (record["DDP"], record["ranks"], record["rows"][0]["ranks"]) == (True, world, world)
