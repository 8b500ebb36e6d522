"""Other people's files, fetched from a hub and read as tensors without running code; functions of the user's own."""

import argparse
import importlib
import inspect
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from runtime.files import open_plain, refuse_pointer
from runtime.schema import first_line
from runtime.untrusted import reading

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
PYTHON = "python:"  # python:module.function

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
    inner = [inside if inside.endswith(SUFFIXES) else f"{inside}/*"] if inside else patterns
    options = [f"--include '{pattern}'" for pattern in inner] + ([f"--revision {revision}"] if revision else [])
    return (f" If {repo} is on the Hugging Face Hub, run (with internet) `{' '.join(['hf download', repo, *options])} "
            f"--local-dir {folder}`, then name ./{Path(folder, inside or '')} instead.")


def from_hub(repo: str, *names: str, remedy: str) -> Path:
    """Returns the folder with files of a Hugging Face repository, downloaded once; raises ValueError with a remedy."""
    import huggingface_hub

    found = [huggingface_hub.try_to_load_from_cache(repo, name) for name in names]  # this needs no network
    try:
        if not all(isinstance(file, str) for file in found):
            found = [huggingface_hub.hf_hub_download(repo, name) for name in names]
    except Exception as error:  # huggingface_hub and its HTTP client each raise their own
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            remedy = "check its name, run `hf auth login`, and accept the terms on its page."
        raise ValueError(f"{' and '.join(names)} of {repo} could not be downloaded from the Hugging Face Hub "
                         f"({first_line(error)}): {remedy.strip()}") from error
    files = [Path(str(file)) for file in found]
    if empty := [file for file in files if not file.stat().st_size]:  # by a full disk or a power cut
        raise ValueError(f"{empty[0].resolve()} is empty: delete it, and it is downloaded again.")
    return files[0].parent


def read_tensors(file: Path) -> Any:
    """Reads a .safetensors file, or a .pt or .ckpt of tensors and plain values; no code in it is run.

    Raises ValueError for any other file, and for a tensor with more elements than its storage.
    """
    refuse_pointer(file)
    with reading(file, "a file of weights", "copy it again, or save its state dict as .safetensors where it was made"):
        open_plain(file).close()
        if file.suffix == ".safetensors":
            return load_file(file)
        # DiT's train.py saves an argparse.Namespace with the weights: a bag of plain values, safe to build.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        for _, value in entries([content]):
            if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_meta or value.is_quantized
                                              or value.nbytes > value.untyped_storage().nbytes()):
                raise ValueError(f"it holds a tensor of {tuple(value.shape)} that is sparse or quantized, or has more "
                                 f"elements than are stored")
        return content


def entries(content: object) -> Iterator[tuple[object, object]]:
    """Yields the names and values in dictionaries, lists and argparse's namespaces, at any depth."""
    waiting, seen = [content], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:  # one may lie in many places, or in itself
            seen.add(id(node))
            node = vars(node) if isinstance(node, argparse.Namespace) else node
            items = [*(node.items() if isinstance(node, Mapping) else
                       enumerate(node) if isinstance(node, list | tuple) else ())]
            waiting += [value for _, value in items]
            yield from items


def check_finite(state: Mapping[str, Tensor], whose: object) -> None:
    """Raises ValueError for values that are not finite."""
    if damaged := [key for key, value in state.items() if not value.isfinite().all()]:
        raise ValueError(f"{whose} holds values that are not finite in {len(damaged)} of {len(state)} tensors, "
                         f"{damaged[0]} first: choose an earlier checkpoint.")


def load_function(setting: str, name: str) -> tuple[Callable[..., Any], Path]:
    """Imports the function that `python:module.function` names, and returns it and its module's file.

    This runs the module's code, so the name must be the user's own, not a file's. Raises ValueError with the setting if
    there is no such function.
    """
    module, _, function = name.removeprefix(PYTHON).rpartition(".")
    try:
        imported = importlib.import_module(module)
        return getattr(imported, function), Path(inspect.getfile(imported))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{setting}={name} is not python:module.function with a module that Python can import "
                         f"({error}): start the command with PYTHONPATH=<the folder of the module's file>.") from error
