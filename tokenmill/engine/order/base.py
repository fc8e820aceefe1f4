"""The contract of a queue discipline: which request runs first, and which may preempt which.

The scheduler asks for a key once, when a request arrives, and tells what each one costs and when it runs. The order by
key is all that most disciplines need: they keep no state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from tokenmill.engine.order.queue import RequestQueue
from tokenmill.types import Request


class Discipline(ABC):
    def __init__(self, max_slowdown: float = 0.0) -> None:
        """`max_slowdown`: how many times longer a tenant's steps may become by what other tenants send; 0: no limit."""
        self.max_slowdown = max_slowdown

    @abstractmethod
    def key(self, request: Request) -> tuple[int, ...]:
        """Sort key, lower runs first. Always of the same length, and constant while the request lives."""

    def outranks(self, waiting: Request, running: Request) -> bool:  # noqa: ARG002
        """Whether `waiting` comes before `running` in every respect, the tokens of a step included. It sorts before it
        then."""
        return False

    def next(self, waiting: RequestQueue) -> Request:
        """The request to admit next. There is one."""
        return waiting.at(0)

    def preemptible(self, waiting: Request, running: RequestQueue) -> list[Request]:
        """The running requests that may be preempted to let `waiting` start, the first to go first."""
        last = running.last() if len(running) else None
        if last is None or not self.outranks(waiting, last):
            return []
        return [other for other in reversed(running.snapshot()) if self.outranks(waiting, other)]

    def victim(self, running: RequestQueue) -> Request:
        """The running request that gives up its pages when one that runs too needs more. There is one."""
        return running.last()

    def prompt_share(self, request: Request, others: Sequence[Request]) -> float:  # noqa: ARG002
        """The share of a step's prompt tokens that the tenant of `request` gets before others have had theirs.
        `others`: the requests that want some, itself among them."""
        return 1.0

    @property
    def shares_steps(self) -> bool:
        """Whether `step_allowances` may limit anybody now."""
        return False

    def step_allowances(self, demands: Mapping[str, int]) -> dict[str, int]:  # noqa: ARG002
        """Tokens of the next step by tenant, where they are limited. `demands`: what each could use. Each has one."""
        return {}

    def record_step(self, counts: Mapping[str, int], seconds: float) -> None:  # noqa: B027
        """A step with these numbers of tokens by tenant took `seconds`."""

    def started(self, request: Request) -> None:  # noqa: B027
        """The request runs now."""

    def stopped(self, request: Request) -> None:  # noqa: B027
        """The request runs no more: it was preempted, or it ends."""

    def charge(self, request: Request, num_tokens: int) -> None:  # noqa: B027
        """`num_tokens` of this request were computed."""

    def leave(self, request: Request) -> None:  # noqa: B027
        """The request has ended, by itself or by cancellation."""
