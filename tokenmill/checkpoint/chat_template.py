"""A model's chat template: messages in, prompt text out.

Owns where templates are found (GGUF metadata, chat_template.jinja, tokenizer_config.json) and which messages are
accepted. The result already holds the model's special tokens: encode it with add_special_tokens=False and
parse_special=True. Called by the engine's `chat` and by the server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from tokenmill.checkpoint.hf_tokenizer import read_json, token_text
from tokenmill.checkpoint.template_sandbox import MAX_TEXT, TemplateEnvironment
from tokenmill.errors import CheckpointError, UserError

DEFAULT_NAME = "default"
_MESSAGE = 'a message is {"role": "user", "content": "..."}'
_OTHER_TEMPLATE = "give messages in the form this model was trained on, or use the raw prompt"
_DOWNLOAD = "download the model's tokenizer files again"
_GGUF_KEY = "tokenizer.chat_template"


class ChatTemplate:
    """One template with the tokens it may refer to. `variants` are further templates that the model names."""

    def __init__(
        self,
        source: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        variants: Mapping[str, str] | None = None,
    ) -> None:
        self.source = source
        self.variants = dict(variants or {})
        self._special_tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._reads_parts = _reads_parts(source)
        self._environment = TemplateEnvironment()
        self._compiled: dict[str, Template] = {}
        self._lock = Lock()  # the environment counts the steps of one rendering

    @property
    def tool_source(self) -> str:
        """The template that is used when there are tools."""
        return self.variants.get("tool_use", self.source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The prompt for `messages`. `extra` reaches the template as variables (such as enable_thinking)."""
        source = self.tool_source if tools else self.source
        try:
            variables = {
                **self._special_tokens,
                "messages": [
                    _message(index, message, self._reads_parts) for index, message in enumerate(_listed(messages))
                ],
                "tools": _plain(list(tools)) if tools else None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **{name: _plain(value) for name, value in extra.items()},
            }
            with self._lock:
                return self._run(source, variables)
        except (TemplateSyntaxError, SyntaxError) as error:  # the second: what Python refuses of the compiled template
            raise CheckpointError(f"the chat template is broken ({error})", "use the raw prompt") from None
        except SecurityError as error:
            raise UserError(f"the chat template was stopped: {error}", "use the raw prompt, or another model") from None
        except TemplateError as error:
            raise UserError(f"the chat template refuses these messages: {error}", _OTHER_TEMPLATE) from None
        except RecursionError:
            raise UserError("the chat template was stopped: it recurses too deeply", "use the raw prompt") from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, MemoryError) as error:
            raise UserError(f"the chat template fails on these messages: {error!r}", _OTHER_TEMPLATE) from None

    def _run(self, source: str, variables: dict[str, Any]) -> str:
        if source not in self._compiled:
            self._compiled[source] = self._environment.from_string(source)
        self._environment.begin()
        parts: list[str] = []
        length = 0
        for part in self._compiled[source].generate(variables):
            parts.append(part)
            length += len(part)
            if length > MAX_TEXT:
                raise SecurityError("it makes a text that is too long")
        return "".join(parts)


def gguf_template(metadata: Mapping[str, Any], stated: str = "") -> ChatTemplate | None:
    """`stated`: the source of a template to use instead of the model's own."""
    source = stated or metadata.get(_GGUF_KEY)
    if not isinstance(source, str):
        return None
    named = {
        key.removeprefix(_GGUF_KEY + "."): metadata[key]
        for key in metadata
        if str(key).startswith(_GGUF_KEY + ".") and not stated
    }
    # Looked up only where needed: it decodes the whole vocabulary.
    tokens = {name: _gguf_token(metadata, name) if f"{name}_token" in source else None for name in ("bos", "eos")}
    return ChatTemplate(source, tokens["bos"], tokens["eos"], named)


def directory_template(path: Path, stated: str = "") -> ChatTemplate | None:
    """`stated`: the source of a template to use instead of the model's own."""
    config_path, template_path = path / "tokenizer_config.json", path / "chat_template.jinja"
    config = read_json(config_path) if config_path.is_file() else {}
    if stated:
        named = {DEFAULT_NAME: stated}
    elif template_path.is_file():
        named = {DEFAULT_NAME: template_path.read_text(encoding="utf-8")}
    else:
        named = _config_templates(config.get("chat_template"))
    source = named.pop(DEFAULT_NAME, None) or next(iter(named.values()), "")
    if not source:
        return None
    return ChatTemplate(source, token_text(config, "bos_token"), token_text(config, "eos_token"), named)


def _config_templates(value: object) -> dict[str, str]:
    """tokenizer_config.json has one template, or a list of named ones."""
    if isinstance(value, str):
        return {DEFAULT_NAME: value}
    if isinstance(value, list):
        named: dict[str, str] = {}
        for entry in value:
            name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
            if not isinstance(name, str) or not isinstance(text, str):
                raise CheckpointError("tokenizer_config.json has a chat template without name or text", _DOWNLOAD)
            named[name] = text
        return named
    return {}


def _gguf_token(metadata: Mapping[str, Any], name: str) -> str | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    pieces = metadata.get("tokenizer.ggml.tokens", ())
    return pieces[token_id] if token_id is not None and 0 <= token_id < len(pieces) else None


def _reads_parts(source: str) -> bool:
    """Whether the template walks through the parts of a message's content, instead of taking it as a string."""
    try:
        tree = TemplateEnvironment().parse(source)
    except (TemplateSyntaxError, RecursionError):
        return False  # reported when rendering
    for loop in tree.find_all(nodes.For):
        attributes = {access.attr for access in loop.iter.find_all(nodes.Getattr)}
        keys = [access.arg for access in loop.iter.find_all(nodes.Getitem)]
        if "content" in attributes or any(isinstance(key, nodes.Const) and key.value == "content" for key in keys):
            return True
    return False


def _listed(messages: object) -> Sequence[object]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise UserError(f"messages must be a list, got {type(messages).__name__}", _MESSAGE)
    if not messages:
        raise UserError("there are no messages", _MESSAGE)
    return messages


def _message(index: int, message: object, keep_parts: bool) -> dict[str, Any]:
    """Checked, rebuilt from plain values, in the form templates expect."""
    if not isinstance(message, Mapping):
        raise UserError(f"message {index} is not an object but {type(message).__name__}", _MESSAGE)
    plain: dict[str, Any] = _plain(message)
    if not isinstance(plain.get("role"), str) or not plain["role"]:
        raise UserError(f"message {index} has no role", _MESSAGE)
    content = plain.get("content")
    if content is None and not plain.get("tool_calls"):
        raise UserError(f"message {index} has no content", _MESSAGE)
    if not (content is None or isinstance(content, (str, list))):
        raise UserError(f"the content of message {index} is neither text nor a list of parts", _MESSAGE)
    if isinstance(content, list) and not keep_parts:
        plain["content"] = "\n".join(_text_part(index, part) for part in content)
    for call in plain.get("tool_calls") or ():
        _parse_arguments(call)
    return plain


def _text_part(index: int, part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise UserError(f"message {index} has a part that is not text, and this model reads only text", _MESSAGE)


def _parse_arguments(call: object) -> None:
    """OpenAI clients send a call's arguments as a JSON string; templates want the object."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except ValueError:
            return  # not JSON: the template shows it as it is


def _plain(value: Any) -> Any:
    """Rebuilt from JSON types, so that a template sees no object with methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, str):
        return str.__str__(value)
    raise UserError(f"a message holds a {type(value).__name__}", "give only text, numbers, lists and objects")
