"""Engines that hand pages to each other: who is let in, what is refused, what a lease is worth."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

import pytest

from tests.e2e.serving import wait_until
from tests.fuzz.shadow_runner import expected_output
from tests.split_engines import CONTEXT, IDENTITY, PAGE_BYTES, SECRET, ShadowEngine
from tokenmill.engine.kv.tier.load import Load
from tokenmill.engine.kv.transfer import page_server, peer, wire
from tokenmill.engine.kv.transfer.peer import PeerPages
from tokenmill.engine.kv.transfer.staging import CLOSED, NO_ROOM, UNKNOWN, Staging
from tokenmill.types import KvLease, Request, SamplingParams

_PAGE = memoryview(bytes(range(256)) * (PAGE_BYTES // 256))


def _key(number: int) -> bytes:
    return struct.pack("<q", number).ljust(wire.KEY_BYTES, b"k")


@pytest.fixture
def prefill(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShadowEngine]:
    monkeypatch.setattr(page_server, "_UNKNOWN_SECONDS", 0.05)
    monkeypatch.setattr(page_server, "_WAIT_SECONDS", 0.02)
    engine = ShadowEngine(listens=True)
    yield engine
    engine.close()


def _address(engine: ShadowEngine) -> str:
    assert engine.server is not None
    return engine.server.address


def _fetch(address: str, secret: bytes = SECRET, identity: bytes = IDENTITY, keys: int = 1) -> tuple[Load, PeerPages]:
    peers = PeerPages([address], secret, identity, PAGE_BYTES, 10.0)
    load = Load([_key(number) for number in range(keys)], list, len, from_peer=True)
    peers.start(load, KvLease("nobody's", address))
    assert load.done.wait(30)
    return load, peers


def test_leases_hold_slots_until_they_end() -> None:
    now = 0.0
    staging = Staging(4 * PAGE_BYTES, PAGE_BYTES, lambda: now)
    assert staging.find("a", _key(1), 0.0) == UNKNOWN
    staging.open("a", 30.0)
    staging.open("b", 10.0)
    assert staging.find("a", _key(1), 0.0) is None, "it may still come"
    for name in ("a", "b"):
        for number in range(3):
            staging.stage(name, _key(number), _PAGE)
    assert (staging.num_used, staging.num_staged) == (3, 3), "what two leases hold is stored once"
    found = staging.find("a", _key(2), 0.0)
    assert isinstance(found, tuple)
    assert staging.page(found[0]) == _PAGE
    assert found[1] == wire.checksum(_key(2), _PAGE)
    staging.stage("b", _key(3), _PAGE)
    staging.stage("b", _key(4), _PAGE)
    assert staging.find("b", _key(4), 0.0) == NO_ROOM
    staging.check()
    now = 1000.0
    staging.expire()
    assert staging.num_leases == 2, "their requests are still computed"
    staging.close("a")
    staging.close("b")
    assert staging.find("b", _key(9), 0.0) == CLOSED
    now = 1009.0
    staging.renew("b")
    now = 1015.0
    staging.expire()
    assert staging.num_leases == 2
    now = 1031.0
    staging.expire()
    assert (staging.num_leases, staging.num_expired) == (0, 2)
    staging.done("b")  # late
    staging.stage("b", _key(5), _PAGE)
    staging.check()
    assert staging.num_used == 0


def test_engines_with_another_secret_or_other_pages_refuse_each_other(prefill: ShadowEngine) -> None:
    load, peers = _fetch(_address(prefill), secret=b"x" * 32)
    assert (load.problem, load.pages) == ("unreachable", {}), "the line is closed without a word"
    load, peers = _fetch(_address(prefill), identity=b"o" * 16)
    assert load.problem == "incompatible"
    assert peers.stats.failures == 1
    assert peers.stats.up == 0
    server = prefill.server
    assert server is not None
    wait_until(lambda: server.refused == {"secret": 1, "incompatible": 1}, 30)
    load, peers = _fetch(_address(prefill))
    assert (load.problem, peers.stats.up) == ("unknown", 1)


@pytest.mark.parametrize(
    "data", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, struct.pack("<BxxxI", wire.LOGIN, 1 << 31), b"\x02"]
)
def test_strangers_cost_a_connection_and_nothing_else(
    prefill: ShadowEngine, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "_HANDSHAKE_SECONDS", 1.0)
    with socket.create_connection(wire.parse_address(_address(prefill))) as stranger:
        stranger.sendall(data)
        stranger.settimeout(30)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := stranger.recv(4096):
                received += part
    assert len(received) <= 64, "a nonce, and no page"
    assert _fetch(_address(prefill))[0].problem == "unknown"
    prefill.check()


def test_nobody_is_connected_to_but_named_peers(prefill: ShadowEngine) -> None:
    decode = ShadowEngine(peer="127.0.0.1:9")
    request = Request("r", [1, 2, 3] * 9, SamplingParams(max_tokens=2), source=KvLease("lease", _address(prefill)))
    decode.add(request)
    decode.run()
    assert request.cache.source == "not_allowed"
    assert prefill.server is not None
    assert not prefill.server.refused
    assert prefill.server.num_connections == 0
    decode.close()


def test_a_short_rest_is_computed_here_and_nobody_is_asked(
    prefill: ShadowEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "_UNKNOWN_SECONDS", 60.0)
    decode = ShadowEngine(peer=_address(prefill))
    assert decode.peers is not None
    asked: list[str] = []
    decode.peers.on_wanted = asked.append
    for number, (length, expected) in enumerate(((30, []), (60, ["r1"]))):
        lease = KvLease(f"lease{number}", _address(prefill), min_tokens=40, on_demand=True)
        prompt = [number + each % 3 for each in range(length)]
        request = Request(f"r{number}", prompt, SamplingParams(max_tokens=2), source=lease)
        decode.add(request)
        if expected:
            decode.core.step()
            decode.kv.sources.source_failed("r1")
            decode.kv.sources.source_failed("somebody else's")
        decode.run()
        assert asked == expected
        assert request.cache.source == ("prefill_failed" if expected else "short")
        assert decode.outputs[request.request_id] == expected_output(request, 0, CONTEXT)
    decode.close()


def test_transfers_of_those_who_wait_run_side_by_side(prefill: ShadowEngine) -> None:
    """No room to run more than one: the pages of those behind it are fetched all the same, and wait in buffers."""
    decode = ShadowEngine(peer=_address(prefill), num_pages=32, batch_tokens=200)
    requests = []
    for number in range(6):
        prompt = [(number + each) % 5 + number for each in range(100)]
        prefill.add(Request(f"p{number}", prompt, SamplingParams(max_tokens=1), publishes=KvLease(f"lease{number}")))
        source = KvLease(f"lease{number}", _address(prefill))
        requests.append(Request(f"d{number}", prompt, SamplingParams(max_tokens=8), source=source))
    for request in requests:
        decode.add(request)
    decode.core.step()
    restorer = decode.kv.sources._restorer
    assert restorer is not None
    assert len(restorer._waiting) == 6
    decode.run(beside=lambda: prefill.step() if prefill.core.has_work else None)
    for request in requests:
        assert (request.cache.source, request.num_cached_tokens) == ("used", 96)
        assert decode.outputs[request.request_id] == expected_output(request, 0, CONTEXT)
    assert decode.kv.stats.num_preemptions == 0
    decode.close()


def test_leases_of_those_who_wait_are_renewed_and_ended(prefill: ShadowEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "_KEEPER_SECONDS", 0.01)
    staging = prefill.staging
    assert staging is not None
    peers = PeerPages([_address(prefill)], SECRET, IDENTITY, PAGE_BYTES, 10.0)
    lease = KvLease("lease", _address(prefill), ttl=0.03)
    staging.open("lease", 60.0)
    staging.close("lease")
    before = staging._leases["lease"].expires
    peers.hold(lease)
    wait_until(lambda: staging._leases["lease"].expires > before, 30)
    peers.release(lease)
    wait_until(lambda: not staging._leases, 30)
    peers.close()
