"""What goes wrong with files, as plain values: {path: content} and a list of changes -> {path: content}, and packed.

A change is [name of a function in CONTENT or FILES, which file, …]; hypothesis draws them.
A place in a file is a number: up to 511 from its start, up to 1023 from its end, beyond that a share of its length.
"""

import contextlib
import io
import json
import math
import os
import pickle
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

NUMBERS = [0, 1, -1, 2, 7, 255, 65535, 65536, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1,
           2**63, 2**64 - 1, 2**70, 10**30, -(2**31), -(2**63), 1_700_000_000, 999_999]
FLOATS = [math.nan, math.inf, -math.inf, 1e300, -1.0, 0.0, 1e5, 65504.0, 1e-300]
TEXTS = ["", "..", "../outside/secret", "/etc/passwd", "/dev/zero", "a\0b", "\ud800", "ünïcödé \u202e", "x" * 5000,
         "C:\\x", "latents-00000.npy", ".", "~", "-rf", "\x1b[2J", "NaN", "true", "a/b/c", "con\nnew line"]
DTYPES = ["<f2", ">f2", "<f4", ">f4", "<f8", "<i8", ">i8", "<i4", "<i2", "|i1", "|u1", "<u8", "|b1", "|O", "<U3", "|S4",
          "<M8[s]", "<c8", "|V8", "<f16", "[('a', '<f2')]"]
HEADS = ["", "{", "{}", "{'descr': '<f2'}", "None", "()", "[" * 200, "__import__('os').system('touch executed')",
         "\xff\xfe", "{'descr': '<f2', 'fortran_order': 0, 'shape': (1,)}",
         "{'descr': '<f2', 'fortran_order': False, 'shape': (True,)}",
         "{'descr': '<f2', 'fortran_order': False, 'shape': (" + "1," * 3000 + ")}", "9" * 6000]

Files = dict[str, Any]      # path -> bytes, or one of the following


@dataclass(frozen=True)
class Link:
    """A symbolic link; in a tar a link, in a zip an entry with a link's mode."""

    target: str


@dataclass(frozen=True)
class Holes:
    """`head` and then zeros that take no place on disk, up to `size` bytes; in a zip, deflated."""

    head: bytes
    size: int


FIFO, FOLDER = object(), object()


class Runs:
    """What a pickle of it would run: a file named `executed` beside the case's own."""

    def __reduce__(self) -> tuple:
        return os.system, ("touch executed",)


def lay(files: Files, folder: Path) -> None:
    """Writes files below a folder; one whose name leads out of it, or cannot be, is left out."""
    for name, content in files.items():
        path = os.path.join(os.fsencode(folder), name.replace("\0", "").encode("utf-8", "surrogatepass"))
        if not os.path.realpath(os.path.dirname(path)).startswith(os.fsencode(os.path.realpath(folder))):
            continue
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if os.path.lexists(path):      # which may be a link
                continue
            if content is FOLDER:
                os.makedirs(path, exist_ok=True)
            elif content is FIFO:
                os.mkfifo(path)
            elif isinstance(content, Link):
                os.symlink(content.target, path)
            else:
                with open(path, "wb") as file:
                    file.write(content.head if isinstance(content, Holes) else content)
                    if isinstance(content, Holes):
                        file.truncate(content.size)
        except OSError:      # of a name that is too long, or that another has taken
            continue


# ---- changes of any file --------------------------------------------------------------------------------------------


def spot(content: bytes, place: int) -> int:
    """Returns the byte that a place names."""
    if place < 512:
        return min(place, len(content))
    if place < 1024:
        return max(0, len(content) - (place - 512))
    return (place - 1024) * len(content) // (2**16 - 1024)


def put(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


def cut(content: bytes, place: int) -> bytes:
    return content[: spot(content, place)]


def flip(content: bytes, place: int, bit: int) -> bytes:
    at = spot(content, place)
    return put(content, at, bytes([content[at] ^ (1 << bit)])) if at < len(content) else content


def zeros(content: bytes, place: int, length: int) -> bytes:
    at = spot(content, place)
    return put(content, at, bytes(min(length, len(content) - at)))


def splice(content: bytes, place: int, source: int, length: int) -> bytes:
    at, other = spot(content, place), spot(content, source)
    return content[:at] + content[other : other + length] + content[at:]


def drop(content: bytes, place: int, length: int) -> bytes:
    at = spot(content, place)
    return content[:at] + content[at + length :]


def grow(content: bytes, byte: int, length: int) -> bytes:
    return content + bytes([byte]) * length


def poke(content: bytes, place: int, width: int, big: bool, number: int) -> bytes:
    number %= 1 << (8 * width)
    return put(content, spot(content, place), number.to_bytes(width, "big" if big else "little"))[: len(content)]


def at(content: bytes, place: int, width: int, number: int) -> bytes:
    """Writes a number at one byte, as a database keeps it."""
    return put(content, place, (number % (1 << (8 * width))).to_bytes(width, "little"))[: len(content)]


def retext(content: bytes, nth: int, number: str) -> bytes:
    """Writes another number where the first kilobytes have one in digits."""
    found = list(re.finditer(rb"-?\d+(\.\d+)?", content[:4096]))
    if not found:
        return content
    match = found[nth % len(found)]
    return content[: match.start()] + number.encode() + content[match.end() :]


def become(content: bytes, text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def pickled(content: bytes, protocol: int) -> bytes:
    return pickle.dumps(Runs(), protocol)


# ---- changes of JSON, npy and image files ---------------------------------------------------------------------------


def rejson(content: bytes, nth: int, value: str) -> bytes:
    """Writes another value, given as JSON, in place of one in a JSON file; "" takes it away, "deep" nests it."""
    plain = json.loads(content)
    places: list = []

    def walk(holder: Any) -> None:
        for key in holder if isinstance(holder, dict) else range(len(holder)):
            places.append((holder, key))
            if isinstance(holder[key], dict | list):
                walk(holder[key])

    walk(plain)
    holder, key = places[nth % len(places)]
    if value == "":
        del holder[key]
        return json.dumps(plain).encode()
    holder[key] = "@@"
    new = "[" * 100_000 + "]" * 100_000 if value == "deep" else value
    return json.dumps(plain).replace('"@@"', new).encode()


def npy(array: np.ndarray, version: tuple[int, int] = (1, 0)) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version)
    return stream.getvalue()


def retype(content: bytes, dtype: str, fortran: bool, version: int) -> bytes:
    """Stores the values of an npy as another type, order and version, so that header and length agree."""
    array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    array = array.astype(np.dtype(dtype if dtype[0] != "[" else [("a", "<f2")]))
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asfortranarray(array) if fortran else array, (version, 0), allow_pickle=True)
    return stream.getvalue()


def reshape(content: bytes, shape: list[int], fills: bool) -> bytes:
    """Claims another shape in an npy's header; `fills`: with as many bytes as it says, where these are few."""
    stream, head = io.BytesIO(content), io.BytesIO()
    np.lib.format.read_magic(stream)
    _, _, dtype = np.lib.format.read_array_header_1_0(stream)
    length = math.prod(shape) * dtype.itemsize
    np.lib.format.write_array_header_1_0(head, {"descr": dtype.str, "fortran_order": False, "shape": tuple(shape)})
    values = content[stream.tell() :]
    if fills and 0 <= length <= 2**20:
        values = (values * (length // max(1, len(values)) + 1))[:length]
    return head.getvalue() + values


def rehead(content: bytes, text: str, version: int) -> bytes:
    """Writes another header text into an npy."""
    head = text.encode("latin-1", "replace")
    length = struct.pack("<H", len(head)) if version == 1 else struct.pack("<I", len(head))
    return b"\x93NUMPY" + bytes([version, 0]) + length + head + content[128:]


def revalue(content: bytes, nth: int, value: float) -> bytes:
    """Writes another value into an npy."""
    array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False).copy()
    with np.errstate(all="ignore"):
        array.reshape(-1)[nth % array.size] = np.array(value).astype(array.dtype)
    return npy(array)


def resize(content: bytes, width: int, height: int) -> bytes:
    """Claims another size in a PNG (whose checksum stays true), JPEG, GIF or BMP."""
    if content[:4] == b"\x89PNG":
        head = b"IHDR" + struct.pack(">II", width & 0xFFFFFFFF, height & 0xFFFFFFFF) + content[24:29]
        return put(content, 12, head + struct.pack(">I", zlib.crc32(head)))
    if content[:2] == b"\xff\xd8" and (found := re.search(rb"\xff[\xc0-\xc2]..\x08", content, re.S)):
        return put(content, found.end(), struct.pack(">HH", height & 0xFFFF, width & 0xFFFF))
    if content[:3] == b"GIF":
        return put(content, 6, struct.pack("<HH", width & 0xFFFF, height & 0xFFFF))
    if content[:2] == b"BM":
        return put(content, 18, struct.pack("<II", width & 0xFFFFFFFF, height & 0xFFFFFFFF))
    return content


CONTENT: dict[str, Callable[..., bytes]] = {
    function.__name__: function for function in (
        cut, flip, zeros, splice, drop, grow, poke, at, retext, become, pickled, rejson, retype, reshape, rehead,
        revalue, resize)}


# ---- changes of which files there are -------------------------------------------------------------------------------


def gone(files: Files, name: str) -> None:
    del files[name]


def twin(files: Files, name: str, other: str) -> None:
    """Adds a copy by another name in the same folder."""
    files[os.path.join(os.path.dirname(name), other)] = files[name]


def moved(files: Files, name: str, other: str) -> None:
    twin(files, name, other)
    files.pop(name, None)


def swapped(files: Files, name: str, nth: int) -> None:
    other = sorted(files)[nth % len(files)]
    files[name], files[other] = files[other], files[name]


def special(files: Files, name: str, kind: str, size: int) -> None:
    """Puts a link, a FIFO, a folder, or a file with holes in the place of a file."""
    match kind:
        case "fifo":
            files[name] = FIFO
        case "folder":
            files[name] = FOLDER
        case "holes":
            head = files[name] if isinstance(files[name], bytes) else b""
            files[name] = Holes(head, max(len(head), size))
        case "inside":
            files[name] = Link(os.path.basename(min(files)))
        case target:
            files[name] = Link(target)


def vast(files: Files, name: str, count: int) -> None:
    """Makes an npy of `count` rows, as many as its header says: zeros that take no place on disk, or deflated ones."""
    stream, head = io.BytesIO(files[name]), io.BytesIO()
    np.lib.format.read_magic(stream)
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    shape = (count, *shape[1:])
    np.lib.format.write_array_header_1_0(head, {"descr": dtype.str, "fortran_order": False, "shape": shape})
    files[name] = Holes(head.getvalue(), len(head.getvalue()) + math.prod(shape) * dtype.itemsize)


FILES: dict[str, Callable[..., None]] = {
    function.__name__: function for function in (gone, twin, moved, swapped, special, vast)}


def changed(files: Files, changes: list[list]) -> Files:
    """Makes changes in turn; one that those before it have made impossible is left out."""
    files = dict(files)
    for name, which, *how in changes:
        if not files:
            break
        path = sorted(files)[which % len(files)]
        with contextlib.suppress(Exception):
            if name in FILES:
                FILES[name](files, path, *how)
            else:
                files[path] = CONTENT[name](files[path], *how)
    return files


# ---- what hypothesis draws ------------------------------------------------------------------------------------------

PLACES = st.one_of(st.integers(0, 511), st.integers(512, 1023), st.integers(1024, 2**16 - 1))
WHICH = st.integers(0, 63)
LENGTHS = st.sampled_from([1, 2, 8, 100, 512, 4096])
JSON_VALUES = st.sampled_from(
    [json.dumps(value) for value in (
        *NUMBERS, *FLOATS, *TEXTS, None, True, [], {}, [[]], [1, "a"], {"a": 1}, 1.5, [0], [-1])]
    + ["", "deep", "1e999", "nan", "9" * 5000])
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 2**20, 2**31, 2**40, 2**62, 2**64, -1]), max_size=5)
SIDES = st.sampled_from([0, 1, 7, 16, 64, 1000, 9000, 12000, 20000, 60000, 65535, 2**31 - 1, 2**31, 2**32 - 1])
TARGETS = st.sampled_from(["fifo", "folder", "holes", "inside", "../outside/secret", "/etc/passwd", "/dev/zero",
                           "/dev/null", "nowhere", ".", "..", "/", "/proc/self/mem", "/proc/self/environ"])


def change(name: str, *parts: st.SearchStrategy) -> st.SearchStrategy:
    return st.tuples(st.just(name), WHICH, *parts).map(list)


OF_BYTES = [
    change("cut", PLACES), change("flip", PLACES, st.integers(0, 7)), change("zeros", PLACES, LENGTHS),
    change("splice", PLACES, PLACES, LENGTHS), change("drop", PLACES, LENGTHS),
    change("grow", st.integers(0, 255), LENGTHS),
    change("poke", PLACES, st.sampled_from([1, 2, 4, 8]), st.booleans(), st.sampled_from(NUMBERS)),
    change("retext", WHICH, st.sampled_from([*map(str, NUMBERS), "nan", "inf", "1e999", "9" * 5000, "-", ""])),
    change("become", st.sampled_from(["", "\n", "{}", "[]", "null", "[" * 100_000, *TEXTS])),
    change("pickled", st.integers(0, 4)),
]
OF_FILES = [
    change("gone"), change("twin", st.sampled_from([*TEXTS, "latents-00009.npy", "masks-00000.npy", "x.npy", "x.png"])),
    change("moved", st.sampled_from(TEXTS)), change("swapped", WHICH),
    change("special", TARGETS, st.sampled_from([0, 100, 2**31, 2**40])),
]
OF_JSON = [change("rejson", st.integers(0, 200), JSON_VALUES)]
OF_NPY = [
    change("retype", st.sampled_from(DTYPES), st.booleans(), st.sampled_from([1, 2, 3])),
    change("reshape", SHAPES, st.booleans()),
    change("rehead", st.sampled_from(HEADS), st.sampled_from([1, 2, 3, 9])),
    change("vast", st.sampled_from([2**10, 2**20, 2**24, 2**31, 2**40])),
    change("revalue", st.integers(0, 10_000), st.sampled_from([*FLOATS, *map(float, NUMBERS)])),
]
OF_PAGES = [      # of an LMDB: what the heads of its pages say, and where their nodes lie
    change("at", st.builds(lambda page, byte: 4096 * page + byte, st.integers(0, 14), st.integers(0, 40)),
           st.sampled_from([1, 2, 4, 8]), st.sampled_from(NUMBERS))]
OF_IMAGES = [change("resize", SIDES, SIDES)]


def changes(*kinds: list, most: int = 3) -> st.SearchStrategy:
    """Draws a few changes, each kind as often as another."""
    return st.lists(st.one_of(*(st.one_of(kind) for kind in kinds)), max_size=most)


# ---- zips -----------------------------------------------------------------------------------------------------------

CENTRAL = {"flags": (8, 2), "method": (10, 2), "crc": (16, 4), "packed": (20, 4), "size": (24, 4), "name": (28, 2),
           "extra": (30, 2), "comment": (32, 2), "disk": (34, 2), "mode": (38, 4), "offset": (42, 4)}
LOCAL = {"flags": (6, 2), "method": (8, 2), "crc": (14, 4), "packed": (18, 4), "size": (22, 4), "name": (26, 2),
         "extra": (28, 2)}
END = {"disk": (4, 2), "here": (8, 2), "entries": (10, 2), "length": (12, 4), "offset": (16, 4), "comment": (20, 2)}
RECORDS = {"central": (b"PK\x01\x02", CENTRAL), "local": (b"PK\x03\x04", LOCAL), "end": (b"PK\x05\x06", END)}
ZIP_FIELDS = [(record, field) for record, (_, fields) in RECORDS.items() for field in fields]
ZEROS = 2**24


def deflated(bomb: Holes) -> bytes:
    """Deflates a head and zeros: one piece of them once, written as often as it is needed, up to 8 GiB."""
    packer, end = (zlib.compressobj(9, zlib.DEFLATED, -15) for _ in range(2))
    head = packer.compress(bomb.head) + packer.flush(zlib.Z_FULL_FLUSH)
    piece = packer.compress(bytes(ZEROS)) + packer.flush(zlib.Z_FULL_FLUSH)
    rest = min(bomb.size, 2**33) - len(bomb.head)
    return head + piece * (rest // ZEROS) + end.compress(bytes(max(0, rest) % ZEROS)) + end.flush()


def zipped(files: Files, method: int, fields: list[list], twice: bool = False) -> bytes:
    """Packs files into a zip and then writes `fields`, each [nth record, which field, number], into its records."""
    stream = io.BytesIO()
    bombs = {}
    with zipfile.ZipFile(stream, "w", method) as archive:
        archive._didModify = True
        for name, content in files.items():
            entry = zipfile.ZipInfo(name.replace("\0", "") or "x")
            entry.compress_type, entry.flag_bits = method, 0x800
            try:
                entry.filename.encode()
            except UnicodeEncodeError:
                continue
            if content is FOLDER:
                entry.filename += "/"
                content = b""
            elif isinstance(content, Link):
                entry.external_attr = 0o120777 << 16
                content = content.target.encode()
            elif isinstance(content, Holes):
                bombs[entry.filename] = content.size
                entry.compress_type, content = zipfile.ZIP_STORED, deflated(content)
            elif content is FIFO:
                entry.external_attr = 0o010666 << 16
                content = b""
            if len(entry.filename.encode()) > 65535:
                continue
            for _ in range(1 + twice):
                archive.writestr(entry, content)
    packed = stream.getvalue()
    for name, size in bombs.items():
        for record in ("central", "local"):
            mark, places = RECORDS[record]
            for found in re.finditer(re.escape(mark), packed):
                head = 46 if record == "central" else 30
                if packed[found.start() + head :].startswith(name.encode()):
                    for field, number in (("method", 8), ("size", size)):
                        at, width = places[field]
                        packed = put(packed, found.start() + at, (number % 2**32).to_bytes(width, "little"))
    for nth, which, number in fields:
        record, field = ZIP_FIELDS[which % len(ZIP_FIELDS)]
        mark, places = RECORDS[record]
        found = [match.start() for match in re.finditer(re.escape(mark), packed)]
        if found:
            at, width = places[field]
            packed = put(packed, found[nth % len(found)] + at, (number % (1 << (8 * width))).to_bytes(width, "little"))
    return packed


ZIPS = st.fixed_dictionaries({
    "method": st.sampled_from(
        [*2 * [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]),
    "fields": st.lists(st.tuples(WHICH, WHICH, st.sampled_from(NUMBERS)).map(list), max_size=2),
    "twice": st.sampled_from([False] * 9 + [True])})


# ---- tars -----------------------------------------------------------------------------------------------------------

TAR_FIELDS = {"name": (0, 100), "mode": (100, 8), "size": (124, 12), "time": (136, 12), "checksum": (148, 8),
              "kind": (156, 1), "link": (157, 100), "magic": (257, 8), "prefix": (345, 155)}
TAR_VALUES = [b"\0", b"-1", b"\xff" * 12, b"77777777777\0", b"0", b"1", b"2", b"3", b"6", b"5", b"L", b"K", b"x", b"g",
              b"S", b"V", b"7", b"../../x", b"/etc/passwd", b"\x80" + b"\0" * 3 + b"\x7f" + b"\xff" * 7, b"99999999",
              b"", b"ustar  \0", b"\xff\xfe.latent.npy", b"00000010000\0", b"-0000001000\0"]
PAX = ["18446744073709551616", "-1", "-512", "0", "nan", "9" * 5000, "4096", "99999999999"]


def tarred(files: Files, fields: list[list], extras: list[list], twice: bool = False) -> bytes:
    """Packs files into a tar and writes `fields`, [nth header, which field, which value, true sum], into headers.

    `extras` are members [nth place, kind, size, text] that stand before others: pax headers, long names, links.
    """
    members: list[bytes] = []
    for name, content in files.items():
        entry = tarfile.TarInfo(name.replace("\0", ""))
        if isinstance(content, Link):
            entry.type, entry.linkname, content = tarfile.SYMTYPE, content.target, b""
        elif isinstance(content, Holes):
            entry.size, content = content.size, content.head
        elif content in (FIFO, FOLDER):
            entry.type, content = tarfile.FIFOTYPE if content is FIFO else tarfile.DIRTYPE, b""
        else:
            entry.size = len(content)
        head = entry.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape" if name.isprintable() else "backslashreplace")
        members += [head + content + bytes(-len(content) % 512)] * (1 + twice)
    for nth, kind, size, text in extras:
        body = text.encode()
        if kind == "x":
            record = f" size={text}\n".encode()
            body = b"%d" % (len(record) + len(str(len(record) + 2))) + record
        entry = tarfile.TarInfo("extra")
        entry.type, entry.size = kind.encode(), len(body) if size < 0 else size
        entry.linkname = text[:90] if kind in "12" else ""
        members.insert(nth % (len(members) + 1), entry.tobuf(tarfile.GNU_FORMAT) + body + bytes(-len(body) % 512))
    for nth, which, value, is_true in fields:
        if not members:
            break
        at, width = list(TAR_FIELDS.values())[which % len(TAR_FIELDS)]
        member = put(members[nth % len(members)], at, TAR_VALUES[value % len(TAR_VALUES)][:width])
        if is_true:
            total = sum(put(member[:512], 148, b" " * 8))
            member = put(member, 148, b"%06o\0 " % total)
        members[nth % len(members)] = member
    return b"".join(members) + bytes(1024)


TARS = st.fixed_dictionaries({
    "fields": st.lists(st.tuples(WHICH, WHICH, WHICH, st.sampled_from([True, True, False])).map(list), max_size=2),
    "extras": st.lists(st.tuples(WHICH, st.sampled_from("xLKg125SV7"), st.sampled_from([-1, -1, 0, 2**20, 2**33]),
                                 st.sampled_from([*PAX, "../x", "a" * 300, "\n" * 50])).map(list), max_size=1),
    "twice": st.sampled_from([False] * 9 + [True])})
