"""Other people's files: fetched from a hub, read as tensors without running code in them, or run as TorchScript."""

import argparse
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from runtime.files import refuse_pointer
from runtime.schema import first_line

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")


def from_hub(repo: str, *names: str, remedy: str) -> Path:
    """Returns the folder with files of a Hugging Face repository, downloaded once; raises ValueError with a remedy."""
    from huggingface_hub import hf_hub_download

    for cached_only in (True, False):  # files in the cache need no network
        try:
            [*_, last] = [hf_hub_download(repo, name, local_files_only=cached_only) for name in names]
            return Path(last).parent
        except Exception as error:  # huggingface_hub and its HTTP client each raise their own
            if not cached_only:
                raise ValueError(f"{' and '.join(names)} of {repo} could not be downloaded from the Hugging Face hub "
                                 f"({first_line(error)}): {remedy}") from error


def read_tensors(file: Path) -> object:
    """Reads a .safetensors file, or a .pt or .ckpt of tensors and plain values; no code in it is run."""
    refuse_pointer(file)
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                names = opened.metadata() or {}  # save_model stores one of the tensors that share memory, and all names
            tensors = load_file(file)
            return tensors | {name: tensors[kept] for name, kept in names.items() if kept in tensors}
        # DiT's train.py saves an argparse.Namespace with the weights: a bag of plain values, safe to build.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # torch, safetensors, zipfile and pickle each raise their own
        raise ValueError(f"{file} cannot be read as weights: {first_line(error)}. Copy it again, or save its state "
                         f"dict as .safetensors where it was made.") from error


def check_finite(state: Mapping[str, Tensor], whose: object) -> None:
    """Raises ValueError for values that are not finite."""
    if damaged := [key for key, value in state.items() if not value.isfinite().all()]:
        raise ValueError(f"{whose} holds values that are not finite in {len(damaged)} of {len(state)} tensors, "
                         f"{damaged[0]} first: choose an earlier checkpoint.")


def is_torchscript(file: Path) -> bool:
    """True if a file holds a TorchScript program: it is a zip, as weights are, but with code in it."""
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return any(name.endswith("/constants.pkl") or "/code/" in name for name in archive.namelist())


def load_torchscript(file: Path, device: torch.device | str = "cpu") -> torch.nn.Module:
    """Loads a TorchScript file, which is a program, so the user must trust it."""
    refuse_pointer(file)
    try:
        return torch.jit.load(file, map_location=device).eval()
    except Exception as error:  # torch has several
        raise ValueError(f"{file} is not a complete TorchScript file: {first_line(error)}") from error