"""Wrong settings for every command, as values and as command lines; what `scripts/fuzz.py` draws from.

A case is run by the command itself, in a forked child of its own, up to where its real work would begin, on what real
commands have made once.
"""

import atexit
import contextlib
import copy
import ctypes
import functools
import importlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from omegaconf import OmegaConf

from runtime import schema
from scripts import forks
from scripts.fuzz import Accepted, Reader, snapshot
from weights import checkpoint as checkpoints

PROGRAMS = {      # each with its config
    "train": "config", "sample": "sample", "rf": "rf", "fid": "fid", "scripts.sweep_guidance": "sweep_guidance",
    "scripts.prepare_latents": "prepare_latents", "scripts.import_latents": "import_latents",
    "scripts.export": "export", "scripts.merge_lora": "merge_lora", "scripts.report": "report",
    "scripts.study": "study", "scripts.benchmark": "benchmark", "scripts.choose_routes": "choose_routes",
}
for program in PROGRAMS:      # here, so that every child has them
    importlib.import_module(program)

SECONDS = 20      # of the processor, where scripts/fuzz.py looks at the clock; memory is bounded there
CANARY = "executed"              # a file that code in a case's files would make


# ---- what real commands have made once ------------------------------------------------------------------------------

# Of the process that has imported this; in a folder named by TREAD_FUZZ it is made once and stays.
HOME = Path(os.environ.get("TREAD_FUZZ", Path(tempfile.gettempdir()) / f"tread-fuzz-{os.getpid()}"))
GIVEN = HOME / "given"
SMALL = ["experiment=quickstart", f"data.path={GIVEN}/latents", "model.hidden_size=16", "model.num_heads=2",
         "model.depth=6", "batch_size=4", "samples.every=0", "log.every=1", "checkpoint.every=2", "steps=4",
         "samples.num_steps=2", "samples.seeds=0-1", "evaluate.num_samples=4", "evaluate.num_steps=2",
         "evaluate.batch_size=4", "optimizer.warmup_steps=1"]
STUDY = ["study=rehearsal", "tasks=[report]"]


@functools.cache
def given() -> Path:
    """Returns a folder of latents, images, runs of either diffusion, an adapter, weights, scores and a study."""
    if (GIVEN / "ready").is_file():
        return GIVEN
    shutil.rmtree(GIVEN, ignore_errors=True)
    (GIVEN / "elsewhere").mkdir(parents=True)

    def do(program: str, *arguments: str) -> None:
        with contextlib.chdir(GIVEN / "elsewhere"):
            ended = forks.run(forks.command(program, *arguments), seconds=300)
        if ended.code:
            raise RuntimeError(f"{program} {arguments}: {ended.said}")

    do("scripts.prepare_latents", "source=shapes", "shapes.count=24", f"out={GIVEN}/latents")
    do("train", *SMALL, f"run_dir={GIVEN}/run")
    do("train", *SMALL, f"run_dir={GIVEN}/flow", "diffusion=rf")
    do("train", *SMALL, f"run_dir={GIVEN}/adapter", f"init_from={GIVEN}/run", "lora.rank=2")
    do("sample", f"checkpoint={GIVEN}/run", "seeds=0-7", "num_steps=1", f"out={GIVEN}/images.npz")
    do("sample", f"checkpoint={GIVEN}/run", "seeds=0-7", "num_steps=1", f"out={GIVEN}/images")
    for number, image in enumerate(sorted((GIVEN / "images").glob("*.png"))):
        (GIVEN / "classes" / f"class{number % 2}").mkdir(parents=True, exist_ok=True)
        shutil.copy(image, GIVEN / "classes" / f"class{number % 2}")
    do("fid", f"reference_from={GIVEN}/images.npz", f"out={GIVEN}/reference.npz", "features=pixels",
       "reference_images=4")
    do("fid", f"images={GIVEN}/images.npz", f"reference={GIVEN}/reference.npz", "features=pixels",
       f"results={GIVEN}/scored/results.jsonl", "keep_features=true", "batch_size=4")
    do("fid", f"checkpoint={GIVEN}/run", f"reference={GIVEN}/reference.npz", "features=pixels", "num_samples=4",
       "num_steps=1", "metrics=[fd_pixels]")
    do("scripts.export", f"checkpoint={GIVEN}/run", "to=dit", f"out={GIVEN}/weights.pt")
    shutil.copy(checkpoints.latest(GIVEN / "run") / "ema.safetensors", GIVEN / "weights.safetensors")
    make_study(GIVEN / "study")
    (GIVEN / "features").mkdir()
    shutil.copy(GIVEN / "weights.pt", GIVEN / "features" / "inception.pth")
    np.save(GIVEN / "array.npy", np.zeros(3))
    for name, value in (("features", np.ones((1, 4, 4, 4), np.float32)), ("labels", np.array([1]))):
        (GIVEN / "pairs" / f"imagenet256_{name}").mkdir(parents=True)
        np.save(GIVEN / "pairs" / f"imagenet256_{name}" / "0.npy", value)
    (GIVEN / "empty").touch()
    (GIVEN / "text").write_text("words\n")
    (GIVEN / "ready").touch()
    return GIVEN


def make_study(folder: Path) -> None:
    """Writes a study.json and a timing.json as scripts/study.py does, of two variants and two seeds."""
    def score(step: int, value: float) -> dict:
        return {"metric": "fd_pixels", "value": value, "num_samples": 4, "step": step, "images": 4 * step,
                "flops": 8.0 * step, "seconds": 0.5 * step, "guidance": "unguided", "seeds": "0-3", "device": "cpu",
                "commit": None, "torch": "2", "extractor": "pixels", "extractor_sha256": None,
                "reference_sha256": "0", "sampling_precision": "fp32", "multiply_adds_an_image": 7}

    runs = [{"variant": name, "seed": seed, "step": 60, "steps": 60, "train": ["batch_size=8"],
             "scores": [score(0, 3.0), score(60, 1.0 + seed + len(name) / 10)]}
            for name in ("dit", "tread") for seed in (0, 1)]
    timing = {"device": "cpu", "commit": None, "torch": "2", "rounds": {"dit": [0.5, 0.6], "tread": [0.4]}}
    floor = [{**score(0, 1.0), "images": "test"}]
    folder.mkdir()
    told = {"name": "study-rehearsal", "runs": runs, "timing": timing, "floor": floor, "commit": None,
            "crossings": [{"between": ["dit", "tread"], "axis": "images", "at": None, "better_at_the_end": None,
                           "difference": None, "spread": None, "n": 0}]}
    (folder / "study.json").write_text(json.dumps(told))
    (folder / "timing.json").write_text(json.dumps(timing))


@atexit.register
def clear() -> None:
    if HOME.name == f"tread-fuzz-{os.getpid()}":      # children leave it
        shutil.rmtree(HOME, ignore_errors=True)


# ---- a command in a child of its own, up to its work ----------------------------------------------------------------

WORK = {      # what begins the work of each program: (module, name)
    "train": [("train", "train_step"), ("train", "generate"), ("fid", "generate")],
    "sample": [("sample", "generate")], "rf": [("sample", "generate")],
    "fid": [("fid", "generate"), ("fid", "extract")],
    "scripts.sweep_guidance": [("fid", "generate"), ("fid", "extract")],
    "scripts.prepare_latents": [("scripts.prepare_latents", "rows_of")],
    "scripts.import_latents": [("scripts.import_latents", "rows_of")], "scripts.study": [("scripts.study", "call")],
    "scripts.benchmark": [("scripts.benchmark", "run")], "scripts.choose_routes": [("subprocess", "run")],
}


def reached(*_: object, **__: object) -> None:
    sys.exit(0)


def no_network(*_: object, **__: object) -> None:
    raise OSError("there is no network here")


@functools.cache
def composed(program: str, overrides: tuple[str, ...]) -> dict:
    """Composes a program's settings, as its command line does, once."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(schema.CONFIGS), version_base="1.3"):
        return OmegaConf.to_container(compose(PROGRAMS[program], [*overrides]), resolve=True)


def at_home(value: Any, folder: Path) -> Any:
    """Puts the case's folder for {case}, and that of what is given for {given}, into all texts of a value."""
    match value:
        case str():
            return value.replace("{case}", str(folder)).replace("{given}", str(GIVEN))
        case list():
            return [at_home(part, folder) for part in value]
        case dict():
            return {key: at_home(part, folder) for key, part in value.items()}
    return value


def child(program: str, folder: Path, arguments: list[str], plain: dict | None, through: bool) -> Callable[[], None]:
    """Returns what runs a program: with a command line, or with settings that were composed already."""
    def work() -> None:
        os.chdir(folder / "out")
        os.environ.update(HOME=str(folder / "out"), HF_HUB_OFFLINE="1", WANDB_MODE="disabled")
        torch.hub.download_url_to_file = no_network
        sys.argv = [f"{program.replace('.', '/')}.py", *arguments]
        for module, name in () if through else WORK.get(program, ()):
            setattr(sys.modules[module], name, reached)
        if plain is not None:
            schema.compose = lambda _: [copy.deepcopy(plain)]
        module = sys.modules["sample" if program == "rf" else program]
        if program == "scripts.report":
            sys.argv[1:] = module.as_settings(sys.argv[1:])
        if program == "scripts.sweep_guidance":
            sys.argv[1:] = [module.onto_the_grid(argument) for argument in sys.argv[1:]]
        (module.compare_guided if program == "rf" else module.main)()
    return work


def stamps(folder: Path) -> dict[str, tuple]:
    """Returns what the file system says of all below a folder: fast, for what no case is to change."""
    return {str(path): (seen.st_mode, seen.st_size, seen.st_mtime_ns, seen.st_ino)
            for path in folder.rglob("*") for seen in [path.lstat()]}


def bound_to_parent() -> None:
    """Ends this process with its parent, or when it has had its seconds of the processor."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)      # PR_SET_PDEATHSIG
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))


def run_command(
    program: str, folder: Path, arguments: list[str], plain: dict | None = None, *, through: bool = False,
    must_refuse: str | None = None, asks_much: bool = False, prepare: Callable[[], object] = lambda: None,
) -> None:
    """Runs a program in a child, and ends as it did, in the words of scripts/fuzz.py.

    `must_refuse` says why success would be wrong; `asks_much` that memory may run out, as the settings ask for it.
    """
    (folder / "out").mkdir(exist_ok=True)
    before = snapshot(folder / "out", ()), stamps(GIVEN)
    work = child(program, folder, arguments, plain, through)
    ended = forks.run(lambda: (bound_to_parent(), prepare(), work()))
    after = snapshot(folder / "out", ()), stamps(GIVEN)
    said = ended.said.strip()
    if any((place / CANARY).exists() for place in (folder, folder / "out", GIVEN)):
        raise Accepted(f"code in a file was executed\n{said[-1500:]}")
    if ended.code == -signal.SIGXCPU:
        sys.__stdout__.write(f"{SECONDS} s of the processor\n{said[-1500:]}")
        sys.__stdout__.flush()
        time.sleep(600)      # until scripts/fuzz.py's time is over, too
    if ended.code < 0:
        print(said[-1500:], file=sys.__stderr__)
        os.kill(os.getpid(), -ended.code)
    if ended.has_traceback:
        raise RuntimeError(said[-4000:])
    if after[1] != before[1]:
        changed = [name for name in {*before[1], *after[1]} if before[1].get(name) != after[1].get(name)]
        raise Accepted(f"what was given has changed: {changed[:5]}\n{said[-1500:]}")
    if ended.code == 0:
        if must_refuse:
            raise Accepted(f"{must_refuse}\n{said[-1500:]}")
        return
    if lost := [name for name, seen in before[0].items() if after[0].get(name) != seen and seen[0] != stat.S_IFDIR]:
        raise Accepted(f"it is refused, and yet {lost[:5]} changed\n{said[-1500:]}")
    found = re.search(rf"^{re.escape(Path(program.replace('.', '/')).name)}\.py: .+", said, re.M | re.S)
    sentence = found[0] if found else ""
    if ended.code == 2 and ".py: error: " in sentence:      # argparse's, which ends in what it did not know
        sentence = f"{sentence[:1000]}."
    if asks_much:
        sentence = sentence.replace("memory is full", "memory is not so large")
    sys.exit(sentence)


# ---- values that are wrong, or odd ----------------------------------------------------------------------------------

# What lies in each case's folder, beside the given.
ODD_PLACES = ("{case}/fifo", "{case}/loop", "{case}/dangling", "{case}/full", "{case}/null", "{case}/zero",
              "{case}/socket", "{case}/folder", "{case}/file", "{case}/link", "{case}/out/x/../y", "{case}/file/below",
              "{case}/out/" + "n" * 300, "{case}/out/" + "d/" * 3000, "{case}/out/é名🙂", "{case}/out/a b'c\"d",
              "{case}/out/-x", "{case}/out/new", "{case}/out/new.png", "{case}/out/new.npz", "{case}/null.png",
              "{case}/fifo.npz", "{case}/folder.png", "/proc/self/nothing", "/proc/1/x.npz", "/sys/x.png")
ODD_FILES = (*ODD_PLACES, "/dev/zero", "/dev/full", "/proc/self/mem", "/", "~", "*", "{given}/*",
             "{given}/run", "{given}/flow", "{given}/adapter", "{given}/latents", "{given}/images",
             "{given}/classes", "{given}/images.npz", "{given}/reference.npz", "{given}/weights.pt",
             "{given}/weights.safetensors", "{given}/study", "{given}/study/study.json", "{given}/empty",
             "{given}/text",
             "{given}/run/metrics.jsonl", "{given}/run/checkpoints", "{given}/run/checkpoints/step-00000004",
             "{given}/run/checkpoints/step-00000004/meta.json",
             "{given}/run/checkpoints/step-00000004/training.safetensors",
             "{given}/adapter/checkpoints/step-00000004/ema.safetensors", "{given}/latents/metadata.json",
             "{given}/array.npy", "{given}/pairs")
NUMBERS = (0, -1, 1, 2, 3, 7, 16, 100, 255, 65536, 65537, 10**6, 2**31 - 1, 2**31, 2**53 + 1, 2**62, 2**62 + 1, 2**63,
           2**64, 10**30, -2**63, 0.5, -0.5, 1.0, -0.0, 1e-300, 5e-324, 1e-20, 1e20, 1e308, float("nan"),
           float("inf"), -float("inf"))
TEXTS = ("", " ", "x", "nan", "inf", "-1", "1e5", "0x10", "null", "true", "0-63", "5-1", "0-9999999999", "1,2,3",
         "\ud800", "é名🙂", "a\0b", "a\nb", "\x1b[2J", "a" * 5000, "${oc.env:HOME}", "{runs}", "%s", "\u202e", "none",
         "identity", "python:os.system", "python:os.path.join", "sd_vae_ema", "required", "pixels", "inception", "adm",
         "dinov2", "torchscript", "fd_pixels", "precision", "cuda", "auto", "DiT-S/2", "l1", "heun", "rf", "edm")
DEEP: list = []
for _ in range(200):
    DEEP = [DEEP]
ODD_PLAIN = st.one_of(
    st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.integers(-10, 300),
    st.floats(-10, 10), st.text(max_size=8), st.sampled_from(ODD_FILES),
    st.sampled_from([[], [[]], {}, {"a": 1}, [None], ["x", 1], [1, [2]], [0, 0], [0.5, 0.9], [0.9, 0.5], DEEP,
                     [0] * 10000, {"name": "edm"}, {"name": "edm", "sigma_data": 0}, {"name": ["edm"]}, {"": {}}]),
    st.lists(st.sampled_from(NUMBERS), max_size=3))
PLAUSIBLE = {      # by the last part of a key: what a user might mean
    "name": ["x"], "diffusion": [{"name": "rf"}, {"name": "ddpm"}, {"name": "edm", "routed_loss": "kept"}],
    "diffusion_name": ["edm", "rf", "dit", "sit", "lightning", "tread", "ddpm", "repa"],
    "routes": [[], None, [{"start_layer_idx": 1, "end_layer_idx": -2, "selection_ratio": 0.5}],
               [{"start_layer_idx": 0, "end_layer_idx": 5, "selection_ratio": 0.99}],
               [{"start_layer_idx": 1, "end_layer_idx": 2}], [{"start_layer_idx": 3, "end_layer_idx": 1}]],
    "guidance_scales": [[None, 1.5], [2]], "metrics": [["fd_pixels"], ["precision", "recall"], ["fid"]],
    "trackers": [["tensorboard"], ["wandb"]], "classes": ["0-2", [0, 1], "circle"], "seeds": ["0-7", [3]],
    "features": ["pixels"], "interval": [[0, 1], [0.1, 0.5]], "targets": [["attn.qkv"], ["mlp.fc1"]],
    "gamma1": [0, 0.5, [0.1, 0.5]], "gamma2": [0.5, 0.9, [0.5, 0.9]], "scale": [None, 1.5, 0, -1],
    "betas": [[0.9, 0.99]], "sampler": [], "to": ["diffusers", "dit", "hub"], "mode": ["train", "sample", "data"],
    "tasks": [["report"], ["train"], ["score"], ["time"], ["train", "score", "time", "report"]],
    "variants": [["dit"], ["tread"], ["dit", "tread"], ["tread-eager"]], "tokens": [[64], [256, 1024], 16],
    "part": ["1/2", "3/2", "0/0"], "format": ["repa", "fastdit"], "kind": ["sample", "moments"],
    "run_dir": ["{case}/out/other"], "out": ["{case}/out/other", "{case}/out/other.npz", "{case}/out/other.pt"],
    "resolution": [16, 8], "solver": ["euler", "heun", "ancestral", "euler_maruyama"],
    "precision": ["fp32", "bf16", "fp16", "fp8"], "compile": [True, "reduce-overhead"],
    "selection": ["l1"], "backbone_type": ["DiT-S/2", "DiT-XL/8", "LightningDiT-B/2", "Mamba-B/2", "RWKV-L/2"],
}
OUTPUTS = ("out", "picture", "results", "run_dir")      # devices of this machine are not given to be written

BASES = {      # settings of a command that works, to go wrong from
    "train": [[*SMALL, "run_dir={case}/out/run"], [*SMALL, "run_dir={case}/out/run", "diffusion=rf"],
              [*SMALL, "run_dir={case}/out/run", "model=dit", "samples.every=2"],
              [*SMALL, "run_dir={case}/out/run", f"init_from={GIVEN}/run", "lora.rank=2"],
              [*SMALL, "run_dir={case}/out/run", "evaluate.every=2", f"evaluate.reference={GIVEN}/reference.npz"]],
    "sample": [[f"checkpoint={GIVEN}/run", "seeds=0-3", "num_steps=1", "out={case}/out/x.png"],
               [f"checkpoint={GIVEN}/flow", "seeds=0-3", "num_steps=2", "out={case}/out/x.npz", "guidance=tread"],
               [f"checkpoint={GIVEN}/weights.pt", "num_heads=2", "diffusion_name=edm", "out={case}/out/x"]],
    "rf": [[f"checkpoint={GIVEN}/flow", "num_steps=1", "out={case}/out/x.png"]],
    "fid": [[f"checkpoint={GIVEN}/run", f"reference={GIVEN}/reference.npz", "features=pixels", "num_samples=4",
             "num_steps=1", "results={case}/out/results.jsonl"],
            [f"images={GIVEN}/images.npz", f"reference={GIVEN}/reference.npz", "features=pixels",
             "results={case}/out/results.jsonl"],
            [f"reference_from={GIVEN}/images", "out={case}/out/x.npz", "features=pixels"]],
    "scripts.sweep_guidance": [[f"checkpoint={GIVEN}/run", f"reference={GIVEN}/reference.npz", "features=pixels",
                                "num_samples=4", "num_steps=1", "results={case}/out/results.jsonl", "grid.scale=[1.5]",
                                "grid.gamma1=[0]", "grid.gamma2=[0.5]"]],
    "scripts.prepare_latents": [["source=shapes", "shapes.count=8", "out={case}/out/x"],
                                [f"source={GIVEN}/classes", "resolution=16", "autoencoder=identity",
                                 "out={case}/out/x"]],
    "scripts.import_latents": [[f"source={GIVEN}/pairs", "out={case}/out/x"]],
    "scripts.export": [[f"checkpoint={GIVEN}/run", "to=diffusers", "out={case}/out/x"],
                       [f"checkpoint={GIVEN}/flow", "to=hub", "out={case}/out/x"],
                       [f"checkpoint={GIVEN}/run", "to=dit", "out={case}/out/x.pt"]],
    "scripts.merge_lora": [[f"checkpoint={GIVEN}/adapter", "out={case}/out/x"]],
    "scripts.report": [[f"runs=[{GIVEN}/run]", "out={case}/out/x"],
                       [f"study_dir={GIVEN}/study", "out={case}/out/x"]],
    "scripts.study": [[*STUDY, "out={case}/out/x", f"rows=[{GIVEN}/study/study.json]"], ["study=rehearsal"]],
    "scripts.benchmark": [["mode=train"], ["mode=sample"], ["mode=score"]],
    "scripts.choose_routes": [[], ["speedup=1.4"]],
}


def base(program: str, number: int) -> dict:
    quoted = tuple(f"{key}='{value}'" if "{case}" in value else f"{key}={value}"
                   for key, _, value in (text.partition("=") for text in BASES[program][number % len(BASES[program])]))
    return composed(program, quoted)


def places_in(plain: Any, path: tuple = ()) -> Iterator[tuple]:
    """Lists the paths of all values within values, groups and lists among them."""
    for key, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places_in(value, (*path, key))


def put(plain: Any, path: tuple, value: Any) -> None:
    for key in path[:-1]:
        plain = plain[key]
    plain[path[-1]] = value


def at(plain: Any, path: tuple) -> Any:
    for key in path:
        plain = plain[key]
    return plain


def cannot_be_meant(key: str, usual: Any, value: Any) -> bool:
    """Tells without a look at the declarations that a value is of another kind than a setting's usual one."""
    if key in ("compile", "gamma1", "gamma2", "classes", "seeds", "grid_classes", "_layer_idx", "P_mean"):
        return False
    if isinstance(usual, bool):
        return value is not None and not isinstance(value, bool)
    if isinstance(usual, int | float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return not (value is None or is_number) or (is_number and (value != value or abs(value) > 1e300))
    if isinstance(usual, str):
        return isinstance(value, bool | float | list | dict) or value == ""
    if isinstance(usual, list | dict):
        return value is not None and not isinstance(value, type(usual))
    return False


def make_odd_places(folder: Path) -> None:
    """Lays out what is neither an ordinary file nor a folder, and some that are."""
    os.mkfifo(folder / "fifo")
    os.mkfifo(folder / "fifo.npz")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "dangling").symlink_to(folder / "nothing")
    (folder / "folder").mkdir()
    (folder / "folder" / "kept").write_text("kept")
    (folder / "folder.png").mkdir()
    (folder / "file").write_text("kept")
    (folder / "link").symlink_to(folder / "file")
    for name, number in (("null", 3), ("null.png", 3), ("zero", 5), ("full", 7)):
        with contextlib.suppress(PermissionError):      # for root alone
            os.mknod(folder / name, stat.S_IFCHR | 0o666, os.makedev(1, number))
    with contextlib.chdir(folder), socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")


def settings_of(program: str) -> Any:
    """Draws changes of a command's settings, each (number of a place, value), from one of its bases."""
    change = st.tuples(st.integers(0, 10**6), st.one_of(ODD_PLAIN, st.just("plausible")), st.integers(0, 10))
    return st.fixed_dictionaries({
        "base": st.integers(0, len(BASES[program]) - 1), "changes": st.lists(change, min_size=1, max_size=3),
        "through": st.integers(0, 9).map(lambda number: number == 0)})


def read_changed(program: str, number: int, changes: list, folder: Path) -> tuple[dict, str | None]:
    """Changes a base's settings and reads them as the command does; returns them, and why they must be refused.

    Raises ValueError where they are refused already.
    """
    plain = copy.deepcopy(base(program, number))
    usual, why = copy.deepcopy(plain), None
    for place, value, pick in changes:
        places = sorted(places_in(plain), key=str)
        path = places[place % len(places)]
        names = [key for key in path if isinstance(key, str)]
        if value == "plausible":
            of_key = PLAUSIBLE.get(names[-1], NUMBERS[:8])
            value = of_key[pick % len(of_key)] if of_key else None
        if names[-1] in OUTPUTS:      # null would write beside what is given, and a device of this machine is no place
            value = "{case}/out/new" if value is None else value
            if isinstance(value, str) and not value.startswith("{case}"):
                value = re.sub(r"^[/~]", "", value)
        put(plain, path, value)
    for path in places_in(usual):
        with contextlib.suppress(KeyError, IndexError, TypeError):
            value, key = at(plain, path), path[-1] if isinstance(path[-1], str) else path[-2]
            # What the timing is given is looked at when it begins.
            if path[0] != "benchmark" and cannot_be_meant(key, at(usual, path), value):
                why = f"{'.'.join(map(str, path))}={str(value)[:100]} cannot be meant"
    plain = at_home(plain, folder)
    entry = sys.modules["sample"].compare_guided if program == "rf" else sys.modules[program].main
    [declared] = [annotation for annotation in typing.get_type_hints(entry.__wrapped__).values()
                  if isinstance(annotation, type) and issubclass(annotation, schema.Settings)]
    schema.read(declared, plain)
    return plain, why


def run_settings(program: str, case: dict, folder: Path) -> None:
    plain, why = read_changed(program, case["base"], case["changes"], folder)      # most end here, and need no child
    if plain.get("watch"):      # which goes on until Ctrl-C
        return
    is_short = plain.get("num_samples", 0) is not None      # which would be 50,000 images: work that was asked for
    through = case["through"] and is_short and program not in (
        "scripts.study", "scripts.benchmark", "scripts.choose_routes")
    run_command(program, folder, [], plain, through=through, must_refuse=why, asks_much=True)


# ---- command lines --------------------------------------------------------------------------------------------------

ODD_VALUES = ("", " ", "null", "x", "[", "]", "[1,2", "{a:1}", "{", "'", '"', "'a", "a'b", "${oc.env:HOME}", "${",
              "${x}",
              "${oc.env:NOTHING}", "${name}", "${steps}", "${.}", "${configs:}", "${oc.decode:'[1]'}", "*", "1,2",
              "a,b",
              "range(1,3)", "choice(1,2)", "glob(*)", "interval(0,1)", "sort(1,2)", "int(x)", "str(1)", "é名🙂",
              "\udcff",
              "\\", "a\\", "a=b", "#x", "a # b", "1e400", "nan", "inf", "0x1F", "1_000", "007", "~", "-", "--",
              "!!python/x",
              "&a", "*a", "|", ">", "a\tb", "a\nb", "%", "@", "?", "???", "true", "[[[[[[]]]]]]", "[" * 500, "a" * 5000)
ODD_ARGUMENTS = ("", "x", "=", "=1", "+", "~", "+x=1", "++x=1", "+x.y=1", "~seed", "~steps", "~hydra", "hydra=x",
                 "hydra.run.dir=/proc/x", "hydra/launcher=x", "hydra/sweeper=x", "hydra.searchpath=[pkg://x]",
                 "hydra.searchpath=[file:///nothing]", "hydra.mode=MULTIRUN", "hydra.mode=x", "hydra.job.chdir=true",
                 "hydra.job.name=x", "hydra.output_subdir=x", "hydra.verbose=true", "hydra.verbose=[x]",
                 "hydra.callbacks.x._target_=os.system", "+hydra.callbacks.x._target_=os.system",
                 "hydra.job_logging.x=1", "--multirun", "-m", "--help", "--hydra-help", "--version", "--cfg",
                 "--cfg=job",
                 "--cfg=all", "--info", "--info=x", "--resolve", "--package=x", "-p", "--run", "--shell-completion",
                 "--config-name=x", "--config-path=/", "--config-dir=/nothing", "--experimental-rerun=x", "--x", "-x",
                 "model", "model=", "model=x", "model=[dit,tread]", "model=/dit", "model=../config", "model=dit,tread",
                 "model@x=dit", "+model=dit", "~model", "~model=dit", "data=x", "data@model=shapes", "experiment=x",
                 "experiment=[quickstart]", "experiment=null", "routes=x", "routes=[balanced]", "guidance=x",
                 "guidance=[cfg,tread]", "gauge=x", "gauge=dit_xl2", "study=x", "diffusion=x", "defaults=[]",
                 "_self_=1", "a.b.c=1", "a b=1", "é=1", "1=1", "[0]=1", "x[0]=1", "model.routes[0]=1",
                 "model.routes.0.selection_ratio=2", "model.routes.5=1", "a..b=1", ".a=1", "a.=1", "\udcff=1", "\x00=1",
                 "seed=1", "seed=2", "name=${name}", "name=${run_dir}", "run_dir=${run_dir}")


def every_key(program: str) -> list[str]:
    return sorted(".".join(path) for path in places_in(base(program, 0)) if all(isinstance(key, str) for key in path))


def command_lines() -> Any:
    setting = st.tuples(st.integers(0, 10**6), st.one_of(st.sampled_from(ODD_VALUES), st.text(max_size=6),
                                                         st.sampled_from(ODD_FILES)), st.sampled_from(("", "+", "++",
                                                                                                       "~")))
    return st.fixed_dictionaries({
        "program": st.sampled_from(sorted(PROGRAMS)), "base": st.integers(0, 9),
        "odd": st.lists(st.one_of(st.sampled_from(ODD_ARGUMENTS), setting), min_size=1, max_size=2)})


def run_line(case: dict, folder: Path) -> None:
    program, odd = case["program"], []
    for argument in case["odd"]:
        if isinstance(argument, str):
            odd.append(argument)
            continue
        number, value, sign = argument
        keys = every_key(program)
        key = keys[number % len(keys)]
        if key.rpartition(".")[2] in OUTPUTS and not value.startswith("{case}"):
            value = re.sub(r"^([/~]|null$|$)", "x", value)
        odd.append(f"{sign}{key}={value}")
    of_base = BASES[program][case["base"] % len(BASES[program])]
    arguments = [argument.replace("\0", "") for argument in at_home([*of_base, *odd], folder)]      # exec takes no zero
    arguments = [f"{key}='{value}'" if number < len(of_base) and str(folder) in value else argument
                 for number, argument in enumerate(arguments) for key, _, value in [argument.partition("=")]]
    run_command(program, folder, arguments, asks_much=True)


def lay_out(case: dict, folder: Path) -> None:
    make_odd_places(folder)


READERS = [*(Reader(f"settings_{program.rpartition('.')[2]}", settings_of(program), lay_out,
                    partial(run_settings, program), prepare=given) for program in PROGRAMS),
           Reader("command_line", command_lines(), lay_out, run_line, prepare=given)]
