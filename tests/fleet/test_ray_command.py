"""`tokenmill ray deploy` without a cluster: one is started, serves, and ends with the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray", reason="ray is not installed: `make test-ray` runs these")


def test_deploy_serves_until_it_is_told_to_stop(model_path: Callable[[str], Path], tmp_path: Path, port: int) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"model: {model_path('stories15m')}\nserved_model_name: [small]\nport: {port + 1}\nthreads: 1\n"
        "text_workers: 1\nspare_engine: false\nray:\n  max_replicas: 2\n",
        encoding="utf-8",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "tokenmill", "ray", "deploy", str(file), "--json"],
        env={**os.environ, "RAY_ADDRESS": "local"}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            line = process.stdout.readline()
            assert line, "the command ended"
            text += line
        found = json.loads(text)
        assert found["own_cluster"]
        body = {"model": "small", "prompt": "Once", "max_tokens": 4}
        answer = httpx.post(f"{found['url']}/v1/completions", json=body, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
