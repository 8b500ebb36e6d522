"""Several ranks: a stop that they agree on, and one that fails, by itself or by a kill, so that all of them end."""

import json
import os
import signal
import time

import forked
import pytest
from training_runs import assert_same_end, command, rows, trained

from runtime import ranks
from runtime.device import join_ranks
from weights import checkpoints

LONG = ("steps=100000", "log.every=1", "checkpoint.every=100000", "model.depth=3", "model.routes=[]", "compile=false",
        "cpu=true")


# What the second rank does before its third step.
MEDDLING = """
import os, signal, sys, torch.distributed, train
step, taken = train.train_step, []
def meddle(*arguments, **options):
    taken.append(1)
    if os.environ["RANK"] == "1" and len(taken) == 3:
        {act}
    return step(*arguments, **options)
torch.distributed.new_group = None  # as one of gloo cannot be made where a node's name resolves to loopback
train.train_step, sys.argv[0] = meddle, "train.py"
train.main()
"""


def test_a_signal_to_one_of_two_ranks_stops_both_within_a_few_steps_and_one_rank_can_resume(shapes, tmp_path):
    life = forked.start("-c", MEDDLING.format(act="os.kill(os.getpid(), signal.SIGTERM)"),
                        *command(tmp_path, shapes, *LONG)[1:], ranks=2)
    printed = life.wait().stdout
    assert [process.exitcode for process in life.processes] == [143, 143], printed
    step = 3 + ranks.StopRequest.LAG
    assert rows(tmp_path)[-1]["step"] == checkpoints.step_of(checkpoints.latest(tmp_path)) == step
    assert printed.count(f"Stopped by SIGTERM at step {step}") == 1 and "2 × cpu" in printed
    saved = checkpoints.read_meta(checkpoints.latest(tmp_path))
    assert saved["world"] == 2 and saved["images"] == 8 * step
    assert "world was 2 and is now 1" in trained(tmp_path, shapes, *LONG, f"steps={step + 2}")
    assert checkpoints.step_of(checkpoints.latest(tmp_path)) == step + 2


@pytest.mark.parametrize(("error", "says"), [
    ("ValueError", "train.py: only this rank has it"), ("KeyError", "KeyError: 'only this rank has it'")])
def test_an_error_on_one_rank_ends_all_and_is_printed_once(shapes, tmp_path, error, says):
    program = MEDDLING.format(act=f"raise {error}('only this rank has it')")
    life = forked.start("-c", program, *command(tmp_path, shapes, *LONG)[1:], ranks=2,
                        TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    said = life.wait().stderr
    assert life.processes[1].exitcode == 1 and life.processes[0].exitcode != 0
    assert said.count(says) == 1 and said.count("Traceback") == (error == "KeyError"), said
    if error == "KeyError":  # a fault, which the launcher prints as the root cause
        recorded = json.loads((tmp_path / "error.json").read_text())["message"]
        assert recorded["message"].startswith(error) and "in meddle" in recorded["extraInfo"]["py_callstack"]


def listening(clock=time.monotonic) -> ranks.StopRequest:
    before = ranks.stop_handlers()
    stop = ranks.StopRequest(join_ranks(True, True), clock)
    assert ranks.stop_handlers() == before  # before the first step a signal ends the process at once
    stop.listen()
    return stop


def test_usr1_is_a_request_to_stop_and_a_later_signal_does_not_look_like_a_saved_run(handlers, monkeypatch):
    now, ended = 100.0, []
    stop = listening(lambda: now)
    monkeypatch.setattr(os, "_exit", ended.append)
    # timeout, torchrun and accelerate launch send a second one at once.
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    assert stop.agreed() == signal.SIGUSR1 and not ended
    now += 5
    os.kill(os.getpid(), signal.SIGHUP)
    assert not ended  # as the kernel does when the shell has ended
    os.kill(os.getpid(), signal.SIGINT)
    assert ended == [1]


def test_under_nohup_a_closed_terminal_stops_nothing(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = listening()
    os.kill(os.getpid(), signal.SIGHUP)
    assert stop.agreed() == 0 and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.agreed() == signal.SIGTERM


WAIT_ALONE = """
import os, sys
from runtime import device, ranks
ranks.JOINING_SECONDS = 0.2
device.join_ranks(True, True)
"""


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGINT), (1, signal.SIGTERM)])
def test_a_rank_without_the_others_says_what_it_waits_for_and_ends_by_a_signal_at_once(rank, number):
    [alone, *_] = forked.ranks_of(2)
    life = forked.start("-c", WAIT_ALONE, **alone | {"RANK": str(rank)})
    while life.returncode is None and "WORLD_SIZE=2" not in life.output[1].read_text():
        time.sleep(0.001)
    os.kill(life.pid, number)
    began, ended = time.monotonic(), life.wait()
    assert ended.code == -number and time.monotonic() - began < 5
    assert f"Rank {rank} waits for the others: WORLD_SIZE=2" in ended.stderr
    assert f":{alone['MASTER_PORT']}. For a" in ended.stderr


STOP_WHILE_SAMPLING = """
import os, signal, sys, train
from accelerate import PartialState
generate, taken = train.generate, []
def signalled(state, net, *arguments, **options):
    def stop(module, *_):
        taken.append(1)
        if len(taken) == 3 and PartialState().process_index == PartialState().num_processes - 1:
            os.kill(os.getpid(), signal.SIGTERM)
    net.register_forward_pre_hook(stop)
    return generate(state, net, *arguments, **options)
train.generate = signalled
sys.argv[0] = "train.py"
train.main()
"""


def test_a_signal_while_a_grid_is_sampled_saves_the_step_and_the_grid_is_made_on_resuming(shapes, tmp_path):
    options = (*LONG, "steps=6", "samples.every=5", "samples.at_start=false", "samples.seeds=0-7",
               "samples.batch_size=1", "samples.num_steps=20")
    run, whole = tmp_path / "parts", tmp_path / "whole"
    stopped = forked.run("-c", STOP_WHILE_SAMPLING, *command(run, shapes, *options)[1:], ranks=2)
    assert stopped.returncode == 143 and "Stopped by SIGTERM at step 5; saved in" in stopped.stdout, stopped.stderr
    assert not list((run / "samples").glob("*.png"))
    for folder in (run, whole):
        result = forked.run(*command(folder, shapes, *options), ranks=2)
        assert result.returncode == 0, result.stderr
    assert_same_end(run, whole)
    grids = [{path.name: path.read_bytes() for path in (folder / "samples").iterdir()} for folder in (run, whole)]
    assert grids[0] == grids[1] and len(grids[0]) == 2
