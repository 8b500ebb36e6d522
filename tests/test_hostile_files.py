"""Files that somebody made to do harm, or that are damaged: no command runs code in them, crashes because of them,
takes more than a gigabyte for them, or reads or changes a file outside of what it was given. One line names the file.
"""

import os
import shutil
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import hypothesis
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from conftest import PATIENCE, change_record, one_rank
from forked import Life
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from test_data import COUNT, labels_of, numbered, write_folder
from test_foreign import weights_of
from test_import_latents import import_latents, npy, write_repa
from test_labels import png, put_tar, put_zip, shard
from training_runs import command, rows, write_run

import fid
import sample
import train
from dit import DiT
from latents.decoding import UnreadableImage
from latents.folder import open_latents
from latents.forms import open_stored
from latents.images import open_source
from runtime import files
from runtime.untrusted import Rows, printable
from sampling.pictures import is_ours
from scoring.features import load_extractor
from scoring.image_sets import open_images
from scoring.score import open_reference
from scripts import import_weights as import_script
from weights import checkpoints
from weights.loading import load_trained
from weights.reading import read_tensors


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


def import_weights(name: str, at: Path, form: str = "sit") -> None:
    import_script.main(f"source={at / name}", f"format={form}", f"out={at}/out")


# ---- pickles --------------------------------------------------------------------------------------------------------


class Harm:
    """A pickle of it makes a file named `executed` where it is loaded by a reader that trusts it."""

    def __reduce__(self):
        return os.system, ("touch executed",)


HARM = np.array([Harm()], object)
NEVER = "which can run code and are never loaded"
FOUND = f"it holds pickled Python objects (posix.system), {NEVER}"
PICKLES = {  # where one is: what writes it in a folder, what reads it there, what is said
    "weights": (lambda at: torch.save({"ema": tiny(), "opt": Harm()}, at / "x.pt"),
                partial(import_weights, "x.pt"), FOUND),
    "weights of torch 1": (lambda at: torch.save({"ema": tiny(), "opt": Harm()}, at / "x.pt",
                                                 _use_new_zipfile_serialization=False),
                           partial(import_weights, "x.pt"), FOUND),
    "Inception": (lambda at: torch.save({"fc.weight": Harm()}, at / "x.pt"),
                  lambda at: load_extractor(one_rank(), "inception", at / "x.pt"), FOUND),
    "latent folder": (lambda at: np.save(write_folder(at / "set", numbered(), labels_of()) / "labels-00001.npy", HARM),
                      lambda at: open_latents(at / "set"), "is not a complete npy file of numbers"),
    "REPA's arrays": (lambda at: (write_repa(at)[0] / "00000/img-mean-std-00000011.npy").write_bytes(npy(HARM)),
                      lambda at: import_latents(at / "vae-sd", at / "out", "repa"), NEVER),
    "reference": (lambda at: np.savez(at / "x.npz", mu=HARM, sigma=np.eye(192)),
                  lambda at: open_reference(one_rank(), at / "x.npz", load_extractor(one_rank(), "pixels")),
                  f"it holds pickled Python objects, {NEVER}"),
}


@pytest.mark.parametrize("place", PICKLES)
def test_a_pickle_is_refused_where_it_is_read_and_never_run(tmp_path, monkeypatch, place):
    write, read, words = PICKLES[place]
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    said = in_a_line(read, tmp_path)
    assert words in said and not (tmp_path / "executed").exists()
    assert not any(advice in said for advice in ("weights_only", "allow_pickle", "trust"))


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
    "train": ["checkpoints", "samples", "metrics.jsonl", "results.jsonl", ".lock", STEP],
    "sample": ["checkpoints", "samples"], "score": ["checkpoints", "results.jsonl"],
}


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


@pytest.mark.parametrize("linked", ["runs", "runs/one"])
def test_a_run_behind_a_link_resumes(honest, shapes, tmp_path, linked):
    there = shutil.copytree(honest, tmp_path / "disk/one" if linked == "runs/one" else tmp_path / "disk/runs/one")
    (tmp_path / linked).parent.mkdir(exist_ok=True)
    (tmp_path / linked).symlink_to(there if linked == "runs/one" else there.parent)
    train.main(*settings(tmp_path / "runs/one", shapes, "steps=5"))
    assert checkpoints.latest(there).name == "step-00000005" and rows(there)[-1]["step"] == 5


# ---- records that are not as this code writes them ------------------------------------------------------------------

OTHERS = ["[]", "1", '"x"', "null", "[" * 100_000, '{"files": []}', '{"files": {"ema.safetensors": 1}, "step": 4}',
          "{", "\0", '{"a":' * 300 + "1" + "}" * 300]


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> Path:
    network = {"input_size": 4, "patch_size": 2, "in_channels": 3, "hidden_size": 8, "depth": 2, "num_heads": 2}
    return write_run(tmp_path_factory.mktemp("untrained") / "run", network, 4)


@pytest.mark.parametrize("content", OTHERS)
def test_a_record_of_another_form_is_a_damaged_checkpoint(untrained, tmp_path, content):
    run = shutil.copytree(untrained, tmp_path / "run")
    (run / STEP / "meta.json").write_text(content)
    assert in_a_line(checkpoints.check, run / STEP)
    checkpoints.is_sound(run / STEP)    # which pruning asks
    with pytest.warns(UserWarning, match="is damaged"):
        assert "is complete" in in_a_line(load_trained, run)


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


@pytest.mark.parametrize("name", ["../outside.npy", "sub/../latents-00000.npy", "{out}/latents-00000.npy", "a\0b",
                                  "link.npy"])
def test_the_record_of_latents_names_files_of_its_folder_alone(tmp_path, name):
    out = write_folder(tmp_path / "set", numbered(), labels_of(), shard=1000)
    shutil.copy(out / "latents-00000.npy", tmp_path / "outside.npy")
    (out / "link.npy").symlink_to(tmp_path / "outside.npy")
    change_record(out, shards=[{"latents": name.format(out=out), "labels": "labels-00000.npy", "count": COUNT}])
    assert "which is not a plain file in that folder" in in_a_line(open_latents, out)


# ---- files that lie, or hold what nobody writes ---------------------------------------------------------------------


def tiny() -> dict[str, torch.Tensor]:
    return dict(DiT(input_size=4, patch_size=2, in_channels=4, hidden_size=8, depth=1, num_heads=2,
                    num_classes=2).state_dict())


def save_weights(at: Path, **changes) -> None:
    torch.save({"model": tiny() | changes.pop("state", {}), **changes}, at / "x.pt")


def laughs() -> list:
    lines = ["x"]
    lines += [lines, lines]
    return lines


def save_repeated(at: Path) -> None:
    indices = pyarrow.array(np.zeros(20_000, np.int32))
    rows = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array([bytes(2**20)], pyarrow.binary()))
    pyarrow.parquet.write_table(pyarrow.table({"image": rows}), at / "x.parquet", compression="zstd",
                                store_schema=False)


def sparse_tar(at: Path) -> None:
    info = tarfile.TarInfo("a.latent.npy")
    info.size = 5 * 2**40
    (at / "x.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT))
    os.truncate(at / "x.tar", 6 * 2**40)


def save_of_diffusers(at: Path) -> None:
    save_file(weights_of("diffusers"), at / "x.safetensors")
    (at / "config.json").write_text('{"sample_size": 8192, "num_attention_heads": 4}')


def reference(at: Path) -> object:
    return open_reference(one_rank(), at / "x.npz", load_extractor(one_rank(), "pixels"))


def first_pixels(name: str, at: Path) -> object:
    return open_source(at / name, "none").pixels(0, 8)


LIES = {  # a lie: what writes it in a folder, what reads it there, what is said; "": it is read, as nothing needs it
    "a tensor of stride 0": (lambda at: save_weights(at, state={"x_embedder.proj.weight": torch.zeros(1).expand(
        20_000, 4, 100, 50)}), partial(import_weights, "x.pt"), "more elements than are stored"),
    "lists that contain themselves": (lambda at: save_weights(at, args={"model": laughs()}),
                       lambda at: read_tensors(at / "x.pt") and None, ""),
    "a repeated value": (save_repeated, lambda at: open_source(at / "x.parquet", "none"),
                         "x.parquet is not a complete parquet file ("),
    "a link to a device": (lambda at: [(at / "a").mkdir(), (at / "a/1.png").symlink_to("/dev/zero")],
                           partial(first_pixels, "a"), "a/1.png is not a plain file"),
    "a side of latents": (save_of_diffusers, partial(import_weights, "x.safetensors", form="diffusers"),
                          "have 16,777,216 tokens"),
    "a member of a zip": (lambda at: put_zip(at / "x.zip", {"a/0.png": bytes(2**28 + 1)}, zipfile.ZIP_DEFLATED),
                          partial(first_pixels, "x.zip"), "it has 268,435,457 bytes"),
    "another packing": (lambda at: put_zip(at / "x.zip", {"a/0.png": bytes(9)}, zipfile.ZIP_LZMA),
                        partial(first_pixels, "x.zip"), "compressed in another way than deflate"),
    "a mean": (lambda at: np.savez_compressed(at / "x.npz", mu=np.zeros(2**25), sigma=np.eye(4)), reference,
               "has mu of shape (33554432,)"),
    "a transparent image": (lambda at: [(at / "a").mkdir(), Image.new("L", (9_000, 9_000)).save(
        at / "a/0.png", transparency=0)], partial(first_pixels, "a"), "9000x9000 pixels"),
    "empty lists": (lambda at: [(at / "a.png").write_bytes(png(0)), (at / "x.json").write_text(
        '{"labels": [' + "[]," * 25_000_000 + "[]]}")],
        lambda at: open_source(at, str(at / "x.json")), "it holds more than 8,000,000 values"),
    "a sparse tar": (sparse_tar, lambda at: import_latents(at / "x.tar", at / "out", "tread", kind="sample"), "x.tar"),
    "a complex mean": (lambda at: np.savez(at / "x.npz", mu=np.zeros(192, complex), sigma=np.eye(192)), reference,
                       "not of real numbers"),
    "a size that is a number": (lambda at: np.savez(at / "x.npz", mu=np.zeros(192), sigma=np.eye(192), size=8),
                                reference, "its size is 8"),
    "a sparse tensor": (lambda at: save_weights(at, state={"pos_embed": torch.eye(4).to_sparse()}),
                        partial(import_weights, "x.pt"), "it holds a tensor of (4, 4) that is sparse"),
    "a number for a layer": (lambda at: save_weights(at, state={"x_embedder.proj.weight": torch.tensor(1.0)}),
                             partial(import_weights, "x.pt"), "x.pt"),
    "a billion blocks": (lambda at: save_file({
        "x_embedder.proj.weight": torch.ones(8, 3, 2, 2), "blocks.1000000000.a": torch.ones(1)}, at / "x.safetensors"),
        partial(import_weights, "x.safetensors"), "are not"),
}


def memory() -> tuple[int, int]:
    """Bytes of this process in memory now, and at most since it was asked to count anew."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(lines[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="only Linux counts the most memory anew")
@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_refused_in_one_line_within_a_gigabyte(tmp_path, lie):
    write, read, words = LIES[lie]

    def live() -> None:
        Path("/proc/self/clear_refs").write_text("5")
        before, _ = memory()
        said = in_a_line(read, tmp_path)
        print(f"{(memory()[1] - before) / 2**30:.2f} GB: {said}")

    write(tmp_path)
    ended = Life(live).wait(PATIENCE)
    assert ended.code == 0 and not ended.out_of_time, ended.printed
    gigabytes, said = ended.printed.strip().splitlines()[-1].split(" GB: " if words else " GB:")
    assert float(gigabytes) < 1 and (words in said if words else not said.strip()), ended.printed


def test_codes_that_a_terminal_obeys_are_printed_as_escapes():
    assert printable("a\x1b[2Jb\n\tcafé\x9b") == "a\\x1b[2Jb\n\tcafé\\x9b"


def test_a_file_that_becomes_shorter_while_it_is_read_is_one_line_with_its_name(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(40_000, dtype=np.float32).reshape(-1, 4))
    rows = Rows(tmp_path / "x.npy")
    assert rows.read(9_000).tolist() == [[36_000, 36_001, 36_002, 36_003]]
    os.truncate(tmp_path / "x.npy", 4096)  # as by copying it over itself
    assert "x.npy became shorter while it was read" in in_a_line(rows.read, 9_000)


# ---- damage ---------------------------------------------------------------------------------------------------------


def read_all_pixels(path: Path) -> None:
    """Reads images as scoring does, which adds the name."""
    source = open_source(path, "none")
    for i in range(len(source)):
        try:
            source.pixels(i, 8)
        except UnreadableImage as error:
            raise ValueError(f"{path}: {source.names[i]} ({error})") from error


def read_tar(path: Path) -> None:
    stored = open_stored("tread", str(path), kind="sample", scale=None, latent_norm=True, autoencoder=None)
    stored.sides["latents"](0, len(stored.labels))


LATENT = np.linspace(-2, 2, 4 * 8 * 8, dtype=np.float16).reshape(4, 8, 8)
READERS = {  # what writes a file, what reads it
    "x.zip": (lambda file: put_zip(file, {"a/0.png": png(0), "b/1.png": png(0)}), read_all_pixels),
    "x.tar": (lambda file: put_tar(file, {"a.latent.npy": npy(LATENT), "a.cls": b"0"}), read_tar),
    "images.tar": (lambda file: put_tar(file, {"a/0.png": png(0), "b/1.png": png(1)}), read_all_pixels),
    "x.npz": (lambda file: np.savez(file, mu=np.zeros(192), sigma=np.eye(192), size=np.array([8, 8])),
              lambda file: reference(file.parent)),
    "images.npz": (lambda file: np.savez_compressed(file, arr_0=np.zeros((2, 8, 8, 3), np.uint8)),
                   lambda file: open_images(one_rank(), "images", str(file)).read(np.arange(2))),
    "x.npy": (lambda file: np.save(file, np.zeros((2, 8, 8, 3), np.uint8)),
              lambda file: open_images(one_rank(), "images", str(file)).read(np.arange(2))),
    "x.pt": (lambda file: save_weights(file.parent), lambda file: read_tensors(file) and None),
    "x.safetensors": (lambda file: save_file(tiny(), file), lambda file: read_tensors(file) and None),
    "x.parquet": (lambda file: file.write_bytes(shard(0, 1, 2)), read_all_pixels),
    "x.png": (lambda file: file.write_bytes(png(0)), lambda file: is_ours(file) and None),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A folder with a file for each reader, which it reads."""
    place = tmp_path_factory.mktemp("sound")
    for name, (write, read) in READERS.items():
        write(place / name)
        assert not in_a_line(read, place / name), name
    return place


@pytest.mark.parametrize("name", READERS)
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_a_damaged_file_is_read_or_is_one_line_with_its_name(sound, tmp_path_factory, name, data):
    content = bytearray((sound / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        # Headers are at the beginning, and tables of contents at the end.
        near = data.draw(st.integers(0, min(len(content), 400) - 1))
        at = data.draw(st.sampled_from([near, len(content) - 1 - near]))
        match data.draw(st.sampled_from(["flip", "cut", "put", "number"])):
            case "flip":
                content[at] ^= data.draw(st.integers(1, 255))
            case "cut":
                del content[max(1, at) :]
            case "put":
                content[at:at] = data.draw(st.binary(max_size=16))
            case "number":
                content[at : at + 4] = b"\xff\xff\xff\x7f"
    place = tmp_path_factory.mktemp("damaged")
    (place / name).write_bytes(content)
    said = in_a_line(READERS[name][1], place / name)
    assert not said or str(place) in said, said
