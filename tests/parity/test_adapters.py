"""Eight adapters of different kinds and the base in one batch, against each adapter merged by PEFT.

By the torch reference and by the recorded program, over float and quantized bases; alone and in the mixture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity import tiny_models
from tests.parity.peft_adapters import KINDS, make_adapter
from tests.parity.tiny_models import make
from tests.quantized_files import save_quantized
from tests.unit.quantize.ggml.test_export import save_tokenizer
from tokenmill.checkpoint.adapters.fit import check_base
from tokenmill.checkpoint.adapters.peft import read_adapter
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config import EngineConfig
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.ggml.export import quantize_gguf
from tokenmill.resolution import resolve
from tokenmill.runtime.build import Runtime, build_runtime
from tokenmill.types import Request, SamplingParams, ScheduledTokens, StepPlan

pytest.importorskip("peft")

_CPU = torch.device("cpu")
_PAGE_SIZE, _CONTEXT, _OUTPUT, _ROWS = 4, 64, 6, 16
_SLOTS = [row % 9 for row in range(_ROWS)]  # base and eight adapters, side by side


def _prompt(row: int) -> list[int]:
    generator = torch.Generator().manual_seed(row)
    return torch.randint(3, 131, (5 + 3 * row % 17,), generator=generator).tolist()


def build(path: Path, executor: str) -> Runtime:
    options = {"context": _CONTEXT, "concurrency": _ROWS, "page_size": _PAGE_SIZE, "batch_tokens": 512}
    config = EngineConfig(
        device="cpu",
        executor=executor,
        kernels="ref" if executor == "eager" else "",
        kv_cache_dtype="float32",
        enable_lora=True,
        max_loras=8,
        max_lora_rank=32,
        **options,
    )
    return build_runtime(open_checkpoint(path), resolve(config), _CPU)


def load(runtime: Runtime, folders: list[Path]) -> None:
    description = runtime.model.decoder.description
    for slot, folder in enumerate(folders, start=1):
        runtime.runner.load_adapter(slot, check_base(read_adapter(folder), description))


def generate(runtime: Runtime, rows: list[int], slots: list[int]) -> dict[int, tuple[list[int], list[float]]]:
    """By row: greedy tokens and their log-probabilities. All prompts in one step, then decodes in one batch."""
    pages = _CONTEXT // _PAGE_SIZE
    params = SamplingParams(max_tokens=_OUTPUT, temperature=0.0, logprobs=0, ignore_eos=True)
    requests = {row: Request(str(row), _prompt(row), params) for row in rows}
    found: dict[int, tuple[list[int], list[float]]] = {row: ([], []) for row in rows}
    for _ in range(_OUTPUT):
        plan = StepPlan()
        for place, row in enumerate(rows):
            request = requests[row]
            start = 0 if not request.num_output_tokens else request.num_tokens - 1
            table = list(range(place * pages, (place + 1) * pages))
            tables = tuple([table] * len(runtime.layout.groups))
            count = request.num_tokens - start
            plan.scheduled.append(ScheduledTokens(request, start, count, tables, True, adapter_slot=slots[row]))
        result = runtime.runner.execute(plan)
        for row, token, record in zip(rows, result.token_ids, result.logprobs, strict=True):
            assert token is not None
            assert record is not None
            requests[row].token_ids.append(token)
            found[row][0].append(token)
            found[row][1].append(record.logprob)
    return found


@torch.inference_mode()
def expected_logprobs(oracle: Any, row: int, tokens: list[int]) -> Tensor:
    logits = oracle(torch.tensor([_prompt(row) + tokens])).logits[0, len(_prompt(row)) - 1 : -1]
    return logits.log_softmax(-1)


def _errors(oracles: list[Any], found: dict[int, tuple[list[int], list[float]]]) -> list[float]:
    errors = []
    for row, (tokens, logprobs) in found.items():
        wanted = expected_logprobs(oracles[_SLOTS[row]], row, tokens)
        errors.append(
            float((torch.tensor(logprobs) - wanted.gather(1, torch.tensor(tokens)[:, None])[:, 0]).abs().max())
        )
        assert wanted.argmax(-1).tolist() == tokens
    return errors


@pytest.mark.parametrize("executor", ["eager", "recorded"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])  # the second has biases and a tied head
def test_a_mixture_equals_each_adapter_merged(name: str, executor: str, tmp_path: Path) -> None:
    base = make(name, tmp_path / "base")
    folders = [tmp_path / str(number) for number in range(8)]
    oracles = [base, *(make_adapter(base, kind, folders[n], n) for n, kind in enumerate(KINDS))]
    runtime = build(tmp_path / "base", executor)
    load(runtime, folders)
    mixed = generate(runtime, list(range(_ROWS)), _SLOTS)
    assert max(_errors(oracles, mixed)) < 1e-4
    for row in (0, 6, 8):
        assert generate(runtime, [row], _SLOTS)[row][0] == mixed[row][0]


@pytest.mark.parametrize("executor", ["eager", "recorded"])
def test_scores_of_a_reranker_are_those_of_the_adapted_head(executor: str, tmp_path: Path) -> None:
    base = make("llama", tmp_path / "base")
    folders = [tmp_path / str(number) for number in range(8)]
    oracles = [base, *(make_adapter(base, kind, folders[n], n) for n, kind in enumerate(KINDS))]
    runtime = build(tmp_path / "base", executor)
    load(runtime, folders)
    plan, pages, wanted = StepPlan(), _CONTEXT // _PAGE_SIZE, [7, 90]
    for row in range(9):
        request = Request(str(row), _prompt(row), SamplingParams(max_tokens=1), embeds=True, score_ids=tuple(wanted))
        tables = tuple([list(range(row * pages, (row + 1) * pages))] * len(runtime.layout.groups))
        plan.scheduled.append(ScheduledTokens(request, 0, len(_prompt(row)), tables, True, adapter_slot=row))
    found = runtime.runner.execute(plan).embeddings
    with torch.inference_mode():
        for row in range(9):
            expected = oracles[row](torch.tensor([_prompt(row)])).logits[0, -1, wanted]
            torch.testing.assert_close(torch.tensor(found[row]), expected, atol=1e-4, rtol=1e-4)


def _changed(oracles: list[Any], row: int, tokens: list[int]) -> float:
    """How much an adapter changes the log-probabilities of its row."""
    with_adapter, without = (expected_logprobs(oracles[slot], row, tokens) for slot in (_SLOTS[row], 0))
    return float((with_adapter - without).abs().mean())


_QUANTIZED = ["gptq", "Q8_0", "Q4_K_M"]


def _quantized(kind: str, folder: Path) -> Path:
    if kind == "gptq":
        save_quantized(folder / "gptq", "gptq", Scheme("int", 4, 32), "llama")
        return folder / "gptq"
    save_tokenizer(folder / "base", "llama-bpe")
    quantize_gguf(open_checkpoint(folder / "base"), folder / "model.gguf", kind)
    return folder / "model.gguf"


@pytest.mark.usefixtures("same_bits")  # bases in tiles of bfloat16 are nearer than factors in int8
@pytest.mark.parametrize("kind", _QUANTIZED)
def test_on_a_quantized_base_the_program_is_as_near_to_the_reference_as_without_adapters(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both executors multiply by the same rounded base; the program rounds activations, and factors to int8."""
    wide = {} if kind == "gptq" else {"hidden_size": 256, "intermediate_size": 256}  # Q4_K has blocks of 256
    monkeypatch.setitem(tiny_models.CONFIGS, "llama", lambda: tiny_models._llama(**wide))
    base = make("llama", tmp_path / "base")
    folders = [tmp_path / str(number) for number in range(8)]
    oracles = [base, *(make_adapter(base, each, folders[n], n) for n, each in enumerate(KINDS))]
    path = _quantized(kind, tmp_path)
    found = {}
    for executor in ("eager", "recorded"):
        runtime = build(path, executor)
        load(runtime, folders)
        found[executor] = {
            adapted: prompt_logprobs(runtime, _SLOTS if adapted else [0] * _ROWS) for adapted in (False, True)
        }
    distances = {
        adapted: (found["recorded"][adapted] - found["eager"][adapted]).abs().mean() for adapted in (False, True)
    }
    changed = (found["eager"][True] - found["eager"][False]).abs().mean()
    assert distances[True] < 2 * distances[False] + 0.01 * changed
    assert max(_changed(oracles, row, [5, 9]) for row in range(_ROWS)) > 0.1


def prompt_logprobs(runtime: Runtime, slots: list[int]) -> Tensor:
    """Of all tokens of all prompts, in one step."""
    pages, plan = _CONTEXT // _PAGE_SIZE, StepPlan()
    for row in range(_ROWS):
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        prompt = _prompt(row)
        tables = tuple([list(range(row * pages, (row + 1) * pages))] * len(runtime.layout.groups))
        request = Request(str(row), prompt, params)
        plan.scheduled.append(ScheduledTokens(request, 0, len(prompt), tables, True, adapter_slot=slots[row]))
    result = runtime.runner.execute(plan)
    return torch.tensor([each.logprob for records in result.prompt_logprobs for each in records or ()])


@pytest.mark.parametrize("executor", ["eager", "recorded"])
def test_slots_are_replaced_and_cleared_without_a_trace(executor: str, tmp_path: Path) -> None:
    base = make("llama", tmp_path / "base")
    for number in (0, 5, 6, 7):
        make_adapter(base, KINDS[number], tmp_path / str(number), number)
    runtime = build(tmp_path / "base", executor)
    runner = runtime.runner
    plain, empty = prompt_logprobs(runtime, [0] * _ROWS), runner.adapter_bytes
    load(runtime, [tmp_path / "5", tmp_path / "6"])
    first = prompt_logprobs(runtime, [1] * _ROWS)
    assert torch.equal(prompt_logprobs(runtime, [0] * _ROWS), plain)
    assert not torch.allclose(first, plain, atol=0.05)
    load(runtime, [tmp_path / "7", tmp_path / "0"])
    assert not torch.allclose(prompt_logprobs(runtime, [2] * _ROWS), plain, atol=0.05)
    load(runtime, [tmp_path / "5"])
    assert torch.equal(prompt_logprobs(runtime, [1] * _ROWS), first)
    for slot in (1, 2):
        runner.clear_adapter(slot)
    assert torch.equal(prompt_logprobs(runtime, [1] * _ROWS), plain)
    assert runner.adapter_bytes == empty
