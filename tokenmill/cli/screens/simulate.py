"""The screen of `tokenmill simulate`: throughput and tail latency first, then where the GPU's time went."""

from __future__ import annotations

from tokenmill.cli.render.screen import (
    Bar,
    Cell,
    Facts,
    Result,
    Screen,
    Section,
    Table,
    Tone,
    Value,
    left,
    right,
    shares,
)
from tokenmill.cli.render.units import count, counted, duration, milliseconds, percent, plain_number, tokens_per_second

_REPLICAS = 8
_LATENCIES = {
    "ttft_ms": "time to first token (TTFT)",
    "itl_ms": "between tokens (ITL)",
    "tpot_ms": "per output token (TPOT)",
    "e2e_ms": "end to end (E2E)",
}
_PERCENTILES = ("mean", "p50", "p90", "p99")


def simulate_screen(result: Result) -> Screen:
    goodput = result["goodput"]
    kept = f", {percent(goodput['share'])} within limits" if goodput else ""
    headline = (
        f"{result['model']} on {result['device']}: {tokens_per_second(result['throughput_tok_s'])}, "
        f"{plain_number(result['requests_s'])} requests/s, TTFT p99 {milliseconds(result['ttft_ms']['p99'])}, "
        f"ITL p99 {milliseconds(result['itl_ms']['p99'])}{kept}"
    )
    tone: Tone = "plain" if goodput is None else "good" if goodput["share"] >= 0.99 else "bad"
    sections: list[Section] = [_latencies(result), _time(result), _state(result), _deployment(result)]
    if len(result["replicas"]) > 1:
        sections.insert(2, _replicas(result))
    return Screen(headline, tone, sections, _notes(result))


def _latencies(result: Result) -> Table:
    rows = [(name, *(milliseconds(result[key][each]) for each in _PERCENTILES)) for key, name in _LATENCIES.items()]
    return Table("Latency", (left(""), *(right(each) for each in _PERCENTILES)), rows)


def _time(result: Result) -> Table:
    spent = result["gpu_seconds"]
    return shares(
        f"GPU time, {duration(spent['total'])} paid",
        [
            ("prefill", spent["uncached_input"], duration(spent["uncached_input"]), "plain"),
            ("decode", spent["output"], duration(spent["output"]), "plain"),
            ("idle", spent["idle"], duration(spent["idle"]), "dim"),
        ],
    )


def _state(result: Result) -> Table:
    kv, queue = result["kv_use"], result["queue"]
    hits = result["cache_hit_rate"]
    rows: list[tuple[Value, ...]] = [
        (
            "KV memory",
            f"mean {percent(kv['mean'])}, peak {percent(kv['peak'])}",
            Bar(kv["peak"], _level(kv["peak"])),
        ),
        ("prefix cache hits", percent(hits), Bar(hits, "good")),
        ("requests waiting", f"mean {plain_number(queue['mean'])}, peak {count(queue['peak'])}", ""),
        ("preemptions", Cell(count(result["preemptions"]), "warning" if result["preemptions"] else "plain"), ""),
    ]
    return Table("Cache and queue", (left(""), left(""), left("")), rows)


def _level(share: float) -> Tone:
    return "warning" if share > 0.95 else "plain"


def _replicas(result: Result) -> Table:
    shown = result["replicas"][:_REPLICAS]
    rows = [
        (str(each["replica"]), each["pool"], count(each["requests"]), count(each["steps"]), percent(each["busy"]),
         percent(each["cache_hit_rate"]), count(each["preemptions"]), Bar(each["busy"]))
        for each in shown
    ]  # fmt: skip
    columns = (left("replica"), left("pool"), right("requests"), right("steps"), right("busy"), right("cache hits"),
               right("preemptions"), left(""))  # fmt: skip
    return Table(f"{counted(len(result['replicas']), 'replica')}, router {result['router']}", columns, rows)


def _deployment(result: Result) -> Facts:
    rows: list[tuple[str, Value]] = [
        ("load", f"{result['workload']}: {count(result['requests'])} requests in {duration(result['duration_s'])}")
    ]
    if "deployment" in result:
        rows.append(("engine", result["deployment"]))
    return Facts("Simulated", [*rows, ("scheduler", result["scheduler"]), ("step times", Cell(result["basis"], "dim"))])


def _notes(result: Result) -> list[Cell]:
    notes = []
    if result["refused"]:
        notes.append(Cell(f"{counted(result['refused'], 'request')} refused", "bad"))
    if not result["basis"].startswith("measured"):
        notes.append(Cell("step times are predicted, not measured on this device", "warning"))
    if "report" in result:
        notes.append(Cell(f"report: {result['report']}", "good"))
    return notes
