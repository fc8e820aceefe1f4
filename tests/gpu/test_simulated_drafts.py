"""The model that counts, and drafts of a given acceptance, as benchmarks/simulated_drafts.py measures with them.

test_interpreted.py runs this file in a process of its own where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import simulated_drafts
from tests.gpu.models import write_config
from tests.gpu.test_executors import COMMON, ON_GPU

if os.environ.get("TRITON_INTERPRET") != "1" and not ON_GPU:
    pytest.skip("no GPU: test_interpreted.py runs this file under the interpreter", allow_module_level=True)

TOKENS = 24 if ON_GPU else 8
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("kind", ["lookup", "head", "model"])
def test_all_right_drafts_hold_and_wrong_ones_do_not(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = {"device": "cuda"} if ON_GPU else {"device": "cpu", "kernels": "triton", "kv_cache_dtype": "bfloat16"}
    monkeypatch.setattr(simulated_drafts, "OPTIONS", COMMON | device | {"concurrency": 4})
    monkeypatch.setattr(simulated_drafts, "SMALL", SMALL | {"num_key_value_heads": 2})
    monkeypatch.setattr(simulated_drafts, "PROMPT", 5)
    path = write_config(tmp_path / "shape", "llama", num_hidden_layers=1, vocab_size=160)
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    options = argparse.Namespace(variant="bf16", depth=2, rows=[2], tokens=TOKENS, memory=1 << 20)
    llm, guesses = simulated_drafts.start(kind, tmp_path, config, options)
    prompts = [[3, 9, 14, 100, 20], [5, 7, 90]]
    with llm:
        guesses.set(1.0)
        always = simulated_drafts.run(llm, prompts, TOKENS)
        guesses.set(0.0)
        never = simulated_drafts.run(llm, prompts, TOKENS)
    assert always["right"] == never["right"] == 1.0
    assert always["drafted"] > 0
    assert always["held"] > 0.6
    assert never["held"] == 0.0
