"""Extensions: a file <room>/<name>.py declares one class or function, which settings choose by the file's name."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any


def names(room: str) -> list[str]:
    """Lists the extensions of a package: its files, but for those in its HELPERS, if it has any."""
    package = importlib.import_module(room)
    files = {module.name for module in pkgutil.iter_modules(package.__path__)}
    return sorted(files - getattr(package, "HELPERS", set()))


def find(room: str, name: str) -> Any:
    """Returns the only class below the package's BASE that <room>/<name>.py declares, or its only function.

    Names that begin with _ do not count. Raises ValueError where there is no such file, and where it declares none or
    several.
    """
    if name not in names(room):
        raise ValueError(f"There is no {room}/{name}.py; choose one of {', '.join(names(room))}.")
    module, base = importlib.import_module(f"{room}.{name}"), importlib.import_module(room).BASE
    found = [value for key, value in vars(module).items()
             if not key.startswith("_") and getattr(value, "__module__", None) == module.__name__
             and (inspect.isfunction(value) if base is None else inspect.isclass(value) and issubclass(value, base))]
    if len(found) != 1:
        what = "function" if base is None else f"subclass of {base.__name__}"
        declared = ", ".join(value.__name__ for value in found) or "none"
        raise ValueError(f"{room}/{name}.py must declare one {what}, and declares {declared}: begin the names of "
                         f"helpers with _, or move them.")
    return found[0]


def keywords_of(kind: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """Returns the settings of an extension: its parameters that are given by name alone."""
    parameters = inspect.signature(kind).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}


def describe(room: str) -> str:
    """Writes the extensions of a package, with their settings and defaults, for --help."""
    described = [" ".join([name, *(f"{key}={value.default}" for key, value in keywords_of(find(room, name)).items())])
                 for name in names(room)]
    return f"{room}/: {' | '.join(described)}"
