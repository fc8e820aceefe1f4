"""Names that an attacker chooses: paths in traces and metrics, models in shell scripts, ids in logs (S13)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import attack_client as client
from tests.attacks.conftest import FLAGS, AttackedServer
from tests.e2e.serving import serving, wait_until
from tests.e2e.test_tracing import collecting


def test_s13_span_names_are_those_of_routes(model_path: Callable[[str], Path]) -> None:
    spans: list[Any] = []
    with collecting(spans) as environment, serving(model_path("stories15m"), *FLAGS, env=environment) as server:
        for number in range(30):
            server.http.get(f"/attacker-chosen-{number}")
            server.http.get(f"/v1/models/attacker-chosen-{number}")
            server.http.request(f"ATTACK{number}", "/v1/models")
        assert server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        wait_until(lambda: any("decode" in span.name for span in spans), 20)
    names = {span.name for span in spans}
    assert not any("attacker" in name or "ATTACK" in name for name in names), names
    assert len(names) < 12, names


def test_s13_metrics_have_no_label_of_a_client(served: AttackedServer) -> None:
    for number in range(20):
        served.http.get(f"/attacker-chosen-{number}")
        served.http.post("/v1/completions", json={"model": f"attacker-chosen-{number}", "prompt": "x"})
    assert "attacker-chosen" not in served.http.get("/metrics").text


def test_s13_a_log_line_is_one_line(served: AttackedServer) -> None:
    target = served.target()
    path = "/v1/models/x%0a%7b%22key%22:%20%22vip%22%7d"
    client.answer_to(
        target, f"GET {path} HTTP/1.1\r\n".encode() + target.head() + b"X-Request-Id: a\x1b[2Jb\r\n\r\n", 1.0
    )
    served.http.get("/v1/models/last-line-of-this-test")
    served.logged("last-line-of-this-test")
    for line in served.lines:
        assert "\x1b[2J" not in line
        if line.startswith('{"key"'):
            raise AssertionError(f"a client wrote a line of the log: {line}")
        if line.startswith("{"):
            json.loads(line)


@pytest.mark.parametrize("engine", ["tokenmill", "llamacpp", "ollama"])
@pytest.mark.parametrize("target", ["command", "compose", "systemd", "kubernetes"])
def test_s13_the_model_name_is_quoted_in_scripts(tmp_path: Path, engine: str, target: str) -> None:
    """A checkpoint whose name is a command: the scripts are run with every program they start replaced by nothing."""
    from tests.unit.deploy.test_engines import CPU
    from tokenmill.deploy.render import find_engine, render
    from tokenmill.errors import UserError

    marker = tmp_path / "executed"
    model = f"$(touch {marker})/`touch {marker}`; touch {marker} ;"
    try:
        rendered = render(target, find_engine(engine), replace(CPU, model=model, stored="bf16", weights="q8_0"))
    except UserError:
        return  # such a name is refused
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in ("tokenmill", "ollama", "llama-server"):
        (programs / program).write_text("#!/bin/sh\nexit 0\n")
        (programs / program).chmod(0o755)
    for name, text in rendered.files.items():
        if name in ("prepare.sh", "launch.sh"):
            environment = {"PATH": f"{programs}:/usr/bin:/bin"}
            subprocess.run(["sh", "-c", text], cwd=tmp_path, env=environment, capture_output=True, timeout=60)
            assert not marker.exists(), text
