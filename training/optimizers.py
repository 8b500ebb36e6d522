"""Optimizers by name, a step that is skipped without waiting for the device, and their state as named tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from runtime import sharding


def adamw(trained: Mapping[str, nn.Parameter], **settings: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained.values(), fused=True, **settings)


OPTIMIZERS = {"adamw": adamw}


def build_optimizer(trained: Mapping[str, nn.Parameter], name: str, **settings: object) -> torch.optim.Optimizer:
    """Builds an optimizer of OPTIMIZERS for named parameters; settings are lr, betas, eps and weight_decay."""
    return OPTIMIZERS[name](trained, **settings)


def tensors_of(optimizer: torch.optim.Optimizer) -> dict[tuple, Tensor]:
    """Names what a step of an optimizer may change: weights and its own state."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    state = {(i, name): value for i, p in enumerate(weights) for name, value in optimizer.state[p].items()}
    return {**{(i, ""): p for i, p in enumerate(weights)}, **state}


@torch.no_grad()
def step_unless(skipped: Tensor, optimizer: torch.optim.Optimizer, scaled: bool = False) -> None:
    """Takes a step, or none where the tensor `skipped` is true, without waiting for the device.

    `scaled` says that a GradScaler looks after this by itself. A fused optimizer reads the flag on the device; any
    other takes the step, and what it has changed is restored where the step is skipped. Its first step alone waits, as
    its state begins there.
    """
    plain = getattr(optimizer, "optimizer", optimizer)      # inside accelerate's wrapper
    if scaled:
        optimizer.step()
    elif getattr(plain, "_step_supports_amp_scaling", False):
        plain.grad_scale, plain.found_inf = None, skipped.float()
        optimizer.step()
    elif plain.state or not skipped:
        before = {key: tensor.clone() for key, tensor in tensors_of(plain).items()}
        optimizer.step()
        for key, tensor in tensors_of(plain).items():
            tensor.copy_(torch.where(skipped, before.get(key, tensor), tensor))


# ---- state <-> named tensors ----------------------------------------------------------------------------------------


def optimizer_tensors(trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Flattens an optimizer's state to `<parameter>.<state>` tensors."""
    return {f"{name}.{key}": value for name, p in trained.items() for key, value in optimizer.state[p].items()}


def load_optimizer(
    trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor],
) -> None:
    """Restores what `optimizer_tensors` flattened; learning rate and the other settings stay as they are.

    Raises ValueError for a tensor of a parameter that is not trained here, or of another shape than its parameter.
    """
    place = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, entry = key.rpartition(".")
        p = trained.get(name)
        if p is None or value.ndim and value.shape != p.shape:
            raise ValueError(f"The optimizer's state {key} {tuple(value.shape)} is not of this run: move the "
                             f"checkpoint away, or give the settings that it began with.")
        state.setdefault(place[p], {})[entry] = sharding.part(value, like=p)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
