"""`tokenmill eval endpoint` against real servers: ours and llama.cpp's, with files whose rounding is known."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.serving import RunningServer, serving
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.evaluate.endpoint import EndpointClient
from tokenmill.evaluate.endpoint_probe import ANSWERS, GENERATED, PROMPT, ProbePlan
from tokenmill.evaluate.endpoint_report import EndpointJob, EndpointReport, measure_endpoint, probe_endpoint
from tokenmill.optimize.rivals.base import RivalWorkload
from tokenmill.optimize.rivals.llamacpp import LlamaCppRival
from tokenmill.optimize.rivals.process import free_port
from tokenmill.quantize.calibration_text import built_in_held_out
from tokenmill.quantize.roundings import RoundingFiles

_NAMES = ("F16", "Q8_0", "Q4_0")
_PLAN = ProbePlan(passages=6, length=48, answer_tokens=8, samples=2, positions=96)


@pytest.fixture(scope="module")
def source(model_path: Callable[[str], Path]) -> Path:
    return model_path("stories15m")


@pytest.fixture(scope="module")
def files(source: Path) -> RoundingFiles:
    return RoundingFiles(source)


def _measure(url: str, source: Path, files: RoundingFiles, method: str = "") -> EndpointReport:
    job = EndpointJob(source, built_in_held_out(), _PLAN, _NAMES, (), method)
    with EndpointClient(url) as client:
        return measure_endpoint(client, job, EngineConfig(), files.find)


@pytest.fixture(scope="module")
def four_bits(files: RoundingFiles) -> Iterator[RunningServer]:
    with serving(files.find("Q4_0")) as server:
        yield server


@pytest.mark.parametrize("name", [pytest.param("F16", marks=pytest.mark.slow), "Q8_0"])
def test_our_server_is_known_by_its_file(name: str, source: Path, files: RoundingFiles) -> None:
    with serving(files.find(name)) as server:
        report = _measure(server.url, source, files)
    assert report.method == PROMPT
    assert report.most_like == name
    assert report.confidence > 0.95
    assert report.rerun_noise < 0.01


def test_both_methods_know_four_bits_and_its_divergence(
    four_bits: RunningServer, source: Path, files: RoundingFiles
) -> None:
    for method in (PROMPT, GENERATED):
        report = _measure(four_bits.url, source, files, method)
        assert (report.method, report.most_like) == (method, "Q4_0")
        assert report.confidence > 0.95
        own = next(each.kld_mean for each in report.candidates if each.weights == "Q4_0")
        assert report.kld_mean == pytest.approx(own, rel=0.2)
        assert report.kld_low <= report.kld_mean <= report.kld_high


def test_sampled_answers_say_less(four_bits: RunningServer, source: Path, files: RoundingFiles) -> None:
    report = _measure(four_bits.url, source, files, ANSWERS)
    assert report.method == ANSWERS
    assert sum(each.probability for each in report.candidates) == pytest.approx(1)
    kld = [each.kld_mean for each in report.candidates]
    assert min(kld) <= report.kld_mean <= max(kld)


def test_the_command_prints_the_contract(four_bits: RunningServer) -> None:
    command = [sys.executable, "-m", "tokenmill", "eval", "endpoint", four_bits.url, "--reference", "stories15m"]
    command += ["--candidates", "F16,Q8_0,Q4_0", "--kv", "int4", "--passages", "4", "--length", "40", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["most_like"] == "Q4_0"
    assert result["most_like_kv"] == "unquantized"
    assert {"kld_mean", "most_like", "confidence", "candidates"} <= set(result)
    assert {(each["weights"], each["kv"]) for each in result["candidates"]} >= {
        ("Q4_0", "int4"),
        ("F16", "unquantized"),
    }


def test_an_unreachable_endpoint_is_exit_2_with_the_remedy() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "tokenmill", "eval", "endpoint", url, "--reference", "stories15m"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert lines[-2].startswith(f"error: {url} cannot be reached")
    assert lines[-1].startswith("try: start the server")


def test_another_tokenizer_is_refused(four_bits: RunningServer, model_path: Callable[[str], Path]) -> None:
    with (
        EndpointClient(four_bits.url) as client,
        pytest.raises(UserError, match="another tokenizer than the reference"),
    ):
        probe_endpoint(client, model_path("smollm2"), built_in_held_out(), _PLAN)


@pytest.mark.slow
def test_llama_cpp_is_known_by_its_file(source: Path, files: RoundingFiles) -> None:
    """Other kernels, the same file: the rounding shows through."""
    rival = LlamaCppRival()
    if rival.missing():
        pytest.skip(f"llama.cpp is not installed: {rival.missing()}")
    for name in ("F16", "Q4_0"):
        with rival.start(files.find(name), RivalWorkload(256, 1)) as server:
            report = _measure(server.url, source, files)
        assert report.most_like == name, report.candidates
        assert report.confidence > 0.9
