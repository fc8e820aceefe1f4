"""A real Ray cluster on this machine, one for all tests here. `make test-ray` has the packages; elsewhere they skip."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

_SECONDS = 400.0  # three engines on two busy cores start slowly


def wait_for(condition: Callable[[], bool], what: str, seconds: float = _SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Not here: Ray Serve draws the version of a deployment from `random`; the same draw means that nothing changed."""
    random.seed()


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """More CPUs than there are: what is tested is what happens, not how fast."""
    import ray
    from ray import serve

    ray.init(address="local", num_cpus=16, include_dashboard=False, logging_level="warning", log_to_driver=False)
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="session")
def port() -> int:
    """Ray's proxy keeps the port that it was started with."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        found: int = listener.getsockname()[1]
    return found


def pids(title: str) -> set[int]:
    """Processes of ours with this text in their command line."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                mine = folder.stat().st_uid == os.getuid()
            except OSError:
                continue
            if mine and title in line and "pytest" not in line:
                found.add(int(folder.name))
    return found


def replica_pids() -> set[int]:
    return pids("ray::ServeReplica:tokenmill:engine")


def engines_of(parent: int) -> set[int]:
    """Direct and further children."""
    found, level = set(), {parent}
    while level:
        below = set()
        for pid in level:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                below |= {int(each) for each in task.read_text().split()}
        found |= below
        level = below
    return found


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


class Load:
    """Clients that ask one request after the other, until told to stop."""

    def __init__(self, url: str, body: dict[str, Any], clients: int, stream: bool = False) -> None:
        self.answers: list[str] = []
        self.failures: list[str] = []
        self._url, self._body, self._stream = url, {**body, "stream": stream}, stream
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask_all, daemon=True) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(_SECONDS)
            assert not thread.is_alive(), "a request hangs"

    def until(self, more: int) -> None:
        wanted = len(self.answers) + more
        wait_for(lambda: len(self.answers) + len(self.failures) >= wanted, f"{more} more answers")

    def _ask_all(self) -> None:
        with httpx.Client(base_url=self._url, timeout=_SECONDS, trust_env=False) as http:
            while not self._stop.is_set():
                try:
                    (self._read_stream if self._stream else self._read)(http)
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))

    def _read(self, http: httpx.Client) -> None:
        answer = http.post("/v1/completions", json=self._body)
        if answer.status_code == 200:
            self.answers.append(answer.json()["choices"][0]["text"])
        else:
            self.failures.append(f"{answer.status_code}: {answer.text}")

    def _read_stream(self, http: httpx.Client) -> None:
        text, ended = "", False
        with http.stream("POST", "/v1/completions", json=self._body) as answer:
            for line in answer.iter_lines():
                ended = ended or line == "data: [DONE]"
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.failures.append(line)
                        return
                    text += "".join(choice["text"] for choice in event["choices"])
        if answer.status_code == 200 and ended:
            self.answers.append(text)
        else:
            self.failures.append(f"{answer.status_code}: ends without [DONE]")
