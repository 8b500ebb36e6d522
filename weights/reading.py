"""Other people's files, fetched from a hub and read as tensors without running code; functions of the user's own."""

import argparse
import importlib
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from runtime.files import refuse_pointer
from runtime.schema import first_line

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
PYTHON = "python:"  # python:module.function


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


def load_function(setting: str, name: str) -> tuple[Callable, Path]:
    """Imports the function that `python:module.function` names, and returns it and its module's file.

    This runs the module's code, so the name must be the user's own, not a file's. Raises ValueError with the setting if
    there is no such function.
    """
    module, _, function = name.removeprefix(PYTHON).rpartition(".")
    try:
        imported = importlib.import_module(module)
        return getattr(imported, function), Path(imported.__file__)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{setting}={name} is not python:module.function with a module that Python can import "
                         f"({error}): start the command with PYTHONPATH=<the folder of the module's file>.") from error
