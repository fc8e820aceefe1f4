"""The sorted line of requests and the disciplines that sort it."""

from __future__ import annotations

import pytest

from tests.unit.engine.building import make_request
from tokenmill.engine.order import DISCIPLINES
from tokenmill.engine.order.queue import RequestQueue
from tokenmill.errors import UserError


@pytest.mark.parametrize(("name", "order"), [("fcfs", ["x", "y", "z"]), ("priority", ["z", "x", "y"])])
def test_order(name: str, order: list[str]) -> None:
    discipline = DISCIPLINES.get(name)()
    requests = [
        make_request([1], "y", arrival=2, priority=1),
        make_request([1], "z", arrival=3, priority=0),
        make_request([1], "x", arrival=1, priority=1),
    ]
    assert [request.request_id for request in sorted(requests, key=discipline.key)] == order


def test_every_discipline_outranks_only_what_it_sorts_before() -> None:
    requests = [make_request([1], arrival=arrival, priority=priority) for arrival in range(3) for priority in range(3)]
    for name in DISCIPLINES:
        discipline = DISCIPLINES.get(name)()
        for one in requests:
            for other in requests:
                if discipline.outranks(one, other):
                    assert discipline.key(one) < discipline.key(other)


def test_queue() -> None:
    queue = RequestQueue()
    requests = [make_request([1], str(number)) for number in range(5)]
    for number in (3, 0, 4, 1, 2):
        queue.add(requests[number], (number // 2, number))
    assert queue.snapshot() == requests
    assert queue.remove(requests[2]) == (1, 2)
    assert requests[2] not in queue
    assert (queue.at(0), queue.last(), len(queue)) == (requests[0], requests[4], 4)


def test_an_unknown_discipline_is_named_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'fcfs'"):
        DISCIPLINES.get("fcf")
