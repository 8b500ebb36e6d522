"""Reads Hugging Face data sets as numbered images: parquet shards, and the arrow files of `save_to_disk`.

Only the columns that are needed are read, a few rows at a time. pyarrow is imported with the first shard.
"""

import bisect
import itertools
import posixpath
import re
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from weakref import WeakValueDictionary

import numpy as np

from latents.labels import LABEL_HEADS, as_label, head_of
from latents.listing import (
    SHARD_SUFFIXES,
    SPLITS,
    Listing,
    UnreadableImage,
    a_few,
    clean,
    is_hidden,
    looks_like_image,
)
from runtime.files import naming_path, parse_json, refuse_pointer
from runtime.schema import as_recorded, first_line, read_json

PYARROW = "pyarrow==26.0.1"
MAX_IN_MEMORY = 2**24  # bytes of a row group in memory; a larger one moves to a temporary file
NUM_ROWS = 16  # rows decoded at once
BUFFER_BYTES = 2**18  # read from a file at once
LIST_TYPES = ("List", "LargeList", "Sequence")
Column = tuple[str, ...]  # a column's name, or its name and a field's: ("image", "bytes")

# ---- which files ----------------------------------------------------------------------------------------------------


def find_shards(listing: Listing, where: str, mixed: bool = False) -> list[str]:
    """Returns the names of the shards in a listing, in order. An image folder's metadata.parquet is not a shard.

    `where` names the source in messages. Raises ValueError if the shards belong to several splits or sets, unless the
    user named them all (`mixed`).
    """
    names = sorted(name for name in listing.names if Path(name).suffix.lower() in SHARD_SUFFIXES
                   and not is_hidden(name) and not re.match(r"metadata\.|cache-.*\.arrow", posixpath.basename(name)))
    if not names:
        return []
    folder, present = listing.path, {*listing.names}
    if not (folder / names[0]).is_file():
        raise ValueError(f"{where} holds {names[0]} in an archive, so it cannot be read piece by piece: unpack the "
                         "archive first.")
    if images := [name for name in listing.names if looks_like_image(name)]:
        chosen = folder / posixpath.dirname(names[0]) / f"*{Path(names[0]).suffix}"
        raise ValueError(f"{where} holds {len(names)} shards such as {names[0]} and {len(images)} images such "
                         f'as {min(images)}: select only the shards with source="{chosen}", or move them away.')
    saved = {parent for parent in map(posixpath.dirname, names) if posixpath.join(parent, "state.json") in present}
    sets = dict.fromkeys(parent if (parent := posixpath.dirname(name)) in saved else split_pattern(name)
                         for name in names)
    if len(sets) > 1 and not mixed:
        chosen, found = max(sets, key=lambda name: "train" in name), a_few([name or "others" for name in sets])
        raise ValueError(f"{where} holds {len(sets)} splits or sets ({found}): choose one, as in "
                         f'source="{folder / chosen}".')
    return order_by_state(folder, min(saved), names, where) if len(saved) == 1 else names


def order_by_state(root: Path, folder: str, names: list[str], where: str) -> list[str]:
    """Returns the files of a folder that `save_to_disk` wrote, in the order of its state.json."""
    state = read_json(root / folder / "state.json")
    if not state.get("_data_files"):
        return names
    with as_recorded(root / folder / "state.json"):
        if state.get("_indices_data_files"):
            raise ValueError(f"{where} selects rows by {state['_indices_data_files'][0]['filename']}, as old versions "
                             "of datasets wrote it: load it and save it again.")
        files = [posixpath.join(folder, file["filename"]) for file in state["_data_files"]]
    if missing := [name for name in files if name not in names]:
        raise ValueError(f"{where} lacks {len(missing)} of the {len(files)} files that state.json names, such as "
                         f"{missing[0]}: copy it again.")
    return files


def split_pattern(name: str) -> str:
    """Returns a pattern for all shards of a shard's split, as data/train-*-of-00294.parquet; empty if unknown."""
    folder, base = posixpath.split(name)
    if found := re.fullmatch(r"(.*?-)?\d+(-of-\d+)\b.*(\.\w+)", base):
        return posixpath.join(folder, f"{found[1] or ''}*{found[2]}*{found[3]}")
    if split := next((word for word in re.split(r"[-_.]", base) if word.lower() in SPLITS), None):
        return posixpath.join(folder, f"*{split}*")
    parts = folder.split("/")
    return "/".join(parts[: next((i for i, part in enumerate(parts, 1) if part.lower() in SPLITS), 0)])


# ---- a shard --------------------------------------------------------------------------------------------------------


def import_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ValueError("Parquet and arrow files need pyarrow, which is not installed: pip install "
                         f"{PYARROW}") from None


class RowGroup:
    """The images of one row group, read on demand and kept in memory, or in a temporary file if they are large."""

    def __init__(self, batches: Iterator[list[bytes | None]], where: str):
        self.batches, self.where, self.lock = batches, where, threading.Lock()
        self.file = tempfile.SpooledTemporaryFile(MAX_IN_MEMORY)  # noqa: SIM115 (open as long as the group is read)
        self.extents: list[tuple[int, int] | None] = []  # first byte and size of each image
        self.end = 0

    def read(self, row: int) -> bytes | None:
        """Reads an image, and all images before it that were not read yet."""
        with self.lock:
            while len(self.extents) <= row:
                if (batch := next(self.batches, None)) is None:  # another thread got the error with the reason
                    raise ValueError(f"{self.where} is damaged after row {len(self.extents)} of a row group.")
                for image in batch:
                    with naming_path(Path(tempfile.gettempdir())):  # TMPDIR may be another disk
                        self.file.seek(self.end)
                        self.file.write(image or b"")
                    self.extents.append(None if image is None else (self.end, len(image)))
                    self.end += len(image or b"")
            if self.extents[row] is None:
                return None
            start, size = self.extents[row]
            self.file.seek(start)
            return self.file.read(size)


class Parquet:
    """One parquet file. Reading an image also reads those before it in its row group."""

    current = threading.local()  # keeps the row group alive that a thread reads, across all files

    def __init__(self, path: Path):
        import pyarrow.parquet

        self.path, self.groups, self.lock = path, WeakValueDictionary(), threading.Lock()
        with pyarrow.parquet.ParquetFile(path) as file:
            self.schema, self.metadata = file.schema_arrow, file.metadata
        sizes = [self.metadata.row_group(group).num_rows for group in range(self.metadata.num_row_groups)]
        self.starts = [0, *itertools.accumulate(sizes)]

    def batches(self, column: Column, groups: list[int] | None = None, size: int = 4096) -> Iterator[list]:
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(self.path, metadata=self.metadata, buffer_size=BUFFER_BYTES,
                                             pre_buffer=False) as file:  # True would load an entire row group
                for batch in file.iter_batches(size, groups, [".".join(column)], use_threads=False):
                    values = batch.column(0).to_pylist()
                    for part in column[1:]:
                        values = [value and value[part] for value in values]
                    yield values
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{self.path} is damaged in its column {column[0]} ({first_line(error)}): download it "
                             "again.") from error

    def image(self, row: int, column: Column) -> bytes | None:
        number = bisect.bisect_right(self.starts, row) - 1
        with self.lock:
            group = self.groups.get(number)
            if group is None:
                group = self.groups[number] = RowGroup(self.batches(column, [number], NUM_ROWS), str(self.path))
        self.current.group = group
        return group.read(row - self.starts[number])


class Arrow:
    """One arrow file, mapped into memory."""

    def __init__(self, path: Path):
        import pyarrow

        mapped = pyarrow.memory_map(str(path))
        try:
            self.table = pyarrow.ipc.open_stream(mapped).read_all()
        except pyarrow.ArrowInvalid:  # perhaps a feather file, whose index is at the end
            self.table = pyarrow.ipc.open_file(mapped).read_all()
        self.path, self.schema = path, self.table.schema
        self.starts = [0, *itertools.accumulate(batch.num_rows for batch in self.table.to_batches())]

    def batches(self, column: Column) -> Iterator[list]:
        for chunk in self.table.column(column[0]).chunks:
            for part in column[1:]:
                chunk = chunk.field(part)
            yield chunk.to_pylist()

    def image(self, row: int, column: Column) -> bytes | None:
        value = self.table.column(column[0])[row].as_py()
        for part in column[1:]:
            value = value and value[part]
        return value


def open_shard(path: Path) -> Parquet | Arrow:
    """Opens a shard by its footer or schema. Raises ValueError if it is damaged or only a pointer of Git LFS."""
    import pyarrow

    refuse_pointer(path)
    try:
        return Parquet(path) if path.suffix.lower() == ".parquet" else Arrow(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a complete {path.suffix[1:]} file ({first_line(error)}): download it "
                         "again.") from error


# ---- columns --------------------------------------------------------------------------------------------------------


def features_of(shard: Parquet | Arrow) -> dict[str, dict]:
    """Returns the features that `datasets` recorded in the schema or beside the file; empty if there are none."""
    text = (shard.schema.metadata or {}).get(b"huggingface")
    beside = shard.path.parent / "dataset_info.json"
    try:
        info = parse_json(text)["info"] if text else read_json(beside) if beside.is_file() else {}
        features = info.get("features") or {}
        return {name: feature if isinstance(feature, dict) else {"_type": "List", "feature": feature[0]}
                for name, feature in features.items()}
    except (ValueError, LookupError, TypeError, AttributeError):  # written by another version or program
        return {}


def class_names_of(feature: dict) -> list[str] | None:
    if feature.get("_type") != "ClassLabel":
        return None
    return [*map(str, feature.get("names") or range(feature.get("num_classes") or 0))]


def single_label(value: list | None, where: str) -> Any:
    if value and len(value) > 1:
        raise ValueError(f"{where} has {str(value)[:60]} as labels, but an image can have only one class.")
    return value[0] if value else None


def describe(field: Any, feature: dict) -> str:
    """Describes a column and its type for messages, by its feature if `datasets` recorded one."""
    kind = feature.get("_type", "Value")
    if kind in LIST_TYPES:
        inner = feature.get("feature") or {}
        kind = f"list of {inner.get('_type', 'values') if isinstance(inner, dict) else 'values'}"
    if names := class_names_of(feature):
        kind = f"ClassLabel of {len(names):,}"
    return f"{field.name}: {re.sub(r'<.*', '', str(field.type)) if kind == 'Value' else kind}"


def is_binary(kind: Any) -> bool:
    return str(kind) in ("binary", "large_binary", "binary_view")


def images_in(field: Any, feature: dict) -> Column | None:
    """Returns the column, or its field, that may hold image files; None for other data, such as sounds."""
    from pyarrow import types

    if feature.get("_type", "Image") not in ("Image", "Value"):
        return None
    if types.is_struct(field.type) and (place := field.type.get_field_index("bytes")) >= 0:
        return (field.name, "bytes") if is_binary(field.type.field(place).type) else None
    return (field.name,) if is_binary(field.type) else None


def columns_of(shard: Parquet | Arrow) -> dict[str, tuple[Column | None, list[str] | None]]:
    """Returns each column's images (a Column or None) and its class names (or None)."""
    features = features_of(shard)
    described = [(field, features.get(field.name, {})) for field in shard.schema]
    return {field.name: (images_in(field, feature), class_names_of(feature)) for field, feature in described}


def may_be_labels(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind) or types.is_list(kind) or types.is_large_list(kind):
        return may_be_labels(kind.value_type)
    return (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)
            or str(kind) in ("string", "large_string", "string_view"))


# ---- rows -----------------------------------------------------------------------------------------------------------


@dataclass
class Rows:
    """The rows of shards."""

    where: str                          # the source, for messages
    files: Listing
    shown: list[str]                    # each shard's path relative to the source
    shards: list[Parquet | Arrow]
    image: Column = ()                  # holds the images

    def __post_init__(self):
        self.schema, self.features = self.shards[0].schema, features_of(self.shards[0])
        self.starts = [0, *itertools.accumulate(shard.starts[-1] for shard in self.shards)]

    def __len__(self) -> int:
        return self.starts[-1]

    @cached_property
    def columns(self) -> str:
        return ", ".join(describe(field, self.features.get(field.name, {})) for field in self.schema)

    def read(self, row: int) -> bytes:
        """Returns the bytes of a row's image. Raises UnreadableImage if there are none."""
        number = bisect.bisect_right(self.starts, row) - 1
        if (image := self.shards[number].image(row - self.starts[number], self.image)) is None:
            raise UnreadableImage("the row has no image, or only its path")
        return image

    def values(self, column: Column) -> list:
        return [value for shard in self.shards for batch in shard.batches(column) for value in batch]

    def folder_columns(self, number: int) -> dict[str, str]:
        """Returns the columns in a shard's folder names: pyarrow and Spark write label=cat/part-0.parquet."""
        return {key: unquote(value) for key, value in re.findall(r"([^/=]+)=([^/]*)/", self.shown[number])}

    def paths(self) -> list[str]:
        """Returns the file names that `datasets` stores beside the images; empty if there are none."""
        kind = self.schema.field(self.image[0]).type
        if len(self.image) == 1 or kind.get_field_index("path") < 0:
            return []
        paths = self.values((self.image[0], "path"))
        return [path or "" for path in paths] if any(paths) else []

    def listing(self, named: bool) -> Listing:
        """Lists the rows like files. If `named`, their names are the paths that are stored beside the images.

        Raises ValueError if the first row has a path instead of an image, or if names are needed but missing.
        """
        if len(self.image) > 1 and self.shards[0].image(0, self.image) is None and (paths := self.paths())[:1] > [""]:
            raise ValueError(f"{self.where} has only paths such as {paths[0]} in its column {self.image[0]}, not the "
                             "images: use the folder of the images, or embed them with datasets' save_to_disk.")
        shown = [f"{name} row {row}" for name, shard in zip(self.shown, self.shards, strict=True)
                 for row in range(shard.starts[-1])]
        names = [clean(path) for path in self.paths()] if named else shown
        if not names:
            raise ValueError(f"{self.where} has no file names in its column {self.image[0]}: set labels=folders to "
                             "use its label column, or labels=none.")
        group_starts = [start + first for start, shard in zip(self.starts, self.shards, strict=False)
                        for first in shard.starts[:-1]]
        return Listing(names, self.read, shown, self.files.path, self.files.title, quick=np.array(group_starts))

    def choose_labels(self, label_column: str | None) -> str | None:
        """Returns the label column: the one requested, the only ClassLabel, or the only one with a usual name.

        Returns None if there is none. Raises ValueError if there are several candidates.
        """
        usable = [field.name for field in self.schema if may_be_labels(field.type)] + [*self.folder_columns(0)]
        if label_column is not None and label_column not in usable:
            raise ValueError(f"label_column={label_column} is not a column of numbers or text: {self.where} has the "
                             f"columns {self.columns}.")
        labelled = [name for name in usable if self.features.get(name, {}).get("_type") == "ClassLabel"]
        usual = [name for name in labelled or usable if head_of(name) in LABEL_HEADS]
        found = [label_column] if label_column else labelled if len(labelled) == 1 else usual or labelled
        if len(found) > 1:
            raise ValueError(f"{self.where} has {len(found)} label columns ({', '.join(found)}): choose one, as in "
                             f"label_column={found[0]}, or set labels=none.")
        return found[0] if found else None

    def labels(self, column: str) -> tuple[list, list[str] | None]:
        """Returns each row's label or None, and the class names if the labels are indices.

        -1 means no label, as in the test splits on the Hub. Raises ValueError if no row has a label.
        """
        feature, where = self.features.get(column, {}), f"{self.where}, column {column},"
        if column in self.schema.names:
            values = self.values((column,))
        else:
            values = [self.folder_columns(number).get(column) for number, shard in enumerate(self.shards)
                      for _ in range(shard.starts[-1])]
        if feature.get("_type") in LIST_TYPES:
            feature, values = feature.get("feature") or {}, [single_label(value, where) for value in values]
        names = class_names_of(feature)
        values = [None if value in (-1, []) else value if names else as_label(value, where) for value in values]
        if all(value is None for value in values):
            raise ValueError(f"{where} has no label (-1 or null) for any of {len(values):,} rows, as is usual for test "
                             "splits on the Hub: choose another split, or set labels=none.")
        return values, names


def open_rows(listing: Listing, names: list[str], where: str, image_column: str | None = None) -> Rows:
    """Opens shards as rows. Raises ValueError if they hold no images or differ in their columns."""
    import_pyarrow()
    opened = {name: shard for name in names if (shard := open_shard(listing.path / name)).starts[-1]}
    if not opened:
        raise ValueError(f"{where} holds {len(names)} shards without rows.")
    rows = Rows(where, listing, [*opened], [*opened.values()])
    known = columns_of(rows.shards[0])
    parts = {name: part for name, (part, _) in known.items() if part}  # columns with images
    images = [name for name in parts if rows.features.get(name, {}).get("_type") == "Image"] or [*parts]
    if image_column is not None:
        if image_column not in parts:
            raise ValueError(f"image_column={image_column} holds no images: {where} has the columns "
                             f"{rows.columns}.")
        images = [image_column]
    if not images:
        raise ValueError(f"{where} has no column with one image per row: its columns are {rows.columns}.")
    if len(images) > 1:
        raise ValueError(f"{where} has {len(images)} image columns ({', '.join(images)}): choose one, as in "
                         f"image_column={images[0]}.")
    for name, shard in opened.items():
        if columns_of(shard) != known:
            raise ValueError(f"{name} has different columns or classes from {rows.shown[0]}: use shards of one set.")
    rows.image = parts[images[0]]
    return rows


def note_missing_shards(rows: Rows) -> str | None:
    """Returns a note if there are fewer shards than their names say, as in train-00000-of-00294.parquet."""
    numbers = [re.search(r"\b(\d+)-of-(\d+)\b", posixpath.basename(name)) for name in rows.files.names]
    numbers = [(int(found[1]), int(found[2])) for found in numbers if found]
    if not numbers or len(numbers) >= numbers[0][1]:
        return None
    first = min({*range(numbers[0][1])} - {number for number, _ in numbers})
    return (f"Only {len(numbers):,} of {numbers[0][1]:,} shards are here, judging by their names. The first missing "
            f"one is number {first}.")
