"""What is written by atomic_write is the old or the new, whenever a process is killed."""

import itertools
import signal

from conftest import PATIENCE
from forked import Changes, Life, killing

from runtime.files import atomic_write


def fill(folder, text: str) -> None:
    for name in ("a", "sub/b"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_a_kill_at_any_change_leaves_the_old_folder_or_the_new(tmp_path):
    found = []
    for change in itertools.count(1):
        place = tmp_path / str(change)
        fill(place / "out", "old")

        def live(place=place, change=change) -> None:
            Changes(place, killing(change, signal.SIGKILL))
            with atomic_write(place / "out") as partial:
                fill(partial, "new")

        ended = Life(live).wait(PATIENCE)
        assert ended.code in (0, -signal.SIGKILL), ended.printed
        # Between two renames the old one is there by another name.
        [folder] = [place / "out"] if (place / "out").is_dir() else place.glob(".out.*.old.tmp")
        [content] = {(folder / name).read_text() for name in ("a", "sub/b")}    # of one kind
        found.append(content)
        if ended.code == 0:
            break
    assert len(found) > 8 and {*found} == {"old", "new"} and found == sorted(found, reverse=True)
    assert [path.name for path in place.iterdir()] == ["out"]
