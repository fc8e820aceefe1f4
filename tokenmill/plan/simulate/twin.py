"""The digital twin of a server: yesterday's requests again, as it was and as it would have been.

The logged configuration is simulated first and compared with the logged latencies: that error is the error bar of every
other answer. The step cost and the time outside the engine come from the first half of the log, the error from the
second, so that it is one of prediction. Called by `tokenmill simulate --traffic-log`; reads logs, prints nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tokenmill.bench.traffic_log import LoggedRequest, log_rows, read_traffic_log
from tokenmill.errors import UserError
from tokenmill.hardware.catalog import load_catalog
from tokenmill.plan.question.pricing import Pricing
from tokenmill.plan.simulate.changes import Changed, as_logged, changed
from tokenmill.plan.simulate.job import FleetOptions, SimulatedEngine, run_cluster
from tokenmill.plan.simulate.logged_server import FittedSteps, LoggedServer, read_server
from tokenmill.plan.simulate.records import RequestRecord
from tokenmill.plan.simulate.report import percentiles
from tokenmill.plan.simulate.workload import Arrival, Workload
from tokenmill.serve.traffic_log_format import BLOCK_TOKENS

_LEAST_REQUESTS = 20  # of a log whose error says anything
_QUICK_SHARE = 0.25  # of the requests, those that waited least: what is left of their TTFT lies outside the engine
_PERCENTILES = ("p50", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True)
class TwinQuestion:
    folder: Path
    changes: tuple[str, ...] = ()
    price: float | None = None  # dollars per replica and hour; None: the catalog's
    prices: Path | None = None  # file that replaces prices of the catalog


@dataclass(frozen=True, slots=True)
class Timed:
    """One answered request, measured or simulated; milliseconds."""

    number: int
    arrival_ms: float
    ttft_ms: float
    tpot_ms: float  # 0: a single token
    e2e_ms: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Twin:
    """A logged server that can be simulated, with the error it makes on its own log."""

    server: LoggedServer
    requests: Sequence[LoggedRequest]
    fitted: FittedSteps
    request_ms: float
    measured: list[Timed]
    simulated: list[Timed]
    fitted_elsewhere: bool = False  # to another log than this one

    @property
    def errors(self) -> dict[str, float]:
        """Simulated over measured - 1 on what nothing was fitted to: the second half of the log, or all of it."""
        if self.fitted_elsewhere:
            return relative_errors(figures(self.measured), figures(self.simulated))
        half = _middle([each.arrival_ms for each in self.measured])
        late = {each.number for each in self.measured if each.arrival_ms > half}
        sides = [[each for each in side if each.number in late] for side in (self.measured, self.simulated)]
        return relative_errors(*(figures(side) for side in sides))


def ask_twin(question: TwinQuestion) -> dict[str, Any]:
    """The answer as plain values."""
    twin = make_twin(question.folder)
    errors = twin.errors
    span_s = max(each.arrival_ms + each.e2e_ms for each in twin.measured) / 1e3
    answer: dict[str, Any] = {
        "traffic_log": str(question.folder),
        "model": twin.server.name or twin.server.model,
        "device": twin.server.device,
        "requests": len(twin.measured),
        "failed": sum(1 for each in twin.requests if not _answered(each)),
        "span_s": span_s,
        "basis": f"measured: {twin.fitted.basis}",
        "fit_error": twin.fitted.error,
        "request_ms": twin.request_ms,
        "measured": figures(twin.measured),
        "simulated": figures(twin.simulated),
        "error": errors,
        "cost": _cost(question, twin.server, 1, span_s, twin.simulated),
    }
    if question.changes:
        answer["changed"] = _ask_changed(question, twin, errors)
    return answer


def make_twin(folder: Path, calibrated: Twin | None = None) -> Twin:
    """`calibrated`: predict this log by the steps of another one (one load was measured, another is predicted)."""
    requests = read_traffic_log(folder)
    answered = [each for each in requests if _answered(each)]
    if len(answered) < _LEAST_REQUESTS:
        raise UserError(
            f"{folder} holds {len(answered)} answered requests", f"log at least {_LEAST_REQUESTS} and ask again"
        )
    server = read_server(folder)
    if calibrated is None:
        fitted = server.fit(until_unix=_middle([each.arrival_unix for each in answered]))
    else:
        fitted = calibrated.fitted
    measured = [_measured(number, each) for number, each in enumerate(answered)]
    records = _simulate(as_logged(server, fitted.cost), arrivals_of(answered))
    request_ms = _outside_engine(measured, records) if calibrated is None else calibrated.request_ms
    simulated = [_simulated(each, request_ms) for each in records]
    return Twin(server, requests, fitted, request_ms, measured, simulated, calibrated is not None)


def _ask_changed(question: TwinQuestion, twin: Twin, errors: dict[str, float]) -> dict[str, Any]:
    what = changed(twin.server, twin.fitted.cost, question.changes)
    assumptions = list(what.assumptions)
    refused = len(twin.requests) - len(twin.measured)
    if refused:
        assumptions.append(f"{refused} requests without an answer are served too, with the median answer")
    records = _simulate(what, arrivals_of(twin.requests))
    timed = [_simulated(each, twin.request_ms) for each in records]
    found = figures(timed)
    span_s = max(each.arrival_ms + each.e2e_ms for each in timed) / 1e3
    return {
        "with": list(what.words),
        "replicas": what.replicas,
        "router": what.router if what.replicas > 1 else "",
        "requests": len(timed),
        "figures": found,
        "interval": _intervals(found, errors),
        "cost": _cost(question, twin.server, what.replicas, span_s, timed),
        "assumptions": assumptions,
    }


# --- one replay ---


def arrivals_of(requests: Sequence[LoggedRequest]) -> list[Arrival]:
    """Numbered in the order of the log; equal prefixes of the log are equal tokens."""
    rows = log_rows(requests)
    return [
        Arrival(number, 1e3 * seconds, prompt, output, tuple(blocks), BLOCK_TOKENS)
        for number, (seconds, prompt, output, blocks) in enumerate(rows)
    ]


def _simulate(what: Changed, arrivals: Sequence[Arrival]) -> list[RequestRecord]:
    engine = SimulatedEngine(what.shape, what.cost, 0.0)
    fleet = FleetOptions(what.replicas, what.router, prefix_caching=what.prefix_caching)
    cluster = run_cluster(engine, Workload("traffic log", lambda: iter(arrivals)), fleet)
    return sorted(cluster.records.finished, key=lambda record: record.arrival.number)


def _outside_engine(measured: Sequence[Timed], records: Sequence[RequestRecord]) -> float:
    """Milliseconds of a first token that pass outside the engine (HTTP, tokenizing, messages), by those requests of the
    first half of the log that waited least: a queue would hide it."""
    by_number = {record.arrival.number: record for record in records}
    half = _middle([each.arrival_ms for each in measured])
    pairs = [
        (by_number[each.number].ttft_ms, each.ttft_ms)
        for each in measured
        if each.arrival_ms <= half and each.number in by_number
    ]
    quick = sorted(pairs)[: max(1, int(_QUICK_SHARE * len(pairs)))]
    return max(0.0, median(seen - engine for engine, seen in quick)) if quick else 0.0


def _answered(request: LoggedRequest) -> bool:
    return request.output_tokens > 0 and request.ttft_ms is not None and request.e2e_ms is not None


def _measured(number: int, request: LoggedRequest) -> Timed:
    assert request.ttft_ms is not None
    assert request.e2e_ms is not None
    each = max(1, request.output_tokens // request.n)
    return Timed(
        number,
        1e3 * request.arrival_s,
        request.ttft_ms,
        (request.e2e_ms - request.ttft_ms) / (each - 1) if each > 1 else 0.0,
        request.e2e_ms,
        each,
        request.prompt_tokens,
        request.cached_tokens,
    )


def _simulated(record: RequestRecord, request_ms: float) -> Timed:
    arrival = record.arrival
    ttft, e2e = record.ttft_ms + request_ms, record.e2e_ms + request_ms
    return Timed(
        arrival.number, arrival.ms, ttft, record.tpot_ms, e2e, record.tokens, arrival.prompt_tokens, record.cached
    )


def _middle(values: Sequence[float]) -> float:
    return (min(values) + max(values)) / 2


# --- figures ---


def figures(timed: Sequence[Timed]) -> dict[str, Any]:
    """The same figures of a measured and of a simulated run."""
    if not timed:
        raise UserError("the second half of the log has no answered request", "log for longer")
    began = min(each.arrival_ms for each in timed)
    ended = max(each.arrival_ms + each.e2e_ms for each in timed)
    return {
        "ttft_ms": asdict(percentiles([each.ttft_ms for each in timed])),
        "tpot_ms": asdict(percentiles([each.tpot_ms for each in timed if each.output_tokens > 1])),
        "e2e_ms": asdict(percentiles([each.e2e_ms for each in timed])),
        "throughput_tok_s": 1e3 * sum(each.output_tokens for each in timed) / max(1e-3, ended - began),
        "cache_hit_rate": sum(each.cached_tokens for each in timed) / max(1, sum(each.prompt_tokens for each in timed)),
    }


def relative_errors(measured: dict[str, Any], simulated: dict[str, Any]) -> dict[str, float]:
    """Flat: `throughput_tok_s`, `ttft_ms_p50`, ...; simulated over measured - 1."""
    pairs = {"throughput_tok_s": (simulated["throughput_tok_s"], measured["throughput_tok_s"])}
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        for each in _PERCENTILES:
            pairs[f"{name}_{each}"] = simulated[name][each], measured[name][each]
    return {name: predicted / seen - 1 for name, (predicted, seen) in pairs.items() if seen > 0}


def _intervals(found: dict[str, Any], errors: dict[str, float]) -> dict[str, tuple[float, float]]:
    """From the figure as far up and down as yesterday's own figure was missed."""
    intervals = {}
    for key, error in errors.items():
        name, _, rank = key.rpartition("_") if key != "throughput_tok_s" else (key, "", "")
        value = found[name][rank] if rank else found[key]
        intervals[key] = value / (1 + abs(error)), value * (1 + abs(error))
    return intervals


def _cost(
    question: TwinQuestion, server: LoggedServer, replicas: int, span_s: float, timed: Sequence[Timed]
) -> dict[str, Any]:
    hours = replicas * span_s / 3600
    price, basis = _hour(question, server.device)
    tokens = sum(each.output_tokens for each in timed)
    dollars = None if price is None else price * hours
    return {
        "replicas": replicas,
        "device_hours": hours,
        "dollars_per_hour": None if price is None else price * replicas,
        "dollars": dollars,
        "dollars_per_million_output": None if dollars is None else 1e6 * dollars / max(1, tokens),
        "basis": basis,
    }


def _hour(question: TwinQuestion, device: str) -> tuple[float | None, str]:
    """Dollars of one replica and hour; None where nobody knows."""
    if question.price is not None:
        return question.price, "stated with --price"
    try:
        found = load_catalog(question.prices).find_device(device)
        return Pricing().device_hour(found), f"catalog: {found.name}"
    except UserError:
        return None, f"no price of {device} is known: give --price"
