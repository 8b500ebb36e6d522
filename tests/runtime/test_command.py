"""The frame of a command: what is typed arrives as it is, or one line says what to type."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from accelerate import Accelerator
from conftest import ROOT, command_of, commands, run_command

import train
from runtime import ranks, schema
from runtime.command import command, commit, compose, jobs_of
from runtime.schema import read, refuse
from sample import SampleSettings
from training.settings import TrainSettings

# ---- what is typed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "values"), [
    ("checkpoint=runs/x", ["runs/x"]), ("seeds=range(1,3)", [1, 2]), ("classes=[1,2],null", [[1, 2], None]),
    ("checkpoint='a, b',\"it's\",'007'", ["a, b", "it's", "007"]),
    ("routes=[{start_layer_idx: 1, end_layer_idx: 2}],[]", [[{"start_layer_idx": 1, "end_layer_idx": 2}], []]),
])  # fmt: skip
def test_the_values_of_a_sweep_are_each_a_job_of_what_was_typed(setting, values):
    plain = [compose("sample", SampleSettings, job) for job in jobs_of(["cpu=true", setting, "guidance=none,cfg"])]
    assert [each["cpu"] for each in plain] == [True] * len(plain)
    assert [each[setting.partition("=")[0]] for each in plain[::2]] == values
    assert [each["scale"] is None for each in plain] == [True, False] * len(values)


def test_a_tilde_is_the_home_folder_and_1e4_an_integer(monkeypatch):
    monkeypatch.setenv("HOME", "/users/me")
    cfg = read(TrainSettings, compose("config", TrainSettings, ["data.path='~/x'", "name='~x'", "steps=1e4"]))
    assert repr(cfg.steps) == "10000"
    assert (cfg.data.path, cfg.name) == ("/users/me/x", "~x")


@pytest.mark.parametrize(("content", "words"), [
    ("name: a\n\tsteps: 3\n", "mine.yaml\", line 3"), ("name: a\nsteps: 3\nname: b\n", "found duplicate key name in"),
    ("step: 1\n", "did you mean steps?"),
    ("name: 2025_11_25\n", "name=20251125: it should be a valid string. Text that reads as a number needs two kinds"),
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
    rates: list[int | dict[str, str]]


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


def test_a_call_within_a_program_takes_settings_lists_and_keywords_of_any_text(call):
    assert call(print)[0] == 0      # which makes the config's folder this command's
    seen: list[Small] = []
    command("small", Small)(seen.append)(["steps=7"], name="größe (1), 007", rates=[1, {"a": ","}], rate=1e-5, out=None)
    [cfg] = seen
    assert (cfg.steps, cfg.name, cfg.rates, cfg.rate, cfg.out) == (7, "größe (1), 007", [1, {"a": ","}], 1e-5, None)


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


@pytest.mark.parametrize(("arguments", "words"), [
    (["steps=3", "steps=4"], "steps is given 2 times: steps=3 steps=4."),
    (["name=a-0.tar", "name=a-1.tar", "name=a-2.tar"], "write 'name=x-{0..2}'"),
    *(([f"name={text}"], f"name={text} cannot be read: write key=value") for text in ("größe", "a (1)", "a=b")),
    (["name=a,b"], "name=a,b has several values: --multirun tries them one by one."),
    (["lion"], "lion is not key=value: did you mean steps=lion?"),
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
                      (fail_by(KeyboardInterrupt()), (130, "small.py: stopped by Ctrl-C."))):
        assert call(main) == end
    with pytest.raises(ZeroDivisionError):
        call(lambda cfg: 1 / 0)
    for argument in ("--help", "--cfg=job"):
        assert call(NEVER, argument)[0] == 0
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    for main, argument, error in ((fail_by(OSError("Full.")), "steps=1", OSError), (print, "steps=0", ValueError)):
        with pytest.raises(error):
            call(main, argument)


def test_srun_cannot_end_a_rank_that_has_saved_by_a_signal_which_would_hide_its_exit_code(handlers, call, monkeypatch):
    ignored = []
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(ranks.dist, "destroy_process_group", lambda: ignored.append(signal.getsignal(signal.SIGTERM)))
    assert call(fail_by(SystemExit(138)))[0] == 138 and ignored == [signal.SIG_IGN]


def test_other_ranks_wait_before_they_repeat_an_error(call, monkeypatch):
    waits = []
    monkeypatch.setattr(ranks.time, "sleep", waits.append)
    monkeypatch.setattr(ranks.signal, "signal", lambda *_: None)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert call(fail_by(ValueError("Too many.")))[0] == 1
    assert waits == [5]


def test_each_job_has_its_own_precision_and_the_signals_of_a_first_one_and_a_call_raises_its_errors(handlers, call):
    states = []

    def main(cfg):
        stop = ranks.StopRequest(Accelerator(mixed_precision=cfg.name, cpu=True))
        states.append((stop.state.mixed_precision, ranks.stop_handlers() == handlers))
        stop.listen()
        assert signal.getsignal(signal.SIGTERM) == stop.receive

    assert call(main, "-m", "name=no,bf16")[0] == 0 and states == [("no", True), ("bf16", True)]
    command("small", Small)(main)("name=no", "steps=7")
    assert states[2][0] == "no"
    with pytest.raises(ValueError, match=r"^There is no setting step: did you mean steps\?"):
        command("small", Small)(NEVER)("step=3")


def test_a_new_extension_is_a_change_of_the_code(tmp_path, monkeypatch):
    for folder in ("runtime", "metrics"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one.py").touch()
    for step in (["init", "-q"], ["add", "."], ["-c", "user.name=x", "-c", "user.email=x", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", tmp_path, *step], check=True)
    monkeypatch.setattr("runtime.command.__file__", str(tmp_path / "runtime/command.py"))
    commits = []
    for new in ("scripts.py", "metrics/two.py"):
        (tmp_path / new).touch()
        commits.append(commit.__wrapped__())
    assert commits[1] == f"{commits[0]}-dirty" and re.fullmatch("[0-9a-f]{12}", commits[0])


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
    assert f"\n## {name}.yaml\n" in printed and "defaults:" not in printed and "hydra" not in printed
    if name == "config":
        assert "\nmodel=tread: dit | sprint | tread" in printed and "\n## model/tread.yaml\n" in printed


# Of libraries, files and scripts/compare.py.
LIBRARY = {"latents_std", "pixels", "generator", "key", "WORLD_SIZE", "torchao", "teacher", "LOCAL_RANK", "MASTER_PORT",
           "use_rope", "return_features", "PYTHONPATH", "pairs", "seconds", "WANDB_MODE", "sample_size"}


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
