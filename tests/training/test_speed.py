"""What a stopped compilation leaves unfinished in torch's cache is removed, and nothing else."""

import shutil
import sysconfig
from pathlib import Path

import pytest
from filelock import FileLock
from forked import Life

from training.speed import is_complete, remove_unfinished_libraries

LIBRARY = next(Path(sysconfig.get_path("platstdlib"), "lib-dynload").glob("*.so"), None)


@pytest.mark.skipif(LIBRARY is None, reason="Python has no shared library here")
def test_an_unfinished_library_is_removed_unless_a_running_process_writes_it(tmp_path, monkeypatch, capsys):
    content = LIBRARY.read_bytes()
    for name, part in {"a/whole.main.so": content, "b/empty.main.so": b"", "b/half.so": content[: len(content) // 2],
                       "c/begun.main.so": bytes(len(content)), "d/written.main.so": b"", "e/x.py": b""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(part)
    (tmp_path / "locks").mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with FileLock(tmp_path / "locks/written.lock"):
        assert "had left 3 unfinished" in Life(remove_unfinished_libraries).wait(100).printed
    assert {path.name for path in tmp_path.glob("?/*")} == {"whole.main.so", "written.main.so", "x.py"}
    remove_unfinished_libraries()
    assert "had left 1 unfinished" in capsys.readouterr().out and not (tmp_path / "d/written.main.so").exists()


@pytest.mark.skipif(LIBRARY is None, reason="Python has no shared library here")
def test_no_part_of_a_library_counts_as_complete(tmp_path):
    content, part = LIBRARY.read_bytes(), tmp_path / "x.so"
    shutil.copy(LIBRARY, part)
    assert is_complete(part)
    for size in range(0, len(content), max(1, len(content) // 100)):
        part.write_bytes(content[:size])
        assert not is_complete(part)
