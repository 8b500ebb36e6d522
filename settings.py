"""Plain values -> checked ones, or a sentence: types and ranges of settings and records, and the frame of a command.

A command declares its settings once, as a subclass of `Settings`; configs/*.yaml hold their defaults and their meaning.
Records that are read back (metadata.json, meta.json, rows of results.jsonl) are declared likewise.
"""

import functools
import json
import logging
import os
import re
import sys
import time
import types
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

CONFIGS = Path(__file__).resolve().parent / "configs"

# Greetings of libraries that are no user's business, each by itself: any other warning is still heard.
# diffusers looks for tensors of torchao that its newer versions have moved; no quantized autoencoder is read here.
logging.getLogger("diffusers.quantizers.torchao.torchao_quantizer").setLevel(logging.ERROR)
# diffusers hands huggingface_hub an argument that it no longer takes.
warnings.filterwarnings("ignore", message="The `local_dir_use_symlinks` argument is deprecated")


class Settings(BaseModel):
    """Settings or a record whose keys, types and ranges are declared; it is never changed once it is read."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


class Record(Settings):
    """What a file of ours must hold; keys that a newer or an older version wrote beside it are let be."""

    model_config = ConfigDict(extra="ignore")


class Says(str):
    """The words for a type whose declaration does not say them by itself."""


Whole = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Hydra reads a folder that is named by digits as a number.
Text = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value), Field(min_length=1)]
Location = Annotated[Text, Says("a path")]
# 7, 0-63, [1,5,9], names: read by the functions that know what there is to choose from.
Selection = Annotated[int | str | list[int | str], Says("a number, a range as in 0-63, a name, or a list of them")]


def one_of(choices: typing.Iterable) -> Any:
    """Declares that a value is one of `choices`."""
    return Literal[tuple(choices)]


def phrase(annotation: Any, metadata: typing.Iterable = ()) -> str:
    """Says in words what values a declared type allows."""
    if typing.get_origin(annotation) is Annotated:
        annotation, *inner = typing.get_args(annotation)
        unpacked = [part for item in inner for part in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return phrase(annotation, [*unpacked, *metadata])
    metadata, origin, args = list(metadata), typing.get_origin(annotation), typing.get_args(annotation)
    for said in metadata:
        if isinstance(said, Says):
            return said
    if origin in (typing.Union, types.UnionType):
        choices = [arg for part in args if typing.get_origin(part) is Literal for arg in typing.get_args(part)]
        if choices and bool in args:
            choices = [True, False, *choices]
        words = ["one of " + ", ".join(map(shown, choices))] if choices else []
        said = {bool} if choices else set()
        words += [phrase(part) for part in args
                  if typing.get_origin(part) is not Literal and part not in said | {type(None)}]
        words += ["null"] * (type(None) in args)
        return ", ".join(words[:-1]) + " or " + words[-1] if len(words) > 1 else words[0]
    if origin is Literal:
        return "one of " + ", ".join(map(shown, args))
    if origin is list:
        return f"a list of {plural(args[0])}" if isinstance(args[0], type) else f"a list, each {phrase(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)}: {', '.join(map(phrase, args))}"
    limits = ("ge", "gt", "le", "lt")
    bounds = {limit: getattr(part, limit) for part in metadata for limit in limits if hasattr(part, limit)}
    if annotation is int:
        low = bounds.get("ge")
        return "a whole number" if low is None else f"a whole number of at least {low}"
    if annotation is float:
        low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
        if low is None and high is None:
            return "a finite number"
        if high is None:
            return f"a finite number above {low}" if "gt" in bounds else f"a finite number of at least {low}"
        return f"a number in {'(' if 'gt' in bounds else '['}{low}, {high}{')' if 'lt' in bounds else ']'}"
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return f"a group of {', '.join(annotation.model_fields)}"
    return {bool: "true or false", str: "a text", dict: "a group"}.get(annotation, str(annotation))


def plural(kind: type) -> str:
    return {int: "whole numbers", float: "numbers", str: "texts"}.get(kind, "groups")


def shown(value: object) -> str:
    """Writes a value as a command line does."""
    if isinstance(value, str):
        return value
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 200 else text[:199] + "…"


Declared = TypeVar("Declared", bound=Settings)


def read(declared: type[Declared], plain: dict, where: str = "") -> Declared:
    """Checks plain values; raises ValueError with key, value and what is allowed, `where` ahead of it."""
    if not isinstance(plain, dict):
        raise ValueError(f"{where}{shown(plain)} is not {phrase(declared)}.")
    try:
        return declared.model_validate(plain)
    except ValidationError as error:
        raise ValueError(where + sentence(declared, plain, error.errors()[0])) from None


def sentence(declared: type[Settings], plain: Any, error: Any) -> str:
    """Turns the first of pydantic's complaints into a sentence about the setting that a user knows."""
    group, field, key = declared, None, []
    for part in error["loc"]:
        if isinstance(part, int) and isinstance(plain, list) and group is not None and part < len(plain):
            plain, key = plain[part], [*key, str(part)]
            continue
        if group is None or part not in group.model_fields:
            break
        field, key = group.model_fields[part], [*key, part]
        if not isinstance(plain, dict) or part not in plain:
            return f"{'.'.join(key)} is missing; it must be {phrase(field.annotation, field.metadata)}."
        plain = plain[part]
        group = group_in(field.annotation)
    name = ".".join(key)
    if error["type"] == "extra_forbidden":
        known = ", ".join(group.model_fields)
        return f"There is no setting {'.'.join([*key, str(error['loc'][-1])])}: {name or 'this'} has {known}."
    if error["type"] == "value_error":      # of a validator of ours, which says it all
        return str(error["ctx"]["error"])
    is_item = field is None or (group is not None and key[-1].isdigit())
    allowed = phrase(group) if is_item else phrase(field.annotation, field.metadata)
    return f"{name}={'null' if plain is None else shown(plain)} is not {allowed}."


def group_in(annotation: Any) -> type[Settings] | None:
    """Finds the group of settings that a type holds, itself or as items of a list."""
    for part in (annotation, *typing.get_args(annotation)):
        if isinstance(part, type) and issubclass(part, Settings):
            return part
        if typing.get_args(part) and part is not annotation and (inner := group_in(part)):
            return inner
    return None


def read_record(declared: type[Declared], file: Path, remedy: str) -> Declared:
    """Reads a JSON file of ours; raises ValueError, ending in `remedy`, where it is none or lacks something."""
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}): {remedy}") from None
    try:
        return read(declared, plain)
    except ValueError as error:
        raise ValueError(f"{file}: {error} {remedy}") from None


# ---- the frame of a command -----------------------------------------------------------------------------------------


def command(config_name: str, declared: type[Settings]) -> Callable[[Callable], Callable[[], None]]:
    """Makes a command of `main(cfg)`: reads configs/<config_name>.yaml and the command line, and checks them.

    A mistake, a file that cannot be read or written, and Ctrl-C end it in a sentence; with HYDRA_FULL_ERROR=1 in the
    environment, in the traceback behind it.
    """
    def decorate(main: Callable[[Any], None]) -> Callable[[], None]:
        @functools.wraps(main)
        def entry() -> None:
            import hydra
            from hydra.core.override_parser.overrides_parser import OverridesParser
            from hydra.errors import HydraException
            from omegaconf import OmegaConf
            from omegaconf.errors import OmegaConfBaseException

            composed: list = []      # left empty by --help and --cfg
            program, wants_traceback = Path(sys.argv[0]).name, "HYDRA_FULL_ERROR" in os.environ
            os.environ["HYDRA_FULL_ERROR"] = "1"      # Hydra then hands its errors on instead of printing them
            try:
                for argument in sys.argv[1:]:
                    if not argument.startswith("-"):
                        parse(OverridesParser.create(), argument)
                hydra.main(config_path=str(CONFIGS), config_name=config_name, version_base="1.3")(composed.append)()
                for cfg in composed:
                    main(read(declared, OmegaConf.to_container(cfg, resolve=True)))
            except KeyboardInterrupt:
                print(f"\n{program}: stopped by Ctrl-C.", file=sys.stderr)
                sys.exit(130)
            except (HydraException, OmegaConfBaseException) as error:
                if wants_traceback:
                    raise
                complaint = str(error).splitlines()[0].rstrip(".")
                end(f"{program}: {complaint}: " + (
                    """write key=[a,b] for a list, and "key='a,b'" for a text.""" if complaint.startswith("Ambiguous")
                    else f"configs/{config_name}.yaml names all settings."))
            except (ValueError, OSError) as error:
                if wants_traceback:
                    raise
                failed = isinstance(error, OSError) and error.strerror and error.filename
                end(f"{program}: " + (f"reading or writing {error.filename} failed: {error.strerror}." if failed
                                      else str(error)))
            finally:
                leave_the_ranks()
        return entry
    return decorate


def parse(parser: Any, argument: str) -> None:
    """Raises ValueError, with the quoting that works, for an argument that Hydra's grammar does not take."""
    from hydra.errors import HydraException

    try:
        parser.parse_override(argument)
    except HydraException:
        key, _, value = argument.partition("=")
        if "=" not in argument or not re.fullmatch(r"[\w.+~@/-]+", key, re.ASCII):
            raise ValueError(f"{argument} is no setting: write key=value, as in steps=100.") from None
        is_list = value.startswith("[")
        parts = [part.strip(" '\"") for part in (value.strip("[]").split(",") if is_list else [value])]
        quoted = ",".join("'" + part.replace("'", "\\'") + "'" for part in parts)
        raise ValueError(f"{argument} cannot be read. A value may hold a to z, digits, spaces and _-+./:%*?@$| as "
                         f"they are; with anything else it stands in quotes, and the whole in another kind: "
                         f'"{key}={f"[{quoted}]" if is_list else quoted}".') from None


def end(sentence: str) -> NoReturn:
    """Ends this process with a sentence; it is said once where every rank has the same one."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(5)      # the first rank says it in this time, and the launcher then ends the others
    sys.exit(sentence)


def leave_the_ranks() -> None:
    """Ends the process group where this process is one of several."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
