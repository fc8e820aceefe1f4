"""The contract of a tier: keeps pages by key, gives them back whole or not at all.

A key names a page's content for good (model, KV dtype, layout, all tokens up to the page, KV group), so an entry is
never overwritten and never stale. Tiers know bytes, not tensors or requests. `holds` is asked by the engine thread;
everything that may wait is called by the tier's own two threads (guard.py): `put` by the writing one, the rest by the
reading one. A tier guards its own state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from tokenmill.engine.stats import TierStats


class TierUnavailableError(Exception):
    """The storage behind a tier fails, is off, or does not answer in time."""


class PageTier(ABC):
    """`open`, `refresh`, `has`, `get` and `put` raise OSError or TierUnavailableError where the storage fails; the
    breaker then leaves the tier alone for a while."""

    name: str
    remote: bool = False  # `has` needs a round trip; else the engine thread asks it too, and it must not wait

    def __init__(self) -> None:
        self.stats = TierStats(self.name)

    def open(self) -> None:  # noqa: B027
        """Make the storage ready. Called until it succeeds, and before anything else."""

    def refresh(self) -> None:  # noqa: B027
        """Called at intervals: take in what other processes changed."""

    @abstractmethod
    def holds(self, key: bytes) -> bool:
        """Whether the page is stored already, as far as can be told without waiting."""

    @abstractmethod
    def has(self, keys: list[bytes]) -> list[bool]:
        """Which of these pages could be asked for."""

    @abstractmethod
    def get(self, key: bytes) -> memoryview | None:
        """The page as writable bytes in memory, verified; None if it is not there or not right."""

    @abstractmethod
    def put(self, key: bytes, data: memoryview) -> None:
        """Keep a page."""

    def interrupt(self) -> None:  # noqa: B027
        """A call has passed its deadline: end it if that is possible. Called by another thread than the call's."""

    def close(self) -> None:  # noqa: B027
        """Close connections and files."""


class PageExport(Protocol):
    """Copies of pages, perhaps still on their way to host memory."""

    def wait(self) -> list[memoryview]: ...


class PageAccess(Protocol):
    """What the tiers need of a KV store. Called by the engine thread."""

    def export_pages(self, pages: Sequence[int]) -> PageExport: ...

    def import_pages(self, pages: Sequence[int], data: Sequence[memoryview]) -> None: ...
