"""Which class each image has: by its folder, its name, a file beside it, or a file of labels. Nothing is guessed.

docs/data.md has the lines of pandas that bring other label files into the forms that are read here.
"""

import csv
import io
import os
import posixpath
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from latents.listing import Listing, a_few, is_hidden
from runtime.files import parse_json
from runtime.schema import first_line, typed

WAYS = ("folders", "parents", "names", "cls", "none")
NUMBER = re.compile(r"[-+]?\d*\.?\d+(e[-+]?\d+)?", re.IGNORECASE)
NO_LABEL = {"", "nan", "na", "n/a", "<na>", "none", "null"}  # how tables write it, in any case


@dataclass(frozen=True)
class Columns:
    """The columns of parquet files and label files."""

    image: str = "image"
    name: str = "file_name"
    label: str = "label"

    def require_read(self, *read: str, why: str) -> None:
        """Raises ValueError if a column was set that is not among those that are `read`."""
        unread = [f"{column}_column={value}" for column, value in vars(self).items()
                  if column not in read and value != getattr(Columns, column)]
        if unread:
            raise ValueError(f"{' '.join(unread)} would change nothing: {why}.")


USUAL = Columns()


def is_no_label(value: object) -> bool:
    """True for what stands for a missing label in a table or a file of labels: None, NaN, or one of NO_LABEL."""
    return value is None or value != value or isinstance(value, str) and value.casefold() in NO_LABEL


def label_images(way: str, listing: Listing, names: list[str], columns: Columns) -> tuple[np.ndarray, list[str]]:
    """Returns the labels (int64) of the images `names`, and the class names, by one of WAYS or by a label file.

    Raises ValueError if an image has no class.
    """
    if way == "none" or way not in WAYS and (rows := read_label_file(way, listing, columns)) is None:
        return np.zeros(len(names), np.int64), ["all"]
    inner = [listing.name_in_tar(name) for name in names]
    if way in ("folders", "parents"):
        place = 0 if way == "folders" else -2
        classes = [name.split("/")[place] if "/" in name else None for name in inner]
        if way == "folders" and listing.path.is_dir() and not listing.tars:
            folders = {entry.name for entry in os.scandir(listing.path) if entry.is_dir()}
            if empty := sorted(name for name in folders - {*classes} if not is_hidden(f"{name}/")):
                raise ValueError(f"labels=folders finds no image in {len(empty)} folders of {listing.path}, such as "
                                 f"{empty[0]}, which may be classes: fill them, or move them away.")
    elif way == "names":
        classes = [head_of(name) for name in inner]
    elif way in WAYS:
        classes = read_cls(listing, names)
    else:
        classes = match_names(rows, way, listing, inner)
    is_name = way in ("folders", "parents", "names")
    if unlabelled := [f"{name} ({label or 'none'})" for name, label in zip(inner, classes, strict=True)
                      if (not label if is_name else is_no_label(label))]:
        raise ValueError(f"labels={way} has no class for {len(unlabelled)} of the {len(names)} images, such as "
                         f"{unlabelled[0]}: add it, move them away, or set labels=none for a set without classes.")
    if is_name:
        return number_names(classes, classes)
    return number_classes(classes, [*rows.values()] if way not in WAYS else classes, f"labels={way}")


def head_of(name: str) -> str | None:
    head, underscore, _ = posixpath.basename(name).partition("_")
    return head if underscore else None


def number_names(classes: Sequence[str], listed: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """Numbers names in sorted order, as torchvision does, together with those `listed` for images elsewhere."""
    class_names = sorted({*listed})
    index_of = {name: index for index, name in enumerate(class_names)}
    return np.array([index_of[name] for name in classes], dtype=np.int64), class_names


def number_classes(classes: Sequence[object], listed: Sequence[object], where: str) -> tuple[np.ndarray, list[str]]:
    """Returns labels and class names. Whole numbers are the labels themselves; names are numbered in sorted order.

    Raises ValueError for other numbers, for what is neither a number nor text, and for spaces around a label.
    """
    listed = [value for value in listed if not is_no_label(value)]
    if odd := [value for value in listed if type(value) is not int and (
            value != str(value).strip() or not value.isprintable())]:
        raise ValueError(f"{where} has the label {odd[0]!r}, which is neither a whole number nor text without spaces "
                         f"around it: correct it.")
    texts = {str(value) for value in listed}
    if not all(map(NUMBER.fullmatch, texts)):
        return number_names([str(label) for label in classes], [*texts])
    if odd := [text for text in sorted(texts) if not re.fullmatch(r"0|[1-9]\d{0,5}", text)]:
        raise ValueError(f"{where} has the label {odd[0]}: number classes 0, 1, 2 …, or write names.")
    return np.array([int(label) for label in classes]), [str(index) for index in range(max(map(int, texts)) + 1)]


# ---- files beside the images ----------------------------------------------------------------------------------------


def read_cls(listing: Listing, names: list[str]) -> list[str | None]:
    """Reads the .cls beside each image; None if there is none. Raises ValueError for one that is not text."""
    place = {name: i for i, name in enumerate(listing.names) if name.endswith(".cls")}
    beside = [cls_beside(name, place) for name in names]
    try:
        return [None if file is None else listing.read(place[last := file]).decode().strip() for file in beside]
    except UnicodeDecodeError:
        raise ValueError(f"labels=cls: {last} is not text in UTF-8: write a number or a name.") from None


def cls_beside(name: str, present: Container[str]) -> str | None:
    """Returns the .cls beside an image: of its stem, or of webdataset's key, which ends at the first dot."""
    folder, _, file = name.rpartition("/")
    stems = posixpath.splitext(name)[0], posixpath.join(folder, file.partition(".")[0])
    return next((f"{stem}.cls" for stem in stems if f"{stem}.cls" in present), None)


# ---- label files ----------------------------------------------------------------------------------------------------


def name_within(listing: Listing, file: str) -> str | None:
    """Returns the name of a label file in the source, such as dataset.json of set.zip/dataset.json; None outside."""
    name = os.path.relpath(file, listing.path)
    return None if name.startswith("..") else Path(name).as_posix()


def read_label_file(file: str, listing: Listing, columns: Columns) -> dict[str, object] | None:
    """Reads the class of each name in a dataset.json of EDM's tools, or in two columns of a .csv or .jsonl.

    Returns None for `"labels": null`. Raises ValueError for other files, absent columns and contradictions.
    """
    name, kind = name_within(listing, file), Path(file).suffix.lower()
    if not Path(file).is_file() and name not in listing.names:
        raise ValueError(f"labels={file} is not a file, looked for from {Path.cwd()}, nor one of {', '.join(WAYS)}.")
    try:
        content = Path(file).read_bytes() if Path(file).is_file() else listing.read(listing.names.index(name))
        if kind == ".json":
            return parse_dataset(content)
        if kind == ".csv":
            text = io.StringIO(content.decode("utf-8-sig"), newline="")
            return by_name(read_columns([*csv.reader(text, strict=True)], columns))
        if kind == ".jsonl":  # not splitlines, which would also split at U+2028 within a text
            records = [parse_json(line) for line in content.decode("utf-8-sig").split("\n") if line.strip()]
            heads = [*dict.fromkeys(head for record in records for head in record)]
            rows = [[record.get(head) for head in heads] for record in records]
            return by_name(read_columns([heads, *rows], columns))
        raise ValueError("its suffix is not .json, .csv or .jsonl: write a .csv, as docs/data.md shows")
    except (ValueError, AttributeError, csv.Error) as error:
        raise ValueError(f"labels={file} cannot be read, as {first_line(error)}.") from error


def parse_dataset(content: bytes) -> dict[str, object] | None:
    """Reads the class of each name in EDM's dataset.json; None for `"labels": null`. Raises ValueError for others."""
    record = parse_json(content)
    pairs = record.get("labels", ()) if isinstance(record, dict) else ()
    if pairs is None:
        return None
    if not isinstance(pairs, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise ValueError('it is not EDM\'s {"labels": [[name, class], …]}: write that, or a .csv as in docs/data.md')
    return by_name(pairs)


def by_name(pairs: Iterable[Sequence]) -> dict[str, object]:
    """Maps names, without ./ at the start, to classes; raises ValueError for a name of two classes, or of no text."""
    rows: dict[str, object] = {}
    for name, label in pairs:
        if not isinstance(name, str):
            raise ValueError(f"the name {name} is no text")
        if rows.setdefault(posixpath.normpath(name), label) != label:
            raise ValueError(f"it gives {name} two classes")
    return rows


def read_columns(rows: list[list], columns: Columns) -> list[tuple[str, object]]:
    """Returns the two columns of a table whose first row names them; raises ValueError if they are not there."""
    heads = rows[0] if rows else []
    if heads.count(columns.name) != 1 or heads.count(columns.label) != 1:
        raise ValueError(f"it has the columns {a_few([str(head) or '(no name)' for head in heads], 12) or 'none'}, not "
                         f"{columns.name} and {columns.label}: set name_column= and label_column=")
    if odd := next((number for number, row in enumerate(rows, 1) if row and len(row) != len(heads)), None):
        raise ValueError(f"row {odd} has {len(rows[odd - 1])} columns and the first row {len(heads)}")
    name, label = heads.index(columns.name), heads.index(columns.label)
    return [(row[name], row[label]) for row in rows[1:] if row]


def match_names(rows: dict[str, object], file: str, listing: Listing, names: list[str]) -> list[object]:
    """Returns the class of each image. Names in the file are paths from the source or from the file's own folder.

    Raises ValueError if no name is an image, or if both readings fit.
    """
    if len({*names}) < len(names):
        raise ValueError(f"labels={file}: several tars hold a file of the same name, so a list cannot tell them apart: "
                         f"prepare each tar separately.")
    root, folder = os.path.abspath(listing.path), os.path.dirname(os.path.abspath(file))
    readings = [rows]
    if folder != root:
        readings.append({os.path.relpath(os.path.join(folder, name), root): label for name, label in rows.items()})
    fits = [reading for reading in readings if not reading.keys().isdisjoint(names)]
    if len(fits) != 1:
        raise ValueError(f"labels={file} names {'no' if not fits else 'two sets of'} images: its names, such as "
                         f"{next(iter(rows), 'none')}, are paths with / and suffix from the source or from its own "
                         f"folder, and the source has {names[0]}: docs/data.md has lines of pandas that write them.")
    return [fits[0].get(name) for name in names]


# ---- the only way ---------------------------------------------------------------------------------------------------


def only_way(source: str | Path, listing: Listing, names: list[str], columns: Columns) -> str:
    """Returns the only way to label the images: class folders one level down, or a .cls beside each.

    Raises ValueError if there are others, such as deeper folders or a label file, and lists what each of them gives.
    """
    inner = [listing.name_in_tar(name) for name in names]
    depths, tops = {name.count("/") for name in inner}, {name.split("/")[0] for name in inner}
    present = {*listing.names}
    beside = ["cls"] if any(cls_beside(name, present) for name in names) else []
    files = [f"{listing.path}/{name}" for name in listing.names if not is_hidden(name) and (
        name.endswith((".csv", ".jsonl", ".parquet")) or posixpath.basename(name) == "dataset.json")]
    records = any(f"{posixpath.splitext(name)[0]}.json" in present for name in names)
    if depths == {1} and len(tops) > 1 and not files and not beside and not records:
        return "folders"
    if depths == {0} and beside and not files:
        return "cls"
    folders = [] if depths == {0} else ["folders"] if depths == {1} else ["folders", "parents"]
    heads = {head_of(name) for name in names}
    ways = (*folders, *beside, *["names"] * (None not in heads and len(heads) > 1), *files[:3], "none")
    raise ValueError(f"source={source} may be labelled in several ways, so set one: "
                     f"{'; '.join(describe(way, listing, names, columns) for way in ways)}; or labels=<file>.csv, as "
                     f"in docs/data.md{', whose lines write one from a key of the .json beside images' * records}.")


def describe(way: str, listing: Listing, names: list[str], columns: Columns) -> str:
    """Describes what a way to label the images gives."""
    try:
        if way == "cls":
            return "labels=cls: the .cls of each image"
        if way.endswith(".parquet"):
            return f"{typed('source', way)} for the images in it; or its labels, written as a .csv"
        class_names = label_images(way, listing, names, columns)[1]
    except ValueError as error:
        return str(error).rstrip(".")
    count = f"{len(class_names)} {'class' if len(class_names) == 1 else 'classes'} ({a_few(class_names)})"
    parents = {posixpath.dirname(name) for name in names}
    return f"{typed('labels', way)}: {count}{f' of {len(parents)} folders' if way == 'parents' else ''}"
