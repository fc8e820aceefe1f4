"""Refusals come late when there are many, successes never do."""

from tokenmill.serve.transport.refusals import Refusals


def test_a_burst_is_free_and_then_one_rate_holds() -> None:
    refusals = Refusals(10)
    delays = [refusals.record("a", 100.0) for _ in range(40)]
    assert delays[:20] == [0.0] * 20
    assert delays[20:] == sorted(delays[20:])
    assert abs(delays[39] - 2.0) < 1e-6  # twenty beyond the burst, ten a second


def test_waiting_pays_and_clients_are_apart() -> None:
    refusals = Refusals(10)
    for _ in range(30):
        refusals.record("a", 100.0)
    assert refusals.record("b", 100.0) == 0.0
    assert refusals.record("a", 100.0) > 1.0
    assert refusals.record("a", 110.0) == 0.0


def test_no_delay_is_longer_than_ten_seconds_and_the_table_is_bounded() -> None:
    refusals = Refusals(10)
    assert max(refusals.record("a", 100.0) for _ in range(1000)) <= 10.0
    for number in range(10_000):
        refusals.record(str(number), 100.0)
    assert len(refusals._paid) <= 4096


def test_a_limit_of_zero_delays_nothing() -> None:
    refusals = Refusals(0)
    assert max(refusals.record("a", 1.0) for _ in range(1000)) == 0.0
