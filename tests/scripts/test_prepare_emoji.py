"""examples/emoji/prepare_emoji.py: packages of emoji become class folders in a zip, some of the emoji kept apart."""

import json
import zipfile

import forked
import numpy as np
import pytest
from PIL import Image
from test_labels import encoded, inside, put_tar

MAKERS = ("google", "twitter")


@pytest.fixture
def packages(tmp_path):
    """Two makers of twenty emoji with one tone each, packed as npm does; `google` draws 05 and 09 alike."""
    emoji = [{"image": f"{i:02}.png", "category": "People & Body", "subcategory": "hands",
              "skin_variations": {"1F3FB": {"image": f"{i:02}-1f3fb.png"}}} for i in range(20)]
    return [put_tar(tmp_path / f"{maker}.tgz", {"package/emoji.json": json.dumps(emoji)} | inside(
        f"package/img/{maker}/64", {f"{i:02}{tone}.png": encoded(Image.new("RGBA", (64, 64), (
            12 * (5 if (maker, i, tone) == ("google", 9, "") else i), 9 * len(maker), 8 * len(tone), 128)))
            for i in range(20) for tone in ("", "-1f3fb")}), "w:gz") for maker in MAKERS]


def prepare(*arguments):
    return forked.run("examples/emoji/prepare_emoji.py", *arguments)


@pytest.mark.parametrize(("options", "folder"), [((), "people-body"), (("--classes", "subcategory"), "hands")])
def test_every_image_is_in_the_folder_of_its_category_on_white(packages, tmp_path, options, folder):
    assert prepare(*packages, "--out", tmp_path / "all.zip", *options).returncode == 0
    with zipfile.ZipFile(tmp_path / "all.zip") as archive:
        assert archive.namelist() == [f"{folder}/{maker}-{i:02}.png" for maker in MAKERS for i in range(20)]
        image = np.asarray(Image.open(archive.open(f"{folder}/google-04.png")))
    assert image.shape == (64, 64, 3) and abs(int(image[0, 0, 0]) - (48 + 255) // 2) <= 1  # half transparent


def test_a_tenth_of_the_emoji_is_held_out_with_its_tones_except_lookalikes_and_no_file_is_replaced(packages, tmp_path):
    arguments = (*packages, "--out", tmp_path / "kept.zip", "--held-out", tmp_path / "held.zip", "--skin-tones")
    prepare(*arguments)
    kept, held = (zipfile.ZipFile(tmp_path / f"{name}.zip").namelist() for name in ("kept", "held"))
    assert held == [f"people-body/{name}.png" for name in (
        "google-09-1f3fb", "twitter-09-1f3fb", "twitter-09", "google-19-1f3fb", "google-19", "twitter-19-1f3fb",
        "twitter-19")]
    assert len(kept) == 72 and not any("-09" in name or "-19" in name for name in kept)
    before = (tmp_path / "kept.zip").read_bytes()
    assert "kept.zip exists already" in prepare(*arguments).stderr
    assert "choose two files" in prepare(*packages, "--out", tmp_path / "x", "--held-out", tmp_path / "x").stderr
    assert (tmp_path / "kept.zip").read_bytes() == before and not (tmp_path / "x").exists()
