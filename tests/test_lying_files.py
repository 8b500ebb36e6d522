"""Files that lie about their sizes or are damaged: each reader says so in one line that names the file, within a
gigabyte of memory.
"""

import io
import json
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from conftest import PATIENCE, one_rank
from forked import Life
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from test_hostile_files import import_weights, in_a_line
from test_import_latents import import_latents

from dit import DiT
from latents.decoding import UnreadableImage
from latents.folder import open_latents
from latents.images import open_source
from runtime.untrusted import Rows, printable
from sampling.pictures import check_file, read_sampling_record
from scoring.features import load_extractor
from scoring.image_sets import open_images
from scoring.score import open_reference
from scripts import import_weights as import_script
from weights.autoencoders import read_statistics
from weights.reading import read_tensors

GIGABYTE = 2**30
PROPERTY = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def npy(shape, dtype="<f4", content=b"") -> bytes:
    """An npy that declares a shape, whatever its content is."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue() + content


def save_npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def zipped(at: Path, members: dict[str, bytes], how: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(at, "w", how) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return at


def tarred(at: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(at, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return at


def png(side: int = 8) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "PNG")
    return file.getvalue()


def large_png(side: int) -> bytes:
    """A transparent image that declares a side, with a few of its bytes."""
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 6, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(99))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*one) for one in chunks)


# ---- memory ---------------------------------------------------------------------------------------------------------


def tiny() -> dict[str, torch.Tensor]:
    return dict(DiT(input_size=4, patch_size=2, in_channels=4, hidden_size=8, depth=1, num_heads=2,
                    num_classes=2).state_dict())


def save_weights(at: Path, **changes) -> None:
    torch.save({"model": tiny() | changes.pop("state", {}), **changes}, at / "x.pt")


def laughs() -> list:
    lines = "x"
    for _ in range(40):
        lines = [lines, lines]
    return lines


def save_parquet(at: Path, image, **options) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"image": image, "label": [0] * len(image)}), at / "x.parquet",
                                compression="zstd", **options)


def save_repeated(at: Path, **options) -> None:
    indices = pyarrow.array(np.zeros(20_000, np.int32))
    save_parquet(at, pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array([bytes(2**20)], pyarrow.binary())),
                 **options)


def sparse_tar(at: Path) -> None:
    info = tarfile.TarInfo("a.latent.npy")
    info.size = 5 * 2**40
    (at / "x.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT))
    os.truncate(at / "x.tar", 6 * 2**40)


def save_without_positions(at: Path) -> None:
    save_file({key: value for key, value in tiny().items() if key != "pos_embed"}, at / "x.safetensors")


def read_pt(at: Path) -> None:
    import_weights(at / "x.pt")


def reference(at: Path) -> object:
    return open_reference(one_rank(), at / "x.npz", load_extractor(one_rank(), "pixels"), reference_size=8)


def first_pixels(name: str, at: Path) -> object:
    return open_source(at / name, "none").pixels(0, 8)


def pairs(at: Path, latent: bytes, name: str = "x") -> Path:
    for part, content in (("features", latent), ("labels", save_npy(np.zeros(1, np.int64)))):
        (at / f"set/{name}_{part}").mkdir(parents=True)
        (at / f"set/{name}_{part}/0.npy").write_bytes(content)
    return at / "set"


def import_pairs(at: Path) -> object:
    return import_latents(at / "set", at / "out", "fastdit")


LIES = {  # a lie: what writes it in a folder, what reads it there, what is said; "": it is read, as nothing needs it
    "a tensor of stride 0": (lambda at: save_weights(at, state={"x_embedder.proj.weight": torch.zeros(1).expand(
        20_000, 4, 100, 50)}), read_pt, "more elements than are stored"),
    "statistics of stride 0": (lambda at: torch.save({"mean": torch.zeros(1).expand(2**33), "std": torch.ones(4)},
                                                     at / "x.pt"),
                               lambda at: read_statistics(at / "x.pt"), "more elements than are stored"),
    "lists in lists": (lambda at: save_weights(at, args={"model": laughs()}),
                       lambda at: read_tensors(at / "x.pt") and None, ""),
    "a packed pickle": (lambda at: zipped(at / "x.pt", {"x/data.pkl": bytes(9), "x/version": b"3"}),
                        read_pt, "is compressed, as torch.save never does"),
    "a dictionary": (save_repeated, lambda at: open_source(
        at / "x.parquet", "none").read(0), "x.parquet is not a complete parquet file ("),
    "a plain column": (partial(save_repeated, store_schema=False), lambda at: open_source(
        at / "x.parquet", "none").read(0), "x.parquet is not a complete parquet file ("),
    "a link to a device": (lambda at: [(at / "a").mkdir(), (at / "a/1.png").symlink_to("/dev/zero")],
                           partial(first_pixels, "a"), "a/1.png is not a plain file"),
    "a pipe": (lambda at: [(at / "a").mkdir(), os.mkfifo(at / "a/1.png")], partial(first_pixels, "a"),
               "a/1.png is not a plain file"),
    "a side of latents": (save_without_positions, lambda at: import_script.main(
        f"source={at}/x.safetensors", "format=ours", f"out={at}/out", "input_size=8192"), "have 16,777,216 tokens"),
    "a member of a zip": (lambda at: zipped(at / "x.zip", {"a/0.png": bytes(2**28 + 1)}),
                          partial(first_pixels, "x.zip"), "it has 268,435,457 bytes"),
    "another packing": (lambda at: zipped(at / "x.zip", {"a/0.png": bytes(9)}, zipfile.ZIP_LZMA),
                        partial(first_pixels, "x.zip"), "compressed in another way than deflate"),
    "a mean": (lambda at: np.savez_compressed(at / "x.npz", mu=np.zeros(2**25), sigma=np.eye(4)), reference,
               "has mu of shape (33554432,)"),
    "a transparent image": (lambda at: zipped(at / "x.zip", {"a/0.png": large_png(13_300)}),
                            partial(first_pixels, "x.zip"), "13300x13300 pixels"),
    "empty lists": (lambda at: [(at / "a.png").write_bytes(png()), (at / "x.json").write_text(
        '{"labels": [' + "[]," * 25_000_000 + "[]]}")],
        lambda at: open_source(at, str(at / "x.json")), "it holds more than 8,000,000 values"),
    "a sparse tar": (sparse_tar, lambda at: import_latents(at / "x.tar", at / "out", "tread", kind="sample"), "x.tar"),
    "a latent": (lambda at: pairs(at, npy((4, 10_000, 10_000), "<f2")), import_pairs, "it ends early"),
}


def memory() -> tuple[int, int]:
    """Bytes of this process in memory now, and at most since it was asked to count anew."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(lines[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="only Linux counts the most memory anew")
@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_about_its_size_is_refused_within_a_gigabyte(tmp_path, lie):
    write, read, words = LIES[lie]

    def live() -> None:
        Path("/proc/self/clear_refs").write_text("5")
        before, _ = memory()
        said = in_a_line(read, tmp_path)
        print(f"{(memory()[1] - before) / GIGABYTE:.2f} GB: {said}")

    write(tmp_path)
    ended = Life(live).wait(PATIENCE)
    assert ended.code == 0 and not ended.out_of_time, ended.printed
    gigabytes, said = ended.printed.strip().splitlines()[-1].split(" GB: " if words else " GB:")
    assert float(gigabytes) < 1 and (words in said if words else not said.strip()), ended.printed


# ---- sentences ------------------------------------------------------------------------------------------------------

SENTENCES = {  # what writes a file, what reads it, what is said
    "complex latents": (lambda at: pairs(at, save_npy(np.zeros((1, 4, 8, 8), np.complex64))), import_pairs,
                        "0.npy is not a complete npy file of numbers like the others (it holds an array of complex64"),
    "text": (lambda at: pairs(at, save_npy(np.full((1, 4, 8, 8), "1"))), import_pairs, "0.npy is not a complete npy"),
    "records": (lambda at: pairs(at, save_npy(np.zeros((1, 4, 8, 8), "V4"))), import_pairs, "not of real numbers"),
    "a link among latents": (lambda at: [pairs(at, b""), (at / "set/x_features/0.npy").unlink(), (
        at / "set/x_features/0.npy").symlink_to("/etc/hostname")], import_pairs, "0.npy is a link: copy there"),
    "a complex mean": (lambda at: np.savez(at / "x.npz", mu=np.zeros(192, complex), sigma=np.eye(192)), reference,
                       "not of real numbers"),
    "a size that is a number": (lambda at: np.savez(at / "x.npz", mu=np.zeros(192), sigma=np.eye(192), size=8),
                                reference, "its size is 8"),
    "a zero byte in a name": (lambda at: write_record(at, "a\0b"), lambda at: open_latents(at), "names 'a\\x00b'"),
    "a sparse tensor": (lambda at: save_weights(at, state={"pos_embed": torch.eye(4).to_sparse()}),
                        read_pt, "x.pt is not a file of weights (it holds a tensor of"),
    "a tensor without values": (lambda at: save_weights(at, state={"pos_embed": torch.zeros(4, device="meta")}),
                                read_pt, "without values"),
    "a number for a layer": (lambda at: save_weights(at, state={"x_embedder.proj.weight": torch.tensor(1.0)}),
                             read_pt, "x.pt"),
    "a number for a bias": (lambda at: save_weights(at, state={"final_layer.linear.bias": torch.tensor(1.0)}, args={
        "model": "DiT-S/2", "image_size": 32}), read_pt, "x.pt"),
    "deep JSON in a zip": (lambda at: comment(zipped(at / "x.npz", {}), b"[" * 60_000),
                           lambda at: check_file(at / "x.npz", "name another"), "was not made by this code"),
}


def write_record(at: Path, name: str) -> None:
    (at / "metadata.json").write_text(json.dumps({
        "format": 1, "count": 1, "shape": [4, 4, 4], "dtype": "float16", "kind": "sample", "mirrored": False,
        "num_classes": 1, "class_names": None, "autoencoder": "sd_vae_ema", "scale": 1.0, "shift": 0.0,
        "shards": [{"latents": name, "labels": "labels-0.npy", "count": 1}]}))


def comment(file: Path, text: bytes) -> None:
    with zipfile.ZipFile(file, "a") as archive:
        archive.comment = text


@pytest.mark.parametrize("case", SENTENCES)
def test_what_is_read_wrongly_or_not_at_all_is_one_line_with_the_files_name(tmp_path, case):
    write, read, words = SENTENCES[case]
    write(tmp_path)
    assert words in (said := in_a_line(read, tmp_path)), said


def test_class_names_of_parquet_that_are_no_list_of_texts_are_those_of_another_program(tmp_path):
    for names in (5, {"a": 1}, [1, 2]):
        feature = {"info": {"features": {"label": {"_type": "ClassLabel", "names": names}}}}
        table = pyarrow.table({"image": pyarrow.array([png()] * 3), "label": [0, 1, 1]})
        table = table.replace_schema_metadata({"huggingface": json.dumps(feature)})
        pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
        assert open_source(tmp_path / "x.parquet").class_names == ["0", "1"]


def test_codes_that_a_terminal_obeys_are_printed_as_escapes():
    assert printable("a\x1b[2Jb\n\tcafé\x9b") == "a\\x1b[2Jb\n\tcafé\\x9b"


def test_a_file_that_becomes_shorter_while_it_is_read_is_one_line_with_its_name(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(40_000, dtype=np.float32).reshape(-1, 4))
    rows, row = Rows(tmp_path / "x.npy"), np.empty((1, 4), np.float32)
    rows.read_into(row, 9_000)
    assert row.tolist() == [[36_000, 36_001, 36_002, 36_003]]
    os.truncate(tmp_path / "x.npy", 4096)  # as by copying it over itself
    assert "x.npy became shorter while it was read" in in_a_line(rows.read_into, row, 9_000)


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
    import_latents(path, path.with_name("out"), "tread", kind="sample")


LATENT = np.linspace(-2, 2, 4 * 8 * 8, dtype=np.float16).reshape(4, 8, 8)
READERS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {  # what writes a file, what reads it
    "x.zip": (lambda file: zipped(file, {"a/0.png": png(), "b/1.png": png()}), read_all_pixels),
    "x.tar": (lambda file: tarred(file, {"a.latent.npy": save_npy(LATENT), "a.cls": b"0"}), read_tar),
    "x.npz": (lambda file: np.savez(file, mu=np.zeros(192), sigma=np.eye(192), size=np.array([8, 8])),
              lambda file: reference(file.parent)),
    "images.npz": (lambda file: np.savez_compressed(file, arr_0=np.zeros((2, 8, 8, 3), np.uint8)),
                   lambda file: open_images(one_rank(), "images", str(file)).read(np.arange(2))),
    "x.npy": (lambda file: np.save(file, np.zeros((2, 8, 8, 3), np.uint8)),
              lambda file: open_images(one_rank(), "images", str(file)).read(np.arange(2))),
    "x.pt": (lambda file: save_weights(file.parent), lambda file: read_tensors(file) and None),
    "x.safetensors": (lambda file: save_file(tiny(), file), lambda file: read_tensors(file) and None),
    "x.parquet": (lambda file: save_parquet(file.parent, [png()] * 4), read_all_pixels),
    "x.png": (lambda file: file.write_bytes(png()), lambda file: read_sampling_record(file) and None),
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
@PROPERTY
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
