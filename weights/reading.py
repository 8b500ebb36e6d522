"""Other people's files, fetched from a hub and read as tensors without running code; functions of the user's own."""

import argparse
import importlib
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from runtime.files import open_plain, refuse_pointer
from runtime.schema import first_line
from runtime.untrusted import reading

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
PYTHON = "python:"  # python:module.function
MOST_PICKLED = 2**23  # bytes of the pickle in a .pt, each of which may become a list; 1,000 tensors take 200,000


# A repository of the Hugging Face Hub, user/name: before it its address, after it a revision and a place inside it.
REPOSITORY = re.compile(r"(?P<address>https?://(?:huggingface\.co|hf\.co)/|hf://)?(?P<repo>\w[\w.-]*/\w[\w.-]*)"
                        r"(?:(?:@|/(?:tree|blob|resolve)/)(?P<revision>[\w.-]+))?(?:/(?P<inside>[^?#]+?))?/?(?:[?#].*)?")


def how_to_download(name: str, *patterns: str) -> str:
    """Writes how to download what a name or an address means: all of it, or its files of these patterns.

    Returns an empty string for what can be neither, such as a path in a folder that is here.
    """
    match = REPOSITORY.fullmatch(name)
    if not match or not match["address"] and (name.endswith(SUFFIXES) or Path(match["repo"]).parent.exists()):
        return " Download the file, then name it." if "://" in name else ""
    _, repo, revision, inside = match.groups()
    folder = repo.partition("/")[2]
    patterns = [inside if inside.endswith(SUFFIXES) else f"{inside}/*"] if inside else patterns
    options = [f"--include '{pattern}'" for pattern in patterns] + ([f"--revision {revision}"] if revision else [])
    return (f" If {repo} is on the Hugging Face Hub, run (with internet) `{' '.join(['hf download', repo, *options])} "
            f"--local-dir {folder}`, then name ./{Path(folder, inside or '')} instead.")


def from_hub(repo: str, *names: str, remedy: str) -> Path:
    """Returns the folder with files of a Hugging Face repository, downloaded once; raises ValueError with a remedy."""
    from huggingface_hub import hf_hub_download

    empty: list[Path] = []  # which a full disk or a power cut leaves in the cache
    for cached_only in (True, False):  # files in the cache need no network
        try:
            found = [Path(hf_hub_download(repo, name, local_files_only=cached_only, force_download=bool(empty)))
                     for name in names]
            if not (empty := [file for file in found if not file.stat().st_size]):
                return found[-1].parent
        except Exception as error:  # huggingface_hub and its HTTP client each raise their own
            if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
                remedy = "check its name, run `hf auth login`, and accept the terms on its page."
            if not cached_only:
                why = f"{empty[0]} is empty, and " if empty else ""
                raise ValueError(f"{why}{' and '.join(names)} of {repo} could not be downloaded from the Hugging Face "
                                 f"Hub ({first_line(error)}): {remedy.strip()}") from error
    raise ValueError(f"{empty[0]} is empty, as {repo} has it: {remedy.strip()}")


def read_tensors(file: Path) -> object:
    """Reads a .safetensors file, or a .pt or .ckpt of tensors and plain values; no code in it is run.

    Tensors are ordinary ones, with no more elements than their storage, in nested dicts and lists. Text and numbers are
    kept, and of anything else only the name of its type.
    """
    refuse_pointer(file)
    with reading(file, "a file of weights", "copy it again, or save its state dict as .safetensors where it was made"):
        open_plain(file).close()
        if file.suffix == ".safetensors":
            return load_file(file)
        if is_zip := zipfile.is_zipfile(file):
            check_archive(file)
        # DiT's train.py saves an argparse.Namespace with the weights: a bag of plain values, safe to build.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return plain(torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip), {})


def check_archive(file: Path) -> None:
    """Raises ValueError for a .pt whose members are packed, or with a pickle that would take more than a gigabyte."""
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{info.filename} is compressed, as torch.save never does")
        if info.filename.endswith("/data.pkl") and info.file_size > MOST_PICKLED:
            raise ValueError(f"{info.filename} has {info.file_size:,} bytes, more than {MOST_PICKLED:,}")


def plain(value: object, seen: dict[int, object]) -> object:
    """Keeps dicts, lists, tensors, text and numbers of what a pickle held; raises ValueError for a tensor that lies.

    `seen` has what was converted before, as one object may lie in many places, or in itself.
    """
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_meta or value.is_quantized or value.is_nested:
            raise ValueError(f"it holds a tensor of {tuple(value.shape)} that is sparse, quantized or without values")
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(f"it holds a tensor of {tuple(value.shape)}, which has more elements than are stored")
        return value
    if isinstance(value, Mapping | list | tuple):
        if id(value) not in seen:  # while its items are converted, it may be met again
            seen[id(value)] = kept = {} if isinstance(value, Mapping) else []
            if isinstance(value, Mapping):
                kept.update((key, plain(item, seen)) for key, item in value.items())
            else:
                kept.extend(plain(item, seen) for item in value)
        return seen[id(value)]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return type(value).__name__


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
