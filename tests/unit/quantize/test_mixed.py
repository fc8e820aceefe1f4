"""Bit allocation: within the budget, near the optimum, and from sensitivities that fall as bits rise."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.quantize.methods.tiny_blocks import TinyModel
from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.allocation import allocate, allocate_within
from tokenmill.quantize.divergence import BlockWeights, DivergenceProbe
from tokenmill.quantize.mixed import (
    WIDTHS,
    Sensitivity,
    average_bits_within,
    budget_bytes,
    choose_widths,
    measure_block,
)

SCHEME = Scheme("int", 4, 32)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.lists(st.floats(0.001, 10.0), min_size=3, max_size=3)), min_size=1, max_size=5
    ),
    st.floats(0.0, 1.0),
)
def test_fits_the_budget_and_is_at_most_one_raise_from_the_optimum(
    groups: list[tuple[int, list[float]]], share: float
) -> None:
    widths = (2, 4, 8)
    errors = {str(i): dict(zip(widths, sorted(e, reverse=True), strict=True)) for i, (_, e) in enumerate(groups)}
    sizes = {str(i): {width: weights * width for width in widths} for i, (weights, _) in enumerate(groups)}
    low, high = (sum(size[width] for size in sizes.values()) for width in (2, 8))
    budget = int(low + (high - low) * share)
    chosen = allocate(errors, sizes, budget)
    assert sum(sizes[name][width] for name, width in chosen.items()) <= budget
    optimum = min(
        sum(errors[name][width] for name, width in zip(errors, choice, strict=True))
        for choice in product(widths, repeat=len(groups))
        if sum(sizes[name][width] for name, width in zip(errors, choice, strict=True)) <= budget
    )
    largest_raise = max(each[2] - each[8] for each in errors.values())
    assert sum(errors[name][width] for name, width in chosen.items()) <= optimum + largest_raise + 1e-9


def test_bytes_go_where_they_help() -> None:
    errors = {"deaf": {2: 1.0, 4: 0.9, 8: 0.89}, "keen": {2: 9.0, 4: 2.0, 8: 0.1}}
    sizes = {name: {2: 100, 4: 200, 8: 400} for name in errors}
    assert allocate(errors, sizes, 500) == {"deaf": 2, "keen": 8}
    assert allocate(errors, sizes, 800) == {"deaf": 8, "keen": 8}


def test_a_budget_below_the_narrowest_is_refused_with_the_least() -> None:
    with pytest.raises(UserError, match="200"):
        allocate({"a": {2: 1.0}, "b": {2: 1.0}}, {"a": {2: 100}, "b": {2: 100}}, 150)


def test_average_bits_become_bytes_with_their_scales() -> None:
    groups = [Sensitivity(("q", "k"), 3200, dict.fromkeys(WIDTHS, 1.0))]
    assert budget_bytes(groups, SCHEME, 4.0) == 3200 * 4.5 / 8
    assert budget_bytes(groups, SCHEME, 3.5) == 3200 * 4.0 / 8
    for scheme in (SCHEME, Scheme("int", 4, 64, symmetric=False)):
        budget = budget_bytes(groups, scheme, 3.25)
        assert average_bits_within(budget, 3200, scheme) == pytest.approx(3.25, abs=0.01)
    assert choose_widths(groups, SCHEME, 3200 * 4) == {"q": 2, "k": 2}  # nothing gains from more


def test_the_divergence_of_a_real_model_falls_with_every_bit(tmp_path: Path) -> None:
    model = TinyModel("llama", tmp_path)
    probe = DivergenceProbe(model.source, model.ids, BlockWeights(model.source, 1 << 30))
    groups = model.source.groups(0)
    names = [name for group in groups for name in group.names]
    importance = {name: torch.ones(model.source.shape(name)[1]) for name in names}
    measured = measure_block(probe, 0, dict.fromkeys(names, SCHEME), WIDTHS, (3, 4), importance)
    assert [each.names for each in measured] == [group.names for group in groups]
    for each in measured:
        errors = [each.errors[width] for width in WIDTHS]
        assert all(wider < 0.7 * narrower for narrower, wider in pairwise(errors))
    widths = choose_widths(measured, SCHEME, budget_bytes(measured, SCHEME, 3.5))
    assert len({widths[name] for name in groups[0].names}) == 1
    assert len(set(widths.values())) > 1


def test_the_fewest_bytes_within_a_limit() -> None:
    errors = {"a": {2: 1.0, 4: 0.1, 8: 0.0}, "b": {2: 4.0, 4: 0.5, 8: 0.0}}
    sizes = {name: {2: 100, 4: 200, 8: 400} for name in errors}
    assert allocate_within(errors, sizes, 1.5) == {"a": 2, "b": 4}
    assert allocate_within(errors, sizes, 0.6) == {"a": 4, "b": 4}
    assert allocate_within(errors, sizes, 0.0) == {"a": 8, "b": 8}
