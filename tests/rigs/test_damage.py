"""Damages files as downloads, disks and people do: each command succeeds or ends in one sentence, and runs no pickle.

    python -m pytest -m rig tests/rigs/test_damage.py                                       # 30 cases a reader
    RIG_CASES=300 RIG_SEED=1 python -m pytest -m rig tests/rigs/test_damage.py -k lmdb      # of one of them
    RIG_ONLY=17 python -m pytest -m rig tests/rigs/test_damage.py -k lmdb                   # one case, once more

A case changes one to three of the files of tests/world.py. It runs in a forked child, within limits of time and
memory, and may change no file that was there.
"""

import contextlib
import io
import json
import os
import pickle
import random
import shutil
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Ended, Life
from safetensors.torch import load, save
from world import EMA, GIVEN, entry_of, make, run, seen

from latents.folder import open_latents
from latents.loader import batches

pytestmark = [pytest.mark.rig, pytest.mark.timeout(0)]
CASES, SEED = int(os.environ.get("RIG_CASES", 30)), int(os.environ.get("RIG_SEED", 0))
ONLY = os.environ.get("RIG_ONLY")
SECONDS, MEMORY = 60, 4 * 2**30
HTML = b"<!DOCTYPE html><html><head><title>404 Not Found</title></head></html>\n"


class Harm:
    """A pickle of it makes a file named `executed` where it is loaded by a reader that trusts it."""

    def __reduce__(self) -> tuple:
        return os.system, ("touch executed",)


# ---- what happens to a file: content, random numbers -> content -----------------------------------------------------


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def flip(content: bytes, rng: random.Random) -> bytes:
    """Turns a bit, half of the time in the first kilobyte, where headers are."""
    changed = bytearray(content)
    changed[rng.randrange(min(1024, len(content)) if rng.random() < 0.5 else len(content))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def zeros(content: bytes, rng: random.Random) -> bytes:
    """Writes zeros over a part, as a file system does that lost a block."""
    at, length = rng.randrange(len(content)), rng.choice((8, 512, 4096))
    return content[:at] + bytes(min(length, len(content) - at)) + content[at + length :]


def drop(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + content[at + rng.choice((1, 8, 512)) :]


def more(content: bytes, rng: random.Random) -> bytes:
    return content + bytes(rng.choice((1, 512, 5000)))


def web_page(content: bytes, rng: random.Random) -> bytes:
    return HTML


def nothing(content: bytes, rng: random.Random) -> bytes:
    return b""


def pickled(content: bytes, rng: random.Random) -> bytes:
    """Puts a pickle in the place of the file: bare, as torch writes it, new or old, or as numpy does."""
    stream = io.BytesIO()
    match rng.randrange(4):
        case 0:
            return pickle.dumps(Harm(), rng.randrange(5))
        case 1:
            torch.save({"ema": Harm()}, stream)
        case 2:
            torch.save([Harm()], stream, _use_new_zipfile_serialization=False)
        case 3:
            np.save(stream, np.array([Harm(), None], object), allow_pickle=True)
    return stream.getvalue()


OF_BYTES = (cut, cut, flip, flip, zeros, drop, more, web_page, nothing, pickled)
ODD_VALUES = (None, True, -1, 0, 2, 1.5, 10**6, 2**63, "", "x", "../x", "/etc/passwd", [], {}, [0], ["a", 1], {"a": 1})


def json_value(content: bytes, rng: random.Random) -> bytes:
    """Puts another value in the place of one in a JSON file, or takes it away."""
    plain, places = json.loads(content), []

    def walk(group) -> None:
        for key in group if isinstance(group, dict) else range(len(group)):
            places.append((group, key))
            if isinstance(group[key], dict | list):
                walk(group[key])

    walk(plain)
    group, key = rng.choice(places)
    if rng.random() < 0.2:
        del group[key]
    else:
        group[key] = rng.choice(ODD_VALUES)
    return json.dumps(plain).encode()


def array(content: bytes, rng: random.Random) -> bytes:
    """Writes an npy of another type, shape or order, or with a value that cannot be."""
    values, stream = np.load(io.BytesIO(content)), io.BytesIO()
    match rng.randrange(5):
        case 0:
            values = values.astype(rng.choice(("<f2", ">f4", "<f8", "<i4", "<i8", "|u1", "|b1", "<U3", "<c8")))
        case 1:
            values = rng.choice((values[:0], values[:-1], values[None], values.ravel(), values[..., None]))
        case 2:
            values = np.asfortranarray(values)
        case 3:
            values = values.copy()
            with np.errstate(all="ignore"):
                number = np.array(rng.choice((np.nan, np.inf, -1.0, 1e5, 1e30)))
                values.reshape(-1)[rng.randrange(values.size)] = number.astype(values.dtype)
        case 4:
            values = np.array([Harm()], object)
    np.save(stream, values, allow_pickle=True)
    return stream.getvalue()


def tensors(content: bytes, rng: random.Random) -> bytes:
    """Writes a file of weights with a tensor missing, misshapen, renamed, not finite or of another type."""
    is_pt = content[:2] == b"PK"
    state = torch.load(io.BytesIO(content), weights_only=True) if is_pt else load(content)
    held = state.get("ema", state)
    name = rng.choice(sorted(held))
    tensor = held.pop(name)
    match rng.randrange(7):
        case 0:
            held[name] = torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else tensor
        case 1:
            held[name] = tensor.flatten()[: tensor.numel() // 2].clone()
        case 2:
            held[rng.choice(("", "x", "blocks.99.attn.qkv.weight", f"module.{name}", "../x"))] = tensor
        case 3:
            held[name] = tensor.to(rng.choice((torch.int64, torch.bool, torch.float16, torch.float64)))
        case 4:
            held[name] = tensor[None].clone()
        case 5 if is_pt:
            held[name] = Harm()
    if not is_pt:
        return save(state)
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def member(content: bytes, rng: random.Random) -> bytes:
    """Damages a member of a zip, an npz or a tar, which is packed again: the archive itself is whole."""
    stream = io.BytesIO()
    if content[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(content)) as old:
            files, method = {name: old.read(name) for name in old.namelist()}, old.infolist()[0].compress_type
    else:
        with tarfile.open(fileobj=io.BytesIO(content)) as old:
            files, method = {entry.name: old.extractfile(entry).read() for entry in old if entry.isfile()}, None
    name = rng.choice(sorted(files))
    if rng.random() < 0.3:  # missing, or of another name
        moved = files.pop(name)
        if rng.random() < 0.7:
            files[rng.choice(("x.npy", "../outside.npy", "/nowhere/outside.png", "a/b/c.png", "0.cls"))] = moved
    else:
        files[name] = rng.choice(ways(name))(files[name], rng)
    if method is None:
        with tarfile.open(fileobj=stream, mode="w") as new:
            for name, data in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                new.addfile(entry, io.BytesIO(data))
    else:
        with zipfile.ZipFile(stream, "w", method) as new:
            for name, data in files.items():
                new.writestr(name, data)
    return stream.getvalue()


def ways(name: str) -> tuple[Callable, ...]:
    """The damages for a file of such a name."""
    ending = Path(name).suffix
    if name.endswith("data.mdb"):  # lmdb maps its file: of what is not cut, the library may end the process
        return (cut, web_page, nothing)
    of_kind = {".json": json_value, ".npy": array, ".pt": tensors, ".safetensors": tensors, ".zip": member,
               ".npz": member, ".tar": member}.get(ending)
    return OF_BYTES + (of_kind,) * 5 if of_kind else OF_BYTES


def damage(source: Path, rng: random.Random) -> list[str]:
    """Damages one to three files of a folder, or the file; returns the changes in words."""
    done = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        files = sorted(path for path in [source, *source.rglob("*")] if path.is_file() and path.name != ".lock")
        if not files:
            break
        file = rng.choice(files)
        if source.is_dir() and rng.random() < 0.15:
            done.append(f"{file.name} gone")
            file.unlink()
            continue
        way, content = rng.choice(ways(file.name)), file.read_bytes()
        with contextlib.suppress(Exception):  # what an earlier change has made impossible
            file.write_bytes(way(content, rng) if content else content)
            done.append(f"{way.__name__} {file.relative_to(source.parent)}")
    return done


# ---- who reads what -------------------------------------------------------------------------------------------------

READERS = [  # command and settings, the setting that names what is damaged, and that
    ("train", "data.path", "latents"), ("train data.kind=sample data.scale=1 data.num_classes=3", "data.path", "tars"),
    ("train diffusion_name=edm", "init_from", "weights.pt"), ("train", "init_from", "run"),
    ("train steps=5", "run_dir", "run"),
    *(("import_latents", "source", source) for source in ("pairs", "repa", "lmdb", "vavae", "tars")),
    ("import_latents format=repa", "source", "repa.zip"),
    *(("prepare_latents", "source", source) for source in ("pets", "pets.zip", "pets.tar")),
    ("prepare_latents", "label_map", "map.json"),
    ("fid", "images", "four"), ("fid num_samples=2 metrics=[fd_pixels]", "images", "pets.zip"),
    ("fid", "images", "images.npz"), ("fid images=four", "reference", "images.npz"),
    ("fid images=four", "reference", "ref.npz"),
    ("fid images=four features=inception", "features_weights", "weights.pt"), ("fid", "checkpoint", "run"),
    ("sample", "checkpoint", "run"), ("rf", "checkpoint", "flow"), ("export", "checkpoint", "run"),
    ("sample diffusion_name=edm num_heads=2", "checkpoint", "weights.pt"), ("sample", "autoencoder", "weights.pt"),
    ("sample diffusion_name=edm num_heads=2", "checkpoint", "ema.safetensors"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    place = make(tmp_path_factory.mktemp("damage"))
    with tarfile.open(place / "pets.tar", "w") as tar:
        for index, name in enumerate(("ant/0.png", "bee/1.png")):
            tar.add(place / "pets" / name, f"{index}.png")
            (place / "label").write_text(str(index))
            tar.add(place / "label", f"{index}.cls")
    shutil.copy(place / "run" / EMA, place / "ema.safetensors")
    features = np.random.default_rng(0).normal(size=(300, 192))
    np.savez(place / "ref.npz", mu=features.mean(0), sigma=np.cov(features, rowvar=False), space="pixels-8x8")
    for command in GIVEN:  # imported here, so that every child has it
        entry_of(command)
    return place


def try_case(world: Path, line: str, setting: str, source: str, rng: random.Random | None) -> tuple[str, str]:
    """Damages a copy and runs the command on it; returns how it ended, and the changes and what was printed.

    Without random numbers nothing is damaged.
    """
    command, *typed = line.split()
    copy = world / f"new-{source}"
    shutil.copytree(world / source, copy) if (world / source).is_dir() else shutil.copy(world / source, copy)
    done, before = damage(copy, rng) if rng else [], seen(world)
    given = f"{setting}=[{copy.name}]" if setting == "runs" else f"{setting}={copy.name}"

    def live() -> None:
        run(world, command, [given, *typed])
        if command in ("prepare_latents", "import_latents"):  # what came in must train
            latents = open_latents(world / "new")
            next(stream := batches(latents, 1, seed=0))
            stream.close()

    ended = Life(live, MEMORY).wait(SECONDS)
    outcome = outcome_of(ended, command)
    if (world / "executed").exists() or (copy / "executed").exists():
        outcome = "a pickle was run"
    elif seen(world) != before:
        outcome = "something that was there has changed"
    elif outcome == "success" and source in ("run", "flow") and setting == "checkpoint":
        ema = copy / EMA
        if not ema.is_file() or ema.read_bytes() != (world / source / EMA).read_bytes():
            outcome = "a checkpoint was taken that is not what its record says"
    for path in world.glob("new*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (world / "executed").unlink(missing_ok=True)
    return outcome, f"{', '.join(done)}\n{ended.printed[-2000:]}"


def outcome_of(ended: Ended, command: str) -> str:
    """Returns how a command has ended: "success", "sentence", or what is wrong."""
    sentences = [line for line in ended.printed.splitlines() if line.startswith(f"{command}.py: ")]
    if ended.out_of_time:
        return f"not ended after {SECONDS} s"
    if ended.code < 0:
        return f"ended by signal {-ended.code}"
    if ended.has_traceback or "Exception ignored" in ended.printed:
        return "a traceback"
    if ended.code > 0 and (len(sentences) != 1 or "memory is full" in ended.printed):
        return "no sentence, or memory that is full"
    return "sentence" if ended.code else "success"


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: f"{reader[0].split()[0]} {reader[1]}={reader[2]}")
def test_damaged_files_end_in_success_or_in_a_sentence(world, reader):
    whole, printed = try_case(world, *reader, None)
    assert whole == ("sentence" if reader[1] in ("autoencoder", "features_weights") else "success"), printed
    counts, failures = Counter(), []
    for number in [int(ONLY)] if ONLY else range(CASES):
        outcome, printed = try_case(world, *reader, random.Random(f"{SEED} {reader} {number}"))
        counts[outcome] += 1
        if outcome not in ("success", "sentence"):
            failures.append(f"RIG_SEED={SEED} RIG_ONLY={number}: {outcome}: {printed}")
    print(f"{reader[0]} {reader[1]}={reader[2]}: {', '.join(f'{count} {how}' for how, count in counts.items())}")
    assert not failures, "\n\n".join(failures[:5])


def test_the_pickles_of_this_rig_would_run(tmp_path):
    content = pickled(b"", random.Random(1))
    with contextlib.chdir(tmp_path), contextlib.suppress(Exception):
        np.load(io.BytesIO(content), allow_pickle=True)
    with contextlib.chdir(tmp_path):
        pickle.loads(pickle.dumps(Harm()))
    assert (tmp_path / "executed").exists()


def test_the_rig_knows_how_a_command_ends():
    def ended(work: Callable[[], None], seconds: float = 20, memory: int | None = None) -> str:
        return outcome_of(Life(work, memory).wait(seconds), "train")

    def sentence() -> None:
        raise SystemExit("train.py: a sentence.")

    assert ended(lambda: None) == "success" and ended(sentence) == "sentence"
    assert "traceback" in ended(lambda: 1 / 0) and "traceback" in ended(lambda: bytearray(2**30), memory=2**28)
    assert "signal 9" in ended(lambda: os.kill(os.getpid(), 9)) and "no sentence" in ended(lambda: os._exit(3))
    assert "not ended" in ended(lambda: __import__("time").sleep(60), seconds=0.2)
