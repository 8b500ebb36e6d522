"""Objectives: the losses of CONTRIBUTING.md, hidden states, and what is trained, saved and logged."""

import re

import pytest
import torch
from conftest import ROOT
from training_runs import assert_resumes, end_of, rows, train_here, trained

import objectives
from dit import DiT
from edm import EDM
from objectives import DiffusionLoss, build_objective, own_state, trained_parameters
from objectives.diffusion import hidden_after
from routing_module import Route, Router
from training.speed import compile_blocks
from weights import checkpoint as checkpoints

ROUTED = [Route(1, 2, 0.5)]
TWO_ROUTES = [Route(0, 1, 0.5, x_T=1.0), Route(3, 4, 0.25, x_T=1.0)]


def network(routes=(), depth=4):
    torch.manual_seed(2)
    return DiT(input_size=8, in_channels=3, hidden_size=32, depth=depth, num_heads=2, num_classes=5, init="xavier",
               routes=routes)


def objective_of(name, routes=(), depth=4, shapes=None, **settings):
    """An objective around EDM's loss of a small network, with a teacher's tokens beside the latents."""
    shapes = {"teacher": (16, 12)} if shapes is None else shapes
    return build_objective(network(routes, depth), EDM(), {"name": name, **settings}, array_shapes=shapes)


def batch():
    generator = torch.Generator().manual_seed(3)
    x, teacher = (torch.randn(shape, generator=generator) for shape in ((4, 3, 8, 8), (4, 16, 12)))
    return x, torch.arange(4), (teacher + 2).half()


def loss_of(objective, **arrays):
    """The loss of each sample and its terms, with the random numbers of a seed, as in a step."""
    x, y, teacher = batch()
    torch.manual_seed(5)
    return objective(x, y, **(arrays or dict.fromkeys(objective.arrays, teacher)))


@pytest.mark.parametrize(("name", "routes", "settings", "says"), [
    ("version2", [], {}, "there is no objectives/version2.py; choose one of alignment, .*version1"),
    ("teachers", [], {}, "there is no objectives/teachers.py"),
    ("alignment", [], dict(shapes={"teacher": (12, 4, 4)}), r"has rows of shape \(12, 4, 4\): run .*patch_size=2"),
    ("version1", [], {}, "set diffusion=edm, model.routes, and model.selection=random"),
])
def test_settings_and_arrays_that_do_not_fit_raise_a_one_line_error(name, routes, settings, says):
    with pytest.raises(ValueError, match=says):
        objective_of(name, routes, **settings)


# ---- a loss of one's own: those that CONTRIBUTING.md shows


@pytest.fixture(scope="module", autouse=True)
def page(tmp_path_factory):
    """The losses of the page as files of objectives/, and one with a buffer that can fail."""
    folder = tmp_path_factory.mktemp("objectives")
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name, start in {"probe": "A linear probe", "huber": "Huber's loss"}.items():
        [code] = re.findall(rf"```python\n(\"\"\"{start}.*?)```", text, re.DOTALL)
        assert len([line for line in code.splitlines() if line]) <= 25
        (folder / f"{name}.py").write_text(code)
    (folder / "counted.py").write_text(COUNTED)
    objectives.__path__.append(str(folder))
    yield
    objectives.__path__.remove(str(folder))


COUNTED = """
import torch
from torch import nn
from objectives.diffusion import DiffusionLoss

class Counted(DiffusionLoss):
    def __init__(self, *args, bad_call: int = -1):
        super().__init__(*args)
        self.shift, self.calls, self.bad_call = nn.Parameter(torch.ones(3)), 0, bad_call
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, y):
        loss, terms = super().forward(x, y)
        self.calls += 1
        self.seen += len(x)
        bad = self.shift.sum() * float("nan") if self.calls == self.bad_call else 0.0
        return loss + self.shift.square().sum() + bad, terms
"""


def test_the_pages_loss_trains_is_logged_and_resumes_bit_for_bit(shapes, tmp_path):
    probe = ("objective.name=probe", "+objective.weight=0.1")
    assert "  probe " in assert_resumes(tmp_path, shapes, *probe, "log.every=1")
    assert all(row["loss_probe"] > 0 for row in rows(tmp_path / "whole"))
    end = end_of(tmp_path / "whole")
    assert end["model"].keys() == end["ema"].keys() and not any("head" in key for key in end["model"])
    head = {key for key in end["training"] if "head" in key}
    assert {"objective.head.weight", "objective.head.weight.exp_avg", "objective.head.bias.step"} <= head
    for settings, says in (((), "was trained with another objective"),
                           ((*probe, "+objective.size=2"), "There is no setting size")):
        refused = train_here(tmp_path / "whole", shapes, *settings, "steps=9")
        assert refused.returncode == 1 and says in refused.stderr, refused.stderr


def test_the_pages_loss_on_the_prediction_is_edms_own_where_errors_are_small():
    edm, *huber = (build_objective(network(ROUTED), EDM(), settings) for settings in (
        {}, {"name": "huber", "delta": 1e3}, {"name": "huber", "delta": 1e-3}))
    losses = [loss_of(objective)[0] for objective in (edm, *huber)]
    torch.testing.assert_close(2 * losses[1], losses[0])
    assert (losses[2] < 0.01 * losses[0]).all()


def test_a_buffer_is_saved_and_a_nan_of_a_call_skips_its_step(shapes, tmp_path):
    for name, bad in {"good": -1, "bad": 2}.items():
        trained(tmp_path / name, shapes, "objective.name=counted", f"+objective.bad_call={bad}", "steps=3",
                "log.every=1", "checkpoint.every=1", "checkpoint.keep_last=9")
    end = end_of(tmp_path / "good")["training"]
    state = {key for key in end if key.startswith("objective.") and key.count(".") == 1}
    assert state == {"objective.shift", "objective.seen"} and end["objective.seen"] == 24
    assert [row["skipped"] for row in rows(tmp_path / "bad")] == [0, 1, 1] and rows(tmp_path / "bad")[1]["loss"] is None
    first, second = (checkpoints.load(checkpoints.step_folder(tmp_path / "bad", step), "training") for step in (1, 2))
    assert {key for key in first if not torch.equal(first[key], second[key])} == {"objective.seen", "sums"}


def test_a_frozen_part_of_the_network_is_not_trained_and_no_part_of_it_is_the_objectives_state():
    net = network()
    net.y_embedder.requires_grad_(False)
    objective = DiffusionLoss(net, EDM())
    assert own_state(objective) == {}
    assert trained_parameters(objective).keys() == {
        name for name in net.state_dict() if not name.startswith(("y_embedder", "pos_embed"))}


@pytest.mark.parametrize("how", [False, True])
def test_hidden_states_are_those_of_the_kept_tokens_compiled_or_not(graphs, how):
    net, noise = network(TWO_ROUTES, depth=6), torch.rand(4, 2, 16)
    on_route, beyond = hidden_after(net, 1), hidden_after(net, -4)
    compile_blocks(net, how)
    ids = Router().get_mask(torch.empty(4, 16, 1), 0.5, noise[:, 0])
    for _ in range(2):
        out = net(torch.randn(4, 3, 8, 8), torch.rand(4), torch.arange(4), routes=net.routes, mask_noise=noise)
        assert torch.equal(on_route["positions"], ids) and on_route["tokens"].shape == (4, 8, 32)
        assert beyond["tokens"].shape == (4, 16, 32) and beyond["positions"].tolist() == [[*range(16)]]
        [gradient] = torch.autograd.grad(on_route["tokens"].sum(), [net.x_embedder.proj.weight], retain_graph=True)
        assert gradient.abs().sum() > 0 and out.shape == (4, 3, 8, 8)
