"""Thirty reports of others' projects, tried here: what each situation gives, as a row; how it was judged, after it.

`right` was so before; `mended` was wrong, with its kind, when it was tried first.
"""

import io
import json
import shlex
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from test_images import bmp_of_32_bits, decoded
from test_labels import (
    BY_CSV,
    BY_DATASET,
    EDM,
    FLAT,
    HEAD,
    PAIRS,
    ROWS,
    dataset,
    encoded,
    judge,
    numbered,
    parquet,
    png,
    table,
)

from latents.decoding import UnreadableImage
from runtime.command import compose
from runtime.schema import typed
from sample import SampleSettings


def tar(files: dict[str, bytes]) -> bytes:
    with tarfile.open(fileobj=(stream := io.BytesIO()), mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def label(word: str) -> dict:
    return FLAT | {"x.csv": table(HEAD, "{0},{1}", [(ROWS[0][0], word), *ROWS[1:]])}


PATHS = pa.array([{"bytes": None, "path": "/data/0.png"}], pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
HUB = json.dumps({"info": {"features": {"label": {"names": ["n01", "n02"], "_type": "ClassLabel"}}}})
OF_HUB = io.BytesIO()
pq.write_table(pa.table({"image": [png(0)], "label": [10985]}).replace_schema_metadata({"huggingface": HUB}),
                       OF_HUB)

# A report; files, source, settings and what is expected, as in test_labels.py; how it was judged.
SOURCES = {
    "pytorch/vision#714: folders 1 to 100": (numbered("2/a.png", "10/b.png", "1/c.png"), "", {}, "2 10 1", "right"),
    "modestyachts/ImageNetV2#10: folders 0 to 999": (numbered("100/a.png", "2/b.png"), "", {}, "100 2", "right"),
    "pytorch/vision#2831: .ipynb_checkpoints as a class": (
        numbered("a/0.png", "b/1.png") | {".ipynb_checkpoints/0.png": png(0)}, "", {}, "a b", "right"),
    "bghira/SimpleTuner#94: .ipynb_checkpoints in a class": (
        numbered("a/0.png", "b/1.png") | {"a/.ipynb_checkpoints/0.png": png(0)}, "", {}, "a b", "right"),
    "pytorch/vision#79: .DS_Store": (numbered("a/0.png", "b/1.png") | {".DS_Store": b"x"}, "", {}, "a b", "right"),
    "replicate/lora-training#9: IMG_6003.JPG": (numbered("a/IMG_1.JPG", "b/IMG_2.PNG"), "", {}, "a b", "right"),
    "FlyMyAI/flymyai-lora-trainer#72: .jpeg and .webp": (numbered("a/0.jpeg", "b/1.webp"), "", {}, "a b", "right"),
    "webdataset/webdataset#237: dots in names": (
        {"0.tar": {"Track 2.0.png": png(0), "Track 2.0.cls": b"1", "Track 2.1.png": png(1), "Track 2.1.cls": b"0"}},
        "0.tar", {}, "1 0", "right"),
    "webdataset/webdataset#20: two images in a sample": (
        {"0.tar": {"0.left.png": png(0), "0.right.png": png(1), "0.cls": b"cat", "1.png": png(2), "1.cls": b"dog"}},
        "0.tar", {}, "cat cat dog", "mended: the key ends at the first dot"),
    "webdataset/webdataset#140: files of a sample apart": (
        {"0.tar": {"0.png": png(0), "1.png": png(1), "1.cls": b"1", "0.cls": b"0"}}, "0.tar", {}, "0 1", "right"),
    "libarchive/libarchive#457: tars joined by cat": (
        {"0.tar": tar(numbered("a/0.png")) + tar(numbered("b/1.png"))}, "0.tar", {},
        ["is several tars, one after another: unpack it by tar --ignore-zeros -xf"], "mended: only the first was read"),
    "huggingface/datasets#4987: parquet of paths": ({"x.parquet": parquet(image=PATHS, label=[0])}, "x.parquet", {},
                                                    ["the paths of its images alone"], "mended: found after preparing"),
    "activeloopai/deeplake#1699: Tiny-ImageNet's label 10985 of 200": (
        {"x.parquet": OF_HUB.getvalue()}, "x.parquet", {}, ["label 10985 (row 0), outside 0..1"], "right"),
    "NVlabs/stylegan3#90: no labels in dataset.json": (
        EDM | dataset(None), "", BY_DATASET, "all all all all all all", "right"),
    "JulianPinzaru/stylegan2-ada-pytorch-multiclass-labels#2: backslashes": (
        EDM | dataset([[name.replace("/", "\\"), number] for name, number in PAIRS]), "", BY_DATASET,
        ["are paths with / and suffix"], "mended: no word of them"),
    **{f"{report}: {word!r} as a label": (label(word), "", BY_CSV, ["no class for 1 of the 6"], "mended: a class")
       for report, word in {"pandas-dev/pandas#10647": "NA", "chanzuckerberg/cellxgene#1115": "nan",
                            "pandas-dev/pandas#16078": "n/a", "OpenNHM/AvaFrame#944": "null"}.items()},
}


@pytest.mark.parametrize("report", SOURCES)
def test_a_reported_source_has_the_right_classes_or_one_line(report, tmp_path):
    judge(tmp_path, *SOURCES[report][:4])


NIR = Image.fromarray(np.full((4, 4, 4), (200, 100, 50, 90), np.uint8), "RGBA")
PIXELS = {  # a report, a file, a colour or the words of the refusal; how it was judged
    "python-pillow/Pillow#3011: grey of 16 bits": (
        encoded(np.full((4, 4), 4095, np.uint16)), "more than 8 bits a value", "right"),
    "python-pillow/Pillow#1108: a TIFF of 16 bits": (
        encoded(np.full((4, 4), 4095, np.uint16), "tiff"), "more than 8 bits a value", "right"),
    "wkentaro/labelme#1949: near infrared tagged as alpha": (encoded(NIR, "tiff"), "may be another band",
                                                             "mended: laid over white"),
    "pytorch/vision#5510: alpha over white": (encoded(NIR), [236, 200, 183], "right"),
    "a BMP whose alpha is 0": (bmp_of_32_bits(), "transparent throughout", "mended: white"),
    "pytorch/vision#138: 54 bytes too few": (encoded(Image.new("RGB", (64, 64)), "jpeg")[:-54], "truncated", "right"),
}


@pytest.mark.parametrize("report", PIXELS)
def test_a_reported_image_has_the_right_colour_or_is_left_out(report):
    content, expected, _ = PIXELS[report]
    if isinstance(expected, str):
        with pytest.raises(UnreadableImage, match=expected):
            decoded(content)
    else:
        assert np.abs(decoded(content)[0, 0].astype(int) - expected).max() <= 1


# Reports of hydra-ecosystem/hydra and of commands that use it, all mended: what an error prints for them is typed.
WORDS = {1843: "a|b", 2891: "李明", 962: "pattern_%r.bin@x", 2705: "#", 1600: "x\\",
         "NVIDIA/cloudai#557": "mlx5_0:1,mlx5_3:1", "IDEA-Research/detrex#309": "2023-09-16"}


@pytest.mark.parametrize("report", WORDS)
def test_a_reported_word_is_printed_as_a_shell_and_hydra_read_it(report):
    for value in (WORDS[report], [WORDS[report], "x"]):
        [word] = shlex.split(typed("classes", value))
        assert compose("sample", SampleSettings, [word])["classes"] == value


def test_there_are_thirty():
    assert len({*SOURCES, *PIXELS, *WORDS}) >= 30
