"""What the operator states in place of the checkpoint: sampling defaults and the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenmill.checkpoint.chat_template import directory_template, gguf_template
from tokenmill.errors import UserError
from tokenmill.serve.api.protocol import ChatBody
from tokenmill.serve.api.sampling import build_params
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.overrides import SamplingDefaults, read_sampling_defaults, read_template

_STORED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 99, "eos_token_id": [1], "do_sample": True}
_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"


def _model(folder: Path, **fields: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(_STORED | fields))
    return folder


def test_defaults_come_from_the_models_file(tmp_path: Path) -> None:
    found = read_sampling_defaults(_model(tmp_path))
    assert found.values == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert found.max_tokens == 99
    assert "temperature 0.6" in str(found)
    assert "generation_config.json" in str(found)
    assert read_sampling_defaults(tmp_path, "vllm") == SamplingDefaults()
    assert read_sampling_defaults(tmp_path / "model.gguf") == SamplingDefaults()


def test_another_directory_and_stated_values(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    _model(other, temperature=0.1, min_p=None)
    assert read_sampling_defaults(model) == SamplingDefaults()
    assert read_sampling_defaults(model, str(other)).values["temperature"] == 0.1
    stated = read_sampling_defaults(model, str(other), '{"temperature": 0, "max_new_tokens": 5, "top_k": null}')
    assert stated.values == {"temperature": 0, "top_p": 0.95}
    assert stated.max_tokens == 5
    assert read_sampling_defaults(model, "vllm", '{"min_p": 0.1}').values == {"min_p": 0.1}


@pytest.mark.parametrize(
    ("where", "override", "message"),
    [
        ("nowhere", "", "nowhere has no generation_config.json"),
        ("auto", "[1]", "not a JSON object"),
        ("auto", "{", "not a JSON object"),
        ("auto", '{"temprature": 1}', "temperature"),
        ("auto", '{"temperature": -1}', "temperature is -1"),
        ("auto", '{"max_new_tokens": 0}', "max_tokens is 0"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(tmp_path: Path, where: str, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_sampling_defaults(_model(tmp_path), where, override)


def test_a_file_that_is_no_object_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(UserError, match="not a JSON object"):
        read_sampling_defaults(tmp_path)


def test_a_request_wins_over_the_defaults() -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], "temperature": 0.0})
    params = build_params(body, ServeConfig(), 5, defaults)
    assert (params.temperature, params.top_k) == (0.0, 20)
    assert build_params(body, ServeConfig(), 5).top_k == 0


def test_a_template_from_a_file_or_as_text(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(_TEMPLATE)
    assert read_template(str(file)) == read_template(_TEMPLATE) == _TEMPLATE
    assert read_template("") == ""
    for wrong in (str(tmp_path / "missing.jinja"), "{% for x in %}", "\n"):
        with pytest.raises(UserError, match="template"):
            read_template(wrong)


def test_a_stated_template_has_the_models_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "chat_template": "own {{ messages }}"}')
    metadata = {"tokenizer.ggml.tokens": ["<s>"], "tokenizer.ggml.bos_token_id": 0,
                "tokenizer.chat_template": "own", "tokenizer.chat_template.tool_use": "own too"}  # fmt: skip
    for template in (directory_template(tmp_path, _TEMPLATE), gguf_template(metadata, _TEMPLATE)):
        assert template is not None
        assert template.variants == {}
        assert template.render([{"role": "user", "content": "hi"}]) == "<s>hi"
