"""Routes about the models of a server: which there are, whether they are loaded, sleep and wake as vLLM has them, and
the probes and numbers of all of them together. They come before those of info.py, which know one model only."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tokenmill.serve.api.exchange import Record, json_response, record_of, unless_gone
from tokenmill.serve.api.info import adapter_record, check_metrics_right, load_of, measure_service, model_record
from tokenmill.serve.api.tokens import describe_tokenizer
from tokenmill.serve.errors import ApiError, engine_gone
from tokenmill.serve.fleet.fleet import Fleet
from tokenmill.serve.fleet.host import LOADED, Host
from tokenmill.serve.fleet.routing import may_use
from tokenmill.serve.metrics import render


def add_model_routes(app: FastAPI, fleet: Fleet) -> None:
    _add_list(app, fleet)
    _add_probes(app, fleet)
    _add_numbers(app, fleet)
    _add_sleep(app, fleet)


def check_operator(request: Request) -> None:
    """Loading and unloading concerns all who use the server."""
    if not record_of(request).client.operates:
        raise ApiError(403, "this key may not load or unload models: it takes one with `admin`", code="operator_right")


def _add_list(app: FastAPI, fleet: Fleet) -> None:
    router = APIRouter(include_in_schema=False)

    @router.get("/v1/models")
    async def models(request: Request) -> Response:
        client = record_of(request).client
        listed = [_record(fleet.hosts[own], name) for name, own in fleet.routes.names(client)]
        for service in fleet.services_for(client):
            listed += [adapter_record(service, adapter) for adapter in service.loras.visible_to(client)]
        return json_response({"object": "list", "data": listed})

    @router.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        client = record_of(request).client
        for each, own in fleet.routes.names(client):
            if each == name:
                return json_response(_record(fleet.hosts[own], name))
        for service in fleet.services_for(client):
            adapter = next((each for each in service.loras.visible_to(client) if each.name == name), None)
            if adapter is not None:
                return json_response(adapter_record(service, adapter))
        return json_response(_record(fleet.find(name, client), name))

    @router.get("/tokenizer_info")
    async def tokenizer_info(request: Request, model: str | None = None) -> Response:
        """Of a model, or of the first that the key may use; one that was never loaded is, for this."""
        client = record_of(request).client
        host = fleet.find(model, client)
        if host.service is None:
            async with fleet.lease(host, client=client):
                pass
        assert host.service is not None
        return json_response(describe_tokenizer(host.service))

    app.include_router(router)


def _record(host: Host, name: str) -> dict[str, Any]:
    """OpenAI's, also of a model that was not loaded yet."""
    state = host.moving or host.state
    if host.service is not None:
        record = model_record(host.service, name)
        record["tokenmill"]["state"] = state
        return record
    facts = host.facts
    return {
        "id": name,
        "object": "model",
        "created": host.created,
        "owned_by": "tokenmill",
        "root": host.name,
        "parent": None,
        "max_model_len": facts.context if facts is not None else None,
        "tokenmill": {
            "state": state,
            **({"architecture": facts.architecture, "weight_bytes": facts.weight_bytes} if facts is not None else {}),
        },
    }


def _add_probes(app: FastAPI, fleet: Fleet) -> None:
    router = APIRouter(include_in_schema=False)

    @router.head("/livez")
    @router.get("/livez")
    async def livez(request: Request) -> Response:
        if not all(service.engine.supervised for service in fleet.services):
            raise engine_gone("nobody supervises the engine")
        default = fleet.default.service
        assert default is not None
        return json_response({"status": "ok", "engine": default.engine.state, **_states(fleet, record_of(request))})

    @router.head("/readyz")
    @router.head("/ping")
    @router.head("/health")
    @router.post("/ping")
    @router.get("/ping")
    @router.get("/health")
    @router.get("/readyz")
    async def readyz(request: Request, model: str | None = None) -> Response:
        """With `model` of that one; else 200 while any model answers, asleep or not, since the others may recover."""
        if fleet.draining or any(service.admission.draining for service in fleet.services):
            raise ApiError(503, "the server is shutting down", code="draining")
        hosts = list(fleet.hosts.values())
        if model is not None:  # the edge has asked for a key
            own = dict(fleet.routes.names(record_of(request).client)).get(model)
            if own is None:
                raise ApiError(404, "this model is not served here", param="model", code="model_not_found")
            hosts = [fleet.hosts[own]]
        found = {host.name: await fleet.ready(host) for host in hosts}
        if not any(is_ready for is_ready, _ in found.values()):
            shown = [host.name for host in hosts if _sees(record_of(request), host)]
            each = [f"{name}: {found[name][1]}" if len(found) > 1 else found[name][1] for name in shown]
            raise engine_gone("; ".join(each) or "no model is ready")
        told = {"engine": next(what for is_ready, what in found.values() if is_ready)}
        shown = [host.name for host in hosts if _sees(record_of(request), host)]
        several = {"models": {name: found[name][1] for name in shown}} if len(found) > 1 and shown else {}
        return json_response({"status": "ok", **told, **several})

    app.include_router(router)


def _states(fleet: Fleet, record: Record | None = None) -> dict[str, Any]:
    """Of those models that the key may use; None: of all."""
    shown = [host for host in fleet.hosts.values() if record is None or _sees(record, host)]
    if len(fleet.hosts) == 1 or not shown:
        return {}
    return {"models": {host.name: host.moving or host.state for host in shown}}


def _sees(record: Record, host: Host) -> bool:
    """Probes need no key; the names of models are for those who have one."""
    return not record.stranger and may_use(record.client, host.name)


def _add_numbers(app: FastAPI, fleet: Fleet) -> None:
    router = APIRouter(include_in_schema=False)

    @router.get("/load")
    async def load(request: Request) -> Response:
        check_metrics_right(request)
        loads = {host.name: load_of(host.service) for host in fleet.hosts.values() if host.service is not None}
        default = fleet.default
        whole = {**loads[default.name], "model_state": default.moving or default.state}
        if len(fleet.hosts) > 1:
            for name in ("server_load", "requests_running", "requests_waiting", "queued_requests", "queued_tokens"):
                whole[name] = sum(each[name] for each in loads.values())
            whole |= {**_states(fleet), "waiting_for_models": fleet.num_waiting, "by_model": loads}
        return json_response(whole)

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        check_metrics_right(request)
        for host in fleet.hosts.values():
            host.measure()
            if host.service is not None:
                measure_service(host.service, whole=host is fleet.default)
        text = render([host.metrics for host in fleet.hosts.values()])
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    app.include_router(router)


def _add_sleep(app: FastAPI, fleet: Fleet) -> None:
    router = APIRouter()

    @router.post("/sleep")
    async def sleep(request: Request, level: int = 1, model: str | None = None) -> Response:
        """Give the memory of a model back, or of all: level 1 keeps its process, level 2 ends it. The next request for
        it loads it again."""
        check_operator(request)
        if level not in (1, 2):
            raise ApiError(400, f"level is {level}: give 1 or 2", param="level")
        for host in _meant(fleet, request, model):
            await unless_gone(request, fleet.sleep(host, level))
        return json_response(_sleep_states(fleet))

    @router.post("/wake_up")
    async def wake_up(request: Request, model: str | None = None) -> Response:
        """Load a model, or the first."""
        check_operator(request)
        for host in _meant(fleet, request, model or fleet.default.name):
            await unless_gone(request, fleet.load(host))
        return json_response(_sleep_states(fleet))

    @router.get("/is_sleeping")
    async def is_sleeping(request: Request, model: str | None = None) -> Response:
        """Whether a model, or the first, gave its memory back."""
        (host,) = _meant(fleet, request, model or fleet.default.name)
        return json_response({"is_sleeping": host.state != LOADED})

    app.include_router(router)


def _meant(fleet: Fleet, request: Request, model: str | None) -> list[Host]:
    return list(fleet.hosts.values()) if model is None else [fleet.find(model, record_of(request).client)]


def _sleep_states(fleet: Fleet) -> dict[str, Any]:
    return {"models": {host.name: host.moving or host.state for host in fleet.hosts.values()}}
