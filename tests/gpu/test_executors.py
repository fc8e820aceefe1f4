"""The GPU executors against the plain torch spec: on a GPU if there is one, else under Triton's interpreter.

test_interpreted.py runs this file in a process of its own where there is no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_vs_vllm import packed_config
from tests.gpu.models import greedy, worst_choice, write_config
from tests.interpreter import slow_if_interpreted, slow_interpreted
from tokenmill import LLM, SamplingParams
from tokenmill.errors import UserError
from tokenmill.runtime.executors.cuda import prefix_runs

ON_GPU = torch.cuda.is_available()
if os.environ.get("TRITON_INTERPRET") != "1" and not ON_GPU:
    pytest.skip("no GPU: test_interpreted.py runs this file under the interpreter", allow_module_level=True)

# The interpreter takes milliseconds per program: shapes and lengths are as small as the code paths allow.
LENGTH, LONGEST = (20, 40) if ON_GPU else (3, 18)
SHALLOW: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1},
    "qwen3": {"num_hidden_layers": 1},
    "deepseek3": {"num_hidden_layers": 1},
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    **{name: {"num_hidden_layers": 1} for name in ("stablelm", "gpt2", "olmo2", "qwen3_fp8")},
    "gpt_oss": {},
}
COMMON: dict[str, Any] = {"load_format": "dummy", "context": 128, "page_size": 16, "batch_tokens": 24}
NEAR_TIE = 0.02  # in log-probability: bf16 activations against float32


@contextmanager
def engine(folder: Path, executor: str, **options: Any) -> Iterator[LLM]:
    """A GPU engine (under the interpreter: the same code on CPU tensors)."""
    device = {"device": "cuda"} if ON_GPU else {"device": "cpu", "kernels": "triton", "kv_cache_dtype": "bfloat16"}
    torch.manual_seed(0)  # weights are made up on the device
    with LLM(folder, executor=executor, **(COMMON | device | options)) as llm:
        yield llm


@contextmanager
def spec(folder: Path) -> Iterator[LLM]:
    options = COMMON | {"batch_tokens": 128}
    with LLM(folder, device="cpu", kernels="ref", executor="eager", kv_cache_dtype="float32", **options) as llm:
        yield llm


def config(folder: Path, name: str = "llama") -> Path:
    return write_config(folder, name, **({} if ON_GPU else SHALLOW[name]))


def prompts(count: int, longest: int = LONGEST) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(3, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, 131, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture
def same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dummy weights are drawn where they lie: for a comparison across devices all are drawn on the CPU."""
    from tokenmill.model import dummy_reader
    from tokenmill.model.dummy_reader import DummyReader

    monkeypatch.setattr(
        dummy_reader, "DummyReader", lambda checkpoint, _device: DummyReader(checkpoint, torch.device("cpu"))
    )


@pytest.mark.usefixtures("same_weights")
@pytest.mark.parametrize(
    "name",
    [
        *("llama", *(["qwen3"] if ON_GPU else []), "gemma3", "deepseek3"),
        *(pytest.param(name, marks=slow_interpreted) for name in ("stablelm", "gpt2", "olmo2", "gpt_oss")),
    ],
)
def test_greedy_tokens_are_those_of_the_spec_up_to_near_ties(tmp_path: Path, name: str) -> None:
    folder = config(tmp_path, name)
    asked = prompts(3)
    with engine(folder, "cuda_graph") as llm:
        answers = greedy(llm, asked, LENGTH)  # across a page, in chunks of prompts beside decodes
        assert llm.parts.runtime.executor.name == "cuda_graph"
    with spec(folder) as reference:
        for prompt, answer in zip(asked, answers, strict=True):
            assert len(answer) == LENGTH
            assert worst_choice(reference, prompt, answer) < NEAR_TIE


@pytest.mark.usefixtures("same_weights")
@pytest.mark.parametrize("pages", ["float16", pytest.param("fp8", marks=slow_interpreted)])
def test_float16_by_the_checkpoint_is_closer_to_the_spec(tmp_path: Path, pages: str) -> None:
    """Three bits more than bf16: a checkpoint that says float16 is computed in it, with pages of that type."""
    folder = write_config(tmp_path, torch_dtype="float16", **({} if ON_GPU else SHALLOW["llama"]))
    asked, options = prompts(3), {} if ON_GPU and pages == "float16" else {"kv_cache_dtype": pages}
    with engine(folder, "cuda_graph", **options) as llm:
        answers = greedy(llm, asked, LENGTH)
        runtime, stated = llm.parts.runtime, llm.parts.config
        assert (runtime.model.dtype, stated.dtype, stated.kv_cache_dtype) == ("float16", "float16", pages)
        assert {getattr(each.kernel.run, "whole", each.kernel.run).weight.dtype  # type: ignore[union-attr]
                for each in runtime.model.weights.values() if each.kernel} == {torch.float16}  # fmt: skip
    with spec(folder) as reference:
        worst = max(worst_choice(reference, *pair) for pair in zip(asked, answers, strict=True))
        assert worst < (NEAR_TIE / 4 if pages == "float16" else 0.5)


def test_float16_is_declined_by_name(tmp_path: Path) -> None:
    """Explicitly, with the remedy; a checkpoint that says it is computed in bfloat16."""
    for name, reason in (("gemma3", "exceed its range"), ("deepseek3", "latent attention"), ("gpt_oss", "experts")):
        folder = config(tmp_path / name, name)
        with pytest.raises(UserError, match=reason), engine(folder, "cuda_eager", dtype="float16"):
            pass
    folder = write_config(tmp_path / "says", "gemma3", torch_dtype="float16", **({} if ON_GPU else SHALLOW["gemma3"]))
    with engine(folder, "cuda_eager") as llm:
        assert llm.parts.runtime.model.dtype == "bfloat16"
        assert "exceed its range" in llm.parts.config.source("dtype")


@slow_if_interpreted
@pytest.mark.usefixtures("same_weights")
def test_float8_in_blocks_is_captured_and_stays_close(tmp_path: Path) -> None:
    folder, asked = config(tmp_path, "qwen3_fp8"), prompts(2)
    with engine(folder, "cuda_graph") as llm:
        answers = greedy(llm, asked, LENGTH)
        used = {
            type(weight.kernel.run).__name__ for weight in llm.parts.runtime.model.weights.values() if weight.kernel
        }
        assert used == {"JoinedRows", "BlockLinear", "RouterLinear", "DenseLinear"}, "none by the torch spec"
    with spec(folder) as reference:
        assert max(worst_choice(reference, *pair) for pair in zip(asked, answers, strict=True)) < 0.5


@slow_if_interpreted
@pytest.mark.usefixtures("same_weights")
def test_four_bits_with_float8_inputs_are_captured_and_stay_close(tmp_path: Path) -> None:
    """A prompt of more rows than are multiplied in 16 bits, then steps of few."""
    changes = {} if ON_GPU else SHALLOW["llama"]
    folder = write_config(tmp_path, quantization_config=packed_config(32), **changes)
    asked = [list(range(3, 43)), [5, 6, 7]]
    with engine(folder, "cuda_graph", batch_tokens=48) as llm:
        answers = greedy(llm, asked, LENGTH)
        weights = llm.parts.runtime.model.weights.values()
        runs = [weight.kernel.run for weight in weights if weight.kernel]
        used = {type(getattr(run, "whole", run)).__name__ for run in runs}
        assert used == {"RoundedGroupedLinear", "DenseLinear"}, "none by the torch spec"
    with spec(folder) as reference:
        assert max(worst_choice(reference, *pair) for pair in zip(asked, answers, strict=True)) < 0.5


@pytest.mark.usefixtures("same_weights")
@pytest.mark.parametrize("dtype", ["fp8", pytest.param("fp8_per_token_head", marks=slow_interpreted)])
def test_latent_rows_in_eight_bits_stay_close(tmp_path: Path, dtype: str) -> None:
    """By the kernel, and by the torch spec where there is none."""
    folder, asked = config(tmp_path, "deepseek3"), prompts(2)
    with engine(folder, "cuda_eager", kv_cache_dtype=dtype) as llm:
        answers = greedy(llm, asked, LENGTH)
    with spec(folder) as reference:
        assert max(worst_choice(reference, *pair) for pair in zip(asked, answers, strict=True)) < 0.5


@pytest.mark.usefixtures("same_weights")
@pytest.mark.parametrize(
    "changes", [{"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}, {"quantization": "int4"}], ids=str
)
def test_rounded_weights_and_pages_stay_close(tmp_path: Path, changes: dict[str, str]) -> None:
    if "quantization" in changes and not ON_GPU:
        with pytest.raises(UserError, match="on a GPU only"), engine(write_config(tmp_path), "auto", **changes):
            pass
        return
    folder = write_config(tmp_path, hidden_size=128, intermediate_size=256) if ON_GPU else config(tmp_path)
    asked = prompts(2)
    with engine(folder, "cuda_eager", **changes) as llm:
        answers = greedy(llm, asked, LENGTH)
    with spec(folder) as reference:
        assert max(worst_choice(reference, *pair) for pair in zip(asked, answers, strict=True)) < 0.5


def test_graph_and_eager_choose_the_same_tokens(tmp_path: Path) -> None:
    folder = config(tmp_path)
    asked = prompts(3, 9)
    params = [
        SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
        SamplingParams(temperature=0.8, top_k=20, seed=7, max_tokens=LENGTH, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.9, seed=8, max_tokens=3, ignore_eos=True, n=2),
    ]
    found = {}
    for executor in ("cuda_eager", "cuda_graph"):
        with engine(folder, executor) as llm:
            outputs = llm.generate(asked, params)
            found[executor] = [[each.token_ids for each in output.outputs] for output in outputs]
            llm.parts.core.scheduler.kv.check()
    assert found["cuda_graph"] == found["cuda_eager"]


def test_rows_with_features_are_drawn_among_others(tmp_path: Path) -> None:
    folder = config(tmp_path)
    banned = dict.fromkeys(range(130), -100.0)
    params = [
        SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logit_bias=banned),
        SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
    ]
    prompt = prompts(1, 9)[0]
    with engine(folder, "cuda_graph") as llm:
        biased, reported, plain = (each.outputs[0] for each in llm.generate([prompt] * 3, params))
    assert biased.token_ids == [130] * 2
    assert reported.token_ids == plain.token_ids
    assert reported.logprobs is not None


def note_queued(llm: LLM, queued: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what the executor launches ahead."""
    executor: Any = llm.parts.runtime.executor
    launch = executor._launch_next

    def noting(*rows: Any) -> Any:
        queued.append(launch(*rows))
        return queued[-1]

    monkeypatch.setattr(executor, "_launch_next", noting)


def test_penalties_and_log_probabilities_are_part_of_queued_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens and log-probabilities as step by step, also when requests end and others join."""
    folder = config(tmp_path)
    asked = prompts(6, 9)
    common: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    longest = 7 if ON_GPU else 5
    params = [
        SamplingParams(max_tokens=longest, repetition_penalty=1.8, **common),
        SamplingParams(max_tokens=5, frequency_penalty=1.5, presence_penalty=0.5, logprobs=3, **common),
        SamplingParams(max_tokens=longest, **common),
        SamplingParams(max_tokens=3, logprobs=0, **common),
        SamplingParams(max_tokens=longest, temperature=0.9, seed=5, top_k=20, presence_penalty=2.0, ignore_eos=True),
        SamplingParams(max_tokens=longest - 2, logprobs=5, **common),
    ]
    found = {}
    queued: list[Any] = []
    for executor in ("cuda_eager", "cuda_graph"):
        with engine(folder, executor) as llm:
            if executor == "cuda_graph":
                note_queued(llm, queued, monkeypatch)
            outputs = [each.outputs[0] for each in llm.generate(asked, params)]
            again = [each.outputs[0] for each in llm.generate(asked[:1], params[:1])]  # in a place that others left
            found[executor] = [*outputs, *again]
            llm.parts.core.scheduler.kv.check()
    assert sum(step is not None for step in queued) > 4
    for mine, other in zip(found["cuda_graph"], found["cuda_eager"], strict=True):
        assert mine.token_ids == other.token_ids
        assert (mine.logprobs is None) == (other.logprobs is None)
        for entries, wanted in zip(mine.logprobs or [], other.logprobs or [], strict=True):
            assert list(entries) == list(wanted)
            for token, entry in entries.items():
                assert entry.logprob == pytest.approx(wanted[token].logprob, abs=0.02)
                assert entry.rank == wanted[token].rank
    assert len(set(found["cuda_graph"][0].token_ids)) == longest  # none came twice


def test_a_queued_step_that_nobody_asks_for_is_dropped(tmp_path: Path) -> None:
    """A request that ends, or one that joins, between two steps: the others' tokens do not change."""
    folder = config(tmp_path)
    first, second = prompts(2, 9)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with engine(folder, "cuda_graph") as llm:
        alone = greedy(llm, [first], 8)[0]
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
        executor: Any = llm.parts.runtime.executor
        assert executor.num_dropped >= 1
        llm.parts.core.scheduler.kv.check()


def test_a_step_without_rows_stores_nothing(tmp_path: Path) -> None:
    """What `prepare` runs between requests must not touch what they keep."""
    with engine(config(tmp_path), "cuda_graph") as llm:
        greedy(llm, prompts(2, 9), 2)
        executor: Any = llm.parts.runtime.executor
        pages = [torch.stack(executor.store.stored(slot)) for slot in range(executor.store.layout.layers_per_page)]
        before = [each.clone() for each in pages]
        with torch.inference_mode():
            decodes = {kind for kind in executor._kinds() if getattr(kind, "rows", 0) in (1, 4) and not kind.filtered}
            for kind in decodes:
                executor._inputs.clear()
                executor._step(kind)
            steps = executor._prompt_steps()
            steps.prepare(steps.inputs.likely_kinds()[0])
        after = [torch.stack(executor.store.stored(slot)) for slot in range(executor.store.layout.layers_per_page)]
        assert all(
            torch.equal(one.view(torch.uint8), two.view(torch.uint8)) for one, two in zip(before, after, strict=True)
        )


def test_padded_prompts_choose_the_same_tokens(tmp_path: Path) -> None:
    """Steps with prompts as they are captured: chunks beside decodes, in buckets of tokens and of sequences."""
    folder, asked = config(tmp_path), [*prompts(2, 9), prompts(1)[0] * 2]
    found = []
    for padded in (False, True):
        with engine(folder, "cuda_graph") as llm:
            executor: Any = llm.parts.runtime.executor
            executor._prompts = executor._prompt_steps() if padded else None
            answers = greedy(llm, asked, 3)
            answers += greedy(llm, [[*asked[2][:17], 5, 6]], 2)  # behind a page that is there already
            found.append(answers)
            if padded:
                assert len(executor._prompts._graphs) > 1
                assert not ON_GPU or executor._prompts.num_captured >= 1
    assert found[0] == found[1]


@slow_if_interpreted
def test_prepared_steps_choose_the_same_tokens(tmp_path: Path) -> None:
    folder, asked = config(tmp_path), prompts(3, 9)
    params = [SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)] * 2
    params += [SamplingParams(temperature=0.8, top_k=20, seed=7, max_tokens=LENGTH, ignore_eos=True)]
    found = []
    for prepared in (False, True):
        with engine(folder, "cuda_graph", concurrency=8) as llm:
            if prepared:
                greedy(llm, asked[:1], 2)
                llm.warm_up()
                executor: Any = llm.parts.runtime.executor
                assert not ON_GPU or all(graph.graph is not None for graph in executor._graphs.values())
                assert not llm.parts.runtime.runner.prepare()
            found.append([output.outputs[0].token_ids for output in llm.generate(asked, params)])
    assert found[0] == found[1]


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=slow_interpreted)])
def test_shared_prefixes_are_read_once_and_change_nothing(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = config(tmp_path)
    prefixes = [head[:3] * 6 for head in prompts(count, 9)]  # a page and a bit
    asked = [[*prefix, *tail] for prefix in prefixes for tail in prompts(4 - count, 5)]
    with engine(folder, "cuda_graph") as llm:
        apart = greedy(llm, asked, 3)
    for limit in ("_MIN_SAVED_READS", "_MIN_SAVED_BY_RUN"):
        monkeypatch.setattr(prefix_runs, limit, 1)
    with engine(folder, "cuda_graph") as llm:
        greedy(llm, [[*prefix, 5] for prefix in prefixes], 1)  # their pages are in the cache for the others
        together = greedy(llm, asked, 3)
        executor: Any = llm.parts.runtime.executor
        assert {kind.prefixes for kind in executor._graphs} >= {prefix_runs.MAX_RUNS if count > 1 else 1}
    assert together == apart
