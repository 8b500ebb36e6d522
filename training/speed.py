"""Speed, applied to a plain network from outside: recomputation, torch.compile, float8, autocast and replicas.

Nothing here changes what is saved: parameters keep their names and their float32 values.
"""

import contextlib
import functools
import importlib.util
import inspect
import logging
import os
import struct
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import GradientAccumulationPlugin
from filelock import FileLock, Timeout
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from dit import DiT
from guidance import Guidance
from runtime import ranks
from runtime.device import check_device, require_plain_launch, set_float32
from training.cuda_graphs import CUDA_GRAPHS

# The autocast of each precision.
PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
COMPILE_MODES = (*CUDA_GRAPHS, "max-autotune-no-cudagraphs")
TORCHAO = "0.18.0"  # imports with torch 2.11 and 2.15
BUCKETS = 25        # that DDP exchanges in a step, about, if they are of 25 MiB or more


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
    if not how:
        return  # the compiler is not even imported
    # torch gives up after 8 graphs of one function. Routes of many lengths need more, as do several runs in a notebook.
    torch._dynamo.config.recompile_limit = 64
    # Otherwise torch splits blocks where DDP's buckets end, to send gradients earlier. Blocks are short enough.
    torch._dynamo.config.optimize_ddp = False
    # On a CPU, GELU's tanh takes a tenth of a step less as exponentials than by the compiler's default.
    torch._inductor.config.cpp.use_decompose_tanh = True
    remove_unfinished_libraries()
    mode = None if how is True else CUDA_GRAPHS.get(how, how)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, dynamic=False, mode=mode)


def remove_unfinished_libraries() -> None:
    """Removes what a stopped compilation has left in torch's cache, which would fail at each start; prints a line.

    The linker writes a library under its final name, and torch takes any that is there. A library that a running
    process writes is locked, and stays.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # slow

    cache, removed = Path(cache_dir()), []
    for file in cache.glob("*/*.so"):
        with contextlib.suppress(Timeout, OSError):  # another process compiles it, or has removed it
            if not is_complete(file):
                with FileLock(cache / "locks" / f"{file.name.partition('.')[0]}.lock").acquire(timeout=0):
                    if not is_complete(file):
                        file.unlink()
                        removed.append(file.name)
    if removed:
        print(f"A stopped compilation had left {len(removed)} unfinished files in {cache}: they are removed, and "
              f"compiled again.")


def is_complete(library: Path) -> bool:
    """True unless a shared library is empty, or ends before the table of sections that its ELF header announces."""
    with open(library, "rb") as file:
        header, size = file.read(64), file.seek(0, os.SEEK_END)
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return any(header) and sys.platform != "linux"
    table, *_, row, rows = struct.unpack_from("<QIHHHHH", header, 40)  # of a 64-bit file
    return 0 < table and table + row * rows <= size


def compile_to_sample(
    net: DiT, guidance: Guidance | None, how: bool | None, count: int, device: torch.device,
) -> bool:
    """Compiles the network that `count` images are sampled from, and that of a weak pass; returns whether it does.

    None compiles where that pays, as it takes a minute: on a GPU, for more than 1,000 images, and unless the ratios of
    tokens change from step to step, as each number of tokens is a graph.
    """
    if how is None:
        scheduled = guidance is not None and tuple in (type(guidance.gamma1), type(guidance.gamma2))
        how = device.type == "cuda" and count > 1000 and not scheduled
    for network in filter(None, (net, guidance and guidance.net2)):
        compile_blocks(network, how)
    return how


def replicate(accelerator: Accelerator, objective: nn.Module, sharded: bool = False) -> nn.Module:
    """Wraps the objective in autocast and, in a process group, in DDP, unless FSDP has sharded it already."""
    wrapped = accelerator.prepare_model(objective, evaluation_mode=True)
    if sharded or not torch.distributed.is_initialized():
        return wrapped
    # Not accelerate's DDP, which it leaves out for a group of one rank. More than BUCKETS exchanges cost the host more
    # than they overlap with the backward pass.
    gradients = sum(p.nbytes for p in objective.parameters() if p.requires_grad)
    batched = {"batched_grad_copy": True} if "batched_grad_copy" in inspect.signature(DDP).parameters else {}  # of 2.15
    replica = DDP(wrapped, device_ids=[accelerator.device.index] if accelerator.device.type == "cuda" else None,
                  gradient_as_bucket_view=True, bucket_cap_mb=max(25, gradients / 2**20 / BUCKETS), **batched)
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
            kwargs_handlers=[InitProcessGroupKwargs(timeout=ranks.TIMEOUT)],
            **options,
        )
