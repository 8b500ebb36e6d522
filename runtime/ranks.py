"""What the ranks of a command agree on: a number of the main one, and when to stop.

Where a rank fails or is killed, the launcher (torchrun, accelerate launch) ends the others. A rank that hangs makes
them wait in a collective, until TIMEOUT ends them (docs/reliability.md).
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TextIO

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast

# For one collective, in which ranks also wait for one that indexes, downloads or saves.
TIMEOUT = timedelta(hours=2)


def broadcast_from_main(state: Accelerator | PartialState, number: int) -> int:
    """Gives every rank the main one's number; a single rank touches no device for it."""
    if state.num_processes == 1:
        return int(number)
    return int(broadcast(torch.tensor(int(number), device=state.device)))


def stop_signals() -> list[signal.Signals]:
    """Lists the signals that make a run save and stop: SIGUSR1 is Slurm's, and SIGHUP a closed terminal's.

    Under nohup, which ignores SIGHUP, it stays ignored.
    """
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, *hangup]


class StopRequest:
    """Turns the first of the stop signals into a request to the loop; a second one ends the process.

    Several ranks must leave at the same step. They reduce their requests about every SECONDS and read the result one
    vote later, so that no step waits for a GPU. How many steps that is they agree on likewise. Where a step alone takes
    as long, they wait for the device and read the result at once, as few such steps fit into a launcher's patience.
    """

    SECONDS = 2.0       # launchers give a run 30 s between SIGTERM and SIGKILL
    MOST_STEPS = 10     # between votes, as steps may become slower

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.signal, self.clock, self.votes = 0, clock, None
        self.voted, self.steps, self.next_vote = clock(), 1, 0      # steps: from one vote to the next
        for number in stop_signals():
            signal.signal(number, self.receive)

    def receive(self, number: int, frame: object) -> None:
        self.signal = number
        sys.stdout, sys.stderr = LenientStream(sys.stdout), LenientStream(sys.stderr)
        for each in stop_signals():  # a shell that ends sends SIGHUP twice
            signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else exit_unsaved)

    def agreed(self, step: int, state: Accelerator | PartialState) -> int:
        """Returns the signal on which all ranks leave at this step, or 0. Every rank calls it at every step."""
        if state.num_processes == 1:
            return self.signal
        if step < self.next_vote:
            return 0
        answer, seconds_per_step = 0, self.SECONDS
        if self.votes is not None:
            votes, copied = self.votes
            if copied is not None:
                copied.synchronize()
            answer, seconds_per_step = votes.tolist()
        is_slow = seconds_per_step >= self.SECONDS
        if is_slow and state.device.type == "cuda":  # a signal that comes in meanwhile counts
            torch.cuda.synchronize(state.device)
        now = self.clock()
        vote = (self.signal, (now - self.voted) / self.steps)
        votes = torch.stack([torch.full((), float(part), device=state.device) for part in vote])
        dist.all_reduce(votes, dist.ReduceOp.MAX)  # on a GPU the host goes on at once
        votes = votes.to("cpu", non_blocking=True)
        self.votes = votes, torch.cuda.current_stream().record_event() if state.device.type == "cuda" else None
        if is_slow:
            if self.votes[1] is not None:
                self.votes[1].synchronize()
            answer = max(answer, votes.tolist()[0])
        # At most twice as many: the host may run ahead of a GPU's first steps, and not of the vote before.
        fitting = int(self.SECONDS / max(seconds_per_step, 1e-3))
        self.voted, self.steps = now, max(1, min(fitting, 2 * self.steps, self.MOST_STEPS))
        self.next_vote = step + self.steps
        return int(answer)


class LenientStream:
    """A stream whose reader may be gone, as a closed terminal or a `tee` that Ctrl-C ended: the rest is dropped."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        return len(text)


def exit_unsaved(number: int, frame: object) -> None:
    """Ends the process at once, with another code than 128 + signal, which says that the run was saved."""
    os._exit(1)


def wait_for_root_cause(error: BaseException) -> None:
    """Waits some seconds, in which the launcher ends this rank, where another rank prints the cause.

    That is so on every rank but the first, and for an error that only says that the connection to another rank broke.
    """
    lost_connection = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
    if os.environ.get("RANK", "0") != "0" or lost_connection:
        for number in stop_signals():
            signal.signal(number, signal.SIG_DFL)
        time.sleep(5)


def leave_group() -> None:
    """Ends the process group of a command that has succeeded; after a failure the launcher does."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def forget_state() -> None:
    """Lets the next command of this process choose device and precision anew, which accelerate keeps for all."""
    if not (dist.is_available() and dist.is_initialized()):
        AcceleratorState._reset_state(reset_partial_state=True)
