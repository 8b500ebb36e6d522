"""Files of a folder, a zip or tars by number: their names with slashes, and the bytes of each.

An archive is listed like the folder it was made from, whichever system made it. Only names and positions are kept,
about 130 bytes per file (170 MB for ImageNet), or 900 in a zip.
"""

import glob
import os
import posixpath
import re
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from runtime.files import refuse_pointer, require_plain
from runtime.notebook import hides_bars

TARS = r"\.(tar(\.\w+)?|tgz)$"
IMAGE_SUFFIXES = {".apng", ".avif", ".bmp", ".gif", ".j2k", ".jfif", ".jif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm",
                  ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"}
HALF = "\uff3c"  # stands for the byte of a backslash that is half of a letter, and no separator
SHARD_SUFFIXES = {".parquet", ".arrow"}  # of Hugging Face's data sets, which latents.hub reads
SPLITS = {"train", "val", "valid", "validation", "test"}
OF_A_SYSTEM = {"__MACOSX", "@eaDir", "$RECYCLE.BIN"}  # folders of copies and thumbnails, which end in .jpg as well
FIRST_OF_SEVERAL = "has several pages or frames, of which the first is used"
NOT_TURNED = "has an EXIF orientation, which is not applied, as in ADM"
REMARKS = (FIRST_OF_SEVERAL, NOT_TURNED)  # on files that are used


class UnreadableImage(Exception):
    """One file cannot be read as an image: it is truncated, no image at all, or has no clear meaning in RGB."""


@dataclass
class Listing:
    """Files by number: `names[i]` lies below the source, `read(i)` returns its bytes.

    `shown[i]` names the file for people, and of a tar also says which one it is in. `left_out` are [name, reason] of
    what is there and no file, `title` is the class of a set without classes, `path` the file or folder on disk.
    `tar_of[i]` is the number of the tar that holds file i: several may hold files with the same names. `quick` are the
    numbers of files that are read without others before them, None for all. `above` has all files of an archive if
    these are those of one of its folders.
    """

    names: list[str]
    read: Callable[[int], bytes]
    shown: list[str]
    path: Path
    title: str
    tars: int = 0
    left_out: list[tuple[str, str]] = field(default_factory=list)
    tar_of: np.ndarray | None = None
    quick: np.ndarray | None = None
    above: "Listing | None" = None

    def sample_of(self, index: int, last: bool = False) -> tuple[int, str]:
        """Returns what the files of one webdataset sample share: their tar, and the name up to a dot (`key_of`)."""
        return 0 if self.tar_of is None else int(self.tar_of[index]), key_of(self.names[index], last)[0]

    def below(self, folder: str) -> "Listing":
        """Returns the files in one of the folders, named from there."""
        chosen = [i for i, name in enumerate(self.names) if name.startswith(f"{folder}/")]
        names = [self.names[i].removeprefix(f"{folder}/") for i in chosen]
        shown = [self.shown[i] for i in chosen] if self.tars else names
        return replace(self, names=names, shown=shown, read=lambda i: self.read(chosen[i]), path=self.path / folder,
                       title=posixpath.basename(folder), tar_of=None if self.tar_of is None else self.tar_of[chosen],
                       above=self)


def a_few(names: list[str], count: int = 5) -> str:
    return ", ".join(names[:count]) + (" …" if len(names) > count else "")


def clean(name: str) -> str:
    """Returns a name without leading slash and `.`, its letters composed: a Mac writes ö as o and dots."""
    name = name if name.isascii() else unicodedata.normalize("NFC", name)
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def is_hidden(name: str) -> bool:
    """True for hidden files and folders, and a system's copies and thumbnails such as __MACOSX/._cat.jpg."""
    return any(part.startswith(".") or part in OF_A_SYSTEM for part in name.split("/"))


def has_image_suffix(name: str) -> bool:
    return posixpath.splitext(name)[1].lower() in IMAGE_SUFFIXES


def key_of(name: str, last: bool = False) -> tuple[str, str]:
    """Splits a name at the first dot after its folder, or the last: a sample's key, and which part of it this is."""
    folder, _, base = name.rpartition("/")
    key, _, suffix = base.rpartition(".") if last else base.partition(".")
    return f"{folder}/{key}" if folder else key, suffix.lower()


def looks_like_image(name: str) -> bool:
    """True by the name alone."""
    return has_image_suffix(name) and not is_hidden(name)


def list_source(source: str | Path) -> Listing:
    """Lists a folder, a zip, tars (one, a folder of them, a glob, a {000..012} pattern), or a folder in an archive."""
    path = Path(source)
    archive = next((parent for parent in path.parents if parent.is_file()), None)
    if archive is not None:  # set.zip/train
        return list_source(archive).below(path.relative_to(archive).as_posix())
    files = find_tars(path)
    if path.is_dir():
        listing = list_folder(path)
        if files and (images := list(filter(looks_like_image, listing.names))):
            raise ValueError(f"source={source} holds {len(files)} tars and {len(images)} images, such as "
                             f'{min(images)}: select only the tars by source="{source}/*.tar", or move the tars away.')
        return list_tars(files, path) if files else listing
    if not files:
        raise ValueError(f"source={source} does not exist (looked from {Path.cwd()}).")
    if shards := [file for file in files if file.suffix.lower() in SHARD_SUFFIXES]:
        return list_files(shards)
    what, is_zip = what_else(files[0]), files[0].suffix.lower() == ".zip" or starts_as_zip(files[0])
    if is_zip and what is None and len(files) == 1:
        return list_zip(files[0])
    if is_zip or what:
        of = f"names {len(files)} files, of which {files[0]} is" if len(files) > 1 else "is"
        raise ValueError(f"source={source} {of} {what or 'a zip'}: give a folder of images, or one zip or tar of them.")
    return list_tars(files, path)


def starts_as_zip(file: Path) -> bool:
    require_plain(file)
    with open(file, "rb") as content:
        return content.read(2) == b"PK"


PICKLED = "a pickle, which can run code and is never loaded"
BEGINNINGS = {b"\x93NUMPY": "numpy's array", b"\x89HDF": "an HDF5 file", b"\x80": PICKLED, b"PAR1": "a parquet file",
              b"ARROW1": "an arrow file", b"Rar!": "a RAR archive", b"7z\xbc\xaf": "a 7z archive"}
PICKLES = {".pkl", ".pickle", ".pt", ".pth", ".ckpt"}


def what_else(file: Path) -> str | None:
    """Says what a file is that is no archive of images; None for a zip, a tar or a shard, complete or not."""
    suffix = file.suffix.lower()
    if suffix in SHARD_SUFFIXES:
        return None
    if starts_as_zip(file):
        return "numpy's .npz of arrays" if suffix == ".npz" else PICKLED if suffix in PICKLES else None
    with open(file, "rb") as content:
        start = content.read(8)
    if what := next((what for beginning, what in BEGINNINGS.items() if start.startswith(beginning)), None):
        return what
    if suffix in IMAGE_SUFFIXES or suffix in PICKLES:
        return "one image" if suffix in IMAGE_SUFFIXES else PICKLED
    is_archive = suffix == ".zip" or re.search(TARS, file.name, re.IGNORECASE) or tarfile.is_tarfile(file)
    return None if is_archive else f"a file of another kind ({suffix or 'without a suffix'})"


def list_folder(folder: Path) -> Listing:
    """Lists all files below a folder; follows links, but for those to a folder that they lie in."""
    files, empty = [], []

    def stop(error: OSError) -> None:
        raise error  # a folder that may not be read: os.walk would pass over it in silence

    for parent, folders, inside in os.walk(folder, onerror=stop, followlinks=True):
        here = f"{os.path.realpath(parent)}/"
        folders[:] = [name for name in folders if not os.path.islink(f"{parent}/{name}")
                      or not here.startswith(f"{os.path.realpath(f'{parent}/{name}')}/")]
        prefix = "" if parent == str(folder) else f"{os.path.relpath(parent, folder)}/"
        files += [prefix + file for file in inside]
        if prefix and not folders and not inside:
            empty.append((clean(as_text(prefix)) + "/", "an empty folder"))

    def read(index: int) -> bytes:
        name = files[index]
        try:
            require_plain(folder / name)
            return (folder / name).read_bytes()
        except OSError as error:
            is_dead = isinstance(error, FileNotFoundError) and (folder / name).is_symlink()
            if is_dead or isinstance(error, PermissionError):
                raise UnreadableImage(str(error)) from error
            raise  # it was there when it was listed: the source is changing or has gone, and the run must stop

    names = [clean(as_text(file)) for file in files]
    return Listing(names, read, names, folder, clean(folder.resolve().name), left_out=empty)


def list_files(files: list[Path]) -> Listing:
    """Lists single files, by their names below the folder that they share."""
    folder = Path(os.path.commonpath([file.parent for file in files]))
    names = [file.relative_to(folder).as_posix() for file in files]
    title = clean(files[0].stem if len(files) == 1 else folder.resolve().name)
    return Listing(names, lambda index: files[index].read_bytes(), names, folder, title)


def as_text(name: str) -> str:
    """Returns the name of a file whose bytes may not be UTF-8: each such byte as a character of its own, of cp437."""
    if not any("\udc80" <= letter <= "\udcff" for letter in name):
        return name
    text = re.sub("[\udc80-\udcff]", lambda byte: os.fsencode(byte[0]).decode("cp437"), name)
    return re.sub(r"([^\x00-\x7f])\\", rf"\1{HALF}", text)


def name_in_zip(info: zipfile.ZipInfo, has_slashes: bool) -> str:
    """Returns an entry's name: a Mac writes UTF-8 without saying so, and old Windows programs backslashes.

    A name in another code page, which no zip names, stays in cp437, where different bytes are different letters.
    """
    name = info.filename
    if not name.isascii() and not info.flag_bits & 0x800:  # read as cp437, as nothing else is said
        try:
            name = name.encode("cp437").decode("utf-8")
        except UnicodeError:  # the second byte of 表 is a backslash, as in 1 of 188 letters of Shift-JIS, GBK and Big5
            letter = r"[^\x00-\x7f]\\" if "/" in name else r"[^\x00-\x7f]."
            name = re.sub(letter, lambda letter: letter[0].replace("\\", HALF), name)
    return name if has_slashes and info.create_system else name.replace("\\", "/")


def list_zip(path: Path) -> Listing:
    """Lists a zip; of two entries with one name the later counts, which unpacking would leave.

    Raises ValueError where it is damaged.
    """
    refuse_pointer(path)
    try:
        archive = zipfile.ZipFile(path)  # which any thread may read
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise ValueError(f"source={path} is not a complete zip file ({error}): copy it again.") from error
    has_slashes = any("/" in name for name in archive.namelist())
    found = {name_in_zip(info, has_slashes): info for info in archive.infolist()}
    infos = [info for name, info in found.items() if not name.endswith("/")]
    names = [clean(name) for name in found if not name.endswith("/")]

    def read(index: int) -> bytes:
        try:
            return archive.read(infos[index])
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # damaged, encrypted, of a new method
            raise UnreadableImage(str(error)) from error

    return Listing(names, read, names, path, clean(path.stem))


def spread(count: int, num: int) -> np.ndarray:
    """Picks at most `num` of `count` indices, evenly spread from the first to the last."""
    return np.unique(np.linspace(0, count - 1, min(count, num)).astype(np.int64))


def find_tars(pattern: str | Path) -> list[Path]:
    """Returns the tars that a folder, a file, a glob or a shell's braces ({000..012}) name, in order of name.

    A folder's compressed ones are among them: their reader refuses them. Raises ValueError where some that the braces
    name are absent; returns none where all are.
    """
    from braceexpand import braceexpand  # comes with webdataset

    path = Path(pattern)
    if path.is_dir():
        return sorted(file for file in path.iterdir() if re.search(TARS, file.name, re.IGNORECASE)
                      and not is_hidden(file.name))
    if path.is_file():
        return [path]
    names = list(braceexpand(str(pattern)))
    found = {name: glob.glob(name) for name in names}
    absent = [name for name in names if not found[name]]
    if 0 < len(absent) < len(names):
        raise ValueError(f"{pattern} names {len(names)} tars, but {len(absent)} of them are missing, {absent[0]} "
                         "first.")
    return sorted({Path(file) for files in found.values() for file in files})


def tar_members(file: Path, start: int = 0) -> Iterator[tarfile.TarInfo]:
    """Yields the members of a tar, or of one that begins at byte `start` of it.

    Raises ValueError where it is compressed, or does not end as a tar does.
    """
    refuse_pointer(file)
    try:
        with open(file, "rb") as content:
            content.seek(start)
            with tarfile.open(fileobj=content, mode="r:") as tar:
                for member in tar:
                    tar.members = []  # which would take a kilobyte a member
                    yield member
            content.seek(tar.offset)
            if content.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile takes any end for the end
                raise tarfile.ReadError(f"it has no end mark at byte {tar.offset:,}")
    except tarfile.TarError as error:
        if what := what_else(file):
            raise ValueError(f"{file} is {what}, not a tar.") from error
        raise ValueError(f"{file} is not a complete, uncompressed tar ({error}): decompress it or copy it "
                         "again.") from error


Places = dict[str, tuple[int, int]]  # of files in a tar by their names: the first byte and the size


def find_in_tar(tar: Path, start: int = 0) -> tuple[Places, list[tuple[str, str]]]:
    """Finds the files of a tar, and what is none; of two with one name the later counts."""
    found, left_out = {}, []
    for member in tar_members(tar, start):
        if member.isfile():
            found[member.name] = member.offset_data, member.size
        elif member.islnk() and member.linkname in found:
            found[member.name] = found[member.linkname]
        elif not member.isdir():
            left_out.append((f"{tar.name}/{as_text(member.name)}",
                             "is a link or a device, which a tar holds no bytes of"))
    return found, left_out


def list_tars(tars: list[Path], path: Path) -> Listing:
    """Lists tars in their order, which is the fast order to read them in; a hard link is the file it leads to.

    A tar in a tar is a folder with its name, as in ILSVRC's tar of a tar for each class, and so are tars that are
    named by WordNet ids.
    """
    names, shown, where, left_out = [], [], [], []
    are_classes = len(tars) > 1 and all(re.fullmatch(r"n\d{8}", tar.stem) for tar in tars)

    def add(number: int, folder: str, found: Places) -> None:
        texts = [folder + as_text(name) for name in found]
        names.extend(map(clean, texts))
        shown.extend(f"{tars[number].name}/{name}" for name in texts)
        where.extend((number, *place) for place in found.values())

    for number, tar in enumerate(tars):
        found, others = find_in_tar(tar)
        left_out += others
        inner = {name: found.pop(name) for name in [*found] if name.lower().endswith(".tar")}
        add(number, f"{tar.stem}/" if are_classes else "", found)
        for name, (start, size) in tqdm(inner.items(), desc=f"listing {tar.name}", unit="tar", delay=2,
                                        disable=hides_bars()):
            inside, others = find_in_tar(tar, start)
            if any(offset + length > start + size for offset, length in inside.values()):
                raise ValueError(f"{tar}: {name} in it is not complete: copy it again.")
            left_out += others
            add(number, f"{as_text(name)[:-4]}/", inside)
    places = np.array(where, dtype=np.int64).reshape(-1, 3)

    def read(index: int) -> bytes:
        number, offset, size = places[index].tolist()
        with open(tars[number], "rb") as file:
            return os.pread(file.fileno(), size, offset)

    folder = path if path.is_dir() else path.parent
    title = clean(tars[0].stem if len(tars) == 1 else folder.resolve().name)
    return Listing(names, read, shown, path, title, len(tars), left_out, places[:, 0])
