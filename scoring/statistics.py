"""Features of one set of images -> the statistics for its scores, over ranks; optionally cached in files."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import reduce
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from tqdm import tqdm

from runtime import files
from runtime.notebook import hides_bars
from scoring.features import Extractor, extract
from scoring.image_sets import Images, Indexed, evenly, read_share
from scoring.metrics import BLOCK, Moments, ScoreSums

SCORING_VERSION = 3  # a change that alters scores of the same images increments it: tests/test_versions.py
FEATURE_KEYS = {"pool": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}  # in a reference npz


# ---- cached features ------------------------------------------------------------------------------------------------


def load_cached(file: Path) -> dict[str, Tensor] | None:
    """Reads a file of `save_cached`; None if there is none or it is damaged, so that its images are measured again."""
    try:
        return load_file(file)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        print(f"{file} is damaged, and its images are measured again: {error}")
        return None


def save_cached(file: Path, tensors: dict[str, Tensor]) -> None:
    with files.atomic_write(file) as partial:
        partial.write_bytes(save({name: value.cpu().contiguous() for name, value in tensors.items()}))


class FeatureCache:
    """Features of `total` images, in a folder named by a hash of everything they depend on.

    A different checkpoint, setting, extractor, library, or version of sampling or scoring has a different folder. A
    file holds one batch. All ranks make the cache together, and read and write the folder.
    """

    def __init__(
        self, state: PartialState, root: Path, record: dict, total: int, sizes: Mapping[str, int] | None = None,
    ):
        record = {**record, "scoring_version": SCORING_VERSION}
        self.state, self.total = state, total
        self.folder = files.inside(root.parent, root.name, files.record_sha256(record))
        if state.is_main_process:
            files.write_text(self.folder / "record.json", json.dumps(record, indent=1))
        state.wait_for_everyone()
        self.files, self.seen, self.sizes = [], set(), sizes or {}  # of the features; {}: any
        for file in sorted(self.folder.glob("*.safetensors")):
            found = load_cached(file)
            indices = set(found["indices"].tolist()) if found and self.fits(found) else set()
            if indices and not indices & self.seen:  # two evaluations at once may have measured the same images
                self.seen |= indices
                self.files.append(file)
        self.count = len(self.seen)
        state.wait_for_everyone()  # before any rank adds to the folder

    def fits(self, found: dict[str, Tensor]) -> bool:
        """True if a file holds images of the set, once each, with finite features of the right sizes."""
        indices, features = found.get("indices"), {key: value for key, value in found.items() if key != "indices"}
        return bool(indices is not None and indices.ndim == 1 and not indices.is_floating_point()
                    and len(indices.unique()) == len(indices) > 0 and 0 <= indices.min() <= indices.max() < self.total
                    and features and all(value.is_floating_point() and value.shape == (len(indices), self.sizes.get(
                        name, *value.shape[-1:])) and value.isfinite().all() for name, value in features.items()))

    def missing(self) -> np.ndarray:
        """Returns the indices (n,) of the images that have no features."""
        return np.setdiff1d(np.arange(self.total), list(self.seen))

    def load(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yields this rank's share of what was there at the start: indices (B,) and named features."""
        for file in self.files[self.state.process_index :: self.state.num_processes]:
            features = load_file(file)
            yield features.pop("indices"), features

    def save(self, indices: Tensor, features: dict[str, Tensor]) -> None:
        save_cached(self.folder / f"{int(indices[0]):08d}.safetensors", features | {"indices": indices})


# ---- features -> statistics -----------------------------------------------------------------------------------------


class FeatureStats:
    """Statistics of one set of images: moments, score sums and, for neighbourhoods, the features themselves."""

    def __init__(self, extractor: Extractor, count: int, device: torch.device | str, keep_pool: int = 0):
        device = "cpu" if torch.device(device).type == "mps" else device  # MPS has no float64
        self.count = count
        self.moments = {name: Moments(size, device) for name, size in extractor.sizes.items() if name in FEATURE_KEYS}
        self.scores = ScoreSums(count, extractor.sizes["probs"], device) if "probs" in extractor.sizes else None
        # Features of `keep_pool` images, evenly spread, in the indices' order; `row` is each image's row there, or -1.
        self.pool = torch.zeros(keep_pool, extractor.sizes["pool"]) if keep_pool else None
        self.row = torch.full((count,), -1)
        self.row[evenly(count, keep_pool)] = torch.arange(keep_pool)

    def add(self, indices: Tensor, features: dict[str, Tensor]) -> None:
        for name, moments in self.moments.items():
            moments.add(features[name])
        if self.scores is not None:
            self.scores.add(indices, features["probs"])
        if self.pool is not None:
            rows = self.row[indices.cpu()]
            self.pool[rows[rows >= 0]] = features["pool"].float().cpu()[rows >= 0]

    def merge(self, state: PartialState) -> None:
        """Sums over all ranks, once."""
        for part in (*self.moments.values(), *([self.scores] if self.scores else [])):
            part.merge(partial(reduce, reduction="sum"))
        measured = int(self.moments["pool"].count)
        assert measured == self.count, f"{measured} of {self.count} images were measured"
        if self.pool is not None and state.num_processes > 1:
            for rows in self.pool.split(BLOCK):  # one rank has the row, and the others zeros
                rows[:] = reduce(rows.to(state.device), reduction="sum").cpu()


def fill(
    state: PartialState, parts: list[tuple[FeatureStats, Extractor, FeatureCache | None]], batches: Indexed,
    progress: str | None,
) -> None:
    """Adds cached features, then those of the images, to the statistics of each extractor, and sums over ranks.

    Images whose features are cached are not passed to the extractor again.
    """
    count = parts[0][0].count
    silent = not (progress and state.is_main_process)
    with tqdm(total=count, desc=progress, unit="img", disable=hides_bars(silent)) as bar:
        for stats, _, keep in parts:
            for indices, features in keep.load() if keep is not None else ():
                stats.add(indices, features)
        bar.initial = min(keep.count if keep is not None else 0 for *_, keep in parts)  # the speed is of new images
        bar.update(bar.initial)
        for indices, images in batches:
            for stats, extractor, keep in parts:
                seen = keep.seen if keep is not None else ()
                new = torch.tensor([-1 if index in seen else index for index in indices.tolist()])
                for found, features in extract(extractor, [(new, images)]):
                    if keep is not None:
                        keep.save(found, features)
                    stats.add(found, features)
            bar.update(min(int((indices >= 0).sum()) * state.num_processes, count - bar.n))
    for stats, *_ in parts:
        stats.merge(state)


def measure(
    state: PartialState, images: Images, extractor: Extractor, batch_size: int, keep: FeatureCache | None = None,
    keep_pool: int = 0, chosen: np.ndarray | None = None,
) -> FeatureStats:
    """Measures a reference's images, or only the `chosen` ones, over all ranks."""
    chosen = np.arange(images.count) if chosen is None else chosen
    stats = FeatureStats(extractor, len(chosen), state.device, keep_pool)
    todo = np.arange(len(chosen)) if keep is None else keep.missing()
    fill(state, [(stats, extractor, keep)], read_share(state, images, chosen, todo, batch_size), "reference")
    return stats
