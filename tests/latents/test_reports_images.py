"""Situations from public reports, images and labels: the source, the situation, what comes out."""

import io
import json

import numpy as np
import pytest
from conftest import one_rank
from PIL import Image
from test_labels import classes, dataset, numbered, png, put, put_tar
from test_prepare_latents import prepare

from latents.images import decode_image, note_on_dark, open_source
from latents.listing import UnreadableImage
from scoring.image_sets import open_images

DOTTED = {f"22.0{k}.{part}": content for k in range(4) for part, content in (("png", png(k)), ("cls", str(k % 2)))}
IN_FOLDER = {f"path/22.0/{name}": content
             for name, content in {"1.png": png(0), "1.cls": "1", "2.png": png(1), "2.cls": "0"}.items()}
PAIR = {"foo.left.png": png(0), "foo.right.png": png(9), "foo.cls": "1", "bar.left.png": png(1),
        "bar.right.png": png(8), "bar.cls": "0"}
VALIDATION = numbered(*(f"ILSVRC2012_val_0000000{k}.JPEG" for k in range(4)))
IDS = "ImageId,Class\n" + "".join(f"{name[:-5]},n0{k % 2}\n" for k, name in enumerate(VALIDATION))
OF_FOLDERS = {f"images/{name}": content for name, content in numbered(*(f"c{k % 2}/{k}.png" for k in range(4))).items()}
COCO = {"images": [{"id": "x", "file_name": "train/a.jpg"}, {"id": "y", "file_name": "train/b.jpg"}],
        "categories": [{"id": 3, "name": "cat"}, {"id": 7, "name": "owl"}],
        "annotations": [{"image_id": "x", "category_id": 7}, {"image_id": "y", "category_id": 3},
                        {"image_id": "x", "category_id": 7}]}

NUMBERED = numbered("0.png", "1.png", "10.png")

REPORTS = {  # source: what is in it, labels=, the class of each image
    "webdataset/webdataset#237, dots in keys": (DOTTED, "folders", {k: str(k % 2) for k in range(4)}),
    "huggingface/datasets#7144, as 22.05.png": ({name.replace("22.0", "22.05-"): data for name, data in DOTTED.items()},
                                                "folders", {k: str(k % 2) for k in range(4)}),
    "huggingface/datasets#7150, a dot in a folder's name": (IN_FOLDER, "folders", {0: "1", 1: "0"}),
    "webdataset/webdataset#20, two images in a sample": (PAIR, "folders", {0: "1", 1: "0"}),
    "huggingface/pytorch-image-models#1081, validation images and a CSV": (VALIDATION | {"val.csv": IDS}, "val.csv",
                                                                           {k: f"n0{k % 2}" for k in range(4)}),
    "openai/guided-diffusion#95, labels in names": (numbered("a/cat_0.jpg", "b/dog_1.jpg"), "names",
                                                    {0: "cat", 1: "dog"}),
    "NVlabs/stylegan2-ada-pytorch#111, labels of folders in dataset.json": (
        OF_FOLDERS | {"images/dataset.json": json.dumps({"labels": [[f"c{k % 2}/{k}.png", 1 - k % 2]
                for k in range(4)]})}, "folders", {k: str(1 - k % 2) for k in range(4)}),
    "PyJulie/MONICA#5, ISIC's columns of 0 and 1": (
        numbered(*(f"ISIC_{k}.jpg" for k in range(4)))
        | {"truth.csv": "image,MEL,NV,BCC\n"
           + "".join(f"ISIC_{k},{float(k == 0)},0.0,{float(k > 0)}\n" for k in range(4))},
        "truth.csv", {0: "MEL", 1: "BCC", 2: "BCC", 3: "BCC"}),
    "alcunha/iwildcam2021ufam#4, COCO's form": (numbered("a.jpg", "b.jpg") | {"train.json": json.dumps(COCO)},
                                                "train.json", {0: "owl", 1: "cat"}),
    "asreview/asreview#1636, whole numbers that pandas wrote as floats": (
        NUMBERED | {"x.csv": "file,label\n0.png,2.0\n1.png,0.0\n10.png,10.0\n"}, "x.csv", {0: "2", 1: "0", 2: "10"}),
    "pandas-dev/pandas#13497, a CSV of Excel's": (
        NUMBERED | {"x.csv": "\ufefffile;label\r\n0.png;été\r\n1.png;chat\r\n10.png;été\r\n"}, "x.csv",
        {0: "été", 1: "chat", 2: "été"}),
    "NVIDIA/DIGITS#1462, paths of another computer": (
        NUMBERED | {"x.txt": "/home/a/0.png 1\n/home/a/1.png 0\n/home/a/10.png "
                             "1\n"}, "x.txt", {0: "1", 1: "0", 2: "1"}),
    "pytorch/vision#79, .DS_Store": (numbered("cat/0.png", "dog/1.png") | {".DS_Store": b"x", "cat/.DS_Store": b"x"},
                                     "folders", {0: "cat", 1: "dog"}),
}  # fmt: skip


@pytest.mark.parametrize("report", REPORTS)
@pytest.mark.parametrize("write", [put, put_tar])
def test_each_image_has_the_class_that_was_meant(tmp_path, report, write):
    files, labels, wanted = REPORTS[report]
    assert classes(open_source(write(tmp_path / "set.tar", files), labels=labels)) == wanted


def test_labels_in_columns_and_in_cocos_form_are_recommended_and_several_classes_are_refused(tmp_path):
    """PyJulie/MONICA#5 and alcunha/iwildcam2021ufam#4 without labels=, and COCO's own instances."""
    for report, file in (("PyJulie/MONICA#5, ISIC's columns of 0 and 1", "truth.csv"),
                         ("alcunha/iwildcam2021ufam#4, COCO's form", "train.json")):
        [hint] = open_source(put(tmp_path / file, REPORTS[report][0])).notes
        assert hint.endswith(f"labels={tmp_path / file / file} reads it.")
    more = COCO | {"annotations": [*COCO["annotations"], {"image_id": "x", "category_id": 3}]}
    with pytest.raises(ValueError, match="several categories for train/a.jpg, but an image can have only one class"):
        open_source(put(tmp_path / "more", numbered("a.jpg", "b.jpg") | {"train.json": json.dumps(more)}),
                    labels="train.json")


def test_photographs_that_a_viewer_turns_are_counted(tmp_path, capsys):
    """kohya-ss/sd-scripts#1316, huggingface/diffusers#3465: prepare_latents.py source=photos."""
    (tmp_path / "photos").mkdir()
    for turned in (0, 1, 6, 8):
        exif = Image.Exif()
        exif[0x0112] = turned
        Image.new("RGB", (8, 8)).save(tmp_path / f"photos/{turned}.jpg", exif=exif)
    said = "2 of 4 images: the file has an EXIF orientation, which is not applied, as in ADM: 6.jpg, 8.jpg"
    prepare(tmp_path / "photos", tmp_path / "out", resolution=8)
    assert said in capsys.readouterr().out
    open_images(one_rank(), "images", str(tmp_path / "photos"))
    assert f"images={tmp_path}/photos: {said}" in capsys.readouterr().out


def test_a_class_without_images_is_named(tmp_path):
    """pytorch/vision#4925 and #8297, huggingface/pytorch-image-models#957."""
    (put(tmp_path, numbered("cat/0.png", "dog/1.png")) / "bird").mkdir()
    source = open_source(tmp_path)
    assert source.class_names == ["cat", "dog"] and ("bird/", "an empty folder") in source.left_out


@pytest.mark.parametrize(("labels", "says"), [
    ('{"labels": [["0.png", 0], ["1.png", 1],]}', "dataset.json is not JSON"),
    ('{"labels": [["0.png", 0], ["gone.png", 1]]}', None),
])  # fmt: skip
def test_dataset_json_with_a_mistake_is_named_before_the_work(tmp_path, labels, says):
    """NVlabs/stylegan2-ada-pytorch#126: a comma after the last label."""
    put(tmp_path, numbered("0.png", "1.png") | {"dataset.json": labels})
    if says:
        with pytest.raises(ValueError, match=says):
            open_source(tmp_path)
    else:
        assert "1 of 2 images have no label" in open_source(tmp_path).notes[0]


def test_labels_that_begin_at_1_leave_a_class_empty_and_a_line_says_so(tmp_path):
    """NVlabs/stylegan2-ada-pytorch#126: labels 1 and 2."""
    source = open_source(put(tmp_path, numbered("0.png", "1.png") | dataset([["0.png", 1], ["1.png", 2]])))
    assert source.labels.tolist() == [1, 2] and "1 of these 3 classes have no image" in source.notes[0]


def test_grey_palette_and_transparent_files_are_scored_as_colour(tmp_path):
    """mseitzer/pytorch-fid#1, layumi/University1652-Baseline#17: fid.py images=mixed."""
    grey = Image.fromarray(np.full((4, 4), 128, np.uint8))
    for name, image in {"grey": grey, "rgb": grey.convert("RGB"), "palette": grey.convert("P"),
                        "alpha": grey.convert("RGBA")}.items():
        image.save(tmp_path / f"{name}.png")
    assert (open_images(one_rank(), "images", str(tmp_path)).read(np.arange(4)) == 128).all()


def test_colours_under_full_transparency_do_not_show(tmp_path):
    """kohya-ss/sd-scripts#1269: the file has colours where nothing is seen."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, 4), dtype=np.uint8)
    pixels[..., 3] = 0
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    assert np.asarray(decode_image(buffer.getvalue())).min() == 255


def test_an_array_of_images_with_channels_first_is_refused_by_its_shape(tmp_path):
    """GaParmar/clean-fid#52: fid.py images=images.npy of (B, C, H, W)."""
    np.save(tmp_path / "images.npy", np.zeros((5, 3, 8, 8), np.uint8))
    with pytest.raises(ValueError, match=r"\(5, 3, 8, 8\); images are uint8 \(N, H, W, 3\)"):
        open_images(one_rank(), "images", str(tmp_path / "images.npy"))


def test_a_truncated_photograph_is_left_out_by_name(tmp_path, capsys):
    """pytorch/vision#138, martinarjovsky/WassersteinGAN#13."""
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(buffer, "jpeg")
    put(tmp_path / "set", {"a.jpg": buffer.getvalue(), "b.jpg": buffer.getvalue()[:-54]})
    prepare(tmp_path / "set", tmp_path / "out", resolution=64)
    assert "b.jpg: OSError: image file is truncated" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/metadata.json").read_text())["count"] == 1


def test_grey_in_floats_is_refused_with_its_range_and_not_called_12_bits(tmp_path):
    """python-pillow/Pillow#3159: converted to RGB, levels from 0 to 1 are black and those above 255 white."""
    Image.fromarray(np.linspace(0.1, 0.9, 16, dtype=np.float32).reshape(4, 4)).save(tmp_path / "a.tif")
    source = open_source(tmp_path)
    assert note_on_dark(source) is None
    with pytest.raises(UnreadableImage, match="from 0.1.* to 0.8.* have no known range: save 8 or 16 bits"):
        source.pixels(0)


def test_an_image_of_too_many_pixels_is_left_out_by_name(tmp_path, monkeypatch, capsys):
    """Project-MONAI/MONAILabel#1230: Pillow refuses 179 megapixels and more, and the training ends."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    Image.new("RGB", (15, 15)).save(tmp_path / "scan.png")
    put(tmp_path, numbered("cat.png"))
    prepare(tmp_path, tmp_path / "out", resolution=4, autoencoder="identity")
    assert "scan.png: DecompressionBombError: Image size (225 pixels) exceeds limit of 200" in capsys.readouterr().out


def test_results_of_scores_beside_numbered_images_are_not_recommended_as_labels(tmp_path):
    """As Kaggle's 1.png … 50000.png beside results.jsonl, whose numbers are names of images, too."""
    rows = [{"images": 1, "batch_size": 0, "tag": name} for name in ("a", "b")]
    put(tmp_path, {f"train/{name}": image for name, image in NUMBERED.items()} | {
        "results.jsonl": "\n".join(map(json.dumps, rows))})
    assert not open_source(tmp_path / "train").notes
