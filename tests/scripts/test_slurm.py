"""scripts/slurm.sh and scripts/studies/gpu_study.sh, against stand-ins for Slurm and for Python that do what those do to a job."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tarfile
import time

import pytest
from conftest import ROOT

from scripts.benchmark import write_latents
from weights import checkpoint as checkpoints

# Starts the tasks, hands TERM on to each, and ends all where one leaves with another code than 0, as it is asked to;
# returns the largest exit code.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, time
command, options = sys.argv[1:], []
while command[0].startswith("--"):
    options.append(command.pop(0))
count, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_NNODES"])
places = [{{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i % (count // nodes))}} for i in range(count)]
tasks = [subprocess.Popen(command, env=os.environ | place) for place in places]
signal.signal(signal.SIGTERM, lambda *_: [task.send_signal(signal.SIGTERM) for task in tasks])
while None in (codes := [task.poll() for task in tasks]):
    if any(codes) and "--kill-on-bad-exit=1" in options:
        [task.terminate() for task in tasks]
        options.clear()
    time.sleep(0.01)
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """#!/bin/sh
case $1 in show) echo localhost ;; requeue) echo "$2" >> "$REQUEUED"; exit "${REFUSES:-0}" ;; esac
"""
# A program that saves within a second of the first TERM, as train.py does, and is ended by a second one.
PROGRAM = """
import json, os, pathlib, signal, sys, time
note = pathlib.Path(os.environ["REQUEUED"]).parent / f"rank{os.environ.get('RANK', 'none')}"
stopped = []
signal.signal(signal.SIGTERM, lambda *_: (stopped.append(1), signal.signal(signal.SIGTERM, lambda *_: os._exit(1))))
names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SRUN_CPUS_PER_TASK")
note.write_text(json.dumps({"given": sys.argv[1:], **{name: os.environ.get(name) for name in names}}))
if "fail" in sys.argv:
    sys.exit(3)
while "wait" in sys.argv and not stopped:
    time.sleep(0.01)
time.sleep(100 if "unsaved" in sys.argv and os.environ["RANK"] != "0" else 0.3 if stopped else 0)
sys.exit(1 if "unsaved" in sys.argv else 143 if stopped or "killed" in sys.argv else 0)
"""


@pytest.fixture
def slurm(tmp_path):
    """Returns a function that starts slurm.sh as a job of `tasks` tasks."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "program.py").write_text(PROGRAM)

    def start(tasks, *command, **more):
        env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable, "REQUEUED": str(tmp_path / "requeued"),
                            "SLURM_NTASKS": str(tasks), "SLURM_NNODES": "1", "SLURM_JOB_ID": start.job, "SLURM_JOB_NODELIST": "n[1-2]",
                            "SLURM_SUBMIT_DIR": str(ROOT), "OMP_NUM_THREADS": "1", **more}
        return subprocess.Popen(["bash", ROOT / "scripts/slurm.sh", *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    start.job = free_job()
    return start


def free_job() -> str:
    """The number of a job whose port, which follows from it, is free."""
    while True:
        job = random.randrange(10**7)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", 20_000 + job % 20_000))
            return str(job)


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def given_to(tmp_path, *ranks):
    """What each rank wrote down once it had started."""
    files = [tmp_path / f"rank{rank}" for rank in ranks]
    wait_for(lambda: all(file.is_file() and file.stat().st_size for file in files))
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize(("words", "number", "code", "printed"), [
    (["wait"], signal.SIGUSR1, 0, "goes back into the queue"), (["wait"], signal.SIGTERM, 0, "goes back into the queue"),
    (["wait", "refused"], signal.SIGTERM, 143, "submit the same command again"),
    (["wait", "unsaved"], signal.SIGUSR1, 1, "stays out of the queue"),
    (["done"], None, 0, ""), (["fail"], None, 3, ""), (["killed"], None, 143, ""),
])  # fmt: skip
def test_a_job_that_is_stopped_and_saves_goes_back_into_the_queue_and_no_other(slurm, tmp_path, words, number, code, printed):
    job = slurm(2 if number else 1, tmp_path / "program.py", *words, REFUSES=str(int("refused" in words)))
    if number:
        given_to(tmp_path, 0, 1)
        job.send_signal(number)  # which Slurm gives to the batch script alone
        job.send_signal(number)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == code and printed in output, output
    requeued = tmp_path / "requeued"
    assert (requeued.read_text() == f"{slurm.job}\n") if words[0] == "wait" and "unsaved" not in words else not requeued.exists()


def test_ranks_of_two_nodes_know_their_place_on_each(slurm, tmp_path):
    job = slurm(4, tmp_path / "program.py", "done", SLURM_NNODES="2", SLURM_CPUS_PER_TASK="8")
    assert job.wait(60) == 0, job.stdout.read()
    ranks, port = given_to(tmp_path, *range(4)), str(20_000 + int(slurm.job) % 20_000)
    assert [(rank["LOCAL_RANK"], rank["LOCAL_WORLD_SIZE"], rank["WORLD_SIZE"]) for rank in ranks] == [
        ("0", "2", "4"), ("1", "2", "4"), ("0", "2", "4"), ("1", "2", "4")]
    assert {(rank["SRUN_CPUS_PER_TASK"], rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks} == {("8", "localhost", port)}


def test_a_task_of_an_array_gets_its_part_and_one_task_is_no_world(slurm, tmp_path):
    job = slurm(1, tmp_path / "program.py", "done", SLURM_ARRAY_TASK_ID="5", SLURM_ARRAY_TASK_MIN="4", SLURM_ARRAY_TASK_COUNT="3")
    assert job.wait(60) == 0, job.stdout.read()
    [given] = given_to(tmp_path, "none")
    assert given["given"] == ["done", "part=2/3"] and given["WORLD_SIZE"] is None


def test_train_py_saves_on_two_nodes_when_its_time_is_up(slurm, tmp_path):
    (tmp_path / "data").mkdir()
    write_latents(tmp_path / "data", 64, (3, 8, 8), 4)
    job = slurm(2, "train.py", "experiment=quickstart", f"data.path={tmp_path}/data", f"run_dir={tmp_path}/run", "batch_size=8", "steps=100000", "log.every=1",
                "model.hidden_size=32", "model.num_heads=2", "model.depth=6", "samples.every=0", "data.channels=3", "data.input_size=8",
                "data.num_classes=4", "cpu=true", "model.patch_size=2", SLURM_NNODES="2")
    rows = tmp_path / "run/metrics.jsonl"
    wait_for(lambda: rows.is_file() or job.poll() is not None)
    job.send_signal(signal.SIGUSR1)
    output = job.communicate(timeout=120)[0]
    assert "Stopped by SIGTERM" in output and (tmp_path / "requeued").read_text() == f"{slurm.job}\n", output
    saved = checkpoints.latest(tmp_path / "run")
    assert checkpoints.step_of(saved) == json.loads(rows.read_text().splitlines()[-1])["step"] and not checkpoints.problem(saved)


# ---- the GPU study's calls -------------------------------------------------------------------------------------------


# Stands for Python: notes what is run; the study's training takes three calls, in each until it is stopped.
STUB = f"""#!{sys.executable}
import os, pathlib, signal, sys, time
home = pathlib.Path(os.environ["STUB"])
with open(home / "calls", "a") as calls:
    print(*sys.argv[1:], file=calls)
given = dict(text.split("=", 1) for text in sys.argv[2:] if "=" in text)
if sys.argv[1].endswith("study.py"):
    out = pathlib.Path(given["out"])
    out.mkdir(parents=True, exist_ok=True)
    if "report" in given["tasks"]:
        (out / "study.md").write_text("table")
    elif "time" in given["tasks"]:
        (out / "timing.json").write_text(given["only"])
    else:
        (out / "runs").mkdir(exist_ok=True)
        (out / "runs/weights").write_text("heavy")
        calls = len((home / "calls").read_text().split("train,score")) - 1
        if calls < 3:
            signal.signal(signal.SIGTERM, lambda *_: ((home / "saved").write_text(str(calls)), sys.exit(143)))
            time.sleep(60)
elif "out" in given:
    pathlib.Path(given["out"]).parent.mkdir(parents=True, exist_ok=True)
    sys.exit("official" in sys.argv[1])
"""


def test_calls_of_the_gpu_study_stop_in_time_go_on_and_bring_back_what_is_small(tmp_path):
    (tmp_path / "python").write_text(STUB)
    (tmp_path / "python").chmod(0o755)

    def call(state, **more):
        env = os.environ | {"STUB": str(tmp_path), "PYTHON": str(tmp_path / "python"), "STATE": str(tmp_path / state), "OUT": str(tmp_path / "out"),
                            "STUDY": "rehearsal", "LIMIT": "30", "RESERVE": "23", "LEAST": "1", "OFFICIAL": str(tmp_path), **more}
        began = time.monotonic()
        ended = subprocess.run(["bash", ROOT / "scripts/studies/gpu_study.sh", "also=['steps=9']"], env=env, capture_output=True, text=True)
        return ended.returncode, ended.stdout + ended.stderr, time.monotonic() - began

    code, output, took = call("one", PARTS="data official timing study")
    assert code == 1 and took < 30 and (tmp_path / "saved").read_text() == "1", output
    assert "Failed or not at their end: official study" in output
    with tarfile.open(tmp_path / "out/gpu_study.tar.gz") as packed:
        names = {name.removeprefix("./") for name in packed.getnames()}
    assert {"study/study.md", "study/timing.json", "done/data", "done/timing", "study.txt"} <= names and "study/runs" not in names and "done/official" not in names
    # A bare machine: the data are made anew, what is recorded is there.
    code, output, _ = call("two", PARTS="study", PREVIOUS=str(tmp_path / "out/gpu_study.tar.gz"))
    assert code == 1 and (tmp_path / "two/results/done/data").is_file(), output
    code, output, _ = call("one", PARTS="study")
    assert code == 0 and (tmp_path / "one/results/done/study").is_file(), output
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sum("tasks=[report]" in line for line in calls) == 3 and all("also=['steps=9']" in line for line in calls if "study.py" in line)
    assert call("one", PARTS="studies")[0] == 2
