"""Ollama's /api/embed and /api/embeddings, as a thin adapter over the vectors of an embedding model.

Texts that are too long are cut unless `truncate` is false, as Ollama does it.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tokenmill.engine.embedding.inputs import shortened
from tokenmill.serve.api.caller import caller_of
from tokenmill.serve.api.embeddings import embed_texts, of_states
from tokenmill.serve.api.exchange import json_response
from tokenmill.serve.api.protocol import EmbeddingBody
from tokenmill.serve.api.reading import body_schema, read_body, validate
from tokenmill.serve.api.rerank_protocol import OllamaEmbedBody, OllamaEmbeddingsBody
from tokenmill.serve.callers import Caller
from tokenmill.serve.service import Service


def add_ollama_embedding_routes(app: FastAPI, service: Service) -> None:
    router = APIRouter(prefix="/api")

    @router.post("/embed", openapi_extra=body_schema(OllamaEmbedBody))
    async def embed(request: Request) -> Response:
        began = time.monotonic()
        body = await read_body(request, service, OllamaEmbedBody)
        caller, model = caller_of(request, service, body), service.check_model(body.model)
        wanted: dict[str, Any] = {"input": body.input, "dimensions": body.dimensions}
        wanted["truncate_prompt_tokens"] = None if body.truncate is False else -1
        vectors, tokens = await _vectors(request, service, caller, validate(EmbeddingBody, wanted))
        shown: dict[str, Any] = {"model": model, "embeddings": vectors, "prompt_eval_count": tokens}
        return json_response(shown | {"total_duration": int((time.monotonic() - began) * 1e9), "load_duration": 0})

    @router.post("/embeddings", openapi_extra=body_schema(OllamaEmbeddingsBody))
    async def embeddings(request: Request) -> Response:
        body = await read_body(request, service, OllamaEmbeddingsBody)
        caller, _ = caller_of(request, service, body), service.check_model(body.model)
        wanted = validate(EmbeddingBody, {"input": body.prompt, "truncate_prompt_tokens": -1})
        vectors, _ = await _vectors(request, service, caller, wanted, "prompt")
        return json_response({"embedding": vectors[0]})

    app.include_router(router)


async def _vectors(
    request: Request, service: Service, caller: Caller, body: EmbeddingBody, param: str = "input"
) -> tuple[list[list[float]], int]:
    if service.identity.embedding is None:
        computed, dimension = await of_states(request, service, caller, body), None
    else:
        computed, dimension = await embed_texts(request, service, caller, body, param)
    vectors = [shortened(vector, dimension or len(vector), normalize=True) for vector in computed.vectors]
    return vectors, int(computed.usage["prompt_tokens"])
