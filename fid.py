"""Images -> features -> statistics -> FID, sFID, Inception Score, precision and recall, as ADM's evaluator has them.

    python fid.py checkpoint=runs/x reference=VIRTUAL_imagenet256_labeled.npz num_samples=50000
    accelerate launch fid.py checkpoint=runs/x reference=… features=inception         # all GPUs, Inception on them too
    python fid.py images=FOLDER|ZIP|NPZ reference=…                                    # what somebody else made
    python fid.py reference_from=FOLDER|ZIP|NPZ|LATENTS out=ref.npz                    # statistics, in ADM's keys
    python fid.py gauge=dit_xl2 checkpoint=DiT-XL-2-256x256.pt reference=…             # somebody's, as published

Each result is a row of results.jsonl that says exactly what was measured. Options: configs/fid.yaml and
configs/drawing.yaml; what the numbers mean and why they differ from somebody else's: docs/evaluation.md.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import math
import platform
import struct
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather, reduce
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from tqdm import tqdm

import autoencoder as autoencoders
import checkpoint as checkpoints
import speed
from checkpoint import beside
from data import open_latents
from dit import DiT
from edm import EDM
from features import EXTRACTORS, Extractor, extract
from features import load as load_extractor
from guidance import Guidance
from images import UnreadableImage, open_image, open_source
from metrics import BLOCK, Moments, ScoreSums, frechet_distance, precision_recall
from rf import RF
from sample import Batch, DrawingSettings, generate, labels_of, load_decoder, parse_classes, sampling_cost
from settings import Location, Number, Settings, Size, Whole, command, commit, one_of
from trained import build_guidance, load_trained, sampler_settings

FEATURE_KEYS = {"pool": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}     # in a reference npz

Indexed = Iterator[tuple[Tensor, Tensor]]      # indices (B,) int64, -1 for a copy; images (B, H, W, 3) uint8
LARGEST_STATISTIC = 2**28      # bytes: Inception's covariances have an eighth of it
MOST_UNPACKED = 100      # bytes that one of a compressed npz may become: images compress to a half
AtLeastTwo = Annotated[int, Field(ge=2, le=10**7)]       # images: one has no covariance
Metrics = Annotated[list[str], Field(min_length=1)]


class Published(Settings):
    """Scores that somebody has published, and how far from them ours may lie: configs/gauge."""

    where: str
    scores: dict[str, Number]
    tolerance: dict[str, Number]


class ScoringSettings(DrawingSettings):
    """configs/fid.yaml, and that of the sweep."""

    images: Location | None
    reference_from: Location | None
    reference: Location | None
    out: Location | None
    reference_images: Whole
    num_samples: AtLeastTwo | None
    metrics: Metrics | None
    resolution: Size | None
    features: one_of(EXTRACTORS)
    features_weights: Location | None
    sha256: str | None
    keep_features: bool
    results: Location | None
    seed: Whole
    published: Published | None


# ---- features -> statistics -----------------------------------------------------------------------------------------


class Tally:
    """All that is kept of one set of images: moments, score sums and, for neighbourhoods, the features themselves."""

    def __init__(self, extractor: Extractor, count: int, device: torch.device | str, keep_pool: bool = False):
        device = "cpu" if torch.device(device).type == "mps" else device      # which has no float64
        self.count, self.device = count, device
        self.moments = {name: Moments(size, device) for name, size in extractor.sizes.items() if name in FEATURE_KEYS}
        self.scores = ScoreSums(count, extractor.sizes["probs"], device) if "probs" in extractor.sizes else None
        self.pools: list[tuple[Tensor, Tensor]] | None = [] if keep_pool else None
        self.pool: Tensor | None = None     # (N, D) float32 in the order of the indices, once over all ranks

    def add(self, indices: Tensor, features: dict[str, Tensor]) -> None:
        for name, moments in self.moments.items():
            moments.add(features[name])
        if self.scores is not None:
            self.scores.add(indices, features["probs"])
        if self.pools is not None:
            self.pools.append((indices.cpu(), features["pool"].float().cpu()))

    def over_ranks(self) -> None:
        """Brings all ranks' sums together, once; raises ValueError where images are missing."""
        for part in (*self.moments.values(), *([self.scores] if self.scores else [])):
            part.merge(partial(reduce, reduction="sum"))
        measured = int(self.moments["pool"].count)
        if measured != self.count:
            raise ValueError(f"{self.count} images were asked for and {measured} came.")
        if self.pools is not None:
            self.pool = torch.empty(self.count, len(self.moments["pool"].sum))
            for indices, features in gather_uneven(self.pools, self.pool.shape[1], PartialState().device):
                self.pool[indices] = features
            self.pools = None


def gather_uneven(
    pieces: list[tuple[Tensor, Tensor]], size: int, device: torch.device,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields all ranks' (indices (n,), rows (n, size)) on the CPU, piece by piece, however many each rank has."""
    if PartialState().num_processes == 1:
        yield from pieces
        return
    indices = torch.cat([torch.zeros(0, dtype=torch.int64), *(indices for indices, _ in pieces)])
    rows = torch.cat([torch.zeros(0, size), *(rows for _, rows in pieces)])
    most = int(gather(torch.tensor([len(indices)], device=device)).max())
    for start in range(0, most, BLOCK):
        length = min(BLOCK, most - start)
        some, some_rows = indices[start : start + length], rows[start : start + length]
        pad = length - len(some)
        some = gather(torch.cat([some, torch.full((pad,), -1)]).to(device)).cpu()
        some_rows = gather(torch.cat([some_rows, torch.zeros(pad, size)]).to(device)).cpu()
        yield some[some >= 0], some_rows[some >= 0]


# ---- images, by index -----------------------------------------------------------------------------------------------


@dataclass
class Images:
    """A set of images that are all of one size, read by index, and what a record says of them."""

    count: int
    read: Callable[[np.ndarray], Tensor]      # indices (B,) -> uint8 (B, H, W, 3)
    record: dict


def evenly(count: int, num: int) -> np.ndarray:
    """Picks `num` of `count` indices, evenly spread: sources are sorted by class, and the first would be of few."""
    return np.arange(num) * count // num


def open_images(
    key: str,                               # the option that the path came from, for the sentences
    path: str,
    resolution: int | None = None,
    device: torch.device | str = "cpu",     # this and the others: of latents, which are decoded
    autoencoder: str | None = None,         # None: as the folder says
    decode_batch_size: int | None = None,
) -> Images:
    """Opens a folder or zip of images, an npz with `arr_0`, or a folder of latents, and looks at every image's size.

    Raises ValueError for what cannot be scored.
    """
    if not Path(path).exists():
        raise ValueError(f"{key}={path} does not exist (looked from {Path.cwd()}).")
    if Path(path).suffix == ".npz":
        if resolution is not None:
            raise ValueError(f"resolution={resolution} is for folders and zips; {key}={path} is read as it is.")
        return open_npz(key, path)
    if (Path(path) / "metadata.json").is_file():
        if resolution is not None:
            raise ValueError(f"resolution={resolution} is for folders and zips; latents have their own.")
        return open_decoded(path, device, autoencoder, decode_batch_size)
    return open_files(key, path, resolution)


def npz_array(path: str | Path, key: str) -> np.ndarray:
    """Maps an array of an npz into memory without reading it; one that is compressed is read whole.

    Raises KeyError where there is none, and nearly anything where the npz is damaged.
    """
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo(f"{key}.npy")
        with archive.open(entry) as file:
            version = np.lib.format.read_magic(file)
            header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
            shape, fortran, dtype = header(file)
            header_bytes, size = file.tell(), math.prod(shape) * dtype.itemsize
            if dtype.hasobject or header_bytes + size != entry.file_size:
                raise ValueError(f"{key} has {entry.file_size:,} bytes for {dtype} {shape}")
            if entry.compress_type != zipfile.ZIP_STORED:
                if size > MOST_UNPACKED * max(entry.compress_size, 2**20):
                    raise ValueError(f"{key} unpacks {entry.compress_size:,} bytes to {size:,}, as no images do")
                values, read = np.empty(size, np.uint8), 0
                while count := file.readinto(values[read : read + 2**20]):
                    read += count
                return values[:read].view(dtype).reshape(shape, order="F" if fortran else "C")
    with open(path, "rb") as file:
        file.seek(entry.header_offset)
        name_length, extra_length = struct.unpack("<26x2H", file.read(30))
    first = entry.header_offset + 30 + name_length + extra_length + header_bytes
    return np.memmap(path, dtype, "r", first, shape, "F" if fortran else "C")


def open_npz(key: str, path: str) -> Images:
    try:
        array = npz_array(path, "arr_0")
    except KeyError:
        raise ValueError(f"{key}={path} holds no images: it has no key arr_0.") from None
    except Exception as error:      # of a damaged header numpy and zipfile differ in what they raise
        raise ValueError(f"{key}={path} is not a whole npz ({error}).") from error
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3 or not array[:1].size:
        raise ValueError(f"{key}={path}: arr_0 is {array.dtype} {array.shape}; images are uint8 (N, H, W, 3).")
    record = {"path": str(path), "sha256": checkpoints.sha256(Path(path)), "size": list(array.shape[1:3])}
    return Images(len(array), lambda indices: torch.from_numpy(np.array(array[indices])), record)


def open_decoded(
    path: str, device: torch.device | str, autoencoder: str | None = None, decode_batch_size: int | None = None,
) -> Images:
    """Opens a latent folder as the images that its autoencoder makes of it; of moments, those of the means."""
    latents = open_latents(path)
    decoder = autoencoders.load_decoder(autoencoder or latents.autoencoder, latents.shape, latents.convention, device,
                                        batch_size=decode_batch_size, asked=autoencoder is not None)

    def read(indices: np.ndarray) -> Tensor:
        stored = torch.from_numpy(latents.read(indices)[0]).to(device).float()
        return decoder.decode(stored[:, : latents.shape[0]])

    side = [length * decoder.downsample for length in latents.shape[1:]]
    record = {"path": str(path), "fingerprint": latents.fingerprint, "size": side, "autoencoder": decoder.name}
    return Images(latents.count, read, record)


def open_files(key: str, path: str, resolution: int | None) -> Images:
    """Opens a folder or zip; reads each file once, for its size and for the hash of them all."""
    try:
        source = open_source(path)
    except ValueError as error:
        raise ValueError(str(error).replace("source=", f"{key}=")) from error
    if source.not_images and PartialState().is_main_process:
        print(f"{key}={path}: {len(source.not_images)} files are no images by their names and are passed over: "
              f"{', '.join(source.not_images[:5])}{' …' if len(source.not_images) > 5 else ''}.")
    digest, sizes, broken = hashlib.sha256(), Counter(), []
    for index in tqdm(range(len(source)), desc="looking at files", unit="img", delay=2, leave=False,
                      disable=not PartialState().is_main_process or None):
        try:
            data = source.read(index)
            with open_image(data) as image:     # the header only
                sizes[image.size] += 1
        except (UnreadableImage, OSError) as error:
            broken.append(f"{source.names[index]} ({error})")
            continue
        digest.update(hashlib.sha256(data).digest())
    if broken:
        raise ValueError(f"{key}={path}: {len(broken)} of {len(source)} files cannot be read as images: "
                         f"{', '.join(broken[:5])}{' …' if len(broken) > 5 else ''}. Remove or replace them.")
    if len(sizes) > 1 and resolution is None:
        most = ", ".join(f"{count} of {width}x{height}" for (width, height), count in sizes.most_common(3))
        raise ValueError(f"{key}={path} holds images of {len(sizes)} sizes ({most}{', …' if len(sizes) > 3 else ''}): "
                         f"bring them to one, or set resolution= to scale and crop them by ADM's rule.")

    def read(indices: np.ndarray) -> Tensor:
        try:
            return torch.from_numpy(np.stack(list(pool.map(lambda i: source.pixels(int(i), resolution), indices))))
        except UnreadableImage as error:
            raise ValueError(f"{key}={path}: one of the images {source.names[indices[0]]} to "
                             f"{source.names[indices[-1]]} is damaged ({error}). Remove or replace it.") from error

    pool = ThreadPoolExecutor(8)
    size = [resolution] * 2 if resolution else list(next(iter(sizes))[::-1])
    record = {"path": str(path), "sha256": digest.hexdigest(), "size": size, "not_images": len(source.not_images)}
    return Images(len(source), read, record)


def read_over_ranks(images: Images, chosen: np.ndarray, todo: np.ndarray, batch_size: int) -> Indexed:
    """Reads this rank's share of images `chosen[todo]`, batch by batch, with their places in `chosen`."""
    state = PartialState()
    for start in range(state.process_index * batch_size, len(todo), batch_size * state.num_processes):
        indices = todo[start : start + batch_size]
        yield torch.from_numpy(indices), images.read(chosen[indices])


def indexed(batches: Iterable[Batch], seeds: list[int]) -> Indexed:
    """Gives drawn images their seed's place in `seeds` as index; copies, of seed -1, get -1."""
    place = {seed: index for index, seed in enumerate(seeds)} | {-1: -1}
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
            small = keys & {"mu", "sigma", "mu_s", "sigma_s", "space", "weights_sha256"}
            for key in small:
                if (size := arrays.zip.getinfo(f"{key}.npy").file_size) > LARGEST_STATISTIC:
                    raise ValueError(f"{key} has {size:,} bytes, and statistics at most {LARGEST_STATISTIC:,}")
            found = {key: arrays[key] for key in small}
        for key, value in found.items():
            if not isinstance(value, np.ndarray):      # as the bytes of a member that is no npy are
                raise ValueError(f"{key} is no array")
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
            if found[key].shape != shape or found[key].dtype.kind not in "fiu":
                raise ValueError(f"reference={path} has {key} of shape {found[key].shape}, {found[key].dtype}, but "
                                 f"features={extractor.name} need numbers {shape}: it was made with other features.")
            if not np.isfinite(found[key]).all():
                raise ValueError(f"reference={path} has values in {key} that are not finite: get or make it anew.")
        if not is_covariance(found[sigma]):
            raise ValueError(f"reference={path} has a {sigma} that is no covariance, which is symmetric and has no "
                             f"negative eigenvalue: get or make it anew.")
        statistics[name] = tuple(torch.from_numpy(found[key].astype(np.float64)) for key in (mu, sigma))
    images = open_images("reference", str(path)) if "arr_0" in keys else None
    if images is not None and images.count < 2:
        raise ValueError(f"reference={path} holds {images.count} images; at least two are needed.")
    record = images.record if images else {"path": str(path), "sha256": checkpoints.sha256(path)}
    return Reference(statistics, images, record | {"images": images and images.count, "statistics": sorted(statistics)})


def is_covariance(sigma: np.ndarray) -> bool:
    """Tells whether a matrix (D, D) is symmetric and has no negative eigenvalue, beyond the rounding of float32."""
    scale = np.abs(sigma).max(initial=0)
    if not np.abs(sigma - sigma.T).max(initial=0) <= 1e-5 * scale:
        return False
    with contextlib.suppress(np.linalg.LinAlgError):      # which Cholesky's method raises at the first negative one
        np.linalg.cholesky(sigma / (scale or 1) + 1e-5 * np.eye(len(sigma)))
        return True
    return False


def write_reference(path: Path, tally: Tally, extractor: Extractor, images: Images, num_images: int) -> None:
    """Writes statistics in ADM's keys and what they were measured on, with `num_images` of the images as arr_0."""
    arrays = {"space": np.array(extractor.space), "count": np.array(tally.count),
              "weights_sha256": np.array(f"{extractor.name}:{extractor.sha256}")}
    for name, moments in tally.moments.items():
        mu, sigma = moments.mean_and_covariance()
        arrays |= dict(zip(FEATURE_KEYS[name], (mu.cpu().numpy(), sigma.cpu().numpy()), strict=True))
    with beside(path) as partial_file, zipfile.ZipFile(partial_file, "w") as archive:
        for key, array in arrays.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
        if num_images:
            with archive.open("arr_0.npy", "w", force_zip64=True) as file:
                shape = (num_images, *images.record["size"], 3)
                np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
                for indices in np.array_split(evenly(images.count, num_images), -(-num_images // 64)):
                    file.write(images.read(indices).cpu().numpy().tobytes())


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
    """Scores `count` images against the reference; every rank brings its share and gets the same scores.

    `batches` yields indices (B,), each of 0 … count-1 once over all ranks (-1 for a copy that is to be dropped), and
    images (B, H, W, 3) uint8, as `indexed` and `read_over_ranks` do; those that `keep` holds are not to come again.
    Raises ValueError for fewer images than `count`, or metrics or features that cannot be had.
    """
    metrics = available_metrics(extractor, reference, metrics)
    reference.complete(extractor, metrics)
    state = PartialState()
    tally = Tally(extractor, count, state.device, "precision" in metrics or "recall" in metrics)
    fill(tally, batches, extractor, keep, progress)
    scores: list[dict[str, float] | None] = [None]
    if state.is_main_process:
        scores[0] = score(tally, reference, extractor, metrics)
    return (broadcast_object_list(scores) if state.num_processes > 1 else scores)[0]


def fill(
    tally: Tally, batches: Iterable[tuple[Tensor, Tensor]], extractor: Extractor, keep: "Kept | None",
    progress: str | None,
) -> None:
    """Brings the features that `keep` holds, then those of the images, into the tally, and reduces it over ranks."""
    state = PartialState()
    silent = not (progress and state.is_main_process)
    with tqdm(total=tally.count, desc=progress, unit="img", disable=silent or None) as bar:
        if keep is not None:
            for indices, features in keep.load():
                tally.add(indices, features)
            bar.initial = keep.count        # the rate is that of the new ones
            bar.update(keep.count)
        for indices, features in extract(extractor, batches):
            if keep is not None:
                keep.save(indices, features)
            tally.add(indices, features)
            bar.update(min(len(indices) * state.num_processes, tally.count - bar.n))
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
    """Computes the scores of `metrics`, in their order."""
    scores = {}
    for name, feature in ((extractor.distance, "pool"), ("sfid", "spatial")):
        if name in metrics:
            mu, sigma = tally.moments[feature].mean_and_covariance()
            scores[name] = frechet_distance(mu, sigma, *reference.statistics[feature])
    if "inception_score" in metrics:
        scores["inception_score"] = tally.scores.score()
    if tally.pool is not None:
        device = PartialState().device
        both = precision_recall(reference.pool.to(device), tally.pool.to(device))
        scores |= dict(zip(("precision", "recall"), both, strict=True))
    return {name: scores[name] for name in metrics}


class Kept:
    """Features in a folder named by the hash of all that they depend on, so that a killed evaluation continues.

    Another checkpoint, setting, extractor, library or line of this project's code is another folder; nothing stale is
    ever found. A file holds one batch, and is written beside and renamed.
    """

    def __init__(self, root: Path, record: dict, sizes: dict[str, int], count: int):
        record = {**record, "code": code_sha256()}
        self.folder, self.sizes, self.limit = root / digest(record), sizes, count
        state = PartialState()
        if state.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            checkpoints.write_text(self.folder / "record.json", json.dumps(record, indent=1))
        state.wait_for_everyone()
        self.files, seen = [], set()
        for file in sorted(self.folder.glob("*.safetensors")):
            try:
                indices = set(self.read(file)[0].tolist())
            except (OSError, ValueError) as error:
                print(f"{file} is damaged and is passed over: {error}")
                continue
            if not indices & seen:      # two evaluations at once may both have measured some
                seen |= indices
                self.files.append(file)
        self.seen, self.count = seen, len(seen)
        state.wait_for_everyone()       # before any rank adds to the folder

    def read(self, file: Path) -> tuple[Tensor, dict[str, Tensor]]:
        """Reads one batch; raises ValueError where the file is none of these features."""
        if not file.is_file():
            raise ValueError("it is no file.")
        try:
            features = load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{error}.") from error
        indices = features.pop("indices", torch.zeros(0))
        shapes = {name: (torch.float32, (len(indices), size)) for name, size in self.sizes.items()}
        if indices.dtype != torch.int64 or {name: (v.dtype, tuple(v.shape)) for name, v in features.items()} != shapes:
            raise ValueError("its tensors are not of these features.")
        low, high = indices.aminmax() if indices.numel() else (0, 0)
        if low < 0 or high >= self.limit or len(indices.unique()) < len(indices):
            raise ValueError(f"its indices are not {len(indices)} of the first {self.limit} images.")
        if not all(values.isfinite().all() for values in features.values()):
            raise ValueError("its values are not finite.")
        return indices, features

    def missing(self, count: int) -> np.ndarray:
        return np.array([index for index in range(count) if index not in self.seen], dtype=np.int64)

    def load(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yields this rank's share of what was there at the start."""
        state = PartialState()
        for file in self.files[state.process_index :: state.num_processes]:
            yield self.read(file)

    def save(self, indices: Tensor, features: dict[str, Tensor]) -> None:
        tensors = {name: value.cpu().contiguous() for name, value in (features | {"indices": indices}).items()}
        with beside(self.folder / f"{int(indices[0]):08d}.safetensors") as partial_file:
            partial_file.write_bytes(save(tensors))


# ---- the record -----------------------------------------------------------------------------------------------------


def code_sha256() -> str:
    """Hashes this project's modules, which decide what a checkpoint draws and how it is scored."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def digest(record: dict) -> str:
    """Names a record by its content."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


def versions(extractor: Extractor) -> dict[str, str]:
    names = ["numpy", "scipy", "accelerate", *([extractor.library] if extractor.library else [])]
    return {"python": platform.python_version(), "torch": torch.__version__,      # with its CUDA, +cu130
            **{name: importlib.metadata.version(name) for name in names}}


def describe_extractor(extractor: Extractor) -> dict:
    return {key: getattr(extractor, key) for key in ("name", "space", "input", "weights", "sha256")}


def report(row: dict, path: Path) -> None:
    """Appends a row to results.jsonl and shows it as a table."""
    checkpoints.append_row(path, row)
    images, reference, extractor = row["source"], row["reference"], row["extractor"]
    origin = images.get("checkpoint") or images["path"]
    step = f", step {images['step']} ({images['weights']})" if images.get("step") is not None else ""
    lines = [f"{metric:<16}  {value:.6g}" for metric, value in row["metrics"].items()]
    sha256 = f" ({extractor['sha256'][:12]})" if extractor["sha256"] else ""
    lines += [f"{'images':<16}  {row['images']:,} from {origin}{step}",
              f"{'reference':<16}  {reference['path']} ({reference.get('sha256', '')[:12]})",
              f"{'features':<16}  {extractor['name']}{sha256}",
              f"{'time':<16}  {row['seconds']:.1f} s", f"{'record':<16}  {path}"]
    print("\n" + "\n".join(lines))


H100 = {"fp32": 120e12, "bf16": 240e12, "fp16": 240e12}      # FLOP/s: 30 % of a large product's (fp32: TF32), assumed


def derived_hours(drawn: dict, count: int, precision: str) -> float:
    """Derives the hours of one H100 that drawing `count` images takes, by the FLOPs of the network alone."""
    return 2 * sum(drawn["multiply_adds"].values()) * count / H100[precision] / 3600


def beside_published(row: dict, published: Published) -> str:
    """Sets the scores of a row beside published ones, which are of 50,000 images."""
    lines = [f"{published.where}:", f"{'':<16}  {'ours':>9} {'theirs':>9}"]
    for name, theirs in published.scores.items():
        ours, tolerance = row["metrics"].get(name), published.tolerance[name]
        said = "not measured" if ours is None else f"{'within' if abs(ours - theirs) <= tolerance else 'OUTSIDE'}"
        lines.append(f"{name:<16}  {'' if ours is None else f'{ours:.4f}':>9} {theirs:>9} ± {tolerance:<5} {said}")
    if row["images"] != 50_000:
        lines.append(f"Of {row['images']:,} images where theirs are of 50,000: these do not compare.")
    return "\n".join(lines)


DRAWN_RULE = "uint8 = floor(clip(127.5 x + 128, 0, 255))"


# ---- entry ----------------------------------------------------------------------------------------------------------


def check_settings(cfg: ScoringSettings) -> None:
    """Raises ValueError, with the knob, for settings that do not go together."""
    given = [key for key in ("checkpoint", "images", "reference_from") if getattr(cfg, key) is not None]
    if len(given) != 1:
        raise ValueError(f"Give one of checkpoint=, images= and reference_from=, not {' and '.join(given) or 'none'}.")
    meant = {"out": ["reference_from"], "reference_images": ["reference_from"],
             "resolution": ["images", "reference_from"]}
    for key, users in meant.items():
        if getattr(cfg, key) and given[0] not in users:
            raise ValueError(f"{key}={getattr(cfg, key)} is for {' and '.join(users)}, not for {given[0]}: leave it "
                             f"out.")
    needed = "out" if given == ["reference_from"] else "reference"
    if getattr(cfg, needed) is None:
        raise ValueError(f"{given[0]}={getattr(cfg, given[0])} needs {needed}=<an npz>.")
    if needed == "out" and Path(cfg.out).suffix != ".npz":
        raise ValueError(f"out={cfg.out} must end in .npz.")


def choose(images: Images, num_samples: int | None, source: str) -> np.ndarray:
    """Picks the images to look at: all, or `num_samples` evenly spread; raises ValueError where there are fewer."""
    if images.count < (num_samples or 2):
        raise ValueError(f"{source} holds {images.count} images and {num_samples or 'at least two'} are needed: "
                         f"set num_samples lower, or add images.")
    return evenly(images.count, num_samples or images.count)


class Drawing:
    """Images that a network draws of `seeds`, and the record of how: what a result must say to be compared.

    The images' size is put into the record when the first are drawn.
    """

    def __init__(
        self,
        net: DiT,
        diffusion: EDM | RF,
        decode: Callable[[Tensor], Tensor],     # latents (B, C, h, w) -> images (B, H, W, 3) uint8
        seeds: list[int],                       # of all ranks; each is one image
        labels: list[int],                      # one a seed
        *,
        batch_size: int,                        # images a rank draws at once
        num_steps: int,
        guidance: Guidance | None = None,
        precision: str = "fp32",                # of the network, under autocast
        sampler: dict | None = None,            # settings of `diffusion.sample`; None: its own
        outline: DiT | None = None,             # a network of its shapes, to count its passes on; None: itself
    ):
        self.seeds, self.labels = seeds, labels
        sampler = sampler_settings(diffusion, sampler or {})
        self.generate = partial(generate, net, diffusion, decode, num_steps=num_steps, guidance=guidance,
                                precision=precision, **sampler)
        self.batch_size = batch_size
        passes, linear, attention = sampling_cost(outline or net, diffusion, num_steps, guidance, **sampler)
        # JSON has no infinity.
        finite = {key: str(value) if value == math.inf else value for key, value in sampler.items()}
        self.record = {
            "diffusion": type(diffusion).__name__, "sampler": {"solver": "heun", **finite},
            "num_steps": num_steps, "guidance": guidance and guidance.record(), "precision": precision,
            "size": None, "seeds": f"{seeds[0]}-{seeds[-1]}",
            "labels": "class seed % number of classes",      # and of one image:
            "evaluations": passes, "multiply_adds": {"linear": linear, "attention": attention},
        }

    def draw(self, todo: np.ndarray) -> Indexed:
        """Draws this rank's share of the images at the indices `todo`, those of all ranks in rounds."""
        wanted = [self.seeds[index] for index in todo]
        if not wanted:
            return
        batches = self.generate(
            wanted, [self.labels[index] for index in todo],
            batch_size=min(self.batch_size, -(-len(wanted) // PartialState().num_processes)),
        )
        for indices, images in indexed(batches, self.seeds):
            self.record["size"] = list(images.shape[1:3])
            yield indices, images


def describe_autoencoder(name: str, decode_precision: str) -> dict:
    vae = Path(name) if Path(name).is_file() else Path(name) / "diffusion_pytorch_model.safetensors"
    return {"autoencoder": name, "autoencoder_sha256": checkpoints.sha256(vae) if vae.is_file() else None,
            "decode_precision": decode_precision}


def open_checkpoint(cfg: ScoringSettings, state: PartialState) -> tuple[Drawing, Path]:
    """Loads a checkpoint to draw from; returns what draws, with its record, and the run's folder."""
    trained = load_trained(cfg.checkpoint, cfg.weights, cfg.diffusion_name, cfg.autoencoder, state.device,
                           cfg.num_heads)
    if trained.inferred:
        state.print(trained.inferred)
    classes = parse_classes("classes", cfg.classes, trained.net.num_classes, trained.class_names)
    seeds = list(range(cfg.seed, cfg.seed + (cfg.num_samples or 50_000)))
    guidance, guidance_record = build_guidance(cfg, trained, state.device)
    decode = load_decoder(trained, cfg, state.device)
    drawing = Drawing(
        trained.net, trained.diffusion, decode, seeds, labels_of(seeds, classes), batch_size=cfg.batch_size,
        num_steps=cfg.num_steps, guidance=guidance, precision=cfg.precision,
        sampler=cfg.sampler.model_dump(),
    )
    given = Path(cfg.checkpoint)
    drawing.record = {
        "checkpoint": str(trained.folder or given), "step": trained.step, "weights": trained.weights,
        "weights_sha256": checkpoints.sha256(trained.file), "ema": trained.weights == "ema",
        "classes": classes if cfg.classes is not None else "all",
        **({"family": trained.family} if trained.family else {}),      # which says how bare weights were read
        **describe_autoencoder(trained.autoencoder, cfg.decode_precision), **drawing.record,
        "guidance": guidance_record,
    }
    return drawing, trained.folder.parent.parent if trained.folder else given.parent


def result_row(
    scores: dict[str, float | None],    # None where they are still to be had
    count: int,                         # of images
    source: dict,                       # what the images are, or were drawn of and how
    extractor: Extractor,
    reference: Reference,
    *,
    seconds: float,
    batch_size: int,
    image_rule: str,                    # how uint8 was made
    resolution: int | None = None,      # that images were brought to
    resumed_images: int = 0,            # of which kept features were found
) -> dict:
    """Puts scores beside all that they depend on: a row of results.jsonl."""
    state = PartialState()
    return {
        "metrics": scores, "images": count, "source": source, "resumed_images": resumed_images,
        "extractor": describe_extractor(extractor), "reference": reference.record, "image_rule": image_rule,
        "resolution": resolution, "batch_size": batch_size, "processes": state.num_processes,
        **speed.describe_device(state.device),
        "versions": versions(extractor), "code_sha256": code_sha256(), "commit": commit(),
        "seconds": seconds, "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def read_results(path: Path) -> list[dict]:
    """Reads the rows of results.jsonl, but for those that are no scores of ours."""
    return [row for row in checkpoints.read_rows(path)
            if isinstance(row.get("source"), dict) and isinstance(row.get("metrics"), dict)]


BY_CODE = ("versions", "code_sha256")     # what a row of another version of the code differs in, too


def scored_before(row: dict, path: Path, whatever_code: bool = False) -> dict | None:
    """Finds in results.jsonl a row whose scores are those that `row`, still without any, is going to have.

    With `whatever_code` it may be of another version. What an old row does not tell does not set it apart.
    """
    def facts(row: dict) -> dict:
        compared = ("images", "extractor", "reference", "image_rule", "resolution", *(() if whatever_code else BY_CODE))
        source = {f"source.{key}": value for key, value in row["source"].items() if key != "size"}
        return source | {key: row[key] for key in compared if key in row}

    wanted = facts(json.loads(json.dumps(row)))
    for old in read_results(path):
        found = facts(old)
        if (found and all(found.get(key, value) == value for key, value in wanted.items())
                and found.keys() <= wanted.keys() and row["metrics"].keys() <= old["metrics"].keys()):
            return old
    return None


def open_extractor(cfg: ScoringSettings, state: PartialState) -> Extractor:
    with state.local_main_process_first():      # which downloads weights, and records their hash, for the others
        return load_extractor(cfg.features, cfg.features_weights, cfg.sha256, state.device)


def run(cfg: ScoringSettings, reuse: bool = False, must_have: str | None = None) -> tuple[dict, Path]:
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
        drawing, home = open_checkpoint(cfg, state)
        count, source, rule = len(drawing.seeds), drawing.record, DRAWN_RULE
        if cfg.published:
            state.print(f"Drawing takes about {derived_hours(source, count, cfg.precision):.2g} hours of one H100 "
                        f"[derived: FLOPs at {H100[cfg.precision] / 1e12:.0f} TFLOP/s].")
    else:
        images, home = open_images("images", cfg.images, cfg.resolution, state.device, cfg.autoencoder,
                                   cfg.decode_batch_size), Path()
        chosen = choose(images, cfg.num_samples, f"images={cfg.images}")
        count, source, rule = len(chosen), {**images.record, "images": images.count}, "as stored"
    results = Path(cfg.results or home / "results.jsonl")
    root = results.parent / "features" if cfg.keep_features else None
    results.parent.mkdir(parents=True, exist_ok=True)
    place = results.parent.stat()

    def kept(record: dict, count: int) -> Kept | None:
        facts = {"extractor": describe_extractor(extractor), "versions": versions(extractor),
                 **speed.describe_device(state.device)}
        return Kept(root, record | {"count": count} | facts, extractor.sizes, count) if root else None

    def row(scores: dict[str, float | None], resumed_images: int = 0) -> dict:
        return result_row(
            scores, count, source, extractor, reference, seconds=time.perf_counter() - started,
            batch_size=cfg.batch_size, image_rule=rule, resolution=cfg.resolution, resumed_images=resumed_images)

    if reuse and (old := scored_before(row(dict.fromkeys(metrics)), results)):
        return old, results

    # ---- the reference's own images, then the stream
    stored = reference.images.count if reference.images else 0
    reference.complete(extractor, metrics, cfg.batch_size, kept({"images": reference.record}, stored))
    keep = kept({"images": dict(source)}, count)
    todo = np.arange(count) if keep is None else keep.missing(count)
    if cfg.checkpoint is not None:
        batches = drawing.draw(todo)
    else:
        batches = read_over_ranks(images, chosen, todo, cfg.batch_size)
    scores = evaluate(batches, count, reference, extractor, metrics=metrics, keep=keep, progress="scoring")
    scored = row(scores, keep.count if keep else 0)
    if state.is_main_process:
        size, reference_size = source.get("size"), reference.record.get("size")
        if size and reference_size and size != reference_size:
            print(f"The images are {size[1]}x{size[0]} and the reference's {reference_size[1]}x{reference_size[0]}: is "
                  f"it the right one?")
        report(scored, results)
        checkpoints.require_same(results.parent, place)
    state.wait_for_everyone()       # until the row is there for all to read
    return scored, results


@command("fid", ScoringSettings)
def main(cfg: ScoringSettings) -> None:
    state = speed.join_ranks(cfg.cpu, cfg.tf32)
    if cfg.reference_from is not None:
        write_statistics(cfg, state)
        return
    row, _ = run(cfg)
    if cfg.published:
        state.print(beside_published(row, cfg.published))


def write_statistics(cfg: ScoringSettings, state: PartialState) -> None:
    """Measures `reference_from` and writes `out`."""
    check_settings(cfg)
    extractor = open_extractor(cfg, state)
    images = open_images("reference_from", cfg.reference_from, cfg.resolution, state.device, cfg.autoencoder,
                         cfg.decode_batch_size)
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
