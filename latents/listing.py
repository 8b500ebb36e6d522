"""Lists the files of a folder, a zip or tars by number, and reads the bytes of each. Names use forward slashes.

An archive is listed like the folder it was made from, whichever system made it. Only names and positions are kept in
memory: about 130 bytes per file (170 MB for ImageNet), or 900 per file in a zip.
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

TAR_SUFFIX = r"\.(tar(\.\w+)?|tgz)$"
IMAGE_SUFFIXES = {".apng", ".avif", ".bmp", ".gif", ".j2k", ".jfif", ".jif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm",
                  ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"}
NOT_A_SEPARATOR = "\uff3c"  # replaces a backslash byte that is the second half of a two-byte letter
SHARD_SUFFIXES = {".parquet", ".arrow"}  # Hugging Face data sets, which latents.hub reads
SPLITS = {"train", "val", "valid", "validation", "test"}
SYSTEM_FOLDERS = {"__MACOSX", "@eaDir", "$RECYCLE.BIN"}  # hold copies and thumbnails, which may end in .jpg too
FIRST_FRAME_USED = "has several pages or frames, and only the first is used"
NOT_ROTATED = "has an EXIF orientation, which is not applied, as in ADM"
REMARKS = (FIRST_FRAME_USED, NOT_ROTATED)  # about files that are used nevertheless


class UnreadableImage(Exception):
    """A file cannot be read as an image: it is truncated, is not an image, or has no clear meaning in RGB."""


@dataclass
class Listing:
    """Numbered files. `names[i]` is a file's path relative to the source, and `read(i)` returns its bytes.

    `shown[i]` is the name for messages; for a file in a tar it includes the tar's name. `left_out` lists (name, reason)
    for entries that are not files. `title` is the class name of a set without classes. `path` is the file or folder
    on disk. `tar_of[i]` is the number of the tar that holds file i, since several tars may hold files of the same name.
    `quick` lists the files that can be read without reading others first; None means all of them. If the listing covers
    one folder of an archive, `archive` is the listing of the complete archive.
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
    archive: "Listing | None" = None

    def sample_of(self, index: int, last: bool = False) -> tuple[int, str]:
        """Returns what all files of one webdataset sample share: their tar, and the name up to a dot (`key_of`)."""
        return 0 if self.tar_of is None else int(self.tar_of[index]), key_of(self.names[index], last)[0]

    def below(self, folder: str) -> "Listing":
        """Returns the files in `folder`, with names relative to it."""
        chosen = [i for i, name in enumerate(self.names) if name.startswith(f"{folder}/")]
        names = [self.names[i].removeprefix(f"{folder}/") for i in chosen]
        shown = [self.shown[i] for i in chosen] if self.tars else names
        return replace(self, names=names, shown=shown, read=lambda i: self.read(chosen[i]), path=self.path / folder,
                       title=posixpath.basename(folder), tar_of=None if self.tar_of is None else self.tar_of[chosen],
                       archive=self)


def a_few(names: list[str], count: int = 5) -> str:
    return ", ".join(names[:count]) + (" …" if len(names) > count else "")


def clean(name: str) -> str:
    """Removes leading slashes and `.` from a name and composes its letters, since a Mac stores ö as o and dots."""
    name = name if name.isascii() else unicodedata.normalize("NFC", name)
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def is_hidden(name: str) -> bool:
    """True for hidden files and folders, and for a system's copies and thumbnails such as __MACOSX/._cat.jpg."""
    return any(part.startswith(".") or part in SYSTEM_FOLDERS for part in name.split("/"))


def has_image_suffix(name: str) -> bool:
    return posixpath.splitext(name)[1].lower() in IMAGE_SUFFIXES


def key_of(name: str, last: bool = False) -> tuple[str, str]:
    """Splits a name into its sample's key and its suffix, at the first dot after the folder, or at the `last` one."""
    folder, _, base = name.rpartition("/")
    key, _, suffix = base.rpartition(".") if last else base.partition(".")
    return f"{folder}/{key}" if folder else key, suffix.lower()


def looks_like_image(name: str) -> bool:
    """True for a visible file with an image's suffix; the content is not read."""
    return has_image_suffix(name) and not is_hidden(name)


def list_source(source: str | Path) -> Listing:
    """Lists a folder, a zip, tars, or a folder in an archive.

    Tars can be one file, a folder of them, a glob or a {000..012} pattern.
    """
    path = Path(source)
    archive = next((parent for parent in path.parents if parent.is_file()), None)
    if archive is not None:  # set.zip/train
        return list_source(archive).below(path.relative_to(archive).as_posix())
    files = find_tars(path)
    if path.is_dir():
        listing = list_folder(path)
        if files and (images := list(filter(looks_like_image, listing.names))):
            raise ValueError(f"source={source} holds {len(files)} tars and {len(images)} images, such as "
                             f'{min(images)}: select only the tars with source="{source}/*.tar", or move them away.')
        return list_tars(files, path) if files else listing
    if not files:
        raise ValueError(f"source={source} does not exist (looked from {Path.cwd()}).")
    if shards := [file for file in files if file.suffix.lower() in SHARD_SUFFIXES]:
        return list_files(shards)
    what, is_zip = describe_other(files[0]), files[0].suffix.lower() == ".zip" or starts_as_zip(files[0])
    if is_zip and what is None and len(files) == 1:
        return list_zip(files[0])
    if is_zip or what:
        found = f"names {len(files)} files, and {files[0]} is" if len(files) > 1 else "is"
        raise ValueError(f"source={source} {found} {what or 'a zip'}: use a folder of images, or one zip or tar of "
                         "them.")
    return list_tars(files, path)


def starts_as_zip(file: Path) -> bool:
    require_plain(file)
    with open(file, "rb") as content:
        return content.read(2) == b"PK"


PICKLED = "a pickle, which can run code and is never loaded"
FIRST_BYTES = {b"\x93NUMPY": "a numpy array", b"\x89HDF": "an HDF5 file", b"\x80": PICKLED, b"PAR1": "a parquet file",
               b"ARROW1": "an arrow file", b"Rar!": "a RAR archive", b"7z\xbc\xaf": "a 7z archive"}
PICKLE_SUFFIXES = {".pkl", ".pickle", ".pt", ".pth", ".ckpt"}


def describe_other(file: Path) -> str | None:
    """Describes a file that is not an archive of images. Returns None for a zip, tar or shard, even if truncated."""
    suffix = file.suffix.lower()
    if suffix in SHARD_SUFFIXES:
        return None
    if starts_as_zip(file):
        return "a numpy .npz of arrays" if suffix == ".npz" else PICKLED if suffix in PICKLE_SUFFIXES else None
    with open(file, "rb") as content:
        start = content.read(8)
    if what := next((what for first, what in FIRST_BYTES.items() if start.startswith(first)), None):
        return what
    if suffix in IMAGE_SUFFIXES or suffix in PICKLE_SUFFIXES:
        return "one image" if suffix in IMAGE_SUFFIXES else PICKLED
    is_archive = suffix == ".zip" or re.search(TAR_SUFFIX, file.name, re.IGNORECASE) or tarfile.is_tarfile(file)
    return None if is_archive else f"a file of another kind ({suffix or 'without a suffix'})"


def list_folder(folder: Path) -> Listing:
    """Lists all files below a folder. Follows links, except those to a folder that contains them."""
    files, empty = [], []

    def stop(error: OSError) -> None:
        raise error  # os.walk would silently skip a folder without read permission

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
            raise  # the file was there when it was listed, so the source is changing or unmounted: stop the run

    names = [clean(as_text(file)) for file in files]
    return Listing(names, read, names, folder, clean(folder.resolve().name), left_out=empty)


def list_files(files: list[Path]) -> Listing:
    """Lists single files, with names relative to their common folder."""
    folder = Path(os.path.commonpath([file.parent for file in files]))
    names = [file.relative_to(folder).as_posix() for file in files]
    title = clean(files[0].stem if len(files) == 1 else folder.resolve().name)
    return Listing(names, lambda index: files[index].read_bytes(), names, folder, title)


def as_text(name: str) -> str:
    """Makes a file name printable. Each byte that is not UTF-8 becomes its own character of code page 437."""
    if not any("\udc80" <= letter <= "\udcff" for letter in name):
        return name
    text = re.sub("[\udc80-\udcff]", lambda byte: os.fsencode(byte[0]).decode("cp437"), name)
    return re.sub(r"([^\x00-\x7f])\\", rf"\1{NOT_A_SEPARATOR}", text)


def name_in_zip(info: zipfile.ZipInfo, has_slashes: bool) -> str:
    """Returns an entry's name. A Mac writes UTF-8 without setting its flag, and old Windows programs write backslashes.

    A zip does not record any other code page. Such names are read as cp437, where different bytes are different
    letters.
    """
    name = info.filename
    if not name.isascii() and not info.flag_bits & 0x800:  # without the UTF-8 flag, zipfile reads cp437
        try:
            name = name.encode("cp437").decode("utf-8")
        except UnicodeError:  # the second byte of 表 is a backslash, as in 1 of 188 letters of Shift-JIS, GBK and Big5
            letter = r"[^\x00-\x7f]\\" if "/" in name else r"[^\x00-\x7f]."
            name = re.sub(letter, lambda letter: letter[0].replace("\\", NOT_A_SEPARATOR), name)
    return name if has_slashes and info.create_system else name.replace("\\", "/")


def list_zip(path: Path) -> Listing:
    """Lists a zip. If two entries have the same name, the later one counts, as when the zip is unpacked.

    Raises ValueError if the zip is damaged.
    """
    refuse_pointer(path)
    try:
        archive = zipfile.ZipFile(path)  # safe to read from several threads
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise ValueError(f"source={path} is not a complete zip file ({error}): copy it again.") from error
    has_slashes = any("/" in name for name in archive.namelist())
    found = {name_in_zip(info, has_slashes): info for info in archive.infolist()}
    infos = [info for name, info in found.items() if not name.endswith("/")]
    names = [clean(name) for name in found if not name.endswith("/")]

    def read(index: int) -> bytes:
        try:
            return archive.read(infos[index])
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # damaged, encrypted, unknown
            raise UnreadableImage(str(error)) from error

    return Listing(names, read, names, path, clean(path.stem))


def spread(count: int, num: int) -> np.ndarray:
    """Returns at most `num` of `count` indices, evenly spread from the first to the last."""
    return np.unique(np.linspace(0, count - 1, min(count, num)).astype(np.int64))


def find_tars(pattern: str | Path) -> list[Path]:
    """Returns the tars named by a folder, a file, a glob or shell braces ({000..012}), sorted by name.

    Compressed tars in a folder are included, because their reader then explains why they cannot be used. Raises
    ValueError if some of the tars in the braces are missing; returns an empty list if all are.
    """
    from braceexpand import braceexpand  # installed with webdataset

    path = Path(pattern)
    if path.is_dir():
        return sorted(file for file in path.iterdir() if re.search(TAR_SUFFIX, file.name, re.IGNORECASE)
                      and not is_hidden(file.name))
    if path.is_file():
        return [path]
    names = list(braceexpand(str(pattern)))
    found = {name: glob.glob(name) for name in names}
    missing = [name for name in names if not found[name]]
    if 0 < len(missing) < len(names):
        raise ValueError(f"{pattern} names {len(names)} tars, but {len(missing)} of them are missing, such as "
                         f"{missing[0]}.")
    return sorted({Path(file) for files in found.values() for file in files})


def tar_members(file: Path, start: int = 0) -> Iterator[tarfile.TarInfo]:
    """Yields the members of a tar, or of an inner tar that begins at byte `start`.

    Raises ValueError if it is compressed, or has no end mark.
    """
    refuse_pointer(file)
    try:
        with open(file, "rb") as content:
            content.seek(start)
            with tarfile.open(fileobj=content, mode="r:") as tar:
                for member in tar:
                    tar.members = []  # this list would take a kilobyte per member
                    yield member
            content.seek(tar.offset)
            if content.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile does not check this
                raise tarfile.ReadError(f"it has no end mark at byte {tar.offset:,}")
    except tarfile.TarError as error:
        if what := describe_other(file):
            raise ValueError(f"{file} is {what}, not a tar.") from error
        raise ValueError(f"{file} is not a complete, uncompressed tar ({error}): decompress it or copy it "
                         "again.") from error


Extents = dict[str, tuple[int, int]]  # the name of a file in a tar -> its first byte and its size


def find_in_tar(tar: Path, start: int = 0) -> tuple[Extents, list[tuple[str, str]]]:
    """Finds the files of a tar, and lists entries that are not files. A later file replaces one of the same name."""
    found, left_out = {}, []
    for member in tar_members(tar, start):
        if member.isfile():
            found[member.name] = member.offset_data, member.size
        elif member.islnk() and member.linkname in found:
            found[member.name] = found[member.linkname]
        elif not member.isdir():
            left_out.append((f"{tar.name}/{as_text(member.name)}",
                             "is a link or a device, so the tar holds no content for it"))
    return found, left_out


def list_tars(tars: list[Path], path: Path) -> Listing:
    """Lists the files of tars in stored order, which is the fastest to read. A hard link stands for its target.

    A tar inside a tar is listed as a folder of its name, as ILSVRC's tar holds a tar for each class. So are tars that
    are named after WordNet ids.
    """
    names, shown, extents, left_out = [], [], [], []
    are_classes = len(tars) > 1 and all(re.fullmatch(r"n\d{8}", tar.stem) for tar in tars)

    def add(number: int, folder: str, found: Extents) -> None:
        texts = [folder + as_text(name) for name in found]
        names.extend(map(clean, texts))
        shown.extend(f"{tars[number].name}/{name}" for name in texts)
        extents.extend((number, *extent) for extent in found.values())

    for number, tar in enumerate(tars):
        found, others = find_in_tar(tar)
        left_out += others
        inner = {name: found.pop(name) for name in [*found] if name.lower().endswith(".tar")}
        add(number, f"{tar.stem}/" if are_classes else "", found)
        for name, (start, size) in tqdm(inner.items(), desc=f"listing {tar.name}", unit="tar", delay=2,
                                        disable=hides_bars()):
            inside, others = find_in_tar(tar, start)
            if any(offset + length > start + size for offset, length in inside.values()):
                raise ValueError(f"{tar} holds {name}, which is not complete: copy it again.")
            left_out += others
            add(number, f"{as_text(name)[:-4]}/", inside)
    table = np.array(extents, dtype=np.int64).reshape(-1, 3)  # tar number, first byte, size

    def read(index: int) -> bytes:
        number, offset, size = table[index].tolist()
        with open(tars[number], "rb") as file:
            return os.pread(file.fileno(), size, offset)

    folder = path if path.is_dir() else path.parent
    title = clean(tars[0].stem if len(tars) == 1 else folder.resolve().name)
    return Listing(names, read, shown, path, title, len(tars), left_out, table[:, 0])
