"""Random traffic of many adapters through the real loop, registry, slots, scheduler and KV manager: every row is
computed with its request's own version, on pages that the same version computed, also after a replacement under the
same name; and at the end nothing is held."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.shadow_runner import VOCABULARY, ShadowRunner, expected_output
from tokenmill.engine.adapters.registry import AdapterError, AdapterRegistry, AdapterVersion
from tokenmill.engine.adapters.residency import AdapterSlots
from tokenmill.engine.core import EngineCore
from tokenmill.engine.kv.manager import KVManager
from tokenmill.engine.kv.policy.lru import LeastRecentlyUsed
from tokenmill.engine.loop import EngineLoop
from tokenmill.engine.order import DISCIPLINES
from tokenmill.engine.scheduler import Scheduler
from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import LayerKV, build_layout
from tokenmill.types import AdapterRef, Request, SamplingParams, TokenEvent

CONTEXT = 40
NAMES = ("a", "b", "c", "d", "e")
STEMS = [[(7 * stem + 3 * n) % VOCABULARY for n in range(CONTEXT)] for stem in range(3)]


@dataclass
class _Numbers:
    """What the files of an adapter hold."""

    digest: bytes
    nbytes: int = 10


@dataclass
class Machine:
    """An engine whose adapters are numbers: path `name/3` is the third content under that name."""

    num_slots: int
    host_bytes: int
    discipline: str
    extra_pages: int
    outputs: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    finished: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        layout = build_layout([LayerKV("full", 1, 8)], 4)
        pages = layout.peak_pages(CONTEXT) + self.extra_pages
        self.kv = KVManager(layout, pages, True, LeastRecentlyUsed())
        self.runner = ShadowRunner(self.kv)
        self.registry = AdapterRegistry(self.read, self.host_bytes)
        self.slots = AdapterSlots(
            self.num_slots, self.registry.store, self.place, self.runner.adapters.pop, self.kv.stats
        )
        discipline = DISCIPLINES.get(self.discipline)()
        self.scheduler = Scheduler(self.kv, discipline, 24, 5, CONTEXT, adapters=self.slots)
        self.registry.attach(self.slots, lambda digest: len(self.scheduler.using(digest)))
        core = EngineCore(self.scheduler, self.runner)  # type: ignore[arg-type]
        self.loop = EngineLoop(core, self, adapters=self.registry)
        self.requests: dict[str, Request] = {}

    def read(self, name: str, path: str) -> tuple[AdapterVersion, _Numbers]:
        digest = hashlib.sha256(path.encode()).digest()
        return AdapterVersion(name, path, digest, 4, 10), _Numbers(digest)

    def place(self, slot: int, numbers: _Numbers) -> None:
        assert slot not in self.runner.adapters, "a slot that is not empty"
        self.runner.adapters[slot] = numbers.digest

    def on_events(self, events: list[TokenEvent]) -> None:
        for event in events:
            key = event.request_id, event.index
            self.outputs.setdefault(key, []).extend(event.token_ids)
            if event.finish_reason:
                self.finished.add(key)

    def on_refused(self, request_id: str, error: UserError) -> None:
        self.refused[request_id] = str(error)

    def submit(self, adapter: AdapterRef | None, stem: int, length: int, n: int) -> None:
        name = f"r{len(self.requests)}"
        prompt = STEMS[stem][:length]
        params = SamplingParams(n=n, max_tokens=5, ignore_eos=True)
        request = Request(name, prompt, params, seed=stem, arrival=len(self.requests), adapter=adapter)
        self.requests[name] = request
        self.loop.submit(request)

    def check(self) -> None:
        self.kv.check()
        self.slots.check()


OPERATIONS = st.one_of(
    st.tuples(
        st.just("submit"), st.sampled_from((*NAMES, "")), st.integers(0, 2), st.integers(1, 30), st.integers(1, 2)
    ),
    st.tuples(st.just("turn"), st.integers(1, 4)),
    st.tuples(st.just("load"), st.sampled_from(NAMES), st.integers(0, 3)),
    st.tuples(st.just("unload"), st.sampled_from(NAMES), st.booleans()),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(OPERATIONS, min_size=10, max_size=60),
    st.integers(1, 3),
    st.sampled_from((0, 25, 1000)),
    st.sampled_from(("fcfs", "priority", "fair")),
    st.sampled_from((0, 6, 60)),
)
def test_every_row_has_its_own_adapter_and_its_own_pages(
    operations: list[tuple], num_slots: int, host_bytes: int, discipline: str, extra_pages: int
) -> None:
    machine = Machine(num_slots, host_bytes, discipline, extra_pages)
    for name in NAMES[:3]:
        machine.registry.load_now(name, f"{name}/0")
    cancelled: set[str] = set()
    for what, *values in operations:
        known = {version.name for version in machine.registry.versions()}
        if what == "submit" and (values[0] in known or not values[0]):
            machine.submit(machine.registry.find(values[0]) if values[0] else None, *values[1:])
        elif what == "turn":
            for _ in range(values[0]):
                machine.loop.turn()
        elif what == "load":
            machine.registry.load(values[0], f"{values[0]}/{values[1]}", True, lambda _version, _error: None)
        elif what == "unload" and values[0] in known:
            with contextlib.suppress(AdapterError):  # it is in use
                machine.registry.unload(values[0], drains=values[1])
        elif what == "cancel":
            cancelled.add(f"r{values[0]}")
            machine.loop.cancel(f"r{values[0]}")
        machine.check()
    while machine.loop.has_work or machine.registry.is_busy:
        machine.loop.turn()
        machine.check()
    assert not machine.refused
    for name, request in machine.requests.items():
        for index in range(request.params.n):
            if name not in cancelled:
                assert (name, index) in machine.finished, "a request was lost"
                assert machine.outputs[name, index] == expected_output(request, request.seed + index, CONTEXT)
    for version in machine.registry.versions():
        machine.registry.unload(version.name)
    assert not machine.runner.adapters, "a slot is still full"
    assert machine.registry.store.nbytes == 0
    assert machine.kv.measure().num_pages_held == 0
    machine.registry.close()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(("", "a", "b")), st.integers(0, 2), st.integers(9, 30)), min_size=2, max_size=12
    ),
    st.integers(0, 11),
)
def test_prefix_hits_never_cross_adapters(prompts: list[tuple[str, int, int]], replaced_at: int) -> None:
    """One request after the other: what is found in the cache was computed by the same version of the same adapter."""
    machine = Machine(2, 1000, "fcfs", 200)
    for name in ("a", "b"):
        machine.registry.load_now(name, f"{name}/0")
    computed: dict[bytes, list[list[int]]] = {}
    for number, (name, stem, length) in enumerate(prompts):
        if number == replaced_at:
            machine.registry.load_now("a", "a/1", replaces=True)
        ref = machine.registry.find(name) if name else None
        machine.submit(ref, stem, length, 1)
        machine.loop.drain()
        request = machine.requests[f"r{number}"]
        before = computed.setdefault(ref.digest if ref is not None else b"", [])
        shared = max((_common(request.prompt_ids, other) for other in before), default=0)
        assert request.num_cached_tokens == min(shared, length - 1) // 4 * 4  # as much as it could, and no more
        before.append(request.token_ids[:-1])
    machine.registry.close()


def _common(left: list[int], right: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
