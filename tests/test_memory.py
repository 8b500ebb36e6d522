"""Memory that is full, anywhere in any command, is a sentence: what was asked for, what is free, what to turn first."""

import errno
import io
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
from conftest import run_command
from training_runs import train_here

import autoencoder as autoencoders
import fid
import sample
import scoring
import train
from scripts import import_latents, prepare_latents, sweep_guidance
from settings import KNOBS, full_memory, group_in, is_full_memory

GPU = ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.25 GiB is free. Including non-PyTorch "
       "memory, this process has 77.85 GiB memory in use.")
CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 3221225472 bytes. Error code 12"
TRAINING = ["a higher grad_accum_steps (now 1)", "activation_checkpointing=true", "a lower batch_size (now 8)", "a smaller model.backbone_type"]
DRAWING = ["decode_batch_size=1 (now null)", "a lower samples.batch_size", "decode_precision=bf16"]
SCORING = ["decode_batch_size=1 (now null)", "a lower evaluate.batch_size", "decode_precision=bf16"]
PICTURES = ["a lower batch_size", "decode_batch_size=1 (now null)", "decode_precision=bf16"]


def full(*_, **__):
    raise torch.OutOfMemoryError(GPU)


def in_order(said: str, parts: list[str]) -> bool:
    places = [said.find(part) for part in parts]
    return -1 not in places and places == sorted(places)


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


def test_a_sentence_has_the_numbers_and_leaves_out_what_is_turned_already():
    plain = {"batch_size": 256, "grad_accum_steps": 4, "activation_checkpointing": True, "sharding": "none", "model": {"backbone_type": "DiT-XL/2"}}
    assert full_memory(torch.OutOfMemoryError(GPU), "training", plain) == (
        "the GPU's memory is full (training; 2.50 GiB more were asked for; 1.25 GiB of 79.11 GiB are free). Turn, in this order: a higher "
        "grad_accum_steps (now 4); sharding=fsdp (now none); a lower batch_size (now 256); a smaller model.backbone_type (now DiT-XL/2).")
    said = full_memory(RuntimeError(CPU), "prepare_latents", {"batch_size": 32, "precision": "fp32"})
    assert said.startswith("this machine's memory is full (prepare_latents; 3.00 GiB more were asked for; ") and "GiB are free)" in said
    assert in_order(said, ["a lower batch_size (now 32)", "precision=bf16 (now fp32)"])


def test_the_rank_whose_memory_is_full_is_named(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert full_memory(MemoryError(), "training", {}).startswith("this machine's memory is full on rank 3 of 8 (training")


def test_every_setting_that_is_named_is_one_that_the_command_has():
    declared = {"sample": sample.SampleSettings, "rf": sample.GridSettings, "fid": fid.ScoringSettings, "sweep_guidance": sweep_guidance.SweepSettings,
                "prepare_latents": prepare_latents.PrepareSettings, "import_latents": import_latents.ImportSettings}
    for name, knobs in KNOBS.items():
        for key, how in knobs:
            group, *parts = declared.get(name, train.TrainSettings), *key.split(".")
            for part in parts[:-1]:
                group = group_in(group.model_fields[part].annotation)
            assert parts[-1] in group.model_fields or key == "sharding", f"{name}: {key}"
            assert key in how


@pytest.mark.parametrize(("where", "settings", "parts"), [
    ("train_step", [], ["(training; 2.50 GiB more were asked for; 1.25 GiB of 79.11 GiB are free)", *TRAINING]),
    ("update_ema", ["precision=fp32"], ["(training; 2.50 GiB more were asked for; 1.25 GiB of 79.11 GiB are free)", *TRAINING]),
    ("generate", ["samples.every=1"], ["(drawing;", *DRAWING]),
    ("make_run", [], ["(training;", *TRAINING]),
])
def test_a_training_that_runs_out_of_memory_says_what_to_turn(shapes, tmp_path, monkeypatch, where, settings, parts):
    monkeypatch.setattr(train, where, full)
    result = train_here(tmp_path / "run", shapes, "steps=1", "model.depth=3", "model.routes=[]", "compile=false", *settings)
    assert result.returncode == 1 and in_order(result.stderr, ["train.py: the GPU's memory is full", *parts]), result.stderr


def test_a_scoring_that_runs_out_of_memory_says_what_to_turn(shapes, tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "open_reference", lambda *_: type("Reference", (), {"complete": lambda *_: None}))
    monkeypatch.setattr(scoring, "available_metrics", lambda *_: ["fid"])
    monkeypatch.setattr(train, "evaluate", full)
    result = train_here(tmp_path / "run", shapes, "steps=1", "model.depth=3", "model.routes=[]", "compile=false", "evaluate.every=1",
                        "evaluate.reference=x.npz", "evaluate.features=pixels")
    assert result.returncode == 1 and in_order(result.stderr, ["(scoring;", *SCORING]), result.stderr


def said_by(entry, program, *overrides) -> str:
    stderr = io.StringIO()
    with redirect_stderr(stderr), redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as stop:
        run_command(entry, program, *overrides)
    return f"{stop.value.code}"


@pytest.mark.parametrize(("entry", "program"), [(sample.main, "sample.py"), (sample.compare_guided, "rf.py")])
def test_a_drawing_that_runs_out_of_memory_says_what_to_turn(monkeypatch, entry, program):
    monkeypatch.setattr(sample, "open_sampling", full)
    said = said_by(entry, program, "checkpoint=x", "cpu=true")
    assert in_order(said, [f"{program}: the GPU's memory is full", *PICTURES])


def test_a_score_and_a_preparation_that_run_out_of_memory_say_what_to_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(fid, "as_published", full)
    assert in_order(said_by(fid.main, "fid.py", "checkpoint=x", "cpu=true"), ["fid.py: the GPU's memory is full", *PICTURES])
    monkeypatch.setattr(prepare_latents, "encode_rows", full)
    said = said_by(prepare_latents.main, "prepare_latents.py", "source=shapes", "shapes.count=8", f"out={tmp_path}/out")
    assert in_order(said, ["prepare_latents.py: the GPU's memory is full", "a lower batch_size", "precision=bf16"])


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
