"""ILSVRC2012 as it is downloaded: a tar of tars, and validation images with the devkit's labels, in the order of ids.

Remarks such as FixRes#32 name public reports of what is tested.
"""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat
from spoils import refused
from test_hub import numbers
from test_labels import numbered, png, put, put_tar
from test_prepare_latents import prepare, read_folder

from latents import ilsvrc
from latents.images import open_source

IDS = ["n01440764", "n02012849", "n03126707"]
TRAIN = {f"{IDS[k % 3]}/{IDS[k % 3]}_{10 - k}.JPEG": png(k) for k in range(9)}
DEVKIT = "ILSVRC2012_devkit_t12/data"


def tar_of_tars(path: Path) -> Path:
    """A tar with a tar for each class, which is not in the order of ids."""
    inner = {}
    for wordnet_id in reversed(IDS):
        files = {name.rpartition("/")[2]: content for name, content in TRAIN.items() if name.startswith(wordnet_id)}
        inner[f"{wordnet_id}.tar"] = put_tar(path.with_name("inner.tar"), files).read_bytes()
    path.with_name("inner.tar").unlink()
    return put_tar(path, inner)


def meta(order: list[str]) -> bytes:
    """The devkit's meta.mat, which numbers classes in its own order and groups after them."""
    rows = [(number, wordnet_id, "words", "gloss", 0) for number, wordnet_id in enumerate(order, 1)]
    rows.append((len(rows) + 1, "n00001740", "entity", "gloss", 3))
    kinds = [(name, object) for name in ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children")]
    buffer = io.BytesIO()
    savemat(buffer, {"synsets": np.array(rows, dtype=kinds).reshape(-1, 1)})
    return buffer.getvalue()


def devkit(order: list[str] = (IDS[2], IDS[0], IDS[1]), truth: str = "1\n2\n3\n1\n") -> dict[str, bytes | str]:
    return {f"{DEVKIT}/meta.mat": meta(order), f"{DEVKIT}/{ilsvrc.TRUTH}": truth,
            "ILSVRC2012_devkit_t12/readme.txt": ""}


VAL = numbered(*(f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, 5)))
LABELS = [2, 0, 1, 2]  # of `devkit`, by the order of ids


def test_a_tar_of_tars_is_the_folder_that_it_would_be_unpacked_to(tmp_path):
    source = tar_of_tars(tmp_path / "ILSVRC2012_img_train.tar")
    prepare(put(tmp_path / "train", TRAIN), tmp_path / "a", resolution=8, shard_size=4)
    prepare(source, tmp_path / "b", resolution=8, shard_size=4)
    (a, ours), (b, theirs) = read_folder(tmp_path / "a"), read_folder(tmp_path / "b")
    assert a | {"source": 0} == b | {"source": 0} and a["class_names"] == IDS
    assert all(ours[kind].tobytes() == theirs[kind].tobytes() for kind in ours)
    assert open_source(source).names[0] == f"ILSVRC2012_img_train.tar/{IDS[0]}/{IDS[0]}_10.JPEG"
    assert len(open_source(source / IDS[1])) == 3


def test_a_folder_of_the_tars_of_classes_is_the_same(tmp_path):
    with tarfile.open(tar_of_tars(tmp_path / "outer.tar")) as tar:
        tar.extractall(tmp_path / "train")  # our own; Python 3.11.2 has no filter=
    source = open_source(tmp_path / "train")
    assert source.class_names == IDS and numbers(source) == numbers(open_source(tmp_path / "outer.tar"))


def test_a_tar_of_tars_that_ends_early_is_refused(tmp_path):
    whole = tar_of_tars(tmp_path / "x.tar").read_bytes()
    with tarfile.open(tmp_path / "x.tar") as tar:
        last = tar.getmembers()[-1]
    (tmp_path / "x.tar").write_bytes(whole[: last.offset_data + 700])
    refused(lambda: open_source(tmp_path / "x.tar"), "x.tar is not a complete, uncompressed tar")
    cut = put_tar(tmp_path / "inner.tar", {"0.png": png(0), "1.png": png(1)}).read_bytes()[:700]
    refused(lambda: open_source(put_tar(tmp_path / "y.tar", {"n1.tar": cut, "n2.tar": cut})), "y.tar", "complete")


@pytest.mark.parametrize("form", ["tar.gz", "folder", "data", "file"])
def test_validation_labels_of_the_devkit_are_in_the_order_of_wordnet_ids(form, tmp_path):
    source, kit = put_tar(tmp_path / "ILSVRC2012_img_val.tar", VAL), tmp_path / "kit"
    put(kit, devkit())
    if form == "tar.gz":
        with tarfile.open(tmp_path / "kit.tar.gz", "w:gz") as tar:
            tar.add(kit / "ILSVRC2012_devkit_t12", "ILSVRC2012_devkit_t12")
    places = {"tar.gz": tmp_path / "kit.tar.gz", "folder": kit, "data": kit / DEVKIT,
              "file": kit / DEVKIT / ilsvrc.TRUTH}
    found = open_source(source, labels=str(places[form]))
    assert found.class_names == IDS and found.labels.tolist() == LABELS and numbers(found) == [0, 1, 2, 3]
    part = open_source(put(tmp_path / "part", dict([*VAL.items()][:1])), labels=str(places[form]))
    assert part.class_names == IDS and part.labels.tolist() == [2]  # classes without images keep their place


def test_kaggles_and_other_lists_of_validation_labels_give_the_same(tmp_path):
    """huggingface/pytorch-image-models#1081."""
    rows = [f"ILSVRC2012_val_{i:08d},{IDS[label]}" for i, label in enumerate(LABELS, 1)]
    boxes = [f"{row} 1 2 3 4 {row[-9:]} 5 6 7 8" for row in rows]
    lists = {"LOC_val_solution.csv": "\n".join(["ImageId,PredictionString", *boxes]),
             "labels.csv": "\n".join(["ImageId,Class", *rows]),
             "synset_labels.txt": "\n".join(IDS[label] for label in LABELS)}
    put(tmp_path, lists)
    source = put_tar(tmp_path / "val.tar", VAL)
    for name in lists:
        found = open_source(source, labels=str(tmp_path / name))
        assert found.class_names == IDS and found.labels.tolist() == LABELS, name


@pytest.mark.parametrize(("change", "words"), [
    ({f"{DEVKIT}/meta.mat": None}, "counts classes in the devkit's own order"),  # open-mmlab/mmpretrain#11
    ({f"{DEVKIT}/meta.mat": b"no matrix"}, "meta.mat is not the devkit's"),
    ({f"{DEVKIT}/{ilsvrc.TRUTH}": "1\n9\n"}, "has the class 9, which meta.mat does not have"),
])
def test_a_devkit_that_lacks_something_is_refused(change, words, tmp_path):
    put(tmp_path / "kit", {name: content for name, content in (devkit() | change).items() if content is not None})
    source = put_tar(tmp_path / "val.tar", VAL)
    for given in (tmp_path / "kit", tmp_path / "kit" / DEVKIT / ilsvrc.TRUTH):
        refused(lambda given=given: open_source(source, labels=str(given)), words)


def test_a_line_says_where_the_labels_of_validation_images_in_one_class_are(tmp_path):
    """facebookresearch/FixRes#32."""
    found = open_source(put_tar(tmp_path / "val.tar", VAL))
    assert found.class_names == ["val"] and "labels=ILSVRC2012_devkit_t12.tar.gz" in found.notes[0]
