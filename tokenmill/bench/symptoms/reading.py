"""One record of a server's state, whatever the server calls its metrics: the difference of two scrapes where something
happened between them, else all since its start.

A new server is one more `Names`. None means that the server does not tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.bench.symptoms.scrape import Scrape, quantile
from tokenmill.errors import UserError


@dataclass(frozen=True, slots=True)
class Names:
    """What a server calls what is asked of it; empty: it has no such metric. Counters come with their suffix."""

    server: str
    running: str
    waiting: str
    kv_usage: tuple[str, ...] = ()  # newer versions first
    prefix_queries: tuple[str, ...] = ()
    prefix_hits: tuple[str, ...] = ()
    preemptions: str = ""
    prompt_tokens: str = ""
    output_tokens: str = ""
    ttft: str = ""
    itl: tuple[str, ...] = ()
    queue: str = ""
    prefill: str = ""
    decode: str = ""
    ended: str = ""  # by the label finished_reason


TOKENMILL = Names(
    "tokenmill",
    "tokenmill_requests_running",
    "tokenmill_requests_waiting",
    ("tokenmill_kv_cache_usage_ratio",),
    ("tokenmill_prefix_cache_queries_total",),
    ("tokenmill_prefix_cache_hits_total",),
    "tokenmill_preemptions_total",
    "tokenmill_prompt_tokens_total",
    "tokenmill_generation_tokens_total",
    "tokenmill_ttft_seconds",
    ("tokenmill_itl_seconds",),
    "tokenmill_queue_seconds",
    "tokenmill_prefill_seconds",
    "tokenmill_decode_seconds",
    "tokenmill_requests_total",
)
VLLM = Names(
    "vLLM",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds",
    ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_success_total",
)
LLAMACPP = Names(
    "llama.cpp",
    "llamacpp:requests_processing",
    "llamacpp:requests_deferred",
    ("llamacpp:kv_cache_usage_ratio",),
    prompt_tokens="llamacpp:prompt_tokens_total",
    output_tokens="llamacpp:tokens_predicted_total",
)
SERVERS = (TOKENMILL, VLLM, LLAMACPP)  # in the order in which they are looked for: we show vLLM's names too


@dataclass(frozen=True, slots=True)
class Drafting:
    """What a server has decided about drafts in steps of so many sequences."""

    model: str
    drafter: str
    sequences: str
    on: bool
    gain: float  # of the time, when it was last measured
    reason: str


@dataclass(frozen=True, slots=True)
class Reading:
    server: str
    seconds: float  # that the differences are of; 0: all is since the start of the server
    running: float
    waiting: float
    waiting_before: float
    running_limit: float | None = None
    kv_usage: float | None = None
    hit_rate: float | None = None  # of prompt tokens
    query_tokens: float = 0.0
    cache_outcomes: dict[str, float] = field(default_factory=dict)
    evictions: float | None = None
    preemptions: float | None = None
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    itl_p50: float | None = None
    itl_p99: float | None = None
    queue_seconds: float | None = None  # summed over requests, as the next two
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    ended: dict[str, float] = field(default_factory=dict)
    statuses: dict[str, float] = field(default_factory=dict)
    rejections: dict[str, float] = field(default_factory=dict)
    expired: float | None = None
    engine_up: float | None = None
    restarts: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    drafting_saved: float | None = None
    drafting: list[Drafting] = field(default_factory=list)
    gpu_utilization: float | None = None
    gpu_memory_share: float | None = None
    host_memory_share: float | None = None  # that is left


def names_of(scraped: Scrape) -> Names:
    for names in SERVERS:
        if scraped.has(names.running):
            return names
    known = ", ".join(names.server for names in SERVERS)
    raise UserError("the metrics are of a server that is not known here", f"give the address of one of {known}")


def read(first: Scrape, last: Scrape) -> Reading:
    """The state at `last`, and what happened since `first`, or since the start if nothing did in between."""
    names = names_of(last)
    earlier = first if _busy(names, first, last) else None
    delta = _Delta(earlier, last)
    hits, queries = (delta.any(each) for each in (names.prefix_hits, names.prefix_queries))
    itl = next((name for name in names.itl if last.has(f"{name}_bucket")), "")
    return Reading(
        server=names.server,
        seconds=last.moment - first.moment if earlier is not None else 0.0,
        running=last.total(names.running) or 0.0,
        waiting=last.total(names.waiting) or 0.0,
        waiting_before=first.total(names.waiting) or 0.0,
        running_limit=last.total("tokenmill_requests_running_limit"),
        kv_usage=next((value for name in names.kv_usage if (value := last.highest(name)) is not None), None),
        hit_rate=hits / queries if hits is not None and queries else None,
        query_tokens=queries or 0.0,
        cache_outcomes=delta.by("tokenmill_prefix_cache_requests_total", "outcome"),
        evictions=delta.of("tokenmill_evictions_total"),
        preemptions=delta.of(names.preemptions),
        prompt_tokens=delta.of(names.prompt_tokens),
        output_tokens=delta.of(names.output_tokens),
        ttft_p50=quantile(earlier, last, names.ttft, 0.5),
        ttft_p99=quantile(earlier, last, names.ttft, 0.99),
        itl_p50=quantile(earlier, last, itl, 0.5),
        itl_p99=quantile(earlier, last, itl, 0.99),
        queue_seconds=delta.of(f"{names.queue}_sum"),
        prefill_seconds=delta.of(f"{names.prefill}_sum"),
        decode_seconds=delta.of(f"{names.decode}_sum"),
        ended=delta.by(names.ended, "finished_reason"),
        statuses=delta.by("tokenmill_http_responses_total", "status"),
        rejections=delta.by("tokenmill_admission_rejections_total", "reason"),
        expired=delta.of("tokenmill_requests_expired_total"),
        engine_up=last.total("tokenmill_engine_up"),
        restarts=last.total("tokenmill_engine_restarts_total"),
        drafted=delta.any(("tokenmill_drafted_tokens_total", "vllm:spec_decode_num_draft_tokens_total")),
        accepted=delta.any(("tokenmill_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")),
        drafting_saved=last.total("tokenmill_drafting_saved_seconds"),
        drafting=_drafting(last),
        gpu_utilization=last.highest("tokenmill_gpu_utilization_ratio"),
        gpu_memory_share=_share(last, "tokenmill_gpu_memory_used_bytes", "tokenmill_gpu_memory_total_bytes"),
        host_memory_share=_share(last, "tokenmill_host_memory_available_bytes", "tokenmill_host_memory_bytes"),
    )


def _drafting(scraped: Scrape) -> list[Drafting]:
    """Ordered by model, drafter and number of sequences."""
    found = []
    for each in scraped.samples.get("tokenmill_drafting_on", ()):
        gain = scraped.total("tokenmill_drafting_gain", **each.labels) or 0.0
        model, drafter, sequences, reason = (
            each.labels.get(label, "") for label in ("model_name", "drafter", "sequences", "reason")
        )
        found.append(Drafting(model, drafter, sequences, each.value > 0, gain, reason))
    return sorted(found, key=lambda each: (each.model, each.drafter, _first_number(each.sequences)))


def _first_number(text: str) -> int:
    digits = text.partition("-")[0]
    return int(digits) if digits.isdecimal() else 0


def _busy(names: Names, first: Scrape, last: Scrape) -> bool:
    """Whether tokens were made between the two, by one and the same process: counters of a new one begin at zero."""
    before, after = first.total(names.output_tokens) or 0.0, last.total(names.output_tokens) or 0.0
    return last.moment > first.moment and after > before


def _share(scraped: Scrape, part: str, whole: str) -> float | None:
    some, all_of_it = scraped.total(part), scraped.total(whole)
    return some / all_of_it if some is not None and all_of_it else None


class _Delta:
    """Counters since an earlier scrape, or since the start."""

    def __init__(self, earlier: Scrape | None, last: Scrape) -> None:
        self._earlier, self._last = earlier, last

    def of(self, name: str) -> float | None:
        now = self._last.total(name)
        if now is None:
            return None
        return max(0.0, now - ((self._earlier.total(name) or 0.0) if self._earlier is not None else 0.0))

    def any(self, names: tuple[str, ...]) -> float | None:
        return next((value for name in names if (value := self.of(name)) is not None), None)

    def by(self, name: str, label: str) -> dict[str, float]:
        before = self._earlier.by(name, label) if self._earlier is not None else {}
        grown = {key: value - before.get(key, 0.0) for key, value in self._last.by(name, label).items()}
        return {key: value for key, value in grown.items() if value > 0}
