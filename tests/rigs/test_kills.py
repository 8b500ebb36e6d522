"""Kills our commands and fails their writes: started again, each leaves the files of an undisturbed one.

    python -m pytest -m rig tests/rigs/test_kills.py                                 # some minutes
    RIG_KILLS=250 RIG_SEED=1 python -m pytest -m rig tests/rigs/test_kills.py        # so many kills of each command
    RIG_WRITES=10 python -m pytest -m rig tests/rigs/test_kills.py -k train          # ten failed writes, not all

A life is a forked child that runs a command as it is. All files must be equal bit for bit, except for clock times.
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
from forked import Changes, Command, Ended, Life, killing

from latents import writer
from runtime import files
from runtime.command import commit
from runtime.libraries import is_complete
from weights import checkpoint as checkpoints

pytestmark = [pytest.mark.rig, pytest.mark.timeout(0)]
KILLS, SEED = int(os.environ.get("RIG_KILLS", 20)), int(os.environ.get("RIG_SEED", 0))
WRITES = int(os.environ.get("RIG_WRITES", 10**6))
TASKS = ("train", "prepare_latents", "import_latents", "fid", "sample npz", "sample pngs")
LIMIT = 300  # seconds of a life; one that takes longer hangs
CLOCK = {"img_per_sec", "sec_per_step", "peak_memory_gib", "elapsed_s", "seconds", "finished", "run_id",
         "resumed_images"}  # what two equal runs differ in

# ---- a command, and what it leaves ----------------------------------------------------------------------------------


def last_step(run: Path) -> int:
    """Returns the step of the newest complete checkpoint, or 0."""
    complete = [checkpoints.step_of(path) for path in checkpoints.all_steps(run) if not checkpoints.problem(path)]
    return max(complete, default=0)


@dataclass
class Task:
    """A command, where it writes, and how far it has come, which may only grow."""

    command: str
    typed: list[str]
    out: Path
    reached: Callable[[Path], int]
    # Not where several may write at once: a kill may leave a hidden half, or half a row, and a row may come twice.
    is_exact: bool = True
    seconds: float = 0.0
    changes: int = 0
    wanted: dict[str, str] | None = None  # what an undisturbed life leaves

    def __call__(self) -> None:
        world.run(self.out.parent, self.command, self.typed)

    def content(self) -> dict[str, str]:
        """Hashes every file that the command has left except the lock, ignoring values from the clock."""
        hashes = {}
        for file in sorted(self.out.rglob("*")):
            name = str(file.relative_to(self.out))
            is_half = re.search(r"(^|/)\.[^/]*\.tmp(/|$)", name) is not None and not self.is_exact
            is_lock = ".lock" in (file.suffix, file.name)
            if not file.is_file() or is_lock or file.parent.name == "logs" or is_half:
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

    def clear(self) -> None:
        """Removes what the command has left."""
        shutil.rmtree(self.out, ignore_errors=True)


def plain(value: object) -> object:
    """Drops the keys of a record that depend on the clock."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items() if key not in CLOCK}
    return [plain(part) for part in value] if isinstance(value, list) else value


def start(task: Task, meet: Callable | None = None, *meddle: Callable[[], None]) -> Life:
    """Begins a life of a command; `meet` is called before each change to a file, each of `meddle` at the beginning."""
    def live() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the rig
        for change in meddle:
            change()
        changes = Changes(task.out, meet or (lambda number, kind, half: None))
        task()
        print(f"{changes.number} changes")
    return Life(live)


def is_a_sentence(task: Task, ended: Ended) -> bool:
    """Tells whether a life has failed with one sentence of its program."""
    sentences = [line for line in ended.printed.splitlines() if line.startswith(f"{task.command}.py: ")]
    return ended.code > 0 and len(sentences) == 1 and not ended.out_of_time and not ended.has_traceback


def shards_done(out: Path) -> int:
    return 10**6 if (out / "metadata.json").is_file() else len(list(out.glob("record-*.json")))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> dict[str, Task]:
    """The commands, of a second or two each, with what they leave undisturbed."""
    place = tmp_path_factory.mktemp("kills")
    assert Life(partial(world.make, place)).wait(LIMIT).code == 0
    made = {name: Task(name.partition(" ")[0], typed, place / f"new-{name.replace(' ', '-')}", reached, name != "fid")
            for name, typed, reached in (
        ("train", ["run_dir=new-train", "steps=4", "log.every=2", "checkpoint.every=2", "checkpoint.keep_last=1",
                   "checkpoint.keep_every=4", "samples.every=4", "samples.seeds=0-3", "samples.num_steps=1",
                   "evaluate.every=4", "evaluate.reference=images.npz",
                   "evaluate.num_samples=4", "evaluate.num_steps=1"], last_step),
        ("prepare_latents", ["source=shapes", "shapes.count=60", "shard_size=16", "batch_size=8", "mirror=true",
                             "out=new-prepare_latents"], shards_done),
        ("import_latents", ["shard_size=1", "out=new-import_latents"], shards_done),
        ("fid", ["images=images.npz", "batch_size=1", "results=new-fid/results.jsonl"], lambda out: 0),
        ("sample npz", ["seeds=0-7", "num_steps=1", "batch_size=2", "out=new-sample-npz/x.npz"], lambda out: 0),
        ("sample pngs", ["seeds=0-7", "num_steps=1", "batch_size=2", "out=new-sample-pngs/set"], lambda out: 0))}
    commit()  # which is cached: it must not change while somebody works in the checkout
    for name, task in made.items():
        world.entry_of(task.command)  # imported once, for all lives
        for _ in range(2):  # two undisturbed lives must agree
            task.clear()
            ended = start(task).wait(LIMIT)
            assert ended.code == 0, ended.printed
            task.wanted = task.wanted or task.content()
            assert not task.differs_in(), name
        task.seconds, task.changes = ended.seconds, int(re.search(r"(\d+) changes\n$", ended.printed)[1])
        print(f"{name}: {task.seconds:.1f} s and {task.changes} changes to files a life")
    return made


# ---- faults ---------------------------------------------------------------------------------------------------------


def failing(at: int, number: int) -> Callable:
    """Fails a change to a file, half written; a full disk fails all later ones that need room, too."""
    def meet(change: int, kind: str, half: Callable[[], None]) -> None:
        if change == at:
            half()
        needs_room = kind in ("open", "write", "fsync", "os.mkdir", "os.rename")
        if change == at or (number == errno.ENOSPC and change > at and needs_room):
            raise OSError(number, os.strerror(number))
    return meet


# ---- what is tried --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "number"), [
    *((name, signal.SIGKILL) for name in TASKS), ("train", signal.SIGTERM),
])  # fmt: skip
def test_a_command_that_is_killed_again_and_again_leaves_the_files_of_an_undisturbed_one(tasks, name, number):
    task, rng = tasks[name], random.Random(f"{SEED} {name} {number}")
    kills = runs = kills_of_run = 0
    task.clear()
    while kills < KILLS or kills_of_run:
        before = task.reached(task.out)
        spared = kills >= KILLS or kills_of_run >= 60
        if spared or rng.random() < 0.5:
            life, moment = start(task), rng.uniform(0, task.seconds)
            tried = f"kill {kills + 1} after {moment:.3f} s"
            if not spared:
                time.sleep(max(0.0, life.began + moment - time.monotonic()))
                life.signal(number)
        else:
            at = rng.randint(1, task.changes)
            life, tried = start(task, killing(at, number)), f"kill {kills + 1} at change {at}"
        ended = life.wait(LIMIT)
        assert task.reached(task.out) >= before and not ended.has_traceback, f"{tried}: {ended.printed}"
        if ended.code in (-number, 128 + number) and not ended.out_of_time:  # training saves at SIGTERM
            kills, kills_of_run = kills + 1, kills_of_run + 1
            continue
        differs = task.differs_in()
        assert ended.code == 0 and not differs, f"{tried}, after {kills_of_run} others: {differs} {ended.printed}"
        runs, kills_of_run = runs + 1, 0
        task.clear()
    print(f"{name}: {kills} times {signal.Signals(number).name}, {runs} runs finished, all equal")


def check_mended(task: Task, ended: Ended, tried: str) -> bool:
    """Checks that a life with a fault ended in a sentence or with equal files, and that the next one succeeds."""
    differs = [name for name in task.differs_in() if not re.search(r"(^|/)\.[^/]*\.tmp(/|$)", name)]
    failed = is_a_sentence(task, ended)
    assert failed or (ended.code == 0 and not differs), f"{tried}: {ended.code}, {differs} {ended.printed}"
    again = start(task).wait(LIMIT)
    assert again.code == 0 and not task.differs_in(), f"{tried}, again: {task.differs_in()} {again.printed}"
    return failed


def fail_each_write(task: Task, number: int, most: int, *meddle: Callable[[], None]) -> None:
    """Fails at least `most` changes to files, evenly spread, or all of them, each in a life of its own."""
    sentences, tried = 0, range(1, task.changes + 1, max(1, task.changes // most))
    for at in tried:
        task.clear()
        ended = start(task, failing(at, number), *meddle).wait(LIMIT)
        sentences += check_mended(task, ended, f"{errno.errorcode[number]} at change {at} of {task.changes}")
    fault = errno.errorcode[number]
    print(f"{task.command}: {fault} at {len(tried)} changes, {sentences} sentences, the next life equal")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("name", TASKS)
def test_each_failed_write_ends_in_a_one_line_error_and_the_next_run_leaves_equal_files(tasks, name, number):
    fail_each_write(tasks[name], number, WRITES)


def test_the_rig_finds_a_command_whose_files_can_be_halved(tasks):
    @contextlib.contextmanager
    def in_place(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path

    def write_in_place() -> None:
        files.atomic_write = writer.atomic_write = in_place

    with pytest.raises(AssertionError, match="ENOSPC at change"):
        fail_each_write(tasks["import_latents"], errno.ENOSPC, 10**6, write_in_place)


# ---- two ranks ------------------------------------------------------------------------------------------------------


def test_two_ranks_of_which_one_or_both_are_killed_leave_the_files_of_undisturbed_ones(tmp_path):
    assert Life(partial(world.make, tmp_path)).wait(LIMIT).code == 0
    kinds = {"train": (["train.py", *settings_of("train", tmp_path, "data.path=latents", "steps=6", "batch_size=6",
                                                  "log.every=2", "checkpoint.every=2")], last_step),
             "prepare": (["scripts/prepare_latents.py", f"source={tmp_path / 'four'}", "labels=none", "resolution=8",
                          "autoencoder=identity", "shard_size=1", f"out={tmp_path / 'new-prepare'}"], shards_done)}
    rng = random.Random(f"{SEED} two ranks")
    for name, (typed, reached) in kinds.items():
        task = Task(name, typed, tmp_path / f"new-{name}", reached)

        def begin(typed=typed) -> Command:
            return Command(str(ROOT / typed[0]), *typed[1:], ranks=2)

        began, life = time.monotonic(), begin()
        life.communicate()
        assert life.returncode == 0
        task.wanted, seconds, kills, ended = task.content(), time.monotonic() - began, 0, 0
        task.clear()
        while kills < KILLS or not ended:
            life, before = begin(), reached(task.out)
            if kills < KILLS:
                time.sleep(rng.uniform(0, seconds))
                for process in rng.choice([life.processes[:1], life.processes[1:], life.processes]):
                    process.kill()
                kills += 1
            printed = "".join(life.communicate())
            assert reached(task.out) >= before, printed
            if ended := life.returncode == 0:
                assert not task.differs_in(), f"after {kills} kills: {task.differs_in()} {printed}"
                task.clear()
        print(f"{name} on two ranks: {kills} kills, all equal in the end")


def settings_of(command: str, place: Path, *typed: str) -> list[str]:
    """The settings with which a command works in the folder, with absolute paths."""
    keys = {setting.partition("=")[0] for setting in typed}
    every = [*typed, *(one for one in world.WORKING[command] if one.partition("=")[0] not in keys)]
    places = {"data.path": place / "latents", "run_dir": place / f"new-{command}"}
    return [f"{key}={places.get(key, value)}" for key, _, value in (one.partition("=") for one in every)]


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
    print(f"compiling: {kills} kills, {half} of them left an unfinished library")
