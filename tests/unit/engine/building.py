"""Small engines for the tests of this folder: a layout, a KV manager, requests, a scheduler, a runner that counts."""

from __future__ import annotations

from typing import Any

from tokenmill.engine.kv.manager import KVManager
from tokenmill.engine.kv.policy.lru import LeastRecentlyUsed
from tokenmill.engine.order import DISCIPLINES
from tokenmill.engine.scheduler import Scheduler
from tokenmill.hardware.kv_layout import KVLayout, LayerKV, build_layout
from tokenmill.types import Request, SamplingParams, StepPlan, StepResult, TokenEvent

FULL = [LayerKV("full", 1, 8)]
SLIDING = [LayerKV("sliding", 1, 8, 6)]
MIXED = [LayerKV("full", 1, 8), LayerKV("sliding", 1, 8, 6)]


def make_kv(
    layers: list[LayerKV] = FULL, num_pages: int = 32, page_size: int = 4, prefix_caching: bool = True
) -> KVManager:
    layout: KVLayout = build_layout(layers, page_size)
    return KVManager(layout, num_pages, prefix_caching, LeastRecentlyUsed())


def make_request(prompt: list[int] | int, name: str = "r", **fields: Any) -> Request:
    """A prompt by its ids, or by its length (then the ids are 0, 1, 2 ...). SamplingParams fields go there."""
    names = set(SamplingParams.__dataclass_fields__) - {"seed"}
    params = {key: fields.pop(key) for key in list(fields) if key in names}
    ids = list(range(prompt)) if isinstance(prompt, int) else prompt
    return Request(name, ids, SamplingParams(**params), **fields)


def tables_of(kv: KVManager, request: Request) -> tuple[list[int], ...]:
    """The block tables of a request, by group."""
    return kv._holdings[request].tables


def compute(kv: KVManager, request: Request, count: int | None = None) -> None:
    """What the scheduler does for a request that runs alone: admit or continue, compute `count` tokens, commit."""
    match = kv.match(request)
    if request.num_computed == 0:
        start = match.num_tokens
        assert kv.reserve(request, count or request.num_tokens - start, match)
    else:
        start = request.num_computed
        assert kv.reserve(request, count or request.num_tokens - start)
    request.num_computed = start + (count or request.num_tokens - start)
    kv.commit(request)
    kv.check()


def make_scheduler(
    kv: KVManager | None = None,
    discipline: str = "fcfs",
    max_batch_tokens: int = 64,
    max_running: int = 8,
    context_length: int = 64,
) -> Scheduler:
    return Scheduler(kv or make_kv(), DISCIPLINES.get(discipline)(), max_batch_tokens, max_running, context_length)


class CountingRunner:
    """Samples 100, 101, 102 ... in the order of rows; remembers its plans."""

    def __init__(self) -> None:
        self.next_token = 100
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        tokens: list[int | None] = []
        for row in plan.scheduled:
            tokens.append(self.next_token if row.samples else None)
            self.next_token += row.samples
        return StepResult(tokens, [None] * len(tokens), [None] * len(tokens))


def answer(plan: StepPlan, token: int = 100) -> StepResult:
    """A result that samples `token` in every sampling row."""
    size = len(plan.scheduled)
    return StepResult([token if row.samples else None for row in plan.scheduled], [None] * size, [None] * size)


def step(scheduler: Scheduler, token: int = 100) -> tuple[dict[str, int], list[TokenEvent]]:
    """One step: what was scheduled (tokens by request id, siblings as id#index) and its events."""
    plan = scheduler.schedule()
    scheduler.kv.check()
    events = scheduler.update(plan, answer(plan, token))
    scheduler.kv.check()
    return rows_of(plan), events


def rows_of(plan: StepPlan) -> dict[str, int]:
    return {
        row.request.request_id + (f"#{row.request.index}" if row.request.index else ""): row.count
        for row in plan.scheduled
    }
