"""Arguments of a command and YAML files -> plain settings, which Hydra composes; text stays as it is typed.

Hydra and YAML read 2025_11_25 as a number, yes as true and null as nothing. On a command line what is declared as text
is quoted before Hydra sees it. In a YAML file it needs quotes, and an error names the line that lacks them.
"""

import argparse
import contextlib
import difflib
import io
import itertools
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel

from runtime.files import MOST_LEVELS
from runtime.schema import CONFIGS, Settings, as_argument, as_text, dotted, in_quotes, leaves, read, shell, unknown

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

    def takes(self, value: object) -> bool:
        """False for a number, true or false where text is declared instead."""
        if isinstance(value, list) and self.listed is not None:
            return all(map(self.listed.takes, value))
        return not self.text or not isinstance(value, bool | int | float) or self.integer and type(value) is int


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
    """Follows a dotted key through declared settings, lists and dicts; what is not declared is no text."""
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


def parse_options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Separates options from settings; raises ValueError for other options and for settings with dashes."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--config-dir", "-cd", type=lambda folder: Path(folder).expanduser().resolve())
    try:
        options, settings = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}.") from None
    for argument in settings:
        if argument.startswith("-"):
            raise ValueError(f"{argument}: settings have no dashes: {argument.lstrip('-')}"
                             f"{'' if '=' in argument else '=<value>'}. Options are --help, --multirun, --cfg job and "
                             f"--config-dir <folder>.")
    if options.config_dir is not None and not options.config_dir.is_dir():
        raise ValueError(f"--config-dir {options.config_dir} is not a folder.")
    return options, settings


def cli_overrides(arguments: Iterable[str]) -> dict[str, str]:
    """Reads the settings of a command line as text, by key; of a key that comes twice the last one counts."""
    pairs = (argument.lstrip("+~").partition("=") for argument in arguments if not argument.startswith("-"))
    return {key.partition("@")[0]: value for key, _, value in pairs}


def check_hydra(settings: Iterable[str]) -> None:
    """Raises ValueError for settings of Hydra that have no effect here, such as its launchers and output folders."""
    for setting in settings:
        key = setting.lstrip("+~").partition("=")[0]
        if key in ("hydra/launcher", "hydra/sweeper"):
            raise ValueError(f"{setting} is not supported: the jobs of --multirun run one after the other in this "
                             f"process. Leave it out, or start each job as a command of its own (scripts/slurm.sh).")
        if re.match(r"hydra[./]", key) and key != "hydra.searchpath":
            raise ValueError(f"{setting} would change nothing, as Hydra only reads the settings here: leave it out. "
                             f"Outputs go to the folder that run_dir= or out= names.")


QUOTED = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
# One of several values: in quotes, in brackets, or text in which ${…} may hold a comma.
BRACKETS = r"""\[(?:'[^']*'|"[^"]*"|[^]'"])*\]"""
VALUE = re.compile(rf"\s*({QUOTED}|{BRACKETS}|(?:\$\{{[^}}]*\}}|[^,])*?)\s*(?=,|\Z)", re.DOTALL)
SWEEP = re.compile(r"(choice|shuffle|sort|tag|range|glob)\(.*\)", re.DOTALL)
INTEGER = re.compile(r"-?[1-9][0-9]*|0")


def split(raw: str) -> list[str]:
    """Splits values at their commas, but for those in quotes and brackets."""
    found, end = [], -1
    while end < len(raw):
        match = VALUE.match(raw, end + 1)
        found.append(match[1])
        end = match.end()
    return found


def quote_text(setting: str, declared: type[BaseModel], sweeps: bool = False) -> str:
    """Quotes the text of a setting, so that Hydra reads it as it was typed; returns other settings as they are.

    Raises ValueError, with what to type, for several values without `sweeps`.
    """
    prefix, key, raw = re.match(r"(\+*)([^=]*)=?(.*)", setting, re.DOTALL).groups()
    place, raw = kind_of(declared, key), raw.strip()
    if not place.has_text or raw.lower() in ("", "null") or sweeps and SWEEP.fullmatch(raw):
        return setting
    values = split(raw)
    if len(values) > 1 and not sweeps:
        as_list = f" or {shell(f'{key}=[{raw}]')}" if place.listed else ""
        raise ValueError(f"{setting} is several values, which --multirun would try one by one: write "
                         f"{as_argument(key, raw)}{as_list}.")
    return f"{prefix}{key}={','.join(quoted(value, place) for value in values)}"


def quoted(value: str, place: Kind) -> str:
    """Quotes one value, or the text in a list, unless it has quotes, is null, or an integer where one is declared."""
    if place.listed and value[:1] == "[" and value[-1:] == "]":
        return f"[{','.join(quoted(part, place.listed) for part in split(value[1:-1].strip()))}]"
    is_other = value.lower() == "null" and place.null or place.integer and INTEGER.fullmatch(value)
    if not place.text or not value or is_other or re.fullmatch(QUOTED, value, re.DOTALL):
        return value
    return in_quotes(value, interpolate=True)


def expand(settings: list[str]) -> list[list[str]]:
    """Lists the jobs of a sweep: each combination of the values of all settings, the last one's changing first."""
    values = []
    for each in OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(settings):
        if each.is_sweep_override() and not each.is_discrete_sweep():
            raise ValueError(f"{each.input_line} names no values to try one by one: list them with commas.")
        values.append([f"{each.get_key_element()}={value}" for value in each.sweep_string_iterator()]
                      if each.is_sweep_override() else [each.input_line])
    return [list(job) for job in itertools.product(*values)]


# ---- groups of configs ----------------------------------------------------------------------------------------------


def group_defaults(config_name: str) -> dict[str, str | None]:
    """Lists the groups of configs that a command has, and the choice of each where none is given."""
    found = {}
    for entry in read_yaml(CONFIGS / f"{config_name}.yaml").get("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            found |= group_defaults(entry)
        elif isinstance(entry, dict):
            found |= {key.removeprefix("override "): choice for key, choice in entry.items() if "@" not in key}
    return found


def without_null(settings: list[str], groups: dict[str, str | None]) -> list[str]:
    """Writes group=null as Hydra has it: a default that is null is deleted, any other is `none`. The last counts."""
    last = {setting.partition("=")[0]: i for i, setting in enumerate(settings)}
    kept = []
    for i, setting in enumerate(settings):
        key, _, value = setting.partition("=")
        is_group = key in groups or (CONFIGS / key).is_dir()  # a group of other commands: Hydra says so
        if is_group and value.strip().lower() == "null":
            setting = f"~{key}" if groups.get(key, "none") is None else f"{key}=none"
        if not is_group or last[key] == i:
            kept.append(setting)
    return kept


# ---- composed by Hydra ----------------------------------------------------------------------------------------------


def compose(config_name: str, declared: type[Settings], arguments: list[str]) -> list[dict]:
    """Composes a config with the arguments of a command, as plain values; several of them for --multirun."""
    return [OmegaConf.to_container(cfg, resolve=True) for cfg in compose_jobs(config_name, declared, arguments)]


def compose_jobs(config_name: str, declared: type[Settings], arguments: list[str]) -> list[DictConfig]:
    """Composes as `compose`, without resolving what refers to other settings; raises ValueError for what is wrong."""
    options, settings = parse_options(arguments)
    check_hydra(settings)
    groups, keys = group_defaults(config_name), declared_keys(declared)
    settings = [quote_text(each, declared, options.multirun) for each in without_null(settings, groups)]
    if options.config_dir is not None:
        folders = [CONFIGS / "presets", options.config_dir]
        settings.append(f"hydra.searchpath=[{','.join(in_quotes(f'file://{folder}') for folder in folders)}]")
    with own_hydra(), yaml_mistakes(options.config_dir):
        try:
            return [hydra.compose(config_name, job) for job in (expand(settings) if options.multirun else [settings])]
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
                chosen = [each for each in settings if each.lstrip("+~").partition("=")[0] in groups]
                known = dotted(OmegaConf.to_container(hydra.compose(config_name, chosen)))
            except HydraException:
                known = [*keys]
            raise ValueError(unknown(found[1], [*groups, *known], f"configs/{config_name}.yaml names all.")) from None
        except TypeError:  # of Hydra, for a group with a list of dicts
            raise ValueError("A setting that takes a name of configs/ was given a list: write routes=balanced, say, "
                             "and 'model.routes=[…]' for routes of your own.") from None


@contextlib.contextmanager
def own_hydra() -> Iterator[None]:
    """Points Hydra to configs/ within the block; a notebook that uses it too finds its own again."""
    theirs = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().clear()
        if theirs is not None:
            GlobalHydra.instance().initialize(theirs)


def read_job(declared: type[Settings], plain: dict, config_name: str, arguments: list[str]) -> Settings:
    """Checks composed settings as `read` does; a file without its first line, unquoted text and null are explained."""
    options, given = parse_options(arguments)[0], cli_overrides(arguments)
    for name in plain.keys() - declared.model_fields:
        if (CONFIGS / name).is_dir():
            if not isinstance(plain[name], dict):
                raise ValueError(f"The file of {name}= holds no settings: its lines are key: value.")
            raise ValueError(f"The file of {name}= sets {dotted({name: plain[name]})[-1]}, and not a setting of the "
                             f"command: the first line of the file must be # @package _global_")
    values, keys = leaves(plain), declared_keys(declared)
    for key, place in keys.items():
        if key in values and not place.takes(values[key]):
            raise ValueError(f"{key}={as_text(values[key])} is no text{line_of(key, place, options.config_dir)}: write "
                             f"text that looks like a number, true or false in quotes.")
    try:
        return read(declared, plain)
    except ValueError:
        for key, place in keys.items():
            if key in values and values[key] is None and key not in given and not place.null:
                example = re.search(rf"^# +((?:\S+ )*\S+\.py .*?\b{re.escape(key)}=.*?)(?:  |$)",
                                    (CONFIGS / f"{config_name}.yaml").read_text(encoding="utf-8"), re.M)
                raise ValueError(f"{key}= is missing{f': as in {example[1]}' if example else '.'}") from None
        raise


# ---- YAML -----------------------------------------------------------------------------------------------------------

MOST_YAML = 2**20  # bytes of a file of settings, and settings in it


def read_yaml(file: Path) -> Any:
    """Reads a YAML file as Hydra does; raises ValueError, with file and line, for what is not YAML or not UTF-8."""
    return OmegaConf.to_container(OmegaConf.create(parse_yaml(file, OmegaConf.load)))


def parse_yaml(file: Path, parse: Callable) -> Any:
    """Parses the text of a YAML file by `parse`, which raises what PyYAML raises."""
    if Path(file).stat().st_size > MOST_YAML:
        raise ValueError(f"{file} has more than {MOST_YAML:,} bytes, so it holds no settings.")
    raw = Path(file).read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}, line {raw[:error.start].count(10) + 1}: byte 0x{raw[error.start]:02x} is not "
                         f"UTF-8: save the file as UTF-8.") from None
    try:
        require_few(yaml.compose(text, yaml.SafeLoader), file)
        return parse(io.StringIO(text))
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


def require_few(node: yaml.Node | None, file: Path) -> None:
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


def yaml_files(config_dir: Path | None) -> list[Path]:
    """Lists the files that a command may have read, a user's own first."""
    return [file for folder in filter(None, (config_dir, CONFIGS)) for file in sorted(folder.rglob("*.yaml"))]


@contextlib.contextmanager
def yaml_mistakes(config_dir: Path | None) -> Iterator[None]:
    """Turns what Hydra raises within the block for a file that is no YAML into a line with its name."""
    try:
        yield
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        for file in [Path(mark.name)] if mark else yaml_files(config_dir):
            read_yaml(file)
        raise


def line_of(key: str, place: Kind, config_dir: Path | None) -> str:
    """Finds the line of a YAML file that sets a key to something else than the text that is declared."""
    def scalars(node: yaml.Node, path: str) -> Iterator[tuple[str, yaml.ScalarNode]]:
        if isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                yield from scalars(value, f"{path}.{name.value}")
        elif isinstance(node, yaml.SequenceNode):
            for value in node.value:
                yield from scalars(value, path)
        elif node is not None and node.style is None:
            yield path, node

    for file in yaml_files(config_dir):
        for path, node in scalars(parse_yaml(file, yaml.compose), ""):
            value = OmegaConf.create(f"- {node.value}")[0] if f".{key}".endswith(path) else ""
            if not all(each.takes(value) for each in (place, place.listed) if each):
                return f" ({file}, line {node.start_mark.line + 1}: {node.value})"
    return ""
