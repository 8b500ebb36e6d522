"""Images to score, stored or sampled, and the record of what they are.

Stored images come from a folder, a zip, tars, parquet files, an npz or an npy, or are decoded from latents.
"""

import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from torch import Tensor
from tqdm import tqdm

from dit import DiT
from latents.decoding import is_transparent, open_image
from latents.folder import open_latents
from latents.images import open_source
from runtime import files
from runtime.device import DType
from runtime.untrusted import Arrays, read_header, reading
from sampling.generate import SAMPLING_VERSION, Batch, generate
from sampling.sampler import Sampler
from weights import autoencoders

ARRAYS = (".npz", ".npy")
BALANCED = "class seed % number of classes"
SAMPLED_RULE = "uint8 = floor(clip(127.5 x + 128, 0, 255))"
Alpha = Literal["drop", "white"]


@dataclass
class StoredImages:
    """Images of one size, and the record of what they are."""

    count: int
    read: Callable[[np.ndarray], Tensor]    # indices (B,) -> uint8 (B, H, W, 3)
    record: dict[str, Any]
    shuffled: np.ndarray | None = None      # all indices in a fixed shuffled order; None: they are scored as stored
    rule: str = "as stored"                 # how pixels were rounded to 8 bits

    def choose(self, num: int) -> np.ndarray:
        """Picks `num` indices, evenly spread, in the order in which they are scored."""
        chosen = evenly(self.count, num)
        return chosen if self.shuffled is None else self.shuffled[np.isin(self.shuffled, chosen)]

    def share(self, state: Accelerator | PartialState, chosen: np.ndarray, batch_size: int) -> Iterator[Batch]:
        """Reads this rank's share of the `chosen` images, batch by batch, with their places in `chosen`."""
        order = np.argsort(chosen)  # as the files lie on disk, since a row of parquet is read with its row group
        for start in range(state.process_index * batch_size, len(chosen), batch_size * state.num_processes):
            places = order[start : start + batch_size]
            yield torch.from_numpy(places), self.read(chosen[places])


@dataclass
class ImageSet:
    """Images to score, sampled or stored."""

    count: int
    record: dict[str, Any]      # what they are
    rule: str                   # how pixels were rounded to uint8
    batches: Iterator[Batch]    # this rank's share; over all ranks each of 0 … count - 1 once, and copies, which are -1


def evenly(count: int, num: int) -> np.ndarray:
    """Picks `num` of `count` indices, evenly spread, as sources are sorted by class and the first images show few.

    Unlike `latents.listing.spread` it may leave out the last index. Scores depend on the choice.
    """
    return np.arange(num) * count // num


# ---- stored ---------------------------------------------------------------------------------------------------------


def open_images(
    state: Accelerator | PartialState,
    key: str,                               # the setting that names the path, for messages
    path: str,
    resolution: int | None = None,
    autoencoder: str | None = None,         # decodes latents; None: the one in their folder's record
    decode_batch_size: int | None = None,
    alpha: Alpha | None = None,             # of files; None: none may be transparent
) -> StoredImages:
    """Opens a folder or archive of images, an npz with `arr_0`, an npy, or latents; only the first two are scaled.

    Raises ValueError for what cannot be scored, and for fewer than two images, which have no covariance.
    """
    if are_files(path):
        images = open_files(state, key, path, resolution, alpha)
    elif Path(path).suffix in ARRAYS:
        images = open_array(key, path)
    else:
        images = open_decoded(path, state.device, autoencoder, decode_batch_size)
    if images.count < 2:
        raise ValueError(f"{key}={path} holds {images.count} images, but at least two are needed.")
    return images


def are_files(path: str) -> bool:
    """True if a path is a folder or archive of images, which can be scaled when they are read."""
    return Path(path).suffix not in ARRAYS and not (Path(path) / "metadata.json").is_file()


def open_array(key: str, path: str) -> StoredImages:
    """Opens the images of an npy, or under arr_0 of an npz; each is read when it is needed."""
    kind, file, place = Path(path).suffix[1:], Path(path), f"{key}={path}"
    files.refuse_pointer(file)
    with reading(place, f"a complete {kind} of images"):
        arrays = None if kind == "npy" else Arrays(file)
    if arrays and "arr_0" not in arrays.infos:
        raise ValueError(f"{place} holds {', '.join(arrays.infos) or 'nothing'}, but no images: they are uint8 "
                         f"(N, H, W, 3) under arr_0.")
    with reading(place, f"a complete {kind} of images, uint8 (N, H, W, 3) in C order"):
        # Both remain open, as `read` uses them.
        opened = arrays.open("arr_0") if arrays else files.open_plain(file)
        stored = arrays.infos["arr_0"].file_size if arrays else os.path.getsize(file)
        shape, fortran, dtype = read_header(opened, stored)
        if dtype != np.uint8 or fortran or len(shape) != 4 or shape[3] != 3 or min(shape) < 1:
            raise ValueError(f"it holds an array of {dtype} {shape}{' in Fortran order' * fortran}")
        first, size = opened.tell(), math.prod(shape[1:])
        if size > files.MOST_BYTES:
            raise ValueError(f"its images are {shape[2]}x{shape[1]}")

    def read(indices: np.ndarray) -> Tensor:
        pixels = bytearray()
        with reading(place, f"complete before image {indices[-1] + 1}"):
            for index in indices.tolist():
                opened.seek(first + index * size)  # in a zip this reads all between, and starts over to go back
                pixels += opened.read(size)
            return torch.frombuffer(pixels, dtype=torch.uint8).view(len(indices), *shape[1:])

    record = {"path": str(path), "sha256": files.sha256(Path(path)), "size": list(shape[1:3]), "order": "as stored"}
    return StoredImages(shape[0], read, record)


def open_decoded(
    path: str, device: torch.device, autoencoder: str | None = None, decode_batch_size: int | None = None,
) -> StoredImages:
    """Opens a latent folder as images that its autoencoder decodes; moments are decoded at their means."""
    latents = open_latents(path)
    name = latents.autoencoder if latents.autoencoder == "identity" else autoencoder or latents.autoencoder
    decoder = autoencoders.load_decoder(name, latents.shape, latents.convention, device, batch_size=decode_batch_size,
                                        trusted=autoencoder is not None)

    def read(indices: np.ndarray) -> Tensor:
        stored = torch.from_numpy(latents.read(indices)[0]).to(device).float()
        return decoder.decode(stored[:, : latents.shape[0]])

    side = [length * decoder.downsample for length in latents.shape[1:]]
    record = {"path": str(path), "fingerprint": latents.fingerprint, "size": side, "autoencoder": decoder.name,
              "autoencoder_sha256": autoencoders.sha256_of(decoder.name), "order": "shuffled by numpy's RandomState(0)"}
    return StoredImages(latents.count, read, record, np.random.RandomState(0).permutation(latents.count), SAMPLED_RULE)


def open_files(
    state: Accelerator | PartialState, key: str, path: str, resolution: int | None, alpha: Alpha | None = None,
) -> StoredImages:
    """Opens a folder or archive of images, which are scored in the order of their hashes, whatever their names are.

    The Inception Score is a mean over splits, so they must not be sorted by class. All hashes and sizes must be known
    before the first image is scored, so ranks share the reading.
    """
    source, pool = open_source(path, labels="none", key=key), ThreadPoolExecutor(8)

    def look(index: int) -> tuple[int, bytes, tuple[int, int], bool]:
        with reading(f"{key}={path}: {source.names[index]}", "an image", "replace it"):
            data = source.read(source.names[index])
            with open_image(data) as image:  # the header only, unless it has an alpha channel
                return index, hashlib.sha256(data).digest(), image.size, not alpha and is_transparent(image)

    mine = range(state.process_index, len(source), state.num_processes)
    looked: list[tuple[int, bytes, tuple[int, int], bool]] = []
    for start in tqdm(range(0, len(mine), 256), desc="looking at files", unit=" × 256 img", delay=2, leave=False,
                      disable=not state.is_main_process or None):
        looked += pool.map(look, mine[start : start + 256])
    _, digests, sizes, transparent = zip(*sorted(gather_object(looked)), strict=True)
    if any(transparent):
        raise ValueError(f"{key}={path}: {sum(transparent):,} of {len(source):,} files are partly transparent, such as "
                         f"{source.names[transparent.index(True)]}: set alpha=drop to keep their colours, as ADM, "
                         f"pytorch-fid and clean-fid do, or alpha=white to lay them over white"
                         f"{'. fid.py reference_from= makes an npz so' * ('.' in key)}.")
    copies, counts = len(digests) - len({*digests}), Counter(sizes)
    if copies > len(digests) // 100:
        state.print(f"{key}={path}: {copies:,} of {len(digests):,} files are copies of others, as if seeds were used "
                    f"twice.")
    if len(counts) > 1 and resolution is None:
        most = ", ".join(f"{count} of {width}x{height}" for (width, height), count in counts.most_common(3))
        raise ValueError(f"{key}={path} holds images of {len(counts)} sizes ({most}): resize them to one, or set "
                         f"resolution= to scale and crop them by ADM's rule.")

    def pixels(index: int) -> np.ndarray:
        with reading(f"{key}={path}: {source.names[index]}", "an image", "replace it"):
            return source.pixels(index, resolution, alpha)

    def read(indices: np.ndarray) -> Tensor:
        return torch.from_numpy(np.stack(list(pool.map(pixels, indices.tolist()))))

    size = [resolution] * 2 if resolution else list(sizes[0][::-1])
    record = {"path": str(path), "sha256": hashlib.sha256(b"".join(digests)).hexdigest(), "size": size,
              "order": "shuffled by the files' SHA-256"} | ({"alpha": alpha} if alpha else {})
    keys = [hashlib.sha256(digest + bytes(8)).digest() for digest in digests]
    return StoredImages(len(source), read, record, np.array(sorted(range(len(keys)), key=keys.__getitem__)))


# ---- sampled --------------------------------------------------------------------------------------------------------


def weights_record(autoencoder: str, classes: list[int], num_classes: int, **more: object) -> dict[str, Any]:
    """Records weights, decoder and classes; `more` are what checkpoint, step and weights they are."""
    return {**more, "classes": "all" if classes == list(range(num_classes)) else classes, "autoencoder": autoencoder,
            "autoencoder_sha256": autoencoders.sha256_of(autoencoder)}


def sampled_images(
    state: Accelerator | PartialState,
    net: DiT,
    sampler: Sampler,
    decode: Callable[[Tensor], Tensor],     # latents (B, C, h, w) -> images (B, H, W, 3) uint8
    seeds: list[int],                       # of all ranks; each is one image
    labels: list[int],                      # one a seed
    *,
    batch_size: int,                        # images a rank samples at once
    size: list[int] | None = None,          # height and width of the images
    precision: DType = "fp32",              # of the network, under autocast
    outline: DiT | None = None,             # a network of the same shapes to count costs on; None: `net`
    weights: Mapping[str, Any] | None = None,   # what `weights_record` made
) -> ImageSet:
    """Returns images that a network samples from `seeds`, and the record that a result needs to be compared."""
    linear, attention = sampler.cost(outline or net)
    record = {
        **(weights or {}), **sampler.record(), "precision": precision, "size": size, "seeds": f"{seeds[0]}-{seeds[-1]}",
        "labels": BALANCED, "order": "of the seeds", "sampling_version": SAMPLING_VERSION,
        "evaluations": sampler.passes(outline or net).total(),  # of an image, as are
        "multiply_adds": {"linear": linear, "attention": attention},
    }
    batches = generate(state, net, sampler, decode, seeds, labels, batch_size=batch_size, precision=precision)
    return ImageSet(len(seeds), record, SAMPLED_RULE, batches)
