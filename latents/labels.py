"""Reads the classes of images from a file of names and labels: CSV, TSV, JSON, or text with one image per line."""

import codecs
import csv
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from latents.listing import IMAGE_SUFFIXES, clean
from runtime.files import is_pointer, parse_json

LABEL_SUFFIXES = {".csv", ".json", ".jsonl", ".tsv", ".txt"}
MAX_CLASSES = 1_000_000  # a larger class number is a mistake, and a table of so many classes would fill the memory
# Column heads and JSON keys, in lower case without separators, the most likely first.
NAME_HEADS = ("filename", "file", "image", "imageid", "imagename", "imagepath", "imagefile", "img", "imgname",
              "path", "filepath", "name", "id", "key")
LABEL_HEADS = ("label", "class", "labels", "target", "category", "classname", "labelname", "predictionstring",
               "classid", "labelid", "categoryid", "breed", "species", "synset", "wnid")
NO_CLASSES = {"text", "caption", "captions", "prompt", "description", "partition", "split", "subset", "set", "fold"}
BOXES = re.compile(r"(\S+)(\s+-?[\d.]+){4}(\s+\S+(\s+-?[\d.]+){4})*")  # ImageNet on Kaggle: class, box, class, box …
INTEGER, NUMBER = re.compile(r"-?\d{1,18}(\.0*)?"), re.compile(r"-?\d+(\.\d*)?")  # int64 holds 18 digits

Pairs = list[tuple[str, str | None]]  # (name as written in the file, its label or None)


def check_labels(labels: np.ndarray, num_classes: int, where: str | Path, remedy: str) -> None:
    """Raises ValueError, ending in `remedy`, for a label that is not an integer in 0..num_classes - 1."""
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise ValueError(f"{where} has labels of type {labels.dtype} and shape {labels.shape}, not one integer each: "
                         f"{remedy}.")
    low, high = labels.min(initial=0), labels.max(initial=0)
    if low < 0 or high >= num_classes:
        bad = low if low < 0 else high
        raise ValueError(f"{where} has label {bad} (row {int(np.argmax(labels == bad))}), outside "
                         f"0..{num_classes - 1}: {remedy}.")


def check_names(names: Sequence[str], where: str | Path, remedy: str) -> None:
    """Raises ValueError, ending in `remedy`, for a class name with a line break or another control character."""
    for name in names:
        if any(unicodedata.category(letter) in ("Cc", "Zl", "Zp") for letter in name):
            raise ValueError(f"{where} has a class {name[:60]!r} with a line break or control character in its name: "
                             f"{remedy}.")


def number_classes(classes: Sequence[str], where: str, remedy: str, extra_labels: Sequence[str] = ()) -> tuple[
        np.ndarray, list[str]]:
    """Returns labels and class names. Integers are the labels themselves, and names are numbered in sorted order.

    `extra_labels` occur in the file but on no image; if they are integers, they count as classes too. Raises
    ValueError for numbers that are not valid classes.
    """
    distinct = {*classes}
    if {*distinct, *extra_labels} == {"-1", "1"}:  # no and yes
        return np.array([label == "1" for label in classes], dtype=np.int64), ["-1", "1"]
    if distinct and all(map(NUMBER.fullmatch, distinct)):
        if invalid := [text for text in distinct if not INTEGER.fullmatch(text)]:
            raise ValueError(f"{where} has labels such as {invalid[0]}, which is not a class: {remedy}.")
        number = {text: int(text.partition(".")[0]) for text in {*distinct, *filter(INTEGER.fullmatch, extra_labels)}}
        every = np.array([*number.values()], dtype=np.int64)
        labels = np.array([number[text] for text in classes], dtype=np.int64)
        for numbers in (labels, every):
            check_labels(numbers, MAX_CLASSES, where, remedy)  # before making a name for each class
        return labels, [str(index) for index in range(every.max() + 1)]
    names = sorted(distinct)
    index_of = {name: index for index, name in enumerate(names)}
    return np.array([index_of[name] for name in classes], dtype=np.int64), names


# ---- reading --------------------------------------------------------------------------------------------------------


def stem_of(name: str) -> str:
    """Returns a file name without its folder and, if it is an image's, without its suffix."""
    base = name.replace("\\", "/").rpartition("/")[2].strip()
    stem, dot, suffix = base.rpartition(".")
    return stem if f"{dot}{suffix}".lower() in IMAGE_SUFFIXES else base


def decode_text(content: bytes, where: str) -> str:
    """Decodes UTF-8, or UTF-16 with a byte order mark. Raises ValueError for anything else."""
    if is_pointer(content):
        raise ValueError(f"{where} is a pointer of Git LFS, and the file itself was not downloaded: run git lfs pull.")
    try:
        is_16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return content.decode("utf-16" if is_16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not text in UTF-8 ({error}): save it as UTF-8.") from None


def as_label(value: Any, where: str) -> str | None:
    """Returns a label as text, or None if there is none. A one-hot vector becomes the index of its 1.

    Raises ValueError for any other list.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list):
        if not all(number in (0, 1) for number in value) or sum(value) != 1:
            raise ValueError(f"{where} has {str(value)[:60]} as a label, but an image can have only one class.")
        value = value.index(1)
    if value is None or value != value or isinstance(value, dict):
        return None
    text = str(value).strip()
    boxes = BOXES.fullmatch(text)
    return boxes[1] if boxes else text or None


@dataclass
class Table:
    """The rows of a label file, the heads of its columns if it has any, and the number of the column with names."""

    where: str
    heads: list[str] | None
    rows: list[list]
    name: int

    @property
    def other_columns(self) -> list[int]:
        return [i for i in range(max(len(row) for row in self.rows[:1000])) if i != self.name]

    def head(self, column: int) -> str:
        """Returns what a user calls a column: its head, or its number from 1 if there are no heads."""
        return str(column + 1) if self.heads is None else str(self.heads[column])

    def find(self, wanted: str) -> int:
        """Finds a column by its head, or else by its number from 1. Raises ValueError if there is none."""
        heads = {i: self.head(i) for i in self.other_columns}
        found = ([i for i, head in heads.items() if head == wanted]
                 or [i for i, head in heads.items() if head_of(head) == head_of(wanted)]
                 or [i for i in heads if str(i + 1) == wanted])
        if not found:
            raise ValueError(f"{self.where} has no column {wanted} beside the names: it has "
                             f"{', '.join(heads.values())}.")
        return found[0]

    def choose(self) -> tuple[int, str | None]:
        """Chooses the label column by its head, or the only one. Returns a note if several were possible.

        Raises ValueError if there are several columns and none has a usual head.
        """
        known = {head_of(head): i for i, head in reversed([*enumerate(self.heads or [])]) if i != self.name}
        if usual := [known[head] for head in LABEL_HEADS if head in known]:
            named = ", ".join(self.head(i) for i in usual)
            return usual[0], (f"labels: {self.where} has the columns {named}, and {self.head(usual[0])} is read."
                              if len(usual) > 1 else None)
        first, *rest = self.other_columns
        is_box = self.heads is None and len(rest) == 4 and all(
            NUMBER.fullmatch(str(row[i])) for row in self.rows[:1000] for i in rest if i < len(row))
        if rest and not is_box:
            columns = ", ".join(self.head(i) for i in self.other_columns)
            raise ValueError(f"{self.where} has {len(self.other_columns)} columns beside the names ({columns}): choose "
                             f"the one with classes, as in labels={self.where}:{self.head(first)}.")
        return first, None

    def is_one_hot(self) -> bool:
        """True if each class has its own column, and each row has a 1 in one of them and 0 in the rest, as in ISIC."""
        rows = [[str(row[i]) for i in self.other_columns if i < len(row)] for row in self.rows]
        return self.heads is not None and len(self.other_columns) > 1 and all(
            {*row} <= {"0", "1", "0.0", "1.0"} and sum(map(float, row)) == 1 for row in rows)

    def pairs(self, column: str | None = None) -> tuple[Pairs, str | None]:
        """Returns (name, label) pairs from a column, by default the one that `choose` finds, and its note."""
        if column is None and self.is_one_hot():
            columns = self.other_columns
            return [(str(row[self.name]), self.head(next(i for i in columns if float(row[i]) == 1)))
                    for row in self.rows], None
        index, note = self.choose() if column is None else (self.find(column), None)
        return self.labels(index), note

    def labels(self, column: int) -> Pairs:
        rows = [row for row in self.rows if len(row) > max(self.name, column)]
        return [(str(row[self.name]), as_label(row[column], self.where)) for row in rows]

    def may_be_classes(self, column: int, is_image: Callable[[str], bool]) -> bool:
        """True if a column has far fewer different values than images, and does not look like a split of the data."""
        head = head_of(self.head(column)) if self.heads else ""
        values = [label for name, label in self.labels(column) if label and is_image(name)]
        is_few = 0 < len({*values}) <= max(1, len(values) / 2)
        return bool(values) and (head in LABEL_HEADS or is_few and head not in NO_CLASSES and not (
            any(word in Path(self.where).name.lower() for word in ("partition", "split"))))


def read_table(content: bytes, where: str, is_image: Callable[[str], bool]) -> Table | None:
    """Reads a file of names and labels. The column that matches the most images has the names.

    Returns None for `{"labels": null}`. Raises ValueError for anything that is not such a file.
    """
    text, suffix = decode_text(content, where), Path(where).suffix.lower()
    if suffix in (".json", ".jsonl"):
        heads, rows = read_json_rows(text, where)
        if rows is None:
            return None
    else:
        heads, rows = read_text_rows(text, suffix, is_image)
        first = [head_of(cell) for cell in rows[0]] if rows else []
        # With three or more columns, a first row without numbers and file names holds heads, whatever the words are.
        are_heads = {*first} & {*NAME_HEADS, *LABEL_HEADS} or len(first) > 2 and not any(
            map(NUMBER.fullmatch, rows[0])) and not any(Path(cell).suffix.lower() in IMAGE_SUFFIXES for cell in rows[0])
        if heads is None and are_heads and not any(map(is_image, rows[0])):
            heads, rows = rows[0], rows[1:]
    rows = [row for row in rows if len(row) > 1]
    if not rows:
        raise ValueError(f"{where} has no names with labels: write a name and a class on each line.")
    is_pairs = heads is None and suffix in (".json", ".jsonl")  # [name, label]
    return Table(where, heads, rows, 0 if is_pairs else name_column(heads, rows, is_image))


def read_json_rows(text: str, where: str) -> tuple[list[str] | None, list | None]:
    """Reads {"labels": [[name, label], …]}, {name: label}, or a list of pairs or objects, in JSON or JSON lines."""
    try:
        value = parse_json(text)
    except ValueError as error:
        try:
            value = [parse_json(line) for line in text.splitlines() if line.strip()]
        except ValueError:
            raise ValueError(f"{where} is not JSON ({error})") from None
    if isinstance(value, dict) and "labels" in value and isinstance(value["labels"], list | dict | None):
        value = value["labels"]
    if value is None:
        return None, None
    if isinstance(value, dict) and {"images", "annotations"} <= value.keys():
        return ["name", "label"], coco_rows(value, where)
    if isinstance(value, dict):
        value = [{"name": name, **row} if isinstance(row, dict) else [name, row] for name, row in value.items()]
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        heads = list(dict.fromkeys(head for row in value[:1000] for head in row))
        return heads, [[row.get(head) for head in heads] for row in value]
    if isinstance(value, list) and all(isinstance(row, list) and len(row) == 2 for row in value):
        return None, value
    raise ValueError(f'{where} has no labels: write {{"labels": [["name.png", 0], …]}} or {{"name.png": 0, …}}.')


def coco_rows(value: dict, where: str) -> list[list]:
    """Reads names and categories in COCO's format. iNaturalist's sets use it with one annotation per image."""
    try:
        names = {image["id"]: image["file_name"] for image in value["images"]}
        category = {row["id"]: str(row["name"]) for row in value.get("categories", ())}
        pairs = {(row["image_id"], row["category_id"]) for row in value["annotations"]}
        rows = sorted([names[image], category.get(number, str(number))] for image, number in pairs)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where} has images and annotations, but not in COCO's format "
                         f"({error!r}).") from None
    if twice := next((one for one, other in zip(rows, rows[1:], strict=False) if one[0] == other[0]), None):
        raise ValueError(f"{where} has several categories for {twice[0]}, but an image can have only one class.")
    return rows


def read_text_rows(
    text: str, suffix: str, is_image: Callable[[str], bool],
) -> tuple[list[str] | None, list[list[str]]]:
    """Splits lines at tabs, commas or semicolons, or at spaces if a name comes first or last.

    Returns (heads, rows). Heads are found only in lines that are split at spaces.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else ""

    def is_name(word: str) -> bool:  # also of an image that is not in this set, which may come first in the file
        return is_image(word) or Path(word).suffix.lower() in IMAGE_SUFFIXES

    spaced = suffix not in (".csv", ".tsv") and any(is_name(word) for line in lines[:10] for word in line.split())
    if "\t" in first or not spaced and ("," in first or ";" in first):
        mark = "\t" if "\t" in first else max(",;", key=first.count)
        return None, [[cell.strip() for cell in row] for row in read_cells(lines, mark)]
    lines = [line for line in lines if not line.startswith("#") or is_image(line.split()[0])]
    begin = next((k for k, line in enumerate(lines[:10]) if is_name(line.split()[0])), 0)
    words = [line.split() for line in lines[begin:]]
    width = len(words[0]) if words else 0
    if width > 2 and all(len(row) == width for row in words[:1000]):
        head = lines[begin - 1].split() if begin else []  # CelebA has a count above the heads, and none for the names
        if len(head) in (width - 1, width):
            return ["name"] * (width - len(head)) + head, words
        if width != 6 and all(NUMBER.fullmatch(word) for row in words[:1000] for word in row[1:]):
            return None, words  # 6 words are a name, a class and a box
    rows = [line.split(None, 1) if is_name(line.split()[0]) or not is_name(line.split()[-1]) else
            line.rsplit(None, 1) for line in lines]
    return None, [[cell.strip(" \t,;") for cell in row] for row in rows]


def read_cells(lines: list[str], mark: str) -> list[list[str]]:
    """Splits lines of CSV. Raises ValueError for a stray quote, which could swallow everything after it."""
    rows, read, reader = [], 0, csv.reader(lines, delimiter=mark, skipinitialspace=True, strict=True)
    try:
        for row in reader:
            rows.append(row)
            read = reader.line_num
    except csv.Error as error:
        raise ValueError(f"Line {read + 1} of the labels, {lines[read][:60]!r}, has a stray quote ({error}): remove "
                         f"it, or put the cell in quotes and double those inside.") from None
    return rows


def head_of(cell: object) -> str:
    return re.sub(r"[\s_-]", "", str(cell)).lower()


def name_column(heads: list[str] | None, rows: list[list], is_image: Callable[[str], bool]) -> int:
    """Returns the column of image names: a usual head with any match wins, then the most matches, then the first."""
    known = [head_of(head) for head in heads or []]
    width = max(len(row) for row in rows[:1000])
    cells = [{str(row[i]) for row in rows[:1000] if i < len(row)} for i in range(width)]
    matches = [sum(map(is_image, column)) for column in cells]
    named = [known.index(head) for head in NAME_HEADS if head in known]
    return max(range(width), key=lambda i: ((i in named) * bool(matches[i]), matches[i], i in named, -i))


# ---- matching -------------------------------------------------------------------------------------------------------


def match(names: list[str], pairs: Pairs, folder: str, where: str) -> tuple[list[str | None], list[str]]:
    """Returns each image's label or None, and the labelled names in `pairs` that match no image.

    Suffix and folders are optional in a name, but those it has must agree with an image below `folder`. Raises
    ValueError for an image with two labels, and for a name that matches images in several folders.
    """
    rows_of: defaultdict[str, list[int]] = defaultdict(list)
    labelled = [clean(name.replace("\\", "/").strip()) for name, _ in pairs]
    for row, name in enumerate(labelled):
        rows_of[stem_of(name)].append(row)
    present, above = {*names}, folder.strip("/").split("/")
    image_of: dict[int, str] = {}
    labels: list[str | None] = []
    for name in names:
        scores = {row: agreement(labelled[row], name, above) for row in rows_of.get(stem_of(name), ())
                  if labelled[row] == name or labelled[row] not in present}
        best = max(0, max(scores.values(), default=0))
        rows = [row for row, score in scores.items() if score == best]
        found = {pairs[row][1] for row in rows} - {None}
        if len(found) > 1:
            raise ValueError(f"{where} has two labels for {labelled[rows[0]]}, {' and '.join(sorted(found))}.")
        for row in rows:
            other = image_of.setdefault(row, name)
            if other.rpartition("/")[0] != name.rpartition("/")[0]:
                raise ValueError(f"{where} names {labelled[row]}, which may be {other} or {name}: include the folder.")
        labels.append(min(found, default=None))
    unused = dict.fromkeys(name for row, name in enumerate(labelled) if row not in image_of and pairs[row][1])
    return labels, list(unused)


def agreement(labelled: str, name: str, above: list[str]) -> int:
    """Returns how many folders a labelled name shares with an image's, counted from the last, or -1 if they differ."""
    (*listed, listed_base), (*own, base) = labelled.split("/"), name.split("/")
    suffixes = [text.rpartition(".")[2].lower() for text in (listed_base, base)]
    if listed_base != stem_of(listed_base) and suffixes[0] != suffixes[1]:
        return -1
    shared = 0
    for ours, theirs in zip(reversed(above + own), reversed(listed), strict=False):
        if ours != theirs:
            break
        shared += 1
    return shared if shared >= min(len(listed), len(own)) else -1
