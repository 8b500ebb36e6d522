"""Alignment with a teacher's tokens: REPA's loss and gradient, which tokens are compared, and in which precision."""

import pytest
import torch
from test_objectives import ROUTED, batch, loss_of, objective_of
from test_published_parity import published
from training_runs import end_of, rows, trained

from objectives.alignment import projector
from objectives.diffusion import hidden_after
from weights import checkpoint as checkpoints


def aligned(routes=ROUTED, **settings):
    return objective_of("alignment", routes, **settings)


def test_the_projectors_start_has_the_spread_of_repas():      # its loss and gradient: test_published_training.py
    torch.manual_seed(1)
    start = {key: p.std().item() for key, p in projector(64, 24).named_parameters()}
    assert start == pytest.approx(published("alignment")["init"], rel=0.05)


@pytest.mark.parametrize(("depth", "block"), [(28, 7), (24, 7), (12, 3), (6, 1), (2, 0)])
def test_the_default_block_is_the_eighth_or_that_at_a_third_of_the_depth(depth, block):
    objective, seen = aligned([], depth=depth), []
    hidden = hidden_after(objective.net, block)
    objective.projector.register_forward_hook(lambda _, args, output: seen.extend(args))
    loss_of(objective)
    assert objective.weight == 0.5 and torch.equal(hidden["tokens"], seen[0])


@pytest.mark.parametrize(("block", "kept"), [(0, 16), (1, 8), (2, 8), (3, 16)])
def test_tokens_are_compared_with_the_teachers_at_their_positions_and_on_a_route_only_the_kept_ones(block, kept):
    objective, teacher, values = aligned(block=block), batch()[2], []
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
    objective, seen, teacher = aligned(block=1), {}, batch()[2].to(dtype)
    hidden = hidden_after(objective.net, 1)
    objective.projector.register_forward_hook(lambda _, args, output: seen.update(tokens=output))
    with torch.autocast("cpu", torch.bfloat16):
        loss, terms = loss_of(objective, teacher=teacher)
    target = torch.take_along_dim(teacher, hidden["positions"].unsqueeze(-1), dim=1).double()
    exact = -torch.nn.functional.cosine_similarity(seen["tokens"].double(), target, dim=-1).mean(dim=1)
    assert seen["tokens"].dtype == torch.bfloat16 and loss.dtype == terms["alignment"].dtype == torch.float32
    torch.testing.assert_close(terms["alignment"].double(), exact, rtol=0, atol=1e-6)  # of bfloat16 it would be 1e-3


def test_a_run_whose_loss_falls_below_zero_is_sound_logs_its_term_and_saves_a_plain_network(taught, tmp_path):
    for steps in (6, 8):
        trained(tmp_path / "run", taught, "objective=alignment", "objective.weight=20", "optimizer.warmup_steps=0",
                f"steps={steps}", "checkpoint.every=1", "log.every=1")
    last, end = rows(tmp_path / "run")[-1], end_of(tmp_path / "run")
    assert last["loss"] < 0 and last["step"] == 8 and last["loss_alignment"] < 0
    assert all(checkpoints.is_sound(folder) for folder in checkpoints.all_steps(tmp_path / "run"))
    state = {key for key in end["training"] if key.startswith("objective.")
             and not key.endswith(("exp_avg", "exp_avg_sq", "step"))}
    assert state == {f"objective.projector.{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")}
    assert end["model"].keys() == end["ema"].keys() and not any("projector" in key for key in end["model"])
