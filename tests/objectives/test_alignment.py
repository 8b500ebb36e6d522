"""Alignment with a teacher's tokens: its loss, its gradient, where it is off, what is saved, and what is refused."""

import shutil

import numpy as np
import pytest
import torch
from conftest import change_record
from test_objectives import ROUTED, batch, loss_of, objective_of, plain_loss, published_loss, with_places
from test_published_parity import TINY, fill, published, wave
from training_runs import assert_resumes, end_of, rows, trained

from dit import DiT
from objectives import build_objective, trained_parameters
from objectives.alignment import MLP, Alignment, normalised
from rf import RF
from training.speed import compile_blocks
from weights import checkpoint as checkpoints

PUBLISHED = published("alignment")


def aligned(routes=ROUTED, **settings) -> Alignment:
    return objective_of("alignment", routes, **settings)


# ---- the published codes --------------------------------------------------------------------------------------------


TEACHER = wave((3, 16, 24), 5) + 0.4 * wave((24,), 6)


@pytest.mark.parametrize("case", PUBLISHED["cases"], ids=lambda case: case["name"])
def test_loss_and_gradient_equal_those_of_repa_and_irepa(case):
    net = fill(DiT(**TINY))
    objective = build_objective(net, RF(), {"alignment": {"blocks": [1], **case["settings"]}},
                                array_shapes={"teacher": (16, 24)})
    fill(objective.projector)
    loss, terms = published_loss(objective, PUBLISHED, teacher=TEACHER)
    alignment = terms["alignment"].mean()
    assert alignment.item() == pytest.approx(case["alignment"], abs=1e-5)
    expected = torch.tensor(case["denoising"]) + case["settings"]["weight"] * terms["alignment"]
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
    gradients = torch.autograd.grad(alignment, [net.blocks[1].attn.qkv.weight, net.x_embedder.proj.weight])
    assert [gradient.norm().item() for gradient in gradients] == pytest.approx(case["gradient_norms"], abs=1e-5)


def test_the_teachers_normalisation_and_the_projectors_start_are_the_published_ones():
    assert normalised(TEACHER, 0.6)[0, :3].flatten().tolist() == pytest.approx(PUBLISHED["normalised"], abs=1e-5)
    torch.manual_seed(1)
    start = {key: p.std().item() for key, p in MLP(64, 24).named_parameters()}
    assert start == pytest.approx(PUBLISHED["init"], rel=0.05)


# ---- the loss -------------------------------------------------------------------------------------------------------


def plainly(objective, teacher, taken, positions) -> torch.Tensor:
    """−cos token by token, of the hidden states that a hook from outside has taken."""
    values = []
    for sample, hidden in enumerate(taken):
        at = positions[sample if len(positions) > 1 else 0]
        cosines = [torch.dot(a / a.norm(), b / b.norm())
                   for a, b in zip(objective.projector(hidden), teacher[sample, at].float(), strict=True)]
        values.append(-sum(cosines) / len(cosines))
    return torch.stack(values)


@pytest.mark.parametrize(("block", "kept"), [(0, 16), (1, 8), (2, 8), (3, 16)])
def test_tokens_are_compared_with_the_teachers_at_their_positions_and_on_a_route_only_the_kept_ones(block, kept):
    objective = aligned(blocks=[block], weight=0.7)
    seen = with_places(objective)
    loss, terms = loss_of(objective)
    tokens, positions = seen[block]
    assert tokens.shape[1] == kept == len(positions[0])
    torch.testing.assert_close(terms["alignment"], plainly(objective, batch()[2], tokens, positions))
    torch.testing.assert_close(loss, plain_loss(ROUTED) + 0.7 * terms["alignment"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_under_autocast_the_angle_and_its_mean_are_computed_in_float32(dtype):
    objective, seen, teacher = aligned(blocks=[1]), {}, batch()[2].to(dtype)
    objective.projector.register_forward_hook(lambda _, args, output: seen.update(tokens=output))
    with torch.autocast("cpu", torch.bfloat16):
        loss, terms = loss_of(objective, teacher=teacher)
    _, positions = objective.hidden[1]
    target = torch.take_along_dim(teacher, positions.unsqueeze(-1), dim=1).double()
    exact = -torch.nn.functional.cosine_similarity(seen["tokens"].double(), target, dim=-1).mean(dim=1)
    assert seen["tokens"].dtype == torch.bfloat16 and loss.dtype == terms["alignment"].dtype == torch.float32
    torch.testing.assert_close(terms["alignment"].double(), exact, rtol=0, atol=1e-6)  # of bfloat16 it would be 1e-3


def test_the_subtracted_mean_is_that_of_the_complete_grid():
    objective = aligned(blocks=[1], normalise=0.6)
    seen = with_places(objective)
    _, terms = loss_of(objective)
    teacher = batch()[2].float()
    teacher = (teacher - 0.6 * teacher.mean(1, keepdim=True)) / (teacher.std(1, keepdim=True) + 1e-6)
    torch.testing.assert_close(terms["alignment"], plainly(objective, teacher, *seen[1]))


def test_several_blocks_share_one_projector_and_their_mean_counts():
    together = aligned(blocks=[0, 1, 3])
    of_all = loss_of(together)[1]["alignment"]
    single = []
    for block in (0, 1, 3):
        one = aligned(blocks=[block])
        one.projector.load_state_dict(together.projector.state_dict())
        single.append(loss_of(one)[1]["alignment"])
    torch.testing.assert_close(of_all, sum(single) / 3)
    assert len(trained_parameters(together)) == len(trained_parameters(one))


# ---- where it is off ------------------------------------------------------------------------------------------------


def gradients(objective, **how) -> dict[str, torch.Tensor]:
    loss_of(objective, **how)[0].mean().backward()
    return {name: p.grad for name, p in objective.net.named_parameters() if p.grad is not None}


def test_the_end_step_is_the_first_without_alignment():
    objective, plain = aligned(blocks=[1], end_step=3), plain_loss(ROUTED)
    for step, on in ((0, True), (2, True), (3, False), (4, False)):
        objective.step = step
        loss, terms = loss_of(objective)
        assert (terms["alignment"] != 0).all() == on and torch.equal(loss, plain) != on


def test_the_same_graphs_serve_before_and_after_the_end_on_a_route_and_off_it(graphs):
    for routes in (ROUTED, []):
        torch._dynamo.reset()
        graphs.clear()
        objective = aligned(routes, blocks=[1], end_step=2)
        compile_blocks(objective.net, True)
        plain = aligned(routes, blocks=[1], end_step=2)
        for step in range(4):
            objective.step = plain.step = step
            for one in (objective, plain):
                one.zero_grad()
                found = gradients(one)
            torch.testing.assert_close(dict(objective.net.named_parameters())["blocks.0.attn.qkv.weight"].grad,
                                       found["blocks.0.attn.qkv.weight"])
        assert graphs.frame_count == (2 if routes else 1)


# ---- in a run -------------------------------------------------------------------------------------------------------


ON_ROUTE = ("objective=alignment", "objective.alignment.blocks=[2]", "log.every=1")


def test_a_run_logs_its_alignment_resumes_bit_for_bit_past_its_end_and_saves_a_plain_network(taught, tmp_path):
    assert_resumes(tmp_path, taught, *ON_ROUTE, "objective.alignment.end_step=5", stops=(3, 4), end=8)
    end = end_of(tmp_path / "whole")
    assert [row["loss_alignment"] != 0 for row in rows(tmp_path / "whole")] == [True] * 5 + [False] * 3
    own = {key for key in end["training"] if key.startswith("objective.")
           and not key.endswith(("exp_avg", "exp_avg_sq", "step"))}
    assert own == {f"objective.projector.{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")}
    trained(tmp_path / "plain", taught, "steps=1")
    assert end["model"].keys() == end["ema"].keys() == end_of(tmp_path / "plain")["model"].keys()


def test_a_run_whose_loss_falls_below_zero_is_sound_and_resumes(taught, tmp_path):
    for steps in (6, 8):
        trained(tmp_path, taught, *ON_ROUTE, "objective.alignment.weight=20", "optimizer.warmup_steps=0",
                f"steps={steps}", "checkpoint.every=1")
    assert rows(tmp_path)[-1]["loss"] < 0 and rows(tmp_path)[-1]["step"] == 8
    assert all(checkpoints.is_sound(folder) for folder in checkpoints.all_steps(tmp_path))


def test_a_convolution_projects_the_grid_of_blocks_on_no_route():
    objective = aligned(blocks=[0, 3], projector="conv")
    tokens = torch.randn(2, 16, 32)
    moved = tokens.clone()
    moved[:, 0] += 1  # is seen by its neighbours on the grid, which are tokens 1, 4 and 5
    changed = (objective.projector(tokens) != objective.projector(moved)).any(2)[0]
    assert changed.nonzero().flatten().tolist() == [0, 1, 4, 5]
    assert loss_of(objective)[1]["alignment"].shape == (4,)


@pytest.fixture
def pictured(shapes, tmp_path):
    """The built-in shapes with their images, for a teacher that runs in the step."""
    folder = shutil.copytree(shapes, tmp_path / "pictured")
    images = np.load(folder / "latents-00000.npy").astype(np.float32) * 127.5 + 127.5
    np.save(folder / "image-00000.npy", images.round().astype(np.uint8))
    change_record(folder, arrays={"image": {"shape": [3, 16, 16], "dtype": "uint8", "mirror": "flip"}})
    return folder


def test_with_a_teacher_in_the_step_a_run_resumes_bit_for_bit_and_saves_nothing_of_it(pictured, tmp_path):
    assert_resumes(tmp_path, pictured, *ON_ROUTE, "objective.alignment.teacher=efficientnet_lite0",
                   "grad_accum_steps=2")
    assert all(row["loss_alignment"] != 0 for row in rows(tmp_path / "whole"))
    assert not any("teacher" in key for tensors in end_of(tmp_path / "whole").values() for key in tensors)
