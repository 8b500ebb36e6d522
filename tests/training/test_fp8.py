"""Training with the blocks' large linear layers in float8, emulated: what is saved, and how the loss fares."""

import copy

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import train
from blocks import BLOCKS
from edm import EDM
from objectives import DiffusionLoss
from training import speed
from weights.records import build_network

pytest.importorskip("torchao")


def network(hidden_size=32, **options):
    torch.manual_seed(0)
    return build_network(dict(input_size=8, patch_size=2, in_channels=4, hidden_size=hidden_size, depth=3, num_heads=2,
                              num_classes=4, init="xavier",
                              routes=[dict(selection_ratio=0.5, start_layer_idx=1, end_layer_idx=1)]) | options)


def trained(precision, forget, steps=30):
    """Trains on one batch with the same random numbers; returns the losses, and the network."""
    forget(reset_partial_state=True)
    model, accelerator = network(), Accelerator(mixed_precision=speed.PRECISIONS[precision], cpu=True)
    if precision == "fp8":
        speed.multiply_in_float8(model, emulate=True)
    objective = DiffusionLoss(model, EDM())
    called, optimizer = accelerator.prepare(objective, torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True))
    y = torch.arange(16) % 4
    x = 0.5 * torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(1))[y]
    losses = []
    for step in range(steps):
        torch.manual_seed(step % 3)
        losses.append(train.train_step(accelerator, called, objective, optimizer, x, y, {}, label_dropout=0.1,
                                       clip_norm=None, num_parts=1)[0].item())
    return losses, model


@pytest.mark.parametrize("block", BLOCKS)
def test_the_blocks_large_layers_alone_are_converted_and_the_parameters_are_unchanged(block):
    model = network(96, block=block, num_heads=8)  # two thirds of four times 96 are 256
    before, ema = dict(model.named_parameters()), copy.deepcopy(model)
    layers = {name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)
              and name.startswith("blocks.") and "adaLN_modulation" not in name}
    speed.multiply_in_float8(model, emulate=True)
    assert layers == {name for name, layer in model.named_modules() if type(layer).__name__ == "Float8Linear"}
    assert all(p is before[name] and p.dtype == torch.float32 for name, p in model.named_parameters())
    model(torch.randn(4, 4, 8, 8), torch.rand(4), torch.arange(4), routes=model.routes).sum().backward()
    ema.load_state_dict(model.state_dict())
    train.update_ema(train.trained_weights(ema), train.trained_weights(model), 0.5)
    assert not any(type(layer).__name__ == "Float8Linear" for layer in ema.modules())


def test_the_loss_in_float8_falls_as_it_does_in_bf16_and_in_float32(fresh_accelerator):
    (fp32, _), (bf16, _), (fp8, model) = (trained(precision, fresh_accelerator)
                                          for precision in ("fp32", "bf16", "fp8"))
    assert fp8[0] == pytest.approx(bf16[0], rel=0.02) and fp8[0] != bf16[0]
    assert fp8[-1] < 0.7 * fp8[0] and fp8[-1] == pytest.approx(fp32[-1], rel=0.02)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("batch", [4, 3])  # three times the eight tokens in the route are padded to a multiple of 16
def test_the_emulation_equals_products_in_float8(batch):
    results = []
    for emulate in (True, False):
        model = network()
        speed.multiply_in_float8(model, emulate)
        x, t = torch.randn(batch, 4, 8, 8), torch.randn(batch)
        answer = model(x, t, torch.arange(batch), routes=model.routes)
        answer.square().mean().backward()
        results.append((answer.detach(), model.blocks[1].attn.qkv.weight.grad))
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm()


def test_layers_that_do_not_divide_by_16_raise_a_one_line_error():
    with pytest.raises(ValueError, match="attn.qkv is 40 × 120: change model.hidden_size"):
        speed.multiply_in_float8(network(40))
