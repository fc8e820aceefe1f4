"""The answer: what a 70B model on one H100 comes to, its reasons, the target against a stated baseline."""

from __future__ import annotations

import json

import pytest

from tests.unit.plan.questions import answered
from tokenmill.plan.question.pricing import Pricing
from tokenmill.plan.question.workload import Arrivals


def test_fp8_70b_on_one_h100() -> None:
    found = answered("llama-3.1-70b", "h100x1", weights="fp8", kv="fp8")
    plan = found["plan"]
    assert 20_500 <= plan["kv_tokens"] <= 22_500
    assert plan["memory_gib_per_device"]["weights"] == pytest.approx(67.7, abs=0.3)
    text = " ".join(found["reasons"])
    assert f"{plan['kv_tokens']:,} KV tokens" in text
    assert "waste the hardware" in text
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("use", ["chat", "agent", "rag", "summarize", "code", "batch"])
def test_every_figure_has_an_interval_and_a_basis(use: str) -> None:
    plan = answered("llama-3.1-8b", "h100x1", use=use, weights="fp8")["plan"]
    for name in ("ttft_ms", "itl_ms", "output_tok_s"):
        assert plan[name]["low"] < plan[name]["value"] < plan[name]["high"]
        assert plan[name]["basis"].startswith("table scaled")
    assert sum(plan["memory_gib_per_device"][part] for part in ("weights", "activations", "runtime", "kv")) == (
        pytest.approx(plan["memory_gib_per_device"]["usable"], abs=0.05)
    )
    total = {"chat": 1280, "batch": 1536}.get(use, 0)
    assert plan["settings"]["max_model_len"] >= total


def test_the_nearest_cheaper_plan_and_the_rejected_ones_say_why() -> None:
    found = answered("llama-3.1-70b", "h100x4")
    assert found["feasible"]
    assert {row["plan"].split()[3] for row in found["rejected"]} >= {"bf16"}
    assert all(row["reason"] for row in found["rejected"])
    assert [row["per_million_output"] for row in found["pareto"]] == sorted(
        row["per_million_output"] for row in found["pareto"]
    )


def test_the_target_is_against_a_stated_baseline() -> None:
    found = answered("llama-3.1-70b", "h100x4", target_cost=-0.6)
    target = found["target"]
    assert "bf16 kv16" in target["baseline"]
    change = found["costs"]["per_million_blended"] / target["baseline_per_million_blended"] - 1
    assert target["predicted"] == pytest.approx(change, abs=0.001)
    assert target["met"] == (change <= -0.6)


def test_the_first_answer_keeps_quality_and_a_bolder_one_says_what_it_costs() -> None:
    found = answered("llama-3.1-70b", "h100x2", load={"concurrency": 32})
    assert found["plan"]["quality_loss_percent"]["high"] <= 1.0
    assert found["plan"]["settings"]["draft_tokens"] == 0
    bolder = found["bolder"]
    assert bolder["costs"]["per_million_output"] < found["costs"]["per_million_output"]
    assert any("not measured" in text for text in bolder["assumes"])
    asked = answered("llama-3.1-70b", "h100x2", load={"concurrency": 32}, weights="int4")
    assert asked["plan"]["weights"] == "int4-g128"


def test_our_own_engine_on_a_gpu() -> None:
    plan = answered("llama-3.1-8b", "h200x1", engine="tokenmill", load={"concurrency": 32})["plan"]
    assert plan["engine"] == "tokenmill"
    assert plan["weights"] in ("bf16", "fp8")
    assert plan["settings"]["max_num_batched_tokens"] == 8192


def test_lockstep_users_wait_for_each_other() -> None:
    loads = ({"concurrency": 32, "arrivals": Arrivals(kind)} for kind in ("lockstep", "poisson"))
    together, apart = (answered("llama-3.1-8b", "h100x1", weights="fp8", use="batch", load=load) for load in loads)
    assert together["arrivals"] == "lockstep"
    assert together["plan"]["ttft_ms"]["value"] > apart["plan"]["ttft_ms"]["value"]
    assert "lockstep score" in together["plan"]["ttft_ms"]["basis"]


def test_break_even_names_the_apis_of_like_models_first() -> None:
    found = answered("llama-3.1-70b", "h100x4", pricing=Pricing(utilization=0.8))
    rows = found["costs"]["break_even"]
    assert "llama-3.1-70b" in rows[0]["against"]
    assert all("8b" not in row["against"] for row in rows)
    full = found["costs"]["per_million_blended"] * 0.8
    for row in rows:
        assert row["utilization"] == pytest.approx(full / row["api_blended"], rel=0.01)
        assert row["possible"] == (row["utilization"] <= 1)


def test_without_a_price_the_answer_still_comes() -> None:
    found = answered("llama-3.2-1b", "raspberry-pi-5")
    assert "--price" in found["costs"]["note"]
    assert found["plan"]["engine"] == "llama.cpp"
