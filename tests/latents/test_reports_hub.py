"""Situations from public reports, Hugging Face's and ImageNet's files: the source, the situation, what comes out."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_hub import IMAGE, PETS, image, numbers, pets, save_to_disk, table, write
from test_ilsvrc import DEVKIT, IDS, VAL, devkit
from test_labels import put
from test_prepare_latents import prepare

from latents import hub, ilsvrc
from latents.folder import open_latents
from latents.images import open_source

VALUES = {"image": {"_type": "Image"}, "label": {"dtype": "int64", "_type": "Value"}}
IMAGES = pa.array([image(i) for i in range(4)], IMAGE)


def numbers_without_names(root: Path) -> Path:
    return write(root / "x.parquet", table({"image": IMAGES, "label": pa.array([1, 0, 1, 0])}, VALUES))


def large_row_groups(root: Path) -> Path:
    return write(root / "x.parquet", pets([0, 1, 2, 1] * 250), group=1000)


def pointer(root: Path) -> Path:
    return put(root,
               {"data/train-00000-of-00001.parquet": "version https://git-lfs.github.com/spec/v1\noid sha256:66\n"})


def cut_upload(root: Path) -> Path:
    content = write(root / "x.parquet", pets([0, 1, 2, 1])).read_bytes()
    return put(root, {"x.parquet": content[: len(content) // 2]}) / "x.parquet"


def unlabelled_split(root: Path) -> Path:
    write(root / "data/train-00000-of-00001.parquet", pets([0, 1]))
    return write(root / "data/test-00000-of-00001.parquet", pets([-1, -1]))





def saved(root: Path) -> Path:
    return save_to_disk(root / "saved", pets([0, 1, 2, 1]))


def addresses(root: Path) -> Path:
    links = pa.array(["https://x.org/1.jpg"])
    pq.write_table(pa.table({"URL": links, "TEXT": links}), root / "part-00051-9230b837-c000.snappy.parquet")
    return root


def written_by_pyarrow(root: Path) -> Path:
    pq.write_to_dataset(pets([0, 1, 2, 1]), root / "x.pq", basename_template="part-{i}.parquet")
    pq.write_metadata(pets([]).schema, root / "x.pq/_common_metadata")
    return root / "x.pq"


def flat_validation(root: Path) -> Path:
    return put(root / "val", VAL)


def listed_validation(root: Path) -> Path:
    rows = "".join(f"ILSVRC2012_val_{i:08d},{IDS[label]}\n" for i, label in enumerate((2, 0, 1, 2), 1))
    put(root, {"labels.csv": f"ImageId,Class\n{rows}"})
    return flat_validation(root)


def ground_truth_alone(root: Path) -> Path:
    put(root, {ilsvrc.TRUTH: devkit()[f"{DEVKIT}/{ilsvrc.TRUTH}"]})
    return flat_validation(root)


# The report; what was brought; labels= relative to it; the labels and classes that come out, or words of what is said.
REPORTS = [
    ("huggingface/datasets#3578", numbers_without_names, None, ([1, 0, 1, 0], ["0", "1"])),
    ("huggingface/dataset-viewer#1771", large_row_groups, None, ([0, 1, 2, 1] * 250, PETS)),
    ("policy-gradient/GRPO-Zero#1", pointer, None,
     "train-00000-of-00001.parquet is a pointer of Git LFS.*git lfs pull"),
    ("huggingface/datasets#4077", cut_upload, None, "x.parquet is not a complete parquet file.*download it again"),
    ("huggingface/datasets#4299", unlabelled_split, None,
     "no label .* for any of 2 rows, as the Hub's test splits have"),
    ("huggingface/diffusers#10913", saved, None, ([0, 1, 2, 1], PETS)),
    ("victorchall/EveryDream#7", addresses, None,
     "no column with one image a row: its columns are URL: string, TEXT: string"),
    ("apache/arrow#38808", written_by_pyarrow, None, ([0, 1, 2, 1], PETS)),
    ("facebookresearch/FixRes#32", flat_validation, None, ([0] * 4, ["val"])),
    ("huggingface/pytorch-image-models#1081", listed_validation, "labels.csv", ([2, 0, 1, 2], IDS)),
    ("open-mmlab/mmpretrain#11", ground_truth_alone, ilsvrc.TRUTH,
     "counts classes in the devkit's own order, .*meta.mat"),
]


@pytest.mark.parametrize(("report", "bring", "labels", "expected"), REPORTS, ids=[report for report, *_ in REPORTS])
def test_what_people_report_is_read_or_refused_in_a_line(report, bring, labels, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "IN_MEMORY", 1000)
    settings = {"labels": str(tmp_path / labels)} if labels else {}
    source = bring(tmp_path)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            open_source(source, **settings)
        return
    found = open_source(source, **settings)
    assert (found.labels.tolist(), found.class_names) == expected
    assert numbers(found) == [min(i, 255) for i in range(len(found))]
    if report.startswith("facebookresearch/FixRes"):
        assert "labels=ILSVRC2012_devkit_t12.tar.gz" in found.notes[0]


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
    with pytest.raises(ValueError, match="copy the file there, as hf download --local-dir does"):
        open_latents(tmp_path / "latents")
