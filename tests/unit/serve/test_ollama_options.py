"""Ollama's options: honoured, refused by name where leaving one out changes the answer, or named as ignored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tokenmill.serve.api.adapter_protocol import OllamaBody
from tokenmill.serve.api.ollama import _chat_fields
from tokenmill.serve.errors import ApiError
from tokenmill.serve.service import Service


def _service(template: str = "") -> Service:
    return cast(Service, SimpleNamespace(context=512, template=SimpleNamespace(source=template)))


def _read(options: dict[str, Any]) -> dict[str, Any]:
    return _chat_fields(_service(), OllamaBody.model_validate({"options": options}))


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, {}),
        ({"num_predict": 7, "top_k": 3, "typical_p": 0.5}, {"max_tokens": 7, "top_k": 3, "typical_p": 0.5}),
        ({"num_predict": -1, "num_ctx": 512}, {}),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, {"repetition_penalty": 1.1}),
        ({"repeat_penalty": 1.1, "presence_penalty": 1, "repeat_last_n": 0}, {}),
        ({"repeat_last_n": 64, "mirostat": 0, "tfs_z": 1.0, "penalize_newline": False}, {}),
        ({"num_gpu": 1, "num_thread": 8, "mirostat_tau": 5.0}, {}),
    ],
    ids=str,
)
def test_options_that_are_honoured_or_change_nothing(options: dict[str, Any], fields: dict[str, Any]) -> None:
    assert _read(options) == fields


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_ctx": 513}, "num_ctx"),
        ({"mirostat": 2}, "mirostat"),
        ({"tfs_z": 0.5}, "tfs_z"),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, "repeat_last_n"),
        ({"penalize_newline": False, "presence_penalty": 0.5}, "penalize_newline"),
    ],
    ids=str,
)
def test_options_that_would_change_the_answer_are_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ApiError) as caught:
        _read(options)
    assert (caught.value.status, caught.value.param) == (400, f"options.{name}")


def test_thinking_is_the_templates() -> None:
    able, unable = _service("{% if enable_thinking %}"), _service()
    assert _chat_fields(able, OllamaBody(think=True)) == {"chat_template_kwargs": {"enable_thinking": True}}
    assert _chat_fields(unable, OllamaBody(think=False)) == {"chat_template_kwargs": {"enable_thinking": False}}
    with pytest.raises(ApiError, match="no thinking"):
        _chat_fields(unable, OllamaBody(think=True))
