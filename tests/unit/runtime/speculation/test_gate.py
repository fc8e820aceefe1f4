"""The gate of `--speculate auto`: open where drafting is measured to pay, else shut but for a few probing steps."""

from __future__ import annotations

import pytest

from tokenmill.runtime.speculation.gate import DraftGate


def _drive(gate: DraftGate, num_rows: int, steps: int, gain: float) -> int:
    """Steps of 10 ms of which drafts win a part; how many were let through."""
    opened = 0
    for _ in range(steps):
        if gate.lets_through(num_rows):
            opened += 1
            gate.record(num_rows, gain * 0.01, 0.01)
    return opened


def test_what_pays_stays_open() -> None:
    gate = DraftGate("suffix")
    assert _drive(gate, 1, 2000, 0.3) == 2000
    (decision,) = gate.decisions
    assert (decision.drafter, decision.sequences, decision.is_open) == ("suffix", "1", True)
    assert decision.reason == "measured to pay"
    assert decision.gain == pytest.approx(0.3)


def test_what_does_not_pay_is_probed_ever_more_rarely() -> None:
    gate = DraftGate("suffix")
    assert _drive(gate, 1, 1000, -0.05) <= 32 + 3 * 8
    assert _drive(gate, 1, 20_000, -0.05) <= 0.005 * 20_000
    assert [each.reason for each in gate.decisions] == ["measured not to pay"]


def test_the_loss_is_bounded_by_the_probing_share() -> None:
    """Drafts that lose a tenth of each step they are in: over a long run less than a thousandth is lost."""
    gate = DraftGate("suffix")
    steps = 30_000
    assert _drive(gate, 1, steps, -0.1) * 0.1 / steps < 0.001


def test_a_change_of_text_opens_it_again() -> None:
    gate = DraftGate("suffix")
    _drive(gate, 1, 3000, -0.05)
    opened = _drive(gate, 1, 10_000, 0.4)
    assert opened > 4000
    assert gate.decisions[0].is_open


def test_sizes_are_judged_apart() -> None:
    gate = DraftGate("suffix")
    _drive(gate, 1, 100, 0.5)
    _drive(gate, 30, 100, -0.2)
    assert [(each.sequences, each.is_open) for each in gate.decisions] == [("1", True), ("17-32", False)]
    assert gate.lets_through(2), "a size that was not measured yet is open"


def test_decisions_are_told() -> None:
    gate, told = DraftGate("grammar"), []
    gate.on_decision = lambda: told.append(gate.decisions[0].is_open)
    _drive(gate, 4, 32, -0.2)
    assert told == [False]


def test_a_loss_that_is_allowed_is_that_of_one_sequence() -> None:
    gate = DraftGate("grammar", -0.15)
    for rows in (1, 64):
        assert _drive(gate, rows, 32, -0.05) == 32
    assert [decision.is_open for decision in gate.decisions] == [True, False]
