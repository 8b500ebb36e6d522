"""Writes a latent folder with nothing but numpy, here for random latents (docs/data.md has the format).

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

metadata = {
    "format": 1, "count": 100, "shape": [4, 32, 32], "dtype": "float16", "kind": "sample", "mirrored": False,
    "num_classes": 10, "class_names": [str(i) for i in range(10)],
    "autoencoder": "sd_vae_ema", "scale": 0.18215, "shift": 0.0, "resolution": 256,
    "shards": [{"latents": "latents-00000.npy", "labels": "labels-00000.npy", "count": 100}],
    "source": "my own tool", "unreadable": [],
}
with open("my-latents/metadata.json", "w") as file:
    json.dump(metadata, file)
