"""A step's milliseconds fitted to steps that were timed: the cost model of a machine that was measured.

Linear in what a step holds (a fixed part, rows of the matrix products, sequences, prompts, attention work), fitted to
relative errors with no negative coefficient, so that more work never costs less. Has the interface of StepCost; knows
one model on one machine under one engine. Fitted by tokenmill/calibrate and to the steps that a server logged, stored
as JSON, used by the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FEATURES = ("step", "few rows", "rows", "many rows", "sequence", "prompt", "decode context", "prompt context")
_FEW_ROWS = 4  # up to here a step reads the weights from memory; more rows cost arithmetic
_MANY_ROWS = 32  # from here on the arithmetic runs at its best rate
_ROUNDS = 5
_STRETCHES = 20


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
    rows, prompts = count + tokens, len(prefill)  # decodes and prompts pass the same matrix products
    few, some, many = min(rows, _FEW_ROWS), min(max(0, rows - _FEW_ROWS), _MANY_ROWS - _FEW_ROWS), rows - _MANY_ROWS
    return (1.0, few, some, max(0, many), count + prompts, prompts, context / 1e3, pairs / 1e6)


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


def fit_cost(steps: Sequence[TimedStep], whole: bool = False) -> MeasuredCost:
    """Least squares on errors relative to the fitted time; coefficients that would be negative are held at zero.

    A step that another process interrupted takes several times as long. Such steps count little, unless `whole`: then
    the fitted times add up to the measured ones, as they must where the interruptions are a part of serving.
    """
    assert len(steps) >= len(FEATURES), "too few timed steps"
    times = np.array([step.ms for step in steps])
    rows = np.array([_features(step.prefill, step.count, step.context) for step in steps])
    scale, weights = times, np.ones(len(steps))
    for _ in range(_ROUNDS):
        solution = _non_negative(rows * (weights / scale)[:, None], weights * times / scale)
        # Relative to the fit: relative to the measured times, long ones would count less and the fit would be short.
        scale = np.maximum(rows @ solution, 1e-3 * times)
        error = np.abs(times / scale - 1.0)
        weights = np.sqrt(1.0 / np.maximum(1.0, error / max(1e-3, 1.5 * float(np.median(error)))))
    factor = _unexplained(times, scale) if whole else 1.0
    return MeasuredCost(tuple(float(factor * c) for c in solution))


def _unexplained(times: np.ndarray, fitted: np.ndarray) -> float:
    """Measured over fitted time in total: the median over stretches of the log, so that a time in which something else
    ran (the start of the server, for one) is left out, and what interrupts steps all the time is not."""
    usual = times < 20.0 * fitted
    stretches = zip(np.array_split(times[usual], _STRETCHES), np.array_split(fitted[usual], _STRETCHES), strict=True)
    return float(np.median([own.sum() / cost.sum() for own, cost in stretches if len(own)]))


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
