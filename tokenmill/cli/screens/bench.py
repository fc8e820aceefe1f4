"""The screens of `tokenmill bench latency | throughput | serve`: the speed first, then what it was measured on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tokenmill.cli.render.screen import Bar, Cell, Facts, Result, Screen, Section, Table, Value, left, right
from tokenmill.cli.render.units import count, counted, duration, milliseconds, percent, plain_number, tokens_per_second

_METRICS = {
    "ttft": "time to first token (TTFT)",
    "tpot": "per output token (TPOT)",
    "itl": "between tokens (ITL)",
    "e2el": "end to end (E2EL)",
    "ttft_scheduled": "first token, from the intended send time",
    "e2el_scheduled": "end to end, from the intended send time",
}
_FAILURES = 5


def latency_screen(result: Result, model: str) -> Screen:
    headline = (
        f"{model}: {tokens_per_second(result['decode_tok_s'])} decode, "
        f"{tokens_per_second(result['prefill_tok_s'])} prefill, first token after {milliseconds(result['ttft_ms'])}"
    )
    batch, length, wanted = result["batch_size"], result["input_len"], result["output_len"]
    decode_ms = result["tpot_ms"] * (wanted - 1) if result["tpot_ms"] is not None else 0.0
    whole_ms = result["ttft_ms"] + decode_ms
    title = (
        f"{counted(batch, 'prompt')} of {counted(length, 'token')}, {counted(wanted, 'token')} generated; "
        f"median of {counted(result['repeat'], 'run')}"
    )
    rows = [
        _phase("prefill", result["prefill_tok_s"], result["ttft_ms"] / length, result["ttft_ms"], whole_ms),
        _phase("decode", result["decode_tok_s"], result["tpot_ms"], decode_ms, whole_ms),
    ]
    columns = (left(""), right("rate"), right("per token"), right("in all"), right("share"), left(""))
    return Screen(headline, "plain", [Table(title, columns, rows), _kernels(result)])


def _phase(name: str, rate: float | None, per_token: float | None, spent: float, whole: float) -> tuple[Value, ...]:
    share = spent / whole
    return name, tokens_per_second(rate), milliseconds(per_token), milliseconds(spent), percent(share), Bar(share)


def _kernels(result: Result) -> Facts:
    by_kernel: dict[str, list[str]] = {}
    for operation, kernel in result["kernels"].items():
        by_kernel.setdefault(kernel, []).append(operation)
    rows: list[tuple[str, Value]] = [
        (
            "executor",
            f"{result['executor']}, {counted(result['threads'], 'thread')}, loaded in {duration(result['load_s'])}",
        )
    ]
    rows += [(", ".join(operations), kernel) for kernel, operations in by_kernel.items() if len(operations) <= 2]
    rows += [(f"{len(names)} other operations", kernel) for kernel, names in by_kernel.items() if len(names) > 2]
    return Facts("Computed by", rows)


def throughput_screen(result: Result, model: str) -> Screen:
    headline = (
        f"{model}: {tokens_per_second(result['output_tok_s'])} output, {tokens_per_second(result['total_tok_s'])} with "
        f"prompts, {plain_number(result['requests_s'])} requests/s"
    )
    load: list[tuple[str, Value]] = [
        (
            "requests",
            f"{count(result['num_prompts'])} in {duration(result['elapsed_s'])}, {result['peak_running']} at once",
        ),
        ("tokens", f"{count(result['input_tokens'])} of prompts, {count(result['output_tokens'])} generated"),
        ("preemptions", _bad_if(result["preemptions"])),
    ]
    if result["draft_acceptance"] is not None:
        text = f"{percent(result['draft_acceptance'])} accepted, {result['draft_length']:.1f} tokens a draft"
        load.append(("speculation", Cell(f"{text}, {result['draft_gain']:.2f} times as fast", "good")))
    kv: list[tuple[Value, ...]] = [
        ("KV memory in use, mean", percent(result["kv_use"]), Bar(result["kv_use"])),
        ("of it, holding no token", percent(result["kv_waste"]), Bar(result["kv_waste"], "warning")),
        (
            "prefix cache hits",
            percent(result["prefix_hit_rate"]),
            Bar(result["prefix_hit_rate"], "good"),
        ),
    ]
    table = Table("Cache", (left(""), right(""), left("")), kv)
    return Screen(headline, "plain", [Facts("Load", load), table])


def _bad_if(number: int) -> Cell:
    return Cell(count(number), "warning" if number else "plain")


def serve_screen(result: Result, metrics: Collection[str]) -> Screen:
    """`metrics`: those that were asked for (`--percentile-metrics`)."""
    done, failed = result["completed"], result["failed"]
    if not done:
        return Screen(f"{result['model_id']}: none of {count(failed)} requests succeeded", "bad", [], _failures(result))
    headline = (
        f"{result['model_id']}: {tokens_per_second(result['output_throughput'])} output, "
        f"{plain_number(result['request_throughput'])} requests/s, "
        f"TTFT {milliseconds(result['median_ttft_ms'])}, ITL {milliseconds(result['median_itl_ms'])} (medians)"
    )
    sections: list[Section] = [_serve_latencies(result, metrics), _serve_load(result)]
    return Screen(headline, "warning" if failed else "plain", sections, _failures(result))


def _serve_latencies(result: Result, metrics: Collection[str]) -> Table:
    named = [name for name in _METRICS if name in metrics or name.endswith("_scheduled")]
    shown = [name for name in named if result.get(f"mean_{name}_ms") is not None]
    kinds = [key.removesuffix("_ttft_ms") for key in result if key.endswith("_ttft_ms")]
    rows = [(_METRICS[name], *(milliseconds(result.get(f"{kind}_{name}_ms")) for kind in kinds)) for name in shown]
    return Table("Latency", (left(""), *(right(kind) for kind in kinds)), rows)


def _serve_load(result: Result) -> Facts:
    failed = result["failed"]
    most = f", at most {result['max_concurrency']} at once" if result["max_concurrency"] else ""
    rows: list[tuple[str, Value]] = [
        (
            "requests",
            f"{count(result['completed'])} in {duration(result['duration'])}, {_arrivals(result)}{most}",
        ),
        ("failed", Cell(count(failed), "bad" if failed else "good")),
        (
            "tokens",
            f"{count(result['total_input_tokens'])} of prompts, {count(result['total_output_tokens'])} generated",
        ),
        ("with prompts", tokens_per_second(result["total_token_throughput"])),
        ("best second", f"{tokens_per_second(result['max_output_tokens_per_s'])}, {_at_once(result)}"),
    ]
    if result["request_goodput"] is not None:
        share = result["request_goodput"] / result["request_throughput"] if result["request_throughput"] else 0.0
        text = f"{plain_number(result['request_goodput'])} requests/s within the limits ({percent(share)})"
        rows.append(("goodput", Cell(text, "good" if share > 0.99 else "warning")))
    if result["steady_state"] is not None:
        steady: Mapping[str, Any] = result["steady_state"]
        text = f"{tokens_per_second(steady['output_throughput'])} over {duration(steady['seconds'])}"
        rows.append(("steady state", text))
    rows.append(("this client", Cell(f"{duration(result['client_cpu_s'])} of CPU time", "dim")))
    return Facts("Load", rows)


def _arrivals(result: Result) -> str:
    rate = result["request_rate"]
    if rate == "inf":
        return "all sent at once"
    return "replayed from a trace" if rate == "trace" else f"sent at {rate:g} requests/s"


def _at_once(result: Result) -> str:
    return f"{counted(result['max_concurrent_requests'], 'request')} at once at most"


def _failures(result: Result) -> list[Cell]:
    failures = list(result["failures"].items())
    return [Cell(f"{count(number)} x {error}", "bad") for error, number in failures[:_FAILURES]]
