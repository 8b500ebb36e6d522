"""Classes as people bring them: in files, names and archives, whatever wrote them; what is chosen or missing is said.

Remarks such as NVIDIA/DIGITS#1462 name public reports of what is tested.
"""

import io
import json
import os
import struct
import tarfile
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import one_rank
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from spoils import refused
from test_prepare_latents import prepare

from latents.images import decode_image, note_dark_images, open_source
from scoring.image_sets import open_images

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


def put_zip(path: Path, files: dict[str, bytes | str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def put_tar(path: Path, files: dict[str, bytes | str], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            content = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def inside(folder: str, files: dict[str, bytes | str]) -> dict[str, bytes | str]:
    return {f"{folder}/{name}": content for name, content in files.items()}


def classes(source) -> dict[str, str]:
    """The class of each image by its number, which is its colour."""
    return {int(source.pixels(i)[0, 0, 0]): source.class_names[label] for i, label in enumerate(source.labels)}


EDM = numbered(*(f"{i // 4:05d}/img{i:08d}.png" for i in range(9)))


def dataset(labels) -> dict[str, str]:
    return {"dataset.json": json.dumps({"labels": labels})}


@pytest.mark.parametrize("write", [put, put_zip, put_tar])
@pytest.mark.parametrize("top", ["", "set"])
@pytest.mark.parametrize("form", [
    lambda names: [[name, i % 3] for i, name in enumerate(names)],
    lambda names: {name: i % 3 for i, name in enumerate(names)},
    lambda names: [[name, float(i % 3)] for i, name in enumerate(names)],
    lambda names: [[name, [float(i % 3 == k) for k in range(3)]] for i, name in enumerate(names)],
], ids=["pairs", "object", "floats", "one-hot"])
def test_dataset_json_labels_a_folder_and_its_archives(tmp_path, write, top, form):
    """NVlabs/stylegan2-ada-pytorch#111."""
    files = EDM | dataset(form(list(EDM)))
    source = open_source(write(tmp_path / f"edm.{write.__name__[-3:]}", inside(top, files) if top else files))
    assert source.labels.tolist() == [0, 1, 2] * 3 and source.class_names == ["0", "1", "2"]
    assert not source.not_images and not source.notes


def test_dataset_json_without_labels_is_one_class_and_one_that_lacks_some_says_so(tmp_path):
    """NVlabs/stylegan2-ada-pytorch#126."""
    none = open_source(put(tmp_path / "none", EDM | dataset(None)))
    assert none.class_names == ["none"] and not none.labels.any() and len(none) == 9
    listed = [[name, 4] for name in [*EDM][:7]] + [["gone.png", 5]]
    some, last = open_source(put_zip(tmp_path / "some.zip", EDM | dataset(listed))), [*EDM][7:]
    assert some.labels.tolist() == [4] * 7 and len(some.class_names) == 6
    assert some.notes[:2] == [
        f"labels=dataset.json: 2 of 9 images have no label and are left out: {', '.join(last)}",
        "labels=dataset.json: 1 labels have no image: gone.png"]
    assert "5 of these 6 classes have no image" in some.notes[2] and [name for name, _ in some.left_out] == last


def test_dataset_json_that_cannot_be_read_is_named_and_another_kind_is_said_to_be_passed_over(tmp_path):
    refused(lambda: open_source(put(tmp_path / "a", EDM | {"dataset.json": "{"})), "dataset.json is not JSON")
    refused(lambda: open_source(put(tmp_path / "b", inside("train", EDM | dataset(None)) | numbered("val/0.png"))),
            "b holds train/dataset.json, which covers only 9 of the 10 images: set", "b/train")
    other = open_source(put(tmp_path / "c", numbered("cat/0.png", "dog/1.png") | {"dataset.json": '{"license": "x"}'}))
    assert other.class_names == ["cat", "dog"] and other.notes == ['dataset.json has no "labels" and is not read.']


FLAT = numbered(*(f"{i:04d}.png" for i in range(9)))
ROWS = [(name, PETS[i % 3]) for i, name in enumerate(FLAT)]


def lines(mark: str, head: str = "", of=lambda name: name) -> str:
    return head + "".join(f"{of(name)}{mark}{label}\n" for name, label in ROWS)


COLUMNS = f"image,{','.join(PETS)}\n" + "".join(  # PyJulie/MONICA#5, as ISIC's
    f"{name[:-4]},{','.join(str(float(label == pet)) for pet in PETS)}\n" for name, label in ROWS)
COCO = {"images": [{"id": name, "file_name": f"train/{name}"} for name, _ in ROWS],  # alcunha/iwildcam2021ufam#4
        "categories": [{"id": 2 * i + 3, "name": pet} for i, pet in enumerate(PETS)],
        "annotations": [{"image_id": name, "category_id": 2 * PETS.index(label) + 3} for name, label in ROWS * 2]}


@pytest.mark.parametrize(("name", "content"), [
    ("metadata.csv", lines(",", "file_name,label\n")), ("train.csv", lines(",")), ("labels.txt", lines(" ")),
    ("labels.txt", lines(", ")), ("truth.csv", COLUMNS), ("train.json", json.dumps(COCO)),
    ("train.csv", "\ufeff" + lines(";", "id;breed\n").replace("\n", "\r\n")),  # pandas-dev/pandas#13497, of Excel
    ("labels.csv", lines(",", "", lambda name: name.removesuffix(".png"))),
    ("labels.csv", lines(",", "", lambda name: f"/data/other/train/{name}")),  # NVIDIA/DIGITS#1462
    ("labels.csv", lines(",", "", lambda name: f".\\{name}")),
    ("labels.tsv", lines("\t", "image\tclass\n")),
    ("labels.csv", "".join(f'{label},"{name}"\r\n' for name, label in ROWS)),
    ("val_annotations.txt", "".join(f"{name}\t{label}\t0\t0\t1\t1\n" for name, label in ROWS)),
    ("boxes.txt", "".join(f"{name} {label} 0 0 1 1\n" for name, label in ROWS)),
    ("LOC_val_solution.csv",
     "ImageId,PredictionString\n" + "".join(f"{name[:-4]},{label} 1 2 3 4 {label} 5 6 7 8 \n" for name, label in ROWS)),
    ("wide.csv", "label,width,filename\n" + "".join(f"{label},16,{name}\n" for name, label in ROWS)),
    ("labels.json", json.dumps(dict(ROWS))), ("labels.json", json.dumps({"labels": ROWS})),
    ("labels.json", json.dumps([{"image": name, "label": label} for name, label in ROWS])),
    ("labels.json", json.dumps({name: {"width": 4, "category": label} for name, label in ROWS})),
    ("metadata.jsonl", "".join(json.dumps({"file_name": name, "label": label}) + "\n" for name, label in ROWS)),
])  # fmt: skip
def test_labels_are_read_from_a_file_of_any_usual_form(tmp_path, name, content):
    folder = put(tmp_path / "train", FLAT)
    put(tmp_path, {name: content})
    source = open_source(folder, labels=str(tmp_path / name))
    assert source.class_names == PETS and source.labels.tolist() == [0, 1, 2] * 3 and source.notes == []
    zipped = open_source(put_zip(tmp_path / "train.zip", FLAT | {name: content}), labels=name)
    assert zipped.labels.tolist() == source.labels.tolist() and not zipped.not_images


def test_numbers_are_the_labels_themselves_and_columns_of_numbers_are_distinguished_from_names(tmp_path):
    folder = put(tmp_path / "set", numbered(*(f"{i}.png" for i in range(6))))
    put(tmp_path, {
        "a.txt": "".join(f"{i % 2} {i}\n" for i in range(6)),
        "b.csv": "label,id\n" + "".join(f"{i % 2 + 1},{i}\n" for i in range(6)),
        "c.csv": "file,label\n" + "".join(f"{i}.png,{i % 2}.0\n" for i in range(6))})  # asreview/asreview#1636
    for name in ("a.txt", "c.csv"):
        assert classes(open_source(folder, labels=str(tmp_path / name))) == {i: str(i % 2) for i in range(6)}
    source = open_source(folder, labels=str(tmp_path / "b.csv"))
    assert classes(source) == {i: str(i % 2 + 1) for i in range(6)} and source.class_names == ["0", "1", "2"]
    assert "1 of these 3 classes have no image" in source.notes[0]


CELEBA = numbered(*(f"{k:06d}.jpg" for k in range(1, 41)))
HEADS = [f"{word}_{k}" for k in range(13) for word in ("Arched", "Male", "Young")] + ["Smiling"]
ATTRIBUTES = {name: [1 if (k * 7 + column * 3) % 5 < 2 else -1 for column in range(40)]
              for k, name in enumerate(CELEBA)}
LISTED = "".join([f"{len(CELEBA)}\n{' '.join(HEADS)} \n",
                  *(f"{name} {' '.join(f'{value:2d}' for value in row)}\n" for name, row in ATTRIBUTES.items())])
ON_KAGGLE = "\n".join(",".join([name, *map(str, row)]) for name, row in ({"image_id": HEADS} | ATTRIBUTES).items())
PARTITION = "".join(f"{image} {k % 3}\n" for k, image in enumerate(CELEBA))
CAPTIONS = "".join(f"{image} face number {k}\n" for k, image in enumerate(CELEBA))


@pytest.mark.parametrize(("name", "content"), [("list_attr_celeba.txt", LISTED), ("list_attr_celeba.csv", ON_KAGGLE)])
def test_one_of_celebas_attributes_is_read_and_the_file_alone_is_not(tmp_path, name, content):
    file = put(tmp_path, {name: content, "list_eval_partition.txt": PARTITION}) / name
    folder = put(tmp_path / "img_align_celeba", CELEBA)
    [hint] = open_source(folder).notes
    assert hint.startswith(f"{file} has 40 columns that may be classes") and f"labels={file}:Arched_0 reads one" in hint
    refused(lambda: open_source(folder, labels=str(file)), "40 columns beside the names (Arched_0, Male_0",
            f": choose the one with classes, as in labels={file}:Arched_0")
    for asked in ("Male_0", "male 0", "3"):
        source = open_source(folder, labels=f"{file}:{asked}")
        assert source.class_names == ["-1", "1"] and not source.notes
        assert source.labels.tolist() == [int(row[1] == 1) for row in ATTRIBUTES.values()]
    refused(lambda: open_source(folder, labels=f"{file}:Beard"), "no column Beard beside the names: it has Arched_0")
    part = open_source(put(tmp_path / "part", {image: CELEBA[image] for image in CELEBA if ATTRIBUTES[image][1] == 1}),
                       labels=f"{file}:Male_0")
    assert part.class_names == ["-1", "1"] and part.labels.all()


@pytest.mark.parametrize(("name", "content"), [
    *(("metadata.jsonl", "\n".join(json.dumps({"file_name": image, "text": text.format(k)})
                                   for k, image in enumerate(CELEBA))) for text in ("face {}", "a face")),
    ("captions.txt", CAPTIONS), ("list_eval_partition.txt", PARTITION),
    ("split.csv", "image_id,partition\n" + "".join(f"{image},{k % 3}\n" for k, image in enumerate(CELEBA))),
    ("scores.csv", "".join(f"{image},{k / 7:.3f}\n" for k, image in enumerate(CELEBA))),
])  # fmt: skip
def test_captions_splits_and_numbers_of_each_image_are_not_recommended_as_labels(tmp_path, name, content):
    assert open_source(put(tmp_path, CELEBA | {name: content})).notes == []


def test_a_class_for_nearly_every_image_gets_a_line(tmp_path):
    source = open_source(put(tmp_path, CELEBA | {"captions.txt": CAPTIONS}), labels="captions.txt")
    assert any("There are 40 classes for 40 images, which is about one per image" in note for note in source.notes)


TWO_COLUMNS = "".join(f"{image},{k % 3},{k % 2}\n" for k, image in enumerate(CELEBA))


@pytest.mark.parametrize(("name", "content", "columns"), [
    ("list.txt", "# a comment\n#Image CLASS-ID SPECIES\n"
     + "".join(f"{image[:-4]} {k % 3 + 1} {k % 2} 1\n" for k, image in enumerate(CELEBA)), "3 columns (2, 3, 4)"),
    ("all.csv", TWO_COLUMNS, "2 columns (2, 3)"),
    ("all.csv", f"picture,kind,colour\n{TWO_COLUMNS}", "2 columns (kind, colour)"),
    ("all.json", json.dumps([{"image": image, "kind": k % 3, "colour": k % 2} for k, image in enumerate(CELEBA)]),
     "2 columns (kind, colour)"),
])  # fmt: skip
def test_of_several_columns_without_a_known_head_one_must_be_named(tmp_path, name, content, columns):
    source = put(tmp_path, CELEBA | {name: content})
    refused(lambda: open_source(source, labels=name), columns.replace("(", "beside the names ("),
            f": choose the one with classes, as in labels={name}:")
    found = open_source(source, labels=f"{name}:2" if "2, 3" in columns else f"{name}:kind")
    assert found.labels.tolist() == [k % 3 + (name == "list.txt") for k in range(40)]


def test_a_name_in_several_folders_needs_its_folder_and_of_two_label_columns_one_is_said(tmp_path):
    folder = put(tmp_path / "set", numbered("a/0.png", "b/0.png"))
    put(tmp_path, {"short.csv": "0.png,cat\n", "long.csv": "file,label,class_name\na/0.png,1,cat\nb/0.png,0,dog\n"})
    refused(lambda: open_source(folder, labels=str(tmp_path / "short.csv")),
            "names 0.png, which may be a/0.png or b/0.png")
    source = open_source(folder, labels=str(tmp_path / "long.csv"))
    assert source.labels.tolist() == [1, 0] and "has the columns label, class_name" in source.notes[0]
    assert "label is read" in source.notes[0]


@pytest.mark.parametrize(("content", "words"), [
    ("{", "is not JSON"), ('{"0.png": 0.5, "1.png": 1}', "0.5"), ('{"0.png": [1, 1]}', "one class"),
    ('{"0.png": 0, "1.png": 18446744073709551616}', "18446744073709551616, which is not a class"),  # of an id, say
    ('[["0.png", "a"], ["0.png", "b"]]', "two labels"), ('{"ant": 0}', "labels none of the 2 images"),
    (json.dumps(COCO | {"images": [{"id": "x", "file_name": "train/0.png"}],
                        "annotations": [{"image_id": "x", "category_id": number} for number in (3, 7)]}),
     "several categories for train/0.png, but an image can have only one class"),
])  # fmt: skip
def test_labels_that_are_damaged_ambiguous_or_of_other_images_are_refused(tmp_path, content, words):
    put(tmp_path, {"labels.json": content})
    source = put(tmp_path / "set", numbered("0.png", "1.png"))
    refused(lambda: open_source(source, labels=str(tmp_path / "labels.json")), words)


def test_names_and_none(tmp_path):
    """openai/guided-diffusion#95."""
    adm = put(tmp_path / "adm", numbered("x/cat_0.png", "x/dog_1.png", "y/big_cat_2.JPG", "3.png"))
    source = open_source(adm, labels="names")
    assert classes(source) == {0: "cat", 1: "dog", 2: "big_cat"} and "1 of 4 images have no label" in source.notes[0]
    for given in (adm, put_zip(tmp_path / "adm.zip", numbered("x/cat_0.png", "y/big_cat_2.JPG"))):
        none = open_source(given, labels="none")
        assert none.class_names == ["adm"] and not none.labels.any()


@pytest.mark.parametrize(("files", "source", "words"), [
    (FLAT | {"metadata.csv": lines(",", "file_name,label\n")}, "", "metadata.csv"),
    (FLAT | {"truth.csv": COLUMNS}, "", "truth.csv"), (FLAT | {"train.json": json.dumps(COCO)}, "", "train.json"),
    (inside("train", FLAT) | {"train.csv": lines(",", "id,label\n")}, "train", "train.csv"),
    *((inside("val/images", FLAT) | {"val/val_annotations.txt": "0000.png\tn01443537\t0\t0\t1\t1\n"}, source,
       "val_annotations.txt") for source in ("val", "val/images")),
    (inside("ILSVRC/Data/CLS-LOC/val", FLAT) | {
        "LOC_val_solution.csv": "ImageId,PredictionString\n0000,n01 1 2 3 4\n"}, "ILSVRC/Data/CLS-LOC/val",
     "LOC_val_solution.csv"),
    *((numbered(*(form.format(name, i) for name in PETS for i in range(2))), "", "labels=names")
      for form in ("{}_{}.png", "{}.{}.jpg", "big {} ({}).jpg")),  # the second as Kaggle's dogs and cats
])  # fmt: skip
def test_where_one_class_is_found_one_line_names_what_was_not_read(tmp_path, files, source, words):
    found = open_source(put(tmp_path / "set", files) / source)
    assert len(found.class_names) == 1 and len(found.notes) == 1 and words in found.notes[0]
    if "labels=names" not in words:  # the line says what to type
        place = found.notes[0].partition("labels=")[2].removesuffix(" reads it.")
        assert open_source(tmp_path / "set" / source, labels=place).class_names != found.class_names


def test_names_with_a_dot_or_brackets_before_the_number_are_classes_and_dates_are_not(tmp_path):
    files = numbered("cat.0.png", "cat.10.png", "dog.0.png", "big dog (2).png", "owl-7.png")
    assert open_source(put(tmp_path / "set", files), labels="names").class_names == ["big dog", "cat", "dog", "owl"]
    dates = open_source(put(tmp_path / "dates", numbered(*(f"2019-0{k // 4 + 1}-0{k}.png" for k in range(8)))))
    assert dates.notes == [] and len(dates.class_names) == 1


MVTEC = ["train/good/000.png", "test/good/000.png", "test/broken/000.png", "ground_truth/broken/000_mask.png"]


@pytest.mark.parametrize(("pictures", "masks", "remedy"), [
    (["images/a_1.jpg", "images/a_2.jpg"], ["annotations/trimaps/a_1.png", "annotations/trimaps/a_2.png"],
     "as in source=.*set/images"),
    ([f"{kind}/{name}" for kind in ("bottle", "cable") for name in MVTEC[:3]],
     [f"{kind}/{MVTEC[3]}" for kind in ("bottle", "cable")], "move them away"),
    (["benign/b (1).png", "normal/n (1).png"], ["benign/b (1)_mask.png", "normal/n (1)_mask.png"], "move them away"),
    (["train/a.jpg"], ["train_masks/a_mask.gif"], "as in source=.*set/train"),
    (["JPEGImages/1.jpg", "JPEGImages/2.jpg"], ["SegmentationClass/1.png"], "as in source=.*set/JPEGImages"),
    (["x/1.jpg"], ["x/mask/1.png"], "move them away"),
])  # fmt: skip
def test_masks_beside_pictures_are_warned_of(tmp_path, recwarn, pictures, masks, remedy):
    source = put(tmp_path / "set", numbered(*pictures, *masks))
    such_as = masks[0].partition("/")[0]
    with pytest.warns(match=rf"has {len(masks)} images among .* masks of the others, such as {such_as}.*{remedy}"):
        open_source(source, labels="none")
    recwarn.clear()
    for number, names in enumerate((pictures, masks, ("mask/1.png", "mask/2.png", "face/3.png"))):
        open_source(put(tmp_path / str(number), numbered(*names)), labels="none")
    assert not recwarn.list


def test_captions_scores_and_files_of_other_images_are_not_read_as_labels(tmp_path):
    put(tmp_path, {"other.csv": "9999.png,cat\n", "set/readme.txt": "two words\n", "set/0000.txt": "a caption"}
        | inside("set", FLAT))
    found = open_source(tmp_path / "set")
    assert found.class_names == ["set"] and found.notes == [] and len(found) == 9
    scores = [{"images": 1, "batch_size": 0, "tag": name} for name in ("a", "b")]  # whose numbers are images' names
    put(tmp_path / "scored", inside("train", numbered("0.png", "1.png", "10.png"))
        | {"results.jsonl": "\n".join(map(json.dumps, scores))})
    assert not open_source(tmp_path / "scored/train").notes


# ---- archives -------------------------------------------------------------------------------------------------------

TREE = numbered("größe/0.png", "dog/1.JPG", "dog/a b/2.png")
WANTED = {0: "größe", 1: "dog", 2: "dog"}
# pytorch/vision#79
JUNK = {"__MACOSX/dog/._1.JPG": "x", "dog/._1.JPG": "x", ".DS_Store": "x", "@eaDir/dog/1.JPG": "x"}


@pytest.mark.parametrize("rename", [
    lambda name: name, lambda name: f"./{name}", lambda name: f"/{name}", lambda name: f"pets/{name}",
    lambda name: unicodedata.normalize("NFD", name), lambda name: name.replace("/", "\\"),
], ids=["plain", "dot", "absolute", "in a folder", "of a Mac", "of Windows"])
def test_an_archive_means_the_same_as_its_folder_whoever_made_it(tmp_path, rename):
    files = {rename(name): data for name, data in (TREE | JUNK).items()}
    sources = [put_zip(tmp_path / "pets.zip", files)]
    if "\\" not in rename("a/b"):
        sources += [put_tar(tmp_path / "pets.tar", files),
                    put(tmp_path / "tree", {name.lstrip("/"): data for name, data in files.items()})]
    for source in sources:
        found = open_source(source)
        assert classes(found) == WANTED and found.class_names == ["dog", "größe"], source
        assert len(found.left_out) == len(JUNK)
        assert {reason for name, reason in found.left_out if name.endswith(".JPG")} == {"is a hidden or system file"}


def test_names_in_utf_8_that_a_zip_does_not_mark_as_such_are_read(tmp_path):
    path = put_zip(tmp_path / "mac.zip", TREE)
    path.write_bytes(path.read_bytes().replace(b"\x14\x00\x00\x08", b"\x14\x00\x00\x00"))  # the mark in both headers
    with zipfile.ZipFile(path) as archive:
        assert "größe/0.png" not in archive.namelist()
    assert classes(open_source(path)) == WANTED


OTHER_PAGES = {  # the second byte of the first letters is a backslash
    "shift_jis": ["表示", "表題", "ソ示", "犬"], "gbk": ["郳猫", "郳犬", "乗猫", "狗"],
    "big5": ["功夫", "功能", "許夫", "犬"], "latin-1": ["cafés", "cafès", "größe", "z"]}


@pytest.mark.parametrize("page", OTHER_PAGES)
@pytest.mark.parametrize("mark", ["/", "\\"])
@pytest.mark.parametrize("system", [0, 3], ids=["Windows", "Unix"])
def test_class_names_in_other_code_pages_remain_apart(tmp_path, page, mark, system):
    class Info(zipfile.ZipInfo):
        def _encodeFilenameFlags(self):  # as such a program writes it: no mark of UTF-8
            return self.filename.replace("/", mark).encode(page), self.flag_bits & ~0x800

    names = OTHER_PAGES[page]
    files = {f"{name}/{name}_{k}.png": png(10 * i + k) for i, name in enumerate(names) for k in range(2)}
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        for name, data in files.items():
            info = Info(name)
            info.create_system = system
            archive.writestr(info, data)
    sources = [tmp_path / "set.zip"]
    if mark == "/":
        encoded = {os.fsdecode(name.encode(page)): data for name, data in files.items()}
        sources += [put_tar(tmp_path / "set.tar", encoded), put(tmp_path / "set", encoded)]
    for source in sources:
        for labels in ("folders", "names"):
            found = open_source(source, labels=labels)
            of = classes(found)
            assert len(found) == 2 * len(names) == 2 * len({*of.values()})
            assert all(of[k] == of[k + 1] for k in range(0, 10 * len(names), 10))
            assert all("\\" not in name and name.isprintable() for name in found.names)


def test_a_file_that_was_added_again_is_the_later_one_and_a_hard_link_is_its_file(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        for data in (png(1), png(2)):
            archive.writestr("cat/0.png", data)
    tree = put(tmp_path / "tree", numbered("cat/0.png"))
    os.link(tree / "cat/0.png", tree / "cat/1.png")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tree, ".")
    assert classes(open_source(tmp_path / "a.zip")) == {2: "cat"} and len(open_source(tmp_path / "a.zip")) == 1
    assert len(open_source(tmp_path / "a.tar")) == len(open_source(tree)) == 2


def test_a_tree_means_the_same_whichever_way_it_is_reached(tmp_path, monkeypatch):
    tree = put(tmp_path / "tree", TREE)
    (tmp_path / "link").symlink_to(tree)
    (tree / "dog" / "round").symlink_to(tree)  # a circle
    monkeypatch.chdir(tmp_path)
    whole = open_source(tree).fingerprint()
    for way in ("tree", "./tree", "tree/", "link", f"{tmp_path}/other/../tree/", tree):
        (tmp_path / "other").mkdir(exist_ok=True)
        assert open_source(way).fingerprint() == whole and len(open_source(way)) == 3
    put_zip(tmp_path / "all.zip", inside("data/train", TREE) | {"data/val/dog/0.png": png(9)})
    with pytest.warns(UserWarning, match=r"source=.*all.zip/data/train") as warned:
        open_source(tmp_path / "all.zip")
    named = str(warned[0].message).rpartition("source=")[2].rstrip(".")
    assert open_source(named).fingerprint() == whole


# ---- samples of webdataset ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [
    {"22.00.png": png(0), "22.00.cls": "0", "22.01.png": png(1), "22.01.cls": "1"},
    {"22.05-0.png": png(0), "22.05-0.cls": "0", "22.05-1.png": png(1), "22.05-1.cls": "1"},
    {"a/22.0/1.png": png(0), "a/22.0/1.cls": "0", "a/22.0/2.png": png(1), "a/22.0/2.cls": "1"},
    {"foo.left.png": png(0), "foo.right.png": png(9), "foo.cls": "0",
     "bar.left.png": png(1), "bar.right.png": png(8), "bar.cls": "1"},
], ids=["webdataset/webdataset#237, dots in keys", "huggingface/datasets#7144, dots in names",
        "huggingface/datasets#7150, a dot in a folder", "webdataset/webdataset#20, two images in a sample"])
@pytest.mark.parametrize("write", [put, put_tar])
def test_each_sample_has_its_own_label(tmp_path, write, files):
    assert classes(open_source(write(tmp_path / "set.tar", files))) == {0: "0", 1: "1"}


@pytest.mark.parametrize("write", [put, put_zip, put_tar])
def test_one_of_two_images_and_two_labels_is_chosen_and_announced(tmp_path, write):
    files = {"0.mask.png": png(9), "0.png": png(0), "0.cls": "2", "0.json": '{"label": 1}', "1.png": png(1),
             "1.cls": "0"}
    source = open_source(write(tmp_path / "set.zip" if write is put_zip else tmp_path / "set.tar", files))
    assert classes(source) == {0: "2", 1: "0"}
    said = dict(source.left_out)
    assert all("another picture of the same sample" in reason for reason in said.values()) and len(said) == 1
    assert "1 samples have several labels, and .cls counts" in source.notes[0]
    assert "further pictures" in source.notes[1]


def test_a_tar_without_labels_is_its_folder_and_several_ask_for_them(tmp_path):
    flat = open_source(put_tar(tmp_path / "owls.tar", FLAT))
    assert flat.class_names == ["owls"] and len(flat) == 9
    for name in ("n02", "n01"):
        put_tar(tmp_path / f"{name}.tar", {f"{name}_{image}": data for image, data in FLAT.items()})
    refused(lambda: open_source(tmp_path), "no class for the images of 3 tars", "labels=names")
    named = open_source(tmp_path / "n*.tar", labels="names")
    assert named.class_names == ["n01", "n02"] and np.bincount(named.labels).tolist() == [9, 9]
    assert open_source(tmp_path, labels="none").class_names == [tmp_path.name]


@pytest.mark.parametrize("label", [("cls", "{}"), ("json", '{{"label": {}}}'), ("txt", "{}")],
                         ids=["cls", "json", "txt"])
def test_tars_whose_keys_begin_again_keep_every_sample_with_the_label_of_its_own_tar(tmp_path, label):
    for tar, value in enumerate(("1", "0")):
        samples = {f"{k:06d}.{part}": content for k in range(4)
                   for part, content in (("png", png(10 * tar + k)), (label[0], label[1].format(value)))}
        put_tar(tmp_path / f"shard-{tar}.tar", samples)
    source = open_source(tmp_path)
    assert classes(source) == {0: "1", 1: "1", 2: "1", 3: "1", 10: "0", 11: "0", 12: "0", 13: "0"}
    assert not source.notes and not source.left_out
    assert len(open_source(tmp_path, labels="none")) == 8


def test_what_one_name_in_two_tars_cannot_say_is_refused(tmp_path):
    for tar in ("a.tar", "b.tar"):
        put_tar(tmp_path / tar, numbered("000_0.png", "001_0.png") | {"labels.csv": "000_0.png,cat\n"})
    (tmp_path / "labels.csv").write_text("000_0.png,cat\n001_0.png,dog\n")
    refused(lambda: open_source(tmp_path / "*.tar", labels=str(tmp_path / "labels.csv")),
            "labels 000_0.png, but 2 tars hold a file of that name: prepare each tar separately")
    refused(lambda: open_source(tmp_path / "*.tar", labels="labels.csv"), "labels=labels.csv is in 2 tars: name one")
    assert np.bincount(open_source(tmp_path, labels="names").labels).tolist() == [2, 2]
    for tar in ("a.tar", "b.tar"):
        put_tar(tmp_path / tar, numbered("0.png") | dataset([["0.png", 0]]))
    refused(lambda: open_source(tmp_path), "dataset.json in more than one tar")


# ---- pixels ---------------------------------------------------------------------------------------------------------


def grey(highest: int, kind=np.uint16, form: str = "tiff") -> bytes:
    return encoded(np.array([[0, highest]], kind), form)


def tiff(values: np.ndarray, photometric: int) -> bytes:
    """An uncompressed TIFF of grey values as they are; 262 is PhotometricInterpretation, of which 0 is WhiteIsZero."""
    height, width = values.shape
    tags = {256: width, 257: height, 258: 8 * values.itemsize, 259: 1, 262: photometric, 273: 8, 277: 1, 278: height,
            279: values.nbytes}
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"".join([struct.pack("<2sHI", b"II", 42, 8 + values.nbytes), values.tobytes(), struct.pack("<H", len(tags)),
                     directory, bytes(4)])


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_grey_whose_white_is_0_looks_as_in_a_viewer(kind):
    values = (np.arange(16, dtype=kind) * (np.iinfo(kind).max // 15)).reshape(4, 4)
    as_shown = values.astype(int).ravel() * 255 // np.iinfo(kind).max
    for photometric, wanted in ((1, as_shown), (0, 255 - as_shown)):
        assert np.asarray(decode_image(tiff(values, photometric)))[..., 0].ravel().tolist() == wanted.tolist()


def test_of_several_pages_or_frames_the_first_is_used_and_the_files_are_counted(tmp_path, capsys):
    pages, files = [Image.new("RGB", (4, 4), (k, 0, 0)) for k in (9, 8, 7)], {"0.png": png(5)}
    for kind, options in {"tiff": {}, "gif": {}, "png": {}, "webp": {"lossless": True}, "mpo": {}}.items():
        content = encoded(pages[0], kind, save_all=True, append_images=pages[1:], **options)
        files["photo.jpg" if kind == "mpo" else f"several.{kind}"] = content  # mpo: a phone's, with its previews
    source = open_source(put(tmp_path / "set", files))
    assert {int(source.pixels(i)[0, 0, 0]) for i, name in enumerate(source.names) if name.startswith("several")} == {9}
    for _ in range(2):  # also where the shard is there already
        prepare(tmp_path / "set", tmp_path / "out", resolution=4, shard_size=3)
        said = "4 of 6 images: the file has several pages or frames, and only the first is used: several.gif, sev"
        assert said in capsys.readouterr().out
        assert json.loads((tmp_path / "out/metadata.json").read_text())["unreadable"] == []
        (tmp_path / "out/metadata.json").unlink()
        (tmp_path / "out/latents-00000.npy").unlink()


def test_photographs_that_a_viewer_turns_are_counted(tmp_path, capsys):
    """kohya-ss/sd-scripts#1316, huggingface/diffusers#3465."""
    for turned in (0, 1, 6, 8):
        exif = Image.Exif()
        exif[0x0112] = turned
        put(tmp_path / "photos", {f"{turned}.jpg": png(turned, exif=exif)})
    said = "2 of 4 images: the file has an EXIF orientation, which is not applied, as in ADM: 6.jpg, 8.jpg"
    prepare(tmp_path / "photos", tmp_path / "out", resolution=4)
    assert said in capsys.readouterr().out
    open_images(one_rank(), "images", str(tmp_path / "photos"))
    assert f"images={tmp_path}/photos: {said}" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_images_of_12_bits_in_16_get_a_line_unless_one_exceeds_them(tmp_path, kind):
    dark = open_source(put(tmp_path / "dark", {"0.tiff": grey(4095, kind), "1.png": png(3)}))
    assert "1 of 2 checked images have 16 bits or more, and none has a value above 4,095" in note_dark_images(dark)
    for name, files in {"full": {"0.tiff": grey(4095, kind), "1.tiff": grey(4096, kind)}, "plain": {"1.png": png(3)},
                        "floats": {"1.tiff": grey(0.9, np.float32)}}.items():  # python-pillow/Pillow#3159: refused
        assert note_dark_images(open_source(put(tmp_path / name, files))) is None


def test_a_png_with_long_text_is_read(tmp_path):
    info = PngInfo()
    info.add_text("workflow", "x" * 3_000_000, zip=True)
    source = open_source(put(tmp_path, {"0.png": png(7, pnginfo=info)}))
    assert source.pixels(0)[0, 0].tolist() == [7, 0, 0]
