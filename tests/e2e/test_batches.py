"""Batches on a real model: with the openai package, over a killed server, and `run-batch` killed and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.serving import RunningServer, serving, wait_until

_FLAGS = ("--context", "256", "--concurrency", "4", "--served-model-name", "stories", "--no-access-log")
_SECONDS = 120.0


def _line(number: int, **body: Any) -> dict[str, Any]:
    body = {"model": "stories", "prompt": f"Tale {number}:", "max_tokens": 16, "temperature": 0, **body}
    return {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def _text(lines: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def _num_completed(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return counts.completed if counts is not None else 0


def _answers(text: str) -> dict[str, Any]:
    found = [json.loads(line) for line in text.splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found), "answered twice"
    return {each["custom_id"]: each for each in found}


def test_the_openai_package_runs_batches(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    with serving(model_path("stories15m"), *_FLAGS, "--files-dir", str(tmp_path / "files")) as server:
        client = _client(server)
        live = client.completions.create(model="stories", prompt="Tale 0:", max_tokens=16, temperature=0)
        lines = [*map(_line, range(6)), _line(6, max_tokens=-1)]
        file = client.files.create(file=("in.jsonl", _text(lines)), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"for": "test"}
        )
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", _SECONDS)
        batch = client.batches.retrieve(batch.id)
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (7, 6, 1)
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        output = _answers(client.files.content(batch.output_file_id).text)
        assert set(output) == {f"request-{number}" for number in range(6)}
        assert output["request-0"]["response"]["body"]["choices"][0]["text"] == live.choices[0].text
        errors = _answers(client.files.content(batch.error_file_id).text)
        assert errors["request-6"]["response"]["status_code"] == 400
        assert [each.id for each in client.batches.list()] == [batch.id]
        assert {each.id for each in client.files.list()} == {file.id, batch.output_file_id, batch.error_file_id}

        embedded = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a tale"}}
        file = client.files.create(file=("e.jsonl", _text([embedded])), purpose="batch")
        vectors = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="1h")
        wait_until(lambda: client.batches.retrieve(vectors.id).status == "completed", _SECONDS)

        many = client.files.create(
            file=("many.jsonl", _text([_line(n, max_tokens=200) for n in range(200)])), purpose="batch"
        )
        long = client.batches.create(input_file_id=many.id, endpoint="/v1/completions", completion_window="24h")
        wait_until(lambda: client.batches.retrieve(long.id).status == "in_progress", _SECONDS)
        wait_until(lambda: server.load()["requests_running"] == 4, _SECONDS)  # it has every slot
        headers = {"x-request-deadline-ms": "20000"}  # and none of them when a live request comes
        client.completions.create(model="stories", prompt="Live:", max_tokens=4, extra_headers=headers)
        assert client.batches.retrieve(long.id).status == "in_progress"
        assert client.batches.cancel(long.id).status in ("cancelling", "cancelled")
        wait_until(lambda: client.batches.retrieve(long.id).status == "cancelled", _SECONDS)
        assert client.files.delete(many.id).deleted
        server.wait_idle()


def test_a_killed_server_goes_on_with_its_batch(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    flags = (*_FLAGS, "--files-dir", str(tmp_path / "files"))
    number = 120
    with serving(model_path("stories15m"), *flags) as server:
        client = _client(server)
        file = client.files.create(file=("in.jsonl", _text(list(map(_line, range(number))))), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        wait_until(lambda: _num_completed(client, batch.id) >= 5, _SECONDS)
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
    with serving(model_path("stories15m"), *flags) as server:
        client = _client(server)
        assert client.batches.retrieve(batch.id).status == "in_progress"
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", _SECONDS)
        done = client.batches.retrieve(batch.id)
        assert done.output_file_id is not None
        output = _answers(client.files.content(done.output_file_id).text)
        assert set(output) == {f"request-{each}" for each in range(number)}


def _run_batch(model: Path, source: Path, target: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tokenmill", "run-batch", "-i", str(source), "-o", str(target)]
    command += ["--model", str(model), "--served-model-name", "stories", "--context", "256", *flags]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )  # fmt: skip


@pytest.mark.parametrize(("number", "first"), [(60, 7), pytest.param(2000, 700, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_and_answers_each_once(
    model_path: Callable[[str], Path], tmp_path: Path, number: int, first: int
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(_text([*map(_line, range(number - 1)), _line(number - 1, model="other")]))
    running = _run_batch(model_path("stories15m"), source, target, "--concurrency", "4")
    try:
        wait_until(lambda: target.exists() and target.read_bytes().count(b"\n") >= first, _SECONDS)
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
    kept = target.read_bytes()
    kept = kept[: kept.rindex(b"\n") + 1]
    with open(target, "ab") as file:
        file.write(b'{"id":"batch_req_torn')  # as a kill within a write leaves it
    again = _run_batch(model_path("stories15m"), source, target, "--concurrency", "4", "--json")
    out, err = again.communicate(timeout=600)
    assert again.returncode == 0, err
    result = json.loads(out)
    assert (result["requests"], result["failed"], result["resumed"]) == (number, 1, kept.count(b"\n"))
    assert f"{number} of {number} answered" in err
    assert target.read_bytes().startswith(kept)
    answers = _answers(target.read_text())
    assert set(answers) == {f"request-{each}" for each in range(number)}
    assert answers[f"request-{number - 1}"]["response"]["status_code"] == 404
    began = time.monotonic()
    third = _run_batch(model_path("stories15m"), source, target, "--json")
    assert json.loads(third.communicate(timeout=60)[0])["resumed"] == number
    assert time.monotonic() - began < 30  # no model was loaded

    source.write_bytes(_text(list(map(_line, range(number + 1)))))  # the last answer is to another request now
    other = _run_batch(model_path("stories15m"), source, target)
    assert "answers another request" in other.communicate(timeout=60)[1]
    assert other.returncode == 2


def test_bad_input_is_named_by_its_line(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(_text([_line(0)]) + b"oops\n")
    running = _run_batch(Path("no-such-model"), source, target)
    error = running.communicate(timeout=60)[1]
    assert running.returncode == 2
    assert f"error: line 2 of {source}: the line is not valid JSON" in error
    assert "\ntry: " in error
    source.write_bytes(_text([_line(0)]))
    for wrong, problem in ((source, "is the input too"), (tmp_path, "cannot use")):
        running = _run_batch(Path("no-such-model"), source, wrong)
        assert problem in running.communicate(timeout=60)[1]
        assert running.returncode == 2
    target.write_text("my notes\n")
    running = _run_batch(Path("no-such-model"), source, target)
    assert "is not the output of a batch" in running.communicate(timeout=60)[1]
    assert target.read_text() == "my notes\n"
