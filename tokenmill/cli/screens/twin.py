"""The screen of `tokenmill simulate --traffic-log`: what would have been, and how far yesterday itself was missed."""

from __future__ import annotations

from typing import Any

from tokenmill.cli.render.screen import Cell, Facts, Result, Screen, Section, Table, Tone, Value, left, right
from tokenmill.cli.render.units import change, count, duration, milliseconds, percent, tokens_per_second

_ROWS = (
    ("ttft_ms", "p50", "TTFT p50"),
    ("ttft_ms", "p95", "TTFT p95"),
    ("tpot_ms", "p50", "per output token p50"),
    ("tpot_ms", "p95", "per output token p95"),
    ("e2e_ms", "p50", "end to end p50"),
    ("e2e_ms", "p95", "end to end p95"),
)
_GOOD = 0.25


def twin_screen(result: Result) -> Screen:
    changed = result.get("changed")
    errors = result["error"]
    words = ", ".join(changed["with"]) if changed else "as it was"
    shown = changed["figures"] if changed else result["simulated"]
    error = errors.get("ttft_ms_p95", 0.0)
    headline = (
        f"{count(result['requests'])} logged requests {words}: {tokens_per_second(shown['throughput_tok_s'])}, "
        f"TTFT p95 {milliseconds(shown['ttft_ms']['p95'])}; the log itself is missed by {change(error)}"
    )
    sections: list[Section] = [_latencies(result), _costs(result), _basis(result)]
    notes = [Cell(f"assumed: {each}", "warning") for each in (changed or {}).get("assumptions", [])]
    if result["failed"]:
        notes.append(Cell(f"{count(result['failed'])} logged requests had no answer", "warning"))
    return Screen(headline, "good" if abs(error) <= _GOOD else "warning", sections, notes)


def _latencies(result: Result) -> Table:
    changed = result.get("changed")
    rows: list[tuple[Value, ...]] = [_row(result, changed, name, rank, words) for name, rank, words in _ROWS]
    rows.append(_throughput(result, changed))
    columns = [left(""), right("measured"), right("simulated"), right("error")]
    if changed:
        columns += [right("would have been"), right("error bar")]
    return Table("Yesterday, and with the change" if changed else "Yesterday", tuple(columns), rows)


def _row(result: Result, changed: Any, name: str, rank: str, words: str) -> tuple[Value, ...]:
    key = f"{name}_{rank}"
    error = result["error"].get(key)
    row: tuple[Value, ...] = (
        words,
        milliseconds(result["measured"][name][rank]),
        milliseconds(result["simulated"][name][rank]),
        Cell(change(error), _tone(error)),
    )
    if not changed:
        return row
    low, high = changed["interval"].get(key, (None, None))
    bar = "" if low is None else f"{milliseconds(low)} to {milliseconds(high)}"
    return (*row, milliseconds(changed["figures"][name][rank]), bar)


def _throughput(result: Result, changed: Any) -> tuple[Value, ...]:
    key = "throughput_tok_s"
    error = result["error"].get(key)
    row: tuple[Value, ...] = (
        "output",
        tokens_per_second(result["measured"][key]),
        tokens_per_second(result["simulated"][key]),
        Cell(change(error), _tone(error)),
    )
    if not changed:
        return row
    low, high = changed["interval"].get(key, (0.0, 0.0))
    return (
        *row,
        tokens_per_second(changed["figures"][key]),
        f"{tokens_per_second(low)} to {tokens_per_second(high)}",
    )


def _tone(error: float | None) -> Tone:
    return "warning" if error is None or abs(error) > _GOOD else "good"


def _costs(result: Result) -> Facts:
    rows: list[tuple[str, Value]] = [("as it was", _cost(result["cost"]))]
    if "changed" in result:
        rows.append(("with the change", _cost(result["changed"]["cost"])))
    return Facts("Cost", [*rows, ("price", Cell(result["cost"]["basis"], "dim"))])


def _cost(cost: dict[str, Any]) -> str:
    hours = f"{cost['replicas']} x {duration(3600 * cost['device_hours'] / cost['replicas'])}"
    if cost["dollars"] is None:
        return hours
    return f"${cost['dollars']:.4g} ({hours}), ${cost['dollars_per_million_output']:.4g} per 1M output tokens"


def _basis(result: Result) -> Facts:
    hits = f"{percent(result['measured']['cache_hit_rate'])} measured"
    hits += f", {percent(result['simulated']['cache_hit_rate'])} simulated"
    if "changed" in result:
        hits += f", {percent(result['changed']['figures']['cache_hit_rate'])} with the change"
    return Facts(
        "Log",
        [
            ("server", f"{result['model']} on {result['device']}"),
            ("time", duration(result["span_s"])),
            ("prefix cache hits", hits),
            ("step times", Cell(f"{result['basis']}, fitted to {percent(result['fit_error'], 1)}", "dim")),
            ("outside the engine", f"{milliseconds(result['request_ms'])} of a first token"),
        ],
    )
