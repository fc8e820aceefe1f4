"""A server whose model runs on two ranks: a rank that is killed or frozen ends the engine, and another takes over."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.soak_verdict import descendants
from tests.e2e.rank_faults import FROZEN, KILLED, Harm, Load, engine_of
from tests.e2e.serving import RunningServer, serving, wait_until

_FLAGS = (
    "--context",
    "256",
    "--concurrency",
    "4",
    "--tensor-parallel-size",
    "2",
    "--rank-timeout",
    "3",
    "--stall-timeout",
    "5",
    "--threads",
    "1",
)
_PROMPT = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
_MAX_SECONDS = 10.0  # from a fault to the end of every request under way
_REASONS = {KILLED: "was killed by SIGKILL", FROZEN: "is stopped"}
_RANK = "tokenmill.runtime.ranks.process"


@pytest.fixture(scope="module")
def server(model_path: Callable[[str], Path]) -> Iterator[RunningServer]:
    with serving(model_path("stories15m"), *_FLAGS, "--no-spare-engine") as running:
        yield running


def _ranks(server: RunningServer) -> list[int]:
    """Processes of other ranks below the server."""
    found = []
    for pid in descendants(server.process.pid):
        with contextlib.suppress(OSError):
            if _RANK in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return found


def _answer(server: RunningServer) -> str:
    answer = server.http.post("/v1/completions", json={**_PROMPT, "max_tokens": 6})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize("count", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_ranks_killed_frozen_and_slowed_at_random_under_load(server: RunningServer, count: int) -> None:
    """No request hangs and no token is wrong; each ends, rightly or with an error that says so."""
    harm = Harm(seed=count)
    with Load(server.url) as load:
        for _ in range(count):
            wait_until(lambda: len(_ranks(server)) == 1 and _ready(server), 60)
            (rank,) = _ranks(server)
            fault = harm.next(engine_of(rank), rank)
            under_way = load.after_events(fault.after)
            harm.strike(fault)
            load.drain(under_way)
            if fault.is_deadly:
                wait_until(lambda old=rank: not Path(f"/proc/{old}").exists(), 30)
                if not fault.is_engine:
                    server.logged(f"rank 1 (process {rank}) {_REASONS[fault.kind]}")
    print(f"{count} faults: {dict(load.outcomes)}; the slowest end of a request came after {load.slowest:.1f} s")
    assert not load.wrong
    assert set(load.outcomes) <= {"finished", "failed", "refused"}, load.outcomes
    assert load.outcomes["finished"] > count
    assert load.slowest < _MAX_SECONDS
    wait_until(lambda: len(_ranks(server)) == 1 and _ready(server), 60)


def test_a_rank_that_is_killed_while_nothing_runs(server: RunningServer) -> None:
    right = _answer(server)
    (rank,) = _ranks(server)
    os.kill(rank, signal.SIGKILL)
    wait_until(lambda: _ranks(server) not in ([], [rank]) and _ready(server), 60)
    assert _answer(server) == right


def test_no_rank_outlives_its_engine(server: RunningServer) -> None:
    (rank,) = _ranks(server)
    engine = engine_of(rank)
    os.kill(rank, signal.SIGSTOP)  # not even one that cannot react
    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{rank}").exists(), 10)
    wait_until(lambda: _ready(server) and len(_ranks(server)) == 1, 60)


def _ready(server: RunningServer) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return server.http.get("/readyz", timeout=5).status_code == 200
    return False
