"""Maps pixels to latents and back, and scales an autoencoder's latents for the network, per channel if needed.

`weights/autoencoders.py` loads an autoencoder by its name.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

SD_VAE_SCALE = 0.18215  # Stable Diffusion 1 and 2; any other VAE's config.json has its own
PIXELS_AT_ONCE = 2**20  # the default number of pixels to decode at once: 16 images of 256x256


# ---- pixels ---------------------------------------------------------------------------------------------------------


def images_to_pixels(images: torch.Tensor) -> torch.Tensor:
    """Maps uint8 images (B,H,W,3) to float32 pixels (B,3,H,W) in [-1, 1]."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


def pixels_to_images(pixels: torch.Tensor) -> torch.Tensor:
    """Maps pixels (B,3,H,W) in [-1, 1] or beyond to uint8 images (B,H,W,3): floor(clip(127.5 x + 128, 0, 255))."""
    # Inverts images_to_pixels with rounding to nearest: add one half, then floor, as in EDM.
    return (pixels.float() * 127.5 + 128).clip(0, 255).floor().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


# ---- scale, shift, statistics ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Convention:
    """Turns an autoencoder's own latents z into the network's: latent = (z - shift - mean) / std * scale.

    `latents_mean` and `latents_std` have one number per channel; None means 0 and 1. `pixels` is the range of the
    pixels that the autoencoder decodes to. Raises ValueError for any other values.
    """

    scale: float = 1.0
    shift: float = 0.0
    latents_mean: tuple[float, ...] | None = None
    latents_std: tuple[float, ...] | None = None
    pixels: tuple[float, float] = (-1.0, 1.0)

    def __post_init__(self) -> None:
        mean, std = self.latents_mean or (), self.latents_std or ()
        if len(mean) != len(std):
            raise ValueError(f"latents_mean has {len(mean)} numbers and latents_std {len(std)}: set both, with one "
                             f"number per channel.")
        if not all(math.isfinite(number) and number > 0 for number in (self.scale, *std)):
            raise ValueError(f"scale={self.scale} and latents_std={list(std)} are not all numbers above 0.")
        if len(self.pixels) != 2 or not -math.inf < self.pixels[0] < self.pixels[1] < math.inf:
            raise ValueError(f"pixels={list(self.pixels)} is not a range: set two numbers, the lower one first.")

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "Convention":
        """Reads what `record` returned. A missing or null key has its default."""
        present: dict[str, Any] = {key: tuple(record[key]) if isinstance(record[key], list) else record[key]
                                   for key in cls.__dataclass_fields__ if record.get(key) is not None}
        return cls(**present)

    def record(self) -> dict[str, Any]:
        """Returns plain values for metadata.json and meta.json. Statistics and pixels are left out if default."""
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}
        usual = {"latents_mean": None, "latents_std": None, "pixels": [-1, 1]}
        return {key: value for key, value in plain.items() if key not in usual or value != usual[key]}

    def require(self, channels: int, where: str) -> None:
        """Raises ValueError if there are statistics for another number of channels."""
        if self.latents_mean is not None and len(self.latents_mean) != channels:
            raise ValueError(f"{where}: latents_mean and latents_std have {len(self.latents_mean)} numbers each, but "
                             f"the latents have {channels} channels.")

    def latent(self, z: torch.Tensor) -> torch.Tensor:
        """Maps an autoencoder's own latents (B,C,h,w) to the network's."""
        z = z - self.shift
        if self.latents_mean is not None:
            z = (z - _by_channel(self.latents_mean, z)) / _by_channel(self.latents_std, z)
        return z * self.scale

    def moments(self, mean_logvar: torch.Tensor) -> torch.Tensor:
        """Maps raw moments (B,2C,h,w), channels [mean, logvar], to [mean, std] of the network's latent.

        The log-variance is clamped to [-30, 20], as in latent diffusion's DiagonalGaussianDistribution.
        """
        mean, logvar = mean_logvar.chunk(2, dim=1)
        std = (0.5 * logvar.clamp(-30, 20)).exp()
        if self.latents_std is not None:
            std = std / _by_channel(self.latents_std, std)
        return torch.cat([self.latent(mean), std * self.scale], dim=1)

    def raw(self, latents: torch.Tensor) -> torch.Tensor:
        """Undoes `latent`."""
        z = latents / self.scale
        if self.latents_mean is not None:
            z = z * _by_channel(self.latents_std, z) + _by_channel(self.latents_mean, z)
        return z + self.shift

    def images(self, pixels: torch.Tensor) -> torch.Tensor:
        """Maps the autoencoder's decoded pixels (B,3,H,W) to uint8 images (B,H,W,3)."""
        low, high = self.pixels
        return pixels_to_images(pixels if (low, high) == (-1, 1) else (pixels - low) * (2 / (high - low)) - 1)


def _by_channel(numbers: tuple[float, ...] | None, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device=like.device).view(-1, 1, 1)


# ---- autoencoders ---------------------------------------------------------------------------------------------------


class Autoencoder:
    """Maps uint8 images (B,H,W,3) to the network's latents (B,C,h,w) and back."""

    _encode: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # pixels -> mean and standard deviation
    _decode: Callable[[torch.Tensor], torch.Tensor]                       # the autoencoder's own latents -> pixels
    name: str
    channels: int
    downsample: int                         # image side divided by latent side
    convention: Convention
    device: torch.device | str
    decode_batch_size: int | None = None    # images decoded at once; None for about PIXELS_AT_ONCE pixels

    @torch.no_grad()
    def encode(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps uint8 images (B,H,W,3) to the latents' mean and standard deviation, both float32 (B,C,h,w)."""
        return self._encode(images_to_pixels(images.to(self.device)))

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, strict: bool = False) -> torch.Tensor:
        """Maps latents (B,C,h,w) to uint8 images (B,H,W,3), a part of the batch at a time.

        Pixels that are not finite become black. With `strict` these or such latents raise ValueError, which waits for
        the device once.
        """
        per_image = latents.shape[2] * latents.shape[3] * self.downsample**2
        size, images = self.decode_batch_size or max(1, PIXELS_AT_ONCE // per_image), []
        finite = [latents.isfinite().all()]
        for piece in latents.to(self.device).float().split(size):
            pixels = self._decode(self.convention.raw(piece))
            finite.append(pixels.isfinite().all().to(latents.device))
            images.append(self.convention.images(pixels))
        if strict and not torch.stack(finite).all():
            raise ValueError(f"autoencoder={self.name} decodes these latents to pixels that are not finite: set "
                             f"decode_precision=fp32 or bf16, precision=fp32 and a common scale=, or choose another "
                             f"checkpoint.")
        return torch.cat(images)


class Identity(Autoencoder):
    """The autoencoder for training in pixel space: a latent is the image itself in [-1, 1]."""

    name, channels, downsample = "identity", 3, 1

    def __init__(self, device: torch.device | str = "cpu", convention: Convention | None = None):
        self.device, self.convention = device, convention or Convention()

    def _encode(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return pixels, torch.zeros_like(pixels)

    def _decode(self, z: torch.Tensor) -> torch.Tensor:
        return z


class DiffusersAutoencoder(Autoencoder):
    """A diffusers AutoencoderKL for latents with `convention`; raises ValueError for statistics that do not fit it."""

    def __init__(self, name: str, vae: Any, device: torch.device | str, convention: Convention):
        self.name, self.device, self.dtype, self.convention = name, device, vae.dtype, convention
        self.channels, self.downsample = vae.config.latent_channels, 2 ** (len(vae.config.block_out_channels) - 1)
        self.convention.require(self.channels, f"autoencoder={name}")
        self.vae = vae.to(device).eval().requires_grad_(False)
        if torch.device(device).type == "cuda":  # a memory layout that tensor cores prefer
            vae.decoder.to(memory_format=torch.channels_last)

    def _encode(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # parameters are [mean, logvar] before any clamp. They are cast to float32 so that exp() runs in float32.
        parameters = self.vae.encode(pixels.to(self.dtype)).latent_dist.parameters.float()
        mean, std = self.convention.moments(parameters).chunk(2, dim=1)
        return mean, std

    def _decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.vae.decode(z.to(self.dtype)).sample


class OwnDecoder(Autoencoder):
    """A user's function from its autoencoder's own latents z (B,C,h,w) to pixels (B,3,H,W) in [-1, 1].

    It is tried on one latent of `shape` (C,h,w). Raises ValueError if it does not return images.
    """

    convention = Convention()

    @torch.no_grad()
    def __init__(
        self, name: str, function: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, int, int],
        device: torch.device | str,
    ):
        self.name, self.function, self.device, self.channels = name, function, device, shape[0]
        pixels = function(torch.zeros(1, *shape, device=device))
        decoded = tuple(getattr(pixels, "shape", ()))
        self.downsample = decoded[3] // shape[2] if len(decoded) == 4 else 0
        is_image = decoded == (1, 3, shape[1] * self.downsample, shape[2] * self.downsample)
        if not (is_image and isinstance(pixels, torch.Tensor) and pixels.is_floating_point()):
            raise ValueError(f"autoencoder={name} maps one latent {(1, *shape)} to {type(pixels).__name__} {decoded} "
                             f"{getattr(pixels, 'dtype', '')}: return one floating-point tensor (1, 3, H, W) of pixels "
                             f"in -1 … 1, with H and W the same multiple of {shape[1]} and {shape[2]}.")

    def _decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.function(z).to(z.device)  # it may compute elsewhere, but ranks gather images from their own devices
