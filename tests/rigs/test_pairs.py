"""Each pair of choices of a command's settings runs, resumes and is the same on two ranks, or is refused in one line.

    python -m pytest -m rig -s tests/rigs/test_pairs.py              # half an hour on two idle cores; prints counts

pairs.yaml has the choices. Rows have each pair of them but those that are refused, which are tried alone.
"""

import contextlib
import itertools
import os
import random
import re
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import world
import yaml
from accelerate.state import AcceleratorState
from conftest import PATIENCE, save_vae
from forked import Life, ranks_of
from PIL import Image
from test_sharding import compile_quickly, fork, losses
from torch.nn.functional import adaptive_avg_pool2d
from training_runs import assert_same_end, killed

from latents import writer
from runtime import files

pytestmark = [pytest.mark.rig, pytest.mark.timeout(0)]
FACTORS = yaml.safe_load(Path(__file__).with_name("pairs.yaml").read_text())
REFUSED = FACTORS.pop("refused")
PORTS: list[str] = []  # of a row's commands


def pairs_of(command: str) -> tuple[list[tuple], dict[tuple, str]]:
    """Returns all pairs of a command's choices, and those that are refused, with the words of the sentence."""
    choices = [[(name, typed) for typed in all_typed] for name, all_typed in FACTORS[command].items()]
    pairs = [pair for two in itertools.combinations(choices, 2) for pair in itertools.product(*two)]
    refused = {(one, other): words for one, other in pairs for first, second, words in REFUSED[command]
               for a, b in ((one[1], other[1]), (other[1], one[1])) if re.search(first, a) and re.search(second, b)}
    return pairs, refused


def covering(command: str) -> list[dict[str, str]]:
    """Lists rows that have each pair of choices between them, and none that is refused."""
    factors, (pairs, refused), rng, rows = FACTORS[command], pairs_of(command), random.Random(0), []
    left, place = dict.fromkeys(pair for pair in pairs if pair not in refused), list(factors).index

    def made(row: dict[str, str], *choice: str) -> list[tuple]:
        return [tuple(sorted((choice, other), key=lambda each: place(each[0]))) for other in row.items()]

    while left:
        row = dict(next(iter(left)))
        for name in rng.sample([*factors], len(factors)):
            if name not in row:
                allowed = [typed for typed in factors[name] if not refused.keys() & made(row, name, typed)]
                row[name] = max(allowed, key=lambda typed: len(left.keys() & made(row, name, typed)))  # noqa: B023
        rows.append({name: row[name] for name in factors})
        for pair in itertools.combinations(rows[-1].items(), 2):
            left.pop(pair, None)
    return rows


# ---- what a row does on each rank -----------------------------------------------------------------------------------


def run(place: Path, command: str, *typed: str) -> None:
    """Runs a command as the first of its process, whose ranks meet at a port of their own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["MASTER_PORT"] = PORTS.pop() if PORTS else ""
    world.run(place, command, [*typed])


def train(home: Path, typed: list[str], rank: int) -> None:
    """Trains four steps, and again from a copy killed after two; with shards also without."""
    often = ["data.path=taught", "steps=4", "checkpoint.every=2", "checkpoint.keep_last=9", "log.every=1",
             "optimizer.warmup_steps=2", *typed]
    is_sharded = "sharding=fsdp" in typed
    for name in ["whole", "parts"] + ["replicas"] * is_sharded:
        if rank == 0 and name == "parts":
            killed(home / "whole", 2, home / "parts")
        run(home.parent, "train", *often, f"run_dir={home / name}", *["sharding=none"] * (name == "replicas"))
    if rank == 0:
        assert_same_end(home / "parts", home / "whole")
        whole, parts = (files.read_rows(home / name / "results.jsonl") for name in ("whole", "parts"))
        assert [row["metrics"] for row in whole] == [row["metrics"] for row in parts] and len(whole) in (0, 3)
        assert losses(home / "whole").isfinite().all()
        if is_sharded:
            torch.testing.assert_close(losses(home / "replicas"), losses(home / "whole"), rtol=1e-3, atol=1e-4)


def sample(home: Path, typed: list[str], rank: int) -> None:
    """Samples at two batch sizes; a folder's first picture is removed and made again."""
    suffix = next(Path(setting).suffix for setting in typed if setting.startswith("out="))
    for name, size in [("one", 32), ("other", 1)] + [("one", 32)] * (not suffix):
        if rank == 0 and (home / name).is_dir():
            min((home / name).glob("*.png")).unlink()
        run(home.parent, "sample", *typed, f"out={home / name}{suffix}", f"batch_size={size}")
    if rank == 0:
        assert_close(*(home / f"{name}{suffix}" for name in ("one", "other")), typed)


def fid(home: Path, typed: list[str], rank: int) -> None:
    run(home.parent, "fid", *typed, f"results={home}/results.jsonl")


def prepare_latents(home: Path, typed: list[str], rank: int) -> None:
    """Prepares twice; where this is the only process, the second time stops at the second shard and resumes."""
    write, is_stopped = writer.write_shard, "-2-" not in home.name
    for name in ("one", "other", "other"):
        if name == "other" and is_stopped:
            writer.write_shard = lambda out, shard, batches: write(out, shard, batches) if shard == 0 else 1 / 0
        with contextlib.suppress(ZeroDivisionError):
            run(home.parent, "prepare_latents", *typed, f"out={home / name}")
        writer.write_shard, is_stopped = write, is_stopped and name == "one"
    if rank == 0:
        assert_close(home / "one", home / "other", typed)


def work(home: Path, row: dict[str, str], ports: list[str]) -> None:
    """Does a row's work on a rank; the main one writes how it ended into `<home>.txt`."""
    rank, end, PORTS[:] = int(os.environ["RANK"]), "equal", ports
    try:
        globals()[home.name.split("-")[1]](home, " ".join(row.values()).split(), rank)
    except SystemExit as stop:
        end = str(stop.code)
    except BaseException:
        end = traceback.format_exc()
    if rank == 0:
        home.with_suffix(".txt").write_text(end)


def arrays_in(path: Path) -> list[np.ndarray]:
    """Lists the pictures, arrays, scores or bytes of an output."""
    if path.is_dir():
        return [array for file in sorted(path.glob("[!.]*")) for array in arrays_in(file)]
    if path.suffix == ".jsonl":
        return [np.array([*row["metrics"].values()]) for row in files.read_rows(path)]
    if path.suffix == ".npz":
        return [*np.load(path).values()]
    is_picture = path.suffix == ".png"
    return [np.asarray(Image.open(path)) if is_picture else np.frombuffer(path.read_bytes(), np.uint8).astype(float)]


def assert_close(one: Path, other: Path, typed: list[str]) -> None:
    """Pictures are equal to 1 of 255, latents to 1e-4, with bfloat16 to sixteen times that; the rest to 1e-7."""
    times = 16 if any("bf16" in setting for setting in typed) else 1
    for first, second in zip(arrays_in(one), arrays_in(other), strict=True):
        atol = {"uint8": 1, "float32": 1e-4}.get(str(first.dtype), 0) * times
        np.testing.assert_allclose(first.astype(float), second.astype(float), rtol=1e-7 * times, atol=atol)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The folder of tests/world.py, with latents that are moments, a fused network, programs, statistics and words."""
    def make() -> None:
        world.make(folder)
        save_vae(folder / "vae", levels=1)
        for name, shape in {"teacher": (-1, 4, 3), "features": (-1, 12)}.items():
            torch.jit.trace(lambda images, shape=shape: adaptive_avg_pool2d(images.float(), 2).reshape(shape),
                            torch.zeros(2, 3, 8, 8, dtype=torch.uint8)).save(str(folder / f"{name}.pt"))
        (folder / "words.txt").write_text("ant Ant\nbee Bee\n")
        run(folder, "prepare_latents", "source=shapes", "shapes.count=12", "out=moments", "autoencoder=vae",
            "mirror=true", "teacher=teacher.pt", "patch_size=4")
        run(folder, "train", "run_dir=fused", "model=sprint", "diffusion=rf")
        run(folder, "fid", "reference=null", "results=null", "num_samples=null", "reference_from=images.npz",
            "out=statistics.npz")

    folder = tmp_path_factory.mktemp("pairs")
    ended = Life(make).wait(PATIENCE)
    assert ended.code == 0, ended.printed
    return folder


def ranks_for(command: str, row: dict[str, str]) -> tuple[int, ...]:
    """Shards need two ranks; training that is not sharded samples other noise on two, and takes one."""
    return (1, 2) if command != "train" else (2,) if row["sharding"] else (1,)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("command", FACTORS)
def test_each_pair_of_choices_runs_and_is_the_same_resumed_and_on_two_ranks_or_is_refused(place, command, ranks):
    (pairs, refused), rows = pairs_of(command), covering(command)
    tries = [(place / f"new-{command}-{ranks}-{i}", row, "equal") for i, row in enumerate(rows)
             if ranks in ranks_for(command, row)]
    usual = {name: all_typed[0] for name, all_typed in FACTORS[command].items()}
    tries += [(place / f"new-{command}-alone-{i}", usual | dict(pair), words)
              for i, (pair, words) in enumerate(refused.items()) if ranks == 1]
    ports = [[ranks_of(2)[0]["MASTER_PORT"] for _ in range(3)] for _ in tries]
    fork(ranks, *(partial(work, home, row, free) for (home, row, _), free in zip(tries, ports, strict=True)),
         before=compile_quickly)
    failed = []
    for home, row, words in tries:
        said = home.with_suffix(".txt").read_text() if home.with_suffix(".txt").is_file() else "no end"
        if not re.fullmatch(words if words == "equal" else rf"{command}\.py: .*{re.escape(words)}.*", said):
            failed.append(f"{home.name} {' '.join(row.values())}: {said}")
    print(f"{command}, {ranks} ranks: {len(pairs)} pairs, {len(refused)} refused, the others in {len(rows)} rows; "
          f"{len(tries)} tried here, {len(failed)} failed")
    assert not failed, "\n".join(failed)
    for home, row, _ in tries:
        alone = place / home.name.replace("-2-", "-1-")  # there unless only one of the tests was asked for
        for path in alone.iterdir() if ranks == 2 and alone.is_dir() else ():
            assert_close(path, home / path.name, [*row.values()])
