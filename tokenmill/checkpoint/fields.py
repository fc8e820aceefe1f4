"""Typed access to untrusted settings: a wrong type or range becomes an error that names the key.

The settings are GGUF metadata or a parsed config.json. Used by gguf_description.py and hf_config.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tokenmill.errors import CheckpointError

UNSUPPORTED = "this variant is not supported"
_LARGEST = 2**31 - 1


def shown(value: object) -> str:
    """A value from the file for an error message: one line, not too long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Fields:
    """`prefix` goes before each name; `remedy` is what a user can do about a bad value."""

    def __init__(self, values: Mapping[str, Any], label: str, remedy: str, prefix: str = "") -> None:
        self.values = values
        self.label = label
        self.remedy = remedy
        self._prefix = prefix

    def raw(self, name: str) -> Any:
        """The value as it is; None where it is absent (or null)."""
        return self.values.get(self._prefix + name)

    def single(self, name: str) -> Any:
        """The value; a per-layer list whose entries are all equal counts as that one value."""
        value = self.raw(name)
        if not isinstance(value, list):
            return value
        if not value or any(entry != value[0] for entry in value):
            raise self.error(f"'{self._prefix}{name}' differs between layers", UNSUPPORTED)
        return value[0]

    def integer(self, name: str, default: int | None = None, low: int = 1) -> int:
        value = self.single(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _LARGEST:
            raise self.wrong(name, value)
        return value

    def integers(self, name: str) -> list[int]:
        """A list of numbers, as of layers; empty where it is absent."""
        values = self.raw(name)
        if values is None:
            return []
        if not isinstance(values, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in values):
            raise self.wrong(name, values)
        return values

    def numbers(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """A list of as many numbers as the default has, as of multipliers."""
        values = self.raw(name)
        if values is None:
            return default
        if not isinstance(values, list | tuple) or len(values) != len(default):
            raise self.wrong(name, values)
        # transformers writes infinity as {"__float__": "Infinity"}
        numbers = [math.inf if v == {"__float__": "Infinity"} else v for v in values]
        if any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in numbers):
            raise self.wrong(name, values)
        return tuple(map(float, numbers))

    def number(self, name: str, default: float | None = None, low: float = 0.0) -> float:
        value = self.single(name)
        if value is None and default is not None:
            return float(default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < math.inf:
            raise self.wrong(name, value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, value)
        return value

    def text(self, name: str, default: str) -> str:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, value)
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.raw(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(name, value)
        return value

    def wrong(self, name: str, value: object) -> CheckpointError:
        return self.error(f"'{self._prefix}{name}' is {'missing' if value is None else shown(value)}")

    def error(self, problem: str, remedy: str = "") -> CheckpointError:
        return CheckpointError(f"{self.label}: {problem}", remedy or self.remedy)
