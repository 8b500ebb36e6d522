"""Loads autoencoders by name: pixel space, diffusers folders, LDM files such as VA-VAE's, and users' own decoders."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path

import torch

from autoencoder import SAMPLES_ONLY, SD_VAE_SCALE, Autoencoder, Convention, DiffusersAutoencoder, Identity, OwnDecoder
from runtime.files import refuse_pointer
from runtime.schema import as_recorded, first_line, read_json
from weights.reading import from_hub, is_torchscript, load_torchscript, read_tensors

HUB_NAMES = {"sd_vae_ema": "stabilityai/sd-vae-ft-ema", "sd_vae_mse": "stabilityai/sd-vae-ft-mse"}
# Diffusers classes for images in [-1, 1] that record their latents' scale in the config.
CLASSES = ("AutoencoderKL", "AutoencoderTiny", "AutoencoderDC")
NONE = "none"           # the name for latents that only their owner can decode
PYTHON = "python:"      # python:module.function
STATISTICS = "latents_stats.pt"  # written by LightningDiT: the mean and standard deviation of each channel


def load_autoencoder(
    name: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
    convention: Convention | None = None,
) -> Autoencoder:
    """Loads an autoencoder: `identity`, `sd_vae_ema`, `sd_vae_mse`, a local diffusers folder, or an LDM file.

    Never runs code from a file. `dtype` is the network's, but moments are returned in float32. `convention` is that of
    existing latents; None means the autoencoder's own. Raises ValueError for an unknown name, and for weights that
    cannot be read or downloaded.
    """
    if runs_code(name):
        raise ValueError(f"autoencoder={name} can only decode: choose another here.")
    if name == NONE:
        raise ValueError("autoencoder=none: these latents cannot be decoded. Set what decodes them, as in "
                         "autoencoder=path/to/folder, or save the latents with sample.py out=x.npz latents=true.")
    if name == "identity":
        return Identity(device, convention)
    if Path(name).is_file():
        with as_recorded(Path(name)):
            vae = _from_ldm(Path(name)).to(dtype)
        return DiffusersAutoencoder(name, vae, device, convention or own_convention(name))
    folder = name
    if repo := HUB_NAMES.get(name):
        folder = from_hub(repo, "config.json", "diffusion_pytorch_model.safetensors", remedy=(
            f"on a machine with internet, run `hf download {repo} config.json diffusion_pytorch_model.safetensors "
            f"--local-dir {name}`, copy that folder here, and set autoencoder=path/to/{name}."))
    return DiffusersAutoencoder(name, _from_folder(str(folder), dtype), device, convention)


def load_decoder(
    name: str,
    shape: tuple[int, int, int],            # of the latents: (C, h, w)
    convention: Convention | None,          # the one of the latents; None for the autoencoder's own
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    batch_size: int | None = None,          # images decoded at once; None for about PIXELS_AT_ONCE pixels
    trusted: bool = False,                  # whether the user named it on the command line, rather than a file
) -> Autoencoder:
    """Loads an autoencoder, or a user's own decoder, to decode existing latents of `shape`.

    Latents are unscaled by the `convention` that scaled them, not by the one that the decoder was published with. A
    user's own decoder is code, so it is loaded only if `trusted`. Raises ValueError also if it has other channels.
    """
    if not runs_code(name):
        loaded = load_autoencoder(name, device, dtype, convention)
    elif trusted:
        function = _python(name) if name.startswith(PYTHON) else load_torchscript(Path(name), device)
        loaded = OwnDecoder(name, function, shape, device)
        loaded.convention = convention or loaded.convention
    else:
        raise ValueError(f"autoencoder={name} runs code, so it is loaded only if the command names it, but here a "
                         f"file does: set autoencoder={name} if you trust it.")
    if loaded.channels != shape[0]:
        raise ValueError(f"autoencoder={name} decodes latents of {loaded.channels} channels, but these have "
                         f"{shape[0]}: set the autoencoder that made these latents.")
    loaded.decode_batch_size = batch_size
    return loaded


def runs_code(name: str) -> bool:
    """True if loading an autoencoder of this name runs code: a Python callable or a TorchScript file."""
    return name.startswith(PYTHON) or (Path(name).is_file() and is_torchscript(Path(name)))


def samples_only(name: str) -> bool:
    """True if an autoencoder encodes to values without a distribution. Reads its config, not its weights."""
    if name in HUB_NAMES or name == NONE or runs_code(name) or Path(name).is_file():
        return False
    return name == "identity" or _read_config(name)["_class_name"] in SAMPLES_ONLY


def own_convention(name: str) -> Convention | None:
    """Returns an autoencoder's published convention without its weights, or None for a decoder that is code."""
    if name == "identity":
        return Convention()
    if name in HUB_NAMES:
        return Convention(SD_VAE_SCALE)
    if name == NONE or runs_code(name):
        return None
    if Path(name).is_file():
        if not (statistics := Path(name).with_name(STATISTICS)).is_file():
            raise ValueError(f"autoencoder={name} does not record how its latents are scaled: put its {STATISTICS} "
                             f"next to it.")
        return read_statistics(statistics)
    config = _read_config(name)
    import diffusers  # slow: takes seconds

    with torch.device("meta"):  # the class completes older configs, such as that of sd_vae_ema, which has no scale
        network = getattr(diffusers, config["_class_name"]).from_config(config)
    return Convention.from_config(network.config, name)


# ---- diffusers ------------------------------------------------------------------------------------------------------


def _read_config(folder: str) -> dict:
    """Reads config.json of a diffusers folder. Raises ValueError if its class is not one of CLASSES."""
    if not Path(folder).is_dir():
        names = ", ".join(["identity", *HUB_NAMES])
        raise ValueError(f"autoencoder={folder} is neither one of {names} nor a local folder or file.")
    config = read_json(Path(folder) / "config.json")
    if config.get("_class_name") not in CLASSES:  # no other name is ever looked up in diffusers
        raise ValueError(f"autoencoder={folder} has the class {config.get('_class_name')}, but only "
                         f"{', '.join(CLASSES)} can be read.")
    return config


def _from_folder(folder: str, dtype: torch.dtype) -> torch.nn.Module:
    import diffusers  # slow: takes seconds

    network = getattr(diffusers, _read_config(folder)["_class_name"])
    for file in Path(folder).glob("*.safetensors"):
        refuse_pointer(file)
    try:
        vae, report = network.from_pretrained(
            folder, use_safetensors=True, torch_dtype=dtype, local_files_only=True, output_loading_info=True)
        if lacking := report["missing_keys"]:  # diffusers only warns, and leaves them random
            raise ValueError(f"the weights lack {len(lacking)} tensors, {lacking[0]} first")
    except Exception as error:  # missing, truncated or mismatched weights all raise different types
        raise ValueError(f"autoencoder={folder} has no diffusion_pytorch_model.safetensors that can be read and fits "
                         f"config.json (pickles, .bin, are not loaded; save_pretrained writes safetensors): "
                         f"{first_line(error)}") from error
    return vae


# ---- LDM files, such as VA-VAE's ------------------------------------------------------------------------------------


def ldm_key(key: str, num_levels: int) -> str:
    """Translates a key of diffusers' AutoencoderKL to the one in latent diffusion's AutoencoderKL (CompVis)."""
    def level(match: re.Match) -> str:
        index = int(match[2])  # LDM counts a decoder's levels from the pixels, diffusers from the latent
        return f"down.{index}." if match[1] == "down" else f"up.{num_levels - 1 - index}."

    key = re.sub(r"(down|up)_blocks\.(\d+)\.", level, key)
    for ours, ldm in (
        (r"mid_block\.resnets\.0", "mid.block_1"), (r"mid_block\.resnets\.1", "mid.block_2"),
        (r"mid_block\.attentions\.0", "mid.attn_1"), ("resnets", "block"), ("attentions", "attn"),
        (r"(down|up)samplers\.0\.conv", r"\1sample.conv"), ("conv_shortcut", "nin_shortcut"),
        ("conv_norm_out", "norm_out"), ("group_norm", "norm"), (r"to_([qkv])\.", r"\1."), (r"to_out\.0", "proj_out"),
    ):
        key = re.sub(ours, ldm, key)
    return key


def _from_ldm(file: Path) -> torch.nn.Module:
    """Builds diffusers' AutoencoderKL from latent diffusion's weights: a .pt or .ckpt of tensors, or .safetensors."""
    from diffusers import AutoencoderKL

    state = read_tensors(file)
    for key in ("state_dict", "model"):
        state = state.get(key, state) if isinstance(state, dict) else {}
    levels = [f"encoder.down.{i}" for i in range(64) if f"encoder.down.{i}.block.0.conv1.weight" in state]
    if not levels or "post_quant_conv.weight" not in state:
        raise ValueError(f"autoencoder={file} holds no weights of a latent-diffusion AutoencoderKL, such as "
                         f"encoder.down.0… and post_quant_conv.")
    kinds = ["Attn" if f"{level}.attn.0.q.weight" in state else "" for level in levels]
    options = dict(
        block_out_channels=tuple(len(state[f"{level}.block.0.conv1.weight"]) for level in levels),
        layers_per_block=sum(f"encoder.down.0.block.{i}.conv1.weight" in state for i in range(64)),
        latent_channels=len(state["post_quant_conv.weight"]),
        down_block_types=tuple(f"{kind}DownEncoderBlock2D" for kind in kinds),
        up_block_types=tuple(f"{kind}UpDecoderBlock2D" for kind in reversed(kinds)),
    )
    with torch.device("meta"):
        vae = AutoencoderKL(**options)
    expected = vae.state_dict()
    names = {key: ldm_key(key, len(levels)) for key in expected}
    if lacking := [name for name in names.values() if name not in state]:
        raise ValueError(f"autoencoder={file} lacks {len(lacking)} tensors of an AutoencoderKL, {lacking[0]} first.")
    # A 1x1 convolution and a linear layer hold the same numbers.
    vae.load_state_dict({key: state[name].float().reshape(expected[key].shape) for key, name in names.items()},
                        assign=True)
    return vae


def read_statistics(file: Path) -> Convention:
    """Reads LightningDiT's latents_stats.pt with tensors mean and std. Raises ValueError for anything else."""
    try:
        tensors = read_tensors(file)
        mean, std = (tuple(tensors[key].double().flatten().tolist()) for key in ("mean", "std"))
        return Convention(latents_mean=mean, latents_std=std)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} does not hold tensors mean and std, one number per channel: {first_line(error)}."
                         ) from error


def _python(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    module, _, function = name.removeprefix(PYTHON).rpartition(".")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"autoencoder={name} is not python:module.function with a module that Python can import "
                         f"({error}): set PYTHONPATH.") from error
