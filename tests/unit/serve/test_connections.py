"""Who may connect and how slow a client may be, by the bookkeeping alone."""

from __future__ import annotations

import pytest

from tokenmill.serve.transport.connections import (
    PROBE_RESERVE,
    ConnectionTable,
    Phase,
    Slot,
    TransferClock,
    TransferLimits,
    address_group,
)

_LIMITS = TransferLimits(header_timeout=10, body_timeout=60, min_body_rate=100, keep_alive_timeout=5, write_timeout=30)


class _Table(ConnectionTable):
    """Remembers the order in which connections were closed."""

    def __init__(self, max_connections: int, max_per_address: int) -> None:
        super().__init__(max_connections, max_per_address)
        self.closed: list[str] = []

    def open(self, name: str, address: str, now: float, trusted: bool = False) -> Slot:
        slot = self.admit(address, lambda: self.closed.append(name), now)
        if trusted:
            self.trust(slot)
        return slot


def test_a_full_table_closes_the_oldest_untrusted_connection() -> None:
    table = _Table(3, 100)
    table.open("user", "1.1.1.1", 0.0, trusted=True)
    for number in range(2):
        table.open(f"silent-{number}", "2.2.2.2", 1.0 + number)
    newcomer = table.open("newcomer", "3.3.3.3", 10.0)
    assert table.closed == ["silent-0"]
    assert not newcomer.probe_only
    assert len(table) == 3


def test_trusted_and_young_connections_are_never_closed_for_others() -> None:
    table = _Table(2, 100)
    table.open("user", "1.1.1.1", 0.0, trusted=True)
    young = table.open("young", "1.1.1.1", 9.5)
    assert table.open("late", "2.2.2.2", 10.0).probe_only
    table.trust(young)
    assert table.open("later", "2.2.2.2", 100.0).probe_only
    assert table.closed == []


def test_the_reserve_is_bounded_and_its_oldest_gives_way() -> None:
    table = _Table(1, 100)
    table.open("user", "1.1.1.1", 0.0, trusted=True)
    for number in range(PROBE_RESERVE + 3):
        assert table.open(f"probe-{number}", "2.2.2.2", 1.0).probe_only
    assert table.closed == ["probe-0", "probe-1", "probe-2"]
    assert len(table) == 1 + PROBE_RESERVE


def test_an_address_has_its_own_limit_and_makes_room_among_its_own() -> None:
    table = _Table(100, 2)
    table.open("a-0", "1.1.1.1", 0.0)
    table.open("b-0", "2.2.2.2", 0.0)
    table.open("a-1", "1.1.1.1", 0.0, trusted=True)
    assert not table.open("a-2", "1.1.1.1", 5.0).probe_only
    assert table.closed == ["a-0"]
    assert all(not table.open(f"local-{number}", "", 5.0).probe_only for number in range(10))  # a Unix socket


def test_released_connections_leave_nothing_behind() -> None:
    table = _Table(10, 10)
    slots = [table.open(str(number), f"1.1.1.{number}", 0.0, trusted=number % 2 == 0) for number in range(10)]
    slots += [table.open("probe", "9.9.9.9", 0.0)]
    for slot in slots * 2:
        table.release(slot)
    assert len(table) == 0
    assert not table._by_address
    assert not table._untrusted


def _spend(clock: TransferClock, seconds: float, reading: bool = True, answered: bool = False) -> str | None:
    """Ticks of a second, until a limit is exceeded."""
    for _ in range(int(seconds)):
        exceeded = clock.tick(1.0, reading=reading, answered=answered, unwritten=0)
        if exceeded:
            return exceeded
    return None


def test_a_head_has_its_time_and_an_application_any() -> None:
    clock = TransferClock(_LIMITS)
    assert _spend(clock, 9) is None
    assert _spend(clock, 1) == "header_timeout"
    clock.enter(Phase.RESPONSE)
    assert _spend(clock, 10_000) is None
    clock.enter(Phase.IDLE)
    assert _spend(clock, 5) == "keep_alive_timeout"


@pytest.mark.parametrize(
    ("rate", "exceeded"), [(99, "min_body_rate"), (101, "body_timeout"), (1_000_000, "body_timeout")]
)
def test_a_body_must_keep_its_rate_and_end(rate: int, exceeded: str) -> None:
    clock = TransferClock(_LIMITS)
    clock.enter(Phase.BODY)
    for second in range(1, 61):
        clock.num_body_bytes += rate
        found = _spend(clock, 1)
        if found:
            assert found == exceeded
            assert second > 10
            return
    pytest.fail("the body never ended")


def test_a_body_that_the_server_does_not_read_is_not_slow() -> None:
    clock = TransferClock(_LIMITS)
    clock.enter(Phase.BODY)
    assert _spend(clock, 1000, reading=False) is None


def test_the_rest_of_a_body_whose_request_is_answered_gets_seconds_only() -> None:
    clock = TransferClock(_LIMITS)
    clock.enter(Phase.BODY)
    clock.num_body_bytes = 10**9
    assert _spend(clock, 5, answered=True) == "body_timeout"


def test_only_a_send_buffer_that_never_shrinks_counts_as_stalled() -> None:
    def ticks(*sizes: int) -> list[str | None]:
        clock = TransferClock(_LIMITS)
        clock.enter(Phase.RESPONSE)
        return [clock.tick(1.0, reading=True, answered=False, unwritten=size) for size in sizes]

    assert ticks(*[500] * 31)[-1] == "write_timeout"
    assert ticks(*range(1, 32))[-1] == "write_timeout"  # grows: we write, nobody reads
    assert set(ticks(*[500, 600, 400] * 40)) == {None}
    assert set(ticks(*[0, 500] * 40)) == {None}


def test_no_limit_is_no_limit() -> None:
    clock = TransferClock(TransferLimits(0, 0, 0, 0, 0))
    for phase in Phase:
        clock.enter(phase)
        assert all(clock.tick(1.0, reading=True, answered=False, unwritten=9) is None for _ in range(1000))
    assert TransferLimits(0, 0, 0, 0, 0).interval() == 1.0
    assert TransferLimits(2.0, 0, 0, 0, 8.0).interval() == 0.5


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "testclient"),
    ],
)
def test_an_ipv6_host_is_its_network(host: str, group: str) -> None:
    assert address_group(host) == group
