"""Kills our commands, fills their disks, takes their folders away, and tells what was lost.

    python scripts/soak.py                                  # 1,000 kills, every write failed in turn, and more: an hour
    python scripts/soak.py kills=20 writes=10 parts=[kills,faults] tasks=[train]     # a sample of it, in a minute

Each life is a forked child that runs a command of ours as it is. What is disturbed is started again by the same
command, and must end in the files of a run that nothing disturbed, bit for bit but for what a clock says. Exits with 1
where anything was lost; the folder is then kept. docs/reliability.md has the figures.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib
import itertools
import json
import mmap
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

os.environ.setdefault("OMP_NUM_THREADS", "1")      # forked children must find no threads
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import numpy as np
import torch
from filelock import FileLock
from pydantic import Field

import edm
import fid
import train
from dit import DiT
from runtime import (
    command,
    files,
    schema,
)
from runtime.command import command, commit
from runtime.device import describe_device, device_name
from runtime.schema import Count, Location, Settings, Whole, one_of
from sampling.generate import sampling_cost
from scripts import faults, forks
from weights import checkpoint as checkpoints

PARTS = ("kills", "faults", "disk", "signals", "clock", "loss", "ranks")
TASKS = ("train", "prepare", "import", "fid")
FAULTS = ("full", "io", "gone")
LIMIT = 300      # seconds of a life; one that takes longer hangs, and counts as lost
CLOCK = {"img_per_sec", "sec_per_step", "peak_memory_gib", "elapsed_s", "seconds", "finished", "run_id",
         "resumed_images"}      # what two equal runs differ in
NAN_STEPS = (1, 3)


class SoakSettings(Settings):
    """configs/soak.yaml."""

    parts: Annotated[list[one_of(PARTS)], Field(min_length=1)]
    tasks: Annotated[list[one_of(TASKS)], Field(min_length=1)]
    seed: Whole
    steps: Annotated[int, Field(ge=4, le=100, multiple_of=4)]
    kills: Whole
    faults: Annotated[list[one_of(FAULTS)], Field(min_length=1)]
    writes: Count | None
    disks: Count
    out: Location


# ---- what is disturbed ----------------------------------------------------------------------------------------------

PHASES = {      # functions in which a life may be hit, and the words for it
    "train": {"resume": "resuming", "tidy_folder": "tidying", "report": "reporting", "draw": "drawing a grid",
              "evaluate": "evaluating", "save": "saving"},
    "checkpoint": {"prune": "pruning", "append_row": "appending a row"},
    "scripts.prepare_latents": {"write_shard": "writing a shard", "finish": "finishing"},
    "scripts.import_latents": {"write_shard": "writing a shard", "finish": "finishing", "probe": "probing"},
    "fid": {"report": "appending a row"},
    "scoring.Kept": {"__init__": "opening features", "save": "keeping features"},
}


@dataclass
class Task:
    """A command, where it writes, and how far it has come, which nothing but progress may change."""

    name: str
    program: str
    config: str
    arguments: tuple[str, ...]
    out: Path
    reach: Callable[[Path], int]
    # Not where several may write to a folder at once: what a kill left of a write or a row stays, and a row that was
    # there already may come once more.
    is_exact: bool = True
    cost: tuple | None = None       # what a drawing costs, once it is known: to count it takes half of a short life

    def call(self) -> None:
        forks.command(self.program, *self.arguments)()


def last_step(run: Path) -> int:
    """Finds the step of the newest checkpoint that is whole; 0: none."""
    for folder in reversed(checkpoints.all_steps(run)):
        if checkpoints.problem(folder) is None:
            return checkpoints.step_of(folder)
    return 0


def shards_done(out: Path) -> int:
    return 10**6 if (out / "metadata.json").is_file() else len(list(out.glob("record-*.json")))


def features_kept(out: Path) -> int:
    return len(list(out.glob("features/*/[!.]*.safetensors")))


def make_tasks(work: Path, steps: int) -> dict[str, Task]:
    """Writes the data that the commands read, and describes them: each is over in a second or two."""
    data, source, reference = work / "data", work / "pairs", work / "reference.npz"
    shapes = ("source=shapes", "resolution=16", "autoencoder=identity", "num_workers=1")
    ended = [forks.run(forks.command("scripts.prepare_latents", *shapes, "shapes.count=64", f"out={data}")),
             forks.run(forks.command("fid", f"reference_from={data}", f"out={reference}", "features=pixels",
                                     "reference_images=8"))]
    if any(end.code for end in ended):
        raise ValueError(f"The soak could not make its data: {ended[0].said}{ended[-1].said}")
    rng = np.random.default_rng(0)
    for part in ("features", "labels"):
        (source / f"imagenet256_{part}").mkdir(parents=True)
    for index in range(24):
        np.save(source / f"imagenet256_features/{index}.npy", rng.standard_normal((1, 4, 8, 8)).astype(np.float32))
        np.save(source / f"imagenet256_labels/{index}.npy", np.array([index % 3]))
    np.savez(work / "images.npz", arr_0=rng.integers(0, 256, (40, 16, 16, 3), np.uint8))

    outs = {name: work / name / "out" for name in TASKS}
    return {task.name: task for task in (
        Task("train", "train", "config", (
            "experiment=quickstart", f"run_dir={outs['train']}", f"data.path={data}", "batch_size=8", f"steps={steps}",
            "model.hidden_size=32", "model.num_heads=2", "model.depth=3", "optimizer.warmup_steps=2",
            "model.routes=[{start_layer_idx: 1, end_layer_idx: 1, selection_ratio: 0.5}]", "log.every=2", "cpu=true",
            "checkpoint.every=2", "checkpoint.keep_last=1", "checkpoint.keep_every=4", "samples.every=4",
            "samples.seeds=0-3", "samples.num_steps=1", "samples.batch_size=4", "evaluate.every=4",
            f"evaluate.reference={reference}", "evaluate.metrics=[fd_pixels]", "evaluate.num_samples=4",
            "evaluate.num_steps=1", "evaluate.batch_size=4",
        ), outs["train"], last_step),
        Task("prepare", "scripts.prepare_latents", "prepare_latents", (
            *shapes, "shapes.count=60", "shard_size=16", "batch_size=8", "mirror=true", f"out={outs['prepare']}",
        ), outs["prepare"], shards_done),
        Task("import", "scripts.import_latents", "import_latents", (
            f"source={source}", "shard_size=8", f"out={outs['import']}",
        ), outs["import"], shards_done),
        Task("fid", "fid", "fid", (
            f"images={work / 'images.npz'}", f"reference={reference}", "features=pixels", "keep_features=true",
            "batch_size=8", f"results={outs['fid'] / 'results.jsonl'}", "cpu=true",
        ), outs["fid"], features_kept, is_exact=False),
    )}


# ---- one life -------------------------------------------------------------------------------------------------------


class Told:
    """What a child tells its parent, in memory that outlives a kill: its phase, and phase and reach when it was hit."""

    def __init__(self, entered: Callable[[str], None] = lambda phase: None):
        self.shared, self.entered = mmap.mmap(-1, 128), entered      # which is called in the child

    def set(self, place: int, text: str) -> None:
        self.shared[place * 32 : place * 32 + 32] = text.encode()[:32].ljust(32, b"\0")

    def get(self, place: int) -> str:
        return self.shared[place * 32 : place * 32 + 32].rstrip(b"\0").decode()

    @property
    def phase(self) -> str:
        return self.get(0)

    @property
    def reached(self) -> int:
        return int(self.get(1) or 0)

    def mark(self, reached: str, phase: str) -> None:
        """Notes how far a command has come, and its phase, at the moment at which it is disturbed."""
        self.set(1, reached)
        self.set(3, phase)

    @property
    def hit(self) -> str:
        return self.get(3)

    @property
    def changes(self) -> int:
        return int(self.get(2) or 0)

    def enter(self, phase: str) -> None:
        self.set(0, phase)
        self.entered(phase)

    def telling(self, function: Callable, phase: str) -> Callable:
        """Wraps a function so that the phase is told while it is at work."""
        @functools.wraps(function)
        def told(*arguments, **keywords):
            before = self.phase
            self.enter(phase)
            try:
                return function(*arguments, **keywords)
            finally:
                self.set(0, before)
        return told

    def listen(self) -> None:
        """Wraps, in the child, all that has a phase."""
        self.set(0, "starting")
        for place, names in PHASES.items():
            module, _, kind = place.partition(".Kept")
            owner = importlib.import_module(module)
            owner = owner.Kept if place.endswith(".Kept") else owner
            for name, phase in names.items():
                setattr(owner, name, self.telling(getattr(owner, name), phase))
        step = train.train_step

        def stepping(*arguments, **keywords):
            self.enter("stepping")
            return step(*arguments, **keywords)
        train.train_step = stepping


def begin(task: Task, told: Told, *meddle: Callable[[], None], meet: faults.Meet | None = None) -> forks.Life:
    """Begins a life of a task's command; each of `meddle` is called in the child first, and `meet` before changes."""
    def meets(number: int, kind: str, half: Callable[[], None]) -> None:
        told.set(2, str(number))
        if meet is not None:
            meet(number, kind, half)

    def work() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)      # PR_SET_PDEATHSIG: a soak that is killed leaves no one behind
        signal.signal(signal.SIGINT, signal.default_int_handler)      # which a soak in the background ignores
        told.listen()
        if task.cost is not None:
            fid.sampling_cost = lambda *_, **__: task.cost
        for change in meddle:
            change()
        faults.Changes(task.out, meets)
        task.call()
    return forks.Life(work)


def live(task: Task, *meddle: Callable[[], None], meet: faults.Meet | None = None) -> tuple[forks.Ended, Told]:
    told = Told()
    return begin(task, told, *meddle, meet=meet).wait(LIMIT), told


def plain(value: object) -> object:
    """Drops from what a record says what depends on the clock."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items() if key not in CLOCK}
    return [plain(part) for part in value] if isinstance(value, list) else value


def content(task: Task) -> dict[str, str]:
    """Hashes every file that a command has left, but for lock, logs of ranks, and what the clock says in records."""
    found = {}
    for file in sorted(task.out.rglob("*")):
        is_told = file.name == ".lock" or file.parent.name == "logs"      # a rank's log tells each of its lives
        if not file.is_file() or is_told or (file.name.endswith(".tmp") and not task.is_exact):
            continue
        data = file.read_bytes()
        with contextlib.suppress(ValueError):
            if file.suffix == ".json":
                data = json.dumps(plain(json.loads(data))).encode()
            elif file.suffix == ".jsonl":
                rows = map(json.loads, data.splitlines()) if task.is_exact else files.read_rows(file)
                rows = [json.dumps(plain(row)) for row in rows]
                data = "\n".join(rows if task.is_exact else dict.fromkeys(rows)).encode()
        found[str(file.relative_to(task.out))] = hashlib.sha256(data).hexdigest()
    return found


def differing(task: Task, wanted: dict[str, str], unswept: bool = False) -> str | None:
    """Names the files in which a finished run is not what an undisturbed one is, or None.

    With `unswept` it may have left what could not be removed, under names that do not count, to the next start.
    """
    got = content(task)
    if unswept:
        got = {name: digest for name, digest in got.items() if not re.search(r"(^|/)\.[^/]*\.tmp(/|$)", name)}
    names = [name for name in {**wanted, **got} if wanted.get(name) != got.get(name)]
    how = {name: "missing" if name not in got else "different" if name in wanted else "left over" for name in names}
    return ", ".join(f"{name} is {how[name]}" for name in names) or None


def clear(task: Task) -> None:
    for folder in (task.out, Path(f"{task.out}.gone")):
        shutil.rmtree(folder, ignore_errors=True)


def is_a_sentence(task: Task, ended: forks.Ended) -> bool:
    """Tells whether a life has ended in one sentence of its program's and a status that says so."""
    program = f"{task.program.replace('.', '/').rpartition('/')[2]}.py: "
    said = [line for line in ended.said.splitlines() if line.startswith(program)]
    return (ended.code > 0 and len(said) == 1 and not ended.out_of_time and not ended.has_traceback
            and "Exception ignored" not in ended.said)


# ---- what is tried --------------------------------------------------------------------------------------------------


@dataclass
class Soak:
    """What is known of the commands undisturbed, and what has been lost."""

    cfg: SoakSettings
    work: Path
    tasks: dict[str, Task]
    wanted: dict[str, dict[str, str]] = field(default_factory=dict)      # content by task
    seconds: dict[str, float] = field(default_factory=dict)
    changes: dict[str, int] = field(default_factory=dict)
    lost: list[dict] = field(default_factory=list)
    part: str = ""

    def look(self, task: Task) -> None:
        """Runs a command undisturbed, twice, as what follows is worth nothing where these two differ."""
        for _ in range(2):
            clear(task)
            ended, told = live(task)
            if ended.code:
                raise ValueError(f"{task.name} does not even end undisturbed: {ended.said}")
            first = self.wanted.setdefault(task.name, content(task))
            if (why := differing(task, first)) is not None:
                raise ValueError(f"Two undisturbed runs of {task.name} differ: {why}.")
            drawn = [row["source"] for row in files.read_rows(task.out / "results.jsonl")]
            if drawn and "multiply_adds" in drawn[0]:
                task.cost = drawn[0]["evaluations"], *drawn[0]["multiply_adds"].values()
            self.seconds[task.name], self.changes[task.name] = ended.seconds, told.changes

    def lose(self, task: Task, tried: str, why: str, said: str = "") -> None:
        """Counts a loss and keeps what is there of it for a look."""
        kept = self.work / "lost" / f"{len(self.lost):04d}"
        if len(self.lost) < 20 and task.out.exists():
            shutil.copytree(task.out, kept, dirs_exist_ok=True)
        self.lost.append({"part": self.part, "task": task.name, "tried": tried, "why": why, "folder": str(kept),
                          "said": said[-2000:]})
        print(f"LOST, {task.name}, {tried}: {why}\n{said[-1500:]}", file=sys.stderr)

    def mend(
        self, task: Task, tried: str, reached: int, *meddle: Callable[[], None], wanted: dict[str, str] | None = None,
    ) -> bool:
        """Runs the same command once more, undisturbed, and tells whether all is as if nothing had happened."""
        if (now := task.reach(task.out)) < reached:
            self.lose(task, tried, f"it had come to {reached} and has {now}")
            return False
        ended, _ = live(task, *meddle)
        why = f"the same command then ended with {ended.code}" if ended.code else differing(
            task, wanted or self.wanted[task.name])
        if why is not None:
            self.lose(task, tried, why, ended.said)
        return why is None


def kill(soak: Soak, task: Task, count: int, rng: random.Random, note: Callable[[dict], None]) -> dict:
    """Kills lives of a command `count` times, half of them at any moment and half at a change to a file.

    Notes what is known after each run, so that a soak that is stopped has counted.
    """
    def found() -> dict:
        return {"kills": kills, "by_phase": dict(phases.most_common()), "runs_finished": finished, "runs_equal": equal}

    phases, finished, equal, kills = Counter(), 0, 0, 0
    clear(task)
    kills_of_run = 0
    while kills < count or kills_of_run:
        before, told = task.reach(task.out), Told()
        spared = kills >= count or kills_of_run >= 60
        if spared or rng.random() < 0.5:
            life, moment = begin(task, told), rng.uniform(0, soak.seconds[task.name])
            tried = f"kill {kills + 1} after {moment:.3f} s"
            if not spared:
                time.sleep(max(0.0, life.began + moment - time.monotonic()))
                life.signal(signal.SIGKILL)
        else:
            at = rng.randint(1, soak.changes[task.name])
            tried = f"kill {kills + 1} at change {at}"
            life = begin(task, told, meet=faults.sending(at, signal.SIGKILL))
        ended = life.wait(LIMIT)
        if ended.code == -signal.SIGKILL and not ended.out_of_time:
            kills, kills_of_run = kills + 1, kills_of_run + 1
            phases[told.phase or "starting"] += 1
            if (now := task.reach(task.out)) < before:
                soak.lose(task, tried, f"it had come to {before} and has {now}")
            continue
        finished += 1
        why = (f"it ended with {ended.code}" + " after the limit" * ended.out_of_time if ended.code
               else differing(task, soak.wanted[task.name]))
        if why is None:
            equal += 1
        else:
            soak.lose(task, tried, f"after {kills_of_run} kills: {why}", ended.said)
        clear(task)
        kills_of_run = 0
        note(found())
    return found()


def fail(soak: Soak, task: Task, fault: str) -> dict:
    """Fails each change to a file of an undisturbed life in turn."""
    told = Told()
    counts = Counter()
    total = soak.changes[task.name]
    for at in range(1, min(total, soak.cfg.writes or total) + 1):
        clear(task)
        told.mark("0", "")
        meet = faults.failing(task.out, at, fault, lambda: told.mark(str(task.reach(task.out)), told.phase))
        ended = begin(task, told, meet=meet).wait(LIMIT)
        tried = f"{fault} at change {at} of {total}, {told.hit}"
        whole = differing(task, soak.wanted[task.name], unswept=True) is None
        if (gone := Path(f"{task.out}.gone")).exists():      # the disk is back, and hides what was written meanwhile
            shutil.rmtree(task.out, ignore_errors=True)
            os.rename(gone, task.out)
        if is_a_sentence(task, ended):
            counts["ended_in_a_sentence"] += 1
        elif ended.code == 0 and (whole or differing(task, soak.wanted[task.name]) is None):
            counts["went_on"] += 1
        else:
            soak.lose(task, tried, f"it ended with {ended.code} and without its one sentence", ended.said)
        counts["equal_afterwards"] += soak.mend(task, tried, told.reached)
        counts["tried"] += 1
    return {"changes": total, **counts}


def fill_disks(soak: Soak, task: Task) -> dict:
    """Runs a command on disks of many sizes, the largest of which is nearly enough, and then gives it room."""
    counts, place = Counter(), task.out.parent
    ctypes.CDLL(None).unshare(0x20000)      # CLONE_NEWNS: what is mounted from here on goes with this process
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    clear(task)
    live(task)
    needed = int(subprocess.run(["du", "-sk", str(task.out)], capture_output=True, text=True).stdout.split()[0])
    for number in range(soak.cfg.disks):
        size = max(4, needed * (number + 1) // soak.cfg.disks)
        clear(task)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(place)], check=True)
        try:
            ended, _ = live(task)
            tried = f"a disk of {size} KiB"
            if is_a_sentence(task, ended):
                counts["ended_in_a_sentence"] += 1
            elif ended.code == 0 and differing(task, soak.wanted[task.name]) is None:
                counts["had_room"] += 1
            else:
                soak.lose(task, tried, f"it ended with {ended.code} and without its one sentence", ended.said)
            reached = task.reach(task.out)
            subprocess.run(["mount", "-o", "remount,size=256m", str(place)], check=True)
            counts["equal_afterwards"] += soak.mend(task, tried, reached)
            counts["tried"] += 1
        finally:
            subprocess.run(["umount", "--lazy", str(place)], check=False)
    return dict(counts)


def signalled(task: Task, number: int, place: str | int) -> tuple[forks.Ended, Told]:
    """Lives until a signal comes: where a phase is first entered, or before a change to a file."""
    told = Told()

    def send(phase: str) -> None:
        if phase == place and not told.hit:
            told.mark("0", phase)
            os.kill(os.getpid(), number)

    if isinstance(place, str):
        told.entered = send
        return begin(task, told).wait(LIMIT), told
    meet = faults.sending(place, number, lambda: told.mark("0", told.phase))
    return begin(task, told, meet=meet).wait(LIMIT), told


def interrupt(soak: Soak, task: Task, number: signal.Signals) -> dict:
    """Sends SIGTERM or SIGINT where each phase is first entered, and before changes to files all over a life."""
    phases, equal = Counter(), 0
    changes = range(1, soak.changes[task.name] + 1, max(1, soak.changes[task.name] // 12))
    names = ["stepping", *sorted({phase for of_place in PHASES.values() for phase in of_place.values()})]
    for place in (*names, *changes):
        clear(task)
        ended, told = signalled(task, number, place)
        if not told.hit:      # a phase of another task
            continue
        phases[told.hit] += 1
        tried = f"{number.name} at {place}, {told.hit}"
        if task.name == "train":
            good = ended.code == 128 + number and f"Stopped by {number.name} at step" in ended.said
            good = good or (ended.code == 0 and differing(task, soak.wanted[task.name]) is None)
        elif number == signal.SIGINT:
            good = ended.code == 130 and is_a_sentence(task, ended)
        else:
            good = ended.code == -number      # nothing waits for it: what is whole stays, as after a kill
        if not good or ended.has_traceback:
            soak.lose(task, tried, f"it ended with {ended.code}, otherwise than it should", ended.said)
        equal += soak.mend(task, tried, task.reach(task.out))
    return {"tried": phases.total(), "equal_afterwards": equal, "by_phase": dict(phases)}


def jumping(clock: str) -> Callable[[], None]:
    """Makes what bends a child's clocks: all of them, though the system bends the wall's alone."""
    def bend() -> None:
        rng, offset = random.Random(clock), [0.0]

        def bent(read: Callable[[], float], unit: float) -> Callable[[], float]:
            first = read()

            def now() -> float:
                if clock == "stands":
                    return first
                offset[0] += {"back": -30.0, "forward": 3600.0, "jumps": rng.uniform(-1e5, 1e5)}[clock]
                return type(first)(read() + offset[0] * unit)
            return now
        for name, unit in (("time", 1), ("time_ns", 1e9), ("perf_counter", 1)):
            setattr(time, name, bent(getattr(time, name), unit))
    return bend


def bend_clocks(soak: Soak, task: Task) -> dict:
    """Runs a command, and kills and resumes it, under clocks that go back, ahead, anywhere, or stand."""
    counts = Counter()
    for clock in ("back", "forward", "jumps", "stands"):
        for at in (None, soak.changes[task.name] // 2, soak.changes[task.name] * 3 // 4):
            clear(task)
            tried = f"a clock that goes {clock}" + f", killed at change {at}" * (at is not None)
            if at is not None:
                live(task, jumping(clock), meet=faults.sending(at, signal.SIGKILL))
            counts["equal"] += soak.mend(task, tried, 0, jumping(clock))
            counts["tried"] += 1
    return dict(counts)


def spoil_losses() -> None:
    """Makes the losses of some steps of a child's training NaN."""
    loss, spoilt = edm.EDM.loss, {train.step_seed(0, step, 0) for step in NAN_STEPS}

    def spoiling(self, *arguments, **keywords):
        return loss(self, *arguments, **keywords) * (torch.nan if torch.initial_seed() in spoilt else 1)
    edm.EDM.loss = spoiling


def meet_nan(soak: Soak, task: Task, rng: random.Random) -> dict:
    """Trains through steps whose loss is NaN: they are skipped and counted, and a kill between them changes nothing."""
    counts = Counter()
    clear(task)
    ended, _ = live(task, spoil_losses)
    rows = files.read_rows(task.out / "metrics.jsonl")
    skipped = rows[-1]["skipped"] if rows else None
    whole = checkpoints.load(checkpoints.latest(task.out), "ema") if last_step(task.out) else {}
    finite = bool(whole) and all(bool(tensor.isfinite().all()) for tensor in whole.values())
    if ended.code or skipped != len(NAN_STEPS) or not finite:
        soak.lose(task, "a NaN loss", f"it ended with {ended.code}, {skipped} steps counted, weights finite: {finite}",
                  ended.said)
    wanted = content(task)
    for _ in range(20):
        clear(task)
        at = rng.randint(soak.changes[task.name] // 4, soak.changes[task.name])
        live(task, spoil_losses, meet=faults.sending(at, signal.SIGKILL))
        counts["equal"] += soak.mend(task, f"a NaN loss and a kill at change {at}", task.reach(task.out), spoil_losses,
                                     wanted=wanted)
        counts["tried"] += 1
    return {"steps_skipped": skipped, **counts}


def lose_ranks(soak: Soak, task: Task) -> dict:
    """Trains on two ranks by torchrun, kills one of them, and goes on."""
    counts, wanted = Counter(), None
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", "localhost:0", "train.py", *task.arguments]

    def start() -> subprocess.Popen:
        return subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    for victim in (None, 0, 1, 1, 0):
        clear(task)
        tried = f"rank {victim} of 2 killed"
        if victim is not None:
            process = start()
            wait_for = random.Random(counts["tried"]).choice((2, 4, 6))
            deadline = time.monotonic() + LIMIT
            while last_step(task.out) < wait_for and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                with contextlib.suppress(OSError):
                    if f"RANK={victim}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                        os.kill(int(pid), signal.SIGKILL)
            said = process.communicate(timeout=LIMIT)[0]
            counts["tried"] += 1
            if process.returncode == 0:
                counts["finished_before"] += 1
            elif not last_step(task.out):
                soak.lose(task, tried, "no checkpoint is whole", said)
        process = start()
        said = process.communicate(timeout=LIMIT)[0]
        if wanted is None:
            wanted = content(task)
        code = process.returncode
        why = f"the same command then ended with {code}" if code else differing(task, wanted)
        if why is not None:
            soak.lose(task, tried, why, said)
        elif victim is not None:
            counts["equal_afterwards"] += 1
    return dict(counts)


# ---- entry ----------------------------------------------------------------------------------------------------------


def warm(tasks: dict[str, Task]) -> None:
    """Imports and composes here, once, what every life would do for itself."""
    with torch.device("meta"):
        net = DiT(input_size=16, patch_size=4, in_channels=3, hidden_size=32, depth=1, num_heads=2, num_classes=6)
    sampling_cost(net, edm.EDM(), 1)
    commit()
    compose = schema.compose
    composed, argv = {}, sys.argv
    for task in tasks.values():
        sys.argv = [task.program, *task.arguments]
        importlib.import_module(task.program)
        composed[task.config, task.arguments] = compose(task.config)
    sys.argv = argv
    schema.compose = lambda config: composed.get((config, tuple(sys.argv[1:]))) or compose(config)


def attempt(soak: Soak, task: Task, out: Path) -> None:
    """Tries one part on a task, if it is for it, and puts what was found into the record at `out`."""
    cfg, part, name = soak.cfg, soak.part, task.name
    shares = {name: 2 if name == "train" else 1 for name in cfg.tasks}
    rng = random.Random(f"{cfg.seed} {part} {name}")
    tried: dict[str, Callable[[], dict]] = {}
    match part:
        case "kills":
            count = -(-cfg.kills * shares[name] // sum(shares.values()))
            tried[part] = lambda: kill(soak, task, count, rng, note)
        case "faults":
            tried = {fault: functools.partial(fail, soak, task, fault) for fault in cfg.faults}
        case "disk":
            tried[part] = lambda: fill_disks(soak, task)
        case "signals":
            numbers = (signal.SIGTERM, signal.SIGINT)
            tried = {number.name: functools.partial(interrupt, soak, task, number) for number in numbers}
        case "clock":
            tried[part] = lambda: bend_clocks(soak, task)
        case "loss" if name == "train":
            tried[part] = lambda: meet_nan(soak, task, rng)
        case "ranks" if name == "train":
            tried[part] = lambda: lose_ranks(soak, task)

    def note(found: dict) -> dict:
        found = {
            "lost": len(soak.lost) - lost, **found, "seconds": round(time.monotonic() - began), "seed": cfg.seed,
            "steps": cfg.steps, "commit": commit(), **describe_device(torch.device("cpu")),
            "device_name": device_name(torch.device("cpu")),
            "command": " ".join(["python scripts/soak.py", *sys.argv[1:]]),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }
        with FileLock(f"{out}.lock"):      # of soaks that run side by side
            record = json.loads(out.read_text()) if out.is_file() else {}
            record.setdefault(part, {}).setdefault(name, {})[what] = found | (
                {"losses": soak.lost[lost:]} if soak.lost[lost:] else {})
            files.write_text(out, json.dumps(record, indent=1) + "\n")
        return found

    for what, work in tried.items():
        began, lost = time.monotonic(), len(soak.lost)
        print(f"{part}, {name}: {what}: {json.dumps(note(work()))}", flush=True)


@command("soak", SoakSettings)
def main(cfg: SoakSettings) -> None:
    if "disk" in cfg.parts and os.geteuid():
        raise ValueError("parts: disk mounts a small file system, which root alone may: leave it out of parts=.")
    out = Path(cfg.out).resolve()
    place = out.with_suffix("")
    for left in place.glob("[0-9]*"):      # of soaks that were killed
        if not Path("/proc", left.name).exists() and not (left / "lost").exists():
            files.remove(left)
    work = place / str(os.getpid())
    tasks = make_tasks(work, cfg.steps)
    chosen = {name: tasks[name] for name in TASKS if name in cfg.tasks}
    warm(chosen)
    for task in chosen.values():
        task.out.parent.mkdir()
    soak = Soak(cfg, work, tasks)
    for task in chosen.values():
        soak.look(task)
        print(f"{task.name}: {soak.seconds[task.name]:.2f} s and {soak.changes[task.name]} changes to files a life")

    for part, task in itertools.product(cfg.parts, chosen.values()):
        soak.part = part
        attempt(soak, task, out)
    print(f"lost: {len(soak.lost)}. {out}")
    if soak.lost:
        sys.exit(f"soak.py: {len(soak.lost)} losses; what is left of them is in {work}.")
    files.remove(work)


if __name__ == "__main__":
    main()
