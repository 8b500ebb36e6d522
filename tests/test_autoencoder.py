"""Pixels <-> latents: the pinned uint8 rule, the identity, and how latents are scaled."""

import pytest
import torch

from autoencoder import Convention, Identity, pixels_to_images


def every_value() -> torch.Tensor:
    """All 256 values in all three channels, as one image (1, 16, 16, 3)."""
    return torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1).expand(-1, -1, -1, 3).contiguous()


def test_every_value_returns_through_the_identity_and_float16():
    identity = Identity()
    mean, std = identity.encode(every_value())
    assert mean.shape == (1, 3, 16, 16) and mean.dtype == torch.float32 and (std == 0).all()
    assert mean.min() == -1 and mean.max() == 1
    assert (mean[0, :, 0, 1] == 1 / 127.5 - 1).all()
    assert torch.equal(identity.decode(mean.half()), every_value())
    assert (identity.channels, identity.downsample, identity.convention) == (3, 1, Convention())


def test_decoding_floors_and_clips():
    values = torch.tensor([-2, -1.0, -128 / 127.5, 0.0, 0.49 / 127.5, -0.01 / 127.5, 1.0, 2.0])
    images = pixels_to_images(values.reshape(1, 1, 1, -1).expand(-1, 3, -1, -1))
    assert images.shape == (1, 1, 8, 3) and images.dtype == torch.uint8
    assert images[0, 0, :, 0].tolist() == [0, 0, 0, 128, 128, 127, 255, 255]


def test_raw_latents_and_moments_are_scaled_as_the_vae_scales_them():
    z = torch.randn(2, 4, 3, 3)
    assert torch.equal(Convention(0.18215).latent(z), z * 0.18215)
    assert torch.equal(Convention(2.0, 1.0).latent(z), (z - 1) * 2)
    pixels = torch.linspace(-0.5, 1.5, 48).view(1, 3, 4, 4)
    assert torch.equal(Convention(pixels=(0, 1)).images(pixels), pixels_to_images(pixels * 2 - 1))  # EDM2's
    for pixels in ([1], [1, 0], [0, 1, 2], [0, float("inf")]):
        with pytest.raises(ValueError, match=r"pixels=.* is not a range"):
            Convention.read({"pixels": pixels})
    logvar = torch.tensor([-100.0, -30, 0, 2, 20, 100]).reshape(1, 6, 1, 1)
    mean = torch.ones(1, 6, 1, 1)
    moments = Convention(0.5, 0.25).moments(torch.cat([mean, logvar], dim=1))
    assert moments.shape == (1, 12, 1, 1)
    assert moments[0, :6, 0, 0].tolist() == [0.375] * 6
    expected = 0.5 * torch.tensor([-15.0, -15, 0, 1, 10, 10]).exp()  # logvar is clamped to [-30, 20]
    torch.testing.assert_close(moments[0, 6:, 0, 0], expected)
