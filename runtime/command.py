"""The frame of a command: its config is composed and checked, and a mistake ends it in a sentence."""

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from omegaconf import OmegaConf

from runtime import ranks
from runtime.schema import CONFIGS, Settings, first_line, read


def command(config_name: str, declared: type[Settings]) -> Callable[[Callable], Callable[[], None]]:
    """Makes a command of `main(cfg)`: reads configs/<config_name>.yaml and the command line, and checks them.

    A mistake, a file that cannot be read or written, and Ctrl-C end it in a sentence, or with HYDRA_FULL_ERROR=1 in
    the environment in a traceback.
    """
    def decorate(main: Callable[[Any], None]) -> Callable[[], None]:
        @functools.wraps(main)
        def entry() -> None:
            if hasattr(sys.stdout, "reconfigure"):
                sys.stdout.reconfigure(line_buffering=True)  # a redirected log has each line at once
            program, wants_traceback = Path(sys.argv[0]).name, "HYDRA_FULL_ERROR" in os.environ
            plain: dict = {}
            try:
                for plain in compose(config_name):
                    cfg = read(declared, plain)
                    cfg.typed.update(typed(sys.argv[1:]))
                    main(cfg)
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
                    ranks.record_for_launcher(error)
                    raise
                sys.exit(f"{program}: {sentence}")
        return entry
    return decorate


def typed(arguments: list[str]) -> dict[str, str]:
    """Reads the settings of a command line as text, by key; of a key that comes twice the last one counts."""
    pairs = (argument.lstrip("+~").partition("=") for argument in arguments if not argument.startswith("-"))
    return {key.partition("@")[0]: value for key, _, value in pairs}


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


def compose(config_name: str) -> list[dict]:
    """Composes a config with the command line, as plain values; none for --help and --cfg, several for --multirun."""
    import hydra

    if reruns := [argument for argument in sys.argv[1:] if argument.startswith("--e")]:  # --experimental-rerun
        raise ValueError(f"{reruns[0]} would load a pickle, which could run code: give the settings instead.")
    composed: list = []
    try:
        with mock.patch.dict(os.environ, HYDRA_FULL_ERROR="1"):  # Hydra then raises its errors and prints none
            hydra.main(config_path=str(CONFIGS), config_name=config_name, version_base="1.3")(composed.append)()
    except TypeError:  # of Hydra, for a group with a list of dicts
        raise ValueError("A setting that takes a name of configs/ was given a list: write routes=balanced, say, and "
                         "'model.routes=[…]' for routes of your own.") from None
    return [OmegaConf.to_container(cfg, resolve=True) for cfg in composed]


def mistake(error: Exception, config_name: str, plain: dict) -> str | None:
    """Returns a sentence for what a user can mend, settings, files or memory, and None for our own mistakes."""
    from hydra.errors import HydraException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, OverrideParseException):
        return (f"{error.override} cannot be read: write key=value, and a value with other characters than letters, "
                f"digits and _-+./:%*?@$| in two kinds of quotes, as \"name='größe (1)'\".")
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
    """Tells whether memory ran out: Python's, numpy's, a GPU's, or torch's on a CPU."""
    text = r"can't allocate memory|out of memory|CU[A-Z]+_\w*ALLOC\w*_FAILED"
    return isinstance(error, MemoryError) or isinstance(error, RuntimeError) and bool(re.search(text, str(error)))
