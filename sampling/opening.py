"""What a sampling command loads first: network, sampler, guidance, classes and decoder."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from accelerate import PartialState
from torch import Tensor

import extensions
from dit import DiT
from guidance import Guidance, ends
from routing_module import Route
from runtime import schema
from runtime.device import DTYPES
from sampling.options import SamplingSettings, parse_classes, print_empty_classes
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


def open_sampling(
    state: PartialState, cfg: SamplingSettings, most_classes: int | None = None, as_latents: bool = False,
) -> Sampling:
    """Loads what the settings name before anything slow starts.

    If no classes are named, it samples at most the first `most_classes` that have images. With `as_latents` nothing
    is decoded, and no autoencoder is loaded. Raises ValueError for settings that cannot work.
    """
    if cfg.checkpoint is None:
        raise ValueError("Name what to sample from: checkpoint=runs/<name>, or a checkpoint folder.")
    checkpoint = find_on_main_rank(state, cfg.checkpoint, cfg.weights)
    trained = load_trained(checkpoint, autoencoder=cfg.autoencoder, device=state.device)
    net, weak = trained.net, None
    if cfg.scale is not None and cfg.weak is not None:
        weak = load_trained(find_on_main_rank(state, cfg.weak), device=state.device)
    guidance = None if cfg.scale is None else build_guidance(cfg, trained, weak)
    sampler = Sampler(trained.diffusion, cfg.num_steps, guidance, cfg.sampler.model_dump(),
                      weak.checkpoint.source if weak else None)
    check_interval(sampler, net)
    print_empty_classes(state, trained.classes, net.num_classes)
    classes = parse_classes("classes", cfg.classes, net.num_classes, trained.class_names,
                            trained.classes[:most_classes])
    if as_latents:
        return Sampling(trained, sampler, classes, finite, net.input_size)
    decoder = autoencoders.load_decoder(
        trained.autoencoder, (net.in_channels, net.input_size, net.input_size), trained.convention, state.device,
        DTYPES[cfg.decode_precision], batch_size=cfg.decode_batch_size, trusted=cfg.autoencoder is not None,
    )
    return Sampling(trained, sampler, classes, lambda latents: decoder.decode(finite(latents), strict=True),
                    net.input_size * decoder.downsample)


def build_guidance(cfg: SamplingSettings, trained: Trained, weak: Trained | None) -> Guidance:
    """Builds guidance from its settings; raises ValueError, with the numbers, if they cannot work with the networks."""
    if weak is not None:
        check_weak(cfg, trained, weak)
    for name, gamma, passed in (("gamma1", cfg.gamma1, trained), ("gamma2", cfg.gamma2, weak or trained)):
        if 1 in ends(gamma) and cfg.routes is None and not any(route.path_drop for route in passed.net.routes):
            raise ValueError(f"{name}=1, as in guidance=path_drop, skips the blocks of the network's route, but it was "
                             f"not trained for that (path_drop): choose guidance=tread, or name blocks by routes=.")
    num_tokens = trained.net.pos_embed.shape[1]
    routed1, routed2 = ([int(ratio * num_tokens) for ratio in ends(gamma)] for gamma in (cfg.gamma1, cfg.gamma2))
    if cfg.routes and not any(routed1 + routed2):
        raise ValueError(f"No token takes the blocks of routes= at gamma1={schema.as_text(cfg.gamma1)} "
                         f"gamma2={schema.as_text(cfg.gamma2)}: set gamma2=0.5.")
    is_same = weak is None or (weak.checkpoint.sha256, weak.weights) == (trained.checkpoint.sha256, trained.weights)
    if cfg.scale != 1 and is_same and routed1 == routed2 and not cfg.drop_label:
        raise ValueError(f"scale={cfg.scale:g} guides nothing, as both passes are the same: set drop_label=true, a "
                         f"higher gamma2=, or weak=<another network>.")
    kind, own = Guidance, dict(cfg.kind)
    if own:
        kind = extensions.find("guidances", own.pop("name", None))
        own = schema.read(settings_of(kind), own, "kind: ").model_dump()
    given = {name: getattr(cfg, name) for name in ("scale", "gamma1", "gamma2", "drop_label", "interval", "channels")}
    routes = None if cfg.routes is None else tuple(
        Route(selection_ratio=0.0, **route.model_dump()) for route in cfg.routes)
    guidance: Guidance = kind(**given, routes=routes, net2=weak.net if weak else None, **own)
    guidance.check(trained.net)
    return guidance


def check_weak(cfg: SamplingSettings, trained: Trained, weak: Trained) -> None:
    """Raises ValueError if the weak network learned from other latents, classes or noise, so that passes do not mix."""
    differences = other_data(weak, None if cfg.drop_label else trained.class_names, trained.convention)
    there, here = (f"{type(each.diffusion).__name__} (sigma_data {getattr(each.diffusion, 'sigma_data', None)})"
                   for each in (weak, trained))
    if there != here:
        differences.append(f"its diffusion is {there} there and {here} here")
    if differences:
        raise ValueError(f"weak={cfg.weak} and the checkpoint cannot be mixed: {' and '.join(differences)}.")


def check_interval(sampler: Sampler, net: DiT) -> None:
    """Rehearses sampling; raises ValueError for what it would raise, and if no step is in guidance's interval."""
    passes, guidance, most = sampler.passes(net).total(), sampler.guidance, sampler.diffusion.max_noise
    if guidance is None or guidance.interval is None:
        return
    low, high = guidance.interval
    if most < high < math.inf:
        raise ValueError(f"interval={[low, high]} has EDM's sigmas, but this diffusion's noise levels end at {most:g}. "
                         f"Flow matching's are t = sigma / (1 + sigma): set interval=[{low / (1 + low):.3g},"
                         f"{high / (1 + high):.3g}].")
    if guidance.scale != 1 and passes == replace(sampler, guidance=None).passes(net).total():
        raise ValueError(f"None of the {sampler.num_steps} steps begins at a noise level in interval={[low, high]}, so "
                         f"nothing would be guided: give a wider one, or more num_steps=.")


def finite(latents: Tensor) -> Tensor:
    """Returns latents unchanged; raises ValueError if they are not finite."""
    if not latents.isfinite().all():
        raise ValueError("The sampled latents are not finite: use more common values of scale= and of the "
                         "sampler's settings, set precision=fp32, or choose an earlier checkpoint.")
    return latents
