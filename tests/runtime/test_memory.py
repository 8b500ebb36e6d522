"""Out of memory in the work of a command raises a one-line error: the library's words and the settings that help."""

import pytest
import torch
from conftest import run_command
from training_runs import train_here

import sample
import train
from runtime.command import is_full_memory
from training import memory

GPU = ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.25 GiB is "
       "free.")
CPU = ("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
       "allocate 3221225472 bytes.")


def full(*_, **__):
    raise torch.OutOfMemoryError(GPU)


@pytest.mark.parametrize("error", [
    MemoryError(), torch.OutOfMemoryError(GPU), RuntimeError(CPU), torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("NCCL error: Cuda failure 2 'out of memory'"),
])
def test_what_libraries_raise_when_out_of_memory_is_recognised(error):
    assert is_full_memory(error)


@pytest.mark.parametrize("error",
                         [ValueError("images out of memory"),
                          RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")])
def test_other_errors_are_not_reported_as_out_of_memory(error):
    assert not is_full_memory(error)


@pytest.mark.parametrize("where", ["train_step", "make_run", "generate"])
def test_a_training_that_runs_out_of_memory_names_the_settings_that_help(shapes, tmp_path, monkeypatch, where):
    monkeypatch.setattr(train, where, full)
    result = train_here(tmp_path / "run", shapes, "steps=1", "samples.every=1", "model.depth=3", "model.routes=[]",
                        "compile=false")
    assert result.returncode == 1
    assert f"train.py: Memory is full: {GPU} Settings that help: batch_size, grad_accum_steps, " in result.stderr


def test_a_training_that_fills_a_gpu_names_the_parts_that_fit(shapes, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "train_step", full)
    monkeypatch.setattr(memory, "gpu_bytes", lambda: 20e9)
    small = ["steps=1", "samples.every=0", "model.depth=3", "model.routes=[]", "compile=false", "batch_size=32"]
    for an_image, words in ((1e9, "grad_accum_steps=4 should fit 20 GB. Settings that help: "),
                            (10e9, "Not one image fits 20 GB: set activation_")):
        monkeypatch.setattr(memory, "bytes_in_training",
                            lambda build, an_image=an_image: (len(build().blocks) * 3e9, an_image))
        assert words in train_here(tmp_path / "run", shapes, *small).stderr


def test_sampling_that_runs_out_of_memory_names_the_settings_that_help(monkeypatch):
    monkeypatch.setattr(sample, "open_sampling", full)
    with pytest.raises(SystemExit,
                       match=r"^sample.py: Memory is full.*help: batch_size, precision, decode_precision \(docs/"):
        run_command(sample.main, "sample.py", "checkpoint=x", "cpu=true")
