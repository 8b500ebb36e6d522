"""CIFAR-10 through prepare_latents; skipped where the real data is absent."""

import io
import json
import zipfile

import numpy as np
import torch
from PIL import Image
from test_prepare_latents import prepare

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
