"""Engines that are killed or frozen, hosts that are frozen, and a supervisor without open files (R3, R5)."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks import attack_shapes as shapes
from benchmarks.soak_verdict import descendants
from tests.attacks.conftest import AttackedServer
from tests.e2e.serving import WITH_SPARE_ENGINE, wait_until

_PROMPT = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
_STALL = 2.0


@pytest.fixture
def harmed(tiny_chat: Path, tmp_path: Path) -> Iterator[AttackedServer]:
    flags = ("--stall-timeout", str(_STALL))
    server = AttackedServer(tiny_chat, tmp_path / "keys.json", *flags, env=WITH_SPARE_ENGINE)
    try:
        yield server
    finally:
        _signal_all(server, signal.SIGCONT)
        server.stop()


def _answer(server: AttackedServer) -> str:
    answer = server.http.post("/v1/completions", json=_PROMPT)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def _back(server: AttackedServer, old: int, seconds: float = 40.0) -> None:
    def ready() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return server.engine not in (0, old) and server.http.get("/health", timeout=5).status_code == 200
        return False

    wait_until(ready, seconds)


def _signal_all(server: AttackedServer, number: signal.Signals) -> None:
    for pid in [server.process.pid, *descendants(server.process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def test_r3_an_engine_that_hangs_outside_a_step_is_replaced(harmed: AttackedServer) -> None:
    """Frozen while it is idle: no step is under way whose length could tell."""
    right, old = _answer(harmed), harmed.engine
    os.kill(old, signal.SIGSTOP)
    _back(harmed, old)
    assert _answer(harmed) == right
    with pytest.raises(ProcessLookupError):
        os.kill(old, 0)


def test_r3_a_host_that_was_frozen_keeps_its_engine(harmed: AttackedServer) -> None:
    """As a laptop that slept, or a virtual machine that was moved: all processes stop, much longer than the limit."""
    right, engine = _answer(harmed), harmed.engine
    for _ in range(2):
        _signal_all(harmed, signal.SIGSTOP)
        time.sleep(2.5 * _STALL)  # the freeze itself
        _signal_all(harmed, signal.SIGCONT)
        for _ in range(10):
            assert _answer(harmed) == right
    assert harmed.engine == engine, harmed.log[-1500:]


def test_r3_readiness_and_liveness_are_two_things(harmed: AttackedServer) -> None:
    """While an engine is replaced the server is alive and not ready; both need no key."""
    with httpx.Client(base_url=harmed.url, timeout=10) as http:
        assert http.get("/livez").status_code == 200
        assert http.get("/readyz").status_code == 200
        old = harmed.engine
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: http.get("/readyz").status_code == 503, 10)
        assert http.get("/livez").status_code == 200
        wait_until(lambda: http.get("/readyz").status_code == 200, 40)
        assert http.get("/livez").status_code == 200


def test_r5_a_supervisor_without_open_files_comes_back(harmed: AttackedServer) -> None:
    """The server may open no file more when its engine is killed; later it may again."""
    right, old = _answer(harmed), harmed.engine
    server = harmed.process.pid
    used = len(os.listdir(f"/proc/{server}/fd"))
    limits = resource.prlimit(server, resource.RLIMIT_NOFILE)
    resource.prlimit(server, resource.RLIMIT_NOFILE, (used, limits[1]))
    try:
        os.kill(old, signal.SIGKILL)
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:  # long enough for several attempts to start
            time.sleep(0.1)
    finally:
        resource.prlimit(server, resource.RLIMIT_NOFILE, limits)
    _back(harmed, old, 60)
    assert _answer(harmed) == right


@pytest.mark.slow
def test_r5_connections_that_take_all_files_do_not_end_the_server(harmed: AttackedServer) -> None:
    right, old = _answer(harmed), harmed.engine
    server = harmed.process.pid
    limits = resource.prlimit(server, resource.RLIMIT_NOFILE)
    resource.prlimit(server, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{server}/fd")) + 10, limits[1]))
    try:
        with shapes.open_connections(harmed.target(), 40):
            os.kill(old, signal.SIGKILL)
            time.sleep(2)  # the time in which it must not give up
    finally:
        resource.prlimit(server, resource.RLIMIT_NOFILE, limits)
    _back(harmed, old, 60)
    assert _answer(harmed) == right


def test_sigterm_ends_a_server_whose_engine_is_frozen(harmed: AttackedServer) -> None:
    os.kill(harmed.engine, signal.SIGSTOP)
    harmed.process.send_signal(signal.SIGTERM)
    assert harmed.process.wait(60) is not None
