"""A real server in its own process, on a free port of the loopback address, always torn down. For test_serve*.py."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

_READY = re.compile(r"ready in .* on ((?:https?://|unix:)\S+)")
_START_SECONDS = 90
# Loading a second engine's libraries takes as long as starting the first; tests of that ask for it.
_QUICK_START = {"TOKENMILL_SPARE_ENGINE": "false"}
# Tests compare answers, and with AMX a prefix that was computed in a step of many requests has other bits than one
# computed alone (tests/conftest.py).
_SAME_BITS = {"TOKENMILL_CPU_ISA": "avx512_vnni"}
WITH_SPARE_ENGINE = {"TOKENMILL_SPARE_ENGINE": "true"}


class RunningServer:
    def __init__(self, model: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        python = os.environ.get(
            "TOKENMILL_SERVER_PYTHON", sys.executable
        )  # tests/clients have an environment of their own
        command = [python, "-m", "tokenmill", "serve", str(model), "--port", "0", *flags]
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **_QUICK_START, **_SAME_BITS, **(env or {})},
            cwd=os.environ.get("TOKENMILL_TREE"),  # the server of another source tree, for tests/attacks
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.url = ""
        self._found = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._found.wait(_START_SECONDS), "the server did not start:\n" + "".join(self.lines)
        assert self.url, "the server ended:\n" + "".join(self.lines)
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            match = _READY.search(line)
            if match:
                self.url = match[1]
                self._found.set()
        self._found.set()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def logged(self, text: str, seconds: float = 20.0) -> None:
        """Until the log holds `text`: a line about a request is written when its answer has already left."""
        wait_until(lambda: text in self.log, seconds)

    def load(self) -> dict[str, Any]:
        try:
            answer = self.http.get("/load")
        except httpx.TransportError:  # an idle connection that the server closed at the moment we chose it
            answer = self.http.get("/load")
        found: dict[str, Any] = answer.json()
        return found

    def wait_idle(self, seconds: float = 60.0) -> None:
        """Until nothing is in flight and no page is held; the page invariant must hold then."""

        def idle() -> bool:
            load = self.load()
            busy = ("server_load", "requests_running", "kv_pages_held", "queued_tokens")
            return load["kv_pages_checked"] and not any(load[name] for name in busy)

        wait_until(idle, seconds)
        assert self.load()["kv_pages_consistent"]

    def stop(self) -> int:
        code = end(self.process)
        self.http.close()
        return code


@contextlib.contextmanager
def serving(model: Path, *flags: str, env: dict[str, str] | None = None) -> Iterator[RunningServer]:
    server = RunningServer(model, *flags, env=env)
    try:
        yield server
    finally:
        server.stop()


def end(process: subprocess.Popen[str]) -> int:
    """By SIGTERM; its whole group is killed if that takes too long."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
