"""/v1/batches: create, look at, list and cancel, as OpenAI's. What a batch does is batches/runner.py."""

from __future__ import annotations

import re

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tokenmill.serve.api.caller import caller_of
from tokenmill.serve.api.exchange import json_response, record_of
from tokenmill.serve.api.files import page
from tokenmill.serve.api.protocol import BatchBody
from tokenmill.serve.api.reading import body_schema, read_body
from tokenmill.serve.batches.lines import ENDPOINTS
from tokenmill.serve.batches.record import BatchRecord
from tokenmill.serve.batches.runner import BatchRunner
from tokenmill.serve.errors import ApiError
from tokenmill.serve.service import Service

_UNITS = {"m": 60, "h": 3600, "d": 86400}
_MAX_WINDOW = 30 * 86400
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([mhd])")


def add_batch_routes(app: FastAPI, service: Service, batches: BatchRunner) -> None:
    router = APIRouter()

    @router.post("/v1/batches", openapi_extra=body_schema(BatchBody))
    async def create(request: Request) -> Response:
        body = await read_body(request, service, BatchBody)
        client = caller_of(request, service, body).client
        if body.endpoint not in ENDPOINTS:
            raise ApiError(400, f"endpoint must be {' or '.join(ENDPOINTS)}", param="endpoint")
        window = _window(body.completion_window)
        with service.metered(client):
            record = await batches.create(client.owner, body.endpoint, body.input_file_id, window, body.metadata)
        return json_response(record.shown())

    @router.get("/v1/batches")
    async def listed(request: Request, limit: int = 20, after: str = "") -> Response:
        found = batches.listed(record_of(request).client.owner)
        return json_response(page(found, BatchRecord.shown, limit, after, 100))

    @router.get("/v1/batches/{batch_id}")
    async def retrieve(request: Request, batch_id: str) -> Response:
        return json_response(batches.find(record_of(request).client.owner, batch_id).shown())

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> Response:
        return json_response((await batches.cancel(record_of(request).client.owner, batch_id)).shown())

    app.include_router(router)


def _window(text: str) -> tuple[str, int]:
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= _MAX_WINDOW:
        raise ApiError(400, "completion_window must be like 24h, at most 30d", param="completion_window")
    return text, seconds
