"""Does a route pay for your network? Trains two LoRAs on it, dense and routed in turn, by diffusers' flow matching.

    python examples/route_diffusers.py                                            # a small random Flux
    python examples/route_diffusers.py --network stabilityai/stable-diffusion-3.5-medium --data emoji.safetensors

--network is a folder or hub id with a transformer of a class in CALLS. --data is a safetensors file with `latents` as
the network expects them (n, C, h, w; videos n, C, F, h, w), `prompt_embeds` (n, T, D) and perhaps `pooled` (n, D).
Prints the ratio of step times, and the validation loss of both LoRAs on the dense network.
"""

import argparse
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import diffusers
import torch
from diffusers.training_utils import cast_training_params, compute_density_for_timestep_sampling
from peft import LoraConfig
from safetensors.torch import load_file
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from routed import Route, routed


def in_patches(z, call):
    """Calls with the patches of 2x2 latents as tokens, and turns its tokens into latents."""
    height, width = z.shape[2] // 2, z.shape[3] // 2
    out = call(F.pixel_unshuffle(z, 2).flatten(2).transpose(1, 2), height, width)[0]
    return F.pixel_shuffle(out.transpose(1, 2).unflatten(2, (height, width)), 2)


def flux(network, z, t, words, pooled):
    def call(tokens, height, width):
        places = torch.cartesian_prod(*(torch.arange(float(n), device=t.device) for n in (1, height, width)))
        guidance = torch.ones_like(t) if network.config.guidance_embeds else None
        return network(tokens, words, pooled, t / 1000, places, 0 * words[0, :, :3], guidance, return_dict=False)
    return in_patches(z, call)


def qwen(network, z, t, words, pooled):
    return in_patches(z, lambda tokens, height, width: network(
        tokens, words, torch.ones_like(words[..., 0]), t / 1000, [[(1, height, width)]] * len(z), return_dict=False))


CALLS = {
    "FluxTransformer2DModel": flux,
    "QwenImageTransformer2DModel": qwen,
    "SD3Transformer2DModel": lambda network, z, t, words, pooled: network(z, words, pooled, t, return_dict=False)[0],
    "WanTransformer3DModel": lambda network, z, t, words, pooled: network(z, t, words, return_dict=False)[0],
}


def a_small_flux(samples: int, side: int):
    """A random Flux, and smooth latents of side x side tokens, of which something can be learned."""
    network = diffusers.FluxTransformer2DModel(
        num_layers=4, num_single_layers=4, num_attention_heads=4, attention_head_dim=32, in_channels=16,
        joint_attention_dim=64, pooled_projection_dim=64, axes_dims_rope=(8, 12, 12))
    latents = F.interpolate(torch.randn(samples, 4, 3, 3), 2 * side, mode="bilinear")
    return network, dict(latents=latents, prompt_embeds=torch.randn(samples, 16, 64), pooled=torch.randn(samples, 64))


def loss_of(network, data: dict[str, torch.Tensor], chosen: torch.Tensor, seed: int) -> torch.Tensor:
    """As diffusers' training scripts: logit-normal times, mean squared error of the velocity noise - x."""
    data = {key: value[chosen] for key, value in data.items()}
    x, scheduler = data["latents"], diffusers.FlowMatchEulerDiscreteScheduler()
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(x.shape, generator=generator).to(x)
    u = compute_density_for_timestep_sampling("logit_normal", len(x), 0.0, 1.0, generator=generator)
    t = scheduler.timesteps[(u * len(scheduler.timesteps)).long()].to(x.device)
    call, z = CALLS[type(network).__name__], scheduler.scale_noise(x, t, noise)
    v = call(network, z, t, data["prompt_embeds"], data.get("pooled"))
    return F.mse_loss(v.float(), (noise - x).float())


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(network="", data="", start=2, end=-4, ratio=0.5, steps=20, batch=4, side=16).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    settings = parser.parse_args(words)
    torch.manual_seed(0)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    if settings.network:
        network = diffusers.AutoModel.from_pretrained(settings.network, subfolder="transformer", torch_dtype=dtype)
        data = load_file(settings.data)
    else:
        network, data = a_small_flux(4 * settings.batch, settings.side)
    if (name := type(network).__name__) not in CALLS:
        raise SystemExit(f"{name} is none of {', '.join(CALLS)}: add a function that calls it.")
    network.to(device).requires_grad_(False)
    data = {key: value.to(device, network.dtype) for key, value in data.items()}
    route, count = Route(settings.start, settings.end, settings.ratio), len(data["latents"])
    held_out = torch.arange(count * 3 // 4, count)

    @torch.no_grad()
    def validation() -> float:
        return statistics.mean(loss_of(network, data, part, seed).item()
                               for seed in range(4) for part in held_out.split(settings.batch))

    before, seconds, optimizers = validation(), {"dense": [], "routed": []}, {}
    for way in seconds:
        torch.manual_seed(1)                            # both LoRAs begin alike
        network.add_adapter(LoraConfig(r=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]), adapter_name=way)
        cast_training_params(network)
        weights = (weight for key, weight in network.named_parameters() if f".{way}." in key)
        optimizers[way] = torch.optim.AdamW(weights, lr=1e-3)
    for step, batch in enumerate(torch.randint(count * 3 // 4, (settings.steps, settings.batch))):
        for way, optimizer in optimizers.items():           # in turn, so that what else runs slows both alike
            network.set_adapter(way)
            begin = time.perf_counter()
            with routed(network, [route]) if way == "routed" else nullcontext():
                (loss := loss_of(network, data, batch, 100 + step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()                                     # waits for the device
            seconds[way].append(time.perf_counter() - begin)
    dense, fast = (statistics.median(seconds[way][1:] or seconds[way]) for way in seconds)  # the first one warms up
    print(f"{name}, route {route}: {dense:.3f} s a step dense, {fast:.3f} s routed, {dense / fast:.2f} times as fast")
    for way in optimizers:
        network.set_adapter(way)
        print(f"LoRA after {settings.steps} {way} steps: dense validation loss {validation():.4f}, {before:.4f} before")


if __name__ == "__main__":
    main()
