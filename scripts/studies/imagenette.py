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
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from autoencoder import Convention
from latents.images import open_source
from latents.listing import spread
from latents.writer import is_finished, write_folder
from runtime.command import program
from runtime.device import join_ranks
from runtime.schema import as_path

SIDE, BATCH_SIZE, NUM_PROBED = 224, 32, 512


@program
@torch.inference_mode()
def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("taesd", type=as_path, help="a checkout of madebyollin/taesd")
    parser.add_argument("images", help="a folder or zip of class folders")
    parser.add_argument("out", type=as_path)
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.taesd))
    from taesd import TAESD

    network = TAESD(arguments.taesd / "taef2_encoder.pth", arguments.taesd / "taef2_decoder.pth").eval()
    encoder = network.encoder.bfloat16().to(memory_format=torch.channels_last)  # twice as fast on a CPU
    source = open_source(arguments.images)

    def read(indices: Iterable[int]) -> np.ndarray:
        return np.stack([source.pixels(index, SIDE) for index in indices])

    def encode(images: np.ndarray) -> torch.Tensor:
        """Returns the encoder's own latents (B, 32, 28, 28)."""
        return encoder((torch.from_numpy(images).permute(0, 3, 1, 2) / 255).bfloat16()).float()

    probed = spread(len(source), NUM_PROBED)
    probe = torch.cat([encode(read(part.tolist())) for part in np.array_split(probed, len(probed) // 32 + 1)])
    mean, std, shape = probe.mean(dim=(0, 2, 3)), probe.std(dim=(0, 2, 3)), tuple(probe.shape[1:])
    convention = Convention(latents_mean=tuple(mean.tolist()), latents_std=tuple(std.tolist()), pixels=(0.0, 1.0))
    settings = {"source": arguments.images, "fingerprint": source.fingerprint()}
    metadata = {"shape": shape, "kind": "sample", "mirrored": False, "num_classes": len(source.class_names),
                "class_names": source.class_names, "autoencoder": "taef2.pt", **convention.record(),
                "resolution": SIDE, "source": arguments.images, "precision": "bf16"}
    if not is_finished(arguments.out, settings):
        write_folder(arguments.out, settings, metadata, shape, len(source), shard_size=4096, batch_size=BATCH_SIZE,
                     state=join_ranks(cpu=True, tf32=False), read=lambda items: (items, read(items)),
                     encode=lambda batch: ({"latents": convention.latent(encode(batch[1])).half().numpy(),
                                            "labels": source.labels[batch[0]]}, []))
    torch.jit.script(network.decoder).save(arguments.out / "taef2.pt")


if __name__ == "__main__":
    main()
