"""Pages between two engines over a line that is cut, flipped and stopped at random bytes and at every message.

What must hold whatever happens: every output is that of the request alone, every row sees its own prefix, no page and
no slot is lost on either side, and no lease outlives its time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.e2e.serving import wait_until
from tests.fuzz.shadow_runner import VOCABULARY, expected_output
from tests.split_engines import CONTEXT, Line, ShadowEngine
from tokenmill.engine.kv.tier import breaker
from tokenmill.engine.kv.transfer import page_server, peer, wire
from tokenmill.types import KvLease, Request, SamplingParams

_TTL = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Pair:
    """A prefilling engine, a decoding one, and the line between them."""

    def __init__(
        self, layers: str = "full", maps: bool = False, staging_pages: int = 200, batch_tokens: int = 24
    ) -> None:
        self.clock = Clock()
        self.prefill = ShadowEngine(
            layers, listens=True, clock=self.clock, staging_pages=staging_pages, batch_tokens=batch_tokens
        )
        assert self.prefill.server is not None
        assert self.prefill.staging is not None
        self.staging = self.prefill.staging
        self.line = Line(self.prefill.server.address)
        self.decode = ShadowEngine(layers, peer=self.line.address, maps=maps)
        self.number = 0

    def requests(self, draw: random.Random) -> tuple[Request, Request]:
        """The same prompt for both sides, never seen before."""
        self.number += 1
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(30, CONTEXT - 20))]
        name = f"lease-{self.number}"
        first = Request(f"p{self.number}", prompt, SamplingParams(max_tokens=1), publishes=KvLease(name, ttl=_TTL))
        params, source = SamplingParams(max_tokens=8), KvLease(name, self.line.address, _TTL)
        return first, Request(f"d{self.number}", prompt, params, seed=self.number, source=source)

    def run(self, draw: random.Random) -> Request:
        """Both compute at the same time; the decoding side must say what it says alone."""
        first, second = self.requests(draw)
        self.prefill.add(first)
        self.decode.add(second)
        self.decode.run(beside=lambda: self.prefill.step() if self.prefill.core.has_work else None)
        self.prefill.run()
        assert self.decode.outputs[second.request_id] == expected_output(second, second.seed, CONTEXT)
        self.check()
        return second

    def check(self) -> None:
        self.prefill.check()
        self.decode.check()

    def settle(self) -> None:
        """Whatever was not ended has ended by itself once its time is over."""
        self.decode.run()
        self.prefill.run()
        wait_until(lambda: not self.decode.peers._held, 30)  # type: ignore[union-attr]
        self.prefill.kv.sources._publisher.close(10.0)  # type: ignore[union-attr]
        self.clock.now += 2 * _TTL
        self.staging.expire()
        assert self.staging.num_leases == 0
        assert self.staging.num_used == 0
        self.check()
        for engine in (self.prefill, self.decode):
            assert engine.kv.measure().num_pages_held == 0

    def close(self) -> None:
        self.line.close()
        self.prefill.close()
        self.decode.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut lines are tried again at once."""
    monkeypatch.setattr(breaker.Breaker, "allow", lambda _self: True)
    monkeypatch.setattr(page_server, "_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(page_server, "_UNKNOWN_SECONDS", 0.1)
    monkeypatch.setattr(peer, "_KEEPER_SECONDS", 0.05)


@pytest.fixture(params=["full", "gemma", "two windows"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.close()


def test_pages_come_while_they_are_computed(pair: Pair) -> None:
    draw = random.Random(1)
    for _ in range(10):
        request = pair.run(draw)
        assert (request.cache.tier, request.cache.source) == ("peer", "used")
        assert request.num_cached_tokens == (len(request.prompt_ids) - 1) // 4 * 4
    pair.settle()


def test_pages_come_through_shared_memory() -> None:
    pair, draw = Pair("gemma", maps=True), random.Random(2)
    sizes = []
    pair.line.on_frame = lambda _number, kind, data: sizes.append((kind, len(data))) or data  # type: ignore[func-returns-value]
    for _ in range(5):
        request = pair.run(draw)
        assert request.cache.source == "used"
    assert max(size for _, size in sizes) < 128, "only places are sent, no pages"
    assert wire.SLOT in {kind for kind, _ in sizes}
    pair.settle()
    pair.close()


@pytest.mark.parametrize("what", ["cut", "flip"])
def test_200_transfers_cut_at_random_bytes(what: str) -> None:
    """100 of each layout: at any byte of the stream, from the first of the handshake to the last page."""
    used = lost = 0
    for layers in ("full", "gemma"):
        pair, draw = Pair(layers), random.Random(3)
        pair.run(draw)
        longest = pair.line.num_bytes
        for _ in range(100):
            at = draw.randrange(longest + longest // 4)
            pair.line.cut_at, pair.line.flip_at = (at, None) if what == "cut" else (None, at)
            pair.clock.now += _TTL / 3  # leases that nobody could end make room in time
            request = pair.run(draw)
            used += request.cache.source == "used"
            lost += request.cache.source != "used"
        pair.line.cut_at = pair.line.flip_at = None
        pair.clock.now += 2 * _TTL
        assert pair.run(draw).cache.source == "used", "nothing is left of the trouble"
        pair.settle()
        pair.close()
    assert lost > 50
    assert used > 5


def test_abort_at_every_message() -> None:
    """Either side gives up just as a message passes."""
    draw = random.Random(4)
    for side in ("decode", "prefill"):
        pair = Pair(batch_tokens=8)
        pair.run(draw)
        for stop in range(pair.line.num_frames + 1):
            first, second = pair.requests(draw)
            engine, doomed = (pair.decode, second) if side == "decode" else (pair.prefill, first)
            reached: list[int] = []

            def see(number: int, _kind: int, data: bytes, stop: int = stop, reached: list[int] = reached) -> bytes:
                if number == stop:
                    reached.append(number)
                return data

            pair.line.on_frame = see
            pair.prefill.add(first)
            pair.decode.add(second)
            while pair.decode.core.has_work:
                if pair.prefill.core.has_work:
                    pair.prefill.step()
                if reached and engine.core.knows(doomed.request_id):
                    engine.core.cancel(doomed.request_id)
                    engine.kv.check()
                if pair.decode.core.has_work:
                    pair.decode.step()
            pair.prefill.run()
            if side == "prefill":
                assert pair.decode.outputs[second.request_id] == expected_output(second, second.seed, CONTEXT)
            pair.check()
        pair.settle()
        pair.close()


def test_a_killed_prefill_engine_is_a_miss() -> None:
    pair, draw = Pair(), random.Random(5)
    first, second = pair.requests(draw)
    pair.prefill.add(first)
    pair.prefill.step()  # a part of its pages
    pair.decode.add(second)
    pages: list[int] = []

    def die(_number: int, kind: int, data: bytes) -> bytes | None:
        pages.append(kind)
        return None if pages.count(wire.PAGE) == 3 else data

    pair.line.on_frame = die
    pair.decode.run()
    assert pair.decode.outputs[second.request_id] == expected_output(second, second.seed, CONTEXT)
    assert (second.cache.source, second.cache.reason) == ("lost", "tier_failed")
    assert second.cache.num_loaded_tokens == 8, "two pages came whole"
    pair.settle()
    pair.close()


def test_a_lost_done_and_a_killed_decode_engine_cost_the_lease_only() -> None:
    pair, draw = Pair(), random.Random(6)
    pair.line.on_request = lambda kind, data: b"" if kind == wire.DONE else data
    pair.run(draw)
    assert pair.staging.num_leases == 1
    used = pair.staging.num_used
    assert used > 0
    pair.clock.now += _TTL - 1
    pair.staging.expire()
    assert pair.staging.num_used == used
    pair.settle()
    pair.close()


def test_memory_that_is_full_loses_pages_and_nothing_else() -> None:
    pair, draw = Pair(staging_pages=6), random.Random(7)
    for _ in range(5):
        request = pair.run(draw)
        assert request.cache.source == "no_room"
        assert request.cache.num_loaded_tokens == 24
        wait_until(lambda: pair.staging.num_used == 0, 30)
    assert pair.staging.num_lost > 0
    pair.settle()
    pair.close()


def test_random_traffic_over_a_bad_line() -> None:
    """Many requests at once, shared prefixes, cancels on both sides, memory that is short everywhere."""
    pair, draw = Pair("gemma", staging_pages=60), random.Random(8)
    stems = [[draw.randrange(VOCABULARY) for _ in range(80)] for _ in range(3)]
    wanted: dict[str, Request] = {}
    for number in range(120):
        prompt = draw.choice(stems)[: draw.randint(8, 80)] + [draw.randrange(VOCABULARY) for _ in range(6)]
        name = f"t{number}"
        pair.line.cut_at = draw.choice([None, None, draw.randrange(20_000)])
        if draw.random() < 0.9:
            lease = KvLease(name, ttl=_TTL)
            pair.prefill.add(Request(f"p{number}", prompt, SamplingParams(max_tokens=1), publishes=lease))
        source = KvLease(name, pair.line.address, _TTL) if draw.random() < 0.8 else None
        request = Request(f"d{number}", prompt, SamplingParams(max_tokens=6), seed=number, source=source)
        pair.decode.add(request)
        wanted[request.request_id] = request
        for _ in range(3):
            if pair.prefill.core.has_work:
                pair.prefill.step()
            if pair.decode.core.has_work:
                pair.decode.step()
        if draw.random() < 0.2:
            victim = draw.choice(list(wanted))
            if pair.decode.core.cancel(victim):
                wanted.pop(victim)
        if draw.random() < 0.1:
            pair.prefill.core.cancel(f"p{number}")
    pair.line.cut_at = None
    pair.decode.run(beside=lambda: pair.prefill.step() if pair.prefill.core.has_work else None)
    for name, request in wanted.items():
        assert pair.decode.outputs[name] == expected_output(request, request.seed, CONTEXT)
    pair.settle()
    pair.close()
