"""Plain values -> checked ones, or a sentence: the types and ranges of settings and records.

A command declares its settings once, as a subclass of `Settings`; configs/*.yaml hold their defaults and their meaning.
Records that are read back (metadata.json, meta.json, rows of results.jsonl) are declared likewise.
"""

import difflib
import json
import logging
import math
import re
import typing
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from omegaconf import OmegaConf
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
)

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
OmegaConf.register_new_resolver("configs", lambda: str(CONFIGS), replace=True)  # in a YAML: ${configs:}

# Two messages of diffusers about other libraries' versions, at each load of an autoencoder. Other warnings stay.
logging.getLogger("diffusers.quantizers.torchao.torchao_quantizer").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message="The `local_dir_use_symlinks` argument is deprecated")


class Settings(BaseModel):
    """Settings or a record whose keys, types and ranges are declared; it cannot be changed."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())
    _typed: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def typed(self) -> dict[str, str]:
        """What the command line gives, by key, as text; what a preset or a file of settings gives is not in it."""
        return self._typed

    def refuse(self, *names: str, why: str) -> None:
        """Raises ValueError, ending in `why`, where the command line gives any of these settings or groups.

        It is for those that nothing would read. The values null and none pass.
        """
        given = [f"{key}={value}" for key, value in self.typed.items() if value not in ("null", "none")
                 and any(f"{key}.".startswith(f"{name}.") for name in names)]
        if given:
            raise ValueError(f"{' '.join(given)} would change nothing: {why}.")


class Record(Settings):
    """What a file of ours must hold; further keys, which another version wrote, are ignored."""

    model_config = ConfigDict(extra="ignore")


def _square(tokens: int) -> int:
    if math.isqrt(tokens) ** 2 != tokens:
        raise ValueError(f"{tokens} tokens are not a square: take 64, 256 or 1024, for instance.")
    return tokens


Whole = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=1, le=2**16)]  # of one side of an array: more is a slip, and fills the memory
Tokens = Annotated[Size, AfterValidator(_square)]
Classes = Annotated[int, Field(ge=1, le=1_000_000)]
Steps = Annotated[int, Field(ge=1, le=10_000)]  # of a sampler
Number = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# A folder named by digits is a number to Hydra.
Text = Annotated[str, Field(min_length=1), BeforeValidator(lambda value: str(value) if type(value) is int else value)]
Location = Text
# 7, 0-63, [1,5,9], names: read by the functions that know what there is to choose from.
Selection = int | str | list[int | str]


def one_of(choices: typing.Iterable) -> Any:
    """Declares that a value is one of `choices`."""
    return Literal[tuple(choices)]


def as_text(value: object) -> str:
    """Writes a value as a command line does."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def first_line(error: Exception) -> str:
    """Returns the first line of a library's error, or the error's name where it has no text.

    Of a refused pickle it says what torch or numpy found, without their advice to load it in spite of that.
    """
    text = str(error)
    if "weights_only" in text or "allow_pickle" in text:
        found = re.search(r"GLOBAL ([\w.]+)", text)
        return (f"it holds pickled Python objects ({found[1]}), which can run code and are never loaded" if found else
                "it is damaged, or holds pickled Python objects, which can run code and are never loaded")
    return (str(error).strip() or type(error).__name__).splitlines()[0]


Declared = TypeVar("Declared", bound=Settings)


def read(declared: type[Declared], plain: dict, where: str = "") -> Declared:
    """Checks plain values; raises ValueError with `where`, the key, its value and what pydantic says of it."""
    try:
        return declared.model_validate(plain)
    except ValidationError as error:
        raise ValueError(where + first_problem(plain, error.errors())) from None


def value_at(plain: Any, place: tuple) -> tuple[str, Any]:
    """Follows one of pydantic's places, which also names the choices of a union; returns key and value there."""
    key = []
    for part in place:
        if part in plain if isinstance(plain, dict) else isinstance(plain, list | tuple) and part in range(len(plain)):
            key, plain = [*key, str(part)], plain[part]
    return ".".join(key), plain


def first_problem(plain: Any, errors: list) -> str:
    """Writes pydantic's words for the first key that is wrong, after the key and the value that was given."""
    first, kind = errors[0], errors[0]["type"]
    key, value = value_at(plain, first["loc"])
    if kind == "value_error":  # of a validator of ours, which says it all
        return str(first["ctx"]["error"])
    if kind == "missing":
        return f"{'.'.join(filter(None, [key, str(first['loc'][-1])]))} is missing."
    if kind == "extra_forbidden":
        _, siblings = value_at(plain, first["loc"][:-1])
        others = [str(other) for other in siblings if other != first["loc"][-1]]
        near = difflib.get_close_matches(str(first["loc"][-1]), others, n=1)
        known = f"did you mean {near[0]}?" if near else f"there are {', '.join(others)}."
        return f"There is no setting {key}: {known}"
    problems = dict.fromkeys(error["msg"] for error in errors if value_at(plain, error["loc"])[0] == key)
    problems = "; or ".join(problems).replace("Input should", "it should").replace("String should", "it should")
    return f"{key or 'The settings'}={as_text(value)}: {problems}."


def read_json(file: Path) -> Any:
    """Reads a JSON file; raises ValueError, with its name, where it is not JSON."""
    try:
        return json.loads(file.read_bytes())  # in UTF-8 or UTF-16, with a byte-order mark or without
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error})") from None


def read_record(declared: type[Declared], file: Path, remedy: str) -> Declared:
    """Reads a JSON file of ours; raises ValueError, ending in `remedy`, where it is not JSON or lacks something."""
    try:
        return read(declared, read_json(file), f"{file}: ")
    except ValueError as error:
        raise ValueError(f"{error} {remedy}") from None
