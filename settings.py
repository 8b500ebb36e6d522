"""Plain values -> checked ones, or a sentence: types and ranges of settings and records, and the frame of a command.

A command declares its settings once, as a subclass of `Settings`; configs/*.yaml hold their defaults and their meaning.
Records that are read back (metadata.json, meta.json, rows of results.jsonl) are declared likewise.
"""

import contextlib
import errno
import functools
import json
import logging
import math
import os
import re
import stat
import subprocess
import sys
import types
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from omegaconf import OmegaConf
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

import ranks

ADDING = ("objective",)      # groups of configs/ in which several names add up
RERUN = "--experimental-rerun"      # Hydra's
LONGEST_RECORD = 2**26      # bytes of a file that is read whole, as meta.json: more is none of ours
CONFIGS = Path(__file__).resolve().parent / "configs"
OmegaConf.register_new_resolver("configs", lambda: str(CONFIGS), replace=True)     # in a YAML: ${configs:}

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


def _square(tokens: int) -> int:
    if math.isqrt(tokens) ** 2 != tokens:
        raise ValueError(f"{tokens} tokens make no square: take 64, 256 or 1024, for instance.")
    return tokens


Whole = Annotated[int, Field(ge=0, le=2**62)]      # so that sums of two still fit into 64 bits
Count = Annotated[int, Field(ge=1, le=2**62)]
Size = Annotated[int, Field(ge=1, le=2**16)]      # of one side of an array: more is a slip, and fills the memory
Depth = Annotated[int, Field(ge=1, le=1000)]      # blocks
Tokens = Annotated[Size, AfterValidator(_square)]
Classes = Annotated[int, Field(ge=1, le=1_000_000)]
Steps = Annotated[int, Field(ge=1, le=10_000)]      # of a sampler
Number = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def as_text(value: Any) -> Any:
    """Takes a number for the text that it was, as Hydra reads a folder named by digits; drops what no name may hold."""
    text = str(value) if type(value) is int else value
    with contextlib.suppress(UnicodeEncodeError, TypeError):      # half of a pair of UTF-16, or no text
        return text if b"\0" not in os.fsencode(text) else None
    return None


Text = Annotated[str, BeforeValidator(as_text), Field(min_length=1)]
Location = Annotated[Text, Says("a path")]
# 7, 0-63, [1,5,9], names: read by the functions that know what there is to choose from.
Selection = Annotated[int | str | list[int | str], Says("a number, a range as in 0-63, a name, or a list of them")]


def one_of(choices: typing.Iterable) -> Any:
    """Declares that a value is one of `choices`."""
    return Literal[tuple(choices)]


def phrase(annotation: Any, metadata: typing.Iterable = ()) -> str:
    """Says in words what values a declared type allows; `metadata` holds its bounds."""
    metadata, origin, parts = list(metadata), typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        for item in parts[1:]:
            metadata += item.metadata if isinstance(item, FieldInfo) else [item]
        return phrase(parts[0], metadata)
    words = [said for said in metadata if isinstance(said, Says)]
    if words:
        return words[0]
    if origin in (typing.Union, types.UnionType):
        return phrase_of_union(parts)
    if origin is Literal:
        return "one of " + ", ".join(map(shown, parts))
    if origin is list:
        return f"a list of {plural(parts[0])}" if isinstance(parts[0], type) else f"a list, each {phrase(parts[0])}"
    if origin is tuple:
        return f"a list of {len(parts)}: {', '.join(map(phrase, parts))}"
    if annotation in (int, float):
        return phrase_of_number(annotation, metadata)
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return f"a group of {', '.join(annotation.model_fields)}"
    return {bool: "true or false", str: "a text", dict: "a group"}.get(annotation, str(annotation))


def phrase_of_union(parts: tuple) -> str:
    """Says what any of several types allows: choices first, null last."""
    choices = [choice for part in parts if typing.get_origin(part) is Literal for choice in typing.get_args(part)]
    others = [part for part in parts if typing.get_origin(part) is not Literal and part is not type(None)]
    if choices and bool in others:
        choices = [True, False, *choices]
        others.remove(bool)
    words = ["one of " + ", ".join(map(shown, choices))] if choices else []
    words += map(phrase, others)
    words += ["null"] if type(None) in parts else []
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def phrase_of_number(kind: type, metadata: list) -> str:
    """Says what numbers lie within the bounds that a type's metadata holds."""
    limits = ("ge", "gt", "le", "lt")
    bounds = {limit: getattr(part, limit) for part in metadata for limit in limits if hasattr(part, limit)}
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if kind is int:
        return "a whole number" if low is None else f"a whole number of at least {low}"
    if low is None:
        return "a finite number"
    if high is None:
        return f"a finite number above {low}" if "gt" in bounds else f"a finite number of at least {low}"
    return f"a number in {'(' if 'gt' in bounds else '['}{low}, {high}{')' if 'lt' in bounds else ']'}"


def plural(kind: type) -> str:
    return {int: "whole numbers", float: "numbers", str: "texts"}.get(kind, "groups")


def shown(value: object) -> str:
    """Writes a value as a command line does."""
    return cut(value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False), 200)


def first_line(error: Exception) -> str:
    """Returns what an error of another's code says first, or its name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def cut(text: str, most: int) -> str:
    """Shortens a text to `most` characters; its end, where a sentence has its remedy, stays."""
    return text if len(text) <= most else f"{text[: most - most // 4 - 1]}…{text[-(most // 4) :]}"


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
        if group is not None and part == group.__name__:      # pydantic's word for a choice of a union
            continue
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
    if isinstance(most := error.get("ctx", {}).get("le"), int):
        return f"{name}={shown(plain)} is too large: at most {most}."
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


def read_text(file: Path) -> str:
    """Reads a record's text; raises ValueError for what never ends, as a pipe or a device, and for what is too long."""
    # A pipe that nobody writes to would else be waited for.
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        seen = os.fstat(opened.fileno())
        if not stat.S_ISREG(seen.st_mode) or seen.st_size > LONGEST_RECORD:
            raise ValueError(f"{file} is no ordinary file of at most {LONGEST_RECORD:,} bytes.")
        try:
            return opened.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is no text in UTF-8 ({error}).") from None


def read_json(file: Path) -> Any:
    """Reads a JSON file of ours; raises ValueError where it is none."""
    try:
        plain = json.loads(read_text(file))
        json.dumps(plain, ensure_ascii=False).encode()      # half a character could never be written again
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error})") from None
    return plain


def read_record(declared: type[Declared], file: Path, remedy: str) -> Declared:
    """Reads a JSON file of ours; raises ValueError, ending in `remedy`, where it is none or lacks something."""
    try:
        plain = read_json(file)
    except ValueError as error:
        raise ValueError(f"{error}: {remedy}") from None
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
            if hasattr(sys.stdout, "reconfigure"):
                sys.stdout.reconfigure(line_buffering=True)      # a line is in a redirected log when it is said
            program, wants_traceback = Path(sys.argv[0]).name, "HYDRA_FULL_ERROR" in os.environ
            plain: dict = {}
            try:
                for plain in compose(config_name):
                    main(read(declared, plain))
                ranks.leave()
            except KeyboardInterrupt:
                print(f"\n{program}: stopped by Ctrl-C.", file=sys.stderr)
                sys.exit(130)
            except SystemExit as stop:
                if isinstance(stop.code, str):
                    end(stop.code, stop)
                ranks.leave()
                raise
            except Exception as error:
                said = mistake(error, config_name, plain)
                if said is None or wants_traceback:
                    ranks.let_others_speak(error)
                    ranks.note_for_launcher(error)
                    raise
                end(cut(f"{program}: {said}", 2000), error)      # a value in it may have any length
        return entry
    return decorate


@functools.cache      # of the code that this process has loaded, whatever is committed later
def commit() -> str | None:
    """Names this project's commit, with -dirty where tracked files differ from it; outside a repository, what
    TREAD_COMMIT in the environment says, or None."""
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
            raise ValueError(f"{argument} would run what a pickle holds, and none is ever loaded: give the settings.")
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
    """Says in a sentence what a user can mend: settings, files, memory. None is a mistake of ours."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, HydraException | OmegaConfBaseException):
        return f"{first_line(error).rstrip('.')}: configs/{config_name}.yaml names all settings."
    if is_full_memory(error):
        noted = [note for note in getattr(error, "__notes__", ()) if note in KNOBS]      # by train.paused
        return full_memory(error, *noted[-1:] or ["training" if config_name == "config" else config_name], plain)
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
            raise ValueError(f"{argument} is no setting: write key=value, as in steps=100.") from None
        is_list = value.startswith("[")
        parts = [part.strip(" '\"") for part in (value.strip("[]").split(",") if is_list else [value])]
        quoted = ",".join("'" + part.replace("'", "\\'") + "'" for part in parts)
        raise ValueError(f"{argument} cannot be read. A value may hold a to z, digits, spaces and _-+./:%*?@$| as "
                         f"they are; with anything else it stands in quotes, and the whole in another kind: "
                         f'"{key}={f"[{quoted}]" if is_list else quoted}".') from None


def end(sentence: str, error: BaseException) -> NoReturn:
    """Ends this process with a sentence; where every rank has the same one, the first rank prints it."""
    ranks.let_others_speak(error)
    sys.exit(sentence)


# ---- full memory ----------------------------------------------------------------------------------------------------

PICTURES = (("batch_size", "a lower batch_size"), ("decode_batch_size", "decode_batch_size=1"),
            ("decode_precision", "decode_precision=bf16"), ("precision", "precision=bf16"))
# The settings to turn, in order, and how: by what train.py is doing, and by the names of the other commands' configs.
# One that a command does not have, or that stands so already, is left out.
KNOBS = {
    **dict.fromkeys(("training", "saving"), (
        ("data.on_device", "data.on_device=false"), ("grad_accum_steps", "a higher grad_accum_steps"),
        ("activation_checkpointing", "activation_checkpointing=true"), ("sharding", "sharding=fsdp"),
        ("batch_size", "a lower batch_size"), ("model.backbone_type", "a smaller model.backbone_type"))),
    "drawing": (("decode_batch_size", "decode_batch_size=1"), ("samples.batch_size", "a lower samples.batch_size"),
                ("decode_precision", "decode_precision=bf16")),
    "scoring": (("decode_batch_size", "decode_batch_size=1"), ("evaluate.batch_size", "a lower evaluate.batch_size"),
                ("decode_precision", "decode_precision=bf16")),
    "sample": PICTURES, "rf": PICTURES, "fid": PICTURES, "sweep_guidance": PICTURES,
    "prepare_latents": (("batch_size", "a lower batch_size"), ("precision", "precision=bf16"),
                        ("num_workers", "a lower num_workers"), ("resolution", "a lower resolution")),
    "import_latents": (("shard_size", "a lower shard_size"),),
}
FULL = re.compile("can't allocate memory|out of memory|(CUBLAS|CUDNN|CUSOLVER|CUFFT|CUSPARSE)_\\w*ALLOC\\w*_FAILED",
                  re.IGNORECASE)


def is_full_memory(error: Exception) -> bool:
    """Tells whether memory ran out: Python's, numpy's, the system's, a GPU's, or torch's on a CPU, for which there is
    no class."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    names = {kind.__name__ for kind in type(error).__mro__}
    return (not names.isdisjoint({"MemoryError", "OutOfMemoryError"})
            or (isinstance(error, RuntimeError) and FULL.search(str(error)) is not None))


def full_memory(error: Exception, doing: str, plain: dict) -> str:
    """Says whose memory is full, what was asked for and is free, and which settings to turn in which order."""
    torch, message = sys.modules.get("torch"), str(error)
    of_gpu = "cuda" in message.lower() or "cublas" in message.lower() or "cudnn" in message.lower()
    asked = re.search(r"(?:tried to allocate|unable to allocate) ([\d.]+ \w+)", message, re.IGNORECASE)
    seen = re.search(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", message)
    numbers = [f"{in_gib(asked[1])} more were asked for"] if asked else []
    with contextlib.suppress(Exception):      # a GPU that has failed answers no more
        if seen:
            free, total = seen[2], seen[1]
        elif of_gpu:
            free, total = (in_gib(f"{size} bytes") for size in torch.cuda.mem_get_info())
        else:
            lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
            free, total = (in_gib(f"{int(lines[key].split()[0]) * 1024} bytes") for key in ("MemAvailable", "MemTotal"))
        numbers.append(f"{free} of {total} are free")
    turned = [f"{how} (now {shown(now)})" for key, how in KNOBS.get(doing, ())
              if (now := value_at(plain, key)) is not ... and how != f"{key}={shown(now)}"]
    where = f"{'the GPU' if of_gpu else 'this machine'}'s memory is full{ranks.on_which()}"
    remedy = ("Turn, in this order: " + "; ".join(turned) if turned else
              "Lower batch_size, the numbers of images, or the sizes of network and images")
    return f"{where} ({doing}{''.join(f'; {number}' for number in numbers)}). {remedy}."


def in_gib(amount: str) -> str:
    """Writes bytes in GiB; what has another unit stays."""
    number, unit = amount.split()
    return f"{int(number) / 2**30:.2f} GiB" if unit == "bytes" else amount


def value_at(plain: Any, key: str) -> Any:
    """Finds the value of a dotted key; ... where there is none."""
    for part in key.split("."):
        plain = plain.get(part, ...) if isinstance(plain, dict) else ...
    return plain
