"""What nonsense in files has found, each by its smallest case; and a few of every reader's cases, each ending well."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import strategies as st
from PIL import Image

import data
import images
import scoring
from scripts import fuzz
from scripts.fuzz import files
from scripts.fuzz.damage import TAR_VALUES, Holes, Link, lay, npy, resize, tarred, zipped

READERS = {reader.name: reader for reader in files.READERS}
WHOLE = {"changes": [], "after": [], "mirror": False, "auto": False, "named": True, "num_classes": 3}
PLAIN = {"fields": [], "twice": False}


def ended(name, folder, **case):
    return fuzz.try_case(READERS[name], WHOLE | case, folder)


# ---- the classes that were found, each by its smallest case ---------------------------------------------------------


@pytest.mark.parametrize("name", ["image_tars", "latent_tars", "import_tars"])
@pytest.mark.parametrize(("extra", "words"), [
    ([0, "x", -1, "-512"], "a member of -512 bytes"),
    ([0, "x", 2**33, "0"], "a member of 8589934592 bytes"),      # filled the memory
    ([1, "x", -1, "18446744073709551616"], "it ends before byte 18446744073709"),      # OverflowError
    ([0, "L", 2**33, "x"], "a member of 8589934592 bytes"),
])
def test_a_tar_that_claims_what_it_has_not_is_a_sentence(tmp_path, name, extra, words):
    variant = {} if name == "image_tars" else {"variant": "sample"}
    outcome, said = ended(name, tmp_path / "case", pack=PLAIN | {"extras": [extra]}, **variant)
    assert outcome == "sentence" and words in said


@pytest.mark.parametrize("name", ["image_tars", "latent_tars", "import_tars"])
def test_a_header_of_a_tar_that_leads_back_to_itself_is_a_sentence(tmp_path, name):
    variant = {} if name == "image_tars" else {"variant": "sample"}
    pack = PLAIN | {"extras": [[0, "0", -1, "a note"]], "fields": [[0, 2, TAR_VALUES.index(b"-0000001000\0"), True]]}
    outcome, said = ended(name, tmp_path / "case", pack=pack, **variant)      # was read for ever
    assert outcome == "sentence" and "a member of -512 bytes at byte 0" in said


def test_a_file_that_pillow_would_hand_to_another_program_is_no_image():
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\n"
    assert Image.open(io.BytesIO(postscript)).format == "EPS"
    with pytest.raises(images.UnreadableImage, match="of a known kind"):
        images.decode_image(postscript)


def source_of(place, content, folder):
    """A source of one image, in a folder, a zip or a tar."""
    laid = {"folder": {"a/x.png": content}, "zip": {"set.zip": zipped({"a/x.png": content}, 0, [])},
            "tar": {"set.tar": tarred({"x.png": content, "x.cls": b"0"}, [], [])}}[place]
    lay(laid, folder)
    return images.open_source(str(folder / "set.zip" if place == "zip" else folder))


@pytest.mark.filterwarnings("ignore:Image size")
@pytest.mark.parametrize(("side", "words"), [(9500, "9500x9500 is more than 89,478,485 pixels"), (60_000, "DecompressionBomb"), (0, "kind")])
@pytest.mark.parametrize("place", ["folder", "zip", "tar"])
def test_an_image_of_no_size_or_too_many_pixels_is_unreadable_by_its_header(tmp_path, side, words, place):
    source = source_of(place, resize(files.picture("png", "RGBA"), side, side), tmp_path)
    with pytest.raises(images.UnreadableImage, match=words):
        source.pixels(0, 16)


@pytest.mark.parametrize("place", ["folder", "zip", "tar"])
def test_an_image_file_of_too_many_bytes_is_not_read(tmp_path, monkeypatch, place):
    source = source_of(place, bytes(1001), tmp_path)
    monkeypatch.setattr(images, "LARGEST_FILE", 1000)
    with pytest.raises(images.UnreadableImage, match=r"1,001 bytes are more than an image file has \(1,000\)"):
        source.read(0)


def test_a_zips_image_unpacks_to_what_is_promised_and_no_more(tmp_path):
    packed = zipped({"a/x.png": Holes(b"", 2**33)}, 0, [[0, 4, 100], [0, 15, 100]])      # a promise of 100 bytes
    (tmp_path / "set.zip").write_bytes(packed)
    with pytest.raises(images.UnreadableImage, match="checksum differs"):
        images.open_source(str(tmp_path / "set.zip")).read(0)


@pytest.mark.parametrize(("content", "words"), [
    (b"no npy", "magic"), (npy(np.zeros((2, 4, 4, 3), np.uint8))[:-1], "arr_0 has"),
    (npy(np.zeros((2, 4, 4, 3), np.uint8)) + b"x", "arr_0 has"), (npy(np.array([{}], object)), "arr_0 has"),
])
@pytest.mark.parametrize("method", [0, 8])
def test_an_npz_that_holds_other_than_it_says_is_a_sentence(tmp_path, content, words, method):
    (tmp_path / "x.npz").write_bytes(zipped({"arr_0.npy": content}, method, []))
    with pytest.raises(ValueError, match=f"is not a whole npz .*{words}"):
        scoring.open_images("images", str(tmp_path / "x.npz"))


def test_an_npz_that_unpacks_to_gigabytes_is_a_sentence(tmp_path):
    head = npy(np.zeros((1, 1024, 1024, 3), np.uint8))[:128].replace(b"(1, 1024", b"(999, 1024").replace(b"  \n", b"\n")
    (tmp_path / "x.npz").write_bytes(zipped({"arr_0.npy": Holes(head, 128 + 999 * 3 * 2**20)}, 0, []))
    with pytest.raises(ValueError, match="unpacks .* to 3,142,582,272, as no images do"):
        scoring.open_images("images", str(tmp_path / "x.npz"))


@pytest.mark.parametrize("change", [
    [16421, 2, 2**64 - 1], [40983, 4, 1_700_000_000], [57369, 4, 2**32 - 1], [32784, 2, 1_700_000_000], [57355, 2, 2],
    [16400, 1, 0], [28682, 4, 2**31], [0x2008, 8, 2**63], [16 + 8, 4, 0], [4096 * 14 + 18, 2, 65535],
])
def test_a_damaged_page_of_an_lmdb_ends_in_a_sentence_and_not_the_process(tmp_path, change):
    outcome, said = ended("import_lmdb", tmp_path / "case", variant=60, changes=[["at", 0, *change]])
    assert outcome in fuzz.GOOD, said


def test_a_page_of_an_lmdb_that_refers_to_itself_is_a_sentence(tmp_path):
    whole = files.lmdb_of(60)["data.mdb"]
    root = max((int.from_bytes(whole[at + 144 : at + 152], "little"), int.from_bytes(whole[at + 128 : at + 136], "little"))
               for at in (0, 4096))[1]
    node = root * 4096 + int.from_bytes(whole[root * 4096 + 16 : root * 4096 + 18], "little")
    outcome, said = ended("import_lmdb", tmp_path / "case", variant=60, changes=[["at", 0, node, 4, root]])
    assert (outcome, "to one twice" in said) == ("sentence", True), said


@pytest.mark.parametrize("name", ["latents-00000.npy", "labels-00000.npy"])
@pytest.mark.parametrize("change", [["grow", 0, 8], ["cut", 0], ["cut", 500], ["retype", "<f2", True, 1], ["retype", "<i8", True, 1],
                                    ["retype", "<f2", False, 2], ["gone"]], ids=str)
def test_a_shard_that_is_not_as_it_was_written_is_written_again(tmp_path, name, change):
    which = sorted(files.unfinished()).index(name)
    assert ended("import_going_on", tmp_path / "case", changes=[[change[0], which, *change[1:]]])[0] == "success"


@pytest.mark.parametrize("name", ["latents-00000.npy", "labels-00000.npy", "record-00000.json", "record-00001.json"])
def test_a_pipe_in_the_place_of_a_shard_or_its_record_is_told_and_stays(tmp_path, name):
    change = ["special", sorted(files.unfinished()).index(name), "fifo", 0]
    outcome, said = ended("import_going_on", tmp_path / "case", changes=[change])
    assert (outcome, "it is a device, a pipe or a socket" in said) == ("sentence", True), said


def test_a_kept_index_of_tars_that_names_other_places_is_made_again(tmp_path):
    lay({"train.tar": tarred(files.tread("sample"), [], [])}, tmp_path)
    first = data.open_latents(tmp_path, kind="sample", scale=1.0).fingerprint
    with np.load(tmp_path / data.TAR_INDEX) as kept:
        index = dict(kept)
    for key, value in (("offsets", index["offsets"] + 2**40), ("offsets", index["offsets"][:-1]), ("labels", index["labels"] - 1),
                       ("shape", np.array([4, 4, -4])), ("dtype", np.array("<f8")), ("starts", np.array([0, 99]))):
        np.savez(tmp_path / data.TAR_INDEX, **index | {key: value})
        assert data.open_latents(tmp_path, kind="sample", scale=1.0).fingerprint == first


def test_errors_of_a_disk_name_the_file(tmp_path):
    lay({name: Link("/proc/self/mem") if name == "labels-00001.npy" else content      # which ends in EIO
         for name, content in files.latent_folder("sample").items()}, tmp_path)
    with pytest.raises(OSError) as error:
        data.open_latents(tmp_path)
    assert error.value.filename == str(tmp_path / "labels-00001.npy")


# ---- the frame ------------------------------------------------------------------------------------------------------


def misbehave(case, folder):
    match case:
        case "success":
            (folder / "out").mkdir()
        case "sentence":
            raise ValueError("the file is empty.")
        case "unclear":
            np.zeros(3).reshape(2)
        case "traceback":
            raise KeyError(case)
        case "accepted":
            raise fuzz.Accepted("nonsense")
        case "changed":
            (folder / "kept").write_text("other")
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "time":
            time.sleep(60)
        case "memory":
            bytearray(2**30)


@pytest.mark.parametrize("outcome", [*fuzz.GOOD, *fuzz.BAD])
def test_each_way_to_end_is_told_from_the_others(tmp_path, outcome):
    reader = fuzz.Reader("toy", st.just(outcome), lambda _, folder: (folder / "kept").write_text("x") and None, misbehave)
    found = fuzz.fuzz({"toy": reader}, 1, 0, tmp_path, seconds=1.0, memory=0.5)
    assert found["readers"] == {"toy": {outcome: 1}}
    assert len(found["failures"]) == (outcome in fuzz.BAD) == (tmp_path / "cases" / "toy-00000" / "case.json").exists()


def test_a_few_cases_of_every_reader_end_well(tmp_path):
    names = ",".join(READERS)
    command = [sys.executable, "scripts/fuzz.py", f"out={tmp_path / 'fuzz'}", f"cases={5 * len(READERS)}", f"readers=[{names}]"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "fuzz" / "fuzz.json").read_text())
    assert found["cases"] == 5 * len(READERS) and set(found["readers"]) == set(READERS)
    assert found["outcomes"]["success"] and found["outcomes"]["sentence"]
