"""Money: F15's published numbers (C8), discounts and overheads, the split that adds up, break-even."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.plan.questions import question
from tokenmill.errors import UserError
from tokenmill.hardware.catalog import ApiPrice, load_catalog
from tokenmill.plan.cost.ceilings import dollars_per_million
from tokenmill.plan.question.pricing import Pricing, utilization_of_day
from tokenmill.plan.question.workload import Workload
from tokenmill.plan.search.answer import search_question
from tokenmill.plan.search.money import TokenCosts, against_bill, break_even

H100 = load_catalog().find_device("h100")


@pytest.mark.parametrize(
    ("dollars", "rate", "expected"),
    [(4, 100, 11.11), (4, 120, 9.26), (16, 350, 12.70), (4, 60, 18.52), (3.5, 1709, 0.57)],
)
def test_dollars_per_million(dollars: float, rate: float, expected: float) -> None:
    assert dollars_per_million(dollars, rate, 1.0) == pytest.approx(expected, abs=0.005)


def test_break_even_of_a_loaded_h200() -> None:
    """$3.5 an hour, 1,709 output tokens/s at 1k in, 1k out: $0.28 of the mix, which beats $0.90 above 32 % load."""
    blended = dollars_per_million(3.5, 2 * 1709, 1.0)
    found = break_even(ApiPrice("host", "70b", 0.9, 0.9, 0.9, "", ""), Workload(1000, 1000), blended)
    assert blended == pytest.approx(0.28, abs=0.005)
    assert found.utilization == pytest.approx(0.32, abs=0.005)


def test_an_api_gives_its_cache_discount() -> None:
    api = ApiPrice("host", "m", 1.0, 0.1, 4.0, "", "")
    workload = Workload(900, 100, prefix_share=2 / 3)
    assert break_even(api, workload, 0.5).api_blended == pytest.approx((300 * 1 + 600 * 0.1 + 100 * 4) / 1000)


def test_a_device_hour_holds_everything() -> None:
    plain = Pricing(price=2.0)
    assert plain.device_hour(H100) == 2.0
    assert replace(plain, spot_discount=0.6).device_hour(H100) == pytest.approx(0.8)
    assert replace(plain, overhead=0.5).device_hour(H100) == pytest.approx(3.0)
    assert replace(plain, power=True).device_hour(H100) == pytest.approx(2.0 + 0.7 * 1.4 * 0.10)
    assert replace(plain, cold_starts_per_day=12, cold_start_minutes=6).device_hour(H100) == pytest.approx(2.0 * 1.05)
    assert Pricing().device_hour(H100) == pytest.approx((1.99 * 5.0) ** 0.5)


@pytest.mark.parametrize(
    "fields",
    [{"price": -1.0}, {"utilization": 0.0}, {"utilization": 1.5}, {"spot_discount": 1.0}, {"overhead": -0.1},
     {"pue": 0.9}, {"dollars_per_kwh": -1.0}, {"engineering": -1.0}, {"cold_starts_per_day": -1.0}],
)  # fmt: skip
def test_bad_prices_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(UserError):
        Pricing(**fields)  # type: ignore[arg-type]


def test_an_hour_by_its_parts() -> None:
    pricing = Pricing(
        2.0, 0.5, overhead=0.25, engineering=7300.0, power=True, cold_starts_per_day=12, cold_start_minutes=6
    )
    parts = pricing.hour_parts(H100)
    assert parts["rent"] == 1.0
    assert parts["overhead"] == pytest.approx(0.25 * (1.0 + parts["power"]))
    assert parts["cold_starts"] == pytest.approx(0.05 * 1.25 * (1.0 + parts["power"]))
    assert pricing.device_hour(H100) == pytest.approx(sum(parts.values()))
    assert pricing.fleet_hour(H100, 4) == pytest.approx(4 * sum(parts.values()) + 10.0)


def test_against_a_bill() -> None:
    """$730 a month that serve 1,000 million tokens at half load, beside a bill of $2,000 for 800 million."""
    costs = TokenCosts(0.5, 0.1, 1.0, 0.73, 1.0, 730.0)
    found = against_bill(2000.0, 800e6, costs, 0.5)
    assert found.bill_per_million == pytest.approx(2.5)
    assert found.change == pytest.approx(730 / 2000 - 1)
    assert found.break_even_tokens == pytest.approx(292e6)
    assert found.possible
    assert not against_bill(2000.0, 2500e6, costs, 0.5).possible  # more than the plan can serve at all
    assert against_bill(365.0, 0.0, costs, 0.5).change == pytest.approx(1.0)
    with pytest.raises(UserError, match="--current-bill"):
        against_bill(0.0, 1e6, costs, 0.5)


def test_no_price_is_said() -> None:
    with pytest.raises(UserError, match=r"--price"):
        Pricing().device_hour(replace(H100, price=None))


def test_the_parts_add_up_to_the_bill() -> None:
    asked = question("llama-3.1-8b", "h100x1", use="agent", load={"concurrency": 8}, pricing=Pricing(3.0))
    plan, workload = search_question(asked).plans[0], asked.workload
    costs = plan.costs
    assert costs is not None
    new, cached = workload.uncached_tokens, workload.input_tokens - workload.uncached_tokens
    assert 0 < costs.cached_input < costs.uncached_input < costs.output
    assert costs.hourly == 3.0
    seconds = workload.output_tokens / plan.estimate.output_rate.value / 0.5  # of the machine, half of it idle
    parts = (new * costs.uncached_input + cached * costs.cached_input + workload.output_tokens * costs.output) / 1e6
    assert parts == pytest.approx(3.0 / 3600 * seconds)


def test_cost_is_inverse_to_utilization() -> None:
    def blended(utilization: float) -> float:
        pricing = Pricing(3.0, utilization=utilization)
        plan = search_question(question("llama-3.1-8b", "h100x1", weights="fp8", kv="fp8", pricing=pricing)).plans[0]
        assert plan.costs is not None
        return plan.costs.blended

    assert blended(0.25) == pytest.approx(4 * blended(1.0))


def test_utilization_of_a_day() -> None:
    assert utilization_of_day([1.0] * 12 + [0.0] * 12) == 0.5
    with pytest.raises(UserError):
        utilization_of_day([0.0])
