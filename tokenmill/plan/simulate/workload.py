"""What is sent to the simulated engines: arrivals in order of time, or users in a closed loop.

An `Arrival` has lengths and perhaps shared blocks, never text. Owns speed-up, limit and repetition; traces.py and
synthetic.py make the rows. Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from tokenmill.bench.trace_rows import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Arrival:
    number: int  # unique in a workload, in order
    ms: float  # since the first one
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # equal ids are equal tokens
    block_tokens: int = BLOCK_TOKENS

    def prompt_ids(self) -> list[int]:
        """Token ids that are equal where blocks are equal and this request's own elsewhere."""
        own = -1 - self.number
        if not self.blocks:
            return [own] * self.prompt_tokens
        ids: list[int] = []
        for block in self.blocks:
            ids += [block] * self.block_tokens
        return (ids + [own] * max(0, self.prompt_tokens - len(ids)))[: self.prompt_tokens]


@dataclass(frozen=True, slots=True)
class Workload:
    """`arrivals()` starts over at each call. With `users`, times are ignored: each user sends on completion."""

    name: str
    arrivals: Callable[[], Iterator[Arrival]]
    users: int = 0


def adjusted(arrivals: Iterable[Arrival], speedup: float, limit: int, repeat: int = 1) -> Iterator[Arrival]:
    """The same load `speedup` times as fast, `repeat` times in a row, at most `limit` requests (0: all)."""
    rows: Iterator[Arrival] = iter(arrivals)
    if repeat > 1:
        rows = _repeated(rows, repeat)
    for arrival in islice(rows, limit or None):
        yield arrival if speedup == 1.0 else replace(arrival, ms=arrival.ms / speedup)


def _repeated(rows: Iterator[Arrival], times: int) -> Iterator[Arrival]:
    """Each round follows the last by its mean interval; blocks stay the same, so later rounds hit the prefix cache."""
    kept = list(rows)
    if not kept:
        return
    period = kept[-1].ms * (1 + 1 / max(1, len(kept) - 1))
    for turn in range(times):
        for arrival in kept:
            number = turn * len(kept) + arrival.number
            yield replace(arrival, number=number, ms=arrival.ms + turn * period) if turn else arrival
