"""Symptoms and their fixes: each rule looks at one reading and says what is wrong, by which numbers, and what to do.

A rule is a function in RULES. Fixes name the flags of the server that was read. Rules never guess: a metric that a
server does not have makes a rule silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tokenmill.bench.symptoms.reading import Reading

Severity = Literal["critical", "warning", "hint"]
_FULL = 0.9  # of the KV cache
_MIN_TOKENS = 2000  # looked up in the prefix cache before its rate means something
_LOW_HITS = 0.1


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity
    symptom: str
    evidence: str
    fix: str


_MORE_KV = {
    "tokenmill": "raise --memory (on a GPU --gpu-memory-utilization), store it in 8 bits with --kv-cache-dtype fp8, or "
    "lower --context or --concurrency",
    "vLLM": "raise --gpu-memory-utilization, store it in 8 bits with --kv-cache-dtype fp8, or lower --max-num-seqs or "
    "--max-model-len",
    "llama.cpp": "raise --ctx-size, store it in 8 bits with --cache-type-k q8_0 and --cache-type-v q8_0, or lower "
    "--parallel",
}
_MORE_SLOTS = {
    "tokenmill": "raise --concurrency",
    "vLLM": "raise --max-num-seqs",
    "llama.cpp": "raise --parallel, and --ctx-size with it",
}
_PREFILL = {
    "tokenmill": "raise --batch-tokens if time between tokens allows it, let prompts share a prefix, or add a device",
    "vLLM": "raise --max-num-batched-tokens if time between tokens allows it, let prompts share a prefix, or add a "
    "device",
    "llama.cpp": "raise --batch-size and --ubatch-size, or use a server with a shared prefix cache",
}


def diagnose(reading: Reading) -> list[Finding]:
    """The worst first."""
    order: dict[Severity, int] = {"critical": 0, "warning": 1, "hint": 2}
    return sorted((found for rule in RULES for found in rule(reading)), key=lambda found: order[found.severity])


def _engine(reading: Reading) -> Iterator[Finding]:
    if reading.engine_up == 0:
        yield Finding(
            "critical", "the engine is down", "tokenmill_engine_up is 0", "GET /readyz says what keeps it from starting"
        )
    if reading.restarts:
        evidence = f"{reading.restarts:.0f} restarts since the server started"
        fix = "look for 'the engine process ended' in the log: it has the reason, and the stacks of a hang"
        yield Finding("warning", "the engine was replaced", evidence, fix)


def _queue(reading: Reading) -> Iterator[Finding]:
    """Requests wait: for pages, for a slot, behind prompts, or because the device is busy."""
    if not reading.waiting:
        return
    grows = reading.waiting > reading.waiting_before
    shown = f"{reading.waiting:.0f} waiting, {reading.running:.0f} running"
    if grows:
        shown += f" ({reading.waiting_before:.0f} waiting {reading.seconds:.0f} s ago)" if reading.seconds else ""
    symptom = "the queue grows" if grows else "requests wait"
    severity: Severity = "critical" if grows and reading.waiting > reading.running else "warning"
    if reading.kv_usage is not None and reading.kv_usage >= _FULL:
        evidence = f"{shown}; {reading.kv_usage:.0%} of the KV cache is held"
        yield Finding(severity, f"{symptom}: the KV cache is full", evidence, _MORE_KV[reading.server])
        return
    at_limit = reading.running_limit is not None and reading.running >= reading.running_limit
    if at_limit or (reading.server == "llama.cpp" and reading.running):  # it defers only when all slots are taken
        limit = f"; at most {reading.running_limit:.0f} run at once" if reading.running_limit is not None else ""
        yield Finding(severity, f"{symptom}: every slot is taken", shown + limit, _MORE_SLOTS[reading.server])
        return
    prefill, decode = reading.prefill_seconds, reading.decode_seconds
    if prefill is not None and decode is not None and prefill > decode:
        evidence = f"{shown}; requests spend {prefill / (prefill + decode):.0%} of their computing time on prompts"
        yield Finding(severity, f"{symptom}: prompts take most of the time", evidence, _PREFILL[reading.server])
        return
    used = f"; the KV cache is {reading.kv_usage:.0%} full" if reading.kv_usage is not None else ""
    fix = "the device is at its limit: add a replica, quantize the weights, or bound the queue"
    yield Finding(severity, f"{symptom}: neither KV cache nor slots run out", shown + used, fix)


def _preemptions(reading: Reading) -> Iterator[Finding]:
    if reading.preemptions:
        evidence = f"{reading.preemptions:.0f} sequences gave up their pages and were computed again"
        yield Finding("warning", "sequences are preempted", evidence, _MORE_KV[reading.server])


def _prefix_cache(reading: Reading) -> Iterator[Finding]:
    if reading.hit_rate is None or reading.query_tokens < _MIN_TOKENS or reading.hit_rate >= _LOW_HITS:
        return
    evidence = f"{reading.hit_rate:.1%} of {reading.query_tokens:.0f} prompt tokens were cached"
    outcomes = reading.cache_outcomes
    most = max(outcomes, key=lambda name: outcomes[name], default="")
    if most:
        evidence += f"; most requests: {most}"
    fix = "put what prompts share first, and what changes (dates, ids) last"
    if most == "off":
        fix = "prefix caching is off: serve without --no-prefix-caching"
    elif reading.evictions and reading.kv_usage is not None and reading.kv_usage >= 0.5:
        fix = f"cached pages are evicted ({reading.evictions:.0f}): {_MORE_KV[reading.server]}"
        fix += "; --kv-disk keeps them" if reading.server == "tokenmill" else ""
    elif reading.server == "tokenmill":
        fix += "; GET /v1/requests/ID or return_prefix_break shows where a prompt parts from an earlier one"
    yield Finding("hint", "the prefix cache is of little use", evidence, fix)


def _errors(reading: Reading) -> Iterator[Finding]:
    failed = sum(count for status, count in reading.statuses.items() if status.startswith("5"))
    total = sum(reading.statuses.values())
    if failed:
        evidence = f"{failed:.0f} of {total:.0f} HTTP responses are 5xx"
        severity: Severity = "critical" if failed > 0.01 * total else "warning"
        yield Finding(severity, "requests fail", evidence, "the access log has the error of each, by request id")
    broken = reading.ended.get("error", 0.0)
    if broken:
        fix = "no token was possible, or a grammar took too long: look for those requests in the log"
        yield Finding(
            "warning", "sequences end with an error", f"{broken:.0f} of {sum(reading.ended.values()):.0f}", fix
        )
    aborted = reading.ended.get("abort", 0.0)
    if aborted > 0.1 * sum(reading.ended.values()):
        evidence = f"{aborted:.0f} of {sum(reading.ended.values()):.0f} sequences"
        yield Finding("hint", "clients leave early", evidence, "their timeouts may be shorter than the answers take")
    if reading.rejections:
        most = max(reading.rejections, key=lambda name: reading.rejections[name])
        evidence = ", ".join(f"{count:.0f} {name}" for name, count in sorted(reading.rejections.items()))
        yield Finding(
            "warning", "requests are refused (429)", evidence, _REFUSALS.get(most, "raise that limit of the key")
        )


_REFUSALS = {
    "queue_full": "the load is above what the server can do: add a replica, or raise --max-queued-requests",
    "deadline": "answers would come too late: add a replica, or let clients wait longer",
    "insufficient_quota": "a budget is spent: raise max_budget of the key",
}


def _latency(reading: Reading) -> Iterator[Finding]:
    half, tail = reading.itl_p50, reading.itl_p99
    if half is not None and tail is not None and tail >= 8 * half and tail >= 0.1:
        evidence = f"between tokens: half within {half * 1000:g} ms, 99 % within {tail * 1000:g} ms"
        fix = {
            "tokenmill": "lower --batch-tokens, so that prompts are computed in smaller chunks",
            "vLLM": "lower --max-num-batched-tokens, so that prompts are computed in smaller chunks",
        }.get(reading.server, "long prompts of other requests stall the answers: compute them in smaller batches")
        yield Finding("warning", "answers stutter: prompts of others interrupt them", evidence, fix)
    queue, prefill = reading.queue_seconds, reading.prefill_seconds
    if queue is not None and prefill is not None and queue > 2 * prefill and (reading.ttft_p50 or 0) >= 1.0:
        evidence = (
            f"half of the first tokens take over {reading.ttft_p50:g} s; {queue / (queue + prefill):.0%} is waiting"
        )
        yield Finding(
            "warning", "first tokens are late because requests wait", evidence, "see the queue, or add a replica"
        )
    if reading.expired:
        evidence = f"{reading.expired:.0f} requests had no token at their deadline"
        yield Finding("warning", "deadlines are missed", evidence, "add a replica, or send with longer deadlines")


def _speculation(reading: Reading) -> Iterator[Finding]:
    if reading.drafting_saved is not None and reading.drafting_saved < -1.0:
        evidence = f"drafting has cost {-reading.drafting_saved:.1f} s net"
        yield Finding("hint", "speculation loses time", evidence, "serve with --speculate off")
    elif reading.drafted and reading.accepted is not None and reading.accepted < 0.3 * reading.drafted:
        evidence = f"{reading.accepted / reading.drafted:.0%} of the drafted tokens held"
        fix = "draft fewer tokens, or none: most of the work is thrown away"
        yield Finding("hint", "speculation guesses badly", evidence, fix)


def _device(reading: Reading) -> Iterator[Finding]:
    if reading.host_memory_share is not None and reading.host_memory_share < 0.05:
        evidence = f"{reading.host_memory_share:.1%} of the machine's memory is left"
        yield Finding("critical", "the machine runs out of memory", evidence, "lower --memory, or stop other programs")
    if reading.gpu_memory_share is not None and reading.gpu_memory_share > 0.98:
        evidence = f"{reading.gpu_memory_share:.1%} of the GPU's memory is in use"
        yield Finding("warning", "the GPU's memory is full", evidence, "lower --gpu-memory-utilization a little")
    idle = reading.gpu_utilization is not None and reading.gpu_utilization < 0.3
    if idle and reading.running >= 4:
        evidence = f"{reading.gpu_utilization:.0%} busy with {reading.running:.0f} sequences running"
        yield Finding(
            "warning", "the GPU waits for the host", evidence, "look for a slow CPU, --executor eager, or grammars"
        )


RULES: tuple[Callable[[Reading], Iterator[Finding]], ...] = (
    _engine,
    _queue,
    _preemptions,
    _errors,
    _latency,
    _prefix_cache,
    _speculation,
    _device,
)
