"""How latents are sampled: a diffusion's solver with all its settings, the number of steps, and guidance."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import extensions
from dit import DiT, multiply_adds
from edm import EDM
from guidance import Guidance, Network
from rf import RF
from routing_module import Route
from runtime.schema import read
from sampling.options import OF_ALL
from weights.records import keywords, settings_of


@dataclass(frozen=True)
class Sampler:
    """A diffusion's sampler: called with a network, it turns noise into latents.

    `settings` are the solver's, by name. Those that are absent or None take the diffusion's value, as for shift, or the
    solver's default. Raises ValueError for a setting or solver that does not exist.
    """

    diffusion: EDM | RF
    num_steps: int
    guidance: Guidance | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    weak: Mapping[str, object] | None = None    # what a result records of guidance's second network

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", complete(self.diffusion, self.settings))

    def __call__(
        self, net: Network, noise: Tensor, y: Tensor, randn_like: Callable[[Tensor], Tensor] = torch.randn_like,
    ) -> Tensor:
        """Turns unit noise (B, C, h, w) and labels y (B,) into latents (B, C, h, w) float32."""
        settings = dict(self.settings)
        common: dict[str, Any] = dict(num_steps=self.num_steps, guidance=self.guidance, randn_like=randn_like)
        if settings.get("solver") in extensions.names("solvers"):
            solver = extensions.find("solvers", settings.pop("solver"))
            return solver(self.diffusion, net, noise, y, **common, **settings)
        return self.diffusion.sample(net, noise, y, **common, **settings)

    def passes(self, net: DiT) -> Counter[tuple[DiT, tuple[Route, ...]]]:
        """Counts an image's passes, by network and routes, by sampling zeros; raises what sampling would raise."""
        counted, guidance = Counter[tuple[DiT, tuple[Route, ...]]](), self.guidance
        if guidance is not None and isinstance(guidance.net2, DiT):
            guidance = replace(guidance, net2=Meter(guidance.net2, counted))
        noise = torch.zeros(1, net.in_channels, net.input_size, net.input_size)
        rehearsal = replace(self, guidance=guidance)
        rehearsal(Meter(net, counted), noise, torch.zeros(1, dtype=torch.int64), torch.zeros_like)
        return counted

    def cost(self, net: DiT) -> tuple[int, int]:
        """Returns an image's multiply-adds, those of linear layers and those of attention."""
        costs = [[count * part for part in multiply_adds(*passed)] for passed, count in self.passes(net).items()]
        linear, attention = map(sum, zip(*costs, strict=True))
        return linear, attention

    def record(self) -> dict[str, Any]:
        """Returns what a result records of it; JSON has no infinity."""
        settings = {name: str(value) if value == math.inf else value for name, value in self.settings.items()}
        return {"diffusion": type(self.diffusion).__name__, "sampler": {"solver": "heun", **settings},
                "num_steps": self.num_steps, "guidance": self.guidance and self.guidance.record() | {"weak": self.weak}}


class Meter:
    """Replaces a network while it is sampled, and counts the samples that pass through it with each set of routes."""

    def __init__(self, net: DiT, counted: Counter[tuple[DiT, tuple[Route, ...]]]):
        self.net, self.counted = net, counted

    def __getattr__(self, name: str) -> Any:
        return getattr(self.net, name)

    def __call__(
        self, x: Tensor, t: Tensor, y: Tensor, routes: tuple[Route, ...] = (), mask_noise: Tensor | None = None,
    ) -> Tensor:
        self.counted[self.net, routes] += len(x)
        return x.new_zeros(len(x), self.net.out_channels, *x.shape[2:])


def complete(diffusion: EDM | RF, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Completes the settings of a diffusion's sampler as `Sampler` documents; raises ValueError as it does."""
    solver = chosen.get("solver")
    if solver in extensions.names("solvers"):
        declared = settings_of(extensions.find("solvers", solver), solver=(str, None))
    elif hasattr(diffusion, f"sample_{solver}"):    # a method with settings of its own
        declared = keywords(getattr(diffusion, f"sample_{solver}"), **OF_ALL, solver=(str, None))
    else:
        declared = keywords(diffusion.sample, **OF_ALL)
    usual = {"solver": "heun"} | {name: field.default for name, field in declared.model_fields.items()}
    # So 80.0 is recorded as 80, and EDM's only solver may be typed.
    given = {name: value for name, value in chosen.items() if value is not None and value != usual.get(name)}
    complete = read(declared, given, f"The sampler of {type(diffusion).__name__}: ").model_dump()
    settings = {name: getattr(diffusion, name, None) if value is None else value for name, value in complete.items()}
    return {name: value for name, value in settings.items() if value is not None}
