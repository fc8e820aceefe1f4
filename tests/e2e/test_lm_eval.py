"""lm-evaluation-harness on our engine: the same items give the same choices as our own task."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.harness_task import TASK
from tokenmill.config import EngineConfig
from tokenmill.evaluate.task_run import TaskJob, run_task

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed")

ITEMS = 8


def test_the_harness_gives_our_figures(
    model_path: Callable[[str], Path], data_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks import TaskManager

    from tokenmill.evaluate.lm_eval_adapter import TokenmillLM

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    lines = (data_path / "tasks" / "arc_easy.jsonl").read_text().splitlines()[:ITEMS]
    items = tmp_path / "items.jsonl"
    items.write_text("\n".join(lines))
    (tmp_path / "local_arc.yaml").write_text(TASK.replace("FILE", json.dumps(str(items))))
    found = lm_eval.simple_evaluate(
        TokenmillLM(str(model_path("stories15m"))),
        tasks=["local_arc"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
        verbosity="ERROR",
    )["results"]["local_arc"]
    ours = run_task("stories15m", EngineConfig(), TaskJob(items))
    assert found["acc,none"] == pytest.approx(ours.metrics["acc"]["value"])
    assert found["acc_norm,none"] == pytest.approx(ours.metrics["acc_norm"]["value"])


def test_texts_and_answers(model_path: Callable[[str], Path]) -> None:
    from tokenmill.evaluate.lm_eval_adapter import TokenmillLM

    model = TokenmillLM(str(model_path("stories15m")), context=64)
    story = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    whole, part = model.loglikelihood_rolling([SimpleNamespace(args=(story * 8,)), SimpleNamespace(args=("Once",))])
    assert whole < -50 < part < 0
    pairs = [("Once upon a", " time"), ("Once upon a", " dime"), ("", "Once")]
    likely, unlikely, first = model.loglikelihood([SimpleNamespace(args=pair) for pair in pairs])
    assert likely[1] is True
    assert unlikely[1] is False
    assert likely[0] > -0.1 > -5 > unlikely[0]
    assert first[0] == pytest.approx(part, abs=1e-4)
    until = {"until": ["."], "max_gen_toks": 20, "do_sample": False}
    (text,) = model.generate_until([SimpleNamespace(args=("Once upon a time", until))])
    assert text == ", there was a little girl named Lily"
