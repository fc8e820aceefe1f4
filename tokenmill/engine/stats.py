"""Counters of an engine: what it did, and how full and how well used its KV memory was, averaged over steps.

Owns no behaviour; EngineCore records one line per step, whoever reports (bench, metrics, simulator) reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.engine.scheduler import Scheduler
from tokenmill.types import StepPlan, TokenEvent


@dataclass(slots=True)
class EngineStats:
    num_steps: int = 0
    num_tokens_computed: int = 0
    num_tokens_sampled: int = 0
    num_finished: int = 0  # sequences; siblings count one each
    num_preemptions: int = 0
    num_evictions: int = 0  # cached pages that made room
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_drafts: int = 0  # steps of a sequence in which tokens were drafted
    num_drafted: int = 0  # tokens
    num_accepted: int = 0  # of these
    saved_seconds: float = 0.0  # that drafting won, by the engine's own measurements
    num_running: int = 0
    num_waiting: int = 0
    peak_running: int = 0  # sequences, between two steps
    peak_tokens: int = 0  # in the contexts of all of them
    total_kv_use: float = 0.0  # sums over steps of fractions
    total_kv_waste: float = 0.0
    total_kv_padding: float = 0.0

    def record(self, scheduler: Scheduler, plan: StepPlan, events: list[TokenEvent]) -> None:
        kv = scheduler.kv
        usage = kv.usage()
        self.num_steps += 1
        self.num_tokens_computed += plan.num_tokens
        for event in events:
            self.num_tokens_sampled += len(event.token_ids)
            self.num_tokens_computed += max(0, len(event.token_ids) - 1)  # all but the last went on in the same step
            self.num_finished += event.finish_reason is not None
        self.num_preemptions = scheduler.num_preemptions
        self.num_evictions = kv.pool.num_evictions
        self.num_prefix_query_tokens = kv.num_query_tokens
        self.num_prefix_hit_tokens = kv.num_hit_tokens
        self.num_drafts = scheduler.num_drafts
        self.num_drafted = scheduler.num_drafted
        self.num_accepted = scheduler.num_accepted
        self.saved_seconds = scheduler.saved_seconds
        self.num_running = scheduler.num_running
        self.num_waiting = scheduler.num_waiting
        self.peak_running = max(self.peak_running, self.num_running)
        self.peak_tokens = max(self.peak_tokens, usage.num_tokens)
        self.total_kv_use += usage.num_held / kv.num_pages
        self.total_kv_waste += usage.waste
        self.total_kv_padding += usage.padding

    @property
    def mean_kv_use(self) -> float:
        """Held pages as a fraction of all, mean over steps."""
        return self.total_kv_use / max(1, self.num_steps)

    @property
    def mean_kv_waste(self) -> float:
        """Token slots in held pages that hold no token, as a fraction, mean over steps."""
        return self.total_kv_waste / max(1, self.num_steps)

    @property
    def mean_kv_padding(self) -> float:
        """Layer slots in held pages that belong to no layer, as a fraction, mean over steps."""
        return self.total_kv_padding / max(1, self.num_steps)

    @property
    def prefix_hit_rate(self) -> float:
        """Of the tokens of admitted requests, the fraction that was found in the prefix cache."""
        return self.num_prefix_hit_tokens / max(1, self.num_prefix_query_tokens)
