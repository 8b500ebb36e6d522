"""Objectives: what holds for all, version 1's loss, the losses of the page, what is trained, hidden states."""

import re
from functools import partial

import pytest
import torch
from conftest import ROOT
from test_published_parity import wave
from training_runs import assert_resumes, end_of, rows, train_here, trained

import objectives
from dit import DiT
from edm import EDM
from objectives import DiffusionLoss, Objective, build_objective, trained_parameters
from objectives.hidden import take_hidden
from objectives.version1 import Version1
from rf import RF
from routing_module import Route, Router
from training.speed import compile_blocks
from weights import checkpoint as checkpoints
from weights import lora as adapters

ROUTED = [Route(1, 2, 0.5)]


# ---- what the tests of all objectives share -------------------------------------------------------------------------


def objective_of(name, routes=(), depth=4, shapes=None, **settings):
    """An objective around EDM's loss of a small network, with a teacher's tokens or the arrays of `shapes`."""
    return build_objective(network(routes, depth), EDM(), {name: settings},
                           array_shapes=shapes or {"teacher": (16, 12)})


def network(routes=(), depth=4):
    torch.manual_seed(2)
    return DiT(input_size=8, in_channels=3, hidden_size=32, depth=depth, num_heads=2, num_classes=5, init="xavier",
               routes=routes)


def batch():
    generator = torch.Generator().manual_seed(3)
    x, teacher = (torch.randn(shape, generator=generator) for shape in ((4, 3, 8, 8), (4, 16, 12)))
    return x, torch.arange(4), (teacher + 2).half()


def loss_of(objective, **arrays):
    """The loss of each sample and its terms, with the draws of a seed, as in a step."""
    x, y, teacher = batch()
    torch.manual_seed(5)
    return objective(x, y, **(arrays or dict.fromkeys(objective.own_arrays, teacher)))


def plain_loss(routes=()):
    (x, y, _), objective = batch(), DiffusionLoss(network(routes), EDM())
    torch.manual_seed(5)
    return objective(x, y)[0]


def published_loss(objective, theirs, **arrays):
    """The loss of each sample and its terms on the published side's inputs, noise levels and noise."""
    objective.diffusion.draw = lambda x: (torch.tensor(theirs["t"]), wave(theirs["shape"], 1, 1.4))
    return objective(wave(theirs["shape"], amplitude=0.7), torch.tensor(theirs["y"]), **arrays)


def with_places(objective) -> dict:
    """What each block returned and where its tokens lie, as a second pair of eyes sees it."""
    seen = {}
    for i, block in enumerate(objective.net.blocks):
        block.register_forward_hook(lambda _, args, output, i=i: seen.update({i: (output, args[2])}))
    return seen


# ---- what holds for all ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "aligned", "dispersed", "synced"), [
    (28, 7, 6, (7, 15)), (24, 7, 5, (7, 15)), (12, 3, 2, (3, 7)), (6, 1, 0, (1, 3)), (2, 0, 0, (0, 1))])
def test_the_default_blocks_are_the_papers_or_at_their_share_of_the_depth(depth, aligned, dispersed, synced):
    dispersive, sync = (objective_of(name, depth=depth) for name in ("dispersive", "layer_sync"))
    assert objective_of("alignment", depth=depth).blocks == [aligned]
    assert (dispersive.block, dispersive.weight, dispersive.temperature) == (dispersed, 0.5, 0.5)
    assert (sync.block, sync.deeper, sync.weight) == (*synced, 0.2)


@pytest.mark.parametrize(("name", "routes", "settings", "says"), [
    ("version2", [], {}, "there is no objectives/version2.py; choose one of"),
    ("alignment", [], dict(shapes={"teacher": (12, 4, 4)}), r"its rows have the shape \(12, 4, 4\)"),
    ("dispersive", [], dict(block=4), "Block 4 is not in this network, which has 4 blocks"),
    ("dispersive", ROUTED, dict(block=-2), "block -2 lies on route 1→2 .*pooled=true"),
    ("layer_sync", [], dict(block=2, deeper=2), "deeper=2 does not come after block 2"),
    ("layer_sync", [], dict(block=-1), "does not come after block -1"),
    ("layer_sync", [], dict(deeper=9), "Block 9 is not in this network"),
    ("layer_sync", [Route(0, 1, 0.5), Route(2, 3, 0.5)], dict(block=1, deeper=2),
     "block 1 lies on route 0→1 .* and block 2 on 2→3"),
])
def test_settings_and_arrays_that_do_not_fit_raise_a_one_line_error(name, routes, settings, says):
    with pytest.raises(ValueError, match=says):
        objective_of(name, routes, **settings)


# ---- version 1 ------------------------------------------------------------------------------------------------------


def routed_net():
    torch.manual_seed(2)
    return DiT(input_size=8, in_channels=3, hidden_size=32, depth=6, num_heads=2, num_classes=5, init="xavier",
               routes=[Route(0, 1, 0.5, x_T=1.0), Route(3, 4, 0.25, x_T=1.0)])


def plain(net, diffusion=None):
    """The diffusion's loss with the signature of `Version1.loss`."""
    diffusion = diffusion or EDM()
    return lambda x, y, weight, mask_noise, **how: diffusion.loss(net, x, y, net.routes, weight=weight,
                                                                  mask_noise=mask_noise, **how)


def version1(net, mae_weight=0.0):
    return Version1(DiffusionLoss(net, EDM()), mae_weight).loss


def loss_and_output_gradient(loss_of, net, mask_noise, weight=1.0, **how):
    """Each sample's loss, and its gradient in the network's output."""
    outputs = []
    hook = net.register_forward_hook(lambda *args: outputs.append(args[2]))
    torch.manual_seed(3)
    loss = loss_of(torch.randn(4, 3, 8, 8), torch.arange(4), torch.as_tensor(weight), mask_noise, **how)
    hook.remove()
    return loss, torch.autograd.grad(loss.sum(), outputs[0])[0]


def stays(noise, ratio):
    """Which pixels belong to patches that stay: (B, 1, 8, 8) bool for patches of side 2."""
    ids = Router().get_mask(torch.empty(4, 16, 1), ratio, noise)
    kept = torch.zeros(4, 16, dtype=torch.bool).scatter(1, ids, True)
    return kept.view(4, 1, 4, 4).repeat_interleave(2, 2).repeat_interleave(2, 3)


def test_the_loss_of_version_1_covers_the_patches_of_kept_tokens():
    net, noise = routed_net(), torch.rand(4, 2, 16)
    _, gradient = loss_and_output_gradient(version1(net), net, noise)
    weight = sum(stays(noise[:, r], route.selection_ratio) / (2 * 16 * (1 - route.selection_ratio))
                 for r, route in enumerate(net.routes))
    assert ((gradient != 0) == (weight > 0)).all(), "patches that left count, or kept ones do not"
    _, everywhere = loss_and_output_gradient(plain(net), net, noise, sigma=torch.ones(4))
    _, kept = loss_and_output_gradient(version1(net), net, noise, sigma=torch.ones(4))
    torch.testing.assert_close(kept, everywhere * 16 * weight)  # where all patches count, each has 1/16


def test_version_1_hands_the_network_the_masks_that_its_loss_counts():
    net, handed = routed_net(), []
    net.register_forward_pre_hook(lambda _, args, kwargs: handed.append(kwargs["mask_noise"]), with_kwargs=True)
    objective = Version1(DiffusionLoss(net, EDM()))
    objective.loss = lambda x, y, weight, mask_noise, loss=objective.loss: (
        handed.append(mask_noise) or loss(x, y, weight, mask_noise))
    objective(torch.randn(4, 3, 8, 8), torch.arange(4))
    assert torch.equal(*handed) and handed[0].shape == (4, 2, 16)


def test_the_auxiliary_term_teaches_the_patches_that_left_alone():
    net, noise = routed_net(), torch.rand(4, 2, 16)
    (_, without), (_, with_term) = (loss_and_output_gradient(version1(net, w), net, noise) for w in (0.0, 0.5))
    left_once = ~(stays(noise[:, 0], 0.5) & stays(noise[:, 1], 0.25))
    assert ((with_term != without) == left_once).all()


@pytest.mark.parametrize("loss_of", [plain, partial(version1, mae_weight=0.1), lambda net: plain(net, RF())],
                         ids=["edm", "version1", "rf"])
def test_a_masked_loss_has_no_gradient_where_the_mask_is_zero_and_all_of_it_where_it_is_one(loss_of):
    net, noise, half = routed_net(), torch.rand(4, 2, 16), torch.ones(1, 1, 8, 8)
    half[..., :4] = 0
    loss, gradient = loss_and_output_gradient(loss_of(net), net, noise)
    masked_loss, masked = loss_and_output_gradient(loss_of(net), net, noise, half)
    assert (masked[..., :4] == 0).all() and (masked[..., 4:] != 0).any()
    torch.testing.assert_close(masked[..., 4:], gradient[..., 4:])
    ones, _ = loss_and_output_gradient(loss_of(net), net, noise, torch.ones(4, 1, 1, 1))
    assert torch.equal(ones, loss) and (masked_loss < loss).all()


def test_version_1_replaces_the_plain_loss_and_comes_first():
    with pytest.raises(ValueError, match="so it must come first"):
        Version1(Objective(DiffusionLoss(routed_net(), EDM())))


# ---- a loss of one's own: the one that CONTRIBUTING.md shows


@pytest.fixture(scope="module", autouse=True)
def page(tmp_path_factory):
    """The lines of the page, as objectives/probe.py, and around them a loss with a teacher and one that fails."""
    folder = tmp_path_factory.mktemp("objectives")
    [code] = re.findall(r"```python\n(\"\"\"A linear probe.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 30
    (folder / "probe.py").write_text(code)
    [huber] = re.findall(r"```python\n(\"\"\"Huber's loss.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    (folder / "huber.py").write_text(huber)
    (folder / "taught.py").write_text(TAUGHT)
    objectives.__path__.append(str(folder))
    yield code
    objectives.__path__.remove(str(folder))


TAUGHT = """
import torch
from torch import nn
from objectives.diffusion import Objective

class Taught(Objective):
    def __init__(self, inner, bad_step: int = -1):
        super().__init__(inner)
        self.teacher = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)
        self.shift, self.calls, self.bad_step = nn.Parameter(torch.ones(3)), 0, bad_step
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, y, **arrays):
        loss, terms = self.inner(x, y, **arrays)
        self.calls += 1
        self.seen += len(x)
        bad = self.shift.sum() * float("nan") if self.calls == self.bad_step else 0.0
        return loss + self.shift.square().sum() + bad, terms
"""
PROBE = "+objective.probe.weight=0.1"


def test_the_pages_loss_trains_is_logged_and_resumes_bit_for_bit(shapes, tmp_path):
    assert "  probe " in assert_resumes(tmp_path, shapes, PROBE, stops=(3,), end=6)
    assert all(row["loss_probe"] > 0 for row in rows(tmp_path / "whole"))
    end = end_of(tmp_path / "whole")
    assert end["model"].keys() == end["ema"].keys() and not any("head" in key for key in end["model"])
    head = {key for key in end["training"] if "head" in key}
    assert {"objective.head.weight", "objective.head.weight.exp_avg", "objective.head.bias.step"} <= head
    refused = train_here(tmp_path / "whole", shapes, "steps=9")
    assert refused.returncode == 1 and "was trained with another objective" in refused.stderr


def test_the_pages_loss_on_the_prediction_trains_and_is_edms_own_where_errors_are_small(shapes, tmp_path):
    trained(tmp_path / "run", shapes, "+objective.huber.delta=0.5", "steps=2", "log.every=1")
    assert all(0 < row["loss"] < 9 for row in rows(tmp_path / "run"))
    net, (x, y) = routed_net(), (0.1 * torch.randn(4, 3, 8, 8), torch.arange(4))
    own, losses = DiffusionLoss(net, EDM(), keep_masked=True), {}  # which draws the masks first, too
    huber = {delta: objectives.class_of("huber")(own, delta) for delta in (1e3, 1e-3)}
    for name, objective in {"edm": own, **huber}.items():
        torch.manual_seed(0)
        losses[name], _ = objective(x, y, weight=torch.zeros(4, 1, 8, 8) + 0.4)
    torch.testing.assert_close(2 * losses[1e3], losses["edm"])
    assert (losses[1e-3] < 0.01 * losses["edm"]).all()


def test_frozen_weights_are_neither_saved_nor_treated_as_an_adapter_and_a_nan_skips_the_step(shapes, tmp_path):
    for name, bad in {"good": -1, "bad": 2}.items():
        trained(tmp_path / name, shapes, f"+objective.taught.bad_step={bad}", "steps=3", "log.every=1",
                "checkpoint.every=1", "checkpoint.keep_last=9")
    end = end_of(tmp_path / "good")["training"]
    own = {key for key in end if key.startswith("objective.") and key.count(".") == 1}
    assert own == {"objective.shift", "objective.seen"}
    assert not any("teacher" in key for key in end) and end["objective.seen"] == 24
    assert [row["skipped"] for row in rows(tmp_path / "bad")] == [0, 1, 1] and rows(tmp_path / "bad")[1]["loss"] is None
    first, second = (checkpoints.load(checkpoints.step_folder(tmp_path / "bad", step), "training") for step in (1, 2))
    moved = {key for key in first if not torch.equal(first[key], second[key])}
    assert moved == {"objective.seen", "sums"}


def test_a_frozen_part_of_the_network_is_saved_with_it():
    net = routed_net()
    net.y_embedder.requires_grad_(False)
    assert adapters.tensors(net).keys() == net.state_dict().keys()
    trained = trained_parameters(DiffusionLoss(net, EDM()))
    assert trained.keys() == {name for name in net.state_dict() if not name.startswith(("y_embedder", "pos_embed"))}


@pytest.mark.parametrize("how", [False, True])
def test_hidden_states_are_those_of_the_kept_tokens_compiled_or_not(graphs, how):
    net, noise = routed_net(), torch.rand(4, 2, 16)
    whole = []
    net.blocks[1].register_forward_hook(lambda _, args, output: whole.append((output, args[2])))
    hidden = take_hidden(net, [1, 2])
    compile_blocks(net, how)
    for seed in (0, 1):
        torch.manual_seed(seed)
        whole.clear()
        out = net(torch.randn(4, 3, 8, 8), torch.rand(4), torch.arange(4), routes=net.routes, mask_noise=noise)
        ids = Router().get_mask(torch.empty(4, 16, 1), 0.5, noise[:, 0])
        tokens, positions = hidden[1]
        assert torch.equal(positions, ids) and tokens.shape == (4, 8, 32) and torch.equal(tokens, whole[0][0])
        assert hidden[2][0].shape == (4, 16, 32) and hidden[2][1].tolist() == [[*range(16)]]
        [gradient] = torch.autograd.grad(tokens.sum(), [net.x_embedder.proj.weight], retain_graph=True)
        assert gradient.abs().sum() > 0 and out.shape == (4, 3, 8, 8)
