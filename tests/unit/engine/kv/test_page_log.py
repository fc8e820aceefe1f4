"""The page log tells exactly what the prefix tree has, whenever somebody began to listen."""

from __future__ import annotations

import random

import pytest

from tests.unit.engine.building import FULL, MIXED, SLIDING, compute, make_kv, make_request
from tokenmill.engine.kv.manager import KVManager
from tokenmill.engine.kv.page_log import PageLog
from tokenmill.engine.kv.page_names import page_names, salted_root
from tokenmill.types import Request

_ROOT = b"root"


class _Reader:
    """What a router has: applies changes in order."""

    def __init__(self, log: PageLog) -> None:
        self.names: dict[bytes, bytes] = {}
        self._log = log

    def read(self) -> dict[bytes, bytes]:
        stored, removed = self._log.take()
        self.names.update(stored)
        for name in removed:
            self.names.pop(name, None)
        return self.names


def _fresh_names(kv: KVManager) -> dict[bytes, bytes]:
    """As somebody who begins to listen now is told; the first listener is then no longer told anything."""
    return dict(kv.watch(_ROOT).take()[0])


@pytest.mark.parametrize("layout", [FULL, MIXED, SLIDING])
def test_changes_add_up_to_the_tree(layout: object) -> None:
    kv = make_kv(layout)  # type: ignore[arg-type]
    reader, draw, open_requests = _Reader(kv.watch(_ROOT)), random.Random(3), list[Request]()
    for _ in range(60):
        if open_requests and draw.random() < 0.6:
            kv.release(open_requests.pop(draw.randrange(len(open_requests))))
        length = draw.randrange(1, 20)
        request = make_request([draw.randrange(2) for _ in range(length)])
        if kv.match(request).fits and kv.num_available > 12:
            compute(kv, request)
            open_requests.append(request)
        reader.read()
    kv.check()
    assert reader.names
    told = dict(reader.names)
    assert told == _fresh_names(kv)
    for request in open_requests:
        kv.release(request)
    last = _Reader(kv.watch(_ROOT))
    last.read()
    kv.clear()
    assert last.read() == {}


def test_names_are_computable_from_tokens_and_salt() -> None:
    kv = make_kv()
    plain, salted = make_request(9), make_request(9)
    salted.cache_salt = b"mine"
    for request in (plain, salted):
        compute(kv, request)
    ids = plain.token_ids
    names = [name for root in (_ROOT, salted_root(_ROOT, b"mine")) for name in page_names(root, ids, 4)]
    assert set(_fresh_names(kv)) == set(names)  # named only now, and as if they always had been
    assert len(set(names)) == 4


def test_a_page_that_came_and_went_is_told_once() -> None:
    log = PageLog()
    log.stored(b"a", _ROOT)
    log.removed(b"a")
    log.removed(b"b")
    log.stored(b"b", _ROOT)
    assert log.take() == ([(b"b", _ROOT)], [b"a"])
    assert log.take() == ([], [])
