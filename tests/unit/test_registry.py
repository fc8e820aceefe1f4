"""The table of names: lazy imports, entries from outside, order, names that are taken."""

from __future__ import annotations

import pytest

from tokenmill.errors import UserError
from tokenmill.registry import Registry


class Extension:
    pass


def _table() -> Registry:
    return Registry("thing", {"counter": "collections:Counter", "broken": "no_such_module:Thing"})


def test_nothing_is_imported_until_it_is_asked_for() -> None:
    table = _table()
    assert table.names() == ["counter", "broken"]
    assert table.get("counter").__name__ == "Counter"
    with pytest.raises(ModuleNotFoundError):
        table.get("broken")


def test_entries_from_outside() -> None:
    table = _table()
    table.register("extension", Extension)
    table.register("by path", "collections:OrderedDict", first=True)
    assert table.get("extension") is Extension
    assert table.names() == ["by path", "counter", "broken", "extension"]
    table.unregister("extension")
    assert "extension" not in table
    with pytest.raises(UserError, match="unknown thing 'extension'"):
        table.get("extension")


def test_a_name_is_taken_once() -> None:
    with pytest.raises(UserError, match="thing 'counter' is already registered"):
        _table().register("counter", Extension)
