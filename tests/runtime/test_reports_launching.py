"""Situations from public reports, launchers and logging: the source, the situation, what comes out.

Tested elsewhere: Hydra's sweeps and folders (hydra-ecosystem/hydra#1969, #851, #2797 and
ashleve/lightning-hydra-template#511) in tests/test_mistakes.py.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm
from training_runs import command, trained

import sample
import train
from runtime import files
from runtime.device import join_ranks, require_plain_launch
from runtime.notebook import hides_bars
from training.speed import make_accelerator
from weights import checkpoint as checkpoints


@pytest.mark.parametrize(("environment", "words"), [
    # NVlabs/Long-RL#20: srun without RANK
    ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "8"}, "srun has started 8 processes"),
    # Lightning-AI/pytorch-lightning#15011 and #6206: srun --pty, srun torchrun
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}, None),
    ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "16"}, None),
    # huggingface/accelerate#3203 and #2298: the default config wraps the network, or compiles
    *(({f"ACCELERATE_USE_{name}": "true"}, "config turns .* torchrun, or turn it off by `accelerate config`")
      for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM")),
    *(({"ACCELERATE_DYNAMO_BACKEND": name}, f"compiles by {name} .* torchrun, .* train.py has compile=true")
      for name in ("INDUCTOR", "eager")),
    *(({"ACCELERATE_DYNAMO_BACKEND": name}, None) for name in ("NO", "no")),
])  # fmt: skip
def test_a_launcher_that_would_change_the_run_is_refused_by_every_command(environment, words, monkeypatch):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if words is None:
        require_plain_launch()
        return
    for make in (require_plain_launch, lambda: make_accelerator("fp32", 1, False, True),
                 lambda: join_ranks(True, False)):
        with pytest.raises(ValueError, match=words):
            make()


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
