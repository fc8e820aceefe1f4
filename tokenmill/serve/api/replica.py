"""What a router asks a replica: which pages it has cached, how busy it is, and where a caller's page names begin.

`/v1/replica/events` is a long poll: it answers when pages changed, or after `wait` seconds, with all changes since
`after`, or with every name where those are no longer known. Each model has events of its own, asked for by `model`; one
that was never loaded has none yet. Page names tell which prompts are cached, so only a key that may operate the server
reads them; any key may ask for its own root.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Query, Request
from starlette.responses import Response

from tokenmill.engine.kv.page_names import salted_root
from tokenmill.serve.api.exchange import json_response, record_of
from tokenmill.serve.errors import ApiError
from tokenmill.serve.fleet.fleet import Fleet
from tokenmill.serve.service import Service
from tokenmill.serve.tenants.keys import Client

_MAX_WAIT = 30.0
_SETTLE = 0.01  # seconds: changes of several steps leave in one answer
_NEVER_LOADED: dict[str, Any] = {"feed": "", "sequence": 0, "root": b"", "page_size": 0, "changes": []}
_NO_LOAD = dict.fromkeys(
    ("active", "slots", "waiting", "waiting_tokens", "prompt_token_seconds", "service_seconds", "kv_usage"), 0
)


def add_replica_routes(app: FastAPI, service: Service, fleet: Fleet | None) -> None:
    """`fleet`: None where `service` is of the only model."""
    router = APIRouter()

    def service_of(model: str | None, client: Client) -> Service | None:
        """None: the model was never loaded. The first of a split stands for it, and no turn is taken."""
        if fleet is None or model is None:
            return service
        known = fleet.routes.all_of(model, client)
        return (fleet.hosts[known[0]] if known else fleet.find(model, client)).service

    @router.get("/v1/replica/events")
    async def events(
        request: Request,
        model: str | None = Query(None, max_length=256),
        feed: str = Query("", max_length=64),
        after: int = 0,
        wait: float = Query(0.0, ge=0, le=_MAX_WAIT),
    ) -> Response:
        client = record_of(request).client
        if not client.operates:
            raise ApiError(403, "this key may not read the names of cached pages", code="operator_right")
        models = [service.names[0]] if fleet is None else list(fleet.hosts)
        asked = service_of(model, client)
        if asked is None:
            return json_response({**_NEVER_LOADED, "models": models, "load": {**_NO_LOAD, "state": "stopped"}})
        pages = asked.engine.pages
        await pages.open(asked.engine.identity if asked.engine.state == "ready" else None)
        if wait and feed == pages.feed and after == pages.sequence:
            await pages.wait(feed, after, wait)
            await asyncio.sleep(_SETTLE)
        return json_response({**_pages_since(asked, feed, after), "models": models, "load": replica_load(asked)})

    @router.get("/v1/replica/root")
    async def root(
        request: Request, model: str | None = Query(None, max_length=256), cache_salt: str = Query("", max_length=256)
    ) -> Response:
        """Where the names of this caller's pages begin, for this model or adapter of its."""
        client = record_of(request).client
        asked = service_of(model, client)
        if asked is None:
            return json_response({"feed": "", "root": b"", "page_size": 0})
        adapter = asked.loras.find(model, client)
        salt = asked.salt_of(client, cache_salt)
        pages = asked.engine.pages
        name = salted_root(pages.root, salt if adapter is None else adapter.digest + salt) if pages.root else b""
        return json_response({"feed": pages.feed, "root": name, "page_size": _page_size(asked)})

    app.include_router(router)


def _pages_since(service: Service, feed: str, after: int) -> dict[str, Any]:
    pages, identity = service.engine.pages, service.identity
    shown: dict[str, Any] = {
        "feed": pages.feed,
        "sequence": pages.sequence,
        "root": pages.root,
        "page_size": _page_size(service),
    }
    changes = pages.since(feed, after)
    if changes is None:
        template = service.template
        model = {"path": str(Path(service.engine.path).resolve()), "names": service.names, "context": service.context}
        model["load_format"] = identity.options.get("load_format", "auto")
        model["chat_template"] = template.source if template is not None else ""
        return shown | {"snapshot": list(pages.pages.items()), "model": model}
    told = [{"sequence": each.sequence, "stored": each.stored, "removed": each.removed} for each in changes]
    return shown | {"changes": told}


def _page_size(service: Service) -> int:
    return int(service.identity.options.get("page_size") or 0)


def replica_load(service: Service) -> dict[str, Any]:
    """How long a prompt would wait, in the terms of a router's cost."""
    admission, stats = service.admission, service.engine.stats
    return {
        "state": "draining" if admission.draining else service.engine.state,
        "active": admission.num_active,
        "slots": admission.num_slots,
        "waiting": admission.num_waiting,
        "waiting_tokens": admission.waiting_tokens,
        "prompt_token_seconds": 1 / admission.pace.prompt_rate if admission.pace.prompt_rate else 0.0,
        "service_seconds": admission.pace.service_seconds or 0.0,
        "kv_usage": round(stats.kv_usage, 4),
        "query_tokens": stats.num_prefix_query_tokens,
        "hit_tokens": stats.num_prefix_hit_tokens,
    }
