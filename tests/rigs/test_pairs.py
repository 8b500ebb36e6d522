"""Each pair of choices of a command's settings (pairs.yaml) runs and is the same again, or is refused in one line.

    python -m pytest -m rig -s tests/rigs/test_pairs.py              # half an hour on two idle cores; prints counts

Training runs again from a copy that was killed, and in replicas where it is sharded; other commands take one image
after the other, and also two ranks.
"""

import itertools
import json
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
from test_sharding import fork, losses
from training_runs import assert_same_end, killed

pytestmark = [pytest.mark.rig, pytest.mark.timeout(0)]
FACTORS = yaml.safe_load(Path(__file__).with_name("pairs.yaml").read_text())
REFUSED = FACTORS.pop("refused")
FOUR_STEPS = ["data.path=taught", "steps=4", "checkpoint.every=2", "checkpoint.keep_last=9", "log.every=1",
              "optimizer.warmup_steps=2", "evaluate.reference=images.npz", "evaluate.num_samples=4"]


def pairs_of(command: str) -> tuple[set[frozenset], dict[frozenset, None]]:
    """Returns the pairs of a command's choices that are refused, and the others, in order."""
    choices = [[(name, typed) for typed in all_typed] for name, all_typed in FACTORS[command].items()]
    pairs = [pair for two in itertools.combinations(choices, 2) for pair in itertools.product(*two)]
    refused = {frozenset(pair) for pair in pairs for (_, one), (_, other) in (pair, pair[::-1])
               for first, second in REFUSED[command] if re.search(first, one) and re.search(second, other)}
    return refused, dict.fromkeys(pair for pair in map(frozenset, pairs) if pair not in refused)


def covering(command: str) -> list[dict[str, str]]:
    """Lists rows that have each pair of choices between them, and none that is refused."""
    factors, (refused, left), rng, rows = FACTORS[command], pairs_of(command), random.Random(0), []

    def gain(row: dict[str, str]) -> int:
        pairs = {*map(frozenset, itertools.combinations(row.items(), 2))}
        return -len(refused & pairs) or len(left.keys() & pairs)

    while left:
        tries = [{name: rng.choice(all_typed) for name, all_typed in factors.items()} for _ in range(500)]
        rows.append(max((row | dict(next(iter(left))) for row in tries), key=gain))
        assert gain(rows[-1]) > 0, "no row without a refused pair was found"
        left = dict.fromkeys(pair for pair in left if not pair <= rows[-1].items())
    return rows


def run_again(home: Path, command: str, typed: list[str], ports: list[str]) -> None:
    """Runs a command on this rank once and again; the main one compares."""
    is_training, is_main = command == "train", os.environ["RANK"] == "0"
    suffix = next((Path(setting).suffix for setting in typed if setting.startswith("out=")), "")
    where = {"train": "run_dir={}", "fid": "results={}.jsonl"}.get(command, f"out={{}}{suffix}")
    for name, more in [("one", []), ("other", [] if is_training else ["batch_size=1"]),
                       *[("replicas", ["sharding=none"])] * ("sharding=fsdp" in typed)]:
        if is_training and is_main and name == "other":
            killed(home / "one", 2, home / "other")
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ["MASTER_PORT"] = ports.pop()
        world.run(home.parent, command, [*FOUR_STEPS * is_training, *typed, where.format(home / name), *more])
    if is_main and is_training:
        assert_same_end(home / "other", home / "one")
        for run in home.glob("replicas"):
            torch.testing.assert_close(losses(run), losses(home / "one"), rtol=1e-3, atol=1e-4)
    elif is_main:
        assert_close(*(home / f"{name}{suffix or '.jsonl' * (command == 'fid')}" for name in ("one", "other")), typed)


def work(home: Path, typed: str, ports: list[str]) -> None:
    """Does a row's work; the main rank writes how it ended into `<home>.txt`."""
    end = "equal"
    try:
        run_again(home, home.name.split("-")[1], typed.split(), ports)
    except SystemExit as stop:
        end = str(stop.code)
    except BaseException:
        end = traceback.format_exc()
    if os.environ["RANK"] == "0":
        home.with_suffix(".txt").write_text(end)


def compile_quickly(rank: int) -> None:
    """Traces and checks what torch.compile would make, and runs it without making kernels; breaks are errors."""
    torch.compile = partial(torch.compile, backend="aot_eager", fullgraph=True)


def arrays_in(path: Path) -> list[np.ndarray]:
    """Lists the pictures, arrays or scores of an output."""
    if path.is_dir():
        return [array for file in sorted(path.glob("[!.]*")) for array in arrays_in(file)]
    if path.suffix == ".jsonl":
        return [np.array([*json.loads(line)["metrics"].values()]) for line in path.read_text().splitlines()]
    read = {".npz": lambda file: [*np.load(file).values()], ".npy": lambda file: [np.load(file)],
            ".png": lambda file: [np.asarray(Image.open(file))]}
    return read.get(path.suffix, lambda file: [])(path)


def assert_close(one: Path, other: Path, typed: list[str]) -> None:
    """Pictures are equal to 1 of 255, latents to 1e-4 or what float16 rounds; with bfloat16 to sixteen times that."""
    times = 16 if any("bf16" in setting for setting in typed) else 1
    for first, second in zip(arrays_in(one), arrays_in(other), strict=True):
        atol = {"uint8": 1, "float16": 2e-3, "float32": 1e-4}.get(str(first.dtype), 0) * times
        np.testing.assert_allclose(first.astype(float), second.astype(float), rtol=1e-5 * times, atol=atol)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The folder of tests/world.py, with latents that are moments, a fused network, programs and statistics."""
    def make() -> None:
        world.make(folder)
        save_vae(folder / "vae", levels=1)
        world.run(folder, "prepare_latents", ["source=shapes", "shapes.count=12", "out=moments", "autoencoder=vae",
                                              "mirror=true", "teacher=python:own_code.quarters", "patch_size=4"])
        world.run(folder, "train", ["run_dir=fused", "model=sprint", "diffusion=rf"])
        world.run(folder, "fid", ["reference=null", "results=null", "num_samples=null", "reference_from=images.npz",
                                  "out=statistics.npz"])

    folder = tmp_path_factory.mktemp("pairs")
    ended = Life(make).wait(PATIENCE)
    assert ended.code == 0, ended.printed
    return folder


@pytest.mark.parametrize("command", FACTORS)
def test_each_pair_of_choices_runs_and_is_the_same_again_or_is_refused(place, command):
    (refused, others), rows, failed = pairs_of(command), covering(command), []
    usual = {name: all_typed[0] for name, all_typed in FACTORS[command].items()}
    for ranks in (1, 2):  # shards need two; training that is not sharded samples other noise on two
        tries = {place / f"new-{command}-{ranks}-{i}": row for i, row in enumerate(rows)
                 if command != "train" or bool(row["sharding"]) == (ranks == 2)}
        alone = {place / f"new-{command}-alone-{i}": usual | dict(pair) for i, pair in enumerate(refused)}
        works = [(home, " ".join(row.values()), [ranks_of(2)[0]["MASTER_PORT"] for _ in range(3)])
                 for home, row in (tries | alone if ranks == 1 else tries).items()]
        fork(ranks, *(partial(work, *each) for each in works), before=compile_quickly)
        for home, typed, _ in works:
            ended = home.with_suffix(".txt").read_text() if home.with_suffix(".txt").is_file() else "no end"
            if not re.fullmatch("equal" if home in tries else rf"{command}\.py: [^\n]+", ended):
                failed.append(f"{home.name} {typed}: {ended}")
            elif ranks == 2 and command != "train":
                assert_close(place / f"new-{command}-1-{home.name.split('-')[-1]}", home, typed)
    print(f"{command}: {len(refused)} pairs refused, {len(others)} in {len(rows)} rows; {len(failed)} failed")
    assert not failed, "\n".join(failed)
