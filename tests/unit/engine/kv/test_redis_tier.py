"""The Redis tier against a real server: sharing, damage, an outage, a server that hangs or talks nonsense."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.redis_server import RedisServer
from tokenmill.engine.kv.tier import redis as redis_tier
from tokenmill.engine.kv.tier.redis import RedisAddress, RedisClient, RedisTier, RedisUnavailableError
from tokenmill.errors import UnavailableError, UserError

pytest.importorskip("redis", reason="the package redis is not installed (pip install 'tokenmill[redis]')")

MODEL, OTHER = b"m" * 16, b"o" * 16
KEY = b"k" * 16 + b"\x00"
PAGE = memoryview(bytearray(range(256)) * 400)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    monkeypatch.setattr(redis_tier, "_LOOKUP_TIMEOUT", 30.0)  # a busy machine is not an outage
    redis = RedisServer(tmp_path)
    yield redis
    redis.stop()


def test_two_engines_share_pages_and_other_models_do_not(server: RedisServer) -> None:
    first, second, other = (RedisTier(server.url, identity) for identity in (MODEL, MODEL, OTHER))
    first.put(KEY, PAGE)
    assert second.has([KEY, b"x"]) == [True, False]
    assert second.get(KEY) == PAGE
    assert second.holds(KEY)
    assert other.has([KEY]) == [False]
    assert other.get(KEY) is None
    written = first.stats.written_bytes
    first.put(KEY, PAGE)  # it is there: nothing is written
    assert first.stats.written_bytes == written == len(PAGE)
    for tier in (first, second, other):
        tier.close()


def test_damage_and_foreign_entries_are_counted_and_deleted(server: RedisServer) -> None:
    tier = RedisTier(server.url, MODEL)
    raw = RedisClient(RedisAddress.parse(server.url))
    tier.put(KEY, PAGE)
    name = tier._name(KEY)
    entry = bytearray(raw.run([["GET", name]])[0])
    entry[-1] ^= 1
    raw.run([["SET", name, memoryview(entry)]])
    assert tier.get(KEY) is None
    assert tier.stats.corrupt == 1
    assert raw.run([["EXISTS", name]]) == [0]
    foreign = RedisTier(server.url, OTHER)
    foreign.put(KEY, PAGE)
    value = raw.run([["GET", foreign._name(KEY)]])[0]
    raw.run([["SET", name, value]])
    assert tier.get(KEY) is None
    assert (tier.stats.corrupt, tier.stats.foreign) == (1, 1)


def test_an_outage_degrades_and_ends(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    tier = RedisTier(server.url, MODEL, clock=lambda: now[0])
    tier.put(KEY, PAGE)
    server.stop()
    assert tier.get(KEY) is None
    tier.put(b"other", PAGE)
    assert tier.stats.failures == 2
    assert tier.has([KEY]) == [False]  # left alone
    assert tier.stats.failures == 2
    assert "computed instead" in caplog.text
    server.start()
    now[0] = 60.0
    tier.put(KEY, PAGE)
    assert tier.get(KEY) == PAGE


def test_a_server_that_is_not_there_is_refused_at_start(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.stop()
    with pytest.raises(UserError, match="cannot be used"):
        RedisTier(server.url, MODEL)


@pytest.mark.parametrize("url", ["", "http://x", "redis://", "redis://h:port", "redis://h/db", "redis://u:secret@h:p"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UserError, match="redis://host:6379/0") as refused:
        RedisAddress.parse(url)
    assert "secret" not in str(refused.value)


def test_an_address() -> None:
    address = RedisAddress.parse("redis://me:p%40ss@example:7000/3")
    assert address == RedisAddress("example", 7000, 3, "me", "p@ss", False)
    assert "ss" not in str(address)


class _Listener:
    """A server that takes one connection after the other and answers everything alike."""

    def __init__(self, answer: bytes) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = RedisAddress("127.0.0.1", self._socket.getsockname()[1])
        self._answer = answer
        self._lines: list[socket.socket] = []
        self._thread = threading.Thread(target=self._talk, daemon=True)
        self._thread.start()

    def _talk(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = self._socket.accept()
                self._lines.append(line)
                line.recv(65536)
                line.sendall(self._answer)
                if self._answer:
                    line.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for each in (self._socket, *self._lines):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._thread.join()


@pytest.fixture
def listening() -> Iterator[Callable[[bytes], _Listener]]:
    made: list[_Listener] = []

    def make(answer: bytes) -> _Listener:
        made.append(_Listener(answer))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("answer", [b"-ERR no\r\n", b"?what\r\n", b"$-5x\r\n", b"$10\r\nabc", b":x\r\n", b"y" * 70_000])
def test_answers_that_make_no_sense_are_a_failure(answer: bytes, listening: Callable[[bytes], _Listener]) -> None:
    client = RedisClient(listening(answer).address)
    with pytest.raises(RedisUnavailableError):
        client.run([["GET", "x"]])
    assert client.paused
    client.close()


def test_a_server_that_says_nothing_costs_one_timeout(listening: Callable[[bytes], _Listener]) -> None:
    """No retries: whoever asked computes instead."""
    client = RedisClient(listening(b"").address)
    began = time.monotonic()
    with pytest.raises(RedisUnavailableError):
        client.run([["EXISTS", "x"]] * 5, timeout=0.05)
    assert time.monotonic() - began < 5.0
    assert client.paused
    client.close()


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(UnavailableError, match=r"tokenmill\[redis\]"):
        RedisTier("redis://localhost:6379/0", MODEL)
