"""Work and commands in processes of their own that pay for no imports: children of one that has imported them already.

They are killed, stopped, timed out and started as ranks like any other. Only tests that start Python show what an
import does. A command's parent is a server without threads; that of other work is the test's process, which must not
have started threads.
"""

import builtins
import contextlib
import io
import itertools
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver, get_context
from pathlib import Path

import pytest
from conftest import PATIENCE, ROOT

ports = itertools.count(10_000 + os.getpid() % 200 * 100)  # connections get higher ones, so none takes a rank's
PRELOADED = ("train", "sample", "fid", "scripts.prepare_latents", "forked")


@dataclass(frozen=True)
class Ended:
    """How a life ended: its exit status, negative for a signal, what it printed, and whether its time ran out."""

    code: int
    stdout: str
    stderr: str
    out_of_time: bool

    @property
    def printed(self) -> str:
        return self.stderr + self.stdout

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.printed


class Life:
    """Processes that do `work` in sessions of their own, one in each of `environments`, and print into two files."""

    def __init__(self, work: Callable[[], None], *environments: Mapping[str, str], start_method: str = "fork"):
        self.began, self.folder = time.monotonic(), tempfile.TemporaryDirectory(prefix="forked-")
        self.output = [Path(self.folder.name, name) for name in ("stdout", "stderr")]
        for path in self.output:
            path.touch()
        self.processes = [
            get_context(start_method).Process(target=live, args=(work, {**os.environ, **env}, self.output), daemon=True)
            for env in environments or [{}]]
        for process in self.processes:
            process.start()
        self.pid = self.processes[0].pid
        while not all(map(has_session, self.processes)):  # before that, signals would miss it
            time.sleep(0.001)

    @property
    def returncode(self) -> int | None:
        """None while any rank runs; the first failure else."""
        codes = [process.exitcode for process in self.processes]
        return None if None in codes else next(filter(None, codes), 0)

    def signal(self, number: int) -> None:
        """Sends a signal to the processes and to all that they have started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def wait(self, seconds: float = PATIENCE) -> Ended:
        """Waits for the end of all ranks, which the first that fails brings, or the end of the time; kills the rest."""
        end, failed = self.began + seconds, False
        while self.returncode is None and time.monotonic() < end:
            if not failed and any(process.exitcode for process in self.processes):
                end, failed = time.monotonic() + 1, True  # torchrun looks now and then
            time.sleep(0.002)
        out_of_time = self.returncode is None and not failed
        self.signal(signal.SIGKILL)  # what they have started, too
        for process in self.processes:
            process.join()
        stdout, stderr = (path.read_text(errors="replace") for path in self.output)
        self.folder.cleanup()
        return Ended(self.returncode, stdout, stderr, out_of_time)


def live(work: Callable[[], None], env: dict[str, str], output: list[Path]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    for number, path in enumerate(output, 1):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    work()


def has_session(process) -> bool:
    """True once a child leads the session of its own, or has ended."""
    with contextlib.suppress(ProcessLookupError):
        return process.exitcode is not None or os.getsid(process.pid) == process.pid
    return True


# ---- commands -------------------------------------------------------------------------------------------------------


def become(program: str, arguments: list[str]) -> None:
    """Does what `python <program> <arguments>` does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(ROOT)
    if program == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(arguments[0], {"__name__": "__main__"})
    else:
        sys.argv = [program, *arguments]
        runpy.run_path(program, run_name="__main__")


def ranks_of(count: int) -> list[dict[str, str]]:
    """The environment that torchrun sets for each of `count` ranks on one machine; none for a single one."""
    if count == 1:
        return [{}]
    port = next(ports)
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
             "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)} for rank in range(count)]


def start(program: str, *arguments: object, ranks: int = 1, **env: str) -> Life:
    """Starts `python <program> <arguments>`, which imports from the project whatever the current folder is."""
    forkserver.set_forkserver_preload([*PRELOADED])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}", prepend=os.pathsep)
        forkserver.ensure_running()
    work = partial(become, program, [*map(str, arguments)])
    return Life(work, *({**env, **rank} for rank in ranks_of(ranks)), start_method="forkserver")


def run(program: str, *arguments: object, **options) -> subprocess.CompletedProcess:
    """Runs a command as `subprocess.run` does, with its output as text."""
    ended = start(program, *arguments, **options).wait()
    return subprocess.CompletedProcess(program, ended.code, ended.stdout, ended.stderr)


# ---- the changes that a process makes to files, one after the other -------------------------------------------------


class Changes:
    """Calls `meet(number, kind, half)` before each change to a file or folder at or below `folder`.

    An audit hook hears Python's own calls; writing and fsync, which it does not hear, are replaced. What a library
    writes by itself is heard as it opens the file, if at all. For a forked child: an audit hook cannot be taken away.
    """

    def __init__(self, folder: Path, meet: Callable):
        self.folder, self.meet, self.number, self.is_quiet = str(folder), meet, 0, False
        self.open, self.fsync = io.open, os.fsync
        builtins.open = io.open = self.opened
        os.fsync = self.synced
        sys.addaudithook(self.heard)

    def concerns(self, path: object, descriptor: int = -1) -> bool:
        if isinstance(path, int):
            return False
        path = os.fsdecode(os.fspath(path))
        if descriptor >= 0:  # what it is relative to, as in rmtree
            path = os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), path)
        return os.path.abspath(path).startswith(self.folder)

    def happens(self, kind: str, half: Callable[[], None] = lambda: None) -> None:
        if not self.is_quiet:
            self.number, self.is_quiet = self.number + 1, True  # what is done to meet it is no change of its own
            try:
                self.meet(self.number, kind, half)
            finally:
                self.is_quiet = False

    def heard(self, event: str, arguments: tuple) -> None:
        paths = {"open": 1, "os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.rename": 2}.get(event, 0)
        if self.is_quiet or not paths:
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
            return
        descriptor = arguments[-1] if event in ("os.mkdir", "os.remove", "os.rmdir") else -1
        if any(self.concerns(path, descriptor) for path in arguments[:paths]):
            self.happens(event)

    def opened(self, file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
        """Opens as `open` does; what is written below the folder is heard as the system gets it."""
        if opener is not None or not set(mode) & set("wax+") or not self.concerns(file):
            return self.open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = Written(file, mode.replace("b", "").replace("t", ""))
        raw.changes = self
        if buffering == 0:
            return raw
        buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    def synced(self, descriptor: int) -> None:
        if self.concerns(os.readlink(f"/proc/self/fd/{descriptor}")):
            self.happens("fsync")
        self.fsync(descriptor)


class Written(io.FileIO):
    """A file whose writes are heard before they reach the system."""

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        self.changes.happens("write", lambda: super(Written, self).write(view[: len(view) // 2]) and None)
        return super().write(view)


def killing(at: int, number: int) -> Callable:
    """Sends this process a signal at a change to a file, in the middle of it where it is a write and SIGKILL."""
    def meet(change: int, kind: str, half: Callable[[], None]) -> None:
        if change == at:
            if number == signal.SIGKILL:
                half()
            os.kill(os.getpid(), number)
    return meet
