"""Whether drafting pays at all, by the number of sequences in a step: opened and shut by what it was measured to win.

While a gate is open, drafting goes on and its net gain is added up, lookups included: time that a plain step would have
taken for the same tokens, less the time that was taken. At the end of a window the sum decides. A shut gate opens for a
few steps at growing intervals, so that a change of text is noticed; those steps are all that a wrong guess can cost.
Imports no torch. One gate each for the drafter of `--speculate auto` and for grammars.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_FIRST_WINDOW, _WINDOW, _PROBE = 32, 64, 8  # steps until a decision: at first, while open, while trying again
_MIN_GAP, _MAX_GAP = 256, 4096  # steps that a gate stays shut
MIN_GAIN = 0.005  # of the time: less is noise


@dataclass(slots=True)
class Decision:
    """For people: whether drafts are used in steps of so many sequences, and why."""

    drafter: str
    sequences: str
    is_open: bool = True
    gain: float = 0.0  # of the time of the steps that were measured last; may be negative
    reason: str = "not measured yet"


@dataclass(slots=True)
class _Size:
    decision: Decision
    rows: int = 1
    window: int = _FIRST_WINDOW
    gap: int = _MIN_GAP
    shut_for: int = 0  # steps
    num_steps: int = 0  # measured in this window
    gained: float = 0.0
    seconds: float = 0.0


class DraftGate:
    def __init__(self, drafter: str, min_gain: float = MIN_GAIN) -> None:
        """`min_gain`: of the time, that drafting must win for the gate to stay open. A loss that is allowed is that of
        one sequence: among many some always have drafts, so that there is less to wait for."""
        self._drafter = drafter
        self._min_gain = min_gain
        self._sizes: dict[int, _Size] = {}
        self.on_decision: Callable[[], None] = lambda: None

    @property
    def decisions(self) -> list[Decision]:
        return [self._sizes[key].decision for key in sorted(self._sizes)]

    def lets_through(self, num_rows: int) -> bool:
        """Whether the next step, of so many rows, may have drafts."""
        size = self._size(num_rows)
        if not size.shut_for:
            return True
        size.shut_for -= 1
        return False

    def record(self, num_rows: int, gained: float, seconds: float) -> None:
        """A step that was let through won `gained` of its `seconds`."""
        size = self._size(num_rows)
        size.num_steps += 1
        size.gained += gained
        size.seconds += seconds
        if size.num_steps >= size.window:
            self._decide(size)

    def _decide(self, size: _Size) -> None:
        decision = size.decision
        decision.gain = size.gained / size.seconds if size.seconds > 0 else 0.0
        decision.is_open = decision.gain >= (self._min_gain if self._min_gain > 0 else self._min_gain / size.rows)
        if decision.is_open:
            size.window, size.gap = _WINDOW, _MIN_GAP
            decision.reason = "measured to pay"
        else:
            size.shut_for, size.window = size.gap, _PROBE
            size.gap = min(2 * size.gap, _MAX_GAP)
            decision.reason = "measured not to pay"
        size.num_steps, size.gained, size.seconds = 0, 0.0, 0.0
        self.on_decision()

    def _size(self, num_rows: int) -> _Size:
        """Row counts up to a power of two are one."""
        key = max(0, num_rows - 1).bit_length()
        if key not in self._sizes:
            low, high = (1 << key - 1) + 1 if key else 1, 1 << key
            name = f"{low}-{high}" if low < high else f"{high}"
            self._sizes[key] = _Size(Decision(self._drafter, name), high)
        return self._sizes[key]
