"""Commands in processes of their own that pay for no imports: children of one process that has imported them already.

They are killed, stopped, timed out and started as ranks like any other. Only tests that start Python show what an
import does. The parent of a `Command` is a server without threads; that of a `Life` is the test's process, which must
not have started threads.
"""

import builtins
import contextlib
import io
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver, get_context
from pathlib import Path

import pytest
from conftest import PATIENCE, ROOT

PRELOADED = ("train", "sample", "fid", "scripts.prepare_latents", "forked")


def live(program: str, arguments: tuple[str, ...], env: dict, output: list[str], file_size: int | None) -> None:
    """Becomes `python <program> <arguments>` in a session of its own, whose files may have up to `file_size` bytes."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(env)
    for number, path in enumerate([os.devnull, *output]):
        file = os.open(path, os.O_RDWR | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    if program == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(arguments[0], {"__name__": "__main__"})
    else:
        sys.argv = [program, *arguments]
        runpy.run_path(program, run_name="__main__")


class Command:
    """A command that runs, with what it has of subprocess.Popen; `pid` is its group too."""

    def __init__(self, program: str, *arguments: str, file_size: int | None = None, ranks: int = 1, **env: str):
        self.folder = tempfile.TemporaryDirectory(prefix="forked-")
        self.output = [Path(self.folder.name, name) for name in ("stdout", "stderr")]
        for path in self.output:
            path.touch()
        start_server()
        self.processes = [
            get_context("forkserver").Process(target=live, daemon=True, args=(
                program, tuple(map(str, arguments)), {**os.environ, **env, **rank}, [*map(str, self.output)],
                file_size))
            for rank in ranks_of(ranks)]
        for process in self.processes:
            process.start()
        self.pid = self.processes[0].pid
        while self.processes[0].exitcode is None and not is_leader(self.pid):  # before that, signals would miss it
            time.sleep(0.001)

    @property
    def returncode(self) -> int | None:
        """None while any rank runs; the first failure else."""
        codes = [process.exitcode for process in self.processes]
        return None if None in codes else next(filter(None, codes), 0)

    poll = returncode.fget

    def wait(self) -> int:
        """Waits for the end, and prints what the command printed, as one does that inherits the streams."""
        print(*self.communicate(), sep="")
        return self.returncode

    def communicate(self, timeout: float = PATIENCE) -> tuple[str, str]:
        """Waits for the end of all ranks, which the first that fails brings, as with torchrun; returns what was
        printed.
        """
        deadline, failed = time.monotonic() + timeout, None
        while self.poll() is None:
            if failed is None and any(process.exitcode for process in self.processes):
                failed = time.monotonic()
            if time.monotonic() > min(deadline, (failed or deadline) + 1):  # torchrun looks now and then
                for process in self.processes:
                    process.kill()
            assert time.monotonic() < deadline + 10, "the command did not end"
            time.sleep(0.005)
        printed = [path.read_text() for path in self.output]
        assert time.monotonic() < deadline, printed
        self.folder.cleanup()
        return printed[0], printed[1]


def is_leader(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid) == pid
    return False


def start_server() -> None:
    """Starts the process that is forked, which imports from the project whatever the current folder is."""
    forkserver.set_forkserver_preload([*PRELOADED])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}", prepend=os.pathsep)
        forkserver.ensure_running()


def ranks_of(count: int) -> list[dict[str, str]]:
    """The environment that torchrun sets for each of `count` ranks on one machine; none for a single one."""
    if count == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
             "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)} for rank in range(count)]


def run(program: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    """Runs a command as `subprocess.run` does, with its output as text."""
    process = Command(program, *arguments, **options)
    stdout, stderr = process.communicate()
    return subprocess.CompletedProcess([program, *arguments], process.returncode, stdout, stderr)


@dataclass(frozen=True)
class Ended:
    """How a life ended: its exit status, negative for a signal, what it printed, and whether its time ran out."""

    code: int
    printed: str
    seconds: float
    out_of_time: bool

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.printed


class Life:
    """A forked child of this process that does `work` in a process group of its own; it prints into a file."""

    def __init__(self, work: Callable[[], None]):
        self.began, self.output = time.monotonic(), tempfile.TemporaryFile()      # noqa: SIM115 (closed by wait)
        self.process = get_context("fork").Process(target=self.live, args=(work,))
        self.process.start()
        self.pid = self.process.pid
        with contextlib.suppress(OSError):  # the child may have done it, and may even be gone
            os.setpgid(self.pid, self.pid)

    def live(self, work: Callable[[], None]) -> None:
        os.setpgid(0, 0)
        for number in (1, 2):
            os.dup2(self.output.fileno(), number)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(1), "w", buffering=1) for _ in range(2))
        work()

    def signal(self, number: int) -> None:
        """Sends a signal to the child and to all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def wait(self, seconds: float) -> Ended:
        """Waits for the end; after `seconds` it is killed."""
        self.process.join(max(0, self.began + seconds - time.monotonic()))
        out_of_time = self.process.is_alive()
        self.signal(signal.SIGKILL)  # what it has started, too
        self.process.join()
        self.output.seek(0)
        with self.output:
            printed = self.output.read().decode(errors="replace")
        return Ended(self.process.exitcode, printed, time.monotonic() - self.began, out_of_time)


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
