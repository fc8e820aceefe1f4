"""Which pages came into the prefix cache and left it, by name: what a router is told.

A page counts while the groups without a window have it: a window alone is no prefix. Changes are kept as their net
effect until somebody takes them. Written by the prefix tree; knows neither requests nor processes.
"""

from __future__ import annotations


class PageLog:
    def __init__(self) -> None:
        self._changes: dict[bytes, bytes | None] = {}  # name -> parent's name, or None: it left

    def stored(self, name: bytes, parent: bytes) -> None:
        self._changes[name] = parent

    def removed(self, name: bytes) -> None:
        self._changes[name] = None

    def take(self) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
        """([(name, parent's name)] that came, names that left) since the last time."""
        if not self._changes:
            return [], []
        changes, self._changes = self._changes, {}
        came = [(name, parent) for name, parent in changes.items() if parent is not None]
        return came, [name for name, parent in changes.items() if parent is None]
