"""Load on a server, and harm to its processes at random moments of it: what test_serve_ranks.py judges by."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

_CLIENTS = 3
BODIES: tuple[dict[str, Any], ...] = tuple(
    {"prompt": prompt, "temperature": temperature, "seed": 7, "max_tokens": 24, "ignore_eos": True}
    for prompt in ("Once upon a time", "The little dog ran to the river and", "Tom and Lily were")
    for temperature in (0.0, 0.8)
)
_AGAIN_SECONDS = 0.05  # until a client that was refused asks again
_SPELLS, _SPELL_SECONDS = 3, 0.3  # a slow rank: so many stops of that length
KILLED, FROZEN, SLOWED = "killed", "frozen", "slowed"


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    pid: int
    is_engine: bool  # rank 0
    after: int  # parts of streams seen by clients before it happens

    @property
    def is_deadly(self) -> bool:
        return self.kind != SLOWED


class Harm:
    """Every kind of fault to every rank in turn, in random order and at random moments."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._planned: list[tuple[str, bool]] = []

    def next(self, engine: int, rank: int) -> Fault:
        if not self._planned:
            self._planned = list(itertools.product((KILLED, FROZEN, SLOWED), (True, False)))
            self._random.shuffle(self._planned)
        kind, is_engine = self._planned.pop()
        return Fault(kind, engine if is_engine else rank, is_engine, self._random.randrange(1, 120))

    def strike(self, fault: Fault) -> None:
        if fault.kind == KILLED:
            os.kill(fault.pid, signal.SIGKILL)
        elif fault.kind == FROZEN:
            os.kill(fault.pid, signal.SIGSTOP)
        else:
            for _ in range(_SPELLS):
                os.kill(fault.pid, signal.SIGSTOP)
                threading.Event().wait(_SPELL_SECONDS * self._random.random())
                os.kill(fault.pid, signal.SIGCONT)


def engine_of(rank: int) -> int:
    """The parent of a rank's process."""
    return int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])


@dataclass(slots=True)
class Load:
    """Clients that ask one request after the other and compare each answer with the one from before all faults."""

    url: str
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0  # seconds from a fault to the end of a request that was under way
    _right: list[str] = field(default_factory=list)
    _flying: set[int] = field(default_factory=set)
    _news: threading.Condition = field(default_factory=threading.Condition)
    _events: int = 0
    _stopped: bool = False
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        for body in BODIES:
            text, end = ask(self.url, body, lambda: None)
            assert end == "finished", end
            self._right.append(text)
        numbers = itertools.count()
        self._threads = [threading.Thread(target=self._go_on, args=(numbers,)) for _ in range(_CLIENTS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a request hangs"

    def after_events(self, count: int) -> frozenset[int]:
        """Once clients have seen so many more parts of streams; the requests that are under way then."""
        with self._news:
            aim = self._events + count
            assert self._news.wait_for(lambda: self._events >= aim, 60), "the load stands still"
            return frozenset(self._flying)

    def drain(self, requests: frozenset[int]) -> None:
        """Until all of these have ended."""
        began = time.monotonic()
        with self._news:
            assert self._news.wait_for(lambda: not requests & self._flying, 60), "a request hangs"
        self.slowest = max(self.slowest, time.monotonic() - began)

    def _go_on(self, numbers: itertools.count[int]) -> None:
        while not self._stopped:
            number = next(numbers)
            with self._news:
                self._flying.add(number)
            which = number % len(BODIES)
            text, end = ask(self.url, BODIES[which], self._saw)
            right = self._right[which]
            with self._news:
                self.outcomes[end] += 1
                if not (text == right if end == "finished" else right.startswith(text)):
                    self.wrong.append(f"{text!r} instead of {right!r}")
                self._flying.discard(number)
                self._news.notify_all()
            if end == "refused":
                threading.Event().wait(_AGAIN_SECONDS)

    def _saw(self) -> None:
        with self._news:
            self._events += 1
            self._news.notify_all()


def ask(url: str, body: dict[str, Any], saw: Callable[[], None]) -> tuple[str, str]:
    """The text and how the stream ended: finished, failed and refused are clean; anything else is not."""
    text, end = "", "ended without a word"
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as answer:
            if answer.status_code != 200:
                message = json.loads(answer.read())["error"]["message"]
                return "", "refused" if answer.status_code == 503 and message else f"status {answer.status_code}"
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                part = json.loads(line[6:])
                if "error" in part:
                    return text, "failed" if part["error"]["message"] else "failed without a reason"
                for choice in part["choices"]:
                    text += choice["text"]
                    if choice["finish_reason"]:
                        end = "finished"
                saw()
    except (httpx.HTTPError, ValueError, KeyError) as error:
        end = repr(error)
    return text, end
