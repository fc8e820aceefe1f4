"""What the engine does around a forward pass changes no logit: every tiny model through the whole engine, against one
pass of transformers over the same tokens.

Alone, with a prefix hit, after a preemption, as siblings, in a batch of sixteen: log-probabilities within 1e-4, and the
same greedy tokens. By the reference kernels; the executors are compared in test_transformers.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.tiny_models import CONFIGS, make
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config import EngineConfig
from tokenmill.engine.core import EngineCore
from tokenmill.engine.kv.manager import KVManager
from tokenmill.engine.kv.policy.lru import LeastRecentlyUsed
from tokenmill.engine.order import DISCIPLINES
from tokenmill.engine.scheduler import Scheduler
from tokenmill.resolution import resolve
from tokenmill.runtime.build import Runtime, build_runtime
from tokenmill.types import Request, SamplingParams, TokenEvent

_CPU = torch.device("cpu")
_PAGE_SIZE, _CONTEXT, _OUTPUT = 4, 128, 12
_LENGTHS = (37, 5, 61, 18, 44, 3, 29, 52, 11, 23, 40, 7, 33, 15, 48, 26)


def _prompt(number: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(3, 131, (_LENGTHS[number],), generator=generator).tolist()


def _core(runtime: Runtime, prefix_caching: bool = True) -> EngineCore:
    slots = runtime.budget.num_state_slots
    kv = KVManager(runtime.layout, runtime.budget.num_pages, prefix_caching, LeastRecentlyUsed(), num_state_slots=slots)
    return EngineCore(Scheduler(kv, DISCIPLINES.get("fcfs")(), 32, 16, _CONTEXT), runtime.runner)


def _run(
    core: EngineCore, requests: list[Request], victim: Request | None = None
) -> dict[str, tuple[list[int], list[float]]]:
    """By request (siblings too): its tokens and their log-probabilities. `victim` is preempted half way."""
    for request in requests:
        core.add(request)
    found: dict[str, tuple[list[int], list[float]]] = {}
    while core.scheduler.has_work:
        for event in core.step():
            tokens, logprobs = found.setdefault(_name(event), ([], []))
            tokens += event.token_ids
            logprobs += [each.logprob for each in event.logprobs]
        if victim is not None and not victim.num_preemptions and victim.num_output_tokens == _OUTPUT // 2:
            core.scheduler._preempt(victim)
        core.scheduler.kv.check()
    return found


def _name(event: TokenEvent) -> str:
    return f"{event.request_id}#{event.index}" if event.index else event.request_id


def _request(name: str, prompt: list[int], **changes: Any) -> Request:
    params = {"max_tokens": _OUTPUT, "temperature": 0.0, "logprobs": 0, "ignore_eos": True, **changes}
    return Request(name, prompt, SamplingParams(**params))


@torch.inference_mode()
def _assert_close(oracle: Any, prompt: list[int], answer: tuple[list[int], list[float]]) -> None:
    tokens, logprobs = answer
    assert len(tokens) == _OUTPUT
    logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (torch.tensor(logprobs) - expected).abs().max() < 1e-4


# transformers takes longrope's short factors for short sequences; ours are chosen once, by the context.
# test_families.py does the same once for every architecture; here are all configurations of each.
_QUICK = ("llama", "gemma3", "deepseek_v3")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow)
        for name in CONFIGS
        if name != "phi3-longrope"
    ],
)
def test_the_engine_changes_no_logit(name: str, tmp_path: Path) -> None:
    oracle = make(name, tmp_path)
    options = {"context": _CONTEXT, "concurrency": 16, "page_size": _PAGE_SIZE, "batch_tokens": 32, "memory": 16 << 20}
    config = resolve(EngineConfig(device="cpu", executor="eager", kernels="ref", kv_cache_dtype="float32", **options))
    runtime = build_runtime(open_checkpoint(tmp_path), config, _CPU)
    core = _core(runtime)
    prompt = _prompt(0)

    alone = _run(core, [_request("alone", prompt)])["alone"]
    _assert_close(oracle, prompt, alone)

    follow_up = prompt + alone[0] + [7, 9]
    again = _request("again", follow_up)
    assert core.scheduler.kv.match(again).num_tokens > 0
    _assert_close(oracle, follow_up, _run(core, [again])["again"])

    siblings = _run(core, [_request("s", _prompt(2), n=3, temperature=1.0, seed=5)])
    assert len(siblings) == 3
    assert len({tuple(tokens) for tokens, _ in siblings.values()}) > 1
    for answer in siblings.values():
        _assert_close(oracle, _prompt(2), answer)

    batch = _run(core, [_request(str(number), _prompt(number)) for number in range(16)])
    assert batch["0"][0] == alone[0]
    for number in range(16):
        _assert_close(oracle, _prompt(number), batch[str(number)])

    victim = _request("victim", _prompt(4))
    preempted = _run(_core(runtime, prefix_caching=False), [victim, _request("other", _prompt(7))], victim)
    assert victim.num_preemptions == 1
    assert preempted["victim"][0] == batch["4"][0]
    for name, number in (("victim", 4), ("other", 7)):
        _assert_close(oracle, _prompt(number), preempted[name])
