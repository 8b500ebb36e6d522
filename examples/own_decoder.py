"""Saves a latent decoder as TorchScript, so that `autoencoder=own.pt` decodes with it (docs/data.md).

    python examples/own_decoder.py
"""

import torch


class Decoder(torch.nn.Module):
    """Maps unscaled float32 latents (B, C, h, w) to pixels (B, 3, H, W) in [-1, 1]."""

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return z[:, :3].repeat_interleave(8, dim=2).repeat_interleave(8, dim=3).tanh()


torch.jit.script(Decoder()).save("own.pt")
