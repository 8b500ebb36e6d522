"""Seeds and classes -> images, by the sampler, guidance and decoder that the weights were trained for.

    pipe = DiffusionPipeline.from_pretrained("<this folder>", trust_remote_code=True)
    seeds = range(4)
    images = pipe([0, 1, 2, 3], [torch.Generator().manual_seed(seed) for seed in seeds]).images
    image = pipe(207, torch.Generator().manual_seed(0)).images[0]

The other files here are unmodified copies from the project that made the folder.
"""

import json
import math
import shutil
import sys
from numbers import Integral, Real
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from PIL import Image

from .autoencoder import Convention, DiffusersAutoencoder, Identity
from .checks import check_interval, sampler_settings
from .edm import DDPM, EDM
from .guidance import Guidance
from .rf import RF, CleanRF
from .routing_module import Route

CODE = ("pipeline.py", "autoencoder.py", "checks.py", "edm.py", "guidance.py", "rf.py", "routing_module.py")
DIFFUSIONS = {"edm": EDM, "ddpm": DDPM, "rf": RF, "rf_clean": CleanRF}
OUTPUTS = ("pil", "np", "pt", "latent")
MOST_STEPS = 10_000


def is_number(value: object, kind: type = Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)


class Network:
    """What a sampler calls, net(x, t, y), around a transformer of diffusers; it has no routes, so it is dense."""

    routes: tuple[Route, ...] = ()

    def __init__(self, transformer: torch.nn.Module, null_label: bool):
        self.transformer, self.null_label, config = transformer, null_label, transformer.config
        self.in_channels, self.input_size = config.in_channels, config.sample_size
        self.num_classes, self.blocks = config.num_embeds_ada_norm, transformer.transformer_blocks

    def __call__(
        self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor, routes: tuple[Route, ...] = (),
    ) -> torch.Tensor:
        return self.transformer(x.to(self.transformer.dtype), timestep=t, class_labels=y, return_dict=False)[0]


class LatentDiTPipeline(DiffusionPipeline):
    """Samples images of classes; without a vae the latents are pixels."""

    model_cpu_offload_seq = "transformer->vae"
    _optional_components = ["vae"]

    def __init__(
        self, transformer: torch.nn.Module, vae: torch.nn.Module = None, diffusion: dict | None = None,
        convention: dict | None = None, class_names: list[str] | None = None, null_label: bool = True,
        record: dict | None = None,                         # what else the project that made the folder knows
    ):
        super().__init__()
        self.register_modules(transformer=transformer, vae=vae)
        self.register_to_config(diffusion=diffusion, convention=convention, class_names=class_names,
                                null_label=null_label, record=record)

    def save_config(self, save_directory: str | Path, **options: object) -> None:
        """Ends `save_pretrained`: adds the code, without which the folder cannot be loaded again.

        A meta.json of the first export describes weights that have just been replaced, so it is deleted.
        """
        super().save_config(save_directory)
        folder = Path(save_directory)
        meta = folder / "meta.json"
        if meta.is_file() and json.loads(meta.read_text(encoding="utf-8")).get("exported") == "diffusers":
            meta.unlink()
        (folder / "transformer").mkdir(exist_ok=True)
        transformer = Path(sys.modules[type(self.transformer).__module__].__file__)
        for file in [*(Path(__file__).with_name(name) for name in CODE), transformer]:
            target = folder / "transformer" / file.name if file == transformer else folder / file.name
            if not (target.exists() and target.samefile(file)):
                shutil.copy(file, target)
        index = json.loads((folder / self.config_name).read_text(encoding="utf-8"))
        index |= {"_class_name": [Path(__file__).stem, type(self).__name__],
                  "transformer": [transformer.stem, type(self.transformer).__name__]}
        (folder / self.config_name).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | list[int],
        generator: torch.Generator | list[torch.Generator] | None = None,   # a list: one an image, whose noise is a
                                                            # function of it alone; None: torch's own, on the CPU
        num_inference_steps: int = 40,
        guidance_scale: float | None = None,                # None or 1: unguided
        interval: tuple[float, float] | None = None,        # the noise levels between which it is guided; None: all
        channels: int | None = None,                        # how many are guided, the first ones; None: all
        sampler: dict | None = None,                        # S_churn, solver, …: settings of the diffusion's sampler
        output_type: str = "pil",                           # pil | np | pt, the last two in 0 … 1 | latent
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple:
        """Samples an image for each label, or with output_type="latent" the network's latents (B, C, h, w) float32.

        Raises ValueError for what cannot be sampled as asked.
        """
        net, device = Network(self.transformer, self.config.null_label), self._execution_device
        y = self.check_labels(class_labels, net).to(device)
        one_each = isinstance(generator, list | tuple)
        generators = generator if one_each else [] if generator is None else [generator]
        if other := [one for one in generators if not isinstance(one, torch.Generator)]:
            raise ValueError(f"generator={other[0]!r} is no torch.Generator: give torch.Generator().manual_seed(0), or "
                             f"a list of them.")
        if one_each and len(generators) != len(y):
            raise ValueError(f"There are {len(y)} class_labels and {len(generators)} generators: give one per image, a "
                             f"single one for all, or none.")
        if not is_number(num_inference_steps, Integral) or not 1 <= num_inference_steps <= MOST_STEPS:
            raise ValueError(f"num_inference_steps={num_inference_steps!r}: give a whole number from 1 to "
                             f"{MOST_STEPS}.")
        if output_type not in OUTPUTS:
            raise ValueError(f"output_type={output_type!r} is none of {', '.join(OUTPUTS)}.")
        settings = dict(self.config.diffusion)
        diffusion = DIFFUSIONS[settings.pop("name")](**settings)
        if not isinstance(sampler, dict | None):
            raise ValueError(f'sampler={sampler!r}: give a dict of settings, as {{"solver": "heun"}}.')
        sampler = sampler_settings(diffusion, sampler or {})
        guidance = self.check_guidance(guidance_scale, interval, channels, diffusion, sampler)

        def randn(shape: tuple[int, ...]) -> torch.Tensor:
            if one_each:
                return torch.stack([torch.randn(shape, generator=g, device=g.device) for g in generator]).to(device)
            return torch.randn((len(y), *shape), generator=generator, device=generator and generator.device).to(device)

        def randn_like(x: torch.Tensor) -> torch.Tensor:
            return randn(x.shape[1:]).to(x.dtype)

        noise = randn((net.in_channels, net.input_size, net.input_size))
        latents = diffusion.sample(net, noise, y, num_steps=int(num_inference_steps), guidance=guidance,
                                   randn_like=randn_like, **sampler)
        if not latents.isfinite().all():
            raise ValueError("The sampled latents are not finite: use more common values of guidance_scale and of the "
                             "sampler's settings, or load the pipeline in float32.")
        images = latents if output_type == "latent" else self.decode(latents, device)
        self.maybe_free_model_hooks()
        if output_type == "pil":
            images = [Image.fromarray(image) for image in images.numpy()]
        elif output_type != "latent":
            images = images.float() / 255
            images = images.permute(0, 3, 1, 2) if output_type == "pt" else images.numpy()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def check_labels(self, class_labels: int | list[int], net: Network) -> torch.Tensor:
        """Returns labels as (B,) int64; raises ValueError for others than the network's."""
        try:
            y = torch.as_tensor(class_labels).flatten()
        except (TypeError, ValueError, RuntimeError):  # of text, None, lists of different lengths
            y = torch.empty(0)
        is_whole = not (y.is_floating_point() or y.dtype == torch.bool)
        if not is_whole or not len(y) or not ((y >= 0) & (y < net.num_classes + net.null_label)).all():
            or_none = f", or {net.num_classes} for no class" if net.null_label else ""
            raise ValueError(f"class_labels={class_labels!r} must be integers: 0 … {net.num_classes - 1}{or_none}.")
        return y.to(torch.int64)

    def check_guidance(
        self, scale: float | None, interval: tuple | None, channels: int | None, diffusion: EDM | RF, sampler: dict,
    ) -> Guidance | None:
        """Builds classifier-free guidance, None without a scale; raises ValueError where a setting does not fit."""
        if scale is None:
            for key, value in (("interval", interval), ("channels", channels)):
                if value is not None:
                    raise ValueError(f"{key}={value!r} changes nothing without guidance_scale: give "
                                     f"guidance_scale=1.5.")
            return None
        if not is_number(scale):
            raise ValueError(f"guidance_scale={scale!r}: give a finite number, or None.")
        if interval is not None:
            is_pair = isinstance(interval, list | tuple) and len(interval) == 2
            if not is_pair or not all(isinstance(end, Real) and end >= 0 for end in interval):
                raise ValueError(f"interval={interval!r}: give the lowest and the highest noise level, as (0.3, 3.0).")
            check_interval(interval, diffusion, sampler)
        if channels is not None and not is_number(channels, Integral):
            raise ValueError(f"channels={channels!r}: give a whole number, or None.")
        return Guidance(scale, interval=interval, channels=channels)

    def decode(self, latents: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Decodes latents by the convention that they were made by, to (B, H, W, 3) uint8 on the CPU."""
        convention = Convention.read(self.config.convention)
        decoder = (Identity(device, convention) if self.vae is None else
                   DiffusersAutoencoder("vae", self.vae, device, convention))
        return decoder.decode(latents, strict=True).cpu()
