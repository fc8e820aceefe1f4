"""/v1/embeddings: one vector for each text.

Of an embedding model its own: pooled, projected and with the prompts that its files name. Of a generating model the
final hidden state of the last token: good for likeness within one model, not what a trained embedding model gives.
Vectors have length one, unless the request says otherwise.
"""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tokenmill.engine.embedding.inputs import shortened
from tokenmill.errors import UserError
from tokenmill.serve.api.caller import caller_of
from tokenmill.serve.api.exchange import json_response, record_of, to_json, unless_gone
from tokenmill.serve.api.protocol import EmbeddingBody
from tokenmill.serve.api.reading import body_schema, check_prompts, read_body
from tokenmill.serve.api.sampling import resolve_truncation
from tokenmill.serve.api.usage import cost_of, usage_of
from tokenmill.serve.api.vectors import Computed, VectorCall, settings_of, shown_vector
from tokenmill.serve.callers import Caller
from tokenmill.serve.errors import ApiError
from tokenmill.serve.generation import VectorWish
from tokenmill.serve.service import Service
from tokenmill.types import SamplingParams


def add_embedding_routes(app: FastAPI, service: Service) -> None:
    router = APIRouter()

    @router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingBody))
    async def embeddings(request: Request) -> Response:
        body = await read_body(request, service, EmbeddingBody)
        caller, model = caller_of(request, service, body), service.check_model(body.model)
        if service.identity.embedding is None:
            computed, dimension = await of_states(request, service, caller, body), None
        else:
            computed, dimension = await embed_texts(request, service, caller, body)
        data = []
        for number, vector in enumerate(computed.vectors):
            kept = shortened(vector, dimension or len(vector), body.normalize is not False)
            shown = msgspec.Raw(to_json(shown_vector(kept, body.encoding_format)))
            data.append({"object": "embedding", "index": number, "embedding": shown})
            await asyncio.sleep(0)  # thousands of numbers each: other requests get their turn
        return json_response({"object": "list", "model": model, "data": data, "usage": computed.usage})

    app.include_router(router)


async def embed_texts(
    request: Request, service: Service, caller: Caller, body: EmbeddingBody, param: str = "input"
) -> tuple[Computed, int]:
    """Vectors of an embedding model as it makes them, and the length that is wanted of them."""
    settings = settings_of(service, "embed")
    try:
        dimension = settings.check_dimensions(body.dimensions)
    except UserError as error:
        raise ApiError(400, str(error), param="dimensions") from None
    try:
        prompt = settings.prompt(body.prompt_name, None)
    except UserError as error:
        raise ApiError(400, str(error), param="prompt_name") from None
    call = VectorCall(request, service, caller, param, body.truncate_prompt_tokens)
    return await call.texts(body.prompts(), prompt), dimension


async def of_states(request: Request, service: Service, caller: Caller, body: EmbeddingBody) -> Computed:
    """Of a generating model: the state behind the last token."""
    if body.dimensions is not None:
        raise ApiError(400, "dimensions is not supported: this model has one size", param="dimensions")
    if body.prompt_name is not None:
        raise ApiError(400, "prompt_name is not supported: this model has no prompts", param="prompt_name")
    cut = resolve_truncation(body.truncate_prompt_tokens, 1, service.context)
    prompts = check_prompts(body.prompts(), service, "input", cut=cut is not None)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    opening = service.open(
        prompts, lambda _length: params, caller, streaming=False, vectors=VectorWish(), max_prompt_tokens=cut
    )  # fmt: skip
    generation = await unless_gone(request, opening)
    try:
        await unless_gone(request, generation.result())
        usage = usage_of(generation, record_of(request))
        counts = {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["prompt_tokens"]}
        return Computed([member.embedding for member in generation.members], counts | cost_of(generation))
    finally:
        generation.close()
