"""The statistics record of an engine: every counter and gauge is declared here, once.

One instance is made together with the KV manager. Each component that counts something (page pool, KV manager,
scheduler, core) writes the field itself; the record then travels whole to the server, which derives its metric table
and its dashboard from the declarations below. Knows nothing of Prometheus or of processes; imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from tokenmill.types import StepPlan, TokenEvent

_METRIC = "metric"
PROMPT_STEP_TOKENS = 32  # from which a step is taken to be mostly prompts: the server learns its pace from these


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric as the server shows it; `labels` and `buckets` only where it has any."""

    name: str
    vllm: str  # vLLM's name, empty if it has none
    kind: str  # "gauge", "counter", "histogram"
    help: str
    panel: str  # group on the dashboard
    unit: str = "short"  # as Grafana names units
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(name: str, help: str, panel: str, vllm: str = "", labels: tuple[str, ...] = ()) -> Any:
    """Only ever grows; starts at zero with each engine."""
    return field(default=0, metadata={_METRIC: MetricSpec(name, vllm, "counter", help, panel, labels=labels)})


def _gauge(
    name: str, help: str, panel: str, vllm: str = "", unit: str = "short", labels: tuple[str, ...] = (), first: Any = 0
) -> Any:
    return field(default=first, metadata={_METRIC: MetricSpec(name, vllm, "gauge", help, panel, unit, labels)})


def _tier_counter(name: str, help: str) -> Any:
    return _counter(f"kv_tier_{name}", help, "KV tiers", labels=("tier",))


def _tier_gauge(name: str, help: str, unit: str = "short") -> Any:
    return _gauge(f"kv_tier_{name}", help, "KV tiers", unit=unit, labels=("tier",))


@dataclass(slots=True)
class TierStats:
    """One KV tier. The tier itself counts; entries and bytes are what it holds now."""

    name: str
    entries: int = _tier_gauge("entries", "Pages in a tier.")
    bytes: int = _tier_gauge("bytes", "Size of a tier.", "bytes")
    read_bandwidth: float = _tier_gauge("read_bandwidth", "Measured speed of reading pages.", "Bps")  # 0: not measured
    hits: int = _tier_counter("hits", "Pages that came back.")
    misses: int = _tier_counter("misses", "Pages that were expected and did not come.")
    read_bytes: int = _tier_counter("read_bytes", "Bytes read from a tier.")
    written_bytes: int = _tier_counter("written_bytes", "Bytes written to a tier.")
    rejected: dict[str, int] = field(
        default_factory=dict,
        metadata={
            _METRIC: MetricSpec(
                "kv_tier_rejected",
                "",
                "counter",
                "Entries that failed verification, by what was wrong; never used.",
                "KV tiers",
                labels=("tier", "reason"),
            )
        },
    )
    failures: int = _tier_counter("failures", "Calls that a tier refused or did not answer in time.")
    up: int = _tier_gauge("up", "1 while a tier takes and gives pages, 0 while its breaker leaves it alone.")

    def reject(self, reason: str) -> None:
        self.rejected[reason] = self.rejected.get(reason, 0) + 1


def _device_gauge(name: str, help: str, unit: str) -> Any:
    return _gauge(f"gpu_{name}", help, "Device", unit=unit, labels=("device",), first=None)


@dataclass(slots=True)
class DeviceStats:
    """One GPU of an engine; None where nothing tells. Sent with heartbeats, not with steps."""

    name: str  # its number among those the process sees
    utilization: float | None = _device_gauge(
        "utilization_ratio", "Share of time in which the GPU computed; needs nvidia-ml-py.", "percentunit"
    )
    memory_used: int | None = _device_gauge("memory_used_bytes", "Memory of the GPU in use, by any process.", "bytes")
    memory_total: int | None = _device_gauge("memory_total_bytes", "Memory of the GPU.", "bytes")
    memory_reserved: int | None = _device_gauge(
        "memory_reserved_bytes", "Memory of the GPU that the engine's tensors have taken.", "bytes"
    )
    power: float | None = _device_gauge("power_watts", "Power that the GPU draws; needs nvidia-ml-py.", "watt")
    temperature: float | None = _device_gauge(
        "temperature_celsius", "Temperature of the GPU; needs nvidia-ml-py.", "celsius"
    )


def _drafting_gauge(name: str, help: str, unit: str = "short") -> Any:
    return _gauge(name, help, "Throughput", unit=unit, labels=("drafter", "sequences", "reason"))


@dataclass(slots=True)
class DraftingStats:
    """Whether a drafter is used in steps of so many sequences, and why. Written by `EngineStats.take_decisions`."""

    drafter: str
    sequences: str
    reason: str
    on: int = _drafting_gauge("drafting_on", "1 while drafts are used in steps of so many sequences.")
    gain: float = _drafting_gauge("drafting_gain", "Time that drafts won when last measured.", "percentunit")


@dataclass(slots=True)
class EngineStats:
    """Fields without a metric are for reports and benchmarks. Page gauges are as of the last `KVManager.measure`."""

    num_running: int = _gauge("requests_running", "Sequences being computed.", "Queue", "num_requests_running")
    num_waiting: int = _gauge("requests_waiting", "Sequences waiting in the engine.", "Queue", "num_requests_waiting")
    kv_usage: float = _gauge(
        "kv_cache_usage_ratio", "KV pages held; 1 is all.", "KV cache", "kv_cache_usage_perc", "percentunit"
    )
    num_pages: int = 1
    num_pages_free: int = 0
    num_pages_held: int = 0
    num_pages_cached: int = _gauge("kv_pages_cached", "KV pages kept for reuse only.", "KV cache")
    pages_consistent: bool = _gauge(
        "kv_pages_consistent", "1 if the page invariant held when it was last checked.", "KV cache", first=True
    )
    pages_checked: bool = True  # since pages last moved
    num_expired: int = _counter("requests_expired", "Requests whose deadline passed before the first token.", "Queue")
    num_prefix_query_tokens: int = _counter(
        "prefix_cache_queries", "Prompt tokens looked up.", "KV cache", "prefix_cache_queries"
    )
    num_prefix_hit_tokens: int = _counter(
        "prefix_cache_hits", "Prompt tokens found in the prefix cache.", "KV cache", "prefix_cache_hits"
    )
    num_preemptions: int = _counter("preemptions", "Sequences that gave up their pages.", "KV cache", "num_preemptions")
    num_evictions: int = _counter("evictions", "Cached pages that made room.", "KV cache")
    num_pages_retained: int = _gauge(
        "kv_pages_kept", "Cached KV pages promised to a request by cache_control.", "KV cache"
    )
    num_promises_broken: int = _counter("kv_promises_broken", "Promised pages that had to make room.", "KV cache")
    num_pages_unwritten: int = _counter(
        "kv_pages_unwritten", "Pages evicted faster than the tiers could take them.", "KV tiers"
    )
    num_staged: int = _gauge("kv_pages_staged", "KV pages kept for other engines to fetch.", "KV tiers")
    num_leases: int = _gauge("kv_leases", "Prompts whose KV pages other engines may fetch.", "KV tiers")
    num_published: int = _counter("kv_pages_published", "KV pages staged for other engines.", "KV tiers")
    num_unpublished: int = _counter("kv_pages_unpublished", "KV pages that --kv-staging had no room for.", "KV tiers")
    num_leases_expired: int = _counter("kv_leases_expired", "Leases that no engine ended.", "KV tiers")
    tiers: list[TierStats] = field(default_factory=list)  # nearest first
    num_steps: int = _counter("engine_steps", "Steps of the engine.", "Throughput")
    total_seconds: float = _counter("engine_busy_seconds", "Time in steps of the engine.", "Throughput")
    num_drafts: int = _counter(
        "drafts", "Steps of a sequence with drafted tokens.", "Throughput", "spec_decode_num_drafts"
    )
    num_drafted: int = _counter("drafted_tokens", "Tokens drafted.", "Throughput", "spec_decode_num_draft_tokens")
    num_accepted: int = _counter(
        "accepted_tokens", "Drafted tokens that held.", "Throughput", "spec_decode_num_accepted_tokens"
    )
    saved_seconds: float = _gauge(
        "drafting_saved_seconds", "Time that drafting has won, net, by the engine's clock.", "Throughput", unit="s"
    )
    num_adapters: int = _gauge("adapters", "Adapters that requests can name.", "Adapters")
    num_adapters_on_device: int = _gauge("adapters_on_device", "Adapters in slots of the device.", "Adapters")
    num_adapters_in_host: int = _gauge("adapters_in_host", "Adapters in host memory.", "Adapters")
    adapter_host_bytes: int = _gauge("adapter_host_bytes", "Host memory of adapters.", "Adapters", unit="bytes")
    num_adapter_loads: int = _counter("adapter_loads", "Adapters brought to the device.", "Adapters")
    num_adapter_evictions: int = _counter("adapter_evictions", "Adapters that made room on the device.", "Adapters")
    num_adapter_reads: int = _counter("adapter_reads", "Adapters read from disk again.", "Adapters")
    running_adapters: list[str] = field(default_factory=list)  # names, as many as fit a label
    waiting_adapters: list[str] = field(default_factory=list)
    drafting: list[DraftingStats] = field(default_factory=list)
    num_late_steps: int = _counter(
        "steps_over_itl", "Steps with running sequences that took longer than --itl.", "Throughput"
    )
    step_prompt_tokens: int = _gauge(
        "step_prompt_tokens", "Prompt tokens that the last step took beside running sequences, under --itl.", "Queue"
    )
    num_tokens_computed: int = 0
    num_tokens_sampled: int = 0
    num_finished: int = 0  # sequences; siblings count one each
    step_tokens: int = 0  # of the last step
    step_seconds: float = 0.0
    num_context_tokens: int = 0  # in the contexts of all requests; one that several share counts for each
    kv_waste: float = 0.0  # of the token slots in held pages, the fraction that holds no token
    kv_padding: float = 0.0  # of the layer slots in held pages, the fraction that belongs to no layer
    peak_running: int = 0  # sequences, between two steps
    peak_tokens: int = 0  # of num_context_tokens
    total_kv_usage: float = 0.0  # sums over steps of the fractions above
    total_kv_waste: float = 0.0
    total_kv_padding: float = 0.0

    def count_drafts(self, num_drafted: int, num_accepted: int) -> None:
        """Of one sequence in one step."""
        if num_drafted:
            self.num_drafts += 1
            self.num_drafted += num_drafted
            self.num_accepted += num_accepted

    def record_step(self, plan: StepPlan, events: list[TokenEvent], seconds: float) -> None:
        """After a step, with the gauges of that moment."""
        computed = plan.num_tokens
        for event in events:
            self.num_tokens_sampled += len(event.token_ids)
            computed += max(0, len(event.token_ids) - 1)  # all but the last were computed in the same step
            self.num_finished += event.finish_reason is not None
        self.num_steps += 1
        self.num_tokens_computed += computed
        self.step_tokens = computed
        self.step_seconds = seconds
        self.total_seconds += seconds
        self.peak_running = max(self.peak_running, self.num_running)
        self.peak_tokens = max(self.peak_tokens, self.num_context_tokens)
        self.total_kv_usage += self.kv_usage
        self.total_kv_waste += self.kv_waste
        self.total_kv_padding += self.kv_padding

    def take_decisions(self, decisions: Iterable[Any]) -> None:
        """What the runtime measured drafts to be worth (runtime/speculation/gate.py: Decision)."""
        self.drafting = [
            DraftingStats(each.drafter, each.sequences, each.reason, int(each.is_open), each.gain) for each in decisions
        ]

    def reset(self) -> None:
        """Count from zero again, for a measurement. What tiers count is theirs."""
        for each in fields(self):
            if each.default is not MISSING:
                setattr(self, each.name, each.default)

    @property
    def mean_kv_usage(self) -> float:
        """Held pages as a fraction of all, mean over steps."""
        return self.total_kv_usage / max(1, self.num_steps)

    @property
    def mean_kv_waste(self) -> float:
        return self.total_kv_waste / max(1, self.num_steps)

    @property
    def mean_kv_padding(self) -> float:
        return self.total_kv_padding / max(1, self.num_steps)

    @property
    def prefix_hit_rate(self) -> float:
        """Of the tokens of admitted requests, the fraction that was found in the prefix cache."""
        return self.num_prefix_hit_tokens / max(1, self.num_prefix_query_tokens)


def metrics_of(
    record: type[EngineStats] | type[TierStats] | type[DeviceStats] | type[DraftingStats],
) -> Iterator[tuple[str, MetricSpec]]:
    """(field, metric) of every field that is a metric, in order."""
    for each in fields(record):
        if _METRIC in each.metadata:
            yield each.name, each.metadata[_METRIC]
