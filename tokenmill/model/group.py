"""The contract of a group of ranks: what they exchange while they compute one step together.

Every rank makes the same calls in the same order with tensors of the same shape (shapes of `gather` may differ in the
last dimension); a call returns when all have made it. Implementations are in runtime/ranks/; `Alone` is the one of a
model that is not divided. Used by executors, and while a model is loaded.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class RankError(Exception):
    """A rank ended, hangs or does something else than the others: the engine cannot go on."""


class Group(ABC):
    """The ranks of one stage, which share its matrices; `send` and `receive` go to the same part of other stages."""

    size: int
    part: int  # which of them this one is
    trace: int = 0  # of the exchanges so far

    @abstractmethod
    def collect(self, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """What each rank brought, in the order of ranks: [T, widths[rank]]."""

    @abstractmethod
    def send(self, x: Tensor, rank: int, number: int) -> None:
        """To a rank of another stage, by its number in the grid; `number`: which message of this step it is. Does not
        wait for the receiver."""

    @abstractmethod
    def receive(self, shape: Sequence[int], rank: int, number: int) -> Tensor:
        """float32 of this shape from a rank of another stage."""

    def release(self) -> None:  # noqa: B027
        """Forget what was sent and has been received; waits for nothing."""

    def gather(self, x: Tensor, widths: Sequence[int] = ()) -> Tensor:
        """The columns of all ranks side by side; `widths`: where they differ."""
        if self.size == 1:
            return x
        widths = widths or (x.shape[-1],) * self.size
        self.note(x.shape[0], *widths)
        import torch

        return torch.cat(self.collect(x, widths), -1)

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all ranks one below the other; `counts`: how many each brings."""
        width = x.shape[-1]
        self.note(*counts, width)
        parts = self.collect(x.reshape(1, -1), [count * width for count in counts])
        import torch

        return torch.cat([part.reshape(-1, width) for part in parts])

    def reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, added in their order: every rank gets the same bits."""
        if self.size == 1:
            return x
        self.note(*x.shape)
        first, *others = self.collect(x, (x.shape[-1],) * self.size)
        total = first.clone()
        for each in others:
            total += each
        return total

    def note(self, *shape: int) -> None:
        """Add an exchange to the trace, which is the same for all ranks that made the same ones."""
        self.trace = zlib.crc32(repr(shape).encode(), self.trace)


class Alone(Group):
    size, part = 1, 0

    def collect(self, x: Tensor, widths: Sequence[int]) -> list[Tensor]:  # noqa: ARG002
        return [x]

    def send(self, x: Tensor, rank: int, number: int) -> None:  # noqa: ARG002
        raise AssertionError("a model that is not divided has no other stage")

    def receive(self, shape: Sequence[int], rank: int, number: int) -> Tensor:  # noqa: ARG002
        raise AssertionError("a model that is not divided has no other stage")


ALONE = Alone()
