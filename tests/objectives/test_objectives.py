"""Objectives: alignment, the losses of CONTRIBUTING.md, hidden states, and what is trained, saved and logged."""

import pytest
import torch
from own_extensions import installed
from test_published_parity import published
from training_runs import assert_resumes, end_of, rows, train_here, trained

from dit import DiT
from edm import EDM
from objectives import DiffusionLoss, build_objective, own_state, trained_parameters
from objectives.alignment import projector
from objectives.diffusion import hidden_after
from routing_module import Route, Router
from runtime.libraries import compile_blocks
from weights import checkpoints

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
    ("teachers", [], {}, "There is no objectives/teachers.py; choose one of alignment, .*version1"),
    ("alignment", [], dict(shapes={"teacher": (12, 4, 4)}), r"has rows of shape \(12, 4, 4\): run .*patch_size=2"),
    ("version1", [], {}, "set diffusion=edm, model.routes, and model.selection=random"),
])
def test_settings_and_arrays_that_do_not_fit_raise_a_one_line_error(name, routes, settings, says):
    with pytest.raises(ValueError, match=says):
        objective_of(name, routes, **settings)


# ---- alignment with a teacher's tokens -------------------------------------------------------------------------------


def test_the_projectors_start_has_the_spread_of_repas():      # its loss and gradient: test_published_training.py
    torch.manual_seed(1)
    start = {key: p.std().item() for key, p in projector(64, 24).named_parameters()}
    assert start == pytest.approx(published("alignment")["init"], rel=0.05)


@pytest.mark.parametrize(("depth", "block"), [(28, 7), (24, 7), (12, 3), (6, 1), (2, 0)])
def test_the_default_block_is_the_eighth_or_that_at_a_third_of_the_depth(depth, block):
    objective, seen = objective_of("alignment", depth=depth), []
    hidden = hidden_after(objective.net, block)
    objective.projector.register_forward_hook(lambda _, args, output: seen.extend(args))
    loss_of(objective)
    assert objective.weight == 0.5 and torch.equal(hidden["tokens"], seen[0])


@pytest.mark.parametrize(("block", "kept"), [(0, 16), (1, 8), (2, 8), (3, 16)])
def test_tokens_are_compared_with_the_teachers_at_their_positions_and_on_a_route_only_the_kept_ones(block, kept):
    objective, teacher, values = objective_of("alignment", ROUTED, block=block), batch()[2], []
    hidden = hidden_after(objective.net, block)
    _, terms = loss_of(objective)
    tokens, positions = hidden["tokens"], hidden["positions"].expand(4, -1)
    assert tokens.shape[1] == kept == len(positions[0])
    for sample, (of_sample, places) in enumerate(zip(tokens, positions, strict=True)):
        pairs = zip(objective.projector(of_sample), teacher[sample, places].float(), strict=True)
        values.append(-sum(torch.dot(a / a.norm(), b / b.norm()) for a, b in pairs) / kept)
    torch.testing.assert_close(terms["alignment"], torch.stack(values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_under_autocast_the_angle_and_its_mean_are_computed_in_float32(dtype):
    objective, seen, teacher = objective_of("alignment", ROUTED, block=1), {}, batch()[2].to(dtype)
    hidden = hidden_after(objective.net, 1)
    objective.projector.register_forward_hook(lambda _, args, output: seen.update(tokens=output))
    with torch.autocast("cpu", torch.bfloat16):
        loss, terms = loss_of(objective, teacher=teacher)
    target = torch.take_along_dim(teacher, hidden["positions"].unsqueeze(-1), dim=1).double()
    exact = -torch.nn.functional.cosine_similarity(seen["tokens"].double(), target, dim=-1).mean(dim=1)
    assert seen["tokens"].dtype == torch.bfloat16 and loss.dtype == terms["alignment"].dtype == torch.float32
    torch.testing.assert_close(terms["alignment"].double(), exact, rtol=0, atol=1e-6)  # of bfloat16 it would be 1e-3


def test_a_run_whose_loss_falls_below_zero_is_sound(taught, tmp_path):
    for steps in (6, 8):
        trained(tmp_path / "run", taught, "objective=alignment", "objective.weight=20", "optimizer.warmup_steps=0",
                f"steps={steps}", "checkpoint.every=1", "log.every=1")
    last = rows(tmp_path / "run")[-1]
    assert last["step"] == 8 and last["loss"] < 0 and last["loss_alignment"] < 0
    assert all(checkpoints.is_sound(folder) for folder in checkpoints.all_steps(tmp_path / "run"))


# ---- a loss of one's own: those that CONTRIBUTING.md shows


@pytest.fixture(scope="module", autouse=True)
def page(tmp_path_factory):
    with installed(tmp_path_factory.mktemp("page")):
        yield


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


def test_a_frozen_part_of_the_network_is_not_trained_and_no_part_of_it_is_the_objectives_state():
    net = network()
    net.y_embedder.requires_grad_(False)
    objective = DiffusionLoss(net, EDM())
    assert own_state(objective) == {}
    objective.register_buffer("seen", torch.zeros(()))
    assert own_state(objective).keys() == {"objective.seen"}
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
