"""What the ranks of a command agree on: what the main one finds, and when to stop.

Where a rank fails or is killed, the launcher (torchrun, accelerate launch) ends the others. A rank that hangs makes
them wait in a collective, until TIMEOUT ends them (docs/reliability.md).
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list

from runtime import notebook

# For one collective. Ranks also wait in one while another rank indexes, downloads or saves.
TIMEOUT = timedelta(hours=2)
JOINING_SECONDS = 10.0  # before a rank prints what it is waiting for
Found = TypeVar("Found")


def from_main(state: Accelerator | PartialState, work: Callable[[], Found]) -> Found:
    """Returns on every rank what `work` returns on the main one, which alone calls it; a single rank only calls it.

    Raises its ValueError or OSError on every rank, as a ValueError on the others.
    """
    if state.num_processes == 1:
        return work()
    found = error = None
    if state.is_main_process:
        try:
            found = work()
        except (ValueError, OSError) as raised:
            error = raised
    found, failure = broadcast_object_list([found, error and str(error)])
    if failure is not None:
        raise error or ValueError(failure)
    return found


def require_shared(state: Accelerator | PartialState, path: Path) -> None:
    """Raises ValueError on a rank that does not see a path that the main one found."""
    if not path.exists():
        raise ValueError(f"Rank {state.process_index} does not see {path}, which the main rank found: it must lie on a "
                         f"disk that all nodes share. Set run_dir or checkpoint.")


def stop_signals() -> list[signal.Signals]:
    """Lists the signals that make a run save and stop: SIGUSR1 is Slurm's, and SIGHUP a closed terminal's.

    Under nohup, which ignores SIGHUP, it stays ignored. Threads other than the main one have no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, *hangup]


class Votes:
    """Lets ranks that make the same calls agree on a signal that one of them received.

    They reduce their requests about every SECONDS and read the result one vote later, so that no call waits for a GPU.
    They also agree on the number of calls between votes. If a call takes SECONDS or more, they wait for the device
    and read the result at once, as a launcher only waits for a few such calls.
    """

    SECONDS = 2.0       # launchers give a run 30 s between SIGTERM and SIGKILL
    MOST_CALLS = 10     # between votes, as calls may become slower

    def __init__(self, state: Accelerator | PartialState, clock: Callable[[], float]):
        self.state, self.clock, self.votes = state, clock, None
        self.voted, self.calls, self.call, self.next_vote = clock(), 1, 0, 0    # calls: from one vote to the next

    def agreed(self, number: int) -> int:
        """Returns the signal on which all ranks leave at this call, or 0; this rank received `number`."""
        state, call = self.state, self.call
        if state.num_processes == 1:
            return number
        self.call += 1
        if call < self.next_vote:
            return 0
        answer, seconds_per_call = 0, self.SECONDS
        if self.votes is not None:
            votes, copied = self.votes
            if copied is not None:
                copied.synchronize()
            answer, seconds_per_call = votes.tolist()
        is_slow = seconds_per_call >= self.SECONDS
        if is_slow and state.device.type == "cuda":
            torch.cuda.synchronize(state.device)
        now = self.clock()
        vote = (number, (now - self.voted) / self.calls)
        votes = torch.stack([torch.full((), float(part), device=state.device) for part in vote])
        dist.all_reduce(votes, dist.ReduceOp.MAX)  # on a GPU the host does not wait
        votes = votes.to("cpu", non_blocking=True)
        self.votes = votes, torch.cuda.current_stream().record_event() if state.device.type == "cuda" else None
        if is_slow:
            if self.votes[1] is not None:
                self.votes[1].synchronize()
            answer = max(answer, votes.tolist()[0])
        # At most twice as many as before. The host may run ahead of a GPU's first calls, but not of the last vote.
        fitting = int(self.SECONDS / max(seconds_per_call, 1e-3))
        self.voted, self.calls = now, max(1, min(fitting, 2 * self.calls, self.MOST_CALLS))
        self.next_vote = call + self.calls
        return int(answer)


class Stopped(Exception):
    """Ends what a run does between two steps, on all ranks; its argument is the signal."""


class StopRequest:
    """Turns the first of the stop signals into a request to the loop; a second one ends the process."""

    PATIENCE = 1.0      # seconds in which a repeated signal does not count: Ctrl-C comes from terminal and launcher

    def __init__(self, state: Accelerator | PartialState, clock: Callable[[], float] = time.monotonic):
        self.signal, self.received, self.clock, self.listens = 0, 0.0, clock, False
        self.steps, self.calls = Votes(state, clock), Votes(state, clock)

    def listen(self) -> None:
        """Starts to handle signals. Before the first step they end the process, as there is nothing to save."""
        for number in stop_signals() if not self.listens else ():
            signal.signal(number, self.receive)
        self.listens = True

    def receive(self, number: int, frame: object) -> None:
        if not self.signal:
            self.signal, self.received = number, self.clock()
        elif number != signal.SIGHUP and self.clock() - self.received > self.PATIENCE:  # a shell sends SIGHUP twice
            exit_unsaved(number, frame)

    def agreed(self) -> int:
        """Returns the signal on which all ranks leave at this step, or 0. Every rank calls it at every step."""
        return self.steps.agreed(self.signal)

    def end_sampling(self, *_: object) -> None:
        """Raises Stopped on all ranks once one received a signal; a hook before each pass of a network that samples."""
        if number := self.calls.agreed(self.signal):
            raise Stopped(number)


@contextlib.contextmanager
def joining() -> Iterator[None]:
    """Prints what the block waits for if it takes long to join the process group; Ctrl-C ends it at once.

    Raises ValueError where the main rank's port is in use.
    """
    world, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")
    if world in ("", "1"):
        yield
        return
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "29500")
    place = f"MASTER_ADDR={address} MASTER_PORT={port}"
    timer = threading.Timer(JOINING_SECONDS, print, [
        f"Rank {rank} waits for the others: {world} processes (WORLD_SIZE={world}), with RANK=0 to {int(world) - 1}, "
        f"must meet at {place}. To run a single process, unset RANK, LOCAL_RANK and WORLD_SIZE."], {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python handles no signal while torch waits
    try:
        yield
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ValueError(f"{place} is in use, perhaps by another run: set another MASTER_PORT, or --main_process_port "
                         f"of accelerate launch.") from None
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)


def exit_unsaved(number: int, frame: object) -> None:
    """Ends the process at once. Its code is not 128 + signal, which would mean that the run was saved.

    In a notebook it only ends the cell.
    """
    if not notebook.has_command_line():
        signal.default_int_handler(number, frame)
    os._exit(1)


def wait_for_root_cause(error: BaseException) -> None:
    """Waits some seconds if another rank prints the cause; meanwhile the launcher ends this rank.

    It waits on every rank but the first, and for an error about nothing but a lost connection to another rank.
    """
    lost_connection = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
    if os.environ.get("RANK", "0") != "0" or lost_connection:
        for number in stop_signals():
            signal.signal(number, signal.SIG_DFL)
        time.sleep(5)


def leave_group() -> None:
    """Ends the process group of a command that has succeeded; after a failure the launcher ends it."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def forget_state() -> None:
    """Lets the next command of this process choose its own device and precision, which accelerate would keep.

    Ranks in a process group keep that and its device.
    """
    in_group = dist.is_available() and dist.is_initialized()
    # Private, as accelerate has no public call that forgets precision and device.
    AcceleratorState._reset_state(reset_partial_state=not in_group)
