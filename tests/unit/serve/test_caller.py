"""Urgency: lanes come before priorities, and a batch key cannot promote itself."""

from __future__ import annotations

from tokenmill.serve.callers import Caller
from tokenmill.serve.tenants.keys import Client


def test_ranks() -> None:
    interactive, batch = Client("i"), Client("b", lane="batch")
    assert Caller(interactive, priority=-3).rank == -3
    assert Caller(interactive, lane="batch").rank > Caller(interactive, priority=100).rank
    assert Caller(batch, lane="interactive").rank == Caller(batch).rank
    assert Caller(batch, priority=-100).rank > Caller(interactive, priority=100).rank


def test_a_key_asks_for_no_more_urgency_than_it_may() -> None:
    assert Client("alone").most_urgent == -100
    among = Client("a")
    among.share_with(2)
    assert among.most_urgent == 0
