"""Plain values -> checked ones, or a sentence: the types and ranges of settings and records.

A command declares the types of its settings in a subclass of `Settings`; configs/*.yaml have defaults and comments.
Records that are read back (metadata.json, meta.json, rows of results.jsonl) are declared the same way.
"""

import contextlib
import difflib
import hashlib
import json
import logging
import math
import os.path
import re
import shlex
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from omegaconf import OmegaConf
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
)

from runtime.files import MOST_BYTES, parse_json, refuse_pointer

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
OmegaConf.register_new_resolver("configs", lambda: str(CONFIGS), replace=True)  # in a YAML: ${configs:}

# Hides two messages of diffusers about versions of libraries, at each load of an autoencoder, and no other warning.
logging.getLogger("diffusers.quantizers.torchao.torchao_quantizer").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message="The `local_dir_use_symlinks` argument is deprecated")


class Settings(BaseModel):
    """Settings or a record whose keys, types and ranges are declared; immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


class Record(Settings):
    """What a file of ours must hold; further keys are ignored."""

    model_config = ConfigDict(extra="ignore")


def _square(tokens: int) -> int:
    if math.isqrt(tokens) ** 2 != tokens:
        raise ValueError(f"{tokens} tokens are not a square: use 64, 256 or 1024, for instance.")
    return tokens


Item = TypeVar("Item")
NonEmptyList = Annotated[list[Item], Field(min_length=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=1, le=2**16)]  # of one side of an array: more is a typo, and would fill memory
Tokens = Annotated[Size, AfterValidator(_square)]
Classes = Annotated[int, Field(ge=1, le=1_000_000)]
Steps = Annotated[int, Field(ge=1, le=10_000)]  # of a sampler
Number = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
# A path of a file or folder. Shells do not expand a ~ after =, so this does.
Location = Annotated[Text, AfterValidator(os.path.expanduser)]
# 7, 0-63, [1,5,9] or names. Functions that know the choices parse it.
Selection = int | str | NonEmptyList[int | str]


def one_of(choices: typing.Iterable) -> Any:
    """Declares that a value is one of `choices`."""
    return Literal[tuple(choices)]


class ConventionRecord(Record):
    """The keywords of autoencoder.Convention in a record."""

    scale: Positive = 1.0
    shift: Number = 0.0
    latents_mean: list[Number] | None = None
    latents_std: list[Number] | None = None
    pixels: Annotated[list[Number], Field(min_length=2, max_length=2)] | None = None


def as_path(text: str) -> Path:
    """Reads a path of a command line, as `Location` does."""
    return Path(text).expanduser()


def as_text(value: object) -> str:
    """Writes a value as a command line does."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def in_quotes(text: str, interpolate: bool = False) -> str:
    """Quotes text for Hydra, where a backslash counts only before a quote, and ${ begins an interpolation."""
    text = text if interpolate else text.replace("${", "\\${")
    text = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text)
    return f"'{text}'"


def as_setting(key: str, value: object) -> str:
    """Writes a setting for Hydra, with quotes if its grammar would read anything but the text."""
    text = str(value)
    plain = re.fullmatch(r"[A-Za-z_/.][\w/.+-]*", text, re.ASCII) and not re.fullmatch(r"\.[\d_]+(e.*)?", text, re.I)
    return f"{key}={text if plain and text.lower() not in RESERVED else in_quotes(text)}"


RESERVED = ("null", "true", "false", "nan", "inf")  # words of Hydra's grammar


def quote_for_bash(argument: str) -> str:
    """Quotes an argument for bash, in double quotes where that is easier to read."""
    return f'"{argument}"' if "'" in argument and not re.search(r'["$`\\!]', argument) else shlex.quote(argument)


def as_argument(key: str, value: object) -> str:
    """Writes a setting so that it can be pasted into bash: runs/x as it is, with spaces "checkpoint='runs/a b'"."""
    return quote_for_bash(as_setting(key, value))


def first_line(error: Exception) -> str:
    """Returns the first line of a library's error, or the error's name where it has no text.

    For a refused pickle it returns what torch or numpy found, without their advice to load it anyway.
    """
    text = str(error)
    if "weights_only" in text or "allow_pickle" in text:
        found = re.search(r"GLOBAL ([\w.]+)", text)
        return (f"it holds pickled Python objects ({found[1]}), which can run code and are never loaded" if found else
                "it is damaged, or holds pickled Python objects, which can run code and are never loaded")
    lines = (text.strip() or type(error).__name__).splitlines()
    more = lines[1].strip() if lines[0].endswith(":") and len(lines) > 1 else ""  # torch's list of missing tensors
    return f"{lines[0]} {more[:200]}".strip()


def refuse(cli_overrides: Mapping[str, str], *names: str, why: str) -> None:
    """Raises ValueError, ending in `why`, if any of these settings or groups was typed, as nothing would read them.

    The values null and none are accepted.
    """
    given = [f"{key}={value}" for key, value in cli_overrides.items() if value not in ("null", "none")
             and any(f"{key}.".startswith(f"{name}.") for name in names)]
    if given:
        raise ValueError(f"{' '.join(given)} would change nothing: {why}.")


Declared = TypeVar("Declared", bound=Settings)


def read(declared: type[Declared], plain: dict, where: str = "") -> Declared:
    """Checks plain values; raises ValueError with `where`, the key, its value and pydantic's message."""
    try:
        return declared.model_validate(plain)
    except ValidationError as error:
        raise ValueError(where + first_problem(declared, plain, error.errors())) from None


def nearest(key: str, known: Sequence[str]) -> str | None:
    """Guesses the intended key: one spelled alike, one of that name elsewhere, or an abbreviation or its meaning."""
    def initials(name: str) -> str:
        return "".join(word[:1] for word in name.split("_"))

    parent, _, leaf = key.rpartition(".")
    known = [other for other in known if not key.startswith(f"{other}.")]  # without the groups of the key
    known.sort(key=lambda other: other.rpartition(".")[0] != parent)  # those beside it first
    names = {other.rpartition(".")[2]: other for other in reversed(known)}  # the first of several
    beside = [name for name, other in names.items() if parent in ("", other.rpartition(".")[0])]
    short = [name for name in names if "_" in leaf + name and (leaf == initials(name) or name == initials(leaf))]
    meant = [*difflib.get_close_matches(key, known, n=1, cutoff=0.85),
             *(names[name] for name in (leaf, *short) if name in names),
             *(names[name] for name in difflib.get_close_matches(leaf, beside, n=1, cutoff=0.7))]
    return meant[0] if meant else None


def unknown(key: str, known: Sequence[str], remedy: str) -> str:
    """Writes that a setting does not exist, and suggests one of the `known`, or else the remedy."""
    near = nearest(key, known)
    return f"There is no setting {key}: {f'did you mean {near}?' if near else remedy}"


def leaves(plain: dict, prefix: str = "") -> dict[str, Any]:
    """Flattens nested settings to values by dotted key."""
    found = {}
    for name, value in plain.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def name_of_changes(given: dict, usual: dict) -> str:
    """Names what differs from the usual settings, for a file's name: `-scale1.5-seeds0-7`; long values are hashed."""
    usual, parts = leaves(usual), []
    for key, value in leaves(given).items():
        if value != usual.get(key):
            text = re.sub(r"[^\w.+-]+", "+", as_text(value)).strip("+")
            digest = hashlib.sha256(as_text(value).encode()).hexdigest()[:8]
            parts.append(f"-{key.rpartition('.')[2]}{text if len(text) <= 24 else digest}")
    name = "".join(parts)
    return name if len(name) <= 150 else f"-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def value_at(plain: Any, place: tuple) -> tuple[str, Any]:
    """Follows the location of a pydantic error through plain values; returns its dotted key and value.

    Parts of the location that are not in the values, such as the name of a union's choice, are left out.
    """
    key = []
    for part in place:
        known = plain if isinstance(plain, dict) else range(len(plain)) if isinstance(plain, list | tuple) else ()
        if part in known:
            key, plain = [*key, str(part)], plain[part]
    return ".".join(key), plain


def declared_keys(declared: type[BaseModel], prefix: str = "") -> list[str]:
    """Lists the dotted keys of declared settings, those of nested ones too."""
    found = []
    for name, field in declared.model_fields.items():
        found.append(f"{prefix}{name}")
        for group in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(group, type) and issubclass(group, BaseModel):
                found += declared_keys(group, f"{prefix}{name}.")
    return found


def first_problem(declared: type[BaseModel], plain: Any, errors: list) -> str:
    """Writes the first key that is wrong, its value, and pydantic's message."""
    def key_of(error: Mapping) -> str:
        return value_at(plain, error["loc"])[0]

    # Where the type may be a list, this is the item that is wrong.
    alike = [error for error in errors if f"{key_of(error)}.".startswith(f"{key_of(errors[0])}.")]
    first = max(alike, key=lambda error: key_of(error).count("."))
    key, value = value_at(plain, first["loc"])
    kind = first["type"]
    if kind == "value_error":  # from a validator of ours, with a complete sentence
        return str(first["ctx"]["error"])
    if kind == "missing":
        return f"{'.'.join(filter(None, [key, str(first['loc'][-1])]))} is missing."
    if kind == "extra_forbidden":
        _, siblings = value_at(plain, first["loc"][:-1])
        declared_here = declared_keys(declared)
        group = re.sub(r"\.\d+", "", key.rpartition(".")[0])  # without the places in lists
        others = [str(other) for other in siblings if other != first["loc"][-1]]
        others += [each.rpartition(".")[2] for each in declared_here if each.rpartition(".")[0] == group]
        known = [other for other in [*plain, *leaves(plain), *declared_here]
                 if other != key and not other.startswith(f"{key}.")]
        return unknown(key, known, f"there are {', '.join(dict.fromkeys(others))}.")
    problems = dict.fromkeys(error["msg"] for error in errors if key_of(error) == key)
    problems = "; or ".join(problems).replace("Input should", "it should").replace("String should", "it should")
    text = as_text(value)
    hint = " Text needs quotes." if isinstance(value, bool | int | float) and "valid string" in problems else ""
    return f"{key or 'The settings'}={text if len(text) < 1000 else text[:1000] + ' …'}: {problems}.{hint}"


def read_json(file: Path) -> dict:
    """Reads a JSON file that holds one object; raises ValueError, with its name, for anything else."""
    refuse_pointer(file)
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        content = parse_json(file.read_bytes())  # with or without a byte-order mark
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object, which is written in braces")
    return content


@contextlib.contextmanager
def as_recorded(file: Path) -> Iterator[None]:
    """Turns an error of the block, due to a record of another form, into a ValueError that names the file."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        if "memory" in str(error).lower():
            raise
        raise ValueError(f"{file} is not as this code writes it ({type(error).__name__}: {first_line(error)}): choose "
                         f"another, or move it away.") from error


def read_record(declared: type[Declared], file: Path, remedy: str, content: Any = None) -> Declared:
    """Checks a JSON file of ours, or its `content` if that has been read.

    Raises ValueError, ending in `remedy`, where it is not JSON or lacks something.
    """
    try:
        return read(declared, read_json(file) if content is None else content, f"{file}: ")
    except ValueError as error:
        raise ValueError(f"{error} {remedy}") from None
