"""What a stopped compilation leaves in torch's cache is removed."""

import shutil
import subprocess

import pytest
from filelock import FileLock
from forked import Life

from runtime.libraries import remove_unfinished_libraries


def test_an_unfinished_library_is_removed_unless_a_running_process_writes_it(tmp_path, monkeypatch, capsys):
    if not (compiler := shutil.which("c++")):
        pytest.skip("there is no compiler here")
    file = tmp_path / "x.so"
    subprocess.run([compiler, "-shared", "-xc++", "-", "-o", file], input=b"int x() { return 1; }", check=True)
    library = file.read_bytes()  # as the linker writes it
    for name, part in {"a/whole.main.so": library, "b/empty.main.so": b"", "b/half.so": library[: len(library) // 2],
                       "c/begun.main.so": bytes(len(library)), "d/written.main.so": b"", "e/x.py": b""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(part)
    (tmp_path / "locks").mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with FileLock(tmp_path / "locks/written.lock"):
        assert "had left 3 unfinished" in Life(remove_unfinished_libraries).wait().printed
    assert {path.name for path in tmp_path.glob("?/*")} == {"whole.main.so", "written.main.so", "x.py"}
    remove_unfinished_libraries()
    assert "had left 1 unfinished" in capsys.readouterr().out and not (tmp_path / "d/written.main.so").exists()
