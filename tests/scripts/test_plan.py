"""The plan's hours, and the official step against ours."""

import json
import sys

import pytest
from conftest import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode

import dit
from scripts import plan
from training import memory


def printed(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["plan.py", *map(str, arguments)])
    plan.main()
    return capsys.readouterr().out


def test_the_tables_of_the_page_are_what_the_command_prints(monkeypatch, capsys):
    monkeypatch.setattr(plan, "encoder_flops", lambda: 0)  # imports diffusers
    page = (ROOT / "docs/imagenet.md").read_text()
    rows = [line for line in printed(monkeypatch, capsys).splitlines() if line.startswith("| ")]
    assert len(rows) == 16 and all(row in page for row in rows)


def test_hours_follow_from_the_count_or_from_what_was_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(plan, "encoder_flops", lambda: 0)
    dense = 6 * sum(dit.multiply_adds(plan.network("B", False)))
    assert abs(dense / 138e9 - 1) < 0.01
    derived = printed(monkeypatch, capsys, "--mfu", 0.5, "--peak", 100)
    assert f"| {400_000 * 256 * dense / 50e12 / 3600:,.1f} |" in derived
    (tmp_path / "b2.json").write_text(json.dumps({"settings": {"backbone_type": "DiT-B/2"}, "device": "X100", "rows": [
        {"variant": "tread", "tokens": 256, "images/s": 4000.0, "ranks": 2},
        {"variant": "tread-eager", "tokens": 256, "images/s": 1.0, "ranks": 1}]}))
    measured = printed(monkeypatch, capsys, "--measured", tmp_path / "b2.json")
    [row] = [line for line in measured.splitlines() if "measured" in line]
    assert row.startswith("| B/2 TREAD |") and "| 2,000 | 14.2 | 1.9 |" in row and "X100" in row
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(SystemExit, match="other.json has no time of a DiT of patch 2"):
        printed(monkeypatch, capsys, "--measured", tmp_path / "other.json")


@pytest.mark.parametrize("given", [
    ("--dense-after", "0"), ("--dense-after", "1"), ("--selection-ratios", "0.5", "1"), ("--gpus", "0"),
    ("--mfu", "nan"), ("--peak", "-1")])
def test_a_number_out_of_range_is_named(monkeypatch, capsys, given):
    with pytest.raises(SystemExit, match=given[0]):
        printed(monkeypatch, capsys, *given)


def test_the_memory_of_the_pages_is_what_the_command_prints(monkeypatch, capsys):
    monkeypatch.setattr(plan, "SIZES", ("S",))
    monkeypatch.setattr(plan, "OTHERS", ("LightningDiT-XL/1",))
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("training.md", "reliability.md"))
    rows = [line for line in printed(monkeypatch, capsys, "--memory").splitlines() if line.startswith("| ")]
    assert len(rows) == 10 and all(row in pages for row in rows)


@pytest.mark.parametrize("routed", [False, True])
def test_activations_counted_by_shapes_are_those_of_a_real_pass(routed):
    with FakeTensorMode():
        counted = memory.activation_bytes(plan.build("DiT-S/2", 256, routed), batch=2)
    assert counted == memory.activation_bytes(plan.build("DiT-S/2", 256, routed), batch=2)


def test_the_parts_of_a_pass_fill_a_gpu_and_leave_a_tenth_of_it():
    assert memory.images_that_fit(fixed=10, per_image=1, memory=100, most=256) == 64  # 74 and 90 are full at 64 and 80
    assert memory.images_that_fit(10, 1, 100, most=32) == 32 and memory.images_that_fit(90, 1, 100, 256) == 0
