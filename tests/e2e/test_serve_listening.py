"""A whole server on TLS and on a Unix socket, with its ready line, limits and the end of it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import serving, wait_until

_FLAGS = ("--context", "256", "--concurrency", "4", "--served-model-name", "stories")
_BODY = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}


def _certificate(folder: Path) -> tuple[str, str]:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("no openssl program to make a certificate with")
    certificate, key = str(folder / "server.crt"), str(folder / "server.key")
    command = [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, *subject, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


def test_https_under_a_root_path(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path)
    flags = ("--ssl-certfile", certificate, "--ssl-keyfile", key, "--root-path", "/llm", "--header-timeout", "1")
    with serving(model_path("stories15m"), *_FLAGS, *flags) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=certificate)
        with httpx.Client(base_url=server.url, verify=trusting, timeout=60) as client:
            for prefix in ("", "/llm"):
                answer = client.post(f"{prefix}/v1/completions", json=_BODY)
                assert answer.status_code == 200
                assert answer.json()["choices"][0]["text"]
                assert client.get(f"{prefix}/docs").status_code == 200
                refused = client.post(f"{prefix}/api/generate", json={"prompt": 1})
                assert isinstance(refused.json()["error"], str)  # in Ollama's form
            assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 421
            server.process.send_signal(signal.SIGHUP)
            server.logged("read the TLS certificate again")
            assert client.get("/health").status_code == 200
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            plain.settimeout(20)
            assert b"HTTP/1.1 200" not in plain.recv(1000)


def test_a_unix_socket(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    path = str(tmp_path / "api.sock")
    with serving(model_path("stories15m"), *_FLAGS, "--uds", path, "--header-timeout", "0.5") as server:
        assert server.url == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://any.name", timeout=60) as client:
            assert client.post("/v1/completions", json=_BODY).status_code == 200
            with socket.socket(socket.AF_UNIX) as slow:  # half a request
                slow.settimeout(20)
                slow.connect(path)
                slow.sendall(b"GET /heal")
                assert slow.recv(1000).startswith(b"HTTP/1.1 408")
            metrics = client.get("/metrics").text
            assert 'tokenmill_connections_refused_total{model_name="stories",reason="header_timeout"} 1.0' in metrics
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.process.poll() is not None, 30)
        assert not os.path.exists(path)


def test_a_wrong_certificate_ends_the_start_before_the_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tokenmill", "serve", "no-such-model", "--ssl-certfile", str(tmp_path / "none")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "--ssl-certfile" in ended.stderr
    assert "no-such-model" not in ended.stderr
