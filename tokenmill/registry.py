"""The one registration idiom: a lazy table of name -> "module:attribute".

Each extension folder has such a table in its `__init__.py`, and only there. Nothing is imported until it is asked
for, so a broken or heavy plug-in costs nothing to those who do not use it. Code outside the package adds an entry with
`register`. Knows nothing about what it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from tokenmill.errors import UserError, unknown_name


class Registry:
    """Maps names to import paths; `get` imports on first use and lists the valid names when it cannot."""

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self._paths = dict(entries)
        self._loaded: dict[str, Any] = {}
        self.added: set[str] = set()  # names that `register` added

    def get(self, name: str) -> Any:
        if name not in self._loaded:
            if name not in self._paths:
                raise unknown_name(self.kind, name, self._paths)
            module_name, attribute = self._paths[name].split(":")
            self._loaded[name] = getattr(import_module(module_name), attribute)
        return self._loaded[name]

    def register(self, name: str, target: Any, first: bool = False) -> None:
        """Add an entry: an object, or "module:attribute" to be imported on first use. A name is taken only once.

        `first`: before the entries there are, in tables whose order matters (the first that accepts wins).
        """
        if name in self._paths:
            raise UserError(f"{self.kind} '{name}' is already registered", "choose another name")
        path = target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
        self._paths = {name: path, **self._paths} if first else {**self._paths, name: path}
        self.added.add(name)
        if not isinstance(target, str):
            self._loaded[name] = target

    def unregister(self, name: str) -> None:
        """Take out an entry that `register` added."""
        del self._paths[name]
        self.added.discard(name)
        self._loaded.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def names(self) -> list[str]:
        return list(self._paths)

    def entries(self) -> dict[str, str]:
        """Name -> import path: what another process needs to have the same table."""
        return dict(self._paths)


def load_plugin(path: str) -> None:
    """Import a Python file, or a module by its name, that registers entries in tables. Raises UserError."""
    try:
        if not path.endswith(".py"):
            import_module(path)
            return
        spec = spec_from_file_location(f"tokenmill_plugin_{Path(path).stem}", path)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(module_from_spec(spec))
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"plugin {path} does not exist", "give a Python file or the name of a module") from None
    except Exception as error:
        raise UserError(f"plugin {path} cannot be loaded: {error!r}", "correct it") from error
