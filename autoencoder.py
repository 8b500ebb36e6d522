"""Pixels <-> latents: the identity (pixel space) and the Stable Diffusion family of autoencoders.

The one home of scale and shift: a latent is `(z - shift) * scale`, ready for the network.
"""

import json
from pathlib import Path

import torch

SD_VAE_SCALE = 0.18215  # Stable Diffusion 1 and 2; any other VAE's config.json says its own
HUB_NAMES = {"sd_vae_ema": "stabilityai/sd-vae-ft-ema", "sd_vae_mse": "stabilityai/sd-vae-ft-mse"}


def images_to_pixels(images: torch.Tensor) -> torch.Tensor:
    """Maps uint8 images (B,H,W,3) to float32 pixels (B,3,H,W) in [-1, 1]."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


def pixels_to_images(pixels: torch.Tensor) -> torch.Tensor:
    """Maps pixels (B,3,H,W) in [-1, 1] or beyond to uint8 images (B,H,W,3): floor(clip(127.5 x + 128, 0, 255))."""
    # The inverse of images_to_pixels plus one half, then floor: rounding to nearest, as EDM does it.
    return (pixels.float() * 127.5 + 128).clip(0, 255).floor().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def scale_latent(z: torch.Tensor, scale: float, shift: float) -> torch.Tensor:
    """Maps an autoencoder's raw latent to the network's: (z - shift) * scale."""
    return (z - shift) * scale


def scale_moments(mean_logvar: torch.Tensor, scale: float, shift: float) -> torch.Tensor:
    """Maps raw moments (B,2C,h,w), channels [mean, logvar], to [mean, std] of the scaled latent.

    The log-variance is clamped to [-30, 20], as in latent diffusion's DiagonalGaussianDistribution.
    """
    mean, logvar = mean_logvar.chunk(2, dim=1)
    return torch.cat([scale_latent(mean, scale, shift), (0.5 * logvar.clamp(-30, 20)).exp() * scale], dim=1)


class Identity:
    """The autoencoder of pixel space: a latent is the image itself in [-1, 1]."""

    name, channels, downsample, scale, shift = "identity", 3, 1, 1.0, 0.0

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = device

    def encode(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps uint8 images (B,H,W,3) to mean and std, both float32 (B,3,H,W); the std is zero."""
        mean = images_to_pixels(images.to(self.device))
        return mean, torch.zeros_like(mean)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Maps latents (B,3,H,W) to uint8 images (B,H,W,3)."""
        return pixels_to_images(latents)


class KLAutoencoder:
    """A diffusers AutoencoderKL behind the same four numbers and two verbs as `Identity`."""

    def __init__(self, name: str, vae: torch.nn.Module, device: torch.device | str):
        self.name, self.device, self.dtype = name, device, vae.dtype
        self.vae = vae.to(device).eval().requires_grad_(False)
        if torch.device(device).type == "cuda":      # another layout in memory, made for tensor cores
            vae.decoder.to(memory_format=torch.channels_last)
        self.channels = vae.config.latent_channels
        self.downsample = 2 ** (len(vae.config.block_out_channels) - 1)
        self.scale = float(vae.config.scaling_factor)
        self.shift = float(vae.config.shift_factor or 0.0)

    @torch.no_grad()
    def encode(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps uint8 images (B,H,W,3) to the scaled posterior's mean and std, both float32 (B,C,H/8,W/8)."""
        posterior = self.vae.encode(images_to_pixels(images.to(self.device)).to(self.dtype)).latent_dist
        # posterior.parameters are [mean, logvar] before any clamp; in float32, so that exp() is too.
        mean, std = scale_moments(posterior.parameters.float(), self.scale, self.shift).chunk(2, dim=1)
        return mean, std

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Maps scaled latents (B,C,h,w) to uint8 images (B,8h,8w,3)."""
        z = latents.to(self.device).float() / self.scale + self.shift
        return pixels_to_images(self.vae.decode(z.to(self.dtype)).sample)


def load(
    name_or_folder: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Identity | KLAutoencoder:
    """Loads `identity`, `sd_vae_ema`, `sd_vae_mse` or a local diffusers folder of an AutoencoderKL.

    Reads safetensors only; `dtype` is the network's, moments come back in float32. Raises ValueError where the
    name is unknown, the folder is not a whole one, or a hub model is neither cached nor reachable.
    """
    if name_or_folder == "identity":
        return Identity(device)
    vae = _from_hub(name_or_folder, dtype) if name_or_folder in HUB_NAMES else _from_folder(name_or_folder, dtype)
    return KLAutoencoder(name_or_folder, vae, device)


def undecodable(name_or_folder: str, channels: int) -> str | None:
    """Says why latents of so many channels could not be decoded, as far as can be told without loading; None if not."""
    if name_or_folder == "identity" and channels != Identity.channels:
        return f"autoencoder=identity has {Identity.channels} channels and these have {channels}."
    if name_or_folder in ("identity", *HUB_NAMES) or (Path(name_or_folder) / "config.json").is_file():
        return None
    return f"autoencoder={name_or_folder} is neither one of identity, {', '.join(HUB_NAMES)} nor a diffusers folder."


def _from_hub(name: str, dtype: torch.dtype) -> torch.nn.Module:
    from diffusers import AutoencoderKL
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    repo = HUB_NAMES[name]
    options = {"use_safetensors": True, "torch_dtype": dtype}
    try:
        return AutoencoderKL.from_pretrained(repo, local_files_only=True, **options)
    except Exception:  # not cached, or not whole
        pass
    try:
        get_hf_file_metadata(hf_hub_url(repo, "config.json"), timeout=10)  # from_pretrained asks for half a minute
        return AutoencoderKL.from_pretrained(repo, **options)
    except Exception as error:  # diffusers, huggingface_hub and the HTTP client each have their own exceptions
        raise ValueError(
            f"autoencoder={name} needs {repo} from the Hugging Face hub, which is not in the cache and could not be "
            f"fetched ({type(error).__name__}). On a machine with network, run `hf download {repo} config.json "
            f"diffusion_pytorch_model.safetensors --local-dir {name}`, copy that folder here, and pass it as "
            f"autoencoder=path/to/{name}."
        ) from error


def _from_folder(folder: str, dtype: torch.dtype) -> torch.nn.Module:
    if not Path(folder).is_dir():
        names = ", ".join(["identity", *HUB_NAMES])
        raise ValueError(f"autoencoder={folder} is neither one of {names} nor a local folder.")
    config_file = Path(folder) / "config.json"
    if not config_file.is_file():
        raise ValueError(
            f"autoencoder={folder} has no config.json: point it at the folder with config.json and "
            f"diffusion_pytorch_model.safetensors (of a whole pipeline, its vae/ folder)."
        )
    try:
        config = dict(json.loads(config_file.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{config_file} is not a JSON object: {error}.") from error
    if config.get("_class_name") != "AutoencoderKL":
        raise ValueError(
            f"autoencoder={folder} is of class {config.get('_class_name')}; only AutoencoderKL is read."
        )
    if config.get("latents_mean") or config.get("latents_std"):
        raise ValueError(
            f"autoencoder={folder} normalises each channel by latents_mean and latents_std; only a VAE with one "
            f"scaling_factor and shift_factor is read."
        )
    if config.get("scaling_factor", SD_VAE_SCALE) is None:
        raise ValueError(f"{config_file} has scaling_factor null: set it to 1 / the latents' standard deviation.")
    from diffusers import AutoencoderKL

    try:
        vae, found = AutoencoderKL.from_pretrained(
            folder, use_safetensors=True, torch_dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # absent, cut short, of other shapes: each raises its own
        raise ValueError(
            f"autoencoder={folder} has no diffusion_pytorch_model.safetensors that can be read and fits config.json; "
            f"weights in .bin are pickles and are not loaded (convert them with diffusers' save_pretrained), and "
            f"*.fp16.safetensors is to be renamed. {str(error).splitlines()[0]}"
        ) from error
    if lacking := found["missing_keys"]:  # diffusers only warns, and leaves them random
        raise ValueError(
            f"autoencoder={folder}: the weights lack {len(lacking)} of the tensors of config.json, {lacking[0]} first."
        )
    return vae
