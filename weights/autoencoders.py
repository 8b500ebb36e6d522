"""Loads autoencoders by name: pixel space, diffusers folders, LDM files such as VA-VAE's, and users' own decoders."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import torch

from autoencoder import SD_VAE_SCALE, Autoencoder, Convention, DiffusersAutoencoder, Identity, OwnDecoder
from runtime.files import refuse_pointer, sha256
from runtime.schema import ConventionRecord, read, read_json, typed
from runtime.untrusted import reading
from weights.reading import PYTHON, from_hub, how_to_download, load_function, read_tensors

HUB_NAMES = {"sd_vae_ema": "stabilityai/sd-vae-ft-ema", "sd_vae_mse": "stabilityai/sd-vae-ft-mse"}
NONE = "none"           # the name for latents that only their owner can decode
WEIGHTS = "diffusion_pytorch_model"  # what diffusers calls the file, with a variant as in WEIGHTS.fp16.safetensors
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
    file = find_weights(name)
    refuse_pointer(file)
    convention = convention or own_convention(name) or Convention()
    vae = _from_ldm(file).to(dtype) if Path(name).is_file() else _from_folder(file, dtype)
    return DiffusersAutoencoder(name, vae, device, convention)


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
    if runs_code(name) and not trusted:
        raise ValueError(f"autoencoder={name} runs code, so it is loaded only if the command names it, but here a "
                         f"file does: set {typed('autoencoder', name)} if you trust it.")
    if runs_code(name):
        loaded: Autoencoder = OwnDecoder(name, load_function("autoencoder", name)[0], shape, device)
        loaded.convention = convention or loaded.convention
    else:
        loaded = load_autoencoder(name, device, dtype, convention)
    if loaded.channels != shape[0]:
        raise ValueError(f"autoencoder={name} decodes latents of {loaded.channels} channels, but these have "
                         f"{shape[0]}: set the autoencoder that made these latents.")
    loaded.decode_batch_size = batch_size
    return loaded


def runs_code(name: str) -> bool:
    """True if loading an autoencoder of this name runs code: if it is a Python function."""
    return name.startswith(PYTHON)


def sha256_of(name: str) -> str | None:
    """Returns the hash of the weights of an autoencoder that is in use, or of the module of a decoder of one's own.

    It is None for `identity` and `none`, which have no file, and where the file is gone by now.
    """
    if name in ("identity", NONE):
        return None
    try:
        return sha256(load_function("autoencoder", name)[1] if runs_code(name) else find_weights(name))
    except (ValueError, OSError):
        return None


def own_convention(name: str) -> Convention | None:
    """Returns an autoencoder's published convention without its weights, or None for a decoder that is code."""
    if name == "identity":
        return Convention()
    if name in HUB_NAMES:
        return Convention(SD_VAE_SCALE)
    if name == NONE or runs_code(name):
        return None
    file = Path(name) if Path(name).is_file() else find_folder(name) / "config.json"
    if Path(name).is_file() and (statistics := file.with_name(STATISTICS)).is_file():
        return read_statistics(statistics)
    if not (beside := file.with_name("config.json")).is_file():
        scale = json.dumps({"_class_name": "AutoencoderKL", "scaling_factor": SD_VAE_SCALE})
        raise ValueError(f"autoencoder={name} does not record how its latents are scaled: put its {STATISTICS} next to "
                         f"it, or type its scale, which is {SD_VAE_SCALE} for Stable Diffusion 1 and 2 and 0.13025 for "
                         f"SDXL, as in: echo '{scale}' > {shlex.quote(str(beside))}")
    config = _read_config(file)
    record = {**config, "scale": config["scaling_factor"], "shift": config.get("shift_factor") or 0.0}
    return Convention.read(read(ConventionRecord, record, f"{beside}: ").model_dump())


# ---- its file -------------------------------------------------------------------------------------------------------


def find_folder(name: str) -> Path:
    """Finds the folder of config.json that a name means, itself or vae/ of a pipeline's; raises ValueError for none."""
    for folder in (Path(name), Path(name, "vae")):
        if (folder / "config.json").is_file():
            return folder
    to_type = how_to_download(name, "vae/*", "config.json", f"{WEIGHTS}*.safetensors")
    raise ValueError(f"autoencoder={name} is neither one of {', '.join(['identity', *HUB_NAMES])} nor a file of "
                     f"weights, nor a folder with config.json or vae/config.json.{to_type}")


def find_weights(name: str) -> Path:
    """Finds the weights that a name means: a file, or the one in a folder, or in vae/ of a pipeline's folder.

    Those of HUB_NAMES are downloaded once. Raises ValueError for a name that is none of these, and for a folder without
    weights, or with several variants alone.
    """
    usual = f"{WEIGHTS}.safetensors"
    if repo := HUB_NAMES.get(name):
        return from_hub(repo, "config.json", usual, remedy=how_to_download(repo, "config.json", usual)) / usual
    if Path(name).is_file():
        return Path(name)
    folder = find_folder(name)
    files = [path.name for path in folder.glob(f"{WEIGHTS}*.safetensors")]
    if usual not in files and len(files) != 1:
        found = " and ".join(sorted(files)) or f"no {usual}"
        raise ValueError(f"{folder} holds {found}: get {usual} from where config.json is from. No pickle, such as "
                         f"{WEIGHTS}.bin, is read.")
    return folder / (usual if usual in files else files[0])


# ---- diffusers ------------------------------------------------------------------------------------------------------


def _read_config(file: Path) -> dict[str, Any]:
    """Reads the config.json beside a file of weights. Raises ValueError if it is not an AutoencoderKL's."""
    config = read_json(file.with_name("config.json"))
    if config.get("_class_name") != "AutoencoderKL":
        raise ValueError(f"{file.parent} has the class {config.get('_class_name')}, but only AutoencoderKL can be "
                         f"read: set autoencoder= to another, or to a decoder of your own.")
    return {"scaling_factor": SD_VAE_SCALE, **config}  # an older config lacks it


def _from_folder(file: Path, dtype: torch.dtype) -> torch.nn.Module:
    from diffusers import AutoencoderKL  # slow: takes seconds

    _read_config(file)
    with reading(file, "a file of weights that fit config.json beside it", "copy both again"):
        vae, report = AutoencoderKL.from_pretrained(
            file.parent, use_safetensors=True, torch_dtype=dtype, local_files_only=True, output_loading_info=True,
            variant=file.name.removeprefix(WEIGHTS).removesuffix(".safetensors").removeprefix(".") or None)
        if lacking := report["missing_keys"]:  # diffusers only warns, and leaves them random
            raise ValueError(f"the weights lack {len(lacking)} tensors, {lacking[0]} first")
    return vae


# ---- LDM files, such as VA-VAE's ------------------------------------------------------------------------------------


def ldm_key(key: str, num_levels: int) -> str:
    """Translates a key of diffusers' AutoencoderKL to the one in latent diffusion's AutoencoderKL (CompVis)."""
    def level(match: re.Match[str]) -> str:
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
    with reading(file, "a file with all tensors of latent diffusion's AutoencoderKL", f"diffusers saves others as "
                 f"{WEIGHTS}.safetensors, beside config.json: name their folder"):
        for key in ("state_dict", "model"):
            state = state.get(key, state)
        state = {str(key).removeprefix("first_stage_model."): value for key, value in state.items()}  # of a pipeline
        count = max(1, sum(f"encoder.down.{i}.block.0.conv1.weight" in state for i in range(64)))
        kinds = ["Attn" if f"encoder.down.{i}.attn.0.q.weight" in state else "" for i in range(count)]
        with torch.device("meta"):
            vae: Any = AutoencoderKL(
                block_out_channels=tuple(len(state[f"encoder.down.{i}.block.0.conv1.weight"]) for i in range(count)),
                layers_per_block=sum(f"encoder.down.0.block.{i}.conv1.weight" in state for i in range(64)),
                latent_channels=len(state["post_quant_conv.weight"]),
                down_block_types=tuple(f"{kind}DownEncoderBlock2D" for kind in kinds),
                up_block_types=tuple(f"{kind}UpDecoderBlock2D" for kind in reversed(kinds)))
        # A 1x1 convolution and a linear layer hold the same numbers.
        vae.load_state_dict({key: state[ldm_key(key, count)].float().reshape(value.shape)
                             for key, value in vae.state_dict().items()}, assign=True)
    return vae


def read_statistics(file: Path) -> Convention:
    """Reads LightningDiT's latents_stats.pt with tensors mean and std. Raises ValueError for anything else."""
    with reading(file, "a file with tensors mean and std, one number per channel"):
        tensors = read_tensors(file)
        mean, std = (tuple(tensors[key].double().flatten().tolist()) for key in ("mean", "std"))
        return Convention(latents_mean=mean, latents_std=std)
