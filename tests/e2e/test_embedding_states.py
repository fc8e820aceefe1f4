"""The hidden state that a request can ask for: it is what the head reads, whichever executor computed it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tokenmill.config import EngineConfig
from tokenmill.engine.build import build_engine
from tokenmill.types import Request, SamplingParams

_PROMPT = [1, 9038, 2501, 263, 931, 29892, 727]


def _embed(path: Path, executor: str) -> tuple[torch.Tensor, int, torch.Tensor]:
    """(state, token sampled, head) of the prompt; the batch has another request beside it."""
    parts = build_engine(path, EngineConfig(context=64, concurrency=4, executor=executor))
    params = SamplingParams(max_tokens=1, temperature=0.0)
    parts.core.add(Request("plain", [1, 306], params, arrival=0))
    parts.core.add(Request("embed", _PROMPT, params, arrival=1, embeds=True))
    events = {event.request_id: event for event in parts.core.step()}
    assert events["plain"].embedding == []
    head = build_engine(path, EngineConfig(context=64), tensors=True).runtime.model.decoder.head
    found = events["embed"]
    return torch.tensor(found.embedding), found.token_ids[0], head.dequantize(0, head.out_features)


@pytest.mark.parametrize("executor", ["eager", "auto"])
def test_the_head_reads_the_state_that_is_returned(model_path: Callable[[str], Path], executor: str) -> None:
    state, token, head = _embed(model_path("stories15m"), executor)
    assert int((head @ state).argmax()) == token


def test_executors_agree_on_the_state(model_path: Callable[[str], Path]) -> None:
    states = [_embed(model_path("stories15m"), executor)[0] for executor in ("eager", "auto")]
    assert torch.nn.functional.cosine_similarity(states[0], states[1], dim=0) > 0.999
