"""Optimizers: which weights Muon takes, its steps, skipped steps, and what a checkpoint holds of them."""

import os
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from test_sharding import all_well, fork
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import train
from blocks import BLOCKS
from dit import DiT
from runtime import ranks, sharding
from training import optimizers
from training.optimizers import build_optimizer, optimizer_tensors, step_unless

SETTINGS = dict(lr=0.01, matrix_lr=0.05, momentum=0.9, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1)


def tiny(block: str = "dit", seed: int = 0) -> DiT:
    torch.manual_seed(seed)
    return DiT(input_size=4, in_channels=3, hidden_size=16, depth=2, num_heads=2, num_classes=3, init="xavier",
               block=block)


def fill_gradients(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def weights_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("block", BLOCKS)
def test_muon_steps_by_torchs_own_in_the_linear_layers_of_blocks_and_elsewhere_by_adamw_each_at_its_rate(
        block, monkeypatch):
    monkeypatch.setattr(optimizers, "multiplies_bf16", lambda device: True)  # as torch's Muon does everywhere
    net, other = tiny(block), tiny(block)
    for each in (net, other):
        each.extra = nn.Linear(3, 3)  # as what an objective trains beside it
    other.load_state_dict(net.state_dict())
    optimizer = build_optimizer(dict(net.named_parameters()), "muon", **SETTINGS)
    matrices = {f"blocks.{name}.weight": layer.weight for name, layer in other.blocks.named_modules()
                if isinstance(layer, nn.Linear)}
    rest = {name: p for name, p in other.named_parameters() if name not in matrices}
    torchs = [torch.optim.AdamW(rest.values(), lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, fused=True),
              torch.optim.Muon(matrices.values(), lr=0.05, momentum=0.9, weight_decay=0.1,
                               adjust_lr_fn="match_rms_adamw")]
    before = weights_of(net)
    for step in range(3):
        train.set_learning_rates(optimizer, step, 9, warmup_steps=2, schedule="constant")
        scale = min(1.0, (step + 1) / 2)
        for each, lr in zip(torchs, (0.01, 0.05), strict=True):
            each.param_groups[0]["lr"] = scale * lr
        for each in (net, other):
            fill_gradients(each, step)
        for each in (optimizer, *torchs):
            each.step()
    ours = weights_of(net)
    assert all(torch.equal(ours[name], p) for name, p in rest.items())
    for name, p in matrices.items():
        assert (ours[name] - p).norm() <= 2**-6 * (p - before[name]).norm(), name
        assert torch.equal(optimizer.state[net.get_parameter(name)]["momentum_buffer"],
                           torchs[1].state[p]["momentum_buffer"])


class Calls(TorchDispatchMode):
    """Counts operations by namespace."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.namespace] += 1
        return function(*args, **(kwargs or {}))


def steps_by_muon(folder: Path, kind: str) -> None:
    """Takes three steps in float64, the second one skipped, and saves a rank's weights and the exchanges of a step."""
    if kind != "alone":
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    net = DiT(input_size=4, in_channels=3, hidden_size=12, depth=3, num_heads=2, num_classes=3, init="xavier",
              mlp_ratio=0.5).double()  # of the 6 rows of fc1 the last of four ranks has none
    if kind == "shards":
        sharding.shard(net, torch.device("cpu"), torch.float64)
    optimizer, generator = build_optimizer(dict(net.named_parameters()), "muon", **SETTINGS), torch.Generator()
    for seed, skipped in enumerate((False, True, False)):
        generator.manual_seed(seed)
        for p in net.parameters():
            gradient = torch.randn(p.shape, dtype=p.dtype, generator=generator)
            p.grad = sharding.local_shard(gradient * (float("nan") if skipped else 1), like=p)
        with Calls() as calls:
            step_unless(torch.tensor(skipped), optimizer)
    saved = {name: sharding.gather_full(p.detach()) for name, p in net.named_parameters()}
    torch.save((saved, calls.counts["c10d"]), folder / f"{kind}-{os.environ.get('RANK', 0)}")
    ranks.leave_group()


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_divide_muons_matrices_and_step_as_one_rank_does_with_replicas_and_with_shards(world, tmp_path):
    steps_by_muon(tmp_path, "alone")
    all_well(fork(world, *(partial(steps_by_muon, tmp_path, kind) for kind in ("replicas", "shards"))))
    (alone, none), *others = (torch.load(tmp_path / name, weights_only=True) for name in (
        "alone-0", *(f"{kind}-{rank}" for kind in ("replicas", "shards") for rank in range(world))))
    shapes = {p.shape for name, p in alone.items() if optimizers.is_matrix(name, p)}
    assert [count for _, count in others] == world * [len(shapes)] + world * [2 * len(shapes)] and none == 0
    for weights, _ in others:
        for name, p in alone.items():
            torch.testing.assert_close(weights[name], p, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("make", [lambda p: torch.optim.AdamW(p, fused=True), lambda p: build_optimizer(
    dict(zip(("blocks.0.weight", "blocks.0.bias"), p, strict=True)), "muon", **SETTINGS)], ids=["adamw", "muon"])
def test_a_skipped_step_changes_nothing_even_the_first_and_even_if_it_is_saved(make):
    one, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    other.load_state_dict(one.state_dict())
    both = [(net, make(net.parameters())) for net in (one, other)]
    for seed, skipped in enumerate((True, True, False, True, False)):
        for net, optimizer in both[: 1 if skipped else 2]:
            fill_gradients(net, seed)
            if skipped:
                one.weight.grad.fill_(float("nan"))
            step_unless(torch.tensor(skipped), optimizer)
            optimizer_tensors(dict(net.named_parameters()), optimizer)  # as a save does, before the state begins, too
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_muon_under_a_gradient_scaler_skips_without_reading_the_flag(monkeypatch):
    net, scaler = tiny(), torch.amp.GradScaler("cpu")
    optimizer = build_optimizer(dict(net.named_parameters()), "muon", **SETTINGS)
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: pytest.fail("a step waits for the device"))
    for value, changes in ((float("inf"), False), (1.0, True)):
        before = weights_of(net)
        scaler.scale(torch.zeros(()))  # begins
        for p in net.parameters():
            p.grad = torch.full_like(p, value)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert any(not torch.equal(p, before[name]) for name, p in net.named_parameters()) == changes
