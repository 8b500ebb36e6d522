"""The frame of a command: its config is composed and checked, and a mistake ends it in a sentence."""

import errno
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf

from runtime import ranks
from runtime.schema import CONFIGS, Settings, as_text, first_line, look_up, read, shorten

ADDING = ("objective",)      # groups of configs/ in which several names add up
RERUN = "--experimental-rerun"      # Hydra's


def command(config_name: str, declared: type[Settings]) -> Callable[[Callable], Callable[[], None]]:
    """Makes a command of `main(cfg)`: reads configs/<config_name>.yaml and the command line, and checks them.

    A mistake, a file that cannot be read or written, and Ctrl-C end it in a sentence, or with HYDRA_FULL_ERROR=1 in
    the environment in a traceback.
    """
    def decorate(main: Callable[[Any], None]) -> Callable[[], None]:
        @functools.wraps(main)
        def entry() -> None:
            if hasattr(sys.stdout, "reconfigure"):
                sys.stdout.reconfigure(line_buffering=True)      # a redirected log has each line at once
            program, wants_traceback = Path(sys.argv[0]).name, "HYDRA_FULL_ERROR" in os.environ
            plain: dict = {}
            try:
                for plain in compose(config_name):
                    main(read(declared, plain))
                ranks.leave_group()
            except KeyboardInterrupt:
                print(f"\n{program}: stopped by Ctrl-C.", file=sys.stderr)
                sys.exit(130)
            except SystemExit as stop:
                if isinstance(stop.code, str):
                    end(stop.code, stop)
                ranks.leave_group()
                raise
            except Exception as error:
                sentence = mistake(error, config_name, plain)
                if sentence is None or wants_traceback:
                    ranks.wait_for_root_cause(error)
                    ranks.record_for_launcher(error)
                    raise
                end(shorten(f"{program}: {sentence}", 2000), error)      # a value in it may have any length
        return entry
    return decorate


@functools.cache      # of the code that this process has loaded, whatever is committed later
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
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for argument in sys.argv[1:]:
        if not argument.startswith("-"):
            parse(OverridesParser.create(), argument)
        elif len(argument) > 2 and RERUN.startswith(argument.partition("=")[0]):      # as argparse shortens it
            raise ValueError(f"{argument} would load a pickle, which could run code: give the settings instead.")
    composed: list = []
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"      # Hydra then hands its errors on instead of printing them
    try:
        hydra.main(config_path=str(CONFIGS), config_name=config_name, version_base="1.3")(composed.append)()
    except ValueError as error:      # of Hydra, as for a group that is null
        raise ValueError(f"{first_line(error).rstrip('.!')}: configs/{config_name}.yaml names all settings.") from error
    except TypeError:      # of Hydra, for a list of groups
        raise ValueError("A setting that takes a name of configs/ was given a list: write routes=balanced, say, and "
                         "'model.routes=[…]' for routes of your own.") from None
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
    return [OmegaConf.to_container(cfg, resolve=True) for cfg in composed]


def mistake(error: Exception, config_name: str, plain: dict) -> str | None:
    """Returns a sentence for what a user can mend, settings, files or memory, and None for our own mistakes."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, HydraException | OmegaConfBaseException):
        return f"{first_line(error).rstrip('.')}: configs/{config_name}.yaml names all settings."
    if is_full_memory(error):
        return full_memory(error, plain)
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"reading or writing {str(error.filename)[:300]} failed: {error.strerror}."
    if isinstance(error, ValueError | OSError):
        return str(error)
    return None


def parse(parser: Any, argument: str) -> None:
    """Raises ValueError, with the quoting that works, for an argument that Hydra does not take as one value."""
    from hydra.errors import HydraException

    key, _, value = argument.partition("=")
    try:
        override = parser.parse_override(argument)
        if override.is_sweep_override() and not {"-m", "--multirun"} & {*sys.argv}:
            raise ValueError(f"{argument} gives several values: write '{key}=[{value}]' for a list, or "
                             f"\"{key}='{value}'\" for one text.")
        is_group = any((CONFIGS / place / override.key_or_group).is_dir() for place in ("", "presets"))
        is_group = is_group and override.key_or_group not in ADDING
        if is_group and value.startswith("[") and "{" not in value and len(names := override.value()) > 1:
            raise ValueError(f"{argument} gives several names and only the last would count: write {key}={names[-1]}.")
    except HydraException:
        if "=" not in argument or not re.fullmatch(r"[\w.+~@/-]+", key, re.ASCII):
            raise ValueError(f"{argument} is not a setting: write key=value, as in steps=100.") from None
        is_list = value.startswith("[")
        parts = [part.strip(" '\"") for part in (value.strip("[]").split(",") if is_list else [value])]
        quoted = ",".join("'" + part.replace("'", "\\'") + "'" for part in parts)
        raise ValueError(f"{argument} cannot be read. A value with characters other than a to z, digits, spaces and "
                         f"_-+./:%*?@$| needs quotes, and the whole needs quotes of another kind: "
                         f'"{key}={f"[{quoted}]" if is_list else quoted}".') from None


def end(sentence: str, error: BaseException) -> NoReturn:
    """Ends this process with a sentence, which of several ranks the first one prints."""
    ranks.wait_for_root_cause(error)
    sys.exit(sentence)


# ---- full memory ----------------------------------------------------------------------------------------------------

# The settings that help, whichever command has them.
HELP = {
    "batch_size": "a lower batch_size", "grad_accum_steps": "a higher grad_accum_steps",
    "activation_checkpointing": "activation_checkpointing=true", "sharding": "sharding=fsdp",
    "data.on_device": "data.on_device=false", "precision": "precision=bf16",
    "samples.batch_size": "a lower samples.batch_size", "evaluate.batch_size": "a lower evaluate.batch_size",
    "decode_batch_size": "decode_batch_size=1", "decode_precision": "decode_precision=bf16",
    "num_workers": "a lower num_workers", "shard_size": "a lower shard_size",
}
FULL = re.compile("can't allocate memory|out of memory|(CUBLAS|CUDNN|CUSOLVER|CUFFT|CUSPARSE)_\\w*ALLOC\\w*_FAILED",
                  re.IGNORECASE)


def is_full_memory(error: Exception) -> bool:
    """Tells whether memory ran out: Python's, numpy's, the system's, a GPU's, or torch's on a CPU."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    names = {kind.__name__ for kind in type(error).__mro__}
    return (not names.isdisjoint({"MemoryError", "OutOfMemoryError"})
            or (isinstance(error, RuntimeError) and FULL.search(str(error)) is not None))


def full_memory(error: Exception, plain: dict) -> str:
    """Returns the library's words and the settings of the command that would help."""
    helpful = [how for key, how in HELP.items()
               if (now := look_up(plain, key)) is not ... and how != f"{key}={as_text(now)}"]
    advice = ", ".join(helpful) or "less at once"
    return f"Memory is full{ranks.rank_suffix()}: {first_line(error)} What helps: {advice}."
