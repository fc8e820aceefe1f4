"""`tokenmill bench serve` against a real server, as a user types it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import RunningServer, serving


@pytest.fixture(scope="module")
def server(model_path: Callable[[str], Path]) -> Iterator[RunningServer]:
    flags = ("--context", "256", "--concurrency", "4", "--served-model-name", "stories", "--api-key", "secret")
    with serving(model_path("stories15m"), *flags) as running:
        running.http.headers["authorization"] = "Bearer secret"
        yield running


def _bench(server: RunningServer, *flags: str, key: str = "secret") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenmill", "bench", "serve", "--base-url", server.url, *flags]
    environment = {**os.environ, "OPENAI_API_KEY": key}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def _result(server: RunningServer, *flags: str) -> dict[str, Any]:
    done = _bench(server, *flags, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_closed_loop_counts_what_the_server_counts(server: RunningServer) -> None:
    before = server.http.get("/metrics").text
    flags = (
        "--num-prompts",
        "8",
        "--random-input-len",
        "20",
        "--random-output-len",
        "6",
        "--random-range-ratio",
        "0.5",
    )
    found = _result(server, *flags, "--max-concurrency", "3", "--ignore-eos", "--goodput", "ttft:60000", "e2el:60000")
    after = server.http.get("/metrics").text
    assert (found["completed"], found["failed"], found["max_concurrent_requests"]) == (8, 0, 3)
    for ours, theirs in (("total_input_tokens", "prompt_tokens"), ("total_output_tokens", "generation_tokens")):
        name = f"tokenmill_{theirs}_total"
        values = [
            sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(name))
            for text in (before, after)
        ]
        assert values[1] - values[0] == found[ours]
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert 0 < found["mean_ttft_ms"] <= found["mean_e2el_ms"]
    assert found["model_id"] == "stories"


def test_a_trace_with_shared_prefixes_hits_the_cache(server: RunningServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 400 * at, "input_length": 1100, "output_length": 40, "hash_ids": [1, 2, 3]} for at in range(4)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    flags = ("--dataset-name", "mooncake", "--dataset-path", str(trace), "--trace-length-scale", "0.1")
    found = _result(server, *flags, "--trace-speedup", "2")
    assert (found["completed"], found["request_rate"]) == (4, "trace")
    assert found["total_cached_tokens"] > 100
    assert found["mean_ttft_scheduled_ms"] > 0


def test_failures_are_told_apart_and_files_are_written(server: RunningServer, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once upon a time", "output_tokens": 4}\n{"prompt": [1, 2], "output_tokens": 999}\n')
    done = _bench(
        server,
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--num-prompts", "4", "--request-rate", "50"),
        *("--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^  failed +2$", done.stdout, re.MULTILINE), done.stdout
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["completed"], found["failed"]) == (2, 2)
    assert [bool(each) for each in found["errors"]] == [False, True, False, True]
    assert found["generated_texts"][0] == found["generated_texts"][2] != ""
    assert "HTTP 400" in done.stdout


def test_a_user_is_told_what_is_wrong(server: RunningServer) -> None:
    refused = _bench(server, key="wrong")
    assert refused.returncode == 2
    assert "OPENAI_API_KEY" in refused.stderr
    mistaken = _bench(server, "--num-prompt", "4")
    assert mistaken.returncode == 2
    assert "--num-prompts" in mistaken.stderr
