"""/v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's bodies and answers."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from tokenmill.serve.api.caller import caller_of
from tokenmill.serve.api.exchange import unless_gone
from tokenmill.serve.api.protocol import Body
from tokenmill.serve.api.reading import body_schema, read_body
from tokenmill.serve.errors import ApiError
from tokenmill.serve.service import Service


class LoadLoraBody(Body):
    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False  # also if there is one of that name
    base_model_name: str | None = None


class UnloadLoraBody(Body):
    lora_name: str = ""
    lora_int_id: int | None = None
    drain: bool = False  # wait for its requests to end, and take no new ones


def add_lora_routes(app: FastAPI, service: Service) -> None:
    router = APIRouter()

    @router.post("/v1/load_lora_adapter", openapi_extra=body_schema(LoadLoraBody))
    async def load(request: Request) -> Response:
        body = await read_body(request, service, LoadLoraBody)
        client = caller_of(request, service, body).client
        if not body.lora_name or not body.lora_path:
            raise ApiError(400, "both lora_name and lora_path must be given", param="lora_name")
        if body.base_model_name is not None and body.base_model_name not in service.names:
            raise ApiError(404, f"the base model here is '{service.names[0]}'", param="base_model_name")
        with service.metered(client):
            loading = service.loras.load(body.lora_name, body.lora_path, body.load_inplace, client)
            await unless_gone(request, loading)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", openapi_extra=body_schema(UnloadLoraBody))
    async def unload(request: Request) -> Response:
        body = await read_body(request, service, UnloadLoraBody)
        client = caller_of(request, service, body).client
        if not body.lora_name:
            raise ApiError(400, "lora_name must be given", param="lora_name")
        with service.metered(client):
            await unless_gone(request, service.loras.unload(body.lora_name, body.drain, client))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    app.include_router(router)
