"""What is typed -> what Hydra reads: text stays as it was written, and a key that does not exist has a neighbour.

Hydra and YAML read 2025_11_25 as a number, yes as true and null as nothing. Where a command declares text, their
grammars decide on quotes, lists and sweeps alone.
"""

import re
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import yaml
from hydra.core.config_loader import ConfigLoader  # noqa: F401      (before the parser, or Hydra's imports are a circle)
from hydra.core.override_parser import overrides_parser
from hydra.core.override_parser.types import ChoiceSweep, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf._utils import get_yaml_loader
from pydantic import BaseModel

from runtime.files import MOST_LEVELS
from runtime.schema import as_argument, shell

# ---- where text is declared -----------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """Which of these a setting may be: text, an integer, null, a list of such."""

    text: bool = False
    integer: bool = False
    null: bool = False
    listed: "Kind | None" = None

    @property
    def has_text(self) -> bool:
        return self.text or self.listed is not None and self.listed.has_text


def choices(annotation: Any) -> list:
    """Takes unions and annotations apart."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return choices(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [each for part in typing.get_args(annotation) for each in choices(part)]
    return [annotation]


def kind(annotations: Iterable) -> Kind:
    found, listed = list(annotations), None
    for each in found:
        if typing.get_origin(each) is list:
            listed = kind(choices(*typing.get_args(each)))
    return Kind(str in found, int in found, types.NoneType in found, listed)


def kind_of(declared: type[BaseModel], key: str) -> Kind:
    """Follows a dotted key through declared settings; what is not declared is no text."""
    found: list = [declared]
    for part in key.split("."):
        inner: list = []
        for each in found:
            if isinstance(each, type) and issubclass(each, BaseModel) and part in each.model_fields:
                inner += choices(each.model_fields[part].annotation)
            elif typing.get_origin(each) is list and part.isdigit():
                inner += choices(*typing.get_args(each))
            elif typing.get_origin(each) is dict:
                inner += choices(typing.get_args(each)[1])
        found = inner
    return kind(found)


def declared_keys(declared: type[BaseModel], prefix: str = "") -> dict[str, Kind]:
    """Lists the dotted keys of declared settings, those of nested ones too."""
    found = {}
    for name, field in declared.model_fields.items():
        key, inner = f"{prefix}{name}", choices(field.annotation)
        found[key] = kind(inner)
        for group in inner:
            if isinstance(group, type) and issubclass(group, BaseModel):
                found |= declared_keys(group, f"{key}.")
    return found


# ---- a command line -------------------------------------------------------------------------------------------------

ARGUMENT = re.compile(r"(\+{0,2})([\w.]+)=(.*)", re.DOTALL)
INTEGER = re.compile(r"-?[1-9][0-9]*|0")


PLAIN = overrides_parser.HydraOverrideVisitor


class Unread(PLAIN):
    """Hydra's reader of the command line, but for values without quotes, which stay text."""

    def _createPrimitive(self, ctx: Any) -> Any:
        value = super()._createPrimitive(ctx)
        return value if isinstance(value, str | QuotedString) else ctx.getText().strip()

    def visitFunction(self, ctx: Any) -> Any:
        if ctx.getChild(0).getText() in ("choice", "shuffle", "tag"):  # of values; others count
            return super().visitFunction(ctx)
        return PLAIN(self.functions).visitFunction(ctx)


def as_typed(argument: str, declared: type[BaseModel], sweeps: bool = False) -> str:
    """Quotes what Hydra would read as something else than the text that is declared there; returns other arguments.

    Raises ValueError, with what to type, for several values without `sweeps`.
    """
    found = ARGUMENT.fullmatch(argument)
    place = kind_of(declared, found[2]) if found else Kind()
    if not place.has_text or found[3].strip().lower() in ("", "null"):
        return argument
    prefix, key, raw = found[1], found[2], found[3].strip()
    try:
        with mock.patch.object(overrides_parser, "HydraOverrideVisitor", Unread):
            value = overrides_parser.OverridesParser.create().parse_override(f"{key}={raw}")._value
    except HydraException:
        value = literal(raw, place)
    if isinstance(value, ChoiceSweep) and not sweeps:
        as_list = f" or {shell(f'{key}=[{raw}]')}" if place.listed else ""
        raise ValueError(f"{argument} is several values, which --multirun would try one by one: write "
                         f"{as_argument(key, raw)}{as_list}.")
    if place.text and not isinstance(value, str | QuotedString | list | ChoiceSweep | None):
        value = raw  # int(3), {a: 1}
    written = quoted(value, place)
    return argument if written is None else f"{prefix}{key}={written}"


def literal(raw: str, place: Kind) -> str | list[str] | None:
    """Reads text, or a list of texts without quotes, that has characters which Hydra has no grammar for."""
    if "${" in raw:
        return None
    if place.text and raw[0] not in "'\"[{":
        return raw
    if place.listed and re.fullmatch(r"""\[[^][{}'"]*\]""", raw):
        return [part.strip() for part in raw[1:-1].split(",")]
    return None


def quoted(value: Any, place: Kind) -> str | None:
    """Writes text, lists of it and sweeps for Hydra; None for anything else."""
    if isinstance(value, ChoiceSweep):
        parts = [quoted(part, place) for part in value.list]
        return None if None in parts or not value.simple_form else ",".join(parts)
    if isinstance(value, list):
        parts = [quoted(part, place.listed or Kind()) for part in value]
        return None if None in parts else f"[{','.join(parts)}]"
    if isinstance(value, QuotedString):
        return value.with_quotes()
    if not isinstance(value, str):
        return None
    if place.null and value.lower() == "null":  # among texts in a list
        return value
    return value if place.integer and INTEGER.fullmatch(value) else QuotedString(value, Quote.single).with_quotes()


# ---- groups of configs ----------------------------------------------------------------------------------------------


def group_defaults(configs: Path, config_name: str) -> dict[str, str | None]:
    """Lists the groups of configs that a command has, and the choice of each where none is given."""
    found = {}
    for entry in read_yaml(configs / f"{config_name}.yaml").get("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            found |= group_defaults(configs, entry)
        elif isinstance(entry, dict):
            found |= {key.removeprefix("override "): choice for key, choice in entry.items() if "@" not in key}
    return {key.lstrip("/"): choice for key, choice in found.items() if "hydra/" not in key}


def without_null(arguments: list[str], groups: dict[str, str | None], configs: Path) -> list[str]:
    """Writes group=null as Hydra has it: a default that is null is deleted, and any other is `none`."""
    last = {argument.partition("=")[0]: i for i, argument in enumerate(arguments)}
    kept = []
    for i, argument in enumerate(arguments):
        key, _, value = argument.partition("=")
        if key not in groups and value == "null" and (configs / key).is_dir():
            kept.append(f"{key}=none")  # a group of other commands: Hydra says so
        elif key not in groups or value.strip().lower() != "null":
            if key not in groups or last[key] == i or not arguments[last[key]].lower().endswith("=null"):
                kept.append(argument)
        elif last[key] != i:
            continue
        else:  # Hydra says what there is where there is no such file
            kept.append(f"~{key}" if groups[key] is None else f"{key}=none")
    return kept


MOST_YAML = 2**20  # bytes of a file of settings, and settings in it


# ---- YAML -----------------------------------------------------------------------------------------------------------


def read_yaml(file: Path, declared: type[BaseModel] | None = None) -> Any:
    """Reads a YAML file as OmegaConf does, but for what `declared` says is text, which stays as it is written.

    A file may be any part of the settings, so a key counts for the declared one that ends in it. Raises ValueError,
    with file and line, for what is not YAML or not UTF-8.
    """
    if Path(file).stat().st_size > MOST_YAML:
        raise ValueError(f"{file} has more than {MOST_YAML:,} bytes, so it holds no settings.")
    raw = Path(file).read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}, line {raw[:error.start].count(10) + 1}: byte 0x{raw[error.start]:02x} is not "
                         f"UTF-8: save the file as UTF-8.") from None
    try:
        loader = get_yaml_loader()(text)
        node = loader.get_single_node()
        if node is None:
            return {}
        require_few(node, file)
        if declared is not None:
            places = {}
            for key, place in declared_keys(declared).items():
                if place.has_text:
                    parts = key.split(".")
                    for i in range(len(parts)):
                        places.setdefault(".".join(parts[i:]), place)
            keep_text(node, places)
        return loader.construct_document(node)
    except RecursionError:
        raise ValueError(f"{file} is nested too deeply.") from None
    except yaml.YAMLError as error:
        if isinstance(error, yaml.reader.ReaderError):
            line = text[:error.position].count("\n") + 1
            problem = f"character {error.character:#04x} is not allowed in YAML"
        else:
            mark, since = error.problem_mark or error.context_mark, error.context_mark
            opened = f" ({error.context} in line {since.line + 1})" if since and since.line != mark.line else ""
            line, problem = mark.line + 1, f"{error.problem}{opened}"
        raise ValueError(f"{file}, line {line}: {problem}.") from None


def require_few(node: yaml.Node, file: Path) -> None:
    """Raises ValueError for YAML whose aliases, which may name one another, would multiply or never end."""
    level, count = [node], 0
    for _ in range(MOST_LEVELS):
        level = [inner for inner in level if isinstance(inner, yaml.CollectionNode)]
        count += sum(len(inner.value) for inner in level)
        if not level or count > MOST_YAML:
            break
        level = [part for inner in level for pair in inner.value
                 for part in (pair if isinstance(pair, tuple) else (pair,))]
    if level:
        raise ValueError(f"{file} is nested too deeply, or its aliases make more than {MOST_YAML:,} settings.")


def keep_text(node: yaml.Node, places: dict[str, Kind], key: str = "") -> None:
    """Tags as text the values without quotes that stand where text is declared."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            keep_text(value, places, f"{key}.{name.value}".lstrip("."))
    elif key in places:
        tag_text(node, places[key], top=True)


def tag_text(node: yaml.Node, place: Kind, top: bool = False) -> None:
    if isinstance(node, yaml.SequenceNode) and place.listed:
        for part in node.value:
            tag_text(part, place.listed)
    elif isinstance(node, yaml.ScalarNode) and place.text and node.style is None:
        is_null, is_count = node.tag.endswith(":null"), place.integer and INTEGER.fullmatch(node.value)
        if not is_count and not (is_null and top):
            node.tag = yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG
