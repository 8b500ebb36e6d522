"""Classes of images from a file of names and labels: CSV, TSV, JSON, or text with a name and a class a line."""

import codecs
import csv
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from latents.listing import IMAGE_SUFFIXES, clean
from runtime.files import is_pointer

LABEL_SUFFIXES = {".csv", ".json", ".jsonl", ".tsv", ".txt"}
MAX_CLASSES = 1_000_000  # a class number beyond is a mistake, and a table of that many classes fills the memory
# Heads of columns and keys of JSON, without spaces and _, the first the most likely.
NAME_HEADS = ("filename", "file", "image", "imageid", "imagename", "imagepath", "imagefile", "img", "imgname",
              "path", "filepath", "name", "id", "key")
LABEL_HEADS = ("label", "class", "labels", "target", "category", "classname", "labelname", "predictionstring",
               "classid", "labelid", "categoryid", "breed", "species", "synset", "wnid")
BOXES = re.compile(r"(\S+)(\s+-?[\d.]+){4}(\s+\S+(\s+-?[\d.]+){4})*")  # ImageNet's on Kaggle: class, box, class, box …
WHOLE, NUMBER = re.compile(r"-?\d+(\.0*)?"), re.compile(r"-?\d+(\.\d*)?")

Pairs = list[tuple[str, str | None]]  # names as a file has them, and their labels; None for a name without one


def check_labels(labels: np.ndarray, num_classes: int, where: str | Path, remedy: str) -> None:
    """Raises ValueError, ending in `remedy`, for a label that is not a whole number in 0..num_classes - 1."""
    if labels.dtype.kind not in "iu":
        raise ValueError(f"{where} has labels of type {labels.dtype}, where whole numbers are expected: {remedy}.")
    low, high = labels.min(initial=0), labels.max(initial=0)
    if low < 0 or high >= num_classes:
        bad = low if low < 0 else high
        raise ValueError(f"{where} has label {bad} (row {int(np.argmax(labels == bad))}), outside "
                         f"0..{num_classes - 1}: {remedy}.")


def number_classes(classes: Sequence[str], where: str, remedy: str, further: Sequence[str] = ()) -> tuple[
        np.ndarray, list[str]]:
    """Returns labels and the classes' names: whole numbers are the labels themselves, names are numbered in order.

    Of `further` labels, which no image has, numbers count as classes. Raises ValueError for other numbers.
    """
    distinct = {*classes}
    if distinct and all(map(NUMBER.fullmatch, distinct)):
        if broken := [text for text in distinct if not WHOLE.fullmatch(text)]:
            raise ValueError(f"{where} has labels such as {broken[0]}, which is not a class: {remedy}.")
        number = {text: int(text.partition(".")[0]) for text in {*distinct, *filter(WHOLE.fullmatch, further)}}
        every = np.array([*number.values()], dtype=np.int64)
        labels = np.array([number[text] for text in classes], dtype=np.int64)
        for numbers in (labels, every):
            check_labels(numbers, MAX_CLASSES, where, remedy)  # before a name is made for each
        return labels, [str(index) for index in range(every.max() + 1)]
    names = sorted(distinct)
    index_of = {name: index for index, name in enumerate(names)}
    return np.array([index_of[name] for name in classes], dtype=np.int64), names


# ---- reading --------------------------------------------------------------------------------------------------------


def stem_of(name: str) -> str:
    """Returns a file's name without folder and without an image's suffix."""
    base = name.replace("\\", "/").rpartition("/")[2].strip()
    stem, dot, suffix = base.rpartition(".")
    return stem if f"{dot}{suffix}".lower() in IMAGE_SUFFIXES else base


def decode_text(content: bytes, where: str) -> str:
    """Decodes UTF-8, or UTF-16 with its mark; raises ValueError for anything else."""
    if is_pointer(content):
        raise ValueError(f"{where} is a pointer of Git LFS, and the file itself was not downloaded: run git lfs pull.")
    try:
        is_16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return content.decode("utf-16" if is_16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not text in UTF-8 ({error}): save it as UTF-8.") from None


def as_label(value: Any, where: str) -> str | None:
    """Returns a label as text, None for none; of a vector with a single 1 its place. Raises ValueError for others."""
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


def read_pairs(content: bytes, where: str, is_image: Callable[[str], bool]) -> tuple[Pairs | None, str | None]:
    """Reads names and labels of a file, and a line on the column that was chosen of several.

    The names are in the column of which most are images, the labels in the one that its head says, else in the next.
    `{"labels": null}` is None. Raises ValueError for what does not hold names with labels.
    """
    text, suffix = decode_text(content, where), Path(where).suffix.lower()
    if suffix in (".json", ".jsonl"):
        heads, rows = read_json_rows(text, where)
        if rows is None:
            return None, None
    else:
        heads, rows = None, read_text_rows(text, suffix, is_image)
        first = [head_of(cell) for cell in rows[0]] if rows else []
        if {*first} & {*NAME_HEADS, *LABEL_HEADS} and not any(map(is_image, rows[0])):
            heads, rows = rows[0], rows[1:]
    rows = [row for row in rows if len(row) > 1]
    if not rows:
        raise ValueError(f"{where} has no names with labels: write a name and a class on each line.")
    is_pairs = heads is None and suffix in (".json", ".jsonl")  # [name, label]
    name, label, said = (0, 1, None) if is_pairs else choose_columns(heads, rows, where, is_image)
    pairs = [(str(row[name]), as_label(row[label], where)) for row in rows if len(row) > max(name, label)]
    return pairs, said


def read_json_rows(text: str, where: str) -> tuple[list[str] | None, list | None]:
    """Reads {"labels": [[name, label], …]}, {name: label}, or a list of pairs or objects, of JSON or JSON lines."""
    try:
        value = json.loads(text)
    except ValueError as error:
        try:
            value = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError:
            raise ValueError(f"{where} is not JSON ({error})") from None
    if isinstance(value, dict) and "labels" in value and isinstance(value["labels"], list | dict | None):
        value = value["labels"]
    if value is None:
        return None, None
    if isinstance(value, dict):
        value = [{"name": name, **row} if isinstance(row, dict) else [name, row] for name, row in value.items()]
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        heads = list(dict.fromkeys(head for row in value[:1000] for head in row))
        return heads, [[row.get(head) for head in heads] for row in value]
    if isinstance(value, list) and all(isinstance(row, list) and len(row) == 2 for row in value):
        return None, value
    raise ValueError(f'{where} does not hold labels: {{"labels": [["name.png", 0], …]}} or {{"name.png": 0, …}} does.')


def read_text_rows(text: str, suffix: str, is_image: Callable[[str], bool]) -> list[list[str]]:
    """Splits lines at tabs, commas, semicolons or, where a name comes first or last, at a space."""
    lines = [line for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else ""
    spaced = suffix not in (".csv", ".tsv") and any(is_image(word) for line in lines[:5] for word in line.split())
    if "\t" in first or not spaced and ("," in first or ";" in first):
        mark = "\t" if "\t" in first else max(",;", key=first.count)
        return [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=mark, skipinitialspace=True)]
    parted = [line.split(None, 1) if is_image(line.split()[0]) or not is_image(line.split()[-1]) else
              line.rsplit(None, 1) for line in lines]
    return [[cell.strip(" \t,;") for cell in row] for row in parted]


def head_of(cell: object) -> str:
    return re.sub(r"[\s_-]", "", str(cell)).lower()


def choose_columns(
    heads: list[str] | None, rows: list[list], where: str, is_image: Callable[[str], bool],
) -> tuple[int, int, str | None]:
    """Returns the columns of names and of labels, and a line where several might be labels."""
    known = [head_of(head) for head in heads or []]
    width = max(len(row) for row in rows[:1000])
    cells = [{str(row[i]) for row in rows[:1000] if i < len(row)} for i in range(width)]
    matches = [sum(map(is_image, column)) for column in cells]
    named = [known.index(head) for head in NAME_HEADS if head in known]
    name = max(range(width), key=lambda i: ((i in named) * bool(matches[i]), matches[i], i in named, -i))
    others = [known.index(head) for head in LABEL_HEADS if head in known and known.index(head) != name]
    if others:
        said = ", ".join(str(heads[i]) for i in others)
        return name, others[0], f"labels: of the columns {said} of {where}, {heads[others[0]]} is read." if (
            len(others) > 1) else None
    if width > 2 and heads is not None:
        raise ValueError(f"{where} has the columns {', '.join(map(str, heads))}: rename the column of the classes to "
                         "label.")
    return name, 1 - name if width == 2 else (name + 1) % width, None


# ---- matching -------------------------------------------------------------------------------------------------------


def match(names: list[str], pairs: Pairs, folder: str, where: str) -> tuple[list[str | None], list[str]]:
    """Returns the label of each image, None for none, and the names in `pairs` that have a label and no image.

    A name may have its suffix and its folders or not; what it has must agree with an image below `folder`. Raises
    ValueError for an image with two labels, and for a name of several images.
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
            raise ValueError(f"{where} gives {labelled[rows[0]]} two labels, {' and '.join(sorted(found))}.")
        for row in rows:
            other = image_of.setdefault(row, name)
            if other.rpartition("/")[0] != name.rpartition("/")[0]:
                raise ValueError(f"{where} names {labelled[row]}, which may be {other} or {name}: include the folder.")
        labels.append(min(found, default=None))
    unused = dict.fromkeys(name for row, name in enumerate(labelled) if row not in image_of and pairs[row][1])
    return labels, list(unused)


def agreement(labelled: str, name: str, above: list[str]) -> int:
    """Returns how many folders a labelled name shares with an image's, from the last on, or -1 where they differ."""
    (*said, said_base), (*own, base) = labelled.split("/"), name.split("/")
    suffixes = [text.rpartition(".")[2].lower() for text in (said_base, base)]
    if said_base != stem_of(said_base) and suffixes[0] != suffixes[1]:
        return -1
    shared = 0
    for ours, theirs in zip(reversed(above + own), reversed(said), strict=False):
        if ours != theirs:
            break
        shared += 1
    return shared if shared >= min(len(said), len(own)) else -1
