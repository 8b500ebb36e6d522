"""Features of one set of images -> what its scores need, over ranks."""

from functools import partial

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor
from tqdm import tqdm

from runtime.notebook import is_hidden
from scoring.feature_cache import FeatureCache
from scoring.features import Extractor, extract
from scoring.image_sets import Images, Indexed, evenly, read_over_ranks
from scoring.metrics import BLOCK, Moments, ScoreSums

FEATURE_KEYS = {"pool": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}  # in a reference npz


class Tally:
    """What is kept of one set of images: moments, score sums and, for neighbourhoods, the features themselves."""

    def __init__(self, extractor: Extractor, count: int, device: torch.device | str, keep_pool: int = 0):
        device = "cpu" if torch.device(device).type == "mps" else device  # which has no float64
        self.count = count
        self.moments = {name: Moments(size, device) for name, size in extractor.sizes.items() if name in FEATURE_KEYS}
        self.scores = ScoreSums(count, extractor.sizes["probs"], device) if "probs" in extractor.sizes else None
        # Features of `keep_pool` images, evenly spread, in the indices' order; of each image its row there, or -1.
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

    def over_ranks(self) -> None:
        """Brings all ranks' sums together, once; raises ValueError where images are missing."""
        for part in (*self.moments.values(), *([self.scores] if self.scores else [])):
            part.merge(partial(reduce, reduction="sum"))
        measured = int(self.moments["pool"].count)
        if measured != self.count:
            raise ValueError(f"{self.count} images were asked for and {measured} came.")
        if self.pool is not None and PartialState().num_processes > 1:
            for rows in self.pool.split(BLOCK):  # a row is one rank's, and zeros on the others
                rows[:] = reduce(rows.to(PartialState().device), reduction="sum").cpu()


def fill(tally: Tally, batches: Indexed, extractor: Extractor, keep: FeatureCache | None, progress: str | None) -> None:
    """Brings the features that `keep` has, then those of the images, into the tally, and reduces it over ranks."""
    state = PartialState()
    silent = not (progress and state.is_main_process)
    with tqdm(total=tally.count, desc=progress, unit="img", disable=is_hidden(silent)) as bar:
        if keep is not None:
            for indices, features in keep.load():
                tally.add(indices, features)
            bar.initial = keep.count  # the rate is that of the new ones
            bar.update(keep.count)
        for indices, features in extract(extractor, batches):
            if keep is not None:
                keep.save(indices, features)
            tally.add(indices, features)
            bar.update(min(len(indices) * state.num_processes, tally.count - bar.n))
    tally.over_ranks()


def measure(
    images: Images, extractor: Extractor, batch_size: int, keep: FeatureCache | None = None, keep_pool: int = 0,
    chosen: np.ndarray | None = None,
) -> Tally:
    """Tallies a reference's images, or those `chosen` of them, over all ranks."""
    chosen = np.arange(images.count) if chosen is None else chosen
    tally = Tally(extractor, len(chosen), PartialState().device, keep_pool)
    todo = np.arange(len(chosen)) if keep is None else keep.missing()
    fill(tally, read_over_ranks(images, chosen, todo, batch_size), extractor, keep, "reference")
    return tally
