"""The metric table, and the numbers in it. Prometheus text and the dashboard are both generated from METRICS.

What the engine counts is declared in engine/stats.py and derived from there; what only the server sees is listed here.
Each metric is shown under our own prefix and, where vLLM has one of the same meaning, under vLLM's name too, from one
stored value. Observes the engine client; knows nothing of routes.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tokenmill.engine.stats import DeviceStats, DraftingStats, EngineStats, MetricSpec, TierStats, metrics_of
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


def _gauge(name: str, vllm: str, help: str, panel: str, unit: str = "short", *labels: str) -> MetricSpec:
    return MetricSpec(name, vllm, "gauge", help, panel, unit, labels)


def _counter(name: str, vllm: str, help: str, panel: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, vllm, "counter", help, panel, "short", labels)


def _seconds(name: str, vllm: str, help: str) -> MetricSpec:
    return MetricSpec(name, vllm, "histogram", help, "Latency", "s", (), _SECONDS)


def _sizes(name: str, vllm: str, help: str) -> MetricSpec:
    return MetricSpec(name, vllm, "histogram", help, "Traffic", "short", (), _TOKENS)


_SERVER_METRICS = (
    _counter("admission_rejections", "admission_rejections", "Requests rejected at admission.", "Queue", "reason"),
    _gauge("predicted_ttft_seconds", "", "Expected time to first token of a request that arrives now.", "Queue", "s"),
    _counter("prefix_cache_requests", "", "Requests by what the prefix cache did for them.", "KV cache", "outcome"),
    _counter("kv_dropped_tokens", "", "Tokens whose KV a budget policy dropped (lossy).", "KV cache", "policy"),
    _counter("kv_source_requests", "", "Requests by what became of pages that a peer had.", "KV tiers", "outcome"),
    _counter("kv_loaded_tokens", "", "Prompt tokens whose KV was loaded from a tier.", "KV tiers", "tier"),
    _counter("prompt_tokens", "prompt_tokens", "Prompt tokens of requests that started.", "Throughput"),
    _counter("generation_tokens", "generation_tokens", "Tokens generated.", "Throughput"),
    _counter("requests", "request_success", "Sequences ended.", "Throughput", "finished_reason"),
    _seconds("ttft_seconds", "time_to_first_token_seconds", "Time to first token."),
    _seconds("itl_seconds", "inter_token_latency_seconds", "Gap between tokens."),
    _seconds("e2e_seconds", "e2e_request_latency_seconds", "Arrival to last token."),
    _seconds("queue_seconds", "request_queue_time_seconds", "Arrival to the first step with the prompt."),
    _seconds("prefill_seconds", "request_prefill_time_seconds", "First step with the prompt to first token."),
    _seconds("decode_seconds", "request_decode_time_seconds", "First to last token."),
    _sizes("request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of a request."),
    _sizes("request_generation_tokens", "request_generation_tokens", "Output tokens of a request."),
    _counter("http_responses", "", "HTTP responses.", "Traffic", "status"),
    _counter("connections_refused", "", "Connections refused or cut by a transport limit.", "Traffic", "reason"),
    _counter("key_requests", "", "Prompts computed, by API key.", "Cost", "key"),
    _counter("key_prompt_tokens", "", "Prompt tokens, by API key.", "Cost", "key"),
    _counter("key_generation_tokens", "", "Tokens generated, by API key.", "Cost", "key"),
    _counter("key_device_seconds", "", "Device time, by API key; with --price.", "Cost", "key"),
    _counter("key_cost_dollars", "", "What API keys have spent.", "Cost", "key"),
    _gauge("key_budget_left_dollars", "", "What is left of the budgets of API keys.", "Cost", "currencyUSD", "key"),
    _counter("device_seconds", "", "Time of the device, busy and idle; with --price.", "Cost", "state"),
    _counter("device_cost_dollars", "", "What the device costs, busy and idle; with --price.", "Cost", "state"),
    _counter("adapter_requests", "", "Prompts computed, by adapter.", "Adapters", "adapter"),
    _counter("adapter_prompt_tokens", "", "Prompt tokens, by adapter.", "Adapters", "adapter"),
    _counter("adapter_generation_tokens", "", "Tokens generated, by adapter.", "Adapters", "adapter"),
    _counter("ignored_fields", "", "Unknown request fields that were ignored.", "Traffic"),
    _counter("traffic_log_records", "", "Requests by what became of their traffic log record.", "Health", "outcome"),
    _counter("engine_restarts", "", "Engine processes replaced.", "Health"),
    _gauge("engine_up", "", "1 while the engine is ready, or rests because nobody needs it.", "Health"),
    _gauge("model_state", "", "0 unloaded, 1 asleep, 2 loaded.", "Models"),
    _gauge("model_waiting_requests", "", "Requests that wait for the model to be loaded.", "Models"),
    _counter("model_loads", "", "Times that the model was loaded or woken.", "Models", "how"),
    _counter("model_evictions", "", "Times that the model was put to sleep or unloaded.", "Models", "how"),
    _gauge("requests_running_limit", "", "Most sequences that are computed at once.", "Queue"),
    _gauge("engine_resident_bytes", "", "Memory of the engine process.", "Device", "bytes"),
    _gauge("host_memory_available_bytes", "", "Memory of the machine that is left.", "Device", "bytes"),
    _gauge("host_memory_bytes", "", "Memory of the machine.", "Device", "bytes"),
    _gauge(
        "lora_requests",
        "lora_requests_info",
        "LoRA adapters of running and waiting requests; the value is the time.",
        "Adapters",
        "short",
        *("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
)
_ENGINE_FIELDS = tuple(metrics_of(EngineStats))
_TIER_FIELDS = tuple(metrics_of(TierStats))
_DEVICE_FIELDS = tuple(metrics_of(DeviceStats))
_DRAFTING_FIELDS = tuple(metrics_of(DraftingStats))
_COUNTED = (*_ENGINE_FIELDS, *_TIER_FIELDS, *_DRAFTING_FIELDS, *_DEVICE_FIELDS)
METRICS = (*(spec for _, spec in _COUNTED), *_SERVER_METRICS)


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
        self._last = EngineStats()
        self.max_loras = 0  # that lie on the device at a time
        self.on_step(self._last)

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

    def on_step(self, stats: EngineStats) -> None:
        """Update counters by what the engine counted since the last call, and gauges."""
        for name, spec in _ENGINE_FIELDS:
            self._take(spec, getattr(stats, name), getattr(self._last, name))
        before = {tier.name: tier for tier in self._last.tiers}
        for tier in stats.tiers:
            last = before.get(tier.name) or TierStats(tier.name)
            for name, spec in _TIER_FIELDS:
                value, before_it = getattr(tier, name), getattr(last, name)
                if isinstance(value, dict):  # by a second label
                    for label, count in value.items():
                        self._take(spec, count, before_it.get(label, 0), tier.name, label)
                else:
                    self._take(spec, value, before_it, tier.name)
        # One line with the names of this moment, as vLLM has it: gateways send requests where their adapter is.
        names = (",".join(stats.running_adapters), ",".join(stats.waiting_adapters))
        self._values["lora_requests"] = {(str(self.max_loras), *names): time.time() if self.max_loras else 0.0}
        for name, spec in _DRAFTING_FIELDS:  # a decision that changed is one series, not two
            self._values[spec.name] = shown = defaultdict(float)
            for each in stats.drafting:
                shown[each.drafter, each.sequences, each.reason] = getattr(each, name)
        self._last = stats

    def on_devices(self, devices: Sequence[DeviceStats]) -> None:
        """The GPUs of the engine as they are now; what nothing tells about them is not shown."""
        for name, spec in _DEVICE_FIELDS:
            values = self._values[spec.name]
            values.clear()
            values.update({(each.name,): value for each in devices if (value := getattr(each, name)) is not None})

    def _take(self, spec: MetricSpec, value: float, last: float, *labels: str) -> None:
        if spec.kind == "counter":
            self._values[spec.name][labels] += value - last
        else:
            self._values[spec.name][labels] = value

    def on_tokens(self, member: Member, num_tokens: int) -> None:
        if not num_tokens and not member.embedding:  # an encoder's vector comes without a token
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
            gap = now - member.last_token
            self.observe("itl_seconds", gap)
            member.longest_gap = max(gap, member.longest_gap)
        member.last_token = now

    def on_end(self, member: Member) -> None:
        if member.first_token is not None:
            self.observe("e2e_seconds", time.monotonic() - member.arrived)
            self.observe("request_generation_tokens", sum(len(each.token_ids) for each in member.output.outputs))
            self._on_stages(member, member.first_token)
        self._on_cache(member)
        for each in member.output.outputs:
            self.add("requests", 1.0, each.finish_reason or "abort")

    def _on_stages(self, member: Member, first_token: float) -> None:
        if member.timeline is not None and member.timeline.chunks:
            began = member.timeline.chunks[0].began
            self.observe("queue_seconds", max(0.0, began - member.arrived))
            self.observe("prefill_seconds", max(0.0, first_token - began))
        self.observe("decode_seconds", max(0.0, member.last_token - first_token))

    def _on_cache(self, member: Member) -> None:
        report, control = member.output.cache, member.request.params.cache
        if report is not None:
            self.add("prefix_cache_requests", 1.0, report.reason)
            if report.source:
                self.add("kv_source_requests", 1.0, report.source)
            if report.num_loaded_tokens:
                self.add("kv_loaded_tokens", report.num_loaded_tokens, report.tier)
        if control is not None and control.budget:
            dropped = sum(each.num_dropped_tokens for each in member.output.outputs)
            self.add("kv_dropped_tokens", dropped, control.policy)

    def on_restart(self, _reason: str) -> None:
        self._last = EngineStats()
        self.on_step(EngineStats())
        self.add("engine_restarts")

    def on_stopped(self) -> None:
        """The engine has ended as it was told to: the next one counts from zero."""
        self._last = EngineStats()
        self.on_step(EngineStats())

    # --- to Prometheus ---

    def render(self) -> bytes:
        return render([self])

    def add_to(self, family: Metric, spec: MetricSpec) -> None:
        """The values of a metric, to a family that holds those of other models too."""
        if isinstance(family, HistogramMetricFamily):
            histogram = self._histograms[spec.name]
            family.add_metric([self._model_name], histogram.buckets(), histogram.total)
            return
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
        for each, value in self._values[spec.name].items():
            family.add_metric([self._model_name, *each], value)


_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


class _Models:
    """The numbers of several models as one collector: Prometheus wants each metric once."""

    def __init__(self, models: Sequence[Metrics]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        for spec in METRICS:
            yield self._family(PREFIX + spec.name, spec)
            if spec.vllm:
                yield self._family(VLLM_PREFIX + spec.vllm, spec)

    def _family(self, name: str, spec: MetricSpec) -> Metric:
        family: Metric = _FAMILIES[spec.kind](name, spec.help, labels=["model_name", *spec.labels])
        for metrics in self._models:
            metrics.add_to(family, spec)
        return family


def render(models: Sequence[Metrics]) -> bytes:
    """The text that Prometheus reads, of all models."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Models(models))
    return generate_latest(registry)
