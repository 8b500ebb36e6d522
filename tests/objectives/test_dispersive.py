"""Dispersive loss: its closed form and gradient, pooled and token by token, and which images it compares."""

import itertools
import json
import math
from functools import partial

import pytest
import torch
from test_objectives import ROUTED, batch, loss_of, objective_of, plain_loss, with_places
from test_sharding import SMALL, all_well, losses, on_ranks, tensors_of
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import command, rows

from objectives.dispersive import Dispersive
from weights import checkpoint as checkpoints


def closed_form(z, temperature=0.5):
    """The paper's InfoNCE variant over all ordered pairs, each image with itself among them, in float64."""
    z = z.double()
    values = [math.exp(-((one - other) ** 2).mean() / temperature) for one, other in itertools.product(z, z)]
    return math.log(sum(values) / len(values))


@pytest.mark.parametrize(("routes", "settings"), [
    ([], {}), (ROUTED, dict(block=0)), (ROUTED, dict(block=1, pooled=True)),
    (ROUTED, dict(block=-1, pooled=True, temperature=2, weight=0.1)),
], ids=["dense", "before the route", "pooled inside", "pooled after"])  # fmt: skip
def test_the_term_is_the_closed_form_over_the_images_of_a_call(routes, settings):
    objective = objective_of("dispersive", routes, **settings)
    seen = with_places(objective)
    loss, terms = loss_of(objective)
    tokens = seen[objective.block % 4][0].detach()
    z = tokens.mean(dim=1) if objective.pooled else tokens.flatten(1)
    expected = closed_form(z, settings.get("temperature", 0.5))
    assert terms["dispersive"].tolist() == pytest.approx([expected] * 4, abs=1e-5) and expected < -0.05
    torch.testing.assert_close(loss, plain_loss(routes) + settings.get("weight", 0.5) * terms["dispersive"])


def test_its_gradient_is_that_of_the_differences_also_far_from_zero_and_under_autocast():
    z = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    for offset in (0, 100):
        ours, plain = (z + offset).requires_grad_(), (z + offset).double().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            term = objective_of("dispersive").dispersion(ours)
        term.backward()
        similarities = -(plain[:, None] - plain[None]).square().mean(dim=2) / 0.5
        similarities.exp().mean().log().backward()
        torch.testing.assert_close(ours.grad.double(), plain.grad, rtol=0, atol=1e-6)
        assert plain.grad.norm() > 0.05


class Products(TorchDispatchMode):
    """Notes the type and the precision of each matrix product, in both passes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.mm.default:
            self.seen.append((args[0].dtype, torch.get_float32_matmul_precision()))
        return op(*args, **kwargs or {})


def test_its_products_are_in_float32_without_tf32_in_both_passes():
    """float64 has 1/64 of the speed on many GPUs."""
    z = torch.randn(6, 40, requires_grad=True)
    torch.set_float32_matmul_precision("high")
    try:
        with Products() as products, torch.autocast("cpu", torch.bfloat16):
            objective_of("dispersive").dispersion(z).backward()
        assert products.seen == 2 * [(torch.float32, "highest")] and torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_images_that_are_equal_or_far_apart_have_finite_gradients():
    for z, value in ((torch.ones(3, 5), 0), (1e3 * torch.eye(3), -math.log(3))):
        z.requires_grad_()
        term = objective_of("dispersive").dispersion(z)
        term.backward()
        assert term.item() == pytest.approx(value, abs=1e-6) and z.grad.isfinite().all()


def test_a_part_of_one_image_raises_a_one_line_error():
    x, y, _ = batch()
    with pytest.raises(ValueError, match="part of the batch has only one: raise batch_size"):
        objective_of("dispersive")(x[:1], y[:1])


def tell_terms(folder, rank: int) -> None:
    """Writes how many images each call of a rank has seen, and the term, into `<folder>/terms-<rank>.json`."""
    forward, told = Dispersive.forward, []

    def tell(objective, x, y, **arrays):
        loss, terms = forward(objective, x, y, **arrays)
        told.append((len(x), terms["dispersive"][0].item()))
        (folder / f"terms-{rank}.json").write_text(json.dumps(told))
        return loss, terms

    Dispersive.forward = tell


def test_on_two_ranks_the_pairs_are_each_ranks_own_and_sharding_changes_nothing_over_a_stop(shapes, tmp_path):
    both = ("objective=[layer_sync,dispersive]", "objective.dispersive.pooled=true", "objective.dispersive.block=1",
            "log.every=1", "label_dropout=0")
    all_well(on_ranks(2, *(command(tmp_path / how, shapes, *SMALL, *both, f"sharding={how}", f"steps={steps}")[1:]
                           for how in ("fsdp", "none") for steps in (2, 4)), before=partial(tell_terms, tmp_path)))
    ddp, fsdp = (losses(tmp_path / how) for how in ("none", "fsdp"))
    torch.testing.assert_close(ddp, fsdp, rtol=0, atol=1e-6)
    logged = rows(tmp_path / "none")
    assert all(row["loss_layer_sync"] < 0 for row in logged)
    told = [json.loads((tmp_path / f"terms-{rank}.json").read_text())[-4:] for rank in (0, 1)]
    for row, (one, other) in zip(logged, zip(*told, strict=True), strict=True):
        assert one[0] == other[0] == 4 and one[1] != other[1]
        assert row["loss_dispersive"] == pytest.approx((one[1] + other[1]) / 2, abs=1e-6)
    ddp, fsdp = (tensors_of(checkpoints.latest(tmp_path / how)) for how in ("none", "fsdp"))
    assert ddp.keys() == fsdp.keys() and not any("objective." in key for key in ddp)
    difference = max((ddp[key] - fsdp[key]).abs().max()
                     for key in ddp if ".qkv.bias" not in key)  # keys' have no gradient
    assert difference <= 1e-6
