"""Where a process sits in a grid of ranks, and how rank 0 reaches the others.

A `Link` carries frames between rank 0 and one other rank. A `Crew` is rank 0's view of all of them: it tells each the
same messages in the same order, lets them agree on numbers, and knows why one of them stopped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.hardware.sharding import Place
from tokenmill.model.group import Group, RankError
from tokenmill.runtime.ranks.wire import Broken, Compare, Message, Names, Numbers, Stop, decode, encode

COMPARED_EVERY = 64  # steps: the exchanges of all ranks of a stage are compared


class Link(ABC):
    """One end of a line between rank 0 and another rank."""

    @abstractmethod
    def send(self, frame: bytes) -> None: ...

    @abstractmethod
    def receive(self, timeout: float | None = None) -> bytes:
        """Waits for a frame. Raises EOFError when the other end is gone, or nothing came for `timeout` seconds."""


class Crew(ABC):
    """The other ranks, as rank 0 sees them."""

    def __init__(self, links: Sequence[Link], timeout: float | None = None) -> None:
        """`timeout`: seconds within which a rank that computes must answer."""
        self._links = links  # of ranks 1, 2, ...
        self._timeout = timeout
        self._since = 0

    def tell(self, message: Message, ranks: Sequence[int] = ()) -> None:
        """All ranks, or these."""
        self.tell_frame(encode(message), ranks)

    def tell_frame(self, frame: bytes, ranks: Sequence[int] = ()) -> None:
        """A message that was encoded before."""
        for rank, link in enumerate(self._links, 1):
            if not ranks or rank in ranks:
                try:
                    link.send(frame)
                except (OSError, ValueError) as error:
                    raise self.failure(RankError(f"rank {rank} cannot be reached: {error}")) from None

    def hear(self, rank: int, timeout: float | None = None) -> Numbers | Names:
        try:
            answer = decode(self._links[rank - 1].receive(timeout))
        except (EOFError, OSError):
            raise self.failure(RankError(f"rank {rank} does not answer")) from None
        if isinstance(answer, Broken):
            raise self.failure(RankError(f"rank {rank}: {answer.reason}"))
        assert isinstance(answer, Numbers | Names), answer
        return answer

    def hear_numbers(self, rank: int, timeout: float | None = None) -> list[int]:
        answer = self.hear(rank, timeout)
        assert isinstance(answer, Numbers), answer
        return answer.values

    def collect_names(self) -> set[str]:
        """Those of all other ranks."""
        every = [self.hear(rank).values for rank in range(1, len(self._links) + 1)]
        return {str(name) for values in every for name in values}

    def agree(self, values: Sequence[int]) -> list[int]:
        """The least of every rank's numbers, one by one."""
        every = [list(values), *(self.hear_numbers(rank) for rank in range(1, len(self._links) + 1))]
        least = [min(each) for each in zip(*every, strict=True)]
        self.tell(Numbers(least))
        return least

    def compare(self, trace: int, team: Sequence[int]) -> None:
        """Now and then: that the ranks of rank 0's stage made the same exchanges."""
        self._since += 1
        if self._since < COMPARED_EVERY or len(team) == 1:
            return
        self._since = 0
        others = [rank for rank in team if rank]
        self.tell(Compare(), others)
        for rank in others:
            (found,) = self.hear_numbers(rank, self._timeout)
            if found != trace:
                raise self.failure(RankError(f"rank {rank} made other exchanges than rank 0: traces {found}, {trace}"))

    @abstractmethod
    def failure(self, error: RankError) -> RankError:
        """The reason behind an error, as far as it can be known; the crew is ended."""

    def check(self) -> None:  # noqa: B027
        """Raise RankError if a rank has ended. For idle moments."""

    def stop(self) -> None:
        """Tell all to end, and wait a little."""
        for link in self._links:
            try:
                link.send(encode(Stop()))
            except (OSError, ValueError):
                continue


@dataclass(slots=True, eq=False)
class Seat:
    """A rank of a running grid: `crew` on rank 0, `link` to it on the others."""

    place: Place
    group: Group
    exact: bool
    crew: Crew | None = None
    link: Link | None = None

    def agree(self, values: Sequence[int]) -> list[int]:
        """The least of every rank's numbers, one by one. All ranks call it, however long each took until here."""
        if self.crew is not None:
            return self.crew.agree(values)
        assert self.link is not None
        self.link.send(encode(Numbers(list(values))))
        answer = decode(self.link.receive())
        if not isinstance(answer, Numbers):
            raise RankError("rank 0 could not load its part")
        return answer.values

    def collect_names(self, names: Sequence[str]) -> set[str]:
        """On rank 0 the names of all ranks; on the others their own. All ranks call it."""
        if self.crew is not None:
            return {*names, *self.crew.collect_names()}
        assert self.link is not None
        self.link.send(encode(Names(list(names))))
        return set(names)
