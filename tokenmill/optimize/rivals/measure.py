"""Rivals on the same arrivals and the same quality as our own candidates.

Each rival is started, driven by the replay, judged by its log-probabilities and stopped before the next. One that is
not installed, does not start or crashes is recorded with the reason; nothing is raised for what a rival does. Called
by the job.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import UserError, unknown_name
from tokenmill.optimize.arrivals import Arrivals
from tokenmill.optimize.objectives import Objectives
from tokenmill.optimize.rate_search import sustain
from tokenmill.optimize.replay import replay
from tokenmill.optimize.results import FAILED, HARMED, PASSED, SLOWER, CandidateResult, Latency
from tokenmill.optimize.rivals import RIVALS
from tokenmill.optimize.rivals.base import Rival, RivalWorkload
from tokenmill.optimize.rivals.endpoint import UrlRival, is_url
from tokenmill.optimize.rivals.process import RunningServer
from tokenmill.optimize.rivals.quality import EndpointJudge

AUTO, NONE = "auto", "none"
_CHARACTERS_PER_TOKEN = 3  # of prompts that are text: rather too many tokens than too few
_CONTEXT_STEP = 256
_CONCURRENCY = 8

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Trial:
    """What every server goes through. Without a judge, quality is not measured."""

    arrivals: Arrivals
    objectives: Objectives
    judge: EndpointJudge | None
    time_limit_s: float
    search_seconds: float = 0.0  # for the rate that it sustains; 0: that is not searched
    search_start: float = 1.0  # over the rate of the arrivals


def find_rivals(names: Sequence[str]) -> list[Rival]:
    """By name or URL, each given once or by commas. `auto`: those that are installed; `none` or nothing: none."""
    words = list(dict.fromkeys(word.strip() for name in names for word in name.split(",") if word.strip()))
    if NONE in words:
        if len(words) > 1:
            raise UserError("--rivals none is given with other names", "give none alone, or leave it out")
        return []
    rivals: list[Rival] = []
    for word in words:
        if word == AUTO:
            rivals += [each for each in (RIVALS.get(name)() for name in RIVALS) if not each.missing()]
        elif is_url(word):
            rivals.append(UrlRival(word))
        elif word in RIVALS:
            rivals.append(RIVALS.get(word)())
        else:
            raise unknown_name("rival", word, [AUTO, NONE, *RIVALS, "a URL"])
    return rivals


def measure_rivals(
    names: Sequence[str],
    source: Path,
    arrivals: Arrivals,
    objectives: Objectives,
    judge: EndpointJudge | None,
    say: Say,
    *,
    weights: str = "stored",
    preferred: tuple[str, Path] | None = None,
    workload: RivalWorkload | None = None,
    time_limit_s: float = 300.0,
    search_seconds: float = 0.0,
    search_start: float = 1.0,
    logs: Path | None = None,
    api_key: str = "",
) -> list[CandidateResult]:
    """`source` is the checkpoint that engines are given, `weights` its name in the report; `preferred`: (name, path) of
    weights that are served instead where a rival can read them. Without a judge, quality is not measured. `logs`:
    folder that the servers' logs are kept in."""
    trial = Trial(arrivals, objectives, judge, time_limit_s, search_seconds, search_start)
    wanted = workload or workload_of(arrivals)
    results = []
    for rival in find_rivals(names):
        served, path = preferred if preferred and _can_serve(rival, preferred[1]) else (weights, source)
        result = CandidateResult(
            name=f"{rival.name}: {served}",
            weights=served,
            kv="default",
            batch_tokens=wanted.batch_tokens,
            engine=rival.name,
        )
        results.append(result)
        log = logs / f"{rival.name}.log" if logs else None
        _measure_rival(result, rival, path, wanted, log, api_key, trial)
        say(f"{rival.name}: {result.verdict}{f', {result.reason}' if result.reason else ''}")
    return results


def _can_serve(rival: Rival, path: Path) -> bool:
    try:
        return not rival.missing() and not rival.serves(path)
    except Exception:  # recorded when it is measured
        return False


def _measure_rival(
    result: CandidateResult,
    rival: Rival,
    source: Path,
    workload: RivalWorkload,
    log: Path | None,
    api_key: str,
    trial: Trial,
) -> None:
    result.verdict = FAILED
    if rival.missing():
        result.reason = f"not installed: {rival.missing()}"
        return
    try:
        result.reason = rival.serves(source)
        if result.reason:
            return
        result.engine_version = rival.version()
        running = rival.start(source, workload, log)
    except Exception as error:  # whatever a rival does is its result
        result.reason = _words(error)
        return
    running.api_key = running.api_key or api_key
    measure_server(result, running, trial, rival.dialect)


def measure_server(result: CandidateResult, running: RunningServer, trial: Trial, dialect: str = "") -> None:
    """Start, replay, judge, stop; the verdict goes into `result`."""
    try:
        with running as server:
            result.command = shlex.join(server.command)
            latency = result.latency = measure_latency(result, server.url, server.model, server.api_key, trial, dialect)
            refusal = _judge(result, server, trial.judge)
    except Exception as error:  # recorded, never raised: the run goes on without it
        result.verdict, result.reason = FAILED, _words(error)
        return
    if refusal:
        result.verdict, result.reason = HARMED, refusal
    elif not latency.objective_met:
        result.verdict, result.reason = SLOWER, latency.refusal
    else:
        result.verdict = PASSED


def measure_latency(result: CandidateResult, url: str, model: str, api_key: str, trial: Trial, dialect: str) -> Latency:
    """Under the arrivals; also the rate that it sustains within the objectives, as our own candidates are compared by,
    which stands for the first where the arrivals have no rate of their own."""
    arrivals, objectives = trial.arrivals, trial.objectives
    searches = bool(objectives) and trial.search_seconds > 0
    latency = None
    if arrivals.has_rate or not searches:
        limit = trial.time_limit_s
        latency = replay(url, arrivals, objectives, model=model, api_key=api_key, time_limit_s=limit, dialect=dialect)
    if searches:
        seconds, start = trial.search_seconds, trial.search_start
        found = sustain(url, arrivals, objectives, seconds=seconds, model=model, api_key=api_key, start=start)
        result.sustained, result.goodput_range = found.latency, found.range
    measured = latency or result.sustained
    assert measured is not None
    return measured


def _judge(result: CandidateResult, server: RunningServer, judge: EndpointJudge | None) -> str:
    if judge is None:
        return ""
    try:
        verdict = judge.judge(server.url, server.model, server.api_key)
    except UserError as error:
        return f"its quality cannot be measured: {error.problem}"
    result.quality, result.checks = verdict.quality, verdict.checks
    result.quality_method = verdict.method
    return verdict.refusal


def _words(error: Exception) -> str:
    return error.problem if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def workload_of(arrivals: Arrivals, concurrency: int = _CONCURRENCY) -> RivalWorkload:
    """A context that holds the longest request."""
    longest = max(
        (
            (len(prompt) // _CHARACTERS_PER_TOKEN if isinstance(prompt, str) else len(prompt)) + length
            for prompt, length in zip(arrivals.prompts, arrivals.output_lens, strict=True)
        ),
        default=_CONTEXT_STEP,
    )
    return RivalWorkload(-(-longest // _CONTEXT_STEP) * _CONTEXT_STEP, concurrency)
