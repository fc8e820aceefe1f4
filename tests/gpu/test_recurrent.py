"""Models with recurrent layers on the GPU executors against the plain torch spec, which reads the same random weights.

test_interpreted.py runs this file in a process of its own where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.models import greedy, worst_choice
from tests.gpu.test_executors import ON_GPU, prompts
from tests.gpu.test_speculation import Oracle, TakeAll
from tests.interpreter import slow_interpreted
from tests.parity.tiny_models import make, write_tokenizer
from tokenmill import LLM, SamplingParams
from tokenmill.model.layers.experts import expert_layers

LENGTH = 20 if ON_GPU else 3
NEAR_TIE = 0.1  # in log-probability: bf16 activations against float32, with weights larger than usual ones
NAMES = ["bamba", "qwen3_next-experts"]
MORE = ["mamba", "mamba2", "jamba", "granitemoehybrid-experts", "falcon_h1", "qwen3_5"]
COMMON: dict[str, Any] = {"context": 96, "page_size": 16, "batch_tokens": 24, "concurrency": 4, "memory": 64 << 20}


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    """Models that were made already, by name."""
    return {}


@pytest.fixture
def folder(request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    name = request.param
    if name not in folders:
        path = tmp_path_factory.mktemp(name)
        try:
            model = make(name, path)
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            if name in NAMES:
                raise
            pytest.skip(f"this version of transformers makes no {name}: {type(problem).__name__}: {problem}")
        model.to(torch.bfloat16).save_pretrained(path)  # both engines read the same numbers
        write_tokenizer(path)
        folders[name] = path
    return folders[name]


@contextmanager
def engine(folder: Path, executor: str, **options: Any) -> Iterator[LLM]:
    """A GPU engine (under the interpreter: the same code on CPU tensors)."""
    device = {"device": "cuda"} if ON_GPU else {"device": "cpu", "kernels": "triton", "kv_cache_dtype": "bfloat16"}
    with LLM(folder, executor=executor, **(COMMON | device | options)) as llm:
        assert llm.parts.runtime.executor.name == executor
        yield llm


@contextmanager
def spec(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", kernels="ref", executor="eager", kv_cache_dtype="float32", **COMMON) as llm:
        yield llm


@pytest.mark.parametrize(
    "folder", [*NAMES, *(pytest.param(name, marks=slow_interpreted) for name in MORE)], indirect=True
)
def test_greedy_tokens_are_those_of_the_spec_up_to_near_ties(folder: Path) -> None:
    """Chunks of prompts beside decodes, states resumed across chunks, captured decode steps."""
    asked = prompts(3)
    with engine(folder, "cuda_graph") as llm:
        answers = greedy(llm, asked, LENGTH)
        llm.parts.core.scheduler.kv.check()
    with spec(folder) as reference:
        for prompt, answer in zip(asked, answers, strict=True):
            assert worst_choice(reference, prompt, answer) < NEAR_TIE


@pytest.mark.parametrize("folder", ["bamba"], indirect=True)
def test_padded_prompts_and_snapshots_choose_the_same_tokens(folder: Path) -> None:
    """Steps with prompts as they are captured, and a prompt behind a page whose state was kept."""
    asked = [*prompts(2, 9), (prompts(1)[0] * 8)[:30]]
    found = []
    for padded in (False, True):
        with engine(folder, "cuda_graph") as llm:
            executor: Any = llm.parts.runtime.executor
            executor._prompts = executor._prompt_steps() if padded else None
            answers = greedy(llm, asked, 2)
            answers += greedy(llm, [[*asked[2][:17], 5, 6]], 2)
            assert llm.parts.core.scheduler.kv.stats.num_prefix_hit_tokens >= 16
            found.append(answers)
    assert found[0] == found[1]


@pytest.mark.parametrize("folder", ["bamba"], indirect=True)
def test_a_queued_step_that_is_dropped_changes_no_state(folder: Path) -> None:
    """A request that joins and one that is cancelled between two steps: the other's tokens do not change."""
    first, second = prompts(2, 9)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with engine(folder, "cuda_graph") as llm:
        executor: Any = llm.parts.runtime.executor
        states, launch = executor.store.states, executor._launch_rows
        launched: list[int] = []
        executor._launch_rows = lambda rows, *how: (launched.append(len(rows)), launch(rows, *how))[1]
        alone = greedy(llm, [first], 8)[0]
        assert len(launched) < 4, "no queued step was used"
        dropped = executor.num_dropped
        core, intake = llm.parts.core, llm.parts.intake
        core.add(intake.request(first, params, "one"))
        found: list[int] = []
        for step in range(14):
            if step == 3:
                core.add(intake.request(second, params, "two"))
            if step == 5:
                core.cancel("two")
            found += [token for event in core.step() if event.request_id == "one" for token in event.token_ids]
        assert found == alone
        assert executor.num_dropped > dropped
        executor._drop()
        assert sorted([*states.places, *states.spares]) == list(range(states.num_slots + len(states.spares)))
        core.scheduler.kv.check()


@pytest.mark.parametrize("folder", ["bamba"], indirect=True)
def test_a_step_without_rows_keeps_all_states(folder: Path) -> None:
    with engine(folder, "cuda_graph") as llm:
        greedy(llm, prompts(2, 9), 2)
        executor: Any = llm.parts.runtime.executor
        states = executor.store.states
        pieces = [piece.nan_to_num(7.0) for piece in states._pieces]
        with torch.inference_mode():
            for kind in [kind for kind in executor._kinds() if getattr(kind, "rows", 0) in (1, 4)][:2]:
                executor._inputs.clear()
                executor._step(kind)
            steps = executor._prompt_steps()
            steps.prepare(steps.inputs.likely_kinds()[0])
        after = [piece.nan_to_num(7.0) for piece in states._pieces]
        assert all(torch.equal(one, two) for one, two in zip(pieces, after, strict=True))


@pytest.mark.parametrize("folder", ["bamba"], indirect=True)
def test_rejected_drafts_leave_no_trace_in_the_states(folder: Path) -> None:
    asked = prompts(2, 9)
    with engine(folder, "cuda_graph") as llm:
        plain = greedy(llm, asked, LENGTH + 3)
    with engine(folder, "cuda_graph", speculate="ngram", draft_tokens=3) as llm:
        speculator: Any = llm.parts.runtime.runner.speculator
        speculator.drafter = Oracle(list(zip(asked, plain, strict=True)))
        speculator.lengths = TakeAll()
        drafted = greedy(llm, asked, LENGTH + 3)
    with spec(folder) as reference:
        assert max(worst_choice(reference, *pair) for pair in zip(asked, drafted, strict=True)) < NEAR_TIE


@pytest.mark.parametrize("folder", ["qwen3_next-experts"], indirect=True)
def test_experts_of_hybrid_blocks_are_one_stack(folder: Path) -> None:
    with engine(folder, "cuda_graph") as llm:
        layers = expert_layers(llm.parts.runtime.model.decoder.blocks)
        assert layers
        assert all(layer.stacks.kernel is not None and layer.stacks.kernel.backend == "triton" for layer in layers)
