"""What the ranks of a command agree on: a number of the main one, and when to stop.

Where a rank fails or is killed, the launcher (torchrun, accelerate launch) ends the others. A rank that hangs makes
them wait in a collective, until TIMEOUT ends them (docs/reliability.md).
"""

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

# For one collective, in which ranks also wait for one that indexes, downloads or saves.
TIMEOUT = timedelta(hours=2)


def broadcast_from_main(state: Accelerator | PartialState, number: int) -> int:
    """Gives every rank the main one's number; a single rank touches no device for it."""
    if state.num_processes == 1:
        return int(number)
    return int(broadcast(torch.tensor(int(number), device=state.device)))


class StopRequest:
    """Turns the first SIGTERM, SIGINT or SIGUSR1 into a request to the loop; a second one ends the process.

    Several ranks must leave at the same step. Every few steps they reduce their requests, and read the result of the
    time before, so that no step waits for a GPU.
    """

    EVERY = 10  # steps; launchers give a run 30 s between SIGTERM and SIGKILL
    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last is Slurm's, before a job's time is up

    def __init__(self):
        self.signal, self.votes = 0, None
        for number in self.SIGNALS:
            signal.signal(number, self.receive)

    def receive(self, number: int, frame: object) -> None:
        self.signal = number
        for each in self.SIGNALS:
            signal.signal(each, exit_unsaved)

    def agreed(self, step: int, state: Accelerator | PartialState) -> int:
        """Returns the signal on which all ranks leave at this step, or 0. Every rank calls it at every step."""
        if state.num_processes == 1:
            return self.signal
        if step % self.EVERY:
            return 0
        answer = 0
        if self.votes is not None:
            votes, copied = self.votes
            if copied is not None:
                copied.synchronize()
            answer = int(votes)
        votes = torch.full((), self.signal, device=state.device)
        dist.all_reduce(votes, dist.ReduceOp.MAX)  # on a GPU the host goes on at once
        votes = votes.to("cpu", non_blocking=True)
        self.votes = votes, torch.cuda.current_stream().record_event() if state.device.type == "cuda" else None
        return answer


def exit_unsaved(number: int, frame: object) -> None:
    """Ends the process at once, with another code than 128 + signal, which says that the run was saved."""
    os._exit(1)


def wait_for_root_cause(error: BaseException) -> None:
    """Waits some seconds, in which the launcher ends this rank, where another rank prints the cause.

    That is so on every rank but the first, and for an error that only says that the connection to another rank broke.
    """
    lost_connection = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
    if os.environ.get("RANK", "0") != "0" or lost_connection:
        for number in StopRequest.SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        time.sleep(5)


def record_for_launcher(error: BaseException) -> None:
    """Writes a traceback into the file in which torchrun and accelerate launch look for the root cause."""
    ErrorHandler().record_exception(error)


def leave_group() -> None:
    """Ends the process group of a command that has succeeded; after a failure the launcher does."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def forget_state() -> None:
    """Lets the next command of this process choose device and precision anew, which accelerate keeps for all."""
    if not (dist.is_available() and dist.is_initialized()):
        AcceleratorState._reset_state(reset_partial_state=True)
