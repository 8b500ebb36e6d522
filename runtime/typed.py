"""Arguments of a command -> plain settings, which Hydra composes from configs/.

Hydra and YAML read 2025_11_25 as a number, true as a truth value and null as nothing. Where a setting is declared as
text, what was typed replaces such a value. In a list or a YAML file it needs quotes, as an error says.
"""

import argparse
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationError

from runtime.schema import (
    CONFIGS,
    Declared,
    Settings,
    as_argument,
    declared_keys,
    first_problem,
    in_quotes,
    nearest,
    unknown,
    value_at,
)

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
        if re.match(r"[+~]*hydra[./]", argument):
            raise ValueError(f"{argument} would change nothing, as Hydra only reads the settings here. run_dir= or "
                             f"out= names the folder, and scripts/slurm.sh starts jobs.")
    if options.config_dir is not None and not options.config_dir.is_dir():
        raise ValueError(f"--config-dir {options.config_dir} is not a folder.")
    return options, settings


def cli_overrides(arguments: Iterable[str]) -> dict[str, str]:
    """Reads the settings of a command line as text, by key; if a key comes twice, the last one counts."""
    pairs = (argument.lstrip("+~").partition("=") for argument in arguments)
    return {key.partition("@")[0]: value for key, _, value in pairs}


def group_defaults(config_name: str) -> dict[str, str | None]:
    """Lists the groups of configs that a command has, with the default choice of each."""
    entries = [entry for file in config_files(f"{config_name}.yaml") for entry in read_yaml(file).get("defaults", [])]
    return {key.removeprefix("override "): choice for entry in entries if isinstance(entry, dict)
            for key, choice in entry.items() if "@" not in key}


def config_files(name: str) -> Iterator[Path]:
    """Lists a file of configs/, preceded by the files that it includes."""
    file = CONFIGS / name
    for entry in read_yaml(file).get("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            included = entry.partition("@")[0]
            yield from config_files(f"{included[1:] if included[0] == '/' else Path(name).parent / included}.yaml")
    yield file


def without_null(settings: list[str], groups: dict[str, str | None]) -> list[str]:
    """Translates group=null for Hydra: a null default is deleted, any other becomes `none`. The last counts."""
    last = {setting.partition("=")[0]: setting for setting in settings}
    last |= {key: f"~{key}" if choice is None else f"{key}=none"
             for key, choice in groups.items() if last.get(key) == f"{key}=null"}
    return [*last.values()]


def jobs_of(settings: Iterable[str]) -> list[list[str]]:
    """Lists the jobs of a sweep: each combination of the values of all settings, where the last one varies fastest.

    Values of a list, seed=0,1 or choice(0,1), are as typed, and those of range(0,3) are Hydra's. If a key comes twice,
    the last one counts.
    """
    values = []
    for key, setting in {setting.partition("=")[0]: setting for setting in settings}.items():
        text = setting.removeprefix(f"{key}=")
        choice = re.fullmatch(r"choice\((.*)\)", text)
        if len(parts := split(choice[1] if choice else text)) > 1:
            values.append([f"{key}={part}" for part in parts])
        elif (parsed := parse(setting)).is_discrete_sweep():
            values.append([f"{key}={value}" for value in parsed.sweep_string_iterator()])
        else:
            values.append([setting])
    return [list(job) for job in itertools.product(*values)]


def split(text: str) -> list[str]:
    """Splits text at the commas that are in neither quotes nor brackets, and have no backslash."""
    parts, depth, quote = [""], 0, ""
    for char in re.findall(r"\\?.", text, re.DOTALL):
        if char in ("'", '"'):
            quote = "" if char == quote else quote or char
        elif not quote:
            depth += (char in "[{(") - (char in ")}]")
        if char == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def parse(setting: str) -> Override:
    """Parses a setting, and quotes text that Hydra's grammar lacks, such as größe (1), also in a list.

    Integers of a list are not quoted. Raises ValueError, with what to type, for other lists.
    """
    parser = OverridesParser.create()
    try:
        return parser.parse_override(setting)
    except HydraException:
        key, _, text = setting.partition("=")
        listed = re.fullmatch(r"""\[([^]['"{}]*)\]""", text)
        if not re.fullmatch(r"\+*[\w./@]+", key, re.ASCII) or not text or not listed and re.search(r"[],[]", text):
            raise ValueError(f"{setting} cannot be read: write key=value, and text with a comma or bracket in two "
                             f"kinds of quotes, as \"name='a, b'\" or \"classes=['größe','a (1)']\".") from None
        items = [item if re.fullmatch(r" *-?\d+ *", item) else in_quotes(item.strip(), interpolate=True)
                 for item in (listed[1].split(",") if listed else [text])]
        return parser.parse_override(f"{key}=[{','.join(items)}]" if listed else f"{key}={items[0]}")


def for_hydra(setting: str) -> str:
    """Returns a setting as Hydra reads it; raises ValueError, with what to type, for several values."""
    parsed = parse(setting)
    if parsed.is_sweep_override():
        key, _, text = setting.partition("=")
        raise ValueError(f"{setting} is several values: --multirun tries those of a,b or range(0,3) one by one. For "
                         f"text write {as_argument(key, text)}, and for a list '{key}=[{text}]'.")
    return parsed.input_line


# ---- composing by Hydra ---------------------------------------------------------------------------------------------


def read_yaml(file: Path) -> Any:
    """Reads a YAML file as Hydra does."""
    return OmegaConf.to_container(OmegaConf.load(file))


def read_foreign_yaml(file: Path) -> Any:
    """Reads a YAML file from elsewhere; raises ValueError for aliases, which can multiply without end."""
    try:
        with file.open(encoding="utf-8") as text:
            if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
                raise ValueError(f"{file} has aliases (*name), which no run writes: move it away.")
        return read_yaml(file)
    except (RecursionError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())[:500]}.") from None


def compose(
    config_name: str, declared: type[Settings], settings: list[str], config_dir: Path | None = None,
) -> dict:
    """Composes a config with settings of a command line, as plain values.

    Raises ValueError, with a suggestion, for a setting or a choice that does not exist.
    """
    groups = group_defaults(config_name)
    overrides = [for_hydra(setting) for setting in without_null(settings, groups)]
    if config_dir is not None:
        folders = [CONFIGS / "presets", config_dir]
        overrides.append(f"hydra.searchpath=[{','.join(in_quotes(f'file://{folder}') for folder in folders)}]")
    GlobalHydra.instance().clear()  # a notebook may use Hydra, too
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        try:
            cfg = hydra.compose(config_name, overrides)
        except MissingConfigException as error:
            if not error.missing_cfg_file or not error.options:
                raise
            group, _, name = error.missing_cfg_file.rpartition("/")
            near = nearest(name, error.options)
            raise ValueError(f"There is no {group}={name}: {f'did you mean {near}? ' if near else ''}There are "
                             f"{', '.join(error.options)}.") from None
        except ConfigCompositionException as error:
            if not (found := re.search(r"Could not override '([^']+)'", str(error))):
                raise
            raise ValueError(unknown(found[1], [*groups, *declared_keys(declared)],
                                     f"configs/{config_name}.yaml names all.")) from None
        except TypeError:  # Hydra raises it for a group with a list of dicts
            raise ValueError("A setting that takes a name of configs/ was given a list: write routes=balanced, say, "
                             "and 'model.routes=[…]' for routes of your own.") from None
    keep_text(cfg, declared, cli_overrides(settings))
    return OmegaConf.to_container(cfg, resolve=True)


def keep_text(cfg: DictConfig, declared: type[Settings], typed: Mapping[str, str]) -> None:
    """Replaces a number, true or false by what was typed, where text is declared."""
    plain = OmegaConf.to_container(cfg, resolve=True)
    try:
        declared.model_validate(plain)
    except ValidationError as error:
        for each in error.errors():
            key, value = value_at(plain, each["loc"])
            if each["type"] == "string_type" and key in typed and isinstance(value, bool | int | float):
                OmegaConf.update(cfg, key, typed[key])


def read_job(declared: type[Declared], plain: dict, config_name: str, typed: Mapping[str, str]) -> Declared:
    """Checks composed settings as `read` does; explains a missing setting, and a file without its first line."""
    for name in plain.keys() - declared.model_fields:
        if (CONFIGS / name).is_dir():
            raise ValueError(f"The file of {name}= has settings of {name}, which the command does not read: its first "
                             f"line must be # @package _global_")
    try:
        return declared.model_validate(plain)
    except ValidationError as error:
        problems = error.errors()
    for each in problems:
        key, value = value_at(plain, each["loc"])
        if value is None and key not in typed and each["type"] != "extra_forbidden":
            example = re.search(rf"^# +((?:\S+ )*\S+\.py .*?\b{re.escape(key)}=.*?)(?:  |$)",
                                (CONFIGS / f"{config_name}.yaml").read_text(encoding="utf-8"), re.M)
            raise ValueError(f"{key}= is missing{f': as in {example[1]}' if example else '.'}")
    raise ValueError(first_problem(declared, plain, problems))
