"""The private parts of libraries that the project uses, and the settings of theirs that hold for a whole process.

Nothing else touches either, but for `routed/`, which stands alone.
"""

import contextlib
import os
import struct
import sys
from pathlib import Path
from types import ModuleType

import torch
from accelerate.state import AcceleratorState
from filelock import FileLock, Timeout

from guidance import Network


def forget_precision(keep_ranks: bool) -> None:
    """Makes accelerate forget precision and device, so that the next job of this process can choose its own.

    It has no public call for that. Ranks in a process group keep that and its device.
    """
    AcceleratorState._reset_state(reset_partial_state=not keep_ranks)


def keep_tensorflow_out() -> None:
    """Makes TensorBoard do without TensorFlow, by the module that TensorBoard's own build has as a switch.

    Its import takes seconds, and prints that no GPU will be used.
    """
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))


def compile_blocks(model: Network, how: bool | str) -> None:
    """Compiles the forward pass of each block in place, with static shapes; `how` is a bool, or a mode of torch's.

    Blocks share their graphs: one for each number of tokens, whatever the depth. Hooks on a block run outside of them:
    FSDP's hooks, which gather and free its weights, and those that collect hidden states.
    """
    if not how:
        return  # the compiler is not even imported
    # torch gives up after 8 graphs of one function. Routes of many lengths need more, as do several jobs of a sweep.
    torch._dynamo.config.recompile_limit = 64
    # Otherwise torch splits blocks where DDP's buckets end, to send gradients earlier. Blocks are short enough.
    torch._dynamo.config.optimize_ddp = False
    # On a CPU, GELU's tanh takes a tenth of a step less as exponentials than by the compiler's default.
    torch._inductor.config.cpp.use_decompose_tanh = True
    remove_unfinished_libraries()
    for block in model.blocks:
        block.forward = torch.compile(block.forward, dynamic=False, mode=None if how is True else how)


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
