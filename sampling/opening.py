"""What a sampling command loads first: network, sampler, guidance, classes and decoder."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from accelerate import PartialState
from torch import Tensor

from guidance import Guidance
from runtime.device import DTYPES
from sampling.checks import sampler_settings
from sampling.generate import rehearse
from sampling.options import SamplingSettings, build_guidance, empty_classes, parse_classes
from weights import autoencoders
from weights.loading import Trained, find_on_main_rank, load_trained


@dataclass
class Sampling:
    """A network to sample, and how."""

    trained: Trained
    sampler: dict[str, float | str]
    guidance: Guidance | None
    guidance_record: dict | None
    classes: list[int]
    decode: Callable[[Tensor], Tensor]  # latents (B, C, h, w) -> images (B, H, W, 3) uint8, or latents unchanged
    side: int | None                    # of the images; None for latents


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
    net = trained.net
    sampler = sampler_settings(trained.diffusion, cfg.sampler.model_dump())
    guidance, guidance_record = build_guidance(state, cfg, trained)
    # Raises now what sampling would raise.
    guided, plain = (sum(meter.passes.total() for meter in rehearse(
        net, trained.diffusion, cfg.num_steps, value, **sampler)) for value in (guidance, None))
    if guidance and guidance.interval:
        is_sigma = trained.diffusion.max_noise < guidance.interval[1] < math.inf
        if is_sigma or (guidance.scale != 1 and guided == plain):
            raise ValueError(f"interval={list(guidance.interval)} does not fit the sampler's noise levels, or none of "
                             f"its {cfg.num_steps} steps begins inside. EDM's are sigmas, and flow matching's are t = "
                             f"sigma / (1 + sigma), from 1 to 0.")
    if empty := empty_classes(trained.classes, net.num_classes):
        state.print(empty)
    classes = parse_classes("classes", cfg.classes, net.num_classes, trained.class_names,
                            trained.classes[:most_classes])
    decode, side = finite, None
    if not as_latents:
        decoder = autoencoders.load_decoder(
            trained.autoencoder, (net.in_channels, net.input_size, net.input_size), trained.convention, state.device,
            DTYPES[cfg.decode_precision], batch_size=cfg.decode_batch_size, trusted=cfg.autoencoder is not None,
        )
        side = net.input_size * decoder.downsample

        def decode(latents: Tensor) -> Tensor:
            try:
                return decoder.decode(latents, strict=True)
            except ValueError:
                finite(latents)  # the reason may be the latents
                raise

    return Sampling(trained, sampler, guidance, guidance_record, classes, decode, side)


def finite(latents: Tensor) -> Tensor:
    """Returns latents unchanged; raises ValueError if they are not finite."""
    if not latents.isfinite().all():
        raise ValueError("The sampled latents are not finite: use more common values of scale= and of the "
                         "sampler's settings, set precision=fp32, or choose an earlier checkpoint.")
    return latents
