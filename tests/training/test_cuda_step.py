"""A training step on CUDA without a GPU: fake tensors know shapes and devices, and have no values that could be read.

So a tensor on another device raises, and so does `.item()` or an `if` on a tensor, which would wait for the GPU. What
needs a driver is the backward pass alone: in its place every parameter gets an empty gradient.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dit import DiT
from edm import EDM
from objectives import build_objective
from rf import RF
from routing_module import Route, Router
from train import train_step, trained_weights, update_ema
from training import speed
from training.optimizers import build_optimizer, is_matrix
from training.run import Sums

CUDA = torch.device("cuda")
ROUTES = [Route(1, 1, 0.5)]
LOSSES = {"edm": (EDM(), {}), "version1": (EDM(), {"name": "version1", "mae_weight": 0.1}),
          "alignment": (RF(), {"name": "alignment"}), "rf": (RF(cosine_weight=1.0), {})}


def fill_gradients(model, loss):
    assert loss.requires_grad and loss.shape == ()
    for p in model.parameters():
        p.grad = torch.empty_like(p)


def adamw(net):
    return torch.optim.AdamW(net.parameters(), fused=True)


def muon(net):
    return build_optimizer(dict(net.named_parameters()), "muon", lr=0.01, matrix_lr=None, momentum=0.9,
                           weight_decay=0.1)


@pytest.mark.parametrize(("block", "loss", "selection", "num_parts", "make_optimizer"), [
    ("dit", "edm", "grid", 2, adamw), ("dit", "version1", "random", 2, adamw),
    ("dit", "alignment", "random", 1, adamw), ("lightning", "rf", "random", 1, adamw),
    ("mamba", "edm", "random", 2, adamw), ("rwkv", "rf", "grid", 1, adamw), ("dit", "edm", "random", 1, muon),
])
def test_a_step_not_even_the_first_has_no_tensor_on_another_device_and_waits_for_none(
        block, loss, selection, num_parts, make_optimizer, fresh_accelerator):
    accelerator = speed.make_accelerator("fp32", num_parts, tf32=False, cpu=True)
    with FakeTensorMode():
        with CUDA:  # not around the step, which would else make its own tensors there, too
            model, ema = (DiT(input_size=8, hidden_size=32, depth=3, num_heads=2, num_classes=4, routes=ROUTES,
                              block=block,
                              router=Router(selection)) for _ in range(2))  # a copy of fake tensors is of another mode
            x, y, teacher = torch.randn(4, 4, 8, 8), torch.randint(4, (4,)), torch.rand(4, 16, 5)
            diffusion, settings = LOSSES[loss]
            objective = build_objective(model, diffusion, settings, {"teacher": (16, 5)})
            sums = Sums(CUDA, objective.terms)
        accelerator.backward = lambda loss: fill_gradients(objective, loss)
        optimizer = accelerator.prepare_optimizer(make_optimizer(model), device_placement=False)
        taken = train_step(accelerator, objective, objective, optimizer, x, y, dict.fromkeys(objective.arrays, teacher),
                           label_dropout=0.1, clip_norm=1.0, num_parts=num_parts)
        update_ema(trained_weights(ema), trained_weights(model), 0.99)
        sums.add(*taken)
    moments = [value for of_one in optimizer.state.values() for value in of_one.values()]
    assert len(moments) == sum(1 if make_optimizer is muon and is_matrix(*named) else 3
                               for named in model.named_parameters())
    left = [*taken, *model.parameters(), *ema.parameters(), *moments, sums.values]
    assert {tensor.device.type for tensor in left} == {"cuda"}
