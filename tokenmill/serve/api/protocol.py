"""What clients may send, as pydantic models: the only pydantic of the project.

Unknown fields are kept apart, not refused: `ignored()` names them, nested ones included, for the response header. A
model says what a body means in our own terms (SamplingParams, a Structured spec, messages); it decides nothing about
admission or the engine. Lists fail at their first bad element. reading.py bounds what gets here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_STOPS = 16
MAX_IGNORED = 16
MAX_MESSAGES = 4096
MAX_BIASES = 1024
_MAX_ROLE = 64  # characters
_MAX_TOKEN_ID = 2**31 - 1
_DEFAULT_TTL = 300.0  # Anthropic's
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _MAX_TOKEN_ID}}
_PROMPT_SCHEMA = {"anyOf": [{"type": "string"}, _IDS_SCHEMA]}


def _token_ids(value: Any) -> list[int]:
    """Three passes in C: lists of token ids are long."""
    if not isinstance(value, list) or (value and set(map(type, value)) != {int}):
        raise PydanticCustomError("token_ids", "token ids must be a list of whole numbers")
    if value and not 0 <= min(value) <= max(value) <= _MAX_TOKEN_ID:
        raise PydanticCustomError("token_ids", f"token ids must be from 0 to {_MAX_TOKEN_ID}")
    return value


def _prompts(value: Any) -> str | list[str] | list[int] | list[Any]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("prompt", "give text, a list of token ids, or a list of those")
    if value and type(value[0]) is int:
        return _token_ids(value)
    for each in value:
        if not isinstance(each, str):
            _token_ids(each)
    return value


def _check_num_biases(value: Any) -> Any:
    """pydantic looks at the length of an object only after all entries, with an error for each bad one."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise PydanticCustomError("too_long", f"give at most {MAX_BIASES} entries")
    return value


Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenIds = Annotated[list[int], PlainValidator(_token_ids), WithJsonSchema(_IDS_SCHEMA)]
Prompts = Annotated[
    str | list[Any],
    PlainValidator(_prompts),
    WithJsonSchema({"anyOf": [*_PROMPT_SCHEMA["anyOf"], {"type": "array", "items": _PROMPT_SCHEMA}]}),
]
Biases = Annotated[dict[str, float], Field(max_length=MAX_BIASES), BeforeValidator(_check_num_biases)]
Strings = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=(), coerce_numbers_to_str=False)

    def ignored(self, template: str = "") -> list[str]:
        """Dotted names of the fields that nothing reads, safe for a header. `template`: source of the chat template,
        which reads fields of messages that are unknown here."""
        names: list[str] = []
        for name in self.iter_ignored(template):
            if name not in names:
                names.append(name)
            if len(names) > MAX_IGNORED:
                break
        clean = ["".join(char if char.isascii() and char.isprintable() and char not in ', "' else "?" for char in name)
                 for name in names[:MAX_IGNORED]]  # fmt: skip
        return [name[:64] for name in clean] + (["..."] if len(names) > MAX_IGNORED else [])

    def iter_ignored(self, template: str) -> Iterator[str]:
        yield from self.__pydantic_extra__ or ()
        for name, value in self.__dict__.items():
            bodies = value if isinstance(value, list) else [value]
            for each in bodies if bodies and isinstance(bodies[0], Body) else ():
                yield from (f"{name}.{inner}" for inner in each.iter_ignored(template))


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


@dataclass(frozen=True, slots=True)
class Structured:
    """A constraint on the output. `kind`: one of STRUCTURED_KINDS."""

    kind: str
    value: str  # the schema or the tags as JSON, the expression, the choices as a JSON list, or the grammar


class JsonSchema(Body):
    name: str | None = None
    schema_: Any = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: Objects | None = None  # these and `triggers`, or `format`: of a structural tag
    triggers: Strings | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(Body):
    """vLLM's newer form of the guided_* fields."""

    json_: Any = Field(default=None, alias="json")
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


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


class KvLeaseBody(Body):
    """Pages on their way between servers: where they are (kv_source), or how long to keep them (kv_publish)."""

    lease: str = Field(max_length=64)
    address: str = Field(default="", max_length=256)
    ttl: float = 30.0
    salt: str | None = Field(default=None, max_length=62)


class GenerationBody(Body):
    """What completions and chat have in common."""

    model: str | None = None
    n: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Strings | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Int | None = None
    truncate_prompt_tokens: Int | None = Field(default=None, ge=-1)
    return_token_ids: bool | None = None
    resume_token_ids: TokenIds | None = None
    return_timeline: bool | None = None
    return_prefix_break: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = Field(default=None, ge=-10, le=10)  # of a beam search
    priority: Int | None = Field(default=None, ge=-100, le=100)
    deadline_ms: float | None = Field(default=None, gt=0, le=86_400_000)
    lane: Literal["interactive", "batch"] | None = None
    response_format: ResponseFormat | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_control: CacheControlBody | None = None
    cache_salt: str | None = Field(default=None, max_length=256)
    kv_policy: str | None = None
    kv_budget: Int | None = None
    kv_source: KvLeaseBody | None = None
    kv_publish: KvLeaseBody | None = None

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

    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.include_usage() and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def iter_ignored(self, template: str) -> Iterator[str]:
        yield from super().iter_ignored(template)
        if self.stream_options is not None and not self.stream:
            yield "stream_options"
        elif self.stream_options and self.stream_options.continuous_usage_stats and not self.include_usage():
            yield "stream_options.continuous_usage_stats"
        if self.length_penalty is not None and not self.use_beam_search:
            yield "length_penalty"

    def _guided(self) -> list[Structured]:
        newer = self.structured_outputs or StructuredOutputs()
        schema = self.guided_json if self.guided_json is not None else newer.json_
        choice = self.guided_choice if self.guided_choice is not None else newer.choice
        texts = {"regex": self.guided_regex or newer.regex, "grammar": self.guided_grammar or newer.grammar}
        texts["structural_tag"] = newer.structural_tag
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
        if wanted.type == "structural_tag":
            tags = {"structures": wanted.structures, "triggers": wanted.triggers, "format": wanted.format}
            return [Structured("structural_tag", _json(tags))]
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise ValueError("response_format json_schema has no schema")
        return [Structured("json_schema", _json(wanted.json_schema.schema_))]


class CompletionBody(GenerationBody):
    prompt: Prompts
    echo: bool | None = None
    logprobs: Int | None = None
    suffix: str | None = None
    best_of: Int | None = None
    add_special_tokens: bool | None = None
    prompt_embeds: Any = None

    def prompts(self) -> list[str | list[int]]:
        return _separate(self.prompt)


class Message(Body):
    role: str = Field(max_length=_MAX_ROLE)
    content: str | Objects | None = None
    name: str | None = None
    tool_calls: Objects | None = None
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

    def iter_ignored(self, template: str) -> Iterator[str]:
        yield from (name for name in self.__pydantic_extra__ or () if name not in template)
        if isinstance(self.content, list):
            yield from unknown_names("content", self.content, ("type", "text"))


class ChatBody(GenerationBody):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = Field(default=None, max_length=16)
    include_reasoning: bool | None = None
    thinking_token_budget: Int | None = Field(default=None, ge=0)

    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def iter_ignored(self, template: str) -> Iterator[str]:
        yield from super().iter_ignored(template)
        yield from (f"chat_template_kwargs.{name}" for name in self.chat_template_kwargs or () if name not in template)
        if self.reasoning_effort is not None and "reasoning_effort" not in template and "thinking" not in template:
            yield "reasoning_effort"
        functions = [tool["function"] for tool in self.tools or () if isinstance(tool.get("function"), dict)]
        if self.tool_choice in (None, "auto") and any(function.get("strict") for function in functions):
            yield "tools.function.strict"  # arguments follow their schema only where a call is forced


class EmbeddingBody(Body):
    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    truncate_prompt_tokens: Int | None = Field(default=None, ge=-1)
    normalize: bool | None = None
    prompt_name: str | None = Field(default=None, max_length=128)

    def prompts(self) -> list[str | list[int]]:
        return _separate(self.input)


class TokenizeBody(Body):
    """Text, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    def iter_ignored(self, template: str) -> Iterator[str]:
        yield from super().iter_ignored(template)
        if self.messages is not None and self.add_special_tokens is not None:
            yield "add_special_tokens"  # the template decides


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds


def content_text(content: str | Objects) -> str:
    """Text of a message's content, as a string or in parts. Raises ValueError for parts that are not text."""
    return content if isinstance(content, str) else "".join(map(_part_text, content))


def _part_text(part: dict[str, Any]) -> str:
    text = part.get("text")
    if part.get("type", "text") != "text" or not isinstance(text, str):
        raise ValueError(f"content of type {str(part.get('type'))[:40]!r} is not supported: this model reads text only")
    return text


def _separate(prompt: str | list[Any]) -> list[str | list[int]]:
    """One prompt or many -> a list of prompts."""
    single = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    return [prompt] if single else list(prompt)


def unknown_names(prefix: str, values: Iterable[dict[str, Any]], known: tuple[str, ...]) -> Iterator[str]:
    """Dotted names of what is not `known` in objects that have no model of their own."""
    return (f"{prefix}.{name}" for value in values for name in value if name not in known)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


class BatchBody(Body):
    input_file_id: str = Field(max_length=128)
    endpoint: str = Field(max_length=128)
    completion_window: str = Field(max_length=16)
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = Field(default=None, max_length=16)
