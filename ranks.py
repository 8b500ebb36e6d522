"""What the ranks of a command know of one another: the main one's word, a stop agreed on, and who is gone or hangs.

A thread in each rank tells a store every few seconds that the process lives and what its main thread is doing. The
store is the one by which the ranks have met: the launcher's, or the first rank's. The first rank watches all others and
they watch it, so that a rank that dies, stops or hangs ends all of them in one sentence, and no collective has to time
out first. The thread touches no device and never waits for the main thread. One rank alone starts nothing.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast

LOST = 75      # the exit code of ranks that end because another is gone or hangs: EX_TEMPFAIL of sysexits.h


@dataclass(frozen=True)
class Limits:
    """Seconds after which ranks give one another up."""

    beat: float = 5                 # between two signs of life
    silent: float = 45              # without one: the process is gone or stopped, or its machine is lost
    suspect: float = 12             # the same once a connection between ranks has broken
    still: float = 50               # in which no rank's main thread moves, while all are in a step of training …
    steps: float = 10               # … or so many times the longest step, where that is more
    long: float = 1800              # in which none moves in all else: first steps, indexing, drawing, scoring, saving
    collective: float = 6 * 3600    # that a collective may take: the second net, and more than any file's indexing


LIMITS = Limits()


# ---- what the main rank says, and a stop ----------------------------------------------------------------------------


def main_rank_says(state: Accelerator | PartialState, number: int) -> int:
    """Gives every rank the main one's number; one rank alone touches no device for it."""
    if state.num_processes == 1:
        return int(number)
    return int(broadcast(torch.tensor(int(number), device=state.device)))


class StopRequest:
    """Turns the first SIGTERM, SIGINT or SIGUSR1 into a request that the loop honours; a second one ends the process.

    Several ranks must leave at the same step. Every few steps each says in the background whether it was told to stop,
    over a process group on the CPUs, and reads the answer to the time before: nothing waits, neither host nor device.
    """

    EVERY = 10     # steps; launchers give a run 30 s between SIGTERM and SIGKILL
    SIGNALS = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler,
               signal.SIGUSR1: signal.SIG_DFL}      # the last is Slurm's, some minutes before a job's time is up

    def __init__(self):
        self.signal, self.group, self.asked = 0, None, None
        for number in self.SIGNALS:
            signal.signal(number, self.receive)

    def receive(self, number: int, frame: object) -> None:
        self.signal = number
        for each, before in self.SIGNALS.items():
            signal.signal(each, before)

    def agreed(self, step: int, world: int) -> int:
        """Returns the signal on which all ranks leave at this step, or 0. Every rank calls it at every step."""
        if world == 1:
            return self.signal
        if step % self.EVERY:
            return 0
        answer = 0
        if self.asked is not None:
            votes, work = self.asked
            work.wait()
            answer = int(votes)
        self.group = self.group or dist.new_group(backend="gloo")
        votes = torch.tensor(self.signal)
        work = dist.all_reduce(votes, dist.ReduceOp.MAX, self.group, async_op=True)
        self.asked = votes, work
        return answer


# ---- what the main thread is doing ----------------------------------------------------------------------------------


@dataclass
class Doing:
    """What the main thread has said of itself."""

    work: str = "starting"
    step: int | None = None
    marks: int = 0                  # how often it has said something: alike on ranks that are at the same point
    longest_step: float = 0.0       # s; of the steps past the first, which compiles
    began: float = 0.0              # when the step began
    first: bool = True

    def at(self, work: str, step: int | None = None) -> None:
        now = time.monotonic()
        if work == self.work == "training" and step != self.step:
            if not self.first:
                self.longest_step = max(self.longest_step, now - self.began)
            self.first = False
        self.work, self.began, self.marks = work, now, self.marks + 1
        self.step = self.step if step is None else step


doing = Doing()


def begin() -> None:
    """Begins a command, of which a process may run several."""
    global doing
    doing = Doing()


def at(step: int) -> None:
    """Notes that a step of training begins."""
    doing.at("training", step)


@contextlib.contextmanager
def working(work: str) -> Iterator[None]:
    """Notes what is done instead of training; it may take as long as the longer limit allows."""
    before = doing.work
    doing.at(work)
    yield
    doing.at(before)


# Where a main thread waits for the others: on GPUs, a sum that is read waits for the device, and that for them.
WAITS = ("_engine_run_backward", "agreed", "over_ranks")
HOME = str(Path(__file__).parent)


def look_at(frame: FrameType | None) -> dict[str, Any]:
    """Says where a thread stands, whether it waits there for other ranks, and a number that tells if it has moved."""
    waits = frame is not None and (frame.f_code.co_name in WAITS or "torch/distributed" in frame.f_code.co_filename)
    places, points = [], []
    while frame:
        file = frame.f_code.co_filename
        points.append((id(frame.f_code), frame.f_lasti))
        if not places or (len(places) == 1 and file.startswith(HOME) and "site-packages" not in file):
            places.append(f"{Path(file).name}:{frame.f_lineno} ({frame.f_code.co_name})")
        frame = frame.f_back
    return {"waits": waits, "place": " under ".join(places), "stack": hash(tuple(points))}


# ---- the watch ------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """The last that was seen of a rank, and when its beat and its main thread were last seen to have moved."""

    beat: dict[str, Any] = field(default_factory=dict)
    heard: float = 0.0
    moved: float = 0.0

    def update(self, beat: dict[str, Any], now: float) -> None:
        def progress(of: dict) -> list:
            return [of.get(key) for key in ("marks", "stack")]

        if beat.get("beat") != self.beat.get("beat"):
            self.heard = now
        if progress(beat) != progress(self.beat):
            self.moved = now
        self.beat = beat


class Watch:
    """One rank's eye on the others. `look` is all that it does each time, and `watch` has a thread call it."""

    def __init__(
        self, rank: int, world: int, connect: Callable[[], dist.Store], limits: Limits,
        clock: Callable[[], float] = time.monotonic, end: Callable[[str, int], None] | None = None,
    ):
        self.rank, self.world, self.connect, self.limits, self.clock = rank, world, connect, limits, clock
        self.end = end or leave_at_once
        self.store, self.store_seen, self.count = connect(), clock(), 0
        self.left, self.woken, self.suspects, self.said = threading.Event(), threading.Event(), False, False
        others = range(1, world) if rank == 0 else (0,)
        self.seen = {other: Seen(heard=clock(), moved=clock()) for other in (rank, *others)}
        self.looked = clock()
        self.thread = threading.Thread(target=self.run, name="ranks", daemon=True)

    def run(self) -> None:
        while not self.left.is_set():
            # A store whose keeper is stopped answers no question, and a question knows no limit.
            gone = threading.Timer(self.limits.silent, self.store_is_gone)
            gone.daemon = True
            gone.start()
            self.look()
            gone.cancel()
            self.woken.wait(self.limits.beat)
            self.woken.clear()

    def look(self) -> None:
        """Gives a sign of life, reads those of the others, and ends this process where one of them is missing."""
        now = self.clock()
        if now - self.looked > max(3 * self.limits.beat, self.limits.silent / 2):
            for seen in self.seen.values():      # this process was stopped itself, as by `scontrol suspend`
                seen.heard = seen.moved = now
            self.store_seen = now
        self.looked = now
        try:
            self.tell()
            for rank, seen in self.seen.items():
                if self.store.check([f"beat/{rank}"]):
                    seen.update(json.loads(self.store.get(f"beat/{rank}")), now)
            verdict = json.loads(self.store.get("verdict")) if self.store.check(["verdict"]) else None
            self.store_seen = now
        except (RuntimeError, OSError):      # torch's errors of stores are RuntimeErrors
            if now - self.store_seen > self.limit_of_silence():
                self.store_is_gone()
            with contextlib.suppress(RuntimeError, OSError):
                self.store = self.store if self.left.is_set() else self.connect()
            return
        if verdict is not None:
            if verdict["by"] != self.rank:
                self.end(verdict["said"], verdict["code"], first=False)
        elif said := self.judge(now):
            self.end(said, LOST, first=self.is_first(said, LOST))

    def tell(self) -> None:
        self.count += 1
        frame = sys._current_frames().get(threading.main_thread().ident)
        beat = {"beat": self.count, "host": socket.gethostname(), "pid": os.getpid(), "work": doing.work,
                "step": doing.step, "marks": doing.marks, "longest": doing.longest_step, **look_at(frame),
                "left": self.left.is_set()}
        self.store.set(f"beat/{self.rank}", json.dumps(beat))

    def is_first(self, said: str, code: int) -> bool:
        """Hands what ends this rank to the others; False where another rank has done so first."""
        return is_first_in(self.store, self.rank, said, code)

    def limit_of_silence(self) -> float:
        return self.limits.suspect if self.suspects else self.limits.silent

    def judge(self, now: float) -> str | None:
        """Names, from what was seen, a rank that gives no sign of life, or those on which all others wait."""
        present = {rank: seen for rank, seen in self.seen.items() if not seen.beat.get("left")}
        for rank, seen in present.items():
            if rank != self.rank and now - seen.heard > self.limit_of_silence():
                return (f"{self.name(rank)} has given no sign of life for {now - seen.heard:.0f} s: its process was "
                        f"killed or stopped or hangs as a whole, or its machine is lost. When last heard it was "
                        f"{self.work(rank)}. All other ranks end.")
        still = min((now - seen.moved for seen in present.values()), default=0.0)
        if self.rank != 0 or len(present) < 2 or still <= self.limit_of_stillness(present):
            return None
        late = self.latest(present)
        said = "; ".join(f"{self.name(rank)} hangs: it was {self.work(rank)}, at {self.seen[rank].beat['place']}"
                         for rank in late[:4])
        more = f"; and {len(late) - 4} more ranks" if len(late) > 4 else ""
        others = "and no other rank moves" if len(late) == len(present) else "and the others wait"
        return f"{said}{more}. It has not moved for {still:.0f} s, {others}. All ranks end."

    def limit_of_stillness(self, present: dict[int, Seen]) -> float:
        beats = [seen.beat for seen in present.values()]
        if any(beat.get("work") != "training" or not beat["longest"] for beat in beats):
            return self.limits.long
        return max(self.limits.still, self.limits.steps * max(beat["longest"] for beat in beats))

    def latest(self, present: dict[int, Seen]) -> list[int]:
        """Finds the ranks that are behind; where all are at the same point, those that do not wait for others."""
        marks = {rank: seen.beat["marks"] for rank, seen in present.items()}
        behind = [rank for rank in present if marks[rank] == min(marks.values())]
        if len(behind) == len(present):
            behind = [rank for rank, seen in present.items() if not seen.beat["waits"]]
        return behind or list(present)

    def name(self, rank: int) -> str:
        beat = self.seen[rank].beat
        where = f" (host {beat['host']}, process {beat['pid']})" if beat else ""
        return f"Rank {rank} of {self.world}{where}"

    def work(self, rank: int) -> str:
        beat = self.seen[rank].beat
        if not beat:
            return "starting"
        return beat["work"] + (f" at step {beat['step']}" if beat["step"] is not None else "")

    def store_is_gone(self) -> None:
        keeper = "The launcher" if self.rank == 0 or has_launchers_store() else self.name(0)
        if not self.left.is_set():
            self.end(f"{keeper}, by which the ranks know of one another, has not answered for "
                     f"{self.limit_of_silence():.0f} s: it was killed or stopped, or its machine is lost. All ranks "
                     f"end.", LOST, first=True)

    def wait_for_cause(self) -> None:
        """Waits until the thread ends this process by naming another rank; comes back where there is none to name."""
        self.suspects = True
        self.woken.set()
        self.left.wait(2 * self.limits.suspect)

    def leave(self) -> None:
        """Tells the others that this rank is done, and looks no more."""
        self.left.set()
        self.woken.set()
        if self.thread.is_alive():
            self.thread.join(2 * self.limits.beat)      # whose last word would else come after this one
        if not self.said:      # else the others know, and may have gone with the store
            with contextlib.suppress(RuntimeError, OSError):
                self.tell()


def is_first_in(store: dist.Store, rank: int, said: str, code: int) -> bool:
    """Writes why the ranks end into their store; False where another rank has done so, True where there is none."""
    mine = json.dumps({"by": rank, "said": said, "code": code})
    try:
        return json.loads(store.compare_set("verdict", "", mine))["by"] == rank
    except (RuntimeError, OSError):
        return True


current: Watch | None = None


def connect_to_store(limits: Limits) -> dist.Store:
    """Connects anew to the store of the launcher, or of the first rank where it has none, with keys of our own."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                          wait_for_workers=False, timeout=timedelta(seconds=max(1.0, 2 * limits.beat)))
    return dist.PrefixStore(f"ranks/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def has_launchers_store() -> bool:
    return "TORCHELASTIC_USE_AGENT_STORE" in os.environ


def watch() -> None:
    """Starts the watch where this process is one of several; a second call changes nothing."""
    global current
    if current is None and dist.is_initialized() and dist.get_world_size() > 1 and "MASTER_PORT" in os.environ:
        limits = LIMITS
        current = Watch(dist.get_rank(), dist.get_world_size(), lambda: connect_to_store(limits), limits)
        current.thread.start()


# ---- the end --------------------------------------------------------------------------------------------------------


def leave_at_once(said: str, code: int, first: bool) -> NoReturn:
    """Ends this process from whatever thread; what is `first` said by this rank is on the screen, else in the log."""
    said = f"{Path(sys.argv[0]).name}: {said}"
    with contextlib.suppress(Exception):
        if first:
            note_for_launcher(said)
            print(said, file=sys.stderr)
        elif isinstance(sys.stderr, Copied):
            sys.stderr.note(f"{said}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    if first:
        let_the_others_read()
    os._exit(code)


def let_the_others_read() -> None:
    """Stays for two beats where the store, in which the others find why they end, ends with this process."""
    if current is not None and current.rank == 0 and not has_launchers_store():
        time.sleep(2 * current.limits.beat)


def note_for_launcher(said: str) -> None:
    """Leaves the sentence where torchrun and accelerate launch look for what they print as the root cause."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": said, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def is_of_a_connection(error: BaseException) -> bool:
    """Tells whether an error is but the news that another rank has ended."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def wait_for_cause(error: BaseException) -> None:
    """Does not come back where `error` is of a connection and another rank, which is then named, is behind it."""
    if current is not None and is_of_a_connection(error):
        current.wait_for_cause()


def is_first_to_say(said: str) -> bool:
    """Hands the others what ends this rank, which ends them; False where one has ended before, and the log has both."""
    if current is None:      # before the ranks have met
        rank = int(os.environ.get("RANK", "0"))
        if has_launchers_store() and os.environ.get("WORLD_SIZE", "1") != "1":
            with contextlib.suppress(RuntimeError, OSError):
                first = is_first_in(connect_to_store(LIMITS), rank, said, 1)
                if first:
                    note_for_launcher(said)
                return first
        if rank != 0:
            time.sleep(5)      # the first rank says it in this time
        return True
    current.said = current.is_first(f"{me()} has ended: {said}", 1)
    current.left.set()
    if current.said:
        note_for_launcher(said)
    elif isinstance(sys.stderr, Copied):
        sys.stderr.note(f"{said}\n")
    return current.said


def me() -> str:
    """Names this rank; nothing where it is alone."""
    return current.name(current.rank) if current is not None else ""


def leave() -> None:
    """Ends the watch and the process group where this process is one of several."""
    global current
    if current is not None:
        if current.said:
            let_the_others_read()
        current.leave()
        current = None
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


# ---- logs -----------------------------------------------------------------------------------------------------------


class Copied:
    """A stream of this process, whose whole lines go into a file as well; of a progress bar, its last state."""

    def __init__(self, stream: TextIO, file: TextIO):
        self.stream, self.file, self.rest, self.lock = stream, file, "", threading.RLock()

    def write(self, text: str) -> int:
        with self.lock:
            *lines, self.rest = (self.rest + text).split("\n")
            self.rest = self.rest.rpartition("\r")[2]
            self.note("".join(line.rstrip("\r").rpartition("\r")[2] + "\n" for line in lines))
        return self.stream.write(text)

    def note(self, lines: str) -> None:
        """Writes whole lines into the file alone, in one piece; a full disk must not end what goes on beside."""
        with contextlib.suppress(OSError, ValueError):
            self.file.write(lines)
            self.file.flush()

    def __getattr__(self, name: str) -> Any:      # what else a stream has: flush, encoding, isatty, fileno
        return getattr(self.stream, name)


def keep_log(folder: Path, rank: int, world: int) -> None:
    """Adds what this rank prints from now on, its warnings and its traceback to <folder>/rank-<rank>.log; not where
    it is alone."""
    if world == 1:
        return
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"rank-{rank:05d}.log").open("a", encoding="utf-8", errors="backslashreplace")
    print(f"---- {time.strftime('%Y-%m-%dT%H:%M:%S%z')}  rank {rank} of {world}, host {socket.gethostname()}, process "
          f"{os.getpid()}: {' '.join(sys.argv)}", file=file, flush=True)
    sys.stdout, sys.stderr = Copied(sys.stdout, file), Copied(sys.stderr, file)
