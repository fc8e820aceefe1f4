"""Matching by synthetic values: known roundings, an engine's noise on top, and what must not be claimed."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.evaluate.rounding_match import (
    OTHER,
    Visible,
    is_renormalized,
    match_roundings,
    visible_divergence,
)

_SIZES = {"F16": 0.0005, "Q8_0": 0.01, "Q6_K": 0.03, "Q5_K_M": 0.06, "Q4_K_M": 0.12, "Q4_K_S": 0.13, "Q4_0": 0.2}
_STEP = ("Q8_0", "F16")


def _visible(generator: np.random.Generator, positions: int = 160, tokens: int = 12) -> Visible:
    values = np.sort(generator.normal(-5, 2, (positions, tokens)))[:, ::-1]
    values -= np.log(np.exp(values).sum(1, keepdims=True) / 0.9)  # a tenth of the mass is invisible
    return Visible(np.arange(positions + 1) * tokens, values.reshape(-1))


def _case(seed: int) -> tuple[np.random.Generator, Visible, dict[str, Visible]]:
    """Errors differ in size from position to position, as those of real models do."""
    generator = np.random.default_rng(seed)
    reference = _visible(generator)
    sizes = reference.spread(generator.lognormal(0, 0.7, reference.num_positions))
    shared = generator.normal(0, 1, len(reference.values)) * sizes  # K-quants of one width err alike
    candidates = {}
    for name, size in _SIZES.items():
        own = generator.normal(0, 1, len(reference.values)) * sizes
        error = 0.9 * shared + 0.44 * own if name.startswith("Q4_K") else own
        candidates[name] = reference.with_values(reference.values + size * error)
    return generator, reference, candidates


@pytest.mark.parametrize("name", list(_SIZES))
@pytest.mark.parametrize("noise", [0.0, 0.005])
def test_a_rounding_is_known_through_the_noise_of_another_engine(name: str, noise: float) -> None:
    for seed in range(5):
        generator, reference, candidates = _case(seed)
        observed = candidates[name].values + generator.normal(0, noise, len(reference.values))
        best = match_roundings(reference.with_values(observed), reference, candidates, _STEP)[0]
        assert best.name == name
        assert best.probability > 0.95


def test_probabilities_sum_to_one_and_distances_are_those_of_the_values() -> None:
    _, reference, candidates = _case(0)
    matches = match_roundings(candidates["Q4_0"], reference, candidates, _STEP)
    assert sum(match.probability for match in matches) == pytest.approx(1)
    assert {match.name for match in matches} == {*candidates, OTHER}
    distances = {match.name: match.distance for match in matches}
    assert distances["Q4_0"] == 0
    difference = candidates["Q8_0"].values - candidates["Q4_0"].values
    assert distances["Q8_0"] == pytest.approx(np.sqrt((difference**2).mean()))


@pytest.mark.parametrize("size", [0.1, 0.3, 1.0])
def test_an_unknown_rounding_is_not_taken_for_a_known_one(size: float) -> None:
    """Its error has nothing to do with any candidate's; the float file would be the nearest."""
    for seed in range(5):
        generator, reference, candidates = _case(seed)
        observed = reference.with_values(reference.values + generator.normal(0, size, len(reference.values)))
        assert match_roundings(observed, reference, candidates, _STEP)[0].name == OTHER


def test_what_noise_hides_is_not_claimed() -> None:
    """Two candidates closer to each other than the noise: wrong answers must not be sure ones."""
    sure_and_wrong = unsure = 0
    for seed in range(60):
        generator, reference, candidates = _case(seed)
        near = {name: candidates[name] for name in _STEP}
        near["twin"] = reference.with_values(
            candidates["Q8_0"].values + generator.normal(0, 0.003, len(reference.values))
        )
        observed = candidates["Q8_0"].values + generator.normal(0, 0.05, len(reference.values))
        best = match_roundings(reference.with_values(observed), reference, near, _STEP)[0]
        sure_and_wrong += best.name != "Q8_0" and best.probability > 0.95
        unsure += best.probability < 0.95
    assert sure_and_wrong <= 3
    assert unsure > 30


def test_divergence_over_visible_tokens_is_a_lower_bound_and_exact_where_all_are_visible() -> None:
    generator = np.random.default_rng(3)
    logits = generator.normal(0, 2, (2, 50, 40))
    p, q = (each - np.log(np.exp(each).sum(1, keepdims=True)) for each in logits)
    whole = (np.exp(p) * (p - q)).sum(1)
    every = Visible(np.arange(51) * 40, p.reshape(-1)), Visible(np.arange(51) * 40, q.reshape(-1))
    assert visible_divergence(*every) == pytest.approx(whole, abs=1e-6)
    top = np.argsort(-p, axis=1)[:, :10]
    seen = [np.take_along_axis(each, top, 1).reshape(-1) for each in (p, q)]
    starts = np.arange(51) * 10
    part = visible_divergence(Visible(starts, seen[0]), Visible(starts, seen[1]))
    assert (part <= whole + 1e-9).all()
    assert part.mean() > 0.3 * whole.mean()


def test_probabilities_among_the_visible_tokens_are_recognised() -> None:
    reference = _visible(np.random.default_rng(0))
    assert is_renormalized(reference.conditional(), reference)
    assert not is_renormalized(reference, reference)
    sums = reference.conditional().sums(np.exp(reference.conditional().values))
    assert sums == pytest.approx(np.ones(reference.num_positions))
