"""Situations that people bring: each has the right classes, or one line that says what was found and what to type.

Most rows stand for public data sets or reports, some of which are named.
"""

import io
import json
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from spoils import refused

from latents.images import ImageSource, open_source
from latents.labels import Columns

PETS = ["cat", "dog", "owl"]


def encoded(image: Image.Image | np.ndarray, kind: str = "png", **options) -> bytes:
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, kind, **options)
    return buffer.getvalue()


def png(number: int, **options) -> bytes:
    return encoded(Image.new("RGB", (4, 4), (number, 0, 0)), **options)


def numbered(*names: str) -> dict[str, bytes]:
    return {name: png(number) for number, name in enumerate(names)}


def put(root: Path, files: dict[str, bytes | str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def put_zip(path: Path, files: dict[str, bytes | str], how: int = zipfile.ZIP_STORED) -> Path:
    """Writes a zip, of Windows if it is called dos.zip."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.create_system, info.compress_type = 0 if path.name == "dos.zip" else 3, how
            archive.writestr(info, content)
    return path


def put_tar(path: Path, files: dict[str, bytes | str], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            content = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def parquet(metadata: dict[str, str] | None = None, **columns) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), buffer)
    return buffer.getvalue()


def shard(*numbers: int) -> bytes:
    return parquet(image=[{"bytes": png(number), "path": None} for number in numbers],
                   label=[number % 3 for number in numbers])


def inside(folder: str, files: dict[str, bytes | str]) -> dict[str, bytes | str]:
    return {f"{folder}/{name}": content for name, content in files.items()}


def classes(source: ImageSource) -> str:
    """The class of each image in the order of their numbers, which are their colours."""
    class_of = {int(source.pixels(i)[0, 0, 0]): source.class_names[label] for i, label in enumerate(source.labels)}
    return " ".join(class_of[number] for number in sorted(class_of))


FLAT = numbered(*(f"{i:04d}.png" for i in range(6)))
ROWS = [(name, PETS[i % 3]) for i, name in enumerate(FLAT)]
RIGHT = "cat dog owl cat dog owl"


def table(head: str, row: str, rows: list[tuple] = ROWS) -> str:
    """A text file of `head` and one line for each image, with {i}, its name {0} and its class {1}."""
    return head + "".join(row.format(*cells, i=i) + "\n" for i, cells in enumerate(rows))


EDM = numbered(*(f"{i // 3:05d}/img{i:08d}.png" for i in range(6)))
PAIRS = [[name, i % 3] for i, name in enumerate(EDM)]


def dataset(labels) -> dict[str, str]:
    return {"dataset.json": json.dumps({"labels": labels})}


INTEL = numbered("seg_train/seg_train/sea/0.jpg", "seg_train/seg_train/ice/1.jpg", "seg_test/seg_test/sea/2.jpg",
                 "seg_test/seg_test/ice/3.jpg", "seg_pred/seg_pred/4.jpg")
MRI = numbered("Training/glioma/0.png", "Training/none/1.png", "Testing/glioma/2.png", "Testing/none/3.png")
HEAD = "file_name,label\n"
BY_CSV, BY_DATASET = {"labels": "x.csv"}, {"labels": "dataset.json"}
CARS = table("", "{0},{i},2,300,400,{i}")
SAMPLES = {f"{i}.{suffix}": content for i in range(6)
           for suffix, content in (("png", png(i)), ("cls", str(i % 3)), ("txt", "a caption"))}
TWO = numbered("cat/0.png", "dog/1.png")
IMG2DATASET = {f"0000{i // 3}/{i}.{suffix}": content for i in range(6) for suffix, content in (
    ("jpg", png(i)), ("txt", "a pet"), ("json", json.dumps({"caption": "a pet", "label": PETS[i % 3]})))}


PATHS = pa.array([{"bytes": None, "path": "/a/0.png"}], pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
CLASSES = {"huggingface": json.dumps({"info": {"features": {"label": {"names": PETS, "_type": "ClassLabel"}}}})}

# The files, the source, labels= and columns; then the class of each image, or the words of the line that refuses.
SITUATIONS: dict[str, tuple[dict, str, dict, str | list[str]]] = {
    # Folders. Splits: no word means one.
    "pytorch/vision#714, modestyachts/ImageNetV2#10: numbers in torchvision's order": (
        numbered("10/x.png", "9/x.png", "1/x.png"), "", {}, "10 9 1"),
    "replicate/lora-training#9, FlyMyAI/flymyai-lora-trainer#72": (
        numbered("a/IMG_1.JPG", "b/2.webp", "b/3.jpeg"), "", {}, "a b b"),
    "pytorch/vision#79 and #2831, bghira/SimpleTuner#94: hidden folders and a system's thumbnails": (
        numbered("cat/0.png", "dog/1.png") | {".ipynb_checkpoints/x.png": b"", "cat/@eaDir/0.png/S.jpg": b"",
                                              "cat/.ipynb_checkpoints/0.png": b"", "__MACOSX/cat/._0.png": b"",
                                              ".DS_Store": b"", "lost+found/x": ""}, "", {}, "cat dog"),
    "folders that are named like no class": (numbered("None/0.png", "nan/1.png"), "", {}, "None nan"),
    "Intel's seg_train, seg_test, seg_pred": (INTEL, "", {}, [
        "set one: labels=folders (seg_pred, seg_test, seg_train); source=./<one of them>; labels=none (one class)"]),
    "a zipped folder": ({"pets.zip": numbered("pets/cat/0.png", "pets/dog/1.png")}, "pets.zip", {}, [
        "labels=folders (pets); source=pets.zip/pets; labels=none"]),
    "Tiny-ImageNet's train": (numbered("n1/images/0.JPEG", "n2/images/1.JPEG"), "", {"labels": "folders"}, "n1 n2"),
    "a class that was not downloaded, which torchvision refuses": (
        numbered("cat/0.png", "owl/1.png") | {"dog/x.txt": "", ".cache/x": ""}, "", {},
        ["labels=folders finds no image in 1 folders of ", "such as dog, which may be classes: fill them"]),
    "a flat folder": (FLAT, "", {}, ["set one: labels=none (one class); or labels=<file>.csv, as docs/data.md shows."]),
    "one image as .png and .jpg": (numbered("cat/0.png", "dog/1.png") | {"cat/0.jpg": png(0)}, "", {},
                                   ["cat/0.jpg and cat/0.png, which would count as two images"]),
    "a wrong word": (MRI, "", {"labels": "folder"}, ["folder is not a file, looked for from /", ", nor one of fo"]),
    # EDM's tools.
    "dataset.json is one way of two": (EDM | dataset(PAIRS), "", {}, [
        "labels=folders (00000, 00001); \"labels='./dataset.json'\"; labels=none (one class); or"]),
    "dataset.json": (EDM | dataset(PAIRS), "", BY_DATASET, "0 1 2 0 1 2"),
    "dataset.json in a zip": ({"edm.zip": EDM | dataset(PAIRS)}, "edm.zip", {"labels": "edm.zip/dataset.json"},
                              "0 1 2 0 1 2"),
    "one-hot labels": (EDM | dataset([[name, [0.0, 1.0]] for name in EDM]), "", BY_DATASET,
                       ["label [0.0, 1.0], which is neither"]),
    "NaN in JSON": (EDM | dataset([[PAIRS[0][0], float("nan")], *PAIRS[1:]]), "", BY_DATASET, ["no class for 1 of"]),
    "a key given twice": (EDM | {"dataset.json": '{"labels": [], "labels": null}'}, "", BY_DATASET,
                          ["'labels' is given twice"]),
    "a name given twice": (EDM | dataset([*PAIRS, [PAIRS[0][0], 2]]), "", BY_DATASET, ["img00000000.png two classes"]),
    # CSV.
    "metadata.csv beside class folders": (MRI | {"Training/metadata.csv": "a,b\n"}, "Training", {}, [
        "set one: labels=folders (glioma, none); labels=", "/metadata.csv; labels=none (one class); or"]),
    "Kaggle's train.csv": (inside("train", FLAT) | {"train.csv": table("id,label\n", "{0},{1}")}, "train",
                           {"labels": "train.csv", "name": "id"}, RIGHT),
    "a CSV of names from its own folder": (
        inside("train", FLAT) | {"train.csv": table("file_name,label\n", "train/{0},{1}")}, "train",
        {"labels": "train.csv"}, ["no images, but train/0000.png", "paths with / and suffix from the source"]),
    "names from find": (FLAT | {"x.csv": table(HEAD, "./{0},{1}")}, "", BY_CSV, RIGHT),
    "one name in two forms": (FLAT | {"x.csv": f"{HEAD}0.png,a\n./0.png,b\n"}, "", BY_CSV, ["gives ./0.png two cl"]),
    "anno_train.csv without header": (FLAT | {"anno_train.csv": CARS}, "", {"labels": "anno_train.csv"},
                                      ["0000.png, 0, 2, 300, 400, 0, not file_name and label: set name_column="]),
    "numbers as labels": (FLAT | {"x.csv": table(HEAD, "{0},{i}")}, "", BY_CSV, "0 1 2 3 4 5"),
    "pandas' floats": (FLAT | {"x.csv": table(HEAD, "{0},{i}.0")}, "", BY_CSV, ["the label 0.0: number classes 0, 1"]),
    "a space after the comma": (FLAT | {"x.csv": table(HEAD, "{0}, {i}")}, "", BY_CSV, ["' 0', which is neither"]),
    "-1 for no class": (FLAT | {"x.csv": table(HEAD, "{0},-1")}, "", BY_CSV, ["the label -1"]),
    # pandas-dev/pandas#10647 and #16078, chanzuckerberg/cellxgene#1115, OpenNHM/AvaFrame#944
    **{f"{word!r} for no class": (FLAT | {"x.csv": table(HEAD, "{0},{1}", [(ROWS[0][0], word), *ROWS[1:]])}, "", BY_CSV,
                                  ["no class for 1 of the 6 images, such as 0000.png ("])
       for word in ("nan", "NaN", "None", "null", "NULL", "NA", "N/A", "n/a", "<NA>", "")},
    "a word for no class, of an image elsewhere": (
        FLAT | {"x.csv": table(HEAD, "{0},{1}", [*ROWS, ("9.png", "nan")])}, "", BY_CSV, RIGHT),
    # webdataset and img2dataset.
    ".cls files in a tar": ({"0.tar": SAMPLES}, "0.tar", {}, "0 1 2 0 1 2"),
    "two tars whose keys begin again": ({"x/0.tar": SAMPLES, "x/1.tar": {"0.png": png(6), "0.cls": "7"}}, "x", {},
                                        "0 1 2 0 1 2 7"),
    "a CSV of several tars, whose names are theirs": (
        {"x/0.tar": {"0.png": png(0)}, "x/1.tar": {"0.png": png(1)}, "x.csv": f"{HEAD}1.tar/0.png,a\n0.tar/0.png,b\n"},
        "x", BY_CSV, "b a"),
    "class folders with .cls files": (numbered("cat/0.png", "dog/1.png") | {"dog/1.cls": "7"}, "", {}, [
        "labels=folders (cat, dog); labels=cls; labels=none"]),
    "img2dataset's output_format=files": (IMG2DATASET, "", {}, [
        "set one: labels=folders (00000, 00001); labels=none (one class); or labels=<file>.csv, as docs/data.md shows, "
        "also from 00000/0.json."]),
    ".json beside .cls, as in timm's": ({"0.tar": SAMPLES | {f"{i}.json": "{}" for i in range(6)}}, "0.tar", {},
                                        "0 1 2 0 1 2"),
    "webdataset/webdataset#20 and #140: two images in a sample, and files of a sample apart": (
        {"0.tar": {"0.left.png": png(0), "0.right.png": png(1), "1.png": png(2), "1.cls": b"dog", "0.cls": b"cat"}},
        "0.tar", {}, "cat cat dog"),
    "webdataset/webdataset#237: dots in names": (
        {"0.tar": {"Track 2.0.png": png(0), "Track 2.0.cls": b"1", "Track 2.1.png": png(1), "Track 2.1.cls": b"0"}},
        "0.tar", {}, "1 0"),
    "a .cls of bytes": ({"0.tar": SAMPLES | {"5.cls": b"\xff\xfe"}}, "0.tar", {}, ["5.cls is not text in UTF-8"]),
    "a .cls of an int64": ({"0.tar": SAMPLES | {"5.cls": bytes([7, 0])}}, "0.tar", {}, ["neither a whole number nor"]),
    # Splits in names of containers.
    "timm's imagenet-1k-wds": (
        {"x/in1k-train-0000.tar": SAMPLES, "x/in1k-train-0001.tar": SAMPLES, "x/in1k-validation-00.tar": SAMPLES}, "x",
        {}, ["2 sets of tar files: choose one of \"source='x/in*k-train-*.tar'\", \"source='x/in*k-validation-*.tar'"]),
    "one of them": ({"x/train-0.tar": SAMPLES, "x/val-0.tar": {"7.png": png(7), "7.cls": "7"}}, "x/val-*.tar", {}, "7"),
    "numbers alone": ({"x/00001.tar": TWO, "x/00002.tar": {"cat/2.png": png(2)}}, "x", {}, "cat dog cat"),
    # Names of other systems.
    "a name twice in a zip": ({"dos.zip": numbered("cat\\0.png", "cat/0.png", "dog/1.png")}, "dos.zip", {}, [
        "dos.zip has two files called cat/0.png: unpack it"]),
    "a class of HEIC": ({"x.zip": {"a/0.heic": b"", **numbered("b/1.png", "c/2.png")}}, "x.zip", {}, ["such as a, wh"]),
    "a zip of old .NET": ({"dos.zip": numbered("cat\\0.png", "dog\\1.png")}, "dos.zip", {}, "cat dog"),
    "backslashes on a disk": (numbered("cat\\0.png", "dog\\1.png"), "", {}, [
        ".png', with a backslash", ": unpack the archives of Windows by unzip"]),
    # Parquet.
    "partial-train and partial-test": (
        {"x/partial-train/0000.parquet": shard(0), "x/partial-test/0000.parquet": shard(1)}, "x", {},
        ["holds 2 sets of parquet files: choose one of \"source='x/partial-test/*.parquet'\", \"source='x/partial-"]),
    "the hub's older names": (
        {f"x/train-0000{i}-of-00002-{i}b1c2d3e4f5a6b7c.parquet": shard(i) for i in range(2)}, "x", {}, "0 1"),
    "missing shards": ({"data/train-00000-of-00294.parquet": shard(0)}, "data", {}, ["holds 1 of 294 parquet files"]),
    "img2dataset's table": ({"x/0.parquet": parquet(url=["u"]), "x/0/1.png": png(1)}, "x", {"labels": "none"}, "all"),
    "a picture beside them": ({"x/a.png": png(1), "x/data/0.parquet": shard(0)}, "x", {"labels": "none"},
                              ["holds images, such as a.png, and parquet", "select these, as in \"source='x/data/*.p"]),
    "other columns": ({"x.parquet": parquet(img=[png(0)], fine_label=[0])}, "x.parquet", {},
                      ["has the columns img, fine_label, not image and label: set image_column= and label_column="]),
    "other columns, as typed": ({"x.parquet": parquet(img=[png(0)], kind=["cat"])}, "x.parquet",
                                {"image": "img", "label": "kind"}, "cat"),
    "huggingface/datasets#4987: an imagefolder's to_parquet": (
        {"x.parquet": parquet(image=PATHS, label=[0])}, "x.parquet", {},
        ["has no bytes of image files, but perhaps their paths", "save_to_disk('x'), then data"]),
    **{f"parquet of {kind}": ({"x.parquet": parquet(image=pa.array([png(0)]).cast(kind), label=["cat"])}, "x.parquet",
                              {}, "cat") for kind in (pa.large_binary(), pa.dictionary(pa.int32(), pa.binary()))},
    "a test split of the hub": ({"x.parquet": parquet(image=[png(0)], label=[-1])}, "x.parquet", {},
                                ["no class for 1 of the 1 images, such as x.parquet row 0 (-1)", "labels=none"]),
    "activeloopai/deeplake#1699: Tiny-ImageNet's label 10985 of 200": (
        {"x.parquet": parquet(CLASSES, image=[png(0)], label=[10985])}, "x.parquet", {}, ["label 10985 (row 0), outs"]),
}  # fmt: skip


@pytest.mark.parametrize(("files", "source", "settings", "expected"), SITUATIONS.values(), ids=SITUATIONS)
def test_the_classes_are_right_or_a_line_says_what_to_type(tmp_path, monkeypatch, files, source, settings, expected):
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        if isinstance(content, dict):
            (put_zip if name.endswith(".zip") else put_tar)(Path(name), content)
        else:
            put(tmp_path, {name: content})
    columns = Columns(**{key: value for key, value in settings.items() if key != "labels"})
    read = partial(open_source, source or ".", settings.get("labels"), columns)
    if isinstance(expected, str):
        assert classes(read()) == expected
    else:
        refused(read, *expected)
