"""Scores and labels: /v1/rerank (the shape of Jina and Cohere), /v1/score and /v1/classify (vLLM's).

For cross-encoders and causal rerankers, and for classifiers of single texts.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tokenmill.engine.embedding.inputs import probabilities
from tokenmill.serve.api.caller import caller_of
from tokenmill.serve.api.exchange import json_response
from tokenmill.serve.api.reading import body_schema, read_body
from tokenmill.serve.api.rerank_protocol import ClassifyBody, RerankBody, ScoreBody
from tokenmill.serve.api.vectors import VectorCall, answer_head, settings_of
from tokenmill.serve.errors import ApiError
from tokenmill.serve.service import Service


def add_rerank_routes(app: FastAPI, service: Service) -> None:
    router = APIRouter()

    @router.post("/rerank", openapi_extra=body_schema(RerankBody), include_in_schema=False)
    @router.post("/v2/rerank", openapi_extra=body_schema(RerankBody), include_in_schema=False)
    @router.post("/v1/rerank", openapi_extra=body_schema(RerankBody))
    async def rerank(request: Request) -> Response:
        body = await read_body(request, service, RerankBody)
        caller, model = caller_of(request, service, body), service.check_model(body.model)
        settings_of(service, "classify", "rerank")
        documents = body.texts()
        call = VectorCall(request, service, caller, "documents", body.truncation())
        pairs = [(body.query, each) for each in documents]
        scores, usage = await call.scores(pairs, body.instruction)
        best = sorted(range(len(scores)), key=lambda number: (-scores[number], number))
        results: list[dict[str, Any]] = []
        for number in best[: body.top_n or len(best)]:
            result: dict[str, Any] = {"index": number, "relevance_score": scores[number]}
            if body.return_documents is not False:
                result["document"] = {"text": documents[number]}
            results.append(result)
        return json_response(answer_head("rerank", request, model) | {"results": results, "usage": usage})

    @router.post("/score", openapi_extra=body_schema(ScoreBody), include_in_schema=False)
    @router.post("/v1/score", openapi_extra=body_schema(ScoreBody))
    async def score(request: Request) -> Response:
        body = await read_body(request, service, ScoreBody)
        caller, model = caller_of(request, service, body), service.check_model(body.model)
        settings_of(service, "classify", "rerank")
        try:
            pairs = body.pairs()
        except ValueError as error:
            raise ApiError(400, str(error), param="text_2") from None
        call = VectorCall(request, service, caller, "text_2", body.truncate_prompt_tokens)
        scores, usage = await call.scores(pairs, body.instruction)
        data = [{"index": number, "object": "score", "score": value} for number, value in enumerate(scores)]
        return json_response(answer_head("score", request, model) | {"object": "list", "data": data, "usage": usage})

    @router.post("/classify", openapi_extra=body_schema(ClassifyBody), include_in_schema=False)
    @router.post("/v1/classify", openapi_extra=body_schema(ClassifyBody))
    async def classify(request: Request) -> Response:
        body = await read_body(request, service, ClassifyBody)
        caller, model = caller_of(request, service, body), service.check_model(body.model)
        settings = settings_of(service, "classify")
        call = VectorCall(request, service, caller, "input", body.truncate_prompt_tokens)
        computed = await call.texts(body.prompts())
        data = []
        for number, logits in enumerate(computed.vectors):
            shares = probabilities(settings, logits)
            label = settings.labels[max(range(len(shares)), key=shares.__getitem__)]
            data.append({"index": number, "label": label, "probs": shares, "num_classes": len(shares)})
        shown = {"object": "list", "data": data, "usage": computed.usage}
        return json_response(answer_head("classify", request, model) | shown)

    app.include_router(router)
