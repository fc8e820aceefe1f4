"""Records of decode steps on a GPU: what fixes the launches of one, what was captured of it, what was launched.

And the batch sizes that steps are padded to, and how a step is captured. Knows no model. Used by the graph executor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenmill.runtime.executors.cuda.checks import Expected
from tokenmill.runtime.executors.cuda.prefix_runs import MAX_RUNS
from tokenmill.runtime.executors.cuda.step_features import RowReports
from tokenmill.types import Request, ScheduledTokens

SMALL_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_BUCKET_STEP = 32
_MANY_ROWS = 16  # of a step that is prepared for many prefixes


@dataclass(frozen=True, slots=True)
class StepKind:
    """What fixes the launches of a step. Lengths do not: the kernels read them on the device."""

    rows: int
    prefixes: int  # that rows share, at most: 0, 1 or MAX_RUNS
    filtered: bool  # some rows use top-k, top-p or min-p
    guesses: bool = False  # a draft head computes the next drafts
    adapted: bool = False  # some rows have adapters
    penalized: bool = False  # some rows have penalties


def decode_kinds(sizes: Sequence[int], can_share: bool) -> list[StepKind]:
    """Kinds of decode steps to prepare, the likeliest last."""
    least_rows = {0: 1, 1: 2, MAX_RUNS: _MANY_ROWS} if can_share else {0: 1}
    kinds = [StepKind(rows, each, filtered) for each in least_rows for filtered in (False, True) for rows in sizes]
    return [kind for kind in reversed(kinds) if kind.rows >= least_rows[kind.prefixes]]


@dataclass(slots=True, eq=False)
class CapturedStep:
    graph: torch.cuda.CUDAGraph | None  # None: not captured, has run eagerly once
    logits: Tensor
    hidden: Tensor | None


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step that was launched: its rows, the pages they write to, and the buffers its results arrive in."""

    row_of: dict[Request, int]
    positions: list[int]  # by row
    pages: list[tuple[int, ...]]  # by row and KV group: the page that the row's token is written to
    ids: Tensor  # [rows], pinned: the sampled tokens, once `event` has happened
    event: torch.cuda.Event | None
    hidden: Tensor | None  # a copy: the next step of this kind overwrites the original
    num_rows: int
    drafts: Tensor | None = None  # [rows, depth], pinned, valid with `ids`
    reports: RowReports | None = None  # log-probabilities, valid with `ids`
    adapter_slots: list[int] = field(default_factory=list)  # by row
    held: bool = False  # its rows' tokens are drawn behind it, by the sampler: `ids` are not theirs
    expected: Expected = field(default_factory=list)  # of a queued verification: the rows it was launched for

    def find(self, rows: Sequence[ScheduledTokens], page_size: int) -> list[int] | None:
        """The row in this step of each planned row; None if one is missing or wrote its token to another page."""
        numbers = []
        for row in rows:
            number = self.row_of.get(row.request, -1)
            if number < 0 or self.positions[number] != row.start or self.adapter_slots[number] != row.adapter_slot:
                return None
            if self.pages[number] != tuple(table[row.start // page_size] for table in row.block_tables):
                return None
            numbers.append(number)
        return numbers

    def tokens(self) -> list[int]:
        if self.event is not None:
            self.event.synchronize()
        ids: list[int] = self.ids[: self.num_rows].tolist()
        return ids


def continuing(
    rows: Sequence[ScheduledTokens], sources: Sequence[int], page_size: int, context: int
) -> list[tuple[ScheduledTokens, int]]:
    """The rows that the step after this one will have, with their sources; none if that cannot be told."""
    found = []
    for row, source in zip(rows, sources, strict=True):
        request, position = row.request, row.start + 1
        if request.num_output_tokens + 1 >= request.params.max_tokens or position + 1 >= context:
            continue
        if position // page_size >= len(row.block_tables[0]):
            return []
        if request.params.n > 1 and not request.forked:
            return []  # its siblings join in the next step
        found.append((row, source))
    return found


def buckets(max_rows: int) -> list[int]:
    """Batch sizes that steps are padded to; the last holds `max_rows`."""
    large = range(SMALL_BUCKETS[-1] + _BUCKET_STEP, max_rows + _BUCKET_STEP, _BUCKET_STEP)
    sizes = [*SMALL_BUCKETS, *large]
    return sizes[: next((n for n, size in enumerate(sizes) if size >= max_rows), len(sizes) - 1) + 1]


def record(step: Callable[[], None], stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph:
    """Capture what `step` launches, and run it."""
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        step()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    return graph
