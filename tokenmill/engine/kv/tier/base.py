"""The contract of a tier: keeps pages by key, gives them back whole or not at all.

A key names a page's content for good (model, KV dtype, layout, all tokens up to the page, KV group), so an entry is
never overwritten and never stale. Tiers know bytes, not tensors or requests. `has` and `holds` are asked by the engine
thread, `get` by the loading thread, `put` by the writing thread: a tier guards its own state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from tokenmill.engine.stats import TierStats


class PageTier(ABC):
    name: str
    remote: bool = False  # `has` needs a round trip: only the loading thread asks

    def __init__(self) -> None:
        self.stats = TierStats(self.name)

    @abstractmethod
    def holds(self, key: bytes) -> bool:
        """Whether the page is stored already, as far as can be told without waiting."""

    @abstractmethod
    def has(self, keys: list[bytes]) -> list[bool]:
        """Which of these pages could be asked for."""

    @abstractmethod
    def get(self, key: bytes) -> memoryview | None:
        """The page as writable bytes, verified; None if it is not there or not right."""

    @abstractmethod
    def put(self, key: bytes, data: memoryview) -> None:
        """Keep a page. What goes wrong is counted and logged, not raised: the page can be computed again."""

    def close(self) -> None:  # noqa: B027
        """Close connections and files."""


class PageAccess(Protocol):
    """What the tiers need of a KV store."""

    def export_page(self, page: int) -> memoryview: ...

    def import_page(self, page: int, data: memoryview) -> None: ...
