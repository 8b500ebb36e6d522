"""What a sampling command loads first: network, sampler, guidance, classes and decoder."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from accelerate import PartialState
from torch import Tensor

import extensions
from autoencoder import Convention
from dit import DiT
from guidance import Guidance
from routing_module import Route
from runtime import schema
from runtime.device import DTYPES
from sampling.options import SamplingSettings, parse_classes
from sampling.sampler import Sampler
from weights import autoencoders
from weights.loading import Trained, find_on_main_rank, load_trained, other_data
from weights.records import settings_of


@dataclass
class Sampling:
    """A network to sample, and how."""

    trained: Trained
    sampler: Sampler
    classes: list[int]
    decode: Callable[[Tensor], Tensor]  # latents (B, C, h, w) -> images (B, H, W, 3) uint8, or latents unchanged
    side: int                           # of the images or latents


def open_sampling(state: PartialState, cfg: SamplingSettings, as_latents: bool = False) -> Sampling:
    """Loads what the settings name, `as_latents` without a decoder; raises ValueError for what cannot work."""
    if cfg.checkpoint is None:
        raise ValueError("Name what to sample from: checkpoint=runs/<name>, or a checkpoint folder.")
    checkpoint = find_on_main_rank(state, cfg.checkpoint, cfg.weights)
    trained = load_trained(checkpoint, autoencoder=cfg.autoencoder, device=state.device)
    net, weak = trained.net, None
    if cfg.scale is not None and cfg.weak is not None:
        weak = load_trained(find_on_main_rank(state, cfg.weak), device=state.device)
        check_weak(cfg, trained, weak)
    guidance = None if cfg.scale is None else build_guidance(cfg, trained, weak)
    sampler = Sampler(trained.diffusion, cfg.num_steps, guidance, cfg.sampler.model_dump(),
                      weak.checkpoint.source if weak else None)
    rehearse(sampler, net)
    classes = parse_classes("classes", cfg.classes, net.num_classes, trained.class_names, trained.classes)
    if as_latents:
        return Sampling(trained, sampler, classes, finite, net.input_size)
    unknown = checkpoint.record.imported and checkpoint.record.data.autoencoder == autoencoders.NONE
    decoder = autoencoders.load_decoder(
        trained.autoencoder, (net.in_channels, net.input_size, net.input_size),
        None if unknown and trained.convention == Convention() else trained.convention, state.device,
        DTYPES[cfg.decode_precision], batch_size=cfg.decode_batch_size, trusted=cfg.autoencoder is not None,
    )
    return Sampling(trained, sampler, classes, partial(decoder.decode, strict=True),
                    net.input_size * decoder.downsample)


def build_guidance(cfg: SamplingSettings, trained: Trained, weak: Trained | None) -> Guidance:
    """Builds guidance from its settings; raises ValueError for a kind that lacks them."""
    # The same weights are the same network, whose passes may share a batch.
    net2 = weak.net if weak is not None and weak.checkpoint.sha256 != trained.checkpoint.sha256 else None
    kind, own = Guidance, dict(cfg.kind)
    if own:
        kind = extensions.find("guidances", own.pop("name", None))
        own = schema.read(settings_of(kind), own, "kind: ").model_dump()
    given = {name: getattr(cfg, name) for name in ("scale", "gamma1", "gamma2", "drop_label", "interval", "channels")}
    routes = None if cfg.routes is None else tuple(
        Route(selection_ratio=0.0, **route.model_dump()) for route in cfg.routes)
    guidance: Guidance = kind(**given, routes=routes, net2=net2, **own)
    return guidance


def check_weak(cfg: SamplingSettings, trained: Trained, weak: Trained) -> None:
    """Raises ValueError if the weak network learned from other latents, classes or noise, so that passes do not mix."""
    differences = other_data(weak, None if cfg.drop_label else trained.class_names, trained.convention)
    there, here = ((type(each.diffusion).__name__, getattr(each.diffusion, "sigma_data", None))
                   for each in (weak, trained))
    if there != here:
        differences.append(f"its diffusion and sigma_data are {there} there and {here} here")
    if differences:
        raise ValueError(f"weak={cfg.weak} and the checkpoint cannot be mixed: {' and '.join(differences)}.")


def rehearse(sampler: Sampler, net: DiT) -> None:
    """Raises ValueError for what sampling would raise, and for guidance that would change nothing."""
    passes, guidance, most = sampler.passes(net), sampler.guidance, sampler.diffusion.max_noise
    if guidance is None or guidance.scale == 1:
        return
    low, high = guidance.interval or (0, 0)
    if most < high < math.inf:
        raise ValueError(f"interval={[low, high]} has EDM's sigmas, but this diffusion's noise levels end at {most:g}. "
                         f"Flow matching's are t = sigma / (1 + sigma): set interval=[{low / (1 + low):.3g},"
                         f"{high / (1 + high):.3g}].")
    if passes == replace(sampler, guidance=replace(guidance, scale=1)).passes(net):
        raise ValueError(f"scale={guidance.scale:g} guides nothing, as no step has two different passes: set "
                         f"drop_label=true, a higher gamma2=, weak=<another network> or a wider interval=.")


def finite(latents: Tensor) -> Tensor:
    """Returns latents unchanged; raises ValueError if they are not finite."""
    if not latents.isfinite().all():
        raise ValueError("The sampled latents are not finite: set precision=fp32 and common values of scale= and of "
                         "the sampler's settings, or choose an earlier checkpoint.")
    return latents
