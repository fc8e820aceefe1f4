"""The checkpoint as it is served today, measured like a candidate: the baseline that a user can check.

`--today` is a command that starts a server, or the URL of one that runs. A command gets a free port where it names
none. Without `--today` the loop measures our engine on the stored file. Called by the job.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import UserError
from tokenmill.optimize.arrivals import Arrivals
from tokenmill.optimize.objectives import Objectives
from tokenmill.optimize.results import CandidateResult
from tokenmill.optimize.rivals.endpoint import UrlRival, is_url
from tokenmill.optimize.rivals.measure import Say, Trial, measure_server, workload_of
from tokenmill.optimize.rivals.process import RunningServer, free_port, is_listening
from tokenmill.optimize.rivals.quality import EndpointJudge

NAME = "today"
_ENVIRONMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.S)
# Engines that take `--port`, by a word of their command.
_TAKES_PORT = ("vllm", "sglang", "llama-server", "llama_cpp.server", "tokenmill", "trtllm-serve")


@dataclass(frozen=True, slots=True)
class TodayCommand:
    words: tuple[str, ...]
    environment: dict[str, str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def parse_today(text: str) -> TodayCommand:
    """A command line, with variables before it as a shell takes them. Everything that can be wrong is said here."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--today cannot be read: {error}", "write it as for a shell") from None
    environment: dict[str, str] = {}
    while words and _ENVIRONMENT.fullmatch(words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if not words or shutil.which(words[0]) is None:
        raise UserError(
            f"--today: there is no command '{words[0] if words else text}'",
            "give a command that starts a server, or the URL of one that runs",
        )
    given = _given_port(words)
    if given is not None:
        if is_listening(given):
            raise UserError(f"port {given} of --today is in use", f"give --today http://127.0.0.1:{given}, or stop it")
        return TodayCommand(tuple(words), environment, given)
    port = free_port()
    if Path(words[0]).name == "ollama":
        return TodayCommand(tuple(words), {**environment, "OLLAMA_HOST": f"127.0.0.1:{port}"}, port)
    if any(name in word for name in _TAKES_PORT for word in words[:3]):
        return TodayCommand((*words, "--port", str(port)), environment, port)
    raise UserError("--today names no port", "add --port to the command, or start it and give its URL")


def _given_port(words: Sequence[str]) -> int | None:
    for number, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in ("--port", "-p"):
            value = value if equals else (words[number + 1] if number + 1 < len(words) else "")
            if not value.isdigit() or not 0 < int(value) < 65536:
                raise UserError(f"--today has the port '{value}'", "give a number, or leave --port out")
            return int(value)
    return None


def measure_today(
    today: str,
    source: Path,
    arrivals: Arrivals,
    objectives: Objectives,
    *,
    judge: EndpointJudge | None = None,
    time_limit_s: float = 300.0,
    search_seconds: float = 0.0,
    search_start: float = 1.0,
    ready_seconds: float = 300.0,
    log: Path | None = None,
    api_key: str = "",
    say: Say = lambda _line: None,
) -> CandidateResult:
    """A command that cannot be read raises UserError; a server that does not start is recorded. What misses the
    objectives is still what is served today: `slower`."""
    result = CandidateResult(NAME, weights="stored", kv="default", batch_tokens=0, engine=_engine(today))
    trial = Trial(arrivals, objectives, judge, time_limit_s, search_seconds, search_start)
    if is_url(today):
        running = UrlRival(today, api_key).start(source, workload_of(arrivals))
    else:
        command = parse_today(today)
        running = RunningServer(
            command.words,
            command.url,
            api_key=api_key,
            environment=command.environment,
            log=log,
            ready_seconds=ready_seconds,
        )
    say(f"today: {today}")
    measure_server(result, running, trial)
    return result


def _engine(today: str) -> str:
    if is_url(today):
        return UrlRival(today).name
    words = [word for word in today.split() if not _ENVIRONMENT.fullmatch(word)]
    known = {"vllm": "vllm", "sglang": "sglang", "llama": "llama.cpp", "ollama": "ollama", "tokenmill": "tokenmill"}
    text = " ".join(words[:3])
    return next((name for key, name in known.items() if key in text), words[0] if words else today)
