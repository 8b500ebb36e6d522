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
        """Brings all ranks' sums together, once."""
        for part in (*self.moments.values(), *([self.scores] if self.scores else [])):
            part.merge(partial(reduce, reduction="sum"))
        measured = int(self.moments["pool"].count)
        assert measured == self.count, f"{self.count} images were asked for and {measured} came"
        if self.pool is not None and PartialState().num_processes > 1:
            for rows in self.pool.split(BLOCK):  # a row is one rank's, and zeros on the others
                rows[:] = reduce(rows.to(PartialState().device), reduction="sum").cpu()


def fill(
    parts: list[tuple[Tally, Extractor, FeatureCache | None]], batches: Indexed, progress: str | None,
) -> None:
    """Brings kept features, then those of the images, into the tally of each extractor, and reduces it over ranks.

    Images that a cache already has pass its extractor by.
    """
    state, count = PartialState(), parts[0][0].count
    silent = not (progress and state.is_main_process)
    with tqdm(total=count, desc=progress, unit="img", disable=is_hidden(silent)) as bar:
        for tally, _, keep in parts:
            for indices, features in keep.load() if keep is not None else ():
                tally.add(indices, features)
        bar.initial = min(keep.count if keep is not None else 0 for *_, keep in parts)  # the rate is of the new ones
        bar.update(bar.initial)
        for indices, images in batches:
            for tally, extractor, keep in parts:
                seen = keep.seen if keep is not None else ()
                new = torch.tensor([-1 if index in seen else index for index in indices.tolist()])
                for found, features in extract(extractor, [(new, images)]):
                    if keep is not None:
                        keep.save(found, features)
                    tally.add(found, features)
            bar.update(min(int((indices >= 0).sum()) * state.num_processes, count - bar.n))
    for tally, *_ in parts:
        tally.over_ranks()


def measure(
    images: Images, extractor: Extractor, batch_size: int, keep: FeatureCache | None = None, keep_pool: int = 0,
    chosen: np.ndarray | None = None,
) -> Tally:
    """Tallies a reference's images, or those `chosen` of them, over all ranks."""
    chosen = np.arange(images.count) if chosen is None else chosen
    tally = Tally(extractor, len(chosen), PartialState().device, keep_pool)
    todo = np.arange(len(chosen)) if keep is None else keep.missing()
    fill([(tally, extractor, keep)], read_over_ranks(images, chosen, todo, batch_size), "reference")
    return tally
