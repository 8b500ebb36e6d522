"""Folders, zips and webdataset tars of images, and the built-in shapes, as numbered items: name, label, pixels.

A source keeps names and places only, about 130 bytes an image (170 MB for ImageNet; 800 while a zip is
listed); pixels are read one image at a time.
"""

import colorsys
import glob
import hashlib
import io
import itertools
import json
import os
import posixpath
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

IMAGE_SUFFIXES = {".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff",
                  ".webp"}
SHAPES = ("circle", "ring", "square", "triangle", "diamond", "cross")
SPLITS = {"train", "val", "valid", "validation", "test"}
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")  # Pillow hands others to programs
MOST_PIXELS = 89_478_485  # of an image, where Pillow begins to warn; with alpha it takes 20 bytes a pixel to convert
LARGEST_FILE = 2**28  # bytes of an image file
LONGEST_LABEL = 2**20  # bytes of a file beside an image that may say its class; JSON that is longer is none
MAX_CLASSES = 1_000_000  # a class number beyond is a mistake, and a table of that many classes fills the memory


class UnreadableImage(Exception):
    """One file cannot be read as an image: it is truncated, no image at all, or has no clear meaning in RGB."""


# ------------------------------------------------------------------------------------------------------------
# One image


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


def decode_image(data: bytes) -> Image.Image:
    """Decodes one image file to RGB; raises UnreadableImage with the reason."""
    with open_image(data) as image:
        try:
            image.load()
            return to_rgb(image)
        except (UnreadableImage, MemoryError):
            raise
        except Exception as error:  # on broken files Pillow raises nearly anything: SyntaxError, struct.error, ...
            raise UnreadableImage(f"{type(error).__name__}: {error}") from error


def open_image(data: bytes) -> Image.Image:
    """Opens an image file by its header alone; raises UnreadableImage with the reason."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise UnreadableImage("not an image of a known kind") from error
    except MemoryError:
        raise
    except Exception as error:  # as below
        raise UnreadableImage(f"{type(error).__name__}: {error}") from error
    if image.width * image.height > MOST_PIXELS:
        raise UnreadableImage(f"{image.width}x{image.height} is more than {MOST_PIXELS:,} pixels")
    return image


def require_size(size: int) -> None:
    """Raises UnreadableImage for a file that is too large for an image, before it is read."""
    if size > LARGEST_FILE:
        raise UnreadableImage(f"{size:,} bytes are more than an image file has ({LARGEST_FILE:,})")


def center_crop(image: Image.Image, resolution: int) -> Image.Image:
    """Scales and crops to a centred square (ADM's rule, so that results compare with ADM's, DiT's and TREAD's).

    Halves with a box filter while the shorter side is at least twice the target, goes the rest of the way with a
    bicubic one (which enlarges smaller images), and cuts the middle. An image of the right size passes untouched.
    """
    if max(image.size) > 64 * min(image.size):
        raise UnreadableImage(
            f"{image.width}x{image.height} is no picture: one side is over 64 times the other"
        )
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


# ------------------------------------------------------------------------------------------------------------
# Sources


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
        """Returns image `index` as uint8 RGB, 16x16 unless told."""
        return draw_shape(self.seed, index, resolution or 16)


def open_source(source: str, shapes_count: int = 6000, shapes_seed: int = 0) -> ImageSource:
    """Lists a folder, a zip, webdataset tars (a .tar, a folder of them, a glob, a {000..012} pattern) or `shapes`.

    Raises ValueError where there is nothing to read, or where the classes cannot be told.
    """
    path = Path(source)
    if source == "shapes":
        if shapes_count < len(SHAPES):
            raise ValueError(f"shapes.count={shapes_count} leaves classes empty; there are {len(SHAPES)} shapes.")
        return ShapeSource(shapes_count, shapes_seed)
    if path.is_dir():
        listed, tars = list_folder(path), find_tars(path)
        if tars and len(listed):
            raise ValueError(
                f"source={source} holds {len(tars)} tars beside {len(listed)} images, such as {listed.names[0]}: "
                f'name the tars alone by source="{source}/*.tar", or move them away.'
            )
        listed = list_tars(tars) if tars else listed
    elif path.is_file() and path.suffix.lower() == ".zip":
        listed = list_zip(path)
    elif path.is_file() and path.suffix.lower() != ".tar":
        raise ValueError(
            f"source={source} is a file of a kind that is not read; give a folder of class folders, a .zip, or "
            f".tar files (a compressed .tar.gz has no random access: unpack it first)."
        )
    elif tars := find_tars(source):
        listed = list_tars(tars)
    else:
        raise ValueError(f"source={source} does not exist (looked from {Path.cwd()}).")
    if len(listed) == 0:
        others = listed.not_images
        passed = f"; {len(others)} other files are there, such as {others[0]}" if others else ""
        raise ValueError(
            f"source={source} holds no images{passed}. Their names end in {' '.join(sorted(IMAGE_SUFFIXES))}."
        )
    return listed


def find_tars(pattern: str | Path) -> list[Path]:
    """Returns the tars that a folder, a file, a glob or a shell's braces ({000..012}) name, in order of name.

    Compressed ones are among a folder's, for their readers to refuse. Raises ValueError where some that the braces
    name are absent; returns none where all are.
    """
    from braceexpand import braceexpand  # comes with webdataset

    path = Path(pattern)
    if path.is_dir():
        return sorted(file for file in path.iterdir()
                      if re.search(r"\.(tar(\.\w+)?|tgz)$", file.name) and not is_special(file))
    if path.is_file():
        return [path]
    names = list(braceexpand(str(pattern)))
    found = {name: [file for file in glob.glob(name) if os.path.isfile(file)] for name in names}
    absent = [name for name in names if not found[name]]
    if 0 < len(absent) < len(names):
        raise ValueError(f"{pattern} names {len(names)} tars, but {len(absent)} of them are absent, {absent[0]} first.")
    return sorted({Path(file) for files in found.values() for file in files})


def looks_like_image(name: str) -> bool:
    """Tells by the name alone; hidden files and the Mac's resource forks (__MACOSX/._cat.jpg) are not images."""
    parts = name.removeprefix("./").split("/")  # `tar cf set.tar .` names everything ./…
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in parts)
    return not hidden and posixpath.splitext(name)[1].lower() in IMAGE_SUFFIXES


def is_special(path: str | Path) -> bool:
    """Tells folders, FIFOs, sockets and devices, and links to them; reading some of them would never end."""
    return os.path.exists(path) and not os.path.isfile(path)


def warn_of_splits(class_names: list[str], parents: set[str], common: str, source: str) -> None:
    """Warns where the classes are the splits of a data set, which have its class folders below them."""
    splits = [name for name in class_names if name.lower() in SPLITS]
    below = tuple(f"{posixpath.join(common, name)}/" for name in splits)
    if len(splits) < 2 or not any(parent.startswith(below) for parent in parents):
        return
    if int(os.environ.get("RANK", 0)):  # every rank lists the images, and one says it
        return
    likely = posixpath.join(common, min(splits, key=lambda name: (name.lower() != "train", name)))
    remedy = f"zip {likely} alone" if os.path.isfile(source) else f"set source={posixpath.join(source, likely)}"
    warnings.warn(f"source={source} is taken as {len(class_names)} classes named {', '.join(class_names[:5])}"
                  f"{', …' if len(class_names) > 5 else ''}, which look like the splits of a data set: {remedy} "
                  f"for the classes of that split.", stacklevel=5)


def sort_into_classes(
    names: list[str], source: str, flat_class: str
) -> tuple[list[int], np.ndarray, list[str]]:
    """Returns the order by (class, name), the labels in that order, and the class names, from names with slashes.

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
            raise ValueError(
                f"source={source} has {len(stray)} images beside its class folders (such as {stray[0]}), so "
                f"their class is unknown; move them into a class folder, or all images into one folder for a set "
                f"without classes."
            )
        start = len(common) + 1 if common else 0
        class_of = {parent: parent[start:].split("/")[0] for parent in parents}
    # Folders named by plain numbers count as numbers: 10 comes after 9, not after 1.
    numeric = all(name.isascii() and name.isdigit() for name in class_of.values())
    class_names = sorted(set(class_of.values()), key=lambda name: (int(name), name) if numeric else name)
    if len(class_names) > 1:
        warn_of_splits(class_names, parents, common, source)
    index_of = {name: index for index, name in enumerate(class_names)}
    label_of = {parent: index_of[name] for parent, name in class_of.items()}
    keys = [label_of[name.rpartition("/")[0]] for name in names]
    order = sorted(range(len(names)), key=lambda i: (keys[i], names[i]))
    return order, np.array([keys[i] for i in order], dtype=np.int64), class_names


def list_folder(folder: Path) -> ImageSource:
    """Lists a folder of class folders, nested or not, or a flat folder as one class; follows links."""
    root = str(folder)
    names, not_images = [], []

    def stop(error: OSError) -> None:
        raise error  # a folder that may not be read: os.walk would pass over it in silence

    for parent, folders, files in os.walk(root, onerror=stop, followlinks=True):
        relative = os.path.relpath(parent, root).replace(os.sep, "/")
        prefix = "" if relative == "." else f"{relative}/"
        for link in (path for name in folders if os.path.islink(path := os.path.join(parent, name))):
            # The folders on the way, not only the parent: of two that link to each other, neither lies in the other.
            way = itertools.accumulate(prefix.split("/")[:-1], os.path.join, initial=root)
            target = os.path.realpath(link)
            if any(f"{os.path.realpath(folder)}/".startswith(f"{target}/") for folder in way):
                raise ValueError(f"source={root}: {link} links to a folder that it lies in, {target}: remove the link.")
        with os.scandir(parent) as entries:  # which tells plain files without a look at each
            special = {entry.name for entry in entries
                       if not entry.is_file(follow_symlinks=False) and is_special(entry.path)}
        for file in files:
            image = looks_like_image(prefix + file) and file not in special
            (names if image else not_images).append(prefix + file)
        if prefix and not folders and not files:
            not_images.append(prefix)  # an empty class folder is worth a word
    order, labels, class_names = sort_into_classes(names, root, folder.resolve().name)
    names = [names[i] for i in order]

    def read(index: int) -> bytes:
        path = os.path.join(root, names[index])
        try:
            with open(path, "rb") as file:
                require_size(os.fstat(file.fileno()).st_size)
                return file.read()
        except (PermissionError, IsADirectoryError) as error:
            raise UnreadableImage(str(error)) from error
        except OSError as error:
            if os.path.islink(path) and not os.path.exists(path):
                raise UnreadableImage("a link to nothing") from error
            # It was there when it was listed: the source is changing or has gone, and the run must stop.
            raise OSError(error.errno, error.strerror, path) from error

    return ImageSource(names, labels, class_names, sorted(not_images), read)


def list_zip(path: Path) -> ImageSource:
    """Lists a zip of class folders; keeps offsets, not zipfile's objects, so that any thread can read."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    except (zipfile.BadZipFile, NotImplementedError, IndexError, ValueError) as error:  # all come of damaged entries
        raise ValueError(f"source={path} is not a whole zip file ({error}).") from error
    images = [entry for entry in entries if looks_like_image(entry.filename)]
    not_images = sorted(entry.filename for entry in entries if not looks_like_image(entry.filename))
    for entry in images:
        if entry.flag_bits & 1 or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(
                f"source={path}: {entry.filename} is encrypted, or packed by other means than store or deflate; "
                f"zip the folder anew."
            )
    order, labels, class_names = sort_into_classes([entry.filename for entry in images], str(path), path.stem)
    images = [images[i] for i in order]
    names = [entry.filename for entry in images]
    places = np.array(
        [(*(min(number, 2**62) for number in (e.header_offset, e.compress_size, e.file_size)), e.CRC, e.compress_type)
         for e in images], dtype=np.int64,  # a damaged zip may name larger places
    ).reshape(-1, 5)

    def read(index: int) -> bytes:
        offset, size, unpacked, checksum, method = places[index].tolist()
        require_size(max(size, unpacked))
        with open(path, "rb") as file:
            end = os.fstat(file.fileno()).st_size
            if not 0 <= offset <= end - 30 - size:
                raise UnreadableImage("the zip says that it lies beyond the zip's end")
            file.seek(offset)
            # The local header is 30 bytes, the last four of them the lengths of the name and of the extra field.
            name_length, extra_length = struct.unpack("<HH", file.read(30)[26:])
            file.seek(name_length + extra_length, os.SEEK_CUR)
            data = file.read(size)
        try:
            if method == zipfile.ZIP_DEFLATED:      # no more than is promised, whatever is packed
                data = zlib.decompressobj(wbits=-15).decompress(data, unpacked) if unpacked else b""
        except zlib.error as error:
            raise UnreadableImage(str(error)) from error
        if zlib.crc32(data) != checksum:
            raise UnreadableImage("the zip's checksum differs")
        return data

    return ImageSource(names, labels, class_names, not_images, read)


def tar_label(suffix: str, text: bytes) -> str | None:
    """Reads a class where a member holds one: `.cls`, `.json` {"label": …}, or a `.txt` with a whole number."""
    try:
        if suffix == "cls":
            return text.decode().strip()
        if suffix == "json":
            label = json.loads(text).get("label")
            return None if label is None else str(label)
        return str(int(text))
    except (ValueError, AttributeError, RecursionError):  # a caption, or JSON of another build: no class in it
        return None


def map_tar(file: Path) -> memoryview:
    """Maps a tar into memory; raises ValueError for one that is compressed."""
    content = memoryview(np.asarray(np.memmap(file, np.uint8, "r"))) if file.stat().st_size else memoryview(b"")
    if content[:6].tobytes().startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
        raise ValueError(f"{file} is not a whole uncompressed tar, so it has no random access: decompress it first.")
    return content


def tar_members(tar: memoryview, file: Path) -> Iterator[tuple[str, int | None, int]]:
    """Yields (name, first byte, size) of a tar's files, and (name, None, 0) of its links, which hold no bytes.

    Reads ustar with GNU's and pax's long names and sizes. Raises ValueError where the tar does not end as one does.
    tarfile takes ten times as long over millions of small files, and the memory that a header claims.
    """
    at, said = 0, {}      # by the headers that a member may have before its own
    while (header := tar[at : at + 512].tobytes()) != bytes(512):  # an empty block is the end mark
        try:
            if len(header) < 512:
                raise ValueError(f"no end mark at byte {at}")
            # Adler's lower half is 1 + the sum of all bytes, of which the eight of the checksum count as spaces.
            found = zlib.adler32(header[:148] + b" " * 8 + header[156:]) & 0xFFFF
            if found != (tar_number(header[148:156]) + 1) % 65521:
                raise ValueError(f"no header at byte {at}")
            kind, size = header[156:157], int(said.pop("size", 0)) or tar_number(header[124:136])
            if size < 0 or (kind in b"xL" and size > 2**20):
                raise ValueError(f"a member of {size} bytes at byte {at}")
        except ValueError as error:
            raise ValueError(f"{file} is not a whole uncompressed tar ({error}): copy it again.") from error
        first, at = at + 512, at + 512
        if kind not in b"123456":      # links, devices and folders have no bytes of their own
            at += -(-size // 512) * 512
        if at > len(tar):
            raise ValueError(f"{file} is not a whole uncompressed tar (it ends before byte {at}): copy it again.")
        if kind == b"x":
            said |= pax_records(tar[first : first + size].tobytes())
        elif kind == b"L":
            said["path"] = tar[first : first + size].tobytes().rstrip(b"\0").decode(errors="replace")
        elif kind not in b"gK":
            parts = [header[345:500]] if header[257:263] == b"ustar\0" and header[345:346] != b"\0" else []
            parts = [part.split(b"\0", 1)[0].decode(errors="replace") for part in (*parts, header[:100])]
            name, said = said.get("path", "/".join(parts)), {}
            if kind in b"\x0007":
                yield name, first, size
            elif kind != b"5":
                yield name, None, 0


def tar_number(field: bytes) -> int:
    """Reads a number of a tar's header: octal digits, or base 256 where it is large."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    return int(field.strip(b" \0") or b"0", 8)


def pax_records(text: bytes) -> dict[str, str]:
    """Reads the path and the size that a pax header gives the member after it, "<length> <key>=<value>" a line."""
    records = re.findall(rb"\d+ (path|size)=([^\n]*)\n", text)
    return {key.decode(): value.decode(errors="replace") for key, value in records}


def list_tars(tars: list[Path]) -> ImageSource:
    """Lists webdataset tars of images in the order of the tars, which is the fast order to read them in.

    A sample is the members with one name up to the first dot. Whole numbers as labels are the class indices
    themselves; other labels are names and are numbered in alphabetical order. Raises ValueError where an image
    has no label.
    """
    names, classes, where, not_images = [], [], [], []
    for number, path in enumerate(tars):
        images, labels = {}, {}  # of this tar, by key
        tar = map_tar(path)
        for member, first, size in tar_members(tar, path):
            folder, _, base = member.rpartition("/")
            key, _, suffix = base.partition(".")
            key, suffix = f"{folder}/{key}" if folder else key, suffix.lower()
            if first is not None and suffix in ("cls", "json", "txt"):
                label = tar_label(suffix, tar[first : first + min(size, LONGEST_LABEL)].tobytes())
                if label is not None and (suffix == "cls" or key not in labels):
                    labels[key] = label
            elif first is not None and looks_like_image(member) and key not in images:
                images[key] = (member, first, size)
            else:
                not_images.append(f"{path.name}/{member}")
        for key, (name, offset, size) in images.items():
            if not labels.get(key):
                raise ValueError(
                    f'source: {path} has no class for {name}: a sample needs {key}.cls, a .json with "label", or '
                    f"a .txt with a whole number. Tars of bare images, one a class, are to be unpacked into class "
                    f"folders."
                )
            names.append(f"{path.name}/{name}")
            classes.append(labels[key])
            where.append((number, offset, size))
    distinct = set(classes)
    if all(name.isascii() and name.isdigit() for name in distinct):
        for name in distinct:
            if len(digits := name.lstrip("0")) > 7 or int(digits or 0) >= MAX_CLASSES:
                raise ValueError(f"source: {names[classes.index(name)]} has class number {name[:20]}, but at most "
                                 f"{MAX_CLASSES:,} classes are read: correct the tar.")
        class_names = [str(index) for index in range(max(map(int, distinct), default=-1) + 1)]
        labels = np.array([int(name) for name in classes], dtype=np.int64)
    else:
        class_names = sorted(distinct)
        index_of = {name: index for index, name in enumerate(class_names)}
        labels = np.array([index_of[name] for name in classes], dtype=np.int64)
    places = np.array(where, dtype=np.int64).reshape(-1, 3)

    def read(index: int) -> bytes:
        number, offset, size = places[index].tolist()
        require_size(size)
        with open(tars[number], "rb") as file:
            file.seek(offset)
            return file.read(size)

    return ImageSource(names, labels, class_names, not_images, read)
