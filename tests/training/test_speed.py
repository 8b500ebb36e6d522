"""How a network is replicated over ranks."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from training import speed


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
