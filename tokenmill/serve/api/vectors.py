"""Texts and pairs through the engine of an embedding or reranking model: what the routes for vectors, scores and labels
share.

Tokenizes as the model wants it (engine/embedding/inputs.py), goes through admission like a generation, waits, and gives
one list of numbers for each input. Knows no answer's shape.
"""

from __future__ import annotations

import base64
import contextlib
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from tokenmill.checkpoint.embedding_files import EmbeddingSettings
from tokenmill.engine.embedding.inputs import Input, InputMaker, score_of
from tokenmill.errors import UserError
from tokenmill.serve.api.exchange import record_of, unless_gone
from tokenmill.serve.api.usage import cost_of, usage_of
from tokenmill.serve.callers import Caller
from tokenmill.serve.errors import ApiError
from tokenmill.serve.generation import VectorWish
from tokenmill.serve.service import Service
from tokenmill.types import SamplingParams

MAX_TEXTS = 2048  # as OpenAI's limit
_MAX_GROWTH = 8  # texts of all pairs, written out, to the largest body
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Computed:
    """What the engine answered, in the order of the inputs, and what it took."""

    vectors: list[list[float]]
    usage: dict[str, Any]


def settings_of(service: Service, *kinds: str) -> EmbeddingSettings:
    """The settings of a model of one of these kinds; ApiError for any other model."""
    settings = service.identity.embedding
    if settings is None:
        raise ApiError(
            400, f"{service.names[0]} generates text: serve an embedding or reranking model for this", code="model_kind"
        )
    if settings.kind not in kinds:
        raise ApiError(400, f"{service.names[0]} is not a model for this: use {settings.routes}", code="model_kind")
    return settings


class VectorCall:
    """One HTTP request for vectors or scores. `limit`: tokens that texts are cut to; None: too long is an error."""

    def __init__(self, request: Request, service: Service, caller: Caller, param: str, truncate: int | None) -> None:
        self._request = request
        self._service = service
        self._caller = caller
        self._param = param
        self.inputs = InputMaker(service.tokenizer, service.identity.embedding, service.context)
        self._limit = self._resolved(truncate)

    def _resolved(self, wanted: int | None) -> int | None:
        most = self.inputs.max_tokens
        if wanted is None:
            return None
        if wanted == 0 or wanted > most:
            problem = f"truncate_prompt_tokens is {wanted}: give 1 to {most}, or -1 for what fits"
            raise ApiError(400, problem, param="truncate_prompt_tokens")
        return most if wanted < 0 else wanted

    def check_number(self, number: int) -> None:
        limit = min(max(MAX_TEXTS, self._service.config.max_prompts), self._service.admission.capacity)
        if not 0 < number <= limit:
            raise ApiError(400, f"{number} texts in one request: give 1 to {limit}", param=self._param)

    def _check_written(self, pairs: list[tuple[str, str]], more: int) -> None:
        """A query is part of every pair: a body of a megabyte could be gigabytes of text."""
        lengths = [len(first) + len(second) + more for first, second in pairs]
        self._service.check_size(max(lengths), self._param)
        limit = _MAX_GROWTH * self._service.config.max_body_bytes
        if sum(lengths) > limit:
            problem = f"the pairs have {sum(lengths)} characters together, the limit of this server is {limit}"
            raise ApiError(413, problem, param=self._param)

    async def texts(self, prompts: list[str | list[int]], prompt: str = "") -> Computed:
        """Vectors, or logits, of single texts."""
        self.check_number(len(prompts))
        written = [each if isinstance(each, list) else self.inputs.prepared(each, prompt) for each in prompts]
        if any(not each for each in prompts):
            raise ApiError(400, "a text is empty: give at least one character", param=self._param)
        encoded = await self._encode(written, special=True)
        with self._refusals():
            found = [self.inputs.text(ids, self._limit) for ids in encoded]
        return await self._compute(found)

    async def scores(
        self, pairs: list[tuple[str, str]], instruction: str | None = None
    ) -> tuple[list[float], dict[str, Any]]:
        """One number for each pair."""
        self.check_number(len(pairs))
        self._check_written(pairs, len(instruction or ""))
        settings = settings_of(self._service, "classify", "rerank")
        inputs, limit = self.inputs, self._limit
        score_ids: tuple[int, ...] = ()
        if inputs.has_template:
            encoded = await self._encode([inputs.framed(*pair, instruction) for pair in pairs], special=False)
            with self._refusals():
                found = [inputs.question(ids, limit) for ids in encoded]
                score_ids = inputs.score_ids()
        else:
            if instruction is not None:
                raise ApiError(400, "instruction is not supported: a cross-encoder takes none", param="instruction")
            names = list(dict.fromkeys(text for pair in pairs for text in pair))  # a query is in many pairs
            ids = dict(zip(names, await self._encode(names, special=False), strict=True))
            with self._refusals():
                found = [inputs.pair(ids[first], ids[second], limit) for first, second in pairs]
        computed = await self._compute(found, score_ids)
        with self._refusals():
            return [score_of(settings, each) for each in computed.vectors], computed.usage

    async def _encode(self, texts: list[Any], special: bool) -> list[list[int]]:
        with self._refusals():
            return await self._service.encode(texts, client=self._caller.client, special=special)

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """What is wrong with a text is the client's to correct."""
        try:
            yield
        except UserError as error:
            code = "context_length_exceeded" if "context" in error.problem else None
            raise ApiError(400, str(error), param=self._param, code=code) from None

    async def _compute(self, inputs: list[Input], score_ids: tuple[int, ...] = ()) -> Computed:
        opening = self._service.open(
            [each.token_ids for each in inputs],
            lambda _length: _PARAMS,
            self._caller,
            streaming=False,
            vectors=VectorWish([each.second for each in inputs], score_ids),
        )
        generation = await unless_gone(self._request, opening)
        try:
            generation.num_truncated_tokens = sum(each.cut for each in inputs)
            await unless_gone(self._request, generation.result())
            usage = usage_of(generation, record_of(self._request))
            vectors = [member.embedding for member in generation.members]
            counts: dict[str, Any] = {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["prompt_tokens"]}
            if generation.num_truncated_tokens:
                counts["prompt_tokens_details"] = {"truncated_tokens": generation.num_truncated_tokens}
            return Computed(vectors, counts | cost_of(generation))
        finally:
            generation.close()


def shown_vector(vector: list[float], encoding: str | None) -> list[float] | str:
    if encoding != "base64":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def answer_head(kind: str, request: Request, model: str) -> dict[str, Any]:
    return {"id": f"{kind}-{record_of(request).request_id}", "created": int(time.time()), "model": model}
