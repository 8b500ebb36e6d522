"""What trying the blocks costs, beside the first training step of a small Flux and a small Wan on this machine.

    python -m pytest -m rig tests/rigs/test_probe_time.py -s
"""

import time

import diffusers
import pytest
import torch

from routed import Route, routed
from routed.trial import TRIED

pytestmark = pytest.mark.rig


def flux():
    net = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=4, num_single_layers=8, num_attention_heads=4, attention_head_dim=64,
        joint_attention_dim=64, pooled_projection_dim=64, axes_dims_rope=(16, 24, 24))
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(16.0), torch.arange(16.0))
    return net, dict(hidden_states=torch.randn(2, 256, 16), encoder_hidden_states=torch.randn(2, 64, 64),
                     pooled_projections=torch.randn(2, 64), timestep=torch.rand(2), img_ids=places,
                     txt_ids=torch.zeros(64, 3))


def wan():
    net = diffusers.WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=64, in_channels=16, out_channels=16, text_dim=64, freq_dim=64,
        ffn_dim=1024, num_layers=12)
    return net, dict(hidden_states=torch.randn(2, 16, 4, 16, 16), timestep=torch.rand(2) * 1000,
                     encoder_hidden_states=torch.randn(2, 64, 64))


@pytest.mark.parametrize("make", [flux, wan])
def test_trying_blocks_costs_less_than_the_rest_of_the_first_step(make):
    torch.manual_seed(0)
    net, call = make()
    net.train()

    def seconds(probe):
        TRIED.clear()
        start = time.perf_counter()
        with routed(net, [Route(2, -4, 0.5)], probe=probe) as routing:
            out = net(**call, return_dict=False)[0]
        out.square().mean().backward()
        net.zero_grad()
        return time.perf_counter() - start, len(routing.trials)

    seconds(False)
    (without, _), (with_trials, kinds) = (min(seconds(probe) for _ in range(5)) for probe in (False, True))
    print(f"\n{make.__name__}: {kinds} kinds of blocks, first step {with_trials:.2f} s, of which trials "
          f"{with_trials - without:.2f} s ({with_trials / without - 1:.0%})")
    assert with_trials < 2 * without
