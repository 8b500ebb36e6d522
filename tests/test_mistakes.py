"""Common mistakes: each raises a one-line error before anything is written.

A row of TYPED is what somebody types over settings that work (tests/world.py), and words of the sentence: mostly a
setting and its value. A row of SPOILT is what is wrong with a file or a folder, and such words. The tests of each
reader have more such files: latents/test_data.py, scripts/test_import_latents.py, latents/test_labels.py and others.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from spoils import as_it_is, cut, put
from world import EMA, STEP, make, run, seen

TYPED = {
    "train": [
        # no such setting or option; another type or range: tests/runtime/test_schema.py
        ("lr=1", "mean optimizer.lr?"), ("experiment=nope", "quickstart"),
        ("model=tredd", "Available options in 'model': dit sprint tread"), ("model=null", "Got NoneType, in "),
        ("diffusion=rf", "+diffusion.sigma_data=1", "sigma_data"), ("diffusion.sigma_data=0", "sigma_data=0"),
        # the network and its routes
        ("model.backbone_type=DiT-M/2", "DiT-S/2"),
        ("model=tread_v1", "model.backbone_type=DiT-L/2", "model.depth=null", "write routes for it, as model.routes="),
        ("model.routes.0.end_layer_idx=9", "with 7 blocks"),
        ("model.selection=grid", "model.patch_size=8", "selection=grid"),
        ("route_schedule.dense_after=5000", "at step 5000, but the run ends at steps=1"),
        ("steps=9", "route_schedule.dense_before=6", "route_schedule.dense_after=0.5", "at steps 6, 4"),
        ("route_schedule.selection_ratios=[0.3,1.2]", "selection_ratio=1.2"),
        ("model=sprint", "steps=9",
         "route_schedule.changes=[[5,[{start_layer_idx: 1, end_layer_idx: 2, selection_ratio: 0.5}]]]",
         "fuses after route"),
        ("model=dit", "route_schedule.dense_after=0.85", "model.routes is empty"),
        # the data
        ("data.path=nowhere", "nowhere"), ("data.path=four", "four holds no metadata.json"),
        ("data.path=null", "data.path"), ("data.input_size=32", "data.input_size=8"),
        ("data.num_classes=5", "data.num_classes=6"),
        ("batch_size=7", "grad_accum_steps=2", "multiple of 2"), ("batch_size=301", "12 latents"),
        ("samples.every=5", "samples.seeds=x", "samples.seeds=0-63"),
        ("samples.every=5", "samples.classes=fish", "circle"), ("evaluate.every=5", "evaluate.reference"),
        ("evaluate.every=5", "evaluate.reference=no.npz", "no.npz"),
        # where it starts, and what it writes
        ("run_dir=images.npz/run", "images.npz"), ("run_dir=latents", "holds metadata.json and no checkpoints/"),
        ("run_dir=.", "and no checkpoints/, so it is no run's folder"), ("init_from=nowhere", "nowhere"),
        ("init_from=flow", "diffusion"), ("init_from=run", "model.depth=8", "{'depth': 7} there, {'depth': 8} here"),
        ("init_from=weights.pt", "source=weights.pt out=weights/weights"), ("init_from=ddpm", "not DDPM"),
        ("new_label_table=true", "init_from"),
        ("init_from=run", "data.num_classes=7", "new_label_table=true initialises"),
        # one setting that makes another void
        ("model=dit", "model.selection=grid", "model.selection=grid"),
        ("evaluate.every=5", "evaluate.reference=images.npz", "evaluate.features_weights=weights.pt",
         "pixels has no weights"),
        ("evaluate.every=5", "label_dropout=0", "evaluate.guidance_scales=[null,1.5]",
         "label_dropout=0 does not train"),
        # objectives
        ("objective=alignment", "teacher=<name>"),
        ("data.path=taught", "objective=alignment", "objective.block=7", "7"),
        ("data.path=taught", "objective=alignment", "model.patch_size=2", "(16, Z)"),
        # what this machine, or the mode, has not
        ("sharding=fsdp", "single process"), ("sharding=fsdp", "precision=fp16", "precision=fp16"),
        ("sharding=fsdp", "compile=reduce-overhead", "compile=reduce-overhead"),
    ],
    "sample": [
        ("checkpoint=null", "checkpoint="), ("checkpoint=latents", "latents"), ("out=map.json", "neither a grid"),
        ("classes=fish", "circle"), ("classes=9", "class 9"),
        ("seeds=3-1", "seeds=0-63"), ("seeds=[0,-3]", "-3"), ("seeds=abc", "seeds=abc is not understood"),
        ("guidance=cfg", "interval=[5,1]", "no step has two different passes"), ("drop_label=false", "scale=1.5"),
        ("guidance=cfg", "drop_label=false", "no step has two different passes"), ("guidance=1.5", "Got float, in "),
        ("guidance=autoguidance", "weak=run", "no step has two"), ("guidance=interval", "or a wider interval="),
        ("guidance=cfg", "interval=0.2-0.8", "a list, typed as interval=[…]"), ("sampler=heun", "dictionary"),
        ("checkpoint=dense", "guidance=path_drop", "needs a network with a route"),
        ("guidance=autoguidance", "weak=weights.pt", "python scripts/import_weights.py source=weights.pt"),
        ("latents=true", "out=new.npz", "decode_precision=bf16", "decodes nothing"), ("latents=true", "latents=true"),
        ("out=grid.jpg", ".png"), ("out=images.npz/x.png", "images.npz"), ("out=foreign.npz", "name another"),
        ("out=four", "name another"), ("autoencoder=python:decode", "python:"),
        ("checkpoint=weights.pt", "Then name weights/weights."), ("checkpoint=four", "four holds no weights file"),
        ("sampler.solver=euler", "solver"), ("checkpoint=flow", "sampler.solver=dopri5", "euler_maruyama"),
        ("scale=1e308", "scale="), ("gamma2=0.5", "scale"),
        ("guidance=cfg", "channels=4", "channels=4"),
        ("guidance=autoguidance_tread", "weak has no default here: set weak=."),
        ("guidance=tread", "gamma1=0.9", "gamma2=0.5", "gamma1=0.9"),
        ("guidance=tread", "routes=[{start_layer_idx: 0, end_layer_idx: 99}]", "with 7 blocks"),
    ],
    "rf": [
        ("checkpoint=null", "checkpoint="), ("guidance=none", "guidance"),
        ("out=x.npz", ".png"), ("interval=[0.28,2.9]", "set interval=[0.219,0.744]"), ("sampler.S_churn=1", "S_churn"),
        ("guidance=autoguidance", "weak=run", "mixed"),
    ],
    "fid": [
        ("seed=0", "Give one of checkpoint=, images="), ("checkpoint=run", "images=four", "images"),
        ("images=four", "reference=null", "reference="),
        ("reference_from=four", "reference=null", "results=null", "out="), ("images=empty", "empty"),
        ("images=mixed", "resolution="), ("images=four", "num_samples=5", "4 images"),
        ("images=four", "features=vgg", "inception"), ("images=four", "metrics=[fid]", "fd_pixels"),
        ("images=four", "out=x.npz", "out=x.npz"), ("checkpoint=run", "resolution=8", "resolution=8"),
        ("images=four", "reference=weights.pt", "weights.pt"),
        ("images=images.npz", "resolution=8", "resolution=8"),
        ("reference_from=four", "reference=null", "results=null", "out=images.npz", "name another"),
        ("images=four", "scale=2", "scale=2"), ("reference_from=four", "out=new.npz", "reference=images.npz"),
        ("images=four", "features_weights=weights.pt", "pixels has no weights"),
        ("checkpoint=run", "metrics=[fd_pixels,fid]", "fid cannot be measured"),
        ("reference_from=four", "reference=null", "results=null", "out=new.npz", "metrics=[recall]", "measures"),
        ("images=i*.npz", "i*.npz is not a complete npz of images"),
        ("checkpoint=run", "num_samples=3", "need more than 3 images of both sets, and there are 3"),
    ],
    "prepare_latents": [
        ("source=null", "source=null"), ("source=empty", "empty"), ("autoencoder=vqgan", "vqgan"),
        ("out=images.npz", "images.npz"), ("out=pets", "pets"), ("out=latents", "latents"),
        ("labels=folder", "nor one of folders, cls, none"), ("source=pets.zip/cat", "cat"),
        ("labels=folders", "label_column=kind", "label_column=kind would change nothing: labels=folders"),
        ("name_column=kind", "name_column=kind would change nothing: only labels=<file>.csv"),
        ("source=shapes", "labels=folders", "labels=folders would change nothing: source=shapes"),
        ("source=shapes", "shapes.count=5", "shapes.count=5"), ("shapes.count=50", "source=shapes"),
        ("teacher=vit_smal", "teacher=vit_smal is not python:module.function"), ("patch_size=4", "teacher=<name>"),
        ("teacher=python:own_code.pooled", "patch_size=3", "3"),
    ],
    "import_latents": [
        ("out=null", "out"), ("source=null", "source="), ("source=nowhere", "nowhere"), ("source=empty", "empty"),
        ("kind=moments", "kind=moments would change nothing: only format=tread"),
    ],
    "import_weights": [
        ("format=null", "and one of format=sit num_heads=<heads>"), ("source=null", "source="), ("out=null", "out="),
        ("source=nowhere", "nowhere does not exist"), ("source=four", "four holds no weights file"),
        ("format=lightning", "'sit', 'repa', 'lightningdit'"), ("format=dit", "unlike this format"),
        ("num_heads=null", "set num_heads="), ("num_heads=3", "3"), ("num_classes=99", "num_classes=99 does not fit"),
        ("autoencoder=null", "set autoencoder="),
        ("autoencoder=vqgan", "vqgan"), ("weights=best", "it has no weights=best: set weights=ema"),
        ("diffusion=edm", "is for format=ours"), ("format=ours", "set diffusion="),
        ("out=latents", "out=latents exists: name another folder"), ("out=images.npz", "out=images.npz exists"),
    ],
    "benchmark": [
        ("variants=[dit,sit]", "variants"), ("precision=fp8", "set precision=bf16"),
        ("batch_size=5", "grad_accum_steps=2", "multiple of 2"),
    ],
}


# ---- files ----------------------------------------------------------------------------------------------------------


def arrays(**changes) -> Callable:
    """Writes another npz, with no arrays but these."""
    return lambda path: np.savez(path, **changes)


IMAGES = np.zeros((4, 8, 8, 3), np.uint8)

SPOILT = {
    ("fid", "images", "four"): [(put("0.png", "<html>"), "0.png")],
    ("fid", "images", "images.npz"): [
        (arrays(x=IMAGES), "arr_0"), (arrays(arr_0=IMAGES / 255), "float64"),
        (arrays(arr_0=IMAGES.transpose(0, 3, 1, 2)), "it holds an array of uint8 (4, 3, 8, 8)"),  # clean-fid#52
    ],
    ("fid images=four", "reference", "images.npz"): [
        (cut(), "images.npz"), (arrays(mu=np.zeros(2048), sigma=np.eye(2048)), "2048"),
        (arrays(mu=np.full(192, np.nan), sigma=np.eye(192)), "mu"),
        (arrays(mu=np.zeros(192), sigma=np.eye(192), space="dinov2"), "dinov2"),
    ],
    ("fid images=four features=inception", "features_weights", "weights.pt"): [(cut(), "weights.pt")],
    ("sample", "checkpoint", "run"): [(put(f"{STEP}/meta.json", "{"), "checkpoint")],
    ("import_weights", "source", "weights.pt"): [(put("", "<html>"), "it is damaged, or holds pickled")],
    # a run that is resumed
    ("train", "run_dir", "run"): [
        (cut(EMA), "None of the checkpoints"), (as_it_is, "steps=1"),
        (lambda path: shutil.rmtree(path / "checkpoints"), "holds config.yaml and no checkpoints/"),
        (lambda path: shutil.rmtree(path / STEP), "name=<another>"),
    ],
    ("train model.hidden_size=16", "run_dir", "run"): [(as_it_is, "another network")],
    ("train diffusion=rf", "run_dir", "run"): [(as_it_is, "diffusion")],
}


# ---- how they are tried ---------------------------------------------------------------------------------------------


def check_refusal(place: Path, command: str, typed: list[str], words: str) -> None:
    """Runs a command, which must leave all as it is and end in its one sentence, which holds `words`."""
    before = seen(place)
    with pytest.raises(SystemExit) as ended:
        run(place, command, typed)
    said = str(ended.value.code)
    assert said.startswith(f"{command}.py: ") and words in said and len(said) < 1000, said
    assert not any(advice in said
                   for advice in ("weights_only", "allow_pickle", "trust")) or "if you trust it" in said, said
    assert seen(place) == before
    assert not [path for path in place.glob("new/**/*") if path.suffix in (".safetensors", ".npy", ".png", ".jsonl")]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("world"))


@pytest.fixture
def place(world, fresh_accelerator) -> Iterator[Path]:
    yield world
    for path in world.glob("new*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("line", ["train", "sample", "rf", "fid images=four", "prepare_latents", "import_latents",
                                  "import_weights"])
def test_without_a_mistake_the_command_works(place, line):
    before = seen(place)
    command, *typed = line.split()
    run(place, command, typed)
    (place / ".new.jsonl.lock").unlink(missing_ok=True)  # of the rows that were added
    assert list(place.glob("new*")) and seen(place) == before


@pytest.mark.parametrize(("command", "row"), [(command, row) for command, rows in TYPED.items() for row in rows],
                         ids=lambda part: " ".join(part[:-1]) if isinstance(part, tuple) else part)
def test_a_wrong_setting_raises_a_one_line_error(place, command, row):
    *typed, words = row
    check_refusal(place, command, typed, words)


@pytest.mark.parametrize(("where", "spoil", "words"), [(where, *row) for where, rows in SPOILT.items() for row in rows],
                         ids=lambda part: " ".join(part) if isinstance(part, tuple) else "" if callable(part) else part)
def test_a_wrong_file_raises_a_one_line_error(place, where, spoil, words):
    line, setting, source = where
    command, *typed = line.split()
    copy = place / f"new-{source}"
    shutil.copytree(place / source, copy) if (place / source).is_dir() else shutil.copy(place / source, copy)
    spoil(copy)
    check_refusal(place, command, [f"{setting}={copy.name}", *typed], words)
