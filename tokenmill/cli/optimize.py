"""`tokenmill optimize`: find the cheapest deployment that keeps its quality and its latency, by measurement."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli.optimize_flags import (
    PANELS,
    LimitFlags,
    ReferenceFlags,
    SearchFlags,
    TrafficFlags,
    fill,
    parse_rivals,
    parse_today,
    readable,
    refuse_contradictions,
)
from tokenmill.cli.options import DEFAULT_MODEL, AsJson, Model, Verbose, engine_options, given_options
from tokenmill.cli.output import emit, print_json
from tokenmill.config import ADAPTER_OPTIONS, EngineConfig
from tokenmill.errors import UserError

if TYPE_CHECKING:
    from tokenmill.optimize.question import OptimizeJob
    from tokenmill.optimize.results import Outcome

_CONTEXT = 256  # tokens in a window of the text


@engine_options(without=("concurrency", "batch_tokens", "kv_cache_dtype", "itl", *ADAPTER_OPTIONS))
@given_options(PANELS, {})
def optimize(
    model: Model = DEFAULT_MODEL,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory to write. Required.")] = None,
    as_json: AsJson = False,
    _verbose: Verbose = False,
    *,
    given: Mapping[str, Any],
    engine: EngineConfig,
) -> None:
    """Cut the cost of a token by measurement: quantize, prove, replay, choose, and write the artefact and a report.

    The same command run again goes on where it stopped. Ctrl-C leaves a report of what is known so far.
    """
    if out is None:
        raise UserError("no output is given", "give a directory, as in: tokenmill optimize smollm2 --out cheaper")
    refuse_contradictions(given)
    job = _job(model, out, given, engine)
    search = fill(SearchFlags, given)
    progress = _Progress(job.effort.seconds)
    if search.watch:
        _watch(job, progress, search.watch_interval, as_json)
        return
    from tokenmill.optimize.job import optimize as run

    _show(run(job, progress), out, as_json)


def _job(model: str, out: Path, given: Mapping[str, Any], engine: EngineConfig) -> OptimizeJob:
    """Everything that can be refused without the model is refused before it is opened."""
    from tokenmill.optimize.objectives import Objectives

    traffic, limits = fill(TrafficFlags, given), fill(LimitFlags, given)
    references, search = fill(ReferenceFlags, given), fill(SearchFlags, given)
    objectives = Objectives.parse(limits.ttft, limits.itl)
    rivals, today = parse_rivals(references.rivals), parse_today(references.today)
    tasks = tuple(path for each in limits.task if (path := readable("task", each)))
    text, trace = readable("text", limits.text), readable("trace", traffic.trace)
    prompts, log = readable("prompts", traffic.prompts), readable("traffic-log", traffic.traffic_log, folder=True)

    from tokenmill.checkpoint.open import open_source
    from tokenmill.checkpoint.sources import resolve
    from tokenmill.optimize.loop import Effort
    from tokenmill.optimize.question import OptimizeJob
    from tokenmill.optimize.traffic import TrafficRequest, replay_length
    from tokenmill.runtime.build import find_device

    context = min(_CONTEXT, open_source(resolve(model).path, engine.load_format).description.context_length)
    return OptimizeJob(
        model=model,
        out=out,
        target_cost=limits.target_cost,
        max_quality_loss=limits.max_quality_loss,
        traffic=TrafficRequest(
            traffic.input_len,
            traffic.output_len,
            traffic.concurrency,
            prompts,
            trace,
            traffic.length_scale,
            traffic_log=log,
            rate=traffic.rate,
            replay_seconds=traffic.replay_seconds or replay_length(60 * search.minutes),
            rate_scale=traffic.rate_scale,
        ),
        price=references.price,
        text=text,
        gpus=references.gpu,
        candidates=search.candidates,
        kv=search.kv_cache_dtypes,
        effort=Effort(
            60 * search.minutes, search.runs, windows=max(1, limits.quality_tokens // context), context=context
        ),
        engine=engine,
        restart=search.restart,
        command=shlex.join(["tokenmill", *sys.argv[1:]]),
        device=find_device(engine)[0].type,
        objectives=objectives,
        tasks=tasks,
        max_task_loss=limits.max_task_loss,
        max_kld=limits.max_kld,
        today=today,
        rivals=rivals,
        quality_off=limits.quality == "off",
        traffic_log=log,
    )


def _watch(job: OptimizeJob, progress: _Progress, interval: float, as_json: bool) -> None:
    """Prints a line, or an object, for each proposal until it is interrupted."""
    from tokenmill.optimize.watch import WatchSettings, watch

    assert job.traffic_log is not None

    def tell(proposal: Any) -> None:
        if as_json:
            print_json(asdict(proposal))
        else:
            print(proposal.words(), flush=True)

    watch(job, job.traffic_log, WatchSettings(interval_s=interval), progress, tell)


def _show(outcome: Outcome, out: Path, as_json: bool) -> None:
    from tokenmill.cli.screens.optimize import optimize_screen
    from tokenmill.optimize.summary import summary

    result = summary(outcome, out)
    emit(result, as_json, lambda: optimize_screen(outcome, Path(result["report"])))


class _Progress:
    """A line of progress on stderr: redrawn on a terminal, one line a step elsewhere."""

    def __init__(self, budget: float) -> None:
        self._began = time.monotonic()
        self._budget = budget

    def __call__(self, what: str, share: float) -> None:
        spent = time.monotonic() - self._began
        left = max(0.0, min(self._budget - spent, spent / share - spent if share > 0.02 else self._budget))
        if sys.stderr.isatty():
            filled = "#" * round(24 * share)
            print(f"\r\033[K[{filled:<24}] {what}, about {left:.0f} s left", end="", file=sys.stderr)
            if share >= 1:
                print(file=sys.stderr)
        else:
            print(f"{spent:6.0f} s  {what}", file=sys.stderr)
        sys.stderr.flush()
