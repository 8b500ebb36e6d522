"""A file written by atomic_write is the old or the new, whenever a process is killed; rows are appended in full."""

import itertools
import os
import shutil
import signal
from unittest.mock import Mock

import pytest
from filelock import FileLock
from forked import Changes, Life, killing

from runtime.files import append_row, atomic_write, lock_folder, read_rows, remove_leftovers, write_text
from training.run_folder import discard_after


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

        ended = Life(live).wait()
        assert ended.code in (0, -signal.SIGKILL), ended.printed
        # Between two renames the old one is there by another name.
        [folder] = [place / "out"] if (place / "out").is_dir() else place.glob(".out.*.old.tmp")
        [content] = {(folder / name).read_text() for name in ("a", "sub/b")}    # of one kind
        contents.append(content)
        if ended.code == 0:
            break
    assert len(contents) > 8 and {*contents} == {"old", "new"} and contents == sorted(contents, reverse=True)
    assert [path.name for path in place.iterdir()] == ["out"]


def test_a_folder_stays_where_its_replacement_cannot_be_renamed(tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/old").touch()
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError("no")))
    with pytest.raises((OSError, ValueError), match="no"), atomic_write(tmp_path / "x") as partial:
        partial.mkdir()
    assert [str(file.relative_to(tmp_path)) for file in sorted(tmp_path.rglob("*"))] == ["x", "x/old"]


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
    assert lock_folder(tmp_path, "mistake") is first  # as where check_gpu.py resumes a run

    def live() -> None:
        FileLock(tmp_path / ".lock").acquire(timeout=0)

    assert "Timeout" in Life(live).wait().printed


def test_the_next_write_removes_what_a_killed_one_has_left_of_its_file_and_nothing_else(tmp_path):
    killed = Life(lambda: None)
    killed.wait()
    dead, others = killed.pid, [".y.npz.1.tmp", ".x.npz.tmp", f".x.npz.{os.getppid()}.tmp", "x.npz.1.tmp"]
    for name in (f".x.npz.{dead}.tmp", f".yx.npz.{dead}.tmp", *others):
        (tmp_path / name).write_text("half")
    (tmp_path / f".x.npz.{dead}.old.tmp").mkdir()  # the folder that a write was replacing, which may be the only copy
    write_text(tmp_path / "x.npz", "new")
    kept = {*others, "x.npz", f".yx.npz.{dead}.tmp", f".x.npz.{dead}.old.tmp"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    remove_leftovers(tmp_path, "*.npz")
    assert {path.name for path in tmp_path.iterdir()} == kept - {f".yx.npz.{dead}.tmp"}


def test_no_writer_of_rows_loses_the_row_of_another(tmp_path):
    path = tmp_path / "results.jsonl"

    def append(tag: int) -> None:
        for i in range(100):
            append_row(path, {"tag": tag, "i": i, "pad": "x" * 3000})

    lives = [Life(lambda tag=tag: append(tag)) for tag in range(2)]
    while any(life.returncode is None for life in lives):
        append_row(path, {"source": {"in_training": True, "step": 9}})
        discard_after(tmp_path, 5)
    assert [life.wait().code for life in lives] == [0, 0]
    rows = sorted((row["tag"], row["i"]) for row in read_rows(path))
    assert rows == [*itertools.product(range(2), range(100))]


@pytest.mark.parametrize("change", [
    lambda folder: folder.rename(folder.with_name("moved")), shutil.rmtree,
    lambda folder: [folder.rename(folder.with_name("moved")), shutil.copytree(folder.with_name("moved"), folder)],
], ids=["moved", "deleted", "replaced"])  # fmt: skip
def test_nothing_is_written_to_a_locked_folder_that_was_moved_deleted_or_replaced(tmp_path, change):
    folder = tmp_path / "run"
    (tmp_path / "here").mkdir()
    lock = lock_folder(tmp_path / "here/../run", "mistake")     # as run_dir=../run is typed
    append_row(folder / "rows.jsonl", {"a": 1})
    change(folder)
    for write in (lambda: append_row(folder / "rows.jsonl", {"a": 2}), lambda: write_text(folder / "sub/x", "x"),
                  lambda: discard_after(folder, 0)):
        with pytest.raises(ValueError, match="run was moved, deleted or replaced while this command was writing there"):
            write()
    assert not (folder / "sub").exists() and read_rows(folder / "rows.jsonl") in ([], [{"a": 1}])
    assert lock_folder(folder, "mistake") is lock and lock.is_locked  # as another run of this process
    append_row(folder / "rows.jsonl", {"a": 3})
    lock.release()
    write_text(folder / "sub/x", "x")
