"""Preparing latents: a killed run, two ranks and another container of the same images end in the same bytes."""

import errno
import fcntl
import filecmp
import hashlib
import json
import os
import runpy
import tracemalloc
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import forked
import numpy as np
import pytest
import torch
from conftest import ROOT, save_vae
from filelock import FileLock
from spoils import refused, without_hashes
from test_images import noise
from test_labels import encoded

from latents import writer
from latents.folder import open_latents
from latents.images import ImageSource
from runtime.files import record_sha256, sha256
from scripts import prepare_latents as script
from weights import autoencoders

POOLED = "python:own_code.pooled"


def prepare(source, out, resolution=32, autoencoder="identity", shapes=None, **settings) -> None:
    settings |= {f"shapes.{key}": value for key, value in (shapes or {}).items()}
    script.main(source=str(source), out=str(out), resolution=resolution, autoencoder=autoencoder, **settings)


@pytest.fixture
def pets(tmp_path) -> Path:
    """A folder of 10 images 32x32 in three classes; image k of the sorted list is noise(32, 32, k)."""
    for k, name in enumerate(["cat"] * 4 + ["dog"] * 3 + ["emu"] * 3):
        (tmp_path / "pets" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "pets" / name / f"{k}.png").write_bytes(encoded(noise(32, 32, k)))
    return tmp_path / "pets"


@pytest.fixture(scope="module")
def vae_folder(tmp_path_factory) -> str:
    return str(save_vae(tmp_path_factory.mktemp("vae"), levels=4))


def read_folder(out: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """The metadata and the shards put together."""
    metadata = json.loads((out / "metadata.json").read_text())
    kinds = [kind for kind in ("latents", "labels", "mirrored") if kind in metadata["shards"][0]]
    arrays = {kind: [np.load(out / shard[kind]) for shard in metadata["shards"]] for kind in kinds}
    for shard, *parts in zip(metadata["shards"], *arrays.values(), strict=True):
        assert all(len(part) == shard["count"] for part in parts)
    return metadata, {kind: np.concatenate(parts) for kind, parts in arrays.items()}


def same_folder(a: Path, b: Path) -> bool:
    """Whether two folders hold the same files with the same bytes."""
    names = sorted(os.listdir(a))
    return names == sorted(os.listdir(b)) and filecmp.cmpfiles(a, b, names, shallow=False)[0] == names


# ---- what is written ------------------------------------------------------------------------------------------------


def test_pixels_go_in_and_come_back(pets, tmp_path):
    prepare(pets, tmp_path / "out", shard_size=4, batch_size=3)
    metadata, arrays = read_folder(tmp_path / "out")
    rows = [name.encode() + row.tobytes() for name, part in arrays.items() for row in part]
    content = sum(int(hashlib.sha256(row).hexdigest(), 16) for row in rows) % 2**256
    files = [f"{kind}-0000{i}.npy" for kind in ("latents", "labels") for i in range(3)]
    assert sorted(os.listdir(tmp_path / "out")) == sorted([".lock", "metadata.json", "preparing.json", *files])
    assert metadata == {
        "format": 1, "count": 10, "shape": [3, 32, 32], "dtype": "float16", "kind": "sample", "mirrored": False,
        "num_classes": 3, "class_names": ["cat", "dog", "emu"], "autoencoder": "identity", "scale": 1.0,
        "shift": 0.0, "resolution": 32, "source": str(pets), "unreadable": [],
        "precision": "fp32", "tf32": False, "device": "cpu", "content": f"{content:064x}",
        "content_of": record_sha256({"shards": [shard["sha256"] for shard in metadata["shards"]]}),
        "shards": [{"latents": f"latents-0000{i}.npy", "labels": f"labels-0000{i}.npy", "count": n, "sha256": {
            name: sha256(tmp_path / "out" / name) for name in (f"latents-0000{i}.npy", f"labels-0000{i}.npy")}}
                   for i, n in enumerate((4, 4, 2))],
    }  # fmt: skip
    assert arrays["labels"].tolist() == [0] * 4 + [1] * 3 + [2] * 3 and arrays["labels"].dtype == np.dtype("<i8")
    assert arrays["latents"].dtype == np.dtype("<f2")
    images = autoencoders.load_autoencoder("identity").decode(torch.from_numpy(arrays["latents"]))
    assert np.array_equal(images, np.stack([noise(32, 32, k) for k in range(10)]))
    prepare(pets, tmp_path / "other", shard_size=7)     # is the same data set for a run
    (pets / "cat/0.png").write_bytes(encoded(noise(32, 32, 99)))
    prepare(pets, tmp_path / "changed", shard_size=4)
    one, same, other = (open_latents(tmp_path / name).fingerprint for name in ("out", "other", "changed"))
    without_hashes(tmp_path / "other")      # as where somebody changes a latent on purpose
    assert one == same != other and one != open_latents(tmp_path / "other").fingerprint


def test_a_vae_stores_moments_and_the_encoding_of_the_mirror_image(pets, vae_folder, tmp_path):
    prepare(pets, tmp_path / "out", autoencoder=vae_folder, mirror=True, batch_size=10)
    metadata, arrays = read_folder(tmp_path / "out")
    assert metadata["shape"] == [4, 4, 4] and metadata["kind"] == "moments" and metadata["mirrored"]
    assert (metadata["scale"], metadata["shift"], metadata["autoencoder"]) == (0.18215, 0.0, vae_folder)
    images = torch.from_numpy(np.stack([noise(32, 32, k) for k in range(10)]))
    vae = autoencoders.load_autoencoder(vae_folder)
    for kind, side in (("latents", images), ("mirrored", images.flip(2))):
        assert arrays[kind].shape == (10, 8, 4, 4)
        expected = torch.cat(vae.encode(side), dim=1)
        torch.testing.assert_close(torch.from_numpy(arrays[kind]).float(), expected, atol=1e-3, rtol=1e-3)
    assert not np.allclose(arrays["latents"][..., ::-1], arrays["mirrored"], atol=1e-2)  # not the flipped latent
    os.utime(Path(vae_folder) / "config.json")  # as if other weights had been put there
    refused(lambda: prepare(pets, tmp_path / "out", autoencoder=vae_folder, mirror=True), "autoencoder's or")


def test_a_teachers_tokens_are_those_of_the_image_and_of_its_mirror_image(pets, tmp_path):
    prepare(pets, tmp_path / "out", shard_size=4, batch_size=3, mirror=True, teacher=POOLED, patch_size=8)
    latents = open_latents(tmp_path / "out")
    indices, images = np.arange(10), np.stack([noise(32, 32, k) for k in range(10)])
    for mirror in (False, True):
        seen = images[:, :, ::-1] if mirror else images
        rows = latents.rows_of(["teacher"], indices, np.full(10, mirror))
        means = seen.reshape(10, 4, 8, 4, 8, 3).mean(axis=(2, 4)).reshape(10, 16, 3)
        np.testing.assert_allclose(rows["teacher"], means, atol=0.07)  # float16 of up to 255
    again = partial(prepare, pets, tmp_path / "out", shard_size=4, mirror=True)
    refused(again, f"teacher was {POOLED} and is now None")
    refused(lambda: again(teacher=POOLED, patch_size=4), "patch_size was 8 and is now 4")


def test_unreadable_files_are_counted_listed_and_left_out(pets, tmp_path, capsys):
    whole = (pets / "dog" / "4.png").read_bytes()
    (pets / "dog" / "4.png").write_bytes(whole[:300])
    for k in range(4):  # the whole first shard
        (pets / "cat" / f"{k}.png").write_bytes(b"no image")
    (pets / "cat" / "notes.txt").write_text("hello")
    prepare(pets, tmp_path / "out", shard_size=4, batch_size=2)
    metadata, arrays = read_folder(tmp_path / "out")
    assert metadata["unreadable"] == [*(f"cat/{k}.png" for k in range(4)), "dog/4.png"]
    assert metadata["count"] == 5 and [shard["count"] for shard in metadata["shards"]] == [3, 2]
    assert arrays["labels"].tolist() == [1, 1, 2, 2, 2] and metadata["num_classes"] == 3
    printed = capsys.readouterr().out
    assert "5 images are not 8-bit RGB and are left out" in printed
    assert "cat/0.png: not an image of a known kind" in printed
    assert "10 images, classes: 3 (cat, dog, emu), other files: 1 (cat/notes.txt)" in printed


def test_the_example_of_a_writer_writes_a_folder_that_training_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "write_latents.py"))
    latents = open_latents(tmp_path / "my-latents")
    assert latents.count == 100 and latents.shape == (4, 32, 32) and latents.num_classes == 10


# ---- what is noticed first ------------------------------------------------------------------------------------------


def test_what_cannot_work_is_refused_before_anything_is_written(pets, vae_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10_000))
    for settings, words in (
            ({"resolution": 30, "autoencoder": vae_folder}, "resolution=30 is not divisible by 8"),
            ({}, "needs 0.0615 MB more, but its disk has 0.01 MB free: choose another disk with out="),
            ({"teacher": POOLED, "patch_size": 8}, "needs 0.0625 MB more"),  # of 10 images, 16 · 3 numbers each
            ({"teacher": POOLED, "patch_size": 4}, "makes 16 tokens per image, but the network's grid has 8 × 8"),
            ({"teacher": POOLED, "patch_size": 5}, "patch_size=5 does not divide")):
        refused(lambda settings=settings: prepare(pets, tmp_path / "out", **settings), words)
    assert not (tmp_path / "out").exists()


def test_a_vae_that_overflows_float16_is_not_stored(pets, vae_folder, tmp_path, monkeypatch):
    encode = autoencoders.DiffusersAutoencoder.encode
    monkeypatch.setattr(autoencoders.DiffusersAutoencoder, "encode",
                        lambda self, images: [moments * 1e9 for moments in encode(self, images)])
    refused(lambda: prepare(pets, tmp_path / "out", autoencoder=vae_folder), "latents of images 0 to 9 are not finite")
    assert sorted(os.listdir(tmp_path / "out")) == [".lock", "preparing.json"]


def test_another_scale_beside_a_file_of_weights_is_refused_on_resuming(pets, vae_folder, tmp_path, monkeypatch):
    file, load = tmp_path / "vae.safetensors", autoencoders.load_autoencoder
    monkeypatch.setattr(autoencoders, "load_autoencoder", lambda name, *options: load(vae_folder, *options))
    file.touch()
    (tmp_path / "config.json").write_text('{"scaling_factor": 0.18215}')
    prepare(pets, tmp_path / "out", autoencoder=file)
    (tmp_path / "config.json").write_text('{"scaling_factor": 0.13025}')
    refused(lambda: prepare(pets, tmp_path / "out", autoencoder=file), "times of the autoencoder's")


def test_a_finished_folder_is_left_alone_and_other_settings_are_refused(pets, tmp_path, capsys):
    prepare(pets, tmp_path / "out", shard_size=4)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    prepare(pets, tmp_path / "out", shard_size=4)
    assert "already complete" in capsys.readouterr().out
    refused(lambda: prepare(pets, tmp_path / "out", resolution=16, shard_size=4), "resolution was 32 and is now 16")
    (pets / "emu/9.png").write_bytes(encoded(noise(32, 32, 99)))
    refused(lambda: prepare(pets, tmp_path / "out", shard_size=4), "sizes or times of the source's files differ")
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


# ---- kills, ranks, two processes ------------------------------------------------------------------------------------


def test_a_preparation_that_was_stopped_ends_in_the_same_bytes(pets, tmp_path, monkeypatch):
    def stop(self, index, resolution, pixels=ImageSource.pixels):
        if index == 7:
            raise KeyboardInterrupt
        return pixels(self, index, resolution)

    settings = {"shard_size": 2, "batch_size": 2, "num_workers": 1}
    prepare(pets, tmp_path / "once", **settings)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ImageSource, "pixels", stop)
        prepare(pets, tmp_path / "stopped", **settings)
    assert not (tmp_path / "stopped/metadata.json").exists() and list((tmp_path / "stopped").glob("record-*"))
    (tmp_path / "stopped/latents-00000.npy").write_bytes(b"half")  # is written again
    with monkeypatch.context() as patch:  # as if another machine had written one to its own disk
        patch.setattr(writer, "write_shard", lambda *args: None)
        refused(lambda: prepare(pets, tmp_path / "stopped", **settings), "*.json here and rerun on this machine")
    prepare(pets, tmp_path / "stopped", **settings)
    assert same_folder(tmp_path / "once", tmp_path / "stopped")


def test_a_second_process_is_refused_and_a_file_system_without_locks_is_named(pets, tmp_path, monkeypatch, capsys):
    (tmp_path / "out").mkdir()
    lock = FileLock(tmp_path / "out" / ".lock")  # stands for another process, to which lock_folder refuses it
    lock.acquire(timeout=0)
    refused(lambda: prepare(pets, tmp_path / "out"), "Another process is writing out=")
    assert os.listdir(tmp_path / "out") == [".lock"]
    lock.release()
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    prepare(pets, tmp_path / "out")
    assert "cannot be locked ([Errno 37] No locks available)" in capsys.readouterr().out
    assert (tmp_path / "out" / "metadata.json").is_file()


def test_two_ranks_write_what_one_writes(pets, vae_folder, tmp_path):
    overrides = f"source={pets} resolution=32 autoencoder={vae_folder} shard_size=3 mirror=true".split()
    overrides += [f"teacher={POOLED}", "patch_size=1"]
    one, two = (forked.run("scripts/prepare_latents.py", *overrides, f"out={tmp_path / name}", ranks=ranks)
                for name, ranks in (("one", 1), ("two", 2)))
    assert one.returncode == 0 and two.returncode == 0, one.stderr + two.stderr
    assert two.stdout.count("next: python train.py experiment=small_cpu data.path=") == 1
    assert same_folder(tmp_path / "one", tmp_path / "two")


def test_memory_does_not_grow_with_the_data_set(tmp_path):
    peaks = []
    for count in (200, 1200):  # a thousand images more: 12 MB of pixels, and 25 MB of latents
        tracemalloc.start()
        prepare("shapes", tmp_path / str(count), resolution=64, shapes={"count": count}, shard_size=10**6,
                batch_size=16, num_workers=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 2e6
