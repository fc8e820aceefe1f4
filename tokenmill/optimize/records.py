"""Frozen records as JSON and back, by their type hints: what crosses the pipe to a contender and what the store keeps.

Handles dataclasses of numbers, text, paths, None, lists, tuples and mappings; NaN and infinity survive. Imports no
torch. Called by contender.py, contender_process.py and the laboratory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Values that `json` writes."""
    if is_dataclass(value) and not isinstance(value, type):
        return {spec.name: to_plain(getattr(value, spec.name)) for spec in fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(each) for each in value]
    return value


def from_plain(kind: type[T], value: Any) -> T:
    """The record that `to_plain` wrote. Raises TypeError for a value that is not of this kind."""
    return cast(T, _convert(kind, value))


def _convert(kind: Any, value: Any) -> Any:
    if kind is Any or value is None:
        return value
    if is_dataclass(kind) and isinstance(kind, type):
        hints = _hints(kind)
        return kind(**{name: _convert(hints[name], each) for name, each in value.items()})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _convert(next(each for each in arguments if each is not NoneType), value)
    if origin in (list, Sequence):
        return [_convert(arguments[0], each) for each in value]
    if origin is tuple:
        return tuple(_convert(arguments[0], each) for each in value)
    if origin in (dict, Mapping):
        return {key: _convert(arguments[1], each) for key, each in value.items()}
    if kind is float:
        return float(value)
    if kind is Path:
        return Path(value)
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
