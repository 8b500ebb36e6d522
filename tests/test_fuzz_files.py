"""What nonsense in files has found, each by its smallest case."""

import io
import os
import signal
import time

import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

import data
import images
from scripts import fuzz
from scripts.fuzz import files
from scripts.fuzz.damage import Link, lay

READERS = {reader.name: reader for reader in files.READERS}
WHOLE = {"changes": [], "after": [], "mirror": False, "auto": False, "named": True, "num_classes": 3}
PLAIN = {"fields": [], "twice": False}


def ended(name, folder, **case):
    return fuzz.try_case(READERS[name], WHOLE | case, folder)


# ---- the classes that were found, each by its smallest case ---------------------------------------------------------


def test_a_file_that_pillow_would_hand_to_another_program_is_no_image():
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\n"
    assert Image.open(io.BytesIO(postscript)).format == "EPS"
    with pytest.raises(images.UnreadableImage, match="of a known kind"):
        images.decode_image(postscript)


@pytest.mark.parametrize("name", ["latents-00000.npy", "labels-00000.npy"])
@pytest.mark.parametrize("change", [["grow", 0, 8], ["cut", 0], ["cut", 500], ["retype", "<f2", True, 1], ["retype", "<i8", True, 1],
                                    ["retype", "<f2", False, 2], ["gone"]], ids=str)
def test_a_shard_that_is_not_as_it_was_written_is_written_again(tmp_path, name, change):
    which = sorted(files.unfinished()).index(name)
    assert ended("import_going_on", tmp_path / "case", changes=[[change[0], which, *change[1:]]])[0] == "success"


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
