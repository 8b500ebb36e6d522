"""scripts/slurm.sh, against mocks of Slurm's commands."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import PATIENCE, ROOT

# Starts the tasks. By the option, the first that fails brings TERM to the others. A signal hides exit codes.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, time
option, *command = sys.argv[1:]
assert option == "--kill-on-bad-exit=1"
count, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_NNODES"])
places = [{{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i % (count // nodes))}} for i in range(count)]
tasks = [subprocess.Popen(command, env=os.environ | place) for place in places]
while not any(task.poll() for task in tasks) and any(task.poll() is None for task in tasks):
    time.sleep(0.001)
[task.send_signal(signal.SIGTERM) for task in tasks if task.poll() is None]
ends = [task.wait() for task in tasks]
sys.exit(128 - min(ends) if min(ends) < 0 else max(ends))
"""
SCONTROL = """#!/bin/sh
case $1 in show) echo localhost ;; requeue) echo "$2" >> "$REQUEUED"; exit "${REFUSES:-0}" ;; esac
"""
# A program that saves after a signal and exits with 128 + signal, as train.py does.
PROGRAM = """
import json, os, pathlib, signal, sys, time
note = pathlib.Path(os.environ["REQUEUED"]).parent / f"rank{os.environ.get('RANK', 'none')}"
stopped = []
for number in (signal.SIGUSR1, signal.SIGTERM) if "fid" not in sys.argv else ():
    signal.signal(number, lambda number, _: stopped.append(number))
names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SRUN_CPUS_PER_TASK")
given = {"given": sys.argv[1:], "pid": os.getpid(), **{name: os.environ.get(name) for name in names}}
note.with_suffix(".part").write_text(json.dumps(given))
note.with_suffix(".part").rename(note)
if "fail" in sys.argv:
    sys.exit(3)
while "wait" in sys.argv and not stopped:
    time.sleep(0.01)
time.sleep(1 if "fid" in sys.argv else 0)
if stopped:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a command that has saved
sys.exit(1 if "unsaved" in sys.argv else 128 + stopped[0] if stopped else 0)
"""


@pytest.fixture
def slurm(tmp_path):
    """Returns a function that starts slurm.sh as a job of `tasks` tasks."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "program.py").write_text(PROGRAM)

    def start(tasks, *command, **more):
        env = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable,
            "REQUEUED": str(tmp_path / "requeued"), "SLURM_NTASKS": str(tasks), "SLURM_NNODES": "1",
            "SLURM_JOB_ID": "54321", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_SUBMIT_DIR": str(ROOT),
            "OMP_NUM_THREADS": "1", **more}
        return subprocess.Popen(["bash", ROOT / "scripts/slurm.sh", *command], env=env, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True)
    return start


@pytest.mark.parametrize(("words", "number", "code", "printed"), [
    (["wait"], signal.SIGUSR1, 0, "goes back into the queue"),
    (["wait", "refused"], signal.SIGUSR1, 138, "submit the same command again"),
    (["wait", "unsaved"], signal.SIGUSR1, 1, ""),
    (["wait"], signal.SIGTERM, 143, ""),  # of a preemption, after which Slurm requeues, or of a user's scancel
    (["fid"], signal.SIGUSR1, 0, ""),   # ends, or is ended by the limit
    (["done"], None, 0, ""), (["fail"], None, 3, ""),
])  # fmt: skip
def test_a_job_that_nears_its_time_limit_saves_and_goes_back_into_the_queue_and_no_other(
        slurm, tmp_path, words, number, code, printed):
    assert "\n#SBATCH --signal=USR1@" in (ROOT / "scripts/slurm.sh").read_text()  # to the tasks; B: is to the script
    job = slurm(2 if number else 1, tmp_path / "program.py", *words, REFUSES=str(int("refused" in words)))
    if number:
        while len(tasks := [*tmp_path.glob("rank?")]) < 2 and job.poll() is None:
            time.sleep(0.001)
        for task in tasks:
            os.kill(json.loads(task.read_text())["pid"], number)
    output = job.communicate(timeout=PATIENCE)[0]
    assert job.returncode == code and printed in output, output
    requeued = [file.read_text() for file in tmp_path.glob("requeued")]
    assert requeued == ["54321\n"] * (words in (["wait"], ["wait", "refused"]) and number == signal.SIGUSR1)


@pytest.mark.parametrize(("ranks", "more", "given"), [
    ((0, 1, 2, 3), {"SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "8"}, ["done"]),
    (("none",), {"SLURM_ARRAY_TASK_ID": "5"}, ["done", "seed=5"]),
])
def test_ranks_know_their_place_one_task_is_no_world_and_that_of_an_array_gets_its_number_as_the_seed(
        slurm, tmp_path, ranks, more, given):
    job = slurm(len(ranks), tmp_path / "program.py", "done", **more)
    assert job.wait(PATIENCE) == 0, job.stdout.read()
    told = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in ranks]
    assert [(rank["LOCAL_RANK"], rank["LOCAL_WORLD_SIZE"], rank["WORLD_SIZE"]) for rank in told] == (
        [("0", "2", "4"), ("1", "2", "4")] * 2 if len(ranks) > 1 else [(None, None, None)])
    assert all(rank["given"] == given and rank["SRUN_CPUS_PER_TASK"] == more.get("SLURM_CPUS_PER_TASK")
               and (rank["MASTER_ADDR"], rank["MASTER_PORT"]) == ("localhost", "34321") for rank in told)
