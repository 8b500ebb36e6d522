"""Routes networks of diffusers in training: a small random SD3 and Flux with LoRA by PEFT, dense and routed in turn.

    pip install peft
    python examples/route_diffusers.py

Prints how long a step takes each way. The networks are small and random, so the ratio is the lesson and not the loss.
"""

import argparse
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from foreign.routed import routed
from routing_module import Route

ROUTE, BATCH, TEXT = Route(2, -4, 0.5), 2, 16


def networks(side: int):
    """Yields name, network and a batch of its inputs, for latents of side x side tokens."""
    from diffusers import FluxTransformer2DModel, SD3Transformer2DModel

    heads = dict(num_attention_heads=4, attention_head_dim=64, joint_attention_dim=64, pooled_projection_dim=64)
    common = dict(encoder_hidden_states=torch.randn(BATCH, TEXT, 64), pooled_projections=torch.randn(BATCH, 64),
                  timestep=torch.rand(BATCH), return_dict=False)
    yield "SD3", SD3Transformer2DModel(
        sample_size=2 * side, in_channels=4, out_channels=4, num_layers=12, caption_projection_dim=256,
        pos_embed_max_size=2 * side, **heads,
    ), dict(hidden_states=torch.randn(BATCH, 4, 2 * side, 2 * side), **common)
    ids = torch.cartesian_prod(torch.arange(1.0), torch.arange(float(side)), torch.arange(float(side)))
    yield "Flux", FluxTransformer2DModel(
        in_channels=16, num_layers=4, num_single_layers=8, axes_dims_rope=(16, 24, 24), **heads,
    ), dict(hidden_states=torch.randn(BATCH, side**2, 16), img_ids=ids, txt_ids=torch.zeros(TEXT, 3), **common)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="steps each way")
    parser.add_argument("--side", type=int, default=16, help="tokens a side")
    settings = parser.parse_args(words)
    try:
        from peft import LoraConfig
    except ImportError:
        raise SystemExit("This example trains LoRA by PEFT, which is not installed: pip install peft") from None

    torch.manual_seed(0)
    for name, network, batch in networks(settings.side):
        network.requires_grad_(False)
        network.add_adapter(LoraConfig(r=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
        weights = [parameter for parameter in network.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=1e-3)
        target = torch.randn_like(batch["hidden_states"])
        seconds = {"dense": [], "routed": []}
        for step in range(2 * (settings.steps + 1)):            # in turn, so that what else runs slows both alike
            way, start = ("dense", "routed")[step % 2], time.perf_counter()
            with routed(network, [ROUTE]) if way == "routed" else nullcontext():
                loss = (network(**batch)[0] - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds[way].append(time.perf_counter() - start)
        dense, fast = (statistics.median(seconds[way][1:]) for way in ("dense", "routed"))      # the first one warms up
        print(f"{name}, {settings.side**2} tokens, route {ROUTE}: dense step {dense * 1000:.0f} ms, routed step "
              f"{fast * 1000:.0f} ms, {dense / fast:.2f} times as fast; loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
