"""Recurrent states under drafts: a rejected token cannot be cut out of a state, so drafts are computed on copies.

While a step with drafts is computed, every recurrent op of a drafted row continues a copy of its state, and its input
rows are remembered. When it is known how many tokens hold, the ops run again over exactly those rows, on the states
themselves. The inputs are far smaller than a state for each token. Used by executors that compute with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenmill.model.state.specs import ConvolutionSpec, ScanSpec
from tokenmill.types import Batch

Run = Callable[..., Tensor]


@dataclass(slots=True)
class _Rows:
    """Some sequences of a batch: their tokens in the step, where each begins among these, and their slots."""

    tokens: Tensor  # [n] int64
    starts: Tensor
    slots: Tensor


@dataclass(slots=True)
class DraftedStates:
    """Of one step with drafts."""

    batch: Batch
    _calls: list[tuple[Run, tuple[Tensor, ...], Tensor, tuple[Any, ...]]] = field(default_factory=list)
    _parts: list[tuple[_Rows, bool]] = field(default_factory=list)  # the rows without drafts and those with, once found

    def run(self, run: Run, inputs: Sequence[Tensor], states: Tensor, spec: ConvolutionSpec | ScanSpec) -> Tensor:
        """As the op itself, but the states of drafted rows stay as they are."""
        arguments = spec.arguments()
        if not self._parts:
            others = set(range(self.batch.query_starts.shape[0] - 1)) - set(self.batch.drafted)
            self._parts = [(self._rows(sorted(others)), False)] if others else []
            self._parts.append((self._rows(list(self.batch.drafted)), True))
        output: Tensor | None = None
        for rows, is_draft in self._parts:
            part = tuple(each[rows.tokens] for each in inputs)
            if is_draft:
                self._calls.append((run, part, states, arguments))
                own, slots = states[rows.slots], torch.arange(rows.slots.shape[0], device=states.device)
            else:
                own, slots = states, rows.slots
            y = run(*part, own, slots, rows.starts, *arguments)
            output = y.new_empty(inputs[0].shape[0], y.shape[1]) if output is None else output
            output[rows.tokens] = y
        assert output is not None
        return output

    def settle(self, kept: Sequence[int]) -> None:
        """`kept`: of each drafted row, the number of its tokens of this step that hold, at least one."""
        rows = self._rows(list(self.batch.drafted))
        begins = rows.starts.tolist()
        held = [begin + offset for begin, count in zip(begins, kept, strict=False) for offset in range(count)]
        tokens = torch.tensor(held, device=rows.tokens.device)
        starts = torch.tensor([0, *kept], device=rows.starts.device).cumsum(0)
        for run, inputs, states, arguments in self._calls:
            run(*(each[tokens] for each in inputs), states, rows.slots, starts, *arguments)
        self._calls.clear()

    def _rows(self, numbers: list[int]) -> _Rows:
        assert self.batch.state_slots is not None
        begins = self.batch.query_starts.tolist()
        spans = [range(begins[number], begins[number + 1]) for number in numbers]
        device = self.batch.state_slots.device
        return _Rows(
            torch.tensor([token for span in spans for token in span], device=device),
            torch.tensor([0, *map(len, spans)], device=device).cumsum(0),
            self.batch.state_slots[numbers],
        )
