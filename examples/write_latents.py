"""Writes a latent folder and masks with nothing but numpy, here for random latents (docs/data.md has the format).

    python examples/write_latents.py        # writes my-latents, for train.py data.path=my-latents
"""

import json
import os

import numpy as np

os.makedirs("my-latents", exist_ok=True)
latents = np.random.randn(100, 4, 32, 32).astype(np.float16)  # already (z - shift) * scale: standard deviation near 1
labels = np.random.randint(0, 10, 100).astype(np.int64)
np.save("my-latents/latents-00000.npy", latents)
np.save("my-latents/labels-00000.npy", labels)

images = np.random.rand(100, 256, 256) > 0.3                  # optional: a mask per image, true where the loss counts
masks = images.reshape(100, 32, 8, 32, 8).mean(axis=(2, 4))   # the mean over the 8 × 8 pixels of each latent position
np.save("my-latents/masks-00000.npy", masks.astype(np.float16))

metadata = {
    "format": 1, "count": 100, "shape": [4, 32, 32], "dtype": "float16", "kind": "sample", "mirrored": False,
    "num_classes": 10, "class_names": [str(i) for i in range(10)],
    "autoencoder": "sd_vae_ema", "scale": 0.18215, "shift": 0.0, "resolution": 256,
    "shards": [{"latents": "latents-00000.npy", "labels": "labels-00000.npy", "count": 100}],
    "source": "my own tool", "unreadable": [],
}
with open("my-latents/metadata.json", "w") as file:
    json.dump(metadata, file)
