"""Random traffic with drafts of every length, good and bad, through the real scheduler, KV manager and verification.

Drafts cross page boundaries, meet preemption, prefix hits, forks and the end of the context. Rejected tokens are really
written to their slots, so any later row that saw one would be found out; outputs must be those without drafts.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.fuzz.shadow_runner import VOCABULARY, ShadowRunner, chain_hashes, next_token
from tests.fuzz.test_scheduler_properties import CASES, Case, Traffic
from tokenmill.engine.kv.manager import KVManager
from tokenmill.engine.order import DISCIPLINES
from tokenmill.engine.scheduler import Scheduler
from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.sampling.sampler import Sampler
from tokenmill.runtime.verify import verify
from tokenmill.types import ScheduledTokens, StepPlan, StepResult

_MAX_DRAFTS = 9


class DraftingShadowRunner(ShadowRunner):
    """Guesses right, wrong or partly right at random, computes the guesses too, and verifies with the real code."""

    def __init__(self, kv: KVManager, seed: int) -> None:
        super().__init__(kv)
        self.random = random.Random(seed)
        self.sampler = Sampler()
        self.seen: Counter[str] = Counter()

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        for number, row in enumerate(plan.scheduled):
            draft = self._guess(row)
            if draft:
                self._compute_drafts(row, draft)
                self._judge(number, row, draft, result)
        return result

    def _guess(self, row: ScheduledTokens) -> list[int]:
        draft: list[int] = []
        chain = list(self.chains[row.request])
        accuracy = self.random.choice([0.0, 0.5, 0.9, 1.0])
        for _ in range(self.random.randint(0, row.num_draft_slots)):
            right = next_token(chain[-1], row.request.seed)
            draft.append(right if self.random.random() < accuracy else self.random.randrange(VOCABULARY))
            chain.append(hash((chain[-1], draft[-1])))
        return draft

    def _compute_drafts(self, row: ScheduledTokens, draft: list[int]) -> None:
        chain = chain_hashes(row.request.token_ids + draft, list(self.chains[row.request]))
        end = row.start + row.count + len(draft)
        for group, table in enumerate(row.block_tables):
            for position in range(row.start + row.count, end):
                page = table[position // self.size]
                assert self.kv._pool.refs[page] == 1, "a draft wrote to a shared page"
                assert page not in self.kv._tree.owner, "a draft wrote to a cached page"
                self.memory[page][position % self.size] = hash((group, chain[position]))
        self._verify(row.start, end, row.block_tables, chain)
        first, last = row.start // self.size, (end - 1) // self.size
        self.seen["page boundaries"] += last > first

    def _judge(self, number: int, row: ScheduledTokens, draft: list[int], result: StepResult) -> None:
        chain = chain_hashes(row.request.token_ids + draft, list(self.chains[row.request]))
        logits = torch.full((1 + len(draft), VOCABULARY), -1e9)
        for depth in range(len(logits)):
            logits[depth, next_token(chain[row.start + depth], row.request.seed)] = 0.0
        before = list(row.request.token_ids)
        (verdict,) = verify(self.sampler, logits, [row.request], [Draft(draft)])
        assert row.request.token_ids == before
        result.token_ids[number] = verdict.token_id
        result.num_drafted[number] = len(draft)
        if verdict.accepted:
            result.accepted[number] = verdict.accepted
        self.states[row.state_slot] = chain[row.start + row.count - 1 + len(verdict.accepted)]
        self.seen["accepted"] += len(verdict.accepted)
        self.seen["rejected"] += len(verdict.accepted) < len(draft)
        self.seen["wholly accepted"] += len(verdict.accepted) == len(draft)
        self.seen[f"length {len(draft)}"] += 1


class DraftingTraffic(Traffic):
    def __init__(self, case: Case, seed: int) -> None:
        super().__init__(case, seed)
        self.scheduler = Scheduler(
            self.kv,
            DISCIPLINES.get(case.discipline)(),
            case.max_batch_tokens,
            case.max_running,
            case.context_length,
            max_drafts=_MAX_DRAFTS,
        )
        self.runner: DraftingShadowRunner = DraftingShadowRunner(self.kv, seed)

    def arrive(self) -> None:
        super().arrive()
        request = list(self.requests.values())[-1]
        temperature = self.random.choice([0.0, 0.0, 1.0])
        # With all weight on one token a random draw is as certain as a greedy one, and takes the other way there.
        request.params = replace(request.params, temperature=temperature)

    def check_plan(self, plan: StepPlan) -> None:
        super().check_plan(plan)
        slots = sum(row.num_draft_slots for row in plan.scheduled)
        assert plan.num_tokens + slots <= self.case.max_batch_tokens


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.layers}-{case.page_size}-{case.extra_pages}")
def test_drafts_change_no_output(case: Case) -> None:
    traffic = DraftingTraffic(case, seed=100 + CASES.index(case))
    for _ in range(150):
        if len(traffic.requests) < 12 and traffic.random.random() < 0.5:
            traffic.arrive()
        traffic.step()
    for _ in range(3000):
        if not traffic.requests:
            break
        traffic.step(cancels=False)
    assert not traffic.requests, "requests starve"
    assert traffic.num_finished > 5
    assert traffic.kv.measure().num_pages_held == 0


def test_the_drafts_reach_what_they_are_for() -> None:
    seen: Counter[str] = Counter()
    for number, case in enumerate(CASES):
        traffic = DraftingTraffic(case, seed=number)
        for _ in range(60):
            if len(traffic.requests) < 12:
                traffic.arrive()
            traffic.step()
        seen += traffic.runner.seen
        seen["preemptions"] += traffic.scheduler.stats.num_preemptions
        seen["hits"] += traffic.kv.stats.num_prefix_hit_tokens
        seen["copies"] += traffic.runner.num_copies
    wanted = ["accepted", "rejected", "wholly accepted", "page boundaries", "preemptions", "hits", "copies"]
    assert all(seen[name] > 50 for name in wanted), seen
    assert all(seen[f"length {length}"] > 5 for length in range(1, _MAX_DRAFTS + 1)), seen
