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
from tests.unit.engine.kv.test_guarded_tier import leaving, until
from tokenmill.engine.kv.tier import redis as redis_tier
from tokenmill.engine.kv.tier.base import TierUnavailableError
from tokenmill.engine.kv.tier.guard import GuardedTier
from tokenmill.engine.kv.tier.redis import RedisAddress, RedisClient, RedisTier
from tokenmill.errors import UnavailableError, UserError

pytest.importorskip("redis", reason="the package redis is not installed (pip install 'tokenmill[redis]')")

MODEL, OTHER = b"m" * 16, b"o" * 16
SECRET = b"a secret of the deployment"
KEY = b"k" * 16 + b"\x00"
PAGE = memoryview(bytearray(range(256)) * 400)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    monkeypatch.setattr(redis_tier, "_LOOKUP_TIMEOUT", 30.0)  # a busy machine is not an outage
    redis = RedisServer(tmp_path)
    yield redis
    redis.stop()


def make(url: str, identity: bytes = MODEL, secret: bytes = SECRET) -> RedisTier:
    return RedisTier(url, identity, len(PAGE), secret)


def test_two_engines_share_pages_and_other_models_and_secrets_do_not(server: RedisServer) -> None:
    first, second = make(server.url), make(server.url)
    others = [make(server.url, OTHER), make(server.url, secret=b"another one, long enough")]
    first.put(KEY, PAGE)
    assert second.has([KEY, b"x"]) == [True, False]
    assert second.get(KEY) == PAGE
    assert second.holds(KEY)
    for other in others:
        assert other.has([KEY]) == [False]
        assert other.get(KEY) is None
    written = first.stats.written_bytes
    first.put(KEY, PAGE)  # it is there: nothing is written
    assert first.stats.written_bytes == written == len(PAGE)
    for tier in (first, second, *others):
        tier.close()


def test_what_is_not_right_is_counted_and_deleted(server: RedisServer) -> None:
    tier, other = make(server.url), make(server.url, OTHER)
    raw = RedisClient(RedisAddress.parse(server.url))
    for each, key in ((tier, KEY), (tier, b"second"), (other, KEY)):
        each.put(key, PAGE)
    name = tier._name(KEY)
    entry, second, foreign = (raw.run([["GET", each]])[0] for each in (name, tier._name(b"second"), other._name(KEY)))
    wrong = {
        "hash": entry[:-1] + bytes([entry[-1] ^ 1]),
        "length": entry + b"x" * 10_000_000,
        "name": second,
        "layout": foreign,
        "version": b"x" + entry[1:],
    }
    for reason, value in wrong.items():
        raw.run([["SET", name, value]])
        assert tier.get(KEY) is None
        assert tier.stats.rejected[reason] == 1
        assert raw.run([["EXISTS", name]]) == [0]
    raw.run([["LPUSH", name, "x"]])
    assert tier.get(KEY) is None
    assert tier.stats.rejected == dict.fromkeys((*wrong, "type"), 1)
    assert raw.run([["EXISTS", name]]) == [0]
    assert tier.get(b"second") == PAGE
    assert other.get(KEY) == PAGE


def test_a_server_that_is_away_at_the_start_and_restarts_in_the_middle(server: RedisServer) -> None:
    now = [10.0]
    server.stop()
    tier = make(server.url)
    guarded = GuardedTier(tier, len(PAGE), lambda: now[0])
    until(lambda: tier.stats.failures == 1)
    assert not guarded.wait_open(0.0)
    assert guarded.has([KEY]) == [False]
    assert not guarded.wants(KEY)
    server.start()
    now[0] += 10.0
    assert guarded.wait_open(20.0)
    guarded.put(KEY, leaving(len(PAGE)), 0)
    until(lambda: guarded.num_queued == 0)
    assert len(guarded.get([KEY])) == 1
    server.stop()
    assert guarded.get([KEY]) == []
    failures = tier.stats.failures
    assert guarded.has([KEY]) == [False]  # left alone
    assert (tier.stats.failures, guarded.readable, tier.stats.up) == (failures, False, 0)
    server.start()
    now[0] += 10.0
    assert guarded.has([KEY]) == [False]  # the server lost it, but answers
    assert guarded.readable
    guarded.put(KEY, leaving(len(PAGE)), 0)
    until(lambda: guarded.num_queued == 0)
    assert len(guarded.get([KEY])) == 1
    guarded.end()
    guarded.join(time.monotonic() + 10.0)


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


_NOISE = {
    "error": b"-ERR no\r\n",
    "authentication": b"-NOAUTH Authentication required.\r\n",
    "password": b"-WRONGPASS invalid username-password pair\r\n",
    "loading": b"-LOADING Redis is loading the dataset in memory\r\n",
    "read-only": b"-READONLY You can't write against a read only replica.\r\n",
    "moved": b"-MOVED 3999 127.0.0.1:1\r\n",
    "unknown type": b"?what\r\n",
    "length": b"$-5x\r\n",
    "truncated": b"$10\r\nabc",
    "huge": b"$999999999999999999\r\nabc",
    "many": b"*999999999\r\n:1\r\n",
    "nested": b"*1\r\n" * 20_000,
    "number": b":x\r\n",
    "no end": b"y" * 70_000,
    "binary": bytes(range(256)) * 16,
    "nothing": b"",
}


@pytest.mark.parametrize("answer", _NOISE.values(), ids=_NOISE)
def test_answers_that_make_no_sense_are_a_failure(
    answer: bytes, listening: Callable[[bytes], _Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_tier, "_LOOKUP_TIMEOUT", 0.05)
    monkeypatch.setattr(redis_tier, "_TIMEOUT", 0.05)
    address = listening(answer).address
    client = RedisClient(address)
    with pytest.raises(TierUnavailableError):
        client.run([["GET", "x"]], 0.05)
    client.close()
    tier = make(f"redis://{address}")
    for call in (tier.open, lambda: tier.has([KEY]), lambda: tier.get(KEY), lambda: tier.put(KEY, PAGE)):
        with pytest.raises(TierUnavailableError):
            call()
    tier.close()


class _Talker(_Listener):
    """Greets like Redis, then answers everything alike, on one connection."""

    def _talk(self) -> None:
        with contextlib.suppress(OSError):
            line, _ = self._socket.accept()
            self._lines.append(line)
            while asked := line.recv(65536):
                greetings = asked.count(b"SETINFO")
                line.sendall(b"+OK\r\n" * greetings or self._answer)


@pytest.mark.parametrize(
    "answer", [b":1\r\n", b"*0\r\n", b"+OK\r\n", b"$-1\r\n"], ids=["number", "array", "text", "nil"]
)
def test_answers_of_the_wrong_kind_are_a_failure(answer: bytes) -> None:
    server = _Talker(answer * 2)
    tier = make(f"redis://{server.address}")
    if answer.startswith((b":", b"$")):
        with pytest.raises(TierUnavailableError, match="not a string"):
            tier.get(KEY)
    else:
        with pytest.raises(TierUnavailableError, match="not a number"):
            tier.has([KEY, b"other"])
    tier.close()
    server.close()


def test_a_server_that_says_nothing_costs_one_timeout(listening: Callable[[bytes], _Listener]) -> None:
    """No retries: whoever asked computes instead."""
    client = RedisClient(listening(b"").address)
    began = time.monotonic()
    with pytest.raises(TierUnavailableError):
        client.run([["EXISTS", "x"]] * 5, timeout=0.05)
    assert time.monotonic() - began < 5.0
    client.close()


def test_a_call_can_be_cut_short(listening: Callable[[bytes], _Listener]) -> None:
    """What a server that sends a byte now and then would keep waiting for ever."""
    client = RedisClient(listening(b"").address)
    failed = threading.Event()

    def ask() -> None:
        with pytest.raises(TierUnavailableError):
            client.run([["GET", "x"]], timeout=60.0)
        failed.set()

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: client.interrupt() or failed.wait(0.01))  # type: ignore[func-returns-value]
    thread.join()
    client.close()


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(UnavailableError, match=r"tokenmill\[redis\]"):
        make("redis://localhost:6379/0")
