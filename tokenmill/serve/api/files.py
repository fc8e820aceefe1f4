"""/v1/files: what a key uploads for its batches and what they write, as OpenAI's. Each key sees its own files only.

An upload goes to disk as it arrives; it is never in memory as a whole. Without --files-dir the routes say so.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, Response

from tokenmill.serve.api.exchange import ClientGoneError, json_response, record_of
from tokenmill.serve.errors import ApiError
from tokenmill.serve.files.multipart import FormReader, boundary_of
from tokenmill.serve.files.store import FileRecord, FileStore, Upload
from tokenmill.serve.service import Service

_MAX_FILENAME = 255
_MIN_EXPIRY, _MAX_EXPIRY = 3600, 30 * 86400  # seconds; OpenAI's
_WRITE_BYTES = 1 << 18  # collected before they are written, in a thread
_FORM_SCHEMA = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
    "required": ["file", "purpose"],
}


def add_file_routes(app: FastAPI, service: Service, files: FileStore) -> None:
    router = APIRouter()
    form = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM_SCHEMA}}}}

    @router.post("/v1/files", openapi_extra=form)
    async def upload(request: Request) -> Response:
        client = record_of(request).client
        with service.metered(client):
            reader = FormReader(boundary_of(request.headers.get("content-type", "")))
            receiving = await asyncio.to_thread(files.upload, client.owner, client.num_keys)
            try:
                await _receive(request, reader, receiving)
                purpose, seconds = _checked(reader)
                name = (reader.filename or "upload")[:_MAX_FILENAME]
                return json_response(_shown(await asyncio.to_thread(receiving.commit, name, purpose, seconds)))
            finally:
                await asyncio.to_thread(receiving.abort)

    @router.get("/v1/files")
    async def listed(
        request: Request, limit: int = 10_000, after: str = "", order: str = "desc", purpose: str = ""
    ) -> Response:
        found = files.listed(record_of(request).client.owner)
        found = [each for each in found if not purpose or each.purpose == purpose]
        return json_response(page(found if order != "asc" else found[::-1], _shown, limit, after, 10_000))

    @router.get("/v1/files/{file_id}")
    async def retrieve(request: Request, file_id: str) -> Response:
        return json_response(_shown(files.find(record_of(request).client.owner, file_id)))

    @router.get("/v1/files/{file_id}/content")
    async def content(request: Request, file_id: str) -> Response:
        owner = record_of(request).client.owner
        path = files.path(owner, files.find(owner, file_id).id)
        return FileResponse(path, media_type="application/octet-stream")

    @router.delete("/v1/files/{file_id}")
    async def delete(request: Request, file_id: str) -> Response:
        await asyncio.to_thread(files.delete, record_of(request).client.owner, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    app.include_router(router)


def add_missing_file_routes(app: FastAPI) -> None:
    """For a server that keeps no files."""

    async def missing(_request: Request) -> Response:
        raise ApiError(404, "this server keeps no files: start it with --files-dir DIR", code="files_off")

    for path in ("/v1/files", "/v1/batches"):
        for tail in ("", "/{rest:path}"):
            app.add_route(path + tail, missing, methods=["GET", "POST", "DELETE"], include_in_schema=False)


def page(found: list[Any], show: Any, limit: int, after: str, most: int) -> dict[str, Any]:
    """A list of records as OpenAI pages it: `after` is the id that the last page ended with."""
    if not 1 <= limit <= most:
        raise ApiError(400, f"limit must be 1 to {most}", param="limit")
    start = 0
    if after:
        start = next((place for place, each in enumerate(found, 1) if each.id == after), -1)
        if start < 0:
            raise ApiError(400, "after is the id of no entry of this list", param="after")
    shown = found[start : start + limit]
    return {
        "object": "list",
        "data": [show(each) for each in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": start + limit < len(found),
    }


async def _receive(request: Request, reader: FormReader, upload: Upload) -> None:
    pieces: list[bytes] = []
    size = 0
    try:
        async for data in request.stream():
            for piece in reader.feed(data):
                pieces.append(piece)
                size += len(piece)
            if size >= _WRITE_BYTES:
                await asyncio.to_thread(upload.write, b"".join(pieces))
                pieces, size = [], 0
    except ClientDisconnect:
        raise ClientGoneError from None
    if pieces:
        await asyncio.to_thread(upload.write, b"".join(pieces))
    if not reader.complete:
        raise ApiError(400, "the form cannot be read: it ends before its last boundary", code="invalid_form")


def _checked(reader: FormReader) -> tuple[str, int | None]:
    """The purpose, and the seconds after which the file expires."""
    if reader.filename is None:
        raise ApiError(400, "the form has no file", param="file")
    purpose = reader.fields.get("purpose")
    if purpose != "batch":
        raise ApiError(400, "purpose must be batch: this server uses files for nothing else", param="purpose")
    text = reader.fields.get("expires_after[seconds]")
    if text is None:
        return purpose, None
    if not text.isdecimal() or not _MIN_EXPIRY <= int(text) <= _MAX_EXPIRY:
        raise ApiError(400, f"give {_MIN_EXPIRY} to {_MAX_EXPIRY} seconds", param="expires_after[seconds]")
    return purpose, int(text)


def _shown(record: FileRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.bytes,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
    }
