"""The breaker with a clock of the test's own."""

from __future__ import annotations

from tokenmill.engine.kv.tier.breaker import CLOSED, HALF_OPEN, OPEN, Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_closed_open_half_open_and_closed_again() -> None:
    clock = Clock()
    breaker = Breaker(clock, first_pause=1.0, max_pause=4.0)
    assert breaker.allow()
    assert not breaker.succeeded(), "nothing new"
    assert breaker.failed(), "news"
    assert (breaker.state, breaker.ready, breaker.allow()) == (OPEN, False, False)
    clock.now += 1.0
    assert breaker.ready
    assert breaker.allow()
    assert breaker.state == HALF_OPEN
    assert not breaker.allow(), "one trial at a time"
    assert not breaker.ready
    assert breaker.succeeded()
    assert breaker.state == CLOSED
    assert breaker.allow()


def test_pauses_double_up_to_a_limit_and_start_over_after_a_success() -> None:
    clock = Clock()
    breaker = Breaker(clock, first_pause=1.0, max_pause=4.0)
    breaker.failed()
    for pause in (1.0, 2.0, 4.0, 4.0):
        clock.now += pause - 0.01
        assert not breaker.allow()
        clock.now += 0.01
        assert breaker.allow()
        assert not breaker.failed(), "no news"
    clock.now += 4.0
    assert breaker.allow()
    assert breaker.succeeded()
    breaker.failed()
    clock.now += 1.0
    assert breaker.allow()
