"""The contract of a budget policy: which pages of its own a request gives up when it holds more than it asked for.

Lossy, and therefore only on request. A page goes as a whole, from all layers. What is kept stays as it was computed,
with the rotation of its original position; only the count of keys before a query shrinks. Pages go at moments that
depend on the request alone: when its prompt is computed and whenever its tokens begin a new page. So the same request
gives the same tokens alone, in a batch and after preemption. The KV manager calls this; scores come from the runtime.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from tokenmill.types import Request

SINK_TOKENS = 4  # as in StreamingLLM: without the first tokens the softmax loses its anchor

NORMS = "norms"
ATTENTION = "attention"


class PageScores(Protocol):
    """What the runtime knows about the pages of a request, one number per entry of its tables."""

    kinds: frozenset[str]  # of NORMS and ATTENTION: which scores it can give

    def keep(self, kind: str) -> None:
        """Start to keep scores of this kind: the first request that needs them has come."""
        ...

    def scores(self, kind: str, request: Request, tables: tuple[list[int], ...], count: int) -> list[float]:
        """Of the first `count` entries, which are full and computed. Higher is worth more."""
        ...

    def dropped(self, request: Request, entries: Sequence[int]) -> None:
        """These entries left the tables (ascending, numbered as before)."""
        ...

    def released(self, request: Request) -> None:
        """The request holds nothing any more."""
        ...


class NoScores:
    """For engines that keep no tensors."""

    kinds: frozenset[str] = frozenset()

    def keep(self, kind: str) -> None: ...

    def scores(self, kind: str, request: Request, tables: tuple[list[int], ...], count: int) -> list[float]:  # noqa: ARG002
        raise AssertionError(f"nobody gives {kind} scores here")

    def dropped(self, request: Request, entries: Sequence[int]) -> None: ...

    def released(self, request: Request) -> None: ...


class BudgetPolicy(ABC):
    score: ClassVar[str] = ""  # which score it needs; "": none

    def __init__(self, page_size: int, num_recent: int) -> None:
        """`num_recent`: last full pages that must stay because a layer's window sees them."""
        self.num_sinks = -(-SINK_TOKENS // page_size)
        self.num_recent = max(1, num_recent)

    @property
    def min_pages(self) -> int:
        """The smallest budget that leaves something to choose: sinks, recent pages, one more, and the one written."""
        return self.num_sinks + self.num_recent + 2

    def victims(self, num_full: int, excess: int, budget: int, scores: Sequence[float]) -> list[int]:
        """Which `excess` of the `num_full` computed pages go, ascending. `budget` is in pages; `scores` has one entry
        per full page if the policy asked for scores."""
        end = num_full - self.recent(budget)
        assert self.num_sinks + excess <= end, "a budget below min_pages"
        return sorted(self.choose(range(self.num_sinks, end), excess, scores))

    def recent(self, budget: int) -> int:  # noqa: ARG002
        """How many of the last full pages are never given up."""
        return self.num_recent

    @abstractmethod
    def choose(self, candidates: range, excess: int, scores: Sequence[float]) -> Sequence[int]:
        """`excess` of the candidate pages: those to give up."""


def lowest(candidates: range, excess: int, scores: Sequence[float]) -> Sequence[int]:
    """The candidates with the lowest scores; of equals, the oldest."""
    return sorted(candidates, key=lambda page: (scores[page], page))[:excess]
