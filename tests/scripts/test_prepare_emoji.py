"""examples/emoji/prepare_emoji.py: packages of emoji become class folders in a zip, some of the emoji kept apart."""

import json
import zipfile

import forked
import numpy as np
import pytest
from PIL import Image
from test_labels import encoded, inside, put_tar

MAKERS = ("google", "twitter")


def package(path, maker, emoji, pictures):
    """Packs emoji.json and pictures by file name as npm does."""
    files = {"package/emoji.json": json.dumps(emoji)} | inside(f"package/img/{maker}/64", pictures)
    return put_tar(path, files, "w:gz")


@pytest.fixture
def packages(tmp_path):
    """Two makers of twenty emoji with one tone each; `google` draws 05 and 09 alike."""
    emoji = [{"image": f"{i:02}.png", "category": "People & Body", "subcategory": "hands",
              "skin_variations": {"1F3FB": {"image": f"{i:02}-1f3fb.png"}}} for i in range(20)]
    return [package(tmp_path / f"{maker}.tgz", maker, emoji, {
        f"{i:02}{tone}.png": encoded(Image.new("RGBA", (64, 64), (
            12 * (5 if (maker, i, tone) == ("google", 9, "") else i), 9 * len(maker), 8 * len(tone), 128)))
        for i in range(20) for tone in ("", "-1f3fb")}) for maker in MAKERS]


def prepare(*arguments):
    return forked.run("examples/emoji/prepare_emoji.py", *arguments)


def names(path):
    return zipfile.ZipFile(path).namelist()


@pytest.mark.parametrize(("options", "folder"), [((), "people-body"), (("--classes", "subcategory"), "hands")])
def test_every_image_is_in_the_folder_of_its_category_on_white(packages, tmp_path, options, folder):
    assert prepare(*packages, "--out", tmp_path / "all.zip", *options).returncode == 0
    assert names(tmp_path / "all.zip") == [f"{folder}/{maker}-{i:02}.png" for maker in MAKERS for i in range(20)]
    with zipfile.ZipFile(tmp_path / "all.zip") as archive:
        image = np.asarray(Image.open(archive.open(f"{folder}/google-04.png")))
    assert image.shape == (64, 64, 3) and abs(int(image[0, 0, 0]) - (48 + 255) // 2) <= 1  # half transparent


def test_a_tenth_of_the_emoji_is_held_out_with_its_tones_except_lookalikes_of_kept_ones(packages, tmp_path):
    prepare(*packages, "--out", tmp_path / "kept.zip", "--held-out", tmp_path / "held.zip", "--skin-tones")
    assert names(tmp_path / "held.zip") == [f"people-body/{name}.png" for name in (
        "google-09-1f3fb", "twitter-09-1f3fb", "twitter-09", "google-19-1f3fb", "google-19", "twitter-19-1f3fb",
        "twitter-19")]
    kept = names(tmp_path / "kept.zip")
    assert len(kept) == 72 and not any("-09" in name or "-19" in name for name in kept)


def test_no_file_is_replaced(packages, tmp_path):
    (tmp_path / "there.zip").write_text("mine")
    for arguments in (["--out", "there.zip"], ["--out", "new.zip", "--held-out", "there.zip"],
                      ["--out", "new.zip", "--held-out", "new.zip"]):
        ended = prepare(*packages, *(tmp_path / part if part.endswith("zip") else part for part in arguments))
        assert ended.returncode == 1 and ended.stderr.startswith("prepare_emoji.py: --")
        assert ended.stderr.count("\n") == 1
        assert (tmp_path / "there.zip").read_text() == "mine" and not (tmp_path / "new.zip").exists()
