"""Puts the project root and the folders of tests on the import path; fixtures and functions that many tests use."""

import ast
import atexit
import functools
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
# seconds that a test waits for another process: only one that hangs takes longer, however busy the machine
PATIENCE = 3000
sys.path[:0] = map(str, [ROOT, ROOT / "tests", *sorted((ROOT / "tests").glob("*/"))])  # tests share helpers
signal.signal(signal.SIGHUP, signal.SIG_DFL)   # nohup has it ignored, and what tests start would inherit that
os.environ.setdefault("HF_HUB_OFFLINE", "1")   # a test that reaches for the network fails at once
os.environ["TORCH_HOME"] = tempfile.mkdtemp(prefix="tread-tests-")  # where measured references are kept
atexit.register(shutil.rmtree, os.environ["TORCH_HOME"], ignore_errors=True)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side, and threads that wait for a core are slow
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # more are processes, which import torch anew


def pytest_configure(config):
    """Hides GPUs, before torch is imported and in child processes too, as claims of equal bits hold on CPUs alone."""
    assert "torch" not in sys.modules
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def last_of_each(settings) -> list[str]:
    """Keeps the last value of each setting, as a command takes none twice."""
    return [*{setting.partition("=")[0]: setting for setting in settings}.values()]


def run_command(entry, program: str, *overrides: str, **settings) -> None:
    """Runs a command in this process as `python <program> key=value …` does; None is null, a list is a list."""
    from runtime.schema import as_text

    with pytest.MonkeyPatch.context() as patch:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
        settings = [*overrides, *(f"{key}={as_text(value)}" for key, value in settings.items())]
        patch.setattr(sys, "argv", [program, *last_of_each(settings)])
        entry()


@functools.cache
def commands() -> dict[str, tuple[Path, str]]:
    """File and name of the declared settings of every function that is a command, by its config."""
    listed = {}
    for file in (*ROOT.glob("*.py"), *ROOT.glob("sampling/*.py"), *ROOT.glob("scripts/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            for call in getattr(node, "decorator_list", []):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "command":
                    listed[call.args[0].value] = file, call.args[1].id
    return listed


def command_of(name: str) -> tuple:
    """Imports the command of a config; returns its entry and its declared settings."""
    file, declared = commands()[name]
    module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    return getattr(module, "compare_guided" if name == "rf" else "main"), getattr(module, declared)


def one_rank():
    from accelerate import PartialState

    return PartialState(cpu=True)


def score_with(extractor, reference, batches, count: int, asked=None) -> dict[str, float]:
    """Scores images on one extractor, with its reference measured, as fid.py and training do."""
    from scoring.image_sets import ImageSet
    from scoring.score import Evaluator, available_metrics, score_on

    evaluator = Evaluator(extractor, reference, available_metrics(extractor, reference, asked))
    return score_on(one_rank(), evaluator.measured(one_rank(), 64), ImageSet(count, {}, "", batches))


def save_vae(folder: Path, levels: int = 2, **config) -> Path:
    """Saves a tiny random autoencoder of Stable Diffusion's kind, 4 channels, a side of 1 / 2^(levels - 1)."""
    import torch
    from diffusers import AutoencoderKL

    torch.manual_seed(1)
    AutoencoderKL(block_out_channels=(8,) * levels, down_block_types=["DownEncoderBlock2D"] * levels, norm_num_groups=4,
                  up_block_types=["UpDecoderBlock2D"] * levels, latent_channels=4, **config).save_pretrained(folder)
    return folder


@pytest.fixture
def fresh_accelerator():
    """Accelerate's singletons, which keep the first precision of a process, are forgotten before and after."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield AcceleratorState._reset_state
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def handlers():
    """The handlers of signals that this process has, which it gets back afterwards."""
    from runtime import ranks

    before = ranks.stop_handlers()
    yield before
    ranks.start_anew(before)


@pytest.fixture
def float32_restored():
    """How float32 is multiplied is set back afterwards."""
    import torch

    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.fixture
def graphs(monkeypatch):
    """Counts what `compile_blocks` traces, as `graphs.frame_count`, without making kernels; a break is an error."""
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter, compiled = CompileCounterWithBackend("aot_eager"), torch.compile
    monkeypatch.setattr(torch, "compile", functools.partial(compiled, backend=counter, fullgraph=True))
    return counter


@pytest.fixture(scope="session")
def shapes(tmp_path_factory) -> Path:
    """The built-in shapes, 300 of them, as a latent folder."""
    out = tmp_path_factory.mktemp("data") / "shapes"
    run_command(command_of("prepare_latents")[0], "prepare_latents.py", "source=shapes", "shapes.count=300",
                "resolution=16", "autoencoder=identity", f"out={out}")
    return out


@pytest.fixture(scope="session")
def taught(shapes, tmp_path_factory) -> Path:
    """The built-in shapes, 16 tokens each, with six numbers for a token as a teacher's."""
    folder = shutil.copytree(shapes, tmp_path_factory.mktemp("taught") / "shapes")
    latents = np.load(folder / "latents-00000.npy")
    patches = latents.reshape(-1, 3, 4, 4, 4, 4).transpose(0, 2, 4, 1, 3, 5).reshape(len(latents), 16, 3, 16)
    np.save(folder / "teacher-00000.npy", np.concatenate([patches.mean(3), patches.std(3)], axis=2).astype(np.float16))
    change_record(folder, arrays={"teacher": {"shape": [16, 6], "dtype": "float16"}})
    return folder


@pytest.fixture(scope="session")
def pixel_reference(shapes, tmp_path_factory) -> Path:
    """Statistics of the built-in shapes' pixels, as an npz."""
    import fid

    out = tmp_path_factory.mktemp("reference") / "pixels.npz"
    run_command(fid.main, "fid.py", f"reference_from={shapes}", "features=pixels", f"out={out}")
    return out


def change_record(folder: Path, name: str = "metadata.json", /, **changes) -> None:
    """Changes what a JSON file of a folder says, such as the record of latents."""
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture(scope="session")
def reference(shapes, tmp_path_factory) -> Path:
    """A run that nothing disturbed, with checkpoints that fall between reports."""
    from training_runs import rows, trained

    run = tmp_path_factory.mktemp("reference") / "run"
    trained(run, shapes)
    assert [row["step"] for row in rows(run)] == [3, 6, 9, 12, 15, 18, 21, 24]
    return run
