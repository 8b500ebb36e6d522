"""Labels of ILSVRC2012's validation images, numbered by sorted WordNet id, from the devkit or a list of ids."""

import io
import re
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from latents.labels import Pairs
from runtime.schema import first_line

TRUTH, META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
DEVKIT = ("data", "ILSVRC2012_devkit_t12/data", ".")  # where the two files lie in a folder
VALIDATION = re.compile(r"ILSVRC2012_val_\d{8}")
WORDNET_ID = re.compile(r"n\d{8}")


def read_validation(labels: str) -> tuple[Pairs, list[str]] | None:
    """Returns [image, class number] and all ids in order, or None if `labels` is neither the devkit nor a list of ids.

    The devkit can be its tar, its folder or the ground-truth file in it. meta.mat explains that file's class numbers.
    Raises ValueError if meta.mat is missing or damaged.
    """
    path = Path(labels)
    if path.suffix == ".txt" and path.is_file() and path.name != TRUTH:
        lines = path.read_bytes().decode("latin-1").split()
        is_list = len(lines) > 1 and all(map(WORDNET_ID.fullmatch, lines))
        return name_images(lines, {*lines}) if is_list else None
    files = read_devkit(path)
    if files is None or TRUTH not in files:
        return None
    if META not in files:
        raise ValueError(f"labels={labels} counts classes in the devkit's own order, which only its {META} explains: "
                         "set labels=ILSVRC2012_devkit_t12.tar.gz, or the unpacked folder.")
    id_of = read_meta(files[META], labels)
    numbers = files[TRUTH].split()
    if unknown := [number for number in numbers if not number.isdigit() or int(number) not in id_of]:
        raise ValueError(f"labels={labels} has the class {unknown[0].decode(errors='replace')}, which {META} does not "
                         "have: use both files of one devkit.")
    return name_images([id_of[int(number)] for number in numbers], id_of.values())


def name_images(classes: list[str], ids: Iterable[str]) -> tuple[Pairs, list[str]]:
    number_of = {name: str(number) for number, name in enumerate(sorted(ids))}
    return [(f"ILSVRC2012_val_{i:08d}", number_of[name]) for i, name in enumerate(classes, 1)], [*number_of]


def read_devkit(path: Path) -> dict[str, bytes] | None:
    """Reads the ground truth and meta.mat, whichever exist. Returns None if `path` is neither a folder nor a tar."""
    if path.name == TRUTH and path.is_file():
        path = path.parent
    if path.is_dir():
        found = {name: path / folder / name for folder in reversed(DEVKIT) for name in (TRUTH, META)
                 if (path / folder / name).is_file()}
        return {name: file.read_bytes() for name, file in found.items()}
    if not path.is_file() or not tarfile.is_tarfile(path):
        return None
    try:
        with tarfile.open(path) as tar:
            return {name: tar.extractfile(member).read() for member in tar if member.isfile()
                    and (name := member.name.rpartition("/")[2]) in (TRUTH, META)}
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"labels={path} is not a complete tar ({first_line(error)}): download it again.") from error


def read_meta(content: bytes, where: str) -> dict[int, str]:
    """Maps the devkit's class numbers to WordNet ids, leaving out groups of classes."""
    from scipy.io import loadmat

    try:
        synsets = loadmat(io.BytesIO(content), squeeze_me=True)["synsets"]
        return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets if int(row["num_children"]) == 0}
    except Exception as error:  # scipy raises a different exception for each kind of damage
        raise ValueError(f"labels={where}: {META} is not the devkit's ({first_line(error)}): download it "
                         "again.") from error
