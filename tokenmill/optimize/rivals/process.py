"""A server of another engine in a process group of its own: started, waited for, always ended.

Ready means that a completion has come back. The group ends with this process, however that ends. Its log is kept where
the caller wants it, and a failure is told with the log's last line. Knows no engine. Called by the rivals and
today.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Self

import httpx

from tokenmill.errors import UserError
from tokenmill.optimize.local_server import GUARD

_POLL_SECONDS = 0.2
_STOP_SECONDS = 10.0
_TAIL_BYTES = 4000


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def is_listening(port: int) -> bool:
    with socket.socket() as connection:
        connection.settimeout(1.0)
        return connection.connect_ex(("127.0.0.1", port)) == 0


class RunningServer:
    """`url` and `model` are known inside the `with` block. Raises UserError with the last line of the log if no token
    comes back within `ready_seconds`. Without a command, a server that runs already."""

    def __init__(
        self,
        command: Sequence[str],
        url: str,
        *,
        model: str = "",
        api_key: str = "",
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        ready_seconds: float = 300.0,
        prepare: Callable[[], None] | None = None,
        on_stop: Callable[[], None] | None = None,
    ) -> None:
        """`prepare` runs once the server listens, before a model is asked for; `on_stop` when it has ended."""
        self.url = url
        self.model = model
        self.command = tuple(command)
        self.api_key = api_key
        self._environment = dict(environment or {})
        self._log_path = log
        self._ready_seconds = ready_seconds
        self._prepare = prepare
        self._on_stop = on_stop
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> Self:
        if self.command:
            self._log = self._log_path.open("ab+") if self._log_path else tempfile.TemporaryFile()
        try:
            if self._log is not None:
                self._start(self._log)
            self._wait_ready(time.monotonic() + self._ready_seconds)
        except BaseException:
            self._stop(0.0)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop(_STOP_SECONDS)

    @property
    def pid(self) -> int | None:
        """Of the process group; None outside the `with` block and for a server that is not ours."""
        return self._process.pid if self._process is not None else None

    def _start(self, log: IO[bytes]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", GUARD, *self.command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, **self._environment},
            start_new_session=True,
        )

    def _wait_ready(self, deadline: float) -> None:
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        prepared = self._prepare is None
        with httpx.Client(base_url=self.url, headers=headers, timeout=30.0) as client:
            while True:
                if self._process is not None and self._process.poll() is not None:
                    raise self._failure(f"it ended with exit code {self._process.returncode}")
                refusal = ""
                try:
                    if not prepared and self._prepare is not None and self._listens(client):
                        self._prepare()
                        prepared = True
                    if prepared and not (refusal := self._ask(client)):
                        return
                except httpx.HTTPError as error:
                    refusal = str(error) or type(error).__name__
                if time.monotonic() > deadline or (not self.command and refusal):
                    raise self._failure(f"no token came back within {self._ready_seconds:g} s ({refusal})")
                time.sleep(_POLL_SECONDS)

    def _listens(self, client: httpx.Client) -> bool:
        return client.get("/").status_code < 500

    def _ask(self, client: httpx.Client) -> str:
        """Why no token comes back; empty if one does."""
        if not self.model:
            listed = client.get("/v1/models")
            if listed.status_code != 200:
                return f"HTTP {listed.status_code} of /v1/models"
            try:
                self.model = str(listed.json()["data"][0]["id"])
            except (ValueError, KeyError, IndexError, TypeError):
                return "/v1/models lists no model"
        body = {"model": self.model, "prompt": "a", "max_tokens": 1, "temperature": 0}
        answer = client.post("/v1/completions", json=body)
        return "" if answer.status_code == 200 else f"HTTP {answer.status_code}: {' '.join(answer.text.split())[:200]}"

    def _failure(self, problem: str) -> UserError:
        line = last_line(self._log) if self._log is not None else ""
        return UserError(f"{problem}: {line}" if line else problem, "see the server's log")

    def _stop(self, seconds: float) -> None:
        """SIGTERM first; after `seconds`, SIGKILL to all of the group."""
        process, self._process = self._process, None
        if process is not None:
            if seconds and process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._on_stop is not None:
            self._on_stop()


def last_line(log: IO[bytes]) -> str:
    """The last line with text: what an engine says when it gives up."""
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - _TAIL_BYTES))
    lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines()]
    return next((line[:300] for line in reversed(lines) if line), "")
