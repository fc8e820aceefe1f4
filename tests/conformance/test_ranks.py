"""Several ranks compute what one process computes: exact mode the same bits, fast mode to rounding.

Ranks are threads that take turns, with the messages and the code of processes; a few runs are between processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.rank_runs import CONTEXT, FILES, alone, assert_near, generate, make_llm, model, run, threads
from tokenmill.engine import lanes
from tokenmill.engine.llm import LLM
from tokenmill.errors import UserError
from tokenmill.kernels import cpu
from tokenmill.runtime.ranks import context, pieces
from tokenmill.runtime.ranks.recorded import RankProgram
from tokenmill.runtime.ranks.threads import ThreadGroup

_GRIDS = [
    ("llama", 2, 1, {}),
    ("llama", 4, 1, {}),  # two KV heads, each copied
    ("llama", 1, 2, {}),
    ("llama", 2, 2, {}),
    ("gemma3", 2, 1, {}),
    ("gemma3", 1, 2, {}),
    ("qwen2", 2, 1, {}),  # biases, tied embeddings
    ("qwen3_moe", 2, 1, {}),
    ("qwen3_moe", 2, 1, {"expert_parallel": True}),
    ("gpt_oss", 2, 1, {"expert_parallel": True}),  # sinks, biases of experts
    ("deepseek_v3", 2, 1, {}),
    ("deepseek_v3", 2, 2, {"expert_parallel": True}),
    ("qwen3_next-experts", 2, 1, {}),
    ("qwen3_next-experts", 1, 2, {}),
    ("gptq", 2, 1, {}),
    ("awq", 2, 1, {}),
    ("fp8", 2, 1, {}),
    ("fp8 blocks", 2, 1, {}),
    ("w8a8", 2, 1, {}),
    ("gguf", 2, 1, {}),
]


@pytest.mark.parametrize(("name", "tp", "pp", "options"), _GRIDS)
def test_exact_ranks_give_the_bits_of_one_process(name: str, tp: int, pp: int, options: dict[str, Any]) -> None:
    found = threads(name, tp, pp, exact_ranks=True, **options)
    if name == "qwen3_next-experts" and tp > 1:  # torch's silu of 16 values, a rank's half, is not that of 32
        assert_near(found, alone(name))
    else:
        assert found == alone(name)


def _fast_grids() -> list[Any]:
    """Quantized files take longer here, by the reference: all but one are left to the full suite."""
    later = {*FILES, "gguf"} - {"awq"}
    grids = [each for each in _GRIDS if each[1] > 1]
    return [pytest.param(*each, marks=pytest.mark.slow if each[0] in later else ()) for each in grids]


@pytest.mark.parametrize(("name", "tp", "pp", "options"), _fast_grids())
def test_fast_ranks_differ_by_rounding_only(name: str, tp: int, pp: int, options: dict[str, Any]) -> None:
    """Integer kernels round their inputs, which makes more of a last bit: quantized files by the float reference."""
    kernels = "ref" if name in (*FILES, "gguf") else None
    assert_near(threads(name, tp, pp, kernels=kernels, **options), alone(name, kernels))


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe", "deepseek_v3", "qwen3_next-experts", "gptq"])
def test_prompts_divided_among_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Context parallelism: each rank computes some tokens, and all keep all keys and values. Hybrids stay whole."""
    monkeypatch.setattr(context, "MIN_TOKENS", 3)
    collect, rows = ThreadGroup.collect, []

    def count(group: ThreadGroup, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        rows.append(x.shape[0])
        return collect(group, x, widths)

    monkeypatch.setattr(ThreadGroup, "collect", count)
    assert run(name, rank_backend="threads", context_parallel_size=2) == alone(name)
    assert bool(rows) == (name != "qwen3_next-experts")


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "qwen3_next-experts"])
def test_steps_that_pass_the_pipeline_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut anywhere, inside prompts too: the same bits, with keys and rows of earlier pieces. Hybrids stay whole."""
    monkeypatch.setattr(pieces, "MIN_TOKENS", 3)
    monkeypatch.setattr(lanes, "MIN_SEQUENCES", 1)  # and two steps under way
    if name == "deepseek_v3":  # torch's sigmoid of 8 scores differs in the last bit outside whole vectors
        assert_near(threads(name, pp=2), alone(name))
    else:
        assert threads(name, pp=2) == alone(name)


@pytest.mark.parametrize(
    ("tp", "pp", "exact"), [(2, 1, True), (2, 1, False), pytest.param(2, 2, True, marks=pytest.mark.slow)]
)
def test_ranks_as_processes(tp: int, pp: int, exact: bool) -> None:
    """In fast mode, within one stage, each has a recorded program that exchanges in shared memory."""
    grid = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    with make_llm("llama", **grid, exact_ranks=exact, rank_timeout=60.0) as llm:
        is_recorded = isinstance(llm.parts.runtime.executor, RankProgram)
        found = generate(llm)
    assert is_recorded == (not exact and cpu.unavailable(torch.device("cpu")) is None)
    if exact:
        assert found == alone("llama")
    assert_near(found, alone("llama"))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tensor_parallel_size": 3}, "4 query heads do not divide by 3"),
        ({"tensor_parallel_size": 8}, "4 query heads do not divide by 8"),
        ({"pipeline_parallel_size": 4}, "3 layers cannot be divided among 4 stages"),
        ({"tensor_parallel_size": 2, "expert_parallel": True}, "no experts"),
        ({"expert_parallel": True}, "needs several ranks"),
        ({"tensor_parallel_size": 2, "context_parallel_size": 2}, "either the tokens of prompts or the model"),
        ({"tensor_parallel_size": 2, "speculate": "self:layers=1"}, "self:layers=1 is not supported"),
        ({"tensor_parallel_size": 2, "kv_disk": "x"}, "KV tiers is not supported"),
        ({"tensor_parallel_size": 2, "executor": "recorded"}, "--executor recorded is not supported"),
        ({"tensor_parallel_size": 2, "kv_budget_policy": "h2o", "kv_budget": 64}, "h2o is not supported"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        LLM(model("llama"), context=CONTEXT, threads=1, device="cpu", **options)
