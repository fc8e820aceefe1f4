"""A real router in its own process, in front of servers that are real or misbehave on purpose. For test_router*.py."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx

from tests.e2e.serving import end, wait_until

_START_SECONDS = 60


class RunningRouter:
    def __init__(self, replicas: list[str], *flags: str) -> None:
        named = [word for url in replicas for word in ("--replica", url)]
        command = [sys.executable, "-m", "tokenmill", "route", "--json", "--port", "0", *named, *flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.lines: list[str] = []
        self.url = ""
        self._found = threading.Event()
        threading.Thread(target=self._read_errors, daemon=True).start()
        threading.Thread(target=self._read_address, daemon=True).start()
        assert self._found.wait(_START_SECONDS), "the router did not start:\n" + "".join(self.lines)
        assert self.url, "the router ended:\n" + "".join(self.lines)
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def _read_address(self) -> None:
        assert self.process.stdout is not None
        text = ""
        for line in self.process.stdout:
            text += line
            with contextlib.suppress(ValueError):
                self.url = json.loads(text)["url"]
                self._found.set()
        self._found.set()

    def replicas(self) -> list[dict[str, Any]]:
        answer = self.http.get("/router/replicas")
        assert answer.status_code == 200, answer.text
        return answer.json()["replicas"]  # type: ignore[no-any-return]

    def wait_up(self, *up: bool) -> None:
        wait_until(lambda: [each["up"] for each in self.replicas()] == list(up), 30)

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        lines = self.http.get("/metrics").text.splitlines()
        own = (line for line in lines if line.startswith(f"tokenmill_router_{name}"))
        return sum(float(line.rpartition(" ")[2]) for line in own if "_created" not in line)

    def stop(self) -> int:
        code = end(self.process)
        self.http.close()
        return code


@contextlib.contextmanager
def routing(replicas: list[str], *flags: str) -> Iterator[RunningRouter]:
    router = RunningRouter(replicas, *flags)
    try:
        yield router
    finally:
        router.stop()
