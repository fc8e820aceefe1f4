"""Task files: kinds told by fields, refusals with line numbers, answers taken apart, results paired."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.evaluate.likelihood import Continuation
from tokenmill.evaluate.results import compare_with, item_hash, read_jsonl, read_metrics, write_results
from tokenmill.evaluate.task_run import TaskJob, detect_kind, run_task
from tokenmill.evaluate.tasks import TASKS
from tokenmill.evaluate.tasks.base import ItemResult, TaskOptions
from tokenmill.evaluate.tasks.choices import pick, pick_by_length
from tokenmill.evaluate.tasks.gsm8k import last_number, strict_number
from tokenmill.evaluate.tasks.humaneval import judge_completion
from tokenmill.evaluate.tasks.mmlu import Mmlu

KINDS = {
    "lambada": "lambada",
    "piqa": "multiple_choice",
    "arc_easy": "multiple_choice",
    "arc_challenge": "multiple_choice",
    "hellaswag": "hellaswag",
    "mmlu_dev": "mmlu",
    "mmlu_test": "mmlu",
    "truthfulqa": "truthfulqa",
    "gsm8k": "gsm8k",
    "ifeval": "ifeval",
    "humaneval": "humaneval",
}


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_every_benchmark_file_is_recognized_and_sound(name: str, kind: str, data_path: Path) -> None:
    rows = read_jsonl(data_path / "tasks" / f"{name}.jsonl")
    for _, item in rows:
        assert detect_kind(item) == kind
        assert TASKS.get(kind).defect(item) is None


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (['{"query": "q", "choices": ["a", "b"], "gold": 0}', "{oops"], "line 2 of .* is not JSON"),
        (["[1]"], "line 1 of .* is not an object"),
        (["", "  "], "has no items"),
        (['{"colour": 1}'], "no kind of task has items with the fields colour.*write one of lambada: context"),
        (
            ['{"query": "q", "choices": ["a", "b"], "gold": 0}', "", '{"query": "q", "choices": ["a", "b"]}'],
            "line 3 .* has no 'gold'",
        ),
        (['{"query": "q", "choices": ["a", "b"], "gold": 2}'], "'gold' is 2, there are 2 choices"),
        (['{"query": "q", "choices": ["a"], "gold": 0}'], "two texts or more"),
        (['{"question": "q", "answer": "no number"}'], "no number after ####"),
    ],
)
def test_bad_items_are_refused_before_a_model_is_looked_for(tmp_path: Path, lines: list[str], problem: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=problem):
        run_task("no-such-model", EngineConfig(), TaskJob(path))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kind": "helaswag"}, "did you mean 'hellaswag'"),
        ({"limit": -1}, "negative"),
        ({"chat": True}, "generates none"),
        ({"max_tokens": 5}, "generates none"),
        ({"num_shots": 2}, "has no examples"),
        ({"shots": Path("x")}, "takes no examples"),
        ({"kind": "gsm8k"}, "line 1 .* has no 'question'"),
        ({"out": Path("/no/such/folder/out.jsonl")}, "cannot write"),
        ({"compare": Path("missing.jsonl")}, "cannot read"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(tmp_path: Path, options: Mapping[str, Any], problem: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text('{"query": "q", "choices": ["a", "b"], "gold": 0}')
    with pytest.raises(UserError, match=problem):
        run_task("no-such-model", EngineConfig(), TaskJob(path, **options))


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so 3 + 4 = 7\n#### 7", 7.0, 7.0),
        ("#### $1,200.50 in all", 1200.5, 1200.5),
        ("#### -3\n#### 9", -3.0, 9.0),
        ("The answer is 12.", None, 12.0),
        ("It costs $3,000 or 2.5", None, 2.5),
        ("no idea ####", None, None),
        ("#### 18.", 18.0, 18.0),
    ],
)
def test_numbers_in_answers(text: str, strict: float | None, flexible: float | None) -> None:
    assert strict_number(text) == strict
    assert last_number(text) == flexible


def test_picks() -> None:
    found = [Continuation(-4.0, False, 2), Continuation(-6.0, False, 3), Continuation(-4.0, False, 1)]
    assert pick(found) == 0
    assert pick_by_length(found, [" ab", " abcdef", " ab"]) == 1


def test_mmlu_takes_examples_of_the_subject_only() -> None:
    item = {"subject": "high_school_art", "q": " Why? ", "choices": ["a", "b"], "answer": 1}
    shots = [{**item, "subject": "law", "q": "No?"}, {**item, "q": "How?"}, {**item, "q": "Who?"}]
    prompt = Mmlu(TaskOptions(shots, num_shots=1))._prompt(item)
    assert prompt == (
        "The following are multiple choice questions (with answers) about high school art.\n\n"
        "How?\nA. a\nB. b\nAnswer: B\n\nWhy?\nA. a\nB. b\nAnswer:"
    )
    assert Mmlu(TaskOptions()).num_shots == 0


def test_canonical_solutions_pass_and_others_do_not(data_path: Path) -> None:
    path = data_path / "tasks" / "humaneval.jsonl"
    for _, item in read_jsonl(path, 3):
        assert judge_completion(item, item["canonical_solution"]).passed
        assert not judge_completion(item, "    return None\n").passed
        whole = f"Sure!\n```python\n{item['prompt']}{item['canonical_solution']}```\nDone."
        assert judge_completion(item, whole).passed


def test_results_are_paired_by_what_was_asked(tmp_path: Path) -> None:
    items = [{"q": number} for number in range(40)]
    ours = [ItemResult({"acc": 1.0}) for _ in items]
    theirs = [ItemResult({"acc": float(number % 4 != 0)}, {"text": "é"}) for number in range(40)]
    path = tmp_path / "theirs.jsonl"
    write_results(path, items, theirs)
    assert [file.name for file in tmp_path.iterdir()] == ["theirs.jsonl"]
    others = read_metrics(path)
    assert others[item_hash({"q": 0})] == {"acc": 0.0}
    found = compare_with(path, others, list(reversed(items)), ours, "acc")
    assert found.difference == pytest.approx(0.25)
    assert found.low > 0.1
    assert found.p_value == pytest.approx(2 / 2**10)
    partly = compare_with(path, others, [{"q": 0}, {"q": "new"}], ours[:2], "acc")
    assert (partly.n, partly.difference) == (1, 1.0)
    with pytest.raises(UserError, match="none of these items"):
        compare_with(path, others, [{"q": "new"}], ours[:1], "acc")
    path.write_text(json.dumps({"q": 1}))
    with pytest.raises(UserError, match=r"line 1 .* is no result"):
        read_metrics(path)
