"""How a server is started for a measurement: flags, environment, and that nothing of it outlives its starter."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.optimize import local_server
from tokenmill.optimize.local_server import LocalServer, engine_flags
from tokenmill.serve.config import split_options


def _as_options(flags: list[str]) -> dict[str, str | bool]:
    """As the command line reads them."""
    options: dict[str, str | bool] = {}
    words = iter(flags)
    for word in words:
        name = word.removeprefix("--")
        if name in ("prefix-caching", "no-prefix-caching"):
            options["prefix_caching"] = not name.startswith("no-")
        else:
            options[name] = next(words)
    return options


def test_flags_give_the_same_engine() -> None:
    config = EngineConfig(
        context=256,
        concurrency=3,
        kv_cache_dtype="fp8",
        prefix_caching=False,
        speculate="ngram",
        memory=1 << 30,
        seed=7,
    )
    flags = engine_flags(config)
    again = split_options(_as_options(flags))[1]
    for name in ("context", "concurrency", "kv_cache_dtype", "prefix_caching", "speculate", "memory", "seed"):
        assert getattr(again, name) == getattr(config, name)
    assert "--no-prefix-caching" in flags
    assert "--device" not in flags


def test_what_is_automatic_stays_so() -> None:
    assert engine_flags(EngineConfig()) == []
    assert engine_flags(EngineConfig().fill("measured", batch_tokens=512)) == []


def test_server_options_of_the_environment_do_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_API_KEY", "secret")
    monkeypatch.setenv("TOKENMILL_TRAFFIC_LOG", "/somewhere")
    monkeypatch.setenv("TOKENMILL_CACHE", "/cache")
    environment = local_server._environment()
    assert "TOKENMILL_API_KEY" not in environment
    assert "TOKENMILL_TRAFFIC_LOG" not in environment
    assert environment["TOKENMILL_CACHE"] == "/cache"


def _running(command: str, tmp_path: Path, **options: float) -> LocalServer:
    """A server whose program is this one."""
    server = LocalServer(tmp_path / "model", EngineConfig(), log=tmp_path / "log", **options)
    server._command = [sys.executable, "-c", command]
    return server


_READY = """print('{"url": "http://127.0.0.1:1", "model": "m", "engine": {"context": 8}}', flush=True)"""
_FOREVER = "import threading; threading.Event().wait()"


def test_it_is_ready_when_it_says_so_and_gone_after_the_block(tmp_path: Path) -> None:
    with _running(f"{_READY}; {_FOREVER}", tmp_path) as server:
        assert (server.url, server.model, server.options) == ("http://127.0.0.1:1", "m", {"context": 8})
        assert server.alive()
        group = server.pid
        assert group is not None
        assert os.getpgid(group) == group
    assert not server.alive()
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def test_one_that_ends_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    command = "import sys; sys.stderr.write('first\\nno such model\\n'); sys.exit(2)"
    with pytest.raises(UserError, match="did not start: no such model"), _running(command, tmp_path):
        pass
    assert "first" in (tmp_path / "log").read_text()


class _Pipe:
    """A named pipe whose writing end a server holds: the end of the server is seen as the end of the pipe."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.holding = f"file = open({str(path)!r}, 'w'); file.write('x'); file.flush()"
        self._reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def check_ended(self) -> None:
        assert os.read(self._reading, 1) == b"x"
        readable, _, _ = select.select([self._reading], [], [], 30)
        assert readable, "the server is still running"
        assert os.read(self._reading, 1) == b""
        os.close(self._reading)


def test_one_that_is_never_ready_is_ended_at_its_deadline(tmp_path: Path) -> None:
    pipe = _Pipe(tmp_path / "pipe")
    command = f"{pipe.holding}; {_FOREVER}"
    with pytest.raises(UserError, match="not ready within"), _running(command, tmp_path, ready_seconds=3.0):
        pass
    pipe.check_ended()


def test_it_ends_with_a_starter_that_is_killed(tmp_path: Path) -> None:
    pipe = _Pipe(tmp_path / "pipe")
    program = f"""
import os, signal, sys
from pathlib import Path
from tokenmill.config import EngineConfig
from tokenmill.optimize.local_server import LocalServer
server = LocalServer(Path("m"), EngineConfig())
server._command = [sys.executable, "-c", {f"{pipe.holding}; {_READY}; {_FOREVER}"!r}]
server.__enter__()
os.kill(os.getpid(), signal.SIGKILL)
"""
    starter = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert starter.returncode == -signal.SIGKILL, starter.stderr
    pipe.check_ended()
