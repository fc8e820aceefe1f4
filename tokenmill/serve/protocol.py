"""What clients may send, as pydantic models: the only pydantic of the project.

Unknown fields are kept apart, not refused: `ignored()` names them for the response header. A model says what a body
means in our own terms (SamplingParams, a Structured spec, messages); it decides nothing about admission or the engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

MAX_STOPS = 16
MAX_IGNORED = 16
_DEFAULT_TTL = 300.0  # Anthropic's

TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Prompt = str | list[TokenId]


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=(), coerce_numbers_to_str=False)

    def ignored(self) -> list[str]:
        """Names of unknown fields, safe for a header."""
        names = list(self.__pydantic_extra__ or ())
        clean = ["".join(char if char.isascii() and char.isprintable() and char not in ', "' else "?" for char in name)
                 for name in names[:MAX_IGNORED]]  # fmt: skip
        return [name[:64] for name in clean] + (["..."] if len(names) > MAX_IGNORED else [])


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


@dataclass(frozen=True, slots=True)
class Structured:
    """A constraint on the output. `kind`: "json_object", "json_schema", "regex", "choice" or "grammar"."""

    kind: str
    value: str  # the schema as JSON, the expression, the choices as a JSON list, or the grammar


class JsonSchema(Body):
    name: str | None = None
    schema_: Any = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's newer form of the guided_* fields."""

    json_: Any = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class CacheControlBody(Body):
    """How long the prompt stays in the KV cache: `ttl` in seconds, or as Anthropic writes it ("5m", "1h")."""

    type: Literal["ephemeral", "pin"] = "ephemeral"
    ttl: str | float | None = None

    def seconds(self) -> float:
        """The TTL; 0 if the prompt is to be pinned. Raises ValueError."""
        if self.type == "pin":
            if self.ttl is not None:
                raise ValueError("cache_control of type pin has no ttl")
            return 0.0
        if self.ttl is None:
            return _DEFAULT_TTL
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smh]?)", str(self.ttl))
        if match is None:
            raise ValueError(f"cache_control ttl {str(self.ttl)[:40]!r} is not a time: write seconds, or like 5m or 1h")
        return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


class GenerationBody(Body):
    """What completions and chat have in common."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    priority: int | None = Field(default=None, ge=-100, le=100)
    deadline_ms: float | None = Field(default=None, gt=0, le=86_400_000)
    lane: Literal["interactive", "batch"] | None = None
    response_format: ResponseFormat | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_control: CacheControlBody | None = None
    cache_salt: str | None = Field(default=None, max_length=256)
    kv_policy: str | None = None
    kv_budget: int | None = None

    def output_limit(self) -> int | None:
        """Maximum tokens to generate, None if the body does not set it."""
        return self.max_tokens

    def structured(self) -> Structured | None:
        """The constraint on the output, from whichever field sets it. Raises ValueError if several do."""
        constraints = [*self._guided(), *self._formatted()]
        if len(constraints) > 1:
            raise ValueError("more than one of response_format, guided_* and structured_outputs is given")
        return constraints[0] if constraints else None

    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def _guided(self) -> list[Structured]:
        newer = self.structured_outputs or StructuredOutputs()
        schema = self.guided_json if self.guided_json is not None else newer.json_
        choice = self.guided_choice if self.guided_choice is not None else newer.choice
        texts = {"regex": self.guided_regex or newer.regex, "grammar": self.guided_grammar or newer.grammar}
        constraints = [Structured(kind, text) for kind, text in texts.items() if text is not None]
        if schema is not None:
            constraints.append(Structured("json_schema", schema if isinstance(schema, str) else _json(schema)))
        if choice is not None:
            constraints.append(Structured("choice", _json(choice)))
        if newer.json_object:
            constraints.append(Structured("json_object", ""))
        return constraints

    def _formatted(self) -> list[Structured]:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return []
        if wanted.type == "json_object":
            return [Structured("json_object", "")]
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise ValueError("response_format json_schema has no schema")
        return [Structured("json_schema", _json(wanted.json_schema.schema_))]


class CompletionBody(GenerationBody):
    prompt: Prompt | list[Prompt]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return [self.prompt] if one else list(self.prompt)  # type: ignore[list-item, arg-type]


class Message(Body):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """As a chat template reads it. Raises ValueError for content that is not text."""
        message = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            message["content"] = "".join(map(_part_text, self.content))
        message.setdefault("content", "")
        if message["role"] == "developer":
            message["role"] = "system"
        return message


class ChatBody(GenerationBody):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class EmbeddingBody(Body):
    model: str | None = None
    input: Prompt | list[Prompt]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    def prompts(self) -> list[str | list[int]]:
        one = isinstance(self.input, str) or (self.input and isinstance(self.input[0], int))
        return [self.input] if one else list(self.input)  # type: ignore[list-item, arg-type]


class TokenizeBody(Body):
    """Text, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TokenId]


class OllamaOptions(Body):
    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


class OllamaBody(Body):
    model: str | None = None
    stream: bool | None = None
    format: Literal["json", ""] | dict[str, Any] | None = None
    options: OllamaOptions | None = None


class OllamaChatBody(OllamaBody):
    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateBody(OllamaBody):
    prompt: str
    system: str | None = None
    raw: bool | None = None


class AnthropicMessage(Body):
    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class AnthropicBody(Body):
    model: str | None = None
    messages: list[AnthropicMessage] = Field(min_length=1)
    max_tokens: int
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    cache_control: CacheControlBody | None = None
    cache_salt: str | None = Field(default=None, max_length=256)
    kv_policy: str | None = None
    kv_budget: int | None = None


def content_text(content: str | list[dict[str, Any]]) -> str:
    """Text of a message's content, as a string or in parts. Raises ValueError for parts that are not text."""
    return content if isinstance(content, str) else "".join(map(_part_text, content))


def _part_text(part: dict[str, Any]) -> str:
    text = part.get("text")
    if part.get("type", "text") != "text" or not isinstance(text, str):
        raise ValueError(f"content of type {str(part.get('type'))[:40]!r} is not supported: this model reads text only")
    return text


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
