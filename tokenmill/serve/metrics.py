"""The metric table, and the numbers in it. Prometheus text and the dashboard are both generated from METRICS.

Each metric is shown under our own prefix and, where vLLM has one of the same meaning, under vLLM's name too, from one
stored value. Observes the engine client; knows nothing of routes.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tokenmill.engine.messages import Snapshot
from tokenmill.serve.generation import Member

PREFIX = "tokenmill_"
VLLM_PREFIX = "vllm:"
_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    name: str
    vllm: str  # vLLM's name, empty if it has none
    kind: str  # "gauge", "counter", "histogram"
    help: str
    panel: str  # group on the dashboard
    unit: str = "short"  # as Grafana names units
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _gauge(name: str, vllm: str, help: str, panel: str, unit: str = "short", *labels: str) -> MetricSpec:
    return MetricSpec(name, vllm, "gauge", help, panel, unit, labels)


def _counter(name: str, vllm: str, help: str, panel: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, vllm, "counter", help, panel, "short", labels)


def _seconds(name: str, vllm: str, help: str) -> MetricSpec:
    return MetricSpec(name, vllm, "histogram", help, "Latency", "s", (), _SECONDS)


def _sizes(name: str, vllm: str, help: str) -> MetricSpec:
    return MetricSpec(name, vllm, "histogram", help, "Traffic", "short", (), _TOKENS)


METRICS = (
    _gauge("requests_running", "num_requests_running", "Sequences being computed.", "Queue"),
    _gauge("requests_waiting", "num_requests_waiting", "Sequences waiting in the engine.", "Queue"),
    _counter("admission_rejections", "admission_rejections", "Requests refused at the door.", "Queue", "reason"),
    _gauge("predicted_ttft_seconds", "", "Expected wait of a request that would arrive now.", "Queue", "s"),
    _gauge("kv_cache_usage_ratio", "kv_cache_usage_perc", "KV pages held; 1 is all.", "KV cache", "percentunit"),
    _gauge("kv_pages_cached", "", "KV pages kept for reuse only.", "KV cache"),
    _gauge("kv_pages_consistent", "", "1 if the page invariant held when the engine was last idle.", "KV cache"),
    _counter("prefix_cache_queries", "prefix_cache_queries", "Prompt tokens looked up.", "KV cache"),
    _counter("prefix_cache_hits", "prefix_cache_hits", "Prompt tokens found in the prefix cache.", "KV cache"),
    _counter("preemptions", "num_preemptions", "Sequences that gave up their pages.", "KV cache"),
    _counter("evictions", "", "Cached pages that made room.", "KV cache"),
    _counter("prefix_cache_requests", "", "Requests by what the prefix cache did for them.", "KV cache", "outcome"),
    _counter("kv_dropped_tokens", "", "Tokens whose KV a budget gave up, at a loss.", "KV cache", "policy"),
    _gauge("kv_pages_kept", "", "Cached KV pages promised to a request by cache_control.", "KV cache"),
    _counter("kv_promises_broken", "", "Promised pages that had to make room.", "KV cache"),
    _counter("kv_pages_unwritten", "", "Pages evicted faster than the tiers could take them.", "KV tiers"),
    _counter("kv_loaded_tokens", "", "Prompt tokens whose KV came back from a tier.", "KV tiers", "tier"),
    _gauge("kv_tier_entries", "", "Pages in a tier.", "KV tiers", "short", "tier"),
    _gauge("kv_tier_bytes", "", "Size of a tier.", "KV tiers", "bytes", "tier"),
    _gauge("kv_tier_read_bandwidth", "", "Measured speed of reading pages.", "KV tiers", "Bps", "tier"),
    _counter("kv_tier_hits", "", "Pages that came back.", "KV tiers", "tier"),
    _counter("kv_tier_misses", "", "Pages that were expected and did not come.", "KV tiers", "tier"),
    _counter("kv_tier_read_bytes", "", "Bytes read from a tier.", "KV tiers", "tier"),
    _counter("kv_tier_written_bytes", "", "Bytes written to a tier.", "KV tiers", "tier"),
    _counter("kv_tier_corrupt", "", "Entries with a wrong checksum; never used.", "KV tiers", "tier"),
    _counter("kv_tier_foreign", "", "Entries of another model or layout; never used.", "KV tiers", "tier"),
    _counter("kv_tier_failures", "", "Reads and writes that a tier refused.", "KV tiers", "tier"),
    _counter("prompt_tokens", "prompt_tokens", "Prompt tokens of requests that started.", "Throughput"),
    _counter("generation_tokens", "generation_tokens", "Tokens generated.", "Throughput"),
    _counter("engine_steps", "", "Steps of the engine.", "Throughput"),
    _counter("drafts", "spec_decode_num_drafts", "Steps of a sequence with drafted tokens.", "Throughput"),
    _counter("drafted_tokens", "spec_decode_num_draft_tokens", "Tokens drafted.", "Throughput"),
    _counter("accepted_tokens", "spec_decode_num_accepted_tokens", "Drafted tokens that held.", "Throughput"),
    _gauge("drafting_saved_seconds", "", "Time that drafting has won, net, by the engine's clock.", "Throughput", "s"),
    _counter("requests", "request_success", "Sequences ended.", "Throughput", "finished_reason"),
    _seconds("ttft_seconds", "time_to_first_token_seconds", "Time to first token."),
    _seconds("itl_seconds", "inter_token_latency_seconds", "Gap between tokens."),
    _seconds("e2e_seconds", "e2e_request_latency_seconds", "Arrival to last token."),
    _sizes("request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of a request."),
    _sizes("request_generation_tokens", "request_generation_tokens", "Output tokens of a request."),
    _counter("http_responses", "", "HTTP responses.", "Traffic", "status"),
    _counter("ignored_fields", "", "Unknown request fields that were ignored.", "Traffic"),
    _counter("engine_restarts", "", "Engine processes replaced.", "Health"),
    _gauge("engine_up", "", "1 while the engine is ready.", "Health"),
    _gauge(
        "lora_requests",
        "lora_requests_info",
        "LoRA adapters in use; none are supported.",
        "Traffic",
        "short",
        *("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
)
_FROM_SNAPSHOT = {
    "prefix_cache_queries": "num_prefix_query_tokens",
    "prefix_cache_hits": "num_prefix_hit_tokens",
    "preemptions": "num_preemptions",
    "evictions": "num_evictions",
    "engine_steps": "num_steps",
    "drafts": "num_drafts",
    "drafted_tokens": "num_drafted",
    "accepted_tokens": "num_accepted",
    "kv_promises_broken": "num_promises_broken",
    "kv_pages_unwritten": "num_pages_unwritten",
}
_TIER_GAUGES = ("entries", "bytes", "read_bandwidth")
_TIER_COUNTERS = ("hits", "misses", "read_bytes", "written_bytes", "corrupt", "foreign", "failures")


class _Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        running, shown = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            shown.append((bound, float(running)))
        return shown


class Metrics:
    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._values: dict[str, dict[tuple[str, ...], float]] = {
            spec.name: defaultdict(float, {} if spec.labels else {(): 0.0})
            for spec in METRICS
            if spec.kind != "histogram"
        }
        self._histograms = {spec.name: _Histogram(spec.buckets) for spec in METRICS if spec.kind == "histogram"}
        self._last = Snapshot()
        self._values["lora_requests"]["0", "", ""] = 0.0
        self._values["kv_pages_consistent"][()] = 1.0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def add(self, name: str, amount: float = 1.0, *labels: str) -> None:
        self._values[name][labels] += amount

    def set(self, name: str, value: float, *labels: str) -> None:
        self._values[name][labels] = value

    def get(self, name: str) -> float:
        """Sum over labels, or the number of observations."""
        if name in self._histograms:
            return sum(self._histograms[name].counts)
        return sum(self._values[name].values())

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    # --- from the engine ---

    def on_step(self, snapshot: Snapshot) -> None:
        for name, source in _FROM_SNAPSHOT.items():
            self._values[name][()] += getattr(snapshot, source) - getattr(self._last, source)
        self._on_tiers(snapshot)
        self._last = snapshot
        self.set("requests_running", snapshot.num_running)
        self.set("requests_waiting", snapshot.num_waiting)
        self.set("kv_cache_usage_ratio", snapshot.num_pages_held / snapshot.num_pages)
        self.set("kv_pages_cached", snapshot.num_pages_cached)
        self.set("kv_pages_consistent", snapshot.pages_consistent)
        self.set("kv_pages_kept", snapshot.num_pages_kept)
        self.set("drafting_saved_seconds", snapshot.saved_seconds)

    def _on_tiers(self, snapshot: Snapshot) -> None:
        before = {tier.name: tier for tier in self._last.tiers}
        for tier in snapshot.tiers:
            for field in _TIER_GAUGES:
                self.set(f"kv_tier_{field}", getattr(tier, field), tier.name)
            for field in _TIER_COUNTERS:
                known = getattr(before[tier.name], field) if tier.name in before else 0
                self.add(f"kv_tier_{field}", getattr(tier, field) - known, tier.name)

    def on_tokens(self, member: Member, num_tokens: int) -> None:
        if not num_tokens:
            return
        now = time.monotonic()
        self._values["generation_tokens"][()] += num_tokens
        if member.first_token is None:
            member.first_token = now
            num_prompt = len(member.request.prompt_ids)
            self._values["prompt_tokens"][()] += num_prompt
            self.observe("ttft_seconds", now - member.arrived)
            self.observe("request_prompt_tokens", num_prompt)
        elif member.request.params.n == 1:
            self.observe("itl_seconds", now - member.last_token)
        member.last_token = now

    def on_end(self, member: Member) -> None:
        if member.first_token is not None:
            self.observe("e2e_seconds", time.monotonic() - member.arrived)
            self.observe("request_generation_tokens", sum(len(each.token_ids) for each in member.output.outputs))
        self._on_cache(member)
        for each in member.output.outputs:
            self.add("requests", 1.0, each.finish_reason or "abort")

    def _on_cache(self, member: Member) -> None:
        report, control = member.output.cache, member.request.params.cache
        if report is not None:
            self.add("prefix_cache_requests", 1.0, report.reason)
            if report.num_loaded_tokens:
                self.add("kv_loaded_tokens", report.num_loaded_tokens, report.tier)
        if control is not None and control.budget:
            dropped = sum(each.num_dropped_tokens for each in member.output.outputs)
            self.add("kv_dropped_tokens", dropped, control.policy)

    def on_restart(self, _reason: str) -> None:
        self._last = Snapshot()
        self.add("engine_restarts")
        for name in ("requests_running", "requests_waiting", "kv_cache_usage_ratio", "kv_pages_cached"):
            self.set(name, 0.0)

    # --- to Prometheus ---

    def collect(self) -> Iterator[Metric]:
        for spec in METRICS:
            yield self._family(PREFIX + spec.name, spec)
            if spec.vllm:
                yield self._family(VLLM_PREFIX + spec.vllm, spec)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _family(self, name: str, spec: MetricSpec) -> Metric:
        labels = ["model_name", *spec.labels]
        if spec.kind == "histogram":
            histogram = self._histograms[spec.name]
            shown = HistogramMetricFamily(name, spec.help, labels=labels)
            shown.add_metric([self._model_name], histogram.buckets(), histogram.total)
            return shown
        family = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
        values = family(name, spec.help, labels=labels)
        for each, value in self._values[spec.name].items():
            values.add_metric([self._model_name, *each], value)
        return values
