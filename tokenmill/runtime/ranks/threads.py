"""Ranks as threads of one process that take turns: the same code and messages as between processes, quick to start.

For tests and for trying a division out: nothing runs at the same time, since the C++ kernels have one pool of threads
per process. One lock is the turn; whoever waits for another rank gives it away. Rank 0 is whoever made the crew, in
whichever thread it goes on, and holds the turn whenever it does not wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tokenmill.hardware.sharding import Grid, Place
from tokenmill.model.group import Group, RankError
from tokenmill.runtime.ranks.follower import report
from tokenmill.runtime.ranks.seat import Crew, Link, Seat

_PATIENCE = 60.0  # seconds: a test that hangs ends


class _Board:
    """What the threads share: the turn, what was brought to exchanges, and lines between ranks."""

    def __init__(self) -> None:
        self.turn = threading.Condition(threading.Lock())  # rank 0 may go on in another thread
        self.brought: dict[Any, dict[int, Tensor]] = {}
        self.taken: dict[Any, int] = {}
        self.lines: dict[tuple[str, int, int], deque[Any]] = {}
        self.broken = False

    def line(self, kind: str, source: int, target: int) -> deque[Any]:
        return self.lines.setdefault((kind, source, target), deque())

    def wait(self, ready: Callable[[], bool]) -> None:
        if not self.turn.wait_for(lambda: ready() or self.broken, _PATIENCE):
            raise RankError("another rank does not come")

    def put(self, line: deque[Any], item: Any) -> None:
        line.append(item)
        self.turn.notify_all()

    def take(self, line: deque[Any]) -> Any:
        self.wait(lambda: bool(line))
        if not line:
            raise RankError("another rank has ended")
        return line.popleft()


class ThreadGroup(Group):
    def __init__(self, board: _Board, place: Place) -> None:
        self.size, self.part, self.team, self._rank = place.team_size, place.part, place.team, place.rank
        self._board = board
        self._calls = 0

    def collect(self, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        board, key = self._board, (self.team, self._calls)
        self._calls += 1
        assert x.shape[-1] == widths[self.part], (x.shape, widths)
        brought = board.brought.setdefault(key, {})
        brought[self.part] = x.clone()
        board.turn.notify_all()
        board.wait(lambda: len(brought) == self.size)
        if len(brought) < self.size:
            raise RankError("another rank has ended")
        board.taken[key] = board.taken.get(key, 0) + 1
        if board.taken[key] == self.size:
            del board.brought[key], board.taken[key]
        return [brought[part] for part in range(self.size)]

    def send(self, x: Tensor, rank: int, number: int) -> None:
        self._board.put(self._board.line("tensors", self._rank, rank), (number, x.clone()))

    def receive(self, shape: Sequence[int], rank: int, number: int) -> Tensor:
        sent: tuple[int, Tensor] = self._board.take(self._board.line("tensors", rank, self._rank))
        assert (sent[0], sent[1].shape) == (number, tuple(shape)), (sent[0], sent[1].shape, shape)
        return sent[1]


class ThreadLink(Link):
    def __init__(self, board: _Board, rank: int, other: int) -> None:
        self._board, self._rank, self._other = board, rank, other

    def send(self, frame: bytes) -> None:
        self._board.put(self._board.line("frames", self._rank, self._other), frame)

    def receive(self, timeout: float | None = None) -> bytes:  # noqa: ARG002 (nobody can hang for long here)
        try:
            frame: bytes = self._board.take(self._board.line("frames", self._other, self._rank))
        except RankError:
            raise EOFError from None
        return frame


class ThreadCrew(Crew):
    """`follow(seat)` is what each other rank does: load its part, then obey."""

    def __init__(self, grid: Grid, exact: bool, follow: Callable[[Seat], None]) -> None:
        self._board = _Board()
        super().__init__([ThreadLink(self._board, 0, rank) for rank in range(1, grid.size)])
        self.errors: list[BaseException] = []
        self.seat = Seat(grid.place(0), ThreadGroup(self._board, grid.place(0)), exact, crew=self)
        self._board.turn.acquire()
        self._threads = [
            threading.Thread(target=self._run, args=(grid.place(rank), exact, follow), daemon=True)
            for rank in range(1, grid.size)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, place: Place, exact: bool, follow: Callable[[Seat], None]) -> None:
        link = ThreadLink(self._board, place.rank, 0)
        seat = Seat(place, ThreadGroup(self._board, place), exact, link=link)
        with self._board.turn:
            try:
                follow(seat)
            except BaseException as error:
                self.errors.append(error)
                report(link, error)
                self._board.broken = True
                self._board.turn.notify_all()

    def failure(self, error: RankError) -> RankError:
        return error if not self.errors else RankError(f"{error}: {self.errors[0]!r}")

    def stop(self) -> None:
        super().stop()
        self._board.turn.release()
        for thread in self._threads:
            thread.join(_PATIENCE)
