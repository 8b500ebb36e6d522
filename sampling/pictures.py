"""Sampled images -> a grid, PNG files, an npz."""

import importlib.util
import math
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngImageFile, PngInfo
from torch import Tensor

from runtime.files import atomic_write, open_plain, write_array

MOST_COLUMNS = 10  # of a grid, as a class may have many images
WRITERS = 4  # threads that write PNGs
MARK = "sampling"  # in files of ours: a text of a PNG, or the beginning of a zip's comment


def draw_grid(
    images: Tensor,                         # (N, H, W, 3) uint8
    labels: list[int],                      # one per image
    display_names: list[str] | None,        # of the classes; None: numbers are shown
) -> Image.Image:
    """Lays out images in captioned rows of at most MOST_COLUMNS; each class begins one.

    Where each class has a single image, eight share a row. A name with letters that the font does not have is replaced
    by the class's number.
    """
    pixels = images.numpy()
    height, width = pixels.shape[1:3]
    zoom = max(1, 64 // height)
    groups = [[i for i, other in enumerate(labels) if other == label] for label in dict.fromkeys(labels)]
    most = max(map(len, groups))
    columns = math.ceil(most / math.ceil(most / MOST_COLUMNS))  # which leaves the fewest cells empty
    if most == 1:
        columns, groups = min(8, len(labels)), [[*range(len(labels))]]
    rows = [group[i:i + columns] for group in groups for i in range(0, len(group), columns)]

    # DejaVu Sans comes with matplotlib and has letters far beyond Latin.
    matplotlib = importlib.util.find_spec("matplotlib")
    assert matplotlib is not None and matplotlib.origin is not None
    font = ImageFont.truetype(Path(matplotlib.origin).parent / "mpl-data/fonts/ttf/DejaVuSans.ttf", size=12)
    unknown = bytes(font.getmask("\U0010ffff"))  # the box that stands for a missing letter

    def caption(label: int) -> str:
        name = display_names[label] if display_names and label < len(display_names) else ""
        # A line break or other unprintable character becomes a space.
        name = "".join(letter if letter.isprintable() else " " for letter in name[:41])
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
            picture = Image.fromarray(pixels[i]).resize((width * zoom, height * zoom), Image.Resampling.NEAREST)
            grid.paste(picture, (margin + c * cell_w + 1, r * cell_h + 1))
    return grid


def save_png(image: Image.Image, path: Path, settings: str) -> None:
    """Writes a PNG that contains the `settings` that made it."""
    info = PngInfo()
    info.add_text(MARK, settings)
    image.save(path, format="PNG", pnginfo=info, compress_level=1)  # a quarter of the time, a fifth larger


def write_grid(
    state: Accelerator | PartialState, images: Iterable[Tensor], labels: list[int], path: Path,
    display_names: list[str] | None, settings: str = "",
) -> Image.Image | None:
    """Consumes the gathered images of all ranks; the main one writes the grid and returns it."""
    together = torch.cat([*images])
    if not state.is_main_process:
        return None
    grid = draw_grid(together, labels, display_names)
    with atomic_write(path) as partial:
        save_png(grid, partial, settings)
    return grid


def write_pngs(images: Iterable[Tensor], folder: Path, seeds: list[int], labels: list[int], settings: str) -> None:
    """Writes each image as `<seed>_<label>.png` into a folder, which replaces `folder` once it is complete."""
    names = iter([f"{seed:06d}_{label}.png" for seed, label in zip(seeds, labels, strict=True)])
    with atomic_write(folder) as partial, ThreadPoolExecutor(WRITERS) as pool:
        partial.mkdir()
        for batch in images:
            list(pool.map(lambda pixels, name: save_png(Image.fromarray(pixels), partial / name, settings),
                          batch.numpy(), names))


def write_npz(
    images: Iterable[Tensor], path: Path, seeds: list[int], labels: list[int], settings: str,
    keys: tuple[str, str] = ("arr_0", "arr_1"),
) -> None:
    """Streams images (N, H, W, 3) uint8 or latents into an npz, with labels and seeds (N,) int64, as ADM names them."""
    with atomic_write(path) as partial, zipfile.ZipFile(partial, "w") as archive:
        archive.comment = f"{MARK} {settings}".encode()
        write_array(archive, keys[0], (part.numpy() for part in images), len(seeds))
        write_array(archive, keys[1], [np.array(labels)], len(seeds))
        write_array(archive, "seeds", [np.array(seeds)], len(seeds))


def is_ours(path: Path, mark: str = MARK, settings: str = "") -> bool:
    """True for a PNG or npz with our mark and these settings (all if empty), and for a folder of such files alone."""
    if path.is_dir():
        return all(is_ours(file, mark, settings) for file in path.iterdir())
    try:
        with open_plain(path) as file:
            if path.suffix == ".npz":
                return zipfile.ZipFile(file).comment.startswith(f"{mark} {settings}".rstrip().encode())
            return PngImageFile(file).info[mark].startswith(settings)  # the header; Image.open refuses large grids
    except Exception:  # Pillow and zipfile have many kinds for a file that is not ours
        return False


def require_ours(*outs: Path, mark: str = MARK, settings: str = "") -> None:
    """Raises ValueError for an output's path at which there is something else than what this command would replace."""
    for out in outs:
        if out.exists() and not is_ours(out, mark, settings):
            raise ValueError(f"out={out} exists and was not made by this command with these settings: name another.")
