"""Common mistakes: each raises a one-line error before anything is written.

A row of TYPED is what somebody types over settings that work (tests/world.py), and words of the sentence: mostly a
setting and its value. A row of SPOILT is what is wrong with a file or a folder, and such words. One row shows that a
command checks at its start; more settings and files are in the tests of what checks them.
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
        # no such setting, another type or range, a sweep: tests/runtime/test_command.py and test_schema.py
        ("model=tredd", "Available options in 'model': dit sprint tread"), ("model=null", "Got NoneType, in "),
        ("model.backbone_type=DiT-M/2", "DiT-S/2"), ("diffusion=rf", "+diffusion.sigma_data=1", "sigma_data"),
        ("optimizer.matrix_lr=1", "no setting of the optimizer that is chosen"),
        # the network and its routes
        ("model=tread_v1", "model.backbone_type=DiT-L/2", "model.depth=null", "write routes for it, as model.routes="),
        ("model.routes.0.end_layer_idx=9", "with 7 blocks"),
        ("model.selection=grid", "model.patch_size=8", "selection=grid"),
        ("model=dit", "model.selection=grid", "model.selection=grid"),
        ("route_schedule.dense_after=5000", "at step 5000, but the run ends at steps=1"),
        ("steps=9", "route_schedule.dense_before=6", "route_schedule.dense_after=0.5", "at steps 6, 4"),
        ("route_schedule.selection_ratios=[0.3,1.2]", "selection_ratio=1.2"),
        ("model=sprint", "steps=9",
         "route_schedule.changes=[[5,[{start_layer_idx: 1, end_layer_idx: 2, selection_ratio: 0.5}]]]",
         "fuses after route"),
        # the data, and what is sampled and scored later
        ("data.path=null", "data.path"), ("data.path=four", "four holds no metadata.json"),
        ("data.input_size=32", "data.input_size=8"), ("data.num_classes=5", "data.num_classes=6"),
        ("batch_size=7", "grad_accum_steps=2", "multiple of 2"), ("batch_size=301", "12 latents"),
        ("objective=alignment", "teacher=python:"), ("samples.every=5", "samples.classes=fish", "circle"),
        ("evaluate.every=5", "evaluate.reference"),
        ("evaluate.every=5", "label_dropout=0", "evaluate.guidance_scales=[null,1.5]",
         "label_dropout=0 does not train"),
        # where it starts, and what it writes
        ("run_dir=latents", "holds metadata.json and no checkpoints/"),
        ("run_dir=.", "and no checkpoints/, so it is no run's folder"),
        ("init_from=nowhere", "nowhere"), ("init_from=flow", "diffusion"),
        ("init_from=run/checkpoints", "name run, or one"),
        ("init_from=run", "data.num_classes=7", "new_label_table=true initialises"),
        ("sharding=fsdp", "single process"),
        ("sharding=fsdp", "compile=reduce-overhead", "compile=reduce-overhead"),
    ],
    "sample": [     # more: tests/sampling/test_sample.py
        ("checkpoint=null", "checkpoint="), ("seeds=3-1", "seeds=0-63"), ("seeds=[0,-3]", "-3"),
        ("out=grid.jpg", ".png"), ("latents=true", "latents=true"), ("sampler.solver=euler", "solver"),
        ("drop_label=false", "scale=1.5"), ("guidance=cfg", "channels=4", "channels=4"),
        ("guidance=tread", "gamma1=0.9", "gamma2=0.5", "gamma1=0.9"),
        ("guidance=autoguidance", "weak=run", "no step has two"),
        ("guidance=autoguidance_tread", "weak has no default here: set weak=."),
    ],
    "rf": [
        ("guidance=none", "guidance"), ("out=x.npz", ".png"), ("guidance=autoguidance", "weak=run", "mixed"),
        ("interval=[0.28,2.9]", "set interval=[0.219,0.744]"),
    ],
    "fid": [
        ("checkpoint=run", "images=four", "images"), ("images=four", "reference=null", "reference="),
        ("images=mixed", "resolution="), ("images=images.npz", "resolution=8", "resolution=8"),
        ("images=four", "num_samples=5", "4 images"), ("images=four", "scale=2", "scale=2"),
        ("images=four", "features_weights=weights.pt", "pixels has no weights"),
        ("checkpoint=run", "num_samples=3", "need more than 3 images of both sets, and there are 3"),
        ("reference_from=four", "reference=null", "results=null", "out="),
        ("reference_from=four", "reference=null", "results=null", "out=images.npz", "name another"),
    ],
    "prepare_latents": [
        ("out=pets", "pets"), ("labels=folder", "nor one of folders, cls, none"),
        ("out=pets/latents", "lies in source=pets"),
        ("labels=folders", "label_column=kind", "label_column=kind would change nothing: labels=folders"),
    ],
    "import_latents": [
        ("source=nowhere", "nowhere"), ("kind=moments", "kind=moments would change nothing: only format=tread"),
    ],
    "import_weights": [     # more: tests/weights/test_foreign.py
        ("format=null", "and one of format=sit num_heads=<heads>"), ("source=nowhere", "nowhere does not exist"),
        ("format=dit", "unlike this format"), ("num_heads=null", "set num_heads="),
    ],
    "benchmark": [("precision=fp8", "set precision=bf16")],
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
        (cut(), "images.npz"), (arrays(mu=np.zeros(192), sigma=np.eye(192), space="dinov2"), "dinov2"),
    ],
    ("import_weights", "source", "weights.pt"): [(put("", "<html>"), "it is damaged, or holds pickled")],
    ("train", "run_dir", "run"): [      # a run that is resumed
        (cut(EMA), "None of the checkpoints"), (as_it_is, "steps=1"),
        (lambda path: shutil.rmtree(path / "checkpoints"), "holds config.yaml and no checkpoints/"),
        (lambda path: shutil.rmtree(path / STEP), "name=<another>"),
    ],
}


# ---- how they are tried ---------------------------------------------------------------------------------------------


def check_refusal(place: Path, command: str, typed: list[str], words: str) -> None:
    """Runs a command, which must end in its one sentence, with `words`, and leave all files as they are."""
    before = seen(place)
    with pytest.raises(SystemExit) as ended:
        run(place, command, typed)
    said = str(ended.value.code)
    assert said.startswith(f"{command}.py: ") and words in said and len(said) < 1000, said
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
