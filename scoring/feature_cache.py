"""Features and statistics in files, from which a killed evaluation continues and a later one starts."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from accelerate import PartialState
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from runtime import files

SCORING_VERSION = 3  # raised by whoever changes a score of the same images: tests/test_versions.py


def read_kept(file: Path) -> dict[str, Tensor] | None:
    """Reads a file of `write_kept`; None where there is none, or a damaged one, whose images are measured again."""
    try:
        return load_file(file)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        print(f"{file} is damaged, and its images are measured again: {error}")
        return None


def write_kept(file: Path, tensors: dict[str, Tensor]) -> None:
    with files.atomic_write(file) as partial:
        partial.write_bytes(save({name: value.cpu().contiguous() for name, value in tensors.items()}))


class FeatureCache:
    """Features of `count` images in a folder that is named by the hash of all that they depend on.

    Another checkpoint, setting, extractor, library or version of what samples and scores is another folder. A file
    holds one batch. Every rank makes one of these, and all of them together read and write the folder.
    """

    def __init__(self, root: Path, record: dict, total: int, sizes: Mapping[str, int] | None = None):
        record = {**record, "scoring_version": SCORING_VERSION}
        self.folder, self.total = files.inside(root.parent, root.name, files.record_sha256(record)), total
        state = PartialState()
        if state.is_main_process:
            files.write_text(self.folder / "record.json", json.dumps(record, indent=1))
        state.wait_for_everyone()
        self.files, self.seen, self.sizes = [], set(), sizes or {}  # lengths of the features; {}: any
        for file in sorted(self.folder.glob("*.safetensors")):
            found = read_kept(file)
            indices = set(found["indices"].tolist()) if found and self.fits(found) else set()
            if indices and not indices & self.seen:  # two evaluations at once may both have measured some
                self.seen |= indices
                self.files.append(file)
        self.count = len(self.seen)
        state.wait_for_everyone()  # before any rank adds to the folder

    def fits(self, found: dict[str, Tensor]) -> bool:
        """True if a file holds images of the set, once each, and finite rows of `sizes` for each of them."""
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
        state = PartialState()
        for file in self.files[state.process_index :: state.num_processes]:
            features = load_file(file)
            yield features.pop("indices"), features

    def save(self, indices: Tensor, features: dict[str, Tensor]) -> None:
        write_kept(self.folder / f"{int(indices[0]):08d}.safetensors", features | {"indices": indices})
