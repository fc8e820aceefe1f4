"""Rival engines and the deployment of today, measured: real servers under a short replay."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.serving import serving
from tokenmill.evaluate.endpoint_probe import ProbePlan
from tokenmill.optimize.arrivals import Arrivals
from tokenmill.optimize.objectives import Objectives
from tokenmill.optimize.results import HARMED, PASSED, SLOWER, CandidateResult
from tokenmill.optimize.rivals.llamacpp import LlamaCppRival
from tokenmill.optimize.rivals.measure import measure_rivals
from tokenmill.optimize.rivals.quality import EndpointJudge
from tokenmill.optimize.today import measure_today
from tokenmill.quantize.calibration_text import built_in_held_out
from tokenmill.quantize.roundings import RoundingFiles

_ARRIVALS = Arrivals(
    (0.0, 0.05, 0.1, 0.15), tuple([number + 300] * 20 for number in range(4)), (8, 8, 8, 8), "four requests", 32000
)
_PLAN = ProbePlan(passages=4, length=40, answer_tokens=8, samples=1, temperature=0.0, positions=64)


@pytest.fixture(scope="module")
def source(model_path: Callable[[str], Path]) -> Path:
    return model_path("stories15m")


def _judge(source: Path, limit: float) -> EndpointJudge:
    return EndpointJudge(source, built_in_held_out(), limit, plan=_PLAN)


def _measured(result: CandidateResult) -> None:
    assert result.latency is not None, result.reason
    assert (result.latency.requests, result.latency.failed) == (4, 0), result.latency.refusal
    assert result.latency.output_tok_s > 0


def test_llama_cpp_is_a_candidate(source: Path, tmp_path: Path) -> None:
    if LlamaCppRival().missing():
        pytest.skip(f"llama.cpp is not installed: {LlamaCppRival().missing()}")
    said: list[str] = []
    files = RoundingFiles(source)
    (eight,) = measure_rivals(
        ["llama.cpp"],
        files.find("Q8_0"),
        _ARRIVALS,
        Objectives(),
        _judge(source, 0.05),
        said.append,
        weights="Q8_0",
        logs=tmp_path,
    )
    _measured(eight)
    assert (eight.verdict, eight.engine, eight.weights) == (PASSED, "llama.cpp", "Q8_0")
    assert eight.quality is not None
    assert 0 <= eight.quality.kld_mean < 0.05
    assert eight.quality.top1_agreement > 0.8
    assert (tmp_path / "llama.cpp.log").read_text()
    (three,) = measure_rivals(
        ["llama.cpp"], files.find("Q3_K_M"), _ARRIVALS, Objectives(), _judge(source, 0.01), said.append
    )
    assert three.verdict == HARMED
    assert "perplexity grows" in three.reason


def test_today_is_a_command_or_a_url(source: Path) -> None:
    command = f"{sys.executable} -m tokenmill serve {source} --context 128"
    result = measure_today(command, source, _ARRIVALS, Objectives(), judge=_judge(source, 0.01))
    _measured(result)
    assert (result.verdict, result.engine) == (PASSED, "tokenmill")
    assert result.quality is not None
    assert result.quality.loss == pytest.approx(0, abs=1e-3)  # the same weights on the same engine
    with serving(source, "--context", "128") as server:
        running = measure_today(server.url, source, _ARRIVALS, Objectives())
        _measured(running)
        missed = measure_today(server.url, source, _ARRIVALS, Objectives.parse(["p95=0.001ms"], []))
        assert missed.verdict == SLOWER
        assert "ttft p95" in missed.reason
        assert running.engine == server.url.removeprefix("http://")
        assert server.process.poll() is None  # it is not ours to stop
