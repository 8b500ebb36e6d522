"""Memory that is full, anywhere in any command, is a sentence: what was asked for, what is free, what to turn first."""

import errno

import pytest
import torch
from conftest import run_command
from training_runs import train_here

import autoencoder as autoencoders
import sample
import train
from runtime.command import full_memory, is_full_memory

GPU = ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.25 GiB is free. Including non-PyTorch "
       "memory, this process has 77.85 GiB memory in use.")
CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 3221225472 bytes. Error code 12"

def full(*_, **__):
    raise torch.OutOfMemoryError(GPU)


@pytest.mark.parametrize("error", [
    MemoryError(), torch.OutOfMemoryError(GPU), RuntimeError(CPU), OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("CUDA error: out of memory"), RuntimeError("NCCL error: Cuda failure 2 'out of memory'"),
    torch.AcceleratorError("CUDA error: out of memory"),
])
def test_what_libraries_raise_for_memory_is_known(error):
    assert is_full_memory(error)


@pytest.mark.parametrize("error", [ValueError("images out of memory"), OSError(errno.ENOSPC, "No space left"), KeyError("can't allocate memory"),
                                   RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")])
def test_what_is_no_full_memory_is_not_taken_for_it(error):
    assert not is_full_memory(error)


def test_a_sentence_has_the_librarys_words_and_the_settings_that_help(monkeypatch):
    plain = {"batch_size": 256, "grad_accum_steps": 4, "activation_checkpointing": True, "sharding": "none", "samples": {"batch_size": 16}}
    assert full_memory(torch.OutOfMemoryError(GPU), plain) == (
        f"Memory is full: {GPU} What helps: a lower batch_size, a higher grad_accum_steps, sharding=fsdp, a lower samples.batch_size.")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert full_memory(MemoryError(), {"batch_size": 2}) == "Memory is full on rank 3 of 8: MemoryError What helps: a lower batch_size."


@pytest.mark.parametrize("where", ["train_step", "make_run", "generate"])
def test_a_training_that_runs_out_of_memory_says_what_to_turn(shapes, tmp_path, monkeypatch, where):
    monkeypatch.setattr(train, where, full)
    result = train_here(tmp_path / "run", shapes, "steps=1", "samples.every=1", "model.depth=3", "model.routes=[]", "compile=false")
    assert result.returncode == 1 and f"train.py: Memory is full: {GPU} What helps: a lower batch_size, " in result.stderr


@pytest.mark.parametrize(("entry", "program"), [(sample.main, "sample.py"), (sample.compare_guided, "rf.py")])
def test_a_drawing_that_runs_out_of_memory_says_what_to_turn(monkeypatch, entry, program):
    monkeypatch.setattr(sample, "open_sampling", full)
    with pytest.raises(SystemExit, match="Memory is full.*decode_batch_size=1") as stop:
        run_command(entry, program, "checkpoint=x", "cpu=true")
    assert stop.value.code.startswith(f"{program}: ")


class Counting(autoencoders.Identity):
    """A decoder that shrinks eightfold, as Stable Diffusion's, and notes how many images it is given at once."""

    downsample = 8

    def __init__(self):
        super().__init__()
        self.pieces = []

    def _decode(self, z):
        self.pieces.append(len(z))
        return z.new_zeros(len(z), 3, 1, 1)


@pytest.mark.parametrize(("side", "asked", "pieces"), [(32, None, 16 * [16]), (64, None, 64 * [4]), (256, None, 256 * [1]), (32, 100, [100, 100, 56])])
def test_a_batch_of_256_is_decoded_in_pieces_by_default(side, asked, pieces):
    decoder = Counting()
    decoder.decode_batch_size = asked
    decoder.decode(torch.zeros(256, 3, side, side))
    assert decoder.pieces == pieces
    assert asked or max(pieces) * (8 * side) ** 2 <= max(2**20, (8 * side) ** 2)
