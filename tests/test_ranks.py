"""What ranks know of one another: who is gone or hangs, who says so, the logs; a clock of the test's own, no waiting."""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from conftest import ROOT

import ranks
from ranks import LIMITS, LOST, Copied, Doing, Watch


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class World:
    """Ranks that share a store and a clock; each looks when it is told to, and `ended` holds what each ended with."""

    def __init__(self, size: int):
        self.clock, self.store, self.ended = Clock(), dist.HashStore(), {}
        self.watches = [Watch(rank, size, lambda: self.store, LIMITS, self.clock, lambda *told, rank=rank, **first: self.ended.setdefault(
            rank, (*told, first["first"]))) for rank in range(size)]

    def pass_time(self, seconds: float, *looking: int, **beats: dict) -> None:
        """The ranks that look do so at every beat; `beats` are what else the store is told, as rank1={…}."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += LIMITS.beat
            for rank in looking:
                if rank not in self.ended:
                    self.watches[rank].look()
            for rank, beat in beats.items():
                count = self.clock.now if beat.get("lives", True) else 0
                self.store.set(f"beat/{rank.removeprefix('rank')}", json.dumps(BEAT | beat | {"beat": count}))


BEAT = {"host": "far", "pid": 7, "work": "training", "step": 12, "marks": 20, "longest": 2.0, "waits": True, "place": "blocks.py:9 (forward)",
        "stack": 1, "left": False}


@pytest.fixture
def stepping(monkeypatch):
    """The main thread of this process counts as one in the middle of training, waiting for others, that never moves."""
    monkeypatch.setattr(ranks, "doing", Doing("training", 12, 20, longest_step=2.0))
    monkeypatch.setattr(ranks, "look_at", lambda frame: {"waits": True, "place": "ranks.py:1 (agreed)", "stack": 1})


def test_a_rank_without_a_sign_of_life_is_named_within_a_minute_and_not_before_its_time():
    world = World(3)
    world.pass_time(100, 0, 1, rank2={"stack": 1})
    world.pass_time(40, 0, 1)
    assert not world.ended
    world.pass_time(15, 0, 1)
    said, code, first = world.ended[0]
    assert said.startswith("Rank 2 of 3 (host far, process 7) has given no sign of life for 50 s") and "training at step 12" in said
    assert code == LOST and first
    assert world.ended[1] == (said, LOST, False)      # told by the first rank; it is said once on the screen


def test_the_first_rank_is_watched_by_all_others():
    world = World(3)
    world.pass_time(10, 0, 1, 2)
    world.pass_time(55, 1, 2)
    assert world.ended[1][0].startswith("Rank 0 of 3") and world.ended[1][2] and not world.ended[2][2]
    assert 0 not in world.ended


def test_a_rank_that_was_done_first_is_not_missed(stepping):
    world = World(2)
    world.pass_time(10, 0, 1)
    world.watches[1].leave()
    world.pass_time(4000, 0)
    world.watches[0].leave()
    world.pass_time(4000, 1)
    assert not world.ended


def test_a_broken_connection_makes_a_short_silence_enough():
    world = World(2)
    world.pass_time(10, 0, 1)
    world.watches[0].suspects = True
    world.pass_time(20, 0)
    assert "Rank 1 of 2" in world.ended[0][0]


def test_ranks_that_were_all_stopped_for_a_while_go_on():
    world = World(2)
    world.pass_time(10, 1, 0)
    world.clock.now += 3600      # as by `scontrol suspend`
    world.watches[0].look()
    world.pass_time(40, 0)
    assert not world.ended
    world.pass_time(40, 0, 1)
    assert not world.ended


@pytest.mark.parametrize(("hanging", "says"), [
    ({"marks": 19, "step": 11, "place": "data.py:5 (read)"}, "Rank 1 of 3 (host far, process 7) hangs: it was training at step 11, at data.py:5 (read)"),
    ({"waits": False}, "Rank 1 of 3 (host far, process 7) hangs: it was training at step 12, at blocks.py:9 (forward)."),
])
def test_a_main_thread_that_hangs_is_named_by_its_place_or_as_the_one_that_does_not_wait(stepping, hanging, says):
    world = World(3)
    world.pass_time(50, 0, rank1=hanging, rank2={})
    assert not world.ended
    world.pass_time(20, 0, rank1=hanging, rank2={})
    assert world.ended[0][0].startswith(says) and world.ended[0][0].endswith("s, and the others wait. All ranks end.")


def test_nobody_hangs_while_one_main_thread_moves(stepping):
    world = World(2)
    for place in range(100):      # indexing, for an hour and more
        world.pass_time(40, 0, rank1={"waits": False, "stack": place, "marks": 3})
    assert not world.ended


@pytest.mark.parametrize(("beat", "limit"), [({"longest": 30.0}, 300), ({"longest": 0.0}, 1800), ({"work": "saving", "marks": 19}, 1800)])
def test_slow_steps_the_first_step_and_long_works_have_longer_limits(stepping, beat, limit):
    world = World(2)
    world.pass_time(limit, 0, rank1=beat)
    assert not world.ended
    world.pass_time(20, 0, rank1=beat)
    assert world.ended


def test_where_all_wait_alike_each_is_named(stepping):
    world = World(3)
    world.pass_time(80, 0, rank1={}, rank2={})
    said = world.ended[0][0]
    assert all(f"Rank {rank} of 3" in said for rank in range(3)) and "no other rank moves" in said


def test_a_store_that_is_gone_ends_the_ranks_and_one_that_comes_back_does_not():
    class Gone:
        def __getattr__(self, name):
            raise RuntimeError("Broken pipe")

    world = World(2)
    world.pass_time(10, 0, 1)
    store, world.store, world.watches[1].store = world.store, Gone(), Gone()
    world.pass_time(40, 1)
    world.store = store
    world.pass_time(40, 1, rank0={})
    assert not world.ended
    world.store, world.watches[1].store = Gone(), Gone()
    world.pass_time(55, 1)
    assert world.ended[1][0].startswith("Rank 0 of 2 (host far, process 7), by which the ranks know of one another, has not answered")


def test_a_store_that_never_answers_ends_the_rank(monkeypatch):
    asked, ended = threading.Event(), threading.Event()

    class Stopped(dist.Store):
        def check(self, keys):
            asked.set()
            ended.wait()

        def set(self, key, value):
            pass

    watch = Watch(1, 2, Stopped, replace(LIMITS, silent=0.01), end=lambda *told, **first: (ended.told.append(told), ended.set()))
    ended.told = []
    watch.thread.start()
    assert ended.wait(60) and asked.wait(60) and "has not answered" in ended.told[0][0]
    watch.left.set()
    watch.woken.set()
    watch.thread.join()


def test_only_full_steps_past_the_first_count_as_the_longest(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=clock))
    doing = monkeypatch.setattr(ranks, "doing", Doing()) or ranks.doing

    def after(seconds, step):
        clock.now += seconds
        ranks.at(step)

    after(0, 5)
    after(500, 6)      # it was compiled
    assert doing.longest_step == 0
    after(2, 7)
    with ranks.working("saving"):
        assert doing.work == "saving" and doing.step == 7
        clock.now += 900
    after(1, 8)
    assert (doing.longest_step, doing.work, doing.step) == (2, "training", 8)


def test_the_place_of_a_thread_is_named_by_its_innermost_line_and_that_of_ours():
    reached, go = threading.Event(), threading.Event()

    def stand():
        reached.set()
        go.wait()

    thread = threading.Thread(target=stand)
    thread.start()
    reached.wait()
    told = ranks.look_at(sys._current_frames()[thread.ident])
    go.set()
    assert "(wait) under test_ranks.py:" in told["place"] and told["place"].endswith("(stand)") and not told["waits"]


def test_the_limits_are_those_that_the_page_names():
    assert (LIMITS.silent, LIMITS.still, LIMITS.steps, LIMITS.long, LIMITS.collective) == (45, 50, 10, 30 * 60, 6 * 3600)
    assert max(LIMITS.silent, LIMITS.still) + 2 * LIMITS.beat <= 60      # the first rank looks, and the others read what it saw
    assert 2 * LIMITS.suspect < 30      # which torchrun leaves the others when one has died


# ---- for real: ranks as srun starts them, forked from one process that has imported train.py -------------------------

REAL = """
import json, os, signal, socket, sys, time
from pathlib import Path
import torch.distributed as dist
import ranks, settings, train
from forked import Life
# The limit that a fate is to meet is short, and no other is near.
SILENCE = ranks.Limits(beat=0.05, silent=2, suspect=2, still=600, long=600)
STILLNESS = ranks.Limits(beat=0.05, silent=600, suspect=100, still=3, steps=5, long=600)
data, home = sys.argv[1:]
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]

def bare(rank, fate):
    dist.init_process_group("gloo")
    ranks.watch()
    dist.barrier()
    if rank == fate[1]:
        time.sleep(0.3)
        os.kill(os.getpid(), fate[0])
    time.sleep(600)

def training(rank, fate):
    step, count = train.train_step, []
    def stuck(*args, **options):
        count.append(1)
        if rank == 1 and len(count) == 8:
            fate()
        return step(*args, **options)
    train.train_step = stuck
    sys.argv = ["train.py", "experiment=quickstart", f"run_dir={home}/{fate.__name__}", f"data.path={data}", "batch_size=8", "steps=100", "cpu=true",
                "model.hidden_size=32", "model.num_heads=2", "model.depth=3", "model.routes=[]", "samples.every=0", "compile=false"]
    train.main()

def framed(rank, fate):
    settings.compose, settings.read = lambda name: [{}], lambda declared, plain: plain
    def main(cfg):
        dist.init_process_group("gloo")
        ranks.watch()
        ranks.keep_log(Path(home, fate.__name__, "logs"), rank, 2)
        dist.barrier()
        if rank == 1:
            fate()
        dist.barrier()
    sys.argv = ["train.py"]
    settings.command("config", settings.Settings)(main)()

def hang():
    time.sleep(1000)

def fail():
    raise ValueError("one rank's own mistake")

def crash():
    raise KeyError("one rank's own fault")

def start(rank, work, fate):
    def live():
        ranks.LIMITS = SILENCE if work is bare else STILLNESS
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        work(rank, fate)
    return Life(live)

told = {}
for name, work, fate in (("killed", bare, (signal.SIGKILL, 1)), ("stopped", bare, (signal.SIGSTOP, 1)), ("first killed", bare, (signal.SIGKILL, 0)),
                         ("first stopped", bare, (signal.SIGSTOP, 0)), ("hang", training, hang), ("fail", framed, fail), ("crash", framed, crash)):
    lives = [start(rank, work, fate) for rank in range(2)]
    lost = fate[1] if work is bare else 1
    survivor = lives[1 - lost].wait(100)
    if work is bare:
        lives[lost].signal(signal.SIGKILL)
    gone = lives[lost].wait(100)
    told[name] = {"codes": (survivor.code, gone.code), "survivor": survivor.said, "lost": gone.said}
    port += 1
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def real(shapes, tmp_path_factory) -> dict:
    home = tmp_path_factory.mktemp("ranks")
    (home / "real.py").write_text(REAL)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    ended = subprocess.run([sys.executable, home / "real.py", shapes, home], env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1]) | {"home": home}


@pytest.mark.parametrize(("fate", "number"), [("killed", signal.SIGKILL), ("stopped", signal.SIGKILL)])
def test_a_process_that_is_killed_or_stopped_ends_the_other_in_a_sentence(real, fate, number):
    told = real[fate]
    assert told["codes"] == [LOST, -number], told
    assert "Rank 1 of 2 (host" in told["survivor"] and "has given no sign of life" in told["survivor"] and "Traceback" not in told["survivor"]


@pytest.mark.parametrize("fate", ["first killed", "first stopped"])
def test_a_first_rank_that_takes_the_store_with_it_ends_the_other_in_a_sentence(real, fate):
    told = real[fate]
    assert told["codes"][0] == LOST and "Rank 0 of 2 (host" in told["survivor"] and "Traceback" not in told["survivor"], told


def test_a_rank_that_hangs_in_a_step_ends_both_in_one_sentence(real):
    told = real["hang"]
    assert told["codes"] == [LOST, LOST], told
    assert "train.py: Rank 1 of 2 (host" in told["survivor"] and "hangs: it was training at step 7, at real.py:" in told["survivor"]
    assert "(hang) under train.py:" in told["survivor"] and "hangs" not in told["lost"]
    assert all("Rank 1 of 2" in (real["home"] / f"hang/logs/rank-0000{rank}.log").read_text() for rank in (0, 1))


def test_a_mistake_on_one_rank_ends_both_and_is_said_once(real):
    told = real["fail"]
    assert told["codes"] == [1, 1], told
    assert told["lost"].count("train.py: one rank's own mistake") == 1 and "Traceback" not in told["lost"] + told["survivor"]
    assert "own mistake" not in told["survivor"]
    assert "has ended: train.py: one rank's own mistake" in (real["home"] / "fail/logs/rank-00000.log").read_text()


def test_a_fault_of_ours_on_one_rank_ends_both_with_its_traceback_alone(real):
    told = real["crash"]
    assert told["codes"] == [1, 1], told
    assert told["lost"].count("Traceback") == 1 and "KeyError" in told["lost"] and "Traceback" not in told["survivor"]
    assert "KeyError" in (real["home"] / "crash/logs/rank-00001.log").read_text()


# ---- logs ------------------------------------------------------------------------------------------------------------


def test_a_log_has_the_whole_lines_of_a_rank_and_a_bar_as_it_was_left(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", sys.stdout)
        patch.setattr(sys, "stderr", sys.stderr)
        ranks.keep_log(tmp_path / "logs", 3, 8)
        print("half a ", end="")
        print("line", file=sys.stderr)
        print("and its end")
        for text in ("\r1/3", "\r2/3", "\r3/3", "\n"):
            sys.stderr.write(text)
    head, *lines = (tmp_path / "logs/rank-00003.log").read_text().splitlines()
    assert "rank 3 of 8, host" in head and lines == ["line", "half a and its end", "3/3"]
    assert capsys.readouterr().out == "half a and its end\n"


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path):
    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

    with (tmp_path / "screen").open("w") as screen:
        print("on the screen all the same", file=Copied(screen, Full()))
    assert (tmp_path / "screen").read_text() == "on the screen all the same\n"


def test_one_rank_alone_keeps_no_log_and_starts_no_watch(tmp_path):
    before = sys.stdout
    ranks.keep_log(tmp_path / "logs", 0, 1)
    ranks.watch()
    assert sys.stdout is before and not list(tmp_path.iterdir()) and ranks.current is None


def test_usr1_is_a_request_to_stop_as_term_is():
    handlers = {number: signal.getsignal(number) for number in ranks.StopRequest.SIGNALS}
    try:
        stop = ranks.StopRequest()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.agreed(1, 1) == signal.SIGUSR1
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL      # a second signal ends the process
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
