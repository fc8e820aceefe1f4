"""The one registration idiom: a lazy table of name -> "module:attribute".

Each extension folder has such a table in its `__init__.py`, and only there. Nothing is imported until it is asked
for, so a broken or heavy plug-in costs nothing to those who do not use it. Knows nothing about what it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from tokenmill.errors import unknown_name


class Registry:
    """Maps names to import paths; `get` imports on first use and lists the valid names when it cannot."""

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self._paths = dict(entries)
        self._loaded: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        if name not in self._loaded:
            if name not in self._paths:
                raise unknown_name(self.kind, name, self._paths)
            module_name, attribute = self._paths[name].split(":")
            self._loaded[name] = getattr(import_module(module_name), attribute)
        return self._loaded[name]

    def register(self, name: str, implementation: Any) -> None:
        """Add an implementation from outside the package; a name that is taken is refused."""
        if name in self._paths:
            raise ValueError(f"{self.kind} '{name}' is registered already")
        self._paths[name] = f"{implementation.__module__}:{implementation.__qualname__}"
        self._loaded[name] = implementation

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def names(self) -> list[str]:
        return list(self._paths)
