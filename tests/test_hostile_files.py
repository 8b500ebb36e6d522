"""Files that somebody made to do harm: no command runs code in them, crashes or hangs because of them, or reads or
changes a file outside of what it was given.
"""

import json
import os
import pickle
import shutil
import subprocess
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import one_rank, save_vae
from PIL import Image
from runtime.typed import parse_options, read_foreign_yaml
from safetensors.torch import save_file
from test_data import COUNT, labels_of, numbered, write_folder, write_tars
from test_import_latents import import_latents, npy, write_lightningdit, write_repa
from test_labels import put_tar
from training_runs import command, rows, write_run
from weights.others import read_weights

import fid
import sample
import train
from dit import DiT
from latents import tars
from latents.folder import map_npy, open_latents
from latents.images import open_source
from runtime import files
from sampling.pictures import draw_grid
from scoring.features import load_extractor
from scoring.image_sets import open_images
from scoring.score import open_reference
from scripts import export, merge_lora, report
from weights import averages
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


def write_lmdb_of_meanflow(at: Path) -> None:
    import lmdb

    with lmdb.open(str(at / "lmdb"), map_size=2**20) as env, env.begin(write=True) as transaction:
        transaction.put(b"num_samples", b"1")
        transaction.put(b"0", pickle.dumps(Harm()))


def write_tar_of_maskdit(at: Path) -> None:
    put_tar(at / "latent_imagenet_512_train-0000.tar",
            {"0000000.latent": pickle.dumps(Harm()), "0000000.cls": b"1"})


PICKLES = {  # where one is: what writes it in a folder, what reads it there, what is said; "": it is read otherwise
    **{f"weights {form} {is_new}": (partial(save_among_weights, form, is_new), lambda at: read_weights(at / "x.pt"),
                                    FOUND) for form in range(len(AMONG_WEIGHTS)) for is_new in (True, False)},
    "Inception": (lambda at: save({"fc.weight": Harm()}, at / "x.pt"),
                  lambda at: load_extractor(one_rank(), "inception", at / "x.pt"), f"weights alone: {FOUND}"),
    "autoencoder's file": (lambda at: save({"state_dict": Harm()}, at / "x.pt"),
                           lambda at: load_autoencoder(str(at / "x.pt")), FOUND),
    "autoencoder's folder": (save_vae_with_pickle, lambda at: load_autoencoder(str(at / "vae")),
                             "vae has no diffusion_pytorch_model.safetensors that can be read"),
    "statistics of latents": (lambda at: save({"mean": Harm(), "std": 1},
                                              write_lightningdit(at)[0] / "latents_stats.pt"),
                              lambda at: import_latents(at / "vavae", at / "out"),
                              "does not hold tensors mean and std"),
    "latent folder": (lambda at: np.save(write_folder(at / "set", numbered(), labels_of()) / "labels-00001.npy", HARM),
                      lambda at: open_latents(at / "set"), "is not a complete npy file of numbers"),
    "tars": (lambda at: write_tars(at, [*numbered(), HARM], labels_of(COUNT + 1)),
             lambda at: open_latents(at, kind="sample"), "object (1,)"),
    "index of tars": (lambda at: np.savez(write_tars(at, numbered(), labels_of()) / tars.TAR_INDEX, starts=HARM),
                      lambda at: open_latents(at, kind="sample"), ""),
    "REPA's arrays": (lambda at: (write_repa(at)[0] / "vae-sd/00000/img-mean-std-00000011.npy").write_bytes(npy(HARM)),
                      lambda at: import_latents(at / "repa", at / "out"), NEVER),
    "MeanFlow's lmdb": (write_lmdb_of_meanflow, lambda at: import_latents(at / "lmdb", at / "out"),
                        "pickles, which are never loaded"),  # zhuyu-cs/MeanFlow#7
    **{f"MaskDiT's tar {form}": (write_tar_of_maskdit,
                                 lambda at, form=form: import_latents(*at.glob("*.tar"), at / "out", form),
                                 "never loaded. Import the lmdb that the tars were made from (format=maskdit)")
       for form in ("auto", "tread")},
    "reference": (lambda at: np.savez(at / "x.npz", mu=HARM, sigma=np.eye(192)),
                  lambda at: open_reference(one_rank(), at / "x.npz", load_extractor(one_rank(), "pixels")),
                  f"it is damaged, or holds pickled Python objects, {NEVER}"),
    **{f"images {i}": (lambda at, value=value: np.save(at / "x.npy", np.array(value)),
                       lambda at: open_images(one_rank(), "reference", str(at / "x.npy")),
                       "x.npy holds Python objects as a pickle, which can run code and is never loaded; images")
       for i, value in enumerate(({"mu": Harm()}, [Harm(), None]))},
    **{f"Hydra's run {option}": (lambda at: (at / "x.pkl").write_bytes(pickle.dumps(Harm())),
                                 lambda at, option=option: parse_options([option]),
                                 "settings have no dashes")
       for option in ("--experimental-rerun=x.pkl", "--experimental-rerun", "--exp=x.pkl")},
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

STEP, SNAPSHOT, GRID = "checkpoints/step-00000004", "averages/step-00000004", "step-00000004.png"
ADAPTED = "checkpoints/step-00000001"
COMMANDS = {
    "train": lambda run, data, *_: train.main(*settings(run, data), "steps=5"),
    "sample": lambda run, *_: sample.main(
        f"checkpoint={run}", "weights=ema-std0.07", "seeds=0-1", "classes=[0]", "num_steps=1"),
    "guide": lambda run, *_: sample.compare_guided(
        f"checkpoint={run}", "weights=ema-std0.07", "seeds=0-1", "classes=[0]", "num_steps=1", "guidance=cfg",
        "scale=1.5"),
    "score": lambda run, data, reference, _: fid.main(
        f"checkpoint={run}", f"reference={reference}", "features=pixels", "num_samples=2", "num_steps=1",
        "batch_size=2"),
    "adapt": lambda run, data, _, out: train.main(*adapted(out, data, run)),
    "merge": lambda run, data, _, out: merge_lora.main(f"checkpoint={run}", f"out={out}"),
    "export": lambda run, data, _, out: export.main(f"checkpoint={run}", "to=hub", f"out={out}"),
    "report": lambda run, data, _, out: report.main(str(run), f"out={out}"),
}
PLACES = {
    "train": ["averages", "checkpoints", "samples", "base", "metrics.jsonl", "results.jsonl", ".lock", STEP, SNAPSHOT],
    "sample": ["averages", "checkpoints", "samples"], "guide": ["averages", "checkpoints", "samples"],
    "score": ["checkpoints", "features", "results.jsonl"],
    "adapt": ["base", "base/base", "base/ema.safetensors", f"{STEP}/meta.json", f"{STEP}/ema.safetensors"],
    "merge": ["base", "base/ema.safetensors", "base/meta.json", "checkpoints", ADAPTED, f"{ADAPTED}/meta.json",
              f"{ADAPTED}/ema.safetensors", f"{ADAPTED}/model.safetensors"],
    "export": ["checkpoints", "samples", "results.jsonl"], "report": ["samples"],
}  # fmt: skip


def settings(run, data) -> list[str]:
    return [*command(run, data)[1:], "model=dit", "model.depth=2", "ema.std=[0.05,0.10]", "checkpoint.every=2",
            "checkpoint.keep_last=1", "diffusion=rf"]


def adapted(run, data, base) -> list[str]:
    return [*settings(run, data), f"init_from={base}", "lora.rank=2", "ema.std=[]", "steps=1"]


@pytest.fixture(scope="module")
def honest(shapes, tmp_path_factory) -> Path:
    """A run of four steps with all that a run's folder may hold."""
    run = tmp_path_factory.mktemp("honest") / "run"
    train.main(*settings(run, shapes), "steps=4")
    shutil.copytree(run / STEP, run / "base/base")
    for name in ("ema.safetensors", "meta.json"):
        shutil.copy(run / STEP / name, run / "base")
    (run / "features").mkdir()
    (run / "results.jsonl").touch()
    return run


@pytest.fixture(scope="module")
def theirs(honest, shapes, tmp_path_factory) -> dict[str, Path]:
    """The run that each command is given: what is merged is an adapter to the others'."""
    adapter = tmp_path_factory.mktemp("adapter") / "run"
    train.main(*adapted(adapter, shapes, honest))
    return {program: adapter if program == "merge" else honest for program in COMMANDS}


@pytest.mark.parametrize("program", COMMANDS)
def test_each_command_of_the_table_works_on_a_run_without_links(theirs, shapes, pixel_reference, tmp_path, program):
    run = shutil.copytree(theirs[program], tmp_path / "run")
    assert not in_a_line(COMMANDS[program], run, shapes, pixel_reference, tmp_path / "out")


@pytest.mark.parametrize(("program", "name"), [(program, name) for program, names in PLACES.items() for name in names])
def test_nothing_outside_of_a_run_is_changed_or_copied_through_a_link_in_it(theirs, shapes, pixel_reference, tmp_path,
                                                                            program, name):
    outside, run = (shutil.copytree(theirs[program], tmp_path / copy) for copy in ("outside", "run"))
    out = tmp_path / "out"
    files.remove(run / name)
    (run / name).symlink_to(outside / name)
    private = outside / name / GRID if (outside / name).is_dir() else outside / name
    with open(private, "ab") as file:
        file.write(b'{"step": 1, "note": "PRIVATE"}\n')
    before = everything(outside)
    in_a_line(COMMANDS[program], run, shapes, pixel_reference, out)
    assert everything(outside) == before
    for place in (run, out):
        assert not any(content and b"PRIVATE" in os.fsencode(content) for content in everything(place).values())


def test_a_record_cannot_have_a_snapshot_copied_over_a_file_elsewhere(tmp_path):
    run, target = tmp_path / "run", tmp_path / "elsewhere/x"
    folder = checkpoints.step_folder(run, 4)
    checkpoints.save(folder, {"ema": {"a": torch.ones(1)}}, {"step": 4})
    # Of the checkpoint the sender's bytes, of the snapshot elsewhere.
    (folder / "ema-std").symlink_to("../x")
    for place in (run / "checkpoints/x", run / "averages", target.parent):
        place.mkdir()
    (run / "checkpoints/x/x").write_text("theirs")
    (run / "averages/x").symlink_to(target.parent)
    target.write_text("mine")
    record = {"bytes": 6, "sha256": files.sha256(run / "checkpoints/x/x")}
    checkpoints.write_meta(folder, checkpoints.read_meta(folder) | {"files": {"ema-std": record, "ema-std/x": record}})
    averages.keep_snapshots(run)
    assert target.read_text() == "mine" and not (run / SNAPSHOT).exists()


def test_a_link_instead_of_a_checkpoint_is_skipped_and_set_aside(tmp_path):
    checkpoints.save(checkpoints.step_folder(tmp_path, 2), {"model": {"a": torch.ones(1)}}, {"step": 2})
    place = checkpoints.step_folder(tmp_path, 4)
    place.symlink_to("nothing")
    with pytest.warns(UserWarning, match="step-00000004 is damaged"):
        assert checkpoints.latest(tmp_path) == checkpoints.step_folder(tmp_path, 2)
    checkpoints.set_aside_after(tmp_path, 2)
    checkpoints.save(place, {"model": {"a": torch.ones(1)}}, {"step": 4})
    assert checkpoints.problem(place) is None and place.with_name("damaged-step-00000004").is_symlink()


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
    train.main(*settings(tmp_path / "runs/one", shapes), "steps=5")
    assert checkpoints.latest(there).name == "step-00000005" and rows(there)[-1]["step"] == 5


# ---- numbers in an index of tars ------------------------------------------------------------------------------------

NUMBERS = [-1, -(2**40), 2**40, 2**63 - 1]
FORMS = {"shorter": lambda a: a[:-1], "longer": lambda a: np.append(a, a[-1]), "nested": lambda a: a[None],
         "floats": lambda a: a.astype(float)}


@pytest.fixture(scope="module")
def indexed(tmp_path_factory) -> tuple[list[Path], dict]:
    """Three tars, and what is in their index."""
    folder = write_tars(tmp_path_factory.mktemp("tars"), numbered(), labels_of())
    shards = sorted(folder.glob("*.tar"))
    return shards, tars.tar_index(shards)


def put(place: int, number: int):
    return lambda a: np.concatenate([a[:place], [number], a[place:][1:]])


@pytest.mark.parametrize(("name", "change"), [
    *((name, change) for name in ("offsets", "starts", "labels", "shape") for change in FORMS.values()),
    *((name, put(place, number)) for name in ("offsets", "starts", "shape") for place in (0, 1, 2)
      for number in NUMBERS),
    *(("labels", put(place, number)) for place in (0, 1, 102) for number in NUMBERS[:2]), ("shape", put(0, 0)),
    ("starts", put(0, 1)),
    ("offsets", lambda a: np.append(a[:-1], 10**6)), ("dtype", lambda a: np.array("|O8")),
    ("dtype", lambda a: np.array(">f2")),
])  # fmt: skip
def test_an_index_of_tars_with_a_number_out_of_range_is_made_again(indexed, name, change):
    shards, whole = indexed
    index = whole | {name: change(whole[name])}
    np.savez(shards[0].with_name(tars.TAR_INDEX), key=np.array(tars.index_key(shards, index)),
             **index)     # anybody can compute the key
    assert all(np.array_equal(values, whole[key]) for key, values in tars.tar_index(shards).items())


def test_the_last_place_in_a_tar_is_the_last_at_which_a_latent_fits(indexed):
    shards, whole = indexed
    size = int(np.prod(whole["shape"])) * np.dtype(str(whole["dtype"])).itemsize
    for offset, fits in ((shards[-1].stat().st_size - size, True), (shards[-1].stat().st_size - size + 1, False)):
        assert tars.is_valid_index(whole | {"offsets": np.append(whole["offsets"][:-1], offset)}, shards) == fits


# ---- records that are not as this code writes them ------------------------------------------------------------------

DEEP = "[" * 100_000
OTHERS = ["[]", "1", '"x"', "null", DEEP, '{"files": []}', '{"files": {"ema.safetensors": 1}, "step": 4}', "{", "\0",
          '{"a":' * 300 + "1" + "}" * 300]
WRONG = [0, -1, 2**70, 1e300, "x", [], {}, None, [[]], True, "a" * 2**20]


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> Path:
    network = {"input_size": 4, "patch_size": 2, "in_channels": 3, "hidden_size": 8, "depth": 2, "num_heads": 2,
               "num_classes": 3}
    convention = {"scale": 1.0, "shift": 0.0, "latents_mean": [0.0] * 3, "latents_std": [1.0] * 3, "pixels": [0.0, 1.0]}
    return write_run(tmp_path_factory.mktemp("untrained") / "run", network, 4, class_names=["a", "b", "c"],
                     convention=convention, classes=[0, 1, 2])


def spoilt(plain, around=()):
    """Places in a record, each with each of WRONG in it."""
    for key, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
        yield from ((*around, key, wrong) for wrong in WRONG)
        if isinstance(value, dict | list):
            yield from spoilt(value, (*around, key))


@pytest.mark.parametrize("content", OTHERS)
def test_a_record_of_another_form_is_a_damaged_checkpoint(untrained, tmp_path, content):
    run = shutil.copytree(untrained, tmp_path / "run")
    (run / STEP / "meta.json").write_text(content)
    assert checkpoints.problem(run / STEP) and "\n" not in checkpoints.problem(run / STEP)
    checkpoints.is_sound(run / STEP)    # which pruning asks
    with pytest.warns(UserWarning, match="is damaged"):
        assert "is complete" in in_a_line(load_trained, run)


def test_each_value_of_a_record_may_be_anything(untrained, tmp_path):
    run = shutil.copytree(untrained, tmp_path / "run")
    whole = checkpoints.read_meta(run / STEP)
    for *place, key, wrong in spoilt({name: whole[name] for name in ("network", "diffusion", "data")}):
        changed = inner = json.loads(json.dumps(whole))
        for part in place:
            inner = inner[part]
        inner[key] = wrong
        checkpoints.write_meta(run / STEP, changed)
        in_a_line(load_trained, run)


def test_what_is_beyond_the_table_of_classes_is_refused(untrained, tmp_path):
    run = shutil.copytree(untrained, tmp_path / "run")
    whole = checkpoints.read_meta(run / STEP)
    for change in ({"classes": [0, 3]}, {"class_names": ["a"] * 4}, {"display_names": ["a"] * 4}):
        checkpoints.write_meta(run / STEP, whole | {"data": whole["data"] | change})
        assert "4 classes" in in_a_line(load_trained, run)


def test_a_pipe_in_place_of_a_record_is_not_waited_for(untrained, tmp_path):
    run = shutil.copytree(untrained, tmp_path / "run")
    for name in ("meta.json", "ema.safetensors"):
        (run / STEP / name).unlink()
        os.mkfifo(run / STEP / name)
        assert checkpoints.problem(run / STEP)


ROW = {"images": 4, "metrics": {"fid": 1.0}, "source": {"step": 4, "guidance": None}, "extractor": {"name": "pixels"},
       "reference": {"path": "x"}}


def test_rows_without_a_key_are_passed_over(tmp_path):
    without = [{key: value for key, value in ROW.items() if key != name} for name in ROW]
    wrong = [ROW | {key: value} for key in ROW
             for value in (1.5, "x", [], [1])] + [ROW | {"source": {"guidance": 1}}, ROW | {"metrics": {"fid": "x"}}]
    for row in (*without, *wrong, ROW):
        files.append_row(tmp_path / "results.jsonl", row)
    with open(tmp_path / "results.jsonl", "a") as file:
        file.write(f'{{"images": {DEEP}\n[]\n1\n')
    for row in ({"loss": 1.0}, {"step": "x"}, {"step": True}, {"step": 2, "loss": [1]}, {"step": 3, "loss": 2.0}):
        files.append_row(tmp_path / "metrics.jsonl", row)
    assert report.read_metrics(tmp_path / "metrics.jsonl")["loss"].tolist()[1:] == [2.0]


@pytest.mark.parametrize("content",
                         ["{}", "[]", '{"runs": []}', '{"name": "x"}', '{"name": "x", "runs": [1]}',
                          '{"name": "x", "runs": [{"scores": []}]}', DEEP])
def test_a_study_of_another_form_is_a_line(tmp_path, content):
    (tmp_path / "study.json").write_text(content)
    assert str(tmp_path / "study.json") in in_a_line(report.read_study, tmp_path / "study.json")


# ---- labels ---------------------------------------------------------------------------------------------------------


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))


@pytest.mark.parametrize("content", [LAUGHS, "a: &a [*a]", "[" * 1500, "a: " * 2**20, "a: \xff\xfe"])
def test_yaml_of_others_does_not_multiply(tmp_path, content):
    (tmp_path / "config.yaml").write_text(content, encoding="latin-1")
    assert len(in_a_line(read_foreign_yaml, tmp_path / "config.yaml")) < 1000


@pytest.mark.parametrize("name", ["a\nb", "a\0b", "a\u2028b", "\r"])
def test_a_class_whose_name_breaks_a_line_is_shown_with_a_space(name):
    two = torch.zeros(2, 8, 8, 3, dtype=torch.uint8)
    shown = draw_grid(two, [0, 1], ["a b" if len(name) == 3 else " ", "cat"])
    assert shown.tobytes() == draw_grid(two, [0, 1], [name, "cat"]).tobytes()
    assert draw_grid(two, [0, 1], ["x" * 2**20, "cat"]).size


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
    assert in_a_line(map_npy, tmp_path / "x.npy", [(2, 8, 8, 3)], ["uint8"])


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


@pytest.mark.parametrize("name",
                         ["latents-00000.npy", "labels-00000.npy", "metadata.json", "shard-000000.tar", tars.TAR_INDEX])
def test_a_pipe_in_place_of_latents_is_not_waited_for(tmp_path, name):
    if name.endswith((".tar", ".npz")):
        open_latents(write_tars(tmp_path / "set", numbered(), labels_of()), kind="sample")
    else:
        write_folder(tmp_path / "set", numbered(), labels_of())
    (tmp_path / "set" / name).unlink()
    os.mkfifo(tmp_path / "set" / name)
    assert in_a_line(lambda: open_latents(tmp_path / "set",
                                          kind="sample")) or name == tars.TAR_INDEX   # which is not needed


def test_a_pipe_among_pictures_or_in_place_of_a_zip_is_not_waited_for(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    for name in ("b.png", "c.zip"):
        os.mkfifo(tmp_path / name)
    assert in_a_line(open_source(str(tmp_path)).pixels, 1) and in_a_line(open_source, str(tmp_path / "c.zip"))


def test_weights_that_name_one_dictionary_in_many_others_are_a_line(tmp_path):
    content = {"x": torch.ones(1)}
    for _ in range(40):
        content = {"a": content, "b": content}
    torch.save(content, tmp_path / "x.pt")
    assert "parts" in in_a_line(read_weights, tmp_path / "x.pt")
    for name, blocks in (("x_embedder.proj.weight", "blocks"), ("pos_embed.proj.weight", "transformer_blocks")):
        state = {name: torch.ones(8, 3, 2, 2), f"{blocks}.1000000000.a": torch.ones(1)}
        save_file(state, tmp_path / "x.safetensors")
        assert in_a_line(load_trained, tmp_path / "x.safetensors")


# ---- tables that the report writes ----------------------------------------------------------------------------------


def test_no_cell_of_a_table_is_a_formula_to_a_spreadsheet():
    if not (node := shutil.which("node")):
        pytest.skip("no node")
    cells = ["=1+1", "+x", "-x", "@x", "\t=1", "-1.5", "x=1", 'say "=1"', -2.5, ""]
    stubs = f"""const source = {{data: {json.dumps({"a": cells})}, get_length: () => {len(cells)}}}, file = "x"
    globalThis.Blob = class {{ constructor(lines) {{ console.log(JSON.stringify(lines)) }} }}
    URL.createObjectURL = () => ""; globalThis.document = {{createElement: () => ({{click() {{}}}})}}"""
    printed = subprocess.run([node, "-e", stubs + report.SAVE_CSV], capture_output=True, text=True, check=True).stdout
    assert [line.rstrip("\n") for line in json.loads(printed)] == [
        '"a"', '"\'=1+1"', '"\'+x"', '"\'-x"', '"\'@x"', '"\'\t=1"', '"-1.5"', '"x=1"', '"say ""=1"""', "-2.5", '""']
