"""The decision guide: every rule is reachable, none speaks where it does not apply, no text names an unknown fact."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.unit.plan.questions import question
from tokenmill.errors import UserError
from tokenmill.hardware.catalog import load_catalog
from tokenmill.plan.question.question import Question
from tokenmill.plan.search.answer import answer
from tokenmill.plan.search.guide import applies, check_traits, explain_plan, load_rules, plan_facts, trait_names

QUESTIONS = [
    question("llama-3.1-70b", "h100x4", weights="int4", traits=("fine-tuned", "critical")),
    question("llama-3.1-70b", "h100x1", weights="fp8", kv="fp8"),
    question("llama-3.1-8b", "a100-80x1", load={"concurrency": 64, "ttft_ms": 0, "itl_ms": 0}),
    question("llama-3.1-70b", "l40sx4", weights="int4", load={"ttft_ms": 0}),
    question("deepseek-v3", "h200x8", weights="fp8-block", use="agent", load={"ttft_ms": 0}),
    question("qwen2.5-vl-7b", "rtx-4090", weights="int4", use="code"),
    question("gemma-3-27b", "b200x1", use="batch", load={"concurrency": 128}),
    question("jamba-1.5-mini", "mi300xx2", weights="fp8"),
    question("smollm2-135m", "xeon-8480", traits=("development", "structured")),
    question("llama-3.1-8b", "m4-max"),
    question("llama-3.2-3b", "jetson-agx-orin"),
    question("llama-3.2-1b", "t4", load={"ttft_ms": 90}),
    question("llama-3.1-8b", "h100x8", weights="fp8", use="rag", load={"rate": 120.0}, fixed_fleet=False),
    question("llama-3.1-405b", "h100x16", weights="bf16", load={"concurrency": 16}),
    question("llama-3.1-8b", "rtx-4090", engine="llama.cpp"),
    question("llama-3.1-70b", "h100x2", weights="fp8", load={"concurrency": 3}),
]


@pytest.fixture(scope="module")
def facts() -> list[dict[str, object]]:
    catalog = load_catalog()
    return [plan_facts(each, answer(each, catalog)) for each in QUESTIONS]


def test_every_rule_applies_somewhere_and_nowhere_everywhere(facts: list[dict[str, object]]) -> None:
    for rule in load_rules():
        hits = [applies(rule, each) for each in facts]
        assert any(hits), f"{rule.rule} ({rule.topic}) is never reached: {rule.when}"
        assert not all(hits), f"{rule.rule} ({rule.topic}) is no rule: {rule.when}"


def test_all_rules_of_the_study_are_there() -> None:
    rules = load_rules()
    assert {f"R{number}" for number in range(1, 12)} <= {rule.rule for rule in rules}
    corrected = set(re.findall(r"C\d+", " ".join(rule.corrects for rule in rules)))
    assert {f"C{number}" for number in range(1, 28)} == corrected
    assert all(rule.source and rule.text for rule in rules)


def _rows(asked: Question) -> Iterator[dict[str, str]]:
    yield from explain_plan(asked, answer(asked, load_catalog()))


def test_texts_are_filled_and_say_whether_the_plan_follows() -> None:
    rows = list(_rows(QUESTIONS[1]))
    assert not any("{" in value for row in rows for value in row.values())
    hardware = next(row for row in rows if row["rule"] == "R1")
    assert "FP8" in hardware["text"]
    assert hardware["text"].endswith("This plan follows it.")
    departed = next(row for row in _rows(QUESTIONS[0]) if row["rule"] == "R1")
    assert "departs from it with int4-g128" in departed["text"]


def test_small_vision_and_fine_tuned_models_get_their_warnings() -> None:
    small = " ".join(row["text"] for row in _rows(QUESTIONS[8]))
    assert "Below 3 billion" in small
    assert "Merge the adapter" not in small
    vision = {row["topic"] for row in _rows(QUESTIONS[5])}
    assert "vision models" in vision
    assert "fine-tuned models" in {row["topic"] for row in _rows(QUESTIONS[0])}
    assert "vision models" not in {row["topic"] for row in _rows(QUESTIONS[0])}


def test_unknown_traits_are_refused() -> None:
    check_traits(trait_names())
    with pytest.raises(UserError, match="did you mean 'fine-tuned'"):
        check_traits(["finetuned"])
