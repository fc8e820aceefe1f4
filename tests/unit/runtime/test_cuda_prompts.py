"""Padding of steps with prompts, and which of them are captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenmill.hardware.kv_layout import KVGroup, KVLayout
from tokenmill.runtime.batch import build_batch
from tokenmill.runtime.executors.base import StepInput
from tokenmill.runtime.executors.cuda import prompts
from tokenmill.runtime.executors.cuda.prompts import PromptInputs, PromptKind, PromptSteps
from tokenmill.types import Batch, Request, SamplingParams, ScheduledTokens

PAGE, CONTEXT = 16, 4096
DEVICE = torch.device("cpu")
LAYOUT = KVLayout(PAGE, 1, 1, 1, (KVGroup("full", 0, (0,)), KVGroup("sliding", 32, (1,))))


def step(*rows: tuple[int, int]) -> Batch:
    """A batch of sequences of (first position, tokens), each with pages of its own."""
    scheduled = []
    for number, (start, count) in enumerate(rows):
        request = Request(str(number), list(range(start + count)), SamplingParams())
        pages = [1000 * number + page for page in range(-(-(start + count) // PAGE))]
        scheduled.append(ScheduledTokens(request, start, count, (pages, pages), True))
    return build_batch(StepInput(scheduled, hidden=True), PAGE, DEVICE)


def inputs(batch_tokens: int = 8192, concurrency: int = 256) -> PromptInputs:
    return PromptInputs(LAYOUT, batch_tokens, concurrency, CONTEXT, DEVICE)


def test_steps_are_padded_to_few_kinds_that_never_look_like_single_tokens() -> None:
    own = inputs()
    assert own.kind(step((0, 3))) == PromptKind(16, 3)
    assert own.kind(step((0, 512))) == PromptKind(512, 3)
    assert own.kind(step(*[(40, 1)] * 15, (0, 2))) == PromptKind(64, 63)
    assert own.kind(step((0, 900), (5, 200), *[(9, 1)] * 60)) == PromptKind(1280, 63)
    most = own.kind(step(*[(9, 1)] * 255, (0, 2)))
    assert most is not None
    assert most.tokens > most.sequences >= 256


def test_long_steps_single_tokens_and_strange_ones_are_not_for_graphs() -> None:
    own = inputs(concurrency=4)
    assert own.kind(step((0, 2048))) is None
    assert own.kind(step((7, 1), (9, 1))) is None
    assert own.kind(step(*[(9, 1)] * 4, (0, 2))) is None  # more sequences than there should be
    assert own.kind(step((CONTEXT + PAGE, 2))) is None
    assert inputs(batch_tokens=24).kind(step((0, 24))) == PromptKind(32, 3)


def test_padding_belongs_to_no_sequence_and_is_stored_nowhere() -> None:
    own = inputs()
    own.fill(step((0, 600), (100, 40)), PromptKind(640, 3))  # what a larger step leaves behind must not show
    given = step((30, 1), (0, 20))
    kind = own.kind(given)
    assert kind == PromptKind(32, 3)
    own.fill(given, kind)
    padded = own.batch(kind)
    assert padded.token_ids.tolist() == given.token_ids.tolist() + [0] * 11
    assert padded.positions.tolist() == given.positions.tolist() + [0] * 11
    assert [slots.tolist() for slots in padded.slots] == [slots.tolist() + [-1] * 11 for slots in given.slots]
    assert padded.query_starts.tolist() == [0, 1, 21, 21]
    assert padded.seq_lens.tolist() == [31, 20, 0]
    for table, own_table in zip(given.block_tables, padded.block_tables, strict=True):
        assert torch.equal(own_table[:2, : table.shape[1]], table)
    assert (padded.max_query, padded.max_seq >= CONTEXT) == (32, True)


class _Replayed:
    """Stands for a CUDA graph: runs the captured call again."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.replay = call


def test_a_kind_is_captured_at_its_second_step_and_the_least_used_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = []

    def capture(call: Callable[[], None]) -> Any:
        captured.append(call)
        call()
        return _Replayed(call)

    monkeypatch.setattr(prompts, "_MAX_GRAPHS", 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    steps = PromptSteps(inputs(), lambda batch: batch.token_ids[:, None].float() * 2, capture)
    for number in range(3):
        hidden = steps.forward(step((0, 3 + number)))
        assert hidden is not None
        assert hidden[:, 0].tolist() == [2.0 * token for token in range(3 + number)]
        assert len(captured) == min(number, 1)
    steps.prepare(PromptKind(128, 3))
    assert (len(captured), steps.num_captured) == (2, 2)
    steps.forward(step((0, 5)))  # now the other one is the least used
    steps.prepare(PromptKind(256, 3))
    assert (len(captured), steps.num_captured) == (3, 2)
    steps.forward(step((0, 5)))
    assert len(captured) == 3
    assert steps.forward(step((0, 2048))) is None
