"""Speed, applied to a plain network from outside: recomputation, torch.compile, float8, autocast and replicas.

Nothing here changes what is saved: parameters keep their names and their float32 values.
"""

import functools
import logging

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import GradientAccumulationPlugin
from torch import nn

from dit import DiT
from runtime import ranks
from runtime.device import check_device, require_plain_launch, set_float32
from training.cuda_graphs import CUDA_GRAPHS

# The autocast of each precision.
PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
COMPILE_MODES = (*CUDA_GRAPHS, "max-autotune-no-cudagraphs")


# If torch is built for CUDA, compiling for a CPU looks for CUDA and warns that there is none.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def recompute_activations(model: DiT) -> None:
    """Makes each block recompute its activations in the backward pass instead of keeping them."""
    for block in model.blocks:
        block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)


def compile_blocks(model: DiT, how: bool | str) -> None:
    """Compiles the forward pass of each block in place, with static shapes; `how` is a bool or one of COMPILE_MODES.

    Blocks share their graphs: one for each number of tokens, whatever the depth. Hooks on a block run outside of them:
    FSDP's hooks, which gather and free its weights, and those that collect hidden states.
    """
    # torch gives up after 8 graphs of one function. Routes of many lengths need more, as do several runs in a notebook.
    torch._dynamo.config.recompile_limit = 64
    # Otherwise torch splits blocks where DDP's buckets end, to send gradients earlier. Blocks are short enough.
    torch._dynamo.config.optimize_ddp = False
    if how:
        mode = None if how is True else CUDA_GRAPHS.get(how, how)
        for block in model.blocks:
            block.forward = torch.compile(block.forward, dynamic=False, mode=mode)


def replicate(accelerator: Accelerator, objective: nn.Module, sharded: bool = False) -> nn.Module:
    """Wraps the objective in autocast and, unless FSDP has sharded it already, in DDP."""
    wrapped = accelerator.prepare_model(objective, evaluation_mode=sharded)
    if isinstance(wrapped, nn.parallel.DistributedDataParallel):
        wrapped.broadcast_buffers = False  # `share_buffers` does this; DDP's argument for it is deprecated
    return wrapped


def make_accelerator(
    precision: str, grad_accum_steps: int, tf32: bool, cpu: bool = False, **options: object,
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
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True),
                             InitProcessGroupKwargs(timeout=ranks.TIMEOUT)],
            **options,
        )
