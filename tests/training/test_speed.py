"""How a network is replicated over ranks; what a stopped compilation leaves in torch's cache is removed."""

import shutil
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from filelock import FileLock
from forked import Life
from torch import nn

from training import speed
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


@pytest.mark.parametrize(("count", "most"), [(2**18, 25), (2**28, 1024 / 25)])  # 1 MiB and 1 GiB of gradients
def test_replicas_exchange_large_gradients_in_25_buckets_and_copy_them_in_batches(
        monkeypatch, fresh_accelerator, count, most):
    made = {}
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)  # of a single rank, too
    monkeypatch.setattr(speed, "DDP", lambda module, device_ids, gradient_as_bucket_view, bucket_cap_mb,
                        batched_grad_copy: made.update(locals()) or SimpleNamespace(module=module))
    accelerator, net = Accelerator(cpu=True), nn.Module()
    net.weight = nn.Parameter(torch.empty(count, device="meta"))
    net.frozen = nn.Parameter(torch.empty(2**30, device="meta"), requires_grad=False)
    monkeypatch.setattr(accelerator, "prepare_model", lambda module, evaluation_mode: module)
    replica = speed.replicate(accelerator, net)
    assert replica.module is net and replica.broadcast_buffers is False
    assert made["bucket_cap_mb"] == pytest.approx(most) and made["batched_grad_copy"] and made["device_ids"] is None
    assert speed.replicate(accelerator, net, sharded=True) is net
