"""Speed, applied to a plain network from outside: recomputation, float8, autocast and replicas.

Nothing here changes what is saved: parameters keep their names and their float32 values.
"""

import functools
import importlib.util
import inspect
from typing import Any, Literal

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from dit import DiT
from runtime import ranks
from runtime.device import check_device, require_plain_launch, set_float32

Compile = bool | Literal["reduce-overhead"]     # the last one asks for CUDA graphs of each block, too
Precision = Literal["fp32", "bf16", "fp16", "fp8"]
# The autocast of each.
PRECISIONS: dict[Precision, str] = {"fp32": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
TORCHAO = "0.18.0"  # imports with torch 2.11 and 2.15
BUCKETS = 25        # that DDP exchanges in a step, about, if they are of 25 MiB or more


def recompute_activations(model: DiT) -> None:
    """Makes each block recompute its activations in the backward pass instead of keeping them."""
    for block in model.blocks:
        block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)


def replicate(accelerator: Accelerator, objective: nn.Module, sharded: bool = False) -> nn.Module:
    """Wraps the objective in autocast and, in a process group, in DDP, unless FSDP has sharded it already."""
    wrapped = accelerator.prepare_model(objective, evaluation_mode=True)
    if sharded or not torch.distributed.is_initialized():
        return wrapped
    # Not accelerate's DDP, which it leaves out for a group of one rank. More than BUCKETS exchanges cost the host more
    # than they overlap with the backward pass.
    gradients = sum(p.nbytes for p in objective.parameters() if p.requires_grad)
    options: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": max(25, gradients / 2**20 / BUCKETS)}
    if "batched_grad_copy" in inspect.signature(DDP).parameters:  # of torch 2.15
        options["batched_grad_copy"] = True
    device = accelerator.device
    replica = DDP(wrapped, device_ids=[device.index] if device.type == "cuda" else None, **options)
    replica.broadcast_buffers = False  # they are the same on all ranks; DDP's argument for it is deprecated
    return replica


def check_float8(device: torch.device) -> None:
    """Raises ValueError where precision=fp8 cannot work: without torchao, or without a GPU that multiplies float8."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability < (8, 9) or importlib.util.find_spec("torchao") is None:
        raise ValueError(f"precision=fp8 needs a GPU of compute capability 8.9 or more (Ada, Hopper, Blackwell), and "
                         f"torchao: choose such a GPU and pip install torchao=={TORCHAO}, or set precision=bf16.")


def multiply_in_float8(model: DiT, emulate: bool = False) -> None:
    """Makes the linear layers that tokens pass through in a block multiply in float8, both ways, and no others.

    Parameters keep their names and float32 values. Weights, activations and gradients are cast in each pass, each
    tensor with one scale that brings its largest value to float8's (torchao's dynamic scaling, arXiv 2209.05433).
    `emulate` rounds the same way on any device, and multiplies in the input's type. Raises ValueError for layers
    whose sides are not multiples of 16.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_large(layer: nn.Module, name: str) -> bool:
        return isinstance(layer, nn.Linear) and "adaLN_modulation" not in name  # adaLN is small: one row per sample

    for name, layer in model.blocks[0].named_modules():
        if is_large(layer, name) and (layer.in_features % 16 or layer.out_features % 16):
            raise ValueError(f"precision=fp8 needs sides that are multiples of 16, but {name} is {layer.in_features} × "
                             f"{layer.out_features}: change model.hidden_size, or set precision=bf16.")
    # Padding is for batches whose number of tokens is no multiple of 16; published sizes need none.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    convert_to_float8_training(model.blocks, module_filter_fn=is_large, config=config)


def make_accelerator(
    precision: Precision, grad_accum_steps: int, tf32: bool, cpu: bool = False, **options: object,
) -> Accelerator:
    """Makes training's Accelerator, with its ranks, device, autocast and gradient accumulation."""
    set_float32(tf32)
    require_plain_launch()
    cpu = check_device(cpu, precision=precision)
    with ranks.joining():
        return Accelerator(
            mixed_precision=PRECISIONS[precision],
            cpu=cpu,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=grad_accum_steps),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=ranks.TIMEOUT)],
            **options,
        )
