"""The order in which a decode step takes its rows: long ones first, those with a common beginning side by side."""

from __future__ import annotations

import pytest
import torch

from tokenmill.hardware.kv_layout import KVGroup, KVLayout
from tokenmill.runtime.executors.cuda.inputs import DecodeInputs
from tokenmill.types import Request, SamplingParams, ScheduledTokens


def row(name: str, start: int, pages: list[int], groups: int = 1) -> ScheduledTokens:
    request = Request(name, [1] * (start + 1), SamplingParams(), frozenset())
    return ScheduledTokens(request, start, 1, (pages,) * groups, samples=True)


def inputs(*kinds: str) -> DecodeInputs:
    groups = tuple(KVGroup(kind, 8 if kind == "sliding" else 0, (number,)) for number, kind in enumerate(kinds))
    return DecodeInputs(KVLayout(4, 1, 1, 8, groups), 8, 64, torch.device("cpu"))


@pytest.mark.parametrize("kinds", [("full",), ("sliding",), ("full", "sliding")])
def test_long_rows_come_first_and_equals_keep_their_order(kinds: tuple[str, ...]) -> None:
    starts = {"a": 2, "b": 9, "c": 2, "d": 30}
    rows = [row(name, start, [page], len(kinds)) for page, (name, start) in enumerate(starts.items())]
    assert [rows[number].request.request_id for number in inputs(*kinds).longest_first(rows)] == ["d", "b", "a", "c"]


def test_rows_that_begin_with_the_same_page_stay_together() -> None:
    rows = [row("a", 5, [7, 1]), row("b", 9, [3, 2]), row("c", 6, [7, 4]), row("d", 3, [5]), row("e", 7, [7, 6])]
    order = [rows[number].request.request_id for number in inputs("full").longest_first(rows)]
    assert order == ["b", "d", "e", "c", "a"]
