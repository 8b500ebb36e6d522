"""The frame of a command: what is typed arrives as it is, or one line says what to type."""

import ast
import contextlib
import os
import re
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT, command_of, commands, run_command
from pydantic import ValidationError, create_model
from training_runs import command as training_command

import sample
import train
from runtime import ranks, schema
from runtime.command import command, compose, is_full_memory, jobs_of
from runtime.schema import read, refuse
from sample import SampleSettings
from training.settings import TrainSettings

# ---- what is typed --------------------------------------------------------------------------------------------------

NUMBERS = ["2025_11_25", "007", "1e3", "False", ".5", "inf", "a b"]
ODD = ["größe, (1)", "null", "{a: [1]}", "a=b", "back\\slash", "{000..012}.tar"]


def text_keys(declared, prefix=""):
    """Lists the settings, nested ones too, that take text and no integer."""
    for name, field in declared.model_fields.items():
        groups = [group for group in (field.annotation, *get_args(field.annotation)) if hasattr(group, "model_fields")]
        for group in groups:
            yield from text_keys(group, f"{prefix}{name}.")
        alone, taken = create_model("Alone", __base__=schema.Settings, it=(field.annotation, field)), []
        for value in ("1_1", 11):
            with contextlib.suppress(ValidationError):
                taken.append(alone(it=value).it)
        if taken == ["1_1"]:
            yield f"{prefix}{name}"


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_text_setting_of_every_command_is_what_was_typed(name):
    keys = [*text_keys(declared := command_of(name)[1])]
    values = schema.leaves(compose(name, declared, [f"{key}=1_{i}" for i, key in enumerate(keys)]))
    assert keys and [values[key] for key in keys] == [f"1_{i}" for i in range(len(keys))]


@pytest.mark.parametrize(("setting", "values"), [
    ("checkpoint=1_1,007", ["1_1", "007"]), ("checkpoint=2025_11_25", ["2025_11_25"]), ("seeds=range(1,3)", [1, 2]),
    ("classes=[1,2],null", [[1, 2], None]), ("seeds=0,1", [0, 1]),
    ("checkpoint='a, b',\"it's\"", ["a, b", "it's"]),
    ("seeds=5", [5]), ("checkpoint='a' ,'b'", ["a", "b"]),
    ("guidance=cfg,null", None),
    ("routes=[{start_layer_idx: 1, end_layer_idx: 2}],[]", [[{"start_layer_idx": 1, "end_layer_idx": 2}], []]),
])  # fmt: skip
def test_the_values_of_a_sweep_are_each_a_job_of_what_was_typed(setting, values):
    def composed() -> list[dict]:
        return [compose("sample", SampleSettings, job) for job in jobs_of(["cpu=true", setting])]

    plain = composed()
    assert [each["cpu"] for each in plain] == [True] * len(plain)
    if values is None:  # a group, whose null is none
        assert [each["drop_label"] for each in plain] == [True, True] and plain[0] != plain[1]
    else:
        assert [each[setting.partition("=")[0]] for each in plain] == values


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/users/me")
    cfg = read(TrainSettings, compose("config", TrainSettings, ["data.path='~/x'", "name='~x'"]))
    assert (cfg.data.path, cfg.name) == ("/users/me/x", "~x")


@pytest.mark.parametrize("name", sorted(commands()))
def test_null_for_a_group_is_its_none_or_its_default(name):
    for group in {"config": ("objective", "experiment"), "fid": ("guidance", "gauge"),
                  "sample": ("guidance",)}.get(name, ()):
        assert compose(name, command_of(name)[1], [f"{group}=null"]) == compose(name, command_of(name)[1], [])


@pytest.mark.parametrize(("content", "words"), [
    ("name: a\n\tsteps: 3\n", "mine.yaml\", line 3"), ("name: a\nsteps: 3\nname: b\n", "found duplicate key name in"),
    ("optimizer: {learning_rate: 1}\n", "optimizer.learning_rate"), ("step: 1\n", "did you mean steps?"),
    ("name: 2025_11_25\n", "name=20251125: it should be a valid string. Text that reads as a number needs quotes: "),
    ("defaults: [override /model: tred]\n", "Could not find 'model/tred' Available options in 'model': dit"),
])  # fmt: skip
def test_a_mistake_in_a_yaml_file_is_one_line(tmp_path, monkeypatch, content, words):
    configs = shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (configs / "experiment/mine.yaml").write_text(f"# @package _global_\n{content}")
    monkeypatch.setattr("runtime.command.CONFIGS", configs)
    with pytest.raises(SystemExit) as ended:
        run_command(train.main, "train.py", "experiment=mine")
    assert words in ended.value.code and "\n" not in ended.value.code


# ---- a small command ------------------------------------------------------------------------------------------------


class Small(schema.Settings):
    steps: schema.Count
    name: schema.Text | None
    out: schema.Location | None
    rate: schema.Number
    rates: list[int]


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs a command of configs/small.yaml in this process -> (exit code, last line that it prints)."""
    (tmp_path / "small.yaml").write_text("# python small.py name=sea\nsteps: 5                # of one\nname: null\n"
                                         "out: null\nrate: 1.0\nrates: []\n")
    monkeypatch.setattr("runtime.command.CONFIGS", tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)

    def call(main, *arguments, **options):
        monkeypatch.setattr(sys, "argv", ["folder/small.py", *arguments])
        try:
            command("small", Small, **options)(main)()
        except SystemExit as stop:
            return (stop.code, capsys.readouterr().err.strip()) if isinstance(stop.code, int) else (1, stop.code)
        return 0, capsys.readouterr().out.strip()

    return call


def fail_by(error):
    def main(*_):
        raise error

    return main


NEVER = fail_by(AssertionError())


def test_a_command_gets_the_settings_of_its_file_and_of_the_command_line_and_leaves_nothing(call, tmp_path):
    seen, before = [], {*tmp_path.iterdir()}
    assert call(seen.append, "name='sea lion'") == (0, "") and seen[0].model_dump() == {
        "steps": 5, "name": "sea lion", "out": None, "rate": 1.0, "rates": []}
    assert {*tmp_path.iterdir()} == before and os.getcwd() == str(tmp_path)  # Hydra makes no folder and enters none


def test_text_that_reads_as_a_number_is_what_was_typed_and_odd_text_needs_quotes_alone(call):
    for text in (*NUMBERS, *ODD):
        seen = []
        assert call(seen.append, f"name={text}" if text in NUMBERS else f"name='{text}'")[0] == 0
        assert seen[0].name == text


@pytest.mark.parametrize(("arguments", "words"), [
    (["epochs=4"], "There is no setting epochs: this command has steps, name, out, rate, rates. --help lists all."),
    (["steps=3", "steps=4"], "steps is given 2 times: steps=3 steps=4."),
    (["name=a-0.tar", "name=a-1.tar", "name=a-2.tar"], "write 'name=x-{0..2}'"),
    (["name=größe"], "\"name='größe'\""), (["name=a (1)"], "\"name='a (1)'\""),
    (["name=[a=b]"], "\"name=['…']\""), (["name=a=b"], "\"name='a=b'\""),
    (["name=a,b"], "As one value write \"name='a,b'\" for text, or \"name=[a,b]\" for a list."),
    (["steps=1.5"], "steps=1.5: it should be a valid integer"),
    (["lion"], "lion is not key=value: did you mean steps=lion?"), (["name"], "write key=value"),
    (["name=[1]"], "name=[1]: it should be a valid string"),
    (["--max-steps"], "no dashes: max-steps=<value>"), (["--cfg", "all"], "invalid choice: 'all'"),
    (["hydra/launcher=x"], "scripts/slurm.sh"), (["name=${nmae}"], "nmae"), (["name=${name}"], "name"),
    (["-m", "name=a,b", "out=x"], "2 jobs of --multirun would write to out=x: give each its own"),
    (["-m", "out=a,b", "steps=1,0"], "steps=0: it should be greater than or equal to 1."),  # before the first job
])  # fmt: skip
def test_a_mistake_on_the_command_line_is_one_line_before_anything_runs(call, arguments, words):
    code, line = call(NEVER, *arguments)
    assert code == 1 and line.startswith("small.py: ") and words in line and "\n" not in line


@pytest.mark.parametrize(("arguments", "told"), [
    ([], None), (["name=null"], None), (["steps=5"], "steps=5 would change nothing: there is none."),
    (["++steps=5", "name=sea"], "steps=5 name=sea would change nothing: there is none."),
    (["--multirun", "name=null,sea"], "name=sea would change nothing: there is none."),
])
def test_a_typed_setting_without_effect_is_refused_and_one_of_a_file_is_not(call, arguments, told):
    def check(cfg, cli_overrides):
        refuse(cli_overrides, "steps", "name", why="there is none")
        return cfg

    ran = []
    result = call(ran.append, *arguments, check=check)
    assert len(ran) == (told is None) and result == ((0, "") if told is None else (1, f"small.py: {told}"))


def test_what_fails_in_a_command_ends_in_one_line_and_our_own_mistakes_in_a_traceback(call, tmp_path, monkeypatch):
    absent = f"small.py: reading or writing {tmp_path}/absent failed: No such file or directory."
    for main, end in ((fail_by(ValueError("Too many.")), (1, "small.py: Too many.")),
                      (lambda cfg: (tmp_path / "absent").read_text(), (1, absent)),
                      (fail_by(KeyboardInterrupt()), (130, "small.py: stopped by Ctrl-C.")),
                      (fail_by(MemoryError()), (1, "small.py: Memory is full: MemoryError docs/training.md, "
                                                   "Troubleshooting, has the settings that help."))):
        assert call(main) == end
    with pytest.raises(ZeroDivisionError):
        call(lambda cfg: 1 / 0)
    for argument in ("--help", "--cfg=job"):
        assert call(NEVER, argument)[0] == 0
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    for main, argument, error in ((fail_by(OSError("Full.")), "steps=1", OSError), (print, "steps=0", ValueError)):
        with pytest.raises(error):
            call(main, argument)


def test_other_ranks_wait_before_they_repeat_an_error(call, monkeypatch):
    waits = []
    monkeypatch.setattr(ranks.time, "sleep", waits.append)
    monkeypatch.setattr(ranks.signal, "signal", lambda *_: None)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert call(fail_by(ValueError("Too many.")))[0] == 1
    assert waits == [5]


# ---- several jobs in a process --------------------------------------------------------------------------------------


@pytest.fixture
def jobs():
    """A `main` that trains in the precision `name` and handles signals from its first step; and what it has seen."""
    handlers, states = ranks.stop_handlers(), []

    def main(cfg):
        at_start = ranks.stop_handlers()
        accelerator = Accelerator(mixed_precision=cfg.name, cpu=True)
        stop = ranks.StopRequest(accelerator)
        stop.listen()
        assert signal.getsignal(signal.SIGTERM) == stop.receive
        states.append((accelerator.mixed_precision, at_start == handlers))

    yield main, states
    ranks.start_anew(handlers)


def test_each_job_of_a_sweep_and_each_call_has_its_own_precision_and_the_signals_of_a_first_one(call, jobs):
    main, states = jobs
    ranks.start_anew(before := ranks.stop_handlers())
    assert call(main, "-m", "name=no,bf16")[0] == 0
    assert states == [("no", True), ("bf16", True)]
    ranks.start_anew(before)
    entry = command("small", Small)(main)
    entry("name=no", "steps=7")
    entry("name=bf16")
    assert states[2:] == [("no", True), ("bf16", True)] and ranks.stop_handlers() == before


def test_a_call_within_a_program_raises_and_the_program_continues(call, monkeypatch):
    seen = []
    entry = command("small", Small)(seen.append)
    entry("steps=7", "name=1_1")
    for arguments, keywords in (([["steps=7", "name=1_1"]], {}), (["steps=7"], {"name": "1_1"}), ([("steps=7e0",)], {
            "name": "1_1"}), ([], {"steps": 7, "name": "1_1", "rates": [1, 2], "rate": 1e-5, "out": "größe [1]/-x"})):
        entry(*arguments, **keywords)
    assert [(cfg.steps, cfg.name) for cfg in seen] == 5 * [(7, "1_1")] and seen[-1].rates == [1, 2]
    assert (seen[-1].rate, seen.pop().out) == (1e-5, "größe [1]/-x")
    del seen[1:]
    with pytest.raises(ValueError, match=r"^There is no setting step: did you mean steps\?"):
        entry("step=3")
    with pytest.raises(ValueError, match="Too many"):
        command("small", Small)(fail_by(ValueError("Too many.")))("steps=1")
    with pytest.raises(KeyboardInterrupt):
        command("small", Small)(fail_by(SystemExit(130)))("steps=1")
    # A notebook's sys.argv is its kernel's.
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    entry()
    assert [(cfg.steps, cfg.name) for cfg in seen] == [(7, "1_1"), (5, None)]


def test_commands_run_twice_in_a_process_and_in_the_thread_of_a_web_page(shapes, tmp_path):
    """gradio-app/gradio#2637: signal only works in main thread; Gradio and Streamlit call functions in others."""
    def trained(*settings: str) -> None:
        train.main(*training_command(tmp_path / "run", shapes, "compile=false", "cpu=true", *settings)[1:])

    def work() -> None:
        trained("steps=2", "precision=bf16")
        sample.main(f"checkpoint={tmp_path / 'run'}", "seeds=0-1", "num_steps=1", f"out={tmp_path / 'x.npz'}")

    trained("steps=1")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
    assert len(np.load(tmp_path / "x.npz")["arr_0"]) == 2 and not torch.distributed.is_initialized()


# ---- full memory ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("error", "is_full"), [
    (MemoryError(), True), (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."), True),
    (torch.AcceleratorError("CUDA error: out of memory"), True),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 3221225472 bytes."), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
    (RuntimeError("NCCL error: Cuda failure 2 'out of memory'"), True), (ValueError("images out of memory"), False),
    (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), False),
])  # fmt: skip
def test_what_libraries_raise_when_out_of_memory_is_recognised(error, is_full):
    assert is_full_memory(error) == is_full


# ---- every command --------------------------------------------------------------------------------------------------


def test_every_yaml_is_the_config_of_a_command_or_part_of_one():
    assert {file.stem for file in (ROOT / "configs").glob("*.yaml")} - {"sampling"} == {*commands()}


@pytest.mark.parametrize("name", sorted(commands()))
def test_the_keys_of_the_config_are_those_that_are_declared_and_help_lists_them(name, capsys):
    main, declared = command_of(name)
    plain = compose(name, declared, [])
    plain |= {key: "x" for key in ("source", "out", "checkpoint") if plain.get(key, "") is None}  # required
    read(declared, plain)
    run_command(main, f"{name}.py", "--help")
    printed = capsys.readouterr().out
    assert f"{ {'config': 'train'}.get(name, name) }.py" in printed and "defaults:" not in printed
    assert "hydra" not in printed
    in_groups = set(re.findall(r"^([a-z_]+)=\S+: \S", printed, re.M))
    assert in_groups >= {"config": {"model", "data", "diffusion", "objective", "optimizer", "experiment"},
                         "fid": {"guidance", "gauge"}, "sample": {"guidance"}}.get(name, set())


LIBRARY = {"latents_std", "pixels", "generator", "key", "WORLD_SIZE", "torchao", "teacher", "LOCAL_RANK", "MASTER_PORT",
           "use_rope", "return_features", "PYTHONPATH", "pairs", "WANDB_MODE", "sample_size"}  # of libraries and files


def words_of(error: ast.Raise) -> str:
    """Joins the texts of a raise statement, with ◦ for values."""
    return "".join(node.value if isinstance(node, ast.Constant) else "◦" for node in ast.walk(error)
                   if isinstance(node, ast.FormattedValue)
                   or isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_every_setting_that_an_error_names_is_one_of_a_command():
    from test_design import files

    keys = {key for name in commands() for key in schema.declared_keys(command_of(name)[1])}
    keys |= {folder.name for folder in (ROOT / "configs").glob("**") if folder.is_dir()}
    keys |= {f"diffusion.{key.stem}" for key in (ROOT / "configs/diffusion").glob("*.yaml")}
    keys |= {key.rpartition(".")[2] for key in keys}
    ours = {name: tree for name, tree in files().items() if not name.startswith(("routed", "routing_module"))}
    named = [(name, key) for name, tree in ours.items() for error in ast.walk(tree) if isinstance(error, ast.Raise)
             for key in re.findall(r"(?<![\w.+/◦-])([A-Za-z_][\w.]*)=", words_of(error))]
    assert len(named) > 100
    assert not [(name, key) for name, key in named if key not in keys | LIBRARY]
