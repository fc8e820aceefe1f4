"""Heads that guess inside the steps that check drafts, and steps queued before the host has seen the last one: on a GPU
if there is one, else under Triton's interpreter (test_interpreted.py runs this file so)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.models import write_config
from tests.gpu.test_executors import ON_GPU, config, engine, prompts, same_weights  # noqa: F401
from tokenmill import LLM, SamplingParams
from tokenmill.kernels.triton.step.ngram_lookup import look_up_drafts
from tokenmill.model.kvstore.base import KVStore
from tokenmill.runtime.executors.cuda.checks import Checks
from tokenmill.runtime.speculation.captured_heads import CapturedHead
from tokenmill.runtime.speculation.captured_views import CapturedViews
from tokenmill.runtime.speculation.head_modules import build_head
from tokenmill.runtime.speculation.heads import HeadDrafter
from tokenmill.runtime.speculation.ngram import continuation
from tokenmill.runtime.speculation.page_views import PageViews
from tokenmill.runtime.speculation.training import TrainingPlan, save_head
from tokenmill.types import Batch

LENGTH = 40 if ON_GPU else 9
DEPTH = 2


def make_head(folder: Path, llm: LLM, kind: str, layers: tuple[int, ...] = ()) -> str:
    torch.manual_seed(3)
    plan = TrainingPlan(kind, depth=DEPTH, width=32)
    d = llm.parts.description
    head = build_head(kind, d.hidden_size, DEPTH, 32, layers, d.num_heads * d.head_dim)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    save_head(head, llm.parts.runtime.model, plan, [0.5] * DEPTH, folder)
    return f"head:{folder}"


class Bigrams:
    """Guesses what followed a token last time: mostly right where a model repeats itself."""

    depth = DEPTH

    def __init__(self, outputs: list[list[int]], device: torch.device) -> None:
        self._next = torch.zeros(131, dtype=torch.int64)
        for ids in outputs:
            self._next[ids[:-1]] = torch.tensor(ids[1:])
        self._next = self._next.to(device)

    def note(self, _batch: Batch) -> None: ...

    def guess(self, hidden: Tensor, last: Tensor, _batch: Batch) -> Tensor:  # noqa: ARG002
        found = []
        for _ in range(self.depth):
            last = self._next[last]
            found.append(last)
        return torch.stack(found, 1)


@pytest.mark.parametrize(("kind", "layers"), [("eagle", ()), ("eagle", (0,)), ("medusa", ())])
def test_a_captured_head_guesses_what_the_head_guesses(tmp_path: Path, kind: str, layers: tuple[int, ...]) -> None:
    """The head in plain torch, over pages that the plain attention reads."""
    with engine(config(tmp_path / "model"), "cuda_graph") as llm:
        speculate = make_head(tmp_path / "head", llm, kind, layers)
    with engine(tmp_path / "model", "cuda_graph", speculate=speculate) as llm:
        runtime = llm.parts.runtime
        assert runtime.runner.speculator is not None
        drafter = runtime.runner.speculator.drafter
        assert isinstance(drafter, HeadDrafter)
        model, store = runtime.model, runtime.store
        batch = fill_pages(store)
        hidden = torch.randn(5, llm.parts.description.hidden_size, device=model.device).bfloat16()
        last = torch.tensor([3, 9, 14, 100, 0], device=hidden.device)
        attend = None
        if layers:
            views = PageViews(model, store, layers)
            views.kernels = "ref"
            attend = views.attend_fn(batch)
        wanted, _ = drafter.guess(hidden.float(), last, DEPTH, attend)
        found = CapturedHead(drafter.head, model, store, DEPTH).by_head(hidden, last, batch).tolist()
        same = [a == b for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True)]
        assert sum(same) >= len(same) - 2  # bf16 may decide a near tie otherwise


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "int8", "int4"])
def test_pages_look_the_same_to_a_captured_head(tmp_path: Path, dtype: str) -> None:
    with engine(config(tmp_path / "model"), "cuda_graph", kv_cache_dtype=dtype) as llm:
        model, store = llm.parts.runtime.model, llm.parts.runtime.store
        d = llm.parts.description
        batch = fill_pages(store)
        views = PageViews(model, store, (0,))
        views.kernels = "ref"
        queries = torch.randn(5, d.num_heads * d.head_dim, device=model.device).bfloat16()
        wanted = views.attend_fn(batch)(queries.float())
        found = CapturedViews(model, store, (0,)).attend_fn(batch)(queries).float()
    assert torch.allclose(found, wanted, atol=0.03, rtol=0.03)


def fill_pages(store: KVStore) -> Batch:
    """Five sequences of several lengths over pages of random keys and values."""
    size, device = store.layout.page_size, store.device
    lengths = torch.tensor([1, 5, size, size + 3, 2 * size - 1], dtype=torch.int32, device=device)
    tables = torch.arange(10, dtype=torch.int32, device=device).view(5, 2)
    torch.manual_seed(7)
    width = store.layout.num_kv_heads * store.layout.head_dim
    k, v = (torch.randn(10 * size, width, device=device).to(torch.bfloat16) for _ in range(2))
    store.write(0, torch.arange(10 * size, device=device), k, v)
    return Batch(
        token_ids=torch.zeros(5, dtype=torch.int64, device=device),
        positions=lengths.long() - 1,
        query_starts=torch.arange(6, dtype=torch.int32, device=device),
        seq_lens=lengths,
        slots=(lengths.long(),),
        block_tables=(tables,),
        logit_rows=lengths.long()[:0],
        max_query=1,
        max_seq=2 * size,
    )


def test_drafts_are_looked_up_as_the_spec_does() -> None:
    """Texts of few words over pages in any order; the longest match of two to four tokens, its latest occurrence."""
    device = torch.device("cuda" if ON_GPU else "cpu")
    draw = random.Random(3)
    size, depth = 4, 7
    texts = [[draw.randrange(3) for _ in range(length)] for length in (1, 2, 3, 9, 26, 40)]
    texts += [[7, 7, 7], [5, 6, 5, 6], list(range(30))]
    width = -(-max(map(len, texts)) // size)
    places = list(range(len(texts) * width))
    draw.shuffle(places)
    table = torch.tensor(places, dtype=torch.int32).view(len(texts), width)
    tokens = torch.full((len(places), size), -5, dtype=torch.int32)
    for row, text in enumerate(texts):
        for place, token in enumerate(text[:-1]):
            tokens[table[row, place // size], place % size] = token
    lengths = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32)
    drawn = torch.tensor([text[-1] for text in texts])
    guessed = torch.arange(len(texts))[:, None] * 10 + torch.tensor([100, 101])
    moved = [each.to(device) for each in (tokens, table, lengths, drawn, guessed)]
    found = look_up_drafts(*moved, depth).tolist()
    for text, own, by_head in zip(texts, found, guessed.tolist(), strict=True):
        place, length = longest_match(text)
        assert own == (continuation(text, place, depth) if length > 1 else by_head + by_head[-1:] * (depth - 2))


def longest_match(text: list[int]) -> tuple[int, int]:
    """(where it goes on, length) of the longest ending, up to four tokens, that occurred before."""
    for length in (4, 3, 2):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                return end, length
    return 0, 0


def test_a_head_with_lookup_changes_nothing(tmp_path: Path) -> None:
    """A real head, bad as it is, over a text that repeats itself."""
    folder = write_config(tmp_path / "model", **({} if ON_GPU else {"num_hidden_layers": 1}))
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH - 2, ignore_eos=True)
    prompt = [3, 9, 14, 3, 9, 14, 3]
    with engine(folder, "cuda_graph", page_size=4) as llm:
        wanted = llm.generate([prompt], params)[0].outputs[0].token_ids
        speculate = make_head(tmp_path / "head", llm, "eagle", (0,))
    with engine(folder, "cuda_graph", page_size=4, speculate=speculate, draft_tokens=4) as llm:
        runtime: Any = llm.parts.runtime
        runtime.runner.speculator.lengths.pays = lambda requests, _depth, _tokens: bool(requests)
        assert llm.generate([prompt], params)[0].outputs[0].token_ids == wanted
        assert runtime.runner.speculator.drafter.guessed_depth == 4  # further than the head goes
        assert llm.stats.num_drafted > 0
        llm.parts.core.scheduler.kv.check()


@pytest.mark.parametrize("together", [1, 2] if ON_GPU else [2])
def test_drafts_made_in_the_step_change_nothing(tmp_path: Path, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_config(tmp_path / "model", **({} if ON_GPU else {"num_hidden_layers": 1}))
    asked = prompts(2, 9)[:together]
    params = [
        SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=3, seed=5, max_tokens=LENGTH - 3, ignore_eos=True),
    ][:together]
    with engine(folder, "cuda_graph", page_size=4) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(asked, params)]
        speculate = make_head(tmp_path / "head", llm, "eagle", (0,))
    followed: list[bool] = []
    expected = Checks.are_expected
    monkeypatch.setattr(Checks, "are_expected", lambda *args: followed.append(expected(*args)) or followed[-1])
    with engine(folder, "cuda_graph", page_size=4, speculate=speculate, draft_tokens=DEPTH) as llm:
        runtime: Any = llm.parts.runtime
        runtime.executor.attach_drafter(True, Bigrams(plain, runtime.model.device))
        runtime.runner.speculator.lengths.pays = lambda requests, _depth, _tokens: bool(requests)
        drafted = [output.outputs[0].token_ids for output in llm.generate(asked, params)]
        llm.parts.core.scheduler.kv.check()
        assert llm.stats.num_accepted > 3
    assert drafted == plain
    assert sum(followed) > len(followed) // 2 > 0  # most steps were queued before they were asked for


def test_a_request_that_ends_or_joins_drops_the_queued_step(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", **({} if ON_GPU else {"num_hidden_layers": 1}))
    first, second = prompts(2, 9)
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    with engine(folder, "cuda_graph") as llm:
        alone = llm.generate([first], params)[0].outputs[0].token_ids
        speculate = make_head(tmp_path / "head", llm, "eagle")
    with engine(folder, "cuda_graph", speculate=speculate, draft_tokens=DEPTH) as llm:
        runtime: Any = llm.parts.runtime
        runtime.executor.attach_drafter(True, Bigrams([alone], runtime.model.device))
        runtime.runner.speculator.lengths.pays = lambda requests, _depth, _tokens: bool(requests)
        core, intake = llm.parts.core, llm.parts.intake
        core.add(intake.request(first, params, "one"))
        found: list[int] = []
        step = 0
        while core.has_work:
            step += 1
            if step == 3:
                core.add(intake.request(second, params, "two"))
            if step == 5:
                core.cancel("two")
            found += [token for event in core.step() if event.request_id == "one" for token in event.token_ids]
        assert found == alone
        assert runtime.executor.num_dropped >= 1
        core.scheduler.kv.check()
