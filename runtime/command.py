"""The entry point of a command: composes and checks its settings, and turns a mistake into a one-line error."""

import argparse
import contextlib
import functools
import inspect
import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

import yaml
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from runtime import notebook, ranks
from runtime.schema import CONFIGS, Declared, Settings, declared_keys, first_line, leaves
from runtime.typed import (
    cli_overrides,
    compose,
    config_files,
    group_defaults,
    jobs_of,
    parse_options,
    read_job,
)


def command(
    config_name: str, declared: type[Declared], *,
    check: Callable[[Declared, Mapping[str, str]], Declared] = lambda cfg, cli_overrides: cfg,
    rewrite: Callable[[list[str]], list[str]] = list, when_full: Callable[[dict], str] = lambda plain: "",
) -> Callable[[Callable], Callable[..., None]]:
    """Makes a command of `main(cfg)`: reads configs/<config_name>.yaml and the command line, and checks them.

    Called as a function it takes settings as arguments, main("steps=100", "name=x"), and a mistake is a ValueError. As
    a program, a mistake, a file that cannot be read or written, and Ctrl-C end it with a one-line error, or a traceback
    with HYDRA_FULL_ERROR=1 in the environment.

    `check` returns the settings for `main`, or raises ValueError for some that do not go together. It also receives the
    typed settings as text, by key, and sees all jobs of a sweep before the first one starts. `rewrite` turns arguments
    of another form into settings. `when_full` returns advice, from the settings, for a GPU whose memory is full.
    """
    def decorate(main: Callable[..., None]) -> Callable[..., None]:
        def work(arguments: list[str]) -> None:
            options, settings = parse_options(rewrite(arguments))
            if options.help:
                print(help_of(main, config_name))
                return
            jobs = jobs_of(settings) if options.multirun else [settings]
            composed = [compose(config_name, declared, job, options.config_dir) for job in jobs]
            if options.cfg:
                print("\n---\n".join(OmegaConf.to_yaml(plain).rstrip() for plain in composed))
                return
            try:
                checked = [check(read_job(declared, plain, config_name, typed), typed)
                           for plain, typed in zip(composed, map(cli_overrides, jobs), strict=True)]
                check_places(checked)
                for plain, cfg in zip(composed, checked, strict=True):
                    try:
                        main(cfg)
                    except (MemoryError, RuntimeError) as error:
                        if not is_full_memory(error):
                            raise
                        raise ValueError(what_helps(error, plain, when_full)) from error
            except ValueError as error:
                raise ValueError(with_own_settings(str(error), config_name, declared)) from error
        return entry_point(main, work)
    return decorate


def program(main: Callable[[argparse.ArgumentParser], None]) -> Callable[..., None]:
    """Makes a command of `main(parser)`, which declares and reads arguments of its own; otherwise like `command`."""
    def work(arguments: list[str]) -> None:
        main(argparse.ArgumentParser(description=main.__globals__["__doc__"],
                                     formatter_class=argparse.RawDescriptionHelpFormatter))
    return entry_point(main, work)


def entry_point(main: Callable, work: Callable[[list[str]], None]) -> Callable[..., None]:
    """Returns `main` as an entry point, which passes the arguments to `work`."""
    def run(program: str, arguments: list[str]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = show_in_one_line
                work(arguments)
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
            sentence = mistake(error)
            if sentence is None or "HYDRA_FULL_ERROR" in os.environ:
                ErrorHandler().record_exception(error)  # torchrun and accelerate launch report it as the cause
                raise
            sys.exit(f"{program}: {sentence[:5000]}")  # a name in a foreign file may be a megabyte long

    @functools.wraps(main)
    def entry(*settings: str) -> None:
        if hasattr(sys.stdout, "reconfigure"):
            # A redirected log gets each line at once, with escapes for letters that its encoding lacks.
            sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
        if settings or not notebook.has_command_line():
            call(run, Path(main.__code__.co_filename).name, [*settings])
        else:
            # A stream that was closed before the start is None, and Python prints nothing to it.
            sys.stdout, sys.stderr = (stream and LenientStream(stream) for stream in (sys.stdout, sys.stderr))
            run(Path(sys.argv[0]).name, sys.argv[1:])
    return entry


class LenientStream:
    """A stream that drops what it cannot write, so that a command outlives `head`, a closed terminal or a full disk."""

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
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)  # takes all later output, also at exit
            if number == 1:
                print(f"stdout can no longer be written ({error.strerror}): the command continues.", file=sys.stderr)
        return len(text)


def show_in_one_line(message: Warning | str, *_: object, **__: object) -> None:
    """Prints a warning as one line, without the Python source that raised it."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def call(run: Callable[[str, list[str]], None], program: str, settings: list[str]) -> None:
    """Runs a command within a program or a notebook, which continues afterwards and may run another one.

    Settings of the process, such as signal handlers, are restored. Raises ValueError where a program would end with a
    one-line error, and KeyboardInterrupt where it was interrupted.
    """
    handlers, ended = {number: signal.getsignal(number) for number in ranks.stop_signals()}, None
    argv, sys.argv = sys.argv, [program, *settings]  # benchmarks record it
    ranks.forget_state()
    try:
        run(program, settings)
    except SystemExit as stop:
        ended = stop.code
    finally:
        sys.argv = argv
        ranks.forget_state()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if isinstance(ended, str):  # raised here, so that its frames do not keep the network in memory
        raise ValueError(ended)
    if ended == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if ended == 2:  # argparse has printed why
        raise ValueError(f"{program} does not accept these arguments: {' '.join(settings)}")
    if ended:
        raise SystemExit(ended)


def check_places(jobs: list[Settings]) -> None:
    """Raises ValueError if a job of a sweep would write to the output folder or file of another one, or into it."""
    for key in ("run_dir", "out"):
        places = [place for job in jobs if (place := getattr(job, key, None)) is not None]
        for one, other in itertools.permutations(places, 2):
            if Path(os.path.abspath(other)).is_relative_to(os.path.abspath(one)):
                raise ValueError(f"{len(jobs)} jobs of --multirun would write to {key}={one}: give each its own by a "
                                 f"setting that differs, such as {key}='x-${{seed}}'.")


@functools.cache  # the code that this process has loaded, whatever is committed later
def commit() -> str | None:
    """Returns this project's commit, with -dirty where tracked files differ from it.

    Outside a repository it is the environment's TREAD_COMMIT, or None.
    """
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("TREAD_COMMIT")


def mistake(error: Exception) -> str | None:
    """Returns a sentence about a mistake in settings or files, which a user can correct; None for our own mistakes."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"reading or writing {error.filename} failed: {error.strerror}."
    if isinstance(error, ValueError | OSError):
        return str(error)
    if isinstance(error, HydraException | OmegaConfBaseException | yaml.YAMLError):  # YAML's name file and line
        return " ".join(str(error).partition("Config search path")[0].split())
    return None


def with_own_settings(sentence: str, config_name: str, declared: type[Settings]) -> str:
    """Renames the settings in an error to this command's own: autoencoder= is data.autoencoder= in training.

    A key is rewritten if the command lacks it and has exactly one nested key of that name. Paths such as runs/b2-lr=1
    and examples of other commands are kept.
    """
    known = [key for key in declared_keys(declared) if not key.startswith(("published.", "study."))]
    top = {key for key in known if "." not in key} | {*group_defaults(config_name)}

    def spell(found: re.Match) -> str:
        nested = [key for key in known if key.rpartition(".")[2] == found[1]]
        return f"{nested[0]}=" if found[1] and found[1] not in top and len(nested) == 1 else found[0]

    return re.sub(r"\S+\.py(?: with)?(?: (?:-\S+|\S+=\S*|…))*|(?<![\w.+/=-])([A-Za-z_]\w*)=", spell, sentence)


# The settings of all commands that save memory.
SAVES_MEMORY = ("batch_size", "grad_accum_steps", "activation_checkpointing", "sharding", "precision", "data.on_device",
                "samples.batch_size", "evaluate.batch_size", "decode_batch_size", "decode_precision", "num_workers",
                "shard_size")


def what_helps(error: Exception, plain: dict, when_full: Callable[[dict], str]) -> str:
    """Writes a sentence that memory is full, and that names the command's settings which save memory."""
    values = leaves(plain)
    helpful = [key for key in SAVES_MEMORY if values.get(key) is not None]
    advice = ""
    with contextlib.suppress(Exception):  # advice that fails must not hide the error
        advice = when_full(plain)
    return (f"Memory is full: {first_line(error)} {advice}Settings that help: {', '.join(helpful)} "
            f"(docs/reliability.md).")


def is_full_memory(error: Exception) -> bool:
    """True if memory ran out: Python's, numpy's, a GPU's, or torch's on a CPU."""
    text = r"can't allocate memory|out of memory|CU[A-Z]+_\w*ALLOC\w*_FAILED"
    return isinstance(error, MemoryError) or isinstance(error, RuntimeError) and bool(re.search(text, str(error)))


# ---- help -----------------------------------------------------------------------------------------------------------


def help_of(main: Callable, config_name: str) -> str:
    """Writes what --help prints: what the command does, its groups with their choices, and its settings."""
    doc = main.__globals__["__doc__"] if main.__name__ == "main" else main.__doc__
    groups = group_defaults(config_name)
    parts = [inspect.cleandoc(doc or "")]
    if groups:
        parts.append("Groups of settings, their defaults and choices, from configs/:")
    for group, choice in groups.items():
        files = (file for place in (CONFIGS, CONFIGS / "presets") for file in (place / group).glob("*.yaml"))
        choices = " | ".join(sorted(file.stem for file in files))
        parts[-1] += "\n" + textwrap.fill(choices, 120, subsequent_indent=28 * " ",
                                          initial_indent=f"  {group}={choice or 'null'}".ljust(28))
    parts.append("Settings, written as key=value, or key.key=value where they are nested:")
    parts += map(documented_settings, config_files(f"{config_name}.yaml"))
    for group, choice in groups.items():
        for file in config_files(f"{group}/{choice}.yaml") if choice else ():
            is_global = "@package _global_" in file.read_text(encoding="utf-8")
            text = documented_settings(file)
            parts.append(text if is_global else f"{group}:\n{textwrap.indent(text, '  ')}")
    parts.append("Options: --multirun (or -m) tries several values, such as seed=0,1. --cfg job prints the settings. "
                 "--config-dir <folder> adds a folder like configs/.")
    return "\n\n".join(filter(None, parts))


def documented_settings(file: Path) -> str:
    """Returns a YAML file without what only Hydra reads."""
    text, hydra_only = file.read_text(encoding="utf-8"), r"^(defaults|hydra):.*\n(?:[ -].*\n)*|^# @package.*\n"
    return re.sub(r"\n{3,}", "\n\n", re.sub(hydra_only, "", text, flags=re.M)).strip()
