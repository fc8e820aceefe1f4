"""Which neighbouring rows of a decode step begin with the same pages, so that attention can read these once for all.

Knows page tables only. Used by inputs.py, which keeps rows with the same first page adjacent.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

MAX_RUNS = 64  # of one step
_MIN_SAVED_READS = 16384  # keys per layer that shared prefixes must save to pay for two more launches
_MIN_SAVED_BY_RUN = 512  # below it, a run's own pass over its prefix costs what it saves


class PrefixRun(NamedTuple):
    """Rows [first, past) have their first `tokens` tokens, whole pages, in common."""

    first: int
    past: int
    tokens: int

    @property
    def saved(self) -> int:
        """Keys that need not be read again."""
        return (self.past - self.first - 1) * self.tokens


def find_runs(page_ids: Sequence[list[int]], positions: Sequence[int], page_size: int) -> list[PrefixRun]:
    """Runs that are worth it, by row: one where it saves most of what all of them do (its kernels are faster), else up
    to MAX_RUNS, else none. Pages from the position of a row on do not count: this step writes to them, perhaps by
    several rows."""
    runs = []
    for _, rows in groupby(range(len(page_ids)), key=lambda row: page_ids[row][0]):
        first, *others = rows
        if others:
            past = others[-1] + 1
            tables, written = page_ids[first:past], min(positions[first:past]) // page_size
            runs.append(PrefixRun(first, past, min(_common(tables), written) * page_size))
    runs = [run for run in runs if run.saved >= _MIN_SAVED_BY_RUN]
    if sum(run.saved for run in runs) < _MIN_SAVED_READS:
        return []
    best = max(runs, key=lambda run: run.saved)
    if 2 * best.saved > sum(run.saved for run in runs):
        return [best] if best.saved >= _MIN_SAVED_READS else []
    return sorted(sorted(runs, key=lambda run: -run.saved)[:MAX_RUNS])


def _common(tables: Sequence[list[int]]) -> int:
    """Leading pages that all tables share: what the smallest and the largest have in common, all between them have."""
    low, high = min(tables), max(tables)
    return next((n for n, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
