"""Folders, zips and webdataset tars of images, and the built-in shapes, as numbered items: name, label, pixels.

A source keeps names and places only, about 130 bytes an image (170 MB for ImageNet), of a zip about 900; pixels are
read one image at a time.
"""

import colorsys
import glob
import hashlib
import io
import json
import os
import posixpath
import re
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

IMAGE_SUFFIXES = {".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff",
                  ".webp"}
SHAPES = ("circle", "ring", "square", "triangle", "diamond", "cross")
SPLITS = {"train", "val", "valid", "validation", "test"}
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")  # Pillow hands others to programs
MAX_CLASSES = 1_000_000  # a class number beyond is a mistake, and a table of that many classes fills the memory


class UnreadableImage(Exception):
    """One file cannot be read as an image: it is truncated, no image at all, or has no clear meaning in RGB."""


# ---- one image ------------------------------------------------------------------------------------------------------


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts any PIL image to RGB: transparency is laid over white, 16-bit grey is scaled to 8 bits.

    The EXIF orientation is not applied, as in ADM and DiT. Raises UnreadableImage for grey without a known range.
    """
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("F", "I") or image.mode.startswith("I;16"):
        values = np.asarray(image)  # convert("RGB") would clip at 255 and leave nearly everything white
        if image.mode == "F" or values.min() < 0 or values.max() > 65535:
            raise UnreadableImage(f"grey values from {values.min()} to {values.max()} have no known range")
        grey = (values.astype(np.uint32) * 255 + 32767) // 65535
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


@contextmanager
def open_image(data: bytes) -> Iterator[Image.Image]:
    """Opens an image file by its header; whatever Pillow raises on a broken one in the block is an UnreadableImage."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image
    except (UnreadableImage, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise UnreadableImage("not an image of a known kind") from error
    except Exception as error:
        raise UnreadableImage(f"{type(error).__name__}: {error}") from error


def decode_image(data: bytes) -> Image.Image:
    """Decodes one image file to RGB; raises UnreadableImage with the reason."""
    with open_image(data) as image:
        image.load()
        return to_rgb(image)


def center_crop(image: Image.Image, resolution: int) -> Image.Image:
    """Scales and crops to a centred square (ADM's rule, so that results compare with ADM's, DiT's and TREAD's).

    Halves with a box filter while the shorter side is at least twice the target, goes the rest of the way with a
    bicubic one (which enlarges smaller images), and cuts the middle. An image of the right size passes untouched.
    """
    if max(image.size) > 64 * min(image.size):
        raise UnreadableImage(f"{image.width}x{image.height}: one side is over 64 times the other")
    while min(image.size) >= 2 * resolution:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = resolution / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - resolution) // 2, (image.height - resolution) // 2
    return image.crop((left, top, left + resolution, top + resolution))


def draw_shape(seed: int, index: int, resolution: int) -> np.ndarray:
    """Draws item `index` of the shapes set, class `index % 6`, as uint8 (resolution, resolution, 3).

    A pure function of (seed, index): another resolution samples the same drawing more finely.
    """
    rng = np.random.default_rng([seed, index])
    # Little varies but the colour, so that a small network learns the outlines within minutes on a CPU.
    center_x, center_y = rng.uniform(0.47, 0.53, size=2)  # in units of the image's side
    size = rng.uniform(0.31, 0.38)
    color, background = np.array(colorsys.hsv_to_rgb(rng.uniform(0, 1), 1.0, 0.9)), 0.1

    axis = (np.arange(resolution) + 0.5) / resolution
    x, y = (axis - center_x)[None, :], (axis - center_y)[:, None]  # y points down
    ax, ay = np.abs(x), np.abs(y)
    radius = np.sqrt(x**2 + y**2)
    # Signed distance to the outline, negative inside.
    match SHAPES[index % len(SHAPES)]:
        case "circle":
            distance = radius - size
        case "ring":
            distance = np.abs(radius - 0.78 * size) - 0.26 * size
        case "square":
            distance = np.maximum(ax, ay) - 0.86 * size
        case "triangle":  # equilateral, point up; its centre lies below the middle of its height
            lower = y - 0.1 * size
            distance = np.maximum(lower, (np.sqrt(3) * ax - lower) / 2) - 0.62 * size
        case "diamond":
            distance = (ax + ay - 1.1 * size) / np.sqrt(2)
        case "cross":
            distance = np.minimum(
                np.maximum(ax - size, ay - 0.36 * size), np.maximum(ax - 0.36 * size, ay - size)
            )
    coverage = np.clip(0.5 - distance * resolution, 0, 1)[..., None]
    return np.floor((coverage * color + (1 - coverage) * background) * 255 + 0.5).astype(np.uint8)


# ---- sources --------------------------------------------------------------------------------------------------------


@dataclass
class ImageSource:
    """Images as numbered items in an order that depends on nothing but the source.

    `names[i]` says where image i lies, `labels[i]` (int64) is its class, `class_names[label]` the class's name;
    `not_images` names the files that were passed over because they do not look like images.
    """

    names: list[str]
    labels: np.ndarray
    class_names: list[str]
    not_images: list[str] = field(default_factory=list)
    read: Callable[[int], bytes] | None = None  # the file's bytes; None for the shapes, which are drawn

    def __len__(self) -> int:
        return len(self.names)

    def pixels(self, index: int, resolution: int | None = None) -> np.ndarray:
        """Returns image `index` as uint8 RGB (H,W,3), a centred square of `resolution` or as stored.

        Raises UnreadableImage.
        """
        image = decode_image(self.read(index))
        return np.array(image if resolution is None else center_crop(image, resolution))

    def fingerprint(self) -> str:
        """Returns a hash of the names, labels and classes, in order; it does not look into the files."""
        digest = hashlib.sha256("\0".join(self.class_names).encode("utf-8", "surrogateescape"))
        for name in self.names:
            digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
        digest.update(self.labels.astype("<i8").tobytes())
        return digest.hexdigest()


class ShapeSource(ImageSource):
    """The built-in shapes: six classes in turn, drawn and never stored."""

    def __init__(self, count: int, seed: int):
        self.seed = seed
        labels = np.arange(count, dtype=np.int64) % len(SHAPES)
        names = [f"{SHAPES[label]}/{seed}-{index}" for index, label in enumerate(labels)]
        super().__init__(names, labels, list(SHAPES))

    def pixels(self, index: int, resolution: int | None = None) -> np.ndarray:
        """Returns image `index` as uint8 RGB, 16x16 by default."""
        return draw_shape(self.seed, index, resolution or 16)


def open_source(source: str, shapes_count: int = 6000, shapes_seed: int = 0) -> ImageSource:
    """Lists a folder, a zip, webdataset tars (a .tar, a folder of them, a glob, a {000..012} pattern) or `shapes`.

    Raises ValueError where there is nothing to read, or where a class is unknown.
    """
    path = Path(source)
    if source == "shapes":
        if shapes_count < len(SHAPES):
            raise ValueError(f"shapes.count={shapes_count} leaves classes empty; there are {len(SHAPES)} shapes.")
        return ShapeSource(shapes_count, shapes_seed)
    tars = [] if path.suffix.lower() == ".zip" else find_tars(path)
    if path.is_dir():
        listed = list_folder(path)
        if tars and len(listed):
            raise ValueError(f"source={source} holds {len(tars)} tars and {len(listed)} images, such as "
                             f'{listed.names[0]}: name the tars alone by source="{source}/*.tar", or move them away.')
        listed = list_tars(tars) if tars else listed
    elif tars:
        listed = list_tars(tars)
    elif path.is_file():
        listed = list_zip(path)
    else:
        raise ValueError(f"source={source} does not exist (looked from {Path.cwd()}).")
    if len(listed) == 0:
        others = listed.not_images
        also = f"; {len(others)} other files are there, such as {others[0]}" if others else ""
        raise ValueError(f"source={source} holds no images{also}. Their names end in "
                         f"{' '.join(sorted(IMAGE_SUFFIXES))}.")
    return listed


def find_tars(pattern: str | Path) -> list[Path]:
    """Returns the tars that a folder, a file, a glob or a shell's braces ({000..012}) name, in order of name.

    A folder's compressed ones are among them: their reader refuses them. Raises ValueError where some that the braces
    name are absent; returns none where all are.
    """
    from braceexpand import braceexpand  # comes with webdataset

    path = Path(pattern)
    if path.is_dir():
        return sorted(file for file in path.iterdir() if re.search(r"\.(tar(\.\w+)?|tgz)$", file.name))
    if path.is_file():
        return [path]
    names = list(braceexpand(str(pattern)))
    found = {name: glob.glob(name) for name in names}
    absent = [name for name in names if not found[name]]
    if 0 < len(absent) < len(names):
        raise ValueError(f"{pattern} names {len(names)} tars, but {len(absent)} of them are absent, {absent[0]} first.")
    return sorted({Path(file) for files in found.values() for file in files})


def tar_members(file: Path) -> Iterator[tarfile.TarInfo]:
    """Yields the members of a tar; raises ValueError where it is compressed, or does not end as a tar does."""
    try:
        with tarfile.open(file, "r:", errors="replace") as tar:
            for member in tar:
                tar.members = []  # which would take a kilobyte a member
                yield member
            tar.fileobj.seek(tar.offset)
            if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile takes any end for the end
                raise tarfile.ReadError(f"it has no end mark at byte {tar.offset:,}")
    except tarfile.TarError as error:
        raise ValueError(f"{file} is not a whole uncompressed tar ({error}): decompress or copy it again.") from error


def check_labels(labels: np.ndarray, num_classes: int, where: str | Path, remedy: str) -> None:
    """Raises ValueError, ending in `remedy`, for a label that is not a whole number in 0..num_classes - 1."""
    if labels.dtype.kind not in "iu":
        raise ValueError(f"{where} has labels of type {labels.dtype}, where whole numbers are expected: {remedy}.")
    low, high = labels.min(initial=0), labels.max(initial=0)
    if low < 0 or high >= num_classes:
        bad = low if low < 0 else high
        raise ValueError(f"{where} has label {bad} (row {int(np.argmax(labels == bad))}), outside "
                         f"0..{num_classes - 1}: {remedy}.")


def looks_like_image(name: str) -> bool:
    """Tells by the name alone; hidden files and the Mac's resource forks (__MACOSX/._cat.jpg) are not images."""
    parts = name.removeprefix("./").split("/")  # `tar cf set.tar .` names everything ./…
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in parts)
    return not hidden and posixpath.splitext(name)[1].lower() in IMAGE_SUFFIXES


def sort_into_classes(names: list[str], source: str, flat_class: str) -> tuple[list[str], np.ndarray, list[str]]:
    """Sorts names with slashes by (class, name); returns them, their labels, and the class names.

    The class is the first folder below what all images have in common, so `train/cat/x.jpg` and `train/dog/y.jpg`
    are a cat and a dog. Images in one folder are one class with the folder's name, or `flat_class` at the top.
    """
    parents = {name.rpartition("/")[0] for name in names}
    if len(parents) <= 1:
        class_of = {parent: posixpath.basename(parent) or flat_class for parent in parents}
    else:
        common = posixpath.commonpath(parents)
        if common in parents:
            stray = [name for name in names if name.rpartition("/")[0] == common]
            raise ValueError(f"source={source} has {len(stray)} images next to its class folders (such as {stray[0]}), "
                             f"so their class is unknown; move them into a class folder, or all images into one folder "
                             f"for a set without classes.")
        class_of = {parent: posixpath.relpath(parent, common or ".").split("/")[0] for parent in parents}
    # Folders named by plain numbers count as numbers: 10 comes after 9, not after 1.
    numeric = all(name.isascii() and name.isdigit() for name in class_of.values())
    class_names = sorted(set(class_of.values()), key=lambda name: (int(name), name) if numeric else name)
    splits = [name for name in class_names if name.lower() in SPLITS]
    if len(splits) > 1:
        split = max(splits, key=lambda name: name.lower() == "train")
        warnings.warn(f"source={source} has classes named {', '.join(splits)}, which look like the splits of a data "
                      f"set: name one of them, as in source={posixpath.join(source, common, split)}.", stacklevel=5)
    index_of = {name: index for index, name in enumerate(class_names)}
    label_of = {parent: index_of[name] for parent, name in class_of.items()}
    names = sorted(names, key=lambda name: (label_of[name.rpartition("/")[0]], name))
    return names, np.array([label_of[name.rpartition("/")[0]] for name in names], dtype=np.int64), class_names


def list_files(files: list[str], read: Callable[[str], bytes], source: str, flat_class: str) -> ImageSource:
    """Makes a source of files by name, of a folder or a zip of class folders."""
    names = [file for file in files if looks_like_image(file)]
    names, labels, class_names = sort_into_classes(names, source, flat_class)
    not_images = sorted(file for file in files if not looks_like_image(file))
    return ImageSource(names, labels, class_names, not_images, lambda index: read(names[index]))


def list_folder(folder: Path) -> ImageSource:
    """Lists a folder of class folders, nested or not, or a flat folder as one class; follows links."""
    files = []

    def stop(error: OSError) -> None:
        raise error  # a folder that may not be read: os.walk would pass over it in silence

    for parent, folders, inside in os.walk(folder, onerror=stop, followlinks=True):
        prefix = "" if parent == str(folder) else f"{os.path.relpath(parent, folder)}/"
        # An empty class folder is named among what is not in the set.
        files += [prefix + file for file in inside] or [prefix] * (prefix != "" and not folders)

    def read(name: str) -> bytes:
        try:
            return (folder / name).read_bytes()
        except OSError as error:
            is_dead = isinstance(error, FileNotFoundError) and (folder / name).is_symlink()
            if is_dead or isinstance(error, PermissionError):
                raise UnreadableImage(str(error)) from error
            raise  # it was there when it was listed: the source is changing or has gone, and the run must stop

    return list_files(files, read, str(folder), folder.resolve().name)


def open_zip(path: str | Path) -> zipfile.ZipFile:
    """Opens a zip, for any thread to read; raises ValueError where it is damaged."""
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise ValueError(f"source={path} is not a whole zip file ({error}): copy it again.") from error


def list_zip(path: Path) -> ImageSource:
    """Lists a zip of class folders."""
    archive = open_zip(path)

    def read(name: str) -> bytes:
        try:
            return archive.read(name)
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # damaged, encrypted, of a new method
            raise UnreadableImage(str(error)) from error

    return list_files([name for name in archive.namelist() if not name.endswith("/")], read, str(path), path.stem)


def tar_label(suffix: str, text: bytes) -> str | None:
    """Reads a class where a member holds one: `.cls`, `.json` {"label": …}, or a `.txt` with a whole number."""
    try:
        if suffix == "cls":
            return text.decode().strip()
        if suffix == "json":
            label = json.loads(text).get("label")
            return None if label is None else str(label)
        return str(int(text))
    except (ValueError, AttributeError):  # a caption, or other JSON: no class in it
        return None


def list_tars(tars: list[Path]) -> ImageSource:
    """Lists webdataset tars of images in the order of the tars, which is the fast order to read them in.

    A sample is the members with one name up to the first dot. Whole numbers as labels are the class indices
    themselves; other labels are names and are numbered in alphabetical order. Raises ValueError where an image
    has no label.
    """
    names, classes, where, not_images = [], [], [], []
    for number, path in enumerate(tars):
        images, labels = {}, {}  # of this tar, by key
        with open(path, "rb") as content:
            for member in tar_members(path):
                folder, _, base = member.name.rpartition("/")
                key, _, suffix = base.partition(".")
                key, suffix = f"{folder}/{key}" if folder else key, suffix.lower()
                if member.isfile() and suffix in ("cls", "json", "txt"):
                    label = tar_label(suffix, os.pread(content.fileno(), member.size, member.offset_data))
                    if label is not None and (suffix == "cls" or key not in labels):
                        labels[key] = label
                elif member.isfile() and looks_like_image(member.name) and key not in images:
                    images[key] = (member.name, member.offset_data, member.size)
                elif not member.isdir():
                    not_images.append(f"{path.name}/{member.name}")
        for key, (name, offset, size) in images.items():
            if not labels.get(key):
                raise ValueError(f'source: {path} has no class for {name}: a sample needs {key}.cls, a .json with '
                                 f'"label", or a .txt with a whole number. Unpack tars of bare images into class '
                                 f'folders.')
            names.append(f"{path.name}/{name}")
            classes.append(labels[key])
            where.append((number, offset, size))
    distinct = set(classes)
    if all(name.isascii() and name.isdigit() for name in distinct):
        labels = np.array([int(name) for name in classes] if classes else [], dtype=np.int64)
        check_labels(labels, MAX_CLASSES, "source", "correct the tars")  # before a name is made for each
        class_names = [str(index) for index in range(labels.max(initial=-1) + 1)]
    else:
        class_names = sorted(distinct)
        index_of = {name: index for index, name in enumerate(class_names)}
        labels = np.array([index_of[name] for name in classes], dtype=np.int64)
    places = np.array(where, dtype=np.int64).reshape(-1, 3)

    def read(index: int) -> bytes:
        number, offset, size = places[index].tolist()
        with open(tars[number], "rb") as file:
            return os.pread(file.fileno(), size, offset)

    return ImageSource(names, labels, class_names, not_images, read)
