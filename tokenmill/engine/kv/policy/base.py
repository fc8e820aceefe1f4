"""The contract of an eviction policy: which cached page goes first when a new one is needed.

A policy sees page numbers and the order of calls, never tokens, requests or the tree. The page pool calls it: `add`
when the last holder of a cached page lets go, `remove` when a request takes the page again or it leaves the cache, and,
for policies that count, `use` at every holder more and `forget` once the page means something else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator


class EvictionPolicy(ABC):
    """Holds the cached pages that nobody uses. Every method is O(1) (iteration is for checks only)."""

    @abstractmethod
    def add(self, page: int) -> None:
        """The page is cached and now unused. It is not in the policy yet."""

    @abstractmethod
    def remove(self, page: int) -> None:
        """The page is used again or no longer cached. It is in the policy."""

    @abstractmethod
    def victim(self) -> int | None:
        """The page to evict next, None only if the policy is empty. It stays until `remove`."""

    def use(self, page: int) -> None:  # noqa: B027
        """One request more takes the cached page, whether others hold it or not. It is not in the policy."""

    def forget(self, page: int) -> None:  # noqa: B027
        """The page is no longer cached. It is not in the policy."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[int]: ...
