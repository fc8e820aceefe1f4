"""What an engine does besides plain requests, on ranks as in one process: adapters, preemption, siblings, drafts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.tiny_models import make, write_tokenizer
from tests.rank_runs import FOLDER, Answer, assert_near, generate, grid, make_llm, model, prompts
from tokenmill.checkpoint.adapters.adapter import Adapter, AdapterMatrix
from tokenmill.checkpoint.adapters.fit import HEAD, module_shapes
from tokenmill.checkpoint.adapters.write import write_adapter
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import UserError
from tokenmill.types import SamplingParams

_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
# Name -> matrices that it changes, and how
_ADAPTERS: dict[str, tuple[tuple[str, ...], str]] = {
    "every": ((*_ATTENTION, *_MLP), ""),
    "edges": (("o_proj", "embed_tokens", "lm_head"), ""),
    "replaces": (("gate_proj",), "head"),
    "dora": ((*_ATTENTION, *_MLP), "dora"),
}


@cache
def _adapter(base: str, name: str) -> Path:
    targets, kind = _ADAPTERS[name]
    description = open_checkpoint(model(base)).description
    generator = torch.Generator().manual_seed(len(name))
    matrices, shapes = {}, module_shapes(description)
    for module, (outputs, inputs) in shapes.items():
        if module.rpartition(".")[2] in targets:
            a = torch.randn(4, inputs, generator=generator) / inputs**0.5
            b = torch.randn(outputs, 4, generator=generator) / 2
            norms = 1 + torch.rand(outputs, generator=generator) if kind == "dora" else None
            matrices[module] = AdapterMatrix(module, a, b, 0.5, norms)
    saved = {f"{HEAD}.weight": torch.randn(*shapes[HEAD], generator=generator) / 8} if kind == "head" else {}
    folder = FOLDER / f"{base}-{name}"
    write_adapter(Adapter(name, matrices, saved, base_name=base), folder)
    return folder


def _adapted(base: str, names: tuple[str, ...], **options: Any) -> Answer:
    """Rows of several adapters and of the base in one batch. All adapters are on the device before: which rows are
    computed together must not depend on how long one takes to come."""
    first, *later = names
    loras = {first: str(_adapter(base, first))}
    with make_llm(base, loras=loras, max_loras=len(names), max_lora_rank=8, **options) as llm:
        for name in later:
            llm.load_lora(name, _adapter(base, name))
        for name in names:
            llm.generate([prompts()[0]], SamplingParams(max_tokens=1), lora=name)
        using = [None, *names, *names, *names]
        return generate(llm, lora=using[:5]) + generate(llm, lora=using[1:6])


@cache
def _adapted_alone(base: str, names: tuple[str, ...]) -> Answer:
    return _adapted(base, names, executor="eager")


_EXACT = [
    ("llama", ("every", "edges", "replaces", "dora"), 2, 1),
    ("llama", ("every", "edges", "replaces", "dora"), 2, 2),
    ("gemma3", ("every", "edges"), 2, 1),
    ("gptq", ("every", "dora"), 2, 1),
]


@pytest.mark.parametrize(("base", "names", "tp", "pp"), _EXACT)
def test_adapters_on_exact_ranks_have_the_bits_of_one_process(
    base: str, names: tuple[str, ...], tp: int, pp: int
) -> None:
    assert _adapted(base, names, exact_ranks=True, **grid(tp, pp)) == _adapted_alone(base, names)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 2)])
def test_adapters_on_fast_ranks_differ_by_rounding_only(tp: int, pp: int) -> None:
    names = ("every", "edges", "replaces")
    assert_near(_adapted("llama", names, **grid(tp, pp)), _adapted_alone("llama", names))


def test_adapters_that_ranks_cannot_take_are_refused_and_change_nothing() -> None:
    with make_llm("llama", enable_lora=True, max_lora_rank=8, **grid(2)) as llm:
        with pytest.raises(UserError, match="DoRA"):
            llm.load_lora("dora", _adapter("llama", "dora"))
        assert generate(llm)
    with make_llm("qwen3_moe", enable_lora=True, max_lora_rank=8, **grid(1, 2)) as llm:
        folder = FOLDER / "experts"
        shapes = module_shapes(llm.parts.description)
        router = [name for name in shapes if name.endswith("mlp.gate")][
            -1
        ]  # of the last stage: rank 0 does not have it
        outputs, inputs = shapes[router]
        matrix = AdapterMatrix(router, torch.ones(2, inputs), torch.ones(outputs, 2), 1.0)
        write_adapter(Adapter("router", {router: matrix}), folder)
        with pytest.raises(UserError, match="an expert or its router"):
            llm.load_lora("router", folder)
        assert generate(llm)


# --- preemption, siblings, prefix hits and drafts ---

_PAGES, _PAGE_BYTES = 15, 6144  # little more than one request; of three layers


def _many() -> list[SamplingParams]:
    """Two siblings of each, long enough to drive each other out."""
    return [
        SamplingParams(n=2, max_tokens=20, temperature=0.9 * (n % 2), seed=n, logprobs=0, ignore_eos=True)
        for n in range(len(prompts()))
    ]


@cache
def _draft_model() -> Path:
    folder = FOLDER / "draft"
    make("llama", folder)
    write_tokenizer(folder)
    return folder


def _pressed(**options: Any) -> Answer:
    # With stages the one of two layers decides how many pages there are.
    memory = _PAGES * _PAGE_BYTES * (4 if options.get("pipeline_parallel_size", 1) > 1 else 3) // 3
    with make_llm("llama", memory=memory, **options) as llm:
        assert llm.parts.runtime.budget.num_pages == _PAGES
        answers = generate(llm, _many())
        stats = llm.stats
        assert stats.num_prefix_hit_tokens > 0
        if (drafter := options.get("speculate", "off")) == "off":
            assert stats.num_preemptions > 0  # with drafts they end sooner
        elif not drafter.startswith("draft:"):  # a model is asked only while that is measured to pay
            assert stats.num_accepted > 0
        return answers


@cache
def _pressed_alone(drafter: str) -> Answer:
    return _pressed(executor="eager", speculate=_drafter(drafter))


def _drafter(name: str) -> str:
    return f"draft:{_draft_model()}" if name == "draft" else name


@pytest.mark.parametrize("drafter", ["off", "ngram", "suffix", "draft"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_preemption_siblings_prefix_hits_and_drafts(drafter: str, tp: int, pp: int) -> None:
    """Drafts come from rank 0; siblings copy pages; all ranks have as many pages as one process."""
    found = _pressed(speculate=_drafter(drafter), exact_ranks=True, **grid(tp, pp))
    assert found == _pressed_alone(drafter)


def test_fast_ranks_under_pressure() -> None:
    found = _pressed(speculate="ngram", **grid(2))
    assert_near(found, _pressed_alone("ngram"))
