"""A load: pages of one prefix on their way from a tier to the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_LOAD_SECONDS = 5.0  # until the engine takes a load from a tier as failed


@dataclass(eq=False)
class Load:
    """A thread beside the loop fills it in; the engine thread reads it once `done` is set."""

    keys: list[bytes]  # that would help, in order of use
    choose: Callable[[set[bytes]], list[bytes]]  # those found -> those to fetch, in order
    num_tokens: Callable[[list[bytes]], int]  # how many tokens these save
    pages: dict[bytes, memoryview] = field(default_factory=dict)
    tiers: dict[bytes, str] = field(default_factory=dict)  # where each came from
    reason: str = ""  # "", "slower" or "tier_failed"
    problem: str = ""  # of a peer: a word for why no more came
    from_peer: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False  # nobody waits for it any more
    abandoned: bool = False  # because its request is gone
    interrupt: Callable[[], None] = lambda: None  # ends what its thread waits for
    limit: float = MAX_LOAD_SECONDS
    began: float = field(default_factory=time.monotonic)

    @property
    def expired(self) -> bool:
        """Whether it has taken so long that its request is better computed."""
        return not self.done.is_set() and time.monotonic() - self.began > self.limit

    @property
    def pending(self) -> bool:
        """Whether there is something to wait for."""
        return not self.done.is_set() and not self.cancelled and not self.expired

    def cancel(self) -> None:
        self.cancelled = True
        self.interrupt()

    def fail(self, problem: str) -> None:
        """No more pages come; those that came count."""
        self.reason, self.problem = "tier_failed", self.problem or problem
