"""The search: what it refuses, that nothing on the front is beaten, that the winner is the cheapest good plan."""

from __future__ import annotations

from itertools import permutations

import pytest

from tests.unit.plan.questions import question
from tokenmill.errors import UserError
from tokenmill.hardware.catalog import load_catalog
from tokenmill.plan.question.question import Limits
from tokenmill.plan.search.answer import answer, search_question
from tokenmill.plan.search.judging import Plan
from tokenmill.plan.search.search import CAREFUL_LOSS


def test_the_front_is_not_dominated_and_dominates_the_rest() -> None:
    found = search_question(question("llama-3.1-70b", "h100x8", load={"concurrency": 32}))

    def axes(plan: Plan) -> tuple[float, float, float]:
        return plan.rank[0], plan.estimate.tpot.value, plan.risk.high

    def beats(a: Plan, b: Plan) -> bool:
        return all(x <= y for x, y in zip(axes(a), axes(b), strict=True)) and axes(a) != axes(b)

    assert len(found.front) >= 2
    assert not any(beats(a, b) for a, b in permutations(found.front, 2))
    rest = [plan for plan in found.plans if plan not in found.front]
    assert rest
    assert all(any(beats(better, plan) for better in found.front) for plan in rest)


def test_the_winner_is_the_cheapest_that_keeps_the_promises() -> None:
    found = search_question(question("llama-3.1-8b", "h100x2", load={"concurrency": 16}))
    assert found.winner is not None
    assert found.winner.good
    careful = [plan for plan in found.plans if plan.good and plan.risk.high <= CAREFUL_LOSS]
    assert found.winner.rank == min(plan.rank for plan in careful)
    assert found.bolder is not None
    assert found.bolder.rank < found.winner.rank
    for plan in found.plans:
        assert plan.good == (plan.estimate.ttft.value <= 500 and plan.estimate.tpot.value <= 50 and not plan.failures)


def test_when_no_plan_is_good_the_one_that_misses_least_comes_first() -> None:
    found = search_question(question("llama-3.1-70b", "h100x4", load={"concurrency": 64, "ttft_ms": 60}))
    assert found.winner is None
    fewest = min(len(plan.failures) for plan in found.plans)
    alike = [plan for plan in found.plans if len(plan.failures) == fewest]
    assert found.plans[0].excess == min(plan.excess for plan in alike) > 1


@pytest.mark.parametrize(
    ("gpu", "fields", "reason"),
    [
        ("h100x1", {"weights": "bf16"}, "the weights alone do not fit: 131"),
        ("a100-40x1", {"weights": "int4"}, "weights alone do not fit|no room is left for KV"),
        ("h100x1", {"weights": "fp8", "load": {"itl_ms": 10}}, "10 ms is impossible"),
        ("h100x1", {"weights": "fp8", "kv": "fp8", "load": {"input_tokens": 32768}}, "less than one request of 33,024"),
    ],
)
def test_what_cannot_be_is_refused_with_the_limit(gpu: str, fields: dict[str, object], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        answer(question("llama-3.1-70b", gpu, **fields), load_catalog())  # type: ignore[arg-type]
    assert caught.value.remedy


def test_limits_bind() -> None:
    dear = search_question(question("llama-3.1-8b", "h100x2", load={"concurrency": 16}, limits=Limits(100.0)))
    assert dear.winner is None
    assert all(any("a month is above $100" in failure for failure in plan.failures) for plan in dear.plans)
    careful = search_question(
        question("llama-3.1-8b", "h100x2", load={"concurrency": 16}, limits=Limits(quality_loss=0.7))
    )
    assert careful.winner is not None
    assert careful.winner.risk.high <= 0.7
    assert careful.winner.deployment.weights.name in ("bf16", "fp8")


def test_a_rate_sizes_the_fleet() -> None:
    slow, fast = (
        search_question(question("llama-3.1-8b", "h100x1", load={"rate": rate}, fixed_fleet=False)).plans[0]
        for rate in (2.0, 80.0)
    )
    assert slow.replicas < fast.replicas
    capacity = fast.estimate.output_rate.value * fast.replicas / 256
    assert capacity >= 80.0 > capacity * (fast.replicas - 1) / fast.replicas
