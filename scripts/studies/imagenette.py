"""Photographs -> latents of TAEF2, a small autoencoder that a CPU can run, and its decoder as TorchScript.

    git clone https://github.com/madebyollin/taesd            # MIT; taef2_encoder.pth and taef2_decoder.pth
    git clone https://github.com/thunderInfy/imagenette       # ten classes of ImageNet, 224 px: train, val
    python scripts/studies/imagenette.py taesd imagenette/train data/imagenette

TAEF2 gives 32 channels of 28×28; each channel is normalised with its mean and standard deviation over 512 photographs.
The folder has the format of docs/data.md, written by a custom encoder. Training and sampling load the decoder by name:
data.autoencoder=data/imagenette/taef2.pt. Runs the Python of the first folder.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from autoencoder import Convention
from latents.images import ImageSource, open_source
from latents.writer import write_json
from runtime.command import program
from runtime.schema import as_path

SIDE, BATCH_SIZE, NUM_PROBED = 224, 32, 512


@torch.inference_mode()
def encode(encoder: torch.nn.Module, source: ImageSource, indices: np.ndarray) -> torch.Tensor:
    """Returns the encoder's own latents (B, 32, 28, 28) of the images at `indices` (B,)."""
    images = np.stack([source.pixels(index, SIDE) for index in indices.tolist()])
    return encoder((torch.from_numpy(images).permute(0, 3, 1, 2) / 255).bfloat16()).float()


@program
def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("taesd", type=as_path, help="a checkout of madebyollin/taesd")
    parser.add_argument("images", help="a folder or zip of class folders")
    parser.add_argument("out", type=as_path)
    given = parser.parse_args()
    if given.out.exists():
        raise ValueError(f"{given.out} is there already: name another, or move it away.")
    sys.path.insert(0, str(given.taesd))
    from taesd import TAESD

    network = TAESD(given.taesd / "taef2_encoder.pth", given.taesd / "taef2_decoder.pth").eval()
    encoder = network.encoder.bfloat16().to(memory_format=torch.channels_last)  # twice as fast on a CPU
    source = open_source(given.images)
    probed = np.linspace(0, len(source) - 1, min(len(source), NUM_PROBED)).astype(np.int64)
    own = torch.cat([encode(encoder, source, part) for part in np.array_split(probed, len(probed) // 32 + 1)])
    mean, std = own.mean(dim=(0, 2, 3)), own.std(dim=(0, 2, 3))
    convention = Convention(latents_mean=tuple(mean.tolist()), latents_std=tuple(std.tolist()),
                            pixels=(0.0, 1.0))

    given.out.mkdir(parents=True, exist_ok=True)
    torch.jit.script(network.decoder).save(given.out / "taef2.pt")
    shape = tuple(own.shape[1:])
    rows = np.lib.format.open_memmap(given.out / "latents-00000.npy", "w+", np.float16, (len(source), *shape))
    for start in tqdm(range(0, len(source), BATCH_SIZE)):
        indices = np.arange(start, min(start + BATCH_SIZE, len(source)))
        rows[indices] = convention.latent(encode(encoder, source, indices)).half().numpy()
    rows.flush()
    np.save(given.out / "labels-00000.npy", source.labels)
    write_json(given.out / "metadata.json", {
        "format": 1, "count": len(source), "shape": shape, "dtype": "float16", "kind": "sample", "mirrored": False,
        "num_classes": len(source.class_names), "class_names": source.class_names, "autoencoder": "taef2.pt",
        **convention.record(), "resolution": SIDE, "source": given.images,
        "precision": "bf16", "unreadable": [],
        "shards": [{"latents": "latents-00000.npy", "labels": "labels-00000.npy", "count": len(source)}]})


if __name__ == "__main__":
    main()
