"""/v1/usage: what a key has used and spent, and what is left of its budget. A key that may read /metrics sees all keys,
and what the device cost besides, so that the parts and the idle time add up to the bill."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tokenmill.serve.api.exchange import json_response, record_of
from tokenmill.serve.service import Service
from tokenmill.serve.tenants.accounts import Account, Accounts
from tokenmill.serve.tenants.keys import Client


def add_spending_routes(app: FastAPI, service: Service) -> None:
    router = APIRouter()

    @router.get("/v1/usage")
    async def usage(request: Request) -> Response:
        client, accounts = record_of(request).client, service.accounts
        shown = {"object": "usage", **_shown(accounts.account(client)), "budget": _budget(accounts, client)}
        if client.sees_metrics:
            shown["keys"] = [_shown(each) for each in accounts.by_owner.values()]
            shown["device"] = _device(accounts)
        return json_response(shown)

    app.include_router(router)


def measure_costs(service: Service) -> None:
    """Set the metrics that are not counted as they come."""
    accounts, metrics, now = service.accounts, service.metrics, time.time()
    for client in accounts.clients:
        if client.max_budget:
            left = max(0.0, client.max_budget - accounts.spent(client, now))
            metrics.set("key_budget_left_dollars", left, accounts.label(client))
    if accounts.prices is not None and accounts.prices.by_device:
        device = accounts.measure(time.monotonic())
        for state in ("busy", "idle"):
            metrics.set("device_seconds", getattr(device, f"{state}_seconds"), state)
            metrics.set("device_cost_dollars", getattr(device, f"{state}_cost"), state)


def _device(accounts: Accounts) -> dict[str, Any] | None:
    """None unless device time has a price."""
    prices = accounts.prices
    if prices is None or not prices.by_device:
        return None
    measured = msgspec.structs.asdict(accounts.measure(time.monotonic()))
    return {"dollars_per_hour": prices.hour, "basis": prices.basis, **measured}


def _shown(account: Account) -> dict[str, Any]:
    models = {model: msgspec.structs.asdict(each) for model, each in account.models.items()}
    return {"key": account.name, "cost": account.cost, "models": models}


def _budget(accounts: Accounts, client: Client) -> dict[str, Any] | None:
    if not client.max_budget:
        return None
    spent = accounts.spent(client, time.time())
    return {
        "max_budget": client.max_budget,
        "budget_duration": client.budget_duration or None,
        "spent": spent,
        "remaining": max(0.0, client.max_budget - spent),
        "resets_at": accounts.resets_at(client),
    }
