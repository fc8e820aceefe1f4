"""Which known rounding a vector of log-probabilities is most like, and how surely.

The endpoint's values e and each candidate's values c are compared on the same visible tokens of the same positions. If
the endpoint runs candidate c on another engine, e - c is that engine's arithmetic noise: small, of unknown size s. The
posterior integrates s over a prior around the step of 8-bit rounding. One more hypothesis, `OTHER`, says that e differs
from the reference by something that no candidate explains. Pure functions on arrays. Called by endpoint_report.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

OTHER = "another rounding"

_NOISE_SPREAD = 1.0  # of the logarithm of an engine's noise, around that of 8-bit rounding
_OTHER_RANGE = 300.0  # an unknown rounding differs from the reference by 1 to this many steps of 8-bit rounding
_INDEPENDENT_SHARE = 0.25  # positions of one passage share a context: this share of them counts
_SCALE_FLOOR = 0.2  # of the median position: where all candidates agree, a difference must not count without limit
_GRID = 240


@dataclass(frozen=True, slots=True)
class Visible:
    """Log-probabilities of the visible tokens of all positions, one after the other; position p owns
    `starts[p]:starts[p + 1]`."""

    starts: np.ndarray  # int64 [P + 1]
    values: np.ndarray  # float64 [E]

    @property
    def num_positions(self) -> int:
        return len(self.starts) - 1

    def with_values(self, values: np.ndarray) -> Visible:
        assert len(values) == len(self.values)
        return Visible(self.starts, values)

    def sums(self, entries: np.ndarray) -> np.ndarray:
        """Per position."""
        return np.add.reduceat(entries, self.starts[:-1])

    def means(self, entries: np.ndarray) -> np.ndarray:
        return self.sums(entries) / np.diff(self.starts)

    def spread(self, per_position: np.ndarray) -> np.ndarray:
        """One value per position -> one per entry."""
        return np.repeat(per_position, np.diff(self.starts))

    def conditional(self) -> Visible:
        """Given that the token is a visible one."""
        return self.with_values(self.values - self.spread(np.log(self.sums(np.exp(self.values)))))


@dataclass(frozen=True, slots=True)
class Match:
    name: str
    probability: float
    distance: float  # root mean square difference from the endpoint, nats


def is_renormalized(observed: Visible, reference: Visible) -> bool:
    """Whether an endpoint shows probabilities among its visible tokens instead of those of the whole vocabulary."""
    seen, real = observed.sums(np.exp(observed.values)), reference.sums(np.exp(reference.values))
    return bool(np.median(real) < 0.999 and np.mean(seen > 0.9999) > 0.9)


def visible_divergence(reference: Visible, other: Visible) -> np.ndarray:
    """KL(reference || other) per position, with all invisible tokens as one: a lower bound of the whole."""
    p, q = np.exp(reference.values), np.exp(other.values)
    seen = reference.sums(p * (reference.values - other.values))
    rest_p, rest_q = (np.clip(1 - reference.sums(each), 1e-9, 1) for each in (p, q))
    return np.maximum(seen + rest_p * np.log(rest_p / rest_q), 0.0)


def match_roundings(
    observed: Visible, reference: Visible, candidates: Mapping[str, Visible], step: tuple[str, str]
) -> list[Match]:
    """All candidates and OTHER, the most likely first. `step`: two candidates one step of 8-bit rounding apart."""
    scale = _position_scales(reference, candidates)
    noise = max(_residual(candidates[step[0]], candidates[step[1]], scale), 1e-6)
    count = max(1.0, _INDEPENDENT_SHARE * observed.num_positions)
    names = list(candidates)
    residuals = [_residual(observed, candidates[name], scale) for name in names]
    scores = [_score_of_candidate(each, noise, count) for each in residuals]
    scores.append(_score_of_other(_residual(observed, reference, scale), noise, count))
    weights = np.exp(np.array(scores) - max(scores))
    weights /= weights.sum()
    distances = [_distance(observed, candidates[name]) for name in names] + [_distance(observed, reference)]
    matches = [Match(*row) for row in zip([*names, OTHER], map(float, weights), distances, strict=True)]
    return sorted(matches, key=lambda match: (-match.probability, match.distance))


def _position_scales(reference: Visible, candidates: Mapping[str, Visible]) -> np.ndarray:
    """Per position, how far the candidates lie from each other: what a difference there is measured in."""
    stacked = np.stack([reference.values, *(each.values for each in candidates.values())])
    scales = np.sqrt(reference.means(stacked.var(axis=0)))
    return np.maximum(scales, max(_SCALE_FLOOR * float(np.median(scales)), 1e-9))


def _residual(first: Visible, second: Visible, scale: np.ndarray) -> float:
    """Root mean square over positions, in units of their scales."""
    squares = first.means((first.values - second.values) ** 2)
    return float(np.sqrt(np.mean(squares / scale**2)))


def _distance(first: Visible, second: Visible) -> float:
    return float(np.sqrt(np.mean((first.values - second.values) ** 2)))


def _score_of_candidate(residual: float, noise: float, count: float) -> float:
    """Log of the evidence: noise of unknown size s, with a log-normal prior around `noise`."""
    logs = np.linspace(np.log(noise) - 9, np.log(noise) + 9, _GRID)
    prior = np.exp(-0.5 * ((logs - np.log(noise)) / _NOISE_SPREAD) ** 2)
    return _integrate(logs, prior, residual, count)


def _score_of_other(residual: float, noise: float, count: float) -> float:
    """The same for a difference of unknown size, anything from one step upwards being equally likely."""
    logs = np.linspace(np.log(noise), np.log(noise * _OTHER_RANGE), _GRID)
    return _integrate(logs, np.ones(_GRID), residual, count)


def _integrate(logs: np.ndarray, prior: np.ndarray, residual: float, count: float) -> float:
    density = prior / (prior.sum() * (logs[1] - logs[0]))
    with np.errstate(divide="ignore"):
        terms = np.log(density) - count * (logs + 0.5 * (residual / np.exp(logs)) ** 2)
    largest = float(terms.max())
    return largest + float(np.log(np.exp(terms - largest).sum() * (logs[1] - logs[0])))
