"""Signals at every moment of a server: start, download, serving, drain, restart; and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import WITH_SPARE_ENGINE, serving, wait_until

_LONG = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
_FLAGS = ("--context", "256", "--concurrency", "4", "--served-model-name", "stories")


def _data(lines: Iterator[str]) -> Iterator[str]:
    return (line[6:] for line in lines if line.startswith("data: "))


def test_sigterm_does_not_wait_for_ever(model_path: Callable[[str], Path]) -> None:
    with serving(model_path("stories15m"), *_FLAGS, "--shutdown-timeout", "0") as server:
        engine = server.load()["engine_pid"]
        os.kill(engine, signal.SIGSTOP)  # whatever is in flight now cannot end
        answers: list[Any] = []

        def ask() -> None:
            answers.append(httpx.post(f"{server.url}/v1/completions", json=_LONG, timeout=60))

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: server.load()["server_load"] > 0, 60)
        server.process.send_signal(signal.SIGTERM)
        thread.join(60)
        assert answers[0].status_code == 503
        assert server.process.wait(60) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(engine, 0)


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except ProcessLookupError:
        return True
    except FileNotFoundError:  # it went between the two: the next look will tell
        return False


def test_an_engine_whose_server_is_killed_ends(model_path: Callable[[str], Path]) -> None:
    with serving(model_path("stories15m"), *_FLAGS) as server:
        engine = server.load()["engine_pid"]
        server.process.kill()
        server.process.wait()
        wait_until(lambda: _gone(engine), 60)


def _children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _tell_at(line: str, number: signal.Signals, model: str, *flags: str) -> tuple[int, float, list[int]]:
    """Start a server and signal it when a line with `line` comes: exit code, seconds it took to end, its children."""
    command = [sys.executable, "-m", "tokenmill", "serve", model, "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        try:
            lines = []
            for text in process.stderr:
                lines.append(text)
                if line in text:
                    break
            else:
                raise AssertionError("the server ended:\n" + "".join(lines))
            children = _children(process.pid)
            process.send_signal(number)
            began = time.monotonic()
            process.communicate(timeout=60)
            return process.returncode, time.monotonic() - began, children
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("finding the model:", signal.SIGTERM),  # the engine process starts
        ("starting the engine:", signal.SIGINT),  # it loads the weights
        ("loading the weights:", signal.SIGTERM),  # it warms up
        ("warming up:", signal.SIGTERM),  # the port opens
        ("ready in", signal.SIGINT),
    ],
)
def test_a_signal_at_any_moment_of_the_start_ends_it(
    model_path: Callable[[str], Path], line: str, number: signal.Signals
) -> None:
    code, seconds, children = _tell_at(line, number, str(model_path("stories15m")), *_FLAGS)
    assert code == 0
    assert seconds < 10
    wait_until(lambda: all(_gone(child) for child in children), 10)


def test_a_signal_during_a_download_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection and never answers
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        command = [sys.executable, "-m", "tokenmill", "serve", "some/model", "--port", "0"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
            try:
                silent.settimeout(60)
                silent.accept()
                process.send_signal(signal.SIGTERM)
                began = time.monotonic()
                process.communicate(timeout=60)
                assert time.monotonic() - began < 8
                assert process.returncode == 0
            finally:
                process.kill()


def test_a_spare_process_replaces_the_engine_and_a_signal_ends_a_restart(model_path: Callable[[str], Path]) -> None:
    with serving(model_path("stories15m"), *_FLAGS, env=WITH_SPARE_ENGINE) as server:
        wait_until(lambda: server.load()["spare_engine_pid"], 60)
        load = server.load()
        engine, spare = load["engine_pid"], load["spare_engine_pid"]
        os.kill(engine, signal.SIGKILL)
        server.logged("serving again", 60)
        assert server.load()["engine_pid"] == spare
        assert server.http.post("/v1/completions", json={**_LONG, "max_tokens": 5}).status_code == 200
        os.kill(spare, signal.SIGKILL)
        wait_until(lambda: server.log.count("the engine process ended") == 2, 20)
        children = _children(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        wait_until(lambda: all(_gone(child) for child in children), 10)


def test_a_second_signal_does_not_wait(model_path: Callable[[str], Path]) -> None:
    with serving(model_path("stories15m"), *_FLAGS, "--shutdown-timeout", "600") as server:
        os.kill(server.load()["engine_pid"], signal.SIGSTOP)  # what is in flight cannot end
        answers: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=_LONG, timeout=60))
        )
        thread.start()
        wait_until(lambda: server.load()["server_load"] > 0, 60)
        server.process.send_signal(signal.SIGTERM)
        server.logged("shutting down")
        assert server.http.get("/readyz").json()["error"]["code"] == "draining"
        assert server.http.get("/livez").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        thread.join(20)
        assert answers[0].status_code == 503
