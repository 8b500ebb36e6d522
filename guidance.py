"""Guidance: extrapolate from a weak prediction to a strong one, weak + scale · (strong - weak).

The settings choose what makes the weak prediction weak: no label (classifier-free guidance), fewer tokens (TREAD
guidance, SG), a worse network (AutoGuidance), or several of these. They also choose the guided noise levels.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from routing_module import Route, Router, resolve_routes

Gamma = float | tuple[float, float]  # a selection ratio, or the first and last one of a cosine schedule


class Forward(Protocol):
    """The call of a network: it maps states x (B, C, h, w), noise levels t (B,) and labels y (B,) to its prediction."""

    def __call__(
        self, x: Tensor, t: Tensor, y: Tensor, routes: tuple[Route, ...] = (), mask_noise: Tensor | None = None,
    ) -> Tensor: ...


class Network(Forward, Protocol):
    """A network that can be guided, such as `dit.DiT`: its call, and what the passes are chosen by."""

    in_channels: int
    input_size: int
    num_classes: int
    null_label: bool
    pos_embed: Tensor
    blocks: nn.ModuleList
    routes: tuple[Route, ...]
    router: Router


def ends(ratio: Gamma) -> tuple[float, float]:
    """Returns a selection ratio's first and last value."""
    return ratio if isinstance(ratio, tuple) else (ratio, ratio)


def ratio_at(ratio: Gamma, progress: float) -> float:
    """Returns the selection ratio after a fraction `progress` in [0, 1] of the sampler's steps."""
    start, end = ends(ratio)
    return start + (end - start) * (1 - math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class Guidance:
    """Guidance settings, which any sampler takes as `guidance=`; `Guidance(scale=1.5)` is classifier-free guidance.

    scale       1 is the strong prediction alone and costs one pass
    gamma1      selection ratio of the strong pass, a number or a pair (first, last) of a cosine schedule
    gamma2      selection ratio of the weak pass, in the same forms; at 1 it skips the blocks of the routes
    drop_label  whether the weak pass sees the null label
    net2        the weak network, if it is a different one (AutoGuidance)
    interval    the lowest and the highest noise level (EDM's sigma, flow matching's t) with both passes; outside it
                only the strong pass runs; None: both run everywhere
    routes      where tokens are routed and rejoin (their ratios are not used); None: each network's own routes
    channels    how many leading channels are guided (3 in the code of DiT, SiT and LightningDiT); the others come
                from the strong pass; None: all are guided

    Classifier-free guidance: Ho & Salimans, arXiv 2207.12598. By selection ratios: arXiv 2601.01608 (SG).
    AutoGuidance: Karras et al., arXiv 2406.02507. Intervals: Kynkäänniemi et al., arXiv 2404.07724.
    Path-drop guidance, gamma2 = 1: Sprint, arXiv 2510.21986.
    Raises ValueError for a ratio outside [0, 1], and for a strong pass sparser than the weak one.
    """

    scale: float
    gamma1: Gamma = 0.0
    gamma2: Gamma = 0.0
    drop_label: bool = True
    net2: Network | None = None
    interval: tuple[float, float] | None = None
    routes: tuple[Route, ...] | None = None
    channels: int | None = None

    def __post_init__(self) -> None:
        for name in ("gamma1", "gamma2", "interval"):  # a frozen value should hold no lists
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        ratios = ends(self.gamma1) + ends(self.gamma2)
        if not all(0 <= ratio <= 1 for ratio in ratios) or min(ends(self.gamma1)) > max(ends(self.gamma2)):
            raise ValueError(f"gamma1={self.gamma1} gamma2={self.gamma2}: selection ratios must lie in [0, 1], and "
                             f"gamma1, of the strong pass, must not exceed gamma2. Only schedules may cross.")

    def record(self) -> dict[str, Any]:
        """Returns the settings as JSON would restore them, without the weak network, whose path only the caller knows.

        `channels` appears only if it is set, so that other records are the same as in older files.
        """
        record = {name: getattr(self, name) for name in ("scale", "gamma1", "gamma2", "drop_label", "interval")}
        record["routes"] = None if self.routes is None else [route.plain() for route in self.routes]
        record |= {"channels": self.channels} if self.channels else {}
        if type(self) is not Guidance:
            own = {each.name: getattr(self, each.name) for each in fields(self) if each.kw_only}
            record["kind"] = {"name": type(self).__module__.rpartition(".")[2], **own}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in record.items()}

    def check(self, net: Network) -> None:
        """Raises ValueError if `net` and the weak network do not support this guidance."""
        for name, gamma, network in (("gamma1", self.gamma1, net), ("gamma2", self.gamma2, self.net2 or net)):
            if self.routes is not None:
                network.router.active_routes(resolve_routes(self.routes, len(network.blocks)), network.routes)
            if any(ends(gamma)) and not (network.routes if self.routes is None else self.routes):
                raise ValueError(f"{name}={gamma} needs a network with a route, and this one has none: set "
                                 f"routes='[{{start_layer_idx: 2, end_layer_idx: -4}}]', or choose guidance=cfg.")
            if 1 in ends(gamma) and self.routes is None and not any(route.path_drop for route in network.routes):
                raise ValueError(f"{name}=1, as in guidance=path_drop, skips the blocks of the network's route, which "
                                 f"was not trained for that (path_drop): choose guidance=tread, or name routes=.")
        if self.drop_label and self.scale != 1 and not (self.net2 or net).null_label:
            raise ValueError("guidance by the label needs a null label, but these weights have none, as they were "
                             "trained with label_dropout=0: leave guidance out, or set drop_label=false.")
        if self.channels is not None and not 1 <= self.channels <= net.in_channels:
            raise ValueError(f"channels={self.channels} must be from 1 to {net.in_channels}, the channels of the "
                             "latents.")
        if self.net2 is not None and shape_of(net) != shape_of(self.net2):
            raise ValueError(f"The weak network has channels, side and classes {shape_of(self.net2)}, but the "
                             f"strong one {shape_of(net)}: choose a checkpoint of the same data.")

    def routes_at(self, net: Network, gamma: Gamma, progress: float) -> tuple[Route, ...]:
        """Returns the routes of one pass; () at a ratio that routes no token, which is the dense network."""
        ratio = ratio_at(gamma, progress)
        if not ratio or not int(ratio * net.pos_embed.shape[1]):
            return ()
        routes = net.routes if self.routes is None else resolve_routes(self.routes, len(net.blocks))
        return tuple(replace(route, selection_ratio=ratio, path_drop=0.0) for route in routes)

    def combine(self, strong: Tensor, weak: Tensor, t: float) -> Tensor:
        """Returns the guided estimate (B, C, h, w) from both passes' at noise level t; guidances/ may have others."""
        return weak + self.scale * (strong - weak)

    def guide(
        self, predict: Callable[..., Tensor], net: Network, noise: Tensor, y: Tensor, num_steps: int,
    ) -> Callable[[Tensor, float, int], Tensor]:
        """Guides `predict(net, x, t, y, routes)`, a diffusion's estimate, for one sampler run of `num_steps` steps.

        Returns a function that maps the state x (B, C, h, w), the noise level t and the step's index to the guided
        estimate, shaped like x. All evaluations within a step, in both passes, use the same masks. Passes that share
        network and ratio run as one doubled batch. Raises ValueError as `check` does.
        """
        self.check(net)
        net2 = self.net2 or net
        mask_noise_at = mask_noise_from(noise)

        def num_routed(routes: tuple[Route, ...]) -> list[int]:     # tokens; two ratios may route equally many
            return [int(route.selection_ratio * net.pos_embed.shape[1]) for route in routes]

        def guided(x: Tensor, t: float, step: int) -> Tensor:
            def run(network: Network, routes: tuple[Route, ...], x: Tensor, y: Tensor) -> Tensor:
                forward: Forward = network
                if routes:
                    mask_noise = mask_noise_at(step, len(routes), network.pos_embed.shape[1])
                    forward = partial(network, mask_noise=mask_noise.repeat(len(x) // len(mask_noise), 1, 1))
                return predict(forward, x, torch.full((len(x),), t, device=x.device), y, routes)

            progress = step / max(1, num_steps - 1)
            routes1, routes2 = self.routes_at(net, self.gamma1, progress), self.routes_at(net2, self.gamma2, progress)
            same_pass = net2 is net and num_routed(routes1) == num_routed(routes2)
            inside = self.interval is None or self.interval[0] <= t <= self.interval[1]
            if self.scale == 1 or not inside or (same_pass and not self.drop_label):
                return run(net, routes1, x, y)
            y2 = torch.full_like(y, net2.num_classes) if self.drop_label else y
            if same_pass:
                strong, weak = run(net, routes1, torch.cat([x, x]), torch.cat([y, y2])).chunk(2)
            else:
                strong, weak = run(net, routes1, x, y), run(net2, routes2, x, y2)
            n = self.channels or x.shape[1]  # channels beyond those of the state are not guided
            return torch.cat([self.combine(strong[:, :n], weak[:, :n], t), strong[:, n:]], dim=1)

        return guided


UNGUIDED = Guidance(scale=1)


def mask_noise_from(noise: Tensor) -> Callable[[int, int, int], Tensor]:
    """Returns a function that makes the uniform noise for masks from each image's initial noise and the step.

    So an image depends neither on its batch nor on the order of evaluations, and needs no seed but its noise. The
    function maps step, num_routes and num_tokens to (B, num_routes, num_tokens) float32 in [0, 1).
    """
    @cache
    def seeds() -> list[int]:  # only if masks are sampled, since it copies the noise to the host
        digests = [hashlib.sha256(row.tobytes()).digest() for row in noise.float().cpu().numpy()]
        return [int.from_bytes(digest[:6]) for digest in digests]

    @lru_cache(maxsize=1)  # once for all passes of a step
    def mask_noise_at(step: int, num_routes: int, num_tokens: int) -> Tensor:
        generators = [torch.Generator().manual_seed(1000 * seed + step) for seed in seeds()]
        rows = [torch.rand(num_routes, num_tokens, generator=generator) for generator in generators]
        mask_noise = torch.stack(rows)
        if noise.is_cuda:  # or each step would wait for the device
            return mask_noise.pin_memory().to(noise.device, non_blocking=True)
        return mask_noise.to(noise.device)

    return mask_noise_at


def shape_of(net: Network) -> tuple[int, int, int]:
    return net.in_channels, net.input_size, net.num_classes
