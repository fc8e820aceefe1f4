"""A step's milliseconds fitted to steps that were timed: the cost model of a machine that was measured.

Linear in what a step holds (a fixed part, decodes, prompts, tokens, attention work), fitted to relative errors with no
negative coefficient, so that more work never costs less. Has the interface of StepCost; knows one model on one machine
under one engine. Fitted by tokenmill/calibrate, stored as JSON, used by the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FEATURES = ("step", "few decodes", "decode", "prompt", "few tokens", "prompt token", "decode context", "prompt context")
_FEW_DECODES = 4  # up to here a batch is read from memory once; more rows cost arithmetic
_FEW_TOKENS = 32


@dataclass(frozen=True, slots=True)
class TimedStep:
    prefill: tuple[tuple[int, int], ...]  # (new tokens, context before them)
    count: int  # sequences that decode
    context: int  # their total context
    ms: float


def _features(prefill: Sequence[tuple[int, int]], count: int, context: float) -> tuple[float, ...]:
    tokens = 0
    pairs = 0.0
    for new, before in prefill:
        tokens += new
        pairs += new * (before + 0.5 * (new + 1))
    few = min(count, _FEW_DECODES)
    return (1.0, few, count - few, len(prefill), min(tokens, _FEW_TOKENS), tokens, context / 1e3, pairs / 1e6)


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    coefficients: tuple[float, ...]  # ms per unit of FEATURES
    token_ms: float = 0.0  # what serving adds for each sequence of a step: other processes on the same cores

    def step_ms(self, prefill: Sequence[tuple[int, int]], decode: tuple[int, float]) -> float:
        count, context = decode
        if not count and not prefill:
            return 0.0
        features = _features(prefill, count, context)
        served = self.token_ms * (count + len(prefill))
        return served + sum([c * f for c, f in zip(self.coefficients, features, strict=True)])


def fit_cost(steps: Sequence[TimedStep]) -> MeasuredCost:
    """Least squares on relative errors; coefficients that would be negative are held at zero."""
    assert len(steps) >= len(FEATURES), "too few timed steps"
    times = np.array([step.ms for step in steps])
    rows = np.array([_features(step.prefill, step.count, step.context) for step in steps]) / times[:, None]
    weights = _robust_weights(rows, np.ones(len(steps)))
    return MeasuredCost(tuple(float(c) for c in _non_negative(rows * weights[:, None], weights)))


def _robust_weights(rows: np.ndarray, ones: np.ndarray) -> np.ndarray:
    """A step that another process interrupted takes several times as long: such steps count little."""
    weights = ones
    for _ in range(5):
        error = np.abs(rows @ _non_negative(rows * weights[:, None], weights) - 1.0)
        scale = max(1e-3, 1.5 * float(np.median(error)))
        weights = np.sqrt(1.0 / np.maximum(1.0, error / scale))
    return weights


def _non_negative(rows: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares with coefficients of at least zero: drop the most negative one until none is."""
    active = [column for column in range(rows.shape[1]) if np.any(rows[:, column])]
    solution = np.zeros(rows.shape[1])
    while active:
        found, *_ = np.linalg.lstsq(rows[:, active], target, rcond=None)
        worst = int(np.argmin(found))
        if found[worst] >= 0:
            solution[active] = found
            break
        del active[worst]
    return solution


def fit_error(cost: MeasuredCost, steps: Sequence[TimedStep]) -> float:
    """Median relative error over timed steps."""
    errors = [abs(cost.step_ms(step.prefill, (step.count, float(step.context))) / step.ms - 1) for step in steps]
    return float(np.median(errors))
