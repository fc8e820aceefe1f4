"""The Pareto front: what no other item beats in every respect at once. Called by the search and by reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def pareto_front(items: Iterable[T], axes: Callable[[T], tuple[float, ...]]) -> list[T]:
    """Items whose `axes` (less is better in each) no other item matches or beats everywhere; equal ones all stay.
    Ordered by the axes, first to last."""
    placed = [(axes(item), item) for item in items]
    distinct = {place for place, _ in placed}

    def beaten(place: tuple[float, ...]) -> bool:
        return any(other != place and all(o <= p for o, p in zip(other, place, strict=True)) for other in distinct)

    front = [(place, item) for place, item in placed if not beaten(place)]
    return [item for _, item in sorted(front, key=lambda pair: pair[0])]
