"""The device of a command, and how it multiplies."""

import contextlib
import ctypes
import os
import platform
import re
import warnings
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

    It also raises ValueError if srun started processes that are not one group, as each would do all the work.
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


# ---- the check of a GPU ---------------------------------------------------------------------------------------------

OLDEST_DRIVERS = {"12": 525, "13": 580}  # NVIDIA's, by the CUDA version that torch is built for
NO_DEVICE = 100  # cuInit's error if this process may not use any GPU
ON_THE_CPU = "CUDA_VISIBLE_DEVICES= before the command, or cpu=true where it has that setting, computes on the CPU"


def check_device(cpu: bool, **precisions: str) -> bool:
    """Returns whether a command computes on the CPU; raises ValueError for a GPU that it cannot use or that is slow.

    `precisions` are its precision settings, by name. Where each rank sees only its own GPU, as with Slurm's
    --gpus-per-task=1, LOCAL_RANK becomes 0, as accelerate and torch choose the device by it.
    """
    if cpu:
        return True
    with warnings.catch_warnings(action="ignore"):  # torch's warning of an old driver
        has_gpu = torch.cuda.is_available()
    if not has_gpu:
        check_unused_gpu()
        return True
    rank, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if rank >= count > 1 or rank and count == 1 and "TORCHELASTIC_RUN_ID" in os.environ:  # its ranks see the same GPUs
        raise ValueError(f"{os.environ.get('LOCAL_WORLD_SIZE', rank + 1)} processes were started here, and torch sees "
                         f"{count} GPU{'s' * (count > 1)}: start at most one for each GPU (--nproc_per_node, "
                         f"--num_processes), or compute on the CPU with cpu=true.")
    if rank and count == 1:
        os.environ["LOCAL_RANK"] = "0"
    check_capability(torch.device("cuda", rank % count), **precisions)
    return False


def check_unused_gpu() -> None:
    """Raises ValueError for an NVIDIA GPU that torch cannot use; warns of one that is hidden from this process."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1", "NoDevFiles") or torch.version.hip:
        return
    error, cuda, count = ask_driver()
    has_file = any(Path("/dev").glob("nvidia[0-9]*"))
    driver = f"its driver {driver_version()}".rstrip()
    if count and torch.version.cuda is None:
        warnings.warn(f"this machine has a GPU, but torch {torch.__version__} is built without CUDA, so the CPU "
                      f"computes.", stacklevel=2)
    elif count or has_file and error not in (0, NO_DEVICE):
        needed = torch.version.cuda or "12"
        oldest = OLDEST_DRIVERS.get(major := needed.partition(".")[0], "that fits")
        if error is None:
            seen, advice = "NVIDIA's libcuda.so.1 is not installed", "start a container with --gpus all"
        elif cuda and cuda[0] < int(major):
            seen = f"{driver} is for CUDA {cuda[0]}.{cuda[1]}"
            advice = f"install driver {oldest} or newer, or a torch wheel for CUDA {cuda[0]} (pytorch.org)"
        else:
            seen = f"{driver} reports error {error}" if error else f"CUDA_VISIBLE_DEVICES or {driver} keeps torch out"
            advice = "see what nvidia-smi says, and restart the machine after an update of the driver"
        raise ValueError(f"This machine has a GPU that torch {torch.__version__} (CUDA {needed}) cannot use, as "
                         f"{seen}: {advice}. {ON_THE_CPU}.")
    elif has_file or Path("/proc/driver/nvidia/version").exists():
        warnings.warn("this machine has a GPU, but none is given to this container or job, so the CPU computes: ask "
                      "for one (docker run --gpus all, sbatch --gpus=1).", stacklevel=2)


def ask_driver() -> tuple[int | None, tuple[int, int] | None, int]:
    """Asks NVIDIA's driver for its error, its newest CUDA, and the number of GPUs; (None, None, 0) if there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, None, 0
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    error = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return error, (version.value // 1000, version.value % 1000 // 10), count.value


def driver_version() -> str:
    """Returns the version of NVIDIA's driver, such as 580.65.06; "" if the system does not report it, as in WSL."""
    with contextlib.suppress(OSError):
        if found := re.search(r" (\d+\.[\d.]+) ", Path("/proc/driver/nvidia/version").read_text()):
            return found[1]
    return ""


def check_capability(device: torch.device, **precisions: str) -> None:
    """Raises ValueError for a GPU that torch has no kernels for, and for bf16 where it would be emulated."""
    if torch.version.hip:  # AMD numbers its GPUs differently
        return
    has, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    capability, built = f"compute capability {has[0]}.{has[1]}", torch.cuda.get_arch_list()
    if built and not any(runs_on(architecture, has) for architecture in built):
        raise ValueError(f"{name} has {capability}, and torch {torch.__version__} is built for {', '.join(built)}: use "
                         f"another GPU, or a torch wheel with sm_{has[0]}{has[1]} (pytorch.org). {ON_THE_CPU}.")
    for key, precision in precisions.items():
        if precision == "bf16" and has < (8, 0):
            raise ValueError(f"{key}=bf16 needs compute capability 8.0 or more (Ampere, 2020), and {name}, of "
                             f"{capability}, would emulate it slowly: set {key}=fp16.")


def runs_on(architecture: str, has: tuple[int, int]) -> bool:
    """True if a GPU of this capability runs code compiled for an architecture such as sm_86, sm_90a or compute_120."""
    kind, number, variant = re.fullmatch(r"(sm|compute)_(\d+)([a-z]?)", architecture).groups()
    compiled = int(number[:-1]), int(number[-1])
    if variant == "a":
        return compiled == has
    return compiled <= has and (kind == "compute" or compiled[0] == has[0])  # the driver compiles compute_ code itself


def join_ranks(cpu: bool, tf32: bool, precisions: dict[str, str] | None = None, **options: object) -> PartialState:
    """Starts the process group of a command that does not train; the state has its ranks and device."""
    set_float32(tf32)
    require_plain_launch()
    cpu = check_device(cpu, **(precisions or {}))
    with ranks.joining():
        return PartialState(cpu=cpu, **{"timeout": ranks.TIMEOUT, **options})


# ---- what a result records ------------------------------------------------------------------------------------------


def multiplies_in_tf32(device: torch.device) -> bool:
    """True if float32 is multiplied in TensorFloat-32, which GPUs of compute capability 8.0 or more have."""
    return (device.type == "cuda" and torch.backends.cudnn.allow_tf32 and torch.version.hip is None
            and torch.cuda.get_device_capability(device) >= (8, 0))


def device_name(device: torch.device) -> str:
    """Names a GPU, or the processor and torch's number of threads on it, to record with a timing."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.machine()
    with contextlib.suppress(OSError):
        name = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0] or name
    return f"{name} (threads: {torch.get_num_threads()})"


def describe_device(device: torch.device) -> dict[str, object]:
    """Names the device and how it multiplies float32, to record with a result."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, "tf32": multiplies_in_tf32(device)}
