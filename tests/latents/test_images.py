"""Folders, zips, tars, parquet and shapes: RGB squares by ADM's rule in a fixed order, and nothing silently dropped."""

import io
import json
import os
import struct
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from spoils import refused
from test_labels import encoded, inside, numbered, parquet, png, put, put_tar, put_zip, shard

from latents.decoding import SHAPES, UnreadableImage, center_crop, draw_shape, open_image, require_plain_pixels, to_rgb
from latents.images import open_shapes, open_source


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def decoded(data: bytes, alpha: str | None = None) -> np.ndarray:
    with open_image(data) as image:
        return np.asarray(to_rgb(image, alpha))


PETS = {f"{name}/{i}.png": encoded(noise(8, 8, seed=i)) for i, name in enumerate(["dog", "cat", "dog", "emu"])}


# Listing


def test_a_folder_and_its_archives_are_sorted_by_class_and_name(tmp_path):
    put(tmp_path / "elsewhere", PETS)
    (tmp_path / "linked").mkdir()
    for name in ("cat", "dog", "emu"):
        (tmp_path / "linked" / name).symlink_to(tmp_path / "elsewhere" / name, target_is_directory=True)
    (tmp_path / "linked/cat/loop").symlink_to(tmp_path / "linked/cat", target_is_directory=True)
    put_zip(tmp_path / "a.zip", dict(reversed(PETS.items())))
    put_zip(tmp_path / "b.zip", inside("train", PETS) | {"val/ant/0.png": b""})
    put_tar(tmp_path / "c.tar", inside(".", PETS))
    for name in ("elsewhere", "linked", "a.zip", "b.zip/train", "c.tar"):
        source = open_source(tmp_path / name)
        assert source.class_names == ["cat", "dog", "emu"] and not source.others
        assert source.names == ["cat/1.png", "dog/0.png", "dog/2.png", "emu/3.png"]
        assert source.labels.tolist() == [0, 1, 1, 2] and source.labels.dtype == np.int64
        for index, seed in enumerate([1, 0, 2, 3]):
            assert np.array_equal(source.pixels(index), noise(8, 8, seed))
    refused(lambda: open_source(tmp_path / "b.zip/test"), "b.zip has no such folder; it has train, val")


@pytest.mark.parametrize(("name", "make", "change"), [
    ("x", lambda path: put(path, PETS), lambda path: put(path, {"cat/1.png": png(7)})),
    ("x.zip", lambda path: put_zip(path, PETS), lambda path: put_zip(path, PETS | {"cat/1.png": png(7)})),
    ("x.tar", lambda path: put_tar(path, PETS), lambda path: put_tar(path, PETS | {"cat/1.png": PETS["dog/0.png"]})),
    ("x.parquet", lambda path: path.write_bytes(shard(0)), lambda path: path.write_bytes(shard(3))),
    ("another class", lambda path: put(path, PETS), lambda path: (path / "dog/0.png").rename(path / "cat/0.png")),
])
def test_an_image_that_is_replaced_changes_the_fingerprint(name, make, change, tmp_path):
    path = tmp_path / name
    make(path)
    before = open_source(path).fingerprint()
    assert open_source(path).fingerprint() == before
    change(path)
    assert open_source(path).fingerprint() != before


@pytest.mark.parametrize(("name", "content", "words"), [
    *((f"x.{kind}", {"x.png": b""}, "is not one folder or .zip, nor uncompressed .tar or")
      for kind in ("tar.gz", "jpg", "npz")),
    ("nowhere", None, "does not exist (looked from "),
    ("x.tar", {"arr_0.npy": b""}, "holds no images among 1 files, such as arr_0.npy"),
    ("train.tar", {"n01.tar": b"", "n02.tar": b""}, "n01.tar, n02.tar: unpack archives first, as in tar xf <tar> -C"),
])
def test_a_source_that_holds_no_images_is_refused(tmp_path, name, content, words):
    if content:
        put_tar(tmp_path / name, content)
    refused(lambda: open_source(tmp_path / name), name, words)


def test_tars_that_are_cut_short_or_joined_and_links_in_tars_are_refused(tmp_path):
    """libarchive/libarchive#457: of tars joined by cat, readers see the first."""
    data = put_tar(tmp_path / "good.tar", PETS).read_bytes()
    (tmp_path / "two.tar").write_bytes(data + data)
    with tarfile.open(tmp_path / "good.tar", "a") as archive:
        (tmp_path / "endless.tar").write_bytes(data[: archive.getmembers()[2].offset])
        link = tarfile.TarInfo("cat/link.png")
        link.type, link.linkname = tarfile.LNKTYPE, "cat/1.png"
        archive.addfile(link)
    refused(lambda: open_source(tmp_path / "endless.tar"), "endless.tar is not a complete, uncompressed tar")
    refused(lambda: open_source(tmp_path / "two.tar"), "is several tars, one after another: unpack it by tar --ignore-")
    refused(lambda: open_source(tmp_path / "good.tar"), "cat/link.png, a link, device", "tar --dereference --hard")


def test_names_of_other_code_pages_are_refused(tmp_path):
    """A zip marks names in UTF-8."""
    path = put_zip(tmp_path / "x.zip", {"caf_/0.png": b"", "bar/0.png": b""})
    assert open_source(put_zip(tmp_path / "y.zip", numbered("café/0.png", "a/1.png"))).class_names == ["a", "café"]
    put(tmp_path / "set", numbered("cafe/0.png", "bar/1.png"))
    (tmp_path / "set/cafe").rename(os.fsdecode(os.fsencode(tmp_path) + b"/set/caf\xe9"))
    refused(lambda: open_source(tmp_path / "set"), r"'caf\udce9/0.png', with a back", "not UTF-8", "convmv -f latin1")
    path.write_bytes(path.read_bytes().replace(b"caf_", b"caf\x82"))  # é in code page 437 and 850
    refused(lambda: open_source(path), "names that are neither ASCII nor marked as UTF-8, such as café/0.png",
            "python -m zipfile --metadata-encoding utf-8 -e")


# Parquet


def test_parquet_is_the_folder_of_the_same_images_whichever_row_group_a_thread_reads(tmp_path):
    numbers = [*range(40)]
    features = {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    for kind, of in (("struct", lambda i: {"bytes": png(i), "path": None}), ("bytes", png)):
        table = pa.table({"image": [*map(of, numbers)], "label": [i % 2 for i in numbers], "text": ["a"] * 40})
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        for part in range(2):
            file = tmp_path / f"{kind}-{part:05d}-of-00002.parquet"
            pq.write_table(table.slice(20 * part, 20), file, row_group_size=6)
        source = open_source(f"{tmp_path}/{kind}-*.parquet")
        assert source.class_names == ["cat", "dog"] and source.labels.tolist() == [i % 2 for i in numbers]
        assert source.names[21] == f"{kind}-00001-of-00002.parquet row 1" and not source.others
        mixed = np.random.default_rng(0).permutation(40).tolist()
        with ThreadPoolExecutor(4) as pool:
            assert [*pool.map(lambda i, source=source: int(source.pixels(i)[0, 0, 0]), mixed)] == mixed
        assert source.read.__self__.column_of.cache_info().currsize == 2  # row groups


def test_a_row_without_an_image_is_unreadable_and_files_of_other_classes_are_refused(tmp_path):
    put(tmp_path, {"a.parquet": parquet(image=[png(0), None], label=[0, 1])})
    with pytest.raises(UnreadableImage, match="no image, or only its path"):
        open_source(tmp_path / "a.parquet").pixels(1)
    files = {f"{i}.parquet": parquet(image=[png(i)], label=[label]) for i, label in enumerate([0, "a"])}
    put(tmp_path / "set", files)
    refused(lambda: open_source(tmp_path / "set"), "files whose columns or classes differ")


# Pixels


def test_every_kind_of_8_bit_image_becomes_rgb():
    """mseitzer/pytorch-fid#1, layumi/University1652-Baseline#17."""
    rgb = Image.fromarray(noise(8, 8))
    grey = rgb.convert("L")
    assert np.array_equal(decoded(encoded(rgb)), noise(8, 8))
    assert np.array_equal(decoded(encoded(grey)), np.repeat(np.asarray(grey)[..., None], 3, axis=2))
    for kind in ("png", "tiff", "ppm"):
        assert np.array_equal(np.unique(decoded(encoded(rgb.convert("1"), kind))), [0, 255])
    assert np.array_equal(decoded(encoded(rgb.quantize(16))), rgb.quantize(16).convert("RGB"))
    for kind in ("bmp", "ppm", "tiff", "webp", "jpeg"):
        smooth = Image.new("RGB", (16, 16), (200, 100, 50))
        assert np.abs(decoded(encoded(smooth, kind)).astype(int) - [200, 100, 50]).max() < 4, kind
    cyan = decoded(encoded(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "jpeg")).astype(int)
    assert cyan.shape == (8, 8, 3) and np.abs(cyan - [0, 255, 255]).max() < 8
    info = PngInfo()
    info.add_text("workflow", "x" * 2**21)  # more than Pillow's limit
    assert decoded(encoded(rgb, pnginfo=info)).shape == (8, 8, 3)


def test_transparency_is_laid_over_white():
    """kohya-ss/sd-scripts#1269: colours under full transparency do not show. With alpha=drop they do, as in ADM."""
    for alpha, expected in [(255, [255, 0, 0]), (1, [255, 254, 254]), (128, [255, 127, 127])]:
        red = encoded(Image.new("RGBA", (2, 2), (255, 0, 0, alpha)))
        assert np.abs(decoded(red).astype(int) - expected).max() <= 1
        assert np.array_equal(decoded(red, "drop"), np.broadcast_to(np.uint8([255, 0, 0]), (2, 2, 3)))
    palette, keyed = Image.new("P", (2, 2), 1), Image.new("RGB", (2, 2), (1, 2, 3))
    palette.putpalette([0, 0, 0, 255, 0, 0])
    keyed.putpixel((0, 0), (9, 9, 9))
    palette.putpixel((0, 0), 0)
    for content in (encoded(palette, transparency=1), encoded(keyed, transparency=(1, 2, 3))):  # a colour key
        assert decoded(content)[1].min() == 255 and decoded(content)[0, 0].max() < 10


CLEAR = Image.new("RGBA", (4, 4), (200, 100, 50, 0))


@pytest.mark.parametrize("content", [
    encoded(CLEAR), encoded(CLEAR, "tiff"), encoded(Image.new("LA", (2, 2), (0, 0))),
    encoded(Image.new("RGBA", (4, 4), (200, 100, 50, 90)), "tiff"),
])
def test_what_may_be_no_transparency_is_left_out_until_alpha_is_typed(content):
    """Writers leave alpha 0, and tag a fourth band as alpha."""
    with pytest.raises(UnreadableImage, match="may be another band, as it is transparent throughout or of a TIFF: dro"):
        decoded(content)
    assert decoded(content, "white").max() > 230
    if "LA" not in str(Image.open(io.BytesIO(content)).mode):
        assert decoded(content, "drop")[0, 0].tolist() == [200, 100, 50]


def tiff(channels: int, bits: int, sample_format: int) -> bytes:
    """An uncompressed TIFF of 4 x 4 pixels of 16 bits, or of signed bytes (format 2), which Pillow cannot write."""
    values = bytes([9, 7]) * (8 * channels * bits // 8)
    entries = [(256, 3, 1, 4), (257, 3, 1, 4), (258, 3, 1, bits) if channels == 1 else (258, 3, 3, 146),
               (259, 3, 1, 1), (262, 3, 1, 1 if channels == 1 else 2), (273, 4, 1, 152), (277, 3, 1, channels),
               (278, 3, 1, 4), (279, 4, 1, len(values)), (284, 3, 1, 1), (339, 3, 1, sample_format)]
    ifd = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries) + bytes(4)
    return struct.pack("<2sHI", b"II", 42, 8) + ifd + struct.pack("<3H", bits, bits, bits) + values


TWELVE = np.full((4, 4), 4095, np.uint16)
FRAMES = [Image.fromarray(noise(8, 8, seed)) for seed in (1, 2)]


@pytest.mark.parametrize(("content", "words"), [
    *((content, "more than 8 bits a value, or a sign: scale them from the range that you know") for content in (
        encoded(TWELVE), encoded(TWELVE, "tiff"), encoded(TWELVE, "ppm"), encoded(TWELVE.astype(np.int32), "tiff"),
        encoded(TWELVE.astype(np.float32), "tiff"), tiff(3, 16, 1), tiff(1, 8, 2))),
    *((encoded(FRAMES[0], kind, save_all=True, append_images=FRAMES[1:]), "several frames or pages: save each")
      for kind in ("gif", "tiff", "webp", "png")),
    (encoded(Image.new("LAB", (4, 4)), "tiff"), "colours of mode LAB: save it as RGB"),
    *((content, "not an image of a known kind") for content in (b"", encoded(FRAMES[0], "avif"))),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%End\n", "not an im"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a pointer of Git LFS: run git lfs pull"),
    (encoded(noise(64, 64), "jpeg")[:-54], "image file is truncated"), (encoded(noise(64, 64))[:500], "truncated"),
])  # fmt: skip
def test_files_without_one_meaning_in_8_bits_are_left_out_with_a_line_that_helps(content, words):
    """pytorch/vision#138 (54 bytes fewer)."""
    with pytest.raises(UnreadableImage) as error:
        decoded(content)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_colours_of_16_bits_are_known_by_a_pngs_header_and_scaled_by_a_ppms():
    """Pillow reads both as 8 bits. It writes neither, so the byte that says it is set."""
    data = bytearray(encoded(noise(16, 16)))
    with Image.open(io.BytesIO(data)) as image:
        data[data.index(b"IHDR") + 12] = 16
        with pytest.raises(UnreadableImage, match="more than 8 bits"):
            require_plain_pixels(image, data)
    assert decoded(b"P6\n1 1\n4095\n" + np.array([4095, 0, 2048], ">u2").tobytes()).tolist() == [[[255, 0, 128]]]


def test_a_phones_photograph_is_one_image_and_its_exif_orientation_is_not_applied_as_in_adm():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    assert decoded(encoded(FRAMES[0], "mpo", save_all=True, append_images=FRAMES[1:])).shape == (8, 8, 3)
    assert np.array_equal(decoded(encoded(noise(4, 8), exif=exif)), noise(4, 8))


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
    with pytest.raises(UnreadableImage, match="64 times"):  # not an endless enlargement
        center_crop(Image.fromarray(noise(1, 1000)), 256)


def test_a_shape_is_a_function_of_seed_and_index():
    source = open_shapes(20, 3, 64)
    assert source.class_names == list(SHAPES) and source.labels.tolist() == [i % 6 for i in range(20)]
    assert np.array_equal(source.pixels(7), draw_shape(3, 7, 64)) and source.pixels(7).shape == (64, 64, 3)
    assert len({open_shapes(count, seed, 16).fingerprint() for count, seed in ((20, 3), (20, 4), (21, 4))}) == 3
