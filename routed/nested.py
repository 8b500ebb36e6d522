"""Values in nested tuples, lists, dicts and dataclasses."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

PLAIN_VALUES = bool | int | float | str | None


def is_record(value: Any) -> bool:
    """True for an instance of a dataclass, which compiled code of torch 2.11 cannot ask about None."""
    return not isinstance(value, PLAIN_VALUES | type | Mapping) and is_dataclass(value)


def rebuilt(value: Any, parts: list[Any]) -> Any:
    """Returns a tuple, named tuple or list of the same class with other parts."""
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to a value, or to all values inside of tuples, lists, plain dicts and dataclasses."""
    if type(value) is dict:
        return {key: mapped(function, part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return rebuilt(value, [mapped(function, part) for part in value])
    if is_record(value):
        return replace(value, **{part.name: mapped(function, getattr(value, part.name)) for part in fields(value)
                                 if part.init})
    return function(value)


def leaves(value: Any) -> list[Any]:
    """Lists all values inside of tuples, lists, dicts and dataclasses."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    elif is_record(value):
        value = [getattr(value, part.name) for part in fields(value)]
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, tuple | list) else [value]


def by_axis(function: Callable[[Any, Any], Any], value: Any, axis: Any) -> Any:
    """Applies a function of a value and its axis to all values in an argument; see `Blocks.along`."""
    if isinstance(value, Mapping) and axis is not None:     # also an OrderedDict, which `mapped` does not enter
        return {key: by_axis(function, part, axis) for key, part in value.items()}
    if not isinstance(axis, tuple) or value is None:
        return mapped(lambda part: function(part, axis), value)
    return rebuilt(value, [by_axis(function, part, own) for part, own in zip(value, axis, strict=True)])
