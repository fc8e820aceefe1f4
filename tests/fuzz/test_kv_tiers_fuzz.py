"""Random traffic with pages that leave for tiers and come back, and with requests that keep to a budget.

The same proofs as without: pages add up, every row sees exactly what it should, and each output is that of the request
run alone. Tiers here lose pages at random, somebody else damages a directory that two engines share, and the disk is
full now and then; a budget's next token depends on every slot that is visible.
"""

from __future__ import annotations

import contextlib
import errno
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fuzz.shadow_runner import VOCABULARY, ShadowRunner, chain_hashes
from tests.fuzz.test_scheduler_properties import Case, Traffic
from tokenmill.engine import scheduler
from tokenmill.engine.kv.budget.base import NORMS, SINK_TOKENS
from tokenmill.engine.kv.budget.enforcer import BudgetEnforcer
from tokenmill.engine.kv.manager import KVManager
from tokenmill.engine.kv.tier import guard
from tokenmill.engine.kv.tier.breaker import Breaker
from tokenmill.engine.kv.tier.costs import LoadCosts
from tokenmill.engine.kv.tier.disk import DiskTier
from tokenmill.engine.kv.tier.entry import HEADER_BYTES
from tokenmill.engine.kv.tier.host import HostTier
from tokenmill.engine.kv.tier.stack import TierStack
from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.model.kvstore.transfer import PagesOnHost
from tokenmill.types import CacheControl, Request, SamplingParams, ScheduledTokens, StepPlan, StepResult

_TIER_CASES = [
    Case("full", 4, 3, num_steps=400),
    Case("full", 4, 12, "priority", num_steps=400, policy="lfu"),
    Case("full", 16, 2, context_length=90, num_steps=300),
    Case("gemma", 4, 12, num_steps=300),
    Case("all-sliding", 4, 4, num_steps=300),
    Case("two windows", 4, 10, "priority", max_running=3, num_steps=300),
]


@pytest.fixture(autouse=True)
def patient_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler with nothing else to do plans an empty step when a load takes longer than it may wait for; on a busy
    machine any load can. Here it waits for the end of the load, so that an empty step is always a fault."""
    monkeypatch.setattr(scheduler, "_LOAD_WAIT", 60.0)


class ShadowPages:
    """The runner's memory as a KV store: pages out, pages in."""

    def __init__(self) -> None:
        self.runner: ShadowRunner | None = None

    def export_pages(self, pages: Sequence[int]) -> PagesOnHost:
        return PagesOnHost([self._export(page) for page in pages])

    def import_pages(self, pages: Sequence[int], data: Sequence[memoryview]) -> None:
        assert self.runner is not None
        for page, content in zip(pages, data, strict=True):
            assert self.runner.kv._pool.refs[page] == 1, "a page that others use is overwritten"
            self.runner.memory[page] = json.loads(bytes(content))

    def _export(self, page: int) -> memoryview:
        assert self.runner is not None
        content = self.runner.memory[page]
        assert None not in content, "a page that is not full leaves for a tier"
        return memoryview(bytearray(json.dumps(content).encode().ljust(1024)))


class FlakyTier(HostTier):
    """Forgets a page now and then although it said that it had it."""

    def __init__(self, limit_bytes: int, seed: int) -> None:
        super().__init__(limit_bytes)
        self._random = random.Random(seed)

    def get(self, key: bytes) -> memoryview | None:
        return None if self._random.random() < 0.3 else super().get(key)


class TierTraffic(Traffic):
    def make_kv(self, layout: KVLayout, num_pages: int) -> KVManager:
        self.pages = ShadowPages()
        tiers = [FlakyTier(20 * 1024, 1), HostTier(200 * 1024)]
        self.stack = TierStack(tiers, self.pages, b"r" * 16, 1024)
        return KVManager(layout, num_pages, True, self.policy, self.stack)

    def make_runner(self) -> ShadowRunner:
        self.pages.runner = ShadowRunner(self.kv)
        return self.pages.runner

    def step(self, cancels: bool = True) -> None:
        if self.random.random() < 0.2:
            self.kv.save()
        super().step(cancels)

    def check_plan(self, plan: StepPlan) -> None:
        if self.requests and not plan.scheduled:  # all wait for pages that another thread loads
            assert self.kv.is_loading, "work but no progress"
        else:
            super().check_plan(plan)


@pytest.mark.parametrize("case", _TIER_CASES, ids=lambda case: f"{case.layers}-{case.page_size}-{case.extra_pages}")
def test_traffic_with_tiers(case: Case) -> None:
    traffic = TierTraffic(case, seed=_TIER_CASES.index(case))
    traffic.run(case.num_steps)
    assert traffic.kv.measure().num_pages_held == 0
    traffic.kv.close()
    traffic.kv.check()


class FullDisk(DiskTier):
    """Has no space for one page in five."""

    def put(self, key: bytes, data: memoryview) -> None:
        if random.Random(key).random() < 0.2:
            raise OSError(errno.ENOSPC, "no space left on device")
        super().put(key, data)


class AttackedTraffic(TierTraffic):
    """Engines over one directory, which somebody else damages between two steps."""

    def __init__(self, case: Case, seed: int, folder: Path) -> None:
        self.folder = folder
        self.attacker = random.Random(seed)
        super().__init__(case, seed)

    def make_kv(self, layout: KVLayout, num_pages: int) -> KVManager:
        self.pages = ShadowPages()
        self.disk = FullDisk(self.folder, 60 * (1024 + HEADER_BYTES), b"m" * 16, 1024)
        self.stack = TierStack([self.disk], self.pages, b"r" * 16, 1024)
        return KVManager(layout, num_pages, True, self.policy, self.stack)

    def step(self, cancels: bool = True) -> None:
        super().step(cancels)
        if self.attacker.random() < 0.1:
            self.stack.flush(1.0)
            self.damage()
            self.disk.refresh()

    def damage(self) -> None:
        paths = sorted(self.folder.rglob("*.kv"))
        for path in self.attacker.sample(paths, min(3, len(paths))):
            with contextlib.suppress(FileNotFoundError):
                self._damage(path, self.attacker.choice(paths))

    def _damage(self, path: Path, other: Path) -> None:
        data = bytearray(path.read_bytes()) or bytearray(1)
        match self.attacker.randrange(6):
            case 0:
                data = data[: self.attacker.randrange(len(data))]
            case 1:
                data[self.attacker.randrange(len(data))] ^= 1 << self.attacker.randrange(8)
            case 2:
                data = bytearray(other.read_bytes())  # genuine, but of another page
            case 3:
                data += self.attacker.randbytes(self.attacker.randrange(1, 5000))
            case 4:
                data = bytearray(self.attacker.randbytes(len(data)))
            case 5:
                path.unlink()
                return
        path.write_bytes(data)


def test_two_engines_over_a_directory_under_attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong entries are misses: what is computed stays right in both, and neither stops."""
    monkeypatch.setattr(guard, "Breaker", lambda clock: Breaker(clock, 0.001, 0.001))  # a full disk is soon tried again
    monkeypatch.setattr(LoadCosts, "record_step", lambda *_: None)  # loading is always worth it
    seen: Counter[str] = Counter()
    for number in (0, 3, 4):
        case = replace(_TIER_CASES[number], num_steps=150)
        both = [AttackedTraffic(case, number, tmp_path / str(number)) for _ in range(2)]  # the same requests
        for traffic in both:
            traffic.run(case.num_steps)
            assert traffic.kv.measure().num_pages_held == 0
        for traffic in both:
            traffic.kv.close()
            traffic.kv.check()
            stats = traffic.disk.stats
            seen.update(rejected=sum(stats.rejected.values()), hits=stats.hits, failures=stats.failures)
    # which pages are on the disk when it is damaged is a matter of threads: each is reached in one case or another
    assert min(seen["rejected"], seen["hits"], seen["failures"]) > 0, seen
    assert not list(tmp_path.rglob("*.part"))


def test_the_tier_cases_reach_what_they_are_for() -> None:
    seen: Counter[str] = Counter()
    for number, case in enumerate(_TIER_CASES):
        traffic = TierTraffic(case, seed=100 + number)
        every: list[Request] = []
        for _ in range(150):
            if len(traffic.requests) < 12:
                traffic.arrive()
                every.append(traffic.requests[f"r{traffic.num_arrived - 1}"])
            traffic.step()
        for request in every:
            assert request.cache.num_loaded_tokens <= request.num_cached_tokens
            seen[request.cache.reason] += 1
            seen["loaded tokens"] += request.cache.num_loaded_tokens
        seen["pages"] += sum(tier.stats.hits for tier in traffic.stack.tiers)
        traffic.kv.close()
    assert all(seen[name] > 0 for name in ("loaded tokens", "pages", "hit", "cold", "tier_failed")), seen


_BUDGET_CASES = [
    Case("full", 4, 3, context_length=80, num_steps=400),
    Case("full", 4, 40, "priority", context_length=80, num_steps=400),
    Case("full", 1, 9, context_length=50, num_steps=300),
    Case("full", 4, 20, prefix_caching=False, context_length=80, num_steps=300),
    Case("gemma", 4, 30, context_length=80, num_steps=300),
    Case("two windows", 4, 30, "priority", context_length=110, num_steps=300, max_batch_tokens=40),
]


class ContentScores:
    """A page is worth what its content hashes to: the same wherever it lies."""

    kinds = frozenset({NORMS})

    def __init__(self) -> None:
        self.runner: ShadowRunner | None = None

    def scores(self, _kind: str, _request: Request, tables: tuple[list[int], ...], count: int) -> list[float]:
        assert self.runner is not None
        full = next(number for number, group in enumerate(self.runner.kv.layout.groups) if group.kind == "full")
        return [worth(self.runner.memory[page]) for page in tables[full][:count]]

    def dropped(self, request: Request, entries: Sequence[int]) -> None: ...

    def released(self, request: Request) -> None: ...


def worth(content: Sequence[int | None]) -> float:
    return hash(tuple(content)) % 1000 / 1000


class BudgetRunner(ShadowRunner):
    """The next token is a hash of all that the last token sees, in every group."""

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.page_copies:
            self._copy(plan)
        for row in plan.scheduled:
            chain = chain_hashes(row.request.token_ids, self.chains.setdefault(row.request, []))
            for group, table in enumerate(row.block_tables):
                for position in range(row.start, row.start + row.count):
                    place = position - row.num_dropped
                    page = table[place // self.size]
                    assert self.kv._pool.refs[page] == 1
                    assert page not in self.kv._tree.owner
                    self.memory[page][place % self.size] = hash((group, chain[position]))
        tokens = [self._token(row) if row.samples else None for row in plan.scheduled]
        return StepResult(tokens, [None] * len(tokens), [None] * len(tokens))

    def _token(self, row: ScheduledTokens) -> int:
        end = row.start + row.count - row.num_dropped
        seen = []
        for group, table in zip(self.kv.layout.groups, row.block_tables, strict=True):
            first = max(0, end - group.window) if group.kind == "sliding" else 0
            seen.append(tuple(self.memory[table[each // self.size]][each % self.size] for each in range(first, end)))
        return hash((tuple(seen), row.request.seed)) % VOCABULARY


class BudgetTraffic(Traffic):
    def make_kv(self, layout: KVLayout, num_pages: int) -> KVManager:
        self.scores = ContentScores()
        budgets = BudgetEnforcer(layout, self.scores)
        return KVManager(layout, num_pages, self.case.prefix_caching, self.policy, budgets=budgets)

    def make_runner(self) -> ShadowRunner:
        self.scores.runner = BudgetRunner(self.kv)
        return self.scores.runner

    def make_params(self) -> SamplingParams:
        params = super().make_params()
        policy = self.random.choice(["", "streaming_llm", "paged_eviction"])
        if policy:
            least = self.kv._budgets._policy(policy).min_pages * self.case.page_size
            budget = least + self.random.randrange(12)
            params = replace(params, cache=CacheControl(policy=policy, budget=budget))
        self.kv._budgets.check(params)
        return params

    def check_eviction_order(self) -> None:
        """A request with a budget holds ends of prefixes without their beginnings: the order is not the tree's."""

    def step(self, cancels: bool = True) -> None:
        super().step(cancels)
        for request, holding in self.kv._holdings.items():
            cache = request.params.cache
            if cache is not None and request.num_computed > len(request.prompt_ids):
                allowed = -(-cache.budget // self.case.page_size)
                assert len(holding.tables[0]) <= allowed, "more pages than the budget"

    def expected(self, request: Request, index: int) -> list[int]:
        """The request alone, by its own arithmetic: lists of page numbers instead of tables."""
        size, groups = self.case.page_size, self.kv.layout.groups
        cache = request.params.cache
        chain: list[int] = []
        tokens = list(request.prompt_ids)
        kept = list(range(-(-self.case.context_length // size)))  # page numbers; those beyond the end are not there yet
        full = next((number for number, group in enumerate(groups) if group.kind == "full"), 0)
        while True:
            chain_hashes(tokens, chain)
            seen = []
            for number, group in enumerate(groups):
                positions = [
                    page * size + slot for page in kept for slot in range(size) if page * size + slot < len(tokens)
                ]
                if group.kind == "sliding":
                    positions = [each for each in positions if each >= len(tokens) - group.window]
                seen.append(tuple(hash((number, chain[each])) for each in positions))
            tokens.append(hash((tuple(seen), request.seed + index)) % VOCABULARY)
            if tokens[-1] in request.stop_ids or len(tokens) == self.case.context_length:
                break
            if len(tokens) - len(request.prompt_ids) == request.params.max_tokens:
                break
            if cache is not None:
                computed = len(tokens) - 1
                done = [page for page in kept if (page + 1) * size <= computed]
                excess = len(done) + 1 - -(-cache.budget // size)
                if excess > 0:
                    window = max(group.window for group in groups)
                    recent = max(1, -(-window // size) + (window > 0))
                    choice = done[-(-SINK_TOKENS // size) : len(done) - recent]
                    if cache.policy == "paged_eviction":
                        contents = {p: [hash((full, chain[p * size + s])) for s in range(size)] for p in choice}
                        choice.sort(key=lambda page: (worth(contents[page]), page))
                    kept = [page for page in kept if page not in choice[:excess]]
        return tokens[len(request.prompt_ids) :]


@pytest.mark.parametrize("case", _BUDGET_CASES, ids=lambda case: f"{case.layers}-{case.page_size}-{case.extra_pages}")
def test_traffic_with_budgets(case: Case) -> None:
    traffic = BudgetTraffic(case, seed=_BUDGET_CASES.index(case))
    dropped = 0
    for _ in range(case.num_steps):
        if len(traffic.requests) < 12 and traffic.random.random() < 0.5:
            traffic.arrive()
        traffic.step()
        dropped += sum(holding.num_dropped > 0 for holding in traffic.kv._holdings.values())
    for _ in range(5000):
        if not traffic.requests:
            break
        traffic.step(cancels=False)
    assert not traffic.requests, "requests starve"
    assert traffic.num_finished > 20
    assert dropped > 50, "no budget was ever in the way"
    usage = traffic.kv.measure()
    assert usage.num_pages_held == 0
    traffic.kv.clear()
    traffic.kv.check()
    assert traffic.kv.measure().num_pages_free == traffic.kv.num_pages
