"""Optimizers by name, steps that can be skipped without waiting for the device, and state as named tensors."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from runtime import sharding
from runtime.device import multiplies_bf16


def adamw(trained: Mapping[str, nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained.values(), fused=True, **settings)


def is_matrix(name: str, p: nn.Parameter) -> bool:
    """True for the weight of a linear layer within a block, and not for its biases, norms and decays."""
    return name.startswith("blocks.") and name.endswith(".weight") and p.ndim == 2


ITERATIONS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)  # the odd polynomial of kellerjordan.github.io/posts/muon


def orthogonalize(matrices: Tensor) -> Tensor:
    """Brings the singular values of n matrices (n, rows, columns) near 1, by Newton's and Schulz's iteration.

    It multiplies in the matrices' type, and a stack takes no more operations than a single matrix.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Muon (arXiv 2502.16982) for the matrices of the blocks and AdamW for the rest, a group each, AdamW's first.

    Muon's steps are scaled to the size of AdamW's, so that one learning rate suits both: matrix_lr is lr where it is
    None. They are torch.optim.Muon's, but matrices of one shape are orthogonalised together, a share on each rank. So
    all ranks step together. Float32 is orthogonalised in bfloat16 where the device multiplies that.
    """

    _step_supports_amp_scaling = True  # GradScaler and `step_unless` ask for it
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None     # whether to skip the step, as fused optimizers read it

    def __init__(
        self, trained: Mapping[str, nn.Parameter], lr: float, matrix_lr: float | None, momentum: float,
        weight_decay: float, **settings: Any,
    ):
        matrices = {name: p for name, p in trained.items() if is_matrix(name, p)}
        rest = {name: p for name, p in trained.items() if name not in matrices}
        self.adamw: Any = adamw(rest, lr=lr, weight_decay=weight_decay, **settings)
        super().__init__([*self.adamw.param_groups, {
            "params": [*matrices.values()], "lr": lr if matrix_lr is None else matrix_lr, "momentum": momentum,
            "weight_decay": weight_decay}], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure: the gradients are there
        """Takes a step unless the tensor `found_inf` is true; like fused optimizers, it never waits for the device."""
        rest, group = self.param_groups  # loading a checkpoint replaces them, and the state
        self.adamw.param_groups, self.adamw.state = [rest], self.state
        self.adamw.grad_scale, self.adamw.found_inf = None, self.found_inf
        self.adamw.step()
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for p in group["params"]:
            if p.grad is not None:
                by_shape.setdefault(p.shape, []).append(p)
        for matrices in by_shape.values():
            self.step_together(matrices, group)

    def step_together(self, matrices: list[nn.Parameter], group: Mapping[str, Any]) -> None:
        """Takes Muon's step in matrices of one shape; where `found_inf` is true, nothing changes."""
        for p in matrices:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        weights = sharding.local_tensors(matrices)
        gradients = sharding.local_tensors(p.grad for p in matrices if p.grad is not None)
        momenta = sharding.local_tensors(self.state[p]["momentum_buffer"] for p in matrices)
        device, dtype = weights[0].device, weights[0].dtype
        skipped = (torch.zeros((), dtype=torch.bool, device=device) if self.found_inf is None else
                   self.found_inf.bool())
        lr, momentum = group["lr"], group["momentum"]
        # A skipped step moves the momentum toward itself, and so not at all.
        updates = torch.where(skipped, torch.stack(momenta), torch.stack(gradients))
        torch._foreach_lerp_(momenta, updates.unbind(), 1 - momentum)
        torch._foreach_lerp_(updates.unbind(), momenta, momentum)  # Nesterov's
        if dtype == torch.float32 and multiplies_bf16(device):
            updates = updates.bfloat16()
        updates = sharding.map_shares(orthogonalize, updates, like=matrices[0])
        updates = updates.masked_fill_(skipped, 0).to(dtype)
        decay = torch.full((), 1 - lr * group["weight_decay"], dtype=dtype, device=device)
        torch._foreach_mul_(weights, decay.masked_fill_(skipped, 1))
        torch._foreach_add_(weights, updates.unbind(), alpha=-0.2 * math.sqrt(max(matrices[0].shape)) * lr)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": adamw, "muon": Muon}


def build_optimizer(trained: Mapping[str, nn.Parameter], name: str, **settings: Any) -> torch.optim.Optimizer:
    """Builds an optimizer of OPTIMIZERS for named parameters; settings are those of configs/optimizer."""
    return OPTIMIZERS[name](trained, **settings)


@torch.no_grad()
def step_unless(skipped: Tensor, optimizer: torch.optim.Optimizer, scaled: bool = False) -> None:
    """Takes a step unless the tensor `skipped` is true, without waiting for the device.

    Fused optimizers and Muon read the flag on the device. `scaled` means that a GradScaler sets it.
    """
    plain: Any = getattr(optimizer, "optimizer", optimizer)  # inside accelerate's wrapper
    assert getattr(plain, "_step_supports_amp_scaling", False), plain
    if not scaled:
        plain.grad_scale, plain.found_inf = None, skipped.float()
    optimizer.step()


def update_weights(
    accelerator: Accelerator, optimizer: torch.optim.Optimizer, clip_norm: float | None,
) -> tuple[Tensor, Tensor]:
    """Takes a step by the gradients, clipped to `clip_norm`, and drops them; returns their norm before clipping.

    Also returns whether the step was skipped because the norm was not finite. Never waits for the device.
    """
    accelerator.unscale_gradients(optimizer)
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    grad_norm = sharding.total_norm(accelerator, gradients)
    if clip_norm is not None:
        torch._foreach_mul_(sharding.local_tensors(gradients), (clip_norm / (grad_norm + 1e-6)).clamp(max=1))
    # A loss that is not finite spoils the gradients. DDP averages them over ranks, so all ranks skip together.
    skipped = ~grad_norm.isfinite()
    step_unless(skipped, optimizer, scaled=accelerator.scaler is not None)
    optimizer.zero_grad(set_to_none=True)
    return grad_norm, skipped


# ---- state <-> named tensors ----------------------------------------------------------------------------------------


def optimizer_tensors(trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Flattens an optimizer's state to `<parameter>.<state>` tensors."""
    # `state[p]` would add an entry, which the optimizer would take for an initialised state.
    return {f"{name}.{key}": value for name, p in trained.items() for key, value in optimizer.state.get(p, {}).items()}


def load_optimizer(
    trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor],
) -> None:
    """Restores what `optimizer_tensors` flattened; learning rate and the other settings are kept."""
    index = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, entry = key.rpartition(".")
        p = trained[name]
        if value.ndim and value.shape != p.shape:
            raise ValueError(f"The optimizer's {key} has shape {tuple(value.shape)}, and its weights {tuple(p.shape)}.")
        state.setdefault(index[p], {})[entry] = sharding.local_shard(value, like=p)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
