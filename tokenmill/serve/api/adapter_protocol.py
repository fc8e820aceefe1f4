"""What clients of the Ollama-style and Anthropic-style endpoints may send. Read by their adapters only.

Like protocol.py: unknown fields are named, lists fail at their first bad element, nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from tokenmill.serve.api.protocol import (
    MAX_MESSAGES,
    Body,
    CacheControlBody,
    Int,
    Message,
    Objects,
    Strings,
    TokenIds,
    unknown_names,
)


class OllamaOptions(Body):
    num_predict: Int | None = None
    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    num_ctx: Int | None = None
    repeat_last_n: Int | None = None
    penalize_newline: bool | None = None
    mirostat: Int | None = None
    tfs_z: float | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


class OllamaBody(Body):
    model: str | None = None
    stream: bool | None = None
    format: Literal["json", ""] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | str | None = None
    keep_alive: str | float | None = None  # front.py reads it
    logprobs: bool | None = None
    top_logprobs: Int | None = Field(default=None, ge=0)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to each token; None: not even its own log-probability is wanted."""
        return (self.top_logprobs or 0) if self.logprobs else None


class OllamaModelBody(Body):
    """Names a model, for /api/show, /api/pull and /api/delete; `name` is what older clients say."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    verbose: bool | None = None


class OllamaChatBody(OllamaBody):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: Objects | None = None


class OllamaGenerateBody(OllamaBody):
    prompt: str
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: TokenIds | None = None
    images: list[Any] | None = None

    def iter_ignored(self, template: str) -> Iterator[str]:
        yield from super().iter_ignored(template)
        if self.raw and self.system:
            yield "system"


_BLOCK_FIELDS = {
    "text": ("type", "text", "cache_control"),
    "thinking": ("type", "thinking", "signature"),
    "redacted_thinking": ("type",),
    "tool_use": ("type", "id", "name", "input", "cache_control"),
    "tool_result": ("type", "tool_use_id", "content", "cache_control"),
}


class AnthropicMessage(Body):
    role: Literal["user", "assistant"]
    content: str | Objects

    def iter_ignored(self, template: str) -> Iterator[str]:
        yield from super().iter_ignored(template)
        for block in self.content if isinstance(self.content, list) else ():
            yield from unknown_names("content", [block], _BLOCK_FIELDS.get(str(block.get("type", "text")), ()))


class AnthropicBody(Body):
    model: str | None = None
    messages: list[AnthropicMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: Int
    system: str | Objects | None = None
    stop_sequences: Strings | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    cache_control: CacheControlBody | None = None
    cache_salt: str | None = Field(default=None, max_length=256)
    kv_policy: str | None = None
    kv_budget: Int | None = None

    def iter_ignored(self, template: str) -> Iterator[str]:
        yield from super().iter_ignored(template)
        if isinstance(self.system, list):
            yield from unknown_names("system", self.system, _BLOCK_FIELDS["text"])
        if self.thinking is not None and "thinking" not in template:
            yield "thinking"
        elif self.thinking is not None:
            yield from unknown_names("thinking", [self.thinking], ("type", "budget_tokens"))
        tool_fields = ("type", "name", "description", "input_schema", "cache_control")
        yield from unknown_names("tools", self.tools or (), tool_fields)
        choice = [self.tool_choice] if self.tool_choice else []
        yield from unknown_names("tool_choice", choice, ("type", "name", "disable_parallel_tool_use"))


class AnthropicCountBody(AnthropicBody):
    """For /v1/messages/count_tokens: nothing is generated."""

    max_tokens: Int = 1
