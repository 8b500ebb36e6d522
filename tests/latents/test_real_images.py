"""CIFAR-10 and Imagenette through prepare_latents; skipped where the real data is absent."""

import io
import json
import zipfile

import numpy as np
import torch
from conftest import save_vae
from PIL import Image
from test_prepare_latents import prepare

from latents.images import open_source
from weights import autoencoders


def test_cifar10_goes_through_the_identity_unchanged(real_data, tmp_path):
    path = real_data / "cifar10-test.zip"
    prepare(path / "test", tmp_path, resolution=32, autoencoder="identity", num_workers=2)
    metadata = json.loads((tmp_path / "metadata.json").read_text())
    assert metadata["count"] == 10_000 and metadata["unreadable"] == [] and metadata["shape"] == [3, 32, 32]
    assert metadata["class_names"] == ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship",
                                       "truck"]
    labels = np.concatenate([np.load(tmp_path / shard["labels"]) for shard in metadata["shards"]])
    assert np.bincount(labels).tolist() == [1000] * 10

    latents = np.load(tmp_path / "latents-00000.npy")[:50]
    images = autoencoders.load_autoencoder("identity").decode(torch.from_numpy(latents)).numpy()
    with zipfile.ZipFile(path) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".jpg"))[:50]
        expected = np.stack([np.array(Image.open(io.BytesIO(archive.read(name))).convert("RGB")) for name in names])
    assert np.array_equal(images, expected)


def test_imagenette_goes_through_a_local_autoencoder(real_data, tmp_path):
    folder = str(save_vae(tmp_path / "vae", levels=4))
    source = open_source(real_data / "imagenette-1000.zip")
    prepare(real_data / "imagenette-1000.zip", tmp_path / "out", resolution=64, autoencoder=folder, mirror=True,
            num_workers=2)
    metadata = json.loads((tmp_path / "out" / "metadata.json").read_text())
    assert (metadata["count"], metadata["num_classes"], metadata["class_names"][0]) == (1000, 10, "n01440764")
    assert metadata["shape"] == [4, 8, 8] and metadata["kind"] == "moments" and metadata["unreadable"] == []

    picked = [0, 333, 999]
    images = torch.from_numpy(np.stack([source.pixels(index, 64) for index in picked]))
    for name, side in (("latents", images), ("mirrored", images.flip(2))):
        rows = torch.from_numpy(np.load(tmp_path / "out" / f"{name}-00000.npy")[picked]).float()
        torch.testing.assert_close(rows, torch.cat(autoencoders.load_autoencoder(folder).encode(side), dim=1),
                                   atol=2e-3, rtol=2e-3)
