"""Settings are declared: a value of a wrong type or range raises a one-line error, as every failure of a command."""

import ast
import importlib
import inspect
import io
import json
import os
import re
import sys
import warnings
from typing import Annotated

import pytest
from conftest import ROOT, run_command
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from pydantic import Field
from test_design import files
from test_tf32 import commands

from objectives import class_of
from rf import RF
from runtime import ranks, schema
from runtime.command import command, with_own_settings
from runtime.schema import (
    Count,
    Fraction,
    Location,
    NonNegativeInt,
    NotNegative,
    Number,
    Positive,
    Record,
    Selection,
    Settings,
    Size,
    Text,
    one_of,
    read,
    read_record,
    refuse,
)
from runtime.typed import group_defaults, read_job
from training.settings import TrainSettings


class Part(Settings):
    start: int
    share: Annotated[float, Field(ge=0, lt=1)]


class Everything(Settings):
    count: Count
    whole: NonNegativeInt
    number: Number
    share: Fraction
    not_negative: NotNegative
    positive: Positive
    text: Text
    place: Location | None
    pick: Selection | None
    flag: bool
    choice: one_of(["a", "b"])
    maybe: one_of(["a", "b"]) | None
    mode: bool | one_of(["fast", "small"])
    counts: list[Count]
    named: list[str] | None
    trackers: list[one_of(["tensorboard", "wandb"])]
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)]
    part: Part
    parts: list[Part]
    other: dict
    size: Size
    mixed: float | list[int]


GOOD = {"count": 1, "whole": 0, "number": -1, "share": 1, "not_negative": 0, "positive": 1e-9, "text": "a",
        "place": None,
        "pick": [1, "0-3"], "flag": True, "choice": "a", "maybe": None, "mode": "fast", "counts": [1], "named": None,
        "trackers": [],
        "betas": [0.9, 0.5], "part": {"start": 1, "share": 0}, "parts": [], "other": {}, "size": 1,
        "mixed": 0.5}


@pytest.mark.parametrize(("key", "value", "sentence"), [
    ("count", 0, "count=0: it should be greater than or equal to 1."),
    ("count", 1.0, "count=1.0: it should be a valid integer."),
    ("count", None, "count=null: it should be a valid integer."),
    ("number", float("nan"), "number=NaN: it should be a finite number."),
    ("number", "x", "number=x: it should be a valid number."),
    ("share", 1.5, "share=1.5: it should be less than or equal to 1."),
    ("text", "", "text=: it should have at least 1 character."),
    ("flag", "yes", "flag=yes: it should be a valid boolean."),
    ("choice", "c", "choice=c: it should be 'a' or 'b'."), ("maybe", "c", "maybe=c: it should be 'a' or 'b'."),
    ("mode", "slow", "mode=slow: it should be a valid boolean; or it should be 'fast' or 'small'."),
    ("mixed", [1, 0.5], "mixed.1=0.5: it should be a valid integer."),
    ("counts", [1, 0], "counts.1=0: it should be greater than or equal to 1."),
    ("betas", [0.9, 2], "betas.1=2: it should be less than or equal to 1."),
    ("betas", [0.9], "betas.1 is missing."), ("part", {"start": 1}, "part.share is missing."),
    ("part", {"start": 1.5, "share": 0}, "part.start=1.5: it should be a valid integer."),
    ("part", {"start": 1, "share": 0, "end": 2}, "There is no setting part.end: there are start, share."),
    ("part", {"strat": 1, "share": 0, "start": 1}, "There is no setting part.strat: did you mean part.start?"),
    ("parts", [{"start": 1, "share": 1}], "parts.0.share=1: it should be less than 1."),
    ("size", 2**17, "size=131072: it should be less than or equal to 65536."),
    ("pick", 1.5,
     "pick=1.5: it should be a valid integer; or it should be a valid string; or it should be a valid list."
     " Text needs quotes."),
])  # fmt: skip
def test_a_value_of_another_type_or_range_raises_a_one_line_error(key, value, sentence):
    with pytest.raises(ValueError) as error:
        read(Everything, {**GOOD, key: value})
    assert str(error.value) == sentence


class Defaulted(Settings):
    name: str
    scale: float = 1.0


def test_an_unknown_setting_lists_those_that_have_a_default():
    with pytest.raises(ValueError, match=r"There is no setting weight: there are name, scale\.$"):
        read(Defaulted, {"name": "a", "weight": 1})


@pytest.mark.parametrize(("key", "meant"), [
    ("bs", "batch_size"), ("evaluate.bs", "evaluate.batch_size"), ("optimizer.wd", "optimizer.weight_decay"),
    ("learning_rate", "optimizer.lr"), ("evaluate.seeds", "evaluate.seed"), ("ema_decay", "ema.decay"),
    ("batch_sise", "batch_size"), ("weight_decay", "optimizer.weight_decay"),
    ("model.x", None), ("evaluate.n", None), ("samples.s", None),
])
def test_the_key_that_is_meant_is_another_setting_or_its_abbreviation_and_never_the_group(key, meant):
    assert schema.nearest(key, schema.declared_keys(TrainSettings)) == meant


def test_what_is_allowed_is_read():
    assert read(Everything, GOOD).model_dump() == {**GOOD, "betas": (0.9, 0.5)}
    assert not read(Everything, {**GOOD, "mode": False}).mode


class Note(Record):
    count: Count


@pytest.mark.parametrize(("text", "words"), [
    ("{", "is not JSON"), ("ÿþ", "is not JSON"), ("3", "note.json holds no JSON object"),
    ("{}", "note.json: count is missing."),
])  # fmt: skip
def test_invalid_metadata_raises_a_one_line_error_with_the_remedy(tmp_path, text, words):
    (tmp_path / "note.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError) as error:
        read_record(Note, tmp_path / "note.json", "Write it again.")
    assert words in str(error.value) and str(error.value).endswith(" Write it again.")


def test_a_record_may_say_more_than_is_read(tmp_path):
    (tmp_path / "note.json").write_text(json.dumps({"count": 2, "new": 1}))
    assert read_record(Note, tmp_path / "note.json", "").count == 2


# ---- the frame of a command -----------------------------------------------------------------------------------------


class Small(Settings):
    steps: Count
    place: Selection | None


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs a command of configs/small.yaml in this process -> (exit code, last line that it says)."""
    (tmp_path / "small.yaml").write_text(
        "# python small.py place=sea        a small command\nsteps: 5                # of one\nplace: null\n")
    (tmp_path / "presets/group").mkdir(parents=True)
    for module in ("command", "typed"):
        monkeypatch.setattr(f"runtime.{module}.CONFIGS", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def call(main, *arguments, **checked):
        monkeypatch.setattr(sys, "argv", ["folder/small.py", *arguments])
        try:
            command("small", Small, **checked)(main)()
        except SystemExit as stop:
            return (stop.code, capsys.readouterr().err.strip()) if isinstance(stop.code, int) else (1, stop.code)
        return 0, capsys.readouterr().out.strip()

    return call


def test_a_command_gets_the_settings_of_its_file_and_of_the_command_line(call):
    seen = []
    assert call(seen.append, "place='sea lion'") == (0, "") and seen[0].model_dump(exclude_none=True) == {"steps": 5,
            "place": "sea lion"}
    call(seen.append, "steps=7", "place=[ring,sea lion]")
    assert (seen[-1].steps, seen[-1].place) == (7, ["ring", "sea lion"])


@pytest.mark.parametrize(("arguments", "told"), [
    ([], None), (["place=null"], None), (["steps=5"], "steps=5 would change nothing: there is none."),
    (["++steps=5", "place=sea"], "steps=5 place=sea would change nothing: there is none."),
    (["--multirun", "place=null,sea"], "place=sea would change nothing: there is none."),  # before the first job
])
def test_a_typed_setting_without_effect_is_refused_and_one_of_a_file_is_not(call, arguments, told):
    def check(cfg, cli_overrides):
        refuse(cli_overrides, "steps", "place", why="there is none")
        return cfg

    ran = []
    said = call(ran.append, *arguments, check=check)
    assert len(ran) == (told is None) and said == ((0, "") if told is None else (1, f"small.py: {told}"))


def fail_by(error):
    def main(cfg):
        raise error

    return main


def test_what_goes_wrong_in_a_command_ends_in_a_one_line_error(call, tmp_path):
    assert call(fail_by(ValueError("Too many."))) == (1, "small.py: Too many.")
    said = f"small.py: reading or writing {tmp_path}/absent failed: No such file or directory."
    assert call(lambda cfg: (tmp_path / "absent").read_text()) == (1, said)
    assert call(fail_by(KeyboardInterrupt())) == (130, "small.py: stopped by Ctrl-C.")
    with pytest.raises(ZeroDivisionError):  # a mistake of ours keeps its traceback
        call(lambda cfg: 1 / 0)
    assert "HYDRA_FULL_ERROR" not in os.environ  # which a command sets for itself, and for none that it starts


def test_a_group_whose_file_lacks_its_first_line_is_named():
    with pytest.raises(ValueError, match="experiment= has settings of experiment.*must be # @package _global_"):
        read_job(Small, {"steps": 5, "place": None, "experiment": {"steps": 3}}, "small", {})


def test_all_jobs_of_a_sweep_are_checked_before_the_first_starts(call):
    seen = []
    assert call(seen.append, "-m", "steps=1,2") == (0, "") and [cfg.steps for cfg in seen] == [1, 2]
    assert call(fail_by(AssertionError()), "-m", "steps=1,0") == (1,
            "small.py: steps=0: it should be greater than or equal to 1.")


def test_letters_that_an_encoding_lacks_are_printed_as_escapes(call, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["small.py"])
    command("small", Small)(lambda cfg: print("2→8 größe \udce4"))()
    assert written.getvalue() == b"2\\u21928 gr\\xf6\\xdfe \\udce4\n"


def test_a_warning_of_a_command_is_one_line_without_source(call):
    before = warnings.showwarning

    def main(cfg):
        warnings.warn("Scaled\n  twice.", stacklevel=1)
        raise SystemExit(0)

    assert call(main) == (0, "warning: Scaled twice.") and warnings.showwarning is before


@pytest.mark.parametrize(("main", "argument", "error"),
                         [(fail_by(OSError("Full.")), "steps=1", OSError), (print, "steps=0", ValueError)])
def test_the_traceback_is_kept_on_demand(call, monkeypatch, main, argument, error):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
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


def test_help_and_the_shown_config_run_nothing(call):
    for argument in ("--help", "--cfg=job"):
        assert call(fail_by(AssertionError()), argument)[0] == 0


# ---- what every command says of itself ------------------------------------------------------------------------------


def entry_and_settings(name):
    file, declared = commands()[name]
    module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    return getattr(module, "compare_guided" if name == "rf" else "main"), getattr(module, declared)


@pytest.mark.parametrize("name", sorted(commands()))
def test_help_has_the_groups_of_the_command_alone_and_the_comments_of_its_settings(name, capsys):
    main, declared = entry_and_settings(name)
    run_command(main, f"{name}.py", "--help")
    said = capsys.readouterr().out
    groups = set(re.findall(r"^  ([a-z_]+)=\S+ +\S", said, re.M))
    assert groups == {"config": {"model", "route_schedule", "data", "diffusion", "objective", "optimizer", "experiment",
                                 "routes"}, "fid": {"guidance", "gauge"},
                      "sample": {"guidance"}, "rf": {"guidance"}, "choose_routes": {"model"}, "study": {"study"},
                      "benchmark": {"diffusion", "guidance"}, "benchmark_official": {"diffusion", "guidance"}}.get(name,
                              set())
    assert "powered by" not in said and "hydra" not in said and "defaults:" not in said
    assert f"{ {'config': 'train'}.get(name, name) }.py" in said
    of_model = {"backbone_type", "hidden_size", "depth", "num_heads", "patch_size", "fusion", "qk_norm", "selection",
                "l1_reg", "inverse", "routes"}
    assert {key for key in declared.model_fields if not re.search(rf"\b{key}:", said)} <= {"published"} | (of_model
            if "benchmark" in name else set())


@pytest.mark.parametrize(("name", "words"), [
    ("config", "data/imagenet256"), ("sample", "checkpoint="), ("rf", "checkpoint="),
    ("fid", "Give one of checkpoint=, images="),
    ("prepare_latents", "source= is missing: as in python scripts/prepare_latents.py source=shapes out=data/shapes16"),
    ("import_latents", "source= is missing: as in python scripts/import_latents.py source="), ("report", "runs="),
    ("export", "checkpoint= is missing: as in python scripts/export.py checkpoint=runs/<name> to=diffusers "
               "out=<folder>"),
    ("merge_lora", "checkpoint= is missing: as in python scripts/merge_lora.py checkpoint=runs/<name>"),
    ("benchmark_official", "path=null: give a checkout of github.com/CompVis/tread"),
])  # fmt: skip
def test_a_command_without_arguments_says_what_it_needs(name, words, tmp_path, monkeypatch, fresh_accelerator):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run_command(entry_and_settings(name)[0], f"{name}.py")
    assert words in str(ended.value.code) and not list(tmp_path.iterdir())


# ---- what is declared and what stands in configs/ -------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(commands()))
def test_the_keys_declared_are_those_of_the_config(name):
    file, declared = commands()[name]
    declared = getattr(importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts)), declared)
    with initialize_config_dir(str(schema.CONFIGS), version_base="1.3"):
        plain = OmegaConf.to_container(compose(name))
    assert keys_of(declared) == keys_in(plain, declared)
    required = {"source": "given", "out": "given", "checkpoint": "given", "to": "hub"}  # by some commands
    plain |= {key: value for key, value in required.items() if key in plain and plain[key] is None}
    read(declared, OmegaConf.to_container(OmegaConf.create(plain), resolve=True))


def groups_of(declared):
    """The keys of a declaration that stand for groups of keys, and their declarations."""
    fields = declared.model_fields.items()
    return {key: field.annotation
            for key, field in fields if isinstance(field.annotation, type) and issubclass(field.annotation, Settings)}


def keys_of(declared):
    groups = {key: keys_of(group) for key, group in groups_of(declared).items()}
    return {key: groups.get(key) for key in declared.model_fields}


def keys_in(plain, declared):
    groups = groups_of(declared)
    return {key: keys_in(value, groups[key]) if key in groups else None for key, value in plain.items()}


def test_an_error_names_settings_as_the_command_has_them():
    train, fid = ((name, entry_and_settings(name)[1]) for name in ("config", "fid"))
    sentences = [node.value for file in ("scoring/features.py", "scoring/statistics.py", "weights/autoencoders.py")
                 for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.Constant)
                 and isinstance(node.value, str)]
    sentences = [text
                 for text in sentences if re.search(r"\b(autoencoder|features|features_weights|sha256|metrics)=", text)]
    assert len(sentences) > 20
    for text in sentences:
        spelt = with_own_settings(text, *train)
        assert not re.search(r"(?<![\w.])(autoencoder|features|features_weights|sha256|metrics)=", spelt), spelt
    assert with_own_settings("set autoencoder=path, and seed=1", *fid) == "set autoencoder=path, and seed=1"
    assert with_own_settings("set autoencoder=path, and seed=1", *train) == "set data.autoencoder=path, and seed=1"
    for text in ("Prepare it: python scripts/prepare_latents.py source=x autoencoder=identity",
                 "run scripts/import_latents.py with autoencoder=x, and", "run scripts/export.py with autoencoder=x",
                 "runs/lr=1e-4 has no checkpoint", "runs/b2-lr=1e-4 has no checkpoint", "name=lr=1e-4 is taken"):
        assert with_own_settings(text, *train) == text


OBJECTIVES = sorted(file.stem for file in (schema.CONFIGS / "objective").glob("*.yaml") if file.stem != "none")
LIBRARY = {"latents_std", "pixels", "generator", "num_inference_steps", "output_type", "class_labels", "guidance_scale",
           "key", "WORLD_SIZE", "torchao", "peft"}  # of metadata.json, the exported pipeline, bash and pip


def words_of(error):
    """Joins the texts of a raise statement, with ◦ for values."""
    return "".join(node.value if isinstance(node, ast.Constant) else "◦" for node in ast.walk(error)
                   if isinstance(node, ast.FormattedValue)
                   or isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_every_setting_that_an_error_names_is_one_of_a_command():
    known = {key for name in commands() for key in schema.declared_keys(entry_and_settings(name)[1])}
    known |= {key.rpartition(".")[2] for key in known}
    known |= {group for name in commands() for group in group_defaults(name)}
    known |= {f"diffusion.{key}" for key in inspect.signature(RF).parameters}
    known |= {f"objective.{name}.{key}" for name in OBJECTIVES
              for key in inspect.signature(class_of(name)).parameters}
    ours = {name: tree for name, tree in files().items() if not name.startswith(("routed", "routing_module"))}
    found = [(name, key) for name, tree in ours.items() for error in ast.walk(tree) if isinstance(error, ast.Raise)
             for key in re.findall(r"(?<![\w.+/◦-])([A-Za-z_][\w.]*)=", words_of(error))]
    assert len(found) > 150
    assert not [(name, key) for name, key in found if key not in known | LIBRARY]
