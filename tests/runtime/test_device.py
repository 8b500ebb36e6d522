"""A GPU that torch cannot use, or only slowly, ends a command in a sentence; GPUs, drivers and processes are fake."""

import ctypes
import os
import warnings

import forked
import pytest
import torch
from conftest import pytest_configure, run_command

import fid
import sample
import train
from runtime import device
from runtime.device import check_device, join_ranks
from scripts import benchmark, prepare_latents
from training import speed

ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]  # of torch 2.15 for CUDA 13.2


@pytest.fixture
def gpus(monkeypatch):
    """Makes torch see GPUs: gpus(count, capability, name)."""
    def make(count=1, capability=(9, 0), name="H100"):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for function, value in {"is_available": True, "device_count": count, "get_device_capability": capability,
                                "get_device_name": name, "get_arch_list": ARCHITECTURES}.items():
            monkeypatch.setattr(torch.cuda, function, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    return make


@pytest.fixture
def driver(monkeypatch):
    """Makes NVIDIA's driver answer, where torch sees no GPU: driver(error, CUDA, number of GPUs)."""
    def make(error, cuda, count):
        monkeypatch.setattr(device, "ask_driver", lambda: (error, cuda, count))
        monkeypatch.setattr(device, "driver_version", lambda: "550.54.15")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return make


def test_the_suite_hides_gpus_from_every_process_that_it_starts(monkeypatch, pytestconfig):
    printed = forked.run("-c",
                         "import os; print([os.environ[f'{kind}_VISIBLE_DEVICES'] for kind in ('CUDA', 'HIP')])").stdout
    assert printed == "['', '']\n" and not torch.cuda.is_available()
    monkeypatch.setattr(pytestconfig.option, "markexpr", "gpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    pytest_configure(pytestconfig)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ  # python -m pytest -m gpu sees them


@pytest.mark.parametrize(("answer", "words"), [
    ((0, (12, 4), 8), r"CUDA 13\.2\) cannot use, as its driver 550\.54\.15 is for CUDA 12\.4: install driver 580 or "
                      r"newer, or a torch wheel for CUDA 12 .*cpu=true"),
    ((803, (13, 2), 0), "driver 550.54.15 reports error 803"),
    ((None, None, 0), "libcuda.so.1 is not installed"),
])
def test_a_driver_that_is_old_fails_or_lacks_its_library_beside_a_gpu_is_an_error(driver, answer, words, monkeypatch):
    driver(*answer)
    monkeypatch.setattr(device.Path, "glob", lambda self, pattern: iter(["/dev/nvidia0"]))
    with pytest.raises(ValueError, match=words):
        check_device(False)
    assert check_device(True)


def test_gpus_that_the_user_has_hidden_are_no_error(driver, monkeypatch):
    driver(0, (12, 4), 8)
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert check_device(False)


def test_a_machine_without_a_gpu_computes_on_the_cpu_without_a_warning(driver):
    with warnings.catch_warnings(action="error"):
        driver(None, None, 0)
        assert check_device(False, precision="bf16")
        driver(device.NO_DEVICE, (13, 2), 0)
        assert check_device(False, precision="bf16")


def test_a_gpu_that_the_container_was_not_given_and_a_torch_without_cuda_are_a_warning(driver, monkeypatch):
    driver(device.NO_DEVICE, (13, 2), 0)
    with monkeypatch.context() as patch, pytest.warns(UserWarning,
                                                      match="none is given to this container or job.*--gpus"):
        patch.setattr(device.Path, "glob", lambda self, pattern: iter(["/dev/nvidia0"]))
        assert check_device(False)
    driver(0, (13, 2), 1)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.warns(UserWarning, match="torch .* is built without CUDA"):
        assert check_device(False)


def test_the_drivers_library_is_asked_for_its_cuda_and_its_gpus(monkeypatch):
    class Library:
        def cuDriverGetVersion(self, version): version._obj.value = 12040
        def cuInit(self, flags): return 0
        def cuDeviceGetCount(self, count): count._obj.value = 2

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    assert device.ask_driver() == (None, (12, 4), 2)
    monkeypatch.setattr(Library, "cuInit", lambda *_: 803)
    assert device.ask_driver() == (803, (12, 4), 0)


@pytest.mark.parametrize("capability", [(7, 5), (8, 9), (9, 0), (12, 1), (13, 0)])
def test_a_gpu_that_torch_has_kernels_for_is_used(gpus, capability):
    gpus(capability=capability)
    assert not check_device(False)


@pytest.mark.parametrize("capability", [(6, 1), (7, 0)])
def test_a_gpu_that_torch_has_no_kernels_for_is_named_with_those_that_it_has(gpus, capability):
    gpus(capability=capability, name="Tesla V100")
    with pytest.raises(ValueError, match=r"Tesla V100 has compute capability {}\.{}, and torch .* is built for sm_75, "
                                         r".*cpu=true".format(*capability)):
        check_device(False)


@pytest.mark.parametrize(("kernels", "capability", "runs"), [
    ("sm_90a", (9, 0), True), ("sm_90a", (10, 0), False), ("sm_100a", (10, 3), False), ("sm_100f", (10, 3), True),
    ("compute_90", (8, 9), False),
])
def test_what_is_compiled_for_one_model_alone_runs_on_no_other(kernels, capability, runs):
    assert device.runs_on(kernels, capability) == runs


def test_bf16_that_a_gpu_would_emulate_is_an_error_that_names_fp16(gpus):
    gpus(capability=(7, 5), name="Tesla T4")
    with pytest.raises(ValueError, match=r"precision=bf16 needs compute capability 8\.0 .* Tesla T4, .* 7\.5, .*: set "
                                         r"precision=fp16"):
        check_device(False, precision="bf16")
    with pytest.raises(ValueError, match="decode_precision=bf16 needs"):
        join_ranks(False, False, {"precision": "fp16", "decode_precision": "bf16"})
    assert not check_device(False, precision="fp16")


@pytest.mark.parametrize(("count", "rank", "launcher"),
                         [(2, 2, {}), (4, 7, {}), (1, 1, {"TORCHELASTIC_RUN_ID": "none"})])
def test_more_processes_than_gpus_are_an_error_with_both_numbers(gpus, monkeypatch, count, rank, launcher):
    gpus(count)
    for name, value in {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "8", **launcher}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"8 processes were started here, and torch sees {count} GPU"):
        check_device(False)


@pytest.mark.parametrize("rank", range(8))
def test_a_rank_that_sees_one_gpu_of_its_own_uses_that_one(gpus, monkeypatch, fresh_accelerator, rank):
    gpus()
    for name, value in forked.ranks_of(2)[0].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", str(rank))  # of Slurm's tasks with --gpus-per-task=1
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda **_: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    state = join_ranks(False, False)
    # DDP and barriers take the device from the local index, FSDP's mesh from the environment.
    assert (state.device, state.local_process_index, os.environ["LOCAL_RANK"]) == (torch.device("cuda:0"), 0, "0")
    assert state.process_index == rank


def test_every_command_that_computes_checks_the_gpu_first(driver, tmp_path):
    driver(0, (12, 4), 1)
    with pytest.raises(ValueError, match=r"driver 550\.54\.15 is for CUDA 12\.4"):
        speed.make_accelerator("bf16", 1, False)
    for entry, program, given in ((train.main, "train.py", ["experiment=quickstart", "data.path=no/latents"]),
                                  (sample.main, "sample.py", ["checkpoint=no/run"]),
                                  (sample.compare_guided, "rf.py", ["checkpoint=no/run"]),
                                  (fid.main, "fid.py", ["images=no.npz", "reference=no.npz"]),
                                  (prepare_latents.main, "prepare_latents.py",
                                   ["source=shapes", f"out={tmp_path}/out"]),
                                  (benchmark.main, "benchmark.py", [f"out={tmp_path}/out"])):
        with pytest.raises(SystemExit, match=rf"^{program}: This machine has a GPU that torch .* cannot use"):
            run_command(entry, program, *given)
    assert not any(tmp_path.iterdir())
