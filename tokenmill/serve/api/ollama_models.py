"""What Ollama's clients ask about models: /api/tags, /api/ps, /api/show, /api/pull, /api/delete.

A model that was pulled is served under its name from then on, and loaded when it is asked for. Fetching and deleting
need operator rights, because they fill and empty the disk of the server.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tokenmill.checkpoint.sources import aliases, resolve
from tokenmill.checkpoint.sources.caches import bytes_here, folder_of, remove
from tokenmill.checkpoint.sources.hub_files import parse_request
from tokenmill.errors import UserError
from tokenmill.serve.api.adapter_protocol import OllamaModelBody
from tokenmill.serve.api.exchange import NDJSON, StreamedResponse, json_response, record_of, to_json
from tokenmill.serve.api.models import check_operator
from tokenmill.serve.api.reading import body_schema, read_body
from tokenmill.serve.errors import ApiError
from tokenmill.serve.fleet.fleet import Fleet
from tokenmill.serve.fleet.host import LOADED, Host
from tokenmill.serve.fleet.routing import may_use

_PROGRESS_SECONDS = 0.5
_FOREVER = 100 * 365 * 86400.0  # as Ollama shows a model that is not unloaded by itself


def add_ollama_model_routes(app: FastAPI, fleet: Fleet) -> None:
    router = APIRouter(prefix="/api")

    @router.get("/tags", include_in_schema=False)
    async def tags(request: Request) -> Response:
        client = record_of(request).client
        names = fleet.routes.names(client)
        for host in fleet.hosts.values():
            if host.service is not None and may_use(client, host.name):
                names += [(adapter.name, host.name) for adapter in host.service.loras.visible_to(client)]
        return json_response({"models": [_listed(fleet.hosts[own], name) for name, own in names]})

    @router.get("/ps")
    async def ps(request: Request) -> Response:
        """Models that are loaded now."""
        own = {own: None for _, own in fleet.routes.names(record_of(request).client)}
        hosts = [fleet.hosts[name] for name in own]
        loaded = [host for host in hosts if host.state == LOADED and host.service is not None]
        return json_response({"models": [_running(host) for host in loaded]})

    @router.post("/show", openapi_extra=body_schema(OllamaModelBody))
    async def show(request: Request) -> Response:
        body = await _body(request, fleet)
        return json_response(_shown(fleet.find(_name(body), record_of(request).client)))

    @router.post("/pull", openapi_extra=body_schema(OllamaModelBody))
    async def pull(request: Request) -> Response:
        """Fetch a model by its alias or Hugging Face id, with progress unless `stream` is false."""
        check_operator(request)
        body = await _body(request, fleet)
        name = _name(body).removesuffix(":latest")
        _check_source(name)
        if body.stream is False:
            lines = [line async for line in _pulling(fleet, name)]
            if "error" in lines[-1]:
                raise ApiError(400, lines[-1]["error"], param="model")
            return json_response(lines[-1])
        lines_of = _pulling(fleet, name)
        return StreamedResponse((to_json(line) + b"\n" async for line in lines_of), NDJSON, lambda: None)

    @router.delete("/delete", openapi_extra=body_schema(OllamaModelBody))
    async def delete(request: Request) -> Response:
        """Delete a model from the cache of the server; one that is served now stays."""
        check_operator(request)
        name = _name(await _body(request, fleet)).removesuffix(":latest")
        if await asyncio.to_thread(_is_served, fleet, name):
            raise ApiError(400, f"model '{name}' is served here: stop the server first", param="model")
        try:
            freed = await asyncio.to_thread(remove, name)
        except UserError as error:
            raise ApiError(404, str(error), param="model", code="model_not_found") from None
        return json_response({"status": "success", "freed_bytes": freed})

    app.include_router(router)


def _is_served(fleet: Fleet, name: str) -> bool:
    """By any of its names: an alias and the id of its repository may have the same files."""
    if any(name in (host.spec.source, *host.spec.names) for host in fleet.hosts.values()):
        return True
    folder = folder_of(name)
    paths = [host.path.resolve() for host in fleet.hosts.values() if host.path is not None]
    return folder is not None and any(path.is_relative_to(folder.resolve()) for path in paths)


async def _body(request: Request, fleet: Fleet) -> OllamaModelBody:
    assert fleet.default.service is not None
    return await read_body(request, fleet.default.service, OllamaModelBody)


def _name(body: OllamaModelBody) -> str:
    name = body.model or body.name
    if not name:
        raise ApiError(400, "model is missing", param="model")
    return name


def _check_source(name: str) -> None:
    """Raise ApiError for what is neither an alias nor on the Hub: clients name no paths of this machine."""
    if name not in aliases() and (parse_request(name) is None or Path(name).exists()):
        known = ", ".join(sorted(aliases()))
        problem = f"model '{name[:100]}' cannot be pulled: give a Hugging Face id such as org/name, or one of {known}"
        raise ApiError(404, problem, param="model", code="model_not_found")


def _details(host: Host) -> dict[str, Any]:
    identity = host.service.identity if host.service is not None else None
    family = identity.architecture if identity is not None else host.facts.architecture if host.facts else ""
    return {
        "parent_model": "",
        "format": "gguf" if host.path is not None and host.path.suffix == ".gguf" else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": identity.quantization if identity is not None else "",
    }


def _size(host: Host) -> int:
    if host.service is not None:
        return host.service.identity.weight_bytes
    return host.facts.weight_bytes if host.facts is not None else 0


def _listed(host: Host, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": _moment(host.created),
        "size": _size(host),
        "digest": "",
        "details": _details(host),
    }


def _running(host: Host) -> dict[str, Any]:
    assert host.service is not None
    left = host.keep_alive if host.busy or host.expires == math.inf else host.expires - time.monotonic()
    options = host.service.identity.options
    kv = int(options.get("memory") or 0)
    return {
        **_listed(host, host.name),
        "size": _size(host) + kv,
        "size_vram": _size(host) + kv if options.get("device") == "cuda" else 0,
        "context_length": host.service.context,
        "expires_at": _moment(time.time() + min(max(0.0, left), _FOREVER)),
    }


def _shown(host: Host) -> dict[str, Any]:
    service, facts, details = host.service, host.facts, _details(host)
    family = details["family"]
    info: dict[str, Any] = {"general.architecture": family}
    if service is not None:
        info |= {"general.name": service.identity.name, f"{family}.context_length": service.context}
    elif facts is not None:
        info |= {"general.name": facts.checkpoint, f"{family}.context_length": facts.trained_context}
    embeds = service is not None and service.identity.embedding is not None
    capabilities = ["embedding"] if embeds else ["completion"]
    if service is not None and service.template is not None:
        source = service.template.source
        capabilities += ["tools"] if "tools" in source else []
        capabilities += ["thinking"] if service.reasoning_style.parser is not None else []
    return {
        "modelfile": f"FROM {host.name}\n",  # where its files are is nobody's business
        "parameters": "\n".join(f"{name} {value}" for name, value in service.sampling_defaults.values.items())
        if service is not None
        else "",
        "template": service.template.source if service is not None and service.template is not None else "",
        "details": details,
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": _moment(host.created),
    }


async def _pulling(fleet: Fleet, name: str) -> AsyncIterator[dict[str, Any]]:
    """Ollama's lines: what is under way, then success or an error."""
    yield {"status": "pulling manifest"}
    fetching = asyncio.ensure_future(asyncio.to_thread(resolve, name, progress=False))
    try:
        while not fetching.done():
            await asyncio.wait((fetching,), timeout=_PROGRESS_SECONDS)
            done, total = await asyncio.to_thread(bytes_here, name)
            if total and not fetching.done():
                yield {"status": f"pulling {name}", "digest": name, "total": total, "completed": min(done, total)}
        found = fetching.result()
        yield {"status": "verifying sha256 digest"}
        await fleet.adopt(name)
        yield {"status": "success", "total": found.bytes}
    except UserError as error:
        yield {"error": str(error)}
    finally:
        fetching.cancel()  # the thread goes on: what it has fetched is not fetched again


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
