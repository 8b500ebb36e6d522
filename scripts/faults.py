"""The calls by which a process changes files, one after the other: told, counted, and failed or killed on demand.

For `soak.py`. Python's own calls are heard by an audit hook, and what has none is replaced: writing itself, and fsync.
Call it in a forked child only: an audit hook cannot be taken away.
"""

import builtins
import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
GROWING = ("open", "write", "fsync", "os.mkdir", "os.rename")      # what a full disk refuses; it lets files be removed
Meet = Callable[[int, str, Callable[[], None]], None]      # number, kind, what writes half where it is a write


class Changes:
    """Calls `meet` before each change to a file or folder at or below `folder`, in the order of the process."""

    def __init__(self, folder: Path, meet: Meet):
        self.folder, self.meet, self.number, self.quiet = str(folder), meet, 0, False
        self.open, self.fsync = io.open, os.fsync
        builtins.open = io.open = self.opened
        os.fsync = self.synced
        sys.addaudithook(self.heard)

    def concerns(self, path: object, descriptor: int = -1) -> bool:
        if isinstance(path, int):
            return False
        path = os.fsdecode(os.fspath(path))
        if descriptor >= 0:      # what it is relative to, as in rmtree
            path = os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), path)
        path = os.path.abspath(path)
        return path == self.folder or path.startswith(self.folder + os.sep)

    def happens(self, kind: str, half: Callable[[], None] = lambda: None) -> None:
        if not self.quiet:
            self.number += 1
            self.quiet = True      # what is done to meet it is no change of the command's
            try:
                self.meet(self.number, kind, half)
            finally:
                self.quiet = False

    def heard(self, event: str, arguments: tuple) -> None:
        if self.quiet:
            return
        paths = {"open": 1, "os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.rename": 2}.get(event, 0)
        if event == "open" and not arguments[2] & WRITING:
            paths = 0
        descriptor = arguments[-1] if event in ("os.mkdir", "os.remove", "os.rmdir") else -1
        if any(self.concerns(path, descriptor) for path in arguments[:paths]):
            self.happens(event)

    def opened(self, file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
        """Opens as `open` does; what is written below the folder is told, as the system gets it."""
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
    """A file whose writes are told before they reach the system."""

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        self.changes.happens("write", lambda: super(Written, self).write(view[: len(view) // 2]) and None)
        return super().write(view)


def failing(folder: Path, at: int, fault: str, begun: Callable[[], None] = lambda: None) -> Meet:
    """Fails change number `at`: `full` that and every later one that needs room, `io` that one, half written.

    At `gone` the folder is renamed to `<folder>.gone` just before, as if its disk had been taken away. Calls `begun`
    before anything has failed.
    """
    def meet(number: int, kind: str, half: Callable[[], None]) -> None:
        if number == at:
            begun()
            if fault == "gone":
                if folder.exists():
                    os.rename(folder, f"{folder}.gone")
                return
            half()
        if number == at or (fault == "full" and number > at and kind in GROWING):
            number = {"full": errno.ENOSPC, "io": errno.EIO}[fault]
            raise OSError(number, os.strerror(number))
    return meet


def sending(at: int, signal_number: int, begun: Callable[[], None] = lambda: None) -> Meet:
    """Sends this process a signal before change number `at`; a write is half done by then where the signal kills."""
    def meet(number: int, kind: str, half: Callable[[], None]) -> None:
        if number == at:
            begun()
            if signal_number == signal.SIGKILL:
                half()
            os.kill(os.getpid(), signal_number)
    return meet
