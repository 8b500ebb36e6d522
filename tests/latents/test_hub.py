"""Hugging Face's data sets: parquet shards and folders of save_to_disk are the folder of the same images.

Remarks such as huggingface/datasets#4299 name public reports of what is tested.
"""

import builtins
import errno
import io
import json
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, one_rank
from spoils import refused
from test_labels import classes, png, put, put_zip
from test_prepare_latents import prepare, read_folder, same_folder

from latents import hub
from latents.folder import open_latents
from latents.images import note_dark_images, open_source
from scoring.image_sets import open_images

PETS = ["cat", "dog", "owl"]
IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
CLASSES = {"names": PETS, "_type": "ClassLabel"}


def image(number: int | None, name: str | None = None) -> dict | None:
    return None if number is None else {"bytes": png(number), "path": name or f"{number}.png"}


def table(columns: dict[str, pa.Array], features: dict | None = None) -> pa.Table:
    """A table with the metadata that `datasets` writes, or without."""
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if features else None
    made = pa.table(columns)
    return made.replace_schema_metadata(metadata)


def pets(labels: list[int], first: int = 0, kind: pa.DataType = IMAGE) -> pa.Table:
    """Images whose number is their colour, with labels."""
    images = pa.array([image(first + i) for i in range(len(labels))], IMAGE)
    images = images if kind == IMAGE else images.field("bytes").cast(kind)
    return table({"image": images, "label": pa.array(labels, pa.int64())},
                 {"image": {"_type": "Image"}, "label": CLASSES})


def write(path: Path, *tables: pa.Table, group: int = 3) -> Path:
    """Writes a shard, or with several tables shards numbered as on the Hub."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for i, part in enumerate(tables):
        name = f"{path.name}-{i:05d}-of-{len(tables):05d}.parquet" if len(tables) > 1 else path.name
        pq.write_table(part, path.parent / name, row_group_size=group)
    return path.parent if len(tables) > 1 else path


def save_to_disk(folder: Path, *tables: pa.Table) -> Path:
    """Writes what `Dataset.save_to_disk` writes; its files are named so that the order of names is not theirs."""
    folder.mkdir(parents=True)
    names = [f"data-{i}.arrow" for i in (9, 10, 11)][: len(tables)]
    for name, part in zip(names, tables, strict=True):
        with pa.ipc.new_stream(str(folder / name), part.schema) as stream:
            stream.write_table(part, max_chunksize=2)
    features = json.loads(tables[0].schema.metadata[b"huggingface"])["info"]["features"]
    put(folder, {"state.json": json.dumps({"_data_files": [{"filename": name} for name in names], "_split": "train"}),
                 "dataset_info.json": json.dumps({"features": features})})
    return folder


def numbers(source) -> list[int]:
    return [int(source.pixels(i)[0, 0, 0]) for i in range(len(source))]


LABELS = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2]


def of_pets(folder: Path) -> tuple[Path, list[pa.Table]]:
    """A folder of class folders, and tables of the same images in the same order."""
    put(folder, {f"{PETS[label]}/{i:02d}.png": png(i) for i, label in enumerate(LABELS)})
    return folder, [pets(LABELS[:5]), pets(LABELS[5:9], 5), pets(LABELS[9:], 9)]


@pytest.mark.parametrize("form", ["parquet", "save_to_disk"])  # huggingface/diffusers#10913
def test_latents_are_bit_for_bit_those_of_the_folder_of_the_same_images(form, tmp_path):
    folder, tables = of_pets(tmp_path / "files")
    source = (write(tmp_path / "hub/data/train", *tables) if form == "parquet"
              else save_to_disk(tmp_path / "saved", *tables))
    settings = dict(resolution=8, shard_size=4, batch_size=3, mirror=True)
    prepare(folder, tmp_path / "a", **settings)
    prepare(source, tmp_path / "b", **settings)
    (a, ours), (b, theirs) = read_folder(tmp_path / "a"), read_folder(tmp_path / "b")
    assert a | {"source": 0} == b | {"source": 0}
    assert all(ours[kind].tobytes() == theirs[kind].tobytes() for kind in ours)


def test_after_a_stop_and_from_any_row_on_the_rows_are_the_same(tmp_path, monkeypatch):
    source = write(tmp_path / "data/train", *of_pets(tmp_path / "files")[1])
    settings = dict(resolution=8, shard_size=2, batch_size=2)
    prepare(source, tmp_path / "once", **settings)

    def stop(rows, index, read=hub.Rows.read):
        if index == 7:
            raise KeyboardInterrupt
        return read(rows, index)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hub.Rows, "read", stop)
        prepare(source, tmp_path / "stopped", num_workers=1, **settings)
    assert not (tmp_path / "stopped/metadata.json").exists()
    prepare(source, tmp_path / "stopped", **settings)
    assert same_folder(tmp_path / "once", tmp_path / "stopped")
    again, last = open_source(source), open_source(source)  # as two ranks do
    assert [int(last.pixels(i)[0, 0, 0]) for i in (8, 9)] + numbers(again) == [8, 9, *range(len(LABELS))]


def test_of_a_large_row_group_no_more_is_read_than_was_asked_for(tmp_path, monkeypatch):
    """huggingface/dataset-viewer#1771."""
    monkeypatch.setattr(hub, "MAX_IN_MEMORY", 100)
    group = []
    monkeypatch.setattr(hub, "RowGroup", lambda *how, make=hub.RowGroup: group.append(made := make(*how)) or made)
    source = open_source(write(tmp_path / "x.parquet", pets([i % 3 for i in range(200)]), group=200))
    assert source.pixels(3)[0, 0, 0] == 3 and len(group[0].extents) == hub.NUM_ROWS
    assert source.pixels(150)[0, 0, 0] == 150 and len(group[0].extents) < 200
    assert source.pixels(2)[0, 0, 0] == 2 and len(group) == 1  # from the temporary file
    assert group[0].file._rolled
    assert numbers(source) == [*range(200)]


def test_a_full_disk_names_the_folder_of_temporary_files(tmp_path, monkeypatch):
    class Full(io.BytesIO):
        def write(self, content):
            raise OSError(errno.ENOSPC, "No space left on device")

    path = write(tmp_path / "x.parquet", pets([0]))
    monkeypatch.setattr(hub.tempfile, "SpooledTemporaryFile", lambda size: Full())
    with pytest.raises(OSError, match=f"No space left on device: '{hub.tempfile.gettempdir()}'"):
        open_source(path)


def test_grey_of_16_bits_is_looked_for_at_the_start_of_row_groups(tmp_path, monkeypatch):
    source, seen = open_source(write(tmp_path / "x.parquet", pets([0] * 20), group=6)), []
    read = source.listing.read
    monkeypatch.setattr(source.listing, "read", lambda row: seen.append(row) or read(row))
    assert note_dark_images(source) is None and seen == [0, 6, 12, 18]


# Files


def test_a_split_must_be_chosen(tmp_path):
    write(tmp_path / "hub/data/train", pets([0, 1]), pets([2, 0], 2))
    write(tmp_path / "hub/data/test-00000-of-00001.parquet", pets([1]))
    put(tmp_path / "hub", {"README.md": "a card", ".cache/huggingface/data/x.parquet": ""})
    for source in ("hub", "hub/data", "hub/data/*.parquet"):
        refused(lambda source=source: open_source(str(tmp_path / source)), "2 splits or sets (", "test", "train",
                f'source="{tmp_path}/hub/data/train-*-of-00002*.parquet"')
    assert numbers(open_source(str(tmp_path / "hub/data/train-*-of-00002*.parquet"))) == [0, 1, 2, 3]
    assert len(open_source(str(tmp_path / "hub/data/{train,test}-*.parquet"))) == 5
    for name in ("train", "test"):
        save_to_disk(tmp_path / "dict" / name, pets([0, 1]))
        write(tmp_path / "converted/default" / name / "0000.parquet", pets([0, 1]))
    for folder in ("dict", "converted/default"):
        refused(lambda folder=folder: open_source(tmp_path / folder), "2 splits or sets", f'{folder}/train"')
        assert len(open_source(tmp_path / folder / "train")) == 2
    write(tmp_path / "versions/train", pets([0, 1]), pets([2, 0], 2))
    write(tmp_path / "versions/train-00000-of-00001.parquet", pets([0, 1, 2, 0]))
    refused(lambda: open_source(tmp_path / "versions"), "2 splits or sets")


def test_shards_that_are_missing_are_counted(tmp_path):
    write(tmp_path / "train", pets([0, 1]), pets([2, 0], 2), pets([1], 4))
    (tmp_path / "train-00001-of-00003.parquet").unlink()
    assert any("Only 2 of 3 shards are here" in note and "one is number 1" in note
               for note in open_source(tmp_path).notes)
    folder = save_to_disk(tmp_path / "saved", pets([0, 1]), pets([2, 0], 2))
    (folder / "data-10.arrow").unlink()
    refused(lambda: open_source(folder), "lacks 1 of the 2 files that state.json names, such as data-10.arrow")


def test_rows_that_an_old_version_of_datasets_selected_by_another_file_are_refused(tmp_path):
    folder = save_to_disk(tmp_path / "saved", pets([0, 1]))
    state = json.loads((folder / "state.json").read_text()) | {"_indices_data_files": [{"filename": "indices.arrow"}]}
    put(folder, {"state.json": json.dumps(state)})
    refused(lambda: open_source(folder), "selects rows by indices.arrow", "save it again")


def test_files_of_save_to_disk_are_read_in_the_order_of_its_state_and_others_in_that_of_names(tmp_path):
    tables = pets([0, 1]), pets([2, 0], 2)
    assert numbers(open_source(save_to_disk(tmp_path / "saved", *tables))) == [0, 1, 2, 3]  # data-9, data-10
    for number, part in zip((9, 10), tables, strict=True):
        write(tmp_path / "plain" / f"part-{number}.parquet", part)
    assert numbers(open_source(tmp_path / "plain")) == [2, 3, 0, 1]


def test_empty_shards_are_passed_over(tmp_path):
    write(tmp_path / "train", pets([]), pets([0, 2]), pets([]))
    assert numbers(open_source(tmp_path)) == [0, 1]
    refused(lambda: open_source(write(tmp_path / "none/x.parquet", pets([]))), "holds 1 shards without rows")


def test_shards_in_an_archive_or_beside_images_are_refused(tmp_path):
    shard = write(tmp_path / "x/a.parquet", pets([0])).read_bytes()
    refused(lambda: open_source(put_zip(tmp_path / "x.zip", {"a.parquet": shard})), "a.parquet in an archive", "unpack")
    put(tmp_path / "x", {"card.png": png(0)})
    refused(lambda: open_source(tmp_path / "x"), "1 shards such as a.parquet and 1 images such as card.png",
            'x/*.parquet"')
    assert len(open_source(str(tmp_path / "x/*.parquet"))) == 1
    write(tmp_path / "folder/metadata.parquet", table({"file_name": pa.array(["cat/0.png"])}))
    assert len(open_source(put(tmp_path / "folder", {"cat/0.png": png(0), "dog/1.png": png(1)}))) == 2


def test_damaged_shards_and_pointers_to_them_are_named(tmp_path):
    """huggingface/datasets#4077, policy-gradient/GRPO-Zero#1."""
    good = write(tmp_path / "good.parquet", pets([0] * 300), group=300).read_bytes()
    put(tmp_path, {"cut.parquet": good[:-9], "cut.arrow": good[:40], "x.parquet": good[:200] + bytes(400) + good[600:],
                   "pointer.parquet": b"version https://git-lfs.github.com/spec/v1\n"})
    for name, *words in (("cut.parquet", "is not a complete", "download it again"),
                         ("cut.arrow", "is not a complete", "download it again"),
                         ("x.parquet", "is damaged in its column image", "download it again"),
                         ("pointer.parquet", "is a pointer of Git LFS", "pull")):
        refused(lambda name=name: numbers(open_source(tmp_path / name)), name, *words)


def test_shards_of_other_classes_or_columns_are_refused(tmp_path):
    features = {"label": {"names": ["x"], "_type": "ClassLabel"}}
    other = pets([0]).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    write(tmp_path / "train", pets([0]), other)
    refused(lambda: open_source(tmp_path), "train-00001-of-00002.parquet has different columns or classes from train-0")


def test_without_pyarrow_one_line_says_how_to_install_the_version_that_is_required(tmp_path, monkeypatch):
    assert hub.PYARROW in (ROOT / "requirements-train.txt").read_text()
    write(tmp_path / "x.parquet", pets([0]))
    real = builtins.__import__

    def absent(name, *rest):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    refused(lambda: open_source(tmp_path / "x.parquet"), f"pyarrow, which is not installed: pip install {hub.PYARROW}")


def test_links_of_the_hubs_cache_are_followed_to_images_and_not_to_latents(tmp_path):
    """huggingface/huggingface_hub#1240: what is downloaded without --local-dir are links to ../../blobs."""
    prepare(write(tmp_path / "images/x.parquet", pets([0, 1, 2, 1])), tmp_path / "latents", resolution=8,
            autoencoder="identity")
    for place in ("images", "latents"):
        files = [file for file in (tmp_path / place).rglob("*") if file.is_file() and not file.name.startswith(".")]
        for number, file in enumerate(files):
            blob = tmp_path / f"blobs/{place}-{number}"
            blob.parent.mkdir(exist_ok=True)
            file.rename(blob)
            file.symlink_to(blob)
    found = open_source(tmp_path / "images")
    assert found.labels.tolist() == [0, 1, 2, 1] and numbers(found) == [0, 1, 2, 3]
    refused(lambda: open_latents(tmp_path / "latents"), "copy the file there, as hf download --local-dir does")


def test_a_thread_keeps_one_row_group_in_memory_of_all_the_shards_that_it_has_read(tmp_path, monkeypatch):
    groups, make = weakref.WeakSet(), hub.RowGroup
    monkeypatch.setattr(hub, "RowGroup", lambda *how: groups.add(group := make(*how)) or group)
    source = open_source(write(tmp_path / "train", *(pets([0] * 6, 6 * part) for part in range(4))))
    assert numbers(source) == [*range(24)] and len(groups) == 1


# Images


@pytest.mark.parametrize("kind", [IMAGE, pa.binary(), pa.large_binary(), pa.binary_view()], ids=str)
def test_images_are_a_struct_or_plain_bytes(kind, tmp_path):
    made = pets([2, 0, 1], kind=kind)
    for part in (made, made.replace_schema_metadata(None)):
        source = open_source(write(tmp_path / "x.parquet", part))
        assert numbers(source) == [0, 1, 2] and source.labels.tolist() == [2, 0, 1]
    assert numbers(open_source(save_to_disk(tmp_path / "saved", made))) == [0, 1, 2]


def test_of_several_columns_of_images_one_is_chosen(tmp_path):
    both = table({"image": pa.array([image(1)], IMAGE), "mask": pa.array([image(2)], IMAGE),
                  "sound": pa.array([image(3)], IMAGE),
                  "label": pa.array([0])},
                 {"image": {"_type": "Image"}, "mask": {"_type": "Image"}, "sound": {"_type": "Audio"}})
    path = write(tmp_path / "x.parquet", both)
    refused(lambda: open_source(path), "2 image columns (image, mask): choose one, as in image_column=image")
    assert numbers(open_source(path, image_column="mask")) == [2]
    for asked in ("label", "sound", "no"):
        refused(lambda asked=asked: open_source(path, image_column=asked), f"image_column={asked} holds no images: ",
                "image: Image, mask: Image, sound: Audio, label: int64")


TWO = pa.array([image(0), image(1)], IMAGE)
FEATURES = {"image": {"_type": "Image"}, "label": CLASSES}
OF_LISTS = {"_type": "List", "feature": CLASSES}


@pytest.mark.parametrize(("columns", "features", "words"), [
    ({"image": pa.array([[image(1), image(2)]], pa.list_(IMAGE)), "label": [0]},
     {"image": {"_type": "List", "feature": {"_type": "Image"}}},
     "no column with one image per row: its columns are image: list of Image, label: int64"),
    ({"image": [[[0, 1], [2, 3]]], "label": [0]}, None, "its columns are image: list, label: int64"),
    ({"URL": ["https://x.org/1.jpg"], "TEXT": ["a cat"]}, None,  # victorchall/EveryDream#7
     "no column with one image per row: its columns are URL: string, TEXT: string"),
    ({"image": pa.array([{"bytes": None, "path": "/data/cat.jpg"}] * 2, IMAGE)}, None,
     "only paths such as /data/cat.jpg in its column image, not the images: use the folder"),
    ({"image": TWO, "label": [0.5, 1.0]}, {"image": {"_type": "Image"}}, "labels such as 0.5, which is not a class"),
    ({"image": TWO, "label": [[0, 1], [1]]}, FEATURES | {"label": OF_LISTS},
     "has [0, 1] as labels, but an image can have only one class"),
    ({"image": TWO, "label": [-1, -1]}, FEATURES,  # huggingface/datasets#4299
     "no label (-1 or null) for any of 2 rows, as is usual for test splits on the Hub: choose another split"),
    ({"image": TWO, "label": pa.nulls(2)}, FEATURES, "no label (-1 or null) for any of 2 rows"),
])  # fmt: skip
def test_shards_without_one_image_and_one_class_a_row_are_refused(columns, features, words, tmp_path):
    path = write(tmp_path / "x.parquet", table(columns, features))
    refused(lambda: open_source(path), words)
    if "column" not in words:
        assert open_source(path, labels="none").class_names == ["x"]


def test_a_row_without_a_readable_image_is_named_and_left_out(tmp_path, capsys):
    spoilt = [image(0), None, {"bytes": b"no image", "path": "x.png"}, {"bytes": None, "path": "x.png"}, image(4)]
    path = write(tmp_path / "x.parquet", table({"image": pa.array(spoilt, IMAGE), "label": pa.array([0, 1, 1, 0, 1])}))
    nothing = {"huggingface": '{"info": {"features": {}}}'}
    for source in (path, save_to_disk(tmp_path / "saved", pq.read_table(path).replace_schema_metadata(nothing))):
        out = tmp_path / f"out-{source.name}"
        prepare(source, out, resolution=8)
        metadata, arrays = read_folder(out)
        name = source.name if source.suffix else "data-9.arrow"
        assert metadata["unreadable"] == [f"{name} row {row}" for row in (1, 2, 3)]
        assert arrays["labels"].tolist() == [0, 1]
        printed = capsys.readouterr().out
        assert f"{name} row 1: the row has no image" in printed and f"{name} row 2: not an image" in printed


# Labels


def test_labels_are_the_indices_of_the_schemas_class_names(tmp_path):
    source = open_source(write(tmp_path / "x.parquet", pets([2, 0])))
    assert source.class_names == PETS and source.labels.tolist() == [2, 0]
    assert source.notes == ["Images from column image, labels from column label. The columns are image: Image, label: "
                            "ClassLabel of 3.",
                            "column label: 1 of these 3 classes have no image: dog"]
    refused(lambda: open_source(write(tmp_path / "y.parquet", pets([0, 3]))),
            "column label has label 3 (row 1), outside 0..2: choose another label_column")


def test_class_names_may_stand_beside_the_file(tmp_path):
    folder = save_to_disk(tmp_path / "saved", pets([1, 0]))
    with pa.ipc.new_stream(str(folder / "data-9.arrow"), pets([]).replace_schema_metadata(None).schema) as stream:
        stream.write_table(pets([1, 0]).replace_schema_metadata(None))
    assert open_source(folder).class_names == PETS


@pytest.mark.parametrize("metadata", ['{"info": {"features": {"image": []}}}', "[]", "no JSON"])
def test_metadata_of_another_program_is_ignored(metadata, tmp_path):
    shard = pets([2, 0]).replace_schema_metadata({"huggingface": metadata})
    assert open_source(write(tmp_path / "x.parquet", shard)).class_names == ["0", "1", "2"]


TEXT = ["dog", "cat", "dog", None]


@pytest.mark.parametrize(("labels", "names", "expected"), [
    (pa.array(TEXT), ["cat", "dog"], [1, 0, 1]),
    (pa.array(TEXT, pa.large_string()), ["cat", "dog"], [1, 0, 1]),
    (pa.array(TEXT, pa.string_view()), ["cat", "dog"], [1, 0, 1]),
    (pa.array(TEXT).dictionary_encode(), ["cat", "dog"], [1, 0, 1]),
    (pa.array([2, 0, -1, 2], pa.int8()), ["0", "1", "2"], [2, 0, 2]),  # huggingface/datasets#3578
    (pa.array([2.0, 0.0, float("nan"), 2.0]), ["0", "1", "2"], [2, 0, 2]),
    (pa.array([True, False, None, True]), ["False", "True"], [1, 0, 1]),
    (pa.array([[2], [0], [], [2]]), ["0", "1", "2"], [2, 0, 2]),
], ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "")
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_labels_are_numbers_or_text_and_rows_without_one_are_left_out(labels, names, expected, form, tmp_path):
    made = table({"image": pa.array([image(i) for i in range(4)], IMAGE), "label": labels},
                 {"image": {"_type": "Image"}, "label": {"_type": "Value"}})
    source = open_source(write(tmp_path / "x.parquet", made) if form == "parquet"
                         else save_to_disk(tmp_path / "saved", made))
    assert source.class_names == names and source.labels.tolist() == expected
    assert any("column label: 1 of 4 images have no label and are left out" in note for note in source.notes)
    assert [reason for _, reason in source.left_out] == ["has no label in column label"]


def test_of_several_columns_of_labels_one_is_chosen(tmp_path):
    coarse, fine = {"names": ["x", "y"], "_type": "ClassLabel"}, CLASSES
    cifar = table({"img": pa.array([image(0), image(1)], IMAGE), "fine_label": pa.array([2, 1]),
                   "coarse_label": pa.array([0, 1])},
                  {"img": {"_type": "Image"}, "fine_label": fine, "coarse_label": coarse})
    path = write(tmp_path / "x.parquet", cifar)
    assert open_source(path, label_column="coarse_label").class_names == ["x", "y"]
    files = put(tmp_path / "files", {"a/0.png": png(0)})
    for source, settings, *words in (
            (path, {}, "2 label columns (fine_label, coarse_label): choose one, as in label_column=fine_label"),
            (path, {"label_column": "label"}, "label_column=label is not a column of numbers or text: ",
             "fine_label: ClassLabel of 3"),
            (path, {"label_column": "fine_label", "labels": "none"},
             "label_column=fine_label would change nothing: labels=none"),
            (files, {"label_column": "x"}, "label_column=x would change nothing, as source=", "has no parquet")):
        refused(lambda source=source, settings=settings: open_source(source, **settings), *words)


def test_folders_may_stand_for_the_column_of_labels(tmp_path):
    made = table({"image": pa.array([image(i) for i in range(3)], IMAGE),
                  "label": pa.array(["wild cat", "dog", "wild cat"])})
    pq.write_to_dataset(made, tmp_path / "x", partition_cols=["label"])
    pq.write_metadata(made.schema, tmp_path / "x/_common_metadata")  # apache/arrow#38808
    source = open_source(tmp_path / "x")
    assert source.class_names == ["dog", "wild cat"]
    assert classes(source) == {0: "wild cat", 1: "dog", 2: "wild cat"}


def test_captions_are_no_labels_unless_their_column_is_named(tmp_path):
    path = write(tmp_path / "x.parquet",
                 table({"image": pa.array([image(0), image(1)], IMAGE), "text": pa.array(["a cat", "a dog"])}))
    source = open_source(path)
    assert source.class_names == ["x"]
    assert "one class, because no column is named like labels (label_column= selects one)" in source.notes[0]
    assert open_source(path, label_column="text").class_names == ["a cat", "a dog"]


def test_labels_may_come_from_the_names_beside_the_images_or_a_file_of_them(tmp_path):
    made = table({"image": pa.array([image(0, "cat_0.png"), image(1, "dog_1.png")], IMAGE)})
    path = write(tmp_path / "x.parquet", made)
    assert open_source(path, labels="names").class_names == ["cat", "dog"]
    put(tmp_path, {"labels.csv": "file,label\ndog_1.png,hound\ncat_0.png,tabby\n"})
    assert open_source(path, labels=str(tmp_path / "labels.csv")).class_names == ["hound", "tabby"]
    write(path, table({"image": made["image"].combine_chunks().field("bytes")}))
    refused(lambda: open_source(path, labels="names"), "no file names in its column image")


def test_another_column_of_images_is_another_set(tmp_path):
    both = table({"a": pa.array([image(1)] * 2, IMAGE), "b": pa.array([image(2)] * 2, IMAGE)})
    path = write(tmp_path / "x.parquet", both)
    prepare(path, tmp_path / "out", resolution=8, image_column="a")
    refused(lambda: prepare(path, tmp_path / "out", resolution=8, image_column="b"), "image_column was a and is now b")


def test_threads_that_read_one_row_group_at_once_read_the_same(tmp_path):
    source = open_source(write(tmp_path / "x.parquet", pets([0] * 200), group=50))
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(lambda i: int(source.pixels(i)[0, 0, 0]),
                          np.tile(np.arange(200), 3).tolist())] == [*range(200)] * 3


def test_a_shard_that_vanishes_stops_the_run(tmp_path):
    source = open_source(write(tmp_path / "x.parquet", pets([0] * 4)))
    (tmp_path / "x.parquet").unlink()
    refused(lambda: source.pixels(3), "x.parquet is damaged in its column image", "No such file")


def test_scores_take_the_same_shards(tmp_path):
    folder, tables = of_pets(tmp_path / "files")
    write(tmp_path / "hub/train", *tables)
    a, b = (open_images(one_rank(), "images", str(path)) for path in (folder, tmp_path / "hub/train-*.parquet"))
    assert a.record["sha256"] == b.record["sha256"] and a.count == b.count == len(LABELS)
    assert np.array_equal(a.read(a.choose(5)), b.read(b.choose(5)))
    columns = {name: pa.array([image(i) for i in of], IMAGE) for name, of in (("a", (0, 2)), ("b", (1, 254)))}
    both = write(tmp_path / "both.parquet", table(columns))
    refused(lambda: open_images(one_rank(), "images", str(both)), f"images={both} has 2 image columns (a, b): "
            "name what scripts/prepare_latents.py autoencoder=identity makes of one, image_column=a.")
    prepare(both, tmp_path / "b", resolution=8, image_column="b", autoencoder="identity")
    prepared = open_images(one_rank(), "images", str(tmp_path / "b"))
    assert np.array_equal(prepared.read(np.arange(2))[:, 0, 0, 0], (1, 254))
    none = write(tmp_path / "none/x.parquet", pets([]))
    refused(lambda: open_images(one_rank(), "reference", str(none)), f"reference={none} holds 1 shards without rows")
