"""The checks of a new machine, on a CPU: that they pass here, and that each finds what it is for."""

import json

import forked
import pytest
import torch
from conftest import run_command

import train
from scripts import benchmark, check_gpu


@pytest.fixture
def machine(fresh_accelerator, monkeypatch):
    monkeypatch.setitem(benchmark.SQUARES, "cpu", (32,))
    # In place of a new Python, which would import for seconds.
    monkeypatch.setattr(check_gpu.subprocess, "run", lambda line, **_: forked.run(*line[1:]))
    yield check_gpu.Machine(True, torch.device("cpu"), 0, 1)
    torch.set_float32_matmul_precision("highest")


def test_a_rehearsal_on_a_cpu_passes_and_its_json_has_its_lines(machine, graphs, tmp_path, capsys):
    run_command(check_gpu.main, "check_gpu.py", "rehearsal=true", f"out={tmp_path}/gpu.json")
    rows, printed = json.loads((tmp_path / "gpu.json").read_text())["checks"], capsys.readouterr().out
    results = {row["check"]: row["result"] for row in rows}
    assert all(f"{row['result']}  {row['check']}: {row['message']}" in printed for row in rows)
    assert {name for name, result in results.items() if result == "PASS"} == {
        "machine", "step, fp32, eager", "step, fp32, compiled", "step, bf16, eager", "stop and resume", "sampling",
        "speed, DiT-S/2", *(f"replays, {precision}, CUDA graphs" for precision in ("fp32", "bf16")),
        *(f"no wait, {recipe}" for recipe in check_gpu.RECIPES)}, rows
    assert set(results.values()) == {"PASS", "SKIP"} and "0 of" in printed


def test_two_ranks_step_like_one_as_replicas_and_sharded(tmp_path):
    program = ("from scripts import check_gpu as c; names = ('step, fp32, eager', 'FSDP', 'sampling'); "
               "c.CHECKS = {name: c.CHECKS[name] for name in names}; c.main()")
    ended = forked.run("-c", program, "rehearsal=true", f"out={tmp_path}/gpu.json", ranks=2)
    assert ended.returncode == 0, ended.stderr
    checks = json.loads((tmp_path / "gpu.json").read_text())["checks"]
    assert [row["result"] for row in checks] == 3 * ["PASS"], ended.stdout


def test_a_check_that_raises_fails_with_its_first_line_and_the_others_still_run(machine, monkeypatch, capsys):
    def broken(machine):
        raise RuntimeError("no kernel image\nand a long trace")

    monkeypatch.setattr(check_gpu, "CHECKS", {"broken": broken, "machine": check_gpu.check_machine})
    with pytest.raises(SystemExit) as ended:
        run_command(check_gpu.main, "check_gpu.py", "rehearsal=true")
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAIL  broken: RuntimeError: no kernel image  [")
    assert lines[1].startswith("PASS  machine: ")
    assert lines[-1] == "1 of 2 checks failed: broken"


def test_what_the_pages_download_is_named_until_it_is_here(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(check_gpu.importlib.util, "find_spec", lambda name: None)
    result, message = check_gpu.outcome(check_gpu.check_downloads, machine)
    assert result == "SKIP" and "stabilityai/sd-vae-ft-ema (autoencoder=sd_vae_ema)" in message
    assert "weights-inception-2015-12-05-6726825d.pth in " in message and "TensorFlow (features=adm)" in message
    monkeypatch.setattr(check_gpu.torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(check_gpu, "try_to_load_from_cache", lambda *_, **__: "cached")
    monkeypatch.setattr(check_gpu.importlib.util, "find_spec", lambda name: name)
    (tmp_path / "checkpoints").mkdir()
    for url in (check_gpu.INCEPTION_URL, check_gpu.ADM_GRAPH_URL):
        (tmp_path / "checkpoints" / url.rpartition("/")[2]).touch()
    assert check_gpu.outcome(check_gpu.check_downloads, machine)[0] == "PASS"


@pytest.mark.parametrize(("factor", "says"), [
    (1.01, r"loss within 1\.0e-02 and gradient norm within 1\.0e-02 of the CPU's \(at most 0\.0001\)"),
    (float("nan"), "loss within nan"),
])
def test_steps_that_differ_from_the_cpus_fail_with_the_numbers(machine, monkeypatch, factor, says):
    def step(*arguments, **options):
        loss, norm, skipped, terms = train.train_step(*arguments, **options)
        return loss * factor, norm * factor, skipped, terms

    monkeypatch.setattr(check_gpu, "train_step", step)
    with pytest.raises(ValueError, match=says):
        check_gpu.check_step(machine, "fp32", "eager")


def test_a_resumed_run_that_differs_fails(machine, monkeypatch):
    losses = iter([dict.fromkeys(range(9), 1.0), {}, dict.fromkeys(range(9), 1.01)])
    monkeypatch.setattr(check_gpu, "losses_of", lambda *_: next(losses))
    with pytest.raises(ValueError, match=r"losses of steps 5 to 8 within 1\.0e-02"):
        check_gpu.check_resuming(machine)


def test_without_a_gpu_the_error_names_the_rehearsal(machine):
    with pytest.raises(SystemExit, match="torch sees no GPU here; rehearsal=true runs"):
        run_command(check_gpu.main, "check_gpu.py")


@pytest.mark.gpu
def test_this_machine_passes_all_checks():
    run_command(check_gpu.main, "check_gpu.py")
