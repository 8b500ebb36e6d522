"""Sampled images -> a grid, PNG files, an npz."""

import importlib.util
import json
import math
import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngImageFile, PngInfo
from torch import Tensor

from latents.listing import looks_like_image
from runtime.device import describe_device
from runtime.files import atomic_write, open_plain, parse_json, remove_leftovers, write_array
from sampling.generate import Batch

MOST_COLUMNS = 10  # of a grid, as a class may have many images
WRITERS = 4  # threads of a rank that write PNGs


def draw_grid(
    images: Tensor,                         # (N, H, W, 3) uint8
    labels: list[int],                      # one per image
    display_names: list[str] | None,        # of the classes; None: numbers are shown
    classes: Iterable[int] = (),            # in the order of the rows; other classes follow
) -> Image.Image:
    """Lays out images in captioned rows of at most MOST_COLUMNS; each class begins one.

    Where each class has a single image, eight share a row. A name with letters that the font does not have is replaced
    by the class's number.
    """
    pixels = images.numpy()
    height, width = pixels.shape[1:3]
    zoom = max(1, 64 // height)
    present = [label for label in dict.fromkeys([*classes, *labels]) if label in labels]
    groups = [[i for i, other in enumerate(labels) if other == label] for label in present]
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


def save_image(image: Image.Image, path: Path, record: dict[str, object], synced: bool = True) -> None:
    """Writes a PNG that contains `record` as a line of JSON; `synced` is as in `atomic_write`."""
    info = PngInfo()
    info.add_text("sampling", json.dumps(record))
    with atomic_write(path, synced) as partial:
        image.save(partial, format="PNG", pnginfo=info, compress_level=1)  # a quarter of the time, a fifth larger


def write_grid(
    state: Accelerator | PartialState, images: Iterable[Tensor], labels: list[int], path: Path,
    display_names: list[str] | None, classes: Iterable[int] = (),
) -> Image.Image | None:
    """Consumes the gathered images of all ranks; the main one writes the grid and returns it."""
    together = torch.cat([*images])
    if not state.is_main_process:
        return None
    grid = draw_grid(together, labels, display_names, classes)
    save_image(grid, path, describe_device(state.device))
    return grid


def read_sampling_record(path: Path) -> dict[str, Any] | None:
    """Reads the record that `save_image` or `write_npz` put into a file; None if the file has none."""
    try:
        if path.suffix == ".npz":
            with open_plain(path) as file, zipfile.ZipFile(file) as archive:
                text = archive.comment
        else:
            with open_plain(path) as file, PngImageFile(file) as image:  # the header; Image.open refuses large grids
                text = image.info.get("sampling", "")
        record = parse_json(text)
    except Exception:  # Pillow and zipfile each have their own for a file that is not ours
        return None
    return record if isinstance(record, dict) and "device" in record else None


def check_file(path: Path, remedy: str) -> None:
    """Raises ValueError, ending in `remedy`, if there is a file that none of our commands made."""
    if path.is_file() and read_sampling_record(path) is None:
        raise ValueError(f"out={path} exists and was not made by this code: {remedy}.")


def check_folder(folder: Path, name: str, overwrite: bool) -> list[Path]:
    """Lists the pictures that `write_pngs` wrote into a folder for a set of another name.

    Raises ValueError if there are some and `overwrite` is false, and for pictures from elsewhere.
    """
    if folder.is_file():
        raise ValueError(f"out={folder} is a file: name a folder, or a grid's .png or an .npz.")
    earlier = []
    for file in folder.rglob("*"):
        named = file.parent == folder and re.fullmatch(r"\d{6,}_\d+\.png", file.name)
        record = read_sampling_record(file) if named else None
        if record is None and looks_like_image(file.relative_to(folder).as_posix()):
            raise ValueError(f"out={folder} holds pictures that were not made by this code, such as {file.name}: name "
                             f"another folder.")
        if record and record.get("set") != name:
            earlier.append(file)
    if earlier and not overwrite:
        raise ValueError(f"out={folder} holds pictures of another set, such as {earlier[0].name}: name another folder, "
                         f"or clear it with overwrite=true.")
    return earlier


def write_pngs(
    state: PartialState, batches: Iterable[Batch], folder: Path, name: str, seeds: list[int], labels: list[int],
) -> None:
    """Consumes this rank's batches, and writes each image as `<seed>_<label>.png` while the next batch is sampled.

    Each picture records the name of its set. A kill leaves fewer pictures, but no part of one under a picture's name.
    """
    if state.is_main_process:
        remove_leftovers(folder, "*_*.png")
    state.wait_for_everyone()  # before any rank writes there, also a picture of a name that was removed
    record = {**describe_device(state.device), "set": name}

    def write(index: int, image: np.ndarray) -> None:
        save_image(Image.fromarray(image), folder / f"{seeds[index]:06d}_{labels[index]}.png", record, synced=False)

    with ThreadPoolExecutor(WRITERS) as pool:
        writes: Iterator[None] = iter(())
        for indices, images in batches:
            real = indices >= 0  # without the copies
            pixels = [*images.cpu()[real].numpy()]
            list(writes)  # waits for the last batch, and raises its errors
            writes = pool.map(write, indices[real].tolist(), pixels)
        list(writes)
    os.sync()  # once, as a sync of each picture would take longer than sampling it
    state.wait_for_everyone()


def write_npz(
    state: PartialState, images: Iterable[Tensor], path: Path, seeds: list[int], labels: list[int],
    keys: tuple[str, str] = ("arr_0", "arr_1"),
) -> None:
    """Consumes the gathered images of all ranks; the main one streams them into an npz, by default in ADM's keys.

    The first key has the images (N, H, W, 3) uint8 or the latents (N, C, h, w) float32, and the second the labels (N,)
    int64. `seeds` has the seeds (N,) int64. The archive's comment names the device that sampled them.
    """
    if not state.is_main_process:
        for _ in images:  # every rank samples its share
            pass
        return
    with atomic_write(path) as partial, zipfile.ZipFile(partial, "w") as archive:
        archive.comment = json.dumps(describe_device(state.device)).encode()
        write_array(archive, keys[0], (part.numpy() for part in images), len(seeds))
        write_array(archive, keys[1], [np.array(labels)], len(seeds))
        write_array(archive, "seeds", [np.array(seeds)], len(seeds))
