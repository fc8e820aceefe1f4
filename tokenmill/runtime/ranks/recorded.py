"""The recorded program of a rank: it exchanges with the others between two of its stages, in shared memory.

For ranks that share the matrices of every layer, in fast mode. Experts, adapters, stages and prompts that ranks share
are left to the eager executor of ranks (executor.py), and so is exact mode, which promises the eager executor's bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmill.config import ResolvedConfig
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.group import RankError
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.layers.experts import expert_layers
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.executors.base import StepInput, StepOutput
from tokenmill.runtime.executors.batched import BatchedExecutor
from tokenmill.runtime.executors.recorded import RecordedExecutor
from tokenmill.runtime.executors.recorded_ops import RecordedOps
from tokenmill.runtime.ranks.duties import RankDuties
from tokenmill.runtime.ranks.seat import Seat
from tokenmill.runtime.ranks.shared import SharedGroup
from tokenmill.runtime.ranks.wire import Logits, Settle, step_of
from tokenmill.types import Batch


class RankProgram(RankDuties, RecordedExecutor):
    runs_greedily = False  # every step is told to the others

    def __init__(self, model: LoadedModel, store: KVStore, config: ResolvedConfig, seat: Seat) -> None:
        self.seat = seat
        RecordedExecutor.__init__(self, model, store, config)

    def make_ops(self, program: object) -> RecordedOps:
        assert isinstance(self.seat.group, SharedGroup)
        return RankOps(program, self.store, self.seat.group)

    def step(self, work: StepInput) -> StepOutput[Tensor]:
        return BatchedExecutor.step(self, work)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        self.number += 1
        self.tell(step_of(batch, self.number))
        self.seat.group.note(batch.token_ids.shape[0], batch.logit_rows.shape[0])
        hidden = RecordedExecutor.forward(self, batch)
        self.compare()
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor, batch: Batch, begin: int, end: int) -> Tensor:
        if batch.logit_rows.shape[0] > self.max_logit_rows:
            self.tell(Logits(begin, end), self.seat.place.team)
        return RecordedExecutor.logits(self, hidden, batch, begin, end)

    def run_program(self, batch: Batch, logit_rows: Tensor, body: bool, head: bool) -> bool:
        if not super().run_program(batch, logit_rows, body, head):
            raise self.reason(RankError("a rank did not come to an exchange"))
        return True

    def settle_drafts(self, kept: Sequence[int]) -> None:
        self.tell(Settle(list(kept)))
        RecordedExecutor.settle_drafts(self, kept)


class RankOps(RecordedOps):
    def __init__(self, program: object, store: KVStore, group: SharedGroup) -> None:
        super().__init__(program, store)
        self._group = group

    def linear(self, x: int, weights: Sequence[LinearWeight]) -> list[int]:
        split = weights[0].split
        assert all(weight.split == split for weight in weights), "matrices of one input are split alike"
        if split == "gather":
            width = weights[0].in_features // self._group.size
            x = self._exchange(x, [width] * self._group.size)
        values = super().linear(x, weights)
        if not split:
            return values
        return [
            self._exchange(value, [] if split == "sum" else list(weight.shares))
            for value, weight in zip(values, weights, strict=True)
        ]

    def _exchange(self, x: int, widths: list[int]) -> int:
        value: int = self._program.exchange(x, self._group.exchange, widths)
        return value


def declines(model: LoadedModel, store: KVStore, config: ResolvedConfig, seat: Seat) -> str | None:
    """Why ranks compute op by op; None if they have a recorded program."""
    grid = seat.place.grid
    if config.executor == "eager" or config.kernels:
        return "it was asked for"
    if seat.exact:
        return "exact mode promises the bits of the eager executor"
    if not isinstance(seat.group, SharedGroup) or grid.pp > 1 or grid.cp > 1:
        return "only processes that share every layer have one"
    if config.serves_adapters:
        return "adapters are divided op by op"
    if expert_layers(model.decoder.blocks):
        return "experts are divided op by op"
    return RecordedExecutor.declines(model, store)
