"""Recorded passes train as plain ones do. A CPU has no CUDA graphs: a stand-in repeats the operations that it saw."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dit import DiT
from edm import EDM
from objectives import DiffusionLoss
from routing_module import Route, RouteSchedule
from train import train_step
from training.cuda_graphs import Recorded, record_passes

TINY = dict(input_size=8, patch_size=2, in_channels=4, hidden_size=32, depth=4, num_heads=2, num_classes=4)


class Counting(DiffusionLoss):
    """Counts the samples of its calls in a buffer, and multiplies the loss by an array until step 3."""

    terms = ("count",)

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.register_buffer("seen", torch.zeros(()))

    @property
    def phase(self):
        return super().phase, self.step < 3

    def forward(self, x, y, weight):
        loss, _ = super().forward(x, y)
        self.seen += len(x)
        return loss * self.seen.clone() * weight if self.step < 3 else loss, {"count": self.seen.expand(len(x))}


class Graph(TorchDispatchMode):
    """Repeats what it saw on the same memory, as a CUDA graph does, and undoes what was written at first."""

    def __init__(self):
        super().__init__()
        self.seen, self.before = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.is_mutable:
            self.before.append((args[0], args[0].clone()))
        out = function(*args, **(kwargs or {}))
        self.seen.append((function, args, kwargs or {}, out))
        return out

    def __exit__(self, *error):
        super().__exit__(*error)
        with torch.no_grad():
            for tensor, value in reversed(self.before):
                tensor.copy_(value)

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, out in self.seen:
            for before, now in zip(tree_leaves(out), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(now, torch.Tensor) and now.data_ptr() != before.data_ptr():
                    before.copy_(now)


@pytest.fixture
def recordings(monkeypatch):
    """Makes torch's CUDA graphs the stand-in; returns those that were made."""
    made = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "CUDAGraph": lambda: made.append(Graph()) or made[-1], "Stream": lambda: stream,
        "graph": lambda graph, **_: graph, "graph_pool_handle": lambda: None, "current_stream": lambda: stream,
        "stream": lambda _: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.random, "fork_rng", lambda _, fork=torch.random.fork_rng: fork([]))
    return made


def trained(recorded, num_parts, precision="no", copies=None, **schedule):
    """Six steps; returns their losses, gradient norms and the weights."""
    torch.manual_seed(0)
    net = DiT(**TINY, routes=[Route(1, 2, 0.5)])
    objective = Counting(net, EDM(), schedule=RouteSchedule(net.routes, **schedule))
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=num_parts)
    called = Recorded(objective, num_parts > 1 if copies is None else copies) if recorded else objective
    called = accelerator.prepare_model(called)
    optimizer = accelerator.prepare(torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True))
    rows = []
    for objective.step in range(6):
        torch.manual_seed(objective.step)
        x, weight = torch.randn(4, 4, 8, 8), torch.rand(4)
        loss, norm, skipped, terms = train_step(accelerator, called, objective, optimizer, x, torch.arange(4),
                                            {"weight": weight}, label_dropout=0.5, clip_norm=1.0, num_parts=num_parts)
        rows.append((loss.item(), norm.item(), skipped.item(), terms.item()))
    return rows, [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("schedule", [{}, {"dense_after": 3}, {"selection_ratios": (0.25, 0.5, 0.75)}])
def test_recorded_steps_are_plain_ones_bit_for_bit(recordings, fresh_accelerator, num_parts, schedule, precision):
    rows, weights = trained(False, num_parts, precision, **schedule)
    recorded_rows, recorded_weights = trained(True, num_parts, precision, **schedule)
    assert recorded_rows == rows
    assert all(torch.equal(*pair) for pair in zip(weights, recorded_weights, strict=True))
    assert len(recordings) == 2 * {"dense_after": 2, "selection_ratios": 4}.get(next(iter(schedule), None), 2)


def test_gradients_of_several_parts_are_copies_as_a_replay_overwrites_its_own(recordings, fresh_accelerator):
    assert trained(True, 2, copies=False)[0] != trained(False, 2)[0]


def test_only_a_gpu_records_and_only_where_it_is_asked_to():
    objective = DiffusionLoss(DiT(**TINY), EDM())
    assert record_passes(objective, "reduce-overhead", torch.device("cpu"), 1) is objective
    assert record_passes(objective, True, torch.device("cuda"), 1) is objective
