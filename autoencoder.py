"""Pixels <-> latents: pixel space, diffusers' autoencoders, LDM's such as VA-VAE, and users' own decoders.

`Convention` has the scale, shift and statistics by channel that turn an autoencoder's latents into the network's.
"""

import argparse
import contextlib
import importlib
import json
import math
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

SD_VAE_SCALE = 0.18215  # Stable Diffusion 1 and 2; any other VAE's config.json says its own
HUB_NAMES = {"sd_vae_ema": "stabilityai/sd-vae-ft-ema", "sd_vae_mse": "stabilityai/sd-vae-ft-mse"}
# Diffusers' classes for images in [-1, 1] whose config has the scale of their latents.
CLASSES = ("AutoencoderKL", "AutoencoderTiny", "AutoencoderDC")
SAMPLES_ONLY = ("AutoencoderTiny", "AutoencoderDC")      # their latents are values, not distributions
PIXELS_AT_ONCE = 2**20  # decoded at once by default: 16 images of 256x256
NONE = "none"           # the name for latents that only their owner can decode
PYTHON = "python:"      # python:module.function
STATISTICS = "latents_stats.pt"      # LightningDiT's, with the mean and standard deviation of each channel


# ---- pixels ---------------------------------------------------------------------------------------------------------


def images_to_pixels(images: torch.Tensor) -> torch.Tensor:
    """Maps uint8 images (B,H,W,3) to float32 pixels (B,3,H,W) in [-1, 1]."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


def pixels_to_images(pixels: torch.Tensor) -> torch.Tensor:
    """Maps pixels (B,3,H,W) in [-1, 1] or beyond to uint8 images (B,H,W,3): floor(clip(127.5 x + 128, 0, 255))."""
    # The inverse of images_to_pixels plus one half, then floor: rounding to nearest, as EDM does it.
    return (pixels.float() * 127.5 + 128).clip(0, 255).floor().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


# ---- scale, shift, statistics ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Convention:
    """Makes the network's latents of an autoencoder's own: latent = (z - shift - mean) / std * scale.

    `latents_mean` and `latents_std` are a number a channel, or None for 0 and 1. `pixels` is the range of what the
    autoencoder decodes to. Raises ValueError for values that are not such numbers.
    """

    scale: float = 1.0
    shift: float = 0.0
    latents_mean: tuple[float, ...] | None = None
    latents_std: tuple[float, ...] | None = None
    pixels: tuple[float, float] = (-1.0, 1.0)

    def __post_init__(self):
        mean, std = self.latents_mean, self.latents_std
        if not (_are_numbers(self.scale, self.shift) and self.scale > 0):
            raise ValueError(f"scale {self.scale} and shift {self.shift} are not a number above 0 and a number.")
        if len(mean or ()) != len(std or ()):
            raise ValueError(f"latents_mean has {len(mean or ())} numbers and latents_std {len(std or ())}: give both, "
                             f"a number a channel each.")
        if mean and not (_are_numbers(*mean, *std) and min(std) > 0):
            raise ValueError("latents_mean are not all numbers, or latents_std not all numbers above 0.")
        if len(self.pixels) != 2 or not _are_numbers(*self.pixels) or self.pixels[0] >= self.pixels[1]:
            raise ValueError(f"pixels={list(self.pixels)} is not a range [from, to].")

    @classmethod
    def read(cls, record: dict) -> "Convention":
        """Reads what `record` returned; a key that is absent or null has its default."""
        given = {key: record[key] for key in cls.__dataclass_fields__ if record.get(key) is not None}
        for key in given.keys() & {"latents_mean", "latents_std", "pixels"}:
            if not isinstance(given[key], list | tuple):
                raise ValueError(f"{key}={given[key]} is not a list of numbers.")
            given[key] = tuple(given[key])
        return cls(**given)

    def record(self) -> dict:
        """Returns plain values for metadata.json and meta.json, without most defaults."""
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}
        usual = {"latents_mean": None, "latents_std": None, "pixels": [-1, 1]}
        return {key: value for key, value in plain.items() if key not in usual or value != usual[key]}

    def require(self, channels: int, where: str) -> None:
        """Raises ValueError where there are statistics of another number of channels."""
        if self.latents_mean is not None and len(self.latents_mean) != channels:
            raise ValueError(f"{where}: latents_mean and latents_std have {len(self.latents_mean)} numbers each, and "
                             f"the latents {channels} channels.")

    def latent(self, z: torch.Tensor) -> torch.Tensor:
        """Maps an autoencoder's own latent (B,C,h,w) to the network's."""
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
        """Maps what the autoencoder decodes to, (B,3,H,W), to uint8 images (B,H,W,3)."""
        low, high = self.pixels
        return pixels_to_images(pixels if (low, high) == (-1, 1) else (pixels - low) * (2 / (high - low)) - 1)


def _are_numbers(*values: object) -> bool:
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _by_channel(numbers: tuple[float, ...], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device=like.device).view(-1, 1, 1)


# ---- autoencoders ---------------------------------------------------------------------------------------------------


class Autoencoder:
    """Maps uint8 images (B,H,W,3) to the network's latents (B,C,h,w) and back, decoding a piece at a time."""

    name: str
    channels: int
    downsample: int                         # pixels a latent's side
    convention: Convention
    device: torch.device | str
    samples_only = True                     # encoding gives values and no distribution around them
    decode_batch_size: int | None = None    # images decoded at once; None: as many as have PIXELS_AT_ONCE

    @torch.no_grad()
    def encode(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps uint8 images (B,H,W,3) to the latents' mean and standard deviation, both float32 (B,C,h,w)."""
        mean, std = self._encode(images_to_pixels(images.to(self.device)))
        return mean, torch.zeros_like(mean) if std is None else std

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, strict: bool = False) -> torch.Tensor:
        """Maps latents (B,C,h,w) to uint8 images (B,H,W,3), a piece of the batch at a time.

        Pixels that are not finite are black; with `strict` they are a ValueError.
        """
        pixels = latents.shape[2] * latents.shape[3] * self.downsample**2
        size = self.decode_batch_size or max(1, PIXELS_AT_ONCE // pixels)
        pieces = latents.to(self.device).float().split(size)
        return torch.cat([self.convention.images(self._pixels(piece, strict)) for piece in pieces])

    def _pixels(self, latents: torch.Tensor, strict: bool) -> torch.Tensor:
        pixels = self._decode(self.convention.raw(latents))
        if strict and not pixels.isfinite().all():
            raise ValueError(f"autoencoder={self.name} decodes these latents to pixels that are not finite: set "
                             f"decode_precision=fp32 or bf16, or choose another checkpoint.")
        return pixels

    def _encode(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise NotImplementedError

    def _decode(self, z: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Identity(Autoencoder):
    """The autoencoder of pixel space: a latent is the image itself in [-1, 1]."""

    name, channels, downsample, convention = "identity", 3, 1, Convention()

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = device

    def _encode(self, pixels: torch.Tensor) -> tuple[torch.Tensor, None]:
        return pixels, None

    def _decode(self, z: torch.Tensor) -> torch.Tensor:
        return z


class DiffusersAutoencoder(Autoencoder):
    """A network of one of diffusers' CLASSES; its config has the convention where none is given.

    Raises ValueError for a config without a scale, or for statistics of another number of channels.
    """

    def __init__(
        self, name: str, vae: torch.nn.Module, device: torch.device | str, convention: Convention | None = None,
    ):
        self.name, self.device, self.dtype = name, device, vae.dtype
        self.samples_only = type(vae).__name__ in SAMPLES_ONLY
        self.channels, self.downsample = latent_form(type(vae), vae.config)
        if convention is None and vae.config.get("scaling_factor") is None:
            raise ValueError(f"autoencoder={name}: config.json has scaling_factor null: set it to 1 / the latents' "
                             f"standard deviation.")
        keys = {"scale": "scaling_factor", "shift": "shift_factor"}
        self.convention = convention or Convention.read(
            {key: vae.config.get(keys.get(key, key)) for key in ("scale", "shift", "latents_mean", "latents_std")})
        self.convention.require(self.channels, f"autoencoder={name}")
        self.vae = vae.to(device).eval().requires_grad_(False)
        if torch.device(device).type == "cuda":      # another layout in memory, made for tensor cores
            vae.decoder.to(memory_format=torch.channels_last)

    def _encode(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        encoded = self.vae.encode(pixels.to(self.dtype))
        if self.samples_only:
            return self.convention.latent(encoded[0].float()), None
        # parameters are [mean, logvar] before any clamp; in float32, so that exp() is too.
        mean, std = self.convention.moments(encoded.latent_dist.parameters.float()).chunk(2, dim=1)
        return mean, std

    def _decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.vae.decode(z.to(self.dtype)).sample


class OwnDecoder(Autoencoder):
    """A user's function that maps z (B,C,h,w), its autoencoder's own latents, to pixels (B,3,H,W) in [-1, 1].

    It is tried on one latent of `shape` (C,h,w). Raises ValueError where it fails or does not return images.
    """

    convention = Convention()

    @torch.no_grad()
    def __init__(
        self, name: str, function: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, int, int],
        device: torch.device | str,
    ):
        self.name, self.function, self.device, self.channels = name, function, device, shape[0]
        try:
            pixels = function(torch.zeros(1, *shape, device=device))
        except Exception as error:
            raise ValueError(f"autoencoder={name} does not take latents {(1, *shape)}: "
                             f"{(str(error).strip() or type(error).__name__).splitlines()[-1]}.") from error
        found = tuple(pixels.shape) if isinstance(pixels, torch.Tensor) else type(pixels).__name__
        self.downsample = found[-1] // shape[2] if isinstance(found, tuple) and len(found) == 4 else 0
        if not self.downsample or found != (1, 3, shape[1] * self.downsample, shape[2] * self.downsample):
            raise ValueError(f"autoencoder={name} maps one latent {(1, *shape)} to {found}; images are (1, 3, H, W), "
                             f"of H and W that are whole multiples of {shape[1]} and {shape[2]}.")

    def _decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.function(z).to(z.device)      # which may compute elsewhere; ranks gather what is on their devices


# ---- names -> autoencoders ------------------------------------------------------------------------------------------


def load(name: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Autoencoder:
    """Loads what encodes and decodes: `identity`, `sd_vae_ema`, `sd_vae_mse`, a local diffusers folder, an LDM file.

    Reads weights only; `dtype` is the network's, moments come back in float32. Raises ValueError where the name is
    unknown, the folder is not a whole one, or a hub model is neither cached nor reachable.
    """
    if runs_code(name):
        raise ValueError(f"autoencoder={name} decodes and does not encode: name another here.")
    loaded, convention = _open(name, device, dtype)
    if convention is None:
        raise ValueError(f"autoencoder={name} does not say how its latents are scaled: put its {STATISTICS} beside it.")
    return loaded


def load_decoder(
    name: str,
    shape: tuple[int, int, int],            # of the latents: (C, h, w)
    convention: Convention | None,          # by which they were made; None: the autoencoder's own
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    batch_size: int | None = None,          # images decoded at once; None: as many as have PIXELS_AT_ONCE
    asked: bool = False,                    # whether the user has named it, not a file that somebody made
) -> Autoencoder:
    """Loads what decodes latents of `shape` that were made by `convention`, whatever its own is.

    Of a network distilled to decode scaled latents (AutoencoderTiny) its own convention holds. Raises ValueError as
    `load` does, for other channels, and for a decoder that runs code where no user has named it.
    """
    if runs_code(name):
        if not asked:
            raise ValueError(f"autoencoder={name} runs code, so it is loaded only where the command names it, and here "
                             f"a file does: give autoencoder={name} (of train.py: data.autoencoder) if you trust it.")
        function = _python(name) if name.startswith(PYTHON) else torch.jit.load(name, map_location=device).eval()
        loaded, own = OwnDecoder(name, function, shape, device), Convention()
    else:
        loaded, own = _open(name, device, dtype)
    if loaded.channels != shape[0]:
        raise ValueError(f"autoencoder={name} decodes latents of {loaded.channels} channels, and these have "
                         f"{shape[0]}: give the autoencoder of these latents.")
    if isinstance(loaded, DiffusersAutoencoder) and type(loaded.vae).__name__ == "AutoencoderTiny":
        if convention is not None and convention.latents_mean is not None:
            raise ValueError(f"autoencoder={name} is an AutoencoderTiny, for latents with one scale, and these are "
                             f"normalised a channel at a time: give another.")
        convention = own
    if convention is None and own is None:
        raise ValueError(f"Nothing says how the latents for autoencoder={name} were scaled: put its {STATISTICS} "
                         f"beside it.")
    loaded.convention = convention or own
    loaded.convention.require(shape[0], "The record of these latents")
    loaded.decode_batch_size = batch_size
    return loaded


def runs_code(name: str) -> bool:
    """Tells whether loading an autoencoder of this name runs code: a Python callable or a TorchScript file."""
    return name.startswith(PYTHON) or (Path(name).is_file() and _is_torchscript(Path(name)))


def samples_only(name: str) -> bool:
    """Tells, without loading weights, whether an autoencoder gives values and no distributions."""
    if name in HUB_NAMES or name == NONE or runs_code(name) or Path(name).is_file():
        return False
    return name == "identity" or _read_config(name)["_class_name"] in SAMPLES_ONLY


def undecodable(name: str, channels: int) -> str | None:
    """Returns why latents of so many channels cannot be decoded, as far as it shows without loading, or None."""
    if name == NONE:
        return "autoencoder=none says that only their owner can decode them."
    if name == "identity" and channels != Identity.channels:
        return f"autoencoder=identity has {Identity.channels} channels and these have {channels}."
    files = (Path(name), Path(name) / "config.json")
    if name in ("identity", *HUB_NAMES) or name.startswith(PYTHON) or any(file.is_file() for file in files):
        return None
    return f"autoencoder={name} is neither one of identity, {', '.join(HUB_NAMES)}, none nor a file or folder."


def _open(name: str, device: torch.device | str, dtype: torch.dtype) -> tuple[Autoencoder, Convention | None]:
    """Opens what does not run code; returns it and its own convention, or None where no file has one."""
    if name == NONE:
        raise ValueError("autoencoder=none: only their owner can decode these latents. Name what decodes them, as in "
                         "autoencoder=path/to/folder, or write them as they are: sample.py out=x.npz latents=true.")
    if name == "identity":
        return Identity(device), Identity.convention
    if Path(name).is_file():
        file = Path(name).with_name(STATISTICS)
        statistics = read_statistics(file) if file.is_file() else None
        loaded = DiffusersAutoencoder(name, _from_ldm(Path(name)).to(dtype), device, statistics or Convention())
        return loaded, statistics
    vae = _from_hub(name, dtype) if name in HUB_NAMES else _from_folder(name, dtype)
    loaded = DiffusersAutoencoder(name, vae, device)
    return loaded, loaded.convention


# ---- diffusers ------------------------------------------------------------------------------------------------------


def latent_form(network: type[torch.nn.Module], config: dict) -> tuple[int, int]:
    """Returns (channels, pixels a latent's side) of a diffusers class, by a pass without weights or memory."""
    side = 2**9
    with torch.device("meta"), torch.no_grad():
        encoded = network.from_config(config).encode(torch.zeros(1, 3, side, side))
    latent = encoded.latent_dist.mean if hasattr(encoded, "latent_dist") else encoded[0]
    return latent.shape[1], side // latent.shape[3]


def _network(name: str) -> type[torch.nn.Module]:
    import diffusers  # which takes seconds

    return getattr(diffusers, name)


def _from_hub(name: str, dtype: torch.dtype) -> torch.nn.Module:
    from diffusers import AutoencoderKL
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    repo = HUB_NAMES[name]
    options = {"use_safetensors": True, "torch_dtype": dtype}
    with contextlib.suppress(Exception):      # not cached, or not whole
        return AutoencoderKL.from_pretrained(repo, local_files_only=True, **options)
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


def _read_config(folder: str) -> dict:
    """Reads config.json of a diffusers folder; raises ValueError where its class is not one of CLASSES."""
    if not Path(folder).is_dir():
        names = ", ".join(["identity", *HUB_NAMES])
        raise ValueError(f"autoencoder={folder} is neither one of {names} nor a local folder or file.")
    file = Path(folder) / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"autoencoder={folder} has no config.json: give the folder with config.json and "
                         f"diffusion_pytorch_model.safetensors (of a whole pipeline, its vae/ folder).") from None
    except ValueError as error:
        raise ValueError(f"{file} is not a JSON object: {error}.") from error
    if config.get("_class_name") not in CLASSES:      # a name alone: nothing else is ever looked up by it
        raise ValueError(f"autoencoder={folder} is of class {config.get('_class_name')}, and {', '.join(CLASSES)} are "
                         f"read.")
    return config


def _from_folder(folder: str, dtype: torch.dtype) -> torch.nn.Module:
    config = _read_config(folder)
    network = _network(config["_class_name"])
    try:
        vae, found = network.from_pretrained(
            folder, use_safetensors=True, torch_dtype=dtype, local_files_only=True, output_loading_info=True)
    except Exception as error:  # absent, cut short, of other shapes: each raises its own
        raise ValueError(
            f"autoencoder={folder} has no diffusion_pytorch_model.safetensors that can be read and fits config.json; "
            f"weights in .bin are pickles and are not loaded (convert them with diffusers' save_pretrained), and "
            f"*.fp16.safetensors must be renamed. {_first_line(error)}") from error
    if lacking := found["missing_keys"]:  # diffusers only warns, and leaves them random
        raise ValueError(f"autoencoder={folder}: the weights lack {len(lacking)} of the tensors of config.json, "
                         f"{lacking[0]} first.")
    return vae


# ---- LDM's own files, VA-VAE's among them ---------------------------------------------------------------------------


def ldm_key(key: str, num_levels: int) -> str:
    """Names a tensor of diffusers' AutoencoderKL as latent diffusion's AutoencoderKL (CompVis) does."""
    def level(found: re.Match) -> str:
        index = int(found[2])      # LDM counts a decoder's levels from the pixels, diffusers from the latent
        return f"down.{index}." if found[1] == "down" else f"up.{num_levels - 1 - index}."

    key = re.sub(r"(down|up)_blocks\.(\d+)\.", level, key)
    for ours, theirs in (
        (r"mid_block\.resnets\.0", "mid.block_1"), (r"mid_block\.resnets\.1", "mid.block_2"),
        (r"mid_block\.attentions\.0", "mid.attn_1"), ("resnets", "block"), ("attentions", "attn"),
        (r"(down|up)samplers\.0\.conv", r"\1sample.conv"), ("conv_shortcut", "nin_shortcut"),
        ("conv_norm_out", "norm_out"), ("group_norm", "norm"), (r"to_([qkv])\.", r"\1."), (r"to_out\.0", "proj_out"),
    ):
        key = re.sub(ours, theirs, key)
    return key


def _from_ldm(file: Path) -> torch.nn.Module:
    """Builds diffusers' AutoencoderKL of latent diffusion's weights: a .pt or .ckpt of tensors, or .safetensors."""
    state = read_tensors(file)
    for key in ("state_dict", "model"):
        state = state.get(key, state) if isinstance(state, dict) else {}
    levels = [f"encoder.down.{i}" for i in range(64) if f"encoder.down.{i}.block.0.conv1.weight" in state]
    if not levels or "post_quant_conv.weight" not in state:
        raise ValueError(f"autoencoder={file} holds no weights of a latent-diffusion AutoencoderKL: encoder.down.0… or "
                         f"post_quant_conv is missing among its {len(state)} tensors.")
    kinds = ["Attn" if f"{level}.attn.0.q.weight" in state else "" for level in levels]
    network = partial(
        _network("AutoencoderKL"),
        block_out_channels=tuple(len(state[f"{level}.block.0.conv1.weight"]) for level in levels),
        layers_per_block=sum(f"encoder.down.0.block.{i}.conv1.weight" in state for i in range(64)),
        latent_channels=len(state["post_quant_conv.weight"]),
        down_block_types=tuple(f"{kind}DownEncoderBlock2D" for kind in kinds),
        up_block_types=tuple(f"{kind}UpDecoderBlock2D" for kind in reversed(kinds)),
    )
    try:
        with torch.device("meta"):
            vae = network()
        expected = vae.state_dict()
        theirs = {key: ldm_key(key, len(levels)) for key in expected}
        if lacking := [name for name in theirs.values() if name not in state]:
            raise ValueError(f"{len(lacking)} tensors are missing, {lacking[0]} first")
        # A 1x1 convolution and a linear layer hold the same numbers.
        vae.load_state_dict({key: state[name].float().reshape(expected[key].shape) for key, name in theirs.items()},
                            assign=True)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"autoencoder={file} does not fit latent diffusion's AutoencoderKL: "
                         f"{_first_line(error)}.") from error
    return vae


# ---- files of tensors -----------------------------------------------------------------------------------------------


def require_unpacked(path: Path) -> None:
    """Raises ValueError for a .pt with compressed parts: torch writes none, and a few bytes may become gigabytes."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if packed := [part.filename for part in archive.infolist() if part.compress_type != zipfile.ZIP_STORED]:
                raise ValueError(f"{packed[0]} in it is compressed, as torch writes none")


def read_tensors(file: Path) -> object:
    """Reads a .safetensors file, or a .pt or .ckpt of tensors and plain values; no code in it is run.

    Raises ValueError for a file that is damaged or holds anything else.
    """
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is no whole safetensors file: {error}.") from error
    try:
        require_unpacked(file)
        # DiT's train.py saves an argparse.Namespace with the weights: a bag of plain values, safe to build.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:      # torch, zipfile and pickle each raise their own
        raise ValueError(f"{file} cannot be read as weights alone ({_first_line(error)}). Only tensors are loaded, "
                         f"since unpickling anything else could run code; save its state dict as .safetensors."
                         ) from error


def read_statistics(file: Path) -> Convention:
    """Reads LightningDiT's latents_stats.pt, tensors mean and std; raises ValueError for anything else."""
    try:
        held = read_tensors(file)
        mean, std = (tuple(held[key].double().flatten().tolist()) for key in ("mean", "std"))
        return Convention(latents_mean=mean, latents_std=std)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} does not hold tensors mean and std, a number a channel: "
                         f"{_first_line(error)}.") from error


# ---- users' own code ------------------------------------------------------------------------------------------------


def _is_torchscript(file: Path) -> bool:
    """Tells TorchScript from weights: both are zips, and only the first holds code."""
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return any(name.endswith("/constants.pkl") or "/code/" in name for name in archive.namelist())


def _python(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    module, _, function = name.removeprefix(PYTHON).rpartition(".")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"autoencoder={name} is not python:module.function of a module that Python finds ({error}): "
                         f"set PYTHONPATH.") from error
