"""The contracts of a sampling feature. Two kinds, by where they act:

* a LogitFeature edits rows of logits in place before temperature (penalties, biases, bans);
* a Filter narrows the candidates, which come sorted by probability, after temperature (top-k, top-p, min-p).

Rows are tensors or numpy arrays; `beside` brings small arrays of one's own to them. A feature is called only for rows
whose request uses it. It knows nothing of batches, models or other features.

On a GPU the logit features of all rows are one pass: each enters what it changes (`plan`), and the sampler there
applies the whole. A feature without a plan is applied row by row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.grammar.vocabulary import Bits
from tokenmill.types import Request, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Edits:
    """What the features of some rows change, in the order in which it applies."""

    vocab: int
    penalized: dict[int, tuple[Request, Sequence[int]]] = field(default_factory=dict)  # by row; and its drafted tokens
    added: dict[int, Mapping[int, float]] = field(default_factory=dict)  # by row and token
    banned: dict[int, set[int]] = field(default_factory=dict)  # by row
    allowed: dict[int, Bits] = field(default_factory=dict)  # by row: every other token is banned
    preferred: dict[int, Bits] = field(default_factory=dict)  # by row: if all is banned, these are not
    typical: dict[int, tuple[float, float]] = field(default_factory=dict)  # by row: mass and temperature

    def ban(self, row: int, token_ids: Sequence[int]) -> None:
        self.banned.setdefault(row, set()).update(token_ids)

    def allow(self, row: int, bits: Bits) -> None:
        """Only these tokens; those after the last bit are banned."""
        before = self.allowed.get(row)
        if before is not None:
            size = min(before.size, bits.size)
            bits = before[:size] & bits[:size]
        self.allowed[row] = bits


def token_bits(token_ids: Sequence[int], vocab: int) -> Bits:
    flags = np.zeros((vocab + 31) // 32 * 32, dtype=np.uint8)
    flags[list(token_ids)] = 1
    bits: Bits = np.packbits(flags, bitorder="little").view(np.int32)
    return bits


def beside(values: np.ndarray, logits: Any) -> Any:
    """`values` as an array of the kind of `logits`, where they are."""
    if isinstance(logits, np.ndarray):
        return values
    import torch

    return torch.from_numpy(values).to(logits.device)


def host_row(logits: Any) -> np.ndarray:
    """The row as a numpy array: itself, or the same memory, where that is possible."""
    row: np.ndarray = logits if isinstance(logits, np.ndarray) else logits.float().cpu().numpy()
    return row


class LogitFeature(ABC):
    @abstractmethod
    def active(self, params: SamplingParams) -> bool: ...

    @abstractmethod
    def edit(self, logits: Tensor, request: Request, drafted: Sequence[int]) -> None:
        """Change one request's row [vocab] in place. `drafted`: tokens assumed to follow the request's own."""

    def prepare(self, _requests: Sequence[Request], _drafted: Sequence[Sequence[int]]) -> None:
        """Told before `plan` of all rows of a step, those without this feature too: for work that threads share."""
        return

    def plan(self, _edits: Edits, _row: int, _request: Request, _drafted: Sequence[int]) -> bool:
        """Enter what `edit` would change in this row; False: it cannot be said so."""
        return False

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
