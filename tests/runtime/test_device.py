"""The device of a command, with fake GPUs: one that cannot compute is an error, and how it multiplies is recorded."""

import os

import forked
import pytest
import torch

from runtime import device
from runtime.device import check_device, describe_device, join_ranks, require_plain_launch, set_float32
from training.speed import make_accelerator


@pytest.fixture
def gpus(monkeypatch):
    """Makes torch see GPUs: gpus(count, capability)."""
    def make(count=1, capability=(9, 0)):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for function, value in {"is_available": True, "device_count": count, "get_device_capability": capability,
                                "get_device_name": "Tesla T4"}.items():
            monkeypatch.setattr(torch.cuda, function, lambda *_, value=value: value)
    return make


@pytest.mark.parametrize(("visible", "has_file", "is_error"), [
    (None, True, True), ("0", False, True), ("", True, False), ("-1", True, False), ("NoDevFiles", True, False),
    (None, False, False),
])
def test_no_command_computes_on_the_cpu_unnoticed_where_there_is_a_gpu(monkeypatch, visible, has_file, is_error):
    """The GPU has a device file, and torch sees none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device.Path, "glob", lambda self, pattern: iter(["/dev/nvidia0"] * has_file))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert check_device(True)
    if is_error:
        with pytest.raises(ValueError, match=r"has a GPU that torch .* cannot use: .*nvidia-smi.*cpu=true"):
            check_device(False)
    else:
        assert check_device(False, precision="bf16")


def test_bf16_that_a_gpu_would_emulate_is_an_error_that_names_fp16(gpus):
    gpus(capability=(7, 5))
    with pytest.raises(ValueError, match="^precision=bf16 would be emulated .*Tesla T4.* set precision=fp16 or "
                                         "precision=fp32"):
        check_device(False, precision="bf16")
    with pytest.raises(ValueError, match="decode_precision=bf16 would"):
        join_ranks(False, False, {"precision": "fp16", "decode_precision": "bf16"})
    assert not check_device(False, precision="fp16")


@pytest.mark.parametrize("rank", [0, 7])
def test_a_rank_that_sees_one_gpu_of_its_own_uses_that_one(gpus, monkeypatch, fresh_accelerator, rank):
    gpus()
    for name, value in (forked.ranks_of(2)[0] | {"LOCAL_RANK": str(rank)}).items():  # of Slurm's --gpus-per-task=1
        monkeypatch.setenv(name, value)
    for function, value in {"init_process_group": None, "get_world_size": 8, "get_rank": rank}.items():
        monkeypatch.setattr(torch.distributed, function, lambda *_, value=value, **__: value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    state = join_ranks(False, False)
    # DDP and barriers take the device from the local index, FSDP's mesh from the environment.
    assert (state.device, state.local_process_index, os.environ["LOCAL_RANK"]) == (torch.device("cuda:0"), 0, "0")


@pytest.mark.parametrize(("environment", "words"), [
    # NVlabs/Long-RL#20: srun without RANK
    ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "8"}, "srun has started 8 processes"),
    # Lightning-AI/pytorch-lightning#15011 and #6206: srun --pty, srun torchrun
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}, None),
    ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "16"}, None),
    # huggingface/accelerate#3203 and #2298: the default config wraps the network, or compiles
    *(({f"ACCELERATE_{name}": value}, f"sets ACCELERATE_{name}: start with torchrun, or turn it off by `accelerate con")
      for name, value in {"USE_DEEPSPEED": "true", "USE_FSDP": "true", "DYNAMO_BACKEND": "INDUCTOR"}.items()),
    ({"ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_USE_FSDP": "false"}, None),
])  # fmt: skip
def test_a_launcher_that_would_change_the_run_is_refused_by_every_command(environment, words, monkeypatch):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if words is None:
        require_plain_launch()
        return
    for make in (lambda: make_accelerator("fp32", 1, False, True), lambda: join_ranks(True, False)):
        with pytest.raises(ValueError, match=words):
            make()


def test_settings_of_a_launcher_change_neither_precision_nor_accumulation(monkeypatch, fresh_accelerator):
    """huggingface/accelerate#1011: ACCELERATE_GRADIENT_ACCUMULATION_STEPS, and the mixed precision of a config."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    accelerator = make_accelerator("fp32", 2, tf32=False, cpu=True)
    assert (accelerator.gradient_accumulation_steps, accelerator.mixed_precision) == (2, "no")


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_reaches_matrix_products_and_convolutions_and_the_record(tf32, monkeypatch, float32_restored):
    set_float32(tf32)
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    assert torch.backends.cudnn.allow_tf32 is tf32
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    for capability, has in (((8, 0), tf32), ((7, 5), False)):  # T4 and older have none
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert describe_device(torch.device("cuda")) == {"device": "a GPU", "tf32": has}
    assert describe_device(torch.device("cpu")) == {"device": "cpu", "tf32": False}
