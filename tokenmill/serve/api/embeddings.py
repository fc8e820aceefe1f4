"""/v1/embeddings: the final hidden state of the last token of each text, scaled to length one.

These are the states of a generating model: good for likeness within one model, not those of a trained embedding model.
"""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tokenmill.serve.api.caller import caller_of
from tokenmill.serve.api.exchange import json_response, record_of, to_json, unless_gone
from tokenmill.serve.api.protocol import EmbeddingBody
from tokenmill.serve.api.reading import body_schema, check_prompts, read_body
from tokenmill.serve.api.sampling import resolve_truncation
from tokenmill.serve.api.usage import cost_of, usage_of
from tokenmill.serve.errors import ApiError
from tokenmill.serve.service import Service
from tokenmill.types import SamplingParams


def add_embedding_routes(app: FastAPI, service: Service) -> None:
    router = APIRouter()

    @router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingBody))
    async def embeddings(request: Request) -> Response:
        body = await read_body(request, service, EmbeddingBody)
        caller, model = caller_of(request, service, body), service.check_model(body.model)
        if body.dimensions is not None:
            raise ApiError(400, "dimensions is not supported: this model has one size", param="dimensions")
        cut = resolve_truncation(body.truncate_prompt_tokens, 1, service.context)
        prompts = check_prompts(body.prompts(), service, "input", cut=cut is not None)
        params = SamplingParams(max_tokens=1, temperature=0.0)
        opening = service.open(
            prompts, lambda _length: params, caller, streaming=False, embeds=True, max_prompt_tokens=cut
        )
        generation = await unless_gone(request, opening)
        try:
            await unless_gone(request, generation.result())
            usage = usage_of(generation, record_of(request))
            vectors = [member.embedding for member in generation.members]
        finally:
            generation.close()
        data = []
        for number, vector in enumerate(vectors):
            shown = msgspec.Raw(to_json(_shown(_unit(vector), body.encoding_format)))
            data.append({"object": "embedding", "index": number, "embedding": shown})
            await asyncio.sleep(0)  # thousands of numbers each: other requests get their turn
        counts = {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["prompt_tokens"]}
        used = counts | cost_of(generation)
        return json_response({"object": "list", "model": model, "data": data, "usage": used})

    app.include_router(router)


def _unit(vector: list[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in vector)) or 1.0
    return [value / length for value in vector]


def _shown(vector: list[float], encoding: str | None) -> Any:
    if encoding != "base64":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
