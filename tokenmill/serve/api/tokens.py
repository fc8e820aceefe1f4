"""Tokens of a text or of a conversation, and back. What never enters the engine is metered here."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tokenmill.errors import UserError
from tokenmill.serve.api.caller import caller_of
from tokenmill.serve.api.exchange import json_response, unless_gone
from tokenmill.serve.api.protocol import DetokenizeBody, TokenizeBody
from tokenmill.serve.api.reading import body_schema, read_body
from tokenmill.serve.errors import ApiError
from tokenmill.serve.service import Service
from tokenmill.serve.tenants.keys import Client


def add_token_routes(app: FastAPI, service: Service) -> None:
    router = APIRouter()

    @router.post("/tokenize", openapi_extra=body_schema(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, service, TokenizeBody)
        client = caller_of(request, service, body).client
        service.check_model(body.model)
        with service.metered(client) as charged:
            tokens = await unless_gone(request, _tokenize(service, body, client))
            charged.append(len(tokens))
            shown: dict[str, Any] = {"count": len(tokens), "max_model_len": service.context, "tokens": tokens}
            if body.return_token_strs:
                shown["token_strs"] = await asyncio.to_thread(lambda: [*map(service.tokenizer.id_to_piece, tokens)])
            return json_response(shown)

    @router.post("/detokenize", openapi_extra=body_schema(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, service, DetokenizeBody)
        client = caller_of(request, service, body).client
        service.check_model(body.model)
        if body.tokens and max(body.tokens) >= service.identity.vocab_size:
            raise ApiError(400, f"give token ids below {service.identity.vocab_size}", param="tokens")
        with service.metered(client) as charged:
            charged.append(len(body.tokens))
            text = await asyncio.to_thread(service.tokenizer.decode, body.tokens, skip_special_tokens=False)
            return json_response({"prompt": text})

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """As vLLM's: evaluation harnesses ask for it before they count tokens by /tokenize."""
        return json_response(describe_tokenizer(service))

    app.include_router(router)


def describe_tokenizer(service: Service) -> dict[str, Any]:
    tokenizer, template = service.tokenizer, service.template
    bos, eos = tokenizer.bos_id, next(iter(service.identity.eos_ids), None)
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "model_max_length": service.context,
        "vocab_size": service.identity.vocab_size,
        "bos_token": None if bos is None else tokenizer.id_to_piece(bos),
        "eos_token": None if eos is None else tokenizer.id_to_piece(eos),
        "pad_token": None,
        "chat_template": None if template is None else template.source,
    }


async def _tokenize(service: Service, body: TokenizeBody, client: Client) -> list[int]:
    try:
        if body.messages is not None and body.prompt is None:
            messages = [message.plain() for message in body.messages]
            shown = body.add_generation_prompt is not False
            text = await service.render(messages, add_generation_prompt=shown, client=client)
            return (await service.encode([text], client=client, chat=True))[0]
        if body.prompt is None or body.messages is not None:
            raise ApiError(400, "give either prompt or messages", param="prompt")
        special = body.add_special_tokens is not False
        return (await service.encode([body.prompt], client=client, special=special))[0]
    except (UserError, ValueError) as error:
        param = "prompt" if body.messages is None else "messages"
        raise ApiError(400, str(error), param=param) from None
