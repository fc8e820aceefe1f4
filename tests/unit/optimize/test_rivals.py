"""Rivals and today's command before anything is measured: names, launch lines, processes that fail."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from pathlib import Path

import pytest

from tokenmill.deploy.render import find_engine
from tokenmill.errors import UserError
from tokenmill.optimize.arrivals import Arrivals
from tokenmill.optimize.objectives import Objectives
from tokenmill.optimize.results import FAILED
from tokenmill.optimize.rivals import RIVALS
from tokenmill.optimize.rivals.base import Rival, RivalWorkload, serving_of
from tokenmill.optimize.rivals.llamacpp import BINARY, NATIVE, PYTHON, LlamaCppRival
from tokenmill.optimize.rivals.measure import find_rivals, measure_rivals, workload_of
from tokenmill.optimize.rivals.process import RunningServer, free_port
from tokenmill.optimize.today import measure_today, parse_today

_ARRIVALS = Arrivals((0.0, 0.1), ([1, 2, 3], [4, 5]), (4, 300), "two requests", 32)
_WORKLOAD = RivalWorkload(context=512, concurrency=4)
_NO_OBJECTIVES = Objectives()


def _line(flavour: str) -> list[str]:
    launch = find_engine("llamacpp").launch(serving_of(Path("model.gguf"), _WORKLOAD))
    return LlamaCppRival(flavour).localized(launch, 1234)


def test_names_and_urls() -> None:
    assert [each.name for each in find_rivals(["llama.cpp,http://host:8000/v1", "vllm"])] == [
        "llama.cpp",
        "host:8000",
        "vllm",
    ]
    assert find_rivals(["none"]) == find_rivals([]) == []
    assert all(not each.missing() for each in find_rivals(["auto"]))
    with pytest.raises(UserError, match=r"unknown rival 'lama\.cpp'") as caught:
        find_rivals(["lama.cpp"])
    assert "did you mean 'llama.cpp'" in caught.value.remedy
    with pytest.raises(UserError, match="with other names"):
        find_rivals(["none", "vllm"])


def test_every_registered_rival_keeps_the_contract(tmp_path: Path) -> None:
    for name in RIVALS:
        rival: Rival = RIVALS.get(name)()
        assert rival.name == name
        assert rival.serves(tmp_path / "nothing")  # neither a GGUF nor a folder of weights
        launch = find_engine(rival.engine).launch(serving_of(Path("/m/model.gguf"), _WORKLOAD))
        assert launch.command


def test_the_flags_are_those_that_deploy_writes() -> None:
    """Only the address differs; the other servers of llama.cpp get the same settings in their own spelling."""
    written = list(find_engine("llamacpp").launch(serving_of(Path("model.gguf"), _WORKLOAD)).command)
    started = _line(BINARY)
    changed = {one for one, other in zip(started, written, strict=True) if one != other}
    assert changed == {"127.0.0.1", "1234"}
    assert _line(NATIVE)[:3] == [sys.executable, "-m", "tokenmill.optimize.rivals.llamacpp_native"]
    assert _line(NATIVE)[3:] == started[1:]
    python = _line(PYTHON)
    assert python[:3] == [sys.executable, "-m", "llama_cpp.server"]
    options = dict(zip(python[3::2], python[4::2], strict=True))
    assert options["--n_ctx"] == "512"  # of one slot: that server has one
    assert options["--port"] == "1234"
    assert (options["--type_k"], options["--flash_attn"]) == ("1", "true")


def test_a_server_that_does_not_start_is_recorded_with_the_last_line_of_its_log(tmp_path: Path) -> None:
    program = "import sys; print('loading'); print('no such device', file=sys.stderr); sys.exit(3)"
    server = RunningServer([sys.executable, "-c", program], "http://127.0.0.1:1", log=tmp_path / "log")
    with pytest.raises(UserError, match="exit code 3: no such device"), server:
        pass
    assert "loading" in (tmp_path / "log").read_text()


def test_a_server_that_never_answers_is_given_up_and_its_group_ended(tmp_path: Path) -> None:
    note = tmp_path / "child"
    program = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    server = RunningServer([sys.executable, "-c", program], f"http://127.0.0.1:{free_port()}", ready_seconds=2.0)
    with pytest.raises(UserError, match="no token came back within 2 s"), server:
        pass
    if note.exists():  # it may have been killed before it wrote
        with contextlib.suppress(ProcessLookupError):  # ended and gone
            assert select.select([os.pidfd_open(int(note.read_text()))], [], [], 60)[0], "it runs on"


def test_a_rival_that_cannot_serve_is_recorded(tmp_path: Path) -> None:
    names = ["llama.cpp", f"http://127.0.0.1:{free_port()}"]
    first, second = measure_rivals(names, tmp_path, _ARRIVALS, _NO_OBJECTIVES, None, lambda _line: None)
    assert first.verdict == second.verdict == FAILED
    assert "GGUF" in first.reason or "not installed" in first.reason
    assert "no token came back" in second.reason


def test_the_context_holds_the_longest_request() -> None:
    assert workload_of(_ARRIVALS).context == 512
    text = Arrivals((0.0,), ("word " * 300,), (10,), "one request")
    assert workload_of(text).context == 512


# --- today ---


def test_a_command_keeps_its_port_or_gets_a_free_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("vllm", "ollama", "docker"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    port = free_port()
    assert parse_today(f"vllm serve m --port {port}").url == f"http://127.0.0.1:{port}"
    assert parse_today(f"vllm serve m --port={port}").port == port
    added = parse_today("VLLM_LOGGING_LEVEL=ERROR vllm serve 'my model'")
    assert added.words == ("vllm", "serve", "my model", "--port", str(added.port))
    assert added.environment == {"VLLM_LOGGING_LEVEL": "ERROR"}
    daemon = parse_today("ollama serve")
    assert daemon.environment == {"OLLAMA_HOST": f"127.0.0.1:{daemon.port}"}
    with pytest.raises(UserError, match="names no port"):
        parse_today("docker run some/image")


def test_commands_that_cannot_work_are_refused_with_the_remedy() -> None:
    for text, problem in (
        ("no-such-engine serve", "there is no command 'no-such-engine'"),
        ("A=1", "there is no command"),
        ("vllm 'serve", "cannot be read"),
        (f"{sys.executable} -m tokenmill serve m --port many", "has the port 'many'"),
    ):
        with pytest.raises(UserError, match=problem):
            parse_today(text)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of --today is in use") as caught:
            parse_today(f"{sys.executable} -m tokenmill serve m --port {port}")
        assert f"--today http://127.0.0.1:{port}" in caught.value.remedy


def test_a_deployment_of_today_that_does_not_start_is_recorded(tmp_path: Path) -> None:
    today = f"{sys.executable} -c 'raise SystemExit(\"no licence\")' --port {free_port()}"
    result = measure_today(today, tmp_path, _ARRIVALS, _NO_OBJECTIVES)
    assert result.verdict == FAILED
    assert result.reason.endswith("no licence")


# --- who wins ---
