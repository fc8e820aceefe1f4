"""Registering from outside the package: found by name, counted among the names, refused where the name is taken."""

from __future__ import annotations

import pytest

from tokenmill.errors import UserError
from tokenmill.registry import Registry


class Outsider:
    pass


def test_what_is_registered_is_found() -> None:
    registry = Registry("thing", {"path": "pathlib:Path"})
    with pytest.raises(UserError, match="path"):
        registry.get("outsider")
    registry.register("outsider", Outsider)
    assert registry.get("outsider") is Outsider
    assert list(registry) == ["path", "outsider"]
    assert "outsider" in registry


def test_a_name_is_not_taken_twice() -> None:
    registry = Registry("thing", {"path": "pathlib:Path"})
    with pytest.raises(UserError, match="already registered"):
        registry.register("path", Outsider)
