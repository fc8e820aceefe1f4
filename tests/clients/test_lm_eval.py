"""lm-evaluation-harness over HTTP (`local-completions`), with the server's own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import MODEL
from tests.e2e.serving import RunningServer
from tests.harness_task import TASK

lm_eval = pytest.importorskip("lm_eval", reason="make test-clients installs it")

_ITEMS = 4


@pytest.fixture
def model(v1: str) -> Any:
    from lm_eval.api.registry import get_model

    return get_model("local-completions")(base_url=f"{v1}/completions", model=MODEL, max_length=2048, max_retries=1)


def test_likelihoods_and_generations(model: Any, server: RunningServer) -> None:
    from lm_eval.api.instance import Instance

    assert model.tokenizer_backend == "remote"

    def instances(kind: str, *arguments: Any) -> list[Any]:
        return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]

    pairs = (("Once upon a", " time"), ("Once upon a", " dime"))
    scores = [score for score, _is_greedy in model.loglikelihood(instances("loglikelihood", *pairs))]
    assert scores == pytest.approx([_score(server, *pair) for pair in pairs], abs=1e-2)
    assert scores[0] > scores[1] + 2
    until = {"until": ["."], "max_gen_toks": 12, "temperature": 0}
    (text,) = model.generate_until(instances("generate_until", ("Once upon a time", until)))
    assert text


def test_a_task_of_choices(model: Any, server: RunningServer, data_path: Path, tmp_path: Path) -> None:
    """The same accuracy as by asking the server ourselves for the likelihood of each choice."""
    from lm_eval.tasks import TaskManager

    lines = (data_path / "tasks" / "arc_easy.jsonl").read_text().splitlines()[:_ITEMS]
    items = tmp_path / "items.jsonl"
    items.write_text("\n".join(lines))
    (tmp_path / "local_arc.yaml").write_text(TASK.replace("FILE", json.dumps(str(items))))
    found = lm_eval.simple_evaluate(
        model,
        tasks=["local_arc"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
        verbosity="ERROR",
    )["results"]["local_arc"]
    right = 0
    for item in map(json.loads, lines):
        scores = [_score(server, f"{item['query']}\nAnswer:", f" {choice}") for choice in item["choices"]]
        right += scores.index(max(scores)) == item["gold"]
    assert found["acc,none"] == right / _ITEMS


def _score(server: RunningServer, context: str, choice: str) -> float:
    body = {"prompt": context + choice, "echo": True, "logprobs": 1, "max_tokens": 0, "model": MODEL}
    logprobs = server.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    begin = next(number for number, offset in enumerate(logprobs["text_offset"]) if offset >= len(context))
    return float(sum(logprobs["token_logprobs"][begin:]))
