"""What the ranks of a command agree on: the main one's word, and when to stop. The launcher ends all where one fails.

torchrun, accelerate launch and scripts/slurm.sh do that when a process leaves with another code than 0, or is killed.
A rank that hangs makes the others wait in a collective, until TIMEOUT ends them (docs/reliability.md).
"""

import contextlib
import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast, reduce
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

# That a collective may take. A rank that reads from a slow disk, indexes, downloads or saves makes the others wait in
# one, and has not failed.
TIMEOUT = timedelta(hours=2)


def broadcast_from_main(state: Accelerator | PartialState, number: int) -> int:
    """Gives every rank the main one's number; one rank alone touches no device for it."""
    if state.num_processes == 1:
        return int(number)
    return int(broadcast(torch.tensor(int(number), device=state.device)))


def all_ranks_agree(state: Accelerator | PartialState, truth: bool) -> bool:
    """Tells every rank whether all of them say True."""
    if state.num_processes == 1:
        return truth
    return int(reduce(torch.tensor(int(truth), device=state.device), "sum")) == state.num_processes


class StopRequest:
    """Turns the first SIGTERM, SIGINT or SIGUSR1 into a request that the loop honours; a second one ends the process.

    Several ranks must leave at the same step. Every few steps each tells the others whether it has been asked to stop,
    and reads what they answered the time before, so that a GPU is not waited for.
    """

    EVERY = 10     # steps; launchers give a run 30 s between SIGTERM and SIGKILL
    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)      # the last is Slurm's, before a job's time is up

    def __init__(self):
        self.signal, self.asked = 0, None
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
        if self.asked is not None:
            votes, copied = self.asked
            if copied is not None:
                copied.synchronize()
            answer = int(votes)
        votes = torch.full((), self.signal, device=state.device)
        dist.all_reduce(votes, dist.ReduceOp.MAX)      # on a GPU the host goes on at once
        votes = votes.to("cpu", non_blocking=True)
        self.asked = votes, torch.cuda.current_stream().record_event() if state.device.type == "cuda" else None
        return answer


def exit_unsaved(number: int, frame: object) -> None:
    """Ends the process at once; 128 + signal would say that it has saved."""
    os._exit(1)


def wait_for_root_cause(error: BaseException | None) -> None:
    """Waits some seconds where the cause, or the same sentence, is another rank's to print: the launcher ends this one.

    That is so on every rank but the first, and for an error which only says that the connection to another rank broke.
    """
    lost_connection = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
    if os.environ.get("RANK", "0") != "0" or lost_connection:
        for number in StopRequest.SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        time.sleep(5)


def record_for_launcher(error: BaseException) -> None:
    """Leaves an error where torchrun and accelerate launch, if one of them is there, look for the root cause."""
    with contextlib.suppress(OSError):
        ErrorHandler().record_exception(error)


def rank_suffix() -> str:
    """Writes " on rank 3 of 8" for a sentence; nothing where this rank is alone."""
    world = os.environ.get("WORLD_SIZE", "1")
    return f" on rank {os.environ.get('RANK')} of {world}" if world != "1" else ""


def leave_group() -> None:
    """Ends the process group of a command that has done its work; after a failure the launcher does."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
