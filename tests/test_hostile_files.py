"""Files that somebody made to do harm: no command runs code in them, crashes because of them, or reads or changes a
file outside of what it was given.
"""

import json
import os
import pickle
import shutil
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import one_rank, save_vae
from safetensors.torch import save_file
from test_data import labels_of, numbered, write_folder
from test_import_latents import import_latents, npy, write_repa
from training_runs import command, rows, write_run

import fid
import sample
import train
from dit import DiT
from latents.folder import open_latents, open_npy
from runtime import files
from scoring.features import load_extractor
from scoring.image_sets import open_images
from scoring.score import open_reference
from scripts import import_weights as import_script
from weights import checkpoint as checkpoints
from weights.autoencoders import load_autoencoder
from weights.loading import load_trained


def everything(folder: Path) -> dict:
    """The content of all files below a folder, and where its links lead."""
    return {path.relative_to(folder).as_posix(): os.readlink(path) if path.is_symlink() else path.is_file()
            and path.read_bytes()
            for path in folder.rglob("*")}


def in_a_line(call, *arguments) -> str:
    """Calls what may end in a ValueError of one line, which it returns, and in nothing else."""
    try:
        call(*arguments)
    except (ValueError, OSError) as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


def import_weights(file: Path, form: str = "sit") -> None:
    import_script.main(f"source={file}", f"format={form}", f"out={file.parent}/out")


# ---- pickles --------------------------------------------------------------------------------------------------------


class Harm:
    """A pickle of it makes a file named `executed` where it is loaded by a reader that trusts it."""

    def __reduce__(self):
        return os.system, ("touch executed",)


HARM = np.array([Harm()], object)
NEVER = "which can run code and are never loaded"
FOUND = f"it holds pickled Python objects (posix.system), {NEVER}"
AMONG_WEIGHTS = [lambda state: Harm(), lambda state: [Harm()], lambda state: {"ema": state, "opt": Harm()},
                 lambda state: {"ema": Harm(), "model": state}, lambda state: {**state, "pos_embed": Harm()}]


def save(content, file: Path, is_new: bool = True) -> None:
    torch.save(content, file, _use_new_zipfile_serialization=is_new)


def save_among_weights(form: int, is_new: bool, at: Path) -> None:
    tiny = DiT(input_size=4, patch_size=2, in_channels=4, hidden_size=8, depth=1, num_heads=2, num_classes=2)
    save(AMONG_WEIGHTS[form](tiny.state_dict()), at / "x.pt", is_new)


def save_vae_with_pickle(at: Path) -> None:
    save_vae(at / "vae")
    (at / "vae/diffusion_pytorch_model.safetensors").unlink()
    save(Harm(), at / "vae/diffusion_pytorch_model.bin")


PICKLES = {  # where one is: what writes it in a folder, what reads it there, what is said; "": it is read otherwise
    **{f"weights {form} {is_new}": (partial(save_among_weights, form, is_new), lambda at: import_weights(at / "x.pt"),
                                    FOUND) for form in range(len(AMONG_WEIGHTS)) for is_new in (True, False)},
    "Inception": (lambda at: save({"fc.weight": Harm()}, at / "x.pt"),
                  lambda at: load_extractor(one_rank(), "inception", at / "x.pt"), FOUND),
    "autoencoder's folder": (save_vae_with_pickle, lambda at: load_autoencoder(str(at / "vae")),
                             "No pickle, such as diffusion_pytorch_model.bin, is read"),
    "latent folder": (lambda at: np.save(write_folder(at / "set", numbered(), labels_of()) / "labels-00001.npy", HARM),
                      lambda at: open_latents(at / "set"), "is not a complete npy file of numbers"),
    "REPA's arrays": (lambda at: (write_repa(at)[0] / "vae-sd/00000/img-mean-std-00000011.npy").write_bytes(npy(HARM)),
                      lambda at: import_latents(at / "repa", at / "out", "repa"), NEVER),
    "reference": (lambda at: np.savez(at / "x.npz", mu=HARM, sigma=np.eye(192)),
                  lambda at: open_reference(one_rank(), at / "x.npz", load_extractor(one_rank(), "pixels")),
                  f"it holds pickled Python objects, {NEVER}"),
    "images": (lambda at: np.save(at / "x.npy", HARM),
               lambda at: open_images(one_rank(), "reference", str(at / "x.npy")),
               f"uint8 (N, H, W, 3) in C order (it holds pickled Python objects, {NEVER})"),
}


@pytest.mark.parametrize("place", PICKLES)
def test_a_pickle_is_refused_where_it_is_read_and_never_run(tmp_path, monkeypatch, place):
    write, read, words = PICKLES[place]
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    said = in_a_line(read, tmp_path)
    assert words in said and bool(words) == bool(said) and not (tmp_path / "executed").exists()
    assert not any(advice in said for advice in ("weights_only", "allow_pickle", "trust"))


def test_the_pickle_of_these_tests_runs_where_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Harm()))
    assert (tmp_path / "executed").exists()


# ---- links in a run -------------------------------------------------------------------------------------------------

STEP, GRID = "checkpoints/step-00000004", "step-00000004.png"
COMMANDS = {
    "train": lambda run, data, _: train.main(*settings(run, data, "steps=5")),
    "sample": lambda run, *_: sample.main(f"checkpoint={run}", "seeds=0-1", "classes=[0]", "num_steps=1"),
    "score": lambda run, data, reference: fid.main(
        f"checkpoint={run}", f"reference={reference}", "features=pixels", "num_samples=2", "num_steps=1",
        "batch_size=2"),
}
PLACES = {
    "train": ["checkpoints", "samples", "metrics.jsonl", "results.jsonl", ".lock", STEP, f"{STEP}/meta.json",
              f"{STEP}/ema.safetensors"],
    "sample": ["checkpoints", "samples"], "score": ["checkpoints", "results.jsonl"],
}  # fmt: skip


def settings(run, data, *more: str) -> list[str]:
    return command(run, data, "model=dit", "model.depth=2", "checkpoint.every=2", "checkpoint.keep_last=1",
                   "diffusion=rf", "log.trackers=[]", *more)[1:]


@pytest.fixture(scope="module")
def honest(shapes, tmp_path_factory) -> Path:
    """A run of four steps with all that a run's folder may hold."""
    run = tmp_path_factory.mktemp("honest") / "run"
    train.main(*settings(run, shapes, "steps=4"))
    (run / "results.jsonl").touch()
    return run


@pytest.mark.parametrize("program", COMMANDS)
def test_each_command_of_the_table_works_on_a_run_without_links(honest, shapes, pixel_reference, tmp_path, program):
    run = shutil.copytree(honest, tmp_path / "run")
    assert not in_a_line(COMMANDS[program], run, shapes, pixel_reference)


@pytest.mark.parametrize(("program", "name"), [(program, name) for program, names in PLACES.items() for name in names])
def test_nothing_outside_of_a_run_is_changed_or_copied_through_a_link_in_it(honest, shapes, pixel_reference, tmp_path,
                                                                            program, name):
    outside, run = (shutil.copytree(honest, tmp_path / copy) for copy in ("outside", "run"))
    files.remove(run / name)
    (run / name).symlink_to(outside / name)
    private = outside / name / GRID if (outside / name).is_dir() else outside / name
    with open(private, "ab") as file:
        file.write(b'{"step": 1, "note": "PRIVATE"}\n')
    before = everything(outside)
    in_a_line(COMMANDS[program], run, shapes, pixel_reference)
    assert everything(outside) == before
    assert not any(content and b"PRIVATE" in os.fsencode(content) for content in everything(run).values())


@pytest.mark.parametrize("name", ["../x", "/x", "ema/../../x", "a" * 100_000, "a\0b", ""])
def test_a_record_names_files_of_its_checkpoint_alone(tmp_path, name):
    folder = checkpoints.step_folder(tmp_path, 4)
    checkpoints.save(folder, {"ema": {"a": torch.ones(1)}}, {"step": 4})
    checkpoints.write_meta(folder, checkpoints.read_meta(folder) | {"files": {name: {"bytes": 0, "sha256": ""}}})
    assert checkpoints.problem(folder)


@pytest.mark.parametrize("linked", ["runs", "runs/one"])
def test_a_run_behind_a_link_resumes(honest, shapes, tmp_path, linked):
    there = shutil.copytree(honest, tmp_path / "disk/one" if linked == "runs/one" else tmp_path / "disk/runs/one")
    (tmp_path / linked).parent.mkdir(exist_ok=True)
    (tmp_path / linked).symlink_to(there if linked == "runs/one" else there.parent)
    train.main(*settings(tmp_path / "runs/one", shapes, "steps=5"))
    assert checkpoints.latest(there).name == "step-00000005" and rows(there)[-1]["step"] == 5


# ---- records that are not as this code writes them ------------------------------------------------------------------

DEEP = "[" * 100_000
OTHERS = ["[]", "1", '"x"', "null", DEEP, '{"files": []}', '{"files": {"ema.safetensors": 1}, "step": 4}', "{", "\0",
          '{"a":' * 300 + "1" + "}" * 300]


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> Path:
    network = {"input_size": 4, "patch_size": 2, "in_channels": 3, "hidden_size": 8, "depth": 2, "num_heads": 2,
               "num_classes": 3}
    convention = {"scale": 1.0, "shift": 0.0, "latents_mean": [0.0] * 3, "latents_std": [1.0] * 3, "pixels": [0.0, 1.0]}
    return write_run(tmp_path_factory.mktemp("untrained") / "run", network, 4, class_names=["a", "b", "c"],
                     convention=convention, classes=[0, 1, 2])


@pytest.mark.parametrize("content", OTHERS)
def test_a_record_of_another_form_is_a_damaged_checkpoint(untrained, tmp_path, content):
    run = shutil.copytree(untrained, tmp_path / "run")
    (run / STEP / "meta.json").write_text(content)
    assert checkpoints.problem(run / STEP) and "\n" not in checkpoints.problem(run / STEP)
    checkpoints.is_sound(run / STEP)    # which pruning asks
    with pytest.warns(UserWarning, match="is damaged"):
        assert "is complete" in in_a_line(load_trained, run)


def test_what_is_beyond_the_table_of_classes_is_refused(untrained, tmp_path):
    run = shutil.copytree(untrained, tmp_path / "run")
    whole = checkpoints.read_meta(run / STEP)
    for change in ({"classes": [0, 3]}, {"class_names": ["a"] * 4}, {"display_names": ["a"] * 4}):
        checkpoints.write_meta(run / STEP, whole | {"data": whole["data"] | change})
        assert "4 classes" in in_a_line(load_trained, run)


# ---- arrays ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [
    *(f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}" for shape in (
        "(-2, -8, 8, 3)", "(2, -8, -8, 3)", f"({2**62}, 4, 4, 3)", f"({2**70}, 8, 8, 3)", "(0, 8, 8, 3)",
        "(2, 0, 8, 3)", "(True, 8, 8, 3)", "(1,) * 99")),
    "-" * 9000 + "1", "(" * 5000, "-" * 4000 + "1" + "+1" * 2000,
])  # fmt: skip
def test_the_header_of_an_array_may_say_anything(tmp_path, header):
    text = header.encode() + b"\n"
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(384))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.write(tmp_path / "x.npy", "arr_0.npy")
    for name in ("x.npy", "x.npz"):
        assert in_a_line(lambda name=name: open_images(one_rank(), "images", str(tmp_path / name)).read(np.arange(2)))
    assert in_a_line(open_npy, tmp_path / "x.npy", [(2, 8, 8, 3)], ["uint8"])


@pytest.mark.parametrize("where", ["../outside.npy", "sub/../latents-00000.npy", "/absolute", "link"])
@pytest.mark.parametrize("part", ["latents", "labels"])
def test_the_record_of_latents_names_files_of_its_folder_alone(tmp_path, where, part):
    out = write_folder(tmp_path / "set", numbered(), labels_of(), shard=1000)
    record = json.loads((out / "metadata.json").read_text())
    file = out / record["shards"][0][part]
    if where == "link":
        file.rename(tmp_path / "outside.npy")
        file.symlink_to(tmp_path / "outside.npy")
    else:
        shutil.copy(file, tmp_path / "outside.npy")
        record["shards"][0][part] = str(file) if where == "/absolute" else where
    (out / "metadata.json").write_text(json.dumps(record))
    assert "which is not a plain file in that folder" in in_a_line(open_latents, out)


def test_weights_that_name_a_billion_blocks_are_a_line(tmp_path):
    for name, blocks in (("x_embedder.proj.weight", "blocks"), ("pos_embed.proj.weight", "transformer_blocks")):
        state = {name: torch.ones(8, 3, 2, 2), f"{blocks}.1000000000.a": torch.ones(1)}
        save_file(state, tmp_path / "x.safetensors")
        form = "diffusers" if blocks == "transformer_blocks" else "sit"
        assert "are not numbered" in in_a_line(import_weights, tmp_path / "x.safetensors", form)
        assert "nothing to import" in in_a_line(load_trained, tmp_path / "x.safetensors")


def test_settings_that_contain_themselves_are_a_line(tmp_path):
    config = {"prediction": "noise"}
    config["config"] = config
    save({"ema": {"x_embedder.proj.weight": torch.ones(8, 3, 2, 2)}, "config": config}, tmp_path / "x.pt")
    assert "prediction=noise" in in_a_line(import_weights, tmp_path / "x.pt")
