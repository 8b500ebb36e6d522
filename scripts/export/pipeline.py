"""Seeds and classes -> images, by the sampler, guidance and decoder that the weights were trained for.

    pipe = DiffusionPipeline.from_pretrained("<this folder>", trust_remote_code=True)
    seeds = range(4)
    images = pipe([0, 1, 2, 3], [torch.Generator().manual_seed(seed) for seed in seeds]).images
    image = pipe(207, torch.Generator().manual_seed(0)).images[0]

The other files here are unmodified copies from the project that made the folder.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from PIL import Image

from .autoencoder import Convention, DiffusersAutoencoder, Identity
from .edm import DDPM, EDM
from .guidance import Guidance
from .rf import RF, CleanRF
from .routing_module import Route

CODE = ("pipeline.py", "autoencoder.py", "edm.py", "guidance.py", "rf.py", "routing_module.py")
DIFFUSIONS = {"edm": EDM, "ddpm": DDPM, "rf": RF, "rf_clean": CleanRF}


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
    """Draws images of classes; without a vae the latents are pixels."""

    model_cpu_offload_seq = "transformer->vae"
    _optional_components = ["vae"]

    def __init__(
        self, transformer: torch.nn.Module, vae: torch.nn.Module = None, diffusion: dict | None = None,
        convention: dict | None = None, class_names: list[str] | None = None, null_label: bool = True,
    ):
        super().__init__()
        self.register_modules(transformer=transformer, vae=vae)
        self.register_to_config(diffusion=diffusion, convention=convention, class_names=class_names,
                                null_label=null_label)

    def save_config(self, save_directory: str | Path, **options: object) -> None:
        """Ends `save_pretrained`: adds the code, by which alone the folder can be loaded again."""
        super().save_config(save_directory)
        folder = Path(save_directory)
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
        output_type: str = "pil",                           # pil | np | pt, the last two in 0 … 1
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple:
        net, device = Network(self.transformer, self.config.null_label), self._execution_device
        y = torch.as_tensor(class_labels).flatten()
        if y.is_floating_point() or not len(y) or not ((y >= 0) & (y <= net.num_classes)).all():
            raise ValueError(f"class_labels={class_labels} must be integers: 0 … {net.num_classes - 1}, or "
                             f"{net.num_classes} for no class.")
        y = y.to(device, torch.int64)
        one_each = isinstance(generator, list | tuple)
        if one_each and len(generator) != len(y):
            raise ValueError(f"There are {len(y)} class_labels and {len(generator)} generators: give one per image, a "
                             f"single one for all, or none.")

        def randn(shape: tuple[int, ...]) -> torch.Tensor:
            if one_each:
                return torch.stack([torch.randn(shape, generator=g, device=g.device) for g in generator]).to(device)
            return torch.randn((len(y), *shape), generator=generator, device=generator and generator.device).to(device)

        def randn_like(x: torch.Tensor) -> torch.Tensor:
            return randn(x.shape[1:]).to(x.dtype)

        settings = dict(self.config.diffusion)
        diffusion = DIFFUSIONS[settings.pop("name")](**settings)
        guidance = None if guidance_scale is None else Guidance(guidance_scale, interval=interval, channels=channels)
        noise = randn((net.in_channels, net.input_size, net.input_size))
        latents = diffusion.sample(net, noise, y, num_steps=num_inference_steps, guidance=guidance,
                                   randn_like=randn_like, **(sampler or {}))
        convention = Convention.read(self.config.convention)  # by which the latents were made
        decoder = (Identity(device, convention) if self.vae is None else
                   DiffusersAutoencoder("vae", self.vae, device, convention))
        images = decoder.decode(latents).cpu()              # (B, H, W, 3) uint8
        self.maybe_free_model_hooks()
        if output_type == "pil":
            images = [Image.fromarray(image) for image in images.numpy()]
        else:
            images = images.float() / 255
            images = images.permute(0, 3, 1, 2) if output_type == "pt" else images.numpy()
        return ImagePipelineOutput(images=images) if return_dict else (images,)
