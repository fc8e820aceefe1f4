"""Routes that compute nothing: models, liveness and readiness, version, load, metrics."""

from __future__ import annotations

import hashlib
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tokenmill import __version__
from tokenmill.engine.messages import AdapterInfo
from tokenmill.hardware.machine import available_memory, total_memory
from tokenmill.serve.api.exchange import json_response, record_of
from tokenmill.serve.api.spending import measure_costs
from tokenmill.serve.errors import ApiError, engine_gone
from tokenmill.serve.service import Service


def add_info_routes(app: FastAPI, service: Service) -> None:
    router = APIRouter()

    @router.get("/v1/models")
    async def models(request: Request) -> Response:
        adapters = service.loras.visible_to(record_of(request).client)
        listed = [model_record(service, name) for name in service.names]
        listed += [adapter_record(service, each) for each in adapters]
        return json_response({"object": "list", "data": listed})

    @router.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Response:
        client = record_of(request).client
        service.loras.check_model(name, client)
        adapter = next((each for each in service.loras.visible_to(client) if each.name == name), None)
        return json_response(model_record(service, name) if adapter is None else adapter_record(service, adapter))

    @router.head("/livez", include_in_schema=False)
    @router.get("/livez")
    async def livez() -> Response:
        """Liveness: 200 while this process answers and would replace a failed engine, also while it does so."""
        if not service.engine.supervised:
            raise engine_gone("nobody supervises the engine")
        return json_response({"status": "ok", "engine": service.engine.state})

    @router.head("/readyz", include_in_schema=False)
    @router.head("/ping", include_in_schema=False)
    @router.head("/health", include_in_schema=False)
    @router.post("/ping", include_in_schema=False)
    @router.get("/ping")
    @router.get("/health")
    @router.get("/readyz")
    async def readyz() -> Response:
        """Readiness: 200 only if the engine computes, or answers within a second while it is idle."""
        if service.admission.draining:
            raise ApiError(503, "the server is shutting down", code="draining")
        is_ready, what = await service.engine.ready()
        if not is_ready:
            raise engine_gone(what)
        return json_response({"status": "ok", "engine": what})

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @router.get("/load")
    async def load(request: Request) -> Response:
        check_metrics_right(request)
        return json_response(load_of(service))

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        check_metrics_right(request)
        measure_service(service)
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.include_router(router)


def _measure_engine(service: Service) -> None:
    """Set the gauges that come with the heartbeats of the engine."""
    metrics, heartbeat = service.metrics, service.engine.heartbeat
    metrics.on_devices(heartbeat.devices)
    metrics.set("engine_resident_bytes", heartbeat.resident_bytes)
    metrics.set("host_memory_available_bytes", available_memory())
    metrics.set("host_memory_bytes", total_memory())
    metrics.set("requests_running_limit", service.admission.num_slots)


def check_metrics_right(request: Request) -> None:
    """Numbers of all keys together would tell one key about the others."""
    if not record_of(request).client.sees_metrics:
        raise ApiError(403, "this key may not read the server's metrics", code="metrics_right")


def measure_service(service: Service, whole: bool = True) -> None:
    """Set the metrics that are not counted as they come; `whole`: those of the server too."""
    service.metrics.set("engine_up", service.engine.state in ("ready", "asleep", "stopped"))
    service.metrics.set("predicted_ttft_seconds", service.admission.predict(0))
    _measure_engine(service)
    if whole:
        measure_costs(service)
    for outcome, count in (service.traffic_log.outcomes() if service.traffic_log is not None else {}).items():
        service.metrics.set("traffic_log_records", count, outcome)


def model_record(service: Service, name: str) -> dict[str, Any]:
    """The OpenAI record, with details of the served model."""
    identity, template = service.identity, service.template
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "tokenmill",
        "root": service.names[0],
        "parent": None,
        "max_model_len": service.context,
        "tokenmill": {
            "version": __version__,
            "architecture": identity.architecture,
            "task": identity.embedding.kind if identity.embedding is not None else "generate",
            "checkpoint": identity.name,
            "quantization": identity.quantization,
            "weight_bytes": identity.weight_bytes,
            "kv_cache_dtype": identity.options.get("kv_cache_dtype"),
            "executor": identity.options.get("executor"),
            "chat_template_sha256": None
            if template is None
            else hashlib.sha256(template.source.encode()).hexdigest()[:16],
        },
    }


def adapter_record(service: Service, adapter: AdapterInfo) -> dict[str, Any]:
    """An adapter as a model. Where its files are is nobody's business."""
    return {
        "id": adapter.name,
        "object": "model",
        "created": service.created,
        "owned_by": "tokenmill",
        "root": adapter.name,
        "parent": service.names[0],
        "max_model_len": service.context,
        "tokenmill": {"version": __version__, "rank": adapter.rank, "sha256": adapter.digest.hex()[:16]},
    }


def load_of(service: Service) -> dict[str, Any]:
    stats, admission = service.engine.stats, service.admission
    return {
        "server_load": service.engine.num_in_flight,
        "requests_running": stats.num_running,
        "requests_waiting": stats.num_waiting,
        "queued_requests": admission.num_waiting,
        "queued_tokens": admission.waiting_tokens,
        "kv_pages_total": stats.num_pages,
        "kv_pages_held": stats.num_pages_held,
        "kv_pages_cached": stats.num_pages_cached,
        "kv_pages_consistent": stats.pages_consistent,
        "kv_pages_checked": stats.pages_checked or service.engine.state == "stopped",  # it has none then
        "predicted_ttft_seconds": round(admission.predict(0), 4),
        "engine": service.engine.state,
        "engine_pid": service.engine.pid,
        "spare_engine_pid": service.engine.spare_pid,
    }
