"""A server in processes of its own for the scripts in this folder: started on a free port, always stopped."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tenant_keys import tree


@dataclass(frozen=True, slots=True)
class ServerProcess:
    url: str
    pid: int
    log: Path


@contextlib.contextmanager
def started_server(model: str, *flags: str) -> Iterator[ServerProcess]:
    command = [sys.executable, "-m", "tokenmill", "serve", model, "--port", "0", "--json", *flags]
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as folder:
        log = Path(folder) / "server.log"
        with (
            log.open("w") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, cwd=tree()) as process,
        ):
            assert process.stdout is not None
            try:
                line = process.stdout.readline()  # one JSON object, as soon as requests are accepted
                if not line:
                    raise SystemExit("the server did not start:\n" + log.read_text())
                yield ServerProcess(json.loads(line)["url"], process.pid, log)
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
