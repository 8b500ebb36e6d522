"""Kills our commands and fails their writes: started again, each leaves the files of an undisturbed one.

    python -m pytest -m rig tests/rigs/test_kills.py                                 # some minutes
    RIG_KILLS=250 RIG_SEED=1 python -m pytest -m rig tests/rigs/test_kills.py        # so many kills of each command
    RIG_WRITES=10 python -m pytest -m rig tests/rigs/test_kills.py -k train          # ten failed writes, not all

A life is a forked child that runs a command as it is, or two ranks. All files must be equal bit for bit, except for
clock times.
"""

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import world
from conftest import ROOT
from forked import Changes, Life, killing, start

from runtime import files
from runtime.command import commit
from runtime.libraries import is_complete
from weights import checkpoints

pytestmark = [pytest.mark.rig, pytest.mark.timeout(0)]
KILLS, SEED = int(os.environ.get("RIG_KILLS", 20)), int(os.environ.get("RIG_SEED", 0))
WRITES = int(os.environ.get("RIG_WRITES", 10**6))
LIMIT = 300  # seconds of a life; one that takes longer hangs
CLOCK = {"img_per_sec", "sec_per_step", "peak_memory_gib", "elapsed_s", "seconds", "finished", "run_id",
         "resumed_images"}  # what two equal runs differ in
HALF = re.compile(r"(^|/)\.[^/]*\.tmp(/|$)")  # what a kill leaves of a file

# ---- a command, and what it leaves ----------------------------------------------------------------------------------


def last_step(run: Path) -> int:
    """Returns the step of the newest complete checkpoint, or 0."""
    newest = checkpoints.latest(run)
    return checkpoints.step_of(newest) if newest else 0


def shards_done(out: Path) -> int:
    return 10**6 if (out / "metadata.json").is_file() else len(list(out.glob("record-*.json")))


@dataclass
class Task:
    """A command, where it writes, and how far it has come, which may only grow."""

    command: str
    typed: list[str]
    out: Path
    reached: Callable[[Path], int] = lambda out: 0
    # Not where several may write at once: a kill may leave a hidden half, or half a row, and a row may come twice.
    is_exact: bool = True
    ranks: int = 1
    seconds: float = 0.0
    changes: int = 0
    wanted: dict[str, str] | None = None  # what an undisturbed life leaves

    def start(self, meet: Callable = lambda number, kind, half: None) -> Life:
        """Begins a life; `meet` is called before each change to a file of a single rank."""
        def live() -> None:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the rig
            changes = Changes(self.out, meet)
            world.run(self.out.parent, self.command, self.typed)
            print(f"{changes.number} changes")

        if self.ranks == 1:
            return Life(live)
        return start("-c", f"import pathlib, world; world.run(pathlib.Path({str(self.out.parent)!r}), "
                           f"{self.command!r}, {self.typed!r})", ranks=self.ranks)

    def content(self) -> dict[str, str]:
        """Hashes every file that the command has left except the lock, ignoring values from the clock."""
        hashes = {}
        for file in sorted(self.out.rglob("*")):
            name = str(file.relative_to(self.out))
            if (not file.is_file() or ".lock" in (file.suffix, file.name) or file.parent.name == "logs"
                    or (HALF.search(name) and not self.is_exact)):
                continue
            data = file.read_bytes()
            with contextlib.suppress(ValueError):
                if file.suffix == ".json":
                    record = plain(json.loads(data))
                    if file.name == "meta.json":
                        record.pop("sha256")  # which is of the clock's numbers, too
                    data = json.dumps(record).encode()
                elif file.suffix == ".jsonl":
                    rows = map(json.loads, data.splitlines()) if self.is_exact else files.read_rows(file)
                    rows = [json.dumps(plain(row)) for row in rows]
                    data = "\n".join(rows if self.is_exact else dict.fromkeys(rows)).encode()
            hashes[name] = hashlib.sha256(data).hexdigest()
        return hashes

    def differs_in(self) -> list[str]:
        """Names the files that are not those of an undisturbed life."""
        got, wanted = self.content(), self.wanted
        return sorted(name for name in {*wanted, *got} if wanted.get(name) != got.get(name))


def plain(value: object) -> object:
    """Drops the keys of a record that depend on the clock."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items() if key not in CLOCK}
    return [plain(part) for part in value] if isinstance(value, list) else value


TASKS = {  # of a second or two each; named by the command and what it does
    "train": (["steps=4", "log.every=2", "checkpoint.every=2", "checkpoint.keep_last=1", "checkpoint.keep_every=4",
               "samples.every=4", "samples.seeds=0-3", "samples.num_steps=1", "evaluate.every=4",
               "evaluate.reference=images.npz", "evaluate.num_samples=4", "evaluate.num_steps=1", "run_dir="],
              dict(reached=last_step)),
    "prepare_latents": (["source=shapes", "shapes.count=60", "shard_size=16", "batch_size=8", "mirror=true", "out="],
                        dict(reached=shards_done)),
    "import_latents": (["shard_size=1", "out="], dict(reached=shards_done)),
    "fid": (["images=images.npz", "batch_size=1", "results=/results.jsonl"], dict(is_exact=False)),
    "sample npz": (["seeds=0-7", "num_steps=1", "batch_size=2", "out=/x.npz"], {}),
    "sample pngs": (["seeds=0-7", "num_steps=1", "batch_size=2", "out=/set"], {}),
    "train on two ranks": (["steps=6", "log.every=2", "checkpoint.every=2", "run_dir="],
                           dict(reached=last_step, ranks=2)),
    "prepare_latents on two ranks": (["source=four", "labels=none", "shard_size=1", "out="],
                                     dict(reached=shards_done, ranks=2)),
}
ALONE = [name for name in TASKS if "ranks" not in name]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("kills")
    assert Life(partial(world.make, place)).wait(LIMIT).code == 0
    commit()  # which is cached: it must not change while somebody works in the checkout
    return place


@pytest.fixture
def task(place, request) -> Task:
    """A command, with what it leaves undisturbed, as two lives must agree on."""
    (*typed, last), options = TASKS[request.param]
    out, command = place / f"new-{request.param.replace(' ', '-')}", request.param.split()[0]
    task = Task(command, [*typed, last.replace("=", f"={out.name}")], out, **options)
    world.entry_of(command)  # imported once, for all lives
    for _ in range(2):
        shutil.rmtree(task.out, ignore_errors=True)
        began = time.monotonic()
        ended = task.start().wait(LIMIT)
        assert ended.code == 0, ended.printed
        task.wanted = task.wanted or task.content()
        assert not task.differs_in()
    task.seconds = time.monotonic() - began
    task.changes = int((re.search(r"(\d+) changes\n$", ended.printed) or [0, 0])[1])
    return task


# ---- what is tried --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "number"), [
    *((name, signal.SIGKILL) for name in TASKS), ("train", signal.SIGTERM),
], indirect=["task"])  # fmt: skip
def test_a_command_that_is_killed_again_and_again_leaves_the_files_of_an_undisturbed_one(task, number):
    rng = random.Random(f"{SEED} {task.out.name} {number}")
    kills = kills_of_run = 0
    shutil.rmtree(task.out, ignore_errors=True)
    while kills < KILLS or kills_of_run:
        before, spared = task.reached(task.out), kills >= KILLS or kills_of_run >= 60
        if spared or task.ranks > 1 or rng.random() < 0.5:
            life, moment = task.start(), rng.uniform(0, task.seconds)
            tried = f"kill {kills + 1} after {moment:.3f} s"
            time.sleep(0 if spared else moment)
            if task.ranks == 1:
                life.signal(0 if spared else number)
            else:
                for process in [] if spared else rng.choice([life.processes[:1], life.processes[1:], life.processes]):
                    process.kill()
        else:
            at = rng.randint(1, task.changes)
            life, tried = task.start(killing(at, number)), f"kill {kills + 1} at change {at}"
        ended = life.wait(LIMIT)
        assert task.reached(task.out) >= before and not ended.out_of_time, f"{tried}: {ended.printed}"
        if not spared and (ended.code in (-number, 128 + number) or ended.code and task.ranks > 1):
            assert not ended.has_traceback or task.ranks > 1, f"{tried}: {ended.printed}"   # training saves at SIGTERM
            kills, kills_of_run = kills + 1, kills_of_run + 1
            continue
        differs = task.differs_in()
        assert ended.code == 0 and not differs, f"{tried}, after {kills_of_run} others: {differs} {ended.printed}"
        kills_of_run = 0
        shutil.rmtree(task.out, ignore_errors=True)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("task", ALONE, indirect=True)
def test_each_failed_write_ends_in_a_one_line_error_and_the_next_run_leaves_equal_files(task, number):
    """Fails WRITES changes to files, evenly spread and half written; a full disk fails later ones, too."""
    def meet(at: int, change: int, kind: str, half: Callable[[], None]) -> None:
        if change == at:
            half()
        needs_room = kind in ("open", "write", "fsync", "os.mkdir", "os.rename")
        if change == at or (number == errno.ENOSPC and change > at and needs_room):
            raise OSError(number, os.strerror(number))

    for at in range(1, task.changes + 1, max(1, task.changes // WRITES)):
        tried = f"{errno.errorcode[number]} at change {at} of {task.changes}"
        shutil.rmtree(task.out, ignore_errors=True)
        ended = task.start(partial(meet, at)).wait(LIMIT)
        lines = [line for line in ended.printed.splitlines() if line.startswith(f"{task.command}.py: ")]
        failed = ended.code > 0 and len(lines) == 1 and not ended.has_traceback
        differs = [name for name in task.differs_in() if not HALF.search(name)]
        assert failed or (ended.code == 0 and not differs), f"{tried}: {ended.code}, {differs} {ended.printed}"
        again = task.start().wait(LIMIT)
        assert again.code == 0 and not task.differs_in(), f"{tried}, again: {task.differs_in()} {again.printed}"


# ---- compiling ------------------------------------------------------------------------------------------------------

COMPILED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from dit import DiT
from runtime.libraries import compile_blocks
net = DiT(input_size=4, patch_size=2, in_channels=3, hidden_size=16, depth=1, num_heads=2, num_classes=3)
compile_blocks(net, True)
net(torch.randn(2, 3, 4, 4), torch.rand(2), torch.tensor([0, 1])).sum().backward()
"""


def test_a_process_that_is_killed_while_torch_compiles_starts_again(tmp_path):
    rng, cache, kills, half = random.Random(f"{SEED} compile"), tmp_path / "cache", 0, 0

    def unfinished() -> list[Path]:
        return [file for file in cache.glob("*/*.so") if file.exists() and not is_complete(file)]

    def begin() -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-c", COMPILED, str(ROOT)], start_new_session=True, text=True,
                                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    began, life = time.monotonic(), begin()
    assert life.wait() == 0, life.stdout.read()
    seconds = time.monotonic() - began
    shutil.rmtree(cache)
    while kills < min(KILLS, 20):
        life, began, number = begin(), time.monotonic(), rng.choice([signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
        moment, at_link = rng.uniform(0.3, 1) * seconds, rng.random() < 0.5     # importing torch takes the first third
        while life.poll() is None and time.monotonic() - began < moment and not (at_link and unfinished()):
            time.sleep(0.001)
        if life.poll() is None:
            os.killpg(life.pid, number)
            kills += 1
        printed, _ = life.communicate()
        assert life.returncode in (0, 1, -number), printed      # 1: KeyboardInterrupt within the compiler
        half += bool(unfinished())
        if life.returncode == 0 or rng.random() < 0.5:
            life = begin()
            printed, _ = life.communicate()
            assert life.returncode == 0 and not unfinished(), f"after {kills} kills: {printed}"
            assert bool(half) >= ("unfinished files" in printed), printed
            shutil.rmtree(cache)
