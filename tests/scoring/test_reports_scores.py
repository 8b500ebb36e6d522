"""Situations from public reports, scores: the source, the situation, what comes out."""

import zipfile
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from conftest import run_command
from PIL import Image
from test_fid import command, shapes, write_folder
from training_runs import write_run

import fid
from scoring.features import EXTRACTORS


def saved(path, *arrays, **named):
    np.savez(path, *arrays, **named)
    return path


def pictures(path, images, suffixes=(".png",), mode="RGB"):
    """Writes a folder of images, with each suffix in turn."""
    path.mkdir()
    for i, image in enumerate(images):
        suffix = suffixes[i % len(suffixes)]
        Image.fromarray(np.array(image)).convert(mode).save(path / f"{i:04d}{suffix}", format=suffix[1:])
    return path


PIXELS = EXTRACTORS["pixels"](None, None, "cpu")


def expected_distance(one, two):
    """The distance of pixels, by numpy."""
    return fid.frechet_distance(*(value for images in (one, two)
                                  for x in [PIXELS.compute(images)["pool"].double().numpy()]
                                  for value in (x.mean(0), np.cov(x.T))))


REAL, OTHER = shapes(60), shapes(37, seed=3)
BITS = torch.arange(30, dtype=torch.uint8).view(30, 1, 1, 1) % 2
EXACT = pytest.approx(expected_distance(OTHER, REAL), rel=1e-6)
GREY = torch.from_numpy(np.stack([np.array(Image.fromarray(image.numpy()).convert("L").convert("RGB"))
                                  for image in OTHER]))

# Where it was reported, what people do, the settings, and the metrics, or the line of the error.
REPORTS = [
    ("openai/guided-diffusion#168", "a batch against itself",
     lambda at: dict(images=saved(at / "a.npz", REAL), reference=saved(at / "b.npz", REAL)),
     {"fd_pixels": pytest.approx(0, abs=1e-6), "precision": 1, "recall": 1}),
    ("clovaai/generative-evaluation-prdc#7, photosynthesis-team/piq#285", "all features of both sets are equal",
     lambda at: dict(images=saved(at / "a.npz", REAL[:1].repeat(9, 1, 1, 1)),
                     reference=saved(at / "b.npz", REAL[:1].repeat(7, 1, 1, 1))),
     {"fd_pixels": pytest.approx(0, abs=1e-6), "precision": 1, "recall": 1}),
    ("GaParmar/clean-fid#61, toshas/torch-fidelity#54", "copies of one image, whose covariance is 0, against others",
     lambda at: dict(images=pictures(at / "a", REAL[:1].repeat(9, 1, 1, 1)), reference=saved(at / "b.npz", REAL),
                     metrics=["fd_pixels"]),
     {"fd_pixels": pytest.approx(expected_distance(REAL[:1].repeat(9, 1, 1, 1), REAL), rel=1e-6)}),
    ("toshas/torch-fidelity#58", "a collapsed model: precision is its quality, recall its variety, and not the reverse",
     lambda at: dict(images=saved(at / "a.npz", REAL[:1].repeat(30, 1, 1, 1) ^ BITS),
                     reference=saved(at / "b.npz", REAL), metrics=["precision", "recall"]),
     {"precision": 1, "recall": pytest.approx(0, abs=0.04)}),
    ("GaParmar/clean-fid#37, #68", "suffixes in capitals are neither left out nor counted twice",
     lambda at: dict(images=pictures(at / "a", OTHER, (".png", ".PNG", ".BMP")), reference=saved(at / "b.npz", REAL)),
     {"fd_pixels": EXACT, "images": 37}),
    ("mseitzer/pytorch-fid#35", "grey files are the same images as with three equal channels",
     lambda at: dict(images=pictures(at / "a", OTHER, mode="L"), reference=saved(at / "b.npz", GREY),
                     metrics=["fd_pixels"]),
     {"fd_pixels": pytest.approx(0, abs=1e-6)}),
    ("GaParmar/clean-fid#32, ermongroup/ddim#32", "a number of images that is no multiple of the batch size",
     lambda at: dict(images=saved(at / "a.npz", OTHER), reference=saved(at / "b.npz", REAL), batch_size=36),
     {"fd_pixels": EXACT, "images": 37}),
    ("mseitzer/pytorch-fid#42", "a batch size above the number of images",
     lambda at: dict(images=saved(at / "a.npz", OTHER), reference=saved(at / "b.npz", REAL), batch_size=500),
     {"fd_pixels": EXACT, "images": 37}),
    ("openai/guided-diffusion, image_sample.py", "labels beside the images, as arr_1",
     lambda at: dict(images=saved(at / "a.npz", OTHER, np.arange(37)),
                     reference=saved(at / "b.npz", REAL, np.arange(60))), {"fd_pixels": EXACT}),
    ("openai/improved-diffusion#106", "images as floats in [0, 1]",
     lambda at: dict(images=saved(at / "a.npz", OTHER.float() / 255), reference=saved(at / "b.npz", REAL)),
     r"a.npz holds an array of float32 \(37, 16, 16, 3\); images are uint8"),
    ("mseitzer/pytorch-fid, --save-stats", "statistics in the place of images",
     lambda at: dict(images=saved(at / "a.npz", mu=np.zeros(192), sigma=np.eye(192)),
                     reference=saved(at / "b.npz", REAL)),
     r"a.npz holds mu.npy, sigma.npy, but no images: they are uint8 \(N, H, W, 3\) under arr_0"),
    ("bioinf-jku/TTUR#13, baofff/U-ViT#29", "statistics of images of another resolution",
     lambda at: dict(images=saved(at / "a.npz", OTHER),
                     reference=saved(at / "b.npz", mu=np.zeros(192), sigma=np.eye(192), size=[32, 32])),
     "b.npz is of 32x32 images, but the images are 16x16: name a reference of that size"),
    ("the same, in the form of pytorch-fid and EDM", "statistics that do not record a size",
     lambda at: dict(images=saved(at / "a.npz", OTHER), reference=saved(at / "b.npz", mu=np.zeros(192),
                                                                        sigma=np.eye(192))),
     "b.npz does not record the size of its images: give reference_size="),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "expected"), [row[2:] for row in REPORTS],
                         ids=[f"{source}: {what}" for source, what, *_ in REPORTS])
def test_what_people_reported_is_right_or_refused(settings, expected, tmp_path):
    is_error = isinstance(expected, str)
    with pytest.raises(SystemExit, match=expected) if is_error else nullcontext():
        row = command(tmp_path, **settings(tmp_path))
    if not is_error:
        values = row["metrics"] | {"images": row["images"]}
        assert {name: values[name] for name in expected} == expected


def test_copies_among_files_are_counted_in_a_line(tmp_path, capsys):
    folder = write_folder(tmp_path / "folder", OTHER[torch.arange(37) % 30])
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for file in folder.glob("*.png"):
            archive.write(file, file.name)
    for name in ("folder", "images.zip"):
        command(tmp_path, images=tmp_path / name, reference=saved(tmp_path / "b.npz", REAL))
        assert f"{name}: 7 of 37 files are copies of others, as if seeds were used twice." in capsys.readouterr().out


def test_a_line_says_that_fewer_images_than_classes_lack_some(tmp_path, capsys):
    """facebookresearch/DiT#16: which classes are the images of? A quick score of 500 images has half of ImageNet's."""
    network = {"input_size": 16, "patch_size": 8, "in_channels": 3, "hidden_size": 8, "depth": 1, "num_heads": 2,
               "num_classes": 6}
    run = write_run(tmp_path / "run", network)
    for count in (4, 6):
        run_command(fid.main, "fid.py", checkpoint=run, reference=saved(tmp_path / "b.npz", REAL), features="pixels",
                    metrics=["fd_pixels"], num_samples=count, num_steps=1, cpu=True)
        assert ("num_samples=4 covers only 4 of 6 classes" in capsys.readouterr().out) == (count == 4)
