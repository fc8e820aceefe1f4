"""A short run of the real server: what HTTP, the other process and the load generator add on this machine.

Starts `tokenmill serve` on a free port, sends a closed loop with the load generator of `bench serve`, and stops it.
Called by job.py and by benchmarks/simulate_vs_engine.py.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from tokenmill.bench.serve import Measurement, measure_serving
from tokenmill.bench.serve_job import ServeJob
from tokenmill.errors import UserError


@contextlib.contextmanager
def started_server(model: str, *flags: str) -> Iterator[str]:
    """The base URL of a server in processes of its own; always stopped."""
    command = [sys.executable, "-m", "tokenmill", "serve", model, "--port", "0", "--json", "--quiet", *flags]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdout is not None
        try:
            line = process.stdout.readline()  # one JSON object, once it serves
            if not line:
                errors.seek(0)
                reason = errors.read().strip().splitlines()
                raise UserError(f"the server did not start: {reason[-1] if reason else 'no reason given'}")
            yield json.loads(line)["url"]
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def measured(job: ServeJob) -> Measurement:
    measurement = measure_serving(job)
    failed = [sample.error for sample in measurement.samples if not sample.ok]
    if failed:
        raise UserError(f"{len(failed)} requests failed: {failed[0][:200]}", "run it again with less load")
    return measurement
