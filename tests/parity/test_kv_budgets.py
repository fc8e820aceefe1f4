"""Budget policies against transformers: the same tokens and log-probabilities as one pass with the same keys masked.

The oracle finds out for itself what must be dropped: positions for StreamingLLM, norms of its own cache for
PagedEviction, its own attention weights for H2O. Pages that leave must really be free.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.tiny_models import make
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config import EngineConfig
from tokenmill.engine.core import EngineCore
from tokenmill.engine.kv.budget.enforcer import BudgetEnforcer
from tokenmill.engine.kv.manager import KVManager
from tokenmill.engine.kv.policy.lru import LeastRecentlyUsed
from tokenmill.engine.order import DISCIPLINES
from tokenmill.engine.scheduler import Scheduler
from tokenmill.errors import UserError
from tokenmill.resolution import resolve
from tokenmill.runtime.build import build_runtime
from tokenmill.runtime.observation.page_scores import StoredPageScores
from tokenmill.types import CacheControl, Request, SamplingParams

_SIZE, _PROMPT, _OUTPUT, _BUDGET = 4, 45, 24, 36
_WINDOW = 16  # of the gemma3 model's sliding layers


def _engine(folder: Path, executor: str = "auto") -> EngineCore:
    config = resolve(
        EngineConfig(
            context=256,
            concurrency=4,
            page_size=_SIZE,
            batch_tokens=16,
            device="cpu",
            executor=executor,
            memory=8 << 20,
        )
    )
    runtime = build_runtime(open_checkpoint(folder), config, torch.device("cpu"))
    scores = StoredPageScores(runtime, config)
    kv = KVManager(
        runtime.layout,
        runtime.budget.num_pages,
        True,
        LeastRecentlyUsed(),
        budgets=BudgetEnforcer(runtime.layout, scores),
    )
    scheduler = Scheduler(kv, DISCIPLINES.get("fcfs")(), config.batch_tokens, config.concurrency, 256)
    return EngineCore(scheduler, runtime.runner)


def _prompt(seed: int = 0) -> list[int]:
    return torch.randint(3, 131, (_PROMPT,), generator=torch.Generator().manual_seed(seed)).tolist()


def _run(core: EngineCore, request: Request, others: list[Request] | None = None) -> tuple[list[int], list[float], int]:
    """Tokens, their log-probabilities, and the most pages held per group after the prompt."""
    for each in (request, *(others or ())):
        core.add(each)
    tokens, logprobs, most = [], [], 0
    kv = core.scheduler.kv
    while core.scheduler.has_work:
        for event in core.step():
            if event.request_id == request.request_id:
                tokens += event.token_ids
                logprobs += [each.logprob for each in event.logprobs]
        kv.check()
        if request in kv._holdings and request.num_computed > _PROMPT:
            most = max(most, *(sum(page >= 0 for page in table) for table in kv._holdings[request].tables))
    return tokens, logprobs, most


class Oracle:
    """One masked pass over all tokens, as often as something must be decided by what it shows."""

    def __init__(self, model: Any, policy: str) -> None:
        self.model = model
        self.policy = policy
        self.kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
        self.window = _WINDOW if "sliding_attention" in self.kinds else 0

    def logprobs(self, ids: list[int]) -> tuple[list[float], set[int]]:
        """Log-probabilities of the tokens after the prompt; the pages that are gone at the end."""
        total = len(ids)
        visible = torch.ones(total, total).tril().bool()
        gone: set[int] = set()
        for position in range(_PROMPT, total - 1):  # the last token is never computed
            done = [page for page in range(position // _SIZE) if page not in gone]
            excess = len(done) + 1 - _BUDGET // _SIZE
            if excess > 0:
                gone |= set(self._victims(ids, visible, position, done, excess))
                for page in gone:
                    visible[position:, page * _SIZE : (page + 1) * _SIZE] = False
        logits = self._pass(ids, visible).logits[0, _PROMPT - 1 : -1]
        chosen = torch.tensor(ids[_PROMPT:])
        return logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0].tolist(), gone

    def _victims(self, ids: list[int], visible: torch.Tensor, position: int, done: list[int], excess: int) -> list[int]:
        budget = _BUDGET // _SIZE
        recent = -(-self.window // _SIZE) + 1 if self.window else 1
        if self.policy == "h2o":
            recent = max(recent, budget // 2)
        choice = done[1 : len(done) - recent]  # the first page holds the four sinks
        if self.policy == "streaming_llm":
            return choice[:excess]
        worth = self._norms if self.policy == "paged_eviction" else self._mass
        scores = worth(self._pass(ids[:position], visible[:position, :position]))
        return sorted(choice, key=lambda page: float(scores[page * _SIZE : (page + 1) * _SIZE].mean()))[:excess]

    def _norms(self, output: Any) -> torch.Tensor:
        layers = [number for number, kind in enumerate(self.kinds) if kind == "full_attention"]
        cache = output.past_key_values.layers
        ratios = [cache[each].values[0].norm(dim=-1) / cache[each].keys[0].norm(dim=-1) for each in layers]
        return torch.stack(ratios).mean((0, 1))

    def _mass(self, output: Any) -> torch.Tensor:
        layers = [number for number, kind in enumerate(self.kinds) if kind == "full_attention"]
        return torch.stack([output.attentions[each][0] for each in layers]).sum((0, 1, 2))

    @torch.inference_mode()
    def _pass(self, ids: list[int], visible: torch.Tensor) -> Any:
        lowest = torch.finfo(torch.float32).min
        mask: Any = torch.where(visible, 0.0, lowest)[None, None]
        if self.window:
            total = len(ids)
            near = torch.ones(total, total).tril().triu(-(self.window - 1)).bool()
            mask = {"full_attention": mask, "sliding_attention": torch.where(near, 0.0, lowest)[None, None]}
        return self.model(torch.tensor([ids]), attention_mask=mask, output_attentions=True, use_cache=True)


_CASES = [(name, policy) for name in ("llama", "gemma3") for policy in ("streaming_llm", "paged_eviction", "h2o")]


@pytest.mark.parametrize(("name", "policy"), [*_CASES, ("deepseek_v3", "streaming_llm"), ("deepseek_v3", "h2o")])
def test_a_budget_is_a_mask(name: str, policy: str, tmp_path: Path) -> None:
    oracle = Oracle(make(name, tmp_path), policy)
    core = _engine(tmp_path)
    budget = CacheControl(policy=policy, budget=_BUDGET)
    params = SamplingParams(max_tokens=_OUTPUT, temperature=0.0, logprobs=0, cache=budget)
    core.scheduler.kv._budgets.check(params)
    request = Request("r", _prompt(), params)
    tokens, logprobs, most = _run(core, request)
    expected, gone = oracle.logprobs(request.prompt_ids + tokens)
    torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(expected), rtol=1e-4, atol=2e-4)
    assert request.cache.num_dropped_tokens == len(gone) * _SIZE > _OUTPUT
    assert most <= _BUDGET // _SIZE
    assert core.scheduler.kv.measure().num_pages_held == 0
    # Among others, in chunks beside them and with its prompt cached: the same.
    again = Request("again", _prompt(), params)
    plain = [Request(f"o{seed}", _prompt(seed), SamplingParams(max_tokens=30)) for seed in (5, 6)]
    repeated, close, _ = _run(core, again, plain)
    assert repeated == tokens
    torch.testing.assert_close(close, logprobs, rtol=1e-4, atol=2e-4)


def test_latent_rows_have_no_norms_to_compare(tmp_path: Path) -> None:
    make("deepseek_v3", tmp_path)
    core = _engine(tmp_path)
    budget = CacheControl(policy="paged_eviction", budget=_BUDGET)
    with pytest.raises(UserError, match="paged_eviction needs scores that this engine does not keep"):
        core.scheduler.kv._budgets.check(SamplingParams(cache=budget))


def test_a_request_without_budget_finds_nothing_of_one_with(tmp_path: Path) -> None:
    """Pages computed over a mask never feed the prefix cache; those of the prompt, computed before, do."""
    make("llama", tmp_path)
    core = _engine(tmp_path)
    params = SamplingParams(max_tokens=_OUTPUT, temperature=0.0, cache=CacheControl(policy="h2o", budget=_BUDGET))
    tokens, _, _ = _run(core, Request("lossy", _prompt(), params))
    follow_up = Request("next", _prompt() + tokens + [7], SamplingParams(max_tokens=1))
    assert core.scheduler.kv.match(follow_up).num_tokens == _PROMPT // _SIZE * _SIZE
