"""A decoder of one's own (docs/data.md), here one that shows three of the latent's channels.

    python sample.py checkpoint=runs/x out=x.npz autoencoder=python:examples.own_decoder.decode

Load a network where the module is imported, and move it to the latents' device in the function.
"""

import torch


def decode(z: torch.Tensor) -> torch.Tensor:
    """Maps unscaled float32 latents (B, C, h, w) to pixels (B, 3, H, W) in [-1, 1]."""
    return z[:, :3].repeat_interleave(8, dim=2).repeat_interleave(8, dim=3).tanh()
