"""What goes wrong with files, as functions that change a folder or a file, given its path; and how it is refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import change_record

from runtime.files import sha256

Change = Callable[[Path], object]


def as_it_is(path: Path) -> None:
    """Changes nothing: the file is wrong for its use."""


def gone(*names: str) -> Change:
    return lambda path: [(path / name).unlink() for name in names]


def cut(name: str = "", share: float = 0.5) -> Change:
    """Keeps the first part of a file, as a download that was stopped."""
    return lambda path: os.truncate(path / name, int(share * (path / name).stat().st_size))


def put(name: str, content: bytes | str) -> Change:
    """Writes something else in the place of a file."""
    return lambda path: (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def array(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Changes the values of an npy."""
    return lambda path: np.save(path / name, change(np.load(path / name)))


def record(**changes) -> Change:
    """Changes what the metadata.json of a latent folder says."""
    return lambda path: change_record(path, **changes)


def without_hashes(path: Path) -> None:
    """Removes the hashes of a latent folder's files, as in one that another tool wrote without them."""
    shards = json.loads((path / "metadata.json").read_text())["shards"]
    change_record(path, shards=[{key: value for key, value in shard.items() if key != "sha256"} for shard in shards])


def with_new_hashes(path: Path) -> None:
    """Records the hashes of a latent folder's files as they are now, as in one that was prepared anew."""
    shards = json.loads((path / "metadata.json").read_text())["shards"]
    change_record(path, shards=[shard | {"sha256": {name: sha256(path / name) for name in shard["sha256"]}}
                                for shard in shards])


def both(*changes: Change) -> Change:
    return lambda path: [change(path) for change in changes]


def refused(call: Callable[[], object], *words: str) -> None:
    """Calls what must raise an error of one line, which has all of the words."""
    with pytest.raises((ValueError, OSError)) as error:
        call()
    said = str(error.value)
    assert "\n" not in said and all(word in said for word in words), said
