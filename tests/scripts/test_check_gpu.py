"""The checks of a new machine, on a CPU: that they pass here, and that each finds what it is for."""

import json
from unittest.mock import Mock

import forked
import pytest
from conftest import run_command

from scripts import check_gpu

pytestmark = pytest.mark.usefixtures("fresh_accelerator", "float32_restored")


def test_a_rehearsal_on_a_cpu_passes_and_writes_its_checks(graphs, tmp_path, capsys):
    run_command(check_gpu.main, "check_gpu.py", "rehearsal=true", f"out={tmp_path}/gpu.json")
    rows = json.loads((tmp_path / "gpu.json").read_text())["checks"]
    assert {row["check"] for row in rows if row["result"] != "SKIP"} == {
        "machine", "step, fp32", "step, fp32, compiled", "step, bf16", "stop and resume"}, rows
    assert "0 of 19 checks failed" in capsys.readouterr().out


def test_two_ranks_step_like_one_with_shards():
    ended = forked.run("scripts/check_gpu.py", "rehearsal=true", "only=FSDP", ranks=2)
    assert ended.returncode == 0 and "PASS  FSDP: " in ended.stdout, ended.stderr


def test_a_check_that_raises_fails_with_its_first_line_and_the_others_still_run(monkeypatch, capsys):
    broken = Mock(side_effect=RuntimeError("no kernel image\nand a long trace"))
    monkeypatch.setattr(check_gpu, "CHECKS", {"broken": broken, "machine": check_gpu.check_machine})
    with pytest.raises(SystemExit) as ended:
        run_command(check_gpu.main, "check_gpu.py", "rehearsal=true")
    assert ended.value.code == 1
    broken, passed, end = capsys.readouterr().out.splitlines()
    assert broken.startswith("FAIL  broken: RuntimeError: no kernel image  [") and passed.startswith("PASS  machine: ")
    assert end == "1 of 2 checks failed: broken"


@pytest.mark.parametrize(("factor", "says"), [
    (1.01, r"within 1\.0e-02 .* within 1\.0e-02 of the CPU's \(at most 0\.0001\)"), (float("nan"), "loss within nan"),
])
def test_what_differs_fails_with_the_numbers(monkeypatch, factor, says):
    real = check_gpu.steps_here
    monkeypatch.setattr(check_gpu, "steps_here", lambda *arguments: factor * real(*arguments))
    with pytest.raises(ValueError, match=says):
        check_gpu.check_step(True, "fp32")
    monkeypatch.setattr(check_gpu.train, "main", lambda *_, **__: None)
    monkeypatch.setattr(check_gpu.files, "read_rows", lambda file: [
        {"step": step, "loss": factor if file.parts[-2] == "twice" else 1.0} for step in range(9)])
    with pytest.raises(ValueError, match="losses of steps 5 to 8 within (1.0e-02|nan) of those"):
        check_gpu.check_resuming(True)
