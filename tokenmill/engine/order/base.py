"""The contract of a queue discipline: which request runs first, and which may preempt which.

A discipline sees one request (or two) at a time; the scheduler asks for a key once, when a request arrives, and tells
what each one costs. Most keep no state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from tokenmill.types import Request


class Discipline(ABC):
    @abstractmethod
    def key(self, request: Request) -> tuple[int, ...]:
        """Sort key, lower runs first. Always of the same length, and constant while the request lives."""

    def outranks(self, waiting: Request, running: Request) -> bool:  # noqa: ARG002
        """Whether `waiting` may preempt `running` to get its slot or pages. It sorts before it then."""
        return False

    def charge(self, request: Request, num_tokens: int) -> None:  # noqa: B027
        """`num_tokens` of this request were computed."""

    def leave(self, request: Request) -> None:  # noqa: B027
        """The request has ended, by itself or by cancellation."""
