"""The contracts of a sampling feature. Two kinds, by where they act:

* a LogitFeature edits rows of logits in place before temperature (penalties, biases, bans);
* a Filter narrows the candidates, which come sorted by probability, after temperature (top-k, top-p, min-p).

A feature is called only for rows whose request uses it. It knows nothing of batches, models or other features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tokenmill.types import Request, SamplingParams


class LogitFeature(ABC):
    @abstractmethod
    def active(self, params: SamplingParams) -> bool: ...

    @abstractmethod
    def edit(self, logits: Tensor, request: Request, drafted: Sequence[int]) -> None:
        """Change one request's row [vocab] in place. `drafted`: tokens assumed to follow the request's own."""

    def allowed(self, _request: Request, token_ids: Sequence[int]) -> int:
        """How many of these tokens, one after the other, this feature would not make impossible."""
        return len(token_ids)


@dataclass(slots=True)
class Candidates:
    """The most likely tokens of one row, best first, out of a vocabulary whose total mass is 1.

    When `complete` is false the row was cut after len(probabilities): a filter whose answer could lie beyond the cut
    returns None, and is called again with the entire vocabulary sorted.
    """

    probabilities: Tensor  # [K] float64, descending
    complete: bool


class Filter(ABC):
    @abstractmethod
    def active(self, params: SamplingParams) -> bool: ...

    @abstractmethod
    def keep(self, candidates: Candidates, params: SamplingParams) -> int | None:
        """How many leading candidates stay (at least 1), or None if that cannot be told from a cut row."""
