"""Randomness that depends on nothing but the request: one uniform number per (seed, sibling, position).

A counter-based hash instead of a generator with state, so that a request draws the same numbers alone, in any batch,
after preemption, and on any backend.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
# Streams of numbers besides the sampler's own (0): two of verification, one of draft models.
ACCEPTING, REDRAWING, DRAFTING = 1, 2, 3


def _mix(value: int) -> int:
    """The finalizer of splitmix64: every input bit reaches every output bit."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, index: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) with 53 random bits. `stream` separates several draws at one position."""
    state = _mix(seed + 0x9E3779B97F4A7C15 & _MASK)
    state = _mix(state ^ _mix(index + 0x632BE59BD9B4E019 & _MASK))
    state = _mix(state + position * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03 & _MASK)
    return (state >> 11) * 2.0**-53
