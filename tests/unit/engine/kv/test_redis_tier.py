"""The Redis tier against a real server: sharing, damage, an outage, and a protocol reader that trusts nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redis_server import RedisServer
from tokenmill.engine.kv.tier import redis as redis_tier
from tokenmill.engine.kv.tier.redis import RedisTier
from tokenmill.engine.kv.tier.resp import RedisAddress, RedisConnection, RedisError
from tokenmill.errors import UserError

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
    raw = RedisConnection(RedisAddress.parse(server.url), 30.0)
    tier.put(KEY, PAGE)
    name = tier._name(KEY)
    entry = raw.run([["GET", name]])[0]
    assert isinstance(entry, bytearray)
    entry[-1] ^= 1
    raw.run([["SET", name, memoryview(entry)]])
    assert tier.get(KEY) is None
    assert tier.stats.corrupt == 1
    assert raw.run([["EXISTS", name]]) == [0]
    foreign = RedisTier(server.url, OTHER)
    foreign.put(KEY, PAGE)
    value = raw.run([["GET", foreign._name(KEY)]])[0]
    assert isinstance(value, bytearray)
    raw.run([["SET", name, memoryview(value)]])
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


@pytest.mark.parametrize(
    "answer",
    [b"-ERR no\r\n", b"?what\r\n", b"$-5x\r\n", b"$99999999999\r\n", b"$10\r\nabc", b":x\r\n", b"", b"y" * 70_000],
)
def test_answers_that_make_no_sense_are_an_error(answer: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def talk() -> None:
        line, _ = listener.accept()
        with line:
            line.recv(65536)
            line.sendall(b"+PONG\r\n")
            line.recv(65536)
            line.sendall(answer)

    thread = threading.Thread(target=talk)
    thread.start()
    connection = RedisConnection(RedisAddress("127.0.0.1", listener.getsockname()[1]), 30.0)
    with pytest.raises(RedisError):
        connection.run([["GET", "x"]])
    thread.join()
    listener.close()
