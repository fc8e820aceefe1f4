"""Decode steps whose tokens the sampler draws, because of features that need the host: queued behind each other too.

test_interpreted.py runs this file in a process of its own where there is no GPU.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.made_up_tokenizer import write_tokenizer
from tests.gpu.models import write_config
from tests.gpu.test_executors import ON_GPU, SHALLOW, engine, note_queued, prompts
from tests.interpreter import slow_if_interpreted
from tokenmill import SamplingParams
from tokenmill.runtime.sampling.features import grammar
from tokenmill.types import StructuredSpec

if os.environ.get("TRITON_INTERPRET") != "1" and not ON_GPU:
    pytest.skip("no GPU: test_interpreted.py runs this file under the interpreter", allow_module_level=True)

REGEX = "([a-z ]{1,8},)*"
COMMON: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
GUIDED: dict[str, Any] = COMMON | {"structured": StructuredSpec("regex", REGEX)}
BANNED = dict.fromkeys(range(20, 300), -100.0)


def model(folder: Path) -> Path:
    """With a tokenizer, in which the model has ten tokens more than the 256 bytes."""
    changes = {} if ON_GPU else SHALLOW["llama"]
    path = write_config(folder, "llama", vocab_size=300, eos_token_id=290, bos_token_id=291, **changes)
    write_tokenizer(path, json.loads((path / "config.json").read_text()))
    return path


def test_the_same_tokens_as_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars, biases, bans and reports beside plain rows, while requests end and others go on."""
    folder, asked = model(tmp_path), prompts(6, 9)
    longest = 12 if ON_GPU else 9
    params = [
        SamplingParams(max_tokens=longest, **GUIDED),
        SamplingParams(max_tokens=7, **(GUIDED | {"temperature": 0.8, "seed": 5}), logprobs=2),
        SamplingParams(max_tokens=longest, **COMMON),
        SamplingParams(max_tokens=longest - 1, logit_bias=BANNED, repetition_penalty=1.4, **COMMON),
        SamplingParams(max_tokens=5, bad_word_ids=((3,), (5, 6)), **COMMON),
        SamplingParams(max_tokens=longest, temperature=0.9, seed=5, top_k=20, ignore_eos=True),
    ]
    found, queued = {}, []
    for executor in ("cuda_eager", "cuda_graph"):
        with engine(folder, executor, jump_forward=False) as llm:
            if executor == "cuda_graph":
                note_queued(llm, queued, monkeypatch)
            outputs = [each.outputs[0] for each in llm.generate(asked, params)]
            found[executor] = outputs
            llm.parts.core.scheduler.kv.check()
            dropped = getattr(llm.parts.runtime.executor, "num_dropped", 0)
    held = [step for step in queued if step is not None and step.held]
    assert len(held) > 6
    assert dropped <= 2
    for mine, other in zip(found["cuda_graph"], found["cuda_eager"], strict=True):
        assert mine.token_ids == other.token_ids
        assert (mine.logprobs is None) == (other.logprobs is None)
    for guided in found["cuda_graph"][:2]:
        assert re.fullmatch("([a-z ]{1,8},)*[a-z ]{0,8}", guided.text)
    assert max(found["cuda_graph"][3].token_ids) < 20


def test_rows_that_a_grammar_leaves_are_drawn_by_the_step_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row with a penalty goes on alone after the guided one beside it has ended."""
    folder, asked = model(tmp_path), prompts(2, 9)
    params = [
        SamplingParams(max_tokens=4, **GUIDED),
        SamplingParams(max_tokens=10, repetition_penalty=1.8, **COMMON),
    ]
    found, queued = [], []
    for executor in ("cuda_eager", "cuda_graph"):
        with engine(folder, executor, jump_forward=False) as llm:
            if executor == "cuda_graph":
                note_queued(llm, queued, monkeypatch)
            found.append([each.outputs[0].token_ids for each in llm.generate(asked, params)])
    assert {step.held for step in queued if step is not None} == {True, False}
    assert found[0] == found[1]


@slow_if_interpreted
def test_a_token_that_the_host_chose_drops_the_queued_step(tmp_path: Path) -> None:
    """Another feature bans what the grammar allows: the grammar's tokens come first, and the step that was queued with
    another token is computed again."""
    folder = model(tmp_path)
    params = SamplingParams(max_tokens=6, bad_word_ids=tuple((token,) for token in range(300)), **GUIDED)
    found = []
    for executor in ("cuda_eager", "cuda_graph"):
        with engine(folder, executor, jump_forward=False) as llm:
            found.append(llm.generate(prompts(1, 9), params)[0].outputs[0].token_ids)
            dropped = getattr(llm.parts.runtime.executor, "num_dropped", 0)
    assert found[0] == found[1]
    assert len(found[0]) == 6
    assert dropped > 0


@slow_if_interpreted
def test_masks_of_many_rows_are_computed_by_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_THREADS", 3)
    monkeypatch.setattr(grammar, "_MIN_SHARED_SECONDS", 0.0)
    folder, asked = model(tmp_path), prompts(7, 6)
    params = SamplingParams(max_tokens=5, **GUIDED)
    with engine(folder, "cuda_graph", jump_forward=False) as llm:
        feature = next(each for each in llm.parts.runtime.executor.sampler._logit_features if each.active(params))
        for _ in range(20):  # until a second lane has been compiled
            together = [each.outputs[0].text for each in llm.generate(asked, params)]
            if feature._threads is not None:
                break
        assert feature._threads is not None
        alone = [llm.generate([prompt], params)[0].outputs[0].text for prompt in asked[:2]]
    assert together[:2] == alone
    assert all(re.fullmatch("([a-z ]{1,8},)*[a-z ]{0,8}", text) for text in together)


@slow_if_interpreted
def test_drafts_of_grammars_still_hold(tmp_path: Path) -> None:
    """Steps with drafts between steps that are queued: the same tokens as without."""
    folder, asked = model(tmp_path), prompts(2, 9)
    spec = StructuredSpec("regex", "(the same words again, ){9}")
    params = [SamplingParams(max_tokens=24, structured=spec, **COMMON), SamplingParams(max_tokens=24, **COMMON)]
    found = []
    for jumps in (False, True):
        with engine(folder, "cuda_graph", jump_forward=jumps) as llm:
            found.append([each.outputs[0].token_ids for each in llm.generate(asked, params)])
            num_drafts = llm.stats.num_drafts
    assert found[0] == found[1]
    assert num_drafts > 0
