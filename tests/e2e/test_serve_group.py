"""Two engines behind one server: the answers of one engine, also for streams whose engine dies."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.soak_verdict import descendants
from tests.e2e.rank_faults import BODIES, ask
from tests.e2e.serving import RunningServer, serving, wait_until
from tokenmill.engine.llm import LLM
from tokenmill.types import SamplingParams

_FLAGS = ("--context", "256", "--concurrency", "4", "--threads", "1", "--data-parallel-size", "2")
_ENGINE = "tokenmill.engine.process"


@pytest.fixture(scope="module")
def model(model_path: Callable[[str], Path]) -> Path:
    return model_path("stories15m")


@pytest.fixture(scope="module")
def right(model: Path) -> list[str]:
    """What one engine answers."""
    prompts = [body["prompt"] for body in BODIES]
    params = [
        SamplingParams(temperature=body["temperature"], seed=body["seed"], max_tokens=200, ignore_eos=True)
        for body in BODIES
    ]
    with LLM(model, context=256, threads=1) as llm:
        return [output.outputs[0].text for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    with serving(model, *_FLAGS) as running:
        yield running


def _engines(server: RunningServer) -> list[int]:
    found = []
    for pid in descendants(server.process.pid):
        with contextlib.suppress(OSError):
            if _ENGINE in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return found


def _streams(server: RunningServer, then: Callable[[], None]) -> list[tuple[str, str]]:
    """All bodies at once; `then` is called when half of the streams have begun."""
    answers: dict[int, tuple[str, str]] = {}
    begun = threading.Semaphore(0)

    def run(number: int) -> None:
        first = [True]

        def saw() -> None:
            if first[0]:
                first[0] = False
                begun.release()

        answers[number] = ask(server.url, {**BODIES[number], "max_tokens": 200}, saw)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(BODIES))]
    for thread in threads:
        thread.start()
    for _ in range(len(threads) // 2):
        assert begun.acquire(timeout=60)
    then()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a request hangs"
    return [answers[number] for number in range(len(BODIES))]


def test_streams_go_on_in_the_other_engine_when_theirs_dies(server: RunningServer, right: list[str]) -> None:
    engines = _engines(server)
    assert len(engines) == 2
    assert _streams(server, lambda: None) == [(text, "finished") for text in right]

    assert _streams(server, lambda: os.kill(engines[0], signal.SIGKILL)) == [(text, "finished") for text in right]
    assert re.search(r"ended .*; [1-9] requests were in flight", server.log)
    wait_until(lambda: len(_engines(server)) == 2 and engines[0] not in _engines(server), 60)
    wait_until(lambda: "engines are ready" not in server.http.get("/readyz").text, 60)
    assert _streams(server, lambda: None) == [(text, "finished") for text in right]
    server.wait_idle()


def test_prompts_go_to_the_engine_that_has_their_pages(server: RunningServer) -> None:
    """A busy first engine sends them to the second; idle again, it would get them back by load alone."""
    prompts = [f"{name} walked along the old road by the sea until the sun went down. " * 3 for name in ("Tom", "Lily")]
    _cached(server, "The sea")  # from the first request on pages are named
    busy = threading.Semaphore(0)
    long_one = threading.Thread(target=ask, args=(server.url, {**BODIES[0], "max_tokens": 200}, busy.release))
    long_one.start()
    assert busy.acquire(timeout=60)
    for prompt in prompts:
        _cached(server, prompt)
    long_one.join(60)
    for prompt in prompts:
        assert _cached(server, prompt) > 0.8


def _cached(server: RunningServer, prompt: str) -> float:
    """Share of the prompt that was cached."""
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
    usage = server.http.post("/v1/completions", json=body).json()["usage"]
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached / int(usage["prompt_tokens"])


def test_both_engines_are_gone(server: RunningServer, right: list[str]) -> None:
    """Clean errors, then the same answers."""
    for pid in _engines(server):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(httpx.HTTPError):
        _, end = ask(server.url, BODIES[0], lambda: None)
        assert end in ("failed", "refused", "finished")
    wait_until(lambda: server.http.get("/readyz").status_code == 200, 60)
    text, end = ask(server.url, {**BODIES[0], "max_tokens": 200}, lambda: None)
    assert (text, end) == (right[0], "finished")
