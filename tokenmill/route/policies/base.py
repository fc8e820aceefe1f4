"""The contract of a policy: which replica takes a request. It sees only what a gateway can see at that moment.

The router gives it live replicas (target.py), the simulator its own (plan/simulate/replica.py): a policy is chosen by
simulation and then served. A prompt is anything that the replicas can look up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar


class Sized(Protocol):
    """A prompt, as far as a policy looks at it."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def session(self) -> str:
        """Whose conversation it belongs to, where the caller says so; breaks ties, no more."""
        ...


class Candidate(Protocol):
    """A replica that takes requests."""

    @property
    def number(self) -> int:
        """Its place among all replicas."""
        ...

    @property
    def outstanding(self) -> int:
        """Requests sent to it and not finished."""
        ...

    @property
    def outstanding_tokens(self) -> int:
        """Tokens of these, prompts and outputs."""
        ...

    def matched_tokens(self, request: Any) -> int:
        """How many tokens of a prompt it has cached, or will have once it has computed what was sent to it."""
        ...

    def wait_seconds(self, uncached: int) -> float:
        """Until the first token of a prompt of which so many tokens are not cached."""
        ...


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


class Policy(ABC):
    looks_up = False  # whether it asks what replicas have cached

    @abstractmethod
    def choose(self, request: Sized, replicas: Sequence[AnyCandidate]) -> AnyCandidate:
        """One of `replicas`, all of which take requests; there is at least one."""
