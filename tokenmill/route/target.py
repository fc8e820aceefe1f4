"""What a router knows of one replica: the pages it has or will have, and what it has to do.

Load is what this router's own open requests add up to (`Ticket`), so that no health check and no lost message can
change it; the replica's reports add what others sent it, and how long things take there. Pages follow the replica's
events; those of requests that are on their way count as pending, until the event comes or half a minute has passed.
Pure bookkeeping with a clock that is passed in: the router and the simulator use the same class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tokenmill.route.prompt import PageRoot, Prompt

PENDING_SECONDS = 30.0
_PROMPT_TOKEN_SECONDS = 1e-3  # before the replica has measured it: only differences matter then


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a replica says of itself."""

    slots: int = 0  # sequences that it computes at once; 0: not known
    active: int = 0  # sequences that it has, waiting ones too
    waiting: int = 0  # of these, prompts without a first token
    waiting_tokens: int = 0  # of these
    prompt_token_seconds: float = 0.0  # 0: not measured
    service_seconds: float = 0.0  # from the first to the last token of a request
    kv_usage: float = 0.0


class Pages:
    """The names of the pages of one replica."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.stored: set[bytes] = set()
        self.pending: dict[bytes, float] = {}  # -> until when

    def matched(self, names: list[bytes]) -> int:
        """How many of these, from the first on."""
        stored, pending, now = self.stored, self.pending, self._clock()
        for number, name in enumerate(names):
            if name not in stored and pending.get(name, -1.0) < now:
                return number
        return len(names)

    def expect(self, names: list[bytes]) -> None:
        until = self._clock() + PENDING_SECONDS
        self.pending.update((name, until) for name in names if name not in self.stored)

    def forget(self, names: list[bytes]) -> None:
        """Of a request that failed there: they will not come."""
        for name in names:
            self.pending.pop(name, None)

    def apply(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        for name in stored:
            self.stored.add(name)
            self.pending.pop(name, None)
        for name in removed:
            self.stored.discard(name)
            self.pending.pop(name, None)

    def drop_expired(self) -> None:
        now = self._clock()
        for name in [name for name, until in self.pending.items() if until < now]:
            del self.pending[name]


class Target:
    """A Candidate of the policies."""

    def __init__(self, number: int, clock: Callable[[], float]) -> None:
        self.number = number
        self.root = b""
        self.page_size = 0
        self.pages = Pages(clock)
        self.report = LoadReport()
        self.outstanding = 0
        self.outstanding_tokens = 0
        self.waiting = 0  # of our requests, those without a first token
        self.waiting_tokens = 0  # of these, tokens that must be computed
        self._foreign_tokens = 0.0  # that others sent it, as of the last report
        self._foreign_active = 0

    def take(self, report: LoadReport) -> None:
        self.report = report
        others = max(0, report.waiting - self.waiting)
        self._foreign_tokens = others * report.waiting_tokens / report.waiting if others else 0.0
        self._foreign_active = max(0, report.active - self.outstanding)

    def names_of(self, prompt: Prompt) -> list[bytes]:
        return prompt.names(*self._root_of(prompt))

    def _root_of(self, prompt: Prompt) -> PageRoot:
        return prompt.roots.get(self.number, (self.root, self.page_size))

    def matched_tokens(self, prompt: Prompt) -> int:
        return self.pages.matched(self.names_of(prompt)) * self._root_of(prompt)[1]

    def wait_seconds(self, uncached: int) -> float:
        report = self.report
        each = report.prompt_token_seconds or _PROMPT_TOKEN_SECONDS
        seconds = (self.waiting_tokens + self._foreign_tokens + uncached) * each
        if report.slots:
            to_finish = max(0, self.outstanding + self._foreign_active + 1 - report.slots)
            seconds += to_finish * report.service_seconds / report.slots
        return seconds

    def open(self, prompt: Prompt, max_tokens: int = 0) -> Ticket:
        """A request is on its way: it counts here until its ticket is closed, and so do its pages."""
        names = self.names_of(prompt)
        matched, page_size = self.pages.matched(names), self._root_of(prompt)[1]
        ticket = Ticket(self, max(1, prompt.num_tokens - matched * page_size), prompt.num_tokens + max_tokens)
        ticket.matched = matched * page_size
        ticket.pending = names[matched:]
        self.pages.expect(ticket.pending)
        return ticket


@dataclass(slots=True, eq=False)
class Ticket:
    """What an open request adds to the load of its replica. Closing it twice is harmless."""

    target: Target
    uncached: int
    tokens: int
    pending: list[bytes] = field(default_factory=list)
    matched: int = 0
    _waits: bool = True
    _open: bool = True

    def __post_init__(self) -> None:
        target = self.target
        target.outstanding += 1
        target.outstanding_tokens += self.tokens
        target.waiting += 1
        target.waiting_tokens += self.uncached

    def started(self) -> None:
        """It has its first token."""
        if self._waits:
            self._waits = False
            self.target.waiting -= 1
            self.target.waiting_tokens -= self.uncached

    def close(self, failed: bool = False) -> None:
        if self._open:
            if failed and self._waits:
                self.target.pages.forget(self.pending)
            self.started()
            self._open = False
            self.target.outstanding -= 1
            self.target.outstanding_tokens -= self.tokens
