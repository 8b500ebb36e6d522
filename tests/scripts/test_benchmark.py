"""Every mode of the benchmark on a tiny network; what is counted is right, and what is timed is never asserted on."""

import json
import os
import sys
from types import SimpleNamespace

import forked
import pytest
import torch
from conftest import ROOT
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dit import multiply_adds
from runtime import schema
from scripts import benchmark, clocks

TINY = ["hidden_size=32", "depth=3", "num_heads=2", "tokens=16", "num_classes=5", "batch_size=4", "num_latents=8",
        "rounds=2", "steps=1", "warmup=1", "device=cpu", "autoencoder=identity", "num_steps=2", "image_size=16",
        "feature_size=8", "images=20", "reference_images=10",
        "routes=[{start_layer_idx: 1, end_layer_idx: 1, selection_ratio: 0.5}]", "token_counts=[4,16]", "ranks=[]"]
TRAIN = {"images/s", "s/step", "TFLOP/s a rank", "MFU", "over dense", "FLOP ratio", "peak GiB", "first step s",
         "graphs", "rounds s/step"}
PARTS = ["data wait", "forward", "backward", "optimizer", "EMA", "sums"]


def load(*overrides):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("benchmark", overrides=[*TINY, *overrides])
    return schema.read(benchmark.BenchmarkSettings, OmegaConf.to_container(cfg, resolve=True))


@pytest.fixture(autouse=True)
def small_products_and_settings_restored(monkeypatch):
    monkeypatch.setitem(clocks.SQUARES, "cpu", (32, 64))
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def run(tmp_path, *overrides):
    """Runs a mode; returns what its JSON holds once table and plot are there too."""
    record = benchmark.run(load(f"out={tmp_path}/made/it", *overrides))
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["it.json", "it.png"]
    assert (tmp_path / "made" / "it.png").read_bytes().startswith(b"\x89PNG")
    read = json.loads((tmp_path / "made" / "it.json").read_text())
    assert read == json.loads(json.dumps(record)) and read["versions"]["torch"] == torch.__version__ and read["device"]
    return read


def test_training_steps_and_their_parts_are_timed_in_turn_with_matrix_products(tmp_path, capsys):
    record = run(tmp_path, "mode=train", "variants=[dit,tread,tread-eager]")
    assert [row["variant"] for row in record["rows"]] == ["dit", "tread", "tread-eager"]
    for row in record["rows"]:
        assert row.keys() >= TRAIN and list(row["parts"]) == PARTS and len(row["rounds s/step"]) == 2
        assert row["images/s"] == pytest.approx(4 / row["s/step"])
        rate = row["GFLOP/image"] * 1e9 * row["images/s"]
        assert row["MFU"] * max(record["matmul FLOP/s"].values()) == pytest.approx(rate)
    assert record["rows"][0]["over dense"] == 1 and record["rows"][1]["FLOP ratio"] > 1
    assert record["rows"][1]["over dense"] == record["ratios"]["tread over dit"]
    assert record["rows"][2]["over dense"] is None  # there is no dit-eager to compare with
    printed = capsys.readouterr().out
    assert "| tread-eager | 4 |" in printed and "not measured" in printed and "MFU is the share of the best" in printed


def test_a_ratio_is_of_two_variants_in_the_same_round(tmp_path, monkeypatch):
    seconds = iter([1, 1, 1, 1, 2, 1, 8, 2])  # dit and tread: first step and warm-up, then rounds of 2 and 1, 8 and 2
    monkeypatch.setattr(benchmark.Variant, "measure", lambda self, count: {"step": next(seconds)})
    rows = run(tmp_path, "mode=train")["rows"]
    assert [row["s/step"] for row in rows] == [5, 1.5] and rows[1]["over dense"] == 3


@pytest.mark.parametrize(("options", "passes"), [
    (["guidance=cfg", "scale=2"], 6), ([], 3), (["diffusion=rf"], 2), (["diffusion=rf", "guidance=cfg", "scale=2"], 4),
])
def test_sampling_measures_the_networks_share_and_the_cost_of_an_image(tmp_path, options, passes):
    cost = passes * 2e-9 * sum(multiply_adds(benchmark.make_network(load(), "dit", "meta")))
    rows = run(tmp_path, "mode=sample", "variants=[dit,tread,dit-eager]", *options)["rows"]
    assert [row["variant"] for row in rows] == ["dit", "dit-eager"]  # routed networks are sampled dense
    for row in rows:
        assert set(row["parts"]) == {"sampler", "network", "decode"} and 0 < row["share in network"] < 1
        assert row.keys() >= {"images/s", "s/batch", "MFU in network", "peak GiB", "first batch s"}
        assert row["GFLOP/image"] == pytest.approx(cost)


def test_data_and_scoring_are_timed(tmp_path):
    rows = run(tmp_path / "data", "mode=data", "pause=0.001")["rows"]
    assert [row["variant"] for row in rows] == ["at once", "with pauses", "on the device"]
    assert all(row.keys() >= {"latents/s", "MB/s", "longest wait s"} and list(row["parts"]) == ["data wait"]
               for row in rows)
    rows = run(tmp_path / "score", "mode=score")["rows"]
    assert [row["variant"] for row in rows] == ["features pixels", "Fréchet distance", "precision and recall"]
    assert rows[0]["features/s"] > 0 and all(row["parts"]["one run"] > 0 for row in rows)


def test_tokens_scale_at_equal_tokens_a_step(tmp_path):
    rows = run(tmp_path, "mode=scaling", "batch_size=1")["rows"]
    assert [(row["variant"], row["tokens"], row["batch"]) for row in rows] == [
        ("dit", 4, 64), ("tread", 4, 64), ("dit", 16, 16), ("tread", 16, 16)]
    assert rows[3]["FLOP ratio"] > 1 and all(row.keys() >= TRAIN | {"scales"} for row in rows)


def test_ranks_scale_in_processes_of_their_own(tmp_path, monkeypatch):
    asked = ["token_counts=[]", "ranks=[2]", "rounds=1", "variants=[tread]"]
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *TINY, "mode=scaling", *asked])

    def run_forked(line, env, **options):  # without the seconds that imports take
        assert line[1:7] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", benchmark.PROGRAM]
        return forked.run(*line[6:], ranks=2, OMP_NUM_THREADS=env["OMP_NUM_THREADS"])

    monkeypatch.setattr(benchmark, "subprocess", SimpleNamespace(run=run_forked))
    row, = run(tmp_path, "mode=scaling", *asked)["rows"]
    assert (row["ranks"], row["batch"], row["per rank"], list(row["parts"])) == (2, 8, 1, PARTS)
    assert row["threads"] * 2 <= max(2, len(os.sched_getaffinity(0)))  # the cores are not oversubscribed


def test_time_is_charged_to_the_mark_that_ends_it(monkeypatch):
    clock = iter([0, 1, 3, 7, 8])
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: next(clock))
    parts = clocks.seconds_of_parts(torch.device("cpu"), lambda mark: [mark(name) for name in "abab"], 2)
    assert parts == {"a": 2.5, "b": 1.5}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_raises_a_one_line_error():
    with pytest.raises(ValueError, match="torch sees no GPU"):
        benchmark.run(load("device=cuda"))
