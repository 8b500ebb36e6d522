"""Lives of a command as forked children of one process that has imported it: each saves the seconds of its imports.

For `soak.py`, which kills them, and for `fuzz.py`, which feeds them nonsense within limits of time and memory. The
parent must not have run anything on several threads: set OMP_NUM_THREADS=1 before torch is imported.
"""

import contextlib
import importlib
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PAGE = resource.getpagesize()


@dataclass(frozen=True)
class Ended:
    """How a life ended: its exit status, negative for a signal, what it printed, and whether its time ran out."""

    code: int
    said: str
    seconds: float
    out_of_time: bool = False

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.said


def command(program: str, *arguments: str) -> Callable[[], None]:
    """Returns what calls `main` of a program of ours, as "train" or "scripts.sample", with a command line."""
    module = importlib.import_module(program)

    def call() -> None:
        sys.argv = [f"{program.replace('.', '/')}.py", *arguments]
        module.main()
    return call


@dataclass
class Life:
    """A forked child that does `work` in a process group of its own; it prints into a file."""

    work: Callable[[], None]
    memory: int | None = None        # bytes that it may add to the address space it begins with
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.output = tempfile.TemporaryFile()      # noqa: SIM115 (closed by wait)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                code = self.live()
            finally:      # or a second copy of the parent would go on
                os._exit(code)
        with contextlib.suppress(OSError):      # the child may have done it, and may even be gone
            os.setpgid(self.pid, self.pid)

    def live(self) -> int:
        """Does the work in the child and returns the exit status that Python would have given."""
        code = 1
        try:
            os.setpgid(0, 0)
            os.dup2(self.output.fileno(), 1)
            os.dup2(self.output.fileno(), 2)
            # As Python has them: half a character that cannot be said on stderr is written out.
            sys.stdout, sys.stderr = (os.fdopen(os.dup(1), "w", buffering=1, errors=errors)
                                      for errors in ("strict", "backslashreplace"))
            if self.memory is not None:
                size = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
                resource.setrlimit(resource.RLIMIT_AS, (size + self.memory,) * 2)
            self.work()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
            if isinstance(stop.code, str):
                sys.stderr.write(stop.code + "\n")
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
        return code

    def signal(self, number: int) -> None:
        """Sends a signal to the child and to all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def wait(self, seconds: float | None = None) -> Ended:
        """Waits for the end; after `seconds` it is killed. Says how it ended."""
        deadline = None if seconds is None else self.began + seconds
        out_of_time, pause = False, 0.001
        while (ended := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            if deadline is not None and time.monotonic() > deadline and not out_of_time:
                out_of_time = True
                self.signal(signal.SIGKILL)
            time.sleep(pause)
            pause = min(0.02, pause * 1.5)
        self.signal(signal.SIGKILL)      # what it has left behind
        self.output.seek(0)
        with self.output:
            said = self.output.read().decode(errors="replace")
        return Ended(os.waitstatus_to_exitcode(ended[1]), said, time.monotonic() - self.began, out_of_time)


def run(work: Callable[[], None], seconds: float | None = None, memory: int | None = None) -> Ended:
    """Does `work` in a forked child within `seconds` and with at most `memory` more bytes."""
    return Life(work, memory).wait(seconds)
