"""Recorded steps train as plain ones do. A CPU has no CUDA graphs: a stand-in repeats the operations that it saw."""

import contextlib
import copy
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from test_sharding import all_well, fork
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dit import DiT
from edm import EDM
from objectives import DiffusionLoss, build_objective
from rf import RF
from routing_module import Route, RouteSchedule
from train import train_step, trained_weights, update_ema
from training import cuda_graphs, speed
from training.cuda_graphs import Recorded, record_passes
from training.optimizers import update_weights

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


class Graph:
    """Repeats on the same memory what it saw, as a CUDA graph does, and undoes what was written at first."""

    recording, replaying = None, False

    def __init__(self):
        self.seen, self.before = [], []

    def capture_begin(self, *_):
        assert Graph.recording is None
        Graph.recording = self

    @torch.no_grad()
    def capture_end(self):
        assert Graph.recording is self
        Graph.recording = None
        for tensor, value in reversed(self.before):
            tensor.data.copy_(value)    # which autograd does not take for a change
        self.before = []

    @torch.no_grad()
    def replay(self):
        Graph.replaying = True
        for function, args, kwargs, out in self.seen:
            for before, now in zip(tree_leaves(out), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(now, torch.Tensor) and now.data_ptr() != before.data_ptr():
                    before.copy_(now)
        Graph.replaying = False


class Stream(TorchDispatchMode):
    """What runs on it is recorded while a graph is."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        graph, kwargs = Graph.recording, kwargs or {}
        if graph is not None and function._schema.is_mutable:
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            graph.before += [(tensor, tensor.clone()) for tensor in tensors]
        out = function(*args, **kwargs)
        if graph is not None:
            graph.seen.append((function, args, kwargs, out))
        return out


@contextlib.contextmanager
def capture(graph, *_, **__):
    with Stream():
        graph.capture_begin()
        yield
        graph.capture_end()


def stand_in(patch):
    """Makes torch's CUDA graphs the stand-in; returns weak references to those that are made."""
    Graph.recording, Graph.replaying = None, False
    made, stream, fork_rng = [], SimpleNamespace(wait_stream=lambda other: None), torch.random.fork_rng

    def make():
        graph = Graph()
        made.append(weakref.ref(graph))
        return graph

    for name, value in {
        "CUDAGraph": make, "Stream": lambda: stream, "graph": capture, "graph_pool_handle": lambda: None,
        "current_stream": lambda: stream, "stream": lambda _: Stream(),
    }.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch.random, "fork_rng", lambda _: fork_rng([]))
    return made


@pytest.fixture
def recordings(monkeypatch):
    return stand_in(monkeypatch)


def trained(recorded, num_parts=1, precision="no", copies=None, after=lambda called: None, **schedule):
    """Six steps; returns their losses, gradient norms and more, and the weights."""
    torch.manual_seed(0)
    net = DiT(**TINY, routes=[Route(1, 2, 0.5)])
    objective = Counting(net, EDM(), schedule=RouteSchedule(net.routes, **schedule))
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=num_parts)
    called = Recorded(objective, num_parts > 1 if copies is None else copies) if recorded else objective
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "DDP", lambda *arguments, **options: speed.nn.parallel.DistributedDataParallel(
            *arguments, **options | {"bucket_cap_mb": 0.02}))
        called = speed.replicate(accelerator, called)
    after(called)
    optimizer = accelerator.prepare(torch.optim.AdamW(net.parameters(), lr=2**-10, fused=True))
    update = update_weights
    if recorded and num_parts == 1:
        update = partial(update_weights, replay=cuda_graphs.RecordedUpdate(optimizer))
    rows = []
    for objective.step in range(6):
        torch.manual_seed(2 * objective.step + accelerator.process_index)
        x, weight = torch.randn(4, 4, 8, 8), torch.rand(4)
        [group] = optimizer.param_groups
        group["lr"] = 2.0 ** -(10 + objective.step)     # exact in float32
        weight[0] = torch.nan if objective.step == 2 else weight[0]     # a step that is skipped
        row = train_step(accelerator, called, objective, optimizer, x, torch.arange(4), {"weight": weight},
                         label_dropout=0.5, clip_norm=1.0, num_parts=num_parts, update=update)
        rows.append(row)
    rows = torch.stack([torch.stack([*row[:3], *row[3]]) for row in rows])
    return rows.nan_to_num(-1.0).tolist(), [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize(("schedule", "num_parts", "precision"), [      # each pair of them
    ({}, 1, "no"), ({}, 2, "bf16"), ({"dense_after": 3}, 1, "bf16"), ({"dense_after": 3}, 2, "no"),
    ({"selection_ratios": (0.25, 0.5, 0.75)}, 1, "no"), ({"selection_ratios": (0.25, 0.5, 0.75)}, 2, "bf16")])
def test_recorded_steps_are_plain_ones_bit_for_bit(recordings, fresh_accelerator, num_parts, schedule, precision):
    rows, weights = trained(False, num_parts, precision, **schedule)
    recorded_rows, recorded_weights = trained(True, num_parts, precision, **schedule)
    assert recorded_rows == rows
    assert all(torch.equal(*pair) for pair in zip(weights, recorded_weights, strict=True))
    # One of the forward pass and one of the backward pass for each phase, and one of the update for their gradients.
    phases = {"dense_after": 2, "selection_ratios": 4}.get(next(iter(schedule), None), 2)
    assert len(recordings) == 2 * phases + (num_parts == 1) * min(phases, 2)


def nodes(losses):
    """All nodes of the graph of autograd that ends in these losses."""
    seen, waiting = set(), [losses.grad_fn]
    while waiting:
        node = waiting.pop()
        if node not in seen and node is not None:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return seen


def compare_with_ddp():
    """Trains plainly and recorded on this rank of two; checks what a graph reaches, and when gradients are sent."""
    events, grad, plain_replay = [], torch.autograd.grad, Graph.replay

    def reaches_ddp(losses):
        return any("of DDP" in node.metadata for node in nodes(losses))

    def send(_, bucket):
        events.append("sent")
        sent = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
        return sent.then(lambda done: done.value()[0])

    def watch(called):
        called.register_comm_hook(None, send)
        called.register_forward_pre_hook(lambda *_: events.clear())
        for p in called.parameters():
            p.view_as(p).grad_fn.next_functions[0][0].metadata["of DDP"] = True
        if isinstance(called.module, Counting):
            assert reaches_ddp(called.module(torch.randn(4, 4, 8, 8), torch.arange(4), torch.rand(4))[0])
            called.module.seen.zero_()

    def checked_grad(losses, *args, **keywords):
        assert not reaches_ddp(losses)
        return grad(losses, *args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        patch.setattr(Graph, "replay", lambda graph: (events.append("replayed"), plain_replay(graph)))
        patch.setattr(torch.autograd, "grad", checked_grad)
        patch.setattr(cuda_graphs, "STRETCH", 40_000)
        for num_parts in (1, 2):
            rows, weights = trained(False, num_parts, after=watch, dense_after=3)
            recorded_rows, recorded_weights = trained(True, num_parts, after=watch, dense_after=3)
            assert recorded_rows == rows
            assert all(torch.equal(*pair) for pair in zip(weights, recorded_weights, strict=True))
            # Of the last pass: the update's replay comes after all have been sent, and several before.
            assert events.pop() == ("replayed" if num_parts == 1 else "sent"), events
            assert events[events.index("sent"):].count("replayed") > 3, events


def test_on_two_ranks_no_graph_reaches_ddps_nodes_and_gradients_are_sent_between_replays():
    all_well(fork(2, compare_with_ddp))


def test_passes_whose_routes_have_ended_are_freed_before_others_are_recorded(recordings):
    net, alive = DiT(**TINY, routes=[Route(1, 2, 0.5)]), []
    objective = DiffusionLoss(net, EDM(), schedule=RouteSchedule(net.routes, dense_after=2))
    objective.register_forward_pre_hook(lambda *_: alive.append(sum(graph() is not None for graph in recordings)))
    called = Recorded(objective, copies=False)
    for objective.step in range(4):
        called(torch.randn(2, 4, 8, 8), torch.arange(2))[0].mean().backward()
    assert alive == 8 * [1] and len(recordings) == 4  # the one that is about to be recorded


@pytest.mark.parametrize(("diffusion", "name"), [(EDM(), None), (EDM(), "version1"), (RF(), "alignment")])
def test_an_objective_holds_nothing_of_what_was_recorded(monkeypatch, recordings, diffusion, name):
    net, graphs = DiT(**TINY, routes=[Route(1, 2, 0.5)]), []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graphs.append(Graph()) or graphs[-1])
    objective = build_objective(net, diffusion, {"name": name}, {"teacher": (16, 5)})
    x, y, teacher = torch.randn(2, 4, 8, 8), torch.arange(2), torch.randn(2, 16, 5)
    Recorded(objective, copies=False)(x, y, **dict.fromkeys(objective.arrays, teacher))
    recorded = {id(tensor) for graph in graphs for *_, out in graph.seen for tensor in tree_leaves(out)}
    kept = tree_leaves([vars(module) for module in objective.modules()])
    assert recorded and not [value for value in kept if isinstance(value, torch.Tensor) and id(value) in recorded]


class Host(TorchDispatchMode):
    """Counts the operations that the host starts, but for those that only make another view of a gradient."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not Graph.replaying and function is not torch.ops.aten.detach.default
        return function(*args, **kwargs or {})


def test_a_recorded_step_and_its_average_cost_the_host_a_few_operations_whatever_the_depth(
        monkeypatch, recordings, fresh_accelerator):
    counts, accelerator = [], Accelerator(cpu=True)
    for depth in (2, 5):
        net = DiT(**TINY | {"depth": depth})
        ema, objective = copy.deepcopy(net), DiffusionLoss(net, EDM())
        called = Recorded(objective, copies=False)
        optimizer = accelerator.prepare(torch.optim.AdamW(net.parameters(), fused=True))
        update = partial(update_weights, replay=cuda_graphs.RecordedUpdate(optimizer))
        average, weights = trained_weights(ema), trained_weights(net)
        with monkeypatch.context() as patch:
            for _ in range(4):
                with Host() as host:
                    train_step(accelerator, called, objective, optimizer, torch.randn(2, 4, 8, 8), torch.arange(2), {},
                               label_dropout=0.1, clip_norm=1.0, num_parts=1, update=update)
                    update_ema(average, weights, 0.9)
                patch.setattr(torch.nn.Module, "parameters", lambda self: pytest.fail("a step walks over modules"))
        counts.append(host.count)
    assert counts[0] == counts[1] < 40, counts


def test_gradients_of_several_parts_are_copies_as_a_replay_overwrites_its_own(recordings, fresh_accelerator):
    assert trained(True, 2, copies=False)[0] != trained(False, 2)[0]


def test_only_a_gpu_records_and_only_where_it_is_asked_to():
    objective, weights = DiffusionLoss(DiT(**TINY), EDM()), [torch.nn.Parameter(torch.zeros(2, 2))]
    assert record_passes(objective, "reduce-overhead", torch.device("cpu"), 1) is objective
    assert record_passes(objective, True, torch.device("cuda"), 1) is objective
    asked = {"device": "cuda", "scaler": None, "how": "reduce-overhead", "num_parts": 1, "kind": "AdamW"}
    for other in ({}, {"how": True}, {"device": "cpu"}, {"scaler": "of fp16"}, {"num_parts": 2}, {"kind": "Muon"}):
        case = SimpleNamespace(**asked | other)
        optimizer = SimpleNamespace(optimizer=getattr(torch.optim, case.kind)(weights, lr=0.1),
                                    param_groups=[{"params": weights}])
        accelerator = SimpleNamespace(device=torch.device(case.device), scaler=case.scaler)
        update = cuda_graphs.record_update(accelerator, optimizer, case.how, case.num_parts)
        assert (update is not update_weights) == (other == {})
