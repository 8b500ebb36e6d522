"""Seeds -> images, over ranks: a labelled grid, a folder of PNGs, or one npz.

    python sample.py checkpoint=runs/quickstart-tread                     # a grid, one row a class
    python sample.py checkpoint=runs/x seeds=0-63 'classes=[207,360]' num_steps=40 out=dogs.png
    accelerate launch sample.py checkpoint=runs/x seeds=100000-149999 out=samples.npz guidance=cfg scale=1.5

`checkpoint` is a run, a checkpoint folder, or a weights file (ours, or others': docs/interop.md). Each image is a
function of its own seed: the same picture on any number of ranks and at any batch size. Options:
configs/sample.yaml and configs/drawing.yaml. `python rf.py` is here too: guided and unguided grids with what they cost.
"""

import importlib.util
import io
import json
import math
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from torch import Tensor
from tqdm import tqdm

import autoencoder as autoencoders
import speed
from checkpoint import beside
from dit import DiT, multiply_adds
from edm import EDM
from guidance import Guidance
from rf import RF
from routing_module import Route
from settings import Count, Location, Selection, Size, Steps, command, one_of
from trained import (
    FAMILIES,
    GuidanceSettings,
    SamplerSettings,
    Trained,
    build_guidance,
    load_trained,
    sampler_settings,
)

DRAWING_VERSION = 1     # raised by whoever changes the images of the same weights and seeds: tests/test_versions.py
GRID_CLASSES = 10       # a grid shows so many classes, the first, where none are named
MOST_SEEDS = 10**7      # a range of more is a slip of the finger

# Seeds (B,) int64, labels (B,) int64, images (B, H, W, 3) uint8; or latents (B, C, h, w) float32 where not decoded.
Batch = tuple[Tensor, Tensor, Tensor]


# ---- settings -------------------------------------------------------------------------------------------------------


class DrawingSettings(GuidanceSettings):
    """What every command that draws with a network is told: configs/drawing.yaml."""

    checkpoint: Location | None
    weights: one_of(["ema", "model"]) | None
    classes: Selection | None
    num_steps: Steps
    sampler: SamplerSettings
    batch_size: Count
    precision: one_of(speed.DTYPES)
    decode_precision: one_of(speed.DTYPES)
    decode_batch_size: Count | None
    diffusion_name: one_of(FAMILIES) | None
    num_heads: Size | None
    autoencoder: Location | None
    tf32: bool
    cpu: bool


class GridSettings(DrawingSettings):
    """configs/rf.yaml."""

    seeds: Selection | None
    out: Location | None


class SampleSettings(GridSettings):
    """configs/sample.yaml."""

    latents: bool


# ---- seeds and classes ----------------------------------------------------------------------------------------------


def parse_range(key: str, given: str | int | Iterable[int] | None) -> list[int]:
    """Reads `5`, `0-63`, `"0-9,20"` or a list of them as a list of ints. Raises ValueError for anything else."""
    parts = str(given).split(",") if isinstance(given, str | int | None) else [str(part) for part in given]
    given = "null" if given is None else given
    form = f"write {key}=7, {key}=0-63 or {key}=[1,5,9]."
    chosen: list[int] = []
    for part in parts:
        first, _, last = part.strip().partition("-")
        last = last or first
        if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()) or int(last) < int(first):
            raise ValueError(f"{key}={given} is not understood at {part!r}: {form}")
        if int(last) >= 2**63 or int(last) - int(first) >= MOST_SEEDS:
            raise ValueError(f"{key}={given} names a number past 2^63, or more than {MOST_SEEDS:,} of them: {form}")
        chosen.extend(range(int(first), int(last) + 1))
    if not chosen:
        raise ValueError(f"{key}={given} names no number: {form}")
    return chosen


def parse_classes(
    key: str, given: str | int | Iterable | None, num_classes: int, class_names: list[str] | None, present: list[int],
) -> list[int]:
    """Reads class names, indices and ranges of indices; None is `present`, the classes that have images.

    Raises ValueError for a class there is not.
    """
    if given is None:
        return present
    index = {name: i for i, name in enumerate(class_names or [])}
    parts = [str(given)] if str(given) in index or isinstance(given, int) else given
    parts = parts.split(",") if isinstance(parts, str) else [str(part) for part in parts]
    labels = []
    for part in (part.strip() for part in parts):
        if part not in index and not part[:1].isdigit():
            names = f"; the names are {', '.join(list(index)[:10])}{' …' if len(index) > 10 else ''}" if index else ""
            raise ValueError(f"{key}={given} asks for {part!r}, which is no class. Write indices, as in {key}=[0,5] "
                             f"or {key}=0-9, or names{names}.")
        labels += [index[part]] if part in index else parse_range(key, part)
    if not labels or max(labels) >= num_classes:
        wrong = f"class {max(labels)}" if labels else "none"
        raise ValueError(f"{key}={given} asks for {wrong}; there are {num_classes}, numbered from 0.")
    return labels


def read_classes(cfg: DrawingSettings, trained: Trained, state: PartialState, most: int | None = None) -> list[int]:
    """Reads the classes that a command draws, at `most` so many where none are given, and says which are empty."""
    if empty := empty_classes(trained.classes, trained.net.num_classes):
        state.print(empty)
    return parse_classes("classes", cfg.classes, trained.net.num_classes, trained.class_names, trained.classes[:most])


def empty_classes(present: list[int], num_classes: int) -> str | None:
    """Says how many of a network's classes have no images, and the first of them; None where all have some."""
    if not (empty := sorted({*range(num_classes)} - {*present})):
        return None
    first = ", ".join(map(str, empty[:5])) + (" …" if len(empty) > 5 else "")
    return f"{len(empty):,} of {num_classes:,} classes have no training images ({first}); they are drawn only if named."


def labels_of(seeds: Iterable[int], classes: list[int]) -> list[int]:
    """Gives each seed its class, balanced and by the seed alone, so that an image never depends on its neighbours."""
    return [classes[seed % len(classes)] for seed in seeds]


# ---- what a sampling costs ------------------------------------------------------------------------------------------


class Meter:
    """Stands in for a network that is sampled, and counts the multiply-adds that its passes would take."""

    def __init__(self, net: DiT):
        self.net, self.passes, self.linear, self.attention = net, 0, 0, 0
        self.known: dict[tuple[Route, ...], tuple[int, int]] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self.net, name)

    def __call__(
        self, x: Tensor, t: Tensor, y: Tensor, routes: tuple[Route, ...] = (), mask_noise: Tensor | None = None,
    ) -> Tensor:
        if routes not in self.known:
            self.known[routes] = multiply_adds(self.net, routes)
        linear, attention = self.known[routes]
        self.passes += len(x)
        self.linear += len(x) * linear
        self.attention += len(x) * attention
        return x.new_zeros(len(x), self.net.out_channels, *x.shape[2:])


def sampling_cost(
    net: DiT, diffusion: EDM | RF, num_steps: int, guidance: Guidance | None = None, **sampler: float | str,
) -> tuple[int, int, int]:
    """Runs the sampler on nothing; returns one image's passes and multiply-adds, of linear layers and of attention."""
    meters = [Meter(net)]
    if guidance is not None and guidance.net2 is not None:
        meters.append(Meter(guidance.net2))
        guidance = replace(guidance, net2=meters[-1])
    noise, y = torch.zeros(1, net.in_channels, net.input_size, net.input_size), torch.zeros(1, dtype=torch.int64)
    diffusion.sample(meters[0], noise, y, num_steps=num_steps, guidance=guidance, randn_like=torch.zeros_like,
                     **sampler)
    return tuple(sum(getattr(meter, count) for meter in meters) for count in ("passes", "linear", "attention"))


# ---- seeds -> images ------------------------------------------------------------------------------------------------


class SeededNoise:
    """One random generator per image, so that an image does not depend on its batch; drawn on the CPU, then moved."""

    def __init__(self, seeds: list[int], device: torch.device | str):
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.device = device

    def randn(self, shape: tuple[int, ...]) -> Tensor:
        """Draws float32 unit noise (B, *shape)."""
        return torch.stack([torch.randn(shape, generator=g) for g in self.generators]).to(self.device)

    def randn_like(self, x: Tensor) -> Tensor:
        return self.randn(x.shape[1:]).to(x.dtype)


def generate(
    net: DiT,
    diffusion: EDM | RF,
    decode: Callable[[Tensor], Tensor],     # latents (B, C, h, w) -> what is yielded, images (B, H, W, 3) uint8
    seeds: list[int],                       # of all ranks; each is one image
    labels: list[int],                      # one a seed
    *,
    batch_size: int,                        # images a rank draws at once
    num_steps: int,
    guidance: Guidance | None = None,
    precision: str = "fp32",                # of the network, under autocast
    progress: str | None = None,            # the bar's name; None: no bar
    **sampler: float | str,                 # settings of `diffusion.sample`
) -> Iterator[Batch]:
    """Draws this rank's images batch by batch: of every round of world · batch_size seeds, rank r takes the r-th part.

    All batches are full, so that shapes, and with them the bits, are the same on one rank and on several: where seeds
    run out the rest are copies, whose seed is given as -1. `gathered` puts the ranks' parts together in order and drops
    the copies.
    """
    state = PartialState()
    device = next(net.parameters()).device
    silent = progress is None or not state.is_main_process
    bar = tqdm(total=len(seeds), desc=progress, unit="img", disable=silent or None)     # None: where it is no terminal
    for start in range(0, len(seeds), batch_size * state.num_processes):
        first = start + batch_size * state.process_index
        drawn = seeds[first : first + batch_size]
        pad = batch_size - len(drawn)
        y = torch.tensor(labels[first : first + batch_size] + [labels[0]] * pad, device=device)
        noise = SeededNoise(drawn + [seeds[0]] * pad, device)
        unit = noise.randn((net.in_channels, net.input_size, net.input_size))
        with torch.autocast(unit.device.type, speed.DTYPES.get(precision), enabled=precision != "fp32"):
            latents = diffusion.sample(net, unit, y, num_steps=num_steps, guidance=guidance,
                                       randn_like=noise.randn_like, **sampler)
        yield torch.tensor(drawn + [-1] * pad, device=device), y, decode(latents)
        bar.update(min(batch_size * state.num_processes, len(seeds) - start))
    bar.close()


def gathered(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Brings all ranks' batches together on every rank's CPU, in the order of the seeds and without the copies."""
    for batch in batches:
        seeds, labels, images = (gather(part.contiguous()).cpu() for part in batch)
        real = seeds >= 0
        yield seeds[real], labels[real], images[real]


# ---- images -> files ------------------------------------------------------------------------------------------------


def caption_font() -> ImageFont.FreeTypeFont:
    """Loads the font that comes with matplotlib, which has letters far beyond Latin."""
    [folder] = importlib.util.find_spec("matplotlib").submodule_search_locations
    return ImageFont.truetype(Path(folder) / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf", size=12)


def draw_grid(
    images: Tensor,                         # (N, H, W, 3) uint8
    labels: list[int],                      # one an image
    display_names: list[str] | None,        # of the classes; None: their numbers
    classes: Iterable[int] = (),            # in the order of the rows; others follow as they come
) -> Image.Image:
    """Lays out images in captioned rows, one a class; where each class has a single image, rows hold eight of them.

    A name with letters that the font lacks gives way to the class's number.
    """
    images = images.numpy()
    height, width = images.shape[1:3]
    zoom = max(1, 64 // height)
    present = [label for label in dict.fromkeys([*classes, *labels]) if label in labels]
    rows = [[i for i, other in enumerate(labels) if other == label] for label in present]
    columns = max(map(len, rows))
    if columns == 1:
        columns = min(8, len(labels))
        rows = [list(range(i, min(i + columns, len(labels)))) for i in range(0, len(labels), columns)]

    font = caption_font()
    unknown = bytes(font.getmask("\U0010ffff"))      # the box that stands for a letter the font lacks

    def caption(label: int) -> str:
        name = display_names[label] if display_names and label < len(display_names) else ""
        name = " ".join(name.split())      # the font writes one line
        return name if name and all(bytes(font.getmask(letter)) != unknown for letter in name) else str(label)

    texts = [", ".join(dict.fromkeys(caption(labels[i]) for i in row)) for row in rows]
    texts = [text if len(text) <= 40 else text[:39] + "…" for text in texts]
    margin = 12 + max(math.ceil(font.getlength(text)) for text in texts)
    cell_w, cell_h = width * zoom + 2, height * zoom + 2
    grid = Image.new("RGB", (margin + columns * cell_w, len(rows) * cell_h), "white")
    pen = ImageDraw.Draw(grid)
    for r, row in enumerate(rows):
        pen.text((6, r * cell_h + cell_h / 2), texts[r], fill="black", font=font, anchor="lm")
        for c, i in enumerate(row):
            picture = Image.fromarray(images[i]).resize((width * zoom, height * zoom), Image.Resampling.NEAREST)
            grid.paste(picture, (margin + c * cell_w + 1, r * cell_h + 1))
    return grid


def save_image(image: Image.Image, path: Path, record: dict[str, object] | None = None) -> None:
    """Writes a PNG; `record` is kept in it as text, a line of JSON."""
    info = PngInfo()
    if record is not None:
        info.add_text("drawn", json.dumps(record))
    with beside(path) as partial:
        image.save(partial, format="PNG", pnginfo=info)


def write_grid(
    batches: Iterable[Batch], path: Path, display_names: list[str] | None, classes: Iterable[int] = (),
) -> None:
    """Consumes the gathered batches of all ranks; the main one writes the grid."""
    parts = list(batches)
    if PartialState().is_main_process:
        labels = torch.cat([labels for _, labels, _ in parts]).tolist()
        grid = draw_grid(torch.cat([images for *_, images in parts]), labels, display_names, classes)
        save_image(grid, path, speed.describe_device(PartialState().device))


def write_pngs(batches: Iterable[Batch], folder: Path) -> None:
    """Consumes the gathered batches of all ranks; the main one writes each image as `<seed>_<label>.png`."""
    for seeds, labels, images in batches:
        if PartialState().is_main_process:
            for seed, label, image in zip(seeds.tolist(), labels.tolist(), images.numpy(), strict=True):
                save_image(Image.fromarray(image), folder / f"{seed:06d}_{label}.png",
                           speed.describe_device(PartialState().device))


def write_npz(batches: Iterable[Batch], path: Path, count: int, keys: tuple[str, str] = ("arr_0", "arr_1")) -> None:
    """Consumes the gathered batches of all ranks; the main one streams them into an npz, by default in ADM's keys.

    The first of `keys` are the images (N, H, W, 3) uint8 or the latents (N, C, h, w) float32, the second the labels
    (N,), `seeds` the seeds (N,), both int64. The archive's comment says by which device they were drawn.
    """
    if not PartialState().is_main_process:
        for _ in batches:      # every rank draws its share
            pass
        return
    labels_of_all, seeds_of_all, header_written = [], [], False
    with beside(path) as partial, zipfile.ZipFile(partial, "w") as archive:
        archive.comment = json.dumps(speed.describe_device(PartialState().device)).encode()
        with archive.open(f"{keys[0]}.npy", "w", force_zip64=True) as file:
            for seeds, labels, images in batches:
                if not header_written:
                    descr = np.lib.format.dtype_to_descr(images.numpy().dtype)
                    header = {"descr": descr, "fortran_order": False, "shape": (count, *images.shape[1:])}
                    np.lib.format.write_array_header_1_0(file, header)
                    header_written = True
                file.write(images.numpy().tobytes())
                labels_of_all.append(labels.numpy())
                seeds_of_all.append(seeds.numpy())
        for key, values in ((keys[1], labels_of_all), ("seeds", seeds_of_all)):
            buffer = io.BytesIO()
            np.save(buffer, np.concatenate(values))
            archive.writestr(f"{key}.npy", buffer.getvalue())


def default_grid(given: Path, trained: Trained) -> Path:
    """Places a grid in the run's samples, or, for a checkpoint or weights that lie alone, beside them."""
    if trained.run_folder is not None:
        return trained.run_folder / "samples" / f"{trained.folder.name}-{trained.weights}.png"
    return given / f"{trained.weights}.png" if given.is_dir() else given.with_suffix(".png")


# ---- entries --------------------------------------------------------------------------------------------------------


@dataclass
class Sampling:
    """What a command asks to be drawn: of what, of which seeds and classes, how guided, and to where."""

    trained: Trained
    guidance: Guidance | None
    seeds: list[int]
    classes: list[int]
    sampler: dict[str, float | str]
    draw: Callable[[Guidance | None], Iterator[Batch]]      # gathered batches
    out: Path


def finite(latents: Tensor) -> Tensor:
    """Returns latents as they are; raises ValueError where they are not finite."""
    if not latents.isfinite().all():
        raise ValueError("The latents drawn are not finite: bring scale= and the sampler's settings nearer to "
                         "their usual values, set precision=fp32, or choose an earlier checkpoint.")
    return latents


def load_decoder(trained: Trained, cfg: DrawingSettings, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Loads what decodes a network's latents; raises ValueError where they are not the autoencoder's."""
    net = trained.net
    decoder = autoencoders.load_decoder(
        trained.autoencoder, (net.in_channels, net.input_size, net.input_size), trained.convention, device,
        speed.DTYPES[cfg.decode_precision], batch_size=cfg.decode_batch_size, asked=cfg.autoencoder is not None,
    )
    return lambda latents: decoder.decode(finite(latents), strict=True)


def open_sampling(
    cfg: GridSettings, state: PartialState, seeds_per_class: int | None = None, as_latents: bool = False,
) -> Sampling:
    """Loads what a command that draws needs, before anything slow.

    With `seeds_per_class`, seeds that are not given are so many for each class, and classes not given the first ten.
    With `as_latents` nothing is decoded, and no autoencoder is loaded.
    Raises ValueError, with the numbers and the knob, for settings that cannot work.
    """
    if cfg.checkpoint is None:
        raise ValueError("Say what to sample from: checkpoint=runs/<name>, a checkpoint folder, or a weights file.")
    trained = load_trained(cfg.checkpoint, cfg.weights, cfg.diffusion_name, cfg.autoencoder, state.device,
                           cfg.num_heads)
    if trained.inferred:
        state.print(trained.inferred)
    sampler = sampler_settings(trained.diffusion, cfg.sampler.model_dump())
    guidance, _ = build_guidance(cfg, trained, state.device)
    sampling_cost(trained.net, trained.diffusion, 1, guidance, **sampler)     # refuses now what sampling would refuse
    classes = read_classes(cfg, trained, state, GRID_CLASSES if seeds_per_class else None)
    given = f"0-{seeds_per_class * len(classes) - 1}" if seeds_per_class and cfg.seeds is None else cfg.seeds
    seeds = parse_range("seeds", given)
    labels = labels_of(seeds, classes)
    decode = finite if as_latents else load_decoder(trained, cfg, state.device)

    def draw(guidance: Guidance | None) -> Iterator[Batch]:
        return gathered(generate(
            trained.net, trained.diffusion, decode, seeds, labels, guidance=guidance,
            batch_size=min(cfg.batch_size, math.ceil(len(seeds) / state.num_processes)), num_steps=cfg.num_steps,
            precision=cfg.precision, progress="sampling" if guidance is None else "sampling, guided", **sampler,
        ))

    out = Path(cfg.out) if cfg.out else default_grid(Path(cfg.checkpoint), trained)
    return Sampling(trained, guidance, seeds, classes, sampler, draw, out)


@command("sample", SampleSettings)
def main(cfg: SampleSettings) -> None:
    state = speed.join_ranks(cfg.cpu, cfg.tf32)
    if cfg.latents and Path(cfg.out or "").suffix != ".npz":
        raise ValueError(f"latents=true writes an npz, and out={cfg.out or 'null'} is none: set out=x.npz.")
    sampling = open_sampling(cfg, state, as_latents=cfg.latents)
    trained, out = sampling.trained, sampling.out
    if out.suffix not in (".png", ".npz", ""):
        raise ValueError(f"out={out} is neither a grid (.png), nor an .npz, nor a folder, which has no suffix.")
    batches = sampling.draw(sampling.guidance)
    if out.suffix == ".png":
        write_grid(batches, out, trained.display_names, sampling.classes)
    elif out.suffix == ".npz":
        write_npz(batches, out, len(sampling.seeds), ("latents", "labels") if cfg.latents else ("arr_0", "arr_1"))
    else:
        write_pngs(batches, out)
    drawn = "latents" if cfg.latents else "images"
    state.print(f"{len(sampling.seeds)} {drawn} from {trained.folder or cfg.checkpoint}: {out}")


@command("rf", GridSettings)
def compare_guided(cfg: GridSettings) -> None:
    """Draws a flow-matching network guided and unguided, and says what each costs: `python rf.py`."""
    state = speed.join_ranks(cfg.cpu, cfg.tf32)
    sampling = open_sampling(cfg, state, seeds_per_class=8)
    trained = sampling.trained
    if trained.recorded["diffusion"]["name"] != "rf":
        raise ValueError(f"{cfg.checkpoint} was trained with {trained.recorded['diffusion']['name']}, not by flow "
                         f"matching (diffusion=rf). python sample.py takes the same guidance settings for it.")
    if sampling.guidance is None:
        raise ValueError("There is nothing to compare without guidance: choose guidance=tread, or give scale=1.5.")
    if cfg.out and Path(cfg.out).suffix != ".png":
        raise ValueError(f"out={cfg.out} is no .png; python sample.py writes npz files and folders.")
    out = sampling.out if cfg.out else sampling.out.with_name(f"{sampling.out.stem}-guided.png")
    stem = out.stem.removesuffix("-guided")
    grids = {out: sampling.guidance, out.with_name(f"{stem}-unguided.png"): None}
    cost = partial(sampling_cost, trained.net, trained.diffusion, cfg.num_steps, **sampling.sampler)
    evaluations = cost(None)[0]      # one pass each
    state.print("GFLOP: linear layers' multiply-adds, as the SG paper counts; in brackets: with attention, two a "
                "multiply-add, as torch counts")
    for path, guidance in grids.items():
        _, linear, attention = cost(guidance)
        shares = {"an evaluation": 1 / evaluations, f"an image of {evaluations}": 1,
                  f"all {len(sampling.seeds)} images": len(sampling.seeds)}
        state.print(f"{'guided' if guidance else 'unguided':<9}" + ", ".join(
            f"{linear * share / 1e9:.4g} [{2 * (linear + attention) * share / 1e9:.4g}] GFLOP {unit}"
            for unit, share in shares.items()))
        write_grid(sampling.draw(guidance), path, trained.display_names, sampling.classes)
        state.print(f"         {path}")


if __name__ == "__main__":
    main()
