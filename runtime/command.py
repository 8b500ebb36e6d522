"""The frame of a command: its config is composed and checked, and a mistake ends it in a sentence."""

import argparse
import difflib
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from runtime import notebook, ranks
from runtime.schema import CONFIGS, Settings, as_argument, dotted, first_line, leaves, read, unknown
from runtime.typed import as_typed, declared_keys, group_defaults, read_yaml, without_null


def command(
    config_name: str, declared: type[Settings], rewrite: Callable[[list[str]], list[str]] = list,
) -> Callable[[Callable], Callable[..., None]]:
    """Makes a command of `main(cfg)`: reads configs/<config_name>.yaml and the command line, and checks them.

    Called as a function it takes the settings as arguments, main("steps=100", "name=x"), and a mistake is a ValueError.
    As a program, a mistake, a file that cannot be read or written, and Ctrl-C end it with a one-line error,
    or a traceback with HYDRA_FULL_ERROR=1 in the environment. `rewrite` turns arguments of another form into settings.
    """
    def decorate(main: Callable[[Any], None]) -> Callable[..., None]:
        def work(plain: dict) -> None:
            arguments = rewrite(sys.argv[1:])
            check_hydra(arguments)
            jobs = [(composed, read_job(declared, composed)) for composed in compose(config_name, declared, arguments)]
            check_places([cfg for _, cfg in jobs], typed(arguments))  # before the first one starts
            for composed, cfg in jobs:
                plain.update(composed)
                cfg.typed.update(typed(arguments))
                main(cfg)
        return framed(main, work, config_name)
    return decorate


def program(main: Callable[[argparse.ArgumentParser], None]) -> Callable[..., None]:
    """Makes a command of `main(parser)`, which declares and reads arguments of its own; otherwise like `command`."""
    def work(_: dict) -> None:
        main(argparse.ArgumentParser(description=main.__globals__["__doc__"],
                                     formatter_class=argparse.RawDescriptionHelpFormatter))
    return framed(main, work)


def framed(main: Callable, work: Callable[[dict], None], config_name: str = "") -> Callable[..., None]:
    """Returns `main` as an entry point; `work` does it, and puts the settings that it tries into its dict."""
    @mock.patch.object(warnings, "formatwarning", as_one_line)
    def run(program: str) -> None:
        wants_traceback, plain = "HYDRA_FULL_ERROR" in os.environ, {}
        for name in ("stdout", "stderr"):
            if not isinstance(stream := getattr(sys, name), LenientStream | None):
                setattr(sys, name, LenientStream(stream))
        try:
            work(plain)
            ranks.leave_group()
        except KeyboardInterrupt:
            print(f"\n{program}: stopped by Ctrl-C.", file=sys.stderr)
            sys.exit(130)
        except SystemExit as stop:
            if isinstance(stop.code, str):
                ranks.wait_for_root_cause(stop)
            else:
                ranks.leave_group()
            raise
        except Exception as error:
            ranks.wait_for_root_cause(error)
            sentence = mistake(error, config_name, plain)
            if sentence is None or wants_traceback:
                ErrorHandler().record_exception(error)  # where torchrun and accelerate launch look for the cause
                raise
            sys.exit(f"{program}: {sentence[:5000]}")  # a name in a file of somebody may have a megabyte

    @functools.wraps(main)
    def entry(*settings: str) -> None:
        if hasattr(sys.stdout, "reconfigure"):
            # A redirected log has each line at once, and letters that its encoding lacks as escapes.
            sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
        if settings or not notebook.has_command_line():
            call(run, Path(main.__code__.co_filename).name, settings)
        else:
            run(Path(sys.argv[0]).name)
    return entry


class LenientStream:
    """A stream whose reader may be gone, as `head` or a closed terminal: the command continues, the rest is dropped."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as error:
            number = self.stream.fileno()
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)  # where the rest goes, also at exit
            if number == 1:
                print(f"Nobody reads stdout any more ({error.strerror}): the command continues.", file=sys.stderr)
        return len(text)


def as_one_line(message: Warning | str, *_: object) -> str:
    """Formats a warning as one line, without the Python source that raised it."""
    return f"warning: {' '.join(str(message).split())}\n"


def call(run: Callable[[str], None], program: str, settings: Iterable[str]) -> None:
    """Runs a command within a program or a notebook, which continues afterwards and may run another one.

    What a command sets for its process is set back. Raises ValueError for what would end a program with a
    one-line error, and KeyboardInterrupt where it was interrupted.
    """
    handlers = {number: signal.getsignal(number) for number in ranks.stop_signals()}
    state, ended = GlobalHydra.instance(), None
    with mock.patch.object(sys, "argv", [program, *settings]), mock.patch.object(state, "hydra", None), \
            mock.patch.multiple(sys, stdout=sys.stdout, stderr=sys.stderr), \
            mock.patch.object(ranks, "exit_unsaved", signal.default_int_handler):
        ranks.forget_state()
        try:
            run(program)
        except SystemExit as stop:
            ended = stop.code
        finally:
            ranks.forget_state()
            for number, handler in handlers.items():
                signal.signal(number, handler)
    if isinstance(ended, str):  # raised here, without the frames that hold the network
        raise ValueError(ended)
    if ended == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if ended == 2:  # of argparse, which has printed why
        raise ValueError(f"{program} does not know these arguments: {' '.join(settings)}")
    if ended:
        raise SystemExit(ended)


def typed(arguments: list[str]) -> dict[str, str]:
    """Reads the settings of a command line as text, by key; of a key that comes twice the last one counts."""
    pairs = (argument.lstrip("+~").partition("=") for argument in arguments if not argument.startswith("-"))
    return {key.partition("@")[0]: value for key, _, value in pairs}


def check_hydra(arguments: Iterable[str]) -> None:
    """Raises ValueError for settings of Hydra that have no effect here, such as its launchers and output folders."""
    for argument in arguments:
        key, _, value = argument.lstrip("+~").partition("=")
        if key in ("hydra/launcher", "hydra/sweeper") and value != "basic":
            raise ValueError(f"{argument} is not supported: the jobs of --multirun run one after the other in this "
                             f"process. Leave it out, or start each job as a command of its own (scripts/slurm.sh).")
        if re.match(r"hydra[./]", key) and key not in ("hydra/launcher", "hydra/sweeper", "hydra.searchpath"):
            raise ValueError(f"{argument} would change nothing, as Hydra only reads the settings here: leave it out. "
                             f"Outputs go to the folder that run_dir= or out= names.")


def read_job(declared: type[Settings], composed: dict) -> Settings:
    """Checks composed settings as `read` does, and that each group's file sets what it should."""
    for name in composed.keys() - declared.model_fields:
        if (CONFIGS / name).is_dir():
            raise ValueError(f"The file of {name}= sets {dotted({name: composed[name]})[-1]}, and not a setting of the "
                             f"command: the first line of the file must be # @package _global_")
    return read(declared, composed)


def check_places(jobs: list[Settings], given: dict[str, str]) -> None:
    """Raises ValueError where jobs of a sweep have one output folder or file, with a name that tells them apart."""
    for key in ("run_dir", "out"):
        places = [os.path.abspath(place) for job in jobs if (place := getattr(job, key, None)) is not None]
        if len({*places}) == len(places):
            continue
        settings = [leaves(job.model_dump()) for job in jobs]
        swept = [name for text in given for name in (text, f"{text}.name")
                 if len({str(job.get(name)) for job in settings}) > 1]
        shown = key if key == "out" or key in given or "name" not in settings[0] else "name"
        name, suffix = settings[0][shown], Path(settings[0][shown]).suffix if key == "out" else ""
        own = "".join(f"-${{{name}}}" for name in swept) or "-…"
        raise ValueError(f"{len(jobs)} jobs of --multirun would write to {key}={settings[0][key]}: give each its own, "
                         f"such as {shown}='{name.removesuffix(suffix)}{own}{suffix}'.")


@functools.cache  # of the code that this process has loaded, whatever is committed later
def commit() -> str | None:
    """Returns this project's commit, with -dirty where tracked files differ from it.

    Outside a repository it is TREAD_COMMIT of the environment, or None.
    """
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("TREAD_COMMIT")


def compose(config_name: str, declared: type[Settings], arguments: list[str]) -> list[dict]:
    """Composes a config with settings, as plain values; none for --help and --cfg, several for --multirun."""
    flags = get_args_parser()._option_string_actions
    for argument in arguments:
        if argument.startswith("--e"):  # --experimental-rerun
            raise ValueError(f"{argument} would load a pickle, which could run code: give the settings instead.")
        if argument.startswith("-") and argument.partition("=")[0] not in flags:
            raise ValueError(f"{argument}: settings have no dashes: {argument.lstrip('-')}"
                             f"{'' if '=' in argument else '=<value>'}.")
    sweeps = not {"--multirun", "-m"}.isdisjoint(arguments)
    arguments = sorted(arguments, key=lambda argument: argument not in ("--multirun", "-m"))  # argparse wants it first
    groups = group_defaults(CONFIGS, config_name)
    typed = [as_typed(argument, declared, sweeps) for argument in without_null(arguments, groups, CONFIGS)]
    try:
        with tempfile.TemporaryDirectory() as folder:  # for what Hydra writes down of several jobs
            composed = hydra_composes(config_name, declared, typed + sweeps * [f"hydra.sweep.dir={folder}"])
    except MissingConfigException as error:
        if not error.missing_cfg_file or not error.options:
            raise
        group, _, name = error.missing_cfg_file.rpartition("/")
        near = difflib.get_close_matches(name, error.options, n=1)
        where = re.match(r"In '(.*?)'", str(error))[1]
        raise ValueError(f"{'There' if where == config_name else f'{where}.yaml: there'} is no {group}={name}: "
                         f"{f'did you mean {near[0]}? ' if near else ''}There are {', '.join(error.options)}."
                         ) from None
    except ConfigCompositionException as error:
        if not (found := re.search(r"Could not override '([^']+)'", str(error))):
            raise
        try:  # what there is with the groups that are chosen
            chosen = [argument for argument in typed if argument.lstrip("+~").partition("=")[0] in groups]
            known = dotted(OmegaConf.to_container(hydra_composes(config_name, declared, chosen)[0]))
        except (HydraException, ValueError, IndexError):
            known = [*declared_keys(declared)]
        raise ValueError(unknown(found[1], [*groups, *known], f"configs/{config_name}.yaml names all.")) from None
    shows = ("--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--version", "--shell-completion", "-sc")
    if sweeps and not composed and not any(argument.partition("=")[0] in shows for argument in arguments):
        raise ValueError("--multirun has started no job here: leave out the override of hydra/launcher or "
                         "hydra/sweeper in your YAML files, as jobs run one after the other in this process.")
    return [OmegaConf.to_container(cfg, resolve=True) for cfg in composed]


def hydra_composes(config_name: str, declared: type[Settings], arguments: list[str]) -> list:
    """Lets Hydra compose a config; its YAML files are read by `read_yaml`."""
    def load(source: ConfigSource, config_path: str) -> ConfigResult:
        file = Path(source.path, source._normalize_file_name(config_path))
        settings = read_yaml(file, declared)
        if not isinstance(settings, dict):
            raise ValueError(f"{file} holds no settings: its lines are key: value.")
        header = source._get_header_dict(file.read_text(encoding="utf-8-sig")[:512])
        return ConfigResult(provider=source.provider, path=f"file://{source.path}", header=header,
                            config=OmegaConf.create(settings))

    Plugins.instance()  # which registers what reads files
    files = SourcesRegistry.instance().resolve("file")
    composed: list = []
    try:
        with mock.patch.dict(os.environ, HYDRA_FULL_ERROR="1"), \
                mock.patch.object(files, "load_config", load), \
                mock.patch.object(sys, "argv", [sys.argv[0], *arguments]):  # Hydra then raises its errors, prints none
            hydra.main(config_path=str(CONFIGS), config_name=config_name, version_base="1.3")(composed.append)()
    except TypeError:  # of Hydra, for a group with a list of dicts
        raise ValueError("A setting that takes a name of configs/ was given a list: write routes=balanced, say, and "
                         "'model.routes=[…]' for routes of your own.") from None
    return composed


def mistake(error: Exception, config_name: str, plain: dict) -> str | None:
    """Returns a sentence for what a user can mend, settings, files or memory, and None for our own mistakes."""
    if isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        exact = re.fullmatch(r"[\w.]+", key, re.ASCII) and equals and value and value[0] not in "'\"[{"
        example = as_argument(key, value) if exact else "\"name='größe (1)'\""
        return (f"{error.override} cannot be read: write key=value, and a value with other characters than letters, "
                f"digits and _-+./:%*?@$| in two kinds of quotes, as {example}.")
    if isinstance(error, HydraException | OmegaConfBaseException):
        said = " ".join(str(error).partition("Config search path")[0].split())
        return f"{said.rstrip('.')}: configs/{config_name}.yaml names all settings."
    if is_full_memory(error):
        helpful = [key for key in SAVES_MEMORY if OmegaConf.select(OmegaConf.create(plain), key) is not None]
        return f"Memory is full: {first_line(error)} Settings that help: {', '.join(helpful)} (docs/reliability.md)."
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"reading or writing {error.filename} failed: {error.strerror}."
    if isinstance(error, ValueError | OSError):
        return str(error)
    return None


# Of any command.
SAVES_MEMORY = ("batch_size", "grad_accum_steps", "activation_checkpointing", "sharding", "precision", "data.on_device",
                "samples.batch_size", "evaluate.batch_size", "decode_batch_size", "decode_precision", "num_workers",
                "shard_size")


def is_full_memory(error: Exception) -> bool:
    """True if memory ran out: Python's, numpy's, a GPU's, or torch's on a CPU."""
    text = r"can't allocate memory|out of memory|CU[A-Z]+_\w*ALLOC\w*_FAILED"
    return isinstance(error, MemoryError) or isinstance(error, RuntimeError) and bool(re.search(text, str(error)))
