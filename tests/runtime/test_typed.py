"""Text on a command line is what was typed, or an error says what to type; a mistake in YAML names file and line."""

import contextlib
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml
from conftest import ROOT
from pydantic import ValidationError, create_model
from test_tf32 import commands

from runtime import notebook, schema
from runtime.command import command, mistake, program
from runtime.schema import as_argument, as_setting, read
from runtime.typed import cli_overrides, compose, jobs_of, parse_options, read_job
from sample import SampleSettings
from scripts import plan, prepare_latents, report
from training.settings import TrainSettings

# what needs no quotes, and what does
PLAIN = ["2025_11_25", "1_1", "007", "1e3", "0x1f", "1:30", "true", "False", "yes", "on", ".5", "1.", "inf", "nan", "5",
         "+3", "größe", "it's", "a (1)", "a=b", "a b", "a#b", "int(3)", "s/größe=1/a"]
ODD = [*PLAIN, "null", "no", "~", "-nan", "a,b", "[a]", "{a: 1}", 'say "a"', "back\\slash", "a\\", "a\\'b", "$HOME",
       "${name}", "`x`", "!x", "a: b", "-x", "*.tar", "{000..012}", "a;b", "&a", "%", "@"]  # fmt: skip


def train_settings(*arguments):
    options, given = parse_options(list(arguments))
    return read_job(TrainSettings, compose("config", TrainSettings, given, options.config_dir), "config",
                    cli_overrides(given))


def settings_of(name):
    file, declared = commands()[name]
    return getattr(importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts)), declared)


# ---- the command line -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", PLAIN)
def test_text_without_quotes_is_what_was_typed(text):
    cfg = train_settings(f"name={text}", f"evaluate.sha256={text}")
    assert (cfg.name, cfg.run_dir, cfg.evaluate.sha256) == (text, f"runs/{text}", text)


def text_keys(declared, prefix=""):
    """Lists the settings, nested ones too, that take text and no integer."""
    for name, field in declared.model_fields.items():
        groups = [group for group in (field.annotation, *get_args(field.annotation)) if hasattr(group, "model_fields")]
        for group in groups if name not in ("study", "published") else ():
            yield from text_keys(group, f"{prefix}{name}.")
        alone, taken = create_model("Alone", __base__=schema.Settings, it=(field.annotation, field)), []
        for value in ("1_1", 11):
            with contextlib.suppress(ValidationError):
                taken.append(alone(it=value).it)
        if taken == ["1_1"]:
            yield f"{prefix}{name}"


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_text_setting_of_every_command_is_what_was_typed(name):
    declared = settings_of(name)
    keys = [*text_keys(declared)]
    values = schema.leaves(compose(name, declared, [f"{key}=1_{i}" for i, key in enumerate(keys)]))
    assert keys and [values[key] for key in keys] == [f"1_{i}" for i in range(len(keys))]


def test_text_in_a_list_is_what_was_typed_or_an_error_says_that_it_needs_quotes():
    cfg = read(SampleSettings, compose("sample", SampleSettings, [
        "classes=[yes,007, 7,'8','1e3','größe, klein']", "checkpoint=null", "seeds=7"]))
    assert cfg.classes == ["yes", "007", 7, "8", "1e3", "größe, klein"] and cfg.checkpoint is None and cfg.seeds == 7
    with pytest.raises(ValueError, match=r"^samples.classes.0=1000.0: .* Text needs quotes\.$"):
        train_settings("samples.classes=[1e3,a]")
    cfg = train_settings("samples.classes=[größe, klein (1),1e3, 7]")
    assert cfg.samples.classes == ["größe", "klein (1)", "1e3", 7]
    with pytest.raises(ValueError, match=r"^samples.classes=\[größe,'b'\] cannot be read: .*'größe'"):
        train_settings("samples.classes=[größe,'b']")


@pytest.mark.parametrize(("setting", "values"), [
    ("checkpoint=1_1,007", ["1_1", "007"]), ("checkpoint=2025_11_25", ["2025_11_25"]), ("seeds=range(1,3)", [1, 2]),
    ("checkpoint='a, b',\"it's\",größe", ["a, b", "it's", "größe"]), ("classes=[1,2],null", [[1, 2], None]),
    ("weights=größe (1)", ["größe (1)"]), ("seeds=0,1", [0, 1]), (r"checkpoint='it\'s, x'", ["it's, x"]),
    ("checkpoint='a' ,'b'", ["a", "b"]), ("checkpoint=choice(007,1_1)", ["007", "1_1"]), ("seeds=5", [5]),
    ("routes=[{start_layer_idx: 1, end_layer_idx: 2}],[]", [[{"start_layer_idx": 1, "end_layer_idx": 2}], []]),
])  # fmt: skip
def test_several_values_of_a_sweep_are_each_a_job_of_what_was_typed(setting, values):
    composed = [compose("sample", SampleSettings, job) for job in jobs_of(["cpu=true", setting])]
    assert [(plain[setting.partition("=")[0]], plain["cpu"]) for plain in composed] == [(each, True) for each in values]
    assert jobs_of([setting, "num_steps=3,4", "num_steps=5"]) == [[*job, "num_steps=5"] for job in jobs_of([setting])]


@pytest.mark.parametrize("text", ODD)
def test_what_a_command_prints_is_read_back_as_it_was(text):
    cfg = train_settings(*shlex.split(as_argument("name", text)), as_setting("init_from", f"runs/{text}"))
    assert (cfg.name, cfg.init_from) == (text, f"runs/{text}")


def test_the_next_line_of_a_preparation_is_one_that_trains_on_it(tmp_path, capsys):
    out = tmp_path / "it's größe [1], a=b (2) $x"
    prepare_latents.main("source=shapes", "shapes.count=60", as_setting("out", out))
    [following] = re.findall("^next: (?:python|accelerate launch) train.py (.*)$", capsys.readouterr().out, re.M)
    said = subprocess.run(["bash", "-c", f"printf '%s\\0' {following}"], capture_output=True, text=True).stdout
    cfg = train_settings(*said.split("\0")[:-1])
    assert (cfg.data.path, cfg.name, cfg.run_dir) == (str(out), out.name,
                                                      f"runs/{out.name}") and (out / "metadata.json").is_file()


def test_bash_reads_what_is_printed(tmp_path):
    line = " ".join(as_argument("x", text) for text in ODD)
    said = subprocess.run(["bash", "-ic", f"printf '%s\\0' {line}"], capture_output=True, text=True,
                          cwd=tmp_path).stdout
    assert said.split("\0")[:-1] == [as_setting("x", text) for text in ODD]
    assert as_argument("checkpoint", "runs/a-1_b") == "checkpoint=runs/a-1_b"
    assert as_argument("checkpoint", "runs/größe (1)") == "\"checkpoint='runs/größe (1)'\""


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/users/me")
    cfg = train_settings("data.path=~/x", "init_from='~/y'", "objective=alignment",
                         "objective.alignment.teacher='~/t.pt'", "name=~x")
    assert (cfg.data.path, cfg.init_from, cfg.objective["alignment"]["teacher"], cfg.name) == ("/users/me/x",
            "/users/me/y", "/users/me/t.pt", "~x")
    plain = compose("report", report.ReportSettings, ["runs=[~/a,b/~]"])
    assert read(report.ReportSettings, plain).runs == ["/users/me/a", "b/~"]
    assert schema.as_path("~/z") == Path("/users/me/z")


@pytest.mark.parametrize("name", sorted(commands()))
def test_a_default_of_a_group_can_be_set_on_the_command_line(name):
    declared = settings_of(name)
    given = [f"{key}=null" for key in ("objective", "routes", "experiment", "guidance", "gauge")
             if key in {"config": ("objective", "routes", "experiment"), "fid": ("guidance", "gauge"),
                        "sample": ("guidance", "routes"),
                        "benchmark": ("guidance",)}.get(name, ())]
    assert compose(name, declared, given) == compose(name, declared, [])


def test_the_last_choice_of_a_group_counts():
    assert train_settings("experiment=xl2_sit_repa", "objective=null").objective == {}
    assert train_settings("objective=alignment", "objective=null").objective == {}
    assert [*train_settings("objective=null", "objective=internal").objective] == ["internal"]
    assert train_settings("routes=balanced", "routes=null").model.routes == train_settings().model.routes


# ---- YAML files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def preset(tmp_path):
    """Writes a preset of a user's own, and returns the arguments that choose it."""
    def write(content):
        (tmp_path / "experiment").mkdir(exist_ok=True)
        (tmp_path / "experiment/mine.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
        return "--config-dir", str(tmp_path), "experiment=mine"

    return write


@pytest.mark.parametrize("text",
                         ["2025_11_25", "1_1", "007", "1e3", "0x1f", "1:30", "true", "yes", "no", ".5", ".inf",
                          "2025-11-25"])
def test_text_in_a_preset_is_what_was_written_or_an_error_names_the_line_that_needs_quotes(preset, tmp_path, text):
    def job(written):
        return train_settings(*preset(f"# @package _global_\nname: {written}\nlora:\n  targets: [qkv, {written}]\n"))

    cfg = job(f"'{text}'")
    assert (cfg.name, cfg.run_dir, cfg.lora.targets) == (text, f"runs/{text}", ["qkv", text])
    if text != "2025-11-25":
        with pytest.raises(ValueError, match=r"^name=.*: it should be a valid string. Text needs quotes\.$"):
            job(text)


@pytest.mark.parametrize(("content", "words"), [
    ("name: a\n\tsteps: 3\n", "line 2"), ("name: a\nema: {decay: 0.9\nsteps: 3\n", "line 2, column 6"),
    ("name: a\nsteps: 3\nname: b\n", "found duplicate key name in"), ("name: 'a\nsteps: 3\n", "line 1"),
    ("name: a\n  steps: 3\n", "line 2"), ("a: 1\nb: \x01\n", "position 8"),
])  # fmt: skip
def test_a_mistake_in_a_yaml_file_is_a_line_with_its_name_and_place(preset, tmp_path, content, words):
    with pytest.raises(yaml.YAMLError) as error:
        train_settings(*preset(content))
    said = mistake(error.value)
    assert f'"{tmp_path}/experiment/mine.yaml", ' in said and words in said and "\n" not in said


@pytest.mark.parametrize(("content", "words"), [
    ("# @package _global_\noptimizer: {learning_rate: 1}\n",
     "There is no setting optimizer.learning_rate: did you mean optimizer.lr?"),
    ("# @package _global_\nstep: 1\n", "There is no setting step: did you mean steps?"),
    ("steps: 3\n", "The file of experiment= has settings of experiment"),
    ("# @package _global_\ndefaults: [override /model: tred]\n",
     "There is no model=tred: did you mean tread? There are dit, sprint, tread, "),
])  # fmt: skip
def test_a_key_that_a_file_has_wrong_has_a_neighbour(preset, content, words):
    with pytest.raises(ValueError) as error:
        train_settings(*preset(content))
    assert words in str(error.value)


# ---- called as a function -------------------------------------------------------------------------------------------


class Tiny(schema.Settings):
    steps: int
    name: schema.Text


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A command of configs/tiny.yaml, which returns nothing and notes its settings."""
    (tmp_path / "tiny.yaml").write_text("steps: 5\nname: a\n")
    (tmp_path / "presets").mkdir()
    for module in ("command", "typed"):
        monkeypatch.setattr(f"runtime.{module}.CONFIGS", tmp_path)
    monkeypatch.chdir(tmp_path)
    seen = []

    def make(main=seen.append):
        return command("tiny", Tiny)(main if hasattr(main, "__code__") else lambda cfg: main(cfg)), seen

    return make


def test_a_command_is_a_function_of_its_settings(tiny, monkeypatch):
    main, seen = tiny()
    main("steps=7", "name=1_1")
    main("name=größe (1)")
    assert [(cfg.steps, cfg.name) for cfg in seen] == [(7, "1_1"), (5, "größe (1)")]
    with pytest.raises(ValueError, match=r"^test_typed.py: There is no setting step: did you mean steps\?$"):
        main("step=3")


def test_in_a_notebook_the_kernels_own_arguments_are_not_read(tiny, monkeypatch):
    main, seen = tiny()
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    monkeypatch.setattr(notebook, "ipython_shell", lambda: types.SimpleNamespace(kernel=object()))
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # a test's worker has none
    main()
    assert seen[-1].steps == 5 and notebook.hides_bars() is False and notebook.hides_bars(True)


def test_what_a_command_sets_for_its_process_is_restored(tiny):
    from accelerate import Accelerator

    from runtime import ranks

    before = [signal.getsignal(number) for number in ranks.stop_signals()]
    states = []

    def train(cfg):
        accelerator = Accelerator(mixed_precision=cfg.name, cpu=True)
        ranks.StopRequest(accelerator).listen()
        states.append(accelerator.mixed_precision)

    main, _ = tiny(train)
    main("name=no")
    main("name=bf16")
    assert states == ["no", "bf16"] and [signal.getsignal(number) for number in ranks.stop_signals()] == before


def test_an_interrupted_command_is_an_interrupted_cell(tiny):
    def stop(cfg):
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test's worker ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            tiny(stop)[0]("steps=1")
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_program_with_options_is_a_function_too(capsys):
    @program
    def main(parser):
        parser.add_argument("--out")
        print(parser.parse_args().out)

    main("--out", "x")
    assert capsys.readouterr().out == "x\n"
    with pytest.raises(ValueError, match="plan.py: --dense-after"):
        plan.main("--dense-after", "2")
    with pytest.raises(ValueError, match="--nothing"):
        plan.main("--nothing")


def test_a_run_is_trained_twice_in_a_process_and_sampled_in_a_notebook(shapes, tmp_path, monkeypatch, capsys):
    import sample
    import train

    shown = []
    monkeypatch.setattr("sampling.pictures.show", shown.append)
    run = [f"data.path={shapes}", f"run_dir={tmp_path}/1_1", "experiment=quickstart", "cpu=true", "samples.every=0",
           "batch_size=8",
           "model.hidden_size=16", "model.num_heads=2"]  # fmt: skip
    train.main(*run, "steps=1")
    train.main(*run, "steps=2", "precision=bf16")
    following = capsys.readouterr().out.splitlines()[-1].partition("Next: python sample.py ")[2]
    sample.main(*shlex.split(following), "seeds=0-1", "num_steps=1", "cpu=true")
    assert shown == [tmp_path / "1_1/samples/step-00000002-ema-num_steps1-seeds0-1.png"] and shown[0].is_file()
    with pytest.raises(ValueError, match="steps=-1"):
        train.main(*run, "steps=-1")
    assert not torch.distributed.is_initialized()
