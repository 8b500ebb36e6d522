"""The formats in which other code stores latents: how to read each, and what its values mean.

A format is one function, which opens a source, and its line in FORMS. docs/interop.md describes the formats. Nothing
is unpickled.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autoencoder import SD_VAE_SCALE, Convention
from latents.folder import Kind, check_values
from latents.labels import parse_dataset
from latents.listing import Listing, a_few, list_folder, list_source, require_one_set, spread, stamp_of
from runtime.schema import typed
from runtime.untrusted import reading
from weights.autoencoders import HUB_NAMES, STATISTICS, own_convention, read_statistics

EDM2 = Convention(0.5, latents_mean=(5.81, 3.25, 0.12, -2.15), latents_std=(4.17, 4.62, 3.71, 3.28), pixels=(0, 1))

NUM_PROBED = 256        # latents checked before anything is written
Reader = Callable[[int, int], np.ndarray | torch.Tensor]  # rows start to end, as they are stored, (n, *shape)


@dataclass
class Stored:
    """A set of latents on disk, what the values mean, and how the code that wrote them makes network inputs of them."""

    labels: np.ndarray                          # (count,)
    shape: tuple[int, ...]                      # of one latent, (C or 2C, h, w)
    stamps: list[tuple[object, ...]]            # of its files, as in latents.listing.Listing
    sides: Mapping[str, Reader]                 # latents, and mirrored if there are copies
    kind: Kind = "sample"                       # which the latent folder will have
    autoencoder: str = "sd_vae_ema"             # a name for load_autoencoder; "none" if it can decode none of these
    convention: Convention = Convention(SD_VAE_SCALE)
    scaled: bool = False                        # whether the values are network inputs already
    log_variance: bool = False                  # whether the second half of the channels is that, not the std

    def convert(self, values: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Maps stored values (n, C or 2C, h, w) to those of a latent folder, float16.

        Computes in float32 and in the same order as the source's own code. Raises ValueError for complex numbers.
        """
        numbers, convention = torch.as_tensor(values), self.convention
        if numbers.is_complex():    # whose imaginary parts torch would drop
            raise ValueError(f"The latents are complex numbers ({numbers.dtype}): write real ones.")
        values = numbers.float()
        if self.scaled:
            return values.half()
        if self.log_variance:
            return convention.moments(values).half()
        if self.kind == "sample":
            return convention.latent(values).half()
        means, stds = values.chunk(2, dim=1)
        if convention.latents_mean is None or convention.latents_std is None:
            return torch.cat([convention.latent(means), stds * convention.scale], dim=1).half()
        mean, std = (torch.tensor(numbers).view(-1, 1, 1)
                     for numbers in (convention.latents_mean, convention.latents_std))
        scale = convention.scale / std
        return torch.cat([means * scale - (mean + convention.shift) * scale, stds * scale], dim=1).half()

    def check(self, where: str) -> None:
        """Raises ValueError if some latents, spread over the source, are not finite or not of this kind and scale."""
        most = max(1, 2**26 // math.prod(self.shape))  # numbers in memory
        rows = [self.convert(read(index, index + 1))
                for index in spread(len(self.labels), min(NUM_PROBED, most)).tolist() for read in self.sides.values()]
        values, scale = torch.cat(rows).double().numpy(), self.convention.scale
        if not np.isfinite(values).all():
            raise ValueError(f"{where} has latents that are not finite or overflow float16: correct the source.")
        if self.log_variance and values[:, values.shape[1] // 2 :].min() >= 0.99 * scale:  # up to float16 rounding
            raise ValueError(f"{where}: the second half of the channels is never below 0, so it looks like standard "
                             f"deviations, but log-variances are expected here: write 2 * log(std) instead.")
        how = "values as stored" if self.scaled else f"scale={scale:g}"
        check_values(values, self.kind, self.autoencoder, f"{where}, read with {how}",
                     "set another format=, kind= or scale=, or write them anew")


def open_stored(
    format: str, source: str, kind: Kind | None, scale: float | None, latent_norm: bool, autoencoder: str | None,
) -> Stored:
    """Opens a source in one of FORMS. Raises ValueError for files or settings that do not fit the format."""
    options: dict[str, Any] = {"tread": {"kind": kind}, "lightningdit": {"latent_norm": latent_norm}}
    stored = FORMS[format][0](Path(source), **options.get(format, {}))
    channels, *sides = stored.shape or (0,)
    if len(sides) != 2 or sides[0] != sides[1] or not channels or stored.kind == "moments" and channels % 2:
        raise ValueError(f"source={source} holds arrays of shape {stored.shape}, but latents have (C, R, R), channels "
                         f"first, and moments an even C. Another shape means another format, or images that are not "
                         f"square.")
    stored = replace(stored, autoencoder=autoencoder or stored.autoencoder, scaled=stored.scaled and scale is None)
    channels //= 2 if stored.kind == "moments" else 1
    if stored.autoencoder in HUB_NAMES and channels != 4:
        raise ValueError(f"source={source} holds latents of {channels} channels, read with kind={stored.kind}, but "
                         f"{stored.autoencoder}'s have 4: correct kind= or latent_norm=, or set autoencoder= "
                         f"(none if it is unknown).")
    if stored.convention.latents_mean is None:
        return replace(stored, convention=convention_of(stored.autoencoder, source, scale))
    # Statistics belong to the stored values, whatever decodes them.
    return replace(stored, convention=replace(stored.convention, scale=scale or stored.convention.scale))


def convention_of(autoencoder: str, source: str, scale: float | None) -> Convention:
    """Returns the autoencoder's own convention, or a typed scale for one that has none.

    Raises ValueError where the two differ, or neither says how to scale.
    """
    own = own_convention(autoencoder)
    if own is not None and scale not in (None, own.scale):
        raise ValueError(f"scale={scale:g} is typed, but autoencoder={autoencoder} decodes latents of scale "
                         f"{own.scale:g}: leave scale= out, name the folder of another autoencoder, or set "
                         f"autoencoder=none.")
    if own is None and scale is None:
        raise ValueError(f"autoencoder={autoencoder} does not say how the latents of source={source} are scaled: leave "
                         f"it out if by an SD-VAE's {SD_VAE_SCALE}, name a folder whose config.json has the scale, or "
                         f"set scale= as well, by which they will be multiplied (1 if they are scaled already).")
    return own or Convention(scale or 1.0)


# ---- one npy file per latent ----------------------------------------------------------------------------------------


def files_of(listing: Listing, suffix: str = ".npy") -> dict[str, str]:
    """Returns the names of a listing's files with a suffix, by what they are without it."""
    return {name.removesuffix(suffix): name for name in listing.names if name.endswith(suffix)}


def load(listing: Listing, file: str) -> np.ndarray:
    """Reads an array from a file; raises ValueError for anything else."""
    with reading(f"{listing.path}/{file}", "a complete npy file of numbers like the others"):
        return np.lib.format.read_array(BytesIO(listing.read(file)))  # refuses pickles


def open_files(source: Path, listing: Listing, latents: dict[str, str], class_of: Mapping[str, object]) -> Stored:
    """Opens one latent a file, in the order of `latents`. Raises ValueError unless each has a class and each class one.

    Some writers keep the batch axis.
    """
    if not latents:
        raise ValueError(f"source={source} holds no .npy files of latents. Pickles, such as MaskDiT's .latent, can run "
                         f"code and are never loaded: rewrite them as docs/interop.md says.")
    if unpaired := sorted(latents.keys() ^ class_of.keys()):
        raise ValueError(f"source={source} has {len(latents)} latents and {len(class_of)} labels: {unpaired[0]!r} has "
                         f"no {'label' if unpaired[0] in latents else 'latent'}.")
    files = [*latents.values()]
    first = load(listing, files[0])

    def read(start: int, end: int) -> np.ndarray:
        arrays = {file: load(listing, file) for file in files[start:end]}
        for file, array in arrays.items():
            if array.shape != first.shape:
                raise ValueError(f"{listing.path}/{file} has the shape {array.shape}, but {files[0]} {first.shape}.")
        return np.stack([*arrays.values()]).reshape(len(arrays), *shape)

    shape = first.shape[1:] if first.ndim == 4 and len(first) == 1 else first.shape
    with reading(f"source={source}", "a set with one class for each latent", "correct the labels"):
        labels = np.array([class_of[name] for name in latents])
    return Stored(labels, shape, [*map(listing.stamp, files)], {"latents": read})


def open_repa(source: Path) -> Stored:
    """Opens .npy files and their dataset.json, {"labels": [[name, class], …]}, in a folder, a zip, or a folder in it.

    `{"labels": null}` means one class.
    """
    listing = list_source(source)
    if "dataset.json" not in listing.names:
        raise ValueError(f"source={source} holds no dataset.json: name the folder that does, such as "
                         f"{typed('source', source / 'vae-sd')}.")
    with reading(listing.path / "dataset.json", "a file of labels", "correct it"):
        labels = parse_dataset(listing.read("dataset.json"))
    latents = files_of(listing)
    class_of = {name.removesuffix(".npy"): label for name, label in labels.items()} or dict.fromkeys(latents, 0)
    stored = open_files(source, listing, dict(sorted(latents.items())), class_of)
    return replace(stored, kind="moments", autoencoder="sd_vae_mse")


def open_edm2(source: Path) -> Stored:
    """Opens what the same tool has written of pixels in 0..1."""
    return replace(open_repa(source), convention=EDM2)


def open_fastdit(source: Path) -> Stored:
    """Opens fast-DiT's pairs of <i>.npy or <rank>-<i>.npy, one latent and one label a file, sorted by number."""
    names = [path.name.removesuffix("_features") for path in sorted(source.glob("*_features"))]
    if len(names) != 1 or not (source / f"{names[0]}_labels").is_dir():
        raise ValueError(f"source={source} must hold one folder <name>_features and its <name>_labels, not "
                         f"{a_few(names) or 'none'}: use a folder with one.")
    features, labels = (list_folder(source / f"{names[0]}_{part}") for part in ("features", "labels"))
    latents = sorted(files_of(features).items(), key=lambda item: ([*map(int, re.findall(r"\d+", item[0]))], item[0]))
    class_of = {name: load(labels, file).squeeze()[()] for name, file in files_of(labels).items()}
    return replace(open_files(source, features, dict(latents), class_of), scaled=True)


def open_tread(source: Path, kind: Kind | None) -> Stored:
    """Opens tars of <key>.latent.npy and <key>.cls. TREAD trains on these values without scaling them."""
    if kind is None:
        raise ValueError(f"source={source}: tars do not record what they hold: set kind=sample (scaled latents, as "
                         f"TREAD's) or kind=moments ([mean, log-variance]).")
    listing, class_of = list_source(source), {}
    for key, file in files_of(listing, ".cls").items():
        with reading(f"source={source}: {file}", "a class number", "write 0, 1, 2 …"):
            class_of[key] = int(listing.read(file))
    stored = open_files(source, listing, files_of(listing, ".latent.npy"), class_of)
    return replace(stored, kind=kind, scaled=kind == "sample", log_variance=kind == "moments")


# ---- LightningDiT's safetensors -------------------------------------------------------------------------------------


def open_lightningdit(source: Path, latent_norm: bool) -> Stored:
    """Opens shards of latents, latents_flip (N, C, h, w) and labels (N,), and with `latent_norm` latents_stats.pt."""
    from safetensors import safe_open

    files = sorted(source.glob("*.safetensors"))
    if not files:
        example = f", as in {typed('source', source.parent)}" if source.is_file() else ""
        raise ValueError(f"source={source} is no folder of .safetensors (looked from {Path.cwd()}): name one{example}.")
    require_one_set(source, files, "source")
    starts, labels = [0], []
    shapes: list[tuple[int, ...]] = []      # of one latent, and of its mirrored copy if there are copies
    for file in files:
        with reading(file, "a complete safetensors file"), safe_open(file, framework="pt") as shard:
            parts = ("latents", "latents_flip")[: 1 + ("latents_flip" in {*shard.keys()})]
            slices = [shard.get_slice(part) for part in parts]
            sizes = [tuple(part.get_shape()) for part in slices]
            labels.append(shard.get_tensor("labels").numpy())
        shapes, count = shapes or [size[1:] for size in sizes], labels[-1].size
        if labels[-1].ndim != 1 or sizes != [(count, *shape) for shape in shapes]:
            raise ValueError(f"{file} has {count} labels and latents {sizes}, but {files[0].name} latents {shapes}.")
        starts.append(starts[-1] + count)

    def read(part: str, start: int, end: int) -> torch.Tensor:
        rows = []
        for file, first, last in zip(files, starts[:-1], starts[1:], strict=True):
            if first < end and start < last:
                with safe_open(file, framework="pt") as shard:  # closing it unmaps its pages
                    rows.append(shard.get_slice(part)[max(start, first) - first : min(end, last) - first])
        return torch.cat(rows)

    sides: dict[str, Reader] = {"latents": partial(read, "latents")}
    if len(shapes) > 1:
        sides["mirrored"] = partial(read, "latents_flip")
    stored = Stored(np.concatenate(labels), shapes[0], [*map(stamp_of, files)], sides)
    if not latent_norm:     # an SD-VAE's
        return stored
    if not (statistics := source / STATISTICS).is_file():
        raise ValueError(f"source={source} has no {STATISTICS}, which LightningDiT's loader writes. For latents of an "
                         f"SD-VAE, which it does not normalise, set latent_norm=false.")
    convention = read_statistics(statistics)
    convention.require(shapes[0][0], str(statistics))
    return replace(stored, autoencoder="none", convention=convention)


# A new format is a function above and a line here, with what its user must know.
FORMS: dict[str, tuple[Callable[..., Stored], str]] = {
    "tread": (open_tread, "kind=sample (scaled latents; unscaled ones need scale=0.18215, too) or kind=moments ([mean, "
                          "log-variance])"),
    "lightningdit": (open_lightningdit, "(latent_norm=false for an SD-VAE's)"),
    "repa": (open_repa, "(of REPA, SiT-REPA or Sprint: VAE input in -1..1)"),
    "edm2": (open_edm2, "(of EDM2's dataset_tool.py: VAE input in 0..1)"),
    "fastdit": (open_fastdit, "(scaled latents; unscaled ones need scale=0.18215)"),
}
