"""Folders, zips, tars and shapes: RGB squares by ADM's rule in a fixed order, and nothing silently dropped."""

import io
import tarfile
import zipfile

import numpy as np
import pytest
from PIL import Image
from spoils import refused
from test_labels import classes, encoded, numbered, put, put_tar, put_zip

from latents.images import SHAPES, UnreadableImage, center_crop, decode_image, draw_shape, open_source, to_rgb


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


PETS = {f"{name}/{i}.png": encoded(noise(8, 8, seed=i)) for i, name in enumerate(["dog", "cat", "dog", "emu"])}


# Listing


def test_a_folder_is_sorted_by_class_and_name_and_a_class_without_images_is_named(tmp_path):
    (tmp_path / "bird").mkdir()  # pytorch/vision#4925 and #8297, huggingface/pytorch-image-models#957
    source = open_source(put(tmp_path, PETS))
    assert source.class_names == ["cat", "dog", "emu"] and source.left_out == [("bird/", "an empty folder")]
    assert source.names == ["cat/1.png", "dog/0.png", "dog/2.png", "emu/3.png"]
    assert source.labels.tolist() == [0, 1, 1, 2] and source.labels.dtype == np.int64
    for index, seed in enumerate([1, 0, 2, 3]):
        assert np.array_equal(source.pixels(index), noise(8, 8, seed))


def test_the_class_is_the_first_of_nested_folders_and_numbers_are_in_the_order_of_names_as_torchvisions(tmp_path):
    nested = numbered("cat/black/0.png", "dog/big/old/0.png", "dog/1.png")
    assert classes(open_source(put(tmp_path / "nested", nested))) == {0: "cat", 1: "dog", 2: "dog"}
    of_numbers = numbered("10/x.png", "9/x.png", "1/x.png")
    assert open_source(put(tmp_path / "numbers", of_numbers)).class_names == ["1", "10", "9"]


def test_the_fingerprint_depends_on_names_labels_and_classes(tmp_path):
    pets = open_source(put_zip(tmp_path / "a.zip", PETS)).fingerprint()
    assert open_source(put_zip(tmp_path / "b.zip", dict(reversed(PETS.items())))).fingerprint() == pets
    more = PETS | {"cat/9.png": PETS["cat/1.png"]}
    assert open_source(put_zip(tmp_path / "c.zip", more)).fingerprint() != pets
    renamed = open_source(tmp_path / "a.zip")
    renamed.labels = renamed.labels[::-1]
    assert renamed.fingerprint() != pets


def test_a_file_that_vanishes_stops_the_run_and_a_dead_link_does_not(tmp_path):
    source = open_source(put(tmp_path, PETS))
    (tmp_path / "cat/1.png").unlink()
    with pytest.raises(FileNotFoundError):
        source.pixels(0)
    (tmp_path / "cat/1.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(UnreadableImage, match="No such file"):
        source.pixels(0)


def test_class_folders_may_be_links_to_folders_elsewhere(tmp_path):
    put(tmp_path / "elsewhere", PETS)
    (tmp_path / "set").mkdir()
    for name in ("cat", "dog", "emu"):
        (tmp_path / "set" / name).symlink_to(tmp_path / "elsewhere" / name, target_is_directory=True)
    (tmp_path / "link").symlink_to(tmp_path / "set", target_is_directory=True)
    for folder in ("set", "link"):
        assert open_source(tmp_path / folder).fingerprint() == open_source(tmp_path / "elsewhere").fingerprint()


# Tars


def test_tars_next_to_class_folders_are_refused(tmp_path):
    put(tmp_path, PETS)
    write_webdataset(tmp_path / "left-over.tar", samples_of(range(2), "cls"))
    refused(lambda: open_source(tmp_path), "1 tars and 4 images", "such as cat/1.png", "/*.tar")


def write_webdataset(path, samples):
    import webdataset

    with webdataset.TarWriter(str(path)) as writer:
        for sample in samples:
            writer.write(sample)


def samples_of(indices, label_kind: str):
    for i in indices:
        label = {"cls": 2 * i, "json": {"label": 2 * i}, "txt": str(2 * i)}[label_kind]
        yield {"__key__": f"{i:04d}", "png": noise(8, 8, i), label_kind: label}


@pytest.mark.parametrize("label_kind", ["cls", "json", "txt"])
def test_webdatasets_own_tars_are_read(tmp_path, label_kind):
    write_webdataset(tmp_path / "set-000.tar", samples_of(range(3), label_kind))
    write_webdataset(tmp_path / "set-001.tar", samples_of(range(3, 5), label_kind))
    for pattern in (tmp_path, tmp_path / "set-*.tar", tmp_path / "set-{000..001}.tar"):
        source = open_source(pattern)
        assert source.names[0] == "set-000.tar/0000.png"
        assert source.labels.tolist() == [0, 2, 4, 6, 8]  # the numbers are the indices themselves
        assert source.class_names == [str(i) for i in range(9)]
        for index in range(5):
            assert np.array_equal(source.pixels(index), noise(8, 8, index))
    assert len(open_source(tmp_path / "set-001.tar")) == 2
    refused(lambda: open_source(tmp_path / "set-{000..002}.tar"), "names 3 tars, but 1 of them are missing, ",
            "set-002.tar")


def test_labels_with_names_are_numbered_by_name_and_other_members_are_named(tmp_path):
    write_webdataset(tmp_path / "x.tar", [
        {"__key__": key, "jpg": encoded(noise(8, 8), "jpeg"), "json": {"label": label}, "txt": "a caption", "bin": b"?"}
        for label, key in [("dog", "a"), ("cat", "b"), ("dog", "c")]])
    source = open_source(tmp_path / "x.tar")
    assert source.class_names == ["cat", "dog"] and source.labels.tolist() == [1, 0, 1]
    assert source.not_images == ["x.tar/a.bin", "x.tar/b.bin", "x.tar/c.bin"]


def test_damaged_tars_are_refused(tmp_path):
    write_webdataset(tmp_path / "good.tar", samples_of(range(8), "cls"))
    data = bytearray((tmp_path / "good.tar").read_bytes())
    with tarfile.open(tmp_path / "good.tar") as archive:
        offset = archive.getmembers()[6].offset
    (tmp_path / "endless.tar").write_bytes(data[:offset])  # cut between two members
    data[offset : offset + 100] = b"\xff" * 100
    (tmp_path / "damaged.tar").write_bytes(data)
    for name in ("endless.tar", "damaged.tar"):
        refused(lambda name=name: open_source(tmp_path / name), f"{name} is not a complete, uncompressed tar")


@pytest.mark.parametrize(("name", "content", "what"), [
    ("x.npz", None, "is a numpy .npz of arrays"), ("x.npy", b"\x93NUMPY\x01\x00", "is a numpy array"),
    ("x.jpg", b"\xff\xd8\xff", "is one image"),
    ("x.h5", b"\x89HDF\r\n\x1a\n", "is an HDF5 file"), ("x.pkl", b"\x80\x04K\x01.", "is a pickle, which can run code"),
    ("x.pt", None, "is a pickle"),
    ("x.mat", b"MATLAB 5.0", "is a file of another kind (.mat)"),
    ("*.jpg", b"\xff\xd8\xff", "a.jpg is one image"), ("*.zip", None, "a.zip is a zip"),
])
def test_a_source_that_is_no_folder_zip_or_tar_is_called_what_it_is(tmp_path, name, content, what):
    for file in {name.replace("*", letter) for letter in "ab"}:
        if content is None:
            put_zip(tmp_path / file, {"archive/data.pkl": b"", "arr_0.npy": b""})
        else:
            (tmp_path / file).write_bytes(content)
    refused(lambda: open_source(tmp_path / name), f"source={tmp_path}/{name}", what,
            ": use a folder of images, or one zip or tar of them", "names 2 files, and " if "*" in name else "")


def test_an_archive_is_known_by_its_content_whatever_it_is_called(tmp_path):
    put_zip(tmp_path / "pets.part", PETS)
    assert open_source(tmp_path / "pets.part").class_names == ["cat", "dog", "emu"]


# Pixels


def test_every_kind_of_image_becomes_rgb():
    """mseitzer/pytorch-fid#1, layumi/University1652-Baseline#17."""
    rgb = Image.fromarray(noise(8, 8))
    grey = rgb.convert("L")
    assert np.array_equal(to_rgb(rgb), noise(8, 8))
    assert np.array_equal(to_rgb(grey), np.repeat(np.asarray(grey)[..., None], 3, axis=2))
    assert np.array_equal(np.unique(to_rgb(rgb.convert("1"))), [0, 255])
    assert np.array_equal(to_rgb(rgb.quantize(16)), rgb.quantize(16).convert("RGB"))
    cyan = np.asarray(decode_image(encoded(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "jpeg"))).astype(int)
    assert cyan.shape == (8, 8, 3) and np.abs(cyan - [0, 255, 255]).max() < 8


def test_transparency_is_laid_over_white():
    """kohya-ss/sd-scripts#1269: colours under full transparency do not show."""
    red = np.array([255, 0, 0])
    for alpha, expected in [(255, red), (0, [255, 255, 255]), (128, [255, 127, 127])]:
        rgba = Image.new("RGBA", (2, 2), (255, 0, 0, alpha))
        assert np.abs(np.asarray(to_rgb(rgba)).astype(int) - expected).max() <= 1
    assert np.asarray(to_rgb(Image.new("LA", (2, 2), (0, 0)))).min() == 255
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    keyed = Image.new("RGB", (2, 2), (1, 2, 3))
    for content in (encoded(palette, transparency=1), encoded(keyed, transparency=(1, 2, 3))):  # a colour key
        assert np.asarray(decode_image(content)).min() == 255


def test_16_bit_grey_is_scaled_not_clipped():
    values = np.array([[0, 128, 129, 257, 32768, 65535]], dtype=np.uint16)
    for content in (encoded(values, "png"), encoded(values, "tiff"), encoded(values, "ppm"),
                    encoded(values.astype(np.int32), "tiff"), encoded(values.astype(np.float32), "tiff")):
        assert np.asarray(decode_image(content))[0, :, 0].tolist() == [0, 0, 1, 1, 128, 255]
    for value, kind in ((1e6, np.float32), (0.25, np.float32), (np.nan, np.float32), (1 << 20, np.int32)):
        with pytest.raises(UnreadableImage, match="have no known range: save 8 or 16 bits"):
            decode_image(encoded(np.full((2, 2), value, kind), "tiff"))


def test_the_exif_orientation_is_not_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    assert np.array_equal(decode_image(encoded(noise(4, 8), exif=exif)), noise(4, 8))


def test_broken_files_and_what_pillow_would_hand_to_another_program_raise_one_exception(monkeypatch):
    """pytorch/vision#138 (54 bytes fewer), Project-MONAI/MONAILabel#1230 (too many pixels)."""
    whole, postscript = encoded(noise(64, 64), "jpeg"), b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%End\n"
    assert Image.open(io.BytesIO(postscript)).format == "EPS"
    for data in (b"", b"not an image", whole[: len(whole) // 2], whole[:-54], encoded(noise(64, 64))[:500],
                 b"\x89PNG\r\n\x1a\n" + bytes(50), postscript):
        with pytest.raises(UnreadableImage):
            decode_image(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    with pytest.raises(UnreadableImage, match=r"DecompressionBombError: Image size \(4096 pixels\) exceeds"):
        decode_image(whole)


def test_a_damaged_zip_entry_is_one_unreadable_image(tmp_path):
    path = put_zip(tmp_path / "a.zip", PETS)
    source = open_source(path)
    with zipfile.ZipFile(path) as archive:
        offset = archive.getinfo("cat/1.png").header_offset
    data = bytearray(path.read_bytes())
    data[offset + 60] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(UnreadableImage, match="Bad CRC-32|invalid"):
        source.pixels(0)
    assert np.array_equal(source.pixels(1), noise(8, 8, 0))


@pytest.mark.parametrize(("height", "width"), [(32, 32), (32, 47), (53, 32)])
def test_the_crop_of_the_right_height_is_a_plain_cut_of_the_middle(height, width):
    top, left = (height - 32) // 2, (width - 32) // 2
    cut = noise(height, width)[top : top + 32, left : left + 32]
    assert np.array_equal(center_crop(Image.fromarray(noise(height, width)), 32), cut)


def test_the_crop_scales_by_the_shorter_side_in_adms_two_steps():
    image = Image.fromarray(noise(150, 201))
    halved = image.resize((100, 75), Image.Resampling.BOX)  # 150 >= 2 * 48, and 75 < 2 * 48
    final = halved.resize((64, 48), Image.Resampling.BICUBIC)
    assert np.array_equal(center_crop(image, 48), np.asarray(final)[:, 8:56])


def test_a_sliver_is_unreadable_and_not_an_endless_enlargement():
    with pytest.raises(UnreadableImage, match="64 times"):
        center_crop(Image.fromarray(noise(1, 1000)), 256)


# Shapes


def test_a_shape_is_a_function_of_seed_and_index():
    assert np.array_equal(draw_shape(3, 7, 16), draw_shape(3, 7, 16))
    assert not np.array_equal(draw_shape(3, 7, 16), draw_shape(4, 7, 16))
    source = open_source("shapes", shapes_count=20, shapes_seed=3)
    assert source.class_names == list(SHAPES) and source.labels.tolist() == [i % 6 for i in range(20)]
    assert np.array_equal(source.pixels(7), draw_shape(3, 7, 16))
    assert source.pixels(7, 64).shape == (64, 64, 3)
    assert len({open_source("shapes", count, seed).fingerprint() for count, seed in ((20, 3), (20, 4), (21, 4))}) == 3


def test_json_labels_survive_odd_json(tmp_path):
    source = put_tar(tmp_path / "x.tar", {"a.png": PETS["cat/1.png"], "a.json": "[1]", "b.png": PETS["cat/1.png"],
                                          "b.json": "{", "b.txt": "4", "a.cls": "3\n"})
    assert open_source(source).labels.tolist() == [3, 4]
