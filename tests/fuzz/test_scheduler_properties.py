"""Random traffic through the real scheduler and KV manager: pages add up after every step, every row sees exactly its
own prefix, and each output equals that of the request run alone. More than 10,000 steps over all cases."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from tests.fuzz.shadow_runner import VOCABULARY, ShadowRunner, expected_output
from tokenmill.engine.kv.manager import KVManager
from tokenmill.engine.kv.policy import POLICIES
from tokenmill.engine.kv.policy.base import EvictionPolicy
from tokenmill.engine.kv.prefix_tree import UNBOUNDED
from tokenmill.engine.order import DISCIPLINES
from tokenmill.engine.scheduler import Scheduler
from tokenmill.hardware.kv_layout import KVLayout, LayerKV, build_layout
from tokenmill.types import Request, SamplingParams, StepPlan, TokenEvent

LAYERS = {
    "full": [LayerKV("full", 1, 8)],
    "gemma": [
        LayerKV("full" if number % 6 == 5 else "sliding", 1, 8, 0 if number % 6 == 5 else 9) for number in range(6)
    ],
    "all-sliding": [LayerKV("sliding", 1, 8, 7)],
    "two shapes": [LayerKV("full", 4, 8)] * 2 + [LayerKV("sliding", 1, 8, 9)] * 4,
    "latent": [LayerKV("latent", 1, 24, value_dim=0)] * 2 + [LayerKV("none", source=1)],
    "hybrid": [LayerKV("recurrent", states=((16,),)), LayerKV("full", 1, 8)],
    "hybrid windows": [LayerKV("sliding", 1, 8, 9, states=((16,),)), LayerKV("full", 1, 8)],
    "recurrent": [LayerKV("recurrent", states=((16,),))] * 3,
    "two windows": [LayerKV("sliding", 1, 8, 3), LayerKV("sliding", 1, 8, 20), LayerKV("full", 1, 8)],
}


@dataclass(frozen=True)
class Case:
    layers: str
    page_size: int
    extra_pages: int  # beyond what a lone request of the full context needs
    discipline: str = "fcfs"
    prefix_caching: bool = True
    max_batch_tokens: int = 24
    max_running: int = 6
    context_length: int = 56
    num_steps: int = 700
    policy: str = "lru"
    snapshots: int = 8  # slots for snapshots of recurrent states


CASES = [
    Case("full", 1, 10),
    Case("full", 4, 3, "priority"),
    Case("full", 4, 0, max_batch_tokens=9),
    Case("full", 16, 5, context_length=90),
    Case("full", 4, 400, max_running=12),
    Case("full", 4, 6, prefix_caching=False),
    Case("full", 4, 20, policy="lfu"),
    Case("gemma", 4, 40, policy="lfu"),
    Case("gemma", 1, 40, "priority"),
    Case("gemma", 4, 0),
    Case("gemma", 4, 12),
    Case("gemma", 4, 80, "priority"),
    Case("gemma", 16, 8, context_length=90),
    Case("gemma", 4, 0, prefix_caching=False, discipline="priority"),
    Case("all-sliding", 1, 9),
    Case("all-sliding", 4, 2, "priority"),
    Case("all-sliding", 4, 40),
    Case("all-sliding", 16, 1, context_length=90),
    Case("two shapes", 4, 12),
    Case("two shapes", 4, 60, "priority"),
    Case("latent", 4, 10),
    Case("hybrid", 4, 8),
    Case("hybrid", 4, 8, snapshots=0),
    Case("hybrid", 4, 40, snapshots=40, policy="lfu"),
    Case("hybrid", 1, 20, "priority", snapshots=3),
    Case("hybrid", 4, 6, prefix_caching=False),
    Case("hybrid", 4, 12, "fair", snapshots=2),
    Case("hybrid windows", 4, 14, snapshots=12),
    Case("hybrid windows", 4, 60, "priority", snapshots=20),
    Case("recurrent", 4, 8),
    Case("recurrent", 4, 8, "priority", snapshots=1),
    Case("recurrent", 16, 4, snapshots=30, context_length=90),
    Case("two windows", 4, 7, "priority", max_running=3),
    Case("two windows", 4, 60, max_running=3, max_batch_tokens=64),
    Case("full", 4, 7, "fair"),
    Case("full", 4, 1, "fair", max_batch_tokens=9),
    Case("gemma", 4, 30, "fair"),
    Case("two windows", 4, 8, "fair", max_running=3),
]


class Traffic:
    """Random arrivals, cancels and steps, with everything that must hold checked on the way."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self.random = random.Random(seed)
        layout = build_layout(LAYERS[case.layers], case.page_size)
        num_pages = layout.peak_pages(case.context_length) + case.extra_pages
        self.policy: EvictionPolicy = POLICIES.get(case.policy)()
        self.kv = self.make_kv(layout, num_pages)
        self.scheduler = Scheduler(
            self.kv, DISCIPLINES.get(case.discipline)(), case.max_batch_tokens, case.max_running, case.context_length
        )
        self.runner = self.make_runner()
        self.stems = [self.tokens(case.context_length) for _ in range(4)]
        self.requests: dict[str, Request] = {}  # alive
        self.unfinished: dict[str, set[int]] = {}  # indices of the siblings
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.num_arrived = 0
        self.num_finished = 0

    def make_kv(self, layout: KVLayout, num_pages: int) -> KVManager:
        slots = self.case.max_running + self.case.snapshots
        return KVManager(layout, num_pages, self.case.prefix_caching, self.policy, num_state_slots=slots)

    def make_runner(self) -> ShadowRunner:
        return ShadowRunner(self.kv)

    def make_params(self) -> SamplingParams:
        draw = self.random
        return SamplingParams(n=draw.choice([1, 1, 1, 2, 4]), max_tokens=draw.choice([1, 3, 12, 60]))

    def expected(self, request: Request, index: int) -> list[int]:
        return expected_output(request, request.seed + index, self.case.context_length)

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(count)]

    def arrive(self) -> None:
        draw = self.random
        length = draw.randint(1, self.case.context_length - 2)
        stem = draw.choice(self.stems)[: draw.randint(0, length)]
        prompt = (stem + self.tokens(draw.randint(1, 8)))[: self.case.context_length - 1]
        request = Request(
            request_id=f"r{self.num_arrived}",
            prompt_ids=prompt,
            params=self.make_params(),
            stop_ids=frozenset(draw.sample(range(VOCABULARY), draw.choice([0, 0, 1]))),
            seed=draw.randrange(1000),
            priority=draw.randrange(3),
            arrival=self.num_arrived,
        )
        if self.case.discipline == "fair":
            request.tenant = draw.choice("aaab")
            request.weight = {"a": 1.0, "b": 2.5}[request.tenant]
            request.cache_salt = draw.choice([b"", request.tenant.encode() * 16])
        self.num_arrived += 1
        self.requests[request.request_id] = request
        self.unfinished[request.request_id] = set(range(request.params.n))
        self.scheduler.add(request)

    def maybe_cancel(self, probability: float) -> None:
        if self.requests and self.random.random() < probability:
            request_id = self.random.choice(list(self.requests))
            siblings = self.scheduler._siblings[request_id]
            if len(siblings) > 1 and self.random.random() < 0.5:  # one of several, running, waiting or preempted
                index = self.random.choice(siblings).index
                assert self.scheduler.cancel(request_id, index)
                assert not self.scheduler.cancel(request_id, index)
                self.unfinished[request_id].remove(index)
                return
            assert self.scheduler.cancel(request_id)
            assert not self.scheduler.cancel(request_id)
            del self.requests[request_id]

    def step(self, cancels: bool = True) -> None:
        self.maybe_cancel(0.03 * cancels)
        plan = self.scheduler.schedule()
        self.kv.check()
        self.check_plan(plan)
        result = self.runner.execute(plan)
        self.maybe_cancel(0.03 * cancels)
        events = self.scheduler.update(plan, result)
        for event in events:
            self.take(event)
        if self.case.discipline == "fair":  # what steps cost decides who takes part in the next
            self.scheduler.record_step(plan, events, 0.003 + 0.001 * self.random.random() * plan.num_tokens)
        self.kv.check()
        self.check_eviction_order()
        assert self.scheduler.has_work == bool(self.requests)

    def check_plan(self, plan: StepPlan) -> None:
        assert bool(plan.scheduled) == bool(self.requests), "work but no progress"
        assert plan.num_tokens <= self.case.max_batch_tokens
        assert len({id(row.request) for row in plan.scheduled}) == len(plan.scheduled) <= self.case.max_running
        assert all(row.count > 0 for row in plan.scheduled)

    def take(self, event: TokenEvent) -> None:
        request = self.requests[event.request_id]  # a cancelled one has no events
        output = self.outputs.setdefault((event.request_id, event.index), [])
        output.extend(event.token_ids)
        if event.finish_reason is None:
            return
        assert output == self.expected(request, event.index)
        assert event.finish_reason == ("stop" if output[-1] in request.stop_ids else "length")
        self.num_finished += 1
        self.unfinished[event.request_id].remove(event.index)
        if not self.unfinished[event.request_id]:
            del self.requests[event.request_id]

    def run(self, num_steps: int) -> None:
        """Steps with arrivals, then without until nobody is left."""
        for _ in range(num_steps):
            if len(self.requests) < 12 and self.random.random() < 0.5:
                self.arrive()
            self.step()
        for _ in range(5000):
            if not self.requests:
                break
            self.step(cancels=False)
        assert not self.requests, "requests starve"

    def check_eviction_order(self) -> None:
        """No cached page of a group without window is evicted before those below it."""
        place = {page: number for number, page in enumerate(self.policy)}
        for page, number in place.items():
            node = self.kv._tree.owner[page]
            group = node.pages.index(page)
            if self.kv._tree.spans[group] == UNBOUNDED:
                assert all(place[child.pages[group]] < number for child in node.children.values())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.layers}-{case.page_size}-{case.extra_pages}")
def test_random_traffic(case: Case) -> None:
    traffic = Traffic(case, seed=CASES.index(case))
    traffic.run(case.num_steps)
    assert traffic.num_finished > 20
    usage = traffic.kv.measure()
    assert usage.num_pages_held == 0
    assert usage.num_pages_free + usage.num_pages_cached == traffic.kv.num_pages
    assert case.prefix_caching or usage.num_pages_cached == 0
    traffic.kv.clear()
    traffic.kv.check()
    assert traffic.kv.measure().num_pages_free == traffic.kv.num_pages
    assert not traffic.kv._tree.root.children


def test_the_cases_reach_what_they_are_for() -> None:
    """The traffic above is only a proof of what it exercises: count it."""
    seen: Counter[str] = Counter()
    for number, case in enumerate(CASES):
        traffic = Traffic(case, seed=number)
        for _ in range(100):
            if len(traffic.requests) < 12:
                traffic.arrive()
            traffic.step()
        seen["preemptions"] += traffic.scheduler.stats.num_preemptions
        seen["evictions"] += traffic.kv.stats.num_evictions
        seen["hits"] += traffic.kv.stats.num_prefix_hit_tokens
        seen["copies"] += traffic.runner.num_copies
        if traffic.kv.layout.states:
            seen["hits with states"] += traffic.kv.stats.num_prefix_hit_tokens
            seen["state copies"] += traffic.runner.num_state_copies
    wanted = ("preemptions", "evictions", "hits", "copies", "hits with states", "state copies")
    assert all(seen[name] > 100 for name in wanted), seen
    assert sum(case.num_steps for case in CASES) > 10_000


def test_layout_of_the_gemma_case() -> None:
    layout: KVLayout = build_layout(LAYERS["gemma"], 4)
    assert [group.kind for group in layout.groups] == ["sliding"] * 5 + ["full"]
