"""The plain objective: the diffusion's loss over all tokens. TREAD needs no other (arXiv 2501.04765)."""

from collections.abc import Hashable, Mapping
from operator import attrgetter

import torch
from torch import Tensor, nn

from dit import DiT
from edm import EDM
from rf import RF
from routing_module import Route, RouteSchedule, kept_tokens


class DiffusionLoss(nn.Module):
    """Minimises `diffusion.loss` of a network on the routes of its step: those of `schedule`, or else the network's.

    With keep_masked, a token is not routed if the mean of `weight` over its patch is above 0.5. `array_shapes` has the
    shape of a row of each extra array, by name.
    """

    terms: tuple[str, ...] = ()
    arrays: tuple[str, ...] = ("weight",)      # extra ones that it reads if they exist
    step: int = 0                              # of the run; the training loop sets it
    drawn: tuple[Tensor, Tensor] | None = None  # noise levels (B,) and noise like x of the last call

    def __init__(
        self, net: DiT, diffusion: EDM | RF, keep_masked: bool = False,
        array_shapes: Mapping[str, tuple[int, ...]] | None = None, schedule: RouteSchedule | None = None,
    ):
        super().__init__()
        self.net, self.diffusion, self.keep_masked = net, diffusion, keep_masked
        self.array_shapes, self.schedule = array_shapes or {}, schedule or RouteSchedule(net.routes)

    @property
    def routes(self) -> tuple[Route, ...]:
        return self.schedule.at(self.step)

    @property
    def phase(self) -> Hashable:
        """All that decides which kernels a step runs, besides shapes: steps of one phase can share a CUDA graph."""
        return self.routes

    def forward(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """`weight` (B, 1, h or 1, w or 1) multiplies the squared error; None is 1."""
        weight = x.new_ones(len(x), 1, 1, 1) if weight is None else weight.float()
        mask_noise = draw_mask_noise(self.net, self.routes, weight, True) if self.keep_masked else None
        self.drawn = self.diffusion.draw(x)
        loss = self.diffusion.loss(self.net, x, y, self.routes, *self.drawn, weight=weight, mask_noise=mask_noise)
        return loss, {}


class Objective(nn.Module):
    """An objective that wraps another one, and adds a term to its loss or replaces it.

    Its call takes x (B, C, h, w), y (B,) and the extra arrays of the latent folder, by name; it returns the loss of
    each sample (B,) and, by name, the terms (B,) that are logged beside it. `own_terms` names those that it adds, and
    `own_arrays` the arrays that it needs.
    """

    own_terms: tuple[str, ...] = ()
    own_arrays: tuple[str, ...] = ()

    def __init__(self, inner: "Objective | DiffusionLoss"):
        super().__init__()
        self.inner = inner

    @staticmethod
    def network_keywords(depth: int, **settings: object) -> dict:
        """Returns the keywords that a network of `depth` blocks needs for an objective with these settings."""
        return {}

    @property
    def terms(self) -> tuple[str, ...]:
        return self.inner.terms + self.own_terms

    @property
    def arrays(self) -> tuple[str, ...]:
        return self.inner.arrays + self.own_arrays

    # These come from the innermost objective, a DiffusionLoss.
    net = property(attrgetter("inner.net"))
    diffusion = property(attrgetter("inner.diffusion"))
    keep_masked = property(attrgetter("inner.keep_masked"))
    drawn = property(attrgetter("inner.drawn"))
    array_shapes = property(attrgetter("inner.array_shapes"))
    schedule = property(attrgetter("inner.schedule"))
    routes = property(attrgetter("inner.routes"))
    phase = property(attrgetter("inner.phase"))
    step = property(attrgetter("inner.step"), lambda self, step: setattr(self.inner, "step", step))


def draw_mask_noise(net: DiT, routes: tuple[Route, ...], weight: Tensor, keep_masked: bool) -> Tensor:
    """Samples the noise (B, R, N) that decides all routes' masks; keep_masked keeps tokens with a high weight."""
    noise = torch.rand(len(weight), len(routes), net.pos_embed.shape[1], device=weight.device)
    return net.router.keep(noise, kept_tokens(weight, net.patch_size)[:, None]) if keep_masked else noise


# ---- what an objective trains, saves and resumes --------------------------------------------------------------------


def trained_parameters(objective: Objective | DiffusionLoss) -> dict[str, nn.Parameter]:
    """Returns the trained parameters by name: the network's by their own names, others as `objective.<name>`."""
    of_net = {p: name for name, p in objective.net.named_parameters()}
    named = ((of_net.get(p, f"objective.{name}"), p) for name, p in objective.named_parameters())
    return {name: p for name, p in named if p.requires_grad}


def own_state(objective: Objective | DiffusionLoss) -> dict[str, Tensor]:
    """Returns the parameters and buffers outside the network, as `objective.<name>`, without a frozen teacher's."""
    def state_of(module: nn.Module, name: str) -> dict[str, Tensor]:
        parameters = list(module.parameters())
        if module is objective.net or (parameters and not any(p.requires_grad for p in parameters)):
            return {}
        state = {f"{name}.{key}": value for key, value in module.state_dict().items() if "." not in key}
        for child_name, child in module.named_children():
            state |= state_of(child, f"{name}.{child_name}")
        return state

    return state_of(objective, "objective")
