"""Feeds every reader of files and settings with nonsense by the thousand, and counts how each case ends.

    python scripts/fuzz.py out=runs/fuzz cases=10000                           # exits with 1 where one ends badly
    python scripts/fuzz.py out=runs/fuzz "readers=[latent_folder,image_zip]"
    python scripts/fuzz.py again=runs/fuzz/cases/image_zip-00012               # one case that was kept, once more

A case ends well in success or in one sentence with an exit status that is not 0, within `seconds` and `memory` GiB,
and changes nothing that was there. hypothesis (requirements-dev.txt) draws the cases. A forked child builds and runs
one after the other; where one does not come back, the child is ended and the next case gets a new one.
"""

import contextlib
import hashlib
import importlib
import io
import json
import os
import platform
import shlex
import shutil
import socket
import stat
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")      # before torch: a process with threads cannot be forked
from runtime.command import command, commit, is_full_memory, mistake
from runtime.files import write_text
from runtime.schema import Count, Location, Positive, Settings, Whole
from scripts import forks

__path__ = [str(ROOT / "scripts" / "fuzz")]      # scripts.fuzz.files and others lie there
MODULES = ("files", "commands", "records")       # each has READERS, a list
GOOD = ("success", "sentence")
BAD = {
    "accepted": "nonsense was taken for data",
    "traceback": "an exception that is no sentence",
    "unclear": "no sentence of ours: without an end, over 2,000 characters, or a library's words alone",
    "crash": "the process was ended by a signal",
    "time": "more seconds than allowed",
    "memory": "more memory than allowed",
    "changed": "something that was there has changed, or was written outside of out/",
}
LONGEST = 2000      # characters of a sentence
TIRED = 2**28       # bytes of address space by which a child may have grown when the next case begins


class Accepted(Exception):
    """Nonsense was taken for data; raised by a reader's `run` where it can tell."""


@dataclass(frozen=True)
class Reader:
    """What is fuzzed: one reader of ours, the cases for it, and how one is built and run.

    A case is of plain values that JSON holds. `build` writes its files below an empty folder; `run` does what the
    command does with them in that folder, and may write below out/ there alone. Both take the case and the folder.
    """

    name: str
    cases: Any                                      # a strategy of hypothesis
    build: Callable[[Any, Path], None]
    run: Callable[[Any, Path], None]
    config: str = "config"                          # of the command, for the words of its mistakes
    may_write: tuple[str, ...] = ("out",)           # below the folder; a file of such a name may be new, at any place
    prepare: Callable[[], object] = dict            # makes what all cases share, once and without limits


class FuzzSettings(Settings):
    """configs/fuzz.yaml."""

    out: Location | None
    cases: Count
    readers: list[str] | None
    seed: Whole
    seconds: Positive
    memory: Positive
    again: Location | None


def all_readers() -> dict[str, Reader]:
    found = {}
    for module in MODULES:
        if (Path(__path__[0]) / f"{module}.py").is_file():
            for reader in importlib.import_module(f"scripts.fuzz.{module}").READERS:
                assert reader.name not in found, reader.name
                found[reader.name] = reader
    return found


def drawn(cases: Any, count: int, seed: int) -> list:
    """Draws `count` cases of a strategy, the same ones for a seed; fewer where there are no more."""
    import hypothesis

    found = []

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=count, database=None, deadline=None, phases=[hypothesis.Phase.generate],
                         suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(cases)
    def collect(case: Any) -> None:
        found.append(case)

    collect()
    return found[:count]


# ---- one case, in this process --------------------------------------------------------------------------------------


def snapshot(folder: Path, may_write: tuple[str, ...]) -> dict[str, tuple]:
    """Returns what lies below a folder, but for what may be written: kind, size and content of each."""
    found = {}
    for parent, folders, files in os.walk(os.fsencode(folder)):
        folders[:] = [name for name in folders if os.fsdecode(name) not in may_write]
        for name in (*folders, *files):
            if os.fsdecode(name) in may_write:
                continue
            path = os.path.join(parent, name)
            seen = os.lstat(path)
            content: Any = None
            if stat.S_ISLNK(seen.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(seen.st_mode):
                content = (seen.st_size, seen.st_mtime_ns)
                if seen.st_size < 2**20 and os.access(path, os.R_OK):
                    with open(path, "rb") as file:
                        content += (hashlib.sha256(file.read()).digest(),)
            found[os.fsdecode(path)] = (stat.S_IFMT(seen.st_mode), content)
    return found


def is_ours(error: BaseException) -> bool:
    """Tells whether an error was raised by a line of this project, and not by a library's alone."""
    raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return raised.is_relative_to(ROOT) and "site-packages" not in raised.parts


def ending(reader: Reader, case: Any, folder: Path) -> tuple[str, str]:
    """Runs a case whose files are there; returns how it ended and what it said."""
    try:
        reader.run(case, folder)
        return "success", ""
    except Accepted as error:
        return "accepted", str(error)
    except SystemExit as stop:
        if stop.code in (None, 0):
            return "success", ""
        outcome, said = "sentence", stop.code if isinstance(stop.code, str) else f"exit status {stop.code}"
        if "memory is full" in said:
            outcome = "memory"
        elif isinstance(stop.__context__, ValueError) and not is_ours(stop.__context__):
            outcome = "unclear"
    except Exception as error:
        said = mistake(error, reader.config, {})
        if is_full_memory(error):
            outcome = "memory"
        elif said is None:
            return "traceback", traceback.format_exc()
        else:
            outcome = "sentence" if isinstance(error, OSError) or is_ours(error) else "unclear"
        if outcome != "sentence":
            said = f"{said}\n{traceback.format_exc()}"
    if outcome == "sentence" and (not said.rstrip().endswith(".") or len(said) > LONGEST):
        outcome = "unclear"
    return outcome, said


def try_case(reader: Reader, case: Any, folder: Path) -> tuple[str, str]:
    """Builds and runs a case in a folder, and compares what was there before and after."""
    inside = folder / "files"
    inside.mkdir(parents=True)
    reader.build(case, inside)
    before = snapshot(inside, reader.may_write)
    printed = io.StringIO()
    with contextlib.chdir(inside), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        outcome, said = ending(reader, case, inside)
    after = snapshot(inside, reader.may_write)
    if outcome in GOOD and before != after:
        changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        outcome, said = "changed", f"{changed[:5]} {said}"
    return outcome, said or printed.getvalue()[-500:]


def remove(folder: Path) -> None:
    """Removes a case's folder, whatever permissions it has set."""
    for parent, folders, _ in os.walk(os.fsencode(folder)):
        for name in folders:
            if not os.path.islink(path := os.path.join(parent, name)):
                os.chmod(path, 0o700)
    shutil.rmtree(os.fsencode(folder))


# ---- one after the other, in a child --------------------------------------------------------------------------------


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * forks.PAGE


class Child:
    """A forked child that runs cases as they are sent; where one does not come back, the next gets a new child."""

    def __init__(self, readers: dict[str, Reader], seconds: float, memory: int):
        self.readers, self.seconds, self.memory = readers, seconds, memory
        self.life = None

    def serve(self, channel: socket.socket) -> None:
        began = address_space()
        with channel, channel.makefile("rw", encoding="ascii") as lines:
            for line in lines:
                name, case, folder = json.loads(line)
                try:
                    outcome, said = try_case(self.readers[name], case, Path(folder))
                except BaseException:      # of the harness itself
                    outcome, said = "broken", traceback.format_exc()
                grown = address_space() - began
                print(json.dumps([outcome, said, grown > TIRED]), file=lines, flush=True)

    def begin(self) -> None:
        self.channel, theirs = socket.socketpair()

        def work() -> None:
            self.channel.close()
            self.serve(theirs)

        self.life = forks.Life(work, self.memory)
        theirs.close()
        self.lines = self.channel.makefile("rw", encoding="ascii")

    def end(self) -> forks.Ended | None:
        """Ends the child, if there is one, and says how it ended."""
        if self.life is None:
            return None
        with contextlib.suppress(OSError):
            self.lines.close()
        self.channel.close()
        ended, self.life = self.life.wait(self.seconds), None
        return ended

    def run(self, name: str, case: Any, folder: Path) -> tuple[str, str]:
        """Runs a case; one that lacks memory in a child that has served others is run again in a new one."""
        is_new = self.life is None
        if is_new:
            self.begin()
        print(json.dumps([name, case, str(folder)]), file=self.lines, flush=True)
        self.channel.settimeout(self.seconds)
        try:
            reply = self.lines.readline()
        except TimeoutError:
            self.life.signal(9)
            ended = self.end()
            return "time", f"not ended after {self.seconds:g} s\n{ended.said[-2000:]}"
        if not reply:
            ended = self.end()
            return "crash", f"ended with {ended.code}\n{ended.said[-2000:]}"
        outcome, said, is_tired = json.loads(reply)
        said = said.encode(errors="backslashreplace").decode()      # half characters, which no file may hold
        if is_tired or outcome == "memory":
            self.end()
        if outcome == "memory" and not is_new:
            remove(folder)
            return self.run(name, case, folder)
        if outcome == "broken":
            raise RuntimeError(f"{name} could not build or run {json.dumps(case)}\n{said}")
        return outcome, said


# ---- all of them ----------------------------------------------------------------------------------------------------


def fuzz(readers: dict[str, Reader], cases: int, seed: int, out: Path, seconds: float, memory: float) -> dict:
    """Runs `cases` over the readers evenly, keeps what ends badly in out/cases; writes and returns the counts."""
    began, code, child = time.monotonic(), commit(), Child(readers, seconds, int(memory * 2**30))
    counts: dict[str, Counter] = {}
    slowest, failures, sentences, found = (0.0, ""), [], {}, {}
    for place, (name, reader) in enumerate(readers.items()):
        counts[name] = Counter()
        reader.prepare()
        share = cases // len(readers) + (place < cases % len(readers))
        for number, case in enumerate(drawn(reader.cases, share, seed) if share else ()):
            folder = out / "cases" / f"{name}-{number:05d}"
            started = time.monotonic()
            outcome, said = child.run(name, case, folder)
            slowest = max(slowest, (round(time.monotonic() - started, 2), folder.name))
            counts[name][outcome] += 1
            if outcome in GOOD:
                remove(folder)
                if outcome == "sentence":
                    sentences.setdefault(said.replace(str(folder), "…")[:300], folder.name)
                continue
            again = shlex.join(["python", "scripts/fuzz.py", f"again={folder}"])
            write_text(folder / "case.json", json.dumps({"reader": name, "case": case}))
            write_text(folder / "said.txt", f"{outcome}: {BAD[outcome]}\n{again}\n{said}\n")
            failures.append({"outcome": outcome, "said": (said.strip().splitlines() or [""])[-1][:300], "again": again})
            print(f"{outcome}: {failures[-1]['said']}\n  {again}")
        print(f"{name}: " + ", ".join(f"{count:,} {outcome}" for outcome, count in counts[name].most_common()))
        total = sum(counts.values(), Counter())
        found = {
            "command": shlex.join(["python", "scripts/fuzz.py", *sys.argv[1:]]), "cases": total.total(), "seed": seed,
            "outcomes": {key: total[key] for key in (*GOOD, *BAD)},
            "readers": {name: dict(count) for name, count in counts.items()}, "slowest_case": list(slowest),
            "limits": {"seconds": seconds, "memory_gib": memory}, "seconds": round(time.monotonic() - began),
            "commit": code, "versions": versions(), "failures": failures,
        }
        write_text(out / "fuzz.json", json.dumps(found, indent=1) + "\n")      # after each: a run may be stopped
        write_text(out / "sentences.txt", "".join(f"{where}: {said}\n" for said, where in sorted(sentences.items())))
    child.end()
    return found


def versions() -> dict[str, str]:
    """Names the versions of what reads the files."""
    from importlib.metadata import version

    packages = ("hypothesis", "numpy", "torch", "pillow", "pydantic", "safetensors", "lmdb")
    return {"python": platform.python_version(), **{name: version(name) for name in packages},
            "system": f"{platform.system()} {platform.machine()}"}


@contextlib.contextmanager
def kept_case(folder: Path, readers: dict[str, Reader]) -> Iterator[tuple[str, Any, Path]]:
    """Reads case.json of a folder that was kept; the case is built anew in a folder beside it, which goes."""
    try:
        kept = json.loads((folder / "case.json").read_text())
        name, case = kept["reader"], kept["case"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"again={folder}: case.json names no reader and case ({error}).") from None
    if name not in readers:
        raise ValueError(f"again={folder}: there is no reader {name}; they are {', '.join(readers)}.")
    anew = folder.with_name(f".{folder.name}.again")
    if anew.exists():
        remove(anew)
    try:
        yield name, case, anew
    finally:
        remove(anew)


@command("fuzz", FuzzSettings)
def main(cfg: FuzzSettings) -> None:
    readers = all_readers()
    if cfg.again is not None:
        with kept_case(Path(cfg.again).absolute(), readers) as (name, case, folder):
            readers[name].prepare()
            child = Child(readers, cfg.seconds, int(cfg.memory * 2**30))
            outcome, said = child.run(name, case, folder)
            child.end()
        print(f"{outcome}: {said}")
        sys.exit(outcome not in GOOD)
    if cfg.out is None:
        raise ValueError("out must be given, as in out=runs/fuzz; configs/fuzz.yaml has all options.")
    if unknown := sorted({*(cfg.readers or [])} - {*readers}):
        raise ValueError(f"readers={unknown[0]} is not known; there are {', '.join(readers)}.")
    out = Path(cfg.out).absolute()
    if (out / "cases").exists():
        raise ValueError(f"out={out} holds the cases of another run: name another, or remove it.")
    chosen = {name: reader for name, reader in readers.items() if not cfg.readers or name in cfg.readers}
    found = fuzz(chosen, cfg.cases, cfg.seed, out, cfg.seconds, cfg.memory)
    print(f"{found['cases']:,} cases in {found['seconds']:,} s: "
          + ", ".join(f"{count:,} {outcome}" for outcome, count in found["outcomes"].items() if count))
    sys.exit(bool(found["failures"]))


if __name__ == "__main__":
    importlib.import_module("scripts.fuzz").main()      # by the name that the readers import
