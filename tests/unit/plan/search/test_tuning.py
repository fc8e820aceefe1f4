"""Batch limits, speculation and the cut of experts: chosen under the promises, fixed when stated, explained."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.plan.questions import answered, question
from tokenmill.errors import UserError
from tokenmill.plan.cost.step_cost import StepCost
from tokenmill.plan.question.question import Speculation, Tuning
from tokenmill.plan.search.answer import search_question
from tokenmill.plan.search.judging import Terms


def _text(found: dict[str, Any]) -> str:
    return "\n".join(found["reasons"])


def test_sequences_are_as_many_as_the_promised_itl_bears() -> None:
    asked = question("llama-3.1-70b", "h100x1", weights="int4", kv="fp8", load={"ttft_ms": 0})
    plan = search_question(asked).plans[0]
    limit = plan.deployment.max_sequences
    terms, cost = Terms(asked.workload, asked.pricing, asked.limits), StepCost(plan.deployment)
    within, beyond = (terms.estimate(plan.deployment, users, cost).tpot.value for users in (limit, 2 * limit))
    assert within <= 50.0
    assert beyond == pytest.approx(within, rel=0.05)  # whoever is too many waits: ITL holds
    assert any(f"{limit} sequences a step: one more would break the ITL of 50 ms" in each for each in plan.tuning)
    looser = question("llama-3.1-70b", "h100x1", weights="int4", kv="fp8", load={"ttft_ms": 0, "itl_ms": 100})
    assert search_question(looser).plans[0].deployment.max_sequences > limit


def test_too_many_users_wait_rather_than_break_the_itl() -> None:
    """A fixed fleet with more users than its ITL bears, and no promise on the first token."""
    found = answered("llama-3.1-70b", "h100x1", weights="int4", load={"concurrency": 128, "ttft_ms": 0})
    assert found["feasible"]
    assert found["plan"]["settings"]["max_num_seqs"] < 128
    assert found["plan"]["itl_ms"]["value"] <= 50
    assert found["plan"]["ttft_ms"]["value"] > 1000


def test_small_steps_where_kv_room_needs_them() -> None:
    """28,000 tokens do not fit beside a step of 8,192 tokens, but they do beside one of 2,048."""
    fields: dict[str, Any] = {
        "weights": "fp8", "kv": "fp8", "load": {"input_tokens": 24_000, "output_tokens": 1000, "ttft_ms": 0}
    }  # fmt: skip
    found = answered("llama-3.1-70b", "h100x1", **fields)
    assert found["plan"]["settings"]["max_num_batched_tokens"] == 2048
    assert found["plan"]["kv_tokens"] > 25_000
    assert "more for KV than the default 8,192" in _text(found)
    with pytest.raises(UserError, match="less than one request of 25,000"):
        answered("llama-3.1-70b", "h100x1", tuning=Tuning(batch_tokens=8192, max_sequences=256), **fields)


def test_stated_limits_stay() -> None:
    found = answered("llama-3.1-8b", "h100x1", weights="fp8", tuning=Tuning(max_sequences=12, batch_tokens=4096))
    settings = found["plan"]["settings"]
    assert (settings["max_num_seqs"], settings["max_num_batched_tokens"]) == (12, 4096)
    assert found["plan"]["users_per_replica"] <= 12
    assert "12 sequences a step: fixed by the user" in _text(found)
    assert "4,096 tokens a step: fixed by the user" in _text(found)


def test_batch_work_goes_beyond_the_default_batch() -> None:
    found = answered("llama-3.1-8b", "b200x1", use="batch", weights="fp8")
    assert found["plan"]["settings"]["max_num_seqs"] > 256


def test_the_bolder_plan_speculates_where_it_pays() -> None:
    """The first answer counts on no assumed acceptance; the bolder one says what it assumes."""
    few, many = (
        answered(
            "llama-3.1-70b", "h100x4", weights="fp8", load={"concurrency": users}, tuning=Tuning(speculation="auto")
        )
        for users in (2, 256)
    )
    assert not few["speculation"]["used"]
    assert "speculation off: its acceptance is not measured" in _text(few)
    assert few["bolder"]["plan"]["settings"]["draft_tokens"] == 4
    assert "60% of 4 drafts accepted (assumed)" in few["bolder"]["assumes"]
    assert few["bolder"]["costs"]["per_million_output"] < few["costs"]["per_million_output"]
    assert few["speculation"]["pays_up_to_batch"] < 256
    assert "bolder" not in many


def test_a_drafter_takes_memory() -> None:
    plain, drafting = (
        answered("llama-3.1-70b", "h100x2", weights="fp8", kv="fp8", tuning=Tuning(speculation=mode))["plan"]
        for mode in ("off", "on")
    )
    assert drafting["memory_gib_per_device"]["weights"] > 1.02 * plain["memory_gib_per_device"]["weights"]
    assert drafting["kv_tokens"] < plain["kv_tokens"]


def test_speculation_can_be_fixed() -> None:
    on, off = (
        answered(
            "llama-3.1-70b", "h100x4", weights="fp8", kv="fp8", tp=4, load={"concurrency": 4}, tuning=Tuning(0, 0, mode)
        )
        for mode in ("on", "off")
    )
    assert on["plan"]["itl_ms"]["value"] < 0.8 * off["plan"]["itl_ms"]["value"]
    assert on["plan"]["itl_ms"]["high"] >= 0.99 * off["plan"]["itl_ms"]["high"]  # drafts may all be refused
    assert "F10" in on["plan"]["itl_ms"]["basis"]
    assert "F10" not in off["plan"]["itl_ms"]["basis"]
    assert off["costs"]["per_million_output"] > on["costs"]["per_million_output"]


def test_hopeless_drafts_are_not_used() -> None:
    tuning = Tuning(speculation="auto", drafts=Speculation(4, 0.05, 0.1))
    assert not answered("llama-3.1-70b", "h100x4", load={"concurrency": 2}, tuning=tuning)["speculation"]["used"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"speculation": "maybe"}, "auto, on, off"), ({"max_sequences": -1}, "1 or more")],
)
def test_bad_tuning_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Tuning(**fields)
    assert message in str(caught.value)


def test_bad_drafts_are_refused() -> None:
    for fields in ((0, 0.5), (4, 1.5), (4, -0.1)):
        with pytest.raises(UserError, match=r"speculation with .* is impossible"):
            Speculation(*fields)


def test_experts_are_placed_where_that_is_cheaper() -> None:
    load = {"concurrency": 512, "ttft_ms": 0, "itl_ms": 100}
    found = search_question(question("deepseek-v3", "h200x8", weights="fp8-block", load=load))
    cuts = {(p.deployment.tp, p.deployment.data_parallel, p.deployment.ep) for p in found.plans}
    assert {(8, 1, 1), (8, 1, 8), (1, 8, 8)} <= cuts
    best = found.plans[0]
    assert best.deployment.ep == 8
    whole = min((p for p in found.plans if p.deployment.ep == 1), key=lambda p: p.order())
    assert best.rank < whole.rank
    text = _text(answered("deepseek-v3", "h200x8", weights="fp8-block", load=load))
    assert "whole experts on 8 devices, attention replicated" in text
    assert "per million output tokens against" in text


def test_experts_can_be_fixed() -> None:
    found = answered("deepseek-v3", "h200x8", weights="fp8-block", load={"concurrency": 64, "ttft_ms": 0}, ep=1)
    assert (found["plan"]["tp"], found["plan"]["ep"]) == (8, 1)
    copied = answered("deepseek-v3", "h200x8", weights="fp8-block", load={"ttft_ms": 0}, ep=8, data_parallel=8)
    assert (copied["plan"]["tp"], copied["plan"]["data_parallel"], copied["plan"]["devices"]) == (1, 8, 8)
    with pytest.raises(UserError, match="no combination"):
        answered("llama-3.1-70b", "h100x8", ep=8)  # no experts
