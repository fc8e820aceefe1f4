"""What the router counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tokenmill.route.replica import Replica

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class RouterMetrics:
    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"tokenmill_router_{name}", help, labels, registry=registry)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(f"tokenmill_router_{name}", help, ("replica",), registry=registry)

        self.requests = counter("requests", "Requests sent to a replica, resumed ones again.", "replica")
        self.outcomes = counter("responses", "Answers to callers, by HTTP status.", "status")
        self.retries = counter("retries", "Requests sent elsewhere before their first token, by reason.", "reason")
        self.resumed = counter("resumed", "Streams that went on elsewhere after their first token.")
        self.broken = counter("broken", "Streams that no replica could go on with.")
        self.overflowed = counter("overflowed", "Requests that the upstream took.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts whose tokens are known.")
        self.matched_tokens = counter("matched_tokens", "Of these, tokens that the chosen replica was to have cached.")
        self.unread = counter("unread_prompts", "Prompts that were routed by load only: no tokenizer, or no text.")
        self.choosing = Histogram(
            "tokenmill_router_choosing_seconds",
            "Time to tokenize a prompt, name its pages and choose.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._gauges = {
            "up": gauge("replica_up", "1 while a replica takes requests."),
            "outstanding": gauge("replica_outstanding", "Requests of this router that a replica has."),
            "waiting_tokens": gauge("replica_waiting_tokens", "Prompt tokens that it has to compute for them."),
            "pages": gauge("replica_pages", "Cached pages that the router knows of."),
            "kv_usage": gauge("replica_kv_usage_ratio", "KV pages that a replica holds; 1 is all."),
            "wait": gauge("replica_wait_seconds", "Expected time to the first token of a short prompt."),
            "gaps": gauge("replica_event_gaps", "Times that events were missed and all names were read again."),
        }

    def render(self, replicas: Iterable[Replica]) -> bytes:
        for each in replicas:
            values = {
                "up": float(each.usable),
                "outstanding": each.outstanding,
                "waiting_tokens": each.waiting_tokens,
                "pages": len(each.pages.stored),
                "kv_usage": each.report.kv_usage,
                "wait": each.wait_seconds(1),
                "gaps": each.num_gaps,
            }
            for name, value in values.items():
                self._gauges[name].labels(each.url).set(value)
        return generate_latest(self._registry)
