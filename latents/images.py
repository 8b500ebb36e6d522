"""Folders, zips and tars of images, and the built-in shapes, as numbered items: name, label, pixels.

`latents.listing` lists the files, and `latents.labels` reads files of labels. Pixels are read one image at a time.
"""

import colorsys
import hashlib
import io
import posixpath
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, PngImagePlugin, UnidentifiedImageError
from PIL.TiffImagePlugin import PHOTOMETRIC_INTERPRETATION

from latents.forms import refuse_foreign
from latents.hub import Rows, count_lacking, find_shards, open_rows
from latents.ilsvrc import VALIDATION, read_validation
from latents.labels import (
    LABEL_SUFFIXES,
    Pairs,
    check_labels,
    check_names,
    match,
    number_classes,
    read_table,
    stem_of,
)
from latents.listing import (
    FIRST_OF_SEVERAL,
    IMAGE_SUFFIXES,
    NOT_TURNED,
    SPLITS,
    Listing,
    UnreadableImage,
    a_few,
    clean,
    has_image_suffix,
    is_hidden,
    key_of,
    list_source,
    looks_like_image,
    spread,
)
from runtime.files import is_pointer, parse_json

SHAPES = ("circle", "ring", "square", "triangle", "diamond", "cross")
# Folders of what is drawn over pictures. A class may have a name of the second kind, and then the files' names decide.
MASKS = re.compile(r"(^|/)(annotations|trimaps|ground_?truth|gtfine|gtcoarse|masks|segmentations|segmentationclass|"
                   r"segmentationobject)/", re.IGNORECASE)
WORDS_OF_MASKS = "mask|gt|seg|segmentation|labels?|matte|alpha|annotation|trimap"
PERHAPS_MASKS = re.compile(rf"(^|/)({WORDS_OF_MASKS})/", re.IGNORECASE)
SUFFIX_OF_MASKS = re.compile(rf"(?<=.)[_-]({WORDS_OF_MASKS})$", re.IGNORECASE)
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")  # Pillow hands others to programs
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = 2**28  # prompts and workflows exceed Pillow's 1 MB
LARGE = 2**28  # bytes of a file that might hold labels; a larger one is not looked at
FEW = 8  # images; of fewer, a class each may be meant
DEEP_PROBED = 256  # images looked at for grey of 16 bits, evenly spread


# ---- one image ------------------------------------------------------------------------------------------------------


def is_deep_grey(image: Image.Image) -> bool:
    return image.mode in ("F", "I") or image.mode.startswith("I;16")


def deep_values(image: Image.Image) -> np.ndarray:
    """Returns the values of grey of 16 bits and more, 0 for black; Pillow inverts a TIFF's only up to 8 bits."""
    values = np.asarray(image)
    return 65535 - values if getattr(image, "tag_v2", {}).get(PHOTOMETRIC_INTERPRETATION) == 0 else values


def remark_on(image: Image.Image) -> str | None:
    """Says, of a file that is used, which of its frames, or that it is shown turned; None for nearly all.

    A phone's JPEG with previews (MPO) is one image.
    """
    with suppress(Exception):  # of a damaged second frame or EXIF, of which nothing is used
        if image.format != "MPO" and getattr(image, "is_animated", False):
            return FIRST_OF_SEVERAL
        if "exif" in image.info and image.getexif().get(ExifTags.Base.Orientation, 1) not in (0, 1):
            return NOT_TURNED
    return None


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts any PIL image to RGB: transparency is laid over white, grey of 16 bits and more is scaled to 8.

    The EXIF orientation is not applied, as in ADM and DiT. Raises UnreadableImage for grey without a known range.
    """
    if is_deep_grey(image):
        values = deep_values(image)  # convert("RGB") would clip at 255 and leave nearly everything white
        if not (0 <= values.min() and values.max() <= 65535 and (values == np.floor(values)).all()):
            raise UnreadableImage(f"grey values from {values.min()} to {values.max()} have no known range: save 8 or "
                                  f"16 bits")
        grey = (values.astype(np.uint32) * 255 + 32767) // 65535
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
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
        why = "a pointer of Git LFS: run git lfs pull" if is_pointer(data) else "not an image of a known kind"
        raise UnreadableImage(why) from error
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

    `names[i]` says where image i lies, `labels[i]` (int64) is its class, `class_names[label]` the class's name.
    `left_out` are [name, reason] of the files that are not in the set, `notes` lines that a user should see, and
    `listing` has all the files.
    """

    names: list[str]
    labels: np.ndarray
    class_names: list[str]
    left_out: list[tuple[str, str]] = field(default_factory=list)
    read: Callable[[int], bytes] | None = None  # the file's bytes; None for the shapes, which are drawn
    notes: list[str] = field(default_factory=list)
    listing: Listing | None = None
    remarks: dict[int, str] = field(default_factory=dict)  # on files that were read so far, of REMARKS

    @property
    def not_images(self) -> list[str]:
        return [name for name, _ in self.left_out]

    def __len__(self) -> int:
        return len(self.names)

    def pixels(self, index: int, resolution: int | None = None) -> np.ndarray:
        """Returns image `index` as uint8 RGB (H,W,3), a centred square of `resolution` or as stored."""
        with open_image(self.read(index)) as file:
            file.load()
            image = to_rgb(file)
            if remark := remark_on(file):
                self.remarks[index] = remark
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


# ---- classes --------------------------------------------------------------------------------------------------------


def open_source(
    source: str, shapes_count: int = 6000, shapes_seed: int = 0, labels: str = "folders",
    image_column: str | None = None, label_column: str | None = None,
) -> ImageSource:
    """Lists the images of a folder, a zip, tars, Hugging Face's shards or `shapes`, with their classes.

    `labels` is `folders` (and `dataset.json`, webdataset's `.cls`, or a shard's column, where there are any), `none`,
    `names`, or a file. The columns are of shards; None: the only one that may be meant. Raises
    ValueError where there is nothing to read, or where a class is unknown.
    """
    if source == "shapes":
        if shapes_count < len(SHAPES):
            raise ValueError(f"shapes.count={shapes_count} leaves classes empty; there are {len(SHAPES)} shapes.")
        if labels != "folders":
            raise ValueError(f"labels={labels} is for images; source=shapes knows its classes: leave it out.")
        return ShapeSource(shapes_count, shapes_seed)
    listing = list_source(source)
    if shards := find_shards(listing, f"source={source}", mixed="{" in str(source)):
        return of_rows(open_rows(listing, shards, f"source={source}", image_column), labels, label_column)
    if asked := [f"{key}={value}" for key, value in (("image_column", image_column), ("label_column", label_column))
                 if value is not None]:
        raise ValueError(f"{' '.join(asked)} would change nothing: source={source} has no parquet or arrow files with "
                         "columns. The column of a file of labels is labels=<file>:<column>.")
    images = sorted((i for i, name in enumerate(listing.names) if looks_like_image(name)),
                    key=listing.names.__getitem__)
    others = [(shown, "is hidden, or of a system" if has_image_suffix(name) else "does not look like an image")
              for name, shown in zip(listing.names, listing.shown, strict=True) if not looks_like_image(name)]
    listing.left_out = sorted(listing.left_out + others)
    if not images:
        refuse_foreign(str(source))
        also = f" among {len(listing.left_out)} files such as {listing.left_out[0][0]}" if listing.left_out else ""
        raise ValueError(f"source={source} holds no images{also}. Their names end in "
                         f"{' '.join(sorted(IMAGE_SUFFIXES))}.")
    found = of_samples(listing, images, labels == "folders")
    if labels != "folders":
        return of_choice(listing, found or images, labels)
    if found:
        return found
    file, notes = find_dataset_json(listing, images)
    if file is not None:
        return of_file(listing, images, listing.shown[file], file)
    found = from_folders(listing, images)
    found.notes += notes
    return found


def of_choice(listing: Listing, images: list[int], labels: str) -> ImageSource:
    """Labels images by `none`, by their `names` or by a file."""
    if labels == "none":
        return one_class(listing, images)
    if labels == "names":
        pairs = [(listing.names[i], class_in_name(listing.names[i])) for i in images]
        return from_pairs(listing, images, pairs, "names")
    if known := read_validation(labels):
        return from_pairs(listing, images, known[0], labels, class_names=known[1])
    return of_file(listing, images, labels)


def of_rows(rows: Rows, labels: str, label_column: str | None) -> ImageSource:
    """Labels the rows of shards, in their order, which is the fast one to read them in."""
    listing, images = rows.listing(named=labels not in ("folders", "none")), [*range(len(rows))]
    column = rows.choose_labels(label_column) if labels == "folders" else None
    if column is not None:
        values, class_names = rows.labels(column)
        labelled = f"labels of column {column}"
        found = label_images(listing, images, values, f"column {column}", class_names,
                             remedy="choose another label_column")
    elif label_column is not None:
        raise ValueError(f"label_column={label_column} would change nothing: labels={labels} has the classes.")
    elif labels == "folders":
        labelled = "one class, as no column is named like labels: label_column= names one"
        found = one_class(listing, images)
    else:
        labelled = f"labels={labels}"
        found = of_choice(listing, images, labels)
    found.notes = [f"Images of column {rows.image[0]}, {labelled}. The columns are {rows.columns}.",
                   *filter(None, [count_lacking(rows)]), *found.notes]
    return found


def label_images(
    listing: Listing, images: list[int], classes: Sequence, where: str, class_names: list[str] | None = None,
    further: Sequence[str] = (), notes: Sequence[str] = (), remedy: str = "correct the file",
) -> ImageSource:
    """Makes a source of the images that have a class in `classes`; counts and names the others, and empty classes.

    Classes are indices where `class_names` are given, else text, which is numbered together with `further` labels.
    Raises ValueError, ending in `remedy`, for what is not a class.
    """
    warn_of_masks(listing, images)
    kept = [i for i, label in zip(images, classes, strict=True) if label is not None]
    lacking = [listing.shown[i] for i, label in zip(images, classes, strict=True) if label is None]
    given, notes = [label for label in classes if label is not None], [*notes]
    if class_names is None:
        labels, class_names = number_classes(given, where, remedy, further)
    else:
        labels = np.array(given, dtype=np.int64)
        check_labels(labels, len(class_names), where, remedy)
    check_names(class_names, where, remedy)
    counts = np.bincount(labels, minlength=len(class_names))
    empty = [class_names[label] for label in np.flatnonzero(counts == 0)]
    if lacking:
        notes.insert(0, f"{where}: {len(lacking):,} of {len(images):,} images have no label and are left out: "
                        f"{a_few(lacking)}")
    if empty:
        notes.append(f"{where}: {len(empty):,} of these {len(counts):,} classes have no image: {a_few(empty)}")
    if len(kept) >= FEW and (distinct := len(counts) - len(empty)) > len(kept) / 2:
        notes.append(f"There are {distinct:,} classes for {len(kept):,} images, about one for each: are they the "
                     f"classes?")
    left_out = [*listing.left_out, *((name, f"has no label by {where}") for name in lacking)]
    files = np.array(kept, dtype=np.int64)  # a list would take five times as much
    return ImageSource([listing.shown[i] for i in kept], labels, class_names, left_out,
                       lambda index: listing.read(int(files[index])), notes, listing)


def one_class(listing: Listing, images: list[int]) -> ImageSource:
    return label_images(listing, images, [0] * len(images), f"source={listing.path}", [listing.title])


def from_folders(listing: Listing, images: list[int]) -> ImageSource:
    """Takes the first folder below what all images share for the class, in the order of names, as torchvision does.

    So `train/cat/x.jpg` and `train/dog/y.jpg` are a cat and a dog. Images in one folder are one class with its name.
    """
    source, folders = listing.path, [listing.names[i].rpartition("/")[0] for i in images]
    parents = {*folders}
    if len(parents) == 1:
        class_of = {parent: posixpath.basename(parent) or listing.title for parent in parents}
    else:
        common = posixpath.commonpath(parents)
        if common in parents:
            stray = [listing.names[i] for i, folder in zip(images, folders, strict=True) if folder == common]
            raise ValueError(f"source={source} has {len(stray)} images next to its class folders, such as {stray[0]}: "
                             f"move them into a class folder, or set labels=none for a set without classes.")
        class_of = {parent: posixpath.relpath(parent, common or ".").split("/")[0] for parent in parents}
    class_names = sorted({*class_of.values()})
    splits = [name for name in class_names if name.lower() in SPLITS]
    if len(splits) > 1:
        split = max(splits, key=lambda name: name.lower() == "train")
        warnings.warn(f"source={source} has classes named {', '.join(splits)}, which look like the splits of a data "
                      f"set: name one of them, as in source={posixpath.join(source, common, split)}.", stacklevel=3)
    if listing.tars > 1 and parents == {""}:
        raise ValueError(f"source={source} has no class for the images of {listing.tars} tars, such as "
                         f"{listing.shown[images[0]]}: {HOW_SAMPLES_ARE_LABELLED}")
    index_of = {name: index for index, name in enumerate(class_names)}
    labels = [index_of[class_of[folder]] for folder in folders]
    order = sorted(range(len(images)), key=labels.__getitem__)  # within a class by name, as the images are
    hints = [hint] if len(class_names) == 1 and (hint := find_unread_labels(listing, images)) else []
    return label_images(listing, [images[k] for k in order], [labels[k] for k in order], f"source={source}",
                        class_names, notes=hints, remedy="rename it")


def warn_of_masks(listing: Listing, images: list[int]) -> None:
    """Warns of masks, trimaps and ground truth beside pictures, which would be trained on."""
    if listing.tars:  # whose samples have one picture each
        return
    plain = {}  # of each image that may be a mask, the stem that its picture would have
    for i in images:
        stem = stem_of(listing.names[i])
        picture = SUFFIX_OF_MASKS.sub("", stem)
        if picture != stem or any(words.search(listing.names[i]) for words in (MASKS, PERHAPS_MASKS)):
            plain[i] = picture
    if not plain:  # as nearly always: the names of millions are not copied
        return
    stems = {stem_of(listing.names[i]) for i in images if i not in plain}
    masks = [i for i, stem in plain.items() if MASKS.search(listing.names[i]) or stem in stems]
    if 0 < len(masks) < len(images):
        pictures = posixpath.commonpath({posixpath.dirname(f"/{listing.names[i]}") for i in {*images} - {*masks}})
        is_apart = not any(f"/{listing.names[i]}".startswith(f"{pictures.rstrip('/')}/") for i in masks)
        remedy = f"name that of the pictures, as in source={listing.path}{pictures}" if is_apart else "move them away"
        warnings.warn(f"source={listing.path} has {len(masks):,} images among {len(images):,} that look like masks of "
                      f"the others, such as {listing.shown[masks[0]]}, and all are used: {remedy}.", stacklevel=4)


# ---- classes from a file --------------------------------------------------------------------------------------------


def find_dataset_json(listing: Listing, images: list[int]) -> tuple[int | None, list[str]]:
    """Finds the dataset.json that EDM's, EDM2's and StyleGAN's tools put on top of images; says why one is not read.

    Raises ValueError for one that lies on top of a part of the images.
    """
    places = [i for i, name in enumerate(listing.names) if posixpath.basename(name) == "dataset.json"
              and not is_hidden(name)]
    if twice := [name for name, count in Counter(listing.names[i] for i in places).items() if count > 1]:
        raise ValueError(f"source={listing.path} holds {twice[0]} in more than one tar: prepare each tar alone, or set "
                         f"labels=none.")
    notes = []
    for i in sorted(places, key=lambda i: -listing.names[i].count("/")):
        folder = posixpath.dirname(listing.names[i])
        inside = sum(not folder or listing.names[image].startswith(f"{folder}/") for image in images)
        if not inside:
            continue
        if inside < len(images):
            raise ValueError(f"source={listing.path} holds {listing.shown[i]}, which lies on top of {inside} of the "
                             f"{len(images)} images: name source={listing.path / folder}, or set labels=none.")
        content = None
        with suppress(ValueError):  # which is raised again where it is read
            content = parse_json(listing.read(i))
        if content is None or isinstance(content, dict) and "labels" in content:
            return i, []
        notes.append(f'{listing.shown[i]} has no "labels" and is not read.')
    return None, notes


def find_file(listing: Listing, labels: str) -> int | None:
    """Returns the number of a file in the source, None where it is not in there."""
    path, is_here = str(Path(labels)), Path(labels).is_file()
    return next((i for i, name in enumerate(listing.names) if path in (f"{listing.path}/{name}", listing.shown[i])
                 or path == name and not is_here), None)


def of_file(listing: Listing, images: list[int], labels: str, member: int | None = None) -> ImageSource:
    """Reads the classes from a file, on disk or in the source, or from a column of it, `<file>:<column>`.

    Raises ValueError where it labels no image.
    """
    file, column = labels, None
    member = find_file(listing, file) if member is None else member
    if member is None and not Path(file).is_file() and ":" in file:
        file, _, column = labels.rpartition(":")
        member = find_file(listing, file)
    if member is not None:
        listing.left_out = [row for row in listing.left_out if row[0] != listing.shown[member]]
    elif not Path(file).is_file():
        raise ValueError(f"labels={labels} is not a file here or in {listing.path}: give folders, none, names or a "
                         "file.")
    content = Path(file).read_bytes() if member is None else listing.read(member)
    stems = {stem_of(listing.names[i]) for i in images}
    table = read_table(content, file, lambda cell: stem_of(clean(cell)) in stems)
    if table is None:  # {"labels": null}
        return one_class(listing, images)
    pairs, note = table.pairs(column)
    found = from_pairs(listing, images, pairs, labels)
    found.notes = [note, *found.notes] if note else found.notes
    return found


def from_pairs(
    listing: Listing, images: list[int], pairs: Pairs, labels: str, class_names: list[str] | None = None,
) -> ImageSource:
    """Labels images by [name, label], where labels are indices if `class_names` are given."""
    names = [listing.names[i] for i in images]
    classes, unused = match(names, pairs, posixpath.dirname(f"{listing.path.absolute()}/"), labels)
    times = Counter(names) if listing.tars > 1 and labels != "names" else {}
    if several := [name for name, label in zip(names, classes, strict=True) if label and times.get(name, 1) > 1]:
        raise ValueError(f"labels={labels} labels {several[0]}, but {times[several[0]]} tars hold a file of that name: "
                         f"prepare each tar alone, or put a .cls into the tars.")
    if not any(classes):
        form = "the form <class>_<number> is" if labels == "names" else f"its names, such as {pairs[0][0]}, are"
        raise ValueError(f"labels={labels} labels none of the {len(images)} images, such as {names[0]}: {form} not "
                         "theirs.")
    notes = [f"labels={labels}: {len(unused):,} labels have no image: {a_few(unused)}"] if unused else []
    return label_images(listing, images, classes, f"labels={labels}", class_names,
                        [label for _, label in pairs if label], notes)


def class_in_name(name: str) -> str | None:
    """Returns what precedes the last underscore, as in ADM, else the number: cat_0.png, cat.0.png, cat (0).png."""
    stem = stem_of(name)
    if "_" in stem:
        return stem.rpartition("_")[0] or None
    word = re.fullmatch(r"(.*[^\W\d].*?)[ .-]+\(?\d+\)?", stem)
    return word[1] if word else None


def find_unread_labels(listing: Listing, images: list[int]) -> str | None:
    """Returns a line on a file beside the images that holds their classes, or on classes in their names."""
    stems = {stem_of(listing.names[i]) for i in images}
    inside = [i for i, name in enumerate(listing.names) if Path(name).suffix.lower() in LABEL_SUFFIXES
              and not is_hidden(name) and key_of(posixpath.basename(name))[0] not in stems]
    files = [(listing.path / listing.names[i], lambda i=i: listing.read(i)) for i in inside[:20]]
    above = dict.fromkeys(folder for place in (listing.path.absolute(), listing.path.resolve())
                          for folder in place.parents[:6])
    beside = [file for file in sorted(listing.path.absolute().parent.glob("*"))
              if file.suffix.lower() in LABEL_SUFFIXES and file.is_file()
              and file.name not in ("results.jsonl", "metrics.jsonl")]  # ours: some of their numbers look like names
    beside = beside[:20] + [file for folder in above for file in folder.glob("LOC_*_solution.csv")]  # Kaggle's place
    files += [(file, file.read_bytes) for file in beside if file.stat().st_size <= LARGE]
    hints = []
    for file, read in files:
        hint = f"{file} looks like labels and is not read, so that there is one class: labels={file} reads it."
        try:
            table = read_table(read(), str(file), is_ours := lambda cell: stem_of(clean(cell)) in stems)
            columns = [i for i in table.others if table.may_be_classes(i, is_ours)] if table else []
        except (ValueError, OSError, UnreadableImage):
            if any(word in file.name.lower() for word in ("label", "class", "annotation", "solution")):
                return hint
            continue
        try:
            if columns and (table.in_columns() or table.choose()[0] in columns):
                return hint
        except ValueError:  # several columns, of which none is called labels
            hints.append(f"{file} has {len(columns)} columns that may be classes of these images "
                         f"({a_few([table.head(i) for i in columns])}), and none is read: labels={file}:"
                         f"{table.head(columns[0])} reads one.")
    if hints:
        return hints[0]
    if all(map(VALIDATION.fullmatch, stems)):
        return ("These are ILSVRC's validation images, here in one class: their labels are in its devkit, as in "
                "labels=ILSVRC2012_devkit_t12.tar.gz, and in Kaggle's LOC_val_solution.csv.")
    words = {class_in_name(listing.names[i]) for i in images}
    if None not in words and 2 <= len(words) <= len(images) / 2:
        return (f"The names begin with {len(words)} words before a last underscore or number "
                f"({a_few(sorted(words))}): labels=names makes them classes.")
    return None


# ---- webdataset's samples -------------------------------------------------------------------------------------------


def tar_label(suffix: str, text: bytes) -> str | None:
    """Reads a class where a member holds one: `.cls`, `.json` {"label": …}, or a `.txt` with an integer."""
    try:
        if suffix == "cls":
            return text.decode().strip()
        if suffix == "json":
            label = parse_json(text).get("label")
            return None if label is None else str(label)
        return str(int(text))
    except (ValueError, AttributeError):  # a caption, or other JSON: no class in it
        return None


LABEL_PARTS = ("cls", "json", "txt")  # of a sample, the first counts
HOW_SAMPLES_ARE_LABELLED = ('a sample needs a .cls, a .json with "label", or a .txt with an integer. Otherwise set '
                            'labels=none, labels=names or labels=<file>.')


def of_samples(listing: Listing, images: list[int], labelled: bool) -> ImageSource | list[int] | None:
    """Makes webdataset's samples of files with one name up to the first dot, each with one image and one label.

    Without `labelled` it returns the images alone, one a sample; None where there are no samples: no tars, or files
    beside the images that hold no label. Whole numbers are the class indices themselves; names are numbered in order.
    Raises ValueError where some images have a label and others none.
    """
    may_label = [i for i, name in enumerate(listing.names) if name.lower().endswith((".cls", ".json", ".txt"))]
    # Some keys have dots, as 22.05 in 22.05.png and 22.05.cls, and then end at the last.
    last = any(key_of(listing.names[i])[1].endswith(".cls") for i in may_label)
    sample_of = partial(listing.sample_of, last=last)
    parts = {(sample_of(i), part): i for i in may_label if (part := key_of(listing.names[i], last)[1]) in LABEL_PARTS}
    keys = {key for key, _ in parts}
    images = sorted(images) if listing.tars else images  # the order of the tars is the fast one to read them in
    if not any(sample_of(i) in keys for i in images):
        return None
    chosen: dict[tuple[int, str], int] = {}
    for i in images:
        key = sample_of(i)
        chosen[key] = min(chosen.get(key, i), i, key=lambda i: (listing.names[i].count("."), listing.names[i]))
    if not labelled:
        return [*chosen.values()] if listing.tars else None
    classes, several = {}, []
    for key, image in chosen.items():
        there = {part: label for part in LABEL_PARTS if (key, part) in parts
                 and (label := tar_label(part, listing.read(parts[key, part])))}
        if there:
            classes[key] = next(iter(there.values()))
        elif not classes and not listing.tars:  # captions beside images, of which there may be millions
            return None
        if len({*there.values()}) > 1:
            several.append(f"{listing.shown[image]} (.{' .'.join(there)})")
    if not classes:
        return None
    if lacking := [image for key, image in chosen.items() if key not in classes]:
        raise ValueError(f"source={listing.path} has no class for {listing.shown[lacking[0]]} and {len(lacking) - 1} "
                         f"others: {HOW_SAMPLES_ARE_LABELLED}")
    notes = []
    if several:
        notes.append(f"{len(several):,} samples have several labels, of which .cls counts before .json and .json "
                     f"before .txt: {a_few(several)}")
    taken = {i: chosen[sample_of(i)] for i in images}
    spare = [(listing.shown[i], f"is another picture of the sample, of which {listing.shown[other]} is taken")
             for i, other in taken.items() if i != other]
    if spare:
        notes.append(f"{len(spare):,} images are further pictures of a sample and are left out: "
                     f"{spare[0][0]} {spare[0][1]}.")
    used = {listing.shown[i] for (key, _), i in parts.items() if key in chosen}
    listing.left_out = [row for row in listing.left_out if row[0] not in used] + spare
    return label_images(listing, [*chosen.values()], [*classes.values()], f"source={listing.path}", notes=notes)


# ---- grey of 16 bits ------------------------------------------------------------------------------------------------


def note_on_dark(source: ImageSource) -> str | None:
    """Returns a line where images of 16 bits use 12 of them at most; looks at up to `DEEP_PROBED` images."""
    found, read, files = [], source.read, np.arange(len(source))
    if source.listing.quick is not None:
        read, files = source.listing.read, source.listing.quick
    chosen = files[spread(len(files), DEEP_PROBED)]
    for index in chosen.tolist():
        try:
            data = read(index)
            with open_image(data) as image:
                if is_deep_grey(image):
                    to_rgb(image)  # which refuses values that are no levels of grey
                    found.append(int(deep_values(image).max()))
                elif data.startswith(b"\x89PNG") and data[24] == 16:  # of which Pillow keeps the upper eight bits
                    found.append(int(np.asarray(image.convert("RGB")).max()) << 8)
        except (UnreadableImage, ValueError, OverflowError):  # told when the images are read
            continue
    if not found or max(found) >= 4096:
        return None
    return (f"{len(found):,} of {len(chosen):,} images looked at have 16 bits or more, and none has "
            f"a value above {max(found):,}: divided by 65,535 they are nearly black. Multiply 12-bit values by 16 "
            f"first.")
