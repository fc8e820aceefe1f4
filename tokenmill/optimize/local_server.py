"""`tokenmill serve` in a process of its own, for as long as a measurement takes: started, waited for, always ended.

The server and its engine end with this process, however that ends: a guard process waits for the pipe to it to close.
Knows nothing of what is sent to the server. Called by the laboratory.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tokenmill.config import EngineConfig, option_fields
from tokenmill.errors import UserError
from tokenmill.serve.config import ServeConfig

_STOP_SECONDS = 10.0  # for the server and its engine to end after SIGTERM
_TAIL_BYTES = 2000
# Runs the command in its own process group and kills the group once standard input closes, that is, when whoever
# started it has ended or closed it.
GUARD = """
import os, signal, subprocess, sys, threading
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
signal.signal(signal.SIGTERM, lambda *_: child.terminate())
def watch():
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
os._exit(child.wait() & 255)
"""


class LocalServer:
    """`url` and `model` are known inside the `with` block. Raises UserError, with the end of the log, if the server
    does not start within `ready_seconds`."""

    def __init__(
        self,
        path: Path,
        config: EngineConfig,
        *,
        log: Path | None = None,
        ready_seconds: float = 120.0,
        flags: Sequence[str] = (),
    ) -> None:
        """`log`: file that the server's log is appended to. `flags`: further flags of `tokenmill serve`."""
        self.url = ""
        self.model = ""
        self.options: dict[str, Any] = {}  # of the engine, resolved
        self._command = [sys.executable, "-m", "tokenmill", "serve", str(path), "--json", "--quiet"]
        self._command += ["--host", "127.0.0.1", "--port", "0", "--no-access-log", "--no-spare-engine"]
        self._command += ["--shutdown-timeout", "1", *engine_flags(config), *flags]
        self._log_path = log
        self._ready_seconds = ready_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process group; None outside the `with` block."""
        return self._process.pid if self._process is not None else None

    def __enter__(self) -> Self:
        self._log = self._log_path.open("ab+") if self._log_path else tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-c", GUARD, *self._command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_environment(),
            start_new_session=True,
        )
        try:
            ready = self._wait_ready(time.monotonic() + self._ready_seconds)
        except BaseException:
            self._stop(0.0)
            raise
        self.url, self.model, self.options = ready["url"], ready["model"], ready["engine"]
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._stop(_STOP_SECONDS)

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _wait_ready(self, deadline: float) -> dict[str, Any]:
        """The line that the server prints once it listens."""
        assert self._process is not None
        assert self._process.stdout is not None
        received = b""
        descriptor = self._process.stdout.fileno()
        while b"\n" not in received:
            left = deadline - time.monotonic()
            readable, _, _ = select.select([descriptor], [], [], max(0.0, left))
            if not readable:
                raise self._failure(f"the server was not ready within {self._ready_seconds:g} s")
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise self._failure("the server did not start")
            received += data
        ready: dict[str, Any] = json.loads(received.partition(b"\n")[0])
        return ready

    def _failure(self, problem: str) -> UserError:
        lines = self._log_tail().strip().splitlines()
        return UserError(f"{problem}: {lines[-1]}" if lines else problem, "see the server's log")

    def _log_tail(self) -> str:
        assert self._log is not None
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _TAIL_BYTES))
        return self._log.read().decode("utf-8", "replace")

    def _stop(self, seconds: float) -> None:
        """SIGTERM, so that the engine ends in order; after `seconds`, SIGKILL to all of the group."""
        process, self._process = self._process, None
        if process is None:
            return
        if seconds and process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, self._log):
            if stream is not None:
                stream.close()
        self._log = None


def engine_flags(config: EngineConfig) -> list[str]:
    """The flags of `tokenmill serve` for every option that is set; the rest the server decides as it always does."""
    flags: list[str] = []
    for spec in option_fields(EngineConfig):
        if not config.is_set(spec.name):
            continue
        name, value = spec.name.replace("_", "-"), getattr(config, spec.name)
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", str(value)]
    return flags


def _environment() -> dict[str, str]:
    """Without variables that set options of servers, such as API keys: this one is for nobody else."""
    mine = {f"TOKENMILL_{spec.name.upper()}" for spec in option_fields(ServeConfig)}
    return {name: value for name, value in os.environ.items() if name not in mine}
