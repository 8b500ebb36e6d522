"""Situations from public reports, launchers and logging: the source, the situation, what comes out."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm
from training_runs import command, train_here, trained

import sample
import train
from runtime import files
from runtime.device import require_plain_launch
from runtime.notebook import hides_bars
from training.speed import make_accelerator
from weights import checkpoint as checkpoints

REFUSED = [
    # report, arguments of train.py, words of the sentence
    ("hydra-ecosystem/hydra#1969", "repeating one job", ["-m", "seed=0,0,0"],
     "3 jobs of --multirun would write to run_dir=again"),
    ("hydra-ecosystem/hydra#851", "a launcher without --multirun", ["hydra/launcher=submitit_slurm"],
     "hydra/launcher=submitit_slurm would change nothing"),
    ("ashleve/lightning-hydra-template#511", "a sweep's runs in one folder", ["-m", "seed=0,1", "run_dir=x"],
     "run_dir='x-${seed}'"),
    ("hydra-ecosystem/hydra#2797", "outputs moved by Hydra's own settings", ["hydra.run.dir=outputs/x"],
     "hydra.run.dir=outputs/x would change nothing"),
]


@pytest.mark.parametrize(("report", "situation", "arguments", "words"), REFUSED,
                         ids=lambda part: part if "#" in part else "")
def test_what_would_train_nothing_or_elsewhere_is_refused_at_once(report, situation, arguments, words, shapes, tmp_path,
                                                                  monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = train_here("again", shapes, *arguments)
    assert ended.returncode == 1 and words in ended.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("report", "environment", "words"), [
    ("NVlabs/Long-RL#20: srun without RANK", {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "8"},
     "srun has started 8 processes"),
    ("Lightning-AI/pytorch-lightning#15011: srun --pty",
     {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}, None),
    ("Lightning-AI/pytorch-lightning#6206: srun torchrun",
     {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "16"}, None),
    ("huggingface/accelerate#3203: DeepSpeed in the default config", {"ACCELERATE_USE_DEEPSPEED": "true"},
     "turns DeepSpeed on"),
    ("huggingface/accelerate#2298: a compiler in the default config", {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"},
     "compiles by INDUCTOR"),
])  # fmt: skip
def test_how_a_launcher_starts_the_commands(report, environment, words, monkeypatch):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if words is None:
        require_plain_launch()
    else:
        with pytest.raises(ValueError, match=words):
            require_plain_launch()


def test_settings_of_a_launcher_change_neither_precision_nor_accumulation(monkeypatch, fresh_accelerator):
    """huggingface/accelerate#1011: ACCELERATE_GRADIENT_ACCUMULATION_STEPS, and the mixed precision of a config."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    accelerator = make_accelerator("fp32", 2, tf32=False, cpu=True)
    assert (accelerator.gradient_accumulation_steps, accelerator.mixed_precision) == (2, "no")


def test_a_log_in_a_file_has_no_progress_bar(capsys):
    """tqdm/tqdm#750, CompRhys/roost#19: bars fill the log of a Slurm job."""
    for _ in tqdm(range(3), disable=hides_bars()):
        pass
    assert capsys.readouterr().err == ""


def test_tensorboards_curves_do_not_go_back_where_a_killed_run_resumes(shapes, tmp_path):
    """tensorflow/tensorboard#3732: steps after the last checkpoint are logged twice, and curves zigzag."""
    run, options = tmp_path / "run", ("log.trackers=[tensorboard]", "log.every=1", "checkpoint.every=4")
    trained(run, shapes, *options, "steps=7")
    files.remove(checkpoints.step_folder(run, 7))  # as if killed after step 7
    trained(run, shapes, *options, "steps=9")
    events = EventAccumulator(str(run / "tread"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [*range(1, 10)]


def test_commands_run_in_the_thread_of_a_web_page(shapes, tmp_path):
    """gradio-app/gradio#2637: signal only works in main thread; Gradio and Streamlit call functions in others."""
    def work() -> None:
        train.main(*command(tmp_path / "run", shapes, "steps=1", "compile=false")[1:])
        sample.main(f"checkpoint={tmp_path / 'run'}", "seeds=0-1", "num_steps=1", f"out={tmp_path / 'x.npz'}")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
    assert len(np.load(tmp_path / "x.npz")["arr_0"]) == 2
