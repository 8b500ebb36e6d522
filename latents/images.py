"""Opens images as numbered items with a name, a label and pixels: from folders, zips, tars or the built-in shapes.

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
from latents.hub import Rows, find_shards, note_missing_shards, open_rows
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
    FIRST_FRAME_USED,
    IMAGE_SUFFIXES,
    NOT_ROTATED,
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
# Folders of masks and annotations. A class may have a name like POSSIBLE_MASKS, so there the file names decide.
MASKS = re.compile(r"(^|/)(annotations|trimaps|ground_?truth|gtfine|gtcoarse|masks|segmentations|segmentationclass|"
                   r"segmentationobject)/", re.IGNORECASE)
MASK_WORDS = "mask|gt|seg|segmentation|labels?|matte|alpha|annotation|trimap"
POSSIBLE_MASKS = re.compile(rf"(^|/)({MASK_WORDS})/", re.IGNORECASE)
MASK_SUFFIX = re.compile(rf"(?<=.)[_-]({MASK_WORDS})$", re.IGNORECASE)
# Pillow opens some other formats with external programs.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = 2**28  # prompts and workflows exceed Pillow's 1 MB
MAX_LABEL_BYTES = 2**28  # a larger file is not checked for labels
MIN_TO_QUESTION = 8  # with fewer images, one class per image may be intended
NUM_DEEP_PROBED = 256  # images checked for 16-bit grey, evenly spread


# ---- one image ------------------------------------------------------------------------------------------------------


def is_deep_grey(image: Image.Image) -> bool:
    return image.mode in ("F", "I") or image.mode.startswith("I;16")


def deep_values(image: Image.Image) -> np.ndarray:
    """Returns the values of an image in grey of 16 or more bits, with 0 for black.

    A TIFF may store white as 0, which Pillow inverts only for up to 8 bits.
    """
    values = np.asarray(image)
    return 65535 - values if getattr(image, "tag_v2", {}).get(PHOTOMETRIC_INTERPRETATION) == 0 else values


def remark_on(image: Image.Image) -> str | None:
    """Returns a remark if only the first frame is used or the EXIF orientation is ignored; nearly always None.

    A phone's JPEG with previews (MPO) counts as one image.
    """
    with suppress(Exception):  # a second frame or EXIF may be damaged, but neither is used
        if image.format != "MPO" and getattr(image, "is_animated", False):
            return FIRST_FRAME_USED
        if "exif" in image.info and image.getexif().get(ExifTags.Base.Orientation, 1) not in (0, 1):
            return NOT_ROTATED
    return None


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts any PIL image to RGB. Transparency is blended with white, and grey of 16 or more bits is scaled to 8.

    The EXIF orientation is not applied, as in ADM and DiT. Raises UnreadableImage for grey without a known range.
    """
    if is_deep_grey(image):
        values = deep_values(image)  # convert("RGB") would clip at 255 and turn nearly everything white
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
    """Opens an image file. Any exception that Pillow raises in the block becomes an UnreadableImage."""
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
    """Decodes one image file to RGB. Raises UnreadableImage with the reason if it cannot."""
    with open_image(data) as image:
        image.load()
        return to_rgb(image)


def center_crop(image: Image.Image, resolution: int) -> Image.Image:
    """Scales and crops to a centred square by ADM's rule, so that results compare with ADM's, DiT's and TREAD's.

    Halves the image with a box filter while the shorter side is at least twice the target. A bicubic filter does the
    rest, and also enlarges smaller images. Then it crops the middle. An image of the right size is returned unchanged.
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
    """Draws item `index` of the shapes set, which has class `index % 6`, as uint8 (resolution, resolution, 3).

    The drawing depends only on (seed, index). A higher resolution renders the same drawing more finely.
    """
    rng = np.random.default_rng([seed, index])
    # Mainly the colour varies, so that a small network learns the outlines within minutes on a CPU.
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
        case "triangle":  # equilateral, pointing up; its centroid lies below the middle of its height
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
    """Images as numbered items, in an order that depends only on the source.

    `names[i]` is the path of image i, `labels[i]` (int64) its class, and `class_names[label]` the name of a class.
    `left_out` lists (name, reason) for files that are not in the set. `notes` are lines that a user should see, and
    `listing` has all the files.
    """

    names: list[str]
    labels: np.ndarray
    class_names: list[str]
    left_out: list[tuple[str, str]] = field(default_factory=list)
    read: Callable[[int], bytes] | None = None  # returns a file's bytes; None for the built-in shapes
    notes: list[str] = field(default_factory=list)
    listing: Listing | None = None
    remarks: dict[int, str] = field(default_factory=dict)  # index -> one of REMARKS, for images read so far

    @property
    def not_images(self) -> list[str]:
        return [name for name, _ in self.left_out]

    def __len__(self) -> int:
        return len(self.names)

    def pixels(self, index: int, resolution: int | None = None) -> np.ndarray:
        """Returns image `index` as uint8 RGB (H,W,3), cropped to a square of `resolution` or in its stored size."""
        with open_image(self.read(index)) as file:
            file.load()
            image = to_rgb(file)
            if remark := remark_on(file):
                self.remarks[index] = remark
        return np.array(image if resolution is None else center_crop(image, resolution))

    def fingerprint(self) -> str:
        """Returns a hash of the names, labels and classes, in order. The files' content is not hashed."""
        digest = hashlib.sha256("\0".join(self.class_names).encode("utf-8", "surrogateescape"))
        for name in self.names:
            digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
        digest.update(self.labels.astype("<i8").tobytes())
        return digest.hexdigest()


class ShapeSource(ImageSource):
    """The built-in shapes: six alternating classes, drawn on demand and never stored."""

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
    """Lists the images of a folder, a zip, tars, Hugging Face shards or `shapes`, with their classes.

    `labels` is `folders`, `none`, `names` or a file. `folders` also reads `dataset.json`, webdataset's `.cls` or a
    shard's label column if present. The two columns are for shards; None means the only suitable column. Raises
    ValueError if there is nothing to read, or if a class is unknown.
    """
    if source == "shapes":
        if shapes_count < len(SHAPES):
            raise ValueError(f"shapes.count={shapes_count} leaves classes empty; there are {len(SHAPES)} shapes.")
        if labels != "folders":
            raise ValueError(f"labels={labels} is for images; source=shapes knows its classes: leave it out.")
        return ShapeSource(shapes_count, shapes_seed)
    listing = list_source(source)
    if shards := find_shards(listing, f"source={source}", mixed="{" in str(source)):
        return from_rows(open_rows(listing, shards, f"source={source}", image_column), labels, label_column)
    if unused := [f"{key}={value}" for key, value in (("image_column", image_column), ("label_column", label_column))
                  if value is not None]:
        raise ValueError(f"{' '.join(unused)} would change nothing, as source={source} has no parquet or arrow files. "
                         "To choose a column in a file of labels, set labels=<file>:<column>.")
    images = sorted((i for i, name in enumerate(listing.names) if looks_like_image(name)),
                    key=listing.names.__getitem__)
    others = [(shown, "is a hidden or system file" if has_image_suffix(name) else "does not look like an image")
              for name, shown in zip(listing.names, listing.shown, strict=True) if not looks_like_image(name)]
    listing.left_out = sorted(listing.left_out + others)
    if not images:
        refuse_foreign(str(source))
        among = f" among {len(listing.left_out)} files such as {listing.left_out[0][0]}" if listing.left_out else ""
        raise ValueError(f"source={source} holds no images{among}. The names of images end in "
                         f"{' '.join(sorted(IMAGE_SUFFIXES))}.")
    found = from_samples(listing, images, labels == "folders")
    if labels != "folders":
        return from_setting(listing, found or images, labels)
    if found:
        return found
    file, notes = find_dataset_json(listing, images)
    if file is not None:
        return from_file(listing, images, listing.shown[file], file)
    found = from_folders(listing, images)
    found.notes += notes
    return found


def from_setting(listing: Listing, images: list[int], labels: str) -> ImageSource:
    """Labels images as `labels` says: `none`, `names` or a file."""
    if labels == "none":
        return one_class(listing, images)
    if labels == "names":
        pairs = [(listing.names[i], class_from_name(listing.names[i])) for i in images]
        return from_pairs(listing, images, pairs, "names")
    if known := read_validation(labels):
        return from_pairs(listing, images, known[0], labels, class_names=known[1])
    return from_file(listing, images, labels)


def from_rows(rows: Rows, labels: str, label_column: str | None) -> ImageSource:
    """Labels the rows of shards and keeps them in stored order, which is the fastest to read."""
    listing, images = rows.listing(named=labels not in ("folders", "none")), [*range(len(rows))]
    column = rows.choose_labels(label_column) if labels == "folders" else None
    if column is not None:
        values, class_names = rows.labels(column)
        labelled = f"labels from column {column}"
        found = label_images(listing, images, values, f"column {column}", class_names,
                             remedy="choose another label_column")
    elif label_column is not None:
        raise ValueError(f"label_column={label_column} would change nothing: labels={labels} already sets the classes.")
    elif labels == "folders":
        labelled = "one class, because no column is named like labels (label_column= selects one)"
        found = one_class(listing, images)
    else:
        labelled = f"labels={labels}"
        found = from_setting(listing, images, labels)
    found.notes = [f"Images from column {rows.image[0]}, {labelled}. The columns are {rows.columns}.",
                   *filter(None, [note_missing_shards(rows)]), *found.notes]
    return found


def label_images(
    listing: Listing, images: list[int], classes: Sequence, where: str, class_names: list[str] | None = None,
    extra_labels: Sequence[str] = (), notes: Sequence[str] = (), remedy: str = "correct the file",
) -> ImageSource:
    """Makes a source of the images that have a class in `classes`. Notes report unlabelled images and empty classes.

    With `class_names`, classes are indices. Otherwise they are text, which is numbered together with `extra_labels`.
    Raises ValueError, ending in `remedy`, for an invalid class.
    """
    warn_of_masks(listing, images)
    kept = [i for i, label in zip(images, classes, strict=True) if label is not None]
    unlabelled = [listing.shown[i] for i, label in zip(images, classes, strict=True) if label is None]
    known, notes = [label for label in classes if label is not None], [*notes]
    if class_names is None:
        labels, class_names = number_classes(known, where, remedy, extra_labels)
    else:
        labels = np.array(known, dtype=np.int64)
        check_labels(labels, len(class_names), where, remedy)
    check_names(class_names, where, remedy)
    counts = np.bincount(labels, minlength=len(class_names))
    empty = [class_names[label] for label in np.flatnonzero(counts == 0)]
    if unlabelled:
        notes.insert(0, f"{where}: {len(unlabelled):,} of {len(images):,} images have no label and are left out: "
                        f"{a_few(unlabelled)}")
    if empty:
        notes.append(f"{where}: {len(empty):,} of these {len(counts):,} classes have no image: {a_few(empty)}")
    if len(kept) >= MIN_TO_QUESTION and (distinct := len(counts) - len(empty)) > len(kept) / 2:
        notes.append(f"There are {distinct:,} classes for {len(kept):,} images, which is about one per image. Check "
                     f"that these are the classes you mean.")
    left_out = [*listing.left_out, *((name, f"has no label in {where}") for name in unlabelled)]
    files = np.array(kept, dtype=np.int64)  # a list would take five times the memory
    return ImageSource([listing.shown[i] for i in kept], labels, class_names, left_out,
                       lambda index: listing.read(int(files[index])), notes, listing)


def one_class(listing: Listing, images: list[int]) -> ImageSource:
    return label_images(listing, images, [0] * len(images), f"source={listing.path}", [listing.title])


def from_folders(listing: Listing, images: list[int]) -> ImageSource:
    """Uses the first folder below the images' common folder as the class, sorted by name as in torchvision.

    So `train/cat/x.jpg` and `train/dog/y.jpg` are a cat and a dog. If all images lie in one folder, they form one class
    of that name.
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
                      f"set: choose one, as in source={posixpath.join(source, common, split)}.", stacklevel=3)
    if listing.tars > 1 and parents == {""}:
        raise ValueError(f"source={source} has no class for the images of {listing.tars} tars, such as "
                         f"{listing.shown[images[0]]}: {HOW_TO_LABEL_SAMPLES}")
    index_of = {name: index for index, name in enumerate(class_names)}
    labels = [index_of[class_of[folder]] for folder in folders]
    order = sorted(range(len(images)), key=labels.__getitem__)  # stable, so each class remains sorted by name
    hints = [hint] if len(class_names) == 1 and (hint := find_unread_labels(listing, images)) else []
    return label_images(listing, [images[k] for k in order], [labels[k] for k in order], f"source={source}",
                        class_names, notes=hints, remedy="rename it")


def warn_of_masks(listing: Listing, images: list[int]) -> None:
    """Warns about masks, trimaps and ground truth beside pictures, because they would be trained on."""
    if listing.tars:  # webdataset samples have one picture each
        return
    picture_of = {}  # possible mask -> the stem that its picture would have
    for i in images:
        stem = stem_of(listing.names[i])
        picture = MASK_SUFFIX.sub("", stem)
        if picture != stem or any(words.search(listing.names[i]) for words in (MASKS, POSSIBLE_MASKS)):
            picture_of[i] = picture
    if not picture_of:  # the usual case, which avoids copying millions of names
        return
    stems = {stem_of(listing.names[i]) for i in images if i not in picture_of}
    masks = [i for i, stem in picture_of.items() if MASKS.search(listing.names[i]) or stem in stems]
    if 0 < len(masks) < len(images):
        pictures = posixpath.commonpath({posixpath.dirname(f"/{listing.names[i]}") for i in {*images} - {*masks}})
        is_apart = not any(f"/{listing.names[i]}".startswith(f"{pictures.rstrip('/')}/") for i in masks)
        remedy = f"select the pictures, as in source={listing.path}{pictures}" if is_apart else "move them away"
        warnings.warn(f"source={listing.path} has {len(masks):,} images among {len(images):,} that look like masks of "
                      f"the others, such as {listing.shown[masks[0]]}. All would be trained on: {remedy}.",
                      stacklevel=4)


# ---- classes from a file --------------------------------------------------------------------------------------------


def find_dataset_json(listing: Listing, images: list[int]) -> tuple[int | None, list[str]]:
    """Finds the dataset.json that the tools of EDM, EDM2 and StyleGAN put above the images.

    Returns its number, and notes about each one that is not read. Raises ValueError if one covers only a part of the
    images.
    """
    places = [i for i, name in enumerate(listing.names) if posixpath.basename(name) == "dataset.json"
              and not is_hidden(name)]
    if twice := [name for name, count in Counter(listing.names[i] for i in places).items() if count > 1]:
        raise ValueError(f"source={listing.path} holds {twice[0]} in more than one tar: prepare each tar separately, "
                         f"or set labels=none.")
    notes = []
    for i in sorted(places, key=lambda i: -listing.names[i].count("/")):
        folder = posixpath.dirname(listing.names[i])
        inside = sum(not folder or listing.names[image].startswith(f"{folder}/") for image in images)
        if not inside:
            continue
        if inside < len(images):
            raise ValueError(f"source={listing.path} holds {listing.shown[i]}, which covers only {inside} of the "
                             f"{len(images)} images: set source={listing.path / folder}, or labels=none.")
        content = None
        with suppress(ValueError):  # reading it later raises the same error
            content = parse_json(listing.read(i))
        if content is None or isinstance(content, dict) and "labels" in content:
            return i, []
        notes.append(f'{listing.shown[i]} has no "labels" and is not read.')
    return None, notes


def find_file(listing: Listing, labels: str) -> int | None:
    """Returns the number of a label file in the source, if it is there; raises ValueError if several tars hold it."""
    path, is_here = str(Path(labels)), Path(labels).is_file()
    found = [i for i, name in enumerate(listing.names) if path in (f"{listing.path}/{name}", listing.shown[i])
             or path == name and not is_here]
    if len(found) > 1:
        raise ValueError(f"labels={labels} is in {len(found)} tars: name one, as in labels={listing.shown[found[0]]}.")
    return found[0] if found else None


def from_file(listing: Listing, images: list[int], labels: str, member: int | None = None) -> ImageSource:
    """Reads the classes from a file on disk or in the source, or from one column of it, `<file>:<column>`.

    Raises ValueError if it labels no image.
    """
    file, column = labels, None
    member = find_file(listing, file) if member is None else member
    if member is None and not Path(file).is_file() and ":" in file:
        file, _, column = labels.rpartition(":")
        member = find_file(listing, file)
    if member is not None:
        listing.left_out = [row for row in listing.left_out if row[0] != listing.shown[member]]
    elif not Path(file).is_file():
        raise ValueError(f"labels={labels} is not a file here or in {listing.path}: set labels to folders, none, names "
                         "or a file.")
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
    """Labels images from pairs (name, label). With `class_names`, the labels are indices."""
    names = [listing.names[i] for i in images]
    classes, unused = match(names, pairs, posixpath.dirname(f"{listing.path.absolute()}/"), labels)
    times = Counter(names) if listing.tars > 1 and labels != "names" else {}
    if several := [name for name, label in zip(names, classes, strict=True) if label and times.get(name, 1) > 1]:
        raise ValueError(f"labels={labels} labels {several[0]}, but {times[several[0]]} tars hold a file of that name: "
                         f"prepare each tar separately, or put a .cls into the tars.")
    if not any(classes):
        expected = "<class>_<number>" if labels == "names" else f"names such as {pairs[0][0]}"
        raise ValueError(f"labels={labels} labels none of the {len(images)} images, such as {names[0]}: it expects "
                         f"{expected}.")
    notes = [f"labels={labels}: {len(unused):,} labels have no image: {a_few(unused)}"] if unused else []
    return label_images(listing, images, classes, f"labels={labels}", class_names,
                        [label for _, label in pairs if label], notes)


def class_from_name(name: str) -> str | None:
    """Returns what precedes the last underscore, as in ADM, or else the number: cat_0.png, cat.0.png, cat (0).png."""
    stem = stem_of(name)
    if "_" in stem:
        return stem.rpartition("_")[0] or None
    word = re.fullmatch(r"(.*[^\W\d].*?)[ .-]+\(?\d+\)?", stem)
    return word[1] if word else None


def find_unread_labels(listing: Listing, images: list[int]) -> str | None:
    """Returns a hint if a file beside the images, or the images' names, seem to hold classes that are not used."""
    stems = {stem_of(listing.names[i]) for i in images}
    inside = [i for i, name in enumerate(listing.names) if Path(name).suffix.lower() in LABEL_SUFFIXES
              and not is_hidden(name) and key_of(posixpath.basename(name))[0] not in stems]
    files = [(listing.path / listing.names[i], lambda i=i: listing.read(i)) for i in inside[:20]]
    above = dict.fromkeys(folder for place in (listing.path.absolute(), listing.path.resolve())
                          for folder in place.parents[:6])
    beside = [file for file in sorted(listing.path.absolute().parent.glob("*"))
              if file.suffix.lower() in LABEL_SUFFIXES and file.is_file()
              and file.name not in ("results.jsonl", "metrics.jsonl")]  # ours: some numbers look like names
    beside = beside[:20] + [file for folder in above for file in folder.glob("LOC_*_solution.csv")]  # Kaggle's layout
    files += [(file, file.read_bytes) for file in beside if file.stat().st_size <= MAX_LABEL_BYTES]
    hints = []
    for file, read in files:
        hint = f"{file} looks like labels but is not read, so there is only one class: labels={file} reads it."
        try:
            table = read_table(read(), str(file), is_image := lambda cell: stem_of(clean(cell)) in stems)
            columns = [i for i in table.other_columns if table.may_be_classes(i, is_image)] if table else []
        except (ValueError, OSError, UnreadableImage):
            if any(word in file.name.lower() for word in ("label", "class", "annotation", "solution")):
                return hint
            continue
        try:
            if columns and (table.is_one_hot() or table.choose()[0] in columns):
                return hint
        except ValueError:  # several columns, and none is called labels
            hints.append(f"{file} has {len(columns)} columns that may be classes of these images "
                         f"({a_few([table.head(i) for i in columns])}), but none is read: labels={file}:"
                         f"{table.head(columns[0])} reads one.")
    if hints:
        return hints[0]
    if all(map(VALIDATION.fullmatch, stems)):
        return ("These are ILSVRC's validation images, treated as one class. For their labels set "
                "labels=ILSVRC2012_devkit_t12.tar.gz or Kaggle's LOC_val_solution.csv.")
    words = {class_from_name(listing.names[i]) for i in images}
    if None not in words and 2 <= len(words) <= len(images) / 2:
        return (f"The names begin with {len(words)} different words, followed by an underscore or number "
                f"({a_few(sorted(words))}): labels=names makes them classes.")
    return None


# ---- webdataset's samples -------------------------------------------------------------------------------------------


def tar_label(suffix: str, text: bytes) -> str | None:
    """Reads the class in a `.cls`, a `.json` {"label": …} or a `.txt` with an integer; returns None if it has none."""
    try:
        if suffix == "cls":
            return text.decode().strip()
        if suffix == "json":
            label = parse_json(text).get("label")
            return None if label is None else str(label)
        return str(int(text))
    except (ValueError, AttributeError):  # a caption or other JSON
        return None


LABEL_PARTS = ("cls", "json", "txt")  # if a sample has several, the first in this order counts
HOW_TO_LABEL_SAMPLES = ('a sample needs a .cls, a .json with "label", or a .txt with an integer. Otherwise set '
                        'labels=none, labels=names or labels=<file>.')


def from_samples(listing: Listing, images: list[int], labelled: bool) -> ImageSource | list[int] | None:
    """Groups files whose names agree up to the first dot into webdataset samples of one image and one label.

    Without `labelled` it returns only the images, one per sample. Returns None if there are no samples: the files are
    not in tars, or the files beside the images hold no label. Integer labels are the class indices themselves, and
    names are numbered in sorted order. Raises ValueError if only some images have a label.
    """
    may_label = [i for i, name in enumerate(listing.names) if name.lower().endswith((".cls", ".json", ".txt"))]
    # Some keys contain dots, such as 22.05 in 22.05.png and 22.05.cls, and end at the last dot instead.
    last = any(key_of(listing.names[i])[1].endswith(".cls") for i in may_label)
    sample_of = partial(listing.sample_of, last=last)
    parts = {(sample_of(i), part): i for i in may_label if (part := key_of(listing.names[i], last)[1]) in LABEL_PARTS}
    keys = {key for key, _ in parts}
    images = sorted(images) if listing.tars else images  # the order in the tars is the fastest to read
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
        found = {part: label for part in LABEL_PARTS if (key, part) in parts
                 and (label := tar_label(part, listing.read(parts[key, part])))}
        if found:
            classes[key] = next(iter(found.values()))
        elif not classes and not listing.tars:  # captions beside images; there may be millions, so stop here
            return None
        if len({*found.values()}) > 1:
            several.append(f"{listing.shown[image]} (.{' .'.join(found)})")
    if not classes:
        return None
    if unlabelled := [image for key, image in chosen.items() if key not in classes]:
        raise ValueError(f"source={listing.path} has no class for {listing.shown[unlabelled[0]]} and "
                         f"{len(unlabelled) - 1} others: {HOW_TO_LABEL_SAMPLES}")
    notes = []
    if several:
        notes.append(f"{len(several):,} samples have several labels, and .cls counts before .json and .json before "
                     f".txt: {a_few(several)}")
    image_of = {i: chosen[sample_of(i)] for i in images}
    spare = [(listing.shown[i], f"is another picture of the same sample, and {listing.shown[other]} is used")
             for i, other in image_of.items() if i != other]
    if spare:
        notes.append(f"{len(spare):,} images are left out as further pictures of a sample: {spare[0][0]} "
                     f"{spare[0][1]}.")
    used = {listing.shown[i] for (key, _), i in parts.items() if key in chosen}
    listing.left_out = [row for row in listing.left_out if row[0] not in used] + spare
    return label_images(listing, [*chosen.values()], [*classes.values()], f"source={listing.path}", notes=notes)


# ---- 16-bit grey ----------------------------------------------------------------------------------------------------


def note_dark_images(source: ImageSource) -> str | None:
    """Returns a note if 16-bit images use at most 12 of their bits; checks up to `NUM_DEEP_PROBED` images."""
    found, read, files = [], source.read, np.arange(len(source))
    if source.listing.quick is not None:
        read, files = source.listing.read, source.listing.quick
    chosen = files[spread(len(files), NUM_DEEP_PROBED)]
    for index in chosen.tolist():
        try:
            data = read(index)
            with open_image(data) as image:
                if is_deep_grey(image):
                    to_rgb(image)  # raises UnreadableImage for values without a known range
                    found.append(int(deep_values(image).max()))
                elif data.startswith(b"\x89PNG") and data[24] == 16:  # Pillow keeps the upper eight bits
                    found.append(int(np.asarray(image.convert("RGB")).max()) << 8)
        except (UnreadableImage, ValueError, OverflowError):  # reported later, when the images are read
            continue
    if not found or max(found) >= 4096:
        return None
    return (f"{len(found):,} of {len(chosen):,} checked images have 16 bits or more, and none has a value above "
            f"{max(found):,}: divided by 65,535 they are nearly black. Multiply 12-bit values by 16 first.")
