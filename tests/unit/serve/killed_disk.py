"""A disk under which the process is killed at the n-th change: half of a write is done, and nothing after it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tokenmill.serve.batches import journal
from tokenmill.serve.files import disk, store

_CHANGES = ("write", "replace", "fsync", "unlink", "ftruncate")


class KilledError(BaseException):
    """Not an Exception: nothing may handle it."""


class KilledDisk:
    """Stands for the module `os` in what writes files."""

    def __init__(self, number: int) -> None:
        self.left = number

    @property
    def dead(self) -> bool:
        return self.left < 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in _CHANGES:
            return real

        def change(*arguments: Any) -> Any:
            self.left -= 1
            if not self.dead:
                return real(*arguments)
            if self.left == -1 and name == "write":
                os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            raise KilledError

        return change

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (journal, disk, store):
            monkeypatch.setattr(module, "os", self)
