"""Scores of images, of any origin and by index, against a reference; over ranks, and resumed where it was killed.

fid.py says of what, and writes down what came out.
"""

import contextlib
import hashlib
import json
import math
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather, reduce
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from tqdm import tqdm

import autoencoder as autoencoders
import checkpoint as checkpoints
from checkpoint import beside
from data import open_latents
from features import Extractor, extract
from images import UnreadableImage, open_image, open_source
from metrics import BLOCK, Moments, ScoreSums, frechet_distance, precision_recall

SCORING_VERSION = 1      # raised by whoever changes a score of the same images: tests/test_versions.py
FEATURE_KEYS = {"pool": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}     # in a reference npz

Indexed = Iterator[tuple[Tensor, Tensor]]      # indices (B,) int64, -1 for a copy; images (B, H, W, 3) uint8


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


def open_npz(key: str, path: str) -> Images:
    """Opens the images of an npz, which are read out of the file when they are asked for."""
    try:
        file = zipfile.ZipFile(path).open("arr_0.npy")      # noqa: SIM115      (for as long as it is read)
        np.lib.format.read_magic(file)
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)      # numpy's for every plain array
    except KeyError:
        raise ValueError(f"{key}={path} holds no images: it has no key arr_0.") from None
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError) as error:
        raise ValueError(f"{key}={path} is not a whole npz ({error}).") from error
    if dtype != np.uint8 or fortran or len(shape) != 4 or shape[3] != 3 or 0 in shape:
        raise ValueError(f"{key}={path}: arr_0 is {dtype} {shape}; images are uint8 (N, H, W, 3) in C order.")
    first, size = file.tell(), math.prod(shape[1:])

    def read(indices: np.ndarray) -> Tensor:
        pixels = bytearray()
        try:
            for index in indices.tolist():
                file.seek(first + index * size)      # which reads all between, and from the start to go back
                pixels += file.read(size)
            return torch.frombuffer(pixels, dtype=torch.uint8).view(len(indices), *shape[1:])
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
            raise ValueError(f"{key}={path} is damaged before image {indices[-1] + 1} ({error}).") from error

    record = {"path": str(path), "sha256": checkpoints.sha256(Path(path)), "size": list(shape[1:3])}
    return Images(shape[0], read, record)


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
        measured = {name: moments.mean_and_covariance() for name, moments in tally.moments.items()}
        self.statistics = measured | self.statistics      # what the npz holds goes first


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


# ---- the scores -----------------------------------------------------------------------------------------------------


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


# ---- features, kept -------------------------------------------------------------------------------------------------


def record_sha256(record: dict) -> str:
    """Names a record by its content."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


class Kept:
    """Features in a folder named by the hash of all that they depend on, so that a killed evaluation continues.

    Another checkpoint, setting, extractor, library or version of what draws and scores is another folder; nothing stale
    is ever found. A file holds one batch, and is written beside and renamed.
    """

    def __init__(self, root: Path, record: dict, sizes: dict[str, int], count: int):
        record = {**record, "scoring_version": SCORING_VERSION}
        self.folder, self.sizes, self.limit = root / record_sha256(record), sizes, count
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
