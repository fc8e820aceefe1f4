"""The flags of `optimize`: what contradicts itself is refused in one line with its remedy, before a model is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tokenmill.cli.main import main
from tokenmill.cli.optimize import _job
from tokenmill.cli.optimize_flags import (
    LimitFlags,
    TrafficFlags,
    fill,
    parse_duration,
    parse_rivals,
    parse_saving,
    parse_today,
    refuse_contradictions,
)
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError

_OUT = ["--out", "out"]


@pytest.mark.parametrize(
    ("flags", "problem", "remedy"),
    [
        ([], "no output is given", "tokenmill optimize smollm2 --out cheaper"),
        ([*_OUT, "--watch"], "--watch is given without --traffic-log", "tokenmill serve --traffic-log DIR"),
        ([*_OUT, "--watch-interval", "1h"], "--watch-interval is given without --watch", "add --watch"),
        ([*_OUT, "--quality", "off", "--task", "t.jsonl"], "--task is given with --quality off", "drop one"),
        ([*_OUT, "--quality", "off", "--max-kld", "0.1"], "--max-kld is given with --quality off", "drop one"),
        ([*_OUT, "--quality", "maybe"], "maybe", "off"),
        ([*_OUT, "--max-task-loss", "1%"], "--max-task-loss is given without --task", "--task FILE"),
        ([*_OUT, "--trace", "a", "--prompts", "b"], "--trace and --prompts are given", "keep one"),
        ([*_OUT, "--rate-scale", "2"], "--rate-scale is given without --ttft or --itl", "--ttft p95=500ms"),
        ([*_OUT, "--ttft", "1s", "--replay-seconds", "0"], "--replay-seconds is 0", "more than 0"),
        ([*_OUT, "--rate", "3"], "--rate is given without --ttft or --itl", "--ttft p95=500ms"),
        ([*_OUT, "--ttft", "fast"], "'fast'", "p95=500ms"),
        ([*_OUT, "--rivals", "none,vllm"], "--rivals 'none,vllm'", "auto, none"),
        ([*_OUT, "--today", "vllm serve 'm"], "--today is not a command", "quote it"),
        ([*_OUT, "--task", "missing.jsonl"], "there is no file missing.jsonl", "check the path"),
        ([*_OUT, "--traffic-log", "missing"], "there is no folder missing", "check the path"),
        ([*_OUT, "--price", "-3"], "price is -3", "at least 0"),
    ],
)
def test_bad_flags_are_one_line_with_the_remedy(
    flags: list[str], problem: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["optimize", "there/is/no/such/model.gguf", *flags]) == 2
    error, advice = capsys.readouterr().err.strip().splitlines()
    assert error.startswith("error: ")
    assert problem in error
    assert advice.startswith("try: ")
    assert remedy in advice


def test_a_default_contradicts_nothing() -> None:
    refuse_contradictions({"quality": "off"})
    refuse_contradictions({"ttft": ["1s"], "rate_scale": 2.0, "replay_seconds": 10.0, "trace": "a.csv"})
    refuse_contradictions({"watch": True, "traffic_log": "log", "watch_interval": 60.0})


def test_values() -> None:
    assert [parse_duration(text) for text in ("30s", "15min", "2m", "1h", "45")] == [30, 900, 120, 3600, 45]
    with pytest.raises(UserError, match="soon"):
        parse_duration("soon")
    assert parse_saving("-60%") == parse_saving("60%") == parse_saving(-0.6) == -0.6
    assert parse_rivals("none") == ()
    assert parse_rivals("auto") == ("auto",)
    assert parse_rivals("llama.cpp, vllm,vllm") == ("llama.cpp", "vllm")
    assert parse_today("vllm serve 'a b' ") == "vllm serve 'a b'"


def test_the_records_take_what_was_typed_and_keep_their_defaults() -> None:
    limits = fill(LimitFlags, {"ttft": ["p95=500ms", "p50=1s"], "max_kld": 0.02, "minutes": 4.0})
    assert (limits.ttft, limits.max_kld, limits.max_task_loss) == (("p95=500ms", "p50=1s"), 0.02, 0.02)
    with pytest.raises(UserError, match="input_len"):
        fill(TrafficFlags, {"input_len": 0})


def test_the_job_has_every_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task = tmp_path / "task.jsonl"
    task.write_text("{}\n")

    class Opened:
        class description:
            context_length = 128

    monkeypatch.setattr("tokenmill.checkpoint.open.open_checkpoint", lambda _path: Opened)
    monkeypatch.setattr("tokenmill.checkpoint.sources.resolve", lambda _model: Opened)
    monkeypatch.setattr(Opened, "path", tmp_path, raising=False)
    given: dict[str, Any] = {
        "traffic_log": str(tmp_path), "ttft": ["p95=500ms"], "itl": ["40ms"], "task": [str(task)],
        "max_task_loss": 0.01, "max_kld": 0.03, "today": "http://localhost:8000", "rivals": "llama.cpp",
        "rate_scale": 2.0, "replay_seconds": 12.0, "quality_tokens": 1024,
    }  # fmt: skip
    job = _job("m", tmp_path / "out", given, EngineConfig(device="cpu"))
    assert job.device == "cpu"
    assert job.objectives is not None
    assert job.objectives.words == "ttft p95=500ms, itl p95=40ms"
    assert (job.tasks, job.max_task_loss, job.max_kld) == ((task,), 0.01, 0.03)
    assert (job.today, job.rivals, job.traffic_log) == ("http://localhost:8000", ("llama.cpp",), tmp_path)
    assert (job.traffic.rate_scale, job.traffic.replay_seconds, job.traffic.traffic_log) == (2.0, 12.0, tmp_path)
    assert (job.effort.context, job.effort.windows) == (128, 8)
    assert not job.quality_off
