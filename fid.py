"""Images -> features -> statistics -> FID, sFID, Inception Score, precision and recall, as ADM's evaluator has them.

    python fid.py checkpoint=runs/x reference=VIRTUAL_imagenet256_labeled.npz num_samples=50000
    accelerate launch fid.py checkpoint=runs/x reference=… features=inception         # all GPUs, Inception on them too
    python fid.py images=FOLDER|ZIP|NPZ reference=…                                    # what somebody else made
    python fid.py reference_from=FOLDER|ZIP|NPZ|LATENTS out=ref.npz                    # statistics, in ADM's keys

Each result is a row of results.jsonl that says exactly what was measured. Options: configs/fid.yaml; what the numbers
mean and why they differ from somebody else's: docs/evaluation.md.
"""

import hashlib
import importlib.metadata
import io
import json
import math
import os
import platform
import struct
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import hydra
import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather, reduce
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from scipy.linalg.lapack import dpstrf
from torch import Tensor
from tqdm import tqdm

import autoencoder as autoencoders
import checkpoint as checkpoints
from data import open_latents
from dit import DiT
from edm import EDM
from features import EXTRACTORS, Extractor, exact_float32, extract
from features import load as load_extractor
from guidance import Guidance
from images import UnreadableImage, open_source
from rf import RF
from sample import (
    DTYPES,
    Batch,
    build_guidance,
    generate,
    guidance_settings,
    labels_of,
    load_trained,
    parse_classes,
    sampler_settings,
    sampling_cost,
)

SPLIT = 5000        # images of one Inception Score; the score of a set is the mean over its splits
NEIGHBOUR = 3       # precision and recall: a ball reaches to the third nearest neighbour
BLOCK = 10000       # rows and columns of distances that ADM's evaluator looks at in one piece
FEATURE_KEYS = {"pool": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}     # in a reference npz

Numbered = Iterator[tuple[Tensor, Tensor]]      # numbers (B,) int64, -1 for a copy; images (B, H, W, 3) uint8


# ---- features -> statistics -----------------------------------------------------------------------------------------


class Moments:
    """Mean and covariance of a stream of features (B, D), in float64.

    Sums are taken about the first batch's mean, so that a mean far from zero costs no digits.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu"):
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.shift, self.sum = torch.zeros((2, size), dtype=torch.float64, device=device)
        self.outer = torch.zeros((size, size), dtype=torch.float64, device=device)

    def add(self, features: Tensor) -> None:
        features = features.to(self.sum.device, torch.float64)
        if self.count == 0:
            self.shift = features.mean(0)
        away = features - self.shift
        self.count += len(away)
        self.sum += away.sum(0)
        self.outer.addmm_(away.T, away)

    def over_ranks(self) -> None:
        """Makes every rank's moments those of all ranks' features together."""
        count, total = (reduce(value, "sum") for value in (self.count.clone(), self.sum + self.count * self.shift))
        mean = total / count
        to_mean = mean - self.shift     # the same sums, about the mean of all
        cross = torch.outer(self.sum, to_mean)
        outer = self.outer - cross - cross.T + self.count * torch.outer(to_mean, to_mean)
        self.count, self.shift, self.sum, self.outer = count, mean, torch.zeros_like(mean), reduce(outer, "sum")

    def mean_and_covariance(self) -> tuple[Tensor, Tensor]:
        """Returns mu (D,) and the unbiased sigma (D, D); raises ValueError for fewer than two images."""
        if self.count < 2:
            raise ValueError(f"{int(self.count)} images have no covariance: at least two are needed.")
        mean = self.sum / self.count
        return self.shift + mean, (self.outer - self.count * torch.outer(mean, mean)) / (self.count - 1)


class ScoreSums:
    """The sums behind the Inception Score of each split of 5000 images, in the order of the images' numbers."""

    def __init__(self, count: int, num_classes: int, device: torch.device | str = "cpu"):
        # Of each split: images, sum of p·log p, and sums of p per class.
        self.sums = torch.zeros((-(-count // SPLIT), 2 + num_classes), dtype=torch.float64, device=device)

    def add(self, numbers: Tensor, probs: Tensor) -> None:
        p = probs.to(self.sums.device, torch.float64)
        rows = torch.cat([torch.ones_like(p[:, :1]), torch.special.entr(p).neg().sum(1, keepdim=True), p], dim=1)
        self.sums.index_add_(0, numbers.to(p.device) // SPLIT, rows)

    def over_ranks(self) -> None:
        self.sums = reduce(self.sums, "sum")

    def score(self) -> float:
        """Returns exp of the mean KL(p(y|x) || p(y)), averaged over the splits (Salimans et al., arXiv 1606.03498)."""
        count, p_log_p, p = self.sums[:, :1], self.sums[:, 1], self.sums[:, 2:]
        return (p_log_p / count[:, 0] + torch.special.entr(p / count).sum(1)).exp().mean().item()


class Tally:
    """All that is kept of one set of images: moments, score sums and, for neighbourhoods, the features themselves."""

    def __init__(self, extractor: Extractor, count: int, device: torch.device | str, keep_pool: bool = False):
        device = "cpu" if torch.device(device).type == "mps" else device      # which has no float64
        self.count, self.device = count, device
        self.moments = {name: Moments(size, device) for name, size in extractor.sizes.items() if name in FEATURE_KEYS}
        self.scores = ScoreSums(count, extractor.sizes["probs"], device) if "probs" in extractor.sizes else None
        self.pools: list[tuple[Tensor, Tensor]] | None = [] if keep_pool else None
        self.pool: Tensor | None = None     # (N, D) float32 in the order of the numbers, once over all ranks

    def add(self, numbers: Tensor, features: dict[str, Tensor]) -> None:
        for name, moments in self.moments.items():
            moments.add(features[name])
        if self.scores is not None:
            self.scores.add(numbers, features["probs"])
        if self.pools is not None:
            self.pools.append((numbers.cpu(), features["pool"].float().cpu()))

    def over_ranks(self) -> None:
        """Brings all ranks' sums together, once; raises ValueError where images are missing."""
        for part in (*self.moments.values(), *([self.scores] if self.scores else [])):
            part.over_ranks()
        if (came := int(self.moments["pool"].count)) != self.count:
            raise ValueError(f"{self.count} images were asked for and {came} came.")
        if self.pools is not None:
            self.pool = torch.empty(self.count, len(self.moments["pool"].sum))
            for numbers, features in gather_uneven(self.pools, self.pool.shape[1], PartialState().device):
                self.pool[numbers] = features
            self.pools = None


def gather_uneven(
    pieces: list[tuple[Tensor, Tensor]], size: int, device: torch.device,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields all ranks' (numbers (n,), rows (n, size)) on the CPU, piece by piece, however many each rank has."""
    if PartialState().num_processes == 1:
        yield from pieces
        return
    numbers = torch.cat([torch.zeros(0, dtype=torch.int64), *(numbers for numbers, _ in pieces)])
    rows = torch.cat([torch.zeros(0, size), *(rows for _, rows in pieces)])
    most = int(gather(torch.tensor([len(numbers)], device=device)).max())
    for start in range(0, most, BLOCK):
        here, there = numbers[start : start + BLOCK], rows[start : start + BLOCK]
        pad = min(BLOCK, most - start) - len(here)
        here = torch.cat([here, torch.full((pad,), -1)])
        there = torch.cat([there, torch.zeros(pad, size)])
        here, there = gather(here.to(device)).cpu(), gather(there.to(device)).cpu()
        yield here[here >= 0], there[here >= 0]


# ---- statistics -> numbers ------------------------------------------------------------------------------------------


def frechet_distance(mu1, sigma1, mu2, sigma2) -> float:
    """Computes |mu1 - mu2|² + tr(sigma1 + sigma2 - 2 (sigma1 sigma2)^½) of two Gaussians (Heusel et al., 1706.08500).

    Means (D,) and covariances (D, D) are tensors or arrays. With sigma1 = A Aᵀ and sigma2 = B Bᵀ the trace of the root
    is the sum of the singular values of Aᵀ B: nothing here is complex or ill-defined where a covariance has not full
    rank, as for fewer images than dimensions.
    """
    given = (mu1, sigma1, mu2, sigma2)
    mu1, sigma1, mu2, sigma2 = (torch.as_tensor(value, dtype=torch.float64).cpu() for value in given)
    root = sum_of_singular_values(square_root(sigma1).T @ square_root(sigma2))
    return ((mu1 - mu2).square().sum() + sigma1.trace() + sigma2.trace() - 2 * root).item()


def square_root(sigma: Tensor) -> Tensor:
    """Factors a covariance (D, D) of rank r as A Aᵀ with A (D, r), by Cholesky's method with pivots."""
    factor, pivots, rank, _ = dpstrf(sigma.numpy(), lower=1)
    A = torch.empty(len(sigma), rank, dtype=torch.float64)
    A[torch.from_numpy(pivots).long() - 1] = torch.from_numpy(factor).tril()[:, :rank]
    return A


def sum_of_singular_values(K: Tensor) -> Tensor:
    """Sums the singular values of K (r, s), as square roots of the eigenvalues of K Kᵀ.

    Beside the largest eigenvalue those below 1e-16 of it are rounding, and a thousand of their roots show in a FID. So
    only the large ones are taken at a time; K is turned away from their vectors, and the others are what is left.
    """
    total, first = K.new_zeros(()), None
    while len(K):
        values, vectors = torch.linalg.eigh(K @ K.T)        # ascending
        first = values[-1] if first is None else first
        if values[-1] <= 1e-28 * first:
            break
        large = values > 1e-8 * values[-1]
        total += values[large].sqrt().sum()
        K = vectors[:, ~large].T @ K
    return total


def norms_in_half(half: Tensor) -> Tensor:
    """Sums the squares of float16 rows (N, D) in float16, in the order in which TensorFlow's reduce_sum does on a CPU.

    Each half of the row goes into 4 accumulators of 8 lanes; only the 8 lanes at the end are added in float32. The
    rounding on the way decides on which side of a ball a feature falls, so ADM's counts come back with this order only.
    """
    squares = torch.nn.functional.pad(half * half, (0, -half.shape[1] % 64))
    lanes = squares.view(len(half), 2, -1, 4, 8)
    total = lanes[:, :, 0]
    for step in range(1, lanes.shape[2]):
        total = total + lanes[:, :, step]
    total = total[:, :, 0] + total[:, :, 1] + total[:, :, 2] + total[:, :, 3]
    total = total.float().sum(2).half()
    return total[:, 0] + total[:, 1]


def squared_distances(u: Tensor, v: Tensor, rows: int = 1000) -> Tensor:
    """Computes squared distances (N, M) between features (N, D) and (M, D), rounded as ADM's evaluator rounds them.

    That is float16 throughout, and float32 where any distance of the block overflows float16. Returns either.
    """
    half_u, half_v = u.half(), v.half()
    distances = torch.empty((len(u), len(v)), dtype=torch.float16, device=u.device)
    norm_v, wide_v = norms_in_half(half_v), half_v.float().T
    for part, block in zip(half_u.split(rows), distances.split(rows), strict=True):
        # float16 products are exact in float32, which is what they are summed in on every device this way.
        block[:] = (norms_in_half(part)[:, None] - 2 * (part.float() @ wide_v).half() + norm_v).clamp_(min=0)
        if not block.isfinite().all():
            return (u.square().sum(1)[:, None] - 2 * u @ v.T + v.square().sum(1)).clamp_(min=0)
    return distances


def radii(features: Tensor) -> Tensor:
    """Computes each feature's squared distance (N,) float32 to its third nearest neighbour among the others (N, D)."""
    found = []
    for here in features.split(BLOCK):
        nearest = torch.full((len(here), NEIGHBOUR + 1), math.inf, device=features.device)     # and the feature itself
        for there in features.split(BLOCK):
            for rows, block in zip(nearest.split(1000), squared_distances(here, there).split(1000), strict=True):
                rows[:] = torch.cat([rows, block.float()], 1).topk(NEIGHBOUR + 1, largest=False).values
        found.append(nearest[:, -1])
    return torch.cat(found)


def precision_recall(reference: Tensor, images: Tensor) -> tuple[float, float]:
    """Computes the share of images within the reference's balls, and of the reference within the images'.

    Features are (N, D) and (M, D) float32 on one device; a ball reaches to the third nearest neighbour in its own set
    (Kynkäänniemi et al., arXiv 1904.06991). At most two blocks of 10000 × 10000 distances are held at a time. Raises
    ValueError for sets too small to have a third neighbour.
    """
    if min(len(reference), len(images)) <= NEIGHBOUR:
        raise ValueError(f"Precision and recall look at the {NEIGHBOUR} nearest neighbours: {len(reference)} reference "
                         f"images against {len(images)} are too few.")
    with exact_float32():
        balls_reference, balls_images = radii(reference), radii(images)
        within_images = torch.zeros(len(reference), dtype=torch.bool, device=reference.device)
        within_reference = torch.zeros(len(images), dtype=torch.bool, device=reference.device)
        rows, columns = (zip(*(part.split(BLOCK) for part in parts), strict=True) for parts in (
            (reference, balls_reference, within_images), (images, balls_images, within_reference)))
        columns = list(columns)
        for here, balls_here, within_here in rows:
            for there, balls_there, within_there in columns:
                block = squared_distances(here, there)
                for part, ball, within in zip(*(x.split(1000) for x in (block, balls_here, within_here)), strict=True):
                    part = part.float()
                    within |= (part <= balls_there).any(1)
                    within_there |= (part <= ball[:, None]).any(0)
    return within_reference.double().mean().item(), within_images.double().mean().item()


# ---- images, by number ----------------------------------------------------------------------------------------------


@dataclass
class Images:
    """A set of images that are all of one size, read by number, and what a record says of them."""

    count: int
    read: Callable[[np.ndarray], Tensor]      # numbers (B,) -> uint8 (B, H, W, 3)
    record: dict


def evenly(count: int, num: int) -> np.ndarray:
    """Picks `num` of `count` numbers, evenly spread: sources are sorted by class, and the first would be of few."""
    return np.arange(num) * count // num


def open_images(what: str, path: str, resolution: int | None = None, device: torch.device | str = "cpu") -> Images:
    """Opens a folder or zip of images, an npz with `arr_0`, or a folder of latents, and looks at every image's size.

    `what` is the option that the path came from, for the sentences. Raises ValueError for what cannot be scored.
    """
    if not Path(path).exists():
        raise ValueError(f"{what}={path} does not exist (looked from {Path.cwd()}).")
    if Path(path).suffix == ".npz":
        if resolution is not None:
            raise ValueError(f"resolution={resolution} is for folders and zips; {what}={path} is read as it is.")
        return open_npz(what, path)
    if (Path(path) / "metadata.json").is_file():
        if resolution is not None:
            raise ValueError(f"resolution={resolution} is for folders and zips; latents have their own.")
        return open_decoded(path, device)
    return open_files(what, path, resolution)


def npz_array(path: str | Path, key: str) -> np.ndarray:
    """Maps an array of an npz into memory without reading it; one that is compressed is read whole."""
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo(f"{key}.npy")
        if entry.compress_type != zipfile.ZIP_STORED:
            with np.load(path, allow_pickle=False) as arrays:
                return arrays[key]
        with archive.open(entry) as file:
            version = np.lib.format.read_magic(file)
            header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
            shape, fortran, dtype = header(file)
            header_bytes = file.tell()
    with open(path, "rb") as file:
        file.seek(entry.header_offset)
        name_length, extra_length = struct.unpack("<26x2H", file.read(30))
    first = entry.header_offset + 30 + name_length + extra_length + header_bytes
    return np.memmap(path, dtype, "r", first, shape, "F" if fortran else "C")


def open_npz(what: str, path: str) -> Images:
    try:
        array = npz_array(path, "arr_0")
    except KeyError:
        raise ValueError(f"{what}={path} holds no images: it has no key arr_0.") from None
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise ValueError(f"{what}={path} is not a whole npz ({error}).") from error
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3:
        raise ValueError(f"{what}={path}: arr_0 is {array.dtype} {array.shape}; images are uint8 (N, H, W, 3).")
    record = {"path": str(path), "sha256": checkpoints.sha256(Path(path)), "size": list(array.shape[1:3])}
    return Images(len(array), lambda numbers: torch.from_numpy(np.array(array[numbers])), record)


def open_decoded(path: str, device: torch.device | str) -> Images:
    """Opens a latent folder as the images that its autoencoder makes of it; of moments, those of the means."""
    latents = open_latents(path)
    decoder = autoencoders.load(latents.autoencoder, device=device)

    def read(numbers: np.ndarray) -> Tensor:
        stored = torch.from_numpy(latents.read(numbers)[0]).to(device).float()
        return decoder.decode(stored[:, : latents.shape[0]])

    side = [length * decoder.downsample for length in latents.shape[1:]]
    record = {"path": str(path), "fingerprint": latents.fingerprint, "size": side, "autoencoder": latents.autoencoder}
    return Images(latents.count, read, record)


def open_files(what: str, path: str, resolution: int | None) -> Images:
    """Opens a folder or zip; reads each file once, for its size and for the hash of them all."""
    try:
        source = open_source(path)
    except ValueError as error:
        raise ValueError(str(error).replace("source=", f"{what}=")) from error
    if source.not_images and PartialState().is_main_process:
        print(f"{what}={path}: {len(source.not_images)} files are no images by their names and are passed over: "
              f"{', '.join(source.not_images[:5])}{' …' if len(source.not_images) > 5 else ''}.")
    digest, sizes, broken = hashlib.sha256(), Counter(), []
    for number in tqdm(range(len(source)), desc="looking at files", unit="img", delay=2, leave=False,
                       disable=not PartialState().is_main_process):
        try:
            data = source.read(number)
            with Image.open(io.BytesIO(data)) as image:     # the header only
                sizes[image.size] += 1
        except (UnreadableImage, OSError, Image.DecompressionBombError) as error:
            broken.append(f"{source.names[number]} ({type(error).__name__})")
            continue
        digest.update(hashlib.sha256(data).digest())
    if broken:
        raise ValueError(f"{what}={path}: {len(broken)} of {len(source)} files cannot be read as images: "
                         f"{', '.join(broken[:5])}{' …' if len(broken) > 5 else ''}. Remove or replace them.")
    if len(sizes) > 1 and resolution is None:
        most = ", ".join(f"{count} of {width}x{height}" for (width, height), count in sizes.most_common(3))
        raise ValueError(f"{what}={path} holds images of {len(sizes)} sizes ({most}{', …' if len(sizes) > 3 else ''}): "
                         f"bring them to one, or set resolution= to scale and crop them by ADM's rule.")

    def read(numbers: np.ndarray) -> Tensor:
        try:
            return torch.from_numpy(np.stack(list(pool.map(lambda n: source.pixels(int(n), resolution), numbers))))
        except UnreadableImage as error:
            raise ValueError(f"{what}={path}: one of the images {source.names[numbers[0]]} to "
                             f"{source.names[numbers[-1]]} is damaged ({error}). Remove or replace it.") from error

    pool = ThreadPoolExecutor(8)
    size = [resolution] * 2 if resolution else list(next(iter(sizes))[::-1])
    record = {"path": str(path), "sha256": digest.hexdigest(), "size": size, "not_images": len(source.not_images)}
    return Images(len(source), read, record)


def read_over_ranks(images: Images, chosen: np.ndarray, todo: np.ndarray, batch_size: int) -> Numbered:
    """Reads this rank's share of images `chosen[todo]`, batch by batch, numbered by their place in `chosen`."""
    state = PartialState()
    for start in range(state.process_index * batch_size, len(todo), batch_size * state.num_processes):
        numbers = todo[start : start + batch_size]
        yield torch.from_numpy(numbers), images.read(chosen[numbers])


def numbered(batches: Iterable[Batch], seeds: list[int]) -> Numbered:
    """Numbers drawn images by their seed's place in `seeds`; copies, of seed -1, get number -1."""
    place = {seed: number for number, seed in enumerate(seeds)} | {-1: -1}
    for drawn, _, images in batches:
        yield torch.tensor([place[seed] for seed in drawn.tolist()]), images


# ---- the reference --------------------------------------------------------------------------------------------------


@dataclass
class Reference:
    """What images are compared with: statistics per feature, and images where the npz holds them."""

    statistics: dict[str, tuple[Tensor, Tensor]]
    images: Images | None
    record: dict
    pool: Tensor | None = field(default=None, repr=False)     # features of `images`, once they were needed

    def complete(self, extractor: Extractor, metrics: Iterable[str], batch_size: int = 64, keep: "Kept | None" = None,
                 ) -> None:
        """Measures the reference's own images where a metric needs it; a second call costs nothing."""
        needs_pool = "precision" in metrics or "recall" in metrics
        if (self.pool is not None or not needs_pool) and "pool" in self.statistics:
            return
        tally = measure(self.images, extractor, batch_size, keep, needs_pool, "reference")
        self.pool = tally.pool
        if not self.statistics:
            self.statistics = {name: moments.mean_and_covariance() for name, moments in tally.moments.items()}


def open_reference(path: str | Path, extractor: Extractor) -> Reference:
    """Opens and checks reference statistics in ADM's keys (mu, sigma, mu_s, sigma_s), images under arr_0, or both.

    Without `mu` the statistics are to come from arr_0, as in ADM. Raises ValueError for keys that are missing, other
    dimensions than the extractor's, values that are not finite, or statistics of other features.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"reference={path} is not a file. docs/evaluation.md says where to get ADM's, and "
                         f"python fid.py reference_from=<images or latents> out={path} makes one.")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            keys = set(arrays.files)
            found = {key: arrays[key] for key in keys & {"mu", "sigma", "mu_s", "sigma_s", "space", "weights_sha256"}}
    except Exception as error:      # no zip, a pickle inside, cut short: numpy and zipfile differ in what they raise
        raise ValueError(f"reference={path} is not an npz that can be read: {error}.") from error
    if not {"mu", "sigma"} <= keys and "arr_0" not in keys:
        raise ValueError(f"reference={path} holds the keys {', '.join(sorted(keys)) or 'none'}; mu and sigma are "
                         f"needed (and mu_s, sigma_s for sFID), or images under arr_0.")
    space, digest = (str(found.get(key, "")) for key in ("space", "weights_sha256"))
    if space and space != extractor.space:
        raise ValueError(f"reference={path} was measured on {space} features, and features={extractor.name} are "
                         f"{extractor.space}: make the reference anew with the same features.")
    if digest and digest.startswith(f"{extractor.name}:") and digest != f"{extractor.name}:{extractor.sha256}":
        raise ValueError(f"reference={path} was measured with weights of SHA-256 {digest.partition(':')[2]}, and those "
                         f"at {extractor.weights} have {extractor.sha256}.")
    statistics = {}
    for name, (mu, sigma) in FEATURE_KEYS.items():
        if mu not in keys or sigma not in keys or name not in extractor.sizes:
            continue
        size = extractor.sizes[name]
        for key, shape in ((mu, (size,)), (sigma, (size, size))):
            if found[key].shape != shape:
                raise ValueError(f"reference={path} has {key} of shape {found[key].shape}, but features="
                                 f"{extractor.name} need {shape}: it was made with other features.")
            if not np.isfinite(found[key]).all():
                raise ValueError(f"reference={path} has values in {key} that are not finite: get or make it anew.")
        statistics[name] = tuple(torch.from_numpy(found[key].astype(np.float64)) for key in (mu, sigma))
    images = open_images("reference", str(path)) if "arr_0" in keys else None
    if images is not None and images.count < 2:
        raise ValueError(f"reference={path} holds {images.count} images; at least two are needed.")
    record = images.record if images else {"path": str(path), "sha256": checkpoints.sha256(path)}
    return Reference(statistics, images, record | {"images": images and images.count, "statistics": sorted(statistics)})


def write_reference(path: Path, tally: Tally, extractor: Extractor, images: Images, num_images: int) -> None:
    """Writes statistics in ADM's keys and what they were measured on, with `num_images` of the images as arr_0."""
    arrays = {"space": np.array(extractor.space), "count": np.array(tally.count),
              "weights_sha256": np.array(f"{extractor.name}:{extractor.sha256}")}
    for name, moments in tally.moments.items():
        mu, sigma = moments.mean_and_covariance()
        arrays |= dict(zip(FEATURE_KEYS[name], (mu.cpu().numpy(), sigma.cpu().numpy()), strict=True))
    beside = path.with_name(f".{path.name}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(beside, "w") as archive:
        for key, array in arrays.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
        if num_images:
            with archive.open("arr_0.npy", "w", force_zip64=True) as file:
                shape = (num_images, *images.record["size"], 3)
                np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
                for numbers in np.array_split(evenly(images.count, num_images), -(-num_images // 64)):
                    file.write(images.read(numbers).cpu().numpy().tobytes())
    os.replace(beside, path)


# ---- the whole ------------------------------------------------------------------------------------------------------


def available_metrics(extractor: Extractor, reference: Reference, asked: Iterable[str] | None = None) -> list[str]:
    """Lists the metrics that features and reference allow, or those asked for; raises ValueError for any other."""
    why = {extractor.distance: None}        # of each metric, what stands against it
    if "spatial" in extractor.sizes:
        has = "spatial" in reference.statistics or (not reference.statistics and reference.images)
        why["sfid"] = None if has else "the reference has no mu_s and sigma_s"
        why["inception_score"] = None
    why["precision"] = why["recall"] = None if reference.images else "the reference has no images under arr_0"
    if asked is None:
        return [name for name, reason in why.items() if reason is None]
    for name in asked:
        if name not in why:
            raise ValueError(f"metrics={list(asked)}: features={extractor.name} give {', '.join(why)}, not {name}.")
        if why[name]:
            raise ValueError(f"metrics={list(asked)}: {name} cannot be had, as {why[name]}.")
    return list(asked)


def evaluate(
    batches: Iterable[tuple[Tensor, Tensor]], count: int, reference: Reference, extractor: Extractor, *,
    metrics: Iterable[str] | None = None, keep: "Kept | None" = None, progress: str | None = None,
) -> dict[str, float]:
    """Scores `count` images against the reference; every rank brings its share and gets the same numbers.

    `batches` yields numbers (B,), each of 0 … count-1 once over all ranks (-1 for a copy that is to be dropped), and
    images (B, H, W, 3) uint8, as `numbered` and `read_over_ranks` do; those that `keep` holds are not to come again.
    Raises ValueError for fewer images than `count`, or metrics or features that cannot be had.
    """
    metrics = available_metrics(extractor, reference, metrics)
    reference.complete(extractor, metrics)
    state = PartialState()
    tally = Tally(extractor, count, state.device, "precision" in metrics or "recall" in metrics)
    fill(tally, batches, extractor, keep, progress)
    numbers: list[dict[str, float] | None] = [None]
    if state.is_main_process:
        numbers[0] = score(tally, reference, extractor, metrics)
    return (broadcast_object_list(numbers) if state.num_processes > 1 else numbers)[0]


def fill(
    tally: Tally, batches: Iterable[tuple[Tensor, Tensor]], extractor: Extractor, keep: "Kept | None",
    progress: str | None,
) -> None:
    """Brings the features that `keep` holds, then those of the images, into the tally, and reduces it over ranks."""
    state = PartialState()
    with tqdm(total=tally.count, desc=progress, unit="img", disable=not (progress and state.is_main_process)) as bar:
        if keep is not None:
            for numbers, features in keep.load():
                tally.add(numbers, features)
            bar.initial = keep.count        # the rate is that of the new ones
            bar.update(keep.count)
        for numbers, features in extract(extractor, batches):
            if keep is not None:
                keep.save(numbers, features)
            tally.add(numbers, features)
            bar.update(min(len(numbers) * state.num_processes, tally.count - bar.n))
    tally.over_ranks()


def measure(
    images: Images, extractor: Extractor, batch_size: int, keep: "Kept | None" = None, keep_pool: bool = False,
    progress: str | None = None, chosen: np.ndarray | None = None,
) -> Tally:
    """Tallies a set of images, or those `chosen` of it, over all ranks."""
    chosen = np.arange(images.count) if chosen is None else chosen
    tally = Tally(extractor, len(chosen), PartialState().device, keep_pool)
    todo = np.arange(len(chosen)) if keep is None else keep.missing(len(chosen))
    fill(tally, read_over_ranks(images, chosen, todo, batch_size), extractor, keep, progress)
    return tally


def score(tally: Tally, reference: Reference, extractor: Extractor, metrics: list[str]) -> dict[str, float]:
    """Computes the numbers of `metrics`, in their order."""
    numbers = {}
    for name, feature in ((extractor.distance, "pool"), ("sfid", "spatial")):
        if name in metrics:
            mu, sigma = tally.moments[feature].mean_and_covariance()
            numbers[name] = frechet_distance(mu, sigma, *reference.statistics[feature])
    if "inception_score" in metrics:
        numbers["inception_score"] = tally.scores.score()
    if tally.pool is not None:
        device = PartialState().device
        both = precision_recall(reference.pool.to(device), tally.pool.to(device))
        numbers |= dict(zip(("precision", "recall"), both, strict=True))
    return {name: numbers[name] for name in metrics}


class Kept:
    """Features in a folder named by the hash of all that they depend on, so that a killed evaluation continues.

    Another checkpoint, setting, extractor, library or line of this project's code is another folder; nothing stale is
    ever found. A file holds one batch, and is written beside and renamed.
    """

    def __init__(self, root: Path, record: dict):
        text = json.dumps({**record, "code": code_sha256()}, sort_keys=True, indent=1)
        self.folder = root / hashlib.sha256(text.encode()).hexdigest()[:16]
        state = PartialState()
        if state.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            checkpoints.write_text(self.folder / "record.json", text)
        state.wait_for_everyone()
        self.files, seen = [], set()
        for file in sorted(self.folder.glob("*.safetensors")):
            try:
                numbers = set(load_file(file)["numbers"].tolist())
            except (SafetensorError, KeyError):
                print(f"{file} is damaged and is passed over.")
                continue
            if not numbers & seen:      # two evaluations at once may both have measured some
                seen |= numbers
                self.files.append(file)
        self.seen, self.count = seen, len(seen)
        state.wait_for_everyone()       # before any rank adds to the folder

    def missing(self, count: int) -> np.ndarray:
        return np.array([number for number in range(count) if number not in self.seen], dtype=np.int64)

    def load(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yields this rank's share of what was there at the start."""
        state = PartialState()
        for file in self.files[state.process_index :: state.num_processes]:
            features = load_file(file)
            yield features.pop("numbers"), features

    def save(self, numbers: Tensor, features: dict[str, Tensor]) -> None:
        path = self.folder / f"{int(numbers[0]):08d}.safetensors"
        beside = path.with_name(f".{path.name}.tmp")
        save_file({name: value.cpu().contiguous() for name, value in (features | {"numbers": numbers}).items()}, beside)
        os.replace(beside, path)


# ---- the record -----------------------------------------------------------------------------------------------------


def code_sha256() -> str:
    """Hashes this project's modules, which decide what a checkpoint draws and how it is scored."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def versions(extractor: Extractor) -> dict[str, str]:
    names = ["numpy", "scipy", "accelerate", *([extractor.library] if extractor.library else [])]
    return {"python": platform.python_version(), "torch": torch.__version__,      # with its CUDA, +cu130
            **{name: importlib.metadata.version(name) for name in names}}


def describe_extractor(extractor: Extractor) -> dict:
    return {key: getattr(extractor, key) for key in ("name", "space", "input", "weights", "sha256")}


def report(row: dict, path: Path) -> None:
    """Appends a row to results.jsonl and shows it as a table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    images, reference, extractor = row["source"], row["reference"], row["extractor"]
    what = images.get("checkpoint") or images["path"]
    step = f", step {images['step']} ({images['weights']})" if images.get("step") is not None else ""
    lines = [f"{name:<16}  {value:.6g}" for name, value in row["metrics"].items()]
    digest = f" ({extractor['sha256'][:12]})" if extractor["sha256"] else ""
    lines += [f"{'images':<16}  {row['images']:,} from {what}{step}",
              f"{'reference':<16}  {reference['path']} ({reference.get('sha256', '')[:12]})",
              f"{'features':<16}  {extractor['name']}{digest}",
              f"{'time':<16}  {row['seconds']:.1f} s", f"{'record':<16}  {path}"]
    print("\n" + "\n".join(lines))


DRAWN_RULE = "uint8 = floor(clip(127.5 x + 128, 0, 255))"


# ---- entry ----------------------------------------------------------------------------------------------------------


def check_settings(cfg: DictConfig) -> None:
    """Raises ValueError, with the knob, for settings that cannot work."""
    given = [key for key in ("checkpoint", "images", "reference_from") if cfg[key] is not None]
    if len(given) != 1:
        raise ValueError(f"Give one of checkpoint=, images= and reference_from=, not {' and '.join(given) or 'none'}.")
    needed = "out" if given == ["reference_from"] else "reference"
    if cfg[needed] is None:
        raise ValueError(f"{given[0]}={cfg[given[0]]} needs {needed}=<an npz>.")
    if needed == "out" and Path(cfg.out).suffix != ".npz":
        raise ValueError(f"out={cfg.out} must end in .npz.")
    if cfg.features not in EXTRACTORS:
        raise ValueError(f"features={cfg.features} is not one of {', '.join(EXTRACTORS)}.")
    for key in ("precision", "decode_precision"):
        if cfg[key] not in DTYPES:
            raise ValueError(f"{key}={cfg[key]} is not one of {', '.join(DTYPES)}.")
    for key, low in (("batch_size", 1), ("num_steps", 1), ("num_samples", 2), ("seed", 0), ("reference_images", 0)):
        if key == "num_samples" and cfg[key] is None:
            continue
        if type(cfg[key]) is not int or cfg[key] < low:
            raise ValueError(f"{key}={cfg[key]} is not a whole number of at least {low}.")


def choose(images: Images, num_samples: int | None, what: str) -> np.ndarray:
    """Picks the images to look at: all, or `num_samples` evenly spread; raises ValueError where there are fewer."""
    if images.count < (num_samples or 2):
        raise ValueError(f"{what} holds {images.count} images and {num_samples or 'at least two'} are needed: "
                         f"set num_samples lower, or add images.")
    return evenly(images.count, num_samples or images.count)


class Drawing:
    """Images that a network draws of `seeds`, and the record of how: what a result must say to be compared.

    The images' size is put into the record when the first are drawn. `decode` turns
    latents (B, C, h, w) into images uint8; `seeds` and `labels` are of all images, over all ranks.
    """

    def __init__(
        self, net: DiT, diffusion: EDM | RF, decode: Callable[[Tensor], Tensor], seeds: list[int], labels: list[int], *,
        batch_size: int, num_steps: int, guidance: Guidance | None = None, precision: str = "fp32",
        sampler: dict | None = None,
    ):
        self.seeds, self.labels = seeds, labels
        sampler = sampler_settings(diffusion, sampler or {})
        self.generate = partial(generate, net, diffusion, decode, num_steps=num_steps, guidance=guidance,
                                precision=precision, **sampler)
        self.batch_size = batch_size
        passes, linear, attention = sampling_cost(net, diffusion, num_steps, guidance, **sampler)
        # JSON has no infinity.
        finite = {key: str(value) if value == math.inf else value for key, value in sampler.items()}
        self.record = {
            "diffusion": type(diffusion).__name__, "sampler": {"solver": "heun", **finite},
            "num_steps": num_steps, "guidance": guidance and guidance.record(), "precision": precision,
            "size": None, "seeds": f"{seeds[0]}-{seeds[-1]}",
            "labels": "class seed % number of classes",      # and of one image:
            "evaluations": passes, "multiply_adds": {"linear": linear, "attention": attention},
        }

    def draw(self, todo: np.ndarray) -> Numbered:
        """Draws this rank's share of the images numbered in `todo`, those of all ranks in rounds."""
        wanted = [self.seeds[number] for number in todo]
        if not wanted:
            return
        batches = self.generate(
            wanted, [self.labels[number] for number in todo],
            batch_size=min(self.batch_size, -(-len(wanted) // PartialState().num_processes)),
        )
        for numbers, images in numbered(batches, self.seeds):
            self.record["size"] = list(images.shape[1:3])
            yield numbers, images


def describe_autoencoder(name: str, decode_precision: str) -> dict:
    vae = Path(name) / "diffusion_pytorch_model.safetensors"
    return {"autoencoder": name, "autoencoder_sha256": checkpoints.sha256(vae) if vae.is_file() else None,
            "decode_precision": decode_precision}


def open_checkpoint(cfg: DictConfig, device: torch.device) -> tuple[Drawing, Path]:
    """Loads a checkpoint to draw from; returns what draws, with its record, and the run's folder."""
    trained = load_trained(cfg.checkpoint, cfg.weights, cfg.diffusion_name, cfg.autoencoder, device)
    classes = parse_classes("classes", cfg.classes, trained.net.num_classes, trained.class_names)
    seeds = list(range(cfg.seed, cfg.seed + (cfg.num_samples or 50_000)))
    decoder = autoencoders.load(trained.autoencoder, device, DTYPES[cfg.decode_precision])
    guidance, how_guided = build_guidance(guidance_settings(cfg), trained, device)
    drawing = Drawing(
        trained.net, trained.diffusion, decoder.decode, seeds, labels_of(seeds, classes), batch_size=cfg.batch_size,
        num_steps=cfg.num_steps, guidance=guidance, precision=cfg.precision,
        sampler=OmegaConf.to_container(cfg.sampler),
    )
    given = Path(cfg.checkpoint)
    drawing.record = {
        "checkpoint": str(trained.folder or given), "step": trained.step, "weights": cfg.weights,
        "weights_sha256": checkpoints.sha256(trained.file), "ema": cfg.weights == "ema",
        "classes": classes if cfg.classes is not None else "all",
        **describe_autoencoder(trained.autoencoder, cfg.decode_precision), **drawing.record, "guidance": how_guided,
    }
    return drawing, trained.folder.parent.parent if trained.folder else given.parent


def result_row(
    numbers: dict[str, float], count: int, source: dict, extractor: Extractor, reference: Reference, *,
    seconds: float, batch_size: int, image_rule: str, resolution: int | None = None, resumed_images: int = 0,
) -> dict:
    """Puts the numbers beside all that they depend on: a row of results.jsonl."""
    state = PartialState()
    return {
        "metrics": numbers, "images": count, "source": source, "resumed_images": resumed_images,
        "extractor": describe_extractor(extractor), "reference": reference.record, "image_rule": image_rule,
        "resolution": resolution, "batch_size": batch_size, "processes": state.num_processes,
        "device": torch.cuda.get_device_name(state.device) if state.device.type == "cuda" else state.device.type,
        "versions": versions(extractor), "code_sha256": code_sha256(),
        "seconds": seconds, "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def scored_before(row: dict, path: Path) -> dict | None:
    """Finds in results.jsonl a row whose numbers are those that `row`, still without any, is going to have."""
    def facts(row: dict) -> dict:
        source = {key: value for key, value in row["source"].items() if key != "size"}     # known when it is drawn
        same = ("images", "extractor", "reference", "image_rule", "resolution", "versions", "code_sha256")
        return {"source": source, **{key: row[key] for key in same}}

    wanted = facts(json.loads(json.dumps(row)))
    return next((old for old in checkpoints.read_rows(path)
                 if facts(old) == wanted and row["metrics"].keys() <= old["metrics"].keys()), None)


def open_extractor(cfg: DictConfig, state: PartialState) -> Extractor:
    with state.local_main_process_first():      # which downloads weights, and records their hash, for the others
        return load_extractor(cfg.features, cfg.features_weights, cfg.sha256, state.device)


def run(cfg: DictConfig, reuse: bool = False, must_have: str | None = None) -> tuple[dict, Path]:
    """Scores what the settings name; returns the row and the file that it was appended to.

    With `reuse`, a row that is there already is returned instead. Raises ValueError or OSError, with the knob, for
    settings and files that cannot work, or where the metric `must_have` would not be among the numbers.
    """
    state, started = PartialState(), time.perf_counter()

    # ---- everything that can be wrong, before anything slow
    check_settings(cfg)
    extractor = open_extractor(cfg, state)
    reference = open_reference(cfg.reference, extractor)
    metrics = available_metrics(extractor, reference, cfg.metrics)
    if must_have and must_have not in metrics:
        raise ValueError(f"metric={must_have} is not among the metrics {', '.join(metrics)}.")
    if cfg.checkpoint is not None:
        drawing, home = open_checkpoint(cfg, state.device)
        count, source, rule = len(drawing.seeds), drawing.record, DRAWN_RULE
    else:
        images, home = open_images("images", cfg.images, cfg.resolution, state.device), Path()
        chosen = choose(images, cfg.num_samples, f"images={cfg.images}")
        count, source, rule = len(chosen), {**images.record, "images": images.count}, "as stored"
    results = Path(cfg.results or home / "results.jsonl")
    root = results.parent / "features" if cfg.keep_features else None

    def kept(record: dict) -> Kept | None:
        facts = {"extractor": describe_extractor(extractor), "versions": versions(extractor)}
        return Kept(root, record | facts) if root else None

    def row(numbers: dict[str, float | None], resumed_images: int = 0) -> dict:
        return result_row(
            numbers, count, source, extractor, reference, seconds=time.perf_counter() - started,
            batch_size=cfg.batch_size, image_rule=rule, resolution=cfg.resolution, resumed_images=resumed_images)

    if reuse and (old := scored_before(row(dict.fromkeys(metrics)), results)):
        return old, results

    # ---- the reference's own images, then the stream
    reference.complete(extractor, metrics, cfg.batch_size, kept({"images": reference.record, "count": None}))
    keep = kept({"images": dict(source), "count": count})
    todo = np.arange(count) if keep is None else keep.missing(count)
    if cfg.checkpoint is not None:
        batches = drawing.draw(todo)
    else:
        batches = read_over_ranks(images, chosen, todo, cfg.batch_size)
    numbers = evaluate(batches, count, reference, extractor, metrics=metrics, keep=keep, progress="scoring")
    scored = row(numbers, keep.count if keep else 0)
    if state.is_main_process:
        size, its = reference.record.get("size"), source.get("size")
        if size and its and size != its:
            print(f"The images are {its[1]}x{its[0]} and the reference's {size[1]}x{size[0]}: is it the right one?")
        report(scored, results)
    state.wait_for_everyone()       # until the row is there for all to read
    return scored, results


@hydra.main(config_path="configs", config_name="fid", version_base="1.3")
def main(cfg: DictConfig) -> None:
    # Several ranks on CPUs need to be told that they are.
    state = PartialState(cpu=cfg.cpu or not torch.cuda.is_available())
    try:
        if cfg.reference_from is not None:
            write_statistics(cfg, state)
        else:
            run(cfg)
    except (ValueError, OSError) as error:
        sys.exit(f"fid.py: {error}")
    if state.num_processes > 1:
        torch.distributed.destroy_process_group()


def write_statistics(cfg: DictConfig, state: PartialState) -> None:
    """Measures `reference_from` and writes `out`."""
    check_settings(cfg)
    extractor = open_extractor(cfg, state)
    images = open_images("reference_from", cfg.reference_from, cfg.resolution, state.device)
    chosen = choose(images, cfg.num_samples, f"reference_from={cfg.reference_from}")
    if cfg.reference_images > images.count:
        raise ValueError(f"reference_images={cfg.reference_images} are asked for arr_0, but "
                         f"reference_from={cfg.reference_from} holds {images.count}.")
    tally = measure(images, extractor, cfg.batch_size, progress="reference", chosen=chosen)
    if state.is_main_process:
        write_reference(Path(cfg.out), tally, extractor, images, cfg.reference_images)
        print(f"Statistics of {tally.count:,} images of {images.record['size']} on {extractor.name}: {cfg.out}")


if __name__ == "__main__":
    main()
