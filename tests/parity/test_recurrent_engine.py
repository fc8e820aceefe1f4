"""Models with recurrent layers in the whole engine: prefix hits, preemption, siblings, drafts, batches change nothing.

The oracle is one uncached pass of transformers over prompt and output (its cached passes of Mamba and Jamba drop the
state when more than one token comes): the log-probability of every sampled token agrees within 1e-4.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.parity.tiny_models import make
from tests.parity.tiny_recurrent import RECURRENT
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config import EngineConfig
from tokenmill.engine.core import EngineCore
from tokenmill.engine.kv.manager import KVManager
from tokenmill.engine.kv.policy.lru import LeastRecentlyUsed
from tokenmill.engine.order import DISCIPLINES
from tokenmill.engine.scheduler import Scheduler
from tokenmill.kernels import cpu
from tokenmill.resolution import resolve
from tokenmill.runtime.build import build_runtime
from tokenmill.runtime.executors.base import Draft
from tokenmill.types import Request, SamplingParams, ScheduledTokens

_SIZE = 8  # tokens of a page
_CONTEXT = 192
_CPU = torch.device("cpu")
_QUICK = ("mamba", "mamba2", "falcon_h1", "qwen3_next")  # every kind of state; test_families.py runs every architecture
_NAMES = [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in RECURRENT]
_EAGERLY = ("mamba2", "qwen3_next")  # of these; the spec takes four times as long as the program
_CASES = [
    pytest.param(name, executor, marks=() if name in quick else pytest.mark.slow)
    for executor, quick in (("eager", _EAGERLY), ("recorded", _QUICK))
    for name in RECURRENT
]


_KEPT = TemporaryDirectory()  # removed at the end


@cache
def _model(name: str) -> tuple[Any, Path]:
    folder = Path(_KEPT.name, name)
    return make(name, folder), folder


@dataclass
class Output:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_cached: int = 0


class Drafts:
    """In the place of a speculator: drafts of any length from known outputs, wrong from a random token on."""

    drafter = SimpleNamespace(needs_hidden=False)

    def __init__(self, outputs: dict[tuple[str, int], Output]) -> None:
        self.outputs = outputs
        self.random = random.Random(0)

    def propose(self, rows: Sequence[ScheduledTokens]) -> dict[int, Draft]:
        drafts = {}
        for number, row in enumerate(rows):
            request = row.request
            known = self.outputs[request.request_id, request.index].token_ids
            ids = known[request.num_output_tokens :][: self.random.randint(0, row.num_draft_slots)]
            if ids:
                right = self.random.randint(0, len(ids))
                drafts[number] = Draft([*ids[:right], *(3 + token % 100 for token in ids[right:])])
        return drafts

    def learn(self, *_: Any) -> None: ...


class Engine:
    def __init__(
        self,
        name: str,
        concurrency: int = 4,
        extra_pages: int | None = None,
        drafts: Drafts | None = None,
        prefix_caching: bool = True,
        executor: str = "eager",
        kernels: str | None = None,
    ) -> None:
        """`extra_pages`: beyond those of a lone request; None: enough for all. The eager executor runs the spec."""
        if kernels is None:
            kernels = "ref" if executor == "eager" else ""
        if executor == "recorded" and (reason := cpu.unavailable(_CPU)) is not None:
            pytest.skip(reason)
        config = resolve(
            EngineConfig(
                context=_CONTEXT,
                concurrency=concurrency,
                page_size=_SIZE,
                batch_tokens=40,
                device="cpu",
                executor=executor,
                kernels=kernels,
                kv_cache_dtype="float32",
                memory=64 << 20,
                prefix_caching=prefix_caching,
            )
        )
        runtime = build_runtime(open_checkpoint(_model(name)[1]), config, _CPU)
        layout, pages = runtime.layout, runtime.budget.num_pages
        if extra_pages is not None:
            pages = layout.peak_pages(_CONTEXT) + extra_pages
        slots = runtime.budget.num_state_slots
        self.kv = KVManager(layout, pages, prefix_caching, LeastRecentlyUsed(), num_state_slots=slots)
        runtime.runner.speculator = drafts  # type: ignore[assignment]
        discipline = DISCIPLINES.get("fcfs")()
        scheduler = Scheduler(self.kv, discipline, 40, concurrency, _CONTEXT, max_drafts=6 if drafts else 0)
        self.core = EngineCore(scheduler, runtime.runner)
        self.prompts: dict[str, list[int]] = {}

    def run(
        self, prompts: dict[str, list[int]], tokens: int = 20, at_once: int = 1, **params: Any
    ) -> dict[tuple[str, int], Output]:
        """Outputs by name and sibling. `at_once`: tokens of a sequence that one step may bring."""
        outputs: dict[tuple[str, int], Output] = {}
        self.prompts |= prompts
        for name, prompt in prompts.items():
            settings = SamplingParams(**{"temperature": 0.0, "max_tokens": tokens, "logprobs": 0, **params})
            self.core.add(Request(name, prompt, settings, seed=7))
        while self.core.has_work:
            for event in self.core.step(at_once):
                output = outputs.setdefault((event.request_id, event.index), Output())
                output.token_ids += event.token_ids
                output.logprobs += [each.logprob for each in event.logprobs]
                output.num_cached = event.num_cached_tokens
            self.kv.check()
        return outputs


def _tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 131, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def _check(name: str, engine: Engine, outputs: dict[tuple[str, int], Output]) -> None:
    for (request, _), output in outputs.items():
        prompt = engine.prompts[request]
        ids = prompt + output.token_ids
        logits = _model(name)[0](torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        error = (torch.tensor(output.logprobs) - expected).abs().max()
        assert error < 1e-4, f"{request}: {error:.1e}"


@pytest.mark.parametrize(("name", "executor"), _CASES)
def test_prefix_hits(name: str, executor: str) -> None:
    engine = Engine(name, executor=executor)
    stem = _tokens(50, 1)
    first = engine.run({"first": stem + _tokens(9, 2)})
    again = engine.run({"again": stem + _tokens(9, 2)})
    assert again["again", 0].num_cached == 56  # the last page end before the last token
    assert again["again", 0].token_ids == first["first", 0].token_ids
    # Another one parts from it after 50 tokens: there is no snapshot at 48 yet, only from its own visit on.
    other = engine.run({"other": stem + _tokens(20, 3)})
    third = engine.run({"third": stem + _tokens(15, 4)})
    assert (other["other", 0].num_cached, third["third", 0].num_cached) == (0, 48)
    # The next turn of a conversation goes on from the end of the last answer.
    turn = engine.run({"turn": engine.prompts["third"] + third["third", 0].token_ids + _tokens(6, 5)})
    assert turn["turn", 0].num_cached == (65 + 19) // _SIZE * _SIZE
    for outputs in (first, again, other, third, turn):
        _check(name, engine, outputs)


@pytest.mark.parametrize(("name", "executor"), _CASES)
def test_preemption(name: str, executor: str) -> None:
    engine = Engine(name, extra_pages=6, executor=executor)
    outputs = engine.run({f"r{n}": _tokens(40 + 7 * n, n) for n in range(6)}, tokens=30)
    _check(name, engine, outputs)
    if len(engine.kv.layout.groups[0].layers):  # a model without pages never runs out of them
        assert engine.kv.stats.num_preemptions > 0


@pytest.mark.parametrize("executor", [pytest.param("eager", marks=pytest.mark.slow), "recorded"])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", [1, 33, 40, 41])  # the prompt ends after a page, at its end, and one token later
@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_siblings_of_prompts_of_any_length(name: str, length: int, prefix_caching: bool, executor: str) -> None:
    _siblings(name, length, prefix_caching, executor)


@pytest.mark.parametrize(("name", "executor"), _CASES)
def test_siblings(name: str, executor: str) -> None:
    _siblings(name, 45, True, executor)


def _siblings(name: str, length: int, prefix_caching: bool, executor: str) -> None:
    engine = Engine(name, prefix_caching=prefix_caching, executor=executor)
    prompts = {"r": _tokens(length, 8), "s": _tokens(length + 3, 9)}
    outputs = engine.run(prompts, n=3, temperature=1.0)
    assert len(outputs) == 6
    assert outputs["r", 0].token_ids != outputs["r", 1].token_ids
    _check(name, engine, outputs)


@pytest.mark.parametrize(("name", "executor"), _CASES)
def test_drafts_are_rolled_back(name: str, executor: str) -> None:
    prompts = {"r": _tokens(44, 10), "s": _tokens(37, 11), "t": _tokens(9, 12)}
    for params in ({}, {"temperature": 1.0, "n": 2}):
        expected = Engine(name, executor=executor).run(prompts, 28, **params)
        drafting = Engine(name, drafts=Drafts(expected), executor=executor)
        got = drafting.run(prompts, 28, **params)
        assert {k: v.token_ids for k, v in got.items()} == {k: v.token_ids for k, v in expected.items()}
        _check(name, drafting, got)
        stats = drafting.kv.stats
        assert 10 < stats.num_accepted < stats.num_drafted - 10


@pytest.mark.parametrize(("name", "executor"), _CASES)
def test_the_same_tokens_alone_and_in_a_batch(name: str, executor: str) -> None:
    prompts = {f"r{n}": _tokens(5 + 6 * n, 20 + n) for n in range(16)}
    together = Engine(name, concurrency=16, prefix_caching=False, executor=executor)
    outputs = together.run(prompts, tokens=12)
    _check(name, together, outputs)
    alone = Engine(name, concurrency=1, prefix_caching=False, executor=executor)
    for request in ("r0", "r7", "r15"):
        got = alone.run({request: prompts[request]}, tokens=12)
        assert got[request, 0].token_ids == outputs[request, 0].token_ids


@pytest.mark.parametrize("name", _NAMES)
def test_the_faster_kernels(name: str) -> None:
    """What the eager executor runs in production: C++ kernels where there are some."""
    engine = Engine(name, kernels="")
    stem = _tokens(50, 1)
    _check(name, engine, engine.run({"a": stem + _tokens(9, 2), "b": _tokens(23, 3)}))
    _check(name, engine, engine.run({"c": stem + _tokens(9, 4), "d": stem}, n=2, temperature=1.0))


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("name", list(RECURRENT))
def test_runs_of_greedy_tokens(name: str, prefix_caching: bool) -> None:
    """Several tokens in one call of the recorded program; rows still end where snapshots are taken."""
    prompts = {"r": _tokens(44, 10), "s": _tokens(37, 11), "t": _tokens(1, 12)}
    expected = Engine(name, executor="recorded").run(prompts, 40)
    engine = Engine(name, prefix_caching=prefix_caching, executor="recorded")
    got = engine.run(prompts, 40, at_once=8, logprobs=None)
    assert {k: v.token_ids for k, v in got.items()} == {k: v.token_ids for k, v in expected.items()}
    if prefix_caching:
        turn = engine.run({"turn": prompts["r"] + got["r", 0].token_ids + _tokens(6, 5)})
        assert turn["turn", 0].num_cached == (44 + 39) // _SIZE * _SIZE
        _check(name, engine, turn)
