"""Features -> what is kept of a set of images; the reference."""

import contextlib
import json
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather, reduce
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from tqdm import tqdm

from runtime import files
from runtime.files import beside, record_sha256
from scoring.features import Extractor, extract
from scoring.image_sets import Images, evenly, open_images, read_over_ranks
from scoring.metrics import BLOCK, Moments, ScoreSums

SCORING_VERSION = 1      # raised by whoever changes a score of the same images: tests/test_versions.py
FEATURE_KEYS = {"pool": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}     # in a reference npz


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
            small = keys & {"mu", "sigma", "mu_s", "sigma_s", "space", "weights_sha256"}
            found = {key: np.asarray(arrays[key]) for key in small}
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
    record = images.record if images else {"path": str(path), "sha256": files.sha256(path)}
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
            files.write_text(self.folder / "record.json", json.dumps(record, indent=1))
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
