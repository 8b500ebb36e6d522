"""Which class each image has: by its folder, a file beside it, or a file of labels. Nothing is guessed.

docs/data.md has the lines of pandas that bring other label files into the forms that are read here.
"""

import io
import os
import posixpath
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from latents.listing import Listing, a_few, is_hidden
from runtime.files import parse_json
from runtime.schema import first_line, typed
from runtime.untrusted import reading

WAYS = ("folders", "cls", "none")
NUMBER = re.compile(r"[-+]?\d*\.?\d+(e[-+]?\d+)?", re.IGNORECASE)
NO_LABEL = {"", "nan", "na", "n/a", "<na>", "none", "null"}  # how tables write it, in any case


class Columns(NamedTuple):
    """The columns of parquet files and label files."""

    image: str = "image"
    name: str = "file_name"
    label: str = "label"


USUAL = Columns()


def is_no_label(value: object) -> bool:
    """True for what stands for a missing label: None, NaN, -1, or one of NO_LABEL."""
    return value in (None, -1) or value != value or isinstance(value, str) and value.casefold() in NO_LABEL


def require_classes(
    where: str, names: Iterable[str], labels: Sequence[object], is_missing: Callable[[object], bool] = is_no_label,
) -> None:
    """Raises ValueError if an image has no class."""
    if unlabelled := [f"{name} ({label or 'none'})" for name, label in zip(names, labels, strict=True)
                      if is_missing(label)]:
        raise ValueError(f"{where} has no class for {len(unlabelled)} of the {len(labels)} images, such as "
                         f"{unlabelled[0]}: add it, move them away, or set labels=none for a set without classes.")


def label_images(way: str, listing: Listing, names: list[str], columns: Columns) -> tuple[np.ndarray, list[str]]:
    """Returns the labels (int64) of the images `names`, and the class names, by one of WAYS or by a label file.

    Raises ValueError if an image has no class.
    """
    label_of: Mapping[str, object]  # may also have classes of images elsewhere
    match way:
        case "none":
            return np.zeros(len(names), np.int64), ["all"]
        case "folders":
            label_of = class_folders(listing, names)
        case "cls":
            label_of = read_cls(listing, names)
        case _:
            label_of = read_label_file(way, listing, columns)
            if label_of.keys().isdisjoint(names):
                raise ValueError(f"labels={way} names no images, but {a_few([*label_of]) or 'nothing'}: its names are "
                                 f"paths with / and suffix from the source, which has {names[0]}. docs/data.md has "
                                 f"lines of pandas that write them; labels=none makes one class.")
    classes, listed, where = [label_of.get(name) for name in names], label_of.values(), f"labels={way}"
    if way == "folders":    # one may be called None
        require_classes(where, names, classes, lambda label: label is None)
        return number_names(classes, listed)
    require_classes(where, names, classes)
    return number_classes(classes, listed, where)


def number_names(classes: Iterable[object], listed: Iterable[object]) -> tuple[np.ndarray, list[str]]:
    """Numbers names in sorted order, as torchvision does, together with those `listed` for images elsewhere."""
    class_names = sorted({str(name) for name in listed})
    index_of = {name: index for index, name in enumerate(class_names)}
    return np.array([index_of[str(name)] for name in classes], dtype=np.int64), class_names


def number_classes(classes: Sequence[object], listed: Iterable[object], where: str) -> tuple[np.ndarray, list[str]]:
    """Returns labels and class names. Whole numbers are the labels themselves; names are numbered in sorted order.

    Raises ValueError for other numbers, for what is neither a number nor text, and for spaces around a label.
    """
    listed = [value for value in listed if not is_no_label(value)]
    if odd := [value for value in listed if type(value) is not int and (
            not isinstance(value, str) or value != value.strip() or not value.isprintable())]:
        raise ValueError(f"{where} has the label {odd[0]!r}, which is neither a whole number nor text without spaces "
                         f"around it: correct it.")
    texts = {str(value) for value in listed}
    if not all(map(NUMBER.fullmatch, texts)):
        return number_names(classes, texts)
    if wrong := [text for text in sorted(texts) if not re.fullmatch(r"0|[1-9]\d{0,5}", text)]:
        raise ValueError(f"{where} has the label {wrong[0]}: number classes 0, 1, 2 …, or write names.")
    numbers = np.array([int(str(label)) for label in classes])
    return numbers, [str(index) for index in range(max(map(int, texts)) + 1)]


# ---- folders, and files beside the images ---------------------------------------------------------------------------


def class_folders(listing: Listing, names: list[str]) -> dict[str, str]:
    """Returns the first folder of each image that is in one.

    Raises ValueError for a folder without images, as in torchvision: it may be a class that was not downloaded.
    """
    folder_of = {name: inner.split("/")[0] for name in names if "/" in (inner := listing.name_in_tar(name))}
    folders = {inner.split("/")[0] for name in listing.names if "/" in (inner := listing.name_in_tar(name))}
    if listing.path.is_dir() and not listing.tars:
        folders |= {entry.name for entry in os.scandir(listing.path) if entry.is_dir()}
    if empty := sorted(name for name in folders - {*folder_of.values()} if not is_hidden(f"{name}/")):
        raise ValueError(f"labels=folders finds no image in {len(empty)} folders of {listing.path}, such as "
                         f"{empty[0]}, which may be classes: fill them, or move them away.")
    return folder_of


def read_cls(listing: Listing, names: list[str]) -> dict[str, str]:
    """Reads the .cls beside each image that has one. Raises ValueError for one that is not text."""
    present, label_of = {*listing.names}, {}
    for name in names:
        if file := cls_beside(name, present):
            with reading(f"labels=cls: {file}", "text in UTF-8", "write a number or a name"):
                label_of[name] = listing.read(file).decode().strip()
    return label_of


def cls_beside(name: str, present: Container[str]) -> str | None:
    """Returns the .cls beside an image: of its stem, or of webdataset's key, which ends at the first dot."""
    folder, _, file = name.rpartition("/")
    stems = posixpath.splitext(name)[0], posixpath.join(folder, file.partition(".")[0])
    return next((f"{stem}.cls" for stem in stems if f"{stem}.cls" in present), None)


# ---- label files ----------------------------------------------------------------------------------------------------


def read_label_file(file: str, listing: Listing, columns: Columns) -> dict[str, object]:
    """Reads the class of each name in a dataset.json of EDM's tools, or in two columns of a .csv.

    Raises ValueError for other files, absent columns and contradictions.
    """
    within, kind = Path(os.path.relpath(file, listing.path)).as_posix(), Path(file).suffix.lower()
    if not Path(file).is_file() and within not in listing.names:
        raise ValueError(f"labels={file} is not a file, looked for from {Path.cwd()}, nor one of {', '.join(WAYS)}.")
    try:
        content = Path(file).read_bytes() if Path(file).is_file() else listing.read(within)     # set.zip/dataset.json
        if kind in (".json", ".csv"):
            return parse_dataset(content) if kind == ".json" else parse_csv(content, columns)
        raise ValueError("its suffix is neither .csv nor .json: write a .csv, as docs/data.md shows")
    except ValueError as error:
        raise ValueError(f"labels={file} cannot be read, as {first_line(error)}.") from error


def parse_dataset(content: bytes) -> dict[str, object]:
    """Reads the class of each name in EDM's dataset.json; {} for `"labels": null`. Raises ValueError for others."""
    record = parse_json(content)
    pairs = record.get("labels", ()) if isinstance(record, dict) else ()
    if pairs is None:
        return {}
    if not pairs or not isinstance(pairs, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise ValueError('it is not EDM\'s {"labels": [[name, class], …]}: write that, or a .csv as in docs/data.md')
    return by_name(pairs)


def parse_csv(content: bytes, columns: Columns) -> dict[str, object]:
    """Reads two columns of a table whose first row names them; raises ValueError if they are not there."""
    from pyarrow import csv, string

    wanted = (columns.name, columns.label)
    table = csv.read_csv(io.BytesIO(content), parse_options=csv.ParseOptions(newlines_in_values=True),
                         convert_options=csv.ConvertOptions(column_types=dict.fromkeys(wanted, string())))
    if any(table.column_names.count(name) != 1 for name in wanted):
        raise ValueError(f"it has the columns {a_few([name or '(no name)' for name in table.column_names], 12)}, not "
                         f"{' and '.join(wanted)}: set name_column= and label_column=")
    return by_name(zip(*(table[name].to_pylist() for name in wanted), strict=True))


def by_name(pairs: Iterable[Sequence[object]]) -> dict[str, object]:
    """Maps names, without ./ at the start, to classes; raises ValueError for a name of two classes, or of no text."""
    label_of: dict[str, object] = {}
    for name, label in pairs:
        if not isinstance(name, str):
            raise ValueError(f"the name {name} is no text")
        before = label_of.setdefault(posixpath.normpath(name), label)
        if before is not label and before != label:  # NaN is not equal to itself
            raise ValueError(f"it gives {name} two classes")
    return label_of


# ---- the only way ---------------------------------------------------------------------------------------------------


def only_way(source: str | Path, listing: Listing, names: list[str]) -> str:
    """Returns the only way to label the images: class folders one level down, or a .cls beside each.

    Raises ValueError, with what to type for each, if there may be others, such as deeper folders or a label file.
    """
    inner = [listing.name_in_tar(name) for name in names]
    depths, tops = {name.count("/") for name in inner}, sorted({name.split("/")[0] for name in inner if "/" in name})
    present = {*listing.names}
    has_cls = any(cls_beside(name, present) for name in names)
    records = sorted(name for name in listing.names if name.endswith((".csv", ".json", ".jsonl", ".parquet"))
                     and not is_hidden(name))
    if depths == {1} and len(tops) > 1 and not has_cls and not records:
        return "folders"
    files = [name for name in records if name.endswith(".csv") or posixpath.basename(name) == "dataset.json"]
    if depths == {0} and has_cls and not files:
        return "cls"
    outside = [f", once {name} lies in one" for name in inner if "/" not in name]
    one = typed("source", f"{source}/{tops[0]}") if len(tops) == 1 else f"source={source}/<one of them>"
    inside = [one] * (min(depths) > 1 > listing.tars)
    ways = [*[f"labels=folders ({a_few(tops)}){''.join(outside[:1])}"] * bool(tops), *inside, *["labels=cls"] * has_cls,
            *(typed("labels", f"{listing.path}/{name}") for name in files[:3]), "labels=none (one class)"]
    raise ValueError(f"source={source} may be labelled in several ways, so set one: {'; '.join(ways)}; or "
                     f"labels=<file>.csv, as docs/data.md shows{f', also from {records[0]}' if records else ''}.")
