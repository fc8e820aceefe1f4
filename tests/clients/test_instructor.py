"""instructor: a pydantic model comes back, by tools and by JSON schemas, whole and in part while it streams."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.clients.conftest import MODEL
from tests.clients.test_openai import MESSAGES, Weather

instructor = pytest.importorskip("instructor", reason="make test-clients installs it")


def _client(v1: str, mode: Any) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=v1, api_key="none", timeout=60), mode=mode)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_model_comes_back(v1: str, mode: str) -> None:
    client = _client(v1, getattr(instructor.Mode, mode))
    fields = {"model": MODEL, "messages": MESSAGES, "max_tokens": 64, "temperature": 0, "max_retries": 0}
    answer, raw = client.chat.completions.create_with_completion(response_model=Weather, **fields)
    assert isinstance(answer, Weather)
    assert raw.usage.completion_tokens > 0


def test_it_grows_while_it_streams(v1: str) -> None:
    client = _client(v1, instructor.Mode.JSON_SCHEMA)
    parts = list(
        client.chat.completions.create_partial(
            response_model=Weather, model=MODEL, messages=MESSAGES, max_tokens=64, temperature=0
        )
    )
    assert Weather.model_validate(parts[-1].model_dump())
