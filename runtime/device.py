"""The device of a command, and how it multiplies."""

import contextlib
import os
import platform
from pathlib import Path

import torch
from accelerate import PartialState

from runtime import ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def set_float32(tf32: bool) -> None:
    """Sets how a GPU multiplies float32: in full, or in TensorFloat-32, which keeps 10 bits of each factor."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


def require_plain_launch() -> None:
    """Raises ValueError where accelerate's own config would wrap the network a second time.

    And where srun has started several processes that do not know of each other, of which each would do all the work.
    """
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_PROCID" in os.environ and tasks != "1" and "WORLD_SIZE" not in os.environ:
        raise ValueError(f"srun has started {tasks} processes, but without RANK and WORLD_SIZE each would do all the "
                         f"work alone: use scripts/slurm.sh or torchrun, or set WORLD_SIZE=1 for independent commands.")
    on = [f"turns {name} on" for name in ("DeepSpeed", "FSDP", "Megatron_LM")
          if os.environ.get(f"ACCELERATE_USE_{name.upper()}", "false").lower() == "true"]
    if (backend := os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")).lower() not in ("no", ""):
        on.append(f"compiles by {backend} (dynamo_config, --dynamo_backend)")
    if on:
        raise ValueError(f"accelerate's config {on[0]}: start with torchrun, or turn it off by `accelerate config`. To "
                         f"compile or to shard a network, train.py has compile=true and sharding=fsdp.")


def join_ranks(cpu: bool, tf32: bool, **options: object) -> PartialState:
    """Starts the process group of a command that does not train; its state knows ranks and device."""
    set_float32(tf32)
    require_plain_launch()
    with ranks.joining():
        return PartialState(cpu=cpu or not torch.cuda.is_available(), **{"timeout": ranks.TIMEOUT, **options})


def multiplies_in_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.backends.cudnn.allow_tf32


def device_name(device: torch.device) -> str:
    """Names a GPU, or the processor and torch's number of threads on it, for the record of a time."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.machine()
    with contextlib.suppress(OSError):
        name = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0] or name
    return f"{name} (threads: {torch.get_num_threads()})"


def describe_device(device: torch.device) -> dict[str, object]:
    """Names the device and how it multiplies float32, for the record of a result."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, "tf32": multiplies_in_tf32(device)}
