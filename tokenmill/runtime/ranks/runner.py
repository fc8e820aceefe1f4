"""The runner of rank 0: what it does to pages is told to the other ranks."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.checkpoint.adapters.adapter import Adapter
from tokenmill.model.adapters import PreparedAdapter
from tokenmill.model.kvstore.base import KVStore
from tokenmill.runtime.ranks.duties import RankDuties
from tokenmill.runtime.ranks.wire import Copies, Move, Use, adapt_of, encode
from tokenmill.runtime.runner import Begun, ModelRunner
from tokenmill.runtime.speculation.speculator import Speculator
from tokenmill.types import StepPlan, StepResult


@dataclass(frozen=True, slots=True, eq=False)
class RankedAdapter(PreparedAdapter):
    """Rank 0's part of an adapter, and the whole one as it is told to the others."""

    frame: bytes


class RankedRunner(ModelRunner):
    """Drafts, sampling and grammars are rank 0's alone: the others see the tokens that it chose."""

    executor: RankDuties

    def __init__(self, executor: RankDuties, store: KVStore, speculator: Speculator | None = None) -> None:
        super().__init__(executor, store, speculator)

    def finish(self, begun: Begun) -> StepResult:
        begun.output.hidden(())  # also where nobody reads it: the last stage has it to give
        return super().finish(begun)

    @property
    def lanes(self) -> int:
        """Steps that may be under way at once: one for each stage. Drafts need the result of the step before."""
        grid = self.executor.seat.place.grid
        return grid.pp if grid.tp == 1 and self.speculator is None else 1

    def copy(self, plan: StepPlan) -> None:
        if plan.page_copies or plan.state_copies:
            self.executor.tell(Copies(plan.page_copies, plan.state_copies))
        super().copy(plan)

    def prepare_adapter(self, adapter: Adapter) -> RankedAdapter:
        own = super().prepare_adapter(adapter)
        return RankedAdapter(own.name, own.packed, own.embedding, own.replaces, own.nbytes, encode(adapt_of(adapter)))

    def load_adapter(self, slot: int, adapter: Adapter | PreparedAdapter) -> None:
        ready = self.prepare_adapter(adapter) if isinstance(adapter, Adapter) else adapter
        assert isinstance(ready, RankedAdapter)
        self.executor.tell_frame(ready.frame)
        self.executor.tell(Use(slot))
        super().load_adapter(slot, ready)

    def clear_adapter(self, slot: int) -> None:
        self.executor.tell(Use(slot, is_empty=True))
        super().clear_adapter(slot)

    def move_tokens(self, tables: tuple[list[int], ...], first: int, path: list[int]) -> None:
        self.executor.tell(Move(list(tables), first, list(path)))
        super().move_tokens(tables, first, path)
