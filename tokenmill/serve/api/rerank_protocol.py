"""What clients of the routes for scores, labels and Ollama's embeddings may send. Like protocol.py: nothing is decided
here."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from tokenmill.serve.api.adapter_protocol import OllamaOptions
from tokenmill.serve.api.protocol import Body, Int, Prompts, Strings

_MAX_DOCUMENTS = 1 << 14


class _Truncating(Body):
    model: str | None = None
    truncate_prompt_tokens: Int | None = Field(default=None, ge=-1)


class RerankBody(_Truncating):
    query: str = Field(min_length=1)
    documents: Annotated[list[Any], Field(min_length=1, max_length=_MAX_DOCUMENTS)]
    top_n: Int | None = Field(default=None, ge=1)
    return_documents: bool | None = None
    max_tokens_per_doc: Int | None = Field(default=None, ge=1)  # Cohere's: a pair is cut to what fits
    instruction: str | None = None

    @field_validator("documents")
    @classmethod
    def _check_documents(cls, documents: list[Any]) -> list[Any]:
        for each in documents:
            text = each.get("text") if isinstance(each, dict) else each
            if not isinstance(text, str):
                raise ValueError('a document is a text, or an object {"text": ...}')
        return documents

    def texts(self) -> list[str]:
        return [each["text"] if isinstance(each, dict) else each for each in self.documents]

    def truncation(self) -> int | None:
        if self.truncate_prompt_tokens is None and self.max_tokens_per_doc is not None:
            return -1
        return self.truncate_prompt_tokens


class ScoreBody(_Truncating):
    text_1: str | Strings
    text_2: str | Strings
    instruction: str | None = None

    def pairs(self) -> list[tuple[str, str]]:
        """One with each, or each with its counterpart. Raises ValueError where the numbers do not fit."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(first) == 1:
            first = first * len(second)
        if not first or len(first) != len(second):
            raise ValueError(f"text_1 has {len(first)} texts, text_2 {len(second)}: give one, or as many, in text_1")
        return list(zip(first, second, strict=True))


class ClassifyBody(_Truncating):
    input: Prompts

    def prompts(self) -> list[str | list[int]]:
        single = isinstance(self.input, str) or (self.input and isinstance(self.input[0], int))
        return [self.input] if single else list(self.input)


class OllamaEmbedBody(Body):
    model: str | None = None
    input: str | Strings
    truncate: bool | None = None
    dimensions: Int | None = None
    options: OllamaOptions | None = None
    keep_alive: Any = None


class OllamaEmbeddingsBody(Body):
    model: str | None = None
    prompt: str
    options: OllamaOptions | None = None
    keep_alive: Any = None
