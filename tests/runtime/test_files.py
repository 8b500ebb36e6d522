"""A file written by atomic_write is the old or the new, whenever a process is killed; rows are appended in full."""

import itertools
import signal

import pytest
from conftest import PATIENCE
from filelock import FileLock
from forked import Changes, Life, killing

from runtime.files import append_row, atomic_write, lock_folder


def fill(folder, text: str) -> None:
    for name in ("a", "sub/b"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_a_kill_at_any_change_leaves_the_old_folder_or_the_new(tmp_path):
    contents = []
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
        contents.append(content)
        if ended.code == 0:
            break
    assert len(contents) > 8 and {*contents} == {"old", "new"} and contents == sorted(contents, reverse=True)
    assert [path.name for path in place.iterdir()] == ["out"]


@pytest.mark.parametrize(("before", "kept"), [
    ("", ""), ('{"a": 1}\n', '{"a": 1}\n'), ('{"a": 1}\n{"b": {"c": 2}', '{"a": 1}\n'), ('{"a"', ""),
    ('{"a": 1}', '{"a": 1}\n'), ("somebody's notes", "somebody's notes\n"),
])
def test_a_row_replaces_one_that_a_kill_has_cut_short_and_nothing_else(tmp_path, before, kept):
    (tmp_path / "rows.jsonl").write_text(before)
    append_row(tmp_path / "rows.jsonl", {"d": 3})
    assert (tmp_path / "rows.jsonl").read_text() == kept + '{"d": 3}\n'


def test_a_process_gets_the_lock_of_a_folder_again_and_another_process_does_not(tmp_path):
    first = lock_folder(tmp_path, "mistake")
    assert lock_folder(tmp_path, "mistake") is first  # as where a notebook resumes a run that it still refers to

    def live() -> None:
        FileLock(tmp_path / ".lock").acquire(timeout=0)

    assert "Timeout" in Life(live).wait(PATIENCE).printed
